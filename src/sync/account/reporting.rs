//! A key's entry in a batch, and what becomes of one that was never applied.

use std::sync::Arc;

use super::Account;
use super::giving_back::Returned;
use crate::limit::{OutagePolicy, Terms};
use crate::quota::{Curve, OWN_UNITS_MAX};
use crate::sync::message::Entry;
use crate::time::Timestamp;

/// Below so many units in a microsecond tokens alone are leased: what is taken off a rate since clocks may differ is a whole unit, more
/// than a hundredth of such a rate.
const LEASED_RATE_MIN: i64 = 100;

/// What a report asks for.
struct Wanted {
    /// Tokens to hold.
    tokens: i64,
    /// The demand to register, in units per microsecond.
    demand: i64,
    /// Leased refill, in units per microsecond.
    rate: i64,
}

impl Account {
    /// Makes the key's entry for a batch: books what was spent, gives back what is not needed,
    /// and asks for what is. What is given back leaves the bucket before the batch is sent.
    pub(crate) fn report(
        &mut self,
        limit: &Arc<str>,
        terms: &Terms,
        now: Timestamp,
        leaving: bool,
    ) -> Entry {
        self.schedule.is_reporting = true;
        self.close_window_if_due(now);
        self.doubt_window_count();
        self.bucket.mint_tokens(now, self.scale.token);
        // Nothing more can be sent before the answer.
        self.collect(now, true);
        self.arrivals.observe_demand(now, terms);
        let claim = self.level_in_store().claim(now, &self.stored_scale());
        let wanted = self.wanted(now, terms, leaving);
        let returned = self.give_back(terms, now, wanted.tokens, wanted.rate);
        let tokens = self.bucket.mint_tokens(now, self.scale.token);
        if self.lease.restore {
            self.lease.held.outstanding = self.most_held();
            // What outage policies began with is not in it.
            self.lease.left_to_policies = Some(0);
        }
        self.arrivals.stop_probing();
        self.schedule.stop_probing();
        let entry = self.entry(limit, terms, &wanted, &returned, tokens);
        self.spending.reported = now;
        self.lease.reported = entry.held;
        Entry { claim, ..self.quota.in_stored_units(entry) }
    }

    fn wanted(&self, now: Timestamp, terms: &Terms, leaving: bool) -> Wanted {
        if leaving {
            return Wanted { tokens: 0, demand: 0, rate: 0 };
        }
        let (per_us, hot) = self.wanted_per_us(now, terms);
        let demand = (per_us * self.scale.token as f64) as i64;
        // Where the last rate goes on in an outage, a coarse one is better than none.
        let is_kept = terms.outage == OutagePolicy::LastRate;
        let is_leased = hot && (is_kept || terms.scale.rate >= LEASED_RATE_MIN);
        Wanted { tokens: self.need(now, terms), demand, rate: if is_leased { demand } else { 0 } }
    }

    /// The entry, with what has been spent, which is not to be reported again, and without a claim.
    fn entry(
        &mut self,
        limit: &Arc<str>,
        terms: &Terms,
        wanted: &Wanted,
        returned: &Returned,
        tokens: u32,
    ) -> Entry {
        let unsent = std::mem::take(&mut self.spending.unsent);
        self.history.has_charged |= unsent.spent + unsent.debt + unsent.allowed > 0;
        let restore = self.lease.restore;
        Entry {
            limit: limit.clone(),
            key: self.key.clone(),
            scale: terms.scale,
            version: 0,
            epoch_us: terms.epoch_us as i64,
            spent: unsent.spent,
            debt: unsent.debt,
            allowed: unsent.allowed,
            taken: unsent.taken,
            taken_before: unsent.taken_before,
            returned: if restore { 0 } else { returned.units },
            lost: if restore { 0 } else { returned.forfeited },
            back_rate: returned.rate,
            back_depth: returned.depth,
            spent_before: unsent.spent_before,
            refunded: unsent.refunded,
            window_span_us: [0; 2],
            unspent: unsent.unspent,
            held: self.lease.held,
            demand: wanted.demand.min(4 * terms.scale.burst),
            needed: self.callers.ask(),
            want: (wanted.tokens - i64::from(tokens)).max(0),
            want_rate: wanted.rate,
            restore,
            claim: None,
            reset: false,
        }
    }

