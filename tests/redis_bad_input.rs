//! What users and servers get wrong, on a real Redis: each a typed error or event, and the limiter
//! goes on by its outage policy.
#![cfg(feature = "redis")]
#![allow(
    clippy::disallowed_methods,
    reason = "the servers are real, so their time is: tests poll it with a deadline"
)]

mod parts;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use parts::{Record, RedisServer};
use tidegate::{
    ActiveLimit, Builder, ConfigError, DEFAULT_LANES, Event, FixedWindow, Limit, Limiter,
    OutagePolicy, Quota, RedisStore, ResetError, Rule, StoreError, lane_of,
};

/// No server here hangs, so none is waited for so long; a new lane waits for two until it gives.
const STORE_TIMEOUT: Duration = Duration::from_millis(300);
/// Where a call that times out would be the failure that must not be, or hide the one that must.
const LONG_STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// For what must come.
const DEADLINE: Duration = Duration::from_secs(20);
/// For what is to fail, which is tried again until it fails for the right reason.
const PATIENCE: Duration = Duration::from_millis(200);
/// Between two looks at what a test waits for.
const POLL_GAP: Duration = Duration::from_millis(5);

// ---- parts -----------------------------------------------------------------------------------

fn store(address: &str) -> RedisStore {
    RedisStore::open(address).expect("a good address").timeout(STORE_TIMEOUT)
}

fn limit(quota: Quota) -> Limit {
    Limit::new("api", quota).sync_interval(Duration::from_millis(10)).outage(OutagePolicy::Open)
}

fn builder(store: RedisStore) -> Builder {
    Limiter::builder().limit(limit(Quota::per_second(100))).store(store)
}

async fn ready(builder: Builder) -> Limiter {
    builder.build_ready(DEADLINE).await.expect("a good store")
}

fn api(limiter: &Limiter) -> ActiveLimit {
    limiter.limit("api").expect("the limit is there")
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(POLL_GAP).await;
    }
}

/// Waits until more than any credit is admitted at once, again and again: the limit is open.
async fn until_open(limiter: &Limiter, key: &str) {
    let api = api(limiter);
    until("the limit goes on by its outage policy", || {
        (0..5).all(|_| api.check_n(key, 90).expect("check is no error").is_allowed())
    })
    .await;
}

/// Events that somebody listened to, without those that come all the time.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Event>>>);

impl Heard {
    fn ear(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let events = self.0.clone();
        move |event| match event {
            Event::Viewed { .. } | Event::State { .. } | Event::Synced { error: None, .. } => {}
            event => events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone()),
        }
    }

    fn any(&self, which: impl Fn(&Event) -> bool) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(which)
    }

    fn store_down(&self, which: impl Fn(&StoreError) -> bool) -> bool {
        self.any(|event| matches!(event, Event::StoreDown { error, .. } if which(error)))
    }
}

/// What the store keeps of a bucket, if anything.
fn record(server: &RedisServer, name: &str) -> Option<Record> {
    let mut connection = client(server).get_connection().expect("the server runs");
    let bytes: Option<Vec<u8>> =
        redis::cmd("GET").arg(name).query(&mut connection).expect("GET is answered");
    bytes.map(|bytes| Record::decode(&bytes).expect("a record of version 2"))
}

fn client(server: &RedisServer) -> redis::Client {
    redis::Client::open(server.url()).expect("a good address")
}

/// Where the default namespace keeps a key of limit `api`.
fn name_of(key: &str) -> String {
    let lane = lane_of("api", key.as_bytes(), DEFAULT_LANES);
    format!("tg2:{{tidegate/{lane}}}:key:api:{key}")
}

/// Some key of limit `api` that is in this lane.
fn key_in(wanted: u32) -> String {
    let mut keys = (0..1000).map(|number| format!("own:{number}"));
    let found = keys.find(|key| lane_of("api", key.as_bytes(), DEFAULT_LANES) == wanted);
    found.expect("a thousand keys leave no lane empty")
}

fn as_user(server: &RedisServer, rules: &[&str]) -> String {
    let mut command = vec!["ACL", "SETUSER", "me", "on", ">pw"];
    command.extend(rules);
    assert_eq!(server.command(&command), "OK");
    format!("redis://me:pw@127.0.0.1:{}", server.port())
}

