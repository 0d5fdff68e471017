//! Three limits of a key at once, under threads of several nodes: each is charged for what all three allowed, and for nothing
//! else.
//!
//! `cargo test --features testing --test tiers -- --nocapture` prints what was asked, denied, used and charged.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(
    clippy::disallowed_methods,
    reason = "the load and its deadline are real time: so are the threads"
)]

mod parts;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tidegate::{ActiveLimit, AnyStore, Event, Group, Limit, Limiter, MemoryStore, Quota};
use tokio::runtime::Runtime;

const NODES: usize = 4;
const THREADS: usize = 2;
const KEYS: usize = 12;
const TIERS: usize = 3;
const NAMES: [&str; TIERS] = ["second", "minute", "hour"];
/// Both threads of a node begin a round at the same time, so that they meet at the same keys.
const REQUESTS_A_ROUND: usize = 256;
const PAUSE: Duration = Duration::from_millis(3);
/// What must have happened before the load ends.
const REQUESTS_MIN: u64 = 50_000;
const DENIED_BY_EACH_MIN: f64 = 0.2;
const LOAD_MIN: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(60);

/// Tokens by key and tier.
type Tokens = [[u64; TIERS]; KEYS];

#[test]
fn three_tiers_on_memory_are_charged_for_what_all_of_them_allowed() {
    let store = MemoryStore::new();
    let charged = |tier: &str, key: &str| store.charged(tier, key);
    spend_and_compare("memory", || store.clone().into(), charged);
}

#[cfg(feature = "redis")]
#[test]
fn three_tiers_on_redis_are_charged_for_what_all_of_them_allowed() {
    let server = parts::RedisServer::start();
    let store = || tidegate::RedisStore::open(&server.url()).unwrap().into();
    // Read when the nodes have left.
    let all = std::cell::OnceCell::new();
    let charged = |tier: &str, key: &str| {
        let all = all.get_or_init(|| NAMES.map(|name| parts::charged_to(&server, name)));
        all[tier_of(tier)].get(key).copied().unwrap_or_default()
    };
    spend_and_compare("redis", store, charged);
}

fn spend_and_compare(
    name: &str,
    store: impl Fn() -> AnyStore,
    charged_of: impl Fn(&str, &str) -> u64,
) {
    let (runtime, seen) = (Runtime::new().unwrap(), Arc::new(Seen::default()));
    let nodes: Vec<Limiter> = (0..NODES).map(|_| start(store(), &seen)).collect();
    for node in &nodes {
        runtime.block_on(node.ready(DEADLINE)).unwrap();
    }
    let used = run_load(&nodes, &seen);
    for node in &nodes {
        runtime.block_on(node.shutdown(DEADLINE)).unwrap();
    }
    let (mut lines, mut wrong) = (Vec::new(), Vec::new());
    for (tier, tier_name) in NAMES.into_iter().enumerate() {
        let not_given_back = seen.not_given_back[tier].load(Ordering::Relaxed);
        let (mut all_used, mut all_charged) = (0, 0);
        for (key, used) in used.iter().enumerate() {
            let (key, used) = (key_name(key), used[tier]);
            let charged = charged_of(tier_name, &key);
            (all_used, all_charged) = (all_used + used, all_charged + charged);
            if !(used..=used + not_given_back).contains(&charged) {
                wrong.push(format!("{tier_name} of {key}: {charged} charged, {used} used"));
            }
        }
        let denied = 100.0 * seen.denied_by(tier);
        lines.push(format!(
            "{tier_name} denied {denied:.1}%, {all_charged} charged, {all_used} used, {not_given_back} not given back"
        ));
        if all_charged != all_used + not_given_back {
            wrong.push(format!("{tier_name}: {all_charged} charged, {all_used} used, {not_given_back} not given back"));
        }
    }
    let requests = seen.requests.load(Ordering::Relaxed);
    println!("{name}: {requests} requests of three tiers; {}", lines.join("; "));
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
}

/// What happened so far.
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    denied: [AtomicU64; TIERS],
    /// Tokens that nodes told were not given back.
    not_given_back: [AtomicU64; TIERS],
}

impl Seen {
    fn denied_by(&self, tier: usize) -> f64 {
        let [denied, all] =
            [&self.denied[tier], &self.requests].map(|count| count.load(Ordering::Relaxed));
        denied as f64 / all.max(1) as f64
    }

    fn is_enough(&self) -> bool {
        self.requests.load(Ordering::Relaxed) >= REQUESTS_MIN
            && (0..TIERS).all(|tier| self.denied_by(tier) >= DENIED_BY_EACH_MIN)
    }
}

fn tier_of(name: &str) -> usize {
    NAMES.iter().position(|tier| *tier == name).unwrap()
}

fn key_name(key: usize) -> String {
    format!("user:{key}")
}

