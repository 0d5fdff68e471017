//! Several limits in one decision, and costs that are known only afterwards: what is charged is what was allowed and used.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a task that panics is a service's own")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, AsyncGroup, AsyncLimit, Builder, CheckError, ConfigError, Decision, Event,
    FixedWindow, LeakyBucket, Limit, Limiter, OutagePolicy, Quota, ReserveError, Rule, SlidingLog,
    SlidingWindow,
};
use virtual_nodes::VirtualNodes;

const NODES: usize = 4;
const HOUR: Duration = Duration::from_secs(3600);

/// Nodes that share limits in virtual time.
struct Cluster {
    shared: VirtualNodes,
    /// Tokens that nodes told were not given back.
    kept: Arc<AtomicU64>,
}

impl Deref for Cluster {
    type Target = VirtualNodes;

    fn deref(&self) -> &VirtualNodes {
        &self.shared
    }
}

impl Cluster {
    fn new(limits: &[Limit]) -> Self {
        let kept = Arc::new(AtomicU64::new(0));
        let listens = |builder: Builder| {
            let kept = kept.clone();
            builder.listen(move |event: &Event| {
                if let Event::NotGivenBack { tokens, .. } = event {
                    kept.fetch_add((*tokens).into(), Ordering::Relaxed);
                }
            })
        };
        Self { shared: VirtualNodes::new(NODES, limits, listens), kept }
    }

    fn limits(&self, name: &str) -> Vec<ActiveLimit> {
        self.nodes.iter().map(|node| node.limit(name).unwrap()).collect()
    }

    /// Spends all that is left of a key, on one node, after the others have given back what they held. A node that has a lease
    /// does not ask for the last tokens, and gives the lease back after a while: so there are some `rounds`.
    fn drain(&self, limit: &str, rounds: usize) -> u64 {
        let limit = self.nodes[0].async_limit(limit).unwrap();
        let mut drained = 0;
        for _ in 0..rounds {
            self.pass(Duration::from_secs(60), Duration::from_millis(100));
            while self.wait(limit.check_sure("key")).is_allowed() {
                drained += 1;
            }
        }
        drained
    }
}

/// As good as no refill: a token in eight hours.
fn burst(name: &str, tokens: u64) -> Limit {
    Limit::new(name, Quota::new(1, 8 * HOUR).burst(tokens)).strict()
}

#[test]
fn all_limits_of_a_group_are_charged_for_what_all_allowed_and_for_nothing_else() {
    const BURSTS: [(&str, u64); 3] = [("second", 300), ("minute", 200), ("hour", 250)];
    for seed in 0..20 {
        let cluster = Cluster::new(&BURSTS.map(|(name, tokens)| burst(name, tokens)));
        let groups: Vec<_> = cluster
            .nodes
            .iter()
            .map(|node| node.group(BURSTS.map(|(name, _)| name)).unwrap())
            .collect();
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut together, mut denied, mut alone) = (0, [0; 3], [0; 3]);
        for _ in 0..900 {
            let node = rng.usize(..NODES);
            let (group, cost) = (&groups[node], rng.u32(1..3));
            match rng.u8(..8) {
                0..3 => {
                    let index = rng.usize(..3);
                    let limit = cluster.nodes[node].limit(BURSTS[index].0).unwrap();
                    alone[index] += u64::from(cluster.wait(limit.check_sure("key")).is_allowed());
                }
                kind => {
                    let decision = if kind < 6 {
                        cluster.wait(group.check_sure_n("key", cost)).unwrap()
                    } else {
                        group.check_n("key", cost).unwrap()
                    };
                    if decision.is_allowed() {
                        together += u64::from(cost);
                    } else {
                        let by = BURSTS.iter().position(|(name, _)| *name == decision.limit_name());
                        denied[by.unwrap()] += 1;
                    }
                }
            }
            if rng.u8(..4) == 0 {
                cluster.pass(Duration::from_millis(10), Duration::from_millis(5));
            }
        }
        let label =
            format!("seed {seed}: {together} together, {alone:?} alone, denied by {denied:?}");
        println!("{label}");
        for (index, (name, tokens)) in BURSTS.into_iter().enumerate() {
            let drained = cluster.drain(name, 3);
            let charged = together + alone[index];
            assert_eq!(charged + drained, tokens, "{name}: {drained} left, {label}");
        }
        assert!(denied.iter().sum::<u64>() > 100, "{label}");
    }
}

/// The second limit has to notify its engine of the first token that is pending; of the first one something is pending.
#[test]
fn group_charges_its_first_limit_once_where_the_second_needs_a_second_look() {
    let limit = |name| Limit::new(name, Quota::new(1, HOUR).burst(4000)).strict();
    let cluster = Cluster::new(&[limit("big"), limit("small")]);
    let node = &cluster.nodes[0];
    let (big, group) = (node.limit("big").unwrap(), node.group(["big", "small"]).unwrap());
    let (mut alone, mut together) = (0, 0);
    for _ in 0..300 {
        for _ in 0..4 {
            alone += u64::from(big.check("key").is_allowed());
            together += u64::from(group.check("key").is_allowed());
        }
        cluster.pass(Duration::from_millis(20), Duration::from_millis(5));
    }
    assert!(together > 1000, "{together} of 1200");
    assert_eq!(alone + together + cluster.drain("big", 3), 4000, "{alone} and {together}");
    assert_eq!(together + cluster.drain("small", 3), 4000, "{together}");
}

