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
fn leaky_buckets_without_faults_exceed_one_queue_by_the_credit_at_most() {
    assert_holds("leaky buckets, no faults", |seed| queues(seed, false));
}

/// A case in which crowds come to few nodes that know of a queue: on each node one caller asks for all. Once the store
/// forgets what it gave a crowd.
fn crowds(seed: u64) -> Case {
    let mut case = queues(seed, false);
    let mut rng = fastrand::Rng::with_seed(seed);
    case.setup.form = Form::Async;
    case.setup.nodes = rng.u16(1..=4);
    case.setup.network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0002, 0.005)));
    let trip_us = case.setup.network.rtt.as_micros() as u64;
    let nodes = u64::from(case.setup.nodes);
    let crowds = rng.u64(2..6);
    let request =
        |at_us, number: u64| Arrival { at_us, node: (number % nodes) as u16, key: 0, cost: 1 };
    case.arrivals.clear();
    for crowd in 0..crowds {
        let at_us = case.until_us * crowd / crowds;
        let first = (0..10 * nodes).map(|number| request(at_us + 10 * number, number));
        let size = rng.u64(50..1500);
        case.arrivals.extend(first);
        case.arrivals.extend((0..size).map(|number| request(at_us + 10 * trip_us, number)));
        // Those that go on.
        let rest = (1..500).map(|number| request(at_us + 10 * trip_us + 4000 * number, number));
        case.arrivals.extend(rest.filter(|one| one.at_us < at_us + case.until_us / crowds));
    }
    let crowd = rng.u64(0..crowds);
    let forgets_us = case.until_us * crowd / crowds + 14 * trip_us;
    case.faults = vec![Planned { at_us: forgets_us, fault: Fault::StoreForgets }];
    case
}

#[test]
fn leaky_buckets_keep_their_bound_where_callers_come_in_crowds() {
    assert_holds("leaky buckets, crowds", crowds);
}

#[test]
fn leaky_buckets_keep_their_bound_whatever_goes_wrong() {
    assert_holds("leaky buckets, faults", |seed| queues(seed, true));
}
