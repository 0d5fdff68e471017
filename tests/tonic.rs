//! A gRPC service behind a layer, over real connections.

#![cfg(all(feature = "tonic", feature = "testing"))]
#![allow(clippy::disallowed_methods, reason = "the service has a task of its own")]

use std::convert::Infallible;
use std::time::Duration;

use http::{HeaderName, Request, Response, StatusCode, header};
use tidegate::http::{KeyOf, KeyedLimit, OnMissingKey, RateLimit, RateLimitLayer};
use tidegate::testing::ManualClock;
use tidegate::{Hashed, Limit, Limiter, Quota};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use tower::{Layer, ServiceExt, service_fn};

const PUSHBACK_MS: &str = "grpc-retry-pushback-ms";

#[tokio::test]
async fn denied_call_is_admitted_after_its_retry_delay() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_minute(2));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    // The peer of the connection is known, or each call would fail.
    let rate_limit = RateLimit::per_client(limiter.limit("api").unwrap());

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    let service = Server::builder().layer(RateLimitLayer::grpc(rate_limit)).add_service(health);
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
    assert_eq!(denied.metadata().get(PUSHBACK_MS).unwrap(), "30000");
    clock.advance(wait.saturating_sub(Duration::from_millis(1)));
    assert_eq!(ask().await.unwrap_err().code(), Code::ResourceExhausted);
    clock.advance(Duration::from_millis(1));
    assert!(ask().await.is_ok());
}

/// Calls that failed before their first message have their status in the head.
#[tokio::test]
async fn only_failed_calls_are_charged_and_a_denial_by_another_limit_charges_none() {
    let clock = ManualClock::new();
    let limiter = Limiter::builder()
        .limit(Limit::new("failed", Quota::per_minute(3)))
        .limit(Limit::new("all", Quota::per_minute(5)))
        .clock(&clock)
        .build()
        .unwrap();
    let [failed, all] = ["failed", "all"].map(|name| limiter.limit(name).unwrap());
    let is_not_found = |code: &http::HeaderValue| code == "5";
    let failures = KeyedLimit::shared(failed.clone())
        .charge_if(move |response| response.headers.get("grpc-status").is_some_and(is_not_found));
    let rate_limit = RateLimit::new(failures).and(KeyedLimit::shared(all.clone()));

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    let service = Server::builder().layer(RateLimitLayer::grpc(rate_limit)).add_service(health);
    tokio::spawn(service.serve_with_incoming(incoming));
    let connection = Endpoint::from_shared(url).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(connection);
    let mut ask = async |service: &str| {
        let answer = client.check(HealthCheckRequest { service: service.to_owned() }).await;
        answer.map_or_else(|status| status.code(), |_| Code::Ok)
    };
    let left = || [&failed, &all].map(|limit| limit.check_n("", 0).unwrap().remaining());

    let asked = [ask("").await, ask("unknown").await, ask("").await];
    assert_eq!(asked, [Code::Ok, Code::NotFound, Code::Ok]);
    assert_eq!(left(), [2, 2]);
    assert_eq!([ask("unknown").await, ask("").await], [Code::NotFound, Code::Ok]);
    assert_eq!(left(), [1, 0]);
    let denied = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(denied.get_details_quota_failure().unwrap().violations[0].subject, "all");
    assert_eq!(denied.metadata().get(PUSHBACK_MS).unwrap(), "12000");
    assert_eq!(left(), [1, 0], "a denial charges none");
}

const KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Whether a limit refuses a request of this content type by gRPC, and the response.
async fn refused(
    limit: KeyedLimit,
    content_type: &str,
    key: Option<&str>,
) -> (Option<Code>, Response<String>) {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let service = RateLimitLayer::new(limit).layer(service_fn(served));
    let mut request = Request::builder().header(header::CONTENT_TYPE, content_type);
    if let Some(key) = key {
        request = request.header(KEY, key);
    }
    let response = service.oneshot(request.body(()).unwrap()).await.unwrap();
    let code = response.headers().get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    let response_type = response.headers()[header::CONTENT_TYPE].to_str().unwrap();
    assert_eq!(code.is_some(), response_type.starts_with("application/grpc"));
    assert_eq!(code.is_some(), response.body().is_empty());
    (code, response)
}

