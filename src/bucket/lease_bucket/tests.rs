//! What a lease bucket promises to threads that spend from it and to the engine that leases to it.

use crate::quota::Curve;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;

use super::engine_side::Amended;
use super::*;
use crate::bucket::token_word::MAX_TOKENS;
use crate::time::{CLOCK_AGE_MAX_US, Reading};

mod engine;

const UNIT: i64 = 1000;
const SCALE: Scale = Scale { rate: 1, token: UNIT, burst: 10 * UNIT, curve: Curve::Refill };

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

/// A new key's bucket, of which the engine has an account.
fn new(credit: u32) -> LeaseBucket {
    let bucket = LeaseBucket::default();
    bucket.start(NewKey::with_credit(credit), false);
    bucket.open_account(1);
    bucket
}

/// `rate` units in a microsecond: 1 is a token in a millisecond.
fn lease(rate: i64, depth: u32, ends_us: u64) -> Lease {
    Lease { rate, depth, ends: at(ends_us), ..Lease::default() }
}

/// A bucket with a lease from time 0 on, and tokens.
fn leased(lease: Lease, tokens: i64) -> LeaseBucket {
    let bucket = new(0);
    bucket.amend(at(0), lease, tokens, 0, UNIT);
    bucket
}

fn ask(cost: u32) -> Ask {
    Ask { cost, scale: SCALE, first_credit: 0, plan: NewKey::NO_PLAN, can_wait: false }
}

/// Decides as the limiter does: by the fast paths, and fully if they do not tell.
fn decide(bucket: &LeaseBucket, ask: Ask, time: impl Now) -> SpendResult {
    let now = time.cached();
    loop {
        let word = bucket.load();
        if !ask.can_wait
            && let Some(result) = bucket.decide_fast(word, (ask.cost, ask.plan), now, || UNIT)
        {
            return result;
        }
        if let Some(result) = bucket.try_decide(word, ask, time) {
            return result;
        }
    }
}

fn take(bucket: &LeaseBucket, cost: u32, now: impl Now) -> bool {
    decide(bucket, ask(cost), now).is_allowed()
}

fn take_surely(bucket: &LeaseBucket, cost: u32, now: impl Now) -> SpendResult {
    decide(bucket, Ask { can_wait: true, ..ask(cost) }, now)
}

fn collect(bucket: &LeaseBucket) -> Collected {
    bucket.collect(false, |left| left)
}

#[test]
fn tokens_are_spent_then_minted_then_denied() {
    let bucket = new(0);
    let amended = bucket.amend(at(1), lease(1, 10, 1_000_000), 2, 0, UNIT);
    assert_eq!(amended, Amended { remainder: 0, units: 2 * UNIT, pending: 0 });
    assert!(take(&bucket, 2, at(1)));
    assert!(!take(&bucket, 1, at(1000)));
    assert!(take(&bucket, 1, at(1001)));
    assert!(take(&bucket, 10, at(11_001)), "refill stops at the depth");
    assert!(!take(&bucket, 1, at(11_001)));
}

#[test]
fn refill_of_a_full_bucket_is_lost_and_not_earned_again_later() {
    let bucket = leased(lease(1, 10, 10_000_000), 10);
    // Full for a second; then the depth is spent in two halves.
    assert!(take(&bucket, 5, at(1_000_000)));
    assert!(take(&bucket, 5, at(1_000_000)));
    assert!(!take(&bucket, 1, at(1_000_999)));
    assert!(take(&bucket, 1, at(1_001_000)));
}

#[test]
fn refill_lost_at_the_old_depth_is_not_earned_by_a_deeper_lease() {
    let bucket = leased(lease(1, 2, 1_000_000_000), 2);
    bucket.amend(at(1_000_000), lease(1, 100, 1_000_000_000), 0, 0, UNIT);
    assert_eq!(bucket.mint_tokens(at(1_000_000), UNIT), 2);
}

