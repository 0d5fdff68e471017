//! The reference model and the script on a real Redis are the same machine.
//!
//! The same random batches go through both; each reply and each touched record must be equal. Either the server's clock
//! is fed to the model, or both live in virtual time: then hours pass, and boundaries are hit to the microsecond.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redis::Commands;

use super::Store;
use super::model::Model;
use super::redis::RedisStore;
use crate::error::StoreError;
use crate::quota::{Curve, Quota, Scale};
use crate::sync::message::{
    Backdated, BatchVerdict, Claim, Entry, Grant, Header, Held, Incarnation, InstanceId, Knowledge,
    Reply, Request, Times,
};

mod edges;
mod lanes;
mod malformed;
mod records;
mod spoil;
mod virtual_time;

use super::redis_server::RedisServer;
use records::{instances, key_of, lane_of, node_of};
use spoil::spoil;
#[cfg(feature = "sim")]
pub(crate) use virtual_time::ScriptInVirtualTime;
use virtual_time::VirtualClock;

/// What a failure prints, and what repeats it as far as the server's clock allows.
const SEED: u64 = 0x7469_6465_6761_7465;
/// Entries that go through both in the long run.
const ENTRIES_TOTAL: usize = 100_000;
/// Requests between two losses of the whole memory.
const FLUSH_EVERY: usize = 1500;
const LANES: u32 = 3;
const NODES: usize = 4;
const KEYS: u64 = 72;
/// Keys from here on are sent absurd numbers too, which would spoil the others for good.
const KEYS_SANE: u64 = 60;
/// Five are token buckets.
const LIMITS: usize = 13;

/// `SplitMix64` (Steele, Lea, Flood 2014): enough for choosing test values.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most.max(1)
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn among<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Mostly nothing or little, sometimes up to `most`.
    fn amount(&mut self, most: i64) -> i64 {
        let most = most.max(0) as u64;
        let up_to = self.among(&[0, 0, 3.min(most), most / 100, most / 8, most]);
        self.below(up_to + 1) as i64
    }

    fn instance(&mut self) -> InstanceId {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next().to_le_bytes());
        bytes[8..].copy_from_slice(&self.next().to_le_bytes());
        bytes
    }
}

/// A node in one lane, as far as it decides what it sends next.
#[derive(Clone)]
struct Sender {
    instance: InstanceId,
    incarnation: Option<Incarnation>,
    sequence: i64,
    last: Option<Arc<Request>>,
}

impl Sender {
    fn new(random: &mut Random) -> Self {
        Self { instance: random.instance(), incarnation: None, sequence: 0, last: None }
    }

    fn receive(&mut self, request: &Arc<Request>, reply: &Reply, random: &mut Random) {
        match reply.verdict {
            BatchVerdict::Applied(_) => {
                self.incarnation = Some(reply.incarnation);
                self.sequence = request.sequence;
                self.last = Some(request.clone());
            }
            BatchVerdict::Reborn => {
                self.incarnation = Some(reply.incarnation);
                self.sequence = 0;
            }
            // Most go on, so that these verdicts come more than once; a real one draws a new id.
            BatchVerdict::Stale | BatchVerdict::Cloned if random.one_in(3) => {
                *self = Self::new(random);
            }
            _ => {}
        }
    }
}

/// A batch as a failure prints it: without its bytes.
struct Shown<'a>(&'a Request);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Request { lane, lanes, instance, incarnation, sequence, .. } = self.0;
        let Request { times, knowledge, entries, .. } = self.0;
        write!(
            formatter,
            "batch {sequence} of {instance:?} to lane {lane} of {lanes}, {incarnation:?}, {times:?}, \
             {knowledge:?}: {entries:#?}"
        )
    }
}

