//! What a reply changes in its lane; `grants` has what it changes in accounts.

use std::time::Duration;

use super::Lane;
use super::flight::Flight;
use super::lane_time::LaneTime;
use crate::sync::account::Account;
use crate::sync::context::Context;
use crate::sync::event::Event;
use crate::sync::message::{BatchVerdict, Reply};
use crate::sync::nodes::INTRODUCED_US;
use crate::sync::plausibility::LIFE_MAX_US;
use crate::time::Timestamp;

/// While the store waits for what nodes know, it is called once in this time at first, and at last.
const RECOVERY_GAP_US: u64 = 25_000;
const RECOVERY_GAP_MAX_US: u64 = 400_000;

impl Lane {
    /// The reply to the attempt that was `sent` then.
    pub(super) fn accept(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        for slot in &flight.slots {
            self.accounts.change(*slot, Account::end_report);
        }
        let wait_us = (reply.recovering_until_us - reply.time_us).clamp(0, LIFE_MAX_US) as u64;
        self.replies.recovering_until = now.plus_micros(wait_us);
        if matches!(reply.verdict, BatchVerdict::Applied(_) | BatchVerdict::Reborn) {
            self.take_time(flight, reply, sent, now, context);
        }
        self.call_while_recovering(wait_us > 0, now, context);
        match &reply.verdict {
            BatchVerdict::Applied(grants) => {
                self.incarnation = Some(reply.incarnation);
                self.has_left = flight.request.knowledge.leaving;
                self.take_counts(reply, wait_us > 0, now, context);
                let (of_closed, of_accounts) = grants.split_at(flight.closed_count());
                for (index, grant) in of_accounts.iter().enumerate() {
                    self.granted(flight, index, grant, now, context);
                }
                self.closed.told(of_closed, reply.time_us);
                self.closed.forget(reply.time_us);
            }
            BatchVerdict::Reborn => {
                context.event(Event::MemoryLost { lane: self.number });
                context.memory_lost(now);
                self.trouble.lost_memory(now);
                self.restart(Some(reply.incarnation), flight, now);
                self.closed.tell_all();
            }
            BatchVerdict::Cloned | BatchVerdict::Stale => {
                self.instance = context.draw_instance();
                self.restart(self.incarnation, flight, now);
            }
            // Both were turned into errors by `check`.
            BatchVerdict::Lanes(_) | BatchVerdict::Wire(_) => {}
        }
        self.say_farewell_soon(now);
    }

    /// Takes the lane's time from a reply.
    fn take_time(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        let time = LaneTime {
            time_us: reply.time_us,
            sent: flight.first_sent,
            received: now,
            travelled_us: now.micros_since(sent),
        };
        if let Some(jump_us) = self.replies.time.and_then(|before| before.jump_us(&time)) {
            self.trouble.store_jumped(jump_us);
            let by = Duration::from_micros(jump_us);
            context.event(Event::StoreClockJumped { lane: self.number, by });
        }
        self.replies.time = Some(time);
        self.replies.silence_us = reply.silence_us.clamp(0, LIFE_MAX_US) as u64;
    }

    /// While the lane waits for what nodes know, it is called again before the next heartbeat.
    fn call_while_recovering(
        &mut self,
        is_recovering: bool,
        now: Timestamp,
        context: &mut Context,
    ) {
        if !is_recovering {
            self.calls.recovery_gap_us = 0;
            return;
        }
        let gap_us = (2 * self.calls.recovery_gap_us).clamp(RECOVERY_GAP_US, RECOVERY_GAP_MAX_US);
        self.calls.recovery_gap_us = gap_us;
        self.call_by(now.plus_micros(context.rng.jitter(gap_us)));
    }

    /// Takes the counts of nodes from a reply. A lane that waits for its nodes has not counted all of them. If it is
    /// lost again meanwhile, it has to wait for those of before.
    fn take_counts(
        &mut self,
        reply: &Reply,
        is_recovering: bool,
        now: Timestamp,
        context: &mut Context,
    ) {
        let replies = &mut self.replies;
        if is_recovering {
            replies.nodes = replies.nodes.max(reply.nodes);
        } else {
            replies.introduced = replies.introduced.min(now.plus_micros(INTRODUCED_US));
            replies.nodes = reply.nodes;
        }
        let is_complete = !is_recovering || context.is_any_count_missing();
        if is_complete {
            context.counted(self.number, reply.nodes.max(1), now);
        }
        let counts = &reply.limit_nodes;
        if counts.is_empty() || self.leaving {
            return;
        }
        if is_complete {
            context.counted_of_limits(self.naming.named, counts, reply.nodes, now);
        }
        let call_at = self.naming.counted(counts.len(), now, context);
        self.call_by(call_at);
    }
}
