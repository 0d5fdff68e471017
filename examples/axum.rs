//! An axum service that admits so many requests a second of each client, over all processes that share
//! a Redis. With a limit of 0 there is no layer; without a Redis the process is alone. With `FIELDS=draft` in
//! the environment each response says what is left, in `RateLimit-Policy` and `RateLimit`.
//!
//! ```text
//! cargo run --release --features axum --example axum [127.0.0.1:3000 [200 [redis://127.0.0.1:6379]]]
//! ```

use std::env::VarError;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tidegate::http::{ClientIp, HeaderStyle, KeyOf, KeyedLimit, RateLimit, RateLimitLayer};
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

    let mut service = Router::new().route("/", get(|| async { "hello" }));
    if per_second > 0 {
        let rule = KeyedLimit::new(limiter.limit("api")?, KeyOf::client(ClientIp::peer()));
        let door = RateLimit::new(rule).headers(fields()?);
        service = service.layer(RateLimitLayer::new(door));
    }

    let listener = TcpListener::bind(&address).await?;
    println!("listening on {}", listener.local_addr()?);
    let service = service.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).with_graceful_shutdown(asked_to_stop()).await?;
    // What is pending is reported, and leases are given back.
    Ok(limiter.shutdown(Duration::from_secs(1)).await?)
}

fn fields() -> Result<HeaderStyle, Box<dyn Error>> {
    match std::env::var("FIELDS").as_deref() {
        Ok("draft") => Ok(HeaderStyle::draft()),
        Ok("none") | Err(VarError::NotPresent) => Ok(HeaderStyle::none()),
        Ok(other) => Err(format!("FIELDS = '{other}': must be draft or none").into()),
        Err(error) => Err(format!("FIELDS: {error}").into()),
    }
}

async fn asked_to_stop() {
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
