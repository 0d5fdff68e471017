//! The engine's side of a bucket: what it collects, takes back and leases, and its flags.
//! [`lease_bucket`](super) has the argument and the orderings.

use super::refill::UNLIMITED_RATE;
use super::{LeaseBucket, MARKED, TokenWord};
use crate::bucket::atomic::Ordering;
use crate::bucket::notifications::{News, Urgency};
use crate::bucket::token_word::MAX_TOKENS;
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// The engine has been notified that something is pending.
const QUEUED: u32 = 1;
/// The engine has been notified that tokens run low, or that a request was denied.
const URGENT: u32 = 2;
/// The engine has been notified of everything that flags can say.
const NOTIFIED: u32 = QUEUED | URGENT;
/// The bits of the account's number begin here.
const ACCOUNT_AT: u32 = 2;
/// The engine has no account of the key, and no flag is set.
pub(super) const NO_ACCOUNT: u32 = u32::MAX << ACCOUNT_AT;

/// A lease as the bucket applies it: until `ends`, `rate` units flow in each microsecond, up to `depth` tokens. By default
/// there is none: nothing flows in, and nothing may be held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) rate: i64,
    pub(crate) depth: u32,
    pub(crate) ends: Timestamp,
    /// The engine is notified when fewer tokens are left.
    pub(crate) low: u32,
    /// How much of a token may be spent before it has flowed in, in 64ths, and
    /// [`OUTLIVES_REFILL`](super::refill::OUTLIVES_REFILL).
    pub(crate) overdraw: u8,
    /// The tokens come from an outage policy.
    pub(crate) is_policy: bool,
}

/// What [`LeaseBucket::collect`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    /// Tokens spent since the last collection, from tokens and from credit.
    pub(crate) spent: u64,
    /// What single requests cost beyond one token each.
    pub(crate) surplus: u64,
    /// Tokens denied since.
    pub(crate) denied: u64,
    /// Credit left.
    pub(crate) credit: u32,
}

/// What [`LeaseBucket::amend`] left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amended {
    /// Units that make no whole token and no whole microsecond of the new rate. The engine keeps them until the next
    /// change. Less than none if tokens were overdrawn.
    pub(crate) remainder: i64,
    /// All that the bucket holds, `remainder` included, in units.
    pub(crate) units: i64,
    /// Tokens spent and not collected at that moment.
    pub(crate) pending: u64,
}

impl LeaseBucket {
    // ---- what was spent ----------------------------------------------------------------------

    /// Takes what is pending, and sets the credit that is left to `recredit` of itself in the same step. Decisions
    /// notify the engine from then on, unless it is `muted`.
    pub(crate) fn collect(&self, muted: bool, recredit: impl Fn(u32) -> u32) -> Collected {
        if muted {
            self.engine.fetch_or(NOTIFIED, Ordering::AcqRel);
        } else {
            self.engine.fetch_and(!NOTIFIED, Ordering::AcqRel);
        }
        let before = self.update(|word| word.collected().with_credit(recredit(word.credit())));
        Collected {
            spent: u64::from(before.pending()),
            surplus: u64::from(self.surplus.swap(0, Ordering::Relaxed)),
            denied: u64::from(self.denied.swap(0, Ordering::Relaxed)),
            credit: before.credit(),
        }
    }

    /// Tokens spent since the last collection.
    pub(crate) fn pending(&self) -> u64 {
        u64::from(self.load().pending())
    }

    /// Tokens held, and tokens spent since the last collection, at one moment.
    pub(crate) fn held_and_pending(&self) -> (u32, u64) {
        let word = self.load();
        (word.tokens(), u64::from(word.pending()))
    }

    /// Tokens spent and denied since the last collection.
    pub(crate) fn demand(&self) -> u64 {
        self.pending() + u64::from(self.denied.load(Ordering::Relaxed))
    }

    // ---- credit ------------------------------------------------------------------------------

    /// The credit that a bucket without lease and account had before any of it was spent.
    pub(crate) fn credit_at_rest(&self) -> u32 {
        let word = self.load();
        word.credit() + word.pending()
    }

    /// Sets the credit of a bucket that the engine has no account of, unless something is pending: then the engine
    /// is about to open one.
    pub(crate) fn set_credit_at_rest(&self, credit: u32) {
        self.update(|word| {
            let is_marked = self.full_at_us.load(Ordering::Relaxed) == MARKED;
            let is_at_rest = self.account().is_none() && word.pending() == 0 && !word.is_retired();
            if is_at_rest && !is_marked { word.with_credit(credit) } else { word }
        });
    }

    // ---- the lease ---------------------------------------------------------------------------

