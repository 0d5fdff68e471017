//! What the store answers: replies, grants, and their bytes on the wire.

use super::{EPOCH_US_MAX, Entry, Incarnation, MAGIC, WIRE_MAX, put};
use crate::error::StoreError;
use crate::quota::{Curve, Scale};

/// What the store did with a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The store's time, in microseconds.
    pub time_us: i64,
    /// The lane's name now.
    pub incarnation: Incarnation,
    /// Nodes alive in this lane.
    pub nodes: i64,
    /// Until then (the store's time) at the latest the lane waits for nodes to report, and gives less
    /// than it has; 0 while it does not.
    pub recovering_until_us: i64,
    /// When the lane began to wait last (the store's time).
    pub recovering_since_us: i64,
    /// How long a silence of all nodes has to last before the lane takes it that outage policies
    /// were in force, in microseconds.
    pub silence_us: i64,
    /// Nodes that have each of the limits that the batch names; empty if it was not applied.
    pub limit_nodes: Vec<i64>,
    pub verdict: BatchVerdict,
}

/// What became of a batch as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BatchVerdict {
    /// Applied, now or when it first arrived: one grant an entry.
    Applied(Vec<Grant>),
    /// The lane has lost its memory, or this node's place in it: nothing was applied.
    Reborn,
    /// An older batch than the last one applied: nothing was done.
    Stale,
    /// Another batch was applied under this sequence: another node uses the instance id.
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
    /// What is left to lease, in units; below zero while debt is repaid.
    pub available: i64,
    /// That and all that is outstanding, in units: below zero while what was spent on credit or ahead is
    /// not repaid.
    pub level: i64,
    /// The refill leased to all nodes, in units per microsecond.
    pub leased: i64,
    /// The refill that the store would like back, in units per microsecond.
    pub recall: i64,
    /// Units charged in the window before that of `stamp_us`, if windows slide.
    pub previous: i64,
    /// The lease that the batch said was held had ended in the store.
    pub void: bool,
    /// The store found with this entry that the key's record had been lost.
    pub lost: bool,
    /// What the store withholds, because it waits for what other nodes know.
    pub withheld: Withheld,
}

/// What the store withholds of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Withheld {
    #[default]
    Nothing,
    /// Some or all of its tokens: the lane is new.
    Tokens,
    /// Credit too: something was lost, or nodes have not reported for long.
    TokensAndCredit,
}

impl Withheld {
    fn flags(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::Tokens => WITHHELD,
            Self::TokensAndCredit => WITHHELD | CREDIT_WITHHELD,
        }
    }

    /// Reads the flags of a grant's status; credit is never withheld alone.
    fn of(status: u8) -> Option<Self> {
        match (status & WITHHELD > 0, status & CREDIT_WITHHELD > 0) {
            (false, false) => Some(Self::Nothing),
            (true, false) => Some(Self::Tokens),
            (true, true) => Some(Self::TokensAndCredit),
            (false, true) => None,
        }
    }
}

/// Which batch a reply answers: the store recognises a resent one by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub sequence: i64,
    /// When the node was marked as alive last.
    pub marked_us: i64,
    /// Which recovery of the lane the node has settled for: when that began.
    pub settled_us: i64,
    pub hash: u64,
}

pub(super) const REPLY_HEADER_BYTES: usize = 2 + 11 * 8 + 8 + 24;
/// Numbers of a grant, behind its status, and of the times behind those where they follow.
const GRANT_NUMBERS: usize = 7;
const GRANT_TIMES: usize = 3;
const GRANT_BYTES_MAX: usize = 1 + (GRANT_NUMBERS + GRANT_TIMES + 1) * 8;

const GIVEN: u8 = 0;
const OTHER_QUOTA: u8 = 1;
const FOREIGN: u8 = 2;
/// Given, to one whose lease had ended.
pub(super) const GIVEN_VOID: u8 = 3;
/// Added where the times of the grant follow: they are not those of the batch.
pub(super) const TIMED: u8 = 4;
/// Added where the record was found to have been lost.
pub(super) const LOST: u8 = 8;
/// Added where the store gives less than it has.
pub(super) const WITHHELD: u8 = 16;
/// Added where no credit is to be spent meanwhile.
pub(super) const CREDIT_WITHHELD: u8 = 32;
/// Added where it follows, last, what was charged in the window before.
pub(super) const PREVIOUS: u8 = 64;

