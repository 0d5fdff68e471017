//! What a node holds of a key of a hybrid limit, and what it concludes from that.

use std::time::Duration;

use crate::quota::{Curve, Scale};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp, micros};

/// What a node holds of a key, and knows of the rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Tokens left in the node's own bucket.
    pub(crate) left: u32,
    /// What the store said last.
    pub(crate) view: View,
    /// What flows into the node's own bucket.
    pub(crate) refill: Refill,
}

impl Held {
    /// Tokens that the key is believed to have left in the whole cluster.
    pub(super) fn remaining(&self, scale: &Scale, now: Timestamp) -> u64 {
        self.left_of(scale, self.refill.earned(now, scale.token))
    }

    fn left_of(&self, scale: &Scale, earned: i64) -> u64 {
        let elsewhere = self.view.tokens().max(0) as u64;
        let earned = earned.max(0) as u64 / scale.token as u64;
        let left = u64::from(self.left).saturating_add(elsewhere).saturating_add(earned);
        left.min(burst(scale))
    }

    /// Whether anything flows into the node's own bucket.
    pub(super) fn has_refill(&self) -> bool {
        self.refill.rate() > 0
    }

    /// Microseconds until `cost` tokens are expected: by the lease's refill, or by the store's level as last seen and
    /// the limit's rate.
    pub(super) fn expected_us(&self, scale: &Scale, now: Timestamp, cost: u32) -> u64 {
        let missing = i64::from(cost.saturating_sub(self.left));
        match (self.refill.rate(), self.view.age(now)) {
            (rate @ 1.., _) => {
                let earned = self.refill.earned(now, scale.token);
                let units = (missing * scale.token).saturating_sub(earned).max(0) as u64;
                units.div_ceil(rate).min(self.longest_us(scale, now, cost))
            }
            // A view of an earlier window tells nothing of this one.
            (0, Some(_)) if scale.curve.is_fixed_window() => 0,
            (0, Some(age)) => {
                let units = (missing - self.view.tokens()) * scale.token;
                scale.micros_for(units).saturating_sub(micros(age))
            }
            (0, None) => 0,
        }
    }

    /// A node that has little refill may get more. Microseconds until the whole limit has earned what the node misses, if the
    /// key has that much, and else a whole burst.
    fn longest_us(&self, scale: &Scale, now: Timestamp, cost: u32) -> u64 {
        if self.refill.rate() >= scale.rate as u64 {
            return u64::MAX;
        }
        let is_elsewhere = self.remaining(scale, now) >= cost.into();
        let missing = i64::from(cost.saturating_sub(self.left)) * scale.token;
        scale.micros_for(if is_elsewhere { missing } else { scale.burst })
    }

    /// Microseconds until the key's bucket is full.
    pub(super) fn full_us(&self, scale: &Scale, now: Timestamp) -> u64 {
        let missing = burst(scale).saturating_sub(self.remaining(scale, now)) as i64 + self.owed();
        let full_us = scale.full_us(missing * scale.token);
        // The scale counts a window more, for which the one before still counts. Of a log nothing counts then.
        let extra_us = if scale.curve == Curve::SlidingLog { scale.fill_us() } else { 0 };
        full_us.saturating_sub(extra_us)
    }

    /// [`remaining`](Self::remaining), and microseconds until there is a token more.
    pub(super) fn remaining_and_next_us(&self, scale: &Scale, now: Timestamp) -> (u64, u64) {
        let &Scale { token, rate, .. } = scale;
        let earned = self.refill.earned(now, token);
        let left = self.left_of(scale, earned);
        if left >= burst(scale) {
            return (left, 0);
        }
        // Nobody waits longer for a token of the node's own than for one of the whole limit's.
        let (own_rate, earned) = match self.refill.rate() {
            0 => (rate as u64, 0),
            own => (own, earned),
        };
        // What was spent ahead comes first.
        let part = if earned < 0 { earned } else { earned % token };
        let own_us = (token.saturating_sub(part) as u64).div_ceil(own_rate);
        let is_slow = own_rate < rate as u64;
        let own_us = if is_slow { own_us.min(scale.micros_for(token)) } else { own_us };
        let owed_us = match self.owed() {
            0 => 0,
            owed => scale.micros_for(owed * token),
        };
        (left, owed_us.saturating_add(own_us))
    }

    /// Tokens that must come before there is one, of a node that has none itself.
    fn owed(&self) -> i64 {
        if self.left > 0 || self.refill.rate() > 0 { 0 } else { -self.view.tokens().min(0) }
    }
}

/// The most tokens that a key can have.
fn burst(scale: &Scale) -> u64 {
    (scale.burst / scale.token) as u64
}

/// Parts of a token, in which a lease says how much of it may be spent before it has flowed in.
pub(crate) const OVERDRAW_PARTS: u64 = 64;

/// What flows into a node's own bucket, as it was when something was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refill {
    rate: u64,
    minted_us: u64,
    ends_us: u64,
}

