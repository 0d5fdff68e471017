//! The script on a real Redis and its reference are the same machine.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use redis::{Commands, Script};

use super::*;
use crate::store::redis::overrides::{TEXT, keys};
use crate::store::redis_server::RedisServer;

const OPERATIONS: u64 = 50_000;
const BEGIN_US: u64 = 1_700_000_000_000_000;
/// So few that pages end and room runs out all the time.
const SMALL_PAGE: usize = 3;
const SMALL_MOST: usize = 12;

/// The script, which takes the time for its last two arguments: seconds since 1970, and microseconds.
fn script_by_given_time() -> Script {
    let asks_time = "call('TIME')";
    assert_eq!(TEXT.matches(asks_time).count(), 1, "the script asks for the time once");
    Script::new(&TEXT.replace(asks_time, "{ ARGV[#ARGV - 1], ARGV[#ARGV] }"))
}

/// The script and its reference, side by side.
struct Pair {
    _server: RedisServer,
    connection: redis::Connection,
    script: Script,
    model: OverridesModel,
}

impl Pair {
    fn new() -> Self {
        let server = RedisServer::start();
        let connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let (script, model) = (script_by_given_time(), OverridesModel::default());
        Self { _server: server, connection, script, model }
    }

    fn call(&mut self, request: &OverridesRequest, now_us: u64) -> OverridesReply {
        let mut call = self.script.prepare_invoke();
        for key in keys("x") {
            call.key(key);
        }
        for argument in request.arguments_with(SMALL_PAGE, SMALL_MOST) {
            call.arg(argument);
        }
        call.arg(now_us / 1_000_000).arg(now_us % 1_000_000);
        let reply: Vec<u8> = call.invoke(&mut self.connection).unwrap();
        let reply = OverridesReply::decode(&reply).unwrap();
        let expected = self.model.call_with(request, now_us, SMALL_PAGE, SMALL_MOST);
        assert_eq!(reply, expected, "{request:?} at {now_us}");
        reply
    }

    /// The server loses one of its keys, or all.
    fn lose(&mut self, key: Option<usize>) {
        match key {
            Some(key) => self.connection.del::<_, ()>(&keys("x")[key]).unwrap(),
            None => redis::cmd("FLUSHALL").query(&mut self.connection).unwrap(),
        }
        self.model = OverridesModel::default();
    }
}

fn random_put(random: &mut fastrand::Rng, now_ms: u64) -> Put {
    let kind = if random.u32(..10) == 0 { 's' } else { 'k' };
    let name = format!("{kind}:x:{}", random.u32(..20)).into_bytes();
    let value = [&b""[..], b"allow", b"block", b"of another version"][random.usize(..4)].to_vec();
    let end = match random.u32(..4) {
        0 => End::At(now_ms.saturating_sub(1000) + random.u64(..5000)),
        1 => End::After(random.u64(1..5000)),
        _ => End::Never,
    };
    Put { name, value, end, is_restored: random.u32(..5) == 0 }
}

#[test]
fn random_calls_have_the_same_replies_by_the_script_and_by_its_reference() {
    let (mut pair, mut random) = (Pair::new(), fastrand::Rng::with_seed(7));
    // What three nodes know, of which each asks in its own time.
    let (mut known, mut reads_all) = ([Known::default(); 3], [false; 3]);
    let (mut now_us, mut lost, mut full) = (BEGIN_US, 0, 0);
    for _ in 0..OPERATIONS {
        now_us = match random.u32(..100) {
            0..50 => now_us,
            50..95 => now_us + random.u64(..2_000_000),
            95..97 => now_us + random.u64(..2_000_000_000),
            _ => now_us.saturating_sub(random.u64(..2_000_000)),
        };
        if random.u32(..500) == 0 {
            pair.lose([Some(0), Some(1), None][random.usize(..3)]);
        }
        let node = random.usize(..3);
        let puts = (0..random.u32(..4)).map(|_| random_put(&mut random, now_us / 1000));
        let puts: Vec<Put> = puts.collect();
        let request = OverridesRequest { known: known[node], reads_all: reads_all[node], puts };
        let reply = pair.call(&request, now_us);
        lost += u32::from(reply.has_lost);
        full += u32::from(reply.taken < request.puts.len());
        (known[node], reads_all[node]) = (reply.known, reply.has_more);
    }
    assert!(lost > 20 && full > 100, "{lost} losses, {full} without room");
}

#[test]
fn node_that_was_away_for_longer_than_removals_are_kept_reads_all() {
    let mut pair = Pair::new();
    let put = |value: &[u8]| Put {
        name: b"k:x:a".to_vec(),
        value: value.to_vec(),
        end: End::Never,
        is_restored: false,
    };
    let request = |known, puts| OverridesRequest { known, reads_all: false, puts };
    let set = pair.call(&request(Known::default(), vec![put(b"block")]), BEGIN_US);
    let removed = pair.call(&request(set.known, vec![put(b"")]), BEGIN_US);
    assert_eq!((removed.begins_anew, &removed.told[0].value), (false, &Vec::new()));
    let later = BEGIN_US + 1000 * (REMOVED_MS + 1);
    let other = pair.call(&request(removed.known, Vec::new()), later);
    assert!(!other.begins_anew, "it knows all");
    let back = pair.call(&request(set.known, Vec::new()), later);
    assert!(back.begins_anew && !back.has_lost && back.told.is_empty(), "{back:?}");
}

/// One that replaced another and ended within a poll was never told: the other one held for ever.
#[test]
fn node_hears_of_an_override_that_was_replaced_and_has_ended_since() {
    let mut pair = Pair::new();
    let put = |value: &[u8], end| Put {
        name: b"k:x:a".to_vec(),
        value: value.to_vec(),
        end,
        is_restored: false,
    };
    let request = |known, puts| OverridesRequest { known, reads_all: false, puts };
    let first = pair.call(&request(Known::default(), vec![put(b"allow", End::Never)]), BEGIN_US);
    let replaced = vec![put(b"block", End::After(1))];
    pair.call(&request(Known::default(), replaced), BEGIN_US);
    let later = pair.call(&request(first.known, Vec::new()), BEGIN_US + 10_000);
    assert!(later.begins_anew && later.told.is_empty(), "{later:?}");
}

/// New names took the numbers of lost ones, so that nobody heard of them.
#[test]
fn store_that_went_back_gives_no_number_again() {
    let mut pair = Pair::new();
    let put = |name: &[u8]| Put {
        name: name.to_vec(),
        value: b"block".to_vec(),
        end: End::Never,
        is_restored: false,
    };
    let request = |known, puts| OverridesRequest { known, reads_all: false, puts };
    let known = pair.call(&request(Known::default(), vec![put(b"k:x:a")]), BEGIN_US).known;
    let lost = Known { number: known.number + 1, ..known };
    let after = pair.call(&request(lost, vec![put(b"k:x:b")]), BEGIN_US + 5);
    assert!(after.has_lost && after.begins_anew && after.told.len() == 2, "{after:?}");
    // Only the first node found out: others went on with what had been changed since the older state.
    let other = pair.call(&request(lost, Vec::new()), BEGIN_US + 6);
    assert!(other.has_lost && other.begins_anew && other.told.len() == 2, "{other:?}");
    assert_eq!(other.known, after.known);
    let again = pair.call(&request(other.known, Vec::new()), BEGIN_US + 7);
    assert!(!again.has_lost && !again.begins_anew && again.told.is_empty(), "{again:?}");
}
