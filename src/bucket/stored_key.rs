//! Where the bytes of keys are stored: in their buckets, or, if they are long, in slots beside them.
//!
//! A short key is stored as four words: of 16 to 32 bytes its first 16 bytes and its last 16 bytes, which may overlap; of
//! 8 to 15 bytes the first 8 and the last 8; of fewer the bytes. Together with the key's length this is exact: two keys
//! of one length have the same words only if they are equal.
//!
//! # Orderings
//!
//! A key is written while its bucket is retired, before the bucket's word is published with `Release`, and
//! is compared after that word was loaded with `Acquire`: see [`Table`](super::Table). So the key itself is read and
//! written `Relaxed`. A slab is published by the [`OnceLock`] that holds it.

use std::sync::OnceLock;

use super::atomic::{AtomicU16, AtomicU64, Ordering, zeros};
use crate::key::KEY_BYTES_MAX;

/// Buckets in a slab, which is allocated when the first of them is needed. Models make do with few.
pub(super) const SLAB: usize = if cfg!(tidegate_models) { 4 } else { 1024 };
/// Words of a short key.
pub(super) const SHORT_WORDS: usize = 4;
/// The longest key that is stored in its bucket.
const MAX_SHORT_BYTES: usize = 32;
/// Bytes in a word.
const WORD: usize = size_of::<u64>();
/// Words of a long key.
const LONG_WORDS: usize = KEY_BYTES_MAX / WORD;

/// The words of a short key; `None` if it is long.
#[inline(always)]
pub(super) fn short_words(key: &[u8]) -> Option<[u64; SHORT_WORDS]> {
    let halves = |bytes: &[u8; 2 * WORD]| {
        let number = u128::from_le_bytes(*bytes);
        (number as u64, (number >> u64::BITS) as u64)
    };
    if let (Some(first), Some(last)) = (key.first_chunk(), key.last_chunk()) {
        let ((first, second), (before, last)) = (halves(first), halves(last));
        return (key.len() <= MAX_SHORT_BYTES).then_some([first, second, before, last]);
    }
    if let (Some(first), Some(last)) = (key.first_chunk(), key.last_chunk()) {
        return Some([u64::from_le_bytes(*first), u64::from_le_bytes(*last), 0, 0]);
    }
    Some([number(key), 0, 0, 0])
}

/// The part of a bucket that holds its key: the length, and the words of a short key or the slot of a long one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredKey<'a> {
    pub(super) bytes: &'a AtomicU16,
    pub(super) words: &'a [AtomicU64; SHORT_WORDS],
}

impl StoredKey<'_> {
    /// Whether it is the short key of this length with these words.
    #[inline(always)]
    pub(super) fn is_short(self, bytes: usize, short: [u64; SHORT_WORDS]) -> bool {
        let is_same = |at: usize| self.words[at].load(Ordering::Relaxed) == short[at];
        // A short key's length fits 16 bits. One word after the other takes the fewest registers.
        let is_as_long = self.bytes.load(Ordering::Relaxed) == bytes as u16;
        is_as_long && is_same(0) && is_same(1) && is_same(2) && is_same(3)
    }

    /// Whether it is `key`; long keys are in `long`.
    pub(super) fn is(self, key: &[u8], long: &LongKeys) -> bool {
        let Some(short) = short_words(key) else {
            return self.slot(key.len()).is_some_and(|slot| long.is(slot, key));
        };
        self.is_short(key.len(), short)
    }

    /// Stores `key`, in a slot of `long` if it is long. `None` if there is no memory for one.
    pub(super) fn store(self, key: &[u8], long: &LongKeys, slots: &mut LongSlots) -> Option<()> {
        let words = match short_words(key) {
            Some(short) => short,
            None => [slots.store(key, long)?.into(), 0, 0, 0],
        };
        self.bytes.store(key.len() as u16, Ordering::Relaxed);
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        Some(())
    }

    /// The slot of a key, if it has this length and is long.
    fn slot(self, bytes: usize) -> Option<u32> {
        let is_so_long =
            bytes > MAX_SHORT_BYTES && usize::from(self.bytes.load(Ordering::Relaxed)) == bytes;
        is_so_long.then(|| self.words[0].load(Ordering::Relaxed) as u32)
    }

    /// The key, which is evicted: its slot is given to the next long key.
    pub(super) fn give_back(self, slots: &mut LongSlots) {
        slots.free.extend(self.slot(self.bytes.load(Ordering::Relaxed).into()));
    }

    /// The key. The caller knows that it is not evicted meanwhile.
    pub(super) fn load(self, long: &LongKeys) -> Vec<u8> {
        let bytes = usize::from(self.bytes.load(Ordering::Relaxed));
        if let Some(slot) = self.slot(bytes) {
            return long.load(slot, bytes);
        }
        let mut key = bytes_of(self.words);
        if bytes > WORD {
            // The end of the first half is the begin of the second one.
            let half = if bytes < 2 * WORD { WORD } else { 2 * WORD };
            key.drain(half..3 * half - bytes);
        }
        key.truncate(bytes);
        key
    }
}

