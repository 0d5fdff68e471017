//! Clients that send many requests at once.

use super::*;

/// What is admitted of a client of one node that sends requests of a `cost` at once, in % of the ideal.
fn admitted_pct(limit: Limit, requests: u32, cost: u32, every_ms: u64) -> f64 {
    const SECONDS: u64 = 20;
    let arrivals: Vec<Arrival> = (0..SECONDS * 1000 / every_ms)
        .flat_map(|burst| (0..requests).map(move |request| (burst, u64::from(request))))
        .map(|(burst, request)| 1000 * every_ms * burst + request)
        .map(|at_us| Arrival { at_us, node: 0, key: 0, cost })
        .collect();
    let setup = audited(limit, 1, 1);
    let outcome = run(&setup, &arrivals, &[], SECONDS as f64).unwrap();
    assert!(outcome.figures.excess_tokens <= 1.0, "{:?}", outcome.figures);
    outcome.figures.admitted_vs_ideal_pct
}

#[test]
fn client_that_sends_bursts_is_admitted_though_it_is_silent_between_them() {
    let cases = [
        // Of 12, two were admitted: a look 13 ms after each burst took the silence for the end of the demand.
        (api(10_000, 10_000), 12, 1, 20, 99.0),
        (api(1000, 100), 18, 1, 20, 99.0),
        (api(1000, 100), 45, 1, 50, 99.0),
        // Of 90 two, and of 200 two: reports between the bursts took it for that.
        (api(1000, 100), 90, 1, 100, 98.0),
        (api(1000, 1000), 200, 1, 250, 97.0),
        (api(100, 100), 45, 1, 500, 93.0),
        // Of these some were denied all the time: tokens were taken for requests.
        (api(10_000, 10_000), 4, 3, 20, 99.5),
        (api(10_000, 10_000), 1, 12, 20, 99.5),
    ];
    // Of the first bursts most is denied, before a silence has shown that there are bursts.
    for (limit, requests, cost, every_ms, least) in cases {
        let case = format!("{limit:?}: {requests} of {cost} tokens each {every_ms} ms");
        let seen = admitted_pct(limit, requests, cost, every_ms);
        assert!(seen >= least, "{case}: {seen:.1}%");
    }
}

#[test]
fn refill_gathers_on_each_node_between_its_bursts() {
    // 22 or 23 requests at once each 100 ms on each of four nodes: 79% where depth that is not filled goes back.
    let setup = audited(api(1000, 100), 4, 1);
    let seen = figures(lived(&setup, Scenario::Bursts, 20.0, &[])).admitted_vs_ideal_pct;
    assert!(seen >= 97.0, "{seen:.1}%");
}
