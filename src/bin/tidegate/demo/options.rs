//! The demo's flags, checked once.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use tidegate::Limit;
use tidegate::sim::figures::SLOT_US;
use tidegate::sim::workload::Scenario;

use crate::flags::{InputError, LoadFlags, one_of, scenario_help};
use crate::store::Store;
use crate::values::{Address, ValueError, duration};

const EXAMPLES: &str = "\
Examples:
  tidegate demo --seconds 3
  tidegate demo --scenario herd --rate 100/s --burst 100 --nodes 8 --seconds 5
  tidegate demo --outage 1s..2s --seconds 4
  tidegate demo --trace examples/traces/small.log --speed 2000 --rate 5/s --burst 10

--config has a run for each limit of the file. Its store is left alone: see --store. Mistakes of the file
are named as by check-config; limits that a demo cannot show are named too.";

/// The scenarios that need no faults: those are for `simulate`.
fn scenarios() -> Vec<Scenario> {
    Scenario::ALL.into_iter().filter(|scenario| !scenario.has_faults()).collect()
}

/// Runs several nodes under load and compares what they admitted with one ideal bucket.
#[derive(Args, Clone)]
#[command(after_help = EXAMPLES, mut_arg("scenario", |flag| {
    flag.value_parser(one_of::<Scenario>(scenarios().into_iter().map(Scenario::name)))
        .long_help(scenario_help(&scenarios()))
}))]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) load: LoadFlags,
    /// Where the nodes meet: memory, or a server such as redis://HOST:PORT or HOST:PORT
    #[arg(long, default_value = "memory")]
    pub(crate) store: Store,
    /// Run each node as an operating-system process of its own
    #[arg(long)]
    pub(crate) processes: bool,
    /// Run each limit of a configuration file, in place of one made of flags
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "rate", "burst", "algorithm", "interval", "accuracy", "credit", "processes",
    ])]
    pub(crate) config: Option<PathBuf>,
    /// The limit of this run, where it is one of a file.
    #[arg(skip)]
    pub(crate) limit: Option<Limit>,
    /// Start a redis-server for this run and stop it between two times, such as 3s..6s
    #[arg(long)]
    pub(crate) outage: Option<Outage>,
    /// Serve Prometheus metrics on this address while it runs, such as 127.0.0.1:9000
    #[arg(long, conflicts_with = "processes")]
    pub(crate) metrics: Option<Address>,
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
        let (from, until) = text.split_once("..").ok_or("expected two times such as 3s..6s")?;
        let time = |text| duration(text).map_err(|error: ValueError| error.to_string());
        let outage = Self { from: time(from)?, until: time(until)? };
        if outage.until <= outage.from {
            return Err("an outage must end after it begins".to_owned());
        }
        if [outage.from, outage.until].iter().any(|time| time.as_micros() % u128::from(SLOT_US) > 0)
        {
            return Err(
                "its times are whole tenths of a second: admissions are counted so".to_owned()
            );
        }
        Ok(outage)
    }
}

impl Outage {
    /// Refuses an outage that a load of `seconds` does not see to its end.
    pub(crate) fn validate(self, seconds: f64) -> Result<(), InputError> {
        if self.until.as_secs_f64() <= seconds {
            return Ok(());
        }
        let value = format!("{:?}..{:?}", self.from, self.until);
        Err(InputError::flag("--outage", &value, "ends after the load does: see --seconds"))
    }
}

impl Options {
    /// The limit that all nodes keep.
    pub(crate) fn limit(&self) -> Limit {
        self.limit.clone().unwrap_or_else(|| self.load.limit().limit())
    }

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
        self.load.validate()
    }
}
