//! The connection to a server: made when first needed, dropped when it is dead, made again.
//!
//! # Orderings
//!
//! `misses` and `broken` are hints about one connection and publish nothing else: a stale value
//! costs one exchange more or one reconnect more. All accesses are `Relaxed`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionInfo, RedisError, RedisResult, Value};
use tokio::sync::Mutex;

use super::fault;
use crate::error::StoreError;

/// A connect that takes longer has failed. It may outlast the exchange that began it: the next
/// exchange goes on where that one stopped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// After this many rounds of silence in a row a connection counts as dead: a half-open one never
/// says so itself.
const MISSES_MAX: u32 = 3;

/// Tells user and password, asked at each connect.
pub(super) type Credentials = Arc<dyn Fn() -> (Option<String>, String) + Send + Sync>;

/// A command on its way.
type Sending<'a> = Pin<Box<dyn Future<Output = RedisResult<Value>> + Send + 'a>>;

/// A connection on its way.
type Attempt = Pin<Box<dyn Future<Output = Result<MultiplexedConnection, StoreError>> + Send>>;

/// Why a command has no answer.
pub(super) enum Failure {
    /// There is no connection.
    Connect(StoreError),
    /// The command failed.
    Call(RedisError),
}

/// The way to the server.
#[derive(Clone)]
pub(super) enum Line {
    /// A connection that we make and keep.
    Own(Arc<Link>),
    /// The user's own.
    Given(Arc<dyn Channel>),
}

impl Line {
    /// Sends a command and waits for its answer, however long it takes; for a connection `timeout` at most.
    pub(super) async fn send(&self, command: &Cmd, timeout: Duration) -> Result<Value, Failure> {
        match self {
            Self::Own(link) => link.send(command, timeout).await,
            Self::Given(channel) => channel.send(command).await.map_err(Failure::Call),
        }
    }
}

/// Any connection of redis-rs.
pub(super) trait Channel: Send + Sync {
    fn send<'a>(&'a self, command: &'a Cmd) -> Sending<'a>;
}

/// A connection whose clones share it.
pub(super) struct Given<C>(pub(super) C);

impl<C: ConnectionLike + Clone + Send + Sync> Channel for Given<C> {
    fn send<'a>(&'a self, command: &'a Cmd) -> Sending<'a> {
        let mut connection = self.0.clone();
        Box::pin(async move { command.query_async(&mut connection).await })
    }
}

/// A server's address and the connection to it, if there is one.
pub(super) struct Link {
    info: ConnectionInfo,
    credentials: Option<Credentials>,
    /// Held while connecting, so that there is one attempt at a time.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Option<Arc<Live>>,
    attempt: Option<Attempt>,
}

impl Link {
    pub(super) fn new(info: ConnectionInfo, credentials: Option<Credentials>) -> Self {
        Self { info, credentials, state: Mutex::default() }
    }

    /// The same address with credentials asked for at each connect; not connected.
    pub(super) fn with_credentials(&self, credentials: Credentials) -> Self {
        Self::new(self.info.clone(), Some(credentials))
    }

    async fn send(&self, command: &Cmd, timeout: Duration) -> Result<Value, Failure> {
        let live = match tokio::time::timeout(timeout, self.connection()).await {
            Ok(live) => live.map_err(Failure::Connect)?,
            Err(_) => return Err(Failure::Connect(StoreError::TimedOut(timeout))),
        };
        live.send(command, timeout).await.map_err(Failure::Call)
    }

    /// The live connection, or a new one.
    async fn connection(&self) -> Result<Arc<Live>, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(live) = state.live.as_ref().filter(|live| !live.broken.load(Relaxed)) {
            return Ok(live.clone());
        }
        state.live = None;
        // An exchange that times out here leaves its attempt behind for the next one.
        let attempt = state.attempt.get_or_insert_with(|| self.attempt());
        let outcome = attempt.await;
        state.attempt = None;
        let live = Arc::new(Live::new(outcome?));
        state.live = Some(live.clone());
        Ok(live)
    }

    fn attempt(&self) -> Attempt {
        let (info, credentials) = (self.info.clone(), self.credentials.clone());
        Box::pin(async move {
            let connecting = connect(info, credentials);
            match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
                Ok(outcome) => outcome,
                Err(_) => Err(StoreError::TimedOut(CONNECT_TIMEOUT)),
            }
        })
    }
}

