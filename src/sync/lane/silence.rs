//! A store that does not answer: since when, and what was known before.

use crate::error::StoreError;
use crate::time::Timestamp;

/// A node whose own loop was held up for this long does not know how long the store was silent.
pub(super) const HELD_UP_US: u64 = 250_000;
/// The gap between two attempts grows up to this part of the time that the store has been silent.
const RETRY_SILENCE_PART: u64 = 32;
/// The longest gap between two attempts, in microseconds, where a quarter of the timeout is not longer.
const RETRY_MAX_US: u64 = 1_000_000;

/// What was known before the store fell silent.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// The lane's time in the last reply; 0 if there was none.
    pub(super) time_us: i64,
    /// The other nodes did not count this one yet.
    pub(super) joined_lately: bool,
    /// Losses of memory that had been found.
    pub(super) losses: u32,
}

/// How long the store has not answered, as far as this node can say.
#[derive(Debug)]
pub(super) struct Silence {
    /// When the store answered last.
    pub(super) answered: Timestamp,
    /// When the batch in flight was sent, or this node's loop ran again after it was held up.
    pub(super) since: Timestamp,
    /// When this node's loop ran last.
    ran: Timestamp,
    /// Attempts that have failed since the store answered.
    pub(super) failures: u32,
    /// When the last attempt that failed was sent.
    pub(super) failed_sent: Timestamp,
    /// What went wrong last, until the lane answers again.
    pub(super) error: Option<StoreError>,
    /// The store answers again, and has not said yet since when.
    pub(super) is_returning: bool,
    pub(super) before: Before,
}

impl Silence {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            answered: now,
            since: now,
            ran: now,
            failures: 0,
            failed_sent: now,
            error: None,
            is_returning: false,
            before: Before::default(),
        }
    }

    /// This node's loop runs at `now`. Where a batch is in flight, time in which it was held up does not count.
    pub(super) fn run(&mut self, is_in_flight: bool, now: Timestamp) {
        if is_in_flight && now.micros_since(self.ran) > HELD_UP_US {
            self.since = now;
        }
        self.ran = now;
    }

    /// When the loop is to run while a batch is in flight, so that it is seen when it is held up.
    pub(super) fn run_by(&self) -> Timestamp {
        self.ran.plus_micros(HELD_UP_US / 2)
    }

    /// An error says more than that no answer came in time, or is the first.
    pub(super) fn note_error(&mut self, error: &StoreError) {
        if self.error.is_none() || !matches!(error, StoreError::TimedOut(_)) {
            self.error = Some(error.clone());
        }
    }

    /// The longest gap between two attempts now, in microseconds.
    pub(super) fn longest_gap_us(&self, now: Timestamp) -> u64 {
        (now.micros_since(self.answered) / RETRY_SILENCE_PART).min(RETRY_MAX_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_that_says_more_than_that_no_answer_came_is_kept() {
        let late = || StoreError::TimedOut(std::time::Duration::from_millis(1));
        let gone = || StoreError::Unreachable(String::new());
        let mut silence = Silence::new(Timestamp::ZERO);
        for (noted, kept) in [(late(), late()), (gone(), gone()), (late(), gone())] {
            silence.note_error(&noted);
            assert_eq!(silence.error, Some(kept));
        }
    }
}
