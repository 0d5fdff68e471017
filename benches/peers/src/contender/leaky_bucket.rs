//! `leaky-bucket`: one bucket without keys, made for tasks that wait; asked by its `try_acquire`.
//!
//! While there are tokens it looks at no clock; it takes its lock and refills when they run out.

use std::time::Duration;

use leaky_bucket::RateLimiter;

use super::{Contender, by_number};
use crate::case::Case;

pub fn new(case: &Case) -> Box<dyn Contender> {
    let mut builder = RateLimiter::builder();
    if case.denied {
        builder.interval(Duration::from_secs(3600)).refill(1).max(100).initial(100);
    } else {
        builder.interval(Duration::from_millis(100)).refill(100_000_000);
        builder.max(1_000_000_000).initial(1_000_000_000);
    }
    let limiter = builder.build();
    by_number("leaky-bucket", case, move |_| !limiter.try_acquire(1))
}
