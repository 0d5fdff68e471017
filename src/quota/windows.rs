//! When windows end, what of a lease ends with them, and when they have tokens again.

use super::{Curve, Scale};

/// No window of a calendar is longer than so many of those that the quota names: clocks are set back by up to three hours,
/// and at the date line by a day.
const CALENDAR_WINDOWS_LONGEST: i64 = 4;

impl Curve {
    /// Whether the level rises at the ends of windows alone.
    pub(crate) const fn is_fixed_window(self) -> bool {
        matches!(self, Self::FixedWindow | Self::CalendarWindow)
    }
}

impl Scale {
    /// The end of the window of `at_us`.
    pub(crate) fn window_ends_us(&self, at_us: i64) -> i64 {
        (at_us / self.window_us() + 1) * self.window_us()
    }

    /// Until when refill flows that was leased at `from_us`, at most `now_us`: of a sliding window until its end, because
    /// the next one's rise is not known.
    pub(crate) fn refill_until_us(&self, from_us: i64, now_us: i64) -> i64 {
        match self.curve {
            Curve::SlidingWindow => now_us.min(self.window_ends_us(from_us)),
            _ => now_us,
        }
    }

    /// Whether refill that was leased at `from_us` has ended with its window by `now_us`.
    pub(crate) fn has_refill_ended(&self, from_us: i64, now_us: i64) -> bool {
        self.curve == Curve::SlidingWindow && now_us >= self.window_ends_us(from_us)
    }

    /// The longest that a window can last.
    pub(crate) fn longest_window_us(&self) -> i64 {
        match self.curve {
            Curve::CalendarWindow => self.window_us().saturating_mul(CALENDAR_WINDOWS_LONGEST),
            _ => self.window_us(),
        }
    }

    /// Microseconds until windows of this length, of which one ends in `first_us`, surely give what is missing, if nobody
    /// spends.
    pub(crate) fn refilled_in_us(&self, missing: i64, first_us: u64, window_us: i64) -> u64 {
        let owed = (missing.max(1) as u64).div_ceil(self.burst as u64).min(1 << 20);
        if self.curve == Curve::SlidingLog {
            return owed.saturating_mul((window_us + self.slot_us()) as u64);
        }
        let edges = owed + u64::from(self.curve == Curve::SlidingWindow);
        first_us.saturating_add((edges - 1).saturating_mul(window_us as u64))
    }
}
