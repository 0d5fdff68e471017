//! Overrides of keys, and switches of limits.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::check::{parsed, taken};
use super::problem::Problem;
use super::running::Running;
use crate::network::Network;
use crate::overrides::{Override, OverrideError, Switch};
use crate::quota::Quota;

/// The keys that an override is for: one of these.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    key: Option<String>,
    prefix: Option<String>,
    network: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    set: Ruling,
    lasting_ms: Option<NonZeroU64>,
}

/// What holds for the keys.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Ruling {
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

type Asked = Result<Query<Keys>, QueryRejection>;
type AsBytes = Result<Bytes, BytesRejection>;

/// What is told when it is done.
type Done = Result<StatusCode, Problem>;

impl Keys {
    fn of(asked: Asked) -> Result<Override<'static>, Problem> {
        let Query(keys) = asked.map_err(|rejection| Problem::of_query(&rejection))?;
        match keys {
            Self { key: Some(key), prefix: None, network: None } => Ok(Override::key(key)),
            Self { key: None, prefix: Some(prefix), network: None } => Ok(Override::prefix(prefix)),
            Self { key: None, prefix: None, network: Some(network) } => {
                let network: Result<Network, _> = network.parse();
                network.map(Override::network).map_err(|error| unprocessable(error.to_string()))
            }
            _ => Err(unprocessable("name the keys by one of key, prefix and network")),
        }
    }
}

fn unprocessable(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
}

pub(super) async fn set(
    State(running): State<Arc<Running>>,
    Path(limit): Path<String>,
    asked: Asked,
    body: AsBytes,
) -> Done {
    let keys = Keys::of(asked)?;
    let body = taken(&running, body)?;
    let Body { set, lasting_ms } = parsed(&body)?;
    let ruled = match set {
        Ruling::Allow => keys.allow(),
        Ruling::Block => keys.block(),
        Ruling::Plan(name) => keys.plan(name),
        Ruling::Quota(quota) => keys.quota(quota),
    };
    let lasting = match lasting_ms {
        Some(millis) => ruled.lasting(Duration::from_millis(millis.get())),
        None => ruled,
    };
    done(running.limiter.overrides().set(&limit, lasting).await)
}

pub(super) async fn remove(
    State(running): State<Arc<Running>>,
    Path(limit): Path<String>,
    asked: Asked,
) -> Done {
    done(running.limiter.overrides().remove(&limit, Keys::of(asked)?).await)
}

pub(super) async fn switch(
    State(running): State<Arc<Running>>,
    Path(limit): Path<String>,
    body: AsBytes,
) -> Done {
    let body = taken(&running, body)?;
    let SwitchBody { switch } = parsed(&body)?;
    done(running.limiter.overrides().switch(&limit, switch).await)
}

pub(super) async fn switch_back(
    State(running): State<Arc<Running>>,
    Path(limit): Path<String>,
) -> Done {
    done(running.limiter.overrides().switch_back(&limit).await)
}

fn done(result: Result<(), OverrideError>) -> Done {
    let problem = |error: OverrideError| {
        let status = match error {
            OverrideError::UnknownLimit { .. } => StatusCode::NOT_FOUND,
            OverrideError::UnknownPlan { .. }
            | OverrideError::Quota(_)
            | OverrideError::NothingSet { .. }
            | OverrideError::PrefixTooLong { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            OverrideError::TooMany => StatusCode::CONFLICT,
            OverrideError::Store(_) | OverrideError::Ended => StatusCode::SERVICE_UNAVAILABLE,
        };
        Problem::new(status, error.to_string())
    };
    result.map(|()| StatusCode::NO_CONTENT).map_err(problem)
}
