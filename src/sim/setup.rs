//! What a world is made of, and what it counts.

use std::collections::HashSet;
use std::time::Duration;

use serde::Serialize;

use super::scenario::by_name;
use super::workload::{Arrival, Scenario};
use crate::error::ConfigError;
use crate::limit::{DEFAULT_MAX_NODES, Limit};

/// Round trips where nodes are at different distances from the store.
const FAR_RTTS: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(80),
];

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Round trip; each way takes 25% to 75% of it at random.
    pub rtt: Duration,
    /// Round trips of the nodes in turn, in place of that.
    pub rtt_by_node: Option<[Duration; 4]>,
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

/// How long the store takes for a request. It serves one at a time, in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceTime {
    /// For each call, in microseconds.
    pub call_us: u64,
    /// For each key of a call, in nanoseconds.
    pub key_ns: u64,
    /// For each key of a call that the store has applied before, in nanoseconds.
    pub resent_key_ns: u64,
}

impl ServiceTime {
    /// The store of the scenario `crowd`. A Redis on one machine took 20 us a call and 3.2 us a key, and
    /// for calls that came again 13 us and 0.27 us: the script looks at their number only.
    pub const CROWD: Self = Self { call_us: 30, key_ns: 4000, resent_key_ns: 300 };

    /// The service time of a scenario that has one.
    pub fn of_scenario(scenario: Scenario) -> Option<Self> {
        (scenario == Scenario::Crowd).then_some(Self::CROWD)
    }

    /// The time of a call of `keys` keys, in microseconds.
    pub const fn of_call(&self, keys: usize, resent: bool) -> u64 {
        self.call_us + keys as u64 * if resent { self.resent_key_ns } else { self.key_ns } / 1000
    }
}

/// The latest that a late message comes, in microseconds.
pub const LATE_MAX_US: u64 = 3_000_000;

impl Network {
    /// A network that loses nothing; nodes wait four round trips for a reply, or 100 ms.
    pub fn new(rtt: Duration) -> Self {
        let timeout = (4 * rtt).max(Duration::from_millis(100));
        Self {
            rtt,
            rtt_by_node: None,
            request_loss: 0.0,
            reply_loss: 0.0,
            duplicated: 0.0,
            late: 0.0,
            timeout,
        }
    }

    /// Whether every message arrives once and in time.
    pub fn is_clean(&self) -> bool {
        [self.request_loss, self.reply_loss, self.duplicated, self.late]
            .iter()
            .all(|part| *part <= 0.0)
    }

    /// The network of a scenario that has one of its own: the store is far away, from all nodes or
    /// from some.
    pub fn of_scenario(scenario: Scenario) -> Option<Self> {
        match scenario {
            Scenario::SlowStore | Scenario::SlowHerd => {
                Some(Self { reply_loss: 0.01, ..Self::new(Duration::from_millis(20)) })
            }
            Scenario::FarUnder | Scenario::FarHerd | Scenario::FarShiftUnder => {
                let [.., farthest] = FAR_RTTS;
                let Self { timeout, .. } = Self::new(farthest);
                let near = Self::new(Duration::from_millis(1));
                Some(Self { rtt_by_node: Some(FAR_RTTS), timeout, ..near })
            }
            _ => None,
        }
    }

    /// The round trip of the node in this place.
    pub fn rtt_of(&self, place: u16) -> Duration {
        self.rtt_by_node.map_or(self.rtt, |rtts| rtts[usize::from(place) % rtts.len()])
    }
}

/// How requests are decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// At once: `check`.
    #[default]
    Check,
    /// After a round trip when unsure: `decide`.
    Async,
}

