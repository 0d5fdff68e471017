//! What users hold: a limiter, its limits, and handles of keys.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::bound::Excess;
use crate::bucket::{
    Bucket, DirtyQueue, Found, Held, KeyBudget, KeyHash, Looked, Note, OVERFLOW, SpendResult,
    Taken, Verdict,
};
use crate::decision::Decision;
use crate::driver::clock::TimeSource;
use crate::driver::{Answered, Command, InHand, LimitState, Question, Wish};
use crate::error::{CheckError, ConfigError, ShutdownError, StoreError};
use crate::key::{Key, KeySecret, OVERFLOW_NAME};
#[cfg(feature = "tower")]
use crate::key::{KeyWriter, WrittenKey};
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
        let budget = self.shared.limits.first().map(|limit| limit.buckets.budget());
        f.debug_struct("Limiter")
            .field("limits", &limits)
            .field("keys", &budget.map_or(0, KeyBudget::used))
            .field("max_keys", &budget.map_or(0, KeyBudget::max))
            .finish()
    }
}

/// What all handles share.
pub(crate) struct Shared {
    pub(crate) limits: Arc<[Arc<LimitState>]>,
    pub(crate) dirty: Arc<DirtyQueue>,
    pub(crate) commands: mpsc::UnboundedSender<Command>,
    pub(crate) questions: mpsc::UnboundedSender<Question>,
    pub(crate) last_error: Arc<Mutex<Option<StoreError>>>,
    /// What keys are hashed with.
    pub(crate) secret: KeySecret,
    /// Keeps the cached clock running for as long as decisions are taken.
    pub(crate) time: TimeSource,
    #[cfg(all(feature = "metrics", feature = "tower"))]
    pub(crate) labels: crate::metrics::Labels,
}

/// The cached time as it was read, and where the precise time is to be had.
#[derive(Clone, Copy, Debug)]
struct At<'a> {
    cached: Timestamp,
    time: &'a TimeSource,
}

impl Now for At<'_> {
    #[inline]
    fn cached(&self) -> Timestamp {
        self.cached
    }

    #[inline]
    fn precise(&self) -> Timestamp {
        self.time.precise(self.cached)
    }
}

