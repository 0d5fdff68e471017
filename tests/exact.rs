//! Limits of which the store decides each request: the interface, outages, and a real Redis.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::disallowed_methods, reason = "servers are real, and so is time")]

mod parts;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    AsyncLimit, Builder, ConfigError, Decision, Event, FixedWindow, LeakyBucket, Limit, Limiter,
    MemoryStore, Mode, OutagePolicy, Override, Quota, RedisStore, Rule, SlidingLog, SlidingWindow,
    StoreError,
};

use parts::RedisServer;

/// Longer than four times `max_wait` (50 ms), after which a store that was away is tried again.
const PAUSE: Duration = Duration::from_millis(210);

fn rules() -> [Rule; 5] {
    [
        Quota::per_minute(5).into(),
        LeakyBucket::per_minute(5).queue(Duration::from_secs(48)).into(),
        FixedWindow::per_minute(5).into(),
        SlidingWindow::per_minute(5).into(),
        SlidingLog::per_minute(5).into(),
    ]
}

fn redis(server: &RedisServer) -> RedisStore {
    RedisStore::open(&server.url()).unwrap().timeout(Duration::from_secs(2))
}

/// Waits for long enough on a busy machine.
fn exact(rule: impl Into<Rule>) -> Limit {
    Limit::new("x", rule).exact().max_wait(Duration::from_secs(5))
}

fn on(builder: Builder) -> AsyncLimit {
    builder.build().unwrap().async_limit("x").unwrap()
}

/// How many of so many requests go on.
async fn allowed(limit: &AsyncLimit, key: &str, requests: u32) -> u32 {
    let mut allowed = 0;
    for _ in 0..requests {
        allowed += u32::from(limit.schedule(key).await.is_allowed());
    }
    allowed
}

#[tokio::test]
async fn exact_limit_is_refused_by_limit_and_given_by_async_limit() {
    let builder = || {
        let other = Limit::new("other", Quota::per_minute(1)).local();
        Limiter::builder().limit(exact(Quota::per_minute(2))).limit(other)
    };
    for (builder, mode) in
        [(builder(), Mode::Local), (builder().store(MemoryStore::new()), Mode::Exact)]
    {
        let limiter = builder.build().unwrap();
        let error = limiter.limit("x").unwrap_err();
        assert_eq!(error, ConfigError::ExactLimit("x".to_owned()));
        assert!(error.to_string().contains("async_limit"), "{error}");
        let limit = limiter.async_limit("x").unwrap();
        assert_eq!((limit.name(), limit.mode()), ("x", mode));
        assert_eq!(allowed(&limit, "a", 3).await, 2);
        assert_eq!(limiter.async_limit("other").unwrap().mode(), Mode::Local);
        let unknown = limiter.async_limit("y").unwrap_err();
        assert!(matches!(unknown, ConfigError::UnknownLimit { .. }), "{unknown}");
    }
}

#[test]
fn settings_that_do_not_fit_an_exact_limit_are_refused_with_field_and_value() {
    let cases = [
        (exact(Quota::per_minute(2)).outage(OutagePolicy::LastRate), "outage", "LastRate"),
        (exact(Quota::per_minute(2)).max_wait(Duration::ZERO), "max_wait", "0ns"),
        (exact(Quota::per_minute(2)).max_wait(Duration::from_secs(11)), "max_wait", "11s"),
        (exact(SlidingLog::per_minute(1_000_000)), "quota.tokens", "1000000"),
        (exact(FixedWindow::new(5, Duration::from_millis(99))), "window.period", "99ms"),
    ];
    for (limit, expected, wrong) in cases {
        let error = Limiter::builder().limit(limit).store(MemoryStore::new()).build().unwrap_err();
        let ConfigError::Limit { field, value, .. } = &error else { panic!("{error}") };
        assert_eq!((*field, &**value), (expected, wrong), "{error}");
    }
}