/// The definitions of a limit by version.
fn scales(limit: usize) -> [Scale; 3] {
    let slow = Quota::new(1, Duration::from_secs(90)).burst(5);
    let quotas = [
        [Quota::per_second(1000).burst(200), Quota::per_second(500), Quota::per_second(3000)],
        [Quota::per_second(1_000_000).burst(1_000_000_000), Quota::per_second(7), slow],
        [Quota::per_minute(7), Quota::per_minute(11), Quota::per_second(100).burst(3)],
        [slow, Quota::per_day(100), Quota::per_second(1_000_000_000)],
        [Quota::per_second(20), Quota::per_second(20).burst(1), Quota::per_hour(3)],
    ];
    let windows = |curves: [Curve; 3]| {
        let quotas = [Quota::per_second(100), Quota::per_second(7), Quota::per_minute(700)];
        [0, 1, 2].map(|version| match curves[version] {
            Curve::Refill => quotas[version].scale("x").expect("it can be kept"),
            Curve::CalendarWindow => quotas[version].calendar_scale("x").expect("it can be kept"),
            curve => quotas[version].window_scale("x", curve).expect("it can be kept"),
        })
    };
    let [even, fixed, sliding] = [Curve::Refill, Curve::FixedWindow, Curve::SlidingWindow];
    let [log, calendar] = [Curve::SlidingLog, Curve::CalendarWindow];
    match limit {
        5 => windows([fixed; 3]),
        6 => windows([sliding; 3]),
        7 => windows([sliding, fixed, sliding]),
        8 => windows([even, sliding, even]),
        9 => windows([log; 3]),
        10 => windows([log, sliding, log]),
        11 => windows([calendar; 3]),
        12 => windows([sliding, calendar, fixed]),
        limit => quotas[limit].map(|quota| quota.scale("x").expect("it can be kept")),
    }
}

/// Tokens that go back now and then, from a time of late.
fn backdated(random: &mut Random, tokens: i64, time_us: i64) -> Backdated {
    Backdated {
        tokens: if random.one_in(3) { random.amount(tokens) } else { 0 },
        from_us: time_us - random.among(&[0, 10, 20_000, 2_000_000, 9_000_000]),
    }
}

fn claim(random: &mut Random, scale: &Scale, time_us: i64) -> Claim {
    Claim {
        unleased: scale.burst - random.amount(2 * scale.burst),
        previous: backdated(random, scale.burst, 0).tokens,
        viewed_us: backdated(random, 0, time_us).from_us,
    }
}

/// What nodes tell of the window that it is: mostly one of three grids, now and then the window before, or nothing.
fn told_window(random: &mut Random, scale: &Scale, time_us: i64) -> [i64; 2] {
    if scale.curve != Curve::CalendarWindow || random.one_in(20) {
        return [0; 2];
    }
    let window_us = scale.window_us();
    let length_us = random.among(&[window_us / 50, window_us / 50, window_us, 3 * window_us]);
    let before = i64::from(random.one_in(10));
    let begins_us = (time_us / length_us - before) * length_us;
    [begins_us, begins_us + random.among(&[length_us, length_us, length_us, 9 * length_us])]
}

/// The server's time, in microseconds.
fn time_us(raw: &mut redis::Connection) -> i64 {
    let (seconds, micros): (i64, i64) = redis::cmd("TIME").query(raw).unwrap();
    seconds * 1_000_000 + micros
}

/// The store, its model, and the nodes that send.
struct World {
    server: RedisServer,
    raw: redis::Connection,
    runtime: tokio::runtime::Runtime,
    store: RedisStore,
    model: Model,
    random: Random,
    senders: Vec<Sender>,
    time_us: i64,
    /// The clock of both, where it is not the server's.
    clock: Option<VirtualClock>,
    /// Rises during the run, so that limits are redefined.
    version: i64,
    /// The longest that passed between the script's look at the clock and its answer.
    rest_ms: i64,
}

impl World {
    fn new() -> Self {
        let server = RedisServer::start();
        let client = redis::Client::open(server.url()).unwrap();
        let raw = client.get_connection().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let store = RedisStore::open(&server.url()).unwrap().timeout(Duration::from_secs(5));
        let mut random = Random(SEED);
        let senders = (0..NODES * LANES as usize).map(|_| Sender::new(&mut random)).collect();
        let model = Model::default();
        Self {
            server,
            raw,
            runtime,
            store,
            model,
            random,
            senders,
            time_us: 1,
            clock: None,
            version: 0,
            rest_ms: 0,
        }
    }

    fn exchange(&self, request: &Arc<Request>) -> Result<Reply, StoreError> {
        self.runtime.block_on(self.store.exchange(request.clone()))
    }

