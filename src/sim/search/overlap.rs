//! Faults that overlap: two or three within the life of one lease, again and again.
//!
//! `TIDEGATE_SEARCH=20000 cargo test --release --features sim --lib overlap -- --nocapture` runs that many seeds.

use super::*;

/// Half of the runs of the short form count at least.
const COUNTED_PART: f64 = 0.5;
/// Overlapping faults begin when all nodes have leases, in microseconds.
const LEASED_US: u64 = 4_000_000;

/// Buckets are still nearly full before this, in microseconds.
const EARLY_US: u64 = 400_000;

/// One fault that begins at `at_us`; `life_us` is that of a lease.
fn fault_at(rng: &mut fastrand::Rng, at_us: u64, life_us: u64, case: &Case) -> Vec<Planned> {
    let place = rng.u16(0..case.setup.nodes);
    let for_us = (scaled(rng, 0.02, 1.5) * life_us as f64) as u64;
    let fault = match rng.u8(0..11) {
        0 => Fault::NodeCutOff { place, for_us },
        1 => Fault::StoreForgets,
        2 => Fault::StoreLags { by_us: for_us },
        3 => {
            // A state comes back that is a little older, or one of nearly full buckets.
            let recent_us = at_us.saturating_sub(for_us);
            let saved_us = if at_us.is_multiple_of(2) { at_us % EARLY_US } else { recent_us };
            let saved = Planned { at_us: saved_us, fault: Fault::StoreSaves };
            return vec![saved, Planned { at_us, fault: Fault::StoreRestores }];
        }
        4 => Fault::StoreHangs { for_us },
        5 => Fault::StoreClockSteps { by_us: for_us as i64 },
        6 => {
            let by_us = if rng.bool() { for_us as i64 } else { 60_000_000 };
            Fault::StoreClockSteps { by_us: -by_us }
        }
        7 => Fault::ClockJumps { place, by_us: for_us },
        8 => Fault::NodeReplaced { place },
        9 => Fault::RecordLost { key: rng.u32(0..keys_of(case)) },
        _ => Fault::NodePauses { place, for_us },
    };
    vec![Planned { at_us, fault }]
}

fn keys_of(case: &Case) -> u32 {
    case.arrivals.iter().map(|arrival| arrival.key + 1).max().unwrap_or(1)
}

/// A case of overlapping faults: keys under overload, so that every node leases each of them.
fn overlap(seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = scaled(&mut rng, 20.0, 20_000.0);
    let burst = (rate * scaled(&mut rng, 0.02, 2.0)).max(5.0) as u64;
    let policies = [OutagePolicy::Closed, OutagePolicy::Share];
    let limit = Limit::new("overlap", Quota::per_second(rate as u64).burst(burst))
        .sync_interval(Duration::from_secs_f64(scaled(&mut rng, 0.01, 0.2)))
        .credit(rng.u32(0..=2))
        .outage(rng.choice(policies).unwrap_or_default());
    // The epoch in which the store registers the lease, and the one after it.
    let life_us = limit.validate().map_or(1_000_000, |terms| 2 * terms.epoch_us);
    let nodes = rng.u16(2..=8);
    let network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0002, 0.01)));
    let setup = Setup { network, audit: true, lanes: 2, ..Setup::new(limit, nodes, seed) };
    let rounds = rng.u64(1..=2);
    let until_us = LEASED_US + rounds * 4 * life_us;
    let mut case = Case { setup, arrivals: Vec::new(), faults: Vec::new(), until_us };
    case.arrivals = loaded(&mut rng, &case, 2.0..5.0);
    for round in 0..rounds {
        let begins_us = LEASED_US + round * 4 * life_us + rng.u64(0..life_us);
        for _ in 0..rng.usize(2..=3) {
            let at_us = begins_us + rng.u64(0..life_us);
            case.faults.extend(fault_at(&mut rng, at_us, life_us, &case));
        }
    }
    case.faults.sort_by_key(|planned| planned.at_us);
    case
}

