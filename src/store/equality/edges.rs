//! Entries at the edges of what a grant depends on: levels, demands and wants, alone and with what was given before.

use super::virtual_time::OneNode;
use super::*;
use crate::sync::message::{Claim, ENTRIES_MAX, Given};

const EPOCH_US: i64 = 50_000;

/// `edge` and what is beside it.
fn around(edge: i64) -> [i64; 3] {
    [edge - 1, edge, edge + 1]
}

/// Keys that the store does not know, on all boundaries of the level (empty; a twentieth of the burst, below which refill is
/// leased; a tenth, above which it is recalled; full) and of the demand (above five quarters of the rate refill is leased),
/// with and without a lease of refill.
fn entries(scale: Scale, now_us: i64) -> Vec<Entry> {
    let Scale { rate, burst, token, .. } = scale;
    let levels = [0, burst / 20, burst / 10, burst - token, burst].map(around).concat();
    // A multiple of 20, so that four fifths and a quarter of them are whole.
    let demands = [0, 1, rate / 20 * 20, rate].into_iter().chain(around(rate + rate / 4));
    let wants = [(0, 0), (1, 0), (2, 0), (5, 1), (burst / token, 0)];
    let mut entries = Vec::new();
    for (claim, demand) in
        levels.iter().flat_map(|level| demands.clone().map(move |demand| (*level, demand)))
    {
        for (want, needed) in wants {
            for (want_rate, held_rate) in [(0, 0), (demand, 0), (demand, rate / 4)] {
                let tag = now_us / EPOCH_US;
                let held = Held { rate: held_rate, stamp_us: now_us, tag, ..Held::default() };
                let asked = Entry { demand, needed, want, want_rate, ..Entry::empty(scale) };
                let key = entries.len().to_string().into_bytes().into();
                let claim = Some(Claim { unleased: claim, previous: 0, viewed_us: 0 });
                entries.push(Entry { key, epoch_us: EPOCH_US, held, claim, ..asked });
            }
        }
    }
    entries
}

/// The next entry about a key: it spends and gives back one in `part` of what was given (0: nothing), and asks for `asked` fifths of what
/// was asked for.
#[derive(Clone, Copy)]
struct Later {
    part: i64,
    asked: i64,
}

impl Later {
    fn entry(self, entry: &Entry, given: &Given) -> Entry {
        let held = Held {
            rate: entry.held.rate + given.rate,
            depth: entry.held.depth + given.depth,
            outstanding: given.tokens * entry.scale.token,
            stamp_us: given.stamp_us,
            demand: entry.demand,
            tag: given.tag,
        };
        let part = |whole: i64| whole.checked_div(self.part).unwrap_or(0);
        let (back_rate, back_depth) = (part(held.rate), part(held.depth));
        let held = Held { rate: held.rate - back_rate, depth: held.depth - back_depth, ..held };
        let spent = part(given.tokens);
        let [demand, want_rate] = [entry.demand, entry.want_rate].map(|of| of * self.asked / 5);
        Entry {
            spent,
            back_rate,
            back_depth,
            held,
            demand,
            want_rate,
            claim: None,
            ..entry.clone()
        }
    }
}

/// Sends the entries in batches, and returns those that go on from what was given.
fn send(node: &mut OneNode, entries: &[Entry], later: Later, most: &mut Given) -> Vec<Entry> {
    let mut followers = Vec::new();
    for batch in entries.chunks(ENTRIES_MAX) {
        node.knowledge.sent_us = node.now_us();
        let verdict = node.send(batch.to_vec()).verdict;
        let BatchVerdict::Applied(grants) = verdict else { panic!("{verdict:?}") };
        for (entry, grant) in batch.iter().zip(&grants) {
            let Grant::Given(given) = grant else { panic!("{grant:?}") };
            most.tokens = most.tokens.max(given.tokens);
            most.rate = most.rate.max(given.rate);
            most.recall = most.recall.max(given.recall);
            followers.push(later.entry(entry, given));
        }
    }
    followers
}

fn compare_grants_at_edges(node: impl Fn() -> OneNode) {
    let mut most = Given::default();
    for quota in [(1000, 200), (7, 7), (1, 1)] {
        let mut node = node();
        let quota = Quota::per_second(quota.0).burst(quota.1);
        let mut entries = entries(quota.scale("x").unwrap(), node.now_us());
        for (part, asked) in [(0, 4), (2, 5), (3, 2)] {
            entries = send(&mut node, &entries, Later { part, asked }, &mut most);
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
