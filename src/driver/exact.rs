//! Decisions of exact limits: each is a call of the store.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

use super::clock::TimeSource;
use crate::error::StoreError;
use crate::store::Store;
use crate::store::exact::{Answer, Question};
use crate::time::{Timestamp, micros};

/// How often it is told that the store refuses.
const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// A request of an exact limit, and where to tell the decision. Dropped without one, the outage policy decides.
#[derive(Debug)]
pub(crate) struct ExactQuery {
    pub(crate) question: Question,
    pub(crate) within_us: u64,
    pub(crate) done: oneshot::Sender<Answer>,
}

/// How a call ended; by a panic in a user's callback, say.
pub(super) type Outcome = Result<Result<(), StoreError>, JoinError>;

/// What the driver tells of.
pub(super) enum News {
    /// The outage policy takes over.
    Away,
    /// The store decides again.
    Back,
    /// The store answers, but does not decide.
    Refused(StoreError),
}

/// The calls that are under way.
#[derive(Debug, Default)]
pub(super) struct ExactCalls {
    calls: JoinSet<Result<(), StoreError>>,
    /// The store did not answer last time. One call is tried now and then; nobody else waits.
    is_away: bool,
    try_at: Timestamp,
    refusals_from: Timestamp,
}

impl ExactCalls {
    pub(super) fn begin(&mut self, query: ExactQuery, store: &Arc<dyn Store>, time: &TimeSource) {
        let now = time.now();
        if query.done.is_closed() || self.is_away && now < self.try_at {
            return;
        }
        self.try_at = now.plus_micros(micros(store.timeout()));
        let (store, time) = (store.clone(), time.clone());
        self.calls.spawn(async move {
            let ExactQuery { question, within_us, done } = query;
            let answer = tokio::select! {
                biased;
                answer = store.decide(question) => answer?,
                () = time.sleep_until(now.plus_micros(within_us)) => {
                    return Err(StoreError::TimedOut(std::time::Duration::from_micros(within_us)));
                }
            };
            // Whoever gave up waiting has dropped the other end.
            let _ = done.send(answer);
            Ok(())
        });
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// The next call that ends; never, while none is under way.
    pub(super) async fn next(&mut self) -> Option<Outcome> {
        self.calls.join_next().await
    }

    /// A call has ended.
    pub(super) fn ended(&mut self, outcome: Outcome, now: Timestamp) -> Option<News> {
        let was_away = self.is_away;
        match outcome {
            Ok(Ok(())) => {
                self.is_away = false;
                was_away.then_some(News::Back)
            }
            Ok(Err(StoreError::TimedOut(_) | StoreError::Unreachable(_))) | Err(_) => {
                self.is_away = true;
                if !was_away {
                    self.try_at = now;
                }
                (!was_away).then_some(News::Away)
            }
            Ok(Err(error)) => {
                let is_due = now >= self.refusals_from;
                if is_due {
                    self.refusals_from = now.plus_micros(REFUSAL_EVENTS_US);
                }
                is_due.then_some(News::Refused(error))
            }
        }
    }
}
