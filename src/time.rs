//! Time as a value: nothing here, or in any floor up to the driver, reads a clock.
//!
//! A [`Timestamp`] counts microseconds since an arbitrary origin that suspend does not stop. A
//! [`Clock`] is one shared word that holds the latest timestamp: a ticker thread writes it in
//! production, a test writes it by hand, and a decision only loads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;

/// A point in time, in microseconds since the clock's origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The clock's origin.
    pub const ZERO: Self = Self(0);
    /// Later than every other timestamp: 'never'.
    pub const NEVER: Self = Self(u64::MAX);

    /// A timestamp that lies `micros` after the origin.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the origin.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Whole milliseconds since the origin.
    pub(crate) const fn millis(self) -> u64 {
        self.0 / 1000
    }

    /// Microseconds from `earlier` to `self`, 0 when `earlier` is later.
    pub const fn micros_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The timestamp `micros` after this one.
    #[must_use]
    pub const fn plus_micros(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// The timestamp `micros` before this one, not before the origin.
    #[must_use]
    pub const fn minus_micros(self, micros: u64) -> Self {
        Self(self.0.saturating_sub(micros))
    }
}

/// The time as a decision asks for it.
pub(crate) trait Now: Copy {
    /// The time that normally will do: at most [`CLOCK_AGE_MAX_US`] old, nearly for nothing.
    fn cached(&self) -> Timestamp;
    /// The time to a microsecond or two.
    fn precise(&self) -> Timestamp;
}

impl Now for Timestamp {
    fn cached(&self) -> Timestamp {
        *self
    }

    fn precise(&self) -> Timestamp {
        *self
    }
}

/// One moment by a node's clock, whose cached time may be behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) cached: Timestamp,
    pub(crate) precise: Timestamp,
}

impl Now for Reading {
    fn cached(&self) -> Timestamp {
        self.cached
    }

    fn precise(&self) -> Timestamp {
        self.precise
    }
}

/// How old the cached clock is at most; an older one is a stall, which is noticed and counted.
pub(crate) const CLOCK_AGE_MAX_US: u64 = 20_000;

/// A duration in whole microseconds, saturating.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The cached clock that decisions read: one relaxed load, no system call.
///
/// Cheap to clone; all clones show the same time. It never steps back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// Publishes nothing but itself, hence `Relaxed` on both sides.
    now_us: Arc<CachePadded<AtomicU64>>,
}

impl Clock {
    /// A clock that stands at its origin until somebody sets it.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The time last set.
    #[inline]
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(self.now_us.load(Ordering::Relaxed))
    }

    /// Moves the clock to `now`; an earlier time changes nothing.
    pub(crate) fn set(&self, now: Timestamp) {
        self.now_us.fetch_max(now.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_never_steps_back() {
        let clock = Clock::new();
        clock.set(Timestamp::from_micros(7));
        clock.set(Timestamp::from_micros(3));
        assert_eq!(clock.now().as_micros(), 7);
    }
}
