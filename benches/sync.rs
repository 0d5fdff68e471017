//! What a sync costs the store: the script as it is shipped, next to the least that any script
//! which keeps token buckets in Redis would do.
//!
//! ```text
//! cargo bench --bench sync -- [--json] [--quick] [--live]
//! ```
//!
//! Starts a redis-server of its own. Each case is a number of keys and of keys a call; its
//! contenders take turns, round by round, over keys of the same length in the same random order:
//!
//! | contender | what it does |
//! |---|---|
//! | `ours` | the shipped script, with the batches of a node whose keys are all in use |
//! | `bare` | `MGET`, and for each key: unpack a record, refill it, take tokens, pack it, `SET` with `PX` |
//! | `empty` | nothing: what it costs to bring keys and arguments to a script at all |
//!
//! A case fails where a batch was refused, or the script gave nothing. With `--live` a whole limiter
//! syncs its keys instead, in batches as they come.
#![allow(clippy::disallowed_methods, reason = "waits for a server and for a driver's real clock")]

use std::time::Duration;

mod error {
    pub(crate) use tidegate::StoreError;
}

#[path = "../src/quota/curve.rs"]
mod curve;
mod quota {
    pub(crate) use super::curve::Curve;

    /// As in `src/quota.rs`, whose own is not public.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Scale {
        pub rate: i64,
        pub token: i64,
        pub burst: i64,
        pub curve: Curve,
    }
}

#[path = "sync/live.rs"]
mod live;
/// The wire's own code: what is measured here is what nodes send.
#[path = "../src/sync/message.rs"]
#[allow(dead_code, unused_imports, reason = "a bench needs a part of it, and none of its tests")]
mod message;
#[path = "sync/node.rs"]
mod node;
#[path = "../tests/parts/redis_server.rs"]
mod redis_server;
#[path = "sync/server.rs"]
mod server;

use node::{Bare, Empty, Node};
use server::{Server, Spent};

/// Keys, and keys a call.
const CASES: [(usize, usize); 11] = [
    (1_000, 1),
    (1_000, 8),
    (1_000, 16),
    (1_000, 64),
    (1_000, 128),
    (1_000, 250),
    (10_000, 128),
    (100_000, 16),
    (100_000, 128),
    (1_000_000, 16),
    (1_000_000, 128),
];
const CASES_QUICK: [(usize, usize); 4] = [(1_000, 1), (1_000, 8), (1_000, 128), (100_000, 128)];
/// Rounds of each contender; the first only warms up.
const ROUNDS: usize = 7;
/// Keys that a round syncs, at least.
const ROUND_KEYS: usize = 8_000;

/// One who sends batches.
trait Contender {
    fn name(&self) -> &'static str;
    /// Sends the next batch.
    fn call(&mut self, server: &mut Server);
    /// Time that the node spent on batches and replies since it was asked last.
    fn own(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// A contender's medians.
struct Figures {
    name: &'static str,
    /// In the script, by `commandstats`.
    script_us: f64,
    /// All of the server's processor time, by `INFO cpu`.
    cpu_us: f64,
    longest_us: u64,
    longest_median_us: u64,
    bytes_in: f64,
    bytes_out: f64,
    node_us: f64,
}

fn median<T: PartialOrd + Copy>(values: impl Iterator<Item = T>) -> T {
    let mut values: Vec<T> = values.collect();
    values.sort_by(|a, b| a.partial_cmp(b).expect("figures can be compared"));
    values[values.len() / 2]
}

fn measure(server: &mut Server, keys: usize, batch: usize) -> Vec<Figures> {
    server.command(&["FLUSHALL"]);
    let mut contenders: [Box<dyn Contender>; 3] = [
        Box::new(Node::new(keys, batch)),
        Box::new(Bare::new(keys, batch)),
        Box::new(Empty::new(keys, batch)),
    ];
    let calls = ROUND_KEYS.div_ceil(batch);
    // Every key is in the store before anything counts.
    for contender in &mut contenders[..2] {
        for _ in 0..keys.div_ceil(batch) {
            contender.call(server);
        }
    }
    let mut rounds: [Vec<(Spent, Duration)>; 3] = Default::default();
    for round in 0..ROUNDS {
        for (contender, spent) in contenders.iter_mut().zip(&mut rounds) {
            contender.own();
            let before = server.spent();
            for _ in 0..calls {
                contender.call(server);
            }
            let after = server.spent();
            if round > 0 {
                spent.push((after.since(&before), contender.own()));
            }
        }
    }
    let a_key = |amount: f64| amount / (calls * batch) as f64;
    let figures = |name: &'static str, rounds: &[(Spent, Duration)]| Figures {
        name,
        script_us: a_key(median(rounds.iter().map(|(spent, _)| spent.script_us))),
        cpu_us: a_key(median(rounds.iter().map(|(spent, _)| spent.cpu_us))),
        longest_us: rounds.iter().map(|(spent, _)| spent.longest_us).max().unwrap_or(0),
        longest_median_us: median(rounds.iter().map(|(spent, _)| spent.longest_us)),
        bytes_in: a_key(median(rounds.iter().map(|(spent, _)| spent.bytes_in))),
        bytes_out: a_key(median(rounds.iter().map(|(spent, _)| spent.bytes_out))),
        node_us: a_key(median(rounds.iter().map(|(_, own)| own.as_secs_f64() * 1e6))),
    };
    let named = contenders.iter().map(|contender| contender.name());
    named.zip(&rounds).map(|(name, rounds)| figures(name, rounds)).collect()
}

fn show(keys: usize, batch: usize, figures: &[Figures], json: bool) {
    let bare = figures.iter().find(|figures| figures.name == "bare").expect("it took part");
    for of in figures {
        let (ratio, cpu_ratio) = (of.script_us / bare.script_us, of.cpu_us / bare.cpu_us);
        if json {
            println!(
                "{{\"contender\":\"{}\",\"keys\":{keys},\"batch\":{batch},\
                 \"script_us_per_key\":{:.3},\"ratio\":{ratio:.3},\"cpu_us_per_key\":{:.3},\
                 \"cpu_ratio\":{cpu_ratio:.3},\"longest_us\":{},\"longest_median_us\":{},\
                 \"bytes_in_per_key\":{:.1},\"bytes_out_per_key\":{:.1},\"node_us_per_key\":{:.3}}}",
                of.name,
                of.script_us,
                of.cpu_us,
                of.longest_us,
                of.longest_median_us,
                of.bytes_in,
                of.bytes_out,
                of.node_us,
            );
        } else {
            println!(
                "{:>8} keys {batch:>4} a call  {:<6} {:>6.2} us {ratio:>5.2}x  cpu {:>6.2} us \
                 {cpu_ratio:>5.2}x  longest {:>5} us (median {:>5})  {:>5.0} B in {:>5.0} B out  \
                 node {:>5.2} us",
                keys,
                of.name,
                of.script_us,
                of.cpu_us,
                of.longest_us,
                of.longest_median_us,
                of.bytes_in,
                of.bytes_out,
                of.node_us,
            );
        }
    }
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let is_asked = |flag: &str| asked.iter().any(|argument| argument == flag);
    let json = is_asked("--json");
    let mut server = Server::start();
    if is_asked("--live") {
        live::run(&mut server, json, is_asked("--quick"));
        return;
    }
    let cases: &[(usize, usize)] = if is_asked("--quick") { &CASES_QUICK } else { &CASES };
    for &(keys, batch) in cases {
        let figures = measure(&mut server, keys, batch);
        show(keys, batch, &figures, json);
    }
}
