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

/// The current window of a key whose outage policy is in force.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PolicyWindow {
    /// By the lane's time.
    pub(crate) ends_us: i64,
    /// By this node's clock, at the earliest.
    pub(crate) ends: Timestamp,
}

/// An outage policy in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyInForce {
    /// It is [`OutagePolicy::Share`](crate::OutagePolicy::Share).
    pub(super) is_share: bool,
    pub(super) rate: i64,
    /// In tokens.
    pub(super) depth: i64,
    /// When the lease was renewed last of which the policy has tokens, by the store's time, if it ends as leases do.
    pub(super) own_given_us: Option<i64>,
    /// When the policy took over, or its window began: the next three are of then.
    pub(super) entered: Timestamp,
    /// What it had beside what was left of the lease, in units.
    pub(super) begun: i64,
    /// What was left of the lease, in tokens: the store counts it as spent.
    pub(super) own: i64,
    /// Tokens admitted without the store before, and not reported.
    pub(super) admitted_before: i64,
    /// The window to which its spending is charged. `None` if the limit has no windows, or their ends are not known.
    pub(super) window: Option<PolicyWindow>,
    /// What the policy took in the window before, in units, and when that ended, by the lane's time.
    pub(super) taken_before: (i64, i64),
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

    /// What the policy took from the bucket of all until `now`, in units. `left` are left of its own bucket, and `admitted` were admitted.
    /// The result is negative if a part of the lease was not spent.
    pub(super) fn taken(
        &self,
        (left, admitted): (i64, i64),
        back: Option<Timestamp>,
        now: Timestamp,
        unit: i64,
    ) -> i64 {
        match back.filter(|_| self.is_share) {
            Some(back) => self.taken_by_share(left, back, now, unit).min(admitted),
            None => admitted - self.own * unit,
        }
    }

    /// What a share took until `now` from the bucket of all, in units of which `left` are left: the difference between
    /// the bucket that it left and one that began and was refilled like it, and from which nothing was spent. What
    /// overflows a share is not taken from other nodes, until the store answers others, at `back`, that have taken theirs.
    fn taken_by_share(&self, left: i64, back: Timestamp, now: Timestamp, unit: i64) -> i64 {
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
