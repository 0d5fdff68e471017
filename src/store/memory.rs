//! The store inside one process: the reference model behind a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::exact::{ExactModel, ExactRequest};
use super::exchange::{Deciding, Exchange, Overriding, Permitting, Store};
#[cfg(feature = "server")]
use super::exchange::{Releasing, Reserving};
use super::model::Model;
use super::overrides::{OverridesModel, OverridesRequest};
use super::permits::{PermitModel, PermitRequest};
#[cfg(feature = "server")]
use super::reservations::{ReservationModel, ReservationRequest};
#[cfg(feature = "server")]
use super::timed_permits::TimedPermitRelease;
use crate::sync::message::Request;
use crate::time::Timestamp;

/// A store in this process's memory, for several limiters in one process, and for tests.
///
/// It keeps a record for each key until that is as if it had never been used: there is no most.
///
/// Limiters that are given clones of one `MemoryStore` share their limits. A limiter with no
/// store at all needs none: it decides alone, exactly.
#[derive(Clone, Default)]
pub struct MemoryStore {
    model: Arc<Mutex<Model>>,
    /// What exact limits have.
    exact: Arc<Mutex<Exact>>,
    overrides: Arc<Mutex<OverridesModel>>,
    /// What concurrency limits have.
    permits: Arc<Mutex<Permits>>,
    #[cfg(feature = "server")]
    reservations: Arc<Mutex<ReservationModel>>,
    /// When the clocks' origin was, in microseconds since 1970: the same for all who have the store.
    origin_us: Arc<OnceLock<u64>>,
    now: Option<NowFn>,
    calls: Arc<AtomicU64>,
}

/// Records of exact limits, and of concurrency limits, are looked through if there are more than this, and than twice what was left last time.
const EXPIRE_ABOVE: usize = 4096;

/// What exact limits have.
#[derive(Debug, Default)]
struct Exact {
    model: ExactModel,
    expire_above: usize,
}

/// What concurrency limits have.
#[derive(Debug, Default)]
struct Permits {
    model: PermitModel,
    expire_above: usize,
}

/// Tells the store's time.
type NowFn = Arc<dyn Fn() -> Timestamp + Send + Sync>;

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same store, telling time by `now`, whose origin was at `origin_us` since 1970.
    pub(crate) fn with_time(
        mut self,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        origin_us: u64,
    ) -> Self {
        self.origin_us.get_or_init(|| origin_us);
        self.now = Some(Arc::new(now));
        self
    }

    /// Forgets everything, as a store does that restarts without its data.
    pub fn clear(&self) {
        *self.lock() = Model::default();
        *self.lock_exact() = Exact::default();
        *self.lock_overrides() = OverridesModel::default();
        *self.lock_permits() = Permits::default();
        #[cfg(feature = "server")]
        {
            *self.lock_reservations() = ReservationModel::default();
        }
    }

    /// How often nodes have called it, all clones together: batches, single decisions and messages about permits.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Tokens that have been charged to `key` of a hybrid limit, by all nodes: for tests. 0 if there is no record of the key,
    /// which goes some minutes after it is full. Of a key that is [hashed](crate::Hashed) there is none by its own name.
    #[cfg(feature = "testing")]
    pub fn charged(&self, limit: &str, key: impl AsRef<[u8]>) -> u64 {
        let name = (limit.into(), key.as_ref().into());
        self.lock().keys.get(&name).map_or(0, |record| record.charged as u64)
    }

    /// Its clock, in microseconds since 1970.
    fn unix_us(&self) -> u64 {
        let origin_us = self.origin_us.get().copied().unwrap_or_default();
        self.now().plus_micros(origin_us).as_micros()
    }

    fn now(&self) -> Timestamp {
        self.now.as_ref().map_or(Timestamp::ZERO, |now| now())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Model> {
        // The model is consistent between any two statements: a panic elsewhere spoils nothing.
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_overrides(&self) -> std::sync::MutexGuard<'_, OverridesModel> {
        self.overrides.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_exact(&self) -> std::sync::MutexGuard<'_, Exact> {
        self.exact.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_permits(&self) -> std::sync::MutexGuard<'_, Permits> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "server")]
    fn lock_reservations(&self) -> std::sync::MutexGuard<'_, ReservationModel> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_> {
        Box::pin(async move {
            self.calls.fetch_add(1, Ordering::Relaxed);
            let now_us = self.unix_us() as i64;
            Ok(self.lock().sync(&request, now_us))
        })
    }

    fn decide(&self, request: ExactRequest) -> Deciding<'_> {
        Box::pin(async move {
            self.calls.fetch_add(1, Ordering::Relaxed);
            let now_us = self.unix_us();
            let mut exact = self.lock_exact();
            if exact.model.len() > exact.expire_above {
                exact.model.expire(now_us);
                exact.expire_above = EXPIRE_ABOVE.max(2 * exact.model.len());
            }
            exact.model.decide(&request, now_us)
        })
    }

    fn overrides(&self, request: OverridesRequest) -> Overriding<'_> {
        Box::pin(async move { Ok(self.lock_overrides().call(&request, self.unix_us())) })
    }

    fn permits(&self, request: PermitRequest) -> Permitting<'_> {
        Box::pin(async move {
            self.calls.fetch_add(1, Ordering::Relaxed);
            let now_us = self.unix_us();
            let mut permits = self.lock_permits();
            if permits.model.len() > permits.expire_above {
                permits.model.expire(now_us);
                permits.expire_above = EXPIRE_ABOVE.max(2 * permits.model.len());
            }
            permits.model.receive(&request, now_us)
        })
    }

    #[cfg(feature = "server")]
    fn reservations(&self, request: ReservationRequest) -> Reserving<'_> {
        Box::pin(async move { Ok(self.lock_reservations().call(request, self.unix_us())) })
    }

    #[cfg(feature = "server")]
    fn release(&self, request: TimedPermitRelease) -> Releasing<'_> {
        Box::pin(async move {
            let now_us = self.unix_us();
            Ok(self.lock_permits().model.release(&request, now_us))
        })
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(100)
    }
}
