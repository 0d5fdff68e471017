//! The demo's flags, checked once.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate::{Limit, Quota};

use super::DemoError;
use crate::workload::{Scenario, Workload};

/// Runs several nodes under load and compares what they admitted with one ideal bucket.
#[derive(Args)]
pub(crate) struct Options {
    /// Nodes, each with a limiter and a connection of its own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) nodes: u16,
    /// Where the nodes meet: memory, or redis://HOST:PORT
    #[arg(long, default_value = "memory")]
    pub(crate) store: Store,
    /// Tokens a second for each key; with --trace, in replay time
    #[arg(long, default_value_t = 1000)]
    pub(crate) rate: u64,
    /// Tokens that a key can have at once
    #[arg(long, default_value_t = 1000)]
    pub(crate) burst: u64,
    /// Offered load as a multiple of the rate, instead of the scenario's own
    #[arg(long)]
    pub(crate) load: Option<f64>,
    /// Keys, chosen uniformly
    #[arg(long, default_value_t = 1)]
    pub(crate) keys: u32,
    /// Who asks for what when
    #[arg(long, value_enum, default_value = "over_uniform")]
    pub(crate) scenario: Scenario,
    /// Sync interval, such as 50ms
    #[arg(long, default_value = "50ms", value_parser = duration)]
    pub(crate) interval: Duration,
    /// Tokens that a node may spend on a key before it hears from the store
    #[arg(long, default_value_t = 1)]
    pub(crate) credit: u32,
    /// How long the load lasts, in seconds
    #[arg(long, default_value_t = 10.0)]
    pub(crate) seconds: f64,
    /// Run each node as an operating-system process of its own
    #[arg(long)]
    pub(crate) processes: bool,
    /// Start a redis-server for this run and stop it between two times, such as 3s..6s
    #[arg(long)]
    pub(crate) outage: Option<Outage>,
    /// Replay an access log (Common or Combined Log Format) or a CSV of `unix_ms,key[,cost]`
    #[arg(long, conflicts_with_all = ["scenario", "load", "keys", "seconds"])]
    pub(crate) trace: Option<PathBuf>,
    /// Replay the trace so many times faster than it was recorded
    #[arg(long, default_value_t = 1.0, requires = "trace")]
    pub(crate) speed: f64,
    /// Serve Prometheus metrics on this address while it runs, such as 127.0.0.1:9000
    #[arg(long, conflicts_with = "processes")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Seeds the arrivals
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object on standard output, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the nodes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Memory,
    Redis(String),
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "memory" => Ok(Self::Memory),
            address if address.contains("://") => Ok(Self::Redis(address.to_owned())),
            other => Err(format!(
                "{other:?} is neither memory nor an address such as redis://127.0.0.1:6379"
            )),
        }
    }
}

/// When the store is away, from the start of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outage {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
}

impl FromStr for Outage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (from, until) =
            text.split_once("..").ok_or_else(|| format!("{text:?} is not of the form 3s..6s"))?;
        let outage = Self { from: duration(from)?, until: duration(until)? };
        if outage.until <= outage.from {
            return Err(format!("{text:?} ends before it begins"));
        }
        Ok(outage)
    }
}

/// A duration such as `50ms` or `1.5s`.
fn duration(text: &str) -> Result<Duration, String> {
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

impl Options {
    pub(crate) fn limit(&self) -> LimitSpec {
        LimitSpec {
            rate: self.rate,
            burst: self.burst,
            interval_us: self.interval.as_micros() as u64,
            credit: self.credit,
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

    /// Refuses flags that do not go together.
    pub(crate) fn validate(&self) -> Result<(), DemoError> {
        let refuse = |flag, value: String, reason| Err(DemoError::Flag { flag, value, reason });
        if self.processes && self.store == Store::Memory && self.outage.is_none() {
            let reason = "processes share no memory: give --store redis://HOST:PORT";
            return refuse("--processes", "--store memory".to_owned(), reason);
        }
        if let (Some(_), Store::Redis(_)) = (self.outage, &self.store) {
            let reason = "--outage starts a redis-server of its own: leave --store out";
            return refuse("--store", "redis".to_owned(), reason);
        }
        if !(self.speed > 0.0 && self.speed.is_finite()) {
            return refuse("--speed", self.speed.to_string(), "must be a number above 0");
        }
        if self.trace.is_none() {
            self.workload().validate()?;
        }
        Ok(())
    }
}
