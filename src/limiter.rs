//! What users hold: a limiter, its limits, and handles of keys.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::algorithm::{Rule, StateRule};
use crate::bound::Excess;
use crate::bucket::{
    Ask, Found, LeaseBucket, LocalAnswer, LocalAsk, NewKey, Notification, OVERFLOW, Room,
    SpendResult, Table, TableBucket, Verdict,
};
use crate::decision::{Decision, Held, Source};
use crate::driver::setup::Senders;
use crate::driver::{
    AloneBuckets, Buckets, Definition, LimitState, LocalBuckets, NodeState, PinnedKey, Wish,
};
use crate::error::{CheckError, ConfigError, ShutdownError, StoreError};
use crate::key::{Key, KeySecret};
use crate::limit::{LimitInfo, Mode, NodeTerms};
use crate::time::{Now, Timestamp, micros};

mod above_max;
mod alone;
mod ask_store;
mod async_limit;
#[cfg(feature = "server")]
mod by_request;
pub(crate) mod concurrency;
mod group;
#[cfg(feature = "server")]
pub(crate) mod handed_over;
mod overrides;
mod plans;
mod reservation;
mod reset;
pub(crate) mod settle;
mod several;
mod slots;
pub(crate) mod together;
mod update;
mod waiting;

pub use async_limit::AsyncLimit;
pub use concurrency::{ConcurrencyLimit, Permit};
pub use group::{AsyncGroup, Group};
pub use overrides::Overrides;
pub use reservation::{Reservation, ReserveError};
pub use reset::{RESET_WAIT, ResetError};
pub use several::OnKey;

/// A node: its limits, their buckets, and the task that keeps them in step with the store.
///
/// Cheap to clone; all clones are one node. When the last clone, limit and handle is dropped,
/// the task ends by itself: what was pending is lost and leases are given back by their end. To
/// leave in good order, call [`shutdown`](Self::shutdown) first.
#[derive(Clone)]
pub struct Limiter {
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("limits", &self.shared.node.limits.names())
            .field("keys", &self.shared.node.budget.used())
            .field("max_keys", &self.shared.node.budget.max())
            .finish()
    }
}

/// What all handles share.
pub(crate) struct Shared {
    pub(crate) node: Arc<NodeState>,
    pub(crate) driver: Senders,
    /// What keys are hashed with.
    pub(crate) secret: KeySecret,
    /// What the limits' numbers depend on, beside the limits. Held by whoever changes these.
    pub(crate) node_terms: Mutex<NodeTerms>,
    /// Callers who wait, by limit.
    pub(crate) waiting: Box<[OnceLock<Box<waiting::Waiting>>]>,
    #[cfg(all(feature = "metrics", feature = "tower"))]
    pub(crate) labels: crate::metrics::Labels,
}

impl Limiter {
    /// The limit called `name`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] if the limiter does not have it; [`ConfigError::ExactLimit`] if the store decides
    /// its requests, with a store or without: [`async_limit`](Self::async_limit) has those.
    pub fn limit(&self, name: &str) -> Result<ActiveLimit, ConfigError> {
        let limit = self.find(name)?;
        if limit.state.needs_async { Err(ConfigError::ExactLimit(name.into())) } else { Ok(limit) }
    }

    fn find(&self, name: &str) -> Result<ActiveLimit, ConfigError> {
        let state = self.shared.node.limits.named(name)?;
        let (definition, state, shared) = (state.definition(), state.clone(), self.shared.clone());
        let (info, max_wait_us) = (definition.info, state.terms.max_wait_us);
        Ok(ActiveLimit { state, definition, info, plan: info.number, max_wait_us, shared })
    }

    /// Waits until every lane of the store has answered and gives leases, and the store has told all overrides or refused to: what
    /// a startup probe should ask. Without a store it is ready at once.
    ///
    /// A limiter decides before it is ready too, on credit and then by its outage policy.
    ///
    /// # Errors
    ///
    /// The store's last error, [`StoreError::Recovering`] if it answers and gives less than it has, or [`StoreError::TimedOut`] after
    /// `deadline`.
    pub async fn ready(&self, deadline: Duration) -> Result<(), StoreError> {
        if self.shared.ask(Wish::Ready, deadline).await == Some(true) {
            return Ok(());
        }
        Err(self.shared.node.why_not_ready(deadline))
    }

