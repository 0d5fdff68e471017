//! Nodes as users hold them, in virtual time: limiters and their groups. Their tasks do not run: their part is done here, so
//! that the same seed gives the same run. The store is the reference model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::super::super::faults::{Fault, Planned};
use super::super::super::setup::{LATE_MAX_US, Network};
use super::super::super::store::SimulatedStore;
use super::node::{Decided, Node};
use super::{NAMES, Outcome, Request, TIERS};
use crate::limit::Limit;
use crate::sync::message::{Reply, Request as Batch};
use crate::time::micros;

/// The world begins here, so that no timestamp is 0.
const BEGIN_US: u64 = 10_000_000;
/// A store that goes on after it hung executes what was sent meanwhile within this time.
const AFTER_HANG_US: u64 = 1000;
/// A node reports what it decided within this time, unless a batch before it has no answer.
const REPORTED_US: u64 = 2_000_000;
/// Callers have their answers, and paused nodes go on, this long after the load.
const CALM_US: u64 = 10_000_000;
/// All is reported this long after nodes begin to leave.
const LEFT_US: u64 = 120_000_000;

/// A batch on its way to the store.
#[derive(Clone)]
struct Delivery {
    sender: usize,
    /// A copy, or a batch whose sender has given up, is not answered.
    is_answered: bool,
    attempt: u64,
    batch: Arc<Batch>,
}

enum Happening {
    Request(Request),
    Delivery(Delivery),
    Answer {
        node: usize,
        batch: Arc<Batch>,
        attempt: u64,
        reply: Reply,
    },
    Timer {
        node: usize,
    },
    /// The caller of this outcome goes away.
    CallerGone {
        node: usize,
        outcome: usize,
    },
    Fault(Fault),
}

/// Who is charged: the node, the key and the limit.
pub(super) type Account = (usize, u32, usize);

pub(super) struct Cluster {
    pub(super) now_us: u64,
    pub(super) nodes: Vec<Node>,
    pub(super) outcomes: Vec<Outcome>,
    /// Tokens by which records grew.
    pub(super) charged: HashMap<Account, i64>,
    places: Vec<usize>,
    store: SimulatedStore,
    network: Network,
    pub(super) limits: [Limit; TIERS],
    timeline: BTreeMap<(u64, u64), Happening>,
    order: u64,
    rng: fastrand::Rng,
}

impl Cluster {
    pub(super) fn new(nodes: u16, limits: [Limit; TIERS], network: Network, seed: u64) -> Self {
        let mut cluster = Self {
            now_us: BEGIN_US,
            nodes: Vec::new(),
            outcomes: Vec::new(),
            charged: HashMap::new(),
            places: vec![usize::MAX; usize::from(nodes)],
            store: SimulatedStore::new(None),
            network,
            limits,
            timeline: BTreeMap::new(),
            order: 0,
            rng: fastrand::Rng::with_seed(seed),
        };
        for place in 0..usize::from(nodes) {
            cluster.start(place);
        }
        cluster
    }

    /// Lets all of it happen, then lets the nodes leave in good order over a network that loses nothing. Returns whether
    /// they could.
    pub(super) fn play(&mut self, requests: &[Request], faults: &[Planned], until_us: u64) -> bool {
        for request in requests {
            self.plan(BEGIN_US + request.at_us, Happening::Request(*request));
        }
        for Planned { at_us, fault } in faults {
            self.plan(BEGIN_US + at_us, Happening::Fault(*fault));
        }
        self.run_until(BEGIN_US + until_us);
        let Network { rtt, timeout, .. } = self.network;
        self.network = Network { timeout, ..Network::new(rtt) };
        self.run_until(self.now_us + CALM_US);
        for index in 0..self.nodes.len() {
            self.nodes[index].leave(self.now_us);
            self.pump(index);
        }
        let end_us = self.now_us + LEFT_US;
        while self.now_us < end_us && !self.nodes.iter().all(Node::has_left) {
            self.run_until(self.now_us + 100_000);
        }
        let has_left = self.nodes.iter().all(Node::has_left);
        // What is still under way arrives.
        self.run_until(self.now_us + LATE_MAX_US);
        has_left
    }

