//! The sweep of docs/ACCURACY.md: every cell, and its figures.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Serialize;

use super::faults::{self, OUTAGE_SECONDS};
use super::figures::{Figures, SLOT_US};
use super::run::Outcome;
use super::setup::{Form, Network, Policy, Setup, by_name};
use super::workload::{Scenario, Workload};
use super::worst::Worst;
use crate::error::ConfigError;
use crate::limit::{DEFAULT_CREDIT, Limit};
use crate::quota::Quota;

mod targets;

pub use targets::{Miss, waited_mean_target};

/// The quotas of the sweep.
pub const QUOTAS: [Quota; 8] = [
    Quota::per_second(10_000),
    Quota::per_second(1000),
    Quota::per_second(1000).burst(100),
    Quota::per_second(100),
    Quota::per_second(20),
    Quota::per_second(1).burst(10),
    Quota::per_hour(100),
    Quota::per_hour(1000).burst(50),
];
/// Its cluster sizes.
pub const NODES: [u16; 3] = [4, 20, 100];
/// Its sync intervals, in milliseconds.
pub const INTERVALS_MS: [u64; 3] = [10, 50, 200];
/// Its scenarios on one key, without faults.
pub const SCENARIOS: [Scenario; 6] = [
    Scenario::OverUniform,
    Scenario::OverSkew,
    Scenario::Under,
    Scenario::UnderSkew,
    Scenario::Herd,
    Scenario::ShiftUnder,
];

/// Quotas of the scenarios on many keys, which would otherwise be far too many requests.
const STICKY_QUOTA: Quota = Quota::per_second(20);
const MANY_SMALL_QUOTA: Quota = Quota::per_second(5);
const HOT_SET_QUOTA: Quota = Quota::per_second(50);
/// The quotas of the long run.
const LONG_RUN_QUOTAS: [Quota; 5] = [
    Quota::per_second(1000),
    Quota::per_second(1000).burst(100),
    Quota::per_second(100),
    Quota::per_second(20),
    Quota::per_second(1).burst(10),
];
/// Nodes and interval of the cells that have but one.
const ONE_NODES: u16 = 20;
const ONE_INTERVAL_MS: u64 = 50;
/// When the outage begins, three times the rate must have spent the burst, or what is admitted
/// during it says nothing.
const OUTAGE_BURST_SECONDS_MAX: f64 = 1.0;

/// Virtual time of a cell whose rate is given by the hour.
const SLOW_SECONDS: f64 = 1200.0;
/// Of the others: until the ideal has admitted the rate of so many seconds, and so many tokens.
const FAST_SECONDS: f64 = 20.0;
const TOKENS_MIN: f64 = 1000.0;
const HOT_SET_SECONDS: f64 = 5.0;
const LONG_RUN_SECONDS: f64 = 600.0;

/// What is offered in a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// A scenario, until the ideal has admitted enough.
    Scenario(Scenario),
    /// Three times the rate, spread evenly, for ten minutes.
    LongRun,
}

impl Load {
    /// All of them, in the order of docs/ACCURACY.md.
    pub fn all() -> Vec<Self> {
        Scenario::ALL.into_iter().map(Self::Scenario).chain([Self::LongRun]).collect()
    }

