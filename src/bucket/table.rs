//! Where a limit's buckets stand: a table that decisions read without any lock.
//!
//! Buckets are one cache line each, and neither moved nor freed while the table lives; an [`Index`] leads
//! from a key's [`Print`] to its bucket's place. Whoever makes or forgets keys holds the keeper's lock, and
//! is the only one to write to the index; a reader who finds nothing there looks again with the lock held. A
//! place that was given up, whose bucket's word says *gone*, is given to another key after
//! [`QUARANTINE_US`], far longer than a decision may take.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;

use super::index::{Index, Moved, PLACE_MAX};
use super::line::{Bucket, Lines};
use super::outcome::{Taken, Verdict};
use super::print::{Print, Prints};
use super::purse::Origin;
use super::vacant::Vacant;
use crate::time::Timestamp;

/// The most keys that all limits of one limiter may hold together.
pub const KEYS_MAX: usize = 50_000_000;

/// How long a place stands empty: no decision takes so long, but where its thread is held up.
const QUARANTINE_US: u64 = 200_000;
/// While others wait for a moment at the keeper's, so many places are looked at.
const SCAN: u32 = 1024;
/// Counters of the same thing, so that threads rarely meet at one.
const STRIPES: usize = 16;

/// The place of the bucket that keys share for which there is no room. No entry of the index leads
/// here: none is 0 but empty ones, and no key has the print that this bucket has, but by a chance of one
/// in 2^63, and then it shares the bucket.
pub(crate) const OVERFLOW: u32 = 0;

/// More places than keys at the least, since a place stands empty for a while.
const SPARE_PLACES: usize = 1024;

const _: () = assert!(KEYS_MAX + KEYS_MAX / 8 + SPARE_PLACES <= PLACE_MAX as usize);

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
    /// Places that were given up.
    vacant: Vacant,
    /// The last place that was ever given; the first one is 1.
    last: u32,
    /// Entries in the index.
    entries: usize,
    /// Where in the index each place's print is looked for first; of a vacant one, the next vacant one.
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
}

/// The same since they were last taken, as it is counted.
#[derive(Debug, Default)]
struct Counts {
    unsure: AtomicU64,
    denied: AtomicU64,
    denied_surplus: AtomicU64,
}

/// Tables made in this process.
static TABLES: AtomicU64 = AtomicU64::new(0);

/// The buckets of one limit.
#[derive(Debug)]
pub(crate) struct Table {
    /// No other table of this process has this number, which is not 0.
    number: u64,
    /// The limit's number.
    limit: u32,
    prints: Prints,
    index: Index,
    lines: Lines,
    budget: Arc<KeyBudget>,
    keeper: Mutex<Keeper>,
    /// What is counted by limit alone.
    counts: [CachePadded<Counts>; STRIPES],
}

impl Table {
    /// An empty table that draws on `budget`; `settle` makes the overflow bucket what it is to be. `None`
    /// if there is not so much memory.
    pub(crate) fn new(
        limit: u32,
        prints: Prints,
        budget: Arc<KeyBudget>,
        settle: impl FnOnce(&Bucket),
    ) -> Option<Self> {
        let places = 1 + capacity(&budget);
        let lines = Lines::new(places)?;
        let homes = bytemuck::try_zeroed_slice_box(places).ok()?;
        let overflow = lines.first()?;
        overflow.settle_in(0, 0);
        settle(overflow);
        Some(Self {
            number: 1 + TABLES.fetch_add(1, Ordering::Relaxed),
            limit,
            prints,
            index: Index::new(budget.max())?,
            lines,
            budget,
            keeper: Mutex::new(Keeper { homes, ..Keeper::default() }),
            counts: Default::default(),
        })
    }

    /// What purses know a bucket of this table by.
    #[inline(always)]
    pub(crate) fn origin(&self, bucket: &Bucket) -> Origin {
        Origin::new(self.number, self.place(bucket))
    }

    /// The place of a bucket of this table.
    #[inline(always)]
    pub(crate) fn place(&self, bucket: &Bucket) -> u32 {
        let offset = std::ptr::from_ref(bucket).addr() - self.lines.as_ptr().addr();
        let place = offset / size_of::<Bucket>();
        debug_assert!(place < self.lines.len(), "of another table");
        place as u32
    }

    /// What keys are told from others by.
    #[inline(always)]
    pub(crate) fn prints(&self) -> &Prints {
        &self.prints
    }

    /// The print of `key`.
    pub(crate) fn print(&self, key: &[u8]) -> Print {
        self.prints.of(key)
    }

    /// The bucket at `place`, which was given.
    #[inline(always)]
    pub(crate) fn at(&self, place: u32) -> &Bucket {
        &self.lines[place as usize]
    }

    /// The bucket of the key with this print.
    pub(crate) fn find(&self, print: Print) -> Option<&Bucket> {
        self.index.find(print, |place| self.get(place, print))
    }

