//! What the store has leased to this node of one key.

use crate::bucket::{Lease, MAX_TOKENS, OUTLIVES_REFILL};
use crate::quota::{Curve, OWN_UNITS_MAX, Scale, converted};
use crate::sync::message::{Backdated, Entry, Given, Held, OUTSTANDING_MAX, outstanding_least};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// How much faster or slower than the store's a node's clock may run: 500 parts per million.
pub(crate) const CLOCK_ERROR_DIVISOR: u64 = 2000;
/// A node closes a window so much before it ends. So the engine can collect before the store's window ends, even if it
/// wakes late.
pub(crate) const WINDOW_MARGIN_US: u64 = 2000;

/// The lease of one key, and what its next report has to say of it.
#[derive(Debug)]
pub(super) struct LeaseState {
    /// As the store has it registered.
    pub(super) held: Held,
    /// When the tokens may no longer be spent; `ZERO` if there is no lease, or its end has been dealt with.
    pub(super) ends: Timestamp,
    /// When a sliding window ends in the store, at the earliest; `NEVER` if nothing ends before the lease, or the node has
    /// closed it.
    pub(super) window_ends: Timestamp,
    /// The time by which what was spent in this window was counted; `NEVER` if it has not been, or the window is closed.
    pub(super) window_counted: Timestamp,
    /// What the report in flight says is held, in units of this node: those of the store may be coarser or finer.
    pub(super) reported: Held,
    /// The refill of `held` flows no more.
    pub(super) is_refill_stopped: bool,
    /// Units in the bucket that make no whole token and no whole microsecond of refill; less than none if tokens
    /// were overdrawn.
    pub(super) remainder: i64,
    /// Outstanding units that this node neither holds nor has spent: overflow, grants that came too late, and what
    /// the clock's allowance took of the refill. They go into the next report.
    pub(super) forfeited: i64,
    /// Leased refill that the store wants back, in units per microsecond.
    pub(super) recall: i64,
    /// Depth that the store has registered and the bucket does not have.
    pub(super) kept_depth: i64,
    /// Tokens of it with which outage policies began: they report what they did not spend of them. `None` if the quota has changed since:
    /// how far the level has risen from the lease's end on is not known then.
    pub(super) left_to_policies: Option<i64>,
    /// The next report registers the lease anew.
    pub(super) restore: bool,
    /// The store has lost the key and does not give yet: until it does, no depth is given back. Claims assume that
    /// what was spent has refilled, but a full bucket took nothing in, and what caps it are the depths of then.
    pub(super) is_registering: bool,
}

impl LeaseState {
    pub(super) fn none() -> Self {
        Self {
            held: Held::default(),
            reported: Held::default(),
            ends: Timestamp::ZERO,
            window_ends: Timestamp::NEVER,
            window_counted: Timestamp::NEVER,
            is_refill_stopped: false,
            remainder: 0,
            forfeited: 0,
            recall: 0,
            kept_depth: 0,
            left_to_policies: Some(0),
            restore: false,
            is_registering: false,
        }
    }

    /// When the node closes a sliding window: it counts what was spent, and at the next microsecond refill ends. Tokens live
    /// on. `NEVER` if it has, or if the lease ends first.
    pub(super) fn window_closes(&self) -> Timestamp {
        if self.is_window_counted() {
            return self.window_counted.plus_micros(1);
        }
        let closes = self.window_ends.minus_micros(WINDOW_MARGIN_US);
        if self.window_ends < self.ends { closes } else { Timestamp::NEVER }
    }

    /// Whether what was spent in a window was counted, and no later time has told that this was before its end.
    pub(super) fn is_window_counted(&self) -> bool {
        self.window_counted < Timestamp::NEVER
    }

    /// No window ends any more before the lease.
    pub(super) fn forget_window(&mut self) {
        (self.window_ends, self.window_counted) = (Timestamp::NEVER, Timestamp::NEVER);
    }

    /// When the bucket stops. At a window's end it does if the engine is late, until that has collected: what is spent
    /// later is spent in the next one.
    pub(super) fn bucket_ends(&self) -> Timestamp {
        self.ends.min(self.window_ends)
    }

    /// The window has ended before the store's answer came: no refill of it flows.
    pub(super) fn close_if_late(&mut self, now: Timestamp) {
        self.is_refill_stopped = now >= self.window_closes();
        if self.is_refill_stopped {
            self.forget_window();
        }
    }

    /// The leased refill that flows, in units per microsecond. `held.rate` is what the store has registered.
    pub(super) fn rate(&self) -> i64 {
        if self.is_refill_stopped { 0 } else { self.held.rate }
    }

