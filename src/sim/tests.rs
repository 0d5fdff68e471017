//! The engine in its world: what a node promises, whatever happens around it.

use std::time::Duration;

use super::faults::{Fault, Planned, excess_bound};
use super::figures::{Decided, Figures};
use super::run;
use super::setup::{Form, Network, Setup};
use super::sweep::SCENARIOS;
use super::workload::{Arrival, Scenario, Workload};
use super::world::World;
use crate::limit::{Limit, OutagePolicy};
use crate::quota::Quota;

mod accuracy;
mod bursts;
mod closed_keys;
mod earlier_protocol;
mod far;
mod faults;
mod lost_tokens;
mod one_node;
mod slots;

const SECOND_US: u64 = 1_000_000;
/// Floating-point error of the judge, in tokens.
const ERROR: f64 = 1e-6;

fn load(setup: &Setup, scenario: Scenario, seconds: f64) -> Workload {
    let rate_per_second = setup.limit.quota().tokens_per_second();
    let Setup { nodes, seed, .. } = *setup;
    Workload { scenario, nodes, keys: 1, rate_per_second, load: None, seconds, seed }
}

fn audited(limit: Limit, nodes: u16, seed: u64) -> Setup {
    Setup { audit: true, lanes: 2, ..Setup::new(limit, nodes, seed) }
}

fn api(rate: u64, burst: u64) -> Limit {
    Limit::new("api", Quota::per_second(rate).burst(burst))
}

/// A world that has lived through a scenario on one key.
fn lived(setup: &Setup, scenario: Scenario, seconds: f64, faults: &[Planned]) -> World {
    lived_under(setup, &load(setup, scenario, seconds), faults)
}

/// A world that has lived through a load on one key.
fn lived_under(setup: &Setup, load: &Workload, faults: &[Planned]) -> World {
    let arrivals = load.arrivals();
    let mut world = World::for_arrivals(setup.clone(), &arrivals).unwrap();
    for planned in faults {
        world.plan_fault(planned);
    }
    play(&mut world, &arrivals, (load.seconds * 1e6) as u64);
    world
}

/// Plays a load and looks at the ledger.
fn play(world: &mut World, arrivals: &[Arrival], until_us: u64) {
    world.play(arrivals, until_us);
    assert_eq!(world.ledger.discrepancy, None);
}

fn figures(world: World) -> Figures {
    world.judge.figures(1.0)
}

/// Tokens admitted within a stretch of the load's time.
fn admitted(world: &World, from_us: u64, until_us: u64) -> f64 {
    let within = |one: &&Decided| one.allowed && (from_us..until_us).contains(&one.at_us);
    world.decided.iter().filter(within).count() as f64
}

fn at(at_us: u64, fault: Fault) -> Planned {
    Planned { at_us, fault }
}

fn request(at_us: u64, node: u16, cost: u32) -> Arrival {
    Arrival { at_us, node, key: 0, cost }
}

/// A random limit, cluster and network, and a load for it.
fn random_setup(seed: u64, credit: u32) -> (Setup, Scenario) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = 1 << rng.u32(0..13);
    let burst = (rate * rng.u64(1..30) / 10).max(1);
    // A node that was cut off for long would live on its share, which the bound counts apart.
    let limit = api(rate, burst)
        .outage(OutagePolicy::Closed)
        .credit(credit)
        .sync_interval(Duration::from_millis(rng.u64(10..300)));
    let mut setup = audited(limit, rng.u16(1..12), seed);
    let loss = rng.choice([0.0, 0.02, 0.1]).unwrap_or(0.0);
    setup.network = Network {
        request_loss: loss,
        reply_loss: loss,
        duplicated: rng.choice([0.0, 0.1]).unwrap_or(0.0),
        timeout: Duration::from_millis(100),
        ..Network::new(Duration::from_micros(10_u64.pow(rng.u32(2..5))))
    };
    setup.clock_error_ppm = rng.choice([0, 400]).unwrap_or(0);
    (setup, rng.choice(SCENARIOS).unwrap_or(Scenario::Under))
}

#[test]
fn same_seed_gives_the_same_run() {
    let (setup, scenario) = random_setup(7, 1);
    let [first, second] =
        [(), ()].map(|()| run(&setup, &load(&setup, scenario, 5.0).arrivals(), &[], 5.0));
    assert_eq!(first, second);
    assert!(first.is_ok_and(|outcome| outcome.figures.admitted > 0));
}

