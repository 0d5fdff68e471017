//! The bucket of a limit with windows that this node keeps alone: what a key spent, without a lock.
//!
//! The word has the number of a window, and what was spent in it. What was spent in the window before is beside it: of
//! each window, at the place for even or for odd windows.
//!
//! # Argument
//!
//! A decision loads the word, compares the key, and swaps the word that it loaded. A key's windows follow each other, and the
//! next key of a place begins in a later window. So a word that was loaded for one key is never found again for another.
//! Within a window spending grows, except where tokens are [taken back](WindowBucket::take_back) or the key is
//! [reset](WindowBucket::reset).
//!
//! The first decision in the window after that of the word writes beside the word what it says was spent, and then
//! swaps. Several threads may write this entry. The largest value stays, and that is the final count, or more if
//! tokens were taken back: the thread whose swap succeeds has read the word's last value. A reader that finds the entry of a later window fails, and the
//! decision is made again. A reset clears the entry after the word. Where windows slide, a decision that read the word before may
//! write the entry after that: what was spent in the window before then counts on.
//!
//! Where windows slide, the next key of a place does not begin with the window that follows: a decision whose swap failed
//! may have written what the key before spent.
//!
//! # Orderings
//!
//! The word publishes the key and what is beside it: both are written before it is swapped with `Release`, and read
//! after it was loaded with `Acquire`.

use super::atomic::{AtomicU16, AtomicU64, Ordering};
use super::new_key::NewKey;
use super::spend_result::{LocalAnswer, LocalAsk};
use super::stored_key::{SHORT_WORDS, StoredKey};
use super::table::{Evictable, TableBucket};
use crate::algorithm::{Counts, Standing, WindowRule};
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};

/// Set while the place has no key. 0 also means that it has none.
const RETIRED: u64 = 1 << 63;
/// Bits of what was spent in a window: no quota has more tokens.
const SPENT_BITS: u32 = 30;
const SPENT_MAX: u32 = (1 << SPENT_BITS) - 1;
/// Windows from the one in a retired word to the one in which the next key begins.
const WINDOWS_BETWEEN: u64 = 2;

/// A key's state and the key, in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct WindowBucket {
    /// A window and what was spent in it, or [`RETIRED`] and the window that is [`WINDOWS_BETWEEN`] before the next key's.
    word: AtomicU64,
    /// For even and for odd windows: the window, and what was spent in the one before.
    before: [AtomicU64; 2],
    key_bytes: AtomicU16,
    key: [AtomicU64; SHORT_WORDS],
}

/// A window, by number, and what was spent in it or in the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spent {
    window: u64,
    tokens: u32,
}

impl Spent {
    #[inline(always)]
    fn of(word: u64) -> Self {
        let word = word & !RETIRED;
        Self { window: word >> SPENT_BITS, tokens: (word as u32) & SPENT_MAX }
    }

    #[inline(always)]
    fn word(self) -> u64 {
        self.window << SPENT_BITS | u64::from(self.tokens)
    }
}

impl WindowBucket {
    /// What was spent in the window before `window`, which was that of the word; `None` if the word has gone on.
    #[inline(always)]
    fn spent_before(&self, window: u64) -> Option<u32> {
        let before = Spent::of(self.before[window as usize % 2].load(Ordering::Acquire));
        match before.window {
            of if of == window => Some(before.tokens),
            of if of < window => Some(0),
            _ => None,
        }
    }
}

impl WindowBucket {
    /// Takes back what was spent at `decided`, if it was in the window of the word. The caller has pinned the key.
    pub(crate) fn take_back(&self, rule: &WindowRule, tokens: u32, decided: Timestamp) -> bool {
        let (window, _) = window_at(rule, decided);
        loop {
            let word = TableBucket::load(self);
            let spent = Spent::of(word);
            if Self::is_retired(word) || spent.window != window || spent.tokens < tokens {
                return false;
            }
            let less = Spent { window, tokens: spent.tokens - tokens }.word();
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            if self.word.compare_exchange(word, less, success, failure).is_ok() {
                return true;
            }
        }
    }

    /// Takes back `tokens` of the window that it is now, or what was spent in it. The caller has pinned the key.
    #[cfg(feature = "server")]
    pub(crate) fn take_back_at_most(&self, rule: &WindowRule, tokens: u32, now: Timestamp) {
        let spent = Spent::of(TableBucket::load(self));
        // One that is retired meanwhile, or that others take back from, gives nothing back.
        self.take_back(rule, tokens.min(spent.tokens), now);
    }

