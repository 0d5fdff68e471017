//! One of the algorithms with its numbers, and how a key stands by it.

use std::time::Duration;

use super::fixed_window::FixedWindow;
use super::leaky_bucket::LeakyBucket;
use super::sliding_log::{LogRule, LogStanding, SlidingLog};
use super::sliding_window::SlidingWindow;
use super::turn::{Turn, TurnRule};
use super::window::{Counts, WindowRule};
use crate::error::ConfigError;
use crate::quota::Quota;

/// An algorithm and its numbers: what a limit allows.
///
/// Each algorithm's own type turns into a rule, so [`Limit::new`](crate::Limit::new) takes any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// A rate, and a burst that a quiet key may spend at once.
    TokenBucket(Quota),
    /// Requests one after the other, at an even pace.
    LeakyBucket(LeakyBucket),
    /// At most `tokens` in each window.
    FixedWindow(FixedWindow),
    /// At most `tokens` in any period, estimated from two windows.
    SlidingWindow(SlidingWindow),
    /// At most `tokens` in any period, exactly.
    SlidingLog(SlidingLog),
}

impl From<Quota> for Rule {
    fn from(quota: Quota) -> Self {
        Self::TokenBucket(quota)
    }
}

/// The constructors that all types have, and how each turns into a rule.
macro_rules! algorithm {
    ($($name:ident),*) => {$(
        impl $name {
            /// `tokens` per second.
            pub const fn per_second(tokens: u64) -> Self {
                Self::new(tokens, Duration::from_secs(1))
            }

            /// `tokens` per minute.
            pub const fn per_minute(tokens: u64) -> Self {
                Self::new(tokens, Duration::from_secs(60))
            }

            /// `tokens` per hour.
            pub const fn per_hour(tokens: u64) -> Self {
                Self::new(tokens, Duration::from_secs(3600))
            }

            /// `tokens` per 24 hours.
            pub const fn per_day(tokens: u64) -> Self {
                Self::new(tokens, Duration::from_secs(24 * 3600))
            }

            /// Tokens per [`period`](Self::period).
            pub const fn tokens(&self) -> u64 {
                self.quota.tokens()
            }

            /// The period that the tokens are given for.
            pub const fn period(&self) -> Duration {
                self.quota.period()
            }
        }

        impl From<$name> for Rule {
            fn from(rule: $name) -> Self {
                Self::$name(rule)
            }
        }
    )*};
}

algorithm!(LeakyBucket, FixedWindow, SlidingWindow, SlidingLog);

impl Rule {
    /// Tokens per period, and the most that a key can spend at once as the burst. That of a leaky bucket is 1, though a
    /// request may cost more.
    pub const fn quota(&self) -> Quota {
        match self {
            Self::TokenBucket(quota) => *quota,
            Self::LeakyBucket(rule) => rule.quota,
            Self::FixedWindow(rule) => rule.quota,
            Self::SlidingWindow(rule) => rule.quota,
            Self::SlidingLog(rule) => rule.quota,
        }
    }

    /// The tokens and their period as a configuration has them, without a burst: `600/min`, `1000/month`.
    pub fn quota_text(&self) -> String {
        let quota = self.quota();
        match self {
            Self::FixedWindow(window) if window.is_month() => format!("{}/month", quota.tokens()),
            _ => Quota::new(quota.tokens(), quota.period()).to_string(),
        }
    }

    /// The algorithm's name, as command lines and messages have it: `token-bucket`, `leaky-bucket`, `fixed-window`,
    /// `sliding-window` or `sliding-log`.
    pub const fn algorithm(&self) -> &'static str {
        match self {
            Self::TokenBucket(_) => "token-bucket",
            Self::LeakyBucket(_) => "leaky-bucket",
            Self::FixedWindow(_) => "fixed-window",
            Self::SlidingWindow(_) => "sliding-window",
            Self::SlidingLog(_) => "sliding-log",
        }
    }

    /// The same rule with the tokens of another quota, and of a bucket with its period too. A leaky bucket has no other burst than
    /// its own.
    pub(crate) fn with_quota(mut self, quota: Quota) -> Self {
        match &mut self {
            Self::TokenBucket(own) => *own = quota,
            Self::LeakyBucket(rule) => rule.quota = quota.burst(rule.quota.burst_tokens()),
            Self::FixedWindow(rule) => rule.quota = quota,
            Self::SlidingWindow(rule) => rule.quota = quota,
            Self::SlidingLog(rule) => rule.quota = quota,
        }
        self
    }

    /// The rule in the units that states of keys are kept in, checked. If the limit `shares_state`
    /// among its plans, their units of time are the same.
    pub(crate) fn key_rule(&self, limit: &str, shares_state: bool) -> Result<KeyRule, ConfigError> {
        Ok(match self {
            Self::TokenBucket(quota) => {
                KeyRule::Turn(TurnRule::TokenBucket(quota.local_scale(limit, shares_state)?))
            }
            Self::LeakyBucket(rule) => KeyRule::Turn(rule.rule(limit, shares_state)?),
            Self::FixedWindow(rule) => KeyRule::Window(rule.rule(limit)?),
            Self::SlidingWindow(rule) => KeyRule::Window(WindowRule::new(limit, rule.quota, true)?),
            Self::SlidingLog(rule) => KeyRule::Log(rule.rule(limit)?),
        })
    }

    /// The highest cost of a request that one node decides about alone, in tokens.
    pub(crate) fn cost_max(&self) -> u32 {
        match self {
            Self::LeakyBucket(rule) => rule.cost_max(),
            _ => self.quota().burst_tokens().min(u32::MAX.into()) as u32,
        }
    }
}

