//! Charges that are taken back: some, or all.

use super::key::{Key, flow};
use crate::quota::{Curve, Scale};
use crate::sync::message::{Backdated, Entry, NUMBER_MAX};

impl Key {
    /// Takes back charges of tokens that were not used: the level rises, up to what it would be without charges. Of a window
    /// that has ended nothing comes back.
    pub(super) fn refund(&mut self, entry: &Entry) {
        let Backdated { tokens, from_us } = entry.refunded;
        if tokens == 0 || !self.takes_back(from_us, entry) {
            return;
        }
        // What was spent beyond the burst, because another plan had allowed it, comes first: it is not in the level.
        let of_beyond = tokens.min(self.beyond[0]);
        self.beyond[0] -= of_beyond;
        self.raise(tokens - of_beyond);
        self.charged = (self.charged - tokens).max(0);
    }

    /// Takes back what the end of a lease has charged and its node never spent.
    pub(super) fn take_back_unspent(&mut self, entry: &Entry) {
        let Scale { rate, token, curve, .. } = self.scale;
        let Backdated { mut tokens, from_us: stamp_us } = entry.unspent;
        let ended_us = (stamp_us / entry.epoch_us + 2) * entry.epoch_us - 1;
        let has_charged = stamp_us >= self.birth_us && ended_us < self.stamp_us;
        if tokens == 0 || !has_charged {
            return;
        }
        if curve == Curve::Refill {
            // Refill of the time since may have filled the bucket without them.
            let flowed = flow(0, rate, self.stamp_us - ended_us, NUMBER_MAX);
            let units = tokens.saturating_mul(token).min(NUMBER_MAX);
            tokens = (units - flowed).max(0) / token;
        }
        if self.takes_back(ended_us, entry) {
            self.raise(tokens);
        }
    }

    /// Whether charges of `from_us` or later can be taken back: they were charged in the window that it is now.
    fn takes_back(&mut self, from_us: i64, entry: &Entry) -> bool {
        if self.scale.curve == Curve::SlidingLog {
            // What was spent now is charged now; what goes back is of the oldest charges.
            self.slots.settle(&self.scale, self.level, self.stamp_us);
        }
        self.is_in_window_now(from_us, entry)
    }

    /// Raises the level by so many tokens, up to what it would be without charges.
    fn raise(&mut self, tokens: i64) {
        let most = match self.scale.curve {
            Curve::SlidingWindow => self.scale.burst - self.counted(self.previous, self.stamp_us),
            _ => self.scale.burst,
        };
        let units = tokens.saturating_mul(self.scale.token);
        self.level = self.level.max(self.level.saturating_add(units).min(most));
    }

    /// The key is as if it had never been used, but for what is leased: that is still outstanding.
    pub(super) fn reset(&mut self) {
        (self.level, self.previous, self.beyond) = (self.scale.burst, 0, [0; 2]);
    }

    /// Whether `from_us` is in the window that it is now.
    fn is_in_window_now(&self, from_us: i64, entry: &Entry) -> bool {
        let [begins_us, ends_us] = entry.window_span_us;
        match self.scale.curve {
            Curve::Refill => true,
            // A charge that has left is not taken back: those that are left are of others.
            Curve::SlidingLog => self.stamp_us - from_us < self.scale.window_us(),
            Curve::FixedWindow | Curve::SlidingWindow => {
                let window_us = self.scale.window_us();
                self.stamp_us / window_us == from_us / window_us
            }
            Curve::CalendarWindow => {
                self.window_ends_us == ends_us && from_us >= begins_us && ends_us > 0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::tests::sliding;
    use super::*;

    /// The tokens left at 10.5 s, of 100 before, once 60 come back that nothing was spent of in a lease: it was given then, and
    /// epochs last `epoch_us`.
    fn level_after(curve: Curve, given_us: i64, epoch_us: i64) -> i64 {
        // Five tokens are beyond the burst, which another plan had allowed.
        let mut key = Key { birth_us: 8_000_000, beyond: [5, 0], ..sliding(0, 0) };
        let token = key.scale.token;
        (key.scale.curve, key.level) = (curve, 100 * token);
        let unspent = Backdated { tokens: 60, from_us: given_us };
        key.take_back_unspent(&Entry { epoch_us, unspent, ..Entry::empty(key.scale) });
        assert_eq!((key.beyond, key.charged), ([5, 0], 0), "a lease's end lowers the level alone");
        key.level / token
    }

    #[test]
    fn unspent_tokens_of_a_lease_are_refunded_only_in_the_window_in_which_it_ended() {
        for curve in [Curve::FixedWindow, Curve::SlidingWindow] {
            // It ended at 10.4 s, 10 s, 9.6 s, and ends at 11.2 s.
            assert_eq!(level_after(curve, 9_700_000, 400_000), 160, "{curve:?}");
            assert_eq!(level_after(curve, 9_200_000, 500_000), 100, "{curve:?}: the window before");
            assert_eq!(level_after(curve, 8_900_000, 400_000), 100, "{curve:?}: the window before");
            assert_eq!(level_after(curve, 10_400_000, 400_000), 100, "{curve:?}: not yet");
        }
    }

    #[test]
    fn unspent_tokens_of_a_lease_are_refunded_to_a_sliding_log_within_its_window() {
        assert_eq!(level_after(Curve::SlidingLog, 8_900_000, 400_000), 160, "it ended at 9.6 s");
        assert_eq!(level_after(Curve::SlidingLog, 8_500_000, 400_000), 100, "it ended at 9.2 s");
    }

    #[test]
    fn unspent_tokens_of_a_lease_are_refunded_to_a_token_bucket_less_refill_since_its_end() {
        // A thousand flow in each second.
        assert_eq!(level_after(Curve::Refill, 10_420_000, 20_000), 119, "it ended at 10.46 s");
        assert_eq!(level_after(Curve::Refill, 10_360_000, 20_000), 100, "it ended at 10.4 s");
    }

    #[test]
    fn unspent_tokens_of_a_lease_are_not_refunded_to_a_younger_record() {
        assert_eq!(level_after(Curve::SlidingLog, 8_000_000, 960_000), 160, "as old as it");
        assert_eq!(level_after(Curve::SlidingLog, 7_999_999, 960_000), 100);
    }
}
