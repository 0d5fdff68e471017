//! What a running limiter tells of its excess, against what it really admitted.
#![cfg(feature = "testing")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, Builder, Decision, Event, Excess, Incidents, Limit, Limiter, MemoryStore,
    OutagePolicy, Quota, bound,
};
use virtual_nodes::VirtualNodes;

const STEP: Duration = Duration::from_millis(5);
const SECOND: Duration = Duration::from_secs(1);
/// What a sum of floats may be off by.
const ERROR: f64 = 1e-6;

/// What was told last of the limit's excess.
type Told = Arc<Mutex<Option<Excess>>>;

/// Nodes that share a scripted store and live by one driven clock.
struct Cluster {
    clock: ManualClock,
    store: ScriptedStore,
    nodes: Vec<Limiter>,
    told: Told,
}

impl Cluster {
    fn new(nodes: usize, limit: &Limit) -> Self {
        Self::with(nodes, limit, |builder| builder)
    }

    fn with(nodes: usize, limit: &Limit, change: impl Fn(Builder) -> Builder) -> Self {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let mut cluster = Self { clock, store, nodes: Vec::new(), told: Told::default() };
        (0..nodes).for_each(|_| cluster.join_with(limit, &change));
        cluster
    }

    fn join(&mut self, limit: &Limit) {
        self.join_with(limit, |builder| builder);
    }

    fn join_with(&mut self, limit: &Limit, change: impl Fn(Builder) -> Builder) {
        let told = self.told.clone();
        let hear = move |event: &Event| {
            if let Event::Excess { excess, .. } = event {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(*excess);
            }
        };
        let builder = Limiter::builder().limit(limit.clone()).store(self.store.clone()).lanes(2);
        self.nodes.push(change(builder.clock(&self.clock).listen(hear)).build().unwrap());
    }

    fn apis(&self) -> Vec<ActiveLimit> {
        self.nodes.iter().map(|node| node.limit("api").unwrap()).collect()
    }

    async fn pass(&self, time: Duration) {
        for _ in 0..time.as_micros() / STEP.as_micros() {
            self.clock.advance(STEP);
            for node in &self.nodes {
                node.settle().await;
            }
        }
    }

    /// One request a node, all at one instant; returns how many were admitted.
    fn ask_all(&self, key: &str) -> u32 {
        self.apis().iter().map(|api| u32::from(api.check(key).is_allowed())).sum()
    }

    /// What each node tells.
    fn excess(&self) -> Vec<Excess> {
        self.apis().iter().map(ActiveLimit::excess).collect()
    }
}

fn limit() -> Limit {
    Limit::new("api", Quota::per_hour(60).burst(10)).credit(1)
}

fn bound_tokens(excess: &Excess) -> f64 {
    excess.bound_tokens.expect("the store was reached")
}

#[tokio::test]
async fn credit_that_several_nodes_use_is_seen_as_excess_within_the_bound() {
    const NODES: usize = 6;
    let cluster = Cluster::new(NODES, &limit());
    cluster.pass(3 * SECOND).await;
    // Ten tokens, and one each of six nodes asks for: the second round is on credit that the
    // store cannot cover.
    let mut admitted = 0;
    for _ in 0..4 {
        admitted += cluster.ask_all("user");
        cluster.pass(Duration::from_millis(200)).await;
    }
    cluster.pass(3 * SECOND).await;
    let over = f64::from(admitted) - 10.0;
    assert!(over >= 1.0, "{admitted} admitted of 10: nothing was in excess");
    let expected = bound(&limit(), NODES as u32, &Incidents::default());
    for told in cluster.excess() {
        assert!(told.observed_tokens > 0.0, "{told:?}");
        assert!(told.observed_tokens <= bound_tokens(&told), "{told:?}");
        assert!((bound_tokens(&told) - expected).abs() < ERROR, "{told:?}, not {expected}");
    }
    let deepest = cluster.excess().iter().map(|told| told.observed_tokens).fold(0.0, f64::max);
    assert!(deepest >= over - 0.1, "{deepest} seen of {over}");
    assert!(cluster.told.lock().unwrap().is_some(), "listeners hear of it too");
}

#[tokio::test]
async fn nothing_is_told_of_the_bound_before_the_store_was_reached() {
    let cluster = Cluster::new(1, &limit());
    cluster.store.set_away(true);
    cluster.pass(3 * SECOND).await;
    assert_eq!(cluster.excess()[0].bound_tokens, None);
    assert!(cluster.excess()[0].observed_tokens.abs() < ERROR);
    cluster.store.set_away(false);
    cluster.pass(3 * SECOND).await;
    assert!(cluster.excess()[0].bound_tokens.is_some());
}

