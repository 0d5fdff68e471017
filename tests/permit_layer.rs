//! The layer that holds a permit while a request is under way.
#![cfg(feature = "tower")]
#![allow(clippy::disallowed_methods, reason = "tests own tasks")]

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderName, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use tidegate::http::{KeyOf, Peer, PermitBody, PermitLayer};
use tidegate::{Concurrency, ConcurrencyLimit, Limiter};
use tower::{Layer, Service, ServiceExt, service_fn};

fn limit(max: u32) -> ConcurrencyLimit {
    let limiter = Limiter::builder().concurrency(Concurrency::new("slow", max)).build().unwrap();
    limiter.concurrency("slow").unwrap()
}

fn request(tenant: Option<&str>) -> Request<()> {
    let mut request = Request::new(());
    if let Some(tenant) = tenant {
        request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
    }
    request
}

fn by_tenant() -> KeyOf {
    KeyOf::plain_header(HeaderName::from_static("x-tenant"))
}

/// Answers at once with a body that nobody has read yet.
async fn answer(layer: &PermitLayer, request: Request<()>) -> Response<PermitBody<Body>> {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(Body::from("done"))) };
    layer.layer(service_fn(served)).oneshot(request).await.unwrap()
}

#[tokio::test]
async fn permit_is_held_until_the_body_of_the_response_has_ended_or_is_dropped() {
    let limit = limit(1);
    let layer = PermitLayer::new(limit.clone(), by_tenant());
    let mut first = answer(&layer, request(Some("a"))).await;
    assert_eq!((first.status(), limit.in_use()), (StatusCode::OK, 1));
    let refused = answer(&layer, request(Some("a"))).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()[header::RETRY_AFTER], "1");
    assert_eq!(refused.headers()[header::CONTENT_TYPE], "application/problem+json");
    let problem = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&problem).unwrap();
    assert_eq!(problem["status"], 429);
    assert_eq!(answer(&layer, request(Some("b"))).await.status(), StatusCode::OK);
    assert!(first.body_mut().frame().await.unwrap().is_ok());
    assert_eq!(limit.in_use(), 1, "more may follow");
    assert!(first.body_mut().frame().await.is_none());
    assert_eq!(limit.in_use(), 0);
    let dropped = answer(&layer, request(Some("a"))).await;
    assert_eq!(limit.in_use(), 1);
    drop(dropped);
    assert_eq!(limit.in_use(), 0);
}

#[tokio::test]
async fn layer_fits_around_an_axum_router() {
    use axum::{Router, routing::get};
    let limit = limit(1);
    let layer = PermitLayer::shared(limit.clone());
    let app: Router = Router::new().route("/", get(async || "done")).layer(layer);
    let request = || axum::extract::Request::new(Body::empty());
    let first = app.clone().oneshot(request()).await.unwrap();
    let refused = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes(), "done");
    assert_eq!(app.oneshot(request()).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn service_that_fails_and_client_that_leaves_hold_no_permit() {
    let limit = limit(1);
    let layer = PermitLayer::shared(limit.clone());
    let fails = |_: Request<()>| async { Err::<Response<Body>, _>(std::io::Error::other("no")) };
    assert!(layer.layer(service_fn(fails)).oneshot(Request::new(())).await.is_err());
    assert_eq!(limit.in_use(), 0);
    let hangs = |_: Request<()>| std::future::pending::<Result<Response<Body>, Infallible>>();
    let hanging = layer.layer(service_fn(hangs)).oneshot(Request::new(()));
    assert!(tokio::time::timeout(Duration::from_millis(20), hanging).await.is_err());
    assert_eq!(limit.in_use(), 0);
}

#[tokio::test]
async fn request_waits_for_a_permit_where_the_layer_says_so() {
    let limit = limit(1);
    let layer = PermitLayer::shared(limit.clone()).within(Duration::from_secs(20));
    let first = answer(&layer, Request::new(())).await;
    let waiting = tokio::spawn({
        let layer = layer.clone();
        async move { answer(&layer, Request::new(())).await.status() }
    });
    while limit.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    drop(first);
    assert_eq!(waiting.await.unwrap(), StatusCode::OK);
    let _held = answer(&layer, Request::new(())).await;
    let impatient = layer.within(Duration::from_millis(10));
    let refused = answer(&impatient, Request::new(())).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "it protects the service");
}

#[tokio::test]
async fn request_without_a_key_is_refused_and_needs_no_permit() {
    let limit = limit(1);
    let layer = PermitLayer::new(limit.clone(), by_tenant());
    assert_eq!(answer(&layer, request(None)).await.status(), StatusCode::BAD_REQUEST);
    let layer = PermitLayer::per_client(limit.clone());
    let unknown = answer(&layer, Request::new(())).await;
    assert_eq!(unknown.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let mut known = Request::new(());
    known.extensions_mut().insert(Peer(SocketAddr::from((Ipv4Addr::LOCALHOST, 1))));
    assert_eq!(limit.in_use(), 0);
    assert_eq!(answer(&layer, known).await.status(), StatusCode::OK);
}

/// Who waited had what the inner service had reserved.
#[tokio::test]
async fn request_that_waits_for_a_permit_keeps_nothing_that_the_inner_service_has_reserved() {
    let layer = PermitLayer::new(limit(1), by_tenant()).within(Duration::from_secs(20));
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(Body::from("done"))) };
    let one_at_a_time = tower::limit::GlobalConcurrencyLimitLayer::new(1);
    let service = layer.layer(one_at_a_time.layer(service_fn(served)));
    let (mut first, mut second) = (service.clone(), service);
    // Its body is not read yet.
    let kept = first.ready().await.unwrap().call(request(Some("a"))).await.unwrap();
    let mut held = first.ready().await.unwrap().call(request(Some("a")));
    let waited = tokio::time::timeout(Duration::from_millis(50), &mut held).await;
    assert!(waited.is_err(), "it is held");
    let ready = tokio::time::timeout(Duration::from_secs(5), second.ready()).await;
    let other = ready.expect("it is free").unwrap().call(request(Some("b"))).await.unwrap();
    assert_eq!(other.status(), StatusCode::OK);
    drop(kept);
    assert_eq!(held.await.unwrap().status(), StatusCode::OK);
}
