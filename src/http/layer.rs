//! A tower layer: refused requests do not reach the service.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::evaluation::{Evaluation, Open};
#[cfg(feature = "tonic")]
use super::grpc::{grpc_only_response, grpc_response};
use super::head::{Head, ResponseHead};
use super::header_style::HeaderValues;
use super::rate_limit::RateLimit;
use super::refusal::Refusal;
use crate::limiter::AsyncLimit;

type Respond<B> = dyn Fn(&Refusal, &Head<'_>) -> Response<B> + Send + Sync;

/// Limits a service: a [`RateLimit`] decides about each request, and refused ones do not reach the service. `B` is
/// the body of responses, so that `RateLimitLayer<axum::body::Body>` is the type of a layer for axum.
///
/// ```
/// use http::{HeaderName, Request, Response, StatusCode, header};
/// use tidegate::http::{KeyOf, KeyedLimit, RateLimitLayer};
/// use tidegate::{Limit, Limiter, Quota};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_minute(1))).build()?;
/// let key = KeyOf::header(HeaderName::from_static("x-api-key"));
/// let limit = KeyedLimit::new(limiter.limit("api")?, key);
/// let served = |_: Request<()>| async { Ok::<_, std::io::Error>(Response::new(String::new())) };
/// let service = ServiceBuilder::new().layer(RateLimitLayer::new(limit)).service(service_fn(served));
/// let request = || Request::builder().header("x-api-key", "alice").body(());
/// assert_eq!(service.clone().oneshot(request()?).await?.status(), StatusCode::OK);
/// let denied = service.oneshot(request()?).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()[header::RETRY_AFTER], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""api";r=0;t=60"#);
/// # Ok(())
/// # }
/// ```
pub struct RateLimitLayer<B> {
    /// One allocation with one reference count, because all threads change the count with each request.
    shared: Arc<Shared<Respond<B>>>,
}

struct Shared<R: ?Sized> {
    rate_limit: RateLimit,
    respond: R,
}

impl<B: From<String>> RateLimitLayer<B> {
    /// Refused requests get [`Refusal::response`] or, with the feature `tonic`, `Refusal::grpc_status` if they are
    /// gRPC calls.
    pub fn new(rate_limit: impl Into<RateLimit>) -> Self {
        let rate_limit = rate_limit.into();
        let body = rate_limit.body();
        Self::with_response(rate_limit, move |refusal, head| {
            grpc_response(head, refusal).unwrap_or_else(|| refusal.response(body))
        })
    }

    /// Each client address has a bucket: see [`KeyedLimit::per_client`](super::KeyedLimit::per_client). Behind a
    /// proxy, name it with [`ClientIp`](super::ClientIp), or all clients have the proxy's address.
    ///
    /// ```no_run
    /// # #[cfg(feature = "axum")]
    /// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::SocketAddr;
    ///
    /// use axum::Router;
    /// use axum::body::Body;
    /// use tidegate::Quota;
    /// use tidegate::http::RateLimitLayer;
    ///
    /// let layer: RateLimitLayer<Body> =
    ///     RateLimitLayer::per_client(tidegate::local(Quota::per_second(100))?);
    /// let app: Router = Router::new().layer(layer);
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn per_client(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(RateLimit::per_client(limit))
    }

    /// All requests share one bucket: see [`KeyedLimit::shared`](super::KeyedLimit::shared), and
    /// [`KeyedLimit::protects_service`](super::KeyedLimit::protects_service) for status 503 instead of 429.
    pub fn shared(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(RateLimit::shared(limit))
    }
}

/// Without tonic there are no gRPC calls.
#[cfg(not(feature = "tonic"))]
fn grpc_response<B>(_: &Head<'_>, _: &Refusal) -> Option<Response<B>> {
    None
}

impl<B> RateLimitLayer<B> {
    /// Refused requests get the response that `respond` returns. The limits' header fields are written into it, and
    /// `Retry-After` if it has none.
    pub fn with_response(
        rate_limit: impl Into<RateLimit>,
        respond: impl Fn(&Refusal, &Head<'_>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        Self { shared: Arc::new(Shared { rate_limit: rate_limit.into(), respond }) }
    }
}

#[cfg(feature = "tonic")]
impl<B: Default> RateLimitLayer<B> {
    /// For a service that only gRPC clients call, such as tonic's: each refused call gets
    /// [`Refusal::grpc_status`], whatever its content type is.
    ///
    /// ```no_run
    /// use tidegate::Quota;
    /// use tidegate::http::{RateLimit, RateLimitLayer};
    /// use tonic::transport::Server;
    ///
    /// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = tidegate::local(Quota::per_second(100))?;
    /// let (_, health) = tonic_health::server::health_reporter();
    /// Server::builder()
    ///     .layer(RateLimitLayer::grpc(RateLimit::per_client(limit)))
    ///     .add_service(health)
    ///     .serve("127.0.0.1:3001".parse()?)
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn grpc(rate_limit: impl Into<RateLimit>) -> Self {
        Self::with_response(rate_limit, |refusal, head| grpc_only_response(refusal, head))
    }
}

impl<B> Clone for RateLimitLayer<B> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<B> fmt::Debug for RateLimitLayer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("rate_limit", &self.shared.rate_limit)
            .finish_non_exhaustive()
    }
}

