//! What one of several limits is asked for in a request: how it stands, and what it decides.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::{Rule, StateRule};
use crate::bucket::{Ask, Found, LeaseBucket, LocalAnswer, LocalAsk, TableBucket};
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, LocalBuckets};
use crate::error::CheckError;
use crate::limit::LimitInfo;
use crate::limiter::overrides::LookedUp;
use crate::limiter::{ActiveLimit, Target};
use crate::time::{Reading, Timestamp};

/// Most requests have at most so many limits.
pub(in crate::limiter) const USUAL: usize = 4;

/// How far a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Not at all, unless the store decides about it.
    None,
    /// For the store, where this node is not sure, as long as the limit says.
    Store,
    /// The same, and until then at most.
    #[cfg(feature = "server")]
    StoreUntil(tokio::time::Instant),
    /// For its slot too.
    Slot,
}

/// What one limit is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) limit: &'a ActiveLimit,
    pub(crate) key: &'a [u8],
    /// The key before it was hashed, if that matters.
    pub(crate) plain: Option<&'a [u8]>,
    pub(crate) cost: u32,
    pub(crate) patience: Patience,
}

/// When a part is decided: what goes back by itself or at once is taken first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Here,
    Store,
    Slot,
}

impl<'a> Part<'a> {
    fn target(&self) -> Target<'a> {
        Target::key(self.key)
    }

    pub(super) fn asked_at(&self) -> Timestamp {
        self.limit.state.clock.now()
    }

    #[inline]
    pub(super) fn stage(&self) -> Stage {
        match self.limit.info.rule {
            // Its slots pass, and mostly cannot be given back.
            Rule::LeakyBucket(_) => Stage::Slot,
            _ if self.limit.is_decided_by_store() => Stage::Store,
            _ => Stage::Here,
        }
    }

    /// Whether the request is held until its slot.
    pub(super) fn is_held(&self) -> bool {
        self.patience == Patience::Slot && self.stage() == Stage::Slot
    }

    /// How the key stands, as a decision about the cost that spends nothing. `None` if only the store knows.
    pub(crate) fn look(&self) -> Option<Decision> {
        if let Some(decision) = self.overridden(0) {
            return Some(Decision { cost: self.cost.max(1), ..decision });
        }
        if self.limit.is_decided_by_store() {
            return None;
        }
        let limit = self.planned();
        let look = if self.is_held() {
            limit.decide_within(self.target(), 0, u64::MAX)
        } else {
            limit.decide(self.target(), 0)
        };
        // What nodes hold elsewhere is not known for sure, and a slot is for a request of any cost.
        let is_counted = matches!(look.source, Source::Local(_)) && self.stage() != Stage::Slot;
        // It tells about one token.
        let lacks = is_counted && self.cost > 1 && look.remaining() < self.cost.into();
        let look = Decision { allowed: look.allowed && !lacks, ..look.about(self.cost) };
        Some(look.shadowed(self.limit.is_shadow()))
    }

    /// Whether this node surely has so many tokens of the key, and the part costs one at most. Spends nothing.
    pub(super) fn surely_fits(&self, tokens: u32) -> bool {
        let is_plain = self.cost <= 1 && !self.limit.looks_further();
        is_plain && self.stage() == Stage::Here && self.limit.surely_has(self.key, tokens)
    }

    /// Decides about a part that [fitted](Self::surely_fits). `None` if it is unsure by now.
    #[inline(always)]
    pub(super) fn take_if_sure(&self, time: Reading) -> Option<Decision> {
        self.limit.decide_if_sure(self.target(), self.cost, time)
    }

    pub(super) fn reading(&self) -> Reading {
        Reading { cached: self.asked_at(), precise: self.limit.precise_now() }
    }

    /// Whether both are of one limiter: then one reading of the clock is enough.
    #[inline]
    pub(super) fn has_clock_of(&self, other: &Part<'_>) -> bool {
        Arc::ptr_eq(&self.limit.shared, &other.limit.shared)
    }

    /// What holds for the key instead of the limit's rule. A cost of 0 looks. No request goes on to the rule that costs more than
    /// the limit can ever admit, although an override held when the cost was checked.
    #[inline(always)]
    pub(super) fn overridden(&self, cost: u32) -> Option<Decision> {
        let by_override = self.limit.overridden(self.looked_up(), cost);
        by_override.or_else(|| self.above_max(cost > 0))
    }

    /// The denial of a request that costs more than the limit can ever admit.
    #[inline(always)]
    fn above_max(&self, is_counted: bool) -> Option<Decision> {
        if self.cost <= self.limit.cost_max() {
            return None;
        }
        if is_counted {
            self.limit.state.count_denied();
        }
        Some(self.limit.deny_above_max(self.looked_up(), self.cost))
    }

    /// Checks that the limit can ever admit so high a cost, or that something else decides about the key.
    pub(crate) fn validate_cost(&self) -> Result<(), CheckError> {
        match self.limit.validate_cost(self.cost) {
            Err(_) if self.limit.allows_any_cost(self.looked_up()) => Ok(()),
            validated => validated,
        }
    }

    pub(in crate::limiter) fn looked_up(&self) -> LookedUp<'a> {
        LookedUp { name: self.key, plain: self.plain.unwrap_or(self.key) }
    }

    /// The limit under the plan that an override gives the key, or as it is.
    fn planned(&self) -> Cow<'a, ActiveLimit> {
        self.limit.planned(self.looked_up())
    }

    /// The limit that the store is asked about, which waits no longer than the patience lasts.
    pub(super) fn asking(&self) -> Cow<'a, ActiveLimit> {
        match self.patience {
            #[cfg(feature = "server")]
            Patience::StoreUntil(deadline) => {
                let left = deadline.saturating_duration_since(tokio::time::Instant::now());
                Cow::Owned(self.planned().into_owned().within(left))
            }
            Patience::None | Patience::Store | Patience::Slot => self.planned(),
        }
    }

    /// Decides without waiting, where the store does not decide.
    pub(super) fn decide(&self) -> Decision {
        let by_rule = || {
            let decision = self.planned().decide(self.target(), self.cost);
            self.limit.after_rule(self.key, self.cost, decision)
        };
        self.overridden(self.cost).unwrap_or_else(by_rule)
    }

    /// Decides, unless the request has to wait.
    #[inline(always)]
    pub(in crate::limiter) fn decide_if_no_wait(&self) -> Option<Decision> {
        if self.limit.looks_further() || self.cost > self.limit.info.terms.cost_max {
            return self.decide_further_if_no_wait();
        }
        self.limit.decide_if_no_wait(self.key, self.cost)
    }

    /// The same where overrides, a plan or another definition of the limit may hold, or held when the cost was checked.
    #[inline(never)]
    fn decide_further_if_no_wait(&self) -> Option<Decision> {
        self.overridden(self.cost).or_else(|| {
            let decision = self.planned().decide_if_no_wait(self.key, self.cost)?;
            Some(self.limit.after_rule(self.key, self.cost, decision))
        })
    }

    /// Decides at once what this node decides, unless the store is to be asked.
    #[inline(always)]
    pub(super) fn decide_at_once(&self) -> Option<Decision> {
        match self.patience {
            Patience::None if !self.limit.is_decided_by_store() => Some(self.decide()),
            _ => self.decide_if_no_wait(),
        }
    }

    /// Whether the request has to wait, where this is what a look says.
    #[cfg(feature = "tower")]
    pub(super) fn has_to_wait(&self, glance: Option<Glance>) -> bool {
        let Some(glance) = glance else { return true };
        let is_held = || self.is_held() && self.planned().decide(self.target(), 0).is_denied();
        let asks_store = || !glance.is_sure || self.limit.slots().is_some();
        self.patience != Patience::None && (asks_store() || is_held())
    }

    /// Decides as far as the request may wait.
    pub(crate) async fn ask(&self) -> Decision {
        if let Some(decision) = self.overridden(self.cost) {
            return decision;
        }
        let limit = self.asking();
        let queue = limit.queue();
        let decision = match self.patience {
            Patience::Slot if queue > Duration::ZERO => {
                self.limit.wait(self.looked_up(), self.cost, queue).await
            }
            Patience::None if !limit.is_decided_by_store() => {
                limit.decide(self.target(), self.cost)
            }
            _ => limit.decide_or_ask(self.target(), self.cost).await,
        };
        limit.after_rule(self.key, self.cost, decision)
    }
}