    /// Takes at most so many tokens away. Returns how many. Not how many are to stay: refill may flow in meanwhile.
    pub(crate) fn withdraw(&self, most: u32) -> u32 {
        let before = self.update(|word| word.with_tokens(word.tokens().saturating_sub(most)));
        before.tokens().min(most)
    }

    /// Lowers the depth: refill stops there.
    pub(crate) fn set_depth(&self, depth: u32) {
        if self.rate.load(Ordering::Relaxed) > 0 {
            self.fast_until_us.store(0, Ordering::Release);
        }
        self.depth.store(depth.min(MAX_TOKENS), Ordering::Release);
    }

    /// Changes the lease at `now`: settles what the old one earned, applies the new one, and adds `tokens` and
    /// `fraction` units.
    pub(crate) fn amend(
        &self,
        now: Timestamp,
        lease: Lease,
        tokens: i64,
        fraction: i64,
        unit: i64,
    ) -> Amended {
        // What a full bucket loses is taken off before the refill is closed and anything more is spent.
        self.mint_tokens(now, unit);
        let earned = self.close_refill(now, !self.is_live(now));
        let old_depth = self.depth.load(Ordering::Relaxed);
        self.empty_if_ended(now);
        self.write_lease(lease);
        let given = i128::from(tokens) * i128::from(unit) + i128::from(fraction);
        let mut amended = Amended::default();
        self.update(|word| {
            // What flowed in beyond the old depth was lost then.
            let room = i128::from(old_depth.saturating_sub(word.tokens())) * i128::from(unit);
            let units = given + earned.min(room);
            let (level, remainder) = filled(word.tokens(), units, lease.depth, unit);
            let units = i64::from(level).saturating_mul(unit).saturating_add(remainder);
            amended = Amended { remainder, units, pending: u64::from(word.pending()) };
            word.next_epoch().with_tokens(level).with_policy(lease.is_policy)
        });
        if lease.rate > 0 {
            let minted_us = now.as_micros() as i64 - amended.remainder.div_euclid(lease.rate);
            amended.remainder = amended.remainder.rem_euclid(lease.rate);
            self.minted_us.store(minted_us.max(0) as u64, Ordering::Release);
        }
        let fast_until_us = lease.ends.as_micros().min(full_at_us(now, lease, amended.units, unit));
        self.fast_until_us.store(fast_until_us, Ordering::Release);
        amended
    }

    /// Closes refill and the fast path. Returns the units that were earned and have not become tokens: less than none
    /// if tokens were overdrawn, or minted by a thread whose clock was ahead of `now`.
    pub(super) fn close_refill(&self, now: Timestamp, has_ended: bool) -> i128 {
        self.fast_until_us.store(0, Ordering::Release);
        let minted_us = self.minted_us.swap(u64::MAX, Ordering::AcqRel);
        let rate = self.rate.load(Ordering::Relaxed);
        if minted_us == u64::MAX || has_ended || rate == UNLIMITED_RATE as u64 {
            return 0;
        }
        i128::from(rate) * (i128::from(now.as_micros()) - i128::from(minted_us))
    }

    /// Ends the refill of a lease whose tokens live on until `ends`. Returns what was overdrawn, in units: none, or less.
    pub(crate) fn stop_refill(&self, now: Timestamp, ends: Timestamp, unit: i64) -> i64 {
        self.mint(self.load(), now, 0, unit);
        let until = now.min(Timestamp::from_micros(self.ends_us.load(Ordering::Relaxed)));
        let earned = self.close_refill(until, false);
        self.rate.store(0, Ordering::Release);
        self.ends_us.store(ends.as_micros(), Ordering::Release);
        self.fast_until_us.store(ends.as_micros(), Ordering::Release);
        earned.min(0) as i64
    }

    /// Takes the tokens of a lease that has ended out of the word, before another end can be read beside it.
    pub(super) fn empty_if_ended(&self, now: Timestamp) {
        if !self.is_live(now) {
            self.update(|word| word.next_epoch().with_tokens(0));
        }
    }

    pub(super) fn write_lease(&self, lease: Lease) {
        self.rate.store(lease.rate as u64, Ordering::Release);
        self.depth.store(lease.depth, Ordering::Release);
        self.overdraw.store(lease.overdraw, Ordering::Release);
        self.ends_us.store(lease.ends.as_micros(), Ordering::Release);
        self.low.store(lease.low.min(MAX_TOKENS), Ordering::Release);
    }

    /// Writes down what the store said at `at`, in tokens, for how many milliseconds the node knows that it is nothing,
    /// and from when credit may be used.
    pub(crate) fn set_view(
        &self,
        tokens: i64,
        at: Timestamp,
        empty_for_ms: u16,
        credit_from: Timestamp,
    ) {
        self.empty_for_ms.store(empty_for_ms, Ordering::Relaxed);
        self.credit_from_us.store(credit_from.as_micros(), Ordering::Relaxed);
        let tokens = tokens.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
        self.view_tokens.store(tokens, Ordering::Relaxed);
        self.view_ms.store((at.millis() as u32).max(1), Ordering::Relaxed);
    }

