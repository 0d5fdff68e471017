//! The world: nodes, one store, a network between them, and virtual time.
//!
//! Every node is the product: its buckets, its queue of notifications and its engine. The store is the
//! reference model of the script. Only clocks, transport and random source are the world's.

use std::sync::Arc;

use super::clock::NodeClock;
use super::faults::{Fault, Planned};
use super::figures::Decided;
use super::judge::Judge;
use super::setup::{Form, Setup, Traffic};
use super::store::SimulatedStore;
use super::workload::Arrival;
use crate::bucket::{Ask, BucketRef, NewKey, Notification, OVERFLOW, Room, Urgency, Verdict};
use crate::driver::touched;
use crate::error::ConfigError;
use crate::limit::{DEFAULT_MAX_NODES, Limit, Terms};
use crate::sync::{Config, Event, Input, LimitConfig, Output, Waiter};
use crate::time::{Timestamp, micros};

mod audit;
mod faults;
mod ledger;
mod network;
mod node;
mod slots;
mod timeline;

use ledger::Ledger;
pub(super) use node::Node;
use node::Waiting;
use slots::{KeyAt, NodeSlots};
#[cfg(all(test, feature = "redis"))]
pub(super) use timeline::StoreCall;
use timeline::{Happening, Timeline};

/// Nodes, store, network and time.
pub(super) struct World {
    pub(super) now_us: u64,
    /// The world's time at which the load begins.
    pub(super) origin_us: u64,
    pub(super) nodes: Vec<Node>,
    /// The node in each place that arrivals name.
    places: Vec<usize>,
    pub(super) store: SimulatedStore,
    /// Every decision, if the setup says so.
    pub(super) decided: Vec<Decided>,
    /// Every call of the store, if they are recorded.
    #[cfg(all(test, feature = "redis"))]
    pub(super) calls: Option<Vec<StoreCall>>,
    /// Of the first limit.
    pub(super) judge: Judge,
    /// Of the others.
    pub(super) other_judges: Vec<Judge>,
    pub(super) traffic: Traffic,
    /// Where every spent token is, for audits.
    pub(super) ledger: Ledger,
    setup: Setup,
    /// Keys of each limit for which each node has room.
    max_keys: usize,
    timeline: Timeline,
    tickets: u64,
    rng: fastrand::Rng,
}

/// What the caller of a request is told.
#[derive(Clone, Copy, Debug)]
struct Told {
    allowed: bool,
    sure: bool,
    /// It had to wait for the store.
    waited: bool,
    /// It waits so long for its slot, in the world's time.
    delay_us: u64,
}

/// The world begins here, so that no timestamp is 0.
const BEGIN_US: u64 = 10_000_000;
/// A node has room for so many keys at least. Its tables are written over when it starts, so short runs are quick where
/// they are small.
const FEW_KEYS: usize = 1000;
/// The nodes have met the store by then.
const MEET_US: u64 = 60_000_000;

impl World {
    /// A world in which the nodes have met the store; its load begins now, and has few keys.
    #[cfg(test)]
    pub(super) fn new(setup: Setup) -> Result<Self, ConfigError> {
        Self::for_arrivals(setup, &[])
    }

    /// The same, in which every call of the store is recorded.
    #[cfg(all(test, feature = "redis"))]
    pub(super) fn recorded(setup: Setup) -> Result<Self, ConfigError> {
        let mut world = Self::unmet(setup, FEW_KEYS)?;
        world.calls = Some(Vec::new());
        world.meet();
        Ok(world)
    }

    /// A world in which the nodes have met the store, with room for the keys of `arrivals`.
    pub(super) fn for_arrivals(setup: Setup, arrivals: &[Arrival]) -> Result<Self, ConfigError> {
        let last = arrivals.iter().map(|arrival| arrival.key as usize + 1).max();
        let keys = arrivals.len().min(last.unwrap_or(0));
        let mut world = Self::unmet(setup, keys.max(FEW_KEYS))?;
        world.meet();
        Ok(world)
    }

    /// A world in which nodes and store are new to each other, with room for so many keys; its load may begin now.
    pub(super) fn unmet(setup: Setup, max_keys: usize) -> Result<Self, ConfigError> {
        for limit in setup.limits_of(0).chain(&setup.newer) {
            limit.validate_hybrid(DEFAULT_MAX_NODES)?;
        }
        let mut world = Self {
            now_us: BEGIN_US,
            origin_us: 0,
            nodes: Vec::new(),
            places: Vec::new(),
            store: SimulatedStore::new(setup.service),
            decided: Vec::new(),
            #[cfg(all(test, feature = "redis"))]
            calls: None,
            judge: Judge::new(1.0, 1.0),
            other_judges: Vec::new(),
            traffic: Traffic::default(),
            ledger: Ledger::default(),
            timeline: Timeline::default(),
            rng: fastrand::Rng::with_seed(setup.seed ^ 0x7469_6465),
            tickets: 0,
            max_keys,
            setup,
        };
        for place in 0..world.setup.nodes {
            world.places.push(usize::MAX);
            world.start_node(place);
        }
        world.begin();
        Ok(world)
    }