/// What nodes spend from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Leases, and the limit's credit.
    #[default]
    Default,
    /// Leases alone.
    Strict,
    /// The last total received: [`write_behind`](super::write_behind), to compare with.
    WriteBehind,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 2] = [Self::Check, Self::Async];

    /// What it goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Async => "async",
        }
    }
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Default, Self::Strict, Self::WriteBehind];

    /// What it goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Strict => "strict",
            Self::WriteBehind => "write-behind",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("policy", &Self::ALL, Self::name, text)
    }
}

impl std::str::FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("form", &Self::ALL, Self::name, text)
    }
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The limit, or the first of several.
    pub limit: Limit,
    /// The others. Of n limits in all, the k-th has the keys that leave k when divided by n.
    pub others: Vec<Limit>,
    /// A newer version of the first limit, which the nodes in odd places hold.
    pub newer: Option<Limit>,
    /// Nodes at the start.
    pub nodes: u16,
    /// Lanes of the store.
    pub lanes: u32,
    /// Seeds clocks, network and jitter.
    pub seed: u64,
    /// How messages travel.
    pub network: Network,
    /// How long the store takes for a request; none if it takes no time.
    pub service: Option<ServiceTime>,
    /// How requests are decided.
    pub form: Form,
    /// Keys from this number on are invented: asked for once, counted and not judged.
    pub known_keys: Option<u32>,
    /// Node clocks are off by this many millionths at most.
    pub clock_error_ppm: u32,
    /// Check the ledger after every event, and remember every decision.
    pub audit: bool,
}

impl Setup {
    /// A healthy network with a round trip of a millisecond, and clocks that run true.
    pub fn new(limit: Limit, nodes: u16, seed: u64) -> Self {
        Self {
            limit,
            others: Vec::new(),
            newer: None,
            nodes,
            lanes: 4,
            seed,
            network: Network::new(Duration::from_millis(1)),
            service: None,
            form: Form::Check,
            known_keys: None,
            clock_error_ppm: 0,
            audit: false,
        }
    }

    /// All limits, as the node in this place holds them.
    pub(super) fn limits_of(&self, place: u16) -> impl Iterator<Item = &Limit> {
        let newer = self.newer.as_ref().filter(|_| place % 2 == 1);
        [newer.unwrap_or(&self.limit)].into_iter().chain(&self.others)
    }

    /// The limit that a key belongs to.
    pub(super) fn limit_of(&self, key: u32) -> usize {
        key as usize % (1 + self.others.len())
    }

    /// The setup with the network and the store that belong to a scenario, where it has its own.
    #[must_use]
    pub fn of_scenario(self, scenario: Scenario) -> Self {
        Self {
            network: Network::of_scenario(scenario).unwrap_or(self.network),
            service: ServiceTime::of_scenario(scenario),
            known_keys: scenario.known_keys(),
            ..self
        }
    }

    /// How often a busy key is synced, in seconds: its own tick.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the limit cannot be kept.
    pub fn tick_s(&self) -> Result<f64, ConfigError> {
        Ok(self.limit.validate_hybrid(DEFAULT_MAX_NODES)?.tick_us as f64 / 1e6)
    }
}

/// What happened between nodes and store, all together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Batches sent, each time that they were sent.
    pub sent: u64,
    /// Exchanges with the store.
    pub store_calls: u64,
    /// Exchanges that failed.
    pub store_errors: u64,
    /// Keys in all of them.
    pub keys_synced: u64,
    /// Sum over nodes and seconds: nodes that lived while the load lasted.
    pub node_seconds: f64,
    /// Keys with traffic: each key counts once for each node and second in which it was asked for.
    pub asked_seconds: u64,
    /// Absolute drift of each view, in % of the burst.
    pub drift_pct: Vec<f32>,
    /// Lanes found to have lost their memory.
    pub losses_of_memory: u64,
    /// Keys in exchanges that were invented: [`Setup::known_keys`].
    pub invented_synced: u64,
    /// Time for which the store served requests, in microseconds.
    pub store_busy_us: u64,
    /// The same for requests that it applied for the first time, in microseconds.
    pub store_useful_us: u64,
    /// Leases, or additions to one, that the store granted.
    pub leases_granted: u64,
    /// Those that had not ended when their reply reached a node that still waited for it.
    pub leases_alive: u64,
}

