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
//! with a compare-and-swap, and then adds the tokens to the word. Between the two it may be
//! interrupted for as long as it likes: the tokens are late, never doubled. When the engine changes
//! the lease in between, the word's epoch differs and the tokens are dropped, never added to a
//! lease that did not earn them.
//!
//! # Orderings
//!
//! The engine closes `minted_us`, then writes rate, depth and end, then moves the word to the next
//! epoch, then opens `minted_us`, each store with `Release`. A thread that reads a new rate with
//! `Acquire` therefore also sees `minted_us` closed or opened anew, and its claim under the old
//! value fails; a thread that reads the new word sees the new end. Counters for demand and metrics
//! publish nothing and are `Relaxed`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::word::{FIELD_MAX, Word};
use crate::time::{CLOCK_AGE_MAX_US, Now, Timestamp};

/// The bucket stands in the dirty queue (or the queue was full).
const QUEUED: u8 = 1;
/// The engine was told that the bucket runs low.
const URGENT: u8 = 2;

const NO_SLOT: u32 = u32::MAX;

/// A lease as the bucket applies it: until `ends`, `rate` units per microsecond flow in, up to
/// `depth` whole tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub rate: i64,
    pub depth: u32,
    pub ends: Timestamp,
    /// Tell the engine when fewer tokens than this are left.
    pub low: u32,
    /// How long before it is whole a token may be spent by who takes unsure answers.
    pub ahead_us: u64,
    /// The tokens come from an outage policy.
    pub policy: bool,
}

impl Terms {
    /// No lease: nothing flows in, nothing may be held.
    pub(crate) const NONE: Self =
        Self { rate: 0, depth: 0, ends: Timestamp::ZERO, low: 0, ahead_us: 0, policy: false };
}

/// What the engine is told after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Nothing new.
    None,
    /// Something is pending that was not before: report it at the next tick.
    Dirty,
    /// The key runs low or was denied: sync early.
    Urgent,
}

/// What [`Bucket::take`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub allowed: bool,
    pub sure: bool,
    /// Tokens left in the word.
    pub left: u32,
    pub touch: Touch,
}

impl Taken {
    const DENIED: Self = Self { allowed: false, sure: false, left: 0, touch: Touch::None };
}

/// What [`Bucket::collect`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    /// Tokens spent since the last collection, from tokens and from credit.
    pub spent: u64,
    /// Tokens asked for and denied since.
    pub denied: u64,
    /// The largest cost denied since.
    pub denied_cost: u32,
    /// Credit left in the word.
    pub credit: u32,
    /// Decisions since, for the metrics.
    pub allowed_decisions: u64,
    pub denied_decisions: u64,
    pub unsure_decisions: u64,
}

/// What [`Bucket::amend`] left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amended {
    /// Units that make no whole token and no whole microsecond of the new rate: the engine keeps
    /// them until the next change. Less than none if tokens were minted ahead.
    pub rest: i64,
    /// All that the bucket holds, `rest` included, in units.
    pub units: i64,
    /// Tokens spent and not collected at that moment.
    pub pending: u64,
}

/// A key's state on this node.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// Publishes the lease's end along with itself.
    word: AtomicU64,
    /// The end of the lease; tokens are void from then on.
    ends_us: AtomicU64,
    /// Refill up to here has been turned into tokens; publishes rate and depth. Closed: `u64::MAX`.
    minted_us: AtomicU64,
    /// Units per microsecond.
    rate: AtomicU64,
    depth: AtomicU32,
    low: AtomicU32,
    ahead_us: AtomicU64,
    /// Credit may be used from then on.
    credit_from_us: AtomicU64,
    flags: AtomicU8,
    /// Pending tokens that no longer fitted the word.
    spilled: AtomicU64,
    /// Tokens denied since the last collection.
    denied: AtomicU64,
    /// The largest cost denied since the last collection.
    denied_cost: AtomicU32,
    denied_decisions: AtomicU32,
    unsure_decisions: AtomicU32,
    /// Tokens spent since the last collection by costs above 1, less the number of such decisions.
    surplus: AtomicU64,
    /// The store's level at the last reply, in tokens, and when that came (0: never).
    view_tokens: AtomicI64,
    view_us: AtomicU64,
    /// From then on the store's bucket is full if nobody else spends; never while it is tracked.
    full_us: AtomicU64,
    /// The engine's own note; nobody else reads it.
    slot: AtomicU32,
    pub(crate) limit: u32,
    pub(crate) lane: u32,
    pub(crate) key: Arc<[u8]>,
}

