//! From limits and a store to a running limiter.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::algorithm::Rule;
use crate::driver::clock::TimeSource;
use crate::driver::plan_resolver::PlanResolver;
use crate::driver::setup::DriverParts;
use crate::driver::{Driver, LimitParts, Listener};
use crate::error::{ConfigError, NO_LIMITS};
use crate::key::KeySecret;
use crate::limit::{Concurrency, DEFAULT_MAX_NODES, Limit, NodeTerms, PermitTerms};
use crate::limiter::{ActiveLimit, Limiter, Shared};
use crate::store::AnyStore;
use crate::sync::Event;

mod resolver;

/// The most keys that a limiter holds, over all its limits. A key takes about 142 bytes (78 of a local limit), and
/// one of a hybrid limit about 700 more while it is asked for.
pub const DEFAULT_MAX_KEYS: usize = 1_000_000;
pub use crate::bucket::KEYS_MAX;
/// The lanes of a namespace. Fixed in the store by the first node; the others must agree.
pub const DEFAULT_LANES: u32 = 16;
/// The most lanes a namespace can have.
pub const LANES_MAX: u32 = 1024;

/// A shorter secret of keys can be found by trying.
const KEY_SECRET_BYTES_MIN: usize = 16;

/// Collects what a limiter is made of; every default is a constant of this crate.
///
/// ```
/// use tidegate::{Limit, Limiter, Quota};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("api", Quota::per_second(100)))
///     .build()?;
/// let api = limiter.limit("api")?;
/// assert!(api.check("user:42").is_allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    #[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "names the metrics"))]
    name: Option<String>,
    limits: Vec<Limit>,
    permits: Vec<Concurrency>,
    store: Option<AnyStore>,
    max_keys: usize,
    lanes: u32,
    max_nodes: Option<u32>,
    key_secret: Option<Vec<u8>>,
    resolvers: Vec<PlanResolver>,
    listeners: Vec<Listener>,
    pub(crate) time: Option<TimeSource>,
}

impl Limiter {
    /// Begins a limiter without limits and without a store.
    pub fn builder() -> Builder {
        Builder {
            name: None,
            limits: Vec::new(),
            permits: Vec::new(),
            store: None,
            max_keys: DEFAULT_MAX_KEYS,
            lanes: DEFAULT_LANES,
            max_nodes: None,
            key_secret: None,
            resolvers: Vec::new(),
            listeners: Vec::new(),
            time: None,
        }
    }
}

/// A limit of this process alone, which needs no store and no name: it is called `local`.
///
/// ```
/// use tidegate::Quota;
///
/// let limit = tidegate::local(Quota::per_second(100))?;
/// assert!(limit.check(&()).is_allowed());
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
///
/// Cost: as [`Builder::build`].
///
/// # Errors
///
/// [`ConfigError`] names the field and the value that cannot be kept.
pub fn local(rule: impl Into<Rule>) -> Result<ActiveLimit, ConfigError> {
    Limiter::builder().limit(Limit::new("local", rule)).build()?.limit("local")
}

impl Builder {
    /// Names this limiter in its metrics (label `limiter`), where a process has several.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Adds a limit.
    pub fn limit(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Adds a concurrency limit. Its name must not be that of another limit.
    pub fn concurrency(mut self, limit: Concurrency) -> Self {
        self.permits.push(limit);
        self
    }

    /// The store that nodes share. Without one this node is alone, and decides exactly.
    pub fn store(mut self, store: impl Into<AnyStore>) -> Self {
        self.store = Some(store.into());
        self
    }

    /// The most keys held at a time, over all limits ([`DEFAULT_MAX_KEYS`]). Half of them are split evenly among the limits;
    /// the other half is for those that need more, so that one limit can hold half of all and its share. When no idle
    /// key can make room, new keys share one overflow bucket a limit until there is room.
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.max_keys = keys;
        self
    }

    /// The number of lanes, a power of two or not, 1 to [`LANES_MAX`] ([`DEFAULT_LANES`]). All
    /// nodes of a namespace must agree: the store refuses others with
    /// [`StoreError::Lanes`](crate::StoreError::Lanes).
    pub fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// The most nodes that have one limit ([`DEFAULT_MAX_NODES`]; 1 with a [`MemoryStore`](crate::MemoryStore)).
    /// Until the store has counted the same number of nodes for a second, a node computes its credit from this number, and
    /// its [share](crate::OutagePolicy::Share) from this number or the count, whichever is more.
    pub fn max_nodes(mut self, nodes: u32) -> Self {
        self.max_nodes = Some(nodes);
        self
    }

