//! How long reports that are due wait for room in a batch.

use crate::time::Timestamp;

/// The reports of one lane that find no room in a batch.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// Since when each batch has left reports out.
    since: Option<Timestamp>,
    /// The longest wait among the reports of the batch that is being collected, in microseconds.
    longest_us: u64,
    /// How long reports waited of late, in microseconds.
    pub(super) recent_us: u64,
}

impl Backlog {
    /// A report that was due at `due` is in the batch of `now`. What it waited before a batch left it out is no wait for
    /// room: the store may have been away.
    pub(super) fn take(&mut self, due: Timestamp, now: Timestamp) {
        if let Some(since) = self.since {
            self.longest_us = self.longest_us.max(now.micros_since(since.max(due)));
        }
    }

    /// The store was away: what was left out waits for the store, not for room.
    pub(super) fn interrupt(&mut self) {
        self.since = None;
    }

    /// The batch of `now` is sent, and leaves reports out or not.
    pub(super) fn sent(&mut self, leaves_out: bool, now: Timestamp) {
        self.recent_us = std::mem::take(&mut self.longest_us).max(self.recent_us / 2);
        self.since = leaves_out.then(|| self.since.unwrap_or(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_micros(ms * 1000)
    }

    #[test]
    fn report_that_was_due_in_an_outage_waits_for_room_since_a_batch_left_it_out() {
        let mut backlog = Backlog::default();
        backlog.take(at(0), at(60_000));
        backlog.sent(true, at(60_000));
        assert_eq!(backlog.recent_us, 0);
        backlog.take(at(0), at(60_005));
        backlog.take(at(60_002), at(60_005));
        backlog.sent(false, at(60_005));
        assert_eq!(backlog.recent_us, 5000);
    }

    #[test]
    fn report_that_was_left_out_before_an_outage_waits_for_room_since_a_batch_after_it() {
        let mut backlog = Backlog::default();
        backlog.sent(true, at(0));
        backlog.interrupt();
        backlog.take(at(0), at(60_000));
        backlog.sent(true, at(60_000));
        backlog.take(at(0), at(60_003));
        backlog.sent(false, at(60_003));
        assert_eq!(backlog.recent_us, 3000);
    }

    #[test]
    fn wait_is_forgotten_by_half_with_each_batch_that_took_all() {
        let mut backlog = Backlog::default();
        backlog.sent(true, at(0));
        backlog.take(at(0), at(8));
        let recent_us = [9, 10, 11].map(|ms| {
            backlog.sent(false, at(ms));
            backlog.take(at(0), at(ms));
            backlog.recent_us
        });
        assert_eq!(recent_us, [8000, 4000, 2000]);
    }
}
