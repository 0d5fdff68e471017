//! One lane: its keys, the one batch in flight, and what the lane's store has told.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use super::account::{Account, Answer, CLOCK_ERROR_DIVISOR, Posted, Tally, Waiter};
use super::backoff::Backoff;
use super::engine::{Context, Desk, Output};
use super::event::Event;
use super::excess::LaneTrouble;
use super::message::{
    ENTRIES_MAX, Given, Grant, Header, Incarnation, InstanceId, Knowledge, Reply, Request, Times,
    Verdict,
};
use super::room;
use crate::bucket::BucketRef;
use crate::error::StoreError;
use crate::limit::Terms;
use crate::time::Timestamp;

/// Every lane is called at least so often, to show that this node lives.
pub(crate) const HEARTBEAT_US: u64 = 1_000_000;
/// A node that was silent for so long has gone.
const ALIVE_US: u64 = 4 * HEARTBEAT_US;
/// Between two batches of a lane there is at least this.
const BATCH_GAP_US: u64 = 1_000;
/// The longest lease that a reply may grant.
const LIFE_MAX_US: i64 = 64_000_000;
/// While the store waits for what nodes know, it is called so often.
const RECOVERY_GAP_US: u64 = 50_000;
/// A node whose own loop was held up for so long cannot tell how long the store was silent.
const HELD_UP_US: u64 = 250_000;
/// A store's clock that is further ahead than this has jumped.
const JUMP_LEAST_US: u64 = 5_000;
/// A message takes no longer than two round trips and this.
const TRAVEL_US: u64 = 10_000;
/// The gap between two attempts grows up to this part of the time that the store has been silent.
const RETRY_SILENCE_PART: u64 = 32;
/// The longest gap between two attempts, in microseconds, where a quarter of the timeout is not longer.
const RETRY_MAX_US: u64 = 1_000_000;

/// A batch that was sent and has no outcome yet.
#[derive(Debug)]
struct Flight {
    request: Arc<Request>,
    slots: Vec<usize>,
    first_sent: Timestamp,
    last_sent: Timestamp,
    /// When to send the same bytes again; `None` while an answer may still come.
    resend_at: Option<Timestamp>,
}

/// Of all accounts of a lane, each as it was when it was last changed.
#[derive(Debug, Default)]
struct Sums {
    /// Tokens pending or to be reported.
    pending: u64,
    /// Tokens leased, by depth.
    depth: i64,
    /// Accounts that live on an outage policy.
    policies: usize,
    /// Accounts that have something to tell the store before it gives what it has.
    owing: usize,
}

/// The lane's time, as a reply told it.
#[derive(Clone, Copy, Debug)]
struct LaneTime {
    time_us: i64,
    /// The batch was first sent then: the lane's time is at most this far ahead.
    sent: Timestamp,
    received: Timestamp,
}

impl LaneTime {
    /// The earliest that the lane's time can be at `now`.
    fn least(&self, now: Timestamp) -> i64 {
        self.time_us.saturating_add_unsigned(now.micros_since(self.received))
    }

    /// How much further the lane's time went on from here to `later` than this node's clock did, if that is
    /// more than clocks differ by.
    fn jump_us(&self, later: &Self) -> Option<u64> {
        let own_us = later.received.micros_since(self.sent);
        let most_us = own_us + own_us / CLOCK_ERROR_DIVISOR + JUMP_LEAST_US;
        let passed_us = later.time_us - self.time_us;
        u64::try_from(passed_us).ok().filter(|passed_us| *passed_us > most_us).map(|us| us - own_us)
    }

    /// The latest that the lane's time can be at `now`.
    fn most(&self, now: Timestamp) -> i64 {
        self.time_us.saturating_add_unsigned(now.micros_since(self.sent))
    }
}

/// When an outage policy may take over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    /// It admits from then on.
    pub(crate) from: Timestamp,
    /// All leases had ended by then.
    pub(crate) ended: Timestamp,
}