#[test]
fn threads_that_take_two_limits_never_charge_one_alone() {
    const TOKENS: u64 = 20_000;
    let rules: [fn(u64) -> Rule; 4] = [
        |tokens| Quota::new(1, HOUR / 4).burst(tokens).into(),
        |tokens| FixedWindow::new(tokens, HOUR).into(),
        |tokens| SlidingWindow::new(tokens, HOUR).into(),
        |tokens| SlidingLog::new(tokens, HOUR).into(),
    ];
    for rule in rules {
        let clock = ManualClock::new();
        let limiter = Limiter::builder()
            .limit(Limit::new("x", rule(TOKENS)).local())
            .limit(Limit::new("y", rule(TOKENS)).local())
            .clock(&clock)
            .build()
            .unwrap();
        let (x, y) = (limiter.limit("x").unwrap(), limiter.limit("y").unwrap());
        let (both, alone) = (AtomicU64::new(0), [const { AtomicU64::new(0) }; 2]);
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let (limiter, x, y, both, alone) = (&limiter, &x, &y, &both, &alone);
                scope.spawn(move || {
                    let group = limiter.group(["y", "x"]).unwrap();
                    let mut rng = fastrand::Rng::with_seed(thread);
                    for _ in 0..2 * TOKENS {
                        if rng.u8(..4) == 0 {
                            let index = rng.usize(..2);
                            let is_allowed = [x, y][index].check("key").is_allowed();
                            alone[index].fetch_add(is_allowed.into(), Ordering::Relaxed);
                        } else {
                            let is_allowed = group.check("key").is_allowed();
                            both.fetch_add(is_allowed.into(), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let both = both.into_inner();
        for (limit, alone) in [x, y].iter().zip(alone) {
            let left = limit.check_n("key", 0).unwrap().remaining();
            assert_eq!(both + alone.into_inner() + left, TOKENS, "{:?}", limit.rule());
        }
    }
}

#[test]
fn denial_of_a_group_is_that_of_the_limit_with_the_longest_wait() {
    let clock = ManualClock::new();
    let limiter = Limiter::builder()
        .limit(Limit::new("hour", Quota::per_hour(2)).local())
        .limit(Limit::new("second", Quota::per_second(2)).local())
        .limit(Limit::new("day", FixedWindow::per_day(100)).local())
        .clock(&clock)
        .build()
        .unwrap();
    let group = limiter.group(["second", "day", "hour"]).unwrap();
    let names: Vec<_> = group.limits().iter().map(ActiveLimit::name).collect();
    assert_eq!(names, ["hour", "second", "day"]);
    let first = group.check("key");
    assert_eq!((first.is_allowed(), first.remaining()), (true, 1));
    assert!(group.check("key").is_allowed());
    let denied = group.check("key");
    assert_eq!((denied.limit_name(), denied.retry_after()), ("hour", HOUR / 2));
    clock.advance(HOUR / 2);
    assert!(group.check("key").is_allowed());
    // A look spends nothing.
    assert!(group.check_n("key", 0).unwrap().is_denied());
    assert_eq!(limiter.limit("day").unwrap().check_n("key", 0).unwrap().remaining(), 97);
    assert!(matches!(
        group.check_n("key", 3),
        Err(CheckError::CostTooHigh { limit: "hour", cost: 3, max: 2 })
    ));
}

#[test]
fn groups_that_make_no_sense_are_refused() {
    let build = |limits: [Limit; 2]| {
        limits.into_iter().fold(Limiter::builder(), tidegate::Builder::limit).build().unwrap()
    };
    let second = || Limit::new("second", Quota::per_second(1));
    let limiter = build([second(), Limit::new("login", SlidingLog::per_minute(5)).exact()]);
    let refused = |names: &[&str]| limiter.group(names).unwrap_err();
    assert!(matches!(refused(&[]), ConfigError::EmptyGroup));
    assert!(matches!(refused(&["second", "secnd"]), ConfigError::UnknownLimit { .. }));
    assert!(matches!(refused(&["second", "second"]), ConfigError::RepeatedLimit(_)));
    assert!(matches!(refused(&["second", "login"]), ConfigError::ExactLimit(_)));
}

#[tokio::test]
async fn limits_of_several_keys_are_charged_together_and_costs_of_one_key_are_added_up() {
    let limiter = Limiter::builder()
        .limit(Limit::new("user", Quota::per_hour(5)).local())
        .limit(Limit::new("address", Quota::per_hour(8)).local())
        .build()
        .unwrap();
    let (user, address) = (limiter.limit("user").unwrap(), limiter.limit("address").unwrap());
    let check = async |name, cost| {
        limiter.check_all([address.on("192.0.2.7").cost(cost), user.on(name)]).await.unwrap()
    };
    let left = |limit: &ActiveLimit, key| limit.check_n(key, 0).unwrap().remaining();
    assert!(check("ann", 3).await.is_allowed());
    assert!(check("bob", 3).await.is_allowed());
    let denied = check("ann", 3).await;
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "address"));
    assert_eq!((left(&user, "ann"), left(&user, "bob"), left(&address, "192.0.2.7")), (4, 4, 2));
    let twice = [user.on("ann").cost(2), user.on("ann").cost(3)];
    assert!(limiter.check_all(twice).await.unwrap().is_denied());
    let twice = [user.on("ann").cost(2), user.on("ann").cost(2)];
    assert!(limiter.check_all(twice).await.unwrap().is_allowed());
    assert_eq!(left(&user, "ann"), 0);
    assert!(matches!(limiter.check_all([]).await, Err(CheckError::NoLimit)));
    let too_high = limiter.check_all([user.on("ann").cost(3), user.on("ann").cost(3)]).await;
    assert!(matches!(too_high, Err(CheckError::CostTooHigh { cost: 6, max: 5, .. })));
}

#[test]
fn reserved_tokens_that_are_not_used_go_back_and_what_is_used_beyond_is_charged() {
    const TOKENS: u64 = 1000;
    for seed in 0..4 {
        let cluster = Cluster::new(&[burst("tokens", TOKENS)]);
        let limits = cluster.limits("tokens");
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut used, mut open) = (0, Vec::new());
        for _ in 0..300 {
            let estimate = rng.u32(1..80);
            match cluster.wait(limits[rng.usize(..NODES)].reserve("key", estimate)) {
                Ok(reservation) => open.push(reservation),
                Err(error) => assert!(matches!(error, ReserveError::Denied(_)), "{error}"),
            }
            // Some are settled at once, and some seconds later, when they have been reported.
            while open.len() > rng.usize(..6) {
                let reservation = open.swap_remove(rng.usize(..open.len()));
                let estimate = reservation.estimate();
                match rng.u8(..4) {
                    0 => drop(reservation),
                    1 => {
                        reservation.commit(estimate);
                        used += u64::from(estimate);
                    }
                    2 => {
                        reservation.commit(estimate / 2);
                        used += u64::from(estimate / 2);
                    }
                    // Beyond the estimate, while there is something left.
                    _ => {
                        let beyond = if used < TOKENS / 2 { estimate } else { 0 };
                        reservation.commit(estimate + beyond);
                        used += u64::from(estimate + beyond);
                    }
                }
            }
            cluster.pass(Duration::from_millis(20) * rng.u32(1..8), Duration::from_millis(20));
        }
        drop(open);
        let drained = cluster.drain("tokens", 3);
        println!("seed {seed}: {used} used, {drained} left");
        assert!(used > TOKENS / 2 && used + drained == TOKENS, "seed {seed}: {used}, {drained}");
    }
}

#[test]
fn debt_of_a_reservation_is_paid_before_anything_is_allowed() {
    let clock = ManualClock::new();
    let rules: [Rule; 2] = [Quota::per_second(10).into(), SlidingLog::per_second(10).into()];
    for rule in rules {
        let limit = Limit::new("x", rule).local();
        let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
        let limit = limiter.limit("x").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let reservation = runtime.block_on(limit.reserve("key", 5)).unwrap();
        reservation.commit(25);
        let denied = limit.check("key");
        assert_eq!(denied.remaining(), 0, "{rule:?}");
        let wait = if matches!(rule, Rule::TokenBucket(_)) { 1600 } else { 1000 };
        assert_eq!(denied.retry_after(), Duration::from_millis(wait), "{rule:?}");
        clock.advance(denied.retry_after());
        assert!(limit.check("key").is_allowed(), "{rule:?}");
    }
}

#[test]
fn tokens_of_a_window_that_has_ended_do_not_go_back() {
    for rule in [FixedWindow::new(100, HOUR).into(), SlidingWindow::new(100, HOUR).into()] {
        let rule: Rule = rule;
        let cluster = Cluster::new(&[Limit::new("x", rule).strict()]);
        let limits = cluster.limits("x");
        let to = |second: u64| {
            let left_us = second * 1_000_000 - cluster.clock.now().as_micros();
            cluster.pass(Duration::from_micros(left_us), Duration::from_millis(500));
        };
        to(3590);
        let held = cluster.wait(limits[1].reserve("key", 60)).unwrap();
        let used = cluster.wait(limits[1].reserve("key", 30)).unwrap();
        to(3598);
        used.commit(10);
        // A token that was asked for, and was in time.
        to(3605);
        held.commit(0);
        cluster.settle();
        assert_eq!(cluster.kept.load(Ordering::Relaxed), 60, "{rule:?}");
        let drained = cluster.drain("x", 1);
        let most = if matches!(rule, Rule::FixedWindow(_)) { 100 } else { 32 };
        assert!((most - 2..=most).contains(&drained), "{rule:?}: {drained} of {most}");
    }
}

/// They stayed charged, and nobody was told: the report of them was lost, and came again when the window had ended.
#[test]
fn tokens_that_go_back_to_the_store_after_their_window_are_told_not_to_be_given_back() {
    let cluster = Cluster::new(&[Limit::new("x", FixedWindow::new(100, HOUR)).strict()]);
    let limit = &cluster.limits("x")[1];
    let to = |ms: u64, step: u64| {
        let left_us = ms * 1000 - cluster.clock.now().as_micros();
        cluster.pass(micros(left_us), Duration::from_millis(step));
    };
    to(3_590_000, 500);
    let held = cluster.wait(limit.reserve("key", 60)).unwrap();
    to(3_599_950, 50);
    held.commit(0);
    cluster.store.set_away(true);
    to(3_600_020, 10);
    assert_eq!(cluster.kept.load(Ordering::Relaxed), 0, "the window had not ended");
    cluster.store.set_away(false);
    to(3_602_000, 10);
    assert_eq!(cluster.kept.load(Ordering::Relaxed), 60);
}

/// What is pending of the window now was taken for what had been spent in the one before.
#[test]
fn tokens_of_a_window_that_has_ended_do_not_go_back_to_what_is_spent_in_the_next() {
    let cluster = Cluster::new(&[Limit::new("x", FixedWindow::new(10_000, HOUR)).strict()]);
    let limit = &cluster.limits("x")[1];
    let to = |second: u64| {
        let left_us = second * 1_000_000 - cluster.clock.now().as_micros();
        cluster.pass(Duration::from_micros(left_us), Duration::from_millis(500));
    };
    to(3595);
    let held = cluster.wait(limit.reserve("key", 100)).unwrap();
    to(3605);
    let mut used = 0;
    for tick in 0..20 {
        for _ in 0..100 {
            used += u64::from(limit.check("key").is_allowed());
        }
        if tick < 19 {
            cluster.pass(Duration::from_millis(50), Duration::from_millis(10));
        }
    }
    held.commit(0);
    assert!(used > 500, "{used}");
    let charged = used + cluster.drain("x", 1);
    assert!((9_990..=10_000).contains(&charged), "{charged} of 10000");
}

#[test]
fn tokens_of_a_local_window_that_has_ended_do_not_go_back() {
    let clock = ManualClock::new();
    let limit = Limit::new("x", FixedWindow::new(10, HOUR)).local();
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let limit = limiter.limit("x").unwrap();
    let left = || limit.check_n("key", 0).unwrap().remaining();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let reserve = |tokens| runtime.block_on(limit.reserve("key", tokens)).unwrap();
    let (early, late) = (reserve(5), reserve(5));
    early.commit(2);
    assert_eq!(left(), 3);
    clock.advance(HOUR);
    assert!(limit.check_n("key", 6).unwrap().is_allowed());
    late.commit(0);
    assert_eq!(left(), 4);
    reserve(4).commit(9);
    assert_eq!(left(), 0);
    clock.advance(HOUR);
    assert_eq!(left(), 10, "a window owes nothing to the one before");
}

#[test]
fn task_that_panics_gives_its_reservation_back() {
    let limiter =
        Limiter::builder().limit(Limit::new("x", Quota::per_hour(10)).local()).build().unwrap();
    let limit = limiter.limit("x").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let ran = Arc::new(AtomicBool::new(false));
    let (task_limit, task_ran) = (limit.clone(), ran.clone());
    let ended = runtime.block_on(async move {
        tokio::spawn(async move {
            let _reservation = task_limit.reserve("key", 10).await.unwrap();
            task_ran.store(task_limit.check("key").is_denied(), Ordering::Relaxed);
            panic!("on purpose");
        })
        .await
    });
    assert!(ended.is_err() && ran.load(Ordering::Relaxed));
    assert_eq!(limit.check_n("key", 0).unwrap().remaining(), 10);
}

#[tokio::test]
async fn nothing_is_reserved_of_a_leaky_bucket() {
    let limit = Limit::new("mail", LeakyBucket::per_second(10)).local();
    let limiter = Limiter::builder().limit(limit).build().unwrap();
    let refused = limiter.limit("mail").unwrap().reserve("key", 1).await;
    assert!(matches!(refused, Err(ReserveError::LeakyBucket { limit: "mail" })));
}

/// A slot is free for a request of any cost; a look took one of cost 3 for a denial, and took its slot.
#[test]
fn leaky_bucket_of_a_group_is_asked_last_and_gives_its_slot_to_requests_of_any_cost() {
    let clock = ManualClock::new();
    let limiter = Limiter::builder()
        .limit(Limit::new("pace", LeakyBucket::per_second(10)).local())
        .limit(Limit::new("hour", Quota::per_hour(5)).local())
        .clock(&clock)
        .build()
        .unwrap();
    let group = limiter.group(["pace", "hour"]).unwrap();
    assert!(group.check_n("key", 3).unwrap().is_allowed());
    let denied = group.check("key");
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "pace"));
    clock.advance(Duration::from_millis(300));
    let denied = group.check_n("key", 3).unwrap();
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "hour"));
    assert!(group.check_n("key", 2).unwrap().is_allowed(), "the slot is still free");
}

