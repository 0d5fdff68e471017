//! Plan resolvers: functions of the user that name the plans of keys, and the task that calls them.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{Id, JoinError, JoinSet};

use super::clock::TimeSource;
use super::limit_state::LimitState;
use super::resolved_plans::{Outcome, PlanAsk, ResolvedPlans};
use crate::error::ConfigError;
use crate::sync::Event;
use crate::time::{Timestamp, micros};

/// The longest that a [plan resolver](crate::Builder::resolve_plans) may take for a key. A call that takes longer is dropped,
/// and has failed.
pub const PLAN_RESOLVER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a key is not asked for again after its [plan resolver](crate::Builder::resolve_plans) has failed; the time to live
/// if that is shorter.
pub const PLAN_RESOLVER_PAUSE: Duration = Duration::from_secs(5);
/// The most calls of a limit's [plan resolver](crate::Builder::resolve_plans) under way on a node.
pub const PLAN_RESOLVER_CALLS_MAX: usize = 100;
/// The most keys of a limit that wait for a call of its [plan resolver](crate::Builder::resolve_plans) on a node.
pub const PLAN_RESOLVER_WAITING_MAX: usize = 10_000;

/// The shortest time to live: what the clock that decisions read counts in.
const TTL_MIN: Duration = Duration::from_millis(1);
const TTL_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Of failures, and of plans that the limit does not have, an event says so once in this time.
const EVENTS_US: u64 = 60_000_000;

/// A plan's name, `None` for the default plan, or why there is no answer.
type Answer = Result<Option<String>, String>;
type Resolve = dyn Fn(Vec<u8>) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;
/// Hears every event.
type Tell = Arc<dyn Fn(&Event) + Send + Sync>;

/// A resolver as the user gave it.
pub(crate) struct PlanResolver {
    limit: String,
    ttl: Duration,
    resolve: Arc<Resolve>,
}

impl PlanResolver {
    pub(crate) fn new<A, E>(
        limit: String,
        ttl: Duration,
        resolve: impl Fn(Vec<u8>) -> A + Send + Sync + 'static,
    ) -> Self
    where
        A: Future<Output = Result<Option<String>, E>> + Send + 'static,
        E: fmt::Display,
    {
        let resolve = move |key| -> Pin<Box<dyn Future<Output = Answer> + Send>> {
            let answer = resolve(key);
            Box::pin(async move { answer.await.map_err(|error| error.to_string()) })
        };
        Self { limit, ttl, resolve: Arc::new(resolve) }
    }

    /// Checks what can be kept for a limit.
    fn validate(&self, limit: &LimitState) -> Result<(), ConfigError> {
        let ttl = self.ttl;
        for (is_valid, field, value, reason) in [
            (
                (TTL_MIN..=TTL_MAX).contains(&ttl),
                "resolve_plans.ttl",
                format!("{ttl:?}"),
                "must be 1 ms to 366 days",
            ),
            (
                limit.definition().limit.has_plans(),
                "resolve_plans.limit",
                self.limit.clone(),
                "has no plans that a resolver could name: add some by Limit::plan",
            ),
            (
                limit.resolved_plans().is_none(),
                "resolve_plans.limit",
                self.limit.clone(),
                "has a resolver already",
            ),
        ] {
            if !is_valid {
                let limit = self.limit.clone();
                return Err(ConfigError::Limit { limit, field, value, reason });
            }
        }
        Ok(())
    }
}

/// A resolver that is ready to run.
pub(super) struct ResolverTask {
    /// The place of its limit.
    pub(super) limit: usize,
    resolver: PlanResolver,
    asked: mpsc::Receiver<PlanAsk>,
}

/// Gives limits their resolvers. The plans of `max_keys` keys of each are kept at most.
pub(super) fn open(
    resolvers: Vec<PlanResolver>,
    limits: &mut [LimitState],
    max_keys: usize,
) -> Result<Vec<ResolverTask>, ConfigError> {
    let mut tasks = Vec::new();
    for resolver in resolvers {
        let place = limits.iter().position(|limit| *limit.name == *resolver.limit);
        let limit = place.ok_or_else(|| {
            let known: Vec<&str> = limits.iter().map(|limit| &*limit.name).collect();
            ConfigError::UnknownLimit { name: resolver.limit.clone(), known: known.join(", ") }
        })?;
        resolver.validate(&limits[limit])?;
        let (asks, asked) = mpsc::channel(PLAN_RESOLVER_WAITING_MAX);
        limits[limit].resolve_plans(ResolvedPlans::new(asks, max_keys));
        tasks.push(ResolverTask { limit, resolver, asked });
    }
    Ok(tasks)
}

impl ResolverTask {
    /// Runs for ever.
    pub(super) async fn run(self, limit: Arc<LimitState>, time: TimeSource, listeners: Vec<Tell>) {
        let Self { resolver, mut asked, .. } = self;
        let mut calls = Calls {
            limit,
            resolver,
            time,
            listeners,
            tasks: JoinSet::new(),
            names: HashMap::new(),
            failure_event_from: Timestamp::ZERO,
            unknown_event_from: Timestamp::ZERO,
        };
        loop {
            let has_room = calls.tasks.len() < PLAN_RESOLVER_CALLS_MAX;
            tokio::select! {
                Some(ask) = asked.recv(), if has_room => calls.begin(ask),
                Some(ended) = calls.tasks.join_next_with_id() => calls.ended(ended),
                else => return,
            }
        }
    }
}

