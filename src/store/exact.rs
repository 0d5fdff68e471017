//! Exact limits in the store: what it is asked about a request, and what it replies.
//!
//! Both are numbers, the same for the scripts in `lua/exact-*.lua` and for their reference here: each algorithm's file says
//! which, and has the reference.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::algorithm::{KeyRule, Standing, Windows};
use crate::error::StoreError;
use crate::limit::LimitInfo;

mod log;
mod turn;
mod window;

/// A record is kept for so much longer than it counts: scripts read the time up to a millisecond later than the server does
/// when it computes an expiry, and expiries are whole milliseconds.
pub(crate) const KEEP_US: u64 = 2_000;
/// Numbers beyond this are no reply.
const NUMBER_MAX: f64 = (1_u64 << 53) as f64;
/// What a reset spends: everything goes back, whatever was spent.
const RESET: i64 = -(1 << 53);

/// Numbers of a request or a reply, as a script has them.
type Numbers = SmallVec<[f64; 11]>;

/// A request of a key of an exact limit.
#[derive(Clone, Debug)]
pub(crate) struct ExactRequest {
    pub(crate) limit: &'static LimitInfo,
    pub(crate) rule: &'static KeyRule,
    pub(crate) key: Arc<[u8]>,
    /// In tokens; 0 spends nothing, and tells what one token would be told.
    pub(crate) cost: u32,
    pub(crate) deed: Deed,
    /// How long the request may wait for a slot, in microseconds.
    pub(crate) slot_within_us: u64,
    /// The windows about now, where they are a calendar's.
    pub(crate) windows: Option<Windows>,
}

/// What is to be done about the cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    /// It is spent if the request is allowed.
    Ask,
    /// It has been spent, and is charged whatever is left.
    Charge,
    /// It was spent then, and goes back.
    Return(SpentAt),
    /// The key is as if it had never been used.
    Reset,
}

/// By what the store finds what a request spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpentAt {
    /// When the store decided, in microseconds since 1970 by its clock.
    pub(crate) at_us: u64,
    /// How far ahead the key was then, in units of a bucket's rule.
    pub(crate) ahead: u64,
}

/// What the store decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExactReply {
    /// Or was given back.
    pub(crate) is_allowed: bool,
    pub(crate) standing: Standing,
    /// When, in microseconds since 1970 by the store's clock.
    pub(crate) at_us: u64,
}

impl ExactRequest {
    /// The tokens that go back.
    pub(crate) fn returns(&self) -> u32 {
        if let Deed::Return(_) = self.deed { self.cost } else { 0 }
    }

    /// The tokens that there must be. What has been spent is charged to a key that has none too.
    fn ask(&self) -> f64 {
        if self.deed == Deed::Charge { -NUMBER_MAX } else { self.cost.max(1).into() }
    }

    /// The tokens that are spent; below 0 if they go back.
    fn spends(&self) -> f64 {
        let cost = f64::from(self.cost);
        match self.deed {
            Deed::Ask | Deed::Charge => cost,
            Deed::Return(_) => -cost,
            Deed::Reset => RESET as f64,
        }
    }

    /// When the tokens that go back were spent, as the script tells the time. 0 if that is in none of its windows.
    fn spent_at_us(&self) -> f64 {
        let Deed::Return(SpentAt { at_us, .. }) = self.deed else { return 0.0 };
        let at_us = match self.windows {
            Some(windows) => windows.calendar_us(at_us).unwrap_or(0),
            None => at_us,
        };
        at_us as f64
    }

