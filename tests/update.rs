//! Limits that are updated while they run: a key keeps what it has, gets nothing new, and is denied no longer than its new
//! quota and its debt explain; whatever callers hold of a limit follows.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/changing_quotas.rs"]
mod changing_quotas;
#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use changing_quotas::{Central, burst, raises, spend_all};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, ConfigError, Decision, Event, FixedWindow, LeakyBucket, Limit, Limiter,
    OutagePolicy, Override, Quota, Rule, SlidingLog, Switch,
};
use virtual_nodes::VirtualNodes;

const NODES: usize = 4;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// How far time goes between two looks of the nodes.
const STEP: Duration = Duration::from_millis(10);

fn limit(rule: impl Into<Rule>) -> Limit {
    Limit::new("api", rule)
}

fn cluster(limit: &Limit) -> VirtualNodes {
    VirtualNodes::new(NODES, std::slice::from_ref(limit), |builder| builder)
}

fn update_all(cluster: &VirtualNodes, limit: &Limit) {
    for node in &cluster.nodes {
        node.update([limit.clone()]).unwrap();
    }
    cluster.settle();
}

/// A limiter of one node, and its limit as it was found before all updates.
fn one_node(limit: Limit) -> (Limiter, ActiveLimit, ManualClock) {
    let clock = ManualClock::new();
    clock.advance(HOUR);
    let limiter = Limiter::builder().limit(limit.local()).clock(&clock).build().unwrap();
    let api = limiter.limit("api").unwrap();
    (limiter, api, clock)
}

#[test]
fn key_of_one_node_keeps_what_it_has_after_an_update() {
    for (name, own, large, left) in raises() {
        let (limiter, before, _) = one_node(limit(own));
        for _ in 0..5 {
            assert!(before.check("key").is_allowed());
        }
        limiter.update([limit(large).local()]).unwrap();
        let after = limiter.limit("api").unwrap();
        let look = |limit: &ActiveLimit| limit.check_n("key", 0).unwrap().remaining();
        assert_eq!((look(&before), look(&after)), (left.into(), left.into()), "{name}");
        let all = large.quota().burst_tokens();
        assert_eq!(before.check("new").remaining(), all - 1, "{name}: a new key has all");
        assert_eq!((spend_all(&before), spend_all(&after)), (left, 0), "{name}");
        limiter.update([limit(own).local()]).unwrap();
        assert_eq!((spend_all(&before), spend_all(&after)), (0, 0), "{name}: nothing is made");
        assert_eq!(before.rule(), own, "{name}");
    }
}

/// Spends what a key has, by a way that waits for the store.
fn drain(nodes: &VirtualNodes, node: usize) -> u32 {
    nodes.drain(&nodes.nodes[node].async_limit("api").unwrap())
}

#[test]
fn key_that_nodes_share_keeps_what_it_has_after_an_update() {
    for make in [Limit::strict, Limit::exact] {
        for (name, own, large, left) in raises() {
            let nodes = cluster(&make(limit(own)));
            let before = nodes.nodes[0].async_limit("api").unwrap();
            for _ in 0..5 {
                assert!(nodes.wait(before.check_sure("key")).is_allowed());
            }
            nodes.pass(60 * SECOND, SECOND / 10);
            update_all(&nodes, &make(limit(large)));
            assert_eq!(drain(&nodes, 1), left, "{name}");
            update_all(&nodes, &make(limit(own)));
            assert_eq!((drain(&nodes, 0), drain(&nodes, 2)), (0, 0), "{name}: nothing is made");
            update_all(&nodes, &make(limit(large)));
            let more = if name == "token bucket" { 0 } else { left - 15 };
            assert!(drain(&nodes, 3) <= more, "{name}: nothing is made");
        }
    }
}

