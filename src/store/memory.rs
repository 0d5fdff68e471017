//! The store inside one process: the reference model behind a lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::exchange::{Exchange, Store};
use super::model::Model;
use crate::sync::message::Request;
use crate::time::Timestamp;

/// A store in this process's memory, for several limiters in one process, and for tests.
///
/// Limiters that are given clones of one `MemoryStore` share their limits. A limiter with no
/// store at all needs none: it decides alone, exactly.
#[derive(Clone, Default)]
pub struct MemoryStore {
    model: Arc<Mutex<Model>>,
    now: Option<NowFn>,
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

    /// The same store, telling time by `now`.
    pub(crate) fn with_time(mut self, now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        self.now = Some(Arc::new(now));
        self
    }

    /// Forgets everything, as a store does that restarts without its data.
    pub fn clear(&self) {
        *self.lock() = Model::default();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Model> {
        // The model is consistent between any two statements: a panic elsewhere spoils nothing.
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_> {
        Box::pin(async move {
            let now = self.now.as_ref().map_or(Timestamp::ZERO, |now| now());
            Ok(self.lock().sync(&request, now.as_micros() as i64))
        })
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(100)
    }
}
