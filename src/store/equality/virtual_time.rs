//! Runs in virtual time.

use super::*;
use crate::store::model::{EXPIRY_CALLS, Key, Lane, Reason, Recovery, SUM_MAX};

/// Where the script finds the time, in microseconds.
const CLOCK: &str = "clock";
/// When the runs begin: any time will do.
const BEGIN_US: i64 = 1_700_000_000_000_000;
const HOUR_US: i64 = 3_600_000_000;
/// How long a node counts. Redis forgets it by its own clock: a test takes less time than that.
const LIFE_US: i64 = 60_000_000;
/// What passes between two batches: around the times of `World::times`, an epoch, and a mark (250 ms); or the clock goes
/// back.
const STEPS_US: [i64; 24] = [
    0, 0, 0, 0, 0, 0, 1, 1, 100, 100, 500, 501, 1000, 5000, 5001, 10_000, 20_000, 20_001, 249_999,
    250_000, 250_001, 1_000_000, -1, -1000,
];
/// The same, once in a while: around the longest wait (30 s), the life of a silence (60 s), and the lives of nodes.
const LEAPS_US: [i64; 8] = [
    29_999_999,
    30_000_000,
    59_999_999,
    60_000_000,
    60_000_001,
    100_000_000,
    100_000_001,
    -30_000_000,
];

/// The script, which takes the time from a key in place of the server's clock.
pub(crate) struct ScriptInVirtualTime(redis::Script);

impl ScriptInVirtualTime {
    pub(crate) fn new() -> Self {
        let code = crate::store::redis::SYNC_CODE;
        let asks_time = "call('TIME')";
        assert_eq!(code.matches(asks_time).count(), 1, "the script asks for the time once");
        let given = format!("{{ 0, call('GET', '{CLOCK}') }}");
        Self(redis::Script::new(&code.replace(asks_time, &given)))
    }

    pub(crate) fn sync(
        &self,
        raw: &mut redis::Connection,
        request: &Request,
        time_us: i64,
    ) -> Reply {
        let (): () = raw.set(CLOCK, time_us).unwrap();
        let mut call = self.0.prepare_invoke();
        for key in keys_of(request) {
            call.key(key);
        }
        call.arg(request.bytes()).arg(&request.hash().to_le_bytes()[..]);
        let bytes: Vec<u8> = call.invoke(raw).unwrap();
        Reply::decode(&bytes, &request.entries, request.limits.len()).unwrap()
    }
}

/// The time that both are told, and the script that takes it.
pub(super) struct VirtualClock {
    script: ScriptInVirtualTime,
    now_us: i64,
}

impl World {
    fn in_virtual_time(now_us: i64) -> Self {
        let clock = VirtualClock { script: ScriptInVirtualTime::new(), now_us };
        Self { clock: Some(clock), time_us: now_us, ..Self::new() }
    }

    pub(super) fn pass(&mut self, micros: i64) {
        self.clock.as_mut().unwrap().now_us += micros;
    }

    pub(super) fn compare_in_virtual_time(&mut self, request: &Arc<Request>) -> Reply {
        let clock = self.clock.as_ref().unwrap();
        let reply = clock.script.sync(&mut self.raw, request, clock.now_us);
        let time_us = clock.now_us;
        self.compare_with_model(request, &reply, time_us);
        reply
    }
}

/// One node in lane 0, and what it sends next.
pub(super) struct OneNode {
    pub(super) world: World,
    instance: InstanceId,
    incarnation: Option<Incarnation>,
    sequence: i64,
    pub(super) times: Times,
    pub(super) knowledge: Knowledge,
    limits: Vec<Arc<str>>,
}

impl OneNode {
    pub(super) fn new() -> Self {
        Self {
            world: World::in_virtual_time(BEGIN_US),
            instance: [7; 16],
            incarnation: None,
            sequence: 1,
            times: Times {
                silence_us: HOUR_US,
                alive_us: LIFE_US,
                limit_alive_us: LIFE_US,
                ..Times::default()
            },
            knowledge: Knowledge::default(),
            limits: Vec::new(),
        }
    }

