//! Limits whose decisions may wait for the store, exact ones among them.

use std::fmt;
use std::time::Duration;

use tokio::sync::oneshot;

use super::slots::SlotsOf;
use super::{ActiveLimit, Limiter, Target};
use crate::algorithm::{KeyRule, Rule, WindowRule};
use crate::decision::{Decision, Source};
use crate::driver::{AskedStore, ExactAnswer, ExactQuery, Query};
use crate::error::{CheckError, ConfigError};
use crate::key::Key;
use crate::limit::{Mode, OutagePolicy};
use crate::store::exact::{Deed, ExactReply, ExactRequest};
use crate::time::Timestamp;

/// A limit of a running limiter in any mode, [exact](Mode::Exact) ones included. Cheap to clone.
///
/// Cost, on an exact limit: each decision, also of a cost of 0, is one round trip, a message to the limiter's task and a
/// spawned task.
///
/// ```
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// use tidegate::{Limit, Limiter, MemoryStore, SlidingLog};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("login", SlidingLog::per_minute(5)).exact())
///     .store(MemoryStore::new())
///     .build()?;
/// let login = limiter.async_limit("login")?;
/// assert_eq!(login.check_sure("user:42").await.remaining(), 4);
/// # Ok::<(), tidegate::ConfigError>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct AsyncLimit(pub(crate) ActiveLimit);

impl fmt::Debug for AsyncLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncLimit").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl From<ActiveLimit> for AsyncLimit {
    fn from(limit: ActiveLimit) -> Self {
        Self(limit)
    }
}

impl Limiter {
    /// The limit called `name`, whatever its mode.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] if the limiter was built without it.
    pub fn async_limit(&self, name: &str) -> Result<AsyncLimit, ConfigError> {
        self.find(name).map(AsyncLimit)
    }
}

impl AsyncLimit {
    /// Decides about one request of `key` that costs one token: see [`ActiveLimit::check_sure`].
    ///
    /// On an exact limit the store decides each request: see [`Limit::exact`](crate::Limit::exact). Dropping the future
    /// before it is ready may leave the token spent.
    pub async fn check_sure<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.0.check_sure(key).await
    }

    /// Decides about one request of `key` that costs `cost` tokens, all or none. A cost of 0 spends nothing, and tells what
    /// a request of one token would be told.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn check_sure_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        self.0.check_sure_n(key, cost).await
    }

    /// Decides about one request of `key` that costs one token, and that may go on after the decision's
    /// [`delay`](Decision::delay): see [`ActiveLimit::schedule`].
    pub async fn schedule<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.schedule_or_ask(key, 1).await
    }

    /// The same as [`schedule`](Self::schedule) for a request that costs `cost` tokens.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn schedule_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        if cost > self.0.cost_max() {
            return self.0.decide_above_max_for(key, cost);
        }
        Ok(self.schedule_or_ask(key, cost).await)
    }

    async fn schedule_or_ask<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let name = self.0.shared.secret.name(key);
        if let Some(decision) = self.0.override_of(key, cost) {
            return decision;
        }
        let limit = self.0.planned_for(key);
        let decision = if limit.is_decided_by_store() {
            limit.ask_exact(&name, cost, u64::MAX).await
        } else if let Some(slots) = limit.slots() {
            limit.ask_for_slot(SlotsOf { slots, key: &name }, cost, u64::MAX).await.decision
        } else {
            limit.decide_within(Target::key(&name), cost, u64::MAX)
        };
        limit.after_rule(&name, cost, decision)
    }

    /// Waits until a request of `key` that costs one token may go on, for `within` at most: see
    /// [`ActiveLimit::until_ready`].
    ///
    /// An exact leaky bucket grants slots in the order in which the store decides, and a slot passes unused if the future is
    /// dropped. One that nodes share gives each node slots in the order of its questions, and a slot that is given back goes to
    /// the node's next request. Callers of other exact limits go on in order on each node.
    pub async fn until_ready<K: Key + ?Sized>(&self, key: &K, within: Duration) -> Decision {
        self.0.until_ready(key, within).await
    }

    /// The same as [`until_ready`](Self::until_ready) for a request that costs `cost` tokens.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn until_ready_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        within: Duration,
    ) -> Result<Decision, CheckError> {
        self.0.until_ready_n(key, cost, within).await
    }

    /// How long it waits for the store at most.
    #[cfg(feature = "server")]
    pub(crate) fn max_wait(&self) -> Duration {
        Duration::from_micros(self.0.max_wait_us)
    }

    /// Its place among the limits that the limiter ever had.
    #[cfg(feature = "server")]
    pub(crate) fn place(&self) -> u32 {
        self.0.state.index
    }

    /// The limit's name.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Who decides. Without a store it is each node alone, whatever the limit says.
    pub fn mode(&self) -> Mode {
        self.0.mode()
    }

    /// The limit's algorithm with its numbers.
    pub fn rule(&self) -> Rule {
        self.0.rule()
    }
}

