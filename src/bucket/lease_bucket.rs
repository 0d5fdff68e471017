//! The bucket of a hybrid limit: what this node may spend of a key without asking the store.
//!
//! Any number of threads decide: [`spend`](LeaseBucket::spend), [`deny`](LeaseBucket::deny) and
//! [`decide`](LeaseBucket::decide). One engine collects what they spent and changes the lease (`engine_side`).
//!
//! # Argument
//!
//! Every change of tokens, credit and pending is one compare-and-swap of the word, so a token is spent once or
//! not at all.
//!
//! Refill needs more than the word. A thread that runs out of tokens computes what the lease's rate has earned
//! since `minted_us`, claims that time by a compare-and-swap of `minted_us`, and then adds the tokens to the word.
//! It can be suspended between the two: then the tokens are late, but never doubled. If the lease changes
//! meanwhile, the word's epoch differs and the tokens are dropped.
//!
//! A bucket that is full loses what flows in. That loss has to be settled before tokens are spent, or the same
//! time would earn tokens again afterwards. The engine computes until when that cannot happen even if nothing is
//! spent, and until when the lease lives: before `fast_until_us`, the word alone decides. After it a decision computes
//! whether refill can have filled what the bucket holds now.
//!
//! The epoch also changes when the bucket is given to another key. The table compares the key after it has loaded
//! the word. As long as the epoch is the same, so is the key, and no further comparison is needed. A decision that
//! finds another epoch changes nothing, and its caller looks the key up again. A denial changes no word: it is counted
//! after the epoch was found unchanged. A thread that is suspended between the two can count a denial for the next
//! key, which makes that key's demand look larger, and spends nothing.
//!
//! # Orderings
//!
//! To change a lease, the engine
//!
//! 1. clears `fast_until_us` and closes `minted_us`,
//! 2. takes the tokens out of the word, in a new epoch, if the old lease has ended,
//! 3. writes rate, depth, overdraw, end and low mark,
//! 4. writes the new tokens into the word, in a new epoch,
//! 5. opens `minted_us` and sets `fast_until_us`,
//!
//! each with `Release`. To stop refill that ends before its tokens, it mints, closes `minted_us`, and writes rate, end and
//! `fast_until_us`, in the same epoch: a claim from before adds tokens that the lease earned until its end, and a later one
//! fails. A decision that reads the old end denies, and one that reads the new end spends tokens that are still leased.
//! No other change of the lease may come between the end of refill and this one: it would take the tokens away.
//!
//! A decision loads the word and then the rest with `Acquire`, and swaps the word with
//! `Release`. Whatever it loads in between:
//!
//! - A word from before step 4 cannot be swapped after it. So a decision that reads an end or a `fast_until_us` of the
//!   new lease beside an older word fails. In step 2 the word of a lease that has ended changes before the new end
//!   can be read.
//! - A claim of refill that mixes numbers of two leases was computed after step 1. It fails if `minted_us` is still
//!   closed. If `minted_us` is open again, step 4 is done, and the tokens are dropped because the epoch differs. If it
//!   shows the same time as before, the claim succeeds: then the new lease loses what flowed in meanwhile.
//!
//! A decision that spends where nothing is pending changes the word and then sets the engine's flags. A collection
//! clears the flags and then reads the word. Both change the flags, so one of them comes first, and the other one
//! (`AcqRel`) sees what it wrote before: either the decision finds the flags cleared and notifies, or the collection
//! finds what was spent. A load of the flags would not do: it could be from before the collection.
//!
//! Counters for demand and metrics publish nothing, and are `Relaxed`. A denial that is counted while the engine
//! collects can wait for the next one to be noticed.

use std::time::Duration;

use super::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use super::new_key::NewKey;
use super::notifications::{News, Urgency};
use super::spend_result::{Ask, SpendResult, Verdict};
use super::stored_key::{SHORT_WORDS, StoredKey};
use super::table::{Evictable, TableBucket};
use super::token_word::{MAX_PENDING, TokenWord};
use crate::decision::{Refill, View};
use crate::quota::Scale;
use crate::time::{Now, Timestamp};

