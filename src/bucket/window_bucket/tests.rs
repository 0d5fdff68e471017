//! What a window bucket promises.

use std::sync::Arc;

use super::*;

const PERIOD_US: u64 = 100_000;

fn rule(tokens: u32, is_sliding: bool) -> &'static WindowRule {
    Box::leak(Box::new(WindowRule { tokens, period_us: PERIOD_US, is_sliding, calendar: None }))
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

fn new() -> WindowBucket {
    let bucket = WindowBucket::default();
    bucket.start(NewKey::with_credit(0), false);
    bucket
}

fn ask(cost: u32, rule: &'static WindowRule) -> LocalAsk<WindowRule> {
    LocalAsk { cost, rule, within_us: 0, plan: NewKey::NO_PLAN }
}

/// Decides about `cost` tokens: whether they were spent, and the tokens left.
fn take(bucket: &WindowBucket, cost: u32, us: u64, rule: &'static WindowRule) -> (bool, u64) {
    let answer = bucket.try_decide(bucket.load(), ask(cost, rule), at(us)).unwrap();
    (answer.is_allowed, answer.standing.remaining())
}

#[test]
fn cost_of_zero_spends_nothing_and_says_whether_a_token_is_left() {
    let (rule, bucket) = (rule(2, true), new());
    assert_eq!(take(&bucket, 0, 0, rule), (true, 2));
    assert_eq!(take(&bucket, 2, 0, rule), (true, 0));
    assert_eq!(take(&bucket, 0, 0, rule), (false, 0));
}

#[test]
fn thread_that_read_the_time_before_the_window_began_spends_from_the_new_window() {
    let (rule, bucket) = (rule(10, true), new());
    assert_eq!(take(&bucket, 8, 50_000, rule), (true, 2));
    assert_eq!(take(&bucket, 1, PERIOD_US + 1, rule), (true, 2), "7 of 8 still count");
    assert_eq!(take(&bucket, 3, 99_999, rule), (false, 1), "as if the window had just begun");
    assert_eq!(take(&bucket, 1, 99_999, rule), (true, 0));
    assert_eq!(take(&bucket, 0, 2 * PERIOD_US - 1, rule), (true, 8));
}

#[test]
fn denied_request_in_a_new_window_changes_nothing() {
    let (rule, bucket) = (rule(10, true), new());
    assert_eq!(take(&bucket, 8, 0, rule), (true, 2));
    let (word, before) = (bucket.load(), bucket.before[1].load(Ordering::Relaxed));
    assert_eq!(take(&bucket, 9, PERIOD_US + 1, rule), (false, 3));
    assert_eq!((bucket.load(), bucket.before[1].load(Ordering::Relaxed)), (word, before));
}

#[test]
fn window_after_a_quiet_one_begins_with_nothing() {
    let (rule, bucket) = (rule(10, true), new());
    for window in [0, 2, 5, 7] {
        assert_eq!(take(&bucket, 10, window * PERIOD_US, rule), (true, 0), "{window}");
    }
}

#[test]
fn word_of_one_key_is_never_the_word_of_the_next_which_begins_with_nothing() {
    for (is_sliding, counts_for) in [(false, 1), (true, 2)] {
        let (rule, bucket) = (rule(10, is_sliding), new());
        let try_retire = |us: u64| {
            let now = at(us + CLOCK_AGE_MAX_US);
            bucket.try_retire(now, rule, Evictable::Full).is_some()
        };
        assert_eq!(take(&bucket, 10, 0, rule), (true, 0));
        let before = bucket.load();
        // A decision in the next window that does not come to its end: it has written what was spent.
        let spent = Spent { window: Spent::of(before).window + 1, tokens: 10 };
        if is_sliding {
            bucket.before[spent.window as usize % 2].fetch_max(spent.word(), Ordering::AcqRel);
        }
        assert!(!try_retire(counts_for * PERIOD_US - 1), "some of it counts");
        assert!(try_retire(counts_for * PERIOD_US));
        assert!(WindowBucket::is_retired(bucket.load()));
        assert!(!try_retire(counts_for * PERIOD_US), "once");
        bucket.start(NewKey::with_credit(0), false);
        assert_eq!(
            bucket.try_decide(before, ask(1, rule), at(3 * PERIOD_US)),
            None,
            "the key before"
        );
        let begin = counts_for * PERIOD_US;
        assert!(bucket.load() > before);
        assert_eq!(take(&bucket, 10, begin, rule), (true, 0), "the next key is fresh");
    }
}

/// Threads whose time runs from window to window, each at its own pace, spend one key's tokens.
#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own threads")]
fn threads_with_old_readings_never_spend_more_than_a_window_has() {
    const WINDOWS: u64 = 2000;
    let (rule, bucket) = (rule(50, true), Arc::new(new()));
    let spend = || {
        let bucket = bucket.clone();
        move || {
            // Of each window as the bucket has it: what this thread spent.
            let mut spent = vec![0_u64; WINDOWS as usize + 4];
            for us in (0..WINDOWS * PERIOD_US).step_by(PERIOD_US as usize / 40) {
                let seen = bucket.load();
                if let Some(answer) = bucket.try_decide(seen, ask(1, rule), at(us))
                    && answer.is_allowed
                {
                    let window = window_at(rule, at(us)).0.max(Spent::of(seen).window);
                    spent[window as usize] += 1;
                }
            }
            spent
        }
    };
    let threads = [(); 3].map(|()| std::thread::spawn(spend()));
    let spent = threads.map(|thread| thread.join().unwrap());
    let sums: Vec<u64> =
        (0..spent[0].len()).map(|window| spent.iter().map(|one| one[window]).sum()).collect();
    for (window, pair) in sums.windows(2).enumerate() {
        assert!(pair[1] <= 50, "{} in window {window}", pair[1]);
    }
    assert!(sums.iter().sum::<u64>() >= WINDOWS * 25, "{sums:?}");
}

#[test]
fn time_beyond_all_uptime_is_decided_and_makes_no_word_look_evicted() {
    for is_sliding in [false, true] {
        let (rule, bucket) = (rule(2, is_sliding), new());
        for left in [1, 0] {
            assert_eq!(take(&bucket, 1, u64::MAX, rule), (true, left));
            assert!(!WindowBucket::is_retired(bucket.load()));
        }
        assert_eq!(take(&bucket, 1, u64::MAX, rule), (false, 0));
    }
}
