//! A server of `tidegate serve`'s answers, or of answers that it gives at once: `benches/service` asks both.
//!
//! ```text
//! benches/service
//! ```
//!
//! Over HTTP both are pages of one server. Both parse requests and write answers of the same fields. The service has limits that are
//! plenty, without a store.
#![allow(clippy::disallowed_methods, reason = "a server lives by the real clock")]

use std::borrow::Cow;
use std::error::Error;
use std::process::ExitCode;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::Duration;
use serde::{Deserialize, Serialize};
use tidegate::config::Config;
use tidegate::server::Service;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::{Request, Response as GrpcResponse, Status, async_trait};

const LIMITS: &str =
    "[limits.api]\nquota = \"1000000000/s\"\n[domains.web.user]\nquota = \"1000000000/s\"\n";

/// A check as the service reads it.
#[derive(Deserialize)]
struct Check<'b> {
    #[serde(borrow)]
    limit: Cow<'b, str>,
    #[allow(dead_code, reason = "it is read, and nothing depends on it")]
    #[serde(borrow)]
    key: Cow<'b, str>,
    #[serde(default = "one_token")]
    cost: u32,
}

fn one_token() -> u32 {
    1
}

/// An answer as the service writes it.
#[derive(Serialize)]
struct Answer<'b> {
    allowed: bool,
    limit: Cow<'b, str>,
    cost: u32,
    burst: u64,
    remaining: u64,
    retry_after_ms: u64,
    reset_after_ms: u64,
    sure: bool,
}

impl<'b> From<Check<'b>> for Answer<'b> {
    fn from(Check { limit, cost, .. }: Check<'b>) -> Self {
        Self {
            allowed: true,
            limit,
            cost,
            burst: 1_000_000_000,
            remaining: 999_999_999,
            retry_after_ms: 0,
            reset_after_ms: 1,
            sure: true,
        }
    }
}

/// Answers OK at once.
struct AtOnce;

#[async_trait]
impl RateLimitService for AtOnce {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<GrpcResponse<RateLimitResponse>, Status> {
        let status = DescriptorStatus {
            code: Code::Ok.into(),
            current_limit: Some(RateLimit {
                requests_per_unit: 1_000_000_000,
                unit: Unit::Second.into(),
                ..RateLimit::default()
            }),
            limit_remaining: 999_999_999,
            duration_until_reset: Some(Duration { seconds: 1, nanos: 0 }),
            ..DescriptorStatus::default()
        };
        let statuses = vec![status; request.into_inner().descriptors.len()];
        let overall_code = Code::Ok.into();
        let response = RateLimitResponse { overall_code, statuses, ..RateLimitResponse::default() };
        Ok(GrpcResponse::new(response))
    }
}

async fn allow(body: Bytes) -> Result<Response, StatusCode> {
    let wrong = |_| StatusCode::BAD_REQUEST;
    if body.first() == Some(&b'[') {
        let checks: Vec<Check<'_>> = serde_json::from_slice(&body).map_err(wrong)?;
        let answers: Vec<Answer<'_>> = checks.into_iter().map(Answer::from).collect();
        return Ok(Json(answers).into_response());
    }
    let check: Check<'_> = serde_json::from_slice(&body).map_err(wrong)?;
    Ok(Json(Answer::from(check)).into_response())
}

async fn serve(which: &str) -> Result<(), Box<dyn Error>> {
    let config = Config::from_toml(LIMITS)?;
    let limiter = config.builder().build()?;
    let service = Service::new(config, limiter)?;
    let http = service.router_with(Router::new().route("/at-once", post(allow)));
    let grpc = if which == "service" {
        service.grpc()
    } else {
        Routes::new(RateLimitServiceServer::new(AtOnce)).prepare().into_axum_router()
    };
    let listen = async || TcpListener::bind("127.0.0.1:0").await;
    let (for_http, for_grpc) = (listen().await?, listen().await?);
    println!("listening on {} {}", for_http.local_addr()?, for_grpc.local_addr()?);
    let without_delay = |listener: TcpListener| {
        listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true);
        })
    };
    tokio::try_join!(
        axum::serve(without_delay(for_http), http).into_future(),
        axum::serve(without_delay(for_grpc), grpc).into_future(),
    )?;
    Ok(())
}

fn main() -> ExitCode {
    let which = std::env::args().nth(1).unwrap_or_default();
    if !["service", "at-once"].contains(&&*which) {
        eprintln!("one of service and at-once: benches/service asks both");
        return ExitCode::from(2);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let served = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(serve(&which)));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
