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

#[derive(Default)]
struct ById {
    open: HashMap<RecordId, OpenPermit>,
    /// The service has ended: no more are held.
    is_closed: bool,
}

struct OpenPermit {
    permit: Permit,
    /// What ends its time.
    end: AbortHandle,
}

impl OpenPermits {
    /// Holds one for so long. `false` if there are too many, or the service ends: then it goes back.
    #[allow(clippy::disallowed_methods, reason = "nobody waits for its end")]
    pub(super) fn hold(&self, id: RecordId, permit: Permit, time_to_live: Duration) -> bool {
        let mut all_open = self.lock();
        let has_room = all_open.open.len() < OPEN_MAX && !all_open.is_closed;
        if has_room {
            let all = Arc::downgrade(&self.0);
            let end = tokio::spawn(async move {
                tokio::time::sleep(time_to_live).await;
                if let Some(all) = all.upgrade() {
                    let ended = locked(&all).open.remove(&id);
                    drop(ended);
                }
            });
            all_open.open.insert(id, OpenPermit { permit, end: end.abort_handle() });
        }
        has_room
    }

    /// Releases one of this limit and key. Returns how many permits it was.
    pub(super) fn release(&self, id: RecordId, limit: &str, key: &[u8]) -> Option<u32> {
        let mut all = self.lock();
        let (own_limit, own_key) = all.open.get(&id)?.permit.name();
        if (&*own_limit, &*own_key) != (limit, key) {
            return None;
        }
        let OpenPermit { permit, end } = all.open.remove(&id)?;
        drop(all);
        end.abort();
        Some(permit.cost())
    }

    /// Releases all, and holds no more.
    pub(super) fn close(&self) {
        let closed = ById { open: HashMap::new(), is_closed: true };
        let ById { open, .. } = std::mem::replace(&mut *self.lock(), closed);
        for OpenPermit { end, .. } in open.values() {
            end.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ById> {
        locked(&self.0)
    }
}

impl Drop for OpenPermits {
    fn drop(&mut self) {
        self.close();
    }
}

fn locked(all: &Mutex<ById>) -> MutexGuard<'_, ById> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}
