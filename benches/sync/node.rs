//! Those who send batches: a node that keeps to the protocol, and what it is measured against.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Contender;
use crate::message::{
    Backdated, BatchVerdict, Claim, Entry, Grant, Header, Held, Incarnation, Knowledge, Reply,
    Request, Times,
};
use crate::quota::{Curve, Scale};
use crate::server::Server;

const SCRIPT: &str =
    concat!(include_str!("../../lua/bucket-v2.lua"), include_str!("../../lua/sync-v2.lua"));

/// A token bucket in a record of three numbers: the smallest honest script of its kind.
const BARE: &str = "
local buckets = redis.call('MGET', unpack(KEYS))
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local rate, burst, ttl_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local replies = {}
for index = 1, #KEYS do
  local level, stamp_us, charged = burst, now_us, 0
  if buckets[index] then
    level, stamp_us, charged = struct.unpack('<ddd', buckets[index])
  end
  level = math.min(level + rate * (now_us - stamp_us), burst)
  local asked = struct.unpack('<d', ARGV[1], index * 8 - 7)
  local taken = math.min(asked, math.max(level, 0))
  level, charged = level - taken, charged + taken
  local record = struct.pack('<ddd', level, now_us, charged)
  redis.call('SET', KEYS[index], record, 'PX', ttl_ms)
  replies[index] = struct.pack('<dd', taken, level)
end
return table.concat(replies)
";
const EMPTY: &str = "return ''";

/// 100 tokens a second and as many in a burst, in units as `Quota` has them.
const SCALE: Scale = Scale {
    rate: 1_048_576,
    token: 10_485_760_000,
    burst: 1_048_576_000_000,
    curve: Curve::Refill,
};
const EPOCH_US: i64 = 1_000_000;
/// Tokens that each key spends between two syncs, at most.
const SPENT: i64 = 5;
const INSTANCE: [u8; 16] = [7; 16];

/// Every number below `count`, in a random order that is the same each time.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut order);
    order
}

/// Goes round the keys, a batch at a time.
struct Turn {
    order: Vec<usize>,
    next: usize,
    batch: usize,
}

impl Turn {
    fn new(keys: usize, batch: usize) -> Self {
        Self { order: shuffled(keys), next: 0, batch }
    }

    fn batch(&mut self) -> Vec<usize> {
        let keys = (0..self.batch).map(|place| self.order[(self.next + place) % self.order.len()]);
        let keys = keys.collect();
        self.next = (self.next + self.batch) % self.order.len();
        keys
    }
}

fn packed(hash: &str, keys: &[Vec<u8>], arguments: &[&[u8]]) -> Vec<u8> {
    let mut command = redis::cmd("EVALSHA");
    command.arg(hash).arg(keys.len()).arg(keys).arg(arguments);
    command.get_packed_command()
}

fn key_of(number: usize) -> Vec<u8> {
    format!("user:{number:015}").into_bytes()
}

/// A node whose keys are all in use: each time it reports what it spent since the last.
pub(crate) struct Node {
    turn: Turn,
    hash: Option<String>,
    held: Vec<Held>,
    limit: Arc<str>,
    incarnation: Option<Incarnation>,
    sequence: i64,
    time_us: i64,
    own: Duration,
}

impl Node {
    pub(crate) fn new(keys: usize, batch: usize) -> Self {
        Self {
            turn: Turn::new(keys, batch),
            hash: None,
            held: vec![Held::default(); keys],
            limit: "api".into(),
            incarnation: None,
            sequence: 0,
            time_us: 0,
            own: Duration::ZERO,
        }
    }

    /// The key's report: what is outstanding was spent, as far as it was.
    fn entry(&self, number: usize) -> Entry {
        let held = self.held[number];
        let spent = (held.outstanding / SCALE.token).clamp(0, SPENT);
        Entry {
            limit: self.limit.clone(),
            key: key_of(number).into(),
            scale: SCALE,
            version: 0,
            epoch_us: EPOCH_US,
            spent,
            debt: 0,
            allowed: 0,
            taken: 0,
            taken_before: 0,
            returned: 0,
            lost: held.rate * 25,
            back_rate: 0,
            spent_before: 0,
            refunded: Backdated::default(),
            window_span_us: [0; 2],
            unspent: Backdated::default(),
            back_depth: 0,
            held,
            demand: SCALE.rate / 2,
            needed: 0,
            want: SPENT,
            want_rate: SCALE.rate / 2,
            restore: false,
            claim: Some(Claim { unleased: SCALE.burst, previous: 0, viewed_us: 0 }),
            reset: false,
        }
    }