#[tokio::test]
async fn nodes_share_an_exact_limit_from_its_first_request_on() {
    let server = RedisServer::start();
    for rule in rules() {
        let nodes: Vec<_> = (0..4)
            .map(|_| on(Limiter::builder().limit(exact(rule)).store(redis(&server))))
            .collect();
        let mut together = 0;
        for node in &nodes {
            together += allowed(node, "a", 5).await;
        }
        assert_eq!(together, 5, "{rule:?}");
        let denied = nodes[0].check_sure("a").await;
        assert!(denied.is_denied() && denied.is_sure(), "{rule:?}: {denied:?}");
        assert!(denied.store_time().is_some() && denied.retry_after() > Duration::ZERO);
        assert_eq!(nodes[1].check_sure("b").await.remaining(), u64::from(!is_queue(rule)) * 4);
    }
}

/// What keys in Redis have of the algorithm's name.
fn initials(rule: Rule) -> String {
    rule.algorithm().split('-').map(|word| &word[..1]).collect()
}

fn is_queue(rule: Rule) -> bool {
    matches!(rule, Rule::LeakyBucket(_))
}

#[tokio::test]
async fn denied_requests_and_peeks_write_nothing_and_all_that_is_written_expires_but_not_early() {
    let server = RedisServer::start();
    for rule in rules() {
        stay_within_a_minute(&server).await;
        let limit = on(Limiter::builder().limit(exact(rule)).store(redis(&server)));
        assert!(limit.check_sure_n("peeked", 0).await.unwrap().is_allowed());
        let name = |key: &str| format!("tg2:{{tidegate/{}:x:{key}}}", initials(rule));
        assert_eq!(server.command(&["EXISTS", &name("peeked")]), "0", "{rule:?}");
        assert_eq!(allowed(&limit, "a", 5).await, 5);
        let written = server.command(&["DUMP", &name("a")]);
        let before = expires(&server, &name("a"));
        // A request that moved the expiry would move it by as much.
        tokio::time::sleep(Duration::from_millis(900)).await;
        for cost in [1, 5, 0] {
            let decision = limit.schedule_n("a", cost).await.unwrap();
            assert!(decision.is_denied(), "{rule:?}, cost {cost}: {decision:?}");
        }
        assert_eq!(server.command(&["DUMP", &name("a")]), written, "{rule:?}");
        let moved = expires(&server, &name("a")).abs_diff(before);
        assert!(moved < Duration::from_millis(500), "{rule:?}: moved by {moved:?}");
        let peek = limit.schedule_n("a", 0).await.unwrap();
        let whole = peek.store_time().unwrap() + peek.reset_after();
        let (least, most) = (whole, whole + Duration::from_millis(500));
        assert!((least..most).contains(&before), "{rule:?}: {before:?} for {whole:?}");
    }
}

/// A small quota had filled the bucket up and let its record go: the large one, set again, gave 1000 fresh tokens.
#[tokio::test]
async fn record_outlives_a_smaller_quota_so_that_the_larger_one_gives_no_fresh_burst() {
    let server = RedisServer::start();
    let limiter = Limiter::builder()
        .limit(exact(Quota::per_second(10)))
        .store(redis(&server))
        .build()
        .unwrap();
    let limit = limiter.async_limit("x").unwrap();
    let overrides = limiter.overrides();
    let large = || Override::key("a").quota(Quota::per_hour(1000)).lasting(Duration::from_secs(60));
    overrides.set("x", large()).await.unwrap();
    assert!(limit.check_sure_n("a", 1000).await.unwrap().is_allowed());
    overrides.remove("x", Override::key("a")).await.unwrap();
    assert!(limit.check_sure("a").await.is_denied(), "it keeps what it has");
    let left: u64 = server.command(&["PTTL", "tg2:{tidegate/tb:x:a}"]).parse().unwrap();
    assert!(left > 3_500_000, "{left} ms");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(limit.check_sure("a").await.is_allowed(), "the small quota has filled it up");
    let left: u64 = server.command(&["PTTL", "tg2:{tidegate/tb:x:a}"]).parse().unwrap();
    assert!(left > 3_500_000, "{left} ms");
    overrides.set("x", large()).await.unwrap();
    assert!(limit.check_sure_n("a", 11).await.unwrap().is_denied(), "it has ten at most");
    assert!(limit.check_sure_n("a", 9).await.unwrap().is_allowed(), "ten less one");
    assert!(limit.check_sure("b").await.is_allowed());
    let left: u64 = server.command(&["PTTL", "tg2:{tidegate/tb:x:b}"]).parse().unwrap();
    assert!(left <= 105, "{left} ms: a token at 10 a second");
}

