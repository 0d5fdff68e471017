//! Cases of leaky buckets that nodes share.

use super::*;
use crate::algorithm::LeakyBucket;

/// The most that a request costs.
const COST_MAX: u32 = 3;
/// A call whose answer nobody waits for has this long, in microseconds.
const CALL_MAX_US: u64 = 250_000;

/// A random leaky bucket. By a policy that admits anything in an outage it has no bound.
fn random_queue(rng: &mut fastrand::Rng) -> Limit {
    let (rate, slots) = (scaled(rng, 0.05, 2000.0), scaled(rng, 0.5, 200.0).floor());
    let period = Duration::from_secs_f64(1.0 / rate);
    Limit::new("search", LeakyBucket::new(1, period).queue(period.mul_f64(slots)))
        .sync_interval(Duration::from_secs_f64(scaled(rng, 0.005, 1.0)))
        .credit(rng.u32(0..=2))
        .outage(OutagePolicy::Closed)
}

/// A case of one such limit. Pauses of nodes are left out: callers whose answers come late begin late, and at once.
fn queues(seed: u64, faulty: bool) -> Case {
    let mut case = Case::random(seed, faulty);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.limit = random_queue(&mut rng);
    case.setup.form = if rng.bool() { Form::Async } else { Form::Check };
    let rate = case.setup.limit.quota().tokens_per_second();
    case.until_us = ((1000.0 / rate * 1e6) as u64).clamp(8_000_000, 60_000_000);
    case.arrivals = random_arrivals(&mut rng, &case.setup, case.until_us);
    let most = if rng.bool() { 1 } else { COST_MAX };
    for arrival in &mut case.arrivals {
        arrival.cost = rng.u32(1..=most);
    }
    case.faults.retain(|planned| !matches!(planned.fault, Fault::NodePauses { .. }));
    for planned in &mut case.faults {
        planned.at_us %= case.until_us;
    }
    case
}

/// What the bound does not count, in tokens: a start may be early by half of the round trip in which its slot was asked for,
/// and late by the whole of it; what clocks are off by, while a slot is held; and what requests cost beyond a token.
pub(super) fn uncounted_tokens(setup: &Setup, arrivals: &[Arrival]) -> f64 {
    let rate = setup.limit.quota().tokens_per_second();
    let Rule::LeakyBucket(rule) = setup.limit.rule() else { return 0.0 };
    let trip_s = if setup.network.late > 0.0 {
        CALL_MAX_US as f64 / 1e6
    } else {
        (1.5 * setup.network.rtt.as_secs_f64()).min(CALL_MAX_US as f64 / 1e6)
    };
    let most = arrivals.iter().map(|arrival| arrival.cost).max().unwrap_or(1);
    let held_s = rule.longest_wait().as_secs_f64() + f64::from(most) / rate + 1.0;
    let clocks_s = 2.0 * held_s * f64::from(setup.clock_error_ppm) / 1e6;
    let costs = f64::from(most - 1) * f64::from(setup.nodes + 1);
    rate * (1.5 * trip_s + clocks_s) + costs
}

#[test]
fn leaky_buckets_without_faults_begin_what_one_queue_does_and_the_credit_of_all_nodes() {
    assert_holds("leaky buckets, no faults", |seed| queues(seed, false));
}

#[test]
fn leaky_buckets_keep_their_bound_whatever_goes_wrong() {
    assert_holds("leaky buckets, faults", |seed| queues(seed, true));
}
