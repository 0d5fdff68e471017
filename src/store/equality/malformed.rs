//! Batches that no node sends: the script refuses them by an error of its own.

use redis::Commands;

use super::{World, three_keys};
use crate::sync::message::Request;

/// Where the numbers of the head stand, in bytes: 16, then 40 bytes of names.
const LANES_AT: usize = 8;
const SILENCE_AT: usize = 5 * 8;
const QUOTAS_AT: usize = 168;
/// A quota has two letters and six numbers.
const QUOTA_BYTES: usize = 50;

/// A batch of three keys, and a server that has seen nothing.
fn template() -> (World, std::sync::Arc<Request>, Vec<Vec<u8>>) {
    let mut world = World::new();
    let (request, names) = three_keys(&mut world);
    (world, request, names)
}

/// What the script answers to these bytes; it must be a refusal.
fn refusal(world: &mut World, names: &[Vec<u8>], batch: &[u8], hash: &[u8]) -> String {
    let script = redis::Script::new(crate::store::redis::SYNC_CODE);
    let mut call = script.prepare_invoke();
    call.key("{a}l").key("{a}n").key("{a}m").key(names).arg(batch).arg(hash);
    let refused = call.invoke::<redis::Value>(&mut world.raw).unwrap_err().to_string();
    assert!(refused.contains("REQUEST"), "{refused}");
    refused
}

fn with_number(request: &Request, at: usize, number: f64) -> Vec<u8> {
    let mut batch = request.bytes().to_vec();
    batch[at..at + 8].copy_from_slice(&number.to_le_bytes());
    batch
}

fn keys(world: &mut World) -> i64 {
    redis::cmd("DBSIZE").query(&mut world.raw).unwrap()
}

#[test]
fn batch_whose_parts_do_not_match_is_refused_before_anything_is_written() {
    let (mut world, request, names) = template();
    let (bytes, hash) = (request.bytes(), request.hash().to_le_bytes());
    let cases = [
        (&names[..2], bytes, &hash[..]),
        (&names[..], &bytes[..bytes.len() - 1], &hash[..]),
        (&names[..], &bytes[..10], &hash[..]),
        (&names[..], bytes, &hash[..7]),
    ];
    for (names, batch, hash) in cases {
        refusal(&mut world, names, batch, hash);
    }
    assert_eq!(keys(&mut world), 0);
}

#[test]
fn batch_with_a_head_of_other_than_natural_numbers_is_refused_before_anything_is_written() {
    let (mut world, request, names) = template();
    let hash = request.hash().to_le_bytes();
    for (at, number) in [
        (LANES_AT, 0.0),
        (LANES_AT, -28.0),
        (LANES_AT, 53e12),
        (SILENCE_AT, 0.5),
        (SILENCE_AT, -1.0),
        (SILENCE_AT, 1e300),
        (SILENCE_AT, f64::NAN),
        (SILENCE_AT, f64::INFINITY),
    ] {
        let refused = refusal(&mut world, &names, &with_number(&request, at, number), &hash);
        assert!(refused.contains("natural"), "{number} at {at}: {refused}");
    }
    assert_eq!(keys(&mut world), 0);
}

#[test]
fn batch_with_a_quota_that_is_none_is_refused_and_what_it_marked_expires() {
    let (mut world, request, names) = template();
    let hash = request.hash().to_le_bytes();
    let first_entry = QUOTAS_AT + request_quotas(&request) * QUOTA_BYTES;
    let mut unknown_quota = request.bytes().to_vec();
    unknown_quota[first_entry] = 200;
    let mut cases = vec![unknown_quota];
    for (number, value) in
        [(0, 0.0), (1, -1.0), (2, f64::NAN), (4, -1e300), (5, 0.0), (5, 6.0), (5, 1.5)]
    {
        cases.push(with_number(&request, QUOTAS_AT + 2 + number * 8, value));
    }
    for batch in cases {
        let refused = refusal(&mut world, &names, &batch, &hash);
        assert!(refused.contains("a quota that is none"), "{refused}");
        let ttl_ms: i64 = world.raw.pttl("{a}m").unwrap();
        assert!(ttl_ms > 0, "the members expire in {ttl_ms} ms");
        assert_eq!(keys(&mut world), 1, "nothing else was written");
    }
}

fn request_quotas(request: &Request) -> usize {
    let number = request.bytes()[13 * 8..].first_chunk().map(|bytes| f64::from_le_bytes(*bytes));
    number.expect("the head has 16 numbers") as usize
}
