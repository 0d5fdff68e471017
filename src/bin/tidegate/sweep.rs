//! `tidegate sweep`: the cells of docs/ACCURACY.md, their figures, and the targets that they miss.
//! The same flags print the same bytes.

use clap::Args;
use serde::Serialize;
use tidegate::sim::sweep::{Cell, CellFigures, QUOTAS, cells, run_all};
use tidegate::{ConfigError, DEFAULT_CREDIT, Quota};

use crate::flags::{Form, Policy, SEEDS_MAX, THREADS_DEFAULT, THREADS_MAX};
use crate::progress;

/// What can stop a sweep.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SweepError {
    #[error("{wanted}: no quota of the sweep: there are {known}")]
    NoQuota { wanted: String, known: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the report cannot be written: {0}")]
    Report(#[from] serde_json::Error),
}

/// Simulates every cell of the sweep and names those that miss a target.
#[derive(Args)]
pub(crate) struct Options {
    /// Run each cell with so many seeds, from 1 on; the worst of them counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=SEEDS_MAX))]
    seeds: u64,
    /// Cells that run at the same time
    #[arg(long, default_value_t = THREADS_DEFAULT,
          value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX))]
    threads: u16,
    /// Whether quiet keys are decided on a credit
    #[arg(long, value_enum, default_value_t)]
    policy: Policy,
    /// How requests are decided
    #[arg(long, value_enum, default_value_t)]
    form: Form,
    /// Only quotas of this rate, such as 1000 (a second) or 100/h
    #[arg(long)]
    rate: Option<String>,
    /// Only quotas of this burst, in tokens
    #[arg(long)]
    burst: Option<u64>,
    /// Print JSON on standard output, one object a cell, and nothing else
    #[arg(long)]
    json: bool,
}

impl Options {
    /// The cells of the quotas that are asked for.
    fn cells(&self) -> Result<Vec<Cell>, SweepError> {
        let mut cells = cells(self.policy.credit(DEFAULT_CREDIT), self.form.into());
        cells.retain(|cell| self.wants(&cell.quota));
        if cells.is_empty() {
            let wanted = self.rate.iter().map(|rate| format!("--rate {rate}"));
            let wanted = wanted.chain(self.burst.iter().map(|burst| format!("--burst {burst}")));
            let known = QUOTAS.map(|quota| quota_name(&quota)).join(", ");
            return Err(SweepError::NoQuota {
                wanted: wanted.collect::<Vec<_>>().join(" "),
                known,
            });
        }
        Ok(cells)
    }

    fn wants(&self, quota: &Quota) -> bool {
        let same_rate = |wanted: &String| {
            let name = rate_name(quota);
            *wanted == name || name.strip_suffix("/s") == Some(wanted)
        };
        self.rate.as_ref().is_none_or(same_rate)
            && self.burst.is_none_or(|burst| burst == quota.burst_tokens())
    }
}

/// Such as `1000/s`.
fn rate_name(quota: &Quota) -> String {
    match quota.period().as_secs() {
        1 => format!("{}/s", quota.tokens()),
        3600 => format!("{}/h", quota.tokens()),
        seconds => format!("{}/{seconds}s", quota.tokens()),
    }
}

/// Such as `1000/s burst 100`.
fn quota_name(quota: &Quota) -> String {
    format!("{} burst {}", rate_name(quota), quota.burst_tokens())
}

/// What is told of a cell.
#[derive(Debug, Serialize)]
struct Report {
    rate: String,
    burst: u64,
    nodes: u16,
    interval_ms: u64,
    scenario: &'static str,
    credit: u32,
    form: Form,
    #[serde(flatten)]
    figures: CellFigures,
    misses: Vec<String>,
}

