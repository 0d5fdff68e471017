//! Runs made by hand: each takes one term of the bound as far as it goes.
//!
//! `TIDEGATE_SEARCH=700 cargo test --release --features sim --lib runs_made_for_each_term -- --nocapture` takes that many seeds of each
//! in place of those that come nearest.

use std::fmt::Write as _;

use super::*;

/// What part of its term a run comes to at least.
const PART_LEAST: f64 = 0.5;

/// Rate and burst of the limits that each run is made for.
const QUOTAS: [(u64, u64); 4] = [(1000, 1000), (1000, 20), (10, 1000), (1, 100)];

/// A case under construction: one key, no credit, callers that are answered at once, and policy `Closed`.
struct Play {
    case: Case,
    rate: f64,
    burst: u32,
}

impl Play {
    fn new((rate, burst): (u64, u64), nodes: u16, seed: u64) -> Self {
        let quota = Quota::per_second(rate).burst(burst);
        let limit = Limit::new("made", quota).credit(0).outage(OutagePolicy::Closed);
        let setup = Setup { lanes: 1, ..Setup::new(limit, nodes, seed) };
        let case = Case { setup, arrivals: Vec::new(), faults: Vec::new(), until_us: 0 };
        Self { case, rate: rate as f64, burst: burst as u32 }
    }

    fn limit(mut self, change: impl FnOnce(Limit) -> Limit) -> Self {
        self.case.setup.limit = change(self.case.setup.limit.clone());
        self
    }

    /// All callers wait for the store.
    fn waiting(mut self) -> Self {
        self.case.setup.form = Form::Async;
        self
    }

    fn ask(&mut self, at_us: u64, node: u16, cost: u32) {
        self.case.arrivals.push(Arrival { at_us, node, key: 0, cost });
    }

    /// Single tokens, at a rate a second.
    fn load(&mut self, span_us: Range<u64>, node: u16, per_second: f64) {
        let count = (per_second * (span_us.end - span_us.start) as f64 / 1e6) as u64;
        for index in 0..count {
            let at_us = span_us.start + (index as f64 * 1e6 / per_second) as u64;
            self.ask(at_us, node, 1);
        }
    }

    /// So many times single tokens a second that a node takes all there is.
    fn greedy(&self) -> f64 {
        2.0 * self.rate + f64::from(self.burst.min(1000))
    }

    fn fault(&mut self, at_us: u64, fault: Fault) {
        self.case.faults.push(Planned { at_us, fault });
    }

    fn over(mut self, seconds: u64) -> Case {
        self.case.until_us = seconds * 1_000_000;
        self.case.arrivals.sort_by_key(|arrival| arrival.at_us);
        self.case.faults.sort_by_key(|planned| planned.at_us);
        self.case
    }
}

const MS: u64 = 1000;
const SECOND: u64 = 1_000_000;

/// One node empties the bucket; then each of the others is asked for its credit in the same instant.
fn credit(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 16, seed).limit(|limit| limit.credit(1));
    play.load(0..3 * SECOND, 0, play.greedy());
    (1..16).for_each(|node| play.ask(3 * SECOND, node, 1));
    play.over(4)
}

/// The same with nodes that have just joined.
fn join(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 1, seed).limit(|limit| limit.credit(1));
    play.load(0..3 * SECOND, 0, play.greedy());
    for node in 1..16 {
        play.fault(3 * SECOND, Fault::NodeJoins);
        play.ask(3 * SECOND + 1, node, 1);
    }
    play.over(4)
}

/// Default credit. Nineteen nodes join one that was alone, and one of them takes all there is of a key; then each is
/// asked for what first credit it has.
fn join_with_first_credit(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 1, seed);
    play.case.setup.limit = Limit::new("made", Quota::per_second(quota.0).burst(quota.1));
    let joined_us = 5 * SECOND;
    for _ in 1..20 {
        play.fault(joined_us, Fault::NodeJoins);
    }
    play.load(joined_us + 1..joined_us + 100 * MS, 1, 20.0 * play.greedy());
    for node in (0..20).filter(|node| *node != 1) {
        (0..15).for_each(|_| play.ask(joined_us + 100 * MS, node, 1));
    }
    play.over(8)
}

