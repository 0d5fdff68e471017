//! Keys that are invented, each asked for once, beside a key that is known: on a real Redis.
//!
//! ```text
//! cargo bench --bench invented_keys -- [--short]
//! ```
//!
//! Four limiters of 100 a second with a burst of 100 meet 10,000 new keys a second each for 40 s, and
//! one known key at half its limit. The exit status is 1 when a target is missed:
//!
//! | figure | target |
//! |---|---|
//! | key syncs an invented key, of all nodes together, until a minute later | 1 to 1.5 |
//! | wrong denials of the known key | at most 1% |
//! | records of invented keys in Redis a minute later | none |
//! | bytes of the records of lanes and nodes, a node and lane | below 1024 |
//!
//! `--short` invents keys for 5 s.
#![allow(clippy::disallowed_methods, reason = "limiters and server are real, and so is time")]

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate::{ActiveLimit, Event, Limit, Limiter, Quota, RedisStore};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

const NODES: usize = 4;
const RATE: u64 = 100;
const BURST: u64 = 100;
/// New keys a second and node.
const INVENTED: u64 = 10_000;
const KNOWN: &str = "known";
/// What the invented keys begin with.
const START: &str = "invented:";
const SECONDS: u64 = 40;
const SECONDS_SHORT: u64 = 5;
const ROUND: Duration = Duration::from_millis(5);
/// Rounds between two requests to the known key: half its limit.
const KNOWN_EVERY: u64 = 1000 / (RATE / 2) / 5;
const READY_WITHIN: Duration = Duration::from_secs(10);
/// After the load, until the nodes have nothing left to say of the keys.
const SETTLED_AFTER: Duration = Duration::from_secs(5);
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(60);
/// Names that one step of a scan looks at.
const SCAN_COUNT: u32 = 10_000;

const SYNCS_MOST: f64 = 1.5;
const DENIED_PCT_MOST: f64 = 1.0;
const LANE_BYTES_MOST: f64 = 1024.0;

/// Key syncs that were answered.
type Synced = Arc<AtomicU64>;

fn start(address: &str, synced: &Synced) -> Limiter {
    let synced = synced.clone();
    Limiter::builder()
        .limit(Limit::new("api", Quota::per_second(RATE).burst(BURST)))
        .store(RedisStore::open(address).expect("a good address"))
        .listen(move |event| {
            if let Event::Synced { keys, error: None, .. } = event {
                synced.fetch_add(*keys as u64, Ordering::Relaxed);
            }
        })
        .build()
        .expect("a good configuration")
}

/// What was asked for, and denied.
#[derive(Default)]
struct Load {
    rounds: u64,
    invented: u64,
    invented_denied: u64,
    known: u64,
    known_denied: u64,
}

impl Load {
    /// The known key for so long, and new keys where they are asked for.
    fn run(&mut self, limits: &[ActiveLimit], time: Duration, invents: bool) {
        let (start, mut round) = (Instant::now(), 0);
        while start.elapsed() < time {
            self.round(limits, invents);
            round += 1;
            std::thread::sleep((start + ROUND * round).saturating_duration_since(Instant::now()));
        }
    }

    fn round(&mut self, limits: &[ActiveLimit], invents: bool) {
        let is_denied = |limit: &ActiveLimit, key: &str| u64::from(!limit.check(key).is_allowed());
        if self.rounds.is_multiple_of(KNOWN_EVERY) {
            let limit = &limits[self.known as usize % limits.len()];
            self.known_denied += is_denied(limit, KNOWN);
            self.known += 1;
        }
        self.rounds += 1;
        if !invents {
            return;
        }
        for limit in limits {
            for _ in 0..INVENTED * ROUND.as_millis() as u64 / 1000 {
                let key = format!("{START}{:012}", self.invented);
                self.invented_denied += is_denied(limit, &key);
                self.invented += 1;
            }
        }
    }
}

/// What Redis holds.
struct Records {
    invented: usize,
    /// Of the known key.
    known: usize,
    /// Of lanes and nodes.
    others: Vec<Vec<u8>>,
}

