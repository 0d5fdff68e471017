//! A key comes under another plan.
//!
//! # Argument
//!
//! The state is one of the plan that is written beside it. The thread that changes both swaps [`CHANGING`] for the state
//! that it loaded before the key was compared: so the key is the same, and until the new state is stored nobody else
//! decides, retires the key or changes its plan. The plan is stored before the new state.
//!
//! A decision loads the state and then the plan. If the plan is its own and a change came between, the new state differs from
//! the one that it loaded: so its swap fails, and a denial, which swaps nothing, looks at the state once more. The state could
//! only be the same again if requests under the new plan moved it there to the unit while the thread was suspended. Then one
//! request is charged by the units of the plan before. Slots of a leaky bucket are what they were by every plan.

use super::{CHANGING, LocalBucket};
use crate::algorithm::{KeyRule, TurnRule};
use crate::bucket::atomic::Ordering;
use crate::bucket::new_key::NewKey;
use crate::limit::LimitInfo;

impl LocalBucket {
    /// Whether the state is one of this plan. Keys that share a bucket may be under several.
    #[inline(always)]
    pub(super) fn is_under(&self, plan: u32) -> bool {
        let known = self.plan.load(Ordering::Relaxed);
        known == plan || known == NewKey::NO_PLAN
    }

    /// Brings the key under the plan that is asked for, so that it can be asked again: `None`. For a look it changes nothing,
    /// and returns the state that the key would have.
    #[cold]
    #[inline(never)]
    pub(super) fn under_plan(
        &self,
        seen: u64,
        (plan, rule): (u32, &'static TurnRule),
        now: u64,
        is_look: bool,
    ) -> Option<u64> {
        let known = self.plan.load(Ordering::Relaxed);
        let changed = rule.taken_over(seen, rule_of(known).unwrap_or(rule), now);
        if is_look {
            return Some(changed);
        }
        let is_slots = matches!(rule, TurnRule::LeakyBucket { .. });
        let changed = if changed == seen && !is_slots { seen + 1 } else { changed };
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.state.compare_exchange(seen, CHANGING, success, failure).ok()?;
        let is_known = self.plan.load(Ordering::Relaxed) == known;
        if is_known {
            // The next key of the place begins beyond every state, and what was spent before cannot be undone.
            self.highest.fetch_max(seen, Ordering::AcqRel);
            self.plan.store(plan, Ordering::Release);
        }
        self.state.store(if is_known { changed } else { seen }, Ordering::Release);
        None
    }

    /// The rule of the state now, where `asked` is that of `plan`.
    pub(super) fn rule_in_force(&self, asked: &'static TurnRule, plan: u32) -> &'static TurnRule {
        match self.plan.load(Ordering::Relaxed) {
            known if known == plan => asked,
            known => rule_of(known).unwrap_or(asked),
        }
    }
}

/// The rule of a plan, by number. `None` of no plan.
fn rule_of(plan: u32) -> Option<&'static TurnRule> {
    match &LimitInfo::of(plan)?.here {
        Some(KeyRule::Turn(rule)) => Some(rule),
        _ => None,
    }
}