impl Reply {
    /// Encodes the reply to a batch of `entries` as the script does, which keeps it as it is.
    pub(crate) fn encode(&self, receipt: Receipt, entries: &[Entry]) -> Vec<u8> {
        let none = Vec::new();
        let (status, value, grants) = match &self.verdict {
            BatchVerdict::Applied(grants) => (0, 0, grants),
            BatchVerdict::Reborn => (1, 0, &none),
            BatchVerdict::Stale => (2, 0, &none),
            BatchVerdict::Cloned => (3, 0, &none),
            BatchVerdict::Lanes(lanes) => (4, i64::from(*lanes), &none),
            BatchVerdict::Wire(version) => (5, i64::from(*version), &none),
        };
        let header = [
            status,
            value,
            self.time_us,
            self.nodes,
            self.recovering_until_us,
            self.recovering_since_us,
            self.silence_us,
            grants.len() as i64,
        ];
        let mut bytes = Vec::with_capacity(REPLY_HEADER_BYTES + grants.len() * GRANT_BYTES_MAX);
        bytes.extend(MAGIC);
        put(&mut bytes, &[receipt.sequence, receipt.marked_us, receipt.settled_us]);
        bytes.extend(receipt.hash.to_le_bytes());
        put(&mut bytes, &header);
        bytes.extend(self.incarnation.0);
        for (grant, entry) in grants.iter().zip(entries) {
            grant.put(&mut bytes, self.time_us, entry);
        }
        put(&mut bytes, &self.limit_nodes);
        bytes
    }

    /// Decodes a reply to a batch of `entries` that names this many `limits`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Reply`] names the field that no store of this protocol would send.
    pub(crate) fn decode(
        bytes: &[u8],
        entries: &[Entry],
        limits: usize,
    ) -> Result<Self, StoreError> {
        let mut reader = Reader { bytes };
        let magic: [u8; 2] = reader.take("magic")?;
        if magic != MAGIC {
            return Err(StoreError::Reply { field: "magic", value: format!("{magic:?}") });
        }
        // The receipt is the store's own.
        let _: [u8; 4 * 8] = reader.take("receipt")?;
        let status = reader.number("status")?;
        let value = reader.number("value")?;
        let time_us = reader.natural("time_us")?;
        let nodes = reader.natural("nodes")?;
        let recovering_until_us = reader.natural("recovering_until_us")?;
        let recovering_since_us = reader.natural("recovering_since_us")?;
        let silence_us = reader.natural("silence_us")?;
        let count = reader.natural("grants")?;
        let incarnation = Incarnation(reader.take("incarnation")?);
        let verdict = match status {
            0 if count == entries.len() as i64 => {
                let grants = entries.iter().map(|entry| Grant::read(&mut reader, time_us, entry));
                BatchVerdict::Applied(grants.collect::<Result<_, _>>()?)
            }
            0 => return Err(StoreError::Reply { field: "grants", value: count.to_string() }),
            _ => BatchVerdict::refusal(status, value)?,
        };
        let limits = if status == 0 { limits } else { 0 };
        let limit_nodes =
            (0..limits).map(|_| reader.natural("limit_nodes")).collect::<Result<_, _>>()?;
        if !reader.bytes.is_empty() {
            return Err(StoreError::Reply {
                field: "length",
                value: format!("{} bytes too many", reader.bytes.len()),
            });
        }
        Ok(Self {
            time_us,
            incarnation,
            nodes,
            recovering_until_us,
            recovering_since_us,
            silence_us,
            limit_nodes,
            verdict,
        })
    }
}

impl BatchVerdict {
    /// The verdict of a batch that was not applied.
    fn refusal(status: i64, value: i64) -> Result<Self, StoreError> {
        let small = |field| {
            u32::try_from(value).map_err(|_| StoreError::Reply { field, value: value.to_string() })
        };
        Ok(match status {
            1 => Self::Reborn,
            2 => Self::Stale,
            3 => Self::Cloned,
            4 => Self::Lanes(small("lanes")?),
            5 => Self::Wire(small("wire")?),
            _ => return Err(StoreError::Reply { field: "status", value: status.to_string() }),
        })
    }
}

impl Grant {
    fn put(&self, bytes: &mut Vec<u8>, time_us: i64, entry: &Entry) {
        let (status, numbers, times, previous) = match *self {
            Self::Given(given) => {
                let numbers = [
                    given.tokens,
                    given.rate,
                    given.depth,
                    given.available,
                    given.level,
                    given.leased,
                    given.recall,
                ];
                let times = [given.stamp_us, given.tag, given.life_us];
                let follow = times != times_of(time_us, entry);
                let status = if given.void { GIVEN_VOID } else { GIVEN }
                    + u8::from(follow) * TIMED
                    + u8::from(given.lost) * LOST
                    + given.withheld.flags()
                    + u8::from(given.previous > 0) * PREVIOUS;
                (status, numbers, times, given.previous)
            }
            Self::OtherQuota { version, scale } => {
                // A token bucket's number is 0 here, as it was when there was no other.
                let curve = scale.curve.number() - 1;
                let numbers = [version, scale.rate, scale.token, scale.burst, curve, 0, 0];
                (OTHER_QUOTA, numbers, [0; GRANT_TIMES], 0)
            }
            Self::Foreign => (FOREIGN, [0; GRANT_NUMBERS], [0; GRANT_TIMES], 0),
        };
        bytes.push(status);
        put(bytes, &numbers);
        if status & TIMED > 0 {
            put(bytes, &times);
        }
        if status & PREVIOUS > 0 {
            put(bytes, &[previous]);
        }
    }

