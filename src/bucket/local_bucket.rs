//! The bucket of a limit that this node keeps alone: GCRA in one word.
//!
//! The word is the time at which the bucket will be full, in the units of the limit's [`Scale`]: units that flow in
//! up to that time fill it. A request of `cost` tokens moves that time by `cost` tokens' worth, and is allowed if the
//! bucket would then be full within the time that an empty bucket takes to fill.
//!
//! # Argument
//!
//! A decision loads the word, compares the key, and swaps the word that it loaded. The word only grows, also from one
//! key of a place to the next: [`start`](TableBucket::start) begins after the last value. So a word that was loaded
//! for one key is never found again for another, and a swap that succeeds spends from the key that was compared.
//!
//! # Orderings
//!
//! The word publishes the key: it is stored with `Release` after the key was written, and loaded with `Acquire`
//! before the key is compared. It publishes nothing else.

use super::atomic::{AtomicU16, AtomicU64, Ordering};
use super::spend_result::{Ask, SpendResult, Verdict};
use super::stored_key::{SHORT_WORDS, StoredKey};
use super::table::{Evictable, TableBucket};
use crate::decision::{Refill, View};
use crate::quota::Scale;
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};

/// Set while the place has no key. 0 also means that it has none.
const RETIRED: u64 = 1 << 63;

/// A key's state and the key, in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct LocalBucket {
    /// When the bucket will be full, in units, or [`RETIRED`] and when it was.
    full_at: AtomicU64,
    key_bytes: AtomicU16,
    key: [AtomicU64; SHORT_WORDS],
}

/// The units that flow in from the clock's origin to `at`. A scale of this node alone has at most 2^14 in a microsecond,
/// so this does not overflow for 15 years of the machine's uptime.
#[inline(always)]
fn units_at(at: Timestamp, scale: &Scale) -> u64 {
    at.as_micros().saturating_mul(scale.rate as u64).min(RETIRED - (1 << 60))
}

impl TableBucket for LocalBucket {
    type Word = u64;
    const HAS_MARKS: bool = false;

    #[inline(always)]
    fn load(&self) -> u64 {
        self.full_at.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn is_retired(word: u64) -> bool {
        !(1..RETIRED).contains(&word)
    }

    #[inline(always)]
    fn key(&self) -> StoredKey<'_> {
        StoredKey { bytes: &self.key_bytes, words: &self.key }
    }

    /// The bucket was full when it was retired, and one unit later it is full too. A new key is full.
    fn start(&self, _: u32, _: bool) {
        let last = self.full_at.load(Ordering::Relaxed) & !RETIRED;
        self.full_at.store(last + 1, Ordering::Release);
    }

    #[inline(always)]
    fn try_decide(&self, seen: u64, ask: Ask, time: impl Now) -> Option<SpendResult> {
        if Self::is_retired(seen) {
            return None;
        }
        let Ask { cost, scale, .. } = ask;
        let (at, burst) = (time.cached(), scale.burst as u64);
        let now = units_at(at, &scale);
        let full_at = seen.max(now);
        let after = full_at + u64::from(cost.max(1)) * scale.token as u64;
        let result = |is_allowed, full_at: u64| {
            // Less than none only if the time went back.
            let level = burst as i64 - (full_at - now) as i64;
            let report = (View::NONE, Refill::endless(scale.rate as u64, level, at));
            Some(SpendResult::new(Verdict::of(is_allowed), true, 0, report))
        };
        if after - now > burst {
            return result(false, full_at);
        }
        if cost == 0 {
            return result(true, full_at);
        }
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.full_at.compare_exchange(seen, after, success, failure).ok()?;
        result(true, after)
    }

    /// Retires a key that is full by every clock: a decision about the next key may have read the time before `now`.
    fn try_retire(&self, now: Timestamp, scale: &Scale, _: Evictable) -> Option<Timestamp> {
        let word = self.load();
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        if word >= units_at(now.minus_micros(CLOCK_AGE_MAX_US), scale) {
            return None;
        }
        self.full_at.compare_exchange(word, word | RETIRED, success, failure).ok()?;
        Some(now)
    }
}

#[cfg(test)]
mod tests;