/// Waits for the next minute if this one ends soon: windows of a minute end with it.
async fn stay_within_a_minute(server: &RedisServer) {
    let time = server.command(&["TIME"]);
    let (seconds, _) = time.split_once('\n').unwrap();
    let left = 60 - seconds.parse::<u64>().unwrap() % 60;
    if left < 10 {
        tokio::time::sleep(Duration::from_secs(left)).await;
    }
}

/// When the key is forgotten, by the server's clock since 1970, or a little later.
fn expires(server: &RedisServer, name: &str) -> Duration {
    let left = server.command(&["PTTL", name]).parse().expect("it expires");
    let time = server.command(&["TIME"]);
    let (seconds, micros) = time.split_once('\n').unwrap();
    let time = Duration::new(seconds.parse().unwrap(), 1000 * micros.parse::<u32>().unwrap());
    time + Duration::from_millis(left)
}

#[tokio::test]
async fn record_takes_the_memory_that_redis_md_states() {
    let server = RedisServer::start();
    for (rule, stated) in rules().into_iter().zip([168, 168, 152, 152, 216]) {
        let limit = on(Limiter::builder().limit(exact(rule)).store(redis(&server)));
        assert!(limit.check_sure("a-key-of-20-bytes---").await.is_allowed());
        let name = format!("tg2:{{tidegate/{}:x:a-key-of-20-bytes---}}", initials(rule));
        let bytes = server.command(&["MEMORY", "USAGE", &name]).parse::<u32>().unwrap();
        println!("{bytes} bytes: {rule:?}");
        assert!(bytes <= stated + stated / 10, "{bytes} bytes: {rule:?}");
    }
    let limit =
        on(Limiter::builder().limit(exact(SlidingLog::per_hour(1000))).store(redis(&server)));
    for (key, entries, stated) in
        [("hundred-------------", 100, 2232), ("thousand------------", 1000, 18_440)]
    {
        assert_eq!(allowed(&limit, key, entries).await, entries);
        let name = format!("tg2:{{tidegate/sl:x:{key}}}");
        let bytes = server.command(&["MEMORY", "USAGE", &name]).parse::<u32>().unwrap();
        println!("{bytes} bytes: {entries} entries");
        assert!(bytes <= stated + stated / 10, "{bytes} bytes: {entries} entries");
    }
}

#[tokio::test]
async fn lost_scripts_are_sent_again() {
    let server = RedisServer::start();
    let limits =
        rules().map(|rule| on(Limiter::builder().limit(exact(rule)).store(redis(&server))));
    for limit in &limits {
        assert_eq!(allowed(limit, "a", 2).await, 2);
        assert_eq!(server.command(&["SCRIPT", "FLUSH"]), "OK");
        assert_eq!(allowed(limit, "a", 4).await, 3, "{limit:?}");
    }
}

/// The events of a limiter.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl Events {
    fn listener(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let events = self.clone();
        move |event| events.0.lock().unwrap().push(event.clone())
    }

    fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| which(event)).count()
    }
}

