//! Permits of concurrency limits: what callers share with the task that tells the store, and that task's part of the driver.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Notify, oneshot};
use tokio::task::{Id, JoinError, JoinSet};

use super::clock::TimeSource;
use super::exact::outage_event;
use crate::error::{AcquireError, StoreError};
use crate::limit::PermitTerms;
use crate::store::Store;
use crate::store::permits::PermitRequest;
#[cfg(feature = "server")]
use crate::sync::TimedPermit;
use crate::sync::message::InstanceId;
use crate::sync::{
    CALL_MAX_US, Event, OutageChange, PermitAsk, PermitCounts, PermitId, PermitKey, PermitMessage,
    PermitOutput, PermitReply, Permits,
};
use crate::time::{Timestamp, micros};

/// The most messages under way: others wait until one is answered.
const CALLS_MAX: usize = 10_000;
/// How often permits in use and denials are told to the listeners.
const TELL_US: u64 = 1_000_000;

/// What a caller gets.
pub(crate) type PermitAnswer = Result<HeldPermit, AcquireError>;

/// What all concurrency limits of a limiter share.
#[derive(Debug, Default)]
pub(crate) struct PermitLimits {
    pub(crate) limits: Vec<Arc<PermitKeys>>,
    /// Something is to be told to the store, or is due earlier.
    wake: Arc<Notify>,
    /// The task has done what was due, or a limit's last permit has gone back.
    rested: Arc<Notify>,
}

impl PermitLimits {
    pub(super) fn new(terms: Vec<PermitTerms>, seed: u64, time: &TimeSource) -> Self {
        let (wake, rested) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let notices = || (wake.clone(), rested.clone());
        let limit = |terms| Arc::new(PermitKeys::new(terms, seed, time.clone(), notices()));
        Self { limits: terms.into_iter().map(limit).collect(), wake, rested }
    }

    /// Waits until the store knows that nothing is held here, or until the task has ended.
    pub(crate) async fn emptied(&self) {
        self.reached(|limit| limit.lock().permits.is_empty()).await;
    }

    /// Waits until nothing is due and nothing is under way.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) async fn settled(&self) {
        self.reached(|limit| {
            let (state, now) = (limit.lock(), limit.time.now());
            state.permits.is_quiet() && state.sends.is_empty() && state.permits.poll_timeout() > now
        })
        .await;
    }

    async fn reached(&self, is_done: impl Fn(&PermitKeys) -> bool) {
        self.wake.notify_one();
        loop {
            let rested = self.rested.notified();
            let is_over = |limit: &Arc<PermitKeys>| limit.lock().has_ended || is_done(limit);
            if self.limits.iter().all(is_over) {
                return;
            }
            rested.await;
        }
    }
}

/// The keys of one concurrency limit. A lock is held for as long as a few map operations take.
pub(crate) struct PermitKeys {
    terms: PermitTerms,
    state: Mutex<State>,
    wake: Arc<Notify>,
    rested: Arc<Notify>,
    time: TimeSource,
}

struct State {
    permits: Permits,
    callers: HashMap<u64, oneshot::Sender<PermitAnswer>>,
    /// Those who wait until the store has taken over permits.
    handing_over: HashMap<PermitId, oneshot::Sender<Result<(), StoreError>>>,
    sends: VecDeque<(PermitKey, PermitMessage)>,
    changes: Vec<OutageChange>,
    /// Until when the task sleeps.
    wake_at: Timestamp,
    /// The task has ended with its runtime.
    has_ended: bool,
}

/// Keys may be secret.
impl fmt::Debug for PermitKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitKeys").field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// Permits that somebody holds; they go back when it is dropped.
pub(crate) struct HeldPermit {
    keys: Arc<PermitKeys>,
    key: PermitKey,
    pub(crate) cost: u32,
}

impl fmt::Debug for HeldPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.keys.name();
        f.debug_struct("HeldPermit")
            .field("limit", &limit)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}