impl Records {
    fn read(connection: &mut redis::Connection) -> Self {
        let (mut cursor, mut names) = (0_u64, BTreeSet::new());
        loop {
            let page =
                redis::cmd("SCAN").arg(cursor).arg("COUNT").arg(SCAN_COUNT).query(connection);
            let (next, page): (u64, Vec<Vec<u8>>) = page.expect("SCAN is answered");
            names.extend(page);
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        let has = |name: &[u8], part: &str| name.windows(part.len()).any(|w| w == part.as_bytes());
        let all = names.len();
        names.retain(|name| !has(name, START));
        let invented = all - names.len();
        let (known, others): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| has(name, KNOWN));
        Self { invented, known: known.len(), others }
    }

    /// Bytes of the records of lanes and nodes, and lanes.
    fn of_lanes(&self, connection: &mut redis::Connection) -> (u64, usize) {
        let mut usage = |name: &Vec<u8>| -> Option<u64> {
            redis::cmd("MEMORY").arg("USAGE").arg(name).query(connection).expect("it is answered")
        };
        let bytes = self.others.iter().filter_map(&mut usage).sum();
        let tags = self.others.iter().filter_map(|name| name.split(|&byte| byte == b'}').next());
        (bytes, tags.collect::<BTreeSet<_>>().len())
    }
}

fn verdict(what: &str, figure: f64, most: f64) -> bool {
    let met = figure <= most;
    let word = if met { "ok" } else { "MISSED" };
    println!("{what:<58} {figure:>12.3}  <= {most:<8} {word}");
    met
}

fn runtime() -> tokio::runtime::Runtime {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("there is memory for a runtime")
}

/// The limit of a node that is ready.
fn ready(runtime: &tokio::runtime::Runtime, node: &Limiter) -> ActiveLimit {
    runtime.block_on(node.ready(READY_WITHIN)).expect("the server runs");
    node.limit("api").expect("it is there")
}

fn main() -> ExitCode {
    let short = std::env::args().any(|argument| argument == "--short");
    let time = Duration::from_secs(if short { SECONDS_SHORT } else { SECONDS });
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).expect("a good address");
    let mut connection = client.get_connection().expect("the server runs");
    let runtime = runtime();
    let _entered = runtime.enter();
    let synced = Synced::default();
    let nodes: Vec<Limiter> = (0..NODES).map(|_| start(&server.url(), &synced)).collect();
    let limits: Vec<ActiveLimit> = nodes.iter().map(|node| ready(&runtime, node)).collect();

    // The known key is known before the others come.
    Load::default().run(&limits, SETTLED_AFTER, false);
    let mut load = Load::default();
    let synced_before = synced.load(Ordering::Relaxed);
    load.run(&limits, time, true);
    let (bytes, lanes) = Records::read(&mut connection).of_lanes(&mut connection);
    let invented_until = Instant::now();
    load.run(&limits, SETTLED_AFTER, false);
    let mut records = Records::read(&mut connection);
    println!(
        "{} keys invented in {time:?}, {} denied; {} records {SETTLED_AFTER:?} later",
        load.invented, load.invented_denied, records.invented
    );
    let known_denied_pct = 100.0 * load.known_denied as f64 / load.known as f64;
    while records.invented > 0 && invented_until.elapsed() < FORGOTTEN_WITHIN {
        load.run(&limits, Duration::from_secs(1), false);
        records = Records::read(&mut connection);
    }
    // Nodes that fell behind go on for long: what they say of the keys until then counts too.
    let syncs = synced.load(Ordering::Relaxed) - synced_before;
    println!(
        "{syncs} key syncs; {} records of invented keys, {} of the known one, {} of lanes and nodes after {:.0} s",
        records.invented,
        records.known,
        records.others.len(),
        invented_until.elapsed().as_secs_f64()
    );
    let per_node = bytes as f64 / NODES as f64;
    println!("{bytes} bytes of {lanes} lanes and their nodes, {per_node:.0} a node");
    let lane_bytes = per_node / lanes as f64;
    let per_key = syncs as f64 / load.invented as f64;
    let met = [
        verdict("part of the keys that cannot have been synced", 1.0 - per_key.min(1.0), 0.0),
        verdict("key syncs an invented key", per_key, SYNCS_MOST),
        verdict("wrong denials of the known key, %", known_denied_pct, DENIED_PCT_MOST),
        verdict("records of invented keys a minute later", records.invented as f64, 0.0),
        verdict("bytes of lanes and nodes, a node and lane", lane_bytes, LANE_BYTES_MOST),
    ];
    // The server ends with this process.
    for node in &nodes {
        let _ = runtime.block_on(node.shutdown(READY_WITHIN));
    }
    if met.iter().all(|met| *met) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