#[tokio::test]
async fn another_programs_value_is_named_and_kept_and_other_keys_go_on() {
    let server = RedisServer::start();
    for rule in rules() {
        let events = Events::default();
        let builder = Limiter::builder().limit(exact(rule)).store(redis(&server)).max_nodes(5);
        let limit = on(builder.listen(events.listener()));
        let name = format!("tg2:{{tidegate/{}:x:their key}}", initials(rule));
        for value in ["a", "T1", "W1 is longer than two letters, and no record"] {
            server.command(&["DEL", &name]);
            match rule {
                Rule::SlidingLog(_) => server.command(&["RPUSH", &name, value]),
                _ => server.command(&["SET", &name, value]),
            };
            let written = server.command(&["DUMP", &name]);
            assert!(!limit.check_sure("their key").await.is_sure(), "{rule:?}");
            assert_eq!(server.command(&["DUMP", &name]), written, "{rule:?}");
        }
        server.command(&["DEL", &name]);
        server.command(&["HSET", &name, "a", "b"]);
        assert!(!limit.check_sure("their key").await.is_sure(), "{rule:?}");
        assert!(limit.check_sure("ours").await.is_sure(), "{rule:?}");
        let foreign = |event: &Event| match event {
            Event::ForeignKey { error: StoreError::ForeignKey { key, .. } } => *key == name,
            _ => false,
        };
        assert_eq!(events.count(foreign), 1, "once a minute: {rule:?}");
    }
}

/// A limiter whose store a test takes away.
fn scripted(limit: Limit, events: &Events) -> (ScriptedStore, ManualClock, AsyncLimit) {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let builder = Limiter::builder().limit(limit).store(store.clone()).clock(&clock).max_nodes(2);
    (store, clock, on(builder.listen(events.listener())))
}

#[tokio::test]
async fn outage_policy_decides_while_the_store_is_away() {
    for (policy, expected) in
        [(OutagePolicy::Share, 5), (OutagePolicy::Open, 30), (OutagePolicy::Closed, 0)]
    {
        let events = Events::default();
        let limit = Limit::new("x", SlidingLog::per_hour(10)).exact().outage(policy);
        let (store, clock, limit) = scripted(limit, &events);
        assert!(limit.check_sure("a").await.is_sure());
        store.set_away(true);
        let mut decisions: Vec<Decision> = Vec::new();
        for _ in 0..30 {
            decisions.push(limit.check_sure("a").await);
        }
        assert!(decisions.iter().all(|one| !one.is_sure() && one.store_time().is_none()));
        let admitted = decisions.iter().filter(|one| one.is_allowed()).count();
        assert_eq!(admitted, expected, "{policy:?}");
        let denied = decisions.iter().filter(|one| one.is_denied());
        assert!(denied.map(Decision::retry_after).all(|after| after > Duration::ZERO));
        let began = |event: &Event| matches!(event, Event::OutagePolicyBegan { .. });
        assert_eq!(events.count(began), 1, "{policy:?}");
        store.set_away(false);
        clock.advance(PAUSE);
        assert!(limit.check_sure("a").await.is_sure(), "{policy:?}");
        assert_eq!(limit.check_sure("a").await.remaining(), 7, "what was admitted is not charged");
        let ended = |event: &Event| matches!(event, Event::OutagePolicyEnded { .. });
        assert_eq!(events.count(ended), 1, "{policy:?}");
    }
}

