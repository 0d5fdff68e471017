//! Callers who wait for the store's answer about one key.

use std::collections::VecDeque;

use crate::bucket::MAX_TOKENS;
use crate::time::Timestamp;

/// A caller who waits for the store's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    /// Names the request in the answer.
    pub(crate) ticket: u64,
    /// What it costs, in tokens.
    pub(crate) cost: u32,
    /// Until when the caller waits.
    pub(crate) deadline: Timestamp,
}

/// The answer to a caller who waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallerAnswer {
    pub(crate) ticket: u64,
    pub(crate) allowed: bool,
    pub(crate) sure: bool,
}

/// The callers of one key.
#[derive(Debug, Default)]
pub(super) struct Callers {
    /// First come, first served.
    pub(super) waiting: VecDeque<Waiter>,
    /// For how many of the first the batch in flight asks.
    pub(super) asked: usize,
    /// Answers that have not been handed out.
    pub(super) answers: Vec<CallerAnswer>,
}

impl Callers {
    /// When the first caller has waited long enough: all wait equally long.
    pub(super) fn wait_ends(&self) -> Option<Timestamp> {
        self.waiting.front().map(|waiter| waiter.deadline)
    }

    /// A report asks for all who wait now, or for the first of them, if a bucket cannot hold what all need. Returns what they
    /// need, in tokens.
    pub(super) fn ask(&mut self) -> i64 {
        let (mut asked, mut needed) = (0, 0);
        for waiter in &self.waiting {
            let with_this = needed + i64::from(waiter.cost);
            if asked > 0 && with_this > MAX_TOKENS.into() {
                break;
            }
            (asked, needed) = (asked + 1, with_this);
        }
        self.asked = asked;
        needed
    }

    /// Takes the first caller, if it has waited long enough.
    pub(super) fn take_overdue(&mut self, now: Timestamp) -> Option<Waiter> {
        if self.wait_ends()? > now {
            return None;
        }
        self.asked = self.asked.saturating_sub(1);
        self.waiting.pop_front()
    }
}