#[test]
fn lease_that_has_ended_gives_nothing_even_if_tokens_are_left() {
    let bucket = leased(lease(0, 10, 5000), 5);
    assert!(take(&bucket, 1, at(4999)));
    assert!(!take(&bucket, 1, at(5000)));
    bucket.amend(at(6000), lease(0, 10, 9000), 1, 0, UNIT);
    assert_eq!(bucket.mint_tokens(at(6000), UNIT), 1, "tokens of the ended lease do not return");
}

#[test]
fn lease_that_may_be_full_gives_nothing_once_it_has_ended_by_the_precise_clock() {
    let bucket = leased(lease(1, 10, 50_000), 9);
    let by = |precise_us| Reading { cached: at(49_000), precise: at(precise_us) };
    assert!((0..2).all(|_| take(&bucket, 1, by(49_999))));
    assert!(!take(&bucket, 1, by(50_000)));
}

#[test]
fn token_of_an_ended_lease_is_not_spent_by_a_decision_that_reads_the_next_end() {
    let decisions: [fn(&LeaseBucket, TokenWord) -> bool; 2] = [
        |bucket, word| bucket.spend(word, 1, at(6000), || UNIT).is_some(),
        |bucket, word| {
            bucket.decide(word, ask(1), at(6000)).is_some_and(|result| result.is_allowed())
        },
    ];
    for decide in decisions {
        let bucket = leased(lease(0, 10, 5000), 5);
        assert!(take(&bucket, 1, at(2)));
        // A decision has loaded the word, and the engine changes the lease meanwhile.
        let word = bucket.load();
        bucket.close_refill(at(6000), true);
        bucket.empty_if_ended(at(6000));
        bucket.write_lease(lease(0, 10, 9000));
        bucket.fast_until_us.store(9000, Ordering::Release);
        assert!(!decide(&bucket, word), "the four tokens were void");
        assert_eq!(collect(&bucket).spent, 1);
    }
}

#[test]
fn fast_path_decides_while_the_lease_lives_and_refill_cannot_have_filled_it() {
    // A token a millisecond: it is full after a tenth of a second.
    let spends = |bucket: &LeaseBucket, now_us| {
        bucket.spend(bucket.load(), 1, at(now_us), || UNIT).is_some()
    };
    let latest_us = 100_000 - CLOCK_AGE_MAX_US;
    let fresh = |ends_us, now_us| {
        let bucket = new(0);
        bucket.amend(at(0), lease(1, 110, ends_us), 10, 0, UNIT);
        assert!(!spends(&bucket, 0), "the engine has to be notified first");
        assert!(take(&bucket, 1, at(0)));
        assert_eq!(bucket.fast_until_us.load(Ordering::Relaxed), ends_us.min(latest_us));
        spends(&bucket, now_us)
    };
    assert!(fresh(1_000_000, latest_us - 1));
    assert!(fresh(1_000_000, latest_us), "a token was spent, so there is room for one more");
    assert!(!fresh(1_000_000, latest_us + 1000));
    assert!(fresh(50_000, 49_999));
    assert!(!fresh(50_000, 50_000));
    let bucket = leased(lease(1, 110, 1_000_000), 10);
    assert!(take(&bucket, 1, at(0)));
    bucket.set_depth(10);
    assert!(!spends(&bucket, 1), "a lower depth may be reached earlier");
}

#[test]
fn credit_is_spent_after_tokens_and_is_unsure() {
    let bucket = new(1);
    let result = decide(&bucket, ask(1), at(1));
    assert!(result.is_allowed() && !result.is_sure);
    assert_eq!(result.news.urgency, Urgency::Now);
    assert!(!take(&bucket, 1, at(1)));
    let collected = collect(&bucket);
    assert_eq!((collected.spent, collected.denied, collected.credit), (1, 1, 0));
}

#[test]
fn fractions_survive_a_change_of_rate() {
    let bucket = leased(lease(1, 10, 1_000_000), 0);
    // 600 units at rate 1, then 200 us at rate 2: a whole token.
    bucket.amend(at(600), lease(2, 10, 1_000_000), 0, 0, UNIT);
    assert!(!take(&bucket, 1, at(799)));
    assert!(take(&bucket, 1, at(800)));
    let amended = bucket.amend(at(1000), lease(0, 10, 1_000_000), 0, 0, UNIT);
    assert_eq!(amended.remainder, 400, "kept by the engine while nothing flows in");
}

