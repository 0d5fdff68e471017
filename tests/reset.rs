//! Keys that are reset: by each algorithm, in each mode, on nodes that share a store, with debt, leases and outages.
//!
//! `cargo test --features testing,redis --test reset -- --nocapture` prints how long nodes on a real Redis took to allow a key again.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[cfg(feature = "redis")]
mod parts;
#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::ops::Deref;
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate::testing::Fault;
use tidegate::{
    AsyncLimit, FixedWindow, Incidents, LeakyBucket, Limit, Quota, ResetError, Rule, SlidingLog,
    SlidingWindow, StoreError, bound,
};
use virtual_nodes::VirtualNodes;

const NODES: usize = 4;
const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);
const BURST: u64 = 20;

/// Nodes that share limits in virtual time.
struct Cluster(VirtualNodes);

impl Deref for Cluster {
    type Target = VirtualNodes;

    fn deref(&self) -> &VirtualNodes {
        &self.0
    }
}

impl Cluster {
    fn new(limits: &[Limit]) -> Self {
        Self::with_keys(limits, tidegate::DEFAULT_MAX_KEYS)
    }

    /// Nodes that hold at most so many keys each.
    fn with_keys(limits: &[Limit], max_keys: usize) -> Self {
        Self(VirtualNodes::new(NODES, limits, |builder| builder.max_keys(max_keys)))
    }

    fn pass(&self, time: Duration) {
        self.0.pass(time, Duration::from_millis(10));
    }

    fn limit(&self, node: usize) -> AsyncLimit {
        self.nodes[node].async_limit("x").unwrap()
    }

    fn reset(&self, node: usize, key: &str) -> Result<(), ResetError> {
        self.wait(self.limit(node).reset(key))
    }

    /// All that the nodes allow of a key, one after the other and then again: a node gives back what it does not need. Slots
    /// ahead count.
    fn drain(&self, nodes: &[usize], key: &str) -> u64 {
        let mut drained = 0;
        for _ in 0..3 {
            for node in nodes {
                let limit = self.limit(*node);
                while self.wait(limit.schedule(key)).is_allowed()
                    || self.wait(limit.check_sure(key)).is_allowed()
                {
                    drained += 1;
                }
            }
            self.pass(2 * SECOND);
        }
        drained
    }

    fn bound_tokens(&self, node: usize) -> f64 {
        self.nodes[node].limit("x").unwrap().excess().bound_tokens.unwrap()
    }
}

/// The five algorithms with one burst, of which next to nothing returns while a test lasts.
fn rules() -> [Rule; 5] {
    [
        Quota::new(1, 8 * HOUR).burst(BURST).into(),
        // One more slot may begin at the end of the queue.
        LeakyBucket::new(BURST, HOUR).queue(HOUR / 20 * 19).into(),
        FixedWindow::new(BURST, HOUR).into(),
        SlidingWindow::new(BURST, HOUR).into(),
        SlidingLog::new(BURST, HOUR).into(),
    ]
}

/// The five algorithms, shared by nodes and decided by the store.
fn shared_limits() -> Vec<Limit> {
    let limits =
        rules().map(|rule| [Limit::new("x", rule).strict(), Limit::new("x", rule).exact()]);
    limits.concat()
}

fn is_leaky(limit: &Limit) -> bool {
    matches!(limit.rule(), Rule::LeakyBucket(_))
}

#[test]
fn reset_of_a_spent_key_gives_all_nodes_together_one_burst() {
    for limit in shared_limits() {
        let cluster = Cluster::new(std::slice::from_ref(&limit));
        let label = format!("{limit:?}");
        assert_eq!(cluster.drain(&[0, 1], "key"), BURST, "{label}");
        // This node has never heard of the key.
        cluster.reset(3, "key").unwrap();
        assert_eq!(cluster.drain(&[0, 1, 2, 3], "key"), BURST, "{label}");
        // And this one has a handle of it.
        let handle = cluster.nodes[0].limit("x").map(|limit| limit.handle("key"));
        cluster.reset(0, "key").unwrap();
        cluster.pass(2 * SECOND);
        if let Ok(handle) = handle {
            assert!(cluster.wait(handle.check_sure()).is_allowed(), "{label}");
            assert_eq!(cluster.drain(&[2, 0], "key"), BURST - 1, "{label}");
        }
        assert_eq!(cluster.drain(&[1], "another"), BURST, "{label}");
    }
}

