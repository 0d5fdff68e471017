//! How callers who wait for the store are answered.

use std::collections::VecDeque;

use super::Account;
use super::callers::{CallerAnswer, Waiter};
use crate::bucket::{Ask, SpendResult, Verdict};
use crate::limit::Terms;
use crate::sync::message::{Given, Withheld};
use crate::time::Timestamp;

impl Account {
    /// A caller waits: the key reports at once. Where waiting is `in_vain`, because the store takes longer, the
    /// caller is answered as if it had not waited.
    pub(crate) fn wait(&mut self, waiter: Waiter, in_vain: bool, now: Timestamp) {
        self.history.last_request = now;
        self.report_by(now);
        if in_vain {
            let Waiter { ticket, cost, .. } = waiter;
            let result = self.decide(cost, false, now);
            return self.answer(ticket, cost, result);
        }
        self.history.caller_has_waited = true;
        self.callers.waiting.push_back(waiter);
        if self.policy.is_some() {
            self.answer_by_policy(now);
        }
    }

    /// Answers for callers who waited.
    pub(crate) fn take_answers(&mut self) -> Vec<CallerAnswer> {
        std::mem::take(&mut self.callers.answers)
    }

    /// Callers who have waited long enough are answered as if they had not waited.
    pub(crate) fn give_up(&mut self, now: Timestamp) {
        while let Some(Waiter { ticket, cost, .. }) = self.callers.take_overdue(now) {
            let result = self.decide(cost, false, now);
            self.answer(ticket, cost, result);
        }
        self.resets.give_up(now);
    }

    fn decide(&self, cost: u32, can_wait: bool, now: Timestamp) -> SpendResult {
        let ask =
            Ask { cost, scale: self.scale, first_credit: 0, plan: self.bucket.plan(), can_wait };
        self.bucket.decide(ask, now)
    }

    /// Answers a caller who waited.
    fn answer(&mut self, ticket: u64, cost: u32, result: SpendResult) {
        let (allowed, sure) = (result.is_allowed(), result.is_sure);
        self.callers.answers.push(CallerAnswer { ticket, allowed, sure });
        if cost == 0 {
            // A look is no decision.
            return;
        }
        self.book_spilled(result.news.spilled);
        self.note_denied_cost(result.news.refused);
        if result.is_uncounted {
            self.counts.denied += 1;
        } else if result.is_denied() {
            // The bucket counts tokens.
            self.counts.denied_surplus += u64::from(cost.saturating_sub(1));
        }
        self.counts.unsure += u64::from(!sure);
    }