/// One place in which a node spends its credit and dies, again and again.
fn death(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 2, seed).limit(|limit| limit.credit(1));
    play.load(0..3 * SECOND, 0, play.greedy());
    for death in 0..15 {
        let at_us = 3 * SECOND + 10 * death;
        play.ask(at_us, 1, 1);
        play.fault(at_us + 1, Fault::NodeReplaced { place: 1 });
    }
    play.ask(3 * SECOND + 200, 1, 1);
    play.over(4)
}

/// A lease is nearly full, and so is what is left in the store; the clock that decisions read stands still
/// until the lease is spent.
fn stalled(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 1, seed);
    let interval_ms = if quota.0 < 100 { 5000 } else { rng.choice([50, 250]).unwrap_or(50) };
    play = play.limit(|limit| limit.sync_interval(Duration::from_millis(interval_ms)));
    let rtt_ms = rng.choice([1, 100, 400]).unwrap_or(1);
    play.case.setup.network = Network::new(Duration::from_millis(rtt_ms));
    // What is denied makes a demand, and spends nothing.
    let asked = rng.u64(2..60);
    let span = rng.u64(1..20) * MS;
    let large = rng.u32(1..=play.burst);
    (0..asked)
        .for_each(|index| play.ask(index * span / asked, 0, if index == 0 { large } else { 1 }));
    let at_us = rng.u64(1..2 + 3 * rtt_ms) * MS + rng.u64(0..50 * MS);
    let before = (play.rate * 0.021) as u32 + 1 + rng.u32(0..3);
    (0..before).for_each(|_| play.ask(at_us - 1, 0, 1));
    let for_us = if quota.0 < 100 { rng.u64(1000..15_000) } else { rng.u64(30..400) } * MS;
    play.fault(at_us, Fault::ClockStalls { place: 0, for_us });
    let spend_us = at_us + for_us - 100;
    (0..u64::from(play.burst)).for_each(|index| play.ask(spend_us + index / 20, 0, 1));
    play.load(spend_us + 101..spend_us + 2 * SECOND, 0, 2.0 * play.greedy());
    play.over(4 + for_us / SECOND)
}

/// A node that has all leases is under overload when its clock jumps.
fn node_clock(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 1, seed);
    let (load, jump_us) = match quota {
        (1000, 20) => (1000.0 + rng.f64() * 300.0, 2 * MS..16 * MS),
        (1000, _) => (play.greedy(), 5 * MS..300 * MS),
        _ => (play.greedy(), 500 * MS..1500 * MS),
    };
    play.load(0..6 * SECOND, 0, load);
    let by_us = rng.u64(jump_us);
    let at_us = 3 * SECOND + rng.u64(0..SECOND);
    play.fault(at_us, Fault::ClockJumps { place: 0, by_us });
    (0..play.burst).for_each(|_| play.ask(at_us + 10, 0, 1));
    play.over(6)
}

/// The bucket is empty when the store's clock jumps by the time that it takes to fill.
fn store_clock_refill((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 2, seed).waiting();
    play.ask(0, 0, burst as u32);
    play.ask(2 * MS, 0, 1);
    let by_us = (burst * 1_000_000 / rate) as i64;
    let jump_us = rng.u64(4 * MS..40 * MS);
    play.fault(jump_us, Fault::StoreClockSteps { by_us });
    // After a long jump the store waits until all nodes have reported.
    let part = (burst / 20).max(1) as u32;
    for index in 0..150 {
        let later = if index < 60 { index * MS } else { (index - 57) * 20 * MS };
        play.ask(jump_us + 100 + later, 1, part);
        play.ask(jump_us + 600 + later, 0, 1);
    }
    play.over(3)
}

