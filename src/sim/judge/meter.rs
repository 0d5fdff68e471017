//! What a key may still spend by the definition of its limit's algorithm: the plainest that can be written, and nothing of
//! the limiter's.

use std::collections::VecDeque;

use crate::algorithm::Rule;

/// A definition with its numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Definition {
    rate_per_second: f64,
    burst: f64,
    windows: Option<Windows>,
    /// Requests take slots one after the other, and wait for them.
    is_queue: bool,
}

/// Windows of so many microseconds, of which one begins at each multiple less `offset_us` of the run's time.
#[derive(Clone, Copy, Debug)]
struct Windows {
    kind: Kind,
    period_us: u64,
    offset_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fixed,
    Sliding,
    Log,
}

impl Definition {
    pub(super) fn bucket(rate_per_second: f64, burst: f64) -> Self {
        Self { rate_per_second, burst, windows: None, is_queue: false }
    }

    /// The burst of a leaky bucket is what its queue has room for, and the request whose slot is now. The run began at `origin_us` of the time by which windows begin.
    pub(super) fn of(rule: Rule, origin_us: u64) -> Self {
        let quota = rule.quota();
        let kind = match rule {
            Rule::FixedWindow(_) => Some(Kind::Fixed),
            Rule::SlidingWindow(_) => Some(Kind::Sliding),
            Rule::SlidingLog(_) => Some(Kind::Log),
            Rule::TokenBucket(_) | Rule::LeakyBucket(_) => None,
        };
        let period_us = quota.period().as_micros() as u64;
        let windows = kind.map(|kind| Windows { kind, period_us, offset_us: origin_us });
        let (rate_per_second, burst) = (quota.tokens_per_second(), quota.burst_tokens() as f64);
        let (burst, is_queue) = match rule {
            Rule::LeakyBucket(rule) => {
                (rule.longest_wait().as_secs_f64() * rate_per_second + 1.0, true)
            }
            _ => (burst, false),
        };
        Self { rate_per_second, burst, windows, is_queue }
    }

    pub(super) fn is_queue(&self) -> bool {
        self.is_queue
    }

    /// The least that a key must have for a request: in a queue any request may have the last slot.
    pub(super) fn least(&self, cost: f64) -> f64 {
        if self.is_queue { 1.0 } else { cost }
    }

    pub(super) fn burst(&self) -> f64 {
        self.burst
    }

    pub(super) fn rate_per_second(&self) -> f64 {
        self.rate_per_second
    }
}

/// What one key has left. It may be less than nothing.
#[derive(Clone, Debug)]
pub(super) struct Meter {
    level: f64,
    at_us: u64,
    /// In this window and the one before.
    spent: [f64; 2],
    log: VecDeque<(u64, f64)>,
}

impl Meter {
    /// That of a key that is as if it had never been used.
    pub(super) fn new(definition: &Definition, at_us: u64) -> Self {
        Self { level: definition.burst, at_us, spent: [0.0; 2], log: VecDeque::new() }
    }

    pub(super) fn level(&self) -> f64 {
        self.level
    }

    pub(super) fn at_us(&self) -> u64 {
        self.at_us
    }

    /// Lets time pass.
    pub(super) fn pass(&mut self, definition: &Definition, now_us: u64) {
        let Some(Windows { kind, period_us, offset_us }) = definition.windows else {
            let passed_s = now_us.saturating_sub(self.at_us) as f64 / 1e6;
            let level = self.level + definition.rate_per_second * passed_s;
            (self.level, self.at_us) = (level.min(definition.burst), now_us);
            return;
        };
        let now_us = now_us.max(self.at_us);
        let number = |at_us: u64| (at_us + offset_us) / period_us;
        match number(now_us) - number(self.at_us) {
            0 => {}
            1 => self.spent = [0.0, self.spent[0]],
            _ => self.spent = [0.0; 2],
        }
        self.at_us = now_us;
        while self.log.front().is_some_and(|(at_us, _)| at_us + period_us <= now_us) {
            self.log.pop_front();
        }
        let left_us = period_us - (now_us + offset_us) % period_us;
        let used = match kind {
            Kind::Fixed => self.spent[0],
            Kind::Sliding => {
                // Whole tokens of the window before, exactly: doubles would round some of them down.
                let counted = self.spent[1] as u128 * u128::from(left_us) / u128::from(period_us);
                self.spent[0] + counted as f64
            }
            Kind::Log => self.log.iter().map(|(_, tokens)| tokens).sum(),
        };
        self.level = definition.burst - used;
    }

    pub(super) fn spend(&mut self, tokens: f64) {
        self.level -= tokens;
        self.spent[0] += tokens;
        self.log.push_back((self.at_us, tokens));
    }

    /// When the level comes to `level` by the rate, or has come to it, in seconds since the run's start. Windows give it at
    /// other times: there this is an estimate.
    pub(super) fn reaches_s(&self, level: f64, rate_per_second: f64) -> f64 {
        self.at_us as f64 / 1e6 + (level - self.level) / rate_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{FixedWindow, SlidingLog, SlidingWindow};

    #[test]
    fn windows_give_back_by_their_definitions() {
        let level = |rule: Rule, at_ms: &[u64]| -> Vec<f64> {
            // The run began a quarter of a second after a window did.
            let definition = Definition::of(rule, 7_250_000);
            let mut meter = Meter::new(&definition, 0);
            let mut spend = |ms: &u64| {
                meter.pass(&definition, ms * 1000);
                let level = meter.level();
                meter.spend(4.0);
                level
            };
            at_ms.iter().map(&mut spend).collect()
        };
        let times = [0, 700, 750, 1200, 1750];
        let fixed = level(FixedWindow::per_second(10).into(), &times);
        assert_eq!(fixed, [10.0, 6.0, 10.0, 6.0, 10.0]);
        let sliding = level(SlidingWindow::per_second(10).into(), &times);
        // Of the 8 of the first window 8 count, then 4 of 8 (55% left); of the next 8 all.
        assert_eq!(sliding, [10.0, 6.0, 2.0, 2.0, 2.0]);
        let log = level(SlidingLog::per_second(10).into(), &times);
        assert_eq!(log, [10.0, 6.0, 2.0, 2.0, 6.0]);
    }
}
