//! The plans of a limit, as callers name them.

use super::{ActiveLimit, AsyncLimit};
use crate::error::ConfigError;

impl ActiveLimit {
    /// The limit under one of its [plans](crate::Limit::plan): requests by it are limited by that plan's quota. Ask for it once
    /// and keep it.
    ///
    /// A key has one state, whatever plan it is asked by. Asked by another plan than before, it keeps what it has, at most the
    /// burst of the new plan, and from then on gets the new plan's rate; windows keep what was spent in them. So no
    /// change gives a key a fresh burst, and none leaves it denied for longer than its new plan and its debt explain. Where
    /// nodes share the limit, the plan that was named last holds on all of them, at their next report; a node whose callers
    /// go on naming another one says so ([`Event::PlansDiffer`](crate::Event::PlansDiffer)).
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if the limit was built without it.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        let plans = &self.state.plans;
        let is_named = |plan: &str| plan == name;
        let info = plans.iter().find(|info| info.plan.as_deref().is_some_and(is_named));
        let Some(&info) = info else {
            let known: Vec<&str> = plans.iter().filter_map(|info| info.plan.as_deref()).collect();
            return Err(ConfigError::UnknownPlan {
                limit: self.name().to_owned(),
                name: name.to_owned(),
                known: if known.is_empty() { "none".to_owned() } else { known.join(", ") },
            });
        };
        Ok(Self { info, ..self.clone() })
    }

    /// The name of the plan that requests are limited by; `None` is the limit's own quota.
    pub fn plan_name(&self) -> Option<&'static str> {
        self.info.plan.as_deref()
    }

    /// The limit under each of its plans.
    #[cfg(feature = "tower")]
    pub(crate) fn all_plans(&self) -> Vec<Self> {
        self.state.plans.iter().map(|&info| Self { info, ..self.clone() }).collect()
    }
}

impl AsyncLimit {
    /// The limit under one of its plans: see [`ActiveLimit::plan`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if the limit was built without it.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        self.0.plan(name).map(Self)
    }

    /// The name of the plan that requests are limited by; `None` is the limit's own quota.
    pub fn plan_name(&self) -> Option<&'static str> {
        self.0.plan_name()
    }
}
