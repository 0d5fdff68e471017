//! The batch in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::sync::message::{Entry, Request};
use crate::time::Timestamp;

/// This many attempts at one batch may still be answered.
const ATTEMPTS_MAX: usize = 16;

/// A batch that was sent and has no outcome yet.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: Arc<Request>,
    /// The accounts of its last entries, in the same order. Before them are those of keys whose accounts are closed.
    pub(super) slots: Vec<usize>,
    pub(super) first_sent: Timestamp,
    /// The number of each attempt, and when it was sent; the last one last.
    attempts: VecDeque<(u64, Timestamp)>,
    pub(super) next: Next,
}

/// What becomes of a batch that is not answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next {
    /// The attempt under way has failed then, or at the `latest` where this node looks too late.
    Fail { at: Timestamp, latest: Timestamp },
    /// The attempt has failed: the same bytes are sent again then.
    Resend { at: Timestamp },
}

impl Next {
    pub(super) fn at(self) -> Timestamp {
        match self {
            Self::Fail { at, .. } | Self::Resend { at } => at,
        }
    }
}

impl Flight {
    pub(super) fn new(request: Request, slots: Vec<usize>, now: Timestamp) -> Self {
        let (attempts, next) = (VecDeque::new(), Next::Resend { at: now });
        Self { request: Arc::new(request), slots, first_sent: now, attempts, next }
    }

    /// How many of the entries are of keys whose accounts are closed.
    pub(super) fn closed_count(&self) -> usize {
        self.request.entries.len() - self.slots.len()
    }

    /// The entries of accounts.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.request.entries[self.closed_count()..]
    }

    /// Notes an attempt that is sent now.
    pub(super) fn sent(&mut self, attempt: u64, now: Timestamp) {
        if self.attempts.len() == ATTEMPTS_MAX {
            self.attempts.pop_front();
        }
        self.attempts.push_back((attempt, now));
    }

    /// When an attempt was sent, if it may still be answered.
    pub(super) fn sent_at(&self, attempt: u64) -> Option<Timestamp> {
        self.attempts.iter().find_map(|(number, at)| (*number == attempt).then_some(*at))
    }

    pub(super) fn last_sent(&self) -> Option<Timestamp> {
        self.attempts.back().map(|(_, at)| *at)
    }
}
