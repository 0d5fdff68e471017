//! The token bucket and the leaky bucket, with one point in time as the state.
//!
//! The state counts units of the limit's [`Scale`]: those that flow in from the clock's origin until the key is as if
//! it had never been used. A key is *ahead* by the units that have not flowed in yet: by `state - now`, at least 0. Each
//! request moves the state by its cost.
//!
//! - A token bucket (this form of it is known as GCRA) holds `burst - ahead`. A request must wait until that is its
//!   cost.
//! - In a leaky bucket each request takes a slot as long as its cost, and must wait until the slots before it have
//!   passed. That is `ahead`.

use std::time::Duration;

use crate::quota::{PERIOD_MAX, Scale};
use crate::time::{Timestamp, micros};

/// The rule of a key whose state is one point in time.
///
/// With a tag of its own: one that the compiler hides in a field takes each decision six instructions to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum TurnRule {
    TokenBucket(Scale),
    LeakyBucket {
        scale: Scale,
        /// The longest wait for a slot, in units.
        queue: u64,
    },
}

/// How a key stood after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// How far the key was ahead, in units.
    pub(crate) ahead: u64,
    /// How long the request must wait, in units; 0 if it was denied.
    pub(crate) delay: u64,
    /// The longest wait that it would have been allowed with, in units.
    pub(crate) max_delay: u64,
}

/// A request that is to be undone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The state after its decision.
    pub(crate) state: u64,
    /// In tokens.
    pub(crate) cost: u32,
    /// When it is undone, in units.
    pub(crate) now: u64,
}

/// States are below this.
pub(crate) const STATE_MAX: u64 = 1 << 63;
/// No debt that a change of plan carries over is longer.
const STATE_AHEAD_MAX: u64 = 1 << 60;
/// The longest token of a share, in units. At the highest rate (2^14 units a microsecond) it takes more than two years to
/// flow in.
const TOKEN_UNITS_MAX: i64 = 1 << 60;
/// A share takes no cost of more units, so that sums fit 64 bits.
const COST_UNITS_MAX: u64 = 1 << 61;
/// The longest wait for a turn: as long as a bucket may take to fill.
const WITHIN_MAX_US: u64 = PERIOD_MAX.as_micros() as u64;

impl TurnRule {
    #[inline(always)]
    pub(crate) fn scale(&self) -> &Scale {
        match self {
            Self::TokenBucket(scale) | Self::LeakyBucket { scale, .. } => scale,
        }
    }

    /// The rule of one node's share: a token takes `nodes` times as long.
    pub(super) fn share(&self, nodes: u32) -> Self {
        let share = |scale: &Scale| {
            let token = scale.token.saturating_mul(nodes.into()).min(TOKEN_UNITS_MAX);
            Scale { token, burst: scale.burst.max(token), ..*scale }
        };
        match self {
            Self::TokenBucket(scale) => Self::TokenBucket(share(scale)),
            Self::LeakyBucket { scale, queue } => {
                Self::LeakyBucket { scale: share(scale), queue: *queue }
            }
        }
    }

    /// The same rule with `rate` units in a microsecond; `None` if its rate cannot be kept in them.
    pub(crate) fn at_rate(&self, rate: i64) -> Option<Self> {
        Some(match self {
            Self::TokenBucket(scale) => Self::TokenBucket(scale.at_rate(rate)?),
            Self::LeakyBucket { scale, queue } => {
                let queue = u128::from(*queue) * rate as u128 / scale.rate as u128;
                Self::LeakyBucket { scale: scale.at_rate(rate)?, queue: u64::try_from(queue).ok()? }
            }
        })
    }

    /// Whether a share counts so high a cost.
    pub(super) fn can_count(&self, cost: u32) -> bool {
        self.units_of(cost.into()) <= COST_UNITS_MAX
    }

    /// The units that flow in from the clock's origin to `at`. A scale of one node alone has at most 2^14 in a
    /// microsecond, so this does not overflow for 15 years of the machine's uptime.
    #[inline(always)]
    pub(crate) fn units_at(&self, at: Timestamp) -> u64 {
        at.as_micros().saturating_mul(self.scale().rate as u64).min(STATE_MAX - (1 << 60))
    }

    /// The units of `cost` tokens.
    #[inline(always)]
    pub(crate) fn units_of(&self, cost: u64) -> u64 {
        cost.saturating_mul(self.scale().token as u64)
    }

    /// The most units that one request can be allowed: a full bucket, or slots as long as the longest wait. A limit checks costs
    /// against its largest plan; this is of the key's own.
    #[inline(always)]
    pub(crate) fn max_request_units(&self) -> u64 {
        match self {
            Self::TokenBucket(scale) => scale.burst as u64,
            // One token of an outage share can be longer than that.
            Self::LeakyBucket { scale, .. } => {
                WITHIN_MAX_US.saturating_mul(scale.rate as u64).max(scale.token as u64)
            }
        }
    }

    /// How long a request of `cost` tokens must wait, in units, where the key is so far ahead.
    #[inline(always)]
    fn delay(&self, ahead: u64, cost: u64) -> u64 {
        match self {
            Self::TokenBucket(scale) => {
                ahead.saturating_add(self.units_of(cost)).saturating_sub(scale.burst as u64)
            }
            Self::LeakyBucket { .. } => ahead,
        }
    }

