//! What each point costs and does, at its worst over all loads and seeds.

use indicatif::ProgressBar;
use tidegate::ConfigError;
use tidegate::sim::faults::{Fault, Planned, of_scenario};
use tidegate::sim::workload::{Arrival, Scenario, Workload};
use tidegate::sim::{Algorithm, Form, Policy, Worst};

use super::Options;
use crate::threads::on_threads;
use crate::trace::Trace;

/// The sync intervals that are tried, in milliseconds.
pub(crate) const INTERVALS_MS: [u64; 8] = [5, 10, 20, 50, 100, 200, 500, 1000];

/// The loads that are tried, where no trace is given.
pub(crate) const SCENARIOS: [Scenario; 5] = [
    Scenario::OverUniform,
    Scenario::OverSkew,
    Scenario::Under,
    Scenario::Herd,
    Scenario::ShiftUnder,
];

/// How long each scenario is played, in seconds of virtual time.
const SECONDS: f64 = 10.0;

/// The price of a call, in processor time of the store, whatever is in it: the line through the
/// smallest and the largest batch that `cargo bench --bench sync` measured (docs/OPERATIONS.md,
/// "What the store can do").
pub(crate) const STORE_CALL_US: f64 = 46.0;

/// What each key in a call adds, by the same line.
pub(crate) const STORE_KEY_US: f64 = 6.0;

/// When half of the nodes die, with their leases.
const DEATHS_AT_US: u64 = 3_000_000;

/// How a node decides what it is asked: a policy and a form, by one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) policy: Policy,
    pub(crate) form: Form,
}

impl Way {
    /// At once, quiet keys on the default credit.
    pub(crate) const DEFAULT: Self =
        Self { name: Policy::Default.name(), policy: Policy::Default, form: Form::Check };
    /// At once, nothing that the store has not granted.
    pub(crate) const STRICT: Self =
        Self { name: Policy::Strict.name(), policy: Policy::Strict, form: Form::Check };
    /// After a round trip where the node is unsure.
    pub(crate) const ASYNC: Self =
        Self { name: Form::Async.name(), policy: Policy::Default, form: Form::Async };
    /// The usual way, to compare with.
    pub(crate) const WRITE_BEHIND: Self =
        Self { name: Policy::WriteBehind.name(), policy: Policy::WriteBehind, form: Form::Check };

    pub(crate) const ALL: [Self; 4] =
        [Self::DEFAULT, Self::STRICT, Self::ASYNC, Self::WRITE_BEHIND];

    /// Whether a request may have to wait for the store.
    pub(crate) fn waits(self) -> bool {
        self.form == Form::Async
    }

    /// Whether a limiter can be told to decide so.
    pub(crate) fn is_on_offer(self) -> bool {
        self.policy != Policy::WriteBehind
    }
}

/// What is asked of the nodes in one run, and what goes wrong meanwhile.
struct Load {
    seed: u64,
    arrivals: Vec<Arrival>,
    planned: Vec<Planned>,
    seconds: f64,
}

/// Where a load comes from.
#[derive(Clone, Copy)]
enum Source<'a> {
    Scenario(Scenario),
    Trace(&'a Trace),
    /// Three times the rate while the store is gone for three seconds.
    Outage,
    /// Three times the rate while half of the nodes die; what comes to them is lost.
    Deaths,
}

