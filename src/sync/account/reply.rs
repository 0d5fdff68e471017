//! What the store's answer changes.

use super::lease::rate_kept;
use super::level::{Installed, StoredWindow};
use super::{Account, Cluster};
use crate::bucket::Lease;
use crate::limit::Terms;
use crate::quota::Curve;
use crate::sync::message::{Entry, Given, Withheld};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// An early sync was productive if it brought this part of what was wanted.
const PRODUCTIVE_PART: i64 = 4;
/// A window that gets tokens back all the time is not taken to be empty for longer.
const EMPTY_MAX_US: u64 = 25_000;
/// At the end of a window that has few tokens, it is not taken to be empty for longer than what is left of it, divided by this.
const EMPTY_DIVISOR: u64 = 4;
/// It is taken to be empty for so long at least: else callers would ask at each round trip.
const EMPTY_MIN_US: u64 = 3_000;
/// It is taken to be empty for so long where this node is to hold nothing of it.
const EMPTY_AT_LAST_US: u64 = 2_000;

impl Account {
    /// Adds what the store gave to what is held. `first_sent` is when the batch was first sent.
    pub(crate) fn install(
        &mut self,
        given: &Given,
        entry: &Entry,
        first_sent: Timestamp,
        now: Timestamp,
        terms: &Terms,
    ) -> Installed {
        self.close_window_if_due(now);
        self.doubt_window_count();
        if given.rate > 0 {
            // A node spends on credit or overdraws its refill, never both.
            self.absorb(now, true, |_, _| 0);
        } else {
            self.collect(now, true);
        }
        let installed = self.drift(given, entry, now, terms);
        self.level.observe_growth(given, entry, self.cluster.nodes, now, terms);
        let stored = self.stored_scale();
        if given.void {
            // The store counted all that was leased as spent.
            let unsent = &mut self.spending.unsent;
            let spent = std::mem::take(&mut unsent.spent);
            let unspent =
                self.lease.unspent(entry, spent, &stored, self.scale.token, terms.epoch_us);
            unsent.allowed += spent;
            unsent.unspent.add(unspent);
            unsent.spent_before = 0;
            self.count_before_policy(spent);
        }
        self.lease.renew(given, entry, first_sent, stored, self.scale.token);
        self.renew_left_to_policies(given.void, terms);
        self.lease.is_registering &= given.withheld != Withheld::Nothing;
        let window = self.stored_window(given, terms);
        self.level.install(given, &window, self.cluster.time_us, now);
        self.spending.owes &= given.available < 0 || self.spending.unsent.debt > 0;
        self.show_view(given, &window, first_sent, now, terms);
        let rate_kept = rate_kept(given, entry, stored);
        self.apply_lease(given, rate_kept, first_sent, now, terms);

        self.judge_early(given, entry, now, terms);
        let gives_unused = self.answer_asked(given, now, terms);
        // While asking early does not help before the next report is due anyway, decisions are spared the
        // notifications.
        let muted = self.schedule.early_from() >= now.plus_micros(terms.tick_us);
        self.renew_credit(given, muted, now, terms);
        self.schedule_report(given, entry, now, terms);
        if gives_unused {
            // Other nodes can use what this one cannot.
            self.report_by(now);
        }
        self.plan_probe(now, terms);
        installed
    }

    /// The window in which the store answered; of a token bucket, nothing that matters.
    fn stored_window(&self, given: &Given, terms: &Terms) -> StoredWindow {
        let stored = self.stored_scale();
        let (length_us, stamp_us) = (stored.window_us(), given.stamp_us.max(0));
        let left_us = match (stored.curve, terms.calendar) {
            (Curve::CalendarWindow, Some(calendar)) => {
                calendar.window_span_us(stamp_us as u64)[1] - stamp_us as u64
            }
            // Another node's plan: its windows are not known here.
            (Curve::CalendarWindow, None) => stored.longest_window_us() as u64,
            _ => (length_us - stamp_us % length_us) as u64,
        };
        StoredWindow { length_us, left_us }
    }

    /// Writes the view into the bucket.
    fn show_view(
        &self,
        given: &Given,
        window: &StoredWindow,
        first_sent: Timestamp,
        now: Timestamp,
        terms: &Terms,
    ) {
        // The cached time of decisions is behind `now`: credit that is there must not wait for it.
        let credit_from = match self.level.token_in_us(given, &terms.scale, window) {
            0 => Timestamp::ZERO,
            token_in_us => now.plus_micros(token_in_us),
        };
        // A fixed window that is empty stays so until its end, but for what nodes give back. A sliding window and a log get
        // tokens back all the time.
        let empty_for_us = match terms.scale.curve {
            _ if given.available >= terms.scale.token || given.withheld != Withheld::Nothing => 0,
            Curve::Refill => 0,
            Curve::FixedWindow | Curve::CalendarWindow => {
                // The batch may have been under way for long, and the cached clock is behind.
                let late_us = now.micros_since(first_sent) + CLOCK_AGE_MAX_US;
                terms.tick_us.min(window.left_us.saturating_sub(late_us))
            }
            Curve::SlidingWindow | Curve::SlidingLog => {
                let most_us = (terms.tick_us / 2).min(EMPTY_MAX_US);
                most_us.min(self.empty_at_end_us(window.left_us, now, terms))
            }
        };
        let empty_for_ms = (empty_for_us / 1000).min(u16::MAX.into()) as u16;
        let tokens = terms.scale.tokens(given.available);
        self.bucket.set_view(tokens, now, empty_for_ms, credit_from);
    }

