//! Costs that are known only after a request was allowed: tokens that were not used go back, and others are charged.

use std::sync::Arc;

use super::ActiveLimit;
#[cfg(feature = "tower")]
use super::Handle;
use super::async_limit::Charge;
use crate::algorithm::{Standing, Taken};
use crate::bucket::{Found, LeaseBucket, OVERFLOW};
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, PinnedKey, Query, SettledRequest};
use crate::quota::Curve;
use crate::store::exact::{Deed, SpentAt};
use crate::sync::Settlement;
use crate::time::Timestamp;

/// What a request was allowed, and when it was asked: it was decided then or later.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    pub(crate) decision: Decision,
    pub(crate) asked: Timestamp,
}

impl ActiveLimit {
    /// Gives back `tokens` of those that `key` was allowed.
    ///
    /// Cost: a look-up; two short locks of the limit's table, two allocations and a message to the limiter's task where the
    /// tokens have been reported, or are of a window.
    pub(super) fn give_back(&self, key: &[u8], allowed: &Allowed, tokens: u32) {
        if tokens > 0 && !allowed.decision.took_nothing() && !self.put_back(key, allowed, tokens) {
            self.give_back_pinned(&self.hold(key).key, allowed, tokens);
        }
    }

    /// The same where the key was pinned before it was asked.
    pub(super) fn give_back_pinned(&self, key: &Arc<PinnedKey>, allowed: &Allowed, tokens: u32) {
        let Allowed { decision, asked } = allowed;
        if tokens == 0 || decision.took_nothing() {
            return;
        }
        if self.is_decided_by_store() {
            // By the plan that decided.
            return self.under(decision.limit).return_to_store(&key.key, decision, tokens);
        }
        // A key without a place has shared another bucket, perhaps for the last time.
        if key.place == OVERFLOW {
            return;
        }
        match &self.state.buckets {
            Buckets::Leased(_) => {
                if !self.put_back(&key.key, allowed, tokens) {
                    let settlement = Settlement::unused(tokens, decision.sure);
                    self.settle_pinned(key, settlement, *asked);
                }
            }
            Buckets::Alone(alone) => {
                self.give_back_alone(alone, key.place, decision, tokens, self.precise_now());
            }
        }
    }

    /// Gives back what the store decided, by a call that nobody waits for.
    fn return_to_store(&self, key: &[u8], decision: &Decision, tokens: u32) {
        let deed = match decision.source {
            Source::Store(standing) => {
                let ahead = if let Standing::Turn(_, turn) = standing { turn.ahead } else { 0 };
                Deed::Return(SpentAt { at_us: decision.now.as_micros(), ahead })
            }
            // The outage policy allowed it.
            _ => return self.not_given_back(tokens),
        };
        self.tell_store(key, tokens, deed);
    }

    /// Calls the store without waiting for its answer.
    pub(super) fn tell_store(&self, key: &[u8], cost: u32, deed: Deed) {
        let max_wait_us = self.state.terms.background_wait_us();
        let charge = Charge { cost, slot_within_us: 0, deed };
        // Once the limiter's task has ended with its runtime, nothing is charged or given back any more.
        let _ = self.send_exact(key, charge, max_wait_us);
    }

    pub(super) fn not_given_back(&self, tokens: u32) {
        let not_given_back = Query::NotGivenBack { limit: self.state.index, tokens };
        let _ = self.shared.driver.queries.send(not_given_back);
    }

    /// Puts tokens of a token bucket's lease back, if the engine has not collected them. Tokens of a window are not those of
    /// the next one.
    fn put_back(&self, key: &[u8], allowed: &Allowed, tokens: u32) -> bool {
        let Buckets::Leased(table) = &self.state.buckets else { return false };
        let put_back = |found: Found<'_, LeaseBucket>| {
            let (epoch, now) = (found.word.epoch(), self.state.clock.now());
            found.bucket.put_back(tokens, tokens == allowed.decision.cost, epoch, now)
        };
        let may_be_here = allowed.decision.sure && self.state.terms.scale.curve == Curve::Refill;
        may_be_here && table.find(key).is_some_and(put_back)
    }

    fn give_back_alone(
        &self,
        alone: &AloneBuckets,
        place: u32,
        decision: &Decision,
        tokens: u32,
        now: Timestamp,
    ) {
        match alone {
            AloneBuckets::Turns(local) => {
                if let Source::Local(Standing::Turn(rule, turn)) = decision.source {
                    let state = rule.units_at(decision.now) + turn.ahead;
                    let taken = Taken { state, cost: tokens, now: rule.units_at(now) };
                    local.table.at(place).take_back(rule, decision.limit.number, taken);
                }
            }
            AloneBuckets::Windows(local) => {
                let decided = self.state.window_time(local, decision.now);
                local.table.at(place).take_back(local.rule_of(self.info), tokens, decided);
            }
            AloneBuckets::Logs(local) => {
                let rule = local.rule_of(self.info);
                local.table.at(place).take_back(rule, tokens, decision.now, now);
            }
            // The slot passes unused.
            AloneBuckets::Slots(..) => {}
        }
    }

    /// Charges `tokens` more to `key`, whatever is left of it.
    ///
    /// Cost: a message to the limiter's task if nodes share the limit, and a call of the store if that decides.
    pub(super) fn charge_pinned(&self, key: &Arc<PinnedKey>, tokens: u32) {
        if tokens == 0 {
            return;
        }
        if self.is_decided_by_store() {
            return self.tell_store(&key.key, tokens, Deed::Charge);
        }
        let (place, now) = (key.place, self.precise_now());
        let Buckets::Alone(alone) = &self.state.buckets else {
            return self.settle_pinned(key, Settlement::Beyond(tokens), now);
        };
        match alone {
            AloneBuckets::Turns(local) => {
                let (rule, plan) = (local.rule_of(self.info), self.plan);
                local.table.at(place).charge(rule, plan, tokens, now);
            }
            AloneBuckets::Windows(local) => {
                let now = self.state.window_time(local, now);
                local.table.at(place).charge(local.rule_of(self.info), tokens, now);
            }
            AloneBuckets::Logs(local) => {
                local.table.at(place).charge(local.rule_of(self.info), tokens, now);
            }
            // Slots that were not asked for cannot be taken any more.
            AloneBuckets::Slots(..) => {}
        }
    }

    /// Tells the engine what is settled of a request that was asked then.
    pub(super) fn settle(&self, key: &[u8], settlement: Settlement, asked: Timestamp) {
        self.settle_pinned(&self.hold(key).key, settlement, asked);
    }

    pub(super) fn settle_pinned(
        &self,
        key: &Arc<PinnedKey>,
        settlement: Settlement,
        decided: Timestamp,
    ) {
        let settled = SettledRequest { key: key.clone(), settlement, decided };
        // Once the limiter's task has ended with its runtime, nothing is charged or given back any more.
        let _ = self.shared.driver.queries.send(Query::Settled(settled));
    }
}

/// What a request was charged, which can be given back as long as its key is pinned. Dropped, it stays charged.
#[cfg(feature = "tower")]
pub(crate) struct Spent {
    /// Pinned before it was asked.
    pub(crate) handle: Handle,
    pub(crate) allowed: Allowed,
    pub(crate) tokens: u32,
}

#[cfg(feature = "tower")]
impl Spent {
    /// Gives it back. Returns how the key stands then, unless only the store knows.
    pub(crate) fn give_back(self) -> Option<Decision> {
        let Handle { limit, key, .. } = &self.handle;
        limit.give_back_pinned(key, &self.allowed, self.tokens);
        (!limit.is_decided_by_store()).then(|| self.handle.decide(0))
    }
}
