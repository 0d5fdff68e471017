//! One node's engine and the store's model, which answers at once or not at all, step by step.

use std::sync::Arc;

use super::*;
use crate::algorithm::FixedWindow;
use crate::bucket::{
    Ask, BucketRef, KeyBudget, KeyHasher, LeaseBucket, LimitCounts, NewKey, Table,
};
use crate::error::StoreError;
use crate::limit::SyncPolicy;
use crate::store::model::Model;
use crate::sync::engine::Gauges;
use crate::sync::{Config, Engine, Event, Input, LimitConfig, Output, Settlement, Waiter};
use crate::time::Timestamp;

/// The store's clock when the node's is at 0, in microseconds.
const STORE_US: i64 = 100_000_000;

/// No test lasts longer, in microseconds.
const LATEST_US: u64 = 100_000_000;

/// What the store does with what it is sent.
#[derive(Clone, Copy, PartialEq)]
enum StoreIs {
    There,
    /// Each attempt fails at once.
    Unreachable,
    /// Batches are lost: none is applied or answered.
    Mute,
}

struct EngineAndStore {
    engine: Engine,
    table: Arc<Table<LeaseBucket>>,
    store: Model,
    is: StoreIs,
    now_us: u64,
    events: Vec<Event>,
    /// How often each lane has called.
    calls: Vec<usize>,
    /// The answers to callers, by the numbers of their requests.
    outcomes: Vec<(u64, bool)>,
}

impl EngineAndStore {
    fn new(limit: &Limit, lanes: u32) -> Self {
        Self::with_timeout(limit, lanes, 100_000)
    }

    fn with_timeout(limit: &Limit, lanes: u32, timeout_us: u64) -> Self {
        let terms = limit.validate_hybrid(4).unwrap();
        let limits = vec![LimitConfig { name: "api".into(), terms, plans: Vec::new() }];
        let (instance, seed, max_nodes) = ([7; 16], 1, None);
        let config = Config { limits, lanes, instance, seed, retry_us: timeout_us, max_nodes };
        let budget = Arc::new(KeyBudget::new(100, 1));
        let table = Table::new(0, KeyHasher::new([1, 2]), budget, 0).unwrap();
        Self {
            engine: Engine::new(config, Timestamp::ZERO),
            table: Arc::new(table),
            store: Model::default(),
            is: StoreIs::There,
            now_us: 0,
            events: Vec::new(),
            calls: vec![0; lanes as usize],
            outcomes: Vec::new(),
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.now_us)
    }

    fn bucket(&self, key: u8) -> BucketRef {
        BucketRef::new(&self.table, self.table.pin(&[key], NewKey::with_credit(0)))
    }

    /// A caller waits for tokens of a key.
    fn wait(&mut self, ticket: u64, key: u8, cost: u32) {
        let (bucket, deadline) = (self.bucket(key), self.now().plus_micros(50_000));
        let waiter = Waiter { ticket, cost, deadline };
        self.handle(Input::Wait { bucket, key: [key][..].into(), waiter });
    }

    fn handle(&mut self, input: Input) {
        self.engine.handle(self.now(), input);
        self.answer();
    }

    /// Does what the engine asks for, as the driver does. Credit and notifications of buckets are left out: tests hand in each input.
    fn answer(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Send { lane, attempt, request } => {
                    self.calls[lane as usize] += 1;
                    let result = match self.is {
                        StoreIs::There => {
                            Ok(self.store.sync(&request, STORE_US + self.now_us as i64))
                        }
                        StoreIs::Unreachable => Err(StoreError::Unreachable(String::new())),
                        StoreIs::Mute => continue,
                    };
                    self.engine.handle(self.now(), Input::Answer { lane, attempt, result });
                }
                Output::Decided { ticket, allowed, .. } => self.outcomes.push((ticket, allowed)),
                Output::Event(event) => self.events.push(event),
                Output::Credit { .. } | Output::Reset { .. } => {}
            }
        }
    }

    /// Time passes until `until_us`, and the engine is on time.
    fn run_until(&mut self, until_us: u64) {
        while self.engine.poll_timeout().as_micros() <= until_us {
            self.now_us = self.engine.poll_timeout().as_micros().max(self.now_us);
            self.handle(Input::Timeout);
            assert!(self.engine.poll_timeout() > self.now(), "it asks for a time that has passed");
            assert!(self.now_us < LATEST_US, "what is waited for never comes");
        }
        self.now_us = until_us.max(self.now_us);
    }

    /// Time passes until lane 0 sends its next batch.
    fn run_until_sent(&mut self) {
        let (before, latest_us) = (self.calls[0], self.now_us + 2_000_000);
        while self.calls[0] == before {
            assert!(self.now_us < latest_us, "it sends no heartbeat");
            self.run_until(self.engine.poll_timeout().as_micros());
        }
    }

    /// How many events there were of a kind since this was asked last; others are forgotten.
    fn take_count(&mut self, is_wanted: impl Fn(&Event) -> bool) -> usize {
        self.events.drain(..).filter(is_wanted).count()
    }
}

