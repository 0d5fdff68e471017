//! Batches for the script on a real server: sound ones, with parts replaced.

use redis::{ErrorKind, FromRedisValue, RedisError, Value};

use super::{Bytes, replace};
use crate::quota::{Curve, Scale};
use crate::store::redis::SYNC_CODE;
use crate::sync::message::{
    Backdated, Claim, Entry, Header, Held, Incarnation, Knowledge, NUMBER_MAX, Reply, Request,
    Times,
};

/// A server whose memory the target fills and empties.
pub struct Server {
    connection: redis::Connection,
    script: String,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Server").field("script", &self.script).finish_non_exhaustive()
    }
}

impl Server {
    /// The server at this address, which is not to be anybody else's: its memory is emptied.
    pub fn open(url: &str) -> Self {
        let client = redis::Client::open(url).expect("an address");
        let mut connection = client.get_connection().expect("the server answers");
        let load = redis::cmd("SCRIPT").arg("LOAD").arg(SYNC_CODE).query(&mut connection);
        Self { connection, script: load.expect("the script is loaded") }
    }

    fn query<T: FromRedisValue>(&mut self, command: &redis::Cmd) -> T {
        command.query(&mut self.connection).expect("the server takes every command")
    }

    fn sync(&mut self, names: &[String], batch: &[u8], hash: &[u8]) -> Result<Value, RedisError> {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.script).arg(names.len()).arg(names).arg(batch).arg(hash);
        command.query(&mut self.connection)
    }
}

/// Sends batches as `bytes` say. The script answers each with a reply that decodes, or with an error of its own, and
/// everything that it writes expires.
pub fn request(server: &mut Server, bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let (): () = server.query(&redis::cmd("FLUSHALL"));
    let mut sequence = 0;
    let mut incarnation = None;
    for _ in 0..4 {
        if bytes.is_empty() {
            break;
        }
        sequence += 1;
        let request = drawn(&mut bytes, sequence, incarnation);
        let mut names = names(&request);
        let mut batch = request.bytes().to_vec();
        let is_sound = !spoil(&mut bytes, &mut batch, &mut names);
        let answer = server.sync(&names, &batch, &request.hash().to_le_bytes());
        match answer {
            Ok(Value::BulkString(reply)) => {
                if is_sound {
                    let reply = Reply::decode(&reply, &request.entries, request.limits.len())
                        .expect("the reply to a sound batch decodes");
                    incarnation = Some(reply.incarnation);
                }
            }
            Ok(other) => panic!("the script answered {other:?}"),
            Err(error) => {
                let is_ours =
                    error.kind() == ErrorKind::Extension && error.code() == Some("TIDEGATE");
                assert!(is_ours && !is_sound, "the script failed: {error}");
            }
        }
    }
    let names: Vec<String> = server.query(redis::cmd("KEYS").arg("*"));
    for name in names {
        let ttl_ms: i64 = server.query(redis::cmd("PTTL").arg(&name));
        assert!(ttl_ms > 0, "{name} does not expire: {ttl_ms}");
    }
}

/// Replaces parts of the batch; whether any.
fn spoil(bytes: &mut Bytes<'_>, batch: &mut Vec<u8>, names: &mut Vec<String>) -> bool {
    let changes = bytes.byte() % 4;
    for _ in 0..changes {
        match bytes.byte() % 8 {
            // A number of the head or of the first quota. Those of entries are drawn from all that there can be, and
            // the script relies on their bounds.
            0..=3 => {
                let number = bytes.wire_number();
                let head = !bytes.one_in(4);
                let at = if head { 8 * bytes.below(16) } else { 168 + 2 + 8 * bytes.below(6) };
                replace(batch, at, &number);
            }
            // The first entry's quota or flags.
            4 => {
                let at = 168 + 50 + bytes.below(2);
                replace(batch, at, &[bytes.byte()]);
            }
            5 => batch.truncate(bytes.below(batch.len() + 1)),
            6 => batch.extend(bytes.take::<8>()),
            _ => drop(names.pop()),
        }
    }
    changes > 0
}

