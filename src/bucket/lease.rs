//! The engine's side of a bucket: what it collects, takes back and leases. [`state`](super::state) has the
//! argument and the orderings.

use std::sync::atomic::Ordering;

use super::fields::{Ends, Flow, Moment};
use super::line::{Bucket, CLOSED, Counts};
use super::outcome::{Amended, Collected, Terms};
use super::word::{FIELD_MAX, Word};
use crate::decision::RoughTokens;
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

impl Bucket {
    /// Takes what is pending and sets the credit that is left to `recredit` of itself in the same
    /// step. Unless the engine is to be left alone (`muted`), the next decision tells it anew.
    pub(crate) fn collect(&self, muted: bool, recredit: impl Fn(u32) -> u32) -> Collected {
        self.set_told(muted);
        let collect = |word: Word| {
            let credit = recredit(word.credit());
            let after = word.collected().with_credit(credit);
            (after != word).then_some(after)
        };
        let (Ok(before) | Err(before)) = self.update(collect);
        let counts = Counts(self.counts().swap(0, Ordering::Relaxed));
        Collected {
            spent: u64::from(before.pending()),
            surplus: u64::from(counts.surplus()),
            denied: u64::from(counts.denied()),
            credit: before.credit(),
        }
    }

    /// Tokens spent since the last collection, without collecting them.
    pub(crate) fn pending(&self) -> u64 {
        u64::from(Word(self.word().load(Ordering::Relaxed)).pending())
    }

    /// Tokens held, and tokens spent since the last collection, at one moment.
    pub(crate) fn held_and_pending(&self) -> (u32, u64) {
        let word = self.load();
        (word.tokens(), u64::from(word.pending()))
    }

    pub(super) fn denied(&self) -> u32 {
        Counts(self.counts().load(Ordering::Relaxed)).denied()
    }

    /// Tokens spent and denied since the last collection, without collecting them.
    pub(crate) fn demand(&self) -> u64 {
        self.pending() + u64::from(self.denied())
    }

    /// The credit that a bucket without lease and books had before anything was spent on it.
    pub(crate) fn credit_at_rest(&self) -> u32 {
        let word = self.load();
        word.credit() + word.pending()
    }

    /// Sets the credit of a bucket that the engine keeps no books on, unless something is pending:
    /// then it is about to.
    pub(crate) fn rest_on(&self, credit: u32) {
        let _ = self.update(|word| {
            (self.slot().is_none() && word.pending() == 0 && !word.gone())
                .then(|| word.with_credit(credit))
        });
    }

    /// Takes tokens away until at most `keep` are left; returns how many.
    pub(crate) fn withdraw(&self, keep: u32) -> u32 {
        let before = self.update(|word| (word.tokens() > keep).then(|| word.with_tokens(keep)));
        before.map_or(0, |word| word.tokens() - keep)
    }

    /// Lowers the depth: refill stops there.
    pub(crate) fn set_depth(&self, depth: u32) {
        let flow = Flow(self.flow().load(Ordering::Relaxed));
        if flow.rate() > 0 {
            let ends = Ends(self.ends().load(Ordering::Relaxed));
            self.ends().store(ends.may_fill().0, Ordering::Release);
        }
        self.flow().store(flow.with_depth(depth.min(FIELD_MAX)).0, Ordering::Release);
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
        let old = Flow(self.flow().load(Ordering::Relaxed));
        self.void_if_ended(now);
        let ends = self.write_terms(terms);
        let given = i128::from(tokens) * i128::from(unit) + i128::from(fraction);
        let mut amended = Amended::default();
        let _ = self.update(|word| {
            let held = word.tokens();
            // What flowed in beyond the old depth was lost then.
            let room = i128::from(old.depth().saturating_sub(held)) * i128::from(unit);
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
        let minted_us = if terms.rate > 0 {
            let micros = amended.rest.div_euclid(terms.rate);
            amended.rest = amended.rest.rem_euclid(terms.rate);
            now.as_micros().saturating_add_signed(-micros)
        } else {
            u64::MAX
        };
        self.minted_us().store(minted_us, Ordering::Release);
        let may_fill =
            terms.rate > 0 && until_full(now, terms, amended.units, unit) < ends.micros();
        self.ends().store(Ends::new(terms.ends, terms.low, may_fill).0, Ordering::Release);
        amended
    }

    /// Takes the tokens of a lease that has ended out of the word, before another end can be read beside it.
    pub(super) fn void_if_ended(&self, now: Timestamp) {
        if now.as_micros() >= self.ends_us() {
            let _ = self.update(|word| Some(word.next_epoch().with_tokens(0)));
        }
    }

    /// Writes flow and end of a new lease, which refill may fill for now; returns that end.
    pub(super) fn write_terms(&self, terms: Terms) -> Ends {
        let flow = Flow::new(terms.rate, terms.depth, terms.ahead);
        self.flow().store(flow.0, Ordering::Release);
        let ends = Ends::new(terms.ends, terms.low, terms.rate > 0);
        self.ends().store(ends.0, Ordering::Release);
        ends
    }

    /// Closes the refill. Returns the units it has earned and not yet turned into tokens: less than
    /// none if tokens were minted ahead, or by a decision whose clock was ahead of `now`.
    pub(super) fn settle(&self, now: Timestamp) -> i128 {
        let minted_us = self.minted_us().swap(u64::MAX, Ordering::AcqRel);
        let flow = Flow(self.flow().load(Ordering::Relaxed));
        let ended = now.as_micros() >= self.ends_us();
        if minted_us >= CLOSED || ended || flow.is_boundless() {
            return 0;
        }
        i128::from(flow.rate()) * (i128::from(now.as_micros()) - i128::from(minted_us))
    }

    /// Notes what the store said at `at`, in tokens, and from when on credit may be used.
    pub(crate) fn set_view(&self, tokens: i64, at: Timestamp, credit_from: Timestamp) {
        let seen = Moment::not_before(credit_from, RoughTokens::new(tokens).bits());
        self.seen().store(seen.0, Ordering::Relaxed);
        self.set_view_at(at);
    }
}

/// Until when refill, of which there is some, cannot have filled a bucket of so many units, whatever is spent
/// of them, for whoever reads the cached clock: in microseconds.
fn until_full(now: Timestamp, terms: Terms, units: i64, unit: i64) -> u64 {
    let room = i64::from(terms.depth).saturating_mul(unit).saturating_sub(units);
    let fills_in_us = room.max(0) as u64 / terms.rate as u64;
    now.as_micros().saturating_add(fills_in_us).saturating_sub(CLOCK_AGE_MAX_US)
}
