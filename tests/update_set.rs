//! Updates that add and remove limits: an added one limits on all nodes as if it had always been there, a removed one goes on for
//! those who hold it, and one that comes back gives nothing anew.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    Concurrency, ConfigError, Event, FixedWindow, LeakyBucket, Limit, Limiter, MemoryStore, Mode,
    OutagePolicy, Override, OverrideError, Quota, Rule, SlidingLog, SlidingWindow, Switch,
};
use virtual_nodes::VirtualNodes;

const NODES: usize = 4;
const SECOND: Duration = Duration::from_secs(1);
/// How far time goes between two looks of the nodes.
const STEP: Duration = Duration::from_millis(10);

fn first() -> Limit {
    Limit::new("first", Quota::per_hour(5))
}

fn second(rule: impl Into<Rule>) -> Limit {
    Limit::new("second", rule)
}

/// So many tokens, and hardly any more.
fn burst(tokens: u64) -> Quota {
    Quota::per_hour(1).burst(tokens)
}

fn cluster() -> VirtualNodes {
    VirtualNodes::new(NODES, &[first()], |builder| builder)
}

fn update_all(cluster: &VirtualNodes, limits: &[Limit]) {
    for node in &cluster.nodes {
        node.update(limits.to_vec()).unwrap();
    }
    cluster.settle();
}

/// A limiter of one node without a store.
fn one_node() -> Limiter {
    Limiter::builder().limit(first()).clock(&ManualClock::new()).build().unwrap()
}

fn allowed(limiter: &Limiter, limit: &str, requests: u32) -> u32 {
    let limit = limiter.limit(limit).unwrap();
    (0..requests).map(|_| u32::from(limit.check("key").is_allowed())).sum()
}

#[test]
fn limits_of_each_algorithm_and_mode_can_be_added() {
    let rules: [Rule; 5] = [
        burst(20).into(),
        FixedWindow::per_day(20).into(),
        SlidingWindow::per_day(20).into(),
        SlidingLog::per_day(20).into(),
        LeakyBucket::per_second(20).into(),
    ];
    for rule in rules {
        for mode in [Limit::strict, Limit::exact, Limit::local] {
            let (nodes, name) = (cluster(), format!("{rule:?}"));
            update_all(&nodes, &[first(), mode(second(rule))]);
            // Each node hears of the others.
            nodes.pass(2 * SECOND, STEP);
            let limits: Vec<_> =
                nodes.nodes.iter().map(|node| node.async_limit("second").unwrap()).collect();
            let began = nodes.clock.now().as_micros();
            let mut allowed = 0;
            for request in 0..100 {
                let limit = &limits[request % NODES];
                allowed += u32::from(nodes.wait(limit.check_sure("key")).is_allowed());
            }
            let took = Duration::from_micros(nodes.clock.now().as_micros() - began);
            match (rule, limits[0].mode()) {
                (Rule::LeakyBucket(_), mode) => {
                    let slots = 1 + (took.as_secs_f64() * 20.0) as u32;
                    let most = if mode == Mode::Local { slots * NODES as u32 } else { slots };
                    assert!((1..=most).contains(&allowed), "{name} {mode:?}: {allowed} of {most}");
                }
                (_, Mode::Local) => assert_eq!(allowed, 20 * NODES as u32, "{name}"),
                _ => assert_eq!(allowed, 20, "{name}"),
            }
        }
    }
}

#[test]
fn nodes_share_an_added_limit_at_the_speed_of_one() {
    let nodes = cluster();
    update_all(&nodes, &[first(), second(Quota::per_second(100))]);
    let limits: Vec<_> = nodes.nodes.iter().map(|node| node.limit("second").unwrap()).collect();
    let mut allowed = 0;
    for step in 0..1000 {
        // 400 a second.
        let limit = &limits[step % NODES];
        allowed += (0..4).map(|_| u32::from(limit.check("key").is_allowed())).sum::<u32>();
        nodes.pass(STEP, STEP);
    }
    // A burst, ten seconds' rate, and a token of credit from each node.
    assert!((1067..=1100 + NODES as u32).contains(&allowed), "{allowed}");
}

