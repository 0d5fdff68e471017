//! The usual way, to compare with: count locally, send the delta every T, believe the total that
//! comes back. A small engine of its own that shares nothing with the product's.
//!
//! Which of the usual ways: the one that reproduces the table of the tests below, which sketches of
//! the protocol gave, and the most careful of those tried. The store's level may fall below zero, so that an
//! excess is repaid; floored at zero, nodes that refill what they believe admit up to 4 times the
//! ideal under overload. A node syncs every key that it has, changed or not; if only changed
//! ones, a node that waits goes on refilling a total that others have long spent (138% of the ideal
//! in the sixth row). What is spent while a sync is in flight stays subtracted from its answer.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::faults::{Fault, Planned};
use super::figures::Decided;
use super::judge::Judge;
use super::outcome::Outcome;
use super::setup::{Form, LATE_MAX_US, Network, Setup, Traffic, asked_seconds};
use super::workload::Arrival;
use crate::algorithm::Rule;
use crate::error::ConfigError;
use crate::limit::{DEFAULT_MAX_NODES, DEFAULT_SYNC_INTERVAL, SyncPolicy};

/// What a node, or the store, has of a key.
#[derive(Clone, Copy, Debug)]
struct Level {
    tokens: f64,
    at_us: u64,
}

/// A key on a node.
#[derive(Clone, Copy, Debug)]
struct View {
    /// The last total received, less what was spent since in so far as that does not include it.
    believed: Level,
    /// Spent, and not sent yet.
    delta: u64,
}

/// Keys with what goes along with each, in the order of keys: a seed gives one run only.
type Batch<T> = Vec<(u32, T)>;

#[derive(Debug)]
enum Step {
    Tick {
        node: usize,
    },
    Request {
        node: usize,
        deltas: Batch<u64>,
    },
    Answer {
        node: usize,
        levels: Batch<f64>,
    },
    /// The node dies with what it has not sent, and a new one takes its place.
    Replacement {
        node: usize,
    },
    Hang {
        until_us: u64,
    },
}

/// The nodes, the store, and what is under way between them.
#[derive(Debug)]
struct WriteBehind {
    rate_per_second: f64,
    burst: f64,
    interval_us: u64,
    network: Network,
    random: fastrand::Rng,
    now_us: u64,
    /// By time, then in the order in which it was planned.
    queue: BTreeMap<(u64, u64), Step>,
    planned: u64,
    /// As many keys a node as the workload has: nothing is forgotten within a run.
    nodes: Vec<BTreeMap<u32, View>>,
    store: HashMap<u32, Level>,
    hung_until_us: u64,
    judge: Judge,
    traffic: Traffic,
}

/// Plays `arrivals`, ordered by time, the usual way. Of `setup` it takes the limit's quota and
/// interval, the nodes, the seed and the network, where it knows of losses and late messages but
/// neither of duplicates nor of timeouts: nothing is sent again, so that a lost request is never
/// charged. A store that hangs charges what was sent meanwhile when it goes on.
///
/// # Errors
///
/// [`ConfigError`] if the limit cannot be kept, if a fault is neither a node that is replaced nor a
/// store that hangs, or if callers should wait: ask for another one.
pub fn run(
    setup: &Setup,
    arrivals: &[Arrival],
    faults: &[Planned],
    seconds: f64,
) -> Result<Outcome, ConfigError> {
    setup.limit.validate_hybrid(DEFAULT_MAX_NODES)?;
    let refuse = |field, value: String, reason| Err(ConfigError::Limiter { field, value, reason });
    if setup.form == Form::Async {
        return refuse("form", "async".to_owned(), "write-behind never waits: choose check");
    }
    let rule = setup.limit.rule();
    if !matches!(rule, Rule::TokenBucket(_)) {
        let reason = "write-behind is played with token buckets only";
        return refuse("algorithm", rule.algorithm().to_owned(), reason);
    }
    let mut cluster = WriteBehind::new(setup);
    for planned @ &Planned { at_us, fault } in faults {
        if let Some(absence) = planned.store_absence() {
            cluster.judge.store_is_absent(absence);
        }
        let happening = match fault {
            Fault::NodeReplaced { place } => Step::Replacement { node: usize::from(place) },
            Fault::StoreHangs { for_us } => Step::Hang { until_us: at_us + for_us },
            other => {
                let reason = "write-behind is played with nodes replaced and stores that hang only";
                return refuse("faults", format!("{other:?}"), reason);
            }
        };
        cluster.plan(at_us, happening);
    }
    for arrival in arrivals {
        cluster.run_until(arrival.at_us);
        cluster.decide(arrival);
    }
    cluster.run_until((seconds * 1e6) as u64);
    cluster.traffic.node_seconds = cluster.nodes.len() as f64 * seconds;
    cluster.traffic.asked_seconds = asked_seconds(arrivals);
    let figures = cluster.judge.figures(seconds);
    Ok(Outcome { figures, traffic: cluster.traffic })
}

