//! The resolver that names the plans of keys.

use std::fmt;
use std::time::Duration;

use super::Builder;
use crate::driver::plan_resolver::PlanResolver;

impl Builder {
    /// Lets `resolve` name the [plans](crate::Limit::plan) of a limit's keys: of those whose callers name none and that no
    /// [override](crate::Overrides) rules. It gets the bytes of a key before they are [hashed](crate::Hashed), and returns the
    /// name of the key's plan, or `None` for the limit's own quota, the default plan.
    ///
    /// No decision waits for it. The first request of a key asks for its plan in the background, and until there is an answer
    /// the key has the default plan. An answer holds for `ttl`; the first request after that asks again, and meanwhile the old
    /// answer holds. A key that comes under another plan so [keeps what it has](crate::ActiveLimit::plan).
    ///
    /// - If it fails, panics or takes longer than [`PLAN_RESOLVER_TIMEOUT`](crate::PLAN_RESOLVER_TIMEOUT), what it said last holds, and the
    ///   key is asked for again [`PLAN_RESOLVER_PAUSE`](crate::PLAN_RESOLVER_PAUSE) later at the earliest, or after `ttl` if that is shorter.
    ///   [`Event::PlanResolverFailed`](crate::Event::PlanResolverFailed) says why.
    /// - A key for which it names a plan that the limit does not have has the default plan
    ///   ([`Event::PlanNotKnown`](crate::Event::PlanNotKnown)).
    /// - There is one call for a key at a time; at most [`PLAN_RESOLVER_CALLS_MAX`](crate::PLAN_RESOLVER_CALLS_MAX) are under way for a limit
    ///   and at most [`PLAN_RESOLVER_WAITING_MAX`](crate::PLAN_RESOLVER_WAITING_MAX) keys wait for theirs. The plans of
    ///   [`max_keys`](Self::max_keys) keys of each limit are kept at most. A key for which there is no room has what is known of it,
    ///   or the default plan, until a later request finds room; `not_asked` of
    ///   [`Event::PlansResolved`](crate::Event::PlansResolved) counts these.
    ///
    /// It runs on the limiter's runtime, or on the thread that the limiter has without one, and must not block.
    ///
    /// A limiter that is built with a resolver of a limit that it does not have, that has no plans or another resolver, or with a `ttl`
    /// that is not 1 ms to 366 days, fails with a [`ConfigError`](crate::ConfigError) that names field and value. In an
    /// [update](crate::Limiter::update) a resolver stays, and what it said is looked up among the new plans.
    ///
    /// Cost: a decision of the limit looks its key up once more, and through the plans for the name; some 120 bytes a key, and 128 kB
    /// a limit. Other limits pay nothing.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// // As a database would.
    /// let customers = Arc::new(HashMap::from([(b"acme".to_vec(), "pro".to_owned())]));
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("api", Quota::per_minute(60)).plan("pro", Quota::per_second(50)))
    ///     .resolve_plans("api", Duration::from_secs(60), move |key| {
    ///         let customers = customers.clone();
    ///         async move { Ok::<_, std::io::Error>(customers.get(&key).cloned()) }
    ///     })
    ///     .build()?;
    /// let api = limiter.limit("api")?;
    /// assert_eq!(api.check("acme").quota(), Quota::per_minute(60));
    /// while api.check_n("acme", 0)?.quota() != Quota::per_second(50) {
    ///     tokio::time::sleep(Duration::from_millis(1)).await;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resolve_plans<A, E>(
        mut self,
        limit: impl Into<String>,
        ttl: Duration,
        resolve: impl Fn(Vec<u8>) -> A + Send + Sync + 'static,
    ) -> Self
    where
        A: Future<Output = Result<Option<String>, E>> + Send + 'static,
        E: fmt::Display,
    {
        self.resolvers.push(PlanResolver::new(limit.into(), ttl, resolve));
        self
    }
}
