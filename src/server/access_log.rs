//! A line in the log for each request over HTTP, by choice.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;

use super::running::Running;

/// Logs the request when it is answered: without what follows the `?`, where keys are.
#[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
pub(super) async fn log(
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
    let (status, elapsed_us) = (answer.status().as_u16(), began.elapsed().as_micros());
    tracing::info!(target: "tidegate::access", "{method} {path} {status} {elapsed_us} us");
    answer
}
