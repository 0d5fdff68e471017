//! What a bucket promises to those who spend from it and to the one who leases to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::bucket::Note;
use crate::bucket::word::PENDING_MAX;
use crate::time::Reading;

const UNIT: i64 = 1000;

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

fn lease(rate: i64, depth: u32, ends_us: u64) -> Terms {
    Terms { rate, depth, ends: at(ends_us), low: 0, ahead: 0, policy: false }
}

#[test]
fn tokens_are_spent_then_minted_then_denied() {
    let bucket = Bucket::new(Start::at_rest(0));
    // One unit per microsecond: a token a millisecond.
    let amended = bucket.amend(at(1), lease(1, 10, 1_000_000), 2, 0, UNIT);
    assert_eq!(amended, Amended { rest: 0, units: 2 * UNIT, pending: 0 });
    assert!(bucket.take(2, at(1), UNIT).allowed());
    assert!(!bucket.take(1, at(1000), UNIT).allowed());
    assert!(bucket.take(1, at(1001), UNIT).allowed());
    assert!(bucket.take(10, at(11_001), UNIT).allowed(), "refill stops at the depth");
    assert!(!bucket.take(1, at(11_001), UNIT).allowed());
}

#[test]
fn what_flows_into_a_full_bucket_is_lost_and_not_earned_again_later() {
    let bucket = Bucket::local(1, 10, at(1));
    // Full for a second; then the burst is spent in two halves.
    assert!(bucket.take(5, at(1_000_000), UNIT).allowed());
    assert!(bucket.take(5, at(1_000_000), UNIT).allowed());
    assert!(!bucket.take(1, at(1_000_999), UNIT).allowed());
    assert!(bucket.take(1, at(1_001_000), UNIT).allowed());
}

#[test]
fn what_was_lost_at_the_old_depth_is_not_earned_by_a_deeper_lease() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(0), lease(1, 2, 1_000_000_000), 2, 0, UNIT);
    bucket.amend(at(1_000_000), lease(1, 100, 1_000_000_000), 0, 0, UNIT);
    assert_eq!(bucket.peek(at(1_000_000), UNIT).0, 2);
}

#[test]
fn a_lease_that_has_ended_gives_nothing_even_if_tokens_are_left() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(1), lease(0, 10, 5000), 5, 0, UNIT);
    assert!(bucket.take(1, at(4999), UNIT).allowed());
    assert!(!bucket.take(1, at(5000), UNIT).allowed());
    bucket.amend(at(6000), lease(0, 10, 9000), 1, 0, UNIT);
    assert_eq!(bucket.peek(at(6000), UNIT).0, 1, "tokens of the ended lease do not return");
}

#[test]
fn a_lease_that_may_be_full_gives_nothing_once_it_has_ended_by_the_precise_clock() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(0), lease(1, 10, 50_000), 9, 0, UNIT);
    let by = |precise_us| Reading { cached: at(49_000), precise: at(precise_us) };
    assert!((0..2).all(|_| bucket.take(1, by(49_999), UNIT).allowed()));
    assert!(!bucket.take(1, by(50_000), UNIT).allowed());
}

#[test]
fn token_of_an_ended_lease_is_not_spent_by_a_decision_that_reads_the_next_end() {
    let decisions: [fn(&Bucket, Word) -> bool; 3] = [
        |bucket, word| bucket.take_at_once(word, at(6000)).is_some(),
        |bucket, word| bucket.spend_by_look(word, 1, at(6000), UNIT).is_some(),
        |bucket, _| bucket.take(1, at(6000), UNIT).allowed(),
    ];
    for decide in decisions {
        let bucket = Bucket::new(Start::at_rest(0));
        bucket.amend(at(1), lease(0, 10, 5000), 5, 0, UNIT);
        assert!(bucket.take(1, at(2), UNIT).allowed());
        // A decision has loaded the word, and the engine gives the next lease meanwhile.
        let word = bucket.load();
        bucket.settle(at(6000));
        bucket.void_if_ended(at(6000));
        bucket.write_terms(lease(0, 10, 9000));
        assert!(!decide(&bucket, word), "the four tokens were void");
        assert_eq!(bucket.collect(false, |left| left).spent, 1);
    }
}

