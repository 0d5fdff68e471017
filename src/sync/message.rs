//! The messages between a node and the store, and their bytes on the wire.
//!
//! All numbers are 64-bit little-endian integers below 2^53, so that Lua reads them exactly. A
//! [`Request`] is one batch: at most [`ENTRIES_MAX`] keys of one lane. It is encoded once; a resend
//! sends the same bytes, and the store recognises them by sequence and hash.

use std::sync::Arc;

use crate::error::StoreError;
use crate::quota::Scale;

/// The version of the wire format, of the layout in the store, and of the scripts.
pub(crate) const WIRE_VERSION: u32 = 1;
/// The most keys in one batch, so that one call takes the store about a millisecond at most.
pub(crate) const ENTRIES_MAX: usize = 64;
/// The largest magnitude of any number on the wire.
const NUMBER_MAX: i64 = 1 << 53;

/// What is lent counts for no more, in units.
pub(crate) const LENT_MAX: i64 = 1 << 52;
/// The most that a node may owe on credit, or have spent ahead, in tokens.
pub(crate) const CREDIT_TOKENS: i64 = 15;

/// The least that may be lent to a node with a lease of `rate`, in units: what it has spent ahead is
/// less than nothing, until the rate goes; then the store takes it off the level.
pub(crate) fn lent_least(rate: i64, token: i64) -> i64 {
    if rate > 0 { -token.saturating_mul(CREDIT_TOKENS).min(LENT_MAX) } else { 0 }
}

/// A node's random name.
pub(crate) type InstanceId = [u8; 16];

/// The name that a lane got when it was born: who bore it (16 bytes), and when (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Incarnation(pub [u8; 24]);

impl Incarnation {
    /// The name of a lane that `instance` bears at `now_us`, the store's time.
    pub(crate) fn new(instance: &InstanceId, now_us: i64) -> Self {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(instance);
        bytes[16..].copy_from_slice(&now_us.to_le_bytes());
        Self(bytes)
    }
}

/// What a node holds of a key, as the store has it registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Leased refill, in units per microsecond.
    pub rate: i64,
    /// Leased depth, in tokens.
    pub depth: i64,
    /// What was lent to the node and not reported as spent, in units, at `stamp_us`. It grows at
    /// `rate` from then on.
    pub lent: i64,
    /// The store's time at its last word on the key, in microseconds.
    pub stamp_us: i64,
    /// Registered demand, in units per microsecond.
    pub demand: i64,
    /// The store's epoch in which rate, depth and demand were registered last.
    pub tag: i64,
}

/// One key of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub limit: Arc<str>,
    pub key: Arc<[u8]>,
    pub scale: Scale,
    pub version: i64,
    /// Length of a lease epoch, in microseconds.
    pub epoch_us: i64,
    /// Tokens spent of what was lent: charged, not subtracted from the level again.
    pub spent: i64,
    /// Tokens spent on credit: charged and subtracted from the level.
    pub debt: i64,
    /// Tokens spent under an outage policy: charged only.
    pub allowed: i64,
    /// Units given back of what was held.
    pub back_units: i64,
    /// Units lent to the node that it neither holds nor has spent.
    pub lost: i64,
    /// Leased refill given back, in units per microsecond.
    pub back_rate: i64,
    /// Leased depth given back, in tokens.
    pub back_depth: i64,
    /// What is still held after that.
    pub held: Held,
    /// The demand to register, in units per microsecond.
    pub demand: i64,
    /// Tokens that callers are waiting for.
    pub needed: i64,
    /// Tokens wanted on top of these.
    pub want: i64,
    /// Leased refill wanted in all, in units per microsecond.
    pub want_rate: i64,
    /// The store may not know this key's lease: register it anew.
    pub restore: bool,
    /// The highest level that the store's bucket can have by what the node knows, in units.
    pub claim: Option<i64>,
}

/// One batch for one lane.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub lane: u32,
    pub lanes: u32,
    pub instance: InstanceId,
    /// The lane's name as this node knows it; `None` before it was ever reached.
    pub incarnation: Option<Incarnation>,
    pub sequence: i64,
    /// How long a lane that lost its memory waits for what its nodes know.
    pub recovery_us: i64,
    /// A silence of all nodes beyond this was an outage.
    pub silence_us: i64,
    /// A node that was silent for so long has gone.
    pub alive_us: i64,
    pub entries: Vec<Entry>,
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "for stores on a wire"))]
    bytes: Vec<u8>,
    hash: u64,
}

