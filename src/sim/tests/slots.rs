//! Leaky buckets that nodes share.

use super::*;
use crate::algorithm::LeakyBucket;

const TOKEN_US: u64 = 20_000;
/// Nodes know to a round trip and a half when slots begin, and a round trip takes up to 1.5 ms: so many tokens.
const EARLY: f64 = 1.5 * 1500.0 / TOKEN_US as f64;

/// 50 a second, with a queue of so many slots.
fn queue(slots: u64) -> Limit {
    let longest = Duration::from_micros(slots * TOKEN_US);
    Limit::new("api", LeakyBucket::per_second(50).queue(longest))
}

fn waiting(limit: Limit, nodes: u16, seed: u64) -> Setup {
    Setup { form: Form::Async, ..audited(limit, nodes, seed) }
}

/// When requests began, in order.
fn starts(world: &World) -> Vec<u64> {
    let allowed = world.decided.iter().filter(|one| one.allowed);
    let mut starts: Vec<u64> = allowed.map(|one| one.at_us + one.delay_us).collect();
    starts.sort_unstable();
    starts
}

#[test]
fn saturated_nodes_begin_requests_on_one_grid() {
    for seed in 1..=3 {
        let setup = waiting(queue(24), 4, seed);
        let starts = starts(&lived(&setup, Scenario::OverUniform, 20.0, &[]));
        let gaps: Vec<u64> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let near = gaps.iter().filter(|gap| gap.abs_diff(TOKEN_US) <= TOKEN_US / 4).count();
        let mut histogram = [0; 11];
        for gap in &gaps {
            histogram[(gap * 5 / TOKEN_US).min(10) as usize] += 1;
        }
        println!(
            "seed {seed}: {near} of {} gaps near; by a fifth of a slot {histogram:?}",
            gaps.len()
        );
        assert!(gaps.len() > 950 && near * 10 >= gaps.len() * 9);
        // No more than eleven begin in the time of ten slots: but for a round trip and a half twelve take that of eleven.
        assert!(starts.windows(12).all(|twelve| twelve[11] - twelve[0] >= 11 * TOKEN_US - 1500));
    }
}

/// What nodes held passed unused when a herd had gone: twenty of them admitted 93%, and sixty 89%.
#[test]
fn queue_of_six_slots_for_each_node_gives_nearly_all_that_one_central_queue_does() {
    let few = [4, 20].into_iter().flat_map(|nodes| SCENARIOS.map(|scenario| (nodes, scenario)));
    for (nodes, scenario) in few.chain([(60, Scenario::Herd)]) {
        for seed in 1..=2 {
            let setup = waiting(queue(6 * u64::from(nodes)), nodes, seed);
            let seen = figures(lived(&setup, scenario, 20.0, &[]));
            let percent = seen.admitted_vs_ideal_pct;
            let case = format!("{scenario:?}, {nodes} nodes, seed {seed}: {percent:.1}%");
            assert!((95.0..=100.5).contains(&percent), "{case}");
            assert!(seen.excess_tokens <= EARLY, "{case}: {}", seen.excess_tokens);
        }
    }
}

#[test]
fn without_callers_who_wait_excess_is_one_credit_a_node() {
    for (credit, most) in [(0, EARLY), (1, 4.0 + EARLY)] {
        let setup = audited(queue(24).credit(credit), 4, 1);
        let seen = figures(lived(&setup, Scenario::Herd, 20.0, &[]));
        assert!(seen.excess_tokens <= most, "credit {credit}: {}", seen.excess_tokens);
        assert_eq!(
            seen.admitted > 0,
            credit > 0,
            "nobody asks the store for a caller: {}",
            seen.admitted
        );
    }
}

#[test]
fn store_that_forgets_gives_slots_again_within_the_bound() {
    let faults: Vec<Planned> =
        (1..=7).map(|round| at(round * 2_400_000, Fault::StoreForgets)).collect();
    let setup = waiting(queue(24), 4, 1);
    let seen = figures(lived(&setup, Scenario::OverUniform, 20.0, &faults)).excess_tokens;
    let most = excess_bound(&faults, &setup);
    assert!(seen > most / 4.0 && seen <= most + EARLY, "{seen} of {most}");
}

