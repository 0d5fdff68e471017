//! How much is allowed: so many tokens per period, and how many at once.

use std::time::Duration;

use crate::error::ConfigError;
use crate::time::micros;

mod curve;
mod text;
mod windows;

pub(crate) use curve::Curve;
#[cfg(feature = "config")]
pub(crate) use text::duration;

/// The most tokens that a quota may grant per period, and the largest burst.
pub const TOKENS_MAX: u64 = 1_000_000_000;

/// The longest period, and the longest time that an empty bucket may take to fill.
pub const PERIOD_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// A rate and a burst.
///
/// The *rate* is what a key may spend for ever: `tokens` per `period`, refilled continuously, not
/// at the period's end. The *burst* is the bucket's capacity: what a key that was quiet may spend
/// at once, on top of the rate. In any window of length `w` at most `burst + rate × w` tokens are
/// admitted. Unless it is set, the burst is one period's worth.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Quota;
///
/// const API: Quota = Quota::per_second(1000).burst(200);
/// const LOGIN: Quota = Quota::new(1, Duration::from_secs(90)).burst(5);
/// assert_eq!(API.burst_tokens(), 200);
/// # let _ = LOGIN;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    tokens: u64,
    period: Duration,
    burst: u64,
}

impl Quota {
    /// `tokens` per `period`, with a burst of `tokens`.
    ///
    /// Nothing is checked here, so that quotas can be constants; a limiter that is built with an
    /// impossible quota fails with a [`ConfigError`] that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { tokens, period, burst: tokens }
    }

    /// `tokens` per second, with a burst of `tokens`.
    pub const fn per_second(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(1))
    }

    /// `tokens` per minute, with a burst of `tokens`.
    pub const fn per_minute(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(60))
    }

    /// `tokens` per hour, with a burst of `tokens`.
    pub const fn per_hour(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(3600))
    }

    /// `tokens` per day of 24 hours, with a burst of `tokens`.
    pub const fn per_day(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(24 * 3600))
    }

    /// The same rate with another burst, in tokens.
    #[must_use]
    pub const fn burst(self, burst: u64) -> Self {
        Self { burst, ..self }
    }

    /// Tokens granted per [`period`](Self::period).
    pub const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The period that the rate is given in.
    pub const fn period(&self) -> Duration {
        self.period
    }

    /// The bucket's capacity in tokens.
    pub const fn burst_tokens(&self) -> u64 {
        self.burst
    }

    /// The integer units in which this node alone keeps levels of this quota. Where it `shares_state` with other plans, a
    /// microsecond has as many as by each of them.
    pub(crate) fn local_scale(
        &self,
        limit: &str,
        shares_state: bool,
    ) -> Result<Scale, ConfigError> {
        self.validate(limit)?;
        let scale = Scale::local(self.tokens, micros(self.period), self.burst, shares_state);
        scale.ok_or_else(|| ConfigError::Limit {
            limit: limit.to_owned(),
            field: "quota.tokens",
            value: self.tokens.to_string(),
            reason: "one node alone keeps rates above 16 million tokens a second only if a microsecond has a round \
                     number of tokens, and the limit has no plans: choose another one",
        })
    }

    /// Tokens per second, for reports.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.period.as_secs_f64()
    }

    /// Checks that each number is one that a quota may have.
    pub(crate) fn validate(&self, limit: &str) -> Result<(), ConfigError> {
        let invalid = |field, value: String, reason| {
            Err(ConfigError::Limit { limit: limit.to_owned(), field, value, reason })
        };
        let period_us = micros(self.period);
        if self.tokens == 0 || self.tokens > TOKENS_MAX {
            return invalid("quota.tokens", self.tokens.to_string(), "must be 1 to 1000000000");
        }
        if self.burst == 0 || self.burst > TOKENS_MAX {
            return invalid("quota.burst", self.burst.to_string(), "must be 1 to 1000000000");
        }
        if period_us == 0 || self.period > PERIOD_MAX {
            let value = format!("{:?}", self.period);
            return invalid("quota.period", value, "must be 1 microsecond to 366 days");
        }
        let fill_us = u128::from(self.burst) * u128::from(period_us) / u128::from(self.tokens);
        if fill_us > PERIOD_MAX.as_micros() {
            let reason = "an empty bucket would take more than 366 days to fill";
            return invalid("quota.burst", self.burst.to_string(), reason);
        }
        Ok(())
    }

    /// The integer units in which levels of this quota are kept.
    pub(crate) fn scale(&self, limit: &str) -> Result<Scale, ConfigError> {
        self.validate(limit)?;
        Scale::new(self.tokens, micros(self.period), self.burst).ok_or_else(|| ConfigError::Limit {
            limit: limit.to_owned(),
            field: "quota.burst",
            value: self.burst.to_string(),
            reason: "rate and burst cannot be kept together within 0.01%: choose rounder numbers",
        })
    }

    /// The integer units in which levels of a calendar's windows are kept.
    pub(crate) fn calendar_scale(&self, limit: &str) -> Result<Scale, ConfigError> {
        self.validate(limit)?;
        Ok(Scale::calendar_windows(self.tokens, micros(self.period)))
    }

    /// The integer units in which levels of windows are kept.
    pub(crate) fn window_scale(&self, limit: &str, curve: Curve) -> Result<Scale, ConfigError> {
        self.validate(limit)?;
        let scale = Scale::windows(self.tokens, micros(self.period), curve);
        scale.ok_or_else(|| ConfigError::Limit {
            limit: limit.to_owned(),
            field: "quota.tokens",
            value: self.tokens.to_string(),
            reason: "tokens and period have no common unit that leases can be counted in: choose rounder numbers, or \
                     call exact() or local()",
        })
    }
}

