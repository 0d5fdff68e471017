//! What a call of the sync script takes of Redis, beside the script of wire version 1.
//!
//! ```text
//! cargo bench --bench script_cost -- [--quick]
//! ```
//!
//! Both run at the same time on one redis-server: limiters of this crate with one lane each, by their
//! public interface, so that the batches are what nodes send; and nodes of version 1, frozen in
//! `benches/sync/baseline`, which call for as many keys. The server is kept busy with a script that does
//! nothing. Its slow log tells what each call took. Each case has three rounds, of which the one with
//! the middle ratio is shown. The exit status is 1 when the ratio of typical calls is above 1.1.
//!
//! | case | the calls that count | typical |
//! |---|---|---|
//! | steady | keys that are asked for at twice their rate, synced every 10 ms or less often | the median |
//! | first | keys that were never asked for before, with one request each | the lower quartile |
//!
//! The mean leaves out the longest hundredth, and depends on what else the machine does.
//! `--quick` has one short round.
#![allow(clippy::disallowed_methods, reason = "limiters and servers are real, and so is time")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use tidegate::{ActiveLimit, Limit, Limiter, Quota, RedisStore};

#[path = "sync/baseline/node.rs"]
mod baseline;
#[path = "../tests/parts/redis_server.rs"]
mod redis_server;
#[path = "script_cost/slow_log.rs"]
mod slow_log;

use baseline::{Node, Terms};
use redis_server::RedisServer;
use slow_log::{Call, SlowLog};

const RATIO_MOST: f64 = 1.1;
const KEYS: [usize; 3] = [1, 16, 128];
/// Limiters, and as many frozen nodes.
const NODES: usize = 4;
const RATE: u32 = 100;
const BURST: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(10);
/// Of the frozen nodes' leases, as a node with this interval had them.
const EPOCH_US: i64 = 1_000_000;
/// Between two rounds of requests: each key is asked for at twice its rate.
const ROUND: Duration = Duration::from_millis(5);
/// Between two sets of new keys of one node. Four times a second a call also says that its node lives,
/// which takes longer: at this pace less than half of the calls on either side, and the lower quartile
/// shows the others.
const FRESH: Duration = Duration::from_millis(100);
/// Parts of the namespaces' names, by which the calls are told apart.
const NEW: &str = "-new-";
const OLD: &str = "-old-";
const RUN_UP: Duration = Duration::from_secs(2);
/// Calls that do nothing, sent together.
const NOTHINGS: usize = 50;
const READY_WITHIN: Duration = Duration::from_secs(10);
/// Part of the calls that is left out, the longest ones.
const OUTLIERS: usize = 100;
const CALLS_LEAST: usize = 50;
const ROUNDS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Steady,
    First,
}

/// The limiters and the frozen nodes of a case.
struct Sides {
    limits: Vec<ActiveLimit>,
    limiters: Vec<Limiter>,
    nodes: Vec<Node>,
    hash: String,
    connection: MultiplexedConnection,
    runtime: tokio::runtime::Handle,
}

impl Sides {
    fn start(server: &RedisServer, runtime: &tokio::runtime::Runtime, case: &str) -> Self {
        let _entered = runtime.enter();
        let mut limiters = Vec::new();
        for number in 0..NODES {
            let store = RedisStore::open(&server.url()).expect("a good address");
            let store = store.namespace(&format!("{case}{NEW}{number}")).expect("a good name");
            let quota = Quota::per_second(RATE.into()).burst(BURST.into());
            let limiter = Limiter::builder()
                .limit(Limit::new("api", quota).sync_interval(INTERVAL))
                .lanes(1)
                .store(store)
                .build()
                .expect("a good configuration");
            runtime.block_on(limiter.ready(READY_WITHIN)).expect("the server runs");
            limiters.push(limiter);
        }
        let limits = limiters.iter().map(|one| one.limit("api").expect("it is there")).collect();
        let terms = Terms { rate: RATE.into(), burst: BURST.into(), epoch_us: EPOCH_US };
        let node = |number| Node::new(terms, &format!("{case}{OLD}{number}"), number as u8 + 1);
        let client = redis::Client::open(server.url()).expect("a good address");
        // As the limiters have one, so that both sides' calls reach the server in the same way.
        let connection = runtime.block_on(client.get_multiplexed_async_connection());
        let mut connection = connection.expect("the server runs");
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(baseline::SCRIPT);
        let load = runtime.block_on(load.query_async(&mut connection));
        Self {
            limits,
            limiters,
            nodes: (0..NODES).map(node).collect(),
            hash: load.expect("the frozen script loads"),
            connection,
            runtime: runtime.handle().clone(),
        }
    }

