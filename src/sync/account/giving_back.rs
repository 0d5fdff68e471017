//! What a node returns with a report.

use super::Account;
use crate::limit::Terms;
use crate::sync::weakness::{Weakness, is_weak};
use crate::time::Timestamp;

/// What a report gives back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Back {
    /// Units that were taken out of the bucket.
    pub(super) units: i64,
    /// Units that the node should hold and does not: refill that overflowed.
    pub(super) lost: i64,
    /// Leased refill, in units per microsecond.
    pub(super) rate: i64,
    /// Leased depth, in tokens.
    pub(super) depth: i64,
}

impl Account {
    /// Takes what is not needed out of the bucket: tokens beyond `need`, the rate that the store
    /// wants back or that demand does not use, and the depth that goes with them.
    pub(super) fn give_back(
        &mut self,
        terms: &Terms,
        now: Timestamp,
        need: i64,
        rate_used: i64,
    ) -> Back {
        if self.policy.is_some() {
            return Back::default();
        }
        let unit = terms.scale.token;
        let ended = now >= self.ends;
        let unused = if self.held.rate > 2 * rate_used { self.held.rate - rate_used } else { 0 };
        let rate_before = self.held.rate;
        // The store wants all refill back once it can give tokens instead.
        let is_whole = self.recall >= rate_before;
        let recall = if is_whole && !self.spares_refill(now, terms) { 0 } else { self.recall };
        let rate = if ended { rate_before } else { recall.max(unused).min(rate_before) };
        self.recall = 0;
        self.held.rate -= rate;
        if rate > 0 && !ended {
            self.amend(now, self.lease_terms(0, self.ahead(terms)), 0);
            // What was spent ahead is owed from now on.
            self.owes |= self.held.rate == 0 && self.stash < 0;
        }
        let tokens = i64::from(self.bucket.peek(now, unit));
        let keep = match ended {
            true => 0,
            false if tokens > need + need / 4 => need,
            false => tokens,
        };
        let withdrawn = if is_weak(Weakness::ReturnsKept) {
            (tokens - keep) as u32
        } else {
            self.bucket.withdraw(keep as u32)
        };
        let mut units = i64::from(withdrawn) * unit;
        if self.held.rate == 0 && rate > 0 && !ended {
            // The fraction of a token goes back too: the smaller depth has no room for it.
            units += self.stash.max(0);
            self.stash = self.stash.min(0);
        }
        let mut lost = std::mem::take(&mut self.lost);
        let (left, pending) = self.bucket.held_and_pending();
        if rate_before == 0 && !self.bucket.has_overflowed() {
            // Nothing flowed in, so that the loss is known exactly.
            self.stash = 0;
            let spent = self.unsent.spent + (pending + self.spilled) as i64;
            lost = lost.max(self.held.outstanding - (i64::from(left) + spent) * unit - units);
        }
        let registered = self.held.depth;
        let depth_before = registered - std::mem::take(&mut self.kept_depth);
        // Depth that is not filled keeps the store's level down. Refill that is spent as it flows
        // in needs next to none; other refill would be lost without it, once tokens are scarce.
        let pressed = rate_used > self.held.rate + self.held.rate / 4;
        let burst = self.bursts.expected(now);
        let flowing = match (self.held.rate > 0, self.is_scarce(terms)) {
            (false, _) => 0,
            // Between two bursts refill gathers for the next one.
            (true, _) if burst > 0 => (burst - i64::from(left)).max(1),
            (true, false) => 1,
            (true, true) if pressed => 2,
            (true, true) => depth_before,
        };
        let depth = (i64::from(left) + flowing).min(depth_before);
        if self.is_registering {
            self.kept_depth = registered - depth;
        }
        self.held.depth = depth + self.kept_depth;
        self.bucket.set_depth(depth as u32);
        Back { units, lost, rate, depth: registered - self.held.depth }
    }
}