/// A lane of the store, as this node sees it.
#[derive(Debug)]
pub(crate) struct Lane {
    number: u32,
    instance: InstanceId,
    incarnation: Option<Incarnation>,
    sequence: i64,
    flight: Option<Flight>,
    accounts: Slab<Account>,
    sums: Sums,
    /// When each account wants to report or to be probed.
    due: BTreeSet<(Timestamp, usize)>,
    /// When each account's lease ends.
    ends: BTreeSet<(Timestamp, usize)>,
    /// When each account's first waiting caller has waited long enough.
    waits: BTreeSet<(Timestamp, usize)>,
    heartbeat_at: Timestamp,
    sendable_at: Timestamp,
    /// When the store answered last.
    answered: Timestamp,
    /// Since when the store has been silent, as far as this node can tell: it was held up before.
    silent_since: Timestamp,
    /// When the last attempt that failed was sent.
    failed: Timestamp,
    /// The store answers again, and is still to tell since when.
    returning: bool,
    /// When this node's loop ran last.
    ran: Timestamp,
    /// The lane's time by the last reply, and by the last one before the store was silent.
    time: Option<LaneTime>,
    heard_before_us: i64,
    /// Nodes alive by the last reply.
    nodes: i64,
    /// A silence beyond this is an outage for the store.
    silence_us: u64,
    retry: Backoff,
    failures: u32,
    /// What went wrong last, until the lane answers again.
    error: Option<StoreError>,
    /// The lane gives nothing new until then.
    recovering_until: Timestamp,
    leaving: bool,
    trouble: LaneTrouble,
    /// When the first key entered its outage policy, and the most that a key was lent, in tokens.
    entered: Timestamp,
    lent: i64,
    /// When keys without a lease are to be looked at, because the store is away.
    policies_from: Timestamp,
}

impl Lane {
    pub(crate) fn new(number: u32, instance: InstanceId, now: Timestamp) -> Self {
        Self {
            number,
            instance,
            incarnation: None,
            sequence: 0,
            flight: None,
            accounts: Slab::new(),
            sums: Sums::default(),
            due: BTreeSet::new(),
            ends: BTreeSet::new(),
            waits: BTreeSet::new(),
            heartbeat_at: now,
            sendable_at: now,
            answered: now,
            silent_since: now,
            failed: now,
            returning: false,
            ran: now,
            time: None,
            heard_before_us: 0,
            nodes: 0,
            silence_us: 0,
            retry: Backoff::default(),
            failures: 0,
            error: None,
            recovering_until: Timestamp::ZERO,
            leaving: false,
            trouble: LaneTrouble::default(),
            entered: now,
            lent: 0,
            policies_from: Timestamp::NEVER,
        }
    }

    /// Whether the lane was reached and has nothing to recover from.
    pub(crate) fn is_ready(&self, now: Timestamp) -> bool {
        self.incarnation.is_some() && self.failures == 0 && now >= self.recovering_until
    }

    /// Whether the lane has nothing left to tell the store.
    pub(crate) fn is_settled(&self) -> bool {
        let reporting = self.flight.as_ref().is_some_and(|flight| !flight.slots.is_empty());
        self.accounts.is_empty() && !reporting
    }

    pub(crate) fn error(&self) -> Option<&StoreError> {
        self.error.as_ref()
    }

    pub(crate) fn is_down(&self) -> bool {
        self.failures > 0
    }

    /// Tokens spent and not acknowledged, and tokens leased by depth, of each key as it was when it was
    /// last dealt with.
    pub(crate) fn gauges(&self) -> (u64, i64) {
        let in_flight = self.flight.as_ref().map_or(0, |flight| flight.request.tokens());
        (in_flight + self.sums.pending, self.sums.depth)
    }

    /// Tokens spent and not acknowledged, to the last one.
    #[cfg(feature = "sim")]
    pub(crate) fn pending(&self) -> u64 {
        let in_flight = self.flight.as_ref().map_or(0, |flight| flight.request.tokens());
        in_flight + self.accounts.iter().map(|(_, account)| account.pending()).sum::<u64>()
    }

    /// The depth of the lease that the account has at `now`.
    #[cfg(feature = "sim")]
    pub(crate) fn leased_depth(&self, slot: usize, now: Timestamp) -> Option<i64> {
        let account = self.accounts.get(slot)?;
        account.lease_ends().is_some_and(|ends| now < ends).then(|| account.leased_depth())
    }

    /// What went wrong in the lane; an outage counts when it is over and it is known whose it was.
    pub(crate) fn trouble(&self) -> LaneTrouble {
        self.trouble
    }

