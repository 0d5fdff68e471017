//! Requests of the service that need its token: how keys stand, overrides, switches.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "nodes pull overrides by the real clock")]

mod parts;

use std::time::{Duration, Instant};

use parts::RedisServer;
use parts::service::{SOON, TOKEN, ask, ask_with, service};
use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate::server::{ReloadError, Service};

const LIMITS: &str = r#"
[server]
token = "correct-horse-battery"

[limits.api]
quota = "5/d"
max_wait = "5s"

[limits.api.plans.pro]
quota = "50/d"

[limits."mail/out"]
quota = "5/d"
mode = "local"
"#;

async fn check(service: &Service, key: &str) -> Value {
    ask_with(None, service, "POST /v1/check", &json!({"limit": "api", "key": key})).await.body
}

#[tokio::test]
async fn pages_of_single_keys_and_changes_need_the_token() {
    let (with, without) = (service(LIMITS).await, service("[limits.api]\nquota = \"5/d\"").await);
    let asked = [
        "GET /v1/limits/api/keys?key=a",
        "DELETE /v1/limits/api/keys?key=a",
        "PUT /v1/limits/api/overrides?key=a",
        "DELETE /v1/limits/api/overrides?key=a",
        "PUT /v1/limits/api/switch",
        "DELETE /v1/limits/api/switch",
    ];
    let wrong = ["Bearer correct-horse-batterx", "Bearer correct-horse", "Basic Y29ycmVjdA==", "x"];
    for asked in asked {
        let body = json!({"set": "block"});
        assert_eq!(ask_with(None, &with, asked, &body).await.status, 401, "{asked}");
        for shown in wrong {
            let answer = ask_with(Some(shown), &with, asked, &body).await;
            assert_eq!(answer.status, 401, "{asked}: {shown}");
            assert!(answer.head.contains("\"www-authenticate\": \"Bearer\""), "{}", answer.head);
        }
        let answer = ask(&without, asked, body).await;
        assert_eq!(answer.status, 403, "{asked}, and none is configured");
    }
    assert_eq!(check(&with, "a").await["remaining"], json!(4), "nothing was blocked");
    assert_eq!(ask_with(None, &with, "GET /v1/limits", &Value::Null).await.status, 200);
}

#[tokio::test]
async fn token_of_a_configuration_is_not_shown() {
    let config = Config::from_toml(LIMITS).unwrap();
    assert!(config.server().token.is_some() && !format!("{config:?}").contains(TOKEN));
}

#[tokio::test]
async fn state_of_a_key_has_tokens_here_and_in_the_store() {
    let service = service(LIMITS).await;
    ask_with(None, &service, "POST /v1/check", &json!({"limit": "mail/out", "key": "ö b"})).await;
    let stands = ask(&service, "GET /v1/limits/mail%2Fout/keys?key=%C3%B6+b", Value::Null).await;
    let expected = json!({
        "allowed": true, "limit": "mail/out", "cost": 0, "burst": 5, "remaining": 4, "retry_after_ms": 0,
        "reset_after_ms": stands.body["reset_after_ms"], "sure": true, "fixed": false, "here": 4, "store": null,
        "store_age_ms": null,
    });
    assert_eq!((stands.status, &stands.body), (200, &expected));

    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let shared = parts::service::service(&text).await;
    assert_eq!(check(&shared, "a").await["sure"], json!(true));
    let stands = ask(&shared, "GET /v1/limits/api/keys?key=a", Value::Null).await.body;
    let number = |name: &str| stands[name].as_u64().unwrap();
    assert_eq!(number("here") + number("store"), 4, "{stands}");
    assert!(number("store_age_ms") < 60_000, "{stands}");
    let pro = ask(&shared, "GET /v1/limits/api/keys?key=b&plan=pro", Value::Null).await.body;
    assert_eq!((&pro["burst"], &pro["plan"]), (&json!(50), &json!("pro")), "{pro}");
    assert_eq!((&pro["store"], &pro["store_age_ms"]), (&Value::Null, &Value::Null), "{pro}");
}

