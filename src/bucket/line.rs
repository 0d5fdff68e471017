//! How a bucket lies in memory: two cache lines, with the bucket's state and its key; and the memory that
//! buckets lie in.
//!
//! # Argument
//!
//! A place is given from key to key, and a decision holds no lock on it. The bucket's word says when
//! that happens: eviction moves it to an epoch in which it is *gone*, with nothing left in it; then the
//! next key and everything else is written; then the word is published, in a further epoch. So:
//!
//! - A decision loads the word first, compares the key after that, and changes the word only by
//!   compare-and-swap from the value that it loaded. If the swap succeeds, the word was in one epoch
//!   all the time, and so the key that was compared is the one that pays.
//! - Where the swap fails, or a decision loads the word anew for another reason, it compares the key
//!   again.
//! - A denial changes no word. It is counted after the word was found in the same epoch once more.
//!   A thread that is held up between that look and the next instruction may count a denial with the
//!   key that has the place then: a hint for the next lease, no token.
//!
//! # Orderings
//!
//! The key is written after the word has become *gone* and before it is published with `Release`; the
//! word is loaded with `Acquire`, and swapped with `Release` and `Acquire` on both sides. Had a
//! decision read a later key than that of the word it loaded, and its swap succeeded, then the eviction
//! would have read the swapped word or a later one, and the later key would have been written after the
//! decision read it.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::TransparentWrapper;
use yoke::Yoke;

use super::desk::Desk;
use super::fields::{Ends, Flow, Moment};
use super::key_text::{self, LongKeys};
use super::word::Word;
use crate::decision::Refill;
use crate::time::Timestamp;

/// Words in a bucket.
const WORDS: usize = 16;
/// The words of the key. A key of up to three words lies in the first cache line, with all that a decision on a
/// fresh lease reads.
const KEY: std::ops::Range<usize> = 5..13;
/// The longest key that lies in its bucket.
const INLINE_BYTES_MAX: usize = (KEY.end - KEY.start) * size_of::<u64>();

type BucketWords = [AtomicU64; WORDS];

/// A refill that is closed; what is in the other bits is when the bucket will be full if left alone.
pub(super) const CLOSED: u64 = Refill::CLOSED_US;

/// A key's state on this node, and the key: two cache lines.
#[derive(Debug, TransparentWrapper)]
#[repr(transparent)]
pub(crate) struct Bucket(BucketWords);

/// What a new key's bucket holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Tokens that may be spent before the store answers.
    pub(crate) credit: u32,
    /// The refill that this node alone gives, for ever, and the tokens that it fills.
    pub(crate) local: Option<LocalRefill>,
}

/// Refill of a bucket that no store knows of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalRefill {
    /// Units per microsecond.
    pub(crate) rate: i64,
    /// Whole tokens.
    pub(crate) depth: u32,
    pub(crate) from: Timestamp,
}

#[cfg(any(test, feature = "sim"))]
impl Start {
    /// A bucket that waits for the store, and has so much credit.
    pub(crate) const fn at_rest(credit: u32) -> Self {
        Self { credit, local: None }
    }
}

impl Bucket {
    /// A bucket without a key.
    pub(crate) fn new(start: Start) -> Self {
        let bucket = Self(BucketWords::default());
        bucket.init(b"", None, start);
        bucket
    }

    /// Makes it the bucket of `key`, of which a long one has been given the slot `long` in `keys`. The
    /// place is new, or its word says that it is gone.
    pub(super) fn init(&self, key: &[u8], long: Option<(u64, &LongKeys)>, start: Start) {
        let next = |tenancy| Some(Tenancy(tenancy).next(key.len()).0);
        let _ = self.tenancy().fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        match long {
            Some((slot, keys)) => {
                self.key_words()[0].store(slot, Ordering::Relaxed);
                keys.words(slot).into_iter().for_each(|words| key_text::write(words, key));
            }
            None => key_text::write(self.key_words(), key),
        }
        let (minted_us, flow, ends, tokens) = match start.local {
            Some(LocalRefill { rate, depth, from }) => {
                let ends = Ends::new(Timestamp::NEVER, 0, true);
                (from.as_micros(), Flow::new(rate, depth, 0), ends, depth)
            }
            None => (CLOSED, Flow::NONE, Ends::ZERO, 0),
        };
        self.minted_us().store(minted_us, Ordering::Release);
        self.flow().store(flow.0, Ordering::Release);
        self.ends().store(ends.0, Ordering::Release);
        self.seen().store(Moment::ZERO.0, Ordering::Relaxed);
        self.counts().store(0, Ordering::Relaxed);
        self.desk().store(Desk::SHUT.0, Ordering::Relaxed);
        let word = Word(self.word().load(Ordering::Relaxed));
        let word = word.reborn(start.credit).with_tokens(tokens);
        self.word().store(word.0, Ordering::Release);
    }

    /// The word now: to be loaded before the key is compared.
    #[inline(always)]
    pub(super) fn load(&self) -> Word {
        Word(self.word().load(Ordering::Acquire))
    }

    /// Whether it is the bucket of `key`; long ones lie in `keys`.
    #[inline(always)]
    pub(super) fn is_of(&self, key: &[u8], keys: &LongKeys) -> bool {
        if Tenancy(self.tenancy().load(Ordering::Relaxed)).key_bytes() != key.len() {
            return false;
        }
        if key.len() <= INLINE_BYTES_MAX {
            return key_text::is_same(self.key_words(), key);
        }
        self.long_words(keys).is_some_and(|words| key_text::is_same(words, key))
    }

