//! At the door: who asks, and what the answer says in its headers.
//!
//! Needs the feature `http`. Nothing of it waits or decides: [`Client`] reads a key off a request,
//! [`Fields`] writes what a [`Decision`](crate::Decision) knows into a response's header fields, and
//! [`RetryAfter`] says when a denied client may come back. With the feature `tower`, `LimitLayer` does
//! all of it around a service. docs/HTTP.md is the contract.

mod address;
#[cfg(feature = "tower")]
mod door;
mod fields;
mod forwarded;
#[cfg(feature = "tonic")]
mod grpc;
#[cfg(feature = "tower")]
mod layer;
mod network;
mod retry_after;
#[cfg(feature = "tower")]
mod rule;

pub use address::{AddressText, Client, PREFIX_V6_DEFAULT};
#[cfg(feature = "tower")]
pub use door::{Door, Refusal};
pub use fields::{Fields, Reset, Said};
pub use forwarded::Forwarding;
#[cfg(feature = "tower")]
pub use layer::{Answer, LimitLayer, LimitService};
pub use network::{Network, NetworkError};
pub use retry_after::{RetryAfter, SPREAD_MAX};
#[cfg(feature = "tower")]
pub use rule::{Head, KeyOf, KeyText, Missing, Peer, Rule};

/// Compiles the example there.
#[cfg(all(doctest, feature = "retry", feature = "tower"))]
#[doc = include_str!("../../docs/HTTP.md")]
struct Contract;
