//! Concurrency limits: the interface, outages, and nodes on a real Redis.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::disallowed_methods, reason = "servers are real, and so is time")]

mod parts;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate::testing::{Fault, ManualClock, ScriptedStore};
use tidegate::{
    AcquireError, Builder, Concurrency, ConcurrencyLimit, ConfigError, Event, Limit, Limiter,
    MemoryStore, OutagePolicy, Permit, Quota, RedisStore,
};

use parts::{Proxy, RedisServer};

/// Long enough on a busy machine.
const LONG: Duration = Duration::from_secs(20);
/// Two lease epochs and a poll, and what a busy machine takes. The script's own test has the time to the microsecond.
const RETURNED: Duration = Duration::from_secs(5);

fn redis(server: &RedisServer) -> RedisStore {
    RedisStore::open(&server.url()).unwrap().timeout(Duration::from_secs(2))
}

fn jobs(max: u32) -> Concurrency {
    Concurrency::new("jobs", max).max_wait(Duration::from_secs(5)).max_waiting(10_000)
}

fn on(builder: Builder) -> ConcurrencyLimit {
    builder.build().unwrap().concurrency("jobs").unwrap()
}

/// A limiter on this clock, and the store that both share.
fn scripted(limit: Concurrency, clock: &ManualClock, store: &ScriptedStore) -> Limiter {
    Limiter::builder()
        .concurrency(limit)
        .store(store.clone())
        .clock(clock)
        .max_nodes(4)
        .build()
        .unwrap()
}