    /// Whether a key lies outside of its bucket.
    pub(super) fn is_long(key: &[u8]) -> bool {
        key.len() > INLINE_BYTES_MAX
    }

    /// The slot of a long key; no other decision or writer may use the place meanwhile.
    pub(super) fn long_slot(&self) -> Option<u64> {
        let bytes = Tenancy(self.tenancy().load(Ordering::Relaxed)).key_bytes();
        (bytes > INLINE_BYTES_MAX).then(|| self.key_words()[0].load(Ordering::Relaxed))
    }

    /// The key, for a caller that knows that the place is not evicted meanwhile.
    pub(super) fn key(&self, keys: &LongKeys) -> Vec<u8> {
        let bytes = Tenancy(self.tenancy().load(Ordering::Relaxed)).key_bytes();
        if bytes <= INLINE_BYTES_MAX {
            return key_text::read(self.key_words(), bytes);
        }
        self.long_words(keys).map(|words| key_text::read(words, bytes)).unwrap_or_default()
    }

    fn long_words<'k>(&self, keys: &'k LongKeys) -> Option<&'k [AtomicU64]> {
        keys.words(self.key_words()[0].load(Ordering::Relaxed))
    }

    // ---- pending tokens that no longer fit the word --------------------------------------------

    /// Announces that pending tokens will be on their way to the engine by themselves; fails when too
    /// many are already.
    pub(super) fn try_announce_spill(&self) -> bool {
        let more = |tenancy| (Tenancy(tenancy).spills() < SPILLS_MAX).then(|| tenancy + SPILL);
        self.tenancy().fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Whether pending tokens may be on their way to the engine by themselves.
    pub(crate) fn has_spilled(&self) -> bool {
        Tenancy(self.tenancy().load(Ordering::Acquire)).spills() > 0
    }

    /// One lot of what was spilled has arrived.
    pub(crate) fn spill_booked(&self) {
        self.tenancy().fetch_sub(SPILL, Ordering::AcqRel);
    }

    // ---- words ---------------------------------------------------------------------------------

    /// The key, or the number of the slot that a long one has.
    #[inline(always)]
    fn key_words(&self) -> &[AtomicU64] {
        &self.0[KEY]
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
        &self.0[13]
    }

    /// A [`Tenancy`], of which but the spills are written before the word is published.
    #[inline(always)]
    fn tenancy(&self) -> &AtomicU64 {
        &self.0[4]
    }

    /// A [`Desk`].
    #[inline(always)]
    pub(super) fn desk(&self) -> &AtomicU64 {
        &self.0[14]
    }

    /// [`Counts`] since the last collection.
    #[inline(always)]
    pub(super) fn counts(&self) -> &AtomicU64 {
        &self.0[15]
    }
}

/// Which of the keys that a place was given to has it, how often pending tokens that no longer fitted the
/// word are on their way to the engine, and how long the key is.
///
/// ```text
///  63          32 31      16 15         0
/// |    tenant    |  spills  | key, bytes |
/// ```
///
/// The spills stay when the key changes: a decision that announced one, and found that its key was evicted,
/// takes it back.
#[derive(Clone, Copy, Debug)]
struct Tenancy(u64);

const SPILL: u64 = 1 << u16::BITS;
/// The most spills under way: together they have more tokens than are spent before the engine looks.
const SPILLS_MAX: u16 = 2048;

impl Tenancy {
    fn spills(self) -> u16 {
        (self.0 / SPILL) as u16
    }

    fn tenant(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }

    #[inline(always)]
    fn key_bytes(self) -> usize {
        usize::from(self.0 as u16)
    }

    /// The next key's, which has so many bytes.
    fn next(self, key_bytes: usize) -> Self {
        let (tenant, spills) = (self.tenant().wrapping_add(1), u64::from(self.spills()) * SPILL);
        Self(u64::from(tenant) << u32::BITS | spills | key_bytes as u64)
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
/// asked for with that of a word, and buckets lie in it from the first multiple of their size on.
#[derive(Debug)]
pub(super) struct Lines(Yoke<&'static [Bucket], Box<[AtomicU64]>>);

impl Lines {
    /// So many; `None` if there is not so much memory.
    pub(super) fn new(count: usize) -> Option<Self> {
        let words: Box<[AtomicU64]> =
            bytemuck::try_zeroed_slice_box((count + 1).checked_mul(WORDS)?).ok()?;
        Some(Self(Yoke::attach_to_cart(words, |words| {
            let first = words.as_ptr().align_offset(size_of::<BucketWords>()).min(WORDS);
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
    fn each_bucket_is_two_cache_lines_of_its_own() {
        for count in [1, 2, 1000, 1_000_000] {
            let lines = Lines::new(count).unwrap();
            let address = |place: usize| std::ptr::from_ref(&lines[place]).addr();
            assert_eq!(size_of::<Bucket>(), 128);
            for place in [0, count / 2, count - 1] {
                assert_eq!(address(place) % 128, 0);
                assert_eq!(address(place), address(0) + 128 * place);
            }
        }
        assert_eq!(Lines::new(1000).unwrap().len(), 1000);
        assert!(Lines::new(usize::MAX / 128).is_none());
    }
}