#[test]
fn bucket_of_one_node_is_the_definition_while_it_is_updated_at_random() {
    const QUOTAS: [(u32, u32); 4] = [(100, 10), (7, 100), (2000, 50), (30_000, 30_000)];
    let quota = |(rate, burst): (u32, u32)| Quota::per_second(rate.into()).burst(burst.into());
    for seed in 0..50 {
        let (limiter, api, clock) = one_node(limit(quota(QUOTAS[0])));
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut now_us, mut present, mut allowed, mut edges) = (0, 0, 0, 0);
        let mut central = Central { level: 10_000_000, at_us: 0, plan: QUOTAS[0] };
        for request in 0..5000 {
            if rng.u8(..) < 10 {
                present = rng.usize(..4);
                limiter.update([limit(quota(QUOTAS[present])).local()]).unwrap();
            }
            let us = if rng.u8(..) < 3 { rng.u64(..2_000_000) } else { rng.u64(..1000) };
            clock.advance(Duration::from_micros(us));
            now_us += us;
            let expected = central.allows(QUOTAS[present], now_us);
            let decided = api.check("key").is_allowed();
            if decided != expected {
                // A state is rounded down to a unit, which may cost a microsecond.
                let is_edge = expected && central.level < QUOTAS[present].0.into();
                assert!(is_edge, "seed {seed}, request {request}: {decided}, {}", central.level);
                central.level += 1_000_000;
                edges += 1;
            }
            allowed += u32::from(decided);
        }
        assert!((500..5000).contains(&allowed) && edges < 50, "{allowed}, {edges} at an edge");
    }
}

/// What a key of a busy cluster is allowed in `seconds`.
fn allowed(cluster: &VirtualNodes, seconds: u64, limits: &[ActiveLimit]) -> u32 {
    let mut allowed = 0;
    for _ in 0..seconds * 100 {
        for limit in limits {
            allowed += (0..3).filter(|_| limit.check("key").is_allowed()).count() as u32;
        }
        cluster.pass(STEP, STEP);
    }
    allowed
}

fn held_by(nodes: &VirtualNodes) -> Vec<ActiveLimit> {
    nodes.nodes.iter().map(|node| node.limit("api").unwrap()).collect()
}

#[test]
fn nodes_that_are_updated_one_after_the_other_agree_without_versions() {
    let [low, high] = [50, 400].map(|rate| limit(Quota::per_second(rate)));
    let nodes = cluster(&low);
    let before = held_by(&nodes);
    let first = allowed(&nodes, 10, &before);
    assert!((500..=570).contains(&first), "{first}");
    for (to, range) in [(&high, 3900..=4010), (&low, 480..=520), (&high, 3900..=4010)] {
        for node in &nodes.nodes {
            node.update([to.clone()]).unwrap();
            nodes.pass(SECOND / 4, STEP);
        }
        allowed(&nodes, 3, &before);
        let [rate, again] = [&before, &held_by(&nodes)].map(|held| allowed(&nodes, 10, held));
        assert!(range.contains(&rate) && range.contains(&again), "{rate}, {again} of {range:?}");
    }
}

/// Windows ended at other times by a rate that was rounded in the units of the limit as it was built: a reservation gave back
/// 40 tokens of a window that had ended, or nothing of one that had not.
#[test]
fn reservation_gives_back_in_its_own_window_after_an_update_and_by_an_override() {
    for by_override in [false, true] {
        let cluster = cluster(&limit(FixedWindow::per_minute(60)).strict());
        // So many windows since time began that a millionth of one is a part of a minute now.
        cluster.clock.advance(Duration::from_secs(1_700_000_000));
        cluster.pass(2 * SECOND, STEP);
        if by_override {
            let quota = Quota::new(130, 60 * SECOND);
            let set = Override::prefix("key").quota(quota).lasting(HOUR);
            cluster.wait_by(STEP, cluster.nodes[0].overrides().set("api", set)).unwrap();
            cluster.pass(5 * SECOND, STEP);
        } else {
            update_all(&cluster, &limit(FixedWindow::per_minute(130)).strict());
        }
        let api = cluster.nodes[0].limit("api").unwrap();
        let mut ended = 0;
        for step in 0..20 {
            let key = format!("key{step}");
            let reservation = cluster.wait(api.reserve(&key, 40)).unwrap();
            cluster.pass(3 * SECOND, SECOND / 10);
            assert!(cluster.wait(api.check_sure_n(&key, 41)).unwrap().is_allowed());
            reservation.commit(0);
            cluster.pass(SECOND, SECOND / 10);
            let left = cluster.wait(api.check_sure_n(&key, 0)).unwrap().remaining();
            assert!(matches!(left, 89 | 130), "{left} of 130 less 41, {step}, {by_override}");
            ended += u32::from(left == 130);
        }
        assert!(ended <= 2, "{ended} windows ended within the last second");
    }
}

