//! Callers who wait for the store's word.

use super::Account;
use crate::bucket::{Taken, Verdict};
use crate::limit::Terms;
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
    pub(crate) fn wait(&mut self, waiter: Waiter, in_vain: bool, now: Timestamp, terms: &Terms) {
        self.last_arrival = now;
        self.due = self.due.min(now);
        if in_vain {
            let Waiter { ticket, cost, .. } = waiter;
            let taken = self.bucket.take(cost, now, terms.scale.token);
            return self.answer(ticket, cost, taken);
        }
        self.waited_at = now;
        self.waiters.push_back(waiter);
        if self.policy.is_some() {
            self.answer_by_policy(now, terms);
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
    pub(crate) fn give_up(&mut self, now: Timestamp, terms: &Terms) {
        while self.waiters.front().is_some_and(|first| first.deadline <= now) {
            let Some(Waiter { ticket, cost, .. }) = self.waiters.pop_front() else { return };
            self.asked = self.asked.saturating_sub(1);
            let taken = self.bucket.take(cost, now, terms.scale.token);
            self.answer(ticket, cost, taken);
        }
    }

    /// Answers a caller who waited.
    fn answer(&mut self, ticket: u64, cost: u32, taken: Taken) {
        self.spilled(taken.spilled);
        self.heard_of(taken.refused);
        if taken.uncounted {
            self.tally.denied += 1;
        } else if taken.verdict == Verdict::Denied {
            // The bucket counts tokens.
            self.tally.denied_surplus += u64::from(cost - 1);
        }
        self.tally.unsure += u64::from(!taken.sure);
        self.answers.push(Answer { ticket, allowed: taken.allowed(), sure: taken.sure });
    }

    /// The store has answered those whom the batch asked for: as many go on as tokens came. While it has
    /// `withheld` tokens they are answered as if they had not waited.
    pub(super) fn answer_asked(&mut self, withheld: bool, now: Timestamp, terms: &Terms) {
        let later = self.waiters.split_off(self.asked);
        for Waiter { ticket, cost, .. } in std::mem::replace(&mut self.waiters, later) {
            let taken = self.bucket.take_sure(cost, now, terms.scale.token);
            if taken.verdict == Verdict::Unsure && withheld {
                self.spilled(taken.spilled);
                let taken = self.bucket.take(cost, now, terms.scale.token);
                self.answer(ticket, cost, taken);
            } else if taken.verdict == Verdict::Unsure {
                // The store gave what it had: that is sure.
                self.spilled(taken.spilled);
                self.refused(cost);
                self.answers.push(Answer { ticket, allowed: false, sure: true });
            } else {
                self.answer(ticket, cost, Taken { sure: true, ..taken });
            }
        }
        self.asked = 0;
    }

    /// Callers who wait are answered by the outage policy.
    pub(super) fn answer_by_policy(&mut self, now: Timestamp, terms: &Terms) {
        for Waiter { ticket, cost, .. } in std::mem::take(&mut self.waiters) {
            let taken = self.bucket.take(cost, now, terms.scale.token);
            self.answer(ticket, cost, taken);
        }
        self.asked = 0;
    }
}
