//! One node: a limiter, and what its task would do.

use std::collections::HashMap;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::oneshot;

use super::super::super::clock::NodeClock;
use super::{LANES, NAMES, Request, TIERS, Wanted};
use crate::bucket::BucketRef;
use crate::builder::Builder;
use crate::decision::Decision;
use crate::driver::manual::ManualClock;
use crate::driver::{
    Buckets, Driver, LimitState, Query, SettledRequest, StoreAnswer, StoreQuery, touched,
};
use crate::limit::Limit;
use crate::limiter::{ActiveLimit, Group, Limiter};
use crate::store::MemoryStore;
use crate::sync::message::{Reply, Request as Batch};
use crate::sync::{Config, Engine, Event, Input, LimitConfig, Output, Waiter};
use crate::time::Timestamp;

/// Keys that a node has room for.
const KEYS_MAX: usize = 256;

/// A request that waits for the store.
struct Open {
    outcome: usize,
    answer: Pin<Box<dyn Future<Output = Decision>>>,
}

/// How a request was decided.
pub(super) struct Decided {
    pub(super) outcome: usize,
    pub(super) decision: Decision,
}

/// What ends with the process.
struct Process {
    // Callers first: what they held is given back to the rest.
    open: Vec<Open>,
    decided: Vec<Decided>,
    group: Group,
    limits: Vec<ActiveLimit>,
    driver: Driver,
    shown: ManualClock,
    tickets: u64,
    asked: HashMap<u64, oneshot::Sender<StoreAnswer>>,
}

pub(super) struct Node {
    process: Option<Process>,
    clock: NodeClock,
    pub(super) timer_us: u64,
    pub(super) paused_until_us: u64,
    pub(super) cut_until_us: u64,
    /// The number of each lane's last batch, and when it was sent first.
    sent: [(i64, u64); LANES as usize],
    /// When the last batch that each lane answered was sent first.
    answered_us: [u64; LANES as usize],
    /// Tokens of each limit that it told were not given back.
    pub(super) not_given_back: [i64; TIERS],
    /// What was decided in these times may not have been reported.
    pub(super) unreported: Vec<Range<u64>>,
    /// What was reported in these times may be forgotten, and told again.
    pub(super) forgotten: Vec<Range<u64>>,
}