/// The most units of refill in a microsecond of a quota that one node keeps alone: it counts them from the clock's
/// origin, in one word.
const LOCAL_RATE_UNITS: u64 = 1 << 14;

/// The units of refill in a microsecond that are aimed at there: more would use up the word in less than two centuries.
const FINE_RATE_UNITS: u64 = 1 << 10;

/// The units in which a quota's levels are counted, chosen so that refill is a whole number of
/// units per microsecond: no fraction is ever rounded away. A full bucket has at most 2^52 units,
/// so that Lua's doubles hold every level exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scale {
    /// Refill, in units per microsecond.
    pub rate: i64,
    /// Units in one token.
    pub token: i64,
    /// Units in a full bucket. A window lasts as long as the rate takes for them: a whole number of microseconds.
    pub burst: i64,
    /// How the level rises.
    pub curve: Curve,
}

/// The largest bucket in units of a node: they do not go on the wire, where less has room.
pub(crate) const OWN_UNITS_MAX: i64 = 1 << 58;
/// The longest time that a token of any limit takes to flow in.
const TOKEN_US_MAX: i64 = PERIOD_MAX.as_micros() as i64;
/// The largest bucket, in units.
const BURST_UNITS_MAX: u64 = 1 << 52;
/// The largest bucket of a calendar's window before its tokens are rounded up, in units.
const CALENDAR_UNITS_MAX: u64 = 1 << 51;
/// The refill aimed at, in units per microsecond: fine enough to split a rate among many nodes.
const RATE_UNITS: u64 = 1 << 20;
/// The most refill, in units per microsecond, so that what flows in within a second is exact in the store.
pub(crate) const RATE_UNITS_MAX: i64 = (1 << 52) / 1_000_000;
/// So many tokens can be owed of a slow limit too: the most credit, 15, of each of the 16 nodes that a limiter expects unless told.
/// What is owed beyond 2^52 units is forgotten, and nodes would give it again.
const OWED_TOKENS: u64 = 15 * 16;
/// No debt keeps a record for longer.
const FULL_US_MAX: u64 = 1 << 50;
/// The store takes no window to be shorter, whatever it is sent.
const WINDOW_LEAST_US: i64 = 1000;
/// Slots in a window of a sliding log: its tokens come back up to one slot late.
const LOG_SLOTS: i64 = 64;
/// The coarsest refill accepted where rate and burst have no exact common unit.
const RATE_UNITS_MIN: u64 = 10_000;

