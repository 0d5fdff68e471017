//! The layer around a service, as a framework calls it.

#![cfg(all(feature = "axum", feature = "testing"))]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::routing::get;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, header};
use tidegate::http::{
    ClientIp, ErrorBody, Forwarding, HeaderStyle, KeyOf, KeyedLimit, OnMissingKey, Peer, RateLimit,
    RateLimitLayer, RateLimitService, Refusal,
};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, Denied, FixedWindow, Hashed, Key, LeakyBucket, Limit, Limiter, Mode, Quota,
};
use tower::{Layer, Service, ServiceExt, service_fn};

const KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Limits with these tokens, which get no more while a test lasts.
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

/// A service behind this rate limit, which counts the requests that reach it.
fn behind(rate_limit: RateLimit) -> (impl Fn(Request<()>) -> Asking, Arc<AtomicU32>) {
    let served = Arc::new(AtomicU32::new(0));
    let counted = served.clone();
    let inner = service_fn(move |_: Request<()>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Response::new("served".to_owned())) }
    });
    let service = RateLimitLayer::new(rate_limit).layer(inner);
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

fn without_key() -> Request<()> {
    Request::new(())
}

#[tokio::test]
async fn denied_request_does_not_reach_the_service_and_says_why() {
    let [limit] = limits([2]);
    let (ask, served) = behind(by_header(&limit).into());
    for left in [1, 0] {
        let allowed = ask(with_key("alice")).await;
        assert_eq!((allowed.status(), &**allowed.body()), (StatusCode::OK, "served"));
        assert!(!allowed.headers().contains_key(header::RETRY_AFTER));
        let state = allowed.headers()["ratelimit"].to_str().unwrap();
        assert!(state.starts_with(&format!("\"limit-0\";r={left};t=")), "{state}");
    }
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()[header::CONTENT_TYPE], "application/problem+json");
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1800");
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
async fn other_limits_are_not_charged_for_a_denial_and_their_fields_are_there() {
    let [narrow, wide] = limits([1, 10]);
    let rate_limit =
        RateLimit::new(by_header(&narrow)).and(by_header(&wide)).headers(HeaderStyle::draft());
    let (ask, _) = behind(rate_limit);
    let both = ask(with_key("alice")).await;
    assert_eq!(
        both.headers()["ratelimit-policy"],
        "\"limit-0\";q=1;w=3600, \"limit-1\";q=10;w=3600"
    );
    for _ in 0..3 {
        let denied = ask(with_key("alice")).await;
        assert_eq!(denied.headers()["ratelimit-policy"], both.headers()["ratelimit-policy"]);
        let states = "\"limit-0\";r=0;t=3600, \"limit-1\";r=9;t=360";
        assert_eq!(denied.headers()["ratelimit"], states);
    }
    assert_eq!(wide.check_n(&Hashed("alice"), 0).unwrap().remaining(), 9);
}

#[tokio::test]
async fn retry_after_covers_every_limit_of_the_request() {
    let [rare, often] = limits([2, 60]);
    let rate_limit = RateLimit::new(by_header(&rare)).and(by_header(&often).cost(|_| 60));
    let (ask, _) = behind(rate_limit);
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "3600", "sixty tokens take longest");
    let [rare, often] = limits([2, 60]);
    let rate_limit = RateLimit::new(by_header(&rare)).and(by_header(&often).cost(|_| 31));
    let (ask, _) = behind(rate_limit);
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "120", "two more tokens of the second limit");
    let [rare, often] = limits([10, 60]);
    let rate_limit =
        RateLimit::new(by_header(&rare).cost(|_| 5)).and(by_header(&often).cost(|_| 40));
    let (ask, _) = behind(rate_limit);
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1200", "the first limit was not charged");
    while rare.check(&Hashed("alice")).is_allowed() {}
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1800", "five tokens of the first limit");
    let [rare, often] = limits([20, 60]);
    let rate_limit =
        RateLimit::new(by_header(&rare).cost(|_| 5)).and(by_header(&often).cost(|_| 20));
    let (ask, _) = behind(rate_limit);
    for _ in 0..3 {
        assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);
    }
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1200", "twenty of the second limit");
    let denied = ask(with_key("alice")).await;
    assert_eq!(denied.headers()[header::RETRY_AFTER], "1200", "a denial takes nothing");
}