    /// Random batches, after `before_each`. Now and then the whole memory is lost.
    fn play(&mut self, mut before_each: impl FnMut(&mut Self)) {
        let mut verdicts: HashMap<&str, usize> = HashMap::new();
        let (mut entries, mut requests) = (0, 0);
        while entries < ENTRIES_TOTAL {
            self.version = (3 * entries / ENTRIES_TOTAL) as i64;
            before_each(self);
            let (verdict, sent) = self.step();
            *verdicts.entry(verdict).or_default() += 1;
            entries += sent;
            requests += 1;
            if requests % FLUSH_EVERY == 0 {
                self.server.command(&["FLUSHALL"]);
                self.model = Model::default();
            }
        }
        println!("seed {SEED:#x}, {requests} requests, {entries} entries: {verdicts:?}");
        for verdict in ["applied", "reborn", "stale", "cloned", "lanes"] {
            assert!(verdicts.contains_key(verdict), "{verdict} never happened: {verdicts:?}");
        }
        assert!(verdicts["applied"] > requests / 2, "{verdicts:?}");
    }

    /// One batch through both; returns the verdict's name.
    fn step(&mut self) -> (&'static str, usize) {
        let chosen = self.random.below(self.senders.len() as u64) as usize;
        let lane = chosen as u32 % LANES;
        let request = self.request(chosen, lane);
        let reply = self.compare(&request);
        let mut sender = self.senders[chosen].clone();
        sender.receive(&request, &reply, &mut self.random);
        self.senders[chosen] = sender;
        self.time_us = self.time_us.max(reply.time_us);
        (name_of(&reply.verdict), request.entries.len())
    }

    fn compare(&mut self, request: &Arc<Request>) -> Reply {
        if self.clock.is_some() {
            return self.compare_in_virtual_time(request);
        }
        let before_us = time_us(&mut self.raw);
        let reply =
            self.exchange(request).unwrap_or_else(|error| panic!("{error}: {}", Shown(request)));
        let answered_us = time_us(&mut self.raw);
        // The model gets the server's clock. Lane time may be ahead of it.
        let clock_us = reply.time_us - self.offset_us(request.lane);
        let node = self.model.nodes.get(&(request.lane, request.instance));
        let comes_again = node.is_some_and(|node| {
            let lane = self.model.lanes.get(&request.lane);
            node.receipt.sequence == request.sequence.max(0)
                && lane.is_some_and(|lane| lane.incarnation == node.incarnation)
        });
        // A batch that comes again has the reply of the first time, and that time.
        assert!(
            clock_us <= answered_us && (before_us <= clock_us || comes_again),
            "{clock_us} was not between {before_us} and {answered_us}: {}",
            Shown(request)
        );
        if !comes_again {
            self.rest_ms = self.rest_ms.max((answered_us - clock_us) / 1000);
        }
        self.compare_with_model(request, &reply, clock_us);
        self.compare_expiries(request, &reply);
        reply
    }

    /// The model, called at `time_us`, must give the same reply, and have the same records.
    fn compare_with_model(&mut self, request: &Request, reply: &Reply, time_us: i64) {
        let expected = self.model.sync(request, time_us);
        self.compare_grants(request, reply, &expected);
        assert_eq!(*reply, expected, "seed {SEED:#x}, {}", Shown(request));
        compare_states(&mut self.raw, &self.model, request);
    }

    /// How far the lane's time is ahead of the server's clock, by its record: a batch that comes too late makes none.
    fn offset_us(&mut self, lane: u32) -> i64 {
        let bytes: Option<Vec<u8>> = self.raw.get(prefix(lane) + "lane").unwrap();
        bytes.map_or(0, |bytes| lane_of(&bytes).offset_us)
    }

    /// A bucket is forgotten when the model says so, by the server's own clock; later by no more than
    /// what a busy machine has rested between the script's look at the clock and its answer.
    fn compare_expiries(&mut self, request: &Request, reply: &Reply) {
        for entry in &request.entries {
            let Some(key) = self.model.keys.get(&(entry.limit.clone(), entry.key.clone())) else {
                continue;
            };
            let before_us = time_us(&mut self.raw);
            let ttl_ms: i64 = self.raw.pttl(key_name(request.lane, entry)).unwrap();
            let after_us = time_us(&mut self.raw);
            let earliest_ms = before_us / 1000 + ttl_ms - key.until_ms;
            let latest_ms = after_us / 1000 + ttl_ms - key.until_ms;
            let Self { rest_ms, .. } = self;
            assert!(
                latest_ms >= -2 && earliest_ms <= *rest_ms + 2,
                "{earliest_ms} to {latest_ms} ms after, rested {rest_ms} ms: {reply:?}: {key:?}"
            );
        }
    }