#[test]
fn reset_of_a_key_that_nobody_used_gives_nothing_more_than_its_burst() {
    for limit in shared_limits() {
        let cluster = Cluster::new(std::slice::from_ref(&limit));
        for _ in 0..3 {
            cluster.reset(1, "key").unwrap();
        }
        assert_eq!(cluster.drain(&[0, 1, 2], "key"), BURST, "{limit:?}");
    }
}

#[test]
fn reset_of_a_local_limit_gives_the_key_a_burst_on_this_node_alone() {
    for rule in rules() {
        let cluster = Cluster::new(&[Limit::new("x", rule).local()]);
        assert_eq!(cluster.drain(&[0], "key"), BURST, "{rule:?}");
        assert_eq!(cluster.drain(&[1], "key"), BURST, "{rule:?}");
        cluster.reset(0, "key").unwrap();
        assert_eq!(cluster.drain(&[1], "key"), 0, "{rule:?}");
        assert_eq!(cluster.drain(&[0], "key"), BURST, "{rule:?}");
        cluster.reset(0, "another").unwrap();
        assert_eq!(cluster.drain(&[0], "another"), BURST, "{rule:?}");
    }
}

#[test]
fn reset_forgives_debt() {
    for mode in [Limit::strict, Limit::exact, Limit::local] {
        for rule in rules() {
            let limit = mode(Limit::new("x", rule));
            if is_leaky(&limit) {
                continue;
            }
            let cluster = Cluster::new(std::slice::from_ref(&limit));
            let reservation = cluster.wait(cluster.limit(0).reserve("key", 5)).unwrap();
            reservation.commit(2 * BURST as u32);
            cluster.pass(SECOND);
            let denied = cluster.wait(cluster.limit(0).check_sure("key"));
            assert!(denied.is_denied(), "{limit:?}");
            cluster.reset(0, "key").unwrap();
            assert_eq!(cluster.drain(&[0], "key"), BURST, "{limit:?}");
        }
    }
}

#[test]
fn reset_forgets_what_was_spent_in_the_window_before() {
    for mode in [Limit::strict, Limit::exact, Limit::local] {
        let limit = mode(Limit::new("x", SlidingWindow::new(BURST, Duration::from_secs(60))));
        let cluster = Cluster::new(std::slice::from_ref(&limit));
        // Windows begin at whole minutes of a clock that began at 0.
        while cluster.clock.now().as_micros() % 60_000_000 < 40_000_000 {
            cluster.pass(SECOND);
        }
        assert_eq!(cluster.drain(&[0], "key"), BURST, "{limit:?}");
        while cluster.clock.now().as_micros() % 60_000_000 > 40_000_000 {
            cluster.pass(SECOND);
        }
        cluster.pass(20 * SECOND);
        let next = cluster.wait(cluster.limit(0).check_sure("key"));
        assert!(next.is_allowed() && next.remaining() < BURST / 2, "{limit:?}: {next:?}");
        cluster.pass(SECOND);
        cluster.reset(0, "key").unwrap();
        assert_eq!(cluster.drain(&[0], "key"), BURST, "{limit:?}");
    }
}

#[test]
fn leases_of_other_nodes_count_as_a_part_of_the_new_burst() {
    const TOKENS: u64 = 1000;
    let bursts: [Rule; 4] = [
        Quota::new(1, 8 * HOUR).burst(TOKENS).into(),
        FixedWindow::new(TOKENS, HOUR).into(),
        SlidingWindow::new(TOKENS, HOUR).into(),
        SlidingLog::new(TOKENS, HOUR).into(),
    ];
    for rule in bursts {
        let cluster = Cluster::new(&[Limit::new("x", rule).strict()]);
        let limits = [0, 1].map(|node| cluster.nodes[node].limit("x").unwrap());
        let mut spent = 0;
        for _ in 0..60 {
            for limit in &limits {
                spent += (0..4).filter(|_| limit.check("key").is_allowed()).count();
            }
            cluster.pass(Duration::from_millis(10));
        }
        assert!(spent > 300, "{rule:?}: {spent}");
        let held: u64 =
            limits.iter().map(|limit| limit.check_n("key", 0).unwrap().remaining()).sum();
        assert!(held > 10, "{rule:?}: two nodes have leases: {held}");
        cluster.reset(2, "key").unwrap();
        let drained = cluster.drain(&[0, 1, 2], "key");
        // What was spent and not reported is of the new burst: nodes report each 200 ms.
        assert!((TOKENS - 160..=TOKENS).contains(&drained), "{rule:?}: {drained}");
    }
}

