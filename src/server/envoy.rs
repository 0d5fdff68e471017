//! Envoy's rate limit service over gRPC, and the same as JSON at `POST /json`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use envoy_types::pb::envoy::service::ratelimit::v3 as pb;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::service::Routes;
use tonic::{Request, Response as GrpcResponse, Status, async_trait};
use tonic_health::server::{HealthReporter, health_reporter};

use super::ending_calls::EndingCalls;
use super::extract::{Body, Object};
use super::problem::{BODY_BYTES_MAX, Problem};
use super::reflection;
use super::running::Running;
use crate::rls::{Answer, Code, JsonRequest, RateLimitRequest, Refusal};

/// What Envoy asks the health service about.
const HEALTH_NAME: &str = "ratelimit";
/// How long before the caller's deadline the answer is ready.
const DEADLINE_MARGIN: Duration = Duration::from_millis(5);
/// How long the service waits for the store at a time, and between two times, until it is ready.
const READY_POLL: Duration = Duration::from_millis(100);
/// The most digits of a time in gRPC.
const TIMEOUT_DIGITS_MAX: usize = 8;

struct Envoy(Arc<Running>);

#[async_trait]
impl RateLimitService for Envoy {
    async fn should_rate_limit(
        &self,
        request: Request<pb::RateLimitRequest>,
    ) -> Result<GrpcResponse<pb::RateLimitResponse>, Status> {
        let timeout = request.metadata().get("grpc-timeout");
        let timeout = timeout.and_then(|timeout| timeout.to_str().ok()).and_then(parse_timeout);
        let deadline = timeout.and_then(|timeout| {
            Instant::now().checked_add(timeout.saturating_sub(DEADLINE_MARGIN))
        });
        if self.0.refuses_checks() {
            return Err(Status::unavailable("the service ends"));
        }
        let request = request.into_inner();
        let request = RateLimitRequest::from(&request);
        match self.0.in_force.load_full().answer(&request, deadline).await {
            Ok(answer) => Ok(GrpcResponse::new(answer.into())),
            Err(refusal @ Refusal::NegativeHits { .. }) => {
                Err(Status::unimplemented(refusal.to_string()))
            }
            Err(refusal) => Err(Status::invalid_argument(refusal.to_string())),
        }
    }
}

/// A time as gRPC writes it: digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number =
        digits.len() <= TIMEOUT_DIGITS_MAX && digits.bytes().all(|it| it.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// What answers over gRPC.
#[allow(clippy::disallowed_methods, reason = "the service's health is followed beside it")]
pub(super) fn grpc(running: &Arc<Running>) -> Router {
    let (reporter, health) = health_reporter();
    tokio::spawn(follow_health(Arc::downgrade(running), running.ends(), reporter));
    let service = RateLimitServiceServer::new(Envoy(running.clone()))
        .max_decoding_message_size(BODY_BYTES_MAX);
    let health = health.max_decoding_message_size(BODY_BYTES_MAX);
    let health = EndingCalls::new(health, running);
    let mut routes = Routes::new(service).add_service(health);
    match (reflection::builder().build_v1(), reflection::builder().build_v1alpha()) {
        (Ok(newer), Ok(older)) => {
            let newer = newer.max_decoding_message_size(BODY_BYTES_MAX);
            let older = older.max_decoding_message_size(BODY_BYTES_MAX);
            routes = routes
                .add_service(EndingCalls::new(newer, running))
                .add_service(EndingCalls::new(older, running));
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!("the service does not say over gRPC what it has: {error}");
        }
    }
    routes.prepare().into_axum_router()
}

/// `ratelimit` is healthy from the store's first answer until the end is announced.
#[allow(clippy::disallowed_methods, reason = "a store is asked by the real clock")]
async fn follow_health(
    running: Weak<Running>,
    mut ends: watch::Receiver<bool>,
    reporter: HealthReporter,
) {
    use tonic_health::ServingStatus::{NotServing, Serving};
    reporter.set_service_status(HEALTH_NAME, NotServing).await;
    let ready = async {
        while let Some(running) = running.upgrade() {
            if running.limiter.ready(READY_POLL).await.is_ok() {
                return reporter.set_service_status(HEALTH_NAME, Serving).await;
            }
            drop(running);
            tokio::time::sleep(READY_POLL).await;
        }
    };
    tokio::select! {
        () = ready => {}
        _ = ends.wait_for(|ends| *ends) => return,
    }
    // An error: the service is gone.
    if ends.wait_for(|ends| *ends).await.is_ok() {
        reporter.set_service_status(HEALTH_NAME, NotServing).await;
    }
}

/// `POST /json`.
pub(super) async fn json(
    State(running): State<Arc<Running>>,
    body: Body,
) -> Result<Response, Problem> {
    let Object::<JsonRequest>(request) = body.parse()?;
    let request = RateLimitRequest::from(&request);
    let answer = running.in_force.load_full().answer(&request, None).await;
    let answer: Answer = answer.map_err(|refusal| {
        let status = match refusal {
            Refusal::NegativeHits { .. } => StatusCode::NOT_IMPLEMENTED,
            Refusal::NoDomain
            | Refusal::NoDescriptor
            | Refusal::TooManyDescriptors(_)
            | Refusal::OwnLimit { .. } => StatusCode::BAD_REQUEST,
        };
        Problem::new(status, refusal.to_string())
    })?;
    let status = match answer.overall_code {
        Code::Ok => StatusCode::OK,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
    };
    Ok((status, Json(answer)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_digits_and_a_unit() {
        assert_eq!(parse_timeout("20m"), Some(Duration::from_millis(20)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "m", "20", "20x", "-1S", "123456789S", "1.5S", "1µ"] {
            assert_eq!(parse_timeout(wrong), None, "{wrong}");
        }
    }
}