/// What a batch says apart from its entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub lane: u32,
    pub lanes: u32,
    pub instance: InstanceId,
    pub incarnation: Option<Incarnation>,
    pub sequence: i64,
    pub recovery_us: i64,
    pub silence_us: i64,
    pub alive_us: i64,
}

impl Request {
    /// Encodes a batch.
    pub(crate) fn new(header: Header, entries: Vec<Entry>) -> Self {
        debug_assert!(entries.len() <= ENTRIES_MAX);
        let mut bytes = Vec::with_capacity(96 + entries.len() * ENTRY_BYTES);
        let numbers = [
            i64::from(WIRE_VERSION),
            i64::from(header.lanes),
            header.sequence,
            header.recovery_us,
            header.silence_us,
            header.alive_us,
            entries.len() as i64,
        ];
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(header.instance);
        bytes.extend(header.incarnation.map_or([0; 24], |name| name.0));
        for entry in &entries {
            bytes.extend(entry.numbers().iter().flat_map(|number| number.to_le_bytes()));
        }
        let mut hash = fnv(&bytes, FNV_BASIS);
        for entry in &entries {
            hash = fnv(&entry.key, fnv(entry.limit.as_bytes(), hash));
        }
        let Header {
            lane,
            lanes,
            instance,
            incarnation,
            sequence,
            recovery_us,
            silence_us,
            alive_us,
        } = header;
        Self {
            lane,
            lanes,
            instance,
            incarnation,
            sequence,
            recovery_us,
            silence_us,
            alive_us,
            entries,
            bytes,
            hash,
        }
    }

    /// The batch as the script reads it.
    #[cfg(feature = "redis")]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Tokens that the batch reports as spent.
    pub(crate) fn tokens(&self) -> u64 {
        let spent = |entry: &Entry| entry.spent + entry.debt + entry.allowed;
        self.entries.iter().map(spent).sum::<i64>() as u64
    }

    /// Names the batch's content: a resend has the same hash.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}

/// Numbers in an encoded entry.
const ENTRY_NUMBERS: usize = 24;
const ENTRY_BYTES: usize = ENTRY_NUMBERS * 8;
const FLAG_RESTORE: i64 = 1;
const FLAG_CLAIM: i64 = 2;

impl Entry {
    fn numbers(&self) -> [i64; ENTRY_NUMBERS] {
        let flags =
            i64::from(self.restore) * FLAG_RESTORE + i64::from(self.claim.is_some()) * FLAG_CLAIM;
        [
            self.scale.rate,
            self.scale.token,
            self.scale.burst,
            self.version,
            self.epoch_us,
            self.spent,
            self.debt,
            self.allowed,
            self.back_units,
            self.lost,
            self.back_rate,
            self.back_depth,
            self.held.rate,
            self.held.depth,
            self.held.lent,
            self.held.stamp_us,
            self.held.demand,
            self.held.tag,
            self.demand,
            self.want,
            self.want_rate,
            flags,
            self.claim.unwrap_or(0),
            self.needed,
        ]
    }
}

/// What the store did with a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The store's time, in microseconds.
    pub time_us: i64,
    /// The lane's name now.
    pub incarnation: Incarnation,
    /// Nodes alive in this lane.
    pub nodes: i64,
    /// Until then (the store's time) the lane gives nothing new, having lost its memory.
    pub recovering_until_us: i64,
    pub verdict: Verdict,
}

/// What became of a batch as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Applied, now or when it first arrived: one grant an entry.
    Applied(Vec<Grant>),
    /// The lane has lost its memory, or this node's place in it: nothing was applied.
    Reborn,
    /// An older batch than the last one applied: nothing was done.
    Stale,
    /// Another batch was applied under this sequence: somebody else uses the instance id.
    Cloned,
    /// The lane was set up with another number of lanes.
    Lanes(u32),
    /// The store holds another layout.
    Wire(u32),
}