mod engine_side;
mod plan;
mod put_back;
mod refill;

pub(crate) use engine_side::{Collected, Lease};
pub(crate) use refill::{OUTLIVES_REFILL, UNLIMITED_RATE};

/// Denied tokens are counted up to about this number between two collections.
const MAX_DENIED: u32 = 1 << 31;
/// In place of when a key is full that was evicted before it was, and returned.
const MARKED: u64 = u64::MAX;
/// The most spills under way. They are more tokens than can be spent before the engine runs; beyond them the bucket
/// denies.
const MAX_SPILLS: u16 = 2048;
/// A caller that can wait asks the store for more than its lease has, if the store's last word was this many times the
/// cost. If it asked for less, it would join batches that have nothing to give.
const ASK_TIMES: i64 = 8;

/// A key's state on this node, in two cache lines. An allowed decision changes only the first.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct LeaseBucket {
    /// A [`TokenWord`]. Publishes everything that belongs to its epoch.
    word: AtomicU64,
    /// Until then the lease lives, and refill alone cannot fill the bucket. Written by the engine.
    fast_until_us: AtomicU64,
    /// The engine is notified when fewer tokens are left. Written by the engine.
    low: AtomicU32,
    key_bytes: AtomicU16,
    /// Spills of the word whose notifications are under way.
    spills_under_way: AtomicU16,
    key: [AtomicU64; SHORT_WORDS],
    /// What the store had at its last word, in tokens. Written by the engine.
    view_tokens: AtomicI32,
    /// When that word came, in milliseconds that wrap; 0 for never. Written by the engine.
    view_ms: AtomicU32,

    /// Until then tokens may be spent: the end of the lease, or of refill that ends before it, until the engine has
    /// stopped that. Written by the engine.
    ends_us: AtomicU64,
    /// Refill up to then has become tokens; [`u64::MAX`] while nothing flows in. Publishes rate and depth.
    minted_us: AtomicU64,
    /// Units of refill in a microsecond. Written by the engine.
    rate: AtomicU64,
    /// The most tokens that refill fills. Written by the engine.
    depth: AtomicU32,
    /// Units of a token that may be spent before they have flowed in, in 64ths, and [`OUTLIVES_REFILL`](refill). Written by
    /// the engine.
    overdraw: AtomicU8,
    /// Whether the engine closed its account of the key after more than one request. It is kept longer.
    is_seen_often: AtomicU8,
    /// For so many milliseconds after the store's last word the node knows that the store has nothing. Written by the
    /// engine.
    empty_for_ms: AtomicU16,
    /// From then on credit may be used. Written by the engine.
    credit_from_us: AtomicU64,
    /// When the key's bucket in the store is full if nobody spends, once the engine has closed its account. [`MARKED`] if
    /// nobody knows.
    full_at_us: AtomicU64,
    /// The engine's [flags](engine_side) and the number of its account.
    engine: AtomicU32,
    /// Tokens denied since the last collection.
    denied: AtomicU32,
    /// Tokens spent since the last collection by costs above 1, less the number of such decisions.
    surplus: AtomicU32,
    /// The plan that a caller has named last: see [`NewKey::plan`]. The engine asks the store for it.
    plan: AtomicU32,
}

#[cfg(not(tidegate_models))]
const _: () = assert!(size_of::<LeaseBucket>() == 128);

impl LeaseBucket {
    // ---- decisions ---------------------------------------------------------------------------

    /// Spends or denies `cost` tokens, if one look at the bucket tells. `None` if nothing was changed.
    ///
    /// What is leased can be spent under any plan: the first request after each report, which does not come this way, looks
    /// whether it is another one.
    #[inline(always)]
    pub(crate) fn decide_fast(
        &self,
        word: TokenWord,
        (cost, plan): (u32, u32),
        now: Timestamp,
        unit: impl Fn() -> i64,
    ) -> Option<SpendResult> {
        // Loaded before the swap, which would make these loads wait.
        let view_and_refill = self.view_and_refill();
        if let Some(left) = self.spend(word, cost, now, &unit) {
            return Some(SpendResult::new(Verdict::Allowed, true, left, view_and_refill));
        }
        if cost == 1 && self.is_under(plan) { self.deny(word, now, unit()) } else { None }
    }

