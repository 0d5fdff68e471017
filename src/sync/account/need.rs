//! How many tokens a node should hold of a key, and how fast the key is asked for.

use super::{Account, PLENTY_TICKS, TELLING_REQUESTS};
use crate::bucket::MAX_TOKENS;
use crate::limit::Terms;
use crate::time::Timestamp;

/// No key is hot that is asked for less than once in so many microseconds.
const HOT_US: u64 = 125_000;
/// [`Account::is_mostly_unspent`] holds if the available and the outstanding tokens together exceed so many quarters of
/// the burst. Under full load the sum stays lower; spending not yet reported and leases that overflow raise it.
const UNSPENT_QUARTERS: i64 = 3;
/// The first requests of a client come within this time, in microseconds.
pub(super) const BEGINNING_US: u64 = 20_000;
/// Tokens of the burst for each node, so that a node may hold one and leave one.
const TOKENS_A_NODE: i64 = 2;

impl Account {
    /// Ends an observation of the demand, but not between two bursts, and not within one: silence would be taken for
    /// the end of demand, and a burst for what comes all the time.
    pub(super) fn observe_demand(&mut self, now: Timestamp, terms: &Terms) {
        if !self.bursts.take_demand_due(now) {
            return;
        }
        let arrivals = std::mem::take(&mut self.arrivals);
        let telling = std::mem::take(&mut self.requests) >= TELLING_REQUESTS;
        self.demand.observe(arrivals, telling, now, terms.tick_us, terms.scale.fill_us());
    }

    /// Whether the bucket is nearly full, though most of it may be outstanding. Then a node may hold tokens of a key
    /// that it is seldom asked for, unless a caller has waited for the store: such callers get what is there.
    pub(super) fn is_mostly_unspent(&self, terms: &Terms) -> bool {
        self.with_outstanding > terms.scale.burst / 4 * UNSPENT_QUARTERS
            && !self.caller_has_waited
            && terms.scale.burst / self.scale.token >= TOKENS_A_NODE * self.nodes
    }

    /// Until the next report on schedule.
    pub(super) fn interval_us(&self, now: Timestamp, terms: &Terms) -> u64 {
        if self.is_plentiful(now, terms) { PLENTY_TICKS * terms.tick_us } else { terms.tick_us }
    }

    /// Until the answer to the next report on schedule, at the latest.
    fn span_us(&self, now: Timestamp, terms: &Terms) -> u64 {
        self.interval_us(now, terms) + terms.tick_us / 2 + self.round_trip_us
    }

    /// Whether tokens alone would do without refill: this node's part of what the store has lasts until the
    /// next answer.
    pub(super) fn spares_refill(&self, now: Timestamp, terms: &Terms) -> bool {
        let span_us = self.span_us(now, terms);
        let part = self.view.map_or(0, |view| view.level / self.scale.token / self.nodes);
        part as f64 >= self.demand.over(span_us)
    }

