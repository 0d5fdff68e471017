//! Requests whose cost is known only afterwards.

use std::fmt;
#[cfg(feature = "server")]
use std::time::Duration;

use super::settle::Allowed;
use super::{ActiveLimit, AsyncLimit, Handle};
use crate::algorithm::Rule;
use crate::decision::{Decision, Denied};
#[cfg(feature = "server")]
use crate::driver::Buckets;
use crate::error::CheckError;
#[cfg(feature = "server")]
use crate::error::StoreError;
use crate::key::Key;
#[cfg(feature = "server")]
use crate::store::record_id::RecordId;
#[cfg(feature = "server")]
use crate::store::reservations::{ReservationRequest, Taker};

/// Tokens that a request was allowed and may not need all of.
///
/// [`commit`](Self::commit) says what it cost in the end. Dropped without that, also in a panic or with a future that holds
/// it, it gives all of them back.
///
/// Cost: neither waits. What has been reported to the store takes two allocations and a message to the limiter's task; once
/// that has ended, nothing goes back.
#[must_use = "a reservation that is dropped gives its tokens back"]
pub struct Reservation {
    /// Pinned before it was asked, so that what goes back goes where it was taken.
    pub(super) handle: Handle,
    pub(super) allowed: Allowed,
    /// Not settled yet.
    pub(super) open: u32,
}

/// Without the key, which may be secret.
impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, open) = (self.handle.limit.name(), self.open);
        let mut shown = f.debug_struct("Reservation");
        shown.field("limit", &limit).field("open", &open).finish_non_exhaustive()
    }
}

/// Why nothing was reserved.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The request must not go on.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The request cannot be decided.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The limit's tokens are slots of time, which pass whether they are used or not.
    #[error(
        "limit {limit:?} is a leaky bucket, of which nothing can be reserved: call schedule or until_ready"
    )]
    LeakyBucket {
        /// The limit's name.
        limit: &'static str,
    },
}

impl Reservation {
    /// The request cost `actual` tokens: what is left of the estimate goes back to the key, and what it cost beyond is
    /// charged, whatever the key has left. Debt is paid by what flows in; a fixed or sliding window of a local limit forgets it
    /// at its end, as it forgets all that was spent.
    ///
    /// Tokens go back as long as they would count: those of a window that has ended do not, and neither do those that an
    /// outage policy allowed ([`Event::NotGivenBack`](crate::Event::NotGivenBack)).
    ///
    /// Where nodes share the limit, the others see it within a sync interval or two. A cost beyond the estimate adds to how
    /// far the limit can be exceeded.
    pub fn commit(mut self, actual: u32) {
        let estimate = std::mem::take(&mut self.open);
        let Handle { limit, key, .. } = &self.handle;
        limit.give_back_pinned(key, &self.allowed, estimate.saturating_sub(actual));
        if !self.allowed.decision.took_nothing() {
            let limit = limit.under(self.allowed.decision.limit);
            limit.charge_pinned(key, actual.saturating_sub(estimate));
        }
    }

    /// The tokens that were reserved.
    pub fn estimate(&self) -> u32 {
        self.open
    }

    /// The decision that allowed them.
    pub fn decision(&self) -> Decision {
        self.allowed.decision
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Handle { limit, key, .. } = &self.handle;
        limit.give_back_pinned(key, &self.allowed, self.open);
    }
}

impl ActiveLimit {
    /// Reserves `estimate` tokens for a request of `key` whose cost is known only when it is over, such as the tokens of a
    /// language model. It is decided as by [`check_sure`](Self::check_sure): dropping this future before it is ready may leave
    /// the tokens spent.
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("tokens", Quota::per_minute(10_000)).local())
    ///     .build()?;
    /// let tokens = limiter.limit("tokens")?;
    /// let reservation = tokens.reserve("user:42", 4_000).await?;
    /// // The model answers.
    /// reservation.commit(1_200);
    /// assert!(tokens.check("user:42").remaining() >= 8_799);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ReserveError::Denied`] if the request must not go on; [`ReserveError::Check`] if the limit can never admit so
    /// high a cost, as of [`check_n`](Self::check_n); [`ReserveError::LeakyBucket`] if the limit's tokens are slots, which pass
    /// whether they are used or not.
    pub async fn reserve<K: Key + ?Sized>(
        &self,
        key: &K,
        estimate: u32,
    ) -> Result<Reservation, ReserveError> {
        // Before the key is given a bucket.
        self.validate_cost_of(key, estimate)?;
        if matches!(self.rule(), Rule::LeakyBucket(_)) {
            return Err(ReserveError::LeakyBucket { limit: self.name() });
        }
        let (handle, asked) = (self.handle(key), self.now());
        let decision = handle.check_sure_n(estimate).await?;
        decision.into_result()?;
        Ok(Reservation { handle, allowed: Allowed { decision, asked }, open: estimate })
    }
}

impl AsyncLimit {
    /// Reserves `estimate` tokens of a limit in any mode: see [`ActiveLimit::reserve`].
    ///
    /// Of an exact limit the store is told what goes back and what was used beyond, by a call that nobody waits for. If it does
    /// not answer, what should go back stays charged ([`Event::NotGivenBack`](crate::Event::NotGivenBack)), and what was
    /// used beyond is lost.
    ///
    /// # Errors
    ///
    /// Those of [`ActiveLimit::reserve`].
    pub async fn reserve<K: Key + ?Sized>(
        &self,
        key: &K,
        estimate: u32,
    ) -> Result<Reservation, ReserveError> {
        self.0.reserve(key, estimate).await
    }
}

#[cfg(feature = "server")]
impl AsyncLimit {
    /// Fails if an outage policy would decide about the key and the store does not answer: what a policy allows cannot be handed
    /// over, and does not go back.
    pub(crate) async fn check_store_answers(&self, key: &str) -> Result<(), StoreError> {
        let limit = &self.0;
        let is_alone = matches!(limit.state.buckets, Buckets::Alone(_));
        // Of a leaky bucket nothing is reserved.
        let needs_no_store = is_alone && !limit.is_decided_by_store()
            || matches!(limit.rule(), Rule::LeakyBucket(_));
        if needs_no_store || limit.decide_or_ask_for(key, 0).await.is_sure() {
            return Ok(());
        }
        let id = RecordId::random().map_err(|error| StoreError::Unreachable(error.to_string()))?;
        let within = Duration::from_micros(limit.state.terms.background_wait_us());
        // A new id names no reservation: the call only shows that the store answers.
        let question = ReservationRequest::Take { id, taker: Taker::default() };
        tokio::select! {
            biased;
            answer = limit.shared.ask_about_reservation(question) => answer.map(drop),
            _ = limit.sleep(within) => Err(StoreError::TimedOut(within)),
        }
    }
}
