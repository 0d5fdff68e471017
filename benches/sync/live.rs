//! A whole limiter on the real clock: its batches as they come, and what it works itself.
//!
//! The load of a case asks for all its keys in turn. The bare script runs on a server of its own,
//! in between, with batches of the same mean size and for as many keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tidegate::{ActiveLimit, Event, Limit, Limiter, Quota, RedisStore};

use crate::node::Bare;
use crate::server::{Server, Spent};
use crate::{Contender, median};

/// Keys, and requests a second for all of them.
const CASES: [(usize, usize); 4] =
    [(1_000, 50_000), (10_000, 100_000), (100_000, 100_000), (1_000_000, 100_000)];
const CASES_QUICK: [(usize, usize); 2] = [(1_000, 50_000), (100_000, 100_000)];
const ROUNDS: usize = 7;
const RUN_UP: Duration = Duration::from_secs(4);
const ROUND: Duration = Duration::from_millis(700);
/// Requests between two looks at the clock.
const STRIDE: usize = 50;

/// What the limiter did.
#[derive(Clone, Copy, Default)]
struct Work {
    keys: u64,
    store: Spent,
    /// Processor time of the process without the thread that makes the load.
    own_us: f64,
}

struct Live {
    limit: ActiveLimit,
    names: Vec<String>,
    next: usize,
    per_second: usize,
    synced: Arc<AtomicU64>,
}

impl Live {
    fn new(url: &str, keys: usize, per_second: usize) -> Self {
        let synced = Arc::new(AtomicU64::new(0));
        let counter = synced.clone();
        let limiter = Limiter::builder()
            .limit(Limit::new("api", Quota::per_second(100)))
            .store(RedisStore::open(url).expect("a good address"))
            .max_keys(2 * keys)
            .listen(move |event| {
                if let Event::Synced { keys, error: None, .. } = event {
                    counter.fetch_add(*keys as u64, Ordering::Relaxed);
                }
            })
            .build()
            .expect("a good limit");
        let limit = limiter.limit("api").expect("it was built with it");
        let names = (0..keys).map(|number| format!("user:{number:015}")).collect();
        Self { limit, names, next: 0, per_second, synced }
    }

    /// Asks for keys, evenly, for so long.
    fn load(&mut self, time: Duration) {
        let began = Instant::now();
        let mut asked = 0;
        while began.elapsed() < time {
            let due = (began.elapsed().as_secs_f64() * self.per_second as f64) as usize;
            if asked >= due {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            for _ in 0..STRIDE {
                let _ = self.limit.check(&self.names[self.next]);
                self.next = (self.next + 1) % self.names.len();
            }
            asked += STRIDE;
        }
    }

    fn work(&self, server: &mut Server) -> Work {
        let micros = |clock| {
            let time = clock_gettime(clock);
            time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
        };
        Work {
            keys: self.synced.load(Ordering::Relaxed),
            store: server.spent(),
            own_us: micros(ClockId::ProcessCPUTime) - micros(ClockId::ThreadCPUTime),
        }
    }
}

/// One round: the limiter's figures and the bare script's, a key.
#[derive(Clone, Copy)]
struct Round {
    keys_per_second: f64,
    batch: f64,
    ours: Spent,
    bare: Spent,
    own_us: f64,
}

fn round(live: &mut Live, server: &mut Server, other: &mut Server) -> Round {
    let before = live.work(server);
    live.load(ROUND);
    let after = live.work(server);
    let store = after.store.since(&before.store);
    let keys = (after.keys - before.keys) as f64;
    let batch = keys / store.calls;
    let mut bare = Bare::new(live.names.len(), (batch.round() as usize).max(1));
    let calls = store.calls as usize;
    let before_bare = other.spent();
    for _ in 0..calls {
        bare.call(other);
    }
    let bare_keys = (calls * (batch.round() as usize).max(1)) as f64;
    Round {
        keys_per_second: keys / ROUND.as_secs_f64(),
        batch,
        ours: store.over(keys),
        bare: other.spent().since(&before_bare).over(bare_keys),
        own_us: (after.own_us - before.own_us) / keys,
    }
}

pub(crate) fn run(server: &mut Server, json: bool, quick: bool) {
    let cases: &[(usize, usize)] = if quick { &CASES_QUICK } else { &CASES };
    for &(keys, per_second) in cases {
        server.command(&["FLUSHALL"]);
        let mut other = Server::start();
        let mut live = Live::new(&server.url(), keys, per_second);
        live.load(RUN_UP);
        let rounds: Vec<Round> =
            (0..ROUNDS).map(|_| round(&mut live, server, &mut other)).collect();
        let of = |figure: fn(&Round) -> f64| median(rounds.iter().map(figure));
        let longest_us = rounds.iter().map(|round| round.ours.longest_us).max().unwrap_or(0);
        show(keys, per_second, &of, longest_us, json);
    }
}

fn show(
    keys: usize,
    per_second: usize,
    of: &dyn Fn(fn(&Round) -> f64) -> f64,
    longest_us: u64,
    json: bool,
) {
    let (ours, bare) = (of(|round| round.ours.script_us), of(|round| round.bare.script_us));
    let (cpu, bare_cpu) = (of(|round| round.ours.cpu_us), of(|round| round.bare.cpu_us));
    let (synced, batch, own) =
        (of(|round| round.keys_per_second), of(|round| round.batch), of(|round| round.own_us));
    let (ratio, cpu_ratio) = (ours / bare, cpu / bare_cpu);
    if json {
        println!(
            "{{\"contender\":\"live\",\"keys\":{keys},\"requests_per_second\":{per_second},\
             \"keys_synced_per_second\":{synced:.0},\"batch\":{batch:.1},\
             \"script_us_per_key\":{ours:.3},\"bare_script_us_per_key\":{bare:.3},\
             \"ratio\":{ratio:.3},\"cpu_us_per_key\":{cpu:.3},\"bare_cpu_us_per_key\":{bare_cpu:.3},\
             \"cpu_ratio\":{cpu_ratio:.3},\"longest_us\":{longest_us},\
             \"node_us_per_key\":{own:.3}}}"
        );
    } else {
        println!(
            "{keys:>8} keys, {per_second} requests/s: {synced:>7.0} keys/s synced, {batch:>5.1} a \
             call; {ours:>6.2} us a key, bare {bare:>6.2} us, {ratio:>5.2}x; cpu {cpu:>6.2} us, bare \
             {bare_cpu:>6.2} us, {cpu_ratio:>5.2}x; longest {longest_us} us; node {own:>5.2} us"
        );
    }
}
