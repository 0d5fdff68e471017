//! Overrides of keys, and switches of limits.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Body, LimitName, NoParameters, Object, Parameters, whole};
use super::problem::{PROBLEM_JSON, Problem, ProblemBody};
use super::running::Running;
use crate::limiter::Overrides;
use crate::network::Network;
use crate::overrides::{Override, OverrideError, Switch};
use crate::quota::Quota;

/// A hundred years.
const LASTING_MS_MAX: u64 = 100 * 365 * 24 * 3_600_000;

/// The keys that an override is for: one of these.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct KeysQuery {
    #[param(nullable = false)]
    key: Option<String>,
    /// For keys that begin with it: at most 512 bytes.
    #[param(nullable = false, max_length = 512)]
    prefix: Option<String>,
    /// For keys that are addresses in it.
    #[param(nullable = false, example = "10.0.0.0/8")]
    network: Option<String>,
}

/// What holds for the keys, and for how long.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Override)]
struct SetBody {
    set: Setting,
    /// In milliseconds; for ever without it.
    #[serde(default, deserialize_with = "lasting")]
    #[schema(value_type = Option<u64>, nullable = false, minimum = 1, maximum = 3_153_600_000_000_u64)]
    lasting_ms: Option<Duration>,
}

/// What holds for the keys.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Setting {
    Allow,
    Block,
    Plan(String),
    #[schema(value_type = String)]
    Quota(Quota),
}

/// How the limit is from now on.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Switch)]
struct SwitchBody {
    /// on, shadow or off.
    #[schema(value_type = String, pattern = "^(on|shadow|off)$")]
    switch: Switch,
}

fn lasting<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let millis: u64 = whole(deserializer)?;
    if !(1..=LASTING_MS_MAX).contains(&millis) {
        return Err(D::Error::custom(format!("{millis}: must be 1 to {LASTING_MS_MAX}")));
    }
    Ok(Some(Duration::from_millis(millis)))
}

/// What is told when it is done.
type Done = Result<StatusCode, Problem>;

impl KeysQuery {
    fn keys(self) -> Result<Override<'static>, Problem> {
        let wrong = |detail: String| Problem::new(StatusCode::BAD_REQUEST, detail);
        match self {
            Self { key: Some(key), prefix: None, network: None } => Ok(Override::key(key)),
            Self { key: None, prefix: Some(prefix), network: None } => Ok(Override::prefix(prefix)),
            Self { key: None, prefix: None, network: Some(network) } => {
                let network: Result<Network, _> = network.parse();
                network.map(Override::network).map_err(|error| wrong(error.to_string()))
            }
            _ => Err(wrong("name the keys by one of key, prefix and network".to_owned())),
        }
    }
}

/// The overrides of a limiter that has such a limit at present.
fn overrides(running: &Running, limit: &str) -> Result<Overrides, Problem> {
    running.limit(&running.in_force.load(), limit, None).map_err(Problem::outside)?;
    Ok(running.limiter.overrides())
}

/// Sets what holds for some keys, in place of what was set for them.
#[utoipa::path(
    put,
    path = "/v1/limits/{limit}/overrides",
    operation_id = "set_override",
    params(("limit" = String, Path, description = "The limit's name."), KeysQuery),
    request_body = SetBody,
    security(("token" = [])),
    responses(
        (status = 204, description = "Done."),
        (status = 409, body = ProblemBody, content_type = PROBLEM_JSON, description = "There are too many overrides."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store did not take it, or the service ends."),
    ),
)]
pub(super) async fn set(
    State(running): State<Arc<Running>>,
    LimitName(limit): LimitName,
    Parameters(query): Parameters<KeysQuery>,
    body: Body,
) -> Done {
    let overrides = overrides(&running, &limit)?;
    let keys = query.keys()?;
    let Object(SetBody { set, lasting_ms }) = body.parse()?;
    let set = match set {
        Setting::Allow => keys.allow(),
        Setting::Block => keys.block(),
        Setting::Plan(name) => keys.plan(name),
        Setting::Quota(quota) => keys.quota(quota),
    };
    let set = match lasting_ms {
        Some(time) => set.lasting(time),
        None => set,
    };
    done(overrides.set(&limit, set).await)
}

/// Removes what was set for exactly these keys.
#[utoipa::path(
    delete,
    path = "/v1/limits/{limit}/overrides",
    operation_id = "remove_override",
    params(("limit" = String, Path, description = "The limit's name."), KeysQuery),
    security(("token" = [])),
    responses(
        (status = 204, description = "Done."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store did not take it, or the service ends."),
    ),
)]
pub(super) async fn remove(
    State(running): State<Arc<Running>>,
    LimitName(limit): LimitName,
    Parameters(query): Parameters<KeysQuery>,
) -> Done {
    done(overrides(&running, &limit)?.remove(&limit, query.keys()?).await)
}

/// Switches a limit on, to shadow mode, or off.
#[utoipa::path(
    put,
    path = "/v1/limits/{limit}/switch",
    operation_id = "switch_limit",
    params(("limit" = String, Path, description = "The limit's name.")),
    request_body = SwitchBody,
    security(("token" = [])),
    responses(
        (status = 204, description = "Done."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store did not take it, or the service ends."),
    ),
)]
pub(super) async fn switch(
    State(running): State<Arc<Running>>,
    LimitName(limit): LimitName,
    Parameters(NoParameters {}): Parameters<NoParameters>,
    body: Body,
) -> Done {
    let overrides = overrides(&running, &limit)?;
    let Object(SwitchBody { switch }) = body.parse()?;
    done(overrides.switch(&limit, switch).await)
}

/// Lets a limit be as it was configured.
#[utoipa::path(
    delete,
    path = "/v1/limits/{limit}/switch",
    operation_id = "switch_limit_back",
    params(("limit" = String, Path, description = "The limit's name.")),
    security(("token" = [])),
    responses(
        (status = 204, description = "Done."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store did not take it, or the service ends."),
    ),
)]
pub(super) async fn switch_back(
    State(running): State<Arc<Running>>,
    LimitName(limit): LimitName,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Done {
    done(overrides(&running, &limit)?.switch_back(&limit).await)
}

fn done(result: Result<(), OverrideError>) -> Done {
    let problem = |error: OverrideError| {
        let of = |status| Problem::new(status, error.to_string());
        match &error {
            OverrideError::UnknownLimit { .. } => of(StatusCode::NOT_FOUND),
            OverrideError::UnknownPlan { .. } => {
                of(StatusCode::UNPROCESSABLE_ENTITY).at("plan").within("set")
            }
            OverrideError::Quota(_) => {
                of(StatusCode::UNPROCESSABLE_ENTITY).at("quota").within("set")
            }
            OverrideError::NothingSet { .. } => of(StatusCode::UNPROCESSABLE_ENTITY).at("set"),
            OverrideError::PrefixTooLong { .. } => of(StatusCode::BAD_REQUEST),
            OverrideError::TooMany => of(StatusCode::CONFLICT),
            OverrideError::Store(_) | OverrideError::Ended => of(StatusCode::SERVICE_UNAVAILABLE),
        }
    };
    result.map(|()| StatusCode::NO_CONTENT).map_err(problem)
}
