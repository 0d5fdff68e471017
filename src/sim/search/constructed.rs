//! Runs made by hand: each takes one term of the bound as far as it goes.
//!
//! `TIDEGATE_SEARCH=60 cargo test --release --lib constructed_runs -- --nocapture`

use super::*;

/// Rate and burst of the limits that each run is made for.
const QUOTAS: [(u64, u64); 4] = [(1000, 1000), (1000, 20), (10, 1000), (1, 100)];

/// A case under construction: one key, no credit, callers who are answered at once, and policy `Closed`.
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

    /// Single tokens, so many a second.
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

/// A lease is full, and so is what is left in the store; the clock that decisions read stands still until
/// the lease is spent.
fn stalled((rate, burst): (u64, u64), seed: u64, for_us: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new((rate, burst), 1, seed);
    let asked = rng.u64(2..60);
    let span = rng.u64(1..20) * MS;
    (0..asked).for_each(|index| play.ask(index * span / asked, 0, 1));
    let at_us = rng.u64(1..40) * MS;
    let spend_us = at_us + for_us - 100;
    play.fault(at_us, Fault::ClockStalls { place: 0, for_us });
    play.load(spend_us..spend_us + 3 * SECOND, 0, 20.0 * play.greedy().max(100.0));
    play.over(4)
}

fn stall(quota: (u64, u64), seed: u64) -> Case {
    stalled(quota, seed, 20 * MS)
}

fn long_stall(quota: (u64, u64), seed: u64) -> Case {
    stalled(quota, seed, 60 * MS)
}

/// A node that has all leases is under overload when its clock jumps.
fn node_clock(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut play = Play::new(quota, 1, seed);
    play.load(0..6 * SECOND, 0, play.greedy());
    let most_us = if quota.0 > 100 { 5 * MS..300 * MS } else { 500 * MS..1500 * MS };
    let by_us = rng.u64(most_us);
    play.fault(3 * SECOND + rng.u64(0..SECOND), Fault::ClockJumps { place: 0, by_us });
    play.over(6)
}

/// The bucket is empty when the store's clock jumps by the time that it takes to fill.
fn store_clock((rate, burst): (u64, u64), seed: u64) -> Case {
    let mut play = Play::new((rate, burst), 2, seed).waiting();
    play.ask(0, 0, burst as u32);
    play.ask(2 * MS, 0, 1);
    let by_us = (burst * 1_000_000 / rate) as i64;
    play.fault(4 * MS, Fault::StoreClockSteps { by_us });
    // After a long jump the store waits until it has heard of all nodes.
    let part = (burst / 20).max(1) as u32;
    for index in 0..100 {
        let at_us = 4 * MS + 100 + if index < 20 { 0 } else { index * 20 * MS };
        play.ask(at_us, 1, part);
    }
    play.over(3)
}

/// The store loses its memory when nobody knows a key any more that has just been emptied.
fn loss_of_slow_key(quota: (u64, u64), seed: u64) -> Case {
    let mut play = Play::new(quota, 2, seed).waiting();
    play.ask(0, 0, play.burst);
    play.fault(2 * SECOND, Fault::StoreForgets);
    play.ask(5 * SECOND, 1, play.burst);
    play.over(6)
}

