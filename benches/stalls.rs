//! How long single decisions take at the worst, while a driver syncs many keys with a real Redis.
//!
//! ```text
//! cargo bench --bench stalls
//! ```
//!
//! One thread decides on one core; the driver, the clock's thread and a redis-server share another.
//! [`KEYS`] keys are asked for at random, at an even pace, so that all have been spent from whenever
//! they are synced, once in [`TICK`]. Each decision is measured on its own. Beside each the clock
//! alone is read for about as long as a decision takes: what interrupts that interrupts decisions
//! too, and is the machine's own doing. Then keys are asked for that nobody has asked for before.
//!
//! Ends with status 1 if one in ten thousand decisions takes longer than [`GOAL`] and three times as
//! long as what was measured with nothing to do; of both without those during which the system gave
//! the core to another program.
#![allow(clippy::disallowed_methods, reason = "measures time, and lives by the real clock")]

use std::fs::read_to_string;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tidegate::{ActiveLimit, Event, Limit, Limiter, Quota, RedisStore};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

/// Keys that are in use all the time.
const KEYS: usize = 100_000;
/// Keys that are asked for once.
const NEW_KEYS: usize = 1_000_000;
const DECISIONS: u64 = 10_000_000;
/// The pace of decisions.
const GAP: Duration = Duration::from_micros(2);
const NEW_GAP: Duration = Duration::from_micros(10);
/// Keys with plenty are synced each four intervals: once in a tick.
const INTERVAL: Duration = Duration::from_millis(1250);
const TICK: Duration = Duration::from_secs(5);
/// Until all keys hold what they need: fewer than one decision in so many is denied in a tick.
const RUN_UP_MAX: Duration = Duration::from_secs(60);
const STRAYS_ONE_IN: u64 = 1000;
/// Keys synced in a tick, on the average, as a part of all keys.
const SYNCED_PCT: std::ops::RangeInclusive<u64> = 80..=130;
/// How long one decision in ten thousand may take.
const GOAL: Duration = Duration::from_micros(20);
const GOAL_NOISE: u64 = 3;
/// About as long as a decision takes.
const NOTHING_READS: usize = 15;
/// Whatever takes longer is looked into.
const LONG: Duration = Duration::from_micros(10);
/// So many of the longest are told.
const TOLD: usize = 4;

/// What the system has done to this thread.
#[derive(Clone, Copy, Debug, Default)]
struct Troubles {
    left: u64,
    ousted: u64,
    faults: u64,
    waited_ns: u64,
    /// Calls that write: how a decision wakes the driver.
    wakes: u64,
}

impl Troubles {
    /// Up to now. Costs some microseconds.
    fn read() -> Self {
        let status = read_to_string("/proc/thread-self/status").expect("a Linux");
        let count = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|count| count.trim().parse().ok()).unwrap_or_default()
        };
        let word = |file: &str, at: usize| {
            let text = read_to_string(file).unwrap_or_default();
            // The second field of stat is the thread's name, which may hold blanks.
            let rest = text.rsplit(") ").next().unwrap_or_default();
            let word = rest.split_whitespace().nth(at).and_then(|word| word.parse().ok());
            word.unwrap_or_default()
        };
        Self {
            left: count(&status, "voluntary_ctxt_switches:"),
            ousted: count(&status, "nonvoluntary_ctxt_switches:"),
            faults: word("/proc/thread-self/stat", 7),
            waited_ns: word("/proc/thread-self/schedstat", 1),
            wakes: count(&read_to_string("/proc/thread-self/io").unwrap_or_default(), "syscw:"),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            left: self.left - before.left,
            ousted: self.ousted - before.ousted,
            faults: self.faults - before.faults,
            waited_ns: self.waited_ns - before.waited_ns,
            wakes: self.wakes - before.wakes,
        }
    }

    fn tell(self) -> String {
        let Self { left, ousted, faults, waited_ns, wakes } = self;
        let waited_us = waited_ns / 1000;
        let what = match (left + ousted + faults, wakes) {
            (0, 0) => "; an interrupt, then, or the machine below",
            _ => "",
        };
        format!(
            "left its core {left}, ousted {ousted} (waited {waited_us} us), faults {faults}, \
             wakes {wakes}{what}"
        )
    }
}