impl Drop for HeldPermit {
    fn drop(&mut self) {
        let Self { keys, key, cost } = self;
        if *cost > 0 {
            keys.act(|state, now| state.permits.release(key, *cost, now));
        }
    }
}

#[cfg(feature = "server")]
impl HeldPermit {
    /// The limit's name, and the key as the store knows it.
    pub(crate) fn name(&self) -> (Arc<str>, PermitKey) {
        (self.keys.terms.name.clone(), self.key.clone())
    }

    /// The longest that callers wait for the store.
    pub(crate) fn max_wait(&self) -> Duration {
        Duration::from_micros(self.keys.terms.max_wait_us)
    }

    /// Hands it over to the store, for whoever has the id.
    pub(crate) fn hand_over(mut self, id: PermitId, time_to_live: Duration) -> PendingHandOver {
        let (keys, key) = (self.keys.clone(), self.key.clone());
        let permits = std::mem::take(&mut self.cost);
        let timed = TimedPermit { id, permits, time_us: micros(time_to_live) };
        let (done, answer) = oneshot::channel();
        keys.act(|state, now| {
            state.permits.hand_over(&key, timed, now);
            state.handing_over.insert(id, done);
        });
        PendingHandOver { keys, key, id, answer }
    }
}

/// Permits on their way to the store. Dropped before a message has them, they go back.
#[cfg(feature = "server")]
pub(crate) struct PendingHandOver {
    keys: Arc<PermitKeys>,
    key: PermitKey,
    id: PermitId,
    answer: oneshot::Receiver<Result<(), StoreError>>,
}

#[cfg(feature = "server")]
impl PendingHandOver {
    pub(crate) async fn answer(&mut self) -> Result<(), StoreError> {
        let ended = || StoreError::Unreachable("the limiter's task has ended".to_owned());
        (&mut self.answer).await.unwrap_or_else(|_| Err(ended()))
    }

    /// Whether the permits went back, since no message has had them. Otherwise there is an answer yet.
    pub(crate) fn cancel(&mut self) -> bool {
        let Self { keys, key, id, .. } = self;
        keys.act(|state, now| {
            let is_cancelled = state.permits.cancel_hand_over(key, *id, now);
            if is_cancelled || state.has_ended {
                state.handing_over.remove(id);
            }
            is_cancelled
        })
    }
}

#[cfg(feature = "server")]
impl Drop for PendingHandOver {
    fn drop(&mut self) {
        self.cancel();
        self.keys.act(|state, _| state.handing_over.remove(&self.id));
    }
}

/// A caller who waits for its answer. Dropped, it leaves the queue.
pub(crate) struct PendingPermit {
    keys: Arc<PermitKeys>,
    key: PermitKey,
    ticket: u64,
    answer: oneshot::Receiver<PermitAnswer>,
}

impl PendingPermit {
    pub(crate) async fn answer(mut self) -> PermitAnswer {
        let ended = || AcquireError::Ended { limit: self.keys.terms.name.clone() };
        (&mut self.answer).await.unwrap_or_else(|_| Err(ended()))
    }
}

impl Drop for PendingPermit {
    fn drop(&mut self) {
        let Self { keys, key, ticket, .. } = self;
        keys.act(|state, now| {
            if state.callers.remove(ticket).is_some() || state.has_ended {
                state.permits.cancel(key, *ticket, now);
            }
        });
    }
}

impl PermitKeys {
    fn new(
        terms: PermitTerms,
        seed: u64,
        time: TimeSource,
        (wake, rested): (Arc<Notify>, Arc<Notify>),
    ) -> Self {
        let state = State {
            permits: Permits::new(terms.clone(), seed),
            callers: HashMap::new(),
            handing_over: HashMap::new(),
            sends: VecDeque::new(),
            changes: Vec::new(),
            wake_at: Timestamp::ZERO,
            has_ended: false,
        };
        Self { terms, state: Mutex::new(state), wake, rested, time }
    }

    pub(crate) fn name(&self) -> &str {
        &self.terms.name
    }

    pub(crate) fn max(&self) -> u32 {
        self.terms.max
    }

