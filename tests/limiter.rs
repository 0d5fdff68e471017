//! What users hold, without Redis: decisions, limits on keys, readiness, leaving, outages.
#![cfg(feature = "testing")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests on real time poll it with a deadline, and threads are what they are about"
)]

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tidegate::testing::{Fault, ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, Builder, CheckError, ConfigError, DEFAULT_MAX_NODES, Decision, Event, Handle,
    KEY_BYTES_MAX, Limit, Limiter, MemoryStore, Mode, OutagePolicy, Quota, StoreError,
};

const DEADLINE: Duration = Duration::from_secs(10);
/// Between two looks at what a test waits for.
const POLL_GAP: Duration = Duration::from_millis(2);
/// How far a driven clock moves at a time.
const STEP: Duration = Duration::from_millis(5);

// ---- decisions -------------------------------------------------------------------------------

/// A limiter without a store, on a clock of its own.
fn alone(quota: Quota) -> (ManualClock, Limiter, ActiveLimit) {
    let clock = ManualClock::new();
    let limiter = Limiter::builder().limit(Limit::new("api", quota)).clock(&clock).build().unwrap();
    let api = limiter.limit("api").unwrap();
    (clock, limiter, api)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test]
async fn a_bucket_gives_its_burst_then_its_rate_and_says_what_is_left() {
    let (clock, _limiter, api) = alone(Quota::per_second(10).burst(5));
    for left in (0..5).rev() {
        let decision = api.check("user");
        assert!(decision.is_allowed() && decision.is_sure());
        assert_eq!(decision.limit_name(), "api");
        assert_eq!((decision.burst(), decision.remaining(), decision.cost()), (5, left, 1));
        assert_eq!(decision.retry_after(), Duration::ZERO);
        assert_eq!(decision.reset_after(), millis(100 * (5 - left)));
        assert_eq!(decision.view_age(), None, "no store ever spoke");
    }
    let denied = api.check("user");
    assert!(denied.is_denied() && denied.is_sure() && !denied.is_allowed());
    assert_eq!(denied.remaining(), 0);
    assert!((millis(100)..=millis(102)).contains(&denied.retry_after()), "{denied:?}");
    clock.advance(denied.retry_after());
    assert!(api.check("user").is_allowed(), "after the wait that was told");
    assert!(api.check("user").is_denied());
}

#[tokio::test]
async fn a_denied_caller_is_told_a_shorter_wait_the_longer_it_has_waited() {
    let (clock, _limiter, api) = alone(Quota::new(1, Duration::from_secs(90)));
    assert!(api.check("user").is_allowed());
    for waited_s in [0, 30, 60, 89] {
        let told = api.check("user").retry_after();
        let exact = Duration::from_secs(90 - waited_s);
        assert!((exact..=exact + millis(2)).contains(&told), "after {waited_s} s: {told:?}");
        clock.advance(Duration::from_secs(if waited_s == 60 { 29 } else { 30 }));
    }
}

#[tokio::test]
async fn a_cost_is_taken_whole_or_not_at_all() {
    let (clock, _limiter, api) = alone(Quota::per_second(10).burst(10));
    assert!(api.check_n("user", 7).unwrap().is_allowed());
    let denied = api.check_n("user", 4).unwrap();
    assert!(denied.is_denied());
    assert_eq!(denied.remaining(), 3, "a denial takes nothing");
    assert!((millis(100)..=millis(102)).contains(&denied.retry_after()), "{denied:?}");
    assert!(api.check_n("user", 3).unwrap().is_allowed());
    clock.advance(Duration::from_secs(1));
    assert!(api.check_n("user", 10).unwrap().is_allowed());
}

#[tokio::test]
async fn a_peek_spends_nothing_and_makes_no_key() {
    let clock = ManualClock::new();
    let limiter = Limiter::builder()
        .limit(Limit::new("api", Quota::per_second(10).burst(2)))
        .max_keys(1)
        .clock(&clock)
        .build()
        .unwrap();
    let api = limiter.limit("api").unwrap();
    for key in ["a", "b", "user", "user", "user"] {
        let seen = api.check_n(key, 0).unwrap();
        assert!(seen.is_allowed());
        assert_eq!(seen.remaining(), 2);
    }
    assert_eq!(api.handle("user").key(), b"user", "the one place for a key is free");
    assert!(api.check_n("user", 2).unwrap().is_allowed());
    assert!(api.check_n("user", 0).unwrap().is_denied());
    clock.advance(millis(100));
    assert!(api.check_n("user", 0).unwrap().is_allowed());
}

#[tokio::test]
async fn a_handle_and_its_key_are_one_bucket() {
    let (_clock, _limiter, api) = alone(Quota::per_hour(4));
    let handle = api.handle("user");
    assert_eq!(handle.key(), b"user");
    assert!(handle.check().is_allowed());
    assert!(api.check("user").is_allowed());
    assert!(handle.clone().check_n(2).unwrap().is_allowed());
    assert!(handle.check().is_denied() && handle.check_n(0).unwrap().is_denied());
    assert!(api.check("user").is_denied());
    assert!(matches!(handle.check_n(5), Err(CheckError::CostTooHigh { cost: 5, max: 4, .. })));
}

#[tokio::test]
async fn keys_that_an_earlier_hash_confused_have_buckets_of_their_own() {
    let (_clock, _limiter, api) = alone(Quota::per_day(1));
    for (one, other) in [
        ("user:000000000000042", "Aser:00000000000:000000000000042"),
        ("1231", "2231231"),
        ("223345", "3233345"),
    ] {
        assert!(api.check(one).is_allowed());
        assert!(api.check(other).is_allowed(), "{other} is not {one}");
        assert!([one, other].iter().all(|key| api.check(key).is_denied()));
    }
}

