//! For callers of somebody else's API: keep within its limits as its answers tell them, and come back
//! when they say so.
//!
//! Needs the feature `retry`. [`Advice`] reads what a response says; a [`Pacer`] gives out turns so that
//! what was left is not exceeded, and after a denial none before its time; with the feature `tower`,
//! `PaceLayer` does both around a client, and asks again by itself until a deadline. docs/HTTP.md tells
//! more.

mod advice;
#[cfg(feature = "tower")]
mod layer;
mod pacer;

pub use advice::{Advice, Allowance};
#[cfg(feature = "tower")]
pub use layer::{PaceLayer, Paced, WITHIN_DEFAULT};
pub use pacer::{BACKOFF_FIRST_DEFAULT, BACKOFF_MAX_DEFAULT, GaveUp, Heard, Pacer, Turn, WAIT_MAX};
