//! Decisions by a window bucket where one window ends and the next begins.

use super::*;
use crate::algorithm::{Standing, WindowRule};
use crate::bucket::new_key::NewKey;
use crate::bucket::spend_result::LocalAsk;
use crate::bucket::table::TableBucket;
use crate::bucket::window_bucket::WindowBucket;
use crate::time::Timestamp;

const PERIOD_US: u64 = 100_000;
/// In the last microsecond of a window, and in the second one of the next.
const BEFORE: u64 = PERIOD_US - 1;
const AFTER: u64 = PERIOD_US + 1;

/// A sliding window of so many tokens.
const fn rule(tokens: u32) -> WindowRule {
    WindowRule { tokens, period_us: PERIOD_US, is_sliding: true, calendar: None }
}
const TWO: WindowRule = rule(2);
const TEN: WindowRule = rule(10);

/// A key that has spent so many tokens of the window before the edge.
fn bucket(spent: u32, rule: &'static WindowRule) -> Arc<WindowBucket> {
    let bucket = Arc::new(WindowBucket::default());
    bucket.start(NewKey::with_credit(0), false);
    assert!(take(&bucket, spent, 0, rule));
    bucket
}

fn take(bucket: &WindowBucket, cost: u32, us: u64, rule: &'static WindowRule) -> bool {
    loop {
        let (ask, now) = (
            LocalAsk { cost, rule, within_us: 0, plan: NewKey::NO_PLAN },
            Timestamp::from_micros(us),
        );
        if let Some(answer) = bucket.try_decide(bucket.load(), ask, now) {
            return answer.is_allowed;
        }
    }
}

/// What the bucket says was spent in the new window and in the one before.
fn spent(bucket: &WindowBucket, rule: &'static WindowRule) -> (u32, u32) {
    let (ask, now) = (
        LocalAsk { cost: 0, rule, within_us: 0, plan: NewKey::NO_PLAN },
        Timestamp::from_micros(AFTER),
    );
    let answer = bucket.try_decide(bucket.load(), ask, now).unwrap();
    let Standing::Window(_, counts) = answer.standing else { panic!("it has windows") };
    (counts.current, counts.previous)
}

#[test]
fn decisions_in_a_new_window_see_all_that_was_spent_before() {
    check("first decisions of a window", || {
        // Of two tokens that were spent, one still counts: one of two is left.
        let rule = &TWO;
        let bucket = bucket(2, rule);
        let other = run(&bucket, move |bucket| take(bucket, 1, AFTER, rule));
        let allowed = take(&bucket, 1, AFTER, rule);
        assert_ne!(allowed, other.join().unwrap(), "one of the two");
        assert_eq!(spent(&bucket, rule), (1, 2));
    });
}

#[test]
fn token_that_is_spent_at_the_end_of_a_window_counts_in_the_next() {
    check("last decision of a window against first ones of the next", || {
        let rule = &TEN;
        let bucket = bucket(1, rule);
        let last = run(&bucket, move |bucket| take(bucket, 1, BEFORE, rule));
        let first = run(&bucket, move |bucket| take(bucket, 1, AFTER, rule));
        assert!(take(&bucket, 1, AFTER, rule));
        assert!(last.join().unwrap() && first.join().unwrap());
        let (current, previous) = spent(&bucket, rule);
        assert_eq!(current + previous, 4, "{current} and {previous}");
    });
}
