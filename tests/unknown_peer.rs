//! Requests whose client address is unknown, because the server does not say where connections come from.

#![cfg(all(feature = "tower", feature = "testing"))]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{Request, Response, StatusCode};
use tidegate::http::{ClientIp, KeyOf, KeyedLimit, OnMissingKey, RateLimit, RateLimitLayer};
use tidegate::{ActiveLimit, Quota};
use tower::{Layer, ServiceExt, service_fn};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

fn limit() -> ActiveLimit {
    tidegate::local(Quota::per_hour(1)).unwrap()
}

async fn status(layer: &RateLimitLayer<String>) -> StatusCode {
    let served = |_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let service = layer.layer(service_fn(served));
    service.oneshot(Request::new(())).await.unwrap().status()
}

/// Finding D4: all clients shared one bucket, and nothing said so.
#[tokio::test]
async fn d4_request_of_an_unknown_peer_gets_500_and_no_shared_bucket() {
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

/// Counts error logs.
#[derive(Clone, Default)]
struct Errors(Arc<AtomicU32>);

impl Subscriber for Errors {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::ERROR
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn d4_unknown_peer_is_logged_at_most_once_a_minute() {
    let errors = Errors::default();
    let _guard = tracing::subscriber::set_default(errors.clone());
    let layer = RateLimitLayer::per_client(limit());
    for _ in 0..3 {
        assert_eq!(status(&layer).await, StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(errors.0.load(Ordering::Relaxed), 1);
}

#[cfg(feature = "metrics")]
mod counter {
    use std::sync::atomic::AtomicU64;

    use metrics::{
        Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };

    use super::*;

    /// Keeps the counter of unknown peers.
    #[derive(Default)]
    struct Kept(Arc<AtomicU64>);

    impl Recorder for Kept {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            if key.name() != "tidegate_unknown_peer_requests_total" {
                return Counter::noop();
            }
            let labels: Vec<_> = key.labels().map(|label| (label.key(), label.value())).collect();
            assert_eq!(labels, [("limit", "local")]);
            Counter::from_arc(self.0.clone())
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn d4_requests_of_unknown_peers_are_counted() {
        let kept = Kept::default();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        metrics::with_local_recorder(&kept, || {
            runtime.block_on(async {
                let layer = RateLimitLayer::per_client(limit());
                for _ in 0..3 {
                    assert_eq!(status(&layer).await, StatusCode::INTERNAL_SERVER_ERROR);
                }
            });
        });
        assert_eq!(kept.0.load(Ordering::Relaxed), 3);
    }
}