    /// Spends `cost` tokens of a lease if the engine need not be notified, and refill cannot have filled the bucket. Returns the
    /// tokens that are left; `None` if nothing was spent.
    ///
    /// `unit` tells the units in a token, if they matter.
    ///
    /// Cost: two loads, and one compare-and-swap. After `fast_until_us`, five loads more.
    #[inline(always)]
    pub(crate) fn spend(
        &self,
        word: TokenWord,
        cost: u32,
        now: Timestamp,
        unit: impl FnOnce() -> i64,
    ) -> Option<u32> {
        let is_fast = now.as_micros() < self.fast_until_us.load(Ordering::Acquire);
        if !is_fast && !self.is_below_depth(word, now, unit()) {
            return None;
        }
        let spent = word.spend_unnoticed(cost, self.low.load(Ordering::Relaxed))?;
        self.swap(word, spent).ok()?;
        self.count_spent(cost);
        Some(word.tokens() - cost)
    }

    /// Whether the lease lives, and refill cannot have filled the bucket by now. Cold, so that callers keep their values in
    /// registers where it is not called.
    #[cold]
    #[inline(never)]
    fn is_below_depth(&self, word: TokenWord, now: Timestamp, unit: i64) -> bool {
        self.is_live(now) && !self.may_be_full(word, now, unit)
    }

    /// Denies one token if refill is leased and has not earned a token, and the engine has been notified of denials.
    /// `None` if that is not sure, and then nothing is changed.
    ///
    /// Cost: 12 loads, five of them for view and refill, and one atomic addition.
    #[inline(always)]
    pub(crate) fn deny(&self, word: TokenWord, now: Timestamp, unit: i64) -> Option<SpendResult> {
        if !word.is_empty() || !self.is_live(now) || !self.lacks_one(now, unit) {
            return None;
        }
        if !self.is_notified() || self.denied.load(Ordering::Relaxed) >= MAX_DENIED {
            return None;
        }
        // The key was compared before this load.
        fence(Ordering::Acquire);
        self.load_in(word.epoch())?;
        self.denied.fetch_add(1, Ordering::Relaxed);
        Some(self.result(Verdict::Denied, true, 0))
    }

    /// Decides in all cases. `None`, and nothing is changed, if the lease or the key has changed since the word was
    /// `seen`: look the key up again.
    pub(super) fn decide(&self, seen: TokenWord, ask: Ask, time: impl Now) -> Option<SpendResult> {
        let Ask { cost, can_wait, .. } = ask;
        let (mut now, unit) = (time.cached(), ask.scale.token);
        self.renew_first_credit(seen, ask.first_credit, now);
        let (mut has_minted, mut is_overdrawn) = (false, false);
        loop {
            let word = self.load_in(seen.epoch())?;
            let is_live = self.is_live(now);
            if is_live && !has_minted && self.may_be_full(word, now, unit) {
                now = time.precise();
                has_minted = true;
                self.mint(word, now, 0, unit);
                continue;
            }
            let tokens = if is_live { word.tokens() } else { 0 };
            let lacking = cost.saturating_sub(tokens);
            if lacking > 0 && is_live {
                let may_overdraw = lacking == 1 && !can_wait;
                let overdraw_us = if may_overdraw { self.overdraw_us(unit) } else { 0 };
                if self.mint(word, now, 0, unit) {
                    continue;
                }
                if overdraw_us > 0 && self.mint(word, now, overdraw_us, unit) {
                    is_overdrawn = true;
                    continue;
                }
            }
            let asks = lacking > 0 && can_wait && !word.is_policy();
            if asks && !self.knows_all(is_live, cost, now) {
                return Some(self.result(Verdict::Unsure, false, tokens));
            }
            if asks || lacking > self.usable_credit(word, now) {
                fence(Ordering::Acquire);
                self.load_in(seen.epoch())?;
                // Where nothing flows in, the store may have more than this node knows of.
                let is_sure = asks || self.has_refill(is_live) && !word.is_policy();
                return Some(self.count_denied(cost, tokens, is_sure));
            }
            if let Some(result) = self.try_spend(word, cost, tokens, is_live, is_overdrawn) {
                return Some(result);
            }
        }
    }

