//! A named quota, with who decides and how it is kept in step.

use std::time::Duration;

use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::micros;

mod terms;

pub(crate) use terms::{CreditRule, Pace, Terms};
use terms::{KEY_TICK_MIN_US, epoch_us};

/// How far a node may spend on a key before it hears from the store, in tokens, unless the limit
/// says otherwise and as long as there are no more nodes than the burst has tokens.
pub const DEFAULT_CREDIT: u32 = 1;
/// The most credit a limit can give.
pub const CREDIT_MAX: u32 = 15;
/// How often a busy key is synced with the store.
pub const DEFAULT_SYNC_INTERVAL: Duration = Duration::from_millis(50);
/// The shortest sync interval.
pub const SYNC_INTERVAL_MIN: Duration = Duration::from_millis(5);
/// The longest sync interval.
pub const SYNC_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// The longest name of a limit, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// The highest cost of one request, in tokens: what the decision word can count.
pub const COST_MAX: u64 = (1 << 24) - 1;

/// Who decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// This node alone; the store is never asked.
    Local,
    /// This node, from tokens that the store leased to it; the store is asked in the background.
    #[default]
    Hybrid,
}

/// When a key is synced with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// Every so often while it is busy, sooner when it runs low or when its burst is spent faster.
    Interval(Duration),
}

impl Default for SyncPolicy {
    fn default() -> Self {
        Self::Interval(DEFAULT_SYNC_INTERVAL)
    }
}

/// What a limit does while the store is away, once the leases it gave have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutagePolicy {
    /// Each node takes its share: `rate / nodes` and `burst / nodes`, from the level it held.
    #[default]
    Share,
    /// Each node goes on at the rate last leased to it, for ever.
    LastRate,
    /// Everything is admitted.
    Open,
    /// Everything is denied.
    Closed,
}

/// A named limit: a quota, who decides, how it is synced, and what happens in an outage.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limit, OutagePolicy, Quota};
///
/// let limit = Limit::new("api", Quota::per_second(1000))
///     .sync_interval(Duration::from_millis(20))
///     .outage(OutagePolicy::Closed);
/// # let _ = limit;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(crate) name: String,
    pub(crate) quota: Quota,
    pub(crate) mode: Mode,
    pub(crate) sync: SyncPolicy,
    pub(crate) outage: OutagePolicy,
    pub(crate) grace: Duration,
    pub(crate) credit: Option<u32>,
    pub(crate) version: u32,
}

impl Limit {
    /// A hybrid limit with the defaults of this module.
    pub fn new(name: impl Into<String>, quota: Quota) -> Self {
        Self {
            name: name.into(),
            quota,
            mode: Mode::default(),
            sync: SyncPolicy::default(),
            outage: OutagePolicy::default(),
            grace: Duration::ZERO,
            credit: None,
            version: 0,
        }
    }

    /// Who decides.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// When keys are synced.
    #[must_use]
    pub fn sync(mut self, policy: SyncPolicy) -> Self {
        self.sync = policy;
        self
    }

    /// Short for [`sync`](Self::sync) with [`SyncPolicy::Interval`].
    #[must_use]
    pub fn sync_interval(self, interval: Duration) -> Self {
        self.sync(SyncPolicy::Interval(interval))
    }

    /// What happens while the store is away.
    #[must_use]
    pub fn outage(mut self, policy: OutagePolicy) -> Self {
        self.outage = policy;
        self
    }

