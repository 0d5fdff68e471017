//! The plans of a limit, as callers name them.

use std::borrow::Cow;

use super::{ActiveLimit, AsyncLimit};
use crate::error::ConfigError;
use crate::limit::LimitInfo;

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
    /// Cost: looks through the plans; two counters of owners go up.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if the limit has no such plan at present.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        let definition = self.state.definition();
        let info = definition.plan(name).ok_or_else(|| ConfigError::UnknownPlan {
            limit: self.name().to_owned(),
            name: name.to_owned(),
            known: definition.plan_names(),
        })?;
        Ok(Self { definition, info, plan: info.number, ..self.clone() })
    }

    /// The name of the plan that requests are asked by; `None` is the limit's own quota.
    pub fn plan_name(&self) -> Option<&'static str> {
        self.info.plan_name()
    }

    /// The limit under another of its plans, or as it is.
    pub(super) fn under(&self, info: &'static LimitInfo) -> Cow<'_, Self> {
        if std::ptr::eq(info, self.info) {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self { info, plan: info.number, ..self.clone() })
    }

    /// The limit under each of its plans.
    #[cfg(feature = "tower")]
    pub(crate) fn all_plans(&self) -> Vec<Self> {
        let definition = self.state.definition();
        let under = |info: &'static LimitInfo| {
            let definition = definition.clone();
            Self { definition, info, plan: info.number, ..self.clone() }
        };
        definition.plans.iter().copied().map(under).collect()
    }
}

impl AsyncLimit {
    /// The limit under one of its plans: see [`ActiveLimit::plan`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if the limit has no such plan at present.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        self.0.plan(name).map(Self)
    }

    /// The name of the plan that requests are asked by; `None` is the limit's own quota.
    pub fn plan_name(&self) -> Option<&'static str> {
        self.0.plan_name()
    }
}
