//! What a key is told from others by: bits that nobody can compute who does not know the secrets.
//!
//! A table holds no keys. It holds one hash of each, and keeps it where another says, beside 6 bits
//! more of that: 90 bits among a million keys. The secrets are drawn anew for every limit of every
//! process. The odds that any two of a million keys look alike are one in 10^15; and who cannot see
//! hashes cannot choose keys that do, or that crowd one place of the index.
//!
//! Each hash multiplies 16 bytes at a time with secrets, to 128 bits, and folds those. It is of the
//! family of wyhash and foldhash.

/// Of one hash: where it begins, and what the last block and all others are multiplied with.
pub(crate) type Secret = [u64; 3];

/// Bits of a tag.
const TAG_BITS: u32 = 6;

/// What stands for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Print {
    /// Held by the bucket.
    pub(super) held: u64,
    /// Says where in the index the key stands, and what stands there.
    place: u64,
}

impl Print {
    /// Where in the index it is looked for first.
    #[inline(always)]
    pub(super) fn home(self) -> u32 {
        (self.place >> u32::BITS) as u32
    }

    /// What the index holds of it.
    #[inline(always)]
    pub(super) fn tag(self) -> u32 {
        self.place as u32 >> (u32::BITS - TAG_BITS)
    }
}

/// The secrets.
#[derive(Clone, Debug)]
pub(crate) struct Prints {
    held: Secret,
    place: Secret,
}

impl Prints {
    /// Both secrets are random, and nobody else's.
    pub(crate) fn new(held: Secret, place: Secret) -> Self {
        Self { held, place }
    }

    /// The print of `key`, if it has 16 to 32 bytes.
    #[inline(always)]
    pub(crate) fn of_two_blocks(&self, key: &[u8]) -> Option<Print> {
        match (key.first_chunk(), key.last_chunk()) {
            (Some(first), Some(last)) if key.len() <= 32 => {
                let hash = |secret: &Secret| {
                    let mixed = mix(first, begin(key, secret), secret[1]);
                    mix(last, mixed, secret[2])
                };
                // First what is waited for longest.
                let place = hash(&self.place);
                Some(Print { held: hash(&self.held), place })
            }
            _ => None,
        }
    }

    /// The print of `key`.
    pub(crate) fn of(&self, key: &[u8]) -> Print {
        self.of_two_blocks(key).unwrap_or_else(|| {
            let (held, place) = (hash(key, &self.held), hash(key, &self.place));
            Print { held, place }
        })
    }
}

fn hash(key: &[u8], secret: &Secret) -> u64 {
    let mut mixed = begin(key, secret);
    let Some(last) = key.last_chunk() else {
        let (low, high) = ends(key);
        // Nothing has been mixed yet but the one block.
        return fold(fold(low ^ mixed, high ^ secret[2]), secret[1] | 1);
    };
    // All but the last 16 bytes, which the last block has, whatever it overlaps.
    for block in key[..key.len() - 1].as_chunks().0 {
        mixed = mix(block, mixed, secret[1]);
    }
    mix(last, mixed, secret[2])
}

#[inline(always)]
fn begin(key: &[u8], secret: &Secret) -> u64 {
    secret[0] ^ key.len() as u64
}

#[inline(always)]
fn mix(block: &[u8; 16], mixed: u64, secret: u64) -> u64 {
    let (low, high) = halves(block);
    fold(low ^ mixed, high ^ secret)
}

/// Both halves of the product.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[inline(always)]
fn halves(block: &[u8; 16]) -> (u64, u64) {
    let block = u128::from_le_bytes(*block);
    (block as u64, (block >> 64) as u64)
}

/// All bytes of a key of less than 16, some of them twice: with the length, no two are alike. The
/// second word is turned, or keys of 4 and 8 bytes would be multiplied with nearly themselves.
#[inline(always)]
fn ends(key: &[u8]) -> (u64, u64) {
    if let (Some(first), Some(last)) = (key.first_chunk::<8>(), key.last_chunk()) {
        (u64::from_le_bytes(*first), u64::from_le_bytes(*last).rotate_left(32))
    } else if let (Some(first), Some(last)) = (key.first_chunk::<4>(), key.last_chunk()) {
        (u32::from_le_bytes(*first).into(), u64::from(u32::from_le_bytes(*last)) << 32)
    } else {
        let byte = |at: usize| u64::from(key.get(at).copied().unwrap_or_default());
        (byte(0) | byte(1) << 8, byte(2))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Digits of pi.
    pub(in crate::bucket) const HELD: Secret =
        [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0];
    pub(in crate::bucket) const PLACE: Secret =
        [0x082e_fa98_ec4e_6c89, 0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c];

    #[test]
    fn keys_of_all_lengths_have_prints_of_their_own_and_no_two_tables_agree_on_them() {
        let prints = Prints::new(HELD, PLACE);
        let others = Prints::new(PLACE, HELD);
        let mut seen = HashSet::new();
        for length in 0..=512 {
            let key = vec![b'x'; length];
            let print = prints.of(&key);
            assert_eq!(prints.of(&key), print);
            assert_ne!(others.of(&key), print);
            assert!(seen.insert(print.held) & seen.insert(print.place), "{length} bytes");
        }
    }

    #[test]
    fn numbers_of_4_and_8_bytes_have_prints_of_their_own() {
        let mut seen = HashSet::new();
        for prints in [Prints::new(HELD, PLACE), Prints::new([HELD[0]; 3], [PLACE[0]; 3])] {
            seen.clear();
            for number in 0..10_000_u64 {
                let short = (number as u32).to_le_bytes();
                for print in [prints.of(&short), prints.of(&number.to_le_bytes())] {
                    assert!(seen.insert(print.held) & seen.insert(print.place), "{number}");
                }
            }
        }
    }

    #[test]
    fn every_bit_of_a_key_changes_half_of_its_print() {
        let prints = Prints::new(HELD, PLACE);
        for length in [1, 3, 4, 7, 8, 15, 16, 17, 20, 31, 32, 33, 48, 64, 100] {
            let key: Vec<u8> = (0..length as u8).collect();
            let print = prints.of(&key);
            let changed: Vec<(u32, u32)> = (0..8 * length)
                .map(|bit| {
                    let mut other = key.clone();
                    other[bit / 8] ^= 1 << (bit % 8);
                    let other = prints.of(&other);
                    let [held, place] = [print.held ^ other.held, print.place ^ other.place];
                    (held.count_ones(), place.count_ones())
                })
                .collect();
            let least = changed.iter().min_by_key(|changed| changed.0 + changed.1);
            assert!(least.is_some_and(|least| least.0 > 10 && least.1 > 10), "{length}: {least:?}");
            let mean =
                changed.iter().map(|one| one.0 + one.1).sum::<u32>() as usize / changed.len();
            assert!((58..=70).contains(&mean), "{length}: {mean} of 128");
        }
    }

    #[test]
    fn keys_that_count_up_are_spread_evenly_by_either_end_of_their_prints() {
        let prints = Prints::new(HELD, PLACE);
        let of = |key: u32| prints.of(format!("user:{key:015}").as_bytes());
        for bits in [0, 26, 54] {
            let mut counts = [0_u32; 1024];
            (0..1024 * 100).for_each(|key| counts[(of(key).held >> bits) as usize % 1024] += 1);
            assert!(counts.iter().all(|count| (50..160).contains(count)), "from bit {bits}");
        }
        let all: HashSet<u64> = (0..1_000_000).map(|key| of(key).held).collect();
        assert_eq!(all.len(), 1_000_000);
    }
}
