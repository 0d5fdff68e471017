//! Cases of keys that nodes are asked for seldom, and of a store that forgets: nodes know of a key what was true long ago, and some
//! of those that spent it do not know it any more.

use super::windows::random_windows;
use super::*;

/// Bursts of requests, each on one node, at times that are far apart beside the life of an account.
fn bursts(rng: &mut fastrand::Rng, setup: &Setup, until_us: u64) -> Vec<Arrival> {
    let tokens = setup.limit.quota().burst_tokens();
    let mut arrivals = Vec::new();
    for _ in 0..rng.u32(3..20) {
        let (node, key) = (rng.u16(0..setup.nodes), rng.u32(0..2));
        let (from_us, span_us) = (rng.u64(0..until_us), scaled(rng, 1e3, 3e6) as u64);
        let cost = rng.choice([1, 1, 1, (tokens / 10).clamp(1, 1000) as u32]).unwrap_or(1);
        let count = if rng.u8(0..3) == 0 { 1 } else { rng.u64(1..=(2 * tokens).min(800)) };
        arrivals.extend((0..count).map(|_| {
            let at_us = (from_us + rng.u64(0..span_us)).min(until_us - 1);
            Arrival { at_us, node, key, cost }
        }));
    }
    arrivals.sort_by_key(|arrival| arrival.at_us);
    arrivals
}

/// A bucket or a window that is full again within a minute, and two to six nodes. The store forgets up to three times.
fn seldom(seed: u64) -> Case {
    let mut case = Case::random(seed, false);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.nodes = rng.u16(2..=6);
    case.setup.limit = if rng.bool() {
        random_windows(&mut rng)
    } else {
        let tokens = scaled(&mut rng, 1.0, 2000.0) as u64;
        let fill_us = scaled(&mut rng, 3e5, 6e7);
        let quota = Quota::new(tokens, Duration::from_micros(fill_us as u64));
        Limit::new("search", quota).sync_interval(Duration::from_millis(rng.u64(10..200)))
    };
    let outage = rng.choice([OutagePolicy::Closed, OutagePolicy::Share]).unwrap_or_default();
    case.setup.limit = case.setup.limit.clone().credit(rng.u32(0..=2)).outage(outage);
    case.setup.network = Network::new(Duration::from_micros(scaled(&mut rng, 200.0, 4e4) as u64));
    case.until_us = 60_000_000;
    case.arrivals = bursts(&mut rng, &case.setup, case.until_us);
    let forgets = |_| Planned { at_us: rng.u64(0..case.until_us), fault: Fault::StoreForgets };
    case.faults = (0..fastrand::Rng::with_seed(seed).usize(1..=3)).map(forgets).collect();
    case
}

#[test]
fn keys_that_nodes_are_asked_for_seldom_keep_the_bound_after_losses_of_memory() {
    assert_holds("seldom, losses of memory", seldom);
}
