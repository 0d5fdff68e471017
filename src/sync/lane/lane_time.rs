//! The lane's time as a node knows it.

use crate::sync::account::CLOCK_ERROR_DIVISOR;
use crate::time::Timestamp;

/// A store's clock that is further ahead than this has jumped.
const JUMP_LEAST_US: u64 = 5_000;

/// The lane's time in a reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneTime {
    pub(super) time_us: i64,
    /// The batch was first sent then: the lane's time is at most this far ahead.
    pub(super) sent: Timestamp,
    pub(super) received: Timestamp,
    /// How long the attempt took that was answered.
    pub(super) travelled_us: u64,
}

impl LaneTime {
    /// The earliest that the lane's time can be at `now`.
    pub(super) fn least(&self, now: Timestamp) -> i64 {
        self.time_us.saturating_add_unsigned(now.micros_since(self.received))
    }

    /// How much further the lane's time went on from here to `later` than this node's clock did, if that is
    /// more than clocks differ by.
    pub(super) fn jump_us(&self, later: &Self) -> Option<u64> {
        let own_us = later.received.micros_since(self.sent);
        let most_us = own_us + own_us / CLOCK_ERROR_DIVISOR + JUMP_LEAST_US;
        let passed_us = later.time_us - self.time_us;
        u64::try_from(passed_us).ok().filter(|passed_us| *passed_us > most_us).map(|us| us - own_us)
    }

    /// The earliest by this node's clock that the lane's time can be `us`.
    pub(super) fn earliest(&self, us: i64) -> Timestamp {
        let ahead_us = us.saturating_sub(self.time_us).max(0) as u64;
        self.sent.plus_micros(ahead_us - ahead_us / CLOCK_ERROR_DIVISOR)
    }

    /// The latest that the lane's time can be at `now`, however the two clocks drift: [`earliest`](Self::earliest) of any later time is
    /// after `now`.
    pub(super) fn latest_with_drift_us(&self, now: Timestamp) -> i64 {
        let own_us = now.micros_since(self.sent);
        self.time_us.saturating_add_unsigned(own_us + own_us / (CLOCK_ERROR_DIVISOR - 1))
    }

    /// The latest that the lane's time can be at `now`.
    pub(super) fn most(&self, now: Timestamp) -> i64 {
        self.time_us.saturating_add_unsigned(now.micros_since(self.sent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With D parts and q = own / (D - 1): own < (q + 1)(D - 1), so that (own + q + 1) / D is at most q.
    #[test]
    fn lane_time_later_than_the_latest_comes_after_now() {
        let sent = Timestamp::from_micros(1_000);
        let time = LaneTime { time_us: 5_000_000, sent, received: sent, travelled_us: 0 };
        for own_us in (0..20_000).chain((0..20_000).map(|step| 1_000_000_007 + 1_999 * step)) {
            let now = sent.plus_micros(own_us);
            let latest_us = time.latest_with_drift_us(now);
            assert!(time.earliest(latest_us + 1) > now, "{own_us}");
            assert_eq!(time.earliest(latest_us), now, "no later than it must be");
            assert!(time.most(now) <= latest_us, "{own_us}");
        }
    }

    #[test]
    fn clock_of_a_store_has_jumped_if_it_went_on_by_more_than_clocks_differ_by() {
        let at = Timestamp::from_micros;
        let time =
            LaneTime { time_us: 5_000_000, sent: at(0), received: at(900), travelled_us: 900 };
        for (passed_us, jump_us) in
            [(1_005_500, None), (1_005_501, Some(5_501)), (3_000_000, Some(2_000_000)), (-1, None)]
        {
            let time_us = time.time_us + passed_us;
            let later = LaneTime { time_us, sent: at(999_000), received: at(1_000_000), ..time };
            assert_eq!(time.jump_us(&later), jump_us, "{passed_us}");
        }
    }
}
