//! The store against a real server: what it answers, and what it does when the server does not.

use std::sync::Arc;
use std::time::Duration;

use super::RedisStore;
use crate::error::StoreError;
use crate::store::Store;
use crate::store::redis_server::RedisServer;
use crate::sync::message::{BatchVerdict, Header, InstanceId, Knowledge, Reply, Request, Times};

/// Long enough for a busy machine, short enough to wait for.
const TIMEOUT: Duration = Duration::from_millis(300);
const LANES: u32 = 16;

fn batch(lane: u32, instance: InstanceId) -> Arc<Request> {
    batch_of(lane, instance, Knowledge::default())
}

fn batch_of(lane: u32, instance: InstanceId, knowledge: Knowledge) -> Arc<Request> {
    let header = Header {
        lane,
        lanes: LANES,
        instance,
        incarnation: None,
        sequence: 1,
        times: Times { silence_us: 1_000_000, alive_us: 1_000_000, ..Times::default() },
        knowledge,
        limits: vec!["api".into()],
    };
    Arc::new(Request::new(header, Vec::new()))
}

fn open(address: &str) -> RedisStore {
    RedisStore::open(address).unwrap().timeout(TIMEOUT)
}

async fn send(store: &RedisStore, lane: u32) -> Result<Reply, StoreError> {
    store.exchange(batch(lane, [lane as u8; 16])).await
}

fn is_applied(answer: &Result<Reply, StoreError>) -> bool {
    matches!(answer, Ok(Reply { verdict: BatchVerdict::Applied(_), .. }))
}

/// Sends until an answer comes; the harness has its own deadline for a server that never starts.
async fn send_until_applied(store: &RedisStore) {
    let mut answer = send(store, 0).await;
    for _ in 0..20 {
        if is_applied(&answer) {
            return;
        }
        answer = send(store, 0).await;
    }
    panic!("no answer: {answer:?}");
}

/// Connections of named clients: of stores, not of the harness.
fn connections(server: &RedisServer) -> usize {
    let clients = server.command(&["CLIENT", "LIST"]);
    clients.lines().filter(|line| !line.contains("cmd=client")).count()
}

#[tokio::test]
async fn all_lanes_and_clones_share_one_connection() {
    let server = RedisServer::start();
    let store = open(&server.url());
    let mut tasks = tokio::task::JoinSet::new();
    for lane in 0..LANES {
        let store = store.clone();
        tasks.spawn(async move { send(&store, lane).await });
    }
    while let Some(answer) = tasks.join_next().await {
        let answer = answer.unwrap();
        assert!(is_applied(&answer), "{answer:?}");
    }
    assert_eq!(connections(&server), 1, "{}", server.command(&["CLIENT", "LIST"]));
}

#[tokio::test]
async fn another_programs_value_in_place_of_the_nodes_of_a_limit_is_named() {
    let server = RedisServer::start();
    let key = "tg2:{tidegate/0}:limit:api".to_owned();
    server.command(&["SET", &key, "theirs"]);
    let expected = StoreError::ForeignKey { key, found: "string".to_owned() };
    assert_eq!(send(&open(&server.url()), 0).await, Err(expected));
    assert_eq!(server.command(&["GET", "tg2:{tidegate/0}:limit:api"]).trim(), "theirs");
}

#[tokio::test]
async fn server_that_lost_its_scripts_is_given_them_again() {
    let server = RedisServer::start();
    let store = open(&server.url());
    for lane in 0..3 {
        let answer = send(&store, lane).await;
        assert!(is_applied(&answer), "{answer:?}");
        server.command(&["SCRIPT", "FLUSH"]);
    }
}

#[tokio::test]
async fn frozen_server_times_out_and_the_same_batch_is_applied_once_when_it_goes_on() {
    let server = RedisServer::start();
    let store = open(&server.url());
    let first = send(&store, 0).await.unwrap();
    server.stop();
    for _ in 0..5 {
        let answer = send(&store, 1).await;
        assert!(matches!(answer, Err(StoreError::TimedOut(_))), "{answer:?}");
    }
    server.cont();
    let mut answer = send(&store, 0).await;
    for _ in 0..20 {
        if answer.is_ok() {
            break;
        }
        answer = send(&store, 0).await;
    }
    assert_eq!(answer, Ok(first), "a resend is answered as the first time");
}

