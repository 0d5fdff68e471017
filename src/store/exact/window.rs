//! The fixed and the sliding window as `lua/exact-window.lua` has them, step for step.

use smallvec::smallvec;

use super::{ExactRequest, Numbers, RESET, Record};
use crate::algorithm::{Counts, Standing, WindowRule};

/// What was spent, in the window of `stamp_us` and in the one before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WindowRecord {
    /// When the key was allowed something last.
    stamp_us: u64,
    current: u64,
    previous: u64,
    period_us: u64,
}

/// Numbers of a request without a calendar, with the time to keep.
const NUMBERS: usize = 7;

pub(super) fn numbers(rule: &WindowRule, request: &ExactRequest) -> Numbers {
    let sliding = f64::from(u8::from(rule.is_sliding));
    let (ask, cost, at_us) = (request.ask(), request.spends(), request.spent_at_us());
    smallvec![rule.tokens.into(), rule.period_us as f64, sliding, ask, cost, at_us]
}

pub(super) fn standing(rule: &'static WindowRule, reply: &[f64]) -> Option<Standing> {
    let &[_, now, current, previous] = reply else { return None };
    let spent = |tokens: f64| (tokens <= f64::from(u32::MAX)).then_some(tokens as u32);
    let left_us = rule.period_us - now as u64 % rule.period_us;
    let previous = if rule.is_sliding { spent(previous)? } else { 0 };
    Some(Standing::Window(rule, Counts { current: spent(current)?, previous, left_us }))
}

/// Gives back to the window that it was taken from, of the current and the previous one. False if that does not count.
fn give_back(back: u64, passed: Option<u64>, windows: [&mut u64; 2]) -> bool {
    let Some(passed) = passed else { return false };
    let [current, previous] = windows;
    let window = if passed == 0 { current } else { previous };
    *window = window.saturating_sub(back);
    true
}

impl Record for WindowRecord {
    fn decide(record: &mut Option<Self>, numbers: &[f64], time_us: u64) -> Numbers {
        let [tokens, period_us, sliding, at_us] = [0, 1, 2, 5].map(|index| numbers[index] as u64);
        let [ask, cost] = [3, 4].map(|index| numbers[index] as i64);
        let (mut now, mut current, mut previous, mut is_written) = (time_us, 0, 0, false);
        if let Some(known) = *record {
            (current, previous) = (known.current, known.previous);
            let mut stamp_us = known.stamp_us;
            if known.period_us != period_us && cost < 0 && cost != RESET {
                // Another plan counts by now.
                return smallvec![0.0, now as f64, 0.0, 0.0];
            }
            if known.period_us != period_us {
                // As if the new period had been there when something was spent last; of a calendar, that is not known.
                (current, previous) = (current.min(tokens), previous.min(tokens));
                is_written = true;
                if numbers.len() > NUMBERS {
                    stamp_us = now;
                }
            }
            if stamp_us.saturating_sub(now) > period_us {
                is_written = true;
            } else {
                now = now.max(stamp_us);
                match now / period_us - stamp_us / period_us {
                    0 => {}
                    1 => (current, previous) = (0, current),
                    _ => (current, previous) = (0, 0),
                }
            }
        }
        let left_us = period_us - now % period_us;
        let counted = u128::from(previous * sliding) * u128::from(left_us) / u128::from(period_us);
        let is_allowed = if cost == RESET {
            (current, previous) = (0, 0);
            true
        } else if cost < 0 {
            let passed = (now / period_us).checked_sub(at_us / period_us);
            let passed = passed.filter(|passed| record.is_some() && *passed <= sliding);
            give_back(cost.unsigned_abs(), passed, [&mut current, &mut previous])
        } else {
            i128::from(current) + i128::from(ask) + counted as i128 <= tokens.into()
        };
        if is_allowed && cost != 0 && (cost > 0 || record.is_some()) {
            current = (current + cost.max(0) as u64).min(u32::MAX.into());
            is_written = true;
        }
        if is_written && cost != 0 {
            *record = Some(Self { stamp_us: now, current, previous, period_us });
        }
        let allowed = f64::from(u8::from(is_allowed));
        smallvec![allowed, now as f64, current as f64, previous as f64]
    }

    fn ends_us(&self, numbers: &[f64]) -> u64 {
        let period_us = self.period_us;
        (self.stamp_us / period_us + 1) * period_us + numbers[2] as u64 * period_us
    }
}
