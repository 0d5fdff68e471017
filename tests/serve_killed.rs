//! A process of the service is killed before it has reported what it reserved, and another one settles that.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "processes live by the real clock")]

mod parts;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parts::serving::{SOON, Server, file};
use parts::{RedisServer, charged_to};
use serde_json::{Value, json};

/// Limits that do not refill meanwhile, and report so seldom that a process is killed before.
const LIMITS: &str = r#"
max_nodes = 2

[server]
token = "correct-horse-battery"

[limits.bucket]
quota = "100/365d"
sync_interval = "1s"
max_wait = "5s"

[limits.window]
quota = "100/365d"
algorithm = "fixed-window"
sync_interval = "1s"
max_wait = "5s"

[limits.sliding]
quota = "100/365d"
algorithm = "sliding-window"
sync_interval = "1s"
max_wait = "5s"
"#;
const ALL: [&str; 3] = ["bucket", "window", "sliding"];
const KEYS: u32 = 10;
/// Until leases of a process that was killed have ended.
const LEASES_ENDED: Duration = Duration::from_secs(10);

fn every_key() -> impl Iterator<Item = (&'static str, u32)> {
    ALL.into_iter().flat_map(|limit| (0..KEYS).map(move |key| (limit, key)))
}

fn asked((limit, key): (&str, u32), cost: u32) -> Value {
    json!({"limit": limit, "key": format!("k{key}"), "cost": cost})
}

fn is_allowed(answer: &Value) -> bool {
    answer["allowed"] == json!(true)
}

/// What was reserved of a lease is charged when that ends: what goes back of it is no more than that.
#[test]
fn reservation_of_a_killed_process_that_another_one_refunds_is_spent_once() {
    let redis = RedisServer::start();
    let text = format!("{LIMITS}[store]\nredis = \"{}\"\n", redis.url());
    let file = file("killed", &text);
    let (one, other) = (Server::start(Some(&file)), Server::start(Some(&file)));
    for key in every_key() {
        assert!(is_allowed(&other.check(&asked(key, 40)).json()), "{key:?}");
        assert!(is_allowed(&one.check(&asked(key, 20)).json()), "{key:?}");
    }
    let began = Instant::now();
    for limit in ALL {
        while charged_to(&redis, limit).values().sum::<u64>() < u64::from(60 * KEYS) {
            assert!(began.elapsed() < SOON, "{limit}: not reported");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let mut open = Vec::new();
    for _ in 0..3 {
        for key in every_key() {
            let reserved = one.ask_with_token("/v1/reserve", &asked(key, 10)).json();
            if is_allowed(&reserved) {
                open.push(reserved["reservation"].clone());
            }
        }
    }
    drop(one);
    assert!(open.len() > 2 * every_key().count(), "{}", open.len());
    for reservation in open {
        let refund = json!({"reservation": reservation});
        let settled = other.ask_with_token("/v1/refund", &refund);
        assert_eq!(settled.status, 200, "{}", settled.body);
    }
    let mut admitted = HashMap::new();
    let end = Instant::now() + LEASES_ENDED;
    while Instant::now() < end {
        for key in every_key() {
            while is_allowed(&other.check(&asked(key, 5)).json()) {
                *admitted.entry(key).or_insert(0) += 5;
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let (most, total) = (admitted.values().max(), admitted.values().sum::<u32>());
    assert!(most <= Some(&40), "100, of which 60 were spent: {admitted:?}");
    assert!(total > 20 * every_key().count() as u32, "10 without what goes back: {admitted:?}");
}