#[test]
fn pending_tokens_that_do_not_fit_the_word_are_not_lost() {
    let bucket = new(0);
    let (mut spent, mut spilled) = (0_u64, 0_u64);
    for round in 0..3 {
        bucket.amend(at(1), lease(0, MAX_TOKENS, 100_000), i64::from(MAX_TOKENS), 0, UNIT);
        let result = decide(&bucket, ask(MAX_PENDING), at(2));
        assert!(result.is_allowed());
        assert_eq!(bucket.has_spilled(), round > 0, "a notification is under way");
        spent += u64::from(MAX_PENDING);
        spilled += u64::from(result.news.spilled);
        if round > 0 {
            assert!(take(&bucket, MAX_PENDING - 1, at(2)), "that fits again");
            spent += u64::from(MAX_PENDING - 1);
        }
    }
    assert_eq!(collect(&bucket).spent + spilled, spent);
    assert_eq!(collect(&bucket).spent, 0);
    bucket.end_spill();
    assert!(bucket.has_spilled(), "the other notification is still under way");
    bucket.end_spill();
    assert!(!bucket.has_spilled());
}

#[test]
fn cost_that_is_larger_than_all_pending_tokens_leaves_the_other_fields_alone() {
    let bucket = new(3);
    bucket.amend(at(1), lease(0, MAX_TOKENS, 100_000), i64::from(MAX_TOKENS), 0, UNIT);
    let result = decide(&bucket, ask(MAX_TOKENS - 1), at(2));
    assert_eq!((result.is_allowed(), result.news.spilled), (true, MAX_TOKENS - 1));
    let word = bucket.load();
    assert_eq!((word.tokens(), word.credit(), word.pending()), (1, 3, 0));
    assert!(!word.is_policy() && !word.is_retired());
}

/// The engine's low mark follows demand, which has no maximum: the sum with a cost wrapped, and an empty bucket gave
/// tokens.
#[test]
fn low_mark_above_all_tokens_keeps_an_empty_bucket_empty() {
    let bucket = leased(Lease { low: u32::MAX, ..lease(0, 10, 1_000_000) }, 1);
    assert!(take(&bucket, 1, at(1)));
    assert!(!take(&bucket, 1, at(1)));
    assert_eq!(bucket.load().tokens(), 0);
}

#[test]
fn large_denials_are_all_counted_and_notified_a_few_times() {
    let bucket = leased(lease(0, 10, 1_000_000), 1);
    let told = (0..1000).filter(|_| decide(&bucket, ask(5), at(2)).news.refused > 0).count();
    assert_eq!(told, 1, "or notifications would come faster than the engine reads them");
    assert_eq!(decide(&bucket, ask(10_000), at(2)).news.refused, 10_000, "more than all before");
    assert_eq!(collect(&bucket).denied, 5000 + 10_000);
    assert!(take(&bucket, 1, at(2)));
    let one = decide(&bucket, ask(1), at(2));
    assert_eq!((one.is_denied(), one.news.refused), (true, 0), "one token is no large denial");
}

#[test]
fn denial_beyond_the_count_that_fits_is_uncounted() {
    let bucket = leased(lease(1, 10, 1_000_000), 0);
    assert!(decide(&bucket, ask(1), at(1)).is_denied(), "the engine is notified");
    bucket.denied.store(MAX_DENIED, Ordering::Relaxed);
    assert!(decide(&bucket, ask(1), at(1)).is_uncounted);
    assert_eq!(collect(&bucket).denied, u64::from(MAX_DENIED));
}

