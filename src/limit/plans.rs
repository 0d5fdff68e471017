//! The plans of a limit: quotas of their own for some keys.

use std::collections::HashSet;

use super::{Limit, Mode, NAME_REASON, Terms, is_valid_name};
use crate::algorithm::{KeyRule, Rule};
use crate::error::ConfigError;
use crate::quota::Scale;

/// The most plans of a limit.
pub const PLANS_MAX: usize = 1000;

/// A named quota of a limit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) rule: Rule,
}

impl Limit {
    /// A plan: what keys have whose callers ask by [`ActiveLimit::plan`](crate::ActiveLimit::plan). All others have the limit's
    /// own quota, the default plan.
    ///
    /// A plan has the limit's algorithm, and of windows and logs the same period. Everything but the quota is the limit's. A
    /// hybrid [`LeakyBucket`](crate::LeakyBucket) has no plans. A limiter that is built with a plan that cannot be kept, or with
    /// more than [`PLANS_MAX`], fails with a [`ConfigError`] that names the field `plan`.
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("api", Quota::per_minute(60)).plan("pro", Quota::per_second(50)))
    ///     .build()?;
    /// let (free, pro) = (limiter.limit("api")?, limiter.limit("api")?.plan("pro")?);
    /// assert_eq!(free.check("user:1").burst(), 60);
    /// assert_eq!(pro.check("user:2").quota(), Quota::per_second(50));
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn plan(mut self, name: impl Into<String>, rule: impl Into<Rule>) -> Self {
        self.plans.push(Plan { name: name.into(), rule: rule.into() });
        self
    }

    /// The names of the limit's plans, without the default one.
    pub fn plan_names(&self) -> impl Iterator<Item = &str> {
        self.plans.iter().map(|plan| &*plan.name)
    }

    /// The limit's plans by their names, without the default one.
    pub fn plans(&self) -> impl Iterator<Item = (&str, Rule)> {
        self.plans.iter().map(|plan| (&*plan.name, plan.rule))
    }

    pub(crate) fn has_plans(&self) -> bool {
        !self.plans.is_empty()
    }

    /// The limit as if its own quota were that of a plan, and that plan's its own.
    pub(crate) fn under(&self, plan: &Plan) -> Self {
        let mut limit = self.clone();
        for other in limit.plans.iter_mut().filter(|other| other.name == plan.name) {
            other.rule = self.rule;
        }
        Self { rule: plan.rule, ..limit }
    }

    /// Its own rule, and those of its plans.
    pub(crate) fn rules(&self) -> impl Iterator<Item = Rule> {
        [self.rule].into_iter().chain(self.plans.iter().map(|plan| plan.rule))
    }

    /// The same limit with another rule, and without plans.
    pub(crate) fn with_rule(&self, rule: Rule) -> Self {
        Self { rule, plans: Vec::new(), name: self.name.clone(), ..*self }
    }

    /// Checks the plans, and changes the terms to units that all plans can be kept in.
    pub(super) fn fit_plans(&self, terms: &mut Terms, is_alone: bool) -> Result<(), ConfigError> {
        if !self.has_plans() {
            return Ok(());
        }
        self.validate_plans(is_alone)?;
        if terms.mode != Mode::Hybrid {
            return Ok(());
        }
        let scales = self.leased_scales()?;
        let fitted = terms.scale.in_units_of(Scale::common_token(&scales));
        terms.scale = fitted.ok_or_else(|| {
            let reason = "the plans' tokens have no common unit that leases can be counted in: choose rounder numbers, \
                          or numbers that are nearer to each other";
            self.invalid("plan", format!("{:?}", self.quota()), reason)
        })?;
        terms.stored_scale = terms.scale;
        Ok(())
    }

    /// The quotas of the limit and of its plans, each in units of its own.
    fn leased_scales(&self) -> Result<Vec<Scale>, ConfigError> {
        self.rules().map(|rule| Ok(self.with_rule(rule).validate_hybrid(1)?.scale)).collect()
    }

    pub(crate) fn validate_plans(&self, is_alone: bool) -> Result<(), ConfigError> {
        if self.plans.len() > PLANS_MAX {
            return Err(self.invalid("plan", self.plans.len().to_string(), "at most 1000 plans"));
        }
        let nodes_share = self.mode == Mode::Hybrid && !is_alone;
        let has_one_grid = nodes_share && matches!(self.rule, Rule::LeakyBucket(_));
        if let Some(plan) = self.plans.first().filter(|_| has_one_grid) {
            let reason = "slots that nodes share are of one grid, and have no plans: call exact() or local()";
            return Err(self.invalid("plan", plan.name.clone(), reason));
        }
        let mut names = HashSet::new();
        for Plan { name, rule } in &self.plans {
            if !is_valid_name(name) {
                return Err(self.invalid("plan", name.clone(), NAME_REASON));
            }
            if !names.insert(name) {
                return Err(self.invalid("plan", name.clone(), "is defined twice"));
            }
            if self.rule.algorithm() != rule.algorithm() || !self.has_same_windows(*rule)? {
                let reason = "a plan has the limit's algorithm, and the same windows";
                return Err(self.invalid("plan", format!("{name} = {rule:?}"), reason));
            }
        }
        Ok(())
    }

    /// Whether `other` counts in the same windows, if in any.
    pub(super) fn has_same_windows(&self, other: Rule) -> Result<bool, ConfigError> {
        if matches!(self.rule, Rule::TokenBucket(_) | Rule::LeakyBucket(_)) {
            // They have none.
            return Ok(self.rule.algorithm() == other.algorithm());
        }
        Ok(match (self.key_rule_of(self.rule)?, self.key_rule_of(other)?) {
            (KeyRule::Window(own), KeyRule::Window(other)) => {
                (own.period_us, own.is_sliding, own.calendar)
                    == (other.period_us, other.is_sliding, other.calendar)
            }
            (KeyRule::Log(own), KeyRule::Log(other)) => own.period_us == other.period_us,
            _ => false,
        })
    }

    fn key_rule_of(&self, rule: Rule) -> Result<KeyRule, ConfigError> {
        rule.key_rule(&self.name, true)
    }

    pub(super) fn invalid(
        &self,
        field: &'static str,
        value: String,
        reason: &'static str,
    ) -> ConfigError {
        ConfigError::Limit { limit: self.name.clone(), field, value, reason }
    }
}
