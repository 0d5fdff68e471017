//! Ten million invented keys against a limiter that may hold a million, beside keys that are known.
//!
//! ```text
//! cargo bench --features cli --bench full_table -- [--short]
//! ```
//!
//! A limiter has two limits, of one mode. Two threads ask one of them about invented keys, each once, two hundred thousand a
//! second. Meanwhile other threads ask about keys that were known before, and about new customers. Three cases: local limits,
//! hybrid ones on a real Redis, and hybrid ones after it was killed. The exit status is 1 when a target is missed:
//!
//! | figure | target |
//! |---|---|
//! | requests of 1000 clients that spent all before, and ask again when their keys may have been evicted, admitted | none |
//! | requests for known keys at a small part of their limit, denied | none |
//! | 99th percentile of decisions about known keys, to that beside as many requests for keys that exist | at most 1.5 |
//! | new customers of the other limit that are denied | none |
//! | new customers of the same limit that `check_sure` denies (hybrid, the store answers) | none |
//!
//! Reported beside: the same percentile on a quiet machine, how many invented keys were admitted, had no room, and were evicted, and
//! the most memory of the process.
//!
//! `--short` invents a tenth, against a tenth of the keys.
#![allow(clippy::disallowed_methods, reason = "the limiters are real, and so is time")]

use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tidegate::{ActiveLimit, Event, Limit, Limiter, Mode, Quota, RedisStore};
use tokio::runtime::{Builder, Runtime};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

const KEYS: usize = 1_000_000;
const INVENTED: u64 = 10_000_000;
const SHORT: u64 = 10;
const THREADS: u64 = 2;
/// Keys that a thread invents in a second.
const RATE: f64 = 100_000.0;
/// Keys that a thread invents in one go.
const ROUND: u64 = 1000;
/// Keys that are asked for instead, to compare with.
const EXISTING: u64 = 10_000;
/// How long it is measured without invented keys.
const QUIET: Duration = Duration::from_secs(3);
/// Keys that are known before.
const KNOWN: u64 = 1000;
const OTHER_PER_HOUR: u64 = 1_000_000;
/// Of the limit that is attacked: a token in 12 minutes.
const SLOW: u64 = 5;
/// Clients that spend all before.
const SPENT: u64 = 1000;
/// Between two new customers.
const CUSTOMER_GAP: Duration = Duration::from_millis(20);
/// After the server was killed, until all leases have ended.
const AWAY_AFTER: Duration = Duration::from_secs(5);
const P99_MOST: f64 = 1.5;
/// Decisions that are timed together, since one is shorter than a reading of the clock.
const TIMED: u64 = 16;

#[derive(Clone, Copy, PartialEq)]
enum Case {
    Local,
    Hybrid,
    Away,
}

#[derive(Default)]
struct Heard {
    evicted: AtomicU64,
    overflowed: AtomicU64,
}

fn main() -> ExitCode {
    let part = if std::env::args().any(|argument| argument == "--short") { SHORT } else { 1 };
    let mut missed = false;
    for case in [Case::Local, Case::Hybrid, Case::Away] {
        missed |= !run(case, part);
    }
    ExitCode::from(u8::from(missed))
}

/// A limiter and what it tells.
struct Node {
    /// Its own thread ends with it.
    _limiter: Limiter,
    attacked: ActiveLimit,
    other: ActiveLimit,
    heard: Arc<Heard>,
    runtime: Runtime,
}

impl Node {
    fn start(case: Case, part: u64, server: Option<&RedisServer>) -> Self {
        let mode = if case == Case::Local { Mode::Local } else { Mode::Hybrid };
        let heard = Arc::new(Heard::default());
        let hears = heard.clone();
        let mut builder = Limiter::builder()
            .limit(Limit::new("attacked", Quota::per_hour(SLOW)).mode(mode))
            .limit(Limit::new("other", Quota::per_hour(OTHER_PER_HOUR)).mode(mode))
            .max_keys(KEYS / part as usize)
            .listen(move |event| match event {
                Event::Evicted { keys } => {
                    hears.evicted.fetch_add(*keys as u64, Ordering::Relaxed);
                }
                Event::Decisions { overflowed, .. } => {
                    hears.overflowed.fetch_add(*overflowed, Ordering::Relaxed);
                }
                _ => {}
            });
        if let Some(server) = server {
            builder = builder.store(RedisStore::open(&server.url()).expect("a good address"));
        }
        let limiter = builder.build().expect("a good configuration");
        let limit = |name| limiter.limit(name).expect("it has this limit");
        let (attacked, other) = (limit("attacked"), limit("other"));
        let runtime = Builder::new_current_thread().build().expect("there are threads");
        Self { _limiter: limiter, attacked, other, heard, runtime }
    }