#[tokio::test]
async fn debug_shows_names_and_counts_however_many_keys_there_are() {
    const KEYS: usize = 1_000_000;
    let limit = Limit::new("api", Quota::per_second(100));
    let limiter = Limiter::builder().limit(limit).max_keys(KEYS).build().unwrap();
    let api = limiter.limit("api").unwrap();
    for key in 0..KEYS as u32 {
        let _ = api.check(&key.to_le_bytes());
    }
    let handle = api.handle("a secret key");
    let limiter = format!("{limiter:?}");
    assert_eq!(limiter, r#"Limiter { limits: ["api"], keys: 1000000, max_keys: 1000000 }"#);
    assert_eq!(format!("{api:?}"), r#"ActiveLimit { name: "api", .. }"#);
    assert_eq!(format!("{handle:?}"), r#"Handle { limit: "api", .. }"#);
}

#[tokio::test]
async fn keys_are_anything_like_text_or_bytes_and_stand_apart() {
    let (_clock, _limiter, api) = alone(Quota::per_hour(1));
    assert!(api.check("user").is_allowed());
    assert!(api.check(&String::from("user")).is_denied());
    assert!(api.check(b"user".as_slice()).is_denied());
    assert!(api.check(&[0_u8, 255, 10]).is_allowed());
    assert!(api.check(&vec![7_u8; KEY_BYTES_MAX]).is_allowed());
}

#[tokio::test]
async fn a_request_that_cannot_be_decided_is_an_error_that_names_the_value_and_spends_nothing() {
    let (_clock, _limiter, api) = alone(Quota::per_hour(5));
    for cost in [6, u32::MAX] {
        let above = CheckError::CostTooHigh { limit: "api", cost, max: 5 };
        assert_eq!(api.check_n("user", cost).unwrap_err(), above);
    }
    assert!(api.check_n("user", 5).unwrap().is_allowed());
}

#[tokio::test]
async fn check_n_with_cost_zero_spends_nothing() {
    let (_clock, _limiter, api) = alone(Quota::per_hour(2));
    for left in [2, 1] {
        for _ in 0..10 {
            let read = api.check_n("user", 0).unwrap();
            assert_eq!((read.is_allowed(), read.remaining()), (true, left));
        }
        assert!(api.check("user").is_allowed());
    }
    assert!(api.check_n("user", 0).unwrap().is_denied());
    assert!(api.check_sure_n("user", 0).await.unwrap().is_denied());
}

#[tokio::test]
async fn empty_and_huge_keys_are_keys_of_their_own() {
    let (_clock, _limiter, api) = alone(Quota::per_hour(1));
    let huge = |last| [[b'x'; KEY_BYTES_MAX].as_slice(), &[last]].concat();
    for key in [Vec::new(), huge(1), huge(2)] {
        assert!(api.check(&key).is_allowed());
        assert!(api.check(&key).is_denied() && api.handle(&key).check().is_denied());
    }
    assert!(api.check(&()).is_denied() && api.check("user").is_allowed());
}

#[tokio::test]
async fn a_limit_that_was_not_built_is_an_error_that_lists_those_that_were() {
    let (_clock, limiter, api) = alone(Quota::per_hour(5));
    assert_eq!(api.name(), "api");
    let known = "api".to_owned();
    let unknown = ConfigError::UnknownLimit { name: "apj".to_owned(), known };
    assert_eq!(limiter.limit("apj").unwrap_err(), unknown);
}

#[test]
fn a_limiter_that_cannot_be_kept_names_field_and_value() {
    let limit = |name| Limit::new(name, Quota::per_second(1));
    let good = || Limiter::builder().limit(limit("api"));
    for (builder, told) in [
        (Limiter::builder(), "limiter: limits = none: "),
        (good().max_keys(0), "limiter: max_keys = 0: "),
        (good().max_keys(50_000_001), "limiter: max_keys = 50000001: "),
        (good().lanes(0), "limiter: lanes = 0: "),
        (good().lanes(1025), "limiter: lanes = 1025: "),
        (good().max_nodes(0), "limiter: max_nodes = 0: "),
        (good().key_secret("short"), "limiter: key_secret = 5 bytes: "),
        (Limiter::builder().limit(limit("a b")), "limit \"a b\": name = a b: "),
        (good().limit(limit("api")), "limit \"api\" is defined twice: "),
    ] {
        let error = builder.build().unwrap_err().to_string();
        let what_to_do = error.strip_prefix(told);
        assert!(what_to_do.is_some_and(|text| !text.is_empty()), "{error}, not {told}");
    }
}

/// One central bucket, the naive way: a level in units, of which a token has `TOKEN`.
struct Oracle {
    level: u64,
    burst: u64,
    rate_per_us: u64,
}

const TOKEN: u64 = 1_000_000;

impl Oracle {
    fn per_second(rate: u64, burst: u64) -> Self {
        Self { level: burst * TOKEN, burst: burst * TOKEN, rate_per_us: rate }
    }

    fn pass(&mut self, time: Duration) {
        let flowed = self.rate_per_us * time.as_micros() as u64;
        self.level = self.burst.min(self.level + flowed);
    }

    fn take(&mut self, cost: u32) -> bool {
        let units = u64::from(cost) * TOKEN;
        let taken = units <= self.level;
        self.level -= if taken { units } else { 0 };
        taken
    }
}

#[tokio::test]
async fn a_limiter_without_a_store_decides_as_one_central_bucket_would() {
    // A token takes a whole number of microseconds, so that nothing is rounded.
    for (rate, burst) in [(10, 5), (1000, 1000), (1000, 20), (1, 3)] {
        let (clock, _limiter, api) = alone(Quota::per_second(rate).burst(burst));
        let mut oracle = Oracle::per_second(rate, burst);
        let mut draw = fastrand::Rng::with_seed(rate * 31 + burst);
        for step in 0..5000 {
            let fill_us = burst * 1_000_000 / rate;
            let time = Duration::from_micros(draw.u64(0..=fill_us / 4));
            clock.advance(time);
            oracle.pass(time);
            let cost = draw.u32(1..=burst.min(8) as u32);
            let decision = api.check_n("user", cost).unwrap();
            let expected = oracle.take(cost);
            assert_eq!(decision.is_allowed(), expected, "{rate}/s, burst {burst}, step {step}");
            // Now and then only: a look brings the bucket up to date.
            if draw.u32(0..4) == 0 {
                let left = oracle.level / TOKEN;
                assert_eq!(
                    api.check_n("user", 0).unwrap().remaining(),
                    left,
                    "{rate}/s, step {step}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_decision_tells_what_is_left_as_a_peek_right_after_it_would() {
    let (clock, _limiter, api) = alone(Quota::per_second(10).burst(10));
    assert!(api.check_n("user", 8).unwrap().is_allowed());
    for (waited, left) in [(millis(300), 4), (millis(200), 5), (millis(50), 4), (secs(1), 9)] {
        clock.advance(waited);
        let decision = api.check("user");
        let seen = api.check_n("user", 0).unwrap();
        assert_eq!(seen.remaining(), left, "after {waited:?} more");
        assert_eq!(decision.remaining(), left, "after {waited:?} more, as the decision tells it");
        assert_eq!(decision.reset_after(), seen.reset_after());
    }
}

#[tokio::test]
async fn a_key_that_rested_with_tokens_left_gets_one_burst_and_not_two() {
    let (clock, _limiter, api) = alone(Quota::per_second(10).burst(10));
    assert!(api.check("user").is_allowed());
    clock.advance(Duration::from_secs(60));
    let admitted = (0..100).filter(|_| api.check("user").is_allowed()).count();
    assert_eq!(admitted, 10, "at one instant, after any rest");
}

#[tokio::test]
async fn local_limits_never_ask_the_store() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    store.set_away(true);
    let limit = Limit::new("api", Quota::per_hour(3)).mode(Mode::Local);
    let nodes: Vec<Limiter> = (0..2)
        .map(|_| {
            let builder = Limiter::builder().limit(limit.clone());
            builder.store(store.clone()).clock(&clock).build().unwrap()
        })
        .collect();
    for node in &nodes {
        let api = node.limit("api").unwrap();
        assert!(api.check_n("user", 3).unwrap().is_allowed(), "each node has its own");
        assert!(api.check("user").is_denied());
    }
}

/// A caller asked once a millisecond.
#[tokio::test]
async fn caller_in_line_asks_seldom_while_nobody_is_sure() {
    let denied = Arc::new(AtomicU64::new(0));
    let counted = denied.clone();
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let listener = move |event: &Event| {
        if let Event::Decisions { denied, .. } = event {
            counted.fetch_add(*denied, Ordering::Relaxed);
        }
    };
    let limit = Limit::new("api", Quota::per_second(10)).outage(OutagePolicy::Closed);
    let builder = Limiter::builder().limit(limit).store(store.clone()).clock(&clock);
    let limiter = builder.listen(listener).build().unwrap();
    let pass = async |times: u32, step: Duration| {
        for _ in 0..times {
            clock.advance(step);
            limiter.settle().await;
        }
    };
    pass(200, Duration::from_millis(10)).await;
    let api = limiter.limit("api").unwrap();
    while api.check("user").is_allowed() {}
    store.set_away(true);
    pass(500, Duration::from_millis(10)).await;
    denied.store(0, Ordering::Relaxed);
    let mut caller = Box::pin(api.until_ready("user", Duration::from_secs(20)));
    for _ in 0..10_000 {
        tokio::select! {
            biased;
            decision = &mut caller => panic!("{decision:?}"),
            () = pass(1, Duration::from_millis(1)) => {}
        }
    }
    let denied = denied.load(Ordering::Relaxed);
    assert!((100..=250).contains(&denied), "{denied} times in ten seconds");
}

/// The least pause after an unsure answer was longer than the caller had, and it was denied though a token came before.
#[tokio::test]
async fn caller_who_has_little_time_waits_for_a_token_of_the_outage_policy() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let limit = Limit::new("api", Quota::per_second(400));
    let builder = Limiter::builder().limit(limit).store(store.clone()).clock(&clock).max_nodes(4);
    let limiter = builder.build().unwrap();
    let pass = async |times: u32| {
        for _ in 0..times {
            clock.advance(millis(10));
            limiter.settle().await;
        }
    };
    pass(200).await;
    let api = limiter.limit("api").unwrap();
    while api.check("user").is_allowed() {}
    store.set_away(true);
    for _ in 0..50 {
        pass(10).await;
        while api.check("user").is_allowed() {}
    }
    let decision = passing(&clock, api.until_ready("user", millis(45))).await;
    assert!(decision.is_allowed() && !decision.is_sure(), "{decision:?}");
}

/// Waits for an answer, and lets time pass meanwhile.
async fn passing<T>(clock: &ManualClock, answer: impl Future<Output = T>) -> T {
    let mut answer = pin!(answer);
    loop {
        tokio::select! {
            biased;
            answer = &mut answer => return answer,
            () = std::future::ready(()) => {}
        }
        // Tasks go on as far as they can.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        clock.advance(Duration::from_micros(100));
    }
}

/// Lanes without open accounts did not hear of it, and gave nothing for four seconds to whoever came next.
#[tokio::test]
async fn node_that_comes_after_an_orderly_stop_waits_for_nobody_in_any_lane() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let limit = Limit::new("api", Quota::per_hour(100)).strict();
    let start = || {
        let builder = Limiter::builder().limit(limit.clone()).store(store.clone()).lanes(4);
        builder.clock(&clock).build().unwrap()
    };
    let pass = async |limiter: &Limiter, ms: u32| {
        for _ in 0..ms / 5 {
            clock.advance(STEP);
            limiter.settle().await;
        }
    };
    let keys: Vec<String> = (0..20).map(|number| format!("key {number}")).collect();
    let first = start();
    pass(&first, 2000).await;
    for key in &keys {
        let first = first.limit("api").unwrap();
        assert!(passing(&clock, first.check_sure(key)).await.is_allowed(), "{key}");
    }
    pass(&first, 10_000).await;
    passing(&clock, first.shutdown(Duration::from_secs(1))).await.unwrap();
    drop(first);
    clock.advance(Duration::from_secs(5));
    let second = start();
    pass(&second, 100).await;
    for key in &keys {
        let second = second.limit("api").unwrap();
        let decision = passing(&clock, second.check_sure_n(key, 50)).await.unwrap();
        assert!(decision.is_allowed() && decision.is_sure(), "{key}: {decision:?}");
    }
}

/// It ended while the store was still to be told of tokens that exact limits had charged, or were given back.
#[tokio::test]
async fn shutdown_waits_for_the_late_charge_of_an_exact_limit() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let limit = Limit::new("api", Quota::per_hour(100)).exact();
    let limiter =
        Limiter::builder().limit(limit).store(store.clone()).clock(&clock).build().unwrap();
    let api = limiter.async_limit("api").unwrap();
    let reservation = api.reserve("user", 10).await.unwrap();
    store.set_round_trip(Duration::from_millis(40));
    reservation.commit(30);
    let begun = clock.now();
    passing(&clock, limiter.shutdown(Duration::from_secs(5))).await.unwrap();
    assert!(clock.now().micros_since(begun) >= 40_000);
}

// ---- where it runs ---------------------------------------------------------------------------

#[test]
fn what_users_hold_can_be_cloned_and_shared_between_threads() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    shared::<Limiter>();
    shared::<ActiveLimit>();
    shared::<Handle>();
    shared::<MemoryStore>();
    shared::<ScriptedStore>();
    shared::<ManualClock>();
}

/// Two nodes on one store: what one spends the other hears of.
async fn two_nodes_share_a_limit() {
    let store = MemoryStore::new();
    let build = || {
        let limit = Limit::new("api", Quota::per_hour(10)).sync_interval(millis(5));
        Limiter::builder().limit(limit).lanes(2).store(store.clone())
    };
    let nodes = [build().build_ready(DEADLINE).await.unwrap(), build().build().unwrap()];
    nodes[1].ready(DEADLINE).await.unwrap();
    let apis = nodes.each_ref().map(|node| node.limit("api").unwrap());
    let mut admitted = 0;
    let start = Instant::now();
    while admitted < 10 {
        assert!(start.elapsed() < DEADLINE, "{admitted} of 10");
        for api in &apis {
            admitted += u32::from(api.check("user").is_allowed());
        }
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
    for node in &nodes {
        node.shutdown(DEADLINE).await.unwrap();
    }
    assert!(admitted <= 10 + 2, "the burst and a credit a node: {admitted}");
}

#[tokio::test]
async fn it_runs_on_a_current_thread_runtime() {
    two_nodes_share_a_limit().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_runs_on_a_multi_thread_runtime() {
    two_nodes_share_a_limit().await;
}

#[test]
fn it_runs_without_any_runtime() {
    block_on(two_nodes_share_a_limit());
}

/// The simplest executor there is: no tokio in it.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park_timeout(DEADLINE),
        }
    }
}

#[test]
fn many_threads_together_are_admitted_the_burst_once() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_hour(1000));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let api = limiter.limit("api").unwrap();
    let spend = || (0..1000).filter(|_| api.check("user").is_allowed()).count();
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(spend)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 1000);
}

