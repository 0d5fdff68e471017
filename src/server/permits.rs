//! `POST /v1/acquire` and `/v1/release`: permits that are held while the work is under way. `GET /v1/concurrency`: their limits.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use utoipa::ToSchema;

use super::extract::{Body, Object, whole};
use super::open_permits::OPEN_MAX;
use super::problem::{PROBLEM_JSON, Problem, ProblemBody};
use super::records::{SETTLED_WITHIN, TIME_TO_LIVE, Unfinished, record_id, time_to_live};
use super::running::Running;
use crate::error::{AcquireError, ConfigError};
use crate::limiter::concurrency::NotHandedOver;
use crate::limiter::{ConcurrencyLimit, Permit};
use crate::store::record_id::RecordId;
use crate::sync::HANDED_OVER_MAX;

/// The most permits of one request.
const COST_MAX: u32 = HANDED_OVER_MAX;
/// The longest that a request can wait for its turn.
const WAIT_MS_MAX: u64 = 60_000;

/// What is wanted.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Acquire<'b> {
    /// The concurrency limit's name.
    #[serde(borrow)]
    limit: Cow<'b, str>,
    /// Whose permits are taken.
    #[serde(borrow)]
    key: Cow<'b, str>,
    /// How many permits: all or none.
    #[serde(default = "one", deserialize_with = "cost")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    cost: u32,
    /// For how long they are held unless they are released, in milliseconds.
    #[serde(rename = "ttl_ms", default = "ten_minutes", deserialize_with = "time_to_live")]
    #[schema(value_type = u64, minimum = 1, maximum = 86_400_000, default = 600_000)]
    time_to_live: Duration,
    /// How long to wait for one permit, in milliseconds; several cannot be waited for.
    #[serde(rename = "wait_ms", default, deserialize_with = "wait")]
    #[schema(value_type = u64, minimum = 0, maximum = 60_000, default = 0)]
    wait: Duration,
}

/// What is not needed any more.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Release<'b> {
    /// As it was acquired.
    #[serde(borrow)]
    limit: Cow<'b, str>,
    /// As it was acquired.
    #[serde(borrow)]
    key: Cow<'b, str>,
    #[serde(deserialize_with = "record_id")]
    #[schema(value_type = String, pattern = "^[0-9a-f]{32}$")]
    permit: RecordId,
}

/// Whether there were so many.
#[derive(Serialize, ToSchema)]
pub(super) struct Acquired {
    allowed: bool,
    limit: String,
    cost: u32,
    /// The most permits of a key.
    max: u32,
    /// What to release; null if the request is denied.
    #[schema(required)]
    permit: Option<String>,
}

/// What came free.
#[derive(Serialize, ToSchema)]
pub(super) struct Released {
    limit: String,
    /// How many permits.
    cost: u32,
}

/// A concurrency limit.
#[derive(Serialize, ToSchema)]
pub(super) struct Shown {
    name: String,
    /// The most permits of a key.
    max: u32,
    /// Whether each process keeps it alone.
    local: bool,
}

fn one() -> u32 {
    1
}

fn ten_minutes() -> Duration {
    TIME_TO_LIVE
}

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let cost: u32 = whole(deserializer)?;
    if (1..=COST_MAX).contains(&cost) {
        return Ok(cost);
    }
    Err(D::Error::custom(format!("{cost}: must be 1 to {COST_MAX}")))
}

fn wait<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let millis: u64 = whole(deserializer)?;
    if millis <= WAIT_MS_MAX {
        return Ok(Duration::from_millis(millis));
    }
    Err(D::Error::custom(format!("{millis}: must be 0 to {WAIT_MS_MAX}")))
}

fn named(running: &Running, name: &str) -> Result<ConcurrencyLimit, Problem> {
    let unknown =
        |error: ConfigError| Problem::new(StatusCode::NOT_FOUND, error.to_string()).at("limit");
    running.limiter.concurrency(name).map_err(unknown)
}

