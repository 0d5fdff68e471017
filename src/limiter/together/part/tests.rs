//! A part that surely fits is one that a look allows for sure.

use std::collections::BTreeSet;

use super::*;
use crate::algorithm::{FixedWindow, LeakyBucket, SlidingLog, SlidingWindow};
use crate::builder::Builder;
use crate::driver::manual::ManualClock;
use crate::limit::Limit;
use crate::limiter::Limiter;
use crate::quota::Quota;
use crate::store::MemoryStore;

const KEYS: [&[u8]; 3] = [b"a", b"b", b"a key that is longer than those in a bucket"];
const ROUNDS: u32 = 4000;

/// A limit of each kind, with 3 tokens or slots at once.
fn limits() -> Vec<Limit> {
    let quota = Quota::per_second(10).burst(3);
    let slots = LeakyBucket::per_second(10).queue(Duration::from_millis(200));
    let shared = [
        Limit::new("leased", quota),
        Limit::new("leased-window", FixedWindow::per_second(3)),
        Limit::new("shared-slots", slots),
        Limit::new("exact", quota).exact(),
    ];
    let alone = [
        Limit::new("bucket", quota),
        Limit::new("slots", slots),
        Limit::new("window", FixedWindow::per_second(3)),
        Limit::new("sliding", SlidingWindow::per_second(3)),
        Limit::new("log", SlidingLog::per_second(3)),
    ];
    shared.into_iter().chain(alone.map(Limit::local)).collect()
}

#[tokio::test]
async fn part_that_surely_fits_is_surely_allowed_by_a_look() {
    let clock = ManualClock::new();
    let time = clock.clone();
    let store = MemoryStore::new().with_time(move || time.now(), 0);
    let builder = limits().into_iter().fold(Limiter::builder(), Builder::limit);
    let limiter = builder.store(store).clock(&clock).build().unwrap();
    let names = limits().iter().map(|limit| limit.name().to_owned()).collect::<Vec<_>>();
    let mut random = fastrand::Rng::with_seed(1);
    let mut seen = BTreeSet::new();
    for _ in 0..ROUNDS {
        clock.advance(Duration::from_micros(random.u64(0..40_000)));
        if random.bool() {
            limiter.settle().await;
        }
        for name in &names {
            let limit = limiter.async_limit(name).unwrap().0;
            let key = KEYS[random.usize(0..KEYS.len())];
            for patience in [Patience::None, Patience::Store, Patience::Slot] {
                for cost in 0..=2 {
                    let part = Part { limit: &limit, key, plain: None, cost, patience };
                    let look = part.look();
                    for tokens in 1..=2 {
                        let fits = part.surely_fits(tokens);
                        let is_allowed = look.is_some_and(|it| {
                            it.is_sure() && it.is_allowed() && it.remaining() >= tokens.into()
                        });
                        assert!(is_allowed || !fits, "{name}: {cost} of {tokens}: {look:?}");
                        if cost == 1 {
                            seen.insert((name, tokens, fits));
                        }
                    }
                }
            }
            if random.bool() {
                continue;
            }
            if limit.is_decided_by_store() {
                // Of an outage: this node has its share of the key.
                let _ = limit.by_outage_policy(key, 1, 0);
            } else {
                let patience = Patience::None;
                let _ = Part { limit: &limit, key, plain: None, cost: 1, patience }.decide();
            }
        }
    }
    for name in &names {
        let may_fit = !matches!(&**name, "exact" | "slots" | "shared-slots");
        for tokens in 1..=2 {
            assert!(seen.contains(&(name, tokens, false)), "{name} always has {tokens}");
            assert_eq!(seen.contains(&(name, tokens, true)), may_fit, "{name}: {tokens}");
        }
    }
}