/// The store's clock jumps by the life of a lease; a node that is cut off goes on with one.
fn store_clock_unheard(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed);
    let greedy = play.greedy();
    play.load(0..6 * SECOND, 0, greedy);
    let jump_us = 2 * SECOND + rng.u64(0..SECOND);
    play.fault(jump_us, Fault::NodeCutOff { place: 0, for_us: 8 * SECOND });
    play.fault(jump_us, Fault::StoreClockSteps { by_us: 1_400_000 });
    play.load(jump_us + 100..6 * SECOND, 1, greedy);
    play.over(8)
}

/// The store loses its memory when no node knows a key any more that was emptied a few seconds before.
fn loss_of_slow_key(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 2, seed).waiting();
    play.ask(0, 0, play.burst);
    play.fault(7 * SECOND, Fault::StoreForgets);
    play.ask(10 * SECOND, 1, play.burst);
    play.over(11)
}

/// All nodes spend their credit at once, and forget the key. The store loses its memory, all nodes report that
/// by another key, and they spend their credit again when they believe that the first is repaid.
fn loss_of_debt(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let nodes = 64;
    let mut play = Play::new(quota, nodes, seed).limit(|limit| limit.credit(15));
    let spent_us = 2 * SECOND;
    play.load(0..spent_us, 0, play.greedy());
    // One node has never seen the key.
    (0..nodes).filter(|node| *node != 1).for_each(|node| play.ask(spent_us, node, 15));
    let lost_us = spent_us + rng.u64(330 * MS..430 * MS);
    play.fault(lost_us, Fault::StoreForgets);
    for node in 0..nodes {
        play.case.arrivals.push(Arrival { at_us: lost_us + 100, node, key: 1, cost: 1 });
    }
    let again_us = spent_us + rng.u64(700 * MS..1100 * MS);
    play.load(lost_us + 5 * MS..again_us + SECOND, 1, play.greedy());
    for index in 0..20 {
        (0..nodes).for_each(|node| play.ask(again_us + 20 * MS * index, node, 15));
    }
    play.over(5)
}

/// A node joins and takes all before any other counts it; it is cut off when the store loses its memory.
fn loss_unheard(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed).waiting();
    let join_us = 2 * SECOND + rng.u64(0..2 * SECOND);
    play.ask(0, 0, 1);
    play.fault(join_us, Fault::NodeJoins);
    let greedy = play.greedy();
    play.ask(join_us + 10 * MS, 2, play.burst);
    play.load(join_us + 10 * MS..join_us + 5 * SECOND, 2, greedy);
    let lost_us = join_us + rng.u64(30 * MS..200 * MS);
    play.fault(lost_us, Fault::NodeCutOff { place: 2, for_us: 10 * SECOND });
    play.fault(lost_us, Fault::StoreForgets);
    (0..200).for_each(|index| play.ask(lost_us + 10 * MS * index, 0, play.burst));
    play.load(lost_us..lost_us + 5 * SECOND, 0, greedy);
    play.over(10)
}

/// A state comes back in which the bucket was full, and serves a node that knows of no later one.
fn old_state(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed).waiting();
    let saved_us = 2 * SECOND + rng.u64(0..2 * SECOND);
    play.fault(saved_us, Fault::StoreSaves);
    let greedy = play.greedy();
    play.ask(saved_us + MS, 0, play.burst);
    play.load(saved_us + MS..saved_us + 6 * SECOND, 0, greedy);
    let lost_us = saved_us + rng.u64(30 * MS..200 * MS);
    play.fault(lost_us, Fault::NodeCutOff { place: 0, for_us: 10 * SECOND });
    play.fault(lost_us, Fault::StoreRestores);
    play.ask(lost_us + MS, 1, play.burst);
    play.load(lost_us + MS..lost_us + 5 * SECOND, 1, greedy);
    play.over(10)
}

/// The record of an emptied key is lost, and a node asks that has never seen the key.
fn lost_record(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 2, seed).waiting();
    play.ask(0, 0, play.burst);
    play.fault(2 * MS, Fault::RecordLost { key: 0 });
    play.ask(2 * MS + 100, 1, play.burst);
    play.over(2)
}

