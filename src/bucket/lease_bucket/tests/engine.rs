//! What the engine and readers are told of a bucket.

use super::*;
use crate::bucket::lease_bucket::engine_side::NO_ACCOUNT;

/// A bucket with a lease of ten tokens that nothing flows into.
fn of_ten_tokens() -> LeaseBucket {
    leased(lease(0, 10, 1_000_000), 10)
}

/// Decides as the limiter does where the fast paths do not tell.
fn decide_slowly(bucket: &LeaseBucket, ask: Ask, now: Timestamp) -> SpendResult {
    bucket.try_decide(bucket.load(), ask, now).unwrap()
}

#[test]
fn engine_reads_held_tokens_pending_tokens_and_demand_without_collecting_them() {
    let bucket = of_ten_tokens();
    assert!(take(&bucket, 3, at(1)) && !take(&bucket, 9, at(1)));
    assert_eq!((bucket.pending(), bucket.held_and_pending(), bucket.demand()), (3, (7, 3), 12));
    assert_eq!(bucket.withdraw(2), 2);
    assert_eq!(bucket.held_and_pending(), (5, 3));
    assert_eq!((bucket.withdraw(9), bucket.withdraw(9)), (5, 0));
}

#[test]
fn refill_that_is_stopped_leaves_its_tokens_for_longer() {
    let bucket = leased(lease(1, 10, 3_500), 0);
    assert!(!take(&bucket, 1, at(3_500)), "until the engine has seen to it");
    assert_eq!(bucket.stop_refill(at(3_600), at(1_000_000), UNIT), 0);
    assert!(take(&bucket, 1, at(900_000)));
    assert_eq!(bucket.held_and_pending(), (2, 1), "three flowed in by the end, and no more");
    assert!(take(&bucket, 2, at(999_999)) && !take(&bucket, 1, at(999_999)));
    let bucket = leased(lease(1, 10, 3_500), 5);
    bucket.stop_refill(at(1_000), at(1_000_000), UNIT);
    assert!(!take(&bucket, 7, at(500_000)) && take(&bucket, 6, at(500_000)));
    assert!(!take(&bucket, 1, at(1_000_000)), "the lease has ended");
}

#[test]
fn token_is_overdrawn_beyond_the_end_of_refill_only_where_the_tokens_live_on() {
    let overdrawn = lease(1, 10, 2_600);
    for outlives_refill in [false, true] {
        let lives_on = if outlives_refill { OUTLIVES_REFILL } else { 0 };
        let bucket = leased(Lease { overdraw: 32 | lives_on, ..overdrawn }, 0);
        assert_eq!(
            [2_000, 2_000, 2_599].map(|us| take(&bucket, 1, at(us))),
            [true, true, outlives_refill]
        );
        let owed = bucket.stop_refill(at(2_600), at(1_000_000), UNIT);
        assert_eq!(owed, if outlives_refill { -400 } else { 0 });
        assert_eq!(bucket.held_and_pending(), (0, 2 + u64::from(outlives_refill)));
    }
}

#[test]
fn callers_who_can_wait_are_denied_without_a_question_while_the_store_is_known_to_be_empty() {
    let bucket = leased(lease(0, 10, 1_000_000_000), 0);
    let verdict = |us| {
        let result = decide(&bucket, Ask { can_wait: true, ..ask(1) }, at(us));
        (result.verdict, result.is_sure)
    };
    bucket.set_view(0, at(5_000_000), 0, at(5_000_000));
    assert_eq!(verdict(5_000_000), (Verdict::Unsure, false));
    bucket.set_view(0, at(5_000_000), 20, at(5_000_000));
    assert_eq!(verdict(5_019_999), (Verdict::Denied, true));
    assert_eq!(verdict(5_020_000), (Verdict::Unsure, false));
}

#[test]
fn surplus_of_large_costs_is_collected_once() {
    let bucket = of_ten_tokens();
    for cost in [1, 3, 5] {
        assert!(take(&bucket, cost, at(1)));
    }
    let collected = collect(&bucket);
    assert_eq!((collected.spent, collected.surplus), (9, 2 + 4));
    assert_eq!(collect(&bucket), Collected::default());
}

#[test]
fn account_that_is_opened_keeps_the_flags_and_is_told_by_its_number() {
    let bucket = LeaseBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    assert_eq!(bucket.account(), None);
    let news = decide(&bucket, ask(1), at(1)).news;
    assert_eq!((news.urgency, news.is_new), (Urgency::Now, true));
    assert!(bucket.is_urgent());
    bucket.open_account(5);
    assert_eq!((bucket.account(), bucket.is_urgent()), (Some(5), true));
    let _ = collect(&bucket);
    assert!(!bucket.is_urgent());
    let news = decide(&bucket, ask(1), at(1)).news;
    assert_eq!((news.urgency, news.is_new), (Urgency::Now, false));
    assert_eq!(NO_ACCOUNT & 3, 0, "no flag is set where there is no account");
}