/// A node that knew of a long queue denied until that had passed.
#[test]
fn node_that_knows_of_the_queue_of_a_leaky_bucket_hears_of_its_reset_within_two_seconds() {
    let cluster = Cluster::new(&[Limit::new("x", rules()[1]).strict()]);
    assert_eq!(cluster.drain(&[0], "key"), BURST);
    cluster.reset(3, "key").unwrap();
    let (limit, began) = (cluster.limit(0), cluster.clock.now());
    while cluster.wait(limit.schedule("key")).is_denied() {
        cluster.pass(Duration::from_millis(50));
        let waited_us = cluster.clock.now().micros_since(began);
        assert!(waited_us < 2_000_000, "{waited_us}");
    }
}

#[test]
fn resets_of_one_key_admit_a_burst_more_each_and_no_more_than_the_bound_says() {
    let rules: [Rule; 4] = [
        Quota::per_second(10).burst(100).into(),
        FixedWindow::new(100, HOUR).into(),
        SlidingWindow::new(100, HOUR).into(),
        SlidingLog::new(100, HOUR).into(),
    ];
    for (seed, rule) in (0..).zip(rules) {
        let limit = Limit::new("x", rule);
        let cluster = Cluster::new(std::slice::from_ref(&limit));
        let limits: Vec<_> = cluster.nodes.iter().map(|node| node.limit("x").unwrap()).collect();
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut admitted, mut resets, mut rounds) = (0, 0, 0);
        let begun = cluster.clock.now();
        while resets < 5 {
            for _ in 0..20 {
                admitted += u32::from(limits[rng.usize(..NODES)].check("key").is_allowed());
            }
            cluster.pass(Duration::from_millis(10));
            rounds += 1;
            // By then most of the burst is spent.
            if rounds > 200 && rng.u8(..50) == 0 {
                cluster.reset(rng.usize(..NODES), "key").unwrap();
                (resets, rounds) = (resets + 1, 0);
            }
        }
        for _ in 0..200 {
            let limit = &limits[rng.usize(..NODES)];
            admitted += (0..20).map(|_| u32::from(limit.check("key").is_allowed())).sum::<u32>();
            cluster.pass(Duration::from_millis(10));
        }
        let seconds = cluster.clock.now().micros_since(begun) as f64 / 1e6;
        let refill =
            if rule == Quota::per_second(10).burst(100).into() { 10.0 * seconds } else { 0.0 };
        let mut incidents = Incidents::default();
        incidents.resets = resets;
        let most = 100.0 + refill + bound(&limit, NODES as u32, &incidents);
        println!("{rule:?}: {admitted} of {most:.0} after {resets} resets");
        assert!(f64::from(admitted) <= most, "{rule:?}: {admitted} of {most}");
        assert!(f64::from(admitted) > 560.0 + refill / 2.0, "{rule:?}: {admitted}");
    }
}

#[test]
fn exported_bound_grows_by_a_burst_and_all_credit_for_each_reset_of_the_same_key() {
    let cluster = Cluster::new(&[Limit::new("x", Quota::per_second(10).burst(100)).credit(2)]);
    let before = cluster.bound_tokens(0);
    for key in ["a", "b", "a"] {
        cluster.reset(0, key).unwrap();
    }
    cluster.pass(2 * SECOND);
    let grown = cluster.bound_tokens(0) - before;
    assert!((grown - 2.0 * (100.0 + 2.0 * NODES as f64)).abs() < 1e-6, "{grown}");
    assert!((cluster.bound_tokens(1) - before).abs() < 1e-6, "others do not know of it");
    let local = Cluster::new(&[Limit::new("x", SlidingLog::per_minute(5)).local()]);
    local.reset(0, "a").unwrap();
    local.pass(2 * SECOND);
    assert!((local.bound_tokens(0) - 5.0).abs() < 1e-6);
}

