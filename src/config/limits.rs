//! The tables `[limits.<name>]`.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::check::sound;
use super::fields::{Fields, LIMIT, one_of};
use super::reading::{Reading, Setting};
use crate::algorithm::{FixedWindow, LeakyBucket, Rule, SlidingLog, SlidingWindow};
use crate::error::ConfigError;
use crate::limit::{Limit, SyncPolicy};
use crate::quota::Quota;

/// A limit for those who have none.
pub(super) const EXAMPLE: &str = "[limits.api] with quota = \"100/s\"";

/// A limit as far as it could be read.
pub(super) struct LimitRead<'n> {
    /// What could not be read has its default.
    pub(super) limit: Limit,
    pub(super) fields: Fields<'n>,
    /// Otherwise the limit has a rule that is sound.
    pub(super) is_rule_known: bool,
}

/// Reads a limit.
pub(super) fn read<'n>(name: &str, fields: Fields<'n>, reading: &mut Reading) -> LimitRead<'n> {
    fields.refuse_unknown(LIMIT, reading);
    let algorithm = Algorithm::read(&fields, reading);
    let rule = algorithm.rule(&fields, reading);
    let is_rule_known = rule.is_some();
    let rule = rule.unwrap_or_else(|| algorithm.sound());
    let limit = settings(Limit::new(name, rule), &fields, reading);
    LimitRead { limit, fields, is_rule_known }
}

/// An algorithm by its name; `Unknown` takes the fields of all.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Algorithm {
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

    fn read(fields: &Fields<'_>, reading: &mut Reading) -> Self {
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
    fn sound(self) -> Rule {
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

    /// The rule of a limit, if all of it can be read.
    fn rule(self, fields: &Fields<'_>, reading: &mut Reading) -> Option<Rule> {
        let before = reading.mistakes.len();
        for (name, algorithm, remedy) in OWN_FIELDS {
            if fields.has(name) && !self.is(algorithm) {
                reading.mistake(&fields.place(name), remedy);
            }
        }
        let quota = self.quota(fields, reading);
        let burst = fields.whole("burst", reading);
        let queue = fields.duration("queue", reading);
        let zone = fields.text("zone", reading);
        let (quota, is_month) = quota?;
        if reading.mistakes.len() > before {
            return None;
        }
        let (tokens, period) = (quota.tokens(), quota.period());
        Some(match self {
            Self::Unknown => return None,
            Self::TokenBucket => burst.map_or(quota, |burst| quota.burst(burst.value)).into(),
            Self::LeakyBucket => {
                let rule = LeakyBucket::new(tokens, period);
                queue.map_or(rule, |queue| rule.queue(queue.value)).into()
            }
            Self::FixedWindow => {
                let rule = if is_month {
                    FixedWindow::per_month(tokens)
                } else {
                    FixedWindow::new(tokens, period)
                };
                zone.map_or(rule, |zone| rule.zone(kept(&zone.value))).into()
            }
            Self::SlidingWindow => SlidingWindow::new(tokens, period).into(),
            Self::SlidingLog => SlidingLog::new(tokens, period).into(),
        })
    }

    /// The quota, and whether its period is a month of a calendar.
    fn quota(self, fields: &Fields<'_>, reading: &mut Reading) -> Option<(Quota, bool)> {
        if !fields.has("quota") {
            let remedy = "is missing: set it to tokens per period, such as \"100/s\" or \"5/min\"";
            reading.missing(fields.at, fields.place("quota").field, remedy);
            return None;
        }
        let Setting { value: text, place } = fields.text("quota", reading)?;
        let month = text.trim().strip_suffix("month").map(str::trim_end);
        let month = month.filter(|tokens| tokens.ends_with('/'));
        if month.is_some() && !self.is(Self::FixedWindow) {
            let remedy =
                "only a fixed-window has months: set algorithm = \"fixed-window\", and a zone";
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
        Some((quota, month.is_some()))
    }
}

/// All that is no part of the rule.
fn settings(mut limit: Limit, fields: &Fields<'_>, reading: &mut Reading) -> Limit {
    if let Some(mode) = fields.word("mode", reading) {
        limit = limit.mode(mode.value);
    }
    if let Some(outage) = fields.word("outage", reading) {
        limit = limit.outage(outage.value);
    }
    if let Some(grace) = fields.duration("grace", reading) {
        limit = limit.grace(grace.value);
    }
    if let Some(wait) = fields.duration("max_wait", reading) {
        limit = limit.max_wait(wait.value);
    }
    if let Some(callers) = fields.whole("max_waiting", reading) {
        limit = limit.max_waiting(callers.value);
    }
    if let Some(version) = fields.whole("version", reading) {
        limit = limit.version(version.value);
    }
    if let Some(switch) = fields.word("switch", reading) {
        limit = limit.switch(switch.value);
    }
    if let Some(time) = fields.duration("block_for", reading) {
        limit = limit.block_for(time.value);
    }
    let credit = fields.whole("credit", reading);
    if let Some(credit) = &credit {
        limit = limit.credit(credit.value);
    }
    if let Some(strict) = fields.flag("strict", reading).filter(|strict| strict.value) {
        if fields.has("credit") {
            let remedy = "is a credit of 0, and there is a credit too: remove one of them";
            reading.mistake(&strict.place, remedy);
        } else {
            limit = limit.strict();
        }
    }
    match sync(fields, reading) {
        Some(policy) => limit.sync(policy),
        None => limit,
    }
}

fn sync(fields: &Fields<'_>, reading: &mut Reading) -> Option<SyncPolicy> {
    let interval = fields.duration("sync_interval", reading);
    let accuracy = fields.decimal("accuracy", reading);
    let ceiling = fields.decimal("key_syncs_per_second_max", reading);
    if let Some(ceiling) = ceiling.as_ref().filter(|_| !fields.has("accuracy")) {
        let remedy = "is for limits that are synced by accuracy: set accuracy, or remove it";
        reading.mistake(&ceiling.place, remedy);
    }
    if let Some(interval) = interval.as_ref().filter(|_| fields.has("accuracy")) {
        let remedy = "the limit is synced by accuracy: remove one of them";
        reading.mistake(&interval.place, remedy);
    }
    match (accuracy, interval) {
        (Some(accuracy), _) => Some(SyncPolicy::Accuracy {
            excess: accuracy.value,
            key_syncs_per_second_max: ceiling.map(|ceiling| ceiling.value),
        }),
        (None, interval) => interval.map(|interval| SyncPolicy::Interval(interval.value)),
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
