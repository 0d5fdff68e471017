//! Overrides that give keys a quota of their own: a key keeps what it has when its quota changes, gets nothing new, and is
//! denied no longer than its quota and its debt explain; all nodes and all ways to ask obey; what cannot be kept is refused.
#![cfg(all(feature = "testing", feature = "http"))]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/changing_quotas.rs"]
mod changing_quotas;
#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;
#[path = "parts/ways.rs"]
mod ways;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use changing_quotas::{Central, burst, raises, spend_all};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, Event, FixedWindow, Hashed, LeakyBucket, Limit, Limiter, Override, OverrideError,
    Quota, Rule, SlidingLog, SlidingWindow,
};
use tokio::runtime::Runtime;
use virtual_nodes::VirtualNodes;
use ways::ways;

const NODES: usize = 4;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// How far time goes between two looks of the nodes.
const STEP: Duration = Duration::from_millis(10);
/// Nodes hear of what another one sets within this time.
const HEARD_WITHIN: Duration = Duration::from_secs(2);

fn limit(rule: impl Into<Rule>) -> Limit {
    Limit::new("api", rule)
}

fn cluster(limit: &Limit) -> VirtualNodes {
    VirtualNodes::new(NODES, std::slice::from_ref(limit), |builder| builder)
}

/// Sets an override on the first of the nodes, and lets the others hear of it.
fn set(nodes: &VirtualNodes, set: Override<'_>) {
    nodes.wait(nodes.nodes[0].overrides().set("api", set)).unwrap();
    nodes.pass(HEARD_WITHIN, STEP);
}

fn remove(nodes: &VirtualNodes, removed: Override<'_>) {
    nodes.wait(nodes.nodes[0].overrides().remove("api", removed)).unwrap();
    nodes.pass(HEARD_WITHIN, STEP);
}

/// A limiter of one node, its limit and its clock.
struct OneNode {
    limiter: Limiter,
    api: ActiveLimit,
    clock: ManualClock,
    runtime: Runtime,
}

impl OneNode {
    fn new(limit: Limit) -> Self {
        let clock = ManualClock::new();
        clock.advance(HOUR);
        let limiter = Limiter::builder().limit(limit.local()).clock(&clock).build().unwrap();
        let api = limiter.limit("api").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        Self { limiter, api, clock, runtime }
    }

    fn try_set(&self, set: Override<'_>) -> Result<(), OverrideError> {
        self.runtime.block_on(self.limiter.overrides().set("api", set))
    }

    fn set(&self, set: Override<'_>) {
        self.try_set(set).unwrap();
    }

    fn remove(&self, removed: Override<'_>) {
        self.runtime.block_on(self.limiter.overrides().remove("api", removed)).unwrap();
    }

    fn left(&self, key: &str) -> u64 {
        self.api.check_n(key, 0).unwrap().remaining()
    }
}

// ---- quotas that the units of the limit hold only roughly -----------------------------------------

/// Each second report cut what a node held at the units that the store has for a full bucket of the limit's own, and the rest was lost.
#[test]
fn burst_far_above_the_limits_own_is_held_without_losing_tokens() {
    let nodes = VirtualNodes::new(1, &[limit(Quota::per_day(100))], |builder| builder);
    set(&nodes, Override::key("acme").quota(Quota::per_day(5000)));
    let (node, api) = (nodes.nodes[0].limit("api").unwrap(), nodes.nodes[0].async_limit("api"));
    let mut spent = 0;
    if node.check_n("acme", 400).unwrap().is_allowed() {
        spent += 400;
    }
    for _ in 0..20 {
        nodes.pass(SECOND, STEP);
        spent += u32::from(node.check("acme").is_allowed());
    }
    let api = api.unwrap();
    while nodes.wait(api.check_sure_n("acme", 100)).unwrap().is_allowed() {
        spent += 100;
    }
    assert!((4880..=5010).contains(&spent), "{spent} of 5000");
}