#[tokio::test]
async fn server_that_dies_is_unreachable_and_found_again_when_it_is_back() {
    let mut server = RedisServer::start();
    let store = open(&server.url());
    send_until_applied(&store).await;
    server.kill();
    let broken = send(&store, 0).await;
    assert!(matches!(broken, Err(StoreError::Unreachable(_))), "{broken:?}");
    let refused = send(&store, 0).await;
    assert!(matches!(refused, Err(StoreError::Unreachable(_))), "{refused:?}");
    server.restart();
    send_until_applied(&store).await;
}

#[tokio::test]
async fn connection_that_the_server_closed_is_replaced() {
    let server = RedisServer::start();
    let store = open(&server.url());
    send_until_applied(&store).await;
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    let _ = send(&store, 0).await;
    send_until_applied(&store).await;
}

#[tokio::test]
async fn server_that_cannot_write_says_so() {
    let server = RedisServer::start();
    let store = open(&server.url());
    send_until_applied(&store).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = send(&store, 1).await;
    assert!(matches!(full, Err(StoreError::ReadOnly(_))), "{full:?}");
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    server.command(&["CONFIG", "SET", "replica-serve-stale-data", "yes"]);
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let replica = send(&store, 1).await;
    assert!(matches!(replica, Err(StoreError::ReadOnly(_))), "{replica:?}");
    server.command(&["REPLICAOF", "NO", "ONE"]);
    send_until_applied(&store).await;
}

#[tokio::test]
async fn wrong_credentials_are_reported_and_a_callbacks_new_ones_are_used() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let address = format!("127.0.0.1:{}", server.port());
    for wrong in [format!("redis://{address}"), format!("redis://:wrong@{address}")] {
        let refused = send(&open(&wrong), 0).await;
        assert!(matches!(refused, Err(StoreError::Credentials(_))), "{refused:?}");
    }
    let answer = send(&open(&format!("redis://:right@{address}")), 0).await;
    assert!(is_applied(&answer), "{answer:?}");

    let passwords = Arc::new(std::sync::Mutex::new(vec!["right", "wrong"]));
    let left = passwords.clone();
    let store = open(&format!("redis://{address}"))
        .credentials(move || (None, left.lock().unwrap().pop().unwrap_or("none").to_owned()));
    let refused = send(&store, 0).await;
    assert!(matches!(refused, Err(StoreError::Credentials(_))), "{refused:?}");
    let answer = send(&store, 0).await;
    assert!(is_applied(&answer), "{answer:?}");
}

/// What [`StoreError::Denied`] advises users to allow, as ACL rules.
const ALLOWED: [&str; 16] = [
    "-@all",
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
    "+zcard",
    "+zrem",
    "+zremrangebyscore",
    "+pexpire",
    "~tg2:{tidegate/*",
];

#[tokio::test]
async fn user_with_the_commands_that_are_documented_suffices_and_one_less_is_denied() {
    let server = RedisServer::start();
    let mut user = vec!["ACL", "SETUSER", "me", "on", ">pw"];
    user.extend(ALLOWED);
    assert_eq!(server.command(&user), "OK");
    let address = format!("redis://me:pw@127.0.0.1:{}", server.port());
    let answer = send(&open(&address), 0).await;
    assert!(is_applied(&answer), "{answer:?}");
    for rule in &ALLOWED[1..15] {
        let removed = rule.replace('+', "-");
        server.command(&["ACL", "SETUSER", "me", &removed]);
        server.command(&["SCRIPT", "FLUSH"]);
        // Only a node that leaves is taken off the list of nodes.
        let knowledge = Knowledge { leaving: *rule == "+zrem", ..Knowledge::default() };
        let lane = batch_of(1, [9; 16], knowledge);
        let denied = open(&address).exchange(lane).await;
        // A node's first batch is no resend.
        let unused = *rule == "+get";
        match denied {
            Err(StoreError::Denied(_)) => assert!(!unused, "{rule}"),
            other => assert!(unused, "{rule}: {other:?}"),
        }
        server.command(&["ACL", "SETUSER", "me", rule]);
        server.command(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn connection_of_the_users_own_serves_too() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let store = RedisStore::with_connection(connection).timeout(TIMEOUT);
    let answer = send(&store, 0).await;
    assert!(is_applied(&answer), "{answer:?}");
}

#[tokio::test]
async fn resp3_and_sockets_serve_too() {
    let server = RedisServer::start_with(&["--unixsocket", "socket"]);
    let socket = format!("unix://{}/socket", server.directory().display());
    for address in [format!("{}/?protocol=resp3", server.url()), socket] {
        let answer = send(&open(&address), 0).await;
        assert!(is_applied(&answer), "{address}: {answer:?}");
    }
}
