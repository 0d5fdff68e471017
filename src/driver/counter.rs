//! The processor's counter, by which a decision reads the system's clock for less than half of what a call costs.
//!
//! It is used only where the system itself keeps time by it. The ticker compares it with the system's clock each
//! time, so that it has to keep time for a millisecond. When the ticker is late, when the counter keeps other time
//! than the system does, and when it ran on or began anew while the machine was asleep, it tells nothing, and the
//! system is to be asked; if it stood still, it shows the time before until the next tick, as the cached clock
//! does.
#![allow(clippy::disallowed_methods, reason = "this and the ticker read clocks")]

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::system_now_ns;
use crate::time::Timestamp;

/// What was found by whoever was held up for longer between two readings is thrown away.
const HELD_UP_NS: u64 = 1_000;
/// So far both may be apart after a tick, if they were not before: what holds up, and 50 ppm of 40 ms.
const APART_NS: u64 = 3_000;
/// It counts for so long after it was set, two ticks: meanwhile it goes wrong by a few microseconds at most.
const VALID_NS: u64 = 2_000_000;
/// What was set so long ago is not used.
const AGES_NS: u64 = 1 << 63;

/// A counter that is set by the system's clock. Its times count from anywhere, and wrap.
#[derive(Debug)]
pub(super) struct Counter {
    cycles: quanta::Clock,
    /// When it was set last, by itself, in nanoseconds; ages ago, where it is not to be used.
    set_ns: AtomicU64,
    /// What the system's clock showed beyond it then, in nanoseconds.
    offset_ns: AtomicU64,
}

impl Counter {
    /// `None` where the system does not keep time by it.
    ///
    /// Cost: its speed is measured once in a process, mostly within a millisecond, 200 at most.
    pub(super) fn new() -> Option<Self> {
        const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let source = std::fs::read_to_string(SOURCE).ok()?;
        let by_counter = ["tsc", "arch_sys_counter"].contains(&source.trim());
        by_counter.then(|| Self::unset(quanta::Clock::new()))
    }

    fn unset(cycles: quanta::Clock) -> Self {
        let counter =
            Self { cycles, set_ns: AtomicU64::default(), offset_ns: AtomicU64::default() };
        counter.set_ns.store(counter.now_ns().wrapping_sub(AGES_NS), Ordering::Relaxed);
        counter
    }

    /// Sets it by the system's clock, if it has kept time since it was compared with it last. One thread does.
    pub(super) fn set(&self) {
        let before_ns = self.now_ns();
        let system_ns = system_now_ns();
        if self.now_ns().wrapping_sub(before_ns) > HELD_UP_NS {
            return;
        }
        // Rather ahead by what a call takes than behind.
        let offset_ns = system_ns.wrapping_sub(before_ns);
        let offset_before_ns = self.offset_ns.swap(offset_ns, Ordering::Relaxed);
        let apart_ns = offset_ns.wrapping_sub(offset_before_ns).cast_signed().unsigned_abs();
        let age_ns = if apart_ns <= APART_NS { 0 } else { AGES_NS };
        self.set_ns.store(before_ns.wrapping_sub(age_ns), Ordering::Relaxed);
    }

    /// The system's time, not before the cached one, if it was set within [`VALID_NS`].
    ///
    /// Cost: two loads, a reading of the counter, and two multiplications.
    #[inline]
    pub(super) fn now(&self, cached: Timestamp) -> Option<Timestamp> {
        let set_ns = self.set_ns.load(Ordering::Relaxed);
        let offset_ns = self.offset_ns.load(Ordering::Relaxed);
        let now_ns = self.now_ns();
        let now = Timestamp::from_micros(now_ns.wrapping_add(offset_ns) / 1000);
        let in_time = now_ns.wrapping_sub(set_ns) <= VALID_NS;
        (in_time && now >= cached).then_some(now)
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        self.cycles.delta_as_nanos(0, self.cycles.raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN_NS: u64 = 1 << 62;

    /// Set as often as it takes for nobody to be held up meanwhile; whether that helped.
    fn set(counter: &Counter, before: Timestamp) -> bool {
        (0..1000).any(|_| {
            counter.set();
            counter.now(before).is_some()
        })
    }

    #[test]
    fn it_tells_nothing_before_it_is_set_or_long_after_or_of_what_is_to_come() {
        let (cycles, mock) = quanta::Clock::mock();
        mock.increment(BEGIN_NS);
        let counter = Counter::unset(cycles);
        let before = Timestamp::from_micros(system_now_ns() / 1000);
        assert_eq!(counter.now(before), None, "not set");
        assert!(set(&counter, before));
        let after = Timestamp::from_micros(system_now_ns() / 1000);
        let now = counter.now(before).unwrap();
        assert!(before <= now && now <= after, "{before:?} {now:?} {after:?}");
        assert_eq!(counter.now(after.plus_micros(1_000_000)), None, "the cached clock is ahead");
        mock.decrement(BEGIN_NS);
        assert_eq!(counter.now(before), None, "it began anew");
        assert!(set(&counter, before));
        mock.increment(VALID_NS);
        assert!(counter.now(before).is_some());
        mock.increment(1);
        assert_eq!(counter.now(before), None, "the ticker is late");
    }

    #[test]
    fn it_tells_nothing_where_it_does_not_keep_the_systems_time() {
        let (cycles, mock) = quanta::Clock::mock();
        let counter = Counter::unset(cycles);
        for _ in 0..100 {
            let before_ns = system_now_ns();
            while system_now_ns() < before_ns + 2 * APART_NS {}
            counter.set();
            assert_eq!(counter.now(Timestamp::ZERO), None);
            mock.increment(1);
        }
    }
}
