//! Costs that are known only after a request was allowed.

use super::Account;
use crate::limit::Terms;
use crate::quota::{Curve, OWN_UNITS_MAX};
use crate::sync::message::Backdated;
use crate::time::Timestamp;

/// What is settled of a request that was allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// So many of its tokens were not used. If the decision was sure, no outage policy made it.
    Unused { tokens: u32, sure: bool, of: Spender },
    /// It cost so many tokens more.
    Beyond(u32),
}

/// Who spent tokens that go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spender {
    /// This node, when the request was decided.
    Here,
    /// Another one, perhaps, so long before.
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "the service settles them"))]
    Anywhere { before_us: u64 },
}

impl Settlement {
    /// So many tokens of a request that was decided here were not used.
    pub(crate) fn unused(tokens: u32, sure: bool) -> Self {
        Self::Unused { tokens, sure, of: Spender::Here }
    }

    /// So many tokens were not used of a request that another node decided, perhaps, so long before.
    #[cfg(feature = "server")]
    pub(crate) fn unused_anywhere(tokens: u32, before_us: u64) -> Self {
        Self::Unused { tokens, sure: true, of: Spender::Anywhere { before_us } }
    }

    /// How long before the request was decided its tokens were spent.
    pub(crate) fn before_us(self) -> u64 {
        match self {
            Self::Unused { of: Spender::Anywhere { before_us }, .. } => before_us,
            _ => 0,
        }
    }
}

impl Account {
    /// Books what is settled of a request that was decided at `decided`, which was `decided_us` by the lane's time, at the
    /// earliest. Returns how many unused tokens are not given back: those of a window that has ended, and those that an outage
    /// policy allowed, of which the store charges only a part.
    pub(crate) fn settle(
        &mut self,
        settlement: Settlement,
        decided: Timestamp,
        decided_us: Option<i64>,
        now: Timestamp,
        terms: &Terms,
    ) -> u32 {
        self.report_by(now.plus_micros(terms.tick_us));
        match (settlement, decided_us) {
            (Settlement::Beyond(tokens), _) => {
                self.charge_beyond(tokens, now);
                0
            }
            (Settlement::Unused { tokens, sure, .. }, _) if !sure && self.is_of_policy(decided) => {
                tokens
            }
            // What this node has not reported yet was not spent by that request.
            (Settlement::Unused { tokens, of: Spender::Anywhere { .. }, .. }, None) => tokens,
            (Settlement::Unused { tokens, of, .. }, from_us) => {
                let decided = if of == Spender::Here { Some(decided) } else { None };
                self.refund(tokens, decided, from_us, now)
            }
        }
    }

    /// Charges what a request cost beyond its estimate: first what this node holds, and the rest is owed.
    fn charge_beyond(&mut self, tokens: u32, now: Timestamp) {
        self.collect(now, false);
        let mut held = 0;
        if self.policy.is_none() && now < self.lease.ends {
            self.bucket.mint_tokens(now, self.scale.token);
            held = self.bucket.withdraw(tokens);
        }
        self.spending.unsent.spent += i64::from(held);
        self.spending.unsent.debt += i64::from(tokens - held);
        self.spending.owes |= tokens > held;
        // What the key has spent is more than its only request cost.
        self.history.is_expected_to_return = true;
    }

    /// Gives tokens of a request back. `decided` is when this node decided it; `None` if another node may have. Tokens that no report
    /// has charged are taken off the report; others were charged at `from_us` or later.
    fn refund(
        &mut self,
        tokens: u32,
        decided: Option<Timestamp>,
        from_us: Option<i64>,
        now: Timestamp,
    ) -> u32 {
        self.collect(now, true);
        let (unsent, mut left) = (&mut self.spending.unsent, i64::from(tokens));
        // Whose tokens they are does not matter, if they are of one window. A log returns tokens by their age: what was spent
        // later is not given back in place of what was spent first.
        let is_one_window = from_us.is_some() && self.scale.curve != Curve::SlidingLog;
        let is_unreported = decided.is_some_and(|decided| decided > self.spending.reported);
        let is_same = is_unreported || is_one_window;
        if is_same && self.policy.is_none() {
            let spent = left.min(unsent.spent);
            unsent.spent -= spent;
            unsent.spent_before = unsent.spent_before.min(unsent.spent);
            let forfeited = spent.saturating_mul(self.scale.token);
            let forfeited = self.lease.forfeited.saturating_add(forfeited);
            self.lease.forfeited = forfeited.min(OWN_UNITS_MAX);
            let debt = (left - spent).min(unsent.debt);
            unsent.debt -= debt;
            left -= spent + debt;
        }
        match from_us {
            Some(from_us) => unsent.refunded.add(Backdated { tokens: left, from_us }),
            None => return left as u32,
        }
        0
    }

