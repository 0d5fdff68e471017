//! What operators must hear of, through `tracing`.

use tracing::{error, info, warn};

use crate::error::StoreError;
use crate::limit::OutagePolicy;
use crate::sync::Event;

/// Logs the events that say that something is wrong, or right again.
pub(super) fn record(event: &Event) {
    match event {
        Event::StoreDown { lane, error } => {
            warn!(lane, %error, "the store is away: limits go on by their leases, then by their outage policies");
        }
        Event::StoreUp { lane } => info!(lane, "the store answers again"),
        Event::MemoryLost { lane } => {
            warn!(
                lane,
                "the store lost this lane's memory: rebuilding it from what the nodes know"
            );
        }
        Event::StoreClockJumped { lane, by } => {
            warn!(
                lane,
                ?by,
                "the store's clock jumped ahead: limits may be exceeded by its refill"
            );
        }
        Event::ForeignKey { error } => error!(%error, "a key goes on by its outage policy"),
        Event::NotDecided { limit, error } => {
            error!(%limit, %error, "the store does not decide: the outage policy of the limit does");
        }
        Event::ClockStalled { stall } => {
            warn!(?stall, "the cached clock stood still for longer than leases allow for");
        }
        Event::Evicted { keys } => info!(keys, "forgot idle keys to make room"),
        Event::Synced { lane, error: Some(error @ StoreError::ClonedInstance), .. } => {
            error!(lane, %error);
        }
        event => log_override_event(event),
    }
}

fn log_outage_policy(limit: &str, policy: OutagePolicy, nodes: i64, store_was_reached: bool) {
    if store_was_reached {
        warn!(%limit, ?policy, nodes, "the outage policy of a limit has taken over");
    } else {
        warn!(
            %limit,
            ?policy,
            nodes,
            "the outage policy of a limit has taken over, and reckons with max_nodes"
        );
    }
}

/// Logs those events that are about overrides.
fn log_override_event(event: &Event) {
    match event {
        Event::Updated { limit, burst, per_second, .. } => {
            info!(%limit, burst, per_second, "a limit was updated");
        }
        Event::Removed { limit } => info!(%limit, "a limit was removed"),
        Event::Switched { limit, switch } => {
            warn!(%limit, ?switch, "a limit is switched: on, in shadow mode, or off");
        }
        Event::OverridesUnknown { error } => {
            error!(%error, "the store does not tell of overrides: those that are known hold on");
        }
        Event::OverrideNotUnderstood { record } => {
            error!(
                record,
                "the store has an override that this version does not understand: it has no effect here"
            );
        }
        event => log_limit_event(event),
    }
}

/// Logs that the store keeps another quota than callers here name.
fn log_other_quota(event: &Event) {
    match event {
        Event::QuotaMismatch {
            limit,
            configured_version,
            stored_version,
            stored_burst,
            stored_per_second,
        } => error!(
            %limit,
            configured_version,
            stored_version,
            stored_burst,
            stored_per_second,
            "the store keeps a quota of a newer version, or another algorithm, under this limit's name: give all nodes the same limit, or raise the version of the right one"
        ),
        Event::PlansDiffer { limit, named, stored_burst, stored_per_second } => warn!(
            %limit,
            named = named.as_deref().unwrap_or("default"),
            stored_burst,
            stored_per_second,
            "the store keeps a key under another quota than callers here ask for: the limit or the key's plan was changed just now, or two services disagree"
        ),
        _ => {}
    }
}

/// Logs that a resolver does not name plans that can be used.
fn log_unresolved_plan(event: &Event) {
    match event {
        Event::PlanResolverFailed { limit, error } => {
            warn!(%limit, error, "the plan resolver of a limit failed: keys keep the plan that is known");
        }
        Event::PlanNotKnown { limit, plan } => warn!(
            %limit,
            plan,
            "the plan resolver of a limit named a plan that the limit does not have: the key has the default plan"
        ),
        _ => {}
    }
}

/// Logs those events that are about one limit.
fn log_limit_event(event: &Event) {
    match event {
        Event::OutagePolicyBegan { limit, policy, nodes, store_was_reached } => {
            log_outage_policy(limit, *policy, *nodes, *store_was_reached);
        }
        Event::OutagePolicyEnded { limit } => {
            info!(%limit, "the outage policy of a limit has ended");
        }
        Event::NoCredit { limit, nodes } => warn!(
            %limit,
            nodes,
            "the accuracy of a limit leaves less than a token of credit to each node, so check denies the first requests of quiet keys: use check_sure, or allow a larger excess"
        ),
        Event::RecordLost { limit } => {
            warn!(limit = &**limit, "the store had lost a key's record: was it evicted or deleted?");
        }
        Event::QuotaMismatch { .. } | Event::PlansDiffer { .. } => log_other_quota(event),
        Event::PlanResolverFailed { .. } | Event::PlanNotKnown { .. } => log_unresolved_plan(event),
        Event::Decisions { .. }
        | Event::PlansResolved { .. }
        | Event::StoreDecided { .. }
        | Event::OverrideDecisions { .. }
        // Logged above.
        | Event::Switched { .. }
        | Event::Updated { .. }
        | Event::Removed { .. }
        | Event::OverridesUnknown { .. }
        | Event::OverrideNotUnderstood { .. }
        | Event::NotGivenBack { .. }
        | Event::Viewed { .. }
        | Event::OutagePolicy { .. }
        | Event::Excess { .. }
        | Event::Permits { .. }
        | Event::State { .. }
        | Event::Synced { .. }
        | Event::StoreDown { .. }
        | Event::StoreUp { .. }
        | Event::MemoryLost { .. }
        | Event::StoreClockJumped { .. }
        | Event::ForeignKey { .. }
        | Event::NotDecided { .. }
        | Event::ClockStalled { .. }
        | Event::Evicted { .. } => {}
    }
}