#[test]
fn credit_is_spent_after_tokens_and_is_unsure() {
    let bucket = Bucket::new(Start::at_rest(1));
    let taken = bucket.take(1, at(1), UNIT);
    assert!(taken.allowed() && !taken.sure);
    assert_eq!(taken.touch, Touch::Urgent);
    assert!(!bucket.take(1, at(1), UNIT).allowed());
    let collected = bucket.collect(false, |left| left);
    assert_eq!((collected.spent, collected.denied, collected.credit), (1, 1, 0));
}

#[test]
fn fractions_survive_a_change_of_rate() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(0), lease(1, 10, 1_000_000), 0, 0, UNIT);
    // 600 units at rate 1, then 200 us at rate 2: a whole token.
    bucket.amend(at(600), lease(2, 10, 1_000_000), 0, 0, UNIT);
    assert!(!bucket.take(1, at(799), UNIT).allowed());
    assert!(bucket.take(1, at(800), UNIT).allowed());
    let rest = bucket.amend(at(1000), lease(0, 10, 1_000_000), 0, 0, UNIT);
    assert_eq!(rest.rest, 400, "kept by the engine while nothing flows in");
}

#[test]
fn pending_tokens_that_do_not_fit_the_word_are_not_lost() {
    let bucket = Bucket::new(Start::at_rest(0));
    let (mut spent, mut spilled) = (0_u64, 0_u64);
    for round in 0..3 {
        bucket.amend(at(1), lease(0, FIELD_MAX, 100_000), i64::from(FIELD_MAX), 0, UNIT);
        let taken = bucket.take(PENDING_MAX, at(2), UNIT);
        assert!(taken.allowed());
        assert_eq!(bucket.has_spilled(), round > 0, "the engine knows that something is coming");
        spent += u64::from(PENDING_MAX);
        spilled += u64::from(taken.spilled);
        if round > 0 {
            assert!(bucket.take(PENDING_MAX - 1, at(2), UNIT).allowed(), "that fits again");
            spent += u64::from(PENDING_MAX - 1);
        }
    }
    assert_eq!(bucket.collect(false, |left| left).spent + spilled, spent);
    assert_eq!(bucket.collect(false, |left| left).spent, 0);
    bucket.spill_booked();
    assert!(bucket.has_spilled(), "the other lot is still on its way");
    bucket.spill_booked();
    assert!(!bucket.has_spilled());
}

#[test]
fn large_denials_are_all_counted_and_told_of_a_few_times() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(1), lease(0, 10, 1_000_000), 1, 0, UNIT);
    let told = (0..1000).filter(|_| bucket.take(5, at(2), UNIT).refused > 0).count();
    assert_eq!(told, 1, "or notes would come faster than the engine reads them");
    assert_eq!(bucket.take(10_000, at(2), UNIT).refused, 10_000, "more than all before");
    assert_eq!(bucket.collect(false, |left| left).denied, 5000 + 10_000);
}

#[test]
fn what_nobody_has_counted_stops_the_spending_and_not_the_counting() {
    let bucket = Bucket::new(Start::at_rest(0));
    let (mut spent, mut spilled) = (0_u64, 0_u64);
    for _ in 0..3000 {
        bucket.amend(at(1), lease(0, FIELD_MAX, 100_000), i64::from(FIELD_MAX), 0, UNIT);
        let taken = bucket.take(FIELD_MAX, at(2), UNIT);
        spent += u64::from(taken.allowed()) * u64::from(FIELD_MAX);
        spilled += u64::from(taken.spilled);
    }
    let most = u64::from(FIELD_MAX) * 2048;
    assert_eq!((spent, bucket.collect(false, |left| left).spent + spilled), (most, most));
}

#[test]
fn denials_without_end_are_not_counted_from_the_beginning_again() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(1), lease(0, 10, 1_000_000), 1, 0, UNIT);
    let takes = (0..1000).map(|_| bucket.take(FIELD_MAX, at(2), UNIT));
    let counted = takes.filter(|taken| !taken.uncounted).count() as u64;
    assert!((100..1000).contains(&counted), "{counted}");
    let denied = bucket.collect(false, |left| left).denied;
    assert_eq!(denied, counted * u64::from(FIELD_MAX), "the others are the limit's to count");
}

