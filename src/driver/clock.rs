//! Where the driver gets the time: the system's clock, or a clock that a test drives.
//!
//! The system's clock is `CLOCK_BOOTTIME`, which goes on while the machine is suspended, so that a
//! lease ends by the store's time even then. One thread in the process copies it into a cached
//! [`Clock`] every millisecond for as long as any limiter lives.
#![allow(
    clippy::disallowed_methods,
    reason = "this and the counter read clocks; this sleeps and owns the ticker thread"
)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::counter::{Counter, system_now_ns};
#[cfg(any(test, feature = "testing"))]
use super::manual::ManualClock;
use crate::time::{Clock, Now, Timestamp, micros};

/// How often the cached clock is set.
const TICKER_PERIOD: Duration = Duration::from_millis(1);
/// So many stalls are remembered: more than come between two looks of a driver.
const STALLS_MAX: usize = 1024;
/// The longest stall of the ticker that leases allow for.
pub(crate) const STALL_MAX: Duration = Duration::from_millis(20);

/// The system's time since boot, suspend included.
pub(crate) fn system_now() -> Timestamp {
    Timestamp::from_micros(system_now_ns() / 1000)
}

/// The process's cached clock and the thread that sets it.
#[derive(Debug)]
pub(crate) struct Ticker {
    clock: Clock,
    counter: Option<Counter>,
    /// How many stalls there were beyond what leases allow for.
    stalls: AtomicU64,
    /// How long the last of them were, in microseconds.
    last_stalls_us: Mutex<VecDeque<u64>>,
}

static TICKER: Mutex<Weak<Ticker>> = Mutex::new(Weak::new());

impl Ticker {
    /// The process's ticker; its thread starts with the first user and ends after the last.
    pub(crate) fn shared() -> std::io::Result<Arc<Self>> {
        let mut shared = TICKER.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ticker) = shared.upgrade() {
            return Ok(ticker);
        }
        let (clock, counter) = (Clock::new(), Counter::new());
        clock.set(system_now());
        let ticker = Arc::new(Self::new(clock, counter));
        let weak = Arc::downgrade(&ticker);
        std::thread::Builder::new().name("tidegate-clock".to_owned()).spawn(move || tick(&weak))?;
        *shared = Arc::downgrade(&ticker);
        Ok(ticker)
    }

    fn new(clock: Clock, counter: Option<Counter>) -> Self {
        Self { clock, counter, stalls: AtomicU64::new(0), last_stalls_us: Mutex::default() }
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Notes that the cached clock stood still for so long.
    fn note_stall(&self, stall_us: u64) {
        let mut last = self.last_stalls_us.lock().unwrap_or_else(PoisonError::into_inner);
        last.push_back(stall_us);
        if last.len() > STALLS_MAX {
            last.pop_front();
        }
        self.stalls.fetch_add(1, Ordering::Relaxed);
    }

    /// How long each stall was since there had been `seen` of them.
    fn stalls_since(&self, seen: &mut u64) -> Vec<Duration> {
        if self.stalls.load(Ordering::Relaxed) == *seen {
            return Vec::new();
        }
        let last = self.last_stalls_us.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.stalls.load(Ordering::Relaxed);
        let known = last.len() as u64 - all.saturating_sub(*seen).min(last.len() as u64);
        *seen = all;
        last.iter().skip(known as usize).copied().map(Duration::from_micros).collect()
    }

    /// The time now, where the cached clock shows this.
    #[inline]
    fn precise(&self, cached: Timestamp) -> Timestamp {
        self.counter.as_ref().and_then(|counter| counter.now(cached)).unwrap_or_else(system_now)
    }
}

fn tick(ticker: &Weak<Ticker>) {
    while let Some(ticker) = ticker.upgrade() {
        let now = system_now();
        let stall_us = now.micros_since(ticker.clock.now());
        if stall_us > STALL_MAX.as_micros() as u64 {
            ticker.note_stall(stall_us);
        }
        // Before the cached clock, so that no reading is taken for one of this tick that is by the last one.
        if let Some(counter) = &ticker.counter {
            counter.set();
        }
        ticker.clock.set(now);
        drop(ticker);
        std::thread::sleep(TICKER_PERIOD);
    }
}

