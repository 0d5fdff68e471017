//! A tower layer around a service: what the door refuses never reaches it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

#[cfg(feature = "tonic")]
use super::grpc::grpc_response;
use super::header_style::HeaderValues;
use super::keyed_limit::Head;
use super::rate_limit::{RateLimit, Refusal};

type Respond<B> = dyn Fn(&Refusal<'_>, &Head<'_>) -> Response<B> + Send + Sync;

/// Limits a service: a [`RateLimit`] decides about each request, and those it refuses do not reach the
/// service. `B` is the body of responses.
///
/// ```
/// use http::{HeaderName, Request, Response, StatusCode, header};
/// use tidegate::http::{RateLimit, KeyOf, RateLimitLayer, KeyedLimit};
/// use tidegate::{Limit, Limiter, Quota};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_minute(1))).build()?;
/// let key = KeyOf::header(HeaderName::from_static("x-api-key"));
/// let door = RateLimit::new(KeyedLimit::new(limiter.limit("api")?, key));
/// let served = |_: Request<()>| async { Ok::<_, std::io::Error>(Response::new(String::new())) };
/// let service = ServiceBuilder::new().layer(RateLimitLayer::new(door)).service(service_fn(served));
/// let request = || Request::builder().header("x-api-key", "alice").body(());
/// assert_eq!(service.clone().oneshot(request()?).await?.status(), StatusCode::OK);
/// let denied = service.oneshot(request()?).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert!(denied.headers().contains_key(header::RETRY_AFTER));
/// # Ok(())
/// # }
/// ```
pub struct RateLimitLayer<B> {
    /// With one count of owners, since all threads count each request in it.
    entrance: Arc<Entrance<Respond<B>>>,
}

struct Entrance<R: ?Sized> {
    door: RateLimit,
    respond: R,
}

impl<B: From<String>> RateLimitLayer<B> {
    /// Answers those who are refused with [`Refusal::response`] or, with the feature `tonic`, with
    /// `Refusal::grpc_status` if they asked by gRPC.
    pub fn new(door: RateLimit) -> Self {
        Self::with_response(door, |refusal, head| {
            grpc_response(head, refusal).unwrap_or_else(|| refusal.response())
        })
    }
}

/// Nobody asks by gRPC.
#[cfg(not(feature = "tonic"))]
fn grpc_response<B>(_: &Head<'_>, _: &Refusal<'_>) -> Option<Response<B>> {
    None
}

impl<B> RateLimitLayer<B> {
    /// Answers those who are refused with what `respond` makes; the limits' header fields are written into
    /// that, and `Retry-After` of a denial if it has none.
    pub fn with_response(
        door: RateLimit,
        respond: impl Fn(&Refusal<'_>, &Head<'_>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        Self { entrance: Arc::new(Entrance { door, respond }) }
    }
}

impl<B> Clone for RateLimitLayer<B> {
    fn clone(&self) -> Self {
        Self { entrance: self.entrance.clone() }
    }
}

impl<B> fmt::Debug for RateLimitLayer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").field("door", &self.entrance.door).finish_non_exhaustive()
    }
}

impl<S, B> Layer<S> for RateLimitLayer<B> {
    type Service = RateLimitService<S, B>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimitService { inner, limits: self.clone() }
    }
}

/// A service behind a [`RateLimitLayer`].
#[derive(Debug)]
pub struct RateLimitService<S, B> {
    inner: S,
    limits: RateLimitLayer<B>,
}

impl<S: Clone, B> Clone for RateLimitService<S, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), limits: self.limits.clone() }
    }
}

impl<B> Entrance<Respond<B>> {
    /// The response to a request that is not passed on, with what it is `told`.
    fn refuse(
        &self,
        refusal: &Refusal<'_>,
        head: &Head<'_>,
        mut told: HeaderValues,
    ) -> Response<B> {
        let mut response = (self.respond)(refusal, head);
        refusal.tell(response.headers_mut());
        told.write(response.headers_mut());
        response
    }
}

impl<S, R, B> Service<Request<R>> for RateLimitService<S, B>
where
    S: Service<Request<R>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    R: Send + 'static,
    B: 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = Answer<S::Future, B, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let entrance = &self.limits.entrance;
        if entrance.door.is_waiting() {
            let entrance = entrance.clone();
            // The service that was found ready is the one to be called.
            let clone = self.inner.clone();
            let mut inner = std::mem::replace(&mut self.inner, clone);
            let answer = async move {
                let (parts, body) = request.into_parts();
                let head = Head::from(&parts);
                let mut told = HeaderValues::default();
                if let Some(refusal) = entrance.door.ask_store(&head, &mut told).await {
                    return Ok(entrance.refuse(&refusal, &head, told));
                }
                let mut response = inner.call(Request::from_parts(parts, body)).await?;
                told.write(response.headers_mut());
                Ok(response)
            };
            return Answer { state: State::Waiting { answer: Box::pin(answer) } };
        }
        let head = Head::of(&request);
        let mut told = HeaderValues::default();
        if let Some(refusal) = entrance.door.ask(&head, &mut told) {
            let response = Some(entrance.refuse(&refusal, &head, told));
            // What was kept ready for this request is given back.
            self.inner = self.inner.clone();
            return Answer { state: State::Refused { response } };
        }
        Answer { state: State::Passed { inner: self.inner.call(request), told } }
    }
}

pin_project! {
    /// The answer to a request.
    pub struct Answer<F, B, E> {
        #[pin]
        state: State<F, B, E>,
    }
}

pin_project! {
    #[project = Stage]
    enum State<F, B, E> {
        Passed { #[pin] inner: F, told: HeaderValues },
        Refused { response: Option<Response<B>> },
        Waiting { answer: Boxed<B, E> },
    }
}

type Boxed<B, E> = Pin<Box<dyn Future<Output = Result<Response<B>, E>> + Send>>;

impl<F, B, E> Future for Answer<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            Stage::Passed { inner, told } => {
                let mut response = ready!(inner.poll(context))?;
                told.write(response.headers_mut());
                Poll::Ready(Ok(response))
            }
            // Nobody polls what has answered.
            Stage::Refused { response } => {
                response.take().map_or(Poll::Pending, |it| Poll::Ready(Ok(it)))
            }
            Stage::Waiting { answer } => answer.as_mut().poll(context),
        }
    }
}

impl<F, B, E> fmt::Debug for Answer<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Answer")
    }
}