#[test]
fn what_is_not_decided_is_not_told_of_as_denied() {
    let bucket = Bucket::new(Start::at_rest(0));
    let taken = bucket.take_sure(5, at(1), UNIT);
    assert_eq!((taken.verdict, taken.refused), (Verdict::Unsure, 0));
    assert!(!taken.allowed() && Note::of(&taken, 0, 0).is_none());
    assert_eq!(bucket.collect(false, |left| left), Collected::default());
}

#[test]
fn who_can_ask_the_store_that_had_plenty_is_not_denied_by_one_look() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.set_view(94, at(1), at(1));
    bucket.amend(at(1), lease(1, 10, 1_000_000), 0, 0, UNIT);
    assert_eq!(bucket.take(1, at(2), UNIT).verdict, Verdict::Denied, "the engine has heard");
    assert_eq!(bucket.take_sure(1, at(3), UNIT).verdict, Verdict::Unsure);
    // The store has nothing either.
    bucket.set_view(0, at(4), at(4));
    let taken = bucket.take_sure(1, at(5), UNIT);
    assert_eq!((taken.verdict, taken.sure), (Verdict::Denied, true));
}

#[test]
fn a_key_that_was_forgotten_is_minted_nothing_by_who_comes_too_late() {
    let bucket = Bucket::local(1, 10, at(1));
    assert!(bucket.try_forget(at(2), UNIT, true));
    assert!(!bucket.take(1, at(5_000_000), UNIT).allowed());
    assert!(bucket.is_gone());
}

#[test]
fn refill_claimed_under_one_lease_is_not_deposited_under_another_however_many_changes_later() {
    for changes in [1, 255, 256, 512, 4096, 10_000] {
        let bucket = Bucket::new(Start::at_rest(0));
        bucket.amend(at(0), lease(1, 100, 1_000_000), 0, 0, UNIT);
        // A decision has claimed five tokens, and is held up before it adds them.
        let word = bucket.load();
        let inflow = bucket.inflow(word, at(5_000), 0, UNIT).unwrap();
        assert_eq!((inflow.tokens, bucket.claim(inflow, word)), (5, Some(())));
        for _ in 0..changes {
            bucket.amend(at(5_000), lease(0, 100, 1_000_000), 0, 0, UNIT);
        }
        bucket.deposit(inflow.tokens, word.epoch());
        assert_eq!(bucket.held_and_pending(), (0, 0), "{changes} changes");
    }
}

#[test]
fn refill_computed_before_a_place_changed_hands_is_not_claimed_after_it() {
    let bucket = Bucket::local(1, 10, at(0));
    assert!(bucket.take(5, at(0), UNIT).allowed());
    let word = bucket.load();
    assert_eq!(bucket.collect(false, |left| left).spent, 5);
    // A decision has loaded the word, and reads the rest only when another key has the place.
    assert!(bucket.try_forget(at(10_000), UNIT, true));
    let refill = LocalRefill { rate: 1, depth: 10, from: at(20_000) };
    bucket.init(b"b", None, Start { credit: 0, local: Some(refill) });
    assert!(bucket.take(5, at(20_000), UNIT).allowed());
    let inflow = bucket.inflow(word, at(25_000), 0, UNIT).unwrap();
    assert_eq!(bucket.claim(inflow, word), None);
    assert_eq!(bucket.peek(at(25_000), UNIT).0, 10, "the other key has all of its refill");
}

