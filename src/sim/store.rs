//! The simulated store: the reference model of the script behind a clock that can step, a queue and
//! what can happen to its memory.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::setup::ServiceTime;
use crate::error::StoreError;
use crate::store::exact::{ExactModel, ExactReply, ExactRequest};
use crate::store::model::{Key, Model};
use crate::sync::message::{InstanceId, Reply, Request};

/// What the store's clock shows when the world's shows 0: a time of our days, so that it can step
/// back by any time.
const CLOCK_BEGINS_US: i64 = 1_700_000_000_000_000;

/// A request on its way to the store, or in its queue.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    /// The node that waits for the reply; none if it has given up.
    pub(super) node: Option<usize>,
    pub(super) call: Call,
}

/// What the store is asked.
#[derive(Clone, Debug)]
pub(super) enum Call {
    /// To take in a batch, in the attempt that the reply belongs to.
    Sync { attempt: u64, request: Arc<Request> },
    /// For slots of a key; the node knows the call by its number.
    Slots { number: u64, request: ExactRequest },
}

/// What the store remembers: what nodes lease from, and the slots of leaky buckets.
#[derive(Clone, Debug, Default)]
struct Memory {
    leased: Model,
    slots: ExactModel,
}

/// One life of a key's record, which expires when it has become useless.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordLife {
    /// Tokens charged since it was made.
    pub(super) charged: u64,
    /// When it was made, in lane time.
    pub(super) birth_us: i64,
    /// When it may expire, by the store's clock.
    pub(super) until_us: i64,
}

/// The model, and what it lives through.
#[derive(Debug)]
pub(super) struct SimulatedStore {
    memory: Memory,
    /// The store's clock less the world's, in microseconds.
    ahead_us: i64,
    /// Until then requests are executed later, and not answered.
    pub(super) hung_until_us: u64,
    /// Until then requests are lost.
    pub(super) gone_until_us: u64,
    /// Until then requests wait in the queue.
    stalled_until_us: u64,
    service: Option<ServiceTime>,
    /// Requests that have arrived and are not served; the first is being served.
    queue: VecDeque<Delivery>,
    /// The last batch of each node and lane that was applied, to recognise resends.
    applied: HashMap<(InstanceId, u32), i64>,
    saved: Option<Memory>,
    /// Replicas, by the time at which each takes over.
    replicas: HashMap<u64, Memory>,
}

impl SimulatedStore {
    pub(super) fn new(service: Option<ServiceTime>) -> Self {
        Self {
            memory: Memory::default(),
            ahead_us: CLOCK_BEGINS_US,
            hung_until_us: 0,
            gone_until_us: 0,
            stalled_until_us: 0,
            service,
            queue: VecDeque::new(),
            applied: HashMap::new(),
            saved: None,
            replicas: HashMap::new(),
        }
    }

    /// What the store's clock shows.
    pub(super) fn clock_us(&self, world_us: u64) -> i64 {
        world_us as i64 + self.ahead_us
    }

    /// One call of the script.
    pub(super) fn sync(&mut self, request: &Request, world_us: u64) -> Reply {
        let time_us = self.clock_us(world_us);
        self.memory.leased.sync(request, time_us)
    }

    /// One decision about slots.
    pub(super) fn decide(
        &mut self,
        request: &ExactRequest,
        world_us: u64,
    ) -> Result<ExactReply, StoreError> {
        let time_us = self.clock_us(world_us) as u64;
        self.memory.slots.decide(request, time_us)
    }

    // ---- the queue ---------------------------------------------------------------------------

    /// Whether a request that arrives now is served in no time.
    pub(super) fn is_idle(&self, world_us: u64) -> bool {
        self.service.is_none() && self.queue.is_empty() && world_us >= self.paused_until_us()
    }

    fn paused_until_us(&self) -> u64 {
        self.stalled_until_us.max(self.hung_until_us)
    }

    /// A request joins the queue. Returns when it is served if it is the first.
    pub(super) fn join(&mut self, delivery: Delivery, world_us: u64) -> Option<u64> {
        self.queue.push_back(delivery);
        (self.queue.len() == 1).then(|| self.first_served_us(world_us)).flatten()
    }

    /// When the first of the queue is served if its service begins now, or when the store goes on.
    pub(super) fn first_served_us(&self, world_us: u64) -> Option<u64> {
        let first = self.queue.front()?;
        Some(world_us.max(self.paused_until_us()) + self.service_us(&first.call))
    }

    /// Whether the store stands still, so that what would be served now has to wait.
    pub(super) fn is_paused(&self, world_us: u64) -> bool {
        world_us < self.paused_until_us()
    }

