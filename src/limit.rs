//! A named rule, with who decides and how it is kept in step.

use std::time::Duration;

use crate::algorithm::Rule;
use crate::error::ConfigError;
use crate::overrides::Switch;
use crate::quota::{Curve, PERIOD_MAX, Quota, Scale};
use crate::time::micros;

mod concurrency;
mod info;
mod override_quota;
mod plans;
mod terms;
mod update;

pub(crate) use concurrency::PermitTerms;
pub use concurrency::{Concurrency, PERMITS_MAX};
pub use info::OVERRIDE_QUOTAS_MAX;
pub(crate) use info::{LimitInfo, QuotaOf};
pub use plans::PLANS_MAX;
pub(crate) use plans::Plan;
pub(crate) use terms::{Credit, CreditRule, Pace, Terms};
use terms::{KEY_TICK_MIN_US, epoch_us};
pub(crate) use update::NodeTerms;

/// What a node may spend on a key of which it has a view before the store answers, in tokens, unless the limit
/// sets it.
pub const DEFAULT_CREDIT: u32 = 1;
/// The number of nodes that a limiter assumes until the store has counted them, unless
/// [`Builder::max_nodes`](crate::Builder::max_nodes) sets it.
pub const DEFAULT_MAX_NODES: u32 = 16;
/// The most credit a limit can give.
pub const CREDIT_MAX: u32 = 15;
/// How long [`check_sure`](crate::ActiveLimit::check_sure) waits for the store at most, unless
/// [`Limit::max_wait`] sets it.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_millis(50);
/// The longest wait of an [exact](Limit::exact) limit for its store.
pub const MAX_WAIT_EXACT: Duration = Duration::from_secs(10);
/// How many callers of [`until_ready`](crate::ActiveLimit::until_ready) may wait at a time, unless
/// [`Limit::max_waiting`] sets it.
pub const DEFAULT_MAX_WAITING: u32 = 1000;
/// How often a busy key is synced with the store.
pub const DEFAULT_SYNC_INTERVAL: Duration = Duration::from_millis(50);
/// The shortest sync interval.
pub const SYNC_INTERVAL_MIN: Duration = Duration::from_millis(5);
/// The longest sync interval.
pub const SYNC_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// The most credit that a node gives by accuracy, in tokens.
pub const ACCURACY_CREDIT_MAX: u32 = 8;
/// The longest tick of a key that is synced by accuracy, unless a ceiling lengthens it.
pub const ACCURACY_TICK_MAX: Duration = Duration::from_millis(500);
/// The longest tick of a key that a ceiling on store traffic can bring about.
pub const CEILING_TICK_MAX: Duration = Duration::from_secs(2);
/// The highest ceiling on store traffic, in key syncs a second.
pub const CEILING_MAX: f64 = 1e6;
/// The highest version of a limit's definition.
pub const VERSION_MAX: u32 = (1 << 25) - 1;
/// The longest name of a limit, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
const NAME_REASON: &str = "must be 1 to 64 of the characters a-z A-Z 0-9 _ . - /";
/// The highest cost of one request, in tokens: what the decision word can count.
pub const COST_MAX: u64 = (1 << 24) - 1;

/// Who decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Mode {
    /// This node alone; the store is never asked.
    Local,
    /// This node, from tokens that the store leased to it; the store is asked in the background. Of a
    /// [`LeakyBucket`](crate::LeakyBucket) nodes take slots instead, and a request for which none is held costs a call.
    #[default]
    Hybrid,
    /// The store, by its clock: each decision is a call. Ask with
    /// [`Limiter::async_limit`](crate::Limiter::async_limit).
    Exact,
}

