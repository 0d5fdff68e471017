//! Rate limits for HTTP services: the client's address, the header fields of responses, and a layer.
//!
//! Needs the feature `http`. [`ClientIp`] reads the client's address from a request, [`HeaderStyle`] writes a
//! [`Decision`](crate::Decision) into a response's header fields, and [`RetryAfter`] says when a denied client may
//! return. With the feature `tower`, `RateLimitLayer` does all of this for a service. docs/HTTP.md is the guide.

mod client_ip;
#[cfg(any(feature = "axum", feature = "tonic"))]
mod denied;
#[cfg(feature = "tower")]
mod evaluation;
mod forwarded;
#[cfg(feature = "tonic")]
mod grpc;
#[cfg(feature = "tower")]
mod head;
mod header_style;
#[cfg(feature = "tower")]
mod key_of;
#[cfg(feature = "tower")]
mod keyed_limit;
#[cfg(feature = "tower")]
mod layer;
#[cfg(feature = "tower")]
mod permit_layer;
#[cfg(feature = "tower")]
mod rate_limit;
#[cfg(feature = "tower")]
mod refusal;
mod retry_after;
#[cfg(feature = "tower")]
mod unknown_client;

pub use crate::network::{Network, NetworkError};
pub use client_ip::{AddressText, ClientIp, DEFAULT_PREFIX_V4, DEFAULT_PREFIX_V6};
pub use forwarded::Forwarding;
#[cfg(feature = "tower")]
pub use head::{Head, Peer, ResponseHead};
pub use header_style::{HeaderStyle, LimitReport, Reset};
#[cfg(feature = "tower")]
pub use key_of::KeyOf;
#[cfg(feature = "tower")]
pub use keyed_limit::{KeyedLimit, OnMissingKey};
#[cfg(feature = "tower")]
pub use layer::{RateLimitLayer, RateLimitService, ResponseFuture};
#[cfg(feature = "tower")]
pub use permit_layer::{PermitBody, PermitLayer, PermitService};
#[cfg(feature = "tower")]
pub use rate_limit::RateLimit;
#[cfg(feature = "tower")]
pub use refusal::{ErrorBody, Refusal};
pub use retry_after::{RetryAfter, SPREAD_MAX};

/// Compiles the examples there.
#[cfg(all(doctest, feature = "axum", feature = "retry"))]
#[doc = include_str!("../../docs/HTTP.md")]
struct Guide;
