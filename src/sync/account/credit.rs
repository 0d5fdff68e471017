//! How far a node may spend beyond what the store has leased to it.

use super::Account;
use crate::decision::OVERDRAW_PARTS;
use crate::limit::Terms;
use crate::sync::message::{Given, Withheld};
use crate::time::Timestamp;

/// With a burst of this many tokens a node, it does not matter what the fractions of tokens on all nodes come to.
const FRACTIONS_BURST: i64 = 100;
/// From this many nodes on it is rare that more than half of them have just overdrawn.
const MANY_NODES: i64 = 16;
/// The most of a token that may be overdrawn then.
const OVERDRAW_MAX: f64 = 0.75;

impl Account {
    /// The credit from now on, in tokens: none while refill is leased.
    pub(super) fn credit(&self, terms: &Terms) -> i64 {
        if self.lease.held.rate == 0 { i64::from(terms.credit.known) } else { 0 }
    }

    /// Gives the credit that a reply warrants, less the debt that it does not confirm. `muted`: the next decisions
    /// need not notify the engine.
    pub(super) fn renew_credit(
        &mut self,
        given: &Given,
        muted: bool,
        now: Timestamp,
        terms: &Terms,
    ) {
        // What may be gone is not to be spent on credit either.
        let withheld = given.withheld == Withheld::TokensAndCredit;
        let credit = if withheld { 0 } else { self.credit(terms) };
        // First credit that is left stays while the store has plenty, as far as the nodes that there are now
        // allow; it is not renewed.
        let keeps_first = given.withheld == Withheld::Nothing
            && self.lease.held.rate == 0
            && self.level.is_plentiful(now, &terms.scale);
        self.absorb(now, muted, |debt, left| {
            let renewed = (credit - debt).max(0);
            let first = i64::from(left).min(i64::from(terms.credit.first) - debt);
            (if keeps_first { renewed.max(first) } else { renewed }) as u32
        });
    }

    /// How much of a token may be spent before it is whole, in 64ths, so that the fractions that all nodes hold
    /// come to next to nothing: a token waits half of its time on average, and then for a request.
    pub(super) fn overdraw(&self, terms: &Terms) -> u8 {
        if terms.credit.known == 0 || self.lease.held.rate == 0 || self.spending.owes {
            return 0;
        }
        let nodes = self.cluster.nodes;
        if terms.scale.burst / self.scale.token >= FRACTIONS_BURST * nodes {
            return 0;
        }
        let mut overdraw = 0.5;
        if nodes >= MANY_NODES {
            let demand = (self.arrivals.demand.per_us() * self.scale.token as f64).max(1.0);
            overdraw = (overdraw + self.lease.held.rate as f64 / demand).min(OVERDRAW_MAX);
        }
        (overdraw * OVERDRAW_PARTS as f64) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::StoredWindow;
    use super::super::samples::{OPENED, account_of};
    use super::*;
    use crate::limit::{Credit, Limit};
    use crate::quota::Quota;

    /// How much of a token may be overdrawn, in 64ths, by one of `nodes` whose demand is `times` the refill that it leases.
    fn overdrawn(burst: u64, nodes: i64, times: u32, owes: bool) -> u8 {
        let limit = Limit::new("x", Quota::per_second(1000).burst(burst));
        let terms = limit.validate_hybrid(20).unwrap();
        let mut account = account_of(&terms);
        account.cluster.nodes = nodes;
        account.lease.held.rate = terms.scale.token / 20_000;
        account.spending.owes = owes;
        let (demand, second_us) = (&mut account.arrivals.demand, 1_000_000);
        let now = OPENED.plus_micros(second_us);
        demand.observe(u64::from(50 * times), true, now, terms.tick_us, second_us);
        account.overdraw(&terms)
    }

    #[test]
    fn half_of_a_token_is_overdrawn_and_more_on_many_nodes_in_little_overload() {
        assert_eq!(overdrawn(100, 15, 2, false), 32);
        assert_eq!(overdrawn(100, 16, 2, false), 48, "three quarters are the most");
        assert!((36..=40).contains(&overdrawn(100, 16, 10, false)), "half and a tenth");
        assert_eq!(overdrawn(1600, 16, 2, false), 0, "fractions do not matter");
        assert_eq!(overdrawn(100, 16, 2, true), 0);
    }

    /// The credit after a reply with `available` tokens, where 10 of first credit were left; `rate` is the refill that the node leases.
    fn first_credit_left(available: i64, rate: i64, withheld: Withheld) -> i64 {
        let limit = Limit::new("x", Quota::per_second(1000).burst(1000));
        let mut terms = limit.validate_hybrid(4).unwrap();
        terms.credit = Credit { first: 10, known: 1 };
        let mut account = account_of(&terms);
        account.absorb(OPENED, true, |_, _| 10);
        account.lease.held.rate = rate;
        let available = available * terms.scale.token;
        let given = Given { available, withheld, ..Given::default() };
        let window = StoredWindow { length_us: 1, left_us: 1 };
        account.level.install(&given, &window, 0, OPENED);
        account.renew_credit(&given, true, OPENED, &terms);
        account.spending.credit_given.into()
    }

    #[test]
    fn first_credit_that_is_left_stays_while_the_store_has_plenty() {
        assert_eq!(first_credit_left(501, 0, Withheld::Nothing), 10);
        assert_eq!(first_credit_left(500, 0, Withheld::Nothing), 1);
        assert_eq!(first_credit_left(501, 1, Withheld::Nothing), 0);
        assert_eq!(first_credit_left(501, 0, Withheld::Tokens), 1);
        assert_eq!(first_credit_left(501, 0, Withheld::TokensAndCredit), 0);
    }

    /// There are more nodes than before, so that each has less.
    #[test]
    fn first_credit_that_was_spent_before_counts_towards_what_there_is_now() {
        let limit = Limit::new("x", Quota::per_second(1000).burst(1000));
        let mut terms = limit.validate_hybrid(4).unwrap();
        let mut account = account_of(&terms);
        account.absorb(OPENED, true, |_, _| 10);
        account.spending.unsent.debt = 3;
        terms.credit = Credit { first: 5, known: 1 };
        let available = terms.scale.burst;
        let given = Given { available, ..Given::default() };
        account.level.install(&given, &StoredWindow { length_us: 1, left_us: 1 }, 0, OPENED);
        account.renew_credit(&given, true, OPENED, &terms);
        assert_eq!(account.spending.credit_given, 2);
    }
}