impl Source<'_> {
    fn all(trace: Option<&Trace>) -> Vec<Source<'_>> {
        trace.map_or_else(
            || {
                let faulty = [Source::Outage, Source::Deaths];
                SCENARIOS.map(Source::Scenario).into_iter().chain(faulty).collect()
            },
            |trace| vec![Source::Trace(trace)],
        )
    }

    /// Judged apart: nothing that a user can choose keeps all promises while something is broken.
    const fn is_faulty(self) -> bool {
        matches!(self, Self::Outage | Self::Deaths)
    }

    fn load(self, options: &Options, seed: u64) -> Load {
        let scenario = match self {
            Self::Trace(trace) => {
                let nodes = options.cluster.nodes;
                let (arrivals, seconds) = options.replay.arrivals(trace, nodes, seed);
                return Load { seed, arrivals, planned: Vec::new(), seconds };
            }
            Self::Scenario(scenario) => scenario,
            Self::Outage => Scenario::Outage,
            Self::Deaths => Scenario::OverUniform,
        };
        let workload = workload(options, scenario, seed);
        let mut planned = of_scenario(&workload);
        if matches!(self, Self::Deaths) {
            let die = |place| Planned { at_us: DEATHS_AT_US, fault: Fault::NodeDies { place } };
            planned.extend((0..options.cluster.nodes / 2).map(die));
        }
        Load { seed, arrivals: workload.arrivals(), planned, seconds: SECONDS }
    }
}

/// The load of a scenario.
pub(crate) fn workload(options: &Options, scenario: Scenario, seed: u64) -> Workload {
    Workload {
        scenario,
        nodes: options.cluster.nodes,
        keys: 1,
        rate_per_second: options.cluster.rate.per_second(),
        load: None,
        seconds: SECONDS,
        seed,
    }
}

/// A way at an interval, and the worst of what came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) way: Way,
    pub(crate) interval_ms: u64,
    pub(crate) worst: Worst,
    /// The worst of an outage and of deaths; none if a trace is played.
    pub(crate) faulty: Option<Worst>,
}

impl Point {
    /// What the store needs of one core, in %, estimated.
    pub(crate) fn store_cpu_pct(&self) -> f64 {
        let Worst { store_calls_per_second: calls, keys_synced_per_second: keys, .. } = self.worst;
        100.0 * (calls * STORE_CALL_US + keys * STORE_KEY_US) / 1e6
    }
}

/// One run: a point by its index, and a load.
struct Run<'a> {
    point: usize,
    source: Source<'a>,
    seed: u64,
}

/// Simulates every way at every interval.
pub(crate) fn points(
    options: &Options,
    trace: Option<&Trace>,
    bar: &ProgressBar,
) -> Result<Vec<Point>, ConfigError> {
    let worst = Worst::NONE;
    let at_intervals =
        |way| INTERVALS_MS.map(|interval_ms| Point { way, interval_ms, worst, faulty: None });
    // Write-behind is played with token buckets only.
    let is_bucket = options.algorithm == Algorithm::TokenBucket;
    let ways = Way::ALL.into_iter().filter(|way| is_bucket || way.is_on_offer());
    let mut points: Vec<Point> = ways.flat_map(at_intervals).collect();
    let seeds = options.seed..=options.seed.saturating_add(options.seeds - 1);
    let mut runs = Vec::new();
    for (point, Point { way, .. }) in points.iter().enumerate() {
        // The usual way is not played with deaths: nobody can choose it.
        let is_on_offer = way.is_on_offer();
        let plays = |source: &Source<'_>| is_on_offer || !matches!(source, Source::Deaths);
        for source in Source::all(trace).into_iter().filter(plays) {
            runs.extend(seeds.clone().map(|seed| Run { point, source, seed }));
        }
    }
    bar.set_length(runs.len() as u64);
    let play = |run: &Run<'_>| -> Result<Worst, ConfigError> {
        let Point { way, interval_ms, .. } = points[run.point];
        let load = run.source.load(options, run.seed);
        let setup = options.cluster(way, interval_ms).setup(load.seed);
        let outcome = way.policy.run(&setup, &load.arrivals, &load.planned, load.seconds)?;
        bar.inc(1);
        Ok(Worst::of(&outcome, setup.tick_s()?, load.seconds))
    };
    let results = on_threads(&runs, options.threads.into(), play);
    for (run, worst) in runs.iter().zip(results) {
        let point = &mut points[run.point];
        if run.source.is_faulty() {
            point.faulty = Some(point.faulty.unwrap_or(Worst::NONE).or(&worst?));
        } else {
            point.worst = point.worst.or(&worst?);
        }
    }
    Ok(points)
}
