//! The batch in flight: what goes into it, attempts at it, their answers, and when the next one follows.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Lane;
use super::grants::check;
use crate::error::StoreError;
use crate::sync::engine::{Context, Output};
use crate::sync::event::Event;
use crate::sync::message::{ENTRIES_MAX, Reply, Request, Verdict};
use crate::time::Timestamp;

/// The gap between two attempts grows up to this part of the time that the store has been silent.
const RETRY_SILENCE_PART: u64 = 32;
/// While the store is away one lane asks for all whether it is back: so often at first, in microseconds.
const PROBE_US: u64 = 20_000;
/// The longest gap between two attempts, in microseconds, where a quarter of the timeout is not longer.
const RETRY_MAX_US: u64 = 1_000_000;
/// A busy store is waited for twice as long as it took of late, and up to so many timeouts.
const PATIENCE_MAX: u64 = 10;
/// So many attempts at one batch may still be answered.
const ATTEMPTS_MAX: usize = 16;

/// A batch that was sent and has no outcome yet.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: Arc<Request>,
    pub(super) slots: Vec<usize>,
    pub(super) first_sent: Timestamp,
    /// The number of each attempt, and when it was sent; the last one last.
    pub(super) attempts: VecDeque<(u64, Timestamp)>,
    pub(super) next: Next,
}

/// What becomes of a batch that is not answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next {
    /// The attempt under way has failed then, or at the `latest` where this node looks too late.
    Fail { at: Timestamp, latest: Timestamp },
    /// The attempt has failed: the same bytes are sent again then.
    Resend { at: Timestamp },
}

impl Next {
    pub(super) fn at(self) -> Timestamp {
        match self {
            Self::Fail { at, .. } | Self::Resend { at } => at,
        }
    }
}

impl Lane {
    /// The account that reports next in a batch that has `entries`, of which so many are of `newcomers`. Keys that the
    /// node knows go first. Newcomers have a quarter of a batch: with more the others would wait for longer.
    pub(super) fn next_due(
        &self,
        entries: usize,
        newcomers: usize,
        now: Timestamp,
    ) -> Option<usize> {
        const NEWCOMERS: usize = ENTRIES_MAX / 4;
        if entries == ENTRIES_MAX || self.returning {
            return None;
        }
        let first = |set: &BTreeSet<(Timestamp, usize)>| {
            set.first().filter(|&&(at, _)| at <= now).map(|&(_, slot)| slot)
        };
        let known = first(&self.due);
        let newcomer =
            if newcomers < NEWCOMERS || self.leaving { first(&self.newcomers_due) } else { None };
        if entries < ENTRIES_MAX - NEWCOMERS { known.or(newcomer) } else { newcomer.or(known) }
    }

    /// The store has answered another lane: this one asks again at once, if it waits.
    pub(crate) fn retry_now(&mut self, now: Timestamp, context: &mut Context) {
        if self.failures > 0 && self.flight.is_some() {
            self.attempt(now, context);
        }
    }

    /// An attempt came to an end: the one under way, or one that took so long that it has failed.
    pub(crate) fn answer(
        &mut self,
        attempt: u64,
        result: Result<Reply, StoreError>,
        now: Timestamp,
        context: &mut Context,
    ) {
        let sent_at = |(number, at): &(u64, Timestamp)| (*number == attempt).then_some(*at);
        let Some(flight) = &self.flight else { return };
        let Some(sent) = flight.attempts.iter().find_map(sent_at) else { return };
        let result = result.and_then(|reply| check(reply, &flight.request));
        if let Err(error) = &result
            && !matches!(error, StoreError::TimedOut(_))
        {
            // That says more than that nothing came in time.
            self.error = Some(error.clone());
        }
        if result.is_err()
            && (attempt != self.attempt || matches!(flight.next, Next::Resend { .. }))
        {
            return;
        }
        match result {
            Ok(reply) => {
                let Some(flight) = self.flight.take() else { return };
                let (lane, keys) = (self.number, flight.slots.len());
                let took = Duration::from_micros(now.micros_since(flight.first_sent));
                // What this node was held up for is no part of the way.
                let sent = sent.max(self.silent_since);
                let took_us = now.micros_since(sent).min(PATIENCE_MAX * context.retry_us);
                self.round_trip_us = took_us.max(self.round_trip_us / 2);
                self.quickest_us = took_us.min(std::mem::replace(&mut self.last_took_us, took_us));
                let cloned = matches!(reply.verdict, Verdict::Cloned | Verdict::Stale);
                let error = cloned.then_some(StoreError::ClonedInstance);
                context.event(Event::Synced { lane, keys, took, error });
                self.answered = now;
                self.retry.succeeded();
                self.error = None;
                self.policies_from = Timestamp::NEVER;
                if std::mem::take(&mut self.failures) > 0 {
                    context.event(Event::StoreUp { lane });
                    // The reply may have been kept since before the silence.
                    self.returning |= self.sums.outages > 0;
                } else if std::mem::take(&mut self.returning) {
                    self.leave_policies(&flight, &reply, now, context);
                }
                self.accept(&flight, &reply, sent, now, context);
                if self.returning {
                    (self.heartbeat_at, self.sendable_at) = (now, now);
                }
            }
            Err(error) => self.fail(error, now, context),
        }
    }

