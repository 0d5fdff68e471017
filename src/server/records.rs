//! What requests about reservations and permits have in common: records of the store that any process can end.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::extract::whole;
use super::running::Running;
use crate::store::record_id::RecordId;

/// How long a record is open, unless the request says.
pub(super) const TIME_TO_LIVE: Duration = Duration::from_secs(600);
/// The longest that it can be open: a day.
const TTL_MS_MAX: u64 = 24 * 3_600_000;
/// For how long an answer waits until a record has ended.
pub(super) const SETTLED_WITHIN: Duration = Duration::from_secs(5);

pub(super) fn time_to_live<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let millis: u64 = whole(deserializer)?;
    if !(1..=TTL_MS_MAX).contains(&millis) {
        return Err(D::Error::custom(format!("{millis}: must be 1 to {TTL_MS_MAX}")));
    }
    Ok(Duration::from_millis(millis))
}

pub(super) fn record_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RecordId, D::Error> {
    let text = Cow::<str>::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

/// Work on a record of the store: the service waits for it before it ends.
pub(super) struct Unfinished(Arc<Running>);

impl Unfinished {
    /// `None` if the service ends already.
    pub(super) fn begin(running: Arc<Running>) -> Option<Self> {
        running.unfinished.send_modify(|unfinished| *unfinished += 1);
        // From here on the service waits for it.
        let unfinished = Self(running);
        (!unfinished.refuses_checks()).then_some(unfinished)
    }
}

impl std::ops::Deref for Unfinished {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.0
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.unfinished.send_modify(|unfinished| *unfinished -= 1);
    }
}
