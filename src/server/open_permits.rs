//! Permits that only this process can give back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::limiter::Permit;
use crate::store::record_id::RecordId;

/// The most of them.
pub(super) const OPEN_MAX: usize = 100_000;

/// Permits that only this process can give back: of limits that it keeps alone.
#[derive(Clone, Default)]
pub(super) struct OpenPermits(Arc<Mutex<HashMap<RecordId, OpenPermit>>>);

struct OpenPermit {
    permit: Permit,
    /// What gives it back when its time is over.
    end: AbortHandle,
}

impl OpenPermits {
    /// Keeps one for so long. `false` if there are too many: then it goes back.
    #[allow(clippy::disallowed_methods, reason = "nobody waits for its end")]
    pub(super) fn keep(&self, id: RecordId, permit: Permit, time_to_live: Duration) -> bool {
        let mut open = self.lock();
        let has_room = open.len() < OPEN_MAX;
        if has_room {
            let all = self.clone();
            let end = tokio::spawn(async move {
                tokio::time::sleep(time_to_live).await;
                let ended = all.lock().remove(&id);
                drop(ended);
            });
            open.insert(id, OpenPermit { permit, end: end.abort_handle() });
        }
        has_room
    }

    /// Gives back one of this limit and key. Returns how many permits it was.
    pub(super) fn give_back(&self, id: RecordId, limit: &str, key: &[u8]) -> Option<u32> {
        let mut open = self.lock();
        let (own_limit, own_key) = open.get(&id)?.permit.name();
        if (&*own_limit, &*own_key) != (limit, key) {
            return None;
        }
        let OpenPermit { permit, end } = open.remove(&id)?;
        drop(open);
        end.abort();
        Some(permit.cost())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RecordId, OpenPermit>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