/// When a key is synced with the store.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// Every so often while it is busy, sooner when it runs low or when its burst is spent faster.
    Interval(Duration),
    /// As often as its traffic warrants, with no more credit than the accuracy allows: see
    /// 'Choosing by accuracy' in docs/ACCURACY.md.
    ///
    /// Each node gives at most `excess x burst / nodes` tokens of credit, rounded down, and none before it
    /// knows the number of nodes: [`ACCURACY_CREDIT_MAX`] at most on a key of which it has a view, the usual
    /// first credit at most on another one, and at most what [`Limit::credit`] says. A key is synced before its
    /// node is asked for more than `excess x burst`
    /// tokens of it, or two if that is less: each 5 ms at the most often, and each
    /// [`ACCURACY_TICK_MAX`] ([`DEFAULT_SYNC_INTERVAL`] if it is less than two) or quarter of the
    /// time to fill at the least.
    Accuracy {
        /// The most that [`bound`](crate::bound()) may come to while nothing goes wrong, as a part
        /// of the burst: 0.01 is one percent. Above 0 and at most 1.
        excess: f64,
        /// The most key syncs a second that this node asks of the store for the limit, 1 to
        /// [`CEILING_MAX`]: ticks grow up to [`CEILING_TICK_MAX`] to stay below it, and beyond
        /// that keys wait their turn. A limit that is held back so admits less, not more. Calls
        /// that show that a node lives (one a lane and second) and syncs that callers of
        /// [`check_sure`](crate::ActiveLimit::check_sure) wait for come on top.
        key_syncs_per_second_max: Option<f64>,
    },
}

impl Default for SyncPolicy {
    fn default() -> Self {
        Self::Interval(DEFAULT_SYNC_INTERVAL)
    }
}

/// What a limit does while the store is away, once the leases it gave have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum OutagePolicy {
    /// Each node takes its share: `rate / nodes` and `burst / nodes`, from the level it held; of an exact limit or a leaky
    /// bucket, from a full one.
    #[default]
    Share,
    /// Each node goes on at the rate last leased to it, for ever. Not for exact limits and leaky buckets, which lease none.
    LastRate,
    /// Everything is admitted.
    Open,
    /// Everything is denied. On a hybrid limit a key that is new to a node may still have its first credit until the policy has been
    /// in force for a second.
    Closed,
}

/// Keys that are synced before so few tokens are asked for would never be worth a lease.
const PACE_TOKENS_MIN: f64 = 2.0;

/// A named limit: an algorithm with its numbers, who decides, how it is synced, and what happens in an outage.
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
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    pub(crate) name: String,
    pub(crate) rule: Rule,
    pub(crate) mode: Mode,
    pub(crate) sync: SyncPolicy,
    pub(crate) outage: OutagePolicy,
    pub(crate) grace: Duration,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: u32,
    pub(crate) credit: Option<u32>,
    pub(crate) version: u32,
    pub(crate) switch: Switch,
    pub(crate) block_for: Duration,
    pub(crate) plans: Vec<Plan>,
}

/// Whether a limit can have this name.
fn is_valid_name(name: &str) -> bool {
    let named = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(&byte);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(named)
}

impl Limit {
    /// A hybrid limit with the defaults of this module.
    ///
    /// `rule` is a [`Quota`] for the token bucket, or a [`LeakyBucket`](crate::LeakyBucket),
    /// [`FixedWindow`](crate::FixedWindow), [`SlidingWindow`](crate::SlidingWindow) or
    /// [`SlidingLog`](crate::SlidingLog).
    pub fn new(name: impl Into<String>, rule: impl Into<Rule>) -> Self {
        Self {
            name: name.into(),
            rule: rule.into(),
            mode: Mode::default(),
            sync: SyncPolicy::default(),
            outage: OutagePolicy::default(),
            grace: Duration::ZERO,
            max_wait: DEFAULT_MAX_WAIT,
            max_waiting: DEFAULT_MAX_WAITING,
            credit: None,
            version: 0,
            switch: Switch::On,
            block_for: Duration::ZERO,
            plans: Vec::new(),
        }
    }

    /// Who decides.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Each node keeps the limit alone: [`Mode::Local`].
    #[must_use]
    pub fn local(self) -> Self {
        self.mode(Mode::Local)
    }

