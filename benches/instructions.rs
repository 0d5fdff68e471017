//! How many instructions a decision takes: what may gate, since it does not depend on who else uses
//! the machine.
//!
//! ```text
//! tests/instructions
//! ```
//!
//! That runs it under callgrind, which counts what happens in [`decide_many`] alone. With the argument `leased` the
//! limiter is the whole hybrid one, with a store, whose driver runs meanwhile; with an algorithm's name this node keeps
//! the limit alone.
#![allow(clippy::disallowed_methods, reason = "waits for a driver, which lives by the real clock")]

use std::time::{Duration, Instant};

use tidegate::{
    ActiveLimit, FixedWindow, LeakyBucket, Limit, Limiter, MemoryStore, Quota, Rule, SlidingLog,
    SlidingWindow,
};

const KEYS: usize = 1_000;
const ROUNDS: usize = 20;
/// So many limiters are asked: a sync that falls among the decisions of one tells little then.
const TIMES: usize = 16;
const LEASED_WITHIN: Duration = Duration::from_secs(60);

/// Denied of so many rounds of decisions.
#[inline(never)]
fn decide_many(limit: &ActiveLimit, keys: &[String], rounds: usize) -> usize {
    let mut denied = 0;
    for _ in 0..rounds {
        for key in keys {
            denied += usize::from(limit.check(key.as_str()).is_denied());
        }
    }
    denied
}

fn main() {
    let keys: Vec<String> = (0..KEYS).map(|user| format!("user:{user:015}")).collect();
    let plenty = 1_000_000_000;
    let denied_of: &dyn Fn(&[String]) -> usize =
        match std::env::args().nth(1).as_deref().unwrap_or("leased") {
            "leased" => &denied_of_leased,
            "token-bucket" => &|keys| denied_of_local(Quota::per_second(plenty).into(), keys),
            "leaky-bucket" => &|keys| denied_of_local(LeakyBucket::per_second(plenty).into(), keys),
            "fixed-window" => &|keys| denied_of_local(FixedWindow::per_day(plenty).into(), keys),
            "sliding-window" => {
                &|keys| denied_of_local(SlidingWindow::per_day(plenty).into(), keys)
            }
            "sliding-log" => &|keys| denied_of_local(SlidingLog::per_day(10_000).into(), keys),
            other => panic!("{other}: leased, or an algorithm"),
        };
    let denied: usize = (0..TIMES).map(|_| denied_of(&keys)).sum();
    println!("decisions {} denied {denied}", TIMES * ROUNDS * KEYS);
}

/// Decides about keys that have been asked for. A log has 100 entries by then.
fn denied_of_local(rule: Rule, keys: &[String]) -> usize {
    let limit = tidegate::local(rule).expect("a good limit");
    for _ in 0..100 {
        assert!(keys.iter().all(|key| limit.check(key.as_str()).is_allowed()));
    }
    decide_many(&limit, keys, ROUNDS)
}

/// Decides about keys as soon as all of them have leases.
fn denied_of_leased(keys: &[String]) -> usize {
    // Under callgrind many more syncs fall among as many decisions.
    let quota = Quota::per_second(1_000_000_000);
    let limit = Limit::new("bench", quota).sync_interval(Duration::from_secs(5));
    let limiter = Limiter::builder().limit(limit).store(MemoryStore::new()).build();
    let limiter = limiter.expect("a good limit");
    let limit = limiter.limit("bench").expect("it was built with it");
    let deadline = Instant::now() + LEASED_WITHIN;
    let unsure = |key: &&String| !limit.check(key.as_str()).is_sure();
    // All of them twice in a row, since the first decision after each sync tells the driver.
    while (0..2).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        keys.iter().filter(unsure).count() > 0
    }) {
        assert!(Instant::now() < deadline, "no leases within {LEASED_WITHIN:?}");
    }
    decide_many(&limit, keys, ROUNDS)
}
