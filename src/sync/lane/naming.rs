//! Naming limits to the store, so that it counts the nodes of each.

use std::sync::Arc;

use crate::sync::context::Context;
use crate::time::Timestamp;

/// The nodes that have a limit are counted in this lane only: a node names its limits there, in one batch after the
/// other until all are named.
pub(crate) const NAMING_LANE: u32 = 0;
/// The most limits that one batch names.
const LIMITS_NAMED_MAX: usize = 16;
/// A pass begins again after this long for each of its batches.
pub(super) const NAMING_GAP_US: u64 = 500_000;
/// The same while a count has not stood yet, and where the number of nodes has changed.
const NAMING_GAP_SHORT_US: u64 = 100_000;

/// Passes in which all shared limits are named.
#[derive(Debug)]
pub(super) struct Naming {
    /// How many have been named in this pass.
    pub(super) named: usize,
    /// When the next pass may begin.
    pub(super) next_at: Timestamp,
    /// When the last pass ended.
    ended: Timestamp,
}

impl Naming {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { named: 0, next_at: now, ended: now }
    }

    /// A new pass begins now.
    pub(super) fn restart(&mut self, now: Timestamp) {
        (self.named, self.next_at) = (0, now);
    }

    /// The limits that a batch names which is sent now: all in the last one of a node that leaves.
    pub(super) fn limits(&self, leaving: bool, now: Timestamp, context: &Context) -> Vec<Arc<str>> {
        let limits = context.shared_limits().cloned();
        if leaving {
            limits.collect()
        } else if now >= self.next_at {
            limits.skip(self.named).take(LIMITS_NAMED_MAX).collect()
        } else {
            Vec::new()
        }
    }

    /// The number of nodes has changed: the next pass begins soon. Returns when.
    pub(super) fn begin_soon(&mut self, now: Timestamp, context: &Context) -> Timestamp {
        let gap_us = batches(context) * NAMING_GAP_SHORT_US;
        let soon = self.ended.plus_micros(gap_us).max(now);
        self.next_at = self.next_at.min(soon);
        soon
    }

    /// The store has counted the nodes of `count` more limits. Returns when it is to be called again.
    pub(super) fn counted(&mut self, count: usize, now: Timestamp, context: &Context) -> Timestamp {
        self.named += count;
        if self.named < context.shared_limits().count() {
            return now;
        }
        let stand_from = context.counts_stand_from();
        let gap_us = if stand_from.is_some() { NAMING_GAP_SHORT_US } else { NAMING_GAP_US };
        self.named = 0;
        self.ended = now;
        self.next_at = now.plus_micros(batches(context) * gap_us);
        stand_from.map_or(Timestamp::NEVER, |stand_from| stand_from.max(self.next_at))
    }
}

/// The longest time between two batches that name the same limit, beside heartbeats, in microseconds.
pub(crate) fn pass_us(context: &Context) -> u64 {
    batches(context) * NAMING_GAP_US
}

/// Batches in which all shared limits can be named.
fn batches(context: &Context) -> u64 {
    context.shared_limits().count().div_ceil(LIMITS_NAMED_MAX) as u64
}
