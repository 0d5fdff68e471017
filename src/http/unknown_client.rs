//! Reports of requests whose client's address is not known, because the server does not say where connections come
//! from, or because a trusted proxy does not report its client.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{error, warn};

use crate::limiter::ActiveLimit;

/// The log says each once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Reports what a service does not know of its clients.
#[derive(Default)]
pub(super) struct UnknownClients {
    unknown_peers: LastLogged,
    unreported: LastLogged,
}

impl fmt::Debug for UnknownClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnknownClients")
    }
}

impl UnknownClients {
    /// Counts a request of an unknown peer, and logs it unless that was done less than a minute ago.
    pub(super) fn unknown_peer(&self, limit: &ActiveLimit) {
        count(UNKNOWN_PEERS, limit, 1);
        self.log_unknown_peer(limit.name());
    }

    /// Logs a request of an unknown peer unless that was done less than a minute ago.
    pub(super) fn log_unknown_peer(&self, limit: &str) {
        if self.unknown_peers.is_due() {
            error!(
                limit,
                "the address of the client is unknown, so its request is answered with status 500: serve axum by \
                 into_make_service_with_connect_info::<SocketAddr>(), or insert tidegate::http::Peer into the \
                 request's extensions; connections of a Unix socket have no address: insert Peer there too, or \
                 limit by another key, or use RateLimitLayer::shared"
            );
        }
    }

    /// Counts a request of an unreported client that was denied, and logs it unless that was done less than a
    /// minute ago.
    pub(super) fn unreported(&self, limit: &ActiveLimit) {
        count(UNREPORTED, limit, 1);
        if self.unreported.is_due() {
            warn!(
                limit = limit.name(),
                "a request was denied whose client is not known beyond an address that is trusted as a proxy: the \
                 proxy's header field has no address of it, so all such requests count by the proxy's own; let the \
                 proxy set the field that ClientIp reads; if the address is a client's, trust only the networks of \
                 proxies"
            );
        }
    }
}

/// When something was logged last.
#[derive(Default)]
struct LastLogged(Mutex<Option<Instant>>);

impl LastLogged {
    #[allow(clippy::disallowed_methods, reason = "requests come from outside of any driver")]
    fn is_due(&self) -> bool {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// A counter: its name, and what it counts.
type Counter = (&'static str, &'static str);

const UNKNOWN_PEERS: Counter = (
    "tidegate_unknown_peer_requests_total",
    "Requests answered with status 500 because the client's address is unknown, by limit",
);
const UNREPORTED: Counter = (
    "tidegate_unreported_client_denials_total",
    "Denied requests whose client a trusted proxy did not report, by limit",
);

/// Counters begin at 0.
pub(super) fn show_at_start(limit: &ActiveLimit) {
    for counter in [UNKNOWN_PEERS, UNREPORTED] {
        describe(counter);
        count(counter, limit, 0);
    }
}

#[cfg(feature = "metrics")]
fn describe((name, description): Counter) {
    metrics::describe_counter!(name, metrics::Unit::Count, description);
}

#[cfg(feature = "metrics")]
fn count((name, _): Counter, limit: &ActiveLimit, requests: u64) {
    let mut labels = limit.shared.labels.clone();
    labels.push(metrics::Label::new("limit", limit.name()));
    metrics::counter!(name, labels).increment(requests);
}

#[cfg(not(feature = "metrics"))]
fn describe(_: Counter) {}

#[cfg(not(feature = "metrics"))]
fn count(_: Counter, _: &ActiveLimit, _: u64) {}
