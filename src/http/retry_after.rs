//! When a denied client may come back, and how many that were denied together come back apart.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::header_style::seconds;
use crate::decision::Decision;

/// Denied clients are spread over this at most, unless it is said otherwise.
pub const SPREAD_MAX: Duration = Duration::from_secs(60);

/// Says in `Retry-After` when a denied client may come back: when its request has a chance, in whole
/// seconds rounded up, and up to a spread later, so that those who are denied together do not return
/// together. Never sooner.
///
/// The delays are no random ones but the multiples of the golden ratio, from one on that is drawn: of
/// those any number in a row is spread evenly. All keys draw on one row.
#[derive(Debug)]
pub struct RetryAfter {
    spread: Option<Duration>,
    denials: AtomicU32,
}

impl Default for RetryAfter {
    fn default() -> Self {
        Self::new()
    }
}

impl RetryAfter {
    /// Spreads denied clients over the time in which an empty bucket of the limit fills, [`SPREAD_MAX`]
    /// at most.
    pub fn new() -> Self {
        // Nodes that begin together do not go in step.
        let first = RandomState::new().hash_one(()) as u32;
        Self { spread: None, denials: AtomicU32::new(first) }
    }

    /// Spreads them over `spread` in whole seconds, rounded down: with none, all are told the same.
    #[must_use]
    pub fn spread(mut self, spread: Duration) -> Self {
        self.spread = Some(spread);
        self
    }

    /// Seconds to wait; 0 for a request that was allowed. Of several limits that denied a request, ask with
    /// the decision whose [`retry_after`](Decision::retry_after) is longest.
    pub fn seconds(&self, decision: &Decision) -> u64 {
        if decision.is_denied() { self.spread_from(decision.retry_after(), decision) } else { 0 }
    }

    /// Seconds to wait for what comes after `wait`, where this decision denied.
    pub(super) fn spread_from(&self, wait: Duration, decision: &Decision) -> u64 {
        let spread_s = match self.spread {
            Some(spread) => spread.as_secs(),
            None => seconds(decision.fill_time().min(SPREAD_MAX)),
        };
        // 2^32 over the golden ratio.
        let part = self.denials.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9);
        let later_s = (u128::from(part) * (u128::from(spread_s) + 1)) >> u32::BITS;
        seconds(wait).saturating_add(later_s as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::limit::Limit;
    use crate::limiter::{ActiveLimit, Limiter};
    use crate::quota::Quota;

    fn exhausted(quota: Quota) -> ActiveLimit {
        let limiter = Limiter::builder().limit(Limit::new("a", quota)).build().unwrap();
        let limit = limiter.limit("a").unwrap();
        while limit.check("key").is_allowed() {}
        limit
    }

    fn told(retry: &RetryAfter, quota: Quota, clients: usize) -> Vec<u64> {
        let denied = exhausted(quota).check("key");
        (0..clients).map(|_| retry.seconds(&denied)).collect()
    }

    #[test]
    fn who_is_denied_together_is_told_to_return_apart_and_never_sooner() {
        let told = told(&RetryAfter::new(), Quota::per_minute(1).burst(4), 1000);
        let least = *told.iter().min().unwrap();
        assert!((59..=60).contains(&least), "the next token comes in a minute: {least}");
        let mut counts = [0; 61];
        for seconds in told {
            counts[(seconds - least) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (14..=19).contains(count)), "{counts:?}");
    }

    #[test]
    fn the_spread_is_what_the_limit_takes_to_fill_or_what_is_said() {
        let range = |retry: RetryAfter, quota| {
            let told = told(&retry, quota, 200);
            told.iter().max().unwrap() - told.iter().min().unwrap()
        };
        assert_eq!(range(RetryAfter::new(), Quota::per_minute(10).burst(2)), 12);
        assert_eq!(range(RetryAfter::new().spread(Duration::ZERO), Quota::per_minute(1)), 0);
        let longest = RetryAfter::new().spread(Duration::MAX);
        assert!(told(&longest, Quota::per_minute(1), 100).iter().all(|&seconds| seconds >= 59));
    }

    #[test]
    fn who_was_allowed_may_come_at_once() {
        let limiter = Limiter::builder().limit(Limit::new("a", Quota::per_minute(1))).build();
        let allowed = limiter.unwrap().limit("a").unwrap().check("key");
        assert_eq!(RetryAfter::new().seconds(&allowed), 0);
    }
}
