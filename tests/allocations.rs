//! A decision about a key that is known allocates nothing, whatever it says and however the key was
//! left.

#![cfg(feature = "testing")]

use std::time::Duration;

use allocation_counter::measure;
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{ActiveLimit, Limit, Limiter, Quota};

/// Of 38 bytes: the longest key that is told without the heap.
const KEY: &str = "user:0123456789012345678901234567890123";

fn limiter(clock: &ManualClock, quota: Quota) -> (Limiter, ActiveLimit) {
    let limiter = Limiter::builder()
        .limit(Limit::new("api", quota))
        .store(ScriptedStore::new(clock))
        .clock(clock)
        .build()
        .expect("a good limit");
    let api = limiter.limit("api").expect("it was built with it");
    (limiter, api)
}

/// Lets the driver do what is due for so long.
async fn pass(limiter: &Limiter, clock: &ManualClock, time: Duration) {
    for _ in 0..time.as_millis() / 10 {
        clock.advance(Duration::from_millis(10));
        limiter.settle().await;
    }
}

/// Allocations of this thread meanwhile.
fn allocations(decide: impl FnMut()) -> u64 {
    measure(decide).count_total
}

#[tokio::test]
async fn a_known_key_costs_no_allocation_allowed_or_denied_by_key_or_by_handle() {
    let key = &KEY[..38];
    let clock = ManualClock::new();
    let (limiter, api) = limiter(&clock, Quota::per_second(1000).burst(100));
    assert!(allocations(|| drop(api.handle("another").unwrap())) > 0, "they are counted");
    let handle = api.handle(key).unwrap();
    for _ in 0..50 {
        for _ in 0..20 {
            let _ = api.check(key).unwrap();
        }
        pass(&limiter, &clock, Duration::from_millis(10)).await;
    }
    let (mut allowed, mut denied) = (0, 0);
    let count = allocations(|| {
        for _ in 0..500 {
            for decision in [api.check(key).unwrap(), handle.check()] {
                allowed += u64::from(decision.is_allowed());
                denied += u64::from(decision.is_denied());
            }
        }
        let _ = api.check_n(key, 50).unwrap();
    });
    assert!(allowed > 0 && denied > 0, "{allowed} allowed, {denied} denied");
    assert_eq!(count, 0, "allocations in {} decisions", allowed + denied);
}

#[tokio::test]
async fn a_key_that_has_rested_costs_no_allocation_when_it_is_asked_for_again() {
    let key = &KEY[..38];
    let clock = ManualClock::new();
    let (limiter, api) = limiter(&clock, Quota::per_second(1000).burst(100));
    for _ in 0..3 {
        // The engine has closed its books on it by now, and does not know it any more.
        pass(&limiter, &clock, Duration::from_secs(3)).await;
        let mut allowed = false;
        let count = allocations(|| allowed = api.check(key).unwrap().is_allowed());
        assert!(allowed);
        if clock.now().as_micros() > 4_000_000 {
            assert_eq!(count, 0, "allocations");
        }
        limiter.settle().await;
    }
}
