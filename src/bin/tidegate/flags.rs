//! What several commands are told alike: the limit, the load on it, how it is decided and how often.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use tidegate::sim::faults::last_fault_seconds;
use tidegate::sim::workload::{Arrival, RUN_SECONDS_MAX, Scenario, Workload, WorkloadError};
use tidegate::sim::{Algorithm, Form, Network, Policy, Setup};
use tidegate::{ConfigError, Limit};

use crate::output;
use crate::trace::{Trace, TraceError};
use crate::values::{Part, Rate, duration, seconds};

/// The most seeds of one call.
pub(crate) const SEEDS_MAX: u64 = 100_000;

/// Simulations that run at the same time, unless told otherwise.
pub(crate) const THREADS_DEFAULT: u16 = 2;

/// The most of them.
pub(crate) const THREADS_MAX: i64 = 256;

/// The longest round trip.
pub(crate) const RTT_MAX: Duration = Duration::from_secs(60);
/// How long a load lasts at least, unless a flag says otherwise.
const SECONDS_DEFAULT: f64 = 10.0;

/// What is asked for cannot be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error("invalid value '{value}' for '{flag}': {reason}")]
    Flag { flag: &'static str, value: String, reason: &'static str },
    #[error("invalid value '{value}' for '{flag}': {reason}")]
    Value { flag: &'static str, value: String, reason: String },
    #[error(transparent)]
    Config(ConfigError),
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl InputError {
    /// A flag whose value is at fault, and what would be right.
    pub(crate) fn flag(flag: &'static str, value: &dyn ToString, reason: &'static str) -> Self {
        Self::Flag { flag, value: value.to_string(), reason }
    }

    /// What cannot be kept or played, by the flag that asked for it.
    pub(crate) fn of_config(error: ConfigError) -> Self {
        let (ConfigError::Limit { field, value, reason, .. }
        | ConfigError::Limiter { field, value, reason }) = error
        else {
            return Self::Config(error);
        };
        let flag = match field {
            "quota.tokens" => "--rate",
            "quota.burst" | "window.period" => "--burst",
            "sync.interval" => "--interval",
            "sync.excess" => "--accuracy",
            "credit" => "--credit",
            "faults" => "--faults",
            "algorithm" => "--algorithm",
            "mode" => "--mode",
            "queue" => "--queue",
            "window.zone" => "--zone",
            other => other,
        };
        Self::Flag { flag, value, reason }
    }
}

impl From<WorkloadError> for InputError {
    fn from(WorkloadError { field, value, reason }: WorkloadError) -> Self {
        let flag = match field {
            "nodes" => "--nodes",
            "keys" => "--keys",
            "rate" => "--rate",
            "load" => "--load",
            "seconds" => "--seconds",
            other => other,
        };
        Self::Flag { flag, value, reason }
    }
}

/// The nodes, and the quota that they keep together.
#[derive(Args, Clone)]
pub(crate) struct ClusterFlags {
    /// Nodes, each with a limiter and a connection of its own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) nodes: u16,
    /// Tokens in a period for each key, such as 100/s or 100, 5/min, 100/h; with --trace, in replay
    /// time
    #[arg(long, default_value = "1000/s", allow_hyphen_values = true)]
    pub(crate) rate: Rate,
    /// Tokens that a key can have at once
    #[arg(long, default_value_t = 1000)]
    pub(crate) burst: u64,
}

/// Real input to replay.
#[derive(Args, Clone)]
pub(crate) struct TraceFlags {
    /// Replay an access log (Common or Combined Log Format) or a CSV of `unix_ms,key[,cost]`
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    /// Replay the trace so many times faster than it was recorded
    #[arg(long, default_value_t = 1.0, requires = "trace")]
    pub(crate) speed: f64,
}

/// The limit, and who asks for what when.
#[derive(Args, Clone)]
pub(crate) struct LoadFlags {
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    /// The algorithm. A window has the burst's tokens, and lasts as long as the rate takes for them; a leaky bucket has a
    /// queue of so many, and requests wait in it
    #[arg(long, default_value = Algorithm::TokenBucket.name(),
          value_parser = algorithm_parser(Algorithm::ALL))]
    pub(crate) algorithm: Algorithm,
    /// Offered load as a multiple of the rate, instead of the scenario's own
    #[arg(long, conflicts_with = "trace")]
    pub(crate) load: Option<f64>,
    /// Keys, chosen uniformly unless the scenario says otherwise
    #[arg(long, default_value_t = 1, conflicts_with = "trace")]
    pub(crate) keys: u32,
    /// Who asks for what when
    #[arg(long, default_value = Scenario::OverUniform.name(), conflicts_with = "trace",
          value_parser = one_of::<Scenario>(Scenario::ALL.map(Scenario::name)),
          hide_possible_values = true, long_help = scenario_help(&Scenario::ALL))]
    pub(crate) scenario: Scenario,
    /// Sync interval, such as 50ms
    #[arg(long, default_value = "50ms", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) interval: Duration,
    /// Sync by accuracy in place of an interval: the most of the burst that may be admitted in
    /// excess, such as 1% or 0.01
    #[arg(long, conflicts_with = "interval", allow_hyphen_values = true)]
    pub(crate) accuracy: Option<Part>,
    /// Tokens that a node may spend on a key before the store answers, the same for every key [default: 1, and
    /// on a new or full key a part of the burst; or what --accuracy allows]
    // No default value here: a strict policy refuses a credit that was given.
    #[arg(long)]
    pub(crate) credit: Option<u32>,
    /// How long the load lasts: a number of seconds, or a duration such as 2m [default: 10, or 5 s after the scenario's
    /// last fault if that is later]
    #[arg(long, value_parser = seconds, conflicts_with = "trace")]
    seconds: Option<f64>,
    #[command(flatten)]
    pub(crate) replay: TraceFlags,
    /// Seeds the arrivals, and whatever else is random
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print JSON on standard output, one object a run, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
    /// Print every figure below the summary
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) verbose: bool,
}