    fn hear(&mut self, request: &Request, numbers: &[usize], reply: &Reply) {
        let BatchVerdict::Applied(grants) = &reply.verdict else { panic!("refused: {reply:?}") };
        self.incarnation = Some(reply.incarnation);
        self.time_us = reply.time_us;
        for ((entry, grant), &number) in request.entries.iter().zip(grants).zip(numbers) {
            let Grant::Given(given) = grant else { panic!("{grant:?} to {entry:?}") };
            let held = &mut self.held[number];
            if given.void {
                *held = Held::default();
            } else {
                let passed_us = (given.stamp_us - held.stamp_us).max(0);
                held.outstanding += held.rate * passed_us - entry.spent * SCALE.token - entry.lost;
                held.outstanding = held.outstanding.max(0);
            }
            held.rate += given.rate;
            held.depth += given.depth;
            held.outstanding += given.tokens * SCALE.token;
            (held.stamp_us, held.tag, held.demand) = (given.stamp_us, given.tag, entry.demand);
        }
    }

    fn request(&self, numbers: &[usize]) -> Request {
        let header = Header {
            lane: 0,
            lanes: 1,
            instance: INSTANCE,
            incarnation: self.incarnation,
            sequence: self.sequence,
            times: Times {
                recovery_us: 450_000,
                lease_us: 2_000_000,
                silence_us: 1_000_000_000,
                alive_us: 4_000_000,
                limit_alive_us: 4_000_000,
            },
            knowledge: Knowledge {
                known_us: self.time_us,
                sent_us: self.time_us,
                nodes: 1,
                settled: true,
                leaving: false,
            },
            limits: Vec::new(),
        };
        Request::new(header, numbers.iter().map(|&number| self.entry(number)).collect())
    }
}

impl Contender for Node {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn call(&mut self, server: &mut Server) {
        let hash = self.hash.get_or_insert_with(|| server.load(SCRIPT)).clone();
        let numbers = self.turn.batch();
        self.sequence += 1;
        let began = Instant::now();
        let request = self.request(&numbers);
        let mut keys: Vec<Vec<u8>> =
            ["lane", "node:07070707070707070707070707070707", "nodes"].map(name).to_vec();
        keys.extend(request.entries.iter().map(|entry| {
            let mut key = name("key:api:");
            key.extend_from_slice(&entry.key);
            key
        }));
        let command = packed(&hash, &keys, &[request.bytes(), &request.hash().to_le_bytes()]);
        self.own += began.elapsed();
        let answer = server.send(&command);
        let began = Instant::now();
        let reply = Reply::decode(&answer, &request.entries, 0).expect("a reply of ours");
        self.own += began.elapsed();
        self.hear(&request, &numbers, &reply);
    }

    fn own(&mut self) -> Duration {
        std::mem::take(&mut self.own)
    }
}

fn name(suffix: &str) -> Vec<u8> {
    format!("tg2:{{tidegate/0}}:{suffix}").into_bytes()
}

/// The bare script.
pub(crate) struct Bare {
    turn: Turn,
    hash: Option<String>,
}

impl Bare {
    pub(crate) fn new(keys: usize, batch: usize) -> Self {
        Self { turn: Turn::new(keys, batch), hash: None }
    }
}

impl Contender for Bare {
    fn name(&self) -> &'static str {
        "bare"
    }

    fn call(&mut self, server: &mut Server) {
        let hash = self.hash.get_or_insert_with(|| server.load(BARE)).clone();
        let keys: Vec<Vec<u8>> = self.turn.batch().iter().map(|&number| bare_key(number)).collect();
        let asked: Vec<u8> = keys.iter().flat_map(|_| (SPENT as f64).to_le_bytes()).collect();
        // A millionth of a token a microsecond is one a second.
        let command = packed(&hash, &keys, &[&asked, b"0.0001", b"100", b"61000"]);
        assert_eq!(server.send(&command).len(), 16 * keys.len());
    }
}

/// As long as the name of a bucket of ours.
fn bare_key(number: usize) -> Vec<u8> {
    let mut key = name("bar:api:");
    key.extend(key_of(number));
    key
}

/// A script that does nothing with as many keys, and with as many bytes as an entry has.
pub(crate) struct Empty {
    turn: Turn,
    hash: Option<String>,
}

impl Empty {
    pub(crate) fn new(keys: usize, batch: usize) -> Self {
        Self { turn: Turn::new(keys, batch), hash: None }
    }
}

impl Contender for Empty {
    fn name(&self) -> &'static str {
        "empty"
    }

    fn call(&mut self, server: &mut Server) {
        let hash = self.hash.get_or_insert_with(|| server.load(EMPTY)).clone();
        let keys: Vec<Vec<u8>> = self.turn.batch().iter().map(|&number| bare_key(number)).collect();
        let command = packed(&hash, &keys, &[&vec![0; 100 * keys.len()]]);
        server.send(&command);
    }
}
