//! What a lane knows of its store, case by case.

use super::*;
use crate::algorithm::{FixedWindow, Rule, SlidingLog};
use crate::limit::Limit;
use crate::quota::Quota;
use crate::sync::account::Outage;
use crate::sync::account::samples::bucket;
use crate::sync::context::{LimitBooks, LimitConfig, Timings};
use crate::sync::message::{BatchVerdict, Reply};
use crate::sync::nodes::Nodes;

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

fn lane() -> Lane {
    Lane::new(0, [7; 16], Timestamp::ZERO)
}

fn terms(rule: impl Into<Rule>) -> Terms {
    Limit::new("x", rule).validate_hybrid(4).unwrap()
}

#[test]
fn tokens_count_in_the_window_in_which_they_were_charged() {
    let bucket = terms(Quota::per_second(10));
    let (fixed, log) = (terms(FixedWindow::per_second(10)), terms(SlidingLog::per_second(10)));
    for (terms, from_us, now_us, is_same) in [
        (&bucket, 10_000_000, 99_000_000, true),
        (&fixed, 10_000_000, 10_999_999, true),
        (&fixed, 10_999_999, 11_000_000, false),
        (&log, 10_500_000, 11_499_999, true),
        (&log, 10_500_000, 11_500_000, false),
    ] {
        let windows = (terms.scale, None);
        let case = (terms.scale.curve, from_us, now_us);
        assert_eq!(is_same_window(windows, from_us, now_us), is_same, "{case:?}");
    }
}

#[test]
fn batch_names_no_window_where_a_limit_follows_no_calendar() {
    assert_eq!(lane().window_span_us(&terms(FixedWindow::per_second(10)), at(5)), [0, 0]);
}

#[test]
fn answer_takes_the_backlog_and_a_round_trip_or_as_long_as_the_silence_lasts() {
    let mut lane = lane();
    (lane.trips.quickest_us, lane.backlog.recent_us) = (3_000, 2_000);
    lane.silence.since = at(50_000);
    assert_eq!(lane.answer_us(at(60_000)), 5_000);
    lane.silence.failures = 1;
    assert_eq!(lane.answer_us(at(60_000)), 12_000);
    assert_eq!(lane.answer_us(at(51_000)), 5_000);
}

/// What is known of an outage at 4 s whose policies began at 1 s: how many were those of all nodes and of this one alone, and how long it
/// was alone.
fn lived_through(
    answered_us: i64,
    back: Option<Timestamp>,
    joined_lately: bool,
    recovering_until_us: i64,
) -> LaneTrouble {
    let mut lane = lane();
    lane.policies.entered = at(1_000_000);
    (lane.silence.before.time_us, lane.silence.before.joined_lately) = (answered_us, joined_lately);
    let reply = Reply {
        time_us: 1,
        incarnation: Incarnation::new(&[7; 16], 1),
        nodes: 1,
        recovering_until_us,
        recovering_since_us: 0,
        silence_us: 0,
        limit_nodes: Vec::new(),
        verdict: BatchVerdict::Applied(Vec::new()),
    };
    lane.live_through(back, &reply, at(4_000_000));
    lane.trouble
}

#[test]
fn outage_counts_for_all_nodes_and_for_this_one_alone_if_the_others_did_not_wait_for_it() {
    let lived = |back, joined_lately, recovering_until_us| {
        let trouble = lived_through(5, back, joined_lately, recovering_until_us);
        (trouble.outages, trouble.cut_off, trouble.cut_off_us)
    };
    let back = Some(at(3_000_000));
    assert_eq!(lived(None, false, 9), (0, 1, 3_000_000), "the others were answered");
    assert_eq!(lived(back, false, 9), (1, 0, 0), "all were silent");
    assert_eq!(lived(back, true, 9), (1, 1, 3_000_000), "the others do not count it yet");
    assert_eq!(lived(back, false, 0), (1, 1, 1_000_000), "the store did not wait for it");
    assert_eq!(lived(back, true, 0), (1, 1, 3_000_000), "one outage counts once");
}

#[test]
fn outage_of_a_node_that_was_never_answered_counts_apart() {
    let LaneTrouble { outages, cut_off, unanswered_us, .. } = lived_through(0, None, false, 0);
    assert_eq!((outages, cut_off, unanswered_us), (0, 0, 3_000_000));
}