    /// Spends `tokens`, whatever the limit. The caller has pinned the key.
    pub(crate) fn charge(&self, rule: &WindowRule, tokens: u32, now: Timestamp) {
        loop {
            let word = TableBucket::load(self);
            if Self::is_retired(word) {
                return;
            }
            let spent = Spent::of(word);
            let window = window_at(rule, now).0.max(spent.window);
            let current = if window == spent.window { spent.tokens } else { 0 };
            if rule.is_sliding && window == spent.window + 1 && spent.tokens > 0 {
                self.note_before(window, spent.tokens);
            }
            let after = current.saturating_add(tokens).min(SPENT_MAX);
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            let after = Spent { window, tokens: after }.word();
            if self.word.compare_exchange(word, after, success, failure).is_ok() {
                return;
            }
        }
    }

    /// The key is as if it had never been used. The caller has pinned it.
    pub(crate) fn reset(&self, rule: &WindowRule, now: Timestamp) {
        let mut none = Spent { window: 0, tokens: 0 };
        let is_reset = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            none.window = window_at(rule, now).0.max(Spent::of(word).window);
            (!Self::is_retired(word)).then(|| none.word())
        });
        if is_reset.is_ok() {
            let earlier = |of: u64| (Spent::of(of).window <= none.window).then(|| none.word());
            let before = &self.before[none.window as usize % 2];
            let _ = before.fetch_update(Ordering::AcqRel, Ordering::Acquire, earlier);
        }
    }

    /// Writes beside the word what was spent in the window before `window`.
    #[inline(always)]
    fn note_before(&self, window: u64, tokens: u32) {
        let before = Spent { window, tokens };
        self.before[window as usize % 2].fetch_max(before.word(), Ordering::AcqRel);
    }
}

/// The number of the window at `now`, the first of which is such that keys can begin, and the microseconds left of it.
#[inline(always)]
fn window_at(rule: &WindowRule, now: Timestamp) -> (u64, u64) {
    let (window, left_us) = rule.window_at(now);
    (window + WINDOWS_BETWEEN, left_us)
}

impl TableBucket for WindowBucket {
    type Word = u64;
    type Ask = LocalAsk<WindowRule>;
    type Answer = LocalAnswer;
    type Rule = WindowRule;
    const HAS_MARKS: bool = false;

    #[inline(always)]
    fn load(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn is_retired(word: u64) -> bool {
        !(1..RETIRED).contains(&word)
    }

    #[inline(always)]
    fn key(&self) -> StoredKey<'_> {
        StoredKey { bytes: &self.key_bytes, words: &self.key }
    }

    fn start(&self, _: NewKey, _: bool) {
        let last = Spent::of(self.word.load(Ordering::Relaxed)).window;
        let first = Spent { window: last + WINDOWS_BETWEEN, tokens: 0 };
        self.word.store(first.word(), Ordering::Release);
    }

    #[inline(always)]
    fn try_decide(&self, seen: u64, ask: Self::Ask, time: impl Now) -> Option<LocalAnswer> {
        if Self::is_retired(seen) {
            return None;
        }
        let LocalAsk { cost, rule, .. } = ask;
        let spent = Spent::of(seen);
        let (mut window, mut left_us) = window_at(rule, time.cached());
        if window < spent.window {
            // The time was read before that of an earlier decision.
            (window, left_us) = (spent.window, rule.period_us);
        }
        let (current, previous) = match window - spent.window {
            0 if rule.is_sliding => (spent.tokens, self.spent_before(window)?),
            0 => (spent.tokens, 0),
            1 if rule.is_sliding => (0, spent.tokens),
            _ => (0, 0),
        };
        let counts = Counts { current, previous, left_us };
        let answer = |is_allowed, counts| {
            Some(LocalAnswer {
                is_allowed,
                is_sure: true,
                standing: Standing::Window(rule, counts),
            })
        };
        if !rule.allows(counts, cost.max(1)) {
            return answer(false, counts);
        }
        if cost == 0 {
            return answer(true, counts);
        }
        if window > spent.window && previous > 0 {
            self.note_before(window, previous);
        }
        let after = Counts { current: current + cost, ..counts };
        let word = Spent { window, tokens: after.current }.word();
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.word.compare_exchange(seen, word, success, failure).ok()?;
        answer(true, after)
    }

    /// Retires a key of which nothing counts any more by any clock: a decision about the next key may have read the
    /// time before `now`.
    fn try_retire(&self, now: Timestamp, rule: &WindowRule, _: Evictable) -> Option<Timestamp> {
        let word = self.load();
        let (window, _) = window_at(rule, now.minus_micros(CLOCK_AGE_MAX_US));
        let spent = Spent::of(word);
        let counts_for = if rule.is_sliding { 2 } else { 1 };
        if Self::is_retired(word) || window < spent.window + counts_for {
            return None;
        }
        // The next key begins when this one no longer counts.
        let last = Spent { window: spent.window + counts_for - WINDOWS_BETWEEN, ..spent };
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.word.compare_exchange(word, last.word() | RETIRED, success, failure).ok()?;
        Some(now)
    }
}

#[cfg(test)]
mod tests;