/// What was leased of the refill was rounded down at each report, until nothing was left.
#[test]
fn quota_far_below_the_limits_own_admits_its_rate_while_it_is_asked_for_all_the_time() {
    for (quota, seconds, expected) in
        [(Quota::per_hour(100), 1800, 50), (Quota::per_minute(7), 600, 70)]
    {
        let nodes = VirtualNodes::new(1, &[limit(Quota::per_second(1000))], |builder| builder);
        set(&nodes, Override::key("acme").quota(quota));
        let node = nodes.nodes[0].limit("api").unwrap();
        let api = nodes.nodes[0].async_limit("api").unwrap();
        while nodes.wait(api.check_sure("acme")).is_allowed() {}
        let mut admitted = 0;
        for _ in 0..seconds * 30 {
            nodes.clock.advance(Duration::from_micros(33_333));
            nodes.settle();
            admitted += u32::from(node.check("acme").is_allowed());
        }
        assert!((expected * 9 / 10..=expected + 2).contains(&admitted), "{quota:?}: {admitted}");
    }
}

// ---- what a key has after a change -------------------------------------------------------------

#[test]
fn key_of_one_node_keeps_what_it_has_when_it_is_given_a_quota_and_when_that_goes() {
    for (name, own, large, left) in raises() {
        let node = OneNode::new(limit(own));
        for _ in 0..5 {
            assert!(node.api.check("key").is_allowed() && node.api.check("other").is_allowed());
        }
        node.set(Override::key("key").quota(large.quota()));
        assert_eq!((node.left("key"), node.left("other")), (left.into(), 15), "{name}");
        let decision = node.api.check("key");
        assert_eq!((decision.rule(), decision.plan_name()), (large, None), "{name}");
        assert_eq!(spend_all(&node.api), left - 1, "{name}");
        node.set(Override::key("key").quota(own.quota()));
        assert_eq!(spend_all(&node.api), 0, "{name}: nothing is made");
        node.remove(Override::key("key"));
        assert_eq!(spend_all(&node.api), 0, "{name}: nothing is made");
        assert_eq!((node.left("other"), node.left("new")), (15, 20), "{name}: another key");
        node.set(Override::prefix("new").quota(large.quota()));
        let all = large.quota().burst_tokens();
        assert_eq!(node.left("new key"), all, "{name}: a new key has all");
    }
}

#[test]
fn key_keeps_what_its_own_quota_allows_of_it_when_its_override_ends_by_time() {
    for (name, own, large, _) in raises() {
        let node = OneNode::new(limit(own));
        node.set(Override::key("key").quota(large.quota()).lasting(10 * SECOND));
        let all = large.quota().burst_tokens() as u32;
        let spent = all * 6 / 10;
        for _ in 0..spent {
            assert!(node.api.check("key").is_allowed(), "{name}");
        }
        assert_eq!(node.left("key"), u64::from(all - spent), "{name}");
        node.clock.advance(10 * SECOND);
        // A bucket keeps what it has, a window what was spent in it.
        let left = if name == "token bucket" { 20 } else { 20_u32.saturating_sub(spent) };
        assert_eq!((spend_all(&node.api), spend_all(&node.api)), (left, 0), "{name}");
        assert_eq!(node.api.check("key").rule(), own, "{name}");
    }
}

/// Spends what a key has, by a way that waits for the store.
fn drain(nodes: &VirtualNodes, node: usize) -> u32 {
    nodes.drain(&nodes.nodes[node].async_limit("api").unwrap())
}

#[test]
fn key_that_nodes_share_keeps_what_it_has_when_it_is_given_a_quota_and_when_that_goes() {
    for make in [Limit::strict, Limit::exact] {
        for (name, own, large, left) in raises() {
            let nodes = cluster(&make(limit(own)));
            let first = nodes.nodes[0].async_limit("api").unwrap();
            for _ in 0..5 {
                assert!(nodes.wait(first.check_sure("key")).is_allowed());
            }
            nodes.pass(60 * SECOND, SECOND / 10);
            set(&nodes, Override::key("key").quota(large.quota()));
            assert_eq!(drain(&nodes, 1), left, "{name}");
            set(&nodes, Override::key("key").quota(own.quota()));
            assert_eq!(drain(&nodes, 2), 0, "{name}: nothing is made");
            remove(&nodes, Override::key("key"));
            assert_eq!((drain(&nodes, 0), drain(&nodes, 3)), (0, 0), "{name}: nothing is made");
        }
    }
}

