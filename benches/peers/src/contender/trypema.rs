//! Trypema: a sliding window of counted buckets, local, and local with a Redis behind it.
//!
//! Its hybrid writes what it counted to Redis each interval, and reads Redis in the request path
//! when a key is new, exhausted or its denial has ended: those requests wait.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use trypema::hybrid::{HybridRateLimiterProvider, SyncInterval};
use trypema::local::LocalRateLimiterProvider;
use trypema::redis::{RedisKey, RedisKeyRef};
use trypema::{RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize};

use super::{Contender, by_name, count, strays};
use crate::case::{Case, Keys};
use crate::server::Server;

/// As tidegate's; Trypema's default is 10 ms.
const SYNC_INTERVAL_MS: u64 = 50;
/// Its flush writes four keys a round trip: so long a thousand may take it.
const FLUSHED: Duration = Duration::from_millis(150);

pub fn local(case: &Case) -> Box<dyn Contender> {
    let (rate, window) = quota(case);
    let provider = LocalRateLimiterProvider::builder().window_size(window).build();
    let provider = provider.expect("a good window");
    by_name("trypema local", case, move |name| is_denied(provider.absolute().inc(name, &rate, 1)))
}

pub fn hybrid(case: &Case, server: &Server) -> Box<dyn Contender> {
    let (rate, window) = quota(case);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().expect("a runtime");
    let prefix = server.fresh_name();
    let provider = runtime.block_on(connect(server, &prefix, window));
    let other = runtime.block_on(connect(server, &prefix, window));
    Box::new(Hybrid { rate, provider, other, denied: case.denied, runtime })
}

async fn connect(
    server: &Server,
    prefix: &str,
    window: WindowSize,
) -> Arc<HybridRateLimiterProvider> {
    let connection = server.client().get_connection_manager().await.expect("a server that answers");
    HybridRateLimiterProvider::builder(connection)
        .prefix(RedisKey::try_from(prefix.to_owned()).expect("a good prefix"))
        .sync_interval(SyncInterval::milliseconds_or_panic(SYNC_INTERVAL_MS))
        .window_size(window)
        .build()
        .expect("a good window")
}

fn quota(case: &Case) -> (RateLimit, WindowSize) {
    if case.denied {
        (RateLimit::per_hour_or_panic(100.0), WindowSize::hours_or_panic(1))
    } else {
        (RateLimit::per_second_or_panic(1e9), WindowSize::seconds_or_panic(1))
    }
}

fn is_denied(decision: RateLimitDecision) -> bool {
    !matches!(decision, RateLimitDecision::Allowed)
}

struct Hybrid {
    rate: RateLimit,
    provider: Arc<HybridRateLimiterProvider>,
    /// As on another node: sees only what went through Redis.
    other: Arc<HybridRateLimiterProvider>,
    denied: bool,
    runtime: Runtime,
}

impl Hybrid {
    fn is_denied(&self, name: &str) -> bool {
        let limiter = self.provider.absolute();
        let key = RedisKeyRef::try_from(name).expect("a good key");
        let decision = limiter.try_inc(key, 1).expect("a usable state").unwrap_or_else(|| {
            let key = RedisKey::try_from(name.to_owned()).expect("a good key");
            let asked = limiter.inc(&key, &self.rate, 1);
            self.runtime.block_on(asked).expect("a server that answers")
        });
        is_denied(decision)
    }
}

impl Contender for Hybrid {
    fn name(&self) -> &'static str {
        "trypema hybrid (Redis)"
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64 {
        count(&keys.names[part], isolated, |name| self.is_denied(name))
    }

    fn rest(&self) -> Duration {
        FLUSHED
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        strays(self, keys, self.denied)
    }

    fn check(&self, keys: &Keys) {
        let key = RedisKey::try_from(keys.names[0].clone()).expect("a good key");
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            self.decide(keys, 0..1, false);
            let seen = self.runtime.block_on(self.other.absolute().get(&key));
            if seen.expect("a server that answers") > 0 {
                return;
            }
            assert!(Instant::now() < deadline, "trypema: nothing was synced meanwhile");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
