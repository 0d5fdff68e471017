//! Where a limit's buckets stand: a table that decisions read without any lock.
//!
//! Buckets are two cache lines each, and neither moved nor freed while the table lives; an [`Index`]
//! leads from a key's hash to its bucket's place, and the bucket tells whether the key is the same.
//! Whoever makes or evicts keys holds the keeper's lock, and is the only one to write to the index; a
//! reader who finds nothing there looks again with the lock held. A place whose key was evicted can be
//! given to another key at once: [`line`](super::line) says why no decision mistakes one for the other.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;

use super::index::{Index, Moved, PLACE_MAX};
use super::key_hash::{KeyHash, KeyHasher};
use super::key_text::{LongKeys, LongSlots};
use super::line::{Bucket, Lines, Start};
use super::outcome::{Taken, Verdict};
use super::vacant::Vacant;
use super::word::Word;
use crate::time::Timestamp;

/// The most keys that all limits of one limiter may hold together.
pub const KEYS_MAX: usize = 50_000_000;

/// While others wait for a moment at the keeper's, so many places are looked at.
const SCAN: u32 = 1024;
/// Counters of the same thing, so that threads rarely meet at one.
const STRIPES: usize = 16;

/// The place of the bucket that keys share for which there is no room. No entry of the index leads
/// here: none is 0 but empty ones.
pub(crate) const OVERFLOW: u32 = 0;

const _: () = assert!(KEYS_MAX <= PLACE_MAX as usize);

/// How many keys all limits of one limiter may hold together.
#[derive(Debug)]
pub(crate) struct KeyBudget {
    used: AtomicUsize,
    max: usize,
}

impl KeyBudget {
    /// A budget of `max` keys.
    pub(crate) fn new(max: usize) -> Self {
        Self { used: AtomicUsize::new(0), max: max.min(KEYS_MAX) }
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

/// What only those touch who make or forget keys.
#[derive(Debug, Default)]
struct Keeper {
    /// Places whose keys were evicted.
    vacant: Vacant,
    long: LongSlots,
    /// The last place that was ever given; the first one is 1.
    last: u32,
    /// Entries in the index.
    entries: usize,
    /// Where in the index each place's key is looked for first; of a vacant one, the next vacant one.
    /// One piece of memory from the start, which the system makes up as it is written to: never copied.
    homes: Box<[u32]>,
    moved: Moved,
    /// Places that may not be given up, and how many hold on to them.
    held: HashMap<u32, u32>,
    /// Where the search for idle keys goes on.
    scanned: u32,
}

/// Decisions of a limit, beside what its buckets count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitCounts {
    /// Unsure ones.
    pub(crate) unsure: u64,
    /// Denied ones that no bucket counts.
    pub(crate) denied: u64,
    /// Tokens that buckets count as denied, less the number of requests.
    pub(crate) denied_surplus: u64,
    /// Those about keys for which there was no room.
    pub(crate) overflowed: u64,
}

/// The same since they were last taken, as it is counted.
#[derive(Debug, Default)]
struct Counts {
    unsure: AtomicU64,
    denied: AtomicU64,
    denied_surplus: AtomicU64,
    overflowed: AtomicU64,
}

/// The buckets of one limit.
pub(crate) struct Table {
    /// The limit's number.
    limit: u32,
    hasher: KeyHasher,
    index: Index,
    lines: Lines,
    long: LongKeys,
    budget: Arc<KeyBudget>,
    keeper: Mutex<Keeper>,
    /// What is counted by limit alone.
    counts: [CachePadded<Counts>; STRIPES],
}

/// Keys may be secret, and there are many.
impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Table {
    /// An empty table that draws on `budget`, whose overflow bucket holds what `overflow` says. `None` if
    /// there is not so much memory.
    pub(crate) fn new(
        limit: u32,
        hasher: KeyHasher,
        budget: Arc<KeyBudget>,
        overflow: Start,
    ) -> Option<Self> {
        let places = 1 + budget.max();
        let lines = Lines::new(places)?;
        let homes = bytemuck::try_zeroed_slice_box(places).ok()?;
        lines.first()?.init(b"", None, overflow);
        Some(Self {
            limit,
            hasher,
            index: Index::new(budget.max())?,
            lines,
            long: LongKeys::default(),
            budget,
            keeper: Mutex::new(Keeper { homes, ..Keeper::default() }),
            counts: Default::default(),
        })
    }

    /// The place of a bucket of this table.
    #[inline(always)]
    pub(crate) fn place(&self, bucket: &Bucket) -> u32 {
        let offset = std::ptr::from_ref(bucket).addr() - self.lines.as_ptr().addr();
        let place = offset / size_of::<Bucket>();
        debug_assert!(place < self.lines.len(), "of another table");
        place as u32
    }

    /// Where the index is looked into first for `key`.
    #[inline(always)]
    pub(crate) fn hash(&self, key: &[u8]) -> KeyHash {
        self.hasher.hash(key)
    }

    /// The keys that all limits of the limiter hold together.
    pub(crate) fn budget(&self) -> &KeyBudget {
        &self.budget
    }

    /// The bucket at `place`, which was given.
    #[inline(always)]
    pub(crate) fn at(&self, place: u32) -> &Bucket {
        &self.lines[place as usize]
    }

    /// The bucket of `key`, whose hash this is.
    pub(crate) fn find(&self, hash: KeyHash, key: &[u8]) -> Option<Found<'_>> {
        self.index.find(hash, |place| self.get(place, key))
    }

