//! Quotas that overrides give keys.

use super::{Limit, Mode, OVERRIDE_QUOTAS_MAX};
use crate::algorithm::Rule;
use crate::error::ConfigError;
use crate::quota::Quota;

const PERIOD_REASON: &str =
    "keys of a limit have the same windows: name the limit's period, with other tokens";
const WINDOW_BURST_REASON: &str = "a window has no burst beside its tokens: name none";
const LEAKY_BURST_REASON: &str = "a leaky bucket has a burst of 1: name none";
const SLOTS_REASON: &str = "slots that nodes share are of one grid, and no key has a quota of its own: call exact() or local()";
const TOO_MANY_REASON: &str = "this process has had 100000 different quotas of overrides, and keeps each: give keys quotas that others have";

impl Limit {
    /// The limit as it is for keys that have this quota by override: with its algorithm, and without plans. `has_store`: on a
    /// node that has one.
    pub(crate) fn by_override(&self, quota: Quota, has_store: bool) -> Result<Self, ConfigError> {
        let is_shared = has_store && self.mode == Mode::Hybrid;
        if is_shared && matches!(self.rule, Rule::LeakyBucket(_)) {
            return Err(self.invalid("quota", quota.to_string(), SLOTS_REASON));
        }
        let (own, burst) = (self.quota(), quota.burst_tokens());
        let has_no_burst = burst == quota.tokens();
        let refusal = match self.rule {
            Rule::TokenBucket(_) => None,
            Rule::LeakyBucket(_) => (!has_no_burst && burst != 1).then_some(LEAKY_BURST_REASON),
            _ if quota.period() != own.period() => {
                let period = format!("{:?}", quota.period());
                return Err(self.invalid("quota.period", period, PERIOD_REASON));
            }
            _ => (!has_no_burst).then_some(WINDOW_BURST_REASON),
        };
        if let Some(reason) = refusal {
            return Err(self.invalid("quota.burst", burst.to_string(), reason));
        }
        Ok(self.with_rule(self.rule.with_quota(quota)))
    }

    /// The process has had [`OVERRIDE_QUOTAS_MAX`] others.
    pub(crate) fn too_many_quotas(&self, quota: Quota) -> ConfigError {
        const { assert!(OVERRIDE_QUOTAS_MAX == 100_000, "the reason says so") };
        self.invalid("quota", quota.to_string(), TOO_MANY_REASON)
    }
}
