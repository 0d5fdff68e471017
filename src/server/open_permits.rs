//! Permits that only this process can release.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::limiter::Permit;
use crate::store::record_id::RecordId;

/// The most of them.
pub(super) const OPEN_MAX: usize = 100_000;

/// Permits that only this process can release: of limits that it keeps alone.
#[derive(Default)]
pub(super) struct OpenPermits(Arc<Mutex<ById>>);

type ById = HashMap<RecordId, OpenPermit>;

struct OpenPermit {
    permit: Permit,
    /// What ends its time.
    end: AbortHandle,
}

impl OpenPermits {
    /// Holds one for so long. `false` if there are too many: then it goes back.
    #[allow(clippy::disallowed_methods, reason = "nobody waits for its end")]
    pub(super) fn hold(&self, id: RecordId, permit: Permit, time_to_live: Duration) -> bool {
        let mut open = self.lock();
        let has_room = open.len() < OPEN_MAX;
        if has_room {
            let all = Arc::downgrade(&self.0);
            let end = tokio::spawn(async move {
                tokio::time::sleep(time_to_live).await;
                if let Some(all) = all.upgrade() {
                    drop(locked(&all).remove(&id));
                }
            });
            open.insert(id, OpenPermit { permit, end: end.abort_handle() });
        }
        has_room
    }

    /// Releases one of this limit and key. Returns how many permits it was.
    pub(super) fn release(&self, id: RecordId, limit: &str, key: &[u8]) -> Option<u32> {
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

    /// Releases all.
    pub(super) fn clear(&self) {
        let open = std::mem::take(&mut *self.lock());
        for OpenPermit { end, .. } in open.values() {
            end.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ById> {
        locked(&self.0)
    }
}

fn locked(all: &Mutex<ById>) -> MutexGuard<'_, ById> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}
