//! `tidegate sweep`: the cells of docs/ACCURACY.md, their figures, and the targets that they miss.
//! The same flags print the same bytes.

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use tidegate::sim::sweep::{Cell, CellFigures, Load, Miss, cells, waited_mean_target};
use tidegate::sim::{Algorithm, Form, Policy};
use tidegate::{ConfigError, Quota};

use self::table::Table;
use crate::flags::{
    InputError, SEEDS_MAX, THREADS_DEFAULT, THREADS_MAX, algorithm_parser, form_parser,
    policy_help, policy_parser, validate_form,
};
use crate::output::{self, OutputError};
use crate::progress;
use crate::threads::on_threads;
use crate::values::{Rate, duration};

mod filter;
mod table;

/// What can stop a sweep.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SweepError {
    #[error("{wanted}: no cell of the sweep: {known}")]
    NoCell { wanted: String, known: String },
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{0} of {1} cells miss a target")]
    Missed(usize, usize),
    #[error("all cells together miss a target: {0}")]
    MissedInTheMean(String),
}

/// Simulates every cell of the sweep and names those that miss a target.
#[derive(Args)]
#[command(after_long_help = CELLS)]
pub(crate) struct Options {
    /// Run each cell with so many seeds, from 1 on; the worst of them counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=SEEDS_MAX))]
    seeds: u64,
    /// Cells that run at the same time
    #[arg(long, default_value_t = THREADS_DEFAULT,
          value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX))]
    threads: u16,
    /// What nodes spend from: default, strict or write-behind; a list runs one beside the other
    #[arg(long, value_delimiter = ',', default_value = Policy::Default.name(),
          value_parser = policy_parser(), hide_possible_values = true, long_help = policy_help() + "; a list runs one beside the other")]
    policy: Vec<Policy>,
    /// How requests are decided: check (at once) or async (after a round trip where unsure)
    #[arg(long, default_value = Form::Check.name(), value_parser = form_parser(),
          hide_possible_values = true)]
    form: Form,
    /// The algorithm of all cells. A window has the burst's tokens, and lasts as long as the rate takes for them: cells
    /// whose windows are shorter than 20 ticks, or 100 of a log, are left out, and so are steps of the store's clock
    #[arg(long, default_value = Algorithm::TokenBucket.name(),
          value_parser = algorithm_parser(Algorithm::LEASED))]
    algorithm: Algorithm,
    /// Only these scenarios, such as under,herd
    #[arg(long, value_delimiter = ',', long_help = scenario_help(),
          value_parser = scenario_parser(), hide_possible_values = true)]
    scenario: Vec<String>,
    /// Only quotas of this rate, such as 1000/s or 1000, or 100/h
    #[arg(long, allow_hyphen_values = true)]
    rate: Option<Rate>,
    /// Only quotas of this burst, in tokens
    #[arg(long)]
    burst: Option<u64>,
    /// Only cells of so many nodes, such as 20 or 4,100
    #[arg(long, value_delimiter = ',')]
    nodes: Vec<u16>,
    /// Only cells of this sync interval, such as 50ms or 10ms,200ms
    #[arg(long, value_delimiter = ',', value_parser = duration, allow_hyphen_values = true)]
    interval: Vec<Duration>,
    /// Exit with status 1 if a cell misses a target
    #[arg(long)]
    fail_on_miss: bool,
    /// Print JSON on standard output, one object a cell, and nothing else
    #[arg(long)]
    json: bool,
}

const CELLS: &str = "\
Cells: each scenario on 4, 20 and 100 nodes, with sync intervals of 10, 50 and 200 ms, under each of
eight limits (rate/burst): 10000/10000, 1000/1000, 1000/100, 100/100, 20/20, 1/10 a second, 100/100
and 1000/50 an hour. But:
  sticky, many_small  1000 keys of 20/20 and of 5/5 a second
  hot_set             100000 keys of 50/50 a second, 20 nodes, 50 ms, 5 s
  long_run            over_uniform for 600 s: the limits from 1000/1000 to 1/10, 20 nodes, 50 ms
  outage              the limits whose burst is the rate of a second or less
  far_nodes           far_under, far_herd and far_shift_under, 50 ms
  flap, lost_record, old_snapshot, store_back
                      1000/1000, 1000/100, 100/100 and 20/20, 4 and 20 nodes, 50 ms, with the
                      default policy and strict; flap with 19 ways to come and go
  slow_full           1/1000 for 2000 s, 4 and 20 nodes, default and strict
  suspended           100/1000 and 100/2000 for 100 s, async, one node and two
  junk                100/100 for 40 s, 4 nodes
  crowd               200 nodes; crowd_full with more keys than the store can serve
  bursts              1, 4 and 20 nodes, 50 ms
