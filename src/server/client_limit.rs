//! The limit of the service's own clients.

use axum::body::Body;

use crate::error::ConfigError;
use crate::http::{KeyedLimit, RateLimitLayer};
use crate::limit::Limit;
use crate::limiter::Limiter;
use crate::quota::Quota;

/// In metrics.
const LIMITER: &str = "tidegate-serve";
const LIMIT: &str = "clients";

/// What refuses requests of a client address that has made so many.
pub(super) fn layer(quota: Quota) -> Result<RateLimitLayer<Body>, ConfigError> {
    let limiter =
        Limiter::builder().name(LIMITER).limit(Limit::new(LIMIT, quota).local()).build()?;
    Ok(RateLimitLayer::new(KeyedLimit::per_client(limiter.limit(LIMIT)?)))
}
