//! The table `[store]`.

#[cfg(feature = "redis")]
use std::fmt;

use super::fields::{Fields, STORE};
#[cfg(feature = "redis")]
use super::reading::{HIDDEN, Place};
use super::reading::{Reading, Setting};
#[cfg(feature = "redis")]
use crate::error::{ConfigError, StoreError};
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
use crate::store::{AnyStore, MemoryStore};

const EXAMPLE: &str = "[store] with redis = \"redis://127.0.0.1:6379\"";

/// The store of a configuration.
#[derive(Clone, Debug)]
pub(super) enum ConfiguredStore {
    Memory(MemoryStore),
    #[cfg(feature = "redis")]
    Redis(RedisStore, AsRead),
}

/// All fields of the table, secrets too, to see whether they change.
#[cfg(feature = "redis")]
#[derive(Clone, PartialEq, Eq)]
pub(super) struct AsRead(String);

#[cfg(feature = "redis")]
impl fmt::Debug for AsRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("as configured")
    }
}

impl ConfiguredStore {
    /// Whether both are one store to whoever configures them.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Memory(_), Self::Memory(_)) => true,
            #[cfg(feature = "redis")]
            (Self::Redis(_, own), Self::Redis(_, other)) => own == other,
            #[cfg(feature = "redis")]
            _ => false,
        }
    }

    /// For people, without secrets.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Memory(_) => "memory".to_owned(),
            #[cfg(feature = "redis")]
            Self::Redis(store, _) => store.shown_address().to_owned(),
        }
    }
}

impl From<ConfiguredStore> for AnyStore {
    fn from(store: ConfiguredStore) -> Self {
        match store {
            ConfiguredStore::Memory(store) => store.into(),
            #[cfg(feature = "redis")]
            ConfiguredStore::Redis(store, _) => store.into(),
        }
    }
}

/// What was read of the table.
pub(super) struct StoreRead {
    /// `None` also where it cannot be used.
    pub(super) store: Option<ConfiguredStore>,
    /// Whether nodes are meant to share one.
    pub(super) is_shared: bool,
}

/// Reads the table `[store]` of the whole.
pub(super) fn read(root: &Fields<'_>, reading: &mut Reading) -> StoreRead {
    let is_shared = root.has("store");
    let Some(fields) = root.table("store", EXAMPLE, reading) else {
        return StoreRead { store: None, is_shared };
    };
    fields.refuse_unknown(STORE, reading);
    let is_redis = fields.has("redis") || fields.has("redis_file");
    let memory = fields.flag("memory", reading);
    if let Some(memory) = memory.as_ref().filter(|memory| memory.value && is_redis) {
        reading.mistake(&memory.place, "there is a Redis too: remove one of them");
    }
    if is_redis {
        return StoreRead { store: read_redis(&fields, reading), is_shared: true };
    }
    let is_memory = memory.as_ref().is_some_and(|memory| memory.value);
    if is_memory {
        for name in ["user", "password", "password_file", "namespace", "timeout"] {
            if fields.has(name) {
                reading.mistake(&fields.place(name), "is for Redis: remove it");
            }
        }
    } else if memory.is_some() == fields.has("memory") {
        let remedy = "names no store: set redis = \"redis://127.0.0.1:6379\", or remove the table";
        reading.missing(fields.at, "store.redis".to_owned(), remedy);
    }
    let store = is_memory.then(|| ConfiguredStore::Memory(MemoryStore::new()));
    StoreRead { store, is_shared: !is_memory }
}

/// What the fields of a Redis store say.
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "there is no such store"))]
struct Redis {
    address: Option<Setting<String>>,
    user: Option<Setting<String>>,
    password: Option<Setting<String>>,
    namespace: Option<Setting<String>>,
    timeout: Option<Setting<std::time::Duration>>,
}

fn read_redis(fields: &Fields<'_>, reading: &mut Reading) -> Option<ConfiguredStore> {
    let redis = Redis {
        address: fields.secret_text("redis", reading),
        user: fields.text("user", reading),
        password: fields.secret_text("password", reading),
        namespace: fields.text("namespace", reading),
        timeout: fields.duration("timeout", reading),
    };
    if fields.has("user") && !fields.has("password") && !fields.has("password_file") {
        let remedy = "has no password: set password = \"${NAME}\" or password_file";
        reading.mistake(&fields.place("user"), remedy);
    }
    open(redis, fields, reading)
}

#[cfg(not(feature = "redis"))]
fn open(redis: Redis, _: &Fields<'_>, reading: &mut Reading) -> Option<ConfiguredStore> {
    reading.mistake(&redis.address?.place, "needs tidegate's feature `redis`: compile it in");
    None
}

#[cfg(feature = "redis")]
fn open(redis: Redis, fields: &Fields<'_>, reading: &mut Reading) -> Option<ConfiguredStore> {
    let times = RedisStore::TIMEOUT_MIN..=RedisStore::TIMEOUT_MAX;
    if let Some(timeout) = redis.timeout.as_ref().filter(|timeout| !times.contains(&timeout.value))
    {
        reading.mistake(&timeout.place, "must be 1ms to 10s");
    }
    if let (Some(address), Some(password)) = (&redis.address, &redis.password)
        && address.value.contains('@')
    {
        reading.mistake(&password.place, "the address has a password too: remove one of them");
    }
    let texts = [&redis.address, &redis.user, &redis.password, &redis.namespace];
    let texts = texts.map(|field| field.as_ref().map(|field| &field.value));
    let timeout = redis.timeout.as_ref().map(|timeout| timeout.value);
    let as_read = AsRead(format!("{texts:?} {timeout:?}"));
    let opened = redis.address.and_then(|address| at_address(&address, fields, reading));
    let named = match &redis.namespace {
        Some(namespace) => named(opened, namespace, reading)?,
        None => opened?,
    };
    let timed = redis.timeout.map_or(named.clone(), |timeout| named.timeout(timeout.value));
    let user = redis.user.map(|user| user.value);
    let store = match redis.password {
        Some(password) => timed.credentials(move || (user.clone(), password.value.clone())),
        None => timed,
    };
    Some(ConfiguredStore::Redis(store, as_read))
}

#[cfg(feature = "redis")]
fn at_address(
    address: &Setting<String>,
    fields: &Fields<'_>,
    reading: &mut Reading,
) -> Option<RedisStore> {
    let (place, remedy) = match RedisStore::open(&address.value) {
        Ok(store) => return Some(store),
        Err(StoreError::Address { address: shown, reason }) => {
            let is_written_here = fields.has("redis") && !fields.has_variables("redis");
            let shown = if is_written_here { format!("{shown:?}") } else { HIDDEN.to_owned() };
            let form = "write redis://HOST:PORT, rediss:// for TLS, or unix:///PATH";
            (Place { shown, ..address.place.clone() }, format!("{reason}: {form}"))
        }
        Err(error) => (address.place.clone(), error.to_string()),
    };
    reading.mistake(&place, remedy);
    None
}

/// The store with a namespace, which is checked where there is no store too.
#[cfg(feature = "redis")]
fn named(
    store: Option<RedisStore>,
    namespace: &Setting<String>,
    reading: &mut Reading,
) -> Option<RedisStore> {
    let any = RedisStore::open("redis://127.0.0.1").ok()?;
    match store.clone().unwrap_or(any).namespace(&namespace.value) {
        Ok(named) => store.map(|_| named),
        Err(error) => {
            let remedy = match error {
                ConfigError::Limiter { reason, .. } => reason.to_owned(),
                other => other.to_string(),
            };
            reading.mistake(&namespace.place, remedy);
            None
        }
    }
}
