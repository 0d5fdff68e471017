//! Clients that keep the limits of other services, tested against this crate's layer in tokio's paused time.

#![cfg(all(feature = "retry", feature = "tower", feature = "testing"))]
#![allow(clippy::disallowed_methods, reason = "clients wait, and ask at once")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use proptest::prelude::*;
use tidegate::http::{HeaderStyle, LimitReport, RateLimit, RateLimitLayer, Reset};
use tidegate::retry::{GaveUp, PaceLayer, Pacer, RateLimitHints, ResponseKind};
use tidegate::testing::ManualClock;
use tidegate::{Limit, Limiter, Quota};
use tokio::time::{Instant, sleep};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, ServiceExt, service_fn};

type Server = BoxCloneSyncService<Request<()>, Response<String>, BoxError>;

/// Of a server: what it allowed and what it denied.
#[derive(Default)]
struct Count {
    allowed: AtomicU32,
    denied: AtomicU32,
}

impl Count {
    fn get(&self) -> (u32, u32) {
        (self.allowed.load(Ordering::Relaxed), self.denied.load(Ordering::Relaxed))
    }
}

/// A server behind a layer, which takes so long to answer.
fn server(quota: Quota, style: HeaderStyle, takes: Duration) -> (Server, Arc<Count>) {
    let clock = ManualClock::new();
    let limiter = Limiter::builder().limit(Limit::new("api", quota)).clock(&clock).build().unwrap();
    let rate_limit = RateLimit::shared(limiter.limit("api").unwrap()).headers(style);
    let served = |_: Request<()>| async { Ok::<_, BoxError>(Response::new(String::new())) };
    let limited = RateLimitLayer::new(rate_limit).layer(service_fn(served));
    let (count, begun) = (Arc::new(Count::default()), Instant::now());
    let (counted, passed) = (count.clone(), Arc::new(Mutex::new(Duration::ZERO)));
    let service = service_fn(move |request| {
        let (limited, counted) = (limited.clone(), counted.clone());
        let (clock, passed) = (clock.clone(), passed.clone());
        async move {
            sleep(takes / 2).await;
            {
                let mut passed = passed.lock().unwrap();
                clock.advance(begun.elapsed().saturating_sub(*passed));
                *passed = begun.elapsed();
            }
            let response: Response<String> = limited.oneshot(request).await?;
            let of_kind = match response.status() {
                StatusCode::OK => &counted.allowed,
                _ => &counted.denied,
            };
            of_kind.fetch_add(1, Ordering::Relaxed);
            sleep(takes / 2).await;
            Ok(response)
        }
    });
    (BoxCloneSyncService::new(service), count)
}

fn request(method: Method) -> Request<()> {
    Request::builder().method(method).body(()).unwrap()
}

/// Asks so often at once; all must be answered.
async fn ask_all(client: &(impl PacedClient + 'static), requests: u32) {
    let asked: Vec<_> = (0..requests)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.oneshot(request(Method::POST)).await })
        })
        .collect();
    for answer in asked {
        assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

trait PacedClient:
    tower::Service<Request<()>, Response = Response<String>, Error = BoxError, Future: Send>
    + Clone
    + Send
{
}

impl<S> PacedClient for S where
    S: tower::Service<Request<()>, Response = Response<String>, Error = BoxError, Future: Send>
        + Clone
        + Send
{
}

const STYLES: [fn() -> HeaderStyle; 3] =
    [HeaderStyle::draft, HeaderStyle::draft_03, || HeaderStyle::x_ratelimit(Reset::Seconds)];

#[tokio::test(start_paused = true)]
async fn client_of_one_server_uses_all_that_is_left_and_is_not_denied() {
    for (style, fields) in STYLES.into_iter().enumerate() {
        let quota = Quota::per_second(10).burst(20);
        let (server, count) = server(quota, fields(), Duration::from_millis(30));
        let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(60)).layer(server);
        let begun = Instant::now();
        ask_all(&client, 220).await;
        assert_eq!(count.get(), (220, 0), "style {style}");
        // The bucket holds 20, and 200 come at ten a second.
        let took = begun.elapsed().as_secs_f64();
        let slack = if style == 0 { 2.0 } else { 6.0 };
        assert!((19.9..20.0 + slack).contains(&took), "style {style}: {took} s");
    }
}