    fn start(&mut self, place: usize) {
        let index = self.nodes.len();
        let (timeout_us, seed) = (micros(self.network.timeout), self.rng.u64(..));
        let nodes = self.places.len() as u32;
        self.nodes.push(Node::new(index, &self.limits, nodes, timeout_us, seed, self.now_us));
        self.places[place] = index;
        self.pump(index);
    }

    fn plan(&mut self, at_us: u64, what: Happening) {
        self.order += 1;
        self.timeline.insert((at_us, self.order), what);
    }

    fn run_until(&mut self, until_us: u64) {
        while let Some(next) = self.timeline.first_entry().filter(|next| next.key().0 <= until_us) {
            let ((at_us, _), happening) = next.remove_entry();
            self.now_us = self.now_us.max(at_us);
            self.happen(happening);
        }
        self.now_us = self.now_us.max(until_us);
    }

    fn happen(&mut self, happening: Happening) {
        let index = match &happening {
            Happening::Request(request) => self.places[usize::from(request.place)],
            Happening::Answer { node, .. }
            | Happening::Timer { node }
            | Happening::CallerGone { node, .. } => *node,
            Happening::Delivery(delivery) => return self.deliver(delivery.clone()),
            Happening::Fault(fault) => {
                let fault = *fault;
                return self.apply_fault(fault);
            }
        };
        if !self.nodes[index].is_alive() {
            return;
        }
        let paused_until_us = self.nodes[index].paused_until_us;
        if self.now_us < paused_until_us {
            return self.plan(paused_until_us, happening);
        }
        match happening {
            Happening::Request(request) => self.ask(index, request),
            Happening::Answer { batch, attempt, reply, .. } => {
                self.nodes[index].answered(&batch, attempt, reply, self.now_us);
            }
            Happening::CallerGone { outcome, .. } => self.nodes[index].caller_is_gone(outcome),
            Happening::Timer { .. } => {
                // A timer that was replaced by an earlier one has no effect.
                if self.nodes[index].timer_us > self.now_us {
                    return;
                }
                self.nodes[index].timer_us = u64::MAX;
            }
            Happening::Delivery(_) | Happening::Fault(_) => {}
        }
        self.pump(index);
    }

    fn ask(&mut self, node: usize, request: Request) {
        let outcome = self.outcomes.len();
        let at_us = self.now_us;
        self.outcomes.push(Outcome { request, at_us, node, allowed: None, denied_by: None });
        self.nodes[node].ask(outcome, &request, at_us);
        if let Some(for_us) = request.gone_after_us {
            self.plan(at_us + for_us, Happening::CallerGone { node, outcome });
        }
    }

    /// Lets a node do what is due, and sets its timer.
    fn pump(&mut self, index: usize) {
        let mut sent = Vec::new();
        let decided = self.nodes[index].run(self.now_us, &mut sent);
        for Decided { outcome, decision } in decided {
            let outcome = &mut self.outcomes[outcome];
            outcome.allowed = Some(decision.is_allowed());
            if decision.is_denied() {
                outcome.denied_by = NAMES.iter().position(|name| *name == decision.limit_name());
            }
        }
        for (attempt, batch) in sent {
            self.send(index, attempt, batch);
        }
        if let Some(next_us) = self.nodes[index].next_timer_us(self.now_us) {
            self.plan(next_us, Happening::Timer { node: index });
        }
    }

    // ---- the network and the store -----------------------------------------------------------

    fn happens(&mut self, odds: f64) -> bool {
        odds > 0.0 && self.rng.f64() < odds
    }

    fn one_way_us(&mut self) -> u64 {
        let rtt_us = micros(self.network.rtt);
        let is_late = self.happens(self.network.late);
        let late_us = if is_late { self.rng.u64(0..LATE_MAX_US) } else { 0 };
        rtt_us / 4 + self.rng.u64(0..=rtt_us / 2) + late_us
    }