impl Report {
    fn new(cell: &Cell, form: Form, figures: CellFigures) -> Self {
        Self {
            rate: rate_name(&cell.quota),
            burst: cell.quota.burst_tokens(),
            nodes: cell.nodes,
            interval_ms: cell.interval.as_millis() as u64,
            scenario: cell.scenario.name(),
            credit: cell.credit,
            form,
            misses: cell.misses(&figures),
            figures,
        }
    }

    /// Which cell it is, in the table and below it.
    fn cell_columns(&self) -> String {
        format!(
            "{:>8} {:>6} {:>5} {:>5} ms  {:<12}",
            self.rate, self.burst, self.nodes, self.interval_ms, self.scenario
        )
    }
}

const HEADER: &str = "    rate  burst nodes interval  scenario     excess     vs ideal (%)  \
                      wrong denied %  unsure %  waited %  synced/tick  fair share %";

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let figures = &self.figures;
        write!(
            f,
            "{} {:>7.2} {:>7.2}..{:<7.2} {:>13.2} {:>9.2} {:>9.2} {:>12.3} {:>13.1}",
            self.cell_columns(),
            figures.excess_tokens,
            figures.vs_ideal_least_pct,
            figures.vs_ideal_most_pct,
            figures.wrong_denials_pct,
            figures.unsure_pct,
            figures.waited_pct,
            figures.synced_per_tick,
            figures.least_fair_share_pct,
        )
    }
}

pub(crate) fn run(options: &Options) -> Result<(), SweepError> {
    let reports = reports(options)?;
    if options.json {
        for report in &reports {
            println!("{}", serde_json::to_string(report)?);
        }
        return Ok(());
    }
    println!("{HEADER}");
    for report in &reports {
        println!("{report}");
    }
    let missing = reports.iter().filter(|report| !report.misses.is_empty());
    for report in missing.clone() {
        println!("missed: {}: {}", report.cell_columns().trim(), report.misses.join(", "));
    }
    println!("{} cells, {} miss their target", reports.len(), missing.count());
    Ok(())
}

fn reports(options: &Options) -> Result<Vec<Report>, SweepError> {
    let cells = options.cells()?;
    let bar = progress::bar(cells.len(), "cells");
    let done = |_: &Cell, _: &CellFigures| bar.inc(1);
    let figures = run_all(&cells, 1..=options.seeds, options.threads.into(), done);
    bar.finish_and_clear();
    let report = |(cell, figures)| Report::new(cell, options.form, figures);
    Ok(cells.iter().zip(figures?).map(report).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn options(flags: &str) -> Options {
        let words = std::iter::once("sweep").chain(flags.split_whitespace());
        Command::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).options
    }

    #[test]
    fn a_rate_is_a_second_unless_it_says_otherwise() {
        let quotas = |flags: &str| {
            let cells = options(flags).cells().unwrap();
            let mut names: Vec<String> = cells.iter().map(|cell| quota_name(&cell.quota)).collect();
            names.dedup();
            names
        };
        assert_eq!(quotas("").len(), QUOTAS.len());
        assert_eq!(quotas("--rate 1000"), ["1000/s burst 1000", "1000/s burst 100"]);
        assert_eq!(quotas("--rate 1000/h"), ["1000/h burst 50"]);
        assert_eq!(quotas("--rate 100/s --burst 100"), ["100/s burst 100"]);
        assert_eq!(quotas("--burst 100").len(), 3);
    }

    #[test]
    fn a_quota_that_the_sweep_does_not_have_is_refused_by_flag_and_value() {
        let refused = options("--rate 7 --burst 9").cells().unwrap_err().to_string();
        assert!(refused.starts_with("--rate 7 --burst 9: "), "{refused}");
        assert!(refused.contains("20/s burst 20"), "{refused}");
    }

    #[test]
    fn a_strict_sweep_has_no_credit() {
        let cells = options("--policy strict --form async").cells().unwrap();
        assert!(cells.iter().all(|cell| cell.credit == 0));
        assert!(cells.iter().all(|cell| cell.form == tidegate::sim::Form::Async));
    }
}
