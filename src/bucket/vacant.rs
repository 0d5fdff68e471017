//! Places whose keys were evicted and that wait for another key, first come first.

/// Such places. They form a list in memory that they have themselves: where a key is looked for first
/// is of no use while there is no key.
#[derive(Debug, Default)]
pub(super) struct Vacant {
    first: u32,
    last: u32,
}

impl Vacant {
    /// Adds a place.
    pub(super) fn push(&mut self, place: u32, next: &mut [u32]) {
        if self.first == 0 {
            self.first = place;
        } else {
            next[self.last as usize] = place;
        }
        (self.last, next[place as usize]) = (place, 0);
    }

    /// Takes the first place out.
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
    fn places_are_taken_in_the_order_in_which_they_were_added() {
        let (mut vacant, mut next) = (Vacant::default(), [7; 10]);
        assert_eq!(vacant.pop(&next), None);
        for place in [3, 9, 1] {
            vacant.push(place, &mut next);
        }
        assert_eq!(vacant.pop(&next), Some(3));
        next[3] = 8;
        vacant.push(3, &mut next);
        let rest: Vec<u32> = std::iter::from_fn(|| vacant.pop(&next)).collect();
        assert_eq!(rest, [9, 1, 3]);
        vacant.push(2, &mut next);
        assert_eq!((vacant.pop(&next), vacant.pop(&next)), (Some(2), None));
    }
}
