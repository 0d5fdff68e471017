//! When a denied client may return, and how clients that were denied together return apart.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::algorithm::Rule;
use crate::decision::Decision;

/// The longest time over which [`RetryAfter::spread`] spreads denied clients.
pub const SPREAD_MAX: Duration = Duration::from_secs(60);

/// When a denied client may return: when its request has a chance, and not before.
///
/// By choice a delay of whole seconds is added, so that clients that were denied in the same moment do not return
/// in the same second. This is for buckets that many clients share. The delays are not random: they go through the
/// multiples of the golden ratio, beginning with a random one, which spreads any number of successive denials
/// evenly. All keys share the sequence.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Quota;
/// use tidegate::http::RetryAfter;
///
/// let limit = tidegate::local(Quota::per_minute(1))?;
/// assert!(limit.check("a").is_allowed());
/// let denied = limit.check("a");
/// assert_eq!(RetryAfter::exact().seconds(&denied), 60);
/// let spread = RetryAfter::spread_over(Duration::from_secs(10)).seconds(&denied);
/// assert!((60..=70).contains(&spread));
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct RetryAfter {
    spread: Spread,
    denials: AtomicU32,
}

#[derive(Debug)]
enum Spread {
    None,
    /// Over a tenth of the window, if all tokens return at its end.
    OfWindows,
    /// Over the time in which an empty bucket fills.
    FillTime,
    Over(Duration),
}

impl Default for RetryAfter {
    /// Adds no delay, except where all tokens return at one instant: denied clients of a
    /// [`FixedWindow`](crate::FixedWindow) are spread over a tenth of the window, at most [`SPREAD_MAX`].
    fn default() -> Self {
        Self::new(Spread::OfWindows)
    }
}

impl RetryAfter {
    fn new(spread: Spread) -> Self {
        // Nodes that start together begin with different delays.
        let first = RandomState::new().hash_one(()) as u32;
        Self { spread, denials: AtomicU32::new(first) }
    }

    /// Adds no delay.
    pub fn exact() -> Self {
        Self::new(Spread::None)
    }

    /// Spreads denied clients over the time in which an empty bucket of the limit fills, at most [`SPREAD_MAX`].
    pub fn spread() -> Self {
        Self::new(Spread::FillTime)
    }

    /// Spreads denied clients over `spread`, in whole seconds, rounded down.
    pub fn spread_over(spread: Duration) -> Self {
        Self::new(Spread::Over(spread))
    }

    /// The value of `Retry-After`: whole seconds, rounded up; 0 for a request that was allowed. If several limits
    /// denied a request, call this with the decision whose [`retry_after`](Decision::retry_after) is longest.
    pub fn seconds(&self, decision: &Decision) -> u64 {
        if decision.is_denied() { seconds(self.after(decision.retry_after(), decision)) } else { 0 }
    }

    /// `wait`, and the delay of this denial.
    pub(super) fn after(&self, wait: Duration, decision: &Decision) -> Duration {
        let spread_s = match self.spread {
            Spread::None => return wait,
            Spread::OfWindows => match decision.rule() {
                Rule::FixedWindow(rule) if !decision.is_blocked() => {
                    (rule.period() / 10).min(SPREAD_MAX).as_secs()
                }
                _ => return wait,
            },
            Spread::FillTime => seconds(decision.fill_time().min(SPREAD_MAX)),
            Spread::Over(spread) => spread.as_secs(),
        };
        // 2^32 divided by the golden ratio.
        let part = self.denials.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9);
        let later_s = (u128::from(part) * (u128::from(spread_s) + 1)) >> u32::BITS;
        wait.saturating_add(Duration::from_secs(later_s as u64))
    }
}