    /// The store decides each request: [`Mode::Exact`].
    ///
    /// The cluster admits what the algorithm's definition says, and each decision takes a round trip. If the store does not
    /// answer within [`max_wait`](Self::max_wait), the [outage policy](Self::outage) decides, and
    /// [`Decision::is_sure`](crate::Decision::is_sure) is false. Until the store answers again, a caller waits now and then
    /// (once in four times as long); the others are decided at once. A node's share is one of
    /// [`Builder::max_nodes`](crate::Builder::max_nodes) parts of the limit, a token at least; a cost above it is denied.
    /// Requests admitted in an outage are not charged later, so each outage can admit as much again. A request whose reply
    /// was lost may have been charged. A store that loses its memory gives each key its full limit. While 10,000 decisions of
    /// a limiter are under way, the outage policy decides about others, and an [event](crate::Event::NotDecided) says so.
    ///
    /// [`sync`](Self::sync), [`credit`](Self::credit) and [`grace`](Self::grace) have no effect, nor has
    /// [`version`](Self::version): a changed rule applies with the next request.
    #[must_use]
    pub fn exact(self) -> Self {
        self.mode(Mode::Exact)
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

    /// Short for [`sync`](Self::sync) with [`SyncPolicy::Accuracy`] without a ceiling: the cluster
    /// admits at most `excess`, a part of the burst, too much. One percent is 0.01. It has no effect on a
    /// [`LeakyBucket`](crate::LeakyBucket), which is not synced.
    ///
    /// ```
    /// use tidegate::{Incidents, Limit, Quota, bound};
    ///
    /// let limit = Limit::new("api", Quota::per_second(10_000)).accuracy(0.01);
    /// for nodes in [1, 7, 20, 64, 1000] {
    ///     assert!(bound(&limit, nodes, &Incidents::default()) <= 100.0);
    /// }
    /// ```
    #[must_use]
    pub fn accuracy(self, excess: f64) -> Self {
        self.sync(SyncPolicy::Accuracy { excess, key_syncs_per_second_max: None })
    }

    /// What happens while the store is away.
    #[must_use]
    pub fn outage(mut self, policy: OutagePolicy) -> Self {
        self.outage = policy;
        self
    }

    /// How long [`check_sure`](crate::ActiveLimit::check_sure) waits for the store at most
    /// ([`DEFAULT_MAX_WAIT`]). It does not wait at all while the store takes longer than that. With zero it
    /// answers like [`check`](crate::ActiveLimit::check). An [exact](Self::exact) limit needs more than 0, and at most
    /// [`MAX_WAIT_EXACT`].
    #[must_use]
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.max_wait = wait;
        self
    }

    /// How many callers of [`until_ready`](crate::ActiveLimit::until_ready) may wait at a time, over all keys
    /// ([`DEFAULT_MAX_WAITING`]). Others are decided about at once.
    #[must_use]
    pub fn max_waiting(mut self, callers: u32) -> Self {
        self.max_waiting = callers;
        self
    }

    /// How long the store may be silent before the outage policy takes over, at the least. Leases
    /// always end by their own time, which is one to two seconds for intervals up to 250 ms. It has no effect on exact limits
    /// and leaky buckets: their policy decides about the first request that the store does not answer in time.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// What a node may spend on a key beyond its lease before the store answers, in tokens, 0 to
    /// [`CREDIT_MAX`]. N nodes exceed the limit by at most N times that.
    ///
    /// Unless this is called, a node gives [`DEFAULT_CREDIT`] to a key of which it has a view. To another key,
    /// which is new to it or must be full again, it gives a first credit of `burst / (4 x nodes)`, rounded up,
    /// or of half the burst where it is the only node, and never more than [`CREDIT_MAX`]. All first credits
    /// together are at most half of the burst, or one token a node, once the nodes have been counted.
    #[must_use]
    pub fn credit(mut self, tokens: u32) -> Self {
        self.credit = Some(tokens);
        self
    }

    /// No credit: without faults the cluster never exceeds the limit. [`check`](crate::ActiveLimit::check) then denies
    /// whatever the store has not leased to this node beforehand, so it denies the first request of a key on
    /// each node. Use [`check_sure`](crate::ActiveLimit::check_sure) with strict limits.
    #[must_use]
    pub fn strict(self) -> Self {
        self.credit(0)
    }

