//! What users hold: a limiter, its limits, and handles of keys.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::bound::Excess;
use crate::bucket::{
    Ask, Found, KeyBudget, LeaseBucket, LocalBucket, Notification, NotificationQueue, OVERFLOW,
    Room, SpendResult, Table, TableBucket, Verdict,
};
use crate::decision::Decision;
use crate::driver::clock::TimeSource;
use crate::driver::{
    Buckets, Command, LimitState, LocalBuckets, PinnedKey, StoreAnswer, StoreQuery, Wish,
};
use crate::error::{CheckError, ConfigError, ShutdownError, StoreError};
use crate::key::{Key, KeyName, KeySecret};
#[cfg(feature = "tower")]
use crate::key::{KeyWriter, WrittenKey};
use crate::quota::Scale;
use crate::time::{Now, Timestamp};

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
        let limits: Vec<&str> = self.shared.limits.iter().map(|limit| &*limit.name).collect();
        f.debug_struct("Limiter")
            .field("limits", &limits)
            .field("keys", &self.shared.budget.used())
            .field("max_keys", &self.shared.budget.max())
            .finish()
    }
}

/// What all handles share.
pub(crate) struct Shared {
    pub(crate) limits: Arc<[Arc<LimitState>]>,
    pub(crate) budget: Arc<KeyBudget>,
    pub(crate) notifications: Arc<NotificationQueue>,
    pub(crate) commands: mpsc::UnboundedSender<Command>,
    pub(crate) queries: mpsc::UnboundedSender<StoreQuery>,
    pub(crate) last_error: Arc<Mutex<Option<StoreError>>>,
    /// What keys are hashed with.
    pub(crate) secret: KeySecret,
    /// Keeps the cached clock running for as long as decisions are taken.
    pub(crate) time: TimeSource,
    #[cfg(all(feature = "metrics", feature = "tower"))]
    pub(crate) labels: crate::metrics::Labels,
}

impl Limiter {
    /// The limit called `name`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] if the limiter was built without it.
    pub fn limit(&self, name: &str) -> Result<ActiveLimit, ConfigError> {
        let found = self.shared.limits.iter().find(|limit| &*limit.name == name);
        let Some(state) = found else {
            let known: Vec<&str> = self.shared.limits.iter().map(|limit| &*limit.name).collect();
            return Err(ConfigError::UnknownLimit {
                name: name.to_owned(),
                known: known.join(", "),
            });
        };
        Ok(ActiveLimit { state: state.clone(), shared: self.shared.clone() })
    }

    /// Waits until every lane of the store has answered and gives leases: what a readiness probe
    /// should ask. Without a store it is ready at once.
    ///
    /// A limiter decides before it is ready too, on credit and then by its outage policy.
    ///
    /// # Errors
    ///
    /// The store's last error, or [`StoreError::TimedOut`] after `deadline`.
    pub async fn ready(&self, deadline: Duration) -> Result<(), StoreError> {
        if self.ask(Wish::Ready, deadline).await {
            return Ok(());
        }
        let last = self.shared.last_error.lock().unwrap_or_else(PoisonError::into_inner);
        Err(last.clone().unwrap_or(StoreError::TimedOut(deadline)))
    }

    /// Reports what is pending and gives all leases back. Decisions go on meanwhile, but should
    /// have ceased: what is spent after this is lost with the limiter.
    ///
    /// # Errors
    ///
    /// [`ShutdownError`] if the store did not take everything within `deadline`.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        if self.ask(Wish::Leave, deadline).await {
            Ok(())
        } else {
            Err(ShutdownError { within: deadline })
        }
    }

    /// Waits until everything that is due by now has been done and nothing is under way: for tests
    /// that drive the clock.
    #[cfg(any(test, feature = "testing"))]
    pub async fn settle(&self) {
        // A driver that has ended has nothing due any more.
        let _ = self.ask(Wish::Settle, Duration::MAX).await;
    }

    /// Sends a command and waits for its answer; the driver minds the deadline, so that this
    /// works on any runtime.
    async fn ask(&self, wish: Wish, deadline: Duration) -> bool {
        let (done, answer) = oneshot::channel();
        let command = Command { wish, within: deadline, done };
        self.shared.commands.send(command).is_ok() && answer.await.unwrap_or(false)
    }
}

