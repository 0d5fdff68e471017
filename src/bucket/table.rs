//! A limit's buckets by key, in a table that decisions read without a lock.
//!
//! Buckets do not move and are not freed while the table lives. An [`Index`] leads from a key's hash to the place of
//! its bucket, and the bucket tells whether the key is the same. A thread that adds or evicts keys holds the writer's
//! lock, and only it writes to the index. A reader that finds nothing there looks again with the lock held.
//!
//! # Argument
//!
//! A place can be given to another key while a decision has its bucket in hand. The bucket's word says when: eviction
//! *retires* the word; then the next key is stored; then the word is published, and differs from every word of an
//! earlier key. So:
//!
//! - A decision loads the word first, then compares the key, and changes the word only by a compare-and-swap from the
//!   value that it loaded. If the swap succeeds, the key that was compared is the one that pays.
//! - If the swap fails because the key or the lease has changed, the decision looks the key up again.
//!
//! # Orderings
//!
//! The key is stored after the word is retired and before it is published with `Release`; the word is loaded with
//! `Acquire` and swapped with at least `AcqRel`. Suppose that a decision read a later key than that of the word it loaded,
//! and its swap succeeded. Then the eviction would have read the swapped word or a later one, and the later key would
//! have been stored after the decision read it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};

use crossbeam_utils::CachePadded;

use super::atomic::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use super::index::{Index, IndexWriter};
use super::key_hash::{KeyHash, KeyHasher, PLACE_MAX};
use super::marks::Marks;
use super::new_key::NewKey;
use super::spend_result::{SpendResult, Verdict};
use super::stored_key::{LongKeys, LongSlots, SHORT_WORDS, SLAB, StoredKey, short_words};
use crate::quota::Scale;
use crate::time::{Now, Timestamp};

/// The most keys that all limits of one limiter may hold together.
pub const KEYS_MAX: usize = 50_000_000;

/// Eviction looks at this many places before it lets other writers in: for some microseconds.
const EVICTION_SLICE: u32 = 64;
/// The most marks of all limits for each key that they may hold together.
const MARKS: usize = 4;
/// One part in so many of what a limit could hold is the [last room](Room::NotLast).
const LAST_ROOM: usize = 64;
/// Counters of the same thing, so that threads rarely meet at one.
const STRIPES: usize = 16;

/// The place of the bucket that keys share for which there is no room. No entry of the index leads here: a zero entry
/// is empty.
pub(crate) const OVERFLOW: u32 = 0;

const _: () = assert!(KEYS_MAX <= PLACE_MAX as usize);

/// A kind of bucket that a table can hold.
pub(crate) trait TableBucket: Default + Send + Sync + 'static {
    /// The state that a decision loads before it compares the key, and swaps.
    type Word: Copy + fmt::Debug;
    /// What it is asked.
    type Ask: Copy;
    /// What it answers.
    type Answer;
    /// By what it knows that a key is as if it had never been used.
    type Rule;
    /// Whether a key that was evicted before it was full can have left a mark.
    const HAS_MARKS: bool;
    /// The state now.
    fn load(&self) -> Self::Word;
    /// Whether the place has no key.
    fn is_retired(word: Self::Word) -> bool;
    /// Where the key is stored.
    fn key(&self) -> StoredKey<'_>;
    /// Begins the life of a key, which has been stored. A marked one was evicted before it was full.
    fn start(&self, new: NewKey, is_marked: bool);
    /// Decides. `None`, and nothing is changed, if the place was given to another key since the word was `seen`: look
    /// the key up again.
    fn try_decide(&self, seen: Self::Word, ask: Self::Ask, time: impl Now) -> Option<Self::Answer>;
    /// Retires the bucket if its key may be evicted. Returns when the key is full.
    fn try_retire(&self, now: Timestamp, rule: &Self::Rule, what: Evictable) -> Option<Timestamp>;
}

/// The room that a new key may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Any,
    /// Not the last room, which is for callers who wait for the store's word. So one who is new finds room while keys
    /// are invented.
    NotLast,
}

/// Which keys may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evictable {
    /// Those that are full.
    Full,
    /// Also those of which the store knows all that was spent, if they were asked for once.
    SeenOnce,
    /// Also all others of which the store knows that.
    Reported,
}

/// How many keys all limits of one limiter may hold together. One half is split into shares, of which each limit has one
/// to itself. The other half is common: whoever comes first has it.
#[derive(Debug)]
pub(crate) struct KeyBudget {
    used: AtomicUsize,
    max: usize,
    /// Limits that were there from the beginning.
    limits: usize,
    /// Keys that limits may add beyond their shares.
    common: AtomicUsize,
    /// The most keys that one limit may hold.
    limit_max: usize,
    /// The most marks in a generation of one limit.
    marks_max: usize,
}

