//! The search for counter-examples to the bound: random limits, clusters, networks, loads and
//! faults. What breaks the bound is made as small as it can be and printed with its seed.
//!
//! `TIDEGATE_SEARCH=10000 cargo test --release --features sim --lib search -- --nocapture` searches
//! for longer, with `10000..20000` other seeds. `tests/broken_rules` breaks one rule of the protocol after the other,
//! and sees that the search finds it.

use std::ops::Range;
use std::time::Duration;

use super::faults::{Fault, Planned, excess_bound};
use super::setup::{Form, Network, Setup};
use super::workload::Arrival;
use super::world::World;
use crate::algorithm::Rule;
use crate::bound::Excess;
use crate::limit::{DEFAULT_MAX_NODES, Limit, OutagePolicy, SyncPolicy};
use crate::quota::Quota;

mod classes;
mod constructed;
mod groups;
mod limits;
mod overlap;
mod seldom;
mod slots;
mod windows;

/// Cases of the short form.
const CASES: u64 = 60;
/// Floating-point error of the judge, in tokens.
const ERROR: f64 = 1e-3;

/// One random case.
#[derive(Clone, Debug)]
struct Case {
    setup: Setup,
    arrivals: Vec<Arrival>,
    faults: Vec<Planned>,
    until_us: u64,
}

/// What a case came to.
#[derive(Clone, Debug)]
struct CaseVerdict {
    /// Of the limit that came nearest to its bound, or went furthest beyond it.
    excess: f64,
    bound: f64,
    /// The most that the ideal admitted on a key.
    ideal: u64,
    vs_ideal_pct: f64,
    /// Faults that hit no node with a lease.
    idle_faults: u32,
    /// The deepest debt and the highest bound that a node reported.
    reported: Excess,
    /// No lease ended without a report: those count as spent, and make debts of what was not spent.
    all_heard: bool,
    discrepancy: Option<String>,
}

impl CaseVerdict {
    fn is_broken(&self) -> bool {
        let bound = self.reported.bound_tokens.unwrap_or(f64::INFINITY);
        self.excess > self.bound + ERROR
            || self.all_heard && self.reported.observed_tokens > bound.max(self.bound) + ERROR
            || self.discrepancy.is_some()
    }
}

/// A number between `least` and `most`, each order of magnitude alike.
fn scaled(rng: &mut fastrand::Rng, least: f64, most: f64) -> f64 {
    (least.ln() + rng.f64() * (most / least).ln()).exp()
}

fn random_limit(rng: &mut fastrand::Rng, name: &str) -> Limit {
    loop {
        let rate = scaled(rng, 0.001, 1e6);
        let burst = scaled(rng, 1.0, 1e6) as u64;
        let quota = if rate >= 1.0 {
            Quota::per_second(rate as u64)
        } else {
            Quota::new(1, Duration::from_secs_f64(1.0 / rate))
        };
        let interval = Duration::from_secs_f64(scaled(rng, 0.005, 5.0));
        let outage = rng.choice([OutagePolicy::Closed, OutagePolicy::Share]);
        let limit = Limit::new(name, quota.burst(burst))
            .sync_interval(interval)
            .credit(rng.u32(0..=8))
            .outage(outage.unwrap_or_default());
        if limit.validate().is_ok() {
            return limit;
        }
    }
}

