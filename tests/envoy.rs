//! Envoy's rate limit service: configurations of envoyproxy/ratelimit are converted, loaded and asked.
//!
//! What each row expects is what that service answers, read off its documentation and its own code, with
//! `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT=true`: a request that is denied charges nothing.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "nodes hear of each other by the real clock")]

mod parts;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::Request;
use parts::RedisServer;
use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate::server::Service;
use tidegate::testing::{ManualClock, ScriptedStore};
use tower::ServiceExt;

/// A file that is removed when this is dropped.
struct TempFile(PathBuf);

impl TempFile {
    fn new(text: &str) -> Self {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("tidegate-envoy-{}-{number}.yaml", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn convert(files: &[&str], flags: &[&str]) -> Output {
    let files: Vec<TempFile> = files.iter().map(|text| TempFile::new(text)).collect();
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .arg("convert")
        .args(files.iter().map(|file| &file.0))
        .args(flags)
        .output()
        .unwrap()
}

/// The configuration as it is converted.
fn converted(files: &[&str], flags: &[&str]) -> String {
    let output = convert(files, flags);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// What a conversion says that is refused.
fn refused(files: &[&str], flags: &[&str]) -> String {
    let output = convert(files, flags);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    said
}

/// Many calls with what the last of them is answered.
///
/// A call is `domain (key,value)(key,value) & (key,value)`, and an answer `OK 4 & OVER 0`: for each descriptor its code and what
/// is left, or `none` without a limit.
type Step = (u32, &'static str, &'static str);

fn body(call: &str) -> Value {
    let (domain, descriptors) = call.split_once(' ').unwrap();
    let descriptor = |text: &str| {
        let entries = text.trim().trim_start_matches('(').trim_end_matches(')').split(")(");
        let entries = entries.map(|entry| {
            let (key, value) = entry.split_once(',').unwrap();
            json!({"key": key, "value": value})
        });
        json!({"entries": entries.collect::<Vec<_>>()})
    };
    let descriptors: Vec<Value> = descriptors.split('&').map(descriptor).collect();
    json!({"domain": domain, "descriptors": descriptors})
}

fn shown(answer: &Value) -> String {
    let status = |status: &Value| {
        let code = if status["code"] == "OVER_LIMIT" { "OVER" } else { "OK" };
        let left = status["limitRemaining"].as_u64().unwrap_or(0);
        if status["currentLimit"].is_null() && left == 0 && code == "OK" {
            return "none".to_owned();
        }
        format!("{code} {left}")
    };
    let statuses = answer["statuses"].as_array().unwrap_or_else(|| panic!("{answer}"));
    statuses.iter().map(status).collect::<Vec<_>>().join(" & ")
}

/// A service on a clock that stands still.
fn service(toml: &str) -> Service {
    let config = Config::from_toml(toml).unwrap_or_else(|error| panic!("{error}\n{toml}"));
    let limiter = config.builder().clock(&ManualClock::new()).build().unwrap();
    Service::new(config, limiter).unwrap()
}

async fn ask(service: &Service, body: &Value) -> (u16, Value) {
    let request = Request::post("/json").body(Body::from(body.to_string())).unwrap();
    let response = service.router().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

async fn play(name: &str, toml: &str, steps: &[Step]) {
    let service = service(toml);
    for (times, call, expected) in steps {
        let mut answer = (0, Value::Null);
        for time in 1..=*times {
            answer = ask(&service, &body(call)).await;
            assert!(time == *times || answer.0 == 200, "{name}: {call}: {time}: {answer:?}");
        }
        assert_eq!(shown(&answer.1), *expected, "{name}: {call}: {}", answer.1);
        let is_over = expected.contains("OVER");
        assert_eq!(answer.0, if is_over { 429 } else { 200 }, "{name}: {call}");
    }
}

/// The rows of the examples: name, file, steps.
const ROWS: &[(&str, &str, &[Step])] = &[
    (
        "1 values of one key",
        "domain: mongo_cps\ndescriptors:\n  - key: database\n    value: users\n    rate_limit: {unit: second, requests_per_unit: 500}\n  - key: database\n    value: default\n    rate_limit: {unit: second, requests_per_unit: 500}\n",
        &[
            (500, "mongo_cps (database,users)", "OK 0"),
            (1, "mongo_cps (database,users)", "OVER 0"),
            (1, "mongo_cps (database,default)", "OK 499"),
            (1, "mongo_cps (database,other)", "none"),
            (1, "zz (database,users)", "none"),
        ],
    ),
    (
        "2 nested",
        MESSAGING,
        &[
            (5, "messaging (message_type,marketing)(to_number,1)", "OK 0"),
            (1, "messaging (message_type,marketing)(to_number,1)", "OVER 0"),
            (5, "messaging (message_type,marketing)(to_number,2)", "OK 0"),
            (100, "messaging (to_number,1)", "OK 0"),
            (1, "messaging (to_number,1)", "OVER 0"),
            (1, "messaging (message_type,marketing)", "none"),
            (1, "messaging (message_type,other)(to_number,1)", "none"),
        ],
    ),
    (
        "3 two descriptors in one call",
        MESSAGING,
        &[
            (5, "messaging (message_type,marketing)(to_number,1) & (to_number,1)", "OK 0 & OK 95"),
            (
                1,
                "messaging (message_type,marketing)(to_number,1) & (to_number,1)",
                "OVER 0 & OK 95",
            ),
        ],
    ),
    (
        "4 a value that is denied",
        PER_IP,
        &[
            (10, "edge_proxy_per_ip (remote_address,50.0.0.1)", "OK 0"),
            (1, "edge_proxy_per_ip (remote_address,50.0.0.1)", "OVER 0"),
            (1, "edge_proxy_per_ip (remote_address,50.0.0.2)", "OK 9"),
            (1, "edge_proxy_per_ip (remote_address,50.0.0.5)", "OVER 0"),
        ],
    ),
    (
        "5 depth",
        "domain: example4\ndescriptors:\n  - key: key\n    value: value\n    rate_limit: {unit: second, requests_per_unit: 300}\n",
        &[
            (1, "example4 (key,value)(subkey,subvalue)", "none"),
            (1, "example4 (key,value)", "OK 299"),
        ],
    ),
    (
        "6 depth",
        "domain: example4\ndescriptors:\n  - key: key\n    value: value\n    descriptors:\n      - key: subkey\n        rate_limit: {unit: second, requests_per_unit: 300}\n",
        &[
            (1, "example4 (key,value)(subkey,subvalue)", "OK 299"),
            (1, "example4 (key,value)", "none"),
            (1, "example4 (key,other)(subkey,x)", "none"),
            (1, "example4 (key,value)(subkey,subvalue)(third,x)", "none"),
            (1, "example4 (subkey,subvalue)(key,value)", "none"),
        ],
    ),
    (
        "7 unlimited",
        "domain: internal\ndescriptors:\n  - key: ldap\n    rate_limit: {unlimited: true}\n  - key: azure\n    rate_limit: {unit: minute, requests_per_unit: 100}\n",
        &[
            (1, "internal (ldap,x)", "OK 4294967295"),
            (1, "internal (azure,x)", "OK 99"),
            (1, "internal (zz,x)", "none"),
        ],
    ),
    (
        "8 shadow",
        "domain: example6\ndescriptors:\n  - key: service\n    descriptors:\n      - key: user\n        value: user-a\n        rate_limit: {unit: second, requests_per_unit: 10}\n        shadow_mode: true\n      - key: user\n        value: user-b\n        rate_limit: {unit: second, requests_per_unit: 20}\n",
        &[
            (10, "example6 (service,auth-service)(user,user-a)", "OK 0"),
            (30, "example6 (service,auth-service)(user,user-a)", "OK 0"),
            (20, "example6 (service,auth-service)(user,user-b)", "OK 0"),
            (1, "example6 (service,auth-service)(user,user-b)", "OVER 0"),
            (1, "example6 (service,auth-service)(user,user-c)", "none"),
            (1, "example6 (service,s2)(user,user-b)", "OK 19"),
        ],
    ),
    (
        "9 replaces",
        "domain: example7\ndescriptors:\n  - key: key_1\n    value: value_1\n    descriptors:\n      - key: user\n        value: bkthomps\n        rate_limit: {unit: second, requests_per_unit: 5, name: specific_limit}\n  - key: key_2\n    value: value_2\n    descriptors:\n      - key: user\n        value: bkthomps\n        rate_limit:\n          unit: second\n          requests_per_unit: 10\n          replaces:\n            - name: specific_limit\n",
        &[
            (4, "example7 (key_1,value_1)(user,bkthomps)", "OK 1"),
            (
                9,
                "example7 (key_1,value_1)(user,bkthomps) & (key_2,value_2)(user,bkthomps)",
                "none & OK 1",
            ),
            (
                1,
                "example7 (key_2,value_2)(user,bkthomps) & (key_1,value_1)(user,bkthomps)",
                "OK 0 & none",
            ),
            (
                1,
                "example7 (key_2,value_2)(user,bkthomps) & (key_1,value_1)(user,bkthomps)",
                "OVER 0 & none",
            ),
            (1, "example7 (key_2,value_2)(user,bkthomps)", "OVER 0"),
            (1, "example7 (key_1,value_1)(user,bkthomps)", "OK 0"),
            (1, "example7 (key_1,value_1)(user,bkthomps)", "OVER 0"),
        ],
    ),
    (
        "10 a value beside all values",
        "domain: example8\ndescriptors:\n  - key: key1\n    rate_limit: {unit: minute, requests_per_unit: 10}\n    detailed_metric: true\n  - key: key1\n    value: value1\n    rate_limit: {unit: minute, requests_per_unit: 20}\n",
        &[
            (1, "example8 (key1,a)", "OK 9"),
            (1, "example8 (key1,b)", "OK 9"),
            (1, "example8 (key1,value1)", "OK 19"),
        ],
    ),
    (
        "11 a wildcard at the end",
        "domain: example9\ndescriptors:\n  - key: key1\n    value: value*\n    rate_limit: {unit: minute, requests_per_unit: 20}\n",
        &[
            (1, "example9 (key1,value1)", "OK 19"),
            (1, "example9 (key1,value2)", "OK 19"),
            (1, "example9 (key1,valueXYZ)", "OK 19"),
            (1, "example9 (key1,value)", "OK 19"),
            (1, "example9 (key1,xvalue)", "none"),
            (1, "example9 (key1,valu)", "none"),
        ],
    ),
    (
        "12 a wildcard within",
        "domain: example9\ndescriptors:\n  - key: path\n    value: /api/*/action\n    rate_limit: {unit: minute, requests_per_unit: 20}\n",
        &[
            (1, "example9 (path,/api/123/action)", "OK 19"),
            (1, "example9 (path,/api/user-id/action)", "OK 19"),
            (1, "example9 (path,/api//action)", "OK 19"),
            (1, "example9 (path,/api/a/b/action)", "OK 19"),
            (1, "example9 (path,/api/123/other)", "none"),
            (1, "example9 (path,/api/action)", "none"),
        ],
    ),
    (
        "13 two wildcards",
        "domain: example9\ndescriptors:\n  - key: route\n    value: /api/*/resource/*/action\n    rate_limit: {unit: minute, requests_per_unit: 20}\n",
        &[
            (1, "example9 (route,/api/v1/resource/123/action)", "OK 19"),
            (1, "example9 (route,/api/v2/resource/456/action)", "OK 19"),
            (1, "example9 (route,/api/v1/resource/action)", "none"),
        ],
    ),
    (
        "14 three keys without values",
        "domain: example10\ndescriptors:\n  - key: route\n    value_to_metric: true\n    descriptors:\n      - key: http_method\n        value_to_metric: true\n        descriptors:\n          - key: subject_id\n            rate_limit: {unit: minute, requests_per_unit: 60}\n",
        &[
            (1, "example10 (route,api)(http_method,GET)(subject_id,123)", "OK 59"),
            (1, "example10 (route,web)(http_method,POST)(subject_id,456)", "OK 59"),
            (1, "example10 (route,api)(http_method,GET)(subject_id,123)", "OK 58"),
        ],
    ),
    (
        "15 a wildcard between",
        "domain: example10_wildcard\ndescriptors:\n  - key: user\n    value_to_metric: true\n    descriptors:\n      - key: action\n        value: read*\n        value_to_metric: true\n        descriptors:\n          - key: resource\n            rate_limit: {unit: minute, requests_per_unit: 100}\n",
        &[(1, "example10_wildcard (user,alice)(action,readfile)(resource,documents)", "OK 99")],
    ),
    (
        "16 values that share",
        "domain: example11\ndescriptors:\n  - key: files\n    value: files/*\n    rate_limit: {unit: hour, requests_per_unit: 10}\n    share_threshold: true\n  - key: files_no_share\n    value: files_no_share/*\n    rate_limit: {unit: hour, requests_per_unit: 10}\n",
        &[
            (5, "example11 (files,files/a.pdf)", "OK 5"),
            (5, "example11 (files,files/b.csv)", "OK 0"),
            (1, "example11 (files,files/c.txt)", "OVER 0"),
            (10, "example11 (files_no_share,files_no_share/a.pdf)", "OK 0"),
            (1, "example11 (files_no_share,files_no_share/a.pdf)", "OVER 0"),
            (1, "example11 (files_no_share,files_no_share/b.csv)", "OK 9"),
        ],
    ),
    (
        "17 values that share, with another key",
        "domain: example11_metrics\ndescriptors:\n  - key: route\n    value: api/*\n    share_threshold: true\n    value_to_metric: true\n    descriptors:\n      - key: method\n        rate_limit: {unit: minute, requests_per_unit: 60}\n",
        &[
            (1, "example11_metrics (route,api/v1)(method,GET)", "OK 59"),
            (1, "example11_metrics (route,api/v2)(method,GET)", "OK 58"),
        ],
    ),
    (
        "18 two limits in one call",
        "domain: rl\ndescriptors:\n  - key: one_per_day\n    rate_limit: {unit: minute, requests_per_unit: 1}\n  - key: two\n    rate_limit: {unit: minute, requests_per_unit: 2}\n",
        &[
            (1, "rl (one_per_day,something)", "OK 0"),
            (1, "rl (one_per_day,something) & (two,x)", "OVER 0 & OK 2"),
        ],
    ),
    (
        "23 precedence",
        "domain: d\ndescriptors:\n  - key: k\n    value: a*\n    rate_limit: {unit: hour, requests_per_unit: 1}\n  - key: k\n    value: ab*\n    rate_limit: {unit: hour, requests_per_unit: 2}\n  - key: k\n    value: abc\n    rate_limit: {unit: hour, requests_per_unit: 3}\n  - key: k\n    rate_limit: {unit: hour, requests_per_unit: 4}\n  - key: k\n    value: none\n",
        &[
            (1, "d (k,abc)", "OK 2"),
            (1, "d (k,abd)", "OK 0"),
            (1, "d (k,a)", "OK 0"),
            (1, "d (k,zz)", "OK 3"),
            (1, "d (k,)", "OK 3"),
            (1, "d (k,none)", "none"),
        ],
    ),
    (
        "24 no way back",
        "domain: d\ndescriptors:\n  - key: p\n    value: x\n    descriptors:\n      - key: m\n        value: GET\n        rate_limit: {unit: hour, requests_per_unit: 1}\n  - key: p\n    descriptors:\n      - key: m\n        rate_limit: {unit: hour, requests_per_unit: 2}\n",
        &[
            (1, "d (p,x)(m,GET)", "OK 0"),
            (1, "d (p,x)(m,POST)", "none"),
            (1, "d (p,y)(m,POST)", "OK 1"),
        ],
    ),
    (
        "25 a limit between",
        "domain: d\ndescriptors:\n  - key: p\n    rate_limit: {unit: hour, requests_per_unit: 7}\n    descriptors:\n      - key: m\n        rate_limit: {unit: hour, requests_per_unit: 2}\n",
        &[(1, "d (p,x)", "OK 6"), (1, "d (p,x)(m,1)", "OK 1"), (1, "d (p,x)(z,1)", "none")],
    ),
];

const MESSAGING: &str = "domain: messaging\ndescriptors:\n  - key: message_type\n    value: marketing\n    descriptors:\n      - key: to_number\n        rate_limit: {unit: day, requests_per_unit: 5}\n  - key: to_number\n    rate_limit: {unit: day, requests_per_unit: 100}\n";
const PER_IP: &str = "domain: edge_proxy_per_ip\ndescriptors:\n  - key: remote_address\n    rate_limit: {unit: second, requests_per_unit: 10}\n  - key: remote_address\n    value: 50.0.0.5\n    rate_limit: {unit: second, requests_per_unit: 0}\n";
const THREE_AN_HOUR: &str =
    "domain: d\ndescriptors:\n  - key: c\n    rate_limit: {unit: hour, requests_per_unit: 3}\n";

#[tokio::test]
async fn each_example_is_converted_and_decided_as_its_service_does() {
    for (name, yaml, steps) in ROWS {
        play(name, &converted(&[yaml], &[]), steps).await;
    }
}

#[tokio::test]
async fn files_of_one_domain_are_joined_only_when_told() {
    let more = "domain: edge_proxy_per_ip\ndescriptors:\n  - key: n\n    rate_limit: {unit: day, requests_per_unit: 1}\n";
    assert!(refused(&[PER_IP, more], &[]).contains("give --merge-domains"));
    let toml = converted(&[PER_IP, more], &["--merge-domains"]);
    play("19", &toml, &[(1, "edge_proxy_per_ip (n,1)", "OK 0")]).await;
    let again = "domain: edge_proxy_per_ip\ndescriptors:\n  - key: remote_address\n    descriptors:\n      - key: x\n";
    let said = refused(&[PER_IP, again], &["--merge-domains"]);
    assert!(said.contains("3: mistake: remote_address is in another file too"), "{said}");
}

#[tokio::test]
async fn all_domains_in_shadow_mode_deny_nothing_and_say_what_they_would() {
    let toml = format!("{}\n[server]\nshadow_domains = true\n", converted(&[THREE_AN_HOUR], &[]));
    let service = service(&toml);
    for expected in ["OK 2", "OK 1", "OK 0", "OVER 0"] {
        let (status, answer) = ask(&service, &body("d (c,x)")).await;
        assert_eq!((status, shown(&answer)), (200, expected.to_owned()), "{answer}");
        assert_eq!(answer["overallCode"], "OK");
    }
}

/// What is counted of an example: its row, calls, and lines of the metrics.
const METRICS: &[(&str, &[&str], &[&str])] = &[
    (
        "8 shadow",
        &["example6 (service,s)(user,user-a)"; 12],
        &[
            "total_hits{domain=\"example6\",key1=\"service\",key2=\"user_user-a\"} 12",
            "within_limit{domain=\"example6\",key1=\"service\",key2=\"user_user-a\"} 10",
            "near_limit{domain=\"example6\",key1=\"service\",key2=\"user_user-a\"} 2",
            "over_limit{domain=\"example6\",key1=\"service\",key2=\"user_user-a\"} 2",
            "shadow_mode{domain=\"example6\",key1=\"service\",key2=\"user_user-a\"} 2",
        ],
    ),
    (
        "10 ",
        &["example8 (key1,a)", "example8 (key1,b)", "example8 (key1,value1)"],
        &[
            "total_hits{domain=\"example8\",key1=\"key1_a\"} 1",
            "total_hits{domain=\"example8\",key1=\"key1_b\"} 1",
            "total_hits{domain=\"example8\",key1=\"key1_value1\"} 1",
        ],
    ),
    (
        "11 ",
        &["example9 (key1,value1)", "example9 (key1,value2)"],
        &["total_hits{domain=\"example9\",key1=\"key1_value*\"} 2"],
    ),
    (
        "14 ",
        &["example10 (route,api)(http_method,GET)(subject_id,123)"],
        &["total_hits{domain=\"example10\",key1=\"route_api\",key2=\"http_method_GET\"} 1"],
    ),
    (
        "15 ",
        &["example10_wildcard (user,alice)(action,readfile)(resource,documents)"],
        &[
            "total_hits{domain=\"example10_wildcard\",key1=\"user_alice\",key2=\"action_readfile\"} 1",
        ],
    ),
    (
        "17 ",
        &[
            "example11_metrics (route,api/v1)(method,GET)",
            "example11_metrics (route,api/v2)(method,GET)",
        ],
        &["total_hits{domain=\"example11_metrics\",key1=\"route_api/*\",key2=\"method\"} 2"],
    ),
];

#[tokio::test]
async fn metrics_have_the_names_that_users_of_the_converted_service_graph() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _installed = metrics::set_default_local_recorder(&recorder);
    for (row, calls, lines) in METRICS {
        let (name, yaml, _) = ROWS.iter().find(|(name, ..)| name.starts_with(row)).unwrap();
        let toml = converted(&[*yaml], &[]);
        let service = service(&format!("{toml}\n[server]\nratelimit_metrics = true\n"));
        for call in *calls {
            assert!(ask(&service, &body(call)).await.0 < 500, "{name}: {call}");
        }
        let told = handle.render();
        for line in *lines {
            let line = format!("\nratelimit_service_rate_limit_{line}\n");
            assert!(told.contains(&line), "{name}: {line}: {told}");
        }
        // Without the option nothing is counted.
        let counted = |told: &str| -> Vec<String> {
            told.lines().filter(|line| line.contains("ratelimit_")).map(str::to_owned).collect()
        };
        let without = self::service(&toml);
        ask(&without, &body(calls[0])).await;
        let (mut before, mut after) = (counted(&told), counted(&handle.render()));
        before.sort();
        after.sort();
        assert_eq!(after, before, "{name}");
    }
    let told = handle.render();
    for name in ["total_requests", "response_time_seconds_count"] {
        let line = format!("ratelimit_service_{name}{{grpc_method=\"ShouldRateLimit\"}} 21\n");
        assert!(told.contains(&line), "{line}: {told}");
    }
    // Row 20.
    assert!(!told.contains("global_shadow_mode"), "{told}");
    let options = "\n[server]\nratelimit_metrics = true\nshadow_domains = true\n";
    let service = service(&(converted(&[THREE_AN_HOUR], &[]) + options));
    for _ in 0..4 {
        assert_eq!(ask(&service, &body("d (c,x)")).await.0, 200);
    }
    assert!(handle.render().contains("\nratelimit_service_global_shadow_mode 1\n"));
}

#[tokio::test]
async fn hits_that_are_always_charged_are_near_their_limit_though_another_one_denies() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _installed = metrics::set_default_local_recorder(&recorder);
    let toml = "[server]\nratelimit_metrics = true\n[domains.e.always]\nquota = \"10/h\"\ncharge = \"always\"\n\
                [domains.e.other]\nquota = \"10/h\"\n[domains.e.never]\ndeny = true\n";
    let service = service(toml);
    for _ in 0..9 {
        assert_eq!(ask(&service, &body("e (other,x)")).await.0, 200);
    }
    for left in (0..10).rev() {
        let (status, answer) = ask(&service, &body("e (always,x) & (other,x) & (never,x)")).await;
        assert_eq!((status, shown(&answer)), (429, format!("OK {left} & OK 1 & OVER 0")));
    }
    let told = handle.render();
    // Of the other one the ninth hit alone is near: those that follow are not charged.
    for (name, key, hits) in [("near", "always", 2), ("near", "other", 1), ("within", "other", 19)]
    {
        let name = format!("ratelimit_service_rate_limit_{name}_limit");
        let line = format!("{name}{{domain=\"e\",key1=\"{key}\"}} {hits}\n");
        assert!(told.contains(&line), "{line}: {told}");
    }
}

#[tokio::test]
async fn header_fields_are_those_of_the_limit_with_the_fewest_left() {
    let toml = format!("{}\n[server]\nlimit_headers = true\n", converted(&[THREE_AN_HOUR], &[]));
    let service = service(&toml);
    for left in ["2", "1", "0", "0"] {
        let (_, answer) = ask(&service, &body("d (c,x)")).await;
        let headers = answer["responseHeadersToAdd"].as_array().unwrap();
        let named = |name: &str| {
            let header = headers.iter().find(|header| header["key"] == name).unwrap();
            header["value"].as_str().unwrap().to_owned()
        };
        assert_eq!(
            (named("RateLimit-Limit"), named("RateLimit-Remaining")),
            ("3".to_owned(), left.to_owned())
        );
        let reset: u64 = named("RateLimit-Reset").parse().unwrap();
        assert!((1..=3600).contains(&reset), "{reset}");
    }
    let (_, answer) = ask(&service, &body("d (z,x)")).await;
    assert!(answer["responseHeadersToAdd"].is_null(), "{answer}");
}

#[tokio::test]
async fn conversion_reports_fields_without_a_counterpart_and_writes_the_rest() {
    let yaml = "domain: quotas\ndescriptors:\n  - key: service\n    value: service_1\n    rate_limit: {unit: minute, requests_per_unit: 1}\n    quota_mode: true\n  - key: service\n    value: service_2\n    rate_limit: {unit: minute, requests_per_unit: 2, shadow_mode: true}\n    metadata: {a: b}\n";
    let output = convert(&[yaml], &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    for (line, note) in [
        (3, "quota_mode: has no counterpart"),
        (9, "shadow_mode: has no effect in a rate_limit"),
        (10, "metadata: has no counterpart"),
    ] {
        assert!(said.contains(&format!(":{line}: note: {note}")), "{note}: {said}");
    }
    let toml = String::from_utf8(output.stdout).unwrap();
    play("22", &toml, &[(1, "quotas (service,service_1)", "OK 0")]).await;
}

/// A file of one descriptor.
fn of(descriptor: &str) -> String {
    format!("domain: d\ndescriptors:\n  - {descriptor}\n")
}

fn are_refused(cases: &[(String, &str)]) {
    for (yaml, mistake) in cases {
        let said = refused(&[yaml], &[]);
        assert!(said.contains(mistake), "{yaml}: {said}");
    }
}

#[test]
fn files_that_the_service_rejects_are_refused_by_line() {
    are_refused(&[
        (String::new(), "1: mistake: the file is empty"),
        ("descriptors: []\n".to_owned(), "1: mistake: domain: is missing"),
        ("domain: [\n".to_owned(), "mistake: is no YAML"),
        ("- a\n".to_owned(), "1: mistake: a file must be a map"),
        (of("value: x"), "3: mistake: key: is missing"),
        (of("{key: k, rate_limits: 1}"), "3: mistake: rate_limits: is no field"),
        (of("{key: k, 5: 1}"), "3: mistake: a name of a field must be a text"),
        (of("x"), "3: mistake: a descriptor must be a map"),
        (of("{key: 1.5}"), "3: mistake: key: 1.5: put a number"),
    ]);
}

#[test]
fn limits_that_the_service_rejects_are_refused_by_line() {
    let limit = "rate_limit: {unit: day, requests_per_unit: 1}";
    are_refused(&[
        (of("{key: k, rate_limit: {requests_per_unit: 1}}"), "3: mistake: unit: is missing"),
        (
            of("{key: k, rate_limit: {unit: moon, requests_per_unit: 1}}"),
            "unit: moon: must be one of",
        ),
        (
            of("{key: k, rate_limit: {unit: day, unlimited: true}}"),
            "unit: is given beside unlimited",
        ),
        (
            of("{key: k, rate_limit: {unit: day, requests_per_unit: -1}}"),
            "requests_per_unit: -1: must",
        ),
        (
            of("{key: k, rate_limit: {unit: day, requests_per_unit: 010}}"),
            "requests_per_unit: 010: must",
        ),
        (
            of("{key: k, rate_limit: {unit: day, requests_per_unit: 4294967295}}"),
            "at most 1000000000 here",
        ),
        (of(&format!("{{key: k, {limit}}}\n  - {{key: k}}")), "4: mistake: k: is there twice"),
        (
            of(
                "{key: k, rate_limit: {unit: day, requests_per_unit: 1, name: a, replaces: [{name: a}]}}",
            ),
            "3: mistake: replaces: a: is its own name",
        ),
        (
            of("{key: k, rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: }]}}"),
            "3: mistake: replaces: an item has no name",
        ),
        (
            of(&format!("{{key: k, value: v, share_threshold: true, {limit}}}")),
            "share_threshold: is for",
        ),
    ]);
}

#[test]
fn files_whose_conversion_a_service_would_refuse_are_refused_by_line() {
    let odd = "domain: d\n# The second file\ndescriptors:\n  - key: a\n    rate_limit: {unit: day, requests_per_unit: 1}\n  \
               - key: odd\n    rate_limit: {unit: month, requests_per_unit: 1999}\n";
    // A node without a store keeps it.
    let alone = "[domains.d.k]\nquota = \"1999/30d\"\nalgorithm = \"fixed-window\"";
    assert!(Config::from_toml(alone).is_ok());
    let said = refused(&[THREE_AN_HOUR, odd], &["--merge-domains"]);
    let mistake = ":6: mistake: domains.d.odd.quota = \"1999/30d\": tokens and period have no common unit that leases can \
                   be counted in: choose rounder numbers, or give --mode exact or --mode local\n";
    assert!(said.contains(mistake) && said.contains("error: 1 mistake: "), "{said}");
    assert!(converted(&[odd], &["--mode", "exact"]).contains("1999/30d"));

    let many = of("{key: k, rate_limit: {unit: day, requests_per_unit: 100001}}");
    let said = refused(&[&many], &["--algorithm", "sliding-log"]);
    let mistake = ":3: mistake: domains.d.k.quota = \"100001/d\": a sliding log keeps each request, so it has at most \
                   100000 tokens: give --algorithm sliding-window\n";
    assert!(said.contains(mistake) && said.contains("error: 1 mistake: "), "{said}");

    let long = "k".repeat(20_000);
    let limit = "rate_limit: {unit: day, requests_per_unit: 1}";
    let large = (0..60).map(|key| format!("  - key: {long}{key}\n    {limit}\n"));
    let large = format!("domain: d\ndescriptors:\n{}", large.collect::<String>());
    let said = refused(&[&large], &[]);
    assert!(said.starts_with("mistake: the configuration has 12"), "{said}");
    assert!(said.contains("at most 1048576 are read: convert fewer files"), "{said}");
}

#[test]
fn scalars_are_taken_as_they_are_written_and_names_of_fields_are_keys_too() {
    let yaml = "domain: 5\ndescriptors:\n  - key: quota\n    value: yes\n    rate_limit: &a {unit: WEEK, requests_per_unit: 0x10}\n  - key: quota\n    value: ~\n    rate_limit: {unit: year, requests_per_unit: 7}\n  - key: \"a\\\"b\\n\"\n    value: 2026-01-01\n    rate_limit: {unit: month, requests_per_unit: 7}\n";
    assert!(refused(&[yaml], &[]).contains("0x10"));
    let toml = converted(
        &[&yaml.replace("0x10", "16")],
        &["--algorithm", "token-bucket", "--mode", "exact"],
    );
    let config = Config::from_toml(&toml).unwrap_or_else(|error| panic!("{error}\n{toml}"));
    let rules: Vec<String> =
        config.limits().iter().map(|limit| format!("{:?}", limit.rule())).collect();
    assert_eq!(rules.len(), 3, "{toml}");
    assert!(
        toml.contains("[domains.5.\"quota=yes\"]") && toml.contains("[domains.5.\"quota=\"]"),
        "{toml}"
    );
    assert!(toml.contains("quota = \"16/7d\"") && toml.contains("mode = \"exact\""), "{toml}");
}

#[tokio::test]
async fn costs_looks_and_requests_that_are_not_decided() {
    let toml = "[domains.d.c]\nquota = \"10/h\"\nalgorithm = \"fixed-window\"\n";
    let service = service(toml);
    let entry = json!({"entries": [{"key": "c", "value": "x"}]});
    let with = |descriptor: Value, hits: Value| json!({"domain": "d", "descriptors": [descriptor], "hits_addend": hits});
    let hits = |hits: Value| {
        let mut descriptor = entry.clone();
        descriptor["hitsAddend"] = hits;
        descriptor
    };
    let steps = [
        (with(entry.clone(), json!(4)), 200, "OK 6"),
        // A denial charges nothing.
        (with(entry.clone(), json!(7)), 429, "OVER 0"),
        (with(hits(json!(0)), json!(7)), 200, "OK 6"),
        (with(hits(json!("2")), json!(7)), 200, "OK 4"),
        // More than it ever admits.
        (with(entry.clone(), json!(11)), 429, "OVER 0"),
        (with(hits(json!(1_000_000_000_u64)), json!(1)), 429, "OVER 0"),
        // One key twice pays twice, and each tells what was left after it.
        (
            json!({"domain": "d", "descriptors": [entry, entry], "hitsAddend": 2}),
            200,
            "OK 2 & OK 0",
        ),
        (with(hits(json!(0)), json!(7)), 200, "OK 0"),
    ];
    for (body, status, expected) in steps {
        let answer = ask(&service, &body).await;
        assert_eq!((answer.0, &*shown(&answer.1)), (status, expected), "{body}: {}", answer.1);
    }
    for (body, status) in [
        (json!({"domain": "d", "descriptors": vec![entry.clone(); 1001]}), 400),
        (json!({"domain": "", "descriptors": [entry]}), 400),
        (json!({"domain": "d"}), 400),
        (json!({"domain": "d", "descriptor": []}), 422),
    ] {
        let answer = ask(&service, &body).await;
        assert_eq!(answer.0, status, "{body}: {}", answer.1);
    }
}

#[tokio::test]
async fn json_is_read_as_protobuf_maps_it_and_what_it_has_no_place_for_is_refused() {
    let service = service("[domains.d.c]\nquota = \"100/h\"\nalgorithm = \"fixed-window\"\n");
    let asked = |field: &str, value: &str| {
        let mut descriptor = json!({"entries": [{"key": "c", "value": "x"}]});
        let value: Value = serde_json::from_str(value).unwrap();
        let mut body = json!({"domain": "d"});
        match field.split_once('.') {
            Some(("descriptor", field)) => descriptor[field] = value,
            Some(("entry", field)) => descriptor["entries"][0][field] = value,
            _ => body[field] = value,
        }
        if body["descriptors"].is_null() && field != "descriptors" {
            body["descriptors"] = json!([descriptor]);
        }
        body
    };
    let taken = [
        ("hitsAddend", "2.0", "OK 98"),
        ("hitsAddend", "2e0", "OK 96"),
        ("hitsAddend", "\"2.0\"", "OK 94"),
        ("hitsAddend", "null", "OK 93"),
        ("descriptor.hitsAddend", "3.0", "OK 90"),
        ("descriptor.hitsAddend", "null", "OK 89"),
        ("descriptor.isNegativeHits", "null", "OK 88"),
        ("descriptor.limit", "null", "OK 87"),
        ("descriptor.limit", r#"{"requestsPerUnit": 50.0, "unit": 2}"#, "OK 49"),
    ];
    for (field, value, expected) in taken {
        let (status, answer) = ask(&service, &asked(field, value)).await;
        assert_eq!((status, &*shown(&answer)), (200, expected), "{field}: {value}: {answer}");
    }
    let refused = [
        ("hitsAddend", "1.5"),
        ("hitsAddend", "-1"),
        ("hitsAddend", "\"x\""),
        ("descriptors", r#"[[[["c", "x"]]]]"#),
        ("descriptors", r#"[{"entries": [["c", "x"]]}]"#),
        ("descriptor.limit", "[]"),
        ("descriptor.limit", "[50, 2]"),
        ("descriptor.limit", r#"{"requestsPerUnit": 50, "unit": "FORTNIGHT"}"#),
        ("entry.value", "1"),
    ];
    for (field, value) in refused {
        let (status, answer) = ask(&service, &asked(field, value)).await;
        assert_eq!(status, 422, "{field}: {value}: {answer}");
    }
    let (status, answer) =
        ask(&service, &json!(["d", [{"entries": [{"key": "c", "value": "x"}]}]])).await;
    assert_eq!(status, 422, "{answer}");
    // A text that is null is empty: then there is no domain.
    assert_eq!(ask(&service, &asked("domain", "null")).await.0, 400);
}

/// Descriptors of one hit are charged in the order of the request while there are tokens enough, those of two hits key by key.
#[tokio::test]
async fn key_that_comes_twice_in_a_request_pays_twice_or_nothing() {
    for hits in [1, 2] {
        let quota = |tokens: u32| format!("quota = \"{}/h\"\n", tokens * hits);
        let toml = format!("[domains.d.a]\n{}[domains.d.b]\n{}", quota(6), quota(20));
        let service = service(&toml);
        let entry = |key: &str| json!({"entries": [{"key": key, "value": "x"}]});
        let of = |keys: &[&str]| {
            let descriptors: Vec<Value> = keys.iter().map(|key| entry(key)).collect();
            json!({"domain": "d", "descriptors": descriptors, "hitsAddend": hits})
        };
        let steps: [(&[&str], &[u32]); 6] = [
            // Keys that are new.
            (&["a", "b"], &[5, 19]),
            (&["a", "b", "a"], &[4, 18, 3]),
            (&["a", "b", "a"], &[2, 17, 1]),
            // One is left, for the first of the two.
            (&["a", "b", "a"], &[]),
            (&["a", "a"], &[]),
            (&["a", "b"], &[0, 16]),
        ];
        for (step, (keys, left)) in steps.into_iter().enumerate() {
            let answer = ask(&service, &of(keys)).await;
            if left.is_empty() {
                assert_eq!(answer.0, 429, "{hits}, {step}: {}", answer.1);
                continue;
            }
            let left: Vec<String> = left.iter().map(|left| format!("OK {}", left * hits)).collect();
            let expected = (200, left.join(" & "));
            assert_eq!((answer.0, shown(&answer.1)), expected, "{hits}, {step}");
        }
    }
}

/// Both tell of a look before the charge: 12 of 10 were told once.
#[tokio::test]
async fn key_that_an_exact_limit_charges_in_full_twice_is_told_no_more_than_its_burst() {
    let toml = "[domains.d.c]\nquota = \"10/h\"\nmode = \"exact\"\ncharge = \"in-full\"\n";
    let clock = ManualClock::new();
    let config = Config::from_toml(toml).unwrap();
    let builder = config.builder().store(ScriptedStore::new(&clock)).clock(&clock);
    let service = Service::new(config, builder.build().unwrap()).unwrap();
    let mut twice = body("d (c,x) & (c,x)");
    twice["hitsAddend"] = json!(2);
    assert_eq!(shown(&ask(&service, &twice).await.1), "OK 10 & OK 10");
    assert_eq!(shown(&ask(&service, &twice).await.1), "OK 6 & OK 6");
}

/// A request of one descriptor of `domain`, with its own limit.
fn with_own_limit(domain: &str, value: &str, limit: &Value) -> Value {
    let entries = json!([{"key": "c", "value": value}]);
    json!({"domain": domain, "descriptors": [{"entries": entries, "limit": limit}]})
}

/// A step with a limit of the request's own: the entry's value, the limit, and the status with what is told.
type OwnStep = (&'static str, Value, u16, &'static str);

#[tokio::test]
async fn own_limit_of_a_request_holds_instead_of_the_configured_one() {
    let toml = "[domains.d.c]\nquota = \"1/h\"\nswitch = \"shadow\"\n\
                [domains.d.\"c=free\"]\nunlimited = true\n[domains.d.\"c=none\"]\n";
    let service = service(toml);
    let of = |requests: u64, unit: &str| json!({"requestsPerUnit": requests, "unit": unit});
    let steps: [OwnStep; 12] = [
        ("x", of(2, "MINUTE"), 200, "OK 1"),
        ("x", of(2, "MINUTE"), 200, "OK 0"),
        // No shadow mode of a rule applies.
        ("x", of(2, "MINUTE"), 429, "OVER 0"),
        ("free", of(1, "SECOND"), 200, "OK 0"),
        ("free", of(1, "SECOND"), 429, "OVER 0"),
        ("none", json!({"requests_per_unit": "1", "unit": 3}), 200, "OK 0"),
        ("zero", of(0, "DAY"), 429, "OVER 0"),
        ("year", of(1_000_000_000, "YEAR"), 200, "OK 999999999"),
        ("month", of(1, "MONTH"), 200, "OK 0"),
        ("second", of(1_000_003, "SECOND"), 200, "OK 1000002"),
        ("week", of(7, "WEEK"), 200, "OK 6"),
        ("day", of(1, "DAY"), 200, "OK 0"),
    ];
    for (value, limit, status, expected) in steps {
        let body = with_own_limit("d", value, &limit);
        let answer = ask(&service, &body).await;
        assert_eq!((answer.0, &*shown(&answer.1)), (status, expected), "{body}: {}", answer.1);
    }
    let current = ask(&service, &with_own_limit("d", "y", &of(9, "HOUR"))).await.1;
    let expected = json!({"requestsPerUnit": 9, "unit": "HOUR"});
    assert_eq!(current["statuses"][0]["currentLimit"], expected, "{current}");
    // Not in a domain that is not known; and what is no limit is none.
    let unknown = ask(&service, &with_own_limit("e", "x", &of(1, "HOUR"))).await;
    assert_eq!((unknown.0, &*shown(&unknown.1)), (200, "none"));
    for (limit, status) in [
        (json!({"requestsPerUnit": 1}), 400),
        (of(1, "UNKNOWN"), 400),
        (json!({"requestsPerUnit": 1, "unit": 7}), 400),
        (of(1_000_000_001, "HOUR"), 400),
        // Its units would be off by more than a thousandth.
        (of(999_999_999, "SECOND"), 400),
        (of(1, "FORTNIGHT"), 422),
        (json!({"requestsPerUnit": -1, "unit": "HOUR"}), 422),
        (json!({"requests": 1}), 422),
    ] {
        let answer = ask(&service, &with_own_limit("d", "z", &limit)).await;
        assert_eq!(answer.0, status, "{limit}: {}", answer.1);
    }
}

#[tokio::test]
async fn limits_of_requests_are_none_of_the_file_and_count_each_for_itself() {
    let toml = "[domains.d.c]\nquota = \"1/h\"\n";
    let clock = ManualClock::new();
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let of = |requests: u64, unit: &str| json!({"requestsPerUnit": requests, "unit": unit});
    let ask_for = |limit: Value| {
        let (service, body) = (&service, with_own_limit("d", "x", &limit));
        async move { ask(service, &body).await.0 }
    };
    // Another limit of the same entries, which fills sooner, does not fill this one.
    for status in [200, 200, 200, 429] {
        assert_eq!(ask_for(of(3, "DAY")).await, status);
    }
    assert_eq!(ask_for(of(10, "SECOND")).await, 200);
    clock.advance(Duration::from_secs(5));
    assert_eq!(ask_for(of(10, "SECOND")).await, 200);
    assert_eq!(ask_for(of(3, "DAY")).await, 429);
    // Nor can it be asked under another quota by its name.
    let body = json!({"limit": "limits-of-requests", "key": "x", "cost": 0}).to_string();
    let request = Request::post("/v1/check").body(Body::from(body)).unwrap();
    assert_eq!(service.router().oneshot(request).await.unwrap().status(), 404);
    assert!(format!("{service:?}").contains("limits-of-requests"));
    let request = Request::get("/v1/limits").body(Body::empty()).unwrap();
    let listed = service.router().oneshot(request).await.unwrap().into_body();
    let listed = String::from_utf8(to_bytes(listed, usize::MAX).await.unwrap().to_vec()).unwrap();
    assert!(listed.contains("d/c") && !listed.contains("limits-of-requests"), "{listed}");
    // What a rule replaces that does not apply is not replaced.
    let toml = "[domains.d.a]\nquota = \"5/h\"\nname = \"a\"\n\
                [domains.d.b]\nquota = \"5/h\"\nreplaces = \"a\"\n";
    let service = self::service(toml);
    let of = |key: &str| json!({"entries": [{"key": key, "value": "x"}]});
    let mut replacing = of("b");
    let both = json!({"domain": "d", "descriptors": [of("a"), replacing]});
    assert_eq!(shown(&ask(&service, &both).await.1), "none & OK 4");
    replacing["limit"] = json!({"requestsPerUnit": 9, "unit": "HOUR"});
    let both = json!({"domain": "d", "descriptors": [of("a"), replacing]});
    assert_eq!(shown(&ask(&service, &both).await.1), "OK 4 & OK 8");
}

#[test]
fn limit_of_a_file_cannot_have_the_name_of_those_that_requests_bring() {
    let limit = "[limits.limits-of-requests]\nquota = \"1/s\"\n";
    for domains in ["", "[domains.d.c]\nquota = \"1/s\"\n"] {
        let error = Config::from_toml(&format!("{limit}{domains}")).unwrap_err();
        let mistakes = error.mistakes().iter().map(|mistake| (mistake.line(), mistake.field()));
        let expected = [(1, "limits.limits-of-requests")];
        assert_eq!(mistakes.collect::<Vec<_>>(), expected, "{error}");
        assert!(error.to_string().contains("rename this one"), "{error}");
    }
}

#[tokio::test]
async fn own_limits_and_negative_hits_hold_for_all_processes() {
    let redis = RedisServer::start();
    let toml = "max_nodes = 2\n[domains.d.c]\nquota = \"10/d\"\nmax_wait = \"5s\"\n\
                [domains.d.log]\nquota = \"10/d\"\nalgorithm = \"sliding-log\"\nmax_wait = \"5s\"\n\
                [domains.d.exact]\nquota = \"10/d\"\nmode = \"exact\"\nmax_wait = \"5s\"\n";
    let toml = format!("{toml}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (parts::service::service(&toml).await, parts::service::service(&toml).await);
    let day = json!({"requestsPerUnit": 3, "unit": "DAY"});
    let own = with_own_limit("d", "x", &day);
    for (process, status, expected) in [
        (&one, 200, "OK 2"),
        (&other, 200, "OK 1"),
        (&one, 200, "OK 0"),
        (&other, 429, "OVER 0"),
        (&one, 429, "OVER 0"),
    ] {
        let answer = ask(process, &own).await;
        assert_eq!((answer.0, &*shown(&answer.1)), (status, expected), "{}", answer.1);
    }
    for key in ["c", "log", "exact"] {
        let of = |hits: u32, is_negative: bool| {
            let entries = json!([{"key": key, "value": "x"}]);
            json!({"domain": "d", "descriptors": [
                {"entries": entries, "hitsAddend": hits, "isNegativeHits": is_negative}]})
        };
        assert_eq!(ask(&one, &of(10, false)).await.0, 200, "{key}");
        assert_eq!(ask(&other, &of(1, false)).await.0, 429, "{key}");
        assert_eq!(ask(&other, &of(4, true)).await.0, 200, "{key}");
        let deadline = Instant::now() + parts::service::SOON;
        // The store hears of it with the next report.
        while ask(&one, &of(4, false)).await.0 != 200 {
            assert!(Instant::now() < deadline, "{key}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for process in [&one, &other] {
            assert_eq!(ask(process, &of(1, false)).await.0, 429, "{key}: no more went back");
        }
    }
}

#[tokio::test]
async fn negative_hits_go_back_as_far_as_hits_were_spent() {
    for (algorithm, goes_back) in [
        ("token-bucket", true),
        ("fixed-window", true),
        ("sliding-window", true),
        ("sliding-log", false),
        ("leaky-bucket", false),
    ] {
        let toml = format!("[domains.d.c]\nquota = \"10/h\"\nalgorithm = \"{algorithm}\"\n");
        let service = service(&toml);
        let of = |hits: u32, is_negative: bool| {
            let entries = json!([{"key": "c", "value": "x"}]);
            let descriptor =
                json!({"entries": entries, "hitsAddend": hits, "isNegativeHits": is_negative});
            json!({"domain": "d", "descriptors": [descriptor]})
        };
        if !goes_back {
            assert_eq!(ask(&service, &of(1, true)).await.0, 501, "{algorithm}");
            continue;
        }
        for (hits, is_negative, status, expected) in [
            (3, true, 200, "OK 10"),
            (7, false, 200, "OK 3"),
            (2, true, 200, "OK 5"),
            (0, true, 200, "OK 5"),
            (6, false, 429, "OVER 0"),
            (9, true, 200, "OK 10"),
            (10, false, 200, "OK 0"),
        ] {
            let answer = ask(&service, &of(hits, is_negative)).await;
            let told = (answer.0, shown(&answer.1));
            assert_eq!(told, (status, expected.to_owned()), "{algorithm}, {hits}: {}", answer.1);
        }
    }
}

#[tokio::test]
async fn negative_hits_of_a_sliding_window_are_at_most_those_of_the_present_one() {
    let toml = "[domains.d.c]\nquota = \"10/h\"\nalgorithm = \"sliding-window\"\n";
    let clock = ManualClock::new();
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let of = |hits: u32, is_negative: bool| {
        let entries = json!([{"key": "c", "value": "x"}]);
        let descriptor =
            json!({"entries": entries, "hitsAddend": hits, "isNegativeHits": is_negative});
        json!({"domain": "d", "descriptors": [descriptor]})
    };
    assert_eq!(ask(&service, &of(4, false)).await.0, 200);
    clock.advance(Duration::from_secs(3600));
    let before = shown(&ask(&service, &of(2, false)).await.1);
    let after = shown(&ask(&service, &of(5, true)).await.1);
    let left = |shown: &str| shown.strip_prefix("OK ").unwrap().parse::<u32>().unwrap();
    assert_eq!(left(&after), left(&before) + 2, "{before}, {after}");
}

#[tokio::test]
async fn descriptor_is_charged_despite_a_denial_only_with_charge_always() {
    let toml = "[domains.d.c]\nquota = \"2/h\"\n[domains.d.all]\nquota = \"9/h\"\ncharge = \"always\"\n[domains.d.rest]\nquota = \"9/h\"\n";
    let call = "d (c,x) & (all,x) & (rest,x)";
    play(
        "always",
        toml,
        &[
            (2, call, "OK 0 & OK 7 & OK 7"),
            (1, call, "OVER 0 & OK 6 & OK 7"),
            (1, call, "OVER 0 & OK 5 & OK 7"),
        ],
    )
    .await;
}

/// Envoy asks with no hits, and tells after the response what it cost (`apply_on_stream_done`), whatever is answered. What a
/// limit had not was never charged, so that each look was OK for ever.
#[tokio::test]
async fn costs_that_are_known_after_the_response_are_owed_where_the_descriptor_is_charged_in_full()
{
    let redis = RedisServer::start();
    for of_limit in [
        "algorithm = \"fixed-window\"\n",
        "algorithm = \"sliding-window\"\nmode = \"local\"\n",
        "algorithm = \"sliding-window\"\nmode = \"exact\"\n",
        "burst = 1000\nmode = \"exact\"\n",
        "burst = 1000\n",
    ] {
        for (charge, last) in [("in-full", "OVER 0"), ("always", "OK 200")] {
            // Whom its denial blocks is charged too.
            let toml = format!(
                "[domains.ai.user]\nquota = \"1000/366d\"\ncharge = \"{charge}\"\n{of_limit}block_for = \"1ms\"\n\
                 [store]\nredis = \"{}\"\nnamespace = \"{charge}-{}\"\n",
                redis.url(),
                of_limit.len()
            );
            let config = Config::from_toml(&toml).unwrap();
            let limiter = config.builder().build().unwrap();
            limiter.ready(Duration::from_secs(10)).await.unwrap();
            let service = Service::new(config, limiter).unwrap();
            let of = |hits: u32| {
                let entries = json!([{"key": "user", "value": "x"}]);
                json!({"domain": "ai", "descriptors": [{"entries": entries, "hitsAddend": hits}]})
            };
            let shows = async |expected: &str| {
                let latest = Instant::now() + Duration::from_secs(10);
                loop {
                    let look = shown(&ask(&service, &of(0)).await.1);
                    if look == expected || Instant::now() >= latest {
                        assert_eq!(look, expected, "{toml}");
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            assert!(shown(&ask(&service, &of(0)).await.1).starts_with("OK"), "{toml}");
            for expected in ["OK 600", "OK 200", last] {
                let _ = ask(&service, &of(400)).await;
                // Until the block is over.
                tokio::time::sleep(Duration::from_millis(20)).await;
                shows(expected).await;
            }
        }
    }
    for algorithm in ["leaky-bucket", "sliding-log"] {
        let toml = format!(
            "[domains.ai.user]\nquota = \"1000/366d\"\ncharge = \"in-full\"\nalgorithm = \"{algorithm}\"\n"
        );
        let refused = Config::from_toml(&toml).unwrap_err().to_string();
        assert!(refused.contains("cannot be \"in-full\" of a leaky bucket"), "{refused}");
    }
}

/// A key that a node had never been asked for was over its limit as soon as another one was, with a day until its reset.
#[tokio::test]
async fn descriptor_that_is_not_charged_is_over_only_if_that_is_known() {
    let toml = "[store]\nmemory = true\n[domains.d.a]\ndeny = true\n[domains.d.b]\nquota = \"100/d\"\n\
                [domains.d.q]\nquota = \"10/s\"\nalgorithm = \"leaky-bucket\"\nmode = \"local\"\n\
                [domains.d.l]\nquota = \"10/h\"\nmode = \"local\"\n";
    let service = service(toml);
    let (_, answer) = ask(&service, &body("d (a,x) & (b,new)")).await;
    assert_eq!(shown(&answer), "OVER 0 & none", "{answer}");
    let mut five_hits = body("d (a,x) & (q,new)");
    five_hits["hitsAddend"] = json!(5);
    let (_, answer) = ask(&service, &five_hits).await;
    assert!(shown(&answer).starts_with("OVER 0 & OK"), "{answer}");
    let mut many_hits = body("d (a,x) & (l,new)");
    many_hits["hitsAddend"] = json!(10);
    assert!(shown(&ask(&service, &many_hits).await.1).ends_with("& OK 10"));
    assert_eq!(shown(&ask(&service, &body("d (l,new)")).await.1), "OK 9");
    assert!(shown(&ask(&service, &many_hits).await.1).ends_with("& OVER 0"));
    let toml =
        "[store]\nmemory = true\n[domains.d.a]\nquota = \"1/h\"\n[domains.d.b]\nquota = \"1/h\"\n";
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().build().unwrap();
    limiter.ready(Duration::from_secs(10)).await.unwrap();
    let service = Service::new(config, limiter).unwrap();
    for expected in ["OK 0 & OK 0", "OVER 0 & OVER 0", "OVER 0 & OVER 0"] {
        assert_eq!(shown(&ask(&service, &body("d (a,x) & (b,x)")).await.1), expected);
    }
}

/// They told of a limit on trial, with fewer requests in all than were left.
#[tokio::test]
async fn limit_headers_tell_of_the_burst_and_of_no_limit_in_shadow_mode() {
    let toml = "[domains.d.c]\nquota = \"10/min\"\nburst = 100\n\
                [domains.d.trial]\nquota = \"1/h\"\nswitch = \"shadow\"\n[server]\nlimit_headers = true\n";
    let service = service(toml);
    for left in ["99", "98"] {
        let (_, answer) = ask(&service, &body("d (c,x) & (trial,x)")).await;
        let headers = answer["responseHeadersToAdd"].as_array().unwrap();
        let told: Vec<&str> =
            headers.iter().map(|header| header["value"].as_str().unwrap()).take(2).collect();
        assert_eq!(told, ["100", left], "{answer}");
    }
}

/// Who had left while the key was looked at was not charged.
#[tokio::test]
async fn caller_who_leaves_is_charged_in_full_all_the_same() {
    let toml = "[domains.d.c]\nquota = \"3/h\"\nmode = \"exact\"\ncharge = \"in-full\"\n\
                [domains.d.e]\nquota = \"9/h\"\nmode = \"exact\"\ncharge = \"in-full\"\n";
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().store(store.clone()).clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let of = |hits: u32| {
        let mut body = body("d (c,x) & (e,x)");
        for descriptor in body["descriptors"].as_array_mut().unwrap() {
            descriptor["hitsAddend"] = json!(hits);
        }
        body
    };
    store.set_round_trip(Duration::from_millis(20));
    let two_hits = of(2);
    let mut left = Box::pin(ask(&service, &two_hits));
    for _ in 0..20 {
        tokio::select! {
            biased;
            answer = &mut left => panic!("{answer:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(left);
    store.set_round_trip(Duration::ZERO);
    for _ in 0..20 {
        clock.advance(Duration::from_millis(5));
        tokio::task::yield_now().await;
    }
    assert_eq!(shown(&ask(&service, &of(0)).await.1), "OK 1 & OK 7");
}

/// Its hits beyond the limit kept the other one from being charged.
#[tokio::test]
async fn exact_shadow_limit_that_is_charged_in_full_keeps_no_other_from_being_charged() {
    let toml = "[domains.d.c]\nquota = \"3/h\"\nmode = \"exact\"\ncharge = \"in-full\"\nswitch = \"shadow\"\n\
                [domains.d.all]\nquota = \"9/h\"\nmode = \"local\"\n";
    let clock = ManualClock::new();
    let config = Config::from_toml(toml).unwrap();
    let builder = config.builder().store(ScriptedStore::new(&clock)).clock(&clock);
    let limiter = builder.build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let mut two_hits = body("d (c,x) & (all,x)");
    two_hits["hitsAddend"] = json!(2);
    for left in [7, 5, 3, 1] {
        let (status, answer) = ask(&service, &two_hits).await;
        assert_eq!(status, 200, "{answer}");
        assert!(shown(&answer).ends_with(&format!("OK {left}")), "{answer}");
    }
}

#[tokio::test]
async fn an_unknown_domain_is_denied_if_the_file_says_so() {
    let toml = "[domains.d.c]\nquota = \"2/h\"\n[server]\nunknown_domain = \"deny\"\n";
    let (status, answer) = ask(&service(toml), &body("other (c,x)")).await;
    assert_eq!((status, &answer["overallCode"]), (429, &json!("OVER_LIMIT")));
}

#[tokio::test]
async fn shadow_limit_smaller_than_the_hits_does_not_keep_other_limits_from_being_charged() {
    let toml = "[domains.d.c]\nquota = \"10/h\"\nswitch = \"shadow\"\n[domains.d.all]\nquota = \"30/h\"\n\
                [domains.d.off]\nquota = \"10/h\"\nswitch = \"off\"\n";
    let service = service(toml);
    for (times, expected) in
        [(1, "OK 10 & OK 19 & OK 10"), (2, "OK 10 & OK 8 & OK 10"), (3, "OK 10 & OVER 0 & OK 10")]
    {
        let mut body = body("d (c,x) & (all,x) & (off,x)");
        body["hitsAddend"] = json!(11);
        let (status, answer) = ask(&service, &body).await;
        assert_eq!(shown(&answer), expected, "{times}: {answer}");
        assert_eq!(status, if times == 3 { 429 } else { 200 });
    }
}

/// An exact limit in shadow mode denied a request that costs more than it ever admits.
#[tokio::test]
async fn exact_limit_in_shadow_mode_denies_nothing() {
    let redis = RedisServer::start();
    let toml = format!(
        "[domains.d.c]\nquota = \"2/h\"\nmode = \"exact\"\nswitch = \"shadow\"\n[store]\nredis = \"{}\"\n",
        redis.url()
    );
    let service = parts::service::service(&toml).await;
    let mut call = body("d (c,x)");
    call["hitsAddend"] = json!(5);
    let answer = ask(&service, &call).await;
    assert_eq!(answer.0, 200, "{}", answer.1);
}

#[tokio::test]
async fn an_unknown_domain_is_denied_by_no_service_in_shadow_mode() {
    let toml = "[domains.d.c]\nquota = \"2/h\"\n[server]\nunknown_domain = \"deny\"\nshadow_domains = true\n";
    let (status, answer) = ask(&service(toml), &body("other (c,x)")).await;
    assert_eq!((status, shown(&answer)), (200, "OVER 0".to_owned()));
}

#[tokio::test]
async fn look_at_an_exact_limit_asks_the_store() {
    let toml = "[store]\nmemory = true\n[domains.d.c]\nquota = \"10/h\"\nmode = \"exact\"\n";
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let mut look = body("d (c,x)");
    look["descriptors"][0]["hitsAddend"] = json!(0);
    for (body, expected) in [(body("d (c,x)"), "OK 9"), (look.clone(), "OK 9"), (look, "OK 9")] {
        assert_eq!(shown(&ask(&service, &body).await.1), expected);
    }
}

#[test]
fn dollar_in_a_converted_name_is_no_variable() {
    let yaml = "domain: d\ndescriptors:\n  - key: ${A}\n    rate_limit: {unit: day, requests_per_unit: 1, name: $x}\n  \
                - key: b\n    rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: $x}]}\n";
    let toml = converted(&[yaml], &[]);
    assert!(Config::from_toml_with(&toml, |_| None).is_ok(), "{toml}");
}

/// A store that takes connections and never answers.
fn silent_store() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().flatten().collect::<Vec<_>>());
    port
}

/// A request over gRPC of the value x of each of these keys of the domain d, whose caller waits so long.
fn hurried(keys: &[u8], timeout: &str) -> Request<Body> {
    let of = |key: &u8| [b"\x12\x08\x0a\x06\x0a\x01", &[*key][..], b"\x12\x01x"].concat();
    let message = [b"\x0a\x01d".to_vec(), keys.iter().flat_map(of).collect()].concat();
    let frame = [&[0, 0, 0, 0, message.len() as u8], &message[..]].concat();
    Request::post("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc")
        .header("grpc-timeout", timeout)
        .body(Body::from(frame))
        .unwrap()
}

/// The overall code that the caller of the key c is told who waits so long.
async fn overall(service: &Service, timeout: &str) -> u8 {
    let response = service.grpc().oneshot(hurried(b"c", timeout)).await.unwrap();
    to_bytes(response.into_body(), usize::MAX).await.unwrap()[6]
}

async fn step(clock: &ManualClock) {
    clock.advance(Duration::from_micros(100));
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

async fn while_time_passes<T>(clock: &ManualClock, answer: impl Future<Output = T>) -> T {
    let time_passes = async {
        loop {
            step(clock).await;
        }
    };
    tokio::select! {
        biased;
        answer = answer => answer,
        () = time_passes => unreachable!("it passes for ever"),
    }
}

/// Its limit went on by its outage policy for everybody else.
#[tokio::test]
async fn caller_in_a_hurry_says_nothing_of_the_store() {
    let toml =
        "[domains.d.c]\nquota = \"10/h\"\nburst = 10\nmode = \"exact\"\noutage = \"closed\"\n";
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    store.set_round_trip(Duration::from_millis(4));
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().store(store).clock(&clock).build().unwrap();
    let service = Service::new(config, limiter).unwrap();
    let overall = async |timeout: &str| while_time_passes(&clock, overall(&service, timeout)).await;
    for _ in 0..3 {
        assert_eq!(overall("6m").await, 2, "a millisecond is not enough");
    }
    assert_eq!(overall("10S").await, 1, "the store was asked");
}

/// Its question took a slot that passed unused, beside the one that its credit took.
#[tokio::test]
async fn caller_in_a_hurry_takes_one_slot_of_a_leaky_bucket() {
    let toml = "[domains.d.c]\nquota = \"10/s\"\nalgorithm = \"leaky-bucket\"\n";
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let config = Config::from_toml(toml).unwrap();
    let limiter = config.builder().store(store.clone()).clock(&clock).build().unwrap();
    for _ in 0..300 {
        clock.advance(Duration::from_millis(10));
        limiter.settle().await;
    }
    store.set_round_trip(Duration::from_millis(4));
    let service = Service::new(config, limiter).unwrap();
    for request in 0..12 {
        let code = while_time_passes(&clock, overall(&service, "6m")).await;
        assert_eq!(code, 1, "request {request}");
        for _ in 0..1600 {
            step(&clock).await;
        }
    }
}

#[tokio::test]
async fn grpc_request_is_answered_before_its_deadline_while_the_store_is_silent() {
    for (mode, outage, overall) in
        [("hybrid", "open", 1), ("exact", "open", 1), ("exact", "closed", 2)]
    {
        let port = silent_store();
        let toml = format!(
            "[store]\nredis = \"redis://127.0.0.1:{port}\"\ntimeout = \"10s\"\n[domains.d.c]\nquota = \"10/h\"\n\
             mode = \"{mode}\"\noutage = \"{outage}\"\nmax_wait = \"10s\"\n"
        );
        let config = Config::from_toml(&toml).unwrap();
        let limiter = config.builder().build().unwrap();
        let service = Service::new(config, limiter).unwrap();
        let response = tokio::time::timeout(std::time::Duration::from_secs(5), async {
            let response = service.grpc().oneshot(hurried(b"c", "100m")).await.unwrap();
            to_bytes(response.into_body(), usize::MAX).await.unwrap()
        });
        let answer = response.await.unwrap_or_else(|_| panic!("{mode}: no answer"));
        // A frame, and in it the overall code.
        assert_eq!(answer[5..7], [8, overall], "{mode} {outage}: {answer:?}");
    }
}

#[tokio::test]
async fn deadline_of_a_request_is_that_of_all_its_exact_limits_together() {
    let port = silent_store();
    let keys = b"abcdef";
    let service = |max_wait: &str| {
        let limit = |key: &u8| {
            format!(
                "[domains.d.{}]\nquota = \"10/h\"\nmode = \"exact\"\noutage = \"open\"\nmax_wait = \"{max_wait}\"\n",
                char::from(*key)
            )
        };
        let store = format!("[store]\nredis = \"redis://127.0.0.1:{port}\"\ntimeout = \"10s\"\n");
        let toml = store + &keys.iter().map(limit).collect::<String>();
        let config = Config::from_toml(&toml).unwrap();
        let limiter = config.builder().build().unwrap();
        Service::new(config, limiter).unwrap()
    };
    // Each of the six could wait for a second.
    let (asked, most) = (Instant::now(), Duration::from_secs(3));
    let response = service("10s").grpc().oneshot(hurried(keys, "1S")).await.unwrap();
    to_bytes(response.into_body(), usize::MAX).await.unwrap();
    assert!(asked.elapsed() < most, "{:?}", asked.elapsed());
    // And for 300 ms, before the deadline.
    let asked = Instant::now();
    let response = service("300ms").grpc().oneshot(hurried(keys, "9S")).await.unwrap();
    to_bytes(response.into_body(), usize::MAX).await.unwrap();
    assert!(asked.elapsed() < Duration::from_millis(1200), "{:?}", asked.elapsed());
    let asked = Instant::now();
    let call = body("d (a,x) & (b,x) & (c,x) & (d,x) & (e,x) & (f,x)");
    assert_eq!(ask(&service("1s"), &call).await.0, 200);
    assert!(asked.elapsed() < most, "without a deadline: {:?}", asked.elapsed());
}

#[tokio::test]
async fn the_limits_of_the_example_are_those_that_its_envoy_asks_about() {
    let toml = include_str!("../examples/envoy/tidegate.toml");
    let envoy = include_str!("../examples/envoy/envoy.yaml");
    assert!(envoy.contains("domain: web") && envoy.contains("descriptor_key: api_key"));
    let steps = [
        (20, "web (api_key,alice)", "OK 0"),
        (1, "web (api_key,alice)", "OVER 0"),
        (21, "web (api_key,internal)", "OK 979"),
    ];
    play("the example", toml, &steps).await;
}
