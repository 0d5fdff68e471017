//! A tower layer around a client: requests wait for their turn, and denied ones are sent again.

#![allow(clippy::disallowed_methods, reason = "a deadline is told by the clock")]

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

/// Calls are given up after this, unless it is said otherwise.
pub const DEFAULT_WITHIN: Duration = Duration::from_secs(30);

/// Paces a client of one API by a [`Pacer`], and sends denied requests again.
///
/// Status 429 is asked again whatever the method is, since nothing was done; status 503 only if the
/// method may be repeated (GET, HEAD, OPTIONS, TRACE, PUT, DELETE). Errors of the client are passed on. A
/// call ends as soon as it is known that nobody can be sent within its time: with the last denial, or with
/// the error [`GaveUp`] if it was never sent. Meanwhile the last denial is kept with its body unread.
#[derive(Clone, Debug)]
pub struct PaceLayer {
    pacer: Pacer,
    within: Duration,
}

impl PaceLayer {
    /// All services that are made with this layer, and with other layers of this pacer, keep one pace.
    pub fn new(pacer: Pacer) -> Self {
        Self { pacer, within: DEFAULT_WITHIN }
    }

    /// How long a call may take to be sent for the last time, [`DEFAULT_WITHIN`] otherwise,
    /// [`WAIT_MAX`](super::WAIT_MAX) at most. How long the answer takes is not in it.
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

    /// The client is asked whether it is ready when the call's turn has come.
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
                    let turn = Unsent(Some(layer.pacer.permit(deadline).await?));
                    let is_ready = poll_fn(|context| inner.poll_ready(context));
                    match timeout_at(deadline, is_ready).await {
                        Ok(ready) => ready.map_err(Into::into).map(|()| turn),
                        Err(_) => Err(GaveUp { remaining: Duration::ZERO }.into()),
                    }
                };
                let mut turn = match (sent.await, denial) {
                    (Ok(turn), _) => turn,
                    (Err(error), Some(denial)) if error.is::<GaveUp>() => return Ok(denial),
                    (Err(error), _) => return Err(error),
                };
                let sent = turn.0.take();
                let response = inner.call(request.clone()).await.map_err(Into::into)?;
                let heard = sent.map(|turn| turn.record(response.status(), response.headers()));
                if heard != Some(ResponseKind::Denied)
                    || !may_repeat(request.method(), response.status())
                {
                    return Ok(response);
                }
                denial = Some(response);
            }
        })
    }
}

/// A turn of a request that is given back unless it is sent.
struct Unsent(Option<Permit>);

impl Drop for Unsent {
    fn drop(&mut self) {
        if let Some(turn) = self.0.take() {
            turn.give_back();
        }
    }
}

/// Whether nothing was done, or nothing happens that has not happened if it was.
fn may_repeat(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || method.is_idempotent()
}
