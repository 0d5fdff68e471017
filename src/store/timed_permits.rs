//! Timed permits, which no node renews: `lua/permits.lua` takes them over, and `lua/timed-permits.lua` releases them.

use std::collections::{BTreeSet, HashMap};

#[cfg(all(feature = "server", feature = "redis"))]
use crate::error::StoreError;
use crate::sync::PermitId;
#[cfg(feature = "server")]
use crate::sync::PermitKey;

/// Timed permits that are to come free.
#[cfg(feature = "server")]
#[derive(Clone, Debug)]
pub(crate) struct TimedPermitRelease {
    /// The concurrency limit's name.
    pub(crate) limit: std::sync::Arc<str>,
    pub(crate) key: PermitKey,
    pub(crate) id: PermitId,
}

#[cfg(all(feature = "server", feature = "redis"))]
impl TimedPermitRelease {
    /// Reads the script's reply: how many permits came free.
    pub(crate) fn decode(reply: &[u8]) -> Result<u32, StoreError> {
        let number = reply.try_into().map(f64::from_le_bytes).ok();
        let is_count = |number: &f64| (0.0..=u32::MAX.into()).contains(number);
        number.filter(is_count).map(|number| number as u32).ok_or_else(|| {
            let value = format!("{} bytes", reply.len());
            StoreError::Reply { field: "timed permits", value }
        })
    }
}

/// The timed permits of one key: how many each id has, and until when.
#[derive(Clone, Debug, Default)]
pub(super) struct TimedPermits {
    by_id: HashMap<PermitId, (u32, i64)>,
    by_end: BTreeSet<(i64, PermitId)>,
    /// How many there are in all.
    permits: u32,
}

impl TimedPermits {
    /// How many there are, without those whose time is over: these are forgotten.
    pub(super) fn count(&mut self, now: i64) -> u32 {
        while let Some((_, id)) = self.by_end.first().filter(|(ends_us, _)| *ends_us <= now) {
            let id = *id;
            self.remove(id);
        }
        self.permits
    }

    pub(super) fn add(&mut self, id: PermitId, permits: u32, ends_us: i64) {
        self.remove(id);
        self.by_id.insert(id, (permits, ends_us));
        self.by_end.insert((ends_us, id));
        self.permits += permits;
    }

    /// Returns how many there were.
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "the service releases them"))]
    pub(super) fn release(&mut self, id: PermitId, now: i64) -> u32 {
        self.count(now);
        self.remove(id)
    }

    fn remove(&mut self, id: PermitId) -> u32 {
        let Some((permits, ends_us)) = self.by_id.remove(&id) else { return 0 };
        self.by_end.remove(&(ends_us, id));
        self.permits -= permits;
        permits
    }
}

#[cfg(all(test, feature = "server", feature = "redis"))]
mod tests {
    use super::*;

    #[test]
    fn malformed_reply_about_timed_permits_is_an_error() {
        assert_eq!(TimedPermitRelease::decode(&3.0_f64.to_le_bytes()), Ok(3));
        for wrong in [&[0; 7][..], &f64::NAN.to_le_bytes(), &(-1.0_f64).to_le_bytes()] {
            let error = TimedPermitRelease::decode(wrong).err();
            let is_named = matches!(error, Some(StoreError::Reply { field: "timed permits", .. }));
            assert!(is_named, "{error:?}");
        }
    }
}
