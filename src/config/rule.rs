//! The rule of a limit or of one of its plans: an algorithm, and the fields that have its numbers.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::check::sound;
use super::fields::{Fields, one_of};
use super::reading::{Reading, Setting};
use crate::algorithm::{FixedWindow, LeakyBucket, Rule, SlidingLog, SlidingWindow};
use crate::error::ConfigError;
use crate::quota::Quota;

/// What a table says of a rule.
pub(super) struct RuleRead {
    /// `None` if a part of it could not be read.
    pub(super) rule: Option<Rule>,
    pub(super) common: Common,
}

/// What a limit's plans have too, unless they say otherwise.
#[derive(Clone, Copy, Default)]
pub(super) struct Common {
    pub(super) queue: Option<Duration>,
    pub(super) zone: Option<&'static str>,
}

/// A quota as it was written.
#[derive(Clone, Copy)]
struct Written {
    quota: Quota,
    /// Whether its period is a month of a calendar.
    is_month: bool,
}

/// An algorithm by its name; `Unknown` takes the fields of all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    SlidingWindow,
    SlidingLog,
    Unknown,
}

/// Fields that only one algorithm has.
const OWN_FIELDS: [(&str, Algorithm, &str); 3] = [
    ("burst", Algorithm::TokenBucket, "only a token-bucket has a burst: remove it"),
    ("queue", Algorithm::LeakyBucket, "only a leaky-bucket has a queue: remove it"),
    ("zone", Algorithm::FixedWindow, "only the windows of a fixed-window are a zone's: remove it"),
];

impl Algorithm {
    /// By the names of [`Rule::algorithm`].
    const NAMES: [(&str, Self); 5] = [
        ("token-bucket", Self::TokenBucket),
        ("leaky-bucket", Self::LeakyBucket),
        ("fixed-window", Self::FixedWindow),
        ("sliding-window", Self::SlidingWindow),
        ("sliding-log", Self::SlidingLog),
    ];

    pub(super) fn read(fields: &Fields<'_>, reading: &mut Reading) -> Self {
        if !fields.has("algorithm") {
            return Self::TokenBucket;
        }
        let Some(Setting { value: name, place }) = fields.text("algorithm", reading) else {
            return Self::Unknown;
        };
        if let Some((_, algorithm)) = Self::NAMES.iter().find(|(known, _)| *known == name) {
            return *algorithm;
        }
        reading.mistake(&place, one_of(&name, &Self::NAMES.map(|(name, _)| name)));
        Self::Unknown
    }

    fn is(self, other: Self) -> bool {
        self == other || self == Self::Unknown
    }

    /// A rule that all checks accept.
    pub(super) fn sound(self) -> Rule {
        let quota = Quota::per_second(1);
        let (tokens, period) = (quota.tokens(), quota.period());
        sound(match self {
            Self::TokenBucket | Self::Unknown => quota.into(),
            Self::LeakyBucket => LeakyBucket::new(tokens, period).into(),
            Self::FixedWindow => FixedWindow::new(tokens, period).into(),
            Self::SlidingWindow => SlidingWindow::new(tokens, period).into(),
            Self::SlidingLog => SlidingLog::new(tokens, period).into(),
        })
    }

    /// The rule of a limit; or that of a plan, which has what is common of its `limit`.
    pub(super) fn rule(
        self,
        fields: &Fields<'_>,
        limit: Option<&Common>,
        reading: &mut Reading,
    ) -> RuleRead {
        let before = reading.mistakes.len();
        for (name, algorithm, remedy) in OWN_FIELDS {
            if fields.has(name) && !self.is(algorithm) {
                reading.mistake(&fields.place(name), remedy);
            }
        }
        let written = self.quota(fields, limit.is_some(), reading);
        let burst = fields.whole("burst", reading).map(|burst| burst.value);
        let queue = fields.duration("queue", reading).map(|queue| queue.value);
        let zone = fields.text("zone", reading).map(|zone| kept(&zone.value));
        let limit = limit.copied().unwrap_or_default();
        let common = Common { queue: queue.or(limit.queue), zone: zone.or(limit.zone) };
        let is_whole = reading.mistakes.len() == before;
        let rule = written.filter(|_| is_whole);
        let rule = rule.and_then(|written| self.of_numbers(written, burst, &common));
        RuleRead { rule, common }
    }

    fn of_numbers(self, written: Written, burst: Option<u64>, common: &Common) -> Option<Rule> {
        let Written { quota, is_month } = written;
        let (tokens, period) = (quota.tokens(), quota.period());
        Some(match self {
            Self::Unknown => return None,
            Self::TokenBucket => burst.map_or(quota, |burst| quota.burst(burst)).into(),
            Self::LeakyBucket => {
                let rule = LeakyBucket::new(tokens, period);
                common.queue.map_or(rule, |queue| rule.queue(queue)).into()
            }
            Self::FixedWindow => {
                let rule = if is_month {
                    FixedWindow::per_month(tokens)
                } else {
                    FixedWindow::new(tokens, period)
                };
                common.zone.map_or(rule, |zone| rule.zone(zone)).into()
            }
            Self::SlidingWindow => SlidingWindow::new(tokens, period).into(),
            Self::SlidingLog => SlidingLog::new(tokens, period).into(),
        })
    }

    fn quota(self, fields: &Fields<'_>, is_plan: bool, reading: &mut Reading) -> Option<Written> {
        if !fields.has("quota") {
            let remedy = "is missing: set it to tokens per period, such as \"100/s\" or \"5/min\"";
            reading.missing(fields.at, fields.place("quota").field, remedy);
            return None;
        }
        let Setting { value: text, place } = fields.text("quota", reading)?;
        let month = text.trim().strip_suffix("month").map(str::trim_end);
        let month = month.filter(|tokens| tokens.ends_with('/'));
        if month.is_some() && !self.is(Self::FixedWindow) {
            let remedy = if is_plan {
                "only a fixed-window has months, and a plan has its limit's algorithm: choose another period"
            } else {
                "only a fixed-window has months: set algorithm = \"fixed-window\", and a zone"
            };
            reading.mistake(&place, remedy);
            return None;
        }
        let quota: Quota = match month.map_or(text.clone(), |tokens| format!("{tokens}d")).parse() {
            Ok(quota) => quota,
            Err(error) => {
                let remedy = match error {
                    ConfigError::Quota { reason, .. } => reason,
                    other => other.to_string(),
                };
                reading.mistake(&place, remedy);
                return None;
            }
        };
        if quota.burst_tokens() != quota.tokens() {
            if !self.is(Self::TokenBucket) {
                reading.mistake(&place, "only a token-bucket has a burst: remove it");
            } else if fields.has("burst") {
                reading.mistake(
                    &fields.place("burst"),
                    "the quota has a burst too: remove one of them",
                );
            }
        }
        Some(Written { quota, is_month: month.is_some() })
    }
}

/// The name of a zone, for as long as the process lives: each once.
fn kept(name: &str) -> &'static str {
    static KEPT: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let name: &'static str = name.to_owned().leak();
    names.insert(name);
    name
}
