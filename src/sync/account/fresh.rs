//! What threads may still be giving out of their purses, though the bucket counts it as spent.

use crate::bucket::VOID_US;
use crate::time::Timestamp;
use crate::weakness::{Weakness, is_weak};

/// Tokens spent that the store must take for held, until the purses that they went to are void.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fresh {
    /// Until when purses may be in use.
    until: Timestamp,
    /// So many of the tokens that were not reported had been spent then.
    spent: i64,
    at: Timestamp,
}

impl Fresh {
    /// Threads had purses of the bucket up to now.
    pub(super) fn found_hot(&mut self, now: Timestamp) {
        self.until = now.plus_micros(VOID_US);
    }

    /// How many of `unsent` tokens are not to be reported yet.
    pub(super) fn hold_back(&mut self, unsent: i64, now: Timestamp) -> i64 {
        if now >= self.until || is_weak(Weakness::PursesReported) {
            return 0;
        }
        if now.micros_since(self.at) < VOID_US {
            return unsent;
        }
        let held_back = unsent - self.spent.min(unsent);
        (self.spent, self.at) = (held_back, now);
        held_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    #[test]
    fn what_was_spent_while_a_bucket_was_hot_is_held_back_until_purses_are_void() {
        let mut fresh = Fresh::default();
        let now = 1_000_000;
        assert_eq!(fresh.hold_back(7, at(now)), 0, "it was never hot");
        fresh.found_hot(at(now));
        assert_eq!(fresh.hold_back(7, at(now)), 7);
        assert_eq!(fresh.hold_back(9, at(now + 1)), 9);
        fresh.found_hot(at(now + VOID_US));
        assert_eq!(fresh.hold_back(10, at(now + VOID_US)), 3, "seven were spent so long ago");
        assert_eq!(fresh.hold_back(3, at(now + 2 * VOID_US)), 0, "it is not hot any more");
    }
}
