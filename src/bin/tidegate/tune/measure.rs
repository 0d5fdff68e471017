//! What each point costs and does, at its worst over all loads and seeds.

use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::ProgressBar;
use serde::Serialize;
use tidegate::sim::workload::{Arrival, Scenario, Workload};
use tidegate::sim::{self, Form, Network, Outcome, Setup};
use tidegate::{ConfigError, DEFAULT_CREDIT};

use super::Options;
use crate::flags::LimitSpec;
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

/// What a call keeps the store busy for, whatever is in it: the line through the smallest and the
/// largest batch in docs/REDIS.md, "Cost".
const STORE_CALL_US: f64 = 39.0;

/// What each key in a call adds, by the same line.
const STORE_KEY_US: f64 = 20.0;

/// How a node decides what it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Policy {
    /// At once, quiet keys on the default credit.
    Default,
    /// At once, nothing that the store has not granted.
    Strict,
    /// After a round trip where the node is unsure.
    Async,
}

impl Policy {
    pub(crate) const ALL: [Self; 3] = [Self::Default, Self::Strict, Self::Async];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Strict => "strict",
            Self::Async => "async",
        }
    }

    /// Whether a request may have to wait for the store.
    pub(crate) const fn waits(self) -> bool {
        matches!(self, Self::Async)
    }

    /// Plays `load` on nodes of this policy.
    fn play(
        self,
        options: &Options,
        interval_ms: u64,
        load: &Load,
    ) -> Result<Outcome, ConfigError> {
        let (credit, form) = match self {
            Self::Default => (DEFAULT_CREDIT, Form::Check),
            Self::Strict => (0, Form::Check),
            Self::Async => (DEFAULT_CREDIT, Form::Async),
        };
        let interval_us = interval_ms * 1000;
        let (rate, burst) = (options.cluster.rate, options.cluster.burst);
        let limit = LimitSpec { rate, burst, interval_us, credit }.limit();
        let network = Network::new(options.rtt);
        let setup = Setup { network, form, ..Setup::new(limit, options.cluster.nodes, load.seed) };
        sim::run(&setup, &load.arrivals, &[], load.seconds)
    }
}

/// What is asked of the nodes in one run.
struct Load {
    seed: u64,
    arrivals: Vec<Arrival>,
    seconds: f64,
}

/// Where a load comes from.
#[derive(Clone, Copy)]
enum Source<'a> {
    Scenario(Scenario),
    Trace(&'a Trace),
}

impl Source<'_> {
    fn all(trace: Option<&Trace>) -> Vec<Source<'_>> {
        trace.map_or_else(
            || SCENARIOS.map(Source::Scenario).to_vec(),
            |trace| vec![Source::Trace(trace)],
        )
    }

    fn load(self, options: &Options, seed: u64) -> Load {
        let (arrivals, seconds) = match self {
            Self::Scenario(scenario) => (workload(options, scenario, seed).arrivals(), SECONDS),
            Self::Trace(trace) => options.replay.arrivals(trace, options.cluster.nodes, seed),
        };
        Load { seed, arrivals, seconds }
    }
}

/// The load of a scenario.
pub(crate) fn workload(options: &Options, scenario: Scenario, seed: u64) -> Workload {
    Workload {
        scenario,
        nodes: options.cluster.nodes,
        keys: 1,
        rate_per_second: options.cluster.rate as f64,
        load: None,
        seconds: SECONDS,
        seed,
    }
}

/// A policy at an interval, and the worst of what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Point {
    pub(crate) policy: Policy,
    pub(crate) interval_ms: u64,
    #[serde(flatten)]
    pub(crate) figures: PointFigures,
}

/// Each figure at its worst: one may come of another load than the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct PointFigures {
    /// Tokens above what there was.
    pub(crate) excess_tokens: f64,
    pub(crate) excess_pct_of_burst: f64,
    /// What the ideal admitted and the nodes did not, in %.
    pub(crate) shortfall_pct: f64,
    /// Of the whole cluster.
    pub(crate) store_calls_per_second: f64,
    /// Of the whole cluster.
    pub(crate) keys_synced_per_second: f64,
    /// Of one core, estimated.
    pub(crate) store_cpu_pct: f64,
    /// Requests that waited, in %.
    pub(crate) waited_pct: f64,
}

