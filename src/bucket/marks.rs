//! Marks of keys that were evicted before they were full: such a key gets no first credit, since the store knows what
//! it has left and this node no longer does.
//!
//! A mark is some bits of a Bloom filter: it is never missed, and a key without one is taken for marked about once in
//! twenty times where the filter is nearly full. Marks are made in two generations of as long as an empty bucket takes
//! to fill, and go with their generation, at the earliest when the key is full. A full generation marks all keys.

use super::key_hash::KeyHash;
use crate::time::Timestamp;

/// Bits for each mark.
const BITS: usize = 8;
/// Bits in a word.
const WORD: usize = u64::BITS as usize;
/// Bits that a mark sets.
const PROBES: u32 = 4;

/// The marks of one limit. Only the table's writer uses them.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// The bits of this generation and of the one before, which are allocated with the first mark.
    bits: [Vec<u64>; 2],
    /// Marks of this generation and of the one before.
    counts: [usize; 2],
    /// When this generation began.
    begun: Timestamp,
    /// The most marks of a generation.
    most: usize,
}

impl Marks {
    /// At most so many marks in a generation.
    pub(super) fn new(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    /// Begins another generation if this one is older than a bucket takes to fill.
    pub(super) fn forget(&mut self, now: Timestamp, fills_in_us: u64) {
        let age_us = now.micros_since(self.begun);
        if age_us <= fills_in_us {
            return;
        }
        self.bits.swap(0, 1);
        self.bits[0].clear();
        self.counts = [0, self.counts[0]];
        if age_us > fills_in_us.saturating_mul(2) {
            self.bits[1].clear();
            self.counts[1] = 0;
        }
        self.begun = now;
    }

    /// Marks a key.
    pub(super) fn add(&mut self, hash: KeyHash) {
        if self.counts[0] == self.most {
            return;
        }
        self.counts[0] += 1;
        self.bits[0].resize((BITS * self.most).div_ceil(WORD), 0);
        for (word, bit) in probes(hash, self.bits[0].len()) {
            self.bits[0][word] |= bit;
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.counts == [0, 0]
    }

    /// Whether a key may be marked.
    pub(super) fn has(&self, hash: KeyHash) -> bool {
        let is_in = |bits: &Vec<u64>| {
            !bits.is_empty() && probes(hash, bits.len()).all(|(word, bit)| bits[word] & bit > 0)
        };
        self.counts.contains(&self.most) || self.bits.iter().any(is_in)
    }
}

/// The words and bits of a mark, in so many words.
fn probes(hash: KeyHash, words: usize) -> impl Iterator<Item = (usize, u64)> {
    (0..PROBES).map(move |probe| {
        let at = hash.home().wrapping_add(hash.low().wrapping_mul(2 * probe + 1)) as usize;
        (at / WORD % words, 1 << (at % WORD))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::key_hash::KeyHasher;
    use crate::bucket::key_hash::tests::SEEDS;
    use crate::bucket::stored_key::short_words;

    const FILLS_IN_US: u64 = 1000;

    fn hash(key: u32) -> KeyHash {
        let key = key.to_le_bytes();
        KeyHasher::new(SEEDS).hash(&key, short_words(&key))
    }

    fn marked(marks: &Marks, keys: std::ops::Range<u32>) -> usize {
        keys.filter(|&key| marks.has(hash(key))).count()
    }

    #[test]
    fn mark_is_found_until_the_key_must_be_full_and_few_others_are() {
        let mut marks = Marks::new(10_000);
        assert_eq!(marked(&marks, 0..1000), 0);
        marks.forget(Timestamp::from_micros(5000), FILLS_IN_US);
        (0..9000).for_each(|key| marks.add(hash(key)));
        for us in [5000, 5999, 6000, 6001, 7001] {
            marks.forget(Timestamp::from_micros(us), FILLS_IN_US);
            assert_eq!(marked(&marks, 0..9000), 9000, "{us}");
        }
        let others = marked(&marks, 9000..109_000);
        assert!(others < 3000, "{others} of 100,000");
        marks.forget(Timestamp::from_micros(7002), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..109_000), 0);
    }

    #[test]
    fn marks_of_both_generations_go_where_nobody_looked_for_long() {
        let mut marks = Marks::new(10);
        marks.add(hash(1));
        marks.forget(Timestamp::from_micros(3000), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..1000), 0);
    }

    #[test]
    fn full_generation_marks_all_keys() {
        let mut marks = Marks::new(10);
        (0..9).for_each(|key| marks.add(hash(key)));
        assert!(marked(&marks, 100..200) < 20);
        (9..1000).for_each(|key| marks.add(hash(key)));
        assert_eq!(marked(&marks, 0..2000), 2000);
        marks.forget(Timestamp::from_micros(1001), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..2000), 2000, "they may be missing in it");
        marks.forget(Timestamp::from_micros(2002), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..2000), 0);
    }
}
