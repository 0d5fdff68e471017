//! The tables `[limits.<name>]`.

#[cfg(feature = "server")]
use super::domains::REQUEST_LIMITS;
use super::fields::{Fields, LIMIT};
use super::plans::{self, PlanRead};
use super::reading::Reading;
use super::rule::{Algorithm, RuleRead};
use crate::limit::{Limit, SyncPolicy};

/// A limit for those who have none.
pub(super) const EXAMPLE: &str = "[limits.api] with quota = \"100/s\"";

/// A limit as far as it could be read.
pub(super) struct LimitRead<'n> {
    /// What could not be read has its default.
    pub(super) limit: Limit,
    pub(super) fields: Fields<'n>,
    /// Otherwise the limit has a rule that is sound.
    pub(super) is_rule_known: bool,
    /// Otherwise the limit has the default.
    pub(super) is_mode_known: bool,
    pub(super) plans: Vec<PlanRead<'n>>,
}

/// Reads a limit.
pub(super) fn read<'n>(name: &str, fields: Fields<'n>, reading: &mut Reading) -> LimitRead<'n> {
    fields.refuse_unknown(LIMIT, reading);
    // A reload can add domains, and no limit of this name can be asked about.
    #[cfg(feature = "server")]
    if name == REQUEST_LIMITS {
        let remedy =
            "is the name of the limit for quotas that requests bring to [domains]: rename this one";
        reading.mistake(&fields.place_of_name(name), remedy);
    }
    read_known(name, fields, reading)
}

/// The same of a table that may have other fields too.
pub(super) fn read_known<'n>(
    name: &str,
    fields: Fields<'n>,
    reading: &mut Reading,
) -> LimitRead<'n> {
    let algorithm = Algorithm::read(&fields, reading);
    let RuleRead { rule, common } = algorithm.rule(&fields, None, reading);
    let is_rule_known = rule.is_some();
    let mut limit = Limit::new(name, rule.unwrap_or_else(|| algorithm.sound()));
    let mode = fields.word("mode", reading);
    let is_mode_known = mode.is_some() || !fields.has("mode");
    if let Some(mode) = mode {
        limit = limit.mode(mode.value);
    }
    let plans = plans::read(&fields, algorithm, &common, reading);
    for plan in &plans {
        limit = limit.plan(plan.name, plan.rule);
    }
    let limit = settings(limit, &fields, reading);
    LimitRead { limit, fields, is_rule_known, is_mode_known, plans }
}

/// All else.
fn settings(mut limit: Limit, fields: &Fields<'_>, reading: &mut Reading) -> Limit {
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
