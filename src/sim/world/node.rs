//! One node: the product's engine and buckets, and what the world notes about it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::super::clock::NodeClock;
use super::Happening;
use crate::bucket::{BucketRef, LeaseBucket, NotificationQueue, Table};
use crate::limit::{Credit, Terms};
use crate::sync::Engine;
use crate::sync::message::{Held, Request};

/// A request whose caller waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) key: u32,
    pub(super) cost: u32,
}

pub(in crate::sim) struct Node {
    pub(in crate::sim) engine: Engine,
    /// The buckets of each limit.
    pub(super) buckets: Vec<Arc<Table<LeaseBucket>>>,
    /// What a new key of each limit may spend before the store is heard.
    pub(super) credits: Vec<Credit>,
    /// The terms of each limit.
    pub(super) terms: Vec<Terms>,
    pub(super) notifications: NotificationQueue,
    pub(super) clock: NodeClock,
    /// The place that arrivals name.
    pub(super) place: u16,
    pub(super) born_us: u64,
    /// The last batch of each lane, if the ledger is kept.
    pub(super) sent: HashMap<u32, Arc<Request>>,
    pub(super) waiting: HashMap<u64, Waiting>,
    /// Tokens admitted.
    pub(in crate::sim) spent: u64,
    /// The same by key, if the ledger is kept.
    pub(in crate::sim) spent_on: HashMap<u32, u64>,
    /// Tokens that the store has charged for it, by key, if the ledger is kept.
    pub(in crate::sim) charged_on: HashMap<u32, u64>,
    /// Tokens that the store has confirmed.
    pub(super) acknowledged: u64,
    pub(super) timer_us: u64,
    pub(super) alive: bool,
    pub(super) paused_until_us: u64,
    /// What came while the node was paused.
    pub(super) missed: VecDeque<Happening>,
    pub(super) cut_until_us: u64,
    /// The buckets asked for, if the ledger is kept.
    pub(super) asked: HashMap<u32, BucketRef>,
}

impl Node {
    /// Whether it holds a lease on the key, or on any.
    pub(super) fn is_leased(&self, key: Option<u32>, now_us: u64) -> bool {
        let now = self.clock.now(now_us);
        let lease = |bucket: &BucketRef| self.engine.lease(bucket.account()?, now);
        let mut asked = self.asked.iter().filter(|(name, _)| key.is_none_or(|key| key == **name));
        self.alive && asked.any(|(_, bucket)| lease(bucket).is_some_and(|held| held.depth > 0))
    }

    /// What it holds of a key, if its lease has not ended.
    pub(super) fn lease(&self, key: u32, now_us: u64) -> Option<Held> {
        let bucket = self.asked.get(&key).filter(|_| self.alive)?;
        self.engine.lease(bucket.account()?, self.clock.now(now_us))
    }

    /// The depth and the tokens of a lease that holds more tokens than its depth.
    pub(super) fn overfull(&self, now_us: u64) -> Option<(i64, u32)> {
        let now = self.clock.now(now_us);
        self.asked.values().find_map(|bucket| {
            let depth = self.engine.lease(bucket.account()?, now)?.depth;
            let (tokens, _) = bucket.held_and_pending();
            (i64::from(tokens) > depth).then_some((depth, tokens))
        })
    }
}