#[test]
fn bucket_of_one_node_is_the_definition_while_overrides_change_at_random() {
    const QUOTAS: [(u32, u32); 4] = [(100, 10), (7, 100), (2000, 50), (300, 300)];
    let quota = |(rate, burst): (u32, u32)| Quota::per_second(rate.into()).burst(burst.into());
    for seed in 0..10 {
        let node = OneNode::new(limit(quota(QUOTAS[0])));
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut now_us, mut present, mut allowed, mut edges) = (0, 0, 0, 0);
        let mut central = Central { level: 10_000_000, at_us: 0, plan: QUOTAS[0] };
        for request in 0..3000 {
            if rng.u8(..) < 10 {
                present = rng.usize(..4);
                match present {
                    0 => node.remove(Override::key("key")),
                    _ => node.set(Override::key("key").quota(quota(QUOTAS[present]))),
                }
            }
            let us = if rng.u8(..) < 3 { rng.u64(..2_000_000) } else { rng.u64(..1000) };
            node.clock.advance(Duration::from_micros(us));
            now_us += us;
            let expected = central.allows(QUOTAS[present], now_us);
            let decided = node.api.check("key").is_allowed();
            if decided != expected {
                // A state is rounded down to a unit, which may cost a microsecond.
                let is_edge = expected && central.level < QUOTAS[present].0.into();
                assert!(is_edge, "seed {seed}, request {request}: {decided}, {}", central.level);
                central.level += 1_000_000;
                edges += 1;
            }
            allowed += u32::from(decided);
        }
        assert!((300..2990).contains(&allowed) && edges < 50, "{allowed}, {edges} at an edge");
    }
}

#[test]
fn lowered_quota_denies_no_longer_than_its_own_rate_explains() {
    let node = OneNode::new(limit(Quota::per_hour(1000)));
    assert_eq!(spend_all(&node.api), 1000);
    node.set(Override::key("key").quota(Quota::per_hour(10)));
    let denied = node.api.check("key");
    assert!(denied.retry_after() <= HOUR / 10 + Duration::from_micros(1), "{denied:?}");
    node.clock.advance(denied.retry_after());
    assert!(node.api.check("key").is_allowed());
}

#[test]
fn slots_of_a_leaky_bucket_stay_where_they_were_promised() {
    let queue = LeakyBucket::per_second(1).queue(10 * SECOND);
    let node = OneNode::new(limit(queue));
    let delays = [(); 3].map(|()| node.api.schedule("key").delay());
    assert_eq!(delays, [Duration::ZERO, SECOND, 2 * SECOND]);
    node.set(Override::key("key").quota(Quota::per_second(100)));
    assert_eq!(node.api.schedule("key").delay(), 3 * SECOND, "after the slots that were promised");
    let next = node.api.schedule("key");
    assert_eq!(next.delay(), 3 * SECOND + SECOND / 100);
    assert_eq!(next.rule(), LeakyBucket::per_second(100).queue(10 * SECOND).into());

    let nodes = cluster(&limit(queue).exact());
    let api = nodes.nodes[1].async_limit("api").unwrap();
    set(&nodes, Override::key("key").quota(Quota::per_second(100).burst(1)));
    let delays = [(); 3].map(|()| nodes.wait(api.schedule("key")).delay());
    assert!(delays[2] <= SECOND / 50, "{delays:?}");
    remove(&nodes, Override::key("key"));
    let delays = [(); 3].map(|()| nodes.wait(api.schedule("key")).delay());
    assert!(delays[2] > SECOND, "{delays:?}");
}

// ---- nodes and ways to ask ---------------------------------------------------------------------

/// What a key of a busy cluster is allowed in `seconds`.
fn allowed(nodes: &VirtualNodes, key: &str, seconds: u64) -> u32 {
    let limits: Vec<_> = nodes.nodes.iter().map(|node| node.limit("api").unwrap()).collect();
    let mut allowed = 0;
    for _ in 0..seconds * 100 {
        for limit in &limits {
            allowed += (0..3).filter(|_| limit.check(key).is_allowed()).count() as u32;
        }
        nodes.pass(STEP, STEP);
    }
    allowed
}

