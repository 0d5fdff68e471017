//! How long a lane's store takes to answer, and how long an attempt is waited for.

use crate::sync::backoff::Backoff;
use crate::time::Timestamp;

/// A busy store is waited for twice as long as it took of late, and up to this many timeouts.
const PATIENCE_MAX: u64 = 10;

/// The attempts of one lane.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    /// The number of the last attempt.
    pub(super) last_attempt: u64,
    pub(super) backoff: Backoff,
    /// How long the store took to answer an attempt of late, in microseconds.
    pub(super) recent_us: u64,
    /// The quicker one of the last two answers, in microseconds. One that is slow, such as the first one, which
    /// has to connect, says little of the next.
    pub(super) quickest_us: u64,
    /// How long the last answer took, in microseconds.
    last_us: u64,
}

impl RoundTrips {
    /// An attempt that was `sent` then is answered at `now`.
    pub(super) fn answered(&mut self, sent: Timestamp, retry_us: u64, now: Timestamp) {
        let took_us = now.micros_since(sent).min(longest_us(retry_us));
        self.recent_us = took_us.max(self.recent_us / 2);
        self.quickest_us = took_us.min(std::mem::replace(&mut self.last_us, took_us));
        self.backoff.succeeded();
    }

    /// How long the next attempt is waited for, `least_us` at least.
    pub(super) fn patience_us(&self, least_us: u64, retry_us: u64) -> u64 {
        (2 * self.recent_us).clamp(least_us, longest_us(retry_us))
    }
}

/// The longest that an attempt is waited for, in microseconds.
pub(super) fn longest_us(retry_us: u64) -> u64 {
    PATIENCE_MAX * retry_us
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest that an answer took of late, and the quickest, after each of these answers, in microseconds.
    fn known_after<const N: usize>(answers_us: [u64; N]) -> [(u64, u64); N] {
        let mut trips = RoundTrips::default();
        answers_us.map(|us| {
            trips.answered(Timestamp::ZERO, 100_000, Timestamp::from_micros(us));
            (trips.recent_us, trips.quickest_us)
        })
    }

    #[test]
    fn slow_answer_is_forgotten_by_half_with_each_that_is_quicker() {
        let recent_us = known_after([9_000, 1_000, 1_000, 5_000]).map(|(recent_us, _)| recent_us);
        assert_eq!(recent_us, [9_000, 4_500, 2_250, 5_000]);
    }

    #[test]
    fn quickest_answer_is_that_of_the_last_two() {
        let quickest_us = known_after([9_000, 1_000, 5_000, 6_000]).map(|(_, us)| us);
        assert_eq!(quickest_us, [0, 1_000, 1_000, 5_000]);
    }

    #[test]
    fn attempt_is_waited_for_twice_as_long_as_an_answer_took_of_late() {
        let trips = RoundTrips { recent_us: 5_000, ..RoundTrips::default() };
        let least_us = [2_000, 20_000];
        assert_eq!(least_us.map(|us| trips.patience_us(us, 100_000)), [10_000, 20_000]);
        let slow = RoundTrips { recent_us: 900_000, ..RoundTrips::default() };
        assert_eq!(slow.patience_us(2_000, 100_000), 1_000_000, "ten timeouts");
    }
}