#[test]
fn denial_after_the_end_of_a_lease_is_unsure() {
    let bucket = leased(lease(1, 5, 5000), 5);
    assert!(take(&bucket, 5, at(4990)) && !take(&bucket, 1, at(4990)), "the engine is notified");
    let is_sure = |now_us| decide(&bucket, ask(1), at(now_us)).is_sure;
    assert!(is_sure(4999));
    assert!(!is_sure(5000) && !is_sure(5001), "the store may have more");
}

#[test]
fn denial_is_sure_only_where_refill_is_leased_and_no_policy_decides() {
    let is_sure = |rate, is_policy| {
        let bucket = leased(Lease { is_policy, ..lease(rate, 10, 1_000_000) }, 0);
        let denied = decide(&bucket, ask(1), at(1));
        assert!(denied.is_denied());
        denied.is_sure
    };
    assert_eq!([is_sure(1, false), is_sure(1, true)], [true, false]);
    assert_eq!([is_sure(0, false), is_sure(0, true)], [false, false]);
}

#[test]
fn credit_of_a_request_whose_cost_does_not_fit_the_pending_tokens_is_spent() {
    let bucket = new(5);
    bucket.amend(at(1), lease(0, MAX_TOKENS, 100_000), i64::from(MAX_PENDING), 0, UNIT);
    let result = decide(&bucket, ask(MAX_PENDING + 2), at(2));
    assert_eq!((result.is_allowed(), result.news.spilled), (true, MAX_PENDING + 2));
    let word = bucket.load();
    assert_eq!((word.tokens(), word.credit(), word.pending()), (0, 3, 0));
}

#[test]
fn bucket_denies_while_too_many_spills_are_under_way_and_loses_no_token() {
    let bucket = new(0);
    let (mut spent, mut spilled) = (0_u64, 0_u64);
    for _ in 0..3000 {
        bucket.amend(at(1), lease(0, MAX_TOKENS, 100_000), i64::from(MAX_TOKENS), 0, UNIT);
        let result = decide(&bucket, ask(MAX_TOKENS), at(2));
        spent += u64::from(result.is_allowed()) * u64::from(MAX_TOKENS);
        spilled += u64::from(result.news.spilled);
    }
    let most = u64::from(MAX_TOKENS) * 2048;
    assert_eq!((spent, collect(&bucket).spent + spilled), (most, most));
}

#[test]
fn denials_without_end_are_not_counted_from_the_beginning_again() {
    let bucket = leased(lease(0, 10, 1_000_000), 1);
    let results = (0..1000).map(|_| decide(&bucket, ask(MAX_TOKENS), at(2)));
    let counted = results.filter(|result| !result.is_uncounted).count() as u64;
    assert!((100..1000).contains(&counted), "{counted}");
    let denied = collect(&bucket).denied;
    assert_eq!(denied, counted * u64::from(MAX_TOKENS), "the limit counts the others");
}

#[test]
fn unsure_decision_is_not_counted_as_denied() {
    let bucket = new(0);
    let result = take_surely(&bucket, 5, at(1));
    assert_eq!((result.verdict, result.news), (Verdict::Unsure, News::default()));
    assert_eq!(collect(&bucket), Collected::default());
}

#[test]
fn caller_that_can_wait_is_not_denied_while_the_store_had_plenty() {
    let bucket = new(0);
    bucket.set_view(94, at(1), 0, at(1));
    bucket.amend(at(1), lease(1, 10, 1_000_000), 0, 0, UNIT);
    assert!(decide(&bucket, ask(1), at(2)).is_denied(), "the engine is notified");
    assert_eq!(take_surely(&bucket, 1, at(3)).verdict, Verdict::Unsure);
    // The store has nothing either.
    bucket.set_view(0, at(4), 0, at(4));
    let result = take_surely(&bucket, 1, at(5));
    assert_eq!((result.verdict, result.is_sure), (Verdict::Denied, true));
}