#[test]
fn every_scenario_stays_within_a_percent_of_the_ideal() {
    for nodes in [4, 16] {
        for scenario in SCENARIOS {
            for seed in 1..=3 {
                let setup = Setup::new(api(1000, 1000), nodes, seed);
                let figures = figures(lived(&setup, scenario, 10.0, &[]));
                let case = format!(
                    "{scenario:?}, {nodes} nodes, seed {seed}: {} {}",
                    figures.admitted_vs_ideal_pct, figures.excess_tokens
                );
                assert!((99.0..=100.5).contains(&figures.admitted_vs_ideal_pct), "{case}");
                assert!(figures.excess_tokens <= f64::from(nodes) + ERROR, "{case}");
            }
        }
    }
}

#[test]
fn key_under_steady_overload_is_synced_little_more_than_once_a_tick_and_node() {
    for nodes in [4, 16] {
        let setup = Setup::new(api(1000, 1000), nodes, 1);
        let world = lived(&setup, Scenario::OverUniform, 10.0, &[]);
        let synced = world.traffic.keys_synced as f64;
        let per_tick = synced / f64::from(nodes) / (10.0 * 20.0);
        assert!(per_tick <= 1.3, "{nodes} nodes: {per_tick}");
    }
}

#[test]
fn every_token_is_charged_once_whatever_the_network_does() {
    for seed in 0..60 {
        let (mut setup, scenario) = random_setup(seed, 1);
        setup.network.request_loss = 0.1;
        setup.network.reply_loss = 0.1;
        setup.network.duplicated = 0.1;
        let workload = Workload { keys: 5, ..load(&setup, scenario, 5.0) };
        let mut world = World::new(setup.clone()).unwrap();
        play(&mut world, &workload.arrivals(), 5 * SECOND_US);
        world.leave();
        world.run_until(world.now_us + 25 * SECOND_US);
        let has_reported_all = world.nodes.iter().all(|node| node.engine.has_reported_all());
        assert!(has_reported_all, "seed {seed}: {setup:?} has not reported all");
        let spent: u64 = world.nodes.iter().map(|node| node.spent).sum();
        assert_eq!(world.store.charged(), spent, "seed {seed}: {setup:?}");
        world.audit_settled();
        assert_eq!(world.ledger.discrepancy, None, "seed {seed}: {setup:?}");
        assert_eq!(world.traffic.losses_of_memory, 0, "seed {seed}");
    }
}

#[test]
fn limit_counts_no_node_that_has_left_and_none_that_died_six_seconds_ago() {
    let mut world = World::new(audited(api(100, 100), 3, 1)).unwrap();
    world.run_until(world.now_us + SECOND_US);
    assert_eq!(world.store.limit_nodes("api"), 3);
    world.plan_fault(&at(SECOND_US, Fault::NodeDies { place: 2 }));
    world.run_until(world.now_us + 3 * SECOND_US);
    assert_eq!(world.store.limit_nodes("api"), 3, "it may be held up");
    world.run_until(world.now_us + 4 * SECOND_US);
    assert_eq!(world.store.limit_nodes("api"), 2);
    world.leave();
    world.run_until(world.now_us + SECOND_US / 10);
    assert_eq!(world.store.limit_nodes("api"), 0);
}

#[test]
fn without_credit_nothing_is_admitted_in_excess_whatever_the_network_does() {
    for seed in 0..150 {
        let (setup, scenario) = random_setup(seed, 0);
        let excess = lived(&setup, scenario, 6.0, &[]).judge.excess_tokens();
        assert!(excess <= ERROR, "seed {seed}: {setup:?} {scenario:?}: {excess}");
    }
}

#[test]
fn callers_that_ask_when_unsure_exceed_nothing() {
    for seed in 0..100 {
        let (mut setup, scenario) = random_setup(seed, 1);
        setup.form = Form::Async;
        setup.network = Network::new(setup.network.rtt);
        let excess = lived(&setup, scenario, 6.0, &[]).judge.excess_tokens();
        assert!(excess <= ERROR, "seed {seed}: {setup:?} {scenario:?}: {excess}");
    }
}

#[test]
fn with_credit_the_excess_is_at_most_the_credit_of_all_nodes() {
    for seed in 0..150 {
        let credit = 1 + (seed % 4) as u32;
        let (setup, scenario) = random_setup(seed, credit);
        let excess = lived(&setup, scenario, 6.0, &[]).judge.excess_tokens();
        let bound = f64::from(credit) * f64::from(setup.nodes);
        assert!(excess <= bound + ERROR, "seed {seed}: {setup:?} {scenario:?}: {excess}");
    }
}