/// A limit of a running limiter. Cheap to clone.
#[derive(Clone)]
pub struct ActiveLimit {
    state: Arc<LimitState>,
    shared: Arc<Shared>,
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
    /// allocates 128 bytes, once.
    #[inline(always)]
    pub fn check<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide_name(self.shared.secret.name(key), 1)
    }

    /// Decides about one request of `key` that costs `cost` tokens: all or none are spent. A cost of 0 spends
    /// nothing, and tells what a request of one token would be told now.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the cost is above the burst, so that it can never be admitted.
    #[inline(always)]
    pub fn check_n<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Result<Decision, CheckError> {
        self.validate_cost(cost)?;
        Ok(self.decide_name(self.shared.secret.name(key), cost))
    }

    /// Decides about the bytes of a key: see [`decide`](Self::decide).
    #[inline(always)]
    fn decide_name(&self, name: KeyName<'_>, cost: u32) -> Decision {
        match name {
            KeyName::Held(key) => self.decide(key, cost),
            KeyName::Written(key) => self.decide_out_of_line(&key, cost),
        }
    }

    /// As [`decide`](Self::decide), of a key for which a call is a small part of the cost.
    #[inline(never)]
    fn decide_out_of_line(&self, key: &[u8], cost: u32) -> Decision {
        self.decide(key, cost)
    }

    /// Decides. Inlined, so that the caller does not build parts of a decision that it does not read.
    #[inline(always)]
    fn decide(&self, target: impl Target, cost: u32) -> Decision {
        let now = self.state.clock.now();
        let table = match &self.state.buckets {
            Buckets::Leased(table) => table,
            Buckets::Local(local) => {
                let now = self.shared.time.precise(now);
                let result = ask_local(local, target, cost, now, &self.state.terms.scale);
                return self.decision(&result, cost, now);
            }
        };
        if cost == 0 {
            return self.read(table, target, now);
        }
        if let Some(found) = target.find_first(table)
            && let Some(result) = self.decide_fast(&found, cost, now)
        {
            return self.decision(&result, cost, now);
        }
        let result = self.decide_fully(table, target, self.request(cost, false), now);
        self.decision(&result, cost, now)
    }

    /// Spends or denies, if one look at the bucket tells.
    #[inline(always)]
    fn decide_fast(
        &self,
        found: &Found<'_, LeaseBucket>,
        cost: u32,
        now: Timestamp,
    ) -> Option<SpendResult> {
        let &Found { bucket, word, .. } = found;
        let unit = || self.state.terms.scale.token;
        let spent = bucket.spend(word, cost, now, unit);
        spent.or_else(|| if cost == 1 { bucket.deny(word, now, unit()) } else { None })
    }

    fn request(&self, cost: u32, can_wait: bool) -> Ask {
        let (unit, first_credit) = (self.state.terms.scale.token, self.state.first_credit());
        Ask { cost, unit, first_credit, can_wait }
    }

    /// Asks the key's bucket until it answers, which may be that the store should be asked, and notifies the engine of
    /// what it has to know.
    #[inline(never)]
    fn decide_fully(
        &self,
        table: &Table<LeaseBucket>,
        target: impl Target,
        ask: Ask,
        now: Timestamp,
    ) -> SpendResult {
        let time = Reading { cached: now, time: &self.shared.time };
        let room = if ask.can_wait { Room::Any } else { Room::NotLast };
        let (place, result) = loop {
            let Found { bucket, word, place } =
                target.find_or_insert(table, ask.first_credit, room);
            let spent = bucket.spend(word, ask.cost, now, || ask.unit);
            if let Some(result) = spent.or_else(|| bucket.decide(word, ask, time)) {
                break (place, result);
            }
        };
        table.count(place, &result, ask.cost);
        if !result.news.is_none() {
            let (limit, news) = (self.state.index, result.news);
            self.shared.notifications.push(Notification { limit, place, at: now, news });
        }
        result
    }

    #[inline(always)]
    fn decision(&self, result: &SpendResult, cost: u32, now: Timestamp) -> Decision {
        let &SpendResult { is_sure: sure, left, view, refill, .. } = result;
        let (allowed, limit) = (result.is_allowed(), self.state.info);
        Decision { allowed, sure, cost: cost.max(1), left, view, now, refill, limit }
    }

    /// What a request of one token would be told now; nothing is spent.
    fn read(&self, table: &Table<LeaseBucket>, target: impl Target, now: Timestamp) -> Decision {
        let unit = self.state.terms.scale.token;
        let peeked = target.find(table).and_then(|Found { bucket, word, .. }| {
            let peeked = (bucket.peek(now, unit), bucket.view_and_refill());
            bucket.load_in(word.epoch()).map(|_| peeked)
        });
        let ((left, credit, is_sure), report) = peeked.unwrap_or_else(|| {
            let new = LeaseBucket::default();
            new.start(self.state.first_credit(), target.is_marked(table));
            (new.peek(now, unit), new.view_and_refill())
        });
        let (verdict, is_sure) = (Verdict::of(left + credit > 0), is_sure && left > 0);
        self.decision(&SpendResult::new(verdict, is_sure, left, report), 1, now)
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
        self.decide_or_ask(&self.shared.secret.name(key), 1).await
    }

    /// Decides about one request of `key` that costs `cost` tokens, all or none, and asks the store if this node
    /// alone cannot be sure: see [`check_sure`](Self::check_sure). A cost of 0 is as in
    /// [`check_n`](Self::check_n), and never waits.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the cost is above the burst, so that it can never be admitted.
    pub async fn check_sure_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        self.validate_cost(cost)?;
        Ok(self.decide_or_ask(&self.shared.secret.name(key), cost).await)
    }

    async fn decide_or_ask(&self, key: &[u8], cost: u32) -> Decision {
        match self.decide_or_hold(key, cost) {
            Ok(decision) => decision,
            Err(handle) => handle.ask_store(cost).await,
        }
    }

    /// A decision that is sure, or that nothing can be asked about. Otherwise the key's handle, to
    /// [ask the store](Handle::ask_store) with.
    fn decide_or_hold(&self, key: &[u8], cost: u32) -> Result<Decision, Handle> {
        self.decide_surely(key, cost).ok_or_else(|| self.hold(key))
    }

    /// Decides if this node is sure.
    fn decide_surely(&self, target: impl Target, cost: u32) -> Option<Decision> {
        let Buckets::Leased(table) = &self.state.buckets else {
            return Some(self.decide(target, cost));
        };
        let now = self.state.clock.now();
        if cost == 0 {
            return Some(self.read(table, target, now));
        }
        let result = self.decide_fully(table, target, self.request(cost, true), now);
        (result.verdict != Verdict::Unsure).then(|| self.decision(&result, cost, now))
    }

    /// Looks `key` up once, for callers that decide about it often: the handle finds its bucket without a look-up.
    ///
    /// A key that has a handle is never evicted. If the limiter holds as many keys as it may, the handle looks the key
    /// up at each decision, as [`check`](Self::check) does.
    pub fn handle<K: Key + ?Sized>(&self, key: &K) -> Handle {
        self.hold(&self.shared.secret.name(key))
    }

    fn hold(&self, key: &[u8]) -> Handle {
        let limit = self.state.clone();
        let place = match &limit.buckets {
            Buckets::Leased(table) => table.pin(key, limit.first_credit()),
            Buckets::Local(local) => local.table.pin(key, ()),
        };
        let key = Arc::new(PinnedKey { limit, place, key: key.into() });
        Handle { place, limit: self.clone(), key }
    }

    /// The limit's name.
    pub fn name(&self) -> &'static str {
        &self.state.info.name
    }

    /// The labels that all metrics of the limiter have.
    #[cfg(all(feature = "metrics", feature = "tower"))]
    pub(crate) fn limiter_labels(&self) -> crate::metrics::Labels {
        self.shared.labels.clone()
    }

    /// Writes a key before it is used, for callers that must first know whether there is one.
    #[cfg(feature = "tower")]
    pub(crate) fn write_key<R>(
        &self,
        write: impl FnOnce(&mut KeyWriter<'_>) -> R,
    ) -> (WrittenKey, R) {
        self.shared.secret.write_key(write)
    }

    /// Decides if this node is sure, or else returns the key's handle, to [ask the store](Handle::ask_store) with.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the cost is above the burst, so that it can never be admitted.
    #[cfg(feature = "tower")]
    pub(crate) fn check_if_sure<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Result<Decision, Handle>, CheckError> {
        self.validate_cost(cost)?;
        Ok(self.decide_or_hold(&self.shared.secret.name(key), cost))
    }

    /// How far this limit can have been exceeded, and was by what the store said, as of the last
    /// second.
    pub fn excess(&self) -> Excess {
        self.state.excess()
    }

    #[inline(always)]
    fn validate_cost(&self, cost: u32) -> Result<(), CheckError> {
        let max = self.state.terms.cost_max;
        if cost <= max {
            return Ok(());
        }
        Err(CheckError::CostTooHigh { limit: &self.state.info.name, cost, max })
    }
}

