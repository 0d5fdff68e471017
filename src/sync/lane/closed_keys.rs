//! Keys whose accounts were closed lately. If the lane loses its memory, the node tells of them too: others may know of them only what
//! was true before this node spent.

use std::collections::VecDeque;

use crate::sync::account::ClosedKey;
use crate::sync::message::{Grant, REMEMBERED_US};

/// Keys whose accounts were closed lately.
#[derive(Debug, Default)]
pub(super) struct ClosedKeys {
    /// Each with the lane's time in the last reply before it was closed; the oldest first.
    kept: VecDeque<(i64, ClosedKey)>,
    /// Those that a lane which lost its memory is to be told of.
    unregistered: VecDeque<ClosedKey>,
}

impl ClosedKeys {
    /// Remembers a key that was closed when the lane's time was `heard_us` by the last reply.
    pub(super) fn keep(&mut self, key: ClosedKey, heard_us: i64) {
        self.kept.push_back((heard_us, key));
    }

    /// Forgets keys that were closed long before the lane's time `heard_us`, when its store still had its memory.
    pub(super) fn forget(&mut self, heard_us: i64) {
        let is_over = |(closed_us, _): &(i64, ClosedKey)| *closed_us + REMEMBERED_US <= heard_us;
        while self.kept.front().is_some_and(is_over) {
            self.kept.pop_front();
        }
        if self.kept.len() <= self.kept.capacity() / 4 {
            self.kept.shrink_to(2 * self.kept.len());
        }
    }

    /// The lane has lost its memory.
    pub(super) fn register_all(&mut self) {
        self.unregistered.extend(self.kept.drain(..).map(|(_, key)| key));
    }

    /// The keys that the lane is to be told of, in the order in which it is.
    pub(super) fn unregistered(&self) -> &VecDeque<ClosedKey> {
        &self.unregistered
    }

    /// The lane has answered the first of them with these `grants`, at `heard_us` of its time.
    pub(super) fn registered(&mut self, grants: &[Grant], heard_us: i64) {
        for grant in grants {
            let Some(mut key) = self.unregistered.pop_front() else { return };
            match grant {
                Grant::Given(_) => self.kept.push_back((heard_us, key)),
                Grant::OtherQuota { version, scale } => {
                    key.follow(*version, *scale);
                    self.unregistered.push_back(key);
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
    use crate::time::Timestamp;

    const SCALE: Scale =
        Scale { rate: 10, token: 1_000_000, burst: 100_000_000, curve: Curve::Refill };

    fn kept(closed: &ClosedKeys) -> usize {
        closed.kept.len()
    }

    #[test]
    fn closed_key_is_forgotten_four_seconds_of_the_lane_later() {
        let mut closed = ClosedKeys::default();
        closed.keep(ClosedKey::of(SCALE), 1_000_000);
        closed.keep(ClosedKey::of(SCALE), 2_000_000);
        for (heard_us, left) in [(4_999_999, 2), (5_000_000, 1), (5_999_999, 1), (6_000_000, 0)] {
            closed.forget(heard_us);
            assert_eq!(kept(&closed), left, "at {heard_us}");
        }
    }

    #[test]
    fn closed_keys_are_told_once_and_remembered_from_then_on() {
        let mut closed = ClosedKeys::default();
        (0..3).for_each(|_| closed.keep(ClosedKey::of(SCALE), 1_000_000));
        closed.register_all();
        assert_eq!((kept(&closed), closed.unregistered().len()), (0, 3));

        let other = Scale { token: 2_000_000, burst: 20_000_000, ..SCALE };
        let refused = Grant::OtherQuota { version: 7, scale: other };
        closed.registered(&[Grant::Foreign, refused], 9_000_000);
        assert_eq!((kept(&closed), closed.unregistered().len()), (0, 2));
        let versions: Vec<_> =
            closed.unregistered().iter().map(|key| key.entry(Timestamp::ZERO).version).collect();
        assert_eq!(versions, [0, 7], "it comes again with the quota that the store holds");
    }
}
