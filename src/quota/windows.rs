//! How the level of windows rises, when they end, what of a lease ends with them, and when they have tokens again.

use super::{Curve, Scale};

/// No window of a calendar is longer than so many of those that the quota names: clocks are set back by up to three hours,
/// and at the date line by a day.
const CALENDAR_WINDOWS_LONGEST: i64 = 4;
/// The store's doubles hold every integer up to here.
const EXACT_MAX: i64 = 1 << 53;

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

    /// Units that count at `now_us` of those that were charged in the window before, if windows slide: of whole tokens, whole
    /// ones.
    pub(crate) fn counted(&self, previous: i64, now_us: i64) -> i64 {
        let window_us = self.window_us();
        let left_us = (window_us - now_us % window_us) as f64;
        let (tokens, window_us) = ((previous / self.token) as f64, window_us as f64);
        let product = tokens * left_us;
        // Where the product is no whole number to a double, a token more or less does not matter.
        let counted = if product <= EXACT_MAX as f64 {
            product / window_us
        } else {
            tokens * (left_us / window_us)
        };
        (counted.floor() as i64).saturating_mul(self.token).min(EXACT_MAX)
    }

    /// The level at `until_us` of windows that begin at multiples of their length, and what was charged in the window before. A
    /// fixed window is full again at its end; in a sliding one, what was charged in the window before counts for the part of it
    /// that is less than a window ago. Of what was charged beyond the burst each window pays a burst.
    pub(crate) fn pass_windows(
        &self,
        level: i64,
        previous: i64,
        from_us: i64,
        until_us: i64,
    ) -> (i64, i64) {
        let (window_us, burst) = (self.window_us(), self.burst);
        let passed = until_us / window_us - from_us / window_us;
        if self.curve == Curve::FixedWindow {
            if passed <= 0 {
                return (level, previous);
            }
            let given = i128::from(level) + i128::from(burst) * i128::from(passed);
            return (given.min(burst.into()) as i64, previous);
        }
        let mut current = (burst - level - self.counted(previous, from_us)).max(0);
        let mut previous = previous;
        if passed > 0 {
            // Of more than a burst, the rest is carried on.
            let owed = i128::from(current) - i128::from(burst) * i128::from(passed - 1);
            let owed = owed.max(0) as i64;
            (current, previous) = ((owed - burst).max(0), owed.min(burst));
        }
        (burst - current - self.counted(previous, until_us), previous)
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