    pub(super) fn now_us(&self) -> i64 {
        self.world.clock.as_ref().unwrap().now_us
    }

    fn batch(&self, entries: Vec<Entry>) -> Arc<Request> {
        let header = Header {
            lane: 0,
            lanes: LANES,
            instance: self.instance,
            incarnation: self.incarnation,
            sequence: self.sequence,
            times: self.times,
            knowledge: self.knowledge,
            limits: self.limits.clone(),
        };
        Arc::new(Request::new(header, entries))
    }

    pub(super) fn send(&mut self, entries: Vec<Entry>) -> Reply {
        let reply = self.world.compare(&self.batch(entries));
        self.incarnation = Some(reply.incarnation);
        self.sequence = if reply.verdict == BatchVerdict::Reborn { 1 } else { self.sequence + 1 };
        reply
    }

    /// The node that calls next is another one, which calls for the first time.
    pub(super) fn replace(&mut self, instance: u8) {
        (self.instance, self.incarnation, self.sequence) = ([instance; 16], None, 1);
    }

    /// The store loses the record of the lane.
    fn lose_lane(&mut self) {
        let (): () = self.world.raw.del(prefix(0) + "lane").unwrap();
        self.world.model.lanes.clear();
    }

    /// The record of the one key.
    fn key(&self) -> &Key {
        self.world.model.keys.values().next().unwrap()
    }

    fn lane(&self) -> &Lane {
        &self.world.model.lanes[&0]
    }
}

#[test]
fn level_lowered_by_leases_of_a_lost_lane_has_the_same_floor_in_model_and_script() {
    const EPOCH_US: i64 = 500_000;
    let mut node = OneNode::new();
    let scale = Quota::per_second(1000).scale("x").unwrap();
    // All that is held was spent.
    let entry = |now_us: i64, spent, later_epochs| {
        let tag = now_us / EPOCH_US + later_epochs;
        let held = Held { outstanding: spent, tag, stamp_us: now_us, ..Held::default() };
        vec![Entry { epoch_us: EPOCH_US, spent, held, ..Entry::empty(scale) }]
    };
    // What is outstanding is as far below zero as it may be in one epoch, and so is the level.
    for spent in [0, i64::MAX, i64::MAX] {
        node.world.pass(EPOCH_US);
        node.send(entry(node.now_us(), spent, 0));
    }
    assert!(node.key().level < -SUM_MAX / 4, "{:?}", node.key());
    node.lose_lane();
    assert_eq!(node.send(entry(node.now_us(), 0, 0)).verdict, BatchVerdict::Reborn);
    // A lease tagged seven epochs ahead belongs to neither sum, so that nothing else changes the level.
    node.send(entry(node.now_us(), 0, 7));
}

/// The sum was one unit more in the model: it had an odd number beyond 2^53 on the way.
#[test]
fn debt_beyond_what_a_double_counts_is_written_off_alike_in_model_and_script() {
    let mut node = OneNode::new();
    let scale = Quota::per_hour(3).scale("x").unwrap();
    // Much is outstanding in both epochs, or else the level would be as low as it gets.
    for _ in 0..2 {
        node.world.pass(1);
        let tag = node.now_us() / Entry::empty(scale).epoch_us;
        let held = Held { outstanding: 3 << 50, tag, stamp_us: node.now_us(), ..Held::default() };
        node.send(vec![Entry { restore: true, held, ..Entry::empty(scale) }]);
    }
    let tag = node.now_us() / Entry::empty(scale).epoch_us;
    let held = Held { tag, stamp_us: node.now_us(), ..Held::default() };
    for lost in [0, 0, 1] {
        node.send(vec![Entry { debt: 1 << 50, lost, held, ..Entry::empty(scale) }]);
    }
    let key = node.key();
    assert!(key.written_off > SUM_MAX / 2, "{key:?}");
}

