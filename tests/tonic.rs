//! A gRPC service behind a layer, over real connections.

#![cfg(all(feature = "tonic", feature = "testing"))]
#![allow(clippy::disallowed_methods, reason = "the service has a task of its own")]

use std::convert::Infallible;
use std::time::Duration;

use http::{HeaderName, Request, Response, StatusCode, header};
use tidegate::http::{
    ClientIp, HeaderStyle, KeyOf, KeyedLimit, OnMissingKey, RateLimit, RateLimitLayer, RetryAfter,
};
use tidegate::testing::ManualClock;
use tidegate::{Limit, Limiter, Quota};
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use tower::{Layer, ServiceExt, service_fn};

#[tokio::test]
async fn a_denied_call_is_told_when_to_come_back_and_admitted_then() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_minute(2));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    // Without a peer nobody would be answered.
    let rule = KeyedLimit::new(limiter.limit("api").unwrap(), KeyOf::client(ClientIp::peer()))
        .on_missing_key(OnMissingKey::Refused(StatusCode::UNAUTHORIZED));
    let retry = RetryAfter::new().spread(Duration::ZERO);
    let door = RateLimit::new(rule).headers(HeaderStyle::draft()).retry_after(retry);

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    let service = Server::builder().layer(RateLimitLayer::grpc(door)).add_service(health);
    tokio::spawn(service.serve_with_incoming(incoming));
    let connection = Endpoint::from_shared(url).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(connection);
    let mut ask = async || client.check(HealthCheckRequest::default()).await;

    for left in [1, 0] {
        let answer = ask().await.unwrap();
        let told = answer.metadata().get("ratelimit").unwrap().to_str().unwrap();
        assert!(told.starts_with(&format!("\"api\";r={left};t=")), "{told}");
    }
    let denied = ask().await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    let wait = denied.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert_eq!(wait, Duration::from_secs(30));
    assert_eq!(denied.get_details_quota_failure().unwrap().violations[0].subject, "api");
    clock.advance(wait.saturating_sub(Duration::from_millis(1)));
    assert_eq!(ask().await.unwrap_err().code(), Code::ResourceExhausted);
    clock.advance(Duration::from_millis(1));
    assert!(ask().await.is_ok());
}

const KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The code in the answer to a request of this content type, and the HTTP status.
async fn refused(rule: KeyedLimit, content_type: &str, key: Option<&str>) -> (Option<Code>, u16) {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let service = RateLimitLayer::new(RateLimit::new(rule)).layer(service_fn(served));
    let mut request = Request::builder().header(header::CONTENT_TYPE, content_type);
    if let Some(key) = key {
        request = request.header(KEY, key);
    }
    let answer = service.oneshot(request.body(()).unwrap()).await.unwrap();
    let code = answer.headers().get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    assert_eq!(code.is_some(), answer.headers()[header::CONTENT_TYPE] == "application/grpc");
    assert_eq!(code.is_some(), answer.body().is_empty());
    (code, answer.status().as_u16())
}

#[tokio::test]
async fn who_asks_by_grpc_is_answered_by_grpc_and_nobody_else_is() {
    let limit = Limit::new("api", Quota::per_minute(1));
    let limit = Limiter::builder().limit(limit).build().unwrap().limit("api").unwrap();
    assert!(limit.check("a").is_allowed());
    let rule = || KeyedLimit::new(limit.clone(), KeyOf::header(KEY));
    let denied = async |content_type: &str| refused(rule(), content_type, Some("a")).await;
    for by_grpc in ["application/grpc", "application/grpc+proto", "application/grpc;x=y"] {
        assert_eq!(denied(by_grpc).await, (Some(Code::ResourceExhausted), 200), "{by_grpc}");
    }
    for otherwise in ["application/json", "application/grpc-web", "application/grpcs", ""] {
        assert_eq!(denied(otherwise).await, (None, 429), "{otherwise}");
    }
    let grpc = "application/grpc";
    for (status, code) in [
        (StatusCode::UNAUTHORIZED, Code::Unauthenticated),
        (StatusCode::FORBIDDEN, Code::PermissionDenied),
        (StatusCode::BAD_REQUEST, Code::InvalidArgument),
    ] {
        let rule = rule().on_missing_key(OnMissingKey::Refused(status));
        assert_eq!(refused(rule, grpc, None).await, (Some(code), 200));
    }
    let costly = refused(rule().cost(|_| 2), grpc, Some("b")).await;
    assert_eq!(costly, (Some(Code::InvalidArgument), 200));
}
