//! Where the bytes of keys lie: in their buckets, or, where they are long, in slabs beside them.
//!
//! A key is kept as words of eight bytes. The last word holds the key's last eight bytes, which may
//! repeat some of the word before; a key of less than eight bytes is one word. With the key's length
//! this is exact: two keys of one length have the same words only if they are the same.
//!
//! # Orderings
//!
//! Words are written before the bucket's word is published, and never while it is in use: see
//! [`Bucket`](super::Bucket). So they are read and written `Relaxed`. A slab is published by the
//! [`OnceLock`] that holds it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::key::KEY_BYTES_MAX;

/// Bytes in a word.
const WORD: usize = size_of::<u64>();
/// Words that a long key has room in.
const LONG_WORDS: usize = KEY_BYTES_MAX / WORD;
/// Long keys in the first slab; each further one has twice as many.
const FIRST_SLAB: usize = 64;
const SLABS: usize = 21;

/// Whether `words` are those of `key`, of which they have the length.
#[inline(always)]
pub(super) fn is_same(words: &[AtomicU64], key: &[u8]) -> bool {
    let (whole, last) = split(key);
    let Some((before, [word_of_last, ..])) = words.split_at_checked(whole.len()) else {
        return false;
    };
    let mut pairs = before.iter().zip(whole);
    pairs.all(|(word, bytes)| word.load(Ordering::Relaxed) == u64::from_le_bytes(*bytes))
        && word_of_last.load(Ordering::Relaxed) == last
}

/// Writes the words of `key`.
pub(super) fn write(words: &[AtomicU64], key: &[u8]) {
    let (whole, last) = split(key);
    let whole = whole.iter().map(|bytes| u64::from_le_bytes(*bytes));
    words.iter().zip(whole.chain([last])).for_each(|(word, value)| {
        word.store(value, Ordering::Relaxed);
    });
}

/// All words of a key but the last one, as bytes, and the last one.
#[inline(always)]
fn split(key: &[u8]) -> (&[[u8; WORD]], u64) {
    match key.last_chunk() {
        Some(last) => (key[..key.len() - 1].as_chunks().0, u64::from_le_bytes(*last)),
        None => (&[], key.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))),
    }
}

/// The key of `length` bytes that was written.
pub(super) fn read(words: &[AtomicU64], length: usize) -> Vec<u8> {
    let words = words.iter().take(length.div_ceil(WORD));
    let mut key: Vec<u8> =
        words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    if length > WORD {
        // The last eight bytes repeat those before them that their word had no room for.
        let last = key.split_off(key.len() - WORD);
        key.truncate(length - WORD);
        key.extend(last);
    }
    key.truncate(length);
    key
}

/// Room for keys that are too long for their buckets. It grows, and is never freed while the table
/// lives, so that readers need no lock.
#[derive(Debug, Default)]
pub(super) struct LongKeys {
    slabs: [OnceLock<Box<[AtomicU64]>>; SLABS],
}

impl LongKeys {
    /// The words in `slot`, if it was ever given.
    #[inline]
    pub(super) fn words(&self, slot: u64) -> Option<&[AtomicU64]> {
        let (slab, at) = position(slot)?;
        let slab = self.slabs.get(slab)?.get()?;
        slab.get(at * LONG_WORDS..(at + 1) * LONG_WORDS)
    }

    /// Makes room for `slot`; `None` if there is not so much memory.
    fn reserve(&self, slot: u64) -> Option<()> {
        let (slab, _) = position(slot)?;
        let cell = self.slabs.get(slab)?;
        if cell.get().is_none() {
            let words = (FIRST_SLAB << slab) * LONG_WORDS;
            let _ = cell.set(bytemuck::try_zeroed_slice_box(words).ok()?);
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

/// Slots for long keys that are free: touched by the table's writer only.
#[derive(Debug, Default)]
pub(super) struct LongSlots {
    free: Vec<u64>,
    /// Slots that were ever given.
    given: u64,
}

impl LongSlots {
    /// Takes a free slot; `None` if there is no memory for one more.
    pub(super) fn take(&mut self, keys: &LongKeys) -> Option<u64> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        keys.reserve(self.given)?;
        self.given += 1;
        Some(self.given - 1)
    }

    /// Takes back the slot of a key that was evicted.
    pub(super) fn give_back(&mut self, slot: u64) {
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_all_lengths_are_read_back_and_differ_from_keys_with_one_byte_changed() {
        for length in 0..=KEY_BYTES_MAX {
            let key: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let words: Vec<AtomicU64> = (0..LONG_WORDS).map(|_| AtomicU64::new(99)).collect();
            write(&words, &key);
            assert!(is_same(&words, &key));
            assert_eq!(read(&words, length), key);
            for at in 0..length {
                let mut other = key.clone();
                other[at] ^= 1;
                assert!(!is_same(&words, &other), "byte {at} of {length}");
            }
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
        assert!(given.iter().all(|&slot| is_same(keys.words(slot).unwrap(), &key(slot))));
        slots.give_back(7);
        assert_eq!(slots.take(&keys), Some(7));
        assert!(keys.words(1 << 40).is_none() && keys.words(u64::MAX).is_none());
    }
}