Windows and logs (--algorithm) are judged by the same targets.
slow_store and slow_herd are over_uniform and herd over a store that is far away; their excess is
compared with that of the same run over a store that is near. All of it takes about half an hour on
two cores and 2 GB, most of it for the scenarios on many keys.

The worst of all seeds counts. The exit status is 0 whatever was missed, unless --fail-on-miss is
given.

Examples:
  tidegate sweep --scenario herd --rate 20/s --nodes 4 --seeds 1
  tidegate sweep --scenario under,herd --rate 100/s --nodes 4,20 --interval 50ms --seeds 1
  tidegate sweep --scenario herd --rate 20/s --nodes 4 --policy default,strict --seeds 1
  tidegate sweep --algorithm sliding-window --scenario under,over_uniform --interval 50ms --seeds 1";

fn scenario_help() -> String {
    let mut names: Vec<&str> = Load::all().into_iter().map(Load::row).collect();
    names.dedup();
    format!("Only these scenarios, a list of: {}", names.join(", "))
}

/// All rows of the sweep, and what is more precise: a line of its table, or a cell's own name.
fn scenario_parser() -> impl TypedValueParser<Value = String> {
    let all = Load::all();
    let mut names: Vec<String> = all.iter().map(|load| load.row().to_owned()).collect();
    names.extend(all.iter().map(|load| load.line().to_owned()));
    names.extend(all.iter().map(|load| load.name().into_owned()));
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    PossibleValuesParser::new(names.into_iter().map(PossibleValue::new))
}

/// Such as `1000/s`.
fn rate_name(quota: &Quota) -> String {
    Rate::of_quota(quota).to_string()
}

/// Such as `1000/s burst 100`.
fn quota_name(quota: &Quota) -> String {
    format!("{} burst {}", rate_name(quota), quota.burst_tokens())
}

/// What is told of a cell.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(skip)]
    cell: Cell,
    limit: String,
    algorithm: Algorithm,
    /// A second, whatever the period.
    rate: f64,
    burst: u64,
    nodes: u16,
    interval_ms: f64,
    scenario: String,
    policy: Policy,
    form: Form,
    seconds: f64,
    seed: u64,
    seeds: u64,
    #[serde(flatten)]
    figures: CellFigures,
    misses: Vec<Miss>,
}

impl Report {
    fn new(cell: Cell, seeds: u64, figures: CellFigures) -> Self {
        Self {
            cell,
            limit: quota_name(&cell.quota),
            algorithm: cell.algorithm,
            rate: cell.quota.tokens_per_second(),
            burst: cell.quota.burst_tokens(),
            nodes: cell.nodes,
            interval_ms: cell.interval.as_secs_f64() * 1e3,
            scenario: cell.load.name().into_owned(),
            policy: cell.policy,
            form: cell.form,
            seconds: cell.seconds(),
            seed: 1,
            seeds,
            misses: cell.misses(&figures),
            figures,
        }
    }
}

/// What a missed cell is told by.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { limit, scenario, nodes, interval_ms, .. } = self;
        let misses: Vec<String> = self.misses.iter().map(ToString::to_string).collect();
        let policy = self.policy.name();
        let misses = misses.join(", ");
        write!(f, "{limit}, {scenario}, {nodes} nodes, {interval_ms} ms, {policy}: {misses}")
    }
}

pub(crate) fn run(options: &Options) -> Result<(), SweepError> {
    let reports = reports(options)?;
    if options.json {
        reports.iter().try_for_each(output::json)?;
    } else {
        output::write(&told(&reports))?;
    }
    if options.fail_on_miss { missed(&reports) } else { Ok(()) }
}

