//! What a local bucket promises.

use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::quota::Quota;

fn token_bucket(quota: Quota) -> &'static TurnRule {
    leak(TurnRule::TokenBucket(quota.local_scale("x", false).unwrap()))
}

fn leak(rule: TurnRule) -> &'static TurnRule {
    Box::leak(Box::new(rule))
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

fn new() -> LocalBucket {
    let bucket = LocalBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    bucket
}

fn ask(cost: u32, rule: &'static TurnRule) -> LocalAsk<TurnRule> {
    LocalAsk { cost, rule, within_us: 0, plan: NewKey::NO_PLAN }
}

/// Decides about `cost` tokens: whether they were spent, and the tokens left.
fn take(bucket: &LocalBucket, cost: u32, now: Timestamp, rule: &'static TurnRule) -> (bool, u64) {
    let answer = bucket.try_decide(bucket.load(), ask(cost, rule), now).unwrap();
    (answer.is_allowed, answer.standing.remaining())
}

/// A token bucket in exact fractions: tokens times the period's microseconds.
struct Exact {
    quota: Quota,
    level: i128,
    at_us: u64,
}

impl Exact {
    fn new(quota: Quota) -> Self {
        let full = i128::from(quota.burst_tokens()) * quota.period().as_micros() as i128;
        Self { quota, level: full, at_us: 0 }
    }

    fn take(&mut self, cost: u32, now_us: u64) -> bool {
        let token = self.quota.period().as_micros() as i128;
        let full = i128::from(self.quota.burst_tokens()) * token;
        let flowed = i128::from(self.quota.tokens()) * i128::from(now_us - self.at_us);
        (self.level, self.at_us) = ((self.level + flowed).min(full), now_us);
        let allowed = self.level >= i128::from(cost) * token;
        self.level -= if allowed { i128::from(cost) * token } else { 0 };
        allowed
    }
}

proptest! {
    /// Quotas whose rate is kept exactly.
    #[test]
    fn decisions_are_those_of_an_exact_token_bucket(
        tokens in 1..=10_000_u64,
        period in prop_oneof![Just(1_u64), Just(60), Just(3600), Just(86_400)],
        burst in 1..=1_000_u64,
        steps in vec((0..=100_u64, 1..=3_u32, 0..=20_000_u64), 1..100),
    ) {
        // An empty bucket fills within the longest period: a token a day and a burst of 646 are no quota.
        let burst = burst.min(366 * tokens);
        let quota = Quota::new(tokens, Duration::from_secs(period)).burst(burst);
        let (rule, bucket, mut exact) = (token_bucket(quota), new(), Exact::new(quota));
        let mut now_us = 1;
        for (percent, cost, pause_us) in steps {
            // Up to a token and a half after the request before.
            let token_us = quota.period().as_micros() as u64 / tokens;
            now_us += token_us * 3 / 2 * percent / 100 + pause_us % 7;
            let cost = cost.min(burst as u32);
            let (allowed, left) = take(&bucket, cost, at(now_us), rule);
            prop_assert_eq!(allowed, exact.take(cost, now_us), "at {}", now_us);
            let token = quota.period().as_micros() as i128;
            prop_assert_eq!(i128::from(left), exact.level / token);
        }
    }

    /// The smallest and largest quotas: never more than the exact bucket, and 0.1% less at most.
    #[test]
    fn rounded_rates_never_admit_more_than_the_quota(
        tokens in 1..=1_000_000_000_u64, burst in 1..=1_000_000_000_u64, seed in any::<u64>(),
    ) {
        let quota = Quota::per_second(tokens).burst(burst);
        let Ok(scale) = quota.local_scale("x", false) else { return Ok(()) };
        let rule = leak(TurnRule::TokenBucket(scale));
        let (bucket, mut rng) = (new(), fastrand::Rng::with_seed(seed));
        let (mut now_us, mut spent) = (1, 0_u128);
        for _ in 0..300 {
            let cost = rng.u64(1..=burst.min(tokens / 1000 + 2)) as u32;
            while take(&bucket, cost, at(now_us), rule).0 {
                spent += u128::from(cost);
                prop_assert!(spent <= u128::from(burst) + u128::from(tokens) * u128::from(now_us) / 1_000_000);
                if rng.u8(..) < 8 {
                    break;
                }
            }
            now_us += rng.u64(1..2_000);
        }
    }
}

#[test]
fn denied_cost_is_allowed_exactly_when_its_tokens_have_flowed_in() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(10)), new());
    assert_eq!(take(&bucket, 10, at(1), rule), (true, 0));
    assert_eq!(take(&bucket, 3, at(3_000), rule), (false, 2));
    assert_eq!(take(&bucket, 3, at(3_001), rule), (true, 0));
}

#[test]
fn time_beyond_all_uptime_is_decided_and_makes_no_word_look_evicted() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1_000_000_000)), new());
    for _ in 0..3 {
        assert!(take(&bucket, 1, at(u64::MAX), rule).0);
        assert!(!LocalBucket::is_retired(bucket.load()));
    }
}

#[test]
fn bursts_and_rates_of_a_billion_are_kept_to_the_token() {
    let quota = Quota::per_second(1_000_000_000);
    let (rule, bucket) = (token_bucket(quota), new());
    assert_eq!(take(&bucket, 1_000_000_000, at(1), rule), (true, 0));
    assert_eq!(take(&bucket, 1001, at(2), rule), (false, 1000));
    assert_eq!(take(&bucket, 1000, at(2), rule), (true, 0));
    assert_eq!(take(&bucket, 300_000_000, at(300_002), rule), (true, 0));
}

