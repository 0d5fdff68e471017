//! Permits over HTTP: acquired from one process, and released at another.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "nodes hear of each other by the real clock")]

mod parts;

use std::time::{Duration, Instant};

use parts::RedisServer;
use parts::service::{SOON, ask, ask_with, service};
use parts::serving::{Server, file, post_with_token};
use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate::server::Service;
use tidegate::testing::{Fault, ManualClock, ScriptedStore};

const LIMITS: &str = r#"
max_nodes = 2

[server]
token = "correct-horse-battery"

[concurrency.jobs]
max = 2
max_wait = "5s"

[concurrency.alone]
max = 2
local = true
"#;

fn with_redis(redis: &RedisServer) -> String {
    format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url())
}

async fn acquire(service: &Service, body: &Value) -> Value {
    let answer = ask(service, "POST /v1/acquire", body.clone()).await;
    assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    assert_eq!(answer.body["allowed"], json!(!answer.body["permit"].is_null()), "{}", answer.body);
    answer.body
}

/// Releases, and asks again while the store does not answer in time.
async fn release(service: &Service, limit: &str, key: &str, acquired: &Value) -> (u16, Value) {
    let body = json!({"limit": limit, "key": key, "permit": acquired["permit"]});
    let deadline = Instant::now() + SOON;
    loop {
        let answer = ask(service, "POST /v1/release", body.clone()).await;
        if answer.status != 503 || Instant::now() > deadline {
            return (answer.status, answer.body);
        }
    }
}

#[tokio::test]
async fn permit_is_released_by_another_process_once_and_the_next_caller_gets_it() {
    let redis = RedisServer::start();
    let (one, other) = (service(&with_redis(&redis)).await, service(&with_redis(&redis)).await);
    let both = json!({"limit": "jobs", "key": "k", "cost": 2});
    for _ in 0..20 {
        let acquired = acquire(&one, &both).await;
        let expected = json!({"allowed": true, "limit": "jobs", "cost": 2, "max": 2, "permit": acquired["permit"]});
        assert_eq!(acquired, expected);
        let one_more = json!({"limit": "jobs", "key": "k"});
        for process in [&one, &other] {
            let denied = acquire(process, &one_more).await;
            assert_eq!(denied["permit"], Value::Null, "{denied}");
        }
        assert_eq!(release(&other, "jobs", "another", &acquired).await.0, 404, "of another key");
        let released = release(&other, "jobs", "k", &acquired).await;
        assert_eq!(released, (200, json!({"limit": "jobs", "cost": 2})));
        for process in [&one, &other] {
            let (status, again) = release(process, "jobs", "k", &acquired).await;
            assert_eq!((status, &again["errors"][0]["pointer"]), (404, &json!("#/permit")));
        }
    }
}

/// A message about another caller was under way when a permit was to be handed over, and it waited for the next renewal: with the
/// limit's own patience of 50 ms that was too late.
#[tokio::test]
async fn permit_is_handed_over_at_once_while_others_ask() {
    let redis = RedisServer::start();
    let text = with_redis(&redis).replace("max_wait = \"5s\"\n", "").replace("max = 2", "max = 1");
    let service = service(&text).await;
    let mut acquired_in_all = 0;
    for _ in 0..50 {
        let mut asked = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let service = service.clone();
            asked.spawn(async move {
                let body = json!({"limit": "jobs", "key": "k"});
                ask(&service, "POST /v1/acquire", body).await
            });
        }
        for answer in asked.join_all().await {
            assert_eq!(answer.status, 200, "{}", answer.body);
            if !answer.body["permit"].is_null() {
                acquired_in_all += 1;
                assert_eq!(release(&service, "jobs", "k", &answer.body).await.0, 200);
            }
        }
    }
    assert!(acquired_in_all > 25, "{acquired_in_all}");
}

