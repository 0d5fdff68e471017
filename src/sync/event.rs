//! The engine's events: the one source of metrics, logs and reports.

use std::sync::Arc;
use std::time::Duration;

use crate::bound::Excess;
use crate::error::StoreError;
use crate::limit::OutagePolicy;
use crate::overrides::Switch;

/// Something worth knowing. The driver sends it to the listeners, never a decision.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Decisions collected since the last such event.
    Decisions {
        /// The limit.
        limit: Arc<str>,
        /// Allowed.
        allowed: u64,
        /// Denied.
        denied: u64,
        /// Of both, those that were not backed by a lease.
        unsure: u64,
        /// Those about keys for which there was no room, so that they share one bucket; without those by a handle.
        /// They may be reported before they are counted as allowed or denied.
        overflowed: u64,
        /// The limit is in [shadow mode](crate::Switch::Shadow): those denied went on.
        is_shadow: bool,
        /// An [update](crate::Limiter::update) has removed the limit by the time that this is told. Decisions of the second
        /// before are among them; later ones are those of callers who still hold it.
        is_removed: bool,
    },
    /// Requests since the last such event that an override decided about, or a limit that is [off](crate::Switch::Off).
    OverrideDecisions {
        /// The limit.
        limit: Arc<str>,
        /// Allowed.
        allowed: u64,
        /// Denied.
        denied: u64,
    },
    /// A call of the store about a limit without leases has ended: an exact one, or a leaky bucket that nodes share. Told of
    /// each such call, those that no caller awaits among them: what goes back, resets, slots ahead.
    StoreDecided {
        /// The limit.
        limit: Arc<str>,
        /// How long the call took.
        took: Duration,
        /// Why there was no answer.
        error: Option<StoreError>,
    },
    /// What the [plan resolver](crate::Builder::resolve_plans) of a limit has done since the last such event. Told once a second, if it
    /// has done anything.
    PlansResolved {
        /// The limit.
        limit: Arc<str>,
        /// Answers that named the default plan, or a plan that the limit has.
        resolved: u64,
        /// Answers that named a plan that the limit does not have.
        unknown: u64,
        /// Calls that failed, panicked or took too long.
        failed: u64,
        /// How often a key had to be asked for and could not be: too many waited, or there was no room for its plan.
        not_asked: u64,
    },
    /// The plan resolver of a limit failed, panicked or took too long: what is known of keys holds. Told once a minute for each
    /// limit.
    PlanResolverFailed {
        /// The limit.
        limit: Arc<str>,
        /// Why.
        error: String,
    },
    /// The plan resolver of a limit named a plan that the limit does not have: the key has the default plan. Told once a minute for
    /// each limit.
    PlanNotKnown {
        /// The limit.
        limit: Arc<str>,
        /// The name.
        plan: String,
    },
    /// A limit is enforced from now on, or not.
    Switched {
        /// The limit.
        limit: Arc<str>,
        /// How it is now.
        switch: Switch,
    },
    /// The store does not tell which overrides have changed: those that are known hold on. Told once a minute.
    OverridesUnknown {
        /// Why.
        error: StoreError,
    },
    /// The store has an override that this version does not understand, or that the limit of this node cannot keep: a plan that
    /// it does not have, say, or a quota. It has no effect here.
    OverrideNotUnderstood {
        /// Its kind and limit.
        record: String,
    },
    /// A batch came back, or did not.
    Synced {
        /// The lane.
        lane: u32,
        /// Keys in the batch.
        keys: usize,
        /// From sending to the reply.
        took: Duration,
        /// What went wrong; `None` when it was applied.
        error: Option<StoreError>,
    },
    /// A reply contained a view of a key.
    Viewed {
        /// The limit.
        limit: Arc<str>,
        /// The node's own estimate of the store's level less the store's, in tokens.
        drift_tokens: f64,
        /// The limit's burst, in tokens.
        burst_tokens: u64,
        /// The age of the view that this one replaces.
        age: Duration,
    },
    /// A lane of the store cannot be reached any more.
    StoreDown {
        /// The lane.
        lane: u32,
        /// The last error.
        error: StoreError,
    },
    /// A lane of the store answers again.
    StoreUp {
        /// The lane.
        lane: u32,
    },
    /// Tokens that a request was allowed and did not use were not given back to the key of a limit that nodes share: their
    /// window has ended, or an outage policy had allowed them. Of an exact limit also if the store does not answer, and those
    /// of a leaky bucket if a later slot was given, or of a sliding log after 500 later requests.
    NotGivenBack {
        /// The limit.
        limit: Arc<str>,
        /// How many.
        tokens: u32,
    },
    /// A limit's outage policy took over for a key.
    OutagePolicy {
        /// The limit.
        limit: Arc<str>,
    },
    /// Keys of a limit are under its outage policy, and were not a second ago.
    OutagePolicyBegan {
        /// The limit.
        limit: Arc<str>,
        /// Its policy.
        policy: OutagePolicy,
        /// The number of nodes that the policy reckons with.
        nodes: i64,
        /// True if that number is from the store; false if it is [`Builder::max_nodes`](crate::Builder::max_nodes),
        /// because the store was never reached or the limit is exact.
        store_was_reached: bool,
    },
    /// No key of a limit is under its outage policy any more.
    OutagePolicyEnded {
        /// The limit.
        limit: Arc<str>,
    },
    /// There are so many nodes that the [accuracy](crate::Limit::accuracy) of a limit leaves less than a token of
    /// credit to each: [`check`](crate::ActiveLimit::check) denies the first requests of quiet keys. Told once.
    NoCredit {
        /// The limit.
        limit: Arc<str>,
        /// The number of nodes.
        nodes: u32,
    },
    /// A lane lost its memory and is being rebuilt from what the nodes know.
    MemoryLost {
        /// The lane.
        lane: u32,
    },
    /// The store had lost the record of a key, and rebuilds it from what the nodes know.
    RecordLost {
        /// The limit.
        limit: Arc<str>,
    },
    /// The store's clock jumped ahead: refill that was not earned has flowed in.
    StoreClockJumped {
        /// The lane.
        lane: u32,
        /// How far.
        by: Duration,
    },
    /// The store keeps another quota under this limit's name. If it is of a newer version this node goes on
    /// with it, until it is started or updated with that version; if it is of another algorithm or period, keys go on by their outage
    /// policy until both agree. Told once a minute.
    QuotaMismatch {
        /// The limit.
        limit: Arc<str>,
        /// The version configured here.
        configured_version: i64,
        /// The version that the store keeps.
        stored_version: i64,
        /// The burst that the store keeps, in tokens.
        stored_burst: i64,
        /// The rate that the store keeps, in tokens per second.
        stored_per_second: f64,
    },
    /// A limit was added or changed by an [update](crate::Limiter::update).
    Updated {
        /// The limit.
        limit: Arc<str>,
        /// Its own burst from now on, in tokens.
        burst: i64,
        /// Its own rate, in tokens per second.
        per_second: f64,
        /// It was added just now.
        is_added: bool,
    },
    /// An [update](crate::Limiter::update) has removed a limit.
    Removed {
        /// The limit.
        limit: Arc<str>,
    },
    /// The store keeps a key under another plan, or another quota of the limit, than callers of this node ask for, and this node
    /// goes on with the store's: the limit or the key's plan was changed just now, or two services disagree. Told once a minute for each limit.
    PlansDiffer {
        /// The limit.
        limit: Arc<str>,
        /// The plan that callers of this node or overrides name; `None` is the limit's own quota, or one that an override gives
        /// the key.
        named: Option<Arc<str>>,
        /// The burst that the store keeps, in tokens.
        stored_burst: i64,
        /// The rate that the store keeps, in tokens per second.
        stored_per_second: f64,
    },
    /// A key of the namespace holds another program's value; the key goes on by its outage policy.
    ForeignKey {
        /// What is wrong, and what to do.
        error: StoreError,
    },
    /// The store answered, but did not decide about a request of an exact limit, a leaky bucket or a concurrency limit, which the outage policy decided. Told once
    /// a minute for each limit.
    NotDecided {
        /// The limit.
        limit: Arc<str>,
        /// Why, and what to do.
        error: StoreError,
    },
    /// The state of this node, once a second.
    State {
        /// Keys held on this node.
        keys: usize,
        /// Tokens spent and not acknowledged by the store.
        pending: u64,
        /// Tokens that this node's leases may hold.
        leased_depth: i64,
        /// Nodes alive, 0 while unknown.
        nodes: i64,
        /// Lanes of the store that cannot be reached.
        lanes_down: usize,
    },
    /// The permits of a concurrency limit on this node, once a second.
    Permits {
        /// The limit.
        limit: Arc<str>,
        /// Permits in use now, of all keys.
        in_use: u64,
        /// Callers who wait for their turn now.
        waiting: u32,
        /// Callers who got none since the last such event.
        denied: u64,
    },
    /// How far a limit can have been exceeded, and was according to the store; once a second.
    Excess {
        /// The limit.
        limit: Arc<str>,
        /// What is known.
        excess: Excess,
    },
    /// Idle keys were forgotten to make room.
    Evicted {
        /// How many.
        keys: usize,
    },
    /// The cached clock stood still for longer than leases allow for.
    ClockStalled {
        /// For how long.
        stall: Duration,
    },
}