/// Some thousand requests for up to three keys, whose costs make a multiple of the rate.
fn loaded(rng: &mut fastrand::Rng, case: &Case, load: Range<f64>) -> Vec<Arrival> {
    let Case { setup, until_us, .. } = case;
    let quota = setup.limit.quota();
    let keys = rng.u32(1..=3);
    let count = rng.usize(2000..6000);
    let wanted =
        scaled(rng, load.start, load.end) * quota.tokens_per_second() * *until_us as f64 / 1e6;
    let all = f64::from(keys) * (wanted + quota.burst_tokens() as f64);
    let most = (2.0 * all / count as f64).clamp(1.0, quota.burst_tokens() as f64) as u32;
    let mut arrivals: Vec<Arrival> = (0..count)
        .map(|_| Arrival {
            at_us: rng.u64(0..*until_us),
            node: rng.u16(0..setup.nodes),
            key: rng.u32(0..keys),
            cost: rng.u32(1..=most),
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_us);
    arrivals
}

/// What many runs came to.
#[derive(Debug, Default)]
struct Survey {
    runs: usize,
    /// Every fault hit a leased key, and the bound was below what the ideal admitted.
    counted: usize,
    /// Of those, the seeds that broke the bound, and those whose ledger was wrong.
    broken: Vec<u64>,
    inexact: Vec<u64>,
    /// The largest observed / bound.
    nearest: f64,
}

fn counts(verdict: &CaseVerdict) -> bool {
    verdict.idle_faults == 0 && verdict.bound < verdict.ideal as f64
}

fn survey(seeds: Range<u64>) -> Survey {
    let mut survey = Survey::default();
    for seed in seeds {
        let verdict = overlap(seed).run();
        survey.runs += 1;
        if !counts(&verdict) {
            continue;
        }
        survey.counted += 1;
        if verdict.excess > verdict.bound + ERROR {
            survey.broken.push(seed);
        }
        if verdict.discrepancy.is_some() {
            survey.inexact.push(seed);
        }
        if verdict.bound > 0.0 {
            survey.nearest = survey.nearest.max(verdict.excess / verdict.bound);
        }
    }
    survey
}

#[test]
fn overlapping_faults_keep_the_bound_and_the_ledger_exact() {
    let seeds = seeds();
    let survey = survey(seeds.clone());
    let Survey { runs, counted, broken, inexact, nearest } = &survey;
    println!("overlap: seeds {seeds:?}: {counted} of {runs} runs count, nearest {nearest:.3}");
    println!("overlap: {} broke the bound: {broken:?}", broken.len());
    assert!(broken.is_empty(), "the bound was broken by {broken:?}");
    assert!(inexact.is_empty(), "the ledger was wrong in {inexact:?}");
    assert!(*counted as f64 >= COUNTED_PART * *runs as f64, "{counted} of {runs} runs count");
}

/// Seeds that broke the first version of the bound.
const BROKEN: [u64; 6] = [136, 664, 1079, 1714, 2097, 2706];

#[test]
fn overlaps_that_once_broke_the_bound_do_not_break_it_again() {
    let mut broken = Vec::new();
    for seed in BROKEN {
        let case = overlap(seed);
        let CaseVerdict { excess, bound, discrepancy, .. } = case.run();
        if excess > bound + ERROR || discrepancy.is_some() {
            broken.push(seed);
            println!("seed {seed}: {excess:.1} of {bound:.1}, {discrepancy:?}: {:?}", case.faults);
            println!("{:?}", case.setup.limit);
        }
    }
    assert!(broken.is_empty(), "{broken:?} break the bound");
}

/// The store hangs, and its clock steps back meanwhile, so that the lane's time stands still while leases go on.
fn store_clock_back_while_hung(seed: u64) -> Case {
    let mut case = overlap(seed);
    let life_us = case.setup.limit.validate().map_or(1_000_000, |terms| 2 * terms.epoch_us);
    case.setup.limit = case.setup.limit.clone().credit(0);
    let for_us = life_us / 5 * 2;
    let back = Fault::StoreClockSteps { by_us: -2 * life_us as i64 };
    case.faults = vec![
        Planned { at_us: LEASED_US, fault: Fault::StoreHangs { for_us } },
        Planned { at_us: LEASED_US + for_us / 2, fault: back },
    ];
    case
}

#[test]
fn refill_of_leases_while_store_time_stands_still_is_given_up() {
    let cases = [(32631, overlap(32631))].into_iter();
    let made = [330, 1396].map(|seed| (seed, store_clock_back_while_hung(seed)));
    for (seed, case) in cases.chain(made) {
        let verdict = case.run();
        assert!(!verdict.is_broken(), "seed {seed}: {verdict:?}");
    }
}

/// A strict limit whose burst is smaller than what is under way, and whose memory is lost once or twice.
fn small_burst_lost(seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = rng.u64(100..1000);
    let quota = Quota::per_second(rate).burst(rng.u64(1..=10));
    let limit = Limit::new("small", quota).credit(0);
    let network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0005, 0.1)));
    let setup = Setup { network, audit: true, ..Setup::new(limit, rng.u16(2..=12), seed) };
    let mut case = Case { setup, arrivals: Vec::new(), faults: Vec::new(), until_us: 6_000_000 };
    // Single tokens of one key: twice the rate.
    for index in 0..2 * rate * case.until_us / 1_000_000 {
        let at_us = index * 500_000 / rate;
        case.arrivals.push(Arrival { at_us, node: rng.u16(0..case.setup.nodes), key: 0, cost: 1 });
    }
    let mut at_us = rng.u64(1_000_000..3_000_000);
    for _ in 0..rng.usize(1..=2) {
        case.faults.push(Planned { at_us, fault: Fault::StoreForgets });
        at_us += rng.u64(0..1_500_000);
    }
    case
}

