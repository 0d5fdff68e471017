//! The service that decides for programs in any language, over HTTP, and for Envoy, over gRPC.
//!
//! `tidegate serve` runs it; a service of your own can take its [`router`](Service::router) and its
//! [`grpc`](Service::grpc). docs/SERVICE.md has the requests and their answers, docs/ENVOY.md those of Envoy.
//!
//! ```
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//! # let _entered = runtime.enter();
//! use tidegate::config::Config;
//! use tidegate::server::Service;
//!
//! let config = Config::from_toml("[limits.api]\nquota = \"600/min\"")?;
//! let limiter = config.builder().build()?;
//! let app: axum::Router = Service::new(config, limiter)?.router();
//! # let _ = app;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post, put};

use crate::config::Config;
use crate::error::ConfigError;
use crate::limiter::Limiter;

mod access_log;
mod check;
mod client_limit;
mod ending_calls;
mod envoy;
mod extract;
mod keys;
mod limits;
mod open_permits;
mod open_reservations;
mod openapi;
mod overrides;
mod permits;
mod problem;
mod records;
mod reflection;
mod reservations;
mod running;
mod token;

pub use check::CHECKS_MAX;
pub use problem::BODY_BYTES_MAX;
use problem::Problem;
pub use running::ReloadError;
use running::Running;

/// For how long a question whether the service is ready waits for the store.
const READY_WITHIN: Duration = Duration::from_millis(250);

/// A limiter that answers over HTTP and gRPC. Cheap to clone; all clones are one service.
#[derive(Clone)]
pub struct Service(Arc<Running>);

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("limiter", &self.0.limiter).finish_non_exhaustive()
    }
}

impl Service {
    /// A service of a limiter that was built from `config`. Change its limits by [`reload`](Self::reload) alone: the service
    /// has them at hand.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] if the limiter lacks one of its limits.
    pub fn new(config: Config, limiter: Limiter) -> Result<Self, ConfigError> {
        Ok(Self(Arc::new(Running::new(config, limiter)?)))
    }

    /// The limits and domains of `config` in place of those that the service has ([`Limiter::update`]), and what else
    /// [can change](Config::fixed_field_that_differs). No request waits for it.
    ///
    /// # Errors
    ///
    /// [`ReloadError`] if something else has changed too, or the limits cannot be changed like that: then nothing is changed.
    pub fn reload(&self, config: Config) -> Result<(), ReloadError> {
        self.0.reload(config)
    }

    /// Whether its metrics have the names of envoyproxy/ratelimit too.
    pub fn has_ratelimit_metrics(&self) -> bool {
        self.0.in_force.load().config.server().near_limit_ratio.is_some()
    }

    /// From now on the service says that it is not ready: call it when it is told to end, so that no more is sent to it. What
    /// comes is decided all the same. Calls of the health service and of reflection that are still open a second later end.
    pub fn announce_end(&self) {
        self.0.announce_end();
    }

    /// Checks that come from now on are refused, with status 503 or `UNAVAILABLE`: call it before [`Limiter::shutdown`], after which what is spent
    /// is lost.
    pub fn refuse_checks(&self) {
        self.0.refuse_checks();
    }

    /// Gives back the permits that this process alone holds, and waits until reservations and permits are settled and released
    /// that are being: call it after [`refuse_checks`](Self::refuse_checks), and before [`Limiter::shutdown`].
    pub async fn settled(&self) {
        self.0.open_permits.close();
        // The sender is here.
        let _ = self.0.unfinished.subscribe().wait_for(|unfinished| *unfinished == 0).await;
    }

    /// What answers requests over gRPC: Envoy's rate limit service, version 3, the health service and reflection. Serve it with HTTP/2.
    ///
    /// # Panics
    ///
    /// If it is called outside of a tokio runtime.
    pub fn grpc(&self) -> Router {
        envoy::grpc(&self.0)
    }

    /// What answers requests over HTTP. With a [`client_quota`](crate::config::ServerConfig::client_quota) it has to know where
    /// connections come from: serve it by `into_make_service_with_connect_info::<SocketAddr>`.
    pub fn router(&self) -> Router {
        self.router_with(Router::new())
    }

    /// The same with pages of your own, which are logged as its own are.
    pub fn router_with(&self, pages: Router) -> Router {
        let with_token = Router::new()
            .route("/v1/reserve", post(reservations::reserve))
            .route("/v1/commit", post(reservations::commit))
            .route("/v1/refund", post(reservations::refund))
            .route("/v1/acquire", post(permits::acquire))
            .route("/v1/release", post(permits::release))
            .route("/v1/limits/{limit}/keys", get(keys::show).delete(keys::reset))
            .route("/v1/limits/{limit}/overrides", put(overrides::set).delete(overrides::remove))
            .route(
                "/v1/limits/{limit}/switch",
                put(overrides::switch).delete(overrides::switch_back),
            )
            .route_layer(from_fn_with_state(self.0.clone(), token::demand));
        let limited = Router::new()
            .merge(with_token)
            .route("/v1/check", post(check::check))
            .route("/v1/check-all", post(check::check_all))
            .route("/v1/limits", get(limits::list))
            .route("/v1/concurrency", get(permits::list))
            .route("/v1/openapi.json", get(openapi::show))
            .route("/json", post(envoy::json));
        let limited = match &self.0.client_limit {
            Some(limit) => limited.route_layer(limit.clone()),
            None => limited,
        };
        let router = Router::new()
            .merge(limited)
            .merge(pages.with_state(()))
            .route("/healthcheck", get(ready))
            .route("/health/live", get(async || "the service answers\n"))
            .route("/health/ready", get(ready))
            .fallback(problem::no_such_path)
            .method_not_allowed_fallback(problem::no_such_method)
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(self.0.clone());
        // No reload changes it.
        let is_logged = self.0.in_force.load().config.server().access_log;
        if is_logged { router.layer(from_fn(access_log::log)) } else { router }
    }
}

/// Whether the store has answered, if there is one.
async fn ready(State(running): State<Arc<Running>>) -> Result<&'static str, Problem> {
    let unready = |reason: String| Problem::new(StatusCode::SERVICE_UNAVAILABLE, reason);
    if *running.ends().borrow() || running.refuses_checks() {
        return Err(unready("the service ends".to_owned()));
    }
    match running.limiter.ready(READY_WITHIN).await {
        Ok(()) => Ok("the store answers, or there is none\n"),
        Err(error) => Err(unready(format!("not ready: {error}"))),
    }
}