impl WriteBehind {
    fn new(setup: &Setup) -> Self {
        let quota = setup.limit.quota();
        let (rate_per_second, burst) = (quota.tokens_per_second(), quota.burst_tokens() as f64);
        // The usual way has nothing but intervals.
        let interval = match setup.limit.sync {
            SyncPolicy::Interval(interval) => interval,
            SyncPolicy::Accuracy { .. } => DEFAULT_SYNC_INTERVAL,
        };
        let mut cluster = Self {
            rate_per_second,
            burst,
            interval_us: micros(interval).max(1),
            network: setup.network,
            random: fastrand::Rng::with_seed(setup.seed ^ 0x0075_7375_616c),
            now_us: 0,
            queue: BTreeMap::new(),
            planned: 0,
            nodes: vec![BTreeMap::new(); usize::from(setup.nodes)],
            store: HashMap::new(),
            hung_until_us: 0,
            judge: Judge::new(rate_per_second, burst).of_known_keys(setup.known_keys),
            traffic: Traffic::default(),
        };
        for node in 0..cluster.nodes.len() {
            let phase_us = cluster.random.u64(0..cluster.interval_us);
            cluster.plan(phase_us, Step::Tick { node });
        }
        cluster
    }

    /// Nothing has been spent yet, as far as a node knows.
    fn full(&self) -> Level {
        Level { tokens: self.burst, at_us: self.now_us }
    }

    fn refilled(&self, level: Level) -> f64 {
        let passed_s = (self.now_us - level.at_us) as f64 / 1e6;
        self.burst.min(level.tokens + self.rate_per_second * passed_s)
    }

    fn decide(&mut self, arrival: &Arrival) {
        let Arrival { at_us, node, key, cost } = *arrival;
        self.now_us = at_us;
        let new = View { believed: self.full(), delta: 0 };
        let View { believed, delta } = *self.nodes[usize::from(node)].entry(key).or_insert(new);
        let tokens = self.refilled(believed);
        let allowed = tokens >= f64::from(cost);
        if allowed {
            let believed = Level { tokens: tokens - f64::from(cost), at_us };
            let view = View { believed, delta: delta + u64::from(cost) };
            self.nodes[usize::from(node)].insert(key, view);
        }
        // Never sure: what a node believes is not set aside for it.
        self.judge.record(&Decided {
            at_us,
            node,
            key,
            cost,
            allowed,
            sure: false,
            waited: false,
            delay_us: 0,
        });
    }

    fn run_until(&mut self, until_us: u64) {
        while let Some(next) = self.queue.first_entry() {
            let (at_us, _) = *next.key();
            if at_us > until_us {
                break;
            }
            let happening = next.remove();
            self.now_us = at_us;
            match happening {
                Step::Tick { node } => self.tick(node),
                Step::Request { node, deltas } if self.now_us < self.hung_until_us => {
                    self.plan(self.hung_until_us, Step::Request { node, deltas });
                }
                Step::Request { node, deltas } => self.charge(node, &deltas),
                Step::Answer { node, levels } => self.believe(node, &levels),
                // An answer to the dead may still come: the total in it is true for the new one too.
                Step::Replacement { node } => self.nodes[node].clear(),
                Step::Hang { until_us } => self.hung_until_us = self.hung_until_us.max(until_us),
            }
        }
    }

