//! Calls of the store that decide about requests of exact limits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{Id, JoinError, JoinSet};

use super::clock::TimeSource;
use crate::error::StoreError;
use crate::limit::OutagePolicy;
use crate::store::Store;
use crate::store::exact::{Deed, ExactReply, ExactRequest};
use crate::sync::{Event, ExactOutage, OutageChange};
use crate::time::Timestamp;

/// The most calls under way: beyond them the outage policy decides.
const CALLS_MAX: usize = 10_000;

/// A request of an exact limit, and where to tell the reply. Dropped without one, the outage policy decides.
#[derive(Debug)]
pub(crate) struct ExactQuery {
    /// The limit's place among the limiter's limits.
    pub(crate) limit: u32,
    pub(crate) request: ExactRequest,
    /// How long the caller waits for the store.
    pub(crate) max_wait_us: u64,
    pub(crate) done: oneshot::Sender<Result<ExactAnswer, StoreError>>,
}

/// The store's reply, and when it was asked and answered by this node's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExactAnswer {
    pub(crate) reply: ExactReply,
    pub(crate) asked: Timestamp,
    pub(crate) answered: Timestamp,
}

/// How a call ended; by a panic in a user's callback, say.
pub(super) type Outcome = Result<(Id, Result<bool, StoreError>), JoinError>;

/// A call that is under way.
#[derive(Clone, Copy, Debug)]
struct Begun {
    limit: u32,
    at: Timestamp,
    /// Tokens that go back by it.
    returns: u32,
    /// It charges or gives back after a decision; no caller waits for its answer.
    is_correction: bool,
}

/// What a call that ended changes for its limit.
pub(super) struct Ended {
    pub(super) limit: u32,
    pub(super) change: Option<OutageChange>,
    /// Tokens that did not go back.
    pub(super) not_given_back: u32,
    pub(super) took: Duration,
    pub(super) error: Option<StoreError>,
}

/// The calls that are under way.
#[derive(Debug, Default)]
pub(super) struct ExactCalls {
    /// Whether each allowed its request.
    calls: JoinSet<Result<bool, StoreError>>,
    begun: HashMap<Id, Begun>,
    outages: HashMap<u32, ExactOutage>,
}

impl ExactCalls {
    /// Begins a call, if there is anything to gain by it. Returns, if there is not, what changes for the limit.
    pub(super) fn begin(
        &mut self,
        query: ExactQuery,
        store: &Arc<dyn Store>,
        time: &TimeSource,
    ) -> Result<(), Option<OutageChange>> {
        let ExactQuery { limit, request, max_wait_us, done } = query;
        let now = time.now();
        let outage = self.outages.entry(limit).or_default();
        let is_over = request.deed == Deed::Ask && done.is_closed();
        if is_over || !outage.may_call(now, max_wait_us) {
            return Err(None);
        }
        if self.begun.len() >= CALLS_MAX {
            let error = StoreError::Server(format!("{CALLS_MAX} decisions are under way"));
            return Err(outage.refused(error, now));
        }
        let is_correction = request.deed != Deed::Ask;
        let begun = Begun { limit, at: now, returns: request.returns(), is_correction };
        let (store, time) = (store.clone(), time.clone());
        let call = self.calls.spawn(async move {
            let reply = tokio::select! {
                biased;
                reply = store.decide(request) => reply,
                () = time.sleep_until(now.plus_micros(max_wait_us)) => {
                    Err(StoreError::TimedOut(Duration::from_micros(max_wait_us)))
                }
            };
            let answer = |reply| ExactAnswer { reply, asked: now, answered: time.now() };
            // Whoever gave up waiting has dropped the other end.
            let _ = done.send(reply.clone().map(answer));
            reply.map(|reply| reply.is_allowed)
        });
        self.begun.insert(call.id(), begun);
        Ok(())
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Whether no call is under way that charges or gives back after a decision. One that failed does not count.
    pub(super) fn has_no_corrections(&self) -> bool {
        self.begun.values().all(|call| !call.is_correction)
    }

    /// The next call that ends; `None` while none is under way.
    pub(super) async fn next(&mut self) -> Option<Outcome> {
        self.calls.join_next_with_id().await
    }

    /// Whether the outage policy of a limit decides.
    pub(super) fn is_on_policy(&self, limit: u32) -> bool {
        self.outages.get(&limit).is_some_and(ExactOutage::is_on_policy)
    }

    /// Takes a call that ended off the list.
    pub(super) fn ended(&mut self, outcome: Outcome, now: Timestamp) -> Option<Ended> {
        let (call, outcome) = match outcome {
            Ok(ended) => ended,
            Err(error) => (error.id(), Err(StoreError::Unreachable(error.to_string()))),
        };
        let Begun { limit, at, returns, .. } = self.begun.remove(&call)?;
        let not_given_back = if outcome == Ok(true) { 0 } else { returns };
        let outage = self.outages.entry(limit).or_default();
        let (took, error) = (Duration::from_micros(now.micros_since(at)), outcome.clone().err());
        let change = outage.ended(outcome.map(|_| ()), at, now);
        Some(Ended { limit, change, not_given_back, took, error })
    }
}

/// What is told of a change of a limit without leases, or of permits.
pub(super) fn outage_event(
    name: &Arc<str>,
    policy: OutagePolicy,
    nodes: i64,
    change: OutageChange,
) -> Event {
    let limit = name.clone();
    match change {
        OutageChange::Began => {
            Event::OutagePolicyBegan { limit, policy, nodes, store_was_reached: false }
        }
        OutageChange::Ended => Event::OutagePolicyEnded { limit },
        OutageChange::Refused(error @ StoreError::ForeignKey { .. }) => Event::ForeignKey { error },
        OutageChange::Refused(error) => Event::NotDecided { limit, error },
    }
}
