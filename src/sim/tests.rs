//! The engine in its world.

use std::time::Duration;

use super::world::{BEGIN_US, Figures, Setup, World, figures, poisson};
use crate::limit::Limit;
use crate::quota::Quota;

const SECOND_US: u64 = 1_000_000;

/// Load on one key: which node gets which request when.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    Even(f64),
    Skewed(f64),
    Herd(f64),
    Shift(f64),
}

fn load_up(world: &mut World, load: Load, rate: f64, nodes: usize, seconds: u64, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed);
    // Half a second for the first contact with the store.
    let begin_us = BEGIN_US + SECOND_US;
    let end_us = begin_us + seconds * SECOND_US;
    let weight = |node: usize| match load {
        Load::Skewed(_) => 1.0 / (node + 1) as f64,
        _ => 1.0,
    };
    let total: f64 = (0..nodes).map(weight).sum();
    let (Load::Even(times) | Load::Skewed(times) | Load::Herd(times) | Load::Shift(times)) = load;
    for node in 0..nodes {
        let per_second = times * rate * weight(node) / total;
        let per_second =
            if matches!(load, Load::Shift(_)) { per_second * nodes as f64 } else { per_second };
        for at_us in poisson(&mut rng, begin_us, end_us, per_second) {
            let second = (at_us - begin_us) / SECOND_US;
            let on = match load {
                Load::Herd(_) => second % 4 == 0,
                Load::Shift(_) => second as usize % nodes == node,
                Load::Even(_) | Load::Skewed(_) => true,
            };
            if on {
                world.arrive(at_us, node, 1);
            }
        }
    }
}

fn run(setup: &Setup, load: Load, seconds: u64) -> (World, Figures) {
    let quota = setup.limit.quota();
    let rate = quota.tokens_per_second();
    let mut world = World::new(setup.clone());
    load_up(&mut world, load, rate, setup.nodes, seconds, setup.seed);
    world.run_until(BEGIN_US + (1 + seconds) * SECOND_US);
    let figures = figures(&world.decided, rate, quota.burst_tokens() as f64);
    (world, figures)
}

#[test]
fn explore() {
    for (rate, burst) in [(1000, 1000), (10000, 10000), (1000, 100), (100, 100), (20, 20)] {
        for nodes in [4, 16] {
            for load in [Load::Even(3.0), Load::Skewed(3.0), Load::Even(0.9), Load::Herd(5.0), Load::Shift(0.9)] {
                let limit = Limit::new("api", Quota::per_second(rate).burst(burst))
                    .sync_interval(Duration::from_millis(50));
                let setup = Setup::new(limit, nodes, 1);
                let (world, figures) = run(&setup, load, 10);
                let synced: u64 = world.nodes.iter().map(|node| node.keys_synced).sum();
                println!(
                    "{rate:>6}/{burst:<6} N {nodes:<3} {load:<14?} vs ideal {:6.2} excess {:6.2} synced/tick {:.2} admitted {}",
                    figures.vs_ideal_pct,
                    figures.excess_tokens,
                    synced as f64 / (nodes as f64 * 10.0 * 20.0), figures.admitted
                );
            }
        }
    }
}

#[test]
fn herds() {
    for (rate, burst) in [(1000, 1000), (10000, 10000), (1000, 100), (100, 100)] {
        for nodes in [4, 16] {
            for load in [Load::Herd(5.0), Load::Even(0.9), Load::Even(3.0), Load::Skewed(3.0)] {
                let limit = Limit::new("api", Quota::per_second(rate).burst(burst));
                let all: Vec<_> = (1..6)
                    .map(|seed| run(&Setup::new(limit.clone(), nodes, seed), load, 10))
                    .collect();
                let worst = all.iter().map(|(_, f)| f.vs_ideal_pct).fold(200.0, f64::min);
                let synced: u64 = all[0].0.nodes.iter().map(|node| node.keys_synced).sum();
                print!("{rate}/{burst} N{nodes} {load:?} {worst:6.2} ({:.2});  ", synced as f64 / nodes as f64 / 200.0);
            }
            println!();
        }
    }
}