    fn call_old(&mut self, number: usize, keys: &[String], kind: Kind) {
        let node = &mut self.nodes[number];
        let (names, arguments) = match kind {
            Kind::Steady => node.steady(keys),
            Kind::First => node.first(keys),
        };
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.hash).arg(names.len()).arg(names).arg(arguments);
        let reply = self.runtime.block_on(call.query_async::<Vec<u8>>(&mut self.connection));
        let reply = reply.expect("the frozen script answers");
        self.nodes[number].hear(&reply);
    }

    fn ask(&self, number: usize, keys: &[String]) {
        for key in keys {
            let _ = self.limits[number].check(key);
        }
    }

    /// Keys in use on both sides, for so long.
    fn steady(&mut self, keys: usize, time: Duration) {
        let names: Vec<String> = (0..keys).map(|key| format!("user:{key:015}")).collect();
        let (start, mut round) = (Instant::now(), 0_u32);
        while start.elapsed() < time {
            for number in 0..NODES {
                self.ask(number, &names);
            }
            // Every second round, as each key is synced once in two.
            let number = round as usize % 2;
            for number in (number..NODES).step_by(2) {
                self.call_old(number, &names, Kind::Steady);
            }
            round += 1;
            sleep_until(start + ROUND * round);
        }
    }

    /// New keys on both sides, a set at a time.
    fn first(&mut self, keys: usize, time: Duration) {
        let (start, mut set) = (Instant::now(), 0_u32);
        let gap = FRESH / NODES as u32;
        while start.elapsed() < time {
            let number = set as usize % NODES;
            let names: Vec<String> =
                (0..keys).map(|key| format!("set:{set:06}:{key:08}")).collect();
            self.ask(number, &names);
            sleep_until(start + gap * set + gap / 2);
            self.call_old(number, &names, Kind::First);
            set += 1;
            sleep_until(start + gap * set);
        }
    }
}

fn sleep_until(instant: Instant) {
    std::thread::sleep(instant.saturating_duration_since(Instant::now()));
}

/// Of one side's calls.
#[derive(Clone, Copy, Debug)]
struct Cost {
    calls: usize,
    mean_us: f64,
    typical_us: f64,
}

/// Of calls with about as many entries as the case has: microseconds a key. `typical` is the part of the
/// calls that took less than the one shown.
fn cost(calls: &[Call], keys: usize, typical: f64) -> Option<Cost> {
    let fits = |entries: usize| entries <= keys && 10 * entries >= 9 * keys;
    let fitting = calls.iter().filter(|call| fits(call.entries));
    let mut per_key: Vec<f64> =
        fitting.map(|call| call.took_us as f64 / call.entries as f64).collect();
    per_key.sort_by(f64::total_cmp);
    per_key.truncate(per_key.len() - per_key.len() / OUTLIERS);
    let calls = per_key.len();
    (calls >= CALLS_LEAST).then(|| Cost {
        calls,
        mean_us: per_key.iter().sum::<f64>() / calls as f64,
        typical_us: per_key[(typical * calls as f64) as usize],
    })
}

/// Calls that brought new keys only: of each set the ones before all its keys have come once.
fn first_calls(calls: &[Call], keys: usize) -> Vec<Call> {
    let mut come: BTreeMap<String, usize> = BTreeMap::new();
    let mut first = Vec::new();
    for call in calls {
        let Some(set) = call.set() else { continue };
        let come = come.entry(set).or_default();
        *come += call.entries;
        if *come <= keys {
            first.push(call.clone());
        }
    }
    first
}

/// Keeps the server busy with a script that does nothing, until the value goes: calls that come after
/// a rest would measure the processor's caches and sleep.
struct Busy {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start(server: &RedisServer) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let client = redis::Client::open(server.url()).expect("a good address");
        // Two, so that the server has work of the one while the other reads its replies.
        let threads = (0..2).map(|_| {
            let (client, over) = (client.clone(), over.clone());
            std::thread::spawn(move || do_nothing(&client, &over))
        });
        Self { over: over.clone(), threads: threads.collect() }
    }
}

