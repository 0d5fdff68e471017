//! A decision about a key that is known allocates nothing, whatever it says and however the key was
//! left.

#![cfg(feature = "testing")]

use std::time::Duration;

use allocation_counter::measure;
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, FixedWindow, LeakyBucket, Limit, Limiter, Quota, Rule, SlidingLog, SlidingWindow,
};

/// A short key, and the longest one.
fn keys() -> [String; 2] {
    ["user:0123456789".to_owned(), "k".repeat(512)]
}

fn limiter(clock: &ManualClock, quota: Quota) -> (Limiter, ActiveLimit) {
    let limiter = Limiter::builder()
        .limit(Limit::new("api", quota))
        .store(ScriptedStore::new(clock))
        .clock(clock)
        .build()
        .expect("a good limit");
    let api = limiter.limit("api").expect("it was built with it");
    (limiter, api)
}

/// Lets the driver do what is due for so long.
async fn pass(limiter: &Limiter, clock: &ManualClock, time: Duration) {
    for _ in 0..time.as_millis() / 10 {
        clock.advance(Duration::from_millis(10));
        limiter.settle().await;
    }
}

/// Allocations of this thread meanwhile.
fn allocations(decide: impl FnOnce()) -> u64 {
    measure(decide).count_total
}

#[tokio::test]
async fn a_known_key_costs_no_allocation_allowed_or_denied_by_key_or_by_handle() {
    for key in keys().iter().map(String::as_str) {
        let clock = ManualClock::new();
        let (limiter, api) = limiter(&clock, Quota::per_second(1000).burst(100));
        assert!(allocations(|| drop(api.handle("another"))) > 0, "they are counted");
        let handle = api.handle(key);
        for _ in 0..50 {
            for _ in 0..20 {
                let _ = api.check(key);
            }
            pass(&limiter, &clock, Duration::from_millis(10)).await;
        }
        let (mut allowed, mut denied) = (0, 0);
        let count = allocations(|| {
            for _ in 0..500 {
                for decision in [api.check(key), handle.check()] {
                    allowed += u64::from(decision.is_allowed());
                    denied += u64::from(decision.is_denied());
                }
            }
            let _ = api.check_n(key, 50).unwrap();
        });
        assert!(allowed > 0 && denied > 0, "{allowed} allowed, {denied} denied");
        assert_eq!(count, 0, "allocations in {} decisions", allowed + denied);
    }
}

/// Where one of the limits is used up, what was spent of the others goes back.
#[test]
fn decision_about_several_limits_of_a_known_key_costs_no_allocation() {
    let clock = ManualClock::new();
    let limit = |name, tokens| Limit::new(name, Quota::per_hour(tokens)).local();
    let limiter = Limiter::builder()
        .limit(limit("a", 1000))
        .limit(limit("b", 100))
        .limit(limit("c", 1000))
        .clock(&clock)
        .build()
        .unwrap();
    let group = limiter.group(["a", "b", "c"]).unwrap();
    let _ = group.check("key");
    let mut denied = 0;
    let count = allocations(|| {
        denied = (0..200).filter(|_| group.check("key").is_denied()).count();
    });
    assert_eq!((denied, count), (101, 0));
}

#[tokio::test]
async fn decision_by_several_leases_of_a_known_key_costs_no_allocation() {
    let clock = ManualClock::new();
    let limit = |name| Limit::new(name, Quota::per_second(1000).burst(100));
    let limiter = Limiter::builder()
        .limit(limit("a"))
        .limit(limit("b"))
        .store(ScriptedStore::new(&clock))
        .clock(&clock)
        .build()
        .unwrap();
    let group = limiter.group(["a", "b"]).unwrap();
    for _ in 0..50 {
        for _ in 0..20 {
            let _ = group.check("key");
        }
        pass(&limiter, &clock, Duration::from_millis(10)).await;
    }
    let mut allowed = 0;
    let count = allocations(|| {
        allowed = (0..500).filter(|_| group.check("key").is_allowed()).count();
    });
    assert!(allowed > 0 && allowed < 500, "{allowed} allowed");
    assert_eq!(count, 0);
}