/// Once, the policy of a burst below the rate said `q=200;w=1`, and the client kept to a fifth of its rate.
#[tokio::test(start_paused = true)]
async fn d7_client_keeps_the_rate_of_a_limit_whatever_its_burst_is() {
    for style in [HeaderStyle::draft(), HeaderStyle::draft_with_burst()] {
        for burst in [200, 1000, 2000] {
            let quota = Quota::per_second(1000).burst(burst);
            let (server, count) = server(quota, style, Duration::from_millis(30));
            let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(60)).layer(server);
            let begun = Instant::now();
            ask_all(&client, 3000).await;
            let took = begun.elapsed().as_secs_f64();
            let expected = (3000 - burst) as f64 / 1000.0;
            let slack = 1.2 * expected + 0.1;
            assert!((expected..slack).contains(&took), "burst {burst}: {took} s, {style:?}");
            let (allowed, denied) = count.get();
            assert_eq!(allowed, 3000);
            assert_eq!(denied, 0, "burst {burst}, {style:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn clients_that_share_a_limit_are_answered_at_its_rate() {
    fastrand::seed(1);
    let quota = Quota::per_second(10).burst(30);
    let (server, count) = server(quota, HeaderStyle::draft(), Duration::from_millis(30));
    let begun = Instant::now();
    let client = || {
        let paced = PaceLayer::new(Pacer::new()).within(Duration::from_secs(120));
        paced.layer(server.clone())
    };
    let clients = [client(), client(), client()];
    tokio::join!(ask_all(&clients[0], 50), ask_all(&clients[1], 50), ask_all(&clients[2], 50));
    let (allowed, denied) = count.get();
    assert_eq!(allowed, 150);
    // Each is told what is left for all three.
    assert!(denied < 240, "{denied}");
    let took = begun.elapsed().as_secs_f64();
    // The bucket holds 30, and 120 come at ten a second.
    assert!((11.9..20.0).contains(&took), "{took}");
}

#[tokio::test(start_paused = true)]
async fn call_that_cannot_be_sent_in_time_ends_at_once() {
    let hourly = || Quota::per_hour(1);
    let begun = Instant::now();
    let (silent, count) = server(hourly(), HeaderStyle::none(), Duration::ZERO);
    let client = PaceLayer::new(Pacer::new()).layer(silent);
    ask_all(&client, 1).await;
    let denial = client.clone().oneshot(request(Method::GET)).await.unwrap();
    assert_eq!(denial.status(), StatusCode::TOO_MANY_REQUESTS, "the denial itself is handed on");
    let error = client.oneshot(request(Method::GET)).await.unwrap_err();
    assert!(error.is::<GaveUp>(), "{error}");
    assert_eq!((count.get(), begun.elapsed()), ((1, 1), Duration::ZERO));

    let (telling, count) = server(hourly(), HeaderStyle::draft(), Duration::ZERO);
    let client = PaceLayer::new(Pacer::new()).layer(telling);
    ask_all(&client, 1).await;
    let error = client.oneshot(request(Method::GET)).await.unwrap_err();
    assert!(error.is::<GaveUp>(), "{error}");
    assert_eq!((count.get(), begun.elapsed()), ((1, 0), Duration::ZERO));
}

/// A server that always says this, and when it was asked.
fn saying(
    status: StatusCode,
    headers: HeaderMap,
) -> (impl PacedClient + 'static, Arc<Mutex<Vec<Duration>>>) {
    let (times, begun) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
    let asked = times.clone();
    let server = service_fn(move |_: Request<()>| {
        asked.lock().unwrap().push(begun.elapsed());
        let mut response = Response::new(String::new());
        *response.status_mut() = status;
        *response.headers_mut() = headers.clone();
        async { Ok::<_, BoxError>(response) }
    });
    (server, times)
}

#[tokio::test(start_paused = true)]
async fn backoff_doubles_without_retry_after() {
    let (server, times) = saying(StatusCode::TOO_MANY_REQUESTS, HeaderMap::new());
    let pacer = Pacer::with_backoff(Duration::from_millis(100), Duration::from_secs(2));
    let client = PaceLayer::new(pacer).within(Duration::from_secs(20)).layer(server);
    let denial = client.oneshot(request(Method::POST)).await.unwrap();
    assert_eq!(denial.status(), StatusCode::TOO_MANY_REQUESTS);
    let times = times.lock().unwrap();
    for (attempt, pair) in times.windows(2).enumerate() {
        let longest = Duration::from_millis(100 << attempt.min(10)).min(Duration::from_secs(2));
        let waited = pair[1].saturating_sub(pair[0]);
        // The timer's grain is a millisecond.
        let fits = longest / 2..=longest + Duration::from_millis(1);
        assert!(fits.contains(&waited), "attempt {attempt}: {waited:?} of {longest:?}");
    }
    assert!((12..30).contains(&times.len()), "{} attempts in 20 s", times.len());
    assert!(times.last().unwrap().as_secs() < 20);
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_obeyed_each_time() {
    for told_s in [1, 3] {
        let headers = HeaderMap::from_iter([(http::header::RETRY_AFTER, told_s.into())]);
        let (server, times) = saying(StatusCode::TOO_MANY_REQUESTS, headers);
        let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(60)).layer(server);
        let calls = (0..5).map(|_| client.clone().oneshot(request(Method::GET)));
        let calls: Vec<_> = calls.map(tokio::spawn).collect();
        for call in calls {
            let denial = call.await.unwrap().unwrap();
            assert_eq!(denial.status(), StatusCode::TOO_MANY_REQUESTS);
        }
        let times = times.lock().unwrap();
        // Those who went ahead of the others, and the others, were all denied.
        let waits = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        let waits: Vec<Duration> = waits.filter(|wait| !wait.is_zero()).collect();
        let told = Duration::from_secs(told_s);
        assert!(waits.len() > 3 && waits.iter().all(|wait| *wait >= told), "{times:?}");
        assert!(times.last().unwrap().as_secs() < 60);
    }
}

#[tokio::test(start_paused = true)]
async fn unavailable_service_gets_only_idempotent_requests_again() {
    for (method, attempts) in [(Method::POST, 1..2), (Method::PATCH, 1..2), (Method::GET, 2..50)] {
        let (server, times) = saying(StatusCode::SERVICE_UNAVAILABLE, HeaderMap::new());
        let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(9)).layer(server);
        let answer = client.oneshot(request(method.clone())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        let count = times.lock().unwrap().len();
        assert!(attempts.contains(&count), "{method}: {count}");
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_call_leaves_no_permit_behind() {
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
    let pacer = Pacer::new();
    let soon = || Instant::now() + hour;
    let one_left = HeaderMap::from_iter([
        (HeaderName::from_static("ratelimit-remaining"), HeaderValue::from(1)),
        (HeaderName::from_static("ratelimit-reset"), HeaderValue::from(60)),
        (HeaderName::from_static("ratelimit-limit"), HeaderValue::from(1)),
    ]);
    let heard = pacer.permit(soon()).await.unwrap().record(StatusCode::OK, &one_left);
    assert_eq!(heard, ResponseKind::Answered);
    let under_way = pacer.permit(soon()).await.unwrap();
    // Two queue, and leave.
    for _ in 0..2 {
        let waiting = tokio::time::timeout(second, pacer.permit(soon())).await;
        assert!(waiting.is_err(), "there is none before the minute is over");
    }
    // What becomes of the one under way is never known.
    drop(under_way);
    let begun = Instant::now();
    let _next = pacer.permit(soon()).await.unwrap();
    let waited = begun.elapsed().as_secs_f64();
    assert!((57.9..58.1).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn first_request_delays_the_others_for_at_most_a_second() {
    let takes = Duration::from_secs(10);
    let (server, count) = server(Quota::per_second(100), HeaderStyle::none(), takes);
    let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(60)).layer(server);
    let begun = Instant::now();
    ask_all(&client, 20).await;
    let took = begun.elapsed().as_secs_f64();
    assert!((11.0..11.1).contains(&took), "{took}");
    assert_eq!(count.get(), (20, 0));
}

fn window(remaining: u64, reset_s: u64) -> HeaderMap {
    HeaderMap::from_iter([
        (HeaderName::from_static("ratelimit-limit"), HeaderValue::from(20)),
        (HeaderName::from_static("ratelimit-remaining"), HeaderValue::from(remaining)),
        (HeaderName::from_static("ratelimit-reset"), HeaderValue::from(reset_s)),
    ])
}

fn within(time: Duration) -> Instant {
    Instant::now() + time
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn status_503_keeps_what_is_left_of_a_window() {
    let pacer = Pacer::new();
    let _ = pacer.permit(within(SECOND)).await.unwrap().record(StatusCode::OK, &window(9, 3000));
    let permit = pacer.permit(within(SECOND)).await.unwrap();
    let denied = permit.record(StatusCode::SERVICE_UNAVAILABLE, &HeaderMap::new());
    assert_eq!(denied, ResponseKind::Denied);
    let permit = pacer.permit(within(SECOND)).await.expect("the back-off is over");
    assert_eq!(permit.record(StatusCode::OK, &HeaderMap::new()), ResponseKind::Answered);
    for left in (0..7).rev() {
        assert!(pacer.permit(within(SECOND)).await.is_ok(), "{left} left");
    }
    assert!(pacer.permit(within(SECOND)).await.is_err(), "nine were left");
}

#[tokio::test(start_paused = true)]
async fn short_deadline_waits_for_the_first_response() {
    let (server, count) = server(Quota::per_second(100), HeaderStyle::draft(), SECOND / 20);
    let client = PaceLayer::new(Pacer::new()).within(SECOND / 2).layer(server);
    ask_all(&client, 20).await;
    assert_eq!(count.get(), (20, 0));
}

#[tokio::test(start_paused = true)]
async fn call_behind_a_patient_one_ends_when_its_deadline_is_too_early() {
    let pacer = Pacer::new();
    let first = pacer.permit(within(SECOND)).await.unwrap();
    let wait = |time| {
        let pacer = pacer.clone();
        tokio::spawn(async move { pacer.permit(within(time)).await.map(drop) })
    };
    let patient = wait(SECOND * 5000);
    let hasty = wait(SECOND * 30);
    tokio::time::sleep(SECOND / 2).await;
    let _ = first.record(StatusCode::OK, &window(0, 3000));
    let begun = Instant::now();
    assert!(hasty.await.unwrap().is_err());
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert_eq!(patient.await.unwrap(), Ok(()));
    assert_eq!(begun.elapsed().as_secs(), 3000);
}

#[tokio::test(start_paused = true)]
async fn late_response_does_not_restore_what_was_used_since() {
    let pacer = Pacer::new();
    let soon = || within(SECOND * 5);
    let _ = pacer.permit(soon()).await.unwrap().record(StatusCode::OK, &window(20, 60));
    let slow = pacer.permit(soon()).await.unwrap();
    for left in (1..19).rev() {
        tokio::time::sleep(SECOND / 100).await;
        let permit = pacer.permit(soon()).await.unwrap();
        let _ = permit.record(StatusCode::OK, &window(left, 60));
    }
    let _ = slow.record(StatusCode::OK, &window(19, 60));
    assert!(pacer.permit(soon()).await.is_err(), "all are used, with the slow one");
}

#[tokio::test(start_paused = true)]
async fn limit_named_only_in_denials_ends_with_the_next_answer() {
    let pacer = Pacer::new();
    let soon = || within(SECOND * 5);
    let denial = HeaderMap::from_iter([
        (HeaderName::from_static("x-ratelimit-remaining"), HeaderValue::from(0)),
        (HeaderName::from_static("x-ratelimit-reset"), HeaderValue::from(1)),
    ]);
    let permit = pacer.permit(soon()).await.unwrap();
    let _ = permit.record(StatusCode::TOO_MANY_REQUESTS, &denial);
    let permit = pacer.permit(soon()).await.unwrap();
    let _ = permit.record(StatusCode::OK, &HeaderMap::new());
    let begun = Instant::now();
    let mut permits = Vec::new();
    for _ in 0..10 {
        permits.push(pacer.permit(soon()).await.unwrap());
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn one_request_is_sent_alone_when_nothing_is_known() {
    let pacer = Pacer::new();
    let soon = || Instant::now() + Duration::from_secs(3600);
    let none_left = HeaderMap::from_iter([
        (HeaderName::from_static("ratelimit-remaining"), HeaderValue::from(0)),
        (HeaderName::from_static("ratelimit-reset"), HeaderValue::from(1)),
    ]);
    let _ = pacer.permit(soon()).await.unwrap().record(StatusCode::OK, &none_left);
    // The one of which the reset tells, and then nobody knows how many more.
    let ahead = pacer.permit(soon()).await.unwrap();
    let second = Duration::from_secs(1);
    let almost = Duration::from_millis(999);
    assert!(tokio::time::timeout(almost, pacer.permit(soon())).await.is_err());
    let waiting = tokio::spawn({
        let (pacer, until) = (pacer.clone(), soon());
        async move { pacer.permit(until).await.map(drop) }
    });
    assert_eq!(ahead.record(StatusCode::OK, &HeaderMap::new()), ResponseKind::Answered);
    assert_eq!(tokio::time::timeout(second, waiting).await.unwrap().unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn missing_response_delays_each_request_by_a_second() {
    let pacer = Pacer::new();
    let soon = || within(SECOND * 5);
    let _ = pacer.permit(soon()).await.unwrap().record(StatusCode::OK, &window(1, 3));
    let used = pacer.permit(soon()).await.unwrap();
    drop(used);
    // The window of twenty that follows is used up, and none of them is heard of.
    let mut hung = Vec::new();
    for _ in 0..20 {
        hung.push(pacer.permit(soon()).await.unwrap());
    }
    let begun = Instant::now();
    for more in 1..4 {
        hung.push(pacer.permit(soon()).await.unwrap());
        assert_eq!(begun.elapsed().as_secs(), more);
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_comes_before_the_reset() {
    let pacer = Pacer::new();
    let mut denial = window(0, 3600);
    denial.insert(http::header::RETRY_AFTER, 36.into());
    let permit = pacer.permit(within(SECOND)).await.unwrap();
    assert_eq!(permit.record(StatusCode::TOO_MANY_REQUESTS, &denial), ResponseKind::Denied);
    let begun = Instant::now();
    let ahead = pacer.permit(within(SECOND * 60)).await.expect("36 s are enough");
    assert_eq!(begun.elapsed().as_secs(), 36);
    let another = tokio::time::timeout(SECOND / 2, pacer.permit(within(SECOND * 60))).await;
    assert!(another.is_err(), "it was said of one request");
    assert_eq!(ahead.record(StatusCode::OK, &window(0, 3564)), ResponseKind::Answered);
    assert!(pacer.permit(within(SECOND * 60)).await.is_err(), "now the reset counts");
}

#[tokio::test(start_paused = true)]
async fn no_wait_is_longer_than_a_day() {
    let pacer = Pacer::new();
    let (hour, day) = (SECOND * 3600, SECOND * 86_400);
    let monthly = HeaderMap::from_iter([
        (HeaderName::from_static("ratelimit-policy"), r#""m";q=10;w=2592000"#.parse().unwrap()),
        (HeaderName::from_static("ratelimit"), r#""m";r=0;t=3600"#.parse().unwrap()),
    ]);
    let _ = pacer.permit(within(hour)).await.unwrap().record(StatusCode::OK, &monthly);
    drop(pacer.permit(within(hour * 2)).await.unwrap());
    assert!(pacer.permit(within(hour)).await.is_err(), "the next one comes in three days");
    assert!(pacer.permit(within(day + hour)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn permit_of_an_unsent_request_is_given_back() {
    let (server, _) = saying(StatusCode::OK, HeaderMap::new());
    let busy = tower::limit::ConcurrencyLimit::new(server, 1);
    let mut other = busy.clone();
    std::future::poll_fn(|context| tower::Service::poll_ready(&mut other, context)).await.unwrap();
    let pacer = Pacer::new();
    let _ = pacer.permit(within(SECOND)).await.unwrap().record(StatusCode::OK, &window(3, 3600));
    let client = PaceLayer::new(pacer.clone()).within(SECOND).layer(busy);
    for _ in 0..3 {
        let error = client.clone().oneshot(request(Method::GET)).await.unwrap_err();
        assert!(error.is::<GaveUp>(), "{error}");
    }
    for left in (0..3).rev() {
        assert!(pacer.permit(within(SECOND)).await.is_ok(), "{left} left");
    }
    assert!(pacer.permit(within(SECOND)).await.is_err(), "three were left");
}

proptest! {
    #[test]
    fn fields_of_this_crate_are_read_back(
        tokens in 1..1_000_000_u64,
        burst in 1..1_000_000_u64,
        cost in 1..1000_u32,
        style in 0..STYLES.len(),
    ) {
        let limit = Limit::new("api", Quota::per_minute(tokens).burst(burst));
        let clock = ManualClock::new();
        let limiter = Limiter::builder().limit(limit).clock(&clock).build().unwrap();
        let api = limiter.limit("api").unwrap();
        let decision = api.check_n("a", cost.min(u32::try_from(burst).unwrap())).unwrap();
        let mut headers = HeaderMap::new();
        STYLES[style]().write(&[LimitReport::from(decision)], &mut headers);
        let read = RateLimitHints::read(&headers, SystemTime::UNIX_EPOCH).allowance.unwrap();
        prop_assert_eq!(read.remaining, decision.remaining());
        let quota = if style == 0 { tokens } else { decision.burst() };
        prop_assert_eq!(read.quota, Some(quota));
        let told = if style == 0 { decision.next_token_after() } else { decision.reset_after() };
        let told_s = told.as_micros().div_ceil(1_000_000) as u64;
        prop_assert_eq!(read.next_after, Some(Duration::from_secs(told_s)));
        prop_assert_eq!(read.step.is_some(), style == 0);
    }

    #[test]
    fn no_response_makes_the_pacer_panic_or_hang(
        fields in proptest::collection::vec((0..8_usize, field_value()), 0..6),
        status in prop::sample::select(vec![200_u16, 404, 429, 503]),
    ) {
        const NAMES: [&str; 8] = [
            "retry-after", "date", "ratelimit", "ratelimit-policy", "ratelimit-remaining",
            "ratelimit-reset", "x-ratelimit-remaining", "x-ratelimit-reset",
        ];
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.append(NAMES[name], value);
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let pacer = Pacer::new();
            for _ in 0..3 {
                // After a day at most somebody may ask again.
                let until = Instant::now() + Duration::from_secs(2 * 86_400);
                let permit = pacer.permit(until).await.unwrap();
                let _ = permit.record(StatusCode::from_u16(status).unwrap(), &headers);
            }
        });
    }
}

/// Numbers at their edges, what is nearly a field, and anything.
fn field_value() -> impl Strategy<Value = Vec<u8>> {
    let number = prop::sample::select(vec![
        "0",
        "1",
        "59",
        "999999999999999",
        "1000000000000000",
        "18446744073709551615",
        "99999999999999999999",
        "1704067230",
        "-1",
        "1.5",
    ]);
    let list = (number.clone(), number.clone())
        .prop_map(|(r, t)| format!("\"api\";r={r};t={t};q={t};w={r}").into_bytes());
    let dictionary = (number.clone(), number.clone())
        .prop_map(|(r, t)| format!("limit={t}, remaining={r}, reset={t}").into_bytes());
    let date = Just(b"Sun, 06 Nov 1994 08:49:47 GMT".to_vec());
    let any = proptest::collection::vec(any::<u8>(), 0..40);
    prop_oneof![number.prop_map(|text| text.as_bytes().to_vec()), list, dictionary, date, any]
}
