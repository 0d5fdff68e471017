//! Whether new keys come faster than a node expects.

use crate::time::Timestamp;

/// More new keys a second than this are a flood, and so are as many at once.
const NEWCOMERS_PER_SECOND: u64 = 100;

/// Counts new keys. In a flood of them most come once: they get no lease, so that they cost one sync.
#[derive(Debug, Default)]
pub(super) struct Flood {
    /// Up to when the keys that have come use up what is expected.
    used_until: Timestamp,
}

impl Flood {
    /// Whether one more new key is no flood; if so, it counts.
    pub(super) fn admit(&mut self, now: Timestamp) -> bool {
        let expected = self.used_until <= now.plus_micros(1_000_000);
        if expected {
            let gap_us = 1_000_000 / NEWCOMERS_PER_SECOND;
            self.used_until = self.used_until.max(now).plus_micros(gap_us);
        }
        expected
    }
}