    /// The clients that will come again spend all, and the known keys become known.
    fn warm_up(&self) {
        for _ in 0..2 * SLOW {
            for key in 0..SPENT {
                let key = format!("spent:{key}");
                let _ = self.runtime.block_on(self.attacked.check_sure(&key));
            }
        }
        for _ in 0..50 {
            for key in 0..KNOWN {
                let _ = self.other.check(&format!("known:{key}"));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// How many requests are admitted of the clients that spent all.
    fn spent_admitted(&self) -> u64 {
        let admitted = (0..SPENT).map(|key| {
            let key = format!("spent:{key}");
            let check = self.attacked.check(&key).is_allowed();
            let sure = self.runtime.block_on(self.attacked.check_sure(&key)).is_allowed();
            u64::from(check) + u64::from(sure)
        });
        admitted.sum()
    }

    /// Asks for `asked` keys at [`RATE`], of which there are so many. Returns how many were admitted.
    fn ask(&self, thread: u64, asked: u64, keys: u64) -> u64 {
        let (start, mut key, mut admitted) = (Instant::now(), String::new(), 0);
        for number in 0..asked {
            key.clear();
            write!(key, "invented:{thread}:{:09}", number % keys).expect("text");
            admitted += u64::from(self.attacked.check(&key).is_allowed());
            if number.is_multiple_of(ROUND) {
                let due = Duration::from_secs_f64(number as f64 / RATE);
                thread::sleep(due.saturating_sub(start.elapsed()));
            }
        }
        admitted
    }

    /// Runs `beside` while all threads ask. Returns how many requests were admitted, too.
    fn ask_beside<T: Send>(
        &self,
        (asked, keys): (u64, u64),
        beside: impl FnOnce(&AtomicBool) -> T,
    ) -> (u64, T) {
        let (is_over, running) = (AtomicBool::new(false), AtomicU64::new(THREADS));
        thread::scope(|scope| {
            let (is_over, running) = (&is_over, &running);
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    scope.spawn(move || {
                        let admitted = self.ask(thread, asked / THREADS, keys);
                        if running.fetch_sub(1, Ordering::AcqRel) == 1 {
                            is_over.store(true, Ordering::Release);
                        }
                        admitted
                    })
                })
                .collect();
            let said = beside(is_over);
            (threads.into_iter().map(|thread| thread.join().expect("it ends")).sum(), said)
        })
    }

    /// The 99th percentile of a decision about a known key until `is_over`, in nanoseconds, and how many were denied.
    fn time_known(&self, is_over: impl Fn() -> bool) -> (u64, u64) {
        let keys: Vec<String> = (0..KNOWN).map(|key| format!("known:{key}")).collect();
        let (mut histogram, mut at) = (Histogram::<u64>::new(3).expect("three digits"), 0);
        let mut denied = 0;
        while !is_over() {
            let start = Instant::now();
            for _ in 0..TIMED {
                at = (at + 7) % keys.len();
                denied += u64::from(self.other.check(&keys[at]).is_denied());
            }
            histogram.saturating_record(start.elapsed().as_nanos() as u64 / TIMED);
            // Not a third attacker.
            thread::sleep(Duration::from_micros(200));
        }
        (histogram.value_at_quantile(0.99), denied)
    }

    /// New customers of both limits, until `is_over`.
    fn serve(&self, is_over: &AtomicBool) -> Served {
        let runtime = Builder::new_current_thread().build().expect("there are threads");
        let mut served = Served::default();
        while !is_over.load(Ordering::Acquire) {
            served.customers += 1;
            let customer = format!("customer:{}", served.customers);
            let sure = runtime.block_on(self.attacked.check_sure(&customer));
            served.denied_by_check_sure += u64::from(sure.is_denied());
            served.denied_by_other += u64::from(self.other.check(&customer).is_denied());
            thread::sleep(CUSTOMER_GAP);
        }
        served
    }
}

/// What became of others than attackers.
#[derive(Default)]
struct Served {
    customers: u64,
    denied_by_check_sure: u64,
    denied_by_other: u64,
}

/// Whether the targets were met.
fn run(case: Case, part: u64) -> bool {
    let mut server = (case != Case::Local).then(RedisServer::start);
    let node = Node::start(case, part, server.as_ref());
    node.warm_up();
    if case == Case::Away {
        server = None;
        thread::sleep(AWAY_AFTER);
    }
    let begin = Instant::now();
    let (quiet, _) = node.time_known(|| begin.elapsed() >= QUIET);
    let asked = (RATE * QUIET.as_secs_f64()) as u64 * THREADS;
    let is_over = |over: &AtomicBool| over.load(Ordering::Acquire);
    let (_, (busy, _)) =
        node.ask_beside((asked, EXISTING / part), |over| node.time_known(|| is_over(over)));
    let (admitted, ((p99, known_denied), served)) =
        node.ask_beside((INVENTED / part, u64::MAX), |over| {
            thread::scope(|scope| {
                let serving = scope.spawn(|| node.serve(over));
                (node.time_known(|| is_over(over)), serving.join().expect("it ends"))
            })
        });
    let spent = node.spent_admitted();
    // So that the counts of the last second are heard.
    thread::sleep(Duration::from_millis(1500));
    drop(server);
    let ratio = p99 as f64 / busy as f64;
    println!(
        "{}: {} invented keys, {admitted} admitted, {} without room, {} evicted; {spent} requests of spent keys admitted; known \
         keys: {known_denied} denied, \
         p99 {quiet} ns quiet, {busy} beside as many requests for {} keys, {p99} beside invented ones ({ratio:.2}x); \
         of {} new customers of each denied: by the other limit {}, by the same with check_sure {}; {} MB at most",
        case.name(),
        INVENTED / part,
        node.heard.overflowed.load(Ordering::Relaxed),
        node.heard.evicted.load(Ordering::Relaxed),
        THREADS * EXISTING / part,
        served.customers,
        served.denied_by_other,
        served.denied_by_check_sure,
        most_memory_mb(),
    );
    let is_exact = case != Case::Hybrid || served.denied_by_check_sure == 0;
    (spent, known_denied, served.denied_by_other) == (0, 0, 0) && is_exact && ratio <= P99_MOST
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Hybrid => "hybrid",
            Self::Away => "hybrid, the store is away",
        }
    }
}

fn most_memory_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) / 1024
}