/// The scenarios that a command takes, for its long help.
pub(crate) fn scenario_help(taken: &[Scenario]) -> String {
    let names: Vec<&str> = taken.iter().copied().map(Scenario::name).collect();
    format!("Who asks for what when: {}", names.join(", "))
}

/// Reads a value by its name, and offers the nearest name for one that is not known.
pub(crate) fn one_of<T>(
    names: impl IntoIterator<Item = &'static str>,
) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

/// Reads a policy by its name.
pub(crate) fn policy_parser() -> impl TypedValueParser<Value = Policy> {
    one_of(Policy::ALL.map(Policy::name))
}

/// Reads one of these algorithms by its name.
pub(crate) fn algorithm_parser<const N: usize>(
    algorithms: [Algorithm; N],
) -> impl TypedValueParser<Value = Algorithm> {
    one_of(algorithms.map(Algorithm::name))
}

/// Reads a form by its name.
pub(crate) fn form_parser() -> impl TypedValueParser<Value = Form> {
    one_of(Form::ALL.map(Form::name))
}

/// What policies there are, for the help of a flag.
pub(crate) fn policy_help() -> String {
    format!(
        "What nodes spend from: leases and a credit (default), leases alone (strict), or, to \
         compare with, the total last heard of (write-behind). There are {}",
        Policy::ALL.map(Policy::name).join(", ")
    )
}

/// So many seeds, from `first` on.
pub(crate) fn seed_range(first: u64, count: u64) -> Result<RangeInclusive<u64>, InputError> {
    first
        .checked_add(count.saturating_sub(1))
        .map(|last| first..=last)
        .ok_or_else(|| InputError::flag("--seed", &first, "too high for this number of --seeds"))
}

/// A cluster to be simulated.
pub(crate) struct ClusterSpec {
    pub(crate) limit: LimitSpec,
    pub(crate) nodes: u16,
    pub(crate) network: Network,
    pub(crate) policy: Policy,
    pub(crate) form: Form,
}

impl ClusterSpec {
    /// Refuses what cannot be simulated, by flag and value.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        let rtt = self.network.rtt;
        if rtt > RTT_MAX {
            return Err(InputError::flag("--rtt", &format!("{rtt:?}"), "must be 60s at most"));
        }
        validate_form(self.policy, self.form)?;
        self.limit.validate()
    }

    pub(crate) fn setup(&self, seed: u64) -> Setup {
        let setup = Setup::new(self.limit.limit(), self.nodes, seed);
        Setup { network: self.network, form: self.form, ..setup }
    }
}

/// Refuses a form that a policy does not have.
pub(crate) fn validate_form(policy: Policy, form: Form) -> Result<(), InputError> {
    if (policy, form) == (Policy::WriteBehind, Form::Async) {
        let reason = "--policy write-behind never waits: choose check";
        return Err(InputError::flag("--form", &form.name(), reason));
    }
    Ok(())
}

/// The limit that all nodes keep, as the nodes' processes are told of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LimitSpec {
    pub(crate) algorithm: Algorithm,
    pub(crate) rate: Rate,
    pub(crate) burst: u64,
    pub(crate) interval_us: u64,
    /// The part of the burst that may be admitted in excess, which then says when to sync.
    pub(crate) accuracy: Option<f64>,
    pub(crate) credit: Option<u32>,
}