/// What the store is asked to charge.
#[derive(Clone, Copy)]
pub(super) struct Charge {
    /// In tokens; 0 spends nothing.
    pub(super) cost: u32,
    /// How long the request may wait for a slot.
    pub(super) slot_within_us: u64,
    pub(super) deed: Deed,
}

impl ActiveLimit {
    /// The same limit, which waits for the store so long at most.
    #[cfg(feature = "server")]
    pub(super) fn within(self, wait: Duration) -> Self {
        Self { max_wait_us: self.max_wait_us.min(crate::time::micros(wait)), ..self }
    }

    /// Whether the store decides.
    pub(super) fn is_decided_by_store(&self) -> bool {
        self.state.terms.mode == Mode::Exact
    }

    /// Decides about a request of a limit whose keys have no buckets here; `None` for other limits.
    pub(super) async fn decide_without_lease(&self, key: &[u8], cost: u32) -> Option<Decision> {
        match self.slots() {
            _ if self.is_decided_by_store() => Some(self.ask_exact(key, cost, 0).await),
            Some(slots) => Some(self.ask_for_slot(SlotsOf { slots, key }, cost, 0).await.decision),
            None => None,
        }
    }

    /// The store's decision, or that of the outage policy.
    pub(super) async fn ask_exact(&self, key: &[u8], cost: u32, slot_within_us: u64) -> Decision {
        let slot_within_us = if self.takes_slots_ahead() { slot_within_us } else { 0 };
        let charge = Charge { cost, slot_within_us, deed: Deed::Ask };
        let mut asked = if self.max_wait_us > 0 { self.send_question(key, charge) } else { None };
        match self.wait_for_store(&mut asked, self.max_wait_us).await {
            Some(ExactAnswer { reply, .. }) => self.store_decision(&reply, cost),
            None => self.by_outage_policy(key, cost, slot_within_us),
        }
    }

    /// Sends a question to the store, which has to answer as soon as the limit says, whoever waits for it.
    pub(super) fn send_question(&self, key: &[u8], charge: Charge) -> Option<AskedStore> {
        self.send_exact(key, charge, self.state.terms.max_wait_us)
    }

    /// Waits for the answer, `for_us` at most. `asked` is `None` then, unless the answer may still come.
    pub(super) async fn wait_for_store(
        &self,
        asked: &mut Option<AskedStore>,
        for_us: u64,
    ) -> Option<ExactAnswer> {
        let answer = asked.as_mut()?;
        let answer = if for_us < self.state.terms.max_wait_us {
            tokio::select! {
                biased;
                answer = answer => answer,
                _ = self.sleep(Duration::from_micros(for_us)) => return None,
            }
        } else {
            // The call ends by then.
            answer.await
        };
        *asked = None;
        answer.ok()?.ok()
    }

    /// Sends a question to the store, which has to answer within `max_wait_us`. `None` if nobody will.
    pub(super) fn send_exact(
        &self,
        key: &[u8],
        charge: Charge,
        max_wait_us: u64,
    ) -> Option<AskedStore> {
        let (limit, info) = (self.state.index, self.info);
        let Charge { cost, slot_within_us, deed } = charge;
        let (rule, key) = (info.key_rule.as_ref()?, key.into());
        let windows = match rule {
            KeyRule::Window(WindowRule { calendar: Some(calendar), .. }) => {
                Some(calendar.around(self.now().as_micros().saturating_add(self.state.origin_us)))
            }
            _ => None,
        };
        let request = ExactRequest { limit: info, rule, key, cost, deed, slot_within_us, windows };
        let (done, answer) = oneshot::channel();
        let query = ExactQuery { limit, request, max_wait_us, done };
        self.shared.driver.queries.send(Query::Exact(query)).ok().map(|()| answer)
    }

    /// What is told of the store's reply.
    pub(super) fn store_decision(&self, reply: &ExactReply, cost: u32) -> Decision {
        self.state.buckets.count(reply.is_allowed, cost);
        let now = Timestamp::from_micros(reply.at_us);
        self.decision(reply.is_allowed, true, Source::Store(reply.standing), cost, now)
    }

    pub(super) fn by_outage_policy(&self, key: &[u8], cost: u32, slot_within_us: u64) -> Decision {
        let policy = self.state.terms.outage;
        let is_counted = self.info.terms.share.is_some_and(|share| share.can_count(cost));
        let is_share = policy == OutagePolicy::Share && is_counted;
        let cost_here = if is_share { cost } else { 0 };
        let mut decision = self.decide_alone_within(Target::key(key), cost_here, slot_within_us);
        if !is_share {
            decision.allowed = policy == OutagePolicy::Open;
            self.state.buckets.count(decision.allowed, cost);
        }
        self.state.count_unsure(cost);
        Decision { sure: false, cost: cost.max(1), ..decision }
    }
}