#[test]
fn batch_of_a_node_that_was_away_is_stale_from_the_same_microsecond_on_in_model_and_script() {
    for (known_ago_us, stale) in [(599_999_999, false), (600_000_000, false), (600_000_001, true)] {
        let mut node = OneNode::new();
        node.sequence = 7;
        node.knowledge.known_us = node.now_us() - known_ago_us;
        let verdict = node.send(Vec::new()).verdict;
        let expected = if stale { BatchVerdict::Stale } else { BatchVerdict::Reborn };
        assert_eq!(verdict, expected, "{known_ago_us}");
    }
}

#[test]
fn node_is_marked_as_alive_after_the_same_time_in_model_and_script() {
    let mut node = OneNode::new();
    let began_us = node.now_us();
    for (at_us, marked_at_us) in [(0, 0), (249_999, 0), (250_000, 250_000), (499_999, 250_000)] {
        let passed_us = node.now_us() - began_us;
        node.world.pass(at_us - passed_us);
        node.send(Vec::new());
        assert_eq!(node.world.model.members[&0][&node.instance], began_us + marked_at_us);
    }
}

#[test]
fn nodes_count_until_the_same_microsecond_in_model_and_script() {
    for (later_us, nodes) in [(LIFE_US, 2), (LIFE_US + 1, 1)] {
        let mut node = OneNode::new();
        node.limits = vec!["limit".into()];
        node.send(Vec::new());
        node.replace(8);
        node.world.pass(later_us);
        let reply = node.send(Vec::new());
        assert_eq!((reply.nodes, reply.limit_nodes), (nodes, vec![nodes]), "after {later_us} us");
    }
}

#[test]
fn node_that_leaves_is_not_counted_and_a_limit_without_nodes_has_no_record() {
    let mut node = OneNode::new();
    node.limits = vec!["limit".into()];
    assert_eq!(node.send(Vec::new()).limit_nodes, [1]);
    node.knowledge.leaving = true;
    let reply = node.send(Vec::new());
    assert_eq!((reply.nodes, reply.limit_nodes), (0, vec![0]));
    assert!(node.world.model.limit_nodes.is_empty());
}

/// A lane that is lost with its time begins in the past of records that were kept.
#[test]
fn leases_of_a_record_from_the_future_end_from_the_same_microsecond_on_in_model_and_script() {
    let scale = Quota::per_second(1000).burst(200).scale("x").unwrap();
    let fill_us = scale.burst / scale.rate + 1;
    for back_us in [fill_us - 1, fill_us, fill_us + 1, 2 * fill_us] {
        let mut node = OneNode::new();
        let rate = scale.rate / 2;
        let entry = Entry { epoch_us: HOUR_US, demand: rate, want: 9, ..Entry::empty(scale) };
        node.send(vec![Entry { want_rate: rate, debt: 199, ..entry.clone() }]);
        assert!(node.key().leased[0] > 0);
        node.lose_lane();
        node.replace(8);
        node.world.pass(-back_us);
        node.send(vec![entry]);
        let key = node.key();
        assert_eq!(key.leased[0] == 0, back_us > fill_us, "{back_us} us back: {key:?}");
    }
}

/// The lane's time goes back, and the window of the record ends in the far future.
#[test]
fn window_of_a_calendar_that_ends_too_late_is_forgotten_in_model_and_script() {
    let scale = Quota::per_second(1000).calendar_scale("x").unwrap();
    let window_us = scale.window_us();
    for (back_us, is_kept) in [(3 * window_us, true), (4 * window_us, false)] {
        let mut node = OneNode::new();
        let told = |now_us: i64| [now_us, now_us + window_us];
        let ends_us = told(node.now_us())[1];
        node.send(vec![Entry {
            window_span_us: told(node.now_us()),
            debt: 9,
            ..Entry::empty(scale)
        }]);
        node.lose_lane();
        node.replace(8);
        node.world.pass(-back_us);
        node.send(vec![Entry { window_span_us: told(node.now_us()), ..Entry::empty(scale) }]);
        let (key, now_us) = (node.key(), node.now_us());
        let expected_us = if is_kept { ends_us } else { told(now_us)[1] };
        assert_eq!(key.window_ends_us, expected_us, "{back_us} us back");
        assert_eq!(key.level, scale.burst - 9 * scale.token);
    }
}

