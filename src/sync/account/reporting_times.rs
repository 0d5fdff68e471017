//! When a key reports next.

use super::history::{BEGINNING_US, LINGER_MAX_US};
use super::schedule::{EARLY_TICKS_MAX, PLENTY_TICKS};
use super::tick_pacing::Paces;
use super::{Account, Touch};
use crate::limit::Terms;
use crate::sync::message::{Entry, Given};
use crate::time::Timestamp;

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

    /// Looks whether requests have ceased; if so the key is due at once, to give back what it holds.
    pub(crate) fn probe(&mut self, now: Timestamp, terms: &Terms) {
        if let Some((arrived, span_us)) = self.arrivals.ceased(self.arrived(), now) {
            self.collect(now, true);
            self.arrivals.cease(arrived, span_us, now);
            self.report_at(now);
        } else {
            self.plan_probe(now, terms);
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
    }

    /// Whether a report would neither say nor ask for anything. Only where callers wait: elsewhere `check` spends
    /// credit according to the view, which must stay recent.
    fn has_nothing_to_say(&self, now: Timestamp, terms: &Terms) -> bool {
        let all_credit = i64::from(self.spending.credit_given) >= self.credit(terms);
        // In its first moments a key needs nothing, and would rest on that.
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