    /// The same if it is there where it is looked for first.
    #[inline(always)]
    pub(crate) fn find_at_home(&self, hash: KeyHash, key: &[u8]) -> Option<Found<'_>> {
        self.get(self.index.find_at_home(hash)?, key)
    }

    /// The bucket at `place`, if it is that of `key`.
    #[inline(always)]
    fn get(&self, place: u32, key: &[u8]) -> Option<Found<'_>> {
        let bucket = self.lines.get(place as usize)?;
        // Before the key is compared: see there.
        let word = bucket.load();
        (self.is_of(bucket, key) && !word.gone()).then_some(Found { bucket, word })
    }

    /// The bucket at `place`, which is held, or that of keys for which there is no room.
    #[inline(always)]
    pub(crate) fn found_at(&self, place: u32) -> Found<'_> {
        let bucket = self.at(place);
        Found { bucket, word: bucket.load() }
    }

    /// Whether the bucket is that of `key` now.
    #[inline(always)]
    pub(crate) fn is_of(&self, bucket: &Bucket, key: &[u8]) -> bool {
        bucket.is_of(key, &self.long)
    }

    /// Makes the bucket of `key`, whose hash this is, if nobody else has meanwhile; returns its place. A
    /// key for which there is no room has the overflow bucket.
    pub(crate) fn make(&self, hash: KeyHash, key: &[u8], start: impl FnOnce() -> Start) -> u32 {
        let place = self.make_kept(&mut self.keeper(), hash, key, start);
        if place == OVERFLOW {
            self.counts[0].overflowed.fetch_add(1, Ordering::Relaxed);
        }
        place
    }

    fn make_kept(
        &self,
        keeper: &mut Keeper,
        hash: KeyHash,
        key: &[u8],
        start: impl FnOnce() -> Start,
    ) -> u32 {
        if let Some(found) = self.find(hash, key) {
            return self.place(found.bucket);
        }
        if !self.budget.claim() {
            return OVERFLOW;
        }
        let Some((place, long)) = self.vacancy(keeper, Bucket::is_long(key)) else {
            self.budget.release(1);
            return OVERFLOW;
        };
        self.at(place).init(key, long.map(|slot| (slot, &self.long)), start());
        keeper.homes[place as usize] = hash.home();
        self.index.enter(hash, place, keeper.entries, &keeper.homes, &mut keeper.moved);
        keeper.entries += 1;
        place
    }

    /// A place that has no key, and a slot for a long key; `None` if there is no memory.
    fn vacancy(&self, keeper: &mut Keeper, long: bool) -> Option<(u32, Option<u64>)> {
        let slot = if long { Some(keeper.long.take(&self.long)?) } else { None };
        let place = keeper.vacant.pop(&keeper.homes).or_else(|| {
            // The budget has room for one more, and so has the table.
            keeper.last += 1;
            (keeper.last as usize <= self.budget.max()).then_some(keeper.last)
        });
        Some((place?, slot))
    }

    /// Forgets keys that nobody holds and that are idle and full, looking at `most` places; returns
    /// how many. `unit` and `local` are those of [`Bucket`].
    pub(crate) fn evict(&self, most: u32, now: Timestamp, unit: i64, local: bool) -> usize {
        let mut forgotten = 0;
        for _ in 0..most.div_ceil(SCAN) {
            // Whoever makes a key meanwhile waits for this much at most.
            let keeper = &mut *self.keeper();
            for _ in 0..SCAN.min(keeper.last) {
                let place = if keeper.scanned < keeper.last { keeper.scanned + 1 } else { 1 };
                keeper.scanned = place;
                let bucket = self.at(place);
                let kept = bucket.is_gone() || keeper.held.contains_key(&place);
                if !kept && bucket.try_forget(now, unit, local) {
                    self.index.strike(place, &keeper.homes, &keeper.moved);
                    keeper.entries -= 1;
                    keeper.vacant.push(place, &mut keeper.homes);
                    bucket.long_slot().into_iter().for_each(|slot| keeper.long.give_back(slot));
                    forgotten += 1;
                }
            }
        }
        self.budget.release(forgotten);
        forgotten
    }

    /// Gives this credit to every bucket of which the engine keeps no books. A full one gets its first credit
    /// when it is used.
    pub(crate) fn rest_on(&self, credit: u32) {
        let last = self.keeper().last;
        (OVERFLOW..=last).for_each(|place| self.at(place).rest_on(credit));
    }

    /// Counts a decision about `cost` tokens at `place`: whether it was unsure, and of a denial what the
    /// bucket does not say.
    pub(crate) fn count(&self, place: u32, taken: &Taken, cost: u32) {
        let counts = &self.counts[place as usize % STRIPES];
        if !taken.sure && taken.verdict != Verdict::Unsure {
            counts.unsure.fetch_add(1, Ordering::Relaxed);
        }
        if taken.uncounted {
            counts.denied.fetch_add(1, Ordering::Relaxed);
        } else if cost > 1 && taken.verdict == Verdict::Denied {
            counts.denied_surplus.fetch_add(u64::from(cost - 1), Ordering::Relaxed);
        }
    }

    /// What was counted since the last time.
    pub(crate) fn take_counts(&self) -> LimitCounts {
        let take = |of: fn(&Counts) -> &AtomicU64| {
            self.counts.iter().map(|counts| of(counts).swap(0, Ordering::Relaxed)).sum()
        };
        LimitCounts {
            unsure: take(|counts| &counts.unsure),
            denied: take(|counts| &counts.denied),
            denied_surplus: take(|counts| &counts.denied_surplus),
            overflowed: take(|counts| &counts.overflowed),
        }
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A bucket that a decision has found, and its word from before the key was compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<'a> {
    pub(crate) bucket: &'a Bucket,
    pub(crate) word: Word,
}