    /// Whether nodes share the limit.
    #[cfg(feature = "server")]
    pub(crate) fn is_shared(&self) -> bool {
        self.terms.is_shared
    }

    /// Asks for permits; the answer may be there already.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        key: &[u8],
        ask: PermitAsk,
    ) -> Result<PendingPermit, AcquireError> {
        let (key, (done, answer)) = (PermitKey::from(key), oneshot::channel());
        let ticket = self.act(|state, now| {
            // Keys of an ended limit never come free: the cap on keys would hide that it has ended.
            if state.has_ended && self.terms.is_shared {
                return Err(AcquireError::Ended { limit: self.terms.name.clone() });
            }
            let ticket = state.permits.acquire(&key, ask, now)?;
            state.callers.insert(ticket, done);
            Ok(ticket)
        })?;
        Ok(PendingPermit { keys: self.clone(), key, ticket, answer })
    }

    /// What is counted now.
    pub(crate) fn counts(&self) -> PermitCounts {
        self.lock().permits.counts()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The machine is consistent between any two calls: a panic elsewhere spoils nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something, tells callers what was decided, and wakes the task if the store is to be told or something is due earlier.
    fn act<T>(self: &Arc<Self>, does: impl FnOnce(&mut State, Timestamp) -> T) -> T {
        let mut decided: SmallVec<[_; 2]> = SmallVec::new();
        let (done, is_due, is_empty) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let done = does(state, self.time.now());
            while let Some(output) = state.permits.poll_output() {
                match output {
                    PermitOutput::Send { key, message } => state.sends.push_back((key, message)),
                    PermitOutput::Outage(change) => state.changes.push(change),
                    PermitOutput::HandedOver { id, outcome } => {
                        if let Some(done) = state.handing_over.remove(&id) {
                            let _ = done.send(outcome);
                        }
                    }
                    PermitOutput::Decided { ticket, key, cost, outcome } => {
                        let answer = outcome.map(|()| self.held(key, cost));
                        decided.push((state.callers.remove(&ticket), answer));
                    }
                }
            }
            if state.has_ended {
                state.callers.clear();
                state.handing_over.clear();
            }
            let is_due = state.permits.poll_timeout() < state.wake_at;
            let is_due = is_due || !state.sends.is_empty() || !state.changes.is_empty();
            (done, is_due, state.permits.is_empty())
        };
        if is_due {
            self.wake.notify_one();
        }
        if is_empty {
            self.rested.notify_waiters();
        }
        // Without the lock: permits that nobody takes are dropped here, and go back.
        for (caller, answer) in decided {
            match caller {
                Some(caller) => drop(caller.send(answer)),
                None => drop(answer),
            }
        }
        done
    }

    fn held(self: &Arc<Self>, key: PermitKey, cost: u32) -> HeldPermit {
        HeldPermit { keys: self.clone(), key, cost }
    }
}

/// How a message ended; by a panic in a user's callback, say.
type Ended = Result<(Id, Result<PermitReply, StoreError>), JoinError>;

/// Hears every event.
type Tell = Arc<dyn Fn(&Event) + Send + Sync>;

/// The task's part: it sends messages and minds the time.
pub(super) struct PermitTask {
    pub(super) permits: Arc<PermitLimits>,
    pub(super) time: TimeSource,
    pub(super) store: Option<Arc<dyn Store>>,
    pub(super) instance: InstanceId,
    pub(super) listeners: Vec<Tell>,
    pub(super) calls: JoinSet<Result<PermitReply, StoreError>>,
    /// The limit, the key and the message's number of each.
    pub(super) places: HashMap<Id, (usize, PermitKey, u64)>,
    pub(super) tell_at: Timestamp,
}

impl Drop for PermitTask {
    fn drop(&mut self) {
        for limit in &self.permits.limits {
            limit.act(|state, _| state.has_ended = true);
        }
        self.permits.rested.notify_waiters();
    }
}

