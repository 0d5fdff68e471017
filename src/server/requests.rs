//! What holds for each request over HTTP: how long it may take, and whether it is logged.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::problem::Problem;
use super::running::Running;

/// Answers in time, if only to say that it took too long.
#[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
pub(super) async fn in_time(
    State(running): State<Arc<Running>>,
    request: Request,
    next: Next,
) -> Response {
    let most = running.in_force.load().config.server().request_timeout;
    tokio::time::timeout(most, next.run(request)).await.unwrap_or_else(|_| {
        let detail =
            format!("the request took longer than {most:?}: what it asked may have been charged");
        Problem::new(StatusCode::REQUEST_TIMEOUT, detail).into_response()
    })
}

/// Logs the request, if that was chosen: without what follows `?`, where keys are.
#[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
pub(super) async fn logged(
    State(running): State<Arc<Running>>,
    request: Request,
    next: Next,
) -> Response {
    if !running.in_force.load().config.server().access_log {
        return next.run(request).await;
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let began = Instant::now();
    let answer = next.run(request).await;
    let (status, took) = (answer.status().as_u16(), began.elapsed());
    tracing::info!(target: "tidegate::access", "{method} {path} {status} {took:?}");
    answer
}
