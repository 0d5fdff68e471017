//! Overrides of keys, and switches of limits.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;

use super::extract::{Body, LimitName, NoParameters, Object, Parameters};
use super::problem::Problem;
use super::running::Running;
use crate::limiter::Overrides;
use crate::network::Network;
use crate::overrides::{Override, OverrideError, Switch};
use crate::quota::Quota;

/// A hundred years.
const LASTING_MS_MAX: u64 = 100 * 365 * 24 * 3_600_000;

/// The keys that an override is for: one of these.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysQuery {
    key: Option<String>,
    prefix: Option<String>,
    network: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetBody {
    set: Setting,
    lasting_ms: Option<NonZeroU64>,
}

/// What holds for the keys.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Setting {
    Allow,
    Block,
    Plan(String),
    Quota(Quota),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchBody {
    switch: Switch,
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
    let set = match lasting_ms.map(NonZeroU64::get) {
        None => set,
        Some(millis @ ..=LASTING_MS_MAX) => set.lasting(Duration::from_millis(millis)),
        Some(millis) => {
            let detail = format!("lasting_ms: {millis}: must be 1 to {LASTING_MS_MAX}");
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).at("lasting_ms"));
        }
    };
    done(overrides.set(&limit, set).await)
}

pub(super) async fn remove(
    State(running): State<Arc<Running>>,
    LimitName(limit): LimitName,
    Parameters(query): Parameters<KeysQuery>,
) -> Done {
    done(overrides(&running, &limit)?.remove(&limit, query.keys()?).await)
}

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
