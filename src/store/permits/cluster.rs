//! Nodes in virtual time, on a network that loses, delays and doubles messages, against the definition: never more permits
//! than the limit are held by nodes whose lease lasts, and where all is quiet a request gets one if there is room.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::collections::BTreeMap;

use super::{PermitModel, PermitRequest};
use crate::error::StoreError;
use crate::limit::{Concurrency, OutagePolicy};
#[cfg(feature = "server")]
use crate::store::timed_permits::TimedPermitRelease;
#[cfg(feature = "server")]
use crate::sync::TimedPermit;
use crate::sync::{
    PermitAsk, PermitId, PermitKey, PermitMessage, PermitOutput, PermitReply, Permits,
};
use crate::time::Timestamp;

const NODES: usize = 4;
/// A call that takes longer has failed.
const TIMEOUT_US: u64 = 100_000;
const LEASE_US: u64 = 2_000_000;
/// The figure that counts what is told of outages.
const OUTAGES: usize = 3;
/// By then a message that was late is overtaken.
#[cfg(feature = "server")]
const TOLD_AFTER_US: u64 = 1_000_000;

/// Something on its way.
#[derive(Clone)]
enum Parcel {
    Request {
        node: usize,
        message: PermitMessage,
        is_answered: bool,
    },
    Answer {
        node: usize,
        sequence: u64,
        result: Result<PermitReply, StoreError>,
    },
    #[cfg(feature = "server")]
    Release(PermitId),
}

/// A timed permit, or one that is to be.
#[cfg_attr(not(feature = "server"), allow(dead_code, reason = "no permit is handed over"))]
struct TimedHeld {
    node: usize,
    id: PermitId,
    cost: u32,
    /// Who handed it over does not wait for the outcome any more.
    is_left: bool,
    /// As that which it was: see [`Held`].
    is_orphan: bool,
}

/// A permit that a caller holds.
struct Held {
    node: usize,
    cost: u32,
    /// The lease of its node ended meanwhile: the cluster has given it to others.
    is_orphan: bool,
}