#[test]
fn small_limit_on_many_nodes_exceeds_by_one_token_a_node_and_a_strict_one_by_none() {
    let login = || Limit::new("login", Quota::per_second(5).burst(5));
    let mut seen = 0.0_f64;
    for scenario in [Scenario::Herd, Scenario::OverUniform, Scenario::Under] {
        for seed in 1..=5 {
            let excess =
                |limit| lived(&audited(limit, 20, seed), scenario, 20.0, &[]).judge.excess_tokens();
            let case = format!("{scenario:?}, seed {seed}");
            assert!(excess(login().strict()) <= ERROR, "{case}");
            let by_default = excess(login());
            assert!(by_default <= 20.0 + ERROR, "{case}: {by_default}");
            seen = seen.max(by_default);
        }
    }
    assert!(seen > 0.0, "no credit was ever used");
}

#[test]
fn waiting_callers_get_most_of_a_strict_limit() {
    let limit = Limit::new("login", Quota::per_second(5).burst(5));
    for seed in 1..=5 {
        let setup = Setup { form: Form::Async, ..audited(limit.clone(), 20, seed) };
        let figures = figures(lived(&setup, Scenario::Under, 60.0, &[]));
        let case = format!("seed {seed}: {}", figures.admitted_vs_ideal_pct);
        assert!(figures.excess_tokens <= ERROR, "{case}");
        assert!(figures.admitted_vs_ideal_pct >= 85.0, "{case}");
    }
}

#[test]
fn nodes_that_die_take_their_leases_with_them_and_their_rate_returns() {
    for seed in 0..20 {
        let setup = audited(api(1000, 1000).credit(0), 4, seed);
        // Anywhere in a lease epoch.
        let at_us = 3 * SECOND_US + seed * 50_000;
        let deaths = [0, 1].map(|place| at(at_us, Fault::NodeDies { place }));
        let world = lived(&setup, Scenario::OverUniform, 10.0, &deaths);
        let excess = world.judge.excess_tokens();
        assert!(excess <= ERROR, "seed {seed}: {excess}");
        // Two lease epochs after the deaths the others have the whole rate.
        let later = admitted(&world, 6 * SECOND_US, 10 * SECOND_US);
        assert!((3900.0..=4020.0).contains(&later), "seed {seed}: admitted {later} in 4 s");
    }
}

#[test]
fn outage_is_lived_through_on_shares_and_nobody_gets_a_second_burst() {
    let mut least = Vec::new();
    for seed in 0..40 {
        let nodes = 2 + seed as u16 % 7;
        let setup = audited(api(1000, 1000), nodes, seed);
        // Anywhere in a lease epoch.
        let from_us = 3 * SECOND_US + seed * 25_000;
        let for_us = 3 * SECOND_US;
        let until_us = from_us + for_us;
        let outage = [at(from_us, Fault::StoreHangs { for_us })];
        let world = lived(&setup, Scenario::OverUniform, 10.0, &outage);
        let during = admitted(&world, from_us, until_us) / 3.0;
        let after = admitted(&world, until_us, until_us + SECOND_US);
        let case = format!("seed {seed}, {nodes} nodes: {during}/s during, {after} after");
        assert!(during <= 1000.0 * (1.0 + 1.0 / f64::from(nodes)), "{case}");
        // Where the outage begins as an epoch ends, shares wait for an epoch in which no node has a lease.
        assert!(during >= 600.0, "{case}");
        least.push(during);
        // What could not be admitted in the outage is there after it.
        let missed = 3.0 * (1000.0 - during).max(0.0);
        assert!(after <= 1000.0 + f64::from(nodes) + missed, "{case}");
        assert!(after >= 800.0, "{case}");
    }
    least.sort_unstable_by(f64::total_cmp);
    assert!(least[4] >= 850.0, "one in ten waits for an epoch: {least:?}");
}

#[test]
fn closed_limit_admits_nothing_in_an_outage_once_its_leases_have_ended() {
    let setup = audited(api(1000, 1000).outage(OutagePolicy::Closed), 4, 5);
    let outage = [at(2 * SECOND_US, Fault::StoreHangs { for_us: 6 * SECOND_US })];
    let world = lived(&setup, Scenario::OverUniform, 8.0, &outage);
    assert!(admitted(&world, 5 * SECOND_US, 8 * SECOND_US) < 1.0);
}

#[test]
fn store_that_loses_its_memory_each_second_gives_no_fresh_burst() {
    for seed in 0..20 {
        let nodes = 2 + seed as u16 % 7;
        let setup = audited(api(1000, 1000), nodes, seed);
        let losses: Vec<Planned> = (2..8)
            .map(|second| at(second * SECOND_US + seed * 7_000, Fault::StoreForgets))
            .collect();
        let world = lived(&setup, Scenario::OverUniform, 8.0, &losses);
        let excess = world.judge.excess_tokens();
        let case = format!("seed {seed}, {nodes} nodes: {excess}");
        assert!(world.traffic.losses_of_memory > 0, "{case}");
        assert!(excess <= f64::from(nodes) + ERROR, "{case}");
        let all = admitted(&world, 0, 8 * SECOND_US);
        assert!(all >= 5000.0, "{case}: admitted {all}");
    }
}