    fn tick(&mut self, node: usize) {
        self.plan(self.now_us + self.interval_us, Step::Tick { node });
        let views = self.nodes[node].iter_mut();
        let deltas: Batch<u64> =
            views.map(|(&key, view)| (key, std::mem::take(&mut view.delta))).collect();
        if deltas.is_empty() {
            return;
        }
        self.traffic.store_calls += 1;
        self.traffic.keys_synced += deltas.len() as u64;
        self.send(node, self.network.request_loss, Step::Request { node, deltas });
    }

    fn charge(&mut self, node: usize, deltas: &[(u32, u64)]) {
        let mut levels = Batch::with_capacity(deltas.len());
        for &(key, delta) in deltas {
            let stored = self.store.get(&key).copied().unwrap_or(self.full());
            let tokens = self.refilled(stored) - delta as f64;
            self.store.insert(key, Level { tokens, at_us: self.now_us });
            levels.push((key, tokens));
        }
        self.send(node, self.network.reply_loss, Step::Answer { node, levels });
    }

    fn believe(&mut self, node: usize, levels: &[(u32, f64)]) {
        for &(key, tokens) in levels {
            let Some(&View { believed, delta }) = self.nodes[node].get(&key) else { continue };
            let tokens = tokens - delta as f64;
            let drift = (self.refilled(believed) - tokens).abs();
            self.traffic.drift_pct.push((100.0 * drift / self.burst) as f32);
            let believed = Level { tokens, at_us: self.now_us };
            self.nodes[node].insert(key, View { believed, delta });
        }
    }

    /// Sends a message from a node or to it.
    fn send(&mut self, node: usize, loss: f64, message: Step) {
        if self.happens(loss) {
            return;
        }
        let rtt_us = micros(self.network.rtt_of(node as u16));
        let late_us =
            if self.happens(self.network.late) { self.random.u64(0..LATE_MAX_US) } else { 0 };
        let way_us = rtt_us / 4 + self.random.u64(0..=rtt_us / 2) + late_us;
        self.plan(self.now_us + way_us, message);
    }

    fn happens(&mut self, odds: f64) -> bool {
        odds > 0.0 && self.random.f64() < odds
    }