impl PointFigures {
    fn of(outcome: &Outcome, seconds: f64) -> Self {
        let (figures, traffic) = (&outcome.figures, &outcome.traffic);
        // A second at least: a trace of one instant is no infinite rate.
        let seconds = seconds.max(1.0);
        let (calls, keys) = (traffic.store_calls as f64, traffic.keys_synced as f64);
        let busy_us = calls * STORE_CALL_US + keys * STORE_KEY_US;
        Self {
            excess_tokens: figures.excess_tokens,
            excess_pct_of_burst: figures.excess_pct_of_burst,
            shortfall_pct: (100.0 - figures.admitted_vs_ideal_pct).max(0.0),
            store_calls_per_second: calls / seconds,
            keys_synced_per_second: keys / seconds,
            store_cpu_pct: 100.0 * busy_us / (seconds * 1e6),
            waited_pct: figures.waited_pct,
        }
    }

    /// The worse of each.
    fn or(&self, other: &Self) -> Self {
        Self {
            excess_tokens: self.excess_tokens.max(other.excess_tokens),
            excess_pct_of_burst: self.excess_pct_of_burst.max(other.excess_pct_of_burst),
            shortfall_pct: self.shortfall_pct.max(other.shortfall_pct),
            store_calls_per_second: self.store_calls_per_second.max(other.store_calls_per_second),
            keys_synced_per_second: self.keys_synced_per_second.max(other.keys_synced_per_second),
            store_cpu_pct: self.store_cpu_pct.max(other.store_cpu_pct),
            waited_pct: self.waited_pct.max(other.waited_pct),
        }
    }
}

/// One run: a point by its index, and a load.
struct Run<'a> {
    point: usize,
    source: Source<'a>,
    seed: u64,
}

/// Simulates every policy at every interval.
pub(crate) fn points(
    options: &Options,
    trace: Option<&Trace>,
    bar: &ProgressBar,
) -> Result<Vec<Point>, ConfigError> {
    let figures = PointFigures::default();
    let at_intervals =
        |policy| INTERVALS_MS.map(|interval_ms| Point { policy, interval_ms, figures });
    let mut points: Vec<Point> = Policy::ALL.into_iter().flat_map(at_intervals).collect();
    let seeds = options.seed..=options.seed.saturating_add(options.seeds - 1);
    let mut runs = Vec::new();
    for point in 0..points.len() {
        for source in Source::all(trace) {
            runs.extend(seeds.clone().map(|seed| Run { point, source, seed }));
        }
    }
    bar.set_length(runs.len() as u64);
    let play = |run: &Run<'_>| -> Result<(usize, PointFigures), ConfigError> {
        let Point { policy, interval_ms, .. } = points[run.point];
        let load = run.source.load(options, run.seed);
        let outcome = policy.play(options, interval_ms, &load)?;
        bar.inc(1);
        Ok((run.point, PointFigures::of(&outcome, load.seconds)))
    };
    let results = on_threads(&runs, options.threads.into(), play);
    for played in results {
        let (index, figures) = played?;
        points[index].figures = points[index].figures.or(&figures);
    }
    Ok(points)
}

/// Does all of `work` on `threads` threads, each of which takes the next piece when it has ended
/// one. The results come in no order.
fn on_threads<W: Sync, R: Send>(
    work: &[W],
    threads: usize,
    one: impl Fn(&W) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let take = || work.get(next.fetch_add(1, Ordering::Relaxed));
        std::iter::from_fn(take).map(&one).collect::<Vec<R>>()
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<R>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().flat_map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_done_once_on_any_number_of_threads() {
        let work: Vec<u32> = (0..100).collect();
        for threads in [0, 1, 3] {
            let mut done = on_threads(&work, threads, |&piece| piece);
            done.sort_unstable();
            assert_eq!(done, work, "{threads} threads");
        }
    }
}