#[cfg(feature = "server")]
impl Part<'_> {
    /// How the key stands by the store's word, unless this node is sure.
    pub(crate) async fn look_by_store(&self) -> Decision {
        let look = self.ask().await;
        if self.cost > 0 || look.is_sure() || !matches!(look.source, Source::Lease(_)) {
            return look;
        }
        let limit = self.asking();
        limit.after_rule(self.key, 0, limit.hold(self.key).ask_store(0).await)
    }
}

/// What matters of a look before anything is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Glance {
    pub(super) is_sure: bool,
    /// How long to wait where it denies.
    pub(super) denied_for: Option<Duration>,
}

impl From<Decision> for Glance {
    fn from(look: Decision) -> Self {
        let denied_for = look.is_denied().then(|| look.retry_after());
        Self { is_sure: look.is_sure(), denied_for }
    }
}

impl ActiveLimit {
    /// Whether the key surely has so many tokens on this node, at least one, as far as one look at its bucket tells. Spends nothing.
    fn surely_has(&self, key: &[u8], tokens: u32) -> bool {
        // The cached time is enough: local limits decide by the precise one, which is not earlier, and a key has no fewer tokens
        // later.
        let (target, now) = (Target::key(key), self.state.clock.now());
        let alone = match &self.state.buckets {
            Buckets::Alone(alone) => alone,
            Buckets::Leased(table) => {
                let (scale, plan) = (self.state.terms.scale, self.plan);
                let ask = Ask { cost: 0, scale, first_credit: 0, plan, can_wait: false };
                let read =
                    |found: Found<'_, LeaseBucket>| found.bucket.try_decide(found.word, ask, now);
                let read = target.find_first(table).and_then(read);
                return read.is_some_and(|read| read.left >= tokens && read.is_sure);
            }
        };
        let of = (self.info, self.plan);
        match alone {
            AloneBuckets::Turns(local) => target.has(tokens, local, of, now),
            AloneBuckets::Windows(local) => {
                target.has(tokens, local, of, self.state.window_time(local, now))
            }
            AloneBuckets::Logs(local) => target.has(tokens, local, of, now),
            AloneBuckets::Slots(..) => false,
        }
    }
}

impl Target<'_> {
    /// Whether its bucket has so many tokens, as far as one look tells.
    #[inline(always)]
    fn has<B, R>(
        self,
        tokens: u32,
        local: &LocalBuckets<B>,
        (info, plan): (&'static LimitInfo, u32),
        now: Timestamp,
    ) -> bool
    where
        B: TableBucket<Ask = LocalAsk<R>, Answer = LocalAnswer, Rule = R>,
        R: StateRule,
    {
        let ask = LocalAsk { cost: 0, rule: local.rule_of(info), within_us: 0, plan };
        let read = |found: Found<'_, B>| found.bucket.try_decide(found.word, ask, now);
        let has = |read: LocalAnswer| {
            read.is_allowed && (tokens <= 1 || read.standing.remaining() >= tokens.into())
        };
        self.find_first(&local.table).and_then(read).is_some_and(has)
    }
}

/// The decision with the fewer tokens left.
pub(in crate::limiter) fn fewer_left(one: Decision, other: Decision) -> Decision {
    if other.remaining() < one.remaining() { other } else { one }
}

#[cfg(test)]
mod tests;