    /// Sends the batch in flight, for the first time or again.
    pub(super) fn attempt(&mut self, now: Timestamp, context: &mut Context) {
        let silent = self.silent_for_all(context);
        let Some(flight) = &mut self.flight else { return };
        self.attempt += 1;
        let probes = context.prober == Some(self.number);
        let least_us = if probes { PROBE_US.min(context.retry_us) } else { context.retry_us };
        let longest_us = PATIENCE_MAX * context.retry_us;
        let patience_us = (2 * self.round_trip_us).clamp(least_us, longest_us);
        if flight.attempts.len() == ATTEMPTS_MAX {
            flight.attempts.pop_front();
        }
        flight.attempts.push_back((self.attempt, now));
        // An outage policy waits for no longer attempt.
        let at = now.plus_micros(patience_us).min(silent.max(now.plus_micros(context.retry_us)));
        let latest = now.plus_micros(longest_us);
        flight.next = Next::Fail { at, latest };
        let (lane, attempt, request) = (self.number, self.attempt, flight.request.clone());
        context.outputs.push_back(Output::Send { lane, attempt, request });
    }

    /// The outcome of the attempt under way is unknown: the same bytes are sent again, later.
    pub(super) fn fail(&mut self, error: StoreError, now: Timestamp, context: &mut Context) {
        let Some(flight) = &self.flight else { return };
        let (lane, keys) = (self.number, flight.slots.len());
        let took = Duration::from_micros(now.micros_since(flight.first_sent));
        let last_sent = flight.attempts.back().map_or(now, |(_, sent)| *sent);
        context.event(Event::Synced { lane, keys, took, error: Some(error.clone()) });
        self.failures += 1;
        if self.error.is_none() || !matches!(error, StoreError::TimedOut(_)) {
            self.error = Some(error.clone());
        }
        if self.failures == 1 {
            if !self.returning {
                self.heard_before_us = self.time.map_or(0, |time| time.time_us);
                self.joined_lately = self.silent_since < self.introduced;
                self.losses_before = self.trouble.losses;
            }
            context.event(Event::StoreDown { lane: self.number, error });
        }
        self.failed = last_sent;
        let longest_us = (now.micros_since(self.answered) / RETRY_SILENCE_PART).min(RETRY_MAX_US);
        let resend_at = if *context.prober.get_or_insert(self.number) == self.number {
            let gap_us = context.rng.jitter(longest_us.max(PROBE_US));
            last_sent.plus_micros(gap_us).max(now.plus_micros(1))
        } else {
            let first_us = context.rng.jitter(context.retry_us / 8);
            self.retry.failed(now, first_us, longest_us.max(context.retry_us / 4));
            let gap_us = self.retry.not_before().micros_since(now);
            now.plus_micros(context.rng.jitter(gap_us))
        };
        // Outage policies wait for one more attempt to fail.
        let silent = self.silent_for_all(context);
        let silent = if silent > now { silent } else { Timestamp::NEVER };
        if let Some(flight) = &mut self.flight {
            flight.next = Next::Resend { at: resend_at.min(silent) };
        }
        self.enter_policies(now, context);
    }
}
