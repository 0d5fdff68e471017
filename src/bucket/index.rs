//! Leads from a key's hash to its bucket's place, read without any lock.
//!
//! # Shape
//!
//! One word of 32 bits an entry: 26 bits of place, and 6 bits of the key's hash, so that the buckets
//! of other keys are seldom looked at. Where a key is looked for first are other bits of its hash; from
//! there it is looked for entry by entry. The index grows by levels, each four times larger, the last one
//! large enough for all keys; entries are copied to the next level a few at a time, and readers go over
//! to it when all are there. Level *b* is the entries from 2^b - 1 on, before those of level *b* + 1: all
//! levels are one piece of memory, which the system makes up as it is written to. An outgrown level is left
//! as it is, since nobody knows who still reads it.
//!
//! # Argument
//!
//! One thread at a time writes. A reader that finds an entry finds the right place, or one that has
//! just been given up, and whose bucket says so. A reader may miss an entry while it is moved, or
//! read a level that was just outgrown: who finds nothing looks again while nobody writes.
//!
//! # Orderings
//!
//! A bucket is made ready before its entry is stored with `Release`; who loads the entry with
//! `Acquire` sees it ready. A level is filled before it is published with `Release`.

use super::atomic::{AtomicU32, Ordering, zeros};
use super::key_hash::{KeyHash, PLACE_MAX};
use std::ops::Range;

/// The first level. Models begin with a small one, so that it grows.
const BITS_MIN: u32 = if cfg!(tidegate_models) { 2 } else { 10 };
/// Each level has so many bits more than the one before.
const GROWTH_BITS: u32 = 2;

/// While a level is left for the next one, so many of its entries are copied with each that is entered:
/// it takes an eighth of what a full level holds.
const MOVED_AT_ONCE: usize = if cfg!(tidegate_models) { 2 } else { 16 };

/// A level is at most half full: then a key mostly stands where it is looked for first.
const fn filled(bits: u32) -> usize {
    1 << (bits - 1)
}

/// The part of an index that only its writer uses.
#[derive(Debug, Default)]
pub(super) struct IndexWriter {
    /// Where each place's key is looked for first. The system provides this page by page as it is written to.
    homes: Box<[u32]>,
    pub(super) entries: usize,
    /// How many entries of the present level have been copied to the next one.
    moved: usize,
}

impl IndexWriter {
    /// No entries; `None` if there is not so much memory.
    pub(super) fn new(places: usize) -> Option<Self> {
        Some(Self { homes: zeros(places)?, ..Self::default() })
    }

    /// Where the key of an entry is looked for first, as bits; an empty entry has none.
    fn home_bits(&self, entry: u32) -> Option<u32> {
        self.homes.get(place_of(entry) as usize).copied().filter(|_| entry > 0)
    }
}

/// An index of at most so many keys as it was made for.
#[derive(Debug)]
pub(super) struct Index {
    /// One less than the entries of the level that is in use.
    mask: AtomicU32,
    entries: Box<[AtomicU32]>,
    /// The bits of the last level.
    bits_max: u32,
}

impl Index {
    /// An empty index; `None` if there is not so much memory.
    pub(super) fn new(max_keys: usize) -> Option<Self> {
        let bits_max = (2 * max_keys + 2).next_power_of_two().ilog2().max(BITS_MIN);
        let entries = zeros(level(bits_max).end)?;
        Some(Self { mask: AtomicU32::new(mask(BITS_MIN)), entries, bits_max })
    }

    /// What `check` makes of the place that the hash leads to; it declines the places of other keys.
    #[inline(always)]
    pub(super) fn find<T>(&self, hash: KeyHash, check: impl Fn(u32) -> Option<T>) -> Option<T> {
        let mut at = home(hash.home(), self.mask.load(Ordering::Acquire));
        // There are always free entries, so this ends.
        loop {
            let entry = self.entries.get(at)?.load(Ordering::Acquire);
            if let Some(place) = match_entry(entry, hash)
                && let Some(found) = check(place)
            {
                return Some(found);
            }
            if entry == 0 {
                return None;
            }
            at = after(at);
        }
    }

    /// Enters a place.
    pub(super) fn enter(&self, hash: KeyHash, place: u32, writer: &mut IndexWriter) {
        writer.homes[place as usize] = hash.home();
        self.grow(writer);
        writer.entries += 1;
        let (bits, entry) = (self.bits(), hash.tag() | place);
        self.put(bits, hash.home(), entry);
        if writer.moved > 0 {
            self.put(self.next(bits), hash.home(), entry);
        }
    }

