//! How a gRPC client learns that its call is refused: by a status with details instead of an HTTP status.

use std::time::Duration;

use http::{HeaderValue, Response, StatusCode, header};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::head::Head;
use super::refusal::Refusal;

/// When a client may try again, in milliseconds: the clients' retry policies read it (gRFC A6).
const PUSHBACK_MS: &str = "grpc-retry-pushback-ms";
/// The largest pushback that clients read. They do not retry after a larger one.
const PUSHBACK_MAX_MS: u64 = i32::MAX as u64;

impl Refusal {
    /// The refusal as a gRPC status.
    ///
    /// A denial is `RESOURCE_EXHAUSTED`, or `UNAVAILABLE` by a limit that protects the service. It has
    /// `google.rpc.RetryInfo`, the limit in `google.rpc.QuotaFailure`, and `grpc-retry-pushback-ms` in its metadata.
    /// A request that costs too much or has no key is `INVALID_ARGUMENT`, or `UNAUTHENTICATED` or
    /// `PERMISSION_DENIED` where the limit's [`OnMissingKey`](super::OnMissingKey) is 401 or 403. A client whose
    /// address is unknown gets `INTERNAL`.
    pub fn grpc_status(&self) -> Status {
        let message = self.message();
        match self {
            Self::Denied { limit, retry_after } => {
                denial(Code::ResourceExhausted, message, limit, *retry_after)
            }
            Self::ReducedCapacity { limit, retry_after } => {
                denial(Code::Unavailable, message, limit, *retry_after)
            }
            Self::MissingKey { status: StatusCode::UNAUTHORIZED, .. } => {
                Status::unauthenticated(message)
            }
            Self::MissingKey { status: StatusCode::FORBIDDEN, .. } => {
                Status::permission_denied(message)
            }
            Self::UnknownClient { .. } => Status::internal(message),
            Self::MissingKey { .. } | Self::CostTooHigh { .. } => Status::invalid_argument(message),
        }
    }
}

fn denial(code: Code, message: &str, limit: &str, retry_after: Duration) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(retry_after));
    details.add_quota_failure_violation(limit, message);
    let pushback_ms = retry_after.as_micros().div_ceil(1000);
    let pushback_ms = u64::try_from(pushback_ms).unwrap_or(u64::MAX).min(PUSHBACK_MAX_MS);
    let mut metadata = MetadataMap::new();
    metadata.insert(PUSHBACK_MS, pushback_ms.into());
    Status::with_error_details_and_metadata(code, message, details, metadata)
}

/// For a service that only gRPC clients call: the response, which has the content type of a gRPC call if the request has.
pub(super) fn grpc_only_response<B: Default>(refusal: &Refusal, head: &Head<'_>) -> Response<B> {
    let mut response = refusal.grpc_status().into_http();
    if let Some(content_type) = grpc_content_type(head) {
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
    response
}

/// For a service that gRPC clients call among others: the response to a gRPC call.
pub(super) fn grpc_response<B: From<String>>(
    head: &Head<'_>,
    refusal: &Refusal,
) -> Option<Response<B>> {
    let content_type = grpc_content_type(head)?;
    let mut response = refusal.grpc_status().into_http::<String>().map(B::from);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    Some(response)
}

/// The content type of the response to a gRPC or gRPC-web call; `None` for other requests. gRPC-web names the format
/// of the body in it, which is that of the request here as everywhere.
fn grpc_content_type(head: &Head<'_>) -> Option<HeaderValue> {
    let content_type = head.headers.get(header::CONTENT_TYPE)?;
    let format = content_type.to_str().ok()?.strip_prefix("application/grpc")?;
    let is_end = |rest: &str| rest.is_empty() || rest.starts_with(['+', ';']);
    if is_end(format) {
        return Some(HeaderValue::from_static("application/grpc"));
    }
    let web = format.strip_prefix("-web")?;
    let web = web.strip_prefix("-text").unwrap_or(web);
    is_end(web).then(|| content_type.clone())
}
