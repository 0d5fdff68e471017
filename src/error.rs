//! What can go wrong, typed: each error names the field and the value, and says what to do.
//!
//! A denial is never an error: it is a [`Decision`](crate::Decision).

use std::sync::Arc;
use std::time::Duration;

/// What is wrong with a limiter that has none.
pub(crate) const NO_LIMITS: &str = "give the limiter at least one limit";

/// A value that was refused while a limit or a limiter was built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A field of a limit has a value that cannot be kept.
    #[error("limit {limit:?}: {field} = {value}: {reason}")]
    Limit {
        /// The limit's name.
        limit: String,
        /// The field at fault.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong, and what would be right.
        reason: &'static str,
    },
    /// A field of the limiter has a value that cannot be kept.
    #[error("limiter: {field} = {value}: {reason}")]
    Limiter {
        /// The field at fault.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong, and what would be right.
        reason: &'static str,
    },
    /// Text is no quota.
    #[error("quota {text:?}: {reason}")]
    Quota {
        /// The text.
        text: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// Two limits carry the same name.
    #[error("limit {0:?} is defined twice: give each limit a name of its own")]
    DuplicateLimit(String),
    /// A limit was asked for that the limiter does not have.
    #[error("limit {name:?} is not known; known are: {known}")]
    UnknownLimit {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A plan was asked for that the limit was not built with.
    #[error("limit {limit:?} has no plan {name:?}; its plans are: {known}")]
    UnknownPlan {
        /// The limit's name.
        limit: String,
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A limit was asked for by [`Limiter::limit`](crate::Limiter::limit) of which the store decides each request.
    #[error(
        "limit {0:?} is exact, so that each decision waits for the store: ask for it with async_limit"
    )]
    ExactLimit(String),
    /// A group was asked for that has no limit.
    #[error("a group has no limit: name one at least")]
    EmptyGroup,
    /// A group was asked for in which a limit is named twice.
    #[error("limit {0:?} is named twice in a group: a request would be charged twice")]
    RepeatedLimit(String),
    /// The store could not be used, and the builder was told to insist on it.
    #[error("the store is required and cannot be used: {0}")]
    Store(#[from] StoreError),
    /// The driver's thread could not be started.
    #[error("the driver's thread could not be started: {0}")]
    Thread(String),
    /// The system gave no random bytes for the instance id.
    #[error("the system's random source failed, so no instance id can be drawn: {0}")]
    Random(String),
}

/// The store did not take everything back in time. What it did not take is lost with the limiter:
/// leases return by their end, and pending tokens go uncharged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[error(
    "the store did not take everything within {within:?}: leases return by their end, pending tokens are lost, {permits} permits are held"
)]
pub struct ShutdownError {
    /// The deadline that passed.
    pub within: Duration,
    /// Permits of concurrency limits that callers still hold.
    pub permits: u64,
}

/// A request that cannot be decided: the caller's bug, never a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// A request is to fit limits, and none is named.
    #[error("a request is to fit limits, and none is named")]
    NoLimit,
    /// No bucket of this limit can ever hold so many tokens. No cost is too high for a limit that is [off](crate::Switch::Off)
    /// or in [shadow mode](crate::Switch::Shadow), or for a key that an [override](crate::Override) blocks or allows.
    #[error("cost: {cost} on limit {limit:?} can never be admitted: the most is {max}")]
    CostTooHigh {
        /// The limit's name.
        limit: &'static str,
        /// The cost asked for, in tokens.
        cost: u32,
        /// The highest cost that can be admitted, in tokens.
        max: u32,
    },
}

