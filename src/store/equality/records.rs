//! Reads the records that the script writes, as docs/REDIS.md says they are.

use crate::quota::Scale;
use crate::store::model::{Key, Lane, Node, Reason, Recovery, SUM_MAX};
use crate::sync::message::{Incarnation, Receipt, TOKEN_BUCKET};

/// Splits a record of ours into its first `N` numbers and the bytes after them.
fn record<const N: usize>(bytes: &[u8]) -> ([i64; N], &[u8]) {
    let rest = bytes.strip_prefix(b"T2").expect("a record begins with its layout");
    let (numbers, rest) = rest.split_at(8 * N);
    let mut read = numbers.as_chunks::<8>().0.iter().map(|bytes| whole(*bytes));
    (std::array::from_fn(|_| read.next().unwrap()), rest)
}

/// A number of a record: no fraction, nor anything that an integer could not say.
fn whole(bytes: [u8; 8]) -> i64 {
    let number = f64::from_le_bytes(bytes);
    assert!(number.fract() == 0.0 && number.abs() <= SUM_MAX as f64, "{number} in a record");
    number as i64
}

pub(super) fn lane_of(bytes: &[u8]) -> Lane {
    let (numbers, rest) = record::<9>(bytes);
    let [
        lanes,
        seen_us,
        offset_us,
        keep_ms,
        nodes,
        most_nodes,
        silence_us,
        silence_set_us,
        since_us,
    ] = numbers;
    let (incarnation, rest) = rest.split_first_chunk().unwrap();
    let trouble = if rest.is_empty() { [0; 6] } else { numbers_of(rest) };
    let [lost_us, reason, from_us, until_us, expected, settled] = trouble;
    let reason = [Reason::None, Reason::Loss, Reason::Silence][reason as usize];
    Lane {
        lanes,
        incarnation: Incarnation(*incarnation),
        seen_us,
        offset_us,
        keep_ms,
        nodes,
        most_nodes,
        silence_us,
        silence_set_us,
        lost_us,
        recovery: Recovery { reason, from_us, since_us, until_us, expected, settled },
    }
}

/// All the numbers of a part of a record.
fn numbers_of<const N: usize>(bytes: &[u8]) -> [i64; N] {
    assert_eq!(bytes.len(), 8 * N);
    let mut read = bytes.as_chunks::<8>().0.iter().map(|bytes| whole(*bytes));
    std::array::from_fn(|_| read.next().unwrap())
}

pub(super) fn node_of(bytes: &[u8]) -> Node {
    let ([sequence, marked_us, settled_us], rest) = record::<3>(bytes);
    let (hash, rest) = rest.split_first_chunk::<8>().unwrap();
    let hash = u64::from_le_bytes(*hash);
    let (incarnation, _) = rest[8 * 8..].split_first_chunk().unwrap();
    Node {
        incarnation: Incarnation(*incarnation),
        receipt: Receipt { sequence, marked_us, settled_us, hash },
        reply: bytes.to_vec(),
    }
}

pub(super) fn key_of(bytes: &[u8]) -> Key {
    let (numbers, rest) = record::<20>(bytes);
    let trouble = if rest.is_empty() { [0; 4] } else { numbers_of(rest) };
    let [written_off, recovering_until_us, heard, after_silence] = trouble;
    let [rate, token, burst, version, epoch_us, algorithm, until_ms, birth_us, ..] = numbers;
    let [.., leased1, depth1, out1, demand1, _, _, _, _, _, _, _, _] = numbers;
    let [.., stamp_us, level, unleased, charged, leased0, depth0, out0, demand0] = numbers;
    assert_eq!(algorithm, TOKEN_BUCKET);
    Key {
        scale: Scale { rate, token, burst },
        version,
        epoch_us,
        until_ms,
        written_off,
        birth_us,
        recovering_until_us,
        heard,
        after_silence,
        stamp_us,
        level,
        unleased,
        charged,
        leased: [leased0, leased1],
        depth: [depth0, depth1],
        outstanding: [out0, out1],
        demand: [demand0, demand1],
    }
}