#[tokio::test]
async fn each_call_about_an_exact_limit_is_told_with_its_time_and_outcome() {
    let events = Events::default();
    let (store, clock, limit) =
        scripted(Limit::new("x", FixedWindow::per_hour(3)).exact(), &events);
    let calls = || {
        let of = |is_answered: bool| {
            events.count(|event| match event {
                Event::StoreDecided { limit, error, .. } => {
                    assert_eq!(&**limit, "x");
                    error.is_none() == is_answered
                }
                _ => false,
            })
        };
        [of(true), of(false)]
    };
    for _ in 0..5 {
        assert!(limit.check_sure("a").await.is_sure());
    }
    assert_eq!(calls(), [5, 0]);
    store.set_away(true);
    // One call finds out that the store is away, one looks again, and the others do not begin.
    for _ in 0..5 {
        assert!(!limit.check_sure("a").await.is_sure());
    }
    assert_eq!(calls(), [5, 2]);
    store.set_away(false);
    store.set_round_trip(Duration::from_millis(7));
    clock.advance(PAUSE);
    let (asked, clock) = (limit.clone(), clock.clone());
    let decision = tokio::spawn(async move { asked.check_sure("a").await });
    for _ in 0..100 {
        clock.advance(Duration::from_millis(1));
        tokio::task::yield_now().await;
    }
    assert!(decision.await.unwrap().is_sure());
    let took_ms =
        |event: &Event| matches!(event, Event::StoreDecided { took, .. } if took.as_millis() >= 7);
    assert_eq!((calls(), events.count(took_ms)), ([6, 2], 1));
}

/// Each decision of an exact limit was told as one about a key without room.
#[tokio::test]
async fn decisions_of_an_exact_limit_are_told_once_and_by_what_they_were() {
    let told = Arc::new(Mutex::new([0; 4]));
    let sum = told.clone();
    let clock = ManualClock::new();
    let builder = Limiter::builder()
        .limit(Limit::new("x", FixedWindow::per_hour(3)).exact())
        .store(ScriptedStore::new(&clock))
        .clock(&clock)
        .listen(move |event| {
            if let Event::Decisions { allowed, denied, unsure, overflowed, .. } = event {
                let mut sum = sum.lock().unwrap();
                *sum = [sum[0] + allowed, sum[1] + denied, sum[2] + unsure, sum[3] + overflowed];
            }
        });
    let limiter = builder.build().unwrap();
    let limit = limiter.async_limit("x").unwrap();
    assert_eq!(allowed(&limit, "a", 5).await, 3);
    clock.advance(Duration::from_secs(2));
    limiter.settle().await;
    assert_eq!(*told.lock().unwrap(), [3, 2, 0, 0]);
}

/// The store answers questions and refuses charges: each of them gave the key another request on credit.
#[tokio::test]
async fn store_that_refuses_to_charge_gives_a_closed_leaky_bucket_no_credit_again() {
    let server = RedisServer::start();
    let limit = Limit::new("x", LeakyBucket::per_second(100)).outage(OutagePolicy::Closed);
    let limiter = Limiter::builder().limit(limit).store(redis(&server)).build().unwrap();
    limiter.ready(Duration::from_secs(20)).await.unwrap();
    let limit = limiter.limit("x").unwrap();
    assert!(limit.check_sure("a").await.is_allowed());
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let mut admitted = 0;
    for _ in 0..150 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        admitted += u32::from(limit.check("a").is_allowed());
    }
    assert!(admitted <= 1, "{admitted} of 150");
}

#[tokio::test]
async fn silent_store_delays_a_caller_now_and_then() {
    let server = RedisServer::start();
    let wait = Duration::from_millis(200);
    let limit = Limit::new("x", Quota::per_hour(100)).exact().max_wait(wait);
    let limit = on(Limiter::builder().limit(limit).store(redis(&server)));
    // The first call connects.
    until_sure(&limit).await;
    server.stop();
    let begin = std::time::Instant::now();
    for _ in 0..200 {
        assert!(!limit.check_sure("a").await.is_sure());
    }
    let waited = begin.elapsed();
    assert!(waited >= wait && waited < 10 * wait, "{waited:?}");
    server.cont();
    until_sure(&limit).await;
}