#[test]
fn nodes_that_join_share_the_limit_at_once() {
    let setup = audited(api(1000, 1000).credit(0), 2, 9);
    let mut world = World::new(setup.clone()).unwrap();
    let all = Setup { nodes: 6, ..setup };
    let joins = (0..4).map(|_| at(3 * SECOND_US, Fault::NodeJoins));
    joins.for_each(|join| world.plan_fault(&join));
    let mut arrivals = load(&all, Scenario::OverUniform, 7.0).arrivals();
    for arrival in &mut arrivals {
        // Until the others are there, two take everything.
        if arrival.at_us <= 3 * SECOND_US {
            arrival.node %= 2;
        }
    }
    play(&mut world, &arrivals, 7 * SECOND_US);
    let figures = figures(world);
    assert!(figures.excess_tokens <= ERROR, "{}", figures.excess_tokens);
    assert!(figures.admitted_vs_ideal_pct >= 98.5, "{}", figures.admitted_vs_ideal_pct);
}

#[test]
fn node_that_is_born_in_an_outage_and_calls_first_gives_nobody_a_second_burst() {
    for seed in 0..20 {
        let setup = audited(api(1000, 1000).credit(0), 4, seed);
        let from_us = 3 * SECOND_US + seed * 50_000;
        let until_us = from_us + 3 * SECOND_US;
        let mut world = World::new(setup.clone()).unwrap();
        // Its first calls are answered before those that the others sent into the outage.
        world.plan_fault(&at(from_us, Fault::StoreHangs { for_us: until_us - 100 - from_us }));
        world.plan_fault(&at(until_us - 100, Fault::NodeJoins));
        let mut arrivals = load(&setup, Scenario::OverUniform, 10.0).arrivals();
        arrivals.extend((0..20).map(|late| request(until_us - 90 + late, 4, 1)));
        arrivals.sort_by_key(|arrival| arrival.at_us);
        play(&mut world, &arrivals, 10 * SECOND_US);
        let after = admitted(&world, until_us, until_us + SECOND_US);
        assert!(after <= 1000.0, "seed {seed}: {after} after");
    }
}

#[test]
fn large_cost_that_was_denied_is_there_when_it_comes_again() {
    let mut world = World::new(audited(Limit::new("api", Quota::per_hour(100)), 3, 1)).unwrap();
    play(&mut world, &[request(0, 0, 20), request(20_000, 0, 20)], SECOND_US);
    let allowed: Vec<bool> = world.decided.iter().map(|one| one.allowed).collect();
    assert_eq!(allowed, [false, true]);
}

#[test]
fn large_cost_is_there_at_once_for_who_waits() {
    let limit = Limit::new("api", Quota::per_hour(100));
    let mut world = World::new(Setup { form: Form::Async, ..audited(limit, 3, 1) }).unwrap();
    play(&mut world, &[request(0, 0, 60), request(0, 1, 60)], SECOND_US);
    let mut allowed: Vec<bool> = world.decided.iter().map(|one| one.allowed).collect();
    allowed.sort_unstable();
    assert_eq!(allowed, [false, true]);
    assert!(world.decided.iter().all(|one| one.sure && one.waited));
}

/// Callers that wait for the store, on four nodes.
fn waiting(limit: Limit, seed: u64) -> Setup {
    Setup { form: Form::Async, ..audited(limit, 4, seed) }
}

#[test]
fn quiet_key_with_waiting_callers_is_synced_about_twice_a_request() {
    let setup = waiting(Limit::new("login", Quota::per_minute(5)), 1);
    let arrivals: Vec<_> =
        (1..=40).map(|count| request(count * 15 * SECOND_US, (count % 4) as u16, 1)).collect();
    let mut world = World::new(setup).unwrap();
    play(&mut world, &arrivals, 620 * SECOND_US);
    assert!((40..=84).contains(&world.traffic.keys_synced), "{}", world.traffic.keys_synced);
    assert!(world.decided.iter().all(|one| one.allowed));
}