/// Asks the key's bucket until it decides. A cost of 0 adds no key.
#[inline(never)]
fn ask_local(
    local: &LocalBuckets,
    target: impl Target,
    cost: u32,
    now: Timestamp,
    scale: &Scale,
) -> SpendResult {
    let mut is_overflow;
    let result = loop {
        let found = match target.find_first(&local.table) {
            Some(found) if !LocalBucket::is_retired(found.word) => found,
            _ if cost == 0 => match target.find(&local.table) {
                Some(found) => found,
                None => return LocalBucket::decide_new(now, scale),
            },
            _ => target.find_or_insert(&local.table, (), Room::Any),
        };
        is_overflow = found.place == OVERFLOW;
        if let Some(result) = found.bucket.decide(found.word, cost, now, scale) {
            break result;
        }
    };
    if cost > 0 {
        local.count(result.is_allowed());
        if is_overflow {
            local.table.count_overflow();
        }
    }
    result
}

/// The cached time as a decision read it, and where the precise time can be had.
#[derive(Clone, Copy, Debug)]
struct Reading<'a> {
    cached: Timestamp,
    time: &'a TimeSource,
}

impl Now for Reading<'_> {
    fn cached(&self) -> Timestamp {
        self.cached
    }

    fn precise(&self) -> Timestamp {
        self.time.precise(self.cached)
    }
}

