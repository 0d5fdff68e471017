//! What a key is told from others by: bits that nobody can compute who does not know the secret.
//!
//! A table holds no keys. It holds 64 bits of a hash of each, and keeps it where others say, beside 6 bits
//! more: 90 bits among a million keys. The secret is drawn anew for every limit of every process. Who
//! cannot see hashes cannot choose keys that look alike, or that crowd one place of the index.
//!
//! The hash multiplies 16 bytes at a time, mixed with secret words, to 128 bits, which are mixed into the
//! next 16 bytes; both words of a print are made of the last product. It is of the family of wyhash and
//! foldhash. The odds that any two of a million keys look alike are about one in 10^15; where two numbers
//! are counted side by side in 16 bytes, of which different pairs can have one product, about one in 10^10.

use super::index::PLACE_MAX;

/// What the first block is mixed with, two words, and all others.
pub(crate) type Secret = [u64; 4];

/// The bits of a tag, above those of a place.
const TAG: u32 = !PLACE_MAX;
/// Odd: carries what the lower bits of a word say to the bits above. It fits an instruction.
const SPREAD: u64 = 0x7f4a_7c15;

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

    /// What the index holds of it beside a place.
    #[inline(always)]
    pub(super) fn tag(self) -> u32 {
        self.place as u32 & TAG
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
        if !(16..=32).contains(&key.len()) {
            return None;
        }
        let (first, last) = (key.first_chunk()?, key.last_chunk()?);
        Some(self.next(halves(last), self.first(halves(first), key)).into())
    }

    /// The print of `key`.
    pub(crate) fn of(&self, key: &[u8]) -> Print {
        self.of_two_blocks(key).unwrap_or_else(|| self.of_other_length(key))
    }

    fn of_other_length(&self, key: &[u8]) -> Print {
        // All but the last 16 bytes, which the last block has, whatever it overlaps.
        let blocks = key[..key.len().saturating_sub(1)].as_chunks().0;
        let (Some(last), Some((first, others))) = (key.last_chunk(), blocks.split_first()) else {
            return self.next((0, 0), self.first(ends(key), key)).into();
        };
        let mixed = self.first(halves(first), key);
        let mixed = others.iter().fold(mixed, |mixed, block| self.next(halves(block), mixed));
        self.next(halves(last), mixed).into()
    }

    #[inline(always)]
    fn first(&self, block: Halves, key: &[u8]) -> Halves {
        product(block.0 ^ self.0[0] ^ key.len() as u64, block.1 ^ self.0[1])
    }

    #[inline(always)]
    fn next(&self, block: Halves, mixed: Halves) -> Halves {
        product(block.0 ^ mixed.0 ^ self.0[2], block.1 ^ mixed.1 ^ self.0[3])
    }
}

impl From<Halves> for Print {
    #[inline(always)]
    fn from((low, high): Halves) -> Self {
        // Keys that have much in common agree in the lowest bits of one half, or differ in the highest of
        // the other as if by rule: no bit is made of such bits alone.
        Self { place: low ^ high, held: low.wrapping_mul(SPREAD) ^ high }
    }
}

/// The lower and the upper half of 128 bits.
type Halves = (u64, u64);

#[inline(always)]
fn product(one: u64, other: u64) -> Halves {
    split(u128::from(one) * u128::from(other))
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
        for bits in [0, 26, 32, 54] {
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

    /// Of keys that differ in `number`, how many agree with another in 18 bits of the place and 14 sums of
    /// what is held, or in 32 bits of that: by chance 8 of these.
    fn agree(prints: &Prints, key: impl Fn(u64) -> Vec<u8>) -> u64 {
        const KEYS: u64 = 1 << 18;
        let all: Vec<Print> = (0..KEYS).map(|number| prints.of(&key(number))).collect();
        let of = |part: &dyn Fn(&Print) -> u64| {
            KEYS - all.iter().map(part).collect::<HashSet<_>>().len() as u64
        };
        let place =
            |print: &Print| u64::from(print.home() % (1 << 12)) << 32 | u64::from(print.tag());
        [
            of(&|print| print.held % (1 << 32)),
            of(&|print| print.held >> 16 << 32),
            of(&|print| print.held >> 32),
            of(&|print| place(print) << 14 | print.held.wrapping_mul(OTHER[0] | 1) >> 50),
            of(&|print| {
                place(print) << 14 | print.held.swap_bytes().wrapping_mul(OTHER[0] | 1) >> 50
            }),
        ]
        .into_iter()
        .max()
        .unwrap_or_default()
    }

    /// Zeros, and a number at `at`.
    fn zeros_but(at: usize, length: usize) -> impl Fn(u64) -> Vec<u8> {
        move |number| {
            let mut key = vec![0; length];
            key[at..at + 8].copy_from_slice(&number.to_le_bytes());
            key
        }
    }

    #[test]
    fn no_more_keys_agree_in_parts_of_both_words_than_chance_has_it() {
        let name = |number: u64| format!("user:{number:015}").into_bytes();
        let two_numbers =
            |number: u64| [number % 512, number / 512, 0, 0].map(u64::to_le_bytes).concat();
        for secret in [SECRET, OTHER] {
            let prints = Prints::new(secret);
            for (family, pairs) in [
                ("8 bytes", agree(&prints, zeros_but(0, 8))),
                ("16 bytes", agree(&prints, zeros_but(8, 16))),
                ("first of 24 bytes", agree(&prints, zeros_but(0, 24))),
                ("names", agree(&prints, name)),
                ("two numbers of 32 bytes", agree(&prints, two_numbers)),
                ("last of 70 bytes", agree(&prints, zeros_but(62, 70))),
            ] {
                assert!(pairs <= 24, "{family}: {pairs}");
            }
        }
    }

    #[test]
    fn what_a_long_key_begins_with_is_not_forgotten_over_zeros() {
        for secret in [SECRET, OTHER] {
            let pairs = agree(&Prints::new(secret), zeros_but(0, 512));
            assert!(pairs <= 24, "{pairs}");
        }
    }
}
