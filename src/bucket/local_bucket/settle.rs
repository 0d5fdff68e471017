//! Costs that are known only after a request was allowed, and keys that are reset.

use super::LocalBucket;
use crate::algorithm::{STATE_MAX, Taken, TurnRule};
use crate::bucket::atomic::Ordering;
use crate::bucket::table::TableBucket;
use crate::time::Timestamp;

impl LocalBucket {
    /// Takes back `taken.cost` tokens of a request that was allowed. The caller has pinned the key. A leaky bucket takes
    /// back its last slot only.
    pub(crate) fn take_back(&self, rule: &'static TurnRule, plan: u32, taken: Taken) {
        match self.rule_in_force(rule, plan) {
            // Its slots are as long as when they were taken.
            TurnRule::LeakyBucket { .. } => self.give_back(rule, taken),
            // Beyond a full bucket nothing is kept: a state in the past is one of now.
            rule @ TurnRule::TokenBucket(_) => {
                let units = rule.units_of(taken.cost.into());
                self.change(|state| state.saturating_sub(units).max(1));
            }
        }
    }

    /// Spends `tokens`, whatever the limit. The caller has pinned the key.
    pub(crate) fn charge(&self, rule: &'static TurnRule, plan: u32, tokens: u32, now: Timestamp) {
        let rule = self.rule_in_force(rule, plan);
        let (now, units) = (rule.units_at(now), rule.units_of(tokens.into()));
        self.change(|state| state.max(now).saturating_add(units).min(STATE_MAX - 2));
    }

    /// The key is as if it had never been used. The caller has pinned it.
    pub(crate) fn reset(&self, rule: &TurnRule, now: Timestamp) {
        let now = rule.units_at(now);
        self.change(|state| state.min(now).max(1));
    }

    /// Changes the state. How far it had grown is written down before, as the next key of the place begins beyond it.
    fn change(&self, to: impl Fn(u64) -> u64) {
        loop {
            let state = TableBucket::load(self);
            if Self::is_retired(state) {
                return;
            }
            self.highest.fetch_max(state, Ordering::AcqRel);
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            if self.state.compare_exchange(state, to(state), success, failure).is_ok() {
                return;
            }
        }
    }
}