impl Scale {
    /// The units of a quota that one node keeps alone. The rate is rounded down, by 0.1% at most; `None` if it would be
    /// by more.
    fn local(tokens: u64, period_us: u64, burst: u64, shares_state: bool) -> Option<Self> {
        let divisor = gcd(tokens, period_us);
        let (rate, token) = match (tokens / divisor, period_us / divisor) {
            // Finer than need be, so that an update of the limit finds a unit too.
            (rate @ ..=LOCAL_RATE_UNITS, token) if !shares_state => {
                let times = (FINE_RATE_UNITS / rate).max(1);
                (rate * times, token * times)
            }
            _ => (LOCAL_RATE_UNITS, (LOCAL_RATE_UNITS * period_us).div_ceil(tokens)),
        };
        let (kept, asked) =
            (u128::from(rate) * u128::from(period_us), u128::from(token) * u128::from(tokens));
        let (rate, token, burst) = (rate as i64, token as i64, (token * burst) as i64);
        ((asked - kept) * 1000 <= asked).then_some(Self {
            rate,
            token,
            burst,
            curve: Curve::Refill,
        })
    }

    fn new(tokens: u64, period_us: u64, burst: u64) -> Option<Self> {
        let token_max = BURST_UNITS_MAX / burst;
        let divisor = gcd(tokens, period_us);
        let (rate, token) = (tokens / divisor, period_us / divisor);
        let (rate, token) = match token_max / token {
            0 => {
                // No exact unit: the rate is rounded down, against admission.
                let rate = u128::from(token_max) * u128::from(tokens) / u128::from(period_us);
                (rate as u64, token_max)
            }
            times_max => {
                let times_roomy = BURST_UNITS_MAX / burst.max(OWED_TOKENS) / token;
                let times = (RATE_UNITS / rate).min(times_roomy).clamp(1, times_max);
                (rate * times, token * times)
            }
        };
        let exact =
            u128::from(rate) * u128::from(period_us) == u128::from(token) * u128::from(tokens);
        (exact || rate >= RATE_UNITS_MIN).then_some(Self {
            rate: rate as i64,
            token: token as i64,
            burst: (token * burst) as i64,
            curve: Curve::Refill,
        })
    }

    /// The units of a quota whose tokens are given for windows; `None` if no whole window comes of them.
    fn windows(tokens: u64, period_us: u64, curve: Curve) -> Option<Self> {
        let scale = Self { curve, ..Self::new(tokens, period_us, tokens)? };
        (scale.rate.checked_mul(period_us as i64) == Some(scale.burst)).then_some(scale)
    }

    /// The units of a quota that is given for windows of a calendar, which last about `period_us`. The rate is for reports
    /// and outages, so that any number of tokens will do.
    fn calendar_windows(tokens: u64, period_us: u64) -> Self {
        let token_max = CALENDAR_UNITS_MAX / tokens.max(OWED_TOKENS);
        let rate = (token_max * tokens / period_us).clamp(1, RATE_UNITS);
        let token = (rate * period_us).div_ceil(tokens);
        let (rate, token, burst) = (rate as i64, token as i64, (token * tokens) as i64);
        Self { rate, token, burst, curve: Curve::CalendarWindow }
    }

    /// The length of a window: a millisecond at least, whatever a node or the store sends, also no rate, so that few of them have
    /// to pass. Of a token bucket, the time to fill, rounded down.
    pub(crate) fn window_us(&self) -> i64 {
        self.burst.checked_div(self.rate).unwrap_or(0).max(WINDOW_LEAST_US)
    }

    /// The length of the slots in which the store remembers when a sliding log was charged.
    pub(crate) fn slot_us(&self) -> i64 {
        (self.window_us() + LOG_SLOTS - 1) / LOG_SLOTS
    }

    /// Microseconds until a key that spent all is as if it had never been used, rounded up.
    pub(crate) fn fill_us(&self) -> u64 {
        match self.curve {
            Curve::Refill => (self.burst as u64).div_ceil(self.rate as u64),
            Curve::FixedWindow | Curve::CalendarWindow => self.longest_window_us() as u64,
            Curve::SlidingWindow => 2 * self.window_us() as u64,
            Curve::SlidingLog => (self.window_us() + self.slot_us()) as u64,
        }
    }

