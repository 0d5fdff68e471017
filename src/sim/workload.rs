//! Requests and their times: open-loop Poisson arrivals, seeded, so that a seed is a bug report.
//!
//! Open-loop: a request comes when it comes, however long the decisions before it took. Each node
//! has a random stream of its own, so that nodes in processes of their own can generate their part
//! without hearing of the others.

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use super::arrival::Arrival;
use super::arrival::seed_of;
use super::cold;
use super::scenario::{AWAKE_SECONDS, JUNK_LOADS, JUNK_PER_SECOND, SUSPENDED_SECONDS};
pub use super::scenario::{JUNK_KNOWN_KEYS, Scenario};

/// The most requests that one run may offer: they are held in memory, before and after deciding.
pub const ARRIVALS_MAX: u64 = 50_000_000;

/// The longest run: a week.
pub const RUN_SECONDS_MAX: f64 = 604_800.0;

const US_PER_SECOND: f64 = 1e6;

/// One herd cycle: a second of load, then three of silence.
const HERD_CYCLE_SECONDS: u64 = 4;
/// From one burst of a node to the next, and from the first request of a burst to the last.
const BURST_EVERY_US: u64 = 100_000;
const BURST_LASTS_US: u64 = 1_000;

/// How often a node dies where keys stay on their nodes.
pub(super) const STICKY_DEATH_SECONDS: u64 = 5;

/// The node that dies in the `round`-th death, from 1, of a run on `nodes` nodes.
pub(super) fn dying_node(seed: u64, round: u64, nodes: u16) -> u16 {
    (seed_of(seed, u64::MAX - round) % u64::from(nodes.max(1))) as u16
}

/// A load that no run can offer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("workload: {field} = {value}: {reason}")]
pub struct WorkloadError {
    /// The field at fault.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong, and what would be right.
    pub reason: &'static str,
}

/// A load to generate. [`validate`](Self::validate) it first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// How much is offered, and on which nodes and keys.
    pub scenario: Scenario,
    /// How many nodes there are.
    pub nodes: u16,
    /// How many keys there are; each request picks one with equal odds.
    pub keys: u32,
    /// The limit's rate, in tokens per second and key.
    pub rate_per_second: f64,
    /// Replaces the scenario's own multiple of the rate.
    pub load: Option<f64>,
    /// How long the load lasts.
    pub seconds: f64,
    /// The same seed gives the same arrivals.
    pub seed: u64,
}

impl Workload {
    /// Refuses what cannot be generated, or would not fit into memory.
    ///
    /// # Errors
    ///
    /// Names the field and its value; the caller can only ask for another one.
    pub fn validate(&self) -> Result<(), WorkloadError> {
        let refuse = |field, value: &dyn ToString, reason| {
            Err(WorkloadError { field, value: value.to_string(), reason })
        };
        if self.nodes == 0 {
            return refuse("nodes", &self.nodes, "at least one node must take requests");
        }
        if self.keys == 0 {
            return refuse("keys", &self.keys, "at least one key must be limited");
        }
        if !is_above_zero(self.rate_per_second) {
            return refuse("rate", &self.rate_per_second, "must be a number above zero");
        }
        if !is_above_zero(self.load_multiple()) {
            return refuse("load", &self.load_multiple(), "must be a number above zero");
        }
        if !is_above_zero(self.seconds) || self.seconds > RUN_SECONDS_MAX {
            return refuse("seconds", &self.seconds, "must be above zero, and 604800 at most");
        }
        // In `f64`, where a product that is far too large is infinite and does not wrap.
        let expected = if self.scenario == Scenario::ColdClients {
            cold::requests(self.seconds)
        } else {
            (self.intensity_per_second() + self.junk_per_second()) * self.seconds
        };
        if expected > ARRIVALS_MAX as f64 {
            let reason = "load × rate × keys × seconds is more than 50000000 requests: lower one";
            return refuse("seconds", &self.seconds, reason);
        }
        Ok(())
    }

    /// How many keys there are in all: more than [`keys`](Self::keys) where new clients come all the time.
    pub fn keys_in_all(&self) -> u32 {
        match self.scenario {
            Scenario::ColdClients => cold::clients(self.seconds),
            _ => self.keys,
        }
    }

    /// What comes to all nodes, ordered by time.
    pub fn arrivals(&self) -> Vec<Arrival> {
        let mut all: Vec<Arrival> =
            (0..self.nodes).flat_map(|node| self.arrivals_of_node(node)).collect();
        // Stable: nodes keep their order within a microsecond, so a seed gives one order only.
        all.sort_by_key(|arrival| arrival.at_us);
        all
    }