#[test]
fn removed_limit_goes_on_for_its_holders_and_is_not_found() {
    let limiter = one_node();
    limiter.update([first(), second(burst(10))]).unwrap();
    let held = limiter.limit("second").unwrap();
    let (handle, group) = (held.handle("key"), limiter.group(["first", "second"]).unwrap());
    assert_eq!(allowed(&limiter, "second", 4), 4);
    limiter.update([first()]).unwrap();
    for error in [
        limiter.limit("second").unwrap_err(),
        limiter.async_limit("second").unwrap_err(),
        limiter.group(["first", "second"]).unwrap_err(),
    ] {
        let expected = r#"limit "second" is not known; known are: first"#;
        assert_eq!(error.to_string(), expected);
    }
    assert!(!format!("{limiter:?}").contains("second"));
    assert!(handle.check().is_allowed() && held.check("key").is_allowed());
    assert!(group.check("key").is_allowed());
    assert_eq!((0..10).filter(|_| held.check("key").is_allowed()).count(), 3);
}

#[test]
fn limit_that_comes_back_is_as_it_was_left() {
    let nodes = cluster();
    let both = [first(), second(burst(20)).strict()];
    update_all(&nodes, &both);
    nodes.pass(2 * SECOND, STEP);
    let spend = |node: usize, requests: u32| {
        let limit = nodes.nodes[node].async_limit("second").unwrap();
        let allowed = |_| u32::from(nodes.wait(limit.check_sure("key")).is_allowed());
        (0..requests).map(allowed).sum::<u32>()
    };
    assert_eq!(spend(0, 15), 15);
    nodes.pass(2 * SECOND, STEP);
    update_all(&nodes, &[first()]);
    nodes.pass(2 * SECOND, STEP);
    update_all(&nodes, &both);
    nodes.pass(2 * SECOND, STEP);
    assert_eq!(spend(1, 10) + spend(0, 10), 5);
    // It comes back with another quota, too, but not with another algorithm.
    update_all(&nodes, &[first()]);
    update_all(&nodes, &[first(), second(burst(30)).strict()]);
    assert_eq!(spend(2, 40), 0, "no fresh burst");
    update_all(&nodes, &[first()]);
    let error = nodes.nodes[0].update([first(), second(SlidingLog::per_day(20))]).unwrap_err();
    assert!(error.to_string().contains("algorithm = sliding-log"), "{error}");
}