    /// Reports what is pending and gives all leases back. Decisions go on meanwhile, but should
    /// have ceased: what is spent after this is lost with the limiter.
    ///
    /// Waits until all [permits](crate::Permit) have been dropped and given back too.
    ///
    /// # Errors
    ///
    /// [`ShutdownError`] if the store did not take everything within `deadline`. It says how many permits are still held:
    /// they go back when they are dropped, or two seconds after the process ends.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let left = self.shared.ask(Wish::Leave, deadline);
        match tokio::join!(left, self.permits_returned(deadline)) {
            (Some(true), 0) => Ok(()),
            (_, permits) => Err(ShutdownError { within: deadline, permits }),
        }
    }

    /// Waits until everything that is due by now has been done and nothing is under way: for tests
    /// that drive the clock.
    #[cfg(any(test, feature = "testing"))]
    pub async fn settle(&self) {
        // A driver that has ended has nothing due any more.
        let _ = self.shared.ask(Wish::Settle, Duration::MAX).await;
        self.shared.node.settled().await;
    }
}

impl Shared {
    /// Whether the wish came true in time; `None` if the driver has ended.
    async fn ask(&self, wish: Wish, within: Duration) -> Option<bool> {
        self.driver.ask(wish, self.node.time.now().plus_micros(micros(within))).await
    }
}

