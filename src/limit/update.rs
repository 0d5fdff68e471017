//! Another definition in the place of a limit that runs.

use super::{Limit, Mode, Terms};
use crate::algorithm::KeyRule;
use crate::error::ConfigError;

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
    /// Checks that this can take the place of `present`: an update changes quotas, plans, version, credit, switch and block.
    pub(crate) fn validate_update(&self, present: &Self) -> Result<(), ConfigError> {
        let fixed = |field, value: String| {
            let reason = "is not changed while the limit runs: build another limiter, or give the limit another name";
            Err(self.invalid(field, value, reason))
        };
        if self.mode != present.mode {
            return fixed("mode", format!("{:?}", self.mode));
        }
        if self.rule.algorithm() != present.rule.algorithm() {
            return fixed("algorithm", self.rule.algorithm().to_owned());
        }
        if !self.has_same_windows(present.rule)? {
            return fixed("period", format!("{:?}", self.quota().period()));
        }
        if self.sync != present.sync {
            return fixed("sync", format!("{:?}", self.sync));
        }
        if self.outage != present.outage {
            return fixed("outage", format!("{:?}", self.outage));
        }
        for (field, value, of_present) in
            [("grace", self.grace, present.grace), ("max_wait", self.max_wait, present.max_wait)]
        {
            if value != of_present {
                return fixed(field, format!("{value:?}"));
            }
        }
        if self.version < present.version {
            let reason =
                "the present version is higher: an update may raise it, or leave it as it is";
            return Err(self.invalid("version", self.version.to_string(), reason));
        }
        if self.max_waiting != present.max_waiting {
            return fixed("max_waiting", self.max_waiting.to_string());
        }
        Ok(())
    }

    /// The numbers of this definition in the units that the limit has, which are those of its `present` terms.
    pub(crate) fn in_units_of(
        &self,
        mut terms: Terms,
        present: &Terms,
    ) -> Result<Terms, ConfigError> {
        let refused = || self.invalid("quota", format!("{:?}", self.quota()), UNITS_REASON);
        // States on this node: the store has its own of an exact limit.
        if let Some(KeyRule::Turn(here)) = present.share.or(present.key_rule)
            && let Some(KeyRule::Turn(own)) = terms.key_rule
        {
            if terms.mode == Mode::Hybrid && terms.key_rule != present.key_rule {
                // Nodes hold slots of one grid.
                return Err(refused());
            }
            let own_here = KeyRule::Turn(own.at_rate(here.scale().rate).ok_or_else(refused)?);
            match &mut terms.share {
                Some(share) => *share = own_here.share(terms.credit_rule.uncounted),
                None => terms.key_rule = Some(own_here),
            }
        }
        if present.key_rule.is_none() {
            let own = terms.stored_scale.in_own_units(present.scale.token);
            let own = own.filter(|own| !own.is_faster_than(&terms.stored_scale));
            terms.scale = own.ok_or_else(refused)?;
        }
        Ok(terms)
    }
}