/// The same, and a node that is cut off goes on with a lease of the whole rate.
fn lost_record_unheard(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed).waiting();
    play.ask(0, 0, play.burst);
    let greedy = play.greedy();
    play.load(0..8 * SECOND, 0, greedy);
    let lost_us = 2 * SECOND + rng.u64(0..SECOND);
    play.fault(lost_us, Fault::NodeCutOff { place: 0, for_us: 10 * SECOND });
    play.fault(lost_us, Fault::RecordLost { key: 0 });
    play.ask(lost_us + 100, 1, play.burst);
    play.load(lost_us + 100..8 * SECOND, 1, greedy);
    play.over(10)
}

/// A node that knows a full bucket is cut off; another empties it and takes all that flows in.
fn cut_off_share(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 2, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::Share));
    let cut_us = 3 * SECOND;
    play.ask(0, 1, 1);
    play.fault(cut_us, Fault::NodeCutOff { place: 1, for_us: 20 * SECOND });
    play.ask(cut_us, 0, play.burst);
    let greedy = 2.0 * play.rate;
    play.load(cut_us..cut_us + 20 * SECOND, 0, greedy);
    let alone_us = cut_us + 4 * SECOND;
    (0..10).for_each(|_| play.ask(alone_us, 1, (play.burst / 20).max(1)));
    play.load(cut_us..cut_us + 20 * SECOND, 1, greedy);
    play.over(25)
}

/// A node that has leased the whole rate is cut off; another leases it anew.
fn cut_off_last_rate((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut play = Play::new((rate, burst), 2, seed);
    play = play.limit(|limit| limit.outage(OutagePolicy::LastRate));
    let for_us = (4 * burst / rate).max(20) * SECOND;
    let cut_us = 3 * SECOND;
    play.fault(cut_us, Fault::NodeCutOff { place: 1, for_us });
    play.load(0..cut_us, 1, play.greedy());
    play.load(cut_us..cut_us + for_us, 1, 1.2 * play.rate);
    play.load(cut_us + 100..cut_us + for_us, 0, 1.2 * play.rate);
    play.over(for_us / SECOND + 5)
}

/// All nodes but one know a full bucket, which that one empties before the store falls silent. Where there
/// are more nodes than tokens, each has one all the same.
fn outage_share(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let crowd = quota.1 < 100;
    let nodes = if crowd { 100 } else { 8 };
    let mut play = Play::new(quota, nodes, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::Share));
    (1..nodes).for_each(|node| play.ask(10 * MS * u64::from(node), node, 1));
    let hang_us = 4 * SECOND + rng.u64(0..SECOND);
    let part = (play.burst / 20).max(1);
    (0..20).for_each(|_| play.ask(hang_us - 500 * MS, 0, part));
    play.load(hang_us - 499 * MS..hang_us + 2 * SECOND, 0, play.greedy());
    play.fault(hang_us, Fault::StoreHangs { for_us: 6 * SECOND });
    if crowd {
        (0..nodes).for_each(|node| play.ask(hang_us + 4 * SECOND, node, 1));
        return play.over(12);
    }
    let eighth = (play.burst / 64).max(1);
    for index in 0..100 {
        let at_us = hang_us + 1500 * MS + 10 * MS * index;
        (1..nodes).for_each(|node| (0..8).for_each(|_| play.ask(at_us, node, eighth)));
    }
    play.over(12)
}

/// A node that is alone has the whole rate when the store is gone, and 16 start beside it meanwhile.
fn started_in_outage((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 1, seed);
    play = play.limit(|limit| limit.outage(OutagePolicy::Share));
    let gone_us = 4 * SECOND;
    let for_us = (4 * burst / rate + rng.u64(8..12)) * SECOND;
    play.fault(gone_us, Fault::StoreGone { for_us });
    (0..16).for_each(|_| play.fault(gone_us + 100 * MS, Fault::NodeJoins));
    play.load(0..gone_us, 0, play.greedy());
    play.load(gone_us..gone_us + for_us, 0, 1.2 * play.rate);
    (1..17).for_each(|node| play.load(gone_us + SECOND..gone_us + for_us, node, play.rate / 4.0));
    play.over((gone_us + for_us) / SECOND + 4)
}