#[test]
fn threads_that_contend_for_a_large_burst_are_admitted_nearly_all_of_it_and_never_more() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_hour(1_000_000));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let api = limiter.limit("api").unwrap();
    let handle = api.handle("user");
    let by_key = || (0..500_000).filter(|_| api.check("user").is_allowed()).count();
    let by_handle = || (0..500_000).filter(|_| handle.check().is_allowed()).count();
    let admitted: usize = std::thread::scope(|scope| {
        let threads = [scope.spawn(by_key), scope.spawn(by_handle), scope.spawn(by_key)];
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // A thread that ends leaves what it had taken at once.
    assert!((1_000_000 - 3 * 1024..=1_000_000).contains(&admitted), "{admitted}");
}

// ---- a cluster under a driven clock ----------------------------------------------------------

/// Events that somebody listened to.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Event>>>);

impl Heard {
    fn ear(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let events = self.0.clone();
        move |event| events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone())
    }

    fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.sum(|event| usize::from(which(event)))
    }

    fn sum(&self, number: impl Fn(&Event) -> usize) -> usize {
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().map(number).sum()
    }
}

/// Nodes that share a scripted store and live by one driven clock.
struct Cluster {
    clock: ManualClock,
    store: ScriptedStore,
    nodes: Vec<Limiter>,
    /// The limit that is pressed.
    limit: &'static str,
    heard: Heard,
}

