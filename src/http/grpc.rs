//! What a gRPC client is told when it is refused: a status with details instead of an HTTP status.

use std::time::Duration;

use http::{Response, StatusCode, header};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::keyed_limit::Head;
use super::layer::RateLimitLayer;
use super::rate_limit::{RateLimit, Refusal};

impl Refusal<'_> {
    /// The same as a gRPC status. A denial is `RESOURCE_EXHAUSTED`, with `google.rpc.RetryInfo` and the
    /// limit in `google.rpc.QuotaFailure`; a request that costs too much, or has no key, is
    /// `INVALID_ARGUMENT`, but `UNAUTHENTICATED` or `PERMISSION_DENIED` where the rule says 401 or 403.
    pub fn grpc_status(&self) -> Status {
        let message = self.detail();
        match self {
            Self::Denied { policy, retry_after_s } => {
                let delay = Duration::from_secs(*retry_after_s);
                let mut details = ErrorDetails::with_retry_info(Some(delay));
                details.add_quota_failure_violation(*policy, message);
                Status::with_error_details(Code::ResourceExhausted, message, details)
            }
            Self::NoKey { status: StatusCode::UNAUTHORIZED, .. } => {
                Status::unauthenticated(message)
            }
            Self::NoKey { status: StatusCode::FORBIDDEN, .. } => Status::permission_denied(message),
            Self::NoKey { .. } | Self::TooCostly { .. } => Status::invalid_argument(message),
        }
    }
}

impl<B: Default> RateLimitLayer<B> {
    /// For a service that is asked by gRPC alone, such as tonic's: answers those who are refused with
    /// [`Refusal::grpc_status`], whatever they asked by.
    pub fn grpc(door: RateLimit) -> Self {
        Self::with_response(door, |refusal, _| refusal.grpc_status().into_http())
    }
}

/// For a service that is asked by gRPC among others: the answer to those who did ask so.
pub(super) fn grpc_response<B: From<String>>(
    head: &Head<'_>,
    refusal: &Refusal<'_>,
) -> Option<Response<B>> {
    let kind = head.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let format = kind.strip_prefix("application/grpc")?;
    (format.is_empty() || format.starts_with(['+', ';']))
        .then(|| refusal.grpc_status().into_http::<String>().map(B::from))
}
