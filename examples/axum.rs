//! An axum service that admits 200 requests a second from each client address, over all processes that share a
//! Redis. Without a Redis the limit applies per process. The last argument is the network of a proxy in front of
//! the service, whose X-Forwarded-For tells the client's address. The quota 'none' is no limit.
//!
//! ```text
//! cargo run --release --features axum --example axum
//! cargo run --release --features axum --example axum 127.0.0.1:3000 5/min redis://127.0.0.1:6379 127.0.0.0/8
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tidegate::http::{ClientIp, KeyOf, KeyedLimit, RateLimitLayer};
use tidegate::{Limit, Limiter, Quota, RedisStore};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let quota = arguments.next().unwrap_or_else(|| "200/s".to_owned());
    let is_limited = quota != "none";
    let quota: Quota = if is_limited { quota.parse()? } else { Quota::per_second(1) };
    let mut builder = Limiter::builder().limit(Limit::new("api", quota));
    if let Some(url) = arguments.next() {
        builder = builder.store(RedisStore::open(&url)?);
    }
    let mut client = ClientIp::peer();
    if let Some(proxy) = arguments.next() {
        client = client.behind_networks([proxy.parse()?]);
    }
    let limiter = builder.build_ready(Duration::from_secs(2)).await?;

    let mut app = Router::new().route("/", get(|| async { "hello" }));
    if is_limited {
        let limit = KeyedLimit::new(limiter.limit("api")?, KeyOf::client(client));
        app = app.layer(RateLimitLayer::new(limit));
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
