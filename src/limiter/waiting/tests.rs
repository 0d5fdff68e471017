//! What callers who wait are promised.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use super::*;
use crate::algorithm::{FixedWindow, LeakyBucket, Rule};
use crate::builder::local;
use crate::driver::manual::ManualClock;
use crate::limit::Limit;
use crate::limiter::Limiter;
use crate::overrides::{Override, Switch};
use crate::quota::Quota;

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

fn limiter(rule: impl Into<Rule>, max_waiting: u32) -> (ManualClock, Limiter, ActiveLimit) {
    let clock = ManualClock::new();
    let limit = Limit::new("x", rule).max_waiting(max_waiting);
    let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
    let limit = limiter.limit("x").unwrap();
    (clock, limiter, limit)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets time pass, and the limiter's task act on it.
async fn pass(clock: &ManualClock, limiter: &Limiter, time: Duration) {
    clock.advance(time);
    limiter.settle().await;
}

/// Callers come one after the other, with these costs. Returns for each millisecond who went on.
async fn turns(rule: impl Into<Rule>, costs: &[u32], for_ms: usize) -> Vec<(usize, usize)> {
    let (clock, limiter, limit) = limiter(rule, 1000);
    let mut waiting: Vec<_> = costs
        .iter()
        .map(|&cost| Some(Box::pin(limit.until_ready_n("key", cost, 60 * SECOND))))
        .collect();
    let mut turns = Vec::new();
    for ms in 0..for_ms {
        // Twice: one who goes on lets the next one ask.
        for _ in 0..2 {
            for (caller, slot) in waiting.iter_mut().enumerate() {
                let Some(future) = slot else { continue };
                if let Poll::Ready(decision) = poll(future.as_mut()) {
                    assert!(decision.unwrap().is_allowed());
                    turns.push((ms, caller));
                    *slot = None;
                }
                limiter.settle().await;
            }
        }
        pass(&clock, &limiter, millis(1)).await;
    }
    turns
}

#[tokio::test]
async fn callers_go_on_in_the_order_in_which_they_came_when_their_tokens_are_there() {
    let bucket = turns(Quota::per_second(10).burst(2), &[2, 1, 2, 1], 450).await;
    assert_eq!(bucket, [(0, 0), (100, 1), (300, 2), (400, 3)]);
    let queue = LeakyBucket::per_second(10).queue(SECOND);
    let queue = turns(queue, &[2, 1, 2, 1], 520).await;
    assert_eq!(queue, [(0, 0), (200, 1), (300, 2), (500, 3)]);
    // The clock begins with a window.
    let window = turns(FixedWindow::new(2, millis(100)), &[2, 1, 2, 1], 350).await;
    assert_eq!(window, [(0, 0), (100, 1), (200, 2), (300, 3)]);
}

#[tokio::test]
async fn no_other_request_takes_what_was_promised_to_a_large_one() {
    let (clock, limiter, limit) = limiter(Quota::per_second(10).burst(5), 1000);
    assert!(limit.check_n("key", 5).unwrap().is_allowed());
    let mut large = pin!(limit.until_ready_n("key", 5, SECOND));
    assert!(poll(large.as_mut()).is_pending());
    for _ in 0..4 {
        pass(&clock, &limiter, millis(100)).await;
        assert!(limit.check("key").is_denied());
        assert!(poll(large.as_mut()).is_pending());
    }
    pass(&clock, &limiter, millis(100)).await;
    let Poll::Ready(Ok(decision)) = poll(large.as_mut()) else { panic!("it has waited 500 ms") };
    assert!(decision.is_allowed());
    assert_eq!(decision.delay(), Duration::ZERO, "it has waited");
}

#[tokio::test]
async fn caller_who_goes_away_gives_back_a_bucket_s_tokens_and_the_last_slot_only() {
    let (_clock, _limiter, bucket) = limiter(Quota::per_second(10).burst(1), 1000);
    let queue = LeakyBucket::per_second(10).queue(SECOND);
    let (_clock, _limiter2, queue) = limiter(queue, 1000);
    for (limit, without_first, without_both) in [(bucket, 200, 200), (queue, 300, 200)] {
        let wait = |key: &str| limit.check(key).retry_after();
        let two = |key: &'static str| {
            assert!(limit.check(key).is_allowed());
            let mut two = [(); 2].map(|()| Box::pin(limit.until_ready(key, SECOND)));
            assert!(two.iter_mut().all(|one| poll(one.as_mut()).is_pending()));
            assert_eq!(wait(key), millis(300));
            two
        };
        let [first, second] = two("last first");
        drop(second);
        assert_eq!(wait("last first"), millis(200));
        drop(first);
        // A queue cannot take back the slot before the second one's. A bucket does not take back what was promised before
        // it took something back.
        let [first, second] = two("first first");
        drop(first);
        assert_eq!(wait("first first"), millis(without_first));
        drop(second);
        assert_eq!(wait("first first"), millis(without_both));
    }
}