    /// Spends tokens and the lacking credit by one swap. `None` if another thread was faster.
    fn try_spend(
        &self,
        word: TokenWord,
        cost: u32,
        tokens: u32,
        is_live: bool,
        is_overdrawn: bool,
    ) -> Option<SpendResult> {
        let from_tokens = tokens.min(cost);
        let from_credit = cost - from_tokens;
        // Pending tokens that no longer fit go to the engine in a notification. Until it has arrived, the bucket
        // is not given to another key.
        let does_spill = word.pending() + cost > MAX_PENDING;
        if does_spill && !self.try_begin_spill() {
            let is_sure = self.has_refill(is_live) && !word.is_policy();
            return Some(self.count_denied(cost, tokens, is_sure));
        }
        let spent = if does_spill {
            let credit = word.credit() - from_credit;
            word.collected().with_tokens(word.tokens() - from_tokens).with_credit(credit)
        } else {
            word.spend(from_tokens, from_credit)
        };
        if self.swap(word, spent).is_err() {
            if does_spill {
                self.end_spill();
            }
            return None;
        }
        let left = tokens - from_tokens;
        let runs_low = from_credit > 0 || left < self.low.load(Ordering::Relaxed);
        let urgency = match (runs_low, word.pending()) {
            (true, _) => Urgency::Now,
            (false, 0) => Urgency::Tick,
            (false, _) => Urgency::None,
        };
        self.count_spent(cost);
        let spilled = if does_spill { word.pending() + cost } else { 0 };
        let is_sure = from_credit == 0 && !is_overdrawn && !word.is_policy();
        let news = News { spilled, ..self.notify(urgency) };
        let allowed = self.result(Verdict::Allowed, is_sure, left);
        Some(SpendResult { news, ..allowed })
    }

    /// Counts a denial.
    fn count_denied(&self, cost: u32, left: u32, is_sure: bool) -> SpendResult {
        // The sum must not wrap: beyond the maximum the limit counts the request.
        let is_uncounted = self.denied.load(Ordering::Relaxed) >= MAX_DENIED;
        let counted = if is_uncounted { 0 } else { cost };
        let before = self.denied.fetch_add(counted, Ordering::Relaxed);
        // The engine learns of a cost if it is more than all that was denied before: a few times between collections.
        let refused = if cost > 1 && before < cost { cost } else { 0 };
        let news = News { refused, ..self.notify(Urgency::Now) };
        let denied = self.result(Verdict::Denied, is_sure, left);
        SpendResult { is_uncounted, news, ..denied }
    }

    #[inline(always)]
    fn is_live(&self, now: Timestamp) -> bool {
        now.as_micros() < self.ends_us.load(Ordering::Acquire)
    }

    /// Gives first credit to a key that is full as far as this node knows: the engine has no account of it, nothing
    /// is pending, and its time to fill is over. The engine changes the epoch when it opens an account.
    fn renew_first_credit(&self, seen: TokenWord, credit: u32, now: Timestamp) {
        if !self.is_full_at_rest(now) {
            return;
        }
        self.update(|word| {
            let is_at_rest = word.epoch() == seen.epoch() && self.is_full_at_rest(now);
            let is_renewed = is_at_rest && word.pending() == 0 && !word.is_retired();
            if is_renewed { word.with_credit(credit) } else { word }
        });
    }

    /// The credit that may be used now.
    fn usable_credit(&self, word: TokenWord, now: Timestamp) -> u32 {
        let is_usable = now.as_micros() >= self.credit_from_us.load(Ordering::Relaxed);
        if is_usable { word.credit() } else { 0 }
    }