#[test]
fn two_threads_and_a_changing_lease_never_spend_more_than_was_given() {
    let bucket = Arc::new(Bucket::new(Start::at_rest(0)));
    let clock = crate::time::Clock::new();
    clock.set(at(1));
    let rounds = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let spenders: Vec<_> = (0..2)
        .map(|spender| {
            let (bucket, clock, rounds) = (bucket.clone(), clock.clone(), rounds.clone());
            spawn(move || {
                let rounds: &[AtomicU64; 2] = &rounds;
                let mut spent = 0_u64;
                while clock.now() < at(2_000_000) {
                    spent += u64::from(bucket.take(1, clock.now(), UNIT).allowed());
                    rounds[spender].fetch_add(1, Ordering::Relaxed);
                }
                spent
            })
        })
        .collect();
    let (mut earned, mut fraction, mut rate, mut granted) = (0_i64, 0, 0, 0);
    for step in 1..=20_000_i64 {
        // However the threads are scheduled, both keep spending.
        while step % 100 == 0
            && rounds.iter().any(|rounds| rounds.load(Ordering::Relaxed) < step as u64 / 100)
        {
            std::thread::yield_now();
        }
        clock.set(at(step as u64 * 100));
        earned += rate * 100;
        if step % 3 == 0 {
            // The change's clock may be behind the spenders'.
            rate = step % 40;
            granted += step % 2;
            let now = clock.now().minus_micros(step as u64 % 2 * 50);
            fraction =
                bucket.amend(now, lease(rate, 1000, u64::MAX), step % 2, fraction, UNIT).rest;
        }
    }
    let spent: u64 = spenders.into_iter().map(|spender| spender.join().unwrap()).sum();
    assert_eq!(
        bucket.collect(false, |left| left).spent,
        spent,
        "every token spent is pending once"
    );
    let given = granted + earned / UNIT + 1;
    assert!(spent <= given as u64, "spent {spent} of {given}");
    assert!(spent > 0);
}

#[test]
fn two_threads_at_once_find_a_bucket_full_again_to_the_last_token() {
    const DEPTH: u32 = 8;
    const EACH: u32 = 2;
    const STEPS: u64 = 100_000;
    let bucket = Arc::new(Bucket::local(1, DEPTH, at(1)));
    let arrived = Arc::new(AtomicU64::new(0));
    let spend = || {
        let (bucket, arrived) = (bucket.clone(), arrived.clone());
        move || {
            let mut arrivals = 0;
            let leaving = Leaving(arrived.clone());
            // A thread that yields at once would come back too late to collide.
            let mut meet = || {
                arrivals += 2;
                arrived.fetch_add(1, Ordering::SeqCst);
                for spin in 0.. {
                    match arrived.load(Ordering::SeqCst) < arrivals {
                        true if spin < 500 => std::hint::spin_loop(),
                        true => std::thread::yield_now(),
                        false => break,
                    }
                }
            };
            let mut unexpected = None;
            for step in 1..=STEPS {
                let now = at(step * 1_000_000);
                meet();
                let allowed = (0..EACH).filter(|_| bucket.take(1, now, UNIT).allowed()).count();
                meet();
                let found = (allowed, bucket.peek(now, UNIT).0);
                if found != (EACH as usize, DEPTH - 2 * EACH) {
                    unexpected.get_or_insert((step, found));
                }
            }
            drop(leaving);
            unexpected
        }
    };
    let other = spawn(spend());
    let found = [spend()(), other.join().unwrap()];
    assert_eq!(found, [None, None]);
}

/// Nobody waits for a thread that has ended.
struct Leaving(Arc<AtomicU64>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.fetch_add(u64::MAX / 4, Ordering::SeqCst);
    }
}

/// Something that happens to a bucket.
#[derive(Clone, Copy, Debug)]
enum Event {
    Take { cost: u32, surely: bool },
    Peek,
    Collect,
    Lease { rate: i64, depth: u32, tokens: i64, lasts_us: u64, ahead: u8 },
    SetDepth { by: u32 },
    Withdraw { keep: u32 },
    See { tokens: u32 },
}

fn event() -> impl Strategy<Value = Event> {
    let tokens = || prop_oneof![0..10_u32, 0..1000_u32, 5000..FIELD_MAX];
    let take = (1..4_u32, any::<bool>()).prop_map(|(cost, surely)| Event::Take { cost, surely });
    let lease = (0..50_i64, tokens(), tokens(), 0..5_000_000_u64, 0..64_u8).prop_map(
        |(rate, depth, tokens, lasts_us, ahead)| {
            let tokens = tokens.min(depth).into();
            Event::Lease { rate, depth, tokens, lasts_us, ahead }
        },
    );
    prop_oneof![
        8 => take,
        1 => Just(Event::Peek),
        1 => Just(Event::Collect),
        2 => lease,
        1 => (0..3_u32).prop_map(|by| Event::SetDepth { by }),
        1 => tokens().prop_map(|keep| Event::Withdraw { keep }),
        1 => tokens().prop_map(|tokens| Event::See { tokens }),
    ]
}

