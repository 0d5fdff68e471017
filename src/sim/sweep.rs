//! The sweep of docs/ACCURACY.md: every cell, its figures, and whether they meet their targets.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::run::play;
use super::setup::{Form, Setup};
use super::workload::{Scenario, Workload};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::quota::Quota;

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

/// Virtual time of a cell whose rate is given by the hour.
const SLOW_SECONDS: f64 = 1200.0;
/// Of the others: until the ideal has admitted the rate of so many seconds, and so many tokens.
const FAST_SECONDS: f64 = 20.0;
const TOKENS_MIN: f64 = 1000.0;

/// One cell of the sweep.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Who asks for what when.
    pub scenario: Scenario,
    /// Rate and burst of each key.
    pub quota: Quota,
    /// Nodes.
    pub nodes: u16,
    /// Sync interval.
    pub interval: Duration,
    /// Credit, in tokens.
    pub credit: u32,
    /// How requests are decided.
    pub form: Form,
}

/// The worst figures of a cell over its seeds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CellFigures {
    /// Tokens above what there was.
    pub excess_tokens: f64,
    /// Admitted in % of the ideal: the lowest and the highest of all seeds.
    pub vs_ideal_least_pct: f64,
    /// The highest of all seeds.
    pub vs_ideal_most_pct: f64,
    /// Requests denied while tokens were there, in %.
    pub wrong_denials_pct: f64,
    /// Decisions not backed by a lease, in %.
    pub unsure_pct: f64,
    /// Requests that waited, in %.
    pub waited_pct: f64,
    /// Keys synced a node and tick.
    pub synced_per_tick: f64,
    /// The least that a node got of its fair share, in %.
    pub least_fair_share_pct: f64,
}

impl Cell {
    fn rate(&self) -> f64 {
        self.quota.tokens_per_second()
    }

    fn burst(&self) -> f64 {
        self.quota.burst_tokens() as f64
    }

    /// A key's own tick, in seconds.
    fn tick_s(&self) -> f64 {
        self.interval.as_secs_f64().min(self.burst() / self.rate() / 4.0)
    }

    /// How long the cell runs, in seconds of virtual time.
    pub fn seconds(&self) -> f64 {
        if self.quota.period() >= Duration::from_secs(3600) {
            return SLOW_SECONDS;
        }
        let load = match self.scenario {
            // A second of each four.
            Scenario::Herd => (self.burst() + self.rate()) / 4.0 / self.rate(),
            Scenario::Under | Scenario::UnderSkew | Scenario::ShiftUnder => 0.9,
            _ => 1.0,
        };
        FAST_SECONDS.max(TOKENS_MIN / self.rate() / load.min(1.0)).ceil()
    }

    /// Runs the cell with `seeds`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if its limit cannot be kept.
    pub fn run(&self, seeds: std::ops::RangeInclusive<u64>) -> Result<CellFigures, ConfigError> {
        let mut worst: Option<CellFigures> = None;
        for seed in seeds {
            let figures = self.run_seed(seed)?;
            worst = Some(worst.map_or(figures, |worst| worst.or(&figures)));
        }
        Ok(worst.unwrap_or(CellFigures::PERFECT))
    }

    fn run_seed(&self, seed: u64) -> Result<CellFigures, ConfigError> {
        let limit =
            Limit::new("sweep", self.quota).sync_interval(self.interval).credit(self.credit);
        let setup = Setup { form: self.form, ..Setup::new(limit, self.nodes, seed) };
        let workload = Workload {
            scenario: self.scenario,
            nodes: self.nodes,
            keys: 1,
            rate_per_second: self.rate(),
            load: None,
            seconds: self.seconds(),
            seed,
        };
        let outcome = play(&setup, &workload)?;
        let figures = outcome.figures;
        let ticks = outcome.traffic.node_seconds / self.tick_s();
        Ok(CellFigures {
            excess_tokens: figures.excess_tokens,
            vs_ideal_least_pct: figures.admitted_vs_ideal_pct,
            vs_ideal_most_pct: figures.admitted_vs_ideal_pct,
            wrong_denials_pct: figures.wrong_denials_pct,
            unsure_pct: figures.unsure_pct,
            waited_pct: figures.waited_pct,
            synced_per_tick: outcome.traffic.keys_synced as f64 / ticks,
            least_fair_share_pct: figures.least_fair_share_pct,
        })
    }

