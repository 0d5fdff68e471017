//! Leaky buckets that nodes share.

use super::*;
use crate::algorithm::LeakyBucket;

const TOKEN_US: u64 = 20_000;

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
        // Eleven begin in the time of ten slots, but for what clocks differ by: a round trip, at most.
        assert!(starts.windows(12).all(|twelve| twelve[11] - twelve[0] >= 10 * TOKEN_US - 1500));
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
            // Nodes know to a round trip and a half when slots begin.
            assert!(seen.excess_tokens <= 1.5 * 1.5 / 20.0, "{case}: {}", seen.excess_tokens);
        }
    }
}

#[test]
fn credit_of_each_node_is_all_that_begins_too_early_where_nobody_waits() {
    for (credit, most) in [(0, 0.12), (1, 4.12)] {
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
    assert!(seen > most / 4.0 && seen <= most + 0.12, "{seen} of {most}");
}

/// Each of four nodes admits a sixteenth by its share, since it is built for so many.
#[test]
fn share_of_each_node_goes_on_while_the_store_is_gone() {
    let setup = waiting(queue(24), 4, 1);
    let gone = at(5 * SECOND_US, Fault::StoreHangs { for_us: 8 * SECOND_US });
    let world = lived(&setup, Scenario::OverUniform, 20.0, &[gone]);
    let quiet = admitted(&world, SECOND_US, 5 * SECOND_US) / 4.0;
    let shares = admitted(&world, 7 * SECOND_US, 12 * SECOND_US) / 5.0;
    let after = admitted(&world, 15 * SECOND_US, 20 * SECOND_US) / 5.0;
    println!("{quiet} a second, then {shares}, then {after}");
    assert!((48.0..=56.0).contains(&quiet) && (45.0..=52.0).contains(&after));
    assert!((8.0..=50.0).contains(&shares));
    let closed = waiting(queue(24).outage(OutagePolicy::Closed), 4, 1);
    let world = lived(&closed, Scenario::OverUniform, 20.0, &[gone]);
    assert!(admitted(&world, 7 * SECOND_US, 12 * SECOND_US) < 1.0);
}

#[test]
fn same_seed_gives_the_same_run_of_a_leaky_bucket() {
    let setup = Setup { clock_error_ppm: 200, ..waiting(queue(24), 6, 9) };
    let arrivals = load(&setup, Scenario::Herd, 5.0).arrivals();
    let [first, second] = [(), ()].map(|()| run(&setup, &arrivals, &[], 5.0));
    assert_eq!(first, second);
}