/// Lets it happen to a bucket that a thread of its own spends from, `by_look` if one look tells, and returns
/// what can be seen of it.
fn live(
    bucket: &Bucket,
    event: Event,
    now: Timestamp,
    by_look: bool,
) -> (Option<Taken>, (u32, u64), u64, Refill) {
    let mut taken = None;
    match event {
        Event::Take { cost, surely } => {
            taken = match (by_look, surely) {
                (false, _) => bucket.decide(cost, now, UNIT, !surely, || true),
                (true, true) => Some(bucket.take_sure(cost, now, UNIT)),
                (true, false) => Some(bucket.take(cost, now, UNIT)),
            };
        }
        Event::Peek => _ = bucket.peek(now, UNIT),
        Event::Collect => _ = bucket.collect(false, |credit| credit),
        Event::Lease { rate, depth, tokens, lasts_us, ahead } => {
            let ends = now.plus_micros(lasts_us);
            let terms = Terms { rate, depth, ends, low: depth / 100, ahead, policy: false };
            bucket.amend(now, terms, tokens, 0, UNIT);
        }
        Event::SetDepth { by } => bucket.set_depth(bucket.peek(now, UNIT).0 + by),
        Event::Withdraw { keep } => _ = bucket.withdraw(keep),
        Event::See { tokens } => bucket.set_view(tokens.into(), now, now),
    }
    (taken, bucket.held_and_pending(), bucket.demand(), bucket.refill())
}

#[test]
fn a_lease_that_could_be_full_by_its_end_or_soon_after_is_not_fresh() {
    let fresh = |bucket: &Bucket| Ends(bucket.ends().load(Ordering::Relaxed)).is_fresh();
    // A token a millisecond: it is full after a tenth of a second.
    let leased = |ends_us| {
        let bucket = Bucket::new(Start::at_rest(0));
        bucket.amend(at(0), lease(1, 100, ends_us), 0, 0, UNIT);
        bucket
    };
    let latest_us = 100_000 - CLOCK_AGE_MAX_US;
    assert!(fresh(&leased(latest_us)) && !fresh(&leased(latest_us + 1000)));
    let bucket = leased(latest_us);
    bucket.set_depth(100);
    assert!(!fresh(&bucket), "whoever sets a depth may have lowered it");
}

fn life() -> impl Strategy<Value = Vec<(Event, u64)>> {
    vec((event(), prop_oneof![0..2000_u64, 0..300_000_u64]), 1..100)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn whoever_does_not_look_at_refill_while_a_lease_is_fresh_misses_nothing(events in life()) {
        let [one, other] = [0, 0].map(|credit| Bucket::new(Start::at_rest(credit)));
        let mut now = at(1);
        for (event, after_us) in events {
            now = now.plus_micros(after_us);
            let seen = live(&one, event, now, true);
            let ends = Ends(other.ends().load(Ordering::Relaxed));
            other.ends().store(ends.may_fill().0, Ordering::Relaxed);
            let other = live(&other, event, now, true);
            prop_assert_eq!(seen, other, "{:?} at {:?}", event, now);
        }
    }

    #[test]
    fn one_look_says_and_does_what_the_long_way_would(events in life()) {
        let [one, other] = [1, 1].map(|credit| Bucket::new(Start::at_rest(credit)));
        let mut now = at(1);
        for (event, after_us) in events {
            now = now.plus_micros(after_us);
            let (taken, held, demand, _) = live(&one, event, now, true);
            let (other, held_there, demanded, _) = live(&other, event, now, false);
            prop_assert_eq!(taken, other, "{:?} at {:?}", event, now);
            prop_assert_eq!((held, demand), (held_there, demanded), "{:?} at {:?}", event, now);
        }
    }
}