    /// Whether an outage policy may have made a decision then that was not sure.
    fn is_of_policy(&self, decided: Timestamp) -> bool {
        self.policy.is_some() || decided < self.spending.policy_left
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{account_of, answered};
    use super::super::spending::Unsent;
    use crate::quota::Quota;
    use crate::sync::message::Given;
    use std::sync::Arc;

    use super::super::Cluster;
    use super::*;
    use crate::algorithm::{FixedWindow, SlidingLog};
    use crate::bucket::{Ask, BucketRef, KeyBudget, KeyHasher, NewKey, Table};
    use crate::limit::Limit;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    /// A reservation of a window that has ended took 30 tokens of the present one off the report, and they were spent twice.
    #[test]
    fn tokens_of_an_ended_window_that_another_node_spent_are_not_taken_off_this_nodes_report() {
        let (mut account, terms) =
            account_with_ten_unreported(Limit::new("x", FixedWindow::per_second(1000)));
        let of = Spender::Anywhere { before_us: 5_000_000 };
        let unused = Settlement::Unused { tokens: 40, sure: true, of };
        assert_eq!(account.settle(unused, at(3_000), None, at(3_000), &terms), 40);
        account.collect(at(4_000), true);
        assert_eq!(account.spending.tokens(), 10, "they are still to be reported");
    }

    /// The account of a key of which ten tokens were spent, and are not reported.
    fn account_with_ten_unreported(limit: Limit) -> (Account, Terms) {
        let terms = limit.credit(10).validate_hybrid(1).unwrap();
        let budget = Arc::new(KeyBudget::new(10, 1));
        let table = Arc::new(Table::new(0, KeyHasher::new([1, 2]), budget, 0).unwrap());
        let bucket = BucketRef::new(&table, table.pin(b"key", NewKey::with_credit(10)));
        let cluster = Cluster { nodes: 1, round_trip_us: 0, backlog_us: 0, time_us: 0 };
        let key = b"key"[..].into();
        let account = Account::new(bucket, key, 0, cluster, &terms, at(1_000));
        let ask = Ask {
            cost: 10,
            scale: terms.scale,
            first_credit: 10,
            plan: NewKey::NO_PLAN,
            can_wait: false,
        };
        assert!(account.bucket.decide(ask, at(2_000)).is_allowed());
        (account, terms)
    }

    /// What was spent last was given back in place of what was spent first, which left soon: more was admitted within the log's time.
    #[test]
    fn tokens_of_a_log_that_another_node_spent_are_not_taken_off_this_nodes_report() {
        let (mut account, terms) =
            account_with_ten_unreported(Limit::new("x", SlidingLog::per_minute(1000)));
        let of = Spender::Anywhere { before_us: 58_000_000 };
        let unused = Settlement::Unused { tokens: 40, sure: true, of };
        assert_eq!(account.settle(unused, at(3_000), Some(1), at(3_000), &terms), 0);
        account.collect(at(4_000), true);
        let unsent = account.spending.unsent;
        assert_eq!((account.spending.tokens(), unsent.refunded.tokens), (10, 40));
    }

    #[test]
    fn request_that_no_policy_decided_gives_back_what_it_did_not_use_though_it_was_not_sure() {
        let (mut account, terms) =
            account_with_ten_unreported(Limit::new("x", FixedWindow::per_second(1000)));
        let unused = Settlement::unused(4, false);
        assert_eq!(account.settle(unused, at(2_000), Some(1), at(3_000), &terms), 0);
        assert_eq!(account.spending.tokens(), 6);
    }

    #[test]
    fn cost_beyond_the_estimate_is_charged_to_the_lease_until_it_ends() {
        let ends = at(1_900_000);
        for (now, spent, debt) in [(at(1_899_999), 4, 0), (ends, 0, 4)] {
            let limit = Limit::new("x", Quota::per_second(1000)).credit(0);
            let terms = limit.validate_hybrid(1).unwrap();
            let mut account = account_of(&terms);
            let given = Given { tokens: 10, depth: 10, life_us: 2_000_000, ..Given::default() };
            answered(&mut account, &given, &terms);
            account.lease.ends = ends;
            account.settle(Settlement::Beyond(4), at(1_500), None, now, &terms);
            let unsent = account.spending.unsent;
            assert_eq!((unsent.spent, unsent.debt), (spent, debt), "{now:?}");
            assert_eq!(account.spending.owes, debt > 0);
        }
    }

    #[test]
    fn tokens_of_a_lease_that_were_not_used_are_taken_off_the_report_and_given_up() {
        let (mut account, terms) =
            account_with_ten_unreported(Limit::new("x", FixedWindow::per_second(1000)));
        account.collect(at(2_500), true);
        account.spending.unsent =
            Unsent { spent: 8, spent_before: 7, debt: 2, ..Unsent::default() };
        let unused = Settlement::unused(9, true);
        assert_eq!(account.settle(unused, at(2_600), Some(1), at(3_000), &terms), 0);
        let Unsent { spent, spent_before, debt, .. } = account.spending.unsent;
        assert_eq!((spent, spent_before, debt), (0, 0, 1));
        assert_eq!(account.lease.forfeited, 8 * terms.scale.token);
        let unused = Settlement::unused(3, true);
        assert_eq!(account.settle(unused, at(2_600), Some(1), at(3_000), &terms), 0);
        let Unsent { debt, refunded, .. } = account.spending.unsent;
        assert_eq!((debt, refunded.tokens), (0, 2), "the rest was reported before");
    }

    /// The store charges only a part of what a policy allows.
    #[test]
    fn unsure_request_of_an_outage_policy_gives_nothing_back() {
        for (sure, decided, kept) in
            [(false, at(2_000), 4), (true, at(2_000), 0), (false, at(2_500), 0)]
        {
            let (mut account, terms) =
                account_with_ten_unreported(Limit::new("x", FixedWindow::per_second(1000)));
            account.spending.policy_left = at(2_500);
            let unused = Settlement::unused(4, sure);
            assert_eq!(account.settle(unused, decided, Some(1), at(3_000), &terms), kept);
        }
    }
}
