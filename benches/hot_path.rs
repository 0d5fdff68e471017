//! What a decision costs, next to governor's: by key and by handle, allowed and denied.
//!
//! ```text
//! cargo bench --bench hot_path
//! ```
//!
//! Each group is one case, its contenders one after the other:
//!
//! | contender | what it is |
//! |---|---|
//! | `tidegate alone` | a limiter without a store |
//! | `tidegate hybrid` | a limiter that is kept in step through a store, its driver running meanwhile |
//! | `governor` | by key its keyed limiter (`DashMap`, `String`), by handle its direct one |
//!
//! A case that measures something else than its name says fails: the decisions are counted, and so
//! are the syncs of hybrid limiters.
#![allow(clippy::disallowed_methods, reason = "waits for a driver, which lives by the real clock")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter};
use tidegate::{ActiveLimit, Event, Handle, Limit, Limiter, MemoryStore, Quota};

const WARM_UP: Duration = Duration::from_millis(500);
const MEASURE: Duration = Duration::from_secs(1);
const SAMPLES: usize = 20;
/// One decision in so many may go the other way: a drained key's refill, a lease on its way.
const STRAYS_ONE_IN: u64 = 1000;
/// With fewer calls than this a case was only tried (`--test`) and lasted no sync interval.
const MEASURED_CALLS_MIN: u64 = 1_000_000;
/// A node that holds no leases by then never will.
const LEASED_WITHIN: Duration = Duration::from_secs(5);

/// What a case's decisions are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// More tokens a second than anybody can ask for.
    Allowed,
    /// One key, drained, whose refill is as good as nothing.
    Denied,
}

impl Case {
    /// The rate per second, and the burst, in tokens.
    const fn tokens(self) -> u32 {
        match self {
            Self::Allowed => 1_000_000_000,
            Self::Denied => 100,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
        }
    }
}

/// tidegate as a contender.
struct Tidegate {
    limit: ActiveLimit,
    /// Batches that the store took; `None` without a store.
    syncs: Option<Arc<AtomicU64>>,
}

impl Tidegate {
    fn alone(case: Case) -> Self {
        Self { limit: active(Limiter::builder(), case), syncs: None }
    }

    fn hybrid(case: Case) -> Self {
        let syncs = Arc::new(AtomicU64::new(0));
        let counter = syncs.clone();
        let builder = Limiter::builder().store(MemoryStore::new()).listen(move |event| {
            if let Event::Synced { error: None, .. } = event {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { limit: active(builder, case), syncs: Some(syncs) }
    }

    /// Checks all keys until no answer is given on credit any more.
    fn warm_up(&self, keys: &[String]) {
        let deadline = Instant::now() + LEASED_WITHIN;
        let sure = |key: &String| self.limit.check(key).is_sure();
        while keys.iter().filter(|key| !sure(key)).count() > 0 {
            assert!(Instant::now() < deadline, "no leases within {LEASED_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn handle(&self) -> Handle {
        self.limit.handle("one")
    }

    /// Measures `is_denied`, during which the driver must have been at work.
    fn measure(&self, group: &mut Group<'_>, case: Case, is_denied: impl FnMut() -> bool) {
        let count = |syncs: &Arc<AtomicU64>| syncs.load(Ordering::Relaxed);
        let before = self.syncs.as_ref().map(count);
        let name = if self.syncs.is_some() { "tidegate hybrid" } else { "tidegate alone" };
        let calls = measure(group, name, case, is_denied);
        let idle = before.is_some() && self.syncs.as_ref().map(count) == before;
        assert!(!idle || calls < MEASURED_CALLS_MIN, "{name}: nothing was synced meanwhile");
    }
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

fn active(builder: tidegate::Builder, case: Case) -> ActiveLimit {
    let quota = Quota::per_second(case.tokens().into());
    let limiter = builder.limit(Limit::new("bench", quota)).build().expect("a good quota");
    limiter.limit("bench").expect("it was built with it")
}

fn governor_quota(case: Case) -> governor::Quota {
    governor::Quota::per_second(NonZeroU32::new(case.tokens()).expect("above zero"))
}

/// Measures one contender and checks that its decisions were what the case says; returns how many
/// there were.
fn measure(
    group: &mut Group<'_>,
    name: &str,
    case: Case,
    mut is_denied: impl FnMut() -> bool,
) -> u64 {
    if case == Case::Denied {
        while !is_denied() {}
    }
    let (mut calls, mut denied) = (0_u64, 0_u64);
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            calls += 1;
            denied += u64::from(is_denied());
        });
    });
    let strays = if case == Case::Denied { calls - denied } else { denied };
    let name_of_case = case.name();
    assert!(
        strays <= 1 + calls / STRAYS_ONE_IN,
        "{name}: {denied} of {calls} denied, where all should be {name_of_case}"
    );
    calls
}

/// Decisions about `keys`, round robin.
fn by_key(criterion: &mut Criterion, case: Case, keys: &[String]) {
    let name = if keys.len() == 1 { "one key".to_owned() } else { format!("{} keys", keys.len()) };
    let mut group = criterion.benchmark_group(format!("{name}, {}", case.name()));
    for contender in [Tidegate::alone(case), Tidegate::hybrid(case)] {
        contender.warm_up(keys);
        let limit = &contender.limit;
        let mut turn = keys.iter().cycle();
        contender.measure(&mut group, case, || {
            turn.next().is_none_or(|key| limit.check(key).is_denied())
        });
    }
    let governor = DefaultKeyedRateLimiter::<String>::keyed(governor_quota(case));
    let mut turn = keys.iter().cycle();
    measure(&mut group, "governor", case, || {
        turn.next().is_none_or(|key| governor.check_key(key).is_err())
    });
    group.finish();
}

/// Decisions about one key that was resolved beforehand.
fn by_handle(criterion: &mut Criterion, case: Case) {
    let mut group = criterion.benchmark_group(format!("handle, {}", case.name()));
    for contender in [Tidegate::alone(case), Tidegate::hybrid(case)] {
        contender.warm_up(&["one".to_owned()]);
        let handle = contender.handle();
        contender.measure(&mut group, case, || handle.check().is_denied());
    }
    let governor = DefaultDirectRateLimiter::direct(governor_quota(case));
    measure(&mut group, "governor", case, || governor.check().is_err());
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(WARM_UP)
        .measurement_time(MEASURE)
        .sample_size(SAMPLES)
        .configure_from_args();
    let keys: Vec<String> = (0..1000).map(|user| format!("user:{user:015}")).collect();
    by_key(&mut criterion, Case::Allowed, &keys[..1]);
    by_key(&mut criterion, Case::Allowed, &keys);
    by_key(&mut criterion, Case::Denied, &keys[..1]);
    by_handle(&mut criterion, Case::Allowed);
    by_handle(&mut criterion, Case::Denied);
    criterion.final_summary();
}
