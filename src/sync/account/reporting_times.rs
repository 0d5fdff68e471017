//! When a key reports next.

use super::history::{BEGINNING_US, LINGER_MAX_US};
use super::schedule::{EARLY_TICKS_MAX, PLENTY_TICKS};
use super::tick_pacing::Paces;
use super::{Account, Touch};
use crate::limit::Terms;
use crate::sync::message::{Entry, Given};
use crate::time::Timestamp;

/// A young account is probed for spending when its age at the last answer, divided by this, has passed again.
const YOUNG_AGE_DIVISOR: u64 = 4;
/// A probe for spending is no sooner than a tick divided by this.
const YOUNG_TICK_DIVISOR: u64 = 8;

impl Account {
    /// When the next report is due, if none is in flight.
    pub(crate) fn due(&self) -> Timestamp {
        self.schedule.due
    }

    pub(crate) fn report_at(&mut self, at: Timestamp) {
        self.schedule.due = at;
    }

    /// Reports at the latest then.
    pub(crate) fn report_by(&mut self, at: Timestamp) {
        self.schedule.due = self.schedule.due.min(at);
    }

    /// A decision touched the key: report at the next tick, or early when it runs low.
    pub(crate) fn touch(&mut self, touch: &Touch, now: Timestamp, terms: &Terms) {
        self.book_spilled(touch.spilled);
        self.note_denied_cost(touch.denied_cost);
        self.arrivals.bursts.note_request(touch.at);
        self.history.last_request = now;
        let interval_us = self.interval_us(now, terms);
        self.schedule.touch(self.bucket.is_urgent(), interval_us, now);
        if self.is_plan_changed() {
            self.report_at(now);
        }
    }

    // ---- the key's own tick ------------------------------------------------------------------

    /// Chooses the key's tick according to its demand.
    pub(crate) fn keep_pace(&mut self, now: Timestamp, limit: &Terms, paces: &mut Paces) {
        let Some(pace) = limit.pace else { return };
        let ticks = if self.level.is_plentiful(now, &limit.scale) { PLENTY_TICKS } else { 1 };
        self.schedule.keep_pace(&pace, self.arrivals.demand.per_us(), ticks, paces);
    }

    /// The account is closed: other keys may have its part of the pace.
    pub(crate) fn lose_pace(&mut self, paces: &mut Paces) {
        self.schedule.lose_pace(paces);
    }

    /// Whether the report cannot wait for a ceiling.
    pub(crate) fn is_pressing(&self) -> bool {
        self.lease.restore || !self.is_waited_for_by_nobody()
    }

    /// The report waits for a tick: the ceiling is reached.
    pub(crate) fn put_off(&mut self, now: Timestamp) {
        self.report_at(now.plus_micros(self.schedule.tick_us));
    }

    // ---- whether requests have ceased --------------------------------------------------------

    /// Tokens asked for that the demand estimate does not contain.
    fn arrived(&self) -> u64 {
        self.arrivals.tokens + self.spending.spilled + self.bucket.demand()
    }

    /// Plans a look at whether requests have ceased, where that would give something back.
    pub(super) fn plan_probe(&mut self, now: Timestamp, terms: &Terms) {
        if self.lease.held.depth > 0 && self.policy.is_none() {
            let (arrived, mean_cost) = (self.arrived(), self.history.mean_cost);
            self.arrivals.plan_probe(arrived, mean_cost, now, terms);
        } else {
            self.arrivals.stop_probing();
        }
    }

    /// Makes the probes that are due.
    pub(crate) fn probe(&mut self, now: Timestamp, terms: &Terms) {
        if now >= self.schedule.probe_at() {
            self.probe_spending(now, terms);
        }
        if now >= self.arrivals.probe_at() {
            self.probe_silence(now, terms);
        }
    }

    /// Looks whether requests have ceased; if so the key is due at once, to give back what it holds.
    fn probe_silence(&mut self, now: Timestamp, terms: &Terms) {
        if let Some((arrived, span_us)) = self.arrivals.ceased(self.arrived(), now) {
            self.collect(now, true);
            self.arrivals.cease(arrived, span_us, now);
            self.report_at(now);
        } else {
            self.plan_probe(now, terms);
        }
    }

    // ---- while an account is young -----------------------------------------------------------

    /// Plans a probe for spending, while the store's bucket may be full: it takes in no refill until the store hears of spending, and what
    /// it loses is lost for good. Of windows the first reports tell how much of what was given at first is needed.
    fn plan_spending_probe(&mut self, now: Timestamp, terms: &Terms) {
        let age_us = now.micros_since(self.history.opened);
        self.probe_spending_in(age_us / YOUNG_AGE_DIVISOR, now, terms);
    }