    /// Answers the callers for whom the batch asked: as many go on as tokens came. While the store withholds
    /// tokens they are answered as if they had not waited. They wait on where others on this node took what came, and
    /// the store has more. Returns whether the store gave tokens for a request that costs more than the level: they are to go back at once.
    pub(super) fn answer_asked(&mut self, given: &Given, now: Timestamp, terms: &Terms) -> bool {
        let (unit, mut gives_unused) = (terms.scale.token, false);
        let mut later = self.callers.waiting.split_off(self.callers.asked);
        let mut waiting = VecDeque::new();
        for waiter in std::mem::take(&mut self.callers.waiting) {
            let Waiter { ticket, cost, .. } = waiter;
            if cost == 0 {
                let here = self.decide(0, false, now);
                let result = if given.withheld == Withheld::Nothing {
                    let verdict = Verdict::of(here.is_allowed() || given.available >= unit);
                    SpendResult { verdict, is_sure: true, ..here }
                } else {
                    here
                };
                self.answer(ticket, 0, result);
                continue;
            }
            let is_too_much = i64::from(cost).saturating_mul(unit) > given.level;
            if is_too_much && given.withheld == Withheld::Nothing {
                // Its cost says nothing of what is needed here.
                self.count_denial(1);
                self.callers.answers.push(CallerAnswer { ticket, allowed: false, sure: true });
                gives_unused |= given.tokens > 0;
                continue;
            }
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
                self.count_denial(cost);
                self.callers.answers.push(CallerAnswer { ticket, allowed: false, sure: true });
            }
        }
        waiting.append(&mut later);
        self.callers.waiting = waiting;
        self.callers.asked = 0;
        gives_unused
    }

    /// Callers who wait are answered by the outage policy.
    pub(super) fn answer_by_policy(&mut self, now: Timestamp) {
        for Waiter { ticket, cost, .. } in std::mem::take(&mut self.callers.waiting) {
            let result = self.decide(cost, false, now);
            self.answer(ticket, cost, result);
        }
        self.callers.asked = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::StoreView;
    use super::super::samples::{OPENED, account_of};
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    /// The answer to a caller that asked for one token, when others have taken those that came and the store has
    /// this many more.
    fn answers(available: i64) -> Vec<CallerAnswer> {
        let terms = Limit::new("x", Quota::per_second(100)).validate().unwrap();
        let (mut account, now) = (account_of(&terms), OPENED);
        let waiter = Waiter { ticket: 7, cost: 1, deadline: now.plus_micros(50_000) };
        account.wait(waiter, false, now);
        account.report(&"x".into(), &terms, now, false);
        let available = available * terms.scale.token;
        let given = Given { available, level: terms.scale.burst, ..Given::default() };
        account.answer_asked(&given, now, &terms);
        assert_eq!(account.callers.waiting.is_empty(), !account.callers.answers.is_empty());
        account.take_answers()
    }

    /// The bucket could not hold what all needed, so that the last were denied, though the store had given it.
    #[test]
    fn report_asks_for_no_more_callers_than_a_bucket_has_room_for() {
        let terms = Limit::new("x", Quota::per_second(100_000_000)).validate().unwrap();
        let (mut account, now) = (account_of(&terms), OPENED);
        for ticket in 0..3 {
            let deadline = now.plus_micros(50_000);
            account.wait(Waiter { ticket, cost: 8_000_000, deadline }, false, now);
        }
        assert_eq!((account.callers.ask(), account.callers.asked), (16_000_000, 2));
        account.callers.waiting.truncate(1);
        account.callers.waiting[0].cost = 20_000_000;
        assert_eq!((account.callers.ask(), account.callers.asked), (20_000_000, 1));
    }

    #[test]
    fn leaving_node_does_not_wait_for_depth_that_it_keeps_registered() {
        let terms = Limit::new("x", Quota::per_second(100)).validate().unwrap();
        let (mut account, now) = (account_of(&terms), OPENED);
        account.lease.held.depth = 5;
        assert!(!account.try_leave(now), "it is leased");
        account.lease.kept_depth = 5;
        assert!(account.try_leave(now));
    }

    #[test]
    fn new_key_that_needs_nothing_yet_reports_within_four_ticks() {
        let terms = Limit::new("x", Quota::per_minute(20)).credit(0).validate().unwrap();
        let (mut account, now) = (account_of(&terms), OPENED);
        (account.cluster.nodes, account.history.caller_has_waited, account.history.requests) =
            (4, true, 1);
        account.history.last_request = now;
        let level = terms.scale.burst;
        account.level.view = Some(StoreView {
            unleased: level,
            level,
            is_partial: false,
            previous: None,
            leased: 0,
            at: now,
            viewed_us: 0,
            window_ends_latest: now,
            was_full: false,
        });
        let entry = account.report(&"x".into(), &terms, now, false);
        let given = Given { available: terms.scale.burst, ..Given::default() };
        account.schedule_report(&given, &entry, now, &terms);
        assert!(
            account.schedule.due <= now.plus_micros(4 * terms.tick_us),
            "{:?}",
            account.schedule.due
        );
    }

    #[test]
    fn caller_whose_tokens_others_took_waits_on_while_the_store_has_more() {
        assert_eq!(answers(98), []);
        assert_eq!(answers(1), []);
        assert_eq!(answers(0), [CallerAnswer { ticket: 7, allowed: false, sure: true }]);
    }

    #[test]
    fn look_is_answered_and_is_no_decision() {
        let terms = Limit::new("x", Quota::per_second(100)).credit(0).validate().unwrap();
        let mut account = account_of(&terms);
        for (cost, unsure) in [(0, 0), (3, 1)] {
            let result = account.decide(cost, false, OPENED);
            account.answer(7, cost, SpendResult { is_sure: false, ..result });
            assert_eq!(account.take_answers().len(), 1);
            let counts = account.take_counts();
            let surplus = u64::from(cost).saturating_sub(1);
            assert_eq!((counts.unsure, counts.denied_surplus), (unsure, surplus), "{cost}");
        }
    }

    #[test]
    fn tokens_for_a_request_that_costs_more_than_there_is_go_back_at_once() {
        for (level, withheld, gives_unused, sure) in [
            (4, Withheld::Nothing, true, true),
            (5, Withheld::Nothing, false, true),
            (4, Withheld::Tokens, false, false),
        ] {
            let terms = Limit::new("x", Quota::per_second(100)).credit(0).validate().unwrap();
            let mut account = account_of(&terms);
            let waiter = Waiter { ticket: 7, cost: 5, deadline: OPENED.plus_micros(50_000) };
            account.wait(waiter, false, OPENED);
            account.report(&"x".into(), &terms, OPENED, false);
            let level = level * terms.scale.token;
            let given = Given { tokens: 2, level, withheld, ..Given::default() };
            assert_eq!(account.answer_asked(&given, OPENED, &terms), gives_unused);
            let answers = account.take_answers();
            assert!(answers.len() == 1 && !answers[0].allowed);
            assert_eq!(answers[0].sure, sure);
        }
    }
}
