//! One key's bucket: what a decision reads and writes, and the few things the engine does to it.
//!
//! # Who may do what
//!
//! Any number of threads call [`take`](Bucket::take). One engine calls
//! [`collect`](Bucket::collect), [`withdraw`](Bucket::withdraw) and [`amend`](Bucket::amend).
//!
//! # Argument
//!
//! Every change of tokens, credit and pending is one compare-and-swap of the word, so a token is
//! spent once or not at all. Refill needs more than the word: a thread that runs out computes what
//! the lease's rate has earned since `minted_us`, claims that stretch of time by moving `minted_us`
//! with a compare-and-swap, and then adds the tokens to the word (where it may have filled the bucket, it
//! adds them and spends by one change, and if that fails adds them only). Between the two it may be
//! interrupted for as long as it likes: the tokens are late, never doubled. When the engine changes
//! the lease in between, the word's epoch differs and the tokens are dropped, never added to a
//! lease that did not earn them.
//!
//! A bucket's place is given to another key when its own has been evicted. Decisions that were under
//! way then change nothing, and look the key up again: the argument is in [`line`](super::line).
//!
//! # Orderings
//!
//! To change a lease, the engine
//!
//! 1. closes `minted_us`,
//! 2. takes the tokens out of the word, in a new epoch, if the old lease has ended,
//! 3. writes flow and end, saying that refill may fill the bucket,
//! 4. writes the new level into the word, in a new epoch,
//! 5. opens `minted_us`, and
//! 6. says that refill cannot fill the bucket, if that is so,
//!
//! each store with `Release`. A decision loads the word, then the rest, with `Acquire`, and then swaps the
//! word with `Release`. It may load anything in between, and still:
//!
//! - A claim of refill that was computed under a new rate or end comes after step 1, and fails under the old
//!   `minted_us`.
//! - A swap from a word that was loaded before step 2 fails once the decision has read the new end: so no
//!   token of an ended lease is spent under the end of the next one. Where the old lease had not ended, its
//!   tokens go over to the new one, and can be spent under either end.
//! - A decision that reads the end of step 6 beside a word from before step 4 fails to swap it; beside a later
//!   word the end is that word's.
//!
//! Counters for demand and metrics publish nothing and are `Relaxed`.
//!
//! A decision writes the word and then reads the flags, a collection writes the flags and then reads
//! the word. All four are `SeqCst`: else both could read what was before, and what was spent would be
//! neither collected nor told of.

use std::sync::atomic::Ordering;

use super::desk::TOLD;
use super::fields::{Ends, Flow, Moment};
use super::line::{Bucket, CLOSED, Counts};
#[cfg(test)]
use super::line::{LocalRefill, Start};
#[cfg(test)]
use super::outcome::{Amended, Collected, Terms};
use super::outcome::{Looked, SpendResult, Taken, Touch, Verdict};
#[cfg(test)]
use super::word::FIELD_MAX;
use super::word::Word;
use crate::decision::{Refill, RoughTokens, View};
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};

/// Tokens denied between two collections are summed up to about so many.
const DENIED_MAX: u32 = 1 << 31;
/// A caller that can wait asks for more than a lease has where the store had so many times the cost at its last word.
/// With one time, callers would join batches that have nothing to give.
const ASK_TIMES: i64 = 8;

impl Bucket {
    /// A full bucket that this node alone refills, for ever.
    #[cfg(test)]
    pub(crate) fn local(rate: i64, depth: u32, from: Timestamp) -> Self {
        Self::new(Start { credit: 0, local: Some(LocalRefill { rate, depth, from }) })
    }

    // ---- the place ---------------------------------------------------------------------------

    /// Whether the key was forgotten: nothing can be spent here any more.
    #[cold]
    pub(crate) fn is_gone(&self) -> bool {
        self.load().gone()
    }

    /// Whether neither lease nor key has changed since the word was loaded.
    #[inline(always)]
    fn is_unchanged_since(&self, word: Word) -> bool {
        self.load().epoch() == word.epoch()
    }

    /// The word, unless the place has been taken from the key that `is_mine` compares.
    #[inline(always)]
    pub(super) fn load_mine(&self, is_mine: &impl Fn() -> bool) -> Option<Word> {
        let word = self.load();
        (!word.gone() && is_mine()).then_some(word)
    }

