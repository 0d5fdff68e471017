//! The parts of a request, read so that what is wrong with them is a [`Problem`].

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::de::{DeserializeOwned, Error, IgnoredAny, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

use super::problem::Problem;
use super::running::Running;
pub(super) use crate::rls::json::Object;
use crate::rls::json::whole_of;

/// The body of a request that asks for a decision or a change. It came in time, and the service does not refuse it.
pub(super) struct Body(Bytes);

impl FromRequest<Arc<Running>> for Body {
    type Rejection = Problem;

    #[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
    async fn from_request(request: Request, running: &Arc<Running>) -> Result<Self, Problem> {
        let timeout = running.in_force.load().config.server().body_timeout;
        let received = tokio::time::timeout(timeout, Bytes::from_request(request, running)).await;
        let body = received.map_err(|_| {
            let detail = format!("the body did not come within {timeout:?}: nothing was charged");
            Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
        })?;
        if running.refuses_checks() {
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the service ends"));
        }
        body.map(Self).map_err(|rejection| Problem::of_rejection(&rejection))
    }
}

impl Body {
    /// Whether it is a list, as far as its first character tells.
    pub(super) fn is_list(&self) -> bool {
        self.0.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[')
    }

    pub(super) fn parse<'b, T: Deserialize<'b>>(&'b self) -> Result<T, Problem> {
        serde_json::from_slice(&self.0).or_else(|_| self.parse_or_say_where())
    }

    /// Parses once more, and notes where it is: that takes longer.
    fn parse_or_say_where<'b, T: Deserialize<'b>>(&'b self) -> Result<T, Problem> {
        let mut json = serde_json::Deserializer::from_slice(&self.0);
        let value = serde_path_to_error::deserialize(&mut json);
        let is_json = || serde_json::from_slice::<IgnoredAny>(&self.0).is_ok();
        let value = value.map_err(|error| Problem::of_json(&error, is_json()))?;
        // Nothing may follow.
        json.end().map_err(|error| Problem::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        Ok(value)
    }
}

/// A whole number, also one that is written with a point: JSON does not tell 1 from 1.0.
pub(super) fn whole<'de, D: Deserializer<'de>, N: TryFrom<u64>>(
    deserializer: D,
) -> Result<N, D::Error> {
    deserializer.deserialize_any(WholeVisitor(PhantomData))
}

struct WholeVisitor<N>(PhantomData<N>);

impl<N: TryFrom<u64>> Visitor<'_> for WholeVisitor<N> {
    type Value = N;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number that is not too large")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<N, E> {
        let wrong = |_| E::invalid_value(Unexpected::Unsigned(number), &self);
        number.try_into().map_err(wrong)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<N, E> {
        match whole_of(number) {
            Some(number) => self.visit_u64(number),
            None => Err(E::invalid_value(Unexpected::Float(number), &self)),
        }
    }
}

/// The name of a limit in a path.
pub(super) struct LimitName(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for LimitName {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let named = Path::from_request_parts(parts, state).await;
        let Path(name) =
            named.map_err(|rejection| Problem::new(rejection.status(), rejection.body_text()))?;
        Ok(Self(name))
    }
}

/// What follows the `?`.
pub(super) struct Parameters<T>(pub(super) T);

/// Nothing may follow it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoParameters {}

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        // `Query` takes bytes that are no text for a character that stands for all of them.
        let query = percent_decode_str(parts.uri.query().unwrap_or_default());
        if query.decode_utf8().is_err() {
            let detail = "what follows the ? has bytes that are no UTF-8";
            return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
        }
        let named = Query::from_request_parts(parts, state).await;
        let Query(parameters) =
            named.map_err(|rejection| Problem::new(rejection.status(), rejection.body_text()))?;
        Ok(Self(parameters))
    }
}