#[test]
fn key_that_nodes_share_gets_the_rate_of_its_override_within_two_seconds() {
    let nodes = cluster(&limit(Quota::per_second(50)));
    let first = allowed(&nodes, "key", 10);
    assert!((500..=570).contains(&first), "{first}");
    set(&nodes, Override::key("key").quota(Quota::per_second(400)).lasting(20 * SECOND));
    allowed(&nodes, "key", 1);
    let raised = allowed(&nodes, "key", 10);
    assert!((3900..=4010).contains(&raised), "{raised}");
    let other = allowed(&nodes, "other", 4);
    assert!((190..=300).contains(&other), "{other}: another key");
    nodes.pass(4 * SECOND, STEP);
    allowed(&nodes, "key", 3);
    let over = allowed(&nodes, "key", 10);
    assert!((480..=520).contains(&over), "{over}: the override is over");
    set(&nodes, Override::key("key").quota(Quota::per_second(10)));
    allowed(&nodes, "key", 3);
    let lowered = allowed(&nodes, "key", 10);
    assert!((95..=105).contains(&lowered), "{lowered}");
    remove(&nodes, Override::key("key"));
    allowed(&nodes, "key", 3);
    let again = allowed(&nodes, "key", 10);
    assert!((480..=520).contains(&again), "{again}: it was removed");
}

/// The account of the key was closed: a node that opens one takes its own quota to the store.
#[test]
fn quiet_key_has_its_quota_as_soon_as_a_node_is_asked_for_it() {
    let day = 24 * HOUR;
    let nodes = cluster(&limit(FixedWindow::new(20, day)));
    let limits: Vec<_> = nodes.nodes.iter().map(|node| node.async_limit("api").unwrap()).collect();
    for api in &limits {
        assert!(nodes.wait(api.check_sure("key")).is_allowed());
    }
    nodes.pass(600 * SECOND, SECOND / 10);
    set(&nodes, Override::key("key").quota(Quota::new(100, day)));
    let mut allowed = 0;
    for _ in 0..100 {
        let asked = nodes.wait(limits[1].check_sure("key"));
        allowed += u32::from(asked.is_allowed());
        nodes.pass(SECOND / 50, STEP);
    }
    assert!((90..=96).contains(&allowed), "{allowed} of 96");
}

#[test]
fn node_that_has_not_heard_of_a_quota_is_answered_by_the_store_all_the_same() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listen = heard.clone();
    let limits = [limit(Quota::per_second(20))];
    let nodes = VirtualNodes::new(NODES, &limits, |builder| {
        let heard = listen.clone();
        builder.listen(move |event: &Event| {
            if let Event::QuotaMismatch { .. } = event {
                heard.lock().unwrap().push(event.clone());
            }
        })
    });
    let given = Override::key("key").quota(Quota::per_second(400));
    nodes.wait(nodes.nodes[0].overrides().set("api", given)).unwrap();
    let [knows, unaware] = [0, 1].map(|node| nodes.nodes[node].async_limit("api").unwrap());
    assert!(nodes.wait(knows.check_sure("key")).is_sure());
    let decision = nodes.wait(unaware.check_sure("key"));
    assert_eq!((decision.burst(), decision.is_sure()), (20, true), "it has not heard");
    allowed(&nodes, "key", 3);
    assert!(heard.lock().unwrap().is_empty(), "{heard:?}");
    let rate = allowed(&nodes, "key", 5);
    assert!((1950..=2010).contains(&rate), "{rate}");
}

#[test]
fn keys_have_the_quota_of_their_override_whatever_way_they_are_asked() {
    let own = || limit(Quota::per_second(10));
    for limit in [own(), own().local()] {
        let nodes = cluster(&limit);
        let quota = Quota::per_second(1000).burst(700);
        let network = "203.0.113.0/24".parse().unwrap();
        for (key, given) in [
            ("acme", Override::key("acme").quota(quota).lasting(HOUR)),
            ("beta-7", Override::prefix("beta-").quota(quota).lasting(HOUR)),
            ("203.0.113.9", Override::network(network).quota(quota).lasting(HOUR)),
        ] {
            let handle = nodes.nodes[0].limit("api").unwrap().handle(key);
            assert_eq!(handle.check().burst(), 10);
            set(&nodes, given);
            for (way, ask) in ways(&nodes, key) {
                let decision = ask();
                assert_eq!((decision.quota(), decision.plan_name()), (quota, None), "{key}, {way}");
                assert!(decision.is_allowed() && !decision.is_override(), "{key}, {way}");
                nodes.pass(SECOND / 20, STEP);
            }
            assert_eq!(nodes.nodes[0].limit("api").unwrap().check("other").burst(), 10);
            assert!(handle.check_n(600).is_ok(), "more than the limit's own burst");
        }
        let hashed = Hashed("beta-8");
        assert_eq!(nodes.nodes[0].limit("api").unwrap().check(&hashed).burst(), 700);
        nodes.pass(HOUR, SECOND);
        for key in ["acme", "beta-7", "203.0.113.9"] {
            for (way, ask) in ways(&nodes, key) {
                assert_eq!(ask().burst(), 10, "{key}, {way}: the override is over");
                nodes.pass(SECOND / 5, STEP);
            }
        }
    }
}

