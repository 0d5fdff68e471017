//! The report that the server does not say where connections come from.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::error;

/// The log says it once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(feature = "metrics")]
const COUNTER: &str = "tidegate_unknown_peer_requests_total";

/// Reports requests of unknown peers.
#[derive(Default)]
pub(super) struct UnknownPeerReport {
    last_logged: Mutex<Option<Instant>>,
}

impl fmt::Debug for UnknownPeerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnknownPeerReport")
    }
}

impl UnknownPeerReport {
    /// Counts a request, and logs it unless that was done less than a minute ago.
    pub(super) fn record(&self, limit: &'static str) {
        count(limit);
        if self.is_due() {
            error!(
                limit,
                "the address of the client is unknown, so its request is answered with status 500: serve axum by \
                 into_make_service_with_connect_info::<SocketAddr>(), or insert tidegate::http::Peer into the \
                 request's extensions; connections of a Unix socket have no address: insert Peer there too, or \
                 limit by another key, or use RateLimitLayer::shared"
            );
        }
    }

    #[allow(clippy::disallowed_methods, reason = "requests come from outside of any driver")]
    fn is_due(&self) -> bool {
        let now = Instant::now();
        let mut last = self.last_logged.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

#[cfg(feature = "metrics")]
fn count(limit: &'static str) {
    metrics::describe_counter!(
        COUNTER,
        metrics::Unit::Count,
        "Requests answered with status 500 because the client's address is unknown, by limit"
    );
    metrics::counter!(COUNTER, "limit" => limit).increment(1);
}

#[cfg(not(feature = "metrics"))]
fn count(_: &'static str) {}