impl Bucket {
    /// A bucket that holds no lease and has `credit`.
    pub(crate) fn new(limit: u32, lane: u32, key: &[u8], credit: u32) -> Self {
        Self {
            word: AtomicU64::new(Word::new(0, credit).0),
            ends_us: AtomicU64::new(0),
            minted_us: AtomicU64::new(u64::MAX),
            rate: AtomicU64::new(0),
            depth: AtomicU32::new(0),
            low: AtomicU32::new(0),
            ahead_us: AtomicU64::new(0),
            credit_from_us: AtomicU64::new(0),
            flags: AtomicU8::new(0),
            spilled: AtomicU64::new(0),
            denied: AtomicU64::new(0),
            denied_cost: AtomicU32::new(0),
            denied_decisions: AtomicU32::new(0),
            unsure_decisions: AtomicU32::new(0),
            surplus: AtomicU64::new(0),
            view_tokens: AtomicI64::new(0),
            view_us: AtomicU64::new(0),
            full_us: AtomicU64::new(0),
            slot: AtomicU32::new(NO_SLOT),
            limit,
            lane,
            key: key.into(),
        }
    }

    /// A full bucket that this node alone refills, for ever.
    pub(crate) fn local(limit: u32, key: &[u8], rate: i64, depth: u32, now: Timestamp) -> Self {
        let bucket = Self::new(limit, 0, key, 0);
        let ends = Timestamp::NEVER;
        let terms = Terms { rate, depth, ends, low: 0, ahead_us: 0, policy: false };
        bucket.amend(now, terms, i64::from(depth), 0, 1);
        bucket
    }

    /// Decides about `cost` tokens; `unit` is the number of units in a token.
    ///
    /// Cost: two loads and one compare-and-swap when tokens are there.
    #[inline]
    pub(crate) fn take(&self, cost: u32, now: impl Now, unit: i64) -> Taken {
        self.decide(cost, now, unit, true).unwrap_or(Taken::DENIED)
    }

    /// Decides about `cost` tokens if that can be done for sure, or by an outage policy. Otherwise
    /// nothing is spent or counted, and the store is to be asked.
    #[inline]
    pub(crate) fn take_sure(&self, cost: u32, now: impl Now, unit: i64) -> Option<Taken> {
        self.decide(cost, now, unit, false)
    }

    /// Counts a request that was denied after asking the store.
    pub(crate) fn refuse(&self, cost: u32) {
        self.denied.fetch_add(u64::from(cost), Ordering::Relaxed);
        self.denied_decisions.fetch_add(1, Ordering::Relaxed);
    }

