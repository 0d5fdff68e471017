//! What the store's answers about keys do to their accounts.

use std::time::Duration;

use super::flight::Flight;
use super::{HEARTBEAT_US, Lane};
use crate::limit::Terms;
use crate::sync::account::{Installed, Outage};
use crate::sync::context::Context;
use crate::sync::event::Event;
use crate::sync::message::{Entry, Given, Grant, Incarnation, Withheld};
use crate::time::Timestamp;

impl Lane {
    /// The store's answer about one key of the batch.
    pub(super) fn granted(
        &mut self,
        flight: &Flight,
        index: usize,
        grant: &Grant,
        now: Timestamp,
        context: &mut Context,
    ) {
        let (slot, entry) = (flight.slots[index], &flight.request.entries[index]);
        match grant {
            Grant::Given(given) => {
                let account = &self.accounts[slot];
                let entry = account.in_own_units(entry);
                let given = account.given_in_own_units(given);
                self.given(slot, &entry, &given, flight.first_sent, now, context);
            }
            Grant::OtherQuota { version, scale }
                if self
                    .accounts
                    .change(slot, |account| account.adopt(entry, *version, *scale, now)) =>
            {
                let limit = self.accounts[slot].limit();
                context.limits[limit as usize].newest = Some((*version, *scale));
                context.refused(limit, entry, grant, now);
                self.accounts.change(slot, |account| account.report_at(now));
            }
            Grant::OtherQuota { .. } | Grant::Foreign => {
                self.refused(slot, entry, grant, now, context);
            }
        }
        self.count_decisions(slot, context);
        if self.leaving && self.accounts.change(slot, |account| account.try_leave(now)) {
            self.count_decisions(slot, context);
            self.close(slot, context);
        }
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
        let (leaving, is_returning) = (self.leaving, self.silence.is_returning);
        let recovering_until = self.replies.recovering_until;
        let nodes = context.sharing(limit, now);
        let cluster = self.cluster(nodes, &terms);
        let (lost, installed) = self.accounts.change(slot, |account| {
            if account.in_policy() && !is_returning {
                // The store takes the key's quota again.
                account.leave_policy(now, None, &terms);
            }
            account.set_refused(false);
            account.cluster = cluster;
            let installed = account.install(given, entry, first_sent, now, &terms);
            if given.withheld != Withheld::Nothing && recovering_until > now {
                account.report_by(recovering_until);
            }
            account.end_resets(recovering_until.max(now));
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
            account.set_refused(true);
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
        for (slot, entry) in flight.slots.iter().zip(&flight.request.entries) {
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