/// A limit of a running limiter. Cheap to clone.
#[derive(Clone)]
pub struct ActiveLimit {
    state: Arc<LimitState>,
    /// That of the time when it was asked for.
    definition: Arc<Definition>,
    /// Of the plan that it asks by.
    info: &'static LimitInfo,
    /// The number of that, at hand for the fast path.
    plan: u32,
    /// How long it waits for the store.
    max_wait_us: u64,
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for ActiveLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveLimit").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl ActiveLimit {
    /// Decides about one request of `key` that costs one token.
    ///
    /// Never waits, does no I/O, and allocates nothing on a known key. On a local limit each thread beyond the first 64
    /// allocates 128 bytes, once. A [`SlidingLog`](crate::SlidingLog) allocates when a key's log grows, and is behind a
    /// lock for each key. A limit that has [overrides](crate::Overrides) takes a lock of a part of its map too.
    ///
    /// It promises no slot ahead: a [`LeakyBucket`](crate::LeakyBucket) allows a request only if its slot is now.
    #[inline(always)]
    pub fn check<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide_for(key, 1)
    }

    /// Decides about one request of `key` that costs `cost` tokens: all or none are spent. A cost of 0 spends
    /// nothing, and tells what a request of one token would be told now.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost. The most is the largest burst of the limit, its plans and the
    /// quotas of its overrides (a cost above the key's own is denied, and waiting does not help); for a leaky bucket, what 366
    /// days of slots hold. No cost is too high for a limit that is [off](crate::Switch::Off) or in
    /// [shadow mode](crate::Switch::Shadow), or for a key that an [override](crate::Override) blocks or allows.
    #[inline(always)]
    pub fn check_n<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Result<Decision, CheckError> {
        self.decide_n_for(key, cost)
    }

    /// Decides. Inlined, so that the caller does not build parts of a decision that it does not read.
    #[inline(always)]
    fn decide(&self, target: Target<'_>, cost: u32) -> Decision {
        self.decide_at(target, cost, self.time())
    }

    #[inline(always)]
    fn decide_at(&self, target: Target<'_>, cost: u32, at: impl Now) -> Decision {
        let table = match &self.state.buckets {
            Buckets::Leased(table) => table,
            Buckets::Alone(alone) => {
                let now = at.precise();
                let answer = match alone {
                    AloneBuckets::Turns(local) => {
                        let answer = target.ask_local(local, (self.info, self.plan), cost, 0, now);
                        return self.local_decision(answer, cost, now);
                    }
                    AloneBuckets::Windows(local) => {
                        let time = self.state.window_time(local, now);
                        target.ask_local(local, (self.info, self.plan), cost, 0, time)
                    }
                    _ => self.ask_alone(alone, target, cost, now),
                };
                return self.local_decision(answer, cost, now);
            }
        };
        let now = at.cached();
        if cost > 0
            && let Some(Found { bucket, word, .. }) = target.find_first(table)
            && let Some(result) =
                bucket.decide_fast(word, (cost, self.plan), now, || self.state.terms.scale.token)
        {
            return self.lease_decision(&result, cost, now);
        }
        self.lease_decision(&self.ask_leased(table, target, cost, false, now), cost, now)
    }

    /// Asks the key's bucket until it answers, counts the decision, and notifies the engine of what it has to know.
    #[inline(never)]
    fn ask_leased(
        &self,
        table: &Table<LeaseBucket>,
        target: Target<'_>,
        cost: u32,
        can_wait: bool,
        now: Timestamp,
    ) -> SpendResult {
        let (scale, first_credit) = (self.state.terms.scale, self.state.first_credit(self.info));
        let (plan, room) = (self.plan, if can_wait { Room::Any } else { Room::NotLast });
        let ask = Ask { cost, scale, first_credit, plan, can_wait };
        let newcomer = Newcomer { cost, key: NewKey { first_credit, plan }, room };
        let (place, result) = target.ask(table, newcomer, ask, (now, &self.shared.node.time));
        table.count(place, &result, cost);
        if !result.news.is_none() {
            let (limit, news, at) = (self.state.index, result.news, now);
            self.shared.node.notifications.push(Notification { limit, place, at, news });
        }
        result
    }

    #[inline(always)]
    fn local_decision(&self, answer: LocalAnswer, cost: u32, now: Timestamp) -> Decision {
        let LocalAnswer { is_allowed, is_sure, standing } = answer;
        self.decision(is_allowed, is_sure, Source::Local(standing), cost, now)
    }

    /// What is told of a result.
    #[inline(always)]
    fn lease_decision(&self, result: &SpendResult, cost: u32, now: Timestamp) -> Decision {
        let &SpendResult { is_sure, left, view, refill, .. } = result;
        let source = Source::Lease(Held { left, view, refill });
        self.decision(result.is_allowed(), is_sure, source, cost, now)
    }

    #[inline(always)]
    fn decision(
        &self,
        allowed: bool,
        sure: bool,
        source: Source,
        cost: u32,
        now: Timestamp,
    ) -> Decision {
        let (shadow_denied, limit) = (false, self.info);
        Decision { allowed, sure, shadow_denied, cost: cost.max(1), source, now, limit }
    }

    /// Decides about one request of `key` that costs one token, and asks the store if this node alone cannot be
    /// sure.
    ///
    /// Sure answers come at once, like those of [`check`](Self::check). An unsure one waits for one round trip,
    /// which all callers of this node that wait at the same time share. It waits at most
    /// [`Limit::max_wait`](crate::Limit::max_wait), and not at all while the store takes longer than that or the
    /// outage policy is in force; then the answer is the one that `check` gives. Dropping the future before it is ready
    /// may leave the token spent.
    pub async fn check_sure<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide_or_ask_for(key, 1).await
    }

    /// Decides about one request of `key` that costs `cost` tokens, all or none, and asks the store if this node
    /// alone cannot be sure: see [`check_sure`](Self::check_sure). A cost of 0 is as in
    /// [`check_n`](Self::check_n), and asks the store only if the key would be denied for want of its word.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`check_n`](Self::check_n).
    pub async fn check_sure_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        if cost > self.cost_max() {
            return self.decide_above_max_for(key, cost);
        }
        Ok(self.decide_or_ask_for(key, cost).await)
    }

    /// A decision; `None`: [ask the store](Handle::ask_store). A look (cost 0) gets one also where it is not sure: who can wait tests
    /// a denial by [`is_unsure_look`](Self::is_unsure_look).
    #[inline(always)]
    fn decide_if_sure(&self, target: Target<'_>, cost: u32, at: impl Now) -> Option<Decision> {
        let Buckets::Leased(table) = &self.state.buckets else {
            return Some(self.decide_at(target, cost, at));
        };
        let now = at.cached();
        let result = self.ask_leased(table, target, cost, true, now);
        (result.verdict != Verdict::Unsure).then(|| self.lease_decision(&result, cost, now))
    }

    /// Looks `key` up once, for callers that decide about it often: the handle finds its bucket without a look-up.
    ///
    /// A key that has a handle is never evicted. If the limiter holds as many keys as it may, the handle looks the key
    /// up at each decision, as [`check`](Self::check) does.
    pub fn handle<K: Key + ?Sized>(&self, key: &K) -> Handle {
        // A new key has all of the plan that it is under.
        let held = self.planned_for(key).hold(&self.shared.secret.name(key));
        Handle { limit: self.clone(), plain: self.plain_of(key), ..held }
    }

    fn hold(&self, key: &[u8]) -> Handle {
        // Keys of an exact limit are in the store, and so are the slots of a leaky bucket.
        let is_here = !self.is_decided_by_store() && self.slots().is_none();
        let key = if is_here { self.pin(key) } else { self.without_place(key) };
        Handle { limit: self.clone(), key, plain: None }
    }

    /// The limit's name.
    pub fn name(&self) -> &'static str {
        &self.info.name
    }

    /// Who decides. Without a store it is each node alone, whatever the limit says.
    pub fn mode(&self) -> Mode {
        self.state.terms.mode
    }

    /// The limit's algorithm with its numbers.
    pub fn rule(&self) -> Rule {
        self.current().info.rule
    }

    /// How far this limit can have been exceeded, and was by what the store said, as of the last
    /// second.
    pub fn excess(&self) -> Excess {
        self.state.excess()
    }
}