/// Calls of a resolver that are under way.
struct Calls {
    limit: Arc<LimitState>,
    resolver: PlanResolver,
    time: TimeSource,
    listeners: Vec<Tell>,
    tasks: JoinSet<Answer>,
    /// The key of each, by what the limiter knows it by.
    names: HashMap<Id, Box<[u8]>>,
    failure_event_from: Timestamp,
    unknown_event_from: Timestamp,
}

impl Calls {
    fn begin(&mut self, ask: PlanAsk) {
        let PlanAsk { name, plain } = ask;
        let (resolve, time) = (self.resolver.resolve.clone(), self.time.clone());
        let until = time.now().plus_micros(micros(PLAN_RESOLVER_TIMEOUT));
        let call = self.tasks.spawn(async move {
            tokio::select! {
                biased;
                // The resolver is called by this task too, which alone ends if it panics.
                answer = async { resolve(plain).await } => answer,
                () = time.sleep_until(until) => Err(format!("no answer in {PLAN_RESOLVER_TIMEOUT:?}")),
            }
        });
        self.names.insert(call.id(), name);
    }

    fn ended(&mut self, ended: Result<(Id, Answer), JoinError>) {
        let (id, answer) = ended.unwrap_or_else(|error| (error.id(), Err(error.to_string())));
        let (limit, now) = (self.limit.clone(), self.time.now());
        let (Some(name), Some(plans)) = (self.names.remove(&id), limit.resolved_plans()) else {
            return;
        };
        let ttl = self.resolver.ttl;
        match answer {
            Ok(plan) => {
                let unknown =
                    plan.as_ref().filter(|plan| limit.definition().plan(plan).is_none()).cloned();
                plans.count(if unknown.is_none() { Outcome::Resolved } else { Outcome::Unknown });
                plans.answered(&name, plan, now.plus_micros(micros(ttl)));
                if let Some(plan) = unknown
                    && is_due(&mut self.unknown_event_from, now)
                {
                    self.publish(&Event::PlanNotKnown { limit: limit.name.clone(), plan });
                }
            }
            Err(error) => {
                plans.count(Outcome::Failed);
                plans.failed(&name, now.plus_micros(micros(ttl.min(PLAN_RESOLVER_PAUSE))));
                if is_due(&mut self.failure_event_from, now) {
                    self.publish(&Event::PlanResolverFailed { limit: limit.name.clone(), error });
                }
            }
        }
    }

    fn publish(&self, event: &Event) {
        self.listeners.iter().for_each(|listener| listener(event));
    }
}

/// Whether an event is due that is told from `from` on, once in a while.
fn is_due(from: &mut Timestamp, now: Timestamp) -> bool {
    let is_due = now >= *from;
    if is_due {
        *from = now.plus_micros(EVENTS_US);
    }
    is_due
}

/// Returns what a limit's resolver has done since the last time, if anything, and begins to make room for keys if there is none.
pub(super) fn flush(limit: &Arc<LimitState>, now: Timestamp) -> Option<Event> {
    let plans = limit.resolved_plans()?;
    if plans.is_full() {
        let limit = limit.clone();
        // Off the tasks: it looks at each key.
        tokio::task::spawn_blocking(move || {
            limit.resolved_plans().inspect(|plans| plans.sweep(now));
        });
    }
    let counts = plans.take_counts();
    let [resolved, unknown, failed, not_asked] = counts;
    let limit = limit.name.clone();
    let event = Event::PlansResolved { limit, resolved, unknown, failed, not_asked };
    (counts != [0; 4]).then_some(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{KeyBudget, KeyHasher};
    use crate::driver::definition::LimitParts;
    use crate::driver::manual::ManualClock;
    use crate::limit::{Limit, NodeTerms};
    use crate::quota::Quota;

    #[test]
    fn decisions_look_further_of_limits_that_have_a_resolver_and_of_no_others() {
        let time = TimeSource::Manual(ManualClock::new());
        let budget = Arc::new(KeyBudget::new(10, 2));
        let limit = |name| Limit::new(name, Quota::per_second(1)).plan("pro", Quota::per_second(2));
        let limits = [limit("with"), limit("without")];
        let parts = limits.each_ref().map(|limit| {
            let node = NodeTerms { has_store: false, max_nodes: None, uncounted: 1 };
            LimitParts::new(limit, node, None).unwrap()
        });
        let mut states = [0, 1].map(|place: usize| {
            let hasher = KeyHasher::new([1, 2]);
            LimitState::new(place as u32, &parts[place], hasher, &budget, &time).unwrap()
        });
        let resolve = |_| async { Ok::<_, String>(None) };
        let resolver = PlanResolver::new("with".to_owned(), TTL_MAX, resolve);
        open(vec![resolver], &mut states, 10).unwrap();
        let looks = || [0, 1].map(|place: usize| states[place].definition().looks_further());
        assert_eq!(looks(), [true, false]);
        states.iter().zip(&parts).for_each(|(state, parts)| state.update(parts));
        assert_eq!(looks(), [true, false], "after an update too");
        assert_eq!([0, 1].map(|place: usize| states[place].may_give_plans()), [true, false]);
    }
}