/// What was measured of one thing.
struct Seen {
    histogram: Histogram<u64>,
    /// Without those during which another program was given the core.
    undisturbed: Histogram<u64>,
    longest: Vec<(Duration, Duration, Troubles)>,
}

impl Seen {
    fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, 10_000_000_000, 3).expect("good bounds");
        Self { undisturbed: histogram.clone(), histogram, longest: Vec::new() }
    }

    fn p9999(&self) -> u64 {
        self.undisturbed.value_at_quantile(0.9999)
    }

    fn show(&self, name: &str) {
        Self::show_one(name, &self.histogram);
        Self::show_one(&format!("{name}, not ousted"), &self.undisturbed);
    }

    fn show_one(name: &str, histogram: &Histogram<u64>) {
        let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        let [p50, p99, p999, p9999] = [0.5, 0.99, 0.999, 0.9999].map(us);
        let (most, count) = (histogram.max() as f64 / 1000.0, histogram.len());
        println!(
            "{name:<24} {count:>9} {p50:>8.2} {p99:>8.2} {p999:>8.2} {p9999:>8.2} {most:>9.1}"
        );
    }

    fn show_longest(&mut self, name: &str) {
        self.longest.sort_by_key(|(took, ..)| std::cmp::Reverse(*took));
        let later = self.longest.iter().skip(TOLD);
        let undisturbed = later.filter(|(.., troubles)| troubles.ousted == 0);
        let told: Vec<_> = self.longest.iter().take(TOLD).chain(undisturbed.take(TOLD)).collect();
        for (took, at, troubles) in told {
            println!("{name}: {took:?} at {at:.3?}: {}", troubles.tell());
        }
    }
}

/// Measures decisions, and beside them nothing.
struct Watch {
    start: Instant,
    before: Troubles,
    decisions: Seen,
    nothing: Seen,
    troubles: Troubles,
    denied: u64,
}

impl Watch {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            before: Troubles::read(),
            decisions: Seen::new(),
            nothing: Seen::new(),
            troubles: Troubles::read(),
            denied: 0,
        }
    }

    /// Decides once, and lets the rest of `gap` pass.
    #[inline]
    fn decide(&mut self, due: Instant, decide: impl FnOnce() -> bool) {
        let begun = Instant::now();
        let allowed = decide();
        let done = Instant::now();
        self.denied += u64::from(!allowed);
        for _ in 1..NOTHING_READS {
            std::hint::black_box(Instant::now());
        }
        let idle = Instant::now();
        Self::book(&mut self.decisions, done - begun, begun - self.start, &mut self.troubles);
        Self::book(&mut self.nothing, idle - done, done - self.start, &mut self.troubles);
        let mut last = Instant::now();
        while last < due {
            let now = Instant::now();
            if now - last > LONG {
                self.troubles = Troubles::read();
            }
            last = now;
        }
    }

    #[inline]
    fn book(seen: &mut Seen, took: Duration, at: Duration, troubles: &mut Troubles) {
        let (took_ns, mut ousted) = (took.as_nanos() as u64, 0);
        if took > LONG {
            let now = Troubles::read();
            let meanwhile = now.since(std::mem::replace(troubles, now));
            ousted = meanwhile.ousted;
            seen.longest.push((took, at, meanwhile));
        }
        seen.histogram.saturating_record(took_ns);
        if ousted == 0 {
            seen.undisturbed.saturating_record(took_ns);
        }
    }

    fn show(&mut self, name: &str) {
        println!(
            "{:<24} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9}",
            "us", "count", "p50", "p99", "p99.9", "p99.99", "max"
        );
        self.decisions.show(name);
        self.nothing.show("nothing");
        let all = Troubles::read().since(self.before);
        println!("{name}: denied {}; in all: {}", self.denied, all.tell());
        self.decisions.show_longest(name);
        self.nothing.show_longest("nothing");
    }

    fn is_good(&self) -> bool {
        let most = (GOAL.as_nanos() as u64).max(GOAL_NOISE * self.nothing.p9999());
        self.decisions.p9999() <= most
    }
}

/// Keeps this thread, and those that it starts from now on, on one core.
fn stay_on(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).expect("one of the cores that it may use");
}

