//! The map from keys to buckets: the one place that knows it is a `DashMap`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;

use super::state::Bucket;

/// Enough shards that two threads rarely meet in one.
const SHARDS: usize = 256;

/// How many keys all limits of one limiter may hold together.
#[derive(Debug)]
pub(crate) struct KeyBudget {
    used: AtomicUsize,
    max: usize,
}

impl KeyBudget {
    /// A budget of `max` keys.
    pub(crate) fn new(max: usize) -> Self {
        Self { used: AtomicUsize::new(0), max }
    }

    /// Keys held now.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The most keys allowed.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    fn claim(&self) -> bool {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                (used < self.max).then_some(used + 1)
            })
            .is_ok()
    }

    fn release(&self, keys: usize) {
        self.used.fetch_sub(keys, Ordering::Relaxed);
    }
}

/// The buckets of one limit.
#[derive(Debug)]
pub(crate) struct BucketMap {
    map: DashMap<Box<[u8]>, Arc<Bucket>, foldhash::quality::RandomState>,
    budget: Arc<KeyBudget>,
    /// Where keys go that find no room: they share one bucket, and starve nobody else.
    overflow: Arc<Bucket>,
}

impl BucketMap {
    /// An empty map that draws on `budget`.
    pub(crate) fn new(budget: Arc<KeyBudget>, overflow: Bucket) -> Self {
        let hasher = foldhash::quality::RandomState::default();
        Self {
            map: DashMap::with_capacity_and_hasher_and_shard_amount(0, hasher, SHARDS),
            budget,
            overflow: Arc::new(overflow),
        }
    }

    /// Calls `body` with the bucket of `key`, made by `create` if it is new. A new key beyond the
    /// budget gets the overflow bucket. The shard is locked for as long as `body` runs.
    #[inline]
    pub(crate) fn with<T>(
        &self,
        key: &[u8],
        create: impl FnOnce() -> Bucket,
        body: impl FnOnce(&Arc<Bucket>) -> T,
    ) -> T {
        if let Some(found) = self.map.get(key) {
            return body(found.value());
        }
        self.with_new(key, create, body)
    }

    #[cold]
    fn with_new<T>(
        &self,
        key: &[u8],
        create: impl FnOnce() -> Bucket,
        body: impl FnOnce(&Arc<Bucket>) -> T,
    ) -> T {
        if !self.budget.claim() {
            return body(&self.overflow);
        }
        match self.map.entry(key.into()) {
            dashmap::Entry::Occupied(found) => {
                self.budget.release(1);
                body(found.get())
            }
            dashmap::Entry::Vacant(place) => body(place.insert(Arc::new(create())).value()),
        }
    }

    /// Calls `body` with the bucket of `key` if there is one.
    pub(crate) fn find<T>(&self, key: &[u8], body: impl FnOnce(&Arc<Bucket>) -> T) -> Option<T> {
        self.map.get(key).map(|found| body(found.value()))
    }

    /// Forgets the buckets that nobody holds and that `idle` calls idle; returns how many.
    ///
    /// Nobody can take hold of a bucket meanwhile: that needs the shard, which is locked.
    pub(crate) fn evict(&self, idle: impl Fn(&Bucket) -> bool) -> usize {
        let mut evicted = 0;
        self.map.retain(|_, bucket| {
            let keep = Arc::strong_count(bucket) > 1 || !idle(bucket);
            evicted += usize::from(!keep);
            keep
        });
        self.budget.release(evicted);
        evicted
    }

    /// Gives every bucket that rests this credit.
    pub(crate) fn rest_on(&self, credit: u32) {
        self.map.iter().for_each(|entry| entry.value().rest_on(credit));
        self.overflow.rest_on(credit);
    }

    /// The buckets that were touched since they were last collected, the overflow bucket included.
    pub(crate) fn touched(&self) -> Vec<Arc<Bucket>> {
        let all = self.map.iter().map(|entry| entry.value().clone());
        all.chain([self.overflow.clone()]).filter(|bucket| bucket.is_touched()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Timestamp;

    fn bucket(key: &[u8]) -> Bucket {
        Bucket::new(0, 0, key, 1)
    }

    #[test]
    fn keys_beyond_the_budget_share_the_overflow_bucket() {
        let map = BucketMap::new(Arc::new(KeyBudget::new(2)), bucket(b""));
        for key in [b"a", b"b", b"c", b"d"] {
            let found = map.with(key, || bucket(key), |bucket| bucket.key.to_vec());
            assert_eq!(found, if key < b"c" { key.to_vec() } else { Vec::new() });
        }
        assert_eq!(map.budget.used(), 2);
    }

    #[test]
    fn eviction_takes_only_buckets_that_nobody_holds_and_that_are_idle() {
        let map = BucketMap::new(Arc::new(KeyBudget::new(3)), bucket(b""));
        let now = Timestamp::from_micros(10);
        let held = map.with(b"held", || bucket(b"held"), Arc::clone);
        map.with(b"idle", || bucket(b"idle"), |_| ());
        map.with(b"spent", || bucket(b"spent"), |bucket| bucket.take(1, now, 1));
        let evict = || map.evict(|bucket| bucket.is_idle_and_full(now, 1, 1, false));
        assert_eq!(evict(), 1);
        assert_eq!(map.budget.used(), 2);
        drop(held);
        assert_eq!(evict(), 1);
        assert!(map.find(b"spent", |_| ()).is_some());
    }
}
