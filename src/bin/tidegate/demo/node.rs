//! Nodes under load: limiters, and the one thread that asks them.
#![allow(
    clippy::disallowed_methods,
    reason = "a load generator measures with the real clock and waits for arrivals"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tidegate::sim::figures::Decided;
use tidegate::sim::workload::Arrival;
use tidegate::{AnyStore, Event, Excess, Limit, Limiter, Rule};

use super::DemoError;
use crate::warnings;

/// How long a node may take to find its store.
const READY_WITHIN: Duration = Duration::from_secs(5);
/// How long a node may take to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);
/// Below this, waiting for the next arrival is not worth a sleep.
const SLEEP_MIN: Duration = Duration::from_micros(60);

/// What the nodes' sync tasks have told so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Traffic {
    pub(crate) store_calls: u64,
    pub(crate) keys_synced: u64,
    pub(crate) store_errors: u64,
    /// Absolute drift of each view, in % of the burst.
    pub(crate) drift_pct: Vec<f32>,
    /// How long each exchange that was answered took, in microseconds.
    pub(crate) took_us: Vec<u64>,
    pub(crate) excess: Told,
}

/// What the nodes know of the excess: the highest that any of them told.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Told {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) excess_bound_tokens: Option<f64>,
    pub(crate) excess_observed_tokens: f64,
}

impl Told {
    fn merge(&mut self, other: Self) {
        let bounds = self.excess_bound_tokens.into_iter().chain(other.excess_bound_tokens);
        self.excess_bound_tokens = bounds.reduce(f64::max);
        self.excess_observed_tokens = self.excess_observed_tokens.max(other.excess_observed_tokens);
    }
}

impl From<Excess> for Told {
    fn from(excess: Excess) -> Self {
        Self {
            excess_bound_tokens: excess.bound_tokens,
            excess_observed_tokens: excess.observed_tokens,
        }
    }
}

impl Traffic {
    pub(crate) fn merge(&mut self, other: Self) {
        self.store_calls += other.store_calls;
        self.keys_synced += other.keys_synced;
        self.store_errors += other.store_errors;
        self.drift_pct.extend(other.drift_pct);
        self.took_us.extend(other.took_us);
        self.excess.merge(other.excess);
    }

    fn hear(&mut self, event: &Event) {
        match event {
            Event::Synced { keys, error, took, .. } => {
                self.store_calls += 1;
                self.store_errors += u64::from(error.is_some());
                if error.is_none() {
                    self.keys_synced += *keys as u64;
                    self.took_us.push(took.as_micros() as u64);
                }
            }
            Event::StoreDecided { took, error, .. } => {
                self.store_calls += 1;
                self.keys_synced += 1;
                self.store_errors += u64::from(error.is_some());
                if error.is_none() {
                    self.took_us.push(took.as_micros() as u64);
                }
            }
            Event::Viewed { drift_tokens, burst_tokens, .. } => {
                self.drift_pct.push((100.0 * drift_tokens.abs() / *burst_tokens as f64) as f32);
            }
            Event::Excess { excess, .. } => self.excess.merge((*excess).into()),
            _ => {}
        }
    }
}

impl From<Traffic> for tidegate::sim::Traffic {
    fn from(heard: Traffic) -> Self {
        let Traffic { store_calls, keys_synced, store_errors, drift_pct, .. } = heard;
        Self { store_calls, keys_synced, store_errors, drift_pct, ..Self::default() }
    }
}

/// What can be seen while the load runs.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub(crate) offered: AtomicU64,
    pub(crate) admitted: AtomicU64,
    pub(crate) traffic: Mutex<Traffic>,
}

