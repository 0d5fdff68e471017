//! Records that any process can end, on their way to the store and from it.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::error::StoreError;
use crate::store::Store;
use crate::store::record_id::RecordId;
use crate::store::reservations::{ReservationRequest, TakenRecord};
use crate::store::timed_permits::TimedPermitRelease;

/// The most calls under way.
const CALLS_MAX: usize = 10_000;

impl RecordId {
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

/// Where to tell the store's answer.
type Done<T> = oneshot::Sender<Result<T, StoreError>>;

/// What the store is asked, and where to tell its answer. Without a store that is dropped.
#[derive(Debug)]
pub(crate) enum RecordQuery {
    Reservation(ReservationRequest, Done<Option<TakenRecord>>),
    Permit(TimedPermitRelease, Done<u32>),
}

impl RecordQuery {
    // Whoever gave up waiting has dropped the other end.

    fn refuse(self, error: StoreError) {
        match self {
            Self::Reservation(_, done) => drop(done.send(Err(error))),
            Self::Permit(_, done) => drop(done.send(Err(error))),
        }
    }

    async fn ask(self, store: Arc<dyn Store>) {
        match self {
            Self::Reservation(request, done) => drop(done.send(store.reservations(request).await)),
            Self::Permit(request, done) => drop(done.send(store.release(request).await)),
        }
    }
}

/// The calls that are under way.
#[derive(Debug, Default)]
pub(super) struct RecordCalls(JoinSet<()>);

impl RecordCalls {
    pub(super) fn begin(&mut self, query: RecordQuery, store: Option<&Arc<dyn Store>>) {
        let Some(store) = store.cloned() else { return };
        while self.0.try_join_next().is_some() {}
        if self.0.len() >= CALLS_MAX {
            let full = format!("{CALLS_MAX} calls about records are under way");
            return query.refuse(StoreError::Server(full));
        }
        self.0.spawn(query.ask(store));
    }
}
