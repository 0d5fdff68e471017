//! The script on a real Redis and its reference are the same machine, and never grant more than there is.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use redis::Script;

use super::*;
use crate::store::redis::exact::KEEP_BY_GIVEN_TIME_US;
use crate::store::redis::permits::script_by_given_time;
use crate::store::redis_server::RedisServer;
#[cfg(feature = "server")]
use crate::sync::PermitId;

const OPERATIONS: u64 = 30_000;
const BEGIN_US: u64 = 1_700_000_000_000_000;
/// A node's lease.
const LEASE_US: u64 = 2_000_000;

struct Pair {
    _server: RedisServer,
    connection: redis::Connection,
    script: Script,
    model: PermitModel,
}

impl Pair {
    fn new() -> Self {
        let server = RedisServer::start();
        let connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let (script, model) = (script_by_given_time(), PermitModel::default());
        Self { _server: server, connection, script, model }
    }

    /// Tells both, and compares their replies and records.
    fn tell(&mut self, request: &PermitRequest, time_us: u64) -> PermitReply {
        let key = request.key.to_vec();
        let mut call = self.script.prepare_invoke();
        call.key(&key).key(timed(&request.key));
        call.arg(request.bytes(KEEP_BY_GIVEN_TIME_US)).arg(time_us);
        let reply: Vec<u8> = call.invoke(&mut self.connection).unwrap();
        let (reply, _) = reply.as_chunks::<8>();
        let reply: Vec<f64> = reply.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let expected = self.model.reply(request, time_us);
        assert_eq!(reply, expected, "{request:?} at {time_us}");
        let record: Vec<u8> = redis::cmd("GET").arg(&key).query(&mut self.connection).unwrap();
        assert_eq!(record, self.record(request), "{request:?} at {time_us}");
        PermitReply::read(&expected).unwrap()
    }

    /// Releases timed permits, by both.
    #[cfg(feature = "server")]
    fn release(&mut self, key: u8, id: PermitId, time_us: u64) -> u32 {
        let script = crate::store::redis::permits::timed_script_by_given_time();
        let mut call = script.prepare_invoke();
        let reply: Vec<u8> =
            call.key(timed(&[key])).arg(&id).arg(time_us).invoke(&mut self.connection).unwrap();
        let request = TimedPermitRelease { limit: "x".into(), key: [key][..].into(), id };
        let expected = self.model.release(&request, time_us);
        assert_eq!(TimedPermitRelease::decode(&reply), Ok(expected), "{request:?} at {time_us}");
        expected
    }

    /// The model's record as the script writes it.
    fn record(&self, request: &PermitRequest) -> Vec<u8> {
        let name = (request.limit.clone(), request.key.clone());
        let mut bytes = b"P1".to_vec();
        for node in &self.model.records[&name].nodes {
            bytes.extend(node.instance);
            let numbers = [
                node.sequence,
                node.held,
                node.want,
                node.until_us,
                node.since_us,
                node.asked_us,
                node.above_us,
                node.give,
                node.give_us,
            ];
            bytes.extend(numbers.iter().flat_map(|&number| (number as f64).to_le_bytes()));
        }
        bytes
    }
}

/// Where the timed permits of a key are.
fn timed(key: &[u8]) -> Vec<u8> {
    [key, b":timed"].concat()
}

fn request(key: u8, node: u8, message: PermitMessage) -> PermitRequest {
    PermitRequest { limit: "x".into(), key: [key][..].into(), instance: [node; 16], message }
}

/// Permits that a node hands over, or none.
fn lots(random: &mut fastrand::Rng, last_id: &mut u128) -> Vec<TimedPermit> {
    let lots = if random.bool() { random.usize(..4) } else { 0 };
    let lot = |_| {
        *last_id += 1;
        let (permits, time_us) = (random.u32(1..4), random.u64(1..5_000_000));
        TimedPermit { id: last_id.to_le_bytes(), permits, time_us }
    };
    (0..lots).map(lot).collect()
}

