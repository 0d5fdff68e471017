//! The world: nodes, one store, a network between them, and virtual time.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bucket::{Bucket, BucketMap, DirtyQueue, KeyBudget, Touch};
use crate::error::StoreError;
use crate::key::lane_of;
use crate::limit::{Limit, Terms};
use crate::store::model::Model;
use crate::sync::message::{Reply, Request};
use crate::sync::{Config, Engine, Event, Input, Output};
use crate::time::Timestamp;

/// What the world is made of.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) limit: Limit,
    pub(super) nodes: usize,
    pub(super) seed: u64,
    /// Round trip of a message, in microseconds; each way takes 25% to 75% of it.
    pub(super) rtt_us: u64,
    /// Part of requests that never arrive, and of replies.
    pub(super) loss: f64,
    /// Part of requests that arrive twice, the second time late.
    pub(super) duplicated: f64,
    pub(super) timeout_us: u64,
}

impl Setup {
    pub(super) fn new(limit: Limit, nodes: usize, seed: u64) -> Self {
        Self { limit, nodes, seed, rtt_us: 1000, loss: 0.0, duplicated: 0.0, timeout_us: 100_000 }
    }
}

/// One request, as the world saw it decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decided {
    pub(super) at_us: u64,
    pub(super) key: u32,
    pub(super) allowed: bool,
}

enum Happening {
    Arrival { node: usize, key: u32, cost: u32 },
    Delivery { node: usize, request: Arc<Request> },
    Answer { node: usize, lane: u32, sequence: i64, result: Result<Reply, StoreError> },
    Timer { node: usize },
}

pub(super) struct Node {
    pub(super) engine: Engine,
    buckets: BucketMap,
    dirty: DirtyQueue,
    pub(super) spent: u64,
    pub(super) keys_synced: u64,
    timer_us: u64,
    alive: bool,
}

pub(super) struct World {
    pub(super) now_us: u64,
    pub(super) nodes: Vec<Node>,
    pub(super) store: Model,
    /// The store takes no requests until then; those sent meanwhile are executed late.
    pub(super) hung_until_us: u64,
    pub(super) decided: Vec<Decided>,
    pub(super) losses_of_memory: u64,
    setup: Setup,
    terms: Terms,
    queue: BTreeMap<(u64, u64), Happening>,
    order: u64,
    rng: fastrand::Rng,
}

/// The one limit of the world.
const LIMIT: &str = "api";
const LANES: u32 = 2;
/// The world begins here, so that no timestamp is 0.
pub(super) const BEGIN_US: u64 = 10_000_000;

impl World {
    pub(super) fn new(setup: Setup) -> Self {
        let terms = setup.limit.validate().expect("a valid limit");
        let mut world = Self {
            now_us: BEGIN_US,
            nodes: Vec::new(),
            store: Model::default(),
            hung_until_us: 0,
            decided: Vec::new(),
            losses_of_memory: 0,
            rng: fastrand::Rng::with_seed(setup.seed),
            terms,
            queue: BTreeMap::new(),
            order: 0,
            setup,
        };
        for _ in 0..world.setup.nodes {
            world.add_node();
        }
        world
    }

    /// A new node joins.
    pub(super) fn add_node(&mut self) {
        let index = self.nodes.len();
        let config = Config {
            limits: vec![(LIMIT.into(), self.terms)],
            lanes: LANES,
            instance: (index as u128 + 1).to_le_bytes(),
            seed: self.rng.u64(..),
            retry_us: self.setup.timeout_us,
            nodes_max: None,
        };
        let overflow = Bucket::new(0, lane_of(LIMIT, b"", LANES), b"", self.terms.credit);
        let now = Timestamp::from_micros(self.now_us);
        self.nodes.push(Node {
            engine: Engine::new(config, now),
            buckets: BucketMap::new(Arc::new(KeyBudget::new(1_000_000)), overflow),
            dirty: DirtyQueue::new(1000),
            spent: 0,
            keys_synced: 0,
            timer_us: u64::MAX,
            alive: true,
        });
        self.nodes[index].engine.handle(now, Input::Timeout);
        self.pump(index);
    }

