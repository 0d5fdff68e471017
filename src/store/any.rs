//! A store, whichever it is: what a limiter is built with.

use std::sync::Arc;

use super::exchange::Store;
use super::memory::MemoryStore;
use crate::time::Timestamp;

/// A store, whichever it is.
#[derive(Clone)]
pub struct AnyStore(Kind);

#[derive(Clone)]
enum Kind {
    Memory(MemoryStore),
    #[cfg_attr(
        not(any(feature = "redis", feature = "testing")),
        allow(dead_code, reason = "for stores behind features")
    )]
    Other(Arc<dyn Store>),
}

impl From<MemoryStore> for AnyStore {
    fn from(store: MemoryStore) -> Self {
        Self(Kind::Memory(store))
    }
}

#[cfg(feature = "redis")]
impl From<super::redis::RedisStore> for AnyStore {
    fn from(store: super::redis::RedisStore) -> Self {
        Self(Kind::Other(Arc::new(store)))
    }
}

impl AnyStore {
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn other(store: impl Store) -> Self {
        Self(Kind::Other(Arc::new(store)))
    }

    /// Whether all its nodes are in this process.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.0, Kind::Memory(_))
    }

    /// The store, telling time by `now`, whose origin was at `origin_us` since 1970, if it has no clock of its own.
    pub(crate) fn open(
        self,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        origin_us: u64,
    ) -> Arc<dyn Store> {
        match self.0 {
            Kind::Memory(store) => Arc::new(store.with_time(now, origin_us)),
            Kind::Other(store) => store,
        }
    }
}
