//! How a driver is built from what the builder has validated.

use std::sync::{Arc, Mutex};

use tokio::sync::{mpsc, oneshot};

use super::clock::{Ticker, TimeSource};
use super::definition::LimitParts;
use super::override_sync::OverrideSync;
use super::plan_resolver::{self, PlanResolver};
use super::{Command, Driver, Limits, Listener, NodeState, PermitLimits, Query, Wish, log};
use crate::bucket::{KeyBudget, NotificationQueue};
use crate::error::ConfigError;
use crate::key::KeySecret;
use crate::limit::PermitTerms;
use crate::store::{AnyStore, MemoryStore};
use crate::sync::{Config, Engine};
use crate::time::{Timestamp, micros};

/// What a driver is built from, all of it validated.
pub(crate) struct DriverParts<'a> {
    pub(crate) limits: Vec<LimitParts<'a>>,
    pub(crate) permits: Vec<PermitTerms>,
    pub(crate) store: Option<AnyStore>,
    pub(crate) max_keys: usize,
    pub(crate) lanes: u32,
    pub(crate) max_nodes: Option<u32>,
    /// The system's, if it is not given.
    pub(crate) time: Option<TimeSource>,
    /// What keys are hashed with.
    pub(crate) secret: KeySecret,
    pub(crate) resolvers: Vec<PlanResolver>,
    pub(crate) listeners: Vec<Listener>,
}

/// How a limiter reaches its driver.
pub(crate) struct Senders {
    commands: mpsc::UnboundedSender<Command>,
    pub(crate) queries: mpsc::UnboundedSender<Query>,
}

impl Senders {
    /// Sends a command and waits for its answer; the driver minds the deadline, so that this
    /// works on any runtime. `None` if the driver has ended.
    pub(crate) async fn ask(&self, wish: Wish, deadline: Timestamp) -> Option<bool> {
        let (done, answer) = oneshot::channel();
        self.commands.send(Command { wish, deadline, done }).ok()?;
        answer.await.ok()
    }
}

impl Driver {
    /// Builds a driver that also logs its events, and the senders by which its limiter reaches it.
    pub(crate) fn new(parts: DriverParts<'_>) -> Result<(Self, Senders), ConfigError> {
        let time = match parts.time {
            Some(time) => time,
            None => TimeSource::System(
                Ticker::shared().map_err(|error| ConfigError::Thread(error.to_string()))?,
            ),
        };
        let budget = Arc::new(KeyBudget::new(parts.max_keys, parts.limits.len()));
        let limits = Limits::new(parts.limits.len(), random()?);
        let mut states = limits.make(&parts.limits, &budget, &time)?;
        let resolvers = plan_resolver::open(parts.resolvers, &mut states, parts.max_keys)?;
        limits.add(states);
        let open = |store: AnyStore| {
            let (time, origin_us) = (time.clone(), time.origin_us());
            store.open(move || time.now(), origin_us)
        };
        let store = parts.store.map(open);
        // A node without a store keeps overrides to itself.
        let of_overrides = store.clone().unwrap_or_else(|| open(MemoryStore::new().into()));
        let overrides = OverrideSync::new(of_overrides, store.is_some(), parts.secret);
        let [low, high, seed] = random()?;
        let instance = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        let config = Config {
            limits: parts.limits.iter().map(LimitParts::config).collect(),
            lanes: if store.is_some() { parts.lanes } else { 0 },
            instance,
            seed,
            retry_us: store.as_ref().map_or(0, |store| micros(store.timeout())),
            max_nodes: parts.max_nodes,
        };
        let (commands, inbox) = mpsc::unbounded_channel();
        let (queries, asked) = mpsc::unbounded_channel();
        let (engine, clock) = (Engine::new(config, time.now()), time.cached());
        let notifications = NotificationQueue::new(parts.max_keys);
        let mut listeners = parts.listeners;
        listeners.push(Arc::new(log::record));
        let permits = Arc::new(PermitLimits::new(parts.permits, seed, &time));
        let store_trouble = Mutex::default();
        let node = NodeState { limits, permits, budget, notifications, store_trouble, time };
        let driver = Self {
            engine,
            store,
            node: Arc::new(node),
            instance,
            clock,
            commands: inbox,
            queries: asked,
            listeners,
            overrides,
            resolvers,
        };
        Ok((driver, Senders { commands, queries }))
    }

    /// Calls this listener with every event too.
    #[cfg(feature = "metrics")]
    pub(crate) fn listen(mut self, listener: Listener) -> Self {
        self.listeners.push(listener);
        self
    }
}

/// Random numbers: the instance id, the seed of the jitter, and what keys are hashed with.
#[allow(clippy::disallowed_methods, reason = "a node draws its secrets once, here")]
fn random<const COUNT: usize>() -> Result<[u64; COUNT], ConfigError> {
    let mut numbers = [0; COUNT];
    for number in &mut numbers {
        *number = getrandom::u64().map_err(|error| ConfigError::Random(error.to_string()))?;
    }
    Ok(numbers)
}
