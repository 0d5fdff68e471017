//! A redis-server of the benchmark's own.

use std::io;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

#[path = "../../../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

/// A redis-server that ends with this value.
pub struct Server {
    server: RedisServer,
    names: AtomicU64,
}

impl Server {
    /// Starts `redis-server` from the PATH on a free port, keeping nothing on disk. An error if
    /// there is none.
    pub fn start() -> io::Result<Self> {
        Command::new("redis-server").arg("--version").stdout(Stdio::null()).status()?;
        Ok(Self { server: RedisServer::start(), names: AtomicU64::new(0) })
    }

    pub fn address(&self) -> String {
        self.server.url()
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(self.address()).expect("a good address")
    }

    /// A prefix for keys that nobody else has: no case finds another's state.
    pub fn fresh_name(&self) -> String {
        format!("peers{}", self.names.fetch_add(1, Ordering::Relaxed))
    }
}
