//! Marks of keys that were evicted before they were full: such a key gets no first credit, since the store knows what
//! it has left and this node no longer does.
//!
//! A mark is some bits of a Bloom filter: it is never missed, and a key without one is taken for marked about once in
//! twenty times where the filter is nearly full. There are two generations of marks. A generation goes when all its keys
//! must be full. A full generation marks all keys.

use super::atomic::zeros;
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
    now: Generation,
    before: Generation,
    /// The most marks of a generation.
    most: usize,
}

#[derive(Debug, Default)]
struct Generation {
    begun: Timestamp,
    count: usize,
    /// Allocated with the first mark.
    bits: Option<Box<[u64]>>,
    /// When the last of its keys is full.
    until: Timestamp,
}

impl Marks {
    /// At most `most` marks in a generation.
    pub(super) fn new(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    /// Begins another generation if this one is older than an empty bucket takes to fill, and forgets the one before if
    /// its keys are full.
    pub(super) fn forget(&mut self, now: Timestamp, fills_in_us: u64) {
        if self.before.count == 0 && now.micros_since(self.now.begun) > fills_in_us {
            let next = Generation { begun: now, ..Generation::default() };
            self.before = std::mem::replace(&mut self.now, next);
        }
        if now > self.before.until {
            self.before = Generation::default();
        }
    }

    /// Marks a key that is full at `full_at`.
    pub(super) fn add(&mut self, hash: KeyHash, full_at: Timestamp) {
        let generation = &mut self.now;
        generation.until = generation.until.max(full_at);
        if generation.has(hash, self.most) {
            return;
        }
        generation.count += 1;
        let length = (BITS * self.most).div_ceil(WORD);
        let Some(mut bits) = generation.bits.take().or_else(|| zeros(length)) else {
            // Without memory it is full.
            generation.count = self.most;
            return;
        };
        for (word, bit) in probes(hash, length) {
            bits[word] |= bit;
        }
        generation.bits = Some(bits);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.now.count + self.before.count == 0
    }

    /// Whether a key may be marked.
    pub(super) fn has(&self, hash: KeyHash) -> bool {
        self.now.has(hash, self.most) || self.before.has(hash, self.most)
    }
}

impl Generation {
    fn has(&self, hash: KeyHash, most: usize) -> bool {
        let is_in = |bits: &[u64]| probes(hash, bits.len()).all(|(word, bit)| bits[word] & bit > 0);
        self.count == most || self.bits.as_deref().is_some_and(is_in)
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

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    #[test]
    fn mark_is_found_until_the_key_is_full_and_few_others_are() {
        let mut marks = Marks::new(10_000);
        assert_eq!(marked(&marks, 0..1000), 0);
        marks.forget(at(5000), FILLS_IN_US);
        // In debt: a key takes longer to fill than an empty one.
        (0..9000).for_each(|key| marks.add(hash(key), at(9000)));
        for us in [5000, 6001, 7002, 9000] {
            marks.forget(at(us), FILLS_IN_US);
            assert_eq!(marked(&marks, 0..9000), 9000, "{us}");
        }
        let others = marked(&marks, 9000..109_000);
        assert!(others < 3000, "{others} of 100,000");
        marks.forget(at(9001), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..109_000), 0);
    }

    #[test]
    fn marks_that_are_made_all_the_time_go_a_generation_at_a_time() {
        let mut marks = Marks::new(100_000);
        for round in 0..100 {
            let now = 100 * round;
            marks.forget(at(now), FILLS_IN_US);
            (0..100).for_each(|key| marks.add(hash((now + key) as u32), at(now + FILLS_IN_US)));
        }
        assert_eq!(marked(&marks, 9000..10_000), 1000, "those of the last {FILLS_IN_US}");
        assert!(marked(&marks, 0..7000) < 100);
    }

    #[test]
    fn generation_goes_on_until_an_empty_bucket_has_filled() {
        let mut marks = Marks::new(10);
        for (now, begun) in [(5000, 5000), (6000, 5000), (6001, 6001)] {
            marks.forget(at(now), FILLS_IN_US);
            assert_eq!(marks.now.begun, at(begun), "{now}");
        }
    }

    #[test]
    fn full_generation_marks_all_keys() {
        let mut marks = Marks::new(10);
        (0..9).for_each(|key| marks.add(hash(key), at(1000)));
        assert!(marked(&marks, 100..200) < 20);
        (9..1000).for_each(|key| marks.add(hash(key), at(1000)));
        assert_eq!(marked(&marks, 0..2000), 2000);
        marks.add(hash(1000), at(1500));
        marks.forget(at(1500), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..2000), 2000, "they may be missing in it");
        marks.forget(at(1501), FILLS_IN_US);
        assert_eq!(marked(&marks, 0..2000), 0);
    }
}
