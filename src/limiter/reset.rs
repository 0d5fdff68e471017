//! Keys that are reset while everything runs.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::async_limit::Charge;
use super::{ActiveLimit, AsyncLimit};
use crate::bucket::{NewKey, OVERFLOW};
use crate::driver::{AloneBuckets, Buckets, PinnedKey, Query, ResetQuery, SlotKey};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::exact::Deed;
use crate::sync::ResetOutcome;
use crate::time::micros;

/// How long a [reset](ActiveLimit::reset) waits for the store, or for room for its key. While a store recovers from an outage
/// or a loss of memory, it takes some seconds.
pub const RESET_WAIT: Duration = Duration::from_secs(10);
/// How often a key for which there is no room is tried again.
const ROOM_LOOKS: Duration = Duration::from_millis(25);

/// Why a key was not reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// The store did not take it in time. It may take it all the same, if it was asked: resetting the key again does no harm
    /// but for what is allowed between the two.
    #[error("limit {limit:?}: the store did not take the reset of a key in time: {error}")]
    Store {
        /// The limit's name.
        limit: &'static str,
        /// What kept it from that.
        error: StoreError,
    },
    /// The store refuses the key: it holds another program's value, or another quota of the limit. Events name it.
    #[error(
        "limit {limit:?}: the store refuses the key: it holds another quota or another program's value"
    )]
    Refused {
        /// The limit's name.
        limit: &'static str,
    },
    /// This node holds as many keys as it may, and none that can be evicted: reset the key on another node.
    #[error("limit {limit:?}: there is no room for the key, with {max_keys} keys: raise max_keys")]
    TooManyKeys {
        /// The limit's name.
        limit: &'static str,
        /// The most keys of the limiter.
        max_keys: usize,
    },
    /// The limiter's task has ended with its runtime: nobody asks the store, or watches the time.
    #[error("limit {limit:?}: the limiter's task has ended with its runtime")]
    Ended {
        /// The limit's name.
        limit: &'static str,
    },
}