    /// From when on the outage policy of a key with these terms may admit: the store takes the silence
    /// for an outage by then, and every lease of the key has ended, whoever held it. `None` while the
    /// store answers.
    fn policy_from(&self, terms: &Terms, context: &Context) -> Option<Outage> {
        if self.failures == 0 {
            return None;
        }
        let Some(time) = self.time.filter(|_| self.incarnation.is_some()) else {
            return Some(Outage { from: self.silent_since, ended: self.silent_since });
        };
        let since = self.silent_since;
        // The last batch that the store has applied reached it soon after.
        let travelled_us = 2 * time.received.micros_since(time.sent) + TRAVEL_US;
        let last_us = time.most(since).saturating_add_unsigned(travelled_us.min(context.retry_us));
        let epoch_us = terms.epoch_us as i64;
        let ends_us = (last_us / epoch_us + 2).saturating_mul(epoch_us);
        let ends_in_us = (ends_us - time.least(since)).max(0) as u64;
        let ended = since.plus_micros(ends_in_us + ends_in_us / CLOCK_ERROR_DIVISOR);
        let silent = self.silent_for_all(context);
        let from = ended.max(silent).max(since.plus_micros(terms.grace_us));
        Some(Outage { from: if self.failed < silent { Timestamp::NEVER } else { from }, ended })
    }

    /// When an attempt fails that is sent then, the store takes the silence for an outage too.
    fn silent_for_all(&self, context: &Context) -> Timestamp {
        let silence_us = self.silence_us.max(context.silence_us);
        self.silent_since.plus_micros(silence_us + context.retry_us)
    }

    // ---- inputs ------------------------------------------------------------------------------

    /// A decision has told of a key.
    pub(crate) fn touch(
        &mut self,
        slot: usize,
        spilled: u32,
        refused: u32,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        self.rescheduled(slot, |account| {
            account.spilled(spilled);
            account.heard_of(refused);
            account.touch(now, &terms);
        });
        self.enter_policy_if_cut_off(slot, now, context);
    }

    /// The terms by which the key is kept.
    fn terms(&self, slot: usize, context: &Context) -> Terms {
        let account = &self.accounts[slot];
        account.terms(&context.limits[account.limit() as usize].terms)
    }

    /// Opens the books on a key; returns their place.
    pub(crate) fn open(
        &mut self,
        bucket: BucketRef,
        key: Arc<[u8]>,
        now: Timestamp,
        context: &mut Context,
    ) -> usize {
        let terms = &context.limits[bucket.limit() as usize].terms;
        let place = self.accounts.vacant_entry();
        let slot = place.key();
        let desk = context.desks.insert(Desk { lane: self.number, slot }) as u32;
        bucket.open_books(desk);
        place.insert(Account::new(bucket, key, desk, terms, now));
        slot
    }

    /// A key without a lease lives on its outage policy while the store is away.
    fn enter_policy_if_cut_off(&mut self, slot: usize, now: Timestamp, context: &mut Context) {
        let account = &self.accounts[slot];
        if self.failures == 0 || account.lease_ends().is_some() || account.in_policy() {
            return;
        }
        let terms = self.terms(slot, context);
        if let Some(outage) = self.policy_from(&terms, context).filter(|outage| outage.from <= now)
        {
            self.enter_policy(slot, now, outage.ended, context);
        }
    }

    /// A caller waits for the store's word on a request.
    pub(crate) fn wait(
        &mut self,
        slot: usize,
        waiter: Waiter,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        self.rescheduled(slot, |account| account.wait(waiter, now, &terms));
        self.enter_policy_if_cut_off(slot, now, context);
        self.tell(slot, context);
    }

    /// Time has passed.
    pub(crate) fn advance(&mut self, now: Timestamp, context: &mut Context) {
        if self.flight.is_some() && now.micros_since(self.ran) > HELD_UP_US {
            self.silent_since = now;
        }
        self.ran = now;
        while let Some(&(at, slot)) = self.ends.first() {
            if at > now {
                break;
            }
            self.lease_ended(slot, now, context);
        }
        while let Some(&(at, slot)) = self.waits.first() {
            if at > now {
                break;
            }
            let terms = self.terms(slot, context);
            self.rescheduled(slot, |account| account.give_up(now, &terms));
            self.tell(slot, context);
        }
        self.enter_policies(now, context);
        match &mut self.flight {
            Some(flight) => {
                if flight.resend_at.is_some_and(|at| at <= now) {
                    (flight.resend_at, flight.last_sent) = (None, now);
                    let request = flight.request.clone();
                    context.outputs.push_back(Output::Send { lane: self.number, request });
                }
            }
            None => self.send(now, context),
        }
    }

