//! What all requests of a service share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use crate::config::Config;
use crate::error::ConfigError;
use crate::limiter::Limiter;

pub(super) struct Running {
    pub(super) limiter: Limiter,
    /// That which is in force.
    pub(super) config: ArcSwap<Config>,
    /// Held by whoever changes it.
    reloads: Mutex<()>,
    refuses_checks: AtomicBool,
}

/// Why a configuration does not come into force while the service runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// A field other than the limits differs from that with which the service began.
    #[error("{0} is not changed while the service runs: restart it, or set what it was")]
    Fixed(&'static str),
    /// The limits cannot be changed like that.
    #[error(transparent)]
    Limits(#[from] ConfigError),
}

impl Running {
    pub(super) fn new(config: Config, limiter: Limiter) -> Self {
        let config = ArcSwap::from_pointee(config);
        Self { limiter, config, reloads: Mutex::new(()), refuses_checks: AtomicBool::new(false) }
    }

    pub(super) fn reload(&self, config: Config) -> Result<(), ReloadError> {
        let _reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(field) = self.config.load().fixed_field_that_differs(&config) {
            return Err(ReloadError::Fixed(field));
        }
        self.limiter.update(config.limits().iter().cloned())?;
        self.config.store(Arc::new(config));
        Ok(())
    }

    pub(super) fn refuse_checks(&self) {
        self.refuses_checks.store(true, Ordering::Release);
    }

    pub(super) fn refuses_checks(&self) -> bool {
        self.refuses_checks.load(Ordering::Acquire)
    }
}