/// Whose bucket is asked: that of a key, or one that is pinned.
trait Target: Copy {
    fn find<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>>;

    /// Whether the key may have been evicted before it was full.
    fn is_marked<B: TableBucket>(self, _: &Table<B>) -> bool {
        false
    }

    /// As [`find`](Self::find), but `None` also if one look does not tell. The bucket may be retired.
    #[inline(always)]
    fn find_first<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>> {
        self.find(table)
    }

    fn find_or_insert<B: TableBucket>(
        self,
        table: &Table<B>,
        start: B::Start,
        room: Room,
    ) -> Found<'_, B>;
}

impl Target for &[u8] {
    fn is_marked<B: TableBucket>(self, table: &Table<B>) -> bool {
        table.is_marked(self)
    }

    fn find<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>> {
        table.find(self)
    }

    #[inline(always)]
    fn find_first<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>> {
        table.find_first(self)
    }

    fn find_or_insert<B: TableBucket>(
        self,
        table: &Table<B>,
        start: B::Start,
        room: Room,
    ) -> Found<'_, B> {
        table.find_or_insert(self, start, room)
    }
}

/// A place that is pinned.
#[derive(Clone, Copy, Debug)]
struct Pinned(u32);

impl Target for Pinned {
    #[inline(always)]
    fn find<B: TableBucket>(self, table: &Table<B>) -> Option<Found<'_, B>> {
        Some(table.found_at(self.0))
    }

    fn find_or_insert<B: TableBucket>(
        self,
        table: &Table<B>,
        _: B::Start,
        _: Room,
    ) -> Found<'_, B> {
        table.found_at(self.0)
    }
}