/// Keys that are too long for their buckets, in slots. A slab of slots is allocated when the first of them is needed, and
/// is not freed while the table lives, so readers need no lock.
#[derive(Debug)]
pub(super) struct LongKeys {
    slabs: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

/// The slots of long keys; only the table's writer uses it.
#[derive(Debug, Default)]
pub(super) struct LongSlots {
    free: Vec<u32>,
    /// How many slots were ever given.
    given: u32,
}

impl LongSlots {
    /// Stores a key in a free slot, which it returns. `None` if there is no memory for one.
    fn store(&mut self, key: &[u8], keys: &LongKeys) -> Option<u32> {
        let slot = self.free.pop().unwrap_or(self.given);
        let slab = &keys.slabs[slot as usize / SLAB];
        if slab.get().is_none() {
            let _ = slab.set(zeros(SLAB * LONG_WORDS)?);
        }
        self.given = self.given.max(slot + 1);
        for (word, value) in keys.words(slot)?.iter().zip(numbers(key)) {
            word.store(value, Ordering::Relaxed);
        }
        Some(slot)
    }
}

impl LongKeys {
    /// No keys yet, and slots for this many.
    pub(super) fn new(keys: usize) -> Self {
        Self { slabs: (0..keys.div_ceil(SLAB)).map(|_| OnceLock::new()).collect() }
    }

    fn is(&self, slot: u32, key: &[u8]) -> bool {
        let is_key = |words: &[AtomicU64]| {
            words
                .iter()
                .zip(numbers(key))
                .all(|(word, value)| word.load(Ordering::Relaxed) == value)
        };
        self.words(slot).is_some_and(is_key)
    }

    fn load(&self, slot: u32, bytes: usize) -> Vec<u8> {
        let mut key = self.words(slot).map(bytes_of).unwrap_or_default();
        key.truncate(bytes);
        key
    }

    /// The words of a slot. A reader may come with what was the word of a short key.
    fn words(&self, slot: u32) -> Option<&[AtomicU64]> {
        let slab = self.slabs.get(slot as usize / SLAB)?.get()?;
        slab.chunks_exact(LONG_WORDS).nth(slot as usize % SLAB)
    }
}

fn bytes_of(words: &[AtomicU64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
}

/// The words of a long key.
fn numbers(key: &[u8]) -> impl Iterator<Item = u64> {
    key.chunks(WORD).map(number)
}

/// Up to eight bytes as a number.
#[inline]
fn number(bytes: &[u8]) -> u64 {
    if let Ok(word) = bytes.try_into() {
        return u64::from_le_bytes(word);
    }
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_all_lengths_are_read_back_and_differ_from_keys_with_one_byte_changed() {
        let (keys, mut slots) = (LongKeys::new(SLAB), LongSlots::default());
        let (bytes, words) = (AtomicU16::new(0), Default::default());
        let stored = StoredKey { bytes: &bytes, words: &words };
        for length in 0..=KEY_BYTES_MAX {
            let key: Vec<u8> = (0..length).map(|at| (at * 7 + 1) as u8).collect();
            assert!(stored.store(&key, &keys, &mut slots).is_some());
            let is = |key: &[u8]| stored.is(key, &keys);
            assert!(is(&key));
            assert_eq!(stored.load(&keys), key);
            for at in 0..length {
                let mut other = key.clone();
                other[at] ^= 1;
                assert!(!is(&other), "byte {at} of {length}");
            }
            assert!(!is(&[&key[..], b"x"].concat()) && (length == 0 || !is(&key[1..])));
        }
    }

    #[test]
    fn slots_of_long_keys_never_overlap_and_are_given_again() {
        let (keys, mut slots) = (LongKeys::new(3 * SLAB), LongSlots::default());
        let key = |slot: u32| slot.to_le_bytes().repeat(KEY_BYTES_MAX / 4);
        for slot in 0..3 * SLAB as u32 {
            assert_eq!(slots.store(&key(slot), &keys), Some(slot));
        }
        for slot in 0..3 * SLAB as u32 {
            assert_eq!(keys.load(slot, KEY_BYTES_MAX), key(slot));
        }
        let (bytes, words) = (AtomicU16::new(KEY_BYTES_MAX as u16), Default::default());
        let stored = StoredKey { bytes: &bytes, words: &words };
        stored.words[0].store(7, Ordering::Relaxed);
        stored.give_back(&mut slots);
        assert_eq!(slots.store(&key(1), &keys), Some(7));
        assert!(keys.words(u32::MAX).is_none());
    }

    #[test]
    fn few_long_keys_that_come_and_go_take_few_slots() {
        let (keys, mut slots) = (LongKeys::new(1000 * SLAB), LongSlots::default());
        let (bytes, words) = (AtomicU16::new(0), Default::default());
        let stored = StoredKey { bytes: &bytes, words: &words };
        for turn in 0..1000 * SLAB {
            assert!(stored.store(&[turn as u8; 100], &keys, &mut slots).is_some());
            stored.give_back(&mut slots);
        }
        assert_eq!((slots.given, slots.free), (1, vec![0]));
    }
}
