//! What a limit is at present, which an update replaces while the limit runs.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::algorithm::Rule;
use crate::error::ConfigError;
use crate::limit::{Limit, LimitInfo, NodeTerms, Plan, QuotaOf, Terms};
use crate::quota::{Quota, Scale};
use crate::sync::LimitConfig;

/// What a [`Definition`] is made of: a limit as the user wrote it, and its numbers and those of its plans on a node.
pub(crate) struct LimitParts<'a> {
    pub(crate) limit: &'a Limit,
    pub(crate) node_terms: NodeTerms,
    pub(crate) terms: Terms,
    pub(crate) plans: Vec<(&'a str, Rule, Terms)>,
}

impl<'a> LimitParts<'a> {
    /// The limit with the numbers that it and its plans have on a node; in an update, in the units of its `present` terms.
    pub(crate) fn new(
        limit: &'a Limit,
        node_terms: NodeTerms,
        present: Option<&Terms>,
    ) -> Result<Self, ConfigError> {
        let terms_of = |limit: &Limit| {
            let terms = node_terms.of(limit)?;
            present.map_or(Ok(terms), |present| limit.in_units_of(terms, present))
        };
        let plan = |plan: &'a Plan| Ok((&*plan.name, plan.rule, terms_of(&limit.under(plan))?));
        let plans = limit.plans.iter().map(plan).collect::<Result<_, ConfigError>>()?;
        Ok(Self { limit, node_terms, terms: terms_of(limit)?, plans })
    }

    /// The definition in the place of `before`.
    pub(super) fn define(&self, before: Option<&Definition>, origin_us: u64) -> Definition {
        let (limit, is_update) = (self.limit.name(), before.is_some());
        let intern = |plan: Option<&str>, terms: &Terms, rule| {
            LimitInfo::intern(limit, (plan, is_update), terms, rule, origin_us)
        };
        let info = intern(None, &self.terms, self.limit.rule());
        let plans = self.plans.iter().map(|(name, rule, terms)| intern(Some(name), terms, *rule));
        let plans = plans.collect();
        let kept = (self.node_terms, origin_us);
        Definition::new(self.limit.clone(), kept, (info, plans), before)
    }

    pub(crate) fn config(&self) -> LimitConfig {
        let plans = self.plans.iter().map(|&(_, _, terms)| terms).collect();
        LimitConfig { name: self.limit.name().into(), terms: self.terms, plans }
    }
}

/// A limit as it was built or updated last. Callers hold the one that they found, and go on with the one in its place
/// once this one was replaced.
#[derive(Debug)]
pub(crate) struct Definition {
    pub(crate) limit: Limit,
    node_terms: NodeTerms,
    /// When the node's clock began, in microseconds since 1970.
    origin_us: u64,
    /// What decisions by the limit's own quota point to.
    pub(crate) info: &'static LimitInfo,
    /// The same for its plans.
    pub(crate) plans: Box<[&'static LimitInfo]>,
    /// Plans that there are no more, as they were last: for callers who hold them.
    removed: Box<[&'static LimitInfo]>,
    /// The quota whose keys take longest to fill, of all that the limit has had.
    pub(super) slowest: Scale,
    /// Whether decisions have to look further: the limit has overrides, a switch, `block_for` or a resolver, or another
    /// definition is in the place of this one.
    /// A hint: publishes nothing.
    looks_further: AtomicBool,
    is_replaced: AtomicBool,
}

impl Definition {
    /// `before`: in the place of that one.
    pub(super) fn new(
        limit: Limit,
        (node_terms, origin_us): (NodeTerms, u64),
        (info, plans): (&'static LimitInfo, Box<[&'static LimitInfo]>),
        before: Option<&Self>,
    ) -> Self {
        let is_removed = |known: &&LimitInfo| plans.iter().all(|plan| plan.of != known.of);
        let known = before.iter().flat_map(|before| before.plans.iter().chain(&before.removed));
        let removed = known.copied().filter(is_removed).collect();
        let scales = plans.iter().chain([&info]).map(|info| info.terms.scale);
        let slowest = scales.chain(before.map(|before| before.slowest)).max_by_key(Scale::fill_us);
        Self {
            limit,
            node_terms,
            origin_us,
            info,
            plans,
            removed,
            slowest: slowest.unwrap_or(info.terms.scale),
            looks_further: AtomicBool::new(false),
            is_replaced: AtomicBool::new(false),
        }
    }

    /// Whether a decision has to look further than this.
    #[inline(always)]
    pub(crate) fn looks_further(&self) -> bool {
        self.looks_further.load(Ordering::Relaxed)
    }

    pub(super) fn set_looks_further(&self, looks_further: bool) {
        self.looks_further.store(looks_further, Ordering::Relaxed);
    }

    /// Whether another one is in its place.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    pub(super) fn set_replaced(&self) {
        self.is_replaced.store(true, Ordering::Relaxed);
        self.set_looks_further(true);
    }

    /// What stands here in the place of an earlier definition's `info`.
    pub(crate) fn in_place_of(&self, info: &'static LimitInfo) -> &'static LimitInfo {
        match &info.of {
            QuotaOf::Limit => self.info,
            QuotaOf::Plan(name) => {
                let plan = self.plan(name).or_else(|| named(&self.removed, name));
                plan.unwrap_or(info)
            }
            // Overrides say at each request what holds.
            QuotaOf::Override => info,
        }
    }

    /// What decisions about keys point to that have this quota by override.
    pub(crate) fn by_override(&self, quota: Quota) -> Result<&'static LimitInfo, ConfigError> {
        let limit = self.limit.by_override(quota, self.node_terms.has_store)?;
        let terms = limit.in_units_of(self.node_terms.of(&limit)?, &self.info.terms)?;
        let (name, rule) = (limit.name(), limit.rule());
        LimitInfo::intern_of_overrides(name, &terms, rule, self.origin_us)
            .ok_or_else(|| limit.too_many_quotas(quota))
    }

    /// What decisions under the plan of this name point to.
    pub(crate) fn plan(&self, name: &str) -> Option<&'static LimitInfo> {
        named(&self.plans, name)
    }

    /// The highest cost that any of its plans can admit, in tokens.
    pub(crate) fn cost_max_of_plans(&self) -> u32 {
        self.plans.iter().map(|info| info.terms.cost_max).max().unwrap_or_default()
    }

    /// What the engine needs of it.
    pub(super) fn config(&self) -> LimitConfig {
        let plans = self.plans.iter().map(|plan| plan.terms).collect();
        LimitConfig { name: self.limit.name().into(), terms: self.info.terms, plans }
    }

    /// The names of its plans, for those who asked for another.
    pub(crate) fn plan_names(&self) -> String {
        let names: Vec<&str> = self.plans.iter().filter_map(|info| info.plan_name()).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}

fn named(plans: &[&'static LimitInfo], name: &str) -> Option<&'static LimitInfo> {
    plans.iter().find(|info| info.plan_name() == Some(name)).copied()
}