    /// Forgets the key if that gives nothing back to it: it is full, nothing is pending, and the engine keeps
    /// no books on it.
    pub(super) fn try_forget(&self, now: Timestamp, unit: i64, local: bool) -> bool {
        let (tokens, ..) = self.peek(now, unit);
        let word = self.load();
        let full = if local {
            tokens == Flow(self.flow().load(Ordering::Relaxed)).depth()
        } else {
            self.is_full_at_rest(now) && tokens == 0
        };
        full && word.pending() == 0
            && self.is_shut()
            && self
                .word()
                .compare_exchange(word.0, word.forgotten().0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// Whether the engine has left the bucket, and the key must be full by what the node knew then.
    fn is_full_at_rest(&self, now: Timestamp) -> bool {
        let minted = self.minted_us().load(Ordering::Acquire);
        minted >= CLOSED && minted & !CLOSED <= now.as_micros()
    }

    /// Gives the first credit to a key that has no books and nothing pending, and whose time to fill is over: it is
    /// full unless other nodes spend on it.
    ///
    /// The word is loaded before the rest is looked at, and the engine moves it to its next epoch when it opens
    /// its books and whenever it changes the lease. So a decision that was held up in between changes nothing.
    #[inline]
    pub(crate) fn renew_first_credit(&self, now: Timestamp, credit: impl Fn() -> u32) {
        if self.slot().is_some() || !self.is_full_at_rest(now) {
            return;
        }
        let _ = self.update(|word| {
            let at_rest = self.slot().is_none() && self.is_full_at_rest(now);
            (at_rest && word.pending() == 0 && !word.gone()).then(|| word.with_credit(credit()))
        });
    }

    // ---- decisions ---------------------------------------------------------------------------

    /// Decides about one token by one look at a fresh lease that does not run low, if the engine need not hear
    /// of it; `None` otherwise, and then nothing is changed.
    ///
    /// Cost: one load and one atomic change.
    #[inline(always)]
    pub(crate) fn take_at_once(&self, word: Word, now: Timestamp) -> Option<SpendResult> {
        let ends = Ends(self.ends().load(Ordering::Acquire));
        let enough = word.tokens() > ends.low_if_fresh() && now.as_micros() < ends.micros();
        if enough { self.spend_at_once(word, 1) } else { None }
    }

    /// Denies one token by one look, if that tells for sure and the engine has been told of denials; `None`
    /// otherwise, and then nothing is changed. Where it has not, the precise clock is to decide. `unit` tells
    /// the number of units in a token, late, so that no register need hold it.
    ///
    /// Cost: seven loads and one atomic change.
    #[inline(always)]
    pub(crate) fn deny_at_once(
        &self,
        word: Word,
        now: Timestamp,
        unit: impl FnOnce() -> i64,
    ) -> Option<Looked> {
        let live = word.is_bare() && now.as_micros() < self.ends_us();
        if !live || !self.surely_lacks_one(now, unit) || !self.is_told() {
            return None;
        }
        if self.denied() >= DENIED_MAX || !self.is_unchanged_since(word) {
            return None;
        }
        self.counts().fetch_add(1, Ordering::Relaxed);
        // A collection may have come between, which the engine is to be told of then.
        Some(Looked { result: SpendResult::DENIED, told: self.is_told() })
    }

    /// Decides about `cost` tokens by one look if there are so many, and the engine need only hear if they run
    /// low; where refill may have filled the bucket meanwhile, the precise clock tells. `None` otherwise, and
    /// then nothing is spent.
    ///
    /// Cost: one load and one atomic change, and a load more where tokens run low. Where refill could have
    /// filled the bucket, six loads and a reading of the clock more, and another atomic change where anything
    /// has flowed in.
    #[inline(always)]
    pub(crate) fn spend_by_look(
        &self,
        word: Word,
        cost: u32,
        time: impl Now,
        unit: i64,
    ) -> Option<Looked> {
        let now = time.cached();
        let ends = Ends(self.ends().load(Ordering::Acquire));
        if now.as_micros() >= ends.micros() || !word.is_plain(cost) {
            return None;
        }
        let result = if !ends.is_fresh() && self.may_overflow(word, now, unit) {
            self.spend_settled(word, cost, time.precise(), unit)?
        } else if word.tokens() >= cost {
            self.spend_at_once(word, cost)?
        } else {
            return None;
        };
        Some(Looked { result, told: result.left >= ends.low() || self.is_told() })
    }

    /// Spends where something is pending already, so that the engine knows.
    #[inline(always)]
    fn spend_at_once(&self, word: Word, cost: u32) -> Option<SpendResult> {
        if !word.is_plain(cost) {
            return None;
        }
        let spent = word.spend_tokens(cost);
        self.swap(word, spent).ok()?;
        self.count_surplus(cost);
        Some(SpendResult::allowed(spent.tokens()))
    }

    /// Tells the engine of what was decided at once, for which it is not known yet that the key runs low.
    #[cold]
    pub(crate) fn tell_at_once(&self, result: SpendResult) -> Taken {
        Taken::of(result, self.raise(TOLD))
    }

    /// Counts what a request cost beyond one token.
    #[inline(always)]
    fn count_surplus(&self, cost: u32) {
        if cost > 1 {
            self.counts().fetch_add(Counts::of_surplus(cost - 1), Ordering::Relaxed);
        }
    }

    /// Decides about `cost` tokens of a key whose place is not given up meanwhile.
    pub(crate) fn take(&self, cost: u32, now: impl Now, unit: i64) -> Taken {
        let taken = self.take_by_look(self.load(), cost, now, unit, || true);
        let taken = taken.or_else(|| self.take_further(cost, now, unit, || true));
        taken.unwrap_or_else(|| Taken::new(Verdict::Denied, false, 0, (Touch::None, false)))
    }

    /// Decides about `cost` tokens where no look was enough; `None`, and nothing is changed, where the
    /// place has been taken from the key that `is_mine` compares.
    pub(crate) fn take_further(
        &self,
        cost: u32,
        now: impl Now,
        unit: i64,
        is_mine: impl Fn() -> bool,
    ) -> Option<Taken> {
        self.decide(cost, now, unit, true, is_mine)
    }

    /// Decides about `cost` tokens, as [`take_sure_of`](Self::take_sure_of), of a key whose place is not
    /// given up meanwhile.
    pub(crate) fn take_sure(&self, cost: u32, now: impl Now, unit: i64) -> Taken {
        let taken = self.take_sure_of(cost, now, unit, || true);
        taken.unwrap_or_else(|| Taken::new(Verdict::Unsure, false, 0, (Touch::None, false)))
    }

    /// Decides about `cost` tokens if that can be done for sure, or by an outage policy. Otherwise
    /// nothing is spent or counted, and the store is to be asked. `None`, and nothing is changed, where
    /// the place has been taken from the key that `is_mine` compares.
    pub(crate) fn take_sure_of(
        &self,
        cost: u32,
        now: impl Now,
        unit: i64,
        is_mine: impl Fn() -> bool,
    ) -> Option<Taken> {
        let word = self.load_mine(&is_mine)?;
        let taken = self.take_by_look(word, cost, now, unit, || self.knows_all(true, cost));
        taken.or_else(|| self.decide(cost, now, unit, false, is_mine))
    }

    /// What one look tells. It denies only if it `may_deny`: who can ask the store is denied only if this node knows
    /// that the store has next to nothing.
    #[inline]
    fn take_by_look(
        &self,
        word: Word,
        cost: u32,
        time: impl Now,
        unit: i64,
        may_deny: impl FnOnce() -> bool,
    ) -> Option<Taken> {
        let now = time.cached();
        if cost == 1
            && let Some(result) = self.take_at_once(word, now)
        {
            return Some(Taken::of(result, (Touch::None, false)));
        }
        let denied =
            if cost == 1 && may_deny() { self.deny_at_once(word, now, || unit) } else { None };
        let looked = denied.or_else(|| self.spend_by_look(word, cost, time, unit));
        let Looked { result, told } = looked?;
        Some(if told { Taken::of(result, (Touch::None, false)) } else { self.tell_at_once(result) })
    }

    /// Whether refill is leased, and has not brought a token by now.
    #[inline(always)]
    fn surely_lacks_one(&self, now: Timestamp, unit: impl FnOnce() -> i64) -> bool {
        let flow = Flow(self.flow().load(Ordering::Acquire));
        let minted_us = self.minted_us().load(Ordering::Acquire);
        // Less than none if tokens were minted ahead, or by the precise clock; far too much while the refill
        // is closed, and then the long way tells.
        let elapsed_us = now.as_micros().wrapping_sub(minted_us).cast_signed();
        let rate = flow.rate().cast_signed();
        rate > 0
            && rate.checked_mul(elapsed_us).is_some_and(|units| {
                let unit = unit();
                units < unit - flow.ahead_units(unit).cast_signed()
            })
    }

    #[inline]
    fn decide(
        &self,
        cost: u32,
        time: impl Now,
        unit: i64,
        unsure: bool,
        is_mine: impl Fn() -> bool,
    ) -> Option<Taken> {
        let mut now = time.cached();
        let (mut settled, mut ahead) = (false, false);
        loop {
            let word = self.load_mine(&is_mine)?;
            let ends = Ends(self.ends().load(Ordering::Acquire));
            let live = now.as_micros() < ends.micros();
            let tokens = if live { word.tokens() } else { 0 };
            let from_tokens = tokens.min(cost);
            let from_credit = cost - from_tokens;
            if live && !settled && self.may_overflow(word, now, unit) {
                now = time.precise();
                settled = true;
                self.mint(word, now, 0, unit);
                continue;
            }
            if live && from_credit > 0 {
                let minted = self.mint(word, now, 0, unit);
                // A token ahead is for who spends it at once: others may want sure answers.
                let flow = Flow(self.flow().load(Ordering::Relaxed));
                let last = unsure && from_credit == 1;
                let ahead_us = if last { flow.ahead_us(unit) } else { 0 };
                if minted || ahead_us > 0 && self.mint(word, now, ahead_us, unit) {
                    ahead |= !minted;
                    continue;
                }
            }
            if from_credit > 0 && !unsure && !word.policy() && !self.knows_all(live, cost) {
                return Some(self.unsure(tokens));
            }
            let refused = from_credit > 0 && !unsure && !word.policy();
            if refused || from_credit > 0 && from_credit > self.credit(word, now) {
                if !self.is_unchanged_since(word) {
                    continue;
                }
                return Some(self.deny(cost, word, tokens, live));
            }
            // What no longer fits goes to the engine at once; while it does, the place is not given up.
            let spent = word.spend(from_tokens, from_credit);
            let spills = spent.is_none();
            if spills && !self.try_announce_spill() {
                // So much is under way that nobody has been able to count it.
                return Some(self.deny(cost, word, tokens, live));
            }
            let spent = spent.unwrap_or_else(|| word.spend_all(from_tokens, from_credit));
            if self.swap(word, spent).is_ok() {
                let sure = from_credit == 0 && !ahead && !word.policy();
                let left = tokens - from_tokens;
                let urgent = from_credit > 0 || left < ends.low();
                let spilled = if spills { word.pending() + cost } else { 0 };
                let taken = self.admitted(cost, word, left, sure, urgent);
                return Some(Taken { spilled, ..taken });
            }
            if spills {
                self.spill_booked();
            }
        }
    }

    /// Spends by the precise clock, where something is pending already and there is no policy, out of what the
    /// bucket holds with what has flowed in; `None` if that is less, and then nothing is spent.
    #[inline(always)]
    fn spend_settled(
        &self,
        word: Word,
        cost: u32,
        now: Timestamp,
        unit: i64,
    ) -> Option<SpendResult> {
        let inflow = self.inflow(word, now, 0, unit);
        let added = inflow.map_or(0, |inflow| inflow.tokens);
        let settled = word.with_tokens(word.tokens() + added);
        if settled.tokens() < cost || now.as_micros() >= self.ends_us() {
            return None;
        }
        if let Some(inflow) = inflow {
            self.claim(inflow, word)?;
        }
        let spent = settled.spend_tokens(cost);
        if self.swap(word, spent).is_err() {
            self.deposit(added, word.epoch());
            return None;
        }
        self.count_surplus(cost);
        Some(SpendResult::allowed(spent.tokens()))
    }

    #[inline(always)]
    pub(super) fn swap(&self, from: Word, to: Word) -> Result<(), ()> {
        let order = (Ordering::SeqCst, Ordering::Relaxed);
        let swapped = self.word().compare_exchange_weak(from.0, to.0, order.0, order.1);
        swapped.map(|_| ()).map_err(|_| ())
    }

    #[inline(always)]
    fn admitted(&self, cost: u32, before: Word, left: u32, sure: bool, urgent: bool) -> Taken {
        self.count_surplus(cost);
        let news = if urgent {
            self.raise(TOLD)
        } else if before.pending() == 0 {
            self.raise_queued()
        } else {
            (Touch::None, false)
        };
        Taken::new(Verdict::Allowed, sure, left, news)
    }

    #[inline]
    fn deny(&self, cost: u32, word: Word, tokens: u32, live: bool) -> Taken {
        // So much is no hint any more, and the sum must not wrap: the limit counts the request.
        let uncounted = self.denied() >= DENIED_MAX;
        let counted = if uncounted { 0 } else { u64::from(cost) };
        let before = Counts(self.counts().fetch_add(counted, Ordering::Relaxed)).denied();
        // Told whenever it is more than all that was denied before: a few times between collections.
        let refused = if cost > 1 && before < cost { cost } else { 0 };
        // Without a lease the store may have more than this node knows of.
        let sure = self.is_leased(live) && !word.policy();
        let taken = Taken::new(Verdict::Denied, sure, tokens, self.raise(TOLD));
        Taken { refused, uncounted, ..taken }
    }

    #[cold]
    fn unsure(&self, left: u32) -> Taken {
        Taken::new(Verdict::Unsure, false, left, (Touch::None, self.slot().is_none()))
    }

    /// The credit that may be used now.
    fn credit(&self, word: Word, now: Timestamp) -> u32 {
        let from_us = Moment(self.seen().load(Ordering::Relaxed)).micros();
        if now.as_micros() >= from_us { word.credit() } else { 0 }
    }

    /// Whether the node knows that the store has nothing for a request of this cost: refill is leased, and by its
    /// last word the store had not several times as much.
    fn knows_all(&self, live: bool, cost: u32) -> bool {
        self.is_leased(live) && self.view().tokens() < ASK_TIMES * i64::from(cost)
    }

    /// Whether refill is leased: then the node knows all that it can have.
    fn is_leased(&self, live: bool) -> bool {
        live && self.rate() > 0
    }

    /// Whether refill may have run into the depth by now, if `now` is the cached time: what flowed
    /// in since is lost, and must be before tokens are spent, or it would be earned again
    /// afterwards.
    #[inline(always)]
    fn may_overflow(&self, word: Word, now: Timestamp, unit: i64) -> bool {
        self.may_be_full(word, now.as_micros() + CLOCK_AGE_MAX_US, unit)
    }

    /// Whether refill may have run into the depth by then.
    #[inline(always)]
    pub(super) fn may_be_full(&self, word: Word, until_us: u64, unit: i64) -> bool {
        let flow = Flow(self.flow().load(Ordering::Acquire));
        // Where nothing flows in this is closed, and far ahead.
        let minted_us = self.minted_us().load(Ordering::Acquire);
        let room = u64::from(flow.room(word.tokens()));
        until_us > minted_us
            && flow.rate().saturating_mul(until_us - minted_us) >= room.saturating_mul(unit as u64)
    }

    /// Turns earned time into tokens, and time up to `ahead_us` from now that is still to be earned.
    /// Returns whether the word is worth another look.
    fn mint(&self, seen: Word, now: Timestamp, ahead_us: u64, unit: i64) -> bool {
        let Some(inflow) = self.inflow(seen, now, ahead_us, unit) else { return false };
        if self.claim(inflow, seen).is_some() {
            self.deposit(inflow.tokens, seen.epoch());
        }
        true
    }

    /// The whole tokens that have flowed in, as far as there is room, and those that will within `ahead_us`;
    /// `None` if there is nothing to claim.
    #[inline(always)]
    fn inflow(&self, seen: Word, now: Timestamp, ahead_us: u64, unit: i64) -> Option<Inflow> {
        let from_us = self.minted_us().load(Ordering::Acquire);
        let flow = Flow(self.flow().load(Ordering::Acquire));
        let now_us = (now.as_micros() + ahead_us).min(self.ends_us());
        if from_us >= now_us || flow.rate() == 0 {
            return None;
        }
        let (rate, unit) = (flow.rate(), unit as u64);
        let room = u64::from(flow.room(seen.tokens()));
        let earned = rate.saturating_mul(now_us - from_us);
        let filled = flow.is_boundless() || earned >= room.saturating_mul(unit);
        if !filled && earned < unit {
            return None;
        }
        let tokens = if filled { room } else { earned / unit };
        // What flows into a full bucket is lost up to now; what is minted ahead is not there yet. The first is
        // what the second would come to, without a division.
        let until_us = if filled && ahead_us == 0 {
            now_us
        } else {
            let earned_us = from_us.saturating_add(tokens.saturating_mul(unit).div_ceil(rate));
            if filled { earned_us.max(now.as_micros()).min(now_us) } else { earned_us }
        };
        let tokens = tokens as u32;
        (until_us > from_us).then_some(Inflow { from_us, until_us, tokens })
    }

    /// Claims what has flowed in since the word was `seen`, if nobody else has, and it is not that of
    /// another lease or key.
    #[inline(always)]
    fn claim(&self, inflow: Inflow, seen: Word) -> Option<()> {
        if !self.is_unchanged_since(seen) {
            return None;
        }
        let Inflow { from_us, until_us, .. } = inflow;
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        self.minted_us().compare_exchange(from_us, until_us, order.0, order.1).ok().map(|_| ())
    }

    /// Adds minted tokens, unless the lease that earned them has changed.
    fn deposit(&self, tokens: u32, epoch: u64) {
        let depth = Flow(self.flow().load(Ordering::Relaxed)).depth();
        let _ = self.update(|word| {
            (word.epoch() == epoch && !word.gone())
                .then(|| word.with_tokens((word.tokens() + tokens).min(depth.max(word.tokens()))))
        });
    }

    /// Applies `change` to the word until it sticks or `change` declines; returns the word before.
    pub(super) fn update(
        &self,
        mut change: impl FnMut(Word) -> Option<Word>,
    ) -> Result<Word, Word> {
        self.word()
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| {
                change(Word(word)).map(|changed| changed.0)
            })
            .map(Word)
            .map_err(Word)
    }

    /// What a decision would find, spending nothing: tokens, credit, and whether it would be sure.
    pub(crate) fn peek(&self, now: Timestamp, unit: i64) -> (u32, u32, bool) {
        let mut word = self.load();
        let live = now.as_micros() < self.ends_us();
        if live && self.mint(word, now, 0, unit) {
            word = self.load();
        }
        (if live { word.tokens() } else { 0 }, self.credit(word, now), !word.policy())
    }

    pub(super) fn ends_us(&self) -> u64 {
        Ends(self.ends().load(Ordering::Acquire)).micros()
    }

    /// What the store said last.
    #[inline(always)]
    pub(crate) fn view(&self) -> View {
        let tokens = Moment(self.seen().load(Ordering::Relaxed)).tokens();
        self.view_of(RoughTokens::of_bits(tokens))
    }

    /// What flows in: a hint, for reports.
    #[inline(always)]
    pub(crate) fn refill(&self) -> Refill {
        let minted_us = self.minted_us().load(Ordering::Relaxed);
        let rate = Flow(self.flow().load(Ordering::Relaxed)).rate();
        let ends_ms = Ends(self.ends().load(Ordering::Relaxed)).millis();
        Refill::new(rate, minted_us, ends_ms)
    }

    fn rate(&self) -> u64 {
        Flow(self.flow().load(Ordering::Relaxed)).rate()
    }
}

/// A stretch of time, and the tokens that flow in meanwhile.
#[derive(Clone, Copy, Debug)]
struct Inflow {
    from_us: u64,
    until_us: u64,
    tokens: u32,
}

#[cfg(test)]
mod tests;
