//! Cases of keys that nodes are asked for seldom, and of a store that forgets: nodes know of a key what was true long ago, and some
//! of those that spent it do not know it any more.

use super::windows::random_windows;
use super::*;

/// Requests of one key on `node`, in some stretch from `from_us` on.
fn asked(rng: &mut fastrand::Rng, node: u16, from_us: u64, count: u64) -> Vec<Arrival> {
    let span_us = scaled(rng, 3e5, 2e6) as u64;
    let mut times: Vec<_> = (0..count).map(|_| from_us + rng.u64(0..span_us)).collect();
    times.sort_unstable();
    times.into_iter().map(|at_us| Arrival { at_us, node, key: 0, cost: 1 }).collect()
}

/// A few requests on one node, all there is on another, a loss of memory a while later, and then more than there is on the first,
/// mostly before it has heard of the loss; up to three times. Nodes know nothing else of the key.
fn stories(rng: &mut fastrand::Rng, setup: &Setup) -> (Vec<Arrival>, Vec<Planned>) {
    let quota = setup.limit.quota();
    let more = 2 * quota.burst_tokens() + 10;
    let fill_us = quota.burst_tokens() as f64 / quota.tokens_per_second() * 1e6;
    let (mut arrivals, mut faults, mut at_us) = (Vec::new(), Vec::new(), 0);
    for _ in 0..rng.u32(1..=3) {
        let (node, other) = (rng.u16(0..setup.nodes), rng.u16(1..setup.nodes));
        let few = rng.u64(1..=4);
        at_us += scaled(rng, 1e4, 2.0 * fill_us + 1e5) as u64;
        arrivals.extend(asked(rng, node, at_us, few));
        at_us += scaled(rng, 1e4, fill_us + 3e6) as u64;
        arrivals.extend(asked(rng, (node + other) % setup.nodes, at_us, more));
        at_us += scaled(rng, 1e4, fill_us / 2.0 + 3e6) as u64;
        faults.push(Planned { at_us, fault: Fault::StoreForgets });
        at_us += rng.u64(0..1_200_000);
        arrivals.extend(asked(rng, node, at_us, more));
    }
    arrivals.sort_by_key(|arrival| arrival.at_us);
    (arrivals, faults)
}

/// A bucket or a window that is full again within a minute, and two to four nodes.
fn seldom(seed: u64) -> Case {
    let mut case = Case::random(seed, false);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.nodes = rng.u16(2..=4);
    case.setup.form = rng.choice([Form::Check, Form::Async]).unwrap_or(Form::Check);
    case.setup.limit = random_windows(&mut rng);
    if rng.bool() || case.setup.limit.quota().burst_tokens() > 1000 {
        let tokens = scaled(&mut rng, 1.0, 500.0) as u64;
        let fill_us = scaled(&mut rng, 1e6, 6e7);
        let quota = Quota::new(tokens, Duration::from_micros(fill_us as u64));
        let interval = Duration::from_millis(rng.u64(10..200));
        case.setup.limit = Limit::new("search", quota).sync_interval(interval);
    }
    let outage = rng.choice([OutagePolicy::Closed, OutagePolicy::Share]).unwrap_or_default();
    case.setup.limit = case.setup.limit.clone().credit(rng.u32(0..=2)).outage(outage);
    case.setup.network = Network::new(Duration::from_micros(scaled(&mut rng, 200.0, 4e4) as u64));
    (case.arrivals, case.faults) = stories(&mut rng, &case.setup);
    let last_us = case.arrivals.last().map_or(0, |arrival| arrival.at_us);
    case.until_us = last_us.max(case.faults.last().map_or(0, |planned| planned.at_us)) + 3_000_000;
    case
}

#[test]
fn keys_that_nodes_are_asked_for_seldom_keep_the_bound_after_losses_of_memory() {
    assert_holds("seldom, losses of memory", seldom);
}