    /// What it goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scenario(scenario) => scenario.name(),
            Self::LongRun => "long_run",
        }
    }

    /// Who asks for what when.
    pub const fn scenario(self) -> Scenario {
        match self {
            Self::Scenario(scenario) => scenario,
            Self::LongRun => Scenario::OverUniform,
        }
    }

    fn quotas(self) -> Vec<Quota> {
        match self {
            Self::Scenario(Scenario::Sticky) => vec![STICKY_QUOTA],
            Self::Scenario(Scenario::ManySmall) => vec![MANY_SMALL_QUOTA],
            Self::Scenario(Scenario::HotSet) => vec![HOT_SET_QUOTA],
            Self::Scenario(Scenario::Outage) => {
                let fills_s =
                    |quota: &Quota| quota.burst_tokens() as f64 / quota.tokens_per_second();
                QUOTAS.into_iter().filter(|it| fills_s(it) <= OUTAGE_BURST_SECONDS_MAX).collect()
            }
            Self::Scenario(_) => QUOTAS.to_vec(),
            Self::LongRun => LONG_RUN_QUOTAS.to_vec(),
        }
    }

    /// Cluster sizes, and intervals in milliseconds.
    fn clusters(self) -> Vec<(u16, u64)> {
        match self {
            Self::Scenario(Scenario::HotSet) | Self::LongRun => vec![(ONE_NODES, ONE_INTERVAL_MS)],
            Self::Scenario(_) => {
                NODES.iter().flat_map(|&nodes| INTERVALS_MS.map(|ms| (nodes, ms))).collect()
            }
        }
    }

    const fn keys(self) -> u32 {
        match self {
            Self::Scenario(Scenario::Sticky | Scenario::ManySmall) => 1000,
            Self::Scenario(Scenario::HotSet) => 100_000,
            Self::Scenario(_) | Self::LongRun => 1,
        }
    }
}

impl std::str::FromStr for Load {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("scenario", &Self::all(), Self::name, text)
    }
}

/// One cell of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// What is offered.
    pub load: Load,
    /// Rate and burst of each key.
    pub quota: Quota,
    /// Nodes.
    pub nodes: u16,
    /// Sync interval.
    pub interval: Duration,
    /// What nodes spend from.
    pub policy: Policy,
    /// How requests are decided.
    pub form: Form,
}

/// The worst figures of a cell over its seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CellFigures {
    /// Those that every run has.
    #[serde(flatten)]
    pub worst: Worst,
    /// Tokens admitted, at the least and at the most.
    pub admitted_tokens: [u64; 2],
    /// Tokens that the ideal admitted, at the least.
    pub ideal_tokens: u64,
    /// Time that keys had more than half their burst, in %, at the least.
    pub above_half_pct: f64,
    /// The most admitted a second while the store is away; 0 without an outage.
    pub outage_tokens_per_second: f64,
    /// The most admitted when it is back, within burst / rate; 0 without an outage.
    pub after_outage_tokens: f64,
    /// The most that the excess was above that of the same run over a store that is near; 0 where
    /// the store is near.
    pub excess_above_near_tokens: f64,
}

impl Cell {
    fn rate(&self) -> f64 {
        self.quota.tokens_per_second()
    }

    fn burst(&self) -> f64 {
        self.quota.burst_tokens() as f64
    }

    /// The credit of each node: by default none where the burst is less than a token a node. The
    /// usual way is held to what tidegate is.
    fn credit(&self) -> u32 {
        let strict = self.policy == Policy::Strict || self.burst() < f64::from(self.nodes);
        if strict { 0 } else { DEFAULT_CREDIT }
    }

    /// How long the cell runs, in seconds of virtual time.
    pub fn seconds(&self) -> f64 {
        let load = match self.load {
            Load::LongRun => return LONG_RUN_SECONDS,
            Load::Scenario(Scenario::HotSet) => return HOT_SET_SECONDS,
            _ if self.quota.period() >= Duration::from_secs(3600) => return SLOW_SECONDS,
            // Of each four seconds, one.
            Load::Scenario(Scenario::Herd | Scenario::SlowHerd) => {
                (self.burst() + self.rate()) / 4.0 / self.rate()
            }
            Load::Scenario(scenario) => scenario.load(),
        };
        let tokens_min = TOKENS_MIN / f64::from(self.load.keys());
        FAST_SECONDS.max(tokens_min / self.rate() / load.min(1.0)).ceil()
    }

