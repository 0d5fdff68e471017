//! One node: the product's engine and buckets, and what the world notes about it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::super::clock::NodeClock;
use super::slots::{NodeSlots, SlotCalls};
use super::timeline::Happening;
use crate::bucket::{BucketRef, KeyBudget, KeyHasher, LeaseBucket, NotificationQueue, Table};
use crate::limit::{Credit, Terms};
use crate::sync::message::{Held, Request};
use crate::sync::{Config, Engine};
use crate::time::Timestamp;

/// Keys are not chosen to collide here: any numbers will do.
const SEEDS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];
/// Notifications for which a node has room at first.
const NOTIFICATIONS: usize = 1024;

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
    /// The slots of each limit that is a leaky bucket.
    pub(super) slots: Vec<Option<NodeSlots>>,
    pub(super) slot_calls: SlotCalls,
    /// What a new key of each limit may spend before the store answers.
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
    /// A node that is made of `config` and starts at `now_us` in `place`.
    pub(super) fn new(
        config: Config,
        (terms, slots): (Vec<Terms>, Vec<Option<NodeSlots>>),
        clock: NodeClock,
        place: u16,
        max_keys: usize,
        now_us: u64,
    ) -> Self {
        let limits = terms.len();
        let budget = Arc::new(KeyBudget::new(2 * max_keys * limits, limits));
        let table = |limit| {
            let table = Table::new(limit, KeyHasher::new(SEEDS), budget.clone(), 0);
            // Memory that is made up as it is written to; a world without any cannot go on.
            Arc::new(table.expect("memory for the keys of a run"))
        };
        Self {
            engine: Engine::new(config, clock.now(now_us)),
            buckets: (0..terms.len() as u32).map(table).collect(),
            slots,
            slot_calls: SlotCalls::default(),
            credits: terms.iter().map(|terms| terms.credit).collect(),
            terms,
            notifications: NotificationQueue::new(NOTIFICATIONS),
            clock,
            place,
            born_us: now_us,
            sent: HashMap::new(),
            waiting: HashMap::new(),
            spent: 0,
            spent_on: HashMap::new(),
            charged_on: HashMap::new(),
            acknowledged: 0,
            timer_us: u64::MAX,
            alive: true,
            paused_until_us: 0,
            missed: VecDeque::new(),
            cut_until_us: 0,
            asked: HashMap::new(),
        }
    }

    /// Frees what it holds: thousands of nodes may die. What it spent stays for the ledger.
    pub(super) fn die(&mut self) {
        self.alive = false;
        let (limits, lanes) = (Vec::new(), 0);
        let nothing =
            Config { limits, lanes, instance: [0; 16], seed: 0, retry_us: 0, max_nodes: None };
        self.engine = Engine::new(nothing, Timestamp::ZERO);
        self.buckets.clear();
        self.slots.clear();
        self.slot_calls = SlotCalls::default();
        self.asked.clear();
        self.missed.clear();
        self.notifications = NotificationQueue::new(0);
    }

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
