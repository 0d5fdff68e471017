//! What services do that have no limiter like this one: a store that counts each request, and nodes that count for
//! themselves and tell a store now and then. Both count in fixed windows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{CompareError, sleep};
use crate::store::{Store, namespace};

/// Adds to a window's count, which lives for two windows, and returns it.
const ADD: &str = "local count = redis.call('INCRBY', KEYS[1], ARGV[1])
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return count";

/// A key's window, by number.
type Window = (usize, u64);

/// Counts of windows in a store.
pub(super) struct Counts {
    place: Place,
    period_us: u64,
    calls: AtomicU64,
}

enum Place {
    Memory(Mutex<HashMap<Window, u64>>),
    Redis {
        connection: redis::aio::MultiplexedConnection,
        script: redis::Script,
        namespace: String,
        /// The server counts up to a bound in one command, without a script: Redis from 8.8, Valkey from 9.2.
        has_increx: bool,
    },
}

impl Counts {
    pub(super) async fn open(store: &Store, period_us: u64) -> Result<Arc<Self>, CompareError> {
        let place = match store {
            Store::Memory => Place::Memory(Mutex::default()),
            Store::Redis(address) => {
                let failed = |error: redis::RedisError| CompareError::Started(error.to_string());
                let client = redis::Client::open(address.as_str()).map_err(failed)?;
                let mut connection =
                    client.get_multiplexed_async_connection().await.map_err(failed)?;
                let mut known = redis::cmd("COMMAND");
                let known = known.arg("INFO").arg("INCREX").query_async(&mut connection).await;
                // A name that is not there is told as nil.
                let known: Vec<redis::Value> = known.map_err(failed)?;
                let has_increx = known.iter().any(|command| *command != redis::Value::Nil);
                let script = redis::Script::new(ADD);
                Place::Redis { connection, script, namespace: namespace(), has_increx }
            }
        };
        Ok(Arc::new(Self { place, period_us, calls: AtomicU64::new(0) }))
    }

    /// Adds to the count of a window. `None` if the store does not answer.
    async fn add(&self, window: Window, tokens: u64) -> Option<u64> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match &self.place {
            Place::Memory(counts) => {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                let count = counts.entry(window).or_default();
                *count += tokens;
                Some(*count)
            }
            Place::Redis { connection, script, namespace, .. } => {
                let mut call = script.prepare_invoke();
                call.key(name(namespace, window)).arg(tokens).arg(self.kept_ms());
                call.invoke_async(&mut connection.clone()).await.ok()
            }
        }
    }

    /// How long a window's count is kept.
    fn kept_ms(&self) -> u64 {
        (2 * self.period_us).div_ceil(1000)
    }

    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Asks the store about each request: counted where there is room, or counted first and then compared.
    pub(super) async fn allows(&self, tokens: u64, key: usize, now_us: u64) -> bool {
        let window = (key, now_us / self.period_us);
        let Place::Redis { connection, namespace, has_increx: true, .. } = &self.place else {
            return self.add(window, 1).await.is_some_and(|counted| counted <= tokens);
        };
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut call = redis::cmd("INCREX");
        call.arg(name(namespace, window)).arg("BYINT").arg(1).arg("UBOUND").arg(tokens);
        call.arg("PX").arg(self.kept_ms()).arg("ENX");
        // What it comes to, and what was added.
        let answer: Result<(i64, i64), _> = call.query_async(&mut connection.clone()).await;
        answer.is_ok_and(|(_, added)| added > 0)
    }
}

/// Where a window's count is kept.
fn name(namespace: &str, (key, number): Window) -> String {
    format!("{namespace}:{{{key}}}:{number}")
}

/// A node that counts, and adds what it counted to the store's count once in an interval.
pub(super) struct WriteBehind {
    counts: Arc<Counts>,
    windows: Mutex<HashMap<Window, Seen>>,
}

#[derive(Default)]
struct Seen {
    /// By the store's last word.
    total: u64,
    /// Allowed and not sent.
    pending: u64,
    /// Sent and not answered.
    sent: u64,
}

impl WriteBehind {
    pub(super) fn new(counts: Arc<Counts>) -> Self {
        Self { counts, windows: Mutex::default() }
    }

    fn windows(&self) -> std::sync::MutexGuard<'_, HashMap<Window, Seen>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn allows(&self, tokens: u64, key: usize, now_us: u64) -> bool {
        let window = (key, now_us / self.counts.period_us);
        let mut windows = self.windows();
        let seen = windows.entry(window).or_default();
        let is_allowed = seen.total + seen.pending + seen.sent < tokens;
        seen.pending += u64::from(is_allowed);
        is_allowed
    }

    /// Sends what is pending, and asks for the windows that are asked for, until the task is aborted.
    pub(super) async fn sync(&self, interval: Duration, now_us: impl Fn() -> u64) {
        loop {
            sleep(interval).await;
            let current = now_us() / self.counts.period_us;
            let due: Vec<(Window, u64)> = {
                let mut windows = self.windows();
                windows.retain(|(_, number), seen| *number >= current || seen.pending > 0);
                let take = |(window, seen): (&Window, &mut Seen)| {
                    seen.sent = std::mem::take(&mut seen.pending);
                    (*window, seen.sent)
                };
                windows.iter_mut().map(take).collect()
            };
            for (window, tokens) in due {
                let total = self.counts.add(window, tokens).await;
                if let (Some(total), Some(seen)) = (total, self.windows().get_mut(&window)) {
                    (seen.total, seen.sent) = (total, 0);
                }
            }
        }
    }
}