impl KeyBudget {
    /// A budget of `max` keys for `limits` limits.
    pub(crate) fn new(max: usize, limits: usize) -> Self {
        let (max, limits) = (max.min(KEYS_MAX), limits.max(1));
        let own_share = max / 2 / limits;
        let common = max - own_share * limits;
        let (limit_max, marks_max) = (own_share + common, MARKS * (max / limits).max(1));
        let (used, common) = (AtomicUsize::new(0), AtomicUsize::new(common));
        Self { used, max, limits, common, limit_max, marks_max }
    }

    /// Keys held now.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The most keys allowed.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// The share of the limit with this number. One that was not there from the beginning gets a part of what is common and free:
    /// the first a quarter, the others less, all of them together less than half.
    fn share_of(&self, limit: u32) -> usize {
        let own_share = self.max / 2 / self.limits;
        let Some(added) = (limit as usize).checked_sub(self.limits) else { return own_share };
        let share = (self.max - own_share * self.limits) / 2 / (added + 1) / (added + 2);
        let less = |common: usize| Some(common.saturating_sub(share));
        let common = self.common.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        common.map_or(0, |common| common.min(share))
    }

    /// How many more keys a limit with such a share may add that has `held`.
    fn room(&self, share: usize, held: usize) -> usize {
        share.saturating_sub(held) + self.common.load(Ordering::Relaxed)
    }

    /// Makes room for one key of a limit that has `held`.
    fn take_room(&self, share: usize, held: usize, room: Room) -> bool {
        let left = self.room(share, held);
        if room == Room::NotLast && left <= (held + left) / LAST_ROOM {
            return false;
        }
        let less = |common: usize| common.checked_sub(1);
        let has_room = held < share
            || self.common.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        self.used.fetch_add(has_room.into(), Ordering::Relaxed);
        has_room
    }

    /// Gives back the room of one key of a limit that has `held` without it.
    fn release(&self, share: usize, held: usize) {
        self.used.fetch_sub(1, Ordering::Relaxed);
        self.common.fetch_add((held >= share).into(), Ordering::Relaxed);
    }
}

/// The part of a table that only writers use.
#[derive(Debug, Default)]
struct Writer {
    /// Places whose keys were evicted. Room for all of them, which the system provides as it is needed.
    free: Vec<u32>,
    long: LongSlots,
    marks: Marks,
    /// The last place that was ever given. The first is 1.
    last: u32,
    index: IndexWriter,
    /// Places that may not be evicted, and how often each is pinned.
    pins: HashMap<u32, u32>,
    /// Where the search for idle keys goes on.
    scanned: u32,
}

/// Decisions of a limit since they were last taken, beside what its buckets count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitCounts {
    /// Allowed requests that no bucket counts.
    pub(crate) allowed: u64,
    /// Unsure decisions.
    pub(crate) unsure: u64,
    /// Denied requests that no bucket counts.
    pub(crate) denied: u64,
    /// Tokens that buckets count as denied, less the number of requests.
    pub(crate) denied_surplus: u64,
    /// Keys for which there was no room.
    pub(crate) overflowed: u64,
}

#[derive(Debug, Default)]
struct Counters {
    unsure: AtomicU64,
    denied: AtomicU64,
    denied_surplus: AtomicU64,
    overflowed: AtomicU64,
}

/// The buckets of one limit.
pub(crate) struct Table<B> {
    /// The limit's number.
    pub(super) limit: u32,
    hasher: KeyHasher,
    index: Index,
    slabs: Box<[OnceLock<Box<[B; SLAB]>>]>,
    pub(super) long: LongKeys,
    budget: Arc<KeyBudget>,
    /// Its part of that.
    share: usize,
    writer: Mutex<Writer>,
    counters: [CachePadded<Counters>; STRIPES],
}

/// Keys may be secret, and there are many.
impl<B> fmt::Debug for Table<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A short key, and what it is found by.
#[derive(Clone, Copy)]
pub(crate) struct ShortName {
    bytes: usize,
    words: [u64; SHORT_WORDS],
    hash: KeyHash,
}

/// A bucket that a decision has found, and its word from before the key was compared.
#[derive(Debug)]
pub(crate) struct Found<'a, B: TableBucket> {
    pub(crate) bucket: &'a B,
    pub(crate) word: B::Word,
    pub(crate) place: u32,
}