impl Refill {
    /// `rate` units in each microsecond until `ends_us`. What flowed in before `minted_us` is in the bucket already;
    /// [`u64::MAX`] there means that nothing flows in. Not looked at before somebody asks.
    #[inline(always)]
    pub(crate) const fn new(rate: u64, minted_us: u64, ends_us: u64) -> Self {
        Self { rate, minted_us, ends_us }
    }

    /// Units per microsecond.
    fn rate(self) -> u64 {
        if self.minted_us < u64::MAX { self.rate } else { 0 }
    }

    /// Units that have flowed in by `now`: less than none while what was spent ahead has not flowed in.
    /// What may be spent ahead is not counted: while nobody asks, it may be taken away. It is less than a
    /// token of `unit` units, whatever these values, which are read one after the other, seem to say.
    pub(crate) fn earned(self, now: Timestamp, unit: i64) -> i64 {
        if self.rate() == 0 || now.as_micros() >= self.ends_us {
            return 0;
        }
        let units = |time_us: u64| self.rate.saturating_mul(time_us).min(i64::MAX as u64) as i64;
        let ahead_us = self.minted_us.saturating_sub(now.as_micros());
        // Where the precise clock was read, the cached one is behind, and nothing was spent ahead.
        if ahead_us > CLOCK_AGE_MAX_US {
            return -units(ahead_us).min(unit);
        }
        units(now.as_micros().saturating_sub(self.minted_us))
    }
}

/// No two clocks of a node are so far apart.
const CLOCKS_APART_MS: u32 = 60_000;

/// The store's last word about a key, as a bucket remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    tokens: i64,
    /// In milliseconds that wrap after 49 days, as does the age; 0 for never.
    at_ms: u32,
}

impl View {
    /// The store never spoke of the key.
    pub(crate) const NONE: Self = Self { tokens: 0, at_ms: 0 };

    #[inline]
    pub(crate) fn new(tokens: i64, at_ms: u32) -> Self {
        Self { tokens, at_ms }
    }

    /// Tokens that the store had; less than none if they are owed.
    pub(crate) fn tokens(self) -> i64 {
        self.tokens
    }

    /// How old it is at `now`; `None` if there was none.
    pub(crate) fn age(self, now: Timestamp) -> Option<Duration> {
        let age_ms = (now.millis() as u32).wrapping_sub(self.at_ms);
        // The cached clock may be behind the engine's.
        let age_ms = if age_ms > u32::MAX - CLOCKS_APART_MS { 0 } else { age_ms };
        (self.at_ms > 0).then(|| Duration::from_millis(age_ms.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::quota::Quota;

    proptest! {
        #[test]
        fn age_of_a_view_is_right_where_milliseconds_wrap(
            at_ms in any::<u32>(), age_ms in 0..4_000_000_000_u64,
        ) {
            let view = View::new(1, at_ms.max(1));
            let now = Timestamp::from_micros((u64::from(at_ms.max(1)) + age_ms) * 1000);
            prop_assert_eq!(view.age(now), Some(Duration::from_millis(age_ms)));
        }
    }

    #[test]
    fn view_that_never_came_has_no_age() {
        assert_eq!(View::NONE.age(Timestamp::NEVER), None);
    }

    /// Retry-After was 61 s where it is 60 s, one time in twelve.
    #[test]
    fn tokens_spent_ahead_are_owed_and_a_late_cached_clock_owes_none() {
        let now = Timestamp::from_micros(5_000_000);
        let earned = |minted_us| Refill::new(3, minted_us, 60_000_000).earned(now, 2_000_000);
        assert_eq!(earned(4_999_990), 30);
        assert_eq!(earned(5_000_001), 0);
        assert_eq!(earned(5_000_000 + CLOCK_AGE_MAX_US), 0);
        assert_eq!(earned(5_500_000), -1_500_000);
        assert_eq!(earned(1 << 62), -2_000_000, "no more than a token is owed");
        assert_eq!(earned(u64::MAX), 0);
    }

    /// Retry-After was hours, where a node had a ten-thousandth of the refill, for a key with most of its tokens left.
    #[test]
    fn request_that_costs_much_waits_at_most_as_long_as_the_whole_limit_takes() {
        let scale = Quota::per_minute(5000).scale("tokens").unwrap();
        let now = Timestamp::from_micros(5_000_000);
        let expected_s = |left, elsewhere, slowness| {
            let refill = Refill::new(scale.rate as u64 / slowness, 5_000_000, 60_000_000);
            let held = Held { left, view: View::new(elsewhere, 5000), refill };
            held.expected_us(&scale, now, 1000).div_ceil(1_000_000)
        };
        assert_eq!(expected_s(0, 3900, 10_000), 12, "a thousand of 5000 a minute");
        assert_eq!(expected_s(900, 3900, 10_000), 2, "a hundred are missing");
        assert_eq!(expected_s(0, 500, 10_000), 60, "the whole burst");
        assert_eq!(expected_s(0, 500, 2), 24, "the node's own refill");
        assert_eq!(expected_s(0, 0, 1), 12);
    }
}