    /// About how many requests a run of the cell has: what it takes of time.
    pub fn requests(&self) -> f64 {
        let offered = self.rate() * self.load.scenario().load() * f64::from(self.load.keys());
        // Idle nodes sync as well.
        offered * self.seconds() * (1.0 + f64::from(self.nodes) / 20.0)
    }

    fn workload(&self, seed: u64) -> Workload {
        Workload {
            scenario: self.load.scenario(),
            nodes: self.nodes,
            keys: self.load.keys(),
            rate_per_second: self.rate(),
            load: None,
            seconds: self.seconds(),
            seed,
        }
    }

    fn setup(&self, seed: u64) -> Setup {
        let limit = Limit::new("sweep", self.quota).sync_interval(self.interval);
        let limit = if self.policy == Policy::Strict { limit.credit(0) } else { limit };
        let setup = Setup::new(limit, self.nodes, seed);
        let network = Network::of_scenario(self.load.scenario()).unwrap_or(setup.network);
        Setup { form: self.form, network, ..setup }
    }

    /// Runs the cell with `seeds`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if its limit cannot be kept.
    pub fn run(&self, seeds: RangeInclusive<u64>) -> Result<CellFigures, ConfigError> {
        let mut worst = CellFigures::NONE;
        for seed in seeds {
            worst = worst.or(&self.run_seed(seed)?);
        }
        Ok(worst)
    }

    fn run_seed(&self, seed: u64) -> Result<CellFigures, ConfigError> {
        let (setup, workload) = (self.setup(seed), self.workload(seed));
        let (arrivals, faults) = (workload.arrivals(), faults::of_scenario(&workload));
        let outcome = self.policy.run(&setup, &arrivals, &faults, workload.seconds)?;
        let excess_above_near_tokens = if Network::of_scenario(workload.scenario).is_some() {
            let near = Setup { network: Network::new(Duration::from_millis(1)), ..setup.clone() };
            let near = self.policy.run(&near, &arrivals, &faults, workload.seconds)?;
            (outcome.figures.excess_tokens - near.figures.excess_tokens).max(0.0)
        } else {
            0.0
        };
        let figures = self.figures(&outcome, setup.tick_s()?);
        Ok(CellFigures { excess_above_near_tokens, ..figures })
    }

    fn figures(&self, outcome: &Outcome, tick_s: f64) -> CellFigures {
        let figures = &outcome.figures;
        let [during, after] = if self.load == Load::Scenario(Scenario::Outage) {
            let (from_s, until_s) = (OUTAGE_SECONDS.0 as f64, OUTAGE_SECONDS.1 as f64);
            let refilled_s = until_s + self.burst() / self.rate();
            let during = admitted(figures, from_s, until_s) / (until_s - from_s);
            [during, admitted(figures, until_s, refilled_s)]
        } else {
            [0.0; 2]
        };
        CellFigures {
            worst: Worst::of(outcome, tick_s, self.seconds()),
            admitted_tokens: [figures.admitted; 2],
            ideal_tokens: figures.ideal,
            above_half_pct: figures.above_half_pct,
            outage_tokens_per_second: during,
            after_outage_tokens: after,
            excess_above_near_tokens: 0.0,
        }
    }
}

/// Tokens admitted between two times, which are those of slots.
fn admitted(figures: &Figures, from_s: f64, until_s: f64) -> f64 {
    let slot = |at_s: f64| (at_s * 1e6 / SLOT_US as f64).round() as usize;
    let slots = figures.timeline.get(slot(from_s)..slot(until_s)).unwrap_or_default();
    slots.iter().map(|slot| slot.admitted).sum::<u64>() as f64
}

impl CellFigures {
    /// What is the worst of no runs.
    const NONE: Self = Self {
        worst: Worst::NONE,
        admitted_tokens: [u64::MAX, 0],
        ideal_tokens: u64::MAX,
        above_half_pct: f64::INFINITY,
        outage_tokens_per_second: 0.0,
        after_outage_tokens: 0.0,
        excess_above_near_tokens: 0.0,
    };

