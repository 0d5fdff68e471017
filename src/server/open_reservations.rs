//! Reservations that only this process can settle.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::limiter::Reservation;
use crate::store::record_id::RecordId;

/// The most of them.
pub(super) const OPEN_MAX: usize = 100_000;

/// Reservations that only this process can settle: of limits that it counts alone.
#[derive(Default)]
pub(super) struct OpenReservations(Mutex<ByEnd>);

#[derive(Default)]
struct ByEnd {
    open: HashMap<RecordId, (Reservation, Instant)>,
    ends: BTreeSet<(Instant, RecordId)>,
}

impl OpenReservations {
    /// Holds one. `false` if there are too many: it is dropped, and gives its tokens back.
    pub(super) fn hold(
        &self,
        id: RecordId,
        reservation: Reservation,
        time_to_live: Duration,
    ) -> bool {
        let mut all = self.lock();
        let has_room = all.open.len() < OPEN_MAX;
        if has_room {
            let ends = Instant::now() + time_to_live;
            all.ends.insert((ends, id));
            all.open.insert(id, (reservation, ends));
        }
        has_room
    }

    pub(super) fn take(&self, id: RecordId) -> Option<Reservation> {
        let mut all = self.lock();
        let (reservation, ends) = all.open.remove(&id)?;
        all.ends.remove(&(ends, id));
        Some(reservation)
    }

    /// Those that are open. Of those whose time is over the tokens stay spent.
    fn lock(&self) -> MutexGuard<'_, ByEnd> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        while let Some((_, id)) = all.ends.first().copied().filter(|(ends, _)| *ends <= now) {
            all.ends.pop_first();
            if let Some((reservation, _)) = all.open.remove(&id) {
                reservation.stay_spent();
            }
        }
        all
    }
}
