//! What is to happen in the world, in the order of its times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
#[cfg(all(test, feature = "redis"))]
use std::sync::Arc;

use super::super::faults::Fault;
use super::super::store::Delivery;
use super::slots::SlotHappening;
use crate::error::StoreError;
use crate::sync::message::Reply;
#[cfg(all(test, feature = "redis"))]
use crate::sync::message::Request;

/// What happened to the store, for tests that play it again.
#[cfg(all(test, feature = "redis"))]
#[derive(Clone, Debug)]
pub(in crate::sim) enum StoreCall {
    Sync { request: Arc<Request>, time_us: i64, reply: Reply },
    Forgets,
}

/// What happens in the world at one time.
#[derive(Debug)]
pub(super) enum Happening {
    Arrival {
        place: u16,
        key: u32,
        cost: u32,
    },
    /// A request reaches the store.
    Delivery(Delivery),
    /// The store has served the first of those that wait.
    Service,
    Answer {
        node: usize,
        lane: u32,
        attempt: u64,
        result: Result<Reply, StoreError>,
        /// Leases in it that have not ended by now.
        leases_alive: u64,
    },
    /// Something about slots of leaky buckets.
    Slots {
        node: usize,
        what: SlotHappening,
    },
    Timer {
        node: usize,
    },
    Resumption {
        node: usize,
    },
    Fault(Fault),
    /// A replica that is to take over later falls behind.
    ReplicaFallsBehind {
        takes_over_us: u64,
    },
}

#[derive(Debug)]
struct Scheduled {
    at_us: u64,
    order: u64,
    what: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.order) == (other.at_us, other.order)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.order).cmp(&(other.at_us, other.order))
    }
}

/// What is to happen, the first first; what is planned for the same time happens in the order of planning.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    queue: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
}

impl Timeline {
    pub(super) fn plan(&mut self, at_us: u64, what: Happening) {
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at_us, order: self.order, what }));
    }

    /// Takes what happens first, with its time, if that is not after `until_us`.
    pub(super) fn next(&mut self, until_us: u64) -> Option<(u64, Happening)> {
        self.queue.peek().filter(|Reverse(next)| next.at_us <= until_us)?;
        self.queue.pop().map(|Reverse(next)| (next.at_us, next.what))
    }
}