#[test]
fn each_outage_of_a_lane_gives_one_event_when_it_begins_and_one_when_it_ends() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 2);
    node.run_until(1_000_000);
    for _ in 0..2 {
        node.events.clear();
        for is in [StoreIs::Unreachable, StoreIs::There] {
            node.is = is;
            node.run_until(node.now_us + 4_000_000);
        }
        let changes = |lane: u32| {
            let change = |event: &Event| match event {
                Event::StoreDown { lane: of, .. } if *of == lane => Some("down"),
                Event::StoreUp { lane: of } if *of == lane => Some("up"),
                _ => None,
            };
            node.events.iter().filter_map(change).collect::<Vec<_>>()
        };
        assert_eq!([changes(0), changes(1)], [["down", "up"], ["down", "up"]]);
    }
}

#[test]
fn one_lane_asks_often_whether_the_store_is_back_and_the_others_seldom() {
    let mut node = EngineAndStore::with_timeout(&api(1000, 1000), 8, 1_000_000);
    node.run_until(1_000_000);
    node.is = StoreIs::Unreachable;
    node.run_until(1_500_000);
    node.calls.fill(0);
    node.run_until(4_500_000);
    node.calls.sort_unstable();
    let (others, prober) = (node.calls[6], node.calls[7]);
    assert!(prober > 0 && prober >= 2 * others, "{:?}", node.calls);
    node.is = StoreIs::There;
    node.run_until(4_700_000);
    assert_eq!(node.engine.gauges().lanes_down, 0, "all are back soon");
}

#[test]
fn gauges_are_the_sums_of_all_lanes() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 4);
    assert_eq!(node.engine.nodes(0), None);
    assert_eq!(node.engine.gauges(), Gauges::default());
    node.run_until(1_000_000);
    for key in 0..20 {
        node.wait(key.into(), key, 3);
    }
    while node.outcomes.len() < 20 {
        node.run_until(node.now_us + 100);
    }
    assert!(node.outcomes.iter().all(|(_, allowed)| *allowed), "{:?}", node.outcomes);
    node.is = StoreIs::Mute;
    node.run_until(1_100_000);
    let gauges = node.engine.gauges();
    let depth_of = |key| Some(node.engine.lease(node.bucket(key).account()?, node.now())?.depth);
    assert_eq!(gauges.leased_depth, (0..20).filter_map(depth_of).sum::<i64>());
    assert!(gauges.leased_depth > 0 && (1..=60).contains(&gauges.pending), "{gauges:?}");
    assert_eq!(gauges.pending, node.engine.pending());
    node.is = StoreIs::There;
    node.run_until(4_000_000);
    let gauges = node.engine.gauges();
    assert_eq!((gauges.pending, gauges.nodes, gauges.lanes_down), (0, 1, 0));
    assert_eq!(node.engine.nodes(0), Some(1));
    node.is = StoreIs::Unreachable;
    node.run_until(6_000_000);
    assert_eq!(node.engine.gauges().lanes_down, 4);
}

#[test]
fn node_that_leaves_has_reported_all_and_is_no_member_any_more() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    let members = |node: &EngineAndStore| {
        node.store.members.values().map(std::collections::HashMap::len).sum::<usize>()
    };
    node.run_until(1_000_000);
    for key in 0..3 {
        node.wait(key.into(), key, 3);
    }
    while node.outcomes.len() < 3 {
        node.run_until(node.engine.poll_timeout().as_micros());
    }
    assert!(node.outcomes.iter().all(|(_, allowed)| *allowed), "{:?}", node.outcomes);
    assert_eq!((node.engine.has_reported_all(), members(&node)), (false, 1));
    node.handle(Input::Leave);
    node.run_until(2_000_000);
    assert_eq!((node.engine.has_reported_all(), node.engine.pending()), (true, 0));
    assert_eq!(members(&node), 0);
}

