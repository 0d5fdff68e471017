//! The messages between a node and the store, and their bytes on the wire.
//!
//! All numbers are whole and below 2^53, and are written as little-endian doubles: Lua has no other
//! numbers, and reads these at half the cost of integers. A [`Request`] is one batch: at most
//! [`ENTRIES_MAX`] keys of one lane. It is encoded once; a resend sends the same bytes, and the store
//! recognises them by sequence and hash.

use std::sync::Arc;

use crate::quota::Scale;

#[path = "message/reply.rs"]
mod reply;

pub(crate) use reply::{BatchVerdict, Given, Grant, Receipt, Reply, Withheld};

/// The version of the wire format, of the layout in the store, and of the scripts.
pub(crate) const WIRE_VERSION: u32 = 2;
/// The most keys in one batch, so that one call mostly takes the store less than a millisecond.
pub(crate) const ENTRIES_MAX: usize = 128;
/// How long a node remembers a key whose account it has closed, by the lane's time. After a loss of memory, a view that is at most so
/// much older than the last time that any node heard before has all that nodes have forgotten.
pub(crate) const REMEMBERED_US: i64 = 4_000_000;
/// The largest magnitude of any number on the wire.
const WIRE_MAX: i64 = 1 << 53;
/// No number of a request counts for more: the sum of two is still exact in a double.
pub(crate) const NUMBER_MAX: i64 = 1 << 52;
/// Debt beyond the burst, or beyond what the rate gives in this time, is written off.
pub(crate) const DEBT_US: i64 = 1_000_000;
/// The most refill a microsecond, so that [`DEBT_US`] of it is a [`NUMBER_MAX`] at most.
const RATE_MAX: i64 = NUMBER_MAX / DEBT_US;
/// The longest epoch, so that the end of the epoch after next is still exact: 35 years.
const EPOCH_US_MAX: i64 = 1 << 50;

/// What is outstanding counts for no more, in units.
pub(crate) const OUTSTANDING_MAX: i64 = 1 << 52;
/// The most that a node may owe on credit, or have spent ahead, in tokens.
pub(crate) const CREDIT_TOKENS: i64 = 15;

/// The least that may be outstanding at a node with a lease of `rate`, in units: what it has spent
/// ahead is less than nothing, until the rate goes; then the store takes it off what is available.
pub(crate) fn outstanding_least(rate: i64, token: i64) -> i64 {
    if rate > 0 { -token.saturating_mul(CREDIT_TOKENS).min(OUTSTANDING_MAX) } else { 0 }
}

/// A node's random name.
pub(crate) type InstanceId = [u8; 16];

/// The name of one life of a lane: the node that made it (16 bytes), and when (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Incarnation(pub [u8; 24]);

impl Incarnation {
    /// The name of a lane that `instance` makes at `now_us`, the store's time.
    pub(crate) fn new(instance: &InstanceId, now_us: i64) -> Self {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(instance);
        bytes[16..].copy_from_slice(&now_us.to_le_bytes());
        Self(bytes)
    }

    /// When the lane was made, in the lane's time.
    pub(crate) fn birth_us(&self) -> i64 {
        self.0.last_chunk().map_or(0, |bytes| i64::from_le_bytes(*bytes))
    }
}

/// What a node holds of a key, as the store has it registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Leased refill, in units per microsecond.
    pub rate: i64,
    /// Leased depth, in tokens.
    pub depth: i64,
    /// Outstanding: what was leased to the node and not reported as spent or returned, in units, at
    /// `stamp_us`. It grows at `rate` from then on.
    pub outstanding: i64,
    /// The store's time in its last reply about the key, in microseconds.
    pub stamp_us: i64,
    /// Registered demand, in units per microsecond.
    pub demand: i64,
    /// The store's epoch in which rate, depth and demand were registered last.
    pub tag: i64,
}

impl Held {
    /// When the lease ends in the store.
    pub(crate) fn ends_us(&self, epoch_us: u64) -> i64 {
        (self.tag + 2).saturating_mul(epoch_us as i64)
    }
}

/// Tokens that go back, and the time of the store from which they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backdated {
    pub tokens: i64,
    pub from_us: i64,
}

impl Backdated {
    /// Adds tokens of another time: all of them go back from the earlier one.
    pub(crate) fn add(&mut self, other: Self) {
        if other.tokens > 0 {
            let from_us = if self.tokens > 0 { self.from_us } else { other.from_us };
            self.tokens += other.tokens;
            self.from_us = from_us.min(other.from_us);
        }
    }

    fn bounded(self) -> Self {
        Self { tokens: natural(self.tokens), from_us: natural(self.from_us) }
    }
}