impl Traffic {
    /// The drift that `part` of all views stayed below, in % of the burst.
    pub fn drift_quantile(&self, part: f64) -> f64 {
        let mut sorted = self.drift_pct.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let index = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
        sorted.get(index).copied().unwrap_or(0.0).into()
    }

    /// The part of `seconds` in which the store served requests, in %; and in which it served those
    /// that it applied for the first time.
    pub fn store_busy_pct(&self, seconds: f64) -> [f64; 2] {
        let part = |micros: u64| 100.0 * micros as f64 / 1e6 / seconds;
        [part(self.store_busy_us), part(self.store_useful_us)]
    }

    /// Leases that had not ended when they reached their node, in % of all that were granted.
    pub fn leases_alive_pct(&self) -> f64 {
        if self.leases_granted == 0 {
            return 100.0;
        }
        100.0 * self.leases_alive as f64 / self.leases_granted as f64
    }

    /// Keys synced in each of the key's own ticks, of `tick_s`, and node with traffic on it.
    pub fn keys_synced_per_tick(&self, tick_s: f64) -> f64 {
        // A load without requests has no ticks, and infinity cannot be written in JSON.
        self.keys_synced as f64 * tick_s / self.asked_seconds.max(1) as f64
    }
}

/// Keys with traffic in `arrivals`, which are ordered by time: [`Traffic::asked_seconds`].
pub(super) fn asked_seconds(arrivals: &[Arrival]) -> u64 {
    let second = |arrival: &Arrival| arrival.at_us / 1_000_000;
    let mut asked = HashSet::new();
    let of_second = |within: &[Arrival]| {
        asked.clear();
        asked.extend(within.iter().map(|arrival| (arrival.node, arrival.key)));
        asked.len() as u64
    };
    arrivals.chunk_by(|one, next| second(one) == second(next)).map(of_second).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    #[test]
    fn key_counts_once_for_each_node_and_second_in_which_it_was_asked_for() {
        let asked =
            [(0, 0, 7), (1, 0, 7), (2, 1, 7), (3, 0, 8), (999_999, 0, 7), (1_000_000, 0, 7)];
        let arrival = |(at_us, node, key)| Arrival { at_us, node, key, cost: 1 };
        let asked_seconds = asked_seconds(&asked.map(arrival));
        assert_eq!(asked_seconds, 4);
        let traffic = Traffic { keys_synced: 40, asked_seconds, ..Traffic::default() };
        assert!((traffic.keys_synced_per_tick(0.1) - 1.0).abs() < 1e-9);
        assert!(Traffic::default().keys_synced_per_tick(0.1).abs() < 1e-9);
    }

    #[test]
    fn policies_and_forms_are_read_by_the_names_that_reports_give_them() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
        }
        for form in Form::ALL {
            assert_eq!(form.name().parse(), Ok(form));
            assert_eq!(serde_json::to_value(form).unwrap(), form.name());
        }
        let refused = "lax".parse::<Policy>().unwrap_err();
        assert!(refused.contains("\"lax\"") && refused.contains("write-behind"), "{refused}");
    }

    #[test]
    fn key_that_fills_quickly_has_a_tick_of_its_own() {
        let tick_s = |rate, burst| {
            let limit = Limit::new("api", Quota::per_second(rate).burst(burst));
            let limit = limit.sync_interval(Duration::from_millis(50));
            Setup::new(limit, 1, 1).tick_s().map(|tick_s| (tick_s * 1e6).round())
        };
        assert_eq!(tick_s(1000, 1000), Ok(50_000.0));
        assert_eq!(tick_s(1000, 100), Ok(25_000.0));
        assert!(tick_s(0, 100).is_err());
    }
}
