//! Limits that are synced by accuracy: what they admit too much, and what they cost the store.

use super::*;
use crate::limit::SyncPolicy;

const NODES: u16 = 20;
const ONE_PERCENT: f64 = 0.01;

/// One percent, with a ceiling or without.
fn held_back(rate: u64, burst: u64, ceiling: Option<f64>) -> Limit {
    api(rate, burst)
        .sync(SyncPolicy::Accuracy { excess: ONE_PERCENT, key_syncs_per_second_max: ceiling })
}

/// Key syncs of each node and second, and what was admitted in % of the ideal.
fn cost(limit: Limit, nodes: u16, workload: impl Fn(&Setup) -> Workload) -> (f64, f64) {
    let setup = Setup::new(limit, nodes, 1);
    let workload = workload(&setup);
    let outcome = run(&setup, &workload.arrivals(), &[], workload.seconds).unwrap();
    let node_seconds = f64::from(nodes) * workload.seconds;
    let synced = outcome.traffic.keys_synced as f64 / node_seconds;
    (synced, outcome.figures.admitted_vs_ideal_pct)
}

#[test]
fn one_percent_is_kept_and_told_on_twenty_nodes() {
    for (rate, burst) in [(1000, 1000), (10_000, 10_000), (1000, 100)] {
        let allowed = ONE_PERCENT * burst as f64;
        for scenario in [Scenario::Herd, Scenario::OverUniform] {
            let setup = Setup::new(held_back(rate, burst, None), NODES, rate);
            let mut world = lived(&setup, scenario, 5.0, &[]);
            let case = format!("{rate}/s, burst {burst}, {scenario:?}");
            let excess = world.excess();
            let bound = excess.bound_tokens.unwrap();
            assert!(bound <= allowed + ERROR, "{case}: {bound} of {allowed}");
            assert!(excess.observed_tokens <= bound, "{case}: {excess:?}");
            let figures = figures(world);
            assert!(figures.excess_tokens <= allowed + ERROR, "{case}: {}", figures.excess_tokens);
            assert!(figures.admitted_vs_ideal_pct >= 95.0, "{case}: {figures:?}");
        }
    }
}

#[test]
fn credit_that_an_accuracy_gives_is_used_and_stays_within_it() {
    // Five tokens of excess for four nodes: one of credit for each.
    let limit = api(20, 50).accuracy(0.1);
    let mut deepest = 0.0_f64;
    for seed in 1..=10 {
        let mut world = lived(&audited(limit.clone(), 4, seed), Scenario::Herd, 10.0, &[]);
        let seen = world.excess().observed_tokens;
        let excess = figures(world).excess_tokens;
        assert!(excess <= 5.0 && seen <= 5.0, "seed {seed}: {excess}, {seen} seen");
        deepest = deepest.max(seen).max(excess);
    }
    assert!(deepest > 0.0, "no credit was ever used");
}

#[test]
fn tick_follows_its_traffic() {
    let per_second = |load_factor| {
        let load = |setup: &Setup| Workload {
            load: Some(load_factor),
            ..load(setup, Scenario::Under, 5.0)
        };
        cost(held_back(1000, 10_000, None), 4, load).0
    };
    // Below half of the burst: 5% of the rate on four nodes never gets there.
    let (quiet, busy) = (per_second(0.05), per_second(10.0));
    assert!(quiet <= 4.0, "a quiet key costs {quiet} syncs a second");
    assert!(busy >= 3.0 * quiet, "{busy} when busy, {quiet} when quiet");
}

#[test]
fn ceiling_holds_the_store_traffic_of_one_busy_key() {
    for scenario in [Scenario::Herd, Scenario::OverUniform, Scenario::Under] {
        let load = |setup: &Setup| load(setup, scenario, 5.0);
        let (free, _) = cost(held_back(1000, 100, None), 20, load);
        let (held, admitted) = cost(held_back(1000, 100, Some(10.0)), 20, load);
        // What was saved in the second before the load comes on top.
        assert!(held <= 10.0 * 6.0 / 5.0, "{scenario:?}: {held} a second and node, {free} without");
        assert!(free > 2.0 * held, "{scenario:?}: {held} a second and node, {free} without");
        assert!(admitted >= 40.0, "{scenario:?}: {admitted}");
    }
}

#[test]
fn ceiling_holds_the_store_traffic_of_many_keys() {
    let load = |setup: &Setup| Workload { keys: 200, ..load(setup, Scenario::ManySmall, 5.0) };
    let (free, _) = cost(held_back(5, 5, None), 4, load);
    let (held, admitted) = cost(held_back(5, 5, Some(150.0)), 4, load);
    assert!(held <= 150.0 * 6.0 / 5.0, "{held} a second and node, {free} without");
    assert!(free > 3.0 * held, "{held} a second and node, {free} without");
    assert!(admitted > 20.0, "the keys go on: {admitted}");
}
