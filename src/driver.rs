//! The tokio loop between engine and store: it moves messages and arms timers, and decides nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::bucket::{
    BucketRef, KeyBudget, LeaseBucket, MAX_QUEUED, Notification, NotificationQueue, Table,
};
use crate::error::{ConfigError, StoreError};
use crate::overrides::Switch;
use crate::store::Store;
use crate::sync::message::{InstanceId, Reply, Request};
use crate::sync::{
    Engine, Event, Input, Output, ResetOutcome, ResetWaiter, Settlement, Touch, Waiter,
};
use crate::time::{Clock, Timestamp, micros};

pub(crate) mod clock;
mod counter;
mod definition;
mod evictor;
mod exact;
mod limit_state;
mod limits;
mod log;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod manual;
mod override_sync;
mod overrides;
mod permits;
pub(crate) mod plan_resolver;
#[cfg(feature = "server")]
mod records;
mod reset_counts;
mod resolved_plans;
pub(crate) mod setup;
mod slot_keys;
mod store_decisions;
mod updates;

use clock::TimeSource;
pub(crate) use definition::{Definition, LimitParts};
use evictor::Evictor;
use exact::ExactCalls;
pub(crate) use exact::{ExactAnswer, ExactQuery};
pub(crate) use limit_state::{AloneBuckets, Buckets, LimitState, LocalBuckets, PinnedKey};
pub(crate) use limits::Limits;
pub(crate) use override_sync::OverrideQuery;
use override_sync::OverrideSync;
pub(crate) use overrides::{Blocked, HeldRuling, InForce};
#[cfg(feature = "server")]
pub(crate) use permits::PendingHandOver;
use permits::PermitTask;
pub(crate) use permits::{HeldPermit, PermitKeys, PermitLimits};
use plan_resolver::ResolverTask;
#[cfg(feature = "server")]
pub(crate) use records::{RecordQuery, random_bytes};
pub(crate) use slot_keys::{AskedStore, SlotContext, SlotKey, SlotKeys, SlotRequest};
pub(crate) use updates::Updated;

/// How often decisions are told to the listeners, and room is looked for.
const FLUSH_US: u64 = 1_000_000;

/// Hears every event.
pub(crate) type Listener = Arc<dyn Fn(&Event) + Send + Sync>;

/// What somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// That the store can be relied on.
    Ready,
    /// That everything is reported and given back.
    Leave,
    /// That the time has passed within which it is asked.
    Time,
    /// That everything that is due has been done.
    #[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "for tests"))]
    Settle,
}

/// What the limiter asks of its driver; answered with whether it came true in time.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) wish: Wish,
    pub(crate) deadline: Timestamp,
    pub(crate) done: oneshot::Sender<bool>,
}

/// A caller who waits for the store's word, and where to tell it.
#[derive(Debug)]
pub(crate) struct StoreQuery {
    pub(crate) key: Arc<PinnedKey>,
    pub(crate) cost: u32,
    pub(crate) within_us: u64,
    pub(crate) done: oneshot::Sender<StoreAnswer>,
}

/// What is settled of a request that was decided at `decided`.
#[derive(Debug)]
pub(crate) struct SettledRequest {
    pub(crate) key: Arc<PinnedKey>,
    pub(crate) settlement: Settlement,
    pub(crate) decided: Timestamp,
}

/// A key that the store is to reset, and where to tell the outcome.
#[derive(Debug)]
pub(crate) struct ResetQuery {
    pub(crate) key: Arc<PinnedKey>,
    pub(crate) within_us: u64,
    pub(crate) done: oneshot::Sender<ResetOutcome>,
}

