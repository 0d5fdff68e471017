//! Requests that cost more than their limit can ever admit: errors, unless an override decides or the limit is in shadow mode.

use super::overrides::LookedUp;
use super::{ActiveLimit, Handle, Target};
use crate::decision::Decision;
use crate::error::CheckError;
use crate::key::Key;

impl ActiveLimit {
    /// Checks that the limit can ever admit so high a cost.
    #[inline(always)]
    pub(super) fn validate_cost(&self, cost: u32) -> Result<(), CheckError> {
        let (limit, max) = (self.name(), self.cost_max());
        if cost <= max { Ok(()) } else { Err(CheckError::CostTooHigh { limit, cost, max }) }
    }

    /// The same, where a request of the key may cost more if something else decides about it.
    #[inline(always)]
    pub(crate) fn validate_cost_of<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<(), CheckError> {
        match self.validate_cost(cost) {
            Err(_) if self.allows_any_cost_of(key) => Ok(()),
            validated => validated,
        }
    }

    #[cold]
    #[inline(never)]
    fn allows_any_cost_of<K: Key + ?Sized>(&self, key: &K) -> bool {
        let (name, plain) = (self.shared.secret.name(key), self.shared.secret.plain(key));
        self.allows_any_cost(LookedUp { name: &name, plain: &plain })
    }

    /// Whether a request of the key may cost more than the limit can ever admit: an override decides about it, or the limit is
    /// in shadow mode.
    #[cold]
    #[inline(never)]
    pub(super) fn allows_any_cost(&self, asked: LookedUp<'_>) -> bool {
        self.is_shadow() || self.overridden(asked, 0).is_some()
    }

    /// Decides about a request of `key` of any cost, as [`decide_for`](Self::decide_for).
    ///
    /// # Errors
    ///
    /// Those of [`decide_above_max`](Self::decide_above_max).
    #[inline(always)]
    pub(super) fn decide_n_for<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        if cost <= self.cost_max() {
            return Ok(self.decide_for(key, cost));
        }
        // It is not returned as it is: a caller need not build the parts of other decisions that it does not read.
        let told = self.decide_above_max_for(key, cost)?;
        Ok(told)
    }

    /// Decides about a request that costs more than the limit can ever admit, and charges nothing: an override decides, or shadow
    /// mode makes it a denial that lets the request go on.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if neither is there.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_above_max(
        &self,
        asked: LookedUp<'_>,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        if let Some(decision) = self.overridden(asked, cost) {
            return Ok(decision);
        }
        if self.is_shadow() {
            self.state.count_denied();
            return Ok(self.deny_above_max(asked, cost));
        }
        let (limit, max) = (self.name(), self.cost_max());
        Err(CheckError::CostTooHigh { limit, cost, max })
    }

    /// The same for a key that is not written yet.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_above_max_for<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        let (name, plain) = (self.shared.secret.name(key), self.shared.secret.plain(key));
        self.decide_above_max(LookedUp { name: &name, plain: &plain }, cost)
    }

    /// Denies a request that costs more than the limit can ever admit; in shadow mode it goes on. The rest of the decision is a
    /// look at the key, of an exact limit at this node's share.
    #[cold]
    #[inline(never)]
    pub(super) fn deny_above_max(&self, asked: LookedUp<'_>, cost: u32) -> Decision {
        let look = self.planned(asked).decide(Target::key(asked.name), 0);
        let denied = Decision { allowed: false, sure: true, cost, ..look };
        denied.shadowed(self.is_shadow())
    }
}

impl Handle {
    /// As [`ActiveLimit::decide_n_for`].
    #[inline(always)]
    pub(super) fn decide_n(&self, cost: u32) -> Result<Decision, CheckError> {
        if cost <= self.limit.cost_max() {
            return Ok(self.decide(cost));
        }
        let told = self.limit.decide_above_max(self.looked_up(), cost)?;
        Ok(told)
    }
}