    /// The secret that keys are hashed with ([`Hashed`](crate::Hashed)): random bytes, at least 16, the same on all
    /// nodes. Without one, anybody who can read the store can find short keys, like addresses, by trying all of
    /// them. With another secret, hashed keys are other keys.
    pub fn key_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.key_secret = Some(secret.into());
        self
    }

    /// Calls `listener` with every [`Event`], from the sync task: it must not block.
    pub fn listen(mut self, listener: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.listeners.push(Arc::new(listener));
        self
    }

    /// Starts the limiter. An unreachable store is no error: limits begin with their outage policy
    /// and the store is tried again and again, loudly.
    ///
    /// Inside a tokio runtime (also a current-thread one) the sync task runs there and ends with
    /// it; the runtime needs its timer, and for Redis its I/O. Elsewhere the task gets a thread of
    /// its own.
    ///
    /// Cost: the first limiter of a process measures how fast the processor's counter runs, mostly within a
    /// millisecond, 200 at most.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the field and the value that cannot be kept.
    pub fn build(self) -> Result<Limiter, ConfigError> {
        let (limiter, driver) = self.assemble()?;
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(driver.run());
            }
            Err(_) => driver.run_on_own_thread()?,
        }
        Ok(limiter)
    }

    /// Starts the limiter and waits until the store can be relied on.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Store`] if the store could not be used within `deadline`; otherwise as
    /// [`build`](Self::build).
    pub async fn build_ready(self, deadline: Duration) -> Result<Limiter, ConfigError> {
        let limiter = self.build()?;
        limiter.ready(deadline).await?;
        Ok(limiter)
    }

    /// A limiter, and the driver that is still to run.
    pub(crate) fn assemble(self) -> Result<(Limiter, Driver), ConfigError> {
        self.validate()?;
        let node_terms = self.node_terms();
        let secret = KeySecret::new(self.key_secret.as_deref().unwrap_or_default());
        let parts = DriverParts {
            limits: self
                .limits
                .iter()
                .map(|limit| LimitParts::new(limit, node_terms, None))
                .collect::<Result<_, _>>()?,
            permits: self.permit_terms()?,
            store: self.store,
            max_keys: self.max_keys,
            lanes: self.lanes,
            max_nodes: self.max_nodes,
            time: self.time,
            secret: secret.clone(),
            resolvers: self.resolvers,
            listeners: self.listeners,
        };
        let (driver, senders) = Driver::new(parts)?;
        let node = driver.node.clone();
        #[cfg(feature = "metrics")]
        let labels = crate::metrics::limiter_labels(self.name.as_deref());
        #[cfg(feature = "metrics")]
        let metrics = crate::metrics::listener(labels.clone(), &node);
        #[cfg(feature = "metrics")]
        let driver = driver.listen(metrics);
        let waiting = (0..node.limits.places()).map(|_| OnceLock::new()).collect();
        let shared = Shared {
            node,
            waiting,
            driver: senders,
            secret,
            node_terms: Mutex::new(node_terms),
            #[cfg(all(feature = "metrics", feature = "tower"))]
            labels,
        };
        Ok((Limiter { shared: Arc::new(shared) }, driver))
    }

    /// What limits' numbers depend on, beside the limits.
    pub(crate) fn node_terms(&self) -> NodeTerms {
        let (has_store, uncounted) = (self.store.is_some(), self.uncounted());
        NodeTerms { has_store, max_nodes: self.max_nodes, uncounted }
    }

    fn permit_terms(&self) -> Result<Vec<PermitTerms>, ConfigError> {
        let (is_alone, nodes) = (self.store.is_none(), self.uncounted());
        self.permits.iter().map(|limit| limit.validate(is_alone, nodes, self.max_keys)).collect()
    }

    /// The number of nodes until the store has counted them.
    fn uncounted(&self) -> u32 {
        let is_memory = self.store.as_ref().is_some_and(AnyStore::is_memory);
        self.max_nodes.unwrap_or(if is_memory { 1 } else { DEFAULT_MAX_NODES })
    }

    /// Checks everything but what each limit is.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let limits = self.limits.len() + self.permits.len();
        let (keys, lanes) = (self.max_keys, self.lanes);
        let secret = self.key_secret.as_ref().map_or(KEY_SECRET_BYTES_MIN, Vec::len);
        for (is_valid, field, value, reason) in [
            (limits > 0, "limits", "none".to_owned(), NO_LIMITS),
            ((1..=KEYS_MAX).contains(&keys), "max_keys", keys.to_string(), "must be 1 to 50000000"),
            ((1..=LANES_MAX).contains(&lanes), "lanes", lanes.to_string(), "must be 1 to 1024"),
            (
                secret >= KEY_SECRET_BYTES_MIN,
                "key_secret",
                format!("{secret} bytes"),
                "must be at least 16 random bytes",
            ),
            (self.max_nodes != Some(0), "max_nodes", "0".to_owned(), "must be at least 1"),
        ] {
            if !is_valid {
                return Err(ConfigError::Limiter { field, value, reason });
            }
        }
        let mut names = HashSet::new();
        let all = self.limits.iter().map(Limit::name);
        let mut all = all.chain(self.permits.iter().map(Concurrency::name));
        match all.find(|&name| !names.insert(name)) {
            Some(name) => Err(ConfigError::DuplicateLimit(name.to_owned())),
            None => Ok(()),
        }
    }
}
