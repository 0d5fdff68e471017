//! Charges that are taken back: some, or all.

use super::key::Key;
use crate::quota::Curve;
use crate::sync::message::Entry;

impl Key {
    /// Takes back charges of tokens that were not used: the level rises, up to what it would be without charges. Of a window
    /// that has ended nothing comes back.
    pub(super) fn refund(&mut self, entry: &Entry) {
        if entry.refunded == 0 {
            return;
        }
        if self.scale.curve == Curve::SlidingLog {
            // What was spent now is charged now; what goes back is of the oldest charges.
            self.slots.settle(&self.scale, self.level, self.stamp_us);
        }
        if !self.is_of_window_now(entry) {
            return;
        }
        let most = match self.scale.curve {
            Curve::SlidingWindow => self.scale.burst - self.counted(self.previous, self.stamp_us),
            _ => self.scale.burst,
        };
        // What was spent beyond the burst, because another plan had allowed it, comes first: it is not in the level.
        let of_beyond = entry.refunded.min(self.beyond[0]);
        self.beyond[0] -= of_beyond;
        let units = (entry.refunded - of_beyond).saturating_mul(self.scale.token);
        self.level = self.level.max(self.level.saturating_add(units).min(most));
        self.charged = (self.charged - entry.refunded).max(0);
    }

    /// The key is as if it had never been used, but for what is leased: that is still outstanding.
    pub(super) fn reset(&mut self) {
        (self.level, self.previous, self.beyond) = (self.scale.burst, 0, [0; 2]);
    }

    /// Whether all of it was decided in the window that it is now.
    fn is_of_window_now(&self, entry: &Entry) -> bool {
        let [begins_us, ends_us] = entry.window_span_us;
        match self.scale.curve {
            Curve::Refill => true,
            // A charge that has left is not taken back: those that are left are of others.
            Curve::SlidingLog => self.stamp_us - entry.refunded_from_us < self.scale.window_us(),
            Curve::FixedWindow | Curve::SlidingWindow => {
                let window_us = self.scale.window_us();
                self.stamp_us / window_us == entry.refunded_from_us / window_us
            }
            Curve::CalendarWindow => {
                self.window_ends_us == ends_us && entry.refunded_from_us >= begins_us && ends_us > 0
            }
        }
    }
}