/// A limit whose key `a` is used up.
fn used_up() -> KeyedLimit {
    let limit = tidegate::local(Quota::per_minute(1)).unwrap();
    assert!(limit.check(&Hashed("a")).is_allowed());
    KeyedLimit::new(limit, KeyOf::header(KEY))
}

/// Once, there was no pushback, and gRPC-web calls got an HTTP status that their clients cannot read.
#[tokio::test]
async fn d9_grpc_and_grpc_web_calls_are_refused_by_grpc_with_a_pushback() {
    for (content_type, response_type) in [
        ("application/grpc", "application/grpc"),
        ("application/grpc+proto", "application/grpc"),
        ("application/grpc;x=y", "application/grpc"),
        ("application/grpc-web", "application/grpc-web"),
        ("application/grpc-web+proto", "application/grpc-web+proto"),
        ("application/grpc-web-text+proto", "application/grpc-web-text+proto"),
        ("application/grpc-web-text", "application/grpc-web-text"),
    ] {
        let (code, response) = refused(used_up(), content_type, Some("a")).await;
        assert_eq!((code, response.status()), (Some(Code::ResourceExhausted), StatusCode::OK));
        assert_eq!(response.headers()[header::CONTENT_TYPE], response_type);
        let pushback_ms: u64 = response.headers()[PUSHBACK_MS].to_str().unwrap().parse().unwrap();
        assert!((59_000..=60_000).contains(&pushback_ms), "{pushback_ms}");
    }
    for otherwise in ["application/json", "application/grpc-webs", "application/grpcs", ""] {
        let (code, response) = refused(used_up(), otherwise, Some("a")).await;
        assert_eq!((code, response.status()), (None, StatusCode::TOO_MANY_REQUESTS), "{otherwise}");
    }
}

#[tokio::test]
async fn other_refusals_have_their_own_codes_and_no_pushback() {
    let code = async |limit: KeyedLimit, key| {
        let (code, response) = refused(limit, "application/grpc", key).await;
        assert!(!response.headers().contains_key(PUSHBACK_MS));
        code.unwrap()
    };
    for (status, expected) in [
        (StatusCode::UNAUTHORIZED, Code::Unauthenticated),
        (StatusCode::FORBIDDEN, Code::PermissionDenied),
        (StatusCode::BAD_REQUEST, Code::InvalidArgument),
    ] {
        let limit = used_up().on_missing_key(OnMissingKey::Refused(status));
        assert_eq!(code(limit, None).await, expected);
    }
    assert_eq!(code(used_up().cost(|_| 2), Some("b")).await, Code::InvalidArgument);
    let per_client = KeyedLimit::per_client(tidegate::local(Quota::per_minute(1)).unwrap());
    assert_eq!(code(per_client, None).await, Code::Internal);
}

#[tokio::test]
async fn limit_that_protects_the_service_is_unavailable_with_a_pushback() {
    let limit = used_up().protects_service();
    let (code, response) = refused(limit, "application/grpc", Some("a")).await;
    assert_eq!(code, Some(Code::Unavailable));
    assert!(response.headers().contains_key(PUSHBACK_MS));
}

#[tokio::test]
async fn denied_of_a_handler_is_the_status_of_the_layer() {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_minute(2));
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let api = limiter.limit("api").unwrap();
    while api.check("a").is_allowed() {}
    let status = Status::from(api.check("a").into_result().unwrap_err());
    assert_eq!(status.code(), Code::ResourceExhausted);
    let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert_eq!(wait, Duration::from_secs(30));
    assert_eq!(status.get_details_quota_failure().unwrap().violations[0].subject, "api");

    let key = KeyOf::function(|_, key| key.push(b"a"));
    let (_, response) = refused(KeyedLimit::new(api, key), "application/grpc", None).await;
    let mut of_handler: Response<String> = status.into_http();
    let mut of_layer = response;
    for response in [&mut of_handler, &mut of_layer] {
        assert_eq!(response.headers()[PUSHBACK_MS], "30000");
        assert_eq!(response.headers()["ratelimit"], r#""api";r=0;t=30"#);
    }
    // HTTP clients read Retry-After, which gRPC has in its details.
    assert_eq!(of_layer.headers_mut().remove(header::RETRY_AFTER).unwrap(), "30");
    assert_eq!(of_handler.headers(), of_layer.headers());
}
