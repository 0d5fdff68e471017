//! What the store has leased to this node of one key.

use crate::bucket::{Lease, MAX_TOKENS};
use crate::sync::message::{Entry, Given, Held, OUTSTANDING_MAX, outstanding_least};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// How much faster or slower than the store's a node's clock may run: 500 parts per million.
pub(crate) const CLOCK_ERROR_DIVISOR: u64 = 2000;

/// The lease of one key, and what its next report has to say of it.
#[derive(Debug)]
pub(super) struct LeaseState {
    /// As the store has it registered.
    pub(super) held: Held,
    /// When the tokens may no longer be spent; `ZERO` if there is no lease, or its end has been dealt with.
    pub(super) ends: Timestamp,
    /// Units in the bucket that make no whole token and no whole microsecond of refill; less than none if tokens
    /// were overdrawn.
    pub(super) remainder: i64,
    /// Outstanding units that this node neither holds nor has spent: overflow, grants that came too late, and what
    /// the clock's allowance took of the refill. They go into the next report.
    pub(super) forfeited: i64,
    /// Leased refill that the store wants back, in units per microsecond.
    pub(super) recall: i64,
    /// Depth that the store has registered and the bucket does not have.
    pub(super) kept_depth: i64,
    /// The next report registers the lease anew.
    pub(super) restore: bool,
    /// The store has lost the key and does not give yet: until it does, no depth is given back. Claims assume that
    /// what was spent has refilled, but a full bucket took nothing in, and what caps it are the depths of then.
    pub(super) is_registering: bool,
}

impl LeaseState {
    pub(super) fn none() -> Self {
        Self {
            held: Held::default(),
            ends: Timestamp::ZERO,
            remainder: 0,
            forfeited: 0,
            recall: 0,
            kept_depth: 0,
            restore: false,
            is_registering: false,
        }
    }

    /// Whether tokens or refill are leased.
    pub(super) fn is_any(&self) -> bool {
        self.held.rate > 0 || self.held.depth > 0
    }

    /// The lease as the bucket applies it.
    pub(super) fn applied(&self, low: u32, overdraw: u8) -> Lease {
        let depth = self.held.depth - self.kept_depth;
        let error = (self.held.rate as u64).div_ceil(CLOCK_ERROR_DIVISOR) as i64;
        Lease {
            rate: self.held.rate - error,
            depth: depth.clamp(0, i64::from(MAX_TOKENS)) as u32,
            ends: self.ends,
            low,
            overdraw,
            is_policy: false,
        }
    }

    /// Adds what the store gave on `entry`, which was first sent at `first_sent`.
    pub(super) fn renew(&mut self, given: &Given, entry: &Entry, first_sent: Timestamp, unit: i64) {
        let kept = if given.void { Held::default() } else { entry.held };
        if given.void {
            self.kept_depth = 0;
        }
        self.held = Held {
            rate: kept.rate + given.rate,
            depth: kept.depth + given.depth,
            outstanding: outstanding_after(given, entry, unit) + given.tokens * unit,
            stamp_us: given.stamp_us,
            demand: entry.demand,
            tag: given.tag,
        };
        if entry.held.rate == 0 {
            // What was overdrawn has been taken off the level.
            self.remainder = self.remainder.max(0);
        }
        let life_us = given.life_us as u64;
        let sure_us = life_us - life_us / CLOCK_ERROR_DIVISOR;
        self.ends = first_sent.plus_micros(sure_us).minus_micros(CLOCK_AGE_MAX_US);
        self.recall = given.recall;
        self.restore = false;
    }

    /// The store still has leased what a report gave back that was never applied.
    pub(super) fn take_back(&mut self, entry: &Entry) {
        self.held.rate += entry.back_rate;
        self.held.depth += entry.back_depth;
    }
}

/// What is outstanding at this node after the store applied `entry`, without what it gave, in
/// units: the store's own reckoning.
fn outstanding_after(given: &Given, entry: &Entry, unit: i64) -> i64 {
    if given.void {
        return 0;
    }
    let held = entry.held;
    let rate = if entry.restore { 0 } else { held.rate + entry.back_rate };
    let flowed = i128::from(rate) * i128::from((given.stamp_us - held.stamp_us).max(0));
    let spent = i128::from(entry.spent) * i128::from(unit);
    let gone = spent + i128::from(entry.returned) + i128::from(entry.lost);
    let outstanding = i128::from(held.outstanding) + flowed - gone;
    let least = outstanding_least(held.rate, unit);
    outstanding.clamp(least.into(), OUTSTANDING_MAX.into()) as i64
}