    /// How long the store may be silent before the outage policy takes over, at the least. Leases
    /// always end by their own time, which is one to two seconds for intervals up to 250 ms.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How far a node may spend on a key beyond its lease before it hears from the store, in
    /// tokens, 0 to [`CREDIT_MAX`]. The cluster admits at most nodes × credit too much.
    ///
    /// With 0 a limit is strict: [`check`](crate::ActiveLimit::check) says yes to nothing that the
    /// store has not given to this node, so the first request of a key on a node is denied, and
    /// [`decide`](crate::ActiveLimit::decide) is the better way to ask.
    ///
    /// Unless this is called, the credit is [`DEFAULT_CREDIT`], and 0 while the store counts more
    /// nodes than the burst has tokens: where each node's one token would be more than the limit
    /// itself, as with logins.
    #[must_use]
    pub fn credit(mut self, tokens: u32) -> Self {
        self.credit = Some(tokens);
        self
    }

    /// The version of this definition. Raise it when the quota changes: the store keeps the quota
    /// of the highest version that it has seen, and refuses nodes that still hold an older one.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limit's quota.
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// Checks everything once, so that nothing needs to be checked on the way of a decision.
    pub(crate) fn validate(&self) -> Result<Terms, ConfigError> {
        let invalid = |field, value: String, reason| {
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        let named = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(&byte);
        if self.name.is_empty() || self.name.len() > NAME_BYTES_MAX || !self.name.bytes().all(named)
        {
            let reason = "must be 1 to 64 of the characters a-z A-Z 0-9 _ . - /";
            return invalid("name", self.name.clone(), reason);
        }
        if let Some(credit) = self.credit.filter(|&credit| credit > CREDIT_MAX) {
            return invalid("credit", credit.to_string(), "must be 0 to 15 tokens");
        }
        let SyncPolicy::Interval(interval) = self.sync;
        if !(SYNC_INTERVAL_MIN..=SYNC_INTERVAL_MAX).contains(&interval) {
            return invalid("sync.interval", format!("{interval:?}"), "must be 5 ms to 5 s");
        }
        let scale = self.quota.scale(&self.name)?;
        let tick_us = micros(interval).min(scale.fill_us() / 4).max(KEY_TICK_MIN_US);
        let credit_rule = self.credit_rule();
        Ok(Terms {
            scale,
            tick_us,
            pace: None,
            epoch_us: epoch_us(micros(interval)),
            credit: credit_rule.at(None),
            credit_rule,
            cost_max: self.quota.burst_tokens().min(COST_MAX) as u32,
            mode: self.mode,
            outage: self.outage,
            grace_us: micros(self.grace),
            version: self.version,
        })
    }

    /// How much credit nodes give.
    pub(crate) fn credit_rule(&self) -> CreditRule {
        let burst = self.quota.burst_tokens();
        let least = |credit: u32| burst.min(u64::from(credit)) as u32;
        match self.credit {
            Some(credit) => CreditRule::fixed(least(credit)),
            None => CreditRule { together: burst, ..CreditRule::fixed(least(DEFAULT_CREDIT)) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_cannot_be_kept_names_field_and_value() {
        let quota = Quota::per_second(10);
        let cases = [
            (Limit::new("", quota), "name"),
            (Limit::new("a:b", quota), "name"),
            (Limit::new("x".repeat(65), quota), "name"),
            (Limit::new("x", quota).credit(16), "credit"),
            (Limit::new("x", quota).sync_interval(Duration::from_millis(4)), "sync.interval"),
            (Limit::new("x", quota).sync_interval(Duration::from_secs(6)), "sync.interval"),
            (Limit::new("x", Quota::per_day(0)), "quota.tokens"),
        ];
        for (limit, expected) in cases {
            let ConfigError::Limit { field, .. } = limit.validate().unwrap_err() else {
                panic!("{limit:?}: another error");
            };
            assert_eq!(field, expected, "{limit:?}");
        }
    }

    #[test]
    fn a_key_ticks_four_times_while_its_burst_is_spent_at_the_rate() {
        let terms = Limit::new("x", Quota::per_second(1000).burst(100)).validate().unwrap();
        assert_eq!(terms.tick_us, 25_000);
        let terms = Limit::new("x", Quota::per_second(1000)).validate().unwrap();
        assert_eq!(terms.tick_us, 50_000);
    }
}
