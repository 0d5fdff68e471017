//! How a bucket's less changeable numbers share words, so that a bucket fits two cache lines.

use super::word::FIELD_MAX;
use crate::decision::AHEAD_PARTS;
use crate::time::Timestamp;

/// More refill than can ever be used up: a policy that lets everything pass.
pub(crate) const BOUNDLESS_RATE: i64 = (1 << RATE_BITS) - 1;
const RATE_BITS: u32 = 34;
const AHEAD_BITS: u32 = AHEAD_PARTS.ilog2();
const TOKENS_BITS: u32 = 24;
/// The last millisecond that can be told: 17 years.
const MILLIS_MAX: u64 = (1 << 39) - 1;

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

    /// `at`, rounded up.
    pub(super) fn not_before(at: Timestamp, tokens: u32) -> Self {
        debug_assert!(tokens <= FIELD_MAX);
        let millis = at.as_micros().div_ceil(1000).min(MILLIS_MAX);
        Self(millis << TOKENS_BITS | u64::from(tokens))
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

/// The end of a lease to the millisecond, whether refill may fill the bucket before, and the low mark.
///
/// ```text
///  63            25      24      23       0
/// |  milliseconds  | may fill | low, tokens |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends(pub u64);

const MAY_FILL: u64 = 1 << TOKENS_BITS;
const ENDS_AT: u32 = TOKENS_BITS + 1;

impl Ends {
    pub(super) const ZERO: Self = Self(0);

    /// `at`, rounded down; a low mark that does not fit is as high as can be.
    pub(super) fn new(at: Timestamp, low: u32, may_fill: bool) -> Self {
        let millis = at.millis().min(MILLIS_MAX);
        let may_fill = if may_fill { MAY_FILL } else { 0 };
        Self(millis << ENDS_AT | may_fill | u64::from(low.min(FIELD_MAX)))
    }

    /// The same, of a lease that refill may fill.
    pub(super) fn may_fill(self) -> Self {
        Self(self.0 | MAY_FILL)
    }

    /// Milliseconds since the clock's origin.
    #[inline]
    pub(super) fn millis(self) -> u64 {
        self.0 >> ENDS_AT
    }

    /// Microseconds since the clock's origin.
    #[inline]
    pub(super) fn micros(self) -> u64 {
        self.millis() * 1000
    }

    /// Tell the engine when fewer tokens than this are left.
    #[inline]
    pub(super) fn low(self) -> u32 {
        (self.0 % MAY_FILL) as u32
    }

    /// Whether refill cannot fill the bucket before the lease ends, even if nothing is spent: so nobody who
    /// spends has to look at that.
    #[inline(always)]
    pub(super) fn is_fresh(self) -> bool {
        self.0 & MAY_FILL == 0
    }

    /// The low mark of a fresh lease; of another one more than any bucket has.
    #[inline(always)]
    pub(super) fn low_if_fresh(self) -> u32 {
        (self.0 % (1 << ENDS_AT)) as u32
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
        fn a_moment_is_at_most_a_millisecond_off(us in 0..MILLIS_MAX * 1000, tokens in 0..=FIELD_MAX) {
            let at = Timestamp::from_micros(us);
            let (before, after) =
                (Ends::new(at, tokens, us % 2 == 1), Moment::not_before(at, tokens));
            prop_assert!(before.micros() <= us && us - before.micros() < 1000);
            prop_assert!(after.micros() >= us && after.micros() - us < 1000);
            prop_assert_eq!((before.low(), after.tokens()), (tokens, tokens));
            let fresh = us % 2 == 0;
            prop_assert_eq!(before.is_fresh(), fresh);
            if fresh {
                prop_assert_eq!(before.low_if_fresh(), tokens);
            } else {
                prop_assert!(before.low_if_fresh() > FIELD_MAX);
            }
            prop_assert!(!before.may_fill().is_fresh());
        }
    }

    #[test]
    fn never_is_later_than_any_time_that_is_lived_through() {
        let decade_us = 10 * 366 * 86_400 * 1_000_000;
        assert!(Ends::new(Timestamp::NEVER, 0, false).micros() > decade_us);
        assert!(Moment::not_before(Timestamp::NEVER, 0).micros() > decade_us);
    }
}