/// It was refused for a rate that one node alone could not keep, though nodes shared the limit.
#[test]
fn limit_of_many_millions_a_second_is_updated() {
    let of = |tokens| limit(Quota::per_second(tokens));
    let cluster = cluster(&of(60_000_000));
    update_all(&cluster, &of(40_000_000));
    update_all(&cluster, &of(40_000_000).block_for(SECOND));
    let api = cluster.nodes[0].limit("api").unwrap();
    assert_eq!(api.check("new").quota(), Quota::per_second(40_000_000));
    let (limiter, ..) = one_node(of(30_000_000));
    limiter.update([of(30_000_000).local().block_for(SECOND)]).unwrap();
}

#[test]
fn node_that_begins_with_the_new_quota_follows_those_that_were_updated() {
    let [low, high] = [50, 400].map(|rate| limit(Quota::per_second(rate)));
    let mut nodes = cluster(&low);
    allowed(&nodes, 3, &held_by(&nodes));
    update_all(&nodes, &high);
    let entered = nodes.runtime.enter();
    let builder = Limiter::builder().limit(high.clone()).lanes(1).clock(&nodes.clock);
    let newcomer = builder.store(nodes.store.clone()).build().unwrap();
    drop(entered);
    nodes.nodes.push(newcomer);
    allowed(&nodes, 4, &held_by(&nodes));
    let rate = allowed(&nodes, 10, &held_by(&nodes));
    assert!((3900..=4010).contains(&rate), "{rate}");
}

/// An account that was open went on under the version that it had, and the store's other nodes insisted against it.
#[test]
fn higher_version_of_one_node_brings_the_others_along() {
    let of = |rate, version| limit(Quota::per_second(rate)).version(version);
    let nodes = cluster(&of(400, 1));
    let all = held_by(&nodes);
    allowed(&nodes, 3, &all);
    nodes.nodes[0].update([of(50, 2)]).unwrap();
    // After a minute nodes would ask for their own quota again.
    allowed(&nodes, 75, &all);
    let rate = allowed(&nodes, 10, &all);
    assert!((480..=520).contains(&rate), "{rate}");
}

/// Keys for which there is no room share a bucket, which names no plan: it went on under the first quota for ever.
#[test]
fn keys_without_room_follow_an_update_too() {
    let of = |rate| [limit(Quota::per_second(rate))];
    let nodes = VirtualNodes::new(1, &of(400), |builder| builder.max_keys(1));
    let api = nodes.nodes[0].limit("api").unwrap();
    // The one key that there is room for keeps it.
    let _pinned = api.handle("pinned");
    allowed(&nodes, 3, std::slice::from_ref(&api));
    nodes.nodes[0].update(of(50)).unwrap();
    allowed(&nodes, 5, std::slice::from_ref(&api));
    let rate = allowed(&nodes, 10, &[api]);
    assert!((480..=520).contains(&rate), "{rate}");
}

/// A quota that is so much larger or smaller that the units of the first one are coarse for it.
#[test]
fn quota_may_be_a_thousand_times_what_it_was_or_a_part_of_it() {
    for (from, to) in [(1, 1000), (1000, 1)] {
        let nodes = cluster(&limit(Quota::per_second(from).burst(from)));
        allowed(&nodes, 3, &held_by(&nodes));
        update_all(&nodes, &limit(Quota::per_second(to).burst(to)));
        allowed(&nodes, 3, &held_by(&nodes));
        let rate = allowed(&nodes, 20, &held_by(&nodes)) / 20;
        assert!((to * 97 / 100..=to * 102 / 100).contains(&rate.into()), "{rate} of {to}");
    }
}

type Way<'a> = Box<dyn Fn() -> Decision + 'a>;