#[tokio::test]
async fn a_limiter_without_a_store_has_no_excess() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_second(1000));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    for _ in 0..2 {
        clock.advance(SECOND);
        limiter.settle().await;
    }
    let told = limiter.limit("api").unwrap().excess();
    assert!(bound_tokens(&told).abs() < ERROR, "{told:?}");
    assert!(told.observed_tokens.abs() < ERROR, "{told:?}");
}

#[tokio::test]
async fn by_accuracy_a_node_gives_credit_once_the_store_has_counted_the_nodes() {
    let limit = Limit::new("api", Quota::per_hour(60).burst(100)).accuracy(0.03);
    let cluster = Cluster::new(2, &limit);
    assert_eq!(cluster.ask_all("early"), 0, "nobody knows how many nodes there are");
    cluster.pass(4 * SECOND).await;
    assert_eq!(cluster.ask_all("user"), 2, "one of the three tokens that may be too many for each");
    assert_eq!(cluster.ask_all("user"), 0);
    for told in cluster.excess() {
        assert!(bound_tokens(&told) <= 3.0 + ERROR, "{told:?}");
    }
}

#[tokio::test]
async fn nodes_that_join_and_a_loss_of_memory_raise_the_bound() {
    let mut cluster = Cluster::new(2, &limit());
    cluster.pass(3 * SECOND).await;
    let quiet = bound(&limit(), 2, &Incidents::default());
    assert!((bound_tokens(&cluster.excess()[0]) - quiet).abs() < ERROR);
    cluster.join(&limit());
    cluster.pass(3 * SECOND).await;
    let joined = bound(&limit(), 3, &Incidents::default());
    assert!((bound_tokens(&cluster.excess()[0]) - joined).abs() < ERROR);
    cluster.store.clear();
    cluster.pass(3 * SECOND).await;
    let mut loss = Incidents::default();
    loss.losses_of_memory = 1;
    let lost = bound_tokens(&cluster.excess()[0]);
    assert!(lost >= bound(&limit(), 3, &loss) - ERROR, "{lost}");
}

#[tokio::test]
async fn an_outage_lived_through_on_shares_raises_the_bound_and_a_closed_one_does_not() {
    for (policy, raised) in [(OutagePolicy::Share, true), (OutagePolicy::Closed, false)] {
        let limit = limit().outage(policy);
        let cluster = Cluster::new(2, &limit);
        cluster.pass(3 * SECOND).await;
        // Without a lease, shares begin with a part of what the nodes have seen of the key.
        cluster.ask_all("user");
        cluster.pass(3 * SECOND).await;
        let before = bound_tokens(&cluster.excess()[0]);
        cluster.store.set_away(true);
        for _ in 0..10 {
            cluster.ask_all("user");
            cluster.pass(SECOND).await;
        }
        cluster.store.set_away(false);
        cluster.pass(3 * SECOND).await;
        let after = bound_tokens(&cluster.excess()[0]);
        assert_eq!(after > before + 1.0, raised, "{policy:?}: {before}, then {after}");
    }
}

#[tokio::test]
async fn keys_in_use_and_at_rest_lose_their_credit_when_there_are_more_nodes_than_it_can_be_shared_by()
 {
    let login = Limit::new("api", Quota::per_hour(60).burst(3)).accuracy(1.0);
    for rest_ms in [0, 300, 600, 900, 1200, 5000] {
        let mut cluster = Cluster::new(2, &login);
        // A node that is new gives its part of the credit after 1.5 s, with the next call of a lane.
        cluster.pass(4 * SECOND).await;
        let keys: Vec<String> = (0..10).map(|key| format!("user-{key}")).collect();
        for key in &keys {
            assert_eq!(cluster.ask_all(key), 2, "one of credit on each node");
        }
        cluster.pass(Duration::from_millis(rest_ms)).await;
        (0..6).for_each(|_| cluster.join(&login));
        cluster.pass(4 * SECOND).await;
        for key in &keys {
            let admitted = cluster.ask_all(key);
            assert_eq!(admitted, 0, "{key}, {rest_ms} ms: eight nodes share three tokens");
        }
        assert_eq!(cluster.ask_all("new"), 0);
        for told in cluster.excess() {
            assert!(told.observed_tokens <= ERROR, "{told:?}");
            assert!(bound_tokens(&told) <= 3.0 + ERROR, "{told:?}");
        }
    }
}

#[tokio::test]
async fn first_credit_that_is_left_shrinks_when_nodes_join() {
    let limit = Limit::new("api", Quota::per_hour(60).burst(60));
    let mut cluster = Cluster::new(1, &limit);
    cluster.pass(4 * SECOND).await;
    let first = cluster.apis().remove(0);
    assert!(first.check("user").is_allowed(), "one of fifteen");
    (0..19).for_each(|_| cluster.join(&limit));
    for _ in 0..10 {
        // The key stays in the books, and its level above half of the burst.
        cluster.pass(SECOND / 2).await;
        let _ = first.check("user");
    }
    cluster.pass(SECOND / 2).await;
    let admitted = (0..60).map(|_| first.check("user")).filter(Decision::is_allowed);
    let on_credit = admitted.filter(|decision| !decision.is_sure()).count();
    assert!(on_credit <= 1, "{on_credit} of one token a node");
}