    /// A node dies: nothing of it is heard of again.
    pub(super) fn kill(&mut self, node: usize) {
        self.nodes[node].alive = false;
    }

    /// Plans one request of `key` on `node`.
    pub(super) fn arrive(&mut self, at_us: u64, node: usize, key: u32) {
        self.arrive_costing(at_us, node, key, 1);
    }

    /// Plans one request of `key` on `node` that costs more than a token.
    pub(super) fn arrive_costing(&mut self, at_us: u64, node: usize, key: u32, cost: u32) {
        self.plan(at_us, Happening::Arrival { node, key, cost });
    }

    fn plan(&mut self, at_us: u64, happening: Happening) {
        self.order += 1;
        self.queue.insert((at_us, self.order), happening);
    }

    /// Lets everything happen until `until_us`.
    pub(super) fn run_until(&mut self, until_us: u64) {
        while let Some((&(at_us, _), _)) = self.queue.first_key_value() {
            if at_us > until_us {
                break;
            }
            let ((at_us, _), happening) = self.queue.pop_first().expect("there is a first");
            self.now_us = self.now_us.max(at_us);
            self.happen(happening);
        }
        self.now_us = until_us;
    }

    fn happen(&mut self, happening: Happening) {
        let now = Timestamp::from_micros(self.now_us);
        match happening {
            Happening::Arrival { node, key, cost } => {
                if self.nodes[node].alive {
                    self.decide(node, key, cost);
                    self.pump(node);
                }
            }
            Happening::Delivery { node, request } => self.deliver(node, &request),
            Happening::Answer { node, lane, sequence, result } => {
                if self.nodes[node].alive {
                    self.nodes[node].engine.handle(now, Input::Answer { lane, sequence, result });
                    self.pump(node);
                }
            }
            Happening::Timer { node } => {
                self.nodes[node].timer_us = u64::MAX;
                if self.nodes[node].alive {
                    self.nodes[node].engine.handle(now, Input::Timeout);
                    self.pump(node);
                }
            }
        }
    }

    fn decide(&mut self, node: usize, key: u32, cost: u32) {
        let now = Timestamp::from_micros(self.now_us);
        let (credit, unit) = (self.terms.credit, self.terms.scale.token);
        let node = &mut self.nodes[node];
        let name = key.to_le_bytes();
        let create = || Bucket::new(0, lane_of(LIMIT, &name, LANES), &name, credit);
        let taken = node.buckets.with(&name, create, |bucket| {
            let taken = bucket.take(cost, now, unit);
            if taken.touch != Touch::None {
                node.dirty.push(bucket.clone(), taken.touch);
            }
            taken
        });
        node.spent += u64::from(taken.allowed) * u64::from(cost);
        self.decided.push(Decided { at_us: self.now_us, key, allowed: taken.allowed });
    }

    /// What the driver does: touched buckets in, outputs out, a timer armed.
    pub(super) fn pump(&mut self, index: usize) {
        let now = Timestamp::from_micros(self.now_us);
        while let Some(bucket) = self.nodes[index].dirty.pop() {
            self.nodes[index].engine.handle(now, Input::Touched(bucket));
        }
        if self.nodes[index].engine.poll_timeout() <= now {
            self.nodes[index].engine.handle(now, Input::Timeout);
        }
        while let Some(output) = self.nodes[index].engine.poll_output() {
            match output {
                Output::Send { request, .. } => self.send(index, request),
                Output::Event(Event::MemoryLost { .. }) => self.losses_of_memory += 1,
                Output::Event(_) => {}
            }
        }
        let next_us = self.nodes[index].engine.poll_timeout().as_micros();
        assert!(next_us > self.now_us, "the engine asks for a time that has passed");
        if next_us < self.nodes[index].timer_us {
            self.nodes[index].timer_us = next_us;
            self.plan(next_us, Happening::Timer { node: index });
        }
    }

    fn one_way_us(&mut self) -> u64 {
        let rtt_us = self.setup.rtt_us;
        rtt_us / 4 + self.rng.u64(0..=rtt_us / 2)
    }

