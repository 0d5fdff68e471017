//! A node's own clock: it may run fast or slow, jump, and stand still for decisions.

use crate::time::{Reading, Timestamp};

/// How often the cached clock that decisions read is set, in microseconds.
pub(super) const TICKER_PERIOD_US: u64 = 1_000;

/// Local time as a function of the world's.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeClock {
    /// World and local time at the last change.
    world_us: u64,
    local_us: u64,
    /// How much faster than the world's it runs, in millionths.
    error_ppm: i64,
    /// Until then (the world's time) the cached clock stands still, at what it showed.
    stalled_until_us: u64,
    stalled_at_us: u64,
}

impl NodeClock {
    /// A clock that shows `local_us` at `world_us`.
    pub(super) fn new(world_us: u64, local_us: u64, error_ppm: i64) -> Self {
        Self { world_us, local_us, error_ppm, stalled_until_us: 0, stalled_at_us: 0 }
    }

    fn local_us(&self, world_us: u64) -> u64 {
        let passed = i128::from(world_us.saturating_sub(self.world_us));
        let error = passed * i128::from(self.error_ppm) / 1_000_000;
        self.local_us + (passed + error).max(0) as u64
    }

    /// What the driver reads.
    pub(super) fn now(&self, world_us: u64) -> Timestamp {
        Timestamp::from_micros(self.local_us(world_us))
    }

    /// What decisions read: the ticker's last copy.
    pub(super) fn cached(&self, world_us: u64) -> Timestamp {
        let shown = self.local_us(world_us) / TICKER_PERIOD_US * TICKER_PERIOD_US;
        let stalled = world_us < self.stalled_until_us;
        Timestamp::from_micros(if stalled { self.stalled_at_us.min(shown) } else { shown })
    }

    /// What a decision at `world_us` reads.
    pub(super) fn reading(&self, world_us: u64) -> Reading {
        Reading { cached: self.cached(world_us), precise: self.now(world_us) }
    }

    /// When the clock will show `local`, by the world's time.
    pub(super) fn world_us(&self, local: Timestamp) -> u64 {
        let ahead = i128::from(local.as_micros().saturating_sub(self.local_us));
        let speed = 1_000_000 + i128::from(self.error_ppm);
        let wait = (ahead * 1_000_000 + speed - 1) / speed;
        u64::try_from(i128::from(self.world_us) + wait).unwrap_or(u64::MAX)
    }

    /// Jumps ahead by `by_us`.
    pub(super) fn jump(&mut self, world_us: u64, by_us: u64) {
        self.local_us = self.local_us(world_us) + by_us;
        self.world_us = world_us;
    }

    /// Decisions read the same time for `for_us`.
    pub(super) fn stall(&mut self, world_us: u64, for_us: u64) {
        self.stalled_at_us = self.cached(world_us).as_micros();
        self.stalled_until_us = world_us + for_us;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_set_by_the_local_clock_rings_when_that_clock_shows_its_time() {
        for error_ppm in [-500, 0, 1, 499] {
            let mut clock = NodeClock::new(1_000, 5_000_000, error_ppm);
            clock.jump(3_000_000, 70_000);
            for wait_us in [0, 1, 999, 1_000_003, 3_600_000_000] {
                let local = clock.now(3_000_000).plus_micros(wait_us);
                let at_us = clock.world_us(local);
                assert!(clock.now(at_us) >= local, "{error_ppm} {wait_us}");
                // Rounded to a microsecond of either clock.
                assert!(at_us <= 3_000_001 || clock.now(at_us - 2) < local);
            }
        }
    }

    #[test]
    fn stall_freezes_what_decisions_read_and_nothing_else() {
        let mut clock = NodeClock::new(0, 1_000_000, 0);
        clock.stall(5_500, 20_000);
        assert_eq!(clock.cached(25_499).as_micros(), 1_005_000);
        assert_eq!(clock.cached(25_500).as_micros(), 1_025_000);
        assert_eq!(clock.now(20_000).as_micros(), 1_020_000);
    }
}
