//! When outage policies begin and end, and whose outage it was.

use super::Lane;
use super::flight::Flight;
use crate::limit::Terms;
use crate::quota::Curve;
use crate::sync::account::{Account, CLOCK_ERROR_DIVISOR, Outage, PolicyWindow, WINDOW_MARGIN_US};
use crate::sync::context::Context;
use crate::sync::event::Event;
use crate::sync::message::{NUMBER_MAX, Reply};
use crate::time::Timestamp;

/// A message takes no longer than two round trips and this.
const TRAVEL_US: u64 = 10_000;

impl Lane {
    /// From when on the outage policy of a key with these terms may admit: the store takes the silence
    /// for an outage by then, the leases of the key on all nodes have ended, and the limit's grace is over. `None`
    /// while the store answers.
    pub(super) fn policy_from(&self, terms: &Terms, context: &Context) -> Option<Outage> {
        if self.silence.failures == 0 {
            return None;
        }
        let since = self.silence.since;
        let epoch_us = terms.epoch_us as i64;
        let (ends_in_us, last_us) = match self.replies.time.filter(|_| self.incarnation.is_some()) {
            Some(time) => {
                // The last batch that the store has applied reached it soon after.
                let travelled_us = 2 * time.travelled_us + TRAVEL_US;
                let last_us = time.most(since).saturating_add_unsigned(travelled_us);
                let ends_us = (last_us / epoch_us + 2).saturating_mul(epoch_us);
                ((ends_us - time.least(since)).max(0) as u64, last_us)
            }
            // It never answered. Leases that others were given before the first attempt live as long as that. What it
            // gives others later has a term of the bound.
            None => (2 * terms.epoch_us + TRAVEL_US, i64::MAX),
        };
        let ended = since.plus_micros(ends_in_us + ends_in_us / CLOCK_ERROR_DIVISOR);
        let silent = self.silent_for_all(context);
        let from = ended.max(silent).max(since.plus_micros(terms.grace_us));
        let from = if self.silence.failed_sent < silent { Timestamp::NEVER } else { from };
        Some(Outage { from, ended, last_us })
    }

    /// If an attempt fails that is sent from then on, the store counts an outage as well.
    pub(super) fn silent_for_all(&self, context: &Context) -> Timestamp {
        let silence_us = self.replies.silence_us.max(context.timings.silence_us);
        self.silence.since.plus_micros(silence_us + context.timings.retry_us)
    }

    /// Puts the outage policy of a key without a lease in force while the store is away.
    pub(super) fn enter_policy_if_unanswered(
        &mut self,
        slot: usize,
        now: Timestamp,
        context: &mut Context,
    ) {
        let account = &self.accounts[slot];
        if self.silence.failures == 0 || account.lease_ends().is_some() || account.in_policy() {
            return;
        }
        let terms = self.terms(slot, context);
        if let Some(outage) = self.policy_from(&terms, context).filter(|outage| outage.from <= now)
        {
            self.enter_policy(slot, now, &outage, context);
        }
    }

    /// Keys without a lease have nothing to spend: their outage policy takes over once the store has not answered
    /// the lane for long enough.
    pub(super) fn enter_policies(&mut self, now: Timestamp, context: &mut Context) {
        self.policies.from = Timestamp::NEVER;
        if self.silence.failures == 0 {
            return;
        }
        let outages: Vec<Option<Outage>> =
            context.limits.iter().map(|limit| self.policy_from(&limit.terms, context)).collect();
        let waiting = |from: &Timestamp| *from > now;
        // Never, for those that wait for an attempt to fail.
        let later = outages.iter().flatten().map(|outage| outage.from).filter(waiting).min();
        self.policies.from = later.unwrap_or(Timestamp::NEVER);
        if outages.iter().flatten().all(|outage| outage.from > now) {
            return;
        }
        let unleased: Vec<(usize, Outage)> = self
            .accounts
            .iter()
            .filter(|(_, account)| !account.in_policy() && account.lease_ends().is_none())
            .filter_map(|(slot, account)| Some((slot, outages[account.limit() as usize]?)))
            .filter(|(_, outage)| outage.from <= now)
            .collect();
        for (slot, outage) in unleased {
            self.enter_policy(slot, now, &outage, context);
        }
    }

