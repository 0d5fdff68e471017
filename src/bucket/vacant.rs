//! Places that were given up and wait for another key, first come first.

use std::collections::VecDeque;

use crate::time::Timestamp;

/// Such places. They form a list in memory that they have themselves: where a key's print is looked
/// for first is of no use while there is no key.
#[derive(Debug, Default)]
pub(super) struct Vacant {
    first: u32,
    last: u32,
    /// From when on so many of the next places may be given again.
    spans: VecDeque<(Timestamp, u32)>,
}

impl Vacant {
    /// Adds a place, which may be given again from then on, and not before those that were added
    /// before it.
    pub(super) fn push(&mut self, from: Timestamp, place: u32, next: &mut [u32]) {
        match self.spans.back_mut() {
            Some((same, places)) if *same == from => *places += 1,
            _ => self.spans.push_back((from, 1)),
        }
        if self.first == 0 {
            self.first = place;
        } else {
            next[self.last as usize] = place;
        }
        (self.last, next[place as usize]) = (place, 0);
    }

    /// Takes the first place out, if it may be given again by `now`.
    pub(super) fn pop(&mut self, now: Timestamp, next: &[u32]) -> Option<u32> {
        let (from, places) = self.spans.front_mut()?;
        if *from > now {
            return None;
        }
        *places -= 1;
        if *places == 0 {
            self.spans.pop_front();
        }
        let place = self.first;
        self.first = next[place as usize];
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    #[test]
    fn places_come_in_their_order_and_not_before_their_time() {
        let (mut vacant, mut next) = (Vacant::default(), [7; 10]);
        assert_eq!(vacant.pop(at(9), &next), None);
        for (from, place) in [(1, 3), (1, 9), (2, 1), (4, 5)] {
            vacant.push(at(from), place, &mut next);
        }
        assert_eq!(vacant.spans.len(), 3);
        assert_eq!(vacant.pop(at(0), &next), None);
        assert_eq!(vacant.pop(at(1), &next), Some(3));
        next[3] = 8;
        assert_eq!(vacant.pop(at(3), &next), Some(9));
        assert_eq!(vacant.pop(at(3), &next), Some(1));
        assert_eq!(vacant.pop(at(3), &next), None, "the last one's time has not come");
        vacant.push(at(5), 3, &mut next);
        assert_eq!((vacant.pop(at(5), &next), vacant.pop(at(5), &next)), (Some(5), Some(3)));
        assert_eq!(vacant.pop(at(5), &next), None);
        vacant.push(at(6), 2, &mut next);
        assert_eq!(vacant.pop(at(6), &next), Some(2), "as the first one did, after all were taken");
    }
}