    /// `None` if the tokens are not there, it is not sure that nobody else has them, the answer may
    /// not be `unsure`, and no outage policy is in force.
    #[inline]
    fn decide(&self, cost: u32, time: impl Now, unit: i64, unsure: bool) -> Option<Taken> {
        let mut now = time.cached();
        let (mut settled, mut ahead) = (false, false);
        let mut word = Word(self.word.load(Ordering::Acquire));
        loop {
            let live = now.as_micros() < self.ends_us.load(Ordering::Relaxed);
            let tokens = if live { word.tokens() } else { 0 };
            let from_tokens = tokens.min(cost);
            let from_credit = cost - from_tokens;
            if live && !settled && self.may_overflow(word, now, unit) {
                now = time.precise();
                settled = true;
                self.mint(word, now, 0, unit);
                word = Word(self.word.load(Ordering::Acquire));
                continue;
            }
            if live && from_credit > 0 {
                let minted = self.mint(word, now, 0, unit);
                // A token ahead is for who spends it at once: others may want sure answers.
                let last = unsure && from_credit == 1;
                let ahead_us = if last { self.ahead_us.load(Ordering::Relaxed) } else { 0 };
                if minted || ahead_us > 0 && self.mint(word, now, ahead_us, unit) {
                    ahead |= !minted;
                    word = Word(self.word.load(Ordering::Acquire));
                    continue;
                }
            }
            if from_credit > 0 && !unsure && !word.policy() {
                return self.is_leased(live).then(|| self.deny(cost, word, tokens, live));
            }
            if from_credit > 0 && from_credit > self.credit(word, now) {
                return Some(self.deny(cost, word, tokens, live));
            }
            let Some(spent) = word.spend(from_tokens, from_credit) else {
                word = self.spill(word);
                continue;
            };
            match self.word.compare_exchange_weak(
                word.0,
                spent.0,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let sure = from_credit == 0 && !ahead && !word.policy();
                    let urgent = from_credit > 0;
                    return Some(self.admitted(cost, word, tokens - from_tokens, sure, urgent));
                }
                Err(seen) => word = Word(seen),
            }
        }
    }

    #[inline]
    fn admitted(&self, cost: u32, before: Word, left: u32, sure: bool, urgent: bool) -> Taken {
        if cost > 1 {
            self.surplus.fetch_add(u64::from(cost - 1), Ordering::Relaxed);
        }
        if !sure {
            self.unsure_decisions.fetch_add(1, Ordering::Relaxed);
        }
        let touch = if urgent || left < self.low.load(Ordering::Relaxed) {
            self.raise(QUEUED | URGENT)
        } else if before.pending() == 0 {
            self.raise(QUEUED)
        } else {
            Touch::None
        };
        Taken { allowed: true, sure, left, touch }
    }

    #[cold]
    fn deny(&self, cost: u32, word: Word, tokens: u32, live: bool) -> Taken {
        self.denied.fetch_add(u64::from(cost), Ordering::Relaxed);
        if cost > 1 {
            self.denied_cost.fetch_max(cost, Ordering::Relaxed);
        }
        self.denied_decisions.fetch_add(1, Ordering::Relaxed);
        // Without a lease the store may have more than this node knows of.
        let sure = self.is_leased(live) && !word.policy();
        if !sure {
            self.unsure_decisions.fetch_add(1, Ordering::Relaxed);
        }
        Taken { allowed: false, sure, left: tokens, touch: self.raise(QUEUED | URGENT) }
    }

    /// The credit that may be used now.
    fn credit(&self, word: Word, now: Timestamp) -> u32 {
        let from_us = self.credit_from_us.load(Ordering::Relaxed);
        if now.as_micros() >= from_us { word.credit() } else { 0 }
    }

    /// Whether refill is leased: then the node knows all that it can have.
    fn is_leased(&self, live: bool) -> bool {
        live && self.rate.load(Ordering::Relaxed) > 0
    }

    /// Raises flags and says what of it is news.
    #[inline]
    fn raise(&self, flags: u8) -> Touch {
        if self.flags.load(Ordering::Relaxed) & flags == flags {
            return Touch::None;
        }
        let before = self.flags.fetch_or(flags, Ordering::AcqRel);
        if before & flags == flags {
            Touch::None
        } else if flags & URGENT != 0 {
            Touch::Urgent
        } else {
            Touch::Dirty
        }
    }

    /// Whether refill may have run into the depth by now, if `now` is the cached time: what flowed
    /// in since is lost, and must be before tokens are spent, or it would be earned again
    /// afterwards.
    #[inline]
    fn may_overflow(&self, word: Word, now: Timestamp, unit: i64) -> bool {
        let rate = self.rate.load(Ordering::Acquire);
        if rate == 0 {
            return false;
        }
        let until_us = now.as_micros() + CLOCK_AGE_MAX_US;
        let elapsed_us = until_us.saturating_sub(self.minted_us.load(Ordering::Acquire));
        let room = u64::from(self.depth.load(Ordering::Relaxed).saturating_sub(word.tokens()));
        elapsed_us > 0 && rate.saturating_mul(elapsed_us) >= room.saturating_mul(unit as u64)
    }

    /// Turns earned time into tokens, and time up to `ahead_us` from now that is still to be earned.
    /// Returns whether the word is worth another look.
    fn mint(&self, seen: Word, now: Timestamp, ahead_us: u64, unit: i64) -> bool {
        let minted = self.minted_us.load(Ordering::Acquire);
        let rate = self.rate.load(Ordering::Acquire);
        let now_us = (now.as_micros() + ahead_us).min(self.ends_us.load(Ordering::Relaxed));
        if minted >= now_us || rate == 0 {
            return false;
        }
        let unit = unit as u64;
        let whole = rate.saturating_mul(now_us - minted) / unit;
        let room = u64::from(self.depth.load(Ordering::Acquire).saturating_sub(seen.tokens()));
        let full = whole >= room;
        if whole == 0 && !full {
            return false;
        }
        let tokens = whole.min(room);
        let earned_us = minted.saturating_add((tokens.saturating_mul(unit)).div_ceil(rate));
        // What flows into a full bucket is lost up to now; what is minted ahead is not there yet.
        let claimed = if full { earned_us.max(now.as_micros()).min(now_us) } else { earned_us };
        if claimed == minted {
            return false;
        }
        let claim =
            self.minted_us.compare_exchange(minted, claimed, Ordering::AcqRel, Ordering::Relaxed);
        if claim.is_ok() {
            self.deposit(tokens as u32, seen.epoch());
        }
        true
    }

    /// Adds minted tokens, unless the lease that earned them has changed.
    fn deposit(&self, tokens: u32, epoch: u64) {
        let depth = self.depth.load(Ordering::Relaxed).min(FIELD_MAX);
        let _ = self.update(|word| {
            (word.epoch() == epoch)
                .then(|| word.with_tokens((word.tokens() + tokens).min(depth.max(word.tokens()))))
        });
    }

    /// Moves pending tokens out of a word that can count no more of them.
    #[cold]
    fn spill(&self, word: Word) -> Word {
        let emptied = word.collected();
        match self.word.compare_exchange(word.0, emptied.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.spilled.fetch_add(u64::from(word.pending()), Ordering::AcqRel);
                emptied
            }
            Err(seen) => Word(seen),
        }
    }

    /// Applies `change` to the word until it sticks or `change` declines; returns the word before.
    fn update(&self, mut change: impl FnMut(Word) -> Option<Word>) -> Result<Word, Word> {
        self.word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                change(Word(word)).map(|changed| changed.0)
            })
            .map(Word)
            .map_err(Word)
    }

    /// What a decision would find, spending nothing: tokens, credit, and whether it would be sure.
    pub(crate) fn peek(&self, now: Timestamp, unit: i64) -> (u32, u32, bool) {
        let mut word = Word(self.word.load(Ordering::Acquire));
        let live = now.as_micros() < self.ends_us.load(Ordering::Relaxed);
        if live && self.mint(word, now, 0, unit) {
            word = Word(self.word.load(Ordering::Acquire));
        }
        (if live { word.tokens() } else { 0 }, self.credit(word, now), !word.policy())
    }

    /// The store's level at its last word, in tokens, and when that came.
    pub(crate) fn view(&self) -> Option<(i64, Timestamp)> {
        let at_us = self.view_us.load(Ordering::Relaxed);
        (at_us > 0)
            .then(|| (self.view_tokens.load(Ordering::Relaxed), Timestamp::from_micros(at_us)))
    }

    /// Units that have flowed in by `now` and are not tokens in the word yet: a hint, for reports.
    #[inline]
    pub(crate) fn earned(&self, now: Timestamp) -> u64 {
        let until_us = now.as_micros() + self.ahead_us.load(Ordering::Relaxed);
        let elapsed_us = until_us.saturating_sub(self.minted_us.load(Ordering::Relaxed));
        let live = now.as_micros() < self.ends_us.load(Ordering::Relaxed);
        if live { self.rate.load(Ordering::Relaxed).saturating_mul(elapsed_us) } else { 0 }
    }

    /// Refill in units per microsecond.
    pub(crate) fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    // ---- the engine's side -------------------------------------------------------------------

    /// Takes what is pending and sets the credit that is left to `recredit` of itself in the same
    /// step. Unless the engine is to be left alone (`muted`), the next decision tells it anew.
    pub(crate) fn collect(&self, muted: bool, recredit: impl Fn(u32) -> u32) -> Collected {
        self.flags.store(if muted { QUEUED | URGENT } else { 0 }, Ordering::Release);
        let collect = |word: Word| {
            let after = word.collected().with_credit(recredit(word.credit()));
            (after != word).then_some(after)
        };
        let (Ok(before) | Err(before)) = self.update(collect);
        let spent = u64::from(before.pending()) + self.spilled.swap(0, Ordering::AcqRel);
        let surplus = self.surplus.swap(0, Ordering::Relaxed);
        Collected {
            spent,
            denied: self.denied.swap(0, Ordering::Relaxed),
            denied_cost: self.denied_cost.swap(0, Ordering::Relaxed),
            credit: before.credit(),
            allowed_decisions: spent.saturating_sub(surplus),
            denied_decisions: u64::from(self.denied_decisions.swap(0, Ordering::Relaxed)),
            unsure_decisions: u64::from(self.unsure_decisions.swap(0, Ordering::Relaxed)),
        }
    }

    /// Tokens spent since the last collection, without collecting them.
    pub(crate) fn pending(&self) -> u64 {
        let word = Word(self.word.load(Ordering::Relaxed));
        u64::from(word.pending()) + self.spilled.load(Ordering::Relaxed)
    }

    /// Tokens held, and tokens spent since the last collection, at one moment.
    pub(crate) fn held_and_pending(&self) -> (u32, u64) {
        let word = Word(self.word.load(Ordering::Acquire));
        (word.tokens(), u64::from(word.pending()) + self.spilled.load(Ordering::Acquire))
    }

    /// Tokens spent and denied since the last collection, without collecting them.
    pub(crate) fn demand(&self) -> u64 {
        self.pending() + self.denied.load(Ordering::Relaxed)
    }

    /// The credit that a bucket without lease and books had before anything was spent on it.
    pub(crate) fn credit_at_rest(&self) -> u32 {
        let word = Word(self.word.load(Ordering::Acquire));
        word.credit() + word.pending()
    }

    /// Sets the credit of a bucket that the engine keeps no books on, unless something is pending:
    /// then it is about to.
    pub(crate) fn rest_on(&self, credit: u32) {
        let _ = self.update(|word| {
            (self.slot().is_none() && word.pending() == 0).then(|| word.with_credit(credit))
        });
    }

    /// Takes tokens away until at most `keep` are left; returns how many.
    pub(crate) fn withdraw(&self, keep: u32) -> u32 {
        let before = self.update(|word| (word.tokens() > keep).then(|| word.with_tokens(keep)));
        before.map_or(0, |word| word.tokens() - keep)
    }

    /// Lowers the depth: refill stops there.
    pub(crate) fn set_depth(&self, depth: u32) {
        self.depth.store(depth, Ordering::Release);
    }

    /// Where the engine keeps its books on this key.
    pub(crate) fn slot(&self) -> Option<usize> {
        let slot = self.slot.load(Ordering::Relaxed);
        (slot != NO_SLOT).then_some(slot as usize)
    }

    /// Notes where the engine keeps its books on this key.
    pub(crate) fn set_slot(&self, slot: Option<usize>) {
        self.slot.store(slot.map_or(NO_SLOT, |slot| slot as u32), Ordering::Relaxed);
    }

    /// Changes the lease at `now`: settles what the old one earned, applies `terms`, and adds
    /// `tokens` and `fraction` units.
    pub(crate) fn amend(
        &self,
        now: Timestamp,
        terms: Terms,
        tokens: i64,
        fraction: i64,
        unit: i64,
    ) -> Amended {
        // What has overflowed is lost before the refill is closed and anything more is spent.
        self.peek(now, unit);
        let earned = self.settle(now);
        self.rate.store(terms.rate as u64, Ordering::Release);
        let old_depth = self.depth.swap(terms.depth, Ordering::AcqRel);
        self.low.store(terms.low, Ordering::Relaxed);
        self.ahead_us.store(terms.ahead_us, Ordering::Relaxed);
        let old_ends = self.ends_us.swap(terms.ends.as_micros(), Ordering::AcqRel);
        let given = i128::from(tokens) * i128::from(unit) + i128::from(fraction);
        let mut amended = Amended::default();
        let _ = self.update(|word| {
            let held = if now.as_micros() < old_ends { word.tokens() } else { 0 };
            // What flowed in beyond the old depth was lost then.
            let room = i128::from(old_depth.saturating_sub(held)) * i128::from(unit);
            let units = given + earned.min(room);
            let whole = (units / i128::from(unit)).clamp(0, i128::from(FIELD_MAX));
            let level = (u64::from(held) + whole as u64).min(u64::from(FIELD_MAX)) as u32;
            let full = level >= terms.depth;
            let rest = (units - whole * i128::from(unit)) as i64;
            let rest = if full { rest.min(0) } else { rest };
            let level = level.min(terms.depth);
            let units = i64::from(level).saturating_mul(unit).saturating_add(rest);
            amended = Amended { rest, units, pending: u64::from(word.pending()) };
            Some(word.next_epoch().with_tokens(level).with_policy(terms.policy))
        });
        let mut minted_us = now.as_micros();
        if terms.rate > 0 {
            let micros = amended.rest.div_euclid(terms.rate);
            minted_us = minted_us.saturating_add_signed(-micros);
            amended.rest = amended.rest.rem_euclid(terms.rate);
        }
        self.minted_us.store(minted_us, Ordering::Release);
        amended.pending += self.spilled.load(Ordering::Acquire);
        amended
    }

    /// Closes the refill. Returns the units it has earned and not yet turned into tokens: less than
    /// none if tokens were minted ahead, or by a decision whose clock was ahead of `now`.
    fn settle(&self, now: Timestamp) -> i128 {
        let minted_us = self.minted_us.swap(u64::MAX, Ordering::AcqRel);
        let ended = now.as_micros() >= self.ends_us.load(Ordering::Relaxed);
        if minted_us == u64::MAX || ended {
            return 0;
        }
        let rate = self.rate.load(Ordering::Relaxed);
        i128::from(rate) * (i128::from(now.as_micros()) - i128::from(minted_us))
    }

    /// Credit may be used from `at` on.
    pub(crate) fn set_credit_from(&self, at: Timestamp) {
        self.credit_from_us.store(at.as_micros(), Ordering::Relaxed);
    }

    /// Notes what the store said last.
    pub(crate) fn set_view(&self, tokens: i64, at: Timestamp) {
        self.view_tokens.store(tokens, Ordering::Relaxed);
        self.view_us.store(at.as_micros().max(1), Ordering::Relaxed);
    }

    /// Notes when the key will be full if left alone; until then it may not be evicted.
    pub(crate) fn set_full_at(&self, at: Timestamp) {
        self.full_us.store(at.as_micros(), Ordering::Release);
    }

    /// Whether forgetting the bucket gives nothing back to its key: it is full, has its whole
    /// credit, and nothing is pending.
    pub(crate) fn is_idle_and_full(
        &self,
        now: Timestamp,
        unit: i64,
        credit: u32,
        local: bool,
    ) -> bool {
        let full_at = self.full_us.load(Ordering::Acquire);
        let (tokens, credit_left, _) = self.peek(now, unit);
        let word = Word(self.word.load(Ordering::Acquire));
        let quiet = word.pending() == 0 && self.flags.load(Ordering::Acquire) == 0;
        let full = if local {
            tokens == self.depth.load(Ordering::Relaxed)
        } else {
            full_at <= now.as_micros() && tokens == 0 && credit_left == credit
        };
        quiet && full
    }

    /// Whether the bucket has run low since it was last collected.
    pub(crate) fn is_urgent(&self) -> bool {
        self.flags.load(Ordering::Acquire) & URGENT != 0
    }

    /// Whether a decision has touched the bucket since it was last collected.
    pub(crate) fn is_touched(&self) -> bool {
        self.flags.load(Ordering::Acquire) & QUEUED != 0
    }
}

#[cfg(test)]
mod tests;
