//! What the store has lent to this node, and how far the node may spend beyond it.

use super::Account;
use crate::decision::OVERDRAW_PARTS;
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::message::{Entry, Given, OUTSTANDING_MAX, outstanding_least};
use crate::time::Timestamp;

/// What fractions of tokens on all nodes come to does not matter for a burst of so many tokens a
/// node.
const FRACTIONS_BURST: i64 = 100;
/// From so many nodes on it is rare that more than half of them have just spent ahead.
const MANY_NODES: i64 = 16;
/// Then so much of a token may be spent ahead at most.
const AHEAD_MAX: f64 = 0.75;

impl Account {
    /// What is outstanding at this node after the store applied `entry`, without what it gave, in
    /// units: the store's own reckoning.
    pub(super) fn outstanding(&self, given: &Given, entry: &Entry) -> i64 {
        if given.void {
            return 0;
        }
        let held = entry.held;
        let rate = if entry.restore { 0 } else { held.rate + entry.back_rate };
        let flowed = i128::from(rate) * i128::from((given.stamp_us - held.stamp_us).max(0));
        let spent = i128::from(entry.spent) * i128::from(self.scale.token);
        let gone = spent + i128::from(entry.returned) + i128::from(entry.lost);
        let outstanding = i128::from(held.outstanding) + flowed - gone;
        let least = outstanding_least(held.rate, self.scale.token);
        outstanding.clamp(least.into(), OUTSTANDING_MAX.into()) as i64
    }

    /// The most that the node can come to hold of its lease, with what it spent, in units. What an
    /// outage policy gives is no lease.
    pub(super) fn most_held(&self, tokens: u32) -> i64 {
        let tokens = if self.policy.is_some() { 0 } else { tokens };
        let refilled = if self.held.rate > 0 { self.held.depth } else { 0 };
        let tokens = refilled.max(i64::from(tokens)) + 1 + self.unsent.spent + self.spilled as i64;
        tokens.saturating_mul(self.scale.token).min(OUTSTANDING_MAX)
    }

    /// The credit from now on: none while refill is leased.
    pub(super) fn credit(&self, terms: &Terms) -> i64 {
        if self.held.rate == 0 { i64::from(terms.credit.known) } else { 0 }
    }

    /// How much of a token may be spent before it is whole, in 64ths, so that the fractions that all nodes hold
    /// come to next to nothing: a token waits half of its time on average, and then for a request.
    pub(super) fn ahead(&self, terms: &Terms) -> u8 {
        if terms.credit.known == 0 || self.held.rate == 0 || self.owes {
            return 0;
        }
        let burst = terms.scale.burst / self.scale.token;
        if burst >= FRACTIONS_BURST * self.nodes {
            return 0;
        }
        let mut ahead = 0.5;
        if self.nodes >= MANY_NODES {
            let demand = (self.demand.per_us() * self.scale.token as f64).max(1.0);
            ahead = (ahead + self.held.rate as f64 / demand).min(AHEAD_MAX);
        }
        (ahead * OVERDRAW_PARTS as f64) as u8
    }

    /// When the level is believed to come to a whole token, by what this node has seen of its growth
    /// and by what of the refill is not leased.
    pub(super) fn token_in_us(&self, given: &Given, terms: &Terms) -> u64 {
        let missing = (self.scale.token - given.available).max(0) as f64;
        let free = (terms.scale.rate - given.leased).max(0) as f64;
        if missing > 0.0 { (missing / self.growth.min(free)) as u64 } else { 0 }
    }

    /// Learns how fast the level rises for this node: by the rate less what the others spend.
    pub(super) fn observe_growth(
        &mut self,
        given: &Given,
        entry: &Entry,
        now: Timestamp,
        terms: &Terms,
    ) {
        let Scale { rate, token, burst } = terms.scale;
        let Some(view) = self.view else { return };
        let passed_us = now.micros_since(view.at);
        if given.available > burst / 2 {
            // There is enough for all; and what a full bucket lost would look like their spending.
            self.growth = rate as f64;
            return;
        }
        if passed_us < terms.tick_us {
            return;
        }
        let taken = (given.tokens + entry.debt) * token - entry.returned;
        let seen = (given.available - view.level + taken) as f64 / passed_us as f64;
        let least = rate as f64 / self.nodes as f64;
        self.growth = f64::midpoint(self.growth, seen.clamp(least, rate as f64));
    }
}
