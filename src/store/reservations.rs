//! Reservations that any process settles, once, as `lua/reservation.lua` keeps them.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::record_id::RecordId;
#[cfg(feature = "redis")]
use crate::error::StoreError;
use crate::time::micros;

/// The bytes of a number of a reply.
#[cfg(feature = "redis")]
const NUMBER_BYTES: usize = 8;

/// What the store is asked.
#[derive(Clone, Debug)]
pub(crate) enum ReservationRequest {
    /// To keep what is needed to settle it.
    Keep { id: RecordId, record: Vec<u8>, time_to_live: Duration },
    /// To give that away, to one taker alone.
    Take { id: RecordId, taker: Taker },
}

/// Who takes it: random bytes, so that who got no reply can ask again.
pub(crate) type Taker = [u8; 16];

/// For how long a taker can ask again.
pub(crate) const TAKEN_AGAIN: Duration = Duration::from_secs(60);
/// The age of a record from the future, after a clock went back: nothing of a window goes back.
const AGES_US: u64 = 1 << 52;

/// What was kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TakenRecord {
    pub(crate) record: Vec<u8>,
    /// For how long it was kept, by the store's clock.
    pub(crate) age: Duration,
}

#[cfg(feature = "redis")]
impl ReservationRequest {
    pub(crate) fn id(&self) -> RecordId {
        let (Self::Keep { id, .. } | Self::Take { id, .. }) = self;
        *id
    }

    /// The script's ARGV.
    pub(crate) fn arguments(&self) -> [Vec<u8>; 3] {
        let (time_to_live, bytes) = match self {
            Self::Keep { record, time_to_live, .. } => {
                (time_to_live.as_millis().max(1), record.clone())
            }
            Self::Take { taker, .. } => (0, taker.to_vec()),
        };
        let text = |millis: u128| millis.to_string().into_bytes();
        [text(time_to_live), bytes, text(TAKEN_AGAIN.as_millis())]
    }

    /// Reads the script's reply.
    pub(crate) fn decode(reply: &[u8]) -> Result<Option<TakenRecord>, StoreError> {
        if reply.is_empty() {
            return Ok(None);
        }
        let wrong =
            || StoreError::Reply { field: "reservation", value: format!("{} bytes", reply.len()) };
        let (age, record) = reply.split_first_chunk::<NUMBER_BYTES>().ok_or_else(wrong)?;
        let age_us = f64::from_le_bytes(*age);
        if !(0.0..=(1_u64 << 53) as f64).contains(&age_us) {
            return Err(wrong());
        }
        let age = Duration::from_micros(age_us as u64);
        Ok(Some(TakenRecord { record: record.to_vec(), age }))
    }
}

/// What is stored of one.
#[derive(Debug)]
struct StoredRecord {
    record: Vec<u8>,
    since_us: u64,
    ends_us: u64,
    taker: Option<Taker>,
}

/// The script's reference, and its records.
#[derive(Debug, Default)]
pub(crate) struct ReservationModel {
    stored: HashMap<RecordId, StoredRecord>,
    by_end: BTreeSet<(u64, RecordId)>,
}

impl ReservationModel {
    /// Does what the script does at `now_us` since 1970.
    pub(crate) fn call(&mut self, request: ReservationRequest, now_us: u64) -> Option<TakenRecord> {
        while let Some((_, id)) = self.by_end.first().filter(|(ends_us, _)| *ends_us <= now_us) {
            let id = *id;
            self.remove(id);
        }
        match request {
            ReservationRequest::Keep { id, record, time_to_live } => {
                self.remove(id);
                let ends_us = now_us.saturating_add(micros(time_to_live));
                self.store(id, StoredRecord { record, since_us: now_us, ends_us, taker: None });
                None
            }
            ReservationRequest::Take { id, taker } => {
                let stored = self.remove(id)?;
                let (record, since_us, is_his) = (
                    stored.record.clone(),
                    stored.since_us,
                    stored.taker.is_none_or(|it| it == taker),
                );
                let ends_us = match stored.taker {
                    None => now_us.saturating_add(micros(TAKEN_AGAIN)),
                    Some(_) => stored.ends_us,
                };
                let taker = stored.taker.or(Some(taker));
                self.store(id, StoredRecord { ends_us, taker, ..stored });
                let age_us = now_us.checked_sub(since_us).unwrap_or(AGES_US);
                is_his.then(|| TakenRecord { record, age: Duration::from_micros(age_us) })
            }
        }
    }

