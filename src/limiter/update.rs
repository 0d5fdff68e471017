//! Limits that change while they run.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use super::{ActiveLimit, Limiter};
use crate::driver::{LimitParts, LimitState, Query, Updated};
use crate::error::{ConfigError, NO_LIMITS};
use crate::limit::Limit;

impl Limiter {
    /// Takes a whole new set of limits while they run: those of a known name change, others are added, and those that are not among
    /// them are removed. If one is refused, nothing changes.
    ///
    /// A limit of a known name changes its quota, plans, [version](Limit::version), [credit](Limit::credit),
    /// [switch](Limit::switch) and [`block_for`](Limit::block_for). A key keeps what it has, at most its new burst, and from then
    /// on gets the new rate; windows keep what was spent in them. So no update gives a key a fresh burst, and none leaves it
    /// denied for longer than its new quota and its debt explain. Keys of a plan that there is no more are limited by its last
    /// quota for as long as callers hold that plan.
    ///
    /// An added limit has no [resolver of plans](crate::Builder::resolve_plans). Of [`max_keys`](crate::Builder::max_keys), half is
    /// split evenly among the limits of the builder; an added limit has keys of the other half to itself, if they are free: the
    /// first an eighth of `max_keys`, the tenth a 440th. No more than 1000 limits can be added to a limiter.
    ///
    /// A removed limit is not found any more. Whoever holds it, or a handle, group or layer of it, goes on under its last
    /// definition, which [`Event::Decisions`](crate::Event::Decisions) and the metric `tidegate_removed_limit_decisions_total`
    /// tell, and its overrides stay in force. Its keys stay in memory until others need their room. An update that names it again
    /// brings it back: its keys have what they had.
    ///
    /// Quotas, plans and `block_for` hold on this node when this returns, also for limits, plans, handles, groups and layers that
    /// callers hold from before; switch, credit and overrides a moment later, when the limiter's task has run. Another thread may see
    /// a part of an update while this runs. A layer learns of added plans and limits only when it is made anew. Other nodes keep
    /// their limits until they are updated too: until then each key is under the quota of the node that began to use the key last,
    /// as with [plans](ActiveLimit::plan). Nobody has to count [versions](Limit::version). Concurrency limits are not part of it.
    ///
    /// Cost: what callers hold from before takes a lock and raises counters of owners at each decision from then on; ask the
    /// limiter for it again to avoid that. Each new quota takes some 2 kB until the process ends, and each added limit takes what
    /// an empty one does until the limiter is dropped.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`] names field and value, and nothing has changed:
    ///
    /// - [`DuplicateLimit`](ConfigError::DuplicateLimit): a name comes twice, or is that of a concurrency limit.
    /// - [`Limit`](ConfigError::Limit): a value cannot be kept, the units of the limit cannot hold a quota, a version is lower
    ///   than the present one, or the field is one that does not change while the limit runs. The quota of a hybrid leaky bucket
    ///   that nodes share does not. This holds for removed limits too: another limit takes another name.
    /// - [`Limiter`](ConfigError::Limiter): no limit is left, there are more than 1000 to be added, or no memory for their keys.
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_second(100))).build()?;
    /// let api = limiter.limit("api")?;
    /// for _ in 0..70 {
    ///     assert!(api.check("user:42").is_allowed());
    /// }
    /// limiter.update([
    ///     Limit::new("api", Quota::per_second(20)),
    ///     Limit::new("search", Quota::per_minute(10)),
    /// ])?;
    /// assert_eq!((api.check("user:42").remaining(), api.check("new").remaining()), (19, 19));
    /// assert!(limiter.limit("search")?.check("user:42").is_allowed());
    /// limiter.update([Limit::new("api", Quota::per_second(100))])?;
    /// assert!(api.check("user:42").remaining() < 20, "no fresh burst");
    /// assert!(limiter.limit("search").is_err());
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub fn update(&self, limits: impl IntoIterator<Item = Limit>) -> Result<(), ConfigError> {
        let limits = Vec::from_iter(limits);
        // Nobody else updates between the look at what is present and the change.
        let node_terms = self.shared.node_terms.lock().unwrap_or_else(PoisonError::into_inner);
        let node = &self.shared.node;
        let names = self.names_of_update(&limits)?;
        let (mut changed, mut added) = (Vec::new(), Vec::new());
        for limit in &limits {
            let Some(state) = node.limits.ever_named(limit.name()) else {
                added.push(LimitParts::new(limit, *node_terms, None)?);
                continue;
            };
            let present = state.definition();
            if *limit != present.limit || state.is_removed() {
                limit.validate_update(&present.limit)?;
                let parts = LimitParts::new(limit, *node_terms, Some(&present.info.terms))?;
                changed.push((state, parts));
            }
        }
        let states = node.make_limits(&added)?;
        // From here on nothing can fail.
        for (state, parts) in &changed {
            state.update(parts);
            state.set_removed(false);
        }
        let is_left_out = |state: &&Arc<LimitState>| !names.contains(&*state.name);
        let removed: Vec<u32> =
            node.limits.present().filter(is_left_out).map(|state| state.index).collect();
        for index in &removed {
            node.limits.get(*index).into_iter().for_each(|state| state.set_removed(true));
        }
        let changed = changed.iter().map(|(state, parts)| (state.index, parts.config())).collect();
        let added = states.iter().map(|state| state.index).collect();
        node.limits.add(states);
        // A limiter whose task has ended decides by what it holds.
        let updated = Query::Updated(Updated { changed, added, removed });
        let _ = self.shared.driver.queries.send(updated);
        Ok(())
    }

    /// The names of the limits of an update, each once.
    fn names_of_update<'a>(&self, limits: &'a [Limit]) -> Result<HashSet<&'a str>, ConfigError> {
        let permits = &self.shared.node.permits.limits;
        let of_permits: HashSet<&str> = permits.iter().map(|permits| permits.name()).collect();
        let mut names = HashSet::new();
        for name in limits.iter().map(Limit::name) {
            if !names.insert(name) || of_permits.contains(name) {
                return Err(ConfigError::DuplicateLimit(name.to_owned()));
            }
        }
        if names.is_empty() && permits.is_empty() {
            let reason = NO_LIMITS;
            return Err(ConfigError::Limiter { field: "limits", value: "none".to_owned(), reason });
        }
        Ok(names)
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
    pub(super) fn cost_max(&self) -> u32 {
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
