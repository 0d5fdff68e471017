//! How leased refill becomes tokens. [`lease_bucket`](super) has the argument and the orderings.

use super::super::atomic::Ordering;
use super::{LeaseBucket, TokenWord};
use crate::decision::OVERDRAW_PARTS;
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// More refill than can ever be used up: an outage policy that lets everything pass.
pub(crate) const UNLIMITED_RATE: i64 = i64::MAX;

/// A flag beside the overdraw: refill ends before the lease, and the engine then stops it.
pub(crate) const OUTLIVES_REFILL: u8 = 1 << 7;

/// A stretch of time, and the tokens that flow in meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inflow {
    from_us: u64,
    until_us: u64,
    pub(super) tokens: u32,
}

impl LeaseBucket {
    /// Whether refill may have filled the bucket by now, if `now` is the cached time. What flowed in since then is
    /// lost, and the loss must be settled before tokens are spent.
    pub(super) fn may_be_full(&self, word: TokenWord, now: Timestamp, unit: i64) -> bool {
        let rate = self.rate.load(Ordering::Acquire);
        let minted_us = self.minted_us.load(Ordering::Acquire);
        let until_us = now.as_micros() + CLOCK_AGE_MAX_US;
        let room = u64::from(self.room(word)).saturating_mul(unit as u64);
        until_us > minted_us && rate.saturating_mul(until_us - minted_us) >= room
    }

    /// Whether refill is leased, and has earned no token by now.
    #[inline(always)]
    pub(super) fn lacks_one(&self, now: Timestamp, unit: i64) -> bool {
        let rate = self.rate.load(Ordering::Acquire);
        let minted_us = self.minted_us.load(Ordering::Acquire);
        if minted_us == u64::MAX {
            return false;
        }
        // Where the precise clock was read, or tokens were overdrawn, `minted_us` is ahead.
        let earned = rate.saturating_mul(now.as_micros().saturating_sub(minted_us));
        rate > 0 && earned < unit as u64 - self.overdraw_units(unit)
    }

    /// Turns earned time into tokens, and up to `overdraw_us` of time that is still to come. Returns whether the word
    /// is worth another look.
    pub(super) fn mint(
        &self,
        seen: TokenWord,
        now: Timestamp,
        overdraw_us: u64,
        unit: i64,
    ) -> bool {
        let Some(inflow) = self.inflow(seen, now, overdraw_us, unit) else { return false };
        if self.claim(inflow, seen) {
            self.deposit(inflow.tokens, seen.epoch());
        }
        true
    }

    /// The whole tokens that have flowed in or will within `overdraw_us`, as far as there is room. `None` if there is
    /// nothing to claim.
    pub(super) fn inflow(
        &self,
        seen: TokenWord,
        now: Timestamp,
        overdraw_us: u64,
        unit: i64,
    ) -> Option<Inflow> {
        let from_us = self.minted_us.load(Ordering::Acquire);
        let rate = self.rate.load(Ordering::Acquire);
        let ends_us = self.ends_us.load(Ordering::Acquire);
        let ends_us = if self.outlives_refill() { ends_us + overdraw_us } else { ends_us };
        let now_us = (now.as_micros() + overdraw_us).min(ends_us);
        if from_us >= now_us || rate == 0 {
            return None;
        }
        let (room, unit) = (u64::from(self.room(seen)), unit as u64);
        let earned = rate.saturating_mul(now_us - from_us);
        let fills = rate == UNLIMITED_RATE as u64 || earned >= room.saturating_mul(unit);
        if !fills && earned < unit {
            return None;
        }
        let tokens = if fills { room } else { earned / unit };
        let earned_us = from_us.saturating_add(tokens.saturating_mul(unit).div_ceil(rate));
        // What flows into a full bucket is lost up to now. What is overdrawn is not there yet.
        let until_us = match (fills, overdraw_us) {
            (true, 0) => now_us,
            (true, _) => earned_us.max(now.as_micros()).min(now_us),
            (false, _) => earned_us,
        };
        (until_us > from_us).then_some(Inflow { from_us, until_us, tokens: tokens as u32 })
    }

    /// Claims what has flowed in since the word was `seen`, if no other thread has, and neither lease nor key has
    /// changed.
    pub(super) fn claim(&self, inflow: Inflow, seen: TokenWord) -> bool {
        let Inflow { from_us, until_us, .. } = inflow;
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.load_in(seen.epoch()).is_some()
            && self.minted_us.compare_exchange(from_us, until_us, success, failure).is_ok()
    }

    /// Adds minted tokens, unless the lease that earned them has changed.
    pub(super) fn deposit(&self, tokens: u32, epoch: u64) {
        let depth = self.depth.load(Ordering::Relaxed);
        self.update(|word| {
            let level = (word.tokens() + tokens).min(depth.max(word.tokens()));
            let is_same = word.epoch() == epoch && !word.is_retired();
            if is_same { word.with_tokens(level) } else { word }
        });
    }

    /// How long before it is whole a token may be spent.
    pub(super) fn overdraw_us(&self, unit: i64) -> u64 {
        let rate = self.rate.load(Ordering::Relaxed);
        self.overdraw_units(unit).checked_div(rate).unwrap_or(0)
    }

    fn overdraw_units(&self, unit: i64) -> u64 {
        // A token has at most 2^52 units.
        let parts = self.overdraw.load(Ordering::Relaxed) & !OUTLIVES_REFILL;
        unit as u64 * u64::from(parts) / OVERDRAW_PARTS
    }

    /// Whether the tokens live on when refill ends. Then what is overdrawn may come after that.
    fn outlives_refill(&self) -> bool {
        self.overdraw.load(Ordering::Relaxed) & OUTLIVES_REFILL != 0
    }

    /// Whole tokens that there is room for.
    fn room(&self, word: TokenWord) -> u32 {
        self.depth.load(Ordering::Relaxed).saturating_sub(word.tokens())
    }
}
