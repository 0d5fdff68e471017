//! Where the bytes of keys are stored: in their buckets, or, if they are long, in slabs beside them.
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

/// Words of a short key.
pub(super) const SHORT_WORDS: usize = 4;
/// The longest key that is stored in its bucket.
const MAX_SHORT_BYTES: usize = 32;
/// Bytes in a word.
const WORD: usize = size_of::<u64>();
/// Words of a long key.
const LONG_WORDS: usize = KEY_BYTES_MAX / WORD;
/// Long keys in the first slab. Each further slab holds twice as many.
const FIRST_SLAB: usize = 64;
const SLABS: usize = 21;

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
        let differs = |at: usize| self.words[at].load(Ordering::Relaxed) ^ short[at];
        // A short key's length fits 16 bits.
        self.bytes.load(Ordering::Relaxed) == bytes as u16
            && differs(0) | differs(1) | differs(2) | differs(3) == 0
    }

    /// Whether it is `key`; long keys are in `long`.
    pub(super) fn is(self, key: &[u8], long: &LongKeys) -> bool {
        if let Some(short) = short_words(key) {
            return self.is_short(key.len(), short);
        }
        let words = long.words(self.words[0].load(Ordering::Relaxed));
        usize::from(self.bytes.load(Ordering::Relaxed)) == key.len()
            && words.is_some_and(|words| {
                let mut pairs = words.iter().zip(long_words(key));
                pairs.all(|(word, value)| word.load(Ordering::Relaxed) == value)
            })
    }

    /// Stores `key`, which has the slot `slot` in `long` if it is long.
    pub(super) fn store(self, key: &[u8], slot: Option<u64>, long: &LongKeys) {
        self.bytes.store(key.len() as u16, Ordering::Relaxed);
        if let Some(words) = slot.and_then(|slot| long.words(slot)) {
            write(words, key);
        }
        let slot_words = [slot.unwrap_or_default(), 0, 0, 0];
        for (word, value) in self.words.iter().zip(short_words(key).unwrap_or(slot_words)) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// The key. The caller knows that it is not evicted meanwhile.
    pub(super) fn load(self, long: &LongKeys) -> Vec<u8> {
        let bytes = usize::from(self.bytes.load(Ordering::Relaxed));
        let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        if bytes > MAX_SHORT_BYTES {
            return long.words(words[0]).map(|words| read(words, bytes)).unwrap_or_default();
        }
        // The first half of the words, and as much of the end of the second half as is missing.
        let half = if bytes < 2 * WORD { 1 } else { 2 };
        let bytes_of = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (mut key, last): (Vec<u8>, Vec<u8>) =
            (bytes_of(&words[..half]), bytes_of(&words[half..2 * half]));
        key.truncate(bytes);
        let missing = bytes - key.len();
        key.extend_from_slice(&last[last.len() - missing..]);
        key
    }

    /// The slot of a long key.
    pub(super) fn slot(self) -> Option<u64> {
        let is_long = usize::from(self.bytes.load(Ordering::Relaxed)) > MAX_SHORT_BYTES;
        is_long.then(|| self.words[0].load(Ordering::Relaxed))
    }
}

/// Whether a key is stored outside its bucket.
pub(super) fn is_long(key: &[u8]) -> bool {
    key.len() > MAX_SHORT_BYTES
}

/// Writes a long key.
fn write(words: &[AtomicU64], key: &[u8]) {
    for (word, value) in words.iter().zip(long_words(key)) {
        word.store(value, Ordering::Relaxed);
    }
}

/// The words of a long key.
fn long_words(key: &[u8]) -> impl Iterator<Item = u64> {
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

/// Reads a long key of `length` bytes.
fn read(words: &[AtomicU64], length: usize) -> Vec<u8> {
    let words = words.iter().take(length.div_ceil(WORD));
    let mut key: Vec<u8> =
        words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    key.truncate(length);
    key
}

/// Keys that are too long for their buckets. The memory grows on demand and is not freed while the table lives, so
/// readers need no lock.
#[derive(Debug, Default)]
pub(super) struct LongKeys {
    slabs: [OnceLock<Box<[AtomicU64]>>; SLABS],
}

impl LongKeys {
    /// The words of `slot`, if it was ever given.
    #[inline]
    pub(super) fn words(&self, slot: u64) -> Option<&[AtomicU64]> {
        let (slab, at) = position(slot)?;
        let slab = self.slabs.get(slab)?.get()?;
        slab.get(at * LONG_WORDS..(at + 1) * LONG_WORDS)
    }

    /// Makes room for `slot`. `None` if the memory cannot be had.
    fn reserve(&self, slot: u64) -> Option<()> {
        let (slab, _) = position(slot)?;
        let cell = self.slabs.get(slab)?;
        if cell.get().is_none() {
            let words = (FIRST_SLAB << slab) * LONG_WORDS;
            let _ = cell.set(zeros(words)?);
        }
        Some(())
    }
}

/// The slab of a slot, and the slot's place in it.
fn position(slot: u64) -> Option<(usize, usize)> {
    let slot = usize::try_from(slot).ok()?.checked_add(FIRST_SLAB)?;
    let slab = slot.ilog2() - FIRST_SLAB.ilog2();
    Some((slab as usize, slot - (FIRST_SLAB << slab)))
}

/// The free slots of long keys. Only the table's writer uses them.
#[derive(Debug, Default)]
pub(super) struct LongSlots {
    free: Vec<u64>,
    /// How many slots were ever given.
    given: u64,
}

impl LongSlots {
    /// Takes a free slot. `None` if the memory for one more cannot be had.
    pub(super) fn take(&mut self, keys: &LongKeys) -> Option<u64> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        keys.reserve(self.given)?;
        self.given += 1;
        Some(self.given - 1)
    }

    /// Takes back the slot of a key that was evicted, if it had one.
    pub(super) fn give_back(&mut self, slot: Option<u64>) {
        self.free.extend(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_all_lengths_are_read_back_and_differ_from_keys_with_one_byte_changed() {
        let (keys, mut slots) = (LongKeys::default(), LongSlots::default());
        let (bytes, words) = (AtomicU16::new(0), Default::default());
        let stored = StoredKey { bytes: &bytes, words: &words };
        for length in 0..=KEY_BYTES_MAX {
            let key: Vec<u8> = (0..length).map(|at| (at * 7 + 1) as u8).collect();
            let slot = is_long(&key).then(|| slots.take(&keys).unwrap());
            stored.store(&key, slot, &keys);
            let is = |key: &[u8]| stored.is(key, &keys);
            assert!(is(&key));
            assert_eq!((stored.load(&keys), stored.slot()), (key.clone(), slot));
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
        let (keys, mut slots) = (LongKeys::default(), LongSlots::default());
        let given: Vec<u64> = (0..1000).map(|_| slots.take(&keys).unwrap()).collect();
        let key = |slot: u64| [slot.to_le_bytes(); KEY_BYTES_MAX / WORD].concat();
        for &slot in &given {
            write(keys.words(slot).unwrap(), &key(slot));
        }
        for &slot in &given {
            assert_eq!(read(keys.words(slot).unwrap(), KEY_BYTES_MAX), key(slot));
        }
        slots.give_back(Some(7));
        assert_eq!(slots.take(&keys), Some(7));
        assert!(keys.words(1 << 40).is_none() && keys.words(u64::MAX).is_none());
    }
}
