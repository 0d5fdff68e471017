//! Limits that change while they run.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::PoisonError;

use super::{ActiveLimit, Limiter};
use crate::driver::{LimitParts, Query};
use crate::error::ConfigError;
use crate::limit::Limit;

impl Limiter {
    /// Changes the limits while they run: each of `limits` takes the place of the one of its name. All of them or none.
    ///
    /// An update changes quotas, plans, [version](Limit::version), [credit](Limit::credit), [switch](Limit::switch) and
    /// [`block_for`](Limit::block_for). A key keeps what it has, at most its new burst, and from then on gets the new rate;
    /// windows keep what was spent in them. So no update gives a key a fresh burst, and none leaves it denied for longer than its
    /// new quota and its debt explain. Keys of a plan that there is no more are limited by its last quota for as long as callers
    /// hold that plan.
    ///
    /// Quotas, plans and `block_for` hold on this node when this returns, also for limits, plans, handles, groups and layers that
    /// were asked for before; switch, credit and overrides a moment later, when the limiter's task has run. A layer learns of added
    /// plans only when it is made anew. On the other nodes it does not hold until they are updated too: until then each key is
    /// under the quota of the node that began to use the key last, as with [plans](ActiveLimit::plan). Nobody has to
    /// count [versions](Limit::version). Concurrency limits are not part of it.
    ///
    /// Cost: what was asked for before an update takes a lock and raises counters of owners at each decision from then on; ask the
    /// limiter for it again to avoid that. Some 2 kB for each new quota, for as long as the process lives.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`] names field and value, and nothing has changed:
    ///
    /// - [`UnknownLimit`](ConfigError::UnknownLimit): the limiter was built without a limit of that name;
    ///   [`MissingLimit`](ConfigError::MissingLimit): one that it has is not among `limits`;
    ///   [`DuplicateLimit`](ConfigError::DuplicateLimit): a name comes twice.
    /// - [`Limit`](ConfigError::Limit): a value cannot be kept, the units of the limit cannot hold a quota, a version is lower
    ///   than the present one, or the field is one that does not change while the limit runs. The quota of a hybrid leaky bucket
    ///   that nodes share does not.
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_second(100))).build()?;
    /// let api = limiter.limit("api")?;
    /// for _ in 0..70 {
    ///     assert!(api.check("user:42").is_allowed());
    /// }
    /// limiter.update([Limit::new("api", Quota::per_second(20))])?;
    /// assert_eq!((api.check("user:42").remaining(), api.check("new").remaining()), (19, 19));
    /// limiter.update([Limit::new("api", Quota::per_second(100))])?;
    /// assert!(api.check("user:42").remaining() < 20, "no fresh burst");
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub fn update(&self, limits: impl IntoIterator<Item = Limit>) -> Result<(), ConfigError> {
        let limits = Vec::from_iter(limits);
        // Nobody else updates between the look at what is present and the change.
        let node_terms = self.shared.node_terms.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = HashSet::new();
        let mut parts = Vec::new();
        for limit in &limits {
            if !names.insert(limit.name()) {
                return Err(ConfigError::DuplicateLimit(limit.name().to_owned()));
            }
            let state = self.find(limit.name())?.state;
            let present = state.definition();
            if *limit == present.limit {
                continue;
            }
            limit.validate_update(&present.limit)?;
            let parts_of_limit = LimitParts::new(limit, *node_terms, Some(&present.info.terms))?;
            parts.push((state, parts_of_limit));
        }
        let all = &self.shared.node.limits;
        if let Some(missing) = all.iter().find(|limit| !names.contains(&*limit.name)) {
            return Err(ConfigError::MissingLimit(missing.name.to_string()));
        }
        for (state, parts) in &parts {
            state.update(parts);
        }
        let configs = parts.iter().map(|(state, parts)| (state.index, parts.config())).collect();
        // A limiter whose task has ended decides by what it holds.
        let _ = self.shared.driver.queries.send(Query::Updated(configs));
        Ok(())
    }
}

impl ActiveLimit {
    /// The limit as it is at present.
    pub(super) fn current(&self) -> Cow<'_, Self> {
        if !self.definition.is_replaced() {
            return Cow::Borrowed(self);
        }
        let definition = self.state.definition();
        let info = definition.in_place_of(self.info);
        Cow::Owned(Self { definition, info, plan: info.number, ..self.clone() })
    }

    /// The highest cost that can be admitted, in tokens.
    #[inline(always)]
    pub(crate) fn cost_max(&self) -> u32 {
        if self.looks_further() { self.cost_max_at_present() } else { self.info.terms.cost_max }
    }

    /// The same where overrides or a resolver may give keys plans, or another definition is in the place of this one.
    #[cold]
    #[inline(never)]
    fn cost_max_at_present(&self) -> u32 {
        let limit = self.current();
        let own = limit.info.terms.cost_max.max(limit.state.overrides.cost_max());
        if limit.state.may_give_plans() {
            own.max(limit.definition.cost_max_of_plans())
        } else {
            own
        }
    }
}
