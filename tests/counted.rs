//! Every decision is told to listeners once, as what it was, whatever it cost.
#![cfg(feature = "testing")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{Decision, Event, Limit, Limiter, Quota, Switch};

const ROUNDS: u64 = 40;

/// Allowed, denied and unsure decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    allowed: u64,
    denied: u64,
    unsure: u64,
}

impl Counts {
    fn count(&mut self, decision: Decision) {
        self.allowed += u64::from(decision.is_allowed());
        self.denied += u64::from(decision.is_denied());
        self.unsure += u64::from(!decision.is_sure());
    }
}

/// Decides about three keys with all kinds of costs; returns what was decided and what was told.
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
    let pass = async |times: u64| {
        for _ in 0..times {
            clock.advance(Duration::from_millis(10));
            limiter.settle().await;
        }
    };
    // Until the store gives what it has.
    pass(200).await;
    let mut decided = Counts::default();
    // Of a key that is new: they wait for the store, if there is one.
    let wait = |cost| api.check_sure_n("waited for", cost);
    let waiting = async { tokio::join!(wait(2), wait(30), wait(90)) };
    let others = async {
        for round in 0..ROUNDS {
            for cost in [1, 2, 5, 1, 50, 100, 3] {
                let key = format!("key {}", round % 2);
                decided.count(api.check_n(&key, cost).expect("a good cost"));
            }
            pass(2).await;
        }
        // Until the last has been reported, and told a second later.
        pass(400).await;
    };
    let (waited, ()) = tokio::join!(waiting, others);
    for decision in <[_; 3]>::from(waited) {
        decided.count(decision.expect("a good cost"));
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

#[tokio::test]
async fn denials_of_a_cost_that_is_too_high_are_told_in_shadow_mode() {
    for store in [false, true] {
        let clock = ManualClock::new();
        let told = Arc::new(AtomicU64::new(0));
        let sum = told.clone();
        let builder = Limiter::builder()
            .clock(&clock)
            .limit(Limit::new("api", Quota::per_hour(5)).switch(Switch::Shadow));
        let builder = builder.listen(move |event| {
            if let Event::Decisions { allowed: 0, denied, is_shadow: true, .. } = event {
                sum.fetch_add(*denied, Ordering::Relaxed);
            }
        });
        let builder = if store { builder.store(ScriptedStore::new(&clock)) } else { builder };
        let limiter = builder.build().unwrap();
        let api = limiter.limit("api").unwrap();
        assert!(api.check_n("a", 6).unwrap().is_shadow_denied());
        let both = [api.on("a").cost(6), api.on("b").cost(7)];
        assert!(limiter.check_all(both).await.unwrap().is_shadow_denied());
        for _ in 0..400 {
            clock.advance(Duration::from_millis(10));
            limiter.settle().await;
        }
        assert_eq!(told.load(Ordering::Relaxed), 3, "with a store: {store}");
    }
}