    /// For how long a window that ends soon is taken to be empty, at most. Others have no such bound.
    fn empty_at_end_us(&self, left_us: u64, now: Timestamp, terms: &Terms) -> u64 {
        match self.most_to_hold_of_window(now, terms) {
            _ if !self.is_end_of_window(now, terms) => u64::MAX,
            Some(0) => EMPTY_AT_LAST_US,
            _ => (left_us / EMPTY_DIVISOR).max(EMPTY_MIN_US),
        }
    }

    /// Applies the renewed lease to the bucket, unless it has ended. What is outstanding and neither there nor spent
    /// is forfeited. Refill of `rate_kept` has flowed in since the batch was `first_sent`.
    fn apply_lease(
        &mut self,
        given: &Given,
        rate_kept: i64,
        first_sent: Timestamp,
        now: Timestamp,
        terms: &Terms,
    ) {
        if self.policy.is_some() {
            // The key goes on with its policy until the store has said since when it is back.
            self.lease.ends = Timestamp::ZERO;
        }
        self.lease.close_if_late(now);
        let outstanding = self.lease.held.outstanding;
        let here = if self.lease.ends > now {
            let low = self.low(now, terms);
            let lease = self.lease.applied(low, self.overdraw(terms));
            let here = self.amend(now, lease, given.tokens);
            // The store cannot know what has flowed in since the batch was first sent.
            let flowed = rate_kept.saturating_mul(now.micros_since(first_sent) as i64);
            let most = outstanding.saturating_add(flowed);
            if here > most { self.forgo(here - most, lease, now) } else { here }
        } else {
            self.spending.unsent.spent * self.scale.token
        };
        // What the bucket's word has spilled is on its way here, and would look as if it were forfeited.
        let is_spill_under_way = self.bucket.has_spilled();
        self.lease.forfeited = if is_spill_under_way { 0 } else { (outstanding - here).max(0) };
    }

    /// Applies a lease to the bucket, with `tokens` and the remainder. Returns the units that the
    /// node holds then, or spent and has not reported.
    pub(super) fn amend(&mut self, now: Timestamp, lease: Lease, tokens: i64) -> i64 {
        let amended = self.bucket.amend(now, lease, tokens, self.lease.remainder, self.scale.token);
        self.lease.remainder = amended.remainder;
        let pending = amended.pending + self.spending.spilled;
        let spent = self.spending.unsent.spent.saturating_add_unsigned(pending);
        amended.units.saturating_add(spent.saturating_mul(self.scale.token))
    }

    /// Gives up units of the lease that the store has not leased: its clock stood still for some of the time in
    /// which they flowed in. What has been spent of them is to flow in first. Returns what `amend` does.
    fn forgo(&mut self, units: i64, lease: Lease, now: Timestamp) -> i64 {
        self.bucket.mint_tokens(now, self.scale.token);
        let surplus = (units as u64).div_ceil(self.scale.token as u64);
        let withdrawn = self.bucket.withdraw(surplus.min(u32::MAX.into()) as u32);
        self.lease.remainder += i64::from(withdrawn) * self.scale.token - units;
        self.amend(now, lease, 0)
    }

    /// The tokens below which decisions notify the engine.
    fn low(&self, now: Timestamp, terms: &Terms) -> u32 {
        let Cluster { round_trip_us, backlog_us, .. } = self.cluster;
        let (demand, answer_us) = (&self.arrivals.demand, round_trip_us + backlog_us);
        if self.level.is_scarce(&terms.scale) {
            0
        } else if self.level.is_plentiful(now, &terms.scale) {
            demand.over(terms.tick_us + answer_us).ceil() as u32
        } else {
            let under_way = demand.over(answer_us).ceil() as u32;
            under_way.max((self.need(now, terms) / 2) as u32)
        }
    }

    fn drift(&self, given: &Given, entry: &Entry, now: Timestamp, terms: &Terms) -> Installed {
        let before = given.available + given.tokens * self.scale.token;
        let spent = entry.debt.saturating_mul(self.scale.token).saturating_sub(entry.returned);
        let estimate = self.level.estimate(now, &terms.scale);
        let expected = |level: i64| level.saturating_sub(spent).min(terms.scale.burst);
        Installed {
            drift: estimate.map(|level| expected(level).saturating_sub(before)),
            age_us: self.level.view.map_or(0, |view| now.micros_since(view.at)),
        }
    }

