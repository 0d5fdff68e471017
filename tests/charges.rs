//! What the layer charges: all limits of a request or none, and what the response says.

#![cfg(all(feature = "axum", feature = "testing"))]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use http::{HeaderName, Request, Response, StatusCode};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tidegate::http::{HeaderStyle, KeyOf, KeyedLimit, RateLimit, RateLimitLayer, Reset};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, AsyncLimit, FixedWindow, LeakyBucket, Limit, Limiter, Override, Quota, Rule,
    SlidingLog, SlidingWindow, Switch,
};
use tower::{Layer, ServiceExt, service_fn};

const HOUR: Duration = Duration::from_secs(3600);
const KEY: HeaderName = HeaderName::from_static("x-api-key");
const STATUS: HeaderName = HeaderName::from_static("x-status");

fn by_header(limit: impl Into<AsyncLimit>) -> KeyedLimit {
    KeyedLimit::new(limit, KeyOf::plain_header(KEY))
}

fn only_failures(limit: impl Into<AsyncLimit>) -> KeyedLimit {
    by_header(limit).charge_if(|response| response.status == StatusCode::UNAUTHORIZED)
}

fn request(key: &str, status: u16) -> Request<()> {
    Request::builder().header(KEY, key).header(STATUS, status).body(()).unwrap()
}

/// Answers with the status that the request names, and fails without one.
async fn serve(request: Request<()>) -> Result<Response<String>, &'static str> {
    let status = request.headers()[STATUS].to_str().unwrap();
    let status = status.parse().map_err(|_| "no status")?;
    Ok(Response::builder()
        .status(StatusCode::from_u16(status).unwrap())
        .body(String::new())
        .unwrap())
}

async fn ask(rate_limit: &RateLimitLayer<String>, request: Request<()>) -> Response<String> {
    rate_limit.layer(service_fn(serve)).oneshot(request).await.unwrap()
}

fn header<'a>(response: &'a Response<String>, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

fn left(limit: &ActiveLimit, key: &str) -> u64 {
    limit.check_n(key, 0).unwrap().remaining()
}

/// Limits of this node alone, of which no token flows in while a test lasts.
fn local_limits<const COUNT: usize>(rules: [Rule; COUNT]) -> [ActiveLimit; COUNT] {
    let names: [String; COUNT] = std::array::from_fn(|index| format!("limit-{index}"));
    let limit = |(name, rule)| Limit::new(name, rule).local();
    let limits = names.iter().zip(rules).map(limit);
    let builder = limits.fold(Limiter::builder(), tidegate::Builder::limit);
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    names.map(|name| limiter.limit(&name).unwrap())
}

fn per_hour(tokens: u64) -> Rule {
    Quota::per_hour(tokens).into()
}

/// An axum service at a real port.
async fn serve_axum(app: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let serving = async { axum::serve(listener, app).await };
    #[allow(clippy::disallowed_methods, reason = "the service has a task of its own")]
    tokio::spawn(serving);
    url
}

fn client() -> Client<HttpConnector, Empty<&'static [u8]>> {
    Client::builder(TokioExecutor::new()).build_http()
}

async fn post_status(
    client: &Client<HttpConnector, Empty<&'static [u8]>>,
    url: &str,
    password: &str,
) -> (u16, String) {
    let request = Request::post(url).header("x-password", password).body(Empty::new()).unwrap();
    let response = client.request(request).await.unwrap();
    let told = response.headers()["ratelimit"].to_str().unwrap().to_owned();
    (response.status().as_u16(), told)
}

#[tokio::test]
async fn only_failed_logins_are_charged_and_the_next_one_after_too_many_is_denied() {
    let rules: [Rule; 4] = [
        per_hour(5),
        FixedWindow::per_hour(5).into(),
        SlidingWindow::per_hour(5).into(),
        SlidingLog::per_hour(5).into(),
    ];
    for [failures] in rules.map(|rule| local_limits([rule])) {
        let per_client = KeyedLimit::per_client(failures)
            .charge_if(|response| response.status == StatusCode::UNAUTHORIZED);
        let login = |headers: http::HeaderMap| async move {
            if headers["x-password"] == "right" { StatusCode::OK } else { StatusCode::UNAUTHORIZED }
        };
        let app = Router::new().route("/", post(login)).layer(RateLimitLayer::new(per_client));
        let (url, client) = (serve_axum(app).await, client());
        for _ in 0..20 {
            let (status, told) = post_status(&client, &url, "right").await;
            assert_eq!(status, 200);
            assert!(told.starts_with("\"limit-0\";r=5;"), "as it stands after that: {told}");
        }
        for failed in 1..=5 {
            let (status, told) = post_status(&client, &url, "wrong").await;
            assert_eq!(status, 401);
            assert!(told.starts_with(&format!("\"limit-0\";r={};", 5 - failed)), "{told}");
            if failed < 5 {
                assert_eq!(post_status(&client, &url, "right").await.0, 200);
            }
        }
        assert_eq!(post_status(&client, &url, "right").await.0, 429, "nobody goes on guessing");
    }
}

