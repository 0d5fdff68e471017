//! What a run tells at its end, whether it was played for real or simulated.

use serde::Serialize;
use tidegate::sim::figures::{Figures, SLOT_US};
use tidegate::sim::{Algorithm, Traffic};

use crate::flags::LoadFlags;
use crate::output::{self, OutputError};
use crate::trace::Trace;
use crate::values::{Part, Rate};

/// The version of the JSON's fields: it rises when one goes or changes its meaning.
const SCHEMA_VERSION: u32 = 2;

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
    schema_version: u32,
    scenario: &'static str,
    store: &'static str,
    nodes: u16,
    algorithm: Algorithm,
    /// Tokens in a period.
    rate: u64,
    period_s: u64,
    burst: u64,
    /// None where the accuracy says when to sync.
    interval_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy_pct: Option<f64>,
    pub(crate) seconds: f64,
    /// The length of each slot of the timeline.
    slot_ms: u64,
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
            schema_version: SCHEMA_VERSION,
            scenario: trace.map_or(flags.scenario.name(), |_| "trace"),
            store,
            nodes: flags.cluster.nodes,
            algorithm: flags.algorithm,
            rate: flags.cluster.rate.tokens,
            period_s: flags.cluster.rate.period_s,
            burst: flags.cluster.burst,
            interval_ms: flags.accuracy.is_none().then_some(flags.interval.as_secs_f64() * 1e3),
            accuracy_pct: flags.accuracy.map(Part::percent),
            seconds,
            slot_ms: SLOT_US / 1000,
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

/// A line of a report for people: what it is about, and the figures with their units.
pub(crate) type Line = (&'static str, String);

/// A report that people can read.
pub(crate) trait Reported: Serialize {
    /// What happened, in one or two sentences.
    fn headline(&self) -> String;
    /// The figures that matter, a dozen lines at most.
    fn lines(&self) -> Vec<Line>;
}

impl Summary {
    /// The limit in words.
    fn limit(&self) -> String {
        let rate = Rate { tokens: self.rate, period_s: self.period_s };
        let sync = match (self.interval_ms, self.accuracy_pct) {
            (_, Some(accuracy)) => format!("by accuracy, {accuracy}% of the burst"),
            (interval_ms, None) => format!("each {} ms", interval_ms.unwrap_or_default()),
        };
        let (algorithm, burst) = (self.algorithm.title(), count(self.burst));
        format!("{algorithm}, {rate}, burst {burst}, sync {sync}")
    }
}

impl Reported for Summary {
    fn headline(&self) -> String {
        let Self { nodes, seconds, figures, .. } = self;
        let Figures { offered, admitted, ideal, admitted_vs_ideal_pct, .. } = figures;
        let limit = if figures.excess_tokens < 0.005 {
            "The limit was never exceeded.".to_owned()
        } else {
            let (over, part) = (tokens(figures.excess_tokens), pct(figures.excess_pct_of_burst));
            format!("At worst, {over} more than the limit ({part} of the burst) were admitted.")
        };
        format!(
            "{nodes} nodes admitted {} of {} tokens in {seconds:.1} s; one central limit would \
             have admitted {} (ratio {}). {limit}",
            count(*admitted),
            count(*offered),
            count(*ideal),
            pct(*admitted_vs_ideal_pct),
        )
    }

    fn lines(&self) -> Vec<Line> {
        let figures = &self.figures;
        let mut lines = vec![
            ("limit", self.limit()),
            ("load", format!("{} on {} nodes, store {}", self.scenario, self.nodes, self.store)),
            (
                "excess",
                format!(
                    "{}, {} of the burst, for {:.2} s at the longest",
                    tokens(figures.excess_tokens),
                    pct(figures.excess_pct_of_burst),
                    figures.longest_excess_s,
                ),
            ),
            (
                "denied though tokens were there",
                format!("{} of requests", pct(figures.wrong_denials_pct)),
            ),
            ("decided while unsure", format!("{} of requests", pct(figures.unsure_pct))),
            (
                "least share of a node",
                format!("{} of a fair one", pct(figures.least_fair_share_pct)),
            ),
            (
                "store",
                format!(
                    "{} calls, {:.1}/s, {} failed, {:.3} for each token admitted",
                    count(self.store_calls),
                    self.store_calls as f64 / self.seconds.max(1.0),
                    count(self.store_errors),
                    self.store_calls_per_admitted,
                ),
            ),
            (
                "drift of a node's view",
                format!(
                    "{} of the burst (median), {} (99 in 100)",
                    pct(self.drift_p50_pct_of_burst),
                    pct(self.drift_p99_pct_of_burst),
                ),
            ),
        ];
        lines.extend(self.trace.as_ref().map(TraceSummary::line));
        lines
    }
}

impl TraceSummary {
    fn line(&self) -> Line {
        let Self { lines_parsed, lines_rejected, top_denied } = self;
        let most = top_denied.first().map_or_else(String::new, |Denied { key, denied }| {
            format!("; most denied: {key} ({} times)", count(*denied))
        });
        let (parsed, rejected) = (count(*lines_parsed), count(*lines_rejected));
        ("trace", format!("{parsed} lines read, {rejected} not understood{most}"))
    }
}

/// With thousands apart, such as 12,345.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A percentage in two decimals.
pub(crate) fn pct(percent: f64) -> String {
    format!("{percent:.2}%")
}

/// Tokens in two decimals at most.
pub(crate) fn tokens(number: f64) -> String {
    format!("{} tokens", (number * 100.0).round() / 100.0)
}

/// Prints a report: one line of JSON, or a summary for people, with every figure below it if
/// `verbose`.
pub(crate) fn print(report: &impl Reported, json: bool, verbose: bool) -> Result<(), OutputError> {
    if json {
        return output::json(report);
    }
    let mut text = report.headline() + "\n\n";
    let line = |(name, figures): Line| format!("{name:<32} {figures}\n");
    text.extend(report.lines().into_iter().map(line));
    if verbose {
        text += "\n";
        text += &all_figures(report)?;
    }
    output::write(&text)
}

/// A line a field. People can do without the timeline.
fn all_figures(report: &impl Serialize) -> Result<String, serde_json::Error> {
    let serde_json::Value::Object(fields) = serde_json::to_value(report)? else {
        return Ok(String::new());
    };
    let line = |(name, value): (&String, &serde_json::Value)| match value {
        serde_json::Value::Number(number) if number.is_f64() => {
            format!("{name:<32} {:.3}\n", number.as_f64().unwrap_or_default())
        }
        serde_json::Value::String(text) => format!("{name:<32} {text}\n"),
        other => format!("{name:<32} {other}\n"),
    };
    Ok(fields.iter().filter(|(name, _)| *name != "timeline").map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_their_thousands_apart() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        for (number, text) in cases {
            assert_eq!(count(number), text);
        }
        assert_eq!(tokens(1.256), "1.26 tokens");
    }
}