    /// When [`advance`](Self::advance) has something to do next.
    pub(crate) fn timeout(&self) -> Timestamp {
        let first = |set: &BTreeSet<(Timestamp, usize)>| {
            set.first().map_or(Timestamp::NEVER, |&(at, _)| at)
        };
        let next = if let Some(flight) = &self.flight {
            // So that it is seen when this node's loop is held up meanwhile.
            flight.resend_at.unwrap_or(Timestamp::NEVER).min(self.ran.plus_micros(HELD_UP_US / 2))
        } else {
            first(&self.due).min(self.heartbeat_at).max(self.sendable_at)
        };
        next.min(first(&self.ends)).min(first(&self.waits)).min(self.policies_from)
    }

    /// Tokens in the batch with this sequence, if it is in flight.
    #[cfg(feature = "sim")]
    pub(crate) fn in_flight(&self, sequence: i64) -> u64 {
        let flight = self.flight.as_ref().filter(|flight| flight.request.sequence == sequence);
        flight.map_or(0, |flight| flight.request.tokens())
    }

    /// The store is to be called at once, if it is not being called.
    pub(crate) fn call_soon(&mut self, now: Timestamp) {
        self.heartbeat_at = self.heartbeat_at.min(now);
    }

    /// Books the decisions of keys that live on outage policies: no report does it for them.
    pub(crate) fn count_policies(&mut self, now: Timestamp, context: &mut Context) {
        if self.sums.policies == 0 {
            return;
        }
        let by_policy = self.accounts.iter().filter(|(_, account)| account.in_policy());
        for slot in by_policy.map(|(slot, _)| slot).collect::<Vec<_>>() {
            self.rescheduled(slot, |account| account.count(now));
            self.tally(slot, context);
        }
    }