#[test]
fn all_nodes_hear_of_a_quota_within_two_seconds() {
    for make in [|limit: Limit| limit, Limit::exact] {
        let nodes = cluster(&make(limit(Quota::per_second(10))));
        set(&nodes, Override::key("acme").quota(Quota::per_hour(250_000)));
        for node in &nodes.nodes {
            let api = node.async_limit("api").unwrap();
            let decision = nodes.wait(api.check_sure("acme"));
            assert_eq!(decision.quota(), Quota::per_hour(250_000));
            assert!(decision.is_allowed());
        }
    }
}

#[test]
fn reservation_is_settled_by_the_quota_that_decided() {
    for make in [Limit::exact, Limit::local] {
        let nodes = cluster(&make(limit(burst(20))));
        let api = nodes.nodes[0].async_limit("api").unwrap();
        assert!(nodes.wait(api.reserve("key", 100)).is_err());
        set(&nodes, Override::key("key").quota(burst(100)));
        let reserved = nodes.wait(api.reserve("key", 100)).unwrap();
        nodes.nodes[0].update([make(limit(burst(30)))]).unwrap();
        reserved.commit(40);
        nodes.pass(SECOND, STEP);
        let left = |key| nodes.wait(api.check_sure_n(key, 0)).unwrap().remaining();
        assert_eq!(left("key"), 60, "what is not used goes back");
        nodes.wait(api.reset("key")).unwrap();
        assert_eq!(left("key"), 100, "begun anew with all of its quota");
    }
}

#[test]
fn cost_may_be_as_high_as_the_burst_of_an_override_and_no_higher() {
    let node = OneNode::new(limit(Quota::per_second(10)).plan("large", Quota::per_second(20)));
    assert!(node.api.check_n("acme", 500).is_err());
    node.set(Override::key("acme").quota(Quota::per_second(500)));
    assert!(node.api.check_n("acme", 501).is_err());
    assert!(node.api.check_n("acme", 500).unwrap().is_allowed());
    assert!(node.api.check_n("other", 500).unwrap().is_denied(), "and no error");
}

/// First credit of the limit's burst would be 15 tokens a node for a key that has one token.
#[test]
fn new_key_has_no_more_first_credit_than_its_own_quota_allows() {
    let nodes = cluster(&limit(Quota::per_second(10_000)));
    let first = |key: &str| -> u32 {
        let limits = nodes.nodes.iter().map(|node| node.limit("api").unwrap());
        limits.map(|limit| (0..20).filter(|_| limit.check(key).is_allowed()).count() as u32).sum()
    };
    assert!(first("other") >= 15, "the limit has much");
    set(&nodes, Override::prefix("small-").quota(Quota::per_minute(10).burst(1)));
    let admitted = first("small-1");
    assert!((1..=NODES as u32).contains(&admitted), "{admitted}");
}

#[test]
fn key_has_no_more_credit_than_its_own_burst() {
    let nodes = cluster(&limit(Quota::per_second(10_000)).credit(10));
    set(&nodes, Override::prefix("small-").quota(Quota::per_minute(10).burst(1)));
    // A burst, what flows in, and a token on each node.
    let admitted = allowed(&nodes, "small-1", 6);
    assert!((1..=2 + NODES as u32).contains(&admitted), "{admitted}");
    let nodes = cluster(&limit(Quota::per_second(10_000)).credit(10));
    set(&nodes, Override::prefix("small-").quota(Quota::per_second(1).burst(1)));
    let admitted = allowed(&nodes, "small-1", 60);
    assert!((58..=61 + NODES as u32).contains(&admitted), "{admitted}");
}

#[test]
fn bound_of_the_excess_contains_what_a_reset_gives_a_key_with_a_quota() {
    for limit in [limit(burst(20)), limit(burst(20)).local()] {
        let nodes = cluster(&limit);
        set(&nodes, Override::key("key").quota(burst(500)));
        let api = nodes.nodes[0].limit("api").unwrap();
        nodes.wait(api.reset("key")).unwrap();
        nodes.pass(3 * SECOND, STEP);
        let bound = api.excess().bound_tokens;
        assert!(bound.is_some_and(|bound| bound >= 500.0), "{limit:?}: {bound:?}");
    }
}