/// One node has leased the whole rate when the store falls silent, and goes on; when the store is back
/// it is the last to report.
fn outage_last_rate(quota: (u64, u64), seed: u64) -> Case {
    if quota == (1000, 20) { outage_apart(quota, seed) } else { outage_of_a_burst(quota, seed) }
}

/// Most of it is the burst, which the others find when they come back a little earlier.
fn outage_of_a_burst((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 4, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::LastRate));
    let (far, seconds) = (rng.u64(1..60), burst / rate + 4);
    let [near, far] = [1, far].map(Duration::from_millis);
    play.case.setup.network.rtt_by_node = Some([far, near, near, near]);
    let back_us = (3 + seconds) * SECOND;
    play.ask(0, 0, play.burst);
    play.load(0..back_us + 3 * SECOND, 0, (2.0 * play.rate).max(20.0));
    let silent_us = 3 * SECOND + rng.u64(0..SECOND);
    play.fault(silent_us, Fault::StoreHangs { for_us: back_us - silent_us });
    // The others are asked for nothing before the outage, and for much when the store is back.
    for index in 0..1800 {
        let at_us = back_us - 600 * MS + 2 * MS * index;
        (1..4).for_each(|node| play.ask(at_us, node, (play.burst / 20).max(1)));
    }
    play.over(7 + back_us / SECOND)
}

/// Most of it is refill: after a long outage nodes ask once a second whether the store is back, and new nodes more
/// often.
fn outage_apart((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 4, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::LastRate));
    let back_us = 35 * SECOND;
    play.load(0..back_us + 3 * SECOND, 0, play.greedy());
    let silent_us = 3 * SECOND + rng.u64(0..SECOND);
    play.fault(silent_us, Fault::StoreGone { for_us: back_us - silent_us });
    for place in 1..4 {
        play.fault(back_us - 100 * MS, Fault::NodeReplaced { place });
        play.load(back_us..back_us + 3 * SECOND, place, rate as f64 / 2.0);
    }
    play.over(5 + back_us / SECOND)
}

/// A node that was frozen while it had leased the whole rate wakes up when the store is gone.
fn frozen_before_outage(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed);
    play = play.limit(|limit| limit.outage(OutagePolicy::LastRate));
    play.load(0..2 * SECOND, 1, play.greedy());
    // The answer to the last batch is lost.
    let pause_us = 2 * SECOND + rng.u64(0..100 * MS);
    play.fault(pause_us - 30 * MS, Fault::StoreHangs { for_us: 60 * MS });
    play.fault(pause_us, Fault::NodePauses { place: 1, for_us: 6 * SECOND });
    play.load(2 * SECOND..8 * SECOND, 0, play.greedy());
    play.fault(pause_us + 6 * SECOND - 100, Fault::StoreHangs { for_us: 20 * SECOND });
    play.load(8 * SECOND..27 * SECOND, 0, 2.0 * play.rate);
    play.load(8 * SECOND..27 * SECOND, 1, 2.0 * play.rate);
    play.over(30)
}

/// After a loss of memory a far node is the only one that knows that the bucket is empty.
fn credit_while_lost(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 2, seed).limit(|limit| limit.credit(1));
    let [near, far] = [1, rng.u64(300..1000)].map(Duration::from_millis);
    play.case.setup.network.rtt_by_node = Some([near, far, near, far]);
    play.case.setup.network.timeout = Duration::from_secs(2);
    let lost_us = 6 * SECOND;
    play.ask(SECOND, 0, 1);
    play.load(2 * SECOND..lost_us + 5 * SECOND, 1, play.greedy());
    play.fault(lost_us, Fault::StoreForgets);
    play.load(lost_us..lost_us + 5 * SECOND, 0, 100.0);
    play.over(12)
}