#[test]
fn refill_claimed_under_one_lease_is_not_deposited_under_another_however_many_changes_later() {
    for changes in [1, 255, 256, 512, 4096, 10_000] {
        let bucket = leased(lease(1, 100, 1_000_000), 0);
        // A decision has claimed five tokens, and is suspended before it adds them.
        let word = bucket.load();
        let inflow = bucket.inflow(word, at(5_000), 0, UNIT).unwrap();
        assert_eq!((inflow.tokens, bucket.claim(inflow, word)), (5, true));
        for _ in 0..changes {
            bucket.amend(at(5_000), lease(0, 100, 1_000_000), 0, 0, UNIT);
        }
        bucket.deposit(inflow.tokens, word.epoch());
        assert_eq!(bucket.held_and_pending(), (0, 0), "{changes} changes");
    }
}

#[test]
fn refill_computed_before_a_lease_changed_is_not_claimed_after_it() {
    let bucket = leased(lease(1, 10, 1_000_000), 0);
    let word = bucket.load();
    bucket.amend(at(10_000), lease(1, 10, 1_000_000), 0, 0, UNIT);
    let inflow = bucket.inflow(word, at(15_000), 0, UNIT).unwrap();
    assert!(!bucket.claim(inflow, word));
}

#[test]
fn two_threads_and_a_changing_lease_never_spend_more_than_was_given() {
    let bucket = Arc::new(new(0));
    let clock = crate::time::Clock::new();
    clock.set(at(1));
    let rounds = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let spenders = [0, 1].map(|spender| {
        let (bucket, clock, rounds) = (bucket.clone(), clock.clone(), rounds.clone());
        spawn(move || {
            let rounds: &[AtomicU64; 2] = &rounds;
            let mut spent = 0_u64;
            while clock.now() < at(2_000_000) {
                spent += u64::from(take(&bucket, 1, clock.now()));
                rounds[spender].fetch_add(1, Ordering::Relaxed);
            }
            spent
        })
    });
    let (mut earned, mut fraction, mut granted) = (0_i64, 0, 0);
    let (mut rate, mut since_us) = (0, 0);
    for step in 1..=20_000_i64 {
        // However the threads are scheduled, both keep spending.
        while step % 100 == 0
            && rounds.iter().any(|rounds| rounds.load(Ordering::Relaxed) < step as u64 / 100)
        {
            std::thread::yield_now();
        }
        clock.set(at(step as u64 * 100));
        if step % 3 == 0 {
            // The change's clock may be behind the spenders'. The new rate counts from then on, so spenders that claim
            // nothing meanwhile have what it brings.
            let now_us = step * 100 - step % 2 * 50;
            earned += rate * (now_us - since_us);
            (rate, since_us) = (step % 40, now_us);
            granted += step % 2;
            let now = at(now_us as u64);
            let lease = lease(rate, 1000, u64::MAX);
            fraction = bucket.amend(now, lease, step % 2, fraction, UNIT).remainder;
        }
    }
    let spent: u64 = spenders.into_iter().map(|spender| spender.join().unwrap()).sum();
    assert_eq!(collect(&bucket).spent, spent, "every token spent is pending once");
    earned += rate * (2_000_000 - since_us);
    let given = granted + earned / UNIT + 1;
    assert!(spent <= given as u64, "spent {spent} of {given}");
    assert!(spent > 0);
}

#[test]
fn refill_that_nobody_claimed_flows_in_at_the_new_rate_from_the_time_of_the_change() {
    let bucket = leased(lease(1, 1000, u64::MAX), 0);
    // A spender's clock is at 200 us; the engine's change is of 150 us.
    bucket.amend(at(150), lease(41, 1000, u64::MAX), 0, 0, UNIT);
    assert_eq!(bucket.mint_tokens(at(200), UNIT), 2, "150 units at 1 a microsecond, 2050 at 41");
}

#[test]
fn two_threads_at_once_find_a_bucket_full_again_to_the_last_token() {
    const DEPTH: u32 = 8;
    const EACH: u32 = 2;
    const STEPS: u64 = 100_000;
    let bucket = Arc::new(leased(lease(1, DEPTH, u64::MAX), DEPTH.into()));
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
                let allowed = (0..EACH).filter(|_| take(&bucket, 1, now)).count();
                meet();
                let found = (allowed, bucket.mint_tokens(now, UNIT));
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
    Take { cost: u32, can_wait: bool },
    Mint,
    Collect,
    Lease { rate: i64, depth: u32, tokens: i64, lasts_us: u64, overdraw: u8 },
    SetDepth { by: u32 },
    Withdraw { most: u32 },
    See { tokens: u32 },
}