#[tokio::test]
async fn permits_of_many_who_acquire_at_once_are_as_many_as_there_are() {
    let redis = RedisServer::start();
    let (one, other) = (service(&with_redis(&redis)).await, service(&with_redis(&redis)).await);
    for _ in 0..10 {
        let mut asked = tokio::task::JoinSet::new();
        for number in 0..32 {
            let process = if number % 2 == 0 { one.clone() } else { other.clone() };
            asked.spawn(
                async move { acquire(&process, &json!({"limit": "jobs", "key": "k"})).await },
            );
        }
        let acquired = asked.join_all().await;
        let held: Vec<&Value> = acquired.iter().filter(|it| !it["permit"].is_null()).collect();
        assert!(held.len() <= 2, "{held:?}");
        assert!(!held.is_empty(), "{acquired:?}");
        for permit in held {
            assert_eq!(release(&one, "jobs", "k", permit).await.0, 200, "{permit}");
        }
    }
}

#[tokio::test]
async fn caller_who_waits_gets_the_permit_that_another_process_releases() {
    let redis = RedisServer::start();
    let (one, other) = (service(&with_redis(&redis)).await, service(&with_redis(&redis)).await);
    let held = acquire(&one, &json!({"limit": "jobs", "key": "k", "cost": 2})).await;
    let began = Instant::now();
    let waits = json!({"limit": "jobs", "key": "k", "wait_ms": 100});
    assert_eq!(acquire(&other, &waits).await["permit"], Value::Null);
    assert!(began.elapsed() >= Duration::from_millis(90), "{:?}", began.elapsed());
    let waiting = {
        let other = other.clone();
        let waits = json!({"limit": "jobs", "key": "k", "wait_ms": 20_000});
        tokio::spawn(async move { acquire(&other, &waits).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    assert_eq!(release(&one, "jobs", "k", &held).await.0, 200);
    let acquired = waiting.await.unwrap();
    assert_eq!(release(&one, "jobs", "k", &acquired).await.0, 200, "{acquired}");
}

#[tokio::test]
async fn permit_comes_free_when_its_time_is_over_and_not_when_its_process_ends() {
    let redis = RedisServer::start();
    let (one, other) = (service(&with_redis(&redis)).await, service(&with_redis(&redis)).await);
    let short = json!({"limit": "jobs", "key": "k", "ttl_ms": 3000});
    let began = Instant::now();
    let acquired = acquire(&one, &short).await;
    acquire(&one, &json!({"limit": "jobs", "key": "k"})).await;
    drop(one);
    // Longer than the store keeps what a silent process holds.
    while began.elapsed() < Duration::from_millis(2800) {
        let denied = acquire(&other, &json!({"limit": "jobs", "key": "k"})).await;
        let is_late = began.elapsed() >= Duration::from_millis(2800);
        assert!(is_late || denied["permit"].is_null(), "{denied}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let waits = json!({"limit": "jobs", "key": "k", "wait_ms": 20_000});
    let next = acquire(&other, &waits).await;
    assert!(!next["permit"].is_null(), "{next}");
    assert_eq!(release(&other, "jobs", "k", &acquired).await.0, 404, "its time is over");
    let more = json!({"limit": "jobs", "key": "k"});
    assert_eq!(acquire(&other, &more).await["permit"], Value::Null, "the other has no end yet");
}

#[tokio::test]
async fn permits_of_a_limit_that_processes_do_not_share_are_held_and_end_there() {
    let redis = RedisServer::start();
    let with_store = service(&with_redis(&redis)).await;
    for (service, limit) in
        [(service(LIMITS).await, "jobs"), (service(LIMITS).await, "alone"), (with_store, "alone")]
    {
        let held = acquire(&service, &json!({"limit": limit, "key": "k"})).await;
        let short = json!({"limit": limit, "key": "k", "ttl_ms": 200});
        acquire(&service, &short).await;
        let more = json!({"limit": limit, "key": "k"});
        assert_eq!(acquire(&service, &more).await["permit"], Value::Null);
        let waits = json!({"limit": limit, "key": "k", "wait_ms": 20_000});
        let next = acquire(&service, &waits).await;
        assert!(!next["permit"].is_null(), "the time of one is over: {next}");
        assert_eq!(release(&service, limit, "another", &held).await.0, 404);
        assert_eq!(release(&service, limit, "k", &held).await.0, 200);
        assert_eq!(release(&service, limit, "k", &held).await.0, 404);
        assert_eq!(release(&service, limit, "k", &next).await.0, 200);
        let both = json!({"limit": limit, "key": "k", "cost": 2});
        assert!(!acquire(&service, &both).await["permit"].is_null(), "both are free");
    }
}

/// A service, and its store that a test scripts. Their clock goes as the real one does, or more slowly.
fn scripted() -> (Service, ScriptedStore) {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let ticking = clock.clone();
    tokio::spawn(async move {
        loop {
            ticking.advance(Duration::from_millis(1));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    let text = format!("{LIMITS}[store]\nmemory = true\n");
    let config = Config::from_toml(&text).unwrap();
    let limiter = config.builder().store(store.clone()).clock(&clock).build().unwrap();
    (Service::new(config, limiter).unwrap(), store)
}

/// It was told that it is denied.
#[tokio::test]
async fn caller_who_waits_while_the_store_is_away_is_not_said_to_be_denied() {
    let (service, store) = scripted();
    let waits = |limit: &str| json!({"limit": limit, "key": "k", "wait_ms": 200});
    for limit in ["jobs", "alone"] {
        let held = acquire(&service, &json!({"limit": limit, "key": "k", "cost": 2})).await;
        assert!(!held["permit"].is_null(), "{held}");
        assert_eq!(acquire(&service, &waits(limit)).await["permit"], Value::Null);
    }
    store.set_away(true);
    let away = ask(&service, "POST /v1/acquire", waits("jobs")).await;
    assert_eq!(away.status, 503, "{}", away.body);
    let detail = away.body["detail"].as_str().unwrap();
    assert!(detail.contains("the store does not answer"), "{detail}");
    assert_eq!(acquire(&service, &waits("alone")).await["permit"], Value::Null);
}

#[tokio::test]
async fn nothing_is_acquired_where_the_store_does_not_keep_it_and_nothing_stays_taken() {
    let (service, store) = scripted();
    store.set_round_trip(Duration::from_millis(40));
    let both = json!({"limit": "jobs", "key": "k", "cost": 2});
    for fault in [Fault::RequestLost, Fault::ReplyLost] {
        // The first message asks for permits, the second has the store keep them: it takes 20 ms until a fault happens to it.
        let asked_before = store.questions();
        let asking = {
            let (service, both) = (service.clone(), both.clone());
            tokio::spawn(async move { ask(&service, "POST /v1/acquire", both).await })
        };
        while store.questions() < asked_before + 2 {
            assert!(!asking.is_finished());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        store.fail(fault);
        assert_eq!(asking.await.unwrap().status, 503, "{fault:?}");
        // What the store kept all the same is given back.
        let deadline = Instant::now() + SOON;
        let acquired = loop {
            let acquired = acquire(&service, &both).await;
            if !acquired["permit"].is_null() {
                break acquired;
            }
            assert!(Instant::now() < deadline, "{fault:?}: they stay taken");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert_eq!(release(&service, "jobs", "k", &acquired).await.0, 200);
    }
}

/// The commands that docs/REDIS.md names.
const COMMANDS: &str = "+evalsha +eval +time +get +getrange +mget +type +set +setrange +zadd +zrem +zcard +zremrangebyscore \
                        +pexpire +hello +pttl";

#[tokio::test]
async fn user_of_redis_with_the_commands_of_the_documents_holds_permits_and_without_one_of_them_none_stays_taken()
 {
    let redis = RedisServer::start();
    let user = ["ACL", "SETUSER", "me", "on", ">pw", "~tg2:{tidegate/*", "-@all"];
    redis.command(&user.into_iter().chain(COMMANDS.split_whitespace()).collect::<Vec<_>>());
    let text = with_redis(&redis).replace("redis://", "redis://me:pw@");
    let service = service(&text).await;
    let both = json!({"limit": "jobs", "key": "k", "cost": 2});
    let held = acquire(&service, &both).await;
    assert_eq!(release(&service, "jobs", "k", &held).await.0, 200);
    redis.command(&["ACL", "SETUSER", "me", "-pttl"]);
    assert_eq!(ask(&service, "POST /v1/acquire", both.clone()).await.status, 503);
    assert_eq!(redis.command(&["EXISTS", "tg2:{tidegate/cc:jobs:k}:timed"]), "0");
    redis.command(&["ACL", "SETUSER", "me", "+pttl"]);
    let deadline = Instant::now() + SOON;
    while acquire(&service, &both).await["permit"].is_null() {
        assert!(Instant::now() < deadline, "they stay taken");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn process_that_holds_permits_ends_at_once_and_callers_who_wait_are_told() {
    let mut server = Server::start(Some(&file("permits-end", LIMITS)));
    let body = json!({"limit": "alone", "key": "k", "cost": 2});
    let held = server.ask_with_token("/v1/acquire", &body);
    assert!(held.json()["permit"].is_string(), "{held:?}");
    let address = server.address.clone();
    let waiting = std::thread::spawn(move || {
        let body = json!({"limit": "alone", "key": "k", "wait_ms": 60_000});
        post_with_token(&address, "/v1/acquire", &body).unwrap()
    });
    server.wait_until("a caller waits", |it| {
        let metrics = it.ask("GET", "/metrics", "").body;
        metrics.contains("tidegate_permit_waiting_callers{limit=\"alone\"} 1")
    });
    let began = Instant::now();
    server.signal("TERM");
    let waited = waiting.join().unwrap();
    assert_eq!(waited.status, 503, "{waited:?}");
    let (status, log) = server.ended();
    assert!(status.success(), "{status}: {log}");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn changed_concurrency_limits_are_refused_by_a_reload() {
    let service = service(LIMITS).await;
    let changed = Config::from_toml(&LIMITS.replace("max = 2", "max = 3")).unwrap();
    let refused = service.reload(changed).unwrap_err().to_string();
    assert!(refused.starts_with("concurrency is not changed while"), "{refused}");
    assert_eq!(service.reload(Config::from_toml(LIMITS).unwrap()), Ok(()));
}

#[tokio::test]
async fn wrong_requests_about_permits_are_problems_and_limits_are_listed() {
    let service = service(LIMITS).await;
    let (acquire, release) = ("POST /v1/acquire", "POST /v1/release");
    let of = |field: &str, value: Value| {
        let mut body = json!({"limit": "alone", "key": "k"});
        body[field] = value;
        body
    };
    let id = "0".repeat(32);
    let cases = [
        (acquire, of("limit", json!("job")), 404, "#/limit"),
        (acquire, of("cost", json!(0)), 422, "#/cost"),
        (acquire, of("cost", json!(3)), 422, "#/cost"),
        (acquire, of("cost", json!(1001)), 422, "#/cost"),
        (acquire, of("ttl_ms", json!(0)), 422, "#/ttl_ms"),
        (acquire, of("ttl_ms", json!(86_400_001)), 422, "#/ttl_ms"),
        (acquire, of("wait_ms", json!(60_001)), 422, "#/wait_ms"),
        (acquire, json!({"limit": "alone", "key": "k", "cost": 2, "wait_ms": 1}), 422, "#/wait_ms"),
        (acquire, of("plan", json!("pro")), 422, "#/plan"),
        (release, of("permit", json!("x")), 422, "#/permit"),
        (release, of("permit", json!(id)), 404, "#/permit"),
        (release, json!({"limit": "x", "key": "k", "permit": id}), 404, "#/limit"),
        (release, json!({"limit": "alone", "key": "k"}), 422, "#"),
    ];
    for (asked, body, status, pointer) in cases {
        let answer = ask(&service, asked, body.clone()).await;
        let told = (answer.status, answer.body["errors"][0]["pointer"].clone());
        assert_eq!(told, (status, json!(pointer)), "{asked} {body}: {}", answer.body);
        assert_eq!(ask_with(None, &service, asked, &body).await.status, 401);
    }
    let listed = ask_with(None, &service, "GET /v1/concurrency", &Value::Null).await;
    let expected = json!([
        {"name": "jobs", "max": 2, "local": true},
        {"name": "alone", "max": 2, "local": true},
    ]);
    assert_eq!((listed.status, listed.body), (200, expected), "no store: each is alone");
}
