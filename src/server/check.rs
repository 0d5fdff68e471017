//! `POST /v1/check`: one decision, or many.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::problem::Problem;
use super::running::Running;
use crate::decision::Decision;
use crate::error::{CheckError, ConfigError};
use crate::limiter::AsyncLimit;
use crate::rls::DomainLimits;

/// The most checks in one request.
pub const CHECKS_MAX: usize = 1000;

/// What is asked, as far as possible without a copy of the body.
struct Check<'b>(Fields<'b>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fields<'b> {
    #[serde(borrow)]
    pub(super) limit: Cow<'b, str>,
    #[serde(borrow)]
    pub(super) key: Cow<'b, str>,
    #[serde(default = "one_token")]
    pub(super) cost: u32,
    #[serde(borrow)]
    pub(super) plan: Option<Cow<'b, str>>,
}

fn one_token() -> u32 {
    1
}

/// From an object. A list of its values would be taken too, if this was derived.
impl<'de: 'b, 'b> Deserialize<'de> for Check<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

struct ObjectVisitor<'b>(PhantomData<&'b str>);

impl<'de: 'b, 'b> Visitor<'de> for ObjectVisitor<'b> {
    type Value = Fields<'b>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with limit and key")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Fields<'b>, M::Error> {
        Fields::deserialize(MapAccessDeserializer::new(map))
    }
}

/// What is answered.
#[derive(Serialize)]
pub(super) struct Answer {
    allowed: bool,
    limit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'static str>,
    cost: u32,
    burst: u64,
    remaining: u64,
    retry_after_ms: u64,
    reset_after_ms: u64,
    sure: bool,
}

impl Answer {
    pub(super) fn new(decision: &Decision, cost: u32) -> Self {
        Self {
            allowed: decision.is_allowed(),
            limit: decision.limit_name(),
            plan: decision.plan_name(),
            cost,
            burst: decision.burst(),
            remaining: decision.remaining(),
            retry_after_ms: millis(decision.retry_after()),
            reset_after_ms: millis(decision.reset_after()),
            sure: decision.is_sure(),
        }
    }
}

/// Rounded up: who waits for so long has waited long enough.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl Fields<'_> {
    /// The limit that is asked, which can admit the cost.
    pub(super) fn limit<'a>(
        &self,
        running: &Running,
        in_force: &'a DomainLimits,
    ) -> Result<Cow<'a, AsyncLimit>, Problem> {
        let Self { limit: name, plan, cost, .. } = self;
        let unknown = |status, field| {
            move |error: ConfigError| Problem::new(status, error.to_string()).at(field)
        };
        let found = in_force.limit(name).map(Cow::Borrowed);
        // Those that were not configured, or are no more.
        let found = found.map_or_else(|| running.limiter.async_limit(name).map(Cow::Owned), Ok);
        let mut limit = found.map_err(unknown(StatusCode::NOT_FOUND, "limit"))?;
        if let Some(plan) = plan {
            let planned = limit.plan(plan);
            limit = Cow::Owned(planned.map_err(unknown(StatusCode::UNPROCESSABLE_ENTITY, "plan"))?);
        }
        limit.validate_cost(*cost).map_err(|error| wrong_cost(&error))?;
        Ok(limit)
    }
}

pub(super) fn wrong_cost(error: &CheckError) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()).at("cost")
}

/// Decides about the one request that the body is, or about each of those that it lists. If one of them is wrong, none is
/// decided.
pub(super) async fn check(
    State(running): State<Arc<Running>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let body = taken(&running, body)?;
    let is_list = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let checks: Vec<Check<'_>> = if is_list { parsed(&body)? } else { vec![parsed(&body)?] };
    if checks.len() > CHECKS_MAX {
        let detail = format!("the list has {} checks: at most {CHECKS_MAX}", checks.len());
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    let in_list =
        |place, problem: Problem| if is_list { problem.in_element(place) } else { problem };
    let in_force = running.in_force.load_full();
    let asked = checks.iter().enumerate().map(|(place, check)| {
        check.0.limit(&running, &in_force).map_err(|problem| in_list(place, problem))
    });
    let limits = asked.collect::<Result<Vec<_>, _>>()?;
    let requests = limits.iter().zip(&checks);
    let requests = requests.map(|(limit, Check(it))| limit.on(&*it.key).cost(it.cost));
    let decisions = running.limiter.check_each(requests).await;
    // A reload that lowers a burst at this moment is the only reason for an error, after others of the list were decided.
    let answers = decisions.iter().zip(&checks).enumerate().map(|(place, (decision, check))| {
        let decision = decision.as_ref().map_err(|error| in_list(place, wrong_cost(error)))?;
        Ok(Answer::new(decision, check.0.cost))
    });
    match answers.collect::<Result<Vec<_>, _>>()?.as_slice() {
        [answer] if !is_list => Ok(Json(answer).into_response()),
        answers => Ok(Json(answers).into_response()),
    }
}

/// The body, if requests are still decided.
pub(super) fn taken(
    running: &Running,
    body: Result<Bytes, BytesRejection>,
) -> Result<Bytes, Problem> {
    if running.refuses_checks() {
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the service ends"));
    }
    body.map_err(|rejection| Problem::of_body(&rejection))
}

pub(super) fn parsed<'b, T: Deserialize<'b>>(body: &'b [u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).or_else(|_| parsed_or_where(body))
}

/// Parses once more, and notes where it is: that takes longer.
fn parsed_or_where<'b, T: Deserialize<'b>>(body: &'b [u8]) -> Result<T, Problem> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json);
    let value = value.map_err(|error| Problem::of_json(&error))?;
    // Nothing may follow.
    json.end().map_err(|error| Problem::new(StatusCode::BAD_REQUEST, error.to_string()))?;
    Ok(value)
}