    // ---- the engine's flags and account ------------------------------------------------------

    /// Sets the flags of this urgency. Returns what of it is news.
    #[inline]
    pub(super) fn notify(&self, urgency: Urgency) -> News {
        let flags = match urgency {
            Urgency::None => return News::default(),
            Urgency::Tick => QUEUED,
            Urgency::Now => NOTIFIED,
        };
        // Not only a load: see the orderings.
        let before = self.engine.fetch_or(flags, Ordering::AcqRel);
        if before & flags == flags {
            return News::default();
        }
        News { urgency, is_new: before & !NOTIFIED == NO_ACCOUNT, ..News::default() }
    }

    /// Whether the engine has been notified of everything that flags can say.
    #[inline(always)]
    pub(super) fn is_notified(&self) -> bool {
        self.engine.load(Ordering::Relaxed) & NOTIFIED == NOTIFIED
    }

    /// Whether the engine has no account, and no notification is under way.
    pub(super) fn is_unnoticed(&self) -> bool {
        self.engine.load(Ordering::Acquire) == NO_ACCOUNT
    }

    /// Whether tokens have run low since the last collection.
    pub(crate) fn is_urgent(&self) -> bool {
        self.engine.load(Ordering::Acquire) & URGENT != 0
    }

    /// The number of the engine's account of this key.
    pub(crate) fn account(&self) -> Option<u32> {
        let engine = self.engine.load(Ordering::Acquire);
        (engine & !NOTIFIED != NO_ACCOUNT).then_some(engine >> ACCOUNT_AT)
    }

    /// Whether the engine has no account, and the key must be full according to what the node knew then.
    pub(super) fn is_full_at_rest(&self, now: Timestamp) -> bool {
        self.account().is_none() && now.as_micros() >= self.full_at_us.load(Ordering::Acquire)
    }

    /// The engine opens an account of this key. The new epoch makes a concurrent renewal of first credit fail.
    pub(crate) fn open_account(&self, account: u32) {
        debug_assert!(account < NO_ACCOUNT >> ACCOUNT_AT);
        let set = |engine| Some(engine & NOTIFIED | account << ACCOUNT_AT);
        let _ = self.engine.fetch_update(Ordering::AcqRel, Ordering::Acquire, set);
        self.update(TokenWord::next_epoch);
    }

    /// Whether the key is full by now, if nobody else spends, by what the engine knew when it closed its account last.
    pub(crate) fn is_full_since_closed(&self, now: Timestamp) -> bool {
        (1..=now.as_micros()).contains(&self.full_at_us.load(Ordering::Acquire))
    }

    /// The engine closes its account of this key, which is full at `full_at` if nobody spends. False if a decision has
    /// just notified the engine.
    pub(crate) fn try_close_account(&self, full_at: Timestamp, is_seen_once: bool) -> bool {
        if self.has_spilled() {
            return false;
        }
        // A full bucket has a whole token, so credit may be used from then on at the latest.
        self.credit_from_us.fetch_min(full_at.as_micros(), Ordering::Relaxed);
        self.full_at_us.store(full_at.as_micros(), Ordering::Release);
        self.is_seen_often.store((!is_seen_once).into(), Ordering::Relaxed);
        let open = self.engine.load(Ordering::Acquire) & !NOTIFIED;
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.engine.compare_exchange(open, NO_ACCOUNT, success, failure).is_ok()
    }
}

/// Tokens and the rest in units, where `units` are added to `tokens`, up to `depth`.
fn filled(tokens: u32, units: i128, depth: u32, unit: i64) -> (u32, i64) {
    let whole = (units / i128::from(unit)).clamp(0, i128::from(MAX_TOKENS));
    let level = (u64::from(tokens) + whole as u64).min(u64::from(MAX_TOKENS)) as u32;
    let remainder = (units - whole * i128::from(unit)) as i64;
    (level.min(depth), if level >= depth { remainder.min(0) } else { remainder })
}

/// Earliest time at which refill alone could fill a bucket of `units`, less the age of the cached clock.
fn full_at_us(now: Timestamp, lease: Lease, units: i64, unit: i64) -> u64 {
    let room = i64::from(lease.depth).saturating_mul(unit).saturating_sub(units).max(0);
    let fills_in_us = room.checked_div(lease.rate).map_or(u64::MAX, |micros| micros as u64);
    now.as_micros().saturating_add(fills_in_us).saturating_sub(CLOCK_AGE_MAX_US)
}
