//! The sliding log as `lua/exact-log.lua` has it.

use std::collections::VecDeque;

use smallvec::smallvec;

use super::{ExactRequest, Numbers, RESET, Record};
use crate::algorithm::{LogRule, LogStanding, Standing};

pub(super) fn numbers(rule: &LogRule, request: &ExactRequest) -> Numbers {
    let (ask, cost, at_us) = (request.ask(), request.spends(), request.spent_at_us());
    smallvec![rule.tokens.into(), rule.period_us as f64, ask, cost, at_us]
}

pub(super) fn standing(reply: &[f64]) -> Option<Standing> {
    let &[_, _, remaining, retry_us, next_us, reset_us] = reply else { return None };
    let remaining = (remaining <= f64::from(u32::MAX)).then_some(remaining as u32)?;
    let [retry_us, next_us, reset_us] = [retry_us, next_us, reset_us].map(|us| us as u64);
    Some(Standing::Log(LogStanding { remaining, retry_us, next_us, reset_us }))
}

/// When something was spent, and all that was by then; the oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LogRecord {
    entries: VecDeque<(u64, u64)>,
    /// All that was spent before the first entry.
    before: u64,
}

/// Tokens do not go back once so many elements are later.
const LATER_MAX: usize = 500;

impl LogRecord {
    /// Takes `back` off what was spent at `at_us`, and off all sums since. False if that does not count any more: `gone`
    /// entries do not.
    fn give_back(&mut self, back: u64, at_us: u64, gone: usize) -> bool {
        let place = self.entries.partition_point(|&(at, _)| at < at_us).max(gone);
        let Some(&(spent_us, sum)) = self.entries.get(place) else { return false };
        let before = place.checked_sub(1).map_or(self.before, |last| self.entries[last].1);
        let is_late = self.entries.len() - place > LATER_MAX;
        if is_late || spent_us != at_us || sum - before < back {
            return false;
        }
        self.entries.iter_mut().skip(place).for_each(|(_, sum)| *sum -= back);
        if sum - before == back {
            self.entries.remove(place);
        }
        true
    }

    fn newest_us(&self) -> u64 {
        self.entries.back().map_or(0, |last| last.0)
    }
}

impl Record for LogRecord {
    /// Entries that have gone are looked up, and dropped when something is spent.
    fn decide(record: &mut Option<Self>, numbers: &[f64], time_us: u64) -> Numbers {
        let [tokens, period_us, at_us] = [0, 1, 4].map(|index| numbers[index] as u64);
        let [ask, cost] = [2, 3].map(|index| numbers[index] as i64);
        let mut unused = Self::default();
        let known = match &mut *record {
            None if cost <= 0 => &mut unused,
            record => record.get_or_insert_default(),
        };
        let newest_us = known.newest_us();
        let went_back = newest_us > time_us + period_us;
        let now = if went_back { time_us } else { time_us.max(newest_us) };
        let by_us = if went_back { newest_us } else { now };
        let mut gone = known.entries.partition_point(|&(at, _)| at + period_us <= by_us);
        let mut base = gone.checked_sub(1).map_or(known.before, |last| known.entries[last].1);
        let mut total = known.entries.back().map_or(known.before, |last| last.1);
        if went_back {
            *known = Self { entries: [(now, total)].into(), before: base };
            gone = 0;
        }
        let (mut is_allowed, mut retry_us) = ((total - base) as i64 + ask <= tokens as i64, 0);
        if cost == RESET {
            *known = Self::default();
            (total, base, gone, is_allowed) = (0, 0, 0, true);
        } else if cost < 0 {
            is_allowed = known.give_back(cost.unsigned_abs(), at_us, gone);
            total -= if is_allowed { cost.unsigned_abs() } else { 0 };
        } else if is_allowed && cost > 0 {
            total += cost as u64;
            known.entries.drain(..gone);
            (known.before, gone) = (base, 0);
            match known.entries.back_mut() {
                Some(last) if last.0 == now => last.1 = total,
                _ => known.entries.push_back((now, total)),
            }
        } else if !is_allowed {
            let enough = total + ask as u64 - tokens;
            let last = known.entries.partition_point(|&(_, spent)| spent < enough);
            // A cost above the limit never fits: a period.
            let enough_us = |&(at, _): &(u64, u64)| at + period_us - now;
            retry_us = known.entries.get(last).map_or(period_us, enough_us);
        }
        let returns_us =
            |entry: Option<&(u64, u64)>| entry.map_or(0, |&(at, _)| at + period_us - now);
        let next_us = returns_us(known.entries.get(gone));
        let reset_us = if next_us > 0 { returns_us(known.entries.back()) } else { 0 };
        let left = tokens.saturating_sub(total - base);
        if record.as_ref().is_some_and(|known| known.entries.is_empty()) {
            *record = None;
        }
        let numbers = [is_allowed.into(), now, left, retry_us, next_us, reset_us];
        numbers.map(|number| number as f64).into_iter().collect()
    }

    fn ends_us(&self, numbers: &[f64]) -> u64 {
        self.newest_us() + numbers[1] as u64
    }
}