    fn probe_spending_in(&mut self, span_us: u64, now: Timestamp, terms: &Terms) {
        let may_be_full =
            self.level.is_mostly_unspent(&terms.scale) && !self.history.is_seen_once();
        if may_be_full && span_us < self.interval_us(now, terms) {
            self.schedule.probe_in(span_us.max(terms.tick_us / YOUNG_TICK_DIVISOR), now);
        } else {
            self.schedule.stop_probing();
        }
    }

    /// Reports at once what was spent, unless that is so much less than this node's even part of the refill since the last report that the
    /// bucket stays full. If nothing was spent, the next probe is when the account is twice as old.
    fn probe_spending(&mut self, now: Timestamp, terms: &Terms) {
        let spent = self.spending.unsent.spent.saturating_add_unsigned(self.bucket.pending());
        let since_us = now.micros_since(self.spending.reported) as i64;
        let even_part = terms.scale.rate.saturating_mul(since_us) / self.cluster.nodes;
        if spent.saturating_mul(self.scale.token) > even_part / 4 * 3 {
            self.schedule.report_now(now);
        } else if spent > 0 {
            self.plan_spending_probe(now, terms);
        } else {
            self.probe_spending_in(now.micros_since(self.history.opened), now, terms);
        }
    }

    // ---- after a reply -----------------------------------------------------------------------

    /// Decides when to report next, after a reply.
    pub(super) fn schedule_report(
        &mut self,
        given: &Given,
        entry: &Entry,
        now: Timestamp,
        terms: &Terms,
    ) {
        let quiet_us = now.micros_since(self.history.last_request);
        let linger_us = self.history.linger_us(terms);
        let (is_idle, is_over) = (self.is_idle(), quiet_us >= linger_us);
        let is_held_for_return = self.lease.held.depth > 0 && quiet_us >= LINGER_MAX_US;
        let is_waited_for = !self.callers.waiting.is_empty();
        let is_urgent = is_waited_for || self.is_plan_changed();
        self.schedule.due = if is_urgent || self.has_spent_of_full(given, entry, terms) {
            now
        } else if self.spending.unsent.debt > 0 {
            self.schedule.early_from().max(now)
        } else if is_idle && self.is_done_with() {
            now
        } else if is_idle && is_over {
            now.plus_micros(linger_us)
        } else if is_held_for_return && !is_over {
            // It is held for a request that may come, and renewed before it ends.
            now.plus_micros(self.lease.ends.micros_since(now) / 2)
        } else if is_idle && self.has_nothing_to_say(now, terms) {
            now.plus_micros(linger_us - quiet_us)
        } else {
            let interval_us = self.interval_us(now, terms);
            let repaid_us = terms.scale.micros_for(-given.available);
            now.plus_micros(interval_us.max(repaid_us.min(EARLY_TICKS_MAX * terms.tick_us)))
        };
        self.plan_spending_probe(now, terms);
    }

    /// Whether a report would neither say nor ask for anything. Only where callers wait: elsewhere `check` spends
    /// credit according to the view, which must stay recent.
    fn has_nothing_to_say(&self, now: Timestamp, terms: &Terms) -> bool {
        let all_credit = i64::from(self.spending.credit_given) >= self.credit(terms);
        // In its first 20 ms a key needs nothing, and would rest on that.
        let need = self.need(now.plus_micros(BEGINNING_US), terms);
        self.history.caller_has_waited && self.arrived() == 0 && all_credit && need == 0
    }