/// What a loss of memory brings back though all nodes report: a slow key that no node knows any more, or credit.
fn loss_heard(quota: (u64, u64), seed: u64) -> Case {
    match quota {
        (1000, _) => loss_of_debt(quota, seed),
        _ => loss_of_slow_key(quota, seed),
    }
}

/// What a jump of the store's clock brings: refill, or where the bucket is small leases that go on.
fn store_clock(quota: (u64, u64), seed: u64) -> Case {
    if quota == (1000, 20) {
        store_clock_unheard(quota, seed)
    } else {
        store_clock_refill(quota, seed)
    }
}

/// One term of the bound.
struct Term {
    name: &'static str,
    make: fn((u64, u64), u64) -> Case,
    /// The seeds that come nearest, of each quota.
    seeds: [u64; 4],
}

const fn term(name: &'static str, make: fn((u64, u64), u64) -> Case, seeds: [u64; 4]) -> Term {
    Term { name, make, seeds }
}

const TERMS: [Term; 16] = [
    term("credit", credit, [259, 254, 692, 699]),
    term("a node joins", join, [82, 492, 696, 699]),
    term("a node dies", death, [104, 678, 697, 699]),
    term("loss of memory, all heard", loss_heard, [4, 80, 307, 566]),
    term("loss of memory, a node not heard", loss_unheard, [459, 527, 619, 253]),
    term("an older state, a node not heard", old_state, [539, 373, 51, 619]),
    term("a record lost", lost_record, [103, 73, 103, 103]),
    term("a record lost, a node not heard", lost_record_unheard, [332, 556, 657, 357]),
    term("the store's clock ahead", store_clock, [377, 142, 469, 288]),
    term("a node's clock ahead", node_clock, [177, 210, 355, 115]),
    term("a node's clock stands still", stalled, [7, 642, 642, 642]),
    term("a node cut off alone, `Share`", cut_off_share, [672, 293, 515, 279]),
    term("a node cut off alone, `LastRate`", cut_off_last_rate, [696, 683, 695, 699]),
    term("a node starts unanswered, `Share`", started_in_outage, [361, 693, 693, 694]),
    term("no node reaches the store, `Share`", outage_share, [520, 699, 221, 617]),
    term("no node reaches the store, `LastRate`", outage_last_rate, [37, 543, 552, 541]),
];

/// The run that comes nearest to its bound: excess, bound and seed.
fn nearest(term: &Term, quota: (u64, u64), seeds: Range<u64>) -> (f64, f64, u64) {
    let runs = seeds.map(|seed| {
        let CaseVerdict { excess, bound, .. } = (term.make)(quota, seed).run();
        assert!(
            excess <= bound + ERROR,
            "{} at {quota:?}: seed {seed}: {excess} of {bound}",
            term.name
        );
        (excess, bound, seed)
    });
    let part = |(excess, bound, _): &(f64, f64, u64)| excess / bound;
    runs.max_by(|one, other| part(one).total_cmp(&part(other))).unwrap_or_default()
}

/// The most that a class can come to, where docs/ACCURACY.md shows that it is less than the bound: outside of a flood of new keys, nodes
/// know for longer what they spent on credit than it takes to be repaid.
fn reachable(term: &Term, quota: (u64, u64), bound: f64) -> f64 {
    let is_repaid = (term.name, quota) == ("loss of memory, all heard", (1000, 1000));
    if is_repaid { bound / 2.0 } else { bound }
}

#[test]
fn runs_made_for_each_term_keep_the_bound_and_come_to_half_of_it() {
    let given = (seeds() != (0..CASES)).then(seeds);
    println!("| class | 1000/s, 1000 | 1000/s, 20 | 10/s, 1000 | 1/s, 100 |");
    println!("|---|---|---|---|---|");
    let mut short = Vec::new();
    for term in &TERMS {
        let mut row = format!("| {} |", term.name);
        let mut best = Vec::new();
        for (quota, literal) in QUOTAS.into_iter().zip(term.seeds) {
            let seeds = given.clone().unwrap_or(literal..literal + 1);
            let (excess, bound, seed) = nearest(term, quota, seeds);
            let digits = usize::from(bound < 100.0);
            let _ = write!(row, " {excess:.digits$} of {bound:.digits$} |");
            best.push(seed);
            if excess < PART_LEAST * reachable(term, quota, bound) {
                short.push((term.name, quota, excess, bound));
            }
        }
        println!("{row} seeds {best:?}");
    }
    assert!(short.is_empty(), "less than half: {short:?}");
}

