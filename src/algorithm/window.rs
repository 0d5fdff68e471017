//! Windows of time, and what was spent in this one and the one before.

use std::time::Duration;

use super::calendar::Calendar;
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::{Timestamp, micros};

/// Windows that are told apart: of the shortest for 27 years of the machine's uptime.
pub(crate) const WINDOWS_MAX: u64 = (1 << 33) - 4;
/// The shortest window.
pub const WINDOW_MIN: Duration = Duration::from_millis(100);

/// The rule of a key whose state is what it spent in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WindowRule {
    /// Tokens per window.
    pub(crate) tokens: u32,
    pub(crate) period_us: u64,
    /// Whether what was spent in the window before counts for the part of it that is less than a window ago.
    pub(crate) is_sliding: bool,
    /// Whose windows they are, unless they begin at multiples of the period. Then times are those of the calendar, and the
    /// period is that of its windows there.
    pub(crate) calendar: Option<&'static Calendar>,
}

/// What a key has spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// In this window.
    pub(crate) current: u32,
    /// In the one before, if windows slide.
    pub(crate) previous: u32,
    /// Microseconds until this window ends, 1 at least.
    pub(crate) left_us: u64,
}

impl WindowRule {
    pub(super) fn new(limit: &str, quota: Quota, is_sliding: bool) -> Result<Self, ConfigError> {
        quota.validate(limit)?;
        if quota.period() < WINDOW_MIN {
            return Err(ConfigError::Limit {
                limit: limit.to_owned(),
                field: "window.period",
                value: format!("{:?}", quota.period()),
                reason: "must be at least 100 ms",
            });
        }
        let (tokens, period_us) = (quota.tokens() as u32, micros(quota.period()));
        Ok(Self { tokens, period_us, is_sliding, calendar: None })
    }

    /// The number of the window at `now`, where one began at the clock's origin, and how many microseconds of it are
    /// left.
    #[inline(always)]
    pub(crate) fn window_at(&self, now: Timestamp) -> (u64, u64) {
        let (now, period_us) = (now.as_micros(), self.period_us);
        ((now / period_us).min(WINDOWS_MAX), period_us - now % period_us)
    }

    /// What counts of the window before where so much of this one is left. Rounded down, against the rule that rounding
    /// never admits: rounded up, a key under steady load would have `tokens - 1` a window.
    #[inline(always)]
    fn weight(&self, spent: u32, left_us: u64) -> u64 {
        if spent == 0 {
            return 0;
        }
        if let Some(product) = u64::from(spent).checked_mul(left_us) {
            return product / self.period_us;
        }
        (u128::from(spent) * u128::from(left_us) / u128::from(self.period_us)) as u64
    }

    /// What a key has used of its tokens.
    #[inline(always)]
    pub(crate) fn used(&self, counts: Counts) -> u64 {
        u64::from(counts.current) + self.weight(counts.previous, counts.left_us)
    }

    /// Whether a request of `cost` tokens is allowed.
    #[inline(always)]
    pub(crate) fn allows(&self, counts: Counts, cost: u32) -> bool {
        self.used(counts) + u64::from(cost) <= u64::from(self.tokens)
    }

    /// Requests of one token that a key would allow now.
    pub(crate) fn remaining(&self, counts: Counts) -> u64 {
        u64::from(self.tokens).saturating_sub(self.used(counts))
    }

    /// Microseconds until a request of so many tokens would be allowed, if nobody else spends.
    pub(crate) fn wait_us(&self, counts: Counts, tokens: u64) -> u64 {
        let Counts { current, previous, left_us } = counts;
        let room = u64::from(self.tokens).saturating_sub(tokens);
        if self.used(counts) <= room {
            return 0;
        }
        if !self.is_sliding {
            return left_us;
        }
        if let Some(room) = room.checked_sub(current.into()) {
            return left_us - self.longest_left(previous, room, left_us);
        }
        // Not in this window. In the next one, this is the one before.
        left_us + self.period_us - self.longest_left(current, room, self.period_us)
    }

    /// The longest time left of a window, `most_us` at most, in which no more than `room` counts of what was spent in
    /// the one before; 0 if that is at its end.
    fn longest_left(&self, spent: u32, room: u64, most_us: u64) -> u64 {
        // The weight is above the room from `(room + 1) x period / spent` on.
        let above = (u128::from(room) + 1) * u128::from(self.period_us);
        let least = above.div_ceil(u128::from(spent.max(1)));
        (least - 1).min(most_us.into()) as u64
    }

    /// Microseconds until the key is as if it had never been used.
    pub(crate) fn reset_us(&self, counts: Counts) -> u64 {
        match counts {
            Counts { current: 0, previous: 0, .. } => 0,
            Counts { current: 1.., left_us, .. } if self.is_sliding => left_us + self.period_us,
            Counts { left_us, .. } => left_us,
        }
    }
}