    /// Decides about a request of `cost` tokens, at least 1, that may wait `within_us`. Returns the state after it, or
    /// `None` if it is denied; and how the key stands then.
    #[inline(always)]
    pub(crate) fn decide(
        &self,
        state: u64,
        now: u64,
        cost: u32,
        within_us: u64,
    ) -> (Option<u64>, Turn) {
        let (ahead, cost) = (state.saturating_sub(now), u64::from(cost));
        let (delay, mut max_delay) = (self.delay(ahead, cost), self.max_delay(within_us));
        let is_possible = self.units_of(cost) <= self.max_request_units();
        if delay > max_delay || !is_possible {
            if !is_possible && matches!(self, Self::TokenBucket(_)) {
                // No wait was long enough.
                max_delay = 0;
            }
            return (None, Turn { ahead, delay: 0, max_delay });
        }
        let ahead = ahead + self.units_of(cost);
        (Some(now + ahead), Turn { ahead, delay, max_delay })
    }

    /// Undoes a request of `cost` tokens at `now` whose decision led to the state `taken`. Returns the new state; `None` if
    /// it cannot be undone:
    ///
    /// - in a token bucket that may have been full since. It was not if `taken` lies ahead, and no request was undone
    ///   since, so that no state was lower meanwhile; states up to `undone` were there before one was;
    /// - in a leaky bucket if a later slot was given: two requests would then share a slot.
    pub(crate) fn given_back(&self, state: u64, taken: Taken, undone: u64) -> Option<u64> {
        let Taken { state: taken, cost, now } = taken;
        let can_be = match self {
            Self::TokenBucket(_) => taken > now.max(undone),
            Self::LeakyBucket { .. } => taken == state,
        };
        can_be.then(|| state.saturating_sub(self.units_of(cost.into())))
    }

    /// The state of a key that was under the rule `from` until `now`. The key keeps what it has, at most the burst, and what
    /// it owes; slots stay where they were promised.
    pub(crate) fn taken_over(&self, state: u64, from: &Self, now: u64) -> u64 {
        let (Self::TokenBucket(to), Self::TokenBucket(from)) = (self, from) else { return state };
        let [from_token, to_token] = [from.token, to.token].map(i128::from);
        let ahead = i128::from(state.saturating_sub(now));
        let left = (i128::from(from.burst) - ahead) * to_token;
        let left = left.div_euclid(from_token.max(1)).min(to.burst.into());
        let ahead = (i128::from(to.burst) - left).min(STATE_AHEAD_MAX.into());
        now.saturating_add(ahead as u64)
    }

    /// The longest wait of a request that may wait for `within_us`, in units.
    #[inline(always)]
    pub(crate) fn max_delay(&self, within_us: u64) -> u64 {
        let within = within_us.min(WITHIN_MAX_US).saturating_mul(self.scale().rate as u64);
        match self {
            Self::TokenBucket(_) => within,
            Self::LeakyBucket { queue, .. } => within.min(*queue),
        }
    }

    /// Requests of one token that would be allowed now: without a wait in a token bucket, within `max_delay` in a leaky
    /// bucket.
    pub(crate) fn remaining(&self, turn: Turn) -> u64 {
        match self {
            Self::TokenBucket(scale) => {
                (scale.burst as u64).saturating_sub(turn.ahead) / scale.token as u64
            }
            Self::LeakyBucket { scale, .. } => {
                let left = turn.max_delay.checked_sub(turn.ahead);
                left.map_or(0, |left| left / scale.token as u64 + 1)
            }
        }
    }

    /// Microseconds until [`remaining`](Self::remaining) grows, if nobody else spends; 0 if it cannot.
    pub(crate) fn next_us(&self, turn: Turn) -> u64 {
        let remaining = self.remaining(turn);
        let most_ahead = match self {
            Self::TokenBucket(scale) => {
                (scale.burst as u64).checked_sub(self.units_of(remaining + 1))
            }
            Self::LeakyBucket { .. } => turn.max_delay.checked_sub(self.units_of(remaining)),
        };
        most_ahead.map_or(0, |most| self.micros(turn.ahead.saturating_sub(most)))
    }

    /// Microseconds until a request of so many tokens would be allowed that could wait for `max_delay`, if nobody else
    /// spends.
    pub(crate) fn wait_us(&self, turn: Turn, tokens: u64) -> u64 {
        self.micros(self.delay(turn.ahead, tokens).saturating_sub(turn.max_delay))
    }

    /// Microseconds until the key is as if it had never been used.
    pub(crate) fn reset_us(&self, turn: Turn) -> u64 {
        self.micros(turn.ahead)
    }

    /// The units that flow in within a span of time.
    pub(crate) fn units_in(&self, time: Duration) -> u64 {
        micros(time).saturating_mul(self.scale().rate as u64)
    }

    /// Microseconds in which so many units flow in, rounded up.
    pub(crate) fn micros(&self, units: u64) -> u64 {
        units.div_ceil(self.scale().rate as u64)
    }
}