    /// Names the first entry that was answered differently, before all of them are printed.
    fn compare_grants(&self, request: &Request, reply: &Reply, expected: &Reply) {
        let (BatchVerdict::Applied(grants), BatchVerdict::Applied(others)) =
            (&reply.verdict, &expected.verdict)
        else {
            return;
        };
        for (index, entry) in request.entries.iter().enumerate() {
            let name = (entry.limit.clone(), entry.key.clone());
            let key = self.model.keys.get(&name);
            assert_eq!(grants[index], others[index], "seed {SEED:#x}, {entry:#?} of {key:#?}");
        }
    }

    fn request(&mut self, chosen: usize, lane: u32) -> Arc<Request> {
        let sender = self.senders[chosen].clone();
        let next = sender.sequence + 1;
        let (incarnation, sequence) = match self.random.below(100) {
            // Rare: the whole lane begins anew.
            0 if self.random.one_in(4) => (sender.incarnation, next + 1),
            0..8 => match sender.last {
                Some(last) => return last,
                None => (sender.incarnation, next),
            },
            8..12 => (sender.incarnation, sender.sequence),
            12..17 => (sender.incarnation, sender.sequence - 1),
            17..19 => (Some(Incarnation::new(&sender.instance, 5)), next),
            19..23 => (None, next),
            _ => (sender.incarnation, next),
        };
        let header = Header {
            lane,
            lanes: if self.random.one_in(100) { LANES + 1 } else { LANES },
            instance: sender.instance,
            incarnation,
            sequence,
            times: self.times(),
            knowledge: self.knowledge(lane),
            limits: self.limits(),
        };
        let count = self.random.below(41);
        let entries = (0..count).map(|_| self.entry(lane)).collect();
        Arc::new(Request::new(header, entries))
    }

    fn times(&mut self) -> Times {
        let (random, is_virtual) = (&mut self.random, self.clock.is_some());
        // In the middle third of a run in virtual time most gaps between two calls of a lane count as silences.
        let silences: &[i64] = if is_virtual && self.version == 1 {
            &[500, 5000, 20_000]
        } else {
            &[500, 5000, 1_000_000_000, 1_000_000_000]
        };
        // Redis forgets records by its own clock: in virtual time they have to live longer than the run.
        let lives: &[i64] =
            if is_virtual { &[60_000_000, 100_000_000] } else { &[3000, 50_000, 1_000_000_000] };
        Times {
            recovery_us: random.among(&[0, 1000, 10_000]),
            lease_us: random.among(&[0, 2000, 20_000]),
            silence_us: random.among(silences),
            alive_us: random.among(lives),
            limit_alive_us: random.among(lives),
        }
    }

    /// Limits that the batch names: mostly none.
    fn limits(&mut self) -> Vec<Arc<str>> {
        let count = self.random.among(&[0, 0, 0, 1, 3]);
        (0..count).map(|number| format!("limit{number}").into()).collect()
    }

    /// Mostly what a node can know, sometimes of a time that is still to come.
    fn knowledge(&mut self, lane: u32) -> Knowledge {
        let seen_us = self.model.lanes.get(&lane).map_or(self.time_us, |lane| lane.seen_us);
        let random = &mut self.random;
        let ago = random.among(&[0, 0, 1, 300, 10_000, 700_000_000]);
        // A time that is still to come means that the lane went back: all its nodes begin anew.
        let known_us = match random.below(400) {
            0 => seen_us + 5_000,
            1..10 => 0,
            _ => seen_us - 2 * ago,
        };
        Knowledge {
            known_us,
            sent_us: self.time_us - ago,
            nodes: random.among(&[0, 1, 3, 4]),
            settled: !random.one_in(4),
            leaving: random.one_in(50),
        }
    }

