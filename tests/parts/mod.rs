//! Real parts for tests: a server of our own, and a wire that breaks on request.

#![allow(dead_code, unused_imports, reason = "each test file uses some of the parts only")]

#[cfg(feature = "redis")]
pub(crate) mod charged;
pub(crate) mod proxy;
pub(crate) mod record;
pub(crate) mod redis_server;
#[cfg(feature = "server")]
pub(crate) mod service;
#[cfg(feature = "server")]
pub(crate) mod serving;

#[cfg(feature = "redis")]
pub(crate) use charged::charged_to;
pub(crate) use proxy::{Counts, Fault, Proxy};
pub(crate) use record::Record;
pub(crate) use redis_server::RedisServer;
