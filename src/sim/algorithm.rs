//! The algorithms that nodes lease from a ledger.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::scenario::by_name;
use crate::algorithm::{FixedWindow, Rule, SlidingLog, SlidingWindow};
use crate::quota::Quota;

/// An algorithm that nodes lease from a ledger.
///
/// A window has the burst's tokens, and lasts as long as the rate takes for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Refill at the rate, up to the burst.
    #[default]
    TokenBucket,
    /// All tokens again at each window's end.
    FixedWindow,
    /// What was spent in the window before counts less and less.
    SlidingWindow,
    /// Each token comes back a window after it was spent, or a little later.
    SlidingLog,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::TokenBucket, Self::FixedWindow, Self::SlidingWindow, Self::SlidingLog];

    /// As flags have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenBucket => "token-bucket",
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
        let period_us = u128::from(quota.burst_tokens()) * quota.period().as_micros();
        let window_us = period_us / u128::from(quota.tokens().max(1));
        Duration::from_micros(u64::try_from(window_us).unwrap_or(u64::MAX))
    }

    /// Its rule with a quota's burst and rate.
    pub fn rule(self, quota: &Quota) -> Rule {
        let (burst, window) = (quota.burst_tokens(), Self::window(quota));
        match self {
            Self::TokenBucket => (*quota).into(),
            Self::FixedWindow => FixedWindow::new(burst, window).into(),
            Self::SlidingWindow => SlidingWindow::new(burst, window).into(),
            Self::SlidingLog => SlidingLog::new(burst, window).into(),
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("algorithm", &Self::ALL, Self::name, text)
    }
}