    fn entry(&mut self, lane: u32) -> Entry {
        let random = &mut self.random;
        let number = random.below(KEYS);
        let limit = number as usize % LIMITS;
        let change = i64::from(random.one_in(50)) - i64::from(random.one_in(50));
        let version = (self.version + change).clamp(0, 2);
        let mut scale = scales(limit)[version as usize];
        scale.burst += if random.one_in(100) { scale.token } else { 0 };
        let epoch_us = random.among(&[20_000, 20_000, 20_000, 50_000]);
        let tokens = scale.burst / scale.token;
        let held_rate = random.amount(scale.rate);
        let mut entry = Entry {
            limit: format!("limit/{limit}").into(),
            // Any byte may be in a key.
            key: vec![b'k', 0, 0xff, b'\r', b'\n', lane as u8, number as u8].into(),
            scale,
            version,
            epoch_us,
            spent: random.amount(tokens),
            debt: random.amount(tokens),
            allowed: random.amount(tokens),
            taken: random.amount(scale.burst / 4),
            taken_before: backdated(random, scale.burst / 4, 0).tokens,
            returned: random.amount(scale.burst / 4),
            lost: random.amount(scale.burst / 4),
            back_rate: random.amount(held_rate),
            back_depth: random.amount(tokens / 4),
            spent_before: if random.one_in(2) { random.amount(tokens) } else { 0 },
            refunded: backdated(random, tokens, self.time_us),
            window_span_us: told_window(random, &scale, self.time_us),
            unspent: backdated(random, tokens, self.time_us),
            held: Held {
                rate: held_rate,
                depth: random.amount(tokens / 4),
                outstanding: random.amount(scale.burst / 4) - random.amount(3 * scale.token),
                stamp_us: self.time_us - random.among(&[0, 10, 1000, 20_000, -5]),
                demand: random.amount(scale.rate),
                tag: (self.time_us / epoch_us - random.among(&[-1, 0, 0, 0, 1, 1, 2, 3])).max(0),
            },
            demand: random.amount(4 * scale.rate),
            needed: if random.one_in(4) { random.amount(tokens) } else { 0 },
            want: random.amount(2 * tokens),
            want_rate: random.amount(2 * scale.rate),
            restore: random.one_in(20),
            claim: random.one_in(3).then(|| claim(random, &scale, self.time_us)),
            reset: random.one_in(20),
        };
        if number >= KEYS_SANE && random.one_in(4) {
            spoil(&mut entry, random);
        }
        entry
    }
}

/// Every record that the batch touches must be in Redis what it is in the model.
pub(crate) fn compare_states(raw: &mut redis::Connection, model: &Model, request: &Request) {
    compare_lane(raw, model, request);
    compare_keys(raw, model, request);
}

fn compare_lane(raw: &mut redis::Connection, model: &Model, request: &Request) {
    let prefix = prefix(request.lane);
    let lane: Option<Vec<u8>> = raw.get(format!("{prefix}lane")).unwrap();
    let lane = lane.map(|bytes| lane_of(&bytes));
    assert_eq!(lane.as_ref(), model.lanes.get(&request.lane), "after {}", Shown(request));
    let node: Option<Vec<u8>> = raw.get(node_key(request)).unwrap();
    let node = node.map(|bytes| node_of(&bytes));
    let place = (request.lane, request.instance);
    assert_eq!(node.as_ref(), model.nodes.get(&place), "after {}", Shown(request));
    let members = instances(raw, &format!("{prefix}nodes"));
    let expected = model.members.get(&request.lane).cloned().unwrap_or_default();
    assert_eq!(members, expected, "after {}", Shown(request));
    for limit in &request.limits {
        let limit_nodes = instances(raw, &limit_key(request.lane, limit));
        let expected = model.limit_nodes.get(&(request.lane, limit.clone()));
        assert_eq!(limit_nodes, expected.cloned().unwrap_or_default(), "after {}", Shown(request));
    }
}

fn compare_keys(raw: &mut redis::Connection, model: &Model, request: &Request) {
    for entry in &request.entries {
        let name = key_name(request.lane, entry);
        let (record, ttl_ms): (Option<Vec<u8>>, i64) =
            redis::pipe().get(&name).pttl(&name).query(raw).unwrap();
        let key = record.map(|bytes| key_of(&bytes));
        let expected = model.keys.get(&(entry.limit.clone(), entry.key.clone()));
        assert_eq!(key.as_ref(), expected, "{name:?} after {}", Shown(request));
        if let Some(key) = key {
            assert!(ttl_ms > 0, "{ttl_ms} ms: {key:?}");
        }
    }
}

pub(crate) fn name_of(verdict: &BatchVerdict) -> &'static str {
    match verdict {
        BatchVerdict::Applied(_) => "applied",
        BatchVerdict::Reborn => "reborn",
        BatchVerdict::Stale => "stale",
        BatchVerdict::Cloned => "cloned",
        BatchVerdict::Lanes(_) => "lanes",
        BatchVerdict::Wire(_) => "wire",
    }
}

/// The script's KEYS, as the default namespace has them.
fn keys_of(request: &Request) -> Vec<Vec<u8>> {
    let prefix = prefix(request.lane);
    let lane = [format!("{prefix}lane"), node_key(request), format!("{prefix}nodes")];
    let lane = lane.into_iter().map(String::into_bytes);
    let limits = request.limits.iter().map(|limit| limit_key(request.lane, limit).into_bytes());
    let buckets = request.entries.iter().map(|entry| key_name(request.lane, entry));
    lane.chain(buckets).chain(limits).collect()
}