    /// Microseconds until a key that misses so many units is as if it had never been used, at the latest.
    pub(crate) fn full_us(&self, missing: i64) -> u64 {
        match self.curve {
            Curve::Refill => self.micros_for(missing),
            _ if missing <= 0 => 0,
            // Each window pays a burst of what is owed.
            curve => {
                let owed = (missing as u64).div_ceil(self.burst as u64);
                let windows = owed + u64::from(!curve.is_fixed_window());
                let each_us = match curve {
                    Curve::SlidingLog => self.window_us() + self.slot_us(),
                    _ => self.longest_window_us(),
                } as u64;
                windows.saturating_mul(each_us).min(FULL_US_MAX)
            }
        }
    }

    /// Units of a token in which all of these quotas can be kept: if it can be, such that each has a whole number of them in a
    /// microsecond.
    pub(crate) fn common_token(all: &[Self]) -> i64 {
        let most_tokens = all.iter().map(|scale| scale.burst / scale.token).max().unwrap_or(1);
        let most = BURST_UNITS_MAX as i64 / most_tokens.max(1);
        let rate_kept = |scale: &Self| {
            (i128::from(RATE_UNITS_MAX) * i128::from(scale.token) / i128::from(scale.rate)).max(1)
        };
        let most = all.iter().map(rate_kept).fold(most.into(), i128::min) as i64;
        let roomy = most.min(BURST_UNITS_MAX as i64 / most_tokens.max(OWED_TOKENS as i64));
        let common = all.iter().try_fold(1_i64, |common, scale| {
            let least = scale.token / gcd(scale.token as u64, scale.rate as u64) as i64;
            (common / gcd(common as u64, least as u64) as i64).checked_mul(least)
        });
        match common.filter(|&common| common <= most) {
            Some(common) => (roomy / common).max(1) * common,
            None => most,
        }
    }

    /// The same quota in units of which `token` make a token. `None` if the rate cannot be kept within 0.1%, or a window
    /// would not keep its length.
    pub(crate) fn in_units_of(&self, token: i64) -> Option<Self> {
        let burst = (self.burst / self.token).checked_mul(token)?;
        let exact = i128::from(self.rate) * i128::from(token);
        let rate = exact / i128::from(self.token);
        let is_kept = rate * i128::from(self.token) * 1000 >= exact * 999 && rate > 0;
        let scale = Self { rate: rate as i64, token, burst, curve: self.curve };
        let is_whole = match self.curve {
            Curve::Refill | Curve::CalendarWindow => true,
            _ => scale.window_us() == self.window_us() && rate * i128::from(self.token) == exact,
        };
        let fits = burst <= BURST_UNITS_MAX as i64 && rate <= RATE_UNITS_MAX.into();
        (fits && is_kept && is_whole).then_some(scale)
    }

    /// Whether the other one is the same quota, in other units perhaps.
    pub(crate) fn is_same_quota(&self, other: &Self) -> bool {
        let product = |rate: i64, token: i64| i128::from(rate) * i128::from(token);
        self.curve == other.curve
            && self.burst / self.token.max(1) == other.burst / other.token.max(1)
            && product(self.rate, other.token) == product(other.rate, self.token)
    }

    /// The same quota with `rate` units in a microsecond. The rate is rounded down, by 0.1% at most; `None` if it would be by
    /// more.
    pub(crate) fn at_rate(&self, rate: i64) -> Option<Self> {
        let (own_rate, own_token) = (i128::from(self.rate), i128::from(self.token));
        let exact = i128::from(rate) * own_token;
        let token = (exact + own_rate - 1) / own_rate;
        let burst = token * i128::from(self.burst / self.token);
        let is_kept = (token * own_rate - exact) * 1000 <= exact && burst <= 1 << 60;
        is_kept.then_some(Self {
            rate,
            token: token as i64,
            burst: burst as i64,
            curve: self.curve,
        })
    }

    /// Whether `other` is of the same algorithm, and of the same windows if it counts in any. Those of a calendar are nobody's
    /// number: the rate only says about how long they last.
    pub(crate) fn has_same_windows(&self, other: &Self) -> bool {
        let is_kept = match self.curve {
            Curve::Refill | Curve::CalendarWindow => true,
            _ => self.window_us() == other.window_us(),
        };
        self.curve == other.curve && is_kept
    }

