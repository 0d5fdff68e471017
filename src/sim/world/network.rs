//! What passes between nodes and store.

use std::sync::Arc;

use super::super::setup::LATE_MAX_US;
use super::super::store::{Call, Delivery};
use super::World;
use super::audit::number_of;
use super::slots::SlotHappening;
use super::timeline::Happening;
#[cfg(all(test, feature = "redis"))]
use super::timeline::StoreCall;
use crate::error::StoreError;
use crate::sync::Input;
use crate::sync::message::{BatchVerdict, Grant, Reply, Request};
use crate::time::micros;

/// A store that goes on after it hung executes what was sent meanwhile within this time.
const AFTER_HANG_US: u64 = 1000;

impl World {
    fn one_way_us(&mut self, node: usize) -> u64 {
        let rtt_us = micros(self.setup.network.rtt_of(self.nodes[node].place));
        let late_us =
            if self.happens(self.setup.network.late) { self.rng.u64(0..LATE_MAX_US) } else { 0 };
        rtt_us / 4 + self.rng.u64(0..=rtt_us / 2) + late_us
    }

    pub(super) fn send(&mut self, node: usize, attempt: u64, request: Arc<Request>) {
        self.traffic.sent += 1;
        self.audit_batch(node, &request);
        if self.setup.audit {
            self.nodes[node].sent.insert(request.lane, request.clone());
        }
        if let Some(known) = self.setup.known_keys {
            let invented = request.entries.iter().filter(|entry| number_of(entry) >= known);
            self.traffic.invented_synced += invented.count() as u64;
        }
        self.transmit(node, Call::Sync { attempt, request });
    }

    /// A call leaves a node. Only batches, which nodes send again, may come twice.
    pub(super) fn transmit(&mut self, node: usize, call: Call) {
        let cut = self.now_us < self.nodes[node].cut_until_us;
        if cut || self.happens(self.setup.network.request_loss) {
            return;
        }
        let is_batch = matches!(call, Call::Sync { .. });
        if is_batch && self.happens(self.setup.network.duplicated) {
            let late_us = self.now_us + self.rng.u64(0..LATE_MAX_US);
            let copy = Delivery { node: None, call: call.clone() };
            self.plan(late_us, Happening::Delivery(copy));
        }
        let at_us = self.now_us + self.one_way_us(node);
        self.plan(at_us, Happening::Delivery(Delivery { node: Some(node), call }));
    }

    /// A request reaches the store.
    pub(super) fn deliver(&mut self, delivery: Delivery) {
        if self.now_us < self.store.gone_until_us {
            return;
        }
        if self.now_us < self.store.hung_until_us {
            // The sender gives up; the request is executed when the store goes on.
            let late_us = self.store.hung_until_us + self.rng.u64(0..AFTER_HANG_US);
            let late = Delivery { node: None, ..delivery };
            return self.plan(late_us, Happening::Delivery(late));
        }
        if self.store.is_idle(self.now_us) {
            return self.execute(&delivery);
        }
        if let Some(at_us) = self.store.join(delivery, self.now_us) {
            self.plan(at_us, Happening::Service);
        }
    }

    /// The store has served the first of its queue, unless it stood still.
    pub(super) fn serve(&mut self) {
        if !self.store.is_paused(self.now_us)
            && let Some(delivery) = self.store.served()
        {
            self.execute(&delivery);
        }
        if let Some(at_us) = self.store.first_served_us(self.now_us) {
            self.plan(at_us, Happening::Service);
        }
    }

    fn execute(&mut self, delivery: &Delivery) {
        let Delivery { node, call } = delivery;
        let service_us = self.store.service_us(call);
        self.traffic.store_busy_us += service_us;
        let (attempt, request) = match call {
            Call::Sync { attempt, request } => (*attempt, request),
            Call::Slots { number, request } => {
                self.traffic.store_useful_us += service_us;
                let reply = self.store.decide(request, self.now_us);
                if let Some(node) = *node {
                    let what = SlotHappening::Answer { number: *number, reply };
                    self.reply(node, Happening::Slots { node, what });
                }
                return;
            }
        };
        let resent = self.store.is_resent(request);
        let reply = self.store.sync(request, self.now_us);
        #[cfg(all(test, feature = "redis"))]
        if let Some(calls) = &mut self.calls {
            let (request, reply) = (request.clone(), reply.clone());
            let time_us = self.store.clock_us(self.now_us);
            calls.push(StoreCall::Sync { request, time_us, reply });
        }
        if !resent && let BatchVerdict::Applied(grants) = &reply.verdict {
            self.traffic.store_useful_us += service_us;
            self.traffic.leases_granted += grants.iter().filter_map(lease_life_us).count() as u64;
            self.store.note_applied(request);
        }
        self.book(request, &reply);
        if let Some(node) = *node {
            self.answer(node, attempt, request, reply);
        }
    }

    /// An answer leaves the store. Returns when it comes, unless it is lost.
    fn reply_comes_us(&mut self, node: usize) -> Option<u64> {
        let cut = self.now_us < self.nodes[node].cut_until_us;
        if cut || self.happens(self.setup.network.reply_loss) {
            return None;
        }
        Some(self.now_us + self.one_way_us(node))
    }

    /// An answer to a batch reaches a node, which may have given up.
    pub(super) fn receive(
        &mut self,
        index: usize,
        (lane, attempt): (u32, u64),
        result: Result<Reply, StoreError>,
        leases_alive: u64,
    ) {
        let Some(tokens) = self.nodes[index].engine.in_flight(lane, attempt) else { return };
        let now = self.nodes[index].clock.now(self.now_us);
        self.traffic.leases_alive += leases_alive;
        self.acknowledge(index, lane, tokens, &result);
        self.drain_notifications(index, now);
        self.nodes[index].engine.handle(now, Input::Answer { lane, attempt, result });
        self.pump(index);
    }

    fn reply(&mut self, node: usize, answer: Happening) {
        if let Some(at_us) = self.reply_comes_us(node) {
            self.plan(at_us, answer);
        }
    }

    fn answer(&mut self, node: usize, attempt: u64, request: &Request, reply: Reply) {
        let Some(at_us) = self.reply_comes_us(node) else { return };
        // The answer to a resend says when the batch was applied.
        let age_us = self.store.clock_us(at_us) - reply.time_us;
        let lives = |grant: &Grant| lease_life_us(grant).is_some_and(|life_us| life_us > age_us);
        let leases_alive = match &reply.verdict {
            BatchVerdict::Applied(grants) => {
                grants.iter().filter(|grant| lives(grant)).count() as u64
            }
            _ => 0,
        };
        let (lane, result) = (request.lane, Ok(reply));
        let answer = Happening::Answer { node, lane, attempt, result, leases_alive };
        self.plan(at_us, answer);
    }
}

/// How long the lease lasts that the store grants, or adds to, from now on.
fn lease_life_us(grant: &Grant) -> Option<i64> {
    match grant {
        Grant::Given(given) if given.tokens > 0 || given.rate > 0 => Some(given.life_us),
        _ => None,
    }
}