/// What a key gets that is new.
#[derive(Clone, Copy)]
struct Newcomer {
    /// That of the request; with a cost of 0 the key is not added.
    cost: u32,
    key: NewKey,
    room: Room,
}

/// Whose bucket is asked: that of a key.
#[derive(Clone, Copy)]
struct Target<'a> {
    key: &'a [u8],
    /// The place where its bucket is pinned, or [`OVERFLOW`]: then it is looked up.
    place: u32,
}

impl<'a> Target<'a> {
    #[inline(always)]
    fn key(key: &'a [u8]) -> Self {
        Self { key, place: OVERFLOW }
    }

    /// The bucket, if one look tells. It may be retired.
    #[inline(always)]
    fn find_first<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>> {
        match self.place {
            OVERFLOW => table.find_first(self.key),
            place => Some(table.found_at(place)),
        }
    }

    /// Asks a bucket of this node alone. Inlined like its caller, as far as the first look.
    #[inline(always)]
    fn ask_local<B, R>(
        self,
        local: &LocalBuckets<B>,
        (info, plan): (&'static LimitInfo, u32),
        cost: u32,
        within_us: u64,
        now: Timestamp,
    ) -> LocalAnswer
    where
        B: TableBucket<Ask = LocalAsk<R>, Answer = LocalAnswer, Rule = R>,
        R: StateRule,
    {
        let ask = LocalAsk { cost, rule: local.rule_of(info), within_us, plan };
        // `None` if the first look finds no bucket, or one that is retired, or if another thread is quicker.
        let first = self
            .find_first(&local.table)
            .and_then(|found| Some((found.place, found.bucket.try_decide(found.word, ask, now)?)));
        let (place, answer) = first.unwrap_or_else(|| {
            let key = NewKey { first_credit: 0, plan };
            self.ask(&local.table, Newcomer { cost, key, room: Room::Any }, ask, now)
        });
        local.count(place, answer.is_allowed, cost);
        answer
    }

    /// Asks the bucket until it answers, and returns its place too. A cost of 0 adds no key. A call: the first look mostly
    /// suffices.
    #[inline(never)]
    fn ask<B: TableBucket>(
        self,
        table: &Table<B>,
        newcomer: Newcomer,
        ask: B::Ask,
        time: impl Now,
    ) -> (u32, B::Answer) {
        let Newcomer { cost, key: new_key, room } = newcomer;
        loop {
            let new;
            let Found { bucket, word, place } = match self.find_first(table) {
                Some(found) if !B::is_retired(found.word) => found,
                _ if cost > 0 => table.find_or_insert(self.key, new_key, room),
                _ => {
                    if let Some(found) = table.find(self.key) {
                        found
                    } else {
                        new = table.new_bucket(self.key, new_key);
                        Found { bucket: &new, word: new.load(), place: OVERFLOW }
                    }
                }
            };
            if let Some(result) = bucket.try_decide(word, ask, time) {
                return (place, result);
            }
        }
    }
}

/// A key of a limit, looked up once. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    limit: ActiveLimit,
    /// While it is there, the place is not given to another key.
    key: Arc<PinnedKey>,
    /// The key's bytes before they were hashed, if they were.
    plain: Option<Arc<[u8]>>,
}

/// Without the key, which may be secret.
impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("limit", &self.limit.name()).finish_non_exhaustive()
    }
}

impl Handle {
    /// Decides about one request that costs one token: see [`ActiveLimit::check`].
    #[inline(always)]
    pub fn check(&self) -> Decision {
        self.decide(1)
    }

    /// Decides about one request that costs `cost` tokens: see [`ActiveLimit::check_n`].
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    #[inline]
    pub fn check_n(&self, cost: u32) -> Result<Decision, CheckError> {
        self.decide_n(cost)
    }

    /// Decides about one request that costs one token, and asks the store if this node alone cannot be sure: see
    /// [`ActiveLimit::check_sure`].
    pub async fn check_sure(&self) -> Decision {
        self.decide_or_ask(1).await
    }

    /// Decides about one request that costs `cost` tokens, and asks the store if this node alone cannot be sure:
    /// see [`ActiveLimit::check_sure_n`].
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn check_sure_n(&self, cost: u32) -> Result<Decision, CheckError> {
        if cost > self.limit.cost_max() {
            return self.limit.decide_above_max(self.looked_up(), cost);
        }
        Ok(self.decide_or_ask(cost).await)
    }

    #[inline(always)]
    fn target(&self) -> Target<'_> {
        Target { key: &self.key.key, place: self.key.place }
    }

    /// The bytes that the limiter knows the key by.
    pub fn key(&self) -> &[u8] {
        &self.key.key
    }
}
