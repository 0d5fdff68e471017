//! Concurrency limits: permits that are held while the work is under way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Limiter, Shared};
use crate::driver::{HeldPermit, PermitKeys};
use crate::error::{AcquireError, ConfigError};
use crate::key::Key;
use crate::sync::{PermitAsk, PermitCounts};
use crate::time::micros;

#[cfg(feature = "server")]
mod timed;
#[cfg(feature = "server")]
pub(crate) use timed::NotHandedOver;

/// At most `n` permits of a key are held at one time, over all nodes. Cheap to clone.
///
/// ```
/// use tidegate::{AcquireError, Concurrency, Limiter};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let limiter = Limiter::builder().concurrency(Concurrency::new("jobs", 1)).build()?;
/// let jobs = limiter.concurrency("jobs")?;
/// let permit = jobs.acquire("tenant").await?;
/// assert!(matches!(jobs.acquire("tenant").await, Err(AcquireError::Denied { .. })));
/// drop(permit);
/// let permit = jobs.acquire("tenant").await?;
/// # drop(permit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ConcurrencyLimit {
    pub(super) keys: Arc<PermitKeys>,
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for ConcurrencyLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimit").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// A permit, or several. It goes back when it is dropped, also by a panic. This node renews it for as long as it is held.
#[must_use = "a permit goes back when it is dropped"]
pub struct Permit {
    pub(super) held: HeldPermit,
    /// Keeps the task alive that renews it. Dropped last.
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "it is kept alive"))]
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.held).finish()
    }
}

impl Permit {
    /// How many permits it stands for.
    pub fn cost(&self) -> u32 {
        self.held.cost
    }
}

impl Limiter {
    /// The concurrency limit called `name`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] if the limiter was built without it.
    pub fn concurrency(&self, name: &str) -> Result<ConcurrencyLimit, ConfigError> {
        let limits = &self.shared.node.permits.limits;
        let keys = limits.iter().find(|limit| limit.name() == name).ok_or_else(|| {
            let known: Vec<&str> = limits.iter().map(|limit| limit.name()).collect();
            ConfigError::UnknownLimit { name: name.to_owned(), known: known.join(", ") }
        })?;
        Ok(ConcurrencyLimit { keys: keys.clone(), shared: self.shared.clone() })
    }

    /// Waits until all permits have gone back, for `deadline` at most. Returns how many are still held.
    pub(super) async fn permits_returned(&self, deadline: Duration) -> u64 {
        let permits = &self.shared.node.permits;
        tokio::select! {
            biased;
            () = permits.emptied() => {}
            _ = self.shared.ask(super::Wish::Time, deadline) => {}
        }
        permits.limits.iter().map(|limit| limit.counts().in_use).sum()
    }
}

impl ConcurrencyLimit {
    /// Takes one permit of `key`, if one is free now.
    ///
    /// Cost: one round trip to the store, which all callers of this node that ask about the key at the same time share, and
    /// another one when the permit goes back. It waits for [`Concurrency::max_wait`](crate::Concurrency::max_wait) at most.
    /// Dropping the future gives the permit back.
    ///
    /// # Errors
    ///
    /// [`AcquireError::Denied`] if none is free; [`AcquireError::StoreAway`] if the store does not answer and the outage policy
    /// gives none; [`AcquireError::TooManyWaiting`] and [`AcquireError::TooManyKeys`] name a limit that was reached, and
    /// [`AcquireError::Ended`] says that the limiter's task has ended.
    pub async fn acquire<K: Key + ?Sized>(&self, key: &K) -> Result<Permit, AcquireError> {
        self.acquire_n(key, 1).await
    }

    /// Takes `cost` permits of `key`, all or none, if so many are free now: see [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire); [`AcquireError::Cost`] if the cost is 0 or above the limit.
    pub async fn acquire_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Permit, AcquireError> {
        self.ask(key, PermitAsk { cost, within_us: None }).await
    }

    /// Takes one permit of `key`, and waits for it for `within` at most.
    ///
    /// Callers of one node go on in the order in which they came, for each key. Among nodes that wait, the one that holds the
    /// fewest is first, and of these the one that waits for longest; a node that holds more than its even part gives back
    /// what comes free there. The answer of the store takes a round trip: with less time than that there is no permit.
    /// Dropping the future leaves the queue.
    ///
    /// Cost: while callers wait, this node asks about the key each 2 to 20 ms.
    ///
    /// # Errors
    ///
    /// [`AcquireError::TimedOut`] if none came free in time; [`AcquireError::StoreAway`] if the outage policy is in force by then, or
    /// the store has not said since the caller came, nor less than 100 ms before, that none is free; [`AcquireError::TooManyWaiting`] if
    /// enough callers wait already; [`AcquireError::TooManyKeys`] and [`AcquireError::Ended`] as [`acquire`](Self::acquire).
    pub async fn acquire_within<K: Key + ?Sized>(
        &self,
        key: &K,
        within: Duration,
    ) -> Result<Permit, AcquireError> {
        self.ask(key, PermitAsk { cost: 1, within_us: Some(micros(within)) }).await
    }

    async fn ask<K: Key + ?Sized>(&self, key: &K, ask: PermitAsk) -> Result<Permit, AcquireError> {
        let pending = self.keys.acquire(&self.shared.secret.name(key), ask)?;
        let held = pending.answer().await?;
        Ok(Permit { held, shared: self.shared.clone() })
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        self.keys.name()
    }

    /// The most permits of a key.
    pub fn max(&self) -> u32 {
        self.keys.max()
    }

    /// Permits in use on this node, of all keys.
    pub fn in_use(&self) -> u64 {
        self.counts().in_use
    }

    /// Callers of this node who wait for their turn, over all keys.
    pub fn waiting(&self) -> u32 {
        self.counts().waiting
    }

    fn counts(&self) -> PermitCounts {
        self.keys.counts()
    }
}