/// The limit that had just given its last token was named as the one that denies.
#[test]
fn denial_names_no_limit_that_would_allow_the_request() {
    let quick = Limit::new("second", Quota::new(1, HOUR).burst(100)).strict();
    let cluster = Cluster::new(&[burst("first", 1), quick]);
    let group = cluster.nodes[1].group(["first", "second"]).unwrap();
    // The second is used up on another node, so that the store has to say so.
    assert_eq!(cluster.drain("second", 3), 100);
    let denied = cluster.wait(group.check_sure("key"));
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "second"));
    assert_eq!(cluster.drain("first", 3), 1);
}

/// What was spent since was given back in its place: 100 in one second.
#[test]
fn tokens_of_a_log_that_have_returned_do_not_go_back_again() {
    let clock = ManualClock::new();
    let limit = Limit::new("x", SlidingLog::per_minute(50)).local();
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let limit = limiter.limit("x").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let held = runtime.block_on(limit.reserve("key", 50)).unwrap();
    clock.advance(Duration::from_secs(61));
    assert!(limit.check_n("key", 50).unwrap().is_allowed());
    held.commit(0);
    assert!(limit.check("key").is_denied());

    let cluster = Cluster::new(&[Limit::new("x", SlidingLog::per_minute(50)).strict()]);
    let limit = &cluster.limits("x")[0];
    let held = cluster.wait(limit.reserve("key", 50)).unwrap();
    cluster.pass(Duration::from_secs(70), Duration::from_millis(100));
    cluster.wait(limit.reserve("key", 50)).unwrap().commit(50);
    cluster.pass(Duration::from_secs(1), Duration::from_millis(100));
    held.commit(0);
    cluster.pass(Duration::from_secs(1), Duration::from_millis(100));
    assert!(cluster.wait(limit.check_sure("key")).is_denied());
    assert_eq!(cluster.kept.load(Ordering::Relaxed), 50);
}