fn context(terms: &Terms) -> Context {
    let config = LimitConfig { name: "x".into(), terms: *terms, plans: Vec::new() };
    let limits = vec![LimitBooks::new(config, Nodes::new(None, 100_000))];
    let (recovery_us, lease_us, silence_us, retry_us) = (1, 2, 1_500_000, 100_000);
    let timings = Timings { recovery_us, lease_us, silence_us, retry_us };
    Context::new(limits, 1, timings, 7, at(0))
}

/// A pass that was lost is made again before the store forgets who has a limit.
#[test]
fn node_counts_among_those_of_a_limit_for_longer_than_it_counts_as_alive() {
    let context = context(&terms(Quota::per_second(10)));
    let times = lane().header(&[], 0, at(0), &context).times;
    assert_eq!(times.alive_us, ALIVE_US as i64);
    assert_eq!(times.limit_alive_us, times.alive_us + 2 * pass_us(&context) as i64);
    assert_eq!(pass_us(&context), naming::NAMING_GAP_US, "one batch names one limit");
}

#[test]
fn outage_of_a_lane_counts_from_when_its_first_key_lived_on_a_policy() {
    let (mut lane, mut context) = (lane(), context(&terms(Quota::per_second(10))));
    for second in 1..=3 {
        let now = at(1_000_000 * second);
        let slot = lane.open(bucket(), b"key"[..].into(), now, &mut context);
        let outage = Outage { from: now, ended: now, last_us: 0 };
        lane.enter_policy(slot, now, &outage, &mut context);
        assert_eq!(lane.policies.entered, at(1_000_000));
    }
}

/// A caller who cannot be answered in time is answered at once, as if it had not waited.
#[test]
fn caller_waits_if_an_answer_can_come_by_then() {
    for (within_us, answers) in [(49_999, 1), (50_000, 0)] {
        let (mut lane, mut context) = (lane(), context(&terms(Quota::per_second(10))));
        lane.trips.quickest_us = 50_000;
        let slot = lane.open(bucket(), b"key"[..].into(), at(1_000), &mut context);
        let waiter = Waiter { ticket: 1, cost: 1, deadline: at(1_000 + within_us) };
        lane.wait(slot, waiter, at(1_000), &mut context);
        let is_answer = |output: &&Output| matches!(output, Output::Decided { .. });
        assert_eq!(context.outputs.iter().filter(is_answer).count(), answers, "{within_us}");
    }
}

/// The store applies no batch later than two round trips and 10 ms after the silence began. Leases that it gave then end within two
/// epochs. Clocks may differ by a part of that.
#[test]
fn leases_have_ended_two_epochs_after_the_last_batch_that_the_store_can_have_applied() {
    let terms = terms(Quota::per_second(10));
    let context = context(&terms);
    let mut lane = lane();
    assert!(lane.policy_from(&terms, &context).is_none(), "the store answers");
    lane.silence.failures = 1;
    (lane.silence.since, lane.silence.failed_sent) = (at(1_000_000), at(9_000_000));
    let unanswered = lane.policy_from(&terms, &context).unwrap();
    let ended = unanswered.ended.micros_since(at(1_000_000));
    let least_us = 2 * terms.epoch_us + 10_000;
    assert!((least_us..=least_us + least_us / 1_000).contains(&ended), "{ended}");
    assert_eq!(unanswered.last_us, i64::MAX);
    lane.incarnation = Some(Incarnation::new(&[7; 16], 1));
    let (sent, received) = (at(900_000), at(903_000));
    lane.replies.time = Some(LaneTime { time_us: 50_000_000, sent, received, travelled_us: 3_000 });
    let outage = lane.policy_from(&terms, &context).unwrap();
    assert_eq!(outage.last_us, 50_000_000 + 100_000 + 2 * 3_000 + 10_000);
    let epoch_us = terms.epoch_us as i64;
    let left_us = (outage.last_us / epoch_us + 2) * epoch_us - (50_000_000 + 97_000);
    let ended_us = outage.ended.micros_since(at(1_000_000)) as i64;
    assert!((left_us..=left_us + left_us / 1_000).contains(&ended_us), "{ended_us}, {left_us}");
}
