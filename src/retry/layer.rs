//! A tower layer around a client: requests wait for a permit, and denied ones are sent again.

#![allow(clippy::disallowed_methods, reason = "a deadline needs a clock")]

use std::error::Error;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use tokio::time::{Instant, timeout_at};
use tower_layer::Layer;
use tower_service::Service;

use super::pacer::{GaveUp, Pacer, Permit, ResponseKind, after};

/// How long a call may wait to be sent.
pub const DEFAULT_WITHIN: Duration = Duration::from_secs(30);

/// Paces a client of one API by a [`Pacer`], and sends denied requests again.
///
/// After status 429 a request is sent again whatever its method is, because nothing was done; after status 503 only if
/// the method is idempotent (GET, HEAD, OPTIONS, TRACE, PUT, DELETE). Errors of the client are returned. A call ends as
/// soon as it is known that it cannot be sent in time: with the last denial, or with the error [`GaveUp`] if it was
/// never sent. Until then the last denial is kept with its body unread.
#[derive(Clone, Debug)]
pub struct PaceLayer {
    pacer: Pacer,
    within: Duration,
}

impl PaceLayer {
    /// All services of this layer, and of other layers with this pacer, share one pace.
    pub fn new(pacer: Pacer) -> Self {
        Self { pacer, within: DEFAULT_WITHIN }
    }

    /// How long a call may wait to be sent for the last time, without the time of its response.
    /// [`DEFAULT_WITHIN`] is the default, [`WAIT_MAX`](super::WAIT_MAX) the most.
    #[must_use]
    pub fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }
}

impl<S> Layer<S> for PaceLayer {
    type Service = Paced<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Paced { inner, layer: self.clone() }
    }
}

/// A client behind a [`PaceLayer`].
#[derive(Clone, Debug)]
pub struct Paced<S> {
    inner: S,
    layer: PaceLayer,
}

type BoxError = Box<dyn Error + Send + Sync>;

impl<S, B, R> Service<Request<B>> for Paced<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: Clone + Send + 'static,
    R: Send + 'static,
{
    type Response = Response<R>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, BoxError>> + Send>>;

    /// The client is polled for readiness when the call has a permit.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut inner, layer) = (self.inner.clone(), self.layer.clone());
        Box::pin(async move {
            let deadline = after(layer.within, Instant::now());
            let mut denial = None;
            loop {
                let sent = async {
                    let permit = Unsent(Some(layer.pacer.permit(deadline).await?));
                    let is_ready = poll_fn(|context| inner.poll_ready(context));
                    match timeout_at(deadline, is_ready).await {
                        Ok(ready) => ready.map_err(Into::into).map(|()| permit),
                        Err(_) => Err(GaveUp { remaining: Duration::ZERO }.into()),
                    }
                };
                let mut permit = match (sent.await, denial) {
                    (Ok(permit), _) => permit,
                    (Err(error), Some(denial)) if error.is::<GaveUp>() => return Ok(denial),
                    (Err(error), _) => return Err(error),
                };
                let sent = permit.0.take();
                let response = inner.call(request.clone()).await.map_err(Into::into)?;
                let kind = sent.map(|permit| permit.record(response.status(), response.headers()));
                if kind != Some(ResponseKind::Denied)
                    || !may_repeat(request.method(), response.status())
                {
                    return Ok(response);
                }
                denial = Some(response);
            }
        })
    }
}

/// A permit that is given back unless its request is sent.
struct Unsent(Option<Permit>);

impl Drop for Unsent {
    fn drop(&mut self) {
        if let Some(permit) = self.0.take() {
            permit.give_back();
        }
    }
}

/// Whether nothing was done, or doing it twice changes nothing.
fn may_repeat(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || method.is_idempotent()
}