    fn bits(&self) -> u32 {
        self.mask.load(Ordering::Relaxed).count_ones()
    }

    /// The level after one of so many bits.
    fn next(&self, bits: u32) -> u32 {
        // No level is worth the trouble that is half as large as the last one.
        if bits + GROWTH_BITS + 1 >= self.bits_max { self.bits_max } else { bits + GROWTH_BITS }
    }

    /// Once the present level is nearly full, copies a few of its entries to the next level, and goes
    /// over to that after the last one.
    fn grow(&self, writer: &mut IndexWriter) {
        let (bits, next) = (self.bits(), self.next(self.bits()));
        if writer.moved == 0 && (writer.entries < filled(bits) / 4 * 3 || next == bits) {
            return;
        }
        let entries = &self.entries[level(bits)];
        for entry in entries.iter().skip(writer.moved).take(MOVED_AT_ONCE) {
            self.copy(next, entry.load(Ordering::Relaxed), writer);
        }
        writer.moved += MOVED_AT_ONCE;
        if writer.moved >= entries.len() {
            writer.moved = 0;
            self.mask.store(mask(next), Ordering::Release);
        }
    }

    /// Copies an entry to the level of so many bits, unless it is there.
    fn copy(&self, bits: u32, entry: u32, writer: &IndexWriter) {
        if let Some(home_bits) = writer.home_bits(entry) {
            self.put(bits, home_bits, entry);
        }
    }

    /// Puts an entry into the level of so many bits, unless it is there.
    fn put(&self, bits: u32, home_bits: u32, entry: u32) {
        let mut at = home(home_bits, mask(bits));
        loop {
            match self.entries[at].load(Ordering::Relaxed) {
                0 => return self.entries[at].store(entry, Ordering::Release),
                found if found == entry => return,
                _ => at = after(at),
            }
        }
    }

    /// Strikes a place out, and closes the gap.
    pub(super) fn strike(&self, place: u32, writer: &mut IndexWriter) {
        writer.entries -= 1;
        let bits = self.bits();
        let next = (writer.moved > 0).then(|| self.next(bits));
        self.strike_in(bits, place, writer, next);
        if let Some(next) = next {
            self.strike_in(next, place, writer, None);
        }
    }

    /// The same in the level of so many bits. Each entry that fills a gap is copied to the `next` level: it may come to
    /// stand where all has been moved already.
    fn strike_in(&self, bits: u32, place: u32, writer: &IndexWriter, next: Option<u32>) {
        let (mask, length) = (mask(bits), 1 << bits);
        let entry = |at: usize| self.entries[at].load(Ordering::Relaxed);
        let home_of = |entry: u32| writer.home_bits(entry).map(|bits| home(bits, mask));
        let Some(mut gap) = home_of(place) else { return };
        while place_of(entry(gap)) != place {
            if entry(gap) == 0 {
                return;
            }
            gap = after(gap);
        }
        let distance = |from: usize, to: usize| (to + length - from) % length;
        let mut at = gap;
        loop {
            at = after(at);
            let Some(home) = home_of(entry(at)) else { break };
            if distance(home, at) >= distance(gap, at) {
                // Twice for a moment, rather than not at all; who misses it looks again.
                self.entries[gap].store(entry(at), Ordering::Release);
                if let Some(next) = next {
                    self.copy(next, entry(at), writer);
                }
                gap = at;
            }
        }
        self.entries[gap].store(0, Ordering::Release);
    }
}

/// Where the level of so many bits stands.
fn level(bits: u32) -> Range<usize> {
    (1 << bits) - 1..(2 << bits) - 1
}

/// The next entry of the same level.
#[inline(always)]
fn after(at: usize) -> usize {
    let next = at + 1;
    if next & (next + 1) == 0 { at / 2 } else { next }
}

