//! Cases with several limits, with two versions of one, and the least that is admitted without
//! faults.

use super::*;

/// Of the ideal, in %, where bursts are ample: what holds today, not a target.
const VS_IDEAL_FLOOR_PCT: f64 = 85.0;
/// A burst is ample with this many tokens for each node.
const AMPLE_TOKENS: u64 = 20;

/// A case with up to three limits more, whose keys are asked for in turn.
fn several(seed: u64, faulty: bool) -> Case {
    let mut case = Case::random(seed, faulty);
    let mut rng = fastrand::Rng::with_seed(!seed);
    for name in ["second", "third", "fourth"].into_iter().take(rng.usize(1..=3)) {
        let limit = random_limit(&mut rng, name);
        // The policies of the first: what nodes that are cut off live on is counted for all alike.
        case.setup.others.push(limit.outage(case.setup.limit.outage));
    }
    let most = |index: usize| {
        let limit = case.setup.limits_of(0).nth(index);
        limit.map_or(1, |limit| limit.quota().burst_tokens().min(u64::from(u32::MAX)) as u32)
    };
    let caps: Vec<u32> = (0..=case.setup.others.len()).map(most).collect();
    for arrival in &mut case.arrivals {
        arrival.cost = arrival.cost.min(caps[case.setup.limit_of(arrival.key)]).max(1);
    }
    case
}

#[test]
fn each_of_several_limits_keeps_its_own_bound() {
    assert_holds("several limits", |seed| several(seed, false));
}

#[test]
fn each_of_several_limits_keeps_its_own_bound_whatever_goes_wrong() {
    assert_holds("several limits, faults", |seed| several(seed, true));
}

/// A case in which half of the nodes hold a newer version of the quota.
fn two_versions(seed: u64) -> Case {
    let mut case = Case::random(seed, false);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.limit = case.setup.limit.outage(OutagePolicy::Closed).credit(1);
    let quota = case.setup.limit.quota();
    let times = |tokens: u64, rng: &mut fastrand::Rng| {
        ((tokens as f64 * scaled(rng, 0.2, 5.0)) as u64).clamp(1, 1_000_000)
    };
    let newer = Quota::new(times(quota.tokens(), &mut rng), quota.period());
    let newer = newer.burst(times(quota.burst_tokens(), &mut rng));
    let mut limit = case.setup.limit.clone().version(1);
    limit.rule = newer.into();
    if limit.validate().is_ok() {
        case.setup.newer = Some(limit);
    }
    case
}

#[test]
fn nodes_with_two_versions_of_a_quota_admit_what_the_larger_gives_at_most() {
    assert_holds("two versions", two_versions);
}

/// A case without faults and near its store: single tokens of one key, many for each node.
fn ample(seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let nodes = rng.u16(1..=16);
    let least = (AMPLE_TOKENS * u64::from(nodes)) as f64;
    let burst = scaled(&mut rng, least, 5.0 * least);
    let rate = (burst * scaled(&mut rng, 0.1, 1.0)).floor();
    let limit = Limit::new("ample", Quota::per_second(rate as u64).burst(burst as u64))
        .sync_interval(Duration::from_secs_f64(scaled(&mut rng, 0.01, 0.2)))
        .credit(rng.u32(0..=2));
    let network = Network::new(Duration::from_secs_f64(scaled(&mut rng, 0.0001, 0.005)));
    let setup = Setup { network, audit: true, lanes: 2, ..Setup::new(limit, nodes, seed) };
    let until_us = 10_000_000;
    let count = (scaled(&mut rng, 0.5, 4.0) * (10.0 * rate + burst)) as usize;
    let mut arrivals: Vec<Arrival> = (0..count)
        .map(|_| {
            let (at_us, node) = (rng.u64(0..until_us), rng.u16(0..nodes));
            Arrival { at_us, node, key: 0, cost: 1 }
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_us);
    Case { setup, arrivals, faults: Vec::new(), until_us }
}

#[test]
fn ample_bursts_without_faults_admit_no_less_than_the_floor() {
    let mut least = (f64::INFINITY, 0);
    for seed in seeds() {
        let case = ample(seed);
        let verdict = case.run();
        if verdict.vs_ideal_pct < least.0 {
            least = (verdict.vs_ideal_pct, seed);
        }
        let Case { setup, .. } = &case;
        assert!(verdict.vs_ideal_pct >= VS_IDEAL_FLOOR_PCT, "seed {seed}: {verdict:?}\n{setup:?}");
        assert!(!verdict.is_broken(), "seed {seed}: {verdict:?}");
    }
    let (least, seed) = least;
    println!("ample bursts: the least {least:.1}% of the ideal, seed {seed}");
}
