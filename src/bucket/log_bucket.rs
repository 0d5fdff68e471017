//! The bucket of a sliding log that this node keeps alone.
//!
//! # Argument
//!
//! A key's log is behind a lock, which a decision holds for as long as it takes to look at it. The word is odd while the
//! place has a key. [`start`](TableBucket::start) makes it odd and eviction makes it even, and both add 1, so no value
//! returns. Only eviction ends a key's life, and it holds the key's lock. So a decision that holds the lock, and finds
//! the odd word that it loaded before it compared the key, writes to the log of that key.
//!
//! # Orderings
//!
//! The word publishes the key: it is stored with `Release` after the key was written, and loaded with `Acquire` before
//! the key is compared. The lock publishes the log.

use super::atomic::{AtomicU16, AtomicU64, Mutex, MutexGuard, Ordering};
use super::new_key::NewKey;
use super::spend_result::{LocalAnswer, LocalAsk};
use super::stored_key::{SHORT_WORDS, StoredKey};
use super::table::{Evictable, TableBucket};
use crate::algorithm::{Log, LogRule, Standing};
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};
use std::sync::PoisonError;

/// A key and its log.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct LogBucket {
    /// Odd while the place has a key.
    generation: AtomicU64,
    key_bytes: AtomicU16,
    key: [AtomicU64; SHORT_WORDS],
    /// In memory of its own, if anything was spent.
    log: Mutex<Option<Box<Log>>>,
}

impl LogBucket {
    /// Takes back what was spent at `decided`. The caller has pinned the key.
    pub(crate) fn take_back(
        &self,
        rule: &LogRule,
        tokens: u32,
        decided: Timestamp,
        now: Timestamp,
    ) {
        if let Some(log) = &mut *self.lock() {
            log.take_back(rule, decided, now, tokens);
        }
    }

    /// Spends `tokens`, whatever the limit. The caller has pinned the key.
    pub(crate) fn charge(&self, rule: &LogRule, tokens: u32, now: Timestamp) {
        self.lock().get_or_insert_default().charge(rule, now, tokens);
    }

    /// The key is as if it had never been used. The caller has pinned it.
    pub(crate) fn reset(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Log>>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TableBucket for LogBucket {
    type Word = u64;
    type Ask = LocalAsk<LogRule>;
    type Answer = LocalAnswer;
    type Rule = LogRule;
    const HAS_MARKS: bool = false;

    fn load(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn is_retired(word: u64) -> bool {
        word.is_multiple_of(2)
    }

    fn key(&self) -> StoredKey<'_> {
        StoredKey { bytes: &self.key_bytes, words: &self.key }
    }

    fn start(&self, _: NewKey, _: bool) {
        self.generation.store(self.generation.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    fn try_decide(&self, seen: u64, ask: Self::Ask, time: impl Now) -> Option<LocalAnswer> {
        let LocalAsk { cost, rule, .. } = ask;
        let mut log = self.lock();
        if Self::is_retired(seen) || self.generation.load(Ordering::Relaxed) != seen {
            return None;
        }
        let (now, is_peek) = (time.cached(), cost == 0);
        let (is_allowed, standing) = match &mut *log {
            None if is_peek => Log::default().decide(rule, now, 1, is_peek),
            log => log.get_or_insert_default().decide(rule, now, cost.max(1), is_peek),
        };
        Some(LocalAnswer { is_allowed, is_sure: true, standing: Standing::Log(standing) })
    }

    /// Retires a key all of whose tokens have returned by any clock, and frees its log.
    fn try_retire(&self, now: Timestamp, rule: &LogRule, _: Evictable) -> Option<Timestamp> {
        let mut log = self.lock();
        let before = now.minus_micros(CLOCK_AGE_MAX_US);
        let is_in_use = log.as_ref().is_some_and(|log| !log.is_over(rule, before));
        if is_in_use || Self::is_retired(self.load()) {
            return None;
        }
        *log = None;
        self.generation.store(self.load() + 1, Ordering::Release);
        Some(now)
    }
}