    /// The node is leaving: everything is given back.
    pub(crate) fn leave(&mut self, now: Timestamp) {
        self.leaving = true;
        let slots: Vec<usize> = self.accounts.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.rescheduled(slot, |account| account.due = now);
        }
        self.sendable_at = now;
    }

    /// An exchange came to an end.
    pub(crate) fn answer(
        &mut self,
        sequence: i64,
        result: Result<Reply, StoreError>,
        now: Timestamp,
        context: &mut Context,
    ) {
        let Some(flight) = self.flight.take() else { return };
        if flight.request.sequence != sequence {
            self.flight = Some(flight);
            return;
        }
        let keys = flight.slots.len();
        let took = Duration::from_micros(now.micros_since(flight.first_sent));
        let lane = self.number;
        match result.and_then(|reply| check(reply, &flight.request)) {
            Ok(reply) => {
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
                    self.returning = true;
                } else if std::mem::take(&mut self.returning) {
                    self.leave_policies(&flight, &reply, now, context);
                }
                self.accept(&flight, &reply, now, context);
                if self.returning {
                    (self.heartbeat_at, self.sendable_at) = (now, now);
                }
            }
            Err(error) => {
                context.event(Event::Synced { lane, keys, took, error: Some(error.clone()) });
                self.fail(flight, error, now, context);
            }
        }
    }

    // ---- sending -----------------------------------------------------------------------------

    fn send(&mut self, now: Timestamp, context: &mut Context) {
        if now < self.sendable_at {
            return;
        }
        let mut entries = Vec::new();
        let mut slots = Vec::new();
        while let Some(&(at, slot)) = self.due.first() {
            if at > now || entries.len() == ENTRIES_MAX || self.returning {
                break;
            }
            if self.reports(slot, now, context) {
                let terms = self.terms(slot, context);
                let limit = &mut context.limits[self.accounts[slot].limit() as usize];
                let leaving = self.leaving;
                entries.push(self.rescheduled(slot, |account| {
                    account.reporting = true;
                    let entry = account.report(&limit.name, &terms, now, leaving);
                    account.keep_pace(now, &limit.terms, &mut limit.paces);
                    entry
                }));
                self.tally(slot, context);
                slots.push(slot);
            }
        }
        if entries.is_empty() && now < self.heartbeat_at {
            return;
        }
        self.sequence += 1;
        let told = slots.iter().filter(|slot| self.accounts[**slot].is_owing()).count();
        let knowledge = Knowledge {
            known_us: self.time.map_or(0, |time| time.time_us),
            sent_us: self.time.map_or(0, |time| time.least(now)),
            nodes: self.nodes,
            settled: self.sums.owing == told,
            leaving: self.leaving && self.accounts.len() == slots.len(),
        };
        let header = Header {
            lane: self.number,
            lanes: context.lanes,
            instance: self.instance,
            incarnation: self.incarnation,
            sequence: self.sequence,
            times: Times {
                recovery_us: context.recovery_us as i64,
                lease_us: context.lease_us as i64,
                silence_us: context.silence_us as i64,
                alive_us: ALIVE_US.max(2 * context.silence_us) as i64,
            },
            knowledge,
        };
        let request = Arc::new(Request::new(header, entries));
        self.flight = Some(Flight {
            request: request.clone(),
            slots,
            first_sent: now,
            last_sent: now,
            resend_at: None,
        });
        self.silent_since = now;
        self.sendable_at = now.plus_micros(BATCH_GAP_US);
        self.heartbeat_at = now.plus_micros(context.rng.jitter(HEARTBEAT_US));
        context.outputs.push_back(Output::Send { lane: self.number, request });
    }

    /// Whether the account at the head of the queue reports now; if not, it was put elsewhere.
    fn reports(&mut self, slot: usize, now: Timestamp, context: &mut Context) -> bool {
        let terms = self.terms(slot, context);
        if self.accounts[slot].due > now {
            self.rescheduled(slot, |account| account.probe(now, &terms));
            if self.accounts[slot].due > now {
                return false;
            }
        } else if self.accounts[slot].try_close(now, &terms) {
            self.close(slot, context);
            return false;
        }
        let account = &self.accounts[slot];
        let pressing = self.leaving || account.is_pressing();
        let limit = &mut context.limits[account.limit() as usize];
        let admitted = limit.paces.admit(pressing, now, &terms);
        if !admitted {
            self.rescheduled(slot, |account| account.put_off(now));
        }
        admitted
    }

    fn close(&mut self, slot: usize, context: &mut Context) {
        self.post(slot, Posted::default());
        let mut account = self.accounts.remove(slot);
        account.lose_pace(&mut context.limits[account.limit() as usize].paces);
        context.desks.remove(account.desk as usize);
        room::give_back(&mut self.accounts);
        room::give_back(&mut context.desks);
    }

    /// Changes an account and keeps queues and sums in step with it.
    fn rescheduled<T>(&mut self, slot: usize, change: impl FnOnce(&mut Account) -> T) -> T {
        let result = change(&mut self.accounts[slot]);
        let account = &self.accounts[slot];
        let due = account.due.min(account.probe_at());
        let posted = Posted {
            due: if account.reporting { Timestamp::NEVER } else { due },
            ends: account.lease_ends().unwrap_or(Timestamp::NEVER),
            waits: account.waits_until().unwrap_or(Timestamp::NEVER),
            pending: account.pending(),
            depth: account.leased_depth(),
            policy: account.in_policy(),
            owing: account.is_owing(),
        };
        self.post(slot, posted);
        result
    }

    /// Puts an account into queues and sums in place of what they have of it.
    fn post(&mut self, slot: usize, new: Posted) {
        let old = std::mem::replace(&mut self.accounts[slot].posted, new);
        for (queue, old, new) in [
            (&mut self.due, old.due, new.due),
            (&mut self.ends, old.ends, new.ends),
            (&mut self.waits, old.waits, new.waits),
        ] {
            if old != new {
                queue.remove(&(old, slot));
                if new < Timestamp::NEVER {
                    queue.insert((new, slot));
                }
            }
        }
        self.sums.pending = self.sums.pending - old.pending + new.pending;
        self.sums.depth += new.depth - old.depth;
        self.sums.policies = self.sums.policies - usize::from(old.policy) + usize::from(new.policy);
        self.sums.owing = self.sums.owing - usize::from(old.owing) + usize::from(new.owing);
    }

    /// Tells the callers who have waited what was decided.
    fn tell(&mut self, slot: usize, context: &mut Context) {
        for Answer { ticket, allowed, sure } in self.accounts[slot].take_answers() {
            context.outputs.push_back(Output::Decided { ticket, allowed, sure });
        }
    }

    // ---- outcomes ----------------------------------------------------------------------------

    /// The outcome is unknown: the same bytes are sent again, later.
    fn fail(
        &mut self,
        mut flight: Flight,
        error: StoreError,
        now: Timestamp,
        context: &mut Context,
    ) {
        self.failures += 1;
        self.error = Some(error.clone());
        if self.failures == 1 {
            if !self.returning {
                self.heard_before_us = self.time.map_or(0, |time| time.time_us);
            }
            context.event(Event::StoreDown { lane: self.number, error });
        }
        let first_us = context.rng.jitter(context.retry_us / 8);
        let silent_us = now.micros_since(self.answered);
        let most_us = (silent_us / RETRY_SILENCE_PART).min(RETRY_MAX_US).max(context.retry_us / 4);
        self.retry.failed(now, first_us, most_us);
        self.failed = flight.last_sent;
        let gap_us = self.retry.not_before().micros_since(now);
        let resend_at = now.plus_micros(context.rng.jitter(gap_us));
        // Outage policies wait for one more attempt to fail.
        let silent = self.silent_for_all(context);
        let silent = if silent > now { silent } else { Timestamp::NEVER };
        flight.resend_at = Some(resend_at.min(silent));
        self.flight = Some(flight);
        self.enter_policies(now, context);
    }

    /// Keys without a lease have nothing to live on: their outage policy takes over once the lane is
    /// cut off.
    fn enter_policies(&mut self, now: Timestamp, context: &mut Context) {
        self.policies_from = Timestamp::NEVER;
        if self.failures == 0 {
            return;
        }
        let outages: Vec<Option<Outage>> =
            context.limits.iter().map(|limit| self.policy_from(&limit.terms, context)).collect();
        let waiting = |from: &Timestamp| *from > now;
        // Never, for those that wait for an attempt to fail.
        let later = outages.iter().flatten().map(|outage| outage.from).filter(waiting).min();
        self.policies_from = later.unwrap_or(Timestamp::NEVER);
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
            self.enter_policy(slot, now, outage.ended, context);
        }
    }

    /// The store answers again: what policies took is to be reported.
    fn leave_policies(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        now: Timestamp,
        context: &mut Context,
    ) {
        let since_us = reply.recovering_since_us;
        let all_silent = since_us > self.heard_before_us;
        let back_us = (reply.time_us - since_us).max(0) as u64;
        let back = all_silent.then(|| flight.first_sent.minus_micros(back_us));
        if self.sums.policies > 0 {
            self.trouble.lived_through(now.micros_since(self.entered), self.lent, all_silent);
        }
        let by_policy = self.accounts.iter().filter(|(_, account)| account.in_policy());
        for slot in by_policy.map(|(slot, _)| slot).collect::<Vec<_>>() {
            let terms = self.terms(slot, context);
            self.rescheduled(slot, |account| account.return_from_policy(now, back, &terms));
            self.tally(slot, context);
        }
    }

    fn accept(&mut self, flight: &Flight, reply: &Reply, now: Timestamp, context: &mut Context) {
        for slot in &flight.slots {
            self.accounts[*slot].reporting = false;
        }
        let wait_us = (reply.recovering_until_us - reply.time_us).max(0) as u64;
        self.recovering_until = now.plus_micros(wait_us);
        if matches!(reply.verdict, Verdict::Applied(_) | Verdict::Reborn) {
            let (time_us, sent) = (reply.time_us, flight.first_sent);
            let time = LaneTime { time_us, sent, received: now };
            if let Some(jump_us) = self.time.and_then(|before| before.jump_us(&time)) {
                self.trouble.store_jumped(jump_us);
                context.event(Event::StoreClockJumped {
                    lane: self.number,
                    by: Duration::from_micros(jump_us),
                });
            }
            self.time = Some(time);
            self.silence_us = reply.silence_us as u64;
        }
        if wait_us > 0 {
            self.heartbeat_at = self.heartbeat_at.min(now.plus_micros(RECOVERY_GAP_US));
        }
        match &reply.verdict {
            Verdict::Applied(grants) => {
                self.incarnation = Some(reply.incarnation);
                self.nodes = reply.nodes;
                // A lane that waits for its nodes has not counted all of them.
                if wait_us == 0 || context.nodes().is_none() {
                    context.counted(self.number, reply.nodes.max(1));
                }
                for (index, grant) in grants.iter().enumerate() {
                    self.granted(flight, index, grant, now, context);
                }
            }
            Verdict::Reborn => {
                context.event(Event::MemoryLost { lane: self.number });
                context.losses += 1;
                self.trouble.losses += 1;
                self.restart(Some(reply.incarnation), flight, now);
            }
            Verdict::Cloned | Verdict::Stale => {
                self.instance = context.draw_instance();
                self.restart(self.incarnation, flight, now);
            }
            // Both were turned into errors by `check`.
            Verdict::Lanes(_) | Verdict::Wire(_) => {}
        }
    }

    fn granted(
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
                context.agreed(self.accounts[slot].limit(), given.level);
                if given.lost {
                    let limit = context.limit_name(self.accounts[slot].limit());
                    context.event(Event::RecordLost { limit });
                }
                let lost = self.accounts[slot].lose_record(given.lost);
                self.trouble.lost_records = self.trouble.lost_records.max(lost);
                if self.accounts[slot].in_policy() && !self.returning {
                    // The store takes the key's quota again.
                    self.rescheduled(slot, |account| account.return_from_policy(now, None, &terms));
                }
                let recovering_until = self.recovering_until;
                let nodes = context.nodes().unwrap_or(1).max(1);
                let installed = self.rescheduled(slot, |account| {
                    account.nodes = nodes;
                    let sent = flight.first_sent;
                    let installed = account.install(given, entry, sent, now, &terms);
                    if given.withheld {
                        account.due = account.due.min(recovering_until);
                    }
                    if leaving {
                        account.due = now;
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
            Grant::OtherQuota { .. } | Grant::Foreign => {
                if self.accounts[slot].is_to_be_named(now) {
                    context.refused(self.accounts[slot].limit(), entry, grant);
                }
                self.rescheduled(slot, |account| {
                    account.revoke(entry);
                    account.due = now.plus_micros(HEARTBEAT_US);
                });
                if !self.accounts[slot].in_policy() {
                    self.enter_policy(slot, now, now, context);
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
    fn restart(&mut self, incarnation: Option<Incarnation>, flight: &Flight, now: Timestamp) {
        self.incarnation = incarnation;
        self.sequence = 0;
        for (slot, entry) in flight.slots.iter().zip(&flight.request.entries) {
            self.accounts[*slot].revoke(entry);
        }
        let slots: Vec<usize> = self.accounts.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.rescheduled(slot, |account| {
                account.restore = true;
                account.due = now;
            });
        }
        self.sendable_at = now;
        self.heartbeat_at = now;
    }

    // ---- outages -----------------------------------------------------------------------------

    fn lease_ended(&mut self, slot: usize, now: Timestamp, context: &mut Context) {
        self.rescheduled(slot, |account| {
            account.lease_ended(now);
            account.forget_end();
        });
        self.tally(slot, context);
        self.enter_policy_if_cut_off(slot, now, context);
    }

    /// Puts the outage policy of a key in force, whose leases had all ended by `ended`.
    fn enter_policy(
        &mut self,
        slot: usize,
        now: Timestamp,
        ended: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        let nodes = context.nodes();
        if self.sums.policies == 0 {
            (self.entered, self.lent) = (now, 0);
        }
        let lent =
            self.rescheduled(slot, |account| account.enter_policy(now, ended, &terms, nodes));
        self.lent = self.lent.max(lent);
        self.tell(slot, context);
        context
            .event(Event::OutagePolicy { limit: context.limit_name(self.accounts[slot].limit()) });
        self.tally(slot, context);
    }

    fn tally(&mut self, slot: usize, context: &mut Context) {
        let account = &mut self.accounts[slot];
        let tally = account.take_tally();
        if tally != Tally::default() {
            context.limits[account.limit() as usize].tally.merge(tally);
        }
    }
}

/// Refuses replies that no store of this protocol would give to `request`.
fn check(reply: Reply, request: &Request) -> Result<Reply, StoreError> {
    match &reply.verdict {
        Verdict::Lanes(stored) => {
            Err(StoreError::Lanes { configured: request.lanes, stored: *stored })
        }
        Verdict::Wire(stored) => {
            Err(StoreError::Wire { spoken: super::message::WIRE_VERSION, stored: *stored })
        }
        Verdict::Applied(grants) if grants.len() != request.entries.len() => {
            Err(StoreError::Reply { field: "grants", value: grants.len().to_string() })
        }
        Verdict::Applied(grants) => {
            for (grant, entry) in grants.iter().zip(&request.entries) {
                if let Grant::Given(given) = grant {
                    let burst = entry.scale.burst / entry.scale.token;
                    plausible(given, entry.needed + entry.want, entry.scale.rate, burst)?;
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
