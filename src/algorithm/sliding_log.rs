//! At most so many tokens in any period, exactly: the sliding window log.

use std::collections::VecDeque;
use std::time::Duration;

use super::window::WindowRule;
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::time::Timestamp;

/// The most tokens of a [`SlidingLog`].
pub const LOG_TOKENS_MAX: u64 = 100_000;

/// At most `tokens` in any period, exactly: the sliding window log.
///
/// A token returns one period after it was spent; of a limit that nodes share, up to a 64th of the period and a tick
/// later. On one node the log keeps the time of each allowed request until then, in 16 to 64
/// bytes each, so it suits small limits: logins, payments. If a key is no longer asked for, its memory returns when the
/// key is evicted.
///
/// Cost: a denial of a cost above 1, and the first decision after a pause, read up to all entries of the key, which is
/// locked meanwhile.
///
/// ```
/// use tidegate::SlidingLog;
///
/// let logins = tidegate::local(SlidingLog::per_minute(5))?;
/// assert_eq!(logins.check("user:42").remaining(), 4);
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingLog {
    pub(super) quota: Quota,
}

impl SlidingLog {
    /// `tokens`, at most [`LOG_TOKENS_MAX`], in each `period`, 100 ms at least.
    ///
    /// Nothing is checked here, so that limits can be constants: a limiter that is built with an impossible one fails
    /// with a [`ConfigError`] that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { quota: Quota::new(tokens, period) }
    }

    pub(super) fn rule(&self, limit: &str) -> Result<LogRule, ConfigError> {
        let WindowRule { tokens, period_us, .. } = WindowRule::new(limit, self.quota, true)?;
        if u64::from(tokens) > LOG_TOKENS_MAX {
            return Err(ConfigError::Limit {
                limit: limit.to_owned(),
                field: "quota.tokens",
                value: tokens.to_string(),
                reason: "a sliding log keeps each request, so it has at most 100000 tokens: use a sliding window",
            });
        }
        Ok(LogRule { tokens, period_us })
    }
}

/// Memory for so few entries is not given back before the key is forgotten.
const ENTRIES_KEPT: usize = 8;

/// The rule of a key whose state is its [`Log`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogRule {
    /// Tokens in any period.
    pub(crate) tokens: u32,
    pub(crate) period_us: u64,
}

/// What a key spent within the last period.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// When tokens were spent, in microseconds, and how many; the oldest first.
    entries: VecDeque<(u64, u32)>,
    spent: u32,
}

/// How a key stood after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogStanding {
    pub(crate) remaining: u32,
    /// Microseconds until a request of the same cost would be allowed; a period for one of more tokens than there are.
    pub(crate) retry_us: u64,
    /// Microseconds until the oldest tokens return; 0 if there are none.
    pub(crate) next_us: u64,
    /// Microseconds until the last tokens return.
    pub(crate) reset_us: u64,
}

impl Log {
    /// Decides about a request of `cost` tokens; none are spent if `is_peek`.
    pub(crate) fn decide(
        &mut self,
        rule: &LogRule,
        now: Timestamp,
        cost: u32,
        is_peek: bool,
    ) -> (bool, LogStanding) {
        // Time may have been read before an earlier decision was made.
        let newest = self.entries.back().map_or(0, |&(at, _)| at);
        let now = now.as_micros().max(newest).min(u64::MAX - rule.period_us);
        while let Some(&(at, cost)) = self.entries.front()
            && at + rule.period_us <= now
        {
            self.entries.pop_front();
            self.spent -= cost;
        }
        if self.entries.capacity() > ENTRIES_KEPT.max(4 * self.entries.len()) {
            self.entries.shrink_to(ENTRIES_KEPT.max(2 * self.entries.len()));
        }
        let room = rule.tokens.saturating_sub(self.spent);
        let is_allowed = cost <= room;
        if is_allowed && !is_peek {
            self.spend(now, cost);
        }
        let returns_us = |at: u64| at + rule.period_us - now;
        let missing = self.spent.saturating_add(if is_allowed { 0 } else { cost });
        let missing = missing.saturating_sub(rule.tokens);
        let standing = LogStanding {
            remaining: rule.tokens.saturating_sub(self.spent),
            retry_us: match missing {
                0 => 0,
                _ => self.returned_at(missing).map_or(rule.period_us, returns_us),
            },
            next_us: self.entries.front().map_or(0, |&(at, _)| returns_us(at)),
            reset_us: self.entries.back().map_or(0, |&(at, _)| returns_us(at)),
        };
        (is_allowed, standing)
    }

    /// Spends `cost` tokens, whatever the limit.
    pub(crate) fn charge(&mut self, rule: &LogRule, now: Timestamp, cost: u32) {
        let newest = self.entries.back().map_or(0, |&(at, _)| at);
        let now = now.as_micros().max(newest).min(u64::MAX - rule.period_us);
        self.spend(now, cost.min(u32::MAX - self.spent));
    }

    /// Takes back tokens that were spent at `decided` or soon after, unless they have returned: the earliest that were spent
    /// since. Which request they are of does not matter: what is left was not spent earlier than it was.
    pub(crate) fn take_back(
        &mut self,
        rule: &LogRule,
        decided: Timestamp,
        now: Timestamp,
        tokens: u32,
    ) {
        if now.micros_since(decided) >= rule.period_us {
            return;
        }
        let mut left = tokens;
        for (at, spent) in &mut self.entries {
            if *at >= decided.as_micros() {
                let less = left.min(*spent);
                *spent -= less;
                left -= less;
            }
        }
        self.spent -= tokens - left;
        self.entries.retain(|&(_, spent)| spent > 0);
    }

    fn spend(&mut self, now: u64, cost: u32) {
        self.spent += cost;
        match self.entries.back_mut() {
            Some((at, spent)) if *at == now => *spent += cost,
            _ => self.entries.push_back((now, cost)),
        }
    }

    /// When the tokens were spent with which so many will have returned; `None` if there are not so many.
    fn returned_at(&self, tokens: u32) -> Option<u64> {
        let mut returned = 0;
        let last = self.entries.iter().find(|&&(_, cost)| {
            returned += cost;
            returned >= tokens
        });
        last.map(|&(at, _)| at)
    }

    /// Whether nothing was spent within the last period.
    pub(crate) fn is_over(&self, rule: &LogRule, now: Timestamp) -> bool {
        let newest = self.entries.back().map_or(0, |&(at, _)| at.saturating_add(rule.period_us));
        newest <= now.as_micros()
    }
}