impl ActiveLimit {
    /// Lets `key` be as if it had never been used, on all nodes that share the limit: its debt is forgiven, and it has a full
    /// burst. A local limit, and any limit without a store, knows this node's state of the key only.
    ///
    /// - What nodes hold, or have spent and not reported yet, counts as before: a part of the new burst.
    /// - A key that [`Limit::block_for`](crate::Limit::block_for) blocks is free on this node; on others its block stays.
    ///   [Overrides](crate::Overrides) stay.
    /// - Slots of a leaky bucket that were given to callers stay theirs, so that for the time of its queue more may start.
    /// - A reservation that is open goes back as ever, on top of that.
    ///
    /// The other nodes allow the key as soon as they ask the store about it: of a key that is denied, within a second. How far
    /// the limit can be exceeded ([`ActiveLimit::excess`]) grows by a burst for each reset of a key on this node.
    ///
    /// Cost: waits for one round trip, for [`RESET_WAIT`] at most; two short locks of the limit's table, and a message to the
    /// limiter's task. Dropping the future before it is ready may leave the key reset.
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{FixedWindow, Limit, Limiter, MemoryStore};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("mails", FixedWindow::per_day(1)))
    ///     .store(MemoryStore::new())
    ///     .build()?;
    /// let mails = limiter.limit("mails")?;
    /// assert!(mails.check_sure("ann").await.is_allowed());
    /// assert!(mails.check_sure("ann").await.is_denied());
    /// mails.reset("ann").await?;
    /// assert!(mails.check_sure("ann").await.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ResetError`]: the store did not take it in time or refuses the key, there is no room for the key on this node, or the
    /// limiter's task has ended.
    pub async fn reset<K: Key + ?Sized>(&self, key: &K) -> Result<(), ResetError> {
        let (limit, name) = (self.planned_for(key), self.shared.secret.name(key));
        self.state.resets.count(&name);
        match &self.state.buckets {
            Buckets::Leased(_) => limit.reset_leased(limit.pin_with_room(&name).await?).await?,
            Buckets::Alone(alone) if self.is_decided_by_store() || self.slots().is_some() => {
                limit.reset_in_store(&name).await?;
                // Its share of an outage, if there is room for one.
                limit.reset_alone(alone, &limit.pin(&name));
            }
            Buckets::Alone(alone) => {
                let key = limit.pin_with_room(&name).await?;
                limit.reset_alone(alone, &key);
            }
        }
        self.state.overrides.unblock(&name);
        Ok(())
    }

    /// The key at a place of its own, if there is room.
    pub(super) fn pin(&self, name: &[u8]) -> Arc<PinnedKey> {
        let limit = self.state.clone();
        let new = NewKey { first_credit: limit.first_credit(self.info), plan: self.plan };
        let place = limit.buckets.pin(name, new);
        Arc::new(PinnedKey { limit, place, key: name.into() })
    }

    /// A key that has no bucket here.
    pub(super) fn without_place(&self, name: &[u8]) -> Arc<PinnedKey> {
        Arc::new(PinnedKey { limit: self.state.clone(), place: OVERFLOW, key: name.into() })
    }

    /// Pins the key at a place of its own. While there is no room, idle keys are evicted.
    async fn pin_with_room(&self, name: &[u8]) -> Result<Arc<PinnedKey>, ResetError> {
        let deadline = self.now().plus_micros(micros(RESET_WAIT));
        loop {
            let key = self.pin(name);
            if key.place != OVERFLOW {
                return Ok(key);
            }
            if self.now() >= deadline {
                let max_keys = self.shared.node.budget.max();
                return Err(ResetError::TooManyKeys { limit: self.name(), max_keys });
            }
            if !self.sleep(ROOM_LOOKS).await {
                return Err(ResetError::Ended { limit: self.name() });
            }
        }
    }

    async fn reset_leased(&self, key: Arc<PinnedKey>) -> Result<(), ResetError> {
        let limit = self.name();
        let (done, outcome) = oneshot::channel();
        let query = Query::Reset(ResetQuery { key, within_us: micros(RESET_WAIT), done });
        let ended = ResetError::Ended { limit };
        self.shared.driver.queries.send(query).map_err(|_| ended.clone())?;
        match outcome.await {
            Ok(ResetOutcome::Taken) => Ok(()),
            Ok(ResetOutcome::Refused) => Err(ResetError::Refused { limit }),
            Ok(ResetOutcome::TimedOut) => Err(self.reset_not_taken(RESET_WAIT)),
            Err(_) => Err(ended),
        }
    }

    /// Of a limit of which the store decides, or gives the slots.
    async fn reset_in_store(&self, name: &[u8]) -> Result<(), ResetError> {
        let charge = Charge { cost: 0, slot_within_us: 0, deed: Deed::Reset };
        let max_wait_us = self.state.terms.background_wait_us();
        let Some(answer) = self.send_exact(name, charge, max_wait_us) else {
            return Err(ResetError::Ended { limit: self.name() });
        };
        match answer.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(ResetError::Store { limit: self.name(), error }),
            // The store is away, and was not asked.
            Err(_) => Err(self.reset_not_taken(Duration::from_micros(max_wait_us))),
        }
    }

    fn reset_not_taken(&self, within: Duration) -> ResetError {
        let trouble = &self.shared.node.store_trouble;
        let error = trouble.lock().unwrap_or_else(PoisonError::into_inner).error.clone();
        let error = error.unwrap_or(StoreError::TimedOut(within));
        ResetError::Store { limit: self.name(), error }
    }

    /// What this node alone knows of the key.
    fn reset_alone(&self, alone: &AloneBuckets, key: &PinnedKey) {
        let (place, now) = (key.place, self.precise_now());
        if let AloneBuckets::Slots(slots, _) = alone {
            let _ = slots.with(&key.key, now, |entry: &mut SlotKey| entry.held.reset(now));
        }
        if place == OVERFLOW {
            return;
        }
        match alone {
            AloneBuckets::Turns(local) | AloneBuckets::Slots(_, local) => {
                local.table.at(place).reset(local.rule, now);
            }
            AloneBuckets::Windows(local) => {
                let now = self.state.window_time(local, now);
                local.table.at(place).reset(local.rule, now);
            }
            AloneBuckets::Logs(local) => local.table.at(place).reset(),
        }
    }
}

impl AsyncLimit {
    /// Lets `key` be as if it had never been used: see [`ActiveLimit::reset`]. Of an exact limit the store's record is reset;
    /// it has 250 ms to answer, or [`Limit::max_wait`](crate::Limit::max_wait) if that is more.
    ///
    /// # Errors
    ///
    /// Those of [`ActiveLimit::reset`].
    pub async fn reset<K: Key + ?Sized>(&self, key: &K) -> Result<(), ResetError> {
        self.0.reset(key).await
    }
}
