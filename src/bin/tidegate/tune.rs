//! `tidegate tune`: which sync interval and policy to use, by simulation of what is asked for.
//! The same flags print the same bytes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tidegate::ConfigError;
use tidegate::sim::{Algorithm, Form, Network, Policy, Worst};

use self::choice::Bounds;
use self::measure::{INTERVALS_MS, Point, SCENARIOS, STORE_CALL_US, STORE_KEY_US, Way};
use crate::flags::{
    ClusterFlags, ClusterSpec, InputError, LimitSpec, SEEDS_MAX, THREADS_DEFAULT, THREADS_MAX,
    TraceFlags, algorithm_parser, seed_range,
};
use crate::output::{self, OutputError};
use crate::progress;
use crate::values::{MaxExcess, Part, duration};

mod chart;
mod choice;
mod measure;

/// What can stop the tuning.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TuneError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the chart cannot be drawn: {0}")]
    Draw(Box<dyn std::error::Error>),
    #[error("--svg: {}: cannot be written: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("nothing to recommend: no choice keeps to what is tolerated")]
    NoneRecommended,
}

/// The version of the JSON's fields: it rises when one goes or changes its meaning.
const SCHEMA_VERSION: u32 = 2;

const EXAMPLES: &str = "\
Examples:
  tidegate tune --nodes 4 --rate 50/s --burst 50 --seeds 1
  tidegate tune --nodes 4 --rate 20/s --burst 20 --seeds 1 --max-excess 5% --min-ideal 90%
  tidegate tune --algorithm fixed-window --nodes 4 --rate 50/s --burst 100 --seeds 1
  tidegate tune --trace examples/traces/small.log --speed 2000 --rate 5/s --burst 10 --seeds 1

The exit status is 1 if no choice keeps to what is tolerated.";

/// Simulates intervals and policies, and recommends one of them.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    cluster: ClusterFlags,
    /// The algorithm. A window has the burst's tokens, and lasts as long as the rate takes for them; a leaky bucket has a
    /// queue of so many, and requests wait in it
    #[arg(long, default_value = Algorithm::TokenBucket.name(),
          value_parser = algorithm_parser(Algorithm::ALL))]
    algorithm: Algorithm,
    /// Round trip between node and store
    #[arg(long, default_value = "1ms", value_parser = duration, allow_hyphen_values = true)]
    rtt: Duration,
    /// The most to admit beyond the limit: a part of the burst such as 1% or 0.01, or whole tokens
    /// such as 5
    #[arg(long, default_value = "1%", allow_hyphen_values = true)]
    max_excess: MaxExcess,
    /// The least to admit, as a part of what an ideal bucket does, such as 97% or 0.97
    #[arg(long, allow_hyphen_values = true)]
    min_ideal: Option<Part>,
    #[command(flatten)]
    replay: TraceFlags,
    /// Seeds the arrivals, and whatever else is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run so many seeds, from --seed on; the worst of them counts
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SEEDS_MAX))]
    seeds: u64,
    /// Simulations that run at the same time
    #[arg(long, default_value_t = THREADS_DEFAULT,
          value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX))]
    threads: u16,
    /// Where to draw excess and shortfall against the interval
    #[arg(long, default_value = "tidegate-tune.svg")]
    svg: PathBuf,
    /// Print JSON on standard output, one object, and nothing else
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Refuses what cannot be simulated, and a chart that has no place, before the long wait.
    fn validate(&self) -> Result<(), InputError> {
        self.cluster(Way::DEFAULT, INTERVALS_MS[0]).validate()?;
        self.replay.validate()?;
        seed_range(self.seed, self.seeds)?;
        if self.replay.trace.is_none() {
            for scenario in SCENARIOS {
                // The seconds of a run are not the user's choice: the rate is.
                let workload = measure::workload(self, scenario, self.seed).validate();
                workload.map_err(|error| {
                    InputError::flag("--rate", &self.cluster.rate, error.reason)
                })?;
            }
        }
        let folder = self.svg.parent().filter(|folder| *folder != Path::new(""));
        if self.svg.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
            let reason = "must be a file in a folder that is there";
            return Err(InputError::flag("--svg", &self.svg.display(), reason));
        }
        Ok(())
    }

    /// The cluster that decides in this way at this interval.
    fn cluster(&self, way: Way, interval_ms: u64) -> ClusterSpec {
        let ClusterFlags { nodes, rate, burst } = self.cluster;
        let interval_us = interval_ms * 1000;
        ClusterSpec {
            limit: LimitSpec {
                algorithm: self.algorithm,
                rate,
                burst,
                interval_us,
                accuracy: None,
                credit: None,
            },
            nodes,
            network: Network::new(self.rtt),
            policy: way.policy,
            form: way.form,
        }
    }

    /// How often a busy key is synced, in seconds, however long the interval.
    fn longest_tick_s(&self) -> Result<f64, ConfigError> {
        let longest_ms = INTERVALS_MS[INTERVALS_MS.len() - 1];
        self.cluster(Way::DEFAULT, longest_ms).setup(self.seed).tick_s()
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            excess_tokens_max: self.max_excess.tokens(self.cluster.burst),
            shortfall_pct_max: self.min_ideal.map(|least| 100.0 - least.percent()),
        }
    }

    fn title(&self) -> String {
        let ClusterFlags { nodes, rate, burst } = self.cluster;
        let rtt = self.rtt;
        let load = self.replay.trace.as_ref().map_or_else(
            || SCENARIOS.map(tidegate::sim::workload::Scenario::name).join(", "),
            |file| format!("trace {}", file.display()),
        );
        let algorithm = match self.algorithm {
            Algorithm::TokenBucket => String::new(),
            other => other.title() + ", ",
        };
        format!(
            "{algorithm}{nodes} nodes, {rate}, burst {burst}, round trip {rtt:?}: worst of {load}"
        )
    }
}

