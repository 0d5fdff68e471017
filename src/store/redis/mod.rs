//! The store in Redis or Valkey: carries batches and questions to the scripts in `lua/` and decides nothing.
//!
//! Everything is kept under `tg2:{<namespace>/<lane>}:`. The braces put a lane's records and keys
//! into one slot of a Redis Cluster, so that one script call may touch them all.

mod address;
#[cfg(test)]
mod against_server;
pub(crate) mod exact;
mod fault;
mod link;
pub(crate) mod overrides;
pub(crate) mod permits;
#[cfg(feature = "server")]
mod reservations;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, RedisError, Script, ServerErrorKind, Value};

use self::link::{Failure, Given, Line, Link};
use super::exact::ExactRequest;
use super::exchange::{Deciding, Exchange, Overriding, Permitting, Store};
#[cfg(feature = "server")]
use super::exchange::{Releasing, Reserving};
use super::overrides::OverridesRequest;
use super::permits::PermitRequest;
#[cfg(feature = "server")]
use super::reservations::ReservationRequest;
#[cfg(feature = "server")]
use super::timed_permits::TimedPermitRelease;
use crate::error::{ConfigError, StoreError};
use crate::sync::message::{InstanceId, Reply, Request};

pub(crate) const SYNC_CODE: &str =
    concat!(include_str!("../../../lua/bucket-v2.lua"), include_str!("../../../lua/sync-v2.lua"));
/// The answer of a busy store is waited for this many timeouts.
const LATE_TIMEOUTS: u32 = 10;
static SYNC: LazyLock<Code> = LazyLock::new(|| Code::new(SYNC_CODE.to_owned()));

/// A script, sent by its hash while the server has it.
struct Code {
    text: String,
    script: Script,
}

impl Code {
    fn new(text: String) -> Self {
        Self { script: Script::new(&text), text }
    }
}

/// A store in Redis 6.2 or newer, or in Valkey.
///
/// Opening connects to nothing: the first exchange does, in the background of the limiter, and so
/// does each one after the connection was lost. All lanes share one multiplexed connection; a
/// clone of the store shares it too.
///
/// The server's user needs these commands on the keys `tg2:{<namespace>/*`: EVALSHA, EVAL, TIME,
/// GET, GETRANGE, MGET, TYPE, SET, SETRANGE, ZADD, ZCARD, ZREM, ZREMRANGEBYSCORE, PEXPIRE; for exact limits of a
/// [`SlidingLog`](crate::SlidingLog) also LINDEX, LLEN, LRANGE, LTRIM, LSET, RPUSH; for [overrides](crate::Overrides) HGET, HSET, HDEL, HLEN,
/// EXISTS, DEL, ZRANGEBYSCORE; for exact token buckets, for leaky buckets, and for permits of the service over HTTP PTTL; and HELLO to
/// have its version checked.
///
/// ```
/// use std::time::Duration;
/// use tidegate::RedisStore;
///
/// let store = RedisStore::open("redis://127.0.0.1:6379")?
///     .namespace("shop.eu")?
///     .timeout(Duration::from_millis(50));
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
///
/// # Cost
///
/// One round trip and one script call for each exchange, for each decision of an exact limit, and for each message
/// about the permits of a key.
#[derive(Clone)]
pub struct RedisStore {
    line: Line,
    /// For showing: without secrets.
    address: String,
    namespace: Arc<str>,
    timeout: Duration,
    /// What exact and concurrency limits take for the server's time.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) clock: Option<crate::time::Clock>,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RedisStore")
            .field("address", &self.address)
            .field("namespace", &self.namespace)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl RedisStore {
    /// How long an exchange with the store takes at most, unless it is set.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_millis(100);
    /// The shortest timeout: below it a healthy store would look dead.
    pub const TIMEOUT_MIN: Duration = Duration::from_millis(1);
    /// The longest timeout: a batch that waits longer keeps its lane from hearing anything.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(10);
    /// The namespace of all keys, unless it is set.
    pub const DEFAULT_NAMESPACE: &str = "tidegate";
    /// The longest namespace, in bytes.
    pub const NAMESPACE_BYTES_MAX: usize = 64;

    /// The store at `address`: `redis://[user][:password@]host[:port][/database]`, the same with
    /// `rediss://` for TLS, or `unix:///path/to/socket`. `?protocol=resp3` is understood.
    ///
    /// # Errors
    ///
    /// [`StoreError::Address`] says what is wrong with the address, without its password; for
    /// `rediss://` it names the feature that is missing.
    pub fn open(address: &str) -> Result<Self, StoreError> {
        let link = Link::new(address::parse(address)?, None);
        Ok(Self::over(Line::Own(Arc::new(link)), address::without_secrets(address)))
    }

    /// The store behind a connection of the user's own: a cluster, Sentinel, a connection manager,
    /// a pool of one's own. It is the connection's business to reconnect; the server's version is
    /// not checked.
    pub fn with_connection(
        connection: impl ConnectionLike + Clone + Send + Sync + 'static,
    ) -> Self {
        let line = Line::Given(Arc::new(Given(connection)));
        Self::over(line, "a connection of the user's own".to_owned())
    }

    /// The address without user and password.
    #[cfg(feature = "config")]
    pub(crate) fn shown_address(&self) -> &str {
        &self.address
    }

    fn over(line: Line, address: String) -> Self {
        Self {
            line,
            address,
            namespace: Self::DEFAULT_NAMESPACE.into(),
            timeout: Self::DEFAULT_TIMEOUT,
            #[cfg(any(test, feature = "testing"))]
            clock: None,
        }
    }

    /// Keeps this cluster's limits apart from those of others in the same database: 1 to
    /// [`Self::NAMESPACE_BYTES_MAX`] letters, digits, `_`, `.` or `-`. Default is
    /// [`Self::DEFAULT_NAMESPACE`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::Limiter`] names a namespace that cannot be part of a key.
    pub fn namespace(mut self, name: &str) -> Result<Self, ConfigError> {
        let named = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if name.is_empty() || name.len() > Self::NAMESPACE_BYTES_MAX || !name.bytes().all(named) {
            return Err(ConfigError::Limiter {
                field: "store.namespace",
                value: name.to_owned(),
                reason: "must be 1 to 64 letters, digits, '_', '.' or '-'",
            });
        }
        self.namespace = name.into();
        Ok(self)
    }

    /// How long the store may take for an answer before it counts as away, and for a connection; brought within [`Self::TIMEOUT_MIN`] and
    /// [`Self::TIMEOUT_MAX`]. Default is [`Self::DEFAULT_TIMEOUT`]. Only decisions of exact limits wait for the store, for
    /// [`Limit::max_wait`](crate::Limit::max_wait) at most.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.clamp(Self::TIMEOUT_MIN, Self::TIMEOUT_MAX);
        self
    }

