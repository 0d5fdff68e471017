//! Every decision is told to listeners once, as what it was, whatever it cost.
#![cfg(feature = "testing")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{Event, Limit, Limiter, Quota};

const ROUNDS: u64 = 40;

/// Allowed, denied and unsure decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    allowed: u64,
    denied: u64,
    unsure: u64,
}

/// Decides about two keys with all kinds of costs; returns what was decided and what was told.
async fn decided_and_told(store: bool) -> (Counts, Counts) {
    let clock = ManualClock::new();
    let told = Arc::new(Mutex::new(Counts::default()));
    let sum = told.clone();
    let builder = Limiter::builder()
        .clock(&clock)
        .limit(Limit::new("api", Quota::per_second(100).burst(100)).credit(1));
    let builder = builder.listen(move |event| {
        if let Event::Decisions { allowed, denied, unsure, .. } = event {
            let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
            sum.allowed += allowed;
            sum.denied += denied;
            sum.unsure += unsure;
        }
    });
    let builder = if store { builder.store(ScriptedStore::new(&clock)) } else { builder };
    let limiter = builder.build().expect("a good limit");
    let api = limiter.limit("api").expect("it was built with it");
    let mut decided = Counts::default();
    for round in 0..ROUNDS {
        for cost in [1, 2, 5, 1, 50, 100, 3] {
            let decision = api.check_n(&format!("key {}", round % 2), cost).expect("a good cost");
            decided.allowed += u64::from(decision.is_allowed());
            decided.denied += u64::from(decision.is_denied());
            decided.unsure += u64::from(!decision.is_sure());
        }
        clock.advance(Duration::from_millis(20));
        limiter.settle().await;
    }
    // Until the last has been reported, and told a second later.
    for _ in 0..400 {
        clock.advance(Duration::from_millis(10));
        limiter.settle().await;
    }
    let told = *told.lock().unwrap_or_else(PoisonError::into_inner);
    (decided, told)
}

#[tokio::test]
async fn what_is_told_of_decisions_is_what_was_decided_with_a_store_and_without() {
    for store in [false, true] {
        let (decided, told) = decided_and_told(store).await;
        assert!(decided.allowed > 0 && decided.denied > 0, "{decided:?}");
        assert_eq!(told, decided, "with a store: {store}");
    }
}
