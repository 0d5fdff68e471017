//! The control plane: a pure state machine with no clock, socket, task or global randomness in it.
//!
//! # Run loop
//!
//! The owner calls [`handle`](Engine::handle) with each input and the time it came, then drains
//! [`poll_output`](Engine::poll_output) until it returns `None`, then waits for the next input, but
//! no longer than until [`poll_timeout`](Engine::poll_timeout), when it hands in
//! [`Input::Timeout`]. Each [`Output::Send`] is to be answered by at most one [`Input::Answer`],
//! whether or not the exchange succeeded. The engine itself counts an attempt as failed that takes too
//! long; an answer that comes later is welcome. The driver does this over tokio and a store; tests and
//! simulations do it over virtual time.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;

use super::account::{DecisionCounts, Paces, REFUSAL_EVENTS_US, Waiter};
use super::event::Event;
use super::excess::{ExcessBooks, Known, LaneTrouble, Turnover};
use super::lane::{Lane, NAMING_LANE};
#[cfg(feature = "sim")]
use super::message::Held;
use super::message::{Entry, Grant, InstanceId, Reply, Request};
use super::nodes::Nodes;
use super::rng::Rng;
use crate::bound::Excess;
use crate::bucket::{BucketRef, LimitCounts};
use crate::error::StoreError;
use crate::key::{OVERFLOW_NAME, lane_of};
use crate::limit::{Credit, Mode, OutagePolicy, Terms};
use crate::quota::Scale;
use crate::time::Timestamp;

/// A lane that all nodes can reach is never silent for so long: a heartbeat with its jitter, and what
/// becomes of one that is lost.
const SILENCE_MIN_US: u64 = 1_500_000;
const SILENCE_BEYOND_TIMEOUT_US: u64 = 1_200_000;

/// More new keys a second than this are a flood, and so are as many at once.
const NEWCOMERS_PER_SECOND: u64 = 100;

/// What an engine is made of.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) limits: Vec<(Arc<str>, Terms)>,
    pub(crate) lanes: u32,
    pub(crate) instance: InstanceId,
    /// Seeds the jitter.
    pub(crate) seed: u64,
    /// How long an exchange may take, and the longest wait before the next attempt.
    pub(crate) retry_us: u64,
    /// The nodes that share each limit while the store has not counted them.
    pub(crate) max_nodes: Option<u32>,
}

/// What can happen to an engine.
#[derive(Debug)]
pub(crate) enum Input {
    /// A decision has told of this bucket.
    Touched { bucket: BucketRef, told: Told },
    /// A caller waits for the store's word on a request of `key`.
    Wait { bucket: BucketRef, key: Arc<[u8]>, waiter: Waiter },
    /// An exchange came to an end.
    Answer { lane: u32, attempt: u64, result: Result<Reply, StoreError> },
    /// Time has passed.
    Timeout,
    /// The node is leaving: report everything and give everything back.
    Leave,
}

/// What a decision has told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// The key, if the engine may not know it.
    pub(crate) key: Option<Arc<[u8]>>,
    /// When the decision was taken.
    pub(crate) at: Timestamp,
    /// Pending tokens that no longer fitted the bucket's word.
    pub(crate) spilled: u32,
    /// What a denied request cost, if that was more than one token.
    pub(crate) refused: u32,
}

/// Where the books on a key are: the lane, and its place there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccountId {
    pub(crate) lane: u32,
    pub(crate) slot: usize,
}

/// What an engine wants done.
#[derive(Debug)]
pub(crate) enum Output {
    /// Send this batch to the store and hand in the outcome. The lane's attempts have numbers of their own.
    Send { lane: u32, attempt: u64, request: Arc<Request> },
    /// The answer to somebody who waited.
    Decided { ticket: u64, allowed: bool, sure: bool },
    /// Keys of the limit that are not in the books have this credit from now on.
    Credit { limit: u32, credit: Credit },
    /// Tell whoever listens.
    Event(Event),
}

/// A limit, as the engine keeps it.
#[derive(Debug)]
pub(crate) struct LimitBooks {
    pub(crate) name: Arc<str>,
    pub(crate) terms: Terms,
    /// The nodes that have it.
    pub(crate) nodes: Nodes,
    pub(crate) turnover: Turnover,
    pub(crate) counts: DecisionCounts,
    pub(crate) excess: ExcessBooks,
    pub(crate) paces: Paces,
    /// The newest quota that the store was seen to hold, if it is newer than the limit's own: its version.
    pub(crate) newest: Option<(i64, Scale)>,
    /// Decisions about keys for which there was no room.
    overflowed: u64,
    /// Keys of the limit lived on its outage policy when that was looked at last.
    pub(crate) on_policy: bool,
    pub(crate) told_of_missing_credit: bool,
    /// A quota mismatch is told about again from then on.
    mismatch_from: Timestamp,
}