// ---- plans and updates -------------------------------------------------------------------------

#[test]
fn update_of_the_limit_keeps_the_quota_of_an_override() {
    let node = OneNode::new(limit(burst(10)).plan("large", burst(30)));
    let (large, handle) = (node.api.plan("large").unwrap(), node.api.handle("key"));
    node.set(Override::key("key").quota(burst(100)));
    for _ in 0..5 {
        assert!(large.check("key").is_allowed(), "whatever plan callers name");
    }
    for updated in [limit(burst(20)), limit(burst(500)).plan("a", burst(1)), limit(burst(10))] {
        node.limiter.update([updated.local()]).unwrap();
        node.runtime.block_on(node.limiter.settle());
        let looks = [&node.api, &large].map(|limit| limit.check_n("key", 0).unwrap());
        assert_eq!(
            looks.map(|look| (look.burst(), look.remaining())),
            [(100, 5); 2],
            "what it had of 10"
        );
        assert_eq!(handle.check_n(0).unwrap().burst(), 100);
    }
    assert_eq!(node.api.check("other").burst(), 10);
    node.remove(Override::key("key"));
    assert_eq!((handle.check().burst(), spend_all(&node.api)), (10, 4), "no fresh burst");
}

#[test]
fn keys_with_a_quota_of_their_own_follow_an_update_of_all_else() {
    let own = || limit(Quota::per_second(100));
    let nodes = cluster(&own().credit(0));
    set(&nodes, Override::prefix("a-").quota(Quota::per_second(500)));
    let api = nodes.nodes[0].limit("api").unwrap();
    assert!(api.check("a-1").is_denied() && api.check("other").is_denied(), "without credit");
    nodes.nodes[0].update([own().credit(5)]).unwrap();
    nodes.settle();
    let credit = |key: &str| (0..20).filter(|_| api.check(key).is_allowed()).count();
    assert_eq!((credit("a-2"), credit("another")), (5, 5));
}

#[test]
fn nodes_that_are_updated_keep_the_quota_of_an_override() {
    let nodes = cluster(&limit(Quota::per_second(50)));
    set(&nodes, Override::key("key").quota(Quota::per_second(400)));
    allowed(&nodes, "key", 3);
    for node in &nodes.nodes {
        node.update([limit(Quota::per_second(20))]).unwrap();
    }
    nodes.settle();
    let rate = allowed(&nodes, "key", 10);
    assert!((3900..=4010).contains(&rate), "{rate}");
    remove(&nodes, Override::key("key"));
    allowed(&nodes, "key", 3);
    let own = allowed(&nodes, "key", 10);
    assert!((190..=210).contains(&own), "{own}");
}

// ---- what cannot be kept -----------------------------------------------------------------------

#[test]
fn quota_that_the_limit_cannot_keep_is_refused_by_limit_field_and_value() {
    let (second, hour) = (Quota::per_second(10), FixedWindow::per_hour(10));
    let leaky = LeakyBucket::per_second(10);
    let month = FixedWindow::per_month(10).zone("UTC");
    let cases = [
        (limit(second), Quota::per_second(0), "quota.tokens = 0"),
        (limit(second), Quota::per_second(1).burst(0), "quota.burst = 0"),
        (limit(second), Quota::new(1, Duration::ZERO), "quota.period = 0ns"),
        (limit(second), Quota::per_day(1).burst(400), "quota.burst = 400"),
        (limit(hour), Quota::per_minute(10), "quota.period = 60s"),
        (limit(hour), Quota::per_hour(10).burst(20), "quota.burst = 20"),
        (limit(hour).exact(), Quota::per_day(10), "quota.period = 86400s"),
        (limit(month).local(), Quota::per_day(10), "quota.period = 86400s"),
        (limit(month), Quota::new(70_000, 30 * 24 * HOUR), "quota = Quota { tokens: 70000"),
        (limit(SlidingWindow::per_hour(10)), Quota::per_day(10), "quota.period = 86400s"),
        (limit(SlidingLog::per_hour(10)).local(), Quota::per_day(10), "quota.period = 86400s"),
        (limit(leaky), Quota::per_second(20), "quota = 20/s: slots that nodes share"),
        (limit(leaky), Quota::per_second(10), "quota = 10/s: slots that nodes share"),
        (limit(leaky).local(), Quota::per_second(20).burst(5), "quota.burst = 5"),
        (limit(leaky).exact(), Quota::per_second(20).burst(5), "quota.burst = 5"),
        (limit(Quota::per_day(1)), Quota::per_second(1_000_000), "quota = "),
        (limit(hour), Quota::per_hour(100_000), "quota = "),
        // A unit a microsecond is a token a second.
        (limit(Quota::per_second(1_000_000)), Quota::per_day(1), "quota = "),
        (limit(second).local(), Quota::per_second(1_000_000_000), "quota"),
    ];
    for (limit, quota, expected) in cases {
        let nodes = VirtualNodes::new(1, std::slice::from_ref(&limit), |builder| builder);
        let (rule, given) = (limit.rule(), Override::key("acme").quota(quota));
        let set = nodes.wait(nodes.nodes[0].overrides().set("api", given));
        let refused = set.expect_err(&format!("{rule:?}: {quota:?}"));
        assert!(matches!(refused, OverrideError::Quota(_)), "{refused:?}");
        let text = refused.to_string();
        assert!(text.starts_with("override of limit \"api\": "), "{text}");
        assert!(text.contains(expected), "{text}, not {expected}");
        let api = nodes.nodes[0].async_limit("api").unwrap();
        assert_eq!(nodes.wait(api.check_sure_n("acme", 0)).unwrap().rule(), rule, "{text}");
    }
}