/// A bucket and the table that it stands in. Cheap to clone. Whoever keeps one for long holds the
/// place ([`Held`]), or keeps books on it: then it is not given up.
#[derive(Clone, Debug)]
pub(crate) struct BucketRef {
    table: Arc<Table>,
    place: u32,
}

impl BucketRef {
    /// The bucket at `place` of `table`.
    pub(crate) fn new(table: &Arc<Table>, place: u32) -> Self {
        Self { table: table.clone(), place }
    }

    /// The limit's number.
    pub(crate) fn limit(&self) -> u32 {
        self.table.limit
    }

    /// The key, which must not be evicted meanwhile; empty for the overflow bucket.
    pub(crate) fn key(&self) -> Arc<[u8]> {
        Bucket::key(self, &self.table.long).into()
    }

    /// Whether it is the bucket of keys for which there is no room.
    pub(crate) fn is_overflow(&self) -> bool {
        self.place == OVERFLOW
    }

    /// Its place in the table.
    pub(crate) fn place(&self) -> u32 {
        self.place
    }
}

impl Deref for BucketRef {
    type Target = Bucket;

    #[inline]
    fn deref(&self) -> &Bucket {
        self.table.at(self.place)
    }
}

/// A bucket whose place is not given up while this lives.
#[derive(Debug)]
pub(crate) struct Held {
    place: BucketRef,
}

impl Held {
    /// Holds the bucket of `key`: see [`Table::make`].
    pub(crate) fn new(table: &Arc<Table>, key: &[u8], start: impl FnOnce() -> Start) -> Self {
        let keeper = &mut *table.keeper();
        let place = table.make_kept(keeper, table.hash(key), key, start);
        *keeper.held.entry(place).or_default() += 1;
        Self { place: BucketRef::new(table, place) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let keeper = &mut *self.place.table.keeper();
        if let Some(holders) = keeper.held.get_mut(&self.place.place) {
            *holders -= 1;
            if *holders == 0 {
                keeper.held.remove(&self.place.place);
            }
        }
    }
}

impl Deref for Held {
    type Target = BucketRef;

    fn deref(&self) -> &BucketRef {
        &self.place
    }
}

#[cfg(test)]
mod tests;
