//! A line in the log for each request over HTTP, by choice.

use std::time::Instant;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;

/// Logs the request when it is answered: without what follows the `?`, where keys are.
#[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
pub(super) async fn log(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let began = Instant::now();
    let answer = next.run(request).await;
    let (status, elapsed_us) = (answer.status().as_u16(), began.elapsed().as_micros());
    tracing::info!(target: "tidegate::access", "{method} {path} {status} {elapsed_us} us");
    answer
}