fn do_nothing(client: &redis::Client, over: &AtomicBool) {
    let mut connection = client.get_connection().expect("the server runs");
    let load = redis::cmd("SCRIPT").arg("LOAD").arg("return 0").query(&mut connection);
    let hash: String = load.expect("it loads");
    let mut calls = redis::pipe();
    for _ in 0..NOTHINGS {
        calls.cmd("EVALSHA").arg(&hash).arg(0).ignore();
    }
    while !over.load(Ordering::Relaxed) {
        calls.exec(&mut connection).expect("they are answered");
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that has failed has said why.
            let _ = thread.join();
        }
    }
}

/// What both sides' calls took in the same time.
struct Round {
    new: Cost,
    old: Cost,
}

impl Round {
    fn typical_ratio(&self) -> f64 {
        self.new.typical_us / self.old.typical_us
    }
}

/// `None` where there were too few calls with so many keys.
fn measure(server: &RedisServer, kind: Kind, keys: usize, seconds: u64) -> Option<Round> {
    let time = Duration::from_secs(seconds);
    server.command(&["FLUSHALL"]);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let case = format!("{kind:?}-{keys}");
    let mut sides = Sides::start(server, &runtime, &case);
    let mut log = SlowLog::open(server);
    let busy = Busy::start(server);
    match kind {
        Kind::Steady => {
            sides.steady(keys, RUN_UP);
            log.reset();
            sides.steady(keys, time);
        }
        Kind::First => {
            // The lanes have recovered from their birth by then, and the limiters' clocks settled.
            std::thread::sleep(RUN_UP);
            log.reset();
            sides.first(keys, time);
        }
    }
    drop(busy);
    let (old, new): (Vec<Call>, Vec<Call>) =
        log.calls().into_iter().partition(|call| call.is_of(OLD));
    for limiter in &sides.limiters {
        // The server is gone before their leases would matter.
        let _ = runtime.block_on(limiter.shutdown(READY_WITHIN));
    }
    let [new, old] = [new, old].map(|calls| match kind {
        Kind::Steady => cost(&calls, keys, 0.5),
        Kind::First => cost(&first_calls(&calls, keys), keys, 0.25),
    });
    Some(Round { new: new?, old: old? })
}

fn main() -> ExitCode {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let server = RedisServer::start();
    println!(
        "{:<8} {:>11}  {:>10} {:>10} {:>7}  {:>10} {:>10} {:>7}  {:>6} {:>6}",
        "case", "keys a call", "us a key", "v1", "ratio", "typical", "v1", "ratio", "calls", "v1"
    );
    let mut worst = 0.0_f64;
    for kind in [Kind::Steady, Kind::First] {
        for keys in KEYS {
            let seconds = match (kind, quick) {
                (Kind::Steady, false) => 10,
                (Kind::First, false) => 20,
                (Kind::Steady, true) => 3,
                (Kind::First, true) => 4,
            };
            let rounds = if quick { 1 } else { ROUNDS };
            let measured = (0..rounds).map(|_| measure(&server, kind, keys, seconds));
            let mut measured: Vec<Round> = measured.collect::<Option<_>>().unwrap_or_default();
            measured.sort_by(|a, b| a.typical_ratio().total_cmp(&b.typical_ratio()));
            let Some(round) = measured.get(measured.len() / 2) else {
                println!("{kind:<8?} {keys:>11}  too few calls with so many keys");
                worst = f64::INFINITY;
                continue;
            };
            worst = worst.max(round.typical_ratio());
            let Round { new, old } = round;
            println!(
                "{kind:<8?} {keys:>11}  {:>10.3} {:>10.3} {:>7.3}  {:>10.3} {:>10.3} {:>7.3}  \
                 {:>6} {:>6}",
                new.mean_us,
                old.mean_us,
                new.mean_us / old.mean_us,
                new.typical_us,
                old.typical_us,
                round.typical_ratio(),
                new.calls,
                old.calls,
            );
        }
    }
    println!("worst ratio {worst:.3}, target <= {RATIO_MOST}");
    if worst <= RATIO_MOST { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
