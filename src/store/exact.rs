//! Limits that the store decides: what it is asked about a request, and what it answers.
//!
//! Question and answer are numbers, the same for the scripts in `lua/exact-*.lua` and for their reference here: each
//! algorithm's file says which, and has the reference.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::algorithm::{LocalRule, Standing};
use crate::error::StoreError;
use crate::limit::LimitInfo;

mod log;
mod turn;
mod window;

/// A record is kept for a little longer than it counts, because a script may read the time later than its server.
pub(crate) const KEEP_US: u64 = 2_000;

/// Numbers of a question or an answer, as a script has them.
type Numbers = SmallVec<[f64; 9]>;

/// A request of a key of an exact limit.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) limit: &'static LimitInfo,
    pub(crate) rule: &'static LocalRule,
    pub(crate) key: Arc<[u8]>,
    /// In tokens; 0 spends nothing, and tells what one token would be told.
    pub(crate) cost: u32,
    /// How long the request may wait for a slot, in microseconds.
    pub(crate) within_us: u64,
}

/// What the store decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) is_allowed: bool,
    pub(crate) standing: Standing,
    /// When, in microseconds since 1970 by the store's clock.
    pub(crate) at_us: u64,
}

impl Question {
    /// The tokens that there must be.
    fn ask(&self) -> u32 {
        self.cost.max(1)
    }

    /// What the script is told. The record is kept for `keep_us` longer than it counts.
    pub(crate) fn numbers(&self, keep_us: u64) -> Numbers {
        let mut numbers = match self.rule {
            LocalRule::Turn(rule) => turn::numbers(rule, self),
            LocalRule::Window(rule) => window::numbers(rule, self),
            LocalRule::Log(rule) => log::numbers(rule, self),
        };
        numbers.push(keep_us as f64);
        numbers
    }

    /// Reads what the script said.
    pub(crate) fn answer(&self, reply: &[u8]) -> Result<Answer, StoreError> {
        let (numbers, rest) = reply.as_chunks::<8>();
        let numbers: Numbers = numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let is_natural = |number: &f64| (0.0..=9_007_199_254_740_992.0).contains(number);
        let read = match self.rule {
            _ if !rest.is_empty() || !numbers.iter().all(is_natural) => None,
            LocalRule::Turn(rule) => turn::standing(rule, self, &numbers),
            LocalRule::Window(rule) => window::standing(rule, &numbers),
            LocalRule::Log(_) => log::standing(&numbers),
        };
        let answer = read.map(|standing| Answer {
            is_allowed: numbers[0] > 0.0,
            standing,
            at_us: numbers[1] as u64,
        });
        answer.ok_or_else(|| StoreError::Reply {
            field: "decision",
            value: format!("{numbers:?} and {} bytes", rest.len()),
        })
    }
}

/// The scripts' reference, and its records.
#[derive(Debug, Default)]
pub(crate) struct Model {
    turns: Records<turn::Record>,
    windows: Records<window::Record>,
    logs: Records<log::Record>,
}

/// Whose record it is: algorithm, limit and key.
type Name = (&'static str, &'static str, Arc<[u8]>);

/// The records of some algorithms.
#[derive(Debug)]
struct Records<R> {
    /// Beside each, until when it counts.
    records: HashMap<Name, (R, u64)>,
}

impl<R> Default for Records<R> {
    fn default() -> Self {
        Self { records: HashMap::new() }
    }
}

/// What is done with a record, and how long it counts.
struct Algorithm<R> {
    decide: fn(&mut Option<R>, &[f64], u64) -> Numbers,
    ends_us: fn(&R, &[f64]) -> u64,
}

impl<R> Records<R> {
    fn decide(&mut self, question: &Question, time_us: u64, algorithm: &Algorithm<R>) -> Numbers {
        let Question { limit, key, .. } = question;
        let name = (limit.rule.algorithm(), &*limit.name, key.clone());
        let mut record = self.records.remove(&name).map(|(record, _)| record);
        let numbers = question.numbers(KEEP_US);
        let reply = (algorithm.decide)(&mut record, &numbers, time_us);
        if let Some(record) = record {
            let ends_us = (algorithm.ends_us)(&record, &numbers);
            self.records.insert(name, (record, ends_us));
        }
        reply
    }
}

impl Model {
    /// Decides as the script does at `time_us` since 1970.
    pub(crate) fn decide(
        &mut self,
        question: &Question,
        time_us: u64,
    ) -> Result<Answer, StoreError> {
        let bytes: Vec<u8> =
            self.reply(question, time_us).iter().flat_map(|number| number.to_le_bytes()).collect();
        question.answer(&bytes)
    }

    /// Forgets what counts no more.
    pub(crate) fn expire(&mut self, time_us: u64) {
        self.turns.records.retain(|_, (_, ends_us)| *ends_us > time_us);
        self.windows.records.retain(|_, (_, ends_us)| *ends_us > time_us);
        self.logs.records.retain(|_, (_, ends_us)| *ends_us > time_us);
    }

    /// Records held.
    pub(crate) fn len(&self) -> usize {
        self.turns.records.len() + self.windows.records.len() + self.logs.records.len()
    }

    /// The numbers of the script's reply.
    fn reply(&mut self, question: &Question, time_us: u64) -> Numbers {
        const TURN: Algorithm<turn::Record> =
            Algorithm { decide: turn::decide, ends_us: turn::ends_us };
        const WINDOW: Algorithm<window::Record> =
            Algorithm { decide: window::decide, ends_us: window::ends_us };
        const LOG: Algorithm<log::Record> =
            Algorithm { decide: log::decide, ends_us: log::ends_us };
        match question.rule {
            LocalRule::Turn(_) => self.turns.decide(question, time_us, &TURN),
            LocalRule::Window(_) => self.windows.decide(question, time_us, &WINDOW),
            LocalRule::Log(_) => self.logs.decide(question, time_us, &LOG),
        }
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests;
