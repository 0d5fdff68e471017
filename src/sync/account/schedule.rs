//! When one key reports, and what the lane's queues have of that.

use super::tick_pacing::Paces;
use crate::limit::Pace;
use crate::sync::backoff::Backoff;
use crate::time::Timestamp;

/// A key above half its burst is synced once in this many ticks, unless its account is young.
pub(super) const PLENTY_TICKS: u64 = 4;
/// The longest gap between fruitless early syncs, in ticks.
pub(super) const EARLY_TICKS_MAX: u64 = 16;

/// The reports of one key.
#[derive(Debug)]
pub(super) struct Schedule {
    /// When to report next.
    pub(super) due: Timestamp,
    /// When to probe for spending that should be reported before `due`; `NEVER` if not at all.
    probe_at: Timestamp,
    /// A report is in flight.
    pub(super) is_reporting: bool,
    /// The next report, or the one in flight, is ahead of schedule.
    is_early: bool,
    /// When early reports may be made.
    early: Backoff,
    /// The key's own tick.
    pub(super) tick_us: u64,
    /// Its part of [`Paces`].
    share: u64,
}

impl Schedule {
    pub(super) fn new(tick_us: u64) -> Self {
        Self {
            due: Timestamp::NEVER,
            probe_at: Timestamp::NEVER,
            is_reporting: false,
            is_early: false,
            early: Backoff::default(),
            tick_us,
            share: 0,
        }
    }

    /// Reports `interval_us` from now, or early if that is `urgent`, unless a report is due before.
    pub(super) fn touch(&mut self, urgent: bool, interval_us: u64, now: Timestamp) {
        let scheduled = now.plus_micros(interval_us);
        let soon = if urgent { self.early.not_before() } else { scheduled };
        let soon = soon.max(now);
        if soon < self.due {
            self.due = soon;
            self.is_early = urgent;
        }
    }

    /// Probes for spending `span_us` from now, if that is before the next report.
    pub(super) fn probe_in(&mut self, span_us: u64, now: Timestamp) {
        let at = now.plus_micros(span_us);
        self.probe_at = if at < self.due { at } else { Timestamp::NEVER };
    }

    /// Reports at once. This is no early sync: whether it brings anything is not judged.
    pub(super) fn report_now(&mut self, now: Timestamp) {
        (self.due, self.is_early) = (self.due.min(now), false);
        self.stop_probing();
    }

    /// When to probe for spending.
    pub(super) fn probe_at(&self) -> Timestamp {
        self.probe_at
    }

    pub(super) fn stop_probing(&mut self) {
        self.probe_at = Timestamp::NEVER;
    }

    /// When a key may report early.
    pub(super) fn early_from(&self) -> Timestamp {
        self.early.not_before()
    }

    /// Takes into account whether asking early `helped`.
    pub(super) fn judge_early(&mut self, helped: bool, tick_us: u64, now: Timestamp) {
        if helped {
            self.early.succeeded();
        } else if self.is_early {
            self.early.failed(now, tick_us / 8, EARLY_TICKS_MAX * tick_us);
        }
        self.is_early = false;
    }

    /// Takes the tick that `demand_per_us` warrants, of which a report is made once in `ticks`.
    pub(super) fn keep_pace(
        &mut self,
        pace: &Pace,
        demand_per_us: f64,
        ticks: u64,
        paces: &mut Paces,
    ) {
        let warranted_us = pace.warranted_us(demand_per_us);
        self.lose_pace(paces);
        self.share = paces.join(ticks * warranted_us);
        self.tick_us = paces.stretched_us(warranted_us, pace);
    }

    /// The key has no part of the pace any more.
    pub(super) fn lose_pace(&mut self, paces: &mut Paces) {
        paces.leave(std::mem::take(&mut self.share));
    }
}

/// What the lane's queues and sums have of an account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agenda {
    /// When it wants to report or to be probed; `NEVER` while it reports, or is a newcomer.
    pub(crate) due: Timestamp,
    /// The same of a newcomer.
    pub(crate) newcomer_due: Timestamp,
    /// When its lease or its window ends, or the window of its outage policy.
    pub(crate) ends: Timestamp,
    /// When its first waiting caller has waited long enough.
    pub(crate) wait_ends: Timestamp,
    /// Tokens pending or to be reported.
    pub(crate) pending: u64,
    /// Leased depth, in tokens.
    pub(crate) depth: i64,
    /// An outage policy is in force.
    pub(crate) in_policy: bool,
    /// One is in force because the store is away.
    pub(crate) in_outage: bool,
    /// Something is to be reported before the store gives what it has.
    pub(crate) is_owing: bool,
}

impl Agenda {
    /// Of no account.
    pub(crate) const NONE: Self = Self {
        due: Timestamp::NEVER,
        newcomer_due: Timestamp::NEVER,
        ends: Timestamp::NEVER,
        wait_ends: Timestamp::NEVER,
        pending: 0,
        depth: 0,
        in_policy: false,
        in_outage: false,
        is_owing: false,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_probed_for_where_a_report_is_due_by_then() {
        let at = Timestamp::from_micros;
        let mut schedule = Schedule { due: at(100), ..Schedule::new(50_000) };
        for (in_us, probed) in [(49, at(99)), (50, Timestamp::NEVER), (51, Timestamp::NEVER)] {
            schedule.probe_in(in_us, at(50));
            assert_eq!(schedule.probe_at(), probed, "{in_us}");
        }
    }
}