#[test]
fn node_that_never_reached_its_store_leaves_at_once() {
    let mut node = EngineAndStore { is: StoreIs::Mute, ..EngineAndStore::new(&api(1000, 1000), 1) };
    node.run_until(10_000);
    node.handle(Input::Leave);
    assert!(node.engine.has_reported_all());
}

/// The other nodes already have the newer definition.
#[test]
fn quota_of_a_newer_definition_in_the_store_is_named() {
    let mut newer = EngineAndStore::new(&api(1000, 1000).version(2), 1);
    newer.wait(1, 1, 1);
    newer.run_until(100_000);
    let mut node =
        EngineAndStore { store: newer.store, ..EngineAndStore::new(&api(500, 500).version(1), 1) };
    node.wait(1, 1, 1);
    node.run_until(100_000);
    assert_eq!(node.take_count(|event| matches!(event, Event::QuotaMismatch { .. })), 1);
}

#[test]
fn decisions_that_buckets_do_not_count_are_handed_out_with_the_others() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    node.engine.counted(0, LimitCounts { allowed: 3, ..LimitCounts::default() });
    let decisions = node.engine.take_decisions(node.now());
    assert!(matches!(decisions[..], [Event::Decisions { allowed: 3, .. }]), "{decisions:?}");
}

/// Callers who wait are not made to wait for a tick.
#[test]
fn waiting_callers_are_answered_though_the_ceiling_is_reached() {
    let ceiling = SyncPolicy::Accuracy { excess: 0.01, key_syncs_per_second_max: Some(1.0) };
    let mut node = EngineAndStore::new(&api(1000, 1000).sync(ceiling), 1);
    // Under a ceiling ticks are long, and so is the recovery of a new lane.
    node.run_until(60_000_000);
    for key in 0..10 {
        node.wait(key.into(), key, 1);
    }
    node.run_until(60_100_000);
    assert_eq!(
        node.outcomes.iter().filter(|(_, allowed)| *allowed).count(),
        10,
        "{:?}",
        node.outcomes
    );
}

/// The answer may be there when the node looks.
#[test]
fn attempt_whose_time_was_over_before_the_node_looked_is_waited_for_a_little_longer() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    node.run_until(500_000);
    node.is = StoreIs::Mute;
    let is_down = |node: &mut EngineAndStore| {
        node.take_count(|event| matches!(event, Event::StoreDown { .. }))
    };
    node.wait(1, 1, 1);
    node.run_until_sent();
    let fails_us = node.now_us + 100_000;
    let (late_us, again_us) = (20_000, 10_000);
    node.now_us = fails_us + late_us;
    node.handle(Input::Timeout);
    assert_eq!(is_down(&mut node), 0);
    node.run_until(fails_us + late_us + again_us - 1);
    assert_eq!(is_down(&mut node), 0);
    node.run_until(fails_us + late_us + again_us);
    assert_eq!(is_down(&mut node), 1);
}

/// A node that always looks too late does not wait for ever.
#[test]
fn attempt_is_waited_for_ten_timeouts_at_most() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    node.run_until(500_000);
    node.is = StoreIs::Mute;
    node.wait(1, 1, 1);
    node.run_until_sent();
    node.now_us += 1_000_000;
    node.handle(Input::Timeout);
    assert_eq!(node.take_count(|event| matches!(event, Event::StoreDown { .. })), 1);
}

/// A node that knows a key and can reach its store no more.
fn cut_off() -> EngineAndStore {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    node.wait(1, 1, 1);
    node.run_until(500_000);
    node.is = StoreIs::Unreachable;
    node
}

/// Each caller would put the policy in force anew, with all that it gives at first.
#[test]
fn outage_policy_of_a_key_begins_once() {
    let mut node = cut_off();
    for ticket in 2..100 {
        node.wait(ticket, 1, 1);
        node.run_until(node.now_us + 50_000);
    }
    assert_eq!(node.take_count(|event| matches!(event, Event::OutagePolicy { .. })), 1);
}

