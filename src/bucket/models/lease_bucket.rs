//! Decisions about one leased key, beside the engine that collects, leases, and closes the account.

use super::*;
use crate::bucket::lease_bucket::{Lease, LeaseBucket};
use crate::bucket::new_key::NewKey;
use crate::bucket::notifications::Urgency;
use crate::bucket::spend_result::{Ask, SpendResult, Verdict};
use crate::bucket::table::{Evictable, TableBucket};
use crate::quota::{Curve, Scale};
use crate::time::Timestamp;

const UNIT: i64 = 1000;
const SCALE: Scale = Scale { rate: 1, token: UNIT, burst: 10 * UNIT, curve: Curve::Refill };

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

/// `rate` units in a microsecond: 1 is a token in a millisecond.
fn lease(rate: i64, ends_us: u64) -> Lease {
    Lease { rate, depth: 10, ends: at(ends_us), ..Lease::default() }
}

/// A bucket of which the engine has an account, with a lease from time 0 on and tokens.
fn leased(lease: Lease, tokens: i64) -> LeaseBucket {
    let bucket = LeaseBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    bucket.open_account(1);
    bucket.amend(at(0), lease, tokens, 0, UNIT);
    bucket
}

/// As [`Limiter`](crate::Limiter) decides. `None` if lease or key changed meanwhile.
fn try_decide(
    bucket: &LeaseBucket,
    now: Timestamp,
    first_credit: u32,
    cost: u32,
) -> Option<SpendResult> {
    let word = bucket.load();
    if LeaseBucket::is_retired(word) {
        return None;
    }
    let fast = bucket.decide_fast(word, (cost, NewKey::NO_PLAN), now, || UNIT);
    fast.or_else(|| bucket.decide(word, ask(cost, first_credit), now))
}

fn ask(cost: u32, first_credit: u32) -> Ask {
    Ask { cost, scale: SCALE, first_credit, plan: NewKey::NO_PLAN, can_wait: false }
}

fn decide(bucket: &LeaseBucket, now: Timestamp) -> SpendResult {
    loop {
        if let Some(result) = try_decide(bucket, now, 0, 1) {
            return result;
        }
    }
}

fn collect(bucket: &LeaseBucket) -> u64 {
    bucket.collect(false, |credit| credit).spent
}

#[test]
fn spends_beside_a_report_are_collected_or_notified() {
    check("spend against report", || {
        let bucket = Arc::new(leased(lease(0, 1_000_000), 5));
        // The notification of this one is why the engine collects.
        assert_eq!(decide(&bucket, at(1)).news.urgency, Urgency::Tick);
        let spenders = [(); 2].map(|()| run(&bucket, |bucket| decide(bucket, at(1))));
        let collected = collect(&bucket);
        let results = spenders.map(|spender| spender.join().unwrap());
        assert!(results.iter().all(SpendResult::is_allowed));
        assert_eq!(collected + bucket.pending(), 3);
        let is_notified = results.iter().any(|result| result.news.urgency != Urgency::None);
        assert!(bucket.pending() == 0 || is_notified, "{} are left, unnoticed", bucket.pending());
    });
}

#[test]
fn spend_after_a_muted_report_is_collected_or_notified() {
    check("spend against a report after a muted one", || {
        let bucket = Arc::new(leased(lease(0, 1_000_000), 5));
        // The engine looks again without being notified.
        bucket.collect(true, |credit| credit);
        let spender = run(&bucket, |bucket| decide(bucket, at(1)));
        let collected = collect(&bucket);
        let is_notified = spender.join().unwrap().news.urgency != Urgency::None;
        assert_eq!(collected + bucket.pending(), 1);
        assert!(collected == 1 || is_notified);
    });
}

