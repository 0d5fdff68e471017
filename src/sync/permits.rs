//! The permits of one concurrency limit on one node: who holds some, who waits, and what the store is told.
//!
//! A pure state machine: it has no clock, socket or task. After each call its owner drains [`Permits::poll_output`], and calls
//! [`Permits::tick`] at [`Permits::poll_timeout`] at the latest. Each [`PermitOutput::Send`] is answered once, by
//! [`Permits::answered`].
//!
//! Why no more than `max` are in use while leases hold: the store never has fewer permits down for this node than `allowed`,
//! and callers get one only while `in_use < allowed`. A message says what is in use, `allowed` is set to that as it is sent,
//! and only the reply to the last message that was sent raises it. Messages that come late or twice are ignored by their
//! number. Permits that are handed over to the store leave `in_use` in the message that says so: the store takes them over in
//! the same moment, if it has them down for this node, or they are nobody's.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::exact_outage::{ExactOutage, OutageChange};
use super::rng::Rng;
use crate::error::{AcquireError, StoreError};
use crate::limit::{OutagePolicy, PermitTerms};
use crate::time::Timestamp;

mod key;
mod message;
#[cfg(test)]
mod tests;

use key::{Caller, Flight, KeyPermits};
#[cfg(feature = "server")]
pub(crate) use message::HANDED_OVER_MAX;
pub(crate) use message::{
    CALL_MAX_US, LEASE_US, MESSAGE_NUMBERS, PermitId, PermitMessage, PermitReply, REPLY_NUMBERS,
    TimedPermit,
};

/// A lease ends here so much earlier than in the store: clocks run apart, and threads are held up.
const MARGIN_US: u64 = 30_000;
/// When permits are renewed, with jitter of an eighth.
const RENEW_US: u64 = 800_000;
const RETRY_FIRST_US: u64 = 20_000;
const RETRY_MAX_US: u64 = 500_000;
/// The most callers who wait for the store's word.
const ASKING_MAX: u32 = 10_000;

/// A key, as the store knows it.
pub(crate) type PermitKey = Arc<[u8]>;

/// What a caller asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermitAsk {
    pub(crate) cost: u32,
    /// How long it waits for its turn; `None` if it does not.
    pub(crate) within_us: Option<u64>,
}

/// What the machine wants done.
#[derive(Debug)]
pub(crate) enum PermitOutput {
    /// Tell the store.
    Send { key: PermitKey, message: PermitMessage },
    /// Tell a caller: it holds what it asked for, or why not.
    Decided { ticket: u64, key: PermitKey, cost: u32, outcome: Result<(), AcquireError> },
    /// Tell who handed over permits whether the store took them, or why not. They are not in use here any more.
    HandedOver { id: PermitId, outcome: Result<(), StoreError> },
    /// Tell of an outage.
    Outage(OutageChange),
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PermitCounts {
    /// Permits in use now.
    pub(crate) in_use: u64,
    /// Callers who wait for their turn now.
    pub(crate) waiting: u32,
    /// Callers who got none since the last time.
    pub(crate) denied: u64,
}

/// The permits of one limit.
#[derive(Debug)]
pub(crate) struct Permits {
    terms: PermitTerms,
    keys: HashMap<PermitKey, KeyPermits>,
    /// An unused key that is kept during an outage: its messages find out whether the store is back.
    probe: Option<PermitKey>,
    /// When a key has to be looked at.
    timers: BTreeSet<(Timestamp, PermitKey)>,
    outage: ExactOutage,
    /// When the last message was sent that the store has answered.
    acknowledged: Option<Timestamp>,
    /// When a message was sent or failed last, and when the first was sent of those that the store has left unanswered since it
    /// answered last. After a pause of a lease the count of unanswered messages begins anew, unless the outage policy decides. While
    /// one is unanswered, a key asks.
    tried: Timestamp,
    unanswered_from: Option<Timestamp>,
    outputs: VecDeque<PermitOutput>,
    counts: PermitCounts,
    /// Callers who wait for the store's word, and for nothing else.
    asking: u32,
    last_sequence: u64,
    last_ticket: u64,
    rng: Rng,
}

impl Permits {
    pub(crate) fn new(terms: PermitTerms, seed: u64) -> Self {
        Self {
            terms,
            keys: HashMap::new(),
            probe: None,
            timers: BTreeSet::new(),
            outage: ExactOutage::default(),
            acknowledged: None,
            tried: Timestamp::ZERO,
            unanswered_from: None,
            outputs: VecDeque::new(),
            counts: PermitCounts::default(),
            asking: 0,
            last_sequence: 0,
            last_ticket: 0,
            rng: Rng::new(seed),
        }
    }

