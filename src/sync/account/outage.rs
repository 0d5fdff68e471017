//! What a key lives on while the store is away.

use super::Account;
use crate::bucket::{BOUNDLESS_RATE, FIELD_MAX, LeaseTerms};
use crate::limit::{OutagePolicy, Terms};
use crate::time::Timestamp;

/// An outage policy in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    /// Tokens taken from the node's share of the last view: what is used of them becomes debt.
    loan: i64,
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

    /// Puts the limit's outage policy in force. `nodes` is how many nodes share the limit, `None`
    /// when that was never known.
    pub(crate) fn enter_policy(&mut self, now: Timestamp, terms: &Terms, nodes: Option<i64>) {
        let unit = terms.scale.token;
        self.absorb(now, true, |_| 0);
        let own = i64::from(self.bucket.withdraw(0));
        let burst = terms.scale.burst / unit;
        let (rate, depth, loan) = match (terms.outage, nodes) {
            (OutagePolicy::Share, Some(nodes)) => {
                let depth = (burst / nodes).max(1);
                (terms.scale.rate / nodes, depth, self.loan(nodes, unit).min(depth))
            }
            (OutagePolicy::LastRate, _) => (self.held.rate, self.held.depth.max(1), 0),
            (OutagePolicy::Open, _) => (BOUNDLESS_RATE, i64::from(FIELD_MAX), 0),
            (OutagePolicy::Closed, _) | (OutagePolicy::Share, None) => (0, 0, 0),
        };
        let lease = LeaseTerms {
            rate,
            depth: depth.min(i64::from(FIELD_MAX)) as u32,
            ends: Timestamp::NEVER,
            low: 0,
            ahead: 0,
            policy: true,
        };
        let tokens = if terms.outage == OutagePolicy::Open { depth } else { own + loan };
        self.stash = self.bucket.amend(now, lease, tokens, 0, unit).rest;
        self.policy = Some(Policy { loan });
        self.answer_by_policy(now, terms);
    }

    /// What a key that held no lease may spend of the level last seen, in tokens; a key that held
    /// one goes on with what is left of it.
    fn loan(&self, nodes: i64, unit: i64) -> i64 {
        let held = self.held.rate > 0 || self.held.depth > 0;
        let level = self.view.map_or(0, |view| view.level.max(0));
        if held { 0 } else { level / unit / nodes }
    }

    /// Ends the outage policy: what it let pass is charged, and only a used loan lowers the level.
    pub(super) fn leave_policy(&mut self, now: Timestamp, terms: &Terms) {
        let Some(Policy { loan }) = self.policy.take() else { return };
        self.bucket.peek(now, terms.scale.token);
        let left = i64::from(self.bucket.withdraw(0));
        self.bucket.amend(now, LeaseTerms::NONE, 0, 0, terms.scale.token);
        self.stash = 0;
        let used = (loan - left).clamp(0, loan).min(self.unsent.allowed);
        self.unsent.allowed -= used;
        self.unsent.debt += used;
        self.owes |= used > 0;
    }
}