/// Nodes with limits of their own tell random states, some of them late or twice, by a clock that jumps now and then.
#[test]
fn random_messages_through_model_and_script_give_equal_replies_and_records() {
    for (seed, nodes) in [(1, 4), (2, 4), (3, 17)] {
        let (mut pair, mut random) = (Pair::new(), fastrand::Rng::with_seed(seed));
        let (mut now, mut sequence, mut granted, mut given) = (BEGIN_US, 0, 0, 0_u64);
        let (mut last_id, mut taken_over) = (0_u128, 0);
        #[cfg_attr(not(feature = "server"), allow(unused_mut, reason = "none is released"))]
        let mut back = 0;
        for _ in 0..OPERATIONS {
            now = match random.u32(..100) {
                0..20 => now,
                20..70 => now + random.u64(..5_000),
                70..95 => now + random.u64(..60_000),
                95..98 => now + random.u64(..3_000_000),
                98 => now - random.u64(..100_000),
                _ => now - random.u64(..10_000_000),
            };
            sequence += random.u64(..3);
            let late = if random.u32(..20) == 0 { random.u64(..40) } else { 0 };
            let max = *random.choice(&[1, 3, 10, 10, 10, 100]).unwrap();
            let in_use = random.u32(..=max / 2);
            let want = in_use + random.u32(..=max);
            let timed = lots(&mut random, &mut last_id);
            let message = PermitMessage {
                sequence: (1_000 + sequence).saturating_sub(late),
                in_use,
                want: want.min(max.max(in_use)),
                least: random.u32(..3),
                waits: random.bool(),
                max,
                timed,
            };
            let reply = pair.tell(&request(random.u8(..3), random.u8(..nodes), message), now);
            granted += u64::from(reply.held.saturating_sub(in_use));
            given += u64::from(reply.give);
            taken_over += reply.taken_over;
            #[cfg(feature = "server")]
            if random.u32(..3) == 0 {
                let id = last_id.saturating_sub(random.u128(..16)).to_le_bytes();
                back += pair.release(random.u8(..3), id, now);
            }
        }
        println!(
            "{granted} granted, {given} to give back, {taken_over} taken_over, {back} given back"
        );
        assert!(
            taken_over > 100 && (back > 10 || cfg!(not(feature = "server"))),
            "{taken_over} {back}"
        );
        assert!(granted > OPERATIONS / 20 && given > OPERATIONS / 50, "{granted} {given}");
    }
}

/// Tells what a node has in use and wants, without and with callers who wait.
struct Teller {
    pair: Pair,
    sequence: u64,
    max: u32,
    /// What the next message hands over.
    timed: Vec<TimedPermit>,
}

impl Teller {
    fn new(max: u32) -> Self {
        Self { pair: Pair::new(), sequence: 0, max, timed: Vec::new() }
    }

    #[cfg(feature = "server")]
    fn hand_over(&mut self, id: u8, permits: u32, time_us: u64) {
        self.timed.push(TimedPermit { id: [id; 16], permits, time_us });
    }

    fn tell(&mut self, node: u8, in_use: u32, want: u32, waits: bool, now: u64) -> PermitReply {
        self.sequence += 1;
        let (sequence, max) = (self.sequence, self.max);
        let timed = std::mem::take(&mut self.timed);
        let message = PermitMessage { sequence, in_use, want, least: 1, waits, max, timed };
        self.pair.tell(&request(0, node, message), BEGIN_US + now)
    }
}

#[test]
fn permits_of_a_silent_node_are_free_after_its_lease_and_not_before() {
    let mut teller = Teller::new(10);
    assert_eq!(teller.tell(1, 0, 10, false, 0).held, 10);
    assert_eq!(teller.tell(2, 0, 10, false, LEASE_US - 1).held, 0);
    assert_eq!(teller.tell(2, 0, 10, false, LEASE_US).held, 10);
    // The first is back: nothing is granted until there are fewer than ten.
    let back = teller.tell(1, 10, 10, false, LEASE_US + 1);
    assert_eq!((back.held, back.held_by_all), (10, 20));
    assert_eq!(teller.tell(2, 2, 10, false, LEASE_US + 2).held, 2);
    assert_eq!(teller.tell(1, 7, 10, false, LEASE_US + 3).held, 8);
}

#[test]
fn free_permit_is_kept_for_the_node_that_waits_for_longest_while_it_asks() {
    let mut teller = Teller::new(1);
    assert_eq!(teller.tell(1, 0, 1, false, 0).held, 1);
    assert_eq!(teller.tell(2, 0, 1, true, 1000).held, 0);
    assert_eq!(teller.tell(3, 0, 1, true, 2000).held, 0);
    assert_eq!(teller.tell(1, 0, 0, false, 3000).held, 0);
    assert_eq!(teller.tell(3, 0, 1, true, 4000).held, 0, "it came later");
    assert_eq!(teller.tell(4, 0, 1, false, 5000).held, 0, "it does not wait");
    let mut later = teller.tell(3, 0, 1, true, 500_000);
    assert_eq!(later.held, 0, "the place is kept for 500 ms");
    later = teller.tell(3, 0, 1, true, 501_001);
    assert_eq!(later.held, 1, "the other does not ask any more");
}

