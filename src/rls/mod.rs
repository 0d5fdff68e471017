//! Envoy's rate limit service, version 3: requests of a domain with descriptors, which the limits of a configuration's
//! `[domains]` decide about.
//!
//! `server/envoy.rs` carries them over gRPC and HTTP.

mod decide;
mod messages;
mod metrics;

pub(crate) use decide::{DomainLimits, OwnLimits, Refusal};
pub(crate) use messages::{Answer, Code, JsonRequest, RateLimitRequest};
pub(crate) use metrics::DescriptorMetrics;