    /// Whether tokens or refill are leased.
    pub(super) fn is_any(&self) -> bool {
        self.held.rate > 0 || self.held.depth > 0
    }

    /// The lease as the bucket applies it.
    pub(super) fn applied(&self, low: u32, overdraw: u8) -> Lease {
        let depth = self.held.depth - self.kept_depth;
        let rate = self.rate();
        let error = (rate as u64).div_ceil(CLOCK_ERROR_DIVISOR) as i64;
        let outlives_refill = if self.bucket_ends() < self.ends { OUTLIVES_REFILL } else { 0 };
        Lease {
            rate: rate - error,
            depth: depth.clamp(0, i64::from(MAX_TOKENS)) as u32,
            ends: self.bucket_ends(),
            low,
            overdraw: overdraw | outlives_refill,
            is_policy: false,
        }
    }

    /// Adds what the store gave on `entry`, which was first sent at `first_sent`. `stored` is the quota as the store has
    /// it, and `unit` a token.
    pub(super) fn renew(
        &mut self,
        given: &Given,
        entry: &Entry,
        first_sent: Timestamp,
        stored: Scale,
        unit: i64,
    ) {
        let kept = if given.void { Held::default() } else { entry.held };
        if given.void {
            self.kept_depth = 0;
        }
        let rate_kept = rate_kept(given, entry, stored);
        self.held = Held {
            rate: rate_kept + given.rate,
            depth: kept.depth + given.depth,
            outstanding: outstanding_after(given, entry, stored, unit) + given.tokens * unit,
            stamp_us: given.stamp_us,
            demand: entry.demand,
            tag: given.tag,
        };
        if entry.held.rate == 0 {
            // What was overdrawn has been taken off the level.
            self.remainder = self.remainder.max(0);
        }
        let sure = |us: i64| first_sent.plus_micros(us as u64 - us as u64 / CLOCK_ERROR_DIVISOR);
        self.ends = sure(given.life_us).minus_micros(CLOCK_AGE_MAX_US);
        self.window_ends = match stored.curve {
            Curve::SlidingWindow => sure(stored.window_ends_us(given.stamp_us) - given.stamp_us),
            _ => Timestamp::NEVER,
        };
        self.window_counted = Timestamp::NEVER;
        self.recall = given.recall;
        self.restore = false;
    }

    /// The store has adopted another plan: it counts refill of the old one until its window's end, and none after that.
    pub(super) fn count_refill_to_window_end(&mut self, old: Scale) {
        let Held { rate, stamp_us, .. } = self.held;
        let left_us = old.window_ends_us(stamp_us) - stamp_us;
        let outstanding = self.held.outstanding.saturating_add(rate.saturating_mul(left_us));
        self.held.outstanding = outstanding.min(OWN_UNITS_MAX);
        (self.held.rate, self.recall) = (0, 0);
    }

    /// The store has counted all of it as spent: with a tag of long ago the next report is answered so.
    pub(super) fn make_void(&mut self) {
        self.held.tag = 0;
    }

    /// What was never spent of the lease that `entry` says is held and that has ended, in tokens: what was outstanding then, and
    /// counts as spent in the store, less the entry's spending, `spent` after it, and what was left to an outage policy.
    pub(super) fn unspent(
        &self,
        entry: &Entry,
        spent: i64,
        stored: &Scale,
        token: i64,
        epoch_us: u64,
    ) -> Backdated {
        let held = entry.held;
        // What was outstanding is not known once it is registered anew.
        let given_us = given_us(&held, epoch_us).filter(|_| !entry.restore);
        let (Some(from_us), Some(left_to_policies)) = (given_us, self.left_to_policies) else {
            return Backdated::default();
        };
        let ends_us = held.ends_us(epoch_us) - i64::from(stored.curve != Curve::Refill);
        let until_us = stored.refill_until_us(held.stamp_us, ends_us);
        let flowed = (held.rate + entry.back_rate).saturating_mul(until_us - held.stamp_us);
        let outstanding = held.outstanding.saturating_add(flowed) / token;
        let spent = entry.spent + spent + left_to_policies;
        Backdated { tokens: (outstanding - spent).max(0), from_us }
    }

    /// The store still has leased what a report gave back that was never applied.
    pub(super) fn take_back(&mut self, entry: &Entry) {
        self.held.rate += entry.back_rate;
        self.held.depth += entry.back_depth;
    }
}