    /// Whether the node knows that the store has nothing for a request of this cost.
    fn knows_all(&self, is_live: bool, cost: u32, now: Timestamp) -> bool {
        let (view, _) = self.view_and_refill();
        let empty_for = Duration::from_millis(self.empty_for_ms.load(Ordering::Relaxed).into());
        let is_known = self.has_refill(is_live) || view.age(now).is_some_and(|age| age < empty_for);
        is_known && view.tokens() < ASK_TIMES * i64::from(cost)
    }

    /// Whether refill is leased. Then the node knows all that it can have.
    fn has_refill(&self, is_live: bool) -> bool {
        is_live && self.rate.load(Ordering::Relaxed) > 0
    }

    // ---- the word ----------------------------------------------------------------------------

    #[inline(always)]
    fn load(&self) -> TokenWord {
        TokenWord(self.word.load(Ordering::Acquire))
    }

    /// The word, if neither lease nor key has changed since it was of this epoch.
    #[inline(always)]
    pub(crate) fn load_in(&self, epoch: u64) -> Option<TokenWord> {
        Some(self.load()).filter(|word| word.epoch() == epoch && !word.is_retired())
    }

    #[inline(always)]
    fn swap(&self, from: TokenWord, to: TokenWord) -> Result<(), u64> {
        self.word
            .compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }

    /// Applies `change` until no other thread is faster. Returns the word before.
    fn update(&self, mut change: impl FnMut(TokenWord) -> TokenWord) -> TokenWord {
        loop {
            let word = self.load();
            let changed = change(word);
            if changed == word || self.swap(word, changed).is_ok() {
                return word;
            }
        }
    }

    /// Counts what a request cost beyond one token.
    #[inline(always)]
    fn count_spent(&self, cost: u32) {
        if cost > 1 {
            self.surplus.fetch_add(cost - 1, Ordering::Relaxed);
        }
    }

    // ---- spills of the word ------------------------------------------------------------------