impl Node {
    pub(super) fn new(
        index: usize,
        limits: &[Limit],
        nodes: u32,
        retry_us: u64,
        seed: u64,
        now_us: u64,
    ) -> Self {
        let shown = ManualClock::new();
        let local_us = 1_000_000 + seed % 1_000_000_000;
        shown.advance(Duration::from_micros(local_us - shown.now().as_micros()));
        let builder = limits.iter().cloned().fold(Limiter::builder(), Builder::limit);
        let builder = builder.store(MemoryStore::new()).lanes(LANES).max_nodes(nodes);
        let builder = builder.max_keys(KEYS_MAX).clock(&shown);
        let (limiter, mut driver) = builder.assemble().expect("good limits");
        // With a name and a seed that are drawn again in the same way.
        let limit = |limit: &Arc<LimitState>| LimitConfig {
            name: limit.name.clone(),
            terms: limit.terms,
            plans: Vec::new(),
        };
        let limits = driver.node.limits.all().map(limit).collect();
        let config = Config {
            limits,
            lanes: LANES,
            instance: (index as u128 + 1).to_le_bytes(),
            seed,
            retry_us,
            max_nodes: Some(nodes),
        };
        driver.engine = Engine::new(config, shown.now());
        driver.engine.handle(shown.now(), Input::Timeout);
        let group = limiter.group(NAMES).expect("the limits are there");
        let limits = group.limits().to_vec();
        let process = Process {
            open: Vec::new(),
            decided: Vec::new(),
            group,
            limits,
            driver,
            shown,
            tickets: 0,
            asked: HashMap::new(),
        };
        Self {
            process: Some(process),
            clock: NodeClock::new(now_us, local_us, (seed % 801) as i64 - 400),
            timer_us: u64::MAX,
            paused_until_us: 0,
            cut_until_us: 0,
            sent: [(0, now_us); LANES as usize],
            answered_us: [now_us; LANES as usize],
            not_given_back: [0; TIERS],
            unreported: Vec::new(),
            forgotten: Vec::new(),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.process.is_some()
    }

    pub(super) fn die(&mut self) {
        self.process = None;
    }

    /// Until when all that it decided has been reported, if it reports at once.
    pub(super) fn reported_us(&self) -> u64 {
        self.answered_us.into_iter().min().unwrap_or_default()
    }

    /// It sends this batch, perhaps again.
    pub(super) fn sends(&mut self, batch: &Batch, now_us: u64) {
        let last = &mut self.sent[batch.lane as usize];
        if last.0 != batch.sequence {
            *last = (batch.sequence, now_us);
        }
    }

    /// The process, with its clock set.
    fn process(&mut self, now_us: u64) -> Option<(&mut Process, Timestamp)> {
        let process = self.process.as_mut()?;
        let now = self.clock.now(now_us);
        process.shown.advance(Duration::from_micros(now.micros_since(process.shown.now())));
        Some((process, now))
    }

    pub(super) fn ask(&mut self, outcome: usize, request: &Request, now_us: u64) {
        let Some((process, _)) = self.process(now_us) else { return };
        let Request { cost, wanted, is_sure, .. } = *request;
        let key = request.key.to_le_bytes();
        let decision = match wanted {
            Wanted::All if is_sure => {
                let group = process.group.clone();
                let answer = async move { group.check_sure_n(&key, cost).await.expect("a cost") };
                return process.open.push(Open { outcome, answer: Box::pin(answer) });
            }
            Wanted::One(tier) if is_sure => {
                let limit = process.limits[tier].clone();
                let answer = async move { limit.check_sure_n(&key, cost).await.expect("a cost") };
                return process.open.push(Open { outcome, answer: Box::pin(answer) });
            }
            Wanted::All => process.group.check_n(&key, cost),
            Wanted::One(tier) => process.limits[tier].check_n(&key, cost),
        };
        process.decided.push(Decided { outcome, decision: decision.expect("a cost") });
    }

    pub(super) fn caller_is_gone(&mut self, outcome: usize) {
        if let Some(process) = &mut self.process {
            process.open.retain(|open| open.outcome != outcome);
        }
    }

    pub(super) fn answered(&mut self, batch: &Batch, attempt: u64, reply: Reply, now_us: u64) {
        let lane = batch.lane;
        let (sequence, sent_us) = self.sent[lane as usize];
        // The first batch after an outage carries nothing.
        if sequence == batch.sequence && !batch.entries.is_empty() {
            self.answered_us[lane as usize] = sent_us;
        }
        let Some((process, now)) = self.process(now_us) else { return };
        process.drain_notifications(now);
        process.driver.engine.handle(now, Input::Answer { lane, attempt, result: Ok(reply) });
    }

    pub(super) fn leave(&mut self, now_us: u64) {
        let Some((process, now)) = self.process(now_us) else { return };
        process.drain_notifications(now);
        process.driver.engine.handle(now, Input::Leave);
    }

    /// Whether it has nothing left to report.
    pub(super) fn has_left(&self) -> bool {
        let mut process = self.process.iter();
        process.all(|process| process.open.is_empty() && process.driver.engine.has_reported_all())
    }

    /// Does what is due, and all that follows from it at once.
    pub(super) fn run(&mut self, now_us: u64, sent: &mut Vec<(u64, Arc<Batch>)>) -> Vec<Decided> {
        let mut not_given_back = [0; TIERS];
        let mut decided = Vec::new();
        if let Some((process, now)) = self.process(now_us) {
            loop {
                process.poll_open();
                process.advance(now, sent, &mut not_given_back);
                decided.append(&mut process.decided);
                if !process.poll_open() && process.driver.queries.is_empty() {
                    break;
                }
            }
        }
        self.not_given_back.iter_mut().zip(not_given_back).for_each(|(sum, tokens)| *sum += tokens);
        decided
    }

    /// When it is to be looked at again, if no timer is set for an earlier time.
    pub(super) fn next_timer_us(&mut self, now_us: u64) -> Option<u64> {
        let next = self.process.as_ref()?.driver.engine.poll_timeout();
        let next_us = self.clock.world_us(next).max(now_us + 1);
        (next_us < self.timer_us).then(|| {
            self.timer_us = next_us;
            next_us
        })
    }
}

impl Process {
    fn drain_notifications(&mut self, now: Timestamp) {
        while let Some(note) = self.driver.node.notifications.pop() {
            let limit = self.driver.node.limits.get(note.limit);
            if let Some(Buckets::Leased(table)) = limit.map(|limit| &limit.buckets)
                && let Some(touched) = touched(table, &note)
            {
                self.driver.engine.handle(now, touched);
            }
        }
    }