/// When the lease was given that is `held`, by the store's time. `None` if it does not end two epochs of `epoch_us` later, as leases do.
pub(super) fn given_us(held: &Held, epoch_us: u64) -> Option<i64> {
    (held.stamp_us / epoch_us as i64 == held.tag).then_some(held.stamp_us)
}

/// Leased refill of which the store still knew when it applied `entry`.
pub(super) fn rate_kept(given: &Given, entry: &Entry, stored: Scale) -> i64 {
    let is_over = given.void || stored.has_refill_ended(entry.held.stamp_us, given.stamp_us);
    if is_over { 0 } else { entry.held.rate }
}

/// What is outstanding at this node after the store applied `entry`, without what it gave, in
/// units: the store's own reckoning.
fn outstanding_after(given: &Given, entry: &Entry, stored: Scale, unit: i64) -> i64 {
    if given.void {
        return 0;
    }
    let held = entry.held;
    let rate = if entry.restore { 0 } else { held.rate + entry.back_rate };
    let until_us = stored.refill_until_us(held.stamp_us, given.stamp_us);
    let flowed = i128::from(rate) * i128::from((until_us - held.stamp_us).max(0));
    let spent = i128::from(entry.spent) * i128::from(unit);
    let gone = spent + i128::from(entry.returned) + i128::from(entry.lost);
    let outstanding = i128::from(held.outstanding) + flowed - gone;
    // The store clamps in its own units, and asks only whether a rate is leased.
    let kept = rate_kept(given, entry, stored).min(1);
    let [least, most] = [outstanding_least(kept, stored.token), OUTSTANDING_MAX]
        .map(|units| i128::from(converted(units, stored.token, unit)));
    outstanding.clamp(least, most) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lease of 30 tokens that was renewed at 10.2 s and rose by a token in 100 ms; epochs last half a second, so that it ended at 11 s. Its
    /// last report said that 5 were spent.
    fn entry(curve: Curve) -> Entry {
        let scale = Scale { rate: 100, token: 1_000_000, burst: 100_000_000, curve };
        let (stamp_us, tag) = (10_200_000, 20);
        let held = Held { rate: 10, outstanding: 30_000_000, stamp_us, tag, ..Held::default() };
        Entry { spent: 5, held, ..Entry::empty(scale) }
    }

    fn unspent(lease: &LeaseState, entry: &Entry) -> i64 {
        lease.unspent(entry, 7, &entry.scale, entry.scale.token, 500_000).tokens
    }

    #[test]
    fn unspent_tokens_of_a_lease_are_those_outstanding_at_its_end_less_those_spent() {
        let lease = LeaseState::none();
        // 800 ms of refill; of the sliding window that ends at 11 s, a microsecond less.
        assert_eq!(unspent(&lease, &entry(Curve::Refill)), 30 + 8 - 5 - 7);
        assert_eq!(unspent(&lease, &entry(Curve::SlidingWindow)), 30 + 7 - 5 - 7);
        let lease = LeaseState { left_to_policies: Some(20), ..LeaseState::none() };
        assert_eq!(unspent(&lease, &entry(Curve::Refill)), 6, "a policy tells the rest");
        let lease = LeaseState { left_to_policies: Some(30), ..LeaseState::none() };
        assert_eq!(unspent(&lease, &entry(Curve::Refill)), 0);
    }

    #[test]
    fn unspent_tokens_are_not_reported_after_a_restore_or_change_of_quota() {
        let (lease, entry) = (LeaseState::none(), entry(Curve::Refill));
        assert_eq!(unspent(&lease, &Entry { restore: true, ..entry.clone() }), 0);
        let held = Held { tag: 19, ..entry.held };
        assert_eq!(unspent(&lease, &Entry { held, ..entry.clone() }), 0, "another node's epochs");
        let lease = LeaseState { left_to_policies: None, ..LeaseState::none() };
        assert_eq!(unspent(&lease, &entry), 0, "the quota has changed");
    }

    /// The simulator compares what nodes hold with what the store has leased to them.
    #[cfg(feature = "sim")]
    #[test]
    fn refill_flows_until_the_window_or_the_lease_ends() {
        let at = Timestamp::from_micros;
        let limit = crate::limit::Limit::new("x", crate::quota::Quota::per_second(100));
        let mut account = super::super::samples::account_of(&limit.validate_hybrid(4).unwrap());
        (account.lease.held.rate, account.lease.ends) = (7, at(3_000));
        account.lease.window_ends = at(2_000);
        let rates =
            [1_999, 2_000, 2_999, 3_000].map(|us| account.held(at(us)).map(|held| held.rate));
        assert_eq!(rates, [Some(7), Some(0), Some(0), None]);
    }
}