#[test]
fn tokens_that_are_pending_and_not_low_are_not_urgent() {
    let bucket = of_ten_tokens();
    assert!(take(&bucket, 1, at(1)));
    assert!(!bucket.is_urgent());
}

#[test]
fn first_denial_of_account_0_notifies_the_engine() {
    let bucket = LeaseBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    bucket.open_account(0);
    bucket.amend(at(0), lease(1, 10, 1_000_000), 0, 0, UNIT);
    assert_eq!(decide(&bucket, ask(1), at(1)).news.urgency, Urgency::Now);
    assert_eq!(decide(&bucket, ask(1), at(1)).news, News::default());
}

#[test]
fn credit_at_rest_is_set_where_nothing_is_pending_and_the_engine_has_no_account() {
    let at_rest = |credit| {
        let bucket = LeaseBucket::default();
        bucket.start(NewKey::with_credit(credit), false);
        bucket
    };
    let bucket = at_rest(3);
    assert!(decide(&bucket, Ask { first_credit: 3, ..ask(1) }, at(1)).is_allowed());
    assert_eq!(bucket.credit_at_rest(), 3, "one of them is pending");
    bucket.set_credit_at_rest(7);
    assert_eq!((bucket.load().credit(), bucket.credit_at_rest()), (2, 3));
    let bucket = at_rest(3);
    bucket.set_credit_at_rest(7);
    assert_eq!(bucket.credit_at_rest(), 7);
    bucket.open_account(1);
    bucket.set_credit_at_rest(9);
    assert_eq!(bucket.credit_at_rest(), 7);
    let bucket = at_rest(3);
    let _ = bucket.try_retire(at(1), &SCALE, Evictable::Full);
    bucket.set_credit_at_rest(7);
    assert_eq!(bucket.credit_at_rest(), 0, "the key was evicted");
}

#[test]
fn view_of_eight_times_the_cost_is_worth_a_wait() {
    for cost in [1, 2] {
        let verdict = |tokens| {
            let bucket = leased(lease(1, 10, 1_000_000), 0);
            bucket.set_view(tokens, at(1), 0, at(1));
            take_surely(&bucket, cost, at(1)).verdict
        };
        let eight = 8 * i64::from(cost);
        assert_eq!([verdict(eight - 1), verdict(eight)], [Verdict::Denied, Verdict::Unsure]);
    }
}

#[test]
fn cost_of_0_tells_what_one_token_would_be_told_and_spends_nothing() {
    let read = |bucket: &LeaseBucket| {
        let before = bucket.load();
        let read = decide_slowly(bucket, ask(0), at(2));
        assert_eq!((bucket.load(), read.news), (before, News::default()));
        (read.is_allowed(), read.is_sure, read.left)
    };
    assert_eq!(read(&of_ten_tokens()), (true, true, 10));
    assert_eq!(read(&leased(lease(0, 10, 1_000_000), 1)), (true, true, 1));
    let policy = Lease { is_policy: true, ..lease(0, 10, 1_000_000) };
    assert_eq!(read(&leased(policy, 10)), (true, false, 10));
    assert_eq!(read(&new(1)), (true, false, 0), "on credit");
    assert_eq!(read(&new(0)), (false, false, 0));
    let bucket = of_ten_tokens();
    let seen = bucket.load();
    bucket.open_account(2);
    assert_eq!(bucket.try_decide(seen, ask(0), at(2)), None, "it may be another key's");
}

#[test]
fn lease_that_has_ended_earns_nothing_for_the_next_one() {
    let bucket = leased(lease(1, 10, 5000), 2);
    let amended = bucket.amend(at(9000), lease(1, 10, 20_000), 1, 0, UNIT);
    assert_eq!((amended.units, bucket.load().tokens()), (UNIT, 1));
}

#[test]
fn units_that_a_change_left_over_are_added_by_the_next_one() {
    let bucket = leased(lease(1, 10, 1_000_000), 0);
    let amended = bucket.amend(at(600), lease(0, 10, 1_000_000), 0, 0, UNIT);
    assert_eq!(amended.remainder, 600);
    let amended = bucket.amend(at(700), lease(0, 10, 1_000_000), 3, 600, UNIT);
    assert_eq!((amended.units, amended.remainder), (3 * UNIT + 600, 600));
    let amended = bucket.amend(at(800), lease(0, 10, 1_000_000), 0, 600 + 500, UNIT);
    assert_eq!((amended.units, amended.remainder), (4 * UNIT + 100, 100));
}

#[test]
fn evicted_key_is_full_when_the_engine_knew_and_a_marked_one_when_an_empty_one_would_be() {
    let bucket = LeaseBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    bucket.open_account(1);
    let _ = collect(&bucket);
    assert!(bucket.try_close_account(at(1000), true));
    assert_eq!(bucket.try_retire(at(5), &SCALE, Evictable::Reported), Some(at(1000)));
    bucket.start(NewKey::with_credit(1), true);
    assert_eq!(bucket.load().credit(), 0);
    let fills_at = at(5).plus_micros(SCALE.fill_us());
    assert_eq!(bucket.try_retire(at(5), &SCALE, Evictable::Reported), Some(fills_at));
}