    /// Asks `callback` for user and password at each connect, instead of taking them from the
    /// address: for tokens that expire. It must not block. Without effect on a connection of the
    /// user's own.
    #[must_use]
    pub fn credentials(
        mut self,
        callback: impl Fn() -> (Option<String>, String) + Send + Sync + 'static,
    ) -> Self {
        if let Line::Own(link) = &self.line {
            self.line = Line::Own(Arc::new(link.with_credentials(Arc::new(callback))));
        }
        self
    }

    /// Calls a script by its hash; sends the script itself when the server does not have it. The reply is a bulk string.
    async fn call(
        &self,
        code: &Code,
        keys: &[Vec<u8>],
        arguments: &[&[u8]],
    ) -> Result<Vec<u8>, StoreError> {
        let by_hash = command("EVALSHA", code.script.get_hash(), keys, arguments);
        let answer = match self.line.send(&by_hash, self.timeout).await {
            Err(Failure::Call(error)) if is_no_script(&error) => {
                self.line.send(&command("EVAL", &code.text, keys, arguments), self.timeout).await
            }
            answer => answer,
        };
        match answer {
            Ok(Value::BulkString(bytes)) => Ok(bytes),
            Ok(other) => {
                Err(StoreError::Reply { field: "type", value: kind_of(&other).to_owned() })
            }
            Err(Failure::Connect(error)) => Err(error),
            Err(Failure::Call(error)) => Err(fault::store_error(&error, self.timeout)),
        }
    }

    async fn sync(&self, request: &Request) -> Result<Reply, StoreError> {
        let hash = request.hash().to_le_bytes();
        let arguments = [request.bytes(), &hash];
        let reply = self.call(&SYNC, &self.keys(request), &arguments).await?;
        Reply::decode(&reply, &request.entries, request.limits.len())
    }

