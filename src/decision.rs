//! The answer to a request.

use std::time::Duration;

use crate::algorithm::{LogStanding, Rule, Standing, Turn};
use crate::limit::LimitInfo;
use crate::quota::{Curve, PERIOD_MAX, Quota};
use crate::time::{Timestamp, micros};

mod held;

pub(crate) use held::{Held, OVERDRAW_PARTS, Refill, View};

/// The least `retry_after` of a denial that is not certain, or that was made from a lease.
pub(crate) const RETRY_MIN_US: u64 = 1_000;

/// What a limit said about one request, and what it knew when it said so.
///
/// A small `Copy` value; the times are computed when asked for.
#[derive(Clone, Copy, Debug)]
#[must_use = "a decision that nobody looks at limits nothing"]
pub struct Decision {
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
    /// The limit is in shadow mode and would have denied.
    pub(crate) shadow_denied: bool,
    pub(crate) cost: u32,
    pub(crate) source: Source,
    /// When it was decided; if the store did, since 1970 by its clock.
    pub(crate) now: Timestamp,
    pub(crate) limit: &'static LimitInfo,
}

/// What a decision was made from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// The state of the key, which this node alone knows.
    Local(Standing),
    /// The state of the key in the store, which decided.
    Store(Standing),
    /// What this node holds of the key.
    Lease(Held),
    /// An override, or a limit that is off: until then.
    Override(Timestamp),
    /// The denial with which the key was blocked: until then.
    Blocked(Timestamp),
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

    /// True if the limit is in [shadow mode](crate::Switch::Shadow) and would have denied the request, which may go on.
    pub fn is_shadow_denied(&self) -> bool {
        self.shadow_denied
    }

    /// True if an [override](crate::Override) decided, or the limit is [off](crate::Switch::Off): nothing is charged.
    pub fn is_override(&self) -> bool {
        matches!(self.source, Source::Override(_))
    }

    /// The decision of a limit that is in shadow mode, or not: a denial goes on.
    pub(crate) fn shadowed(self, is_shadow: bool) -> Self {
        let shadow_denied = is_shadow && !self.allowed;
        Self { allowed: self.allowed || is_shadow, shadow_denied, ..self }
    }

    /// Whether the request took nothing, although it was allowed.
    pub(crate) fn took_nothing(&self) -> bool {
        self.shadow_denied || self.is_override()
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

    /// The name of the [plan](crate::Limit::plan) that the caller or an override named; `None` is the limit's own quota, or one
    /// that an [override](crate::Override::quota) gives the key: [`quota`](Self::quota) tells which. Where nodes share the limit, another one may be in force for a while: docs/PLANS.md says when.
    pub fn plan_name(&self) -> Option<&'static str> {
        self.limit.plan_name()
    }

    /// The quota that decided, as it was configured, of the limit, its plan or an override: tokens, their period, and the burst. Of other algorithms than the token
    /// bucket the burst is what a key can spend at once.
    pub fn quota(&self) -> Quota {
        self.limit.rule.quota()
    }

    /// The limit's algorithm with its numbers, as it was configured.
    pub fn rule(&self) -> Rule {
        self.limit.rule
    }

    /// The limit's burst: the most that a key can have, in tokens.
    pub fn burst(&self) -> u64 {
        self.quota().burst_tokens()
    }

    /// Tokens that the key is believed to have left in the whole cluster after this decision.
    /// A hint from this node's view: the next decision may still differ. A local or exact limit knows it exactly.
    pub fn remaining(&self) -> u64 {
        match &self.source {
            Source::Local(standing) | Source::Store(standing) => standing.remaining(),
            Source::Lease(held) => held.remaining(&self.limit.scale, self.now),
            Source::Override(_) | Source::Blocked(_) => self.left_by_override(),
        }
    }

    /// What an override leaves a key, in tokens.
    fn left_by_override(&self) -> u64 {
        if self.allowed { self.burst() } else { 0 }
    }

    /// Microseconds until a key is blocked no more.
    fn blocked_us(&self, until: Timestamp) -> u64 {
        if self.allowed { 0 } else { until.micros_since(self.now).min(micros(PERIOD_MAX)) }
    }

    /// How long to wait before the same request has a chance; zero when it was allowed. A local or exact limit will
    /// allow it then, and not before, if nobody else spends and the cost is not above the key's burst. Of a key that is blocked without an end it is 366 days.
    pub fn retry_after(&self) -> Duration {
        if self.allowed {
            return Duration::ZERO;
        }
        Duration::from_micros(match &self.source {
            Source::Local(standing) | Source::Store(standing) => {
                let retry_us = standing.retry_us(self.cost);
                if self.sure && retry_us > 0 { retry_us } else { retry_us.max(RETRY_MIN_US) }
            }
            Source::Lease(held) => {
                let expected_us = match self.window_left_us() {
                    Some(_) if held.remaining(&self.limit.scale, self.now) >= self.cost.into() => 0,
                    Some(left_us) => left_us,
                    None => held.expected_us(&self.limit.scale, self.now, self.cost),
                };
                expected_us.max(RETRY_MIN_US)
            }
            Source::Override(until) | Source::Blocked(until) => self.blocked_us(*until),
        })
    }

    /// How long the request has yet to wait before it goes on. Zero unless it was allowed by
    /// [`schedule`](crate::ActiveLimit::schedule).
    pub fn delay(&self) -> Duration {
        match &self.source {
            Source::Local(standing) | Source::Store(standing) => {
                Duration::from_micros(standing.delay_us())
            }
            Source::Lease(_) | Source::Override(_) | Source::Blocked(_) => Duration::ZERO,
        }
    }

    /// The same after the wait for its tokens. It is a denial if it was one, or if they were not used.
    pub(crate) fn after_delay(self, is_used: bool) -> Self {
        let mut told = self.without_delay();
        (told.allowed, told.sure) = (self.allowed && is_used, self.sure && is_used);
        if let Source::Local(Standing::Turn(rule, turn)) | Source::Store(Standing::Turn(rule, turn)) =
            &mut told.source
            && is_used
        {
            let waited = self.delay();
            told.now = self.now.plus_micros(micros(waited));
            turn.ahead = turn.ahead.saturating_sub(rule.units_in(waited));
        }
        told
    }

    /// The same where nobody waits.
    pub(crate) fn without_delay(self) -> Self {
        let mut source = self.source;
        if let Source::Local(Standing::Turn(_, turn)) | Source::Store(Standing::Turn(_, turn)) =
            &mut source
        {
            *turn = Turn { delay: 0, max_delay: 0, ..*turn };
        }
        Self { source, ..self }
    }

    /// The denial with which a key is blocked from `now` on.
    pub(crate) fn blocking(self, until: Timestamp, now: Timestamp) -> Self {
        Self { source: Source::Blocked(until), now, ..self }
    }

    /// Whether the key is blocked: the end of a window does not let it go on.
    #[cfg(feature = "http")]
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_denied() && matches!(self.source, Source::Override(_) | Source::Blocked(_))
    }

    /// A denial of `cost` tokens by those who came before, where the key's own state is this.
    pub(crate) fn denied_behind_others(self, cost: u32) -> Self {
        Self { allowed: false, sure: false, ..self.about(cost) }
    }

    /// The same state, told to a request of `cost` tokens. This decision was about one token, so a log does not know when so many
    /// return.
    pub(crate) fn about(self, cost: u32) -> Self {
        let mut source = self.source;
        if cost > 1
            && let Source::Local(Standing::Log(log)) | Source::Store(Standing::Log(log)) =
                &mut source
        {
            *log = LogStanding { retry_us: 0, ..*log };
        }
        Self { cost: cost.max(1), source, ..self }
    }

    /// How long until the key is as if it had never been used, if nobody spends on it: until its bucket is full.
    pub fn reset_after(&self) -> Duration {
        let reset_us = match &self.source {
            Source::Local(standing) | Source::Store(standing) => standing.reset_us(),
            Source::Lease(held) => {
                let scale = &self.limit.scale;
                let full_us = held.full_us(scale, self.now);
                // The first of these windows is the present one, of which only so much is left.
                self.window_since_and_left_us().map_or(full_us, |[_, left_us]| {
                    let later_us = full_us.saturating_sub(scale.longest_window_us() as u64);
                    full_us.min(left_us + later_us)
                })
            }
            Source::Override(until) | Source::Blocked(until) => self.blocked_us(*until),
        };
        Duration::from_micros(reset_us).max(self.retry_after())
    }

    /// How long a key that spent its burst takes to have it again: an empty bucket to fill, a window to pass.
    pub fn fill_time(&self) -> Duration {
        let quota = self.quota();
        let product = u128::from(quota.burst_tokens()) * quota.period().as_micros();
        Duration::from_micros(product.div_ceil(quota.tokens().max(1).into()) as u64)
    }

    /// How long until the key has a token more, if nobody spends on it; zero when its bucket is full.
    /// Not longer than [`retry_after`](Self::retry_after), if the request was denied.
    pub fn next_token_after(&self) -> Duration {
        self.remaining_and_next().1
    }

    /// [`remaining`](Self::remaining) and [`next_token_after`](Self::next_token_after) for the price of
    /// one.
    pub(crate) fn remaining_and_next(&self) -> (u64, Duration) {
        let (left, next_us) = match &self.source {
            Source::Local(standing) | Source::Store(standing) => standing.remaining_and_next_us(),
            Source::Lease(held) => {
                let (left, next_us) = held.remaining_and_next_us(&self.limit.scale, self.now);
                let window_us = self.window_left_us().filter(|_| next_us > 0);
                (left, window_us.unwrap_or(next_us))
            }
            Source::Override(until) | Source::Blocked(until) => {
                (self.left_by_override(), self.blocked_us(*until))
            }
        };
        let next = Duration::from_micros(next_us);
        (left, if self.is_denied() { next.min(self.retry_after()) } else { next })
    }

    /// How long until a request of so many tokens would be allowed, if nobody spends on the key; one of more than
    /// [`burst`](Self::burst) tokens mostly never is. Of a sliding log it is exact for the next token, and else at most
    /// too long.
    pub fn left_after(&self, tokens: u32) -> Duration {
        if let Source::Local(standing) | Source::Store(standing) = &self.source {
            return Duration::from_micros(standing.wait_us(tokens.into()));
        }
        if let Source::Override(until) | Source::Blocked(until) = &self.source {
            return Duration::from_micros(self.blocked_us(*until));
        }
        let missing = u64::from(tokens).saturating_sub(self.remaining());
        if missing == 0 {
            return Duration::ZERO;
        }
        if let Some(left_us) = self.window_left_us() {
            return Duration::from_micros(left_us);
        }
        let scale = &self.limit.scale;
        let more = (missing as i64 - 1).saturating_mul(scale.token);
        self.next_token_after().saturating_add(Duration::from_micros(scale.micros_for(more)))
    }

    /// Whether the answer is backed by tokens that this node holds, or is surely no, or the store decided. An unsure
    /// answer was given on credit, from an old view, or by an outage policy.
    pub fn is_sure(&self) -> bool {
        self.sure
    }

    /// How old this node's last word from the store about the key is; `None` when the store never
    /// spoke of it (a `local` limit, or a new key).
    pub fn view_age(&self) -> Option<Duration> {
        match &self.source {
            Source::Local(_) | Source::Store(_) | Source::Override(_) | Source::Blocked(_) => None,
            Source::Lease(held) => held.view.age(self.now),
        }
    }

    /// When the store decided, since the beginning of 1970 by its clock; `None` if this node did.
    pub fn store_time(&self) -> Option<Duration> {
        match self.source {
            Source::Store(_) => Some(Duration::from_micros(self.now.as_micros())),
            Source::Local(_) | Source::Lease(_) | Source::Override(_) | Source::Blocked(_) => None,
        }
    }

    /// Microseconds until the window ends in which a leased limit gives no more tokens, by this node's clock. `None` if that
    /// tells nothing: the view is of an earlier window, or an outage policy gives refill.
    fn window_left_us(&self) -> Option<u64> {
        let Source::Lease(held) = &self.source else { return None };
        let [since_us, left_us] = self.window_since_and_left_us()?;
        let is_of_window = held.view.age(self.now).is_some_and(|age| micros(age) <= since_us);
        (is_of_window && !held.has_refill()).then_some(left_us)
    }

    /// Microseconds since a leased fixed window began, and until it ends, by this node's clock.
    fn window_since_and_left_us(&self) -> Option<[u64; 2]> {
        let LimitInfo { terms, calendar, window_offset_us, .. } = self.limit;
        let now_us = self.now.as_micros() + window_offset_us;
        let scale = &terms.stored_scale;
        Some(match (scale.curve, calendar) {
            (Curve::CalendarWindow, Some(calendar)) => {
                let [begins_us, ends_us] = calendar.window_span_us(now_us);
                [now_us - begins_us, ends_us - now_us]
            }
            (Curve::FixedWindow, _) => {
                let window_us = scale.window_us() as u64;
                [now_us % window_us, window_us - now_us % window_us]
            }
            _ => return None,
        })
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