/// A look at a fresh key of a limit without first credit denied it.
#[tokio::test]
async fn look_at_a_fresh_key_without_credit_asks_the_store() {
    let redis = RedisServer::start();
    let strict = LIMITS.replace("max_wait", "credit = 0\nmax_wait");
    // Of a limit with plans the store is not asked: a look names one, and changes nothing.
    let strict = strict.replace("[limits.api.plans.pro]\nquota = \"50/d\"\n", "");
    let service = service(&format!("{strict}[store]\nredis = \"{}\"\n", redis.url())).await;
    let asks = |key: &str| {
        let one = json!({"limit": "api", "key": key, "cost": 0});
        let page = format!("GET /v1/limits/api/keys?key={key}");
        let two = json!([one, {"limit": "api", "key": format!("{key}2"), "cost": 0}]);
        [
            (page, Value::Null),
            ("POST /v1/check".to_owned(), one.clone()),
            ("POST /v1/check-all".to_owned(), two),
        ]
    };
    for (place, key) in ["a", "b", "c"].into_iter().enumerate() {
        let (asked, body) = &asks(key)[place];
        for look in ["the first", "the next"] {
            let told = ask(&service, asked, body.clone()).await.body;
            assert_eq!(
                (&told["allowed"], &told["remaining"]),
                (&json!(true), &json!(5)),
                "{look}: {asked}: {told}"
            );
        }
        let all = json!({"limit": "api", "key": key, "cost": 5});
        let spent = ask(&service, "POST /v1/check", all).await.body;
        assert_eq!(spent["allowed"], json!(true), "{asked}: a look spends nothing");
        let told = ask(&service, asked, body.clone()).await.body;
        assert_eq!(
            (&told["allowed"], &told["sure"]),
            (&json!(false), &json!(true)),
            "{asked}: {told}"
        );
    }
    let reserved = json!({"limit": "api", "key": "d", "cost": 0});
    let reserved = ask(&service, "POST /v1/reserve", reserved).await;
    assert_eq!(
        (reserved.status, &reserved.body["allowed"]),
        (200, &json!(true)),
        "{}",
        reserved.body
    );
}