    fn store(&mut self, id: RecordId, stored: StoredRecord) {
        self.by_end.insert((stored.ends_us, id));
        self.stored.insert(id, stored);
    }

    fn remove(&mut self, id: RecordId) -> Option<StoredRecord> {
        let stored = self.stored.remove(&id)?;
        self.by_end.remove(&(stored.ends_us, id));
        Some(stored)
    }
}

#[cfg(all(test, feature = "redis"))]
#[allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
mod tests {
    use std::thread::sleep;

    use redis::Script;

    use super::*;
    use crate::store::redis_server::RedisServer;

    const TEXT: &str = include_str!("../../lua/reservation.lua");

    /// Asks the script and the model, and compares whether there is one and what was kept.
    fn ask(
        connection: &mut redis::Connection,
        model: &mut ReservationModel,
        request: &ReservationRequest,
        now_us: u64,
    ) -> Option<TakenRecord> {
        let script = Script::new(TEXT);
        let mut call = script.prepare_invoke();
        call.key(request.id().to_string()).arg(&request.arguments());
        let reply: Vec<u8> = call.invoke(connection).unwrap();
        let reply = ReservationRequest::decode(&reply).unwrap();
        let expected = model.call(request.clone(), now_us);
        let record = |taken: &Option<TakenRecord>| taken.as_ref().map(|it| it.record.clone());
        assert_eq!(record(&reply), record(&expected), "{request:?}");
        reply
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the server's clock is the real one")]
    fn record_is_taken_once_and_not_after_its_time_by_script_and_model() {
        let server = RedisServer::start();
        let connection = &mut redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let model = &mut ReservationModel::default();
        let [one, other] = [RecordId(7), RecordId(u128::MAX)];
        let keep = |id, record: &[u8], time_to_live| {
            let record = record.to_vec();
            ReservationRequest::Keep { id, record, time_to_live }
        };
        let take_as = |id, taker| ReservationRequest::Take { id, taker: [taker; 16] };
        let take = |id| take_as(id, 1);
        let (short, long) = (Duration::from_millis(60), Duration::from_secs(60));
        assert_eq!(ask(connection, model, &take(one), 0), None, "none was kept");
        ask(connection, model, &keep(one, b"\0\xff{}", long), 0);
        ask(connection, model, &keep(other, b"", short), 0);
        let taken = ask(connection, model, &take(one), 1_000).unwrap();
        assert!(taken.age < Duration::from_secs(10), "{taken:?}");
        assert_eq!(ask(connection, model, &take_as(one, 2), 2_000), None, "another has taken it");
        let again = ask(connection, model, &take(one), 3_000).unwrap();
        assert_eq!(again.record, taken.record, "the reply was lost");
        sleep(2 * short);
        assert_eq!(ask(connection, model, &take(other), 120_000), None, "its time is over");
        ask(connection, model, &keep(other, b"x", long), 130_000);
        sleep(short);
        let taken = ask(connection, model, &take(other), 190_000).unwrap();
        assert!(taken.age >= short, "{taken:?}");
        assert!(model.call(take(other), 190_000 + micros(TAKEN_AGAIN)).is_none(), "too late");
        assert!(model.stored.len() <= 1 && model.by_end.len() <= 1, "{model:?}");
        model.call(keep(other, b"x", long), 200_000);
        let age = model.call(take(other), 100_000).unwrap().age;
        assert_eq!(age, Duration::from_micros(AGES_US), "a clock that went back");
        let foreign = redis::cmd("SET").arg(one.to_string()).arg("theirs").query(connection);
        let _: () = foreign.unwrap();
        let script = Script::new(TEXT);
        let mut call = script.key(one.to_string());
        let refused = call.arg(0).arg("").arg(1).invoke::<Vec<u8>>(connection).unwrap_err();
        assert!(refused.to_string().contains("FOREIGN"), "{refused}");
    }

    #[test]
    fn malformed_replies_are_errors() {
        for wrong in [&[0; 7][..], &f64::NAN.to_le_bytes(), &(-1.0_f64).to_le_bytes()] {
            let error = ReservationRequest::decode(wrong).unwrap_err();
            assert!(matches!(error, StoreError::Reply { field: "reservation", .. }), "{error}");
        }
    }
}