impl Case {
    fn random(seed: u64, faulty: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut limit = random_limit(&mut rng, "search");
        let terms = limit.validate().unwrap();
        let nodes = scaled(&mut rng, 1.0, 64.9) as u16;
        let mut network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0001, 1.0)));
        if faulty {
            let share = |rng: &mut fastrand::Rng| rng.choice([0.0, 0.02, 0.1]).unwrap_or(0.0);
            network.request_loss = share(&mut rng);
            network.reply_loss = share(&mut rng);
            network.duplicated = share(&mut rng);
            network.late = share(&mut rng) / 2.0;
            if network != Network::new(network.rtt) {
                // Many messages lost in a row cut a node off: what it then lives on is counted
                // where cutting off is what was planned.
                limit = limit.outage(OutagePolicy::Closed);
            }
        }
        let mut setup = Setup { network, audit: true, lanes: 2, ..Setup::new(limit, nodes, seed) };
        setup.clock_error_ppm = rng.choice([0, 100, 400]).unwrap_or(0);
        // Fifty ticks, and the leases' ends among them.
        let until_us = (50 * terms.tick_us).max(8_000_000);
        let arrivals = random_arrivals(&mut rng, &setup, until_us);
        let faults = if faulty { random_faults(&mut rng, nodes, until_us) } else { Vec::new() };
        Self { setup, arrivals, faults, until_us }
    }

    fn run(&self) -> CaseVerdict {
        // The bound counts every planned fault, so each must happen before the end.
        assert!(self.faults.iter().all(|planned| planned.at_us < self.until_us), "all happen");
        let mut world = World::new(self.setup.clone()).unwrap();
        for planned in &self.faults {
            world.plan_fault(planned);
        }
        world.play(&self.arrivals, self.until_us);
        // A caller that waits while nothing goes wrong has an answer in time, and never needs the credit.
        let in_time = 4 * self.setup.network.rtt < self.setup.limit.max_wait;
        let sure = self.setup.form == Form::Async && self.faults.is_empty() && in_time;
        let judges = [&world.judge].into_iter().chain(&world.other_judges);
        let seen = self.setup.limits_of(1).zip(judges).map(|(limit, judge)| {
            let setup = Setup { limit: limit.clone(), ..self.setup.clone() };
            let bound = if sure { 0.0 } else { excess_bound(&self.faults, &setup) };
            let excess = judge.clone().figures(1.0).excess_tokens;
            (excess, bound + slots::uncounted_tokens(&setup, &self.arrivals))
        });
        let beyond = |(excess, bound): &(f64, f64)| excess - bound;
        let (excess, bound) = seen
            .max_by(|one, other| beyond(one).total_cmp(&beyond(other)))
            .expect("there is a first limit");
        let reported = world.excess();
        CaseVerdict {
            excess,
            bound,
            ideal: world.judge.most_ideal(),
            idle_faults: world.ledger.idle_faults,
            reported,
            all_heard: self.faults.is_empty() && self.setup.network.is_clean(),
            discrepancy: world.ledger.discrepancy.take(),
            vs_ideal_pct: world.judge.figures(1.0).admitted_vs_ideal_pct,
        }
    }

    /// The smallest case found that still breaks the bound.
    fn shrunk(mut self) -> Self {
        loop {
            let Some(smaller) = self.smaller().into_iter().find(|case| case.run().is_broken())
            else {
                return self;
            };
            self = smaller;
        }
    }

    /// Leaves out what comes to the places of nodes that have not joined by then.
    fn ask_only_nodes_that_have_joined(&mut self) {
        let joins = self.faults.iter().filter(|planned| planned.fault == Fault::NodeJoins);
        let joined_us: Vec<u64> = joins.map(|planned| planned.at_us).collect();
        let nodes = self.setup.nodes;
        let joined_us = |place: u16| joined_us.get(usize::from(place - nodes));
        self.arrivals.retain(|&Arrival { at_us, node, .. }| {
            node < nodes || joined_us(node).is_some_and(|joined_us| at_us > *joined_us)
        });
    }

    fn smaller(&self) -> Vec<Self> {
        let mut cases = Vec::new();
        for index in 0..self.faults.len() {
            let mut case = self.clone();
            case.faults.remove(index);
            case.ask_only_nodes_that_have_joined();
            cases.push(case);
        }
        let clean =
            Network { timeout: self.setup.network.timeout, ..Network::new(self.setup.network.rtt) };
        if clean != self.setup.network {
            let mut case = self.clone();
            case.setup.network = clean;
            cases.push(case);
        }
        let half = self.arrivals.len() / 2;
        if half > 0 {
            let (first, last) = self.arrivals.split_at(half);
            for part in [first.to_vec(), last.to_vec()] {
                cases.push(Self { arrivals: part, ..self.clone() });
            }
            let mut thin = self.clone();
            thin.arrivals = self.arrivals.iter().copied().step_by(2).collect();
            cases.push(thin);
        }
        cases
    }
}