/// Builds a limiter that insists on its store, until it is refused for the reason that is expected:
/// on a busy machine it may give up before the store has answered.
async fn refused(builder: impl Fn() -> Builder, which: impl Fn(&StoreError) -> bool) -> StoreError {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match builder().build_ready(PATIENCE).await {
            Err(ConfigError::Store(error)) if which(&error) => return error,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
}

/// A limiter that does not insist hears of the same error, and goes on by its policy.
async fn goes_on(store: RedisStore, which: impl Fn(&StoreError) -> bool) -> Limiter {
    let heard = Heard::default();
    let limiter =
        builder(store).listen(heard.ear()).build().expect("an unusable store is no error");
    until("the store is told to be down, and why", || heard.store_down(&which)).await;
    until_open(&limiter, "user").await;
    let deadline = Instant::now() + DEADLINE;
    loop {
        match limiter.ready(PATIENCE).await {
            Err(error) if which(&error) => return limiter,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
}

// ---- addresses and servers -------------------------------------------------------------------

#[test]
fn an_address_that_names_no_store_is_refused_at_once_and_its_password_is_not_told() {
    let addresses = ["", "redis://", "h:6379", "http://me:hunter2@h", "redis://me:hunter2@h:x"];
    for address in addresses {
        let Err(StoreError::Address { address: told, reason }) = RedisStore::open(address) else {
            panic!("{address}: accepted");
        };
        assert!(!reason.is_empty(), "{address}");
        assert!(!told.contains("hunter2") && !reason.contains("hunter2"), "{told}: {reason}");
    }
}

#[tokio::test]
async fn an_unreachable_store_is_fatal_to_those_who_insist_and_to_nobody_else() {
    let mut server = RedisServer::start();
    server.kill();
    let unreachable = |error: &StoreError| matches!(error, StoreError::Unreachable(_));
    refused(|| builder(store(&server.url())), unreachable).await;
    let limiter = goes_on(store(&server.url()), unreachable).await;
    server.restart();
    limiter.ready(DEADLINE).await.expect("a store that comes is used");
}

#[tokio::test]
async fn a_limit_that_never_reached_its_store_answers_by_its_outage_policy() {
    let mut server = RedisServer::start();
    server.kill();
    let quota = Quota::per_second(100);
    let named = |name, policy| Limit::new(name, quota).outage(policy).credit(0);
    let heard = Heard::default();
    let limiter = Limiter::builder()
        .limit(named("open", OutagePolicy::Open))
        .limit(named("closed", OutagePolicy::Closed))
        .limit(named("share", OutagePolicy::Share))
        .store(store(&server.url()))
        .max_nodes(4)
        .listen(heard.ear())
        .build()
        .expect("not fatal");
    until("StoreDown", || heard.store_down(|_| true)).await;
    let check = |name| limiter.limit(name).expect("it is there").check_n("user", 20);
    until("open admits", || check("open").expect("no error").is_allowed()).await;
    until("share admits a quarter", || check("share").expect("no error").is_allowed()).await;
    let decision = check("share").expect("no error");
    assert!(decision.is_denied() && !decision.is_sure(), "{decision:?}");
    assert!(check("closed").expect("no error").is_denied());
}

#[tokio::test]
async fn a_server_without_hello_is_too_old() {
    let server = RedisServer::start_with(&["--rename-command", "HELLO", ""]);
    let too_old = |error: &StoreError| matches!(error, StoreError::TooOld { .. });
    refused(|| builder(store(&server.url())), too_old).await;
    goes_on(store(&server.url()), too_old).await;
}

// ---- rights ----------------------------------------------------------------------------------

#[tokio::test]
async fn a_redis_that_denies_scripts_or_writes_or_keys_says_so_and_serves_once_it_allows_them() {
    let denied = |error: &StoreError| matches!(error, StoreError::Denied(_));
    let cases: [&[&str]; 3] =
        [&["~*", "+@all", "-@scripting"], &["~*", "+@all", "-@write"], &["~other:*", "+@all"]];
    let server = RedisServer::start();
    for rules in cases {
        server.command(&["ACL", "DELUSER", "me"]);
        let address = as_user(&server, rules);
        let error = refused(|| builder(store(&address)), denied).await;
        assert!(error.to_string().contains("EVALSHA"), "what to do: {error}");
        let limiter = goes_on(store(&address), denied).await;
        as_user(&server, &["resetkeys", "~*", "+@all"]);
        limiter.ready(DEADLINE).await.expect("allowed now");
    }
}

#[tokio::test]
async fn a_replica_cannot_write_and_serves_once_it_is_promoted() {
    let server = RedisServer::start();
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let read_only = |error: &StoreError| matches!(error, StoreError::ReadOnly(_));
    refused(|| builder(store(&server.url())), read_only).await;
    let limiter = goes_on(store(&server.url()), read_only).await;
    server.command(&["REPLICAOF", "NO", "ONE"]);
    limiter.ready(DEADLINE).await.expect("a primary now");
}

#[tokio::test]
async fn a_wrong_password_or_none_is_told() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let credentials = |error: &StoreError| matches!(error, StoreError::Credentials(_));
    for login in ["", ":wrong@", "nobody:right@"] {
        let address = format!("redis://{login}127.0.0.1:{}", server.port());
        refused(|| builder(store(&address)), credentials).await;
        goes_on(store(&address), credentials).await;
    }
    let address = format!("redis://:right@127.0.0.1:{}", server.port());
    ready(builder(store(&address))).await;
}

#[tokio::test]
async fn credentials_come_from_a_callback_at_each_connect() {
    let server = RedisServer::start();
    as_user(&server, &["~*", "+@all"]);
    server.command(&["ACL", "SETUSER", "default", "-@all", "+acl", "+client"]);
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let store = store(&server.url()).credentials(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        (Some("me".to_owned()), "pw".to_owned())
    });
    let limiter = ready(builder(store)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    server.command(&["CLIENT", "KILL", "USER", "me"]);
    until("asked again", || asked.load(Ordering::Relaxed) == 2).await;
    limiter.ready(DEADLINE).await.expect("connected again");
}

#[tokio::test]
async fn a_connection_of_the_users_own_serves() {
    let server = RedisServer::start();
    let connection = client(&server).get_multiplexed_async_connection().await.expect("it runs");
    let limiter = ready(builder(RedisStore::with_connection(connection))).await;
    assert!(api(&limiter).check("user").is_allowed());
    limiter.shutdown(DEADLINE).await.expect("the store is there");
    assert_eq!(record(&server, &name_of("user")).expect("it was told").charged(), 1);
}

// ---- what others keep there ------------------------------------------------------------------

#[tokio::test]
async fn a_node_with_another_number_of_lanes_is_refused_and_told_the_number() {
    let server = RedisServer::start();
    ready(builder(store(&server.url()))).await;
    refused(|| builder(store(&server.url())).lanes(4), |error| *error == OTHER_LANES).await;
}

const OTHER_LANES: StoreError = StoreError::Lanes { configured: 4, stored: DEFAULT_LANES };

#[tokio::test]
async fn a_node_with_another_number_of_lanes_goes_on_by_its_policy() {
    let server = RedisServer::start();
    ready(builder(store(&server.url()))).await;
    let heard = Heard::default();
    let other = builder(store(&server.url())).lanes(4).listen(heard.ear());
    let other = other.build().expect("not fatal");
    until("the error is told", || heard.store_down(|error| *error == OTHER_LANES)).await;
    until_open(&other, "user").await;
}

#[tokio::test]
async fn record_of_a_key_that_was_deleted_is_written_again_and_says_that_it_recovers() {
    let server = RedisServer::start();
    let limiter = ready(builder(store(&server.url()))).await;
    let name = name_of("user");
    let recovering = || record(&server, &name).map(|record| record.recovering_until_us());
    until("a record", || api(&limiter).check("user").is_allowed() && recovering() == Some(0)).await;
    assert_eq!(server.command(&["DEL", &name]), "1");
    until("another record, of a bucket that recovers", || {
        let _ = api(&limiter).check("user");
        recovering().is_some_and(|until_us| until_us > 0)
    })
    .await;
}

#[tokio::test]
async fn a_bucket_that_is_another_programs_value_is_told_and_left_alone() {
    let server = RedisServer::start();
    let list = name_of("listed");
    let text = name_of("written");
    server.command(&["RPUSH", &list, "theirs"]);
    server.command(&["SET", &text, "theirs"]);
    // As long as a record of ours, with its letters in front: an older layout, say.
    let alike = name_of("alike");
    let value = format!("T2{}", "A".repeat(160));
    server.command(&["SET", &alike, &value]);
    let heard = Heard::default();
    let limiter = ready(builder(store(&server.url())).listen(heard.ear())).await;
    for key in ["listed", "written", "alike"] {
        let told = |event: &Event| match event {
            Event::ForeignKey { error: StoreError::ForeignKey { key: told, .. } } => {
                told.contains(key)
            }
            _ => false,
        };
        let _ = api(&limiter).check(key);
        until("ForeignKey", || heard.any(told)).await;
        until_open(&limiter, key).await;
    }
    // The lane's other keys are not touched by it.
    let other = key_in(lane_of("api", b"listed", DEFAULT_LANES));
    assert!(api(&limiter).check(&other).is_allowed());
    until("charged", || {
        record(&server, &name_of(&other)).is_some_and(|record| record.charged() == 1)
    })
    .await;
    assert_eq!(server.command(&["LRANGE", &list, "0", "-1"]), "theirs");
    assert_eq!(server.command(&["GET", &text]), "theirs");
    assert_eq!(server.command(&["GET", &alike]), value);
}

/// It was said to have taken too long.
#[tokio::test]
async fn reset_of_an_exact_key_that_is_another_programs_value_says_so() {
    let server = RedisServer::start();
    let bucket = Limit::new("api", Quota::per_second(10)).exact();
    let limiter = Limiter::builder().limit(bucket).store(store(&server.url())).build().unwrap();
    limiter.ready(Duration::from_secs(10)).await.unwrap();
    let api = limiter.async_limit("api").unwrap();
    assert!(api.check_sure("key").await.is_sure());
    server.command(&["SET", "tg2:{tidegate/tb:api:key}", "theirs"]);
    let refused = api.reset("key").await.unwrap_err();
    let foreign = matches!(refused, ResetError::Store { error: StoreError::ForeignKey { .. }, .. });
    assert!(foreign, "{refused:?}");
}

#[tokio::test]
async fn those_who_wait_for_a_foreign_lane_are_told_of_it_though_other_lanes_serve() {
    let server = RedisServer::start();
    server.command(&["HSET", "tg2:{tidegate/3}:lane", "field", "theirs"]);
    let foreign = |error: &StoreError| matches!(error, StoreError::ForeignKey { .. });
    refused(|| builder(store(&server.url())), foreign).await;
    let heard = Heard::default();
    let store = store(&server.url()).timeout(LONG_STORE_TIMEOUT);
    let limiter = builder(store).listen(heard.ear()).build().expect("goes on");
    until("the error is told", || heard.store_down(|_| true)).await;
    let nodes = [limiter];
    let mut load = Load::new(20);
    for _ in 0..5 {
        // Asked while answers of the good lanes come in.
        let busy = load.press(&nodes, Duration::from_millis(200));
        let (told, _) = tokio::join!(nodes[0].ready(Duration::from_millis(100)), busy);
        assert!(told.as_ref().is_err_and(foreign), "{told:?}");
    }
}

#[tokio::test]
async fn a_lane_record_that_is_another_programs_value_is_told_and_left_alone() {
    let server = RedisServer::start();
    let name = "tg2:{tidegate/3}:lane";
    server.command(&["HSET", name, "field", "theirs"]);
    let theirs = |error: &StoreError| {
        let expected = StoreError::ForeignKey { key: name.to_owned(), found: "hash".to_owned() };
        *error == expected
    };
    let heard = Heard::default();
    let limiter = builder(store(&server.url())).listen(heard.ear()).build().expect("goes on");
    until("the error is told", || heard.store_down(theirs)).await;
    until_open(&limiter, &key_in(3)).await;
    let good = key_in(4);
    assert!(api(&limiter).check(&good).is_allowed());
    until("other lanes serve", || record(&server, &name_of(&good)).is_some()).await;
    assert!(limiter.ready(PATIENCE).await.is_err(), "not all lanes can be relied on");
    assert_eq!(server.command(&["HGET", name, "field"]), "theirs");
    server.command(&["DEL", name]);
    limiter.ready(DEADLINE).await.expect("the lane is free now");
}

#[tokio::test]
async fn namespaces_do_not_see_each_other() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(10);
    let node = |namespace: &str| {
        let store = store(&server.url()).namespace(namespace).expect("a good name");
        ready(Limiter::builder().limit(limit(quota)).store(store))
    };
    let (one, same, other) = (node("a").await, node("a").await, node("b").await);
    let admitted = |limiter: &Limiter| u32::from(api(limiter).check("user").is_allowed());
    let (mut in_a, mut in_b) = (0, 0);
    until("both namespaces give their whole burst", || {
        in_a += admitted(&one) + admitted(&same);
        in_b += admitted(&other);
        in_a >= 10 && in_b >= 10
    })
    .await;
    let nodes_of_a = 2;
    assert!(in_a <= 10 + nodes_of_a && in_b <= 10 + 1, "a {in_a}, b {in_b}");
    assert!(server.command(&["KEYS", "tg2:{tidegate/*"]).is_empty());
}

// ---- other quotas under one name -------------------------------------------------------------

/// Waits until the store keeps `user` as a limit of this burst and version.
async fn until_kept(server: &RedisServer, limiter: &Limiter, burst: i64, version: i64) {
    until("the store keeps the quota", || {
        let _ = api(limiter).check("user");
        record(server, &name_of("user"))
            .is_some_and(|record| (record.burst(), record.version() >> 27) == (burst, version))
    })
    .await;
}

/// Nobody has to count versions: the node that was asked for the key anew last has its way, and the other is told.
#[tokio::test]
async fn nodes_with_two_quotas_agree_on_the_one_that_was_asked_for_last() {
    let server = RedisServer::start();
    let heard = [Heard::default(), Heard::default()];
    let node = |quota, heard: &Heard| {
        let limiter = Limiter::builder().limit(limit(quota)).store(store(&server.url()));
        ready(limiter.listen(heard.ear()))
    };
    let first = node(Quota::per_second(100), &heard[0]).await;
    until_kept(&server, &first, 100, 0).await;
    let second = node(Quota::per_second(200), &heard[1]).await;
    until_kept(&server, &second, 200, 0).await;
    let told = |event: &Event| match event {
        Event::PlansDiffer { limit, named: None, stored_burst: 200, stored_per_second } => {
            &**limit == "api" && (stored_per_second - 200.0).abs() < 0.1
        }
        _ => false,
    };
    until("PlansDiffer", || {
        let _ = api(&first).check("user");
        heard[0].any(told)
    })
    .await;
    until("the first node is leased tokens", || {
        let decision = api(&first).check("user");
        decision.is_allowed() && decision.is_sure()
    })
    .await;
    until_kept(&server, &first, 200, 0).await;
    assert!(!heard[1].any(|event| matches!(event, Event::PlansDiffer { .. })));
}

#[tokio::test]
async fn node_with_another_algorithm_hears_of_a_quota_mismatch_and_follows_its_outage_policy() {
    let server = RedisServer::start();
    let heard = [Heard::default(), Heard::default()];
    let node = |rule: Rule, heard: &Heard| {
        let limit = Limit::new("api", rule).outage(OutagePolicy::Open);
        let limit = limit.sync_interval(Duration::from_millis(10));
        ready(Limiter::builder().limit(limit).store(store(&server.url())).listen(heard.ear()))
    };
    let first = node(Quota::per_second(100).into(), &heard[0]).await;
    until_kept(&server, &first, 100, 0).await;
    let second = node(FixedWindow::per_second(200).into(), &heard[1]).await;
    let _ = api(&second).check("user");
    let told = |event: &Event| match event {
        Event::QuotaMismatch {
            limit,
            configured_version: 0,
            stored_version: 0,
            stored_burst: 100,
            stored_per_second,
        } => &**limit == "api" && (stored_per_second - 100.0).abs() < 0.1,
        _ => false,
    };
    until("QuotaMismatch", || heard[1].any(told)).await;
    until_open(&second, "user").await;
    let mismatch = |event: &Event| matches!(event, Event::QuotaMismatch { .. });
    until_kept(&server, &first, 100, 0).await;
    assert!(!heard[0].any(mismatch), "the first node has the algorithm that is kept");
}

#[tokio::test]
async fn a_raised_version_is_adopted_by_the_store_and_by_older_nodes() {
    let server = RedisServer::start();
    let heard = [Heard::default(), Heard::default()];
    let node = |limit, heard: &Heard| {
        ready(Limiter::builder().limit(limit).store(store(&server.url())).listen(heard.ear()))
    };
    let old = node(limit(Quota::per_second(100)), &heard[0]).await;
    until_kept(&server, &old, 100, 0).await;
    let new = node(limit(Quota::per_second(200)).version(1), &heard[1]).await;
    until_kept(&server, &new, 200, 1).await;
    until("the older node is told", || {
        let _ = api(&old).check("user");
        heard[0].any(|event| matches!(event, Event::QuotaMismatch { stored_version: 1, .. }))
    })
    .await;
    until("the older node is leased tokens", || {
        let decision = api(&old).check("user");
        decision.is_allowed() && decision.is_sure()
    })
    .await;
    let all = (0..5).all(|_| api(&old).check_n("user", 90).expect("no error").is_allowed());
    assert!(!all, "it does not go on by its outage policy");
    until("the newer node is leased tokens of the newer quota", || {
        let decision = api(&new).check("user");
        decision.is_allowed() && decision.is_sure() && decision.burst() == 200
    })
    .await;
    let mismatch = |event: &Event| matches!(event, Event::QuotaMismatch { .. });
    assert!(!heard[1].any(mismatch));
}

// ---- a server that forgets -------------------------------------------------------------------

/// Between two rounds of requests.
const ROUND: Duration = Duration::from_millis(2);

/// Keys, and what was admitted of each.
struct Load {
    keys: Vec<String>,
    admitted: Vec<u64>,
}

impl Load {
    fn new(keys: usize) -> Self {
        let names = (0..keys).map(|key| format!("user:{key}")).collect();
        Self { keys: names, admitted: vec![0; keys] }
    }

    /// One request a node, key and round, for so long. Returns how long it took.
    async fn press(&mut self, nodes: &[Limiter], time: Duration) -> Duration {
        let apis: Vec<ActiveLimit> = nodes.iter().map(api).collect();
        let mut rounds = tokio::time::interval(ROUND);
        let start = Instant::now();
        while start.elapsed() < time {
            rounds.tick().await;
            for api in &apis {
                for (key, admitted) in self.keys.iter().zip(&mut self.admitted) {
                    *admitted += u64::from(api.check(key).is_allowed());
                }
            }
        }
        start.elapsed()
    }
}

#[tokio::test]
async fn forgotten_scripts_are_sent_again_and_nobody_notices() {
    let server = RedisServer::start();
    let heard = Heard::default();
    let limit = Limit::new("api", Quota::per_second(5000)).sync_interval(Duration::from_millis(10));
    let store = store(&server.url()).timeout(LONG_STORE_TIMEOUT);
    let limiter = Limiter::builder().limit(limit).store(store).listen(heard.ear());
    let nodes = [ready(limiter).await];
    let mut load = Load::new(1);
    for _ in 0..5 {
        load.press(&nodes, Duration::from_millis(100)).await;
        assert_eq!(server.command(&["SCRIPT", "FLUSH"]), "OK");
    }
    nodes[0].shutdown(DEADLINE).await.expect("the store is there");
    let failed = |event: &Event| matches!(event, Event::Synced { error: Some(_), .. });
    assert!(!heard.any(failed) && !heard.store_down(|_| true));
    let charged = record(&server, &name_of("user:0")).expect("it was told").charged();
    assert_eq!(charged, load.admitted[0]);
}

#[tokio::test]
async fn flushed_redis_is_rebuilt_by_its_nodes_and_gives_no_key_a_fresh_burst() {
    const NODES: u64 = 3;
    const RATE: u64 = 100;
    const BURST: u64 = 300;
    let server = RedisServer::start();
    let heard = Heard::default();
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        let limit = limit(Quota::per_second(RATE).burst(BURST)).outage(OutagePolicy::Share);
        let limiter = Limiter::builder().limit(limit).store(store(&server.url()));
        nodes.push(ready(limiter.listen(heard.ear())).await);
    }
    let mut load = Load::new(4);
    load.press(&nodes, Duration::from_secs(2)).await;
    for key in &load.admitted {
        assert!((BURST..).contains(key), "{:?}: a burst of each key", load.admitted);
    }
    for flushes in 1..=3 {
        assert_eq!(server.command(&["FLUSHALL"]), "OK");
        load.admitted.fill(0);
        let time = load.press(&nodes, Duration::from_secs(1)).await;
        let flowed = RATE * time.as_micros() as u64 / 1_000_000;
        // Each node may give its credit once more, and spend what it was leased before the flush.
        let most = flowed + NODES + RATE / 2;
        for key in &load.admitted {
            let case = format!("{:?} of {most} in {time:?} after flush {flushes}", load.admitted);
            assert!((flowed / 2..=most).contains(key), "{case}");
        }
    }
    assert!(heard.any(|event| matches!(event, Event::MemoryLost { .. })));
}