/// A question to the store, or what it is to be told.
#[derive(Debug)]
pub(crate) enum Query {
    Sure(StoreQuery),
    Settled(SettledRequest),
    Exact(ExactQuery),
    Override(OverrideQuery),
    Reset(ResetQuery),
    Updated(Updated),
    #[cfg(feature = "server")]
    Record(RecordQuery),
    /// So many tokens of a limit were not given back.
    NotGivenBack {
        limit: u32,
        tokens: u32,
    },
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreAnswer {
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
}

/// Callers who wait: for leases and for resets of keys, by ticket; and for decisions of the store.
#[derive(Debug, Default)]
struct OpenQueries {
    last_ticket: u64,
    open: HashMap<u64, oneshot::Sender<StoreAnswer>>,
    resets: HashMap<u64, oneshot::Sender<ResetOutcome>>,
    exact: ExactCalls,
    #[cfg(feature = "server")]
    records: records::RecordCalls,
}

/// A notification as the engine takes it in. `None` if the key has been evicted meanwhile; the calling thread is the
/// one that evicts.
pub(crate) fn touched(table: &Arc<Table<LeaseBucket>>, note: &Notification) -> Option<Input> {
    let bucket = BucketRef::new(table, note.place);
    if bucket.is_retired() {
        return None;
    }
    let key = note.news.is_new.then(|| bucket.key());
    let (spilled, denied_cost) = (note.news.spilled, note.news.refused);
    let touch = Touch { key, at: note.at, spilled, denied_cost };
    Some(Input::Touched { bucket, touch })
}

/// Why the store gives nothing, or less than it has.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreTrouble {
    /// Its last error.
    pub(crate) error: Option<StoreError>,
    /// A lane answers, and waits for what its nodes know.
    pub(crate) is_recovering: bool,
}

/// What a limiter and its driver share.
pub(crate) struct NodeState {
    pub(crate) limits: Limits,
    pub(crate) permits: Arc<PermitLimits>,
    pub(crate) budget: Arc<KeyBudget>,
    pub(crate) notifications: NotificationQueue,
    /// For those who wait for the store.
    pub(crate) store_trouble: Mutex<StoreTrouble>,
    /// Keeps the cached clock running for as long as decisions are taken.
    pub(crate) time: TimeSource,
}

impl NodeState {
    /// What keeps the store from giving, if it did not give all within this time.
    pub(crate) fn why_not_ready(&self, within: Duration) -> StoreError {
        let trouble = self.store_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let recovering = trouble.is_recovering.then_some(StoreError::Recovering);
        trouble.error.or(recovering).unwrap_or(StoreError::TimedOut(within))
    }
}

#[cfg(any(test, feature = "testing"))]
impl NodeState {
    /// Waits until nothing of permits and of plan resolvers is under way.
    pub(crate) async fn settled(&self) {
        self.permits.settled().await;
        for plans in self.limits.all().filter_map(|limit| limit.resolved_plans()) {
            plans.settled().await;
        }
    }
}

/// Everything the loop owns.
pub(crate) struct Driver {
    pub(crate) engine: Engine,
    pub(crate) store: Option<Arc<dyn Store>>,
    pub(crate) node: Arc<NodeState>,
    pub(crate) instance: InstanceId,
    pub(crate) clock: Clock,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) queries: mpsc::UnboundedReceiver<Query>,
    pub(crate) listeners: Vec<Listener>,
    overrides: OverrideSync,
    resolvers: Vec<ResolverTask>,
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

impl Driver {
    /// Runs until every handle to the limiter is gone.
    pub(crate) fn run(mut self) -> impl Future<Output = ()> + Send {
        // Made here, so that callers hear of it too if the runtime ends before this runs.
        let mut permits = PermitTask {
            permits: self.node.permits.clone(),
            time: self.node.time.clone(),
            store: self.store.clone(),
            instance: self.instance,
            listeners: self.listeners.clone(),
            calls: JoinSet::new(),
            places: HashMap::new(),
            tell_at: self.node.time.now().plus_micros(FLUSH_US),
        };
        async move {
            // They end with this.
            let mut resolvers = JoinSet::new();
            for resolver in std::mem::take(&mut self.resolvers) {
                let Some(limit) = self.node.limits.get(resolver.limit as u32).cloned() else {
                    continue;
                };
                let (time, listeners) = (self.node.time.clone(), self.listeners.clone());
                resolvers.spawn(resolver.run(limit, time, listeners));
            }
            tokio::select! {
                () = permits.run() => {}
                () = self.run_limits() => {}
            }
            permits.end().await;
        }
    }

