//! The limit of the service's own clients.

use axum::body::Body;

use crate::config::client_limit;
use crate::error::ConfigError;
use crate::http::{KeyedLimit, RateLimitLayer};
use crate::limiter::Limiter;
use crate::quota::Quota;

/// In metrics.
const LIMITER: &str = "tidegate-serve";

/// What refuses requests of a client address that has made so many.
pub(super) fn layer(quota: Quota) -> Result<RateLimitLayer<Body>, ConfigError> {
    let limit = client_limit(quota);
    let limiter = Limiter::builder().name(LIMITER).limit(limit.clone()).build()?;
    Ok(RateLimitLayer::new(KeyedLimit::per_client(limiter.limit(limit.name())?)))
}