    /// Whether a caller who waited has spent of a full bucket, which takes in no refill until that is reported.
    /// Only the first spending counts. While the last report contained some, refill is leased,
    /// the level stays at the burst anyway, and the key would report at each round trip.
    fn has_spent_of_full(&self, given: &Given, entry: &Entry, terms: &Terms) -> bool {
        let is_first = entry.spent == 0 && self.lease.held.rate == 0;
        let full = given.level >= terms.scale.burst;
        self.history.caller_has_waited && full && is_first && self.spending.unsent.spent > 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{OPENED, account_of, answered, ask};
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    const PROBE_AT: Timestamp = Timestamp::from_micros(1_000 + 50_000 / YOUNG_TICK_DIVISOR);

    /// A key that was asked for twice, after an answer that the bucket is full. It holds tokens, so that it is not given up.
    fn of_a_full_bucket() -> (Account, Terms) {
        let terms = Limit::new("x", Quota::per_second(1000)).validate().unwrap();
        let mut account = account_of(&terms);
        (account.history.requests, account.lease.held.depth) = (2, 5);
        let burst = terms.scale.burst;
        let given =
            Given { available: burst, level: burst, life_us: 1_000_000, ..Given::default() };
        answered(&mut account, &given, &terms);
        (account, terms)
    }

    fn next(account: &Account) -> Timestamp {
        account.agenda().due
    }

    #[test]
    fn young_key_that_spent_nothing_is_probed_again_without_a_report() {
        let (mut account, terms) = of_a_full_bucket();
        let scheduled = account.due();
        assert_eq!(next(&account), PROBE_AT);
        account.probe(PROBE_AT, &terms);
        assert_eq!(account.due(), scheduled);
        let twice_as_old = PROBE_AT.plus_micros(PROBE_AT.micros_since(OPENED));
        assert_eq!(next(&account), twice_as_old);
    }

    /// Six tokens flow in until the probe.
    #[test]
    fn young_key_that_spent_less_than_refill_makes_up_for_is_probed_again_soon() {
        let (mut account, terms) = of_a_full_bucket();
        let scheduled = account.due();
        account.spending.unsent.spent = 3;
        account.probe(PROBE_AT, &terms);
        assert_eq!(account.due(), scheduled);
        assert_eq!(next(&account), PROBE_AT.plus_micros(PROBE_AT.micros_since(OPENED)));
        account.spending.unsent.spent = 12;
        account.probe(next(&account), &terms);
        assert!(account.due() < scheduled, "what was spent is reported");
    }

    #[test]
    fn key_that_is_no_longer_full_or_young_is_not_probed_for_spending() {
        let (mut account, terms) = of_a_full_bucket();
        let entry = account.report(&"x".into(), &terms, PROBE_AT, false);
        account.end_report();
        let level = terms.scale.burst / 2;
        let given = Given { available: level, level, life_us: 1_000_000, ..Given::default() };
        account.install(&given, &entry, PROBE_AT, PROBE_AT, &terms);
        assert_eq!(account.schedule.probe_at(), Timestamp::NEVER);
        let old = OPENED.plus_micros(4 * PLENTY_TICKS * terms.tick_us);
        let given = Given { available: terms.scale.burst, level: terms.scale.burst, ..given };
        account.install(&given, &entry, old, old, &terms);
        assert_eq!(account.schedule.probe_at(), Timestamp::NEVER);
    }

    /// The probe stayed due, and the lane made it again without end.
    #[test]
    fn young_key_whose_report_is_put_off_is_not_probed_before_it_is_due() {
        let (mut account, terms) = of_a_full_bucket();
        account.spending.unsent.spent = 10;
        account.probe(PROBE_AT, &terms);
        assert_eq!(account.due(), PROBE_AT, "what was spent is reported");
        account.put_off(PROBE_AT);
        assert_eq!(next(&account), PROBE_AT.plus_micros(terms.tick_us));
    }

    #[test]
    fn first_spending_of_a_full_bucket_is_reported_at_once_where_callers_wait() {
        let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        let full = terms.scale.burst;
        for (level, reported, rate, has_waited, spent, is_due) in [
            (full, 0, 0, true, 1, true),
            (full - 1, 0, 0, true, 1, false),
            (full, 1, 0, true, 1, false),
            (full, 0, 1, true, 1, false),
            (full, 0, 0, false, 1, false),
            (full, 0, 0, true, 0, false),
        ] {
            let mut account = account_of(&terms);
            account.history.caller_has_waited = has_waited;
            (account.lease.held.rate, account.spending.unsent.spent) = (rate, spent);
            let given = Given { level, ..Given::default() };
            let entry = Entry { spent: reported, ..Entry::empty(terms.scale) };
            let case = (level, reported, rate, has_waited, spent);
            assert_eq!(account.has_spent_of_full(&given, &entry, &terms), is_due, "{case:?}");
        }
    }

    #[test]
    fn tokens_that_were_asked_for_are_those_collected_spilled_and_in_the_bucket() {
        let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        let mut account = account_of(&terms);
        (account.arrivals.tokens, account.spending.spilled) = (2, 3);
        assert_eq!(account.arrived(), 5);
        account.bucket.decide(ask(4, terms.scale), OPENED);
        assert_eq!(account.arrived(), 9);
    }

    /// A strict limit keeps its accounts for minutes.
    #[test]
    fn quiet_key_is_reported_with_the_tick_or_halfway_through_its_lease() {
        let limit = Limit::new("x", Quota::per_minute(100)).credit(0);
        let terms = limit.validate_hybrid(4).unwrap();
        for depth in [0, 5] {
            let mut account = account_of(&terms);
            (account.history.requests, account.lease.held.depth) = (5, depth);
            let now = OPENED.plus_micros(2 * LINGER_MAX_US);
            account.lease.ends = now.plus_micros(if depth > 0 { 400_000 } else { 0 });
            account.spending.unsent.spent = 1;
            let entry = Entry::empty(terms.scale);
            account.schedule_report(&Given::default(), &entry, now, &terms);
            let in_us = account.schedule.due.micros_since(now);
            assert_eq!(in_us, if depth > 0 { 400_000 / 2 } else { terms.tick_us });
        }
    }
}
