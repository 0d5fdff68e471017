//! Envoy's rate limit service over gRPC, and the same as JSON at `POST /json`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use envoy_types::pb::envoy::service::ratelimit::v3 as pb;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tonic::service::Routes;
use tonic::{Request, Response as GrpcResponse, Status, async_trait};
use tonic_health::server::{HealthReporter, health_reporter};

use super::check::parsed;
use super::problem::Problem;
use super::running::Running;
use crate::rls::{Answer, Code, RateLimitRequest, Refusal};

/// What Envoy asks the health service about.
const HEALTH_NAME: &str = "ratelimit";
/// The answer leaves so long before who asks gives up.
const ANSWER_BEFORE: Duration = Duration::from_millis(5);
/// How long one look waits until the store is ready.
const LOOK: Duration = Duration::from_secs(1);
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
        let timeout = timeout.and_then(|timeout| timeout.to_str().ok()).and_then(time);
        let within = timeout.map(|timeout| timeout.saturating_sub(ANSWER_BEFORE));
        if self.0.refuses_checks() {
            return Err(Status::unavailable("the service ends"));
        }
        let request = request.into_inner().into();
        match self.0.in_force.load_full().answer(&request, within).await {
            Ok(answer) => Ok(GrpcResponse::new(answer.into())),
            Err(refusal @ Refusal::Late) => Err(Status::deadline_exceeded(refusal.to_string())),
            Err(refusal @ (Refusal::OwnLimit(_) | Refusal::NegativeHits(_))) => {
                Err(Status::unimplemented(refusal.to_string()))
            }
            Err(refusal) => Err(Status::invalid_argument(refusal.to_string())),
        }
    }
}

/// A time as gRPC writes it: digits and a unit.
fn time(text: &str) -> Option<Duration> {
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
    tokio::spawn(follow_health(running.clone(), reporter));
    let service = RateLimitServiceServer::new(Envoy(running.clone()));
    Routes::new(service).add_service(health).prepare().into_axum_router()
}

/// Healthy from the store's first answer until the end is announced.
async fn follow_health(running: Arc<Running>, reporter: HealthReporter) {
    use tonic_health::ServingStatus::{NotServing, Serving};
    reporter.set_service_status(HEALTH_NAME, NotServing).await;
    let mut ends = running.ends();
    let ready = async {
        while running.limiter.ready(LOOK).await.is_err() {}
        reporter.set_service_status(HEALTH_NAME, Serving).await;
    };
    let has_ended = tokio::select! {
        () = ready => false,
        _ = ends.wait_for(|ends| *ends) => true,
    };
    // The sender lives as long as `running` does, which is here.
    if !has_ended && ends.wait_for(|ends| *ends).await.is_ok() {
        reporter.set_service_status(HEALTH_NAME, NotServing).await;
    }
}

/// `POST /json`.
pub(super) async fn json(
    State(running): State<Arc<Running>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    if running.refuses_checks() {
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the service ends"));
    }
    let body = body.map_err(|rejection| Problem::of_body(&rejection))?;
    let request: RateLimitRequest = parsed(&body)?;
    let answer = running.in_force.load_full().answer(&request, None).await;
    let answer: Answer = answer.map_err(|refusal| {
        let status = match refusal {
            Refusal::Late => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::OwnLimit(_) | Refusal::NegativeHits(_) => StatusCode::NOT_IMPLEMENTED,
            Refusal::NoDomain | Refusal::NoDescriptor => StatusCode::BAD_REQUEST,
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
        assert_eq!(time("20m"), Some(Duration::from_millis(20)));
        assert_eq!(time("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "m", "20", "20x", "-1S", "123456789S", "1.5S", "1µ"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }
}