#[test]
fn cost_of_zero_spends_nothing_and_says_whether_a_token_is_left() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1).burst(2)), new());
    assert_eq!(take(&bucket, 0, at(1), rule), (true, 2));
    assert_eq!(take(&bucket, 2, at(1), rule), (true, 0));
    assert_eq!(take(&bucket, 0, at(1), rule), (false, 0));
}

#[test]
fn time_that_goes_back_by_a_thread_with_an_old_reading_admits_nothing_more() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(2)), new());
    assert_eq!(take(&bucket, 2, at(10_000), rule), (true, 0));
    assert!(!take(&bucket, 1, at(9_000), rule).0);
    assert!(!take(&bucket, 1, at(10_999), rule).0);
    assert!(take(&bucket, 1, at(11_000), rule).0);
}

#[test]
fn word_of_one_key_is_never_the_word_of_the_next() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(2)), new());
    let before = bucket.load();
    let try_retire =
        |us: u64| bucket.try_retire(at(us + CLOCK_AGE_MAX_US), rule, Evictable::Full).is_some();
    assert!(!try_retire(0), "it is not known to be full");
    assert!(try_retire(1));
    assert!(LocalBucket::is_retired(bucket.load()));
    assert!(!try_retire(3), "once");
    bucket.start(NewKey::with_credit(0), false);
    assert_eq!(
        bucket.try_decide(before, ask(1, rule), at(3)),
        None,
        "a decision about the key before"
    );
    assert_eq!(take(&bucket, 2, at(3), rule), (true, 0), "the next key is full");
    assert!(!try_retire(2_003), "until it is full again");
    assert!(try_retire(2_004));
}

/// A request that was promised the bucket's next two tokens, and is undone at this time.
fn promised(bucket: &LocalBucket, us: u64, rule: &'static TurnRule) -> impl Fn(u64) -> Taken {
    let ask = LocalAsk { within_us: 1_000_000, ..ask(2, rule) };
    assert!(bucket.try_decide(bucket.load(), ask, at(us)).unwrap().is_allowed);
    let state = bucket.load();
    move |us| Taken { state, cost: 2, now: rule.units_at(at(us)) }
}

/// 10 tokens went through at one instant with a burst of 5.
#[test]
fn request_that_is_undone_after_the_bucket_was_full_gives_nothing_back() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(2)), new());
    assert_eq!(take(&bucket, 2, at(10_000), rule), (true, 0));
    let undone = promised(&bucket, 10_000, rule);
    assert_eq!(take(&bucket, 2, at(20_000), rule), (true, 0), "it is full again");
    bucket.give_back(rule, undone(20_000));
    assert_eq!(take(&bucket, 1, at(20_000), rule), (false, 0));
}

#[test]
fn requests_that_are_undone_never_give_back_more_than_they_took() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(2)), new());
    assert_eq!(take(&bucket, 2, at(10_000), rule), (true, 0));
    let (first, second) = (promised(&bucket, 10_000, rule), promised(&bucket, 10_000, rule));
    bucket.give_back(rule, first(10_000));
    assert_eq!(take(&bucket, 0, at(12_000), rule), (false, 0), "the second one's tokens");
    assert_eq!(take(&bucket, 2, at(14_000), rule), (true, 0), "full without the first one");
    bucket.give_back(rule, second(13_500));
    assert_eq!(take(&bucket, 1, at(14_000), rule), (false, 0));
}

#[test]
fn key_after_one_with_an_undone_request_begins_above_its_words_and_not_before_their_time() {
    let (rule, bucket) = (token_bucket(Quota::per_second(1000).burst(2)), new());
    assert_eq!(take(&bucket, 2, at(10_000), rule), (true, 0));
    let undone = promised(&bucket, 10_000, rule);
    let highest = bucket.load();
    bucket.give_back(rule, undone(10_000));
    assert!(bucket.load() < highest);
    let try_retire =
        |us: u64| bucket.try_retire(at(us + CLOCK_AGE_MAX_US), rule, Evictable::Full).is_some();
    assert!(!try_retire(14_000), "its word was there until then");
    assert!(try_retire(14_001));
    bucket.start(NewKey::with_credit(0), false);
    assert!(bucket.load() > highest);
    assert_eq!(take(&bucket, 2, at(14_001), rule), (true, 0), "and is full");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own threads")]
fn threads_never_spend_more_than_there_is() {
    let rule = token_bucket(Quota::per_second(1_000_000).burst(1000));
    let bucket = Arc::new(new());
    let spend = || {
        let bucket = bucket.clone();
        move || {
            (1..=200_000_u64)
                .filter(|now_us| {
                    let decided = || bucket.try_decide(bucket.load(), ask(1, rule), at(*now_us));
                    std::iter::repeat_with(decided).flatten().next().unwrap().is_allowed
                })
                .count()
        }
    };
    let threads = [(); 3].map(|()| std::thread::spawn(spend()));
    let spent: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    // Each thread's time runs from 1 to 200,000 us; a thread that is behind is denied.
    assert!((200_000..=201_000).contains(&spent), "{spent}");
}
