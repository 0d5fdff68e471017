//! How fast one key is asked for, and whether its requests have ceased.

use super::bursts::Bursts;
use super::history::TELLING_REQUESTS;
use crate::limit::Terms;
use crate::sync::demand::Demand;
use crate::time::Timestamp;

/// The absence of requests says something once this many were expected: chance alone leaves less
/// than a quarter of them once in three hundred times.
const PROBE_ARRIVALS: f64 = 8.0;

/// The next look at whether requests have ceased.
#[derive(Debug)]
struct Probe {
    at: Timestamp,
    span_us: u64,
    /// Tokens that had been asked for at the last look.
    arrived: u64,
}

/// What is asked for, admitted or denied, and the estimates from it.
#[derive(Debug)]
pub(super) struct Arrivals {
    pub(super) demand: Demand,
    pub(super) bursts: Bursts,
    /// Tokens asked for that no observation of the demand contains yet.
    pub(super) tokens: u64,
    /// The requests that asked for them.
    pub(super) requests: u64,
    probe: Probe,
}

impl Arrivals {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            demand: Demand::new(now.minus_micros(1000)),
            bursts: Bursts::new(now),
            tokens: 0,
            requests: 0,
            probe: Probe { at: Timestamp::NEVER, span_us: 0, arrived: 0 },
        }
    }

    /// A collection has found this many requests for `tokens`.
    pub(super) fn collect(&mut self, requests: u64, tokens: u64, now: Timestamp) {
        self.tokens += tokens;
        self.requests += requests;
        self.bursts.collect(requests, tokens, now);
    }

    /// Ends an observation of the demand, but not between two bursts, and not within one: silence would be taken for
    /// the end of demand, and a burst for what comes all the time.
    pub(super) fn observe_demand(&mut self, now: Timestamp, terms: &Terms) {
        if !self.bursts.take_demand_due(now) {
            return;
        }
        let tokens = std::mem::take(&mut self.tokens);
        let telling = std::mem::take(&mut self.requests) >= TELLING_REQUESTS;
        self.demand.observe(tokens, telling, now, terms.tick_us, terms.scale.fill_us());
    }

    /// When to look whether requests have ceased.
    pub(super) fn probe_at(&self) -> Timestamp {
        self.probe.at
    }

    pub(super) fn stop_probing(&mut self) {
        self.probe.at = Timestamp::NEVER;
    }

    /// Plans a look in a quarter tick, or when it will say something if that is well before the
    /// next report. `arrived` is what has been asked for by now, `mean_cost` what a request costs.
    pub(super) fn plan_probe(
        &mut self,
        arrived: u64,
        mean_cost: u64,
        now: Timestamp,
        terms: &Terms,
    ) {
        let telling = PROBE_ARRIVALS * mean_cost as f64;
        let telling_us = (telling / self.demand.per_us().max(f64::MIN_POSITIVE)) as u64;
        let span_us = telling_us.max(self.bursts.patience_us()).max(terms.tick_us / 4);
        let is_before_report = span_us <= terms.tick_us / 2;
        let at = if is_before_report { now.plus_micros(span_us) } else { Timestamp::NEVER };
        self.probe = Probe { at, span_us, arrived };
    }

    /// Looks whether less than a quarter of what was expected has arrived since the look was planned. If so, returns
    /// what did, and in how many microseconds.
    pub(super) fn ceased(&self, arrived: u64, now: Timestamp) -> Option<(u64, u64)> {
        let arrived = arrived.saturating_sub(self.probe.arrived);
        let span_us = now.micros_since(self.probe.at) + self.probe.span_us;
        ((arrived as f64) < self.demand.over(span_us) / 4.0).then_some((arrived, span_us))
    }

    /// Requests have ceased: the demand is what arrived in the last `span_us`.
    pub(super) fn cease(&mut self, arrived: u64, span_us: u64, now: Timestamp) {
        (self.tokens, self.requests) = (0, 0);
        self.demand.collapse(arrived, span_us, now);
        self.bursts.judge_over();
        self.stop_probing();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_ceased_if_less_than_a_quarter_of_those_expected_came() {
        let at = Timestamp::from_micros;
        let mut arrivals = Arrivals::new(at(0));
        assert_eq!(arrivals.ceased(0, at(100_000)), None, "none was expected");
        arrivals.demand.observe(1_000, true, at(1_000_000), 50_000, 1_000_000);
        arrivals.probe = Probe { at: at(1_020_000), span_us: 20_000, arrived: 7 };
        // 20 are expected in 20 ms.
        assert_eq!(arrivals.ceased(7 + 5, at(1_020_000)), None);
        assert_eq!(arrivals.ceased(7 + 4, at(1_020_000)), Some((4, 20_000)));
    }
}
