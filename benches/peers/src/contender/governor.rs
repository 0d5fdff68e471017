//! governor: GCRA, one atomic word a key in a `DashMap`, or without keys.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota};

use super::{BASE, Contender, by_name, by_number};
use crate::case::Case;

pub fn keyed_by_string(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultKeyedRateLimiter::<String>::keyed(quota(case));
    by_name(BASE, case, move |name| limiter.check_key(name).is_err())
}

pub fn keyed_by_number(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultKeyedRateLimiter::<u64>::keyed(quota(case));
    by_number("governor by u64", case, move |key| limiter.check_key(&u64::from(*key)).is_err())
}

pub fn direct(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultDirectRateLimiter::direct(quota(case));
    by_number("governor direct", case, move |_| limiter.check().is_err())
}

fn quota(case: &Case) -> Quota {
    let (period, burst) = if case.denied {
        (Duration::from_secs(3600), 100)
    } else {
        (Duration::from_nanos(1), 1_000_000_000)
    };
    let burst = NonZeroU32::new(burst).expect("above zero");
    Quota::with_period(period).expect("above zero").allow_burst(burst)
}
