//! Permits that no node renews: `lua/permits.lua` keeps them, and `lua/timed-permits.lua` gives them back.

use std::collections::HashMap;
use std::sync::Arc;

#[cfg(feature = "redis")]
use crate::error::StoreError;
use crate::sync::{PermitKey, PermitNumber};

/// Permits that are to come free.
#[derive(Clone, Debug)]
pub(crate) struct TimedPermitRequest {
    /// The concurrency limit's name.
    pub(crate) limit: Arc<str>,
    pub(crate) key: PermitKey,
    pub(crate) number: PermitNumber,
}

impl TimedPermitRequest {
    /// Reads the script's reply: how many permits came free.
    #[cfg(feature = "redis")]
    pub(crate) fn decode(reply: &[u8]) -> Result<u32, StoreError> {
        let number = reply.try_into().map(f64::from_le_bytes).ok();
        let is_count = |number: &f64| (0.0..=u32::MAX.into()).contains(number);
        number.filter(is_count).map(|number| number as u32).ok_or_else(|| {
            let value = format!("{} bytes", reply.len());
            StoreError::Reply { field: "timed permits", value }
        })
    }
}

/// The permits of one key that no node renews: how many each number has, and until when.
#[derive(Clone, Debug, Default)]
pub(super) struct TimedPermits(HashMap<PermitNumber, (u32, i64)>);

impl TimedPermits {
    /// How many there are, without those whose time is over: these are forgotten.
    pub(super) fn count(&mut self, now: i64) -> u32 {
        self.0.retain(|_, (_, ends_us)| *ends_us > now);
        self.0.values().map(|(permits, _)| permits).sum()
    }

    pub(super) fn keep(&mut self, number: PermitNumber, permits: u32, ends_us: i64) {
        self.0.insert(number, (permits, ends_us));
    }

    /// Returns how many there were.
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "the service gives them back"))]
    pub(super) fn give_back(&mut self, number: PermitNumber, now: i64) -> u32 {
        self.count(now);
        self.0.remove(&number).map_or(0, |(permits, _)| permits)
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;

    #[test]
    fn malformed_reply_about_timed_permits_is_an_error() {
        assert_eq!(TimedPermitRequest::decode(&3.0_f64.to_le_bytes()), Ok(3));
        for wrong in [&[0; 7][..], &f64::NAN.to_le_bytes(), &(-1.0_f64).to_le_bytes()] {
            let error = TimedPermitRequest::decode(wrong).err();
            let is_named = matches!(error, Some(StoreError::Reply { field: "timed permits", .. }));
            assert!(is_named, "{error:?}");
        }
    }
}