    fn send(&mut self, sender: usize, attempt: u64, batch: Arc<Batch>) {
        self.nodes[sender].sends(&batch, self.now_us);
        let is_cut_off = self.now_us < self.nodes[sender].cut_until_us;
        if is_cut_off || self.happens(self.network.request_loss) {
            return;
        }
        let delivery = Delivery { sender, is_answered: true, attempt, batch };
        if self.happens(self.network.duplicated) {
            let late_us = self.now_us + self.rng.u64(0..LATE_MAX_US);
            let copy = Delivery { is_answered: false, ..delivery.clone() };
            self.plan(late_us, Happening::Delivery(copy));
        }
        let at_us = self.now_us + self.one_way_us();
        self.plan(at_us, Happening::Delivery(delivery));
    }

    fn deliver(&mut self, delivery: Delivery) {
        if self.now_us < self.store.gone_until_us {
            return;
        }
        if self.now_us < self.store.hung_until_us {
            let late_us = self.store.hung_until_us + self.rng.u64(0..AFTER_HANG_US);
            let late = Delivery { is_answered: false, ..delivery };
            return self.plan(late_us, Happening::Delivery(late));
        }
        let reply = self.execute(&delivery);
        let Delivery { sender: node, is_answered, attempt, batch } = delivery;
        let is_cut_off = self.now_us < self.nodes[node].cut_until_us;
        if is_answered && !is_cut_off && !self.happens(self.network.reply_loss) {
            let at_us = self.now_us + self.one_way_us();
            self.plan(at_us, Happening::Answer { node, batch, attempt, reply });
        }
    }

    /// The store's answer to a batch. Notes by how much the records grow.
    fn execute(&mut self, delivery: &Delivery) -> Reply {
        let Delivery { sender, batch, .. } = delivery;
        let charged = |store: &SimulatedStore| -> Vec<i64> {
            let records = batch.entries.iter().map(|entry| store.record(&entry.limit, &entry.key));
            records.map(|record| record.map_or(0, |record| record.charged)).collect()
        };
        let before = charged(&self.store);
        let reply = self.store.sync(batch, self.now_us);
        let after = charged(&self.store);
        for (entry, (before, after)) in batch.entries.iter().zip(before.into_iter().zip(after)) {
            if let Some(tier) = NAMES.iter().position(|name| **name == *entry.limit) {
                let account = (*sender, key_of(&entry.key), tier);
                *self.charged.entry(account).or_default() += after - before;
            }
        }
        reply
    }

    // ---- faults ------------------------------------------------------------------------------

    fn apply_fault(&mut self, fault: Fault) {
        let now_us = self.now_us;
        let index = |place: u16| self.places[usize::from(place)];
        match fault {
            Fault::NodeDies { place } => self.kill(index(place)),
            Fault::NodeReplaced { place } => {
                self.kill(index(place));
                self.start(place.into());
            }
            Fault::NodePauses { place, for_us } => {
                let node = index(place);
                self.nodes[node].paused_until_us = now_us + for_us;
                // Its timer is due by then.
                self.nodes[node].timer_us = now_us + for_us;
                self.plan(now_us + for_us, Happening::Timer { node });
            }
            Fault::NodeCutOff { place, for_us } => {
                let node = index(place);
                self.nodes[node].cut_until_us = now_us + for_us;
            }
            Fault::StoreHangs { for_us } => self.store.hang(now_us + for_us),
            Fault::StoreGone { for_us } => self.store.vanish(now_us + for_us),
            Fault::StoreForgets => {
                for node in &mut self.nodes {
                    let from_us = node.reported_us().saturating_sub(REPORTED_US);
                    node.forgotten.push(from_us..now_us + REPORTED_US);
                }
                self.store.forget();
            }
            // The others are not drawn.
            _ => {}
        }
    }

    /// What it has not reported is lost with it.
    fn kill(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.is_alive() {
            let from_us = node.reported_us().saturating_sub(REPORTED_US);
            node.unreported.push(from_us..self.now_us + 1);
            node.die();
        }
    }
}

/// The number of a key, as requests have it.
fn key_of(name: &[u8]) -> u32 {
    name.first_chunk().map_or(u32::MAX, |bytes| u32::from_le_bytes(*bytes))
}