    async fn run_limits(mut self) {
        let mut exchanges = Exchanges::default();
        let mut asked = OpenQueries::default();
        let mut waiting: Vec<Command> = Vec::new();
        let mut flush_at = self.now().plus_micros(FLUSH_US);
        let mut evictor = Evictor::new();
        let (mut ran, mut held_up_us) = (self.now(), [0; 2]);
        let mut stalls = self.node.time.stalls();
        self.engine.handle(self.now(), Input::Timeout);
        loop {
            let now = self.now();
            held_up_us[0] = now.micros_since(std::mem::replace(&mut ran, now)).max(held_up_us[0]);
            let more = self.drain_notifications(now);
            if now >= flush_at {
                flush_at = now.plus_micros(FLUSH_US);
                // The ticker may tell a little later than this loop went on.
                self.tell_stalls(&mut stalls, held_up_us[0].max(held_up_us[1]));
                held_up_us = [0, held_up_us[0]];
                self.flush();
            }
            let keys = evictor.look(&self.node.limits, self.node.budget.max(), self.now());
            if keys > 0 {
                self.publish(&Event::Evicted { keys });
            }
            self.advance(now);
            self.drain_outputs(&mut exchanges, &mut asked);
            self.tell(&mut waiting, now, exchanges.tasks.is_empty(), &asked.exact);
            let deadlines = waiting.iter().map(|waiter| waiter.deadline);
            let due_at = deadlines.chain([self.due_at(), flush_at, evictor.wake_at()]).min();
            let wake_at = due_at.filter(|_| !more).unwrap_or(now);
            tokio::select! {
                () = self.node.time.sleep_until(wake_at) => {}
                () = self.node.notifications.woken() => {}
                Some(done) = exchanges.tasks.join_next_with_id() => {
                    exchanges.outcome(done).into_iter().for_each(|answer| self.answered(answer));
                }
                Some(outcome) = asked.exact.next() => self.decided(outcome, &mut asked.exact),
                Some(outcome) = self.overrides.next() => self.overridden(outcome),
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

    /// The limit of a number that the engine, a notification or a caller holds.
    fn limit(&self, index: u32) -> &Arc<LimitState> {
        // They hold numbers of limits that were added before, and no place is ever emptied.
        self.node.limits.get(index).expect("a number that was given is a limit's")
    }

    fn now(&self) -> Timestamp {
        let now = self.node.time.now();
        self.clock.set(now);
        now
    }

    fn answered(&mut self, Answer { lane, attempt, result }: Answer) {
        let now = self.now();
        // What was spent must be known before what is lost is reckoned.
        self.drain_notifications(now);
        self.engine.handle(now, Input::Answer { lane, attempt, result });
        self.note_trouble();
    }

    /// Keeps what keeps the store from giving, for those who wait for it.
    fn note_trouble(&self) {
        let error = self.engine.error().cloned();
        let is_recovering = self.engine.is_recovering(self.node.time.now());
        let trouble = &self.node.store_trouble;
        *trouble.lock().unwrap_or_else(PoisonError::into_inner) =
            StoreTrouble { error, is_recovering };
    }

    /// Hands what decisions told to the engine. Decisions may tell faster than this listens: says
    /// whether something may be left for the next round.
    fn drain_notifications(&mut self, now: Timestamp) -> bool {
        for _ in 0..MAX_QUEUED {
            let Some(note) = self.node.notifications.pop() else { return false };
            self.adopt_limits(now);
            if let Buckets::Leased(table) = &self.limit(note.limit).buckets
                && let Some(touched) = touched(table, &note)
            {
                self.engine.handle(now, touched);
            }
        }
        true
    }

    /// Hands a caller who waits to the engine, and all who came meanwhile: they join one batch.
    /// Nothing is asked for those who have gone away.
    fn ask(&mut self, first: Option<Query>, asked: &mut OpenQueries) {
        let now = self.now();
        let mut next = first.or_else(|| self.queries.try_recv().ok());
        while let Some(query) = next {
            next = self.queries.try_recv().ok();
            self.adopt_limits(now);
            let StoreQuery { key, cost, within_us, done } = match query {
                Query::Sure(query) => query,
                Query::Settled(settled) => {
                    self.settle(&settled, now);
                    continue;
                }
                Query::Override(query) => {
                    self.overrides.set(query);
                    continue;
                }
                Query::Reset(query) => {
                    self.reset(query, asked);
                    continue;
                }
                Query::Updated(updated) => {
                    self.updated(updated, now);
                    continue;
                }
                Query::Exact(query) => {
                    self.ask_exact(query, &mut asked.exact);
                    continue;
                }
                #[cfg(feature = "server")]
                Query::Record(query) => {
                    asked.records.begin(query, self.store.as_ref());
                    continue;
                }
                Query::NotGivenBack { limit, tokens } => {
                    self.publish_not_given_back(limit, tokens);
                    continue;
                }
            };
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

    fn ask_exact(&self, query: ExactQuery, calls: &mut ExactCalls) {
        let (limit, returns) = (query.limit, query.request.returns());
        let Some(store) = &self.store else { return };
        if let Err(change) = calls.begin(query, store, &self.node.time) {
            if let Some(change) = change {
                self.publish_outage(limit, change, calls);
            }
            self.publish_not_given_back(limit, returns);
        }
    }

    fn settle(&mut self, settled: &SettledRequest, now: Timestamp) {
        let SettledRequest { key, settlement, decided } = settled;
        if let Buckets::Leased(table) = &key.limit.buckets {
            let (bucket, key) = (BucketRef::new(table, key.place), key.key.clone());
            let (settlement, decided) = (*settlement, *decided);
            self.engine.handle(now, Input::Settle { bucket, key, settlement, decided });
        }
    }

    /// Hands a caller who resets a key to the engine.
    fn reset(&mut self, query: ResetQuery, asked: &mut OpenQueries) {
        let (ResetQuery { key, within_us, done }, now) = (query, self.now());
        if let Buckets::Leased(table) = &key.limit.buckets
            && !done.is_closed()
        {
            // What was spent before is to be forgotten too.
            self.drain_notifications(now);
            asked.last_ticket += 1;
            let ticket = asked.last_ticket;
            asked.resets.insert(ticket, done);
            let waiter = ResetWaiter { ticket, deadline: now.plus_micros(within_us) };
            let (bucket, key) = (BucketRef::new(table, key.place), key.key.clone());
            self.engine.handle(now, Input::Reset { bucket, key, waiter });
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
                Output::Reset { ticket, outcome } => {
                    if let Some(done) = asked.resets.remove(&ticket) {
                        let _ = done.send(outcome);
                    }
                }
                Output::Credit { limit, credit } => {
                    self.limit(limit).set_credit(credit);
                }
                Output::Send { lane, attempt, request } => {
                    // Without a store there are no hybrid limits, and nothing is ever sent.
                    let Some(store) = self.store.clone() else { continue };
                    exchanges.begin(lane, attempt, store, request);
                }
            }
        }
    }

    fn take_on(&mut self, command: Command) -> Command {
        if command.wish == Wish::Leave {
            let now = self.now();
            self.drain_notifications(now);
            self.engine.handle(now, Input::Leave);
        }
        command
    }

    /// Answers those whose wait is over.
    fn tell(&mut self, waiting: &mut Vec<Command>, now: Timestamp, idle: bool, exact: &ExactCalls) {
        let alone = self.store.is_none();
        let ready = alone || self.engine.is_ready(now) && self.overrides.has_heard();
        let left = alone || self.engine.has_reported_all() && exact.has_no_corrections();
        let settled = idle && exact.is_idle() && self.overrides.is_idle() && self.due_at() > now;
        let fulfilled = |waiter: &Command| match waiter.wish {
            Wish::Ready => ready,
            Wish::Leave => left,
            Wish::Time => false,
            Wish::Settle => settled,
        };
        let over = |waiter: &mut Command| {
            fulfilled(waiter) || waiter.deadline <= now || waiter.done.is_closed()
        };
        for waiter in waiting.extract_if(.., over).collect::<Vec<_>>() {
            let fulfilled = fulfilled(&waiter);
            if waiter.wish == Wish::Leave {
                self.flush();
            }
            // Whoever gave up waiting has dropped the other end.
            let _ = waiter.done.send(fulfilled);
        }
    }

    /// Tells of stalls of the cached clock since there had been `seen`; this loop did nothing for `held_up_us` at the longest of late.
    fn tell_stalls(&mut self, seen: &mut u64, held_up_us: u64) {
        for stall in self.node.time.stalls_since(seen) {
            self.engine.clock_stalled(micros(stall), held_up_us);
            self.publish(&Event::ClockStalled { stall });
        }
    }

    /// Does what is due by now.
    fn advance(&mut self, now: Timestamp) {
        if now >= self.engine.poll_timeout() {
            self.engine.handle(now, Input::Timeout);
            self.note_trouble();
        }
        self.overrides.begin(now);
    }

    /// When the engine has something to do, or the store is to be asked about overrides.
    fn due_at(&self) -> Timestamp {
        self.engine.poll_timeout().min(self.overrides.due_at())
    }

    /// The store has told which overrides have changed, or not.
    fn overridden(&mut self, outcome: override_sync::Outcome) {
        let now = self.now();
        for event in self.overrides.ended(outcome, &self.node.limits, now) {
            self.publish(&event);
        }
        self.tell_quotas();
    }

    /// Tells the engine which quotas overrides give keys.
    fn tell_quotas(&mut self) {
        for limit in self.node.limits.first(self.engine.limits()) {
            self.engine.add_quotas(limit.index, limit.overrides.take_new_quotas());
        }
    }

    fn flush(&mut self) {
        self.adopt_limits(self.node.time.now());
        for limit in self.node.limits.first(self.engine.limits()) {
            self.engine.counted(limit.index, limit.take_counts());
        }
        for event in self.engine.take_decisions(self.node.time.now()) {
            self.publish(&self.with_state(event));
        }
        self.flush_overrides();
        for event in self.engine.take_policy_changes(self.node.time.now()) {
            self.publish(&event);
        }
        let gauges = self.engine.gauges();
        self.publish(&Event::State {
            keys: self.node.budget.used(),
            pending: gauges.pending,
            leased_depth: gauges.leased_depth,
            nodes: gauges.nodes,
            lanes_down: gauges.lanes_down,
        });
        for limit in self.node.limits.first(self.engine.limits()) {
            self.engine.note_resets(limit.index, limit.resets.most());
        }
        for (index, excess) in (0..).zip(self.engine.excess()) {
            let limit = self.limit(index);
            let excess = limit.with_policy(excess);
            limit.set_excess(excess);
            limit.set_nodes(self.engine.nodes(index as usize));
            self.publish(&Event::Excess { limit: limit.name.clone(), excess });
        }
    }

    /// Decisions with the state that their limit is in.
    fn with_state(&self, mut event: Event) -> Event {
        if let Event::Decisions { limit, is_shadow, is_removed, .. } = &mut event {
            let named = self.node.limits.ever_named(limit);
            *is_shadow = named.is_some_and(|named| named.overrides.switch() == Switch::Shadow);
            *is_removed = named.is_some_and(|named| named.is_removed());
        }
        event
    }

    fn flush_overrides(&mut self) {
        for limit in self.node.limits.all() {
            let [allowed, denied] = limit.overrides.take_counts();
            if allowed + denied > 0 {
                let limit = limit.name.clone();
                self.publish(&Event::OverrideDecisions { limit, allowed, denied });
            }
        }
        let now = self.now();
        for event in self.overrides.sweep(&self.node.limits, now) {
            self.publish(&event);
        }
        for event in self.node.limits.all().filter_map(|limit| plan_resolver::flush(limit, now)) {
            self.publish(&event);
        }
    }

    fn publish(&self, event: &Event) {
        self.listeners.iter().for_each(|listener| listener(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::manual::ManualClock;
    use crate::driver::setup::DriverParts;
    use crate::key::KeySecret;
    use crate::limit::{Limit, NodeTerms};
    use crate::quota::Quota;

    /// They stayed until their time was over: for ever, if somebody would have waited for ever.
    #[test]
    fn those_who_went_away_are_forgotten() {
        let limit = Limit::new("x", Quota::per_second(1));
        let parts = DriverParts {
            limits: vec![LimitParts {
                limit: &limit,
                node_terms: NodeTerms { has_store: false, max_nodes: None, uncounted: 1 },
                terms: limit.validate_local().unwrap(),
                plans: Vec::new(),
            }],
            permits: Vec::new(),
            store: None,
            max_keys: 1,
            lanes: 1,
            max_nodes: None,
            time: Some(TimeSource::Manual(ManualClock::new())),
            secret: KeySecret::new(b""),
            resolvers: Vec::new(),
            listeners: Vec::new(),
        };
        let (mut driver, _senders) = Driver::new(parts).unwrap();
        let (mut commands, mut waits): (Vec<_>, Vec<_>) = (0..10)
            .map(|_| {
                let (done, wait) = oneshot::channel();
                (Command { wish: Wish::Time, deadline: Timestamp::NEVER, done }, wait)
            })
            .unzip();
        waits.truncate(3);
        let now = driver.now();
        driver.tell(&mut commands, now, true, &ExactCalls::default());
        assert_eq!(commands.len(), 3);
    }
}
