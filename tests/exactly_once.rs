//! Every token spent is charged once, to the key that it was spent for, on a real Redis behind a wire that breaks on purpose.
//!
//! `cargo test --test exactly_once -- --nocapture` prints what was cut, doubled, spent and charged.
#![cfg(feature = "redis")]
#![allow(
    clippy::disallowed_methods,
    reason = "the load and its deadline are real time: the wire and the server are real too"
)]

mod parts;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use parts::{Counts, Fault, Proxy, RedisServer, charged_to};
use tidegate::{Event, Limit, Limiter, Quota, RedisStore, Reservation};
use tokio::task::JoinSet;

/// Nodes, two behind each proxy.
const NODES: usize = 4;
const PROXIES: usize = 2;
const KEYS: usize = 20;
/// Few, so that each has keys and no batch is a bare heartbeat.
const LANES: u32 = 4;
const SYNC_INTERVAL: Duration = Duration::from_millis(10);
const STORE_TIMEOUT: Duration = Duration::from_millis(60);
/// Between two rounds of requests.
const ROUND: Duration = Duration::from_millis(1);
/// Requests that each node decides a round.
const REQUESTS_A_ROUND: usize = 6;
const DEADLINE: Duration = Duration::from_secs(60);
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(30);

/// What must have happened to batches before the load ends.
const BATCHES_MIN: u64 = 200;
const CUT_MIN: u64 = 100;
const DUPLICATED_MIN: u64 = 20;
const DELAYED_MIN: u64 = 10;
const DROPPED_MIN: u64 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_charged_are_tokens_spent_when_half_the_replies_are_cut_and_some_batches_arrive_twice()
 {
    spend_over_a_breaking_wire(Quota::per_second(50_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_spent_on_credit_while_there_are_none_are_charged_once_too() {
    spend_over_a_breaking_wire(Quota::per_second(100).burst(50)).await;
}

/// Three limits that a request is to fit, and tokens a second of each.
const THREE: [(&str, u64); 3] = [("a", 4000), ("b", 3000), ("c", 2000)];
/// Tokens that must have been used of the last of them.
const USED_MIN: u64 = 500;

/// Tokens by limit.
type Tokens = BTreeMap<&'static str, u64>;

/// Requests that fit all of several limits or are charged to none, and reservations that are settled later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_and_reservations_are_charged_once_for_what_they_used_over_a_breaking_wire() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let kept: Arc<Mutex<BTreeMap<String, u64>>> = Arc::default();
    let nodes: Vec<Limiter> = (0..NODES).map(|_| start_with_three(&proxy, &kept)).collect();
    for node in &nodes {
        node.ready(DEADLINE).await.expect("nothing is broken yet");
    }
    proxy.set_policy(|index| fault(1, index));
    let mut load = SettledLoad::new(&nodes);
    let (deadline, mut rounds) = (Instant::now() + DEADLINE, tokio::time::interval(ROUND));
    while !(enough(proxy.counts()) && load.denied > 100 && load.used["c"] > USED_MIN) {
        assert!(Instant::now() < deadline, "not enough happened: {:?}", proxy.counts());
        rounds.tick().await;
        load.decide_by_groups();
        load.reserve_and_settle().await;
    }
    let SettledLoad { used, denied, open, .. } = load;
    drop(open);
    shut_down(&nodes).await;
    let kept = kept.lock().expect("nothing panics").clone();
    for (name, used) in used {
        let charged: u64 = charged_to(&server, name).values().sum();
        let kept = kept.get(name).copied().unwrap_or_default();
        println!("{name}: charged {charged}, used {used}, not given back {kept}; {denied} denied");
        assert_eq!(charged, used + kept, "{name}");
    }
}

/// A node with three limits. What is not given back is added to `kept`.
fn start_with_three(proxy: &Proxy, kept: &Arc<Mutex<BTreeMap<String, u64>>>) -> Limiter {
    let store = RedisStore::open(&proxy.url()).expect("a good address").timeout(STORE_TIMEOUT);
    let kept = kept.clone();
    let limits = THREE.map(|(name, rate)| {
        Limit::new(name, Quota::per_second(rate).burst(rate / 10)).sync_interval(SYNC_INTERVAL)
    });
    let builder = limits.into_iter().fold(Limiter::builder(), tidegate::Builder::limit);
    let listener = move |event: &Event| {
        if let Event::NotGivenBack { limit, tokens } = event {
            let mut kept = kept.lock().expect("nothing panics");
            *kept.entry(limit.to_string()).or_default() += u64::from(*tokens);
        }
    };
    builder.lanes(LANES).store(store).listen(listener).build().expect("a good configuration")
}

/// Decisions by groups of limits, and reservations.
struct SettledLoad<'a> {
    nodes: &'a [Limiter],
    draw: fastrand::Rng,
    open: Vec<(&'static str, Reservation)>,
    used: Tokens,
    denied: u64,
}

impl<'a> SettledLoad<'a> {
    fn new(nodes: &'a [Limiter]) -> Self {
        let (draw, used) = (fastrand::Rng::with_seed(3), THREE.map(|(name, _)| (name, 0)).into());
        Self { nodes, draw, open: Vec::new(), used, denied: 0 }
    }

    fn decide_by_groups(&mut self) {
        for node in self.nodes {
            let group = node.group(THREE.map(|(name, _)| name)).expect("the limits are there");
            let key = format!("user:{}", self.draw.usize(0..3));
            for _ in 0..4 {
                let cost = self.draw.u32(1..=3);
                if group.check_n(&key, cost).expect("a good cost").is_denied() {
                    self.denied += 1;
                    continue;
                }
                for used in self.used.values_mut() {
                    *used += u64::from(cost);
                }
            }
        }
    }

    /// Reserves some tokens of one limit, and settles some of what was reserved before: less or more than the estimate.
    async fn reserve_and_settle(&mut self) {
        let (name, _) = THREE[self.draw.usize(0..THREE.len())];
        let node = &self.nodes[self.draw.usize(0..NODES)];
        let limit = node.limit(name).expect("the limit is there");
        if let Ok(reservation) = limit.reserve("user:0", self.draw.u32(1..=40)).await {
            self.open.push((name, reservation));
        }
        while self.open.len() > self.draw.usize(0..8) {
            let (name, reservation) = self.open.swap_remove(self.draw.usize(0..self.open.len()));
            let actual = self.draw.u32(0..=reservation.estimate() + 10);
            reservation.commit(actual);
            *self.used.entry(name).or_default() += u64::from(actual);
        }
    }
}

async fn spend_over_a_breaking_wire(quota: Quota) {
    let server = RedisServer::start();
    let mut proxies = Vec::new();
    for _ in 0..PROXIES {
        proxies.push(Proxy::start(server.port()).await);
    }
    let synced = Arc::new(Synced::default());
    let nodes: Vec<Limiter> =
        (0..NODES).map(|node| start(&proxies[node % PROXIES], quota, &synced)).collect();
    for node in &nodes {
        node.ready(DEADLINE).await.expect("nothing is broken yet");
    }
    let mut load = Load::new(&nodes);
    load.run_until(|| synced.with_keys.load(Ordering::Relaxed) > 0).await;

    let before = total(&proxies);
    synced.with_keys.store(0, Ordering::Relaxed);
    synced.without_keys.store(0, Ordering::Relaxed);
    for (seed, proxy) in (1..).zip(&proxies) {
        proxy.set_policy(move |index| fault(seed, index));
    }
    load.run_until(|| enough(since(before, total(&proxies)))).await;
    let seen = since(before, total(&proxies));
    // On a machine that is busy with something else a lane may be idle for the second after which its
    // node shows that it lives, with a batch that carries nothing.
    let [with, without] =
        [&synced.with_keys, &synced.without_keys].map(|count| count.load(Ordering::Relaxed));
    assert!(10 * without <= with, "{with} batches carried keys, {without} none");

    // The wire stays as bad as it was: leaving is part of the promise.
    shut_down(&nodes).await;
    let charged = charged_to(&server, "api");
    println!(
        "batches {}, replies cut {}, arrived twice {}, spent {}, charged {}",
        batches(seen),
        seen.cut,
        seen.duplicated,
        load.spent.values().sum::<u64>(),
        charged.values().sum::<u64>(),
    );
    assert_eq!(load.spent.len(), KEYS, "each key is spent for");
    assert_eq!(charged, load.spent, "tokens charged in Redis and tokens spent, by key; {seen:?}");
}

/// Batches acknowledged or failed, by whether they carried keys.
#[derive(Default)]
struct Synced {
    with_keys: AtomicU64,
    without_keys: AtomicU64,
}

fn start(proxy: &Proxy, quota: Quota, synced: &Arc<Synced>) -> Limiter {
    let store = RedisStore::open(&proxy.url()).expect("a good address").timeout(STORE_TIMEOUT);
    let synced = synced.clone();
    Limiter::builder()
        .limit(Limit::new("api", quota).sync_interval(SYNC_INTERVAL))
        .lanes(LANES)
        .store(store)
        .listen(move |event| {
            if let Event::Synced { keys, .. } = event {
                let count = if *keys > 0 { &synced.with_keys } else { &synced.without_keys };
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
        .build()
        .expect("a good configuration")
}

/// Half of the replies are cut, a tenth of the batches arrive twice, some are late or mute.
///
/// Drawn from the index, not in turn: lanes that resend side by side would fall into step with it.
fn fault(seed: u64, index: u64) -> Fault {
    match fastrand::Rng::with_seed(seed << 32 | index).u32(0..100) {
        0..50 => Fault::CutReply,
        50..60 => Fault::Duplicate,
        60..64 => Fault::Delay(STORE_TIMEOUT / 3),
        // Beyond the timeout: the node has resent by then.
        64..66 => Fault::Delay(STORE_TIMEOUT * 2),
        66..68 => Fault::LateRequest(STORE_TIMEOUT * 2),
        68..70 => Fault::DropReply,
        _ => Fault::Pass,
    }
}

/// Requests with keys and costs from a seed, on all nodes alike.
struct Load<'a> {
    nodes: &'a [Limiter],
    draw: fastrand::Rng,
    keys: Vec<String>,
    /// Tokens by key.
    spent: BTreeMap<String, u64>,
}

impl<'a> Load<'a> {
    fn new(nodes: &'a [Limiter]) -> Self {
        let keys = (0..KEYS).map(|key| format!("user:{key}")).collect();
        Self { nodes, draw: fastrand::Rng::with_seed(7), keys, spent: BTreeMap::new() }
    }

    async fn run_until(&mut self, done: impl Fn() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        let mut rounds = tokio::time::interval(ROUND);
        while !done() {
            assert!(Instant::now() < deadline, "not enough happened within {DEADLINE:?}");
            rounds.tick().await;
            self.round();
        }
    }

    fn round(&mut self) {
        for node in self.nodes {
            let api = node.limit("api").expect("the limit is there");
            for _ in 0..REQUESTS_A_ROUND {
                let key = &self.keys[self.draw.usize(0..KEYS)];
                let cost = self.draw.u32(1..=3);
                let decision = api.check_n(key, cost).expect("a good key and cost");
                if decision.is_allowed() {
                    *self.spent.entry(key.clone()).or_default() += u64::from(cost);
                }
            }
        }
    }
}

async fn shut_down(nodes: &[Limiter]) {
    let mut leaving = JoinSet::new();
    for node in nodes {
        let node = node.clone();
        leaving.spawn(async move { node.shutdown(SHUTDOWN_DEADLINE).await });
    }
    while let Some(left) = leaving.join_next().await {
        left.expect("no panic").expect("a bad wire delays the end and does not prevent it");
    }
}

fn batches(counts: Counts) -> u64 {
    counts.passed + counts.cut + counts.dropped + counts.duplicated + counts.delayed
}

fn enough(counts: Counts) -> bool {
    batches(counts) >= BATCHES_MIN
        && counts.cut >= CUT_MIN
        && counts.duplicated >= DUPLICATED_MIN
        && counts.delayed >= DELAYED_MIN
        && counts.dropped >= DROPPED_MIN
}

fn total(proxies: &[Proxy]) -> Counts {
    proxies.iter().map(Proxy::counts).fold(Counts::default(), |sum, counts| Counts {
        passed: sum.passed + counts.passed,
        cut: sum.cut + counts.cut,
        dropped: sum.dropped + counts.dropped,
        duplicated: sum.duplicated + counts.duplicated,
        delayed: sum.delayed + counts.delayed,
    })
}

fn since(before: Counts, now: Counts) -> Counts {
    Counts {
        passed: now.passed - before.passed,
        cut: now.cut - before.cut,
        dropped: now.dropped - before.dropped,
        duplicated: now.duplicated - before.duplicated,
        delayed: now.delayed - before.delayed,
    }
}
