//! An outage policy in force: what a key may be allowed without the store, and what it took in the end.

use crate::bucket::{Lease, MAX_TOKENS};
use crate::time::Timestamp;

/// When an outage policy may take over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    /// It admits from then on.
    pub(crate) from: Timestamp,
    /// All leases had ended by then.
    pub(crate) ended: Timestamp,
    /// The lane's time when it applied a batch last, at the latest.
    pub(crate) last_us: i64,
}

/// An outage policy in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyInForce {
    pub(super) entered: Timestamp,
    pub(super) rate: i64,
    /// In tokens.
    pub(super) depth: i64,
    /// What the policy began with beside what was left of the lease, in units.
    pub(super) begun: i64,
    /// What was left of the lease, in tokens: the store counts it as spent.
    pub(super) own: i64,
    /// When that lease was given, by the store's time, if it ends as leases do.
    pub(super) own_given_us: Option<i64>,
    /// Tokens that had been admitted under earlier policies, and not been reported.
    pub(super) admitted_before: i64,
}

impl PolicyInForce {
    /// The policy as the bucket applies it.
    pub(super) fn lease(&self) -> Lease {
        Lease {
            rate: self.rate,
            depth: self.depth.min(i64::from(MAX_TOKENS)) as u32,
            ends: Timestamp::NEVER,
            low: 0,
            overdraw: 0,
            is_policy: true,
        }
    }

    /// What a share took until `now` from the bucket of all, in units of which `left` are left: the difference between
    /// the bucket that it left and one that began and was refilled like it, and from which nothing was spent. What
    /// overflows a share is not taken from other nodes, until the store answers others, at `back`, that have taken theirs.
    pub(super) fn taken_by_share(
        &self,
        left: i64,
        back: Timestamp,
        now: Timestamp,
        unit: i64,
    ) -> i64 {
        let back = back.clamp(self.entered, now);
        let silent_us = back.micros_since(self.entered);
        let untouched = flow(self.begun, self.rate, silent_us, self.depth, unit);
        flow(untouched, self.rate, now.micros_since(back), i64::MAX, unit) - left
    }
}

/// `units` after `rate` has flowed in for `micros`, at most `depth` tokens of `unit`.
pub(super) fn flow(units: i64, rate: i64, micros: u64, depth: i64, unit: i64) -> i64 {
    let flowed = i128::from(units) + i128::from(rate) * i128::from(micros);
    flowed.min(i128::from(depth) * i128::from(unit)) as i64
}
