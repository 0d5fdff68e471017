//! No limiter: what is left of a decision when everything is taken away that decides.
//!
//! A key is hashed, an entry of 4 bytes leads to a line of 64, one word of that says whether the key
//! is the right one, and another is changed by one locked instruction. There is no clock, no lease, no
//! refill, no count and no error; keys are never made or forgotten. That is about what memory charges a
//! limiter that keeps a line a key where it is once, and finds it by an index. By handle there is the
//! locked instruction alone.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Contender, by_name, by_number};
use crate::case::{By, Case};

/// A line of the cache.
#[derive(Default)]
#[repr(align(64))]
struct Line {
    print: u64,
    word: AtomicU64,
    _rest: [u64; 6],
}

/// Bits of a line's number in an entry; the others are a tag, so that other keys' lines are rarely read.
const PLACE_BITS: u32 = 24;

struct Bare {
    /// Half full at most; 0 is none.
    index: Vec<u32>,
    shift: u32,
    lines: Vec<Line>,
}

pub fn new(case: &Case) -> Box<dyn Contender> {
    const NAME: &str = "no limiter";
    let bare = Bare::new(case);
    if case.by == By::Handle {
        return by_number(NAME, case, move |key| {
            bare.lines[1 + *key as usize].change();
            false
        });
    }
    by_name(NAME, case, move |name| !bare.touch(name.as_bytes()))
}

impl Line {
    /// Changes the word, or finds that another thread has.
    #[inline]
    fn change(&self) {
        let word = self.word.load(Ordering::Relaxed);
        let order = (Ordering::SeqCst, Ordering::Relaxed);
        let _ = self.word.compare_exchange_weak(word, word + 1, order.0, order.1);
    }
}

impl Bare {
    /// Keys get their lines in the order in which they are asked for first, as those of a limiter do.
    fn new(case: &Case) -> Self {
        let entries = (2 * case.keys).next_power_of_two();
        let shift = u64::BITS - entries.ilog2();
        let mut bare = Self { index: vec![0; entries], shift, lines: vec![Line::default()] };
        for name in case.keys().names {
            if !bare.touch(name.as_bytes()) {
                bare.enter(hash(name.as_bytes()));
            }
        }
        bare
    }

    fn enter(&mut self, print: u64) {
        let mut at = self.home(print);
        while self.index[at] > 0 {
            at = (at + 1) % self.index.len();
        }
        self.index[at] = tag(print) << PLACE_BITS | self.lines.len() as u32;
        self.lines.push(Line { print, ..Line::default() });
    }

    fn home(&self, print: u64) -> usize {
        (print >> self.shift) as usize
    }

    /// Changes the key's word; whether there is one.
    #[inline]
    fn touch(&self, key: &[u8]) -> bool {
        let print = hash(key);
        let mut at = self.home(print);
        loop {
            let entry = self.index[at];
            if entry == 0 {
                return false;
            }
            let line = &self.lines[(entry % (1 << PLACE_BITS)) as usize];
            if entry >> PLACE_BITS == tag(print) && line.print == print {
                line.change();
                return true;
            }
            at = (at + 1) % self.index.len();
        }
    }
}

/// Other bits than those that say where the entry is looked for first.
fn tag(print: u64) -> u32 {
    print as u32 >> PLACE_BITS
}

/// Of a key of 16 to 32 bytes.
#[inline]
fn hash(key: &[u8]) -> u64 {
    let (first, last) = (key.first_chunk(), key.last_chunk());
    let [first, last] =
        [first, last].map(|chunk| u128::from_le_bytes(chunk.copied().unwrap_or_default()));
    fold(fold(0x243f_6a88_85a3_08d3, first), last)
}

#[inline]
fn fold(seed: u64, block: u128) -> u64 {
    let (low, high) = (block as u64 ^ seed, (block >> 64) as u64 ^ 0x1319_8a2e_0370_7344);
    let product = u128::from(low) * u128::from(high);
    product as u64 ^ (product >> 64) as u64
}
