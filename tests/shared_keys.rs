//! What one node's requests leave to another one, in virtual time.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::time::Duration;

use tidegate::{FixedWindow, LeakyBucket, Limit, Quota, Rule, SlidingLog, SlidingWindow};
use virtual_nodes::VirtualNodes;

const MILLI: Duration = Duration::from_millis(1);

/// The algorithms whose keys nodes hold tokens of.
fn hourly(tokens: u64) -> [Rule; 4] {
    [
        Quota::per_hour(tokens).into(),
        FixedWindow::per_hour(tokens).into(),
        SlidingWindow::per_hour(tokens).into(),
        SlidingLog::per_hour(tokens).into(),
    ]
}

/// The node whose large request was denied held all tokens for a second, or for as long as its client came again.
#[test]
fn request_for_more_than_there_is_leaves_the_tokens_to_other_nodes() {
    let rules = hourly(1000);
    for (rule, used, large) in
        rules.into_iter().flat_map(|rule| [(rule, 200, 900), (rule, 600, 500)])
    {
        let limit = Limit::new("api", rule);
        let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
        let [one, other] = [0, 1].map(|node| nodes.nodes[node].limit("api").unwrap());
        assert!(nodes.wait(one.check_sure_n("key", used)).unwrap().is_allowed());
        nodes.pass(2000 * MILLI, 10 * MILLI);
        let (mut denied, mut asked) = (0, 0);
        for _ in 0..10 {
            assert!(nodes.wait(one.check_sure_n("key", large)).unwrap().is_denied(), "{rule:?}");
            nodes.pass(30 * MILLI, MILLI);
            for _ in 0..5 {
                asked += 1;
                denied += u32::from(nodes.wait(other.check_sure("key")).is_denied());
                nodes.pass(50 * MILLI, 10 * MILLI);
            }
        }
        assert_eq!(denied, 0, "of {asked}: {rule:?}, {used} used, {large} asked for");
    }
}

/// A node told of a key what it had heard of the store, or that it had no token where it had heard nothing.
#[test]
fn look_that_waits_is_told_what_one_token_would_be_told_and_spends_nothing() {
    let rules = hourly(100);
    for limit in rules.map(|rule| Limit::new("api", rule).strict()) {
        let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
        let [one, other] = [0, 1].map(|node| nodes.nodes[node].limit("api").unwrap());
        let look = |key: &str| nodes.wait(other.check_sure_n(key, 0)).unwrap();
        assert_eq!(
            (look("fresh").is_allowed(), look("fresh").remaining()),
            (true, 100),
            "{limit:?}"
        );
        assert!(nodes.wait(one.check_sure_n("spent", 40)).unwrap().is_allowed());
        nodes.pass(1500 * MILLI, 10 * MILLI);
        assert_eq!(
            (look("spent").is_allowed(), look("spent").remaining()),
            (true, 60),
            "{limit:?}"
        );
        assert!(nodes.wait(one.check_sure_n("spent", 60)).unwrap().is_allowed(), "{limit:?}");
        nodes.pass(1500 * MILLI, 10 * MILLI);
        let told = look("spent");
        assert!(told.is_denied() && told.is_sure(), "{limit:?}: {told:?}");
    }
}

/// Each look took a token of the key's share.
#[test]
fn look_takes_nothing_of_the_share_of_an_outage() {
    for limit in [
        Limit::new("api", Quota::per_second(10)),
        Limit::new("api", Quota::per_second(10)).strict(),
    ] {
        let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
        let api = nodes.nodes[0].limit("api").unwrap();
        nodes.store.set_away(true);
        nodes.pass(4000 * MILLI, 10 * MILLI);
        for _ in 0..3 {
            assert!(nodes.wait(api.check_sure_n("seen", 0)).unwrap().is_allowed(), "{limit:?}");
        }
        let drain = |key: &str| {
            let mut allowed = 0;
            while nodes.wait(api.check_sure(key)).is_allowed() {
                allowed += 1;
            }
            allowed
        };
        let (seen, unseen) = (drain("seen"), drain("unseen"));
        assert_eq!(seen, unseen, "{limit:?}");
        assert!(seen > 0, "{limit:?}");
    }
}

