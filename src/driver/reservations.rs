//! Reservations on their way to the store, and from it.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::error::StoreError;
use crate::store::Store;
use crate::store::reservations::{ReservationId, ReservationRequest, TakenRecord};

/// The most calls under way.
const CALLS_MAX: usize = 10_000;

impl ReservationId {
    /// One that nobody guesses.
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        random_bytes().map(|bytes| Self(u128::from_ne_bytes(bytes)))
    }
}

#[allow(clippy::disallowed_methods, reason = "the driver reads the system's random source")]
pub(crate) fn random_bytes() -> Result<[u8; 16], getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// What the store answers.
pub(crate) type ReservationAnswer = Result<Option<TakenRecord>, StoreError>;

/// What the store is asked, and where to tell its answer. Without a store that is dropped.
#[derive(Debug)]
pub(crate) struct ReservationQuery {
    pub(crate) request: ReservationRequest,
    pub(crate) done: oneshot::Sender<ReservationAnswer>,
}

/// The calls that are under way.
#[derive(Debug, Default)]
pub(super) struct ReservationCalls(JoinSet<()>);

impl ReservationCalls {
    pub(super) fn begin(&mut self, query: ReservationQuery, store: Option<&Arc<dyn Store>>) {
        let (ReservationQuery { request, done }, Some(store)) = (query, store.cloned()) else {
            return;
        };
        while self.0.try_join_next().is_some() {}
        if self.0.len() >= CALLS_MAX {
            let full = format!("{CALLS_MAX} reservations are under way");
            let _ = done.send(Err(StoreError::Server(full)));
            return;
        }
        self.0.spawn(async move {
            // Whoever gave up waiting has dropped the other end.
            let _ = done.send(store.reservations(request).await);
        });
    }
}