impl Cluster {
    fn new(nodes: usize, limit: &Limit) -> Self {
        Self::with(nodes, limit, |builder| builder)
    }

    fn with(nodes: usize, limit: &Limit, change: impl Fn(Builder) -> Builder) -> Self {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        Self::over(store, clock, nodes, limit, change)
    }

    fn over(
        store: ScriptedStore,
        clock: ManualClock,
        nodes: usize,
        limit: &Limit,
        change: impl Fn(Builder) -> Builder,
    ) -> Self {
        let heard = Heard::default();
        let node = |_| {
            let builder = Limiter::builder().limit(limit.clone()).store(store.clone()).lanes(2);
            change(builder.clock(&clock).listen(heard.ear())).build().unwrap()
        };
        let nodes = (0..nodes).map(node).collect();
        Self { clock, store, nodes, limit: "api", heard }
    }

    fn apis(&self) -> Vec<ActiveLimit> {
        self.nodes.iter().map(|node| node.limit(self.limit).unwrap()).collect()
    }

    async fn settle(&self) {
        for node in &self.nodes {
            node.settle().await;
        }
    }

    async fn pass(&self, time: Duration) {
        for _ in 0..time.as_micros() / STEP.as_micros() {
            self.clock.advance(STEP);
            self.settle().await;
        }
    }

    /// Ten requests a node and step, on one key; returns how many were admitted.
    async fn press(&self, time: Duration) -> u64 {
        let apis = self.apis();
        let mut admitted = 0;
        for _ in 0..time.as_micros() / STEP.as_micros() {
            self.clock.advance(STEP);
            for api in &apis {
                for _ in 0..REQUESTS_A_STEP {
                    admitted += u64::from(api.check("user").is_allowed());
                }
            }
            self.settle().await;
        }
        admitted
    }
}

/// Two thousand a second and node: far above every limit here.
const REQUESTS_A_STEP: u64 = 10;
const RATE: u64 = 100;
/// Two lanes, seen by each of two nodes.
const LANES_DOWN: usize = 4;
/// After so long without the store every lease has ended.
const CUT_OFF: Duration = Duration::from_secs(4);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn limit(policy: OutagePolicy) -> Limit {
    Limit::new("api", Quota::per_second(RATE)).outage(policy)
}

#[tokio::test]
async fn nodes_under_pressure_admit_the_burst_and_the_rate_together() {
    let cluster = Cluster::new(4, &limit(OutagePolicy::Share));
    // A namespace that is new gives nothing for half a second.
    cluster.pass(secs(1)).await;
    let admitted = cluster.press(secs(10)).await;
    let ideal = RATE + 10 * RATE;
    assert!((ideal * 97 / 100..=ideal + 4).contains(&admitted), "{admitted} of {ideal}");
}

#[tokio::test]
async fn a_lost_reply_a_lost_request_and_a_doubled_one_change_nothing_of_the_total() {
    let cluster = Cluster::new(2, &Limit::new("api", Quota::per_hour(100)));
    for fault in [Fault::RequestLost, Fault::ReplyLost, Fault::Duplicated].repeat(10) {
        cluster.store.fail(fault);
    }
    let admitted = cluster.press(secs(20)).await;
    assert!((100..=102).contains(&admitted), "{admitted} of 100");
}

#[tokio::test]
async fn ready_waits_for_the_store_until_the_deadline_and_tells_the_stores_error() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Share));
    cluster.store.set_away(true);
    let node = &cluster.nodes[0];
    let (ready, ()) = tokio::join!(node.ready(secs(1)), cluster.pass(secs(2)));
    assert!(matches!(ready, Err(StoreError::TimedOut(_))), "{ready:?}");
    cluster.store.set_away(false);
    let (ready, ()) = tokio::join!(node.ready(secs(5)), cluster.pass(secs(5)));
    ready.unwrap();
    node.ready(Duration::ZERO).await.expect("ready is told without waiting");
}

