//! Stores: where the shared truth is kept.

mod any;
#[cfg(all(test, feature = "redis"))]
pub(crate) mod equality;
pub(crate) mod exact;
pub(crate) mod exchange;
mod memory;
pub(crate) mod model;
pub(crate) mod overrides;
pub(crate) mod permits;
#[cfg(feature = "server")]
pub(crate) mod record_id;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(all(test, feature = "redis"))]
#[path = "../../tests/parts/redis_server.rs"]
pub(crate) mod redis_server;
#[cfg(feature = "server")]
pub(crate) mod reservations;
pub(crate) mod timed_permits;

pub use any::AnyStore;
pub(crate) use exchange::Store;
pub use memory::MemoryStore;
