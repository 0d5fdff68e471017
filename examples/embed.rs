//! Embedding: one limit, decided from memory, and kept in step through Redis if there is one.
//!
//! ```text
//! cargo run --example embed [redis://127.0.0.1:6379]
//! ```

use std::time::Duration;

use tidegate::{Limit, Limiter, Quota, RedisStore};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let api = Limit::new("api", Quota::per_second(1000).burst(200));
    let mut builder = Limiter::builder().limit(api);
    if let Some(address) = std::env::args().nth(1) {
        builder = builder.store(RedisStore::open(&address)?.namespace("embed-example")?);
    }
    // `build()` does not insist on a store that answers: limits then begin by their outage policy.
    let limiter = builder.build_ready(Duration::from_secs(2)).await?;
    let api = limiter.limit("api")?;
    // Twice as many requests as the rate allows: the burst lasts for about 200 ms.
    let mut arrivals = tokio::time::interval(Duration::from_micros(500));
    let mut admitted = 0;
    let denial = loop {
        arrivals.tick().await;
        let decision = api.check("user:42");
        // Until the store has answered about a new key, decisions are unsure: first credit, then denials.
        if decision.is_denied() && decision.is_sure() {
            break decision;
        }
        admitted += u32::from(decision.is_allowed());
    };
    println!("denied after {admitted} requests: try again in {:?}", denial.retry_after());
    limiter.shutdown(Duration::from_secs(1)).await?;
    Ok(())
}