/// What there can be of a key whose record is lost, by what a node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// The most that can be leased, in units.
    pub unleased: i64,
    /// Units charged in the window before the one now, if windows slide.
    pub previous: i64,
    /// The lane's time of the last view of which nothing was withheld; 0 if there was none. Sent where the key is registered anew.
    pub viewed_us: i64,
}

impl Claim {
    fn bounded(self) -> Self {
        let unleased = self.unleased.clamp(-NUMBER_MAX, NUMBER_MAX);
        Self { unleased, previous: natural(self.previous), viewed_us: natural(self.viewed_us) }
    }
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
    /// Tokens spent under an outage policy, or from a lease that has ended: charged only.
    pub allowed: i64,
    /// What outage policies took out of the bucket, in units: subtracted from the level, which it
    /// does not bring below zero.
    pub taken: i64,
    /// The same, in the sliding window before the one now: charged to that.
    pub taken_before: i64,
    /// Outstanding units that the node gives back.
    pub returned: i64,
    /// Outstanding units that the node neither holds nor has spent.
    pub lost: i64,
    /// Leased refill given back, in units per microsecond.
    pub back_rate: i64,
    /// Leased depth given back, in tokens.
    pub back_depth: i64,
    /// Of `spent`, the tokens that were spent before the end of the window in which the lease was renewed last.
    pub spent_before: i64,
    /// Tokens charged by earlier reports, or by this one, that were not used after all.
    /// The first of these requests was decided at `from_us` of the lane's time, or later.
    pub refunded: Backdated,
    /// The window of a calendar that it is now by the node's reckoning, if the limit's windows are: when it began and when
    /// it ends.
    pub window_span_us: [i64; 2],
    /// Tokens of the lease that was given at `from_us`, which has ended: the store counted them as spent, and this node never
    /// spent them.
    pub unspent: Backdated,
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
    /// What there can be, if the store has lost the key's record.
    pub claim: Option<Claim>,
    /// After all of that the key is to be as if it had never been used, but for what is leased.
    pub reset: bool,
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
    pub times: Times,
    /// What the node knows of the lane.
    pub knowledge: Knowledge,
    /// Limits whose nodes the store is to count, this one among them; most batches name none.
    pub limits: Vec<Arc<str>>,
    pub entries: Vec<Entry>,
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "for stores on a wire"))]
    bytes: Vec<u8>,
    hash: u64,
}

/// What a batch says apart from its entries.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub lane: u32,
    pub lanes: u32,
    pub instance: InstanceId,
    pub incarnation: Option<Incarnation>,
    pub sequence: i64,
    pub times: Times,
    pub knowledge: Knowledge,
    /// Limits whose nodes the store is to count, this one among them.
    pub limits: Vec<Arc<str>>,
}

/// How long a lane waits for its nodes, as one of them asks for, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_field_names, reason = "names of numbers end in their units")]
pub(crate) struct Times {
    /// For what nodes know of a key whose record was lost, or of a lane that is new.
    pub recovery_us: i64,
    /// For what nodes know of a lane that lost its memory: the longest life of a lease.
    pub lease_us: i64,
    /// A silence of all nodes beyond this may have been spent from by outage policies.
    pub silence_us: i64,
    /// A node that was silent for this long has gone.
    pub alive_us: i64,
    /// A node that has not named a limit for this long does not have it any more.
    pub limit_alive_us: i64,
}

/// What a node knows of a lane when it sends a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Knowledge {
    /// The lane's time in the last reply that the node received, 0 if there was none.
    pub known_us: i64,
    /// The lane's time when the batch was first sent, by the node's own reckoning; never later.
    pub sent_us: i64,
    /// Nodes alive by the last reply, 0 if there was none.
    pub nodes: i64,
    /// Nothing is left to report of what outage policies took, or to register anew, but what the
    /// batch itself says.
    pub settled: bool,
    /// The node leaves in good order: it is not counted any more.
    pub leaving: bool,
}