impl LimitBooks {
    /// Whether nodes share it.
    pub(crate) fn is_shared(&self) -> bool {
        self.terms.mode != Mode::Local
    }
}

/// What lanes share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) limits: Vec<LimitBooks>,
    pub(crate) lanes: u32,
    pub(crate) recovery_us: u64,
    pub(crate) lease_us: u64,
    pub(crate) silence_us: u64,
    pub(crate) retry_us: u64,
    pub(crate) rng: Rng,
    pub(crate) outputs: VecDeque<Output>,
    /// All books of all lanes, by the number that their buckets have.
    pub(crate) accounts: Slab<AccountId>,
    /// The nodes that each lane has counted last.
    nodes_by_lane: Vec<Option<i64>>,
    /// The number of nodes has changed: those of each limit are to be counted anew.
    nodes_changed: bool,
    /// Losses of memory that lanes have found.
    pub(crate) losses: u64,
    pub(crate) known: Known,
    /// No lane could be reached when that was looked at last.
    pub(crate) all_down: bool,
    /// The lane that asks most often whether the store is back, for all that wait for it.
    pub(crate) prober: Option<u32>,
    /// Up to when keys that come into the books have used up what a node expects of them.
    newcomers_until: Timestamp,
}

impl Context {
    pub(crate) fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    /// Whether no more keys come into the books than usual. In a flood of new keys most come once: they get
    /// no lease, so that they cost one sync.
    pub(crate) fn expects_newcomer(&mut self, now: Timestamp) -> bool {
        let expected = self.newcomers_until <= now.plus_micros(1_000_000);
        if expected {
            let gap_us = 1_000_000 / NEWCOMERS_PER_SECOND;
            self.newcomers_until = self.newcomers_until.max(now).plus_micros(gap_us);
        }
        expected
    }

    /// The number of nodes that share a limit.
    pub(crate) fn sharing(&self, limit: u32, now: Timestamp) -> i64 {
        let limit = &self.limits[limit as usize];
        limit.nodes.sharing(limit.terms.scale.fill_us(), now)
    }

    /// The number of nodes that share a limit in an outage.
    pub(crate) fn sharing_in_outage(&self, limit: u32, now: Timestamp) -> i64 {
        let limit = &self.limits[limit as usize];
        limit.nodes.sharing_in_outage(limit.terms.scale.fill_us(), now)
    }

    /// The limits that nodes share.
    fn shared(&self) -> impl Iterator<Item = &LimitBooks> {
        self.limits.iter().filter(|limit| limit.is_shared())
    }

    /// Their names.
    pub(crate) fn shared_limits(&self) -> impl Iterator<Item = &Arc<str>> {
        self.shared().map(|limit| &limit.name)
    }