#[test]
fn who_would_be_the_first_to_be_denied_is_judged_by_the_precise_clock() {
    let bucket = Bucket::local(1, 1, at(0));
    let behind = Reading { cached: at(900), precise: at(1000) };
    assert!(bucket.take(1, at(0), UNIT).allowed());
    assert!(bucket.take(1, behind, UNIT).allowed());
}

#[test]
fn the_engine_hears_once_between_collections_that_a_key_runs_low() {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(0), Terms { low: 5, ..lease(0, 10, 1_000_000) }, 10, 0, UNIT);
    let touches = || {
        let taken = bucket.take(1, at(1), UNIT);
        assert!(taken.allowed() && taken.sure);
        taken.touch
    };
    let before: Vec<Touch> = (0..5).map(|_| touches()).collect();
    assert_eq!(before, [Touch::Dirty, Touch::None, Touch::None, Touch::None, Touch::None]);
    assert_eq!([touches(), touches()], [Touch::Urgent, Touch::None]);
    let _ = bucket.collect(false, |left| left);
    let touch = || bucket.take(1, at(1), UNIT).touch;
    assert_eq!([touch(), touch()], [Touch::Urgent, Touch::None]);
}

proptest! {
    #[test]
    fn a_bucket_that_is_often_full_has_what_flowed_in_and_fits(
        depth in 1..=6_u32, steps in vec((0..=5_000_u64, 1..=3_u32), 1..50),
    ) {
        let bucket = Bucket::local(1, depth, at(1));
        let (mut now_us, mut units) = (1, u64::from(depth) * UNIT as u64);
        for (pause_us, cost) in steps {
            now_us += pause_us;
            units = (units + pause_us).min(u64::from(depth) * UNIT as u64);
            let wanted = u64::from(cost) * UNIT as u64;
            let taken = bucket.take(cost, at(now_us), UNIT);
            prop_assert_eq!(taken.allowed(), units >= wanted, "{} units", units);
            if taken.allowed() {
                units -= wanted;
                prop_assert_eq!(u64::from(taken.left), units / UNIT as u64);
            }
        }
    }
}

proptest! {
    #[test]
    fn what_overflows_is_lost_to_the_last_unit_though_the_cached_clock_is_behind(
        depth in 1..=60_u32,
        steps in vec((0..=20_000_u64, 0..=CLOCK_AGE_MAX_US, 1..=3_u32), 1..100),
    ) {
        let bucket = Bucket::local(1, depth, at(1));
        let (mut now_us, mut cached_us) = (1, 1);
        let mut units = u64::from(depth) * UNIT as u64;
        for (pause_us, behind_us, cost) in steps {
            now_us += pause_us;
            cached_us = cached_us.max(now_us.saturating_sub(behind_us));
            units = (units + pause_us).min(u64::from(depth) * UNIT as u64);
            let now = Reading { cached: at(cached_us), precise: at(now_us) };
            if bucket.take(cost, now, UNIT).allowed() {
                let left = units.checked_sub(u64::from(cost) * UNIT as u64);
                prop_assert!(left.is_some(), "of {} units {} tokens", units, cost);
                units = left.unwrap_or_default();
            }
        }
    }
}

/// Nobody may spend a token before half of it has flowed in, a token a millisecond.
fn half_a_token_ahead(depth: u32) -> Bucket {
    let bucket = Bucket::new(Start::at_rest(0));
    bucket.amend(at(0), Terms { ahead: 32, ..lease(1, depth, 1_000_000) }, 0, 0, UNIT);
    bucket
}

#[test]
fn a_token_that_fills_the_bucket_ahead_of_time_costs_no_more_time_than_it_takes() {
    let bucket = half_a_token_ahead(1);
    assert!(bucket.take(1, at(600), UNIT).allowed());
    assert!(!bucket.take(1, at(1_499), UNIT).allowed());
    assert!(bucket.take(1, at(1_500), UNIT).allowed());
}

#[test]
fn who_was_denied_has_a_token_ahead_as_soon_as_who_was_not() {
    let bucket = half_a_token_ahead(10);
    assert!((498..500).all(|us| !bucket.take(1, at(us), UNIT).allowed()));
    assert!(bucket.take(1, at(500), UNIT).allowed());
}

#[allow(clippy::disallowed_methods)]
fn spawn<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    std::thread::spawn(body)
}