    /// The load begins now.
    fn begin(&mut self) {
        self.origin_us = self.now_us;
        let Setup { limit, newer, others, known_keys, .. } = &self.setup;
        let store_us = self.store.clock_us(self.now_us) as u64;
        let judge_of = |limit: &Limit| Judge::of_rule(limit.rule(), store_us);
        self.other_judges = others.iter().map(judge_of).collect();
        let judge = match newer {
            // Nodes that hold two versions may admit what the larger gives.
            Some(newer) => {
                let quotas = [limit.quota(), newer.quota()];
                let [rate, other_rate] = quotas.map(|quota| quota.tokens_per_second());
                let [burst, other_burst] = quotas.map(|quota| quota.burst_tokens() as f64);
                Judge::new(rate.max(other_rate), burst.max(other_burst))
            }
            None => judge_of(limit),
        };
        self.judge = judge.of_known_keys(*known_keys);
    }

    /// Runs until every node has met the store.
    fn meet(&mut self) {
        while self.now_us < BEGIN_US + MEET_US {
            let ready = |node: &Node| node.engine.is_ready(node.clock.now(self.now_us));
            if self.nodes.iter().all(ready) {
                break;
            }
            self.run_until(self.now_us + 10_000);
        }
        self.begin();
        self.traffic = Traffic::default();
        for node in &mut self.nodes {
            node.born_us = self.now_us;
        }
    }

    /// A new node takes the place.
    pub(super) fn start_node(&mut self, place: u16) {
        let index = self.nodes.len();
        let limits: Vec<_> = self
            .setup
            .limits_of(place)
            .filter_map(|limit| {
                let terms = limit.validate_hybrid(DEFAULT_MAX_NODES).ok()?;
                Some(LimitConfig { name: limit.name().into(), terms, plans: Vec::new() })
            })
            .collect();
        let terms: Vec<Terms> = limits.iter().map(|limit| limit.terms).collect();
        let rules = self.setup.limits_of(place).zip(&terms);
        let slots = rules.map(|(limit, terms)| NodeSlots::of(limit, terms)).collect();
        let config = Config {
            limits,
            lanes: self.setup.lanes,
            instance: (index as u128 + 1).to_le_bytes(),
            seed: self.rng.u64(..),
            retry_us: micros(self.setup.network.timeout),
            max_nodes: None,
        };
        let error = i64::from(self.setup.clock_error_ppm);
        let clock = NodeClock::new(
            self.now_us,
            BEGIN_US + self.rng.u64(0..1_000_000_000),
            self.rng.i64(-error..=error),
        );
        self.nodes.push(Node::new(
            config,
            (terms, slots),
            clock,
            place,
            self.max_keys,
            self.now_us,
        ));
        self.places[usize::from(place)] = index;
        let now = clock.now(self.now_us);
        self.nodes[index].engine.handle(now, Input::Timeout);
        self.pump(index);
    }

    /// The node in this place dies.
    pub(super) fn kill(&mut self, place: u16) {
        let index = self.places[usize::from(place)];
        self.count_node_time(index);
        self.nodes[index].die();
    }

    fn count_node_time(&mut self, index: usize) {
        let node = &self.nodes[index];
        if node.alive {
            self.traffic.node_seconds += (self.now_us - node.born_us) as f64 / 1e6;
        }
    }

    /// Plans a fault.
    pub(super) fn plan_fault(&mut self, planned: &Planned) {
        let at_us = self.origin_us + planned.at_us;
        if let Some(absence) = planned.store_absence() {
            self.judge.store_is_absent(absence);
        }
        if let Fault::StoreLags { by_us } = planned.fault {
            let takes_over_us = at_us;
            self.plan(at_us.saturating_sub(by_us), Happening::ReplicaFallsBehind { takes_over_us });
        }
        self.plan(at_us, Happening::Fault(planned.fault));
    }

    fn plan(&mut self, at_us: u64, what: Happening) {
        self.timeline.plan(at_us, what);
    }

    /// Lets everything happen until `at_us` after the load's beginning, the arrivals among it.
    pub(super) fn play(&mut self, arrivals: &[Arrival], until_us: u64) {
        for arrival in arrivals {
            self.run_until(self.origin_us + arrival.at_us);
            let Arrival { node, key, cost, .. } = *arrival;
            self.happen(Happening::Arrival { place: node, key, cost });
        }
        self.run_until(self.origin_us + until_us);
    }

