//! Costs that are known later, on eight nodes in virtual time: what is spent, and how deep debts become.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/model_tokens.rs"]
mod model_tokens;
#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::time::Duration;

use model_tokens::{CREDIT, KeyOutcome, LIMIT, NODES, Play, VirtualTime, play};
use tidegate::testing::ScriptedStore;
use tidegate::{Limit, Limiter, Quota};
use virtual_nodes::VirtualNodes;

/// Three times the limit on one key, on a store in memory.
fn outcome_of(play_of: &Play) -> KeyOutcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcome = runtime.block_on(async {
        let time = VirtualTime::default();
        let store = ScriptedStore::new(&time.clock);
        let quota = Quota::per_minute(play_of.tokens_per_minute).burst(play_of.burst);
        let node = |_| {
            let builder = Limiter::builder().limit(Limit::new(LIMIT, quota)).lanes(1);
            builder.store(store.clone()).clock(&time.clock).build().unwrap()
        };
        let nodes: Vec<Limiter> = (0..NODES).map(node).collect();
        play(play_of, &time, &nodes).await
    });
    outcome.keys[0].clone()
}

fn load() -> Play {
    Play {
        tokens_per_minute: 600_000,
        burst: 100_000,
        loads: vec![3.0],
        estimates: (400.0, 4000.0),
        factors: (0.25, 4.0),
        settled_after_us: 1_000_000,
        minutes: 3,
        seed: 1,
    }
}

/// In percent of what flows in, and of the burst.
fn spent_pct(play_of: &Play, outcome: &KeyOutcome) -> f64 {
    100.0 * outcome.spent as f64 / (play_of.refill() + play_of.burst as f64)
}

#[test]
fn estimates_wrong_by_up_to_four_times_spend_the_limit_to_a_hundredth() {
    let outcome = outcome_of(&load());
    let spent = spent_pct(&load(), &outcome);
    println!("{spent:.2}% spent, {outcome:?}");
    assert!((99.0..=101.0).contains(&spent), "{spent:.2}% spent");
    // The load is denied in part, and debts happen.
    assert!(outcome.allowed < outcome.requests * 2 / 3, "{outcome:?}");
    assert!(outcome.deepest_debt <= outcome.most_beyond + CREDIT, "{outcome:?}");
    assert!(outcome.deepest_debt > 0.0, "{outcome:?}");
}

/// Half of the refill stayed leased in spite of the debt. It was spent four times over, so that debt grew.
#[test]
fn requests_that_all_cost_four_times_their_estimate_owe_no_more_than_was_in_flight() {
    let small = Play { estimates: (40.0, 400.0), factors: (4.0, 4.0), minutes: 2, ..load() };
    let outcome = outcome_of(&small);
    let spent = spent_pct(&small, &outcome);
    println!("{spent:.2}% spent, {outcome:?}");
    assert!(outcome.deepest_debt <= outcome.most_beyond + CREDIT, "{outcome:?}");
    // What is owed at the end comes on top.
    assert!((99.0..=102.0).contains(&spent), "{spent:.2}% spent");
}

/// The store wanted all refill back because of the debt. Nodes took it that there was plenty, and kept theirs: four times the
/// limit was spent, for ever.
#[test]
fn costs_beyond_estimates_that_are_settled_at_once_are_repaid_before_more_is_spent() {
    const SECONDS: u64 = 20;
    let (large, small) = ((10_000, 100_000), (10, 20));
    for ((rate, burst), count, every_ms, estimate, cost) in [
        (large, 1, 10, 1000, 4000),
        (large, 2, 20, 1000, 4000),
        (large, 1, 50, 100, 5000),
        (small, 1, 50, 1, 4),
        (small, 4, 100, 1, 4),
    ] {
        let limit = Limit::new(LIMIT, Quota::per_second(rate).burst(burst));
        let nodes = VirtualNodes::new(count, std::slice::from_ref(&limit), |builder| builder);
        let (mut spent, step) = (0, Duration::from_millis(every_ms));
        for _ in 0..SECONDS * 1000 / every_ms {
            for node in &nodes.nodes {
                let api = node.limit(LIMIT).unwrap();
                if let Ok(reservation) = nodes.wait(api.reserve("key", estimate)) {
                    reservation.commit(cost);
                    spent += cost;
                }
            }
            nodes.pass(step, step);
        }
        let there_are = (burst + SECONDS * rate) as u32;
        let most = there_are + 3 * count as u32 * cost;
        println!("{spent} of {most}, {count} nodes, each {every_ms} ms");
        assert!(spent <= most, "{spent} of {most}, {count} nodes, each {every_ms} ms");
        assert!(
            spent >= there_are * 9 / 10,
            "{spent} of {most}, {count} nodes, each {every_ms} ms"
        );
    }
}