/// It was told that the store had not answered.
#[tokio::test]
async fn ready_of_a_node_on_a_new_store_tells_that_the_store_is_recovering() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Share));
    let node = &cluster.nodes[0];
    let (ready, ()) = tokio::join!(node.ready(millis(150)), cluster.pass(millis(300)));
    assert_eq!(ready, Err(StoreError::Recovering));
    let (ready, ()) = tokio::join!(node.ready(secs(5)), cluster.pass(secs(5)));
    ready.unwrap();
}

#[tokio::test]
async fn a_limiter_without_a_store_is_ready_and_leaves_at_once() {
    let (_clock, limiter, _api) = alone(Quota::per_second(1));
    limiter.ready(Duration::ZERO).await.unwrap();
    limiter.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn shutdown_gives_back_what_the_node_held() {
    let quota = Quota::per_hour(1000);
    let cluster = Cluster::new(2, &Limit::new("api", quota).sync_interval(millis(50)));
    let apis = cluster.apis();
    let mut admitted = 0;
    for _ in 0..100 {
        cluster.clock.advance(STEP);
        admitted += u64::from(apis[0].check("user").is_allowed());
        cluster.settle().await;
    }
    let (left, ()) = tokio::join!(cluster.nodes[0].shutdown(secs(2)), cluster.pass(secs(2)));
    left.unwrap();
    // The other node alone finds all the rest, without waiting for a lease to end.
    for _ in 0..600 {
        cluster.clock.advance(STEP);
        for _ in 0..REQUESTS_A_STEP {
            admitted += u64::from(apis[1].check("user").is_allowed());
        }
        cluster.nodes[1].settle().await;
    }
    assert!((1000..=1002).contains(&admitted), "{admitted} of 1000");
}

#[tokio::test]
async fn shutdown_gives_up_at_its_deadline_while_the_store_is_away() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Share));
    cluster.press(secs(1)).await;
    cluster.store.set_away(true);
    let node = &cluster.nodes[0];
    let (left, ()) = tokio::join!(node.shutdown(secs(1)), cluster.pass(secs(2)));
    assert_eq!(left.unwrap_err().within, secs(1));
}

// ---- the end without a shutdown --------------------------------------------------------------

/// Builds a limiter, uses it, drops it while its task is held up in the listener, and waits until
/// the task is gone: the listener goes last.
fn drop_ends_the_task() {
    let gate = Arc::new(Mutex::new(()));
    let (alive, gone) = (gate.clone(), Arc::downgrade(&gate));
    let (enter, entered) = std::sync::mpsc::channel();
    let limiter = Limiter::builder()
        .limit(Limit::new("api", Quota::per_second(10)))
        .store(MemoryStore::new())
        .listen(move |_| {
            let _ = enter.send(());
            drop(alive.lock());
        })
        .build()
        .unwrap();
    let api = limiter.limit("api").unwrap();
    let handle = api.handle("user");
    drop(limiter.clone());
    assert!(handle.check().is_allowed());
    drop((limiter, api));
    assert!(
        handle.check_n(0).unwrap().burst() == 10 && gone.strong_count() == 2,
        "a handle keeps it alive"
    );
    let held = gate.lock().unwrap();
    entered.try_iter().for_each(drop);
    entered.recv_timeout(DEADLINE).expect("the task lives, and tells of its syncs");
    let (drop_returns, returned) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(handle);
        let _ = drop_returns.send(());
    });
    returned.recv_timeout(DEADLINE).expect("a drop does not wait for the task");
    drop(held);
    drop(gate);
    let deadline = Instant::now() + DEADLINE;
    while gone.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the task outlived its limiter");
        std::thread::sleep(POLL_GAP);
    }
}

