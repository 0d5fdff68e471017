//! What goes into a bucket and what comes out of it.

use crate::time::Timestamp;

/// A lease as the bucket applies it: until `ends`, `rate` units per microsecond flow in, up to
/// `depth` whole tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub rate: i64,
    pub depth: u32,
    /// Rounded down to the millisecond.
    pub ends: Timestamp,
    /// Tell the engine when fewer tokens than this are left.
    pub low: u32,
    /// How much of a token may be spent before it is whole by who takes unsure answers, in 64ths.
    pub ahead: u8,
    /// The tokens come from an outage policy.
    pub policy: bool,
}

impl Terms {
    /// No lease: nothing flows in, nothing may be held.
    pub(crate) const NONE: Self =
        Self { rate: 0, depth: 0, ends: Timestamp::ZERO, low: 0, ahead: 0, policy: false };
}

/// What the engine is to be told after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Nothing new.
    None,
    /// Something is pending that was not before: report it at the next tick.
    Dirty,
    /// The key runs low or was denied: sync early.
    Urgent,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    Denied,
    /// It is not sure, and was not to be decided unless it was: nothing was spent or counted.
    Unsure,
}

/// What one look decided, for sure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Looked {
    pub result: SpendResult,
    /// The engine knows all that it has to, or else is to be [told](Bucket::tell_at_once).
    pub told: bool,
}

/// Whether a request may go on, whether that is sure, and how many tokens are left in the bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpendResult {
    pub left: u32,
    pub allowed: bool,
    pub sure: bool,
}

impl SpendResult {
    /// Surely denied, with nothing left.
    pub(crate) const DENIED: Self = Self { left: 0, allowed: false, sure: true };

    /// Surely allowed, leaving so many tokens.
    #[inline(always)]
    pub(crate) fn allowed(left: u32) -> Self {
        Self { left, allowed: true, sure: true }
    }
}

/// What [`Bucket::take`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub verdict: Verdict,
    pub sure: bool,
    /// Tokens left in the word.
    pub left: u32,
    pub touch: Touch,
    /// The engine keeps no books on the bucket, and must be told its key.
    pub unknown: bool,
    /// Tokens that were pending and no longer are: the engine must be told.
    pub spilled: u32,
    /// What was denied, if the engine should know how large single requests are.
    pub refused: u32,
    /// It was denied, and the bucket could not count that any more.
    pub uncounted: bool,
}

impl Taken {
    /// Decided, and counted by the bucket; `news` is what the engine is to be told, and whether it must
    /// be told the key.
    pub(super) fn new(verdict: Verdict, sure: bool, left: u32, news: (Touch, bool)) -> Self {
        let ((touch, unknown), spilled, refused, uncounted) = (news, 0, 0, false);
        Self { verdict, sure, left, touch, unknown, spilled, refused, uncounted }
    }

    /// The same of what was decided at once.
    pub(super) fn of(result: SpendResult, news: (Touch, bool)) -> Self {
        let verdict = if result.allowed { Verdict::Allowed } else { Verdict::Denied };
        Self::new(verdict, result.sure, result.left, news)
    }

    /// Whether the request may go on.
    #[inline]
    pub(crate) fn allowed(&self) -> bool {
        self.verdict == Verdict::Allowed
    }

    /// Whether anybody has to know more of a decision about `cost` tokens than the bucket does.
    #[inline]
    pub(crate) fn is_news(&self, cost: u32) -> bool {
        let quiet = self.sure && self.touch == Touch::None && self.spilled == 0;
        !quiet || self.uncounted || cost > 1 && self.verdict == Verdict::Denied
    }
}

/// What [`Bucket::collect`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    /// Tokens spent since the last collection, from tokens and from credit.
    pub spent: u64,
    /// Of these, what single requests cost beyond one token each.
    pub surplus: u64,
    /// Tokens asked for and denied since.
    pub denied: u64,
    /// Credit left in the word.
    pub credit: u32,
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
