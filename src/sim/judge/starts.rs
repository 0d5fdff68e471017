//! When requests of a leaky bucket begin: those that one queue would let begin later are in excess.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The requests of a key that have a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Starts {
    /// When each begins, in microseconds since the run's start, and its tokens; the first first.
    coming: BinaryHeap<Reverse<(u64, u32)>>,
    /// When the next may begin by one queue, in seconds since the run's start.
    next_s: f64,
}

/// A request that has begun.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Start {
    pub(super) at_s: f64,
    /// When it might have begun by one queue.
    pub(super) due_s: f64,
}

impl Starts {
    pub(super) fn add(&mut self, at_us: u64, cost: u32) {
        self.coming.push(Reverse((at_us, cost)));
    }

    /// The next request that begins until `now_us`.
    pub(super) fn next(&mut self, now_us: u64, rate_per_second: f64) -> Option<Start> {
        self.coming.peek().filter(|Reverse((at_us, _))| *at_us <= now_us)?;
        let Reverse((at_us, cost)) = self.coming.pop()?;
        let (at_s, due_s) = (at_us as f64 / 1e6, self.next_s);
        self.next_s = due_s.max(at_s) + f64::from(cost) / rate_per_second;
        Some(Start { at_s, due_s })
    }

    /// When all that has begun is over by one queue, in seconds since the run's start.
    pub(super) fn repaid_s(&self) -> f64 {
        self.next_s
    }
}
