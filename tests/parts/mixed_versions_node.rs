//! Two nodes of one version, for `tests/mixed_versions`: what they admitted, when, and what was refused.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tidegate::{Event, Limit, Limiter, Quota, RedisStore, SlidingLog};
use tokio::time::Instant;

const TIME: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, version, address] = &arguments[..] else { panic!("VERSION ADDRESS") };
    let refused = Arc::new(Mutex::new(BTreeSet::new()));
    let mut limiters = Vec::new();
    for _ in 0..2 {
        // The same name, and another algorithm in each version.
        let log = match version.as_str() {
            "today" => Limit::new("log", SlidingLog::new(100, Duration::from_secs(10))),
            _ => Limit::new("log", Quota::new(100, Duration::from_secs(10))),
        };
        let told = refused.clone();
        let limiter = Limiter::builder()
            .limit(Limit::new("bucket", Quota::per_second(500)))
            .limit(log)
            .store(RedisStore::open(address).expect("an address"))
            .listen(move |event| {
                let is_refusal =
                    matches!(event, Event::QuotaMismatch { .. } | Event::ForeignKey { .. });
                if is_refusal {
                    told.lock().expect("nobody panics").insert(format!("{event:?}"));
                }
            })
            .build()
            .expect("a limiter");
        limiter.ready(Duration::from_secs(10)).await.expect("a store");
        limiters.push(limiter);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let limit = |name| limiters.iter().map(move |one| one.limit(name).expect("it is there"));
    let limits: Vec<_> = limit("bucket").zip(limit("log")).collect();
    let (begin, mut asked) = (Instant::now(), 0);
    for millisecond in 0.. {
        let due = begin + Duration::from_millis(millisecond);
        if due >= begin + TIME {
            break;
        }
        tokio::time::sleep_until(due).await;
        if fastrand::f64() >= 0.75 {
            continue;
        }
        asked += 1;
        let (bucket, log) = &limits[fastrand::usize(..2)];
        if bucket.check_sure("key").await.is_allowed() {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            println!("at {}", now.expect("after 1970").as_micros());
        }
        if fastrand::u8(..20) == 0 {
            let _ = log.check_sure("key").await;
        }
    }
    println!("{version}: {asked} requests");
    for event in refused.lock().expect("nobody panics").iter() {
        println!("refused by {version}: {event}");
    }
}
