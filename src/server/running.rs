//! What all requests of a service share.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use axum::http::StatusCode;
use tokio::sync::{Semaphore, watch};

use super::client_limit;
use super::open_permits::OpenPermits;
use super::open_reservations::OpenReservations;
use super::problem::Problem;
use crate::config::{Config, REQUEST_LIMITS};
use crate::error::ConfigError;
use crate::http::RateLimitLayer;
use crate::limiter::{AsyncLimit, Limiter};
use crate::rls::{DescriptorMetrics, DomainLimits, OwnLimits};

/// The most tasks that release permits which the store may have: what is beyond comes free when its time is over.
const RELEASING_MAX: usize = 1000;

pub(super) struct Running {
    pub(super) limiter: Limiter,
    /// The configuration that is in force.
    pub(super) in_force: ArcSwap<DomainLimits>,
    /// No reload changes it.
    pub(super) client_limit: Option<RateLimitLayer<axum::body::Body>>,
    own_limits: Arc<OwnLimits>,
    metrics: Option<Arc<DescriptorMetrics>>,
    pub(super) open_reservations: OpenReservations,
    pub(super) open_permits: OpenPermits,
    /// How many are [`Unfinished`](super::records::Unfinished).
    pub(super) unfinished: watch::Sender<usize>,
    /// Bounds those that release what the store may have.
    pub(super) releasing: Semaphore,
    /// Held by whoever changes it.
    reloads: Mutex<()>,
    refuses_checks: AtomicBool,
    ends: watch::Sender<bool>,
}

/// Why a configuration does not come into force while the service runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// A [field](Config::fixed_field_that_differs) differs from that with which the service began.
    #[error("{0} is not changed while the service runs: restart it, or set what it was")]
    Fixed(&'static str),
    /// The limits cannot be changed like that.
    #[error(transparent)]
    Limits(#[from] ConfigError),
}

impl Running {
    pub(super) fn new(config: Config, limiter: Limiter) -> Result<Self, ConfigError> {
        let client_limit = config.server().client_quota.map(client_limit::layer).transpose()?;
        let own_limits = Arc::<OwnLimits>::default();
        let near_limit_ratio = config.server().near_limit_ratio;
        let metrics = near_limit_ratio.map(|ratio| Arc::new(DescriptorMetrics::new(ratio.get())));
        let in_force = DomainLimits::new(config, &limiter, own_limits.clone(), metrics.clone())?;
        let in_force = ArcSwap::from_pointee(in_force);
        let (reloads, refuses_checks) = (Mutex::new(()), AtomicBool::new(false));
        Ok(Self {
            limiter,
            in_force,
            client_limit,
            own_limits,
            metrics,
            open_reservations: OpenReservations::default(),
            open_permits: OpenPermits::default(),
            unfinished: watch::Sender::new(0),
            releasing: Semaphore::new(RELEASING_MAX),
            reloads,
            refuses_checks,
            ends: watch::Sender::new(false),
        })
    }

    pub(super) fn reload(&self, config: Config) -> Result<(), ReloadError> {
        let _reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(field) = self.in_force.load().config.fixed_field_that_differs(&config) {
            return Err(ReloadError::Fixed(field));
        }
        self.limiter.update(config.all_limits())?;
        // Whoever still asks by the configuration before has the limits of that.
        self.in_force.store(Arc::new(DomainLimits::new(
            config,
            &self.limiter,
            self.own_limits.clone(),
            self.metrics.clone(),
        )?));
        Ok(())
    }

    /// The limit called `name`, under a plan of it if one is named.
    pub(super) fn limit<'a>(
        &self,
        in_force: &'a DomainLimits,
        name: &str,
        plan: Option<&str>,
    ) -> Result<Cow<'a, AsyncLimit>, Problem> {
        let unknown = |status, field| {
            move |error: ConfigError| Problem::new(status, error.to_string()).at(field)
        };
        if name == REQUEST_LIMITS {
            let detail = "is for limits that requests of Envoy bring: its keys have no other quota";
            let problem = Problem::new(StatusCode::NOT_FOUND, format!("limit {name:?} {detail}"));
            return Err(problem.at("limit"));
        }
        let found = in_force.limit(name).map(Cow::Borrowed);
        // A limiter can have more limits than its configuration, and else says which there are.
        let found = found.map_or_else(|| self.limiter.async_limit(name).map(Cow::Owned), Ok);
        let limit = found.map_err(unknown(StatusCode::NOT_FOUND, "limit"))?;
        let Some(plan) = plan else { return Ok(limit) };
        let planned = limit.plan(plan).map(Cow::Owned);
        planned.map_err(unknown(StatusCode::UNPROCESSABLE_ENTITY, "plan"))
    }

    pub(super) fn announce_end(&self) {
        self.ends.send_replace(true);
    }

    /// Whether the end was announced.
    pub(super) fn ends(&self) -> watch::Receiver<bool> {
        self.ends.subscribe()
    }

    pub(super) fn refuse_checks(&self) {
        self.refuses_checks.store(true, Ordering::Release);
    }

    pub(super) fn refuses_checks(&self) -> bool {
        self.refuses_checks.load(Ordering::Acquire)
    }
}