#[tokio::test]
async fn limits_that_do_not_count_a_request_do_not_lengthen_its_wait() {
    let other = HeaderName::from_static("x-other-key");
    let [first, second] = limits([60, 1]);
    assert!(second.check(&()).is_allowed(), "the bucket of requests without a key");
    assert!(second.check(&Hashed("alice")).is_allowed(), "her next token takes an hour");
    let of_others = || KeyedLimit::new(second.clone(), KeyOf::header(other.clone()));
    for (rule, status, wait) in [
        (of_others().on_missing_key(OnMissingKey::Unlimited), 429, Some("60")),
        (by_header(&second).cost(|_| 0), 429, Some("60")),
        // Waiting does not help.
        (of_others().on_missing_key(OnMissingKey::Refused(StatusCode::UNAUTHORIZED)), 401, None),
        (by_header(&second).cost(|_| 2), 400, None),
    ] {
        let rate_limit = RateLimit::new(by_header(&first)).and(rule);
        let (ask, _) = behind(rate_limit);
        while first.check(&Hashed("alice")).is_allowed() {}
        let refused = ask(with_key("alice")).await;
        let told = refused.headers().get(header::RETRY_AFTER).map(|it| it.to_str().unwrap());
        assert_eq!((refused.status().as_u16(), told), (status, wait));
    }
}

#[tokio::test]
async fn header_that_is_sent_twice_does_not_make_a_request_unlimited() {
    let [limit] = limits([1]);
    let unlimited = by_header(&limit).on_missing_key(OnMissingKey::Unlimited);
    let (ask, served) = behind(unlimited.into());
    let twice = || Request::builder().header(KEY, "one").header(KEY, "two").body(()).unwrap();
    assert_eq!(ask(twice()).await.status(), StatusCode::BAD_REQUEST);
    assert_eq!(ask(without_key()).await.status(), StatusCode::OK);
    assert_eq!(served.load(Ordering::Relaxed), 1);
    let (ask, _) = behind(by_header(&limit).on_missing_key(OnMissingKey::Shared).into());
    assert_eq!(ask(twice()).await.status(), StatusCode::OK);
    assert_eq!(ask(without_key()).await.status(), StatusCode::TOO_MANY_REQUESTS, "one bucket");
}

/// A service behind the layer that answers one request at a time.
fn one_at_a_time(
    limit: &ActiveLimit,
) -> impl Service<Request<()>, Response = Response<String>, Error = Infallible> + Clone {
    let inner =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let one_at_a_time = tower::limit::GlobalConcurrencyLimitLayer::new(1);
    RateLimitLayer::new(RateLimit::new(by_header(limit))).layer(one_at_a_time.layer(inner))
}

#[tokio::test]
async fn refusal_releases_inner_permit() {
    let [limit] = limits([1]);
    let service = one_at_a_time(&limit);
    let (mut first, mut second) = (service.clone(), service);
    for status in [200, 429] {
        let answer = first.ready().await.unwrap().call(with_key("a")).await.unwrap();
        assert_eq!(answer.status().as_u16(), status);
    }
    let ready = tokio::time::timeout(Duration::from_secs(5), second.ready()).await;
    assert!(ready.is_ok(), "the permit was given back");
}