/// Clients at their own connections, about limits of which the second one denies most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_limits_of_an_axum_service_are_charged_together_or_not_at_all() {
    const REQUESTS: u64 = 150;
    let [by_user, all] = local_limits([per_hour(REQUESTS), per_hour(100)]);
    let user = KeyOf::plain_header(HeaderName::from_static("x-password"));
    let rate_limit = RateLimit::new(KeyedLimit::new(by_user.clone(), user))
        .and(KeyedLimit::per_client(all.clone()).cost(|_| 3));
    let app =
        Router::new().route("/", post(|| async { "done" })).layer(RateLimitLayer::new(rate_limit));
    let url = serve_axum(app).await;
    let asking = ["ann", "bob"].map(|user| {
        let (url, client) = (url.clone(), client());
        async move {
            let mut served = 0;
            for _ in 0..REQUESTS {
                served += u64::from(post_status(&client, &url, user).await.0 == 200);
            }
            served
        }
    });
    #[allow(clippy::disallowed_methods, reason = "clients are not the service")]
    let [ann, bob] = asking.map(tokio::spawn);
    let (ann, bob) = (ann.await.unwrap(), bob.await.unwrap());
    assert_eq!(ann + bob, 33, "three tokens each");
    assert_eq!([left(&by_user, "ann"), left(&by_user, "bob")], [REQUESTS - ann, REQUESTS - bob]);
    assert_eq!(left(&all, "127.0.0.1"), 1);
}

