//! A tower layer that holds a permit while a request is under way: until the body of its response has ended.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::client_ip::ClientIp;
use super::head::Head;
use super::key_of::{KeyOf, Presence};
use super::unknown_client::UnknownClients;
use crate::error::AcquireError;
use crate::limiter::{ConcurrencyLimit, Permit};

/// Lets at most so many requests of a key be under way as a [`Concurrency`](crate::Concurrency) limit has permits.
///
/// A permit is held until the body of the response has ended, or until the client or the service gives up. Others are answered
/// with status 429, or 503 where the limit [protects the service](Self::protects_service), too many wait, or the store does
/// not answer. A request without a key is answered with status 400, and one of an unknown peer with
/// 500, which the log explains.
///
/// gRPC calls get the same HTTP statuses: hold the permit in the method there.
///
/// ```
/// use tidegate::http::PermitLayer;
/// use tidegate::{Concurrency, Limiter};
///
/// let limiter = Limiter::builder().concurrency(Concurrency::new("slow", 2)).build()?;
/// let layer = PermitLayer::per_client(limiter.concurrency("slow")?);
/// # let _ = layer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PermitLayer {
    limit: ConcurrencyLimit,
    key: KeyOf,
    within: Option<Duration>,
    protects_service: bool,
    unknown_clients: Arc<UnknownClients>,
}

impl PermitLayer {
    /// Requests of one key share the permits of that key.
    pub fn new(limit: ConcurrencyLimit, key: KeyOf) -> Self {
        let unknown_clients = Arc::default();
        Self { limit, key, within: None, protects_service: false, unknown_clients }
    }

    /// Requests of one client address share permits. No proxy is trusted: see [`ClientIp`] for services behind one.
    pub fn per_client(limit: ConcurrencyLimit) -> Self {
        Self::new(limit, KeyOf::client(ClientIp::peer()))
    }

    /// All requests share permits: those of the empty key.
    pub fn shared(limit: ConcurrencyLimit) -> Self {
        Self::new(limit, KeyOf::shared()).protects_service()
    }

    /// Requests wait for a permit, for `within` at most: see
    /// [`acquire_within`](ConcurrencyLimit::acquire_within). By default they do not wait.
    #[must_use]
    pub fn within(mut self, within: Duration) -> Self {
        self.within = Some(within);
        self
    }

    /// This limit protects the service, whoever its clients are: requests that get no permit are answered with status 503.
    #[must_use]
    pub fn protects_service(mut self) -> Self {
        self.protects_service = true;
        self
    }

    /// The permit of a request, or the status that it is answered with.
    async fn permit(&self, head: &Head<'_>) -> Result<Permit, StatusCode> {
        let secret = &self.limit.shared.secret;
        let (key, presence) = secret.write_key(|key| self.key.write(head, key));
        match presence {
            Presence::Present | Presence::Unreported => {}
            Presence::Missing | Presence::Ambiguous => return Err(StatusCode::BAD_REQUEST),
            Presence::UnknownPeer => {
                self.unknown_clients.log_unknown_peer(self.limit.name());
                return Err(StatusCode::INTERNAL_SERVER_ERROR);
            }
        }
        let permit = match self.within {
            Some(within) => self.limit.acquire_within(&key, within).await,
            None => self.limit.acquire(&key).await,
        };
        permit.map_err(|error| match error {
            AcquireError::Denied { .. } | AcquireError::TimedOut { .. }
                if !self.protects_service =>
            {
                StatusCode::TOO_MANY_REQUESTS
            }
            _ => StatusCode::SERVICE_UNAVAILABLE,
        })
    }
}

/// The response to a request without a permit, as a problem (RFC 9457).
fn refused<B: From<String>>(status: StatusCode) -> Response<B> {
    let detail = match status {
        StatusCode::BAD_REQUEST => "the request does not say who asks",
        StatusCode::INTERNAL_SERVER_ERROR => "the address of the client is unknown",
        _ => "too many requests are under way",
    };
    let (title, code) = (status.canonical_reason().unwrap_or_default(), status.as_u16());
    let problem = format!(
        r#"{{"type":"about:blank","title":"{title}","status":{code},"detail":"{detail}"}}"#
    );
    let mut response = Response::new(problem.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        // Nobody knows when a permit comes free.
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

impl<S> Layer<S> for PermitLayer {
    type Service = PermitService<S>;

    fn layer(&self, inner: S) -> PermitService<S> {
        PermitService { inner, layer: Arc::new(self.clone()) }
    }
}

/// A service behind a [`PermitLayer`].
#[derive(Clone, Debug)]
pub struct PermitService<S> {
    inner: S,
    layer: Arc<PermitLayer>,
}

type Boxed<B, E> = Pin<Box<dyn Future<Output = Result<Response<PermitBody<B>>, E>> + Send>>;

impl<S, R, B> Service<Request<R>> for PermitService<S>
where
    S: Service<Request<R>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    R: Send + 'static,
    B: From<String>,
{
    type Response = Response<PermitBody<B>>;
    type Error = S::Error;
    type Future = Boxed<B, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        // The instance that was found ready is the one to call, if the request has not to wait.
        let mut unready = self.inner.clone();
        let mut ready = Some(std::mem::replace(&mut self.inner, unready.clone()));
        let layer = self.layer.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let head = Head::from(&parts);
            let permit = {
                let mut permit = pin!(layer.permit(&head));
                match poll_fn(|context| Poll::Ready(permit.as_mut().poll(context))).await {
                    Poll::Ready(permit) => permit,
                    Poll::Pending => {
                        // What the inner service has reserved is for others meanwhile.
                        ready = None;
                        permit.await
                    }
                }
            };
            let permit = match permit {
                Ok(permit) => permit,
                Err(status) => {
                    return Ok(refused(status).map(|inner| PermitBody { inner, permit: None }));
                }
            };
            let mut inner = if let Some(ready) = ready {
                ready
            } else {
                poll_fn(|context| unready.poll_ready(context)).await?;
                unready
            };
            let response = inner.call(Request::from_parts(parts, body)).await?;
            Ok(response.map(|inner| PermitBody { inner, permit: Some(permit) }))
        })
    }
}

pin_project! {
    /// The body of a response, which holds a permit until it has ended or is dropped.
    pub struct PermitBody<B> {
        #[pin]
        inner: B,
        permit: Option<Permit>,
    }
}

impl<B> fmt::Debug for PermitBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitBody").field("permit", &self.permit).finish_non_exhaustive()
    }
}

impl<B: Default> Default for PermitBody<B> {
    fn default() -> Self {
        Self { inner: B::default(), permit: None }
    }
}

impl<B: Body> Body for PermitBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let frame = this.inner.poll_frame(context);
        if let Poll::Ready(None | Some(Err(_))) = frame {
            drop(this.permit.take());
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