/// The rule of a limit whose keys have a state each, on one node or in the store, in the units of those states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KeyRule {
    Turn(TurnRule),
    Window(WindowRule),
    Log(LogRule),
}

/// One kind of rule that states are kept by.
pub(crate) trait StateRule: Copy + 'static {
    /// The rule, if it is of this kind.
    fn of(rule: &KeyRule) -> Option<&Self>;
}

macro_rules! state_rule {
    ($($kind:ident: $name:ident),*) => {$(
        impl StateRule for $name {
            #[inline(always)]
            fn of(rule: &KeyRule) -> Option<&Self> {
                if let KeyRule::$kind(rule) = rule { Some(rule) } else { None }
            }
        }
    )*};
}

state_rule!(Turn: TurnRule, Window: WindowRule, Log: LogRule);

impl KeyRule {
    /// The rule of one node's share: at least one token.
    pub(crate) fn share(&self, nodes: u32) -> Self {
        let part = |tokens: u32| (tokens / nodes.max(1)).max(1);
        match self {
            Self::Turn(rule) => Self::Turn(rule.share(nodes.max(1))),
            Self::Window(rule) => Self::Window(WindowRule { tokens: part(rule.tokens), ..*rule }),
            Self::Log(rule) => Self::Log(LogRule { tokens: part(rule.tokens), ..*rule }),
        }
    }

    /// Whether a share can count a request of this cost; it denies others.
    pub(crate) fn can_count(&self, cost: u32) -> bool {
        match self {
            Self::Turn(rule) => rule.can_count(cost),
            Self::Window(_) | Self::Log(_) => true,
        }
    }
}

/// How a key stood after a decision, by the rule of its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Turn(&'static TurnRule, Turn),
    Window(&'static WindowRule, Counts),
    Log(LogStanding),
}

impl Standing {
    /// Requests of one token that the key would allow now.
    pub(crate) fn remaining(&self) -> u64 {
        match self {
            Self::Turn(rule, turn) => rule.remaining(*turn),
            Self::Window(rule, counts) => rule.remaining(*counts),
            Self::Log(standing) => standing.remaining.into(),
        }
    }

    /// Microseconds until a denied request of `cost` tokens would be allowed. Of more tokens than the rule ever allows, windows
    /// and logs say a period, and a token bucket the time in which they flow in: another plan may be in force then.
    pub(crate) fn retry_us(&self, cost: u32) -> u64 {
        match self {
            Self::Log(standing) if standing.retry_us > 0 => standing.retry_us,
            Self::Window(rule, _) if cost > rule.tokens => rule.period_us,
            _ => self.wait_us(cost.into()),
        }
    }

    /// Microseconds until a request of so many tokens would be allowed. A log tells the exact time only of the next
    /// token, and else when all will have returned.
    pub(crate) fn wait_us(&self, tokens: u64) -> u64 {
        match self {
            Self::Turn(rule, turn) => rule.wait_us(*turn, tokens),
            Self::Window(rule, counts) => rule.wait_us(*counts, tokens),
            Self::Log(standing) => match tokens.saturating_sub(standing.remaining.into()) {
                0 => 0,
                1 => standing.next_us,
                _ => standing.reset_us,
            },
        }
    }

    /// [`remaining`](Self::remaining), and microseconds until there is a token more; 0 if there cannot be.
    pub(crate) fn remaining_and_next_us(&self) -> (u64, u64) {
        let remaining = self.remaining();
        let next_us = match self {
            Self::Turn(rule, turn) => rule.next_us(*turn),
            _ if self.reset_us() == 0 => 0,
            _ => self.wait_us(remaining + 1),
        };
        (remaining, next_us)
    }

    /// Microseconds until the key is as if it had never been used.
    pub(crate) fn reset_us(&self) -> u64 {
        match self {
            Self::Turn(rule, turn) => rule.reset_us(*turn),
            Self::Window(rule, counts) => rule.reset_us(*counts),
            Self::Log(standing) => standing.reset_us,
        }
    }

    /// Microseconds that a request must wait which was allowed.
    pub(crate) fn delay_us(&self) -> u64 {
        match self {
            Self::Turn(rule, turn) => rule.micros(turn.delay),
            Self::Window(..) | Self::Log(_) => 0,
        }
    }
}
