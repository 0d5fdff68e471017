//! At the door: who asks, and what the answer says in its headers.
//!
//! Needs the feature `http`. Nothing of it waits or decides: [`ClientIp`] reads a key off a request,
//! [`HeaderStyle`] writes what a [`Decision`](crate::Decision) knows into a response's header fields, and
//! [`RetryAfter`] says when a denied client may come back. With the feature `tower`, `RateLimitLayer` does
//! all of it around a service. docs/HTTP.md is the contract.

mod cidr;
mod client_ip;
mod forwarded;
#[cfg(feature = "tonic")]
mod grpc;
mod header_style;
#[cfg(feature = "tower")]
mod keyed_limit;
#[cfg(feature = "tower")]
mod layer;
#[cfg(feature = "tower")]
mod rate_limit;
mod retry_after;

pub use cidr::{Network, NetworkError};
pub use client_ip::{AddressText, ClientIp, DEFAULT_PREFIX_V6};
pub use forwarded::Forwarding;
pub use header_style::{HeaderStyle, LimitReport, Reset};
#[cfg(feature = "tower")]
pub use keyed_limit::{Head, KeyOf, KeyText, KeyedLimit, OnMissingKey, Peer};
#[cfg(feature = "tower")]
pub use layer::{Answer, RateLimitLayer, RateLimitService};
#[cfg(feature = "tower")]
pub use rate_limit::{RateLimit, Refusal};
pub use retry_after::{RetryAfter, SPREAD_MAX};

/// Compiles the example there.
#[cfg(all(doctest, feature = "retry", feature = "tower"))]
#[doc = include_str!("../../docs/HTTP.md")]
struct Contract;
