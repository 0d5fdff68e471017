//! What a run tells at its end, whether it was played for real or simulated.

use serde::Serialize;
use tidegate::sim::Traffic;
use tidegate::sim::figures::Figures;

use crate::bounds::Percent;
use crate::flags::LoadFlags;
use crate::trace::Trace;

/// Keys in the list of the most denied.
const TOP_DENIED: usize = 10;

/// What a replayed log adds to the summary.
#[derive(Debug, Serialize)]
struct TraceSummary {
    lines_parsed: u64,
    lines_rejected: u64,
    top_denied: Vec<Denied>,
}

#[derive(Debug, Serialize)]
struct Denied {
    key: String,
    denied: u64,
}

impl TraceSummary {
    fn of(trace: &Trace, figures: &Figures) -> Self {
        let top_denied = figures
            .denied_by_key
            .iter()
            .take(TOP_DENIED)
            .map(|&(key, denied)| Denied { key: trace.keys[key as usize].clone(), denied })
            .collect();
        Self { lines_parsed: trace.parsed, lines_rejected: trace.rejected, top_denied }
    }
}

/// The summary.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    scenario: &'static str,
    store: &'static str,
    nodes: u16,
    rate: u64,
    burst: u64,
    /// None where the accuracy says when to sync.
    interval_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy_pct: Option<f64>,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    drift_p50_pct_of_burst: f64,
    drift_p99_pct_of_burst: f64,
    drift_max_pct_of_burst: f64,
    store_calls: u64,
    store_errors: u64,
    keys_synced: u64,
    store_calls_per_admitted: f64,
    #[serde(flatten)]
    trace: Option<TraceSummary>,
}

impl Summary {
    pub(crate) fn new(
        flags: &LoadFlags,
        store: &'static str,
        seconds: f64,
        traffic: &Traffic,
        figures: Figures,
        trace: Option<&Trace>,
    ) -> Self {
        Self {
            scenario: trace.map_or(flags.scenario.name(), |_| "trace"),
            store,
            nodes: flags.cluster.nodes,
            rate: flags.cluster.rate,
            burst: flags.cluster.burst,
            interval_ms: flags.accuracy.is_none().then_some(flags.interval.as_secs_f64() * 1e3),
            accuracy_pct: flags.accuracy.map(|Percent(percent)| percent),
            seconds,
            drift_p50_pct_of_burst: traffic.drift_quantile(0.5),
            drift_p99_pct_of_burst: traffic.drift_quantile(0.99),
            drift_max_pct_of_burst: traffic.drift_quantile(1.0),
            store_calls: traffic.store_calls,
            store_errors: traffic.store_errors,
            keys_synced: traffic.keys_synced,
            store_calls_per_admitted: traffic.store_calls as f64 / figures.admitted.max(1) as f64,
            trace: trace.map(|trace| TraceSummary::of(trace, &figures)),
            figures,
        }
    }
}

/// Prints a report: one line of JSON, or a line a field for people, who can do without the timeline.
pub(crate) fn print(report: &impl Serialize, json: bool) -> Result<(), serde_json::Error> {
    if json {
        println!("{}", serde_json::to_string(report)?);
        return Ok(());
    }
    let serde_json::Value::Object(fields) = serde_json::to_value(report)? else {
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