fn not_acquired(reason: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, format!("nothing was acquired: {reason}"))
}

/// Takes permits, if so many are free, or one within a time.
#[utoipa::path(
    post,
    path = "/v1/acquire",
    request_body = Acquire<'_>,
    security(("token" = [])),
    responses(
        (status = 200, body = Acquired),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "Nothing was acquired: the store did not answer in time, too many wait or hold permits, or the service ends."),
    ),
)]
pub(super) async fn acquire(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Acquired>, Problem> {
    let Object(asked): Object<Acquire<'_>> = body.parse()?;
    let limit = named(&running, &asked.limit)?;
    let wrong = |field| {
        move |detail: String| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).at(field)
    };
    if !asked.wait.is_zero() && asked.cost > 1 {
        let detail = format!("is for one permit, and the cost is {}", asked.cost);
        return Err(wrong("wait_ms")(detail));
    }
    let mut ends = running.ends();
    let acquired = tokio::select! {
        biased;
        acquired = ask(&limit, &asked) => acquired,
        _ = ends.wait_for(|ends| *ends), if !asked.wait.is_zero() => {
            return Err(not_acquired("the service ends"));
        }
    };
    let answer = |id: Option<RecordId>| {
        let (limit, cost, max) = (limit.name().to_owned(), asked.cost, limit.max());
        let permit = id.map(|id| id.to_string());
        Ok(Json(Acquired { allowed: permit.is_some(), limit, cost, max, permit }))
    };
    match acquired {
        Ok(permit) => {
            let id = if limit.is_shared() {
                hand_over(running, &limit, (&asked.key, permit), asked.time_to_live).await
            } else {
                hold_here(&running, permit, asked.time_to_live)
            };
            answer(Some(id.map_err(not_acquired)?))
        }
        Err(AcquireError::Denied { .. } | AcquireError::TimedOut { .. }) => answer(None),
        Err(error @ AcquireError::Cost { .. }) => Err(wrong("cost")(error.to_string())),
        Err(error) => Err(not_acquired(error)),
    }
}

async fn ask(limit: &ConcurrencyLimit, asked: &Acquire<'_>) -> Result<Permit, AcquireError> {
    let Acquire { key, cost, wait, .. } = asked;
    if wait.is_zero() {
        limit.acquire_n(&**key, *cost).await
    } else {
        limit.acquire_within(&**key, *wait).await
    }
}

/// Holds a permit of a limit that no process shares.
fn hold_here(
    running: &Running,
    permit: Permit,
    time_to_live: Duration,
) -> Result<RecordId, String> {
    let id = RecordId::random().map_err(|error| error.to_string())?;
    let is_held = running.open_permits.hold(id, permit, time_to_live);
    is_held.then_some(id).ok_or_else(|| format!("{OPEN_MAX} are held, or the service ends"))
}

/// Hands a permit over to the store. If the client leaves meanwhile, it is released.
#[allow(clippy::disallowed_methods, reason = "somebody releases what the store has")]
async fn hand_over(
    running: Arc<Running>,
    limit: &ConcurrencyLimit,
    (key, permit): (&str, Permit),
    time_to_live: Duration,
) -> Result<RecordId, String> {
    let ends = || "the service ends".to_owned();
    let unfinished = Unfinished::begin(running).ok_or_else(ends)?;
    let (sender, receiver) = oneshot::channel();
    let (limit, key) = (limit.clone(), key.to_owned());
    let mut handing_over = HandingOver { limit: limit.clone(), key: key.clone(), receiver };
    tokio::spawn(async move {
        let (outcome, lost) = match permit.hand_over(time_to_live).await {
            Ok(id) => (Ok(id), None),
            Err(NotHandedOver { error, lost }) => (Err(error.to_string()), lost),
        };
        let unread = sender.send(outcome);
        // Otherwise they come free when their time is over.
        let Ok(_releasing) = unfinished.releasing.try_acquire() else { return };
        if let Some(lost) = lost {
            unfinished.limiter.release_lost(lost, unfinished.ends()).await;
        } else if let Err(Ok(id)) = unread {
            release_unread(&limit, &key, id).await;
        }
    });
    (&mut handing_over.receiver).await.unwrap_or_else(|_| Err(ends()))
}

