//! `tidegate compare`: what each algorithm admits in each mode, beside the usual ways; or what one decides about the
//! requests of a file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidegate::{
    ConfigError, FixedWindow, LeakyBucket, Mode, Quota, Rule, SlidingLog, SlidingWindow, StoreError,
};

use crate::flags::InputError;
use crate::output::OutputError;
use crate::store::Store;
use crate::values::duration;

mod decisions;
mod definition;
mod load;
mod report;
mod usual;
mod ways;

use load::{Case, Load};

/// What can stop a comparison.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompareError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: csv::Error },
    #[error("{}, line {line}: {field} = {value:?}: {reason}", path.display())]
    Field { path: PathBuf, line: u64, field: &'static str, value: String, reason: &'static str },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("request {0} was not decided: the store did not answer")]
    Undecided(usize),
    #[error("{0}")]
    Started(String),
    #[error("the picture cannot be drawn: {0}")]
    Picture(String),
}

const EXAMPLES: &str = "\
Examples:
  tidegate compare --case edge --mode local --time 1s
  tidegate compare --algorithm sliding-log --quota 50/s --mode exact --load 3 --time 1s
  tidegate compare --quota 5/s --arrivals examples/traces/arrivals.csv --decisions decisions.csv
  tidegate compare --algorithm leaky-bucket --quota 5/s --queue 2s --arrivals examples/traces/arrivals.csv --decisions -

Without a file, nodes in this process are asked the same requests in real time by each algorithm in each
mode, and by the usual ways of those who have no such library; a table says what each admitted beside one
central limit of the algorithm's definition. All of them take two minutes, in memory or with
--store redis://HOST:PORT.

Arrivals are lines of t_us,key,cost, with or without a header: microseconds, any text, tokens. Windows
are aligned to t_us = 0. A time that goes back counts as the newest before it. Decisions are the same
lines in the same order with allowed (1 or 0) and delay_us (how long the request waits, 0 if denied). A
cost of 0 is allowed; one that can never fit is denied.";

const ALGORITHMS: [&str; 5] =
    ["token-bucket", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log"];

/// Compares algorithms, modes and the usual ways on the same requests; or decides about those of a file.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The algorithm [default: all five; of a file token-bucket]
    #[arg(long, value_parser = ALGORITHMS)]
    algorithm: Option<String>,
    /// Tokens per period, such as 100/s, 600/min, 5/100ms [default: 100/s; of a file it must be given]
    #[arg(long)]
    quota: Option<String>,
    /// Tokens that a key can have at once; only with token-bucket [default: those of a period]
    #[arg(long)]
    burst: Option<u64>,
    /// How long a request may wait for its slot, such as 500ms; only with leaky-bucket [default: 0]
    #[arg(long, value_parser = duration, allow_hyphen_values = true)]
    queue: Option<Duration>,
    /// The windows are hours, days or months of this zone, such as Europe/Berlin; only with fixed-window and --arrivals,
    /// whose times are then since 1970, and after 1990
    #[arg(long, value_name = "NAME")]
    zone: Option<String>,
    /// Who decides: each node alone (local), nodes with leases of a store (hybrid), or the store (exact) [default: all
    /// three; of a file local]
    #[arg(long, value_parser = ["local", "hybrid", "exact"])]
    mode: Option<String>,
    /// memory, or a server such as redis://HOST:PORT; of a file only with --mode exact, and then it uses the file's times
    #[arg(long, default_value = "memory")]
    store: Store,
    #[command(flatten)]
    load: Load,
    /// Write the report as a line of JSON
    #[arg(long, conflicts_with = "arrivals")]
    json: bool,
    /// Draw what is admitted over time, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "arrivals")]
    chart: Option<PathBuf>,
    /// The requests: a CSV of `t_us,key,cost`
    #[arg(long, value_name = "FILE", requires = "decisions", requires = "quota")]
    arrivals: Option<PathBuf>,
    /// Where the decisions go: a CSV of `t_us,key,cost,allowed,delay_us`; - for standard output
    #[arg(long, value_name = "FILE", requires = "arrivals")]
    decisions: Option<PathBuf>,
}

/// A command of either form.
pub(crate) fn run(options: &Options) -> Result<(), CompareError> {
    if let (Some(arrivals), Some(decisions)) = (&options.arrivals, &options.decisions) {
        let rule = options.rule(options.algorithm.as_deref().unwrap_or(ALGORITHMS[0]))?;
        return decisions::run(options, rule, (arrivals, decisions));
    }
    let rules: Vec<Rule> = if let Some(algorithm) = &options.algorithm {
        vec![options.rule(algorithm)?]
    } else {
        let all = ALGORITHMS.iter().map(|algorithm| options.rule_of_all(algorithm));
        all.collect::<Result<_, _>>()?
    };
    let plan = options.load.plan(rules[0].quota())?;
    let usual = options.algorithm.is_none() && options.mode.is_none();
    let ways = ways::all(&rules, options.mode(), usual);
    let rows = ways::run(&ways, &plan, &options.store)?;
    report::write(&rows, &plan, options)
}

