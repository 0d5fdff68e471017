//! Reservations that only this process can settle.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::limiter::Reservation;
use crate::store::record_id::RecordId;

/// The most of them.
pub(super) const OPEN_MAX: usize = 100_000;

/// Reservations that only this process can settle: of limits that it counts alone.
#[derive(Default)]
pub(super) struct OpenReservations(Arc<Mutex<ById>>);

type ById = HashMap<RecordId, OpenReservation>;

struct OpenReservation {
    reservation: Reservation,
    /// What ends its time.
    end: AbortHandle,
}

impl OpenReservations {
    /// Holds one for so long; then its tokens stay spent. `false` if there are too many: it is dropped, and gives its tokens back.
    #[allow(clippy::disallowed_methods, reason = "nobody waits for its end")]
    pub(super) fn hold(
        &self,
        id: RecordId,
        reservation: Reservation,
        time_to_live: Duration,
    ) -> bool {
        let mut all_open = locked(&self.0);
        let has_room = all_open.len() < OPEN_MAX;
        if has_room {
            let all = Arc::downgrade(&self.0);
            let end = tokio::spawn(async move {
                tokio::time::sleep(time_to_live).await;
                // One that stayed would keep its key in memory.
                let ended = all.upgrade().and_then(|all| locked(&all).remove(&id));
                if let Some(OpenReservation { reservation, .. }) = ended {
                    reservation.stay_spent();
                }
            });
            all_open.insert(id, OpenReservation { reservation, end: end.abort_handle() });
        }
        has_room
    }

    pub(super) fn take(&self, id: RecordId) -> Option<Reservation> {
        let OpenReservation { reservation, end } = locked(&self.0).remove(&id)?;
        end.abort();
        Some(reservation)
    }
}

impl Drop for OpenReservations {
    fn drop(&mut self) {
        for OpenReservation { end, .. } in locked(&self.0).values() {
            end.abort();
        }
    }
}

fn locked(all: &Mutex<ById>) -> MutexGuard<'_, ById> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::limiter::Limiter;
    use crate::quota::Quota;

    /// It kept its key in memory until somebody reserved or settled something.
    #[tokio::test(start_paused = true)]
    #[allow(clippy::disallowed_methods, reason = "time is paused")]
    async fn reservation_whose_time_is_over_is_let_go_though_nobody_asks_and_stays_spent() {
        let limit = Limit::new("a", Quota::per_hour(10)).local();
        let limiter = Limiter::builder().limit(limit).build().unwrap();
        let limit = limiter.async_limit("a").unwrap();
        let (all, short, long) = (OpenReservations::default(), RecordId(1), RecordId(2));
        for (id, seconds) in [(short, 1), (long, 3600)] {
            let reservation = limit.reserve("k", 4).await.unwrap();
            assert!(all.hold(id, reservation, Duration::from_secs(seconds)));
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let open: Vec<RecordId> = locked(&all.0).keys().copied().collect();
        assert_eq!(open, [long]);
        assert!(all.take(short).is_none());
        all.take(long).unwrap().commit(0);
        assert_eq!(limiter.limit("a").unwrap().check_n("k", 0).unwrap().remaining(), 6);
    }
}
