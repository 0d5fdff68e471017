//! Requests whose client's address is not known, because the server does not say where connections come from, or
//! because a trusted proxy does not report its client.

#![cfg(all(feature = "tower", feature = "testing"))]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{Request, Response, StatusCode};
use tidegate::http::{ClientIp, KeyOf, KeyedLimit, OnMissingKey, Peer, RateLimit, RateLimitLayer};
use tidegate::{ActiveLimit, Quota};
use tokio::sync::Mutex;
use tower::{Layer, ServiceExt, service_fn};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// What is logged is cached for the whole process, by the subscriber of the thread that logs it first: a test that
/// counts logs must not run beside one that has no subscriber.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

fn limit() -> ActiveLimit {
    tidegate::local(Quota::per_hour(1)).unwrap()
}

async fn status(layer: &RateLimitLayer<String>) -> StatusCode {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let service = layer.layer(service_fn(served));
    service.oneshot(Request::new(())).await.unwrap().status()
}

/// Once, all clients shared one bucket, and nothing said so.
#[tokio::test]
async fn request_of_an_unknown_peer_gets_500_and_no_shared_bucket() {
    let _alone = ONE_AT_A_TIME.lock().await;
    for rate_limit in [
        RateLimit::per_client(limit()),
        KeyedLimit::per_client(limit()).on_missing_key(OnMissingKey::Unlimited).into(),
        KeyedLimit::per_client(limit())
            .on_missing_key(OnMissingKey::Refused(StatusCode::UNAUTHORIZED))
            .into(),
        KeyedLimit::new(limit(), KeyOf::shared().and(KeyOf::client(ClientIp::peer()))).into(),
    ] {
        let layer = RateLimitLayer::new(rate_limit);
        for _ in 0..3 {
            assert_eq!(status(&layer).await, StatusCode::INTERNAL_SERVER_ERROR, "{layer:?}");
        }
    }
    let chosen = KeyedLimit::per_client(limit()).on_missing_key(OnMissingKey::Shared);
    for shared in [RateLimitLayer::new(chosen), RateLimitLayer::shared(limit())] {
        assert_eq!(status(&shared).await, StatusCode::OK);
        assert_eq!(status(&shared).await, StatusCode::TOO_MANY_REQUESTS);
    }
}

/// Counts logs of a level.
#[derive(Clone)]
struct Logs(Level, Arc<AtomicU32>);

impl Logs {
    fn of(level: Level) -> Self {
        Self(level, Arc::default())
    }
}

impl Subscriber for Logs {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == self.0
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn unknown_peer_is_logged_at_most_once_a_minute() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let errors = Logs::of(Level::ERROR);
    let _guard = tracing::subscriber::set_default(errors.clone());
    let layer = RateLimitLayer::per_client(limit());
    for _ in 0..3 {
        assert_eq!(status(&layer).await, StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(errors.1.load(Ordering::Relaxed), 1);
}

/// A layer of one request an hour for each client, behind a trusted proxy. Once, a proxy that reported no
/// client made one client of all, and nothing said so.
fn behind_proxy() -> RateLimitLayer<String> {
    let client = ClientIp::peer().behind_networks(["10.0.0.0/8".parse().unwrap()]);
    RateLimitLayer::new(KeyedLimit::new(limit(), KeyOf::client(client)))
}

/// What a request through the proxy is answered, which reports this client.
async fn ask_behind_proxy(
    layer: &RateLimitLayer<String>,
    forwarded_for: Option<&str>,
) -> StatusCode {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let mut request = Request::new(());
    request.extensions_mut().insert(Peer("10.1.2.3:80".parse().unwrap()));
    if let Some(client) = forwarded_for {
        request.headers_mut().insert("x-forwarded-for", client.parse().unwrap());
    }
    layer.layer(service_fn(served)).oneshot(request).await.unwrap().status()
}

#[tokio::test]
async fn denial_by_the_bucket_of_a_proxy_that_reports_no_client_is_logged_once_a_minute() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let warnings = Logs::of(Level::WARN);
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let layer = behind_proxy();
    for client in ["203.0.113.9", "203.0.113.9", "203.0.113.8"] {
        ask_behind_proxy(&layer, Some(client)).await;
    }
    assert_eq!(ask_behind_proxy(&layer, None).await, StatusCode::OK);
    assert_eq!(warnings.1.load(Ordering::Relaxed), 0, "a health check of the proxy is fine");
    for reported in [None, Some("unknown"), None] {
        assert_eq!(ask_behind_proxy(&layer, reported).await, StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!(warnings.1.load(Ordering::Relaxed), 1);
}

#[cfg(feature = "metrics")]
mod counter {
    use std::sync::atomic::AtomicU64;

    use metrics::{
        Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };

    use tidegate::{Limit, Limiter};

    use super::*;

    /// Keeps the counter of this name.
    struct Kept {
        name: &'static str,
        value: Arc<AtomicU64>,
        registrations: AtomicU32,
    }

    impl Recorder for Kept {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            if key.name() != self.name {
                return Counter::noop();
            }
            let labels: Vec<_> = key.labels().map(|label| (label.key(), label.value())).collect();
            assert_eq!(labels, [("limiter", "edge"), ("limit", "api")]);
            self.registrations.fetch_add(1, Ordering::Relaxed);
            Counter::from_arc(self.value.clone())
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    /// What the counter of this name has after requests to a layer of the limit `api` of the limiter `edge`; it is
    /// there before the first one.
    fn counted(name: &'static str, client: ClientIp, peer: Option<&str>, requests: usize) -> u64 {
        let kept = Kept { name, value: Arc::default(), registrations: AtomicU32::new(0) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        metrics::with_local_recorder(&kept, || {
            runtime.block_on(async {
                let limit = Limit::new("api", Quota::per_hour(1));
                let limiter = Limiter::builder().name("edge").limit(limit).build().unwrap();
                let limit = KeyedLimit::new(limiter.limit("api").unwrap(), KeyOf::client(client));
                let layer = RateLimitLayer::<String>::new(limit);
                assert_eq!(kept.registrations.load(Ordering::Relaxed), 1, "it is there at 0");
                for _ in 0..requests {
                    let served = |_: Request<()>| async {
                        Ok::<_, Infallible>(Response::new(String::new()))
                    };
                    let mut request = Request::new(());
                    if let Some(peer) = peer {
                        request.extensions_mut().insert(Peer(peer.parse().unwrap()));
                    }
                    layer.layer(service_fn(served)).oneshot(request).await.unwrap();
                }
            });
        });
        kept.value.load(Ordering::Relaxed)
    }

    #[test]
    fn requests_of_unknown_peers_are_counted() {
        let _alone = ONE_AT_A_TIME.blocking_lock();
        let name = "tidegate_unknown_peer_requests_total";
        assert_eq!(counted(name, ClientIp::peer(), None, 3), 3);
    }

    #[test]
    fn denials_by_the_bucket_of_a_proxy_that_reports_no_client_are_counted() {
        let _alone = ONE_AT_A_TIME.blocking_lock();
        let name = "tidegate_unreported_client_denials_total";
        let proxied = || ClientIp::peer().behind_hops(1);
        assert_eq!(counted(name, proxied(), Some("10.1.2.3:80"), 3), 2);
        assert_eq!(counted(name, ClientIp::peer(), Some("10.1.2.3:80"), 3), 0);
    }
}