#[test]
fn node_that_holds_more_than_its_part_is_told_to_give_back_what_another_lacks() {
    let mut teller = Teller::new(10);
    assert_eq!(teller.tell(1, 0, 10, true, 0).held, 10);
    assert_eq!(teller.tell(2, 0, 3, true, 1000).held, 0);
    let told = teller.tell(1, 10, 10, true, 2000);
    assert_eq!((told.give, told.give_in_us), (3, 0), "it wants no more than three");
    assert_eq!(teller.tell(1, 7, 10, true, 3000).held, 7, "they are taken_over for the other");
    assert_eq!(teller.tell(2, 0, 3, true, 4000).held, 3);
    assert_eq!(teller.tell(1, 7, 10, true, 5000).give, 0);
}

#[test]
fn permit_beyond_the_even_part_goes_round_after_its_time() {
    let mut teller = Teller::new(1);
    assert_eq!(teller.tell(1, 0, 1, true, 0).held, 1);
    assert_eq!(teller.tell(2, 0, 1, true, 1000).held, 0);
    let told = teller.tell(1, 1, 2, true, 10_000);
    assert_eq!((told.give, told.give_in_us), (1, 100_000));
    // The other is asked to look again when that is over.
    assert_eq!(teller.tell(2, 0, 1, true, 109_000).poll_us, 2_000);
    assert_eq!(teller.tell(1, 0, 1, true, 111_000).held, 0);
    assert_eq!(teller.tell(2, 0, 1, true, 112_000).held, 1);
}

#[test]
fn lower_limit_applies_at_once_and_stops_nobody() {
    let mut teller = Teller::new(10);
    assert_eq!(teller.tell(1, 0, 8, false, 0).held, 8);
    teller.max = 4;
    assert_eq!(teller.tell(2, 0, 1, false, 1).held, 0);
    assert_eq!(teller.tell(1, 4, 4, false, 2).held, 4);
    assert_eq!(teller.tell(2, 0, 1, false, 3).held, 0);
    assert_eq!(teller.tell(1, 3, 3, false, 4).held, 3);
    assert_eq!(teller.tell(2, 0, 1, false, 5).held, 1);
    teller.max = 6;
    assert_eq!(teller.tell(1, 3, 6, false, 6).held, 5);
}

#[cfg(feature = "server")]
#[test]
fn permits_that_no_node_renews_count_until_they_are_given_back_or_their_time_is_over() {
    let mut teller = Teller::new(4);
    assert_eq!(teller.tell(1, 0, 3, false, 0).held, 3);
    teller.hand_over(7, 2, 60_000_000);
    let told = teller.tell(1, 1, 1, false, 1);
    assert_eq!((told.taken_over, told.held, told.held_by_all), (2, 1, 3));
    assert_eq!(teller.tell(2, 0, 4, false, 2).held, 1, "nodes have what they leave");
    // Also when the node is silent.
    assert_eq!(teller.tell(2, 1, 4, false, 2 * LEASE_US).held, 2);
    assert_eq!(teller.pair.release(0, [7; 16], BEGIN_US + 2 * LEASE_US), 2);
    assert_eq!(teller.pair.release(0, [7; 16], BEGIN_US + 2 * LEASE_US), 0, "once");
    assert_eq!(teller.tell(2, 2, 4, false, 2 * LEASE_US + 1).held, 4);
    teller.hand_over(8, 4, 1_000);
    let told = teller.tell(2, 0, 0, false, 2 * LEASE_US + 2);
    assert_eq!((told.taken_over, told.held_by_all), (4, 4));
    assert_eq!(teller.tell(1, 0, 4, false, 2 * LEASE_US + 1_001).held, 0);
    assert_eq!(teller.tell(1, 0, 4, false, 2 * LEASE_US + 1_002).held, 4, "their time is over");
    // A node that does not hold them, by the record, keeps nothing.
    teller.hand_over(9, 1, 60_000_000);
    assert_eq!(teller.tell(2, 0, 0, false, 2 * LEASE_US + 1_003).taken_over, 0);
    assert_eq!(teller.pair.release(0, [9; 16], BEGIN_US + 2 * LEASE_US + 1_004), 0);
}

#[test]
fn malformed_reply_about_permits_is_an_error_with_field_and_value() {
    let numbers = |numbers: &[f64]| -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    };
    for reply in [
        Vec::new(),
        vec![0; 47],
        numbers(&[1.0, 1.0, 0.0, 0.0, 2000.0]),
        numbers(&[-1.0, 1.0, 0.0, 0.0, 2000.0, 0.0]),
        numbers(&[0.5, 1.0, 0.0, 0.0, 2000.0, 0.0]),
        numbers(&[f64::NAN, 1.0, 0.0, 0.0, 2000.0, 0.0]),
        numbers(&[1e10, 1.0, 0.0, 0.0, 2000.0, 0.0]),
        numbers(&[1.0, 1.0, 0.0, 0.0, 2000.0, 1e10]),
    ] {
        let error = PermitRequest::decode(&reply).unwrap_err();
        assert!(matches!(error, StoreError::Reply { field: "permits", .. }), "{error}");
    }
}
