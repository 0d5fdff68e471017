//! Why a request is refused, and the response that says so.

use std::sync::LazyLock;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};

use super::retry_after::{RetryAfter, seconds};
use crate::decision::Denied;

/// Why a request does not reach the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The client has used up its quota.
    Denied {
        /// The limit's name.
        limit: &'static str,
        /// When the request has a chance. `Retry-After` has it in seconds, rounded up.
        retry_after: Duration,
    },
    /// A limit that protects the service denied the request: see
    /// [`KeyedLimit::protects_service`](super::KeyedLimit::protects_service).
    ReducedCapacity {
        /// The limit's name.
        limit: &'static str,
        /// When the request has a chance. `Retry-After` has it in seconds, rounded up.
        retry_after: Duration,
    },
    /// The request has no key: see [`OnMissingKey::Refused`](super::OnMissingKey::Refused).
    MissingKey {
        /// The limit's name.
        limit: &'static str,
        /// The status that was set for this.
        status: StatusCode,
    },
    /// The server did not say where the connection comes from, so that the client's address is unknown. This is a
    /// mistake in the service's setup, which the log explains.
    UnknownClient {
        /// The limit's name.
        limit: &'static str,
    },
    /// The request costs more tokens than the limit's bucket can hold.
    CostTooHigh {
        /// The limit's name.
        limit: &'static str,
    },
}

/// The body of a response to a refused request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorBody {
    /// `application/problem+json` (RFC 9457), with the problem types of the draft:
    /// `{"type","title","status","detail","violated-policies"}`.
    #[default]
    Problem,
    /// `application/json`: `{"code","message","limit","retryAfter"}`. The code is `rate_limited`,
    /// `reduced_capacity`, `missing_key`, `unknown_client` or `cost_too_high`; `retryAfter` is in seconds, or null
    /// where waiting does not help.
    Json,
}

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

impl Refusal {
    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Denied { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::ReducedCapacity { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::MissingKey { status, .. } => *status,
            Self::UnknownClient { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            Self::CostTooHigh { .. } => StatusCode::BAD_REQUEST,
        }
    }

    /// The limit's name.
    pub fn limit(&self) -> &'static str {
        match self {
            Self::Denied { limit, .. }
            | Self::ReducedCapacity { limit, .. }
            | Self::MissingKey { limit, .. }
            | Self::UnknownClient { limit }
            | Self::CostTooHigh { limit } => limit,
        }
    }

    /// When the request has a chance, if waiting helps.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Denied { retry_after, .. } | Self::ReducedCapacity { retry_after, .. } => {
                Some(*retry_after)
            }
            Self::MissingKey { .. } | Self::UnknownClient { .. } | Self::CostTooHigh { .. } => None,
        }
    }

    /// A response with the status, `Retry-After` and a body.
    pub fn response<B: From<String>>(&self, body: ErrorBody) -> Response<B> {
        let (text, content_type) = match body {
            ErrorBody::Problem => (self.problem(), "application/problem+json"),
            ErrorBody::Json => (self.json(), "application/json"),
        };
        let mut response = Response::new(B::from(text));
        *response.status_mut() = self.status();
        let content_type = HeaderValue::from_static(content_type);
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        self.write_retry_after(response.headers_mut());
        response
    }

    /// Names of limits have no character that needs an escape.
    fn problem(&self) -> String {
        let status = self.status();
        let phrase = status.canonical_reason().unwrap_or_default();
        let (kind, title) = match self {
            Self::Denied { .. } => (QUOTA_EXCEEDED, "The quota is used up"),
            Self::ReducedCapacity { .. } => (REDUCED_CAPACITY, "The service is busy"),
            _ => ("about:blank", phrase),
        };
        format!(
            r#"{{"type":"{kind}","title":"{title}","status":{},"detail":"{}","violated-policies":["{}"]}}"#,
            status.as_u16(),
            self.message(),
            self.limit(),
        )
    }

    fn json(&self) -> String {
        let seconds =
            self.retry_after().map_or_else(|| "null".to_owned(), |it| seconds(it).to_string());
        format!(
            r#"{{"code":"{}","message":"{}","limit":"{}","retryAfter":{seconds}}}"#,
            self.code(),
            self.message(),
            self.limit(),
        )
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Denied { .. } => "rate_limited",
            Self::ReducedCapacity { .. } => "reduced_capacity",
            Self::MissingKey { .. } => "missing_key",
            Self::UnknownClient { .. } => "unknown_client",
            Self::CostTooHigh { .. } => "cost_too_high",
        }
    }

    /// A sentence for people.
    pub(super) fn message(&self) -> &'static str {
        match self {
            Self::Denied { .. } => "Too many requests: try again later",
            Self::ReducedCapacity { .. } => "The service is busy: try again later",
            Self::MissingKey { .. } => "The request does not say which client sends it",
            Self::UnknownClient { .. } => "The service does not know the client's address",
            Self::CostTooHigh { .. } => "The request costs more than the limit ever allows",
        }
    }

    /// Writes `Retry-After`, if waiting helps and the field is not there yet.
    pub(super) fn write_retry_after(&self, headers: &mut HeaderMap) {
        let Some(retry_after) = self.retry_after() else { return };
        // A map that is full of other fields stays as it is.
        if let Ok(entry) = headers.try_entry(header::RETRY_AFTER) {
            let _ = entry.or_try_insert(seconds(retry_after).into());
        }
    }
}

impl From<Denied> for Refusal {
    fn from(denied: Denied) -> Self {
        /// That of responses of handlers.
        static RETRY_AFTER: LazyLock<RetryAfter> = LazyLock::new(RetryAfter::default);
        let retry_after = RETRY_AFTER.after(denied.retry_after(), &denied.decision());
        Self::Denied { limit: denied.limit_name(), retry_after }
    }
}
