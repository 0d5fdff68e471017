//! Places in a table whose keys were evicted, first in, first out.

/// A list of free places. It uses the array that holds the home of each place's key: a free place has no
/// key, so its entry holds the next free place instead.
#[derive(Debug, Default)]
pub(super) struct FreeList {
    /// 0 if the list is empty.
    first: u32,
    last: u32,
}

impl FreeList {
    /// Adds a place.
    pub(super) fn push(&mut self, place: u32, next: &mut [u32]) {
        if self.first == 0 {
            self.first = place;
        } else {
            next[self.last as usize] = place;
        }
        (self.last, next[place as usize]) = (place, 0);
    }

    /// Removes the first place.
    pub(super) fn pop(&mut self, next: &[u32]) -> Option<u32> {
        let place = self.first;
        if place == 0 {
            return None;
        }
        self.first = next[place as usize];
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_places_are_given_in_the_order_in_which_they_were_added() {
        let (mut free, mut next) = (FreeList::default(), [7; 10]);
        assert_eq!(free.pop(&next), None);
        for place in [3, 9, 1] {
            free.push(place, &mut next);
        }
        assert_eq!(free.pop(&next), Some(3));
        next[3] = 8;
        free.push(3, &mut next);
        let rest: Vec<u32> = std::iter::from_fn(|| free.pop(&next)).collect();
        assert_eq!(rest, [9, 1, 3]);
        free.push(2, &mut next);
        assert_eq!((free.pop(&next), free.pop(&next)), (Some(2), None));
    }
}
