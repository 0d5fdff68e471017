//! The tokio loop between engine and store: it moves messages and arms timers, and decides nothing.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use thread_local::ThreadLocal;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::bound::Excess;
use crate::bucket::{
    BucketRef, Evictable, KeyBudget, KeyHasher, LeaseBucket, LimitCounts, LocalBucket, MAX_QUEUED,
    Notification, NotificationQueue, Table,
};
use crate::error::{ConfigError, StoreError};
use crate::limit::{Credit, LimitInfo, Mode, Terms};
use crate::quota::Quota;
use crate::store::Store;
use crate::sync::message::{Reply, Request};
use crate::sync::{Engine, Event, Input, Output, Touch, Waiter};
use crate::time::{Clock, Timestamp, micros};

pub(crate) mod clock;
mod counter;
mod evictor;
pub(crate) mod log;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod manual;

use clock::TimeSource;
use evictor::Evictor;

/// How often decisions are told to the listeners, and room is looked for.
const FLUSH_US: u64 = 1_000_000;
/// For so many threads counters of local decisions are allocated when a limit is built.
const THREADS: usize = 64;

/// Hears every event.
pub(crate) type Listener = Arc<dyn Fn(&Event) + Send + Sync>;

/// What somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// That the store can be relied on.
    Ready,
    /// That everything is reported and given back.
    Leave,
    /// That everything that is due has been done.
    #[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "for tests"))]
    Settle,
}

/// What the limiter asks of its driver; answered with whether it came true in time.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) wish: Wish,
    pub(crate) within: Duration,
    pub(crate) done: oneshot::Sender<bool>,
}

/// A key whose bucket is pinned: its place is not given to another key.
pub(crate) struct PinnedKey {
    pub(crate) limit: Arc<LimitState>,
    pub(crate) place: u32,
    pub(crate) key: Arc<[u8]>,
}

impl Drop for PinnedKey {
    fn drop(&mut self) {
        match &self.limit.buckets {
            Buckets::Leased(table) => table.unpin(self.place),
            Buckets::Local(local) => local.table.unpin(self.place),
        }
    }
}

/// The key may be secret.
impl fmt::Debug for PinnedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedKey").field("place", &self.place).finish_non_exhaustive()
    }
}

/// A caller who waits for the store's word, and where to tell it.
#[derive(Debug)]
pub(crate) struct StoreQuery {
    pub(crate) key: Arc<PinnedKey>,
    pub(crate) cost: u32,
    pub(crate) within_us: u64,
    pub(crate) done: oneshot::Sender<StoreAnswer>,
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreAnswer {
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
}

/// Callers who wait, by ticket.
#[derive(Debug, Default)]
struct OpenQueries {
    last_ticket: u64,
    open: HashMap<u64, oneshot::Sender<StoreAnswer>>,
}

/// The data plane of one limit, as limiter and driver share it.
pub(crate) struct LimitState {
    /// The limit's place among the limiter's limits.
    pub(crate) index: u32,
    pub(crate) name: Arc<str>,
    pub(crate) info: &'static LimitInfo,
    pub(crate) terms: Terms,
    /// What decisions read the time from.
    pub(crate) clock: Clock,
    pub(crate) buckets: Buckets,
    /// What a node may spend on a new key before the store answers, in tokens; publishes nothing else.
    first_credit: AtomicU32,
    /// As it was told last.
    excess: Mutex<Excess>,
}

/// The buckets of a limit, by its mode.
#[allow(clippy::large_enum_variant, reason = "there is one for each limit")]
pub(crate) enum Buckets {
    Leased(Arc<Table<LeaseBucket>>),
    Local(LocalBuckets),
}

/// The buckets of a limit that this node keeps alone, and its decisions.
#[derive(Debug)]
pub(crate) struct LocalBuckets {
    pub(crate) table: Table<LocalBucket>,
    decided: ThreadLocal<CachePadded<ThreadDecisions>>,
    /// What was taken of all threads' decisions.
    taken: ThreadDecisions,
}

/// Decisions of one thread. Only that thread writes them, so that no decision waits for another thread's cache line.
#[derive(Debug, Default)]
struct ThreadDecisions {
    allowed: AtomicU64,
    denied: AtomicU64,
}

impl LocalBuckets {
    fn new(table: Table<LocalBucket>) -> Self {
        Self {
            table,
            decided: ThreadLocal::with_capacity(THREADS),
            taken: ThreadDecisions::default(),
        }
    }