    /// Whether more tokens flow in by this rate: units that are too coarse for a slow one have it rounded up.
    pub(crate) fn is_faster_than(&self, other: &Self) -> bool {
        let [own, of_other] = [(self, other), (other, self)]
            .map(|(one, other)| i128::from(one.rate) * i128::from(other.token));
        own > of_other
    }

    /// What the store holds, in units of this node, of which `token` make a token. `None` if it is no quota, or one that these
    /// units cannot hold. A rate is rounded down.
    pub(crate) fn in_own_units(&self, token: i64) -> Option<Self> {
        let &Self { rate, token: unit, curve, .. } = self;
        let tokens = self.burst / unit;
        let is_rate = rate > 0 && unit / rate <= TOKEN_US_MAX && rate / unit <= TOKENS_MAX as i64;
        // Other numbers of the same algorithm: this node counts by its own.
        let is_quota = is_rate && (1..=TOKENS_MAX as i64).contains(&tokens);
        let burst =
            tokens.checked_mul(token).filter(|&burst| is_quota && burst <= OWN_UNITS_MAX)?;
        let own = Self { rate: converted(rate, unit, token).max(1), token, burst, curve };
        // A window keeps its length, nearly.
        let off_us = (own.window_us() - self.window_us()).abs();
        let is_kept = curve == Curve::Refill || off_us <= self.window_us() / 100;
        is_kept.then_some(own)
    }

    /// Whole tokens in `units`, rounded down.
    pub(crate) fn tokens(&self, units: i64) -> i64 {
        units.div_euclid(self.token)
    }

    /// Microseconds that refill at the full rate takes for `units`, rounded up; 0 for none.
    pub(crate) fn micros_for(&self, units: i64) -> u64 {
        (units.max(0) as u64).div_ceil(self.rate as u64)
    }
}

/// Units of which `from` make a token, in units of which `to` do, rounded down.
pub(crate) fn converted(units: i64, from: i64, to: i64) -> i64 {
    let units = i128::from(units) * i128::from(to);
    let most = i128::from(OWN_UNITS_MAX);
    units.div_euclid(i128::from(from)).clamp(-most, most) as i64
}