    /// The KEYS of a batch's script.
    fn keys(&self, request: &Request) -> Vec<Vec<u8>> {
        let prefix = format!("tg2:{{{}/{}}}:", self.namespace, request.lane);
        let name = |suffix: &str| format!("{prefix}{suffix}").into_bytes();
        let mut keys = Vec::with_capacity(3 + request.entries.len() + request.limits.len());
        keys.extend([
            name("lane"),
            name(&format!("node:{}", hex(&request.instance))),
            name("nodes"),
        ]);
        for entry in &request.entries {
            let mut key = name(&format!("key:{}:", entry.limit));
            key.extend_from_slice(&entry.key);
            keys.push(key);
        }
        keys.extend(request.limits.iter().map(|limit| name(&format!("limit:{limit}"))));
        keys
    }
}

impl Store for RedisStore {
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_> {
        let longest = (self.timeout * LATE_TIMEOUTS).min(Self::TIMEOUT_MAX);
        Box::pin(async move { within(longest, self.sync(&request)).await })
    }

    fn decide(&self, request: ExactRequest) -> Deciding<'_> {
        Box::pin(async move { within(Self::TIMEOUT_MAX, exact::decide(self, &request)).await })
    }

    fn overrides(&self, request: OverridesRequest) -> Overriding<'_> {
        Box::pin(async move { within(Self::TIMEOUT_MAX, overrides::call(self, &request)).await })
    }

    fn permits(&self, request: PermitRequest) -> Permitting<'_> {
        Box::pin(async move { within(Self::TIMEOUT_MAX, permits::receive(self, &request)).await })
    }

    #[cfg(feature = "server")]
    fn reservations(&self, request: ReservationRequest) -> Reserving<'_> {
        Box::pin(async move { within(Self::TIMEOUT_MAX, reservations::call(self, &request)).await })
    }

    #[cfg(feature = "server")]
    fn release(&self, request: TimedPermitRelease) -> Releasing<'_> {
        Box::pin(async move { within(Self::TIMEOUT_MAX, permits::release(self, &request)).await })
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// Waits for an answer, for longer than the timeout: a late one is still welcome.
async fn within<T>(
    longest: Duration,
    answer: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(longest, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(StoreError::TimedOut(longest)),
    }
}

fn command(verb: &str, script: &str, keys: &[Vec<u8>], arguments: &[&[u8]]) -> Cmd {
    let mut command = redis::cmd(verb);
    command.arg(script).arg(keys.len()).arg(keys).arg(arguments);
    command
}

fn is_no_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Nil => "nil",
        Value::Int(_) => "an integer",
        Value::Array(_) => "an array",
        Value::SimpleString(_) | Value::Okay => "a status",
        _ => "no bulk string",
    }
}

fn hex(instance: &InstanceId) -> String {
    format!("{:032x}", u128::from_be_bytes(*instance))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::message::{Header, Incarnation, Knowledge, Times};

    fn request(lane: u32) -> Request {
        let header = Header {
            lane,
            lanes: 16,
            instance: [0xab; 16],
            incarnation: None::<Incarnation>,
            sequence: 1,
            times: Times::default(),
            knowledge: Knowledge::default(),
            limits: vec!["api".into()],
        };
        Request::new(header, Vec::new())
    }

    #[test]
    fn lanes_keys_share_one_hash_tag() {
        let store = RedisStore::open("redis://h").unwrap().namespace("a-b").unwrap();
        let keys = store.keys(&request(7));
        let text: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        assert_eq!(text[0], "tg2:{a-b/7}:lane");
        assert_eq!(text[1], format!("tg2:{{a-b/7}}:node:{}", "ab".repeat(16)));
        assert_eq!(text[2], "tg2:{a-b/7}:nodes");
        assert_eq!(text[3], "tg2:{a-b/7}:limit:api");
    }

    #[test]
    fn namespace_that_would_break_a_key_is_refused() {
        for name in ["", "a/b", "a}b", "a b", &"x".repeat(65)] {
            let refused = RedisStore::open("redis://h").unwrap().namespace(name).unwrap_err();
            assert!(matches!(refused, ConfigError::Limiter { field: "store.namespace", .. }));
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let store = RedisStore::open("redis://me:hunter2@h:1").unwrap();
        let store = store.credentials(|| (None, "hunter2".to_owned()));
        assert!(!format!("{store:?}").contains("hunter2"), "{store:?}");
    }

    #[test]
    fn timeout_of_nothing_or_of_ages_is_brought_within_bounds() {
        let store = RedisStore::open("redis://h").unwrap();
        assert_eq!(Store::timeout(&store.clone().timeout(Duration::ZERO)), RedisStore::TIMEOUT_MIN);
        assert_eq!(Store::timeout(&store.timeout(Duration::MAX)), RedisStore::TIMEOUT_MAX);
    }
}