impl PermitTask {
    /// Runs for ever. It may be cancelled and run again.
    pub(super) async fn run(&mut self) {
        let (permits, time) = (self.permits.clone(), self.time.clone());
        if permits.limits.is_empty() {
            return std::future::pending().await;
        }
        loop {
            let wake_at = self.step();
            tokio::select! {
                () = time.sleep_until(wake_at) => {}
                () = permits.wake.notified() => {}
                Some(ended) = self.calls.join_next_with_id() => self.ended(ended),
            }
        }
    }

    /// Tells the store what was given back last: nobody holds or waits for anything any more.
    pub(super) async fn end(&mut self) {
        self.tell();
        let Some(store) = self.store.clone() else { return };
        let (permits, time) = (self.permits.clone(), self.time.clone());
        let until = time.now().plus_micros(micros(store.timeout()));
        tokio::select! {
            () = time.sleep_until(until) => {}
            () = permits.emptied() => {}
            () = self.run() => {}
        }
    }

    /// Does what is due, and returns when something is again.
    fn step(&mut self) -> Timestamp {
        let permits = self.permits.clone();
        let mut wake_at = self.tell_at;
        for (index, limit) in permits.limits.iter().enumerate() {
            limit.act(|state, now| state.permits.tick(now));
            let changes = std::mem::take(&mut limit.lock().changes);
            for change in changes {
                self.publish_outage(limit, change);
            }
            while self.calls.len() < CALLS_MAX
                && let Some((key, message)) = limit.next_send()
            {
                self.send(index, limit, key, message);
            }
            let mut state = limit.lock();
            // From now on it is woken for what is due before that.
            state.wake_at = state.permits.poll_timeout().min(self.tell_at);
            wake_at = wake_at.min(state.wake_at);
        }
        let now = self.time.now();
        if now >= self.tell_at {
            self.tell_at = now.plus_micros(TELL_US);
            self.tell();
        }
        permits.rested.notify_waiters();
        wake_at
    }

    fn send(&mut self, index: usize, limit: &PermitKeys, key: PermitKey, message: PermitMessage) {
        // Without a store no limit is shared, and nothing is ever sent.
        let Some(store) = self.store.clone() else { return };
        let (instance, time, sequence) = (self.instance, self.time.clone(), message.sequence);
        let request =
            PermitRequest { limit: limit.terms.name.clone(), key: key.clone(), instance, message };
        let longest_us = limit.terms.max_wait_us.max(micros(store.timeout())).min(CALL_MAX_US);
        let until = time.now().plus_micros(longest_us);
        let call = self.calls.spawn(async move {
            tokio::select! {
                biased;
                reply = store.permits(request) => reply,
                () = time.sleep_until(until) => {
                    Err(StoreError::TimedOut(Duration::from_micros(longest_us)))
                }
            }
        });
        self.places.insert(call.id(), (index, key, sequence));
    }

    fn ended(&mut self, ended: Ended) {
        let (call, result) = match ended {
            Ok(ended) => ended,
            Err(error) => (error.id(), Err(StoreError::Unreachable(error.to_string()))),
        };
        let Some((index, key, sequence)) = self.places.remove(&call) else { return };
        if let Some(limit) = self.permits.limits.get(index) {
            limit.act(|state, now| state.permits.answered(&key, sequence, result, now));
        }
    }

    fn tell(&self) {
        for limit in &self.permits.limits {
            let PermitCounts { in_use, waiting, denied } = limit.lock().permits.take_counts();
            let limit = limit.terms.name.clone();
            self.publish(&Event::Permits { limit, in_use, waiting, denied });
        }
    }

    fn publish_outage(&self, limit: &PermitKeys, change: OutageChange) {
        let PermitTerms { name, outage, nodes, .. } = &limit.terms;
        self.publish(&outage_event(name, *outage, (*nodes).into(), change));
    }

    fn publish(&self, event: &Event) {
        self.listeners.iter().for_each(|listener| listener(event));
    }
}

impl PermitKeys {
    fn next_send(&self) -> Option<(PermitKey, PermitMessage)> {
        self.lock().sends.pop_front()
    }
}
