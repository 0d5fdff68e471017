//! gRPC calls that last for as long as their clients like: they end soon after the service's end was announced.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::running::Running;

/// How long a call goes on after the end was announced, or after it began if that is later. Short calls are answered in this time,
/// and watches of the health tell `NOT_SERVING`.
const CALLS_END_AFTER: Duration = Duration::from_secs(1);

/// A gRPC service whose open calls end when the process does.
#[derive(Clone)]
pub(super) struct EndingCalls<S> {
    service: S,
    ends: watch::Receiver<bool>,
}

impl<S> EndingCalls<S> {
    pub(super) fn new(service: S, running: &Running) -> Self {
        Self { service, ends: running.ends() }
    }
}

impl<S: NamedService> NamedService for EndingCalls<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for EndingCalls<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The body of the request ends too: else the client's half would keep the call open.
        let request = request.map(|inner| ending(inner, HeaderMap::new(), &self.ends));
        let (answered, ends) = (self.service.call(request), self.ends.clone());
        Box::pin(async move {
            let response = answered.await?;
            Ok(response.map(|inner| ending(inner, unavailable(), &ends)))
        })
    }
}

/// What a client is told whose call ends.
fn unavailable() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    // This text is ASCII, so that encoding it cannot fail.
    let _ = Status::unavailable("the service ends").add_header(&mut trailers);
    trailers
}

fn ending(inner: Body, trailers: HeaderMap, ends: &watch::Receiver<bool>) -> Body {
    Body::new(EndingBody { inner, trailers, end: Box::pin(end_of_call(ends.clone())) })
}

/// Waits until a call that begins now is to end.
#[allow(clippy::disallowed_methods, reason = "clients live by the real clock")]
async fn end_of_call(mut ends: watch::Receiver<bool>) {
    // An error: the service is gone.
    let _ = ends.wait_for(|ends| *ends).await;
    tokio::time::sleep(CALLS_END_AFTER).await;
}

/// A body that ends when the call is to end, unless it has before.
struct EndingBody {
    inner: Body,
    /// What it ends with then.
    trailers: HeaderMap,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl http_body::Body for EndingBody {
    type Data = <Body as http_body::Body>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if frame.is_ready() {
            return frame;
        }
        ready!(self.end.as_mut().poll(context));
        // From here on it has nothing more.
        self.inner = Body::empty();
        let trailers = std::mem::take(&mut self.trailers);
        Poll::Ready((!trailers.is_empty()).then(|| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
