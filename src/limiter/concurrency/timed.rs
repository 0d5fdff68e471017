//! Permits that any process gives back: the store keeps them until then, or until their time is over.

use std::sync::Arc;
use std::time::Duration;

use super::{ConcurrencyLimit, Limiter, Permit, Shared};
use crate::driver::{RecordQuery, Wish};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::record_id::RecordId;
use crate::store::timed_permits::TimedPermitRequest;

/// By then the store has been told what this node has in use, and takes no message any more that was sent before.
const TOLD_AFTER: Duration = Duration::from_secs(1);

impl Permit {
    /// Whether no other process can give it back: no node shares the limit.
    pub(crate) fn is_of_this_process(&self) -> bool {
        !self.held.is_shared()
    }

    /// The limit's name, and the key as the store knows it.
    pub(crate) fn name(&self) -> (Arc<str>, Arc<[u8]>) {
        self.held.name()
    }

    /// Hands it to the store, for any process to give back. After that time it comes free.
    ///
    /// # Errors
    ///
    /// That of the store, or that it did not answer in time: then it goes back, as one that is dropped.
    pub(crate) async fn keep(self, time_to_live: Duration) -> Result<RecordId, StoreError> {
        let Self { held, shared } = self;
        let id = RecordId::random().map_err(|error| StoreError::Server(error.to_string()))?;
        let ((limit, key), number) = (held.name(), id.0.to_be_bytes());
        let within = held.max_wait();
        let kept = held.keep(number, time_to_live);
        let outcome = tokio::select! {
            biased;
            outcome = kept.answer() => outcome,
            _ = shared.ask(Wish::Time, within) => Err(StoreError::TimedOut(within)),
        };
        if outcome.is_err() {
            // The store may have it all the same.
            shared.give_back_later(TimedPermitRequest { limit, key, number });
        }
        outcome.map(|()| id)
    }
}

impl Limiter {
    /// All concurrency limits, in the order in which they were given.
    pub(crate) fn concurrency_limits(&self) -> impl Iterator<Item = ConcurrencyLimit> {
        let limits = self.shared.node.permits.limits.iter();
        limits.map(|keys| ConcurrencyLimit { keys: keys.clone(), shared: self.shared.clone() })
    }
}

impl ConcurrencyLimit {
    /// Whether nodes share it.
    pub(crate) fn is_shared(&self) -> bool {
        self.keys.is_shared()
    }

    /// What the store knows `key` by.
    pub(crate) fn stored_name<K: Key + ?Sized>(&self, key: &K) -> Arc<[u8]> {
        (*self.shared.secret.name(key)).into()
    }

    /// Gives back permits of `key` that the store keeps. Returns how many came free: none if they were given back before, or
    /// their time is over. Where a reply is lost the store is asked again.
    pub(crate) async fn give_back<K: Key + ?Sized>(
        &self,
        key: &K,
        id: RecordId,
    ) -> Result<u32, StoreError> {
        let request = TimedPermitRequest {
            limit: self.name().into(),
            key: self.stored_name(key),
            number: id.0.to_be_bytes(),
        };
        self.shared.give_back_permits(request).await
    }
}

impl Shared {
    async fn give_back_permits(&self, request: TimedPermitRequest) -> Result<u32, StoreError> {
        let query = |done| RecordQuery::Permits(request.clone(), done);
        self.until_answered(query).await.map(|(_, permits)| permits)
    }

    #[allow(clippy::disallowed_methods, reason = "nobody waits for it")]
    fn give_back_later(self: &Arc<Self>, request: TimedPermitRequest) {
        let shared = self.clone();
        tokio::spawn(async move {
            shared.ask(Wish::Time, TOLD_AFTER).await;
            // Otherwise they come free when their time is over.
            let _ = shared.give_back_permits(request).await;
        });
    }
}
