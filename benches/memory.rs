//! What a key costs in memory, all included: in the books, and at rest.
//!
//! ```text
//! cargo bench --bench memory
//! cargo bench --bench memory -- --json --keys 1000000
//! cargo bench --bench memory -- --keys 1000000 --part portions
//! ```
//!
//! Measured is what the process has resident. (An allocator that counts would write to all that is
//! asked for zeroed, which the system makes up only as it is used.) The store is a redis-server, so
//! that nothing of it is counted here; each number of keys, and each kind of limiter, has a process of
//! its own, so that none finds what another has left, and one thread for all. Names of keys are
//! written one over the other. Three limiters are measured: one without a store; one whose keys come
//! once each, [`PORTION`] at a time, and rest; and one whose keys all come before the books on the
//! first are closed, so that all are in the books at once, which is the most that a key can cost. What is resident after that includes memory that was freed, and that the
//! system's allocator keeps.
//!
//! Ends with status 1 if a key at rest costs more than [`GOAL_BYTES`] with a million of them that came
//! in portions.
#![allow(clippy::disallowed_methods, reason = "waits for a driver, which lives by the real clock")]

use std::fmt::Write;
use std::ops::Range;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tidegate::{ActiveLimit, Builder, Event, Limit, Limiter, Quota, RedisStore};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

const KEYS: [usize; 2] = [1_000_000, 1_800_000];
/// What a key at rest may cost, with so many keys: 128 bytes are the bucket with the key.
const GOAL_BYTES: f64 = 170.0;
const GOAL_KEYS: usize = 1_000_000;
/// A new key is synced at once, and again after four of these, since it has plenty: then its books
/// are closed, and not before.
const INTERVAL: Duration = Duration::from_secs(5);
/// Books are kept for a second after the last sync, at the most.
const QUIET: Duration = Duration::from_secs(3);
/// Of a busy machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// So many keys are asked for before the driver has its turn.
const TURN: usize = 4096;
/// So many keys come at a time, where they come in portions.
const PORTION: usize = 50_000;
/// Their books are closed by then, if nothing was synced since.
const PORTION_QUIET: Duration = Duration::from_millis(400);
/// Then the driver has heard of a portion.
const TAKEN_IN: Duration = Duration::from_millis(100);
/// The part of the keys whose cost is not counted in that of a further key.
const FIRST: f64 = 0.7;

/// Bytes resident: field 2 of statm, in pages.
fn resident() -> f64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("a Linux");
    let pages = pages.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok());
    pages.expect("it has seven numbers") * rustix::param::page_size() as f64
}

/// Bytes of that in the heap, where what is small is allocated; what was freed there is often kept.
fn in_heap() -> f64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("a Linux");
    let heap = maps.split("[heap]").nth(1).unwrap_or_default();
    let line = heap.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap_or_default();
    let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok());
    kib.unwrap_or_default() * 1024.0
}

/// The most bytes that were ever resident.
fn resident_most() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.expect("it has this line") * 1024.0
}

/// A process that measures one limiter.
struct Scale {
    keys: usize,
    before: f64,
    json: bool,
}

impl Scale {
    fn new(keys: usize, json: bool) -> Self {
        Self { keys, before: resident(), json }
    }

    /// Shows what `of_keys` keys have brought the process to; returns how much that is for each.
    fn show(&self, state: &str, of_keys: usize, resident: f64) -> f64 {
        let (keys, bytes) = (self.keys, (resident - self.before) / of_keys as f64);
        let heap = in_heap() / keys as f64;
        if self.json {
            println!(
                "{}",
                json!({"keys": keys, "state": state, "bytes_a_key": bytes, "heap": heap})
            );
        } else {
            println!("{keys:>9}  {state:<44} {bytes:>9.1} {heap:>9.1}");
        }
        bytes
    }
}

/// Asks for each key once, and lets the driver take in what it is told.
async fn ask(limit: &ActiveLimit, keys: Range<usize>) {
    let mut name = String::with_capacity(32);
    for key in keys {
        name.clear();
        write!(name, "user:{key:015}").expect("a string takes all");
        assert!(limit.check(&name).is_allowed(), "{name}");
        if key % TURN == 0 {
            tokio::task::yield_now().await;
        }
    }
}

/// What a part of the measurement is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// No store, and no books.
    Alone,
    /// Keys come in portions, each when the books on the one before are closed.
    Portions,
    /// All keys are in the books at once.
    Burst,
}

const PARTS: [(&str, Part); 3] =
    [("alone", Part::Alone), ("portions", Part::Portions), ("burst", Part::Burst)];

fn limiter(keys: usize, part: Part) -> Builder {
    // No key is evicted while an eighth of the room is free, and the last room is not for `check`.
    let max_keys = keys + keys / 4;
    if part == Part::Portions {
        // It fills in a quarter of a second: so long books are kept at the least.
        let limit = Limit::new("bench", Quota::per_second(400).burst(100));
        return Limiter::builder().max_keys(max_keys).limit(limit);
    }
    // It takes 20 s to fill, so that keys are synced by the interval.
    let limit = Limit::new("bench", Quota::per_second(5).burst(100)).sync_interval(INTERVAL);
    Limiter::builder().max_keys(max_keys).limit(limit)
}