    /// What comes to `node`, ordered by time: the same as this node's part of
    /// [`arrivals`](Self::arrivals), whichever process asks.
    pub fn arrivals_of_node(&self, node: u16) -> Vec<Arrival> {
        if self.scenario == Scenario::ColdClients {
            return cold::arrivals_of_node(self.seed, self.seconds, self.nodes, node);
        }
        let mut random = fastrand::Rng::with_seed(seed_of(self.seed, u64::from(node)));
        if self.scenario == Scenario::Bursts {
            return self.bursts_of_node(node, &mut random);
        }
        let mut arrivals = Vec::new();
        let mut keys = Keys::new(self);
        for second in 0..self.seconds.ceil() as u64 {
            keys.begin(second, node);
            self.fill_second(second, node, &mut random, &keys, &mut arrivals);
        }
        arrivals
    }

    /// Bursts of a client that sends by a clock of its own.
    fn bursts_of_node(&self, node: u16, random: &mut fastrand::Rng) -> Vec<Arrival> {
        let per_burst = self.intensity_per_second() / f64::from(self.nodes)
            * (BURST_EVERY_US as f64 / US_PER_SECOND);
        let first_us = random.u64(..BURST_EVERY_US);
        let end_us = (self.seconds * US_PER_SECOND) as u64;
        let bursts = end_us.saturating_sub(first_us + BURST_LASTS_US).div_ceil(BURST_EVERY_US);
        let mut arrivals = Vec::new();
        for burst in 0..bursts {
            // Whole requests, and what is left over in a later burst.
            let up_to = |bursts: u64| (bursts as f64 * per_burst) as u64;
            let requests = up_to(burst + 1) - up_to(burst);
            let begins_us = first_us + burst * BURST_EVERY_US;
            let begun = arrivals.len();
            arrivals.extend((0..requests).map(|_| {
                let at_us = begins_us + random.u64(..BURST_LASTS_US);
                Arrival { at_us, node, key: random.u32(..self.keys.max(1)), cost: 1 }
            }));
            arrivals[begun..].sort_by_key(|arrival| arrival.at_us);
        }
        arrivals
    }

    /// Adds what comes to `node` within `second`. Intensities change only between seconds, and
    /// Poisson arrivals have no memory, so each second may start afresh.
    fn fill_second(
        &self,
        second: u64,
        node: u16,
        random: &mut fastrand::Rng,
        keys: &Keys<'_>,
        into: &mut Vec<Arrival>,
    ) {
        let per_second = self.node_intensity_per_second(second, node) * keys.part();
        let begun = into.len();
        let end_s = (second as f64 + self.part_of_second(node)).min(self.seconds);
        poisson(per_second, second as f64..end_s, random, |at_us, random| {
            into.push(Arrival { at_us, node, key: keys.draw(random), cost: 1 });
        });
        if self.scenario == Scenario::Junk {
            let end_s = (second as f64 + 1.0).min(self.seconds);
            let mut key = junk_key(second, node, self.nodes);
            poisson(JUNK_PER_SECOND, second as f64..end_s, random, |at_us, _| {
                into.push(Arrival { at_us, node, key, cost: 1 });
                key += u32::from(self.nodes);
            });
            into[begun..].sort_by_key(|arrival| arrival.at_us);
        }
    }

    /// What comes to `node` on average within `second` while anything does, in tokens per second.
    fn node_intensity_per_second(&self, second: u64, node: u16) -> f64 {
        let all = self.intensity_per_second();
        let even = all / f64::from(self.nodes);
        let here = match self.scenario {
            Scenario::OverSkew | Scenario::UnderSkew => return all * skew_share(node, self.nodes),
            Scenario::Suspended if node == 0 => {
                let awake = second.is_multiple_of(SUSPENDED_SECONDS);
                let all_at_once = SUSPENDED_SECONDS as f64 / AWAKE_SECONDS;
                return if awake { even * all_at_once } else { 0.0 };
            }
            scenario if scenario.is_shifting() => {
                return if node == self.node_on_shift(second) { all } else { 0.0 };
            }
            scenario if scenario.is_herd() => second.is_multiple_of(HERD_CYCLE_SECONDS),
            _ => true,
        };
        if here { even } else { 0.0 }
    }

    /// The part of a second, from its beginning, in which requests come to `node`.
    fn part_of_second(&self, node: u16) -> f64 {
        if self.scenario == Scenario::Suspended && node == 0 { AWAKE_SECONDS } else { 1.0 }
    }