/// The refund took what was spent since off the report, and half of that never counted.
#[test]
fn refund_of_a_log_is_of_what_was_spent_first() {
    let limit = Limit::new("x", SlidingLog::per_minute(100)).strict();
    let cluster = Cluster::new(std::slice::from_ref(&limit));
    let limit = cluster.nodes[0].async_limit("x").unwrap();
    let pass = |millis| cluster.pass(Duration::from_millis(millis), Duration::from_millis(100));
    let held = cluster.wait(limit.reserve("key", 50)).unwrap();
    pass(58_000);
    assert!(cluster.wait(limit.check_sure_n("key", 50)).unwrap().is_allowed());
    held.commit(0);
    pass(200);
    assert!(cluster.wait(limit.check_sure_n("key", 50)).unwrap().is_allowed());
    pass(5_000);
    assert!(cluster.wait(limit.check_sure("key")).is_denied(), "all were spent five seconds ago");
}

/// It said when one token returns, so that another limit denied with a shorter wait.
#[test]
fn denial_of_a_group_tells_when_a_log_has_all_that_the_request_costs() {
    let clock = ManualClock::new();
    let builder = Limiter::builder()
        .limit(Limit::new("log", SlidingLog::per_hour(5)).local())
        .limit(Limit::new("bucket", Quota::per_minute(5)).local());
    let limiter = builder.clock(&clock).build().unwrap();
    let (log, bucket) = (limiter.limit("log").unwrap(), limiter.limit("bucket").unwrap());
    for _ in 0..4 {
        assert!(log.check("key").is_allowed());
        clock.advance(Duration::from_millis(899_750));
    }
    // One token returns in a second, and all five in an hour.
    assert!(log.check("key").is_allowed());
    assert!(bucket.check_n("key", 5).unwrap().is_allowed());
    let denied = limiter.group(["log", "bucket"]).unwrap().check_n("key", 5).unwrap();
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "log"));
    assert_eq!(denied.retry_after(), HOUR);
}