/// The first and the last of the cores that this program may use.
fn cores() -> (usize, usize) {
    let mine = sched_getaffinity(None).expect("a thread has cores");
    let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| mine.is_set(core));
    let first = cores.next().expect("it runs somewhere");
    (cores.next_back().expect("this takes two cores"), first)
}

/// Brings all keys into the books, and waits until they live on what they are asked for.
fn run_up(limit: &ActiveLimit, names: &[String]) {
    let (mut rng, start) = (fastrand::Rng::with_seed(2), Instant::now());
    let denied = |name: &String| u64::from(!limit.check(name).is_allowed());
    let mut due = start;
    for name in names {
        due += 4 * NEW_GAP;
        while Instant::now() < due {}
        denied(name);
    }
    loop {
        let (mut asked, mut strays) = (0, 0);
        let ends = due + TICK;
        while due < ends {
            due += GAP;
            while Instant::now() < due {}
            asked += 1;
            strays += denied(&names[rng.usize(..names.len())]);
        }
        if strays * STRAYS_ONE_IN < asked || start.elapsed() > RUN_UP_MAX {
            println!("after {:.0?}: {strays} of {asked} denied in a tick", start.elapsed());
            return;
        }
    }
}

/// Asks for keys that are known, `DECISIONS` times; returns how many keys each tick synced.
fn known(watch: &mut Watch, limit: &ActiveLimit, names: &[String], synced: &AtomicU64) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut due = Instant::now();
    let mut by_tick = Vec::new();
    let (mut tick_ends, mut before) = (due + TICK, synced.load(Ordering::Relaxed));
    for _ in 0..DECISIONS {
        let name = &names[rng.usize(..names.len())];
        due += GAP;
        watch.decide(due, || limit.check(name).is_allowed());
        if due >= tick_ends {
            tick_ends += TICK;
            let now = synced.load(Ordering::Relaxed);
            by_tick.push(now - std::mem::replace(&mut before, now));
        }
    }
    by_tick
}

/// Asks once for each of many keys that nobody has asked for.
fn new(watch: &mut Watch, limit: &ActiveLimit) {
    let names: Vec<String> = (0..NEW_KEYS).map(|key| format!("new:{key:016}")).collect();
    let mut due = Instant::now();
    for name in &names {
        due += NEW_GAP;
        watch.decide(due, || limit.check(name).is_allowed());
    }
}

fn main() -> ExitCode {
    let (deciding, others) = cores();
    stay_on(others);
    let server = RedisServer::start();
    let synced = Arc::new(AtomicU64::new(0));
    let counter = synced.clone();
    let limit = Limit::new("bench", Quota::per_second(1_000).burst(100_000));
    let store = RedisStore::open(&server.url()).expect("a good address");
    let limiter = Limiter::builder()
        .max_keys(2 * (KEYS + NEW_KEYS))
        .limit(limit.sync_interval(INTERVAL))
        .store(store.timeout(RedisStore::TIMEOUT_MAX))
        .listen(move |event| {
            if let Event::Synced { keys, error: None, .. } = event {
                counter.fetch_add(*keys as u64, Ordering::Relaxed);
            }
        })
        .build()
        .expect("a good limit");
    let limit = limiter.limit("bench").expect("it was built with it");
    stay_on(deciding);
    let names: Vec<String> = (0..KEYS).map(|user| format!("user:{user:015}")).collect();
    run_up(&limit, &names);
    let mut watch = Watch::new();
    let by_tick = known(&mut watch, &limit, &names, &synced);
    watch.show("known keys");
    println!("keys synced in a tick of {TICK:?}: {by_tick:?}");
    let mean = by_tick.iter().sum::<u64>() / by_tick.len().max(1) as u64;
    assert!(SYNCED_PCT.contains(&(mean * 100 / KEYS as u64)), "not {KEYS} in a tick");
    let mut watch_new = Watch::new();
    new(&mut watch_new, &limit);
    watch_new.show("new keys");
    if watch.is_good() {
        return ExitCode::SUCCESS;
    }
    eprintln!("one known key in ten thousand takes more than {GOAL:?}");
    ExitCode::FAILURE
}
