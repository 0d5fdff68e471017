//! How a bucket's less changeable numbers share words, so that all of it fits one cache line.

use super::word::FIELD_MAX;
use crate::decision::AHEAD_PARTS;
use crate::time::Timestamp;

/// More refill than can ever be used up: a policy that lets everything pass.
pub(crate) const BOUNDLESS_RATE: i64 = (1 << RATE_BITS) - 1;
const RATE_BITS: u32 = 34;
const AHEAD_BITS: u32 = AHEAD_PARTS.ilog2();
const TOKENS_BITS: u32 = 24;
const DENIED_BITS: u32 = 32;
/// Of a microsecond's number.
const FRESH_SHIFT: u32 = 15;
/// The last millisecond that can be told: 34 years.
const MILLIS_MAX: u64 = (1 << 40) - 1;

/// Refill, depth, and how much of a token may be spent before it is whole.
///
/// ```text
///  63               30 29           6 5         0
/// |  rate, units/us   | depth, tokens | ahead, /64 |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow(pub u64);

impl Flow {
    pub(super) const NONE: Self = Self(0);

    pub(super) fn new(rate: i64, depth: u32, ahead: u8) -> Self {
        debug_assert!((0..=BOUNDLESS_RATE).contains(&rate) && depth <= FIELD_MAX);
        debug_assert!(u64::from(ahead) < AHEAD_PARTS);
        let depth = u64::from(depth) << AHEAD_BITS;
        Self((rate as u64) << (TOKENS_BITS + AHEAD_BITS) | depth | u64::from(ahead))
    }

    /// Units per microsecond.
    #[inline]
    pub(super) fn rate(self) -> u64 {
        self.0 >> (TOKENS_BITS + AHEAD_BITS)
    }

    /// Whether nothing is ever lacking.
    pub(super) fn is_boundless(self) -> bool {
        self.rate() == BOUNDLESS_RATE as u64
    }

    /// Whole tokens.
    #[inline]
    pub(super) fn depth(self) -> u32 {
        (self.0 >> AHEAD_BITS) as u32 & FIELD_MAX
    }

    /// Whole tokens that there is room for beside so many.
    #[inline]
    pub(super) fn room(self, tokens: u32) -> u32 {
        self.depth().saturating_sub(tokens)
    }

    /// The same refill with another depth.
    pub(super) fn with_depth(self, depth: u32) -> Self {
        Self(self.0 & !(u64::from(FIELD_MAX) << AHEAD_BITS) | u64::from(depth) << AHEAD_BITS)
    }

    /// How much of a token may be spent before it is whole, in [`AHEAD_PARTS`].
    #[inline]
    pub(super) fn ahead(self) -> u64 {
        self.0 % AHEAD_PARTS
    }

    /// Units of `unit` a token that may be spent before they have flowed in.
    #[inline]
    pub(super) fn ahead_units(self, unit: i64) -> u64 {
        // A token has 2^52 units at most, so this does not overflow.
        unit as u64 * self.ahead() / AHEAD_PARTS
    }

    /// How long before it is whole a token may be spent.
    pub(super) fn ahead_us(self, unit: i64) -> u64 {
        match (self.ahead_units(unit), self.rate()) {
            (0, _) | (_, 0) => 0,
            (units, rate) => units / rate,
        }
    }
}

/// A time to the millisecond, and a number of tokens.
///
/// ```text
///  63            24 23          0
/// |  milliseconds  |   tokens    |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment(pub u64);

impl Moment {
    pub(super) const ZERO: Self = Self(0);

    /// `at`, rounded down.
    pub(super) fn not_after(at: Timestamp, tokens: u32) -> Self {
        Self::of_millis(at.as_micros() / 1000, tokens)
    }

    /// `at`, rounded up.
    pub(super) fn not_before(at: Timestamp, tokens: u32) -> Self {
        Self::of_millis(at.as_micros().div_ceil(1000), tokens)
    }

    fn of_millis(millis: u64, tokens: u32) -> Self {
        debug_assert!(tokens <= FIELD_MAX);
        Self(millis.min(MILLIS_MAX) << TOKENS_BITS | u64::from(tokens))
    }

    /// Milliseconds since the clock's origin.
    #[inline]
    pub(super) fn millis(self) -> u64 {
        self.0 >> TOKENS_BITS
    }

    /// Microseconds since the clock's origin.
    #[inline]
    pub(super) fn micros(self) -> u64 {
        self.millis() * 1000
    }

    #[inline]
    pub(super) fn tokens(self) -> u32 {
        self.0 as u32 & FIELD_MAX
    }
}

/// What was denied, and until when a lease is fresh.
///
/// ```text
///  63               32 31          0
/// | fresh, 2^15 us each |   denied    |
/// ```
///
/// While it is *fresh* it has not ended, and refill cannot have filled the bucket even if nothing was spent:
/// so nobody who spends has to look at that. *denied* counts tokens since the last collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aside(pub u64);

impl Aside {
    pub(super) const NONE: Self = Self(0);

    pub(super) fn denied(self) -> u32 {
        self.0 as u32
    }

    /// The same with nothing denied.
    pub(super) fn collected(self) -> Self {
        Self(self.0 >> DENIED_BITS << DENIED_BITS)
    }

    /// Whether the lease is fresh.
    #[inline(always)]
    pub(super) fn is_fresh(self, now: Timestamp) -> bool {
        now.as_micros() >> FRESH_SHIFT < self.0 >> DENIED_BITS
    }

    /// The same, with a lease that is fresh until a little before `until_us`, or until the last time that can
    /// be told: after 4 years.
    pub(super) fn with_fresh(self, until_us: u64) -> Self {
        let until = (until_us >> FRESH_SHIFT).min(u32::MAX.into());
        Self(until << DENIED_BITS | u64::from(self.denied()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_flow_is_what_it_was_made_of(
            rate in 0..=BOUNDLESS_RATE, depth in 0..=FIELD_MAX, ahead in 0..64_u8,
            other in 0..=FIELD_MAX,
        ) {
            let flow = Flow::new(rate, depth, ahead);
            prop_assert_eq!((flow.rate(), flow.depth()), (rate as u64, depth));
            prop_assert_eq!(flow.ahead_units(6400), u64::from(ahead) * 100);
            prop_assert_eq!(flow.with_depth(other), Flow::new(rate, other, ahead));
        }

        #[test]
        fn a_moment_is_at_most_a_millisecond_off(us in 0..1_u64 << 49, tokens in 0..=FIELD_MAX) {
            let at = Timestamp::from_micros(us);
            let (before, after) =
                (Moment::not_after(at, tokens), Moment::not_before(at, tokens));
            prop_assert!(before.micros() <= us && us - before.micros() < 1000);
            prop_assert!(after.micros() >= us && after.micros() - us < 1000);
            prop_assert_eq!((before.tokens(), after.tokens()), (tokens, tokens));
        }
    }

    #[test]
    fn never_is_later_than_any_time_that_is_lived_through() {
        let decade_us = 10 * 366 * 86_400 * 1_000_000;
        assert!(Moment::not_after(Timestamp::NEVER, 0).micros() > decade_us);
    }
}
