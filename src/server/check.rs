//! `POST /v1/check`: one decision, or many.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::extract::{Body, Object};
use super::problem::Problem;
use super::running::Running;
use crate::decision::Decision;
use crate::error::CheckError;
use crate::limiter::AsyncLimit;
use crate::rls::DomainLimits;

/// The most checks in one request.
pub const CHECKS_MAX: usize = 1000;

/// What is asked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check<'b> {
    #[serde(borrow)]
    limit: Cow<'b, str>,
    #[serde(borrow)]
    key: Cow<'b, str>,
    #[serde(default = "one_token")]
    cost: u32,
    plan: Option<Cow<'b, str>>,
}

fn one_token() -> u32 {
    1
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

/// Rounded up, so that a client does not come back too early.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl Check<'_> {
    /// The limit that is asked, which can admit the cost.
    fn limit<'a>(
        &self,
        running: &Running,
        in_force: &'a DomainLimits,
    ) -> Result<Cow<'a, AsyncLimit>, Problem> {
        let limit = running.limit(in_force, &self.limit, self.plan.as_deref())?;
        limit.validate_cost(self.cost).map_err(|error| wrong_cost(&error))?;
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
    body: Body,
) -> Result<Response, Problem> {
    let is_list = body.is_list();
    let checks: Vec<Object<Check<'_>>> = if is_list { body.parse()? } else { vec![body.parse()?] };
    if checks.len() > CHECKS_MAX {
        let detail = format!("the list has {} checks: at most {CHECKS_MAX}", checks.len());
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    let in_list = |place, problem: Problem| if is_list { problem.within(place) } else { problem };
    let in_force = running.in_force.load_full();
    let asked = checks.iter().enumerate().map(|(place, Object(check))| {
        check.limit(&running, &in_force).map_err(|problem| in_list(place, problem))
    });
    let limits = asked.collect::<Result<Vec<_>, _>>()?;
    let requests = limits.iter().zip(&checks);
    let requests = requests.map(|(limit, Object(it))| limit.on(&*it.key).cost(it.cost));
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