impl LimitSpec {
    pub(crate) fn limit(&self) -> Limit {
        let limit = Limit::new("demo", self.algorithm.rule(&self.rate.quota().burst(self.burst)));
        let synced = match self.accuracy {
            Some(excess) => limit.accuracy(excess),
            None => limit.sync_interval(Duration::from_micros(self.interval_us)),
        };
        self.credit.into_iter().fold(synced, Limit::credit)
    }

    /// Refuses a limit that cannot be kept, by flag and value.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        // At a rate of 0 a window or a queue would never end.
        if self.rate.tokens == 0 {
            return Err(InputError::flag("--rate", &self.rate.tokens, "must be 1 at least"));
        }
        if self.algorithm == Algorithm::LeakyBucket {
            self.validate_queue()?;
        }
        Setup::new(self.limit(), 1, 0).tick_s().map_err(|error| self.refused(error))?;
        Ok(())
    }

    /// The error, by its flag. The tokens and the length of a window both come from `--burst`.
    fn refused(&self, error: ConfigError) -> InputError {
        let is_bucket = matches!(self.algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
        match (InputError::of_config(error), is_bucket) {
            (InputError::Flag { flag: "--rate" | "quota.period", value, reason }, false) => {
                InputError::Flag { flag: "--burst", value, reason }
            }
            (refused, _) => refused,
        }
    }
}

impl LimitSpec {
    /// A leaky bucket's queue is what its burst has room for.
    fn validate_queue(&self) -> Result<(), InputError> {
        if self.burst == 0 {
            return Err(InputError::flag("--burst", &self.burst, "must be 1 at least"));
        }
        if let Some(part) = self.accuracy {
            let reason =
                "a leaky bucket's nodes take slots, which no accuracy says when to ask for";
            return Err(InputError::flag("--accuracy", &Part(part), reason));
        }
        let tick = Setup::new(self.limit(), 1, 0).tick_s();
        let is_queue = |error: &ConfigError| matches!(error, ConfigError::Limit { field, .. } if *field == "queue");
        if tick.as_ref().err().is_some_and(is_queue) {
            let reason = "the queue of so many tokens would be longer than 366 days";
            return Err(InputError::flag("--burst", &self.burst, reason));
        }
        Ok(())
    }
}

impl LoadFlags {
    pub(crate) fn limit(&self) -> LimitSpec {
        LimitSpec {
            algorithm: self.algorithm,
            rate: self.cluster.rate,
            burst: self.cluster.burst,
            interval_us: self.interval.as_micros() as u64,
            accuracy: self.accuracy.map(|Part(part)| part),
            credit: self.credit,
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or_else(|| SECONDS_DEFAULT.max(last_fault_seconds(self.scenario) + 5.0))
    }

    pub(crate) fn workload(&self) -> Workload {
        Workload {
            scenario: self.scenario,
            nodes: self.cluster.nodes,
            keys: self.keys,
            rate_per_second: self.cluster.rate.per_second(),
            load: self.load,
            seconds: self.seconds(),
            seed: self.seed,
        }
    }

    /// Refuses a load that cannot be offered.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        self.replay.validate()?;
        if self.replay.trace.is_none() {
            self.workload().validate()?;
        }
        self.limit().validate()
    }
}

impl TraceFlags {
    /// Refuses a speed that nothing can be replayed at.
    pub(crate) fn validate(&self) -> Result<(), InputError> {
        if !(self.speed > 0.0 && self.speed.is_finite()) {
            return Err(InputError::flag("--speed", &self.speed, "must be a number above 0"));
        }
        Ok(())
    }

    /// Reads the trace, if there is one, and names on standard error what could not be read of it.
    pub(crate) fn read(&self) -> Result<Option<Trace>, InputError> {
        let Some(file) = &self.trace else { return Ok(None) };
        let trace = Trace::load(file)?;
        for (line, reason) in &trace.rejections {
            output::note(&format!("warning: {}:{line}: {reason}", file.display()));
        }
        self.validate_span(&trace)?;
        Ok(Some(trace))
    }

    /// Refuses a trace whose replay would last longer than a run may. One line of 1970 is enough. Times within that cannot overflow.
    fn validate_span(&self, trace: &Trace) -> Result<(), InputError> {
        let span_s = trace.requests.last().map_or(0.0, |last| last.at_us as f64 / 1e6);
        if span_s / self.speed <= RUN_SECONDS_MAX {
            return Ok(());
        }
        let least = (span_s / RUN_SECONDS_MAX).ceil();
        let reason = format!(
            "the trace spans {span_s:.0} s, and is replayed within {RUN_SECONDS_MAX} s: set {least} or more, or leave \
             out the lines whose times are far from the others"
        );
        Err(InputError::Value { flag: "--speed", value: self.speed.to_string(), reason })
    }

