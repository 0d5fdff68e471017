//! Where the bytes of keys are stored: in their buckets, or, if they are long, in slabs beside those of the buckets.
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

/// The part of a bucket that holds its key: the length, and the words of a short key.
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

    /// Whether it is `key`. A long key is in `long`, at the bucket's `place`.
    pub(super) fn is(self, key: &[u8], long: &LongKeys, place: u32) -> bool {
        let Some(short) = short_words(key) else {
            let bytes = usize::from(self.bytes.load(Ordering::Relaxed));
            return bytes == key.len() && long.is(place, key);
        };
        self.is_short(key.len(), short)
    }

    /// Stores `key`. `None` if there is no memory for a long one.
    pub(super) fn store(self, key: &[u8], long: &LongKeys, place: u32) -> Option<()> {
        let short = short_words(key);
        if short.is_none() {
            long.store(place, key)?;
        }
        self.bytes.store(key.len() as u16, Ordering::Relaxed);
        for (word, value) in self.words.iter().zip(short.unwrap_or_default()) {
            word.store(value, Ordering::Relaxed);
        }
        Some(())
    }

    /// The key. The caller knows that it is not evicted meanwhile.
    pub(super) fn load(self, long: &LongKeys, place: u32) -> Vec<u8> {
        let bytes = usize::from(self.bytes.load(Ordering::Relaxed));
        if bytes > MAX_SHORT_BYTES {
            return long.load(place, bytes);
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

/// Keys that are too long for their buckets, by the places of these. A slab is allocated when the first of its places
/// needs it; the system provides its memory page by page as it is written to. It is not freed while the table lives, so
/// readers need no lock.
#[derive(Debug)]
pub(super) struct LongKeys {
    slabs: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl LongKeys {
    /// No keys yet, of at most so many places.
    pub(super) fn new(places: usize) -> Self {
        Self { slabs: (0..places.div_ceil(SLAB)).map(|_| OnceLock::new()).collect() }
    }

    fn is(&self, place: u32, key: &[u8]) -> bool {
        let is_key = |words: &[AtomicU64]| {
            words
                .iter()
                .zip(numbers(key))
                .all(|(word, value)| word.load(Ordering::Relaxed) == value)
        };
        self.words(place).is_some_and(is_key)
    }

    /// `None` if the memory cannot be had.
    fn store(&self, place: u32, key: &[u8]) -> Option<()> {
        let slab = &self.slabs[place as usize / SLAB];
        if slab.get().is_none() {
            let _ = slab.set(zeros(SLAB * LONG_WORDS)?);
        }
        for (word, value) in self.words(place)?.iter().zip(numbers(key)) {
            word.store(value, Ordering::Relaxed);
        }
        Some(())
    }

    fn load(&self, place: u32, bytes: usize) -> Vec<u8> {
        let mut key = self.words(place).map(bytes_of).unwrap_or_default();
        key.truncate(bytes);
        key
    }

    /// The words of the key at `place`, if there was ever a long key in its slab.
    fn words(&self, place: u32) -> Option<&[AtomicU64]> {
        let slab = self.slabs[place as usize / SLAB].get()?;
        slab.chunks_exact(LONG_WORDS).nth(place as usize % SLAB)
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
        let (keys, place) = (LongKeys::new(2 * SLAB), SLAB as u32 + 3);
        let (bytes, words) = (AtomicU16::new(0), Default::default());
        let stored = StoredKey { bytes: &bytes, words: &words };
        for length in 0..=KEY_BYTES_MAX {
            let key: Vec<u8> = (0..length).map(|at| (at * 7 + 1) as u8).collect();
            assert!(stored.store(&key, &keys, place).is_some());
            let is = |key: &[u8]| stored.is(key, &keys, place);
            assert!(is(&key));
            assert_eq!(stored.load(&keys, place), key);
            for at in 0..length {
                let mut other = key.clone();
                other[at] ^= 1;
                assert!(!is(&other), "byte {at} of {length}");
            }
            assert!(!is(&[&key[..], b"x"].concat()) && (length == 0 || !is(&key[1..])));
        }
    }

    #[test]
    fn long_keys_of_two_places_never_overlap() {
        let keys = LongKeys::new(3 * SLAB);
        let places = 0..3 * SLAB as u32;
        let key = |place: u32| place.to_le_bytes().repeat(KEY_BYTES_MAX / 4);
        for place in places.clone() {
            assert!(keys.store(place, &key(place)).is_some());
        }
        for place in places {
            assert_eq!(keys.load(place, KEY_BYTES_MAX), key(place));
        }
    }
}