#[test]
fn update_of_a_set_that_cannot_be_kept_changes_nothing() {
    let limiter = Limiter::builder()
        .limit(first())
        .concurrency(Concurrency::new("jobs", 3))
        .clock(&ManualClock::new())
        .build()
        .unwrap();
    let cases: [(Vec<Limit>, &str); 4] = [
        (vec![second(burst(1)), second(burst(1))], r#"limit "second" is defined twice"#),
        (vec![Limit::new("jobs", burst(1))], r#"limit "jobs" is defined twice"#),
        (vec![second(burst(1)), Limit::new("third", burst(0))], "third"),
        (vec![second(burst(1)), Limit::new("first", SlidingLog::per_day(1))], "algorithm"),
    ];
    for (limits, expected) in cases {
        let error = limiter.update(limits).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(limiter.limit("first").unwrap().rule(), Quota::per_hour(5).into());
        assert!(limiter.limit("second").is_err(), "{error}");
    }
    let none = one_node().update([]).unwrap_err();
    assert_eq!(none.to_string(), "limiter: limits = none: give the limiter at least one limit");
}

#[test]
fn limiter_that_has_permits_may_lose_all_its_limits() {
    let builder = Limiter::builder().limit(first()).concurrency(Concurrency::new("jobs", 3));
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    limiter.update([]).unwrap();
    assert!(limiter.limit("first").is_err());
}

#[test]
fn limiter_adds_a_thousand_limits_and_says_that_it_can_add_no_more() {
    let limiter = one_node();
    for number in 0..1000 {
        let limit = Limit::new(format!("limit-{number}"), burst(1)).local();
        limiter.update([first(), limit]).unwrap();
    }
    let error = limiter.update([first(), second(burst(1))]).unwrap_err();
    assert!(matches!(error, ConfigError::Limiter { field: "limits", .. }), "{error}");
    assert_eq!(allowed(&limiter, "limit-999", 5), 1);
    limiter.update([first(), Limit::new("limit-7", burst(1)).local()]).unwrap();
    assert_eq!(allowed(&limiter, "limit-7", 5), 1);
}

#[test]
fn overrides_that_came_before_a_limit_was_added_hold_for_it() {
    let nodes = VirtualNodes::new(2, &[first()], |builder| builder);
    let both = || [first(), second(burst(20))];
    nodes.nodes[0].update(both()).unwrap();
    let block = || Override::key("key").block();
    nodes.wait_by(STEP, nodes.nodes[0].overrides().set("second", block())).unwrap();
    nodes.pass(2 * SECOND, STEP);
    let error = nodes.wait_by(STEP, nodes.nodes[1].overrides().set("second", block()));
    assert!(matches!(error, Err(OverrideError::UnknownLimit { .. })), "{error:?}");
    nodes.nodes[1].update(both()).unwrap();
    nodes.settle();
    let late = nodes.nodes[1].limit("second").unwrap();
    assert!(late.check("key").is_denied() && late.check("key").is_override());
    assert!(late.check("other").is_allowed());
    // Holders of a removed limit obey too, and a node without it can say what they are to obey.
    for node in &nodes.nodes {
        node.update([first()]).unwrap();
    }
    nodes.settle();
    assert!(late.check("key").is_denied());
    let key = Override::key("key");
    nodes.wait_by(STEP, nodes.nodes[0].overrides().remove("second", key)).unwrap();
    nodes.pass(2 * SECOND, STEP);
    assert!(late.check("key").is_allowed() && !late.check("key").is_override());
    nodes.wait_by(STEP, nodes.nodes[0].overrides().switch("second", Switch::Off)).unwrap();
    nodes.pass(2 * SECOND, STEP);
    assert!((0..30).all(|_| late.check("key").is_allowed()));
}

#[test]
fn updates_of_a_set_are_told_and_decisions_of_removed_limits_are_counted() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = heard.clone();
    let listen = move |event: &Event| {
        let said = match event {
            Event::Updated { limit, burst, .. } => format!("{limit} has {burst}"),
            Event::Removed { limit } => format!("{limit} is removed"),
            Event::Switched { limit, switch } => format!("{limit} is switched: {switch:?}"),
            Event::Decisions { limit, allowed, denied, is_removed: true, .. } => {
                format!("{limit} is held: {allowed} allowed, {denied} denied")
            }
            _ => return,
        };
        told.lock().unwrap().push(said);
    };
    let clock = ManualClock::new();
    let builder = Limiter::builder().limit(first()).clock(&clock).listen(listen);
    let limiter = builder.build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let third = Limit::new("third", burst(1)).switch(Switch::Off);
    limiter.update([first(), second(burst(2)), third]).unwrap();
    let held = limiter.limit("second").unwrap();
    runtime.block_on(limiter.settle());
    limiter.update([first()]).unwrap();
    runtime.block_on(limiter.settle());
    for _ in 0..3 {
        let _ = held.check("key");
    }
    clock.advance(2 * SECOND);
    runtime.block_on(limiter.settle());
    let said = heard.lock().unwrap();
    let expected = [
        "second has 2",
        "third has 1",
        "third is switched: Off",
        "second is removed",
        "third is removed",
        "second is held: 2 allowed, 1 denied",
    ];
    assert_eq!(*said, expected);
}

#[test]
fn added_limit_keeps_its_share_while_another_one_holds_all_common_keys() {
    let clock = ManualClock::new();
    let builder = Limiter::builder().limit(first().local()).max_keys(640).clock(&clock);
    let limiter = builder.build().unwrap();
    let (first_limit, key) = (limiter.limit("first").unwrap(), |key: u32| format!("key-{key}"));
    limiter.update([first().local(), second(burst(1)).local()]).unwrap();
    for stranger in 0..10_000 {
        let _ = first_limit.check(&key(stranger));
    }
    // Its share is a quarter of the 320 common keys.
    let second_limit = limiter.limit("second").unwrap();
    let allowed = (0..80).filter(|&customer| second_limit.check(&key(customer)).is_allowed());
    assert_eq!(allowed.count(), 80);
    assert!((0..80).all(|customer| second_limit.check(&key(customer)).is_denied()));
}

#[test]
fn callers_wait_for_an_added_limit_too() {
    let nodes = VirtualNodes::new(1, &[first()], |builder| builder);
    nodes.nodes[0]
        .update([first(), second(LeakyBucket::per_second(10).queue(SECOND)).local()])
        .unwrap();
    let limit = nodes.nodes[0].limit("second").unwrap();
    let began = nodes.clock.now().as_micros();
    for _ in 0..4 {
        let decision = nodes.wait(limit.until_ready("key", SECOND));
        assert!(decision.is_allowed(), "{decision:?}");
    }
    let took = Duration::from_micros(nodes.clock.now().as_micros() - began);
    assert!(took >= 3 * SECOND / 10, "{took:?}");
}

/// Threads ask for a limit as soon as it is there, before the limiter's task has heard of it.
#[test]
fn limiters_task_survives_decisions_of_a_limit_before_it_hears_of_the_update() {
    let store = MemoryStore::new();
    let limiter = Limiter::builder().limit(first()).store(store).build().unwrap();
    std::thread::scope(|scope| {
        let limiter = &limiter;
        for _ in 0..2 {
            scope.spawn(move || {
                for number in 0..200 {
                    let name = format!("limit-{number}");
                    let limit = loop {
                        match limiter.limit(&name) {
                            Ok(limit) => break limit,
                            Err(_) => std::thread::yield_now(),
                        }
                    };
                    for _ in 0..10 {
                        let _ = limit.check("key");
                    }
                }
            });
        }
        let mut limits = vec![first()];
        for number in 0..200 {
            let outage = OutagePolicy::Closed;
            limits.push(Limit::new(format!("limit-{number}"), burst(5)).outage(outage));
            limiter.update(limits.clone()).unwrap();
        }
    });
    // The task is alive: it answers about a limit of the last, once it is through with the updates. A clock that stalls on a busy
    // machine makes single answers unsure.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit = limiter.limit("limit-199").unwrap();
    let is_sure = |key: u32| {
        let decision = runtime.block_on(limit.check_sure(&key));
        decision.is_allowed() && decision.is_sure()
    };
    assert!((0..200).any(is_sure), "nobody answers");
}

#[test]
fn nodes_share_one_burst_of_a_limit_that_one_of_them_added_late() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let build = |limits: Vec<Limit>| {
        let builder = Limiter::builder().store(store.clone()).lanes(1).clock(&clock);
        limits.into_iter().fold(builder, tidegate::Builder::limit).build().unwrap()
    };
    let (late, always) = (build(vec![first()]), build(vec![first(), second(burst(10))]));
    late.update([first(), second(burst(10))]).unwrap();
    let pass = |seconds: u32| {
        for _ in 0..seconds * 100 {
            clock.advance(STEP);
            for node in [&late, &always] {
                runtime.block_on(node.settle());
            }
        }
    };
    pass(2);
    let of = |node: &Limiter| node.limit("second").unwrap();
    let mut allowed = 0;
    for _ in 0..200 {
        for node in [&late, &always] {
            allowed += u32::from(of(node).check("key").is_allowed());
        }
        pass(1);
    }
    // A burst, hardly any refill in 200 seconds, and no more credit than a token from each.
    assert!((10..=12).contains(&allowed), "{allowed}");
}