#[test]
fn a_drop_without_shutdown_ends_the_task_on_a_thread_of_its_own() {
    drop_ends_the_task();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drop_without_shutdown_ends_the_task_on_a_runtime() {
    tokio::task::spawn_blocking(drop_ends_the_task).await.unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn the_thread_of_a_dropped_limiter_vanishes() {
    // Where no other test's limiters have threads.
    if !runs_alone("the_thread_of_a_dropped_limiter_vanishes") {
        return;
    }
    let limiter =
        Limiter::builder().limit(Limit::new("api", Quota::per_second(10))).build().unwrap();
    wait_for_threads(2);
    drop(limiter);
    wait_for_threads(0);
}

/// Whether this process runs the test alone. If it does not, a process of its own does, and passes.
#[cfg(target_os = "linux")]
fn runs_alone(test: &str) -> bool {
    const VARIABLE: &str = "TIDEGATE_TEST_ALONE";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--test-threads", "1"])
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Polls until this process has so many threads of tidegate: the clock's, and one a limiter.
#[cfg(target_os = "linux")]
fn wait_for_threads(expected: usize) {
    let ours = |task: std::io::Result<std::fs::DirEntry>| {
        // A thread that ended since it was listed has no name any more.
        let name = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
        name.starts_with("tidegate-").then_some(())
    };
    let deadline = Instant::now() + DEADLINE;
    loop {
        let found = std::fs::read_dir("/proc/self/task").unwrap().filter_map(ours).count();
        if found == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{found} threads, not {expected}");
        std::thread::sleep(POLL_GAP);
    }
}

// ---- the cap on keys -------------------------------------------------------------------------

const KEYS_MAX: usize = 100;

fn capped(quota: Quota) -> (ManualClock, Limiter, ActiveLimit, Heard) {
    let clock = ManualClock::new();
    let heard = Heard::default();
    let limiter = Limiter::builder()
        .limit(Limit::new("api", quota))
        .max_keys(KEYS_MAX)
        .clock(&clock)
        .listen(heard.ear())
        .build()
        .unwrap();
    let api = limiter.limit("api").unwrap();
    (clock, limiter, api, heard)
}

/// Requests of keys that nobody ever saw, all in one go; returns how many were admitted.
fn invent(api: &ActiveLimit, keys: usize) -> usize {
    (0..keys).filter(|key| api.check(&format!("invented:{key}")).is_allowed()).count()
}

#[tokio::test]
async fn invented_keys_beyond_the_cap_share_one_bucket_and_starve_nobody_else() {
    let (clock, limiter, api, heard) = capped(Quota::per_hour(5));
    let known = api.handle("user");
    assert!(known.check().is_allowed());
    let admitted = invent(&api, 1000);
    assert_eq!(
        admitted,
        (KEYS_MAX - 1) + 5,
        "one each that found room, and one burst for the rest"
    );
    for _ in 0..4 {
        assert!(api.check("user").is_allowed(), "a known key has its own burst");
    }
    assert!(api.check("user").is_denied());
    assert!(api.handle("invented:999").check().is_denied(), "the burst for the rest is spent");
    // None of the keys is full again: forgetting one would give it a second burst.
    for _ in 0..2 {
        clock.advance(secs(30));
        limiter.settle().await;
    }
    assert_eq!(heard.count(|event| matches!(event, Event::Evicted { .. })), 0);
    // With the one by the handle.
    let without_room = (1000 - (KEYS_MAX - 1) + 1) as u64;
    let told = |event: &Event| match event {
        Event::Decisions { overflowed, .. } => *overflowed == without_room,
        _ => false,
    };
    assert_eq!(heard.count(told), 1, "decisions about keys without room are counted");
    assert!(api.check("user").is_denied());
    assert_eq!(invent(&api, KEYS_MAX - 1), KEYS_MAX - 1, "keys in the map go on with their own");
}

#[tokio::test]
async fn keys_that_are_idle_and_full_make_room_and_keys_in_hand_stay() {
    let (clock, limiter, api, heard) = capped(Quota::per_second(5));
    let held = api.handle("held");
    invent(&api, 1000);
    let new = api.handle("new");
    assert!(new.check().is_denied(), "no room yet");
    clock.advance(secs(2));
    limiter.settle().await;
    clock.advance(secs(2));
    limiter.settle().await;
    assert!(heard.count(|event| matches!(event, Event::Evicted { keys } if *keys > 50)) > 0);
    assert!(new.check_n(5).unwrap().is_allowed(), "the handle finds the key's own bucket");
    assert!(held.check_n(5).unwrap().is_allowed());
    assert!(api.check("held").is_denied(), "the handle is still the key's own");
}

#[tokio::test]
async fn evicted_keys_of_a_shared_limit_make_room_and_have_no_tokens_when_they_return() {
    let limit = Limit::new("api", Quota::per_hour(5));
    let cluster = Cluster::with(1, &limit, |builder| builder.max_keys(KEYS_MAX));
    let api = &cluster.apis()[0];
    cluster.pass(secs(1)).await;
    let ask_all = || {
        let keys = (0..KEYS_MAX).map(|key| api.check(&format!("known:{key}")));
        keys.filter(Decision::is_allowed).count()
    };
    let mut admitted = 0;
    for _ in 0..200 {
        admitted += ask_all();
        cluster.pass(STEP).await;
    }
    assert!((5 * KEYS_MAX..=6 * KEYS_MAX).contains(&admitted), "{admitted}: a burst, and credit");
    invent(api, 1000);
    cluster.pass(secs(8)).await;
    let evicted = cluster.heard.sum(|event| match event {
        Event::Evicted { keys } => *keys,
        _ => 0,
    });
    assert!(evicted > KEYS_MAX / 2, "{evicted} of {KEYS_MAX} made room");
    for _ in 0..10 {
        assert_eq!(ask_all(), 0, "an hour gives five tokens, and nine seconds have passed");
        cluster.pass(STEP).await;
    }
}

// ---- outages ---------------------------------------------------------------------------------

/// Presses a cluster of two, takes its store away, and returns what was admitted a second once
/// every lease has ended, with the cluster.
async fn admitted_in_an_outage(policy: OutagePolicy) -> (Cluster, u64) {
    let cluster = Cluster::new(2, &limit(policy));
    cluster.press(secs(3)).await;
    cluster.store.set_away(true);
    cluster.press(CUT_OFF).await;
    assert!(cluster.heard.count(|event| matches!(event, Event::StoreDown { .. })) > 0);
    assert!(cluster.heard.count(|event| matches!(event, Event::OutagePolicy { .. })) > 0);
    let admitted = cluster.press(secs(4)).await;
    (cluster, admitted / 4)
}

/// After the outage the limit holds as before. Until its next attempt at the store a node goes on
/// by its policy, which admits `a_second`.
async fn returns_without_a_burst(cluster: Cluster, a_second: u64) {
    cluster.store.set_away(false);
    let (mut admitted, mut steps) = (0, 0);
    while cluster.heard.count(|event| matches!(event, Event::StoreUp { .. })) < LANES_DOWN {
        admitted += cluster.press(STEP).await;
        steps += 1;
        assert!(steps < 100, "half a second, and the store is not up for all");
    }
    // What no policy admitted has flowed in meanwhile, a burst of a second at most.
    let unspent = if a_second == 0 { RATE } else { 0 };
    let most = a_second * steps / 200 + RATE / 20 + unspent;
    assert!(admitted <= most, "{admitted} of {most} until the last node was back");
    let admitted = cluster.press(secs(4)).await;
    let most = 4 * RATE + unspent + 2;
    assert!((most / 2..=most).contains(&admitted), "{admitted} of {most} in 4 s");
}

#[tokio::test]
async fn in_an_outage_nodes_share_the_rate_as_the_store_last_counted_them() {
    let (cluster, a_second) = admitted_in_an_outage(OutagePolicy::Share).await;
    assert!((RATE - 4..=RATE).contains(&a_second), "{a_second}");
    returns_without_a_burst(cluster, a_second).await;
}

/// What a cluster admits in a second of an outage, beside one whose nodes have another limit.
async fn admitted_in_an_outage_beside(cluster: Cluster, others: usize, limit: &str) -> u64 {
    let (store, clock) = (cluster.store.clone(), cluster.clock.clone());
    let other = Limit::new(limit, Quota::per_second(RATE));
    let others = Cluster::over(store, clock, others, &other, |builder| builder);
    let mut admitted = 0;
    for part in 0..10 * 5 {
        if part == 20 {
            cluster.store.set_away(true);
        }
        let in_part = cluster.press(secs(1) / 5).await;
        others.settle().await;
        admitted += if part >= 45 { in_part } else { 0 };
    }
    admitted
}

#[tokio::test]
async fn in_an_outage_the_share_of_a_node_ignores_nodes_without_the_limit() {
    let cluster = Cluster::new(2, &limit(OutagePolicy::Share));
    let admitted = admitted_in_an_outage_beside(cluster, 6, "reports").await;
    assert!((RATE - 4..=RATE + 2).contains(&admitted), "{admitted}");
}

#[tokio::test]
async fn nodes_of_a_limit_are_counted_where_each_has_more_limits_than_a_batch_names() {
    let more = |builder: Builder| {
        let names = (0..40).map(|number| format!("limit{number}"));
        names.fold(builder, |builder, name| {
            builder.limit(Limit::new(&name, Quota::per_second(RATE)))
        })
    };
    // Six other nodes have `limit0`, the second of the first batch. `limit32` is the second of the third.
    for (limit, expected) in [("limit0", RATE / 4), ("limit32", RATE)] {
        let api = Limit::new("api", Quota::per_second(RATE));
        let cluster = Cluster { limit, ..Cluster::with(2, &api, more) };
        let admitted = admitted_in_an_outage_beside(cluster, 6, "limit0").await;
        assert!((expected - 4..=expected + 2).contains(&admitted), "{admitted} of {limit}");
    }
}

#[tokio::test]
async fn in_an_outage_a_closed_limit_denies_everything() {
    let (cluster, a_second) = admitted_in_an_outage(OutagePolicy::Closed).await;
    assert_eq!(a_second, 0);
    returns_without_a_burst(cluster, a_second).await;
}

#[tokio::test]
async fn in_an_outage_an_open_limit_admits_everything() {
    let (cluster, a_second) = admitted_in_an_outage(OutagePolicy::Open).await;
    assert_eq!(a_second, 2 * REQUESTS_A_STEP * 200);
    returns_without_a_burst(cluster, a_second).await;
}

#[tokio::test]
async fn in_an_outage_a_limit_can_go_on_at_the_rate_last_leased() {
    let (cluster, a_second) = admitted_in_an_outage(OutagePolicy::LastRate).await;
    assert!((RATE * 9 / 10..=RATE).contains(&a_second), "{a_second}");
    returns_without_a_burst(cluster, a_second).await;
}

#[tokio::test]
async fn an_outage_policy_waits_for_its_grace_time() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Open).grace(secs(10)));
    cluster.press(secs(2)).await;
    cluster.store.set_away(true);
    cluster.press(CUT_OFF).await;
    assert_eq!(cluster.press(secs(4)).await, 0, "leases have ended, the policy has not begun");
    cluster.press(secs(4)).await;
    assert_eq!(cluster.press(secs(1)).await, REQUESTS_A_STEP * 200);
}