/// Whole seconds, rounded up.
pub(super) fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::algorithm::FixedWindow;
    use crate::driver::manual::ManualClock;
    use crate::limit::Limit;
    use crate::limiter::{ActiveLimit, Limiter};
    use crate::quota::Quota;

    fn exhausted(quota: Quota) -> ActiveLimit {
        let limiter = Limiter::builder().limit(Limit::new("a", quota)).build().unwrap();
        let limit = limiter.limit("a").unwrap();
        while limit.check("key").is_allowed() {}
        limit
    }

    fn values(retry: &RetryAfter, quota: Quota, clients: usize) -> Vec<u64> {
        let denied = exhausted(quota).check("key");
        (0..clients).map(|_| retry.seconds(&denied)).collect()
    }

    #[test]
    fn blocked_client_is_told_the_end_of_the_block_and_no_later_time() {
        let block = Duration::from_secs(600);
        let limit = Limit::new("a", FixedWindow::per_minute(1)).local().block_for(block);
        let builder = Limiter::builder().limit(limit).clock(&ManualClock::new());
        let limit = builder.build().unwrap().limit("a").unwrap();
        assert!(limit.check("key").is_allowed());
        // The denial that blocks, and those that follow.
        for _ in 0..100 {
            assert_eq!(RetryAfter::default().seconds(&limit.check("key")), 600);
        }
    }

    #[test]
    fn spread_clients_return_apart_and_not_before_their_time() {
        let values = values(&RetryAfter::spread(), Quota::per_minute(1).burst(4), 1000);
        let least = *values.iter().min().unwrap();
        assert!((59..=60).contains(&least), "the next token comes in a minute: {least}");
        let mut counts = [0; 61];
        for seconds in values {
            counts[(seconds - least) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (14..=19).contains(count)), "{counts:?}");
    }

    #[test]
    fn spread_is_the_fill_time_or_the_chosen_time_and_none_by_default() {
        let range = |retry: RetryAfter, quota| {
            let values = values(&retry, quota, 200);
            values.iter().max().unwrap() - values.iter().min().unwrap()
        };
        assert_eq!(range(RetryAfter::spread(), Quota::per_minute(10).burst(2)), 12);
        assert_eq!(range(RetryAfter::default(), Quota::per_minute(1)), 0);
        let longest = RetryAfter::spread_over(Duration::MAX);
        assert!(values(&longest, Quota::per_minute(1), 100).iter().all(|&seconds| seconds >= 59));
    }

    /// A thousand clients are denied within a second, and come back when they are told to.
    #[test]
    fn denied_clients_of_a_fixed_window_return_apart_and_those_of_other_limits_at_their_time() {
        let returns = |rule: Rule| -> [usize; 1000] {
            let clock = ManualClock::new();
            let builder = Limiter::builder().limit(Limit::new("a", rule)).clock(&clock);
            let limit = builder.build().unwrap().limit("a").unwrap();
            assert!(limit.check("key").is_allowed());
            let (retry, mut tenths) = (RetryAfter::default(), [0; 1000]);
            for _ in 0..1000 {
                let seconds = retry.seconds(&limit.check("key"));
                let at = clock.now().as_micros() + seconds * 1_000_000;
                tenths[(at / 100_000) as usize] += 1;
                clock.advance(Duration::from_millis(1));
            }
            tenths
        };
        let window = returns(FixedWindow::per_minute(1).into());
        assert!(window.iter().all(|&clients| clients <= 30), "{window:?}");
        assert_eq!(
            window[..600].iter().sum::<usize>(),
            0,
            "nobody returns before the window's end"
        );
        assert_eq!(window[..680].iter().sum::<usize>(), 1000);
        let bucket = returns(Quota::per_minute(1).into());
        assert_eq!(bucket[610..621].iter().sum::<usize>(), 1000);
    }

    #[test]
    fn retry_after_of_an_allowed_request_is_zero() {
        let limiter = Limiter::builder().limit(Limit::new("a", Quota::per_minute(1))).build();
        let allowed = limiter.unwrap().limit("a").unwrap().check("key");
        assert_eq!(RetryAfter::spread().seconds(&allowed), 0);
    }
}
