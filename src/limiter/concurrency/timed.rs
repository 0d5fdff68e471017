//! Timed permits: the store has them until any process releases them by their id, or until their time is over.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{ConcurrencyLimit, Limiter, Permit, Shared};
use crate::driver::{PendingHandOver, RecordQuery, Wish};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::record_id::RecordId;
use crate::store::timed_permits::TimedPermitRelease;

/// The pauses before permits are released that the store may have taken over. A message that was late comes to it after the first,
/// perhaps, and before the end of the second: the limiter waits for an answer for ten seconds at most.
const RELEASED_AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(14)];

/// Why the store did not take over a permit.
pub(crate) struct NotHandedOver {
    pub(crate) error: StoreError,
    /// It may have taken it all the same.
    pub(crate) lost: Option<LostPermit>,
}

/// A permit that the store has, perhaps.
pub(crate) struct LostPermit {
    release: TimedPermitRelease,
    /// Its answer is still to come.
    pending: Option<PendingHandOver>,
}

impl Permit {
    /// The limit's name, and the key as the store knows it.
    pub(crate) fn name(&self) -> (Arc<str>, Arc<[u8]>) {
        self.held.name()
    }

    /// Hands it over to the store, for any process to release. After that time it comes free.
    ///
    /// # Errors
    ///
    /// [`NotHandedOver`] has the store's error, or says that it did not answer in time: then this process holds it no more.
    pub(crate) async fn hand_over(self, time_to_live: Duration) -> Result<RecordId, NotHandedOver> {
        let Self { held, shared } = self;
        let no_number = |error: getrandom::Error| {
            let error = StoreError::Server(error.to_string());
            NotHandedOver { error, lost: None }
        };
        let id = RecordId::random().map_err(no_number)?;
        let (limit, key) = held.name();
        let within = held.max_wait();
        let release = TimedPermitRelease { limit, key, id: id.0.to_be_bytes() };
        let mut pending = held.hand_over(release.id, time_to_live);
        let error = tokio::select! {
            biased;
            outcome = pending.answer() => match outcome {
                Ok(()) => return Ok(id),
                Err(error) => {
                    let lost = Some(LostPermit { release, pending: None });
                    return Err(NotHandedOver { error, lost });
                }
            },
            _ = shared.ask(Wish::Time, within) => StoreError::TimedOut(within),
        };
        let is_cancelled = pending.cancel();
        let lost = || LostPermit { release, pending: Some(pending) };
        Err(NotHandedOver { error, lost: (!is_cancelled).then(lost) })
    }
}

impl Limiter {
    /// All concurrency limits, in the order in which they were given.
    pub(crate) fn concurrency_limits(&self) -> impl Iterator<Item = ConcurrencyLimit> {
        let limits = self.shared.node.permits.limits.iter();
        limits.map(|keys| ConcurrencyLimit { keys: keys.clone(), shared: self.shared.clone() })
    }

    /// Releases what the store may have taken over, without the pauses if the service ends. What it takes later comes free when its
    /// time is over.
    pub(crate) async fn release_lost(&self, lost: LostPermit, mut ends: watch::Receiver<bool>) {
        let LostPermit { release, pending } = lost;
        let is_known = match pending {
            Some(mut pending) => pending.answer().await.is_ok(),
            None => false,
        };
        let pauses = if is_known { &[Duration::ZERO] } else { &RELEASED_AFTER[..] };
        for pause in pauses {
            tokio::select! {
                _ = self.shared.ask(Wish::Time, *pause) => {}
                _ = ends.wait_for(|ends| *ends) => {}
            }
            if self.shared.release(release.clone()).await.is_ok_and(|permits| permits > 0) {
                return;
            }
        }
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

    /// Releases timed permits of `key`. Returns how many came free: none if they were released before, or their time is over.
    /// Where a reply is lost the store is asked again.
    pub(crate) async fn release<K: Key + ?Sized>(
        &self,
        key: &K,
        id: RecordId,
    ) -> Result<u32, StoreError> {
        let (limit, key, id) = (self.name().into(), self.stored_name(key), id.0.to_be_bytes());
        self.shared.release(TimedPermitRelease { limit, key, id }).await
    }
}

impl Shared {
    async fn release(&self, release: TimedPermitRelease) -> Result<u32, StoreError> {
        let query = |done| RecordQuery::Permit(release.clone(), done);
        self.until_answered(query).await.map(|(_, permits)| permits)
    }
}
