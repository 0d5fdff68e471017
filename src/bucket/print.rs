//! What a key is told from others by: random bits that only this process can compute.
//!
//! A table holds no keys. It holds 102 bits of two hashes, each with a secret of its own, drawn anew
//! in every process. Among a million keys the odds that any two look alike are one in 10^19; and
//! who cannot see the hashes cannot choose keys that do, or that crowd one place of the index.

use std::hash::{BuildHasher, Hasher};

use foldhash::quality::RandomState;

/// Bits of a place in a table.
pub(super) const PLACE_BITS: u32 = 26;

/// What stands for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Print {
    /// Held by the bucket; says where in the index it is looked for.
    pub(super) held: u64,
    /// Held by the index: what its word has room for beside a place.
    pub(super) tag: u64,
}

/// The secrets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prints {
    held: RandomState,
    tag: RandomState,
}

impl Prints {
    /// The print of `key`.
    #[inline]
    pub(crate) fn of(&self, key: &[u8]) -> Print {
        let hash = |state: &RandomState| {
            let mut hasher = state.build_hasher();
            hasher.write(key);
            hasher.finish()
        };
        Print { held: hash(&self.held), tag: hash(&self.tag) >> PLACE_BITS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_all_lengths_have_prints_of_their_own_and_no_two_tables_agree_on_them() {
        let (prints, others) = (Prints::default(), Prints::default());
        let keys: Vec<Vec<u8>> = (0..=512).map(|length| vec![b'x'; length]).collect();
        let mut seen = std::collections::HashSet::new();
        for key in &keys {
            let print = prints.of(key);
            assert_eq!(prints.of(key), print);
            assert_ne!(others.of(key), print);
            assert!(seen.insert(print.held) & seen.insert(print.tag), "{} bytes", key.len());
        }
    }
}
