//! Costs that are known only after a request was allowed: tokens that were not used go back, and others are charged.

use super::ActiveLimit;
use crate::algorithm::{Standing, Taken};
use crate::bucket::{Found, LeaseBucket, OVERFLOW};
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, LocalBuckets, Query, SettledRequest};
use crate::quota::Curve;
use crate::sync::Settlement;
use crate::time::Timestamp;

impl ActiveLimit {
    /// Gives back `tokens` of those that `decision` allowed to `key`.
    ///
    /// Cost: a look-up; two short locks of the limit's table, two allocations and a message to the limiter's task where the
    /// tokens have been reported.
    pub(super) fn give_back(&self, key: &[u8], decision: &Decision, tokens: u32) {
        if tokens == 0 {
            return;
        }
        let alone = match &self.state.buckets {
            Buckets::Leased(table) => {
                let put_back = |found: Found<'_, LeaseBucket>| {
                    found.bucket.put_back(tokens, found.word.epoch(), self.state.clock.now())
                };
                // Tokens of a window are not those of the next one.
                let may_be_here = decision.sure && self.state.terms.scale.curve == Curve::Refill;
                if !may_be_here || !table.find(key).is_some_and(put_back) {
                    self.settle(key, Settlement::Unused(tokens), decision.now);
                }
                return;
            }
            Buckets::Alone(alone) => alone,
        };
        let (pinned, now) = (self.hold(key).key, self.precise_now());
        // A key without a place has shared another bucket, perhaps for the last time.
        if pinned.place != OVERFLOW {
            self.give_back_alone(alone, pinned.place, decision, tokens, now);
        }
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
            AloneBuckets::Turns(LocalBuckets { table, rule, .. }) => {
                if let Source::Local(Standing::Turn(_, turn)) = decision.source {
                    let state = rule.units_at(decision.now) + turn.ahead;
                    let taken = Taken { state, cost: tokens, now: rule.units_at(now) };
                    table.at(place).take_back(rule, taken);
                }
            }
            AloneBuckets::Windows(local) => {
                let decided = self.state.window_time(local.rule, decision.now);
                let decided = decided.plus_micros(local.offset_us);
                local.table.at(place).take_back(local.rule, tokens, decided);
            }
            AloneBuckets::Logs(LocalBuckets { table, .. }) => {
                table.at(place).take_back(tokens, decision.now);
            }
            // The slot passes unused.
            AloneBuckets::Slots(..) => {}
        }
    }

    /// Charges `tokens` more to `key`, whatever is left of it.
    ///
    /// Cost: as that of giving back; a message in any case if nodes share the limit.
    pub(super) fn charge(&self, key: &[u8], tokens: u32) {
        if tokens == 0 {
            return;
        }
        let now = self.precise_now();
        let Buckets::Alone(alone) = &self.state.buckets else {
            return self.settle(key, Settlement::Beyond(tokens), now);
        };
        // Not given to another key meanwhile.
        let pinned = self.hold(key).key;
        let place = pinned.place;
        match alone {
            AloneBuckets::Turns(LocalBuckets { table, rule, .. }) => {
                table.at(place).charge(rule, tokens, now);
            }
            AloneBuckets::Windows(local) => {
                let now = self.state.window_time(local.rule, now).plus_micros(local.offset_us);
                local.table.at(place).charge(local.rule, tokens, now);
            }
            AloneBuckets::Logs(LocalBuckets { table, rule, .. }) => {
                table.at(place).charge(rule, tokens, now);
            }
            // Slots that were not asked for cannot be taken any more.
            AloneBuckets::Slots(..) => {}
        }
    }

    /// Tells the engine.
    fn settle(&self, key: &[u8], settlement: Settlement, decided: Timestamp) {
        let settled = SettledRequest { key: self.hold(key).key, settlement, decided };
        // Once the limiter's task has ended with its runtime, nothing is charged or given back any more.
        let _ = self.shared.driver.queries.send(Query::Settled(settled));
    }
}
