//! What every store does.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::StoreError;
use crate::sync::message::{Reply, Request};

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