    /// Counts a decision.
    #[inline(always)]
    pub(crate) fn count(&self, is_allowed: bool) {
        let decided = self.decided.get_or_default();
        let count = if is_allowed { &decided.allowed } else { &decided.denied };
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Decisions since the last time. One thread calls this.
    fn take_counts(&self) -> LimitCounts {
        let sum = |of: fn(&ThreadDecisions) -> &AtomicU64| -> u64 {
            self.decided.iter().map(|one| of(one).load(Ordering::Relaxed)).sum()
        };
        let (allowed, denied) = (sum(|one| &one.allowed), sum(|one| &one.denied));
        LimitCounts {
            allowed: allowed - self.taken.allowed.swap(allowed, Ordering::Relaxed),
            denied: denied - self.taken.denied.swap(denied, Ordering::Relaxed),
            ..self.table.take_counts()
        }
    }
}

impl fmt::Debug for LimitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitState").field("name", &self.name).finish_non_exhaustive()
    }
}

impl LimitState {
    /// `None` if there is no memory for so many keys.
    pub(crate) fn new(
        index: u32,
        name: Arc<str>,
        quota: Quota,
        terms: Terms,
        hasher: KeyHasher,
        budget: &Arc<KeyBudget>,
        time: &TimeSource,
    ) -> Option<Self> {
        let (budget, credit) = (budget.clone(), terms.credit.first);
        let buckets = if terms.mode == Mode::Local {
            let table = Table::new(index, hasher, budget, ())?;
            Buckets::Local(LocalBuckets::new(table))
        } else {
            Buckets::Leased(Arc::new(Table::new(index, hasher, budget, credit)?))
        };
        let first_credit = AtomicU32::new(credit);
        let (clock, excess) = (time.cached(), Mutex::default());
        let info = LimitInfo::intern(&name, terms.scale, quota);
        Some(Self { index, name, info, terms, clock, buckets, first_credit, excess })
    }

    /// What may be spent on a key that is new or full before the store answers, in tokens.
    pub(crate) fn first_credit(&self) -> u32 {
        self.first_credit.load(Ordering::Relaxed)
    }

    fn set_credit(&self, credit: Credit) {
        self.first_credit.store(credit.first, Ordering::Relaxed);
        if let Buckets::Leased(table) = &self.buckets {
            table.set_credit_at_rest(credit.known);
        }
    }

    /// How many 64ths of what the limit could hold now are free.
    fn free_64ths(&self) -> usize {
        match &self.buckets {
            Buckets::Leased(table) => table.free_64ths(),
            Buckets::Local(local) => local.table.free_64ths(),
        }
    }

    /// Evicts keys among the next `places`. Returns how many.
    fn evict(&self, places: u32, now: Timestamp, what: Evictable) -> usize {
        let scale = &self.terms.scale;
        match &self.buckets {
            Buckets::Leased(table) => table.evict(places, now, scale, what),
            Buckets::Local(local) => local.table.evict(places, now, scale, what),
        }
    }

    /// Forgets marks of keys that must be full by now. Local keys have none.
    fn forget_marks(&self, now: Timestamp) {
        if let Buckets::Leased(table) = &self.buckets {
            table.forget_marks(now, &self.terms.scale);
        }
    }

    /// Decisions since the last time that no bucket counts.
    fn take_counts(&self) -> LimitCounts {
        match &self.buckets {
            Buckets::Leased(table) => table.take_counts(),
            Buckets::Local(local) => local.take_counts(),
        }
    }

    pub(crate) fn excess(&self) -> Excess {
        *self.excess.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_excess(&self, excess: Excess) {
        *self.excess.lock().unwrap_or_else(PoisonError::into_inner) = excess;
    }
}

/// A notification as the engine takes it in. `None` if the key has been evicted meanwhile; the calling thread is the
/// one that evicts.
pub(crate) fn touched(table: &Arc<Table<LeaseBucket>>, note: &Notification) -> Option<Input> {
    let bucket = BucketRef::new(table, note.place);
    if bucket.is_retired() {
        return None;
    }
    let key = note.news.is_new.then(|| bucket.key());
    let (overflowed, denied_cost) = (note.news.overflowed, note.news.refused);
    let touch = Touch { key, at: note.at, overflowed, denied_cost };
    Some(Input::Touched { bucket, touch })
}

/// Everything the loop owns.
pub(crate) struct Driver {
    pub(crate) engine: Engine,
    pub(crate) store: Option<Arc<dyn Store>>,
    pub(crate) notifications: Arc<NotificationQueue>,
    pub(crate) limits: Arc<[Arc<LimitState>]>,
    pub(crate) budget: Arc<KeyBudget>,
    pub(crate) clock: Clock,
    pub(crate) time: TimeSource,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) queries: mpsc::UnboundedReceiver<StoreQuery>,
    pub(crate) listeners: Vec<Listener>,
    /// The store's last error, for those who wait for it.
    pub(crate) last_error: Arc<Mutex<Option<StoreError>>>,
}