/// The store's answer about one key. Everything in it is an addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Additions to what the node holds, and what the store knows.
    Given(Given),
    /// The store keeps another quota under this limit's name.
    OtherQuota { version: i64, scale: Scale },
    /// The key holds another program's value.
    Foreign,
}

/// Additions to a lease, and the view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// Tokens added.
    pub tokens: i64,
    /// Refill added, in units per microsecond.
    pub rate: i64,
    /// Depth added, in tokens.
    pub depth: i64,
    /// The store's time, in microseconds.
    pub stamp_us: i64,
    /// The epoch in which the lease is now registered.
    pub tag: i64,
    /// How long the lease lasts from the store's time on, in microseconds.
    pub life_us: i64,
    /// The level left in the store, in units.
    pub level: i64,
    /// That and all that is lent, in units: less than nothing while what was spent on credit or ahead
    /// is not repaid.
    pub whole: i64,
    /// The refill leased to all nodes, in units per microsecond.
    pub leased: i64,
    /// The refill that the store would like back, in units per microsecond.
    pub recall: i64,
    /// The lease that the batch said was held had ended in the store.
    pub void: bool,
}

const REPLY_HEADER_BYTES: usize = 6 * 8 + 24;
const GRANT_NUMBERS: usize = 12;

impl Reply {
    /// Encodes a reply as the script does.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let none = Vec::new();
        let (status, value, grants) = match &self.verdict {
            Verdict::Applied(grants) => (0, 0, grants),
            Verdict::Reborn => (1, 0, &none),
            Verdict::Stale => (2, 0, &none),
            Verdict::Cloned => (3, 0, &none),
            Verdict::Lanes(lanes) => (4, i64::from(*lanes), &none),
            Verdict::Wire(version) => (5, i64::from(*version), &none),
        };
        let header = [
            status,
            value,
            self.time_us,
            self.nodes,
            self.recovering_until_us,
            grants.len() as i64,
        ];
        let mut bytes = Vec::with_capacity(REPLY_HEADER_BYTES + grants.len() * GRANT_NUMBERS * 8);
        bytes.extend(header.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(self.incarnation.0);
        for grant in grants {
            bytes.extend(grant.numbers().iter().flat_map(|number| number.to_le_bytes()));
        }
        bytes
    }

    /// Decodes a reply to a batch of `entries` keys.
    ///
    /// # Errors
    ///
    /// [`StoreError::Reply`] names the field that no store of this protocol would send.
    pub(crate) fn decode(bytes: &[u8], entries: usize) -> Result<Self, StoreError> {
        let mut reader = Reader { bytes };
        let status = reader.number("status")?;
        let value = reader.number("value")?;
        let time_us = reader.natural("time_us")?;
        let nodes = reader.natural("nodes")?;
        let recovering_until_us = reader.natural("recovering_until_us")?;
        let count = reader.natural("grants")?;
        let incarnation = Incarnation(reader.take("incarnation")?);
        let small = |field| {
            u32::try_from(value).map_err(|_| StoreError::Reply { field, value: value.to_string() })
        };
        let verdict = match status {
            0 if count == entries as i64 => Verdict::Applied(
                (0..entries).map(|_| Grant::read(&mut reader)).collect::<Result<_, _>>()?,
            ),
            0 => return Err(StoreError::Reply { field: "grants", value: count.to_string() }),
            1 => Verdict::Reborn,
            2 => Verdict::Stale,
            3 => Verdict::Cloned,
            4 => Verdict::Lanes(small("lanes")?),
            5 => Verdict::Wire(small("wire")?),
            _ => return Err(StoreError::Reply { field: "status", value: status.to_string() }),
        };
        if !reader.bytes.is_empty() {
            return Err(StoreError::Reply {
                field: "length",
                value: format!("{} bytes too many", reader.bytes.len()),
            });
        }
        Ok(Self { time_us, incarnation, nodes, recovering_until_us, verdict })
    }
}

