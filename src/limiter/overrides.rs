//! Overrides: how they are set, and what they do to decisions.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{ActiveLimit, Handle, Limiter, Shared, Target};
use crate::decision::{Decision, Source};
use crate::driver::{Blocked, Definition, HeldRuling, InForce, OverrideQuery, Query};
use crate::key::Key;
use crate::limit::{LimitInfo, QuotaOf};
use crate::overrides::{End, OVERRIDES_MAX, Override, OverrideError, Ruling, Subject, Switch};
use crate::store::overrides::Put;
use crate::time::{Timestamp, micros};

/// The overrides of a limiter's limits: of single keys, and of whole limits. Cheap to clone.
///
/// What one node sets holds on all that share its store: on the node itself as soon as the call returns, on the others
/// within some two seconds. Without a store it holds on this node. It holds for all modes of a limit. While the store is away,
/// what is known holds on; a store that lost its memory hears of it again from the nodes.
///
/// Cost: a call waits for one round trip; a node asks the store once a second what has changed. A limit that has overrides looks
/// each key up once more.
#[derive(Clone)]
pub struct Overrides {
    shared: Arc<Shared>,
}

impl fmt::Debug for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overrides").finish_non_exhaustive()
    }
}

impl Limiter {
    /// What holds for some keys instead of a limit's rule, and whether limits are enforced.
    pub fn overrides(&self) -> Overrides {
        Overrides { shared: self.shared.clone() }
    }
}

impl Overrides {
    /// Sets what holds for some keys of a limit, in place of what was set for them.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit or the plan is not known, the limit cannot keep the quota, nothing is set, a prefix is too
    /// long, there are [`OVERRIDES_MAX`] overrides, or the store did not take it.
    pub async fn set(&self, limit: &str, set: Override<'_>) -> Result<(), OverrideError> {
        let nothing = || OverrideError::NothingSet { limit: limit.to_owned() };
        let ruling = set.ruling().ok_or_else(nothing)?;
        let value = ruling.text();
        if let Some(known) = self.shared.node.limits.ever_named(limit) {
            check(ruling, &known.definition())?;
        }
        let record = set.record(limit, &self.shared.secret)?;
        self.put(limit, record, value.as_bytes(), set.end()).await
    }

    /// Removes what was set for exactly these keys. What `removed` says of them does not matter.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, the store did not take it, or the limiter's task has ended.
    pub async fn remove(&self, limit: &str, removed: Override<'_>) -> Result<(), OverrideError> {
        let record = removed.record(limit, &self.shared.secret)?;
        self.put(limit, record, b"", End::Never).await
    }

    /// Switches a limit on, to shadow mode, or off.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, the store did not take it, or the limiter's task has ended.
    pub async fn switch(&self, limit: &str, switch: Switch) -> Result<(), OverrideError> {
        self.put(limit, Subject::Limit.record(limit), switch.name().as_bytes(), End::Never).await
    }

    /// Lets a limit be as it was [configured](crate::Limit::switch) again.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, the store did not take it, or the limiter's task has ended.
    pub async fn switch_back(&self, limit: &str) -> Result<(), OverrideError> {
        self.put(limit, Subject::Limit.record(limit), b"", End::Never).await
    }

    async fn put(
        &self,
        limit: &str,
        name: Vec<u8>,
        value: &[u8],
        end: End,
    ) -> Result<(), OverrideError> {
        let limits = &self.shared.node.limits;
        if limits.ever_named(limit).is_none() {
            let (name, known) = (limit.to_owned(), limits.names().join(", "));
            return Err(OverrideError::UnknownLimit { name, known });
        }
        let put = Put { name, value: value.to_vec(), end, is_restored: false };
        let (done, outcome) = oneshot::channel();
        let query = Query::Override(OverrideQuery { put, done });
        self.shared.driver.queries.send(query).map_err(|_| OverrideError::Ended)?;
        outcome.await.unwrap_or(Err(OverrideError::Ended))
    }
}

/// Checks that a limit of this definition has what the ruling names, or can keep it.
fn check(ruling: &Ruling, definition: &Definition) -> Result<(), OverrideError> {
    match ruling {
        Ruling::Allow | Ruling::Block => Ok(()),
        Ruling::Plan(plan) if definition.plan(plan).is_some() => Ok(()),
        Ruling::Plan(plan) => Err(OverrideError::UnknownPlan {
            limit: definition.limit.name().to_owned(),
            name: plan.to_string(),
            known: definition.plan_names(),
        }),
        Ruling::Quota(quota) => {
            definition.by_override(*quota).map(|_| ()).map_err(OverrideError::Quota)
        }
    }
}