    /// Asks for permits of `key`. The decision comes as an output under the ticket, at once or later.
    pub(crate) fn acquire(
        &mut self,
        key: &PermitKey,
        ask: PermitAsk,
        now: Timestamp,
    ) -> Result<u64, AcquireError> {
        self.validate(key, ask)?;
        let within_us = ask.within_us.unwrap_or(self.terms.max_wait_us);
        let deadline = now.plus_micros(within_us);
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let mut state = self.take(key);
        self.enter(&mut state, Caller { ticket, deadline, ask });
        self.serve(key, &mut state, now);
        if state.queue.back().is_some_and(|caller| caller.ticket == ticket) {
            if let Err(error) = self.may_stay(&state, ask, now) {
                self.leave(&mut state, ticket);
                self.counts.denied += 1;
                self.put(key, state, now);
                return Err(error);
            }
            state.has_news |= !state.is_asked_for(ask);
        }
        self.put(key, state, now);
        Ok(ticket)
    }

    fn validate(&self, key: &PermitKey, ask: PermitAsk) -> Result<(), AcquireError> {
        let (limit, &PermitTerms { max, max_keys, .. }) = (self.terms.name.clone(), &self.terms);
        if ask.cost == 0 || ask.cost > max {
            return Err(AcquireError::Cost { limit, cost: ask.cost, max });
        }
        if self.keys_in_use() >= max_keys && !self.keys.contains_key(key) {
            return Err(AcquireError::TooManyKeys { limit, max_keys });
        }
        Ok(())
    }

    /// Whether the caller who came last, and could not be served at once, may stay in the queue.
    fn may_stay(
        &self,
        state: &KeyPermits,
        ask: PermitAsk,
        now: Timestamp,
    ) -> Result<(), AcquireError> {
        let limit = self.terms.name.clone();
        let ask_from = self.outage.next_call().max(state.backoff.not_before());
        let (waiting, max_waiting) = match ask.within_us {
            Some(_) => (self.counts.waiting, self.terms.max_waiting),
            None if !self.terms.is_shared => return Err(self.denied(state.in_use)),
            None if self.outage.is_on_policy() && now < ask_from => {
                return Err(AcquireError::StoreAway { limit });
            }
            None => (self.asking, ASKING_MAX),
        };
        if waiting > max_waiting {
            return Err(AcquireError::TooManyWaiting { limit, max_waiting });
        }
        Ok(())
    }

    fn denied(&self, held_by_all: u32) -> AcquireError {
        let PermitTerms { name, max, .. } = &self.terms;
        AcquireError::Denied { limit: name.clone(), max: *max, in_use: held_by_all }
    }

    /// A caller does not wait any more. Nothing happens if it was decided about.
    pub(crate) fn cancel(&mut self, key: &PermitKey, ticket: u64, now: Timestamp) {
        if !self.keys.contains_key(key) {
            return;
        }
        let mut state = self.take(key);
        self.leave(&mut state, ticket);
        self.serve(key, &mut state, now);
        self.put(key, state, now);
    }

    /// A caller gives back what it held.
    pub(crate) fn release(&mut self, key: &PermitKey, cost: u32, now: Timestamp) {
        let mut state = self.take(key);
        state.in_use = state.in_use.saturating_sub(cost);
        self.counts.in_use = self.counts.in_use.saturating_sub(cost.into());
        state.give_back(cost, now);
        self.serve(key, &mut state, now);
        self.put(key, state, now);
    }