#[test]
fn tokens_that_are_put_back_are_held_or_collected_once() {
    check("tokens put back against a report and a renewed lease", || {
        let bucket = Arc::new(leased(lease(0, 1_000_000), 4));
        assert!(decide(&bucket, at(1)).is_allowed());
        let engine = run(&bucket, |bucket| {
            let collected = collect(bucket);
            bucket.amend(at(1), lease(0, 2_000_000), 0, 0, UNIT);
            collected
        });
        let word = TableBucket::load(&*bucket);
        let is_spent = bucket.spend(word, 2, at(1), || UNIT).is_some();
        let is_kept = is_spent && !bucket.put_back(2, true, word.epoch(), at(1));
        let collected = engine.join().unwrap();
        let (held, pending) = bucket.held_and_pending();
        assert_eq!(u64::from(held) + pending + collected, 4);
        assert_eq!(pending + collected, if is_kept { 3 } else { 1 });
    });
}

#[test]
fn tokens_of_a_lease_that_has_ended_are_not_spent_under_the_next_one() {
    check("spend against a new lease, the old one ended", || {
        let bucket = Arc::new(leased(lease(0, 10), 2));
        let spender = run(&bucket, |bucket| decide(bucket, at(12)).is_allowed());
        bucket.amend(at(12), lease(0, 100), 0, 0, UNIT);
        assert!(!spender.join().unwrap());
        assert_eq!(bucket.held_and_pending(), (0, 0));
    });
}

#[test]
fn tokens_of_a_new_lease_are_not_spent_by_the_end_of_the_old_one() {
    check("spend against a shorter lease", || {
        let bucket = Arc::new(leased(lease(0, 100), 1));
        // Where something is pending, the fast path spends.
        assert!(decide(&bucket, at(1)).is_allowed());
        // Its clock is ahead of the engine's: the new lease is over by it.
        let spender = run(&bucket, |bucket| {
            bucket.spend(TableBucket::load(bucket), 1, at(12), || UNIT).is_some()
        });
        bucket.amend(at(1), lease(0, 10), 2, 0, UNIT);
        assert!(!spender.join().unwrap());
        assert_eq!(bucket.held_and_pending(), (2, 1));
    });
}

#[test]
fn spend_during_a_change_of_lease_is_subtracted_from_one_lease() {
    check("spend against a renewed lease", || {
        let bucket = Arc::new(leased(lease(0, 100), 1));
        let spender = run(&bucket, |bucket| u64::from(decide(bucket, at(1)).is_allowed()));
        let amended = bucket.amend(at(1), lease(0, 200), 1, 0, UNIT);
        let spent = spender.join().unwrap();
        let (held, pending) = bucket.held_and_pending();
        assert_eq!((u64::from(held) + pending, pending), (2, spent));
        assert_eq!(amended.units / UNIT, 2 - amended.pending as i64);
    });
}

#[test]
fn time_that_two_threads_claim_earns_tokens_once() {
    check("refill against refill", || {
        let bucket = Arc::new(leased(lease(1, 100_000), 0));
        let spenders =
            [(); 2].map(|()| run(&bucket, |bucket| decide(bucket, at(3000)).is_allowed()));
        let spent = spenders.map(|spender| u64::from(spender.join().unwrap())).iter().sum::<u64>();
        let (held, pending) = bucket.held_and_pending();
        assert_eq!((u64::from(held) + pending, pending), (3, spent));
    });
}

#[test]
fn stopped_refill_earns_nothing_for_a_thread_whose_clock_is_ahead() {
    check("refill against its end", || {
        let bucket = Arc::new(leased(lease(1, 3000), 0));
        // Its clock is ahead of the engine's.
        let spender = run(&bucket, |bucket| decide(bucket, at(5000)).is_allowed());
        assert_eq!(bucket.stop_refill(at(3000), at(100_000), UNIT), 0);
        let spent = u64::from(spender.join().unwrap());
        let (held, pending) = bucket.held_and_pending();
        assert_eq!((u64::from(held) + pending, pending), (3, spent));
    });
}