    /// Invented keys of all nodes.
    fn junk_per_second(&self) -> f64 {
        let nodes = if self.scenario == Scenario::Junk { self.nodes } else { 0 };
        JUNK_PER_SECOND * f64::from(nodes)
    }

    /// The node that takes everything in this second: one after the other, the first by the seed.
    fn node_on_shift(&self, second: u64) -> u16 {
        let nodes = u64::from(self.nodes.max(1));
        ((self.seed % nodes + second % nodes) % nodes) as u16
    }

    /// What the cluster is offered while something is, in tokens per second.
    fn intensity_per_second(&self) -> f64 {
        // The known keys of `junk` are as many as they are, and the load is that of all of them.
        let keys = if self.scenario == Scenario::Junk { 1 } else { self.keys };
        self.load_multiple() * self.rate_per_second * f64::from(keys)
    }

    fn load_multiple(&self) -> f64 {
        self.load.unwrap_or(self.scenario.load())
    }
}

/// Which key a request asks for.
#[derive(Debug)]
enum Keys<'a> {
    /// Each with equal odds.
    Alike(u32),
    /// The known keys of `junk`.
    Known,
    /// By fame: the sums of the odds of the keys up to each.
    Zipf(Vec<f64>),
    /// Each on one node, until that dies.
    Sticky { workload: &'a Workload, homes: Vec<u16>, deaths: u64, here: Vec<u32> },
}

impl<'a> Keys<'a> {
    fn new(workload: &'a Workload) -> Self {
        let keys = workload.keys.max(1);
        match workload.scenario {
            Scenario::HotSet => {
                let mut sum = 0.0;
                let sums = (1..=keys).map(|rank| {
                    sum += 1.0 / f64::from(rank);
                    sum
                });
                Self::Zipf(sums.collect())
            }
            Scenario::Junk => Self::Known,
            Scenario::Sticky => {
                let nodes = u32::from(workload.nodes.max(1));
                let homes = (0..keys).map(|key| (key % nodes) as u16).collect();
                Self::Sticky { workload, homes, deaths: 0, here: Vec::new() }
            }
            _ => Self::Alike(keys),
        }
    }

    /// A new second begins on `node`.
    fn begin(&mut self, second: u64, node: u16) {
        let Self::Sticky { workload, homes, deaths, here } = self else { return };
        while *deaths < second / STICKY_DEATH_SECONDS {
            *deaths += 1;
            let dead = dying_node(workload.seed, *deaths, workload.nodes);
            let others = u64::from(workload.nodes.max(2)) - 1;
            for (key, home) in homes.iter_mut().enumerate().filter(|(_, home)| **home == dead) {
                let step = 1 + seed_of(*deaths, key as u64) % others;
                *home = ((u64::from(dead) + step) % u64::from(workload.nodes.max(1))) as u16;
            }
        }
        let living_here = homes.iter().enumerate().filter(|(_, home)| **home == node);
        *here = living_here.map(|(key, _)| key as u32).collect();
    }

    /// The node's load as a multiple of an even one.
    fn part(&self) -> f64 {
        match self {
            Self::Alike(_) | Self::Known | Self::Zipf(_) => 1.0,
            Self::Sticky { workload, homes, here, .. } => {
                here.len() as f64 * f64::from(workload.nodes) / homes.len() as f64
            }
        }
    }

    fn draw(&self, random: &mut fastrand::Rng) -> u32 {
        match self {
            Self::Alike(keys) => random.u32(0..*keys),
            Self::Known => {
                let first = random.f64() * Scenario::Junk.load() < JUNK_LOADS.0;
                if first { 0 } else { random.u32(1..JUNK_KNOWN_KEYS) }
            }
            Self::Zipf(sums) => {
                let point = random.f64() * sums.last().copied().unwrap_or(0.0);
                sums.partition_point(|sum| *sum < point).min(sums.len() - 1) as u32
            }
            Self::Sticky { here, .. } => here[random.usize(0..here.len().max(1))],
        }
    }
}