#[test]
fn reset_in_an_outage_is_an_error_and_one_after_it_is_taken() {
    for limit in [Limit::strict, Limit::exact].map(|mode| mode(Limit::new("x", rules()[0]))) {
        let cluster = Cluster::new(std::slice::from_ref(&limit));
        assert_eq!(cluster.drain(&[0], "key"), BURST, "{limit:?}");
        cluster.store.set_away(true);
        let begun = cluster.clock.now();
        let step = Duration::from_millis(5);
        let refused = cluster.wait_by(step, cluster.limit(0).reset("key")).unwrap_err();
        assert!(
            matches!(refused, ResetError::Store { limit: "x", error: StoreError::TimedOut(_) }),
            "{refused}"
        );
        let waited_us = cluster.clock.now().micros_since(begun);
        assert!(waited_us < 11_000_000, "{limit:?}: {waited_us}");
        cluster.store.set_away(false);
        cluster.pass(5 * SECOND);
        cluster.wait_by(step, cluster.limit(0).reset("key")).unwrap();
        assert!(cluster.wait(cluster.limit(1).check_sure("key")).is_allowed(), "{limit:?}");
    }
}

#[test]
fn reset_whose_reply_is_lost_is_made_once() {
    let cluster = Cluster::new(&[Limit::new("x", rules()[0]).strict()]);
    assert_eq!(cluster.drain(&[0], "key"), BURST);
    cluster.store.fail(Fault::ReplyLost);
    cluster.store.fail(Fault::Duplicated);
    cluster.wait_by(Duration::from_millis(1), cluster.limit(0).reset("key")).unwrap();
    assert_eq!(cluster.drain(&[0, 1], "key"), BURST);
}

#[test]
fn reset_while_the_store_recovers_from_a_loss_is_not_undone_by_what_other_nodes_tell() {
    let cluster = Cluster::new(&[Limit::new("x", rules()[0]).strict()]);
    let limits = [0, 1].map(|node| cluster.nodes[node].limit("x").unwrap());
    for _ in 0..20 {
        for limit in &limits {
            let _ = limit.check("key");
        }
        cluster.pass(Duration::from_millis(10));
    }
    cluster.store.clear();
    cluster.wait_by(Duration::from_millis(1), cluster.limit(2).reset("key")).unwrap();
    let drained = cluster.drain(&[0, 1, 2], "key");
    assert!((BURST - 2..=BURST).contains(&drained), "{drained}");
}

/// It was said to be taken, and what the nodes had admitted by their policy came after it.
#[test]
fn reset_that_is_under_way_when_the_store_goes_is_not_undone_by_what_nodes_admitted_meanwhile() {
    for away_ms in (4_000..6_000).step_by(200) {
        let cluster = Cluster::new(&[Limit::new("x", Quota::per_second(10).burst(100)).strict()]);
        let others = [1, 2].map(|node| cluster.nodes[node].limit("x").unwrap());
        assert!(cluster.drain(&[0], "key") >= 100);
        cluster.store.set_away(true);
        let limit = cluster.limit(0);
        let mut reset = std::pin::pin!(limit.reset("key"));
        let (mut admitted, mut outcome) = (0, None);
        for ms in (0..9_000).step_by(10) {
            if ms == away_ms {
                cluster.store.set_away(false);
            }
            let poll = |context: &mut Context<'_>| Poll::Ready(reset.as_mut().poll(context));
            if let Poll::Ready(taken) = cluster.runtime.block_on(std::future::poll_fn(poll)) {
                outcome = Some(taken);
                break;
            }
            for other in others.iter().filter(|_| ms < away_ms) {
                admitted += u32::from(other.check("key").is_allowed());
            }
            cluster.pass(Duration::from_millis(10));
        }
        assert_eq!(outcome, Some(Ok(())), "{away_ms}");
        assert!(admitted > 5, "{away_ms}: by the outage policy {admitted}");
        let mut left = 0;
        // What the others held while the first node was denied is given back when they are asked: it is there for a second look.
        for limit in (0..2 * NODES).map(|node| cluster.limit(node % NODES)) {
            while cluster.wait(limit.check_sure("key")).is_allowed() {
                left += 1;
            }
        }
        assert!(left >= 95, "{away_ms}: {left} left");
    }
}

#[test]
fn key_without_room_is_reset_as_soon_as_there_is_some_and_told_if_there_is_none() {
    let limits = [Limit::new("x", rules()[0]).strict()];
    let cluster = Cluster::with_keys(&limits, 8);
    assert_eq!(cluster.drain(&[1], "key"), BURST);
    let limit = cluster.nodes[0].limit("x").unwrap();
    let handles: Vec<_> = (0..8).map(|key| limit.handle(&key)).collect();
    let step = Duration::from_millis(5);
    let refused = cluster.wait_by(step, cluster.limit(0).reset("key")).unwrap_err();
    assert_eq!(refused, ResetError::TooManyKeys { limit: "x", max_keys: 8 });
    assert_eq!(cluster.drain(&[1], "key"), 0);
    drop(handles);
    cluster.wait_by(step, cluster.limit(0).reset("key")).unwrap();
    assert_eq!(cluster.drain(&[1, 0], "key"), BURST);
}