    /// The worse of each.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let [least, most] = self.admitted_tokens;
        let [other_least, other_most] = other.admitted_tokens;
        let most_of = |figure: fn(&Self) -> f64| figure(self).max(figure(other));
        Self {
            worst: self.worst.or(&other.worst),
            admitted_tokens: [least.min(other_least), most.max(other_most)],
            ideal_tokens: self.ideal_tokens.min(other.ideal_tokens),
            above_half_pct: self.above_half_pct.min(other.above_half_pct),
            outage_tokens_per_second: most_of(|figures| figures.outage_tokens_per_second),
            after_outage_tokens: most_of(|figures| figures.after_outage_tokens),
            excess_above_near_tokens: most_of(|figures| figures.excess_above_near_tokens),
        }
    }
}

/// All cells of the sweep, by quota, then by load.
pub fn cells(policy: Policy, form: Form) -> Vec<Cell> {
    let own = [STICKY_QUOTA, MANY_SMALL_QUOTA, HOT_SET_QUOTA];
    let others = own.into_iter().filter(|quota| !QUOTAS.contains(quota));
    let mut cells = Vec::new();
    for quota in QUOTAS.into_iter().chain(others) {
        for load in Load::all().into_iter().filter(|load| load.quotas().contains(&quota)) {
            for (nodes, interval_ms) in load.clusters() {
                let interval = Duration::from_millis(interval_ms);
                cells.push(Cell { load, quota, nodes, interval, policy, form });
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_has_cells_and_each_cell_can_be_run() {
        let cells = cells(Policy::Default, Form::Check);
        for load in Load::all() {
            assert!(cells.iter().any(|cell| cell.load == load), "{}", load.name());
            assert_eq!(load.name().parse(), Ok(load));
        }
        for cell in &cells {
            assert_eq!(cell.workload(1).validate(), Ok(()), "{cell:?}");
            assert!(cell.setup(1).tick_s().is_ok(), "{cell:?}");
        }
        // Ten scenarios of one key, on 9 clusters each.
        let of_one_quota = cells.iter().filter(|cell| cell.quota == QUOTAS[0]);
        assert_eq!(of_one_quota.count(), 10 * 9);
    }

    fn cell(load: Load) -> Cell {
        let (policy, form) = (Policy::Default, Form::Check);
        let interval = Duration::from_millis(50);
        Cell { load, quota: Quota::per_second(20), nodes: 4, interval, policy, form }
    }

    #[test]
    fn the_worst_of_all_seeds_is_reported() {
        let cell = cell(Load::Scenario(Scenario::OverUniform));
        let [first, second] = [1, 2].map(|seed| cell.run(seed..=seed).unwrap());
        assert_ne!(first, second);
        assert_eq!(cell.run(1..=2), Ok(first.or(&second)));
        let (least, most) = (first.admitted_tokens[0], second.admitted_tokens[0]);
        let both = first.or(&second);
        assert_eq!(both.admitted_tokens, [least.min(most), least.max(most)]);
    }

    #[test]
    fn an_outage_has_figures_of_its_own_and_so_has_a_store_that_is_far_away() {
        let run = |scenario| cell(Load::Scenario(scenario)).run(1..=1).unwrap();
        let outage = run(Scenario::Outage);
        assert!(outage.outage_tokens_per_second > 1.0 && outage.after_outage_tokens > 1.0);
        let steady = run(Scenario::OverUniform);
        assert!(steady.outage_tokens_per_second + steady.after_outage_tokens < 1e-9);
        let usual =
            Cell { policy: Policy::WriteBehind, ..cell(Load::Scenario(Scenario::SlowHerd)) };
        let far = usual.run(1..=1).unwrap();
        assert!(far.excess_above_near_tokens > 0.0, "{far:?}");
        assert!(far.excess_above_near_tokens < far.worst.excess_tokens, "{far:?}");
    }
}
