//! What threads may still be giving out of their purses, though the bucket counts it as spent.

use crate::bucket::GIVEN_UP_US;
use crate::time::Timestamp;
use crate::weakness::{Weakness, is_weak};

/// Tokens spent that the store must take for held, until the purses that they went to are given up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fresh {
    /// Until when purses may be in use.
    until: Timestamp,
    /// So many of the tokens that were not reported had been spent then.
    spent: i64,
    at: Timestamp,
    /// Depth told to the store that is not the bucket's, but there for purses.
    reserved: i64,
}

impl Fresh {
    /// Threads had purses of the bucket up to now.
    pub(super) fn found_hot(&mut self, now: Timestamp) {
        self.until = now.plus_micros(GIVEN_UP_US);
    }

    /// Whether purses may be in use.
    pub(super) fn is_live(&self, now: Timestamp) -> bool {
        now < self.until && !is_weak(Weakness::PursesReported)
    }

    /// How many of `unsent` tokens are not to be reported yet.
    pub(super) fn hold_back(&mut self, unsent: i64, now: Timestamp) -> i64 {
        if !self.is_live(now) {
            self.spent = 0;
            return 0;
        }
        if now.micros_since(self.at) < GIVEN_UP_US {
            return unsent;
        }
        let held_back = unsent - self.spent.min(unsent);
        (self.spent, self.at) = (held_back, now);
        held_back
    }

    /// Sets so much of the depth apart that is told to the store.
    pub(super) fn reserve(&mut self, depth: i64) {
        self.reserved = depth;
    }

    /// What of the depth is not the bucket's.
    pub(super) fn reserved(&self, now: Timestamp) -> i64 {
        if self.is_live(now) { self.reserved } else { 0 }
    }

    /// Nothing of what was spent so far will be reported as spent from the lease.
    pub(super) fn forget(&mut self) {
        (self.spent, self.reserved) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    #[test]
    fn what_was_spent_while_a_bucket_was_hot_is_held_back_until_purses_are_given_up() {
        let mut fresh = Fresh::default();
        let now = 1_000_000;
        assert_eq!(fresh.hold_back(7, at(now)), 0, "it was never hot");
        fresh.found_hot(at(now));
        fresh.reserve(9);
        assert_eq!((fresh.hold_back(7, at(now)), fresh.reserved(at(now))), (7, 9));
        assert_eq!(fresh.hold_back(9, at(now + 1)), 9);
        let later = now + GIVEN_UP_US;
        fresh.found_hot(at(later));
        assert_eq!(fresh.hold_back(10, at(later)), 3, "seven were spent so long ago");
        let later = later + GIVEN_UP_US;
        assert_eq!(fresh.hold_back(3, at(later)), 0, "it is not hot any more");
        assert_eq!(fresh.reserved(at(later)), 0);
        fresh.found_hot(at(later));
        assert_eq!(fresh.hold_back(2, at(later)), 2, "and now it is again");
        fresh.forget();
        let later = later + GIVEN_UP_US;
        fresh.found_hot(at(later));
        assert_eq!(fresh.hold_back(2, at(later)), 2, "others than those");
    }
}
