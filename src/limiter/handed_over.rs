//! Reservations that any process settles, once: the store keeps what is needed for that.

use std::borrow::Cow;
use std::sync::PoisonError;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::async_limit::Charge;
use super::overrides::LookedUp;
use super::settle::Allowed;
use super::{ActiveLimit, Handle, Limiter, Reservation, Shared};
use crate::algorithm::Standing;
use crate::bucket::OVERFLOW;
use crate::decision::{Decision, Source};
use crate::driver::{Buckets, Query, RecordQuery, Wish, random_bytes};
use crate::error::StoreError;
use crate::limit::QuotaOf;
use crate::quota::Quota;
use crate::store::exact::{Deed, SpentAt};
use crate::store::record_id::RecordId;
use crate::store::reservations::{ReservationRequest, TAKEN_AGAIN, TakenRecord};
use crate::sync::Settlement;
use crate::time::{Timestamp, micros};

/// After how long the store is asked again that did not answer, at first and at most, and for how long in all: its last answer
/// may take ten seconds more.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(100);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(5);
const ASKED_FOR: Duration = TAKEN_AGAIN.saturating_sub(Duration::from_secs(15));

/// What the store keeps, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct SettlementRecord {
    limit: String,
    by: DecidedBy,
    /// What the limiter knows the key by.
    key: Vec<u8>,
    estimate: u32,
    /// How long before it was handed over the request was asked, at most.
    before_us: u64,
    /// For how long it was to be there.
    ttl_us: u64,
    spent: SpentFrom,
}

/// Which quota of the limit decided.
#[derive(Debug, Serialize, Deserialize)]
enum DecidedBy {
    Limit,
    Plan(String),
    /// Of an override.
    Quota {
        tokens: u64,
        period_us: u64,
        burst: u64,
    },
}

impl DecidedBy {
    fn of(decision: &Decision) -> Self {
        let quota = decision.quota();
        match &decision.limit.of {
            QuotaOf::Limit => Self::Limit,
            QuotaOf::Plan(name) => Self::Plan(name.to_string()),
            QuotaOf::Override => Self::Quota {
                tokens: quota.tokens(),
                period_us: micros(quota.period()),
                burst: quota.burst_tokens(),
            },
        }
    }
}

/// What the estimate was spent from.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum SpentFrom {
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