fn event() -> impl Strategy<Value = Event> {
    let tokens = || prop_oneof![0..10_u32, 0..1000_u32, 5000..MAX_TOKENS];
    let take =
        (1..4_u32, any::<bool>()).prop_map(|(cost, can_wait)| Event::Take { cost, can_wait });
    let lasts_us = || prop_oneof![0..5_000_u64, 0..5_000_000_u64];
    let lease = (0..50_i64, tokens(), tokens(), lasts_us(), 0..64_u8).prop_map(
        |(rate, depth, tokens, lasts_us, overdraw)| {
            let tokens = tokens.min(depth).into();
            Event::Lease { rate, depth, tokens, lasts_us, overdraw }
        },
    );
    prop_oneof![
        8 => take,
        1 => Just(Event::Mint),
        1 => Just(Event::Collect),
        2 => lease,
        1 => (0..3_u32).prop_map(|by| Event::SetDepth { by }),
        1 => tokens().prop_map(|most| Event::Withdraw { most }),
        1 => tokens().prop_map(|tokens| Event::See { tokens }),
    ]
}

/// Lets it happen to a bucket, by the fast paths if they are `fast`. Returns the decision, tokens and pending, and
/// demand.
fn live(
    bucket: &LeaseBucket,
    event: Event,
    now: Timestamp,
    fast: bool,
) -> (Option<SpendResult>, (u32, u64), u64) {
    let mut result = None;
    match event {
        Event::Take { cost, can_wait } => {
            let ask = Ask { can_wait, ..ask(cost) };
            result = if fast {
                Some(decide(bucket, ask, now))
            } else {
                bucket.decide(bucket.load(), ask, now)
            };
            // The slow path also settles what flowed in.
            let refill = Refill::new(0, 0, 0);
            result = result.map(|result| SpendResult { refill, ..result });
        }
        Event::Mint => _ = bucket.mint_tokens(now, UNIT),
        Event::Collect => _ = collect(bucket),
        Event::Lease { rate, depth, tokens, lasts_us, overdraw } => {
            let (ends, low) = (now.plus_micros(lasts_us), depth / 100);
            let lease = Lease { rate, depth, ends, low, overdraw, ..Lease::default() };
            bucket.amend(now, lease, tokens, 0, UNIT);
        }
        Event::SetDepth { by } => bucket.set_depth(bucket.mint_tokens(now, UNIT) + by),
        Event::Withdraw { most } => _ = bucket.withdraw(most),
        Event::See { tokens } => bucket.set_view(tokens.into(), now, 0, now),
    }
    (result, bucket.held_and_pending(), bucket.demand())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn fast_paths_decide_as_the_slow_path_does(
        events in vec((event(), prop_oneof![0..2000_u64, 0..300_000_u64]), 1..100),
    ) {
        let (one, other) = (new(1), new(1));
        let mut now = at(1);
        for (event, after_us) in events {
            now = now.plus_micros(after_us);
            let fast = live(&one, event, now, true);
            let slow = live(&other, event, now, false);
            prop_assert_eq!(fast, slow, "{:?} at {:?}", event, now);
        }
    }

    #[test]
    fn bucket_that_is_often_full_has_what_flowed_in_and_fits(
        depth in 1..=6_u32, steps in vec((0..=5_000_u64, 1..=3_u32), 1..50),
    ) {
        let bucket = leased(lease(1, depth, u64::MAX), depth.into());
        let (mut now_us, mut units) = (0, u64::from(depth) * UNIT as u64);
        for (pause_us, cost) in steps {
            now_us += pause_us;
            units = (units + pause_us).min(u64::from(depth) * UNIT as u64);
            let wanted = u64::from(cost) * UNIT as u64;
            let result = decide(&bucket, ask(cost), at(now_us));
            prop_assert_eq!(result.is_allowed(), units >= wanted, "{} units", units);
            if result.is_allowed() {
                units -= wanted;
                prop_assert_eq!(u64::from(result.left), units / UNIT as u64);
            }
        }
    }

    #[test]
    fn overflow_is_lost_to_the_last_unit_though_the_cached_clock_is_behind(
        depth in 1..=60_u32,
        steps in vec((0..=20_000_u64, 0..=CLOCK_AGE_MAX_US, 1..=3_u32), 1..100),
    ) {
        let bucket = leased(lease(1, depth, u64::MAX), depth.into());
        let (mut now_us, mut cached_us) = (1, 1);
        let mut units = u64::from(depth) * UNIT as u64;
        for (pause_us, behind_us, cost) in steps {
            now_us += pause_us;
            cached_us = cached_us.max(now_us.saturating_sub(behind_us));
            units = (units + pause_us).min(u64::from(depth) * UNIT as u64);
            let now = Reading { cached: at(cached_us), precise: at(now_us) };
            if take(&bucket, cost, now) {
                let left = units.checked_sub(u64::from(cost) * UNIT as u64);
                prop_assert!(left.is_some(), "of {} units {} tokens", units, cost);
                units = left.unwrap_or_default();
            }
        }
    }
}

