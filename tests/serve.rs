//! `tidegate serve` as other programs meet it: a process, HTTP, signals, and a file that changes.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a process lives by the real clock")]

mod parts;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use parts::RedisServer;
use parts::serving::{SOON, Server, ask, file};
use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate::server::Service;
use tower::ServiceExt;

const LIMITS: &str = r#"
[limits.api]
quota = "5/d"
max_wait = "5s"

[limits.api.plans.pro]
quota = "50/d"

[limits.login]
algorithm = "sliding-log"
quota = "3/h"
mode = "exact"
max_wait = "5s"

[store]
memory = true
"#;

#[test]
fn service_without_a_file_has_the_documented_limit_and_says_what_to_try() {
    let server = Server::start(None);
    for part in ["limits: default", "this process counts alone", "curl -s http://127.0.0.1:"] {
        assert!(server.began.contains(part), "{part}: {}", server.began);
    }
    let answer = server.check(&json!({"limit": "default", "key": "user:42"}));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.head.contains("content-type: application/json"), "{answer:?}");
    let expected = json!({
        "allowed": true, "limit": "default", "cost": 1, "burst": 100, "remaining": 99,
        "retry_after_ms": 0, "reset_after_ms": 10, "sure": true,
    });
    assert_eq!(answer.json(), expected);
}

#[test]
fn checks_spend_by_limit_plan_and_key() {
    let server = Server::start(Some(&file("checks", LIMITS)));
    let pro =
        server.check(&json!({"limit": "api", "plan": "pro", "key": "acme", "cost": 40})).json();
    assert_eq!(
        (&pro["allowed"], &pro["plan"], &pro["remaining"]),
        (&json!(true), &json!("pro"), &json!(10))
    );
    for left in [2, 1, 0] {
        let login = server.check(&json!({"limit": "login", "key": "ann"})).json();
        assert_eq!(
            (&login["allowed"], &login["remaining"]),
            (&json!(true), &json!(left)),
            "{login}"
        );
    }
    let denied = server.check(&json!({"limit": "login", "key": "ann"})).json();
    assert_eq!(denied["allowed"], json!(false));
    let wait_ms = denied["retry_after_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait_ms), "{denied}");
}

#[test]
fn list_of_checks_is_decided_in_order_and_not_at_all_if_one_is_wrong() {
    let server = Server::start(Some(&file("list", LIMITS)));
    let api = |key: &str, cost: u32| json!({"limit": "api", "key": key, "cost": cost});
    let wrong = server.check(&json!([api("ann", 1), api("ann", 6)]));
    assert_eq!(
        (wrong.status, &wrong.json()["errors"][0]["pointer"]),
        (422, &json!("#/1/cost")),
        "{wrong:?}"
    );
    let answers =
        server.check(&json!([api("ann", 3), api("bob", 1), api("ann", 3), api("ann", 2)])).json();
    let allowed: Vec<&Value> =
        answers.as_array().unwrap().iter().map(|it| &it["allowed"]).collect();
    assert_eq!(allowed, [true, true, false, true], "{answers}");
    assert_eq!(server.check(&json!([])).json(), json!([]));
    let look = server.check(&api("ann", 0)).json();
    assert_eq!((&look["cost"], &look["remaining"]), (&json!(0), &json!(0)), "a look");
    let many: Vec<Value> = (0..1001).map(|key| api(&key.to_string(), 1)).collect();
    assert_eq!(server.check(&json!(many)).status, 413);
}

#[test]
fn request_that_is_to_fit_all_limits_spends_from_each_or_none() {
    let server = Server::start(Some(&file("all", LIMITS)));
    let ask = |body: &Value| server.ask("POST", "/v1/check-all", &body.to_string());
    let part =
        |limit: &str, key: &str, cost: u32| json!({"limit": limit, "key": key, "cost": cost});
    let both = json!([part("login", "ann", 1), part("api", "ann", 2)]);
    // The limit that denies, or else the one with the fewest tokens left.
    for (allowed, limit, remaining) in [(true, "login", 2), (true, "api", 1), (false, "api", 1)] {
        let answer = ask(&both).json();
        let told = (&answer["allowed"], &answer["limit"], &answer["remaining"]);
        assert_eq!(told, (&json!(allowed), &json!(limit), &json!(remaining)), "{answer}");
    }
    // Nothing was spent of the other one.
    let look = ask(&json!([part("login", "ann", 0)])).json();
    let told = (&look["limit"], &look["cost"], &look["remaining"]);
    assert_eq!(told, (&json!("login"), &json!(0), &json!(1)), "{look}");
    let many: Vec<Value> = (0..1001).map(|key| part("api", &key.to_string(), 1)).collect();
    for (body, status, pointer) in [
        (json!([]), 422, "#"),
        (part("api", "ann", 1), 422, "#"),
        (json!([part("api", "cy", 3), part("api", "cy", 3)]), 422, "#"),
        (json!([part("api", "cy", 1), part("api", "cy", 6)]), 422, "#/1/cost"),
        (json!([part("api", "cy", 1), part("ipa", "cy", 1)]), 404, "#/1/limit"),
        (json!(many), 413, ""),
    ] {
        let answer = ask(&body);
        let shown = answer.json()["errors"][0]["pointer"].clone();
        assert_eq!((answer.status, shown.as_str().unwrap_or_default()), (status, pointer));
    }
    assert_eq!(server.check(&part("api", "cy", 5)).json()["allowed"], json!(true), "nothing spent");
}

#[tokio::test]
async fn exact_limits_of_one_request_wait_together_no_longer_than_one_of_them() {
    // It takes connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let limit = |number: u32| {
        format!("[limits.l{number}]\nquota = \"5/h\"\nmode = \"exact\"\nmax_wait = \"1s\"\n")
    };
    let limits: String = (0..6).map(limit).collect();
    let text =
        format!("[store]\nredis = \"redis://127.0.0.1:{port}\"\ntimeout = \"10s\"\n{limits}");
    let config = Config::from_toml(&text).unwrap();
    let limiter = config.builder().build().unwrap();
    let router = Service::new(config, limiter).unwrap().router();
    let checks: Vec<Value> =
        (0..6).map(|number| json!({"limit": format!("l{number}"), "key": "a"})).collect();
    let request = Request::post("/v1/check-all").body(Body::from(json!(checks).to_string()));
    let asked = Instant::now();
    assert_eq!(router.oneshot(request.unwrap()).await.unwrap().status(), 200);
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
}

