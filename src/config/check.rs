//! The checks of limits and of the limiter, and the fields of the file that each is about.
//!
//! A check ends at the first mistake. So a field with a mistake is set to a value that is sound, and the check is made
//! again, until nothing is wrong.

use std::time::Duration;

use super::fields::Fields;
use super::limits::LimitRead;
use super::plan_checks::{self, SoundLimit};
use super::reading::Reading;
use crate::algorithm::{FixedWindow, LeakyBucket, Rule, SlidingLog, SlidingWindow};
use crate::builder::{Builder, DEFAULT_LANES, DEFAULT_MAX_KEYS};
use crate::error::{ConfigError, NO_LIMITS};
use crate::limit::{DEFAULT_MAX_WAIT, Limit, OutagePolicy, Plan, SyncPolicy};
use crate::limiter::Limiter;
use crate::quota::Quota;

/// How the remedies of calls are written in a file.
const WORDS: [(&str, &str); 6] = [
    ("call zone(\"Europe/Berlin\"), or zone(\"UTC\")", "set zone = \"Europe/Berlin\", or \"UTC\""),
    ("call exact() or local()", "set mode = \"exact\" or \"local\""),
    ("call strict() and use check_sure", "set strict = true and use check_sure"),
    ("choose Share, Open or Closed", "choose \"share\", \"open\" or \"closed\""),
    (NO_LIMITS, "add a limit, such as [limits.api] with quota = \"100/s\""),
    (
        "a plan has the limit's algorithm, and the same windows",
        "a plan has the same windows as its limit: give it tokens of the limit's period",
    ),
];

pub(super) fn remedy(reason: &str) -> String {
    WORDS.iter().fold(reason.to_owned(), |text, (call, field)| text.replace(call, field))
}

/// A rule of the same algorithm that all checks accept.
pub(super) fn sound(rule: Rule) -> Rule {
    match rule {
        Rule::TokenBucket(_) => Quota::per_hour(3600).into(),
        Rule::LeakyBucket(_) => LeakyBucket::per_hour(3600).into(),
        Rule::FixedWindow(_) => FixedWindow::per_hour(3600).into(),
        Rule::SlidingWindow(_) => SlidingWindow::per_hour(3600).into(),
        Rule::SlidingLog(_) => SlidingLog::per_hour(3600).into(),
    }
}

/// Checks what is no limit's own. Returns a builder for which nothing of that is wrong.
pub(super) fn limiter(
    mut builder: Builder,
    has_limits: bool,
    root: &Fields<'_>,
    reading: &mut Reading,
) -> Builder {
    let any = || Limit::new("any", Quota::per_second(1));
    if has_limits {
        builder = builder.limit(any());
    }
    let mut reported = Vec::new();
    while let Err(error) = builder.validate() {
        let ConfigError::Limiter { field, reason, .. } = error else {
            reading.mistake(&root.place(""), error.to_string());
            return builder;
        };
        if reported.contains(&field) {
            return builder;
        }
        reported.push(field);
        let place = match field {
            "key_secret" if root.has("key_secret_file") => root.place("key_secret_file"),
            _ => root.place(field),
        };
        let may_be_unread = field == "limits" && reading.sections.may_hide_a_table();
        if !may_be_unread || root.has(field) {
            reading.mistake(&place, remedy(reason));
        }
        builder = match field {
            "limits" => builder.limit(any()),
            "max_keys" => builder.max_keys(DEFAULT_MAX_KEYS),
            "lanes" => builder.lanes(DEFAULT_LANES),
            "max_nodes" => builder.max_nodes(1),
            _ => builder.key_secret([0; 16]),
        };
    }
    builder
}

/// Checks a limit and its plans on the node that `builder` describes.
pub(super) fn limit(read: &LimitRead<'_>, builder: &Builder, reading: &mut Reading) {
    let (mut limit, mut is_rule_known) = (read.limit.clone(), read.is_rule_known);
    // Whether there are plans matters to the limit's own fields.
    limit.plans.truncate(1);
    for (field, reason) in faults(&mut limit, &mut is_rule_known, builder) {
        if field == "plan" && !read.is_mode_known {
            continue;
        }
        let place = match name_in_file(field, &read.fields) {
            "" => read.fields.place_of_name(read.limit.name()),
            name => read.fields.place(name),
        };
        reading.mistake(&place, remedy(&reason));
    }
    plan_checks::all(read, &SoundLimit { limit, is_rule_known }, builder, reading);
}

/// Checks a limit of which a plan, if there is one, has the same rule, and sets all that is wrong to what is sound.
/// Returns the fields at fault, each once, with what is wrong.
pub(super) fn faults(
    limit: &mut Limit,
    is_rule_known: &mut bool,
    builder: &Builder,
) -> Vec<(&'static str, String)> {
    let mut faults: Vec<(&'static str, String)> = Vec::new();
    let mut seen: Vec<&'static str> = Vec::new();
    loop {
        for plan in &mut limit.plans {
            *plan = Plan { name: "any".to_owned(), rule: limit.rule };
        }
        let (field, reason) = match builder.node_terms().of(limit) {
            Ok(_) => return faults,
            Err(ConfigError::Limit { field, reason, .. }) => (field, reason.to_owned()),
            Err(error) => ("", error.to_string()),
        };
        if seen.contains(&field) {
            return faults;
        }
        seen.push(field);
        // Whether an accuracy leaves credit depends on the burst.
        if field != "accuracy" || *is_rule_known {
            faults.push((field, reason));
        }
        *is_rule_known &= !field.starts_with("quota.") && !field.starts_with("window.");
        set_sound(limit, field);
    }
}

/// The field of the file that a check is about; none for the name.
pub(super) fn name_in_file(field: &str, fields: &Fields<'_>) -> &'static str {
    match field {
        "quota.burst" if fields.has("burst") => "burst",
        "window.zone" if fields.has("zone") => "zone",
        "quota.tokens" | "quota.burst" | "quota.period" | "window.period" | "window.zone" => {
            "quota"
        }
        "queue" => "queue",
        "credit" => "credit",
        "sync.interval" => "sync_interval",
        "sync.excess" | "accuracy" => "accuracy",
        "sync.key_syncs_per_second_max" => "key_syncs_per_second_max",
        "outage" => "outage",
        "max_wait" => "max_wait",
        "block_for" => "block_for",
        "version" => "version",
        "plan" => "plans",
        _ => "",
    }
}

fn set_sound(limit: &mut Limit, field: &str) {
    match field {
        "name" => "any".clone_into(&mut limit.name),
        "credit" => limit.credit = None,
        "sync.key_syncs_per_second_max" => {
            if let SyncPolicy::Accuracy { key_syncs_per_second_max, .. } = &mut limit.sync {
                *key_syncs_per_second_max = None;
            }
        }
        "sync.excess" => {
            if let SyncPolicy::Accuracy { excess, .. } = &mut limit.sync {
                *excess = 1.0;
            }
        }
        "sync.interval" | "accuracy" => limit.sync = SyncPolicy::default(),
        "outage" => limit.outage = OutagePolicy::default(),
        "max_wait" => limit.max_wait = DEFAULT_MAX_WAIT,
        "block_for" => limit.block_for = Duration::ZERO,
        "version" => limit.version = 0,
        "plan" => limit.plans.clear(),
        "queue" => {
            if let Rule::LeakyBucket(rule) = &mut limit.rule {
                *rule = rule.queue(Duration::ZERO);
            }
        }
        _ => limit.rule = sound(limit.rule),
    }
}

/// A builder without limits and without a store.
pub(super) fn empty() -> Builder {
    Limiter::builder()
}