#[test]
fn decisions_about_a_known_key_allocate_only_when_a_log_grows() {
    let second = Duration::from_secs(1);
    let rules: [(Rule, u64); 5] = [
        (Quota::per_second(100).into(), 0),
        (LeakyBucket::per_second(100).queue(second).into(), 0),
        (FixedWindow::per_second(100).into(), 0),
        (SlidingWindow::per_second(100).into(), 0),
        // From 4 entries to 128 by doubling.
        (SlidingLog::per_second(100).into(), 5),
    ];
    for (rule, expected) in rules {
        let clock = ManualClock::new();
        let limiter = Limiter::builder().limit(Limit::new("x", rule)).clock(&clock).build();
        let limit = limiter.expect("a good limit").limit("x").expect("it was built with it");
        let _ = limit.check("key");
        let (mut allowed, mut denied) = (0, 0);
        let count = allocations(|| {
            for _ in 0..300 {
                clock.advance(Duration::from_millis(1));
                let decision = limit.schedule("key");
                allowed += u64::from(decision.is_allowed());
                denied += u64::from(decision.is_denied());
            }
        });
        assert!(allowed >= 99 && denied > 0, "{rule:?}: {allowed} allowed, {denied} denied");
        assert!(count <= expected, "{rule:?}: {count} allocations");
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a thread that has not decided yet")]
fn first_local_decision_of_a_thread_costs_no_allocation() {
    let limit = tidegate::local(Quota::per_second(1000)).unwrap();
    assert!(limit.check("user").is_allowed());
    let count = std::thread::scope(|scope| {
        let first = scope.spawn(|| allocations(|| _ = limit.check("user")));
        first.join().unwrap()
    });
    assert_eq!(count, 0);
}

#[tokio::test]
async fn a_key_that_has_rested_costs_no_allocation_when_it_is_asked_for_again() {
    for key in keys().iter().map(String::as_str) {
        let clock = ManualClock::new();
        let (limiter, api) = limiter(&clock, Quota::per_second(1000).burst(100));
        for _ in 0..3 {
            // The engine has closed its books on it by now, and does not know it any more.
            pass(&limiter, &clock, Duration::from_secs(3)).await;
            let mut allowed = false;
            let count = allocations(|| allowed = api.check(key).is_allowed());
            assert!(allowed);
            if clock.now().as_micros() > 4_000_000 {
                assert_eq!(count, 0, "allocations");
            }
            limiter.settle().await;
        }
    }
}

#[cfg(feature = "tower")]
mod layer {
    use std::convert::Infallible;
    use std::future::{Ready, ready};
    use std::task::{Context, Poll, Waker};

    use http::{HeaderMap, Request, Response};
    use tidegate::http::{
        ClientIp, HeaderStyle, KeyOf, KeyedLimit, Peer, RateLimit, RateLimitLayer,
    };
    use tower::{Layer, Service, service_fn};

    use super::*;

    /// Allocations for an allowed request of a known key, by a service whose responses have room for more fields.
    fn allocations_by(rate_limit: RateLimit) -> u64 {
        let served = |mut request: Request<HeaderMap>| -> Ready<Result<_, Infallible>> {
            let mut response = Response::new(String::new());
            *response.headers_mut() = std::mem::take(request.body_mut());
            ready(Ok(response))
        };
        let mut service = RateLimitLayer::new(rate_limit).layer(service_fn(served));
        let mut count = 0;
        for _ in 0..3 {
            let mut request = Request::new(HeaderMap::with_capacity(16));
            request.extensions_mut().insert(Peer("192.0.2.1:80".parse().unwrap()));
            request.headers_mut().insert("x-forwarded-for", "2001:db8::1".parse().unwrap());
            let mut context = Context::from_waker(Waker::noop());
            count = allocations(|| {
                assert!(service.poll_ready(&mut context).is_ready());
                let answer = std::pin::pin!(service.call(request));
                let answer = answer.poll(&mut context);
                assert!(matches!(answer, Poll::Ready(Ok(one)) if one.status().is_success()));
            });
        }
        count
    }

    #[test]
    fn layer_allocates_only_changed_header_fields_for_an_allowed_request() {
        let limiter = Limiter::builder()
            .limit(Limit::new("api", Quota::per_second(1000)))
            .limit(Limit::new("upload", Quota::per_second(10)))
            .build()
            .unwrap();
        let limit = |name: &str| {
            let client = ClientIp::peer().behind_networks(["192.0.2.0/24".parse().unwrap()]);
            let key = KeyOf::client(client).and(KeyOf::client(ClientIp::peer()).hashed());
            KeyedLimit::new(limiter.limit(name).unwrap(), key)
        };
        let one = |style: HeaderStyle| RateLimit::new(limit("api")).headers(style);
        let open = |is_charged: bool| {
            RateLimit::new(limit("api").charge_if(move |_| is_charged)).headers(HeaderStyle::none())
        };
        let expected = [
            (one(HeaderStyle::none()), 0),
            (one(HeaderStyle::none()).without_waiting(), 0),
            (one(HeaderStyle::none()).and(limit("upload")), 0),
            (one(HeaderStyle::draft_03()), 3),
            (one(HeaderStyle::draft()), 1),
            // A pinned key, and what the response decides about.
            (open(true), 4),
            (open(false), 4),
        ];
        for (rate_limit, count) in expected {
            let described = format!("{rate_limit:?}");
            assert_eq!(allocations_by(rate_limit), count, "{described}");
        }
    }
}
