//! What a key is told from others by: bits that nobody can compute who does not know the secrets.
//!
//! A table holds no keys. It holds 64 bits of a hash of each, and keeps it where others say, beside 6 bits
//! more: 90 bits among a million keys. The secrets are drawn anew for every limit of every process. Who
//! cannot see hashes cannot choose keys that look alike, or that crowd one place of the index.
//!
//! The hash multiplies 16 bytes at a time, to 128 bits, which are mixed into the next 16 bytes; both halves
//! of a print are made of the last product. It is of the family of wyhash and foldhash, but folds nothing
//! on the way. A factor of zero makes all keys alike that differ in the other factor only: the odds that
//! this happens to any of a million keys are one in 10^13, that two look alike otherwise one in 10^15.

/// What the first block and the last one are mixed with.
pub(crate) type Secret = [u64; 4];

/// Bits of a tag.
const TAG_BITS: u32 = 6;
/// Odd, with half of its bits set: carries what the lower bits of a word say to all bits above.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

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

/// Makes prints.
#[derive(Clone, Debug)]
pub(crate) struct Prints(Secret);

impl Prints {
    /// The secret is random, and nobody else's.
    pub(crate) fn new(secret: Secret) -> Self {
        Self(secret)
    }

    /// The print of `key`, if it has 16 to 32 bytes.
    #[inline(always)]
    pub(crate) fn of_two_blocks(&self, key: &[u8]) -> Option<Print> {
        match (key.first_chunk(), key.last_chunk()) {
            (Some(first), Some(last)) if key.len() <= 32 => {
                Some(self.end(halves(last), mix(halves(first), self.begin(key))))
            }
            _ => None,
        }
    }

    /// The print of `key`.
    pub(crate) fn of(&self, key: &[u8]) -> Print {
        self.of_two_blocks(key).unwrap_or_else(|| self.of_other_length(key))
    }

    fn of_other_length(&self, key: &[u8]) -> Print {
        let mixed = self.begin(key);
        let Some(last) = key.last_chunk() else {
            return self.end((0, 0), mix(ends(key), mixed));
        };
        // All but the last 16 bytes, which the last block has, whatever it overlaps.
        let blocks = key[..key.len() - 1].as_chunks().0;
        self.end(halves(last), blocks.iter().fold(mixed, |mixed, block| mix(halves(block), mixed)))
    }

    #[inline(always)]
    fn begin(&self, key: &[u8]) -> Halves {
        (self.0[0] ^ key.len() as u64, self.0[1])
    }

    #[inline(always)]
    fn end(&self, last: Halves, mixed: Halves) -> Print {
        let (low, high) = mix(last, (mixed.0 ^ self.0[2], mixed.1 ^ self.0[3]));
        // Keys that have much in common agree in the lowest bits of one half, or differ in the highest
        // of the other as if by rule: no bit of a print is made of such bits alone.
        Print { place: low ^ high, held: low.wrapping_mul(SPREAD) ^ high }
    }
}

/// The lower and the upper half of 128 bits.
type Halves = (u64, u64);

/// Both halves of the product.
#[inline(always)]
fn mix(block: Halves, mixed: Halves) -> Halves {
    split(u128::from(block.0 ^ mixed.0) * u128::from(block.1 ^ mixed.1))
}

#[inline(always)]
fn halves(block: &[u8; 16]) -> Halves {
    split(u128::from_le_bytes(*block))
}

#[inline(always)]
fn split(whole: u128) -> Halves {
    (whole as u64, (whole >> u64::BITS) as u64)
}

/// All bytes of a key of less than 16, some of them twice: with the length, no two are alike. The
/// second word is turned, or keys of 4 and 8 bytes would be multiplied with nearly themselves.
#[inline(always)]
fn ends(key: &[u8]) -> Halves {
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
    pub(in crate::bucket) const SECRET: Secret = [
        0x243f_6a88_85a3_08d3,
        0x1319_8a2e_0370_7344,
        0xa409_3822_299f_31d0,
        0x082e_fa98_ec4e_6c89,
    ];
    const OTHER: Secret = [
        0x4528_21e6_38d0_1377,
        0xbe54_66cf_34e9_0c6c,
        0xc0ac_29b7_c97c_50dd,
        0x3f84_d5b5_b547_0917,
    ];

    #[test]
    fn keys_of_all_lengths_have_prints_of_their_own_and_no_two_tables_agree_on_them() {
        let prints = Prints::new(SECRET);
        let others = Prints::new(OTHER);
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
        for prints in [SECRET, [SECRET[0]; 4]].map(Prints::new) {
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
        let prints = Prints::new(SECRET);
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
    fn keys_that_count_up_are_spread_evenly_by_any_part_of_their_prints() {
        let prints = Prints::new(SECRET);
        let of = |key: u32| prints.of(format!("user:{key:015}").as_bytes());
        for bits in [0, 26, 54] {
            for word in [|print: Print| print.held, |print: Print| print.place] {
                let mut counts = [0_u32; 1024];
                (0..1024 * 100)
                    .for_each(|key| counts[(word(of(key)) >> bits) as usize % 1024] += 1);
                assert!(counts.iter().all(|count| (50..160).contains(count)), "from bit {bits}");
            }
        }
        let all: HashSet<u64> = (0..1_000_000).map(|key| of(key).held).collect();
        assert_eq!(all.len(), 1_000_000);
    }

    #[test]
    fn no_more_keys_agree_in_parts_of_both_words_than_chance_has_it() {
        const KEYS: u64 = 1 << 18;
        // 18 bits of the place and 14 of what is held: of so many keys 8 pairs agree.
        let agree = |prints: &Prints, key: &dyn Fn(u64) -> Vec<u8>, bits: u32| {
            let parts = (0..KEYS).map(|number| {
                let print = prints.of(&key(number));
                (print.place >> 46, print.held << (50 - bits) >> 50)
            });
            KEYS as usize - parts.collect::<HashSet<_>>().len()
        };
        let of_length = |length: usize| {
            move |number: u64| {
                let mut key = vec![0; length];
                key[length - 8..].copy_from_slice(&number.to_le_bytes());
                key
            }
        };
        let at_first = |number: u64| [number.to_le_bytes(), [7; 8], [9; 8]].concat();
        let by_name = |number: u64| format!("user:{number:015}").into_bytes();
        let long = of_length(70);
        for secret in [SECRET, OTHER] {
            let prints = Prints::new(secret);
            for bits in [0, 25, 50] {
                for (name, pairs) in [
                    ("8 bytes", agree(&prints, &of_length(8), bits)),
                    ("16 bytes", agree(&prints, &of_length(16), bits)),
                    ("24 bytes", agree(&prints, &at_first, bits)),
                    ("by name", agree(&prints, &by_name, bits)),
                    ("70 bytes", agree(&prints, &long, bits)),
                ] {
                    assert!(pairs <= 24, "{name}, from bit {bits}: {pairs}");
                }
            }
        }
    }
}