#[test]
fn reset_ends_the_block_of_a_key_on_this_node() {
    for mode in [Limit::local, Limit::strict] {
        let limit = mode(Limit::new("x", rules()[0])).block_for(HOUR);
        let cluster = Cluster::new(&[limit]);
        // It is blocked by its first denial.
        assert!(cluster.drain(&[0], "key") > 0);
        assert!(cluster.wait(cluster.limit(0).check_sure("key")).is_override());
        cluster.reset(0, "key").unwrap();
        let allowed = cluster.wait(cluster.limit(0).check_sure("key"));
        assert!(allowed.is_allowed() && !allowed.is_override());
    }
}

#[test]
fn limiter_whose_runtime_has_ended_resets_nothing_and_says_so() {
    let cluster = Cluster::new(&[Limit::new("x", rules()[0])]);
    let limit = cluster.limit(0);
    drop(cluster.0.runtime);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused = runtime.block_on(limit.reset("key")).unwrap_err();
    assert_eq!(refused, ResetError::Ended { limit: "x" });
}

#[cfg(feature = "redis")]
mod on_redis {
    use std::time::Instant;

    use tidegate::{Limiter, RedisStore};

    use super::parts::redis_server::RedisServer;
    use super::*;

    const NODES: u32 = 8;
    const LOOKS: Duration = Duration::from_millis(10);
    const WITHIN: Duration = Duration::from_secs(60);

    /// Asks all nodes until each has allowed the key once. Returns how long that took, and what was allowed.
    #[allow(clippy::disallowed_methods, reason = "nodes on a real server live in real time")]
    async fn all_allow(limits: &[tidegate::ActiveLimit]) -> (Duration, u64) {
        let (begun, mut allowed) = (Instant::now(), vec![0; limits.len()]);
        while allowed.contains(&0) {
            assert!(begun.elapsed() < WITHIN, "a node does not allow the key: {allowed:?}");
            for (limit, allowed) in limits.iter().zip(&mut allowed) {
                *allowed += u64::from(*allowed == 0 && limit.check("key").is_allowed());
            }
            tokio::time::sleep(LOOKS).await;
        }
        (begun.elapsed(), allowed.into_iter().sum())
    }

    async fn drained(limits: &[tidegate::ActiveLimit]) -> u64 {
        let mut allowed = 0;
        for _ in 0..2 {
            for limit in limits {
                while limit.check_sure("key").await.is_allowed() {
                    allowed += 1;
                }
            }
            #[allow(clippy::disallowed_methods, reason = "leases are given back in real time")]
            tokio::time::sleep(SECOND).await;
        }
        allowed
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn eight_nodes_on_redis_allow_a_key_again_that_one_of_them_resets() {
        let server = RedisServer::start();
        let store = RedisStore::open(&server.url()).unwrap();
        let rules: [Rule; 4] = [
            Quota::per_hour(1).burst(200).into(),
            FixedWindow::per_day(200).into(),
            SlidingWindow::per_day(200).into(),
            SlidingLog::per_day(200).into(),
        ];
        for rule in rules {
            let limit = Limit::new(rule.algorithm(), rule);
            let mut nodes = Vec::new();
            for _ in 0..NODES {
                let builder = Limiter::builder().limit(limit.clone()).store(store.clone());
                nodes.push(builder.build_ready(WITHIN).await.unwrap());
            }
            let limits: Vec<_> =
                nodes.iter().map(|node| node.limit(rule.algorithm()).unwrap()).collect();
            let before = drained(&limits).await;
            limits[5].reset("key").await.unwrap();
            let (took, first) = all_allow(&limits).await;
            let after = first + drained(&limits).await;
            println!("{}: {:.2} s until all nodes allow", rule.algorithm(), took.as_secs_f64());
            let mut incidents = Incidents::default();
            incidents.resets = 1;
            let most = 200.0 + bound(&limit, NODES, &incidents);
            let label = format!("{}: {before} before, {after} after", rule.algorithm());
            println!("{label}, at most {most:.0}");
            assert!((before + after) as f64 <= most, "{label}");
            assert!(after >= 190, "{label}");
        }
    }
}
