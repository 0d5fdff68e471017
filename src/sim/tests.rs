//! The engine in its world: what a node promises, whatever happens around it.

use std::time::Duration;

use super::world::{BEGIN_US, Figures, Setup, World, figures, poisson};
use crate::limit::{Limit, OutagePolicy};
use crate::quota::Quota;
use crate::store::model::Model;

const SECOND_US: u64 = 1_000_000;
/// The load begins here: the nodes have met the store.
const LOAD_US: u64 = BEGIN_US + SECOND_US;
/// Floating-point error of the judge, in tokens.
const ERROR: f64 = 1e-6;

/// Load on one key: which node is asked when; the number is a multiple of the rate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    Even(f64),
    Skewed(f64),
    Herd(f64),
    Shift(f64),
}

const SCENARIOS: [Load; 5] =
    [Load::Even(3.0), Load::Skewed(3.0), Load::Even(0.9), Load::Herd(5.0), Load::Shift(0.9)];

impl Load {
    fn offers(self, second: u64, node: usize, nodes: usize) -> bool {
        match self {
            Self::Herd(_) => second.is_multiple_of(4),
            Self::Shift(_) => second as usize % nodes == node,
            Self::Even(_) | Self::Skewed(_) => true,
        }
    }

    /// The node's part of the load while it offers any.
    fn part(self, node: usize, nodes: usize) -> f64 {
        match self {
            Self::Even(times) | Self::Herd(times) => times / nodes as f64,
            Self::Shift(times) => times,
            Self::Skewed(times) => {
                let total: f64 = (1..=nodes).map(|node| 1.0 / node as f64).sum();
                times / (node + 1) as f64 / total
            }
        }
    }

    fn plan(self, world: &mut World, key: u32, rate: f64, seconds: u64, seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed ^ u64::from(key) << 32 ^ 0x5eed);
        let nodes = world.nodes.len();
        for node in 0..nodes {
            let per_second = rate * self.part(node, nodes);
            for at_us in poisson(&mut rng, LOAD_US, LOAD_US + seconds * SECOND_US, per_second) {
                if self.offers((at_us - LOAD_US) / SECOND_US, node, nodes) {
                    world.arrive(at_us, node, key);
                }
            }
        }
    }
}

fn api(rate: u64, burst: u64) -> Limit {
    Limit::new("api", Quota::per_second(rate).burst(burst))
}

fn judge(world: &World, limit: &Limit, key: u32) -> Figures {
    let quota = limit.quota();
    figures(&world.decided, key, quota.tokens_per_second(), quota.burst_tokens() as f64)
}

fn run(setup: &Setup, load: Load, seconds: u64) -> (World, Figures) {
    let mut world = World::new(setup.clone());
    load.plan(&mut world, 1, setup.limit.quota().tokens_per_second(), seconds, setup.seed);
    world.run_until(LOAD_US + seconds * SECOND_US);
    let figures = judge(&world, &setup.limit, 1);
    (world, figures)
}

/// A random limit, cluster and network, and a load for it.
fn random_setup(seed: u64, credit: u32) -> (Setup, Load) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = 1 << rng.u32(0..13);
    let burst = (rate * rng.u64(1..30) / 10).max(1);
    // A node that was cut off for long would live on its share, which the bound counts apart.
    let limit = api(rate, burst)
        .outage(OutagePolicy::Closed)
        .credit(credit)
        .sync_interval(Duration::from_millis(rng.u64(10..300)));
    let mut setup = Setup::new(limit, rng.usize(1..12), seed);
    setup.rtt_us = 10_u64.pow(rng.u32(2..5));
    setup.loss = rng.choice([0.0, 0.02, 0.1]).unwrap_or(0.0);
    setup.duplicated = rng.choice([0.0, 0.1]).unwrap_or(0.0);
    let load = rng.choice(SCENARIOS).unwrap_or(Load::Even(1.0));
    (setup, load)
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (setup, load) = random_setup(7, 1);
    let runs = [run(&setup, load, 5), run(&setup, load, 5)];
    let [first, second] = runs.map(|(world, _)| format!("{:?}", world.decided));
    assert_eq!(first, second);
}

#[test]
fn every_scenario_stays_within_a_percent_of_the_ideal() {
    for nodes in [4, 16] {
        for load in SCENARIOS {
            for seed in 1..=3 {
                let (_, figures) = run(&Setup::new(api(1000, 1000), nodes, seed), load, 10);
                let case = format!("{load:?}, {nodes} nodes, seed {seed}: {figures:?}");
                assert!((99.0..=100.5).contains(&figures.vs_ideal_pct), "{case}");
                assert!(figures.excess_tokens <= nodes as f64 + ERROR, "{case}");
            }
        }
    }
}

