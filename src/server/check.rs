//! `POST /v1/check` and `/v1/check-all`: one decision, many, or one by several limits.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

use super::extract::{Body, Object, whole};
use super::problem::{PROBLEM_JSON, Problem, ProblemBody};
use super::running::Running;
use crate::decision::Decision;
use crate::error::CheckError;
use crate::limiter::AsyncLimit;
use crate::limiter::together::part::Patience;
use crate::rls::DomainLimits;

/// The longest that a request to fit several limits waits for the store.
const STORE_WAIT_MAX: Duration = Duration::from_secs(60);

/// The most checks in one request.
pub const CHECKS_MAX: usize = 1000;

/// What is asked.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Check<'b> {
    /// The limit's name.
    #[serde(borrow)]
    limit: Cow<'b, str>,
    /// Whose tokens are spent.
    #[serde(borrow)]
    key: Cow<'b, str>,
    /// Tokens; 0 spends nothing.
    #[serde(default = "one_token", deserialize_with = "whole")]
    #[schema(minimum = 0, default = 1)]
    cost: u32,
    /// The plan that the key has, or else the limit's own quota.
    plan: Option<Cow<'b, str>>,
}

/// One check, or a list of them, at most 1000.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it describes what is read as it comes")]
pub(super) enum Checks<'b> {
    One(Check<'b>),
    Many(Vec<Check<'b>>),
}

/// Limits that one request is to fit, each for a key: at most 1000.
#[derive(ToSchema)]
#[allow(dead_code, reason = "it describes what is read as it comes")]
#[schema(min_items = 1)]
pub(super) struct AllChecks<'b>(Vec<Check<'b>>);

/// The answer to one check, or to each of a list, in order.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it describes what is written as it comes")]
pub(super) enum Answers {
    One(Answer),
    Many(Vec<Answer>),
}

fn one_token() -> u32 {
    1
}

/// What is answered.
#[derive(Serialize, ToSchema)]
pub(super) struct Answer {
    /// Whether the request may go on; then the cost is spent.
    allowed: bool,
    limit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    plan: Option<&'static str>,
    cost: u32,
    /// The most tokens that a key can have.
    burst: u64,
    /// Tokens that the key has left in the cluster, as far as this process knows.
    remaining: u64,
    /// 0, or for how long to wait before the request is worth repeating, in milliseconds.
    retry_after_ms: u64,
    /// Until the key has all its tokens if nobody spends, in milliseconds.
    reset_after_ms: u64,
    /// Whether it is more than a guess.
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
    let of_second = u64::from(time.subsec_nanos().div_ceil(1_000_000));
    time.as_secs().saturating_mul(1000).saturating_add(of_second)
}

impl Check<'_> {
    /// The limit that is asked, which can admit the cost, or does not decide about the key.
    fn limit<'a>(
        &self,
        running: &Running,
        in_force: &'a DomainLimits,
    ) -> Result<Cow<'a, AsyncLimit>, Problem> {
        let limit = running.limit(in_force, &self.limit, self.plan.as_deref())?;
        let validated = limit.0.validate_cost_of(&*self.key, self.cost);
        validated.map_err(|error| wrong_cost(&error))?;
        Ok(limit)
    }
}

/// The limits of checks, of which there are not too many.
fn limits_of<'a>(
    checks: &[Object<Check<'_>>],
    (running, in_force): (&Running, &'a DomainLimits),
    in_list: impl Fn(usize, Problem) -> Problem,
) -> Result<Vec<Cow<'a, AsyncLimit>>, Problem> {
    if checks.len() > CHECKS_MAX {
        let detail = format!("the list has {} checks: at most {CHECKS_MAX}", checks.len());
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    let limits = checks.iter().enumerate().map(|(place, Object(check))| {
        check.limit(running, in_force).map_err(|problem| in_list(place, problem))
    });
    limits.collect()
}

pub(super) fn wrong_cost(error: &CheckError) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()).at("cost")
}

/// Decides about one request, or about each of a list by itself. If one of a list is wrong, none is decided.
#[utoipa::path(
    post,
    path = "/v1/check",
    request_body = Checks<'_>,
    responses(
        (status = 200, body = Answers),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such limit."),
    ),
)]
pub(super) async fn check(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Response, Problem> {
    let is_list = body.is_list();
    let checks: Vec<Object<Check<'_>>> = if is_list { body.parse()? } else { vec![body.parse()?] };
    let in_list = |place, problem: Problem| if is_list { problem.within(place) } else { problem };
    let in_force = running.in_force.load_full();
    let limits = limits_of(&checks, (&running, &in_force), in_list)?;
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

/// Decides about one request that is to fit all of these limits: each is charged, or none. The answer is that of the limit that
/// denies it, or else of the one with the fewest tokens left.
#[utoipa::path(
    post,
    path = "/v1/check-all",
    request_body = AllChecks<'_>,
    responses(
        (status = 200, body = Answer),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such limit."),
    ),
)]
pub(super) async fn check_all(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Answer>, Problem> {
    let checks: Vec<Object<Check<'_>>> = body.parse()?;
    let in_force = running.in_force.load_full();
    let in_list = |place, problem: Problem| problem.within(place);
    let limits = limits_of(&checks, (&running, &in_force), in_list)?;
    let parts = limits.iter().zip(&checks);
    let parts = parts.map(|(limit, Object(it))| limit.on(&*it.key).cost(it.cost));
    // All together wait no longer than one of them would.
    let max_wait = limits.iter().map(|limit| limit.max_wait()).max().unwrap_or_default();
    let patience = Patience::StoreUntil(Instant::now() + max_wait.min(STORE_WAIT_MAX));
    // Each cost fits: those of one limit and key together do not, or there is none.
    let decision = running.limiter.check_all_with(parts, patience).await;
    let decision = decision.map_err(|error| wrong_cost(&error).of_body())?;
    let is_look = checks.iter().all(|Object(check)| check.cost == 0);
    Ok(Json(Answer::new(&decision, if is_look { 0 } else { decision.cost() })))
}
