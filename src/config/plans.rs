//! The tables `[limits.<name>.plans.<plan>]`.

use super::fields::{Fields, PLAN};
use super::reading::Reading;
use super::rule::{Algorithm, Common, RuleRead};
use crate::algorithm::Rule;

/// A plan as far as it could be read.
pub(super) struct PlanRead<'n> {
    pub(super) name: &'n str,
    pub(super) rule: Rule,
    pub(super) fields: Fields<'n>,
    /// Otherwise the plan has a rule that is sound.
    pub(super) is_rule_known: bool,
}

/// Reads the plans of a limit.
pub(super) fn read<'n>(
    limit: &Fields<'n>,
    algorithm: Algorithm,
    common: &Common,
    reading: &mut Reading,
) -> Vec<PlanRead<'n>> {
    let example = format!("[{}.plans.pro] with quota = \"100/s\"", limit.path);
    let Some(table) = limit.table("plans", &example, reading) else { return Vec::new() };
    let mut plans = Vec::new();
    for (name, fields) in table.tables(&example, reading) {
        fields.refuse_unknown(PLAN, reading);
        let RuleRead { rule, common: own } = algorithm.rule(&fields, Some(common), reading);
        let is_zone_known = limit.has("zone") == common.zone.is_some();
        let rule =
            if algorithm == Algorithm::FixedWindow && is_zone_known && own.zone != common.zone {
                let remedy = "a plan has its limit's zone: remove it, or set the same one there";
                reading.mistake(&fields.place("zone"), remedy);
                in_zone(rule, common.zone)
            } else {
                rule
            };
        let is_rule_known = rule.is_some();
        let rule = rule.unwrap_or_else(|| algorithm.sound());
        plans.push(PlanRead { name, rule, fields, is_rule_known });
    }
    plans
}

/// The windows of another zone. Without one there may be none.
fn in_zone(rule: Option<Rule>, zone: Option<&'static str>) -> Option<Rule> {
    match (rule?, zone?) {
        (Rule::FixedWindow(window), zone) => Some(window.zone(zone).into()),
        (rule, _) => Some(rule),
    }
}
