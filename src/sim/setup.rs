//! What a world is made of, and what it tells.

use std::time::Duration;

use super::workload::Scenario;
use crate::limit::Limit;

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Round trip; each way takes 25% to 75% of it at random.
    pub rtt: Duration,
    /// Part of requests that never arrive.
    pub request_loss: f64,
    /// Part of replies that never arrive.
    pub reply_loss: f64,
    /// Part of requests that arrive a second time, up to [`LATE_MAX_US`] later.
    pub duplicated: f64,
    /// Part of messages that are late by up to [`LATE_MAX_US`].
    pub late: f64,
    /// How long a node waits for a reply.
    pub timeout: Duration,
}

/// The latest that a late message comes, in microseconds.
pub const LATE_MAX_US: u64 = 3_000_000;

impl Network {
    /// A network that loses nothing; nodes wait four round trips for a reply, or 100 ms.
    pub fn new(rtt: Duration) -> Self {
        let timeout = (4 * rtt).max(Duration::from_millis(100));
        Self { rtt, request_loss: 0.0, reply_loss: 0.0, duplicated: 0.0, late: 0.0, timeout }
    }

    /// The network of a scenario that has one of its own: the store is far away.
    pub fn of_scenario(scenario: Scenario) -> Option<Self> {
        let slow = matches!(scenario, Scenario::SlowStore | Scenario::SlowHerd);
        slow.then(|| Self { reply_loss: 0.01, ..Self::new(Duration::from_millis(20)) })
    }
}

/// How requests are decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// At once: `check`.
    #[default]
    Check,
    /// After a round trip when unsure: `decide`.
    Async,
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The one limit.
    pub limit: Limit,
    /// Nodes at the start.
    pub nodes: u16,
    /// Lanes of the store.
    pub lanes: u32,
    /// Seeds clocks, network and jitter.
    pub seed: u64,
    /// How messages travel.
    pub network: Network,
    /// How requests are decided.
    pub form: Form,
    /// Node clocks are off by so many millionths at most.
    pub clock_error_ppm: u32,
    /// Check the ledger after every event, and remember every decision.
    pub audit: bool,
}

impl Setup {
    /// A healthy network with a round trip of a millisecond, and clocks that run true.
    pub fn new(limit: Limit, nodes: u16, seed: u64) -> Self {
        Self {
            limit,
            nodes,
            lanes: 4,
            seed,
            network: Network::new(Duration::from_millis(1)),
            form: Form::Check,
            clock_error_ppm: 0,
            audit: false,
        }
    }
}

/// What the nodes' engines told, all together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Exchanges with the store.
    pub store_calls: u64,
    /// Exchanges that failed.
    pub store_errors: u64,
    /// Keys in all of them.
    pub keys_synced: u64,
    /// Sum over nodes and seconds: nodes that lived while the load lasted.
    pub node_seconds: f64,
    /// Absolute drift of each view, in % of the burst.
    pub drift_pct: Vec<f32>,
    /// Lanes found to have lost their memory.
    pub losses_of_memory: u64,
}

impl Traffic {
    /// The drift that `part` of all views stayed below, in % of the burst.
    pub fn drift_quantile(&self, part: f64) -> f64 {
        let mut sorted = self.drift_pct.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let index = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
        sorted.get(index).copied().unwrap_or(0.0).into()
    }
}