impl Live {
    pub(crate) fn traffic(&self) -> std::sync::MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a node that reports to `live`. Must be called inside a runtime.
pub(crate) fn start(
    limit: Limit,
    store: AnyStore,
    node: u16,
    live: &Arc<Live>,
) -> Result<Limiter, DemoError> {
    let heard = live.clone();
    let limiter = Limiter::builder()
        .name(format!("node-{node}"))
        .limit(limit)
        .store(store)
        .listen(move |event| heard.traffic().hear(event))
        .build()?;
    Ok(limiter)
}

/// Waits until the nodes' stores can be relied on; what happened so far is not counted.
pub(crate) async fn ready(limiters: &[Limiter], live: &Live) -> Result<(), DemoError> {
    for limiter in limiters {
        limiter.ready(READY_WITHIN).await?;
    }
    *live.traffic() = Traffic::default();
    Ok(())
}

/// Leaves in good order: a store that is away by then is told about, and no failure of the run.
pub(crate) async fn leave(limiters: &[Limiter]) {
    for limiter in limiters {
        if let Err(error) = limiter.shutdown(LEAVE_WITHIN).await {
            warnings::give(&error.to_string(), 1);
        }
    }
}

/// The nodes' load: what to ask whom when.
pub(crate) struct Load<'a> {
    pub(crate) limit: &'a str,
    pub(crate) arrivals: &'a [Arrival],
    pub(crate) keys: &'a [String],
    /// The instant that the arrivals' times count from.
    pub(crate) start: Instant,
}

/// What came of the load.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Driven {
    pub(crate) decided: Vec<Decided>,
    /// How long each decision took, in nanoseconds.
    pub(crate) took_ns: Vec<u64>,
}

impl Driven {
    /// With room for `requests`, so that no growing delays a decision.
    fn with_capacity(requests: usize) -> Self {
        Self { decided: Vec::with_capacity(requests), took_ns: Vec::with_capacity(requests) }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.decided.extend(other.decided);
        self.took_ns.extend(other.took_ns);
    }
}

/// Asks `limiter_of` each arrival's node at each arrival's time: an open loop, which falls behind
/// rather than slow down when a node is slow.
pub(crate) fn drive<'a>(
    load: &Load<'_>,
    limiter_of: impl Fn(u16) -> Option<&'a Limiter>,
    live: &Live,
) -> Result<Driven, DemoError> {
    let mut driven = Driven::with_capacity(load.arrivals.len());
    let mut limits = std::collections::HashMap::new();
    for arrival in load.arrivals {
        let Some(limiter) = limiter_of(arrival.node) else { continue };
        let limit = match limits.entry(arrival.node) {
            std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(limiter.limit(load.limit)?)
            }
        };
        wait_until(load.start + Duration::from_micros(arrival.at_us));
        let key = &load.keys[arrival.key as usize];
        let began = Instant::now();
        // Requests of a leaky bucket wait for their slots.
        let answer = match limit.rule() {
            Rule::LeakyBucket(_) => limit.schedule_n(key, arrival.cost),
            _ => limit.check_n(key, arrival.cost),
        };
        let took = began.elapsed();
        // A cost above the burst is an error of the caller: it counts as denied.
        let (allowed, sure, delay) = answer.map_or((false, true, Duration::ZERO), |decision| {
            (decision.is_allowed(), decision.is_sure(), decision.delay())
        });
        live.offered.fetch_add(u64::from(arrival.cost), Ordering::Relaxed);
        if allowed {
            live.admitted.fetch_add(u64::from(arrival.cost), Ordering::Relaxed);
        }
        driven.took_ns.push(took.as_nanos() as u64);
        driven.decided.push(Decided {
            at_us: load.start.elapsed().as_micros() as u64,
            node: arrival.node,
            key: arrival.key,
            cost: arrival.cost,
            allowed,
            sure,
            waited: false,
            delay_us: delay.as_micros() as u64,
        });
    }
    Ok(driven)
}

fn wait_until(instant: Instant) {
    let wait = instant.saturating_duration_since(Instant::now());
    if wait > SLEEP_MIN {
        std::thread::sleep(wait);
    }
}
