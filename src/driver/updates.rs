//! Updates of the limits, as the driver takes them in.

use super::{Driver, LimitParts, LimitState, NodeState};
use crate::error::ConfigError;
use crate::overrides::Switch;
use crate::quota::Scale;
use crate::sync::{Event, LimitConfig};
use crate::time::Timestamp;

/// What an update has changed: limits by their numbers.
#[derive(Debug)]
pub(crate) struct Updated {
    /// They have other definitions, or are back after they were removed.
    pub(crate) changed: Vec<(u32, LimitConfig)>,
    pub(crate) added: Vec<u32>,
    pub(crate) removed: Vec<u32>,
}

impl Driver {
    /// Hands limits to the engine that an update has added: it must know of them before anything of theirs.
    pub(super) fn adopt_limits(&mut self, now: Timestamp) {
        while let Some(limit) = self.node.limits.get(self.engine.limits()) {
            self.engine.add(limit.definition().config(), now);
        }
    }

    /// Limits were added, have other definitions, or were removed.
    pub(super) fn updated(&mut self, Updated { changed, added, removed }: Updated, now: Timestamp) {
        for index in added {
            let limit = self.limit(index);
            self.publish(&updated_event(&limit.definition().config(), true));
            let (limit, switch) = (limit.name.clone(), limit.overrides.switch());
            if switch != Switch::On {
                self.publish(&Event::Switched { limit, switch });
            }
        }
        for (index, config) in changed {
            self.publish(&updated_event(&config, false));
            self.engine.update(index, config, now);
        }
        for index in removed {
            self.publish(&Event::Removed { limit: self.limit(index).name.clone() });
        }
        for event in self.overrides.apply_again(&self.node.limits) {
            self.publish(&event);
        }
        self.tell_quotas();
    }
}

impl NodeState {
    /// Limits that are to be added.
    pub(crate) fn make_limits(
        &self,
        limits: &[LimitParts<'_>],
    ) -> Result<Vec<LimitState>, ConfigError> {
        self.limits.make(limits, &self.budget, &self.time)
    }
}

/// Tells of a limit's own quota.
fn updated_event(LimitConfig { name, terms, .. }: &LimitConfig, is_added: bool) -> Event {
    let Scale { rate, token, burst, .. } = terms.stored_scale;
    let (burst, per_second) = (burst / token, rate as f64 * 1e6 / token as f64);
    Event::Updated { limit: name.clone(), burst, per_second, is_added }
}