/// A far node knows that the bucket is empty, and the others do not: they spend their credit before it is
/// heard, and again after that.
fn loss_of_debt(quota: (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let nodes = 64;
    let credit = quota.1.min(15) as u32;
    let mut play = Play::new(quota, nodes, seed).limit(|limit| limit.credit(credit));
    let [near, far] = [1, 20].map(Duration::from_millis);
    play.case.setup.network.rtt_by_node = Some([far, near, near, near]);
    let others = || (1..nodes).filter(|node| node % 4 > 0);
    others().for_each(|node| play.ask(0, node, 1));
    let lost_us = 5 * SECOND;
    play.load(2 * SECOND..lost_us - 5 * MS, 0, play.greedy());
    play.fault(lost_us, Fault::StoreForgets);
    others().for_each(|node| play.ask(lost_us + 100, node, credit));
    let again_us = lost_us + rng.u64(50 * MS..500 * MS);
    play.load(again_us..again_us + SECOND, 0, 10.0 * play.greedy());
    for index in 0..20 {
        let at_us = again_us + rng.u64(0..5) * MS * index;
        (0..nodes).for_each(|node| play.ask(at_us, node, credit));
    }
    play.over(8)
}

/// A node joins and takes all before any other hears of it; it is cut off when the store loses its memory.
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

/// A state comes back in which the bucket was full, and serves a node that knows of none later.
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

/// The record of an emptied key is lost, and a node asks that has never heard of the key.
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
    let nodes = if quota.1 < 100 { 100 } else { 8 };
    let mut play = Play::new(quota, nodes, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::Share));
    (1..nodes).for_each(|node| play.ask(10 * MS * u64::from(node), node, 1));
    let hang_us = 4 * SECOND + rng.u64(0..SECOND);
    play.ask(hang_us - 500 * MS, 0, play.burst);
    play.load(hang_us - 500 * MS..hang_us + 2 * SECOND, 0, play.greedy());
    play.fault(hang_us, Fault::StoreHangs { for_us: 6 * SECOND });
    let share = (play.burst / u32::from(nodes)).max(1);
    for index in 0..50 {
        let at_us = hang_us + 1500 * MS + 20 * MS * index;
        (1..nodes).for_each(|node| play.ask(at_us, node, share));
    }
    play.over(12)
}

/// One node has leased the whole rate when the store falls silent, and goes on; when the store is back
/// it is the last to report.
fn outage_last_rate((rate, burst): (u64, u64), seed: u64) -> Case {
    let nodes = 4;
    let mut play = Play::new((rate, burst), nodes, seed).waiting();
    play = play.limit(|limit| limit.outage(OutagePolicy::LastRate));
    let [near, far] = [1, 500].map(Duration::from_millis);
    play.case.setup.network.rtt_by_node = Some([far, near, near, near]);
    let for_us = (burst / rate + 4) * SECOND;
    play.ask(0, 0, play.burst);
    play.load(0..6 * SECOND + for_us, 0, 2.0 * play.rate);
    play.fault(3 * SECOND, Fault::StoreHangs { for_us });
    for index in 0..400 {
        let at_us = 3 * SECOND + for_us + 5 * MS * index;
        (1..nodes).for_each(|node| play.ask(at_us, node, (play.burst / 20).max(1)));
    }
    play.over(10 + for_us / SECOND)
}

/// A node that was frozen while it had leased the whole rate wakes up when the store is gone.
fn paused_last_rate(quota: (u64, u64), seed: u64) -> Case {
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

type Made = (&'static str, fn((u64, u64), u64) -> Case);

const MADE: [Made; 18] = [
    ("credit", credit),
    ("join", join),
    ("death", death),
    ("stall of the cached clock", stall),
    ("long stall", long_stall),
    ("node clock ahead", node_clock),
    ("store clock ahead", store_clock),
    ("loss, nobody knows the key", loss_of_slow_key),
    ("loss, debt forgotten", loss_of_debt),
    ("loss, a node not heard", loss_unheard),
    ("old state", old_state),
    ("lost record", lost_record),
    ("lost record, a node not heard", lost_record_unheard),
    ("cut off, Share", cut_off_share),
    ("cut off, LastRate", cut_off_last_rate),
    ("outage, Share", outage_share),
    ("outage, LastRate", outage_last_rate),
    ("outage, LastRate, a node frozen before", paused_last_rate),
];

#[test]
fn constructed_runs_come_near_their_terms() {
    let few = if seeds() == (0..CASES) { 0..4 } else { seeds() };
    let only = std::env::var("TIDEGATE_MADE").unwrap_or_default();
    for (name, make) in MADE
        .into_iter()
        .chain([("credit while lost", credit_while_lost as fn((u64, u64), u64) -> Case)])
    {
        if !name.contains(&only) {
            continue;
        }
        for quota in QUOTAS {
            let mut worst = (0.0, 0.0, 0.0, 0);
            for seed in few.clone() {
                let Verdict { excess, bound, .. } = make(quota, seed).run();
                if excess / bound > worst.0 || seed == few.start {
                    worst = (excess / bound, excess, bound, seed);
                }
            }
            let (ratio, excess, bound, seed) = worst;
            println!("| {name} | {quota:?} | {excess:.3} of {bound:.3} | {ratio:.2} | {seed} |");
        }
    }
}