/// What a node held could be spent after a request had cost all of it.
#[test]
fn cost_beyond_an_estimate_takes_the_tokens_that_the_node_holds_first() {
    let limit = Limit::new(LIMIT, Quota::per_hour(10_000));
    let nodes = VirtualNodes::new(2, std::slice::from_ref(&limit), |builder| builder);
    let api = nodes.nodes[0].limit(LIMIT).unwrap();
    for _ in 0..200 {
        let _ = api.check_n("key", 10).unwrap();
        nodes.pass(Duration::from_millis(5), Duration::from_millis(5));
    }
    let held = api.check_n("key", 0).unwrap().remaining();
    assert!(held > 100, "{held}");
    let reservation = nodes.wait(api.reserve("key", 10)).unwrap();
    reservation.commit(10_000);
    nodes.settle();
    let after = api.check("key");
    assert!(after.is_denied(), "{after:?}");
}

/// A node with a runtime of its own, which ends when its process does.
struct Process {
    runtime: tokio::runtime::Runtime,
    limiter: Limiter,
}

impl Process {
    fn start(limit: &Limit, time: &VirtualTime, store: &ScriptedStore) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let entered = runtime.enter();
        let builder = Limiter::builder().limit(limit.clone()).lanes(1);
        let limiter = builder.store(store.clone()).clock(&time.clock).build().unwrap();
        drop(entered);
        Self { runtime, limiter }
    }

    fn settle(&self) {
        self.runtime.block_on(self.limiter.settle());
    }

    /// Waits for an answer of the store.
    fn wait<T>(&self, time: &VirtualTime, answer: impl Future<Output = T>) -> T {
        self.runtime.block_on(async {
            let mut answer = std::pin::pin!(answer);
            loop {
                tokio::select! {
                    biased;
                    answer = &mut answer => return answer,
                    () = self.limiter.settle() => time.clock.advance(Duration::from_millis(1)),
                }
            }
        })
    }
}

#[test]
fn process_that_dies_with_open_reservations_has_spent_its_estimates() {
    const TOKENS: u32 = 1000;
    let (time, hours) = (VirtualTime::default(), Duration::from_secs(8 * 3600));
    let store = ScriptedStore::new(&time.clock);
    // As good as no refill.
    let limit = Limit::new(LIMIT, Quota::new(1, hours).burst(TOKENS.into())).strict();
    let [dying, living] = [(); 2].map(|()| Process::start(&limit, &time, &store));
    let pass = |nodes: &[&Process], millis: u64| {
        for _ in 0..millis / 10 {
            time.clock.advance(Duration::from_millis(10));
            for node in nodes {
                node.settle();
            }
        }
    };
    pass(&[&dying, &living], 2000);
    let limit = dying.limiter.limit(LIMIT).unwrap();
    let reserve = |estimate| dying.wait(&time, limit.reserve("key", estimate)).unwrap();
    let open = [300, 50].map(reserve);
    reserve(100).commit(20);
    // It gives back what it does not need: what a process holds is spent too when it dies.
    pass(&[&dying, &living], 60_000);
    // Nothing is told any more.
    drop(dying.runtime);
    drop(open);
    let limit = living.limiter.limit(LIMIT).unwrap();
    let mut drained = 0;
    for _ in 0..200 {
        for cost in [100, 10] {
            let decision = living.wait(&time, limit.check_sure_n("key", cost)).unwrap();
            drained += if decision.is_allowed() { cost } else { 0 };
        }
        pass(&[&living], 100);
    }
    assert_eq!(drained, TOKENS - 370);
}