#[test]
fn a_key_under_steady_overload_is_synced_little_more_than_once_a_tick_and_node() {
    for nodes in [4, 16] {
        let (world, _) = run(&Setup::new(api(1000, 1000), nodes, 1), Load::Even(3.0), 10);
        let synced: u64 = world.nodes.iter().map(|node| node.keys_synced).sum();
        let per_tick = synced as f64 / nodes as f64 / (10.0 * 20.0);
        assert!(per_tick <= 1.3, "{nodes} nodes: {per_tick}");
    }
}

#[test]
fn every_token_is_charged_once_whatever_the_network_does() {
    for seed in 0..60 {
        let (mut setup, load) = random_setup(seed, 1);
        setup.loss = 0.1;
        setup.duplicated = 0.1;
        let mut world = World::new(setup.clone());
        for key in 0..5 {
            load.plan(&mut world, key, setup.limit.quota().tokens_per_second(), 5, seed);
        }
        world.run_until(LOAD_US + 5 * SECOND_US);
        world.leave();
        world.run_until(LOAD_US + 30 * SECOND_US);
        let settled = world.nodes.iter().all(|node| node.engine.is_settled());
        assert!(settled, "seed {seed}: {setup:?} never settled");
        let spent: u64 = world.nodes.iter().map(|node| node.spent).sum();
        assert_eq!(world.charged() as u64, spent, "seed {seed}: {setup:?}");
        assert_eq!(world.losses_of_memory, 0, "seed {seed}");
    }
}

#[test]
fn without_credit_nothing_is_admitted_in_excess_whatever_the_network_does() {
    for seed in 0..150 {
        let (setup, load) = random_setup(seed, 0);
        let (_, figures) = run(&setup, load, 6);
        assert!(figures.excess_tokens <= ERROR, "seed {seed}: {setup:?} {load:?}: {figures:?}");
    }
}

#[test]
fn with_credit_the_excess_is_at_most_the_credit_of_all_nodes() {
    for seed in 0..150 {
        let credit = 1 + (seed % 4) as u32;
        let (setup, load) = random_setup(seed, credit);
        let (_, figures) = run(&setup, load, 6);
        let bound = f64::from(credit) * setup.nodes as f64;
        let case = format!("seed {seed}: {setup:?} {load:?}: {figures:?}");
        assert!(figures.excess_tokens <= bound + ERROR, "{case}");
    }
}

#[test]
fn nodes_that_die_take_their_leases_with_them_and_their_rate_returns() {
    let mut setup = Setup::new(api(1000, 1000), 4, 3);
    setup.limit = setup.limit.credit(0);
    let mut world = World::new(setup.clone());
    Load::Even(3.0).plan(&mut world, 1, 1000.0, 10, 3);
    world.run_until(LOAD_US + 3 * SECOND_US);
    world.kill(0);
    world.kill(1);
    world.run_until(LOAD_US + 10 * SECOND_US);
    let figures = judge(&world, &setup.limit, 1);
    assert!(figures.excess_tokens <= ERROR, "{figures:?}");
    // Two lease epochs after the deaths the others have the whole rate.
    let later = LOAD_US + 6 * SECOND_US;
    let admitted = world.decided.iter().filter(|one| one.allowed && one.at_us >= later).count();
    assert!((3900..=4020).contains(&admitted), "admitted {admitted} in 4 s");
}

#[test]
fn an_outage_is_lived_through_on_shares_and_nobody_gets_a_second_burst() {
    for seed in 0..40 {
        let nodes = 2 + seed as usize % 7;
        let setup = Setup::new(api(1000, 1000), nodes, seed);
        let mut world = World::new(setup);
        Load::Even(3.0).plan(&mut world, 1, 1000.0, 10, seed);
        // Anywhere in a lease epoch.
        let from_us = LOAD_US + 3 * SECOND_US + seed * 25_000;
        let until_us = from_us + 3 * SECOND_US;
        world.run_until(from_us);
        world.hung_until_us = until_us;
        world.run_until(LOAD_US + 10 * SECOND_US);
        let admitted = |from_us: u64, until_us: u64| {
            let within = |at_us: u64| at_us >= from_us && at_us < until_us;
            world.decided.iter().filter(|one| one.allowed && within(one.at_us)).count() as f64
        };
        let during = admitted(from_us, until_us) / 3.0;
        let after = admitted(until_us, until_us + SECOND_US);
        let case = format!("seed {seed}, {nodes} nodes: {during}/s during, {after} after");
        assert!(during <= 1000.0 * (1.0 + 1.0 / nodes as f64), "{case}");
        assert!(during >= 850.0, "{case}");
        assert!(after <= 1000.0 + nodes as f64, "{case}");
        assert!(after >= 800.0, "{case}");
    }
}

