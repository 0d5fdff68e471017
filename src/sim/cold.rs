//! New clients: each sends a few requests at once, as a browser does, then one a second.

use super::arrival::{Arrival, seed_of};

/// New clients in each second.
pub(super) const CLIENTS_PER_SECOND: u32 = 100;
/// The requests that a client sends at once.
pub(super) const FIRST_REQUESTS: u32 = 6;
/// The time within which it sends them.
const FIRST_WITHIN_US: u64 = 2_000;

/// What comes to `node`, one of `nodes`, ordered by time. All nodes draw the same clients.
pub(super) fn arrivals_of_node(seed: u64, seconds: f64, nodes: u16, node: u16) -> Vec<Arrival> {
    let end_us = (seconds * 1e6) as u64;
    let mut arrivals = Vec::new();
    for key in 0..clients(seconds) {
        let mut random = fastrand::Rng::with_seed(seed_of(seed, u64::from(key)));
        let second = u64::from(key / CLIENTS_PER_SECOND);
        let begins_us = second * 1_000_000 + random.u64(..1_000_000);
        let at_once = (0..FIRST_REQUESTS).map(|_| begins_us + random.u64(..FIRST_WITHIN_US));
        let mut times: Vec<u64> = at_once.collect();
        times.extend((1..).map(|s| begins_us + s * 1_000_000).take_while(|at_us| *at_us < end_us));
        for at_us in times.into_iter().filter(|at_us| *at_us < end_us) {
            if random.u16(..nodes) == node {
                arrivals.push(Arrival { at_us, node, key, cost: 1 });
            }
        }
    }
    arrivals.sort_by_key(|arrival| arrival.at_us);
    arrivals
}

/// The clients of some seconds.
pub(super) fn clients(seconds: f64) -> u32 {
    CLIENTS_PER_SECOND * seconds.ceil() as u32
}

/// Requests of all clients, on average.
pub(super) fn requests(seconds: f64) -> f64 {
    let clients = f64::from(CLIENTS_PER_SECOND) * seconds;
    clients * (f64::from(FIRST_REQUESTS) + seconds / 2.0)
}

/// Raises the cost of each key's first request.
pub(super) fn raise_first_costs(arrivals: &mut [Arrival], cost: u32) {
    let mut seen = std::collections::HashSet::new();
    for arrival in arrivals.iter_mut().filter(|arrival| seen.insert(arrival.key)) {
        arrival.cost = cost;
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::{Scenario, Workload};
    use super::*;

    #[test]
    fn new_client_sends_six_requests_within_two_milliseconds_then_one_a_second() {
        let load = Workload {
            scenario: Scenario::ColdClients,
            nodes: 4,
            keys: 1,
            rate_per_second: 100.0,
            load: None,
            seconds: 5.0,
            seed: 1,
        };
        let mut arrivals = load.arrivals();
        for key in 0..500 {
            let of_key = arrivals.iter().filter(|arrival| arrival.key == key);
            let times: Vec<u64> = of_key.map(|arrival| arrival.at_us).collect();
            let first = times.iter().take(6).map(|at_us| at_us - times[0]);
            assert!(first.clone().count() == 6 && first.max() < Some(2_000), "{key}: {times:?}");
            assert!(times.len() <= 6 + 4 && times[0] / 1_000_000 == u64::from(key / 100), "{key}");
        }
        let per_node = arrivals.iter().filter(|arrival| arrival.node == 3).count();
        let even = arrivals.len() / 4;
        assert!(per_node.abs_diff(even) < even / 5, "{per_node} of {}", arrivals.len());

        raise_first_costs(&mut arrivals, 50);
        let costs: u32 = arrivals.iter().map(|arrival| arrival.cost - 1).sum();
        assert_eq!(costs, 500 * 49);
    }
}