#[test]
fn losses_of_memory_exceed_nothing_where_the_burst_is_small() {
    assert_holds("small bursts, losses", small_burst_lost);
}

/// An outage on top of overlapping faults, with each policy that has a bound: nodes come back apart.
fn outage_among_others(seed: u64) -> Case {
    let mut case = overlap(seed);
    let mut rng = fastrand::Rng::with_seed(!seed);
    let policies = [OutagePolicy::Closed, OutagePolicy::Share, OutagePolicy::LastRate];
    let outage = rng.choice(policies).unwrap_or_default();
    case.setup.limit = case.setup.limit.clone().outage(outage);
    let for_us = scaled(&mut rng, 1e6, 20e6) as u64;
    let at_us = LEASED_US + rng.u64(0..2_000_000);
    case.faults.push(Planned { at_us, fault: Fault::StoreGone { for_us } });
    case.faults.sort_by_key(|planned| planned.at_us);
    case.until_us = case.until_us.max(at_us + for_us) + 5_000_000;
    case.arrivals = loaded(&mut rng, &case, 2.0..5.0);
    case
}

#[test]
fn outages_among_other_faults_keep_the_bound() {
    assert_holds("outages", outage_among_others);
}

/// Nodes of a strict limit with a small burst start just before and while the store is away, which is often too short
/// for an outage.
fn started_while_the_store_is_away(seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = scaled(&mut rng, 50.0, 5000.0) as u64;
    let quota = Quota::per_second(rate).burst(rng.u64(1..=20));
    let limit = Limit::new("small", quota).credit(0).outage(OutagePolicy::Share);
    let network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0005, 0.1)));
    let nodes = rng.u16(2..=6);
    let setup = Setup { network, audit: true, ..Setup::new(limit, nodes, seed) };
    // The second outage begins after 8.3 s at the latest.
    let until_us = 9_000_000;
    let mut case = Case { setup, arrivals: Vec::new(), faults: Vec::new(), until_us };
    // Sometimes it is away from the beginning.
    let early = rng.u8(0..4) == 0;
    let begins_us = if early { rng.u64(0..300_000) } else { rng.u64(3_000_000..5_000_000) };
    let at_us = begins_us.max(150_000);
    let for_us = rng.u64(100_000..3_000_000);
    let away = if rng.bool() { Fault::StoreHangs { for_us } } else { Fault::StoreGone { for_us } };
    case.faults.push(Planned { at_us: begins_us, fault: away });
    if rng.u8(0..4) == 0 {
        // It comes back for a moment.
        let again = Fault::StoreGone { for_us: rng.u64(500_000..2_500_000) };
        let at_us = begins_us + for_us + rng.u64(0..300_000);
        case.faults.push(Planned { at_us, fault: again });
    }
    if rng.u8(0..4) == 0 {
        // It comes back without its memory.
        let at_us = begins_us + rng.u64(0..for_us);
        case.faults.push(Planned { at_us, fault: Fault::StoreForgets });
    }
    let mut places = nodes;
    for _ in 0..rng.usize(1..=4) {
        let at_us = at_us - 150_000 + rng.u64(0..for_us + 150_000);
        let joins = rng.bool();
        places += u16::from(joins);
        let replaced = Fault::NodeReplaced { place: rng.u16(0..nodes) };
        case.faults.push(Planned { at_us, fault: if joins { Fault::NodeJoins } else { replaced } });
    }
    case.faults.sort_by_key(|planned| planned.at_us);
    // Single tokens of one key: at most four times the rate.
    for index in 0..4 * rate.min(1000) * until_us / 1_000_000 {
        let at_us = index * 250_000 / rate.min(1000);
        case.arrivals.push(Arrival { at_us, node: rng.u16(0..places), key: 0, cost: 1 });
    }
    case.ask_only_nodes_that_have_joined();
    case
}

