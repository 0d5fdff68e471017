//! The events as metrics, through the `metrics` facade. A decision never comes here: counters are
//! flushed by the sync task.

use std::sync::Arc;

use metrics::{
    Label, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::bound::Excess;
use crate::driver::{Limits, Listener, NodeState, PermitKeys};
use crate::error::StoreError;
use crate::overrides::Switch;
use crate::sync::Event;

const DECISIONS: &str = "tidegate_decisions_total";
const UNSURE: &str = "tidegate_unsure_decisions_total";
const SYNCS: &str = "tidegate_syncs_total";
const KEYS_SYNCED: &str = "tidegate_keys_synced_total";
const SYNC_SECONDS: &str = "tidegate_sync_duration_seconds";
const STORE_DECISIONS: &str = "tidegate_store_decisions_total";
const STORE_DECISION_SECONDS: &str = "tidegate_store_decision_duration_seconds";
const PENDING: &str = "tidegate_pending_tokens";
const VIEW_AGE: &str = "tidegate_view_age_seconds";
const DRIFT: &str = "tidegate_drift_ratio";
const LEASED: &str = "tidegate_leased_tokens";
const EXCESS_BOUND: &str = "tidegate_excess_bound_tokens";
const EXCESS_OBSERVED: &str = "tidegate_excess_observed_tokens";
const KEYS: &str = "tidegate_keys";
const NODES: &str = "tidegate_nodes";
const EVICTIONS: &str = "tidegate_evicted_keys_total";
const STORE_UP: &str = "tidegate_store_up";
const POLICIES: &str = "tidegate_outage_policies_total";
const LOSSES: &str = "tidegate_memory_losses_total";
const LOST_RECORDS: &str = "tidegate_lost_records_total";
const STORE_JUMPS: &str = "tidegate_store_clock_jumps_total";
const MISMATCHES: &str = "tidegate_quota_mismatches_total";
const PLANS_DIFFER: &str = "tidegate_plans_differ_total";
const PLANS_RESOLVED: &str = "tidegate_plan_resolutions_total";
const PLANS_NOT_ASKED: &str = "tidegate_plans_not_asked_total";
const FOREIGN: &str = "tidegate_foreign_keys_total";
const STALLS: &str = "tidegate_clock_stall_seconds";
const MAX_KEYS: &str = "tidegate_max_keys";
const LIMIT_RATE: &str = "tidegate_limit_rate_tokens_per_second";
const LIMIT_BURST: &str = "tidegate_limit_burst_tokens";
const REMOVED: &str = "tidegate_removed_limit_decisions_total";
const NOT_GIVEN_BACK: &str = "tidegate_tokens_not_given_back_total";
const OVERFLOWED: &str = "tidegate_overflow_decisions_total";
const OVERRIDES: &str = "tidegate_override_decisions_total";
const SWITCH: &str = "tidegate_limit_switch";
const ON_POLICY: &str = "tidegate_on_outage_policy";
const PERMITS_IN_USE: &str = "tidegate_permits_in_use";
const PERMITS_WAITING: &str = "tidegate_permit_waiting_callers";
const PERMITS_DENIED: &str = "tidegate_permits_denied_total";

const ROUND_TRIP_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// Bounds of the buckets of each histogram that this crate records, for an exporter that has to be told: without
/// them most exporters show summaries, which cannot be added over nodes. Times are in seconds, drift is a part of
/// the burst.
///
/// ```
/// use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
///
/// let mut exporter = PrometheusBuilder::new();
/// for (name, bounds) in tidegate::METRIC_BUCKETS {
///     exporter = exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)?;
/// }
/// # Ok::<(), metrics_exporter_prometheus::BuildError>(())
/// ```
pub const METRIC_BUCKETS: [(&str, &[f64]); 5] = [
    (SYNC_SECONDS, ROUND_TRIP_BUCKETS),
    (STORE_DECISION_SECONDS, ROUND_TRIP_BUCKETS),
    (VIEW_AGE, &[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]),
    (
        DRIFT,
        &[-1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
    ),
    (STALLS, &[0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0]),
];

/// The labels of all metrics of a limiter: its name, if it has one.
pub(crate) fn limiter_labels(name: Option<&str>) -> Labels {
    name.map(|name| Label::new("limiter", name.to_owned())).into_iter().collect()
}

/// Describes all metrics, shows those that can be known now, and returns the listener that records them.
pub(crate) fn listener(labels: Labels, node: &NodeState) -> Listener {
    describe();
    show_at_start(&node.limits, node.budget.max(), &labels);
    show_permits_at_start(&node.permits.limits, &labels);
    Arc::new(move |event| record(event, &labels))
}

pub(crate) type Labels = Vec<Label>;

fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push(Label::new(name, value.to_owned()));
    labels
}

fn describe() {
    describe_counter!(
        DECISIONS,
        Unit::Count,
        "Decisions, by limit and outcome (allowed, denied, shadow_denied)"
    );
    describe_counter!(UNSURE, Unit::Count, "Decisions not backed by a lease, by limit");
    describe_counter!(
        OVERFLOWED,
        Unit::Count,
        "Decisions about keys for which there was no room, so that they share one bucket, by limit"
    );
    describe_counter!(
        OVERRIDES,
        Unit::Count,
        "Requests that an override or a switch decided about, by limit and outcome (allowed, denied)"
    );
    describe_gauge!(SWITCH, "1 for how the limit is switched, else 0, by limit and switch");
    describe_gauge!(MAX_KEYS, Unit::Count, "Most keys that this node holds");
    describe_gauge!(LIMIT_RATE, "Rate of the limit in tokens per second, by limit");
    describe_gauge!(LIMIT_BURST, Unit::Count, "Burst of the limit in tokens, by limit");
    describe_gauge!(ON_POLICY, "1 while keys live on the outage policy, else 0, by limit");
    describe_counter!(SYNCS, Unit::Count, "Exchanges with the store, by outcome (ok, error)");
    describe_counter!(KEYS_SYNCED, Unit::Count, "Keys in those exchanges");
    describe_histogram!(SYNC_SECONDS, Unit::Seconds, "From first sending a batch to its outcome");
    describe_gauge!(PENDING, Unit::Count, "Tokens spent and not acknowledged by the store");
    describe_histogram!(
        VIEW_AGE,
        Unit::Seconds,
        "Age of a key's view when it is replaced, by limit"
    );
    describe_histogram!(
        DRIFT,
        "The node's estimate of the store's level less that level, as a part of the burst, by limit"
    );
    describe_gauge!(LEASED, Unit::Count, "Tokens that this node's leases may hold");
    describe_gauge!(
        EXCESS_BOUND,
        Unit::Count,
        "Most tokens that a key can be exceeded by, by what this node knows, by limit"
    );
    describe_gauge!(
        EXCESS_OBSERVED,
        Unit::Count,
        "Deepest debt of a key that the store told this node of, by limit"
    );
    describe_gauge!(KEYS, Unit::Count, "Keys held on this node");
    describe_gauge!(NODES, Unit::Count, "Nodes of the namespace that are alive, 0 while unknown");
    describe_counter!(EVICTIONS, Unit::Count, "Idle keys forgotten to make room");
    describe_gauge!(STORE_UP, "1 while every lane of the store answers, else 0");
    describe_limit_metrics();
}

fn describe_limit_metrics() {
    let text = "Calls of the store about limits without leases, by limit and outcome (ok, error)";
    describe_counter!(STORE_DECISIONS, Unit::Count, text);
    describe_histogram!(STORE_DECISION_SECONDS, Unit::Seconds, "Time of those calls, by limit");
    describe_gauge!(PERMITS_IN_USE, Unit::Count, "Permits in use on this node, by limit");
    describe_gauge!(PERMITS_WAITING, Unit::Count, "Callers who wait for a permit, by limit");
    describe_counter!(PERMITS_DENIED, Unit::Count, "Callers who got no permit, by limit");
    describe_counter!(POLICIES, Unit::Count, "Keys that an outage policy took over, by limit");
    describe_counter!(NOT_GIVEN_BACK, Unit::Count, "Unused tokens that did not go back, by limit");
    describe_counter!(LOSSES, Unit::Count, "Lanes that lost their memory and were rebuilt");
    describe_counter!(LOST_RECORDS, Unit::Count, "Keys whose record the store had lost, by limit");
    describe_counter!(STORE_JUMPS, Unit::Count, "Times that the store's clock jumped ahead");
    describe_counter!(MISMATCHES, Unit::Count, "Times that the store kept another quota, by limit");
    let text = "Minutes in which keys had another plan in the store than callers named, by limit";
    describe_counter!(PLANS_DIFFER, Unit::Count, text);
    let text = "Calls of the plan resolver, by limit and outcome (ok, unknown_plan, error)";
    describe_counter!(PLANS_RESOLVED, Unit::Count, text);
    let text = "Times that a key's plan could not be asked for, for lack of room, by limit";
    describe_counter!(PLANS_NOT_ASKED, Unit::Count, text);
    let text = "Decisions of limits that an update removed and callers still hold, by limit";
    describe_counter!(REMOVED, Unit::Count, text);
    describe_counter!(FOREIGN, Unit::Count, "Keys found to hold another program's value");
    describe_histogram!(
        STALLS,
        Unit::Seconds,
        "Stalls of the cached clock beyond what leases allow"
    );
}

/// Counters begin at 0: what appears with its first event cannot be told from what was always there.
fn show_at_start(limits: &Limits, max_keys: usize, labels: &Labels) {
    gauge!(MAX_KEYS, labels.clone()).set(max_keys as f64);
    for name in [KEYS_SYNCED, EVICTIONS, LOSSES, STORE_JUMPS, FOREIGN] {
        counter!(name, labels.clone()).increment(0);
    }
    for outcome in ["ok", "error"] {
        counter!(SYNCS, with(labels, "outcome", outcome)).increment(0);
    }
    for limit in limits.all() {
        let labels = with(labels, "limit", &limit.name);
        let (scale, unit) = (limit.terms.scale, limit.terms.scale.token as f64);
        show_quota(scale.burst as f64 / unit, scale.rate as f64 * 1e6 / unit, &labels);
        show_counters(&labels);
        if limit.resolved_plans().is_some() {
            count_resolved_plans(&labels, [0; 3], 0);
        }
        show_switch(limit.overrides.switch(), &labels);
    }
}

/// Shows the quota of a limit; of one that was added, also that it has done nothing yet. An event follows if it is switched.
fn show_updated(burst: f64, per_second: f64, is_added: bool, labels: &Labels) {
    show_quota(burst, per_second, labels);
    if is_added {
        show_switch(Switch::On, labels);
        show_counters(labels);
    }
}

/// Shows the counters of a limit, and that it is not on its outage policy.
fn show_counters(labels: &Labels) {
    gauge!(ON_POLICY, labels.clone()).set(0.0);
    for outcome in ["allowed", "denied", "shadow_denied"] {
        counter!(DECISIONS, with(labels, "outcome", outcome)).increment(0);
    }
    count_override_decisions(labels, 0, 0);
    for outcome in ["ok", "error"] {
        counter!(STORE_DECISIONS, with(labels, "outcome", outcome)).increment(0);
    }
    for name in [
        UNSURE,
        OVERFLOWED,
        POLICIES,
        LOST_RECORDS,
        MISMATCHES,
        PLANS_DIFFER,
        REMOVED,
        NOT_GIVEN_BACK,
    ] {
        counter!(name, labels.clone()).increment(0);
    }
}

fn show_quota(burst: f64, per_second: f64, labels: &Labels) {
    gauge!(LIMIT_RATE, labels.clone()).set(per_second);
    gauge!(LIMIT_BURST, labels.clone()).set(burst);
}

fn show_switch(now: Switch, labels: &Labels) {
    for switch in Switch::ALL {
        let value = if switch == now { 1.0 } else { 0.0 };
        gauge!(SWITCH, with(labels, "switch", switch.name())).set(value);
    }
}

fn show_permits_at_start(permits: &[Arc<PermitKeys>], labels: &Labels) {
    for limit in permits {
        let labels = with(labels, "limit", limit.name());
        for name in [PERMITS_IN_USE, PERMITS_WAITING, ON_POLICY] {
            gauge!(name, labels.clone()).set(0.0);
        }
        counter!(PERMITS_DENIED, labels).increment(0);
    }
}

fn record(event: &Event, labels: &Labels) {
    match event {
        Event::Synced { keys, took, error, .. } => {
            let outcome = if error.is_none() { "ok" } else { "error" };
            counter!(SYNCS, with(labels, "outcome", outcome)).increment(1);
            // An attempt without an answer is made again, with the same keys.
            if matches!(error, None | Some(StoreError::ClonedInstance)) {
                counter!(KEYS_SYNCED, labels.clone()).increment(*keys as u64);
                histogram!(SYNC_SECONDS, labels.clone()).record(took.as_secs_f64());
            }
        }
        Event::State { keys, pending, leased_depth, nodes, lanes_down } => {
            gauge!(KEYS, labels.clone()).set(*keys as f64);
            gauge!(PENDING, labels.clone()).set(*pending as f64);
            gauge!(LEASED, labels.clone()).set(*leased_depth as f64);
            gauge!(NODES, labels.clone()).set(*nodes as f64);
            gauge!(STORE_UP, labels.clone()).set(if *lanes_down == 0 { 1.0 } else { 0.0 });
        }
        Event::MemoryLost { .. } => counter!(LOSSES, labels.clone()).increment(1),
        Event::StoreClockJumped { .. } => counter!(STORE_JUMPS, labels.clone()).increment(1),
        Event::ForeignKey { .. } => counter!(FOREIGN, labels.clone()).increment(1),
        Event::Evicted { keys } => counter!(EVICTIONS, labels.clone()).increment(*keys as u64),
        Event::ClockStalled { stall } => {
            histogram!(STALLS, labels.clone()).record(stall.as_secs_f64());
        }
        Event::StoreDown { .. } => gauge!(STORE_UP, labels.clone()).set(0.0),
        event => count_limit_event(event, |limit| with(labels, "limit", limit)),
    }
}

fn count_override_decisions(labels: &Labels, allowed: u64, denied: u64) {
    for (outcome, count) in [("allowed", allowed), ("denied", denied)] {
        counter!(OVERRIDES, with(labels, "outcome", outcome)).increment(count);
    }
}

fn show_excess(excess: &Excess, labels: &Labels) {
    if let Some(bound) = excess.bound_tokens {
        gauge!(EXCESS_BOUND, labels.clone()).set(bound);
    }
    gauge!(EXCESS_OBSERVED, labels.clone()).set(excess.observed_tokens);
}

/// Counts calls of a plan resolver by outcome, and keys that were not asked for.
fn count_resolved_plans(labels: &Labels, counts: [u64; 3], not_asked: u64) {
    for (outcome, count) in ["ok", "unknown_plan", "error"].into_iter().zip(counts) {
        counter!(PLANS_RESOLVED, with(labels, "outcome", outcome)).increment(count);
    }
    counter!(PLANS_NOT_ASKED, labels.clone()).increment(not_asked);
}

fn count_store_decision(labels: &Labels, event: &Event) {
    if let Event::StoreDecided { took, error, .. } = event {
        let outcome = if error.is_none() { "ok" } else { "error" };
        counter!(STORE_DECISIONS, with(labels, "outcome", outcome)).increment(1);
        histogram!(STORE_DECISION_SECONDS, labels.clone()).record(took.as_secs_f64());
    }
}

fn count_decisions(labels: &Labels, event: &Event) {
    if let Event::Decisions { allowed, denied, unsure, overflowed, is_shadow, is_removed, .. } =
        event
    {
        let denial = if *is_shadow { "shadow_denied" } else { "denied" };
        counter!(DECISIONS, with(labels, "outcome", "allowed")).increment(*allowed);
        counter!(DECISIONS, with(labels, "outcome", denial)).increment(*denied);
        counter!(OVERFLOWED, labels.clone()).increment(*overflowed);
        counter!(UNSURE, labels.clone()).increment(*unsure);
        if *is_removed {
            counter!(REMOVED, labels.clone()).increment(allowed + denied);
        }
    }
}

/// Records the events that are about one limit.
fn count_limit_event(event: &Event, labels: impl Fn(&Arc<str>) -> Labels) {
    match event {
        Event::Decisions { limit, .. } => count_decisions(&labels(limit), event),
        Event::Viewed { limit, drift_tokens, burst_tokens, age } => {
            histogram!(DRIFT, labels(limit)).record(drift_tokens / *burst_tokens as f64);
            histogram!(VIEW_AGE, labels(limit)).record(age.as_secs_f64());
        }
        Event::Excess { limit, excess } => show_excess(excess, &labels(limit)),
        Event::Permits { limit, in_use, waiting, denied } => {
            gauge!(PERMITS_IN_USE, labels(limit)).set(*in_use as f64);
            gauge!(PERMITS_WAITING, labels(limit)).set(*waiting);
            counter!(PERMITS_DENIED, labels(limit)).increment(*denied);
        }
        Event::NotGivenBack { limit, tokens } => {
            counter!(NOT_GIVEN_BACK, labels(limit)).increment((*tokens).into());
        }
        Event::StoreDecided { limit, .. } => count_store_decision(&labels(limit), event),
        Event::OverrideDecisions { limit, allowed, denied } => {
            count_override_decisions(&labels(limit), *allowed, *denied);
        }
        Event::PlansResolved { limit, resolved, unknown, failed, not_asked } => {
            count_resolved_plans(&labels(limit), [*resolved, *unknown, *failed], *not_asked);
        }
        Event::Switched { limit, switch } => show_switch(*switch, &labels(limit)),
        Event::Updated { limit, burst, per_second, is_added } => {
            show_updated(*burst as f64, *per_second, *is_added, &labels(limit));
        }
        Event::OutagePolicy { limit } => counter!(POLICIES, labels(limit)).increment(1),
        Event::QuotaMismatch { limit, .. } => counter!(MISMATCHES, labels(limit)).increment(1),
        Event::PlansDiffer { limit, .. } => counter!(PLANS_DIFFER, labels(limit)).increment(1),
        Event::RecordLost { limit } => counter!(LOST_RECORDS, labels(limit)).increment(1),
        Event::OutagePolicyBegan { limit, .. } | Event::NotDecided { limit, .. } => {
            gauge!(ON_POLICY, labels(limit)).set(1.0);
        }
        Event::OutagePolicyEnded { limit } => gauge!(ON_POLICY, labels(limit)).set(0.0),
        Event::NoCredit { .. }
        | Event::Removed { .. }
        | Event::PlanResolverFailed { .. }
        | Event::PlanNotKnown { .. }
        | Event::StoreUp { .. }
        | Event::OverridesUnknown { .. }
        | Event::OverrideNotUnderstood { .. }
        // Recorded above.
        | Event::Synced { .. }
        | Event::State { .. }
        | Event::MemoryLost { .. }
        | Event::StoreClockJumped { .. }
        | Event::ForeignKey { .. }
        | Event::Evicted { .. }
        | Event::ClockStalled { .. }
        | Event::StoreDown { .. } => {}
    }
}