    /// Hands permits that a caller holds over to the store: see [`PermitOutput::HandedOver`].
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "the service asks for it"))]
    pub(crate) fn hand_over(&mut self, key: &PermitKey, timed: TimedPermit, now: Timestamp) {
        let mut state = self.take(key);
        state.to_hand_over.push(timed);
        state.has_news = true;
        self.put(key, state, now);
    }

    /// Nobody waits for the hand-over any more: the permits go back if no message has it yet. Returns whether they did.
    #[cfg_attr(not(feature = "server"), allow(dead_code, reason = "the service asks for it"))]
    pub(crate) fn cancel_hand_over(
        &mut self,
        key: &PermitKey,
        id: PermitId,
        now: Timestamp,
    ) -> bool {
        let waiting = self.keys.get_mut(key).map(|state| &mut state.to_hand_over);
        let cancelled = waiting.and_then(|all| all.extract_if(.., |one| one.id == id).next());
        if let Some(TimedPermit { permits, .. }) = cancelled {
            self.release(key, permits, now);
        }
        cancelled.is_some()
    }

    /// The store answered a message, or it did not.
    pub(crate) fn answered(
        &mut self,
        key: &PermitKey,
        sequence: u64,
        result: Result<PermitReply, StoreError>,
        now: Timestamp,
    ) {
        let mut state = self.take(key);
        let Some(flight) = state.flight.take_if(|flight| flight.message.sequence == sequence)
        else {
            return self.put(key, state, now);
        };
        match result {
            Ok(reply) => {
                self.acknowledged = self.acknowledged.max(Some(flight.sent));
                self.unanswered_from = None;
                self.note_outage(Ok(()), flight.sent, now);
                let renew_us = self.rng.jitter(RENEW_US);
                let poll_us = self.rng.jitter(reply.poll_us);
                self.handed_over(&flight, || {
                    if reply.taken_over > 0 { Ok(()) } else { Err(not_held()) }
                });
                if now < flight.leased_until() {
                    state.install(reply, &flight, now, (poll_us, renew_us));
                    self.serve_after_reply(key, &mut state, flight.last_ticket, now);
                } else {
                    // It came so late that what it gave has ended.
                    state.has_news = true;
                }
            }
            Err(error) => {
                self.tried = now;
                self.handed_over(&flight, || Err(error.clone()));
                (state.has_news, state.short_until) = (true, Timestamp::ZERO);
                state.backoff.failed(now, RETRY_FIRST_US, RETRY_MAX_US);
                self.note_failure(error, flight.sent, now);
                self.serve(key, &mut state, now);
                if self.outage.is_on_policy() {
                    self.refuse_asking(key, &mut state, flight.last_ticket);
                }
            }
        }
        self.put(key, state, now);
    }

    /// Tells how hand-overs ended.
    fn handed_over(&mut self, flight: &Flight, outcome: impl Fn() -> Result<(), StoreError>) {
        for TimedPermit { id, .. } in &flight.message.timed {
            self.outputs.push_back(PermitOutput::HandedOver { id: *id, outcome: outcome() });
        }
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self, now: Timestamp) {
        while self.poll_timeout() <= now
            && let Some((_, key)) = self.timers.pop_first()
        {
            let mut state = self.take(&key);
            self.serve(&key, &mut state, now);
            self.expire(&key, &mut state, now);
            self.put(&key, state, now);
        }
    }

    /// When [`tick`](Self::tick) is due.
    pub(crate) fn poll_timeout(&self) -> Timestamp {
        self.timers.first().map_or(Timestamp::NEVER, |(at, _)| *at)
    }

    pub(crate) fn poll_output(&mut self) -> Option<PermitOutput> {
        self.outputs.pop_front()
    }

    /// Whether nothing is held or waited for, and the store knows that.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys_in_use() == 0
    }

    /// Keys about which there is something to know: all but the probe.
    fn keys_in_use(&self) -> usize {
        self.keys.len() - usize::from(self.probe.is_some())
    }

    /// Whether no message is under way.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn is_quiet(&self) -> bool {
        self.keys.values().all(|state| state.flight.is_none())
    }

    pub(crate) fn counts(&self) -> PermitCounts {
        self.counts
    }

    pub(crate) fn take_counts(&mut self) -> PermitCounts {
        let counts = self.counts;
        self.counts.denied = 0;
        counts
    }

    /// Whether the store has been asked for as long as a lease lasts, and has answered nothing that was sent within it: what it let
    /// this node hold has ended.
    fn is_silent(&self, now: Timestamp) -> bool {
        let is_over = |at: Timestamp| now >= at.plus_micros(LEASE_US);
        self.acknowledged.is_none_or(is_over) && self.unanswered_from.is_some_and(is_over)
    }

    /// A message that was sent at `sent` came to nothing.
    fn note_failure(&mut self, error: StoreError, sent: Timestamp, now: Timestamp) {
        if matches!(error, StoreError::ForeignKey { .. }) {
            // The store answers: only this key cannot be had.
            self.unanswered_from = None;
            self.note_outage(Ok(()), sent, now);
            self.note_outage(Err(error), now, now);
        } else if self.is_silent(now) {
            self.note_outage(Err(error), sent, now);
        }
    }

    fn note_outage(&mut self, outcome: Result<(), StoreError>, began: Timestamp, now: Timestamp) {
        let Some(change) = self.outage.ended(outcome, began, now) else { return };
        // Callers who wait are now served by the policy, or the store is told of all keys.
        self.timers.clear();
        for (key, state) in &mut self.keys {
            state.backoff.succeeded();
            state.timer = now;
            self.timers.insert((now, key.clone()));
        }
        self.outputs.push_back(PermitOutput::Outage(change));
    }

    /// The most permits that may be in use on this node.
    fn allowance(&self, state: &KeyPermits, now: Timestamp) -> u32 {
        let &PermitTerms { max, share, outage, is_shared, .. } = &self.terms;
        match outage {
            _ if !is_shared => max,
            _ if now < state.leased_until => state.allowed,
            _ if !self.outage.is_on_policy() || !self.is_silent(now) => 0,
            OutagePolicy::Open => u32::MAX,
            OutagePolicy::Share => share,
            OutagePolicy::Closed | OutagePolicy::LastRate => 0,
        }
    }

    /// Gives callers what there is, in the order in which they came.
    fn serve(&mut self, key: &PermitKey, state: &mut KeyPermits, now: Timestamp) {
        let allowance = self.allowance(state, now);
        while let Some(&caller) = state.queue.front()
            && state.has_room(caller, allowance)
        {
            state.queue.pop_front();
            self.grant(key, state, caller);
        }
    }

    /// The same, and those who asked for permits that are free now are denied if there are too few.
    fn serve_after_reply(
        &mut self,
        key: &PermitKey,
        state: &mut KeyPermits,
        last_ticket: u64,
        now: Timestamp,
    ) {
        let allowance = self.allowance(state, now);
        let (mut is_blocked, mut left) = (false, VecDeque::new());
        for caller in std::mem::take(&mut state.queue) {
            if !is_blocked && state.has_room(caller, allowance) {
                self.grant(key, state, caller);
            } else if caller.ask.within_us.is_none() && caller.ticket <= last_ticket {
                self.refuse(key, caller, self.denied(state.held_by_all));
            } else {
                is_blocked = true;
                left.push_back(caller);
            }
        }
        state.queue = left;
        let mut newer = state.queue.iter().filter(|caller| caller.ticket > last_ticket);
        state.has_news = newer.any(|caller| !state.is_asked_for(caller.ask));
    }

    /// The store does not answer: callers who wait for nothing else get what the policy gave them, or nothing.
    fn refuse_asking(&mut self, key: &PermitKey, state: &mut KeyPermits, last_ticket: u64) {
        let is_over =
            |caller: &Caller| caller.ask.within_us.is_none() && caller.ticket <= last_ticket;
        let queue = std::mem::take(&mut state.queue);
        let (over, left): (VecDeque<Caller>, _) = queue.into_iter().partition(is_over);
        state.queue = left;
        for caller in over {
            let limit = self.terms.name.clone();
            self.refuse(key, caller, AcquireError::StoreAway { limit });
        }
    }

    /// Decides about callers who have waited for long enough.
    fn expire(&mut self, key: &PermitKey, state: &mut KeyPermits, now: Timestamp) {
        let is_over = |caller: &Caller| caller.deadline <= now;
        if !state.queue.iter().any(is_over) {
            return;
        }
        let asks = |caller: &Caller| is_over(caller) && caller.ask.within_us.is_none();
        if let Some(sent) = state.flight.as_ref().map(|flight| flight.sent)
            && state.queue.iter().any(asks)
            && self.is_silent(now)
        {
            let waited = Duration::from_micros(self.terms.max_wait_us);
            self.note_outage(Err(StoreError::TimedOut(waited)), sent, now);
            self.serve(key, state, now);
        }
        let queue = std::mem::take(&mut state.queue);
        let (over, left): (VecDeque<Caller>, _) = queue.into_iter().partition(is_over);
        state.queue = left;
        for caller in over {
            let PermitTerms { name, max, .. } = &self.terms;
            let (limit, max) = (name.clone(), *max);
            // Only an answer of the store shows that no permit was free.
            let is_known = !self.terms.is_shared
                || !self.outage.is_on_policy() && state.is_answered(caller, now);
            let error = match caller.ask.within_us.map(Duration::from_micros) {
                Some(within) if is_known => AcquireError::TimedOut { limit, max, within },
                _ => AcquireError::StoreAway { limit },
            };
            self.refuse(key, caller, error);
        }
        self.serve(key, state, now);
    }

    fn grant(&mut self, key: &PermitKey, state: &mut KeyPermits, caller: Caller) {
        state.in_use += caller.ask.cost;
        self.counts.in_use += u64::from(caller.ask.cost);
        self.uncount(caller);
        self.decided(key, caller, Ok(()));
    }

    fn refuse(&mut self, key: &PermitKey, caller: Caller, error: AcquireError) {
        self.counts.denied += 1;
        self.uncount(caller);
        self.decided(key, caller, Err(error));
    }

    fn decided(&mut self, key: &PermitKey, caller: Caller, outcome: Result<(), AcquireError>) {
        let (ticket, key, cost) = (caller.ticket, key.clone(), caller.ask.cost);
        self.outputs.push_back(PermitOutput::Decided { ticket, key, cost, outcome });
    }

    fn enter(&mut self, state: &mut KeyPermits, caller: Caller) {
        *self.count_of(caller) += 1;
        state.queue.push_back(caller);
    }

    fn leave(&mut self, state: &mut KeyPermits, ticket: u64) {
        if let Some(place) = state.queue.iter().position(|caller| caller.ticket == ticket)
            && let Some(caller) = state.queue.remove(place)
        {
            self.uncount(caller);
        }
    }

    fn uncount(&mut self, caller: Caller) {
        *self.count_of(caller) -= 1;
    }

    fn count_of(&mut self, caller: Caller) -> &mut u32 {
        match caller.ask.within_us {
            Some(_) => &mut self.counts.waiting,
            None => &mut self.asking,
        }
    }

    /// The state of a key, which [`put`](Self::put) takes back.
    fn take(&mut self, key: &PermitKey) -> KeyPermits {
        let state = self.keys.remove(key).unwrap_or_default();
        self.timers.remove(&(state.timer, key.clone()));
        state
    }

    /// Tells the store what is due, and keeps the key for as long as there is something to know about it. The last key stays
    /// beyond that while the store leaves messages unanswered, as the probe: else nobody would find out that it is back.
    fn put(&mut self, key: &PermitKey, mut state: KeyPermits, now: Timestamp) {
        if self.send_at(&state) <= now && self.outage.may_call(now, self.terms.max_wait_us) {
            self.send(key, &mut state, now);
        }
        let was_probe = self.probe.take_if(|probe| *probe == *key).is_some();
        let is_probe = state.is_unused() && (was_probe || !self.owes(&state, now));
        if is_probe {
            if state.flight.is_none() {
                if self.unanswered_from.is_none() || !self.keys.is_empty() {
                    return;
                }
                state.has_news = true;
            }
            self.probe = Some(key.clone());
        }
        let send_at = self.send_at(&state);
        let may_forget = state.is_unused() && state.flight.is_none() && !is_probe;
        let forget_at = if may_forget { state.known_until } else { Timestamp::NEVER };
        state.timer = state.deadline().min(send_at).min(forget_at).max(now.plus_micros(1));
        self.timers.insert((state.timer, key.clone()));
        self.keys.insert(key.clone(), state);
    }

    /// Whether the store has not answered yet, or is to be told something. A key that only owes it a message is forgotten when
    /// the store has forgotten it.
    fn owes(&self, state: &KeyPermits, now: Timestamp) -> bool {
        state.flight.is_some() || self.send_at(state) < Timestamp::NEVER && now < state.known_until
    }

    /// When the next message about a key is due.
    fn send_at(&self, state: &KeyPermits) -> Timestamp {
        let at = if self.terms.is_shared { state.send_at() } else { Timestamp::NEVER };
        at.max(self.outage.next_call())
    }

    fn send(&mut self, key: &PermitKey, state: &mut KeyPermits, now: Timestamp) {
        self.last_sequence += 1;
        // While the policy decides, messages are as rare as the longest wait of callers says.
        let is_new_row = now >= self.tried.plus_micros(LEASE_US) && !self.outage.is_on_policy();
        if self.unanswered_from.is_none() || is_new_row {
            self.unanswered_from = Some(now);
        }
        self.tried = now;
        let message = state.message(self.last_sequence, self.terms.max);
        let handed_over: u32 = message.timed.iter().map(|one| one.permits).sum();
        self.counts.in_use = self.counts.in_use.saturating_sub(handed_over.into());
        let last_ticket = state.queue.back().map_or(0, |caller| caller.ticket);
        state.flight = Some(Flight { message: message.clone(), sent: now, last_ticket });
        (state.allowed, state.has_news, state.is_in_line) = (state.in_use, false, false);
        if message.want > 0 {
            state.known_until = now.plus_micros(LEASE_US + self.terms.max_wait_us);
        }
        self.outputs.push_back(PermitOutput::Send { key: key.clone(), message });
    }
}

/// By the store's record others may have them by now, or an outage policy gave them.
fn not_held() -> StoreError {
    StoreError::Server("this process does not hold the permits by the store's record".to_owned())
}
