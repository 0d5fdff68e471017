//! When idle keys are looked for, to make room for new ones.

use super::Limits;
use crate::bucket::Evictable;
use crate::time::Timestamp;

/// So many keys of a limit are looked at in one search, which takes about a millisecond.
const PLACES: u32 = 16_384;
/// Between two searches there is at least this, unless the last one found many keys.
const GAP_US: u64 = 25_000;
/// A limit with fewer free 64ths is looked after each time; otherwise when the driver runs for another reason, each second
/// at least.
const FILLING_BELOW: usize = 32;
/// With fewer, keys are evicted that are full.
const FULL_BELOW: usize = 8;
/// With fewer, also those that were asked for once, as invented keys are.
const SEEN_ONCE_BELOW: usize = 4;
/// With fewer, all that the store knows. New keys have the last 64th only if their callers can wait.
const REPORTED_BELOW: usize = 2;
/// While searches find nothing, the gap doubles up to this.
const GAP_MAX_US: u64 = 5_000_000;
/// The same while keys of another kind may have to be looked for soon.
const GAP_WIDER_US: u64 = 200_000;

/// Looks for idle keys of limits that are nearly full, a few at a time.
#[derive(Debug)]
pub(super) struct Evictor {
    next: Timestamp,
    gap_us: u64,
    /// Places that were looked at since the last key was found.
    fruitless: usize,
    /// Whether a limit may be full before the driver wakes for another reason.
    is_filling: bool,
}

impl Evictor {
    pub(super) fn new() -> Self {
        Self { next: Timestamp::ZERO, gap_us: GAP_US, fruitless: 0, is_filling: false }
    }

    /// When to look again.
    pub(super) fn wake_at(&self) -> Timestamp {
        if self.is_filling { self.next } else { Timestamp::NEVER }
    }

    /// Looks, if it is time. All limits together hold `max_keys` at most. Returns how many keys were evicted.
    pub(super) fn look(&mut self, limits: &Limits, max_keys: usize, now: Timestamp) -> usize {
        if now < self.next {
            return 0;
        }
        let (mut evicted, mut has_searched, mut gap_max_us) = (0, false, GAP_MAX_US);
        self.is_filling = false;
        for limit in limits.all() {
            let free = limit.free_64ths();
            self.is_filling |= free < FILLING_BELOW;
            limit.forget_marks(now);
            let what = match free {
                0..REPORTED_BELOW => Evictable::Reported,
                REPORTED_BELOW..SEEN_ONCE_BELOW => Evictable::SeenOnce,
                SEEN_ONCE_BELOW..FULL_BELOW => Evictable::Full,
                _ => continue,
            };
            has_searched = true;
            if what != Evictable::Reported {
                gap_max_us = GAP_WIDER_US;
            }
            evicted += limit.evict(PLACES, now, what);
        }
        // Where there is room, nothing was looked for, and nothing is known of what a search would find.
        let is_fruitless = has_searched && evicted == 0;
        self.fruitless = if is_fruitless { self.fruitless + PLACES as usize } else { 0 };
        self.gap_us = match evicted {
            _ if self.fruitless >= max_keys => (self.gap_us * 2).clamp(GAP_US, gap_max_us),
            _ if evicted * 4 > PLACES as usize => 0,
            _ => GAP_US,
        };
        self.next = now.plus_micros(self.gap_us);
        evicted
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bucket::{KeyBudget, NewKey, Room};
    use crate::driver::clock::TimeSource;
    use crate::driver::definition::LimitParts;
    use crate::driver::manual::ManualClock;
    use crate::driver::{AloneBuckets, Buckets};
    use crate::limit::{Limit, NodeTerms};
    use crate::quota::Quota;

    /// A node that had been quiet searched once in five seconds, and new keys had no room meanwhile.
    #[test]
    fn node_that_had_room_for_long_makes_room_at_once_when_keys_come() {
        const KEYS: usize = 1000;
        let time = TimeSource::Manual(ManualClock::new());
        let (budget, limits) = (Arc::new(KeyBudget::new(KEYS, 1)), Limits::new(1, [1, 2]));
        let node_terms = NodeTerms { has_store: false, max_nodes: None, uncounted: 1 };
        let limit = Limit::new("x", Quota::per_second(100));
        let parts = LimitParts::new(&limit, node_terms, None).unwrap();
        limits.add(limits.make(&[parts], &budget, &time).unwrap());
        let mut evictor = Evictor::new();
        let mut now = Timestamp::from_micros(10_000_000);
        for _ in 0..800 {
            now = now.plus_micros(GAP_US);
            assert_eq!(evictor.look(&limits, KEYS, now), 0);
        }
        let Buckets::Alone(AloneBuckets::Turns(local)) = &limits.get(0).unwrap().buckets else {
            panic!("a token bucket without a store")
        };
        for key in 0..KEYS as u32 - 50 {
            let new = NewKey { first_credit: 0, plan: NewKey::NO_PLAN };
            let _ = local.table.find_or_insert(&key.to_le_bytes(), new, Room::Any);
        }
        assert!(evictor.look(&limits, KEYS, now.plus_micros(GAP_US)) > 0);
    }
}
