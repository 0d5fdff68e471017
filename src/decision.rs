//! The answer to a request.

use std::time::Duration;

use crate::limit::LimitInfo;
use crate::quota::{Quota, Scale};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp, micros};

/// A denied caller is never told to come back sooner than this.
const RETRY_MIN_US: u64 = 1_000;

/// What a limit said about one request, and what it knew when it said so.
///
/// A small `Copy` value; the times are computed when asked for.
#[derive(Clone, Copy, Debug)]
#[must_use = "a decision that nobody looks at limits nothing"]
pub struct Decision {
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
    pub(crate) cost: u32,
    /// Tokens left in the node's own bucket.
    pub(crate) left: u32,
    /// What the store said last.
    pub(crate) view: View,
    /// When it was decided.
    pub(crate) now: Timestamp,
    /// What flows into the node's own bucket.
    pub(crate) refill: Refill,
    pub(crate) limit: &'static LimitInfo,
}

impl Decision {
    /// True if the request may go on.
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// True if the request must not go on.
    pub fn is_denied(&self) -> bool {
        !self.allowed
    }

    /// `Ok` if the request may go on, or else an error that says why not, for use with `?`.
    ///
    /// ```
    /// use tidegate::{Denied, Quota};
    ///
    /// fn handle(limit: &tidegate::ActiveLimit) -> Result<&'static str, Denied> {
    ///     limit.check("user:42").into_result()?;
    ///     Ok("done")
    /// }
    ///
    /// let limit = tidegate::local(Quota::per_minute(1))?;
    /// assert!(handle(&limit).is_ok());
    /// let denied = handle(&limit).unwrap_err();
    /// assert!(denied.retry_after().as_secs() >= 59);
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Denied`] if the request must not go on.
    pub fn into_result(self) -> Result<(), Denied> {
        if self.allowed { Ok(()) } else { Err(Denied(self)) }
    }

    /// The name of the limit.
    pub fn limit_name(&self) -> &'static str {
        &self.limit.name
    }

    /// The limit's quota, as it was configured: tokens, their period, and the burst.
    pub fn quota(&self) -> Quota {
        self.limit.quota
    }

    /// The limit's burst: the most that a key can have, in tokens.
    pub fn burst(&self) -> u64 {
        (self.scale().burst / self.scale().token) as u64
    }

    fn scale(&self) -> Scale {
        self.limit.scale
    }

    /// Tokens that the key is believed to have left in the whole cluster after this decision.
    /// A hint from this node's view: the next decision may still differ.
    pub fn remaining(&self) -> u64 {
        self.left_of(self.burst(), self.refill.earned(self.now, self.scale().token))
    }

    fn left_of(&self, limit: u64, earned: i64) -> u64 {
        let elsewhere = self.view.tokens().max(0) as u64;
        let earned = earned.max(0) as u64 / self.scale().token as u64;
        u64::from(self.left).saturating_add(elsewhere).saturating_add(earned).min(limit)
    }

    /// How long to wait before the same request has a chance; zero when it was allowed.
    pub fn retry_after(&self) -> Duration {
        if self.allowed {
            return Duration::ZERO;
        }
        Duration::from_micros(self.expected_us().max(RETRY_MIN_US))
    }

    /// When the tokens asked for are expected: by the lease's refill, or by the store's level as last
    /// seen and the limit's rate.
    fn expected_us(&self) -> u64 {
        let Scale { token, .. } = self.scale();
        let missing = i64::from(self.cost.saturating_sub(self.left));
        match (self.refill.rate(), self.view.age(self.now)) {
            (rate @ 1.., _) => {
                let earned = self.refill.earned(self.now, self.scale().token);
                let units = (missing * token).saturating_sub(earned).max(0) as u64;
                units.div_ceil(rate)
            }
            (0, Some(age)) => {
                let units = (missing - self.view.tokens()) * token;
                self.scale().micros_for(units).saturating_sub(micros(age))
            }
            (0, None) => 0,
        }
    }

    /// How long until the key's bucket is full again, if nobody spends on it.
    pub fn reset_after(&self) -> Duration {
        let missing = self.burst().saturating_sub(self.remaining()) as i64 + self.owed();
        let full = Duration::from_micros(self.scale().micros_for(missing * self.scale().token));
        full.max(self.retry_after())
    }

    /// How long an empty bucket of the limit takes to fill.
    pub fn fill_time(&self) -> Duration {
        Duration::from_micros(self.scale().fill_us())
    }

    /// How long until the key has a token more, if nobody spends on it; zero when its bucket is full.
    /// Not longer than [`retry_after`](Self::retry_after), if the request was denied.
    pub fn next_token_after(&self) -> Duration {
        self.remaining_and_next().1
    }

    /// [`remaining`](Self::remaining) and [`next_token_after`](Self::next_token_after) for the price of
    /// one.
    pub(crate) fn remaining_and_next(&self) -> (u64, Duration) {
        let Scale { token, rate, .. } = self.scale();
        let (limit, earned) = (self.burst(), self.refill.earned(self.now, self.scale().token));
        let left = self.left_of(limit, earned);
        if left >= limit {
            return (left, Duration::ZERO);
        }
        // Nobody waits longer for a token of the node's own than for one of the whole limit's.
        let (rate, earned) = match self.refill.rate() {
            0 => (rate as u64, 0),
            own => (own, earned),
        };
        // What was spent ahead comes first.
        let part = if earned < 0 { earned } else { earned % token };
        let own_us = (token.saturating_sub(part) as u64).div_ceil(rate);
        let own_us = if rate < self.scale().rate as u64 {
            own_us.min(self.scale().micros_for(token))
        } else {
            own_us
        };
        let owed_us = match self.owed() {
            0 => 0,
            owed => self.scale().micros_for(owed * token),
        };
        let next = Duration::from_micros(owed_us.saturating_add(own_us));
        (left, if self.is_denied() { next.min(self.retry_after()) } else { next })
    }

    /// How long until so many tokens are left, if nobody spends on the key; more than the
    /// [`burst`](Self::burst) never are.
    pub fn left_after(&self, tokens: u32) -> Duration {
        let missing = u64::from(tokens).saturating_sub(self.remaining());
        if missing == 0 {
            return Duration::ZERO;
        }
        let more = (missing as i64 - 1).saturating_mul(self.scale().token);
        let more_us = self.scale().micros_for(more);
        self.next_token_after().saturating_add(Duration::from_micros(more_us))
    }

    /// Tokens that must come before there is one, of a node that has none itself.
    fn owed(&self) -> i64 {
        if self.left > 0 || self.refill.rate() > 0 { 0 } else { -self.view.tokens().min(0) }
    }

    /// Whether the answer is backed by tokens that this node holds, or is surely no. An unsure
    /// answer was given on credit, from an old view, or by an outage policy.
    pub fn is_sure(&self) -> bool {
        self.sure
    }

    /// How old this node's last word from the store about the key is; `None` when the store never
    /// spoke of it (a `local` limit, or a new key).
    pub fn view_age(&self) -> Option<Duration> {
        self.view.age(self.now)
    }

    /// The tokens asked for.
    pub fn cost(&self) -> u32 {
        self.cost
    }
}

/// A request that must not go on, as an error.
///
/// With the feature `axum` it is a response, and with the feature `tonic` it turns into a status, so that handlers can
/// return it: the same that `http::RateLimitLayer` gives to a denied request.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("limit {:?} is used up: try again in {:?}", .0.limit_name(), .0.retry_after())]
pub struct Denied(Decision);

impl Denied {
    /// The name of the limit.
    pub fn limit_name(&self) -> &'static str {
        self.0.limit_name()
    }

    /// How long to wait before the same request has a chance.
    pub fn retry_after(&self) -> Duration {
        self.0.retry_after()
    }

    /// The whole decision.
    pub fn decision(&self) -> Decision {
        self.0
    }
}

/// Parts of a token, in which a lease says how much of it may be spent before it has flowed in.
pub(crate) const OVERDRAW_PARTS: u64 = 64;

/// What flows into a node's own bucket, as it was when something was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refill {
    rate: u64,
    minted_us: u64,
    ends_us: u64,
    /// Units that are there at `minted_us` beside whole tokens.
    units: i64,
}

impl Refill {
    /// `rate` units in each microsecond until `ends_us`. What flowed in before `minted_us` is in the bucket already;
    /// [`u64::MAX`] there means that nothing flows in. Not looked at before somebody asks.
    #[inline(always)]
    pub(crate) const fn new(rate: u64, minted_us: u64, ends_us: u64) -> Self {
        Self { rate, minted_us, ends_us, units: 0 }
    }

    /// `rate` units in each microsecond without end, beside `units` that are there at `now`.
    #[inline(always)]
    pub(crate) const fn endless(rate: u64, units: i64, now: Timestamp) -> Self {
        Self { rate, minted_us: now.as_micros(), ends_us: u64::MAX, units }
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
        self.units.saturating_add(units(now.as_micros().saturating_sub(self.minted_us)))
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

    proptest! {
        #[test]
        fn a_view_is_as_old_as_it_is_also_where_milliseconds_wrap(
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
    fn a_cached_clock_that_is_behind_is_no_debt_and_what_was_spent_ahead_is() {
        let now = Timestamp::from_micros(5_000_000);
        let earned = |minted_us| Refill::new(3, minted_us, 60_000_000).earned(now, 2_000_000);
        assert_eq!(earned(4_999_990), 30);
        assert_eq!(earned(5_000_001), 0);
        assert_eq!(earned(5_000_000 + CLOCK_AGE_MAX_US), 0);
        assert_eq!(earned(5_500_000), -1_500_000);
        assert_eq!(earned(1 << 62), -2_000_000, "no more than a token is owed");
        assert_eq!(earned(u64::MAX), 0);
    }
}
