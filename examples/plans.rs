//! Three plans: free (the limit's own quota), pro and enterprise. The gateway in front passes `x-api-key` on and sets `x-plan`.
//! `GET /` costs a request, and `POST /complete` the model tokens that it used. Processes share a Redis, if there is one.
//!
//! ```text
//! cargo run --release --features axum --example plans 127.0.0.1:3000 redis://127.0.0.1:6379
//! curl -H 'x-api-key: ann' -H 'x-plan: pro' -d 'a prompt of five words' http://127.0.0.1:3000/complete
//! ```

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Result};
use axum::{Router, routing};
use tidegate::http::{KeyOf, KeyedLimit, RateLimitLayer};
use tidegate::{ActiveLimit, Hashed, Limit, Limiter, Quota, RedisStore, ReserveError};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = |name, free, pro, enterprise| {
        let limit = Limit::new(name, Quota::per_minute(free)).plan("pro", Quota::per_minute(pro));
        limit.plan("enterprise", Quota::per_minute(enterprise))
    };
    let builder = Limiter::builder().limit(limit("requests", 60, 300, 1_200));
    let mut builder = builder.limit(limit("tokens", 5_000, 20_000, 100_000));
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    if let Some(url) = arguments.next() {
        builder = builder.store(RedisStore::open(&url)?);
    }
    let limiter = builder.build_ready(std::time::Duration::from_secs(2)).await?;
    let api_key = KeyOf::header(HeaderName::from_static("x-api-key"));
    let requests = KeyedLimit::new(limiter.limit("requests")?, api_key)
        .plan(|head| header(head.headers, "x-plan"));
    let hello = routing::get(|| async { "hello\n" }).layer(RateLimitLayer::new(requests));
    let complete = routing::post(complete).with_state(limiter.limit("tokens")?);
    let app = Router::new().route("/", hello).route("/complete", complete);
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("listening on {}", listener.local_addr()?);
    let mut terminated = signal(SignalKind::terminate())?;
    let end = async move { _ = terminated.recv().await };
    axum::serve(listener, app).with_graceful_shutdown(end).await?;
    Ok(limiter.shutdown(std::time::Duration::from_secs(1)).await?)
}

async fn complete(free: State<ActiveLimit>, head: HeaderMap, prompt: String) -> Result<String> {
    let key = header(&head, "x-api-key").ok_or(StatusCode::UNAUTHORIZED)?;
    let tokens = header(&head, "x-plan").and_then(|plan| free.plan(plan).ok()).unwrap_or(free.0);
    let reserved = tokens.reserve(&Hashed(key), 1_000).await.map_err(|error| match error {
        ReserveError::Denied(denied) => denied.into_response(),
        other => (StatusCode::BAD_REQUEST, other.to_string()).into_response(),
    })?;
    let used = prompt.split_whitespace().count() as u32; // The model says how many it used.
    reserved.commit(used);
    Ok(format!("used {used} tokens\n"))
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}
