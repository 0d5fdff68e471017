//! An axum service that admits 200 requests a second from each client address, over all processes that share a
//! Redis. Without a Redis the limit applies per process. A limit of 0 is no limit.
//!
//! ```text
//! cargo run --release --features axum --example axum [127.0.0.1:3000 [200 [redis://127.0.0.1:6379]]]
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tidegate::http::RateLimitLayer;
use tidegate::{Limit, Limiter, Quota, RedisStore};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let per_second: u64 = arguments.next().unwrap_or_else(|| "200".to_owned()).parse()?;

    let quota = Quota::per_second(per_second.max(1));
    let mut builder = Limiter::builder().limit(Limit::new("api", quota));
    if let Some(url) = arguments.next() {
        builder = builder.store(RedisStore::open(&url)?);
    }
    let limiter = builder.build_ready(Duration::from_secs(2)).await?;

    let mut app = Router::new().route("/", get(|| async { "hello" }));
    if per_second > 0 {
        app = app.layer(RateLimitLayer::per_client(limiter.limit("api")?));
    }

    let listener = TcpListener::bind(&address).await?;
    println!("listening on {}", listener.local_addr()?);
    // The layer needs the addresses that connections come from.
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).with_graceful_shutdown(shutdown_signal()).await?;
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