    /// Hands in what callers ask, and what they give back.
    fn drain_queries(&mut self, now: Timestamp, not_given_back: &mut [i64; TIERS]) {
        while let Ok(query) = self.driver.queries.try_recv() {
            match query {
                Query::Sure(StoreQuery { key, cost, within_us, done }) if !done.is_closed() => {
                    self.tickets += 1;
                    let ticket = self.tickets;
                    self.asked.insert(ticket, done);
                    let waiter = Waiter { ticket, cost, deadline: now.plus_micros(within_us) };
                    if let Buckets::Leased(table) = &key.limit.buckets {
                        let (bucket, key) = (BucketRef::new(table, key.place), key.key.clone());
                        self.driver.engine.handle(now, Input::Wait { bucket, key, waiter });
                    }
                }
                Query::Settled(SettledRequest { key, settlement, decided }) => {
                    if let Buckets::Leased(table) = &key.limit.buckets {
                        let (bucket, key) = (BucketRef::new(table, key.place), key.key.clone());
                        let settle = Input::Settle { bucket, key, settlement, decided };
                        self.driver.engine.handle(now, settle);
                    }
                }
                Query::NotGivenBack { limit, tokens } => {
                    not_given_back[limit as usize] += i64::from(tokens);
                }
                Query::Sure(_)
                | Query::Exact(_)
                | Query::Override(_)
                | Query::Reset(_)
                | Query::Updated(_) => {}
                #[cfg(feature = "server")]
                Query::Record(_) => {}
            }
        }
    }

    fn advance(
        &mut self,
        now: Timestamp,
        sent: &mut Vec<(u64, Arc<Batch>)>,
        not_given_back: &mut [i64; TIERS],
    ) {
        self.drain_notifications(now);
        self.drain_queries(now, not_given_back);
        if self.driver.engine.poll_timeout() <= now {
            self.driver.engine.handle(now, Input::Timeout);
        }
        while let Some(output) = self.driver.engine.poll_output() {
            match output {
                Output::Send { attempt, request, .. } => sent.push((attempt, request)),
                Output::Credit { limit, credit } => {
                    if let Some(limit) = self.driver.node.limits.get(limit) {
                        limit.set_credit(credit);
                    }
                }
                Output::Decided { ticket, allowed, sure } => {
                    if let Some(done) = self.asked.remove(&ticket) {
                        // A caller that went away has dropped the other end.
                        let _ = done.send(StoreAnswer { allowed, sure });
                    }
                }
                Output::Event(Event::NotGivenBack { limit, tokens }) => {
                    if let Some(tier) = NAMES.iter().position(|name| **name == *limit) {
                        not_given_back[tier] += i64::from(tokens);
                    }
                }
                Output::Event(_) | Output::Reset { .. } => {}
            }
        }
    }

    /// Lets callers go on. Returns whether one has its decision.
    fn poll_open(&mut self) -> bool {
        let (before, mut context) = (self.open.len(), Context::from_waker(Waker::noop()));
        let decided = &mut self.decided;
        self.open.retain_mut(|open| match open.answer.as_mut().poll(&mut context) {
            Poll::Ready(decision) => {
                decided.push(Decided { outcome: open.outcome, decision });
                false
            }
            Poll::Pending => true,
        });
        self.open.len() < before
    }
}
