//! `/v1/limits/{limit}/keys`: how a key stands, and how it begins anew.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::check::{Answer, millis};
use super::extract::{LimitName, Parameters};
use super::problem::{PROBLEM_JSON, Problem, ProblemBody};
use super::running::Running;
use crate::decision::{Decision, Held, Source, View};
use crate::error::StoreError;
use crate::limiter::ResetError;

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct KeyQuery {
    key: String,
    #[param(nullable = false)]
    plan: Option<String>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ResetQuery {
    key: String,
}

/// How a key stands, and where its tokens are.
#[derive(Serialize, ToSchema)]
pub(super) struct KeyState {
    #[serde(flatten)]
    answer: Answer,
    /// Whether it is allowed or denied whatever tokens it has.
    fixed: bool,
    /// Tokens that this process holds.
    here: u64,
    /// Tokens that the store had at its last word; null if it has not spoken of the key to this process.
    #[schema(required)]
    store: Option<u64>,
    /// How old that word is, in milliseconds.
    #[schema(required)]
    store_age_ms: Option<u64>,
}

impl KeyState {
    fn new(decision: &Decision) -> Self {
        let remaining = decision.remaining();
        let (here, store) = match &decision.source {
            Source::Local(_) => (remaining, None),
            Source::Store(_) => (0, Some((remaining, Duration::ZERO))),
            Source::Lease(held) => {
                let age = held.view.age(decision.now);
                let store = u64::try_from(held.view.tokens()).unwrap_or(0);
                let alone = Source::Lease(Held { view: View::NONE, ..*held });
                let here = Decision { source: alone, ..*decision }.remaining();
                (here, age.map(|age| (store, age)))
            }
            Source::Override(_) | Source::Blocked(_) => (0, None),
        };
        Self {
            answer: Answer::new(decision, 0),
            fixed: decision.is_override(),
            here,
            store: store.map(|(tokens, _)| tokens),
            store_age_ms: store.map(|(_, age)| millis(age)),
        }
    }
}

/// How a key stands, and where its tokens are. Nothing is charged.
#[utoipa::path(
    get,
    path = "/v1/limits/{limit}/keys",
    operation_id = "show_key",
    params(("limit" = String, Path, description = "The limit's name."), KeyQuery),
    security(("token" = [])),
    responses(
        (status = 200, body = KeyState),
        (status = 422, body = ProblemBody, content_type = PROBLEM_JSON, description = "The limit has no such plan."),
    ),
)]
pub(super) async fn show(
    State(running): State<Arc<Running>>,
    LimitName(name): LimitName,
    Parameters(KeyQuery { key, plan }): Parameters<KeyQuery>,
) -> Result<Json<KeyState>, Problem> {
    let in_force = running.in_force.load_full();
    let limit = running.limit(&in_force, &name, plan.as_deref()).map_err(Problem::outside)?;
    Ok(Json(KeyState::new(&limit.look_by_store(&key).await)))
}

/// Lets a key be as if it had never been used, in all processes that share the limit.
#[utoipa::path(
    delete,
    path = "/v1/limits/{limit}/keys",
    operation_id = "reset_key",
    params(("limit" = String, Path, description = "The limit's name."), ResetQuery),
    security(("token" = [])),
    responses(
        (status = 204, description = "Done."),
        (status = 409, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store refuses the key: it has another quota of the limit, or another program's value."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store did not take it in time, or this process has no room for the key."),
    ),
)]
pub(super) async fn reset(
    State(running): State<Arc<Running>>,
    LimitName(name): LimitName,
    Parameters(ResetQuery { key }): Parameters<ResetQuery>,
) -> Result<StatusCode, Problem> {
    let in_force = running.in_force.load_full();
    let limit = running.limit(&in_force, &name, None).map_err(Problem::outside)?;
    limit.reset(&key).await.map_err(|error| {
        let status = match error {
            ResetError::Refused { .. }
            | ResetError::Store { error: StoreError::ForeignKey { .. }, .. } => {
                StatusCode::CONFLICT
            }
            ResetError::Store { .. }
            | ResetError::TooManyKeys { .. }
            | ResetError::Ended { .. } => StatusCode::SERVICE_UNAVAILABLE,
        };
        Problem::new(status, error.to_string())
    })?;
    Ok(StatusCode::NO_CONTENT)
}
