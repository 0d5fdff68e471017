//! The sweep of docs/ACCURACY.md: every cell, and its figures.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Serialize;

use super::algorithm::Algorithm;
use super::cold;
use super::faults::OUTAGE_SECONDS;
use super::figures::{Figures, SLOT_US};
use super::outcome::Outcome;
use super::setup::{Form, Network, Policy, Setup};
use super::workload::{Scenario, Workload};
use super::worst_case::Worst;
use crate::error::ConfigError;
use crate::limit::{DEFAULT_CREDIT, Limit};
use crate::quota::Quota;

mod load;
mod targets;

pub use load::Load;
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

/// Windows are judged by the targets where they last this many ticks, and logs this many.
const WINDOW_TICKS_MIN: u32 = 20;
const LOG_TICKS_MIN: u32 = 100;
/// Virtual time of a cell whose rate is given by the hour.
const SLOW_SECONDS: f64 = 1200.0;
/// Of the others: until the ideal has admitted the rate of this many seconds, and this many tokens.
const FAST_SECONDS: f64 = 20.0;
const TOKENS_MIN: f64 = 1000.0;

/// One cell of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// What is offered.
    pub load: Load,
    /// The limit's algorithm.
    pub algorithm: Algorithm,
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
    /// The most that the product says it may admit in excess.
    pub excess_bound_tokens: f64,
    /// Admitted in % of the ideal while the store could be reached, at the least.
    pub reachable_vs_ideal_pct: f64,
    /// Keys synced for each that was invented, at the most; 0 where none was.
    pub synced_per_invented_key: f64,
    /// Time in which the store served requests that it applied for the first time, in %.
    pub store_useful_pct: f64,
    /// Leases that had not ended when they reached their node, in %, at the least.
    pub leases_alive_pct: f64,
}

impl Cell {
    fn rate(&self) -> f64 {
        self.quota.tokens_per_second()
    }

    fn burst(&self) -> f64 {
        self.quota.burst_tokens() as f64
    }

    /// The credit of each node on a key of which it has a view. Write-behind is judged by the same.
    fn credit(&self) -> u32 {
        if self.policy == Policy::Strict { 0 } else { DEFAULT_CREDIT }
    }

    /// The credit of each node on a key that is new to it.
    fn first_credit(&self) -> f64 {
        let nodes = f64::from(self.nodes);
        let part =
            if nodes > 1.0 { (self.burst() / 4.0 / nodes).ceil() } else { self.burst() / 2.0 };
        if self.policy == Policy::Strict { 0.0 } else { part.clamp(1.0, 15.0) }
    }

    /// How long the cell runs, in seconds of virtual time.
    pub fn seconds(&self) -> f64 {
        if let Some(seconds) = load::own_seconds(self.load) {
            return seconds;
        }
        let load = match self.load.scenario() {
            _ if self.quota.period() >= Duration::from_secs(3600) => return SLOW_SECONDS,
            // Of each four seconds, one.
            Scenario::Herd | Scenario::SlowHerd | Scenario::FarHerd => {
                (self.burst() + self.rate()) / 4.0 / self.rate()
            }
            scenario => scenario.load(),
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

    /// The cell with another algorithm; `None` where it is not judged: with windows shorter than 20 ticks, or 100 of a log,
    /// where the store's clock steps, by which windows begin, and of a leaky bucket, of which nothing is leased.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Option<Self> {
        let ticks = match algorithm {
            Algorithm::TokenBucket => return Some(Self { algorithm, ..self }),
            Algorithm::LeakyBucket => return None,
            Algorithm::FixedWindow | Algorithm::SlidingWindow => WINDOW_TICKS_MIN,
            Algorithm::SlidingLog => LOG_TICKS_MIN,
        };
        let fits = Algorithm::window(&self.quota) >= self.interval * ticks
            && self.load.scenario() != Scenario::StoreBack;
        fits.then_some(Self { algorithm, ..self })
    }

    fn workload(&self, seed: u64) -> Workload {
        Workload {
            scenario: self.load.scenario(),
            nodes: self.nodes,
            keys: self.load.keys(),
            rate_per_second: self.rate(),
            load: self.load.multiple(),
            seconds: self.seconds(),
            seed,
        }
    }

    fn setup(&self, seed: u64) -> Setup {
        let rule = self.algorithm.rule(&self.quota);
        let limit = Limit::new("sweep", rule).sync_interval(self.interval);
        let limit = if self.policy == Policy::Strict { limit.credit(0) } else { limit };
        let setup = Setup::new(limit, self.nodes, seed).of_scenario(self.load.scenario());
        Setup { form: self.form, ..setup }
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
        let (mut arrivals, faults) = (workload.arrivals(), self.load.faults(&workload));
        if self.load == (Load::ColdClients { costly: true }) {
            cold::raise_first_costs(&mut arrivals, self.burst() as u32 / 2);
        }
        let outcome = self.policy.run(&setup, &arrivals, &faults, workload.seconds)?;
        let slow = matches!(workload.scenario, Scenario::SlowStore | Scenario::SlowHerd);
        let excess_above_near_tokens = if slow {
            let near = Setup { network: Network::new(Duration::from_millis(1)), ..setup.clone() };
            let near = self.policy.run(&near, &arrivals, &faults, workload.seconds)?;
            (outcome.figures.excess_tokens - near.figures.excess_tokens).max(0.0)
        } else {
            0.0
        };
        let figures = self.figures(&outcome, setup.tick_s()?);
        let excess_bound_tokens = self.policy.excess_bound(&setup, &faults);
        Ok(CellFigures { excess_above_near_tokens, excess_bound_tokens, ..figures })
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
            excess_bound_tokens: 0.0,
            reachable_vs_ideal_pct: figures.admitted_vs_ideal_reachable_pct,
            synced_per_invented_key: outcome.traffic.invented_synced as f64
                / figures.invented_keys.max(1) as f64,
            store_useful_pct: outcome.traffic.store_busy_pct(self.seconds())[1],
            leases_alive_pct: outcome.traffic.leases_alive_pct(),
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
        excess_bound_tokens: 0.0,
        reachable_vs_ideal_pct: f64::INFINITY,
        synced_per_invented_key: 0.0,
        store_useful_pct: f64::INFINITY,
        leases_alive_pct: f64::INFINITY,
    };

    /// The worse of each.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let [least, most] = self.admitted_tokens;
        let [other_least, other_most] = other.admitted_tokens;
        let most_of = |figure: fn(&Self) -> f64| figure(self).max(figure(other));
        let least_of = |figure: fn(&Self) -> f64| figure(self).min(figure(other));
        Self {
            worst: self.worst.or(&other.worst),
            admitted_tokens: [least.min(other_least), most.max(other_most)],
            ideal_tokens: self.ideal_tokens.min(other.ideal_tokens),
            above_half_pct: self.above_half_pct.min(other.above_half_pct),
            outage_tokens_per_second: most_of(|figures| figures.outage_tokens_per_second),
            after_outage_tokens: most_of(|figures| figures.after_outage_tokens),
            excess_above_near_tokens: most_of(|figures| figures.excess_above_near_tokens),
            excess_bound_tokens: most_of(|figures| figures.excess_bound_tokens),
            reachable_vs_ideal_pct: least_of(|figures| figures.reachable_vs_ideal_pct),
            synced_per_invented_key: most_of(|figures| figures.synced_per_invented_key),
            store_useful_pct: least_of(|figures| figures.store_useful_pct),
            leases_alive_pct: least_of(|figures| figures.leases_alive_pct),
        }
    }
}