/// A point, and whether no other is better.
#[derive(Clone, Copy, Debug, Serialize)]
struct Row {
    policy: Policy,
    form: Form,
    interval_ms: f64,
    #[serde(flatten)]
    worst: Worst,
    shortfall_pct: f64,
    store_cpu_pct: f64,
    /// While the store is away or half of the nodes die; none if a trace is played.
    faulty_shortfall_pct: Option<f64>,
    faulty_excess_tokens: Option<f64>,
    frontier: bool,
    #[serde(skip)]
    name: &'static str,
}

impl Row {
    fn new((point, frontier): (&Point, bool)) -> Self {
        let Point { way, interval_ms, worst, faulty } = *point;
        Self {
            policy: way.policy,
            form: way.form,
            interval_ms: interval_ms as f64,
            worst,
            shortfall_pct: worst.shortfall_pct(),
            store_cpu_pct: point.store_cpu_pct(),
            faulty_shortfall_pct: faulty.map(|worst| worst.shortfall_pct()),
            faulty_excess_tokens: faulty.map(|worst| worst.excess_tokens),
            frontier,
            name: way.name,
        }
    }
}

/// All that is told.
#[derive(Debug, Serialize)]
struct Report<'a> {
    schema_version: u32,
    algorithm: Algorithm,
    nodes: u16,
    /// Tokens in a period.
    rate: u64,
    period_s: u64,
    burst: u64,
    rtt_ms: f64,
    excess_tokens_max: f64,
    shortfall_pct_max: Option<f64>,
    seed: u64,
    seeds: u64,
    points: Vec<Row>,
    recommended: Option<Row>,
    reason: String,
    svg: &'a Path,
}

const HEADER: &str = "   policy       interval    excess  % of burst  shortfall %  store calls/s    \
                      keys/s  store CPU %  waited %  broken: shortfall %    excess";

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, interval_ms, worst, shortfall_pct, store_cpu_pct, .. } = self;
        let faulty = |figure: Option<f64>| figure.map_or("-".to_owned(), |it| format!("{it:.2}"));
        write!(
            f,
            "{:<2} {name:<12} {interval_ms:>5} ms {:>9.2} {:>11.2} {shortfall_pct:>12.2} \
             {:>14.1} {:>9.1} {store_cpu_pct:>12.2} {:>9.2} {:>20} {:>9}",
            if self.frontier { "*" } else { "" },
            worst.excess_tokens,
            worst.excess_pct_of_burst,
            worst.store_calls_per_second,
            worst.keys_synced_per_second,
            worst.waited_pct,
            faulty(self.faulty_shortfall_pct),
            faulty(self.faulty_excess_tokens),
        )
    }
}

pub(crate) fn run(options: &Options) -> Result<(), TuneError> {
    options.validate()?;
    let trace = options.replay.read()?;
    let bar = progress::bar(0, "runs");
    let points = measure::points(options, trace.as_ref(), &bar);
    bar.finish_and_clear();
    let (points, repeats) = choice::without_repeats(points?, &options.bounds());
    let recommended = choice::recommended(&points, &options.bounds());
    draw(options, &points, recommended)?;
    let report = report(options, &points, recommended)?;
    if options.json {
        output::json(&report)?;
    } else {
        output::write(&told(options, &report, &repeats))?;
    }
    recommended.map(|_| ()).ok_or(TuneError::NoneRecommended)
}

