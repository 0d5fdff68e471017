//! What each cell is held to: the targets of docs/ACCURACY.md, row by row.

use serde::Serialize;

use super::super::faults::{CHURN_SECONDS, churned};
use super::super::setup::Form;
use super::super::workload::{STICKY_DEATH_SECONDS, Scenario};
use super::{Cell, CellFigures, Load};

/// Rounding errors of the judge.
const ERROR: f64 = 1e-6;

/// Keys synced in a key's own tick and node with traffic on it.
const SYNCED_MAX: f64 = 1.3;
/// Of that, what is left for keys above half their burst.
const SYNCED_ABOVE_HALF_PART: f64 = 0.25;
/// The same in the async form, where requests that wait have round trips of their own.
const SYNCED_ASYNC_MAX: f64 = 2.0;
/// Requests that wait on keys of which a node expects one a tick or more, in %.
const WAITED_HOT_MAX_PCT: f64 = 5.0;
/// The mean over all cells, in %.
const WAITED_MEAN_MAX_PCT: f64 = 30.0;

/// Keys synced for each that was invented, asked for once.
const SYNCED_INVENTED_MAX: f64 = 1.5;

/// A target that was missed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Miss {
    /// The figure's name in the report.
    pub figure: &'static str,
    /// What it was.
    pub seen: f64,
    /// The least that it should have been.
    pub at_least: Option<f64>,
    /// The most that it should have been.
    pub at_most: Option<f64>,
}

