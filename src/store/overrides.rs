//! Overrides in the store: what a node tells and asks, what it is told, and the reference for `lua/overrides.lua`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

#[cfg(feature = "redis")]
use crate::error::StoreError;
use crate::overrides::{End, OVERRIDES_MAX};

/// The most names in a reply.
pub(crate) const PAGE: usize = 500;
/// The most names that one call sets.
pub(crate) const PUTS_MAX: usize = 100;
/// The most names that one call forgets.
const CLEANED_MAX: usize = 100;
/// A name that was removed is kept for so long. A node that was away for longer reads all of them.
const REMOVED_MS: u64 = 600_000;
#[cfg(feature = "redis")]
const NUMBER_MAX: f64 = (1_u64 << 53) as f64;

/// What a node knows of the overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// The life of the records, by when it began; 0 for none.
    pub(crate) birth: u64,
    /// The last number of it.
    pub(crate) number: u64,
}

/// A name that is to be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Put {
    pub(crate) name: Vec<u8>,
    /// Empty if it is removed.
    pub(crate) value: Vec<u8>,
    pub(crate) end: End,
    /// Only where there is none, nor one that was removed: it must not undo that.
    pub(crate) is_restored: bool,
}

/// What a node tells and asks.
#[derive(Clone, Debug, Default)]
pub(crate) struct OverridesRequest {
    pub(crate) known: Known,
    /// The node is reading all of them, page by page.
    pub(crate) reads_all: bool,
    pub(crate) puts: Vec<Put>,
}

/// What a node is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverridesReply {
    /// What it knows with this.
    pub(crate) known: Known,
    /// The store's time, in milliseconds since 1970.
    pub(crate) now_ms: u64,
    /// What it knew before is of another life, or too old: it reads all of them from now on.
    pub(crate) begins_anew: bool,
    pub(crate) has_more: bool,
    /// The store has lost what the node knew, or some of it.
    pub(crate) has_lost: bool,
    /// So many were taken in. The next one was not, because there are as many as there may be.
    pub(crate) taken: usize,
    pub(crate) told: Vec<Told>,
}

/// A name and what it says now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) name: Vec<u8>,
    /// Empty if it was removed.
    pub(crate) value: Vec<u8>,
    /// When it ends, in milliseconds since 1970 by the store's clock; 0 for never.
    pub(crate) ends_ms: u64,
}

#[cfg(feature = "redis")]
impl Put {
    /// The end as the script reads it, and its flags.
    fn end_and_flags(&self) -> (u64, u8) {
        let (end, is_after) = match self.end {
            End::Never => (0, 0),
            End::At(ms) => (ms, 0),
            End::After(ms) => (ms, 1),
        };
        (end, is_after + 2 * u8::from(self.is_restored))
    }
}

#[cfg(feature = "redis")]
impl OverridesRequest {
    /// The script's ARGV.
    pub(crate) fn arguments(&self) -> Vec<Vec<u8>> {
        self.arguments_with(PAGE, OVERRIDES_MAX)
    }

    pub(crate) fn arguments_with(&self, page: usize, most: usize) -> Vec<Vec<u8>> {
        let numbers = [
            self.known.birth as f64,
            self.known.number as f64,
            f64::from(u8::from(self.reads_all)),
            page as f64,
            most as f64,
            REMOVED_MS as f64,
            CLEANED_MAX as f64,
            self.puts.len() as f64,
        ];
        let mut arguments = vec![numbers.iter().flat_map(|number| number.to_le_bytes()).collect()];
        for put in &self.puts {
            let (end, flags) = put.end_and_flags();
            arguments.extend([put.name.clone(), put.value.clone()]);
            arguments.extend([end.to_string().into_bytes(), flags.to_string().into_bytes()]);
        }
        arguments
    }
}

#[cfg(feature = "redis")]
impl OverridesReply {
    /// Reads the script's reply.
    pub(crate) fn decode(reply: &[u8]) -> Result<Self, StoreError> {
        let wrong =
            || StoreError::Reply { field: "overrides", value: format!("{} bytes", reply.len()) };
        let mut rest = reply;
        let mut numbers = [0; 6];
        for number in &mut numbers {
            *number = take_number(&mut rest).ok_or_else(wrong)?;
        }
        let [birth, number, now_ms, flags, taken, count] = numbers;
        let mut told = Vec::new();
        for _ in 0..count {
            told.push(take_told(&mut rest).ok_or_else(wrong)?);
        }
        if !rest.is_empty() {
            return Err(wrong());
        }
        Ok(Self {
            known: Known { birth, number },
            now_ms,
            begins_anew: flags & 1 > 0,
            has_more: flags & 2 > 0,
            has_lost: flags & 4 > 0,
            taken: taken as usize,
            told,
        })
    }
}

#[cfg(feature = "redis")]
fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, after) = rest.split_first_chunk::<8>()?;
    *rest = after;
    let number = f64::from_le_bytes(*bytes);
    (0.0..=NUMBER_MAX).contains(&number).then_some(number as u64)
}