    /// Lets everything happen until `until_us` of the world's time.
    pub(super) fn run_until(&mut self, until_us: u64) {
        while let Some((at_us, happening)) = self.timeline.next(until_us) {
            self.now_us = self.now_us.max(at_us);
            self.happen(happening);
        }
        self.now_us = self.now_us.max(until_us);
    }

    /// The load is over.
    pub(super) fn finish(&mut self) {
        for index in 0..self.nodes.len() {
            self.count_node_time(index);
        }
    }

    fn happen(&mut self, happening: Happening) {
        let index = match &happening {
            Happening::Arrival { place, .. } => self.places[usize::from(*place)],
            Happening::Answer { node, .. }
            | Happening::Slots { node, .. }
            | Happening::Timer { node }
            | Happening::Resumption { node } => *node,
            Happening::Delivery(delivery) => return self.deliver(delivery.clone()),
            Happening::Service => return self.serve(),
            Happening::Fault(fault) => {
                let fault = *fault;
                return self.apply_fault(fault);
            }
            Happening::ReplicaFallsBehind { takes_over_us } => {
                return self.store.replica_falls_behind(*takes_over_us);
            }
        };
        if !self.nodes[index].alive {
            return;
        }
        if self.now_us < self.nodes[index].paused_until_us {
            return self.nodes[index].missed.push_back(happening);
        }
        match happening {
            Happening::Arrival { key, cost, .. } => self.ask(index, key, cost),
            Happening::Answer { lane, attempt, result, leases_alive, .. } => {
                self.receive(index, (lane, attempt), result, leases_alive);
            }
            Happening::Slots { what, .. } => self.slots_happen(index, what),
            Happening::Timer { .. } => {
                // A timer that was replaced by an earlier one has no effect.
                if self.nodes[index].timer_us <= self.now_us {
                    self.nodes[index].timer_us = u64::MAX;
                    self.pump(index);
                }
            }
            Happening::Resumption { .. } => {
                // What came meanwhile is seen in the order in which it came.
                for missed in std::mem::take(&mut self.nodes[index].missed) {
                    self.happen(missed);
                }
            }
            Happening::Delivery(_)
            | Happening::Service
            | Happening::Fault(_)
            | Happening::ReplicaFallsBehind { .. } => {}
        }
        self.audit_node(index);
    }

    // ---- decisions ---------------------------------------------------------------------------

    fn ask(&mut self, index: usize, key: u32, cost: u32) {
        let name = key.to_le_bytes();
        let limit = self.setup.limit_of(key);
        let node = &mut self.nodes[index];
        let denied = Told { allowed: false, sure: true, waited: false, delay_us: 0 };
        let (scale, first) = (node.terms[limit].scale, node.credits[limit].first);
        let buckets = &node.buckets[limit];
        let now = node.clock.reading(self.now_us);
        if cost > node.terms[limit].cost_max {
            // The caller's error: it counts as denied.
            return self.record(index, key, cost, denied);
        }
        if node.slots[limit].is_some() {
            return self.ask_for_slot(KeyAt { node: index, limit, key }, cost);
        }
        let place = buckets.find_or_insert(&name, NewKey::with_credit(first), Room::Any).place;
        assert_ne!(place, OVERFLOW, "no room for more than {} keys", self.max_keys);
        let bucket = BucketRef::new(buckets, place);
        let can_wait = self.setup.form == Form::Async;
        let result = bucket
            .decide(Ask { cost, scale, first_credit: first, plan: NewKey::NO_PLAN, can_wait }, now);
        if result.verdict == Verdict::Unsure {
            self.note_bucket(index, key, &bucket);
            return self.wait(index, bucket, key, cost);
        }
        if !result.news.is_none() {
            let (limit, news) = (limit as u32, result.news);
            node.notifications.push(Notification { limit, place, at: now.cached, news });
        }
        self.note_bucket(index, key, &bucket);
        let told = Told { allowed: result.is_allowed(), sure: result.is_sure, ..denied };
        self.record(index, key, cost, told);
        // The driver sleeps on unless it is woken.
        if result.news.urgency == Urgency::Now || result.news.spilled > 0 {
            self.pump(index);
        }
    }

    fn note_bucket(&mut self, index: usize, key: u32, bucket: &BucketRef) {
        if self.setup.audit {
            self.nodes[index].asked.entry(key).or_insert_with(|| bucket.clone());
        }
    }

