//! What demo and simulation are both told: the limit and the load on it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate::sim::workload::{Arrival, Scenario, Workload, WorkloadError};
use tidegate::{DEFAULT_CREDIT, Limit, Quota};

use crate::trace::{Trace, TraceError};

/// What is asked for cannot be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error("{flag}: {value}: {reason}")]
    Flag { flag: &'static str, value: String, reason: &'static str },
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl InputError {
    /// A flag whose value is at fault, and what would be right.
    pub(crate) fn flag(flag: &'static str, value: &dyn ToString, reason: &'static str) -> Self {
        Self::Flag { flag, value: value.to_string(), reason }
    }
}

/// The limit, and who asks for what when.
#[derive(Args)]
pub(crate) struct LoadFlags {
    /// Nodes, each with a limiter and a connection of its own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) nodes: u16,
    /// Tokens a second for each key; with --trace, in replay time
    #[arg(long, default_value_t = 1000)]
    pub(crate) rate: u64,
    /// Tokens that a key can have at once
    #[arg(long, default_value_t = 1000)]
    pub(crate) burst: u64,
    /// Offered load as a multiple of the rate, instead of the scenario's own
    #[arg(long)]
    pub(crate) load: Option<f64>,
    /// Keys, chosen uniformly unless the scenario says otherwise
    #[arg(long, default_value_t = 1)]
    pub(crate) keys: u32,
    /// Who asks for what when
    #[arg(long, default_value = Scenario::OverUniform.name(), long_help = scenario_help())]
    pub(crate) scenario: Scenario,
    /// Sync interval, such as 50ms
    #[arg(long, default_value = "50ms", value_parser = duration)]
    pub(crate) interval: Duration,
    /// Tokens that a node may spend on a key before it hears from the store [default: 1]
    // No default value here: a strict policy refuses a credit that was given.
    #[arg(long)]
    pub(crate) credit: Option<u32>,
    /// How long the load lasts, in seconds
    #[arg(long, default_value_t = 10.0)]
    pub(crate) seconds: f64,
    /// Replay an access log (Common or Combined Log Format) or a CSV of `unix_ms,key[,cost]`
    #[arg(long, conflicts_with_all = ["scenario", "load", "keys", "seconds"])]
    pub(crate) trace: Option<PathBuf>,
    /// Replay the trace so many times faster than it was recorded
    #[arg(long, default_value_t = 1.0, requires = "trace")]
    pub(crate) speed: f64,
    /// Seeds the arrivals, and whatever else is random
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print JSON on standard output, one object a run, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

fn scenario_help() -> String {
    format!("Who asks for what when: {}", Scenario::ALL.map(Scenario::name).join(", "))
}

/// A duration such as `50ms` or `1.5s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let parsed: jiff::SignedDuration =
        text.parse().map_err(|_| format!("{text:?} is not a duration such as 50ms or 3s"))?;
    Duration::try_from(parsed).map_err(|_| format!("{text:?} is negative"))
}

/// The limit that all nodes keep, as the nodes' processes are told of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LimitSpec {
    pub(crate) rate: u64,
    pub(crate) burst: u64,
    pub(crate) interval_us: u64,
    pub(crate) credit: u32,
}

impl LimitSpec {
    pub(crate) fn limit(&self) -> Limit {
        Limit::new("demo", Quota::per_second(self.rate).burst(self.burst))
            .sync_interval(Duration::from_micros(self.interval_us))
            .credit(self.credit)
    }
}

impl LoadFlags {
    pub(crate) fn limit(&self) -> LimitSpec {
        LimitSpec {
            rate: self.rate,
            burst: self.burst,
            interval_us: self.interval.as_micros() as u64,
            credit: self.credit.unwrap_or(DEFAULT_CREDIT),
        }
    }

    pub(crate) fn workload(&self) -> Workload {
        Workload {
            scenario: self.scenario,
            nodes: self.nodes,
            keys: self.keys,
            rate_per_second: self.rate as f64,
            load: self.load,
            seconds: self.seconds,
            seed: self.seed,
        }
    }

    /// Refuses a load that cannot be offered.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        if !(self.speed > 0.0 && self.speed.is_finite()) {
            return Err(InputError::flag("--speed", &self.speed, "must be a number above 0"));
        }
        if self.trace.is_none() {
            self.workload().validate()?;
        }
        Ok(())
    }

    /// Reads the trace, if there is one, and names on standard error what could not be read of it.
    pub(crate) fn read_trace(&self) -> Result<Option<Trace>, InputError> {
        let Some(file) = &self.trace else { return Ok(None) };
        let trace = Trace::load(file)?;
        for (line, reason) in &trace.rejections {
            eprintln!("{}:{line}: {reason}", file.display());
        }
        Ok(Some(trace))
    }

    /// The trace's requests as these flags have it replayed, and how many seconds that takes.
    pub(crate) fn replay(&self, trace: &Trace, seed: u64) -> (Vec<Arrival>, f64) {
        let arrivals = trace.arrivals(self.speed, self.nodes, seed);
        let seconds = arrivals.last().map_or(0.0, |last| last.at_us as f64 / 1e6);
        (arrivals, seconds)
    }
}