#[test]
fn decisions_of_outage_policies_are_handed_out_while_they_are_in_force() {
    let mut node = cut_off();
    node.wait(2, 1, 1);
    node.run_until(5_000_000);
    node.engine.take_decisions(node.now());
    let (plan, first_credit, can_wait) = (NewKey::NO_PLAN, 0, false);
    let scale = api(1000, 1000).validate_hybrid(4).unwrap().scale;
    let ask = Ask { cost: 3, scale, first_credit, plan, can_wait };
    assert!(node.bucket(1).decide(ask, node.now()).is_allowed());
    let decisions = node.engine.take_decisions(node.now());
    assert!(matches!(decisions[..], [Event::Decisions { allowed: 1, .. }]), "{decisions:?}");
}

#[test]
fn store_that_lost_its_memory_soon_learns_the_limit() {
    let mut node = EngineAndStore::new(&api(1000, 1000), 1);
    node.run_until(5_000_000);
    // The report of a key finds the loss before the limit's next turn.
    let named = |node: &EngineAndStore| node.store.limit_nodes.len();
    node.store.limit_nodes.clear();
    while named(&node) == 0 {
        node.run_until(node.engine.poll_timeout().as_micros());
    }
    node.store = Model::default();
    node.wait(1, 1, 1);
    while node.take_count(|event| matches!(event, Event::MemoryLost { .. })) == 0 {
        node.run_until(node.engine.poll_timeout().as_micros());
    }
    node.run_until(node.now_us + 10_000);
    assert_eq!(node.store.limit_nodes.len(), 1);
}

/// The report arrives in the next window, in which these tokens no longer count.
#[test]
fn tokens_given_back_too_late_for_their_window_are_named_by_an_event() {
    let limit = Limit::new("api", FixedWindow::per_second(1000));
    let mut node = EngineAndStore::new(&limit, 1);
    node.run_until(1_500_000);
    node.wait(1, 1, 10);
    node.run_until(1_990_000);
    assert_eq!(node.outcomes, [(1, true)]);
    let decided = node.now();
    let (bucket, settlement) = (node.bucket(1), Settlement::unused(4, true));
    node.handle(Input::Settle { bucket, key: [1][..].into(), settlement, decided });
    node.run_until(3_000_000);
    let tokens = node.events.iter().filter_map(|event| match event {
        Event::NotGivenBack { tokens, .. } => Some(*tokens),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), [4]);
}

/// Its leases had ended when the process ran again. What a policy gives does not end.
#[test]
fn frozen_process_raises_the_bound_only_under_an_outage_policy() {
    for (is, is_counted) in [(StoreIs::There, false), (StoreIs::Unreachable, true)] {
        let mut node = EngineAndStore::new(&api(1000, 1000), 1);
        node.wait(1, 1, 1);
        node.run_until(500_000);
        node.is = is;
        node.wait(2, 1, 1);
        node.run_until(20_000_000);
        let before = node.engine.excess()[0].bound_tokens;
        node.engine.clock_stalled(60_000_000, 60_000_000);
        let after = node.engine.excess()[0].bound_tokens;
        assert_eq!(after > before, is_counted, "{before:?} and {after:?}");
    }
}

/// A new lane gives nothing before its other nodes have reported what they know.
#[test]
fn key_of_which_tokens_were_withheld_is_asked_for_when_the_lane_gives_again() {
    let mut node = EngineAndStore::new(&api(10, 10), 1);
    node.wait(1, 1, 1);
    node.wait(2, 1, 1);
    node.run_until(1_000);
    assert!(node.engine.is_recovering(node.now()), "the lane is new");
    let (mut recovered_at, mut synced_at) = (None, None);
    while node.now_us < 900_000 && synced_at.is_none() {
        node.run_until(node.now_us + 1_000);
        if recovered_at.is_none() && !node.engine.is_recovering(node.now()) {
            recovered_at = Some(node.now_us);
        }
        let synced = node.take_count(|event| matches!(event, Event::Synced { keys: 1.., .. }));
        if synced > 0 && recovered_at.is_some() {
            synced_at = Some(node.now_us);
        }
    }
    let (recovered_at, synced_at) = (recovered_at.unwrap(), synced_at.unwrap());
    assert!(synced_at - recovered_at <= 10_000, "{recovered_at} and {synced_at}");
}