/// Each of four nodes admits a sixteenth by its share, since it is built for so many.
#[test]
fn outage_policy_decides_while_the_store_hangs() {
    let setup = waiting(queue(24), 4, 1);
    let gone = at(5 * SECOND_US, Fault::StoreHangs { for_us: 8 * SECOND_US });
    let world = lived(&setup, Scenario::OverUniform, 20.0, &[gone]);
    let quiet = admitted(&world, SECOND_US, 5 * SECOND_US) / 4.0;
    let shares = admitted(&world, 7 * SECOND_US, 12 * SECOND_US) / 5.0;
    let after = admitted(&world, 15 * SECOND_US, 20 * SECOND_US) / 5.0;
    println!("{quiet} a second, then {shares}, then {after}");
    assert!((48.0..=56.0).contains(&quiet) && (45.0..=52.0).contains(&after));
    assert!((12.0..=13.0).contains(&shares));
    let closed = waiting(queue(24).outage(OutagePolicy::Closed), 4, 1);
    let world = lived(&closed, Scenario::OverUniform, 20.0, &[gone]);
    assert!(admitted(&world, 7 * SECOND_US, 12 * SECOND_US) < 1.0);
}

/// A store that hung for a second was none of the bound's outages.
#[test]
fn call_without_an_answer_in_time_is_an_outage_of_a_leaky_bucket() {
    let share = waiting(queue(24), 4, 1);
    let closed = waiting(queue(24).outage(OutagePolicy::Closed), 4, 1);
    let lossy = |setup: &Setup| Setup {
        network: Network { reply_loss: 0.01, ..setup.network },
        ..setup.clone()
    };
    let hang = [at(5 * SECOND_US, Fault::StoreHangs { for_us: SECOND_US })];
    for (setup, faults) in [(lossy(&closed), &[][..]), (closed.clone(), &hang[..])] {
        let seen = figures(lived(&setup, Scenario::OverUniform, 20.0, faults)).excess_tokens;
        let most = excess_bound(faults, &setup);
        assert!(most.is_finite() && seen <= most + EARLY, "{seen} of {most}");
    }
    assert!(excess_bound(&[], &share).is_finite());
    assert!(
        excess_bound(&[], &lossy(&share)).is_infinite()
            && excess_bound(&hang, &share).is_infinite()
    );
}

#[test]
fn same_seed_gives_the_same_run_of_a_leaky_bucket() {
    let setup = Setup { clock_error_ppm: 200, ..waiting(queue(24), 6, 9) };
    let arrivals = load(&setup, Scenario::Herd, 5.0).arrivals();
    let [first, second] = [(), ()].map(|()| run(&setup, &arrivals, &[], 5.0));
    assert_eq!(first, second);
}

/// Each of two nodes asked for all that had room in the queue: together they were given 925 slots more than one queue
/// (seed 17).
#[test]
fn crowds_on_two_nodes_are_given_no_more_slots_than_the_bound_counts() {
    let limit = Limit::new("api", LeakyBucket::per_second(50).queue(Duration::from_secs(10)));
    let at_once =
        |at_us, count: u64| (0..count).map(move |one| request(at_us, (one % 2) as u16, 1));
    let rest = (1..4000).map(|one| request(100_000 + 7_000 * one, (one % 2) as u16, 1));
    let arrivals: Vec<Arrival> = at_once(0, 20).chain(at_once(20_000, 1200)).chain(rest).collect();
    for seed in [17, 118, 310] {
        let setup = waiting(limit.clone(), 2, seed);
        let faults = [at(60_000, Fault::StoreForgets)];
        let mut world = World::new(setup.clone()).unwrap();
        world.plan_fault(&faults[0]);
        play(&mut world, &arrivals, 30 * SECOND_US);
        let seen = figures(world).excess_tokens;
        let most = excess_bound(&faults, &setup);
        assert!(seen > most / 2.0 && seen <= most + EARLY, "seed {seed}: {seen} of {most}");
    }
}