/// It was mute until its next report, and all requests were denied for as long.
#[test]
fn node_that_a_cost_beyond_an_estimate_has_emptied_asks_for_tokens_at_once() {
    let limit = Limit::new("api", Quota::per_hour(10_000)).sync_interval(1000 * MILLI);
    let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
    let api = nodes.nodes[0].limit("api").unwrap();
    // A store that is new waits for nodes that may be there, for five ticks.
    nodes.pass(6000 * MILLI, 10 * MILLI);
    for _ in 0..400 {
        let _ = api.check("key");
        nodes.pass(5 * MILLI, 5 * MILLI);
    }
    let held = api.check_n("key", 0).unwrap();
    assert!(held.is_sure() && held.is_allowed(), "{held:?}");
    nodes.wait(api.reserve("key", 1)).unwrap().commit(1500);
    nodes.settle();
    let sure = (0..100).filter(|_| {
        nodes.pass(MILLI, MILLI);
        let decision = api.check("key");
        decision.is_allowed() && decision.is_sure()
    });
    let sure = sure.count();
    assert!(sure >= 50, "{sure} of 100 within a tenth of a tick, of what the store had");
}

/// A log said two windows, and a month four in an outage.
#[test]
fn reset_after_of_a_shared_key_is_at_most_its_window() {
    let hour = Duration::from_secs(3600);
    let rules: [(Rule, Duration); 3] = [
        (FixedWindow::per_hour(100).into(), hour),
        (SlidingLog::per_hour(100).into(), hour + hour / 64),
        (FixedWindow::per_month(100).zone("UTC").into(), 31 * 24 * hour),
    ];
    for (rule, most) in rules {
        let limit = Limit::new("api", rule);
        let nodes = VirtualNodes::new(1, std::slice::from_ref(&limit), |builder| builder);
        let api = nodes.nodes[0].limit("api").unwrap();
        let first = nodes.wait(api.check_sure("key"));
        assert!(first.is_allowed() && !first.reset_after().is_zero(), "{rule:?}");
        let unseen = api.check("unseen");
        nodes.store.set_away(true);
        nodes.pass(4000 * MILLI, 10 * MILLI);
        for told in [first, unseen, api.check("key"), api.check_n("key", 0).unwrap()] {
            let reset = told.reset_after();
            assert!(reset <= most + 2 * MILLI, "{rule:?}: {reset:?}, {told:?}");
        }
    }
}

/// Slots were taken ahead for requests that wait for none, and lost: half of those that there were.
#[test]
fn requests_that_do_not_wait_get_as_many_slots_of_a_limit_with_a_queue_as_without() {
    for (count, every_ms) in [(1, 6), (2, 12), (2, 100)] {
        let admitted = [0, 1000, 10_000].map(|queue_ms| {
            let rule = LeakyBucket::per_second(10).queue(queue_ms * MILLI);
            let limit = Limit::new("api", rule);
            let nodes = VirtualNodes::new(count, std::slice::from_ref(&limit), |builder| builder);
            let mut admitted = 0;
            for _ in 0..20_000 / every_ms {
                for node in &nodes.nodes {
                    let api = node.async_limit("api").unwrap();
                    admitted += u32::from(nodes.wait(api.check_sure("key")).is_allowed());
                }
                nodes.pass(every_ms * MILLI, MILLI);
            }
            admitted
        });
        println!("{count} nodes, each {every_ms} ms: {admitted:?} without a queue and with two");
        let least = admitted[0] * 95 / 100;
        assert!(admitted.iter().all(|admitted| *admitted >= least), "{admitted:?}");
    }
}
