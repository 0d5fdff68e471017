//! For callers of somebody else's API: keep within its limits as its answers tell them, and come back
//! when they say so.
//!
//! Needs the feature `retry`. [`RateLimitHints`] reads what a response says; a [`Pacer`] gives out turns so that
//! what was left is not exceeded, and after a denial none before its time; with the feature `tower`,
//! `PaceLayer` does both around a client, and asks again by itself until a deadline. docs/HTTP.md tells
//! more.

mod hints;
#[cfg(feature = "tower")]
mod layer;
mod pacer;

pub use hints::{Allowance, RateLimitHints};
#[cfg(feature = "tower")]
pub use layer::{DEFAULT_WITHIN, PaceLayer, Paced};
pub use pacer::{
    DEFAULT_FIRST_BACKOFF, DEFAULT_MAX_BACKOFF, GaveUp, Pacer, Permit, ResponseKind, WAIT_MAX,
};