    /// The script's `ARGV[1]`. The record is kept for `keep_us` longer than it counts.
    #[cfg(feature = "redis")]
    pub(crate) fn bytes(&self, keep_us: u64) -> Vec<u8> {
        self.numbers(keep_us).iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn numbers(&self, keep_us: u64) -> Numbers {
        let mut numbers = match self.rule {
            KeyRule::Turn(rule) => turn::numbers(rule, self),
            KeyRule::Window(rule) => window::numbers(rule, self),
            KeyRule::Log(rule) => log::numbers(rule, self),
        };
        numbers.push(keep_us as f64);
        numbers.extend(self.windows.iter().flat_map(Windows::numbers).map(|number| number as f64));
        numbers
    }

    /// Reads the script's reply.
    #[cfg(feature = "redis")]
    pub(crate) fn decode(&self, reply: &[u8]) -> Result<ExactReply, StoreError> {
        let (numbers, rest) = reply.as_chunks::<8>();
        if !rest.is_empty() {
            let value = format!("{} bytes", reply.len());
            return Err(StoreError::Reply { field: "decision", value });
        }
        let numbers: Numbers = numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        self.read(&numbers)
    }

    fn read(&self, numbers: &[f64]) -> Result<ExactReply, StoreError> {
        let is_natural = |number: &f64| (0.0..=NUMBER_MAX).contains(number);
        let standing = match self.rule {
            _ if !numbers.iter().all(is_natural) => None,
            KeyRule::Turn(rule) => turn::standing(rule, self, numbers),
            KeyRule::Window(rule) => window::standing(rule, numbers),
            KeyRule::Log(_) => log::standing(numbers),
        };
        let read = |standing| ExactReply {
            is_allowed: numbers[0] > 0.0,
            standing,
            at_us: self.windows.map_or(numbers[1] as u64, |of| of.unix_us(numbers[1] as u64)),
        };
        let wrong = || StoreError::Reply { field: "decision", value: format!("{numbers:?}") };
        standing.map(read).ok_or_else(wrong)
    }
}

/// What the script says where the request names none of the windows at its time.
fn outside_windows(time_us: u64) -> StoreError {
    let seconds = time_us / 1_000_000;
    StoreError::Server(format!(
        "TIDEGATE CALENDAR clocks of node and server are a window apart: it is {seconds} s here"
    ))
}

/// What the store has of a key, and how it decides from that.
trait Record: Sized {
    /// Whether a change keeps the record at least as long as it was kept before: by the rule of before, more may be missing than by
    /// this one.
    const IS_KEPT_AS_LONG: bool = false;

    /// Does what the script does at `time_us`. Returns the numbers of its reply.
    fn decide(record: &mut Option<Self>, numbers: &[f64], time_us: u64) -> Numbers;

    /// When nothing of it counts any more, in microseconds since 1970.
    fn ends_us(&self, numbers: &[f64]) -> u64;
}

/// Algorithm, limit and key.
type Name = (&'static str, &'static str, Arc<[u8]>);

/// Records, and until when each counts.
type Records<R> = HashMap<Name, (R, u64)>;

/// The scripts' reference, and its records.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExactModel {
    turns: Records<turn::TurnRecord>,
    windows: Records<window::WindowRecord>,
    logs: Records<log::LogRecord>,
}

impl ExactModel {
    /// Decides as the script does at `time_us` since 1970.
    pub(crate) fn decide(
        &mut self,
        request: &ExactRequest,
        time_us: u64,
    ) -> Result<ExactReply, StoreError> {
        request.read(&self.reply(request, time_us)?)
    }

    fn reply(&mut self, request: &ExactRequest, time_us: u64) -> Result<Numbers, StoreError> {
        let time_us = match request.windows {
            Some(windows) => {
                windows.calendar_us(time_us).ok_or_else(|| outside_windows(time_us))?
            }
            None => time_us,
        };
        Ok(match request.rule {
            KeyRule::Turn(_) => decide_in(&mut self.turns, request, time_us),
            KeyRule::Window(_) => decide_in(&mut self.windows, request, time_us),
            KeyRule::Log(_) => decide_in(&mut self.logs, request, time_us),
        })
    }

    /// Forgets what counts no more.
    pub(crate) fn expire(&mut self, time_us: u64) {
        self.turns.retain(|_, (_, ends_us)| *ends_us > time_us);
        self.windows.retain(|_, (_, ends_us)| *ends_us > time_us);
        self.logs.retain(|_, (_, ends_us)| *ends_us > time_us);
    }

    /// Loses a key's record.
    #[cfg(feature = "sim")]
    pub(crate) fn lose(&mut self, key: &[u8]) {
        self.turns.retain(|(_, _, name), _| **name != *key);
    }

    /// Records held.
    pub(crate) fn len(&self) -> usize {
        self.turns.len() + self.windows.len() + self.logs.len()
    }
}

fn decide_in<R: Record>(records: &mut Records<R>, request: &ExactRequest, time_us: u64) -> Numbers {
    let ExactRequest { limit, key, .. } = request;
    let name = (limit.rule.algorithm(), &*limit.name, key.clone());
    let (mut record, kept_until_us) = match records.remove(&name) {
        Some((record, until_us)) => {
            let is_kept = R::IS_KEPT_AS_LONG && request.deed != Deed::Reset;
            (Some(record), if is_kept { until_us } else { 0 })
        }
        None => (None, 0),
    };
    let numbers = request.numbers(KEEP_US);
    let reply = R::decide(&mut record, &numbers, time_us);
    if let Some(record) = record {
        let ends_us = record.ends_us(&numbers);
        // Records are looked through by the time since 1970.
        let ends_us = request.windows.map_or(ends_us, |windows| windows.unix_us(ends_us - 1) + 1);
        records.insert(name, (record, ends_us.max(kept_until_us)));
    }
    reply
}

#[cfg(all(test, feature = "redis"))]
mod tests;
