//! Keys whose accounts were closed lately. If the lane loses its memory, the node tells of them too: others may know of them only what
//! was true before this node spent.

use std::collections::VecDeque;

use crate::sync::account::ClosedKey;
use crate::sync::message::{Grant, REMEMBERED_US};

/// While so many keys of a lane are remembered, accounts stay open.
const CLOSED_KEYS_MAX: usize = 1 << 16;

/// Keys whose accounts were closed lately.
#[derive(Debug, Default)]
pub(super) struct ClosedKeys {
    /// Each with the lane's time in the last reply before it was closed; the oldest first.
    remembered: VecDeque<(i64, ClosedKey)>,
    /// Those that a lane which lost its memory is to be told of.
    to_tell: VecDeque<ClosedKey>,
}

impl ClosedKeys {
    /// Whether one more can be remembered.
    pub(super) fn has_room(&self) -> bool {
        self.remembered.len() + self.to_tell.len() < CLOSED_KEYS_MAX
    }

    /// Remembers a key that was closed when the lane's time was `heard_us` by the last reply.
    pub(super) fn remember(&mut self, key: ClosedKey, heard_us: i64) {
        self.remembered.push_back((heard_us, key));
    }

    /// Forgets keys that were closed long before the lane's time `heard_us`, when its store still had its memory.
    pub(super) fn forget(&mut self, heard_us: i64) {
        let is_over = |(closed_us, _): &(i64, ClosedKey)| *closed_us + REMEMBERED_US <= heard_us;
        while self.remembered.front().is_some_and(is_over) {
            self.remembered.pop_front();
        }
        if self.remembered.len() <= self.remembered.capacity() / 4 {
            self.remembered.shrink_to(2 * self.remembered.len());
        }
    }

    /// The lane has lost its memory.
    pub(super) fn tell_all(&mut self) {
        self.to_tell.extend(self.remembered.drain(..).map(|(_, key)| key));
    }

    /// The keys that the lane is to be told of, in the order in which it is.
    pub(super) fn to_tell(&self) -> &VecDeque<ClosedKey> {
        &self.to_tell
    }

    /// The lane was told of the first of them, and has answered with these `grants`, at `heard_us` of its time.
    pub(super) fn told(&mut self, grants: &[Grant], heard_us: i64) {
        for grant in grants {
            let Some(mut key) = self.to_tell.pop_front() else { return };
            match grant {
                Grant::Given(_) => self.remembered.push_back((heard_us, key)),
                Grant::OtherQuota { version, scale } => {
                    key.follow(*version, *scale);
                    self.to_tell.push_back(key);
                }
                Grant::Foreign => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::{Curve, Scale};
    use crate::sync::message::Given;
    use crate::time::Timestamp;

    const SCALE: Scale =
        Scale { rate: 10, token: 1_000_000, burst: 100_000_000, curve: Curve::Refill };

    fn remembered(closed: &ClosedKeys) -> usize {
        closed.remembered.len()
    }

    #[test]
    fn closed_key_is_forgotten_four_seconds_of_the_lane_later() {
        let mut closed = ClosedKeys::default();
        closed.remember(ClosedKey::of(SCALE), 1_000_000);
        closed.remember(ClosedKey::of(SCALE), 2_000_000);
        for (heard_us, left) in [(4_999_999, 2), (5_000_000, 1), (5_999_999, 1), (6_000_000, 0)] {
            closed.forget(heard_us);
            assert_eq!(remembered(&closed), left, "at {heard_us}");
        }
    }

    #[test]
    fn closed_keys_are_told_once_and_remembered_from_then_on() {
        let mut closed = ClosedKeys::default();
        (0..3).for_each(|_| closed.remember(ClosedKey::of(SCALE), 1_000_000));
        closed.tell_all();
        assert_eq!((remembered(&closed), closed.to_tell().len()), (0, 3));

        let other = Scale { token: 2_000_000, burst: 20_000_000, ..SCALE };
        let refused = Grant::OtherQuota { version: 7, scale: other };
        closed.told(&[Grant::Foreign, refused], 9_000_000);
        assert_eq!((remembered(&closed), closed.to_tell().len()), (0, 2));
        let versions: Vec<_> =
            closed.to_tell().iter().map(|key| key.entry(Timestamp::ZERO).version).collect();
        assert_eq!(versions, [0, 7], "it comes again with the quota that the store holds");
        closed.told(&[Grant::Given(Given::default())], 9_000_000);
        assert_eq!((remembered(&closed), closed.to_tell().len()), (1, 1));
    }

    #[test]
    fn accounts_stay_open_while_no_more_keys_can_be_remembered() {
        let mut closed = ClosedKeys::default();
        (1..CLOSED_KEYS_MAX).for_each(|_| closed.remember(ClosedKey::of(SCALE), 1_000_000));
        assert!(closed.has_room());
        closed.remember(ClosedKey::of(SCALE), 1_000_000);
        assert!(!closed.has_room());
        closed.tell_all();
        assert!(!closed.has_room(), "they are still to be told of");
    }
}
