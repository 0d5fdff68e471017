//! The contenders, each behind the same face.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter};
use tidegate::{ActiveLimit, Event, KeyHandle, Limit, Limiter, MemoryStore, Quota};

use crate::case::{By, Case, Keys, name};

/// A limiter under a case's load.
pub trait Contender: Sync {
    fn name(&self) -> &'static str;

    /// Asks for what the stream has in `part`; returns how many were denied.
    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64;

    /// Brings it into the state that the case is about.
    fn warm_up(&self, keys: &Keys) {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let wrong = self.wrong(keys);
            if wrong * 2000 <= keys.stream.len() as u64 {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{}: {wrong} decisions go the other way",
                self.name()
            );
        }
        // Until what many keys need is known.
        let settled = Instant::now() + Duration::from_micros(5 * keys.count as u64);
        while Instant::now() < settled {
            self.wrong(keys);
        }
    }

    /// Decisions of one pass through the stream that go the other way than the case says.
    fn wrong(&self, keys: &Keys) -> u64;

    /// Whether it did what it is to do beside deciding.
    fn check(&self) {}
}

/// Decides about each element, one after the other or with a fence between two.
#[inline]
fn count<T>(part: &[T], isolated: bool, mut is_denied: impl FnMut(&T) -> bool) -> u64 {
    let mut denied = 0;
    if isolated {
        for one in part {
            fence(Ordering::SeqCst);
            denied += u64::from(black_box(is_denied(one)));
        }
    } else {
        for one in part {
            denied += u64::from(is_denied(one));
        }
    }
    denied
}

/// A contender made of one function a decision.
struct Simple<F> {
    name: &'static str,
    denied: bool,
    is_denied: F,
}

impl<F: Fn(&Keys, Range<usize>, bool) -> u64 + Sync> Contender for Simple<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64 {
        (self.is_denied)(keys, part, isolated)
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        let all = keys.stream.len();
        let denied = self.decide(keys, 0..all, false);
        if self.denied { all as u64 - denied } else { denied }
    }
}

fn quota(case: &Case) -> governor::Quota {
    let (period, burst) = if case.denied {
        (Duration::from_secs(3600), 100)
    } else {
        (Duration::from_nanos(1), 1_000_000_000)
    };
    let burst = NonZeroU32::new(burst).expect("above zero");
    governor::Quota::with_period(period).expect("above zero").allow_burst(burst)
}

/// tidegate with a store, and its driver at work.
struct Tidegate {
    limit: ActiveLimit,
    handles: Vec<KeyHandle>,
    syncs: Arc<AtomicU64>,
    denied: bool,
    _limiter: Limiter,
}

impl Tidegate {
    fn new(case: &Case) -> Self {
        let quota = match (case.denied, case.keys) {
            (true, _) => Quota::per_hour(1).burst(100),
            (false, 0..=10_000) => Quota::per_second(1_000_000_000),
            (false, _) => Quota::per_second(10_000_000).burst(1_000_000_000),
        };
        // With so many keys more syncs than that are not what a node is asked for.
        let interval = Duration::from_millis(if case.keys > 10_000 { 5000 } else { 50 });
        let syncs = Arc::new(AtomicU64::new(0));
        let counter = syncs.clone();
        let limiter = Limiter::builder()
            .keys_max(case.keys.max(1000))
            .limit(Limit::new("bench", quota).sync_interval(interval))
            .store(MemoryStore::new())
            .listen(move |event| {
                if let Event::Synced { error: None, .. } = event {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            })
            .build()
            .expect("a good limit");
        let limit = limiter.limit("bench").expect("it was built with it");
        let handles = match case.by {
            By::Handle => (0..case.keys as u32)
                .map(|key| limit.handle(&name(key)).expect("a good key"))
                .collect(),
            By::Key => Vec::new(),
        };
        Self { limit, handles, syncs, denied: case.denied, _limiter: limiter }
    }
}

impl Contender for Tidegate {
    fn name(&self) -> &'static str {
        "tidegate"
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64 {
        if self.handles.is_empty() {
            let limit = &self.limit;
            return count(&keys.names[part], isolated, |name| {
                limit.check(name).is_ok_and(|decision| decision.is_denied())
            });
        }
        match &self.handles[..] {
            [one] => count(&keys.stream[part], isolated, |_| one.check().is_denied()),
            handles => count(&keys.stream[part], isolated, |key| {
                handles[*key as usize].check().is_denied()
            }),
        }
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        let all = keys.stream.len();
        let denied = self.decide(keys, 0..all, false);
        std::thread::sleep(Duration::from_millis(20));
        if self.denied { all as u64 - denied } else { denied }
    }

    fn check(&self) {
        assert!(self.syncs.load(Ordering::Relaxed) > 0, "nothing was synced meanwhile");
    }
}

/// All contenders of a case.
pub fn contenders(case: &Case, keys: &Keys) -> Vec<Box<dyn Contender>> {
    let denied = case.denied;
    let by_string = DefaultKeyedRateLimiter::<String>::keyed(quota(case));
    let by_number = DefaultKeyedRateLimiter::<u64>::keyed(quota(case));
    let mut all: Vec<Box<dyn Contender>> = vec![
        Box::new(Simple {
            name: "governor",
            denied,
            is_denied: move |keys: &Keys, part, isolated| {
                count(&keys.names[part], isolated, |name| by_string.check_key(name).is_err())
            },
        }),
        Box::new(Simple {
            name: "governor by u64",
            denied,
            is_denied: move |keys: &Keys, part, isolated| {
                count(&keys.stream[part], isolated, |key| {
                    by_number.check_key(&u64::from(*key)).is_err()
                })
            },
        }),
    ];
    if keys.count == 1 {
        let direct = DefaultDirectRateLimiter::direct(quota(case));
        all.push(Box::new(Simple {
            name: "governor direct",
            denied,
            is_denied: move |keys: &Keys, part, isolated| {
                count(&keys.stream[part], isolated, |_| direct.check().is_err())
            },
        }));
    }
    // Last, since what it was warmed up to is given back when it rests.
    all.push(Box::new(Tidegate::new(case)));
    all
}
