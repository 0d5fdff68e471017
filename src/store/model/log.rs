//! What the record of a sliding log keeps: which slot of time each charge belongs to.

use crate::quota::Scale;
use crate::sync::message::NUMBER_MAX;

/// Units charged by slot, the oldest first; never more than a burst together. What was charged beyond a burst
/// lowers the level only, and takes its place among them as soon as earlier charges leave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots(pub(crate) Vec<(i64, i64)>);

impl Slots {
    pub(super) fn sum(&self) -> i64 {
        self.0.iter().fold(0, |sum: i64, (_, units)| sum.saturating_add(*units))
    }

    /// When the charges of a slot leave: a window after the slot's end.
    fn leaves_us(scale: &Scale, slot: i64) -> i64 {
        (slot + 1) * scale.slot_us() + scale.window_us()
    }

    fn add(&mut self, slot: i64, units: i64) {
        let at = self.0.partition_point(|(other, _)| *other < slot);
        match self.0.get_mut(at) {
            Some((other, found)) if *other == slot => *found += units,
            _ => self.0.insert(at, (slot, units)),
        }
    }

    /// Charges what `level` misses beyond what is charged already to the slot of `now_us`. Where it misses less, because debt
    /// was written off, the oldest charges go: the newest are those that the limit would still deny for.
    pub(super) fn settle(&mut self, scale: &Scale, level: i64, now_us: i64) {
        let sum = self.sum();
        let beyond = scale.burst - level - sum;
        let room = beyond.min(scale.burst - sum);
        if room > 0 {
            self.add(now_us / scale.slot_us(), room);
        }
        let mut less = -beyond;
        while less > 0
            && let Some((_, units)) = self.0.first_mut()
        {
            let taken = less.min(*units);
            *units -= taken;
            less -= taken;
            if *units == 0 {
                self.0.remove(0);
            }
        }
    }

    /// Lets charges leave until `until_us`, and returns the level then.
    pub(super) fn pass(&mut self, scale: &Scale, level: i64, from_us: i64, until_us: i64) -> i64 {
        self.settle(scale, level, from_us);
        let mut owed = scale.burst - level - self.sum();
        loop {
            let gone = |&(slot, _): &(i64, i64)| Self::leaves_us(scale, slot) <= until_us;
            let leaving = self.0.partition_point(gone);
            let Some(&(last, _)) = leaving.checked_sub(1).and_then(|last| self.0.get(last)) else {
                break;
            };
            self.0.drain(..leaving);
            let room = owed.min(scale.burst - self.sum());
            if room > 0 {
                owed -= room;
                self.add(Self::leaves_us(scale, last) / scale.slot_us(), room);
            }
        }
        (scale.burst - self.sum() - owed).max(-NUMBER_MAX)
    }

    /// No charge is later than `now_us`: the lane's time went back.
    pub(super) fn no_later_than(&mut self, scale: &Scale, now_us: i64) {
        let newest = now_us / scale.slot_us();
        for (slot, units) in std::mem::take(&mut self.0) {
            self.add(slot.min(newest), units);
        }
    }

    /// The same charges in the units and slots of another plan, each counted by `convert`.
    pub(super) fn convert(
        &mut self,
        old: &Scale,
        new: &Scale,
        now_us: i64,
        convert: impl Fn(i64) -> i64,
    ) {
        for (slot, units) in std::mem::take(&mut self.0) {
            let last_us = ((slot + 1) * old.slot_us() - 1).min(now_us);
            self.add(last_us / new.slot_us(), convert(units));
        }
    }
}