/// A key as overrides are looked up for it.
#[derive(Clone, Copy)]
pub(super) struct LookedUp<'a> {
    /// What the limiter knows it by.
    pub(super) name: &'a [u8],
    /// Its bytes before they were hashed.
    pub(super) plain: &'a [u8],
}

impl ActiveLimit {
    /// Whether a decision has to look for overrides, or for another definition of the limit.
    #[inline(always)]
    pub(super) fn looks_further(&self) -> bool {
        self.definition.looks_further()
    }

    /// Decides about a request of `key` by overrides, or by the limit's rule.
    #[inline(always)]
    pub(super) fn decide_for<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        if let Some(name) = self.shared.secret.held_name(key)
            && !self.looks_further()
        {
            return self.decide(Target::key(name), cost);
        }
        let mut told = self.undecided(cost);
        self.decide_by_name(key, cost, &mut told);
        told
    }

    /// Where a decision is written.
    pub(super) fn undecided(&self, cost: u32) -> Decision {
        self.decision(false, false, Source::Override(Timestamp::ZERO), cost, Timestamp::ZERO)
    }

    /// Writes the decision about a key that has overrides or whose name has to be put together. It is written and not
    /// returned, so that a caller need not build the parts of other decisions that it does not read.
    #[inline(never)]
    fn decide_by_name<K: Key + ?Sized>(&self, key: &K, cost: u32, told: &mut Decision) {
        let by_rule = || {
            let (limit, name) = (self.planned_for(key), self.shared.secret.name(key));
            limit.after_rule(&name, cost, limit.decide(Target::key(&name), cost))
        };
        *told = self.override_of(key, cost).unwrap_or_else(by_rule);
    }

    /// The same, and asks the store if this node alone cannot be sure.
    pub(super) async fn decide_or_ask_for<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        if let Some(decision) = self.override_of(key, cost) {
            return decision;
        }
        let (limit, name) = (self.planned_for(key), self.shared.secret.name(key));
        limit.after_rule(&name, cost, limit.decide_or_ask(Target::key(&name), cost).await)
    }

    /// The limit as it is at present, under the plan that an override or a resolver gives the key, or else its own.
    #[inline]
    pub(super) fn planned(&self, asked: LookedUp<'_>) -> Cow<'_, Self> {
        if self.looks_further() { self.planned_further(asked) } else { Cow::Borrowed(self) }
    }

    fn planned_further(&self, asked: LookedUp<'_>) -> Cow<'_, Self> {
        let limit = self.current();
        if !self.state.may_give_plans() {
            return limit;
        }
        match limit.plan_of(asked) {
            Some(info) => Cow::Owned(limit.under(info).into_owned()),
            None => limit,
        }
    }

    /// The same for a key that is not written yet.
    pub(super) fn planned_for<K: Key + ?Sized>(&self, key: &K) -> Cow<'_, Self> {
        if !self.looks_further() || !self.state.may_give_plans() {
            return self.current();
        }
        let secret = &self.shared.secret;
        self.planned(LookedUp { name: &secret.name(key), plain: &secret.plain(key) })
    }

    /// The plan that an override gives a key, or a resolver, unless callers name one.
    fn plan_of(&self, asked: LookedUp<'_>) -> Option<&'static LimitInfo> {
        let (LookedUp { name, plain }, now) = (asked, self.state.clock.now());
        if let Some(held) = self.state.overrides.find(name, plain, now) {
            // A plan that was updated since is found by its name.
            return held.plan().map(|info| self.definition.in_place_of(info));
        }
        let resolved = self.state.resolved_plans().filter(|_| self.info.of == QuotaOf::Limit)?;
        resolved.find((name, plain), now, &self.definition)
    }

    /// The key's bytes before they are hashed, if they are and overrides may look for them.
    #[inline]
    pub(crate) fn plain_for_overrides<K: Key + ?Sized>(&self, key: &K) -> Option<Arc<[u8]>> {
        if self.looks_further() { self.plain_of(key) } else { None }
    }

    /// The key's bytes before they are hashed, if they are.
    pub(super) fn plain_of<K: Key + ?Sized>(&self, key: &K) -> Option<Arc<[u8]>> {
        let secret = &self.shared.secret;
        let (name, plain) = (secret.name(key), secret.plain(key));
        (*plain != *name).then(|| Arc::from(&*plain))
    }

    fn find_override<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Option<HeldRuling> {
        let name = self.shared.secret.name(key);
        let plain = self.state.overrides.has_patterns().then(|| self.shared.secret.plain(key));
        self.find_by(LookedUp { name: &name, plain: plain.as_deref().unwrap_or(&name) }, cost)
    }

    /// What holds for a key of this name instead of the limit's rule.
    #[inline(always)]
    pub(super) fn overridden(&self, asked: LookedUp<'_>, cost: u32) -> Option<Decision> {
        let held = if self.looks_further() { self.find_by(asked, cost) } else { None };
        held.map(|held| self.current().by_override(held, cost))
    }

    fn find_by(&self, asked: LookedUp<'_>, cost: u32) -> Option<HeldRuling> {
        let overrides = &self.state.overrides;
        let held = match overrides.switch() {
            Switch::Off => HeldRuling { ruling: InForce::Allow, until: Timestamp::NEVER },
            _ => overrides.find(asked.name, asked.plain, self.state.clock.now())?,
        };
        if let InForce::Plan(_) = held.ruling {
            // The plan's rule decides.
            return None;
        }
        if cost > 0 {
            overrides.count(held.ruling == InForce::Allow || self.is_shadow());
        }
        Some(held)
    }

    fn by_override(&self, held: HeldRuling, cost: u32) -> Decision {
        let (is_allowed, now) = (held.ruling == InForce::Allow, self.state.clock.now());
        let source = Source::Override(held.until);
        self.decision(is_allowed, true, source, cost, now).shadowed(self.is_shadow())
    }

    /// What holds for a key instead of the limit's rule.
    pub(super) fn override_of<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Option<Decision> {
        let held = if self.looks_further() { self.find_override(key, cost) } else { None };
        held.map(|held| self.current().by_override(held, cost))
    }

    /// What becomes of a decision that the limit's rule made.
    #[inline]
    pub(super) fn after_rule(&self, name: &[u8], cost: u32, decision: Decision) -> Decision {
        if self.looks_further() { self.after_rule_further(name, cost, decision) } else { decision }
    }

    fn after_rule_further(&self, name: &[u8], cost: u32, decision: Decision) -> Decision {
        if decision.is_override() {
            // The override came while the caller waited.
            return decision;
        }
        match (self.is_shadow(), decision.is_denied()) {
            (true, true) => decision.shadowed(true),
            // Nobody waits in shadow mode.
            (true, false) => decision.without_delay(),
            (false, true) => {
                let block_us = micros(self.current().definition.limit.block_for);
                if decision.sure && cost > 0 && block_us > 0 {
                    let now = self.state.clock.now();
                    let until = now.plus_micros(block_us);
                    let retry_at = until.max(now.plus_micros(micros(decision.left_after(1))));
                    let blocked = Blocked { until, retry_at };
                    let is_blocked = self.state.overrides.block(name, blocked, OVERRIDES_MAX);
                    if is_blocked && micros(decision.retry_after()) < block_us {
                        return decision.blocking(until, now);
                    }
                }
                decision
            }
            (false, false) => decision,
        }
    }

    /// Whether the limit is in shadow mode.
    pub(crate) fn is_shadow(&self) -> bool {
        self.looks_further() && self.state.overrides.switch() == Switch::Shadow
    }
}

impl Handle {
    /// As [`ActiveLimit::decide_for`].
    #[inline(always)]
    pub(super) fn decide(&self, cost: u32) -> Decision {
        if !self.limit.looks_further() {
            return self.limit.decide(self.target(), cost);
        }
        let mut told = self.limit.undecided(cost);
        self.decide_with_overrides(cost, &mut told);
        told
    }

    #[cold]
    #[inline(never)]
    fn decide_with_overrides(&self, cost: u32, told: &mut Decision) {
        let by_rule = || self.after_rule(cost, self.planned().limit.decide(self.target(), cost));
        *told = self.overridden(cost).unwrap_or_else(by_rule);
    }

    /// The same, and asks the store if this node alone cannot be sure.
    pub(super) async fn decide_or_ask(&self, cost: u32) -> Decision {
        match self.overridden(cost) {
            Some(decision) => decision,
            None => self.after_rule(cost, self.planned().decide_or_ask_by_rule(cost).await),
        }
    }

    pub(super) fn looked_up(&self) -> LookedUp<'_> {
        let name = &*self.key.key;
        LookedUp { name, plain: self.plain.as_deref().unwrap_or(name) }
    }

    /// What holds for the key instead of the limit's rule.
    pub(super) fn overridden(&self, cost: u32) -> Option<Decision> {
        self.limit.overridden(self.looked_up(), cost)
    }

    /// The handle under the plan that an override gives the key, or as it is.
    pub(super) fn planned(&self) -> Cow<'_, Self> {
        match self.limit.planned(self.looked_up()) {
            Cow::Owned(limit) => Cow::Owned(Self { limit, ..self.clone() }),
            Cow::Borrowed(_) => Cow::Borrowed(self),
        }
    }

    pub(crate) fn after_rule(&self, cost: u32, decision: Decision) -> Decision {
        self.limit.after_rule(&self.key.key, cost, decision)
    }
}
