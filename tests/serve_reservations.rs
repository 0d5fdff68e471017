//! Costs that are known later, over HTTP: a reservation is settled once, by any process.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "nodes hear of each other by the real clock")]

mod parts;

use std::time::{Duration, Instant};

use parts::service::{SOON, ask, ask_with, service};
use parts::{RedisServer, charged_to};
use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate::server::Service;
use tidegate::testing::{Fault, ManualClock, ScriptedStore};

/// Every algorithm of which something can be reserved, shared and exact, and one limit of each process alone.
const LIMITS: &str = r#"
max_nodes = 2

[server]
token = "correct-horse-battery"

[limits.bucket]
quota = "100/365d"
max_wait = "5s"

[limits.bucket.plans.pro]
quota = "200/365d"

[limits.window]
quota = "100/365d"
algorithm = "fixed-window"
max_wait = "5s"

[limits.sliding]
quota = "100/365d"
algorithm = "sliding-window"
max_wait = "5s"

[limits.log]
quota = "100/365d"
algorithm = "sliding-log"
max_wait = "5s"

[limits.exact-bucket]
quota = "100/365d"
mode = "exact"
max_wait = "5s"

[limits.exact-window]
quota = "100/365d"
algorithm = "fixed-window"
mode = "exact"
max_wait = "5s"

[limits.exact-log]
quota = "100/365d"
algorithm = "sliding-log"
mode = "exact"
max_wait = "5s"

[limits.exact-log.plans.pro]
quota = "200/365d"

[limits.alone]
quota = "100/365d"
mode = "local"

[limits.queue]
quota = "100/365d"
algorithm = "leaky-bucket"
"#;

const SHARED: [&str; 7] =
    ["bucket", "window", "sliding", "log", "exact-bucket", "exact-window", "exact-log"];

async fn reserve(service: &Service, body: Value) -> Value {
    let answer = ask(service, "POST /v1/reserve", body.clone()).await;
    assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    answer.body
}