/// False for NaN and infinity too.
fn is_above_zero(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// The part of the load on `node` (from 0), where the i-th of `nodes` weighs 1/i.
fn skew_share(node: u16, nodes: u16) -> f64 {
    let weights: f64 = (1..=nodes).map(|i| 1.0 / f64::from(i)).sum();
    1.0 / (f64::from(node) + 1.0) / weights
}

/// Calls `each` with the times of Poisson arrivals within `seconds`, in microseconds.
fn poisson(
    per_second: f64,
    seconds: Range<f64>,
    random: &mut fastrand::Rng,
    mut each: impl FnMut(u64, &mut fastrand::Rng),
) {
    if !is_above_zero(per_second) {
        return;
    }
    let mut at_s = seconds.start + gap_s(per_second, random);
    while at_s < seconds.end {
        each((at_s * US_PER_SECOND) as u64, random);
        at_s += gap_s(per_second, random);
    }
}

/// The first key that `node` invents in `second`: no other node or second has one of the same
/// numbers, unless it has twice as many as are expected.
fn junk_key(second: u64, node: u16, nodes: u16) -> u32 {
    let of_a_second = 2 * JUNK_PER_SECOND as u32 * u32::from(nodes);
    JUNK_KNOWN_KEYS + second as u32 * of_a_second + u32::from(node)
}

/// The time to the next arrival, exponentially distributed. `1 - f64()` is never 0, so that the
/// logarithm is finite.
fn gap_s(per_second: f64, random: &mut fastrand::Rng) -> f64 {
    -(1.0 - random.f64()).ln() / per_second
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(scenario: Scenario) -> Workload {
        Workload {
            scenario,
            nodes: 4,
            keys: 1,
            rate_per_second: 1000.0,
            load: None,
            seconds: 10.0,
            seed: 7,
        }
    }

    /// A Poisson count is within five standard deviations of its mean, but for one in 10^6.
    fn assert_about(count: usize, mean: f64) {
        let off = (count as f64 - mean).abs();
        assert!(off < 5.0 * mean.sqrt(), "{count} where about {mean} was expected");
    }

    fn count_of_node(arrivals: &[Arrival], node: u16) -> usize {
        arrivals.iter().filter(|arrival| arrival.node == node).count()
    }

    #[test]
    fn even_load_is_offered_in_full_and_spread_evenly() {
        for (scenario, load) in [(Scenario::OverUniform, 3.0), (Scenario::Under, 0.9)] {
            let arrivals = workload(scenario).arrivals();
            assert_about(arrivals.len(), load * 10_000.0);
            for node in 0..4 {
                assert_about(count_of_node(&arrivals, node), load * 2_500.0);
            }
        }
    }

    #[test]
    fn skewed_load_falls_as_one_over_the_nodes_number() {
        let arrivals = workload(Scenario::OverSkew).arrivals();
        let weights = 1.0 + 1.0 / 2.0 + 1.0 / 3.0 + 1.0 / 4.0;
        for node in 0..4_u16 {
            let mean = 30_000.0 / f64::from(node + 1) / weights;
            assert_about(count_of_node(&arrivals, node), mean);
        }
    }

    #[test]
    fn herd_runs_for_one_second_in_four() {
        let arrivals = workload(Scenario::Herd).arrivals();
        // Seconds 0, 4 and 8 of ten.
        assert_about(arrivals.len(), 3.0 * 5_000.0);
        assert!(arrivals.iter().all(|arrival| arrival.at_us / 1_000_000 % 4 == 0));
    }

    #[test]
    fn suspended_node_is_asked_only_while_it_is_awake_and_for_all_of_its_part() {
        let arrivals =
            Workload { seconds: 20.0, nodes: 2, ..workload(Scenario::Suspended) }.arrivals();
        for node in 0..2 {
            assert_about(count_of_node(&arrivals, node), 9_000.0);
        }
        let mut first = arrivals.iter().filter(|arrival| arrival.node == 0);
        assert!(first.all(|arrival| arrival.at_us % 10_000_000 < 500_000));
    }

    #[test]
    fn junk_asks_for_each_invented_key_once_beside_the_known_ones() {
        let load = Workload { seconds: 2.0, rate_per_second: 100.0, ..workload(Scenario::Junk) };
        let arrivals = load.arrivals();
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at_us));
        let count = |key| arrivals.iter().filter(|arrival| arrival.key == key).count();
        assert_about(count(0), 100.0);
        assert_about(count(100), 180.0);
        let mut invented: Vec<u32> = arrivals.iter().map(|arrival| arrival.key).collect();
        invented.retain(|key| *key >= JUNK_KNOWN_KEYS);
        assert_about(invented.len(), 80_000.0);
        let all = invented.len();
        invented.sort_unstable();
        invented.dedup();
        assert_eq!(invented.len(), all);
    }

    #[test]
    fn load_given_replaces_the_herds_multiple_and_keeps_its_silence() {
        let arrivals = Workload { load: Some(2.0), ..workload(Scenario::Herd) }.arrivals();
        assert_about(arrivals.len(), 3.0 * 2_000.0);
        assert!(arrivals.iter().all(|arrival| arrival.at_us / 1_000_000 % 4 == 0));
    }

    #[test]
    fn shifting_load_is_on_one_node_at_a_time_and_moves_each_second() {
        let arrivals = workload(Scenario::ShiftUnder).arrivals();
        assert_about(arrivals.len(), 9_000.0);
        let mut node_of_second = [None; 10];
        for arrival in &arrivals {
            let node = node_of_second[(arrival.at_us / 1_000_000) as usize];
            assert!(node.is_none_or(|node| node == arrival.node));
            node_of_second[(arrival.at_us / 1_000_000) as usize] = Some(arrival.node);
        }
        assert!(node_of_second.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_key_gets_the_load_of_one() {
        let arrivals = Workload { keys: 20, ..workload(Scenario::Under) }.arrivals();
        for key in 0..20 {
            let count = arrivals.iter().filter(|arrival| arrival.key == key).count();
            assert_about(count, 9_000.0);
        }
    }

    #[test]
    fn gaps_between_arrivals_vary_as_poissons_do() {
        let arrivals = Workload { nodes: 1, ..workload(Scenario::OverUniform) }.arrivals();
        let gaps_us: Vec<f64> =
            arrivals.windows(2).map(|pair| (pair[1].at_us - pair[0].at_us) as f64).collect();
        let mean = gaps_us.iter().sum::<f64>() / gaps_us.len() as f64;
        let variance =
            gaps_us.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps_us.len() as f64;
        // An exponential distribution's deviation equals its mean; a metronome's would be 0.
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05);
    }

    #[test]
    fn seed_gives_one_run_and_another_seed_another() {
        let load = workload(Scenario::OverSkew);
        assert_eq!(load.arrivals(), load.arrivals());
        assert_ne!(load.arrivals(), Workload { seed: 8, ..load.clone() }.arrivals());
    }

    #[test]
    fn node_on_its_own_generates_its_part_of_the_whole() {
        let load = workload(Scenario::ShiftUnder);
        let all = load.arrivals();
        assert!(all.is_sorted_by_key(|arrival| arrival.at_us));
        for node in 0..4 {
            let mut part = all.clone();
            part.retain(|arrival| arrival.node == node);
            assert_eq!(part, load.arrivals_of_node(node));
        }
    }

    #[test]
    fn nodes_do_not_echo_each_other() {
        let load = workload(Scenario::OverUniform);
        let [first, second] = [0, 1].map(|node| load.arrivals_of_node(node));
        let same = first.iter().zip(&second).filter(|(a, b)| a.at_us == b.at_us).count();
        assert!(same < 20, "{same} arrivals at the same instant in the same place");
    }

    #[test]
    fn run_may_end_within_a_second() {
        let arrivals = Workload { seconds: 1.25, ..workload(Scenario::OverUniform) }.arrivals();
        assert_about(arrivals.len(), 1.25 * 3_000.0);
        assert!(arrivals.iter().all(|arrival| arrival.at_us < 1_250_000));
    }

    #[test]
    fn load_that_cannot_be_offered_is_refused_by_name() {
        let good = workload(Scenario::Under);
        assert_eq!(good.validate(), Ok(()));
        let bad = [
            ("nodes", Workload { nodes: 0, ..good.clone() }),
            ("keys", Workload { keys: 0, ..good.clone() }),
            ("rate", Workload { rate_per_second: f64::NAN, ..good.clone() }),
            ("load", Workload { load: Some(-1.0), ..good.clone() }),
            ("seconds", Workload { seconds: f64::NAN, ..good.clone() }),
            ("seconds", Workload { seconds: 1e12, rate_per_second: 1e-9, ..good.clone() }),
            ("seconds", Workload { keys: u32::MAX, rate_per_second: 1e9, ..good.clone() }),
        ];
        for (field, workload) in bad {
            assert_eq!(workload.validate().map_err(|error| error.field), Err(field));
        }
    }

    #[test]
    fn scenarios_go_by_the_names_of_the_accuracy_page() {
        for scenario in Scenario::ALL {
            assert_eq!(scenario.name().parse(), Ok(scenario));
            let json = serde_json::to_string(&scenario).unwrap();
            assert_eq!(json, format!("{:?}", scenario.name()));
        }
    }
}
