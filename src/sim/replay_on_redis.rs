//! What the simulator asked of its store, played again: the script on a real Redis, given the same
//! times, gives the same replies and ends in the same states.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::{Fault, Planned};
use super::setup::{Network, Setup};
use super::workload::{Scenario, Workload};
use super::world::{StoreCall, World};
use crate::limit::Limit;
use crate::quota::Quota;
use crate::store::equality::{ScriptInVirtualTime, compare_states, name_of};
use crate::store::model::Model;
use crate::store::redis_server::RedisServer;
use crate::sync::message::{Reply, Request};

/// Runs; a failure prints its own, and the number of the call.
const SEEDS: std::ops::Range<u64> = 0..4;
const SECONDS: f64 = 6.0;
const NODES: u16 = 5;
const KEYS: u32 = 6;
const LANES: u32 = 3;
/// What happens to nodes and store in each run; loss and duplicates come on top.
const FAULTS: usize = 8;

/// A world that has lived through a random load with random faults.
fn lived(seed: u64) -> World {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = 1 << rng.u64(3..12);
    let burst = (rate * rng.u64(1..20) / 10).max(1);
    let limit = Limit::new("api", Quota::per_second(rate).burst(burst));
    let limit = limit.sync_interval(Duration::from_millis(rng.u64(20..200)));
    let mut setup = Setup { audit: true, lanes: LANES, ..Setup::new(limit, NODES, seed) };
    setup.clock_error_ppm = 400;
    setup.network = Network {
        request_loss: 0.05,
        reply_loss: 0.05,
        duplicated: 0.1,
        late: 0.02,
        ..Network::new(Duration::from_millis(2))
    };
    let workload = Workload {
        scenario: rng.choice([Scenario::OverUniform, Scenario::Herd, Scenario::UnderSkew]).unwrap(),
        nodes: NODES,
        keys: KEYS,
        rate_per_second: rate as f64,
        load: None,
        seconds: SECONDS,
        seed,
    };
    let mut arrivals = workload.arrivals();
    for arrival in &mut arrivals {
        arrival.cost = if rng.u32(0..10) == 0 { rng.u32(1..=burst.min(5) as u32) } else { 1 };
    }
    let mut world = World::recorded(setup).unwrap();
    world.plan_fault(&Planned { at_us: 3_000_000, fault: Fault::StoreForgets });
    for _ in 0..FAULTS {
        let at_us = rng.u64(0..(SECONDS * 1e6) as u64);
        let (place, for_us) = (rng.u16(0..NODES), rng.u64(10_000..2_000_000));
        let fault = match rng.u32(0..6) {
            0 => Fault::NodeReplaced { place },
            1 => Fault::NodeJoins,
            2 => Fault::NodePauses { place, for_us },
            3 => Fault::NodeCutOff { place, for_us },
            4 => Fault::StoreHangs { for_us: for_us / 4 },
            _ => Fault::StoreForgets,
        };
        world.plan_fault(&Planned { at_us, fault });
    }
    world.plan_fault(&Planned { at_us: 4_000_000, fault: Fault::NodeDies { place: NODES - 1 } });
    world.play(&arrivals, (SECONDS * 1e6) as u64);
    world
}

/// Model and script, side by side.
struct Stage {
    server: RedisServer,
    raw: redis::Connection,
    script: ScriptInVirtualTime,
    model: Model,
}

impl Stage {
    fn new() -> Self {
        let server = RedisServer::start();
        let raw = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let script = ScriptInVirtualTime::new();
        Self { server, raw, script, model: Model::default() }
    }

    fn forget(&mut self) {
        self.server.command(&["FLUSHALL"]);
        self.model = Model::default();
    }

    fn sync(&mut self, request: &Request, time_us: i64) -> (Reply, Reply) {
        let reply = self.script.sync(&mut self.raw, request, time_us);
        (reply, self.model.sync(request, time_us))
    }

    /// Plays a run again, and counts its verdicts.
    fn play_again(&mut self, world: &World, run: &str, verdicts: &mut BTreeMap<&str, usize>) {
        self.forget();
        let calls = world.calls.as_deref().expect("a recorded world");
        for (number, call) in calls.iter().enumerate() {
            match call {
                StoreCall::Forgets => self.forget(),
                StoreCall::Sync { request, time_us, reply } => {
                    let (scripts, models) = self.sync(request, *time_us);
                    assert_eq!(models, *reply, "{run}, call {number}: the model, again");
                    assert_eq!(scripts, *reply, "{run}, call {number}: the script");
                    compare_states(&mut self.raw, &self.model, request);
                    *verdicts.entry(name_of(&reply.verdict)).or_default() += 1;
                }
            }
        }
        self.compare_all(calls);
    }

    /// Redis holds what the model holds, and nothing else but the clock.
    fn compare_all(&mut self, calls: &[StoreCall]) {
        for call in calls {
            if let StoreCall::Sync { request, .. } = call {
                compare_states(&mut self.raw, &self.model, request);
            }
        }
        let Model { lanes, nodes, members, limit_nodes, keys, .. } = &self.model;
        let records = lanes.len() + nodes.len() + members.len() + limit_nodes.len() + keys.len();
        let found: usize = redis::cmd("DBSIZE").query(&mut self.raw).unwrap();
        assert_eq!(found, records + 1);
    }
}

#[test]
fn random_runs_played_again_through_model_and_script_are_equal_call_by_call() {
    let mut stage = Stage::new();
    let mut verdicts: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in SEEDS {
        let world = lived(seed);
        stage.play_again(&world, &format!("seed {seed}"), &mut verdicts);
        assert!(world.traffic.losses_of_memory > 0, "seed {seed}");
    }
    println!("{verdicts:?}");
    for verdict in ["applied", "reborn", "stale"] {
        assert!(verdicts.contains_key(verdict), "{verdict} never happened: {verdicts:?}");
    }
    assert!(verdicts["applied"] > 1000, "{verdicts:?}");
}

#[test]
fn outage_from_which_a_node_does_not_come_back_is_the_same_in_model_and_script() {
    let mut stage = Stage::new();
    for (rate, burst) in [(1000, 20), (1000, 200), (20, 20)] {
        let limit = Limit::new("api", Quota::per_second(rate).burst(burst));
        let setup = Setup { audit: true, ..Setup::new(limit, NODES, 1) };
        let workload = Workload {
            scenario: Scenario::OverUniform,
            nodes: NODES,
            keys: 1,
            rate_per_second: rate as f64,
            load: None,
            seconds: SECONDS,
            seed: 1,
        };
        let mut world = World::recorded(setup).unwrap();
        world.plan_fault(&Planned {
            at_us: 1_000_000,
            fault: Fault::StoreGone { for_us: 3_000_000 },
        });
        world
            .plan_fault(&Planned { at_us: 2_000_000, fault: Fault::NodeDies { place: NODES - 1 } });
        world.play(&workload.arrivals(), (SECONDS * 1e6) as u64);
        let mut verdicts = BTreeMap::new();
        stage.play_again(&world, &format!("{rate}/s, {burst}"), &mut verdicts);
        assert!(verdicts["applied"] > 100, "{verdicts:?}");
    }
}