/// They were charged to the next window, and what went back was refused because it was of the one before.
#[test]
fn reservation_dropped_before_the_end_of_a_window_is_not_charged_to_the_next_one() {
    let limits = [Limit::new("a", FixedWindow::new(1000, HOUR)).strict(), burst("b", 1)];
    let cluster = Cluster::new(&limits);
    let limit = &cluster.limits("a")[1];
    let to = |us: u64, step: u64| {
        let left = micros(us - cluster.clock.now().as_micros());
        cluster.pass(left, micros(step));
    };
    to(3_599_000_000, 500_000);
    // It has tokens, and a report is not due before the end.
    assert!(cluster.wait(limit.reserve("key", 1)).is_ok());
    to(3_599_980_000, 20_000);
    for _ in 0..10 {
        drop(cluster.wait(limit.reserve("key", 30)));
        cluster.settle();
        cluster.clock.advance(micros(1000));
    }
    to(3_601_000_000, 10_000);
    let drained = cluster.drain("a", 1);
    assert!((998..=1000).contains(&drained), "{drained} of 1000");
}

/// A group never asked the store for a slot, and so it denied for ever.
#[test]
fn group_with_a_leaky_bucket_that_nodes_share_asks_the_store_for_a_slot() {
    let pace = Limit::new("pace", LeakyBucket::per_second(10)).strict();
    let cluster = Cluster::new(&[pace, burst("hour", 100)]);
    let group = cluster.nodes[2].group(["pace", "hour"]).unwrap();
    let mut allowed = 0;
    for _ in 0..20 {
        allowed += u64::from(cluster.wait(group.check_sure("key")).is_allowed());
        cluster.pass(Duration::from_millis(100), Duration::from_millis(20));
    }
    assert!((18..=20).contains(&allowed), "{allowed} of 20");
    assert_eq!(cluster.drain("hour", 3), 100 - allowed);
}

/// The look before a decision asked the store, so that the credit which the decision took was not charged: every second
/// request was denied.
#[test]
fn group_gives_a_quiet_leaky_bucket_that_nodes_share_its_slot_each_time() {
    let pace = Limit::new("pace", LeakyBucket::per_second(10));
    let cluster = Cluster::new(&[pace, Limit::new("hour", Quota::per_hour(100))]);
    let group = cluster.nodes[2].group(["pace", "hour"]).unwrap();
    let pace = cluster.nodes[2].limit("pace").unwrap();
    let (mut of_group, mut after_looks) = (0, 0);
    for _ in 0..20 {
        of_group += u64::from(group.check("key").is_allowed());
        assert!(pace.check_n("other", 0).unwrap().is_allowed());
        after_looks += u64::from(pace.check("other").is_allowed());
        cluster.pass(Duration::from_secs(1), Duration::from_millis(20));
    }
    assert_eq!((of_group, after_looks), (20, 20));
}

