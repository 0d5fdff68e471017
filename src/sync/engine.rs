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

use std::sync::Arc;

use super::account::{ResetWaiter, Settlement, Touch, Waiter};
use super::context::{AccountId, Context, LimitBooks, LimitConfig, Output, Timings};
use super::event::Event;
use super::excess::LaneTrouble;
use super::lane::{Lane, NAMING_LANE, pass_us};
#[cfg(feature = "sim")]
use super::message::Held;
use super::message::{InstanceId, Reply};
use super::nodes::Nodes;
use crate::bound::Excess;
use crate::bucket::{BucketRef, LimitCounts};
use crate::error::StoreError;
use crate::key::{OVERFLOW_NAME, lane_of};
use crate::limit::LimitInfo;
use crate::time::Timestamp;

/// A lane that all nodes can reach is never silent for this long: a heartbeat with its jitter, and what
/// becomes of one that is lost.
const SILENCE_MIN_US: u64 = 1_500_000;
const SILENCE_BEYOND_TIMEOUT_US: u64 = 1_200_000;

/// What an engine is made of.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) limits: Vec<LimitConfig>,
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
    /// A decision has notified the engine of this bucket.
    Touched { bucket: BucketRef, touch: Touch },
    /// A caller waits for the store's answer to a request of `key`.
    Wait { bucket: BucketRef, key: Arc<[u8]>, waiter: Waiter },
    /// Something is settled of a request of `key` that was decided at `decided`.
    Settle { bucket: BucketRef, key: Arc<[u8]>, settlement: Settlement, decided: Timestamp },
    /// A caller resets `key`.
    Reset { bucket: BucketRef, key: Arc<[u8]>, waiter: ResetWaiter },
    /// An exchange came to an end.
    Answer { lane: u32, attempt: u64, result: Result<Reply, StoreError> },
    /// Time has passed.
    Timeout,
    /// The node is leaving: report everything and give everything back.
    Leave,
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
    /// Those that are configured, if they are.
    max_nodes: Option<u32>,
}

/// A lane waits this long for what nodes know of a lost record.
fn recovery_us(tick_us: u64, retry_us: u64) -> u64 {
    5 * tick_us + 2 * retry_us
}

impl Engine {
    pub(crate) fn new(config: Config, now: Timestamp) -> Self {
        let terms = || config.limits.iter().map(|limit| limit.terms);
        let epoch_us = terms().map(|terms| terms.epoch_us).max().unwrap_or(0);
        let tick_us = terms().map(|terms| terms.tick_us).max().unwrap_or(0);
        let timings = Timings {
            recovery_us: recovery_us(tick_us, config.retry_us),
            lease_us: 2 * epoch_us,
            silence_us: SILENCE_MIN_US.max(SILENCE_BEYOND_TIMEOUT_US + config.retry_us),
            retry_us: config.retry_us,
        };
        let nodes = || Nodes::new(config.max_nodes, config.retry_us);
        let books = |limit| LimitBooks::new(limit, nodes());
        let limits = config.limits.into_iter().map(books).collect();
        let context = Context::new(limits, config.lanes, timings, config.seed, now);
        let lanes = (0..config.lanes).map(|lane| Lane::new(lane, config.instance, now)).collect();
        Self { lanes, context, max_nodes: config.max_nodes }
    }

