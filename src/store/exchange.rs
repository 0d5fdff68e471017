//! What every store does.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::exact::{ExactReply, ExactRequest};
use super::overrides::{OverridesReply, OverridesRequest};
use super::permits::PermitRequest;
#[cfg(feature = "server")]
use super::reservations::{ReservationRequest, TakenRecord};
#[cfg(feature = "server")]
use super::timed_permits::TimedPermitRelease;
use crate::error::StoreError;
use crate::sync::PermitReply;
use crate::sync::message::{Reply, Request};

/// A store's answer, some day.
pub(crate) type Exchange<'a> = Pin<Box<dyn Future<Output = Result<Reply, StoreError>> + Send + 'a>>;

/// A decision under way.
pub(crate) type Deciding<'a> =
    Pin<Box<dyn Future<Output = Result<ExactReply, StoreError>> + Send + 'a>>;

/// Overrides under way.
pub(crate) type Overriding<'a> =
    Pin<Box<dyn Future<Output = Result<OverridesReply, StoreError>> + Send + 'a>>;

/// A message about permits under way.
pub(crate) type Permitting<'a> =
    Pin<Box<dyn Future<Output = Result<PermitReply, StoreError>> + Send + 'a>>;

/// A reservation under way to the store or from it.
#[cfg(feature = "server")]
pub(crate) type Reserving<'a> =
    Pin<Box<dyn Future<Output = Result<Option<TakenRecord>, StoreError>> + Send + 'a>>;

/// Timed permits that are being released: how many there were.
#[cfg(feature = "server")]
pub(crate) type Releasing<'a> = Pin<Box<dyn Future<Output = Result<u32, StoreError>> + Send + 'a>>;

/// One place that applies batches, each at most once, and decides about requests of exact limits.
pub(crate) trait Store: Send + Sync + 'static {
    /// Sends one batch and waits for its reply, which may come long after [`timeout`](Self::timeout). After
    /// an error it is unknown whether the batch was applied: the caller sends the same one again.
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_>;

    /// Decides about one request. After an error it is unknown whether the request was counted.
    fn decide(&self, request: ExactRequest) -> Deciding<'_>;

    /// Takes overrides in, and tells which have changed. After an error it is unknown whether they were taken in.
    fn overrides(&self, request: OverridesRequest) -> Overriding<'_>;

    /// Takes in what a node says about its permits of a key. After an error it is unknown whether it was: the caller says what
    /// is then, with a higher number.
    fn permits(&self, request: PermitRequest) -> Permitting<'_>;

    /// Keeps what is needed to settle a reservation, or gives it away, once. After an error it is unknown whether it did.
    #[cfg(feature = "server")]
    fn reservations(&self, request: ReservationRequest) -> Reserving<'_>;

    /// Releases timed permits. After an error it is unknown whether they came free.
    #[cfg(feature = "server")]
    fn release(&self, request: TimedPermitRelease) -> Releasing<'_>;

    /// An exchange that takes longer counts as failed, though its reply is still welcome.
    fn timeout(&self) -> Duration;
}