#[test]
fn first_denial_is_decided_by_the_precise_clock() {
    let bucket = leased(lease(1, 1, u64::MAX), 1);
    let behind = Reading { cached: at(900), precise: at(1000) };
    assert!(take(&bucket, 1, at(0)));
    assert!(take(&bucket, 1, behind));
}

#[test]
fn engine_is_notified_once_between_collections_that_tokens_run_low() {
    let bucket = leased(Lease { low: 5, ..lease(0, 10, 1_000_000) }, 10);
    let urgency = || {
        let result = decide(&bucket, ask(1), at(1));
        assert!(result.is_allowed() && result.is_sure);
        result.news.urgency
    };
    let before: Vec<Urgency> = (0..5).map(|_| urgency()).collect();
    assert_eq!(before, [Urgency::Tick, Urgency::None, Urgency::None, Urgency::None, Urgency::None]);
    assert_eq!([urgency(), urgency()], [Urgency::Now, Urgency::None]);
    let _ = collect(&bucket);
    assert_eq!([urgency(), urgency()], [Urgency::Now, Urgency::None]);
}

/// No token may be spent before half of it has flowed in, a token a millisecond.
fn half_a_token_overdrawn(depth: u32) -> LeaseBucket {
    leased(Lease { overdraw: 32, ..lease(1, depth, 1_000_000) }, 0)
}

#[test]
fn overdrawn_token_that_fills_the_bucket_costs_no_more_time_than_it_takes() {
    let bucket = half_a_token_overdrawn(1);
    assert!(take(&bucket, 1, at(600)));
    assert!(!take(&bucket, 1, at(1_499)));
    assert!(take(&bucket, 1, at(1_500)));
}

#[test]
fn denied_request_does_not_put_off_an_overdrawn_token() {
    let bucket = half_a_token_overdrawn(10);
    assert!((498..500).all(|us| !take(&bucket, 1, at(us))));
    assert!(take(&bucket, 1, at(500)));
}

#[test]
fn first_credit_returns_when_the_key_is_full_and_the_engine_has_no_account() {
    let bucket = new(0);
    let first = |now_us| decide(&bucket, Ask { first_credit: 3, ..ask(1) }, at(now_us));
    assert!(first(1).is_denied(), "the engine has an account");
    let _ = collect(&bucket);
    assert!(bucket.try_close_account(at(1000), true));
    assert!(first(999).is_denied(), "it is not full yet");
    let _ = collect(&bucket);
    let left = [0; 4].map(|_| u8::from(first(1000).is_allowed()));
    assert_eq!(left, [1, 1, 1, 0]);
}

#[allow(clippy::disallowed_methods)]
fn spawn<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    std::thread::spawn(body)
}
