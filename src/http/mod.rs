//! At the door: who asks, and what the answer says in its headers.
//!
//! Needs the feature `http`. Nothing here waits or decides: [`Client`] reads a key off a request,
//! [`Fields`] writes what a [`Decision`](crate::Decision) knows into a response's header fields, and
//! [`RetryAfter`] says when a denied client may come back. docs/HTTP.md is the contract.

mod address;
mod fields;
mod forwarded;
mod network;
mod retry_after;

pub use address::{AddressText, Client, PREFIX_V6_DEFAULT};
pub use fields::{Fields, Reset, Said};
pub use forwarded::Forwarding;
pub use network::{Network, NetworkError};
pub use retry_after::{RetryAfter, SPREAD_MAX};

/// Compiles the example there.
#[cfg(doctest)]
#[doc = include_str!("../../docs/HTTP.md")]
struct Contract;