/// An exchange that came to an end.
struct Answer {
    lane: u32,
    attempt: u64,
    result: Result<Reply, StoreError>,
}

/// What is under way with the store.
#[derive(Default)]
struct Exchanges {
    tasks: JoinSet<Result<Reply, StoreError>>,
    /// Lane and attempt of each task.
    places: HashMap<tokio::task::Id, (u32, u64)>,
}

impl Exchanges {
    fn begin(&mut self, lane: u32, attempt: u64, store: Arc<dyn Store>, request: Arc<Request>) {
        let task = self.tasks.spawn(async move { store.exchange(request).await });
        self.places.insert(task.id(), (lane, attempt));
    }

    /// How an exchange ended. One that panicked (in a user's callback, say) has an unknown outcome
    /// like any other that failed.
    fn outcome(
        &mut self,
        done: Result<(tokio::task::Id, Result<Reply, StoreError>), tokio::task::JoinError>,
    ) -> Option<Answer> {
        let (id, result) = match done {
            Ok(done) => done,
            Err(error) => (error.id(), Err(StoreError::Unreachable(error.to_string()))),
        };
        let (lane, attempt) = self.places.remove(&id)?;
        Some(Answer { lane, attempt, result })
    }
}

/// Somebody who waits for the driver.
struct Wisher {
    wish: Wish,
    deadline: Timestamp,
    done: oneshot::Sender<bool>,
}

impl Driver {
    /// Runs until every handle to the limiter is gone.
    pub(crate) async fn run(mut self) {
        let mut exchanges = Exchanges::default();
        let mut asked = OpenQueries::default();
        let mut waiting: Vec<Wisher> = Vec::new();
        let mut flush_at = self.now().plus_micros(FLUSH_US);
        let mut evictor = Evictor::new();
        let (mut ran, mut held_up_us) = (self.now(), [0; 2]);
        self.engine.handle(self.now(), Input::Timeout);
        loop {
            let now = self.now();
            held_up_us[0] = now.micros_since(std::mem::replace(&mut ran, now)).max(held_up_us[0]);
            let more = self.drain_notifications(now);
            if now >= flush_at {
                flush_at = now.plus_micros(FLUSH_US);
                // The ticker may tell a little later than this loop went on.
                self.take_stall(held_up_us[0].max(held_up_us[1]));
                held_up_us = [0, held_up_us[0]];
                self.flush();
            }
            let keys = evictor.look(&self.limits, self.budget.max(), self.now());
            if keys > 0 {
                self.publish(&Event::Evicted { keys });
            }
            if now >= self.engine.poll_timeout() {
                self.engine.handle(now, Input::Timeout);
                self.note_error();
            }
            self.drain_outputs(&mut exchanges, &mut asked);
            self.tell(&mut waiting, now, exchanges.tasks.is_empty());
            let deadline = waiting.iter().map(|waiter| waiter.deadline).min();
            let wake_at = self.engine.poll_timeout().min(flush_at).min(evictor.wake_at());
            let wake_at = wake_at.min(deadline.unwrap_or(Timestamp::NEVER));
            let wake_at = if more { now } else { wake_at };
            tokio::select! {
                () = self.time.sleep_until(wake_at) => {}
                () = self.notifications.woken() => {}
                Some(done) = exchanges.tasks.join_next_with_id() => {
                    if let Some(answer) = exchanges.outcome(done) {
                        self.answered(answer);
                    }
                }
                Some(question) = self.queries.recv() => self.ask(Some(question), &mut asked),
                command = self.commands.recv() => match command {
                    Some(command) => {
                        // Who asked before is part of what a command is about.
                        self.ask(None, &mut asked);
                        waiting.push(self.take_on(command));
                    }
                    None => return,
                },
            }
        }
    }

    /// Runs on a thread of its own, where there is no runtime.
    #[allow(clippy::disallowed_methods, reason = "the driver's own thread")]
    pub(crate) fn run_on_own_thread(self) -> Result<(), ConfigError> {
        let failed = |error: std::io::Error| ConfigError::Thread(error.to_string());
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        std::thread::Builder::new()
            .name("tidegate-sync".to_owned())
            .spawn(move || runtime.block_on(self.run()))
            .map_err(failed)?;
        Ok(())
    }

    fn now(&self) -> Timestamp {
        let now = self.time.now();
        self.clock.set(now);
        now
    }

    fn answered(&mut self, Answer { lane, attempt, result }: Answer) {
        let now = self.now();
        // What was spent must be known before what is lost is reckoned.
        self.drain_notifications(now);
        self.engine.handle(now, Input::Answer { lane, attempt, result });
        self.note_error();
    }