fn is_denied<T>(result: &Result<T, AcquireError>) -> bool {
    matches!(result, Err(AcquireError::Denied { .. }))
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !is_so().await {
        assert!(begin.elapsed() < LONG, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn names_of_limits_and_concurrency_limits_are_one_namespace() {
    let api = || Limiter::builder().limit(Limit::new("api", Quota::per_second(1)));
    let twice = api().concurrency(Concurrency::new("api", 1)).build().unwrap_err();
    assert_eq!(twice, ConfigError::DuplicateLimit("api".to_owned()));
    let limiter = api().concurrency(jobs(1)).build().unwrap();
    assert!(limiter.limit("api").is_ok() && limiter.concurrency("jobs").is_ok());
    let unknown = ConfigError::UnknownLimit { name: "api".to_owned(), known: "jobs".to_owned() };
    assert_eq!(limiter.concurrency("api").unwrap_err(), unknown);
    assert!(Limiter::builder().build().is_err(), "a limiter needs a limit");
}

#[tokio::test]
async fn cost_of_nothing_and_cost_above_the_limit_are_errors_that_name_the_value() {
    let jobs = on(Limiter::builder().concurrency(jobs(4)));
    for cost in [0, 5, u32::MAX] {
        let error = jobs.acquire_n("a", cost).await.unwrap_err();
        assert_eq!(error, AcquireError::Cost { limit: "jobs".into(), cost, max: 4 });
    }
    assert_eq!(jobs.acquire_n("a", 4).await.unwrap().cost(), 4);
}

/// Row 'concurrency, n 4' of the examples of algorithms: time in ms, cost, hold in ms, and what is decided.
const EXAMPLE: [(f64, u32, f64, bool, u64); 10] = [
    (0.0, 1, 500.0, true, 3),
    (0.0, 2, 1000.0, true, 1),
    (100.0, 2, 100.0, false, 1),
    (100.0, 1, 300.0, true, 0),
    (399.999, 1, 100.0, false, 0),
    (400.0, 1, 100.0, true, 0),
    (500.0, 3, 100.0, false, 2),
    (500.0, 2, 400.0, true, 0),
    (900.0, 4, 100.0, false, 2),
    (1000.0, 4, 0.0, true, 4),
];

/// Plays the row on these nodes in turn. A permit is given back when its hold ends, before anything is asked at that time.
async fn plays_the_example(clock: &ManualClock, nodes: &[Limiter]) {
    let mut held: Vec<(f64, Permit)> = Vec::new();
    let mut now = 0.0;
    for (step, (at, cost, hold, expected, left)) in EXAMPLE.into_iter().enumerate() {
        clock.advance(Duration::from_nanos(((at - now) * 1e6) as u64));
        now = at;
        held.retain(|(until, _)| *until > now);
        for node in nodes {
            node.settle().await;
        }
        let jobs = nodes[step % nodes.len()].concurrency("jobs").unwrap();
        let answer = jobs.acquire_n("a", cost).await;
        assert_eq!(answer.is_ok(), expected, "step {step}: {answer:?}");
        if let Err(AcquireError::Denied { in_use, .. }) = &answer {
            assert_eq!(u64::from(4 - in_use), left, "step {step}");
        }
        held.extend(answer.ok().map(|permit| (now + hold, permit)));
        held.retain(|(until, _)| *until > now);
        let in_use: u64 = nodes.iter().map(|node| node.concurrency("jobs").unwrap().in_use()).sum();
        assert_eq!(4 - in_use, left, "step {step}");
    }
}

#[tokio::test]
async fn decisions_are_those_of_the_example_on_one_node_and_on_three() {
    let clock = ManualClock::new();
    let alone = Limiter::builder().concurrency(jobs(4)).clock(&clock).build().unwrap();
    plays_the_example(&clock, &[alone]).await;
    let (clock, store) = (ManualClock::new(), MemoryStore::new());
    let node = || {
        let builder = Limiter::builder().concurrency(jobs(4)).store(store.clone());
        builder.clock(&clock).build().unwrap()
    };
    plays_the_example(&clock, &[node(), node(), node()]).await;
}

#[tokio::test]
async fn decisions_of_nodes_on_redis_are_those_of_the_example() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let node = || {
        let store = redis(&server).clock(&clock);
        Limiter::builder().concurrency(jobs(4)).store(store).clock(&clock).build().unwrap()
    };
    plays_the_example(&clock, &[node(), node(), node()]).await;
}

#[tokio::test]
async fn callers_of_a_node_get_permits_in_the_order_in_which_they_came() {
    let jobs = on(Limiter::builder().concurrency(jobs(1)));
    let first = jobs.acquire("a").await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..10 {
        let (jobs, order) = (jobs.clone(), order.clone());
        let before = jobs.waiting();
        tasks.push(tokio::spawn({
            let jobs = jobs.clone();
            async move {
                let permit = jobs.acquire_within("a", LONG).await.unwrap();
                order.lock().unwrap().push(number);
                drop(permit);
            }
        }));
        until("it waits", async || jobs.waiting() > before).await;
    }
    assert!(is_denied(&jobs.acquire("a").await), "it would overtake");
    // Whoever goes away leaves the queue.
    tasks[3].abort();
    until("it has left", async || jobs.waiting() == 9).await;
    drop(first);
    for (number, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.is_ok(), number != 3);
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 4, 5, 6, 7, 8, 9]);
    assert_eq!((jobs.in_use(), jobs.waiting()), (0, 0));
}

#[tokio::test]
async fn more_callers_than_may_wait_are_denied_and_those_who_wait_for_too_long_are_told_so() {
    let limit = jobs(1).max_waiting(2);
    let jobs = on(Limiter::builder().concurrency(limit));
    let permit = jobs.acquire("a").await.unwrap();
    let within = Duration::from_millis(300);
    let wait = || {
        let jobs = jobs.clone();
        tokio::spawn(async move { jobs.acquire_within("a", within).await.map(drop) })
    };
    let waiting = [wait(), wait()];
    until("both wait", async || jobs.waiting() == 2).await;
    let error = jobs.acquire_within("b", within).await.map(|_| ());
    assert_eq!(error, Ok(()), "another key is free, so nobody has to wait");
    let error = jobs.acquire_within("a", within).await.unwrap_err();
    assert_eq!(error, AcquireError::TooManyWaiting { limit: "jobs".into(), max_waiting: 2 });
    for one in waiting {
        let error = one.await.unwrap().unwrap_err();
        assert_eq!(error, AcquireError::TimedOut { limit: "jobs".into(), max: 1, within });
    }
    drop(permit);
    assert!(jobs.acquire("a").await.is_ok());
}

