//! What requests bring themselves: a quota, and tokens of other requests that go back.

use super::overrides::LookedUp;
use super::settle::Allowed;
use super::{AsyncLimit, Target};
use crate::algorithm::Rule;
use crate::bucket::OVERFLOW;
use crate::driver::{AloneBuckets, Buckets};
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

    /// Whether the store is away that decides about the limit.
    pub(crate) fn is_on_policy(&self) -> bool {
        self.0.state.is_on_policy()
    }

    /// Whether nodes share the limit by leases, so that this one may know nothing of a key.
    pub(crate) fn is_leased(&self) -> bool {
        matches!(self.0.state.buckets, Buckets::Leased(_))
    }

    /// Whether tokens can go back of which nobody knows when they were spent.
    pub(crate) fn can_give_back(&self) -> bool {
        match self.rule() {
            Rule::TokenBucket(_) | Rule::FixedWindow(_) | Rule::SlidingWindow(_) => true,
            Rule::SlidingLog(_) => self.is_leased(),
            Rule::LeakyBucket(_) => false,
        }
    }

    /// Charges `tokens` whatever the key has left: the rest is owed. Not of a leaky bucket. Where the limit is off, or an
    /// override allows the key, nothing is charged. `plain` is the key before it was hashed, if that matters.
    pub(crate) fn charge_in_full(&self, key: &[u8], plain: Option<&[u8]>, tokens: u32) {
        let asked = LookedUp { name: key, plain: plain.unwrap_or(key) };
        let is_free = self.0.overridden(asked, 0).is_some_and(|decision| decision.is_allowed());
        if !is_free {
            let limit = self.0.planned(asked);
            limit.charge_pinned(&limit.hold(key).key, tokens);
        }
    }

    /// Gives back `tokens` of requests that nobody remembers: up to what was spent, in the present window where there are
    /// any. Only where they [can go back](Self::can_give_back). `plain` is the key before it was hashed, if that matters.
    pub(crate) fn give_back(&self, key: &[u8], plain: Option<&[u8]>, tokens: u32) {
        let asked = LookedUp { name: key, plain: plain.unwrap_or(key) };
        if self.0.overridden(asked, 0).is_some_and(|decision| decision.is_allowed()) {
            // Nothing is charged.
            return;
        }
        let limit = self.0.planned(asked);
        let (handle, now) = (limit.hold(key), limit.now());
        if limit.is_decided_by_store() {
            let at_us = now.as_micros().saturating_add(limit.state.origin_us);
            return limit.tell_store(key, tokens, Deed::Return(SpentAt { at_us, ahead: 0 }));
        }
        let place = handle.key.place;
        // A key without a place shares another bucket.
        if place == OVERFLOW {
            return;
        }
        match &limit.state.buckets {
            Buckets::Leased(_) => {
                // Some of it may be what an outage policy allowed.
                let settlement = Settlement::unused(tokens, false);
                limit.settle_pinned(&handle.key, settlement, now);
            }
            Buckets::Alone(AloneBuckets::Windows(local)) => {
                let decided = limit.state.window_time(local, now);
                local.table.at(place).take_back_at_most(local.rule_of(limit.info), tokens, decided);
            }
            Buckets::Alone(_) => {
                let decision = limit.decide(Target::key(key), 0);
                limit.give_back_pinned(&handle.key, &Allowed { decision, asked: now }, tokens);
            }
        }
    }
}
