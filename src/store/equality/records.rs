//! Reads the records that the script writes, as docs/REDIS.md says they are. A record that is anything else
//! fails the test.

use std::collections::HashMap;

use redis::Commands;

use crate::quota::{Curve, Scale};
use crate::store::model::{Key, Lane, Node, Reason, Recovery, SUM_MAX, Slots};
use crate::sync::message::{Incarnation, InstanceId, Receipt};

/// What is left to read of a record.
struct Record<'a>(&'a [u8]);

impl<'a> Record<'a> {
    fn open(bytes: &'a [u8]) -> Self {
        let Some(rest) = bytes.strip_prefix(b"T2") else { panic!("{bytes:?} has another layout") };
        Self(rest)
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let Some((read, rest)) = self.0.split_first_chunk() else { panic!("a record ends early") };
        self.0 = rest;
        *read
    }

    /// A number without a fraction that an integer can hold.
    fn number(&mut self) -> i64 {
        let number = f64::from_le_bytes(self.bytes());
        assert!(number.fract() == 0.0 && number.abs() <= SUM_MAX as f64, "{number} in a record");
        number as i64
    }

    /// A number of a part that a record leaves out while all of it is zero.
    fn number_or_zero(&mut self) -> i64 {
        if self.0.is_empty() { 0 } else { self.number() }
    }

    fn close(self) {
        assert!(self.0.is_empty(), "{} bytes too many in a record", self.0.len());
    }
}

// The fields of the literals below are read in the order in which they stand.

pub(super) fn lane_of(bytes: &[u8]) -> Lane {
    let mut record = Record::open(bytes);
    let mut lane = Lane {
        lanes: record.number(),
        seen_us: record.number(),
        offset_us: record.number(),
        keep_ms: record.number(),
        nodes: record.number(),
        most_nodes: record.number(),
        silence_us: record.number(),
        silence_set_us: record.number(),
        recovery: Recovery { since_us: record.number(), ..Recovery::default() },
        incarnation: Incarnation(record.bytes()),
        lost_us: record.number_or_zero(),
    };
    lane.recovery = Recovery {
        reason: [Reason::None, Reason::Loss, Reason::Silence][record.number_or_zero() as usize],
        from_us: record.number_or_zero(),
        until_us: record.number_or_zero(),
        expected: record.number_or_zero(),
        settled: record.number_or_zero(),
        ..lane.recovery
    };
    record.close();
    lane
}

pub(super) fn node_of(bytes: &[u8]) -> Node {
    let mut record = Record::open(bytes);
    let [sequence, marked_us, settled_us] = std::array::from_fn(|_| record.number());
    let hash = u64::from_le_bytes(record.bytes());
    record.bytes::<{ 8 * 8 }>();
    let incarnation = Incarnation(record.bytes());
    Node {
        incarnation,
        receipt: Receipt { sequence, marked_us, settled_us, hash },
        reply: bytes.to_vec(),
    }
}

pub(super) fn key_of(bytes: &[u8]) -> Key {
    let mut record = Record::open(bytes);
    let [rate, token, burst] = std::array::from_fn(|_| record.number());
    let [version, epoch_us, algorithm, until_ms, birth_us] =
        std::array::from_fn(|_| record.number());
    let curve = Curve::of(algorithm).unwrap();
    let scale = Scale { rate, token, burst, curve };
    let [leased1, depth1, outstanding1, demand1] = std::array::from_fn(|_| record.number());
    let mut key = Key {
        scale,
        version,
        epoch_us,
        until_ms,
        birth_us,
        stamp_us: record.number(),
        level: record.number(),
        unleased: record.number(),
        charged: record.number(),
        leased: [record.number(), leased1],
        depth: [record.number(), depth1],
        outstanding: [record.number(), outstanding1],
        demand: [record.number(), demand1],
        written_off: record.number_or_zero(),
        recovering_until_us: record.number_or_zero(),
        viewed_us: 0,
        heard: record.number_or_zero(),
        after_silence: record.number_or_zero(),
        beyond: [record.number_or_zero(), record.number_or_zero()],
        previous: if curve == Curve::SlidingWindow { record.number_or_zero() } else { 0 },
        window_ends_us: if curve == Curve::CalendarWindow { record.number_or_zero() } else { 0 },
        slots: if curve == Curve::SlidingLog { slots_of(&mut record) } else { Slots::default() },
    };
    if key.recovering_until_us < 0 {
        (key.viewed_us, key.recovering_until_us) = (-key.recovering_until_us, 0);
    }
    // A record that became shorter has zeros at its end.
    assert!(record.0.iter().all(|byte| *byte == 0), "{:?} at the end of a record", record.0);
    key
}

fn slots_of(record: &mut Record<'_>) -> Slots {
    let mut slots = Slots::default();
    while record.0.len() >= 16 {
        let (slot, units) = (record.number(), record.number());
        if units > 0 {
            slots.0.push((slot, units));
        }
    }
    slots
}

/// The nodes in a sorted set, and the time of each.
pub(super) fn instances(raw: &mut redis::Connection, name: &str) -> HashMap<InstanceId, i64> {
    let found: Vec<(Vec<u8>, i64)> = raw.zrange_withscores(name, 0, -1).unwrap();
    let instance = |bytes: Vec<u8>| bytes.try_into().unwrap();
    found.into_iter().map(|(bytes, seen_us)| (instance(bytes), seen_us)).collect()
}
