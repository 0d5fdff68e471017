//! Envoy's rate limit service, version 3: requests of a domain with descriptors, which the limits of a configuration's
//! `[domains]` decide about.
//!
//! `server/envoy.rs` carries them over gRPC and HTTP.

mod charge;
mod decide;
pub(crate) mod json;
mod limited;
mod messages;
mod metrics;

pub(crate) use decide::{DomainLimits, OwnLimits};
pub(crate) use messages::{Answer, Code, JsonRequest, RateLimitRequest, Refusal};
pub(crate) use metrics::DescriptorMetrics;