/// What a limiter costs that has no store: buckets and the index of them, and no books.
async fn alone(keys: usize, json: bool) {
    let mut scale = Scale::new(keys, json);
    let limiter = limiter(keys, Part::Alone).build().expect("a good limit");
    let limit = limiter.limit("bench").expect("it was built with it");
    let first = (keys as f64 * FIRST) as usize / PORTION * PORTION;
    for first in (0..first).step_by(PORTION) {
        ask(&limit, first..first + PORTION).await;
        tokio::time::sleep(TAKEN_IN).await;
    }
    let before = resident();
    for first in (first..keys).step_by(PORTION) {
        ask(&limit, first..keys.min(first + PORTION)).await;
        tokio::time::sleep(TAKEN_IN).await;
    }
    scale.show("without a store: buckets and index", keys, resident());
    scale.before = before;
    scale.show("without a store: a further key", keys - first, resident());
}

/// What a limiter costs that is kept in step through a store; returns the bytes of a key at rest.
async fn hybrid(keys: usize, part: Part, json: bool) -> f64 {
    let server = RedisServer::start();
    let store = RedisStore::open(&server.url()).expect("a good address");
    let synced = Arc::new(AtomicUsize::new(0));
    let counter = synced.clone();
    let builder =
        limiter(keys, part).store(store.timeout(RedisStore::TIMEOUT_MAX)).listen(move |event| {
            if let Event::Synced { keys, error: None, .. } = event {
                counter.fetch_add(*keys, Ordering::Relaxed);
            }
        });
    let scale = Scale::new(keys, json);
    let limiter = builder.build_ready(DEADLINE).await.expect("the server answers");
    let limit = limiter.limit("bench").expect("it was built with it");
    if part == Part::Portions {
        scale.show("before any key is asked for", keys, resident());
        for first in (0..keys).step_by(PORTION) {
            let end = keys.min(first + PORTION);
            ask(&limit, first..end).await;
            rest(end, &synced, PORTION_QUIET).await;
        }
        tokio::time::sleep(QUIET).await;
        return scale.show("at rest, all included; asked for in portions", keys, resident());
    }
    let start = Instant::now();
    ask(&limit, 0..keys).await;
    let took = start.elapsed();
    assert!(took < 4 * INTERVAL, "asking took {took:?}: not all keys are in the books at once");
    scale.show("in the books, when all were asked for", keys, resident());
    // The second sync comes after four intervals.
    rest(keys, &synced, 4 * INTERVAL + QUIET).await;
    scale.show("in the books, at the most", keys, resident_most());
    scale.show("at rest after that, freed memory included", keys, resident())
}

/// Until all keys have been synced, and none any more.
async fn rest(keys: usize, synced: &AtomicUsize, quiet: Duration) {
    let start = Instant::now();
    let (mut seen, mut since) = (synced.load(Ordering::Relaxed), start);
    while seen < keys || since.elapsed() < quiet {
        assert!(start.elapsed() < DEADLINE, "{seen} of {keys} keys were synced");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = synced.load(Ordering::Relaxed);
        if now > seen {
            (seen, since) = (now, Instant::now());
        }
    }
}

/// One process's part.
fn measure_one(part: Part, keys: usize, json: bool) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    if part == Part::Alone {
        runtime.block_on(alone(keys, json));
        return true;
    }
    let at_rest = runtime.block_on(hybrid(keys, part, json));
    part == Part::Burst || keys != GOAL_KEYS || at_rest <= GOAL_BYTES
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let json = arguments.iter().any(|argument| argument == "--json");
    let wanted = after("--keys").map(|keys| keys.parse::<usize>().expect("--keys: a number"));
    let only = after("--part");
    if let (Some(keys), Some((_, part))) =
        (wanted, PARTS.into_iter().find(|(name, _)| only.as_deref() == Some(name)))
    {
        return ExitCode::from(u8::from(!measure_one(part, keys, json)));
    }
    if !json {
        println!("{:>9}  {:<44} {:>9} {:>9}", "keys", "bytes a key", "resident", "in heap");
    }
    let program = std::env::current_exe().expect("a program knows where it is");
    let mut good = true;
    for keys in wanted.map_or(KEYS.to_vec(), |keys| vec![keys]) {
        for (part, _) in PARTS {
            let mut command = Command::new(&program);
            command.args(["--part", part, "--keys", &keys.to_string()]);
            command.args(json.then_some("--json"));
            good &= command.status().expect("a program can be started twice").success();
        }
    }
    if !good {
        eprintln!("a key at rest costs more than {GOAL_BYTES} bytes, or a part failed");
    }
    ExitCode::from(u8::from(!good))
}