/// Requests of one key that were held had all of the inner service's permits.
#[tokio::test]
async fn request_that_is_held_keeps_nothing_that_the_inner_service_has_reserved() {
    let queue = LeakyBucket::per_hour(1).queue(Duration::from_secs(7200));
    let limiter = Limiter::builder().limit(Limit::new("api", queue)).clock(&ManualClock::new());
    let limit = limiter.build().unwrap().limit("api").unwrap();
    let service = one_at_a_time(&limit);
    let (mut first, mut second) = (service.clone(), service);
    let answer = first.ready().await.unwrap().call(with_key("a")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let mut held = Box::pin(first.ready().await.unwrap().call(with_key("a")));
    let waited = tokio::time::timeout(Duration::from_millis(50), &mut held).await;
    assert!(waited.is_err(), "it is held");
    let ready = tokio::time::timeout(Duration::from_secs(5), second.ready()).await;
    let answer = ready.expect("the permit is free").unwrap().call(with_key("b")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
}

#[tokio::test]
async fn request_without_a_key_is_refused_shared_or_unlimited() {
    let [limit, shared, refused, unlimited] = limits([1, 1, 1, 1]);
    let (ask, served) = behind(by_header(&limit).into());
    for keyless in [without_key(), with_key("")] {
        assert_eq!(ask(keyless).await.status(), StatusCode::BAD_REQUEST);
    }
    assert_eq!(served.load(Ordering::Relaxed), 0);

    let (ask, _) = behind(by_header(&shared).on_missing_key(OnMissingKey::Shared).into());
    assert_eq!(ask(without_key()).await.status(), StatusCode::OK);
    assert_eq!(ask(with_key("")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(with_key("alice")).await.status(), StatusCode::OK);

    let status = StatusCode::UNAUTHORIZED;
    let (ask, served) =
        behind(by_header(&refused).on_missing_key(OnMissingKey::Refused(status)).into());
    let answer = ask(without_key()).await;
    assert_eq!(answer.status(), status);
    assert!(!answer.headers().contains_key(header::RETRY_AFTER), "waiting does not help");
    assert_eq!(served.load(Ordering::Relaxed), 0);

    let (ask, served) =
        behind(by_header(&unlimited).on_missing_key(OnMissingKey::Unlimited).into());
    for _ in 0..3 {
        assert_eq!(ask(without_key()).await.status(), StatusCode::OK);
    }
    assert_eq!(served.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn long_key_has_a_bucket_of_its_own() {
    let [limit] = limits([1]);
    let (ask, _) = behind(by_header(&limit).into());
    for key in ["k".repeat(513), "k".repeat(514)] {
        assert_eq!(ask(with_key(&key)).await.status(), StatusCode::OK);
        assert_eq!(ask(with_key(&key)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn request_costs_what_the_function_returns_and_nothing_if_skipped() {
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

/// Once, API keys went to the store as they were.
#[tokio::test]
async fn d9_keys_of_header_fields_are_hashed_unless_they_are_plain() {
    let [limit] = limits([1]);
    let ask_by = async |key: KeyOf| {
        let (ask, _) = behind(KeyedLimit::new(limit.clone(), key).into());
        ask(with_key("sk-1")).await.status()
    };
    assert_eq!(ask_by(KeyOf::header(KEY)).await, StatusCode::OK);
    assert!(limit.check(&Hashed("sk-1")).is_denied());
    assert_eq!(ask_by(KeyOf::plain_header(KEY)).await, StatusCode::OK);
    assert!(limit.check("sk-1").is_denied());
    assert_eq!(ask_by(KeyOf::plain_header(KEY).hashed()).await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn keys_of_several_parts_are_tuples_of_the_core() {
    let [limit] = limits([1]);
    let path = || KeyOf::function(|head, key| head.uri.path().write(key));
    let ask_by = async |key: KeyOf, value: &str, uri: &str| {
        let (ask, _) = behind(KeyedLimit::new(limit.clone(), key).into());
        let request = Request::builder().uri(uri).header(KEY, value).body(()).unwrap();
        ask(request).await.status()
    };
    let two = || KeyOf::plain_header(KEY).and(path());
    for (key, uri) in [("a", "/b"), ("a:", "/b"), ("a", "/b:"), ("a", "/:b"), (r"a\", "/b")] {
        assert_eq!(ask_by(two(), key, uri).await, StatusCode::OK, "{key} {uri}");
        assert!(limit.check(&(key, uri)).is_denied(), "{key} {uri}");
    }
    assert_eq!(ask_by(two().and(path()), "a", "/c").await, StatusCode::OK);
    assert!(limit.check(&("a", "/c", "/c")).is_denied(), "three parts are three");
    assert_eq!(ask_by(KeyOf::header(KEY).and(path()), "a", "/d").await, StatusCode::OK);
    assert!(limit.check(&(Hashed("a"), "/d")).is_denied());
    let missing = KeyOf::plain_header(HeaderName::from_static("x-none")).and(path());
    assert_eq!(ask_by(missing, "a", "/e").await, StatusCode::BAD_REQUEST, "a part is missing");
}

#[tokio::test]
async fn own_response_gets_the_fields_and_keeps_its_retry_after() {
    let [limit] = limits([1]);
    let rate_limit = || RateLimit::new(by_header(&limit)).headers(HeaderStyle::draft_03());
    let inner = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(0_u8)) });
    let status = |refusal: &Refusal| {
        assert!(matches!(refusal, Refusal::Denied { limit: "limit-0", .. }));
        let mut response = Response::new(1);
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
    };
    let plain =
        RateLimitLayer::with_response(rate_limit(), move |refusal, _| status(refusal)).layer(inner);
    let own = RateLimitLayer::with_response(rate_limit(), move |refusal, _| {
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
async fn instance_that_was_found_ready_is_called() {
    for waiting in [false, true] {
        let [limit] = limits([2]);
        let rate_limit = RateLimit::new(by_header(&limit));
        let rate_limit = if waiting { rate_limit } else { rate_limit.without_waiting() };
        let mut service: RateLimitService<Strict, String> =
            RateLimitLayer::new(rate_limit).layer(Strict::default());
        for status in [200, 200, 429, 429] {
            let answer = service.ready().await.unwrap().call(with_key("a")).await.unwrap();
            assert_eq!(answer.status().as_u16(), status);
        }
    }
}

/// Once, the layer did not wait by default, and denied new clients whose bucket was full.
#[tokio::test]
async fn d1_layer_asks_the_store_by_default_where_the_node_is_unsure() {
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
    let (ask, _) = behind(RateLimit::new(by_header(&limit)).without_waiting());
    let at_once = ask(with_key("new")).await.status();
    assert_eq!(at_once, StatusCode::TOO_MANY_REQUESTS, "without credit");
    let (ask, _) = behind(by_header(&limit).into());
    let mut asking = ask(with_key("other"));
    for _ in 0..1000 {
        tokio::select! {
            answer = &mut asking => {
                assert_eq!(answer.status(), StatusCode::OK);
                let state = answer.headers()["ratelimit"].to_str().unwrap();
                assert!(state.starts_with("\"api\";r="), "{state}");
                return;
            }
            () = limiter.settle() => clock.advance(Duration::from_millis(1)),
        }
    }
    panic!("there was no answer");
}

/// Ten requests at once, a slot each 20 ms, and a queue of 100 ms.
#[tokio::test]
async fn leaky_bucket_holds_requests_until_their_slots_and_refuses_others_at_once() {
    let clock = ManualClock::new();
    let rule = LeakyBucket::per_second(50).queue(Duration::from_millis(100));
    let limiter = Limiter::builder().limit(Limit::new("mail", rule)).clock(&clock).build().unwrap();
    let (ask, served) = behind(by_header(&limiter.limit("mail").unwrap()).into());
    let mut asking: Vec<Option<Asking>> = (0..10).map(|_| Some(ask(with_key("alice")))).collect();
    let mut ended = Vec::new();
    for ms in 0..=110 {
        for (at, slot) in asking.iter_mut().enumerate() {
            // The fourth client has gone away: its slot is not the last one, and passes unused.
            if at == 3 && ms == 10 {
                *slot = None;
            }
            let Some(request) = slot else { continue };
            if let Poll::Ready(response) = poll_once(request.as_mut()) {
                ended.push((ms, at, response.status().as_u16()));
                *slot = None;
            }
        }
        limiter.settle().await;
        clock.advance(Duration::from_millis(1));
        limiter.settle().await;
    }
    let refused = (6..10).map(|at| (0, at, 429));
    let served_at = [(20, 1, 200), (40, 2, 200), (80, 4, 200), (100, 5, 200)];
    let expected: Vec<_> = [(0, 0, 200)].into_iter().chain(refused).chain(served_at).collect();
    assert_eq!(ended, expected);
    assert_eq!(served.load(Ordering::Relaxed), 5);
    let at_once = RateLimit::new(by_header(&limiter.limit("mail").unwrap())).without_waiting();
    let (ask, _) = behind(at_once);
    assert_eq!(ask(with_key("bob")).await.status(), StatusCode::OK);
    assert_eq!(ask(with_key("bob")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn peer_and_route_of_axum_are_keys() {
    let [by_peer, by_route] = limits([2, 3]);
    let rate_limit = RateLimit::new(KeyedLimit::new(by_peer, KeyOf::client(ClientIp::peer())))
        .and(KeyedLimit::new(by_route, KeyOf::route()));
    let service = Router::new()
        .route("/users/{id}", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(rate_limit));
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
async fn peer_extension_is_the_clients_address() {
    let [limit] = limits([1]);
    let (ask, _) = behind(RateLimit::new(KeyedLimit::new(limit, KeyOf::client(ClientIp::peer()))));
    let from = |peer: &str| {
        let mut request = without_key();
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
}

/// The type of a layer and its service can be written down.
struct App {
    layer: RateLimitLayer<Body>,
    service: Option<RateLimitService<Router, Body>>,
}

#[tokio::test]
async fn shared_layer_counts_all_requests_in_one_bucket() {
    let [limit] = limits([2]);
    let mut app = App { layer: RateLimitLayer::shared(limit), service: None };
    let service = app.service.insert(app.layer.layer(Router::new()));
    let ask = async || {
        let request = Request::new(Body::empty());
        let service: RateLimitService<Router, Body> = service.clone();
        service.oneshot(request).await.unwrap().status().as_u16()
    };
    assert_eq!([ask().await, ask().await, ask().await], [404, 404, 429]);
}

#[tokio::test]
async fn client_behind_a_prefix_or_a_cdn_has_one_bucket() {
    let [limit] = limits([1]);
    let client = ClientIp::peer()
        .behind_networks(["10.0.0.0/8".parse().unwrap()])
        .forwarding(Forwarding::Header(HeaderName::from_static("cf-connecting-ip")))
        .prefix_v4(24);
    let (ask, _) = behind(KeyedLimit::new(limit, KeyOf::client(client)).into());
    let from = |peer: &str, reported: &str| {
        let mut request = without_key();
        request.extensions_mut().insert(Peer(peer.parse().unwrap()));
        request.headers_mut().insert("cf-connecting-ip", reported.parse().unwrap());
        ask(request)
    };
    assert_eq!(from("10.0.0.1:1", "203.0.113.9").await.status(), StatusCode::OK);
    let neighbour = from("10.0.0.2:1", "203.0.113.77").await.status();
    assert_eq!(neighbour, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(from("192.0.2.1:1", "203.0.113.9").await.status(), StatusCode::OK, "forged");
}

#[tokio::test]
async fn limit_that_protects_the_service_answers_503() {
    let [limit] = limits([1]);
    let (ask, _) = behind(KeyedLimit::shared(limit).protects_service().into());
    assert_eq!(ask(without_key()).await.status(), StatusCode::OK);
    let denied = ask(without_key()).await;
    assert_eq!(denied.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(denied.headers()[header::RETRY_AFTER], "3600");
    let problem: serde_json::Value = serde_json::from_str(denied.body()).unwrap();
    let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
    assert_eq!((&problem["type"], &problem["status"]), (&kind.into(), &503.into()));
}

#[tokio::test]
async fn json_error_body_has_code_message_limit_and_retry_after() {
    let [limit] = limits([1]);
    let json = |limit: KeyedLimit| RateLimit::new(limit).error_body(ErrorBody::Json);
    let (ask, _) = behind(json(by_header(&limit)));
    let body = async |request| {
        let response = ask(request).await;
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        serde_json::from_str::<serde_json::Value>(response.body()).unwrap()
    };
    assert_eq!(ask(with_key("a")).await.status(), StatusCode::OK);
    let denied = body(with_key("a")).await;
    let expected = serde_json::json!({
        "code": "rate_limited",
        "message": "Too many requests: try again later",
        "limit": "limit-0",
        "retryAfter": 3600,
    });
    assert_eq!(denied, expected);
    let missing = body(without_key()).await;
    assert_eq!(missing["code"], "missing_key");
    assert_eq!(missing["retryAfter"], serde_json::Value::Null);
}

#[tokio::test]
async fn denied_of_a_handler_is_the_response_of_the_layer() {
    let [limit] = limits([1]);
    let handle = |limit: ActiveLimit| async move {
        limit.check_sure("alice").await.into_result()?;
        Ok::<_, Denied>("done")
    };
    let in_handler = Router::new()
        .route("/", get(move |State(limit): State<ActiveLimit>| handle(limit)))
        .with_state(limit.clone());
    let key = KeyOf::function(|_, key| "alice".write(key));
    let layer = RateLimitLayer::new(KeyedLimit::new(limit, key));
    let in_layer = Router::new().route("/", get(|| async { "done" })).layer(layer);
    let ask = async |router: &Router| {
        let response = router.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes();
        let mut headers: Vec<_> = parts.headers.into_iter().collect();
        headers.sort_by_key(|(name, _)| name.as_ref().map(ToString::to_string));
        (parts.status, headers, body)
    };
    assert_eq!(ask(&in_handler).await.0, StatusCode::OK);
    let denied = ask(&in_handler).await;
    assert_eq!(denied.0, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied, ask(&in_layer).await);
}

#[tokio::test]
async fn exact_limit_asks_the_store_for_each_request_without_waiting_too() {
    for waits in [true, false] {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let service = || {
            let limiter = Limiter::builder()
                .limit(Limit::new("exact", FixedWindow::per_hour(3)).exact())
                .limit(Limit::new("local", Quota::per_hour(100)).local())
                .store(store.clone())
                .clock(&clock)
                .build()
                .unwrap();
            let exact = KeyedLimit::new(limiter.async_limit("exact").unwrap(), KeyOf::header(KEY));
            let rate_limit = RateLimit::new(by_header(&limiter.limit("local").unwrap())).and(exact);
            behind(if waits { rate_limit } else { rate_limit.without_waiting() }).0
        };
        let nodes = [service(), service()];
        let mut statuses = Vec::new();
        for request in 0..5 {
            let asked = Request::builder().header(KEY, "alice").body(()).unwrap();
            let response = nodes[request % 2](asked).await;
            statuses.push(response.status().as_u16());
            let left = response.headers()["ratelimit"].to_str().unwrap().to_owned();
            let expected = 2_usize.saturating_sub(request);
            assert!(left.contains(&format!("\"exact\";r={expected}")), "{left}");
        }
        assert_eq!(statuses, [200, 200, 200, 429, 429], "waits: {waits}");
    }
}