/// One less than the entries of the level of so many bits: where the level begins.
fn mask(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Where a hash is looked for first.
#[inline(always)]
fn home(bits: u32, mask: u32) -> usize {
    (bits & mask) as usize + mask as usize
}

/// The place, if the entry may be that of a key with this hash.
#[inline(always)]
fn match_entry(entry: u32, hash: KeyHash) -> Option<u32> {
    let place = entry ^ hash.tag();
    // Not 0: with a tag of 0 that is an empty entry.
    (place.wrapping_sub(1) < PLACE_MAX).then_some(place)
}

#[inline(always)]
fn place_of(entry: u32) -> u32 {
    entry & PLACE_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::bucket::key_hash::KeyHasher;
    use crate::bucket::key_hash::tests::SEEDS;
    use crate::bucket::stored_key::short_words;

    fn hash(key: u32) -> KeyHash {
        let key = key.to_le_bytes();
        KeyHasher::new(SEEDS).hash(&key, short_words(&key))
    }

    fn find(index: &Index, key: u32) -> bool {
        // A key's place is its number.
        index.find(hash(key), |place| (place == key).then_some(())).is_some()
    }

    #[test]
    fn it_grows_a_few_entries_at_a_time_while_keys_come_and_go() {
        const KEYS: u32 = 20_000;
        let index = Index::new(KEYS as usize).unwrap();
        let written = |bits: u32| {
            index.entries[level(bits)].iter().filter(|one| one.load(Ordering::Relaxed) > 0).count()
        };
        let mut writer = IndexWriter::new(KEYS as usize + 1).unwrap();
        let (mut entered, mut growths) = (Vec::new(), 0);
        let mut rng = fastrand::Rng::with_seed(3);
        for key in 1..=KEYS {
            let bits = index.bits();
            let next = index.next(bits);
            let before = if writer.moved > 0 { written(next) } else { 0 };
            index.enter(hash(key), key, &mut writer);
            entered.push(key);
            if bits != index.bits() {
                growths += 1;
            } else if writer.moved > 0 && key < 2000 {
                assert!(written(next) <= before + MOVED_AT_ONCE + 1, "{key}");
            }
            if rng.u8(..) < 64 {
                // The last entry that was copied, if there is one: what fills its gap was not.
                let at = level(index.bits()).start + writer.moved.saturating_sub(1);
                let last = place_of(index.entries[at].load(Ordering::Relaxed));
                let found = entered.iter().position(|&key| key == last);
                let gone = found.unwrap_or_else(|| rng.usize(..entered.len()));
                let gone = entered.swap_remove(gone);
                index.strike(gone, &mut writer);
                assert!(!find(&index, gone), "{gone} after {key}");
            }
            if key % 64 == 0 {
                let missed = entered.iter().find(|&&key| !find(&index, key));
                assert_eq!(missed, None, "after {key}");
            }
        }
        assert!(growths >= 2);
        assert_eq!((written(index.bits()), writer.entries), (entered.len(), entered.len()));
    }

    #[test]
    fn level_is_left_once_three_quarters_full_and_the_last_level_never() {
        const KEYS: u32 = 1000;
        let index = Index::new(KEYS as usize).unwrap();
        let mut writer = IndexWriter::new(KEYS as usize + 1).unwrap();
        // The first level may hold 512 entries, and has 1024, of which 16 are copied with each new key.
        for key in 1..=KEYS {
            index.enter(hash(key), key, &mut writer);
            assert_eq!(writer.moved > 0, (385..448).contains(&key), "after {key}");
            assert_eq!(index.bits(), if key < 448 { 10 } else { 11 }, "after {key}");
        }
    }

    #[test]
    fn all_levels_together_take_few_bytes_a_key() {
        for max_keys in [10_000, 1_000_000, 10_000_000] {
            let index = Index::new(max_keys).unwrap();
            let mut levels = vec![index.bits()];
            while filled(levels[levels.len() - 1]) < max_keys {
                levels.push(index.next(levels[levels.len() - 1]));
            }
            let entries: usize = levels.into_iter().map(|bits| level(bits).len()).sum();
            assert!(entries * size_of::<AtomicU32>() <= 17 * max_keys, "{max_keys}: {entries}");
        }
    }

    #[test]
    fn entries_follow_each_other_around_their_level() {
        for bits in [1, 2, 10] {
            let mut at = level(bits).start;
            for _ in level(bits) {
                assert!(level(bits).contains(&at));
                at = after(at);
            }
            assert_eq!(at, level(bits).start);
            assert_eq!(home(0, mask(bits)), level(bits).start);
            assert_eq!(home(u32::MAX, mask(bits)), level(bits).end - 1);
        }
    }
}