    fn read(reader: &mut Reader<'_>, time_us: i64, entry: &Entry) -> Result<Self, StoreError> {
        let [status] = reader.take("grant.status")?;
        let tokens = reader.natural("grant.tokens")?;
        let rate = reader.natural("grant.rate")?;
        let depth = reader.natural("grant.depth")?;
        let available = reader.number("grant.available")?;
        let level = reader.number("grant.level")?;
        let leased = reader.natural("grant.leased")?;
        let recall = reader.natural("grant.recall")?;
        let [stamp_us, tag, life_us] = if status & TIMED > 0 {
            [
                reader.natural("grant.stamp_us")?,
                reader.natural("grant.tag")?,
                reader.natural("grant.life_us")?,
            ]
        } else {
            times_of(time_us, entry)
        };
        let previous = if status & PREVIOUS > 0 { reader.natural("grant.previous")? } else { 0 };
        let implausible = || StoreError::Reply { field: "grant.status", value: status.to_string() };
        match status & !(TIMED | LOST | WITHHELD | CREDIT_WITHHELD | PREVIOUS) {
            void @ (GIVEN | GIVEN_VOID) => Ok(Self::Given(Given {
                tokens,
                rate,
                depth,
                stamp_us,
                tag,
                life_us,
                available,
                level,
                leased,
                recall,
                previous,
                void: void == GIVEN_VOID,
                lost: status & LOST > 0,
                withheld: Withheld::of(status).ok_or_else(implausible)?,
            })),
            OTHER_QUOTA if status == OTHER_QUOTA => {
                let curve = Curve::of(level + 1).ok_or_else(implausible)?;
                let scale = Scale { rate, token: depth.max(1), burst: available, curve };
                Ok(Self::OtherQuota { version: tokens, scale })
            }
            FOREIGN if status == FOREIGN => Ok(Self::Foreign),
            _ => Err(implausible()),
        }
    }
}

/// A grant's stamp, tag and life where they follow from the time of the batch and the entry's epoch.
fn times_of(time_us: i64, entry: &Entry) -> [i64; GRANT_TIMES] {
    let epoch_us = entry.epoch_us.clamp(1, EPOCH_US_MAX);
    let tag = time_us / epoch_us;
    [time_us, tag, (tag + 2) * epoch_us - time_us]
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
        let number = f64::from_le_bytes(self.take(field)?);
        // Infinities and what is no number at all are not within bounds either.
        let is_whole = number.abs() <= WIRE_MAX as f64 && number.fract() == 0.0;
        if !is_whole {
            return Err(StoreError::Reply { field, value: number.to_string() });
        }
        Ok(number as i64)
    }

    fn natural(&mut self, field: &'static str) -> Result<i64, StoreError> {
        let number = self.number(field)?;
        if number < 0 {
            return Err(StoreError::Reply { field, value: number.to_string() });
        }
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Curve;

    const SCALE: Scale =
        Scale { rate: 10, token: 1_000_000, burst: 100_000_000, curve: Curve::FixedWindow };

    #[test]
    fn lease_ends_when_the_epoch_after_the_next_begins() {
        let entry = Entry { epoch_us: 500_000, ..Entry::empty(SCALE) };
        // 10.2 s is in epoch 20, and epoch 22 begins at 11 s.
        assert_eq!(times_of(10_200_000, &entry), [10_200_000, 20, 800_000]);
    }

    #[test]
    fn refusals_survive_their_encoding() {
        let grants = vec![Grant::OtherQuota { version: 7, scale: SCALE }, Grant::Foreign];
        let entries = vec![Entry::empty(SCALE); 2];
        let reply = Reply {
            time_us: 1,
            incarnation: Incarnation::new(&[7; 16], 1),
            nodes: 1,
            recovering_until_us: 0,
            recovering_since_us: 0,
            silence_us: 0,
            limit_nodes: Vec::new(),
            verdict: BatchVerdict::Applied(grants),
        };
        let bytes = reply.encode(Receipt::default(), &entries);
        assert_eq!(Reply::decode(&bytes, &entries, 0), Ok(reply));
    }

    #[test]
    fn numbers_of_a_reply_are_whole_and_within_bounds() {
        let read = |number: f64| Reader { bytes: &number.to_le_bytes() }.number("x");
        let most = WIRE_MAX as f64;
        for number in [0.0, -7.0, most] {
            assert_eq!(read(number), Ok(number as i64));
        }
        for number in [0.5, 2.0 * most, -2.0 * most, f64::INFINITY, f64::NAN] {
            assert!(read(number).is_err(), "{number}");
        }
    }
}
