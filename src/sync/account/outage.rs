//! What a key lives on while the store is away.

use super::Account;
use crate::bucket::{Lease, MAX_TOKENS, UNLIMITED_RATE};
use crate::limit::{OutagePolicy, Terms};
use crate::sync::lane::Outage;
use crate::time::Timestamp;

/// An outage policy in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    entered: Timestamp,
    rate: i64,
    /// In tokens.
    depth: i64,
    /// What the policy began with beside what was left of the lease, in units.
    begun: i64,
    /// What was left of the lease, in tokens: the store counts it as spent.
    own: i64,
    /// Tokens that had been admitted under earlier policies, and not been reported.
    admitted_before: i64,
}

impl Policy {
    /// The policy as the bucket applies it.
    fn lease(&self) -> Lease {
        Lease {
            rate: self.rate,
            depth: self.depth.min(i64::from(MAX_TOKENS)) as u32,
            ends: Timestamp::NEVER,
            low: 0,
            overdraw: 0,
            is_policy: true,
        }
    }
}

impl Account {
    /// The lease has ended without a word from the store. What is left of it may no longer be spent,
    /// unless an outage policy begins with it.
    pub(crate) fn lease_ended(&mut self, now: Timestamp) {
        self.collect(now, true);
    }

    /// The end of the lease has been dealt with.
    pub(crate) fn forget_end(&mut self) {
        self.ends = Timestamp::ZERO;
    }

    /// Whether an outage policy is in force.
    pub(crate) fn in_policy(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether the store is to be told something before it gives what it has.
    pub(crate) fn is_owing(&self) -> bool {
        !self.refused && (self.restore || self.policy.is_some() || self.unsent.taken > 0)
    }

    /// Whether the outage policy is in force because the store is away.
    pub(crate) fn in_outage(&self) -> bool {
        self.policy.is_some() && !self.refused
    }

    /// Puts the limit's outage policy in force. All leases of the key have ended, so that refill has been
    /// nobody's since. `nodes` is the number of nodes that share the limit. Returns the tokens that are
    /// lent from the last view.
    pub(crate) fn enter_policy(
        &mut self,
        now: Timestamp,
        outage: &Outage,
        terms: &Terms,
        nodes: i64,
    ) -> i64 {
        let unit = terms.scale.token;
        let credit_before = i64::from(self.credit_given) + self.unsent.debt;
        self.absorb(now, true, |_, _| 0);
        let credit_left = credit_before - self.unsent.debt;
        // A lease that ended before the silence is gone: others may have leased the same since then.
        let epochs_us = (self.held.tag + 2).saturating_mul(terms.epoch_us as i64);
        let alive = epochs_us > outage.last_us;
        let left = i64::from(self.bucket.withdraw(0));
        let own = if alive { left } else { 0 };
        let burst = terms.scale.burst / unit;
        let (rate, depth, loan) = match (terms.outage, alive) {
            (OutagePolicy::Share, _) => {
                let depth = (burst / nodes).max(1);
                (terms.scale.rate / nodes, depth, self.loan(nodes, unit).min(depth))
            }
            (OutagePolicy::LastRate, true) => {
                (self.held.rate, (self.held.depth - self.kept_depth).max(1), 0)
            }
            (OutagePolicy::Open, _) => (UNLIMITED_RATE, i64::from(MAX_TOKENS), 0),
            (OutagePolicy::Closed, _) | (OutagePolicy::LastRate, false) => (0, 0, 0),
        };
        let open = terms.outage == OutagePolicy::Open;
        let refilled =
            if open { 0 } else { flow(0, rate, now.micros_since(outage.ended), depth, unit) };
        // A key of which the node has no view goes on with its first credit.
        let first = if self.view.is_none() { credit_left.min(depth) } else { 0 };
        let begun = ((first + loan) * unit + refilled).min(depth.saturating_mul(unit));
        let tokens = if open { depth } else { own + begun / unit };
        let fraction = if open { 0 } else { begun % unit };
        let admitted_before = self.unsent.allowed;
        let policy = Policy { entered: now, rate, depth, begun, own, admitted_before };
        self.stash = self.bucket.amend(now, policy.lease(), tokens, fraction, unit).remainder;
        self.policy = Some(policy);
        self.answer_by_policy(now);
        // A share of a burst that is smaller than the cluster is a token all the same.
        let shares = terms.outage == OutagePolicy::Share && nodes > burst;
        loan.max(i64::from(shares))
    }

    /// What may be spent of the level last seen, in tokens; a key that held a lease has what is left
    /// of it.
    fn loan(&self, nodes: i64, unit: i64) -> i64 {
        let held = self.held.rate > 0 || self.held.depth > 0;
        let level = self.view.map_or(0, |view| view.level.max(0));
        if held { 0 } else { level / unit / nodes }
    }

    /// The store answers again, and did from `back` on; `None` if it answered others all the time. The
    /// key is to report what its policy took.
    pub(crate) fn return_from_policy(
        &mut self,
        now: Timestamp,
        back: Option<Timestamp>,
        terms: &Terms,
    ) {
        self.collect(now, true);
        self.leave_policy(now, back, terms);
        self.due = now;
    }

    /// Ends the outage policy. What it took is the difference between the bucket that it left and one
    /// that began and was refilled like it, and that nobody spent from: what overflows a share
    /// is not taken from anybody, until the store hears of others that have taken theirs.
    fn leave_policy(&mut self, now: Timestamp, back: Option<Timestamp>, terms: &Terms) {
        let Some(policy) = self.policy.take() else { return };
        // What was lent of it is not there to be lent again.
        if let Some(view) = &mut self.view {
            view.level = view.level.min(0);
        }
        let unit = terms.scale.token;
        // To the unit, with what makes no whole token yet.
        let left = self.bucket.amend(now, policy.lease(), 0, 0, unit).units;
        self.bucket.withdraw(0);
        self.bucket.amend(now, Lease::NONE, 0, 0, unit);
        self.stash = 0;
        let admitted = (self.unsent.allowed - policy.admitted_before).saturating_mul(unit);
        let taken = match (terms.outage, back) {
            (OutagePolicy::Share, Some(back)) => {
                let back = back.clamp(policy.entered, now);
                let silent_us = back.micros_since(policy.entered);
                let untouched = flow(policy.begun, policy.rate, silent_us, policy.depth, unit);
                let since_us = now.micros_since(back);
                (flow(untouched, policy.rate, since_us, i64::MAX, unit) - left).min(admitted)
            }
            _ => admitted - policy.own * unit,
        };
        self.unsent.taken = self.unsent.taken.saturating_add(taken.max(0));
    }
}

/// `units` after `rate` has flowed in for `micros`, at most `depth` tokens of `unit`.
fn flow(units: i64, rate: i64, micros: u64, depth: i64, unit: i64) -> i64 {
    let flowed = i128::from(units) + i128::from(rate) * i128::from(micros);
    flowed.min(i128::from(depth) * i128::from(unit)) as i64
}
