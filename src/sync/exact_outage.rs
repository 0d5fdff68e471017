//! Whether the store decides about an exact limit: a call that is not answered begins an outage, one that is ends it.

use crate::error::StoreError;
use crate::time::Timestamp;

/// The shortest time between two events about refusals of one limit.
const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// The outages of one exact limit.
#[derive(Debug, Default)]
pub(crate) struct ExactOutage {
    is_away: bool,
    /// While the store is away, the next call may begin then.
    try_at: Timestamp,
    refusal_event_from: Timestamp,
}

/// What a call that ended changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutageChange {
    /// The outage policy decides from now on.
    Began,
    /// The store decides again.
    Ended,
    /// The store answers, but refuses to decide. Told once in a while.
    Refused(StoreError),
}

impl ExactOutage {
    /// Whether a call may begin. While the store is away one may in each timeout; nobody else waits.
    pub(crate) fn may_call(&mut self, now: Timestamp, timeout_us: u64) -> bool {
        if self.is_away {
            if now < self.try_at {
                return false;
            }
            self.try_at = now.plus_micros(timeout_us);
        }
        true
    }

    /// A call ended.
    pub(crate) fn ended(
        &mut self,
        outcome: Result<(), StoreError>,
        now: Timestamp,
        timeout_us: u64,
    ) -> Option<OutageChange> {
        match outcome {
            Ok(()) => std::mem::take(&mut self.is_away).then_some(OutageChange::Ended),
            Err(StoreError::TimedOut(_) | StoreError::Unreachable(_)) => {
                self.try_at = self.try_at.max(now.plus_micros(timeout_us));
                let was_away = std::mem::replace(&mut self.is_away, true);
                (!was_away).then_some(OutageChange::Began)
            }
            // It is there: to ask it again costs nobody a wait.
            Err(error) => {
                let is_due = now >= self.refusal_event_from;
                if is_due {
                    self.refusal_event_from = now.plus_micros(REFUSAL_EVENTS_US);
                }
                is_due.then_some(OutageChange::Refused(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TIMEOUT_US: u64 = 100_000;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1000 * millis)
    }

    fn timed_out() -> Result<(), StoreError> {
        Err(StoreError::TimedOut(Duration::from_millis(50)))
    }

    #[test]
    fn store_that_is_away_is_called_once_in_each_timeout_until_it_answers() {
        let mut outage = ExactOutage::default();
        assert!((0..9).all(|_| outage.may_call(at(1000), TIMEOUT_US)));
        assert_eq!(outage.ended(timed_out(), at(1050), TIMEOUT_US), Some(OutageChange::Began));
        // Those that were under way.
        assert_eq!(outage.ended(timed_out(), at(1050), TIMEOUT_US), None);
        assert!(!outage.may_call(at(1149), TIMEOUT_US));
        assert!(outage.may_call(at(1150), TIMEOUT_US) && !outage.may_call(at(1150), TIMEOUT_US));
        assert_eq!(outage.ended(timed_out(), at(1200), TIMEOUT_US), None);
        assert!(!outage.may_call(at(1299), TIMEOUT_US) && outage.may_call(at(1300), TIMEOUT_US));
        assert_eq!(outage.ended(Ok(()), at(1301), TIMEOUT_US), Some(OutageChange::Ended));
        assert!((0..9).all(|_| outage.may_call(at(1301), TIMEOUT_US)));
        assert_eq!(outage.ended(Ok(()), at(1302), TIMEOUT_US), None);
    }

    #[test]
    fn store_that_refuses_is_called_each_time_and_told_of_once_a_minute() {
        let mut outage = ExactOutage::default();
        let denied = || StoreError::Denied("NOPERM".to_owned());
        let refused = Some(OutageChange::Refused(denied()));
        assert_eq!(outage.ended(Err(denied()), at(1000), TIMEOUT_US), refused);
        assert_eq!(outage.ended(Err(denied()), at(60_999), TIMEOUT_US), None);
        assert!(outage.may_call(at(61_000), TIMEOUT_US));
        assert_eq!(outage.ended(Err(denied()), at(61_000), TIMEOUT_US), refused);
    }
}