impl<B: TableBucket> Table<B> {
    /// An empty table that draws on `budget`. The bucket of keys without room begins with `first_credit`. `None` if
    /// the memory cannot be had.
    pub(crate) fn new(
        limit: u32,
        hasher: KeyHasher,
        budget: Arc<KeyBudget>,
        first_credit: u32,
    ) -> Option<Self> {
        let (keys, places) = (budget.limit_max, 1 + budget.limit_max);
        let (index, marks) = (IndexWriter::new(places)?, Marks::new(budget.marks_max));
        let mut free = Vec::new();
        free.try_reserve_exact(keys).ok()?;
        let table = Self {
            limit,
            hasher,
            index: Index::new(keys)?,
            slabs: (0..places.div_ceil(SLAB)).map(|_| OnceLock::new()).collect(),
            long: LongKeys::new(places),
            share: budget.share_of(limit),
            budget,
            writer: Mutex::new(Writer { free, marks, index, ..Writer::default() }),
            counters: Default::default(),
        };
        table.make_place(OVERFLOW).start(NewKey::with_credit(first_credit), false);
        Some(table)
    }

    /// The bucket of `key`, if the key is short and the first index entry that matches is the key's. Nearly always it
    /// is. The bucket may be retired by now.
    #[inline(always)]
    pub(crate) fn find_first(&self, key: &[u8]) -> Option<Found<'_, B>> {
        self.find_short(&self.short_name(key)?)
    }

    /// A short key with its hash, which is the same in all tables of a limiter.
    #[inline(always)]
    pub(crate) fn short_name(&self, key: &[u8]) -> Option<ShortName> {
        let words = short_words(key)?;
        Some(ShortName { bytes: key.len(), words, hash: self.hasher.hash(key, Some(words)) })
    }

    /// The same as [`find_first`](Self::find_first).
    #[inline(always)]
    pub(crate) fn find_short(&self, name: &ShortName) -> Option<Found<'_, B>> {
        let found = self.found_at(self.index.find(name.hash, Some)?);
        found.bucket.key().is_short(name.bytes, name.words).then_some(found)
    }

    /// The bucket of `key`.
    pub(crate) fn find(&self, key: &[u8]) -> Option<Found<'_, B>> {
        let hash = self.hasher.hash(key, short_words(key));
        self.index.find(hash, |place| {
            let found = self.found_at(place);
            let is_same = found.bucket.key().is(key, &self.long);
            (is_same && !B::is_retired(found.word)).then_some(found)
        })
    }

    /// The bucket at `place`, which was given, and its word now. So the word is loaded before the key is compared.
    #[inline(always)]
    pub(crate) fn found_at(&self, place: u32) -> Found<'_, B> {
        let bucket = self.at(place);
        Found { bucket, word: bucket.load(), place }
    }

    /// The bucket at `place`, which was given.
    #[inline(always)]
    pub(crate) fn at(&self, place: u32) -> &B {
        let slab = self.slabs[place as usize / SLAB].get();
        &slab.expect("a place that was given has a slab")[place as usize % SLAB]
    }

    /// The bucket of `key`, which is added if it is new. A key without room has the overflow bucket.
    pub(crate) fn find_or_insert(&self, key: &[u8], new: NewKey, room: Room) -> Found<'_, B> {
        if let Some(found) = self.find(key) {
            return found;
        }
        let writer = &mut *self.writer();
        let place = self.insert(writer, key, new, room);
        // While the lock is held the place cannot be given to another key.
        self.found_at(place)
    }

    /// The bucket that `key` would have if it were added.
    pub(crate) fn new_bucket(&self, key: &[u8], new: NewKey) -> B {
        let bucket = B::default();
        bucket.start(new, self.is_marked(key));
        bucket
    }

    /// Whether the key may have been evicted before it was full.
    fn is_marked(&self, key: &[u8]) -> bool {
        B::HAS_MARKS && self.writer().marks.has(self.hasher.hash(key, short_words(key)))
    }

    /// Counts a decision about a key without room.
    #[cold]
    pub(crate) fn count_overflow(&self) {
        self.counters[0].overflowed.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds `key`, if no other thread has meanwhile. Returns its place.
    fn insert(&self, writer: &mut Writer, key: &[u8], new: NewKey, room: Room) -> u32 {
        if let Some(found) = self.find(key) {
            return found.place;
        }
        if !self.budget.take_room(self.share, writer.index.entries, room) {
            return OVERFLOW;
        }
        let place = writer.free.pop().unwrap_or_else(|| {
            writer.last += 1;
            writer.last
        });
        let bucket = self.make_place(place);
        if bucket.key().store(key, &self.long, &mut writer.long).is_none() {
            // There is no memory for so long a key.
            writer.free.push(place);
            self.budget.release(self.share, writer.index.entries);
            return OVERFLOW;
        }
        let hash = self.hasher.hash(key, short_words(key));
        bucket.start(new, writer.marks.has(hash));
        self.index.enter(hash, place, &mut writer.index);
        place
    }

    /// The bucket at a place that may be the first of its slab.
    fn make_place(&self, place: u32) -> &B {
        let slab = self.slabs[place as usize / SLAB].get_or_init(|| {
            let slab: Box<[B]> = (0..SLAB).map(|_| B::default()).collect();
            slab.try_into().unwrap_or_else(|_| unreachable!("it has this length"))
        });
        &slab[place as usize % SLAB]
    }

    /// How many 64ths of what the limit could hold now are free.
    pub(crate) fn free_64ths(&self) -> usize {
        let held = self.writer().index.entries;
        let room = self.budget.room(self.share, held);
        64 * room / (held + room).max(1)
    }

    /// Forgets marks of keys that must be full by now.
    pub(crate) fn forget_marks(&self, now: Timestamp, scale: &Scale) {
        self.writer().marks.forget(now, scale.fill_us());
    }

    /// Evicts keys that are not pinned, looking at `most` places. Returns how many. One that is not full leaves a mark.
    pub(crate) fn evict(&self, most: u32, now: Timestamp, rule: &B::Rule, of: Evictable) -> usize {
        let mut evicted = 0;
        let most = most.min(self.writer().last);
        for looked_at in (0..most).step_by(EVICTION_SLICE as usize) {
            // A thread that adds a key meanwhile waits for one slice.
            let writer = &mut *self.writer();
            for _ in 0..EVICTION_SLICE.min(most - looked_at) {
                let place = if writer.scanned < writer.last { writer.scanned + 1 } else { 1 };
                writer.scanned = place;
                let bucket = self.at(place);
                let is_kept = B::is_retired(bucket.load()) || writer.pins.contains_key(&place);
                if is_kept {
                    continue;
                }
                let Some(full_at) = bucket.try_retire(now, rule, of) else { continue };
                if full_at > now {
                    let key = bucket.key().load(&self.long);
                    writer.marks.add(self.hasher.hash(&key, short_words(&key)), full_at);
                }
                self.index.strike(place, &mut writer.index);
                bucket.key().give_back(&mut writer.long);
                writer.free.push(place);
                self.budget.release(self.share, writer.index.entries);
                evicted += 1;
            }
        }
        evicted
    }

    /// Pins the bucket of `key`, which is added if it is new: its place is not given to another key until it is
    /// [unpinned](Self::unpin). Returns the place.
    pub(crate) fn pin(&self, key: &[u8], new: NewKey) -> u32 {
        let writer = &mut *self.writer();
        let place = self.insert(writer, key, new, Room::Any);
        *writer.pins.entry(place).or_default() += 1;
        place
    }

    /// Undoes one [`pin`](Self::pin).
    pub(crate) fn unpin(&self, place: u32) {
        let writer = &mut *self.writer();
        if let Some(pins) = writer.pins.get_mut(&place) {
            *pins -= 1;
            if *pins == 0 {
                writer.pins.remove(&place);
            }
        }
    }

    /// What was counted since the last time.
    pub(crate) fn take_counts(&self) -> LimitCounts {
        let take = |of: fn(&Counters) -> &AtomicU64| {
            self.counters.iter().map(|counters| of(counters).swap(0, Ordering::Relaxed)).sum()
        };
        LimitCounts {
            allowed: 0,
            unsure: take(|counters| &counters.unsure),
            denied: take(|counters| &counters.denied),
            denied_surplus: take(|counters| &counters.denied_surplus),
            overflowed: take(|counters| &counters.overflowed),
        }
    }

    /// Counts a decision about `cost` tokens: whether it was unsure, and of a denial what the bucket does not count. A
    /// cost of 0 is none.
    pub(crate) fn count(&self, place: u32, result: &SpendResult, cost: u32) {
        if cost == 0 || result.verdict == Verdict::Unsure {
            return;
        }
        if place == OVERFLOW {
            self.count_overflow();
        }
        let counters = &self.counters[place as usize % STRIPES];
        if !result.is_sure {
            counters.unsure.fetch_add(1, Ordering::Relaxed);
        }
        if result.is_uncounted {
            counters.denied.fetch_add(1, Ordering::Relaxed);
        } else if result.is_denied() && cost > 1 {
            counters.denied_surplus.fetch_add(u64::from(cost - 1), Ordering::Relaxed);
        }
    }

    /// The buckets that have ever had a key, and that of keys without room.
    pub(super) fn started(&self) -> impl Iterator<Item = &B> {
        (OVERFLOW..=self.writer().last).map(|place| self.at(place))
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
