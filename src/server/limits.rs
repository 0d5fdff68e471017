//! `GET /v1/limits`: the limits that the service has.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::running::Running;
use crate::algorithm::Rule;
use crate::limit::{Limit, Mode};
use crate::limiter::AsyncLimit;

#[derive(Serialize, ToSchema)]
#[schema(as = Limit)]
pub(super) struct Shown {
    name: String,
    algorithm: &'static str,
    #[schema(value_type = String)]
    mode: Mode,
    #[serde(flatten)]
    quota: ShownQuota,
    plans: Vec<ShownPlan>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Plan)]
struct ShownPlan {
    name: String,
    #[serde(flatten)]
    quota: ShownQuota,
}

/// What a key gets.
#[derive(Serialize, ToSchema)]
#[schema(as = Quota)]
struct ShownQuota {
    #[schema(example = "600/min")]
    quota: String,
    /// What a key can spend at once, in tokens.
    burst: u64,
    /// The time zone whose hours, days or months the windows are.
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<&'static str>,
}

impl From<Rule> for ShownQuota {
    fn from(rule: Rule) -> Self {
        let zone = match rule {
            Rule::FixedWindow(window) => window.zone_name(),
            _ => None,
        };
        Self { quota: rule.quota_text(), burst: rule.quota().burst_tokens(), zone }
    }
}

impl Shown {
    /// A limit by its definition, in the mode that it has in this process.
    fn new(limit: &Limit, mode: Mode) -> Self {
        let plan = |(name, rule): (&str, Rule)| ShownPlan { name: name.into(), quota: rule.into() };
        Self {
            name: limit.name().into(),
            algorithm: limit.rule().algorithm(),
            mode,
            quota: limit.rule().into(),
            plans: limit.plans().map(plan).collect(),
        }
    }
}

/// The limits in force.
#[utoipa::path(
    get,
    path = "/v1/limits",
    operation_id = "list_limits",
    responses((status = 200, body = Vec<Shown>)),
)]
pub(super) async fn list(State(running): State<Arc<Running>>) -> Json<Vec<Shown>> {
    let in_force = running.in_force.load();
    let shown = |limit: &Limit| {
        // The limits in force have all of their configuration.
        let mode = in_force.limit(limit.name()).map_or(limit.mode, AsyncLimit::mode);
        Shown::new(limit, mode)
    };
    Json(in_force.config.limits().iter().map(shown).collect())
}