pub(crate) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refill_of_common_quotas_is_exact() {
        for quota in [
            Quota::per_second(1000),
            Quota::per_second(1_000_000).burst(1_000_000_000),
            Quota::per_minute(7),
            Quota::per_hour(100),
            Quota::per_day(1),
            Quota::new(1, Duration::from_secs(90)),
            Quota::new(100, Duration::from_secs(30 * 24 * 3600)),
        ] {
            let scale = quota.scale("x").unwrap();
            let per_period = i128::from(scale.rate) * quota.period().as_micros() as i128;
            assert_eq!(
                per_period,
                i128::from(scale.token) * i128::from(quota.tokens()),
                "{quota:?}"
            );
        }
    }

    /// Of 5 an hour the store could remember no more than six tokens of debt, and nodes gave their credit again and again.
    #[test]
    fn store_remembers_the_credit_of_16_nodes_of_slow_limits() {
        for quota in [
            Quota::per_minute(1),
            Quota::per_hour(5),
            Quota::per_hour(15),
            Quota::per_day(1).burst(3),
        ] {
            let scale = quota.scale("x").unwrap();
            assert!(scale.token * 15 * 16 <= 1 << 52, "{quota:?}");
            assert!(scale.rate >= 16, "{quota:?}: it is to be split among nodes");
            let pair = [scale, Quota::per_hour(7).scale("x").unwrap()];
            assert!(Scale::common_token(&pair) * 15 * 16 <= 1 << 52, "{quota:?}");
        }
        let month = Scale::calendar_windows(5, 30 * 24 * 3600 * 1_000_000);
        assert!(month.token * 15 * 16 <= 1 << 52 && month.rate >= 16, "{month:?}");
    }

    /// The rate was cut to the largest burst a second.
    #[test]
    fn plans_of_small_bursts_and_high_rates_are_kept_exactly() {
        let of = |rate, burst| Quota::per_second(rate).burst(burst).scale("x").unwrap();
        for pair in [[of(1000, 100), of(1000, 100)], [of(1000, 200), of(5000, 500)]] {
            let token = Scale::common_token(&pair);
            for scale in pair {
                let fitted = scale.in_units_of(token).unwrap();
                assert!(fitted.rate <= RATE_UNITS_MAX, "{fitted:?}");
                let (kept, asked) = (fitted.rate * scale.token, scale.rate * fitted.token);
                assert_eq!(kept, asked, "{scale:?}");
            }
        }
    }

    #[test]
    fn impossible_quotas_name_field_and_value() {
        let cases = [
            (Quota::per_second(0), "quota.tokens"),
            (Quota::per_second(TOKENS_MAX + 1), "quota.tokens"),
            (Quota::per_second(1).burst(0), "quota.burst"),
            (Quota::per_second(1).burst(u64::MAX), "quota.burst"),
            (Quota::new(1, Duration::ZERO), "quota.period"),
            (Quota::new(1, Duration::MAX), "quota.period"),
            (Quota::per_day(1).burst(400), "quota.burst"),
        ];
        for (quota, expected) in cases {
            let ConfigError::Limit { field, value, .. } = quota.scale("x").unwrap_err() else {
                panic!("{quota:?}: another error");
            };
            assert_eq!(field, expected, "{quota:?}");
            assert!(!value.is_empty());
        }
    }

    /// A reply said that a newer quota had no refill: the key took it, and was never filled again.
    #[test]
    fn newer_quota_that_no_limit_can_have_is_not_adopted() {
        let most = TOKENS_MAX as i64;
        let adopts = |rate, token, burst| {
            Scale { rate, token, burst, curve: Curve::Refill }.in_own_units(1000).is_some()
        };
        assert!(adopts(1, 1, 1) && adopts(1, 1, most));
        assert!(!adopts(0, 1, 20_040_000), "no refill");
        assert!(adopts(1, TOKEN_US_MAX, TOKEN_US_MAX) && !adopts(1, TOKEN_US_MAX + 1, 1 << 50));
        assert!(adopts(most, 1, 1) && !adopts(most + 1, 1, 1));
        assert!(!adopts(1, 10, 9), "no whole token");
        assert!(!adopts(1, 1, -20));
        assert!(!adopts(1, 1, most + 1));
    }

    proptest! {
        #[test]
        fn local_rate_is_never_above_the_quota_and_within_a_thousandth_of_it(
            tokens in 1..=TOKENS_MAX, period_us in 1..=31_622_400_000_000_u64, burst in 1..=TOKENS_MAX,
            shares_state in any::<bool>(),
        ) {
            let quota = Quota::new(tokens, Duration::from_micros(period_us)).burst(burst);
            if let Ok(scale) = quota.local_scale("x", shares_state) {
                let kept = i128::from(scale.rate) * i128::from(period_us);
                let asked = i128::from(scale.token) * i128::from(tokens);
                prop_assert!(kept <= asked && (asked - kept) * 1000 <= asked);
                prop_assert!(scale.rate > 0 && scale.rate as u64 <= LOCAL_RATE_UNITS);
                prop_assert_eq!(i128::from(scale.burst), i128::from(scale.token) * i128::from(burst));
            } else {
                let per_us = tokens as f64 / period_us as f64;
                prop_assert!(per_us > 16.0 || quota.scale("x").is_err(), "{} tokens a microsecond", per_us);
            }
        }

        #[test]
        fn the_kept_rate_is_never_above_the_quota_and_within_a_ten_thousandth_of_it(
            tokens in 1..=TOKENS_MAX, period_us in 1..=31_622_400_000_000_u64, burst in 1..=TOKENS_MAX,
        ) {
            let quota = Quota::new(tokens, Duration::from_micros(period_us)).burst(burst);
            if let Ok(scale) = quota.scale("x") {
                let kept = i128::from(scale.rate) * i128::from(period_us);
                let asked = i128::from(scale.token) * i128::from(tokens);
                prop_assert!(kept <= asked);
                prop_assert!((asked - kept) * 10_000 <= asked);
                prop_assert!(scale.burst as u64 <= BURST_UNITS_MAX);
                prop_assert_eq!(scale.burst, scale.token * burst as i64);
                prop_assert!(scale.rate > 0 && scale.token > 0);
            }
        }
    }
}
