//! What is wrong with a request, as RFC 9457 (`application/problem+json`) writes it.

use std::fmt;

use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_path_to_error::Segment;
use utoipa::ToSchema;

/// The largest body of a request, in bytes.
pub const BODY_BYTES_MAX: usize = 1024 * 1024;

/// The type of a body that says so.
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// What is wrong with a request.
pub(super) struct Problem {
    status: StatusCode,
    detail: String,
    /// Where in the body, as a JSON pointer without its `#`.
    pointer: Option<String>,
}

/// As it is written.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemBody<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    #[schema(value_type = Option<Vec<Place<'_>>>, nullable = false)]
    errors: &'a [Place<'a>],
}

/// Where in the body it is.
#[derive(Serialize, ToSchema)]
struct Place<'a> {
    detail: &'a str,
    pointer: String,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), pointer: None }
    }

    /// The problem is in this field of the body.
    pub(super) fn at(self, field: &str) -> Self {
        Self { pointer: Some(format!("/{}", escaped(field))), ..self }
    }

    /// What holds the problem is in this field of the body, or at this place of a list.
    pub(super) fn within(self, place: impl fmt::Display) -> Self {
        let within = self.pointer.unwrap_or_default();
        Self { pointer: Some(format!("/{place}{within}")), ..self }
    }

    /// The problem is the body as a whole.
    pub(super) fn of_body(self) -> Self {
        Self { pointer: Some(String::new()), ..self }
    }

    /// The problem is not in the body.
    pub(super) fn outside(self) -> Self {
        Self { pointer: None, ..self }
    }

    /// The body cannot be read.
    pub(super) fn of_rejection(rejection: &BytesRejection) -> Self {
        let detail = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                format!("the body has more than {BODY_BYTES_MAX} bytes")
            }
            _ => rejection.body_text(),
        };
        Self::new(rejection.status(), detail)
    }

    /// The body is not what it has to be: no JSON (400), or other JSON (422).
    pub(super) fn of_json(
        error: &serde_path_to_error::Error<serde_json::Error>,
        is_json: bool,
    ) -> Self {
        let status =
            if is_json { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::BAD_REQUEST };
        let mut pointer = String::new();
        for segment in error.path() {
            match segment {
                Segment::Seq { index } => pointer = format!("{pointer}/{index}"),
                Segment::Map { key: name } | Segment::Enum { variant: name } => {
                    pointer = format!("{pointer}/{}", escaped(name));
                }
                Segment::Unknown => {}
            }
        }
        Self { status, detail: error.inner().to_string(), pointer: Some(pointer) }
    }
}

/// A name as a part of a JSON pointer (RFC 6901).
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, detail, pointer } = &self;
        let place =
            pointer.as_ref().map(|pointer| Place { detail, pointer: format!("#{pointer}") });
        let body = ProblemBody {
            r#type: "about:blank",
            title: status.canonical_reason().unwrap_or_default(),
            status: status.as_u16(),
            detail,
            errors: place.as_slice(),
        };
        // Strings and numbers can be written.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        let kind = HeaderValue::from_static(PROBLEM_JSON);
        (*status, [(header::CONTENT_TYPE, kind)], body).into_response()
    }
}

pub(super) async fn no_such_path(uri: Uri) -> Problem {
    let detail = format!("there is nothing at {}: see docs/SERVICE.md", uri.path());
    Problem::new(StatusCode::NOT_FOUND, detail)
}

pub(super) async fn no_such_method(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not answer to {method}", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}
