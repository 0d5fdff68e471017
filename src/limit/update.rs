//! Another definition in the place of a limit that runs.

use super::{Limit, Mode, Terms};
use crate::algorithm::KeyRule;
use crate::error::ConfigError;

/// What a limit is told whose units cannot hold a quota.
const UNITS_REASON: &str = "a limit that runs cannot count this quota in the units that it has: choose a number that is nearer to the \
                            present one, or build another limiter";

/// What a limit's numbers on a node depend on, beside the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeTerms {
    pub has_store: bool,
    pub max_nodes: Option<u32>,
    /// The number of nodes until the store has counted them.
    pub uncounted: u32,
}

impl NodeTerms {
    /// The numbers of this limit.
    pub(crate) fn of(&self, limit: &Limit) -> Result<Terms, ConfigError> {
        let is_alone = !self.has_store || limit.mode == Mode::Local;
        limit.validate_on_node(is_alone, self.max_nodes, self.uncounted)
    }
}

impl Limit {
    /// Checks that this can take the place of `running`: an update changes quotas, plans, version, credit, switch and block.
    pub(crate) fn validate_update(&self, running: &Self) -> Result<(), ConfigError> {
        let fixed = |field, value: String| {
            let reason = "is not changed while the limit runs: build another limiter, or give the limit another name";
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        if self.mode != running.mode {
            return fixed("mode", format!("{:?}", self.mode));
        }
        if self.rule.algorithm() != running.rule.algorithm() {
            return fixed("algorithm", self.rule.algorithm().to_owned());
        }
        if !self.has_same_windows(running.rule)? {
            return fixed("period", format!("{:?}", self.quota().period()));
        }
        if self.sync != running.sync {
            return fixed("sync", format!("{:?}", self.sync));
        }
        if self.outage != running.outage {
            return fixed("outage", format!("{:?}", self.outage));
        }
        for (field, value, running) in
            [("grace", self.grace, running.grace), ("max_wait", self.max_wait, running.max_wait)]
        {
            if value != running {
                return fixed(field, format!("{value:?}"));
            }
        }
        if self.version < running.version {
            let (limit, value) = (self.name.clone(), self.version.to_string());
            let reason =
                "the version that runs is higher: an update may raise it, or leave it as it is";
            return Err(ConfigError::Limit { limit, field: "version", value, reason });
        }
        if self.max_waiting != running.max_waiting {
            return fixed("max_waiting", self.max_waiting.to_string());
        }
        Ok(())
    }

    /// The numbers of this definition in the units that the limit has, which are those of the terms `running`.
    pub(crate) fn in_units_of(
        &self,
        mut terms: Terms,
        running: &Terms,
    ) -> Result<Terms, ConfigError> {
        let refused = || ConfigError::Limit {
            limit: self.name.clone(),
            field: "quota",
            value: format!("{:?}", self.quota()),
            reason: UNITS_REASON,
        };
        // States on this node: the store has its own of an exact limit.
        if let Some(KeyRule::Turn(here)) = running.share.or(running.key_rule)
            && let Some(KeyRule::Turn(own)) = terms.key_rule
        {
            if terms.mode == Mode::Hybrid && terms.key_rule != running.key_rule {
                // Nodes hold slots of one grid.
                return Err(refused());
            }
            let own_here = KeyRule::Turn(own.at_rate(here.scale().rate).ok_or_else(refused)?);
            match &mut terms.share {
                Some(share) => *share = own_here.share(terms.credit_rule.uncounted),
                None => terms.key_rule = Some(own_here),
            }
        }
        if running.key_rule.is_none() {
            let own = terms.stored_scale.in_own_units(running.scale.token);
            let own = own.filter(|own| !own.is_faster_than(&terms.stored_scale));
            terms.scale = own.ok_or_else(refused)?;
        }
        Ok(terms)
    }
}
