//! The hash of a key: where the table looks for the key's bucket first.
//!
//! The hash only finds candidates. The table compares the key itself before a decision uses a
//! bucket, so two keys with one hash cost time and never share a bucket.
//!
//! Each limit draws its own seeds. A client that cannot see hashes cannot choose keys that crowd one
//! part of the index.

use std::hash::Hasher;

use foldhash::SharedSeed;
use foldhash::fast::FoldHasher;

use super::stored_key::SHORT_WORDS;

/// Two random numbers: the seed of the hash's constants, and the seed of its state.
pub(crate) type HashSeeds = [u64; 2];

/// Bits of a place in an index entry.
const PLACE_BITS: u32 = 26;
/// The last place that an entry can name; the first is 1, and no entry is 0.
pub(super) const PLACE_MAX: u32 = (1 << PLACE_BITS) - 1;
/// The bits of an index entry above those of a place.
const TAG: u32 = !PLACE_MAX;

/// The hash of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyHash(u64);

impl KeyHash {
    /// Where in the index the key is looked for first.
    #[inline(always)]
    pub(super) fn home(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }

    /// Bits that a place in the index does not depend on.
    #[inline(always)]
    pub(super) fn low(self) -> u32 {
        self.0 as u32
    }

    /// The bits of the hash that an index entry holds beside a place.
    #[inline(always)]
    pub(super) fn tag(self) -> u32 {
        self.low() & TAG
    }
}

/// Hashes keys. Its seeds are secret.
pub(crate) struct KeyHasher {
    constants: SharedSeed,
    state: u64,
    /// The hash that all keys have.
    #[cfg(test)]
    constant: Option<u64>,
}

impl KeyHasher {
    /// A hasher whose hashes nobody can predict without the seeds.
    pub(crate) fn new([constants, state]: HashSeeds) -> Self {
        Self {
            constants: SharedSeed::from_u64(constants),
            state,
            #[cfg(test)]
            constant: None,
        }
    }

    /// A hasher that gives all keys this hash.
    #[cfg(test)]
    pub(super) fn constant(hash: u64) -> Self {
        Self { constant: Some(hash), ..Self::new([0, 0]) }
    }

    /// The hash of `key`, whose words are `short`.
    #[inline(always)]
    pub(super) fn hash(&self, key: &[u8], short: Option<[u64; SHORT_WORDS]>) -> KeyHash {
        #[cfg(test)]
        if let Some(hash) = self.constant {
            return KeyHash(hash);
        }
        let mut hasher = FoldHasher::with_seed(self.state, &self.constants);
        match short {
            // As numbers they are hashed inline.
            Some([first, second, third, fourth]) => {
                hasher.write_u128(u128::from(first) | u128::from(second) << 64);
                hasher.write_u128(u128::from(third) | u128::from(fourth) << 64);
            }
            None => hasher.write(key),
        }
        // As for any slice. It also mixes what the fast variant leaves unmixed.
        hasher.write_usize(key.len());
        KeyHash(hasher.finish())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::bucket::stored_key::short_words;

    /// Digits of pi.
    pub(in crate::bucket) const SEEDS: HashSeeds = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344];
    const OTHER_SEEDS: HashSeeds = [0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c];

    #[test]
    fn hash_depends_on_key_length_and_seeds() {
        let (hasher, other) = (KeyHasher::new(SEEDS), KeyHasher::new(OTHER_SEEDS));
        let mut seen = HashSet::new();
        for length in 0..=512 {
            let key = vec![b'x'; length];
            let hash = hasher.hash(&key, short_words(&key));
            assert_eq!(hasher.hash(&key, short_words(&key)), hash);
            assert_ne!(other.hash(&key, short_words(&key)), hash);
            assert!(seen.insert(hash.0), "{length} bytes");
        }
    }

    #[test]
    fn homes_and_tags_of_consecutive_keys_are_spread_evenly() {
        const KEYS: u32 = 102_400;
        let hasher = KeyHasher::new(SEEDS);
        let hashes = || {
            (0..KEYS).map(|key| {
                let key = format!("user:{key:015}").into_bytes();
                hasher.hash(&key, short_words(&key))
            })
        };
        // 64 parts of 1600 keys each, by chance give or take 40.
        let count = |part: &dyn Fn(KeyHash) -> u32| {
            let mut counts = [0_u32; 64];
            hashes().for_each(|hash| counts[(part(hash) % 64) as usize] += 1);
            counts
        };
        let tags = count(&|hash| hash.tag() >> PLACE_MAX.count_ones());
        assert!(tags.iter().all(|count| (1400..1800).contains(count)), "{tags:?}");
        for bits in [0, 10, 22] {
            let homes = count(&|hash| hash.home() >> bits);
            assert!(homes.iter().all(|count| (1400..1800).contains(count)), "{homes:?}");
        }
    }
}
