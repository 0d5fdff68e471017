//! Stores: where the shared truth is kept.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::StoreError;
use crate::sync::message::{Reply, Request};

mod any;
#[cfg(all(test, feature = "redis"))]
pub(crate) mod equality;
mod memory;
pub(crate) mod model;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(all(test, feature = "redis"))]
#[path = "../../tests/parts/redis_server.rs"]
pub(crate) mod redis_server;

pub use any::AnyStore;
pub use memory::MemoryStore;

/// A store's answer, some day.
pub(crate) type Exchange<'a> = Pin<Box<dyn Future<Output = Result<Reply, StoreError>> + Send + 'a>>;

/// One place that applies batches, each at most once.
pub(crate) trait Store: Send + Sync + 'static {
    /// Sends one batch and waits for its reply, which may come long after [`timeout`](Self::timeout). After
    /// an error it is unknown whether the batch was applied: the caller sends the same one again.
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_>;

    /// An exchange that takes longer counts as failed, though its reply is still welcome.
    fn timeout(&self) -> Duration;
}
