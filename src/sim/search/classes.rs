//! Each class of fault alone: the most that it lets pass, to hold the terms of the bound against.
//!
//! `TIDEGATE_SEARCH=500 cargo test --release --features sim --lib worst_of_each_class -- --nocapture`

use super::*;

/// Rate and burst of the limits that each class is tried on.
const QUOTAS: [(u64, u64); 4] = [(1000, 1000), (1000, 20), (10, 1000), (1, 100)];
/// The fault comes between these, in microseconds.
const BETWEEN_US: Range<u64> = 3_000_000..6_000_000;
/// A snapshot is saved before this.
const EARLY_US: u64 = 400_000;
const UNTIL_US: u64 = 15_000_000;
/// The longest that a fault lasts, and the largest step of a clock.
const LONGEST_US: f64 = 6_000_000.0;
const REQUESTS: usize = 6000;

/// One class of fault, with its size drawn at random.
struct Class {
    name: &'static str,
    credit: u32,
    faults: fn(&mut fastrand::Rng, u16, u64) -> Vec<Fault>,
}

const CLASSES: [Class; 15] = [
    Class { name: "credit alone", credit: 1, faults: |_, _, _| Vec::new() },
    Class { name: "join", credit: 1, faults: |_, _, _| vec![Fault::NodeJoins] },
    Class { name: "death", credit: 0, faults: |_, place, _| vec![Fault::NodeReplaced { place }] },
    Class {
        name: "node cut off",
        credit: 0,
        faults: |_, place, for_us| vec![Fault::NodeCutOff { place, for_us }],
    },
    Class {
        name: "node paused",
        credit: 0,
        faults: |_, place, for_us| vec![Fault::NodePauses { place, for_us }],
    },
    Class {
        name: "node clock jumps",
        credit: 0,
        faults: |_, place, by_us| vec![Fault::ClockJumps { place, by_us }],
    },
    Class {
        name: "node clock stalls",
        credit: 0,
        faults: |_, place, for_us| vec![Fault::ClockStalls { place, for_us }],
    },
    Class {
        name: "store hangs",
        credit: 0,
        faults: |_, _, for_us| vec![Fault::StoreHangs { for_us }],
    },
    Class {
        name: "store stalls",
        credit: 0,
        faults: |_, _, for_us| vec![Fault::StoreStalls { for_us }],
    },
    Class { name: "store forgets", credit: 0, faults: |_, _, _| vec![Fault::StoreForgets] },
    Class { name: "replica", credit: 0, faults: |_, _, by_us| vec![Fault::StoreLags { by_us }] },
    Class {
        name: "old state twice",
        credit: 0,
        faults: |_, _, _| vec![Fault::StoreSaves, Fault::StoreRestores, Fault::StoreRestores],
    },
    Class { name: "record lost", credit: 0, faults: |_, _, _| vec![Fault::RecordLost { key: 0 }] },
    Class {
        name: "store clock ahead",
        credit: 0,
        faults: |_, _, by_us| vec![Fault::StoreClockSteps { by_us: by_us as i64 }],
    },
    Class {
        name: "store clock back",
        credit: 0,
        faults: |rng, _, by_us| {
            let by_us = rng.choice([by_us as i64, 60_000_000]).unwrap_or_default();
            vec![Fault::StoreClockSteps { by_us: -by_us }]
        },
    },
];

/// One key under overload, whose bucket is empty after a few seconds, and a fault of the class.
fn of_class(class: &Class, (rate, burst): (u64, u64), seed: u64) -> Case {
    let mut rng = fastrand::Rng::with_seed(seed);
    let limit = Limit::new("class", Quota::per_second(rate).burst(burst)).credit(class.credit);
    let nodes = rng.u16(2..=8);
    let setup = Setup { audit: true, lanes: 1, ..Setup::new(limit, nodes, seed) };
    let seconds = UNTIL_US as f64 / 1e6;
    let wanted = scaled(&mut rng, 1.0, 6.0) * (burst as f64 + rate as f64 * seconds);
    let most = (2.0 * wanted / REQUESTS as f64).clamp(1.0, burst as f64) as u32;
    let skew = rng.bool();
    let mut arrivals: Vec<Arrival> = (0..REQUESTS)
        .map(|_| {
            let places = if skew { rng.u16(1..=nodes) } else { nodes };
            let (at_us, node) = (rng.u64(0..UNTIL_US), rng.u16(0..places));
            Arrival { at_us, node, key: 0, cost: rng.u32(1..=most) }
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_us);
    let size_us = scaled(&mut rng, 20_000.0, LONGEST_US) as u64;
    let place = rng.u16(0..nodes);
    let mut at_us = rng.u64(BETWEEN_US);
    let faults = (class.faults)(&mut rng, place, size_us);
    let faults = faults.into_iter().map(|fault| {
        // A snapshot of nearly full buckets is the worst to come back with.
        let early = fault == Fault::StoreSaves;
        let planned = Planned { at_us: if early { at_us % EARLY_US } else { at_us }, fault };
        at_us += rng.u64(100_000..2_000_000);
        planned
    });
    let faults = faults.collect();
    Case { setup, arrivals, faults, until_us: UNTIL_US }
}

/// Runs all seeds, and asserts that each keeps the bound of its own run. Returns the largest excess, with the bound of the same run
/// and its seed.
fn worst_of_sound_class(class: &Class, quota: (u64, u64), seeds: Range<u64>) -> (f64, f64, u64) {
    let of_seed = |seed| {
        let verdict = of_class(class, quota, seed).run();
        // Each by its own bound: that of a long fault is no bound of a short one.
        assert!(!verdict.is_broken(), "{} at {quota:?}, seed {seed}: {verdict:?}", class.name);
        (verdict.excess, verdict.bound, seed)
    };
    let worst = seeds.map(of_seed).max_by(|one, other| one.0.total_cmp(&other.0));
    worst.unwrap_or_default()
}

#[test]
fn worst_of_each_class_keeps_its_bound() {
    // The short form takes a few seeds of each.
    let few = if seeds() == (0..CASES) { 0..4 } else { seeds() };
    println!("| class | rate/s, burst | worst excess | bound of that run | seed |");
    println!("|---|---|---:|---:|---:|");
    for class in &CLASSES {
        for quota in QUOTAS {
            let (excess, bound, seed) = worst_of_sound_class(class, quota, few.clone());
            let (name, (rate, burst)) = (class.name, quota);
            println!("| {name} | {rate}, {burst} | {excess:.1} | {bound:.1} | {seed} |");
        }
    }
}

#[test]
fn bound_without_faults_is_at_most_the_credit_of_all_nodes() {
    for quota in QUOTAS {
        let (_, bound, seed) = worst_of_sound_class(&CLASSES[0], quota, 0..5);
        assert!(bound <= 8.0, "{quota:?}, seed {seed}: {bound}");
    }
}
