//! `POST /v1/reserve`, `/v1/commit` and `/v1/refund`: costs that are known later.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::check::{Answer, wrong_cost};
use super::extract::{Body, Object, whole};
use super::open_reservations::OPEN_MAX;
use super::problem::{PROBLEM_JSON, Problem, ProblemBody};
use super::records::{SETTLED_WITHIN, TIME_TO_LIVE, Unfinished, record_id, time_to_live};
use super::running::Running;
use crate::decision::Decision;
use crate::limiter::ReserveError;
use crate::limiter::handed_over::SettledReservation;
use crate::store::record_id::RecordId;

/// What is reserved.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Reserve<'b> {
    /// The limit's name.
    #[serde(borrow)]
    limit: Cow<'b, str>,
    /// Whose tokens are reserved.
    #[serde(borrow)]
    key: Cow<'b, str>,
    /// What the request may cost, in tokens.
    #[serde(deserialize_with = "whole")]
    #[schema(minimum = 0)]
    cost: u32,
    /// The plan that the key has, or else the limit's own quota.
    plan: Option<Cow<'b, str>>,
    /// For how long it can be settled, in milliseconds; after that the tokens stay spent.
    #[serde(rename = "ttl_ms", default = "ten_minutes", deserialize_with = "time_to_live")]
    #[schema(value_type = u64, minimum = 1, maximum = 86_400_000, default = 600_000)]
    time_to_live: Duration,
}

/// What a request that was allowed cost in the end.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Commit {
    #[serde(deserialize_with = "record_id")]
    #[schema(value_type = String, pattern = "^[0-9a-f]{32}$")]
    reservation: RecordId,
    /// In tokens: less than was reserved gives the rest back, and more is charged whatever the key has left.
    #[serde(deserialize_with = "whole")]
    #[schema(minimum = 0)]
    cost: u32,
}

/// A request that cost nothing in the end.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Refund {
    #[serde(deserialize_with = "record_id")]
    #[schema(value_type = String, pattern = "^[0-9a-f]{32}$")]
    reservation: RecordId,
}

/// What a check is answered, and what was reserved.
#[derive(Serialize, ToSchema)]
pub(super) struct Reserved {
    #[serde(flatten)]
    answer: Answer,
    /// What to commit; null if the request is denied.
    #[schema(required)]
    reservation: Option<String>,
}

/// How a reservation was settled.
#[derive(Serialize, ToSchema)]
pub(super) struct Settled {
    limit: String,
    /// Tokens that had been reserved.
    reserved: u32,
    /// Tokens that are charged in their place.
    cost: u32,
}

fn ten_minutes() -> Duration {
    TIME_TO_LIVE
}

/// Decides about a request, and reserves what it may cost.
#[utoipa::path(
    post,
    path = "/v1/reserve",
    request_body = Reserve<'_>,
    security(("token" = [])),
    responses(
        (status = 200, body = Reserved),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such limit."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "Nothing was reserved: the store did not take it, too many are open, or the service ends."),
    ),
)]
pub(super) async fn reserve(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Reserved>, Problem> {
    let Object(asked): Object<Reserve<'_>> = body.parse()?;
    let in_force = running.in_force.load_full();
    let limit = running.limit(&in_force, &asked.limit, asked.plan.as_deref())?;
    let told = |decision: &Decision, id: Option<RecordId>| {
        let answer = Answer::new(decision, asked.cost);
        Ok(Json(Reserved { answer, reservation: id.map(|id| id.to_string()) }))
    };
    let unreserved = |reason: String| {
        let detail = format!("nothing was reserved: {reason}");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    };
    let validated = limit.0.validate_cost_of(&*asked.key, asked.cost);
    validated.map_err(|error| wrong_cost(&error))?;
    let answers = limit.check_store_answers(&asked.key).await;
    answers.map_err(|error| unreserved(error.to_string()))?;
    let reservation = match limit.reserve(&*asked.key, asked.cost).await {
        Ok(reservation) => reservation,
        Err(ReserveError::Denied(denied)) => return told(&denied.decision(), None),
        Err(ReserveError::Check(error)) => return Err(wrong_cost(&error)),
        Err(error @ ReserveError::LeakyBucket { .. }) => {
            return Err(
                Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()).at("limit")
            );
        }
    };
    let decision = reservation.decision();
    if !reservation.is_of_this_process() {
        let handed_over = reservation.hand_over(asked.time_to_live).await;
        return told(&decision, Some(handed_over.map_err(|error| unreserved(error.to_string()))?));
    }
    let id = RecordId::random().map_err(|error| unreserved(error.to_string()))?;
    if running.open_reservations.hold(id, reservation, asked.time_to_live) {
        told(&decision, Some(id))
    } else {
        Err(unreserved(format!("{OPEN_MAX} reservations are open")))
    }
}

/// Settles a reservation, once: the request cost this.
#[utoipa::path(
    post,
    path = "/v1/commit",
    request_body = Commit,
    security(("token" = [])),
    responses(
        (status = 200, body = Settled),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such open reservation."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store has not answered: it may be settled yet. Or the service ends."),
    ),
)]
pub(super) async fn commit(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Settled>, Problem> {
    let Object(Commit { reservation, cost }) = body.parse()?;
    settle(running, reservation, cost).await
}

/// Settles a reservation, once: the request cost nothing.
#[utoipa::path(
    post,
    path = "/v1/refund",
    request_body = Refund,
    security(("token" = [])),
    responses(
        (status = 200, body = Settled),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such open reservation."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store has not answered: it may be settled yet. Or the service ends."),
    ),
)]
pub(super) async fn refund(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Settled>, Problem> {
    let Object(Refund { reservation }) = body.parse()?;
    settle(running, reservation, 0).await
}

#[allow(
    clippy::disallowed_methods,
    reason = "what the store gives away is settled, also if the client has left"
)]
async fn settle(running: Arc<Running>, id: RecordId, cost: u32) -> Result<Json<Settled>, Problem> {
    let told = |limit: String, reserved| Ok(Json(Settled { limit, reserved, cost }));
    if let Some(reservation) = running.open_reservations.take(id) {
        let (limit, reserved) = (reservation.limit_name().to_owned(), reservation.estimate());
        reservation.commit(cost);
        return told(limit, reserved);
    }
    let unknown = || {
        let detail = format!("{id} is no open reservation: it was settled, or its time is over");
        Problem::new(StatusCode::NOT_FOUND, detail).at("reservation")
    };
    let unsettled = |reason: String| {
        let detail = format!("it may be settled yet: {reason}");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    };
    let ends = || unsettled("the service ends".to_owned());
    let unfinished = Unfinished::begin(running).ok_or_else(ends)?;
    let settled = tokio::spawn(async move {
        unfinished.limiter.settle_reservation(id, cost).await.map_err(|error| error.to_string())
    });
    let in_time = tokio::time::timeout(SETTLED_WITHIN, settled).await;
    let ended = in_time.map_err(|_| unsettled(format!("no answer within {SETTLED_WITHIN:?}")))?;
    let settled = ended.map_err(|error| unsettled(error.to_string()))?;
    match settled.map_err(unsettled)? {
        Some(SettledReservation { limit, estimate }) => told(limit, estimate),
        None => Err(unknown()),
    }
}