#[tokio::test]
async fn local_limit_has_its_permits_on_each_node_and_asks_no_store() {
    let store = MemoryStore::new();
    let node = || on(Limiter::builder().concurrency(jobs(2).local()).store(store.clone()));
    let nodes = [node(), node()];
    let mut held = Vec::new();
    for jobs in &nodes {
        held.extend([jobs.acquire("a").await.unwrap(), jobs.acquire("a").await.unwrap()]);
        assert!(is_denied(&jobs.acquire("a").await));
        held.push(jobs.acquire("b").await.unwrap());
    }
    assert_eq!(held.len(), 6);
}

#[tokio::test]
async fn keys_beyond_max_keys_are_refused_until_others_are_free() {
    let jobs = on(Limiter::builder().concurrency(jobs(1)).max_keys(2));
    let held = (jobs.acquire("a").await.unwrap(), jobs.acquire("b").await.unwrap());
    let error = jobs.acquire("c").await.unwrap_err();
    assert_eq!(error, AcquireError::TooManyKeys { limit: "jobs".into(), max_keys: 2 });
    drop(held);
    assert!(jobs.acquire("c").await.is_ok());
}

#[tokio::test]
async fn task_that_panics_gives_its_permit_back() {
    let server = RedisServer::start();
    for builder in [Limiter::builder(), Limiter::builder().store(redis(&server))] {
        let jobs = on(builder.concurrency(jobs(1)));
        let permit = jobs.acquire("a").await.unwrap();
        let task = tokio::spawn(async move {
            let _held = permit;
            panic!("the work fails, as this test wants it");
        });
        assert!(task.await.unwrap_err().is_panic());
        until("the permit is back", async || jobs.acquire("a").await.is_ok()).await;
    }
}

/// A caller whose future is dropped at any point of its life leaves nothing behind.
#[tokio::test]
async fn futures_that_are_dropped_leak_no_permit() {
    let server = RedisServer::start();
    let jobs = on(Limiter::builder().concurrency(jobs(3)).store(redis(&server)));
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..300 {
        let patience = Duration::from_micros(random.u64(..1500));
        let _ = tokio::time::timeout(patience, jobs.acquire("a")).await;
        let _ = tokio::time::timeout(patience, jobs.acquire_within("a", LONG)).await;
    }
    until("all are back", async || jobs.acquire_n("a", 3).await.is_ok()).await;
    assert_eq!((jobs.in_use(), jobs.waiting()), (0, 0));
}

/// What an observer sees of all nodes.
#[derive(Default)]
struct Observer {
    in_flight: AtomicU32,
    most: AtomicU32,
    done: AtomicU32,
}

impl Observer {
    fn enter(&self) {
        let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
    }

    fn leave(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.done.fetch_add(1, Ordering::SeqCst);
    }
}

/// Nodes under load from more workers than there are permits, for so long. Returns how many holds each node had.
async fn load(
    nodes: &[ConcurrencyLimit],
    seen: &Arc<Observer>,
    holds_ms: (u64, u64),
    time: Duration,
) -> Vec<u32> {
    let end = Instant::now() + time;
    let mut tasks = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let workers = 2 * node.max() as usize / nodes.len() + 2;
        for worker in 0..workers {
            let (node, seen) = (node.clone(), seen.clone());
            let mut random = fastrand::Rng::with_seed((1000 * index + worker) as u64);
            tasks.push((
                index,
                tokio::spawn(async move {
                    let mut holds = 0;
                    while Instant::now() < end {
                        let Ok(permit) = node.acquire_within("a", LONG).await else { continue };
                        // Some get their first when the others have gone: those do not count.
                        let is_in_time = Instant::now() < end;
                        seen.enter();
                        let hold = Duration::from_millis(random.u64(holds_ms.0..=holds_ms.1));
                        tokio::time::sleep(hold).await;
                        seen.leave();
                        drop(permit);
                        holds += u32::from(is_in_time);
                    }
                    holds
                }),
            ));
        }
    }
    let mut holds = vec![0; nodes.len()];
    for (index, task) in tasks {
        holds[index] += task.await.unwrap();
    }
    holds
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_on_redis_never_hold_more_than_the_limit_and_none_starves() {
    let server = RedisServer::start();
    for (max, holds_ms) in [(1, (5, 20)), (3, (5, 100)), (10, (5, 500)), (100, (5, 500))] {
        let nodes: Vec<_> = (0..4)
            .map(|_| on(Limiter::builder().concurrency(jobs(max)).store(redis(&server))))
            .collect();
        let seen = Arc::new(Observer::default());
        let holds = load(&nodes, &seen, holds_ms, Duration::from_secs(3)).await;
        let most = seen.most.load(Ordering::SeqCst);
        println!("max {max}: {most} at most, {holds:?}");
        assert!(most <= max, "{most} of {max}");
        assert!(holds.iter().all(|&holds| holds > 0), "max {max}: {holds:?}");
        until("all are back", async || nodes[0].acquire_n("a", max).await.is_ok()).await;
        server.command(&["FLUSHALL"]);
    }
}