/// The table, what was missed, and how many cells that were.
fn told(reports: &[Report]) -> String {
    let missed = reports.iter().filter(|report| !report.misses.is_empty());
    let missed = missed.map(|report| format!("missed: {report}\n"));
    let mut policies: Vec<Policy> = Vec::new();
    for report in reports {
        if !policies.contains(&report.policy) {
            policies.push(report.policy);
        }
    }
    let counts = policies.iter().map(|&policy| count(reports, policy) + "\n");
    let rest: String = missed.chain(counts).collect();
    format!("{}\n{rest}", Table::of(reports))
}

/// How many cells of a policy there are, and what they come to all together.
fn count(reports: &[Report], policy: Policy) -> String {
    let own: Vec<&Report> = reports.iter().filter(|report| report.policy == policy).collect();
    let missed = own.iter().filter(|report| !report.misses.is_empty()).count();
    let line = format!("{}: {} cells, {missed} miss a target", policy.name(), own.len());
    let Some(mean_pct) = waited_mean_pct(reports, policy) else { return line };
    let miss = waited_mean_target(mean_pct).map(|miss| format!(": missed: {miss}"));
    format!("{line}; {mean_pct:.2}% waited in the mean{}", miss.unwrap_or_default())
}

/// What waited in the mean of a policy's cells, if any of their requests may wait.
fn waited_mean_pct(reports: &[Report], policy: Policy) -> Option<f64> {
    let own: Vec<&Report> = reports.iter().filter(|report| report.policy == policy).collect();
    let may_wait = own.iter().any(|report| report.form == Form::Async);
    let waited: f64 = own.iter().map(|report| report.figures.worst.waited_pct).sum();
    may_wait.then(|| waited / own.len() as f64)
}

/// What `--fail-on-miss` fails for: a cell that misses a target, or the mean of all cells.
fn missed(reports: &[Report]) -> Result<(), SweepError> {
    let missed = reports.iter().filter(|report| !report.misses.is_empty()).count();
    if missed > 0 {
        return Err(SweepError::Missed(missed, reports.len()));
    }
    let mean_pct = |report: &Report| waited_mean_pct(reports, report.policy);
    match reports.iter().filter_map(mean_pct).find_map(waited_mean_target) {
        Some(miss) => Err(SweepError::MissedInTheMean(miss.to_string())),
        None => Ok(()),
    }
}

fn reports(options: &Options) -> Result<Vec<Report>, SweepError> {
    let cells = options.cells()?;
    let bar = progress::bar(cells.len(), "cells");
    // The longest first, so that no thread is left with it alone at the end.
    let mut order: Vec<usize> = (0..cells.len()).collect();
    order.sort_by(|&one, &other| cells[other].requests().total_cmp(&cells[one].requests()));
    let run = |&index: &usize| {
        let figures = cells[index].run(1..=options.seeds);
        bar.inc(1);
        figures.map(|figures| Report::new(cells[index], options.seeds, figures))
    };
    let reports = on_threads(&order, options.threads.into(), run);
    bar.finish_and_clear();
    let mut reports: Vec<(usize, Report)> = order
        .into_iter()
        .zip(reports)
        .map(|(index, report)| report.map(|report| (index, report)))
        .collect::<Result<_, _>>()?;
    reports.sort_by_key(|(index, _)| *index);
    Ok(reports.into_iter().map(|(_, report)| report).collect())
}