impl Shared {
    #[inline]
    fn at(&self, cached: Timestamp) -> At<'_> {
        At { cached, time: &self.time }
    }
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
    /// Never waits, does no I/O, and allocates nothing on a known key.
    #[inline(always)]
    pub fn check<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.shared.secret.with_name(key, |key| self.decide_now(key, 1))
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
        Ok(self.shared.secret.with_name(key, |key| self.decide_now(key, cost)))
    }

    /// What nobody asks of a decision is not computed: so this is inlined, and what it calls is not.
    #[inline(always)]
    fn decide_now(&self, key: &[u8], cost: u32) -> Decision {
        let now = self.state.clock.now();
        let judged = match cost {
            0 => return self.read(key),
            1 => self.judge_one(key, now),
            _ => self.judge_other(key, cost, now),
        };
        self.decision(judged, cost, now)
    }

    /// Not inlined, so that it has the registers for itself that pass its arguments: they are enough.
    #[inline(never)]
    fn judge_one(&self, key: &[u8], now: Timestamp) -> Judged<'_> {
        let hash = self.state.buckets.hash(key);
        match self.state.buckets.find_at_home(hash, key) {
            Some(found) => self.judge_at_once(found, Some(key), now),
            None => self.judge_elsewhere(hash, key, now),
        }
    }

    /// The same where the key need not be where the index is looked into first.
    #[inline(never)]
    fn judge_elsewhere(&self, hash: KeyHash, key: &[u8], now: Timestamp) -> Judged<'_> {
        match self.state.buckets.find(hash, key) {
            Some(found) => self.judge_at_once(found, Some(key), now),
            None => self.judge_new(key, 1, now),
        }
    }

    /// Decides about any cost.
    #[inline(never)]
    fn judge_other(&self, key: &[u8], cost: u32, now: Timestamp) -> Judged<'_> {
        match self.state.buckets.find(self.state.buckets.hash(key), key) {
            Some(found) => self.judge_spender(found, Some(key), cost, now),
            None => self.judge_new(key, cost, now),
        }
    }

    /// Decides about one token by one look at the bucket, if that tells at once. Whatever else there is to be
    /// done comes last, so that nothing has to be kept meanwhile. Here and below there is a key only where the
    /// bucket's place may be given to another one: then it is compared whenever the bucket is looked at anew.
    #[inline(always)]
    fn judge_at_once<'a>(
        &'a self,
        found: Found<'a>,
        key: Option<&[u8]>,
        now: Timestamp,
    ) -> Judged<'a> {
        match found.bucket.take_at_once(found.word, now) {
            Some(result) => Judged { bucket: found.bucket, result },
            None => self.judge_again(found, key, now),
        }
    }

    /// Decides where a fresh lease does not tell: often the request is to be denied.
    #[inline(never)]
    fn judge_again<'a>(
        &'a self,
        found: Found<'a>,
        key: Option<&[u8]>,
        now: Timestamp,
    ) -> Judged<'a> {
        let Found { bucket, word } = found;
        match bucket.deny_at_once(word, now, || self.state.terms.scale.token) {
            Some(looked) => self.judged(bucket, looked),
            None => self.judge_spender(found, key, 1, now),
        }
    }

    /// Decides where the request is not denied at once.
    #[inline(never)]
    fn judge_spender<'a>(
        &'a self,
        found: Found<'a>,
        key: Option<&[u8]>,
        cost: u32,
        now: Timestamp,
    ) -> Judged<'a> {
        let Found { bucket, word } = found;
        let unit = self.state.terms.scale.token;
        match bucket.spend_by_look(word, cost, self.shared.at(now), unit) {
            Some(looked) => self.judged(bucket, looked),
            None => self.judge_fully(bucket, key, cost, now),
        }
    }

    #[inline(always)]
    fn judged<'a>(&'a self, bucket: &'a Bucket, looked: Looked) -> Judged<'a> {
        let Looked { result, told } = looked;
        if told { Judged { bucket, result } } else { self.tell_at_once(result, bucket) }
    }

    #[cold]
    #[inline(never)]
    fn tell_at_once<'a>(&'a self, result: SpendResult, bucket: &'a Bucket) -> Judged<'a> {
        let taken = bucket.tell_at_once(result);
        // What it cost is asked of denied ones alone, and those that cost more are not denied at once.
        self.tell(&taken, 1, bucket);
        Judged { bucket, result }
    }

    /// Decides where one look does not tell, or somebody is to be told.
    #[inline(never)]
    fn judge_fully<'a>(
        &'a self,
        bucket: &'a Bucket,
        key: Option<&[u8]>,
        cost: u32,
        now: Timestamp,
    ) -> Judged<'a> {
        let is_mine = || self.is_mine(bucket, key);
        bucket.renew_first_credit(now, || self.state.first_credit());
        let (at, unit) = (self.shared.at(now), self.state.terms.scale.token);
        match (bucket.take_further(cost, at, unit, is_mine), key) {
            (Some(taken), _) => {
                if taken.is_news(cost) {
                    self.tell(&taken, cost, bucket);
                }
                Judged::of(bucket, &taken)
            }
            // The key was evicted a moment ago.
            (None, Some(key)) => self.judge_new(key, cost, now),
            // Without a key to compare the place is not given up.
            (None, None) => {
                Judged { bucket, result: SpendResult { sure: false, ..SpendResult::DENIED } }
            }
        }
    }

    /// Whether the bucket is still that of the key, if there is one to compare.
    #[inline(always)]
    fn is_mine(&self, bucket: &Bucket, key: Option<&[u8]>) -> bool {
        key.is_none_or(|key| self.state.buckets.is_of(bucket, key))
    }

    #[cold]
    #[inline(never)]
    fn judge_new(&self, key: &[u8], cost: u32, now: Timestamp) -> Judged<'_> {
        let (bucket, key) = self.make(key, now);
        self.judge_fully(bucket, key, cost, now)
    }

    /// Makes the key's bucket if it is new; returns it, and the key if it is to be compared.
    #[cold]
    #[inline(never)]
    fn make<'k>(&self, key: &'k [u8], now: Timestamp) -> (&Bucket, Option<&'k [u8]>) {
        let buckets = &self.state.buckets;
        let place = buckets.make(buckets.hash(key), key, || self.state.start(now));
        (buckets.at(place), (place != OVERFLOW).then_some(key))
    }

    /// Tells the engine what it has to know of a decision.
    #[inline(never)]
    fn tell(&self, taken: &Taken, cost: u32, bucket: &Bucket) {
        let place = self.state.buckets.place(bucket);
        self.state.buckets.count(place, taken, cost);
        if let Some(note) = Note::of(taken, self.state.index, place) {
            self.shared.dirty.push(note, taken.touch);
        }
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
        match self.shared.secret.with_name(key, |key| self.decide_or_hold(key, 1)) {
            Ok(decision) => decision,
            Err(handle) => handle.ask(1).await,
        }
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
        match self.shared.secret.with_name(key, |key| self.decide_or_hold(key, cost)) {
            Ok(decision) => Ok(decision),
            Err(handle) => Ok(handle.ask(cost).await),
        }
    }

    /// A decision that is sure, or that nothing can be asked about; or else the key, to ask the store about it.
    fn decide_or_hold(&self, key: &[u8], cost: u32) -> Result<Decision, Handle> {
        if cost == 0 {
            return Ok(self.read(key));
        }
        let buckets = &self.state.buckets;
        let (bucket, mine) = match buckets.find(buckets.hash(key), key) {
            Some(found) => (found.bucket, Some(key)),
            None => self.make(key, self.state.clock.now()),
        };
        self.decide_surely(bucket, mine, cost).ok_or_else(|| self.hold(key))
    }

    /// What a request of one token would be told now; nothing is spent.
    #[inline(never)]
    fn read(&self, key: &[u8]) -> Decision {
        let buckets = &self.state.buckets;
        if let Some(Found { bucket, .. }) = buckets.find(buckets.hash(key), key) {
            let found = self.look(bucket);
            if buckets.is_of(bucket, key) && !bucket.is_gone() {
                return found;
            }
        }
        self.look(&Bucket::new(self.state.start(self.state.clock.now())))
    }

    /// Decides if that can be done for sure, and the key was not evicted a moment ago.
    fn decide_surely(&self, bucket: &Bucket, key: Option<&[u8]>, cost: u32) -> Option<Decision> {
        let now = self.state.clock.now();
        let is_mine = || self.is_mine(bucket, key);
        bucket.renew_first_credit(now, || self.state.first_credit());
        let (at, unit) = (self.shared.at(now), self.state.terms.scale.token);
        let taken = bucket.take_sure_of(cost, at, unit, is_mine)?;
        if taken.is_news(cost) {
            self.tell(&taken, cost, bucket);
        }
        let judged = Judged::of(bucket, &taken);
        (taken.verdict != Verdict::Unsure).then(|| self.decision(judged, cost, now))
    }

    /// Looks `key` up once, for callers that decide about it often: the handle finds its bucket without a look-up.
    ///
    /// A key that has a handle is never evicted. When the limiter holds as many keys as it may, the handle is
    /// one to the limit's overflow bucket.
    pub fn handle<K: Key + ?Sized>(&self, key: &K) -> Handle {
        self.shared.secret.with_name(key, |key| self.hold(key))
    }

    fn hold(&self, key: &[u8]) -> Handle {
        let now = self.state.clock.now();
        let buckets = &self.state.buckets;
        let bucket = Held::new(buckets, key, || self.state.start(now));
        let key = if bucket.is_overflow() { &OVERFLOW_NAME[..] } else { key };
        let place = bucket.place();
        let key = Arc::new(InHand { bucket, key: key.into() });
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

    /// Decides if this node is sure, or else returns the key's handle, to [`ask`](Handle::ask) the store with.
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
        Ok(self.shared.secret.with_name(key, |key| self.decide_or_hold(key, cost)))
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

    fn look(&self, bucket: &Bucket) -> Decision {
        let now = self.state.clock.now();
        let (left, credit, sure) = bucket.peek(now, self.state.terms.scale.token);
        let (allowed, sure) = (left + credit > 0, sure && left > 0);
        let result = SpendResult { left, allowed, sure };
        self.decision(Judged { bucket, result }, 1, now)
    }

    #[inline(always)]
    fn decision(&self, judged: Judged<'_>, cost: u32, now: Timestamp) -> Decision {
        let Judged { bucket, result: SpendResult { left, allowed, sure } } = judged;
        let (view, refill, limit) = (bucket.view(), bucket.refill(), self.state.info);
        Decision { allowed, sure, cost, left, view, now, refill, limit }
    }
}

