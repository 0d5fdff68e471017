//! Tokens that a thread takes out of a contended bucket at once, and spends by itself.
//!
//! A decision that failed several times to change a bucket's word makes the bucket *hot*. From then on
//! each thread has a purse for it: it takes many tokens with one change of the word, and decides from
//! these without writing to anything that other threads read. The engine's next collection makes the
//! bucket cool again: then purses are not filled any more, and what is in them is spent until it is void.
//!
//! # Argument
//!
//! What is in a purse has been spent as far as the bucket knows: so no token is spent twice, whatever
//! becomes of the thread. A thread that comes back a little too late returns what is left. What it
//! never comes back for stays spent: at most 1/[`PART`] of what the bucket held, [`SIZE_MAX`], and
//! [`SIZE_MIN`] or twice what it had just used.
//!
//! Yet a token in a purse is given out later than the bucket thinks, and the bucket could refill
//! meanwhile. So a purse is void [`SPAN_US`] after it was filled, and before the lease ends. It is
//! filled only if the bucket cannot be full until it is given up, so that both together hold no more
//! than the bucket may; and the engine takes what a hot bucket has spent for held until then, tokens as
//! well as depth.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use super::fields::{Ends, Flow};
use super::line::Bucket;
use super::word::{PENDING_MAX, Word};
use crate::decision::{Refill, View};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// A purse is used for so long by the cached clock.
const SPAN_US: u64 = 2_000;
/// So long after it was filled, by any clock, a purse is neither used nor returned: both times the
/// cached clock may have stood still.
pub(crate) const GIVEN_UP_US: u64 = SPAN_US + 2 * CLOCK_AGE_MAX_US;
/// What is left in a void purse is returned for so long: later the bucket may have been full meanwhile,
/// and would come to hold what it had no room for.
const RETURN_US: u64 = GIVEN_UP_US - CLOCK_AGE_MAX_US - SPAN_US;
/// A purse takes one in so many of the bucket's tokens at most.
const PART: u32 = 64;
/// Purses are filled from buckets that hold so many tokens at least: smaller ones are to be used up to
/// the last token.
pub(super) const TOKENS_MIN: u32 = 4096;
/// How many tokens a purse takes at first, and how many at most.
const SIZE_MIN: u32 = 8;
const SIZE_MAX: u32 = 1024;
/// Purses of a thread.
const PURSES: usize = 16;
/// So often a thread tries to change the word to fill its purse.
const TRIES: u32 = 4;

/// The bucket that tokens are from: its place, with the table's number above that, and which of the keys that
/// have had the place. No two tables that live at the same time have numbers that are 2^32 apart, and no place
/// is given 2^32 times while a purse is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    table_and_place: u64,
    tenant: u32,
}

impl Origin {
    /// Of no bucket: no table has the number 0.
    const NONE: Self = Self { table_and_place: 0, tenant: 0 };

    #[inline(always)]
    pub(crate) fn new(table: u64, place: u32, tenant: u32) -> Self {
        Self { table_and_place: table << u32::BITS | u64::from(place), tenant }
    }

    #[inline(always)]
    pub(crate) fn place(self) -> u32 {
        self.table_and_place as u32
    }
}

/// A thread's share of a hot bucket.
#[derive(Debug)]
struct Purse {
    origin: Cell<Origin>,
    until: Cell<Timestamp>,
    /// Tokens left in it.
    left: Cell<u32>,
    /// Tokens that were taken at once.
    size: Cell<u32>,
    filled: Cell<Filled>,
}

/// A bucket as it was left when a purse was filled from it.
#[derive(Clone, Copy, Debug)]
struct Filled {
    /// Tokens in it.
    rest: u32,
    /// The lease.
    epoch: u64,
    view: View,
    refill: Refill,
}

/// What a token out of a purse leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    /// Tokens in the purse, and those in the bucket when the purse was filled.
    pub(crate) left: u32,
    /// What the bucket told then, less than [`SPAN_US`] ago.
    pub(crate) view: View,
    pub(crate) refill: Refill,
}

impl Purse {
    const fn new() -> Self {
        let filled = Filled { rest: 0, epoch: 0, view: View::NONE, refill: Refill::NONE };
        Self {
            origin: Cell::new(Origin::NONE),
            until: Cell::new(Timestamp::ZERO),
            left: Cell::new(0),
            size: Cell::new(0),
            filled: Cell::new(filled),
        }
    }
}

/// A thread's purses.
#[derive(Debug)]
pub(crate) struct Purses {
    purses: [Purse; PURSES],
    /// They are filled from buckets that hold so many tokens.
    tokens_min: u32,
}