#[test]
fn nodes_that_start_while_the_store_is_away_keep_the_bound() {
    assert_holds("started", started_while_the_store_is_away);
}

/// Two nodes start in the last second of an outage of three, and call the store before these come back.
fn started_at_the_end_of_an_outage(seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let limit = Limit::new("small", Quota::per_second(1206).burst(15)).credit(0);
    let network = Network::new(Duration::from_micros(1500));
    let setup = Setup { network, audit: true, ..Setup::new(limit, 3, seed) };
    let gone = Planned { at_us: 4_850_343, fault: Fault::StoreGone { for_us: 2_967_576 } };
    let joins = |at_us| Planned { at_us, fault: Fault::NodeJoins };
    let faults = vec![gone, joins(6_842_811), joins(6_920_505)];
    let mut case = Case { setup, arrivals: Vec::new(), faults, until_us: 8_000_000 };
    for at_us in (0..case.until_us).step_by(250) {
        case.arrivals.push(Arrival { at_us, node: rng.u16(0..5), key: 0, cost: 1 });
    }
    case.ask_only_nodes_that_have_joined();
    case
}

#[test]
fn nodes_that_start_at_the_end_of_an_outage_exceed_what_is_lent_and_keep_the_bound() {
    let mut most: f64 = 0.0;
    for seed in 0..20 {
        let verdict = started_at_the_end_of_an_outage(seed).run();
        assert!(!verdict.is_broken(), "seed {seed}: {verdict:?}");
        most = most.max(verdict.excess);
    }
    assert!(most > 15.0, "{most}, no more than is lent");
}

/// The store forgets while some nodes are paused. Bursts hit a bucket that has refilled, so that the views of nodes
/// claim too much.
fn bursts_around_a_loss(seed: u64) -> Case {
    let mut case = overlap(seed);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.limit = case.setup.limit.clone().credit(0);
    let quota = case.setup.limit.quota();
    let fill_us = quota.burst_tokens() as f64 / quota.tokens_per_second() * 1e6;
    let most = (quota.burst_tokens() / 3) as u32;
    let nodes = case.setup.nodes;
    case.arrivals.clear();
    let mut at_us = LEASED_US / 2;
    while at_us < case.until_us {
        at_us += (fill_us * scaled(&mut rng, 0.2, 2.0)) as u64 + 1;
        for _ in 0..rng.u32(1..8) {
            let (at_us, node) = (at_us + rng.u64(0..80_000), rng.u16(0..nodes));
            case.arrivals.push(Arrival { at_us, node, key: 0, cost: rng.u32(1..=most) });
        }
    }
    case.arrivals.sort_by_key(|arrival| arrival.at_us);
    let at_us = LEASED_US + rng.u64(0..1_000_000);
    case.faults = vec![Planned { at_us, fault: Fault::StoreForgets }];
    for _ in 0..rng.u32(1..3) {
        let (place, for_us) = (rng.u16(0..nodes), rng.u64(100_000..3_000_000));
        let at_us = at_us.saturating_sub(rng.u64(0..for_us));
        case.faults.push(Planned { at_us, fault: Fault::NodePauses { place, for_us } });
    }
    case.faults.sort_by_key(|planned| planned.at_us);
    case
}

#[test]
fn bursts_around_a_loss_of_memory_admit_nothing_in_excess() {
    assert_holds("bursts around a loss", bursts_around_a_loss);
}

#[test]
fn tokens_spent_before_a_loss_of_memory_are_not_lent_again() {
    for (seed, case) in [(72829, overlap(72829)), (1206, bursts_around_a_loss(1206))] {
        let verdict = case.run();
        assert!(!verdict.is_broken(), "seed {seed}: {verdict:?}");
    }
}
