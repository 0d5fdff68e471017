//! How many instructions a decision takes: what may gate, since it does not depend on who else uses
//! the machine.
//!
//! ```text
//! tests/instructions
//! ```
//!
//! That runs it under callgrind, which counts what happens in [`decide_many`] alone. With the argument `leased` the
//! limiter is the whole hybrid one, with a store; with `group` a decision is about three
//! limits of such a one; with an algorithm's name this node keeps
//! the limit alone.
//!
//! The driver runs only until all keys have leases: how many reports fall among decisions would depend on the machine, and the
//! first decision after each takes some hundred instructions more.
#![allow(clippy::disallowed_methods, reason = "waits for a driver, which lives by the real clock")]

use std::time::{Duration, Instant};

use tidegate::{
    ActiveLimit, FixedWindow, Group, LeakyBucket, Limit, Limiter, MemoryStore, Quota, Rule,
    SlidingLog, SlidingWindow,
};
use tokio::runtime::{Builder, Runtime};

const KEYS: usize = 1_000;
const ROUNDS: usize = 20;
/// What keys spend at once before, in tokens. A lease holds about what was spent of late, and is to last for all rounds,
/// also where the driver has not renewed it since: on a busy machine 100 tokens sometimes left fewer than 20.
const COST_BEFORE: u32 = 4000;
/// Limiters that are asked.
const TIMES: usize = 8;
const LEASED_WITHIN: Duration = Duration::from_secs(60);

/// Denied decisions of all rounds.
#[inline(never)]
fn decide_many(limit: &ActiveLimit, keys: &[String]) -> usize {
    let mut denied = 0;
    for _ in 0..ROUNDS {
        for key in keys {
            denied += usize::from(limit.check(key.as_str()).is_denied());
        }
    }
    denied
}

/// The same of decisions about several limits.
#[inline(never)]
fn decide_many_of_group(group: &Group, keys: &[String]) -> usize {
    let mut denied = 0;
    for _ in 0..ROUNDS {
        for key in keys {
            denied += usize::from(group.check(key.as_str()).is_denied());
        }
    }
    denied
}

fn main() {
    let keys: Vec<String> = (0..KEYS).map(|user| format!("user:{user:015}")).collect();
    let plenty = 1_000_000_000;
    let case = std::env::args().nth(1).unwrap_or_else(|| "leased".to_owned());
    let denied_of: &dyn Fn(&[String]) -> usize = match &*case {
        "leased" => &denied_of_leased,
        "group" => &denied_of_group,
        "token-bucket" => &|keys| denied_of_local(Quota::per_second(plenty).into(), keys),
        "leaky-bucket" => &|keys| denied_of_local(LeakyBucket::per_second(plenty).into(), keys),
        "fixed-window" => &|keys| denied_of_local(FixedWindow::per_day(plenty).into(), keys),
        "sliding-window" => &|keys| denied_of_local(SlidingWindow::per_day(plenty).into(), keys),
        "sliding-log" => &|keys| denied_of_local(SlidingLog::per_day(10_000).into(), keys),
        other => panic!("{other}: leased, group, or an algorithm"),
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
    decide_many(&limit, keys)
}

/// Decides about keys as soon as all of them have leases.
fn denied_of_leased(keys: &[String]) -> usize {
    let (limiter, runtime) = leased(&["bench"]);
    let limit = limiter.limit("bench").expect("it was built with it");
    wait_for_leases(&runtime, keys, |key, cost| is_leased(&limit, key, cost));
    decide_many(&limit, keys)
}

/// Decides about keys by three limits.
fn denied_of_group(keys: &[String]) -> usize {
    const NAMES: [&str; 3] = ["second", "minute", "hour"];
    let (limiter, runtime) = leased(&NAMES);
    let group = limiter.group(NAMES).expect("it was built with them");
    let limits = group.limits();
    wait_for_leases(&runtime, keys, |key, cost| {
        limits.iter().all(|limit| is_leased(limit, key, cost))
    });
    decide_many_of_group(&group, keys)
}

/// A limiter of limits that are plenty, and where its driver runs: while somebody waits there.
fn leased(names: &[&str]) -> (Limiter, Runtime) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let entered = runtime.enter();
    let quota = Quota::per_second(1_000_000_000);
    // Leases live for longer than all of this takes.
    let limit = |name: &&str| Limit::new(*name, quota).sync_interval(Duration::from_secs(5));
    let builder = names.iter().map(limit).fold(Limiter::builder(), tidegate::Builder::limit);
    let limiter = builder.store(MemoryStore::new()).build().expect("good limits");
    drop(entered);
    (limiter, runtime)
}

fn is_leased(limit: &ActiveLimit, key: &str, cost: u32) -> bool {
    limit.check_n(key, cost).is_ok_and(|decision| decision.is_sure())
}

fn wait_for_leases(runtime: &Runtime, keys: &[String], is_leased: impl Fn(&str, u32) -> bool) {
    let deadline = Instant::now() + LEASED_WITHIN;
    // Then once more for one token, since the first decision after each sync tells the driver.
    while [COST_BEFORE, 1].into_iter().any(|cost| {
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(20)).await });
        keys.iter().filter(|key| !is_leased(key, cost)).count() > 0
    }) {
        assert!(Instant::now() < deadline, "no leases within {LEASED_WITHIN:?}");
    }
}