    /// Counts the outage that has just ended. If the store was back for all nodes at `back`, it was that of all; else
    /// this node alone was cut off. One that joined lately counts as cut off too, because the others do not know of it.
    /// A node counts as cut off once, for the whole time: all that a key's policy gave came out of one bucket.
    /// One that had never been answered counts for itself.
    pub(super) fn live_through(&mut self, back: Option<Timestamp>, reply: &Reply, now: Timestamp) {
        let lived_us = now.micros_since(self.policies.entered);
        let was_answered = self.silence.before.time_us > 0;
        if !was_answered {
            return self.trouble.lived_unanswered(lived_us);
        }
        let was_alone = back.is_none() || self.silence.before.joined_lately;
        if was_alone {
            self.trouble.lived_alone(lived_us);
        }
        let Some(back) = back else { return };
        let late_us = now.micros_since(back.max(self.policies.entered));
        self.trouble.lived_through(late_us, self.policies.lent);
        if reply.recovering_until_us == 0 && !was_alone {
            // The store has not waited for this node, and has given the others everything.
            self.trouble.lived_alone(late_us);
        }
    }

    /// The store answers again: what policies took is to be reported.
    pub(super) fn leave_policies(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        now: Timestamp,
        context: &mut Context,
    ) {
        let since_us = reply.recovering_since_us;
        let all_silent = since_us > self.silence.before.time_us;
        let back_us = (reply.time_us - since_us).max(0) as u64;
        let back = all_silent.then(|| flight.first_sent.minus_micros(back_us));
        if self.accounts.sums.outages > 0 {
            self.live_through(
                back.filter(|_| self.trouble.losses == self.silence.before.losses),
                reply,
                now,
            );
        }
        for slot in self.accounts.slots(Account::in_outage) {
            self.accounts.change(slot, |account| account.leave_policy(now, back, reply.time_us));
            self.count_decisions(slot, context);
        }
    }

    /// The key's lease or its window has ended, or the window of its outage policy.
    pub(super) fn ended(&mut self, slot: usize, now: Timestamp, context: &mut Context) {
        if let Some(PolicyWindow { ends_us, .. }) = self.accounts[slot].policy_window() {
            self.turn_policy_window(slot, ends_us, now, context);
            return;
        }
        if !self.accounts.change(slot, |account| account.end_lease(now)) {
            return;
        }
        self.count_decisions(slot, context);
        self.enter_policy_if_unanswered(slot, now, context);
    }

    /// The window that ends at `ends_us` is over for a key whose outage policy is in force.
    fn turn_policy_window(
        &mut self,
        slot: usize,
        ends_us: i64,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        let next = self.policy_window(slot, &terms, ends_us, now);
        let is_in_time = context.counts_window_in_time(now);
        self.accounts.change(slot, |account| account.turn_policy_window(now, next, is_in_time));
        self.count_decisions(slot, context);
    }

    /// The key's first window that ends after `after_us` of the lane's time, and is not due for its count at `now` already.
    fn policy_window(
        &self,
        slot: usize,
        terms: &Terms,
        after_us: i64,
        now: Timestamp,
    ) -> Option<PolicyWindow> {
        let (time, scale) = (self.replies.time?, self.accounts[slot].stored_scale());
        let at_us = after_us.max(time.latest_with_drift_us(now.plus_micros(WINDOW_MARGIN_US)));
        let ends_us = match (scale.curve, terms.calendar) {
            (Curve::FixedWindow | Curve::SlidingWindow, _) => scale.window_ends_us(at_us),
            (Curve::CalendarWindow, Some(calendar)) => {
                calendar.window_span_us(at_us.max(0) as u64)[1].min(NUMBER_MAX as u64) as i64
            }
            _ => return None,
        };
        Some(PolicyWindow { ends_us, ends: time.earliest(ends_us) })
    }

    /// Puts the outage policy of a key in force.
    pub(super) fn enter_policy(
        &mut self,
        slot: usize,
        now: Timestamp,
        outage: &Outage,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        let nodes = context.sharing_in_outage(self.accounts[slot].limit(), now);
        if self.accounts.sums.outages == 0 {
            (self.policies.entered, self.policies.lent) = (now, 0);
        }
        let window = self.policy_window(slot, &terms, 0, now);
        let lent = self.accounts.change(slot, |account| {
            let lent = account.enter_policy(now, outage, &terms, nodes);
            account.open_policy_window(window);
            lent
        });
        self.policies.lent = self.policies.lent.max(lent);
        self.hand_out_answers(slot, context);
        context
            .event(Event::OutagePolicy { limit: context.limit_name(self.accounts[slot].limit()) });
        self.count_decisions(slot, context);
    }
}
