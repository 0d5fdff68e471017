//! When to ask again: at once while asking helps, ever more rarely while it does not.

use crate::time::Timestamp;

/// A gap that doubles with each failure up to a maximum, and is forgotten with a success.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backoff {
    gap_us: u64,
    not_before: Timestamp,
}

impl Backoff {
    /// The next attempt may not start before this.
    pub(crate) fn not_before(&self) -> Timestamp {
        self.not_before
    }

    /// Asking helped.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Asking did not help: wait `first_us`, then twice that, at most `max_us`.
    pub(crate) fn failed(&mut self, now: Timestamp, first_us: u64, max_us: u64) {
        self.gap_us = (self.gap_us * 2).clamp(first_us, max_us);
        self.not_before = now.plus_micros(self.gap_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_doubles_to_its_maximum_and_a_success_forgets_it() {
        let now = Timestamp::from_micros(100);
        let mut backoff = Backoff::default();
        let gaps: Vec<u64> = (0..5)
            .map(|_| {
                backoff.failed(now, 10, 50);
                backoff.not_before().micros_since(now)
            })
            .collect();
        assert_eq!(gaps, [10, 20, 40, 50, 50]);
        backoff.succeeded();
        assert!(backoff.not_before() <= now);
    }
}