    /// The targets that `figures` miss, with what was aimed at.
    pub fn misses(&self, figures: &CellFigures) -> Vec<String> {
        let (burst, nodes) = (self.burst(), f64::from(self.nodes));
        let credit = f64::from(self.credit);
        let sure = self.form == Form::Async || self.credit == 0;
        let ample = burst >= 20.0 * nodes;
        let most_excess = if sure {
            0.0
        } else if burst >= 100.0 * nodes * credit {
            burst / 100.0
        } else {
            (burst / 100.0).max(nodes * credit / 2.0)
        };
        let least = match (self.form, self.credit, ample) {
            (Form::Async, ..) => 99.5,
            (Form::Check, 0, true) => 97.0,
            (Form::Check, 0, false) => 0.0,
            (Form::Check, _, true) => 99.0,
            (Form::Check, _, false) => 97.0,
        };
        let admitted = (self.seconds() * self.rate()).max(1.0);
        let slack = if ample { 0.0 } else { 100.0 * nodes * credit / admitted };
        let aims = [
            ("excess", figures.excess_tokens, 0.0, most_excess + 1e-6),
            ("vs ideal", figures.vs_ideal_least_pct, least, f64::MAX),
            ("vs ideal", figures.vs_ideal_most_pct, 0.0, 100.5 + slack),
            ("wrong denials %", figures.wrong_denials_pct, 0.0, self.wrong_denials_max(ample)),
            ("fair share %", figures.least_fair_share_pct, 50.0, f64::MAX),
            ("synced a tick", figures.synced_per_tick, 0.0, self.synced_max()),
        ];
        let missed = |&(name, seen, least, most): &(&str, f64, f64, f64)| {
            let aim = if seen < least { least } else { most };
            (seen < least || seen > most).then(|| format!("{name} {seen:.2} (aim {aim:.2})"))
        };
        aims.iter().filter_map(missed).collect()
    }

    fn wrong_denials_max(&self, ample: bool) -> f64 {
        match (self.form, self.credit, ample) {
            (Form::Check, 1.., true) => 1.0,
            (Form::Check, 1.., false) => 3.0,
            _ => f64::MAX,
        }
    }

    fn synced_max(&self) -> f64 {
        let steady = !matches!(self.scenario, Scenario::Herd | Scenario::ShiftUnder);
        if steady && self.form == Form::Check { 1.3 } else { f64::MAX }
    }
}

impl CellFigures {
    const PERFECT: Self = Self {
        excess_tokens: 0.0,
        vs_ideal_least_pct: 100.0,
        vs_ideal_most_pct: 100.0,
        wrong_denials_pct: 0.0,
        unsure_pct: 0.0,
        waited_pct: 0.0,
        synced_per_tick: 0.0,
        least_fair_share_pct: 100.0,
    };

    fn or(&self, other: &Self) -> Self {
        Self {
            excess_tokens: self.excess_tokens.max(other.excess_tokens),
            vs_ideal_least_pct: self.vs_ideal_least_pct.min(other.vs_ideal_least_pct),
            vs_ideal_most_pct: self.vs_ideal_most_pct.max(other.vs_ideal_most_pct),
            wrong_denials_pct: self.wrong_denials_pct.max(other.wrong_denials_pct),
            unsure_pct: self.unsure_pct.max(other.unsure_pct),
            waited_pct: self.waited_pct.max(other.waited_pct),
            synced_per_tick: self.synced_per_tick.max(other.synced_per_tick),
            least_fair_share_pct: self.least_fair_share_pct.min(other.least_fair_share_pct),
        }
    }
}

/// All cells of the sweep on one key.
pub fn cells(credit: u32, form: Form) -> Vec<Cell> {
    let mut cells = Vec::new();
    for quota in QUOTAS {
        for nodes in NODES {
            for interval_ms in INTERVALS_MS {
                for scenario in SCENARIOS {
                    let interval = Duration::from_millis(interval_ms);
                    cells.push(Cell { scenario, quota, nodes, interval, credit, form });
                }
            }
        }
    }
    cells
}

/// A cell's place in the sweep, and what came of it.
pub type CellResult = (usize, Result<CellFigures, ConfigError>);

/// Runs `cells` on `threads` threads; `done` hears of each as it ends.
///
/// # Errors
///
/// [`ConfigError`] if the limit of a cell cannot be kept.
#[allow(clippy::disallowed_methods, reason = "cells are independent of each other: a thread pool")]
pub fn run_all(
    cells: &[Cell],
    seeds: std::ops::RangeInclusive<u64>,
    threads: usize,
    done: impl Fn(&Cell, &CellFigures) + Sync,
) -> Result<Vec<CellFigures>, ConfigError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut results: Vec<CellResult> = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(cell) = cells.get(index) else { return results };
            let result = cell.run(seeds.clone());
            if let Ok(figures) = &result {
                done(cell, figures);
            }
            results.push((index, result));
        }
    };
    let mut results: Vec<CellResult> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}