/// A node that never reaches its store, in four seconds after its outage policy took over.
async fn admitted_without_ever_reaching_the_store(limit: Limit, max_nodes: Option<u32>) -> u64 {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    store.set_away(true);
    let cluster = Cluster::over(store, clock, 1, &limit, |builder| match max_nodes {
        Some(nodes) => builder.max_nodes(nodes),
        None => builder,
    });
    let nodes = u64::from(max_nodes.unwrap_or(DEFAULT_MAX_NODES));
    let first = cluster.press(secs(2)).await;
    assert_eq!(first, RATE.div_ceil(4 * nodes), "first credit alone, while others may hold leases");
    cluster.press(Duration::from_millis(200)).await;
    cluster.press(secs(4)).await
}

#[tokio::test]
async fn node_that_never_reached_the_store_takes_one_of_max_nodes_shares() {
    let share = limit(OutagePolicy::Share);
    for (max_nodes, nodes) in [(Some(4), 4), (None, u64::from(DEFAULT_MAX_NODES))] {
        let admitted = admitted_without_ever_reaching_the_store(share.clone(), max_nodes).await;
        let share = 4 * RATE / nodes;
        assert!((share - 4..=share).contains(&admitted), "{admitted} in 4 s, one of {nodes}");
    }
}

#[tokio::test]
async fn a_closed_limit_gives_new_keys_no_first_credit_in_an_outage() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Closed));
    cluster.press(secs(3)).await;
    cluster.store.set_away(true);
    cluster.press(CUT_OFF + secs(2)).await;
    let api = &cluster.apis()[0];
    let ask = |round: &str| (0..20).filter(|key| api.check(&(round, *key)).is_allowed()).count();
    assert_eq!(ask("in the outage"), 0);
    cluster.store.set_away(false);
    cluster.press(secs(3)).await;
    assert_eq!(ask("after it"), 20);
}

#[tokio::test]
async fn an_outage_policy_is_told_of_once_when_it_takes_over_and_once_when_it_ends() {
    let cluster = Cluster::new(1, &limit(OutagePolicy::Share));
    let began = |event: &Event| match event {
        Event::OutagePolicyBegan { limit, policy, nodes, store_was_reached } => {
            (&**limit, *policy, *nodes, *store_was_reached) == ("api", OutagePolicy::Share, 1, true)
        }
        _ => false,
    };
    let ended = |event: &Event| matches!(event, Event::OutagePolicyEnded { .. });
    cluster.press(secs(3)).await;
    for outages in 1..=2 {
        cluster.store.set_away(true);
        cluster.press(CUT_OFF + secs(4)).await;
        assert_eq!(
            (cluster.heard.count(began), cluster.heard.count(ended)),
            (outages, outages - 1)
        );
        cluster.store.set_away(false);
        cluster.press(secs(4)).await;
        assert_eq!((cluster.heard.count(began), cluster.heard.count(ended)), (outages, outages));
    }
}

#[tokio::test]
async fn a_store_that_was_never_reached_is_told_of_with_the_nodes_that_are_assumed() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    store.set_away(true);
    let limit = limit(OutagePolicy::Share);
    let cluster = Cluster::over(store, clock, 1, &limit, |builder| builder.max_nodes(4));
    let assumed = |event: &Event| {
        matches!(event, Event::OutagePolicyBegan { nodes: 4, store_was_reached: false, .. })
    };
    assert!(cluster.apis()[0].check("user").is_allowed(), "the first client is admitted");
    cluster.press(secs(5)).await;
    assert_eq!(cluster.heard.count(assumed), 1);
}

#[tokio::test]
async fn an_accuracy_that_leaves_no_credit_is_refused_or_told_of_once() {
    let accurate = || Limit::new("api", Quota::per_second(5)).accuracy(0.5);
    let built = |limit, nodes| Limiter::builder().limit(limit).max_nodes(nodes).build();
    let error = built(accurate(), 4).unwrap_err().to_string();
    let expected = "limit \"api\": accuracy = 2 tokens for max_nodes = 4: leaves less than a token";
    assert!(error.starts_with(expected), "{error}");
    assert!(built(accurate(), 2).is_ok() && built(accurate().strict(), 4).is_ok());
    let none = |event: &Event| matches!(event, Event::NoCredit { .. });
    for (nodes, told) in [(2, 0), (4, 4)] {
        let cluster = Cluster::new(nodes, &accurate());
        cluster.pass(secs(5)).await;
        assert_eq!(cluster.heard.count(none), told, "each of {nodes} nodes tells once");
    }
}

#[tokio::test]
async fn a_node_that_never_reached_the_store_is_open_or_closed_as_its_policy_says() {
    let closed = limit(OutagePolicy::Closed);
    assert_eq!(admitted_without_ever_reaching_the_store(closed, Some(4)).await, 0);
    let open = limit(OutagePolicy::Open);
    let all = REQUESTS_A_STEP * 200 * 4;
    assert_eq!(admitted_without_ever_reaching_the_store(open, None).await, all);
}