    /// The most nodes that a lane has counted last, 0 before one has.
    pub(crate) fn alive(&self) -> i64 {
        self.nodes_by_lane.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Takes the count of nodes from a lane's reply.
    pub(crate) fn counted(&mut self, lane: u32, nodes: i64, now: Timestamp) {
        self.nodes_by_lane[lane as usize] = Some(nodes);
        let all = self.alive();
        let count = u32::try_from(all).unwrap_or(u32::MAX);
        let stood = self.shared().all(|limit| limit.nodes.have_stood());
        if !self.known.nodes.count(count, stood) {
            return;
        }
        self.nodes_changed = true;
        let mut changed = false;
        for limit in &mut self.limits {
            changed |= limit.nodes.are_among(all);
        }
        if changed {
            self.set_credit(now);
        }
        self.raise_bounds(LaneTrouble::default());
    }

    /// Takes the counts of nodes that have each shared limit, in the limits' order from number `first` on. Their
    /// lane has so many nodes in `all`.
    pub(crate) fn counted_of_limits(
        &mut self,
        first: usize,
        counts: &[i64],
        all: i64,
        now: Timestamp,
    ) {
        let alive = self.alive();
        let mut changed = false;
        let shared = self.limits.iter_mut().filter(|limit| limit.is_shared()).skip(first);
        for (limit, nodes) in shared.zip(counts) {
            let nodes = (*nodes).max(1);
            limit.nodes.counted(nodes, all, now);
            limit.nodes.are_among(alive);
            let count = u32::try_from(nodes).unwrap_or(u32::MAX);
            changed |= limit.turnover.count(count, limit.nodes.have_stood());
        }
        self.set_credit(now);
        self.tell_of_missing_credit();
        if changed {
            self.raise_bounds(LaneTrouble::default());
        }
    }

    /// Whether there is a shared limit whose nodes nobody has counted or configured: then counts are taken of a lane
    /// too that still waits for some of its nodes.
    pub(crate) fn is_any_count_missing(&self) -> bool {
        self.shared().any(|limit| limit.nodes.unknown())
    }

    /// When the first count that has not stood yet will have: the store is to be asked again then.
    pub(crate) fn counts_stand_from(&self) -> Option<Timestamp> {
        self.shared().filter_map(|limit| limit.nodes.stands_from()).min()
    }

    /// A lane was found to have lost its memory.
    pub(crate) fn memory_lost(&mut self, now: Timestamp) {
        self.losses += 1;
        for limit in &mut self.limits {
            limit.nodes.memory_lost(now);
        }
        self.set_credit(now);
    }

    /// Sets each limit's credit according to the number of nodes.
    pub(crate) fn set_credit(&mut self, now: Timestamp) {
        for (index, limit) in (0..).zip(&mut self.limits) {
            if limit.terms.mode == Mode::Local {
                continue;
            }
            // A closed limit admits nothing while the store is away, new keys included.
            let closed =
                limit.on_policy && limit.terms.outage == OutagePolicy::Closed && self.all_down;
            let credit = if closed {
                Credit::NONE
            } else {
                limit.nodes.credit(&limit.terms.credit_rule, limit.terms.scale.fill_us(), now)
            };
            if std::mem::replace(&mut limit.terms.credit, credit) != credit {
                self.outputs.push_back(Output::Credit { limit: index, credit });
            }
        }
    }

    pub(crate) fn limit_name(&self, limit: u32) -> Arc<str> {
        self.limits[limit as usize].name.clone()
    }

    pub(crate) fn draw_instance(&mut self) -> InstanceId {
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        instance[8..].copy_from_slice(&self.rng.next().to_le_bytes());
        instance
    }

    /// The store refused one key of a batch.
    pub(crate) fn refused(&mut self, limit: u32, entry: &Entry, grant: &Grant, now: Timestamp) {
        let event = match *grant {
            Grant::OtherQuota { version, scale } => {
                let from = &mut self.limits[limit as usize].mismatch_from;
                if now < *from {
                    return;
                }
                *from = now.plus_micros(REFUSAL_EVENTS_US);
                Event::QuotaMismatch {
                    limit: entry.limit.clone(),
                    configured_version: entry.version,
                    stored_version: version,
                    stored_burst: scale.burst / scale.token,
                    stored_per_second: scale.rate as f64 * 1e6 / scale.token as f64,
                }
            }
            Grant::Foreign | Grant::Given(_) => Event::ForeignKey {
                error: StoreError::ForeignKey {
                    key: format!("{}:{}", entry.limit, String::from_utf8_lossy(&entry.key)),
                    found: "value".to_owned(),
                },
            },
        };
        self.event(event);
    }

    /// The store gave to a key whose level it said to be `level`, in units.
    pub(crate) fn agreed(&mut self, limit: u32, level: i64) {
        let limit = &mut self.limits[limit as usize];
        limit.excess.saw(level);
    }
}

/// Totals for gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gauges {
    /// Tokens spent and not acknowledged by the store.
    pub(crate) pending: u64,
    /// Tokens that leases may hold.
    pub(crate) leased_depth: i64,
    /// Nodes alive, 0 while unknown.
    pub(crate) nodes: i64,
    /// Lanes that cannot be reached.
    pub(crate) lanes_down: usize,
}

/// The engine of one node.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) lanes: Vec<Lane>,
    pub(crate) context: Context,
}