    /// The version of this definition. Raise it with the algorithm or with the period of windows; another quota needs none. The
    /// highest version that the store has seen of a key holds, and nodes of an older one follow. Exact limits and leaky
    /// buckets have no versions: each request is decided by its node's quota. At most [`VERSION_MAX`].
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Whether the limit is enforced, until [`Overrides::switch`](crate::Overrides::switch) says otherwise.
    /// [`Switch::Shadow`] is for a limit that is to be tried first.
    #[must_use]
    pub fn switch(mut self, switch: Switch) -> Self {
        self.switch = switch;
        self
    }

    /// After a [sure](crate::Decision::is_sure) denial, a key is denied for `time`, whatever it has: for those who do not stop.
    /// Each node does so by its own denials, and keeps at most [`OVERRIDES_MAX`](crate::OVERRIDES_MAX) such keys of a limit; other keys are limited as
    /// usual. A request that costs 0 blocks nobody. Zero, the default, blocks nobody. At most 366 days.
    #[must_use]
    pub fn block_for(mut self, time: Duration) -> Self {
        self.block_for = time;
        self
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limit's quota. Of other algorithms than the token bucket the burst is what a key can spend at once.
    pub fn quota(&self) -> Quota {
        self.rule.quota()
    }

    /// The limit's algorithm with its numbers.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// When keys are synced with the store.
    pub fn sync_policy(&self) -> SyncPolicy {
        self.sync
    }

    /// The credit that was [set](Self::credit), in tokens; `None` if nodes give it by the burst and their number.
    pub fn fixed_credit(&self) -> Option<u32> {
        self.credit
    }

    /// Checks everything once, so that nothing needs to be checked on the way of a decision.
    pub(crate) fn validate(&self) -> Result<Terms, ConfigError> {
        self.terms(self.quota().scale(&self.name)?)
    }

    /// The numbers of the limit on a node. `is_alone`: the node has no store, or the limit is local. `nodes` share it;
    /// where that is not known, `uncounted` do until the store has counted them.
    pub(crate) fn validate_on_node(
        &self,
        is_alone: bool,
        nodes: Option<u32>,
        uncounted: u32,
    ) -> Result<Terms, ConfigError> {
        let mut terms = match self.mode {
            Mode::Exact => self.validate_exact(uncounted)?,
            _ if is_alone => self.validate_local()?,
            Mode::Local | Mode::Hybrid => self.validate_hybrid(uncounted)?,
        };
        if is_alone {
            (terms.mode, terms.share) = (Mode::Local, None);
        }
        self.fit_plans(&mut terms, is_alone)?;
        if let Some(nodes) = nodes {
            self.validate_credit(&terms, nodes)?;
        }
        terms.credit_rule.uncounted = uncounted;
        terms.credit = terms.credit_rule.at(None);
        Ok(terms)
    }

    /// The limit's numbers, where leases are counted in these units.
    fn terms(&self, scale: Scale) -> Result<Terms, ConfigError> {
        let invalid = |field, value: String, reason| {
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        if !is_valid_name(&self.name) {
            return invalid("name", self.name.clone(), NAME_REASON);
        }
        if let Some(credit) = self.credit.filter(|&credit| credit > CREDIT_MAX) {
            return invalid("credit", credit.to_string(), "must be 0 to 15 tokens");
        }
        if self.version > VERSION_MAX {
            return invalid("version", self.version.to_string(), "must be at most 33554431");
        }
        if self.block_for > PERIOD_MAX {
            return invalid(
                "block_for",
                format!("{:?}", self.block_for),
                "must be at most 366 days",
            );
        }
        self.validate_sync()?;
        let spent_us = (scale.window_us() as u64 / 4).max(KEY_TICK_MIN_US);
        let (interval, pace) = self.interval_and_pace(spent_us);
        let held_back = pace.is_some_and(|pace| pace.ceiling.is_some());
        let tick_us = if held_back { micros(interval) } else { micros(interval).min(spent_us) };
        let credit_rule = self.credit_rule();
        Ok(Terms {
            scale,
            stored_scale: scale,
            tick_us,
            pace,
            epoch_us: epoch_us(micros(interval)),
            credit: credit_rule.at(None),
            credit_rule,
            cost_max: self.quota().burst_tokens().min(COST_MAX) as u32,
            mode: self.mode,
            key_rule: None,
            calendar: None,
            share: None,
            outage: self.outage,
            max_wait_us: micros(self.max_wait),
            max_waiting: self.max_waiting,
            grace_us: micros(self.grace),
            version: self.version,
        })
    }

    /// When keys are synced. Those of a leaky bucket are not: no accuracy says when nodes ask for slots, nor how much credit
    /// there is.
    fn sync_in_force(&self) -> SyncPolicy {
        match (self.rule, self.sync) {
            (Rule::LeakyBucket(_), SyncPolicy::Accuracy { .. }) => SyncPolicy::default(),
            (_, sync) => sync,
        }
    }

    /// The longest tick, before what a key's burst allows; and by accuracy, how ticks follow traffic, at most
    /// `spent_us` long.
    fn interval_and_pace(&self, spent_us: u64) -> (Duration, Option<Pace>) {
        match self.sync_in_force() {
            SyncPolicy::Interval(interval) => (interval, None),
            SyncPolicy::Accuracy { excess, key_syncs_per_second_max: ceiling } => {
                let longest = if ceiling.is_some() { CEILING_TICK_MAX } else { ACCURACY_TICK_MAX };
                let tokens = excess * self.quota().burst_tokens() as f64;
                // Where next to nothing may be wrong, nothing is gained by hearing of it late.
                let small = tokens < PACE_TOKENS_MIN;
                let rare = if small { DEFAULT_SYNC_INTERVAL } else { ACCURACY_TICK_MAX };
                let most_us = micros(rare).min(spent_us);
                let pace = Pace {
                    tokens: tokens.max(PACE_TOKENS_MIN),
                    least_us: micros(SYNC_INTERVAL_MIN).min(most_us),
                    most_us,
                    ceiling,
                };
                (longest, Some(pace))
            }
        }
    }

    /// The numbers of the limit where this node keeps it alone.
    pub(crate) fn validate_local(&self) -> Result<Terms, ConfigError> {
        let key_rule = Some(self.rule.key_rule(&self.name, self.has_plans())?);
        // Leases have no part in it: it is for reports.
        let burst = self.quota().burst_tokens() as i64;
        let scale = self.quota().local_scale(&self.name, self.has_plans());
        let terms =
            self.terms(scale.unwrap_or(Scale { rate: 1, token: 1, burst, curve: Curve::Refill }))?;
        Ok(Terms { key_rule, cost_max: self.rule.cost_max(), mode: Mode::Local, ..terms })
    }

    /// The numbers of a leaky bucket of which nodes take slots; `nodes` share it in an outage.
    fn validate_slots(&self, nodes: u32) -> Result<Terms, ConfigError> {
        self.refuse_last_rate()?;
        let terms = self.validate_local()?;
        let share = terms.key_rule.map(|rule| rule.share(nodes));
        Ok(Terms { share, mode: Mode::Hybrid, ..terms })
    }

    fn refuse_last_rate(&self) -> Result<(), ConfigError> {
        if self.outage != OutagePolicy::LastRate {
            return Ok(());
        }
        Err(ConfigError::Limit {
            limit: self.name.clone(),
            field: "outage",
            value: "LastRate".to_owned(),
            reason: "of exact limits, leaky buckets, windows and logs no rate is leased that could go on: choose Share, \
                     Open or Closed",
        })
    }

    /// The numbers of the limit where the store decides; `nodes` share it in an outage.
    pub(crate) fn validate_exact(&self, nodes: u32) -> Result<Terms, ConfigError> {
        let invalid = |field, value, reason| {
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        self.refuse_last_rate()?;
        if self.max_wait.is_zero() || self.max_wait > MAX_WAIT_EXACT {
            let reason = "an exact limit waits for the store: must be above 0, and at most 10 s";
            return invalid("max_wait", format!("{:?}", self.max_wait), reason);
        }
        let terms = self.validate_local()?;
        let share = terms.key_rule.map(|rule| rule.share(nodes));
        Ok(Terms { share, mode: Mode::Exact, ..terms })
    }

    /// Checks that each of so many nodes has credit: an accuracy that leaves none would deny the first requests of quiet
    /// keys without a word.
    fn validate_credit(&self, terms: &Terms, nodes: u32) -> Result<(), ConfigError> {
        let rule = terms.credit_rule;
        let by_accuracy = rule.together.is_some() && rule.known > 0 && self.mode == Mode::Hybrid;
        if !by_accuracy || rule.at(Some(nodes)).first > 0 {
            return Ok(());
        }
        Err(ConfigError::Limit {
            limit: self.name.clone(),
            field: "accuracy",
            value: format!("{} tokens for max_nodes = {nodes}", rule.together.unwrap_or_default()),
            reason: "leaves less than a token of credit to each node, so check would deny the first requests of \
                     quiet keys: allow a larger excess, or call strict() and use check_sure",
        })
    }

    /// The numbers of the limit where nodes share it; so many in an outage.
    pub(crate) fn validate_hybrid(&self, nodes: u32) -> Result<Terms, ConfigError> {
        let curve = match self.rule {
            Rule::TokenBucket(_) => return self.validate(),
            Rule::LeakyBucket(_) => return self.validate_slots(nodes),
            Rule::FixedWindow(window) => match window.rule(&self.name)?.calendar {
                Some(calendar) => {
                    self.refuse_last_rate()?;
                    let scale = self.quota().calendar_scale(&self.name)?;
                    return Ok(Terms { calendar: Some(calendar), ..self.terms(scale)? });
                }
                None => Curve::FixedWindow,
            },
            Rule::SlidingWindow(_) => Curve::SlidingWindow,
            Rule::SlidingLog(_) => Curve::SlidingLog,
        };
        self.refuse_last_rate()?;
        self.rule.key_rule(&self.name, false)?;
        self.terms(self.quota().window_scale(&self.name, curve)?)
    }

    fn validate_sync(&self) -> Result<(), ConfigError> {
        let invalid = |field, value: String, reason| {
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        match self.sync {
            SyncPolicy::Interval(interval) => {
                if !(SYNC_INTERVAL_MIN..=SYNC_INTERVAL_MAX).contains(&interval) {
                    return invalid(
                        "sync.interval",
                        format!("{interval:?}"),
                        "must be 5 ms to 5 s",
                    );
                }
            }
            SyncPolicy::Accuracy { excess, key_syncs_per_second_max } => {
                let (is_part, value) = (excess > 0.0 && excess <= 1.0, excess.to_string());
                if !is_part {
                    let reason = "must be above 0 and at most 1, a part of the burst: 0.01 is 1%";
                    return invalid("sync.excess", value, reason);
                }
                let ceiling = key_syncs_per_second_max.unwrap_or(1.0);
                if !(1.0..=CEILING_MAX).contains(&ceiling) {
                    let reason = "must be 1 to 1000000 key syncs a second";
                    let field = "sync.key_syncs_per_second_max";
                    return invalid(field, ceiling.to_string(), reason);
                }
            }
        }
        Ok(())
    }

    /// How much credit nodes give: that of the plan with the smallest burst, since nobody knows the plan of a key that is new.
    pub(crate) fn credit_rule(&self) -> CreditRule {
        let bursts = self.rules().map(|rule| rule.quota().burst_tokens());
        let burst = bursts.min().unwrap_or_default();
        let least = |credit: u32| burst.min(u64::from(credit)) as u32;
        if let SyncPolicy::Accuracy { excess, .. } = self.sync_in_force() {
            // What comes out even is not to be lost to the last bit of a float.
            let together = Some((excess * burst as f64 + 1e-9) as u64);
            let known = least(self.credit.unwrap_or(ACCURACY_CREDIT_MAX));
            let first = self.credit.map(least);
            return CreditRule { burst, known, first, together, uncounted: DEFAULT_MAX_NODES };
        }
        let fixed = CreditRule::fixed(least(self.credit.unwrap_or(DEFAULT_CREDIT)));
        if self.credit.is_some() { fixed } else { CreditRule { burst, first: None, ..fixed } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bound::{Incidents, bound};

    fn held_back(ceiling: f64) -> Limit {
        let key_syncs_per_second_max = Some(ceiling);
        let policy = SyncPolicy::Accuracy { excess: 0.01, key_syncs_per_second_max };
        Limit::new("x", Quota::per_second(10)).sync(policy)
    }

    #[test]
    fn a_limit_that_cannot_be_kept_names_field_and_value() {
        let quota = Quota::per_second(10);
        let cases = [
            (Limit::new("", quota), "name"),
            (Limit::new("a:b", quota), "name"),
            (Limit::new("x".repeat(65), quota), "name"),
            (Limit::new("x", quota).credit(16), "credit"),
            (Limit::new("x", quota).version(1 << 25), "version"),
            (Limit::new("x", quota).sync_interval(Duration::from_millis(4)), "sync.interval"),
            (Limit::new("x", quota).sync_interval(Duration::from_secs(6)), "sync.interval"),
            (Limit::new("x", quota).accuracy(0.0), "sync.excess"),
            (Limit::new("x", quota).accuracy(-0.01), "sync.excess"),
            (Limit::new("x", quota).accuracy(1.01), "sync.excess"),
            (Limit::new("x", quota).accuracy(f64::NAN), "sync.excess"),
            (held_back(0.5), "sync.key_syncs_per_second_max"),
            (held_back(1e7), "sync.key_syncs_per_second_max"),
            (held_back(f64::NAN), "sync.key_syncs_per_second_max"),
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

    #[test]
    fn credit_by_accuracy_is_what_the_nodes_can_share_and_none_before_they_are_counted() {
        let credit = |limit: Limit, nodes| limit.validate().unwrap().credit_rule.at(nodes).known;
        let limit = || Limit::new("x", Quota::per_second(10_000)).accuracy(0.01);
        let seen = [None, Some(4), Some(20), Some(100), Some(101)].map(|n| credit(limit(), n));
        assert_eq!(seen, [0, 8, 5, 1, 0]);
        assert_eq!(credit(limit().credit(2), Some(20)), 2, "the user's own word caps it");
        assert_eq!(credit(limit().credit(0), Some(4)), 0);
    }

    #[test]
    fn the_bound_keeps_every_accuracy_that_is_accepted() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut kept = 0;
        for _ in 0..2000 {
            let quota = Quota::per_second(rng.u64(1..20_000)).burst(rng.u64(1..20_000));
            let excess = rng.f64();
            let limit = Limit::new("x", quota).accuracy(excess);
            if limit.validate().is_ok() {
                let bound = bound(&limit, rng.u32(1..300), &Incidents::default());
                let allowed = excess * quota.burst_tokens() as f64;
                assert!(bound <= allowed + 1e-6, "{limit:?}: {bound} of {allowed}");
                kept += 1;
            }
        }
        assert!(kept > 1000, "{kept}");
    }

    #[test]
    fn without_a_ceiling_a_tick_is_never_longer_than_a_quarter_of_the_time_to_fill() {
        let terms = |limit: Limit| limit.validate().unwrap();
        let small = terms(Limit::new("x", Quota::per_second(1000).burst(100)).accuracy(0.01));
        assert_eq!((small.tick_us, small.first_tick_us()), (25_000, 25_000));
        let slow = terms(Limit::new("x", Quota::per_hour(100)).accuracy(0.01));
        assert_eq!((slow.tick_us, slow.first_tick_us()), (500_000, 50_000));
        assert_eq!(terms(held_back(100.0)).tick_us, 2_000_000);
    }
}
