//! The layer around a service, as a framework calls it.

#![cfg(all(feature = "axum", feature = "testing"))]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, header};
use tidegate::http::{
    ClientIp, HeaderStyle, KeyOf, KeyedLimit, OnMissingKey, Peer, RateLimit, RateLimitLayer,
    RateLimitService, Refusal, RetryAfter,
};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{ActiveLimit, Limit, Limiter, Mode, Quota};
use tower::{Layer, Service, ServiceExt, service_fn};

const KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Limits that hold so many tokens each, and get none while a test lasts.
fn limits<const COUNT: usize>(tokens: [u64; COUNT]) -> [ActiveLimit; COUNT] {
    let clock = ManualClock::new();
    let names: [String; COUNT] = std::array::from_fn(|limit| format!("limit-{limit}"));
    let builder = names.iter().zip(tokens).fold(Limiter::builder(), |builder, (name, tokens)| {
        builder.limit(Limit::new(name, Quota::per_hour(tokens)).mode(Mode::Local))
    });
    let limiter = builder.clock(&clock).build().unwrap();
    names.map(|name| limiter.limit(&name).unwrap())
}

fn by_header(limit: &ActiveLimit) -> KeyedLimit {
    KeyedLimit::new(limit.clone(), KeyOf::header(KEY))
}

/// A service that counts who reaches it, behind this door.
fn behind(door: RateLimit) -> (impl Fn(Request<()>) -> Asking, Arc<AtomicU32>) {
    let served = Arc::new(AtomicU32::new(0));
    let counted = served.clone();
    let inner = service_fn(move |_: Request<()>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Response::new("served".to_owned())) }
    });
    let service = RateLimitLayer::new(door).layer(inner);
    let ask = move |request| -> Asking {
        let service = service.clone();
        Box::pin(async move { service.oneshot(request).await.unwrap() })
    };
    (ask, served)
}

type Asking = std::pin::Pin<Box<dyn Future<Output = Response<String>>>>;

fn with_key(key: &str) -> Request<()> {
    Request::builder().header(KEY, key).body(()).unwrap()
}

fn nobodys() -> Request<()> {
    Request::new(())
}

#[tokio::test]
async fn a_denied_request_does_not_reach_the_service_and_is_told_why() {
    let [limit] = limits([2]);
    let (ask, served) = behind(RateLimit::new(by_header(&limit)).headers(HeaderStyle::draft()));
    for left in [1, 0] {
        let allowed = ask(with_key("alice")).await;
        assert_eq!((allowed.status(), &**allowed.body()), (StatusCode::OK, "served"));
        assert!(!allowed.headers().contains_key(header::RETRY_AFTER));
        let told = allowed.headers()["ratelimit"].to_str().unwrap();
        assert!(told.starts_with(&format!("\"limit-0\";r={left};t=")), "{told}");
    }
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()[header::CONTENT_TYPE], "application/problem+json");
    let seconds: u64 = denied.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    assert!((1800..=1860).contains(&seconds), "{seconds}");
    assert_eq!(denied.headers()["ratelimit-policy"], "\"limit-0\";q=2;w=3600");
    let problem: serde_json::Value = serde_json::from_str(denied.body()).unwrap();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(
        (&problem["status"], &problem["violated-policies"][0]),
        (&429.into(), &"limit-0".into())
    );
    assert_eq!(ask(with_key("bob")).await.status(), StatusCode::OK, "others are not concerned");
    assert_eq!(served.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn limits_are_asked_in_order_and_those_after_a_denial_are_not_charged() {
    let [narrow, wide] = limits([1, 10]);
    let door =
        RateLimit::new(by_header(&narrow)).and(by_header(&wide)).headers(HeaderStyle::draft());
    let (ask, _) = behind(door);
    let both = ask(with_key("alice")).await;
    assert_eq!(
        both.headers()["ratelimit-policy"],
        "\"limit-0\";q=1;w=3600, \"limit-1\";q=10;w=3600"
    );
    for _ in 0..3 {
        let denied = ask(with_key("alice")).await;
        assert_eq!(denied.headers()["ratelimit-policy"], "\"limit-0\";q=1;w=3600");
    }
    assert_eq!(wide.check_n("alice", 0).unwrap().remaining(), 9);
}

#[tokio::test]
async fn who_is_denied_waits_for_every_limit_that_has_no_token_left() {
    let [rare, often] = limits([2, 60]);
    let door = RateLimit::new(by_header(&rare)).and(by_header(&often).cost(|_| 60));
    let (ask, _) = behind(door.retry_after(RetryAfter::new().spread(Duration::ZERO)));
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "3600", "sixty tokens take longest");
    let [rare, often] = limits([2, 60]);
    let door = RateLimit::new(by_header(&rare)).and(by_header(&often).cost(|_| 31));
    let (ask, _) = behind(door.retry_after(RetryAfter::new().spread(Duration::ZERO)));
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1800", "the first limit's next token");
    let [rare, often] = limits([10, 60]);
    let door = RateLimit::new(by_header(&rare).cost(|_| 5)).and(by_header(&often).cost(|_| 40));
    let (ask, _) = behind(door.retry_after(RetryAfter::new().spread(Duration::ZERO)));
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1800", "five tokens of the first limit");
    let [rare, often] = limits([20, 60]);
    let door = RateLimit::new(by_header(&rare).cost(|_| 5)).and(by_header(&often).cost(|_| 20));
    let (ask, _) = behind(door.retry_after(RetryAfter::new().spread(Duration::ZERO)));
    for _ in 0..3 {
        assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    }
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1200", "twenty of the second limit");
    let denied = ask(with_key("alice")).await;
    assert_eq!(
        denied.headers()[header::RETRY_AFTER],
        "1200",
        "and five of the first, that it took"
    );
}

