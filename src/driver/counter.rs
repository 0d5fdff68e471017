//! The processor's counter, by which a decision reads the system's clock for less than half of what a call costs.
//!
//! It is used only where the system itself keeps time by it. The ticker sets it by the system's clock each time,
//! so that it has to keep time for a millisecond; when the ticker is late, or the machine was asleep, it tells
//! nothing, and the system is to be asked.

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::system_now_ns;
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// Whoever is held up for longer between reading the counter and the system's clock sets nothing.
const SET_WITHIN_NS: u64 = 1_000;
/// The counter has not been set.
const UNSET: u64 = u64::MAX;

/// A counter that is set by the system's clock.
#[derive(Debug)]
pub(super) struct Counter {
    cycles: quanta::Clock,
    /// What it showed at first.
    first: u64,
    /// The system's clock when it showed that, by the latest comparison, in nanoseconds.
    first_ns: AtomicU64,
}

impl Counter {
    /// `None` where the system does not keep time by it.
    ///
    /// Cost: its speed is measured once in a process, which takes a millisecond, and 200 at most.
    pub(super) fn new() -> Option<Self> {
        const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let source = std::fs::read_to_string(SOURCE).ok()?;
        ["tsc", "arch_sys_counter"].contains(&source.trim()).then(Self::unset)
    }

    fn unset() -> Self {
        let cycles = quanta::Clock::new();
        let first = cycles.raw();
        Self { cycles, first, first_ns: AtomicU64::new(UNSET) }
    }

    /// Sets it by the system's clock.
    pub(super) fn set(&self) {
        let before_ns = self.elapsed_ns();
        let now_ns = system_now_ns();
        let held_up_ns = self.elapsed_ns() - before_ns;
        // A little too late at the most: it never shows less than the cached clock does.
        let first_ns = if held_up_ns > SET_WITHIN_NS { UNSET } else { now_ns - before_ns };
        self.first_ns.store(first_ns, Ordering::Relaxed);
    }

    /// The system's time, if the cached clock shows that it was set within [`CLOCK_AGE_MAX_US`].
    ///
    /// Cost: a load, a reading of the counter, and two multiplications.
    #[inline]
    pub(super) fn now(&self, cached: Timestamp) -> Option<Timestamp> {
        let first_ns = self.first_ns.load(Ordering::Relaxed);
        let now = Timestamp::from_micros(first_ns.checked_add(self.elapsed_ns())? / 1000);
        let latest = cached.plus_micros(CLOCK_AGE_MAX_US);
        (cached..=latest).contains(&now).then_some(now)
    }

    #[inline]
    fn elapsed_ns(&self) -> u64 {
        self.cycles.delta_as_nanos(self.first, self.cycles.raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_nothing_long_after_it_was_set_or_while_it_is_not() {
        let counter = Counter::unset();
        let now = || Timestamp::from_micros(system_now_ns() / 1000);
        assert_eq!(counter.now(now()), None, "not set");
        while counter.first_ns.load(Ordering::Relaxed) == UNSET {
            counter.set();
        }
        assert!(counter.now(now().minus_micros(1_000)).is_some());
        assert_eq!(counter.now(now().minus_micros(2 * CLOCK_AGE_MAX_US)), None, "late");
        assert_eq!(counter.now(now().plus_micros(1_000_000)), None, "the machine was asleep");
    }
}