    /// The most that the node can come to hold of its lease, with what it spent, in units. What an outage policy gives is no lease.
    fn most_held(&self) -> i64 {
        let (left, pending) = self.bucket.held_and_pending();
        let left = if self.policy.is_some() { 0 } else { i64::from(left) };
        let refilled = if self.lease.held.rate > 0 { self.lease.held.depth } else { 0 };
        // Of a token a part may have flowed in; of a window nothing flows in any more.
        let part = i64::from(self.stored_scale().curve == Curve::Refill);
        let pending = pending + self.spending.spilled;
        let spent = self.spending.unsent.spent.saturating_add_unsigned(pending);
        let tokens = refilled.max(left) + part + spent;
        tokens.saturating_mul(self.scale.token).min(OWN_UNITS_MAX)
    }

    /// The batch with the report has ended.
    pub(crate) fn end_report(&mut self) {
        self.schedule.is_reporting = false;
    }

    /// The batch with this entry was never applied: its contents are to be reported anew.
    pub(crate) fn revoke(&mut self, entry: &Entry) {
        let entry = self.in_own_units(entry);
        self.take_back(&entry);
        // The store that was lost still had it leased to this node, and so has the next.
        self.lease.take_back(&entry);
        self.lease.kept_depth += entry.back_depth;
    }

    /// The store has lost the key: what this node knows of it is to be reported at once.
    pub(crate) fn register_anew(&mut self, now: Timestamp) {
        let stored = self.stored_scale();
        if stored.curve == Curve::SlidingWindow {
            // How fast its new record rises is not known yet.
            self.stop_refill(now);
        }
        (self.lease.restore, self.lease.is_registering) = (true, true);
        self.report_at(now);
    }

    pub(super) fn take_back(&mut self, entry: &Entry) {
        self.callers.asked = 0;
        self.resets.take_back();
        self.spending.take_back(entry);
        self.count_before_policy(entry.allowed);
        self.lease.forfeited += entry.returned + entry.lost;
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{OPENED, account_of};
    use crate::algorithm::SlidingWindow;
    use crate::limit::Limit;
    use crate::quota::Quota;
    use crate::sync::message::Entry;

    #[test]
    fn depth_that_a_lost_batch_gave_back_stays_registered_and_out_of_the_bucket() {
        let terms = Limit::new("x", Quota::per_second(1000)).validate().unwrap();
        let mut account = account_of(&terms);
        account.lease.held.depth = 5;
        let entry = account.report(&"x".into(), &terms, OPENED, true);
        assert_eq!((entry.back_depth, account.lease.held.depth), (5, 0));
        account.end_report();
        account.revoke(&entry);
        assert_eq!(account.lease.held.depth, 5, "the store may have it");
        assert_eq!(account.lease.applied(0, 0).depth, 0);
    }

    /// After a loss the store takes this for what the node holds: it may be too much, never too little.
    #[test]
    fn node_may_hold_all_leased_depth_the_part_of_a_token_and_what_it_spent() {
        let bucket = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
        let window = Limit::new("x", SlidingWindow::per_second(1000)).validate_hybrid(4).unwrap();
        for (terms, rate, tokens) in
            [(&bucket, 1, 10 + 1 + 3), (&bucket, 0, 1 + 3), (&window, 1, 10 + 3)]
        {
            let mut account = account_of(terms);
            (account.lease.held.depth, account.lease.held.rate) = (10, rate);
            account.spending.unsent.spent = 3;
            assert_eq!(account.most_held(), tokens * terms.scale.token);
        }
        let mut account = account_of(&bucket);
        (account.lease.restore, account.spending.unsent.spent) = (true, 3);
        let entry = account.report(&"x".into(), &bucket, OPENED, false);
        assert_eq!((entry.restore, entry.held.outstanding), (true, 4 * bucket.scale.token));
    }

    #[test]
    fn tokens_that_a_batch_gave_back_in_vain_are_forfeited() {
        let terms = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
        let mut account = account_of(&terms);
        let entry = Entry { returned: 200, lost: 30, ..Entry::empty(terms.scale) };
        account.revoke(&entry);
        assert_eq!(account.lease.forfeited, 230);
    }
}
