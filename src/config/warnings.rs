//! What is allowed in a limit and its plans, and mostly a mistake.

use super::limits::LimitRead;
use super::plans::PlanRead;
use super::reading::{Place, Reading};
use crate::algorithm::Rule;
use crate::limit::{DEFAULT_MAX_NODES, Limit, Mode};
use crate::time::micros;

/// The node that a limit is on.
pub(super) struct Node {
    /// Whether nodes share a store.
    pub(super) is_shared: bool,
    pub(super) has_store: bool,
    pub(super) max_nodes: Option<u32>,
}

/// Settings without effect on limits that the store decides about.
const NOT_OF_EXACT: [&str; 7] = [
    "sync_interval",
    "accuracy",
    "key_syncs_per_second_max",
    "credit",
    "strict",
    "grace",
    "version",
];
/// Settings without effect on leaky buckets that nodes share.
const NOT_OF_QUEUES: [&str; 4] = ["accuracy", "key_syncs_per_second_max", "grace", "version"];
/// Settings without effect on limits that each node keeps alone.
const NOT_OF_LOCAL: [&str; 9] = [
    "sync_interval",
    "accuracy",
    "key_syncs_per_second_max",
    "credit",
    "strict",
    "grace",
    "version",
    "outage",
    "max_wait",
];

/// Warns of a limit that is sound, and of its plans.
pub(super) fn limit(read: &LimitRead<'_>, node: &Node, reading: &mut Reading) {
    let limit = &read.limit;
    small_burst(limit, limit.rule, &read.fields.place_of_burst(), node, reading);
    if let Some(remedy) = odd_queue(limit, limit.rule) {
        reading.warn(&read.fields.place("queue"), remedy);
    }
    for plan in &read.plans {
        small_burst(limit, plan.rule, &plan.fields.place_of_burst(), node, reading);
        plan_queue(limit, plan, reading);
        if plan.rule == limit.rule {
            let remedy = "is the limit's own quota, so the plan changes nothing: change it, or remove the plan";
            reading.warn(&plan.fields.place("quota"), remedy);
        }
    }
    without_effect(read, reading);
    if limit.mode == Mode::Exact && !node.has_store {
        let remedy = "there is no store, so each node decides alone: add a table [store], or set mode = \"local\"";
        reading.warn(&read.fields.place("mode"), remedy);
    }
}

/// Nodes that share a limit hold whole tokens of it.
fn small_burst(limit: &Limit, rule: Rule, place: &Place, node: &Node, reading: &mut Reading) {
    let is_queue = matches!(rule, Rule::LeakyBucket(_));
    if limit.mode != Mode::Hybrid || !node.is_shared || is_queue {
        return;
    }
    let nodes = node.max_nodes.unwrap_or(DEFAULT_MAX_NODES);
    let burst = rule.quota().burst_tokens();
    if burst >= u64::from(nodes) {
        return;
    }
    let of_nodes = match node.max_nodes {
        Some(_) => "max_nodes",
        None => "the default of max_nodes",
    };
    let remedy = format!(
        "a burst of {burst} is less than a token for each of {nodes} nodes ({of_nodes}), so check may deny first \
         requests: ask with check_sure, set max_nodes to the nodes there are, or set mode = \"exact\""
    );
    reading.warn(place, remedy);
}

fn plan_queue(limit: &Limit, plan: &PlanRead<'_>, reading: &mut Reading) {
    let Some(remedy) = odd_queue(limit, plan.rule) else { return };
    if plan.fields.has("queue") {
        reading.warn(&plan.fields.place("queue"), remedy);
    } else {
        reading.warn(&plan.fields.place("quota"), format!("the limit's queue {remedy}"));
    }
}

/// What is odd about a queue in which nobody can wait, or in which more could wait than may.
fn odd_queue(limit: &Limit, rule: Rule) -> Option<String> {
    let Rule::LeakyBucket(rule) = rule else { return None };
    let queue_us = u128::from(micros(rule.longest_wait()));
    let (tokens, period_us) = (u128::from(rule.tokens()), u128::from(micros(rule.period())));
    if queue_us == 0 {
        return None;
    }
    let slots = queue_us * tokens / period_us.max(1);
    let callers = limit.max_waiting;
    if slots == 0 {
        let slot_ms = period_us.div_ceil(tokens.max(1)).div_ceil(1000);
        Some(format!(
            "is shorter than a slot, so nobody can wait in it: make it {slot_ms}ms at least, or remove it"
        ))
    } else if slots > u128::from(callers) {
        Some(format!(
            "is {slots} slots long, and max_waiting lets {callers} callers wait: shorten it, or raise max_waiting"
        ))
    } else {
        None
    }
}

pub(super) fn without_effect(read: &LimitRead<'_>, reading: &mut Reading) {
    let (fields, kind): (&[&str], _) = match (read.limit.mode, read.limit.rule) {
        (Mode::Exact, _) => (&NOT_OF_EXACT, "limit whose mode is exact"),
        (Mode::Local, _) => (&NOT_OF_LOCAL, "limit whose mode is local"),
        (Mode::Hybrid, Rule::LeakyBucket(_)) => (&NOT_OF_QUEUES, "leaky-bucket"),
        (Mode::Hybrid, _) => return,
    };
    for name in fields.iter().filter(|name| read.fields.has(name)) {
        let remedy = format!("has no effect on a {kind}: remove it");
        reading.warn(&read.fields.place(name), remedy);
    }
}
