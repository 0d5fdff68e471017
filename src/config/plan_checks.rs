//! The checks of plans, and the fields of the file that each is about.
//!
//! The builder checks a limit with all its plans, and ends at the first mistake. So each plan is checked as if it were a
//! limit, then by its name, then as the only plan of its limit, and those that are sound all together.

use std::collections::BTreeSet;

use super::check::{faults, name_in_file, remedy};
use super::limits::LimitRead;
use super::plans::PlanRead;
use super::reading::Reading;
use crate::algorithm::Rule;
use crate::builder::Builder;
use crate::error::ConfigError;
use crate::limit::{Limit, Mode, Plan, SyncPolicy};

/// A limit whose own mistakes are named, and set to what is sound.
pub(super) struct SoundLimit {
    /// It has a plan only if it may have plans.
    pub(super) limit: Limit,
    /// Whether its rule is the one of the file.
    pub(super) is_rule_known: bool,
}

/// Checks all plans of a limit.
pub(super) fn all(
    read: &LimitRead<'_>,
    own: &SoundLimit,
    builder: &Builder,
    reading: &mut Reading,
) {
    let mut alone = own.limit.clone();
    if alone.plans.is_empty() {
        // That it may have none is told already. What else is wrong with them is found where each node is alone.
        alone.mode = Mode::Local;
    }
    alone.plans.clear();
    // The accuracy is checked of each plan alone.
    let limit = Limit { sync: SyncPolicy::default(), ..alone.clone() };
    let (mut names, mut sound) = (BTreeSet::new(), Vec::new());
    for plan in &read.plans {
        let before = reading.mistakes.len();
        if !names.insert(plan.name) {
            let remedy = "is defined twice: remove one of them";
            reading.mistake(&plan.fields.place_of_name(plan.name), remedy);
        }
        let is_known =
            as_limit(plan, read, Limit { rule: plan.rule, ..alone.clone() }, builder, reading);
        name(plan, &limit, builder, reading);
        if is_known {
            let rule = if own.is_rule_known { limit.rule } else { plan.rule };
            beside(plan, &Limit { rule, ..limit.clone() }, builder, reading);
        }
        sound.extend((is_known && reading.mistakes.len() == before).then_some(plan));
    }
    if own.is_rule_known && sound.len() > 1 {
        together(read, &sound, &limit, builder, reading);
    }
}

/// Checks a plan as if it were a limit. Returns whether its rule is sound, and the one of the file.
fn as_limit(
    plan: &PlanRead<'_>,
    read: &LimitRead<'_>,
    mut limit: Limit,
    builder: &Builder,
    reading: &mut Reading,
) -> bool {
    let mut is_known = plan.is_rule_known;
    let faults = faults(&mut limit, &mut is_known, builder);
    let is_sound = faults.is_empty();
    for (field, reason) in faults {
        let inherited = match field {
            "queue" => "queue",
            "window.zone" => "zone",
            _ => "quota",
        };
        // What a plan has of its limit is a mistake of that.
        if !plan.fields.has(inherited) && read.fields.has(inherited) {
            continue;
        }
        let (place, reason) = match name_in_file(field, &plan.fields) {
            "accuracy" => (plan.fields.place_of_burst(), format!("the limit's accuracy {reason}")),
            name @ ("quota" | "burst" | "queue" | "zone") => (plan.fields.place(name), reason),
            _ => (plan.fields.place_of_name(plan.name), reason),
        };
        reading.mistake(&place, remedy(&reason));
    }
    is_known && is_sound
}

/// Checks the name of a plan of a limit that is sound.
fn name(plan: &PlanRead<'_>, limit: &Limit, builder: &Builder, reading: &mut Reading) {
    if let Some(reason) = error_of(&with_plans(limit, [(plan.name, limit.rule)]), builder) {
        reading.mistake(&plan.fields.place_of_name(plan.name), remedy(&reason));
    }
}

/// Checks a plan beside its limit's own quota.
fn beside(plan: &PlanRead<'_>, limit: &Limit, builder: &Builder, reading: &mut Reading) {
    let limit = with_plans(limit, [("any", plan.rule)]);
    let under = limit.plans.iter().map(|any| limit.under(any));
    let error = std::iter::once(limit.clone()).chain(under).find_map(|it| error_of(&it, builder));
    if let Some(reason) = error {
        reading.mistake(&plan.fields.place("quota"), remedy(&reason));
    }
}

/// Checks plans that are sound, each alone.
fn together(
    read: &LimitRead<'_>,
    sound: &[&PlanRead<'_>],
    limit: &Limit,
    builder: &Builder,
    reading: &mut Reading,
) {
    let limit = with_plans(limit, sound.iter().map(|plan| (plan.name, plan.rule)));
    if let Some(reason) = error_of(&limit, builder) {
        reading.mistake(&read.fields.place("plans"), remedy(&reason));
        return;
    }
    for (read, plan) in sound.iter().zip(&limit.plans) {
        if let Some(reason) = error_of(&limit.under(plan), builder) {
            reading.mistake(&read.fields.place("quota"), remedy(&reason));
        }
    }
}

fn with_plans<'a>(limit: &Limit, plans: impl IntoIterator<Item = (&'a str, Rule)>) -> Limit {
    let plan = |(name, rule): (&str, Rule)| Plan { name: name.to_owned(), rule };
    Limit { plans: plans.into_iter().map(plan).collect(), ..limit.clone() }
}

/// What the builder says of a limit.
fn error_of(limit: &Limit, builder: &Builder) -> Option<String> {
    match builder.node_terms().of(limit) {
        Ok(_) => None,
        Err(ConfigError::Limit { reason, .. }) => Some(reason.to_owned()),
        Err(error) => Some(error.to_string()),
    }
}