#[test]
fn quotas_that_the_limit_can_keep_are_accepted() {
    for (limit, quota) in [
        (limit(Quota::per_second(100)), Quota::per_hour(250_000)),
        (limit(Quota::per_second(1000)), Quota::per_hour(10)),
        (limit(Quota::per_day(10)), Quota::per_second(100)),
        (limit(FixedWindow::per_hour(10)), Quota::per_hour(10_000)),
        (limit(FixedWindow::per_month(100).zone("UTC")), Quota::new(7000, 30 * 24 * HOUR)),
        (limit(SlidingLog::per_hour(10)), Quota::per_hour(640)),
        (limit(SlidingLog::per_hour(10)).local(), Quota::per_hour(10_000)),
        (
            limit(FixedWindow::per_hour(10)).plan("large", FixedWindow::per_hour(1000)),
            Quota::per_hour(10_000),
        ),
        (limit(LeakyBucket::per_second(10)).exact(), Quota::per_hour(1)),
        (limit(Quota::per_second(100)).local(), Quota::per_day(1)),
        (limit(Quota::per_second(100)).exact(), Quota::per_second(100_000)),
    ] {
        let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
        set(&nodes, Override::key("acme").quota(quota));
        let api = nodes.nodes[1].async_limit("api").unwrap();
        let decision = nodes.wait(api.check_sure("acme"));
        let asked = (decision.quota().tokens(), decision.quota().period());
        assert_eq!(asked, (quota.tokens(), quota.period()), "{limit:?}");
        assert!(decision.is_allowed(), "{limit:?}");
    }
}

/// The limit of the other node has other windows: a rolling deploy, say.
#[test]
fn node_that_cannot_keep_a_quota_says_so_and_goes_on_as_if_nothing_were_set() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let build = |rule: FixedWindow| {
        let heard = heard.clone();
        let listen = move |event: &Event| {
            if let Event::OverrideNotUnderstood { record } = event {
                heard.lock().unwrap().push(record.clone());
            }
        };
        let builder = Limiter::builder().limit(limit(rule).local()).store(store.clone());
        let _entered = runtime.enter();
        builder.clock(&clock).listen(listen).build().unwrap()
    };
    let [hours, minutes] = [FixedWindow::per_hour(10), FixedWindow::per_minute(20)].map(build);
    let pass = || {
        for _ in 0..200 {
            clock.advance(STEP);
            runtime.block_on(minutes.settle());
        }
    };
    let set = |set| runtime.block_on(hours.overrides().set("api", set)).unwrap();
    let api = minutes.limit("api").unwrap();
    set(Override::key("acme").block());
    pass();
    assert!(api.check("acme").is_denied() && heard.lock().unwrap().is_empty());
    set(Override::key("acme").quota(Quota::per_hour(100)));
    pass();
    assert_eq!(api.check("acme").burst(), 20, "neither blocked nor 100 an hour");
    assert_eq!(*heard.lock().unwrap(), ["k:api"]);
    assert_eq!(hours.limit("api").unwrap().check("acme").burst(), 100);
}