/// A key of a limit, looked up once. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    /// Where the bucket is.
    place: u32,
    limit: ActiveLimit,
    /// Most decisions do not touch it; while it is there the place is not given up.
    key: Arc<PinnedKey>,
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
        self.decide_now(1)
    }

    /// Decides about one request that costs `cost` tokens: see [`ActiveLimit::check_n`].
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the cost is above the burst, so that it can never be admitted.
    #[inline]
    pub fn check_n(&self, cost: u32) -> Result<Decision, CheckError> {
        self.limit.validate_cost(cost)?;
        Ok(self.decide_now(cost))
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
    /// [`CheckError`] if the cost is above the burst, so that it can never be admitted.
    pub async fn check_sure_n(&self, cost: u32) -> Result<Decision, CheckError> {
        self.limit.validate_cost(cost)?;
        Ok(self.decide_or_ask(cost).await)
    }

    #[inline(always)]
    fn decide_now(&self, cost: u32) -> Decision {
        match self.pinned() {
            Some(pinned) => self.limit.decide(pinned, cost),
            None => self.limit.decide_out_of_line(&self.key.key, cost),
        }
    }

    /// The key's bucket. `None` if it had no room when the handle was made: it may have found some meanwhile.
    #[inline(always)]
    fn pinned(&self) -> Option<Pinned> {
        (self.place != OVERFLOW).then_some(Pinned(self.place))
    }

    async fn decide_or_ask(&self, cost: u32) -> Decision {
        let Some(pinned) = self.pinned() else {
            return self.limit.decide_or_ask(&self.key.key, cost).await;
        };
        match self.limit.decide_surely(pinned, cost) {
            Some(decision) => decision,
            None => self.ask_store(cost).await,
        }
    }

    /// Asks the store.
    pub(crate) async fn ask_store(&self, cost: u32) -> Decision {
        let LimitState { clock, terms, buckets, .. } = &*self.limit.state;
        let Buckets::Leased(table) = buckets else { return self.decide_now(cost) };
        if terms.max_wait_us == 0 {
            return self.decide_now(cost);
        }
        let (done, answer) = oneshot::channel();
        let query = StoreQuery { key: self.key.clone(), cost, within_us: terms.max_wait_us, done };
        let is_sent = self.limit.shared.queries.send(query).is_ok();
        let answer = if is_sent { answer.await.ok() } else { None };
        let Some(StoreAnswer { allowed, sure }) = answer else {
            // The driver has ended with its runtime.
            return self.decide_now(cost);
        };
        if self.place == OVERFLOW {
            table.count_overflow();
        }
        let (bucket, now) = (table.at(self.place), clock.now());
        let (left, ..) = bucket.peek(now, terms.scale.token);
        let result = SpendResult::new(Verdict::of(allowed), sure, left, bucket.view_and_refill());
        self.limit.decision(&result, cost, now)
    }

    /// The bytes that the limiter knows the key by.
    pub fn key(&self) -> &[u8] {
        &self.key.key
    }
}