    /// Tokens to hold so that the key does not run dry before the next report.
    pub(super) fn need(&self, now: Timestamp, terms: &Terms) -> i64 {
        if now.micros_since(self.last_arrival) >= self.linger_us(terms) {
            return 0;
        }
        // A key that may never come again gets no lease, where credit can admit its next request.
        if self.is_seen_once() && terms.credit.known > 0 && self.denied_cost == 0 {
            return 0;
        }
        // Callers that wait get what they ask for first: another node may need the rest for one large cost.
        if self.caller_has_waited && (self.is_unanswered() || self.is_beginning(now)) {
            return 0;
        }
        let span_us = self.span_us(now, terms);
        let flows_in = self.held.rate as f64 / terms.scale.token as f64;
        let missing = (self.demand.per_us() - flows_in).max(0.0) * span_us as f64;
        let cost = self.cost as f64;
        let spread = 2.0 * (self.demand.over(span_us) * cost).sqrt();
        let wanted = (missing + spread + cost).ceil() as i64;
        let plentiful = if self.caller_has_waited {
            // Else it would be given back with the next report, and be asked for with the one after that.
            self.with_own(now, terms).saturating_sub(wanted.saturating_mul(self.scale.token))
                > terms.scale.burst / 2
        } else if self.is_far(terms) {
            // A round trip is longer than what is given back would serve others: it would be asked for again.
            self.is_ample(now, terms)
        } else {
            self.is_plentiful(now, terms)
        };
        let may_hold = self.view.is_none() || self.is_mostly_unspent(terms) || plentiful;
        // Whoever was denied a large cost comes again with it.
        let large = if self.is_ample(now, terms) { i64::from(self.denied_cost) } else { 0 };
        if !may_hold && !self.is_hot(self.demand.per_us(), terms) {
            // Without credit nothing else would admit whoever is denied and comes again. Who waits
            // for the store gets what is there, and needs nobody to hold it ready.
            return large.max(i64::from(terms.credit.known == 0 && !self.caller_has_waited));
        }
        let need =
            wanted.max(large).max(self.bursts.expected(now)).max(self.first_want(now, terms));
        need.min(terms.scale.burst / terms.scale.token).min(i64::from(MAX_TOKENS))
    }

    /// Whether a round trip is long beside a tick, where the burst has a token for each node.
    fn is_far(&self, terms: &Terms) -> bool {
        2 * self.round_trip_us > terms.tick_us && terms.scale.burst / self.scale.token >= self.nodes
    }

    /// Whether the first few requests of a client that began a moment ago are all that is known of the key: other
    /// nodes may have more of them.
    fn is_beginning(&self, now: Timestamp) -> bool {
        let began = now < self.opened.plus_micros(BEGINNING_US);
        began && self.nodes > 1 && self.seen < TELLING_REQUESTS
    }

    /// Whether the store has not answered since the key came into the books.
    fn is_unanswered(&self) -> bool {
        self.view.is_none_or(|view| view.at < self.opened)
    }

    /// Tokens to ask for before the store has answered once, if it may have plenty. The demand is not known yet,
    /// and may be the whole rate until this answer and the next one are here.
    fn first_want(&self, now: Timestamp, terms: &Terms) -> i64 {
        let may_have = self.view.is_none() || self.is_plentiful(now, terms);
        let quiet = now.micros_since(self.last_arrival) >= self.linger_us(terms);
        if !self.is_unanswered() || !may_have || quiet || self.is_seen_once() {
            return 0;
        }
        let tokens_per_us = terms.scale.rate as f64 / terms.scale.token as f64;
        (tokens_per_us * (2 * self.round_trip_us) as f64) as i64
    }

    /// The demand to be registered, in tokens per microsecond, and whether the key is hot. What is asked for at
    /// first is demand too: shares and refill follow from it.
    pub(super) fn wanted_per_us(&self, now: Timestamp, terms: &Terms) -> (f64, bool) {
        let first_per_us = self.first_want(now, terms) as f64 / self.span_us(now, terms) as f64;
        let per_us = self.demand.per_us().max(first_per_us);
        // Whoever has refill does not ask the store for what else is there.
        let asks = self.caller_has_waited && self.is_beginning(now);
        (per_us, self.is_hot(per_us, terms) && !asks)
    }

    /// Whether a key is hot that is asked for so many tokens a microsecond: one in a tick, or in a round trip in which
    /// this node's even share of the rate is a token too. Slower refill would be stranded in fractions on all nodes.
    fn is_hot(&self, per_us: f64, terms: &Terms) -> bool {
        let share_per_us = terms.scale.rate as f64 / terms.scale.token as f64 / self.nodes as f64;
        per_us * terms.tick_us.min(HOT_US) as f64 >= 1.0
            || per_us.min(share_per_us) * self.round_trip_us.min(HOT_US) as f64 >= 1.0
    }
}