impl Options {
    /// The cells that are asked for, those of all policies one after the other.
    fn cells(&self) -> Result<Vec<Cell>, SweepError> {
        for &policy in &self.policy {
            validate_form(policy, self.form)?;
            if policy == Policy::WriteBehind && self.algorithm != Algorithm::TokenBucket {
                let reason = "--policy write-behind is played with token buckets only";
                return Err(InputError::flag("--algorithm", &self.algorithm.name(), reason).into());
            }
        }
        let all = cells(Policy::Default, self.form);
        let mut wanted = filter::wanted(self, &all)?;
        // The strict ones are told apart below.
        wanted.retain(|cell| cell.policy == Policy::Default);
        let wanted: Vec<Cell> =
            wanted.into_iter().filter_map(|cell| cell.with_algorithm(self.algorithm)).collect();
        if wanted.is_empty() {
            let wanted = format!("--algorithm {}", self.algorithm.name());
            let known = "of those that are asked for, none is judged: see sweep --help".to_owned();
            return Err(SweepError::NoCell { wanted, known });
        }
        let of_cell = |cell: Cell| {
            let mut policies: Vec<Policy> = Vec::new();
            for policy in self.policy.iter().flat_map(|&policy| cell.load.policies(policy)) {
                if !policies.contains(&policy) {
                    policies.push(policy);
                }
            }
            policies.into_iter().map(move |policy| Cell { policy, ..cell })
        };
        Ok(wanted.into_iter().flat_map(of_cell).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parsed;

    pub(super) fn options(flags: &str) -> Options {
        parsed(flags).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn policies_run_one_beside_the_other_and_a_form_for_all() {
        let scenario = "--scenario under,outage";
        let all = options(scenario).cells().unwrap().len();
        let flags = format!("{scenario} --policy strict,default --form async");
        let cells = options(&flags).cells().unwrap();
        assert_eq!(cells.len(), 2 * all);
        assert_eq!((cells[0].policy, cells[1].policy), (Policy::Strict, Policy::Default));
        assert!(cells.iter().all(|cell| cell.form == Form::Async));
        assert!(cells.chunks(2).all(|pair| pair[0].load == pair[1].load));
        let both = options("--scenario slow_full --nodes 4").cells().unwrap();
        let policies: Vec<Policy> = both.iter().map(|cell| cell.policy).collect();
        assert_eq!(policies, [Policy::Default, Policy::Strict]);
        let flags = "--policy write-behind --algorithm fixed-window";
        let refused = options(flags).cells().unwrap_err().to_string();
        assert!(
            refused.starts_with("invalid value 'fixed-window' for '--algorithm': "),
            "{refused}"
        );
        let flags = "--algorithm fixed-window --rate 1000 --burst 100 --interval 50ms";
        let refused = options(flags).cells().unwrap_err().to_string();
        assert!(
            refused.starts_with("--algorithm fixed-window: no cell of the sweep: "),
            "{refused}"
        );
        let refused = options("--policy write-behind --form async").cells().unwrap_err();
        assert!(
            refused.to_string().starts_with("invalid value 'async' for '--form': "),
            "{refused}"
        );
    }

    #[test]
    fn a_cell_is_told_with_what_it_missed_and_counted() {
        let flags = "--scenario herd --rate 20 --nodes 4,20 --interval 50ms --seeds 1";
        let reports = reports(&options(&format!("{flags} --policy default,write-behind"))).unwrap();
        let named: Vec<(u16, Policy)> =
            reports.iter().map(|report| (report.nodes, report.policy)).collect();
        let (default, usual) = (Policy::Default, Policy::WriteBehind);
        assert_eq!(named, [(4, default), (4, usual), (20, default), (20, usual)]);
        // The usual way admits 6% more than there is.
        let miss = reports[3].to_string();
        let cell =
            "20/s burst 20, herd, 20 nodes, 50 ms, write-behind: admitted_vs_ideal_most_pct ";
        assert!(miss.starts_with(cell) && miss.contains(" (at most 102.5"), "{miss}");
        let count = count(&reports, usual);
        assert!(
            count.starts_with("write-behind: 2 cells, ") && !count.contains("waited"),
            "{count}"
        );
    }

    #[test]
    fn what_waited_is_held_to_its_mean_over_all_cells() {
        let cell = options("--scenario herd --form async").cells().unwrap()[0];
        let mut report = Report::new(cell, 1, cell.run(1..=1).unwrap());
        report.figures.worst.waited_pct = 29.0;
        let line = count(&[report], Policy::Default);
        assert!(line.ends_with("; 29.00% waited in the mean"), "{line}");
        let mut report = Report::new(cell, 1, cell.run(1..=1).unwrap());
        report.figures.worst.waited_pct = 31.0;
        let line = count(&[report], Policy::Default);
        assert!(line.ends_with(": missed: mean waited_pct 31 (at most 30)"), "{line}");
    }
}
