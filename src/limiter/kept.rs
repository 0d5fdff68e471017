//! Reservations that any process settles, once: the store keeps what is needed for that.

use std::sync::PoisonError;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::overrides::LookedUp;
use super::settle::Allowed;
use super::slots::BACKGROUND_WAIT_US;
use super::{ActiveLimit, Limiter, Reservation, Shared};
use crate::algorithm::Standing;
use crate::bucket::OVERFLOW;
use crate::decision::{Decision, Source};
use crate::driver::{Buckets, Query, ReservationQuery};
use crate::error::StoreError;
use crate::store::exact::{Deed, SpentAt};
use crate::store::reservations::{ReservationId, ReservationRequest, TakenRecord};
use crate::sync::Settlement;
use crate::time::micros;

/// What is kept, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    limit: String,
    plan: Option<String>,
    /// What the limiter knows the key by.
    key: Vec<u8>,
    estimate: u32,
    /// How long before it was kept the request was asked, at most.
    before_us: u64,
    spent: Spent,
}

/// What the estimate was spent from.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Spent {
    /// Nothing was charged.
    Nothing,
    /// A lease.
    Lease,
    /// Credit, or what an outage policy gave: it may not have been charged as a whole.
    Credit,
    /// The key in the store, then.
    Store { at_us: u64, ahead: u64 },
}

/// What is told of a reservation that was settled.
pub(crate) struct SettledReservation {
    pub(crate) limit: String,
    pub(crate) estimate: u32,
}

impl Spent {
    fn of(decision: &Decision) -> Self {
        match decision.source {
            _ if decision.took_nothing() => Self::Nothing,
            Source::Store(standing) => {
                let ahead = if let Standing::Turn(_, turn) = standing { turn.ahead } else { 0 };
                Self::Store { at_us: decision.now.as_micros(), ahead }
            }
            Source::Lease(_) if decision.sure => Self::Lease,
            Source::Local(_) | Source::Lease(_) | Source::Override(_) => Self::Credit,
        }
    }
}

impl Reservation {
    /// Whether no other process can settle it: its tokens are in no store.
    pub(crate) fn is_of_this_process(&self) -> bool {
        let limit = &self.handle.limit;
        matches!(limit.state.buckets, Buckets::Alone(_)) && !limit.is_decided_by_store()
    }

    /// The limit's name.
    pub(crate) fn limit_name(&self) -> &'static str {
        self.handle.limit.name()
    }

    /// Leaves its tokens spent.
    pub(crate) fn stay_spent(mut self) {
        self.open = 0;
    }

    /// Hands it to the store, for any process to settle. After that time its tokens stay spent.
    ///
    /// # Errors
    ///
    /// That of the store, or none in time: then its tokens have gone back.
    pub(crate) async fn keep(self, time_to_live: Duration) -> Result<ReservationId, StoreError> {
        let within = Duration::from_micros(BACKGROUND_WAIT_US);
        let limit = &self.handle.limit;
        let Allowed { decision, asked } = &self.allowed;
        let kept = Kept {
            limit: limit.name().to_owned(),
            plan: decision.plan_name().map(str::to_owned),
            key: self.handle.key.key.to_vec(),
            estimate: self.open,
            before_us: limit.now().micros_since(*asked).saturating_add(BACKGROUND_WAIT_US),
            spent: Spent::of(decision),
        };
        let id = ReservationId::random().map_err(|error| unusable(&error))?;
        let record = serde_json::to_vec(&kept).map_err(|error| unusable(&error))?;
        let request = ReservationRequest::Keep { id, record, time_to_live };
        let answer = limit.shared.ask_about_reservation(request);
        tokio::select! {
            biased;
            answer = answer => answer?,
            _ = limit.sleep(within) => return Err(StoreError::TimedOut(within)),
        };
        self.stay_spent();
        Ok(id)
    }
}

/// What cannot be is told as what the store said.
fn unusable(error: &impl std::fmt::Display) -> StoreError {
    StoreError::Reply { field: "reservation", value: error.to_string() }
}

impl Shared {
    async fn ask_about_reservation(
        &self,
        request: ReservationRequest,
    ) -> Result<Option<TakenRecord>, StoreError> {
        let (done, answer) = oneshot::channel();
        let ended = || StoreError::Unreachable("the limiter's task has ended".to_owned());
        let query = Query::Reservation(ReservationQuery { request, done });
        self.driver.queries.send(query).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

impl Limiter {
    /// Settles a reservation that any process has handed to the store: it cost `actual` tokens. `None` if there is none: it
    /// was settled, or its time is over. Dropping the future before it is ready may leave its tokens spent.
    pub(crate) async fn settle_kept(
        &self,
        id: ReservationId,
        actual: u32,
    ) -> Result<Option<SettledReservation>, StoreError> {
        // Without a store none was ever handed over.
        if !self.shared.node_terms.lock().unwrap_or_else(PoisonError::into_inner).has_store {
            return Ok(None);
        }
        let request = ReservationRequest::Take { id };
        let Some(taken) = self.shared.ask_about_reservation(request).await? else {
            return Ok(None);
        };
        let kept: Kept = serde_json::from_slice(&taken.record).map_err(|error| unusable(&error))?;
        // Of a limit that was removed nothing is to be settled.
        if let Ok(limit) = self.find(&kept.limit) {
            limit.settle_kept(&kept, actual, taken.age);
        }
        Ok(Some(SettledReservation { limit: kept.limit, estimate: kept.estimate }))
    }
}

impl ActiveLimit {
    fn settle_kept(&self, kept: &Kept, actual: u32, age: Duration) {
        let named = kept.plan.as_deref().and_then(|plan| self.plan(plan).ok());
        let key = &*kept.key;
        let planned = self.planned(LookedUp { name: key, plain: key });
        let limit = named.as_ref().unwrap_or(&planned);
        let (unused, beyond) =
            (kept.estimate.saturating_sub(actual), actual.saturating_sub(kept.estimate));
        let handle = limit.hold(key);
        // A key without a place shares another bucket.
        let is_leased =
            matches!(limit.state.buckets, Buckets::Leased(_)) && handle.key.place != OVERFLOW;
        match kept.spent {
            Spent::Nothing => return,
            _ if unused == 0 => {}
            Spent::Store { at_us, ahead } if limit.is_decided_by_store() => {
                limit.tell_store(key, unused, Deed::Return(SpentAt { at_us, ahead }));
            }
            Spent::Lease if is_leased => {
                let age_us = micros(age).saturating_add(kept.before_us);
                let asked = limit.now().minus_micros(age_us);
                let settlement = Settlement::Unused { tokens: unused, sure: true };
                limit.settle_pinned(&handle.key, settlement, asked);
            }
            // The limit may be of another mode by now.
            Spent::Credit | Spent::Lease | Spent::Store { .. } => limit.not_given_back(unused),
        }
        limit.charge_pinned(&handle.key, beyond);
    }
}