/// All cells of the sweep, by quota, then by load.
pub fn cells(policy: Policy, form: Form) -> Vec<Cell> {
    let mut cells = Vec::new();
    for quota in load::all_quotas() {
        for load in Load::all().into_iter().filter(|load| load.quotas().contains(&quota)) {
            for (nodes, interval_ms) in load.clusters() {
                let (interval, form) = (Duration::from_millis(interval_ms), load.form(form));
                let algorithm = Algorithm::TokenBucket;
                let of_policy =
                    |policy| Cell { load, algorithm, quota, nodes, interval, policy, form };
                cells.extend(load.policies(policy).into_iter().map(of_policy));
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
        }
        for cell in &cells {
            assert_eq!(cell.workload(1).validate(), Ok(()), "{cell:?}");
            assert!(cell.setup(1).tick_s().is_ok(), "{cell:?}");
        }
        // Ten scenarios of one key, on 9 clusters each, three of nodes that are far, on 3 each, and bursts.
        let of_one_quota = cells.iter().filter(|cell| cell.quota == QUOTAS[0]);
        assert_eq!(of_one_quota.count(), 10 * 9 + 3 * 3 + 3);
        let of_row = |row| cells.iter().filter(|cell| cell.load.row() == row).count();
        // Nineteen ways to come and go, four quotas, two cluster sizes, two policies.
        assert_eq!(of_row("flap"), 19 * 4 * 2 * 2);
        assert_eq!(of_row("store_back"), 3 * 4 * 2 * 2);
    }

    fn cell(load: Load) -> Cell {
        let (policy, form) = (Policy::Default, Form::Check);
        let interval = Duration::from_millis(50);
        let (algorithm, quota) = (Algorithm::TokenBucket, Quota::per_second(20));
        Cell { load, algorithm, quota, nodes: 4, interval, policy, form }
    }

    #[test]
    fn windows_are_judged_where_they_last_twenty_ticks_and_logs_a_hundred() {
        let cell = |burst| {
            let over = cell(Load::Scenario(Scenario::OverUniform));
            Cell { quota: Quota::per_second(20).burst(burst), ..over }
        };
        let fits = |burst, algorithm| cell(burst).with_algorithm(algorithm).is_some();
        // At 50 ms a second is 20 ticks.
        for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow] {
            assert_eq!([19, 20].map(|burst| fits(burst, algorithm)), [false, true]);
        }
        assert_eq!([99, 100].map(|burst| fits(burst, Algorithm::SlidingLog)), [false, true]);
        assert!(fits(1, Algorithm::TokenBucket));
        let stepping = Cell { load: Load::StoreBack { by_s: 1 }, ..cell(100) };
        assert_eq!(stepping.with_algorithm(Algorithm::FixedWindow), None);
    }

    #[test]
    fn worst_of_all_seeds_is_reported() {
        let cell = cell(Load::Scenario(Scenario::OverUniform));
        let [first, second] = [1, 2].map(|seed| cell.run(seed..=seed).unwrap());
        assert_ne!(first, second);
        assert_eq!(cell.run(1..=2), Ok(first.or(&second)));
        let (least, most) = (first.admitted_tokens[0], second.admitted_tokens[0]);
        let both = first.or(&second);
        assert_eq!(both.admitted_tokens, [least.min(most), least.max(most)]);
    }

    #[test]
    fn outage_has_figures_of_its_own_and_so_has_a_store_that_is_far_away() {
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
