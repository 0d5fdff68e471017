//! The layer around a service whose limits have plans: a request is limited by the plan that its head names.

#![cfg(all(feature = "tower", feature = "testing"))]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::convert::Infallible;

use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use tidegate::http::{KeyOf, KeyedLimit, RateLimit, RateLimitLayer};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{ActiveLimit, AsyncLimit, FixedWindow, Limit, Limiter, Override, Quota};
use tower::{Layer, ServiceExt, service_fn};

const KEY: HeaderName = HeaderName::from_static("x-api-key");
const PLAN: HeaderName = HeaderName::from_static("x-plan");

/// Two tokens, four under the plan pro, and no more while a test lasts.
fn planned() -> ActiveLimit {
    local(Limit::new("api", Quota::per_hour(2)).plan("pro", Quota::per_hour(4)))
}

fn local(limit: Limit) -> ActiveLimit {
    let name = limit.name().to_owned();
    let builder = Limiter::builder().limit(limit.local()).clock(&ManualClock::new());
    builder.build().unwrap().limit(&name).unwrap()
}

fn by_key(limit: impl Into<AsyncLimit>) -> KeyedLimit {
    KeyedLimit::new(limit, KeyOf::plain_header(KEY))
}

fn by_plan(limit: impl Into<AsyncLimit>) -> KeyedLimit {
    by_key(limit).plan(|head| head.headers.get(PLAN)?.to_str().ok())
}

fn layer(rate_limit: impl Into<RateLimit>) -> RateLimitLayer<String> {
    RateLimitLayer::new(rate_limit)
}

/// What a request of a key gets that names a plan, or none.
async fn ask(
    layer: &RateLimitLayer<String>,
    key: &str,
    plan: Option<&[u8]>,
) -> (StatusCode, String) {
    let inner =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let mut request = Request::builder().header(KEY, key).body(()).unwrap();
    if let Some(plan) = plan {
        request.headers_mut().insert(PLAN, HeaderValue::from_bytes(plan).unwrap());
    }
    let response = layer.layer(inner).oneshot(request).await.unwrap();
    let fields = ["ratelimit-policy", "ratelimit"].map(|name| {
        response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned()
    });
    (response.status(), fields.join(" "))
}

const PRO: Option<&[u8]> = Some(b"pro");

/// How many requests of a key are admitted until one is denied, and the header fields of that one.
async fn admitted(layer: &RateLimitLayer<String>, key: &str, plan: Option<&[u8]>) -> (u32, String) {
    for admitted in 0..100 {
        let (status, fields) = ask(layer, key, plan).await;
        if status == StatusCode::TOO_MANY_REQUESTS {
            return (admitted, fields);
        }
        assert_eq!(status, StatusCode::OK, "{fields}");
    }
    panic!("no request was denied");
}

fn left(limit: &ActiveLimit, key: &str) -> u64 {
    limit.check_n(key, 0).unwrap().remaining()
}

