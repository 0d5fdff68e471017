//! Entries at the edges of what a grant depends on: levels, demands and wants, alone and with what was given before.

use super::virtual_time::OneNode;
use super::*;
use crate::sync::message::{ENTRIES_MAX, Given};

const EPOCH_US: i64 = 50_000;
/// `edge` and what is beside it.
fn around(edge: i64) -> [i64; 3] {
    [edge - 1, edge, edge + 1]
}

/// Keys that the store does not know, on all boundaries of the level (none, scarce at a twentieth, plenty at a tenth, full)
/// and of the demand (with a quarter more than the rate refill is leased).
fn entries(scale: Scale) -> Vec<Entry> {
    let Scale { rate, burst, token } = scale;
    let levels = [0, burst / 20, burst / 10, burst - token, burst].map(around).concat();
    let demands = [0, 1, rate / 2, rate].into_iter().chain(around(rate + rate / 4));
    let mut entries = Vec::new();
    for (level, demand) in
        levels.iter().flat_map(|level| demands.clone().map(move |demand| (*level, demand)))
    {
        for (want, needed) in [(0, 0), (1, 0), (2, 0), (5, 1), (burst / token, 0)] {
            for want_rate in [0, demand] {
                let key = format!("{}", entries.len()).into_bytes();
                let claim = Some(level);
                let entry = Entry { demand, needed, want, want_rate, claim, ..empty_entry(scale) };
                entries.push(Entry { key: key.into(), epoch_us: EPOCH_US, ..entry });
            }
        }
    }
    entries
}

/// The entry that goes on from what was given on this one: it spends and gives back a part, and asks for a part of before.
fn follow_up(entry: &Entry, given: &Given, divisor: i64) -> Entry {
    let held = Held {
        rate: entry.held.rate + given.rate,
        depth: entry.held.depth + given.depth,
        outstanding: given.tokens * entry.scale.token,
        stamp_us: given.stamp_us,
        demand: entry.demand,
        tag: given.tag,
    };
    let (back_rate, back_depth) = (held.rate / divisor, held.depth / divisor);
    let held = Held { rate: held.rate - back_rate, depth: held.depth - back_depth, ..held };
    let spent = given.tokens / divisor;
    let (demand, want_rate) = (entry.demand / divisor, entry.want_rate / divisor);
    Entry { spent, back_rate, back_depth, held, demand, want_rate, claim: None, ..entry.clone() }
}

/// Sends the entries in batches, and returns those that go on from what was given.
fn send(node: &mut OneNode, entries: &[Entry], divisor: i64, most: &mut Given) -> Vec<Entry> {
    let mut later = Vec::new();
    for batch in entries.chunks(ENTRIES_MAX) {
        node.knowledge.sent_us = node.now_us();
        let verdict = node.send(batch.to_vec()).verdict;
        let BatchVerdict::Applied(grants) = verdict else { panic!("{verdict:?}") };
        for (entry, grant) in batch.iter().zip(&grants) {
            let Grant::Given(given) = grant else { panic!("{grant:?}") };
            most.tokens = most.tokens.max(given.tokens);
            most.rate = most.rate.max(given.rate);
            most.recall = most.recall.max(given.recall);
            later.push(follow_up(entry, given, divisor));
        }
    }
    later
}

fn compare_grants_at_edges(node: impl Fn() -> OneNode) {
    let mut most = Given::default();
    for quota in [(1000, 200), (7, 7), (1, 1)] {
        let mut node = node();
        let quota = Quota::per_second(quota.0).burst(quota.1);
        let mut entries = entries(quota.scale("x").unwrap());
        for divisor in [2, 1, 3] {
            entries = send(&mut node, &entries, divisor, &mut most);
            // After which the lane has been silent again, in the test of silences.
            node.world.pass(EPOCH_US / 10);
        }
    }
    assert!(most.tokens > 0 && most.rate > 0 && most.recall > 0, "{most:?}");
}

#[test]
fn grants_at_the_edges_of_levels_and_demands_are_equal_in_model_and_script() {
    compare_grants_at_edges(OneNode::new);
}

#[test]
fn grants_at_the_edges_after_a_silence_are_equal_in_model_and_script() {
    compare_grants_at_edges(|| {
        let mut node = OneNode::new();
        node.times.silence_us = 1000;
        for instance in 1..4 {
            node.replace(instance);
            node.send(Vec::new());
        }
        // The last of three nodes settles with its next batch, the others never.
        node.knowledge.settled = true;
        node.world.pass(20_000);
        node
    });
}