impl std::fmt::Display for Miss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} (", self.figure, rounded(self.seen))?;
        match (self.at_least, self.at_most) {
            (Some(least), _) => write!(f, "at least {})", rounded(least)),
            (None, most) => write!(f, "at most {})", rounded(most.unwrap_or_default())),
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Figures against what they should be; those that are as they should be are dropped.
#[derive(Default)]
struct Judgement(Vec<Miss>);

impl Judgement {
    fn at_least(&mut self, figure: &'static str, seen: f64, least: f64) {
        if seen < least - ERROR {
            self.0.push(Miss { figure, seen, at_least: Some(least), at_most: None });
        }
    }

    fn at_most(&mut self, figure: &'static str, seen: f64, most: f64) {
        if seen > most + ERROR {
            self.0.push(Miss { figure, seen, at_least: None, at_most: Some(most) });
        }
    }
}

/// Holds the mean of what waited in all cells of the async form to its target.
pub fn waited_mean_target(mean_pct: f64) -> Option<Miss> {
    let mut judgement = Judgement::default();
    judgement.at_most("mean waited_pct", mean_pct, WAITED_MEAN_MAX_PCT);
    judgement.0.pop()
}

impl Cell {
    /// The targets that `figures` miss.
    pub fn misses(&self, figures: &CellFigures) -> Vec<Miss> {
        let mut judgement = Judgement::default();
        self.judge_excess(figures, &mut judgement);
        match self.load {
            Load::LongRun => self.judge_long_run(figures, &mut judgement),
            Load::Scenario(Scenario::Outage) => self.judge_outage(figures, &mut judgement),
            Load::Scenario(Scenario::Churn) => {}
            Load::Scenario(Scenario::Junk) => {
                judgement.at_most("wrong_denials_pct", figures.worst.wrong_denials_pct, 1.0);
                let synced = figures.synced_per_invented_key;
                judgement.at_most("synced_per_invented_key", synced, SYNCED_INVENTED_MAX);
            }
            Load::ColdClients { .. } => self.judge_cold_clients(figures, &mut judgement),
            Load::Logins { .. } => {
                let least = if self.form == Form::Async { 99.5 } else { 97.0 };
                judgement.at_least(VS_IDEAL, figures.worst.admitted_vs_ideal_pct, least);
                let seen = figures.worst.worst_keys_vs_ideal_pct;
                judgement.at_least("worst_keys_vs_ideal_pct", seen, least);
            }
            Load::Crowd { full: false } => {
                judgement.at_least(REACHABLE, figures.reachable_vs_ideal_pct, 97.0);
            }
            Load::Crowd { full: true } => {
                judgement.at_least("store_useful_pct", figures.store_useful_pct, 80.0);
                judgement.at_least("leases_alive_pct", figures.leases_alive_pct, 50.0);
            }
            load if load.is_fault_row() => {
                judgement.at_least(REACHABLE, figures.reachable_vs_ideal_pct, 95.0);
            }
            Load::Scenario(
                Scenario::FarUnder
                | Scenario::FarHerd
                | Scenario::FarShiftUnder
                | Scenario::SlowFull
                | Scenario::Suspended,
            ) => judgement.at_least(VS_IDEAL, figures.worst.admitted_vs_ideal_pct, 97.0),
            Load::Scenario(Scenario::SlowStore | Scenario::SlowHerd) => {
                judgement.at_least(VS_IDEAL, figures.worst.admitted_vs_ideal_pct, 97.0);
            }
            load => self.judge_scenario(load.scenario(), figures, &mut judgement),
        }
        judgement.0
    }

    fn judge_scenario(&self, scenario: Scenario, figures: &CellFigures, judgement: &mut Judgement) {
        self.judge_vs_ideal(figures, judgement);
        if self.is_check_on_credit() {
            self.judge_denials(figures, judgement);
        }
        if is_steady(scenario) {
            self.judge_traffic(figures, judgement);
        }
        if self.form == Form::Async {
            self.judge_waiting(figures, judgement);
        }
    }

    fn judge_cold_clients(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let most = match (self.form, self.nodes) {
            (Form::Async, _) => 0.0,
            _ if self.burst() < 100.0 => 15.0,
            (Form::Check, ..=4) => 1.0,
            (Form::Check, _) => 5.0,
        };
        let seen = figures.worst.wrong_first_denials_pct;
        judgement.at_most("wrong_first_denials_pct", seen, most);
    }

    /// `check` on credit: the usual way is held to the same.
    fn is_check_on_credit(&self) -> bool {
        self.form == Form::Check && self.credit() > 0
    }

    fn is_ample(&self) -> bool {
        self.burst() >= 20.0 * f64::from(self.nodes)
    }

    /// Nodes x credit.
    fn all_credit(&self) -> f64 {
        f64::from(self.nodes) * f64::from(self.credit())
    }

    fn judge_excess(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let excess = figures.worst.excess_tokens;
        let scenario = self.load.scenario();
        if let Scenario::SlowStore | Scenario::SlowHerd = scenario {
            let rtt_s = self.setup(1).network.rtt.as_secs_f64();
            let most = (self.burst() / 100.0).max(self.rate() * rtt_s) + 1.0;
            return judgement.at_most(
                "excess above that over a near store",
                figures.excess_above_near_tokens,
                most,
            );
        }
        let bounded = self.load.is_fault_row() || matches!(self.load, Load::Crowd { .. });
        if bounded {
            return judgement.at_most("excess_tokens", excess, figures.excess_bound_tokens);
        }
        let sure = !self.is_check_on_credit();
        let most = if scenario == Scenario::Outage {
            figures.excess_bound_tokens
        } else if sure {
            0.0
        } else if let Scenario::ColdClients | Scenario::Logins = scenario {
            f64::from(self.nodes) * self.first_credit()
        } else if let Scenario::Churn | Scenario::Sticky = scenario {
            f64::from(self.nodes_alive_within(self.burst() / self.rate())) * self.first_credit()
        } else if self.burst() >= 100.0 * self.all_credit() {
            // A percent of the burst at most, and the credit of all nodes is no more than that.
            self.all_credit()
        } else {
            (self.burst() / 100.0).max(self.all_credit() / 2.0)
        };
        judgement.at_most("excess_tokens", excess, most);
        if !sure && (!scenario.has_faults() || self.load.is_far()) {
            let repaid_s = self.burst() / self.rate();
            judgement.at_most("longest_excess_s", figures.worst.longest_excess_s, repaid_s);
        }
    }

    /// The most nodes that are alive at any time within these seconds.
    fn nodes_alive_within(&self, seconds: f64) -> u32 {
        let (every_s, replaced) = match self.load.scenario() {
            Scenario::Churn => (CHURN_SECONDS, churned(self.nodes)),
            Scenario::Sticky => (STICKY_DEATH_SECONDS, 1),
            _ => return self.nodes.into(),
        };
        let rounds = (seconds.min(self.seconds()) / every_s as f64) as u32 + 1;
        u32::from(self.nodes) + rounds * u32::from(replaced)
    }

    fn judge_vs_ideal(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let worst = &figures.worst;
        let least = match (self.form, self.is_check_on_credit(), self.is_ample()) {
            (Form::Async, ..) => 99.5,
            (Form::Check, false, false) => 0.0,
            (Form::Check, true, true) => 99.0,
            (Form::Check, ..) => 97.0,
        };
        let slack_tokens = if self.is_ample() || !self.is_check_on_credit() {
            0.0
        } else {
            self.all_credit() * f64::from(self.load.keys())
        };
        let most = 100.5 + 100.0 * slack_tokens / figures.ideal_tokens.max(1) as f64;
        judgement.at_least(VS_IDEAL, worst.admitted_vs_ideal_pct, least);
        judgement.at_most("admitted_vs_ideal_most_pct", worst.admitted_vs_ideal_most_pct, most);
        if self.load.keys() > 1 {
            judgement.at_least("worst_keys_vs_ideal_pct", worst.worst_keys_vs_ideal_pct, least);
        }
        if self.is_check_on_credit() && !self.is_ample() {
            judgement.at_least("least_fair_share_pct", worst.least_fair_share_pct, 50.0);
        }
    }

    fn judge_denials(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let most = if self.is_ample() { 1.0 } else { 3.0 };
        judgement.at_most("wrong_denials_pct", figures.worst.wrong_denials_pct, most);
    }

    fn judge_traffic(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let most = match (self.form, self.load.scenario()) {
            (Form::Async, _) => SYNCED_ASYNC_MAX,
            (Form::Check, Scenario::Under | Scenario::UnderSkew) => {
                let above = figures.above_half_pct / 100.0;
                SYNCED_MAX * (1.0 - above + above * SYNCED_ABOVE_HALF_PART)
            }
            (Form::Check, _) => SYNCED_MAX,
        };
        let synced = figures.worst.keys_synced_per_tick_and_node;
        judgement.at_most("keys_synced_per_tick_and_node", synced, most);
    }

    fn judge_waiting(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let scenario = self.load.scenario();
        let takers = match scenario {
            Scenario::ShiftUnder | Scenario::Sticky => 1.0,
            _ => f64::from(self.nodes),
        };
        let tick_s = self.setup(1).tick_s().unwrap_or_default();
        let expected = scenario.load() * self.rate() / takers * tick_s;
        if expected >= 1.0 {
            judgement.at_most("waited_pct", figures.worst.waited_pct, WAITED_HOT_MAX_PCT);
        }
    }

    fn judge_long_run(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let due = self.burst() + self.rate() * self.seconds();
        let slack = (due / 1000.0).max(2.0);
        let [least, most] = figures.admitted_tokens;
        judgement.at_least("admitted_tokens", least as f64, due - slack);
        judgement.at_most("admitted_tokens", most as f64, due + slack);
    }

    fn judge_outage(&self, figures: &CellFigures, judgement: &mut Judgement) {
        let during = self.rate() * (1.0 + 1.0 / f64::from(self.nodes));
        let after = self.burst() + self.all_credit();
        let seen = figures.outage_tokens_per_second;
        judgement.at_most("outage_tokens_per_second", seen, during);
        judgement.at_most("after_outage_tokens", figures.after_outage_tokens, after);
    }
}

const VS_IDEAL: &str = "admitted_vs_ideal_pct";
const REACHABLE: &str = "reachable_vs_ideal_pct";

/// Whether the same load goes on all the time, without faults.
fn is_steady(scenario: Scenario) -> bool {
    matches!(
        scenario,
        Scenario::OverUniform
            | Scenario::OverSkew
            | Scenario::Under
            | Scenario::UnderSkew
            | Scenario::ManySmall
            | Scenario::HotSet
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;
    use crate::sim::Algorithm;
    use crate::sim::Policy;
    use crate::sim::worst_case::Worst;

    fn cell(scenario: Scenario, quota: Quota, nodes: u16) -> Cell {
        let (policy, form) = (Policy::Default, Form::Check);
        let interval = Duration::from_millis(50);
        let algorithm = Algorithm::TokenBucket;
        Cell { load: Load::Scenario(scenario), algorithm, quota, nodes, interval, policy, form }
    }

    /// As good as can be: nothing to complain about in any cell.
    const PERFECT: Worst = Worst {
        admitted_vs_ideal_pct: 100.0,
        admitted_vs_ideal_most_pct: 100.0,
        worst_keys_vs_ideal_pct: 100.0,
        least_fair_share_pct: 100.0,
        ..Worst::NONE
    };

    fn figures(worst: Worst) -> CellFigures {
        CellFigures {
            worst,
            admitted_tokens: [60_000; 2],
            ideal_tokens: 1000,
            above_half_pct: 0.0,
            outage_tokens_per_second: 0.0,
            after_outage_tokens: 0.0,
            excess_above_near_tokens: 0.0,
            excess_bound_tokens: 0.0,
            reachable_vs_ideal_pct: 100.0,
            synced_per_invented_key: 0.0,
            store_useful_pct: 100.0,
            leases_alive_pct: 100.0,
        }
    }

    /// Holds when `seen` is at the target and not when it is a thousandth beyond it.
    fn assert_target(cell: Cell, name: &str, target: f64, with: impl Fn(f64) -> CellFigures) {
        let missed = |seen| {
            let misses = cell.misses(&with(seen));
            misses.into_iter().find(|miss| miss.figure == name)
        };
        assert_eq!(missed(target), None, "{cell:?}");
        let [below, above] = [target - 1e-3, target + 1e-3].map(missed);
        let (miss, is_floor) = match (below, above) {
            (Some(miss), None) => (miss, true),
            (None, Some(miss)) => (miss, false),
            both => panic!("{cell:?}: {name} has no target at {target}: {both:?}"),
        };
        let aimed = if is_floor { miss.at_least } else { miss.at_most };
        assert!(aimed.is_some_and(|aimed| (aimed - target).abs() < 1e-9), "{miss:?}");
    }

    const R1000: Quota = Quota::per_second(1000);
    const R20: Quota = Quota::per_second(20);

    fn excess(seen: f64) -> CellFigures {
        figures(Worst { excess_tokens: seen, ..PERFECT })
    }

    fn vs_ideal(seen: f64) -> CellFigures {
        figures(Worst { admitted_vs_ideal_pct: seen, ..PERFECT })
    }

    #[test]
    fn nothing_is_missed_by_what_is_perfect() {
        for policy in [Policy::Default, Policy::Strict] {
            for form in [Form::Check, Form::Async] {
                for cell in super::super::cells(policy, form) {
                    let due = (cell.burst() + cell.rate() * cell.seconds()) as u64;
                    let perfect = CellFigures { admitted_tokens: [due; 2], ..figures(PERFECT) };
                    assert_eq!(cell.misses(&perfect), [], "{cell:?}");
                }
            }
        }
    }

    #[test]
    fn excess_is_held_to_all_credit_or_half_of_it_where_the_burst_is_small() {
        let over = |quota, nodes| cell(Scenario::OverUniform, quota, nodes);
        assert_target(over(R1000, 4), "excess_tokens", 4.0, excess);
        assert_target(over(R1000, 20), "excess_tokens", 10.0, excess);
        assert_target(over(Quota::per_second(10_000), 100), "excess_tokens", 100.0, excess);
        assert_target(over(R20, 20), "excess_tokens", 10.0, excess);
        let strict = Cell { policy: Policy::Strict, ..over(R20, 20) };
        assert_target(strict, "excess_tokens", 0.0, |seen| excess(seen.max(0.0)));
        let waiting = Cell { form: Form::Async, ..over(R20, 20) };
        assert_target(waiting, "excess_tokens", 0.0, |seen| excess(seen.max(0.0)));
        let lasting = |seen| figures(Worst { longest_excess_s: seen, ..PERFECT });
        let small = over(R1000.burst(100), 4);
        assert_target(small, "longest_excess_s", 0.1, lasting);
    }

    #[test]
    fn nodes_that_came_and_went_within_burst_over_rate_have_their_credit_too() {
        // Two of twenty are replaced each 2 s: once or twice within 1 s or 2.5 s. One token each.
        assert_target(cell(Scenario::Churn, R20, 20), "excess_tokens", 22.0, excess);
        let slow = cell(Scenario::Churn, R20.burst(50), 20);
        assert_target(slow, "excess_tokens", 24.0, excess);
        assert_target(cell(Scenario::Sticky, R20, 20), "excess_tokens", 21.0, excess);
    }

    #[test]
    fn admitted_against_the_ideal_has_a_floor_and_a_ceiling() {
        let name = "admitted_vs_ideal_pct";
        let under = |quota| cell(Scenario::Under, quota, 20);
        assert_target(under(R1000), name, 99.0, vs_ideal);
        assert_target(under(R20), name, 97.0, vs_ideal);
        let strict = Cell { policy: Policy::Strict, ..under(R1000) };
        assert_target(strict, name, 97.0, vs_ideal);
        let strict = Cell { policy: Policy::Strict, ..under(R20) };
        assert_eq!(strict.misses(&vs_ideal(1.0)), []);
        assert_target(Cell { form: Form::Async, ..under(R20) }, name, 99.5, vs_ideal);
        assert_target(cell(Scenario::SlowHerd, R1000, 20), name, 97.0, vs_ideal);
        let most = |seen| figures(Worst { admitted_vs_ideal_most_pct: seen, ..PERFECT });
        assert_target(under(R1000), "admitted_vs_ideal_most_pct", 100.5, most);
        // Twenty tokens of credit, of a thousand.
        assert_target(under(R20), "admitted_vs_ideal_most_pct", 102.5, most);
        let keys = |seen| figures(Worst { worst_keys_vs_ideal_pct: seen, ..PERFECT });
        let many = cell(Scenario::ManySmall, Quota::per_second(5), 5);
        assert_target(many, "worst_keys_vs_ideal_pct", 97.0, keys);
        assert_eq!(under(R20).misses(&keys(1.0)), [], "one key has no percentile");
        let share = |seen| figures(Worst { least_fair_share_pct: seen, ..PERFECT });
        assert_target(under(R20), "least_fair_share_pct", 50.0, share);
    }

    #[test]
    fn wrong_denials_are_held_to_more_where_the_burst_is_ample() {
        let denied = |seen| figures(Worst { wrong_denials_pct: seen, ..PERFECT });
        let herd = |quota| cell(Scenario::Herd, quota, 20);
        assert_target(herd(R1000), "wrong_denials_pct", 1.0, denied);
        assert_target(herd(R20), "wrong_denials_pct", 3.0, denied);
        let strict = Cell { policy: Policy::Strict, ..herd(R20) };
        assert_eq!(strict.misses(&denied(50.0)), []);
    }

    #[test]
    fn key_above_half_its_burst_is_synced_a_quarter_as_often() {
        let name = "keys_synced_per_tick_and_node";
        let synced = |above_half_pct| {
            move |seen| CellFigures {
                above_half_pct,
                ..figures(Worst { keys_synced_per_tick_and_node: seen, ..PERFECT })
            }
        };
        assert_target(cell(Scenario::OverSkew, R20, 4), name, 1.3, synced(100.0));
        assert_target(cell(Scenario::Under, R20, 4), name, 1.3, synced(0.0));
        assert_target(cell(Scenario::Under, R20, 4), name, 0.325, synced(100.0));
        let waiting = Cell { form: Form::Async, ..cell(Scenario::Under, R20, 4) };
        assert_target(waiting, name, 2.0, synced(100.0));
        assert_eq!(cell(Scenario::Herd, R20, 4).misses(&synced(0.0)(9.0)), []);
    }

    #[test]
    fn callers_on_a_hot_key_wait_seldom() {
        let waited = |seen| figures(Worst { waited_pct: seen, ..PERFECT });
        let of = |quota| Cell { form: Form::Async, ..cell(Scenario::OverUniform, quota, 20) };
        assert_target(of(R1000), "waited_pct", 5.0, waited);
        assert_eq!(of(R20).misses(&waited(90.0)), [], "a node expects 0.15 a tick");
        assert_eq!(waited_mean_target(30.0), None);
        assert!(waited_mean_target(30.1).is_some_and(|miss| miss.at_most == Some(30.0)));
    }

    #[test]
    fn long_run_admits_what_was_due_within_a_thousandth_or_two_tokens() {
        let admitted = |least, most| {
            move |seen: f64| CellFigures {
                admitted_tokens: [least, most]
                    .map(|other: Option<u64>| other.unwrap_or(seen as u64)),
                ..figures(PERFECT)
            }
        };
        let long = |quota| Cell { load: Load::LongRun, ..cell(Scenario::OverUniform, quota, 20) };
        // 601000 and 610 are due.
        let misses = |quota, figures| long(quota).misses(&figures).len();
        let small = Quota::per_second(1).burst(10);
        for (quota, least, most) in [(R1000, 600_399, 601_601), (small, 608, 612)] {
            let due = Some(u64::midpoint(least, most));
            assert_eq!(misses(quota, admitted(None, due)(least as f64)), 0);
            assert_eq!(misses(quota, admitted(None, due)(least as f64 - 1.0)), 1);
            assert_eq!(misses(quota, admitted(due, None)(most as f64)), 0);
            assert_eq!(misses(quota, admitted(due, None)(most as f64 + 1.0)), 1);
        }
    }

    #[test]
    fn outage_gives_no_more_than_the_rate_and_a_share_and_then_no_second_burst() {
        let outage = cell(Scenario::Outage, R1000, 4);
        let during = |seen| CellFigures { outage_tokens_per_second: seen, ..figures(PERFECT) };
        let beyond = |seen| CellFigures { excess_bound_tokens: 7.0, ..excess(seen) };
        assert_target(outage, "excess_tokens", 7.0, beyond);
        assert_target(outage, "outage_tokens_per_second", 1250.0, during);
        let after = |seen| CellFigures { after_outage_tokens: seen, ..figures(PERFECT) };
        assert_target(outage, "after_outage_tokens", 1004.0, after);
    }

    #[test]
    fn store_that_is_far_away_adds_a_percent_or_a_round_trip_and_one() {
        let added = |seen| CellFigures { excess_above_near_tokens: seen, ..figures(PERFECT) };
        let name = "excess above that over a near store";
        let slow = |quota| cell(Scenario::SlowStore, quota, 4);
        assert_target(slow(R1000), name, 21.0, added);
        assert_target(slow(R20), name, 1.4, added);
        assert_target(slow(Quota::per_hour(1000).burst(500)), name, 6.0, added);
    }

    #[test]
    fn rows_in_which_the_store_fails_are_held_to_the_bound_and_to_what_is_reachable() {
        let flap = Load::Flap { down_ms: 2100, every_ms: 3000 };
        for load in [flap, Load::StoreBack { by_s: 60 }, Load::Scenario(Scenario::LostRecord)] {
            let cell = Cell { load, ..cell(Scenario::Under, R1000, 4) };
            let reachable = |seen| CellFigures { reachable_vs_ideal_pct: seen, ..figures(PERFECT) };
            assert_target(cell, "reachable_vs_ideal_pct", 95.0, reachable);
            let beyond = |seen| CellFigures { excess_bound_tokens: 7.0, ..excess(seen) };
            assert_target(cell, "excess_tokens", 7.0, beyond);
        }
    }

    fn crowd(full: bool) -> Cell {
        Cell { load: Load::Crowd { full }, ..cell(Scenario::Under, R1000, 200) }
    }

    #[test]
    fn crowd_misses_its_target_below_97_percent_of_the_reachable_ideal() {
        let reachable = |seen| CellFigures { reachable_vs_ideal_pct: seen, ..figures(PERFECT) };
        assert_target(crowd(false), "reachable_vs_ideal_pct", 97.0, reachable);
    }

    #[test]
    fn full_crowd_misses_its_target_below_80_percent_useful_work_or_half_its_leases() {
        let useful = |seen| CellFigures { store_useful_pct: seen, ..figures(PERFECT) };
        assert_target(crowd(true), "store_useful_pct", 80.0, useful);
        let alive = |seen| CellFigures { leases_alive_pct: seen, ..figures(PERFECT) };
        assert_target(crowd(true), "leases_alive_pct", 50.0, alive);
    }

    #[test]
    fn invented_keys_cost_no_more_than_one_sync_and_a_half() {
        let junk = cell(Scenario::Junk, Quota::per_second(100), 4);
        let synced = |seen| CellFigures { synced_per_invented_key: seen, ..figures(PERFECT) };
        assert_target(junk, "synced_per_invented_key", 1.5, synced);
        let denied = |seen| figures(Worst { wrong_denials_pct: seen, ..PERFECT });
        assert_target(junk, "wrong_denials_pct", 1.0, denied);
    }

    #[test]
    fn far_suspended_and_slow_nodes_have_97_percent_of_the_ideal() {
        for scenario in [Scenario::FarHerd, Scenario::Suspended, Scenario::SlowFull] {
            for policy in [Policy::Default, Policy::Strict] {
                let cell = Cell { policy, ..cell(scenario, R1000, 4) };
                assert_target(cell, "admitted_vs_ideal_pct", 97.0, vs_ideal);
            }
        }
    }

    #[test]
    fn miss_says_figure_and_target() {
        let misses = cell(Scenario::Under, R1000, 20).misses(&vs_ideal(98.765_43));
        let said: Vec<String> = misses.iter().map(ToString::to_string).collect();
        assert_eq!(said, ["admitted_vs_ideal_pct 98.765 (at least 99)"]);
        let said = waited_mean_target(31.5).map(|miss| miss.to_string());
        assert_eq!(said.as_deref(), Some("mean waited_pct 31.5 (at most 30)"));
    }
}