    /// The same if it is there where it is looked for first.
    #[inline(always)]
    pub(crate) fn find_at_home(&self, print: Print) -> Option<&Bucket> {
        self.get(self.index.find_at_home(print)?, print)
    }

    /// The bucket at `place`, if it is that of the key with this print.
    #[inline(always)]
    fn get(&self, place: u32, print: Print) -> Option<&Bucket> {
        self.lines.get(place as usize).filter(|bucket| bucket.is_of(print.held))
    }

    /// Makes the bucket of the key with this print, with `credit` and whatever `settle` does to it, if
    /// nobody else has meanwhile; returns its place. A key for which there is no room has the overflow
    /// bucket.
    pub(crate) fn make(
        &self,
        print: Print,
        now: Timestamp,
        credit: impl FnOnce() -> u32,
        settle: impl FnOnce(&Bucket),
    ) -> u32 {
        self.make_kept(&mut self.keeper(), print, now, credit, settle)
    }

    fn make_kept(
        &self,
        keeper: &mut Keeper,
        print: Print,
        now: Timestamp,
        credit: impl FnOnce() -> u32,
        settle: impl FnOnce(&Bucket),
    ) -> u32 {
        if let Some(bucket) = self.find(print) {
            return self.place(bucket);
        }
        if !self.budget.claim() {
            return OVERFLOW;
        }
        let Some(place) = self.vacancy(keeper, now) else {
            self.budget.release(1);
            return OVERFLOW;
        };
        let bucket = self.at(place);
        bucket.settle_in(print.held, credit());
        settle(bucket);
        keeper.homes[place as usize] = print.home();
        self.index.enter(print, place, keeper.entries, &keeper.homes, &mut keeper.moved);
        keeper.entries += 1;
        place
    }

    fn vacancy(&self, keeper: &mut Keeper, now: Timestamp) -> Option<u32> {
        if let Some(place) = keeper.vacant.pop(now, &keeper.homes) {
            return Some(place);
        }
        if keeper.last as usize >= capacity(&self.budget) {
            return None;
        }
        keeper.last += 1;
        Some(keeper.last)
    }

    /// Forgets keys that nobody holds and that are idle and full, looking at `most` places; returns
    /// how many. `unit`, `credit` and `local` are those of [`Bucket`].
    pub(crate) fn evict(
        &self,
        most: u32,
        now: Timestamp,
        unit: i64,
        credit: u32,
        local: bool,
    ) -> usize {
        let mut forgotten = 0;
        for _ in 0..most.div_ceil(SCAN) {
            // Whoever makes a key meanwhile waits for this much at most.
            let keeper = &mut *self.keeper();
            for _ in 0..SCAN.min(keeper.last) {
                let place = if keeper.scanned < keeper.last { keeper.scanned + 1 } else { 1 };
                keeper.scanned = place;
                let bucket = self.at(place);
                let kept = bucket.is_gone() || keeper.held.contains_key(&place);
                if !kept && bucket.try_forget(now, unit, credit, local) {
                    self.index.strike(place, &keeper.homes, &keeper.moved);
                    keeper.entries -= 1;
                    keeper.vacant.push(now.plus_micros(QUARANTINE_US), place, &mut keeper.homes);
                    forgotten += 1;
                }
            }
        }
        self.budget.release(forgotten);
        forgotten
    }

