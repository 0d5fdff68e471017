//! The processor's counter, by which a decision reads the system's clock for less than half of what a call costs.
//!
//! It is used only where the system itself keeps time by it. The ticker compares it with the system's clock each
//! time before it sets the cached clock, and publishes one number, what the system's clock shows beyond the
//! counter. A reading is used if it is not before the cached clock and at most [`VALID_US`] after it: so when the
//! ticker is late, and when the counter ran on or began anew while the machine was asleep, the system is asked.
//!
//! # Orderings
//!
//! The offset is one word that publishes nothing else, so it is `Relaxed`. Beside a cached time that is older or
//! newer than itself it still gives the system's time to a few microseconds, or, where the counter has jumped
//! since, a time that is out of the range above, or at most [`VALID_US`] ahead.
#![allow(clippy::disallowed_methods, reason = "this and the ticker read clocks")]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::time::Timestamp;

/// What was found by whoever was held up for longer between two readings is thrown away.
const HELD_UP_NS: u64 = 1_000;
/// So far both may be apart after a tick, if they were not before: what holds up, and 50 ppm of 40 ms.
const APART_NS: u64 = 3_000;
/// A reading is used for so long after the ticker's last one, two ticks: meanwhile it goes wrong by a few
/// microseconds at most.
const VALID_US: u64 = 2_000;
/// The counter is not to be used. As an offset it would be years away.
const UNUSABLE: u64 = u64::MAX;

/// The system's time since boot, suspend included, in nanoseconds.
pub(super) fn system_now_ns() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let now = rustix::time::clock_gettime(CLOCK);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A counter that is set by the system's clock. Its times count from anywhere, and wrap.
#[derive(Debug)]
pub(super) struct Counter {
    cycles: quanta::Clock,
    /// What the system's clock showed beyond it last, in nanoseconds, or [`UNUSABLE`].
    offset_ns: AtomicU64,
    /// The same, usable or not: the ticker's own.
    compared_ns: AtomicU64,
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
        let (offset_ns, compared_ns) = (AtomicU64::new(UNUSABLE), AtomicU64::new(UNUSABLE));
        Self { cycles, offset_ns, compared_ns }
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
        let compared_ns = self.compared_ns.swap(offset_ns, Ordering::Relaxed);
        let apart_ns = offset_ns.wrapping_sub(compared_ns).cast_signed().unsigned_abs();
        let offset_ns = if apart_ns <= APART_NS { offset_ns } else { UNUSABLE };
        self.offset_ns.store(offset_ns, Ordering::Relaxed);
    }

    /// The system's time, if it is not before the cached one, nor more than [`VALID_US`] after it.
    ///
    /// Cost: one load, a reading of the counter, and two multiplications.
    #[inline]
    pub(super) fn now(&self, cached: Timestamp) -> Option<Timestamp> {
        let offset_ns = self.offset_ns.load(Ordering::Relaxed);
        time_by(offset_ns, self.now_ns(), cached)
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        self.cycles.delta_as_nanos(0, self.cycles.raw())
    }
}

/// The system's time by the counter, which shows `now_ns`, if that can be where the cached clock shows this.
#[inline]
fn time_by(offset_ns: u64, now_ns: u64, cached: Timestamp) -> Option<Timestamp> {
    let now = Timestamp::from_micros(now_ns.wrapping_add(offset_ns) / 1000);
    let in_time = now >= cached && now <= cached.plus_micros(VALID_US);
    (in_time && offset_ns != UNUSABLE).then_some(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN_NS: u64 = 1 << 62;

    fn system_now() -> Timestamp {
        Timestamp::from_micros(system_now_ns() / 1000)
    }

    /// Sets it as often as it takes for nobody to be held up meanwhile; returns the time by it.
    fn set(counter: &Counter, cached: Timestamp) -> Option<Timestamp> {
        (0..1000).find_map(|_| {
            counter.set();
            counter.now(cached)
        })
    }

    #[test]
    fn counter_is_used_within_two_ticks_of_the_cached_clock_only() {
        let (cycles, mock) = quanta::Clock::mock();
        mock.increment(BEGIN_NS);
        let counter = Counter::unset(cycles);
        assert_eq!(counter.now(system_now()), None, "not set");
        let before = system_now();
        // The cached clock as the ticker would set it.
        let now = (0..1000).find_map(|_| set(&counter, system_now().minus_micros(100))).unwrap();
        assert!(before <= now && now <= system_now(), "{before:?} {now:?}");
        assert_eq!(counter.now(now.plus_micros(1)), None, "the cached clock is ahead");
        mock.increment(VALID_US * 1000);
        assert!(counter.now(now).is_some());
        mock.increment(1000);
        assert_eq!(counter.now(now), None, "the ticker is late");
        mock.decrement(BEGIN_NS);
        assert_eq!(counter.now(now), None, "it began anew");
    }

    #[test]
    fn offset_from_before_a_jump_is_not_used_beside_the_time_after_it() {
        let (cycles, mock) = quanta::Clock::mock();
        mock.increment(BEGIN_NS);
        let counter = Counter::unset(cycles);
        assert!(set(&counter, system_now().minus_micros(100)).is_some());
        // A reader has loaded the offset; the counter jumps, and the ticker sets it and the clock.
        let offset_ns = counter.offset_ns.load(Ordering::Relaxed);
        for jump_ns in [1_000_000_000, BEGIN_NS] {
            mock.increment(jump_ns);
            let cached = system_now();
            assert_eq!(time_by(offset_ns, counter.now_ns(), cached), None, "ahead by {jump_ns}");
            mock.decrement(jump_ns);
        }
        for jump_ns in [1_000_000_000, BEGIN_NS] {
            mock.decrement(jump_ns);
            let cached = system_now();
            assert_eq!(time_by(offset_ns, counter.now_ns(), cached), None, "behind by {jump_ns}");
            mock.increment(jump_ns);
        }
        // Nor is the new offset beside the time before.
        let cached = system_now();
        mock.increment(1_000_000_000);
        assert_eq!(counter.now(cached), None);
    }

    #[test]
    fn counter_that_does_not_keep_the_systems_time_is_not_used() {
        let (cycles, mock) = quanta::Clock::mock();
        let counter = Counter::unset(cycles);
        for _ in 0..100 {
            let before_ns = system_now_ns();
            while system_now_ns() < before_ns + 2 * APART_NS {}
            counter.set();
            assert_eq!(counter.now(system_now().minus_micros(100)), None);
            mock.increment(1);
        }
    }
}
