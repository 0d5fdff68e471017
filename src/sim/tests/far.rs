//! Nodes whose round trip to the store is longer than their key's tick.

use super::*;

/// What 20 nodes admit, all so far from the store, in % of the ideal.
fn admitted_pct(limit: Limit, scenario: Scenario, rtt_ms: u64) -> f64 {
    let network = Network::new(Duration::from_millis(rtt_ms));
    let setup = Setup { network, ..audited(limit, 20, 1) };
    figures(lived(&setup, scenario, 20.0, &[])).admitted_vs_ideal_pct
}

#[test]
fn key_that_is_hot_by_the_round_trip_has_refill_though_it_is_not_by_the_tick() {
    // 45 requests a second on each node, and a tick of 25 ms: 68% where only ticks count.
    let seen = admitted_pct(api(1000, 100), Scenario::Under, 80);
    assert!(seen > 80.0, "{seen}");
}

#[test]
fn key_of_one_node_is_not_given_back_and_asked_for_again_by_turns() {
    // 18 requests a second, and a tick of 50 ms: 69% where only the store's own level counts.
    let seen = admitted_pct(api(20, 20), Scenario::ShiftUnder, 80);
    assert!(seen > 73.0, "{seen}");
}
