//! The bearer token (RFC 6750) of requests that change something or ask about single keys.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::WWW_AUTHENTICATE;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use headers::HeaderMapExt;
use headers::authorization::{Authorization, Bearer};

use super::problem::Problem;
use super::running::Running;

/// Lets a request go on that has the configured token.
pub(super) async fn demand(
    State(running): State<Arc<Running>>,
    request: Request,
    next: Next,
) -> Response {
    let in_force = running.in_force.load_full();
    let Some(token) = &in_force.config.server().token else {
        let detail = "there is no token: set token or token_file in the table [server]";
        return Problem::new(StatusCode::FORBIDDEN, detail).into_response();
    };
    let sent = request.headers().typed_get::<Authorization<Bearer>>();
    if sent.is_some_and(|sent| token.is(sent.token())) {
        return next.run(request).await;
    }
    let detail = "send the header field Authorization: Bearer TOKEN, with the token of the service";
    let problem = Problem::new(StatusCode::UNAUTHORIZED, detail);
    ([(WWW_AUTHENTICATE, "Bearer")], problem).into_response()
}