    fn plan(&mut self, at_us: u64, happening: Step) {
        self.planned += 1;
        self.queue.insert((at_us, self.planned), happening);
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;
    use crate::sim::workload::{Scenario, Workload};

    /// A row of figures from sketches of the protocol: docs/ALGORITHM.md, 'What was tried'.
    struct Row {
        rate: u64,
        burst: u64,
        interval_ms: u64,
        scenario: Scenario,
        excess_pct_of_burst: f64,
        vs_ideal_pct: f64,
    }

    const fn row(quota: (u64, u64), interval_ms: u64, scenario: Scenario, is: (f64, f64)) -> Row {
        let ((rate, burst), (excess_pct_of_burst, vs_ideal_pct)) = (quota, is);
        Row { rate, burst, interval_ms, scenario, excess_pct_of_burst, vs_ideal_pct }
    }

    const TABLE: [Row; 8] = [
        row((10_000, 10_000), 50, Scenario::OverUniform, (11.6, 100.5)),
        row((10_000, 10_000), 50, Scenario::Herd, (22.0, 106.9)),
        row((10_000, 10_000), 200, Scenario::Herd, (89.2, 123.7)),
        row((1000, 100), 50, Scenario::OverUniform, (144.0, 100.4)),
        row((1000, 100), 50, Scenario::Herd, (254.0, 116.8)),
        row((1000, 100), 200, Scenario::Herd, (910.0, 115.0)),
        row((20, 20), 50, Scenario::OverUniform, (33.0, 99.8)),
        row((20, 20), 50, Scenario::Under, (0.0, 100.0)),
    ];

    const SECONDS: f64 = 40.0;
    /// The most requests of a row (a herd's silence counted as load), so that the test is quick; the fewer the requests of a run, the
    /// more chance there is in its worst moment, and the more runs are wanted and can be had.
    const REQUESTS_MAX: f64 = 4e6;
    const SEEDS_MAX: f64 = 41.0;

    fn play_row(row: &Row, nodes: u16, seed: u64) -> Outcome {
        let quota = Quota::per_second(row.rate).burst(row.burst);
        let limit = Limit::new("api", quota).sync_interval(Duration::from_millis(row.interval_ms));
        let workload = Workload {
            scenario: row.scenario,
            nodes,
            keys: 1,
            rate_per_second: row.rate as f64,
            load: None,
            seconds: SECONDS,
            seed,
        };
        run(&Setup::new(limit, nodes, seed), &workload.arrivals(), &[], SECONDS).unwrap()
    }

    fn median(mut values: Vec<f64>) -> f64 {
        values.sort_unstable_by(f64::total_cmp);
        values[values.len() / 2]
    }

    /// What is wrong with a row, if anything is.
    fn failure_of(row: &Row) -> Option<String> {
        let Row { rate, burst, interval_ms, scenario, .. } = row;
        let name = format!("{rate}/s, {burst}, {interval_ms} ms, {}", scenario.name());
        let requests = SECONDS * row.rate as f64 * scenario.load();
        let seeds = (REQUESTS_MAX / requests).min(SEEDS_MAX) as u64;
        let seen: Vec<_> = (1..=seeds).map(|seed| play_row(row, 20, seed).figures).collect();
        let excess = median(seen.iter().map(|one| one.excess_pct_of_burst).collect());
        let vs_ideal = median(seen.iter().map(|one| one.admitted_vs_ideal_pct).collect());
        println!("{name}, {seeds} seeds: {excess:.1} / {vs_ideal:.1}");
        let excess_error = row.excess_pct_of_burst / 10.0;
        let vs_ideal_error = ((row.vs_ideal_pct - 100.0).abs() / 10.0).max(1.0);
        let is_near = (excess - row.excess_pct_of_burst).abs() <= excess_error
            && (vs_ideal - row.vs_ideal_pct).abs() <= vs_ideal_error;
        let (excess_said, said) = (row.excess_pct_of_burst, row.vs_ideal_pct);
        let failure = || format!("{name}: {excess:.1} / {vs_ideal:.1}, not {excess_said} / {said}");
        (!is_near).then(failure)
    }

    #[test]
    fn usual_way_is_as_wrong_as_in_sketches_of_it() {
        let failures: Vec<String> = std::thread::scope(|scope| {
            let rows = TABLE.each_ref().map(|row| scope.spawn(move || failure_of(row)));
            rows.into_iter().filter_map(|row| row.join().unwrap()).collect()
        });
        assert!(failures.is_empty(), "{failures:#?}");
    }

    #[test]
    fn seed_gives_one_run_and_another_seed_another() {
        let row = &TABLE[4];
        assert_eq!(play_row(row, 20, 1), play_row(row, 20, 1));
        assert_ne!(play_row(row, 20, 1), play_row(row, 20, 2));
    }

    #[test]
    fn node_that_is_alone_is_never_wrong_about_its_own_spending() {
        let Outcome { figures, .. } = play_row(&TABLE[0], 1, 1);
        // What reaches the store late it refills late, by a millisecond's tokens at most.
        assert!(figures.excess_tokens <= 10.0, "{}", figures.excess_tokens);
        assert!((figures.admitted_vs_ideal_pct - 100.0).abs() < 0.1);
    }

    #[test]
    fn every_node_syncs_a_key_that_it_knows_once_an_interval() {
        let Outcome { traffic, .. } = play_row(&TABLE[3], 20, 1);
        let per_interval = traffic.keys_synced as f64 / traffic.node_seconds * 0.050;
        assert!((per_interval - 1.0).abs() < 0.01, "{per_interval}");
        assert_eq!(traffic.store_calls, traffic.keys_synced);
    }

    /// Four nodes at three times 100 a second, for 20 seconds, and what was admitted in each tenth
    /// of a second.
    fn play_faults(faults: &[Planned]) -> Result<Vec<u64>, ConfigError> {
        let limit = Limit::new("api", Quota::per_second(100));
        let setup = Setup::new(limit.sync_interval(Duration::from_millis(500)), 4, 1);
        let workload = Workload {
            scenario: Scenario::OverUniform,
            nodes: 4,
            keys: 1,
            rate_per_second: 100.0,
            load: None,
            seconds: 20.0,
            seed: 1,
        };
        let outcome = run(&setup, &workload.arrivals(), faults, 20.0)?;
        Ok(outcome.figures.timeline.iter().map(|slot| slot.admitted).collect())
    }

    #[test]
    fn new_nodes_have_a_burst_of_their_own_until_the_store_has_answered() {
        let second =
            |faults: &[Planned]| play_faults(faults).unwrap()[100..105].iter().sum::<u64>();
        let replaced = |place| Planned { at_us: 10_000_000, fault: Fault::NodeReplaced { place } };
        let (healthy, replaced) = (second(&[]), second(&[0, 1, 2, 3].map(replaced)));
        assert!(replaced > healthy + 15, "{replaced} in half a second, {healthy} without deaths");
    }

    #[test]
    fn while_the_store_hangs_every_node_spends_the_whole_rate() {
        let hang = Planned { at_us: 5_000_000, fault: Fault::StoreHangs { for_us: 3_000_000 } };
        let during: u64 = play_faults(&[hang]).unwrap()[50..80].iter().sum();
        assert!(during > 600, "{during} admitted in 3 s at 100/s");
    }

    #[test]
    fn hang_within_a_hang_does_not_end_it() {
        let hang = |at_us, for_us| Planned { at_us, fault: Fault::StoreHangs { for_us } };
        let one = play_faults(&[hang(5_000_000, 3_000_000)]).unwrap();
        let two = play_faults(&[hang(5_000_000, 3_000_000), hang(6_000_000, 500_000)]).unwrap();
        assert_eq!(one, two);
    }

    #[test]
    fn nodes_that_are_far_from_the_store_and_keys_that_are_invented_are_played_as_such() {
        let workload = Workload {
            scenario: Scenario::OverUniform,
            nodes: 4,
            keys: 2,
            rate_per_second: 100.0,
            load: None,
            seconds: 20.0,
            seed: 1,
        };
        let near = Setup::new(Limit::new("api", Quota::per_second(100)), 4, 1);
        let figures = |setup: &Setup, faults: &[Planned]| {
            run(setup, &workload.arrivals(), faults, 20.0).unwrap().figures
        };
        let of_near = figures(&near, &[]);
        let rtt_by_node = Some([Duration::from_millis(400); 4]);
        let network = Network { rtt_by_node, ..near.network };
        let of_far = figures(&Setup { network, ..near.clone() }, &[]);
        assert!(of_far.excess_tokens > of_near.excess_tokens + 5.0, "{of_far:?}, near {of_near:?}");
        let known = Setup { known_keys: Some(1), ..near.clone() };
        let of_known = figures(&known, &[]);
        assert!(of_known.admitted < of_near.admitted * 6 / 10, "{of_known:?}");
        let hang = Planned { at_us: 5_000_000, fault: Fault::StoreHangs { for_us: 10_000_000 } };
        let of_hang = figures(&near, &[hang]);
        let (reachable, all) =
            (of_hang.admitted_vs_ideal_reachable_pct, of_hang.admitted_vs_ideal_pct);
        assert!(reachable < all - 10.0, "{reachable} of the time without the hang, {all} of all");
    }

    #[test]
    fn setup_that_write_behind_does_not_play_is_refused_by_name() {
        let jump = Fault::StoreClockSteps { by_us: 1 };
        let refused = play_faults(&[Planned { at_us: 0, fault: jump }]);
        let is_refused = matches!(refused, Err(ConfigError::Limiter { field: "faults", .. }));
        assert!(is_refused, "{refused:?}");
        let limit = Limit::new("api", Quota::per_second(10));
        let setup = Setup { form: Form::Async, ..Setup::new(limit, 2, 1) };
        let refused = run(&setup, &[], &[], 1.0);
        assert!(matches!(refused, Err(ConfigError::Limiter { field: "form", .. })), "{refused:?}");
    }
}