    /// Judges whether asking early helped.
    fn judge_early(&mut self, given: &Given, entry: &Entry, now: Timestamp, terms: &Terms) {
        let rate_missed = (entry.want_rate - entry.held.rate).max(1);
        let brought = given.tokens * PRODUCTIVE_PART >= entry.want.max(1)
            || given.rate * PRODUCTIVE_PART >= rate_missed;
        let is_plenty =
            given.withheld == Withheld::Nothing && given.available > terms.scale.burst / 20;
        let is_credited = entry.want == 0 && given.available >= 0 && self.credit(terms) > 0;
        self.schedule.judge_early(brought || is_plenty || is_credited, terms.tick_us, now);
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{OPENED, account_of, answered};
    use super::*;
    use crate::algorithm::SlidingWindow;
    use crate::limit::Limit;
    use crate::quota::Quota;

    #[test]
    fn early_report_for_credit_helped_if_it_asked_for_nothing_else_and_nothing_is_owed() {
        for (want, available, credit, helped) in
            [(0, 0, 1, true), (0, -1, 1, false), (0, 0, 0, false), (5, 0, 1, false)]
        {
            let limit = Limit::new("x", Quota::per_second(100)).credit(credit);
            let terms = limit.validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            account.schedule.touch(true, terms.tick_us, OPENED);
            let given = Given { available, ..Given::default() };
            let entry = Entry { want, ..Entry::empty(terms.scale) };
            account.judge_early(&given, &entry, OPENED, &terms);
            let case = (want, available, credit);
            assert_eq!(account.schedule.early_from() <= OPENED, helped, "{case:?}");
        }
    }

    fn account_and_terms() -> (Account, Terms) {
        let terms = Limit::new("x", Quota::per_second(1000)).credit(0).validate_hybrid(4).unwrap();
        (account_of(&terms), terms)
    }

    /// Tokens that a reply gives are no drift.
    #[test]
    fn drift_is_the_estimate_less_the_level_before_the_store_gave() {
        let (mut account, terms) = account_and_terms();
        let token = terms.scale.token;
        for (available, tokens, drift) in [(50, 0, None), (40, 10, Some(0)), (25, 10, Some(5))] {
            let available = available * token;
            // Nothing flows in that others do not hold.
            let leased = terms.scale.rate;
            let given = Given { available, tokens, leased, life_us: 2_000_000, ..Given::default() };
            let installed = answered(&mut account, &given, &terms);
            assert_eq!(installed.drift, drift.map(|tokens: i64| tokens * token));
        }
    }

    /// The store's clock stood still while 100 tokens flowed in here.
    #[test]
    fn refill_that_the_store_has_not_leased_is_given_up_and_what_it_gave_is_not() {
        let (mut account, terms) = account_and_terms();
        let given = Given {
            rate: terms.scale.rate,
            depth: 200,
            tokens: 5,
            stamp_us: 10_000_000,
            life_us: 2_000_000,
            ..Given::default()
        };
        answered(&mut account, &given, &terms);
        let later = OPENED.plus_micros(100_000);
        account.bucket.mint_tokens(later, terms.scale.token);
        assert!(account.bucket.held_and_pending().0 > 100);
        let entry = Entry { held: account.lease.held, ..Entry::empty(terms.scale) };
        let again = Given { tokens: 0, depth: 0, ..given };
        account.install(&again, &entry, later, later, &terms);
        assert_eq!(account.bucket.held_and_pending().0, 5);
        assert!(account.lease.forfeited < terms.scale.token, "{}", account.lease.forfeited);
    }

    /// The window ends at 1 s.
    #[test]
    fn sliding_window_is_taken_to_be_empty_for_less_and_less_at_its_end() {
        let limit = Limit::new("x", SlidingWindow::per_second(1000));
        let terms = limit.validate_hybrid(8).unwrap();
        let mut account = account_of(&terms);
        account.cluster.nodes = 8;
        answered(&mut account, &Given { life_us: 2_000_000, ..Given::default() }, &terms);
        let empty_us = |account: &Account, left_us: u64| {
            let now = OPENED.plus_micros(1_000_000 - left_us);
            account.empty_at_end_us(left_us, now, &terms)
        };
        assert_eq!(empty_us(&account, 100_001), u64::MAX, "it is no end yet");
        assert_eq!([80_000, 8_000].map(|us| empty_us(&account, us)), [20_000, 3_000]);
        let second = OPENED.plus_micros(1_000_000);
        account.arrivals.demand.observe(200, true, second, terms.tick_us, 1_000_000);
        account.history.caller_has_waited = true;
        assert_eq!(empty_us(&account, 80_000), 20_000, "it is to hold two tokens");
        assert_eq!(empty_us(&account, 8_000), 2_000, "it is to hold none");
    }
}