/// A request whose permit is handed over. If its client leaves when the answer is there already, nobody reads it.
struct HandingOver {
    limit: ConcurrencyLimit,
    key: String,
    receiver: oneshot::Receiver<Result<RecordId, String>>,
}

impl Drop for HandingOver {
    #[allow(clippy::disallowed_methods, reason = "nobody waits for it")]
    fn drop(&mut self) {
        self.receiver.close();
        if let (Ok(Ok(id)), Ok(runtime)) = (self.receiver.try_recv(), Handle::try_current()) {
            let (limit, key) = (self.limit.clone(), std::mem::take(&mut self.key));
            runtime.spawn(async move { release_unread(&limit, &key, id).await });
        }
    }
}

async fn release_unread(limit: &ConcurrencyLimit, key: &str, id: RecordId) {
    // Otherwise it comes free when its time is over.
    let _ = tokio::time::timeout(SETTLED_WITHIN, limit.release(key, id)).await;
}

/// Releases permits, whichever process gave them.
#[utoipa::path(
    post,
    path = "/v1/release",
    request_body = Release<'_>,
    security(("token" = [])),
    responses(
        (status = 200, body = Released),
        (status = 404, body = ProblemBody, content_type = PROBLEM_JSON, description = "There is no such limit, or no such permit of the key."),
        (status = 503, body = ProblemBody, content_type = PROBLEM_JSON, description = "The store has not answered: it may be released yet. Or the service ends."),
    ),
)]
#[allow(clippy::disallowed_methods, reason = "it goes on if the client leaves")]
pub(super) async fn release(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Json<Released>, Problem> {
    let Object(Release { limit, key, permit }) = body.parse()?;
    let limit = named(&running, &limit)?;
    let name = limit.name().to_owned();
    let released = |cost| Ok(Json(Released { limit: name, cost }));
    let unknown = || {
        let detail =
            format!("{permit} is no permit of the key: it was released, or its time is over");
        Problem::new(StatusCode::NOT_FOUND, detail).at("permit")
    };
    if !limit.is_shared() {
        let stored = limit.stored_name(&*key);
        let cost = running.open_permits.release(permit, limit.name(), &stored);
        return cost.map_or_else(|| Err(unknown()), released);
    }
    let unsettled = |reason: String| {
        let detail = format!("it may be released yet: {reason}");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    };
    let ends = || unsettled("the service ends".to_owned());
    let unfinished = Unfinished::begin(running).ok_or_else(ends)?;
    let key = key.into_owned();
    let releasing = tokio::spawn(async move {
        // Not for longer: whoever hears nothing asks again.
        let free = tokio::time::timeout(SETTLED_WITHIN, limit.release(&*key, permit)).await;
        drop(unfinished);
        let silent = |_| format!("no answer within {SETTLED_WITHIN:?}");
        free.map_err(silent)?.map_err(|error| error.to_string())
    });
    let free = releasing.await.map_err(|error| unsettled(error.to_string()))?;
    match free.map_err(unsettled)? {
        0 => Err(unknown()),
        cost => released(cost),
    }
}

/// The concurrency limits.
#[utoipa::path(
    get,
    path = "/v1/concurrency",
    operation_id = "list_concurrency_limits",
    responses((status = 200, body = Vec<Shown>)),
)]
pub(super) async fn list(State(running): State<Arc<Running>>) -> Json<Vec<Shown>> {
    let shown = |limit: ConcurrencyLimit| Shown {
        name: limit.name().to_owned(),
        max: limit.max(),
        local: !limit.is_shared(),
    };
    Json(running.limiter.concurrency_limits().map(shown).collect())
}
