//! Decisions by states of keys that this node alone has, one arm for each algorithm.

use super::slots::SlotsOf;
use super::{ActiveLimit, Target};
use crate::algorithm::TurnRule;
use crate::bucket::LocalAnswer;
use crate::decision::Decision;
use crate::driver::{AloneBuckets, Buckets, SlotRequest};
use crate::time::{Now, Timestamp};

/// The time by a limit's clocks, each of which is read when a decision needs it.
#[derive(Clone, Copy)]
pub(super) struct LimitTime<'a>(&'a ActiveLimit);

impl Now for LimitTime<'_> {
    #[inline(always)]
    fn cached(&self) -> Timestamp {
        self.0.state.clock.now()
    }

    #[inline(always)]
    fn precise(&self) -> Timestamp {
        self.0.shared.node.time.precise(self.cached())
    }
}

impl ActiveLimit {
    /// The time of a decision.
    #[inline(always)]
    pub(super) fn time(&self) -> LimitTime<'_> {
        LimitTime(self)
    }

    /// The time as limits of this node alone need it.
    #[inline(always)]
    pub(super) fn precise_now(&self) -> Timestamp {
        self.time().precise()
    }

    /// Asks a bucket of this node alone, as a call, so that callers have the code of one path only.
    #[inline(never)]
    pub(super) fn ask_alone(
        &self,
        alone: &AloneBuckets,
        target: Target<'_>,
        cost: u32,
        now: Timestamp,
    ) -> LocalAnswer {
        match alone {
            AloneBuckets::Slots(slots, _) => {
                self.ask_slots(SlotsOf { slots, key: target.key }, SlotRequest::new(cost, 0), now)
            }
            AloneBuckets::Turns(local) => {
                target.ask_local(local, (self.info, self.plan), cost, 0, now)
            }
            AloneBuckets::Windows(local) => {
                let time = self.state.window_time(local, now);
                target.ask_local(local, (self.info, self.plan), cost, 0, time)
            }
            AloneBuckets::Logs(local) => {
                target.ask_local(local, (self.info, self.plan), cost, 0, now)
            }
        }
    }

    /// Decides about a request that can take a slot ahead.
    pub(super) fn decide_within(&self, target: Target<'_>, cost: u32, within_us: u64) -> Decision {
        match self.slots() {
            Some(slots) => {
                let of = SlotsOf { slots, key: target.key };
                self.slot_at_once(of, SlotRequest::new(cost, within_us)).decision
            }
            None => self.decide_alone_within(target, cost, within_us),
        }
    }

    /// The same by this node's share, if there is one.
    pub(super) fn decide_alone_within(
        &self,
        target: Target<'_>,
        cost: u32,
        within_us: u64,
    ) -> Decision {
        match &self.state.buckets {
            Buckets::Alone(AloneBuckets::Turns(local) | AloneBuckets::Slots(_, local))
                if matches!(local.rule, TurnRule::LeakyBucket { .. }) =>
            {
                let now = self.precise_now();
                let answer = target.ask_local(local, (self.info, self.plan), cost, within_us, now);
                self.local_decision(answer, cost, now)
            }
            _ => self.decide(target, cost),
        }
    }
}
