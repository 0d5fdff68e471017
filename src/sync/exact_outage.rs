//! Whether the store decides about an exact limit: a call that is not answered begins an outage, one that is ends it.

use crate::error::StoreError;
use crate::time::Timestamp;

/// The shortest time between two events about refusals of one limit.
const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// While the store is away, a call begins once in this many times as long as it may wait.
const PAUSE_WAITS: u64 = 4;

/// The outages of one exact limit.
#[derive(Debug, Default)]
pub(crate) struct ExactOutage {
    /// The outage policy decides, because the last call came to nothing.
    is_on_policy: bool,
    /// That was told, and its end was not.
    is_told: bool,
    /// Calls are not answered, so that not everybody may wait.
    is_away: bool,
    /// While the store is away, the next call may begin then.
    try_at: Timestamp,
    /// When the store decided last.
    decided_at: Timestamp,
    refusal_event_from: Timestamp,
}

/// What a call that ended changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutageChange {
    /// The outage policy decides from now on.
    Began,
    /// The store decides again.
    Ended,
    /// The store answers, but refuses to decide, or there is no room for another call. Told once in a while.
    Refused(StoreError),
}

impl ExactOutage {
    /// Whether a call may begin that waits for `max_wait_us`. While the store is away, one may now and then, and nobody else
    /// waits.
    pub(crate) fn may_call(&mut self, now: Timestamp, max_wait_us: u64) -> bool {
        if self.is_away {
            if now < self.try_at {
                return false;
            }
            self.try_at = now.plus_micros(PAUSE_WAITS * max_wait_us);
        }
        true
    }

    /// When the next call may begin.
    pub(crate) fn next_call(&self) -> Timestamp {
        if self.is_away { self.try_at } else { Timestamp::ZERO }
    }

    /// A call that began at `began` ended at `now`.
    pub(crate) fn ended(
        &mut self,
        outcome: Result<(), StoreError>,
        began: Timestamp,
        now: Timestamp,
    ) -> Option<OutageChange> {
        match outcome {
            Ok(()) => {
                (self.is_away, self.decided_at) = (false, now);
                let was_on_policy = std::mem::take(&mut self.is_on_policy);
                (was_on_policy && std::mem::take(&mut self.is_told)).then_some(OutageChange::Ended)
            }
            // The store has decided since: this one was lost with an earlier connection.
            Err(_) if began < self.decided_at => None,
            Err(StoreError::TimedOut(_) | StoreError::Unreachable(_)) => {
                self.is_away = true;
                self.is_told = true;
                let was_on_policy = std::mem::replace(&mut self.is_on_policy, true);
                (!was_on_policy).then_some(OutageChange::Began)
            }
            // It is there: to ask it again costs nobody a wait.
            Err(error) => self.refused(error, now),
        }
    }

    /// Whether the outage policy decides.
    pub(crate) fn is_on_policy(&self) -> bool {
        self.is_on_policy
    }

    /// A request cannot be decided for this reason.
    pub(crate) fn refused(&mut self, error: StoreError, now: Timestamp) -> Option<OutageChange> {
        // Another program's value is in the way of one key.
        self.is_on_policy |= !matches!(error, StoreError::ForeignKey { .. });
        let is_due = now >= self.refusal_event_from;
        if is_due {
            self.refusal_event_from = now.plus_micros(REFUSAL_EVENTS_US);
            self.is_told = true;
        }
        is_due.then_some(OutageChange::Refused(error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WAIT_US: u64 = 50_000;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1000 * millis)
    }

    fn timed_out() -> Result<(), StoreError> {
        Err(StoreError::TimedOut(Duration::from_millis(50)))
    }

    #[test]
    fn store_that_is_away_is_called_now_and_then_until_it_answers() {
        let mut outage = ExactOutage::default();
        assert!((0..9).all(|_| outage.may_call(at(1000), WAIT_US)));
        assert_eq!(outage.ended(timed_out(), at(1000), at(1050)), Some(OutageChange::Began));
        // Those that were under way.
        assert_eq!(outage.ended(timed_out(), at(1000), at(1050)), None);
        assert!(outage.may_call(at(1050), WAIT_US) && !outage.may_call(at(1249), WAIT_US));
        assert_eq!(outage.ended(timed_out(), at(1050), at(1100)), None);
        assert!(outage.may_call(at(1250), WAIT_US) && !outage.may_call(at(1250), WAIT_US));
        assert_eq!(outage.ended(Ok(()), at(1250), at(1251)), Some(OutageChange::Ended));
        assert!((0..9).all(|_| outage.may_call(at(1251), WAIT_US)));
        assert_eq!(outage.ended(Ok(()), at(1251), at(1252)), None);
    }

    /// Each pair of an old call that failed and a new one that did not was an outage.
    #[test]
    fn call_that_began_before_the_store_decided_last_tells_nothing_by_its_failure() {
        let mut outage = ExactOutage::default();
        assert_eq!(outage.ended(Ok(()), at(1990), at(2000)), None);
        assert_eq!(outage.ended(timed_out(), at(1000), at(2001)), None);
        assert!((0..9).all(|_| outage.may_call(at(2001), WAIT_US)));
        assert_eq!(outage.ended(timed_out(), at(2000), at(3000)), Some(OutageChange::Began));
    }

    #[test]
    fn store_that_refuses_is_called_each_time_and_told_of_once_a_minute() {
        let mut outage = ExactOutage::default();
        let denied = || StoreError::Denied("NOPERM".to_owned());
        let refused = Some(OutageChange::Refused(denied()));
        assert_eq!(outage.ended(Err(denied()), at(1000), at(1000)), refused);
        assert_eq!(outage.ended(Err(denied()), at(60_999), at(60_999)), None);
        assert!(outage.may_call(at(61_000), WAIT_US));
        assert_eq!(outage.ended(Err(denied()), at(61_000), at(61_000)), refused);
        assert_eq!(outage.ended(Ok(()), at(61_001), at(61_002)), Some(OutageChange::Ended));
        // It answers questions and refuses charges, in turn: neither is told each time.
        for millis in 61_003..61_100 {
            assert_eq!(outage.ended(Err(denied()), at(millis), at(millis)), None);
            assert!(outage.is_on_policy());
            assert_eq!(outage.ended(Ok(()), at(millis), at(millis)), None);
        }
    }
}