/// The time that a driver lives by.
#[derive(Clone, Debug)]
pub(crate) enum TimeSource {
    /// The system's clock, with the ticker that caches it.
    System(Arc<Ticker>),
    /// A clock that a test drives.
    #[cfg(any(test, feature = "testing"))]
    Manual(ManualClock),
}

impl TimeSource {
    /// The time now, precisely.
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::System(_) => system_now(),
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(manual) => manual.now(),
        }
    }

    /// The same to a microsecond or two, for less, where the cached clock shows this.
    #[inline]
    pub(crate) fn precise(&self, cached: Timestamp) -> Timestamp {
        match self {
            Self::System(ticker) => ticker.precise(cached),
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(manual) => manual.now(),
        }
    }

    /// When the clock's origin was by the machine's clock, in microseconds since the beginning of 1970. A clock that a
    /// test drives began then.
    pub(crate) fn origin_us(&self) -> u64 {
        match self {
            Self::System(_) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                micros(since).saturating_sub(system_now().as_micros())
            }
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(_) => 0,
        }
    }

    /// The cached clock that decisions read.
    pub(crate) fn cached(&self) -> Clock {
        match self {
            Self::System(ticker) => ticker.clock().clone(),
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(manual) => manual.clock.clone(),
        }
    }

    /// Waits until `deadline`.
    pub(crate) async fn sleep_until(&self, deadline: Timestamp) {
        match self {
            Self::System(_) => {
                let wait_us = deadline.micros_since(system_now());
                tokio::time::sleep(Duration::from_micros(wait_us)).await;
            }
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(manual) => manual.reached(deadline).await,
        }
    }

    /// How many stalls of the cached clock there were, beyond what leases allow for.
    pub(crate) fn stalls(&self) -> u64 {
        match self {
            Self::System(ticker) => ticker.stalls.load(Ordering::Relaxed),
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(_) => 0,
        }
    }

    /// How long each of them was since there had been `seen`, which is brought up to date. All drivers of the process are told.
    pub(crate) fn stalls_since(&self, seen: &mut u64) -> Vec<Duration> {
        match self {
            Self::System(ticker) => ticker.stalls_since(seen),
            #[cfg(any(test, feature = "testing"))]
            Self::Manual(_) => Vec::new(),
        }
    }
}

/// The cached time as a decision read it, and where the precise time can be had.
impl Now for (Timestamp, &TimeSource) {
    fn cached(&self) -> Timestamp {
        self.0
    }

    fn precise(&self) -> Timestamp {
        self.1.precise(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first limiter that asked was told of the longest stall, and the others of none.
    #[test]
    fn each_driver_is_told_of_each_stall_once() {
        let ticker = Ticker::new(Clock::new(), None);
        let micros = |stalls: Vec<Duration>| stalls.into_iter().map(micros).collect::<Vec<_>>();
        ticker.note_stall(30_000);
        let (mut one, mut other) = (0, 0);
        assert_eq!(micros(ticker.stalls_since(&mut one)), [30_000]);
        ticker.note_stall(70_000);
        ticker.note_stall(40_000);
        assert_eq!(micros(ticker.stalls_since(&mut other)), [30_000, 70_000, 40_000]);
        assert_eq!(micros(ticker.stalls_since(&mut one)), [70_000, 40_000]);
        assert!(ticker.stalls_since(&mut one).is_empty());
    }

    #[test]
    fn the_time_that_decisions_ask_for_is_the_systems_to_a_few_microseconds() {
        const OFF_US: u64 = 50;
        let ticker = Ticker::shared().unwrap();
        for _ in 0..1_000_000 {
            let (cached, before) = (ticker.clock().now(), system_now());
            let now = ticker.precise(cached);
            assert!(now.plus_micros(OFF_US) >= before, "{now:?} {before:?}");
            assert!(now <= system_now().plus_micros(OFF_US), "{now:?}");
        }
        let Some(counter) = &ticker.counter else { return };
        let begin = system_now();
        while counter.now(ticker.clock().now()).is_none() {
            assert!(system_now().micros_since(begin) < 10_000_000, "the counter is never used");
        }
    }
}