/// All points in a table, and which of them to take.
fn told(options: &Options, report: &Report<'_>, repeats: &[Point]) -> String {
    let rows: Vec<String> = report.points.iter().map(ToString::to_string).collect();
    format!(
        "{}\n{HEADER}\n{}\n* no other point has less excess, shortfall and store calls\n\
         store CPU: {STORE_CALL_US} us a call and {STORE_KEY_US} us a key, of one core\n\
         broken: the store is away for 3 s, or half of the nodes die\n\
         {}recommended: {}\nchart: {}\n",
        options.title(),
        rows.join("\n"),
        left_out(repeats),
        report.reason,
        report.svg.display()
    )
}

/// Names the points that cost as many store calls as one at a shorter interval.
fn left_out(repeats: &[Point]) -> String {
    if repeats.is_empty() {
        return String::new();
    }
    let name = |point: &Point| format!("{} {} ms", point.way.name, point.interval_ms);
    let names: Vec<String> = repeats.iter().map(name).collect();
    format!("left out, as many store calls as at a shorter interval: {}\n", names.join(", "))
}

fn report<'a>(
    options: &'a Options,
    points: &[Point],
    recommended: Option<usize>,
) -> Result<Report<'a>, ConfigError> {
    let bounds = options.bounds();
    let rows: Vec<Row> = points.iter().zip(choice::frontier(points)).map(Row::new).collect();
    let reason = choice::reason(points, &bounds, options.longest_tick_s()?);
    Ok(Report {
        schema_version: SCHEMA_VERSION,
        algorithm: options.algorithm,
        nodes: options.cluster.nodes,
        rate: options.cluster.rate.tokens,
        period_s: options.cluster.rate.period_s,
        burst: options.cluster.burst,
        rtt_ms: options.rtt.as_secs_f64() * 1e3,
        excess_tokens_max: bounds.excess_tokens_max,
        shortfall_pct_max: bounds.shortfall_pct_max,
        seed: options.seed,
        seeds: options.seeds,
        recommended: recommended.map(|index| rows[index]),
        points: rows,
        reason,
        svg: &options.svg,
    })
}

fn draw(options: &Options, points: &[Point], recommended: Option<usize>) -> Result<(), TuneError> {
    let bounds = options.bounds();
    let burst = options.cluster.burst.max(1) as f64;
    let allowed = chart::Allowed {
        excess_pct_of_burst: 100.0 * bounds.excess_tokens_max / burst,
        shortfall_pct: bounds.shortfall_pct_max,
    };
    let svg =
        chart::svg(&options.title(), points, recommended, &allowed).map_err(TuneError::Draw)?;
    std::fs::write(&options.svg, svg)
        .map_err(|source| TuneError::Write { path: options.svg.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parsed;

    fn options(flags: &str) -> Result<Options, clap::Error> {
        parsed(flags)
    }

    #[test]
    fn what_cannot_be_tuned_for_is_refused_by_flag_and_value() {
        let cases = [
            ("--rtt 61s", "'61s' for '--rtt'"),
            ("--svg /no/such/folder/a.svg", "'/no/such/folder/a.svg' for '--svg'"),
            ("--seed 18446744073709551615", "'18446744073709551615' for '--seed'"),
            ("--trace a.log --speed 0", "'0' for '--speed'"),
            ("--rate 100000000", "'100000000/s' for '--rate'"),
            ("--rate 0", "'0' for '--rate'"),
            ("--burst 0", "'0' for '--burst'"),
        ];
        for (flags, expected) in cases {
            let refused = options(flags).unwrap().validate().unwrap_err().to_string();
            assert!(refused.contains(expected), "{flags}: {refused}");
        }
        for (flag, value) in [
            ("--max-excess", "much"),
            ("--max-excess", "200%"),
            ("--min-ideal", "1.5"),
            ("--min-ideal", "-1%"),
            ("--rtt", "-1"),
            ("--nodes", "0"),
            ("--seeds", "0"),
        ] {
            let refused = options(&format!("{flag} {value}")).err().unwrap().to_string();
            assert!(refused.contains(flag) && refused.contains(value), "{refused}");
        }
    }

    #[test]
    fn the_same_flags_give_the_same_points_on_any_number_of_threads() {
        let points = |threads| {
            let options = options(&format!("--rate 50 --burst 20 --threads {threads}")).unwrap();
            measure::points(&options, None, &indicatif::ProgressBar::hidden()).unwrap()
        };
        assert_eq!(points(1), points(3));
    }
}
