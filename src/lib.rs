//! A hybrid local and global rate limiter: every node decides from memory, a background task keeps
//! the nodes of a cluster in step through Redis, and no request waits for a round trip.
//!
//! ```
//! use tidegate::{Limit, Limiter, Quota};
//!
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("api", Quota::per_second(1000).burst(200)))
//!     .build()?;
//! let api = limiter.limit("api")?;
//! let decision = api.check("user:42");
//! assert!(decision.is_allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! Busy keys hold *leases*: slices of the one bucket in the store, subtracted there before a node
//! may spend them, so that the cluster as a whole cannot overshoot. Quiet keys are decided on a
//! *credit*, a few tokens on a new key and one token later, which is reported at once and renewed while the store
//! is not in debt. A sync batches what was spent on many keys into one script call and brings new leases back.
//!
//! # Modes
//!
//! [`Mode::Hybrid`] is the product; [`Mode::Local`] keeps a limit on this node alone; in [`Mode::Exact`] the store decides
//! each request. A limiter without a store is alone, and every limit is decided exactly.
//!
//! # Algorithms
//!
//! A [`Quota`] is a token bucket; there are [`LeakyBucket`], [`FixedWindow`], [`SlidingWindow`] and [`SlidingLog`] beside it,
//! for any mode: docs/CHOOSING.md says which is for what.
//!
//! A [`Concurrency`] limit is beside them: how many requests of a key may be under way, not how many may begin.
//!
//! # Beside single limits
//!
//! [`Limiter::group`] and [`Limiter::check_all`] decide by several limits, all or nothing; [`ActiveLimit::reserve`] is for costs
//! that are known later; [`Concurrency`] limits how much is under way. [`Limiter::overrides`] blocks or allows keys, tries a limit in
//! shadow mode, and switches it off, on all nodes while they run.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `redis` (default) | the Redis and Valkey store |
//! | `tls` | `rediss://`, by rustls with ring; certificates are checked against those that the system trusts |
//! | `metrics` (default) | counters, gauges and histograms through the `metrics` facade |
//! | `calendar` | windows that are hours, days or months of a time zone, with the zones' data |
//! | `http` | who asks, by the peer or trusted proxies; the header fields of a response |
//! | `tower` | layers that limit a service: its requests, or how many are under way |
//! | `axum` | what axum knows of a request: the peer, the route |
//! | `tonic` | gRPC statuses for those who are refused |
//! | `retry` | for clients of others' APIs: pace, back-off, `Retry-After` |
//! | `serde` | quotas as text, modes and outage policies in any format |
//! | `config` | limits, store and secrets from TOML, with every mistake by line and column |
//! | `sim` | a seeded simulator around the unchanged limiter |
//! | `cli` | the `tidegate` binary |
//! | `server` | `tidegate serve`: decisions for programs in any language, over HTTP, and for Envoy; with all of `cli` |
//! | `testing` | a clock that tests drive and a store that tests script |
//!
//! # Guarantees
//!
//! `check` never waits; every token spent is charged once; nodes that die take no more than their
//! leases with them. docs/PROMISES.md lists each promise with the test that proves it;
//! docs/ARCHITECTURE.md tells how.
//!
//! # Platforms
//!
//! Unix only: decisions read clocks that other systems do not have.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![warn(clippy::unwrap_used)]

#[cfg(not(unix))]
compile_error!("tidegate runs on Unix only: it reads clocks that other systems do not have");

mod algorithm;
mod bound;
mod bucket;
mod builder;
#[cfg(feature = "config")]
pub mod config;
mod decision;
mod driver;
mod error;
#[cfg(any(test, tidegate_fuzz))]
pub mod fuzz;
#[cfg(feature = "http")]
pub mod http;
mod key;
mod limit;
mod limiter;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "http")]
mod network;
mod overrides;
mod quota;
#[cfg(feature = "retry")]
pub mod retry;
#[cfg(feature = "server")]
mod rls;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "sim")]
pub mod sim;
mod store;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time;

pub use algorithm::{
    FixedWindow, LOG_TOKENS_MAX, LeakyBucket, Rule, SlidingLog, SlidingWindow, WINDOW_MIN,
};
pub use bound::{Excess, Incidents, bound, bound_of_permits};
pub use builder::{Builder, DEFAULT_LANES, DEFAULT_MAX_KEYS, KEYS_MAX, LANES_MAX, local};
pub use decision::{Decision, Denied};
pub use driver::plan_resolver::{
    PLAN_RESOLVER_CALLS_MAX, PLAN_RESOLVER_PAUSE, PLAN_RESOLVER_TIMEOUT, PLAN_RESOLVER_WAITING_MAX,
};
pub use error::{AcquireError, CheckError, ConfigError, ShutdownError, StoreError};
pub use key::{Hashed, KEY_BYTES_MAX, Key, KeyWriter, lane_of};
pub use limit::{
    ACCURACY_CREDIT_MAX, ACCURACY_TICK_MAX, CEILING_MAX, CEILING_TICK_MAX, COST_MAX, CREDIT_MAX,
    Concurrency, DEFAULT_CREDIT, DEFAULT_MAX_NODES, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING,
    DEFAULT_SYNC_INTERVAL, Limit, MAX_WAIT_EXACT, Mode, NAME_BYTES_MAX, OVERRIDE_QUOTAS_MAX,
    OutagePolicy, PERMITS_MAX, PLANS_MAX, SYNC_INTERVAL_MAX, SYNC_INTERVAL_MIN, SyncPolicy,
    VERSION_MAX,
};
pub use limiter::{
    ActiveLimit, AsyncGroup, AsyncLimit, ConcurrencyLimit, Group, Handle, Limiter, OnKey,
    Overrides, Permit, RESET_WAIT, Reservation, ReserveError, ResetError,
};
#[cfg(feature = "metrics")]
pub use metrics::METRIC_BUCKETS;
#[cfg(feature = "http")]
pub use network::{Network, NetworkError};
pub use overrides::{OVERRIDES_MAX, Override, OverrideError, Switch};
pub use quota::{PERIOD_MAX, Quota, TOKENS_MAX};
#[cfg(feature = "redis")]
pub use store::redis::RedisStore;
pub use store::{AnyStore, MemoryStore};
pub use sync::Event;
pub use time::Timestamp;

#[cfg(all(doctest, feature = "axum", feature = "config", feature = "redis", feature = "testing"))]
mod pages;