    fn send(&mut self, node: usize, request: Arc<Request>) {
        self.nodes[node].keys_synced += request.entries.len() as u64;
        if self.rng.f64() < self.setup.loss {
            return self.time_out(node, &request);
        }
        if self.rng.f64() < self.setup.duplicated {
            let late_us = self.now_us + self.rng.u64(0..3_000_000);
            self.plan(late_us, Happening::Delivery { node: usize::MAX, request: request.clone() });
        }
        let at_us = self.now_us + self.one_way_us();
        self.plan(at_us, Happening::Delivery { node, request });
    }

    fn time_out(&mut self, node: usize, request: &Request) {
        let result =
            Err(StoreError::TimedOut(std::time::Duration::from_micros(self.setup.timeout_us)));
        let (lane, sequence) = (request.lane, request.sequence);
        let at_us = self.now_us + self.setup.timeout_us;
        self.plan(at_us, Happening::Answer { node, lane, sequence, result });
    }

    fn deliver(&mut self, node: usize, request: &Arc<Request>) {
        if self.now_us < self.hung_until_us {
            // The sender gives up; the request is executed when the store goes on.
            let late_us = self.hung_until_us + self.rng.u64(0..1000);
            self.plan(late_us, Happening::Delivery { node: usize::MAX, request: request.clone() });
            if node != usize::MAX {
                self.time_out(node, request);
            }
            return;
        }
        let reply = self.store.sync(request, self.now_us as i64);
        if node == usize::MAX {
            return;
        }
        if self.rng.f64() < self.setup.loss {
            return self.time_out(node, request);
        }
        let at_us = self.now_us + self.one_way_us();
        let (lane, sequence) = (request.lane, request.sequence);
        self.plan(at_us, Happening::Answer { node, lane, sequence, result: Ok(reply) });
    }

    /// All nodes leave in good order.
    pub(super) fn leave(&mut self) {
        for index in 0..self.nodes.len() {
            if self.nodes[index].alive {
                let now = Timestamp::from_micros(self.now_us);
                self.nodes[index].engine.handle(now, Input::Leave);
                self.pump(index);
            }
        }
    }

    /// Tokens charged in the store.
    pub(super) fn charged(&self) -> i64 {
        self.store.keys.values().map(|key| key.charged).sum()
    }
}

/// What came out, against one ideal bucket per key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) admitted: u64,
    pub(super) vs_ideal_pct: f64,
    pub(super) excess_tokens: f64,
}

/// Computes the figures of one key by plain token buckets that share nothing with the limiter.
pub(super) fn figures(decided: &[Decided], key: u32, rate: f64, burst: f64) -> Figures {
    let (mut ideal_level, mut real_level, mut lowest) = (burst, burst, 0.0_f64);
    let (mut ideal, mut admitted, mut at_us) = (0_u64, 0, BEGIN_US);
    for request in decided.iter().filter(|request| request.key == key) {
        let flowed = rate * (request.at_us - at_us) as f64 / 1e6;
        at_us = request.at_us;
        ideal_level = (ideal_level + flowed).min(burst);
        real_level = (real_level + flowed).min(burst);
        if ideal_level >= 1.0 {
            ideal_level -= 1.0;
            ideal += 1;
        }
        if request.allowed {
            real_level -= 1.0;
            lowest = lowest.min(real_level);
            admitted += 1;
        }
    }
    Figures {
        admitted,
        vs_ideal_pct: 100.0 * admitted as f64 / ideal as f64,
        excess_tokens: -lowest,
    }
}

/// Poisson arrivals of `per_second` between two instants.
pub(super) fn poisson(
    rng: &mut fastrand::Rng,
    from_us: u64,
    until_us: u64,
    per_second: f64,
) -> Vec<u64> {
    let mut at_us = from_us as f64;
    let mut arrivals = Vec::new();
    loop {
        at_us -= (1.0 - rng.f64()).ln() * 1e6 / per_second;
        if at_us >= until_us as f64 {
            return arrivals;
        }
        arrivals.push(at_us as u64);
    }
}
