//! A Redis script a request, without anything on the node: what a hybrid limiter saves.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use futures_util::future::join_all;
use hdrhistogram::Histogram;
use redis::aio::MultiplexedConnection;
use redis::{Client, Script};
use tokio::runtime::Runtime;

use super::{Contender, strays};
use crate::case::{Case, Keys};
use crate::server::Server;

const TOKEN_BUCKET: &str = include_str!("../../lua/token_bucket.lua");
/// Requests that wait for an answer at the same time, on one connection.
const IN_FLIGHT: usize = 64;

pub fn one_by_one(case: &Case, server: &Server) -> Box<dyn Contender> {
    Box::new(Scripted::new("redis script", 1, case, server))
}

pub fn many_at_once(case: &Case, server: &Server) -> Box<dyn Contender> {
    Box::new(Scripted::new("redis script, 64 in flight", IN_FLIGHT, case, server))
}

struct Scripted {
    name: &'static str,
    in_flight: usize,
    denied: bool,
    prefix: String,
    /// Tokens a second, and burst.
    quota: (f64, u64),
    script: Script,
    client: Client,
    /// Connections of threads that do not ask just now: each has one to itself when it does.
    idle: Mutex<Vec<Link>>,
}

/// A multiplexed connection, driven by the thread that asks.
struct Link {
    runtime: Runtime,
    connection: MultiplexedConnection,
}

impl Link {
    fn open(client: &Client) -> Self {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().expect("a runtime");
        let connection = runtime.block_on(client.get_multiplexed_async_connection());
        Self { runtime, connection: connection.expect("a server that answers") }
    }
}

impl Scripted {
    fn new(name: &'static str, in_flight: usize, case: &Case, server: &Server) -> Self {
        Self {
            name,
            in_flight,
            denied: case.denied,
            prefix: server.fresh_name(),
            quota: if case.denied { (1.0 / 3600.0, 100) } else { (1e9, 1_000_000_000) },
            script: Script::new(TOKEN_BUCKET),
            client: server.client(),
            idle: Mutex::new(Vec::new()),
        }
    }

    async fn is_denied(&self, connection: &mut MultiplexedConnection, name: &str) -> bool {
        let mut call = self.script.key(format!("{}:{name}", self.prefix));
        call.arg(self.quota.0).arg(self.quota.1);
        let allowed: bool = call.invoke_async(connection).await.expect("a server that answers");
        !allowed
    }

    fn ask(&self, names: &[String], took: Option<&RefCell<&mut Histogram<u64>>>) -> u64 {
        let idle = self.idle.lock().expect("nobody panics with it").pop();
        let link = idle.unwrap_or_else(|| Link::open(&self.client));
        let (next, denied) = (Cell::new(0), Cell::new(0));
        let lane = || async {
            let mut connection = link.connection.clone();
            while let Some(name) = names.get(next.replace(next.get() + 1)) {
                let start = Instant::now();
                let is_denied = self.is_denied(&mut connection, name).await;
                denied.set(denied.get() + u64::from(is_denied));
                if let Some(took) = took {
                    took.borrow_mut().saturating_record(start.elapsed().as_nanos() as u64);
                }
            }
        };
        link.runtime.block_on(join_all((0..self.in_flight).map(|_| lane())));
        self.idle.lock().expect("nobody panics with it").push(link);
        denied.get()
    }
}

impl Contender for Scripted {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, _isolated: bool) -> u64 {
        self.ask(&keys.names[part], None)
    }

    fn decide_timed(&self, keys: &Keys, part: Range<usize>, took: &mut Histogram<u64>) -> u64 {
        self.ask(&keys.names[part], Some(&RefCell::new(took)))
    }

    fn block(&self) -> usize {
        64 * self.in_flight
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        strays(self, keys, self.denied)
    }
}