/// Why a concurrency limit gave no permit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Too few permits are free now: ask again later, or wait with
    /// [`acquire_within`](crate::ConcurrencyLimit::acquire_within).
    #[error("limit {limit:?} is full: {in_use} of {max} permits of the key are in use")]
    Denied {
        /// The limit's name.
        limit: Arc<str>,
        /// The most permits of a key.
        max: u32,
        /// Permits of the key in use on all nodes, as the store said last. It may be below `max` where the free ones are kept for
        /// nodes that wait, or are fewer than the cost.
        in_use: u32,
    },
    /// None became free in time.
    #[error(
        "limit {limit:?} is full: none of {max} permits of the key came free within {within:?}"
    )]
    TimedOut {
        /// The limit's name.
        limit: Arc<str>,
        /// The most permits of a key.
        max: u32,
        /// How long the caller waited.
        within: Duration,
    },
    /// Enough callers of this node wait already.
    #[error("limit {limit:?}: {max_waiting} callers wait already: shed load")]
    TooManyWaiting {
        /// The limit's name.
        limit: Arc<str>,
        /// The most that may wait: [`Concurrency::max_waiting`](crate::Concurrency::max_waiting), or 10,000 of
        /// [`acquire`](crate::ConcurrencyLimit::acquire).
        max_waiting: u32,
    },
    /// No permit for so many can ever be given: the caller's bug.
    #[error("cost: {cost} on limit {limit:?} can never be given: must be 1 to {max}")]
    Cost {
        /// The limit's name.
        limit: Arc<str>,
        /// The permits asked for.
        cost: u32,
        /// The most permits of a key.
        max: u32,
    },
    /// The store does not answer in time, and the outage policy gives no permit, or has not begun.
    #[error("limit {limit:?}: the store does not answer, and the outage policy gives no permit")]
    StoreAway {
        /// The limit's name.
        limit: Arc<str>,
    },
    /// Permits of too many keys are in use on this node.
    #[error("limit {limit:?}: permits of {max_keys} keys are in use: raise max_keys")]
    TooManyKeys {
        /// The limit's name.
        limit: Arc<str>,
        /// The most keys.
        max_keys: usize,
    },
    /// The limiter's task has ended with its runtime: nobody asks the store, or watches the time.
    #[error("limit {limit:?}: the limiter's task has ended with its runtime")]
    Ended {
        /// The limit's name.
        limit: Arc<str>,
    },
}

/// What an exchange with the store can end in. The limit goes on by its outage policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The address cannot be parsed or names no store.
    #[error("store address {address:?}: {reason}")]
    Address {
        /// The address as given, without its password.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No connection, or it broke: whether the batch was applied is unknown.
    #[error("the store is unreachable: {0}")]
    Unreachable(String),
    /// No answer in time: whether the batch was applied is unknown.
    #[error("the store did not answer within {0:?}")]
    TimedOut(Duration),
    /// It answers, and gives less than it has for a while: it lost its memory or was not called for long, or is new to its nodes.
    #[error(
        "the store answers, and gives less than it has until its nodes have told what they hold"
    )]
    Recovering,
    /// User or password were refused.
    #[error("the store refused the credentials: {0}: check user and password")]
    Credentials(String),
    /// The user may not run scripts, or not write these keys.
    #[error(
        "the store denies what tidegate needs: {0}: allow EVALSHA, EVAL, TIME, GET, GETRANGE, MGET, TYPE, SET, SETRANGE, ZADD, ZCARD, ZREM, ZREMRANGEBYSCORE, PEXPIRE on the namespace's keys, and LINDEX, LLEN, LRANGE, LTRIM, LSET, RPUSH for exact sliding logs, HGET, HSET, HDEL, HLEN, EXISTS, DEL, ZRANGEBYSCORE for overrides, and PTTL for exact token buckets, leaky buckets and permits over HTTP"
    )]
    Denied(String),
    /// The server cannot write now: a replica, no memory, a failed disk.
    #[error("the store cannot write: {0}")]
    ReadOnly(String),
    /// The server is older than what the scripts need.
    #[error("the store's version is {found}; {needed} or newer is needed: upgrade it")]
    TooOld {
        /// The version that the server reports.
        found: String,
        /// The oldest version supported.
        needed: &'static str,
    },
    /// The store was set up with another number of lanes.
    #[error(
        "lanes = {configured}, but the namespace was set up with {stored}: configure {stored}, or use another namespace"
    )]
    Lanes {
        /// What this node is configured with.
        configured: u32,
        /// What the store holds.
        stored: u32,
    },
    /// The store speaks another version of the wire format.
    #[error(
        "the namespace holds wire version {stored}, this node speaks {spoken}: use another namespace or upgrade"
    )]
    Wire {
        /// The version spoken here.
        spoken: u32,
        /// The version found.
        stored: u32,
    },
    /// A key of the namespace holds another program's value.
    #[error(
        "key {key:?} holds a {found} that tidegate did not write: remove it, or use another namespace"
    )]
    ForeignKey {
        /// The key.
        key: String,
        /// The type found.
        found: String,
    },
    /// Somebody else writes under this node's instance id.
    #[error("another process uses this node's instance id (a cloned machine?): a new id was drawn")]
    ClonedInstance,
    /// The answer could not be understood.
    #[error("the store's reply: {field} = {value}: not a reply of this protocol")]
    Reply {
        /// The part of the reply at fault.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// Anything else that the server said.
    #[error("the store answered: {0}")]
    Server(String),
}
