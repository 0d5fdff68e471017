//! `ratelimit`: one token bucket without keys, refilled once a microsecond at most.

use std::time::Duration;

use ratelimit::Ratelimiter;

use super::{Contender, by_number};
use crate::case::Case;

pub fn new(case: &Case) -> Box<dyn Contender> {
    let builder = if case.denied {
        Ratelimiter::builder(1)
            .period(Duration::from_secs(3600))
            .max_tokens(100)
            .initial_available(100)
    } else {
        Ratelimiter::builder(1_000_000_000).initial_available(1_000_000_000)
    };
    let limiter = builder.build().expect("a good quota");
    by_number("ratelimit", case, move |_| limiter.try_wait().is_err())
}
