//! Nodes whose round trip to the store is longer than their key's tick.

use super::*;

/// What 20 nodes admit, all so far from the store, in % of the ideal.
fn admitted_pct(limit: Limit, scenario: Scenario, rtt_ms: u64) -> f64 {
    let network = Network::new(Duration::from_millis(rtt_ms));
    let setup = Setup { network, ..audited(limit, 20, 1) };
    figures(lived(&setup, scenario, 20.0, &[])).admitted_vs_ideal_pct
}

#[test]
fn even_load_on_nodes_whose_round_trip_is_longer_than_the_tick_is_mostly_admitted() {
    // 45 requests a second on each node, and a tick of 25 ms: 68% where only ticks count.
    let seen = admitted_pct(api(1000, 100), Scenario::Under, 80);
    assert!(seen > 80.0, "{seen}");
}

#[test]
fn load_that_moves_between_far_nodes_is_mostly_admitted() {
    // 18 requests a second, and a tick of 50 ms: 69% where only the store's own level counts.
    let seen = admitted_pct(api(20, 20), Scenario::ShiftUnder, 80);
    assert!(seen > 73.0, "{seen}");
}