impl Request {
    /// Encodes a batch.
    pub(crate) fn new(header: Header, entries: Vec<Entry>) -> Self {
        debug_assert!(entries.len() <= ENTRIES_MAX);
        let bytes = encode(&header, &entries);
        let mut hash = fnv(&bytes, FNV_BASIS);
        for entry in &entries {
            hash = fnv(&entry.key, fnv(entry.limit.as_bytes(), hash));
        }
        for limit in &header.limits {
            hash = fnv(limit.as_bytes(), hash);
        }
        let Header { lane, lanes, instance, incarnation, sequence, times, knowledge, limits } =
            header;
        Self {
            lane,
            lanes,
            instance,
            incarnation,
            sequence,
            times,
            knowledge,
            limits,
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

/// Numbers of an entry's rest.
const REST_NUMBERS: usize = 15;
const HEADER_BYTES: usize = 16 * 8 + 16 + 24;
/// As it stands at the head of a bucket's record.
const QUOTA_BYTES: usize = 2 + 6 * 8;
/// The most that an entry takes: its own, its rest, what its claim has beside, and a quota that no other has.
const ENTRY_BYTES_MAX: usize = 2 + (12 + REST_NUMBERS + 2 + 6) * 8;
/// What every reply and every record begins with.
const MAGIC: [u8; 2] = *b"T2";
const SETTLED: i64 = 1;
const LEAVING: i64 = 2;
const FLAG_RESTORE: u8 = 1;
const FLAG_CLAIM: u8 = 2;
/// The rest of the entry follows: it is not all zeros.
const FLAG_REST: u8 = 4;
const FLAG_RESET: u8 = 8;
/// What the claim says was charged in the window before follows: it is not 0.
const FLAG_PREVIOUS: u8 = 16;
/// Behind that follows the lane's time of the claim's view: it is not 0.
const FLAG_VIEWED: u8 = 32;

/// A limit's definition, which the entries of a batch mostly share: rate, token, burst, version,
/// length of an epoch, and algorithm.
type QuotaNumbers = [i64; 6];

fn encode(header: &Header, entries: &[Entry]) -> Vec<u8> {
    let mut quotas: Vec<QuotaNumbers> = Vec::new();
    let mut body = Vec::with_capacity(entries.len() * ENTRY_BYTES_MAX);
    // Numbers that follow entries.
    let mut more = 0;
    for entry in entries {
        let entry = entry.bounded();
        let quota = entry.quota();
        let known = quotas.iter().rposition(|other| *other == quota);
        let place = known.unwrap_or_else(|| {
            quotas.push(quota);
            quotas.len() - 1
        });
        // The store counts from 1.
        more += entry.encode(place as u8 + 1, &mut body);
    }
    let mut bytes = Vec::with_capacity(HEADER_BYTES + quotas.len() * QUOTA_BYTES + body.len());
    let numbers = [
        i64::from(WIRE_VERSION),
        i64::from(header.lanes),
        natural(header.sequence),
        natural(header.times.recovery_us),
        natural(header.times.lease_us),
        natural(header.times.silence_us),
        natural(header.times.alive_us),
        natural(header.times.limit_alive_us),
        natural(header.knowledge.known_us),
        natural(header.knowledge.sent_us),
        natural(header.knowledge.nodes),
        header.knowledge.flags(),
        entries.len() as i64,
        quotas.len() as i64,
        more as i64,
        header.limits.len() as i64,
    ];
    put(&mut bytes, &numbers);
    bytes.extend(header.instance);
    bytes.extend(header.incarnation.map_or([0; 24], |name| name.0));
    for quota in &quotas {
        bytes.extend(MAGIC);
        put(&mut bytes, quota);
    }
    bytes.append(&mut body);
    bytes
}

impl Knowledge {
    fn flags(self) -> i64 {
        i64::from(self.settled) * SETTLED + i64::from(self.leaving) * LEAVING
    }
}

/// Writes numbers, each of which a double holds exactly.
fn put(bytes: &mut Vec<u8>, numbers: &[i64]) {
    for number in numbers {
        bytes.extend((*number as f64).to_le_bytes());
    }
}

/// A number of a request, within its range.
pub(crate) fn natural(number: i64) -> i64 {
    number.clamp(0, NUMBER_MAX)
}

impl Entry {
    /// An entry that says nothing of its key.
    pub(crate) fn blank(limit: Arc<str>, key: Arc<[u8]>, scale: Scale, epoch_us: i64) -> Self {
        Self {
            limit,
            key,
            scale,
            version: 0,
            epoch_us,
            spent: 0,
            debt: 0,
            allowed: 0,
            taken: 0,
            taken_before: 0,
            returned: 0,
            lost: 0,
            back_rate: 0,
            back_depth: 0,
            spent_before: 0,
            refunded: Backdated::default(),
            window_span_us: [0; 2],
            unspent: Backdated::default(),
            held: Held::default(),
            demand: 0,
            needed: 0,
            want: 0,
            want_rate: 0,
            restore: false,
            claim: None,
            reset: false,
        }
    }

    /// The entry with every number within its range: what the store takes it for.
    ///
    /// No number that a node computes is outside; this is the last look before the bytes, and the
    /// script relies on it.
    pub(crate) fn bounded(&self) -> Self {
        let positive = |number: i64, max: i64| number.clamp(1, max);
        let Scale { rate, token, burst, curve } = self.scale;
        Self {
            limit: self.limit.clone(),
            key: self.key.clone(),
            scale: Scale {
                rate: positive(rate, RATE_MAX),
                token: positive(token, NUMBER_MAX),
                burst: positive(burst, NUMBER_MAX),
                curve,
            },
            version: natural(self.version),
            epoch_us: positive(self.epoch_us, EPOCH_US_MAX),
            spent: natural(self.spent),
            debt: natural(self.debt),
            allowed: natural(self.allowed),
            taken: natural(self.taken),
            taken_before: natural(self.taken_before),
            returned: natural(self.returned),
            lost: natural(self.lost),
            back_rate: natural(self.back_rate),
            back_depth: natural(self.back_depth),
            spent_before: natural(self.spent_before),
            refunded: self.refunded.bounded(),
            window_span_us: self.window_span_us.map(natural),
            unspent: self.unspent.bounded(),
            held: Held {
                rate: natural(self.held.rate),
                depth: natural(self.held.depth),
                outstanding: self.held.outstanding.clamp(-NUMBER_MAX, NUMBER_MAX),
                stamp_us: natural(self.held.stamp_us),
                demand: natural(self.held.demand),
                tag: natural(self.held.tag),
            },
            demand: natural(self.demand),
            needed: natural(self.needed),
            want: natural(self.want),
            want_rate: natural(self.want_rate),
            restore: self.restore,
            claim: self.claim.map(Claim::bounded),
            reset: self.reset,
        }
    }

    /// Whether the node holds a part of the key's bucket, or has spent one and not reported it.
    pub(crate) fn holds(&self) -> bool {
        let Held { rate, depth, outstanding, .. } = self.held;
        rate + self.back_rate > 0 || depth + self.back_depth > 0 || outstanding != 0
    }

    /// The lane's time of the view by which it registers the key anew; 0 if it does not.
    pub(crate) fn viewed_us(&self) -> i64 {
        self.claim.filter(|_| self.restore).map_or(0, |claim| claim.viewed_us)
    }

    /// Whether the store must have a record of the key: it leased some of it, or it cannot be full yet.
    pub(crate) fn is_evidence(&self) -> bool {
        self.holds() || self.claim.is_some_and(|claim| claim.unleased < self.scale.burst)
    }

    fn quota(&self) -> QuotaNumbers {
        let Scale { rate, token, burst, curve } = self.scale;
        [rate, token, burst, self.version, self.epoch_us, curve.number()]
    }

    fn flags(&self, rest_follows: bool) -> u8 {
        u8::from(self.restore) * FLAG_RESTORE
            + u8::from(self.claim.is_some()) * FLAG_CLAIM
            + u8::from(rest_follows) * FLAG_REST
            + u8::from(self.reset) * FLAG_RESET
            + u8::from(self.previous() > 0) * FLAG_PREVIOUS
            + u8::from(self.viewed_us() > 0) * FLAG_VIEWED
    }

    fn numbers(&self) -> [i64; 12] {
        [
            self.spent,
            self.held.rate,
            self.held.depth,
            self.held.outstanding,
            self.held.stamp_us,
            self.held.demand,
            self.held.tag,
            self.demand,
            self.want,
            self.want_rate,
            self.lost,
            self.claim.map_or(0, |claim| claim.unleased),
        ]
    }

    /// Writes the entry of the quota in this place. Returns how many numbers follow.
    fn encode(&self, place: u8, body: &mut Vec<u8>) -> usize {
        let (rest, claimed) = (self.rest(), [self.previous(), self.viewed_us()]);
        let has_rest = rest != [0; REST_NUMBERS];
        body.extend([place, self.flags(has_rest)]);
        put(body, &self.numbers());
        if has_rest {
            put(body, &rest);
        }
        let claimed: Vec<i64> = claimed.into_iter().filter(|number| *number > 0).collect();
        put(body, &claimed);
        usize::from(has_rest) * REST_NUMBERS + claimed.len()
    }

    /// What the claim says was charged in the window before.
    fn previous(&self) -> i64 {
        self.claim.map_or(0, |claim| claim.previous)
    }

    /// What most entries have nothing of.
    fn rest(&self) -> [i64; REST_NUMBERS] {
        [
            self.debt,
            self.allowed,
            self.taken,
            self.returned,
            self.back_rate,
            self.back_depth,
            self.needed,
            self.spent_before,
            self.refunded.tokens,
            self.refunded.from_us,
            self.window_span_us[0],
            self.window_span_us[1],
            self.unspent.tokens,
            self.unspent.from_us,
            self.taken_before,
        ]
    }
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(bytes: &[u8], basis: u64) -> u64 {
    bytes
        .iter()
        .fold(basis, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
#[path = "message/tests.rs"]
mod tests;
