//! What decisions have spent of one key and no batch has reported.

use crate::sync::message::{Backdated, Entry};
use crate::time::Timestamp;

/// An account is opened within so long after the decision that it is opened for.
const OPENED_LATE_US: u64 = 250_000;

/// Tokens spent and not yet in a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unsent {
    /// Of the lease.
    pub(super) spent: i64,
    /// Of that, before its refill ended with a window.
    pub(super) spent_before: i64,
    /// On credit.
    pub(super) debt: i64,
    /// Under an outage policy, or of a lease that has ended.
    pub(super) allowed: i64,
    /// Units that outage policies took out of the bucket.
    pub(super) taken: i64,
    /// The same, in the sliding window before the one now.
    pub(super) taken_before: i64,
    /// Of what was spent, in this report or an earlier one: not used after all.
    pub(super) refunded: Backdated,
    /// Never spent, of a lease that has ended: the store counted it as spent.
    pub(super) unspent: Backdated,
}

impl Unsent {
    /// Whether there is something that outage policies took.
    pub(super) fn has_taken(&self) -> bool {
        self.taken > 0 || self.taken_before > 0
    }
}

/// What has been spent, and the credit that some of it was spent on.
#[derive(Debug)]
pub(super) struct Spending {
    pub(super) unsent: Unsent,
    /// Tokens that no longer fitted the bucket's word, and have not been booked.
    pub(super) spilled: u64,
    /// Tokens beyond one a request that were told before the tokens themselves.
    pub(super) surplus: u64,
    /// The credit that the bucket was given last.
    pub(super) credit_given: u32,
    /// When an outage policy was left last.
    pub(super) policy_left: Timestamp,
    /// When the last report was made: what was spent by then is not unsent.
    pub(super) reported: Timestamp,
    /// Tokens were spent on credit or overdrawn, and that has not been seen repaid.
    pub(super) owes: bool,
}

impl Spending {
    pub(super) fn new(credit_given: u32, now: Timestamp) -> Self {
        Self {
            unsent: Unsent::default(),
            spilled: 0,
            surplus: 0,
            credit_given,
            policy_left: now.minus_micros(OPENED_LATE_US),
            reported: Timestamp::ZERO,
            owes: false,
        }
    }

    /// Books tokens that were spent while `credit_left` was left of the credit; `credit` is given from now on.
    pub(super) fn book(&mut self, tokens: u64, credit_left: u32, credit: u32, by_policy: bool) {
        let on_credit = i64::from(self.credit_given - credit_left.min(self.credit_given));
        self.credit_given = credit;
        let tokens = tokens as i64;
        if by_policy {
            self.unsent.allowed += tokens;
            return;
        }
        let debt = on_credit.min(tokens);
        self.owes |= debt > 0;
        self.unsent.debt += debt;
        self.unsent.spent += tokens - debt;
    }

    /// Whether nothing is left to report.
    pub(super) fn is_reported(&self) -> bool {
        self.unsent == Unsent::default()
    }

    /// Tokens that are booked or about to be.
    pub(super) fn tokens(&self) -> u64 {
        let Unsent { spent, debt, allowed, .. } = self.unsent;
        (spent + debt + allowed) as u64 + self.spilled
    }

    /// The contents of a report that was never applied are to be reported anew.
    pub(super) fn take_back(&mut self, entry: &Entry) {
        self.unsent.spent += entry.spent;
        self.unsent.spent_before += entry.spent_before;
        self.unsent.debt += entry.debt;
        self.unsent.allowed += entry.allowed;
        self.unsent.taken = self.unsent.taken.saturating_add(entry.taken);
        self.unsent.taken_before = self.unsent.taken_before.saturating_add(entry.taken_before);
        self.unsent.refunded.add(entry.refunded);
        self.unsent.unspent.add(entry.unspent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_policies_took_in_either_window_are_to_be_reported() {
        assert!(!Unsent { spent: 1, ..Unsent::default() }.has_taken());
        assert!(Unsent { taken: 1, ..Unsent::default() }.has_taken());
        assert!(Unsent { taken_before: 1, ..Unsent::default() }.has_taken());
    }

    #[test]
    fn tokens_that_were_spent_on_credit_are_owed_from_then_on() {
        let mut spending = Spending::new(3, Timestamp::ZERO);
        spending.book(2, 3, 3, false);
        assert_eq!((spending.unsent.spent, spending.unsent.debt, spending.owes), (2, 0, false));
        spending.book(2, 2, 3, false);
        assert_eq!((spending.unsent.spent, spending.unsent.debt, spending.owes), (3, 1, true));
        spending.book(2, 3, 3, false);
        assert!(spending.owes, "it has not been seen repaid");
    }
}