/// Runs that once broke the bound.
fn assert_kept(make: fn((u64, u64), u64) -> Case) {
    for quota in QUOTAS {
        for seed in 0..8 {
            let CaseVerdict { excess, bound, .. } = make(quota, seed).run();
            assert!(excess <= bound + ERROR, "{quota:?}, seed {seed}: {excess} of {bound}");
        }
    }
}

#[test]
fn while_the_store_withholds_after_a_loss_credit_is_not_spent_again_and_again() {
    assert_kept(credit_while_lost);
}

#[test]
fn node_that_was_frozen_before_an_outage_does_not_go_on_with_a_lease_of_then() {
    assert_kept(frozen_before_outage);
}

#[test]
fn nodes_that_join_are_in_the_reported_bound() {
    for quota in [(60, 60), (1000, 1000), (10, 1000)] {
        let most =
            most_within_reported_bound((0..8).map(|seed| join_with_first_credit(quota, seed)));
        // All 15 of the first node, and a token at least of each other.
        assert!(most > 33.0, "{quota:?}: {most}");
    }
}

/// The largest excess of these runs. Each keeps to its bound, and to the one that a node reported.
fn most_within_reported_bound(runs: impl Iterator<Item = Case>) -> f64 {
    let excess = |case: Case| {
        let CaseVerdict { excess, bound, reported, .. } = case.run();
        let reported = reported.bound_tokens.unwrap_or(0.0);
        assert!(
            excess <= reported.min(bound),
            "{excess} of {reported} reported, {bound}: {:?}",
            case.setup
        );
        excess
    };
    runs.map(excess).fold(0.0, f64::max)
}

#[test]
fn excess_of_a_node_that_starts_in_an_outage_keeps_to_the_bound_that_it_tells() {
    for quota in [(1000, 1000), (1000, 20), (10, 1000)] {
        let mut case = started_in_outage(quota, 16);
        let mut joins = 0;
        case.faults.retain(|planned| {
            joins += u32::from(planned.fault == Fault::NodeJoins);
            planned.fault != Fault::NodeJoins || joins == 1
        });
        case.ask_only_nodes_that_have_joined();
        assert!(most_within_reported_bound([case].into_iter()) > 0.0, "{quota:?}");
    }
}

/// A node joins just before the store is gone, so that the one that was there does not know that it shares.
fn joined_before_outage((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 1, seed);
    play = play.limit(|limit| limit.outage(OutagePolicy::Share));
    let gone_us = 4 * SECOND;
    let for_us = (8 * burst / rate + 24) * SECOND;
    play.fault(gone_us - rng.u64(50..300) * MS, Fault::NodeJoins);
    play.fault(gone_us, Fault::StoreGone { for_us });
    play.load(0..2 * SECOND, 0, play.greedy());
    for node in 0..2 {
        let from_us = gone_us - 40 * MS * u64::from(node);
        play.load(from_us..gone_us + for_us, node, 2.0 * play.rate);
    }
    play.over((gone_us + for_us) / SECOND + 4)
}

#[test]
fn excess_of_a_node_that_joins_just_before_an_outage_keeps_to_the_bound_that_it_tells() {
    for quota in [(1000, 1000), (1000, 20), (10, 1000)] {
        let most = most_within_reported_bound((0..8).map(|seed| joined_before_outage(quota, seed)));
        // It takes a sixteenth, and the other one everything.
        let share = (8 * quota.1 + 24 * quota.0) as f64 / 16.0;
        assert!(most > share / 4.0, "{quota:?}: {most} of {share}");
    }
}
