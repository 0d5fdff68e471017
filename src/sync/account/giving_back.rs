//! What a node returns with a report.

use super::Account;
use crate::limit::Terms;
use crate::time::Timestamp;

/// What a report gives back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Returned {
    /// Units that were taken out of the bucket.
    pub(super) units: i64,
    /// Units that the node should hold and does not: refill that a full bucket lost.
    pub(super) forfeited: i64,
    /// Leased refill, in units per microsecond.
    pub(super) rate: i64,
    /// Leased depth, in tokens.
    pub(super) depth: i64,
}

impl Account {
    /// Takes what is not needed out of the bucket: tokens beyond `need`, the rate that the store
    /// wants back or that demand does not use, and the depth that goes with them.
    pub(super) fn give_back(
        &mut self,
        terms: &Terms,
        now: Timestamp,
        need: i64,
        rate_used: i64,
    ) -> Returned {
        if self.policy.is_some() {
            return Returned::default();
        }
        let ended = now >= self.lease.ends;
        let rate_before = self.lease.held.rate;
        let rate = self.give_back_rate(terms, now, ended, rate_used);
        let mut units = self.give_back_tokens(now, need, ended);
        if self.lease.held.rate == 0 && rate > 0 && !ended {
            // The fraction of a token goes back too: the smaller depth has no room for it.
            units += self.lease.remainder.max(0);
            self.lease.remainder = self.lease.remainder.min(0);
        }
        let mut forfeited = std::mem::take(&mut self.lease.forfeited);
        let (left, pending) = self.bucket.held_and_pending();
        if rate_before == 0 && !self.bucket.has_spilled() {
            // Nothing flowed in, so that the loss is known exactly.
            self.lease.remainder = 0;
            let spent = self.spending.unsent.spent + (pending + self.spending.spilled) as i64;
            let here = (i64::from(left) + spent) * self.scale.token + units;
            forfeited = forfeited.max(self.lease.held.outstanding - here);
        }
        let depth = self.give_back_depth(terms, now, left.into(), rate_used);
        Returned { units, forfeited, rate, depth }
    }

    /// Gives back the rate that the store wants back or that demand does not use.
    fn give_back_rate(
        &mut self,
        terms: &Terms,
        now: Timestamp,
        ended: bool,
        rate_used: i64,
    ) -> i64 {
        let before = self.lease.held.rate;
        if std::mem::take(&mut self.lease.is_refill_stopped) {
            self.lease.held.rate = 0;
            return before;
        }
        let unused = if before > 2 * rate_used { before - rate_used } else { 0 };
        // The store recalls all refill when it can give tokens instead, or when the key is in debt. A node obeys if tokens would do, or
        // if the debt is more than credit and overdrawn refill explain: the credit and one token more on each node. A smaller debt
        // stays while nodes need their refill.
        let recall = std::mem::take(&mut self.lease.recall);
        let usual_debt = self.cluster.nodes.saturating_mul(i64::from(terms.credit.known) + 1);
        let owes_more = self.level.owes_more_than(usual_debt.saturating_mul(self.scale.token));
        let keeps = recall >= before && !owes_more && !self.spares_refill(now, terms);
        let recall = if keeps { 0 } else { recall };
        let rate = if ended { before } else { recall.max(unused).min(before) };
        self.lease.held.rate -= rate;
        if rate > 0 && !ended {
            let lease = self.lease.applied(0, self.overdraw(terms));
            self.amend(now, lease, 0);
            // What was overdrawn is owed from now on.
            self.spending.owes |= self.lease.held.rate == 0 && self.lease.remainder < 0;
        }
        rate
    }

    /// Takes the tokens beyond `need` out of the bucket. Returns the units that they are.
    fn give_back_tokens(&mut self, now: Timestamp, need: i64, ended: bool) -> i64 {
        let tokens = i64::from(self.bucket.mint_tokens(now, self.scale.token));
        let surplus = match ended {
            true => u32::MAX,
            false if tokens > need + need / 4 => (tokens - need) as u32,
            false => 0,
        };
        let withdrawn = self.bucket.withdraw(surplus);
        i64::from(withdrawn) * self.scale.token
    }

