//! The demo's flags, checked once.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use crate::flags::{InputError, LoadFlags, duration};

/// Runs several nodes under load and compares what they admitted with one ideal bucket.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) load: LoadFlags,
    /// Where the nodes meet: memory, or redis://HOST:PORT
    #[arg(long, default_value = "memory")]
    pub(crate) store: Store,
    /// Run each node as an operating-system process of its own
    #[arg(long)]
    pub(crate) processes: bool,
    /// Start a redis-server for this run and stop it between two times, such as 3s..6s
    #[arg(long)]
    pub(crate) outage: Option<Outage>,
    /// Serve Prometheus metrics on this address while it runs, such as 127.0.0.1:9000
    #[arg(long, conflicts_with = "processes")]
    pub(crate) metrics: Option<SocketAddr>,
}

/// Where the nodes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Memory,
    Redis(String),
}

impl Store {
    /// What it goes by in the report.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis(_) => "redis",
        }
    }
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

impl Options {
    /// Refuses flags that do not go together.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        if self.processes && self.store == Store::Memory && self.outage.is_none() {
            let reason = "processes share no memory: give --store redis://HOST:PORT";
            return Err(InputError::flag("--processes", &"--store memory", reason));
        }
        if let (Some(_), Store::Redis(_)) = (self.outage, &self.store) {
            let reason = "--outage starts a redis-server of its own: leave --store out";
            return Err(InputError::flag("--store", &"redis", reason));
        }
        if self.load.scenario.has_faults() {
            let reason = "its nodes or its store fail: tidegate simulate plays it";
            return Err(InputError::flag("--scenario", &self.load.scenario.name(), reason));
        }
        self.load.validate()
    }
}