#[tokio::test]
async fn caller_who_would_wait_too_long_or_is_one_too_many_is_denied_at_once() {
    let (_clock, _limiter, limit) = limiter(Quota::per_second(10).burst(1), 2);
    assert!(limit.check("key").is_allowed());
    assert!(limit.until_ready("key", millis(99)).await.is_denied());
    let mut two = [(); 2].map(|()| Box::pin(limit.until_ready("key", SECOND)));
    assert!(two.iter_mut().all(|one| poll(one.as_mut()).is_pending()));
    let denied = limit.until_ready("key", SECOND).await;
    assert!(denied.is_denied());
    assert_eq!(denied.retry_after(), millis(300));
    assert!(limit.until_ready("other", SECOND).await.is_allowed(), "it need not wait");
    drop(two);
    let mut next = pin!(limit.until_ready("key", SECOND));
    assert!(poll(next.as_mut()).is_pending(), "there is room again");
}

#[tokio::test]
async fn nobody_overtakes_those_who_wait_in_line_and_lines_are_taken_away() {
    let (clock, limiter, limit) = limiter(FixedWindow::new(1, millis(100)), 1000);
    assert!(limit.check("key").is_allowed());
    let mut first = Box::pin(limit.until_ready("key", SECOND));
    assert!(poll(first.as_mut()).is_pending());
    limiter.settle().await;
    let mut hasty = Box::pin(limit.until_ready("key", Duration::ZERO));
    assert!(poll(hasty.as_mut()).is_pending(), "the driver minds the time");
    pass(&clock, &limiter, millis(100)).await;
    let Poll::Ready(hasty) = poll(hasty.as_mut()) else { panic!("it does not wait") };
    assert!(hasty.is_denied());
    let Poll::Ready(first) = poll(first.as_mut()) else { panic!("its window has begun") };
    assert!(first.is_allowed());
    assert!(limit.waiting().lines.is_empty());
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the test's own thread")]
fn callers_can_wait_without_a_runtime_and_are_denied_if_the_limiter_s_has_ended() {
    let limit = local(LeakyBucket::per_second(50).queue(SECOND)).unwrap();
    let wait = |limit: &ActiveLimit| {
        let mut future = pin!(limit.until_ready("key", SECOND));
        loop {
            match poll(future.as_mut()) {
                Poll::Ready(decision) => return decision,
                Poll::Pending => std::thread::yield_now(),
            }
        }
    };
    assert!((0..3).all(|_| wait(&limit).is_allowed()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit =
        runtime.block_on(async { local(LeakyBucket::per_hour(1).queue(3600 * SECOND)).unwrap() });
    assert!(limit.check("key").is_allowed());
    drop(runtime);
    assert!(wait(&limit).is_denied());
}

/// They were as old as the wait: the queue seemed as long as when the request came.
#[tokio::test]
async fn decision_after_a_wait_is_of_the_time_when_the_request_goes_on() {
    let (clock, limiter, limit) = limiter(LeakyBucket::per_second(10).queue(2 * SECOND), 1000);
    for _ in 0..19 {
        assert!(limit.schedule("key").is_allowed());
    }
    let mut last = pin!(limit.until_ready("key", 2 * SECOND));
    assert!(poll(last.as_mut()).is_pending());
    limiter.settle().await;
    pass(&clock, &limiter, millis(1900)).await;
    let Poll::Ready(decision) = poll(last.as_mut()) else { panic!("its slot is now") };
    assert!(decision.is_allowed());
    assert_eq!((decision.reset_after(), decision.delay()), (millis(100), Duration::ZERO));
}

/// One of two requests at the same time saw no queue, and was denied when the other had been quicker.
#[test]
fn request_that_another_one_overtook_waits_in_the_queue() {
    let limit = local(LeakyBucket::per_second(10).queue(SECOND)).unwrap();
    let both = std::sync::Barrier::new(2);
    let denied = std::thread::scope(|scope| {
        let ask = || {
            let mut denied = 0;
            for key in 0..30_000_u32 {
                both.wait();
                let decision = limit.decide_if_no_wait(&key.to_le_bytes(), 1);
                denied += u32::from(decision.is_some_and(|decision| decision.is_denied()));
            }
            denied
        };
        let other = scope.spawn(ask);
        ask() + other.join().unwrap()
    });
    assert_eq!(denied, 0);
}

/// What a caller in the line of a window of a day is told within two seconds, once `change` has been made.
async fn told_after(change: impl AsyncFnOnce(&Limiter)) -> Option<Decision> {
    let (clock, limiter, limit) = limiter(FixedWindow::per_day(1), 1000);
    assert!(limit.check("key").is_allowed());
    let mut caller = Box::pin(limit.until_ready("key", DAY));
    assert!(poll(caller.as_mut()).is_pending());
    limiter.settle().await;
    change(&limiter).await;
    for _ in 0..2 {
        pass(&clock, &limiter, SECOND).await;
        if let Poll::Ready(decision) = poll(caller.as_mut()) {
            return Some(decision);
        }
    }
    None
}

/// They slept until the window's end, and were allowed then.
#[tokio::test]
async fn callers_in_line_hear_of_blocks_switches_resets_and_new_quotas() {
    assert!(told_after(async |_| ()).await.is_none());
    let block = async |limiter: &Limiter| {
        limiter.overrides().set("x", Override::key("key").block()).await.unwrap();
    };
    let blocked = told_after(block).await.expect("it is told");
    assert!(blocked.is_denied() && blocked.is_override());
    for switch in [Switch::Off, Switch::Shadow] {
        let switched = async |limiter: &Limiter| {
            limiter.overrides().switch("x", switch).await.unwrap();
        };
        let decision = told_after(switched).await.expect("it is told");
        assert!(decision.is_allowed(), "{switch:?}");
        assert_eq!(decision.is_shadow_denied(), switch == Switch::Shadow);
    }
    let reset = async |limiter: &Limiter| limiter.limit("x").unwrap().reset("key").await.unwrap();
    assert!(told_after(reset).await.expect("it is told").is_allowed());
    let update = async |limiter: &Limiter| {
        limiter.update([Limit::new("x", FixedWindow::per_day(2))]).unwrap();
    };
    let updated = told_after(update).await.expect("it is told");
    assert_eq!((updated.is_allowed(), updated.burst()), (true, 2));
}

/// All but the first were counted as denied, though they would have been held and then admitted.
#[tokio::test]
async fn shadow_mode_counts_as_denied_only_what_no_queue_would_hold() {
    let queue = LeakyBucket::per_second(10).queue(2 * SECOND);
    for rule in [Rule::from(queue), Rule::from(Quota::per_second(10).burst(1))] {
        let (_, limiter, limit) = limiter(rule, 100);
        limiter.overrides().switch("x", Switch::Shadow).await.unwrap();
        let denied = async |within| {
            let decision = limit.until_ready("key", within).await;
            assert!(decision.is_allowed() && decision.delay().is_zero(), "{rule:?}");
            decision.is_shadow_denied()
        };
        for request in 0..21 {
            assert!(!denied(2 * SECOND).await, "{rule:?}: {request}");
        }
        assert!(denied(2 * SECOND).await, "{rule:?}");
        assert!(limit.handle("key").until_ready(2 * SECOND).await.is_shadow_denied(), "{rule:?}");
    }
}

/// Those behind the first asked the limit's rule before they looked, and one was admitted.
#[tokio::test]
async fn all_callers_in_a_line_follow_what_holds_for_the_key() {
    for is_block in [true, false] {
        let (clock, limiter, limit) = limiter(FixedWindow::new(1, SECOND), 1000);
        assert!(limit.check("key").is_allowed());
        let wait = || Box::pin(limit.until_ready("key", 60 * SECOND));
        let mut callers = [wait(), wait(), wait()];
        for caller in &mut callers {
            assert!(poll(caller.as_mut()).is_pending());
        }
        limiter.settle().await;
        let overrides = limiter.overrides();
        if is_block {
            overrides.set("x", Override::key("key").block()).await.unwrap();
        } else {
            overrides.switch("x", Switch::Off).await.unwrap();
        }
        pass(&clock, &limiter, 2 * SECOND).await;
        for caller in &mut callers {
            let Poll::Ready(decision) = poll(caller.as_mut()) else { panic!("it is told") };
            assert_eq!((decision.is_allowed(), decision.is_override()), (!is_block, true));
        }
    }
}

/// The places for callers were taken for tokens.
#[tokio::test]
async fn shadow_mode_takes_ahead_what_a_caller_of_many_tokens_would_wait_for() {
    let (_, limiter, limit) = limiter(Quota::per_second(10).burst(5), 1);
    limiter.overrides().switch("x", Switch::Shadow).await.unwrap();
    for denied in [false, false, true] {
        let decision = limit.until_ready_n("key", 5, 2 * SECOND).await.unwrap();
        assert_eq!(decision.is_shadow_denied(), denied);
    }
}

/// An hour of requests took tokens that nobody would have waited for, and the key was denied for an hour once the limit was on.
#[tokio::test]
async fn shadow_mode_takes_no_more_ahead_than_may_wait() {
    let (clock, limiter, limit) = limiter(Quota::per_second(10).burst(1), 5);
    limiter.overrides().switch("x", Switch::Shadow).await.unwrap();
    let mut denied = 0;
    for _ in 0..2000 {
        let decision = limit.until_ready("key", 3600 * SECOND).await;
        assert!(decision.is_allowed());
        denied += u32::from(decision.is_shadow_denied());
    }
    assert!((1990..=1996).contains(&denied), "{denied}");
    limiter.overrides().switch("x", Switch::On).await.unwrap();
    pass(&clock, &limiter, SECOND).await;
    assert!(limit.check("key").is_allowed());
}