    fn wait(&mut self, index: usize, bucket: BucketRef, key: u32, cost: u32) {
        self.tickets += 1;
        let ticket = self.tickets;
        let node = &mut self.nodes[index];
        let now = node.clock.now(self.now_us);
        let deadline = now.plus_micros(micros(self.setup.limit.max_wait));
        node.waiting.insert(ticket, Waiting { key, cost });
        let waiter = Waiter { ticket, cost, deadline };
        let key: Arc<[u8]> = key.to_le_bytes().as_slice().into();
        node.engine.handle(now, Input::Wait { bucket, key, waiter });
        self.pump(index);
    }

    fn record(&mut self, index: usize, key: u32, cost: u32, told: Told) {
        let Told { allowed, sure, waited, delay_us } = told;
        let limit = self.setup.limit_of(key);
        // The ledger has what is leased.
        if self.nodes[index].slots[limit].is_none() {
            self.spend(index, key, u64::from(allowed) * u64::from(cost));
        }
        let node = &self.nodes[index];
        let at_us = self.now_us.saturating_sub(self.origin_us);
        let one = Decided { at_us, node: node.place, key, cost, allowed, sure, waited, delay_us };
        match limit {
            0 => self.judge.record(&one),
            other => self.other_judges[other - 1].record(&one),
        }
        if self.setup.audit {
            self.decided.push(one);
        }
    }

    // ---- the driver's part -------------------------------------------------------------------

    /// What the driver does: touched buckets in, outputs out, a timer armed.
    pub(super) fn pump(&mut self, index: usize) {
        let now = self.nodes[index].clock.now(self.now_us);
        self.drain_notifications(index, now);
        if self.nodes[index].engine.poll_timeout() <= now {
            self.nodes[index].engine.handle(now, Input::Timeout);
        }
        while let Some(output) = self.nodes[index].engine.poll_output() {
            match output {
                Output::Send { attempt, request, .. } => self.send(index, attempt, request),
                Output::Credit { limit, credit } => {
                    let node = &mut self.nodes[index];
                    node.credits[limit as usize] = credit;
                    node.buckets[limit as usize].set_credit_at_rest(credit.known);
                }
                Output::Decided { ticket, allowed, sure } => {
                    if let Some(Waiting { key, cost }) = self.nodes[index].waiting.remove(&ticket) {
                        let told = Told { allowed, sure, waited: true, delay_us: 0 };
                        self.record(index, key, cost, told);
                    }
                }
                Output::Event(event) => self.count_event(&event),
                // Nobody resets a key here.
                Output::Reset { .. } => {}
            }
        }
        let next = self.nodes[index].engine.poll_timeout();
        assert!(next > now, "the engine asks for a time that has passed");
        let next_us = self.nodes[index].clock.world_us(next);
        if next_us < self.nodes[index].timer_us {
            self.nodes[index].timer_us = next_us;
            self.plan(next_us, Happening::Timer { node: index });
        }
    }

    /// Hands the notifications of decisions to the engine, as the driver does before anything else.
    fn drain_notifications(&mut self, index: usize, now: Timestamp) {
        let node = &mut self.nodes[index];
        while let Some(note) = node.notifications.pop() {
            if let Some(touched) = touched(&node.buckets[note.limit as usize], &note) {
                node.engine.handle(now, touched);
            }
        }
    }

    fn count_event(&mut self, event: &Event) {
        match event {
            Event::Synced { keys, error, .. } => {
                self.traffic.store_calls += 1;
                self.traffic.keys_synced += *keys as u64;
                self.traffic.store_errors += u64::from(error.is_some());
            }
            Event::Viewed { drift_tokens, burst_tokens, .. } => {
                let drift = 100.0 * drift_tokens.abs() / *burst_tokens as f64;
                self.traffic.drift_pct.push(drift as f32);
            }
            Event::MemoryLost { .. } => self.traffic.losses_of_memory += 1,
            _ => {}
        }
    }

    fn happens(&mut self, odds: f64) -> bool {
        odds > 0.0 && self.rng.f64() < odds
    }

    /// All nodes leave in good order.
    #[cfg(test)]
    pub(super) fn leave(&mut self) {
        for index in 0..self.nodes.len() {
            if self.nodes[index].alive {
                self.pump(index);
                let now = self.nodes[index].clock.now(self.now_us);
                self.nodes[index].engine.handle(now, Input::Leave);
                self.pump(index);
            }
        }
    }

    /// What the nodes report of the limit's excess, the highest of each figure.
    #[cfg(test)]
    pub(super) fn excess(&mut self) -> crate::bound::Excess {
        let mut highest = crate::bound::Excess::default();
        for node in self.nodes.iter_mut().filter(|node| node.alive) {
            let excess = node.engine.excess()[0];
            let bounds = highest.bound_tokens.into_iter().chain(excess.bound_tokens);
            highest.bound_tokens = bounds.reduce(f64::max);
            highest.observed_tokens = highest.observed_tokens.max(excess.observed_tokens);
        }
        highest
    }
}