/// A batch that a node might send.
fn drawn(bytes: &mut Bytes<'_>, sequence: i64, incarnation: Option<Incarnation>) -> Request {
    let instance = [bytes.byte() % 2; 16];
    let header = Header {
        lane: 0,
        lanes: 1,
        instance,
        incarnation: incarnation.filter(|_| !bytes.one_in(4)),
        sequence: if bytes.one_in(4) { amount(bytes) } else { sequence },
        times: Times {
            recovery_us: amount(bytes),
            lease_us: amount(bytes),
            silence_us: amount(bytes),
            alive_us: amount(bytes),
            limit_alive_us: amount(bytes),
        },
        knowledge: Knowledge {
            known_us: amount(bytes),
            sent_us: amount(bytes),
            nodes: amount(bytes),
            settled: bytes.one_in(2),
            leaving: bytes.one_in(8),
        },
        limits: vec!["a".into(); usize::from(bytes.byte() % 3)],
    };
    let entries = (0..bytes.below(4)).map(|_| entry(bytes)).collect();
    Request::new(header, entries)
}

fn entry(bytes: &mut Bytes<'_>) -> Entry {
    let scale = scale(bytes);
    let entry = Entry {
        limit: "a".into(),
        key: [bytes.byte() % 3].as_slice().into(),
        scale,
        version: i64::from(bytes.byte() % 2),
        epoch_us: if bytes.one_in(2) { 500_000 } else { amount(bytes) },
        spent: amount(bytes),
        debt: amount(bytes),
        allowed: amount(bytes),
        taken: amount(bytes),
        taken_before: 0,
        returned: amount(bytes),
        lost: amount(bytes),
        back_rate: amount(bytes),
        back_depth: amount(bytes),
        held: held(bytes),
        demand: amount(bytes),
        needed: amount(bytes),
        want: amount(bytes),
        want_rate: amount(bytes),
        restore: bytes.one_in(4),
        claim: (bytes.one_in(2)).then(|| Claim {
            unleased: amount(bytes),
            previous: 0,
            viewed_us: 0,
        }),
        spent_before: 0,
        refunded: Backdated::default(),
        window_span_us: [0; 2],
        unspent: Backdated::default(),
        reset: false,
    };
    // What has no bytes of its own: older inputs keep their meaning.
    let mut entry = Entry {
        spent_before: entry.spent / 2,
        taken_before: entry.taken / 2,
        claim: entry.claim.map(more_of),
        refunded: Backdated { tokens: entry.debt / 2, from_us: entry.held.stamp_us },
        unspent: Backdated { tokens: entry.allowed / 2, from_us: entry.held.stamp_us },
        reset: entry.spent % 5 == 4,
        ..entry
    };
    if entry.scale.curve == Curve::FixedWindow && entry.taken > 0 {
        entry.scale.curve = Curve::CalendarWindow;
        entry.window_span_us = [entry.held.stamp_us, entry.held.stamp_us + entry.taken];
    }
    entry
}

fn more_of(claim: Claim) -> Claim {
    let viewed_us = if claim.unleased % 2 == 0 { claim.unleased / 4 } else { 0 };
    Claim { previous: claim.unleased / 2, viewed_us, ..claim }
}

fn scale(bytes: &mut Bytes<'_>) -> Scale {
    match bytes.byte() % 3 {
        0 => Scale { rate: 1, token: 1000, burst: 100_000, curve: Curve::Refill },
        1 => Scale { rate: 1, token: 60_000_000, burst: 300_000_000, curve: Curve::Refill },
        _ => Scale {
            rate: amount(bytes),
            token: amount(bytes),
            burst: amount(bytes),
            curve: Curve::of(1 + bytes.below(4) as i64).unwrap_or_default(),
        },
    }
}

fn held(bytes: &mut Bytes<'_>) -> Held {
    Held {
        rate: amount(bytes),
        depth: amount(bytes),
        outstanding: amount(bytes) - amount(bytes),
        stamp_us: amount(bytes),
        demand: amount(bytes),
        tag: amount(bytes),
    }
}

/// A whole number that a request may hold: a small one, or an edge.
fn amount(bytes: &mut Bytes<'_>) -> i64 {
    match bytes.byte() % 8 {
        0..=2 => 0,
        3 => 1,
        4 => i64::from(bytes.byte()),
        5 => 1_000_000 * i64::from(bytes.byte()),
        6 => NUMBER_MAX - i64::from(bytes.byte()),
        _ => i64::from_le_bytes(bytes.take()) & (NUMBER_MAX - 1),
    }
}

/// The script's keys.
fn names(request: &Request) -> Vec<String> {
    let lane = ["lane", "node", "nodes"].map(|part| format!("{{x}}:{part}"));
    let entries = request.entries.iter().map(|entry| format!("{{x}}:key:{:?}", entry.key));
    let limits = request.limits.iter().map(|limit| format!("{{x}}:limit:{limit}"));
    lane.into_iter().chain(entries).chain(limits).collect()
}