    /// The trace's requests as these flags have it replayed on `nodes` nodes, and how many seconds
    /// that takes.
    pub(crate) fn arrivals(&self, trace: &Trace, nodes: u16, seed: u64) -> (Vec<Arrival>, f64) {
        let arrivals = trace.arrivals(self.speed, nodes, seed);
        let seconds = arrivals.last().map_or(0.0, |last| last.at_us as f64 / 1e6);
        (arrivals, seconds)
    }
}

/// The options of a subcommand as its flags make them.
#[cfg(test)]
pub(crate) fn parsed<A: clap::Args>(flags: &str) -> Result<A, clap::Error> {
    #[derive(clap::Parser)]
    struct Command<A: clap::Args> {
        #[command(flatten)]
        options: A,
    }
    let words = std::iter::once("tidegate").chain(flags.split_whitespace());
    <Command<A> as clap::Parser>::try_parse_from(words).map(|command| command.options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ClusterSpec {
        ClusterSpec {
            limit: LimitSpec {
                algorithm: Algorithm::TokenBucket,
                rate: Rate { tokens: 10, period_s: 1 },
                burst: 10,
                interval_us: 50_000,
                accuracy: None,
                credit: None,
            },
            nodes: 2,
            network: Network::new(Duration::from_millis(1)),
            policy: Policy::Default,
            form: Form::Check,
        }
    }

    #[test]
    fn a_cluster_that_cannot_be_simulated_is_refused_by_flag_and_value() {
        assert!(spec().validate().is_ok());
        let limit = spec().limit;
        let cases = [
            (
                "invalid value '0' for '--rate': ",
                ClusterSpec {
                    limit: LimitSpec { rate: Rate { tokens: 0, period_s: 1 }, ..limit },
                    ..spec()
                },
            ),
            (
                "invalid value '0' for '--burst': ",
                ClusterSpec { limit: LimitSpec { burst: 0, ..limit }, ..spec() },
            ),
            (
                "invalid value '0ns' for '--interval': ",
                ClusterSpec { limit: LimitSpec { interval_us: 0, ..limit }, ..spec() },
            ),
            (
                "invalid value '0' for '--accuracy': ",
                ClusterSpec { limit: LimitSpec { accuracy: Some(0.0), ..limit }, ..spec() },
            ),
            (
                "invalid value '16' for '--credit': ",
                ClusterSpec { limit: LimitSpec { credit: Some(16), ..limit }, ..spec() },
            ),
            (
                "invalid value '61s' for '--rtt': ",
                ClusterSpec { network: Network::new(Duration::from_secs(61)), ..spec() },
            ),
            (
                "invalid value 'async' for '--form': ",
                ClusterSpec { policy: Policy::WriteBehind, form: Form::Async, ..spec() },
            ),
        ];
        for (expected, spec) in cases {
            let refused = spec.validate().unwrap_err().to_string();
            assert!(refused.starts_with(expected), "{refused} where {expected} was expected");
        }
    }

    #[test]
    fn tokens_of_a_window_are_refused_as_the_burst_and_a_rate_of_0_is_before_them() {
        let rate = |tokens, period_s| Rate { tokens, period_s };
        for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
            let limit = LimitSpec { algorithm, ..spec().limit };
            for (limit, expected) in [
                (LimitSpec { burst: 0, ..limit }, "'0' for '--burst'"),
                (LimitSpec { burst: 0, rate: rate(0, 1), ..limit }, "'0' for '--rate'"),
                (
                    LimitSpec { burst: 2_000_000_000, rate: rate(1_000_000_000, 1), ..limit },
                    "'2000000000' for '--burst'",
                ),
                // The window would last for years.
                (
                    LimitSpec { burst: 100_000, rate: rate(1, 3600), ..limit },
                    "'360000000s' for '--burst'",
                ),
            ] {
                let refused = limit.validate().unwrap_err().to_string();
                assert!(refused.contains(expected), "{limit:?}: {refused}");
            }
        }
        for algorithm in Algorithm::ALL {
            let flags = format!("--trace a.csv --rate 0 --algorithm {}", algorithm.name());
            let flags = parsed::<LoadFlags>(&flags).unwrap_or_else(|error| panic!("{error}"));
            let refused = flags.validate().unwrap_err().to_string();
            assert!(refused.contains("'0' for '--rate'"), "{}: {refused}", algorithm.name());
        }
    }
}