thread_local! {
    static MINE: Purses = const { Purses::new(TOKENS_MIN) };
}

/// Takes a token from there out of the calling thread's purse, if there is one. What is in it may be spent
/// even if the bucket has cooled meanwhile.
///
/// Cost: nothing is read that another thread writes.
#[inline(always)]
pub(crate) fn spend(origin: Origin, now: Timestamp) -> Option<Spent> {
    MINE.with(|mine| mine.spend(origin, now))
}

/// Fills the calling thread's purse for a hot bucket: see [`Purses::refill`].
pub(crate) fn refill(
    origin: Origin,
    bucket: &Bucket,
    now: Timestamp,
    unit: i64,
    is_mine: impl Fn() -> bool,
) {
    MINE.with(|mine| mine.refill(origin, bucket, now, unit, is_mine));
}

impl Purses {
    /// Empty ones, to be filled from buckets that hold so many tokens at least.
    pub(crate) const fn new(tokens_min: u32) -> Self {
        Self { purses: [const { Purse::new() }; PURSES], tokens_min }
    }

    /// See [`spend`].
    #[inline(always)]
    pub(crate) fn spend(&self, origin: Origin, now: Timestamp) -> Option<Spent> {
        let purse = self.of(origin);
        let left = purse.left.get().checked_sub(1)?;
        (purse.origin.get() == origin && now < purse.until.get()).then(|| {
            purse.left.set(left);
            let Filled { rest, view, refill, .. } = purse.filled.get();
            Spent { left: rest + left, view, refill }
        })
    }

    /// Fills the purse for a bucket that is hot, unless it has some left, or another key has; returns how
    /// many tokens were taken out of the bucket, less what was returned to it: none, where the place has
    /// been taken from the key that `is_mine` compares.
    pub(crate) fn refill(
        &self,
        origin: Origin,
        bucket: &Bucket,
        now: Timestamp,
        unit: i64,
        is_mine: impl Fn() -> bool,
    ) -> i64 {
        let purse = self.of(origin);
        if purse.left.get() > 0 && now < purse.until.get() {
            return 0;
        }
        purse.refill(origin, bucket, self.tokens_min, now, unit, is_mine)
    }

    #[inline(always)]
    fn of(&self, origin: Origin) -> &Purse {
        &self.purses[origin.place() as usize % PURSES]
    }

    /// The places of purses that are not void, and the tokens in each.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn held(&self, now: Timestamp) -> impl Iterator<Item = (u32, u64)> {
        let live = self.purses.iter().filter(move |purse| now < purse.until.get());
        live.map(|purse| (purse.origin.get().place(), purse.left.get().into()))
    }
}

impl Purse {
    fn refill(
        &self,
        origin: Origin,
        bucket: &Bucket,
        tokens_min: u32,
        now: Timestamp,
        unit: i64,
        is_mine: impl Fn() -> bool,
    ) -> i64 {
        let mine = self.origin.get() == origin;
        let (until, left) = (self.until.get(), self.left.get());
        let returned = if mine && now < until.plus_micros(RETURN_US) { left } else { 0 };
        let want = match left {
            _ if bucket.tokens() < tokens_min => 0,
            0 if mine && now < until => (2 * self.size.get()).min(SIZE_MAX),
            _ => SIZE_MIN,
        };
        let exchange = Exchange { returned, epoch: self.filled.get().epoch, want };
        let exchanged = bucket.exchange(exchange, now, unit, is_mine);
        let Some(Exchanged { returned, taken, rest, epoch }) = exchanged else { return 0 };
        let (view, refill) = (bucket.view(), bucket.refill());
        self.origin.set(origin);
        self.until.set(now.plus_micros(SPAN_US));
        self.left.set(taken);
        self.size.set(taken.max(SIZE_MIN));
        self.filled.set(Filled { rest, epoch, view, refill });
        i64::from(taken) - i64::from(returned)
    }
}

/// What a purse returns to the bucket, and would have of it.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    returned: u32,
    /// The lease that what is returned is from.
    epoch: u64,
    want: u32,
}

/// What a purse returned to the bucket, and took.
#[derive(Clone, Copy, Debug)]
struct Exchanged {
    returned: u32,
    taken: u32,
    rest: u32,
    epoch: u64,
}

