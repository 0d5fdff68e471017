//! What the store's answers about keys do to their accounts.

use std::time::Duration;

use super::flight::Flight;
use super::{HEARTBEAT_US, Lane, is_same_window};
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::account::{Agreement, Installed, Outage, definition, is_changed};
use crate::sync::context::Context;
use crate::sync::event::Event;
use crate::sync::message::{Entry, Given, Grant, Incarnation, Withheld};
use crate::time::Timestamp;

impl Lane {
    /// The store's answer about one account of the batch.
    pub(super) fn granted(
        &mut self,
        flight: &Flight,
        index: usize,
        grant: &Grant,
        now: Timestamp,
        context: &mut Context,
    ) {
        let (slot, entry) = (flight.slots[index], &flight.entries()[index]);
        match grant {
            Grant::Given(given) => {
                let account = &self.accounts[slot];
                let entry = account.in_own_units(entry);
                let given = account.given_in_own_units(given);
                self.given(slot, &entry, &given, flight.first_sent, now, context);
            }
            Grant::OtherQuota { version, scale } => {
                if !self.agrees(slot, entry, (*version, *scale), now, context) {
                    self.refused(slot, entry, grant, now, context);
                }
            }
            Grant::Foreign => self.refused(slot, entry, grant, now, context),
        }
        self.count_decisions(slot, context);
        if self.leaving && self.accounts.change(slot, |account| account.try_leave(now)) {
            self.count_decisions(slot, context);
            self.close(slot, context);
        }
    }

    /// The store holds another quota than the entry's. Returns whether it can be asked again at once.
    fn agrees(
        &mut self,
        slot: usize,
        entry: &Entry,
        (version, stored): (i64, Scale),
        now: Timestamp,
        context: &mut Context,
    ) -> bool {
        let limit = self.accounts[slot].limit();
        let books = &mut context.limits[limit as usize];
        let agreement = self
            .accounts
            .change(slot, |account| account.agree(entry, version, stored, &books.terms, now));
        let Some(agreement) = agreement else { return false };
        if definition(version) > definition(entry.version) {
            // A changed one may be a plan's, or that of one key only.
            if !is_changed(version) {
                books.newest = Some((version, stored));
            }
            context.refused(limit, entry, &Grant::OtherQuota { version, scale: stored }, now);
        } else if agreement == Agreement::Follows && !entry.scale.is_same_quota(&stored) {
            let named = self.accounts[slot].plan_named();
            context.follows_other_plan(limit, named, stored, now);
        }
        self.accounts.change(slot, |account| account.report_at(now));
        true
    }

    /// The store has charged the entry, and gave.
    fn given(
        &mut self,
        slot: usize,
        entry: &Entry,
        given: &Given,
        first_sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        let (terms, limit) = (self.terms(slot, context), self.accounts[slot].limit());
        context.saw_level(limit, given.level);
        if given.lost {
            context.event(Event::RecordLost { limit: context.limit_name(limit) });
        }
        let windows = (self.accounts[slot].stored_scale(), terms.calendar);
        if entry.refunded.tokens > 0
            && !is_same_window(windows, entry.refunded.from_us, given.stamp_us)
        {
            // It came when their window had ended.
            let tokens = entry.refunded.tokens.clamp(0, u32::MAX.into()) as u32;
            context.event(Event::NotGivenBack { limit: context.limit_name(limit), tokens });
        }
        let (leaving, is_returning) = (self.leaving, self.silence.is_returning);
        let recovering_until = self.replies.recovering_until;
        let nodes = context.sharing(limit, now);
        let cluster = self.cluster(nodes, &terms);
        let (lost, installed) = self.accounts.change(slot, |account| {
            if account.in_policy() && !is_returning {
                // The store takes the key's quota again.
                account.leave_policy(now, None, given.stamp_us);
            }
            account.set_taken();
            account.cluster = cluster;
            let installed = account.install(given, entry, first_sent, now, &terms);
            if given.withheld != Withheld::Nothing && recovering_until > now {
                account.report_by(recovering_until);
            }
            account.end_resets(recovering_until > now, recovering_until.max(now));
            if leaving {
                account.report_at(now);
            }
            (account.count_lost_record(given.lost), installed)
        });
        self.trouble.lost_records = self.trouble.lost_records.max(lost);
        self.hand_out_answers(slot, context);
        if let Some(viewed) = viewed(entry, &installed, &terms) {
            context.event(viewed);
        }
    }

    /// The store refuses the key: it lives on its outage policy, and asks again with each heartbeat.
    fn refused(
        &mut self,
        slot: usize,
        entry: &Entry,
        grant: &Grant,
        now: Timestamp,
        context: &mut Context,
    ) {
        let is_event_due = self.accounts.change(slot, |account| {
            account.set_refused();
            account.revoke(entry);
            account.refuse_resets();
            account.report_at(now.plus_micros(HEARTBEAT_US));
            account.take_refusal_event_due(now)
        });
        self.hand_out_answers(slot, context);
        if is_event_due {
            context.refused(self.accounts[slot].limit(), entry, grant, now);
        }
        if !self.accounts[slot].in_policy() {
            let last_us = self.replies.time.map_or(i64::MAX, |time| time.least(now));
            let outage = Outage { from: now, ended: now, last_us };
            self.enter_policy(slot, now, &outage, context);
        }
    }

    /// Begins anew under `incarnation`: the batch in flight was not applied, and every account reports
    /// what this node knows of its key.
    pub(super) fn restart(
        &mut self,
        incarnation: Option<Incarnation>,
        flight: &Flight,
        now: Timestamp,
    ) {
        self.incarnation = incarnation;
        self.sequence = 0;
        self.naming.restart(now);
        for (slot, entry) in flight.slots.iter().zip(flight.entries()) {
            self.accounts.change(*slot, |account| account.revoke(entry));
        }
        for slot in self.accounts.slots(|_| true) {
            self.accounts.change(slot, |account| account.register_anew(now));
        }
        self.call_at_once(now);
    }
}

fn viewed(entry: &Entry, installed: &Installed, terms: &Terms) -> Option<Event> {
    let scale = &terms.scale;
    installed.drift.map(|drift| Event::Viewed {
        limit: entry.limit.clone(),
        drift_tokens: drift as f64 / scale.token as f64,
        burst_tokens: (scale.burst / scale.token) as u64,
        age: Duration::from_micros(installed.age_us),
    })
}