#[test]
fn record_of_the_microsecond_of_a_loss_keeps_its_level_and_an_earlier_one_does_not() {
    let scale = Quota::per_second(1000).burst(200).scale("x").unwrap();
    for (later_us, is_kept) in [(0, true), (1, false)] {
        let mut node = OneNode::new();
        node.send(vec![Entry::empty(scale)]);
        node.world.pass(later_us);
        node.incarnation = Some(Incarnation::new(&[9; 16], 5));
        assert_eq!(node.send(Vec::new()).verdict, BatchVerdict::Reborn);
        node.replace(8);
        node.world.pass(1000);
        node.send(vec![Entry::empty(scale)]);
        let key = node.key();
        assert_eq!(key.level == scale.burst, is_kept, "{key:?}");
    }
}

#[test]
fn lost_lane_waits_for_nodes_that_came_before_the_loss_was_known_in_model_and_script() {
    let mut node = OneNode::new();
    node.times.lease_us = HOUR_US;
    node.send(Vec::new());
    node.replace(8);
    node.incarnation = Some(Incarnation::new(&[9; 16], 5));
    node.knowledge.nodes = 4;
    assert_eq!(node.send(Vec::new()).verdict, BatchVerdict::Reborn);
    // The four that the caller knows of, and the one that came since.
    assert_eq!(node.lane().recovery.expected, 5);
}

/// Redis has its expiry for that.
#[test]
fn model_forgets_keys_whose_time_is_over_once_in_so_many_calls() {
    let node = OneNode::new();
    let scale = Quota::per_second(1000).scale("x").unwrap();
    let mut model = Model::default();
    model.sync(&node.batch(vec![Entry::empty(scale)]), BEGIN_US);
    let over_us = 1000 * model.keys.values().next().unwrap().until_ms;
    let other = OneNode { instance: [8; 16], ..node };
    for call in 2..=2 * EXPIRY_CALLS {
        let is_before = call <= EXPIRY_CALLS;
        model.sync(&other.batch(Vec::new()), if is_before { over_us - 1 } else { over_us });
        assert_eq!(model.keys.len(), usize::from(call < 2 * EXPIRY_CALLS), "call {call}");
    }
}

/// Both counted it, but a record of the script has no field for that while the lane was never lost.
#[test]
fn node_that_settles_after_the_wait_is_over_is_not_counted_in_model_and_script() {
    let mut node = OneNode::new();
    node.times.silence_us = 1000;
    node.send(Vec::new());
    let first = (node.instance, node.incarnation, node.sequence);
    node.replace(8);
    node.send(Vec::new());
    // A silence, and a wait for both that is over without the first.
    for (later_us, silence_us) in [(1001, 1000), (LIFE_US + 1, HOUR_US)] {
        node.world.pass(later_us);
        node.times.silence_us = silence_us;
        node.send(Vec::new());
    }
    (node.instance, node.incarnation, node.sequence) = first;
    node.knowledge = Knowledge { settled: true, sent_us: node.now_us(), ..Knowledge::default() };
    node.send(Vec::new());
    assert_eq!(node.lane().recovery, Recovery { since_us: BEGIN_US + 1001, ..Recovery::default() });
}

#[test]
fn random_batches_at_the_edges_of_times_through_model_and_script_are_equal() {
    let mut world = World::in_virtual_time(BEGIN_US);
    let recovers = |lane: &Lane| lane.recovery.reason == Reason::Silence;
    let (mut requests, mut recovering) = (0, 0);
    world.play(|world| {
        requests += 1;
        recovering += usize::from(world.model.lanes.values().any(recovers));
        let steps_us = if world.random.one_in(100) { &LEAPS_US[..] } else { &STEPS_US };
        let step_us = world.random.among(steps_us);
        world.pass(step_us);
    });
    assert!(
        recovering > requests / 10,
        "a lane recovered from a silence in {recovering} of {requests}"
    );
}
