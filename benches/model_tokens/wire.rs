//! A connection to Redis in virtual time: a way takes a millisecond, and scripts read the clock from a key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{
    Arg, Cmd, ErrorKind, Pipeline, RedisFuture, RedisResult, Script, ServerErrorKind, Value,
};

use crate::model_tokens::{LIMIT, NODES, VirtualTime, key_name};
use crate::record::Record;
use crate::redis_server::RedisServer;

const WAY: Duration = Duration::from_millis(1);
/// Where scripts find the time, in microseconds.
const CLOCK: &str = "clock";

/// A node told the store of a key.
pub(crate) struct Call {
    pub(crate) key: usize,
    pub(crate) node: usize,
    pub(crate) sent_us: u64,
    pub(crate) applied_us: u64,
    pub(crate) replied_us: u64,
    /// By the record after that, in tokens.
    pub(crate) level: f64,
    pub(crate) charged: u64,
}

#[derive(Default)]
struct Shared {
    /// The hash of a script in virtual time, by that of the shipped one.
    hashes: HashMap<String, String>,
    calls: Vec<Call>,
}

/// The connection of one node.
#[derive(Clone)]
pub(crate) struct Wire {
    node: usize,
    connection: MultiplexedConnection,
    time: VirtualTime,
    /// The names of the keys' records.
    records: Arc<[String]>,
    shared: Arc<Mutex<Shared>>,
}

impl Wire {
    /// A connection for each node.
    pub(crate) async fn connect(
        server: &RedisServer,
        time: &VirtualTime,
        keys: usize,
    ) -> Vec<Self> {
        let client = redis::Client::open(server.url()).expect("a good address");
        let record = |key| format!("tg2:{{tidegate/0}}:key:{LIMIT}:{}", key_name(key));
        let (records, shared): (Arc<[String]>, _) =
            ((0..keys).map(record).collect(), Arc::default());
        let mut wires = Vec::new();
        for node in 0..NODES {
            let connection = client.get_multiplexed_async_connection().await;
            let connection = connection.expect("the server runs");
            let (time, records, shared) = (time.clone(), records.clone(), Arc::clone(&shared));
            wires.push(Self { node, connection, time, records, shared });
        }
        wires
    }

    /// All calls of all nodes so far, in the order in which the store took them in.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        let mut calls = std::mem::take(&mut self.lock().calls);
        calls.sort_by_key(|call| call.applied_us);
        calls
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn carry(&mut self, command: &Cmd) -> RedisResult<Value> {
        let words: Vec<Vec<u8>> = command.args_iter().map(|word| bytes_of(&word)).collect();
        let sent_us = self.time.now_us();
        self.time.wait(WAY).await;
        let standstill = self.time.stand_still();
        let applied_us = self.time.now_us();
        let answer = self.call(&words, applied_us).await;
        let states = self.states(&words).await?;
        drop(standstill);
        self.time.wait(WAY).await;
        let (node, replied_us) = (self.node, self.time.now_us());
        let call = |(key, level, charged)| Call {
            key,
            node,
            sent_us,
            applied_us,
            replied_us,
            level,
            charged,
        };
        if answer.is_ok() {
            self.lock().calls.extend(states.into_iter().map(call));
        }
        answer
    }

    async fn call(&mut self, words: &[Vec<u8>], now_us: u64) -> RedisResult<Value> {
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let hash = match &*words[0] {
            b"EVALSHA" => self.lock().hashes.get(&text(&words[1])).cloned(),
            b"EVAL" => Some(self.load(&text(&words[1])).await?),
            other => panic!("the store has no use for {}", text(other)),
        };
        let Some(hash) = hash else {
            return Err((ErrorKind::Server(ServerErrorKind::NoScript), "not loaded").into());
        };
        let () = redis::cmd("SET").arg(CLOCK).arg(now_us).query_async(&mut self.connection).await?;
        let call = redis::cmd("EVALSHA").arg(hash).arg(&words[2..]).to_owned();
        call.query_async(&mut self.connection).await
    }

    /// Loads a script that asks the key for the time.
    async fn load(&mut self, code: &str) -> RedisResult<String> {
        let given = format!("{{ 0, redis.call('GET', '{CLOCK}') }}");
        let changed = code.replace("redis.call('TIME')", &given).replace("call('TIME')", &given);
        assert_ne!(code, changed, "the script asks for the time in another way");
        let load = redis::cmd("SCRIPT").arg("LOAD").arg(changed).to_owned();
        let hash: String = load.query_async(&mut self.connection).await?;
        self.lock().hashes.insert(Script::new(code).get_hash().to_owned(), hash.clone());
        Ok(hash)
    }

    /// What the records say of the keys that a call names.
    async fn states(&mut self, words: &[Vec<u8>]) -> RedisResult<Vec<(usize, f64, u64)>> {
        let mut states = Vec::new();
        for (key, name) in self.records.clone().iter().enumerate() {
            if words.iter().any(|word| word == name.as_bytes()) {
                let get = redis::cmd("GET").arg(name).to_owned();
                let bytes: Option<Vec<u8>> = get.query_async(&mut self.connection).await?;
                let record = bytes.and_then(|bytes| Record::decode(&bytes));
                states.extend(record.map(|record| (key, record.level(), record.charged())));
            }
        }
        Ok(states)
    }
}

fn bytes_of(word: &Arg<&[u8]>) -> Vec<u8> {
    match word {
        Arg::Simple(bytes) => bytes.to_vec(),
        _ => panic!("the store sends no cursor"),
    }
}

impl ConnectionLike for Wire {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.carry(command))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _: &'a Pipeline,
        _: usize,
        _: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        panic!("the store sends no pipelines")
    }

    fn get_db(&self) -> i64 {
        0
    }
}