#[tokio::test]
async fn a_store_that_lost_its_memory_is_noticed_and_gives_no_fresh_burst() {
    const NODES: u64 = 3;
    let cluster = Cluster::new(NODES as usize, &limit(OutagePolicy::Share));
    let admitted = cluster.press(secs(3)).await;
    assert!((3 * RATE..=4 * RATE + NODES).contains(&admitted), "{admitted}: a burst, and the rate");
    for losses in 1..=5 {
        cluster.store.clear();
        let admitted = cluster.press(secs(1)).await;
        // Nodes live on the rate that they were leased; each may give its credit once more.
        let good = RATE * 9 / 10..=RATE + NODES;
        assert!(good.contains(&admitted), "{admitted} in the second after loss {losses}");
    }
    assert!(cluster.heard.count(|event| matches!(event, Event::MemoryLost { .. })) > 0);
}

// ---- metrics ---------------------------------------------------------------------------------

#[cfg(feature = "metrics")]
mod metrics_of_a_limiter {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use metrics::{
        Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString,
        Unit,
    };

    use super::*;

    /// Keeps what is described and what is recorded, by name and labels.
    #[derive(Default)]
    struct Kept {
        described: Mutex<BTreeMap<String, String>>,
        values: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    }

    impl Kept {
        fn describe(&self, name: &KeyName, text: &SharedString) {
            self.described.lock().unwrap().insert(name.as_str().to_owned(), text.to_string());
        }

        fn cell(&self, key: &Key) -> Arc<AtomicU64> {
            let labels: Vec<String> =
                key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let name = format!("{}{{{}}}", key.name(), labels.join(","));
            self.values.lock().unwrap().entry(name).or_default().clone()
        }

        fn value(&self, name: &str) -> u64 {
            let values = self.values.lock().unwrap();
            let cell = values.get(name);
            cell.unwrap_or_else(|| panic!("no {name} in {values:?}")).load(Ordering::Relaxed)
        }
    }

    /// A histogram that counts its samples.
    struct Samples(Arc<AtomicU64>);

    impl HistogramFn for Samples {
        fn record(&self, _: f64) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Recorder for Kept {
        fn describe_counter(&self, name: KeyName, _: Option<Unit>, text: SharedString) {
            self.describe(&name, &text);
        }

        fn describe_gauge(&self, name: KeyName, _: Option<Unit>, text: SharedString) {
            self.describe(&name, &text);
        }

        fn describe_histogram(&self, name: KeyName, _: Option<Unit>, text: SharedString) {
            self.describe(&name, &text);
        }

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.cell(key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.cell(key))
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::new(Samples(self.cell(key))))
        }
    }

    #[test]
    fn metrics_are_described_and_flushed_by_the_sync_task() {
        let kept = Kept::default();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        metrics::with_local_recorder(&kept, || runtime.block_on(spend_and_lose_the_store()));
        let labelled = |name: &str, labels: &str| format!("tidegate_{name}{{limiter=n{labels}}}");
        let allowed = kept.value(&labelled("decisions_total", ",limit=api,outcome=allowed"));
        let denied = kept.value(&labelled("decisions_total", ",limit=api,outcome=denied"));
        assert_eq!(allowed + denied, REQUESTS_A_STEP * 400, "each decision is counted once");
        assert!(allowed > 0 && denied > 0);
        assert!(kept.value(&labelled("syncs_total", ",outcome=ok")) > 0);
        assert!(kept.value(&labelled("syncs_total", ",outcome=error")) > 0);
        assert!(kept.value(&labelled("sync_duration_seconds", "")) > 0);
        assert!(kept.value(&labelled("drift_ratio", ",limit=api")) > 0);
        assert_eq!(kept.value(&labelled("store_up", "")), 0.0_f64.to_bits());
        assert_eq!(kept.value(&labelled("keys", "")), 1.0_f64.to_bits());
        // What has not happened is 0, and not absent.
        for name in ["memory_losses_total", "evicted_keys_total", "foreign_keys_total"] {
            assert_eq!(kept.value(&labelled(name, "")), 0, "{name}");
        }
        let by_limit = ["overflow_decisions_total", "lost_records_total", "quota_mismatches_total"];
        for name in by_limit {
            assert_eq!(kept.value(&labelled(name, ",limit=api")), 0, "{name}");
        }
        // One node's credit, and its share of four seconds' outage.
        let gauge = |name| f64::from_bits(kept.value(&labelled(name, ",limit=api")));
        let quota = ["limit_rate_tokens_per_second", "limit_burst_tokens"].map(gauge);
        assert_eq!(quota.map(|tokens| tokens.round() as u64), [RATE, RATE]);
        assert_eq!(kept.value(&labelled("max_keys", "")), 1e6_f64.to_bits());
        assert!((gauge("on_outage_policy") - 1.0).abs() < 1e-9);
        let bound = gauge("excess_bound_tokens");
        assert!((1.0 - 1e-6..=1.0 + 5.0 * RATE as f64).contains(&bound), "{bound}");
        assert!((0.0..=bound).contains(&gauge("excess_observed_tokens")));
        let described = kept.described.lock().unwrap();
        for name in kept.values.lock().unwrap().keys() {
            let name = name.split('{').next().unwrap();
            assert!(described.get(name).is_some_and(|text| !text.is_empty()), "{name}");
        }
    }

    async fn spend_and_lose_the_store() {
        let limit = limit(OutagePolicy::Share);
        let cluster = Cluster::with(1, &limit, |builder| builder.name("n"));
        cluster.press(secs(2)).await;
        cluster.store.set_away(true);
        cluster.pass(secs(4)).await;
    }
}

/// Memory of this process that is not on disk, in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("this runs on Linux");
    let resident = pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    resident.expect("the second number") * 4096
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn room_for_many_keys_takes_memory_only_when_they_come() {
    // Where no other test takes memory meanwhile.
    if !runs_alone("room_for_many_keys_takes_memory_only_when_they_come") {
        return;
    }
    let clock = ManualClock::new();
    let before = resident_bytes();
    let limits = (0..5).map(|number| Limit::new(format!("api-{number}"), Quota::per_second(1)));
    let builder = limits.fold(Limiter::builder(), Builder::limit);
    let limiter = builder.max_keys(10_000_000).clock(&clock).build().expect("good limits");
    let api = limiter.limit("api-0").expect("it was built with it");
    assert!(api.check("key").is_allowed());
    let taken = resident_bytes().saturating_sub(before);
    assert!(taken < 32 << 20, "{taken} bytes for one key");
}