/// Waits until so much is charged to a key of a limit that nodes share.
async fn is_charged(redis: &RedisServer, limit: &str, key: &str, tokens: u64) {
    let deadline = Instant::now() + SOON;
    loop {
        let charged = charged_to(redis, limit);
        if charged.get(key) == Some(&tokens) {
            return;
        }
        assert!(Instant::now() < deadline, "{limit}, {key}: {charged:?}, not {tokens}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a process knows that so much is left of the key; a token less where another process may hold one.
async fn stands_at(service: &Service, limit: &str, key: &str, remaining: u64) {
    let deadline = Instant::now() + SOON;
    loop {
        let body = json!({"limit": limit, "key": key, "cost": 0});
        let stands = ask_with(None, service, "POST /v1/check", &body).await.body;
        let told = stands["remaining"].as_u64().unwrap();
        if (remaining - u64::from(!limit.starts_with("exact"))..=remaining).contains(&told) {
            return;
        }
        assert!(Instant::now() < deadline, "{limit}, {key}: {stands}, not {remaining}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Settles, and asks again while the store does not answer in time.
async fn settle(service: &Service, asked: &str, body: &Value) -> (u16, Value) {
    let deadline = Instant::now() + SOON;
    loop {
        let answer = ask(service, asked, body.clone()).await;
        if answer.status != 503 || Instant::now() > deadline {
            return (answer.status, answer.body);
        }
    }
}

#[tokio::test]
async fn reservation_is_settled_by_another_process_in_each_algorithm_and_mode() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (service(&text).await, service(&text).await);
    // What it costs, what is told, and what is left of 100 tokens.
    for (key, asked, cost, left) in [
        ("less", "POST /v1/commit", Some(10), 90),
        ("more", "POST /v1/commit", Some(55), 45),
        ("same", "POST /v1/commit", Some(40), 60),
        ("none", "POST /v1/refund", None, 100),
    ] {
        for limit in SHARED {
            let reserved = reserve(&one, json!({"limit": limit, "key": key, "cost": 40})).await;
            assert_eq!(reserved["remaining"], json!(60), "{limit}: {reserved}");
            let mut body = json!({"reservation": reserved["reservation"]});
            if let Some(cost) = cost {
                body["cost"] = json!(cost);
            }
            let settled = settle(&other, asked, &body).await;
            let expected = json!({"limit": limit, "reserved": 40, "cost": cost.unwrap_or(0)});
            assert_eq!(settled, (200, expected), "{limit}, {key}");
            for process in [&one, &other] {
                let (status, again) = settle(process, asked, &body).await;
                assert_eq!(status, 404, "{limit}, {key}: {again}");
                assert_eq!(again["errors"][0]["pointer"], json!("#/reservation"));
            }
            if ["bucket", "window", "sliding"].contains(&limit) {
                is_charged(&redis, limit, key, 100 - left).await;
            }
            stands_at(&one, limit, key, left).await;
            // A look asks nobody: the other process knows of the key what it had to settle.
            if cost != Some(40) {
                stands_at(&other, limit, key, left).await;
            }
        }
    }
}

#[tokio::test]
async fn reservation_that_many_settle_at_once_is_settled_once() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (service(&text).await, service(&text).await);
    for limit in ["bucket", "exact-log", "alone"] {
        let body = json!({"limit": limit, "key": "k", "cost": 40});
        let reserved = reserve(&one, body).await;
        let body = json!({"reservation": reserved["reservation"], "cost": 30});
        let mut asked = tokio::task::JoinSet::new();
        for number in 0..32 {
            // A limit that each process counts alone has its reservations there.
            let elsewhere = number % 2 == 0 && limit != "alone";
            let process = if elsewhere { other.clone() } else { one.clone() };
            let body = body.clone();
            asked.spawn(async move { settle(&process, "POST /v1/commit", &body).await.0 });
        }
        let mut statuses = asked.join_all().await;
        statuses.sort_unstable();
        assert_eq!((statuses[0], statuses[1], statuses[31]), (200, 404, 404), "{limit}");
        stands_at(&one, limit, "k", 70).await;
    }
}

#[tokio::test]
async fn tokens_of_a_reservation_whose_time_is_over_stay_spent() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let service = service(&text).await;
    for limit in ["bucket", "exact-bucket", "alone"] {
        let body = json!({"limit": limit, "key": "k", "cost": 40, "ttl_ms": 1});
        let reserved = reserve(&service, body).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let body = json!({"reservation": reserved["reservation"]});
        assert_eq!(ask(&service, "POST /v1/refund", body).await.status, 404, "{limit}");
        stands_at(&service, limit, "k", 60).await;
    }
}

#[tokio::test]
async fn without_a_store_reservations_are_of_the_process_and_plans_hold() {
    let service = service(LIMITS).await;
    let body = json!({"limit": "exact-log", "key": "k", "cost": 150, "plan": "pro"});
    let reserved = reserve(&service, body).await;
    assert_eq!((&reserved["plan"], &reserved["remaining"]), (&json!("pro"), &json!(50)));
    let body = json!({"reservation": reserved["reservation"], "cost": 100});
    assert_eq!(ask(&service, "POST /v1/commit", body.clone()).await.status, 200);
    assert_eq!(ask(&service, "POST /v1/commit", body).await.status, 404);
    let body = json!({"limit": "exact-log", "key": "k", "cost": 0, "plan": "pro"});
    let stands = ask_with(None, &service, "POST /v1/check", &body).await.body;
    assert_eq!(stands["remaining"], json!(100), "{stands}");
    let none = json!({"reservation": "0".repeat(32)});
    assert_eq!(ask(&service, "POST /v1/refund", none).await.status, 404);
}

#[tokio::test]
async fn nothing_is_reserved_where_the_store_does_not_keep_it() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let service = service(&text).await;
    let body = json!({"limit": "bucket", "key": "k", "cost": 10});
    let reserved = reserve(&service, body.clone()).await;
    stands_at(&service, "bucket", "k", 90).await;
    redis.stop();
    let answer = ask(&service, "POST /v1/reserve", body).await;
    // Or the limit's outage policy denies it.
    let is_denied = answer.status == 200 && answer.body["allowed"] == json!(false);
    assert!(answer.status == 503 || is_denied, "{}", answer.body);
    let unsettled =
        ask(&service, "POST /v1/refund", json!({"reservation": reserved["reservation"]}));
    assert_eq!(unsettled.await.status, 503);
    // A limit of this process alone needs no store.
    let alone = reserve(&service, json!({"limit": "alone", "key": "k", "cost": 10})).await;
    let body = json!({"reservation": alone["reservation"]});
    assert_eq!(ask(&service, "POST /v1/refund", body).await.status, 200);
}

/// Each refused reservation took its tokens of what an outage policy gave, and was charged when the store was back.
#[tokio::test]
async fn reservation_that_is_refused_in_an_outage_takes_nothing_of_the_share() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let text = "[server]\ntoken = \"correct-horse-battery\"\n[limits.window]\nquota = \"100/s\"\n\
                algorithm = \"fixed-window\"\n[limits.bucket]\nquota = \"100/s\"\n[limits.exact]\n\
                quota = \"100/s\"\nmode = \"exact\"\n[store]\nmemory = true\n";
    let config = Config::from_toml(text).unwrap();
    let limiter = config.builder().store(store.clone()).clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    store.set_away(true);
    // Time passes only while a request waits.
    let asks = async |path: &'static str, limit: &str, key: &str, cost: u32| {
        let body = json!({"limit": limit, "key": key, "cost": cost});
        let mut asked = Box::pin(ask(&service, path, body));
        loop {
            tokio::select! {
                biased;
                answer = &mut asked => return answer,
                () = tokio::time::sleep(Duration::from_millis(2)) => clock.advance(Duration::from_millis(5)),
            }
        }
    };
    for _ in 0..60 {
        asks("POST /v1/check", "bucket", "first", 1).await;
        asks("POST /v1/check", "exact", "first", 1).await;
        clock.advance(Duration::from_millis(100));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for limit in ["window", "bucket", "exact"] {
        for _ in 0..3 {
            let answer = asks("POST /v1/reserve", limit, "refused", 1).await;
            assert_eq!(answer.status, 503, "{limit}: {}", answer.body);
        }
        let mut drained = [0, 0];
        for (drained, key) in drained.iter_mut().zip(["refused", "untouched"]) {
            while asks("POST /v1/check", limit, key, 1).await.body["allowed"] == json!(true) {
                *drained += 1;
            }
        }
        assert!(drained[0] >= drained[1] && drained[1] > 0, "{limit}: {drained:?}");
    }
}

#[tokio::test]
async fn settlement_whose_reply_is_lost_is_made_once() {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let ticking = clock.clone();
    tokio::spawn(async move {
        loop {
            ticking.advance(Duration::from_millis(1));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    let text = "[server]\ntoken = \"correct-horse-battery\"\n[limits.exact]\nquota = \"100/365d\"\n\
                mode = \"exact\"\nmax_wait = \"5s\"\n[store]\nmemory = true\n";
    let config = Config::from_toml(text).unwrap();
    let limiter = config.builder().store(store.clone()).clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let reserved = reserve(&service, json!({"limit": "exact", "key": "k", "cost": 40})).await;
    store.fail(Fault::ReplyLost);
    let before = clock.now();
    let body = json!({"reservation": reserved["reservation"], "cost": 10});
    let expected = json!({"limit": "exact", "reserved": 40, "cost": 10});
    assert_eq!(settle(&service, "POST /v1/commit", &body).await, (200, expected));
    assert!(clock.now().micros_since(before) >= 100_000, "it was asked again");
    assert_eq!(settle(&service, "POST /v1/commit", &body).await.0, 404);
    stands_at(&service, "exact", "k", 90).await;
}

/// The process that settled told the others that the key is under the limit's own quota.
#[tokio::test]
async fn reservation_of_a_plan_that_another_process_settles_leaves_the_key_under_it() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (service(&text).await, service(&text).await);
    let body = json!({"limit": "bucket", "key": "k", "cost": 150, "plan": "pro"});
    let reserved = reserve(&one, body).await;
    let body = json!({"reservation": reserved["reservation"], "cost": 10});
    assert_eq!(settle(&other, "POST /v1/commit", &body).await.0, 200);
    is_charged(&redis, "bucket", "k", 10).await;
    // Some syncs later too.
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let body = json!({"limit": "bucket", "key": "k", "cost": 0, "plan": "pro"});
        let stands = ask_with(None, &one, "POST /v1/check", &body).await.body;
        assert_eq!(stands["burst"], json!(200), "{stands}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let body = json!({"limit": "bucket", "key": "k", "cost": 180, "plan": "pro"});
    assert_eq!(ask_with(None, &one, "POST /v1/check", &body).await.body["allowed"], json!(true));
}

#[tokio::test]
async fn process_without_the_limit_leaves_a_reservation_to_others() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) =
        (service(&text).await, service(&text.replace("limits.bucket", "limits.b")).await);
    let reserved = reserve(&one, json!({"limit": "bucket", "key": "k", "cost": 40})).await;
    let body = json!({"reservation": reserved["reservation"], "cost": 10});
    let refused = ask(&other, "POST /v1/commit", body.clone()).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert_eq!(settle(&one, "POST /v1/commit", &body).await.0, 200);
    is_charged(&redis, "bucket", "k", 10).await;
}

#[tokio::test]
async fn denied_request_has_no_reservation_and_wrong_ones_are_problems() {
    let service = service(LIMITS).await;
    let of = |cost: u32| json!({"limit": "alone", "key": "k", "cost": cost});
    reserve(&service, of(100)).await;
    let denied = reserve(&service, of(1)).await;
    assert_eq!((&denied["allowed"], &denied["reservation"]), (&json!(false), &Value::Null));
    let (reserve, commit, refund) = ("POST /v1/reserve", "POST /v1/commit", "POST /v1/refund");
    let id = "0".repeat(32);
    let cases = [
        (reserve, json!({"limit": "aloen", "key": "k", "cost": 1}), 404, "#/limit"),
        (reserve, of(101), 422, "#/cost"),
        (reserve, json!({"limit": "alone", "key": "k"}), 422, "#"),
        (reserve, json!({"limit": "alone", "key": "k", "cost": 1, "plan": "x"}), 422, "#/plan"),
        (reserve, json!({"limit": "alone", "key": "k", "cost": 1, "ttl_ms": 0}), 422, "#/ttl_ms"),
        (
            reserve,
            json!({"limit": "alone", "key": "k", "cost": 1, "ttl_ms": 86_400_001}),
            422,
            "#/ttl_ms",
        ),
        (reserve, json!({"limit": "queue", "key": "k", "cost": 1}), 422, "#/limit"),
        (reserve, json!([of(1)]), 422, "#"),
        (commit, json!({"reservation": id}), 422, "#"),
        (commit, json!({"reservation": "x", "cost": 1}), 422, "#/reservation"),
        (commit, json!({"reservation": id, "cost": -1}), 422, "#/cost"),
        (refund, json!({"reservation": id, "cost": 1}), 422, "#/cost"),
        (refund, json!({"reservation": 5}), 422, "#/reservation"),
    ];
    for (asked, body, status, pointer) in cases {
        let answer = ask(&service, asked, body.clone()).await;
        assert_eq!(answer.status, status, "{asked} {body}: {}", answer.body);
        let shown = answer.body["errors"][0]["pointer"].as_str().unwrap_or_default();
        assert_eq!(shown, pointer, "{asked} {body}: {}", answer.body);
    }
    for asked in [reserve, commit, refund] {
        assert_eq!(ask_with(None, &service, asked, &of(1)).await.status, 401, "{asked}");
    }
}