#[test]
fn a_closed_limit_admits_nothing_in_an_outage_once_its_leases_have_ended() {
    let setup = Setup::new(api(1000, 1000).outage(OutagePolicy::Closed), 4, 5);
    let mut world = World::new(setup);
    Load::Even(3.0).plan(&mut world, 1, 1000.0, 8, 5);
    world.run_until(LOAD_US + 2 * SECOND_US);
    world.hung_until_us = LOAD_US + 8 * SECOND_US;
    world.run_until(LOAD_US + 8 * SECOND_US);
    let later = LOAD_US + 5 * SECOND_US;
    assert!(!world.decided.iter().any(|one| one.allowed && one.at_us >= later));
}

#[test]
fn a_store_that_loses_its_memory_each_second_gives_no_fresh_burst() {
    for seed in 0..20 {
        let nodes = 2 + seed as usize % 7;
        let setup = Setup::new(api(1000, 1000), nodes, seed);
        let mut world = World::new(setup.clone());
        Load::Even(3.0).plan(&mut world, 1, 1000.0, 8, seed);
        for second in 2..8 {
            world.run_until(LOAD_US + second * SECOND_US + seed * 7_000);
            world.store = Model::default();
        }
        world.run_until(LOAD_US + 8 * SECOND_US);
        let figures = judge(&world, &setup.limit, 1);
        let case = format!("seed {seed}, {nodes} nodes: {figures:?}");
        assert!(world.losses_of_memory > 0, "{case}");
        assert!(figures.excess_tokens <= nodes as f64 + ERROR, "{case}");
        assert!(figures.admitted >= 5000, "{case}");
    }
}

#[test]
fn nodes_that_join_share_the_limit_at_once() {
    let setup = Setup::new(api(1000, 1000).credit(0), 2, 9);
    let mut world = World::new(setup.clone());
    Load::Even(3.0).plan(&mut world, 1, 1000.0, 3, 9);
    world.run_until(LOAD_US + 3 * SECOND_US);
    for _ in 0..4 {
        world.add_node();
    }
    let mut rng = fastrand::Rng::with_seed(9);
    for node in 0..6 {
        let from_us = LOAD_US + 3 * SECOND_US;
        for at_us in poisson(&mut rng, from_us, from_us + 4 * SECOND_US, 500.0) {
            world.arrive(at_us, node, 1);
        }
    }
    world.run_until(LOAD_US + 7 * SECOND_US);
    let figures = judge(&world, &setup.limit, 1);
    assert!(figures.excess_tokens <= ERROR, "{figures:?}");
    assert!(figures.vs_ideal_pct >= 98.5, "{figures:?}");
}

#[test]
fn a_node_that_is_born_in_an_outage_and_calls_first_gives_nobody_a_second_burst() {
    for seed in 0..20 {
        let setup = Setup::new(api(1000, 1000).credit(0), 4, seed);
        let mut world = World::new(setup);
        Load::Even(3.0).plan(&mut world, 1, 1000.0, 10, seed);
        let from_us = LOAD_US + 3 * SECOND_US + seed * 50_000;
        let until_us = from_us + 3 * SECOND_US;
        world.run_until(from_us);
        world.hung_until_us = until_us;
        world.run_until(until_us - 100);
        world.hung_until_us = 0;
        // Its first calls are answered before those that the others sent into the outage.
        world.add_node();
        for request in 0..20 {
            world.arrive(until_us - 90 + request, 4, 1);
        }
        world.run_until(LOAD_US + 10 * SECOND_US);
        let within = |at_us: u64| at_us >= until_us && at_us < until_us + SECOND_US;
        let after = world.decided.iter().filter(|one| one.allowed && within(one.at_us)).count();
        assert!(after <= 1000, "seed {seed}: {after} after");
    }
}

#[test]
fn a_large_cost_that_was_denied_is_there_when_it_comes_again() {
    let limit = Limit::new("api", Quota::per_hour(100));
    let mut world = World::new(Setup::new(limit, 3, 1));
    world.arrive_costing(LOAD_US, 0, 1, 10);
    world.arrive_costing(LOAD_US + 20_000, 0, 1, 10);
    world.run_until(LOAD_US + SECOND_US);
    let allowed: Vec<bool> = world.decided.iter().map(|one| one.allowed).collect();
    assert_eq!(allowed, [false, true]);
}