/// What was decided, and where: two words, which are returned in registers.
#[derive(Clone, Copy, Debug)]
struct Judged<'a> {
    bucket: &'a Bucket,
    result: SpendResult,
}

impl<'a> Judged<'a> {
    fn of(bucket: &'a Bucket, taken: &Taken) -> Self {
        let (left, allowed, sure) = (taken.left, taken.allowed(), taken.sure);
        Self { bucket, result: SpendResult { left, allowed, sure } }
    }
}

/// A key of a limit, looked up once. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    /// Where the bucket is.
    place: u32,
    limit: ActiveLimit,
    /// Most decisions do not touch it; while it is there the place is not given up.
    key: Arc<InHand>,
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
        let now = self.limit.state.clock.now();
        if cost != 1 {
            return self.decide_other(cost, now);
        }
        let judged = self.limit.judge_at_once(self.found(), None, now);
        self.limit.decision(judged, 1, now)
    }

    #[inline(never)]
    fn decide_other(&self, cost: u32, now: Timestamp) -> Decision {
        if cost == 0 {
            return self.limit.look(self.bucket());
        }
        let judged = self.limit.judge_spender(self.found(), None, cost, now);
        self.limit.decision(judged, cost, now)
    }

    #[inline(always)]
    fn found(&self) -> Found<'_> {
        self.limit.state.buckets.found_at(self.place)
    }

    fn bucket(&self) -> &Bucket {
        self.limit.state.buckets.at(self.place)
    }

    async fn decide_or_ask(&self, cost: u32) -> Decision {
        if cost == 0 {
            return self.limit.look(self.bucket());
        }
        match self.limit.decide_surely(self.bucket(), None, cost) {
            Some(decision) => decision,
            None => self.ask(cost).await,
        }
    }

    /// Asks the store.
    pub(crate) async fn ask(&self, cost: u32) -> Decision {
        let LimitState { clock, terms, .. } = &*self.limit.state;
        if terms.max_wait_us == 0 {
            return self.decide_now(cost);
        }
        let (done, answer) = oneshot::channel();
        let question = Question { key: self.key.clone(), cost, within_us: terms.max_wait_us, done };
        let asked = self.limit.shared.questions.send(question);
        let answer = if asked.is_ok() { answer.await.ok() } else { None };
        let Some(Answered { allowed, sure }) = answer else {
            // The driver has ended with its runtime: nobody can be asked any more.
            return self.decide_now(cost);
        };
        let bucket = self.bucket();
        let (left, ..) = bucket.peek(clock.now(), terms.scale.token);
        let result = SpendResult { left, allowed, sure };
        self.limit.decision(Judged { bucket, result }, cost, clock.now())
    }

    /// The bytes that the limiter knows the key by; those of a name that no key has, for the overflow bucket.
    pub fn key(&self) -> &[u8] {
        &self.key.key
    }
}
