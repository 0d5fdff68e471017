//! What a demo tells: a line a second, and a summary.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use tidegate::sim::figures::{Figures, SLOT_US};

use super::node::{Live, Told};
use super::options::Outage;
use super::sleep_until;
use crate::output;
use crate::summary::{Line, Reported, Summary, count, tokens};

/// The longest decision that is told apart, one minute; longer ones count as this long.
const TOOK_NS_MAX: u64 = 60_000_000_000;

/// Prints a line a second on standard error until it is `over`, beginning with `who`.
pub(crate) fn each_second(live: &Live, who: &str, limit: &str, start: Instant, over: &AtomicBool) {
    let (mut offered, mut admitted, mut calls) = (0, 0, 0);
    for second in 1_u32.. {
        if sleep_until(start + Duration::from_secs(1) * second, over) {
            return;
        }
        let (offered_now, admitted_now) =
            (live.offered.load(Ordering::Relaxed), live.admitted.load(Ordering::Relaxed));
        let (calls_now, drift, excess) = {
            let traffic = live.traffic();
            let drift = traffic.drift_pct.last().copied().unwrap_or(0.0);
            (traffic.store_calls, drift, traffic.excess)
        };
        output::note(&format!(
            "{who}{second:>4} s  offered {:>7}/s  admitted {:>7}/s  limit {limit}  drift {drift:>6.3}% of burst  excess seen {:.0} of {}  store calls {:>5}/s",
            offered_now - offered,
            admitted_now - admitted,
            excess.excess_observed_tokens,
            excess.excess_bound_tokens.map_or("?".to_owned(), |bound| format!("{bound:.0}")),
            calls_now - calls,
        ));
        (offered, admitted, calls) = (offered_now, admitted_now, calls_now);
    }
}

/// What an outage adds to the summary, in tokens.
#[derive(Debug, Serialize)]
struct OutageReport {
    seconds: f64,
    admitted_during: u64,
    admitted_during_per_second: f64,
    admitted_in_first_second_after: u64,
}

impl OutageReport {
    fn of(outage: Outage, figures: &Figures) -> Self {
        let slot = |time: Duration| (time.as_micros() as u64 / SLOT_US) as usize;
        let admitted = |from: Duration, until: Duration| -> u64 {
            let slots = figures.timeline.iter().skip(slot(from)).take(slot(until) - slot(from));
            slots.map(|slot| slot.admitted).sum()
        };
        let seconds = outage.until.saturating_sub(outage.from).as_secs_f64();
        let during = admitted(outage.from, outage.until);
        Self {
            seconds,
            admitted_during: during,
            admitted_during_per_second: during as f64 / seconds,
            admitted_in_first_second_after: admitted(
                outage.until,
                outage.until + Duration::from_secs(1),
            ),
        }
    }
}

/// The summary, and what only a demo can tell: how long its decisions took, by the real clock.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The limit's name, if it is one of a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<String>,
    #[serde(flatten)]
    summary: Summary,
    #[serde(flatten)]
    excess: Told,
    /// Half of the decisions took at most so long.
    decision_p50_ns: u64,
    /// 99 in 100 decisions took at most so long.
    decision_p99_ns: u64,
    /// 999 in 1000 decisions took at most so long.
    decision_p999_ns: u64,
    /// Half of the exchanges with the store were answered within so long, queues included.
    round_trip_p50_ms: f64,
    /// 99 in 100 of them.
    round_trip_p99_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    outage: Option<OutageReport>,
}

impl Report {
    pub(crate) fn new(
        limit: Option<String>,
        summary: Summary,
        excess: Told,
        (took_ns, round_trips_us): (&[u64], &[u64]),
        outage: Option<Outage>,
    ) -> Self {
        let took = histogram(took_ns);
        let round_trips = histogram(round_trips_us);
        let round_trip_ms = |part| round_trips.value_at_quantile(part) as f64 / 1e3;
        Self {
            limit,
            decision_p50_ns: took.value_at_quantile(0.5),
            decision_p99_ns: took.value_at_quantile(0.99),
            decision_p999_ns: took.value_at_quantile(0.999),
            round_trip_p50_ms: round_trip_ms(0.5),
            round_trip_p99_ms: round_trip_ms(0.99),
            outage: outage.map(|outage| OutageReport::of(outage, &summary.figures)),
            summary,
            excess,
        }
    }
}

impl Reported for Report {
    fn headline(&self) -> String {
        match &self.limit {
            Some(limit) => format!("Limit {limit:?}: {}", self.summary.headline()),
            None => self.summary.headline(),
        }
    }

    fn lines(&self) -> Vec<Line> {
        let micros = |ns: u64| format!("{:.2} us", ns as f64 / 1e3);
        let bound = self.excess.excess_bound_tokens.map_or("none".to_owned(), tokens);
        let mut lines = self.summary.lines();
        lines.push((
            "excess that nodes saw",
            format!("{}; bound: {bound}", tokens(self.excess.excess_observed_tokens)),
        ));
        lines.push((
            "time of a decision",
            format!(
                "{} (median), {} (99 in 100), {} (999 in 1000)",
                micros(self.decision_p50_ns),
                micros(self.decision_p99_ns),
                micros(self.decision_p999_ns),
            ),
        ));
        lines.push((
            "round trip to the store",
            format!(
                "{:.2} ms (median), {:.2} ms (99 in 100)",
                self.round_trip_p50_ms, self.round_trip_p99_ms
            ),
        ));
        lines.extend(self.outage.as_ref().map(OutageReport::line));
        lines
    }
}

impl OutageReport {
    fn line(&self) -> Line {
        let per_second = self.admitted_during_per_second;
        let (during, after) = (self.admitted_during, self.admitted_in_first_second_after);
        let (during, after) = (count(during), count(after));
        let text = format!(
            "{:.1} s: {during} tokens admitted, {per_second:.1}/s; {after} in the second after it",
            self.seconds
        );
        ("outage", text)
    }
}

fn histogram(all: &[u64]) -> Histogram<u64> {
    // It refuses only a low bound of 0, a high one below twice the low one, or over five digits.
    let mut took = Histogram::new_with_bounds(1, TOOK_NS_MAX, 3).expect("constants in bounds");
    for &one in all {
        took.saturating_record(one);
    }
    took
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_decisions_times() {
        let took = histogram(&(1..=1000).collect::<Vec<u64>>());
        assert_eq!([0.5, 0.99, 0.999].map(|part| took.value_at_quantile(part)), [500, 990, 999]);
    }

    #[test]
    fn percentiles_of_nothing_are_nothing() {
        assert_eq!(histogram(&[]).value_at_quantile(0.5), 0);
    }

    #[test]
    fn a_decision_that_took_forever_is_counted_as_long_not_lost() {
        assert!(histogram(&[u64::MAX]).value_at_quantile(0.5) >= TOOK_NS_MAX);
    }
}
