//! The plan that callers name for a key.

use super::{LeaseBucket, TokenWord};
use crate::bucket::atomic::Ordering;
use crate::bucket::new_key::NewKey;
use crate::bucket::notifications::Urgency;
use crate::bucket::spend_result::{Ask, SpendResult};
use crate::time::{Now, Timestamp};

impl LeaseBucket {
    /// Whether this plan was named last for the key.
    #[inline(always)]
    pub(crate) fn is_under(&self, plan: u32) -> bool {
        self.plan.load(Ordering::Relaxed) == plan
    }

    /// The plan that was named last for the key.
    pub(crate) fn plan(&self) -> u32 {
        self.plan.load(Ordering::Relaxed)
    }

    /// Whether a lease that lives holds `cost` tokens, under the plan that was named last.
    pub(crate) fn has_leased(
        &self,
        word: TokenWord,
        (cost, plan): (u32, u32),
        now: Timestamp,
    ) -> bool {
        let is_leased = self.is_live(now) && self.is_under(plan);
        is_leased && word.tokens() >= cost && !word.is_policy()
    }

    /// Decides for a caller who names another plan than the one before, and notifies the engine: what is leased can be
    /// spent under any plan, and the store's next answer is by the new one. If the place is given to another key between
    /// the decision and the note, that key is asked for under this plan until its next request.
    #[cold]
    pub(super) fn decide_under_plan(
        &self,
        seen: TokenWord,
        ask: Ask,
        time: impl Now,
    ) -> Option<SpendResult> {
        let result = self.decide(seen, ask, time)?;
        if self.is_under(NewKey::NO_PLAN) {
            return Some(result);
        }
        self.plan.store(ask.plan, Ordering::Release);
        let news = if result.news.is_none() { self.notify(Urgency::Now) } else { result.news };
        Some(SpendResult { news, ..result })
    }
}
