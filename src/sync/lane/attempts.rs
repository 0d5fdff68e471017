//! Attempts at the batch in flight, their answers, and when the next one follows.

use std::time::Duration;

use super::Lane;
use super::flight::{Flight, Next};
use super::round_trips::longest_us;
use crate::error::StoreError;
use crate::sync::context::{Context, Output};
use crate::sync::event::Event;
use crate::sync::message::{BatchVerdict, Reply};
use crate::sync::plausibility::check;
use crate::time::Timestamp;

/// While the store is away one lane asks for all whether it is back: this often at first, in microseconds.
const PROBE_US: u64 = 20_000;

impl Lane {
    /// The store has answered another lane: this one asks again at once, if it waits.
    pub(crate) fn retry_now(&mut self, now: Timestamp, context: &mut Context) {
        if self.silence.failures > 0 && self.flight.is_some() {
            self.attempt(now, context);
        }
    }

    /// Sends the batch in flight, for the first time or again.
    pub(super) fn attempt(&mut self, now: Timestamp, context: &mut Context) {
        let silent = self.silent_for_all(context);
        let Some(flight) = &mut self.flight else { return };
        let (lane, retry_us) = (self.number, context.timings.retry_us);
        self.trips.last_attempt += 1;
        let attempt = self.trips.last_attempt;
        flight.sent(attempt, now);
        let probes = context.prober == Some(lane);
        let least_us = if probes { PROBE_US.min(retry_us) } else { retry_us };
        let patience_us = self.trips.patience_us(least_us, retry_us);
        // An outage policy waits for no longer attempt.
        let at = now.plus_micros(patience_us).min(silent.max(now.plus_micros(retry_us)));
        flight.next = Next::Fail { at, latest: now.plus_micros(longest_us(retry_us)) };
        let request = flight.request.clone();
        context.outputs.push_back(Output::Send { lane, attempt, request });
    }

    /// An attempt came to an end: the one under way, or one that took so long that it has failed.
    pub(crate) fn answer(
        &mut self,
        attempt: u64,
        result: Result<Reply, StoreError>,
        now: Timestamp,
        context: &mut Context,
    ) {
        let Some(flight) = &self.flight else { return };
        let Some(sent) = flight.sent_at(attempt) else { return };
        let is_under_way =
            attempt == self.trips.last_attempt && matches!(flight.next, Next::Fail { .. });
        match result.and_then(|reply| check(reply, &flight.request)) {
            Ok(reply) => {
                let Some(flight) = self.flight.take() else { return };
                self.succeed(&flight, &reply, sent, now, context);
            }
            Err(error) => {
                if !matches!(error, StoreError::TimedOut(_)) {
                    self.silence.note_error(&error);
                }
                if is_under_way {
                    self.fail(error, now, context);
                }
            }
        }
    }

    /// The batch has the outcome `reply`, by an attempt that was `sent` then.
    fn succeed(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        // What this node was held up for is no part of the way.
        let sent = sent.max(self.silence.since);
        self.trips.answered(sent, context.timings.retry_us, now);
        let cloned = matches!(reply.verdict, BatchVerdict::Cloned | BatchVerdict::Stale);
        let error = cloned.then_some(StoreError::ClonedInstance);
        context.event(self.synced(flight, error, now));
        self.silence.answered = now;
        self.silence.error = None;
        self.policies.from = Timestamp::NEVER;
        if std::mem::take(&mut self.silence.failures) > 0 {
            context.event(Event::StoreUp { lane: self.number });
            self.backlog.interrupt();
            // The reply may have been kept since before the silence.
            self.silence.is_returning |= self.accounts.sums.outages > 0;
        } else if std::mem::take(&mut self.silence.is_returning) {
            self.leave_policies(flight, reply, now, context);
        }
        self.accept(flight, reply, sent, now, context);
        if self.silence.is_returning {
            self.call_at_once(now);
        }
    }

    fn synced(&self, flight: &Flight, error: Option<StoreError>, now: Timestamp) -> Event {
        let took = Duration::from_micros(now.micros_since(flight.first_sent));
        Event::Synced { lane: self.number, keys: flight.request.entries.len(), took, error }
    }

    /// The outcome of the attempt under way is unknown: the same bytes are sent again, later.
    pub(super) fn fail(&mut self, error: StoreError, now: Timestamp, context: &mut Context) {
        let Some(flight) = &self.flight else { return };
        let last_sent = flight.last_sent().unwrap_or(now);
        context.event(self.synced(flight, Some(error.clone()), now));
        self.silence.failures += 1;
        self.silence.note_error(&error);
        if self.silence.failures == 1 {
            if !self.silence.is_returning {
                let before = &mut self.silence.before;
                before.time_us = self.replies.time.map_or(0, |time| time.time_us);
                before.joined_lately = self.silence.since < self.replies.introduced;
                before.losses = self.trouble.losses;
            }
            context.event(Event::StoreDown { lane: self.number, error });
        }
        self.silence.failed_sent = last_sent;
        let resend_at = self.resend_at(last_sent, now, context);
        // Outage policies wait for one more attempt to fail.
        let silent = self.silent_for_all(context);
        let silent = if silent > now { silent } else { Timestamp::NEVER };
        if let Some(flight) = &mut self.flight {
            flight.next = Next::Resend { at: resend_at.min(silent) };
        }
        self.enter_policies(now, context);
    }

    /// When to send the batch again, after an attempt has failed.
    fn resend_at(
        &mut self,
        last_sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) -> Timestamp {
        let longest_us = self.silence.longest_gap_us(now);
        if *context.prober.get_or_insert(self.number) == self.number {
            let gap_us = context.rng.jitter(longest_us.max(PROBE_US));
            return last_sent.plus_micros(gap_us).max(now.plus_micros(1));
        }
        let retry_us = context.timings.retry_us;
        let first_us = context.rng.jitter(retry_us / 8);
        self.trips.backoff.failed(now, first_us, longest_us.max(retry_us / 4));
        let gap_us = self.trips.backoff.not_before().micros_since(now);
        now.plus_micros(context.rng.jitter(gap_us))
    }
}