#[tokio::test]
async fn override_holds_here_at_once_and_on_another_process_soon() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (service(&text).await, service(&text).await);
    for (keys, key) in
        [("key=ann", "ann"), ("prefix=bob%3A", "bob:1"), ("network=10.0.0.0%2F8", "10.1.2.3")]
    {
        let path = format!("/v1/limits/api/overrides?{keys}");
        let body = json!({"set": "block", "lasting_ms": 3_600_000});
        assert_eq!(ask(&one, &format!("PUT {path}"), body).await.status, 204, "{keys}");
        let blocked = check(&one, key).await;
        assert_eq!(blocked["allowed"], json!(false), "{keys}: {blocked}");
        let wait_ms = blocked["retry_after_ms"].as_u64().unwrap();
        assert!((3_590_000..=3_600_000).contains(&wait_ms), "{keys}: {blocked}");
        let stands = format!("GET /v1/limits/api/keys?key={key}");
        let deadline = Instant::now() + SOON;
        for service in [&one, &other] {
            while ask(service, &stands, Value::Null).await.body["fixed"] != json!(true) {
                assert!(Instant::now() < deadline, "{keys}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        assert_eq!(check(&other, key).await["allowed"], json!(false), "{keys}");
        assert_eq!(ask(&one, &format!("DELETE {path}"), Value::Null).await.status, 204);
        assert_eq!(check(&one, key).await["allowed"], json!(true), "{keys}: removed");
    }
}

#[tokio::test]
async fn key_that_is_reset_begins_anew_here_and_at_another_process() {
    let redis = RedisServer::start();
    let exact = "[limits.exact]\nquota = \"5/d\"\nmode = \"exact\"\n";
    let text = format!("{LIMITS}{exact}[store]\nredis = \"{}\"\n", redis.url());
    let (one, other) = (service(&text).await, service(&text).await);
    for _ in 0..5 {
        assert_eq!(check(&one, "ann").await["allowed"], json!(true));
    }
    for service in [&one, &other] {
        assert_eq!(check(service, "ann").await["allowed"], json!(false));
    }
    let reset = ask(&one, "DELETE /v1/limits/api/keys?key=ann", Value::Null).await;
    assert_eq!((reset.status, &reset.body), (204, &Value::Null));
    assert_eq!(check(&one, "ann").await["allowed"], json!(true));
    let deadline = Instant::now() + SOON;
    while check(&other, "ann").await["allowed"] != json!(true) {
        assert!(Instant::now() < deadline, "it stays denied at the other process");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for (path, status) in [("ipa/keys?key=a", 404), ("api/keys", 400), ("api/keys?key=a&x=1", 400)]
    {
        let answer = ask(&one, &format!("DELETE /v1/limits/{path}"), Value::Null).await;
        assert_eq!(answer.status, status, "{path}");
    }
    redis.stop();
    let answer = ask(&one, "DELETE /v1/limits/exact/keys?key=ann", Value::Null).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
}

#[tokio::test]
async fn override_gives_a_plan_or_a_quota_and_a_switch_lets_all_pass() {
    let service = service(LIMITS).await;
    for (set, burst) in [(json!({"plan": "pro"}), 50), (json!({"quota": "7/d"}), 7)] {
        let body = json!({"set": set});
        assert_eq!(ask(&service, "PUT /v1/limits/api/overrides?key=a", body).await.status, 204);
        assert_eq!(check(&service, "a").await["burst"], json!(burst), "{set}");
        let state = ask(&service, "GET /v1/limits/api/keys?key=a", Value::Null).await.body;
        assert_eq!((&state["burst"], &state["fixed"]), (&json!(burst), &json!(false)), "{state}");
    }
    let allow = json!({"set": "allow"});
    assert_eq!(ask(&service, "PUT /v1/limits/api/overrides?key=c", allow).await.status, 204);
    let state = ask(&service, "GET /v1/limits/api/keys?key=c", Value::Null).await.body;
    assert_eq!((&state["allowed"], &state["fixed"]), (&json!(true), &json!(true)), "{state}");
    for _ in 0..5 {
        assert_eq!(check(&service, "b").await["allowed"], json!(true));
    }
    assert_eq!(check(&service, "b").await["allowed"], json!(false));
    for (switch, allowed) in [("off", true), ("on", false), ("shadow", true)] {
        let body = json!({"switch": switch});
        assert_eq!(ask(&service, "PUT /v1/limits/api/switch", body).await.status, 204);
        assert_eq!(check(&service, "b").await["allowed"], json!(allowed), "{switch}");
    }
    assert_eq!(ask(&service, "DELETE /v1/limits/api/switch", Value::Null).await.status, 204);
    assert_eq!(check(&service, "b").await["allowed"], json!(false), "as it was configured");
}

#[tokio::test]
async fn no_cost_is_too_high_for_a_blocked_key_or_a_limit_that_denies_nothing() {
    let service = service(LIMITS).await;
    let body = json!({"set": "block"});
    let set = ask(&service, "PUT /v1/limits/api/overrides?key=mallory", body).await;
    assert_eq!(set.status, 204, "{}", set.body);
    let told = async |key: &str| {
        let check = json!({"limit": "api", "key": key, "cost": 51});
        let one = ask_with(None, &service, "POST /v1/check", &check).await;
        let all = ask_with(None, &service, "POST /v1/check-all", &json!([check])).await;
        [one, all].map(|answer| (answer.status, answer.body["allowed"].clone()))
    };
    assert_eq!(told("ann").await, [(422, Value::Null), (422, Value::Null)]);
    assert_eq!(told("mallory").await, [(200, json!(false)), (200, json!(false))]);
    for switch in ["off", "shadow"] {
        let body = json!({"switch": switch});
        assert_eq!(ask(&service, "PUT /v1/limits/api/switch", body).await.status, 204);
        for key in ["ann", "mallory"] {
            let expected = [(200, json!(true)), (200, json!(true))];
            assert_eq!(told(key).await, expected, "{switch}: {key}");
        }
    }
}

#[tokio::test]
async fn wrong_changes_are_problems_and_change_nothing() {
    let service = service(LIMITS).await;
    let block = || json!({"set": "block"});
    let of_key = "PUT /v1/limits/api/overrides?key=a";
    let cases = [
        ("PUT /v1/limits/ipa/overrides?key=a", block(), 404, ""),
        ("PUT /v1/limits/api/overrides", block(), 400, ""),
        ("PUT /v1/limits/api/overrides?key=a&prefix=a", block(), 400, ""),
        ("PUT /v1/limits/api/overrides?kye=a", block(), 400, ""),
        ("PUT /v1/limits/api/overrides?key=%FF", block(), 400, ""),
        ("PUT /v1/limits/api/overrides?network=10.0.0.1%2F8", block(), 400, ""),
        (of_key, json!("block"), 422, "#"),
        (of_key, json!(["block", 7]), 422, "#"),
        (of_key, json!({"set": "blokc"}), 422, "#/set"),
        (of_key, json!({"set": 5}), 422, "#/set"),
        (of_key, json!({"set": {}}), 422, "#/set"),
        (of_key, json!({"set": {"plan": "pro", "quota": "7/d"}}), 422, "#/set"),
        (of_key, json!({"set": "block", "lasting": 1}), 422, "#/lasting"),
        (of_key, json!({"set": "block", "lasting_ms": 0}), 422, "#/lasting_ms"),
        (of_key, json!({"set": "block", "lasting_ms": 1_u64 << 53}), 422, "#/lasting_ms"),
        (of_key, json!({"set": "block", "lasting_ms": 1.5}), 422, "#/lasting_ms"),
        (of_key, json!({"set": "block", "lasting_ms": null}), 422, "#/lasting_ms"),
        (of_key, json!({"set": {"plan": "por"}}), 422, "#/set/plan"),
        (of_key, json!({"set": {"quota": "0/s"}}), 422, "#/set/quota"),
        (of_key, json!({"set": {"quota": "5/100000000d"}}), 422, "#/set/quota"),
        (of_key, Value::Null, 400, "#"),
        ("PUT /v1/limits/api/switch", json!({"switch": "of"}), 422, "#/switch"),
        ("PUT /v1/limits/api/switch", json!({"switch": 5}), 422, "#/switch"),
        ("PUT /v1/limits/api/switch", json!(["off"]), 422, "#"),
        ("PUT /v1/limits/api/switch?key=a", json!({"switch": "off"}), 400, ""),
        ("DELETE /v1/limits/api/switch?key=a", Value::Null, 400, ""),
        ("PUT /v1/limits/ipa/switch", json!({"switch": "off"}), 404, ""),
        ("DELETE /v1/limits/ipa/overrides?key=a", Value::Null, 404, ""),
        ("GET /v1/limits/ipa/keys?key=a", Value::Null, 404, ""),
        ("GET /v1/limits/%FF/keys?key=a", Value::Null, 400, ""),
        ("GET /v1/limits/api/keys", Value::Null, 400, ""),
        ("GET /v1/limits/api/keys?key=a&plan=por", Value::Null, 422, ""),
        ("GET /v1/limits/api/overrides?key=a", Value::Null, 405, ""),
    ];
    for (asked, body, status, pointer) in cases {
        let answer = ask(&service, asked, body.clone()).await;
        assert_eq!(answer.status, status, "{asked} {body}: {}", answer.body);
        assert!(answer.head.contains("application/problem+json"), "{asked}: {}", answer.head);
        assert!(!answer.body["detail"].as_str().unwrap().is_empty(), "{asked} {body}");
        let shown = answer.body["errors"][0]["pointer"].as_str().unwrap_or_default();
        assert_eq!(shown, pointer, "{asked} {body}: {}", answer.body);
    }
    assert_eq!(check(&service, "a").await["remaining"], json!(4));
}

#[tokio::test]
async fn reload_changes_the_token_and_how_domains_are_answered_but_no_address() {
    let service = service(&format!("{LIMITS}[domains.d.c]\ndeny = true\n")).await;
    let envoy = async |domain: &str| {
        let entries = json!([{"key": "c", "value": "x"}]);
        let body = json!({"domain": domain, "descriptors": [{"entries": entries}]});
        ask_with(None, &service, "POST /json", &body).await
    };
    assert_eq!([envoy("d").await.status, envoy("e").await.status], [429, 200]);
    let server = "[server]\ntoken = \"another-token-of-the-service\"\nshadow_domains = true\n\
                  unknown_domain = \"deny\"\nlimit_headers = true\nbody_timeout = \"2s\"\n";
    let rest = LIMITS.split_once("-battery\"\n").unwrap().1;
    let text = format!("{server}{rest}[domains.d.c]\nquota = \"5/h\"\n");
    service.reload(Config::from_toml(&text).unwrap()).unwrap();
    let answer = envoy("d").await.body;
    assert_eq!(answer["responseHeadersToAdd"][1]["value"], json!("4"), "{answer}");
    let unknown = envoy("e").await;
    let told = &unknown.body["statuses"][0]["code"];
    assert_eq!((unknown.status, told), (200, &json!("OVER_LIMIT")), "all go on");
    let keys = "GET /v1/limits/api/keys?key=a";
    assert_eq!(ask(&service, keys, Value::Null).await.status, 401, "the token before");
    let with = Some("Bearer another-token-of-the-service");
    assert_eq!(ask_with(with, &service, keys, &Value::Null).await.status, 200);
    let elsewhere = text.replace("[server]\n", "[server]\nhttp = \"127.0.0.1:1\"\n");
    let refused = service.reload(Config::from_toml(&elsewhere).unwrap()).unwrap_err();
    assert_eq!(refused, ReloadError::Fixed("server.http"));
    assert_eq!(
        ask_with(with, &service, keys, &Value::Null).await.status,
        200,
        "all stays as it was"
    );
}

#[tokio::test]
async fn limit_that_a_reload_removed_is_not_found() {
    let service = service(LIMITS).await;
    let without = LIMITS.replace("[limits.\"mail/out\"]", "[limits.mail]");
    service.reload(Config::from_toml(&without).unwrap()).unwrap();
    for asked in [
        "GET /v1/limits/mail%2Fout/keys?key=a",
        "PUT /v1/limits/mail%2Fout/overrides?key=a",
        "DELETE /v1/limits/mail%2Fout/overrides?key=a",
        "PUT /v1/limits/mail%2Fout/switch",
    ] {
        let body = json!({"set": "block", "switch": "off"});
        assert_eq!(ask(&service, asked, body).await.status, 404, "{asked}");
    }
}
