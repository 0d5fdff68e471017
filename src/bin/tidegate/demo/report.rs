//! What a demo tells: a line a second, and a summary.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use super::node::{Live, Traffic};
use super::options::{Options, Store};
use super::{DemoError, sleep_until};
use crate::figures::{Figures, SLOT_US};
use crate::trace::Trace;

/// Keys in the list of the most denied.
const TOP_DENIED: usize = 10;

/// Prints a line a second on standard error until it is `over`, beginning with `who`.
pub(crate) fn each_second(live: &Live, who: &str, limit: &str, start: Instant, over: &AtomicBool) {
    let (mut offered, mut admitted, mut calls) = (0, 0, 0);
    for second in 1_u32.. {
        if sleep_until(start + Duration::from_secs(1) * second, over) {
            return;
        }
        let (offered_now, admitted_now) =
            (live.offered.load(Ordering::Relaxed), live.admitted.load(Ordering::Relaxed));
        let (calls_now, drift) = {
            let traffic = live.traffic();
            (traffic.store_calls, traffic.drift_pct.last().copied().unwrap_or(0.0))
        };
        eprintln!(
            "{who}{second:>4} s  offered {:>7}/s  admitted {:>7}/s  limit {limit}  drift {drift:>6.3}% of burst  store calls {:>5}/s",
            offered_now - offered,
            admitted_now - admitted,
            calls_now - calls,
        );
        (offered, admitted, calls) = (offered_now, admitted_now, calls_now);
    }
}

/// What a replayed log adds to the summary.
#[derive(Debug, Serialize)]
pub(crate) struct TraceReport {
    lines_parsed: u64,
    lines_rejected: u64,
    top_denied: Vec<Denied>,
}

#[derive(Debug, Serialize)]
struct Denied {
    key: String,
    denied: u64,
}

impl TraceReport {
    pub(crate) fn of(trace: &Trace, figures: &Figures) -> Self {
        let top_denied = figures
            .denied_by_key
            .iter()
            .take(TOP_DENIED)
            .map(|&(key, denied)| Denied { key: trace.keys[key as usize].clone(), denied })
            .collect();
        Self { lines_parsed: trace.parsed, lines_rejected: trace.rejected, top_denied }
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
    fn of(options: &Options, figures: &Figures) -> Option<Self> {
        let outage = options.outage?;
        let slot = |time: Duration| (time.as_micros() as u64 / SLOT_US) as usize;
        let admitted = |from: Duration, until: Duration| -> u64 {
            let slots = figures.timeline.iter().skip(slot(from)).take(slot(until) - slot(from));
            slots.map(|slot| slot.admitted).sum()
        };
        let seconds = outage.until.saturating_sub(outage.from).as_secs_f64();
        let during = admitted(outage.from, outage.until);
        Some(Self {
            seconds,
            admitted_during: during,
            admitted_during_per_second: during as f64 / seconds,
            admitted_in_first_second_after: admitted(
                outage.until,
                outage.until + Duration::from_secs(1),
            ),
        })
    }
}

/// The summary.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    scenario: String,
    store: String,
    nodes: u16,
    rate: u64,
    burst: u64,
    interval_ms: f64,
    seconds: f64,
    #[serde(flatten)]
    figures: Figures,
    drift_p50_pct_of_burst: f64,
    drift_p99_pct_of_burst: f64,
    drift_max_pct_of_burst: f64,
    store_calls: u64,
    store_errors: u64,
    keys_synced: u64,
    store_calls_per_admitted: f64,
    #[serde(flatten)]
    trace: Option<TraceReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outage: Option<OutageReport>,
}

impl Report {
    pub(crate) fn new(
        options: &Options,
        store: &Store,
        seconds: f64,
        traffic: &Traffic,
        figures: Figures,
        trace: Option<TraceReport>,
    ) -> Self {
        let scenario = match &trace {
            Some(_) => "trace".to_owned(),
            None => options
                .scenario
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned()),
        };
        Self {
            scenario,
            store: match store {
                Store::Memory => "memory",
                Store::Redis(_) => "redis",
            }
            .to_owned(),
            nodes: options.nodes,
            rate: options.rate,
            burst: options.burst,
            interval_ms: options.interval.as_secs_f64() * 1e3,
            seconds,
            drift_p50_pct_of_burst: traffic.drift_quantile(0.5),
            drift_p99_pct_of_burst: traffic.drift_quantile(0.99),
            drift_max_pct_of_burst: traffic.drift_quantile(1.0),
            store_calls: traffic.store_calls,
            store_errors: traffic.store_errors,
            keys_synced: traffic.keys_synced,
            store_calls_per_admitted: traffic.store_calls as f64 / figures.admitted.max(1) as f64,
            outage: OutageReport::of(options, &figures),
            figures,
            trace,
        }
    }

    pub(crate) fn print(&self, json: bool) -> Result<(), DemoError> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let serde_json::Value::Object(fields) = serde_json::to_value(self)? else {
            return Ok(());
        };
        for (name, value) in fields.iter().filter(|(name, _)| *name != "timeline") {
            match value {
                serde_json::Value::Number(number) if number.is_f64() => {
                    println!("{name:<28} {:.3}", number.as_f64().unwrap_or_default());
                }
                serde_json::Value::String(text) => println!("{name:<28} {text}"),
                other => println!("{name:<28} {other}"),
            }
        }
        Ok(())
    }
}