#[test]
fn everything_that_was_asked_of_a_limiter_follows_an_update() {
    let nodes = cluster(&limit(burst(20)).plan("large", burst(50)));
    let node = &nodes.nodes[0];
    let api = node.limit("api").unwrap();
    let (large, handle, asked) =
        (api.plan("large").unwrap(), api.handle("handle"), node.async_limit("api").unwrap());
    let (group, all) = (node.group(["api"]).unwrap(), node.async_group(["api"]).unwrap());
    let ways: [(&str, u64, Way<'_>); 9] = [
        ("limit", 200, Box::new(|| api.check("limit"))),
        ("with a cost", 200, Box::new(|| api.check_n("cost", 150).unwrap())),
        ("plan", 500, Box::new(|| large.check("plan"))),
        ("handle", 200, Box::new(|| handle.check())),
        ("group", 200, Box::new(|| group.check("group"))),
        ("several", 200, Box::new(|| nodes.wait(node.check_all([api.on("several")])).unwrap())),
        ("sure", 200, Box::new(|| nodes.wait(api.check_sure("sure")))),
        ("asked", 200, Box::new(|| nodes.wait(asked.check_sure("asked")))),
        ("all", 200, Box::new(|| nodes.wait(all.check_sure("all")))),
    ];
    update_all(&nodes, &limit(burst(200)).plan("large", burst(500)));
    for (name, expected, way) in &ways {
        let decision = way();
        assert_eq!(decision.burst(), *expected, "{name}");
        assert!(decision.is_allowed() || *name == "with a cost", "{name}");
    }
    let slot = nodes.wait(api.until_ready("slot", SECOND));
    assert_eq!(slot.burst(), 200);
    assert_eq!(api.schedule("schedule").burst(), 200);
    let reservation = nodes.wait(api.reserve("reserve", 150)).unwrap();
    assert_eq!(reservation.decision().burst(), 200);
}

#[test]
fn plans_are_added_and_removed_and_overrides_find_them() {
    let with = |plans: &[(&str, u64)]| {
        let limit = limit(burst(10)).local();
        plans.iter().fold(limit, |limit, (name, tokens)| limit.plan(*name, burst(*tokens)))
    };
    let (limiter, api, _) = one_node(with(&[("a", 20)]));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let set = |key: &'static str, plan: &str| {
        runtime.block_on(limiter.overrides().set("api", Override::key(key).plan(plan)))
    };
    let a = api.plan("a").unwrap();
    set("by override", "a").unwrap();
    assert!(set("by override", "b").is_err() && api.plan("b").is_err());
    assert_eq!((a.check("1").burst(), api.check("by override").burst()), (20, 20));

    limiter.update([with(&[("a", 30), ("b", 40)])]).unwrap();
    // Whether the limiter's task has heard of it or not.
    assert_eq!((a.check("1").burst(), api.check("by override").burst()), (30, 30));
    assert_eq!(api.plan("b").unwrap().check("2").burst(), 40);
    set("by override", "b").unwrap();
    assert_eq!(api.check("by override").burst(), 40);

    limiter.update([with(&[("b", 50)])]).unwrap();
    runtime.block_on(limiter.settle());
    assert_eq!(a.check("1").burst(), 30, "who holds a plan that was removed goes on");
    assert!(matches!(api.plan("a"), Err(ConfigError::UnknownPlan { .. })));
    assert_eq!(api.check("by override").burst(), 50);
    limiter.update([with(&[])]).unwrap();
    runtime.block_on(limiter.settle());
    assert_eq!(api.check("by override").burst(), 10, "as if nothing were set");
    assert!(api.check_n("1", 11).is_err() && api.check_n("1", 10).is_ok());
}

#[test]
fn switch_and_block_are_updated_too() {
    let (limiter, api, clock) = one_node(limit(burst(1)));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let update = |limit: Limit| {
        limiter.update([limit.local()]).unwrap();
        runtime.block_on(limiter.settle());
    };
    assert_eq!(spend_all(&api), 1);
    let handle = api.handle("handle");
    assert!(handle.check().is_allowed());
    update(limit(burst(1)).switch(Switch::Shadow));
    assert!(api.check("key").is_allowed());
    update(limit(burst(1)).block_for(10 * SECOND));
    assert!(api.check("key").is_denied() && api.check("key").is_override(), "blocked");
    assert!(handle.check().is_denied() && handle.check().is_override(), "blocked");
    clock.advance(11 * SECOND);
    update(limit(burst(1)));
    assert!(api.check("key").is_denied() && !api.check("key").is_override());
}