    /// Gives every bucket that rests this credit.
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
        }
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places in a table: some more than keys, since a place stands empty for a while.
fn capacity(budget: &KeyBudget) -> usize {
    budget.max() + budget.max() / 8 + SPARE_PLACES
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

    /// Whether the bucket is that of `key`; the overflow bucket is everybody's.
    pub(crate) fn is_of_key(&self, key: &[u8]) -> bool {
        self.place == OVERFLOW || self.is_of(self.table.print(key).held)
    }

    /// Whether it is the bucket of keys for which there is no room.
    pub(crate) fn is_overflow(&self) -> bool {
        self.place == OVERFLOW
    }

    /// Its place in the table.
    #[cfg(feature = "sim")]
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
    /// Holds the bucket of the key with this print: see [`Table::make`].
    pub(crate) fn new(
        table: &Arc<Table>,
        print: Print,
        now: Timestamp,
        credit: impl FnOnce() -> u32,
        settle: impl FnOnce(&Bucket),
    ) -> Self {
        let keeper = &mut *table.keeper();
        let place = table.make_kept(keeper, print, now, credit, settle);
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
mod tests {
    use super::*;

    use crate::bucket::print::tests::SECRET;

    const UNIT: i64 = 1;

    fn table(keys_max: usize) -> Arc<Table> {
        let prints = Prints::new(SECRET);
        Arc::new(Table::new(0, prints, Arc::new(KeyBudget::new(keys_max)), |_| ()).unwrap())
    }

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    fn make(table: &Table, key: u64, now: Timestamp) -> u32 {
        let print = table.print(&key.to_le_bytes());
        let found = table.find(print).map(|bucket| table.place(bucket));
        found.unwrap_or_else(|| table.make(print, now, || 1, |_| ()))
    }

    fn find(table: &Table, key: u64) -> Option<u32> {
        let print = table.print(&key.to_le_bytes());
        let at_home = table.find_at_home(print).map(|bucket| table.place(bucket));
        let found = table.find(print).map(|bucket| table.place(bucket));
        if at_home.is_some() && found.is_some() {
            assert_eq!(at_home, found, "{key}");
        }
        at_home.or(found)
    }

    #[test]
    fn keys_beyond_the_budget_share_the_overflow_bucket() {
        let table = table(2);
        let places: Vec<u32> = (0..4).map(|key| make(&table, key, at(1))).collect();
        assert_eq!(places, [1, 2, OVERFLOW, OVERFLOW]);
        assert_eq!(table.budget.used(), 2);
        assert!(BucketRef::new(&table, OVERFLOW).is_overflow());
    }

    #[test]
    fn eviction_takes_only_buckets_that_nobody_holds_and_that_are_idle() {
        let table = table(3);
        let now = at(10);
        let held = Held::new(&table, table.print(b"held"), now, || 1, |_| ());
        let spent = make(&table, 1, now);
        make(&table, 2, now);
        assert!(table.at(spent).take(1, now, UNIT).allowed());
        let evict = || table.evict(SCAN, now, UNIT, 1, false);
        assert_eq!(evict(), 1, "the idle one");
        assert_eq!((table.budget.used(), evict()), (2, 0));
        drop(held);
        assert_eq!(evict(), 1);
        assert_eq!(find(&table, 1), Some(spent));
        assert_eq!((find(&table, 2), table.find(table.print(b"held")).is_none()), (None, true));
    }

    #[test]
    fn a_place_that_was_given_up_is_given_again_only_after_a_while() {
        let table = table(1);
        let first = make(&table, 1, at(1));
        assert_eq!(table.evict(1, at(1), UNIT, 1, false), 1);
        assert!(table.at(first).is_gone());
        assert!(!table.at(first).take(1, at(2), UNIT).allowed(), "nothing is left there");
        let second = make(&table, 2, at(2));
        assert_ne!(first, second);
        assert_eq!(table.evict(2, at(3), UNIT, 1, false), 1);
        let third = make(&table, 3, at(QUARANTINE_US + 1));
        assert_eq!(third, first);
        assert!(table.at(third).take(1, at(QUARANTINE_US + 2), UNIT).allowed());
    }

    #[test]
    fn every_key_is_found_while_others_come_and_go_and_the_index_grows() {
        let table = table(20_000);
        let mut rng = fastrand::Rng::with_seed(7);
        let mut alive = HashMap::new();
        for step in 0..100_000_u64 {
            let now = at(step * 100);
            let key = rng.u64(0..30_000);
            let place = make(&table, key, now);
            if place != OVERFLOW {
                let before = alive.insert(key, place);
                assert!(before.is_none_or(|before| before == place), "{key} was moved");
            }
            if step % 1000 == 0 {
                // Keys with odd numbers are in use.
                for (key, place) in alive.iter().filter(|(key, _)| *key % 2 == 1) {
                    table.at(*place).take(1, now, UNIT);
                    assert_eq!(find(&table, *key), Some(*place));
                }
                table.evict(4096, now, UNIT, 1, false);
                alive.retain(|key, place| {
                    let gone = table.at(*place).is_gone();
                    assert_eq!(find(&table, *key), (!gone).then_some(*place));
                    !gone
                });
                assert_eq!(table.budget.used(), alive.len());
            }
        }
        assert!(alive.len() > 10_000, "the index has grown");
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    fn readers_without_a_lock_always_find_keys_that_stay() {
        let table = table(4_000);
        let stay: Vec<u32> = (0..500).map(|key| make(&table, key, at(1))).collect();
        for &place in &stay {
            assert!(table.at(place).take(1, at(1), UNIT).allowed());
        }
        let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let reader = {
            let (table, stay, done) = (table.clone(), stay.clone(), done.clone());
            std::thread::spawn(move || {
                let (mut looks, mut missed) = (0_u64, 0_u64);
                while !done.load(Ordering::Relaxed) || looks == 0 {
                    for (key, place) in (0..).zip(&stay) {
                        let found = find(&table, key);
                        missed += u64::from(found.is_none());
                        // Missed while it was moved: with the lock held it is found.
                        assert_eq!(found.unwrap_or_else(|| make(&table, key, at(2))), *place);
                        looks += 1;
                    }
                }
                (looks, missed)
            })
        };
        for round in 0..200_u64 {
            let now = at(round * QUARANTINE_US);
            for key in 0..3_000 {
                make(&table, 1_000 + round * 3_000 + key, now);
            }
            while table.evict(8_192, now, UNIT, 1, false) > 0 {}
        }
        done.store(true, Ordering::Relaxed);
        let (looks, missed) = reader.join().unwrap();
        assert!(missed * 100 < looks, "{missed} of {looks} looks missed their keys");
    }
}