fn start(store: AnyStore, seen: &Arc<Seen>) -> Limiter {
    let seen = seen.clone();
    let builder = [
        Limit::new(NAMES[0], Quota::per_second(200)),
        Limit::new(NAMES[1], Quota::per_minute(60).burst(2000)),
        Limit::new(NAMES[2], Quota::per_hour(360).burst(3000)),
    ]
    .map(|limit| limit.sync_interval(Duration::from_millis(10)))
    .into_iter()
    .fold(Limiter::builder(), tidegate::Builder::limit);
    let builder = builder.store(store).lanes(4).max_nodes(NODES as u32);
    let listener = move |event: &Event| {
        if let Event::NotGivenBack { limit, tokens } = event {
            seen.not_given_back[tier_of(limit)].fetch_add((*tokens).into(), Ordering::Relaxed);
        }
    };
    builder.listen(listener).build().unwrap()
}

/// Runs all threads until enough was asked and denied. Returns what was allowed.
fn run_load(nodes: &[Limiter], seen: &Seen) -> Tokens {
    let (begin, stop) = (Instant::now(), AtomicBool::new(false));
    let stop = &stop;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, node) in nodes.iter().enumerate() {
            let meeting = Arc::new(Meeting::default());
            for thread in 0..THREADS {
                let seed = (index * THREADS + thread) as u64;
                let mut load = Load::new(node, seed, seen);
                let meeting = meeting.clone();
                threads.push(scope.spawn(move || {
                    while !meeting.is_over(stop) {
                        load.round();
                        std::thread::sleep(PAUSE);
                    }
                    load.used
                }));
            }
        }
        while begin.elapsed() < LOAD_MIN || !seen.is_enough() && begin.elapsed() < DEADLINE {
            std::thread::sleep(PAUSE);
        }
        stop.store(true, Ordering::Relaxed);
        let mut all = Tokens::default();
        for thread in threads {
            for (sum, used) in all.iter_mut().zip(thread.join().unwrap()) {
                sum.iter_mut().zip(used).for_each(|(sum, used)| *sum += used);
            }
        }
        let denied: Vec<f64> = (0..TIERS).map(|tier| seen.denied_by(tier)).collect();
        assert!(seen.is_enough(), "denied by {denied:?} of {:?}", seen.requests);
        all
    })
}

/// Where the threads of a node wait for each other.
struct Meeting {
    all: Barrier,
    is_over: AtomicBool,
}

impl Default for Meeting {
    fn default() -> Self {
        Self { all: Barrier::new(THREADS), is_over: AtomicBool::new(false) }
    }
}

impl Meeting {
    /// Says the same to all of them.
    fn is_over(&self, stop: &AtomicBool) -> bool {
        if self.all.wait().is_leader() {
            self.is_over.store(stop.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.all.wait();
        self.is_over.load(Ordering::Relaxed)
    }
}

/// The requests of one thread.
struct Load<'a> {
    group: Group,
    limits: Vec<ActiveLimit>,
    keys: Vec<String>,
    runtime: Runtime,
    draw: fastrand::Rng,
    seen: &'a Seen,
    used: Tokens,
}

impl<'a> Load<'a> {
    fn new(node: &Limiter, seed: u64, seen: &'a Seen) -> Self {
        let group = node.group(NAMES).unwrap();
        Self {
            limits: group.limits().to_vec(),
            group,
            keys: (0..KEYS).map(key_name).collect(),
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            draw: fastrand::Rng::with_seed(seed),
            seen,
            used: Tokens::default(),
        }
    }

    fn round(&mut self) {
        for index in 0..REQUESTS_A_ROUND {
            let key = self.draw.usize(..KEYS);
            // Of key k the tier k % 3 is used up by requests of it alone.
            let scarce = key % TIERS;
            if scarce > 0 && self.draw.u8(..8) == 0 {
                self.ask_one(key, scarce);
            } else {
                self.ask_all(key, index == 0);
            }
        }
    }

    fn ask_one(&mut self, key: usize, tier: usize) {
        let cost = self.draw.u32(1..40);
        let decision = self.limits[tier].check_n(&self.keys[key], cost).unwrap();
        if decision.is_allowed() {
            self.used[key][tier] += u64::from(cost);
        }
    }

    fn ask_all(&mut self, key: usize, is_sure: bool) {
        let (cost, name) = (self.draw.u32(1..=3), &self.keys[key]);
        let decision = if is_sure {
            self.runtime.block_on(self.group.check_sure_n(name, cost)).unwrap()
        } else {
            self.group.check_n(name, cost).unwrap()
        };
        self.seen.requests.fetch_add(1, Ordering::Relaxed);
        if decision.is_allowed() {
            self.used[key].iter_mut().for_each(|used| *used += u64::from(cost));
        } else {
            let tier = tier_of(decision.limit_name());
            self.seen.denied[tier].fetch_add(1, Ordering::Relaxed);
        }
    }
}