struct World {
    seed: u64,
    random: fastrand::Rng,
    now: u64,
    max: u32,
    policy: OutagePolicy,
    nodes: Vec<Permits>,
    store: PermitModel,
    key: PermitKey,
    parcels: BTreeMap<(u64, u64), Parcel>,
    parcels_sent: u64,
    is_sound: bool,
    cut_until: [u64; NODES],
    /// When the store forgets a node.
    lease_ends: [u64; NODES],
    last_heard: [u64; NODES],
    held: Vec<Held>,
    /// Permits that are handed over to the store, and those that it has.
    to_hand_over: Vec<TimedHeld>,
    timed: Vec<TimedHeld>,
    /// Those who wait for an answer, and whether they wait for their turn. Ordered, so that a seed plays the same run.
    open: [BTreeMap<u64, bool>; NODES],
    last_served: [u64; NODES],
    answers: BTreeMap<(usize, u64), bool>,
    figures: [u32; 6],
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let max = *random.choice(&[1, 2, 5, 20]).unwrap();
        let policies = [OutagePolicy::Closed, OutagePolicy::Share, OutagePolicy::Open];
        let policy = policies[(seed % 3) as usize];
        let limit = Concurrency::new("x", max).outage(policy);
        let terms = limit.validate(false, NODES as u32, 10).unwrap();
        Self {
            nodes: (0..NODES as u64).map(|node| Permits::new(terms.clone(), seed + node)).collect(),
            seed,
            random,
            now: 1_000_000,
            max,
            policy,
            store: PermitModel::default(),
            key: b"key"[..].into(),
            parcels: BTreeMap::new(),
            parcels_sent: 0,
            is_sound: false,
            cut_until: [0; NODES],
            lease_ends: [0; NODES],
            last_heard: [0; NODES],
            held: Vec::new(),
            to_hand_over: Vec::new(),
            timed: Vec::new(),
            open: Default::default(),
            last_served: [0; NODES],
            answers: BTreeMap::new(),
            figures: [0; 6],
        }
    }

    fn time(&self) -> Timestamp {
        Timestamp::from_micros(self.now)
    }

    fn post(&mut self, after_us: u64, parcel: Parcel) {
        self.parcels_sent += 1;
        self.parcels.insert((self.now + after_us, self.parcels_sent), parcel);
    }

    /// What happens to a message that a node sends.
    fn send(&mut self, node: usize, message: &PermitMessage) {
        let quick = self.random.u64(100..3000);
        let fate = if self.is_sound { 100 } else { self.random.u32(..100) };
        let sequence = message.sequence;
        let request = |is_answered| Parcel::Request { node, message: message.clone(), is_answered };
        let is_cut = self.now < self.cut_until[node];
        match fate {
            _ if is_cut => {}
            0..8 => {}
            8..16 => self.post(quick, request(false)),
            16..24 => {
                let late = self.random.u64(..600_000);
                self.post(late, request(false));
            }
            24..32 => {
                let late = self.random.u64(..600_000);
                self.post(late, request(false));
                self.post(quick, request(true));
            }
            _ => self.post(quick, request(true)),
        }
        if is_cut || fate < 24 {
            let lost = StoreError::Unreachable(String::new());
            self.post(TIMEOUT_US, Parcel::Answer { node, sequence, result: Err(lost) });
        }
    }

    fn deliver(&mut self, parcel: Parcel) {
        match parcel {
            Parcel::Answer { node, sequence, result } => {
                let (key, now) = (self.key.clone(), self.time());
                self.nodes[node].answered(&key, sequence, result, now);
                self.drain(node);
            }
            #[cfg(feature = "server")]
            Parcel::Release(id) => {
                let (limit, key) = ("x".into(), self.key.clone());
                self.store.release(&TimedPermitRelease { limit, key, id }, self.now);
            }
            Parcel::Request { node, message, is_answered } => {
                let (limit, key) = ("x".into(), self.key.clone());
                let (instance, sequence) = ([node as u8; 16], message.sequence);
                let request = PermitRequest { limit, key, instance, message };
                let reply = self.store.receive(&request, self.now).unwrap();
                // A message that others have overtaken renews nothing.
                if sequence > self.last_heard[node] {
                    self.last_heard[node] = sequence;
                    self.lease_ends[node] = self.now + LEASE_US;
                }
                if is_answered {
                    let back = self.random.u64(100..3000);
                    self.post(back, Parcel::Answer { node, sequence, result: Ok(reply) });
                }
            }
        }
    }

    fn drain(&mut self, node: usize) {
        while let Some(output) = self.nodes[node].poll_output() {
            match output {
                PermitOutput::Send { message, .. } => self.send(node, &message),
                PermitOutput::Outage(_) => self.figures[OUTAGES] += 1,
                PermitOutput::HandedOver { id, outcome } => self.handed_over(id, outcome.is_ok()),
                PermitOutput::Decided { ticket, cost, outcome, .. } => {
                    let waits = self.open[node].remove(&ticket).expect("it was not answered yet");
                    self.answers.insert((node, ticket), outcome.is_ok());
                    self.figures[usize::from(outcome.is_err())] += 1;
                    if outcome.is_ok() {
                        self.held.push(Held { node, cost, is_orphan: false });
                        if waits {
                            assert!(
                                ticket > self.last_served[node],
                                "seed {}: it overtook",
                                self.seed
                            );
                            self.last_served[node] = ticket;
                        }
                    }
                    self.check();
                }
            }
        }
    }

    /// Whoever handed a permit over is told that the store has it; or that it may not, and has it released.
    fn handed_over(&mut self, id: PermitId, is_taken_over: bool) {
        let place = self.to_hand_over.iter().position(|held| held.id == id).unwrap();
        let held = self.to_hand_over.swap_remove(place);
        self.figures[if is_taken_over { 4 } else { 5 }] += 1;
        if is_taken_over && !held.is_left {
            self.timed.push(held);
        } else {
            #[cfg(feature = "server")]
            self.post(TOLD_AFTER_US, Parcel::Release(id));
        }
        self.check();
    }

    /// Hands a permit of a caller over to the store.
    #[cfg(feature = "server")]
    fn hand_over(&mut self, place: usize) {
        let Held { node, cost, is_orphan } = self.held.swap_remove(place);
        let (key, id, now) = (self.key.clone(), self.random.u128(..).to_le_bytes(), self.time());
        self.to_hand_over.push(TimedHeld { node, id, cost, is_left: false, is_orphan });
        let timed = TimedPermit { id, permits: cost, time_us: 1_000_000_000 };
        self.nodes[node].hand_over(&key, timed, now);
        self.drain(node);
    }

    /// Whoever hands a permit over leaves before the outcome.
    #[cfg(feature = "server")]
    fn leave(&mut self, place: usize) {
        let (key, now) = (self.key.clone(), self.time());
        let TimedHeld { node, id, is_left, .. } = &mut self.to_hand_over[place];
        *is_left = true;
        let node = *node;
        if self.nodes[node].cancel_hand_over(&key, *id, now) {
            self.to_hand_over.swap_remove(place);
        }
        self.drain(node);
    }

    /// Releases a timed permit: the request may come late, and twice.
    #[cfg(feature = "server")]
    fn release_timed(&mut self, place: usize) {
        let TimedHeld { id, .. } = self.timed.swap_remove(place);
        let quick = self.random.u64(100..3000);
        let is_late = !self.is_sound && self.random.u32(..10) == 0;
        let after = if is_late { self.random.u64(..600_000) } else { quick };
        self.post(after, Parcel::Release(id));
        if self.random.u32(..10) == 0 {
            self.post(after + quick, Parcel::Release(id));
        }
    }

    /// All permits that somebody holds.
    fn in_flight(&self) -> u32 {
        let timed = self.timed.iter().map(|held| held.cost);
        timed.chain(self.held.iter().map(|held| held.cost)).sum()
    }

    /// The definition.
    fn check(&self) {
        let lasting = self.held.iter().filter(|held| !held.is_orphan).map(|held| held.cost);
        let timed = self.timed.iter().filter(|held| !held.is_orphan).map(|held| held.cost);
        let in_flight: u32 = lasting.chain(timed).sum();
        // Once an outage policy has begun, it may give permits beyond the limit.
        let had_policy = self.policy != OutagePolicy::Closed && self.figures[OUTAGES] > 0;
        let is_within = in_flight <= self.max || had_policy;
        assert!(is_within, "seed {}: {in_flight} of {} at {}", self.seed, self.max, self.now);
        // The store takes over nothing that an outage policy gave beyond the limit.
        let timed: u32 = self.timed.iter().map(|held| held.cost).sum();
        let (seed, max, now) = (self.seed, self.max, self.now);
        assert!(timed <= max, "seed {seed}: {timed} of {max} handed over at {now}");
    }

    /// Time passes: what is due happens.
    fn pass(&mut self, until: u64) {
        loop {
            let timeouts = self.nodes.iter().map(|node| node.poll_timeout().as_micros());
            let parcel = self.parcels.keys().next().map_or(u64::MAX, |(at, _)| *at);
            let at = timeouts.min().unwrap().min(parcel);
            if at > until {
                break;
            }
            self.now = at.max(self.now);
            for node in 0..NODES {
                for held in self.held.iter_mut().filter(|held| held.node == node) {
                    held.is_orphan |= self.lease_ends[node] <= self.now;
                }
            }
            if parcel <= at {
                let (_, parcel) = self.parcels.pop_first().unwrap();
                self.deliver(parcel);
                continue;
            }
            let now = self.time();
            for node in 0..NODES {
                self.nodes[node].tick(now);
                self.drain(node);
            }
        }
        self.now = until;
    }

    fn acquire(&mut self, node: usize, cost: u32, within_us: Option<u64>) -> Option<u64> {
        let (key, now) = (self.key.clone(), self.time());
        let asked = self.nodes[node].acquire(&key, PermitAsk { cost, within_us }, now);
        if let Ok(ticket) = asked {
            self.open[node].insert(ticket, within_us.is_some());
        }
        self.drain(node);
        asked.ok()
    }

    fn release(&mut self, place: usize) {
        let Held { node, cost, .. } = self.held.swap_remove(place);
        let (key, now) = (self.key.clone(), self.time());
        self.nodes[node].release(&key, cost, now);
        self.drain(node);
    }

    fn act(&mut self) {
        let node = self.random.usize(..NODES);
        match self.random.u32(..100) {
            0..35 => {
                let within_us = self.random.u64(..3_000_000);
                self.acquire(node, 1, Some(within_us));
            }
            35..55 => {
                let most = if self.random.bool() { 1 } else { self.max };
                let cost = self.random.u32(1..=most);
                self.acquire(node, cost, None);
            }
            55..58 => {
                let open: Vec<u64> = self.open[node].keys().copied().collect();
                if let Some(ticket) = self.random.choice(open) {
                    self.open[node].remove(&ticket);
                    let (key, now) = (self.key.clone(), self.time());
                    self.nodes[node].cancel(&key, ticket, now);
                    self.drain(node);
                }
            }
            58..60 => {
                self.cut_until[node] = self.now + self.random.u64(..8_000_000);
                self.figures[2] += 1;
            }
            #[cfg(feature = "server")]
            60..70 if !self.held.is_empty() => {
                let place = self.random.usize(..self.held.len());
                self.hand_over(place);
            }
            #[cfg(feature = "server")]
            70..73 if !self.to_hand_over.is_empty() => {
                let place = self.random.usize(..self.to_hand_over.len());
                self.leave(place);
            }
            #[cfg(feature = "server")]
            70..80 if !self.timed.is_empty() => {
                let place = self.random.usize(..self.timed.len());
                self.release_timed(place);
            }
            60..95 if !self.held.is_empty() => {
                let place = self.random.usize(..self.held.len());
                self.release(place);
            }
            _ => {}
        }
    }

    /// Where all is quiet, a request is decided by the definition.
    fn probe(&mut self) {
        self.is_sound = true;
        self.cut_until = [0; NODES];
        self.pass(self.now + 4_000_000);
        assert!(self.open.iter().all(BTreeMap::is_empty), "seed {}: all were answered", self.seed);
        for _ in 0..3 {
            if !self.held.is_empty() && self.random.bool() {
                let place = self.random.usize(..self.held.len());
                self.release(place);
                self.pass(self.now + 20_000);
            }
            let (node, cost) = (self.random.usize(..NODES), self.random.u32(1..=self.max));
            let in_flight = self.in_flight();
            let ticket = self.acquire(node, cost, None).expect("it is asked");
            self.pass(self.now + 50_000);
            let expected = in_flight + cost <= self.max;
            let seed = self.seed;
            let answer = self.answers[&(node, ticket)];
            assert_eq!(answer, expected, "seed {seed}: {cost} beside {in_flight}");
            #[cfg(feature = "server")]
            if expected && self.random.bool() {
                // While another caller asks, and soon.
                self.acquire(node, 1, None);
                self.hand_over(self.held.iter().position(|held| held.node == node).unwrap());
                self.pass(self.now + 20_000);
                assert!(self.to_hand_over.is_empty(), "seed {seed}: the store has it");
            }
        }
        self.is_sound = false;
    }
}