async fn until_sure(limit: &AsyncLimit) {
    let begin = std::time::Instant::now();
    while !limit.check_sure("a").await.is_sure() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the store does not decide");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// It read this node's share, and took its clock for the store's.
#[tokio::test]
async fn peek_of_a_caller_who_would_wait_is_the_stores() {
    let store = MemoryStore::new();
    let nodes = [0, 1].map(|_| {
        let limit = exact(SlidingLog::per_hour(100));
        on(Limiter::builder().limit(limit).store(store.clone()).max_nodes(50))
    });
    assert_eq!(allowed(&nodes[0], "a", 30).await, 30);
    let peek = nodes[1].until_ready_n("a", 0, Duration::from_secs(1)).await.unwrap();
    assert_eq!((peek.remaining(), peek.store_time().is_some()), (70, true));
}

#[tokio::test]
async fn slots_ahead_are_waited_for_and_those_beyond_the_queue_denied_at_once() {
    let server = RedisServer::start();
    let rule = LeakyBucket::per_second(5).queue(Duration::from_millis(360));
    let limit = on(Limiter::builder().limit(exact(rule)).store(redis(&server)));
    let mut delays = Vec::new();
    for _ in 0..3 {
        let decision = limit.schedule("a").await;
        delays.push(decision.is_allowed().then(|| decision.delay()));
    }
    assert_eq!(delays[0], Some(Duration::ZERO));
    assert!(delays[1] > Some(Duration::from_millis(120)), "{delays:?}");
    assert_eq!(delays[2], None);
    let begin = std::time::Instant::now();
    let (one, two, three) = tokio::join!(
        limit.until_ready("b", Duration::from_secs(9)),
        limit.until_ready("b", Duration::from_secs(9)),
        limit.until_ready("b", Duration::from_secs(9)),
    );
    let allowed = [&one, &two, &three].iter().filter(|one| one.is_allowed()).count();
    assert_eq!(allowed, 2);
    assert!(begin.elapsed() >= Duration::from_millis(199), "{:?}", begin.elapsed());
    let waited =
        on(Limiter::builder().limit(exact(SlidingLog::new(1, PAUSE))).store(redis(&server)));
    assert!(waited.until_ready("c", Duration::ZERO).await.is_allowed());
    let begin = std::time::Instant::now();
    assert!(waited.until_ready("c", Duration::from_secs(9)).await.is_allowed());
    assert!(begin.elapsed() >= Duration::from_millis(190), "{:?}", begin.elapsed());
}

/// What a user needs for limits of any kind but sliding logs, and for those.
const COMMANDS: [&str; 16] = [
    "+pttl",
    "+evalsha",
    "+eval",
    "+time",
    "+get",
    "+getrange",
    "+mget",
    "+type",
    "+set",
    "+setrange",
    "+zadd",
    "+zrem",
    "+zcard",
    "+zremrangebyscore",
    "+pexpire",
    "+hello",
];
const LOG_COMMANDS: [&str; 6] = ["+lindex", "+llen", "+lrange", "+ltrim", "+lset", "+rpush"];

#[tokio::test]
async fn documented_commands_suffice_and_a_missing_one_is_reported() {
    let server = RedisServer::start();
    let user = ["ACL", "SETUSER", "me", "on", ">pw", "~tg2:{tidegate/*"];
    server.command(&[&user[..], &COMMANDS, &LOG_COMMANDS].concat());
    let address = format!("redis://me:pw@127.0.0.1:{}", server.port());
    let store = || RedisStore::open(&address).unwrap().timeout(Duration::from_secs(2));
    for rule in rules() {
        let events = Events::default();
        let builder = Limiter::builder().limit(exact(rule)).store(store());
        let limiter = builder.listen(events.listener()).build().unwrap();
        limiter.ready(Duration::from_secs(20)).await.unwrap();
        // With a record and without.
        for _ in 0..2 {
            let decision = limiter.async_limit("x").unwrap().check_sure("a").await;
            assert!(decision.is_sure(), "{rule:?}: {decision:?}");
        }
        assert_eq!(events.count(|event| matches!(event, Event::StoreDown { .. })), 0);
    }
    for missing in ["-rpush", "-lrange", "-pexpire", "-lindex"] {
        let (events, rule) = (Events::default(), SlidingLog::per_minute(5));
        let builder = Limiter::builder().limit(exact(rule)).store(store()).max_nodes(5);
        let limit = on(builder.listen(events.listener()));
        server.command(&["ACL", "SETUSER", "me", missing]);
        for _ in 0..3 {
            assert!(!limit.check_sure("b").await.is_sure(), "{missing}");
        }
        let told =
            |event: &Event| matches!(event, Event::NotDecided { error: StoreError::Denied(_), .. });
        assert_eq!(events.count(told), 1, "{missing}");
        let left = server.command(&["PTTL", "tg2:{tidegate/sl:x:b}"]);
        assert_ne!(left, "-1", "{missing}: what is written expires");
        server.command(&["ACL", "SETUSER", "me", &missing.replace('-', "+")]);
        server.command(&["FLUSHALL"]);
        assert!(limit.check_sure("b").await.is_sure(), "{missing}");
    }
}

/// As good as no refill, and no window that ends: what is charged is what was allowed and used.
fn year_rules() -> [(Rule, u64); 4] {
    let year = Duration::from_secs(366 * 24 * 3600);
    [
        (Quota::new(1, year / 200).burst(150).into(), 150),
        (FixedWindow::new(100, year).into(), 100),
        (SlidingWindow::new(110, year).into(), 110),
        (SlidingLog::new(120, year).into(), 120),
    ]
}

/// What a key has left, once what goes back has arrived.
async fn left_in_the_end(limit: &AsyncLimit, expected: u64) -> u64 {
    let mut left = 0;
    for _ in 0..500 {
        left = limit.check_sure_n("key", 0).await.unwrap().remaining();
        if left == expected {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    left
}

/// Nodes decide by a group of four limits and reserve of each, at the same time, and spend what is left at the end.
#[tokio::test]
async fn exact_limits_of_a_group_are_charged_by_redis_for_what_all_allowed_and_for_nothing_else() {
    const NAMES: [&str; 4] = ["bucket", "fixed", "sliding", "log"];
    let server = RedisServer::start();
    let nodes: Vec<Limiter> = (0..3)
        .map(|_| {
            let limits = NAMES.iter().zip(year_rules()).map(|(name, (rule, _))| {
                Limit::new(*name, rule).exact().max_wait(Duration::from_secs(5))
            });
            let builder = Limiter::builder().store(redis(&server));
            limits.fold(builder, Builder::limit).build().unwrap()
        })
        .collect();
    let group = |node: usize| nodes[node].async_group(NAMES).unwrap();
    let groups = [group(0), group(1), group(2)];
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut together, mut alone, mut denied) = (0, [0_u64; 4], 0);
    for _ in 0..100 {
        let index = rng.usize(..4);
        let limit = nodes[rng.usize(..3)].async_limit(NAMES[index]).unwrap();
        let costs: [u32; 3] = std::array::from_fn(|_| rng.u32(1..3));
        let [a, b, c] = &groups;
        let (a, b, c, reserved) = tokio::join!(
            a.check_sure_n("key", costs[0]),
            b.check_sure_n("key", costs[1]),
            c.check_sure_n("key", costs[2]),
            limit.reserve("key", 3)
        );
        for (decision, cost) in [a, b, c].into_iter().zip(costs) {
            let is_allowed = decision.unwrap().is_allowed();
            together += if is_allowed { u64::from(cost) } else { 0 };
            denied += u32::from(!is_allowed);
        }
        if let Ok(reservation) = reserved {
            let used = rng.u32(0..=3);
            reservation.commit(used);
            alone[index] += u64::from(used);
        }
    }
    assert!(denied > 50 && together > 20, "{denied} denied, {together} together");
    for (index, (_, tokens)) in year_rules().into_iter().enumerate() {
        let limit = nodes[0].async_limit(NAMES[index]).unwrap();
        let expected = tokens - together - alone[index];
        let left = left_in_the_end(&limit, expected).await;
        assert_eq!(left, expected, "{}: {together} together, {alone:?} alone", NAMES[index]);
    }
}