    /// Announces that pending tokens go to the engine in a notification. False if too many are under way.
    fn try_begin_spill(&self) -> bool {
        let more = |spills| (spills < MAX_SPILLS).then(|| spills + 1);
        self.spills_under_way.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// The notification of a spill has arrived, or was not sent.
    pub(crate) fn end_spill(&self) {
        self.spills_under_way.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether pending tokens may be under way to the engine.
    pub(crate) fn has_spilled(&self) -> bool {
        self.spills_under_way.load(Ordering::Acquire) > 0
    }

    // ---- for reports -------------------------------------------------------------------------

    /// What a request of one token would be told, spending nothing. `None` if lease or key has changed since the word
    /// was `seen`.
    fn read(&self, seen: TokenWord, now: Timestamp, unit: i64) -> Option<SpendResult> {
        let left = self.mint_tokens(now, unit);
        let word = self.load_in(seen.epoch())?;
        let verdict = Verdict::of(left + self.usable_credit(word, now) > 0);
        let is_sure = (left > 0 || self.has_refill(self.is_live(now))) && !word.is_policy();
        Some(self.result(verdict, is_sure, left))
    }

    /// Turns what has flowed in into tokens. Returns those that a decision would find at `now`.
    pub(crate) fn mint_tokens(&self, now: Timestamp, unit: i64) -> u32 {
        let word = self.load();
        if !self.is_live(now) {
            return 0;
        }
        if self.mint(word, now, 0, unit) { self.load().tokens() } else { word.tokens() }
    }

    #[inline(always)]
    pub(crate) fn result(&self, verdict: Verdict, is_sure: bool, left: u32) -> SpendResult {
        SpendResult::new(verdict, is_sure, left, self.view_and_refill())
    }

    /// What the store had at its last word, in tokens: a hint.
    pub(crate) fn view_tokens(&self) -> i64 {
        self.view_tokens.load(Ordering::Relaxed).into()
    }

    /// The store's last word, and what flows in: a hint. Models do without: they would try all values of it.
    #[inline(always)]
    pub(crate) fn view_and_refill(&self) -> (View, Refill) {
        if cfg!(tidegate_models) {
            return (View::NONE, Refill::new(0, u64::MAX, 0));
        }
        let view = View::new(self.view_tokens(), self.view_ms.load(Ordering::Relaxed));
        let rate = self.rate.load(Ordering::Relaxed);
        let minted_us = self.minted_us.load(Ordering::Relaxed);
        (view, Refill::new(rate, minted_us, self.ends_us.load(Ordering::Relaxed)))
    }
}

impl TableBucket for LeaseBucket {
    type Word = TokenWord;
    type Ask = Ask;
    type Answer = SpendResult;
    type Rule = Scale;
    const HAS_MARKS: bool = true;

    #[inline(always)]
    fn load(&self) -> TokenWord {
        LeaseBucket::load(self)
    }

    #[inline(always)]
    fn is_retired(word: TokenWord) -> bool {
        word.is_retired()
    }

    #[inline(always)]
    fn key(&self) -> StoredKey<'_> {
        StoredKey { bytes: &self.key_bytes, words: &self.key }
    }

    /// Everything is written before the word, which publishes it. Spills stay: a decision that announced one,
    /// and found that its key was evicted, takes it back.
    fn start(&self, new: NewKey, is_marked: bool) {
        let (credit, full_at_us) = if is_marked { (0, MARKED) } else { (new.first_credit, 0) };
        self.plan.store(new.plan, Ordering::Release);
        self.fast_until_us.store(0, Ordering::Release);
        self.ends_us.store(0, Ordering::Release);
        self.minted_us.store(u64::MAX, Ordering::Release);
        self.rate.store(0, Ordering::Release);
        self.credit_from_us.store(0, Ordering::Release);
        self.full_at_us.store(full_at_us, Ordering::Release);
        self.low.store(0, Ordering::Release);
        self.depth.store(0, Ordering::Release);
        self.overdraw.store(0, Ordering::Release);
        self.view_tokens.store(0, Ordering::Release);
        self.view_ms.store(0, Ordering::Release);
        self.empty_for_ms.store(0, Ordering::Release);
        self.denied.store(0, Ordering::Release);
        self.surplus.store(0, Ordering::Release);
        self.is_seen_often.store(0, Ordering::Release);
        self.engine.store(engine_side::NO_ACCOUNT, Ordering::Release);
        let word = TokenWord(self.word.load(Ordering::Relaxed)).reset(credit);
        self.word.store(word.0, Ordering::Release);
    }

    fn try_decide(&self, seen: TokenWord, ask: Ask, time: impl Now) -> Option<SpendResult> {
        let (now, unit) = (time.cached(), ask.scale.token);
        if ask.cost == 0 {
            return self.read(seen, now, unit);
        }
        if !self.is_under(ask.plan) {
            return self.decide_under_plan(seen, ask, time);
        }
        let spent = self.spend(seen, ask.cost, now, || unit);
        let result = spent.map(|left| self.result(Verdict::Allowed, true, left));
        result.or_else(|| self.decide(seen, ask, time))
    }

    /// Retires a key that has nothing pending, and no account in the engine: the store knows all of it.
    fn try_retire(&self, now: Timestamp, scale: &Scale, what: Evictable) -> Option<Timestamp> {
        let word = self.load();
        let is_at_rest = self.is_unnoticed() && !self.has_spilled() && !word.is_retired();
        let full_at_us = self.full_at_us.load(Ordering::Acquire);
        let is_evictable = match what {
            _ if full_at_us <= now.as_micros() => true,
            Evictable::Full => false,
            Evictable::SeenOnce => self.is_seen_often.load(Ordering::Relaxed) == 0,
            Evictable::Reported => true,
        };
        if !is_at_rest || (word.pending(), word.tokens()) != (0, 0) || !is_evictable {
            return None;
        }
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.word.compare_exchange(word.0, word.retired().0, success, failure).ok()?;
        // A marked key that nobody asked for is marked for as long again.
        let fills_at_us = now.as_micros().saturating_add(scale.fill_us());
        Some(Timestamp::from_micros(if full_at_us == MARKED { fills_at_us } else { full_at_us }))
    }
}

#[cfg(test)]
mod tests;