    /// The first of the queue, which has been served.
    pub(super) fn served(&mut self) -> Option<Delivery> {
        self.queue.pop_front()
    }

    /// How long the store takes for a call, in microseconds.
    pub(super) fn service_us(&self, call: &Call) -> u64 {
        let (keys, resent) = match call {
            Call::Sync { request, .. } => (request.entries.len(), self.is_resent(request)),
            Call::Slots { .. } => (1, false),
        };
        self.service.map_or(0, |service| service.of_call(keys, resent))
    }

    /// Whether a batch was applied before.
    pub(super) fn is_resent(&self, request: &Request) -> bool {
        let last = self.applied.get(&(request.instance, request.lane));
        last.is_some_and(|last| request.sequence <= *last)
    }

    /// Notes that a batch was applied.
    pub(super) fn note_applied(&mut self, request: &Request) {
        if self.service.is_some() {
            self.applied.insert((request.instance, request.lane), request.sequence);
        }
    }

    // ---- what can happen to it ---------------------------------------------------------------

    pub(super) fn hang(&mut self, until_us: u64) {
        self.hung_until_us = self.hung_until_us.max(until_us);
    }

    pub(super) fn vanish(&mut self, until_us: u64) {
        self.gone_until_us = self.gone_until_us.max(until_us);
    }

    pub(super) fn stall(&mut self, until_us: u64) {
        self.stalled_until_us = self.stalled_until_us.max(until_us);
    }

    pub(super) fn forget(&mut self) {
        self.memory = Memory::default();
        self.applied.clear();
    }

    pub(super) fn save(&mut self) {
        self.saved = Some(self.memory.clone());
    }

    /// Comes back as the last snapshot has it. Returns whether there is one.
    pub(super) fn restore(&mut self, world_us: u64) -> bool {
        let saved = self.saved.clone();
        self.come_back(saved, world_us)
    }

    pub(super) fn replica_falls_behind(&mut self, takes_over_us: u64) {
        self.replicas.insert(takes_over_us, self.memory.clone());
    }

    /// The replica of this time takes over. Returns whether there is one.
    pub(super) fn fail_over(&mut self, world_us: u64) -> bool {
        let replica = self.replicas.remove(&world_us);
        self.come_back(replica, world_us)
    }

    fn come_back(&mut self, memory: Option<Memory>, world_us: u64) -> bool {
        let Some(memory) = memory else { return false };
        self.memory = memory;
        self.applied.clear();
        self.expire(world_us);
        true
    }

    /// Deletes one key's record.
    pub(super) fn lose(&mut self, key: u32) {
        let name = key.to_le_bytes();
        self.memory.leased.keys.retain(|(_, key), _| key[..] != name);
        self.memory.slots.lose(&name);
    }

    /// Steps the clock. On a step ahead the records whose time is over by then are deleted.
    pub(super) fn step_clock(&mut self, by_us: i64, world_us: u64) {
        self.ahead_us += by_us;
        if by_us > 0 {
            self.expire(world_us);
        }
    }

    /// Redis deletes an expired record when it is asked for; the model does so now and then only.
    fn expire(&mut self, world_us: u64) {
        let time_us = self.clock_us(world_us);
        self.memory.leased.keys.retain(|_, key| key.until_ms > time_us / 1000);
        self.memory.slots.expire(time_us as u64);
    }

    // ---- its books ---------------------------------------------------------------------------

    /// The record of a key of `limit`, if the store has one.
    pub(super) fn record_of(&self, limit: &Arc<str>, key: &Arc<[u8]>) -> Option<RecordLife> {
        let Key { charged, birth_us, until_ms, .. } =
            *self.memory.leased.keys.get(&(limit.clone(), key.clone()))?;
        Some(RecordLife { charged: charged as u64, birth_us, until_us: 1000 * until_ms })
    }

    /// The record of a key.
    pub(super) fn record(&self, limit: &Arc<str>, key: &Arc<[u8]>) -> Option<&Key> {
        self.memory.leased.keys.get(&(limit.clone(), key.clone()))
    }

    /// How many nodes have the limit, by the last count.
    #[cfg(test)]
    pub(super) fn limit_nodes(&self, limit: &str) -> usize {
        self.memory.leased.limit_nodes.get(&(0, limit.into())).map_or(0, HashMap::len)
    }

    /// Tokens charged to all keys.
    #[cfg(test)]
    pub(super) fn charged(&self) -> u64 {
        self.memory.leased.keys.values().map(|key| key.charged as u64).sum()
    }
}