#[tokio::test]
async fn a_limit_that_would_not_be_asked_does_not_make_who_is_denied_wait() {
    let other = HeaderName::from_static("x-other-key");
    let [first, second] = limits([60, 1]);
    assert!(second.check(b"\0").is_allowed(), "the bucket of those without a key");
    assert!(second.check("alice").is_allowed(), "she would have to wait for it");
    let of_others = || KeyedLimit::new(second.clone(), KeyOf::header(other.clone()));
    for rule in [
        of_others().on_missing_key(OnMissingKey::Unlimited),
        of_others().on_missing_key(OnMissingKey::Refused(StatusCode::UNAUTHORIZED)),
        by_header(&second).cost(|_| 0),
        by_header(&second).cost(|_| 2),
    ] {
        let door = RateLimit::new(by_header(&first)).and(rule);
        let (ask, _) = behind(door.retry_after(RetryAfter::new().spread(Duration::ZERO)));
        while first.check("alice").is_allowed() {}
        let denied = ask(with_key("alice")).await;
        assert_eq!(denied.headers()[header::RETRY_AFTER], "60");
    }
}

#[tokio::test]
async fn who_writes_what_is_no_key_does_not_choose_to_be_unlimited() {
    let [limit] = limits([1]);
    let (ask, _) =
        behind(RateLimit::new(by_header(&limit).on_missing_key(OnMissingKey::Unlimited)));
    let twice = || Request::builder().header(KEY, "one").header(KEY, "two").body(()).unwrap();
    assert_eq!(ask(twice()).await.status(), StatusCode::OK);
    assert_eq!(ask(twice()).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let too_long = "k".repeat(513);
    assert_eq!(ask(with_key(&too_long)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(nobodys()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn who_is_refused_keeps_nobody_else_out() {
    let [limit] = limits([1]);
    let inner =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let one_at_a_time = tower::limit::GlobalConcurrencyLimitLayer::new(1);
    let service =
        RateLimitLayer::new(RateLimit::new(by_header(&limit))).layer(one_at_a_time.layer(inner));
    let (mut first, mut second) = (service.clone(), service);
    for status in [200, 429] {
        let answer = first.ready().await.unwrap().call(with_key("a")).await.unwrap();
        assert_eq!(answer.status().as_u16(), status);
    }
    let ready = tokio::time::timeout(Duration::from_secs(5), second.ready()).await;
    assert!(ready.is_ok(), "the permit was given back");
}

#[tokio::test]
async fn a_request_without_a_key_meets_what_the_rule_says() {
    let [shared, refused, unlimited] = limits([1, 1, 1]);
    let (ask, _) = behind(RateLimit::new(by_header(&shared)));
    assert_eq!(ask(nobodys()).await.status(), StatusCode::OK);
    assert_eq!(ask(nobodys()).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let too_long = "k".repeat(513);
    assert_eq!(ask(with_key(&too_long)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(with_key("")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);

    let status = StatusCode::UNAUTHORIZED;
    let (ask, served) =
        behind(RateLimit::new(by_header(&refused).on_missing_key(OnMissingKey::Refused(status))));
    let answer = ask(nobodys()).await;
    assert_eq!(answer.status(), status);
    assert!(!answer.headers().contains_key(header::RETRY_AFTER), "there is nothing to wait for");
    assert_eq!(served.load(Ordering::Relaxed), 0);

    let (ask, served) =
        behind(RateLimit::new(by_header(&unlimited).on_missing_key(OnMissingKey::Unlimited)));
    for _ in 0..3 {
        assert_eq!(ask(nobodys()).await.status(), StatusCode::OK);
    }
    assert_eq!(served.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn a_request_costs_what_a_function_says_and_what_is_skipped_costs_nothing() {
    let [limit] = limits([10]);
    let cost = |headers: &HeaderMap| headers["x-cost"].to_str().unwrap().parse().unwrap();
    let rule = by_header(&limit).cost(move |head| cost(head.headers));
    let (ask, served) = behind(RateLimit::new(rule).skip(|head| head.uri.path() == "/health"));
    let costing = |cost: &str, path: &str| {
        let request = Request::builder().uri(path).header(KEY, "alice").header("x-cost", cost);
        ask(request.body(()).unwrap())
    };
    for (cost, path, status) in [
        ("4", "/", StatusCode::OK),
        ("0", "/", StatusCode::OK),
        ("9", "/health", StatusCode::OK),
        ("11", "/", StatusCode::BAD_REQUEST),
        ("4294967295", "/", StatusCode::BAD_REQUEST),
        ("7", "/", StatusCode::TOO_MANY_REQUESTS),
        ("6", "/", StatusCode::OK),
        ("1", "/", StatusCode::TOO_MANY_REQUESTS),
    ] {
        assert_eq!(costing(cost, path).await.status(), status, "{cost} {path}");
    }
    assert_eq!(served.load(Ordering::Relaxed), 4);
}

#[tokio::test]
async fn keys_of_several_parts_are_told_apart_wherever_the_parts_meet() {
    let [limit] = limits([1]);
    let two = KeyOf::header(KEY).and(KeyOf::function(|head, key| key.push(head.uri.path())));
    let (ask, _) = behind(RateLimit::new(KeyedLimit::new(limit, two)));
    let asked = |key: &str, path: &str| {
        ask(Request::builder().uri(path).header(KEY, key).body(()).unwrap())
    };
    for (key, path) in [("a", "/b"), ("a/", "/b"), ("a", "//b"), ("a/b", "/"), ("b", "/a")] {
        assert_eq!(asked(key, path).await.status(), StatusCode::OK, "{key} {path}");
        assert_eq!(asked(key, path).await.status(), StatusCode::TOO_MANY_REQUESTS, "{key} {path}");
    }
}

#[tokio::test]
async fn a_response_of_ones_own_gets_the_fields_and_keeps_its_retry_after() {
    let [limit] = limits([1]);
    let door = || {
        RateLimit::new(by_header(&limit))
            .headers(HeaderStyle::draft_03())
            .retry_after(RetryAfter::new())
    };
    let inner = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(0_u8)) });
    let status = |refusal: &Refusal<'_>| {
        assert!(matches!(refusal, Refusal::Denied { policy: "limit-0", .. }));
        let mut response = Response::new(1);
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
    };
    let plain =
        RateLimitLayer::with_response(door(), move |refusal, _| status(refusal)).layer(inner);
    let own = RateLimitLayer::with_response(door(), move |refusal, _| {
        let mut response = status(refusal);
        response.headers_mut().insert(header::RETRY_AFTER, 7.into());
        response
    });
    assert_eq!(plain.clone().oneshot(with_key("a")).await.unwrap().into_body(), 0);
    let denied = plain.oneshot(with_key("a")).await.unwrap();
    assert_eq!((denied.status(), denied.body()), (StatusCode::SERVICE_UNAVAILABLE, &1));
    assert_eq!(denied.headers()["ratelimit-remaining"], "0");
    assert!(denied.headers().contains_key(header::RETRY_AFTER));
    let denied = own.layer(inner).oneshot(with_key("a")).await.unwrap();
    assert_eq!(denied.headers()[header::RETRY_AFTER], "7");
}

/// A service that may be called once after each time it was found ready, as tower demands.
#[derive(Debug, Default)]
struct Strict {
    ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        self.ready = true;
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called before it was found ready");
        std::future::ready(Ok(Response::new(String::new())))
    }
}

#[tokio::test]
async fn the_service_that_was_found_ready_is_the_one_that_is_called() {
    for waiting in [false, true] {
        let [limit] = limits([2]);
        let door = RateLimit::new(by_header(&limit));
        let door = if waiting { door.waiting() } else { door };
        let mut service: RateLimitService<Strict, String> =
            RateLimitLayer::new(door).layer(Strict::default());
        for status in [200, 200, 429, 429] {
            let answer = service.ready().await.unwrap().call(with_key("a")).await.unwrap();
            assert_eq!(answer.status().as_u16(), status);
        }
    }
}

#[tokio::test]
async fn who_may_wait_asks_the_store_where_the_node_is_unsure() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let limiter = Limiter::builder()
        .limit(Limit::new("api", Quota::per_second(10)).credit(0))
        .store(store)
        .clock(&clock)
        .build()
        .unwrap();
    let limit = limiter.limit("api").unwrap();
    // Until the store gives leases.
    for _ in 0..500 {
        clock.advance(Duration::from_millis(10));
        limiter.settle().await;
    }
    let (ask, _) = behind(RateLimit::new(by_header(&limit)));
    assert_eq!(
        ask(with_key("new")).await.status(),
        StatusCode::TOO_MANY_REQUESTS,
        "without credit"
    );
    let (ask, _) = behind(RateLimit::new(by_header(&limit)).waiting());
    let mut asking = ask(with_key("other"));
    for _ in 0..1000 {
        tokio::select! {
            answer = &mut asking => {
                assert_eq!(answer.status(), StatusCode::OK);
                return;
            }
            () = limiter.settle() => clock.advance(Duration::from_millis(1)),
        }
    }
    panic!("there was no answer");
}

#[tokio::test]
async fn axum_tells_the_peer_and_the_route() {
    let [by_peer, by_route] = limits([2, 3]);
    let door = RateLimit::new(KeyedLimit::new(by_peer, KeyOf::client(ClientIp::peer())))
        .and(KeyedLimit::new(by_route, KeyOf::route()));
    let service = Router::new()
        .route("/users/{id}", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(door));
    let ask = async |peer: &str, path: &str| {
        let peer: SocketAddr = peer.parse().unwrap();
        let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(ConnectInfo(peer));
        service.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    assert_eq!(ask("192.0.2.1:1", "/users/1").await, 200);
    assert_eq!(ask("192.0.2.1:2", "/users/2").await, 200);
    assert_eq!(ask("192.0.2.1:3", "/users/1").await, 429, "two for each address");
    assert_eq!(ask("[::ffff:192.0.2.1]:1", "/users/1").await, 429, "it is the same address");
    assert_eq!(ask("192.0.2.2:1", "/users/3").await, 200);
    assert_eq!(ask("192.0.2.3:1", "/users/4").await, 429, "three for the route");
}

#[tokio::test]
async fn a_peer_that_another_framework_tells_is_found() {
    let [limit] = limits([1]);
    let (ask, _) = behind(RateLimit::new(KeyedLimit::new(limit, KeyOf::client(ClientIp::peer()))));
    let from = |peer: &str| {
        let mut request = nobodys();
        request.extensions_mut().insert(Peer(peer.parse().unwrap()));
        ask(request)
    };
    for (peer, status) in [
        ("192.0.2.1:80", 200),
        ("192.0.2.1:81", 429),
        ("[2001:db8::1]:80", 200),
        ("[2001:db8::2]:80", 429),
        ("[2001:db8:0:1::]:80", 200),
    ] {
        assert_eq!(from(peer).await.status().as_u16(), status, "{peer}");
    }
    tokio::time::timeout(Duration::from_secs(1), ask(nobodys())).await.expect("it is answered");
}
