//! What requests bring themselves: a quota, and tokens of other requests that go back.

use super::settle::Allowed;
use super::{AsyncLimit, Target};
use crate::algorithm::Rule;
use crate::bucket::OVERFLOW;
use crate::driver::Buckets;
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::store::exact::{Deed, SpentAt};
use crate::sync::Settlement;

impl AsyncLimit {
    /// The limit for keys that have this quota, as by an override. Not of a limit that nodes share by leases: the engine does
    /// not know the quota.
    pub(crate) fn with_quota(&self, quota: Quota) -> Result<Self, ConfigError> {
        let limit = self.0.current();
        let info = limit.definition.by_override(quota)?;
        limit.state.overrides.note(info);
        Ok(Self(limit.under(info).into_owned()))
    }

    /// Whether tokens can go back of which nobody knows when they were spent.
    pub(crate) fn can_give_back(&self) -> bool {
        let is_leased = matches!(self.0.state.buckets, Buckets::Leased(_));
        match self.rule() {
            Rule::TokenBucket(_) | Rule::FixedWindow(_) | Rule::SlidingWindow(_) => true,
            Rule::SlidingLog(_) => is_leased,
            Rule::LeakyBucket(_) => false,
        }
    }

    /// Gives back `tokens` of requests that nobody remembers: up to what was spent, in the present window where there are
    /// any. Only where they [can go back](Self::can_give_back).
    pub(crate) fn give_back(&self, key: &[u8], tokens: u32) {
        let limit = self.0.current();
        let (handle, now) = (limit.hold(key), limit.now());
        if limit.is_decided_by_store() {
            let at_us = now.as_micros().saturating_add(limit.state.origin_us);
            return limit.tell_store(key, tokens, Deed::Return(SpentAt { at_us, ahead: 0 }));
        }
        // A key without a place shares another bucket.
        if handle.key.place == OVERFLOW {
            return;
        }
        if matches!(limit.state.buckets, Buckets::Leased(_)) {
            let settlement = Settlement::Unused { tokens, sure: true };
            return limit.settle_pinned(&handle.key, settlement, now);
        }
        let decision = limit.decide(Target::key(key), 0);
        let spent = decision.burst().saturating_sub(decision.remaining());
        let tokens = tokens.min(u32::try_from(spent).unwrap_or(u32::MAX));
        limit.give_back_pinned(&handle.key, &Allowed { decision, asked: now }, tokens);
    }
}
