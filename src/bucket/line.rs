//! How a bucket lies in memory: eight words, one cache line; and the memory that buckets lie in.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::TransparentWrapper;
use yoke::Yoke;

use super::desk::Desk;
use super::fields::{Ends, Flow, Moment};
use super::word::Word;
use crate::decision::Refill;

/// Words in a cache line.
const WORDS: usize = 8;

type Line = [AtomicU64; WORDS];

/// A refill that is closed; what is in the other bits is when the bucket will be full if left alone.
pub(super) const CLOSED: u64 = Refill::CLOSED_US;

/// A key's state on this node: one cache line.
#[derive(Debug, TransparentWrapper)]
#[repr(transparent)]
pub(crate) struct Bucket(Line);

impl Bucket {
    /// A bucket that holds no lease and has `credit`.
    pub(crate) fn new(credit: u32) -> Self {
        let bucket = Self(Line::default());
        bucket.settle_in(0, credit);
        bucket
    }

    /// Makes it the bucket at rest of the key with this print; nobody else knows the place yet.
    pub(super) fn settle_in(&self, print: u64, credit: u32) {
        self.print().store(print, Ordering::Relaxed);
        self.minted_us().store(CLOSED, Ordering::Release);
        self.flow().store(Flow::NONE.0, Ordering::Release);
        self.ends().store(Ends::ZERO.0, Ordering::Relaxed);
        self.seen().store(Moment::ZERO.0, Ordering::Relaxed);
        self.counts().store(0, Ordering::Relaxed);
        self.desk().store(Desk::SHUT.0, Ordering::Relaxed);
        let word = Word(self.word().load(Ordering::Relaxed));
        self.word().store(word.reborn(credit).0, Ordering::Release);
    }

    /// The [`Word`]. Publishes the lease's end along with itself.
    #[inline(always)]
    pub(super) fn word(&self) -> &AtomicU64 {
        &self.0[0]
    }

    /// Refill up to here has been turned into tokens; publishes the flow. [`CLOSED`]: none flows in,
    /// and the store's bucket is full from then on if nobody else spends.
    #[inline(always)]
    pub(super) fn minted_us(&self) -> &AtomicU64 {
        &self.0[1]
    }

    /// A [`Flow`], written by the engine.
    #[inline(always)]
    pub(super) fn flow(&self) -> &AtomicU64 {
        &self.0[2]
    }

    /// [`Ends`], written by the engine: the end of the lease, from which on tokens are void, and what else a
    /// decision minds.
    #[inline(always)]
    pub(super) fn ends(&self) -> &AtomicU64 {
        &self.0[3]
    }

    /// A [`Moment`], written by the engine: from when on credit may be used, and the store's level at
    /// its last word, rounded.
    #[inline(always)]
    pub(super) fn seen(&self) -> &AtomicU64 {
        &self.0[4]
    }

    /// Half of what tells the key from others; written before the place is known to anybody.
    #[inline(always)]
    pub(super) fn print(&self) -> &AtomicU64 {
        &self.0[5]
    }

    /// A [`Desk`].
    #[inline(always)]
    pub(super) fn desk(&self) -> &AtomicU64 {
        &self.0[6]
    }

    /// [`Counts`] since the last collection.
    #[inline(always)]
    pub(super) fn counts(&self) -> &AtomicU64 {
        &self.0[7]
    }
}

/// What a bucket counts beside its word.
///
/// ```text
///  63         32 31          0
/// |   surplus   |   denied    |
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts(pub u64);

impl Counts {
    /// Tokens denied.
    pub(super) fn denied(self) -> u32 {
        self.0 as u32
    }

    /// Tokens spent by costs above 1, less the number of such decisions.
    pub(super) fn surplus(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }

    /// So many tokens of surplus, to be added.
    #[inline(always)]
    pub(super) fn of_surplus(tokens: u32) -> u64 {
        u64::from(tokens) << u32::BITS
    }
}

/// Buckets that are all zero at first, and take memory only as they are written to.
///
/// Memory that is asked for with the alignment of a cache line would be written to at once; so more is
/// asked for with that of a word, and buckets lie in it from the first whole line on.
#[derive(Debug)]
pub(super) struct Lines(Yoke<&'static [Bucket], Box<[AtomicU64]>>);

impl Lines {
    /// So many; `None` if there is not so much memory.
    pub(super) fn new(count: usize) -> Option<Self> {
        let words: Box<[AtomicU64]> =
            bytemuck::try_zeroed_slice_box((count + 1).checked_mul(WORDS)?).ok()?;
        Some(Self(Yoke::attach_to_cart(words, |words| {
            let first = words.as_ptr().align_offset(size_of::<Line>()).min(WORDS);
            let (lines, _) = words[first..].as_chunks();
            Bucket::wrap_slice(&lines[..count])
        })))
    }
}

impl Deref for Lines {
    type Target = [Bucket];

    #[inline(always)]
    fn deref(&self) -> &[Bucket] {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_is_a_cache_line_of_its_own() {
        for count in [1, 2, 1000, 1_000_000] {
            let lines = Lines::new(count).unwrap();
            let address = |place: usize| std::ptr::from_ref(&lines[place]).addr();
            assert_eq!(size_of::<Bucket>(), 64);
            for place in [0, count / 2, count - 1] {
                assert_eq!(address(place) % 64, 0);
                assert_eq!(address(place), address(0) + 64 * place);
            }
        }
        assert_eq!(Lines::new(1000).unwrap().len(), 1000);
        assert!(Lines::new(usize::MAX / 64).is_none());
    }
}
