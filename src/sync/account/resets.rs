//! Callers who reset a key.

use std::collections::VecDeque;

use super::Account;
use crate::time::Timestamp;

/// A caller who waits until the store has reset a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResetWaiter {
    /// Names the caller in the outcome.
    pub(crate) ticket: u64,
    /// Until when the caller waits.
    pub(crate) deadline: Timestamp,
}

/// What became of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetOutcome {
    /// The store has reset the key.
    Taken,
    /// The store refuses the key.
    Refused,
    /// The store has not answered in time. It may have reset the key all the same.
    TimedOut,
}

/// The callers of one key.
#[derive(Debug, Default)]
pub(super) struct Resets {
    /// All wait equally long.
    waiting: VecDeque<ResetWaiter>,
    /// For how many of the first the batch in flight resets the key.
    asked: usize,
    /// Outcomes that have not been handed out, with the tickets.
    outcomes: Vec<(u64, ResetOutcome)>,
}

impl Resets {
    /// Whether nobody waits.
    pub(super) fn is_none(&self) -> bool {
        self.waiting.is_empty()
    }

    /// When the first caller has waited long enough.
    pub(super) fn wait_ends(&self) -> Option<Timestamp> {
        self.waiting.front().map(|waiter| waiter.deadline)
    }

    /// The batch in flight does not count as a reset of the key: it was not applied, or its reset is undone.
    pub(super) fn take_back(&mut self) {
        self.asked = 0;
    }

    fn end(&mut self, count: usize, outcome: ResetOutcome) {
        self.asked = self.asked.saturating_sub(count);
        let ended = self.waiting.drain(..count.min(self.waiting.len()));
        self.outcomes.extend(ended.map(|waiter| (waiter.ticket, outcome)));
    }

    /// Callers who have waited long enough are told so. What no batch has told the store is not told any more.
    pub(super) fn give_up(&mut self, now: Timestamp) {
        let overdue = self.waiting.iter().take_while(|waiter| waiter.deadline <= now).count();
        self.end(overdue, ResetOutcome::TimedOut);
    }
}

impl Account {
    /// A caller resets the key: it reports at once.
    pub(crate) fn reset(&mut self, waiter: ResetWaiter, now: Timestamp) {
        self.resets.waiting.push_back(waiter);
        self.report_by(now);
    }

    /// Whether the report that is being made is to reset the key. It is not while the store asks for what nodes know of the
    /// key: what they tell after that would undo it.
    pub(crate) fn ask_reset(&mut self, is_recovering: bool) -> bool {
        let may_ask = !is_recovering && !self.lease.restore;
        self.resets.asked = if may_ask { self.resets.waiting.len() } else { 0 };
        self.resets.asked > 0
    }

    /// The store has applied the report. Callers whose reset was in it are done; the others wait for the next report, at `next` or
    /// later. While the store recovers, what nodes report undoes the reset, so that all callers wait.
    pub(crate) fn end_resets(&mut self, is_recovering: bool, next: Timestamp) {
        if is_recovering {
            self.resets.take_back();
        }
        self.resets.end(self.resets.asked, ResetOutcome::Taken);
        if !self.resets.is_none() {
            self.report_by(next);
        }
    }

    /// The store refuses the key.
    pub(crate) fn refuse_resets(&mut self) {
        self.resets.end(self.resets.waiting.len(), ResetOutcome::Refused);
    }

    /// Outcomes for callers, with their tickets.
    pub(crate) fn take_reset_outcomes(&mut self) -> Vec<(u64, ResetOutcome)> {
        std::mem::take(&mut self.resets.outcomes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::account_of;
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_micros(1000 * ms)
    }

    fn wait(resets: &mut Resets, ticket: u64, until_ms: u64) {
        resets.waiting.push_back(ResetWaiter { ticket, deadline: at(until_ms) });
    }

    #[test]
    fn caller_who_came_after_the_batch_waits_for_the_next_one() {
        let mut resets = Resets::default();
        wait(&mut resets, 1, 10);
        resets.asked = 1;
        wait(&mut resets, 2, 20);
        resets.end(resets.asked, ResetOutcome::Taken);
        assert_eq!(resets.outcomes, [(1, ResetOutcome::Taken)]);
        assert_eq!((resets.asked, resets.wait_ends()), (0, Some(at(20))));
    }

    #[test]
    fn caller_who_gave_up_is_told_so_once_and_the_others_wait_on() {
        let mut resets = Resets::default();
        wait(&mut resets, 1, 10);
        wait(&mut resets, 2, 20);
        resets.asked = 2;
        resets.give_up(at(10));
        assert_eq!(resets.outcomes, [(1, ResetOutcome::TimedOut)]);
        resets.end(resets.asked, ResetOutcome::Taken);
        assert_eq!(resets.outcomes[1..], [(2, ResetOutcome::Taken)]);
        assert!(resets.is_none());
    }

    fn account() -> Account {
        account_of(&Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap())
    }

    #[test]
    fn reset_goes_with_a_report_and_its_caller_is_answered_when_it_was_applied() {
        let mut account = account();
        assert!(!account.ask_reset(false), "nobody resets the key");
        account.reset(ResetWaiter { ticket: 7, deadline: at(100) }, at(10));
        assert_eq!(account.due(), at(10));
        assert!(account.is_pressing());
        assert!(account.ask_reset(false));
        account.end_resets(false, at(30));
        assert_eq!(account.take_reset_outcomes(), [(7, ResetOutcome::Taken)]);
        assert_eq!(account.take_reset_outcomes(), [], "once");
    }

    #[test]
    fn reset_waits_until_the_recovery_is_over() {
        for (is_recovering, restore) in [(true, false), (false, true)] {
            let mut account = account();
            account.lease.restore = restore;
            account.reset(ResetWaiter { ticket: 7, deadline: at(100) }, at(10));
            assert!(!account.ask_reset(is_recovering));
            account.report_at(Timestamp::NEVER);
            account.end_resets(is_recovering, at(30));
            assert_eq!((account.due(), account.take_reset_outcomes()), (at(30), vec![]));
        }
    }

    /// The batch carried the reset, and what other nodes report after it undoes it.
    #[test]
    fn reset_that_a_recovering_store_took_is_made_again() {
        let mut account = account();
        account.reset(ResetWaiter { ticket: 7, deadline: at(100) }, at(10));
        assert!(account.ask_reset(false));
        account.end_resets(true, at(30));
        assert_eq!(account.take_reset_outcomes(), []);
        assert!(account.ask_reset(false));
    }

    #[test]
    fn refusal_of_the_store_ends_all_resets() {
        let mut account = account();
        account.reset(ResetWaiter { ticket: 7, deadline: at(100) }, at(10));
        account.refuse_resets();
        assert_eq!(account.take_reset_outcomes(), [(7, ResetOutcome::Refused)]);
    }
}