    /// Takes in what happened at `now`.
    pub(crate) fn handle(&mut self, now: Timestamp, input: Input) {
        match input {
            Input::Touched { bucket, touch } => self.touched(bucket, &touch, now),
            Input::Wait { bucket, key, waiter } => {
                let account = self.account(bucket, Some(key), now);
                // The batch goes with the next timeout, so that it asks for all who come till then.
                if let Some(AccountId { lane, slot }) = account {
                    self.lanes[lane as usize].wait(slot, waiter, now, &mut self.context);
                }
            }
            Input::Settle { bucket, key, settlement, decided } => {
                let account = self.account(bucket, Some(key), now);
                if let Some(AccountId { lane, slot }) = account {
                    let lane = &mut self.lanes[lane as usize];
                    lane.settle(slot, settlement, decided, now, &mut self.context);
                }
            }
            Input::Reset { bucket, key, waiter } => {
                let account = self.account(bucket, Some(key), now);
                if let Some(AccountId { lane, slot }) = account {
                    self.lanes[lane as usize].reset(slot, waiter, now, &mut self.context);
                }
            }
            Input::Answer { lane, attempt, result } => self.answer(lane, attempt, result, now),
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

    fn touched(&mut self, bucket: BucketRef, touch: &Touch, now: Timestamp) {
        if let Some(AccountId { lane, slot }) = self.account(bucket, touch.key.clone(), now) {
            self.lanes[lane as usize].touch(slot, touch, now, &mut self.context);
        }
    }

    fn answer(
        &mut self,
        lane: u32,
        attempt: u64,
        result: Result<Reply, StoreError>,
        now: Timestamp,
    ) {
        let (losses, context) = (self.context.losses, &mut self.context);
        let answered = &mut self.lanes[lane as usize];
        answered.catch_up(now, context);
        let was_down = answered.is_down();
        answered.answer(attempt, result, now, context);
        answered.advance(now, context);
        let is_back = was_down && !answered.is_down();
        if is_back && context.prober == Some(lane) {
            context.prober = None;
            for lane in &mut self.lanes {
                lane.retry_now(now, context);
            }
        }
        if context.take_nodes_changed() {
            let lane = &mut self.lanes[NAMING_LANE as usize];
            lane.name_limits_soon(now, context);
            lane.advance(now, context);
        }
        if context.losses > losses {
            // What happened to one lane has probably happened to all.
            for lane in &mut self.lanes {
                lane.call_soon(now);
                lane.advance(now, context);
            }
        }
    }

    /// Where the account of the key is; it is opened if there is none.
    fn account(
        &mut self,
        bucket: BucketRef,
        key: Option<Arc<[u8]>>,
        now: Timestamp,
    ) -> Option<AccountId> {
        if let Some(number) = bucket.account() {
            return self.context.accounts.get(number as usize).copied();
        }
        // A decision that finds no account passes the key, unless its notification is a hint and comes too late.
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

    /// Whether every lane was reached, and none waits for what its nodes know.
    pub(crate) fn is_ready(&self, now: Timestamp) -> bool {
        self.lanes.iter().all(|lane| lane.is_ready(now))
    }

    /// What keeps a lane from answering, if one does not.
    pub(crate) fn error(&self) -> Option<&StoreError> {
        self.lanes.iter().find_map(Lane::error)
    }

    /// Whether a lane answers, and waits for what its nodes know.
    pub(crate) fn is_recovering(&self, now: Timestamp) -> bool {
        self.lanes.iter().any(|lane| lane.is_recovering(now))
    }

    /// Whether no lane has an open account or a report under way.
    pub(crate) fn has_reported_all(&self) -> bool {
        self.lanes.iter().all(Lane::has_reported_all)
    }

    /// Adds what was counted of a limit's decisions beside what its buckets count.
    pub(crate) fn counted(&mut self, limit: u32, counts: LimitCounts) {
        self.context.limits[limit as usize].count(counts);
    }

    /// How many limits there are.
    pub(crate) fn limits(&self) -> u32 {
        self.context.limits.len() as u32
    }

    /// A limit more, with the next number.
    pub(crate) fn add(&mut self, config: LimitConfig, now: Timestamp) {
        let terms = &config.terms;
        self.raise_timings(terms.epoch_us, terms.tick_us);
        let nodes = Nodes::new(self.max_nodes, self.context.timings.retry_us)
            .joined_late(pass_us(&self.context));
        self.context.limits.push(LimitBooks::new(config, nodes));
        self.context.set_credit(now);
        if let Some(lane) = self.lanes.get_mut(NAMING_LANE as usize) {
            lane.name_limits_soon(now, &self.context);
            lane.advance(now, &mut self.context);
        }
    }

    /// A limit has other terms from now on; its accounts learn of them as callers ask.
    pub(crate) fn update(&mut self, limit: u32, config: LimitConfig, now: Timestamp) {
        // What was allowed until now stays in the bound.
        self.excess();
        self.raise_timings(config.terms.epoch_us, config.terms.tick_us);
        self.context.limits[limit as usize].update(&config.terms, config.plans);
        self.context.set_credit(now);
    }

    /// A limit's leases may live for two such epochs, and its nodes report once in a tick.
    fn raise_timings(&mut self, epoch_us: u64, tick_us: u64) {
        let timings = &mut self.context.timings;
        timings.recovery_us = timings.recovery_us.max(recovery_us(tick_us, timings.retry_us));
        timings.lease_us = timings.lease_us.max(2 * epoch_us);
    }

    /// Overrides give keys of a limit these quotas from now on.
    pub(crate) fn add_quotas(&mut self, limit: u32, quotas: Vec<&'static LimitInfo>) {
        self.context.limits[limit as usize].by_override.extend(quotas);
    }

    /// One key of a limit was reset so often on this node, at most.
    pub(crate) fn note_resets(&mut self, limit: u32, resets: u32) {
        self.context.limits[limit as usize].resets = resets;
    }

    /// Decisions collected since the last time.
    pub(crate) fn take_decisions(&mut self, now: Timestamp) -> Vec<Event> {
        for lane in &mut self.lanes {
            lane.count_policies(now, &mut self.context);
        }
        self.context.limits.iter_mut().filter_map(LimitBooks::take_decisions).collect()
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
        let ended = stall_us.min(held_up_us) >= self.context.timings.lease_us;
        if !ended || self.lanes.iter().any(Lane::has_policies) {
            self.context.known.stalled(stall_us);
        }
    }

    /// Nodes that share a limit, as far as they have been counted.
    pub(crate) fn nodes(&self, limit: usize) -> Option<u32> {
        self.context.limits[limit].nodes.alive().and_then(|nodes| u32::try_from(nodes).ok())
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

    /// The lease that the account with this number has at `now`.
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