impl Engine {
    pub(crate) fn new(config: Config, now: Timestamp) -> Self {
        let epoch_us = config.limits.iter().map(|(_, terms)| terms.epoch_us).max().unwrap_or(0);
        let tick_us = config.limits.iter().map(|(_, terms)| terms.tick_us).max().unwrap_or(0);
        let mut context = Context {
            limits: config
                .limits
                .into_iter()
                .map(|(name, terms)| LimitBooks {
                    name,
                    terms,
                    nodes: Nodes::new(config.max_nodes, config.retry_us),
                    turnover: Turnover::default(),
                    counts: DecisionCounts::default(),
                    excess: ExcessBooks::default(),
                    paces: Paces::default(),
                    newest: None,
                    overflowed: 0,
                    on_policy: false,
                    told_of_missing_credit: false,
                    mismatch_from: Timestamp::ZERO,
                })
                .collect(),
            lanes: config.lanes,
            recovery_us: 5 * tick_us + 2 * config.retry_us,
            lease_us: 2 * epoch_us,
            silence_us: SILENCE_MIN_US.max(SILENCE_BEYOND_TIMEOUT_US + config.retry_us),
            retry_us: config.retry_us,
            rng: Rng::new(config.seed),
            outputs: VecDeque::new(),
            accounts: Slab::new(),
            losses: 0,
            known: Known::default(),
            all_down: false,
            prober: None,
            newcomers_until: Timestamp::ZERO,
            nodes_by_lane: vec![None; config.lanes as usize],
            nodes_changed: false,
        };
        context.set_credit(now);
        let lanes = (0..config.lanes).map(|lane| Lane::new(lane, config.instance, now)).collect();
        Self { lanes, context }
    }

    /// Takes in what happened at `now`.
    pub(crate) fn handle(&mut self, now: Timestamp, input: Input) {
        match input {
            Input::Touched { bucket, told } => self.touched(bucket, told, now),
            Input::Wait { bucket, key, waiter } => {
                let account = self.account(bucket, Some(key), now);
                // The batch goes with the next timeout, so that it asks for all who come till then.
                if let Some(AccountId { lane, slot }) = account {
                    self.lanes[lane as usize].wait(slot, waiter, now, &mut self.context);
                }
            }
            Input::Answer { lane, attempt, result } => {
                let number = lane as usize;
                self.lanes[number].catch_up(now, &mut self.context);
                let (losses, was_down) = (self.context.losses, self.lanes[number].is_down());
                self.lanes[number].answer(attempt, result, now, &mut self.context);
                self.lanes[number].advance(now, &mut self.context);
                let is_back = was_down && !self.lanes[number].is_down();
                if is_back && self.context.prober == Some(lane) {
                    self.context.prober = None;
                    for lane in &mut self.lanes {
                        lane.retry_now(now, &mut self.context);
                    }
                }
                if std::mem::take(&mut self.context.nodes_changed) {
                    let lane = &mut self.lanes[NAMING_LANE as usize];
                    lane.name_limits_soon(now, &self.context);
                    lane.advance(now, &mut self.context);
                }
                if self.context.losses > losses {
                    // What happened to one lane has probably happened to all.
                    for lane in &mut self.lanes {
                        lane.call_soon(now);
                        lane.advance(now, &mut self.context);
                    }
                }
            }
            Input::Timeout => {
                for lane in &mut self.lanes {
                    lane.advance(now, &mut self.context);
                }
            }
            Input::Leave => {
                for lane in &mut self.lanes {
                    lane.leave(now);
                    lane.advance(now, &mut self.context);
                }
            }
        }
    }

    fn touched(&mut self, bucket: BucketRef, told: Told, now: Timestamp) {
        let Told { key, at, spilled, refused } = told;
        if let Some(AccountId { lane, slot }) = self.account(bucket, key, now) {
            let lane = &mut self.lanes[lane as usize];
            lane.touch(slot, at, spilled, refused, now, &mut self.context);
        }
    }

    /// Where the books on the key are; they are opened if there are none.
    fn account(
        &mut self,
        bucket: BucketRef,
        key: Option<Arc<[u8]>>,
        now: Timestamp,
    ) -> Option<AccountId> {
        if let Some(number) = bucket.account() {
            return self.context.accounts.get(number as usize).copied();
        }
        // Whoever finds no books has told the key, unless what is told is a hint and comes too late.
        let key = if bucket.is_overflow() { OVERFLOW_NAME[..].into() } else { key? };
        let name = &self.context.limits[bucket.limit() as usize].name;
        let lane = lane_of(name, &key, self.context.lanes);
        let slot = self.lanes[lane as usize].open(bucket, key, now, &mut self.context);
        Some(AccountId { lane, slot })
    }

