//! How much of a central semaphore's throughput nodes reach that share a concurrency limit through Redis.
//!
//! ```text
//! cargo bench --bench permits -- [--quick]
//! ```
//!
//! Four nodes (limiters of one process, each with a connection of its own) share one key, and more callers than there are
//! permits wait all the time. Each holds its permit for a time between the given ones. The same callers and holds share one
//! `tokio::sync::Semaphore` before. A figure is permits given back a second; *least node* is the share of the node that had
//! the fewest, of an even part. The exit status is 1 if more permits were in use at one time than the limit. `--quick` has
//! two seconds a case instead of ten.
#![allow(clippy::disallowed_methods, reason = "the server is real, and so is time")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Concurrency, ConcurrencyLimit, Limiter, Permit, RedisStore};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

const NODES: usize = 4;
const WITHIN: Duration = Duration::from_secs(60);

/// What callers take permits from.
#[derive(Clone)]
enum Source {
    Central(Arc<Semaphore>),
    Node(ConcurrencyLimit),
}

/// What they hold.
enum Held {
    Central { _permit: OwnedSemaphorePermit },
    Node { _permit: Permit },
}

impl Source {
    async fn acquire(&self) -> Option<Held> {
        match self {
            Self::Central(semaphore) => {
                let permit = semaphore.clone().acquire_owned().await.ok()?;
                Some(Held::Central { _permit: permit })
            }
            Self::Node(limit) => {
                let permit = limit.acquire_within("key", WITHIN).await.ok()?;
                Some(Held::Node { _permit: permit })
            }
        }
    }
}

/// Permits given back at each node, and the most that were in use at one time.
struct Figures {
    given_back: Vec<u32>,
    most: u32,
}

async fn run(sources: &[Source], callers: usize, holds_ms: (u64, u64), time: Duration) -> Figures {
    let (in_use, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let end = Instant::now() + time;
    let mut tasks = Vec::new();
    for caller in 0..callers {
        let node = caller % sources.len();
        let (source, in_use, most) = (sources[node].clone(), in_use.clone(), most.clone());
        let mut random = fastrand::Rng::with_seed(caller as u64);
        let task = tokio::spawn(async move {
            let mut given_back = 0;
            while Instant::now() < end {
                let Some(held) = source.acquire().await else { continue };
                most.fetch_max(in_use.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(random.u64(holds_ms.0..=holds_ms.1)))
                    .await;
                in_use.fetch_sub(1, Ordering::SeqCst);
                given_back += u32::from(Instant::now() < end);
                drop(held);
            }
            given_back
        });
        tasks.push((node, task));
    }
    let mut given_back = vec![0; sources.len()];
    for (node, task) in tasks {
        given_back[node] += task.await.expect("a caller does not fail");
    }
    Figures { given_back, most: most.load(Ordering::SeqCst) }
}

fn calls(server: &RedisServer) -> f64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or_default();
    let calls = line.split("calls=").nth(1).and_then(|rest| rest.split(',').next());
    calls.and_then(|calls| calls.parse().ok()).unwrap_or_default()
}

fn main() -> ExitCode {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let time = Duration::from_secs(if is_quick { 2 } else { 10 });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = RedisServer::start();
    println!(
        "| n | holds, ms | semaphore, 1/s | tidegate, 1/s | % | least node, % | store calls/s |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut is_kept = true;
    for (max, holds_ms) in
        [(1, (5, 5)), (1, (5, 100)), (3, (5, 100)), (10, (5, 100)), (10, (5, 500)), (100, (5, 500))]
    {
        let (central, nodes, calls) = runtime.block_on(async {
            let callers = 2 * max as usize + 2 * NODES;
            let semaphore = Source::Central(Arc::new(Semaphore::new(max as usize)));
            let central = run(&[semaphore], callers, holds_ms, time).await;
            server.command(&["FLUSHALL"]);
            let nodes: Vec<Source> = (0..NODES).map(|_| node(&server, max)).collect();
            let before = calls(&server);
            let figures = run(&nodes, callers, holds_ms, time).await;
            (central, figures, calls(&server) - before)
        });
        let seconds = time.as_secs_f64();
        let sum = |figures: &Figures| f64::from(figures.given_back.iter().sum::<u32>()) / seconds;
        let least = nodes.given_back.iter().min().copied().unwrap_or_default();
        println!(
            "| {max} | {} to {} | {:.1} | {:.1} | {:.1} | {:.0} | {:.0} |",
            holds_ms.0,
            holds_ms.1,
            sum(&central),
            sum(&nodes),
            100.0 * sum(&nodes) / sum(&central),
            100.0 * f64::from(least) * NODES as f64 / (sum(&nodes) * seconds),
            calls / seconds,
        );
        is_kept &= nodes.most <= max;
    }
    if is_kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn node(server: &RedisServer, max: u32) -> Source {
    let store = RedisStore::open(&server.url()).expect("the address is valid");
    let limiter = Limiter::builder()
        .concurrency(Concurrency::new("jobs", max).max_wait(Duration::from_secs(5)))
        .store(store.timeout(Duration::from_secs(2)))
        .build()
        .expect("the limit is valid");
    Source::Node(limiter.concurrency("jobs").expect("it was built with that"))
}
