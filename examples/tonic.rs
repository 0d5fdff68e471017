//! A gRPC service (the standard health check) that admits 200 calls a second from each client address, over all
//! processes that share a Redis. Without a Redis the limit applies per process.
//!
//! ```text
//! cargo run --release --features tonic --example tonic [127.0.0.1:3001 [200 [redis://127.0.0.1:6379]]]
//! ```

use std::error::Error;
use std::time::Duration;

use tidegate::http::{RateLimit, RateLimitLayer};
use tidegate::{Limit, Limiter, Quota, RedisStore};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3001".to_owned());
    let per_second = arguments.next().unwrap_or_else(|| "200".to_owned()).parse()?;

    let mut builder = Limiter::builder().limit(Limit::new("api", Quota::per_second(per_second)));
    if let Some(url) = arguments.next() {
        builder = builder.store(RedisStore::open(&url)?);
    }
    let limiter = builder.build_ready(Duration::from_secs(2)).await?;

    let rate_limit = RateLimit::per_client(limiter.limit("api")?);
    let (_, health) = tonic_health::server::health_reporter();
    let service = Server::builder().layer(RateLimitLayer::grpc(rate_limit)).add_service(health);

    let incoming = TcpIncoming::bind(address.parse()?)?;
    println!("listening on {}", incoming.local_addr()?);
    service.serve_with_incoming_shutdown(incoming, shutdown_signal()).await?;
    // Reports what is pending and gives leases back.
    Ok(limiter.shutdown(Duration::from_secs(1)).await?)
}

async fn shutdown_signal() {
    let interrupted = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminated) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = interrupted => {}
                _ = terminated.recv() => {}
            }
            return;
        }
    }
    let _ = interrupted.await;
}
