//! For clients of other services: keep their limits, and return when they say so.
//!
//! Needs the feature `retry`. [`RateLimitHints`] reads the header fields of a response. A [`Pacer`] hands out permits to
//! send requests, no more than the service has said are left, and none too early after a denial. With the feature
//! `tower`, `PaceLayer` does both around a client and sends denied requests again. docs/HTTP.md has the details.

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