fn prefix(lane: u32) -> String {
    format!("tg2:{{{}/{lane}}}:", RedisStore::DEFAULT_NAMESPACE)
}

fn node_key(request: &Request) -> String {
    format!("{}node:{:032x}", prefix(request.lane), u128::from_be_bytes(request.instance))
}

fn limit_key(lane: u32, limit: &str) -> String {
    format!("{}limit:{limit}", prefix(lane))
}

fn key_name(lane: u32, entry: &Entry) -> Vec<u8> {
    let mut name = format!("{}key:{}:", prefix(lane), entry.limit).into_bytes();
    name.extend_from_slice(&entry.key);
    name
}

#[test]
fn same_random_batches_through_model_and_script_give_equal_replies_and_states() {
    let mut world = World::new();
    world.play(|_| ());
    every_key_expires(&mut world.raw);
}

fn every_key_expires(raw: &mut redis::Connection) {
    let names: Vec<Vec<u8>> = raw.keys("*").unwrap();
    assert!(!names.is_empty());
    for name in names {
        let ttl_ms: i64 = raw.pttl(&name).unwrap();
        assert!(ttl_ms > 0, "{} never expires", String::from_utf8_lossy(&name));
    }
}

/// A batch of three keys in lane 0, and the names that it touches.
fn three_keys(world: &mut World) -> (Arc<Request>, Vec<Vec<u8>>) {
    let header = Header {
        lane: 0,
        lanes: LANES,
        instance: [7; 16],
        incarnation: None,
        sequence: 1,
        times: Times { silence_us: 1_000_000, alive_us: 1_000_000, ..Times::default() },
        knowledge: Knowledge::default(),
        limits: Vec::new(),
    };
    let entries: Vec<_> = (0..3_u8)
        .map(|number| Entry { key: vec![b'k', number].into(), ..world.entry(0) })
        .collect();
    let names = entries.iter().map(|entry| key_name(0, entry)).collect();
    (Arc::new(Request::new(header, entries)), names)
}

#[test]
fn another_programs_value_under_a_key_is_left_alone_and_the_batch_goes_on() {
    let mut world = World::new();
    let (request, names) = three_keys(&mut world);
    let (): () = world.raw.rpush(&names[0], "theirs").unwrap();
    let (): () = world.raw.set(&names[1], "T2theirs").unwrap();
    let reply = world.exchange(&request).unwrap();
    let BatchVerdict::Applied(grants) = reply.verdict else { panic!("{reply:?}") };
    assert!(matches!(grants[..], [Grant::Foreign, Grant::Foreign, Grant::Given(_)]), "{grants:?}");
    let list: Vec<String> = world.raw.lrange(&names[0], 0, -1).unwrap();
    let string: String = world.raw.get(&names[1]).unwrap();
    assert_eq!((list, string.as_str()), (vec!["theirs".to_owned()], "T2theirs"));
}

#[test]
fn another_programs_value_under_a_record_of_the_lane_is_named_and_nothing_is_written() {
    let mut world = World::new();
    let (request, _) = three_keys(&mut world);
    let [lane, nodes] = ["lane", "nodes"].map(|suffix| prefix(0) + suffix);
    for name in [lane, node_key(&request), nodes] {
        for found in ["list", "string"] {
            let (): () = redis::cmd("FLUSHALL").query(&mut world.raw).unwrap();
            let (): () = match found {
                "list" => world.raw.rpush(&name, "theirs").unwrap(),
                _ => world.raw.set(&name, "theirs").unwrap(),
            };
            let expected = StoreError::ForeignKey { key: name.clone(), found: found.to_owned() };
            assert_eq!(world.exchange(&request), Err(expected));
            let keys: i64 = redis::cmd("DBSIZE").query(&mut world.raw).unwrap();
            assert_eq!(keys, 1, "something was written beside {name}");
        }
    }
}

#[test]
fn lane_of_another_layout_is_recognised_by_its_version() {
    let mut world = World::new();
    let (request, _) = three_keys(&mut world);
    let (): () = world.raw.set(prefix(0) + "lane", "T3 whatever follows").unwrap();
    let reply = world.exchange(&request).unwrap();
    assert_eq!(reply.verdict, BatchVerdict::Wire(3));
}