async fn connect(
    info: ConnectionInfo,
    credentials: Option<Credentials>,
) -> Result<MultiplexedConnection, StoreError> {
    let client =
        Client::open(logged_in(info, credentials)).map_err(|error| connect_error(&error))?;
    // Both ends of the time are watched from outside, where a cancelled wait is seen too.
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let mut connection = client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(|error| connect_error(&error))?;
    check_server(&mut connection).await?;
    Ok(connection)
}

fn connect_error(error: &RedisError) -> StoreError {
    fault::store_error(error, CONNECT_TIMEOUT)
}

fn logged_in(info: ConnectionInfo, credentials: Option<Credentials>) -> ConnectionInfo {
    let Some(credentials) = credentials else { return info };
    let (user, password) = credentials();
    let mut settings = info.redis_settings().clone().set_password(password);
    if let Some(user) = user {
        settings = settings.set_username(user);
    }
    info.set_redis_settings(settings)
}

/// Refuses a server that is too old. INFO would say more, but managed services deny it.
async fn check_server(connection: &mut MultiplexedConnection) -> Result<(), StoreError> {
    let answer: RedisResult<Value> = redis::cmd("HELLO").query_async(connection).await;
    match answer {
        Ok(answer) => version_of(answer).map_or(Ok(()), |found| fault::check_version(&found)),
        Err(error) if fault::ends_connection(&error) => Err(connect_error(&error)),
        Err(error) => fault::check_refusal(&error),
    }
}

/// The version in the answer to HELLO: a map, or in RESP2 its keys and values in turn.
fn version_of(answer: Value) -> Option<String> {
    let pairs: Vec<(Value, Value)> = match answer {
        Value::Map(pairs) => pairs,
        Value::Array(flat) => {
            flat.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
        }
        _ => return None,
    };
    let text = |value| redis::from_redis_value::<String>(value).ok();
    pairs
        .into_iter()
        .find_map(|(name, value)| (text(name)? == "version").then(|| text(value)).flatten())
}

/// A connection in use.
struct Live {
    connection: Given<MultiplexedConnection>,
    /// Rounds without an answer since the last one: exchanges that wait side by side and get
    /// nothing are one round, or a server's short pause would end a busy connection.
    misses: AtomicU32,
    /// The connection is of no more use.
    broken: AtomicBool,
}

impl Live {
    fn new(connection: MultiplexedConnection) -> Self {
        let connection = Given(connection);
        Self { connection, misses: AtomicU32::new(0), broken: AtomicBool::new(false) }
    }

    /// An answer that takes longer than `timeout` counts as missed, and is waited for all the same.
    async fn send(&self, command: &Cmd, timeout: Duration) -> RedisResult<Value> {
        let round = self.misses.load(Relaxed);
        let mut sending = self.connection.send(command);
        let answer = if let Ok(answer) = tokio::time::timeout(timeout, &mut sending).await {
            answer
        } else {
            self.missed(round);
            sending.await
        };
        match &answer {
            Err(error) if fault::ends_connection(error) => self.broken.store(true, Relaxed),
            _ => self.misses.store(0, Relaxed),
        }
        answer
    }

    fn missed(&self, round: u32) {
        let next = round + 1;
        let first = self.misses.compare_exchange(round, next, Relaxed, Relaxed).is_ok();
        if first && next >= MISSES_MAX {
            self.broken.store(true, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<Value> {
        words.iter().map(|word| Value::BulkString(word.as_bytes().to_vec())).collect()
    }

    #[test]
    fn version_is_found_in_either_protocols_answer() {
        let flat = words(&["server", "redis", "version", "7.0.15", "modules", ""]);
        assert_eq!(version_of(Value::Array(flat)).as_deref(), Some("7.0.15"));
        let [name, version] = <[Value; 2]>::try_from(words(&["version", "8.1.0"])).unwrap();
        assert_eq!(version_of(Value::Map(vec![(name, version)])).as_deref(), Some("8.1.0"));
        assert_eq!(version_of(Value::Okay), None);
        assert_eq!(version_of(Value::Array(words(&["server"]))), None);
    }

    #[test]
    fn credentials_replace_those_of_the_address() {
        let info = super::super::address::parse("redis://a:b@h").unwrap();
        let info = logged_in(info, Some(Arc::new(|| (Some("c".to_owned()), "d".to_owned()))));
        assert_eq!(info.redis_settings().username(), Some("c"));
        assert_eq!(info.redis_settings().password(), Some("d"));
    }
}