impl<S, B> Layer<S> for RateLimitLayer<B> {
    type Service = RateLimitService<S, B>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimitService { inner, layer: self.clone() }
    }
}

/// A service behind a [`RateLimitLayer`].
#[derive(Debug)]
pub struct RateLimitService<S, B> {
    inner: S,
    layer: RateLimitLayer<B>,
}

impl<S: Clone, B> Clone for RateLimitService<S, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone() }
    }
}

/// A request whose response decides about a charge.
struct Settling<B> {
    shared: Arc<Shared<Respond<B>>>,
    evaluation: Evaluation,
}

impl<B> Shared<Respond<B>> {
    /// The response to a refused request.
    fn refuse(&self, refusal: &Refusal, head: &Head<'_>, evaluation: &Evaluation) -> Response<B> {
        let mut response = (self.respond)(refusal, head);
        refusal.write_retry_after(response.headers_mut());
        let mut values = self.rate_limit.header_values(&evaluation.decisions);
        values.write(response.headers_mut());
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
    type Future = ResponseFuture<S::Future, B, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let shared = &self.layer.shared;
        let head = Head::of(&request);
        let evaluation = match shared.rate_limit.evaluate(&head) {
            Ok(evaluation) => evaluation,
            Err(open) => {
                let future = Box::pin(self.wait(request, open));
                return ResponseFuture { state: State::Waiting { future } };
            }
        };
        if let Some(refusal) = &evaluation.refusal {
            let response = Some(shared.refuse(refusal, &head, &evaluation));
            // The inner service reserved something for this request. A clone has reserved nothing.
            self.inner = self.inner.clone();
            return ResponseFuture { state: State::Refused { response } };
        }
        if evaluation.is_open() {
            let open = Box::new(Settling { shared: shared.clone(), evaluation });
            return ResponseFuture {
                state: State::Settling { inner: self.inner.call(request), open: Some(open) },
            };
        }
        let values = shared.rate_limit.header_values(&evaluation.decisions);
        ResponseFuture { state: State::Passed { inner: self.inner.call(request), values } }
    }
}

impl<S, B> RateLimitService<S, B> {
    /// The response to a request that has to wait.
    fn wait<R>(
        &mut self,
        request: Request<R>,
        open: Open,
    ) -> impl Future<Output = Result<Response<B>, S::Error>> + Send + use<S, B, R>
    where
        S: Service<Request<R>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send,
        R: Send + 'static,
        B: 'static,
    {
        let shared = self.layer.shared.clone();
        // What the inner service has reserved is for others while this request waits. A clone has reserved nothing.
        let mut inner = self.inner.clone();
        self.inner = inner.clone();
        async move {
            let (parts, body) = request.into_parts();
            let head = Head::from(&parts);
            let evaluation = shared.rate_limit.answer(open).await;
            if let Some(refusal) = &evaluation.refusal {
                return Ok(shared.refuse(refusal, &head, &evaluation));
            }
            poll_fn(|context| inner.poll_ready(context)).await?;
            let mut response = inner.call(Request::from_parts(parts, body)).await?;
            let mut values = shared.rate_limit.settle(evaluation, &ResponseHead::of(&response));
            values.write(response.headers_mut());
            Ok(response)
        }
    }
}

pin_project! {
    /// The response to a request.
    pub struct ResponseFuture<F, B, E> {
        #[pin]
        state: State<F, B, E>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F, B, E> {
        Passed { #[pin] inner: F, values: HeaderValues },
        Settling { #[pin] inner: F, open: Option<Box<Settling<B>>> },
        Refused { response: Option<Response<B>> },
        Waiting { future: Boxed<B, E> },
    }
}

type Boxed<B, E> = Pin<Box<dyn Future<Output = Result<Response<B>, E>> + Send>>;

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Passed { inner, values } => {
                let mut response = ready!(inner.poll(context))?;
                values.write(response.headers_mut());
                Poll::Ready(Ok(response))
            }
            StateProjection::Settling { inner, open } => {
                let mut response = ready!(inner.poll(context))?;
                if let Some(open) = open.take() {
                    let Settling { shared, evaluation } = *open;
                    let head = ResponseHead::of(&response);
                    let mut values = shared.rate_limit.settle(evaluation, &head);
                    values.write(response.headers_mut());
                }
                Poll::Ready(Ok(response))
            }
            // A future is not polled after it is ready.
            StateProjection::Refused { response } => {
                response.take().map_or(Poll::Pending, |it| Poll::Ready(Ok(it)))
            }
            StateProjection::Waiting { future } => future.as_mut().poll(context),
        }
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseFuture")
    }
}
