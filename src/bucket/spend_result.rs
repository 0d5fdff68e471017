//! What a bucket is asked, and what it decided.

use super::notifications::News;
use crate::algorithm::Standing;
use crate::decision::{Refill, View};
use crate::quota::Scale;

/// What a lease bucket needs to know of a request and its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    /// Tokens. A cost of 0 spends nothing, and is told what a request of one token would be told.
    pub(crate) cost: u32,
    pub(crate) scale: Scale,
    /// What may be spent on a key that is new or full before the store answers, in tokens.
    pub(crate) first_credit: u32,
    /// The number of the key's plan: see [`NewKey::plan`](super::NewKey::plan).
    pub(crate) plan: u32,
    /// The caller can ask the store: an unsure decision is left to it.
    pub(crate) can_wait: bool,
}

/// What the bucket of a limit that this node keeps alone needs to know of a request and its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalAsk<R: 'static> {
    /// As in [`Ask`].
    pub(crate) cost: u32,
    /// That of the limit, which is kept for as long as the process lives.
    pub(crate) rule: &'static R,
    /// How long the caller waits for the tokens, if they are promised.
    pub(crate) within_us: u64,
    /// The number of the key's plan: see [`NewKey::plan`](super::NewKey::plan).
    pub(crate) plan: u32,
}

/// What such a bucket decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalAnswer {
    pub(crate) is_allowed: bool,
    /// Such a bucket always is; who asks for several may not be.
    pub(crate) is_sure: bool,
    pub(crate) standing: Standing,
}

/// What a lease bucket decided about a request, what the engine has to know of it, and what a caller can read of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpendResult {
    pub(crate) verdict: Verdict,
    pub(crate) is_sure: bool,
    /// Whole tokens left of the lease.
    pub(crate) left: u32,
    /// The store's last word.
    pub(crate) view: View,
    /// What flows into the bucket.
    pub(crate) refill: Refill,
    /// It was denied, and the bucket could not count that.
    pub(crate) is_uncounted: bool,
    pub(crate) news: News,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    Denied,
    /// The caller should ask the store. Nothing was spent or counted.
    Unsure,
}

impl SpendResult {
    /// A result that the engine need not know of.
    #[inline(always)]
    pub(crate) fn new(
        verdict: Verdict,
        is_sure: bool,
        left: u32,
        (view, refill): (View, Refill),
    ) -> Self {
        Self { verdict, is_sure, left, view, refill, is_uncounted: false, news: News::default() }
    }

    /// Whether the request may go on.
    #[inline(always)]
    pub(crate) fn is_allowed(&self) -> bool {
        self.verdict == Verdict::Allowed
    }

    pub(crate) fn is_denied(&self) -> bool {
        self.verdict == Verdict::Denied
    }
}

impl Verdict {
    /// The verdict on a request that is allowed or not.
    #[inline(always)]
    pub(crate) fn of(is_allowed: bool) -> Self {
        if is_allowed { Self::Allowed } else { Self::Denied }
    }
}
