//! The bucket of a token bucket or leaky bucket that this node keeps alone, in one word: the state of
//! [`TurnRule`].
//!
//! # Argument
//!
//! A decision loads the word, compares the key, and swaps the word that it loaded. From one key of a place to the next
//! the word grows: [`start`](TableBucket::start) begins after every value that the word had for the last key. So a word
//! that was loaded for one key is never found again for another, and a swap that succeeds spends from the key that was
//! compared. Within a key's life the word only grows, except where a request is [undone](LocalBucket::give_back) or tokens are
//! [taken back](LocalBucket::take_back); how far it had grown is written down before.
//!
//! # Orderings
//!
//! The word publishes the key: it is stored with `Release` after the key was written, and loaded with `Acquire`
//! before the key is compared. It publishes nothing else.

use super::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, spin_loop};
use super::new_key::NewKey;
use super::spend_result::{LocalAnswer, LocalAsk};
use super::stored_key::{SHORT_WORDS, StoredKey};
use super::table::{Evictable, TableBucket};
use crate::algorithm::{STATE_MAX, Standing, Taken, Turn, TurnRule};
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};

/// Set while the place has no key. 0 also means that it has none.
const RETIRED: u64 = 1 << 63;
/// In place of the state while a thread [changes the key's plan](plan).
const CHANGING: u64 = STATE_MAX - 1;

/// A key's state and the key, in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct LocalBucket {
    /// The state, or [`RETIRED`] and the last one.
    state: AtomicU64,
    /// At least the highest state from which a request was undone.
    highest: AtomicU64,
    key_bytes: AtomicU16,
    /// The plan that the state is of: see [`NewKey::plan`].
    plan: AtomicU32,
    key: [AtomicU64; SHORT_WORDS],
}

impl LocalBucket {
    /// Undoes a request that was allowed and will not be made, if it can be undone. The caller has pinned the key.
    pub(crate) fn give_back(&self, rule: &TurnRule, taken: Taken) {
        let (mut undone, mut own) = (self.highest.load(Ordering::Acquire), 0);
        loop {
            let state = self.load();
            let Some(less) = rule.given_back(state, taken, undone) else { return };
            let highest = self.highest.fetch_max(state, Ordering::AcqRel);
            if highest > undone.max(own) {
                // Another thread undoes a request too.
                undone = highest;
                continue;
            }
            own = state;
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            if self.state.compare_exchange(state, less, success, failure).is_ok() {
                return;
            }
        }
    }
}

impl TableBucket for LocalBucket {
    type Word = u64;
    type Ask = LocalAsk<TurnRule>;
    type Answer = LocalAnswer;
    type Rule = TurnRule;
    const HAS_MARKS: bool = false;

    #[inline(always)]
    fn load(&self) -> u64 {
        loop {
            match self.state.load(Ordering::Acquire) {
                CHANGING => spin_loop(),
                state => return state,
            }
        }
    }

    #[inline(always)]
    fn is_retired(word: u64) -> bool {
        !(1..RETIRED).contains(&word)
    }

    #[inline(always)]
    fn key(&self) -> StoredKey<'_> {
        StoredKey { bytes: &self.key_bytes, words: &self.key }
    }

    /// Begins one unit after every word of the last key. That lies in the past, so the new key is unused.
    fn start(&self, new: NewKey, _: bool) {
        self.plan.store(new.plan, Ordering::Release);
        let last = self.state.load(Ordering::Relaxed) & !RETIRED;
        let last = last.max(self.highest.load(Ordering::Relaxed));
        self.state.store(last + 1, Ordering::Release);
    }

    #[inline(always)]
    fn try_decide(&self, seen: u64, ask: Self::Ask, time: impl Now) -> Option<LocalAnswer> {
        if Self::is_retired(seen) {
            return None;
        }
        let LocalAsk { cost, rule, within_us, plan } = ask;
        let now = rule.units_at(time.cached());
        let named = (plan, rule);
        let seen =
            if self.is_under(plan) { seen } else { self.under_plan(seen, named, now, cost == 0)? };
        let (after, turn) = rule.decide(seen, now, cost.max(1), within_us);
        let is_allowed = after.is_some();
        let answer = |turn| {
            let standing = Standing::Turn(rule, turn);
            Some(LocalAnswer { is_allowed, is_sure: true, standing })
        };
        if cost == 0 {
            return answer(Turn { ahead: seen.saturating_sub(now), ..turn });
        }
        let Some(after) = after else {
            // The plan that was found may be that of a later state.
            return if self.load() == seen { answer(turn) } else { None };
        };
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.state.compare_exchange(seen, after, success, failure).ok()?;
        answer(turn)
    }

    /// Retires a key that is as if it had never been used by every clock: a decision about the next key may have read
    /// the time before `now`.
    fn try_retire(&self, now: Timestamp, rule: &TurnRule, _: Evictable) -> Option<Timestamp> {
        let word = self.load();
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        let last = word.max(self.highest.load(Ordering::Acquire));
        if last >= rule.units_at(now.minus_micros(CLOCK_AGE_MAX_US)) {
            return None;
        }
        self.state.compare_exchange(word, word | RETIRED, success, failure).ok()?;
        Some(now)
    }
}

mod plan;
mod settle;

#[cfg(test)]
mod tests;
