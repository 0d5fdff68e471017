//! A cluster of three nodes that hold one limit over Redis, under three times the load it allows.
//!
//! The nodes live in one process for the example's sake; each has a limiter and a connection of
//! its own, as on three machines.
//!
//! ```text
//! cargo run --example cluster [redis://127.0.0.1:6379]
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use tidegate::{ActiveLimit, ConfigError, Incidents, Limit, Limiter, Quota, RedisStore, bound};

const DEFAULT_ADDRESS: &str = "redis://127.0.0.1:6379";
const NODES: usize = 3;
const QUOTA: Quota = Quota::per_second(1000).burst(100);
/// Between two requests to the same node: 3000 a second to all three.
const GAP: Duration = Duration::from_millis(1);
const LOAD_LASTS: Duration = Duration::from_secs(3);
/// A node whose store has not answered by then does not start.
const READY_WITHIN: Duration = Duration::from_secs(2);
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

fn limit() -> Limit {
    Limit::new("api", QUOTA)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let address = std::env::args().nth(1).unwrap_or_else(|| DEFAULT_ADDRESS.to_owned());
    match run(&address).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cluster: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(address: &str) -> Result<(), Box<dyn Error>> {
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(start(address).await?);
    }
    let limits: Vec<ActiveLimit> =
        nodes.iter().map(|node| node.limit("api")).collect::<Result<_, _>>()?;
    let (admitted, took) = offer(&limits).await?;
    report(&admitted, took);
    for node in &nodes {
        node.shutdown(LEAVE_WITHIN).await?;
    }
    Ok(())
}

/// Starts a node, and insists on its store.
async fn start(address: &str) -> Result<Limiter, ConfigError> {
    let store = RedisStore::open(address)?.namespace("cluster-example")?;
    Limiter::builder().limit(limit()).store(store).build_ready(READY_WITHIN).await
}

/// Asks each node once a [`GAP`]; returns what each admitted, and how long it took.
async fn offer(limits: &[ActiveLimit]) -> Result<([u64; NODES], Duration), Box<dyn Error>> {
    let mut admitted = [0; NODES];
    let mut arrivals = tokio::time::interval(GAP);
    let start = arrivals.tick().await;
    while start.elapsed() < LOAD_LASTS {
        for (limit, admitted) in limits.iter().zip(&mut admitted) {
            *admitted += u64::from(limit.check("user:42").is_allowed());
        }
        arrivals.tick().await;
    }
    Ok((admitted, start.elapsed()))
}

fn report(admitted: &[u64; NODES], took: Duration) {
    for (node, admitted) in admitted.iter().enumerate() {
        println!("node {node}: {admitted} admitted");
    }
    let total: u64 = admitted.iter().sum();
    let ideal = QUOTA.burst_tokens() as f64 + QUOTA.tokens_per_second() * took.as_secs_f64();
    println!(
        "together: {total} admitted; burst + rate x {:.3} s = {ideal:.0}, credit at most {} more",
        took.as_secs_f64(),
        bound(&limit(), NODES as u32, &Incidents::default()).ceil(),
    );
}