/// What a lease had allowed before an outage was not given back after it; what the policy had allowed was, once the account
/// was closed.
#[test]
fn reserved_tokens_go_back_after_an_outage_unless_its_policy_allowed_them() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let entered = runtime.enter();
    let limit = Limit::new("x", Quota::new(1, HOUR).burst(1000)).outage(OutagePolicy::Open);
    let builder = Limiter::builder().limit(limit).store(store.clone()).lanes(1).max_nodes(1);
    let limiter = builder.clock(&clock).build().unwrap();
    drop(entered);
    let kept = Arc::new(AtomicU64::new(0));
    let shared = VirtualNodes { clock, store: store.clone(), runtime, nodes: vec![limiter] };
    let cluster = Cluster { shared, kept };
    cluster.pass(Duration::from_secs(2), Duration::from_millis(10));
    let limit = cluster.nodes[0].limit("x").unwrap();
    let of_lease = cluster.wait(limit.reserve("key", 100)).unwrap();
    assert!(of_lease.decision().is_sure());
    cluster.pass(Duration::from_millis(200), Duration::from_millis(20));
    store.set_away(true);
    cluster.pass(Duration::from_secs(20), Duration::from_millis(100));
    let of_policy = cluster.wait(limit.reserve("key", 900)).unwrap();
    assert!(!of_policy.decision().is_sure());
    store.set_away(false);
    cluster.pass(Duration::from_secs(30), Duration::from_millis(100));
    let left = |limiter: &Limiter| {
        let limit = limiter.limit("x").unwrap();
        let _ = cluster.wait(limit.check_sure("key"));
        limit.check_n("key", 0).unwrap().remaining()
    };
    let before = left(&cluster.nodes[0]);
    of_policy.commit(0);
    cluster.pass(Duration::from_secs(5), Duration::from_millis(100));
    let after_policy = left(&cluster.nodes[0]);
    assert!(after_policy <= before, "{before}, then {after_policy}");
    of_lease.commit(0);
    cluster.pass(Duration::from_secs(5), Duration::from_millis(100));
    let after_lease = left(&cluster.nodes[0]);
    assert!(after_lease >= after_policy + 95, "{after_policy}, then {after_lease}");
}

fn micros(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// Limits with as good as no refill, of which the store decides all but one.
fn exact_limits() -> [(Limit, u64); 5] {
    let day = 24 * HOUR;
    let exact = |name, rule: Rule| Limit::new(name, rule).exact();
    [
        (exact("bucket", Quota::new(1, 8 * HOUR).burst(300).into()), 300),
        (exact("window", FixedWindow::new(200, day).into()), 200),
        (exact("sliding", SlidingWindow::new(230, day).into()), 230),
        (exact("log", SlidingLog::new(250, day).into()), 250),
        (burst("hybrid", 220), 220),
    ]
}

/// Two nodes decide at the same time, so that one may find missing what goes back of the other.
async fn at_once(groups: [&AsyncGroup; 2], costs: [u32; 2]) -> [Decision; 2] {
    let [one, other] = groups;
    let (one, other) =
        tokio::join!(one.check_sure_n("key", costs[0]), other.check_sure_n("key", costs[1]));
    [one.unwrap(), other.unwrap()]
}

#[test]
fn exact_limits_of_a_group_are_charged_for_what_all_allowed_and_for_nothing_else() {
    let limits = exact_limits();
    let tokens = limits.each_ref().map(|(_, tokens)| *tokens);
    let limits = limits.map(|(limit, _)| limit);
    let names = ["bucket", "window", "sliding", "log", "hybrid"];
    for seed in 0..10 {
        let cluster = Cluster::new(&limits);
        let groups: Vec<_> =
            cluster.nodes.iter().map(|node| node.async_group(names).unwrap()).collect();
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut together, mut denied, mut alone) = (0, [0; 5], [0; 5]);
        let mut open = Vec::new();
        for _ in 0..400 {
            let (node, index) = (rng.usize(..NODES), rng.usize(..5));
            if rng.u8(..3) > 0 {
                let costs = [rng.u32(1..3), rng.u32(1..3)];
                let pair = [&groups[node], &groups[(node + 1) % NODES]];
                for (decision, cost) in cluster.wait(at_once(pair, costs)).into_iter().zip(costs) {
                    if decision.is_allowed() {
                        together += u64::from(cost);
                    } else {
                        let by = names.iter().position(|name| *name == decision.limit_name());
                        denied[by.unwrap()] += 1;
                    }
                }
            } else {
                let limit = cluster.nodes[node].async_limit(names[index]).unwrap();
                if let Ok(reservation) = cluster.wait(limit.reserve("key", 5)) {
                    open.push((index, reservation));
                }
            }
            while open.len() > rng.usize(..6) {
                let (index, reservation) = open.swap_remove(rng.usize(..open.len()));
                let used = rng.u32(0..=5);
                alone[index] += u64::from(used);
                reservation.commit(used);
            }
            cluster.pass(Duration::from_millis(10), Duration::from_millis(5));
        }
        drop(open);
        cluster.pass(Duration::from_secs(1), Duration::from_millis(100));
        let label = format!("seed {seed}: {together}, {alone:?} alone, denied by {denied:?}");
        println!("{label}");
        assert_eq!(cluster.kept.load(Ordering::Relaxed), 0, "{label}");
        for (index, (name, tokens)) in names.into_iter().zip(tokens).enumerate() {
            let drained = cluster.drain(name, 3);
            let charged = together + alone[index];
            assert_eq!(charged + drained, tokens, "{name}: {drained} left, {label}");
        }
        assert!(denied.iter().sum::<u64>() > 100, "{label}");
    }
}

