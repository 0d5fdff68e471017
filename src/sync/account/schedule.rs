//! When a key reports, and how long it stays in the books.

use super::need::BEGINNING_US;
use super::{
    Account, EARLY_TICKS_MAX, LINGER_MAX_US, LINGER_MIN_US, PROBE_ARRIVALS, PRODUCTIVE_PART,
    STRICT_LINGER_MAX_US,
};
use crate::limit::Terms;
use crate::sync::message::{Entry, Given, Withheld};
use crate::time::Timestamp;

impl Account {
    /// Whether the key was asked for once, and not lately before.
    pub(super) fn is_seen_once(&self) -> bool {
        !self.expected_to_return
            && self.seen <= 1
            && self.known_us.is_none_or(|age_us| age_us > LINGER_MAX_US)
    }

    /// Whether the store has answered the only request, and nothing more is expected.
    pub(super) fn is_done_with(&self) -> bool {
        self.is_seen_once() && self.view.is_some_and(|view| view.at >= self.last_arrival)
    }

    /// Whether the store has told nothing of the key yet, and nobody waits for it to.
    pub(crate) fn is_newcomer(&self) -> bool {
        self.view.is_none() && self.waits_until().is_none()
    }

    /// How long the key is kept in the books after its last request.
    pub(super) fn linger_us(&self, terms: &Terms) -> u64 {
        let strict = terms.credit.known == 0 && !self.caller_has_waited;
        let returns = self.seen > 1 || self.known_us.is_some();
        let most_us = if strict && returns { STRICT_LINGER_MAX_US } else { LINGER_MAX_US };
        terms.scale.fill_us().clamp(LINGER_MIN_US, most_us)
    }

    /// A decision touched the key `at` that time: report at the next tick, or early when it runs low.
    pub(crate) fn touch(&mut self, at: Timestamp, now: Timestamp, terms: &Terms) {
        let urgent = self.bucket.is_urgent();
        self.bursts.note_request(at);
        self.last_arrival = now;
        let scheduled = now.plus_micros(self.interval_us(now, terms));
        let soon = if urgent { self.early.not_before() } else { scheduled };
        let soon = soon.max(now);
        if soon < self.due {
            self.due = soon;
            self.early_sent = urgent;
        }
    }

    /// When to look whether arrivals have ceased.
    pub(crate) fn probe_at(&self) -> Timestamp {
        self.probe_at
    }

    /// Plans a look in a quarter tick, or when it will say something if that is well before the
    /// next report.
    pub(super) fn plan_probe(&mut self, now: Timestamp, terms: &Terms) {
        let telling = PROBE_ARRIVALS * self.cost as f64;
        let telling_us = (telling / self.demand.per_us().max(f64::MIN_POSITIVE)) as u64;
        self.probe_span_us = telling_us.max(self.bursts.patience_us()).max(terms.tick_us / 4);
        let busy = self.probe_span_us <= terms.tick_us / 2;
        let holds = self.held.depth > 0 && self.policy.is_none();
        self.probed_arrivals = self.arrived();
        self.probe_at =
            if busy && holds { now.plus_micros(self.probe_span_us) } else { Timestamp::NEVER };
    }

    /// Looks whether arrivals over the last quarter tick have fallen below a quarter of what was
    /// expected; if so the key is due at once, to give back what it holds.
    pub(crate) fn probe(&mut self, now: Timestamp, terms: &Terms) {
        let arrived = self.arrived().saturating_sub(self.probed_arrivals);
        let span_us = now.micros_since(self.probe_at) + self.probe_span_us;
        if (arrived as f64) < self.demand.over(span_us) / 4.0 {
            self.collect(now, true);
            (self.arrivals, self.requests) = (0, 0);
            self.demand.collapse(arrived, span_us, now);
            self.bursts.judge_over();
            self.due = now;
            self.probe_at = Timestamp::NEVER;
        } else {
            self.plan_probe(now, terms);
        }
    }

    /// Judges whether asking early helped.
    pub(super) fn judge_early(
        &mut self,
        given: &Given,
        entry: &Entry,
        now: Timestamp,
        terms: &Terms,
    ) {
        let tick_us = terms.tick_us;
        let rate_missed = (entry.want_rate - entry.held.rate).max(1);
        let brought = given.tokens * PRODUCTIVE_PART >= entry.want.max(1)
            || given.rate * PRODUCTIVE_PART >= rate_missed;
        let plenty =
            given.withheld == Withheld::Nothing && given.available > terms.scale.burst / 20;
        let credited = entry.want == 0 && given.available >= 0 && self.credit(terms) > 0;
        if brought || plenty || credited {
            self.early.succeeded();
        } else if self.early_sent {
            self.early.failed(now, tick_us / 8, EARLY_TICKS_MAX * tick_us);
        }
        self.early_sent = false;
    }

    /// Tokens asked for that the demand estimate has not seen.
    fn arrived(&self) -> u64 {
        self.arrivals + self.spilled + self.bucket.demand()
    }

    /// Whether a report would neither tell nor ask for anything. Only where callers wait: elsewhere `check` spends
    /// credit by the view, which must stay fresh.
    fn has_nothing_to_say(&self, now: Timestamp, terms: &Terms) -> bool {
        let all_credit = i64::from(self.credit_given) >= self.credit(terms);
        // In its first moments a key needs nothing, and would rest on that.
        let need = self.need(now.plus_micros(BEGINNING_US), terms);
        self.caller_has_waited && self.arrived() == 0 && all_credit && need == 0
    }

    /// Whether a caller who waited has spent of a full bucket, which takes in no refill until the store hears of it.
    /// Only the first spending counts. While the last report told of some, refill is leased,
    /// the level stays at the burst anyway, and the key would report at each round trip.
    fn has_spent_of_full(&self, given: &Given, entry: &Entry, terms: &Terms) -> bool {
        let is_first = entry.spent == 0 && self.held.rate == 0;
        let full = given.level >= terms.scale.burst;
        self.caller_has_waited && full && is_first && self.unsent.spent > 0
    }

    /// Decides when to report next.
    pub(super) fn schedule(&mut self, given: &Given, entry: &Entry, now: Timestamp, terms: &Terms) {
        let tick_us = terms.tick_us;
        let quiet_us = now.micros_since(self.last_arrival);
        let linger_us = self.linger_us(terms);
        let held = self.held.depth > 0 && quiet_us >= LINGER_MAX_US;
        self.due = if !self.waiters.is_empty() || self.has_spent_of_full(given, entry, terms) {
            now
        } else if self.unsent.debt > 0 {
            self.early.not_before().max(now)
        } else if self.is_done_with() && self.is_settled() {
            now
        } else if held && quiet_us < linger_us {
            // It is held for a request that may come, and renewed before it ends.
            now.plus_micros(self.ends.micros_since(now) / 2)
        } else if self.is_settled() && quiet_us < linger_us && self.has_nothing_to_say(now, terms) {
            now.plus_micros(linger_us - quiet_us)
        } else if !self.is_settled() || quiet_us < linger_us {
            let interval_us = self.interval_us(now, terms);
            let repaid_us = terms.scale.micros_for(-given.available);
            now.plus_micros(interval_us.max(repaid_us.min(EARLY_TICKS_MAX * tick_us)))
        } else {
            now.plus_micros(linger_us)
        };
    }
}
