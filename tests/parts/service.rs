//! A service in this process, and requests of it.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a process lives by the real clock")]

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use tidegate::config::Config;
use tidegate::server::Service;
use tower::ServiceExt;

/// That of the configurations of tests.
pub(crate) const TOKEN: &str = "correct-horse-battery";
/// For what happens soon.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A service whose store, if it has one, has answered.
pub(crate) async fn service(text: &str) -> Service {
    let config = Config::from_toml(text).unwrap();
    let limiter = config.builder().build().unwrap();
    limiter.ready(SOON).await.unwrap();
    Service::new(config, limiter).unwrap()
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Value,
}

pub(crate) async fn ask_with(
    token: Option<&str>,
    service: &Service,
    asked: &str,
    body: &Value,
) -> Answer {
    let (method, path) = asked.split_once(' ').unwrap();
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let mut request = Request::builder().method(method).uri(path);
    if let Some(token) = token {
        request = request.header("authorization", token);
    }
    let answer = service.router().oneshot(request.body(body).unwrap()).await.unwrap();
    let (status, head) = (answer.status().as_u16(), format!("{:?}", answer.headers()));
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    Answer { status, head, body: serde_json::from_slice(&body).unwrap_or_default() }
}

pub(crate) async fn ask(service: &Service, asked: &str, body: Value) -> Answer {
    ask_with(Some(&format!("Bearer {TOKEN}")), service, asked, &body).await
}