impl Grant {
    fn numbers(&self) -> [i64; GRANT_NUMBERS] {
        match *self {
            Self::Given(given) => [
                0,
                given.tokens,
                given.rate,
                given.depth,
                given.stamp_us,
                given.tag,
                given.life_us,
                given.level,
                given.whole,
                given.leased,
                given.recall,
                i64::from(given.void),
            ],
            Self::OtherQuota { version, scale } => {
                [1, version, scale.rate, scale.token, scale.burst, 0, 0, 0, 0, 0, 0, 0]
            }
            Self::Foreign => [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, StoreError> {
        let status = reader.number("grant.status")?;
        let natural = [
            "grant.tokens",
            "grant.rate",
            "grant.depth",
            "grant.stamp_us",
            "grant.tag",
            "grant.life_us",
        ];
        let mut numbers = [0; 6];
        for (number, field) in numbers.iter_mut().zip(natural) {
            *number = reader.natural(field)?;
        }
        let [tokens, rate, depth, stamp_us, tag, life_us] = numbers;
        let level = reader.number("grant.level")?;
        let whole = reader.number("grant.whole")?;
        let leased = reader.natural("grant.leased")?;
        let recall = reader.natural("grant.recall")?;
        let void = reader.natural("grant.void")? != 0;
        match status {
            0 => Ok(Self::Given(Given {
                tokens,
                rate,
                depth,
                stamp_us,
                tag,
                life_us,
                level,
                whole,
                leased,
                recall,
                void,
            })),
            1 => Ok(Self::OtherQuota {
                version: tokens,
                scale: Scale { rate, token: depth.max(1), burst: stamp_us },
            }),
            2 => Ok(Self::Foreign),
            _ => Err(StoreError::Reply { field: "grant.status", value: status.to_string() }),
        }
    }
}

/// Reads numbers off a reply and refuses what cannot be one.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], StoreError> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<N>() else {
            return Err(StoreError::Reply { field, value: "the reply is cut short".to_owned() });
        };
        self.bytes = rest;
        Ok(*head)
    }

    fn number(&mut self, field: &'static str) -> Result<i64, StoreError> {
        let number = i64::from_le_bytes(self.take(field)?);
        if !(-NUMBER_MAX..=NUMBER_MAX).contains(&number) {
            return Err(StoreError::Reply { field, value: number.to_string() });
        }
        Ok(number)
    }

    fn natural(&mut self, field: &'static str) -> Result<i64, StoreError> {
        let number = self.number(field)?;
        if number < 0 {
            return Err(StoreError::Reply { field, value: number.to_string() });
        }
        Ok(number)
    }
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(bytes: &[u8], basis: u64) -> u64 {
    bytes
        .iter()
        .fold(basis, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn given() -> impl Strategy<Value = Grant> {
        (0..NUMBER_MAX, 0..NUMBER_MAX, -NUMBER_MAX..NUMBER_MAX, any::<bool>()).prop_map(
            |(tokens, rate, level, void)| {
                let rest = Given { stamp_us: tokens, life_us: rate, ..Given::default() };
                Grant::Given(Given { tokens, rate, level, void, ..rest })
            },
        )
    }

    proptest! {
        #[test]
        fn a_reply_survives_its_encoding(
            grants in prop::collection::vec(given(), 0..5), time_us in 0..NUMBER_MAX,
        ) {
            let entries = grants.len();
            let reply = Reply {
                time_us,
                incarnation: Incarnation::new(&[7; 16], time_us),
                nodes: 3,
                recovering_until_us: 5,
                verdict: Verdict::Applied(grants),
            };
            prop_assert_eq!(Reply::decode(&reply.encode(), entries), Ok(reply));
        }

        #[test]
        fn a_hostile_reply_is_an_error_and_never_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..400), entries in 0..4_usize,
        ) {
            let _ = Reply::decode(&bytes, entries);
        }

        #[test]
        fn a_reply_cut_anywhere_is_refused(cut in 0..168_usize) {
            let reply = Reply {
                time_us: 1,
                incarnation: Incarnation([1; 24]),
                nodes: 1,
                recovering_until_us: 0,
                verdict: Verdict::Applied(vec![Grant::Given(Given::default())]),
            };
            let bytes = reply.encode();
            prop_assert_eq!(bytes.len(), 168);
            prop_assert!(Reply::decode(&bytes[..cut], 1).is_err());
        }
    }
}