impl Bucket {
    /// Whether threads contend for the bucket.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        Word(self.word().load(Ordering::Relaxed)).hot()
    }

    fn tokens(&self) -> u32 {
        Word(self.word().load(Ordering::Relaxed)).tokens()
    }

    /// Makes it hot, as contending threads do.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn heat(&self) {
        let heat = |word| Some(Word(word).with_hot(true).0);
        let _ = self.word().fetch_update(Ordering::SeqCst, Ordering::SeqCst, heat);
    }

    /// Takes tokens back and gives others, if the bucket is hot; `None` if it is not, or there are none, and
    /// nothing is changed. Whatever else has to be minded, a decision by the word minds.
    fn exchange(
        &self,
        exchange: Exchange,
        now: Timestamp,
        unit: i64,
        is_mine: impl Fn() -> bool,
    ) -> Option<Exchanged> {
        for _ in 0..TRIES {
            let word = self.load_mine(&is_mine)?;
            let ends = Ends(self.ends().load(Ordering::Acquire));
            let over = now.as_micros() + SPAN_US >= ends.micros();
            // Only a collection that finds the word hot tells the engine of purses.
            if !word.hot() || word.policy() || over {
                return None;
            }
            let same = word.epoch() == exchange.epoch;
            let room = Flow(self.flow().load(Ordering::Relaxed)).room(word.tokens());
            let returnable = if same { room.min(word.pending()) } else { 0 };
            let returned = exchange.returned.min(returnable);
            let before = word.unspend_tokens(returned);
            let spare = before.tokens().saturating_sub(ends.low());
            let most = exchange.want.min(before.tokens() / PART).min(spare);
            let fits = before.pending() > 0 && before.pending() + most <= PENDING_MAX;
            let full = self.may_be_full(before, now.as_micros() + GIVEN_UP_US, unit);
            let taken = if most > 1 && fits && !full { most } else { 0 };
            if taken == 0 && returned == 0 {
                return None;
            }
            let after = before.spend_tokens(taken);
            if self.swap(word, after).is_ok() {
                let (rest, epoch) = (after.tokens(), after.epoch());
                return Some(Exchanged { returned, taken, rest, epoch });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::outcome::Terms;
    use crate::time::Reading;

    const UNIT: i64 = 1000;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    fn held(purses: &Purses, now: Timestamp) -> u64 {
        purses.held(now).map(|(_, tokens)| tokens).sum()
    }

    fn from_purse(purses: &Purses, place: u32, bucket: &Bucket, now: Timestamp) -> bool {
        let origin = Origin::new(1, place, 1);
        let _ = purses.refill(origin, bucket, now, UNIT, || true);
        purses.spend(origin, now).is_some()
    }

    /// Spends from the purse or else from the bucket, which is contended all the time.
    fn spend(purses: &Purses, bucket: &Bucket, now: Timestamp) -> bool {
        bucket.heat();
        from_purse(purses, 1, bucket, now) || bucket.take(1, now, UNIT).allowed()
    }

    #[test]
    fn a_thread_takes_many_tokens_at_once_and_returns_what_it_comes_back_to() {
        let bucket = Bucket::local(0, 10_000, at(0));
        let purses = Purses::new(0);
        assert!(spend(&purses, &bucket, at(1)), "the first one tells the engine, by the word");
        assert!(spend(&purses, &bucket, at(1)));
        assert_eq!(bucket.held_and_pending(), (9_999 - SIZE_MIN, 1 + u64::from(SIZE_MIN)));
        assert_eq!(held(&purses, at(1)), u64::from(SIZE_MIN) - 1);
        // Emptied in time it takes twice as many, and so on.
        (1..SIZE_MIN).for_each(|_| assert!(spend(&purses, &bucket, at(1))));
        assert!(spend(&purses, &bucket, at(1)));
        assert_eq!(held(&purses, at(1)), u64::from(2 * SIZE_MIN) - 1);
        assert_eq!(held(&purses, at(1 + SPAN_US)), 0, "it is void by then");
        assert!(spend(&purses, &bucket, at(1 + SPAN_US)));
        let spent = 1 + SIZE_MIN + 1 + SIZE_MIN;
        let all_returned = (10_000 - spent, spent.into());
        assert_eq!(bucket.held_and_pending(), all_returned, "and few taken again");
        assert!(bucket.collect(false, |left| left).hot);
        assert!(!bucket.is_hot());
    }

    #[test]
    fn one_key_leaves_anothers_purse_alone() {
        let (one, other) = (Bucket::local(0, 10_000, at(0)), Bucket::local(0, 10_000, at(0)));
        let purses = Purses::new(0);
        (0..2).for_each(|_| assert!(spend(&purses, &one, at(1))));
        other.heat();
        let place = 1 + PURSES as u32;
        assert!(other.take(1, at(1), UNIT).allowed());
        assert!(!from_purse(&purses, place, &other, at(2)));
        let left = |table, tenant| {
            purses.spend(Origin::new(table, 1, tenant), at(2)).map(|spent| spent.left)
        };
        assert_eq!(left(2, 1), None, "another table");
        assert_eq!(left(1, 2), None, "another key had the place before");
        assert_eq!(left(1, 1), Some(9_999 - SIZE_MIN + SIZE_MIN - 2));
        assert!(from_purse(&purses, place, &other, at(1 + SPAN_US)), "that one is void");
    }

    #[test]
    fn nothing_is_returned_to_another_lease() {
        let bucket = Bucket::local(0, 10_000, at(0));
        let purses = Purses::new(0);
        (0..2).for_each(|_| assert!(spend(&purses, &bucket, at(1))));
        let (ends, low, ahead) = (Timestamp::NEVER, 0, 0);
        let terms = Terms { rate: 0, depth: 5_000, ends, low, ahead, policy: false };
        bucket.amend(at(2), terms, 5_000, 0, UNIT);
        assert!(bucket.take(1000, at(2), UNIT).allowed(), "there is room");
        let before = bucket.held_and_pending();
        let late = at(1 + SPAN_US);
        bucket.heat();
        assert_eq!(
            purses.refill(Origin::new(1, 1, 1), &bucket, late, UNIT, || true),
            i64::from(SIZE_MIN),
            "new ones"
        );
        let (left, pending) = before;
        assert_eq!(bucket.held_and_pending(), (left - SIZE_MIN, pending + u64::from(SIZE_MIN)));
    }

    #[test]
    fn a_purse_is_filled_while_the_bucket_is_hot_and_outlasts_that() {
        let bucket = Bucket::local(0, 10_000, at(0));
        let (purses, origin) = (Purses::new(0), Origin::new(1, 1, 1));
        assert!(bucket.take(1, at(1), UNIT).allowed());
        assert_eq!(
            purses.refill(origin, &bucket, at(1), UNIT, || true),
            0,
            "the engine would not be told"
        );
        bucket.heat();
        assert_eq!(purses.refill(origin, &bucket, at(1), UNIT, || true), i64::from(SIZE_MIN));
        let collected = bucket.collect(false, |left| left);
        assert!(collected.hot && !bucket.is_hot());
        let spent = purses.spend(origin, at(SPAN_US)).unwrap();
        assert_eq!((spent.left, spent.refill), (9_998, bucket.refill()));
        assert!(purses.spend(origin, at(1 + SPAN_US)).is_none());
    }

    /// What one bucket would have, that everybody asks.
    struct Central {
        level: f64,
        at_us: u64,
    }

    #[test]
    fn bucket_and_purses_never_admit_more_than_one_bucket_would() {
        let mut from_purses = 0_u64;
        for seed in 0..300 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let depth = rng.u32(500..5_000);
            // So many units a microsecond, of which a token has a thousand: from 1000 tokens a second.
            let rate = rng.i64(1..100);
            let bucket = Bucket::local(rate, depth, at(0));
            let threads: Vec<Purses> = (0..rng.usize(1..6)).map(|_| Purses::new(0)).collect();
            let mut central = Central { level: depth.into(), at_us: 0 };
            let (mut now_us, mut cached_us) = (0, 0);
            for step in 0..20_000 {
                // All at once, and then time to fill, more or less.
                now_us += if step % 4096 < 4090 { rng.u64(0..2) } else { rng.u64(0..100_000) };
                // The cached clock goes on by fits and starts.
                if now_us - cached_us >= CLOCK_AGE_MAX_US || rng.u8(..) < 3 {
                    cached_us = now_us;
                }
                let flowed = (now_us - central.at_us) as f64 * rate as f64 / UNIT as f64;
                central.level = (central.level + flowed).min(depth.into());
                central.at_us = now_us;
                let now = Reading { cached: at(cached_us), precise: at(now_us) };
                bucket.heat();
                let purses = &threads[rng.usize(..threads.len())];
                let spent = from_purse(purses, 1, &bucket, now.cached);
                from_purses += u64::from(spent);
                if spent || bucket.take(1, now, UNIT).allowed() {
                    central.level -= 1.0;
                }
                assert!(central.level > -1e-6, "seed {seed}: {} at {now_us}", central.level);
            }
        }
        assert!(from_purses > 1_000_000, "{from_purses}");
    }
}