/// A request of two keys, of which the second has nothing left.
#[test]
fn exact_limits_of_several_keys_are_charged_together_and_give_their_last_slot_back() {
    let pace = |name| Limit::new(name, LeakyBucket::per_second(10)).exact();
    let window = Limit::new("window", FixedWindow::per_hour(3)).exact();
    let cluster = Cluster::new(&[pace("first"), pace("second"), window]);
    let node = &cluster.nodes[0];
    let [first, second, window] =
        ["first", "second", "window"].map(|name| node.async_limit(name).unwrap());
    assert!(cluster.wait(second.check_sure("bob")).is_allowed());
    let parts = [first.on("ann"), second.on("bob"), window.on("ann").cost(2)];
    let denied = cluster.wait(node.check_all(parts)).unwrap();
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "second"));
    cluster.settle();
    assert_eq!(cluster.wait(window.check_sure_n("ann", 0)).unwrap().remaining(), 3);
    assert!(cluster.wait(first.check_sure("ann")).is_allowed(), "its slot went back");
    let none = [first.on("bob").cost(0), window.on("bob").cost(0)];
    assert!(cluster.wait(node.check_all(none)).unwrap().is_allowed());
    assert_eq!(cluster.wait(window.check_sure("bob")).remaining(), 2, "a look spends nothing");
}

/// The limiter's task asked the store about nothing, and counted less than no token as denied: it broke.
#[test]
fn part_that_costs_nothing_is_looked_at_and_denies_only_what_is_known() {
    let strict = Limit::new("strict", Quota::per_hour(10)).strict();
    let cluster = Cluster::new(&[strict, Limit::new("local", Quota::per_hour(10)).local()]);
    let node = &cluster.nodes[0];
    let [strict, local] = ["strict", "local"].map(|name| node.async_limit(name).unwrap());
    for key in ["ann", "bob"] {
        let parts = [strict.on(key).cost(0), local.on("all")];
        assert!(cluster.wait(node.check_all(parts)).unwrap().is_allowed(), "{key}");
    }
    let decision = cluster.wait(strict.check_sure_n("ann", 10)).unwrap();
    assert!(
        decision.is_allowed() && decision.is_sure(),
        "the limiter's task goes on: {decision:?}"
    );
    let denied = cluster.wait(local.check_sure_n("none", 10)).unwrap();
    assert!(denied.is_allowed());
    let parts = [local.on("none").cost(0), strict.on("bob")];
    let denied = cluster.wait(node.check_all(parts)).unwrap();
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "local"));
    assert!(cluster.wait(strict.check_sure_n("bob", 10)).unwrap().is_allowed());
}

#[test]
fn debt_of_a_reservation_of_an_exact_limit_is_paid_before_anything_is_allowed() {
    // Fifteen are owed, and one is asked for: 360 s each. A sliding window counts 9 when 36% of it are left.
    let rules: [(Rule, u64); 4] = [
        (Quota::per_hour(10).into(), 5760),
        (SlidingLog::per_hour(10).into(), 3600),
        (FixedWindow::per_hour(10).into(), 3600),
        (SlidingWindow::per_hour(10).into(), 5760),
    ];
    for (rule, expected) in rules {
        let cluster = Cluster::new(&[Limit::new("x", rule).exact()]);
        let limit = cluster.nodes[0].async_limit("x").unwrap();
        cluster.wait(limit.reserve("key", 5)).unwrap().commit(25);
        cluster.settle();
        let denied = cluster.wait(limit.check_sure("key"));
        assert_eq!((denied.is_denied(), denied.remaining()), (true, 0), "{rule:?}");
        let (wait, expected) = (denied.retry_after(), Duration::from_secs(expected));
        assert!(wait <= expected && wait + Duration::from_secs(5) > expected, "{rule:?}: {wait:?}");
        cluster.clock.advance(wait.saturating_sub(micros(10)));
        assert!(cluster.wait(limit.check_sure_n("key", 0)).unwrap().is_denied(), "{rule:?}");
        cluster.clock.advance(micros(20));
        assert!(cluster.wait(limit.check_sure("key")).is_allowed(), "{rule:?}");
    }
}