#[test]
fn full_bucket_that_a_waiting_caller_spends_from_takes_in_refill_at_once() {
    for seed in 0..8 {
        let setup = waiting(Limit::new("login", Quota::per_minute(5)), seed);
        // One of five tokens, and all five when it has flowed in again.
        let mut arrivals = vec![request(SECOND_US, 0, 1)];
        arrivals.extend([0, 1, 2, 3, 0].map(|node| request(13 * SECOND_US + 20_000, node, 1)));
        let mut world = World::new(setup).unwrap();
        play(&mut world, &arrivals, 15 * SECOND_US);
        let denied: Vec<_> = world.decided.iter().filter(|one| !one.allowed).collect();
        assert!(denied.is_empty(), "seed {seed}: {denied:?}");
    }
}

/// Keys synced while callers ask one of four nodes for tokens, each at a rate a second and for some seconds.
fn synced(limit: Limit, loads: &[(u64, u64)]) -> u64 {
    let (mut arrivals, mut from_us) = (Vec::new(), SECOND_US);
    for &(per_second, seconds) in loads {
        let asked = (0..per_second * seconds).map(|count| count * SECOND_US / per_second);
        arrivals.extend(asked.map(|us| request(from_us + us, 0, 1)));
        from_us += seconds * SECOND_US;
    }
    let mut world = World::new(waiting(limit, 1)).unwrap();
    play(&mut world, &arrivals, from_us);
    world.traffic.keys_synced
}

#[test]
fn busy_full_bucket_with_waiting_callers_is_synced_by_schedule() {
    // 2037 where each report is followed by another at once.
    let large = synced(api(1_000_000, 20_000), &[(20_000, 4)]);
    assert!(large < 300, "{large}");
    // The same: 127.
    let slow = synced(api(50_000, 50_000), &[(2000, 6)]);
    assert!(slow < 60, "{slow}");
}

#[test]
fn client_that_begins_with_a_large_cost_gets_all_that_a_full_bucket_has() {
    for (seed, after_us) in (0..8).flat_map(|seed| (0..20).map(move |step| (seed, step * 100))) {
        let mut arrivals = vec![request(SECOND_US, 0, 10)];
        arrivals.extend([300; 3].map(|us| request(SECOND_US + us, 0, 1)));
        arrivals.push(request(SECOND_US + 300 + after_us, 0, 1));
        let mut world = World::new(waiting(api(10, 20), seed)).unwrap();
        play(&mut world, &arrivals, 2 * SECOND_US);
        let denied: Vec<_> = world.decided.iter().filter(|one| !one.allowed).collect();
        assert!(denied.is_empty(), "seed {seed}, {after_us} us after: {denied:?}");
    }
}

#[test]
fn paused_node_goes_on_where_it_was_and_admits_nothing_extra() {
    for seed in 0..20 {
        let setup = audited(api(1000, 300).credit(0), 4, seed);
        let pauses: Vec<Planned> = (1..8)
            .map(|second| {
                let (place, for_us) = ((second % 4) as u16, second * 400_000);
                at(second * SECOND_US, Fault::NodePauses { place, for_us })
            })
            .collect();
        let world = lived(&setup, Scenario::OverUniform, 10.0, &pauses);
        assert!(world.judge.excess_tokens() <= ERROR, "seed {seed}");
    }
}

#[test]
fn node_and_store_reckon_what_is_lent_alike_after_a_restore_that_travelled_long() {
    for seed in 1..=4 {
        let setup = audited(api(10_000, 10_000), 4, seed);
        let faults = [
            at(2 * SECOND_US, Fault::StoreForgets),
            at(2_016_000, Fault::StoreHangs { for_us: 95_000 }),
        ];
        let world = lived(&setup, Scenario::OverUniform, 16.0, &faults);
        // The last five seconds: a part of the refill would be missing in each.
        let later = admitted(&world, 11 * SECOND_US, 16 * SECOND_US);
        assert!(later >= 0.98 * 50_000.0, "seed {seed}: {later} in 5 s");
    }
}

/// The last digit of a key names its limit. First each limit has a tenth of the keys; then the last limit has all.
#[test]
fn nodes_have_room_for_each_key_of_each_limit() {
    let limit = |place| Limit::new(format!("limit-{place}"), Quota::per_second(10));
    let setup = Setup { others: (1..10).map(limit).collect(), ..Setup::new(limit(0), 1, 1) };
    for step in [1, 10] {
        let arrivals: Vec<Arrival> = (0..30_000)
            .map(|index| Arrival {
                at_us: index * 20,
                node: 0,
                key: index as u32 * step + 9,
                cost: 1,
            })
            .collect();
        let outcome = run(&setup, &arrivals, &[], 1.0).unwrap();
        // A key for which there is no room would end the run.
        assert_eq!(outcome.figures.admitted, if step == 1 { 3000 } else { 0 });
    }
}
