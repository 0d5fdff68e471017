//! Callers who wait for the store's word.

use std::collections::VecDeque;

use super::Account;
use crate::bucket::{Ask, SpendResult, Verdict};
use crate::limit::Terms;
use crate::sync::message::{Given, Withheld};
use crate::time::Timestamp;

/// A caller who waits for the store's word on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    /// Names the request in the answer.
    pub(crate) ticket: u64,
    /// What it costs, in tokens.
    pub(crate) cost: u32,
    /// Until when the caller waits.
    pub(crate) deadline: Timestamp,
}

/// What a caller who waited is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) ticket: u64,
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
}

impl Account {
    /// A caller waits: the key is due at once. Where waiting is `in_vain`, because the store takes longer, the
    /// caller is answered as if it had not waited.
    pub(crate) fn wait(&mut self, waiter: Waiter, in_vain: bool, now: Timestamp) {
        self.last_arrival = now;
        self.due = self.due.min(now);
        if in_vain {
            let Waiter { ticket, cost, .. } = waiter;
            let result = self.decide(cost, false, now);
            return self.answer(ticket, cost, result);
        }
        self.caller_has_waited = true;
        self.waiters.push_back(waiter);
        if self.policy.is_some() {
            self.answer_by_policy(now);
        }
    }

    /// When the first caller has waited long enough: all wait equally long.
    pub(crate) fn waits_until(&self) -> Option<Timestamp> {
        self.waiters.front().map(|waiter| waiter.deadline)
    }

    /// Answers for callers who waited.
    pub(crate) fn take_answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Callers who have waited long enough are answered as if they had not waited.
    pub(crate) fn give_up(&mut self, now: Timestamp) {
        while self.waiters.front().is_some_and(|first| first.deadline <= now) {
            let Some(Waiter { ticket, cost, .. }) = self.waiters.pop_front() else { return };
            self.asked = self.asked.saturating_sub(1);
            let result = self.decide(cost, false, now);
            self.answer(ticket, cost, result);
        }
    }

    fn decide(&self, cost: u32, can_wait: bool, now: Timestamp) -> SpendResult {
        let ask = Ask { cost, scale: self.scale, first_credit: 0, can_wait };
        self.bucket.decide(ask, now)
    }

    /// Answers a caller who waited.
    fn answer(&mut self, ticket: u64, cost: u32, result: SpendResult) {
        self.spilled(result.news.overflowed);
        self.heard_of(result.news.refused);
        if result.is_uncounted {
            self.tally.denied += 1;
        } else if result.is_denied() {
            // The bucket counts tokens.
            self.tally.denied_surplus += u64::from(cost - 1);
        }
        self.tally.unsure += u64::from(!result.is_sure);
        self.answers.push(Answer { ticket, allowed: result.is_allowed(), sure: result.is_sure });
    }

    /// The store has answered those whom the batch asked for: as many go on as tokens came. While it withholds
    /// tokens they are answered as if they had not waited. Where others on this node took what came, and the
    /// store has more, they wait on.
    pub(super) fn answer_asked(&mut self, given: &Given, now: Timestamp, terms: &Terms) {
        let unit = terms.scale.token;
        let mut later = self.waiters.split_off(self.asked);
        let mut waiting = VecDeque::new();
        for waiter in std::mem::take(&mut self.waiters) {
            let Waiter { ticket, cost, .. } = waiter;
            let result = self.decide(cost, true, now);
            if result.verdict != Verdict::Unsure {
                self.answer(ticket, cost, SpendResult { is_sure: true, ..result });
                continue;
            }
            if given.withheld != Withheld::Nothing {
                let result = self.decide(cost, false, now);
                self.answer(ticket, cost, result);
            } else if given.available >= i64::from(cost).saturating_mul(unit) {
                waiting.push_back(waiter);
            } else {
                // The store gave what it had: that is sure.
                self.refused(cost);
                self.answers.push(Answer { ticket, allowed: false, sure: true });
            }
        }
        waiting.append(&mut later);
        self.waiters = waiting;
        self.asked = 0;
    }

    /// Callers who wait are answered by the outage policy.
    pub(super) fn answer_by_policy(&mut self, now: Timestamp) {
        for Waiter { ticket, cost, .. } in std::mem::take(&mut self.waiters) {
            let result = self.decide(cost, false, now);
            self.answer(ticket, cost, result);
        }
        self.asked = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::View;
    use super::*;
    use crate::bucket::{BucketRef, KeyBudget, KeyHasher, Table};
    use crate::limit::Limit;
    use crate::quota::Quota;

    /// What a caller is told who asked for one token, when others have taken those that came and the store has
    /// so many more.
    fn told(available: i64) -> Vec<Answer> {
        let terms = Limit::new("x", Quota::per_second(100)).validate().unwrap();
        let (mut account, now) = account(&terms);
        let waiter = Waiter { ticket: 7, cost: 1, deadline: now.plus_micros(50_000) };
        account.wait(waiter, false, now);
        account.report(&"x".into(), &terms, now, false);
        let given = Given { available: available * terms.scale.token, ..Given::default() };
        account.answer_asked(&given, now, &terms);
        assert_eq!(account.waits_until().is_some(), account.answers.is_empty());
        account.take_answers()
    }

    /// The account of a key that nobody has asked for, and the time.
    fn account(terms: &Terms) -> (Account, Timestamp) {
        let budget = Arc::new(KeyBudget::new(10, 1));
        let table = Arc::new(Table::new(0, KeyHasher::new([1, 2]), budget, 0).unwrap());
        let bucket = BucketRef::new(&table, table.pin(b"key", 0));
        let now = Timestamp::from_micros(1_000);
        (Account::new(bucket, b"key"[..].into(), 0, terms, now), now)
    }

    #[test]
    fn leaving_node_does_not_wait_for_depth_that_it_keeps_registered() {
        let terms = Limit::new("x", Quota::per_second(100)).validate().unwrap();
        let (mut account, now) = account(&terms);
        account.held.depth = 5;
        assert!(!account.try_leave(now), "it is leased");
        account.kept_depth = 5;
        assert!(account.try_leave(now));
    }

    #[test]
    fn new_key_that_needs_nothing_yet_reports_within_four_ticks() {
        let terms = Limit::new("x", Quota::per_minute(20)).credit(0).validate().unwrap();
        let (mut account, now) = account(&terms);
        (account.nodes, account.caller_has_waited, account.seen) = (4, true, 1);
        account.last_arrival = now;
        account.view = Some(View { level: terms.scale.burst, leased: 0, at: now });
        let entry = account.report(&"x".into(), &terms, now, false);
        let given = Given { available: terms.scale.burst, ..Given::default() };
        account.schedule(&given, &entry, now, &terms);
        assert!(account.due <= now.plus_micros(4 * terms.tick_us), "{:?}", account.due);
    }

    #[test]
    fn who_waited_for_tokens_that_others_took_waits_on_while_the_store_has_more() {
        assert_eq!(told(98), []);
        assert_eq!(told(1), []);
        assert_eq!(told(0), [Answer { ticket: 7, allowed: false, sure: true }]);
    }
}
