//! governor: GCRA, one atomic word a key in a `DashMap`, or without keys.

use std::num::NonZeroU32;
use std::sync::LazyLock;
use std::time::Duration;

use foldhash::fast::RandomState;
use governor::clock::{Clock, QuantaClock, QuantaUpkeepClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use super::{BASE, Contender, by_name, by_number};
use crate::case::{Asks, Case};

/// A clock that a thread updates each millisecond. A process can have one.
static UPKEEP_CLOCK: LazyLock<QuantaUpkeepClock> = LazyLock::new(|| {
    QuantaUpkeepClock::from_interval(Duration::from_millis(1)).expect("nobody else has one")
});

pub fn keyed_by_string(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultKeyedRateLimiter::<String>::keyed(quota(case));
    match case.asks {
        Asks::One | Asks::OneOfFew | Asks::OneOfNewKeys => {
            by_name(BASE, case, move |name| limiter.check_key(name).is_err())
        }
        Asks::Three => {
            let three = NonZeroU32::new(3).expect("above zero");
            by_name(BASE, case, move |name| !matches!(limiter.check_key_n(name, three), Ok(Ok(()))))
        }
        Asks::OneAndReads => {
            let limiter = limiter.with_middleware::<StateInformationMiddleware>();
            by_name(BASE, case, move |name| match limiter.check_key(name) {
                Ok(state) => state.remaining_burst_capacity() == u32::MAX,
                Err(_) => true,
            })
        }
    }
}

pub fn with_foldhash(case: &Case) -> Box<dyn Contender> {
    foldhash("governor with foldhash", case, QuantaClock::default())
}

pub fn with_foldhash_and_upkeep(case: &Case) -> Box<dyn Contender> {
    foldhash("governor with foldhash and upkeep", case, UPKEEP_CLOCK.clone())
}

fn foldhash<C>(name: &'static str, case: &Case, clock: C) -> Box<dyn Contender>
where
    C: Clock + Sync + Send + 'static,
    C::Instant: Sync + Send,
{
    let hasher = RandomState::default();
    let limiter =
        RateLimiter::<String, DashMapStateStore<_, _>, C, _>::dashmap_with_clock_and_hasher(
            quota(case),
            clock,
            hasher,
        );
    by_name(name, case, move |name| limiter.check_key(name).is_err())
}

pub fn keyed_by_number(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultKeyedRateLimiter::<u64>::keyed(quota(case));
    by_number("governor by u64", case, move |key| limiter.check_key(&u64::from(*key)).is_err())
}

pub fn direct(case: &Case) -> Box<dyn Contender> {
    let limiter = DefaultDirectRateLimiter::direct(quota(case));
    by_number("governor direct", case, move |_| limiter.check().is_err())
}

pub fn direct_with_upkeep(case: &Case) -> Box<dyn Contender> {
    let limiter = RateLimiter::direct_with_clock(quota(case), UPKEEP_CLOCK.clone());
    by_number("governor direct with upkeep", case, move |_| limiter.check().is_err())
}

fn quota(case: &Case) -> Quota {
    let (period, burst) = match case.asks {
        Asks::OneOfFew => (Duration::from_millis(10), 100),
        _ if case.denied => (Duration::from_secs(3600), 100),
        _ => (Duration::from_nanos(1), 1_000_000_000),
    };
    let burst = NonZeroU32::new(burst).expect("above zero");
    Quota::with_period(period).expect("above zero").allow_burst(burst)
}