    /// Keeps the store's last error for those who wait for it.
    fn note_error(&self) {
        let error = self.engine.error().cloned();
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    /// Hands what decisions told to the engine. Decisions may tell faster than this listens: says
    /// whether something may be left for the next round.
    fn drain_notifications(&mut self, now: Timestamp) -> bool {
        for _ in 0..MAX_QUEUED {
            let Some(note) = self.notifications.pop() else { return false };
            if let Buckets::Leased(table) = &self.limits[note.limit as usize].buckets
                && let Some(touched) = touched(table, &note)
            {
                self.engine.handle(now, touched);
            }
        }
        true
    }

    /// Hands a caller who waits to the engine, and all who came meanwhile: they join one batch.
    /// Nothing is asked for those who have gone away.
    fn ask(&mut self, first: Option<StoreQuery>, asked: &mut OpenQueries) {
        let now = self.now();
        let mut next = first.or_else(|| self.queries.try_recv().ok());
        while let Some(StoreQuery { key, cost, within_us, done }) = next {
            next = self.queries.try_recv().ok();
            if done.is_closed() {
                continue;
            }
            asked.last_ticket += 1;
            let ticket = asked.last_ticket;
            asked.open.insert(ticket, done);
            let deadline = now.plus_micros(within_us);
            let waiter = Waiter { ticket, cost, deadline };
            if let Buckets::Leased(table) = &key.limit.buckets {
                let (bucket, key) = (BucketRef::new(table, key.place), key.key.clone());
                self.engine.handle(now, Input::Wait { bucket, key, waiter });
            }
        }
    }

    fn drain_outputs(&mut self, exchanges: &mut Exchanges, asked: &mut OpenQueries) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Event(event) => self.publish(&event),
                Output::Decided { ticket, allowed, sure } => {
                    if let Some(done) = asked.open.remove(&ticket) {
                        // Whoever gave up waiting has dropped the other end.
                        let _ = done.send(StoreAnswer { allowed, sure });
                    }
                }
                Output::Credit { limit, credit } => self.limits[limit as usize].set_credit(credit),
                Output::Send { lane, attempt, request } => {
                    // Without a store there are no hybrid limits, and nothing is ever sent.
                    let Some(store) = self.store.clone() else { continue };
                    exchanges.begin(lane, attempt, store, request);
                }
            }
        }
    }

    fn take_on(&mut self, Command { wish, within, done }: Command) -> Wisher {
        let now = self.now();
        if wish == Wish::Leave {
            self.drain_notifications(now);
            self.engine.handle(now, Input::Leave);
        }
        Wisher { wish, deadline: now.plus_micros(micros(within)), done }
    }

    /// Answers those whose wait is over.
    fn tell(&mut self, waiting: &mut Vec<Wisher>, now: Timestamp, idle: bool) {
        let alone = self.store.is_none();
        let ready = alone || self.engine.is_ready(now);
        let left = alone || self.engine.is_settled();
        let settled = idle && self.engine.poll_timeout() > now;
        let fulfilled = |waiter: &Wisher| match waiter.wish {
            Wish::Ready => ready,
            Wish::Leave => left,
            Wish::Settle => settled,
        };
        let over = |waiter: &mut Wisher| fulfilled(waiter) || waiter.deadline <= now;
        for waiter in waiting.extract_if(.., over).collect::<Vec<_>>() {
            let fulfilled = fulfilled(&waiter);
            if waiter.wish == Wish::Leave {
                self.flush();
            }
            // Whoever gave up waiting has dropped the other end.
            let _ = waiter.done.send(fulfilled);
        }
    }

    /// Tells of a stall of the cached clock; this loop did nothing for `held_up_us` at the longest of late.
    fn take_stall(&mut self, held_up_us: u64) {
        let stall = self.time.take_stall();
        if stall > Duration::ZERO {
            self.engine.clock_stalled(micros(stall), held_up_us);
            self.publish(&Event::ClockStalled { stall });
        }
    }

    fn flush(&mut self) {
        for limit in self.limits.iter() {
            self.engine.counted(limit.index, limit.take_counts());
        }
        for event in self.engine.take_decisions(self.time.now()) {
            self.publish(&event);
        }
        for event in self.engine.take_policy_changes(self.time.now()) {
            self.publish(&event);
        }
        let gauges = self.engine.gauges();
        self.publish(&Event::State {
            keys: self.budget.used(),
            pending: gauges.pending,
            leased_depth: gauges.leased_depth,
            nodes: gauges.nodes,
            lanes_down: gauges.lanes_down,
        });
        for (index, excess) in self.engine.excess().into_iter().enumerate() {
            let limit = &self.limits[index];
            limit.set_excess(excess);
            self.publish(&Event::Excess { limit: limit.name.clone(), excess });
        }
    }

    fn publish(&self, event: &Event) {
        self.listeners.iter().for_each(|listener| listener(event));
    }
}