#[test]
fn refill_of_an_old_lease_is_not_added_to_the_new_one() {
    check("refill against a change of lease", || {
        let bucket = Arc::new(leased(lease(1, 100_000), 0));
        let spender = run(&bucket, |bucket| {
            let (word, ask) = (TableBucket::load(bucket), ask(1, 0));
            bucket.decide(word, ask, at(3000)).is_some_and(|result| result.is_allowed())
        });
        let amended = bucket.amend(at(3000), lease(0, 100_000), 0, 0, UNIT);
        spender.join().unwrap();
        let (held, pending) = bucket.held_and_pending();
        assert!(u64::from(held) + pending <= 3, "{held} held and {pending} spent of 3");
        // The engine knows what is there.
        let spent_since = pending - amended.pending;
        assert_eq!((u64::from(held) + spent_since) as i64 * UNIT, amended.units);
    });
}

#[test]
fn time_before_a_new_lease_does_not_earn_at_its_rate() {
    check("refill against a faster lease", || {
        let bucket = Arc::new(leased(lease(1, 100_000), 0));
        // Its clock is ahead of the engine's.
        let spender = run(&bucket, |bucket| {
            bucket.decide(TableBucket::load(bucket), ask(1, 0), at(4000)).is_some()
        });
        bucket.amend(at(3000), lease(2, 100_000), 0, 0, UNIT);
        spender.join().unwrap();
        decide(&bucket, at(4000));
        let (held, pending) = bucket.held_and_pending();
        assert!(u64::from(held) + pending <= 3 + 2, "{held} held and {pending} spent of 5");
    });
}

#[test]
fn credit_of_a_full_key_is_given_once_while_its_account_is_opened() {
    check("first credit against an account", || {
        const FIRST_CREDIT: u32 = 2;
        let bucket = LeaseBucket::default();
        bucket.start(NewKey::with_credit(1), false);
        let bucket = Arc::new(bucket);
        let decide = |bucket: &LeaseBucket| loop {
            if let Some(result) = try_decide(bucket, at(1), FIRST_CREDIT, 1) {
                return result;
            }
        };
        let spender = run(&bucket, move |bucket| decide(bucket).is_allowed());
        let mut collected = 0;
        if decide(&bucket).news.is_new {
            bucket.open_account(1);
            // The word is as it was at the beginning.
            collected = bucket.collect(false, |credit| credit).spent;
        }
        spender.join().unwrap();
        while decide(&bucket).is_allowed() {}
        assert!(collected + bucket.pending() <= FIRST_CREDIT.into());
    });
}

#[test]
fn account_that_closes_while_something_is_spent_is_opened_again() {
    check("spend against the end of an account", || {
        let bucket = Arc::new(leased(lease(0, 0), 0));
        bucket.collect(false, |_| 1);
        let spender = run(&bucket, |bucket| try_decide(bucket, at(1), 0, 1));
        let is_closed = bucket.try_close_account(at(0), true);
        let is_evicted = is_closed && bucket.try_retire(at(1), &SCALE, Evictable::Full).is_some();
        let result = spender.join().unwrap();
        let Some(result) = result.filter(SpendResult::is_allowed) else {
            assert_eq!(bucket.pending(), 0);
            return;
        };
        assert_eq!((bucket.pending(), is_evicted), (1, false));
        assert_eq!((result.news.urgency, result.news.is_new), (Urgency::Now, is_closed));
    });
}

#[test]
fn spilled_tokens_reach_the_engine_before_eviction() {
    check("spill against the end of an account", || {
        let bucket = Arc::new(leased(Lease { depth: 1 << 20, ..lease(0, 100) }, 0));
        bucket.amend(at(0), Lease { depth: 1 << 20, ..lease(0, 100) }, 300_000, 0, UNIT);
        assert!(try_decide(&bucket, at(1), 0, 200_000).unwrap().is_allowed());
        let spender = run(&bucket, |bucket| try_decide(bucket, at(1), 0, 100_000).unwrap());
        let collected = collect(&bucket);
        let is_closed = bucket.try_close_account(at(0), true);
        let is_evicted = is_closed && bucket.try_retire(at(1), &SCALE, Evictable::Full).is_some();
        let result = spender.join().unwrap();
        assert_eq!(result.verdict, Verdict::Allowed);
        let spilled = u64::from(result.news.spilled);
        assert_eq!(collected + bucket.pending() + spilled, 300_000);
        assert!(!is_evicted || bucket.pending() + spilled == 0);
    });
}
