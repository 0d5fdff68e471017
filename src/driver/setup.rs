//! From limits and a store to a driver that is ready to run.

use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::clock::{Ticker, TimeSource};
use super::{Command, Driver, LimitState, NodeState, StoreQuery, log};
use crate::bucket::{KeyBudget, KeyHasher, NotificationQueue};
use crate::error::ConfigError;
use crate::limit::{Limit, Terms};
use crate::store::AnyStore;
use crate::sync::{Config, Engine};
use crate::time::micros;

/// What a driver is made of, all of it validated.
pub(crate) struct Setup<'a> {
    pub(crate) limits: Vec<(&'a Limit, Terms)>,
    pub(crate) store: Option<AnyStore>,
    pub(crate) max_keys: usize,
    pub(crate) lanes: u32,
    pub(crate) max_nodes: Option<u32>,
    /// The system's, if it is not given.
    pub(crate) time: Option<TimeSource>,
}

/// How a limiter reaches its driver.
pub(crate) struct Senders {
    pub(crate) commands: mpsc::UnboundedSender<Command>,
    pub(crate) queries: mpsc::UnboundedSender<StoreQuery>,
}

impl Driver {
    /// A driver whose events are logged, and how its limiter reaches it.
    pub(crate) fn new(setup: Setup<'_>) -> Result<(Self, Senders), ConfigError> {
        let time = match setup.time {
            Some(time) => time,
            None => TimeSource::System(
                Ticker::shared().map_err(|error| ConfigError::Thread(error.to_string()))?,
            ),
        };
        let budget = Arc::new(KeyBudget::new(setup.max_keys, setup.limits.len()));
        let limits = limit_states(&setup.limits, &budget, &time)?;
        let store = setup.store.map(|store| {
            let time = time.clone();
            store.open(move || time.now())
        });
        let [low, high, seed] = random()?;
        let config = Config {
            limits: limits.iter().map(|limit| (limit.name.clone(), limit.terms)).collect(),
            lanes: if store.is_some() { setup.lanes } else { 0 },
            instance: (u128::from(high) << 64 | u128::from(low)).to_le_bytes(),
            seed,
            retry_us: store.as_ref().map_or(0, |store| micros(store.timeout())),
            max_nodes: setup.max_nodes,
        };
        let (commands, inbox) = mpsc::unbounded_channel();
        let (queries, asked) = mpsc::unbounded_channel();
        let (engine, clock) = (Engine::new(config, time.now()), time.cached());
        let notifications = NotificationQueue::new(setup.max_keys);
        let node = NodeState { limits, budget, notifications, last_error: Mutex::new(None), time };
        let driver = Self {
            engine,
            store,
            node: Arc::new(node),
            clock,
            commands: inbox,
            queries: asked,
            listeners: vec![Arc::new(log::record)],
        };
        Ok((driver, Senders { commands, queries }))
    }
}

/// The limits, each with an empty table.
fn limit_states(
    limits: &[(&Limit, Terms)],
    budget: &Arc<KeyBudget>,
    time: &TimeSource,
) -> Result<Vec<Arc<LimitState>>, ConfigError> {
    let no_memory = || ConfigError::Limiter {
        field: "max_keys",
        value: budget.max().to_string(),
        reason: "there is no memory for so many keys in each limit",
    };
    let state = |(&(limit, terms), index): (&(&Limit, Terms), u32)| {
        let hasher = KeyHasher::new(random()?);
        let state = LimitState::new(index, limit, terms, hasher, budget, time);
        state.map(Arc::new).ok_or_else(no_memory)
    };
    limits.iter().zip(0..).map(state).collect()
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