#[test]
fn nodes_hold_no_more_than_the_limit_whatever_is_lost_late_or_doubled() {
    let mut figures = [0; 6];
    for seed in 0..600 {
        let mut world = World::new(seed);
        for step in 0..400 {
            let until = world.now + world.random.u64(..60_000);
            world.pass(until);
            world.act();
            if step % 100 == 99 {
                world.probe();
            }
        }
        while !world.held.is_empty() {
            world.release(0);
        }
        world.probe();
        while !world.held.is_empty() {
            world.release(0);
        }
        #[cfg(feature = "server")]
        while !world.timed.is_empty() {
            world.release_timed(0);
        }
        world.is_sound = true;
        world.pass(world.now + 4_000_000);
        assert!(world.nodes.iter().all(Permits::is_empty), "seed {seed}: nothing is left");
        assert!(world.to_hand_over.is_empty(), "seed {seed}: all have been told");
        let ticket = world.acquire(0, world.max, None).expect("it is asked");
        world.pass(world.now + 50_000);
        assert!(world.answers[&(0, ticket)], "seed {seed}: all permits are free");
        for (sum, figure) in figures.iter_mut().zip(world.figures) {
            *sum += figure;
        }
    }
    println!("{figures:?}: granted, denied, cut off, outages, handed over, and not");
    let most = if cfg!(feature = "server") { 6 } else { 4 };
    assert!(figures[..most].iter().all(|&figure| figure > 300), "{figures:?}");
}