#[cfg(feature = "redis")]
fn take_told(rest: &mut &[u8]) -> Option<Told> {
    let ends_ms = take_number(rest)?;
    let (lengths, after) = rest.split_first_chunk::<4>()?;
    let [name, value] =
        [[lengths[0], lengths[1]], [lengths[2], lengths[3]]].map(u16::from_le_bytes);
    let (name, after) = after.split_at_checked(name.into())?;
    let (value, after) = after.split_at_checked(value.into())?;
    *rest = after;
    Some(Told { name: name.to_vec(), value: value.to_vec(), ends_ms })
}

/// One name.
#[derive(Clone, Debug)]
struct Record {
    number: u64,
    ends_ms: u64,
    value: Vec<u8>,
}

/// There is always room for a removal, and for the switch of a limit.
fn needs_room(name: &[u8], value: &[u8]) -> bool {
    !value.is_empty() && !name.starts_with(b"s:")
}

/// The script's reference, and its records.
#[derive(Debug, Default)]
pub(crate) struct OverridesModel {
    known: Known,
    /// The last number of those that have ended and were forgotten.
    forgotten: u64,
    /// Names that need no room.
    free: usize,
    records: HashMap<Vec<u8>, Record>,
    by_number: BTreeMap<u64, Vec<u8>>,
    by_end: BTreeSet<(u64, Vec<u8>)>,
}

impl OverridesModel {
    /// Does what the script does at `now_us` since 1970.
    pub(crate) fn call(&mut self, request: &OverridesRequest, now_us: u64) -> OverridesReply {
        self.call_with(request, now_us, PAGE, OVERRIDES_MAX)
    }

    fn call_with(
        &mut self,
        request: &OverridesRequest,
        now_us: u64,
        page: usize,
        most: usize,
    ) -> OverridesReply {
        self.clean(now_us / 1000);
        let OverridesRequest { known, reads_all, .. } = request;
        let is_other = known.birth != self.known.birth || known.number > self.known.number;
        let has_lost = known.birth > 0 && is_other;
        if has_lost && known.birth == self.known.birth {
            // The records are older than what this node knows. A new birth lets every node find that out.
            self.known.birth = now_us.max(known.birth + 1);
        }
        let taken = request.puts.iter().take_while(|put| self.put(put, now_us, most)).count();
        let is_known = !has_lost
            && known.birth == self.known.birth
            && (*reads_all || known.number >= self.forgotten);
        let from = if is_known { known.number } else { 0 };
        let mut names = self.by_number.range(from + 1..);
        let page: Vec<_> = names.by_ref().take(page).collect();
        let has_more = names.next().is_some();
        let last = page.last().map(|(number, _)| **number).filter(|_| has_more);
        let told = page.iter().filter_map(|(_, name)| {
            let Record { ends_ms, value, .. } = self.records.get(*name)?.clone();
            Some(Told { name: (*name).clone(), value, ends_ms })
        });
        OverridesReply {
            known: Known { number: last.unwrap_or(self.known.number), ..self.known },
            now_ms: now_us / 1000,
            begins_anew: !is_known,
            has_more,
            has_lost,
            taken,
            told: told.collect(),
        }
    }

    /// Forgets what has ended.
    fn clean(&mut self, now_ms: u64) {
        for _ in 0..CLEANED_MAX {
            let Some((_, name)) = self.by_end.first().filter(|(end, _)| *end <= now_ms).cloned()
            else {
                return;
            };
            if let Some(record) = self.take(&name) {
                self.forgotten = self.forgotten.max(record.number);
            }
        }
    }

    fn take(&mut self, name: &[u8]) -> Option<Record> {
        let record = self.records.remove(name)?;
        self.free -= usize::from(!needs_room(name, &record.value));
        self.by_number.remove(&record.number);
        self.by_end.remove(&(record.ends_ms, name.to_vec()));
        Some(record)
    }

    /// Sets a name. False if there are as many as there may be.
    fn put(&mut self, put: &Put, now_us: u64, most: usize) -> bool {
        let now_ms = now_us / 1000;
        let old = self.records.get(&put.name);
        let had_room = old.is_some_and(|old| needs_room(&put.name, &old.value));
        let wants_room = needs_room(&put.name, &put.value);
        if wants_room && !had_room && self.records.len() - self.free >= most {
            return false;
        }
        if put.is_restored && old.is_some() {
            return true;
        }
        if self.known.birth == 0 {
            self.known.birth = now_us;
        }
        let ends_ms = match put.end {
            _ if put.value.is_empty() => now_ms + REMOVED_MS,
            End::Never => 0,
            End::At(ms) => ms,
            End::After(ms) => now_ms + ms,
        };
        self.take(&put.name);
        self.free += usize::from(!wants_room);
        // A store that went back to an older state gives no number again.
        self.known.number = now_us.max(self.known.number + 1);
        let number = self.known.number;
        self.by_number.insert(number, put.name.clone());
        if ends_ms > 0 {
            self.by_end.insert((ends_ms, put.name.clone()));
        }
        let record = Record { number, ends_ms, value: put.value.clone() };
        self.records.insert(put.name.clone(), record);
        true
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests;
