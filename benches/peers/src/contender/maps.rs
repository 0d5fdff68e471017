//! What tidegate's table would be with a map of others: a cache line like a bucket's behind each key,
//! of which a decision loads a few words and changes one by compare-and-swap.
//!
//! All maps hash with foldhash, as the table does. They have less to do than tidegate, which also tells
//! what is left, counts for its driver, and can give a place to another key.

use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;

use super::{Contender, by_name};
use crate::case::Case;

/// A bucket as a decision sees it: tokens and pending in one word, and words beside it.
#[repr(align(64))]
struct Line([AtomicU64; 8]);

const PENDING: u64 = (1 << 24) - 1;
const TOKEN: u64 = 1 << 24;

impl Line {
    fn full() -> Self {
        let line = Self(std::array::from_fn(|_| AtomicU64::new(0)));
        line.0[0].store(!PENDING, Ordering::Relaxed);
        line.0[3].store(u64::MAX, Ordering::Relaxed);
        line
    }

    /// Whether a token is denied; what is pending is collected when there is no more room.
    #[inline]
    fn is_denied(&self, now: u64) -> bool {
        let mut word = self.0[0].load(Ordering::Acquire);
        loop {
            let ends = self.0[3].load(Ordering::Acquire);
            if word < TOKEN || now >= ends {
                return true;
            }
            let spent = if word & PENDING < PENDING { word - TOKEN + 1 } else { !PENDING };
            match self.0[0].compare_exchange_weak(word, spent, Ordering::SeqCst, Ordering::Acquire)
            {
                Ok(_) => {
                    // What tells the rest of a decision.
                    let rest = [1, 2, 4].map(|at| self.0[at].load(Ordering::Relaxed));
                    std::hint::black_box(rest);
                    return false;
                }
                Err(seen) => word = seen,
            }
        }
    }
}

/// A cached clock, as tidegate reads one.
static NOW: AtomicU64 = AtomicU64::new(1);

fn now() -> u64 {
    NOW.load(Ordering::Relaxed)
}

pub fn scc(case: &Case) -> Box<dyn Contender> {
    let map = scc::HashMap::<String, Line, RandomState>::default();
    by_name("tidegate's bucket in scc", case, move |name| {
        match map.read_sync(name.as_str(), |_, line| line.is_denied(now())) {
            Some(denied) => denied,
            None => map.insert_sync(name.clone(), Line::full()).is_err(),
        }
    })
}

pub fn papaya(case: &Case) -> Box<dyn Contender> {
    let map = papaya::HashMap::<String, Line, RandomState>::default();
    by_name("tidegate's bucket in papaya", case, move |name| {
        let map = map.pin();
        match map.get(name.as_str()) {
            Some(line) => line.is_denied(now()),
            None => map.try_insert(name.clone(), Line::full()).is_err(),
        }
    })
}

pub fn dashmap(case: &Case) -> Box<dyn Contender> {
    let map = dashmap::DashMap::<String, Line, RandomState>::default();
    by_name("tidegate's bucket in dashmap", case, move |name| {
        if let Some(line) = map.get(name.as_str()) {
            return line.is_denied(now());
        }
        map.insert(name.clone(), Line::full()).is_some()
    })
}