/// Up to ten thousand requests, whose costs make the load a multiple of the rate.
fn random_arrivals(rng: &mut fastrand::Rng, setup: &Setup, until_us: u64) -> Vec<Arrival> {
    let quota = setup.limit.quota();
    let keys = scaled(rng, 1.0, 50.9) as u32;
    let count = rng.usize(200..10_000);
    let wanted = quota.tokens_per_second() * until_us as f64 / 1e6 + quota.burst_tokens() as f64;
    let load = scaled(rng, 0.5, 10.0) * f64::from(keys);
    let mean = (load * wanted / count as f64).max(1.0);
    let herd = rng.bool();
    let skew = rng.bool();
    let mut arrivals: Vec<Arrival> = (0..count)
        .map(|_| {
            let mut at_us = rng.u64(0..until_us);
            if herd {
                // Everything in the first fifth of each stretch.
                let stretch = (until_us / 4).max(1);
                at_us = at_us / stretch * stretch + at_us % stretch / 5;
            }
            let places = if skew { rng.u16(1..=setup.nodes) } else { setup.nodes };
            let node = rng.u16(0..places);
            let most = (2.0 * mean).min(quota.burst_tokens() as f64).min(1e7) as u32;
            Arrival { at_us, node, key: rng.u32(0..keys), cost: rng.u32(1..=most.max(1)) }
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_us);
    arrivals
}

fn random_faults(rng: &mut fastrand::Rng, nodes: u16, until_us: u64) -> Vec<Planned> {
    let fault = |rng: &mut fastrand::Rng| {
        let place = rng.u16(0..nodes);
        let for_us = scaled(rng, 10_000.0, 5e6) as u64;
        match rng.u8(0..9) {
            0 => Fault::NodeReplaced { place },
            1 => Fault::NodeDies { place },
            2 => Fault::NodePauses { place, for_us },
            3 | 4 => Fault::NodeCutOff { place, for_us },
            5 => Fault::StoreHangs { for_us },
            6 => Fault::StoreForgets,
            7 => Fault::ClockStalls { place, for_us: rng.u64(1..20_000) },
            _ => Fault::StoreClockSteps { by_us: for_us as i64 },
        }
    };
    let count = rng.usize(0..6);
    (0..count).map(|_| Planned { at_us: rng.u64(0..until_us), fault: fault(rng) }).collect()
}

/// What goes wrong more rarely: nodes join, clocks jump or stand still for long, replicas lag.
fn rare_fault(rng: &mut fastrand::Rng, nodes: u16) -> Fault {
    let place = rng.u16(0..nodes);
    let for_us = scaled(rng, 10_000.0, 5e6) as u64;
    match rng.u8(0..7) {
        0 | 1 => Fault::NodeJoins,
        2 => Fault::ClockJumps { place, by_us: for_us },
        3 => Fault::ClockStalls { place, for_us },
        4 => Fault::StoreLags { by_us: for_us / 5 },
        5 => Fault::NodeReplaced { place },
        _ => Fault::NodeCutOff { place, for_us },
    }
}

/// A case of rarer faults, under any outage policy with a bound.
fn rare(seed: u64) -> Case {
    let mut case = Case::random(seed, false);
    let mut rng = fastrand::Rng::with_seed(!seed);
    let policies = [OutagePolicy::Closed, OutagePolicy::Share, OutagePolicy::LastRate];
    let outage = rng.choice(policies).unwrap_or_default();
    case.setup.limit = case.setup.limit.outage(outage);
    let nodes = case.setup.nodes;
    let mut places = nodes;
    for _ in 0..rng.usize(1..6) {
        let planned =
            Planned { at_us: rng.u64(0..case.until_us), fault: rare_fault(&mut rng, nodes) };
        case.faults.push(planned);
    }
    case.faults.sort_by_key(|planned| planned.at_us);
    for planned in case.faults.clone() {
        if planned.fault == Fault::NodeJoins {
            let later = case.arrivals.iter_mut().filter(|arrival| arrival.at_us > planned.at_us);
            later.filter(|_| rng.bool()).for_each(|arrival| arrival.node = places);
            places += 1;
        }
    }
    case
}

/// A number of seeds from 0 on, or some others.
fn seeds() -> Range<u64> {
    seeds_or(CASES)
}

/// The same; without a variable `count` of them.
fn seeds_or(count: u64) -> Range<u64> {
    let Ok(text) = std::env::var("TIDEGATE_SEARCH") else { return 0..count };
    let (first, end) = text.split_once("..").unwrap_or(("0", &text));
    match (first.parse(), end.parse()) {
        (Ok(first), Ok(end)) if first < end => first..end,
        _ => panic!("TIDEGATE_SEARCH = '{text}': must be like 10000, or like 10000..20000"),
    }
}

/// Searches `seeds`; returns the first case that breaks the bound, and how near the others came.
fn search(seeds: Range<u64>, make: impl Fn(u64) -> Case) -> (Option<(u64, Case)>, f64) {
    let mut nearest = 0.0_f64;
    for seed in seeds {
        let case = make(seed);
        let verdict = case.run();
        if verdict.is_broken() {
            return (Some((seed, case)), nearest);
        }
        if verdict.bound > 0.0 {
            nearest = nearest.max(verdict.excess / verdict.bound);
        }
    }
    (None, nearest)
}

fn assert_holds(name: &str, make: impl Fn(u64) -> Case) {
    let seeds = seeds();
    let (broken, nearest) = search(seeds.clone(), make);
    if let Some((seed, case)) = broken {
        let small = case.shrunk();
        let verdict = small.run();
        let count = small.arrivals.len();
        let shown = &small.arrivals[..count.min(20)];
        panic!(
            "{name}: seed {seed} breaks the bound: {verdict:?}\n{:?}\nfaults {:?}\n{count} arrivals, the first {shown:?}",
            small.setup, small.faults
        );
    }
    println!("{name}: seeds {seeds:?}, largest observed / bound {nearest:.3}");
}

#[test]
fn bound_holds_whatever_goes_wrong() {
    assert_holds("faults", |seed| Case::random(seed, true));
}

#[test]
fn excess_without_faults_is_at_most_the_credit_of_all_nodes() {
    assert_holds("no faults", |seed| Case::random(seed, false));
}

/// A case of a limit that sets no credit, without faults.
fn default_credit(seed: u64) -> Case {
    let mut case = Case::random(seed, false);
    case.setup.limit.credit = None;
    // More nodes than are assumed give more than their part before they are counted.
    let nodes = case.setup.nodes.min(DEFAULT_MAX_NODES as u16);
    case.setup.nodes = nodes;
    case.arrivals.retain(|arrival| arrival.node < nodes);
    case
}

#[test]
fn first_credit_of_all_nodes_is_the_most_that_limits_with_default_credit_exceed() {
    assert_holds("default credit", default_credit);
}

#[test]
fn first_credit_comes_back_once_where_memory_is_lost_again_and_again() {
    assert_holds("default credit, losses", |seed| {
        let mut case = default_credit(seed);
        let mut rng = fastrand::Rng::with_seed(!seed);
        let mut at_us = rng.u64(2_500_000..5_000_000);
        for _ in 0..rng.usize(2..8) {
            case.faults.push(Planned { at_us, fault: Fault::StoreForgets });
            at_us += scaled(&mut rng, 0.05e6, 7e6) as u64;
        }
        case.faults.retain(|planned| planned.at_us < case.until_us);
        case
    });
}

#[test]
fn strict_limits_admit_nothing_in_excess() {
    assert_holds("strict", |seed| {
        let mut case = Case::random(seed, false);
        case.setup.limit = case.setup.limit.credit(0);
        case
    });
}

#[test]
fn waiting_callers_exceed_nothing() {
    assert_holds("async", |seed| {
        let mut case = Case::random(seed, false);
        case.setup.form = Form::Async;
        case
    });
}

#[test]
fn bound_holds_when_nodes_join_clocks_jump_or_stand_still_and_replicas_lag() {
    assert_holds("rare faults", rare);
}

/// A seed, whether faults are drawn, what is changed, and what was wrong.
type Broken<'a> = (u64, bool, &'a dyn Fn(&mut Case), &'static str);

#[test]
fn cases_that_once_broke_the_bound_keep_it() {
    let strict = |case: &mut Case| case.setup.limit = case.setup.limit.clone().credit(0);
    let waiting = |case: &mut Case| case.setup.form = Form::Async;
    let plain = |_: &mut Case| ();
    let cases: [Broken<'_>; 9] = [
        (17, false, &strict, "what a lease had lost came back as if it had been held"),
        (33, false, &waiting, "two nodes held a token each of a burst of one"),
        (499, false, &strict, "a lease was full by the clock, and not by the cached clock"),
        (163, false, &plain, "a node spent on credit and ahead of its refill"),
        (3, false, &strict, "what was lent without rate and depth ended unnoticed"),
        (3, false, &waiting, "a lease that was given back too late was still reckoned with"),
        (480, false, &plain, "tokens that were out counted as debt"),
        (2210, true, &plain, "refill that was leased counted as repaying a debt"),
        (242, true, &plain, "tokens that were out counted as debt, with faults"),
    ];
    for (seed, faulty, change, what) in cases {
        let mut case = Case::random(seed, faulty);
        change(&mut case);
        let verdict = case.run();
        assert!(!verdict.is_broken(), "{what}: seed {seed}: {verdict:?}");
    }
}

/// Until all nodes know how many they are, in microseconds.
const COUNTED_US: u64 = 2_500_000;

/// A case whose limit is synced by accuracy, with a ceiling or without; its nodes know each other
/// before the load begins.
fn by_accuracy(seed: u64, faulty: bool) -> Case {
    let mut case = Case::random(seed, faulty);
    let mut rng = fastrand::Rng::with_seed(seed);
    let limit = &case.setup.limit;
    let key_syncs_per_second_max = rng.bool().then(|| scaled(&mut rng, 1.0, 1000.0));
    let excess = scaled(&mut rng, 0.0005, 0.9999);
    let policy = SyncPolicy::Accuracy { excess, key_syncs_per_second_max };
    case.setup.limit = limit.clone().sync(policy).credit(8);
    case.until_us += COUNTED_US;
    case.arrivals.iter_mut().for_each(|arrival| arrival.at_us += COUNTED_US);
    case.faults.iter_mut().for_each(|planned| planned.at_us += COUNTED_US);
    case
}

#[test]
fn limit_by_accuracy_exceeds_no_more_than_was_asked_for() {
    assert_holds("accuracy", |seed| by_accuracy(seed, false));
}

#[test]
fn bound_of_a_limit_by_accuracy_holds_whatever_goes_wrong() {
    assert_holds("accuracy, faults", |seed| by_accuracy(seed, true));
}

/// A case in which nothing goes wrong but one `fault`, and nothing excuses what is admitted then.
fn with_one_fault(seed: u64, fault: impl Fn(&Case) -> Fault) -> Case {
    let mut case = Case::random(seed, true);
    let fault = fault(&case);
    case.setup.network = Network::new(case.setup.network.rtt);
    case.setup.limit = case.setup.limit.credit(0).outage(OutagePolicy::Closed);
    case.faults = vec![Planned { at_us: case.until_us / 2, fault }];
    case
}

#[test]
fn bound_holds_where_one_node_is_cut_off() {
    assert_holds("one node cut off", |seed| {
        with_one_fault(seed, |case| Fault::NodeCutOff { place: 0, for_us: case.until_us })
    });
}

#[test]
fn bound_holds_where_the_store_loses_its_memory_once() {
    assert_holds("one loss of memory", |seed| with_one_fault(seed, |_| Fault::StoreForgets));
}