impl Options {
    fn mode(&self) -> Option<Mode> {
        Some(match self.mode.as_deref()? {
            "hybrid" => Mode::Hybrid,
            "exact" => Mode::Exact,
            _ => Mode::Local,
        })
    }

    /// One of all algorithms: each takes the settings that fit it.
    fn rule_of_all(&self, algorithm: &str) -> Result<Rule, InputError> {
        let (is_bucket, is_queue) = (algorithm == "token-bucket", algorithm == "leaky-bucket");
        let quota = self.quota_text();
        let rate = quota.split_once(' ').filter(|_| !is_bucket);
        let own = Settings {
            quota: rate.map_or(quota, |(rate, _)| rate),
            burst: self.burst.filter(|_| is_bucket),
            queue: self.queue.filter(|_| is_queue),
            zone: None,
        };
        if let Some(zone) = &self.zone {
            let reason = "name --algorithm fixed-window";
            return Err(InputError::flag("--zone", zone, reason));
        }
        own.rule(algorithm)
    }

    fn quota_text(&self) -> &str {
        let default = if self.load.case == Some(Case::Apisix) { "500/s" } else { "100/s" };
        self.quota.as_deref().unwrap_or(default)
    }

    fn rule(&self, algorithm: &str) -> Result<Rule, InputError> {
        let (quota, zone) = (self.quota_text(), self.zone.as_deref());
        Settings { quota, burst: self.burst, queue: self.queue, zone }.rule(algorithm)
    }
}

/// What a rule is made of.
struct Settings<'a> {
    quota: &'a str,
    burst: Option<u64>,
    queue: Option<Duration>,
    zone: Option<&'a str>,
}

impl Settings<'_> {
    fn rule(&self, algorithm: &str) -> Result<Rule, InputError> {
        let month = self.quota.strip_suffix("/month").filter(|_| algorithm == "fixed-window");
        let text = month.map_or(self.quota.to_owned(), |tokens| format!("{tokens}/d"));
        let quota: Quota = text.parse().map_err(|error| match error {
            ConfigError::Quota { text, reason } => {
                InputError::Value { flag: "--quota", value: text, reason }
            }
            other => config_error(other),
        })?;
        let of = (quota.tokens(), quota.period());
        let is = |name: &str| algorithm == name;
        let misfit = |flag, value: &dyn ToString, only: &str| {
            let reason = format!("does not fit --algorithm {algorithm}: {only}");
            Err(InputError::Value { flag, value: value.to_string(), reason })
        };
        let has_burst = self.burst.is_some() || quota.burst_tokens() != quota.tokens();
        if has_burst && !is("token-bucket") {
            let burst = self.burst.unwrap_or(quota.burst_tokens());
            return misfit("--burst", &burst, "only token-bucket has a burst");
        }
        if let Some(queue) = self.queue.filter(|_| !is("leaky-bucket")) {
            let value = format!("{queue:?}");
            return misfit("--queue", &value, "only leaky-bucket has a queue");
        }
        if let Some(zone) = self.zone.filter(|_| !is("fixed-window")) {
            return misfit("--zone", &zone, "only the windows of fixed-window are a zone's");
        }
        Ok(match algorithm {
            "leaky-bucket" => {
                LeakyBucket::new(of.0, of.1).queue(self.queue.unwrap_or_default()).into()
            }
            "fixed-window" => {
                let window = match month {
                    Some(_) => FixedWindow::per_month(of.0),
                    None => FixedWindow::new(of.0, of.1),
                };
                // A name for as long as the program runs.
                let zone = self.zone.map(|zone| &*zone.to_owned().leak());
                zone.map_or(window, |zone| window.zone(zone)).into()
            }
            "sliding-window" => SlidingWindow::new(of.0, of.1).into(),
            "sliding-log" => SlidingLog::new(of.0, of.1).into(),
            _ => quota.burst(self.burst.unwrap_or(quota.burst_tokens())).into(),
        })
    }
}

/// Lets real time pass.
#[allow(clippy::disallowed_methods, reason = "requests come in real time")]
async fn sleep(time: Duration) {
    tokio::time::sleep(time).await;
}

/// What cannot be kept, by the flag that asked for it.
fn config_error(error: ConfigError) -> InputError {
    match error {
        ConfigError::Limit {
            field: "quota.tokens" | "quota.period" | "window.period",
            value,
            reason,
            ..
        } => InputError::Flag { flag: "--quota", value, reason },
        other => InputError::of_config(other),
    }
}