/// A node that has its own runtime, so that it can be killed.
struct Doomed {
    runtime: tokio::runtime::Runtime,
    held: Vec<Permit>,
}

impl Doomed {
    async fn start(url: String, max: u32) -> Self {
        let started = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let held = runtime.block_on(async {
                let store = RedisStore::open(&url).unwrap().timeout(Duration::from_secs(2));
                let jobs = on(Limiter::builder().concurrency(jobs(max)).store(store));
                let mut held = Vec::new();
                for _ in 0..max {
                    held.push(jobs.acquire("a").await.unwrap());
                }
                held
            });
            Self { runtime, held }
        });
        tokio::task::spawn_blocking(|| started.join().unwrap()).await.unwrap()
    }

    /// Nothing is given back: nobody is there to tell the store.
    fn kill(self) -> Vec<Permit> {
        self.runtime.shutdown_background();
        self.held
    }
}

#[tokio::test]
async fn permits_of_a_node_that_was_killed_are_back_after_two_epochs_and_not_while_it_lives() {
    let server = RedisServer::start();
    let doomed = Doomed::start(server.url(), 100).await;
    let jobs = on(Limiter::builder().concurrency(jobs(100)).store(redis(&server)));
    // It renews: for longer than a lease nothing comes free.
    let error = jobs.acquire_within("a", Duration::from_secs(4)).await.map(drop).unwrap_err();
    assert!(matches!(error, AcquireError::TimedOut { .. }), "{error}");
    let held = doomed.kill();
    let begin = Instant::now();
    until("all are back", async || jobs.acquire_n("a", 100).await.is_ok()).await;
    let took = begin.elapsed();
    println!("{} permits are back after {took:?}", held.len());
    assert!(took < RETURNED, "{took:?}");
}

#[tokio::test]
async fn acquire_after_the_limiters_runtime_has_ended_is_an_error() {
    let server = RedisServer::start();
    let url = server.url();
    let started = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = RedisStore::open(&url).unwrap();
            on(Limiter::builder().concurrency(jobs(1)).store(store).max_keys(1))
        })
    });
    let jobs = tokio::task::spawn_blocking(|| started.join().unwrap()).await.unwrap();
    for key in ["a", "b", "c"] {
        let error = jobs.acquire(key).await.map(drop).unwrap_err();
        assert_eq!(error, AcquireError::Ended { limit: "jobs".into() });
    }
    assert_eq!(jobs.waiting(), 0);
}

/// The events of a limiter.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl Events {
    fn listener(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let events = self.clone();
        move |event| events.0.lock().unwrap().push(event.clone())
    }

    fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| which(event)).count()
    }
}

fn began(event: &Event) -> bool {
    matches!(event, Event::OutagePolicyBegan { .. })
}

fn ended(event: &Event) -> bool {
    matches!(event, Event::OutagePolicyEnded { .. })
}

