//! A key's record comes under another quota.

use super::key::{Key, flow};
use crate::quota::{Curve, Scale};
use crate::sync::message::{Entry, NUMBER_MAX};

impl Key {
    /// Moves the key to another quota: of a newer definition of its limit, or of another plan. Leases of the old one count
    /// until they end.
    pub(super) fn adopt(&mut self, entry: &Entry) {
        let (old, previous) = (self.scale, self.previous);
        self.leave_leases(&old, &entry.scale);
        let ratio = entry.scale.token as f64 / self.scale.token as f64;
        let down = |units: i64| {
            ((units as f64 * ratio).floor() as i64).clamp(-NUMBER_MAX, entry.scale.burst)
        };
        let up = |units: i64| ((units as f64 * ratio).ceil() as i64).clamp(-NUMBER_MAX, NUMBER_MAX);
        let level = self.level;
        let current = (old.burst - level - self.counted(previous, self.stamp_us)).max(0);
        self.level = down(self.level);
        self.unleased = down(self.unleased);
        self.after_silence = down(self.after_silence);
        self.leased = self.leased.map(up);
        self.outstanding = self.outstanding.map(up);
        self.demand = self.demand.map(up);
        self.scale = entry.scale;
        self.version = entry.version;
        self.previous = 0;
        if old.curve != Curve::CalendarWindow || old.curve != self.scale.curve {
            self.window_ends_us = 0;
        }
        let beyond = std::mem::take(&mut self.beyond);
        let mut slots = std::mem::take(&mut self.slots);
        if self.scale.curve == Curve::SlidingLog && old.curve == Curve::SlidingLog {
            // What was spent stays, and leaves a window of the new plan later. Of another definition's, as much as counts.
            slots.convert(&old, &self.scale, self.stamp_us, up);
            self.slots = slots;
            let least = if old.token == self.scale.token { -NUMBER_MAX } else { 0 };
            self.level = (self.scale.burst - up(old.burst - level)).max(least);
            self.slots.settle(&self.scale, self.level, self.stamp_us);
        } else if self.is_windows() && old.curve == self.scale.curve {
            self.keep_spent(&old, [current, previous], beyond, up);
        }
        if self.is_windows() {
            self.unleased = self.level - self.outstanding[0] - self.outstanding[1];
        }
    }

    /// What becomes of leases that cannot go on under another quota.
    fn leave_leases(&mut self, old: &Scale, new: &Scale) {
        if old.curve == Curve::Refill && new.curve != Curve::Refill {
            // A token bucket's refill does not end with a window, so windows cannot take it over: it is void.
            self.end_leases(0);
            (self.leased, self.depth, self.demand) = ([0; 2], [0; 2], [0; 2]);
        }
        if old.curve == Curve::SlidingWindow {
            // Refill of the old plan flows until its window's end.
            let refill_us = old.window_ends_us(self.stamp_us) - self.stamp_us;
            for (outstanding, leased) in self.outstanding.iter_mut().zip(&mut self.leased) {
                let rate = std::mem::take(leased);
                *outstanding = flow(*outstanding, rate, refill_us, NUMBER_MAX);
            }
        }
    }

    /// What was `spent` in this window and in the one before stays, in units of the `old` quota. Beyond the new burst it is not
    /// counted, so that the next window does not owe it.
    fn keep_spent(
        &mut self,
        old: &Scale,
        [current, previous]: [i64; 2],
        beyond: [i64; 2],
        up: impl Fn(i64) -> i64,
    ) {
        let most = self.scale.burst / self.scale.token;
        let tokens = |units: i64| (units as f64 / old.token as f64).ceil() as i64;
        let owed = (current - old.burst).max(0);
        let spent = tokens(current - owed) + beyond[0];
        let current = spent.min(most) * self.scale.token;
        self.beyond[0] = (spent - most).max(0);
        if self.scale.curve == Curve::SlidingWindow {
            let before = tokens(previous) + beyond[1];
            self.previous = before.min(most) * self.scale.token;
            self.beyond[1] = (before - most).max(0);
        }
        let counted = self.counted(self.previous, self.stamp_us);
        self.level = (self.scale.burst - current - up(owed) - counted).max(-NUMBER_MAX);
    }

    /// Windows have passed since `before_us`, or since the one of a calendar that ended at `ended_us`: what another plan had
    /// allowed in them.
    pub(super) fn pass_beyond(&mut self, before_us: i64, ended_us: i64) {
        let passed = match self.scale.curve {
            Curve::CalendarWindow => i64::from(self.window_ends_us != ended_us) * 2,
            Curve::FixedWindow | Curve::SlidingWindow => {
                let window_us = self.scale.window_us();
                self.stamp_us / window_us - before_us / window_us
            }
            Curve::Refill | Curve::SlidingLog => 0,
        };
        if passed != 0 {
            let is_before = passed == 1 && self.scale.curve == Curve::SlidingWindow;
            self.beyond = [0, if is_before { self.beyond[0] } else { 0 }];
        }
    }
}