#[tokio::test]
async fn first_credit_of_an_uncounted_node_is_its_part_of_a_quarter_of_the_burst() {
    let clock = ManualClock::new();
    for (max_nodes, admitted) in [(None, 2), (Some(4), 7), (Some(1), 15), (Some(1000), 1)] {
        let builder = Limiter::builder().limit(Limit::new("api", Quota::per_hour(100)));
        let builder = builder.store(ScriptedStore::new(&clock)).clock(&clock);
        let builder = max_nodes.into_iter().fold(builder, Builder::max_nodes);
        let api = builder.build().unwrap().limit("api").unwrap();
        let allowed = (0..20).filter(|_| api.check("user").is_allowed()).count();
        assert_eq!(allowed, admitted, "of {max_nodes:?} nodes");
    }
}

/// A table that is full of invented keys all the time evicts what it can. A key whose view it evicts would get first
/// credit again.
#[tokio::test]
async fn junk_at_the_cap_renews_no_first_credit_of_a_spent_key() {
    const NODES: usize = 4;
    const STEPS: u32 = 7200;
    let limit = Limit::new("api", Quota::per_hour(5));
    let cluster = Cluster::with(NODES, &limit, |builder| builder.max_keys(200));
    cluster.pass(3 * SECOND).await;
    let apis = cluster.apis();
    let (mut admitted, mut room) = (0, 0);
    for step in 0..STEPS {
        if step % 20 == 0 {
            // Rarely, so that nodes close their books on it in between.
            admitted += cluster.ask_all("spent");
        }
        for (node, api) in apis.iter().enumerate() {
            for junk in 0..4 {
                room += u32::from(api.check(&(node, step, junk)).is_allowed());
            }
        }
        cluster.clock.advance(SECOND / 2);
        for node in &cluster.nodes {
            node.settle().await;
        }
    }
    assert!(room > 1500, "keys came and went: {room}");
    // The burst, an hour's refill, and the first credit of each node: a token.
    assert!((9..=5 + 5 + NODES as u32).contains(&admitted), "{admitted}");
}

#[tokio::test]
async fn first_credit_is_given_again_when_the_bucket_is_full_again() {
    let limit = Limit::new("api", Quota::per_second(1).burst(8));
    let cluster = Cluster::new(1, &limit);
    cluster.pass(5 * SECOND).await;
    let api = &cluster.apis()[0];
    for round in 0..5 {
        let admitted = (0..8).filter(|_| api.check("user").is_allowed()).count();
        assert_eq!(admitted, 4, "half of the burst at once, round {round}");
        cluster.pass(12 * SECOND).await;
    }
}

#[tokio::test]
async fn limiters_that_share_a_memory_store_give_no_credit_by_accuracy_before_they_are_counted() {
    let clock = ManualClock::new();
    let store = MemoryStore::new();
    let limit = Limit::new("api", Quota::per_second(1000)).accuracy(0.01);
    let node = || {
        let builder = Limiter::builder().limit(limit.clone()).store(store.clone());
        builder.clock(&clock).build().unwrap()
    };
    let nodes: Vec<Limiter> = (0..3).map(|_| node()).collect();
    let ask = |node: &Limiter| {
        let api = node.limit("api").unwrap();
        (0..50).filter(|_| api.check("user").is_allowed()).count()
    };
    let admitted: usize = nodes.iter().map(ask).sum();
    assert!(admitted <= 10, "{admitted} of the 10 tokens that 1% of the burst are");
}

/// The store could not remember so much debt, so that nodes gave their credit again: 50 an hour.
#[test]
fn slow_limit_on_several_nodes_gives_each_credit_once() {
    let limit = Limit::new("x", Quota::per_hour(15)).credit(15);
    let cluster = VirtualNodes::new(4, &[limit], |builder| builder);
    let limits: Vec<_> = cluster.nodes.iter().map(|node| node.limit("x").unwrap()).collect();
    let (mut admitted, hours) = (0, 24);
    for _ in 0..60 * hours {
        for limit in &limits {
            while limit.check("key").is_allowed() {
                admitted += 1;
            }
        }
        cluster.pass(2 * SECOND, Duration::from_millis(100));
        cluster.pass(58 * SECOND, 29 * SECOND);
    }
    let most = 15 + 15 * hours + 4 * 15;
    println!("{admitted} of {most}");
    assert!(admitted <= most, "{admitted} of {most}");
    assert!(admitted >= 15 * hours * 9 / 10, "{admitted}");
}