#[tokio::test]
async fn header_fields_of_a_key_with_a_quota_by_override_show_that_quota() {
    let limit = Limit::new("api", Quota::per_hour(2)).plan("pro", Quota::per_hour(4)).local();
    let builder = Limiter::builder().limit(limit).clock(&ManualClock::new());
    let limiter = builder.build().unwrap();
    let layer = layer(by_plan(limiter.limit("api").unwrap()));
    let set = Override::key("acme").quota(Quota::per_minute(7));
    limiter.overrides().set("api", set).await.unwrap();
    for plan in [None, PRO] {
        let (status, fields) = ask(&layer, "acme", plan).await;
        assert_eq!(status, StatusCode::OK);
        assert!(fields.starts_with(r#""api";q=7;w=60 "#), "{fields}");
    }
    let (_, fields) = ask(&layer, "other", None).await;
    assert!(fields.starts_with(r#""api";q=2;w=3600 "#), "{fields}");
    limiter.overrides().remove("api", Override::key("acme")).await.unwrap();
    let (_, fields) = ask(&layer, "acme", PRO).await;
    assert!(fields.starts_with(r#""api";q=4;w=3600 "#), "{fields}");
}

#[tokio::test]
async fn request_is_limited_by_the_plan_that_its_head_names_and_else_by_the_own_quota() {
    let api = planned();
    let cases: [(&str, Option<&[u8]>, u32); 6] = [
        ("named", PRO, 4),
        ("missing", None, 2),
        ("unknown", Some(b"gold"), 2),
        ("empty", Some(b""), 2),
        ("in capitals", Some(b"PRO"), 2),
        ("no text", Some(b"\xff"), 2),
    ];
    for (key, plan, tokens) in cases {
        let (admitted, fields) = admitted(&layer(by_plan(api.clone())), key, plan).await;
        assert_eq!(admitted, tokens, "{key}");
        assert!(fields.starts_with(&format!("\"api\";q={tokens};w=3600 \"api\";r=0;")), "{fields}");
    }
    let (admitted, _) = admitted(&layer(by_key(api)), "nobody asks", PRO).await;
    assert_eq!(admitted, 2, "a header field is nothing without KeyedLimit::plan");
}

#[tokio::test]
async fn key_that_comes_under_another_plan_keeps_what_it_has() {
    let api = planned();
    let rate_limit = layer(by_plan(api));
    assert_eq!(admitted(&rate_limit, "raised", None).await.0, 2);
    let (fresh, fields) = admitted(&rate_limit, "raised", PRO).await;
    assert_eq!(fresh, 0, "{fields}");
    assert!(fields.starts_with("\"api\";q=4;w=3600 \"api\";r=0;"), "{fields}");
    assert_eq!(ask(&rate_limit, "lowered", PRO).await.0, StatusCode::OK);
    assert_eq!(admitted(&rate_limit, "lowered", None).await.0, 2, "at most what the plan holds");
    assert_eq!(admitted(&rate_limit, "lowered", PRO).await.0, 0);
}

#[tokio::test]
async fn cost_above_the_burst_of_the_requests_plan_is_refused_and_charged_to_nobody() {
    let (api, other) = (planned(), local(Limit::new("other", Quota::per_hour(10))));
    let costly = || by_plan(api.clone()).cost(|_| 3);
    let both = || RateLimit::new(by_key(other.clone())).and(costly());
    assert_eq!(ask(&layer(costly()), "one", None).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(ask(&layer(both()), "one", None).await.0, StatusCode::BAD_REQUEST);
    assert_eq!((left(&api, "one"), left(&other, "one")), (2, 10));
    assert_eq!(ask(&layer(costly()), "one", PRO).await.0, StatusCode::OK, "it has four");
    assert_eq!(ask(&layer(both()), "another", PRO).await.0, StatusCode::OK);
    assert_eq!(left(&other, "another"), 9);
}

#[tokio::test]
async fn several_limits_of_which_one_has_plans_are_charged_together() {
    let (api, other) = (planned(), local(Limit::new("other", Quota::per_hour(3))));
    let rate_limit = layer(RateLimit::new(by_plan(api.clone())).and(by_key(other.clone())));
    let (pro, fields) = admitted(&rate_limit, "pro", PRO).await;
    assert_eq!(pro, 3, "the limit without plans denies");
    assert!(fields.starts_with("\"api\";q=4;w=3600, \"other\";q=3;w=3600 "), "{fields}");
    assert_eq!((left(&api.plan("pro").unwrap(), "pro"), left(&other, "pro")), (1, 0));
    let (own, fields) = admitted(&rate_limit, "own", None).await;
    assert_eq!(own, 2, "the limit with plans denies");
    assert!(fields.starts_with("\"api\";q=2;w=3600, \"other\";q=3;w=3600 "), "{fields}");
    assert_eq!((left(&api, "own"), left(&other, "own")), (0, 1));
}

/// Given back to the limit's own quota, all but two tokens would be lost.
#[tokio::test]
async fn tokens_that_charge_if_does_not_charge_go_back_by_the_plan_that_decided() {
    let api = planned();
    let never = || by_plan(api.clone()).charge_if(|response| response.status != StatusCode::OK);
    let always = by_plan(api.clone()).charge_if(|response| response.status == StatusCode::OK);
    let both = RateLimit::new(never()).and(by_key(local(Limit::new("all", Quota::per_hour(20)))));
    for rate_limit in [layer(never()), layer(both)] {
        for _ in 0..10 {
            let (status, fields) = ask(&rate_limit, "key", PRO).await;
            assert_eq!(status, StatusCode::OK);
            assert!(fields.contains(" \"api\";r=4;t=0"), "{fields}");
        }
    }
    assert_eq!(admitted(&layer(always), "key", PRO).await.0, 4);
    assert_eq!(ask(&layer(never()), "key", PRO).await.0, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn exact_limit_is_asked_by_the_plan_with_and_without_waiting() {
    for waits in [true, false] {
        let clock = ManualClock::new();
        let limit = Limit::new("exact", FixedWindow::per_hour(2));
        let limit = limit.plan("pro", FixedWindow::per_hour(4)).exact();
        let builder = Limiter::builder().limit(limit).store(ScriptedStore::new(&clock));
        let limiter = builder.clock(&clock).build().unwrap();
        let rate_limit = RateLimit::new(by_plan(limiter.async_limit("exact").unwrap()));
        let rate_limit = layer(if waits { rate_limit } else { rate_limit.without_waiting() });
        let (pro, fields) = admitted(&rate_limit, "pro", PRO).await;
        assert_eq!(pro, 4, "waits: {waits}");
        assert!(fields.starts_with("\"exact\";q=4;w=3600 "), "{fields}");
        assert_eq!(admitted(&rate_limit, "own", None).await.0, 2, "waits: {waits}");
    }
}

/// A layer that was made before follows, and so does a plan that its requests name.
#[tokio::test]
async fn layer_follows_an_update_of_its_limit() {
    let limit = |own, pro| {
        Limit::new("api", Quota::per_hour(own)).plan("pro", Quota::per_hour(pro)).local()
    };
    let builder = Limiter::builder().limit(limit(2, 4)).clock(&ManualClock::new());
    let limiter = builder.build().unwrap();
    let rate_limit = layer(by_plan(limiter.limit("api").unwrap()));
    assert_eq!(admitted(&rate_limit, "before", None).await.0, 2);
    limiter.update([limit(3, 5)]).unwrap();
    assert_eq!(admitted(&rate_limit, "before", None).await.0, 0, "no fresh burst");
    let (own, fields) = admitted(&rate_limit, "new", None).await;
    assert!(own == 3 && fields.starts_with("\"api\";q=3;w=3600 \"api\";r=0;"), "{own}: {fields}");
    let (pro, fields) = admitted(&rate_limit, "newer", PRO).await;
    assert!(pro == 5 && fields.starts_with("\"api\";q=5;w=3600 \"api\";r=0;"), "{pro}: {fields}");
}