#[test]
fn exact_limit_keeps_and_tells_of_charges_that_it_cannot_give_back() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let kept = Arc::new(AtomicU64::new(0));
    let told = kept.clone();
    let listener = move |event: &Event| {
        if let Event::NotGivenBack { tokens, .. } = event {
            told.fetch_add((*tokens).into(), Ordering::Relaxed);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let entered = runtime.enter();
    let exact = |name| Limit::new(name, FixedWindow::per_hour(10)).exact();
    let limiter = Limiter::builder()
        .limit(exact("open").outage(OutagePolicy::Open))
        .limit(exact("closed").outage(OutagePolicy::Closed))
        .store(store.clone())
        .clock(&clock)
        .listen(listener)
        .build()
        .unwrap();
    drop(entered);
    let shared = VirtualNodes { clock, store: store.clone(), runtime, nodes: vec![limiter] };
    let cluster = Cluster { shared, kept };
    let kept = || cluster.kept.load(Ordering::Relaxed);
    let [open, closed] = ["open", "closed"].map(|name| cluster.nodes[0].async_limit(name).unwrap());
    let held = cluster.wait(open.reserve("key", 4)).unwrap();
    store.set_away(true);
    drop(held);
    cluster.pass(Duration::from_secs(1), Duration::from_millis(10));
    assert_eq!(kept(), 4, "the store did not answer");
    // The first is allowed by its policy, and the second denied by its own.
    let denied =
        cluster.wait(cluster.nodes[0].async_group(["open", "closed"]).unwrap().check_sure("key"));
    assert_eq!((denied.is_denied(), denied.limit_name()), (true, "closed"));
    cluster.pass(Duration::from_secs(2), Duration::from_millis(10));
    assert_eq!(kept(), 5);
    store.set_away(false);
    cluster.pass(Duration::from_secs(2), Duration::from_millis(10));
    let left = |limit: &AsyncLimit| {
        let _ = cluster.wait(limit.check_sure_n("key", 0));
        cluster.pass(Duration::from_secs(1), Duration::from_millis(10));
        cluster.wait(limit.check_sure_n("key", 0)).unwrap().remaining()
    };
    assert_eq!((left(&open), left(&closed)), (6, 10));
    // The window of what it was allowed ends.
    let held = cluster.wait(open.reserve("key", 3)).unwrap();
    cluster.pass(HOUR, Duration::from_secs(10));
    drop(held);
    cluster.pass(Duration::from_secs(1), Duration::from_millis(10));
    assert_eq!((kept(), left(&open)), (8, 10));
}

/// The queue of a leaky bucket that nodes share is full of requests that are held. A check is not held: it waits longer than they
/// do, in a list too.
#[test]
fn request_of_a_list_waits_for_a_full_queue_as_one_by_itself_does() {
    let rule = LeakyBucket::per_second(1).queue(Duration::from_secs(10));
    let cluster = Cluster::new(&[Limit::new("shared", rule)]);
    let limit = cluster.nodes[0].async_limit("shared").unwrap();
    for _ in 0..11 {
        assert!(cluster.wait(limit.schedule("key")).is_allowed());
    }
    let alone = cluster.wait(limit.check_sure("key"));
    let in_list = cluster.wait(cluster.nodes[0].check_each([limit.on("key")]))[0].unwrap();
    assert!(alone.is_denied() && in_list.is_denied(), "{alone:?} {in_list:?}");
    let waits = [alone, in_list].map(|decision| decision.retry_after());
    assert!(waits[0] > Duration::from_secs(9) && waits[0] == waits[1], "{waits:?}");
}

#[test]
fn many_requests_are_decided_each_for_itself_in_the_time_of_one_round_trip() {
    const ROUND_TRIP: Duration = Duration::from_millis(10);
    let quota = Quota::per_hour(1).burst(2);
    let limits = [Limit::new("shared", quota).strict(), Limit::new("exact", quota).exact()];
    let cluster = Cluster::new(&limits);
    cluster.store.set_round_trip(ROUND_TRIP);
    let [shared, exact] =
        ["shared", "exact"].map(|name| cluster.nodes[0].async_limit(name).unwrap());
    let keys: Vec<String> = (0..50).map(|key| format!("key-{key}")).collect();
    let mut requests: Vec<_> = keys.iter().map(|key| exact.on(key.as_str())).collect();
    requests.extend([
        shared.on("again").cost(2),
        shared.on("again"),
        shared.on("too much").cost(3),
        exact.on("again").cost(2),
    ]);
    let began = cluster.clock.now();
    let told = cluster.runtime.block_on(async {
        let mut told = std::pin::pin!(cluster.nodes[0].check_each(requests));
        loop {
            tokio::select! {
                biased;
                told = &mut told => return told,
                () = tokio::task::yield_now() => cluster.clock.advance(Duration::from_micros(10)),
            }
        }
    });
    let took = Duration::from_micros(cluster.clock.now().as_micros() - began.as_micros());
    assert!((ROUND_TRIP..2 * ROUND_TRIP).contains(&took), "{took:?}");
    let decisions: Vec<_> =
        told.iter().map(|told| told.map(|decision| decision.is_allowed())).collect();
    assert!(decisions[..50].iter().all(|decision| *decision == Ok(true)), "{decisions:?}");
    assert!(told.iter().flatten().all(Decision::is_sure), "{told:?}");
    let too_high = Err(CheckError::CostTooHigh { limit: "shared", cost: 3, max: 2 });
    assert_eq!(decisions[50..], [Ok(true), Ok(false), too_high, Ok(true)]);
    assert_eq!(told[53].unwrap().limit_name(), "exact");
    assert!(cluster.wait(cluster.nodes[0].check_each([])).is_empty());
}