impl SpentFrom {
    fn of(decision: &Decision) -> Self {
        match decision.source {
            _ if decision.took_nothing() => Self::Nothing,
            Source::Store(standing) => {
                let ahead = if let Standing::Turn(_, turn) = standing { turn.ahead } else { 0 };
                Self::Store { at_us: decision.now.as_micros(), ahead }
            }
            Source::Lease(_) if decision.sure => Self::Lease,
            Source::Local(_) | Source::Lease(_) | Source::Override(_) | Source::Blocked(_) => {
                Self::Credit
            }
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

    /// Hands it over to the store, for any process to settle. After that time its tokens stay spent.
    ///
    /// # Errors
    ///
    /// That of the store, or that it did not answer in time: then its tokens go back, as of a reservation that is dropped.
    pub(crate) async fn hand_over(self, time_to_live: Duration) -> Result<RecordId, StoreError> {
        let Handle { limit, key, .. } = &self.handle;
        let Allowed { decision, asked } = &self.allowed;
        let (sent, within_us) = (limit.now(), limit.state.terms.background_wait_us());
        let record = SettlementRecord {
            limit: limit.name().to_owned(),
            by: DecidedBy::of(decision),
            key: key.key.to_vec(),
            estimate: self.open,
            before_us: sent.micros_since(*asked).saturating_add(within_us),
            ttl_us: micros(time_to_live),
            spent: match SpentFrom::of(decision) {
                // Another key's bucket was spent from, which all share that have no room.
                SpentFrom::Lease if key.place == OVERFLOW => SpentFrom::Credit,
                spent => spent,
            },
        };
        let id = RecordId::random().map_err(|error| unusable(&error))?;
        let request = record.to_keep(id, time_to_live)?;
        let within = Duration::from_micros(within_us);
        tokio::select! {
            biased;
            answer = limit.shared.ask_about_reservation(request) => answer?,
            _ = limit.sleep(within) => return Err(StoreError::TimedOut(within)),
        };
        // The process may have been held up.
        if limit.now().micros_since(sent) > within_us {
            return Err(StoreError::TimedOut(within));
        }
        if matches!(record.spent, SpentFrom::Lease) {
            // So that the store hears of it before another process gives some of it back.
            let settlement = Settlement::unused(0, true);
            limit.settle_pinned(key, settlement, *asked);
        }
        self.stay_spent();
        Ok(id)
    }
}

impl SettlementRecord {
    fn to_keep(
        &self,
        id: RecordId,
        time_to_live: Duration,
    ) -> Result<ReservationRequest, StoreError> {
        let record = serde_json::to_vec(self).map_err(|error| unusable(&error))?;
        Ok(ReservationRequest::Keep { id, record, time_to_live })
    }
}

/// What cannot be is told as what the store said.
fn unusable(error: &impl std::fmt::Display) -> StoreError {
    StoreError::Reply { field: "reservation", value: error.to_string() }
}

impl Shared {
    pub(super) async fn ask_about_reservation(
        &self,
        request: ReservationRequest,
    ) -> Result<Option<TakenRecord>, StoreError> {
        self.ask_about_record(|done| RecordQuery::Reservation(request, done)).await
    }

    /// Asks the store about a record that any process can end.
    async fn ask_about_record<T>(
        &self,
        query: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> RecordQuery,
    ) -> Result<T, StoreError> {
        let (done, answer) = oneshot::channel();
        let ended = || StoreError::Unreachable("the limiter's task has ended".to_owned());
        self.driver.queries.send(Query::Record(query(done))).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Asks the store until it answers, for as long as who took a record can take it again. Returns also when it was asked last.
    pub(super) async fn until_answered<T>(
        &self,
        query: impl Fn(oneshot::Sender<Result<T, StoreError>>) -> RecordQuery,
    ) -> Result<(Timestamp, T), StoreError> {
        let began = self.node.time.now();
        let mut wait = TRY_AGAIN_AFTER;
        loop {
            let now = self.node.time.now();
            let error = match self.ask_about_record(&query).await {
                Ok(answer) => return Ok((now, answer)),
                Err(error) => error,
            };
            let gone_us = self.node.time.now().micros_since(began);
            if gone_us + micros(wait) > micros(ASKED_FOR)
                || self.ask(Wish::Time, wait).await.is_none()
            {
                return Err(error);
            }
            wait = (2 * wait).min(TRY_AGAIN_MAX);
        }
    }
}

impl Limiter {
    /// Settles a reservation that any process has handed to the store: it cost `actual` tokens. `None` if there is none: it
    /// was settled, or its time is over. Where a reply is lost the store is asked again. Dropping the future before it is ready
    /// may leave its tokens spent.
    pub(crate) async fn settle_reservation(
        &self,
        id: RecordId,
        actual: u32,
    ) -> Result<Option<SettledReservation>, StoreError> {
        // Without a store none was ever handed over.
        if !self.shared.node_terms.lock().unwrap_or_else(PoisonError::into_inner).has_store {
            return Ok(None);
        }
        let taker = random_bytes().map_err(|error| unusable(&error))?;
        let request = ReservationRequest::Take { id, taker };
        let query = |done| RecordQuery::Reservation(request.clone(), done);
        let (now, taken) = self.shared.until_answered(query).await?;
        let Some(TakenRecord { record, age }) = taken else { return Ok(None) };
        let record: SettlementRecord =
            serde_json::from_slice(&record).map_err(|error| unusable(&error))?;
        let Ok(limit) = self.find(&record.limit) else {
            // Another process may have it: of a file that this one has not read yet, say.
            self.put_back(id, record, age).await?;
            return Err(StoreError::Server("the process does not have its limit".to_owned()));
        };
        limit.apply(&record, actual, (now, age)).await?;
        let SettlementRecord { limit, estimate, .. } = record;
        Ok(Some(SettledReservation { limit, estimate }))
    }

    /// Lets another process settle it in the time that is left.
    async fn put_back(
        &self,
        id: RecordId,
        record: SettlementRecord,
        age: Duration,
    ) -> Result<(), StoreError> {
        let age_us = micros(age);
        let left = Duration::from_micros(record.ttl_us.saturating_sub(age_us).max(1000));
        let record = SettlementRecord {
            before_us: record.before_us.saturating_add(age_us),
            ttl_us: micros(left),
            ..record
        };
        // Once: another may have taken it since.
        self.shared.ask_about_reservation(record.to_keep(id, left)?).await.map(|_| ())
    }
}

impl ActiveLimit {
    /// Gives back and charges what is left to be of a reservation that had this age then.
    async fn apply(
        &self,
        record: &SettlementRecord,
        actual: u32,
        (then, age): (Timestamp, Duration),
    ) -> Result<(), StoreError> {
        let definition = self.state.definition();
        let key = &*record.key;
        let named = match &record.by {
            DecidedBy::Plan(name) => definition.plan(name),
            // The store goes by what decided. Nodes that share leases would hear of a quota that the key may not have any more.
            DecidedBy::Quota { tokens, period_us, burst } if self.is_decided_by_store() => {
                let quota = Quota::new(*tokens, Duration::from_micros(*period_us)).burst(*burst);
                definition.by_override(quota).ok()
            }
            DecidedBy::Limit | DecidedBy::Quota { .. } => None,
        };
        let named = self.under(named.unwrap_or(definition.info));
        let limit = if self.is_decided_by_store() {
            named
        } else {
            Cow::Owned(named.planned(LookedUp { name: key, plain: key }).into_owned())
        };
        let (unused, beyond) =
            (record.estimate.saturating_sub(actual), actual.saturating_sub(record.estimate));
        let handle = limit.hold(key);
        // A key without a place shares another bucket.
        let is_leased =
            matches!(limit.state.buckets, Buckets::Leased(_)) && handle.key.place != OVERFLOW;
        match record.spent {
            SpentFrom::Nothing => return Ok(()),
            SpentFrom::Store { at_us, ahead } if limit.is_decided_by_store() => {
                if unused > 0 {
                    let deed = Deed::Return(SpentAt { at_us, ahead });
                    limit.tell_and_wait(key, unused, deed).await?;
                }
            }
            _ if unused == 0 => {}
            SpentFrom::Lease if is_leased => {
                let before_us = micros(age).saturating_add(record.before_us);
                let settlement = Settlement::unused_anywhere(unused, before_us);
                limit.settle_pinned(&handle.key, settlement, then);
            }
            // The limit may be of another mode by now.
            SpentFrom::Credit | SpentFrom::Lease | SpentFrom::Store { .. } => {
                limit.not_given_back(unused);
            }
        }
        if limit.is_decided_by_store() && beyond > 0 {
            return limit.tell_and_wait(key, beyond, Deed::Charge).await;
        }
        limit.charge_pinned(&handle.key, beyond);
        Ok(())
    }

    /// Tells the store of an exact limit, and waits until it has taken it.
    async fn tell_and_wait(&self, key: &[u8], cost: u32, deed: Deed) -> Result<(), StoreError> {
        let max_wait_us = self.state.terms.background_wait_us();
        let charge = Charge { cost, slot_within_us: 0, deed };
        let within = Duration::from_micros(max_wait_us);
        let silent = || StoreError::TimedOut(within);
        let answer = self.send_exact(key, charge, max_wait_us).ok_or_else(silent)?;
        answer.await.map_err(|_| silent())?.map(|_| ())
    }
}