    /// Gives back the depth that is not needed beside the tokens that are `left`.
    fn give_back_depth(&mut self, terms: &Terms, now: Timestamp, left: i64, rate_used: i64) -> i64 {
        let registered = self.lease.held.depth;
        let before = registered - std::mem::take(&mut self.lease.kept_depth);
        let depth = (left + self.depth_for_refill(terms, now, left, before, rate_used)).min(before);
        if self.lease.is_registering {
            self.lease.kept_depth = registered - depth;
        }
        self.lease.held.depth = depth + self.lease.kept_depth;
        self.bucket.set_depth(depth as u32);
        registered - self.lease.held.depth
    }

    /// Room for leased refill. Depth that is not filled keeps the store's level down. Refill that is spent as it flows
    /// in needs next to none; other refill would be lost without it, once tokens are scarce.
    fn depth_for_refill(
        &self,
        terms: &Terms,
        now: Timestamp,
        left: i64,
        before: i64,
        rate_used: i64,
    ) -> i64 {
        let rate = self.lease.held.rate;
        let is_pressed = rate_used > rate + rate / 4;
        let burst = self.arrivals.bursts.expected(now);
        match (rate > 0, self.level.is_scarce(&terms.scale)) {
            (false, _) => 0,
            // Between two bursts refill gathers for the next one.
            (true, _) if burst > 0 => (burst - left).max(1),
            (true, false) => 1,
            (true, true) if is_pressed => 2,
            (true, true) => before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{OPENED, account_of, answered};
    use crate::limit::Limit;
    use crate::quota::Quota;
    use crate::sync::message::Given;

    /// What is given back by a node that is leased refill of 100, and then needs this much of it, and the part of a token that it keeps.
    fn given_back(rate_used: i64) -> (i64, i64, i64) {
        let terms = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
        let mut account = account_of(&terms);
        account.lease.held.rate = 100;
        account.lease.held.depth = 5;
        account.lease.remainder = 123;
        account.lease.ends = OPENED.plus_micros(2_000_000);
        let returned = account.give_back(&terms, OPENED, 0, rate_used);
        (returned.rate, returned.units, account.lease.remainder)
    }

    #[test]
    fn part_of_a_token_goes_back_with_the_last_refill() {
        assert_eq!(given_back(100), (0, 0, 123));
        assert_eq!((given_back(40).0, given_back(40).1), (60, 0), "some refill stays");
        assert_eq!(given_back(0), (100, 123, 0));
    }

    #[test]
    fn outstanding_tokens_neither_held_nor_spent_are_forfeited_where_no_refill_flows_in() {
        let terms = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
        for (rate, lost) in [(0, 7), (100, 0)] {
            let mut account = account_of(&terms);
            account.lease.held.rate = rate;
            account.lease.held.outstanding = 10 * terms.scale.token;
            account.lease.ends = OPENED.plus_micros(2_000_000);
            account.spending.unsent.spent = 3;
            let returned = account.give_back(&terms, OPENED, 0, rate);
            assert_eq!(returned.forfeited, lost * terms.scale.token);
        }
    }

    #[test]
    fn overdrawn_part_of_a_token_is_owed_once_no_refill_is_leased() {
        for (rate_used, owes) in [(100, false), (40, false), (0, true)] {
            let terms = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            (account.lease.held.rate, account.lease.held.depth) = (100, 5);
            account.lease.remainder = -5;
            account.lease.ends = OPENED.plus_micros(2_000_000);
            account.give_back(&terms, OPENED, 0, rate_used);
            assert_eq!(account.spending.owes, owes, "{rate_used}");
        }
    }

    #[test]
    fn tokens_go_back_where_a_quarter_more_than_the_need_is_held_or_the_lease_has_ended() {
        for (need, ended, tokens) in [(8, false, 0), (7, false, 3), (0, false, 10), (8, true, 10)] {
            let terms = Limit::new("x", Quota::per_second(1000)).credit(0);
            let terms = terms.validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            let given = Given { tokens: 10, depth: 10, life_us: 2_000_000, ..Given::default() };
            answered(&mut account, &given, &terms);
            let units = account.give_back_tokens(OPENED, need, ended);
            assert_eq!(units, tokens * terms.scale.token, "{need}, {ended}");
        }
    }
}