    /// The next thing to be done; drained before anything is waited for.
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.context.outputs.pop_front()
    }

    /// When [`Input::Timeout`] is due.
    pub(crate) fn poll_timeout(&self) -> Timestamp {
        self.lanes.iter().map(Lane::timeout).min().unwrap_or(Timestamp::NEVER)
    }

    /// Whether every lane was reached and none recovers from a loss of memory.
    pub(crate) fn is_ready(&self, now: Timestamp) -> bool {
        self.lanes.iter().all(|lane| lane.is_ready(now))
    }

    /// What keeps a lane from answering, if one does not.
    pub(crate) fn error(&self) -> Option<&StoreError> {
        self.lanes.iter().find_map(Lane::error)
    }

    /// Whether nothing is left to report or to give back.
    pub(crate) fn is_settled(&self) -> bool {
        self.lanes.iter().all(Lane::is_settled)
    }

    /// So much was counted of a limit's decisions beside what its buckets tell.
    pub(crate) fn counted(&mut self, limit: u32, counts: LimitCounts) {
        let limit = &mut self.context.limits[limit as usize];
        let LimitCounts { allowed, unsure, denied, denied_surplus, overflowed } = counts;
        limit.overflowed += overflowed;
        limit.counts.merge(DecisionCounts { allowed, denied, unsure, denied_surplus });
    }

    /// Decisions collected since the last time.
    pub(crate) fn take_decisions(&mut self, now: Timestamp) -> Vec<Event> {
        for lane in &mut self.lanes {
            lane.count_policies(now, &mut self.context);
        }
        let tell = |limit: &mut LimitBooks| {
            let DecisionCounts { allowed, denied, unsure, denied_surplus } =
                std::mem::take(&mut limit.counts);
            // What no report has told of yet is left for the next time.
            let surplus = denied_surplus.min(denied);
            limit.counts.denied_surplus = denied_surplus - surplus;
            let denied = denied - surplus;
            let overflowed = std::mem::take(&mut limit.overflowed);
            let limit = limit.name.clone();
            (allowed + denied + unsure + overflowed > 0).then_some(Event::Decisions {
                limit,
                allowed,
                denied,
                unsure,
                overflowed,
            })
        };
        self.context.limits.iter_mut().filter_map(tell).collect()
    }

    /// Tokens in the batch of `lane` that was sent with this attempt, if it is in flight.
    #[cfg(feature = "sim")]
    pub(crate) fn in_flight(&self, lane: u32, attempt: u64) -> Option<u64> {
        self.lanes[lane as usize].in_flight(attempt)
    }

    /// The cached clock stood still for longer than leases allow for, and the owner of this did nothing for
    /// `held_up_us` meanwhile.
    pub(crate) fn clock_stalled(&mut self, stall_us: u64, held_up_us: u64) {
        // The process was frozen for longer than a lease lives: whatever it held had ended, and none was renewed.
        let ended = stall_us.min(held_up_us) >= self.context.lease_us;
        if !ended || self.lanes.iter().any(Lane::has_policies) {
            self.context.known.stalled(stall_us);
        }
    }

    /// What is known of each limit's excess, in the limits' order.
    pub(crate) fn excess(&mut self) -> Vec<Excess> {
        let troubles = self.lanes.iter().map(Lane::trouble);
        let trouble = troubles.fold(LaneTrouble::default(), LaneTrouble::worst);
        self.context.raise_bounds(trouble);
        self.context.excess()
    }

    /// Tokens spent and not acknowledged by the store, to the last one.
    #[cfg(feature = "sim")]
    pub(crate) fn pending(&self) -> u64 {
        self.lanes.iter().map(Lane::pending).sum()
    }

    /// The lease that the account at this desk has at `now`.
    #[cfg(feature = "sim")]
    pub(crate) fn lease(&self, number: u32, now: Timestamp) -> Option<Held> {
        let AccountId { lane, slot } = *self.context.accounts.get(number as usize)?;
        self.lanes[lane as usize].lease(slot, now)
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let mut gauges = Gauges { nodes: self.context.alive(), ..Gauges::default() };
        for lane in &self.lanes {
            let (pending, leased_depth) = lane.gauges();
            gauges.pending += pending;
            gauges.leased_depth += leased_depth;
            gauges.lanes_down += usize::from(lane.is_down());
        }
        gauges
    }
}
