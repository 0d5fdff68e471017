//! The algorithms that nodes share.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::scenario::by_name;
use crate::algorithm::{FixedWindow, LeakyBucket, Rule, SlidingLog, SlidingWindow};
use crate::quota::Quota;

/// An algorithm that nodes share.
///
/// A window has the burst's tokens, and lasts as long as the rate takes for them. The queue of a leaky bucket has room for
/// the burst's tokens, the one whose slot is now among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Refill at the rate, up to the burst.
    #[default]
    TokenBucket,
    /// Slots at the rate, for which requests wait.
    LeakyBucket,
    /// All tokens again at each window's end.
    FixedWindow,
    /// What was spent in the window before counts less and less.
    SlidingWindow,
    /// Each token comes back a window after it was spent, or a little later.
    SlidingLog,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::TokenBucket,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::SlidingLog,
    ];

    /// Those that nodes lease from a ledger: all but leaky buckets, of which they hold slots.
    pub const LEASED: [Self; 4] =
        [Self::TokenBucket, Self::FixedWindow, Self::SlidingWindow, Self::SlidingLog];

    /// As flags have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenBucket => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
            Self::FixedWindow => "fixed-window",
            Self::SlidingWindow => "sliding-window",
            Self::SlidingLog => "sliding-log",
        }
    }

    /// As people call it.
    pub fn title(self) -> String {
        self.name().replace('-', " ")
    }

    /// How long a window lasts that has a quota's burst.
    pub fn window(quota: &Quota) -> Duration {
        let window_us = micros_of(quota, quota.burst_tokens()) / u128::from(quota.tokens().max(1));
        Duration::from_micros(u64::try_from(window_us).unwrap_or(u64::MAX))
    }

    /// The burst that has such a rule: of a leaky bucket the whole slots of its queue, and the one that is now.
    pub fn burst_of(rule: Rule) -> u64 {
        let quota = rule.quota();
        let Rule::LeakyBucket(queue) = rule else { return quota.burst_tokens() };
        let waiting = queue.longest_wait().as_micros() * u128::from(quota.tokens());
        let waiting = waiting / quota.period().as_micros().max(1);
        u64::try_from(waiting).unwrap_or(u64::MAX).saturating_add(1)
    }

    /// Its rule with a quota's burst and rate.
    pub fn rule(self, quota: &Quota) -> Rule {
        let (burst, window) = (quota.burst_tokens(), Self::window(quota));
        match self {
            Self::TokenBucket => (*quota).into(),
            Self::LeakyBucket => {
                let queue_us = micros_of(quota, burst.saturating_sub(1));
                let queue_us = queue_us.div_ceil(u128::from(quota.tokens().max(1)));
                let queue = Duration::from_micros(u64::try_from(queue_us).unwrap_or(u64::MAX));
                LeakyBucket::new(quota.tokens(), quota.period()).queue(queue).into()
            }
            Self::FixedWindow => FixedWindow::new(burst, window).into(),
            Self::SlidingWindow => SlidingWindow::new(burst, window).into(),
            Self::SlidingLog => SlidingLog::new(burst, window).into(),
        }
    }
}

/// How long the rate takes for so many tokens, in microseconds times the tokens of a period.
fn micros_of(quota: &Quota, tokens: u64) -> u128 {
    u128::from(tokens) * quota.period().as_micros()
}

impl std::str::FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("algorithm", &Self::ALL, Self::name, text)
    }
}
