//! What one node's requests leave to another one, in virtual time.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::time::Duration;

use tidegate::{FixedWindow, Limit, Quota, Rule, SlidingLog, SlidingWindow};
use virtual_nodes::VirtualNodes;

const MILLI: Duration = Duration::from_millis(1);

/// The node whose large request was denied held all tokens for a second, or for as long as its client came again.
#[test]
fn request_for_more_than_there_is_leaves_the_tokens_to_other_nodes() {
    let rules: [Rule; 4] = [
        Quota::per_hour(1000).into(),
        FixedWindow::per_hour(1000).into(),
        SlidingWindow::per_hour(1000).into(),
        SlidingLog::per_hour(1000).into(),
    ];
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
