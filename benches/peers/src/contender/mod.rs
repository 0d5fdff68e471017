//! The contenders, each behind the same face.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::case::{Asks, By, Case, Keys};
use crate::server::Server;

mod bare;
mod governor;
mod leaky_bucket;
#[cfg(feature = "limitador")]
mod limitador;
mod maps;
mod pingora;
mod ratelimit;
mod script;
mod tidegate;
mod trypema;

/// What every contender's others are compared with.
pub const BASE: &str = "governor";

/// A limiter under a case's load.
pub trait Contender: Sync {
    fn name(&self) -> &'static str;

    /// Asks for what the stream has in `part`; returns how many were denied.
    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64;

    /// As [`decide`](Self::decide), and how many nanoseconds each decision took.
    fn decide_timed(&self, keys: &Keys, part: Range<usize>, took: &mut Histogram<u64>) -> u64 {
        let mut denied = 0;
        for one in part {
            let start = Instant::now();
            denied += self.decide(keys, one..one + 1, false);
            took.saturating_record(start.elapsed().as_nanos() as u64);
        }
        denied
    }

    /// Decisions between two looks at the clock.
    fn block(&self) -> usize {
        4096
    }

    /// How long its background work may go on after a round.
    fn rest(&self) -> Duration {
        Duration::ZERO
    }

    /// How long it takes to hold leases on so many keys again, after it gave them back while others had their turn.
    fn returns_within(&self, _keys: usize) -> Duration {
        Duration::ZERO
    }

    /// Brings it into the state that the case is about: it has decided well for long enough to spend what a
    /// limiter gives unasked to each of so many keys.
    fn warm_up(&self, keys: &Keys) {
        let deadline = Instant::now() + Duration::from_secs(120);
        let settling = Duration::from_micros(5 * keys.count as u64);
        let mut good_since = Instant::now();
        loop {
            let wrong = self.wrong(keys);
            if wrong * 2000 > keys.stream.len() as u64 {
                good_since = Instant::now();
            } else if good_since.elapsed() >= settling {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{}: {wrong} decisions go the other way",
                self.name()
            );
        }
    }

    /// Decisions of one pass through the stream that go the other way than the case says.
    fn wrong(&self, keys: &Keys) -> u64;

    /// Whether it did what it is to do beside deciding.
    fn check(&self, _keys: &Keys) {}
}

/// Decides about each element, one after the other or with a fence between two.
#[inline]
fn count<T>(part: &[T], isolated: bool, mut is_denied: impl FnMut(&T) -> bool) -> u64 {
    let mut denied = 0;
    for one in part {
        if isolated {
            fence(Ordering::SeqCst);
        }
        denied += u64::from(is_denied(one));
    }
    denied
}

/// Decisions of one pass that go the other way than `denied` says.
fn strays(contender: &impl Contender, keys: &Keys, denied: bool) -> u64 {
    let all = keys.stream.len();
    let seen = contender.decide(keys, 0..all, false);
    if denied { all as u64 - seen } else { seen }
}

/// A contender made of one function a decision.
struct Simple<F> {
    name: &'static str,
    denied: bool,
    decide: F,
}

impl<F: Fn(&Keys, Range<usize>, bool) -> u64 + Sync> Contender for Simple<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64 {
        (self.decide)(keys, part, isolated)
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        strays(self, keys, self.denied)
    }
}

/// One that is asked by name.
fn by_name(
    name: &'static str,
    case: &Case,
    is_denied: impl Fn(&String) -> bool + Sync + 'static,
) -> Box<dyn Contender> {
    let decide = move |keys: &Keys, part, isolated| count(&keys.names[part], isolated, &is_denied);
    Box::new(Simple { name, denied: case.denied, decide })
}

/// One that is asked by number; one without keys takes no notice of it.
fn by_number(
    name: &'static str,
    case: &Case,
    is_denied: impl Fn(&u32) -> bool + Sync + 'static,
) -> Box<dyn Contender> {
    let decide = move |keys: &Keys, part, isolated| count(&keys.stream[part], isolated, &is_denied);
    Box::new(Simple { name, denied: case.denied, decide })
}

/// All contenders that can serve a case. Those that ask Redis only take part with a server, and
/// where few keys are asked for: a million round trips are a minute.
pub fn contenders(case: &Case, server: Option<&Server>) -> Vec<Box<dyn Contender>> {
    if case.asks != Asks::One {
        let mut all = vec![governor::keyed_by_string(case)];
        if matches!(case.asks, Asks::OneOfFew | Asks::OneOfNewKeys) {
            all.extend([governor::with_foldhash(case), governor::with_foldhash_and_upkeep(case)]);
        }
        all.extend([tidegate::alone(case), tidegate::in_memory(case)]);
        return all;
    }
    let mut all = vec![governor::keyed_by_string(case), governor::keyed_by_number(case)];
    all.push(tidegate::alone(case));
    if case.keys == 1 {
        all.extend([governor::direct(case), governor::direct_with_upkeep(case)]);
        all.extend([ratelimit::new(case), leaky_bucket::new(case)]);
    }
    if case.by == By::Key {
        all.extend([governor::with_foldhash(case), governor::with_foldhash_and_upkeep(case)]);
        all.extend([pingora::new(case), trypema::local(case)]);
        #[cfg(feature = "limitador")]
        all.push(limitador::new(case));
    }
    if !case.denied {
        all.push(bare::new(case));
    }
    if case.by == By::Key && !case.denied {
        all.extend([maps::scc(case), maps::papaya(case), maps::dashmap(case)]);
    }
    if let Some(server) = server.filter(|_| case.by == By::Key && case.keys <= 1_000) {
        all.extend(remote(case, server));
    }
    // Last, since what it was warmed up to is given back when it rests.
    all.push(tidegate::in_memory(case));
    all
}

/// The contenders that share their limits through a Redis.
pub fn over_redis(case: &Case, server: &Server) -> Vec<Box<dyn Contender>> {
    let mut all = remote(case, server);
    if !case.denied {
        // What a latency is of reading the clock.
        all.push(by_name("no limiter", case, |name| name.is_empty()));
    }
    all.push(tidegate::over_redis(case, server));
    all
}

fn remote(case: &Case, server: &Server) -> Vec<Box<dyn Contender>> {
    vec![
        script::one_by_one(case, server),
        script::many_at_once(case, server),
        trypema::hybrid(case, server),
    ]
}