#[test]
fn update_that_cannot_be_made_names_field_and_value_and_changes_nothing() {
    let store = || ScriptedStore::new(&ManualClock::new());
    let build = |limit: Limit| {
        let other = Limit::new("other", burst(1));
        let builder = Limiter::builder().limit(limit).limit(other);
        builder.store(store()).build().unwrap()
    };
    let hour = || limit(FixedWindow::per_hour(10));
    let cases = [
        (limit(burst(10)), limit(burst(20)).local(), "mode = Local"),
        (limit(burst(10)), limit(SlidingLog::per_hour(10)), "algorithm = sliding-log"),
        (hour(), limit(FixedWindow::per_minute(10)), "period = 60s"),
        (hour(), limit(FixedWindow::per_hour(10).zone("Europe/Berlin")), "period = 3600s"),
        (limit(burst(10)), limit(burst(10)).sync_interval(SECOND), "sync = Interval(1s)"),
        (limit(burst(10)), limit(burst(10)).outage(OutagePolicy::Closed), "outage = Closed"),
        (limit(burst(10)), limit(burst(10)).grace(SECOND), "grace = 1s"),
        (limit(burst(10)), limit(burst(10)).max_wait(SECOND), "max_wait = 1s"),
        (limit(burst(10)), limit(burst(10)).max_waiting(7), "max_waiting = 7"),
        (limit(burst(10)).version(2), limit(burst(20)).version(1), "version = 1"),
        (limit(Quota::per_second(100_000)), limit(Quota::per_minute(1)), "quota = "),
        (limit(burst(10)), limit(Quota::per_second(0)), "quota.tokens = 0"),
        (limit(burst(10)), limit(burst(10)).plan("a b", burst(1)), "plan = a b"),
        (limit(Quota::per_day(1)), limit(Quota::per_second(1_000_000)), "quota = "),
        (limit(LeakyBucket::per_second(1)), limit(LeakyBucket::per_second(2)), "quota = "),
    ];
    for (from, to, expected) in cases {
        let (limiter, rule) = (build(from.clone()), from.rule());
        let others = Limit::new("other", burst(2));
        let error = limiter.update([others, to]).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        let rules = ["api", "other"].map(|name| limiter.limit(name).unwrap().rule());
        assert_eq!(rules, [rule, burst(1).into()], "{error}");
        limiter.update([from, Limit::new("other", burst(3))]).unwrap();
        assert_eq!(limiter.limit("other").unwrap().rule(), burst(3).into());
    }
    let limiter = build(limit(burst(10)));
    let names = |names: &[&str]| {
        let limits: Vec<_> = names.iter().map(|name| Limit::new(*name, burst(1))).collect();
        limiter.update(limits).unwrap_err()
    };
    assert_eq!(names(&["api", "other", "api"]), ConfigError::DuplicateLimit("api".to_owned()));
}

/// Threads ask while another one updates: no decision is of neither quota, and nothing is made.
#[test]
fn threads_that_ask_while_a_limit_is_updated_get_one_of_its_quotas() {
    let (limiter, api, _) = one_node(limit(burst(500)));
    // A key that is new under the larger quota would have all of that.
    assert!(api.check("key").is_allowed());
    let allowed: u32 = std::thread::scope(|scope| {
        let ask = || {
            let api = api.clone();
            let decide = move |_| {
                let decision = api.check("key");
                assert!([500, 1000].contains(&decision.burst()), "{decision:?}");
                u32::from(decision.is_allowed())
            };
            scope.spawn(|| (0..50_000).map(decide).sum::<u32>())
        };
        let threads = [ask(), ask()];
        for round in 0..200 {
            limiter.update([limit(burst(500 << (round % 2))).local()]).unwrap();
        }
        threads.map(|thread| thread.join().unwrap()).into_iter().sum()
    });
    // Each change rounds what is left down to a unit.
    assert!((498..=499).contains(&allowed), "{allowed}");
}

#[test]
fn update_is_told_with_the_new_quota() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = heard.clone();
    let listen = move |event: &Event| {
        if let Event::Updated { limit, burst, per_second, .. } = event {
            told.lock().unwrap().push((limit.to_string(), *burst, *per_second));
        }
    };
    let of = |tokens| limit(Quota::per_second(tokens).burst(30)).local();
    let builder = Limiter::builder().limit(of(10)).clock(&ManualClock::new()).listen(listen);
    let limiter = builder.build().unwrap();
    limiter.update([of(20)]).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(limiter.settle());
    assert_eq!(*heard.lock().unwrap(), [("api".to_owned(), 30, 20.0)]);
}