/// Nobody can guess for free by going away before the answer.
#[tokio::test]
async fn request_without_a_response_stays_charged() {
    let [limit] = local_limits([per_hour(10)]);
    let layer: RateLimitLayer<String> = RateLimitLayer::new(only_failures(limit.clone()));
    let failed = layer
        .layer(service_fn(serve))
        .oneshot(Request::builder().header(KEY, "a").header(STATUS, "none").body(()).unwrap());
    assert!(failed.await.is_err());
    assert_eq!(left(&limit, "a"), 9, "the service failed");

    let hangs = |_: Request<()>| std::future::pending::<Result<Response<String>, Infallible>>();
    let mut hanging = Box::pin(layer.layer(service_fn(hangs)).oneshot(request("a", 200)));
    assert!(poll_once(hanging.as_mut()).is_pending());
    assert_eq!(left(&limit, "a"), 8, "it is charged before the service answers");
    drop(hanging);
    assert_eq!(left(&limit, "a"), 8, "the client went away");

    let panics = |request: Request<()>| async move {
        assert!(request.headers().is_empty(), "on purpose");
        Ok::<_, Infallible>(Response::new(String::new()))
    };
    let service = layer.layer(service_fn(panics));
    #[allow(clippy::disallowed_methods, reason = "a task that panics is a service's own")]
    let ended = tokio::spawn(service.oneshot(request("a", 200))).await;
    assert!(ended.unwrap_err().is_panic());
    assert_eq!(left(&limit, "a"), 7, "the service panicked");
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    assert_eq!(left(&limit, "a"), 7);
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn of_several_limits_those_give_back_that_were_told_to() {
    let [all, failures, bytes] = local_limits([per_hour(10), per_hour(10), per_hour(100)]);
    let rate_limit = RateLimit::new(by_header(all.clone()))
        .and(only_failures(failures.clone()))
        .and(by_header(bytes.clone()).cost(|_| 7).charge_if(|response| response.status != 304))
        .headers(HeaderStyle::draft().and(HeaderStyle::x_ratelimit(Reset::Seconds)));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
    let mut expected = [10, 10, 100];
    for (status, charged) in [(200, [1, 0, 7]), (401, [1, 1, 7]), (304, [1, 0, 0])] {
        let response = ask(&layer, request("a", status)).await;
        for (left, charged) in expected.iter_mut().zip(charged) {
            *left -= charged;
        }
        assert_eq!([&all, &failures, &bytes].map(|limit| left(limit, "a")), expected);
        let told = header(&response, "ratelimit");
        for (index, left) in expected.into_iter().enumerate() {
            assert!(told.contains(&format!("\"limit-{index}\";r={left};")), "{told}");
        }
        let tightest = expected[0].to_string();
        assert_eq!(header(&response, "x-ratelimit-remaining"), tightest, "of the first limit");
    }
}

#[tokio::test]
async fn denial_by_any_limit_charges_none_and_names_the_one_that_denies() {
    let [first, second, third] = local_limits([per_hour(10), per_hour(2), per_hour(10)]);
    let rate_limit = RateLimit::new(by_header(first.clone()))
        .and(by_header(second.clone()).protects_service())
        .and(by_header(third.clone()))
        .headers(HeaderStyle::draft().and(HeaderStyle::x_ratelimit(Reset::Seconds)));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
    for _ in 0..2 {
        assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    }
    for _ in 0..5 {
        let denied = ask(&layer, request("a", 200)).await;
        assert_eq!(denied.status(), StatusCode::SERVICE_UNAVAILABLE, "by its own status");
        assert!(denied.body().contains("\"violated-policies\":[\"limit-1\"]"), "{}", denied.body());
        assert_eq!(header(&denied, "retry-after"), "1800");
        let policies = "\"limit-0\";q=10;w=3600, \"limit-1\";q=2;w=3600, \"limit-2\";q=10;w=3600";
        assert_eq!(header(&denied, "ratelimit-policy"), policies);
        let states = "\"limit-0\";r=8;t=360, \"limit-1\";r=0;t=1800, \"limit-2\";r=8;t=360";
        assert_eq!(header(&denied, "ratelimit"), states);
        assert_eq!(header(&denied, "x-ratelimit-limit"), "2", "the one that denies");
    }
    assert_eq!((left(&first, "a"), left(&third, "a")), (8, 8));
    // Of two that deny, the one with the longer wait.
    while first.check("a").is_allowed() {}
    let denied = ask(&layer, request("a", 200)).await;
    assert_eq!((denied.status().as_u16(), header(&denied, "retry-after")), (503, "1800"));
    assert_eq!(left(&third, "a"), 8);
}

#[tokio::test]
async fn request_that_a_limit_refuses_is_charged_to_none() {
    let [first, second] = local_limits([per_hour(10), per_hour(10)]);
    let other = KeyOf::plain_header(HeaderName::from_static("x-other"));
    let layers = [
        RateLimit::new(by_header(first.clone())).and(KeyedLimit::new(second.clone(), other)),
        RateLimit::new(by_header(first.clone())).and(by_header(second.clone()).cost(|_| 11)),
    ];
    for rate_limit in layers {
        let refused = ask(&RateLimitLayer::new(rate_limit), request("a", 200)).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert_eq!((left(&first, "a"), left(&second, "a")), (10, 10));
    }
}

/// Once, the limit on trial refused the request, and the other one did not decide about it.
#[tokio::test]
async fn no_cost_is_too_high_for_a_limit_in_shadow_mode_or_for_a_blocked_key() {
    let builder = Limiter::builder()
        .limit(Limit::new("tried", Quota::per_hour(10)).local().switch(Switch::Shadow))
        .limit(Limit::new("on", Quota::per_hour(1)).local());
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    limiter.overrides().set("on", Override::key("mallory").block()).await.unwrap();
    let [tried, on] = ["tried", "on"].map(|name| limiter.limit(name).unwrap());
    let costly = |limit: &ActiveLimit| RateLimit::new(by_header(limit.clone()).cost(|_| 11));
    let status = async |rate_limit: RateLimit, key: &str| {
        let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
        ask(&layer, request(key, 200)).await.status().as_u16()
    };
    assert_eq!(status(costly(&tried), "ann").await, 200);
    assert_eq!(status(costly(&tried).without_waiting(), "ann").await, 200);
    for expected in [200, 429] {
        assert_eq!(status(costly(&tried).and(by_header(on.clone())), "ann").await, expected);
    }
    assert_eq!(left(&tried, "ann"), 10, "nothing was charged");
    for (key, expected) in [("ann", 400), ("mallory", 429)] {
        assert_eq!(status(costly(&on), key).await, expected);
        assert_eq!(status(costly(&on).without_waiting(), key).await, expected);
        assert_eq!(status(costly(&on).and(by_header(tried.clone())), key).await, expected);
    }
    assert_eq!(left(&tried, "mallory"), 10, "the other limit denied");
}

/// Once, the wait for a limit that denies nobody was added.
#[tokio::test]
async fn denied_client_does_not_wait_for_a_limit_in_shadow_mode() {
    let builder = Limiter::builder()
        .limit(Limit::new("second", Quota::per_second(1)).local())
        .limit(Limit::new("hour", FixedWindow::per_hour(1)).local().switch(Switch::Shadow));
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    let [second, hour] = ["second", "hour"].map(|name| by_header(limiter.limit(name).unwrap()));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(RateLimit::new(second).and(hour));
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    let denied = ask(&layer, request("a", 200)).await;
    assert_eq!((denied.status().as_u16(), header(&denied, "retry-after")), (429, "1"));
}

/// Clients that keep what the fields say slowed down for it.
#[tokio::test]
async fn header_fields_leave_out_a_limit_in_shadow_mode() {
    let builder = Limiter::builder()
        .limit(Limit::new("minute", Quota::per_minute(60)).local())
        .limit(Limit::new("trial", Quota::per_minute(1)).local().switch(Switch::Shadow));
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    let [minute, trial] = ["minute", "trial"].map(|name| by_header(limiter.limit(name).unwrap()));
    let rate_limit =
        RateLimit::new(trial).and(minute).headers(HeaderStyle::x_ratelimit(Reset::Seconds));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
    for left in ["59", "58"] {
        let response = ask(&layer, request("a", 200)).await;
        let told =
            ["x-ratelimit-limit", "x-ratelimit-remaining"].map(|name| header(&response, name));
        assert_eq!(told, ["60", left]);
    }
    limiter.overrides().switch("trial", Switch::On).await.unwrap();
    let response = ask(&layer, request("a", 200)).await;
    assert_eq!((response.status().as_u16(), header(&response, "x-ratelimit-limit")), (429, "1"));
}

/// All but the first were denied, as far as the limit's counts said.
#[tokio::test]
async fn layer_takes_the_slots_of_a_queue_in_shadow_mode_and_holds_nobody() {
    let queue = LeakyBucket::per_second(10).queue(Duration::from_secs(2));
    let builder = Limiter::builder()
        .limit(Limit::new("queue", queue).local().switch(Switch::Shadow))
        .limit(Limit::new("other", Quota::per_hour(1000)).local());
    let limiter = builder.clock(&ManualClock::new()).build().unwrap();
    let [queue, other] = ["queue", "other"].map(|name| limiter.limit(name).unwrap());
    let alone = RateLimit::new(by_header(queue.clone()));
    let both = RateLimit::new(by_header(queue.clone())).and(by_header(other));
    for (key, rate_limit) in [("a", alone), ("b", both)] {
        let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
        for number in 0..21 {
            let response = ask(&layer, request(key, 200)).await;
            assert_eq!(response.status(), StatusCode::OK, "{key}: {number}");
        }
        assert!(queue.schedule(key).is_shadow_denied(), "{key}: 21 slots are taken");
    }
}

/// Of what was not charged they told by the quota that the layer was made with.
#[tokio::test]
async fn header_fields_of_what_is_not_charged_tell_the_keys_quota_of_now() {
    let limit = |tokens| Limit::new("api", Quota::per_hour(tokens)).local();
    let limiter = Limiter::builder().limit(limit(10)).clock(&ManualClock::new()).build().unwrap();
    let layer: RateLimitLayer<String> =
        RateLimitLayer::new(RateLimit::new(only_failures(limiter.limit("api").unwrap())));
    let policies = async |key| {
        let responses =
            [ask(&layer, request(key, 200)).await, ask(&layer, request(key, 401)).await];
        responses.map(|response| header(&response, "ratelimit-policy").to_owned())
    };
    let of = |tokens: u64| [(); 2].map(|()| format!("\"api\";q={tokens};w=3600"));
    assert_eq!(policies("ann").await, of(10));
    limiter.update([limit(100)]).unwrap();
    assert_eq!(policies("ann").await, of(100));
    let set = Override::key("acme").quota(Quota::per_hour(1000));
    limiter.overrides().set("api", set).await.unwrap();
    assert_eq!(policies("acme").await, of(1000));
}

/// Limits that were built apart have clocks and stores of their own.
#[tokio::test]
async fn limits_of_several_limiters_are_charged_together() {
    let (one, other) =
        (tidegate::local(Quota::per_day(2)).unwrap(), tidegate::local(Quota::per_day(1)).unwrap());
    let rate_limit = RateLimit::new(only_failures(one.clone())).and(by_header(other.clone()));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    assert_eq!((left(&one, "a"), left(&other, "a")), (2, 0));
    assert_eq!(ask(&layer, request("a", 401)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(left(&one, "a"), 2);
}

/// How many of a key's requests were served, were allowed by the first and the second limit beside the layer, and failed.
type Counts = [AtomicU64; 4];

/// Threads ask through a layer and beside it, all about one key, and then about the next. Once, what a later limit denied
/// stayed charged to the ones before it.
#[test]
fn concurrent_requests_charge_all_limits_of_the_layer_or_none() {
    const KEYS: usize = 400;
    const TOKENS: u64 = 20;
    let rules: [fn(u64) -> Rule; 4] = [
        |tokens| Quota::new(1, HOUR).burst(tokens).into(),
        |tokens| FixedWindow::new(tokens, HOUR).into(),
        |tokens| SlidingWindow::new(tokens, HOUR).into(),
        |tokens| SlidingLog::new(tokens, HOUR).into(),
    ];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    for rule in rules {
        let limits = local_limits([rule(TOKENS), rule(TOKENS), rule(TOKENS / 2)]);
        let [first, second, third] = limits.each_ref().map(|limit| by_header(limit.clone()));
        let failures = third.charge_if(|response| response.status == StatusCode::UNAUTHORIZED);
        let rate_limit = RateLimit::new(first).and(second).and(failures.cost(|_| 2));
        let service = RateLimitLayer::new(rate_limit).layer(service_fn(serve));
        let counts: Arc<[Counts]> = (0..KEYS).map(|_| Counts::default()).collect();
        let together = Arc::new(tokio::sync::Barrier::new(4));
        let tasks: Vec<_> = (0..4)
            .map(|seed| {
                let (service, limits, together) =
                    (service.clone(), limits.clone(), together.clone());
                let counts = counts.clone();
                runtime.spawn(ask_at_random(service, limits, counts, together, seed))
            })
            .collect();
        for task in tasks {
            runtime.block_on(task).unwrap();
        }
        let mut sums = [0; 4];
        for (key, counts) in counts.iter().enumerate() {
            let counts = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
            let [served, first, second, failed] = counts;
            let left = limits.each_ref().map(|limit| left(limit, &key.to_string()));
            let charged = [served + first, served + second, 2 * failed];
            let whole = [0, 1, 2].map(|index| left[index] + charged[index]);
            let expected = [TOKENS, TOKENS, TOKENS / 2];
            assert_eq!(whole, expected, "{:?}: {counts:?}, {left:?} left", limits[0].rule());
            sums = [0, 1, 2, 3].map(|index| sums[index] + counts[index]);
        }
        let least = KEYS as u64;
        assert!(sums.iter().all(|sum| *sum > least), "{sums:?}");
    }
}

async fn ask_at_random<S>(
    service: S,
    limits: [ActiveLimit; 3],
    counts: Arc<[Counts]>,
    together: Arc<tokio::sync::Barrier>,
    seed: u64,
) where
    S: tower::Service<Request<()>, Response = Response<String>, Error = &'static str> + Clone,
{
    let mut rng = fastrand::Rng::with_seed(seed);
    for (key, counts) in counts.iter().enumerate() {
        let key = key.to_string();
        let count = |index: usize, is_counted: bool| {
            counts[index].fetch_add(is_counted.into(), Ordering::Relaxed);
        };
        together.wait().await;
        for _ in 0..15 {
            if rng.u8(..4) == 0 {
                let index = rng.usize(..2);
                count(1 + index, limits[index].check(&*key).is_allowed());
                continue;
            }
            let is_failure = rng.u8(..3) == 0;
            let status = if is_failure { 401 } else { 200 };
            let response = service.clone().oneshot(request(&key, status)).await.unwrap();
            let is_served = response.status() != StatusCode::TOO_MANY_REQUESTS;
            count(0, is_served);
            count(3, is_served && is_failure);
        }
    }
}

/// The slot of a leaky bucket is taken last, and a request that it holds or refuses charges nothing until it goes on.
#[tokio::test]
async fn request_that_leaves_a_queue_is_charged_to_no_other_limit() {
    let clock = ManualClock::new();
    let pace = LeakyBucket::per_second(10).queue(Duration::from_millis(100));
    let limiter = Limiter::builder()
        .limit(Limit::new("pace", pace).local())
        .limit(Limit::new("hour", Quota::per_hour(4)).local())
        .clock(&clock)
        .build()
        .unwrap();
    let hour = limiter.limit("hour").unwrap();
    let rate_limit =
        RateLimit::new(by_header(limiter.limit("pace").unwrap())).and(by_header(hour.clone()));
    let layer: RateLimitLayer<String> = RateLimitLayer::new(rate_limit);
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    let mut held = Box::pin(ask(&layer, request("a", 200)));
    assert!(poll_once(held.as_mut()).is_pending(), "until its slot");
    assert_eq!(left(&hour, "a"), 2);
    let refused = ask(&layer, request("a", 200)).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS, "the queue is full");
    assert!(refused.body().contains("pace"), "{}", refused.body());
    assert_eq!(left(&hour, "a"), 2);
    drop(held);
    assert_eq!(left(&hour, "a"), 3, "it did not go on");
    clock.advance(Duration::from_millis(100));
    while hour.check("a").is_allowed() {}
    let denied = ask(&layer, request("a", 200)).await;
    assert!(denied.body().contains("hour"), "{}", denied.body());
    assert!(limiter.limit("pace").unwrap().check("a").is_allowed(), "the slot is still free");
}

/// Its slot has passed: the service was called in it.
#[tokio::test]
async fn leaky_bucket_is_charged_whatever_the_response_says() {
    let [pace] = local_limits([LeakyBucket::per_hour(1).into()]);
    let layer: RateLimitLayer<String> = RateLimitLayer::new(by_header(pace).charge_if(|_| false));
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::OK);
    assert_eq!(ask(&layer, request("a", 200)).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

/// Two nodes share the limits, of which the store decides two.
#[tokio::test]
async fn exact_limits_of_a_layer_are_charged_together_with_the_others() {
    for waits in [true, false] {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let limiters = [(); 2].map(|()| {
            Limiter::builder()
                .limit(Limit::new("log", SlidingLog::per_hour(6)).exact())
                .limit(Limit::new("day", FixedWindow::per_day(4)).exact())
                .limit(Limit::new("here", Quota::per_hour(100)).local())
                .store(store.clone())
                .clock(&clock)
                .build()
                .unwrap()
        });
        let layers = limiters.each_ref().map(|limiter| {
            let [log, day, here] =
                ["log", "day", "here"].map(|name| limiter.async_limit(name).unwrap());
            let rate_limit =
                RateLimit::new(only_failures(log)).and(by_header(day)).and(by_header(here));
            let rate_limit = if waits { rate_limit } else { rate_limit.without_waiting() };
            RateLimitLayer::<String>::new(rate_limit)
        });
        let (mut statuses, mut denied_by_day) = (Vec::new(), 0);
        for turn in 0..8 {
            let status = if turn % 2 == 0 { 401 } else { 200 };
            let response = ask(&layers[turn / 2 % 2], request("a", status)).await;
            denied_by_day += u32::from(response.body().contains("day"));
            statuses.push(response.status().as_u16());
            limiters[turn / 2 % 2].settle().await;
        }
        assert_eq!(statuses, [401, 200, 401, 200, 429, 429, 429, 429], "waits: {waits}");
        assert_eq!(denied_by_day, 4);
        let log = limiters[0].async_limit("log").unwrap();
        assert_eq!(log.check_sure_n("a", 0).await.unwrap().remaining(), 4, "two failures");
        let here = limiters[1].limit("here").unwrap();
        assert_eq!(left(&here, "a"), 98, "what it served");
    }
}