#[test]
fn wrong_requests_are_problems_that_name_the_place_in_the_body() {
    let server = Server::start(Some(&file("wrong", LIMITS)));
    let cases = [
        ("", 400, "#"),
        ("{", 400, "#"),
        (r#"{"limit": "api", "key": "a"} x"#, 400, ""),
        ("7", 422, "#"),
        (r#"{"limit": "api"}"#, 422, "#"),
        (r#"{"limit": "api", "key": "a", "csot": 2}"#, 422, "#/csot"),
        (r#"{"limit": "api", "key": 7}"#, 422, "#/key"),
        (r#"[["api", "a", 1, null]]"#, 422, "#/0"),
        (r#"{"limit": "api", "key": "a", "cost": -1}"#, 422, "#/cost"),
        (r#"{"limit": "api", "key": "a", "cost": 1.5}"#, 422, "#/cost"),
        (r#"{"limit": "api", "key": "a", "cost": 4294967296}"#, 422, "#/cost"),
        (r#"{"limit": "api", "key": "a", "cost": 6}"#, 422, "#/cost"),
        (r#"{"limit": "ipa", "key": "a"}"#, 404, "#/limit"),
        (r#"{"limit": "api", "key": "a", "plan": "por"}"#, 422, "#/plan"),
        (r#"[{"limit": "api", "key": "a"}, {"limit": "api", "key": []}]"#, 422, "#/1/key"),
    ];
    for (body, status, pointer) in cases {
        let answer = server.ask("POST", "/v1/check", body);
        let problem = answer.json();
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        assert!(
            answer.head.contains("content-type: application/problem+json"),
            "{body}: {answer:?}"
        );
        assert_eq!(problem["status"], json!(status), "{body}");
        let shown = problem["errors"][0]["pointer"].as_str().unwrap_or_default();
        assert_eq!(shown, pointer, "{body}: {problem}");
    }
    let detail = server.check(&json!({"limit": "ipa", "key": "a"})).json()["detail"].to_string();
    assert!(
        detail.contains("ipa") && detail.contains("api"),
        "it names those that there are: {detail}"
    );
    let cost =
        server.check(&json!({"limit": "api", "key": "a", "cost": 6})).json()["detail"].to_string();
    assert!(cost.contains('6') && cost.contains('5'), "it names value and maximum: {cost}");
    let large = " ".repeat(1024 * 1024 + 1);
    assert_eq!(server.ask("POST", "/v1/check", &large).status, 413);
    assert_eq!(server.ask("GET", "/v1/check", "").status, 405);
    assert_eq!(server.ask("GET", "/nothing", "").status, 404);
    // Nothing of all this was charged.
    let whole = r#"{"limit": "api", "key": "a", "cost": 1.0}"#;
    assert_eq!(server.ask("POST", "/v1/check", whole).json()["remaining"], json!(4));
}

#[test]
fn pages_show_limits_health_and_metrics() {
    let server = Server::start(Some(&file("pages", LIMITS)));
    let limits = server.ask("GET", "/v1/limits", "").json();
    let expected = json!([
        {
            "name": "api", "algorithm": "token-bucket", "mode": "hybrid", "quota": "5/d", "burst": 5,
            "plans": [{"name": "pro", "quota": "50/d", "burst": 50}],
        },
        {
            "name": "login", "algorithm": "sliding-log", "mode": "exact", "quota": "3/h", "burst": 3,
            "plans": [],
        },
    ]);
    assert_eq!(limits, expected);
    assert_eq!(server.ask("GET", "/health/live", "").status, 200);
    assert_eq!(server.ask("GET", "/health/ready", "").status, 200);
    server.check(&json!({"limit": "api", "key": "a"}));
    server.wait_until("counted", |server| {
        let metrics = server.ask("GET", "/metrics", "").body;
        metrics.contains("tidegate_decisions_total{") && metrics.contains("limit=\"api\"")
    });
}

/// A month was shown as 30 days, and no zone was.
#[tokio::test]
async fn page_of_limits_shows_months_as_they_are_configured_and_their_zone() {
    let file = "[limits.bill]\nalgorithm = \"fixed-window\"\nquota = \"1000/month\"\nzone = \"UTC\"\n[limits.bill.plans.big]\nquota = \"9000/month\"\n\
                [limits.day]\nalgorithm = \"fixed-window\"\nquota = \"30/30d\"";
    let shown = page_of(file, "/v1/limits").await;
    let quotas = |index: usize| (&shown[index]["quota"], &shown[index]["zone"]);
    assert_eq!(quotas(0), (&json!("1000/month"), &json!("UTC")));
    assert_eq!(quotas(1), (&json!("30/30d"), &Value::Null));
    let plan = json!({"name": "big", "quota": "9000/month", "burst": 9000, "zone": "UTC"});
    assert_eq!(shown[0]["plans"], json!([plan]));
}

/// What `GET /v1/openapi.json` says.
async fn description() -> Value {
    page_of("[limits.a]\nquota = \"5/s\"", "/v1/openapi.json").await
}

/// A page of a service with this configuration.
async fn page_of(file: &str, path: &str) -> Value {
    let config = Config::from_toml(file).unwrap();
    let limiter = config.builder().build().unwrap();
    let router = Service::new(config, limiter).unwrap().router();
    let request = Request::builder().uri(path).body(Body::empty()).unwrap();
    let body = router.oneshot(request).await.unwrap().into_body().collect().await.unwrap();
    serde_json::from_slice(&body.to_bytes()).unwrap()
}

/// Each page of docs/SERVICE.md under /v1 is described, and nothing else.
#[tokio::test]
async fn description_has_the_pages_and_the_token() {
    let described = description().await;
    let mut pages: Vec<String> = Vec::new();
    for (path, methods) in described["paths"].as_object().unwrap() {
        for (method, page) in methods.as_object().unwrap() {
            let lock = if page["security"].is_null() { "" } else { " with the token" };
            pages.push(format!("{} {path}{lock}", method.to_uppercase()));
        }
    }
    pages.sort();
    let of_limit = |asked: &str| {
        let (method, page) = asked.split_once(' ').unwrap();
        format!("{method} /v1/limits/{{limit}}/{page} with the token")
    };
    let mut expected: Vec<String> = [
        "GET keys",
        "DELETE keys",
        "PUT overrides",
        "DELETE overrides",
        "PUT switch",
        "DELETE switch",
    ]
    .map(of_limit)
    .to_vec();
    let open = ["GET /v1/limits", "GET /v1/concurrency", "POST /v1/check", "POST /v1/check-all"];
    expected.extend(open.map(String::from));
    let of_records = ["reserve", "commit", "refund", "acquire", "release"];
    expected.extend(of_records.map(|page| format!("POST /v1/{page} with the token")));
    expected.sort();
    assert_eq!(pages, expected);
}

/// Two of them were `list`, of which generators of clients make one function.
#[tokio::test]
async fn each_operation_of_the_description_has_an_id_of_its_own_and_links_name_those() {
    let described = description().await;
    let pages = described["paths"].as_object().unwrap().values();
    let operations: Vec<&Value> = pages.flat_map(|it| it.as_object().unwrap().values()).collect();
    let ids = operations.iter().map(|operation| operation["operationId"].as_str().unwrap());
    let each: BTreeSet<&str> = ids.collect();
    assert_eq!(each.len(), operations.len(), "{each:?}");
    let mut linked = 0;
    for operation in operations {
        let Some(links) = operation["responses"]["200"]["links"].as_object() else { continue };
        for link in links.values() {
            assert!(each.contains(link["operationId"].as_str().unwrap()), "{link}");
            linked += 1;
        }
    }
    assert_eq!(linked, 3);
}

#[test]
fn service_whose_store_is_away_answers_and_is_not_ready() {
    let mut redis = RedisServer::start();
    let text = format!("[store]\nredis = \"{}\"\n[limits.api]\nquota = \"100/s\"\n", redis.url());
    redis.kill();
    let server = Server::start_with(Some(&file("away", &text)), true);
    let ready = server.ask("GET", "/health/ready", "");
    assert_eq!(ready.status, 503, "{ready:?}");
    assert!(ready.json()["detail"].as_str().unwrap().starts_with("not ready: "), "{ready:?}");
    assert_eq!(server.ask("GET", "/health/live", "").status, 200);
    assert_eq!(server.check(&json!({"limit": "api", "key": "a"})).json()["allowed"], json!(true));
}

/// How often the file was read anew, and taken or refused.
fn reloads(server: &Server, result: &str) -> u64 {
    let metrics = server.ask("GET", "/metrics", "").body;
    let line = format!("tidegate_config_reloads_total{{result=\"{result}\"}} ");
    let count = metrics.lines().find_map(|it| it.strip_prefix(&line));
    count.map_or(0, |count| count.parse().unwrap())
}

#[test]
fn changed_file_comes_into_force_and_a_broken_one_does_not() {
    let path = file("reload", LIMITS);
    let mut server = Server::start(Some(&path));
    let look = json!({"limit": "api", "key": "a", "cost": 0});
    let burst = |server: &Server| server.check(&look).json()["burst"].as_u64().unwrap();
    server.check(&json!({"limit": "api", "key": "a", "cost": 2}));
    fs::write(&path, LIMITS.replace("\"5/d\"", "\"8/d\"")).unwrap();
    server.wait_until("8 a day", |server| burst(server) == 8);
    server.wait_until("taken", |server| reloads(server, "taken") == 1);
    let left = server.check(&look).json()["remaining"].clone();
    assert_eq!(left, json!(3), "the key keeps what it has, and no more");
    server.signal("HUP");
    server.wait_until("read anew at the signal", |server| reloads(server, "taken") == 2);
    fs::write(&path, LIMITS.replace("quota = \"5/d\"", "qouta = \"5/d\"")).unwrap();
    server.wait_until("refused", |server| reloads(server, "refused") == 1);
    assert_eq!(burst(&server), 8, "the limits before stay in force");
    fs::write(&path, format!("max_nodes = 3\n{LIMITS}")).unwrap();
    server.wait_until("refused again", |server| reloads(server, "refused") == 2);
    fs::write(&path, format!("{LIMITS}\n[server]\ndrain = \"7s\"")).unwrap();
    server.wait_until("refused once more", |server| reloads(server, "refused") == 3);
    assert_eq!(burst(&server), 8);
    server.signal("TERM");
    let (status, log) = server.ended();
    assert!(status.success(), "{log}");
    let said = [
        "serve-reload.toml:3:1: limits.api.qouta",
        "did you mean \"quota\"?",
        "max_nodes is not changed while the service runs",
        "server.drain is not changed while the service runs",
    ];
    for part in said {
        assert!(log.contains(part), "{part}: {log}");
    }
}

/// The looks that were missed came one right after the other, and two of them saw the same half.
#[test]
fn half_of_a_file_that_is_written_when_a_stall_ends_is_not_taken_for_all_of_it() {
    let path = file("stall", LIMITS);
    let server = Server::start(Some(&path));
    server.signal("STOP");
    fs::write(&path, "[limits.api]\nquota = ").unwrap();
    // This is the stall: several looks are missed.
    std::thread::sleep(Duration::from_secs(3));
    server.signal("CONT");
    // Once it answers it has looked. The other half comes well within the second until it looks again.
    assert_eq!(reloads(&server, "refused"), 0, "somebody still writes");
    fs::write(&path, LIMITS.replace("\"5/d\"", "\"8/d\"")).unwrap();
    server.wait_until("taken", |server| reloads(server, "taken") == 1);
    assert_eq!(reloads(&server, "refused"), 0);
}

#[test]
fn each_field_of_the_service_that_a_reload_cannot_change_is_named() {
    let config = |fields: &str| {
        Config::from_toml(&format!("[limits.a]\nquota = \"1/s\"\n[server]\n{fields}")).unwrap()
    };
    let tls = |cert: &str, key: &str, ca: &str| {
        format!("tls_cert = \"{cert}\"\ntls_key = \"{key}\"\nclient_ca = \"{ca}\"")
    };
    let plain = tls("a", "b", "c");
    for (before, after, field) in [
        ("", "http = \"127.0.0.1:1\"", "http"),
        ("", "grpc = \"127.0.0.1:1\"", "grpc"),
        ("", &plain, "tls_cert"),
        (&plain, &tls("x", "b", "c"), "tls_cert"),
        (&plain, &tls("a", "x", "c"), "tls_key"),
        (&plain, &tls("a", "b", "x"), "client_ca"),
        ("", "max_connections = 5", "max_connections"),
        ("", "head_timeout = \"3s\"", "head_timeout"),
        ("", "client_quota = \"5/s\"", "client_quota"),
        ("", "access_log = true", "access_log"),
        ("", "drain = \"7s\"", "drain"),
        ("", "ratelimit_metrics = true", "ratelimit_metrics"),
        (
            "ratelimit_metrics = true",
            "ratelimit_metrics = true\nnear_limit_ratio = 0.5",
            "near_limit_ratio",
        ),
    ] {
        let named = config(before).fixed_field_that_differs(&config(after));
        assert_eq!(named, Some(&*format!("server.{field}")), "{after}");
    }
    for changeable in
        ["body_timeout = \"3s\"", "unknown_domain = \"deny\"", "shadow_domains = true"]
    {
        assert_eq!(config("").fixed_field_that_differs(&config(changeable)), None);
    }
}

/// A changed password is a changed store, though nobody is shown it.
#[test]
fn file_with_another_password_of_the_store_is_refused() {
    let config = |password: &str| {
        let text = format!(
            "[store]\nredis = \"redis://127.0.0.1:1\"\npassword = \"{password}\"\n[limits.a]\nquota = \"1/s\""
        );
        Config::from_toml(&text).unwrap()
    };
    assert_eq!(config("swordfish").fixed_field_that_differs(&config("swordfish")), None);
    assert_eq!(config("swordfish").fixed_field_that_differs(&config("sailfish")), Some("store"));
    assert!(!format!("{:?}", config("swordfish")).contains("swordfish"));
}

#[tokio::test]
async fn service_that_refuses_checks_is_not_ready_and_charges_nothing() {
    let config = Config::from_toml("[limits.a]\nquota = \"5/s\"").unwrap();
    let limiter = config.builder().build().unwrap();
    let service = Service::new(config, limiter.clone()).unwrap();
    let status = async |method: &str, path: &str| {
        let body = Body::from(r#"{"limit": "a", "key": "k"}"#);
        let request = Request::builder().method(method).uri(path).body(body).unwrap();
        service.router().oneshot(request).await.unwrap().status().as_u16()
    };
    assert_eq!(status("POST", "/v1/check").await, 200);
    assert_eq!(status("GET", "/health/ready").await, 200);
    service.refuse_checks();
    assert_eq!(status("POST", "/v1/check").await, 503);
    assert_eq!(status("GET", "/health/ready").await, 503);
    assert_eq!(limiter.limit("a").unwrap().check_n("k", 0).unwrap().remaining(), 4);
}

#[test]
fn request_whose_body_does_not_come_is_answered_in_time_and_logged() {
    let text =
        "[server]\nbody_timeout = \"100ms\"\naccess_log = true\n[limits.a]\nquota = \"5/s\"\n";
    let mut server = Server::start(Some(&file("slow", text)));
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    write!(stream, "POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{{").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("application/problem+json"), "{answer}");
    assert_eq!(server.ask("GET", "/v1/limits?key=secret", "").status, 200);
    assert_eq!(server.ask("GET", "/metrics", "").status, 200);
    server.signal("TERM");
    let (_, log) = server.ended();
    for part in ["POST /v1/check 408 ", "GET /v1/limits 200 ", "GET /metrics 200 "] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert!(!log.contains("secret"), "{log}");
}

/// Sends requests until it is dropped, each over a connection of its own.
struct Load<'a> {
    address: &'a str,
    body: &'a str,
    allowed: AtomicU64,
    /// Answers that were begun and not ended.
    broken: AtomicU64,
    is_over: AtomicBool,
}

impl Load<'_> {
    fn send(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            match ask(self.address, "POST", "/v1/check", self.body) {
                Ok(answer) => {
                    let is_allowed =
                        answer.status == 200 && answer.json()["allowed"] == json!(true);
                    self.allowed.fetch_add(is_allowed.into(), Ordering::Relaxed);
                }
                // It takes no more connections. What it took it answers.
                Err(error) => {
                    let is_begun = error.to_string().starts_with("not whole: \"HTTP");
                    self.broken.fetch_add(is_begun.into(), Ordering::Relaxed);
                }
            }
        }
    }
}

/// Ends a load, whatever happens.
struct EndOf<'a>(&'a AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two processes share a limit with hardly any refill. One is told to end under load; what it answered, and what the other answers
/// then, is the burst.
#[test]
fn service_that_is_told_to_end_loses_no_answered_request_and_no_count() {
    const BURST: u64 = 5_000;
    let redis = RedisServer::start();
    let text = format!(
        "[store]\nredis = \"{}\"\n[limits.api]\nquota = \"20/d\"\nburst = {BURST}\nstrict = true\n",
        redis.url()
    );
    let path = file("end", &text);
    let (mut ends, stays) = (Server::start(Some(&path)), Server::start(Some(&path)));
    let (address, body) = (ends.address.clone(), json!({"limit": "api", "key": "a"}).to_string());
    let load = Load {
        address: &address,
        body: &body,
        allowed: AtomicU64::new(0),
        broken: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    };
    let (status, log) = std::thread::scope(|scope| {
        let _end = EndOf(&load.is_over);
        for _ in 0..4 {
            scope.spawn(|| load.send());
        }
        let deadline = Instant::now() + SOON;
        while load.allowed.load(Ordering::Relaxed) < 300 {
            assert!(Instant::now() < deadline, "no load");
            std::thread::sleep(Duration::from_millis(5));
        }
        ends.signal("TERM");
        ends.ended()
    });
    assert!(status.success(), "{log}");
    assert!(log.contains("what was spent is reported"), "{log}");
    assert_eq!(load.broken.load(Ordering::Relaxed), 0);
    let (answered, mut by_other) = (load.allowed.load(Ordering::Relaxed), 0);
    let many: Vec<Value> = (0..100).map(|_| json!({"limit": "api", "key": "a"})).collect();
    let deadline = Instant::now() + SOON;
    // The other one does not ask for the last tokens at once.
    while answered + by_other < BURST && Instant::now() < deadline {
        let answers = stays.check(&json!(many)).json();
        let is_allowed = |answer: &&Value| answer["allowed"] == json!(true);
        by_other += answers.as_array().unwrap().iter().filter(is_allowed).count() as u64;
    }
    // In twenty seconds no token flows in.
    assert_eq!(answered + by_other, BURST, "{answered} by the one that ended");
    let denied = stays.check(&json!({"limit": "api", "key": "a"})).json();
    assert_eq!(denied["allowed"], json!(false), "{denied}");
}

#[test]
fn service_that_cannot_begin_says_why() {
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = busy.local_addr().unwrap().to_string();
    let wrong_server =
        file("server", "[limits.a]\nquota = \"1/s\"\n[server]\nhttp = \"8080\"\ndrain = \"1h\"\n");
    let missing = PathBuf::from("/nowhere/tidegate.toml");
    let cases: [(&[&str], i32, &str); 3] = [
        (&["--http", &address], 1, "give another address by --http"),
        (&[wrong_server.to_str().unwrap()], 2, "server.drain = \"1h\": must be at most 5min"),
        (&[missing.to_str().unwrap()], 1, "/nowhere/tidegate.toml"),
    ];
    for (arguments, code, said) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg("serve")
            .args(arguments)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(said), "{said}: {error}");
    }
}
