//! `GET /v1/limits/{limit}/keys`: how a key stands.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use serde::{Deserialize, Serialize};

use super::check::{Answer, Fields, wrong_cost};
use super::problem::Problem;
use super::running::Running;
use crate::decision::{Decision, Source};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    key: String,
    plan: Option<String>,
}

/// How a key stands, and where its tokens are.
#[derive(Serialize)]
pub(super) struct Standing {
    #[serde(flatten)]
    answer: Answer,
    /// Whether an override decides about the key.
    r#override: bool,
    /// Tokens that this process holds.
    here: u64,
    /// Tokens that the store had at its last word.
    store: u64,
}

impl Standing {
    fn new(decision: &Decision) -> Self {
        let remaining = decision.remaining();
        let (here, store) = match &decision.source {
            Source::Local(_) => (remaining, 0),
            Source::Store(_) => (0, remaining),
            Source::Lease(held) => {
                let store = u64::try_from(held.view.tokens()).unwrap_or(0).min(remaining);
                (remaining - store, store)
            }
            Source::Override(_) => (0, 0),
        };
        let answer = Answer::new(decision, 0);
        Self { answer, r#override: decision.is_override(), here, store }
    }
}

pub(super) async fn show(
    State(running): State<Arc<Running>>,
    Path(limit): Path<String>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Standing>, Problem> {
    let Query(Asked { key, plan }) = asked.map_err(|rejection| Problem::of_query(&rejection))?;
    let in_force = running.in_force.load_full();
    let fields =
        Fields { limit: limit.into(), key: key.into(), cost: 0, plan: plan.map(Into::into) };
    let limit = fields.limit(&running, &in_force)?;
    let decision = limit.check_sure_n(&*fields.key, 0).await.map_err(|error| wrong_cost(&error))?;
    Ok(Json(Standing::new(&decision)))
}