/// A proxy that can be cut in front of one of two nodes on a real Redis; the other node holds all that it can get.
#[tokio::test]
async fn node_that_is_cut_off_adds_no_more_than_it_held_and_its_policy_and_nothing_is_lost_after() {
    let server = RedisServer::start();
    for (policy, extra) in
        [(OutagePolicy::Share, 2), (OutagePolicy::Open, 5), (OutagePolicy::Closed, 0)]
    {
        server.command(&["FLUSHALL"]);
        let (proxy, events) = (Proxy::start(server.port()).await, Events::default());
        let limit = jobs(10).outage(policy).max_wait(Duration::from_millis(100));
        let store = RedisStore::open(&proxy.url()).unwrap();
        let cut = Limiter::builder().concurrency(limit).store(store).max_nodes(2);
        let cut = on(cut.listen(events.listener()));
        let other = on(Limiter::builder().concurrency(jobs(10)).store(redis(&server)));
        let mut held: Vec<Permit> = Vec::new();
        until("it holds three", async || {
            held.extend(cut.acquire("a").await);
            held.len() == 3
        })
        .await;
        let begin = Instant::now();
        proxy.set_refusing(true);
        let mut others = vec![other.acquire_n("a", 7).await.unwrap()];
        assert!(is_denied(&other.acquire("a").await), "the three are still the node's");
        while begin.elapsed() < Duration::from_secs(5) {
            if held.len() < 3 + 5 {
                held.extend(cut.acquire("a").await);
            }
            // Its lease was renewed 900 ms before at the most, and lasts for two seconds.
            let is_early = begin.elapsed() < Duration::from_millis(600);
            assert!(held.len() == 3 || !is_early, "{policy:?}: the policy has not begun");
            let of_another_key = cut.acquire("b").await;
            let is_early = begin.elapsed() < Duration::from_millis(600);
            assert!(of_another_key.is_err() || !is_early, "{policy:?}: nor for another key");
            others.extend(other.acquire("a").await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let others: u32 = others.iter().map(Permit::cost).sum();
        assert_eq!(others, 10, "{policy:?}: the lease of the node has ended");
        assert_eq!(held.len(), 3 + extra, "{policy:?}");
        assert_eq!((events.count(began), events.count(ended)), (1, 0), "{policy:?}");
        proxy.set_refusing(false);
        until("it is over", async || events.count(ended) == 1).await;
        assert!(is_denied(&other.acquire("a").await), "{policy:?}");
        drop(held);
        drop((cut, other));
    }
}

#[tokio::test]
async fn no_permit_is_lost_after_a_node_was_cut_off() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let limit = || jobs(5).max_wait(Duration::from_millis(100));
    let store = RedisStore::open(&proxy.url()).unwrap();
    let cut = on(Limiter::builder().concurrency(limit()).store(store).max_nodes(2));
    let other = on(Limiter::builder().concurrency(limit()).store(redis(&server)));
    let mut held = Vec::new();
    until("it holds five", async || {
        held.extend(cut.acquire("a").await);
        held.len() == 5
    })
    .await;
    proxy.set_refusing(true);
    // Given back while nobody hears it.
    held.truncate(1);
    until("they are back by their end", async || other.acquire_n("a", 5).await.is_ok()).await;
    proxy.set_refusing(false);
    until("the one is told", async || {
        matches!(other.acquire_n("a", 5).await, Err(AcquireError::Denied { in_use: 1, .. }))
    })
    .await;
    drop(held);
    until("all are free", async || cut.acquire_n("a", 5).await.is_ok()).await;
    until("for the other too", async || other.acquire_n("a", 5).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_late_and_doubled_messages_leak_no_permit_and_give_none_twice() {
    use parts::Fault;
    let server = RedisServer::start();
    for seed in 1..=2 {
        server.command(&["FLUSHALL"]);
        let mut nodes = Vec::new();
        let mut proxies = Vec::new();
        for node in 0..3 {
            let proxy = Proxy::start_with(server.port(), move |call| {
                let mut random = fastrand::Rng::with_seed(seed * 1_000_000 + node * 10_000 + call);
                match random.u32(..100) {
                    0..4 => Fault::CutReply,
                    4..6 => Fault::DropReply,
                    6..16 => Fault::Duplicate,
                    16..22 => Fault::Delay(Duration::from_millis(random.u64(..120))),
                    22..28 => Fault::LateRequest(Duration::from_millis(random.u64(..120))),
                    _ => Fault::Pass,
                }
            })
            .await;
            let store = RedisStore::open(&proxy.url()).unwrap().timeout(Duration::from_millis(50));
            let limit = jobs(4).max_wait(Duration::from_millis(60)).outage(OutagePolicy::Closed);
            nodes.push(on(Limiter::builder().concurrency(limit).store(store)));
            proxies.push(proxy);
        }
        let seen = Arc::new(Observer::default());
        let holds = load(&nodes, &seen, (1, 30), Duration::from_secs(4)).await;
        let most = seen.most.load(Ordering::SeqCst);
        println!("seed {seed}: {most} at most, {holds:?}");
        assert!(most <= 4, "{most}");
        assert!(holds.iter().sum::<u32>() > 50, "{holds:?}");
        let sound = on(Limiter::builder().concurrency(jobs(4)).store(redis(&server)));
        until("all are back", async || sound.acquire_n("a", 4).await.is_ok()).await;
    }
}

#[tokio::test]
async fn changed_limit_applies_at_once_and_stops_nobody() {
    let server = RedisServer::start();
    let node = |max| on(Limiter::builder().concurrency(jobs(max)).store(redis(&server)));
    let (before, lower, higher) = (node(10), node(4), node(12));
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(before.acquire("a").await.unwrap());
    }
    assert!(is_denied(&lower.acquire("a").await));
    let more = higher.acquire_n("a", 4).await.unwrap();
    assert!(is_denied(&higher.acquire("a").await) && is_denied(&before.acquire("a").await));
    drop(more);
    while held.len() > 3 {
        let is_free = lower.acquire("a").await.is_ok();
        assert!(!is_free, "{} are in flight", held.len());
        held.pop();
    }
    until("there are fewer than four", async || lower.acquire("a").await.is_ok()).await;
}

#[tokio::test]
async fn shutdown_waits_for_permits_and_reports_those_that_are_held() {
    let server = RedisServer::start();
    let limiter = Limiter::builder().concurrency(jobs(3)).store(redis(&server)).build().unwrap();
    let other = on(Limiter::builder().concurrency(jobs(3)).store(redis(&server)));
    let jobs = limiter.concurrency("jobs").unwrap();
    let held = [jobs.acquire("a").await.unwrap(), jobs.acquire("a").await.unwrap()];
    let error = limiter.shutdown(Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(error.permits, 2);
    assert!(error.to_string().contains("2 permits"), "{error}");
    assert!(
        is_denied(&other.acquire_n("a", 2).await),
        "they are not given away while they are held"
    );
    let leaving = tokio::spawn(async move { limiter.shutdown(LONG).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!leaving.is_finished());
    drop(held);
    leaving.await.unwrap().unwrap();
    assert!(other.acquire_n("a", 3).await.is_ok(), "the store was told before");
}

/// It was told of each step of the task, which it then woke: a core was busy for as long as a permit was held.
#[tokio::test]
async fn shutdown_sleeps_until_the_last_permit_has_gone_back() {
    let server = RedisServer::start();
    for store in [None, Some(redis(&server))] {
        let builder = Limiter::builder().concurrency(jobs(3));
        let builder = match store {
            Some(store) => builder.store(store),
            None => builder,
        };
        let limiter = builder.build().unwrap();
        let held = limiter.concurrency("jobs").unwrap().acquire("a").await.unwrap();
        let (mut polls, mut leaving) = (0, Box::pin(limiter.shutdown(LONG)));
        let sleep = tokio::time::sleep(Duration::from_millis(300));
        let mut sleep = std::pin::pin!(sleep);
        std::future::poll_fn(|context| {
            polls += 1;
            assert!(leaving.as_mut().poll(context).is_pending());
            sleep.as_mut().poll(context)
        })
        .await;
        assert!(polls < 20, "{polls} within 300 ms");
        drop(held);
        let begin = Instant::now();
        leaving.await.unwrap();
        assert!(begin.elapsed() < RETURNED, "{:?}", begin.elapsed());
    }
}

/// The node waited for an answer for five seconds, and the store had given all of its permits to others meanwhile.
#[tokio::test]
async fn lease_is_renewed_though_a_renewal_is_lost_and_callers_may_wait_for_long() {
    let (clock, begin) = (ManualClock::new(), Duration::from_millis(600));
    let store = ScriptedStore::new(&clock);
    let nodes = [1, 2].map(|_| scripted(jobs(1), &clock, &store));
    let limits = nodes.each_ref().map(|node| node.concurrency("jobs").unwrap());
    let pass = async |time: Duration| {
        for _ in 0..time.as_millis() / 20 {
            clock.advance(Duration::from_millis(20));
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
        }
    };
    let held = limits[0].acquire("a").await.unwrap();
    pass(begin).await;
    store.set_round_trip(Duration::from_secs(20));
    pass(Duration::from_millis(400)).await;
    store.set_round_trip(Duration::ZERO);
    for _ in 0..40 {
        pass(Duration::from_millis(100)).await;
        assert!(is_denied(&limits[1].acquire("a").await), "the first node holds it");
    }
    drop(held);
}

#[tokio::test]
async fn last_permit_of_a_dropped_limiter_keeps_its_place_and_goes_back() {
    let server = RedisServer::start();
    let other = on(Limiter::builder().concurrency(jobs(1)).store(redis(&server)));
    let permit = {
        let jobs = on(Limiter::builder().concurrency(jobs(1)).store(redis(&server)));
        jobs.acquire("a").await.unwrap()
    };
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        assert!(is_denied(&other.acquire("a").await), "after {:?}", begin.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(permit);
    let begin = Instant::now();
    until("it is back", async || other.acquire("a").await.is_ok()).await;
    assert!(begin.elapsed() < RETURNED);
}

#[tokio::test]
async fn store_that_is_away_makes_few_callers_wait_and_the_policy_decides() {
    let cases = [(OutagePolicy::Share, 3), (OutagePolicy::Open, 40), (OutagePolicy::Closed, 0)];
    for (policy, expected) in cases {
        let clock = ManualClock::new();
        let (store, events) = (ScriptedStore::new(&clock), Events::default());
        let builder = Limiter::builder()
            .concurrency(Concurrency::new("jobs", 12).outage(policy))
            .store(store.clone())
            .clock(&clock)
            .max_nodes(4)
            .listen(events.listener());
        let limiter = builder.build().unwrap();
        let jobs = limiter.concurrency("jobs").unwrap();
        drop(jobs.acquire("a").await.unwrap());
        limiter.settle().await;
        store.set_away(true);
        clock.advance(Duration::from_secs(3));
        for attempt in 0..50 {
            let passes = async {
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                    clock.advance(Duration::from_millis(6));
                }
            };
            let (outcome, ()) = tokio::join!(jobs.acquire("a"), passes);
            assert!(
                attempt > 25 || outcome.is_err(),
                "{policy:?}: the store may be back any moment"
            );
        }
        let questions = store.questions();
        // The clock stands still: whoever waited for time to pass would wait for ever.
        let mut held = Vec::new();
        for _ in 0..40 {
            held.extend(jobs.acquire("a").await.ok());
        }
        assert_eq!(held.len(), expected, "{policy:?}");
        let more = store.questions() - questions;
        assert!(more <= 5, "{policy:?}: {more} messages");
        assert_eq!(events.count(began), 1, "{policy:?}");
        store.set_away(false);
        drop(held);
        clock.advance(Duration::from_secs(1));
        limiter.settle().await;
        assert!(jobs.acquire_n("a", 12).await.is_ok(), "{policy:?}");
        assert_eq!(events.count(ended), 1, "{policy:?}");
    }
}

#[tokio::test]
async fn another_programs_value_is_named_and_kept_and_other_keys_go_on() {
    let server = RedisServer::start();
    let events = Events::default();
    let limit = jobs(1).max_wait(Duration::from_millis(200));
    let builder = Limiter::builder().concurrency(limit).store(redis(&server));
    let jobs = on(builder.listen(events.listener()));
    drop(jobs.acquire("ours").await.unwrap());
    let name = "tg2:{tidegate/cc:jobs:their key}";
    server.command(&["SET", name, "a value"]);
    let error = jobs.acquire("their key").await.map(drop).unwrap_err();
    assert_eq!(error, AcquireError::StoreAway { limit: "jobs".into() });
    assert_eq!(server.command(&["GET", name]), "a value");
    assert!(jobs.acquire("ours").await.is_ok());
    let foreign = |event: &Event| matches!(event, Event::ForeignKey { error } if error.to_string().contains(name));
    assert_eq!(events.count(foreign), 1);
}

#[tokio::test]
async fn record_of_permits_expires_after_the_lease_and_takes_the_memory_that_redis_md_states() {
    let server = RedisServer::start();
    let jobs = on(Limiter::builder().concurrency(jobs(100)).store(redis(&server)));
    let permits = jobs.acquire_n("a-key-of-20-bytes---", 50).await.unwrap();
    let name = "tg2:{tidegate/cc:jobs:a-key-of-20-bytes---}";
    let left: u64 = server.command(&["PTTL", name]).parse().unwrap();
    assert!((1000..=2003).contains(&left), "{left} ms");
    let bytes: u32 = server.command(&["MEMORY", "USAGE", name]).parse().unwrap();
    println!("{bytes} bytes");
    assert!(bytes <= 220, "{bytes} bytes");
    drop(permits);
    until("it is forgotten", async || server.command(&["EXISTS", name]) == "0").await;
}

#[tokio::test]
async fn permits_in_use_waiting_callers_and_denials_are_told_each_second() {
    let clock = ManualClock::new();
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = told.clone();
    let builder = Limiter::builder().concurrency(jobs(2)).clock(&clock).listen(move |event| {
        if let Event::Permits { limit, in_use, waiting, denied } = event {
            listener.lock().unwrap().push((limit.to_string(), *in_use, *waiting, *denied));
        }
    });
    let limiter = builder.build().unwrap();
    let jobs = limiter.concurrency("jobs").unwrap();
    let held = jobs.acquire_n("a", 2).await.unwrap();
    for _ in 0..3 {
        assert!(is_denied(&jobs.acquire("a").await));
    }
    let waiting = tokio::spawn({
        let jobs = jobs.clone();
        async move { jobs.acquire_within("a", LONG).await.map(drop) }
    });
    until("it waits", async || jobs.waiting() == 1).await;
    clock.advance(Duration::from_secs(1));
    limiter.settle().await;
    drop(held);
    waiting.await.unwrap().unwrap();
    clock.advance(Duration::from_secs(1));
    limiter.settle().await;
    let told = told.lock().unwrap();
    assert_eq!(*told, [("jobs".to_owned(), 2, 1, 3), ("jobs".to_owned(), 0, 0, 0)]);
}

#[tokio::test]
async fn scripted_faults_leak_no_permit() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let nodes = [1, 2].map(|_| scripted(jobs(2), &clock, &store));
    let limits = nodes.each_ref().map(|node| node.concurrency("jobs").unwrap());
    for round in 0..60 {
        let fault = [Fault::RequestLost, Fault::ReplyLost, Fault::Duplicated][round % 3];
        store.fail(fault);
        let asked = tokio::spawn({
            let jobs = limits[round % 2].clone();
            async move { jobs.acquire_within("a", LONG).await }
        });
        until("it is decided", async || {
            clock.advance(Duration::from_millis(50));
            tokio::task::yield_now().await;
            asked.is_finished()
        })
        .await;
        let permit = asked.await.unwrap().unwrap();
        let left = limits[(round + 1) % 2].acquire_n("a", 2).await;
        assert!(left.is_err(), "one of two is in use");
        drop(permit);
        clock.advance(Duration::from_secs(1));
        nodes[0].settle().await;
        nodes[1].settle().await;
    }
    assert!(limits[0].acquire_n("a", 2).await.is_ok());
}
