//! Costs that are known only after a request was allowed: tokens that were not used go back, and others are charged.

use std::sync::Arc;

use super::ActiveLimit;
use crate::algorithm::{Standing, Taken};
use crate::bucket::OVERFLOW;
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, LocalBuckets, PinnedKey, Query, SettledRequest};
use crate::sync::Settlement;
use crate::time::Timestamp;

impl ActiveLimit {
    /// Gives back `tokens` of those that `decision` allowed to `key`.
    ///
    /// Cost: two short locks of the limit's table and two allocations; a message to the limiter's task if the tokens have been
    /// reported.
    pub(super) fn give_back(&self, key: &[u8], decision: &Decision, tokens: u32) {
        if tokens == 0 {
            return;
        }
        let (pinned, now) = (self.hold(key).key, self.precise_now());
        match &self.state.buckets {
            Buckets::Leased(table) => {
                let (bucket, cached) = (table.at(pinned.place), self.state.clock.now());
                let is_here = decision.sure && pinned.place != OVERFLOW;
                if !is_here || !bucket.put_back(tokens, bucket.epoch(), cached) {
                    self.settle(pinned, Settlement::Unused(tokens), decision.now);
                }
            }
            // A key without a place has shared another bucket, perhaps for the last time.
            Buckets::Alone(alone) if pinned.place != OVERFLOW => {
                self.give_back_alone(alone, pinned.place, decision, tokens, now);
            }
            Buckets::Alone(_) => {}
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
        let (pinned, now) = (self.hold(key).key, self.precise_now());
        match &self.state.buckets {
            Buckets::Leased(_) => self.settle(pinned, Settlement::Beyond(tokens), now),
            Buckets::Alone(AloneBuckets::Turns(LocalBuckets { table, rule, .. })) => {
                table.at(pinned.place).charge(rule, tokens, now);
            }
            Buckets::Alone(AloneBuckets::Windows(local)) => {
                let now = self.state.window_time(local.rule, now).plus_micros(local.offset_us);
                local.table.at(pinned.place).charge(local.rule, tokens, now);
            }
            Buckets::Alone(AloneBuckets::Logs(LocalBuckets { table, rule, .. })) => {
                table.at(pinned.place).charge(rule, tokens, now);
            }
            // Slots that were not asked for cannot be taken any more.
            Buckets::Alone(AloneBuckets::Slots(..)) => {}
        }
    }

    fn settle(&self, key: Arc<PinnedKey>, settlement: Settlement, decided: Timestamp) {
        let settled = SettledRequest { key, settlement, decided };
        // Once the limiter's task has ended with its runtime, nothing is charged or given back any more.
        let _ = self.shared.driver.queries.send(Query::Settled(settled));
    }
}
