//! What the store's answers about keys do to their accounts.

use super::{Flight, HEARTBEAT_US, Lane};
use crate::error::StoreError;
use crate::sync::account::{Cluster, Outage};
use crate::sync::engine::Context;
use crate::sync::event::Event;
use crate::sync::message::{
    Given, Grant, Incarnation, Reply, Request, Verdict, WIRE_VERSION, Withheld,
};
use crate::time::Timestamp;
use std::time::Duration;

/// The longest lease that a reply may grant.
pub(super) const LIFE_MAX_US: i64 = 64_000_000;

impl Lane {
    pub(super) fn granted(
        &mut self,
        flight: &Flight,
        index: usize,
        grant: &Grant,
        now: Timestamp,
        context: &mut Context,
    ) {
        let (slot, entry) = (flight.slots[index], &flight.request.entries[index]);
        let leaving = self.leaving;
        let terms = self.terms(slot, context);
        match grant {
            Grant::Given(given) => {
                let account = &self.accounts[slot];
                let (entry, given) =
                    (&account.in_own_units(entry), &account.given_in_own_units(given));
                context.agreed(self.accounts[slot].limit(), given.level);
                if given.lost {
                    let limit = context.limit_name(self.accounts[slot].limit());
                    context.event(Event::RecordLost { limit });
                }
                let lost = self.accounts[slot].lose_record(given.lost);
                self.trouble.lost_records = self.trouble.lost_records.max(lost);
                if self.accounts[slot].in_policy() && !self.returning {
                    // The store takes the key's quota again.
                    self.rescheduled(slot, |account| account.leave_policy(now, None, &terms));
                }
                self.rescheduled(slot, |account| account.set_refused(false));
                let recovering_until = self.recovering_until;
                let limit = self.accounts[slot].limit();
                let nodes = context.sharing(limit, now);
                let round_trip_us = self.round_trip_us;
                let installed = self.rescheduled(slot, |account| {
                    account.cluster = Cluster { nodes, round_trip_us };
                    let sent = flight.first_sent;
                    let installed = account.install(given, entry, sent, now, &terms);
                    if given.withheld != Withheld::Nothing && recovering_until > now {
                        account.report_by(recovering_until);
                    }
                    if leaving {
                        account.report_at(now);
                    }
                    installed
                });
                self.tell(slot, context);
                if let Some(drift) = installed.drift {
                    context.event(Event::Viewed {
                        limit: entry.limit.clone(),
                        drift_tokens: drift as f64 / terms.scale.token as f64,
                        burst_tokens: (terms.scale.burst / terms.scale.token) as u64,
                        age: Duration::from_micros(installed.age_us),
                    });
                }
            }
            Grant::OtherQuota { version, scale }
                if self.rescheduled(slot, |account| account.adopt(entry, *version, *scale)) =>
            {
                let limit = self.accounts[slot].limit();
                context.limits[limit as usize].newest = Some((*version, *scale));
                context.refused(limit, entry, grant, now);
                self.rescheduled(slot, |account| account.report_at(now));
            }
            Grant::OtherQuota { .. } | Grant::Foreign => {
                self.rescheduled(slot, |account| account.set_refused(true));
                if self.accounts[slot].take_refusal_event_due(now) {
                    context.refused(self.accounts[slot].limit(), entry, grant, now);
                }
                self.rescheduled(slot, |account| {
                    account.revoke(entry);
                    account.report_at(now.plus_micros(HEARTBEAT_US));
                });
                if !self.accounts[slot].in_policy() {
                    let last_us = self.time.map_or(i64::MAX, |time| time.least(now));
                    let outage = Outage { from: now, ended: now, last_us };
                    self.enter_policy(slot, now, &outage, context);
                }
            }
        }
        self.tally(slot, context);
        if leaving && self.rescheduled(slot, |account| account.try_leave(now)) {
            self.tally(slot, context);
            self.close(slot, context);
        }
    }

    /// Begins anew under `incarnation`: the batch in flight was not applied, and every key tells
    /// the store what this node knows of it.
    pub(super) fn restart(
        &mut self,
        incarnation: Option<Incarnation>,
        flight: &Flight,
        now: Timestamp,
    ) {
        self.incarnation = incarnation;
        self.sequence = 0;
        (self.limits_named, self.names_at) = (0, now);
        for (slot, entry) in flight.slots.iter().zip(&flight.request.entries) {
            self.accounts[*slot].revoke(entry);
        }
        let slots: Vec<usize> = self.accounts.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.rescheduled(slot, |account| account.register_anew(now));
        }
        self.sendable_at = now;
        self.heartbeat_at = now;
    }
}

/// Refuses replies that no store of this protocol would give to `request`.
pub(super) fn check(reply: Reply, request: &Request) -> Result<Reply, StoreError> {
    match &reply.verdict {
        Verdict::Lanes(stored) => {
            Err(StoreError::Lanes { configured: request.lanes, stored: *stored })
        }
        Verdict::Wire(stored) => Err(StoreError::Wire { spoken: WIRE_VERSION, stored: *stored }),
        Verdict::Applied(grants) if grants.len() != request.entries.len() => {
            Err(StoreError::Reply { field: "grants", value: grants.len().to_string() })
        }
        Verdict::Applied(_) if reply.limit_nodes.len() != request.limits.len() => {
            Err(StoreError::Reply {
                field: "limit_nodes",
                value: reply.limit_nodes.len().to_string(),
            })
        }
        Verdict::Applied(grants) => {
            for (grant, entry) in grants.iter().zip(&request.entries) {
                if let Grant::Given(given) = grant {
                    let burst = entry.scale.burst / entry.scale.token;
                    let most = (entry.needed + entry.want).min(burst);
                    plausible(given, most, entry.scale.rate, burst)?;
                }
            }
            Ok(reply)
        }
        Verdict::Reborn | Verdict::Stale | Verdict::Cloned => Ok(reply),
    }
}

fn plausible(given: &Given, want: i64, rate: i64, burst: i64) -> Result<(), StoreError> {
    let bounds = [
        ("grant.tokens", given.tokens, want),
        ("grant.rate", given.rate, rate),
        ("grant.depth", given.depth, burst),
        ("grant.life_us", given.life_us, LIFE_MAX_US),
    ];
    for (field, value, most) in bounds {
        if value > most {
            return Err(StoreError::Reply { field, value: value.to_string() });
        }
    }
    Ok(())
}
