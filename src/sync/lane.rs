//! One lane: its keys, the one batch in flight, and what the lane's store has told.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use super::account::{Account, Agenda, Answer, Cluster, DecisionCounts, Waiter};
use super::backoff::Backoff;
use super::engine::{AccountId, Context, Output};
use super::event::Event;
use super::excess::LaneTrouble;
#[cfg(feature = "sim")]
use super::message::Held;
use super::message::{Header, Incarnation, InstanceId, Knowledge, Reply, Request, Times, Verdict};
use super::nodes::INTRODUCED_US;
use super::shrink;
use crate::bucket::BucketRef;
use crate::error::StoreError;
use crate::limit::Terms;
use crate::time::Timestamp;

mod flight;
mod grants;
mod silence;

use flight::{Flight, Next};
use grants::LIFE_MAX_US;
use silence::LaneTime;

/// Every lane is called at least so often, to show that this node lives.
pub(crate) const HEARTBEAT_US: u64 = 1_000_000;
/// A node that was silent for so long has gone.
const ALIVE_US: u64 = 4 * HEARTBEAT_US;
/// The nodes that have a limit are counted in this lane only: a node names its limits there, so many in a batch at
/// most, in one batch after the other until all are named. It begins again after so long for each of these batches.
pub(super) const NAMING_LANE: u32 = 0;
const LIMITS_NAMED_MAX: usize = 16;
const NAMING_GAP_US: u64 = 500_000;
/// The same while a count has not stood yet, and where the number of nodes has changed.
const NAMING_GAP_SHORT_US: u64 = 100_000;
/// Between two batches of a lane there is at least this.
const BATCH_GAP_US: u64 = 1_000;
/// While the store waits for what nodes know, it is called so often at first, and at last.
const RECOVERY_GAP_US: u64 = 25_000;
const RECOVERY_GAP_MAX_US: u64 = 400_000;
/// A node whose own loop was held up for so long cannot tell how long the store was silent.
const HELD_UP_US: u64 = 250_000;
/// An attempt whose time was over for so long before this node looked is waited for as long again: its
/// answer may be there.
const LATE_US: u64 = 10_000;

/// Of all accounts of a lane, each as it was when it was last changed.
#[derive(Debug, Default)]
struct Sums {
    /// Tokens pending or to be reported.
    pending: u64,
    /// Tokens leased, by depth.
    depth: i64,
    /// Accounts that live on an outage policy.
    policies: usize,
    /// Of these, accounts that do because the store is away.
    outages: usize,
    /// Accounts that have something to tell the store before it gives what it has.
    owing: usize,
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
    /// The same of keys of which the store has told nothing yet, and for whose word nobody waits.
    newcomers_due: BTreeSet<(Timestamp, usize)>,
    /// When each account's lease ends.
    ends: BTreeSet<(Timestamp, usize)>,
    /// When each account's first waiting caller has waited long enough.
    waits: BTreeSet<(Timestamp, usize)>,
    heartbeat_at: Timestamp,
    sendable_at: Timestamp,
    /// How many of the shared limits have been named in this pass, and when the next pass may begin.
    limits_named: usize,
    names_at: Timestamp,
    /// When all had been named last.
    named: Timestamp,
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
    /// When all other nodes count this one; and whether they did not when the store fell silent.
    introduced: Timestamp,
    joined_lately: bool,
    /// Losses of memory before the store was silent.
    losses_before: u32,
    /// Nodes alive by the last reply.
    nodes: i64,
    /// A silence beyond this is an outage for the store.
    silence_us: u64,
    retry: Backoff,
    /// The number of the last attempt.
    attempt: u64,
    /// How long the store took to answer an attempt of late, in microseconds.
    round_trip_us: u64,
    /// The quicker one of the last two answers, in microseconds. One that is slow, such as the first one, which
    /// has to connect, says little of the next.
    quickest_us: u64,
    last_took_us: u64,
    failures: u32,
    /// What went wrong last, until the lane answers again.
    error: Option<StoreError>,
    /// The gap before the next call while the lane waits for nodes.
    recovery_gap_us: u64,
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
            newcomers_due: BTreeSet::new(),
            ends: BTreeSet::new(),
            waits: BTreeSet::new(),
            heartbeat_at: now,
            sendable_at: now,
            limits_named: 0,
            names_at: now,
            named: now,
            answered: now,
            silent_since: now,
            failed: now,
            returning: false,
            ran: now,
            time: None,
            heard_before_us: 0,
            introduced: Timestamp::NEVER,
            joined_lately: false,
            losses_before: 0,
            nodes: 0,
            silence_us: 0,
            retry: Backoff::default(),
            attempt: 0,
            round_trip_us: 0,
            quickest_us: 0,
            last_took_us: 0,
            failures: 0,
            error: None,
            recovery_gap_us: 0,
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

    /// Whether keys live on outage policies.
    pub(crate) fn has_policies(&self) -> bool {
        self.sums.policies > 0
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

    /// The lease that the account has at `now`.
    #[cfg(feature = "sim")]
    pub(crate) fn lease(&self, slot: usize, now: Timestamp) -> Option<Held> {
        let account = self.accounts.get(slot)?;
        account.lease_ends().is_some_and(|ends| now < ends).then(|| account.held())
    }

    /// What went wrong in the lane; an outage counts when it is over and it is known whose it was.
    pub(crate) fn trouble(&self) -> LaneTrouble {
        self.trouble
    }

    // ---- inputs ------------------------------------------------------------------------------

    /// A decision has told of a key, `at` that time.
    pub(crate) fn touch(
        &mut self,
        slot: usize,
        at: Timestamp,
        spilled: u32,
        refused: u32,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        self.rescheduled(slot, |account| {
            account.book_overflow(spilled);
            account.note_denied_cost(refused);
            account.touch(at, now, &terms);
        });
        self.enter_policy_if_unanswered(slot, now, context);
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
        let limit = &context.limits[bucket.limit() as usize];
        let place = self.accounts.vacant_entry();
        let slot = place.key();
        let number = context.accounts.insert(AccountId { lane: self.number, slot }) as u32;
        bucket.open_account(number);
        let cluster = Cluster { nodes: 1, round_trip_us: self.round_trip_us };
        let mut account = Account::new(bucket, key, number, cluster, &limit.terms, now);
        if let Some((version, stored)) = limit.newest {
            account.begin_with(version, stored);
        }
        if context.expects_newcomer(now) {
            account.expect_to_return();
        }
        place.insert(account);
        slot
    }

    /// A caller waits for the store's word on a request.
    pub(crate) fn wait(
        &mut self,
        slot: usize,
        waiter: Waiter,
        now: Timestamp,
        context: &mut Context,
    ) {
        let in_vain = waiter.deadline < now.plus_micros(self.quickest_us);
        self.rescheduled(slot, |account| account.wait(waiter, in_vain, now));
        self.enter_policy_if_unanswered(slot, now, context);
        self.tell(slot, context);
    }

    /// Time has passed.
    pub(crate) fn advance(&mut self, now: Timestamp, context: &mut Context) {
        self.catch_up(now, context);
        match self.flight.as_ref().map(|flight| flight.next) {
            Some(next) if next.at() > now => {}
            Some(Next::Fail { at, latest }) if now.micros_since(at) > LATE_US && now < latest => {
                if let Some(flight) = &mut self.flight {
                    flight.next = Next::Fail { at: now.plus_micros(LATE_US), latest };
                }
            }
            Some(Next::Fail { .. }) => {
                let error = StoreError::TimedOut(Duration::from_micros(context.retry_us));
                self.fail(error, now, context);
            }
            Some(Next::Resend { .. }) => self.attempt(now, context),
            None => self.send(now, context),
        }
    }

    /// Deals with what has ended by now at this node.
    pub(crate) fn catch_up(&mut self, now: Timestamp, context: &mut Context) {
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
            self.rescheduled(slot, |account| account.give_up(now));
            self.tell(slot, context);
        }
        self.enter_policies(now, context);
    }

    /// When [`advance`](Self::advance) has something to do next.
    pub(crate) fn timeout(&self) -> Timestamp {
        let first = |set: &BTreeSet<(Timestamp, usize)>| {
            set.first().map_or(Timestamp::NEVER, |&(at, _)| at)
        };
        let next = if let Some(flight) = &self.flight {
            // So that it is seen when this node's loop is held up meanwhile.
            flight.next.at().min(self.ran.plus_micros(HELD_UP_US / 2))
        } else {
            let due = first(&self.due).min(first(&self.newcomers_due));
            due.min(self.heartbeat_at).max(self.sendable_at)
        };
        next.min(first(&self.ends)).min(first(&self.waits)).min(self.policies_from)
    }

    /// Tokens in the batch that was sent with this attempt, if it is in flight.
    #[cfg(feature = "sim")]
    pub(crate) fn in_flight(&self, attempt: u64) -> Option<u64> {
        let flight = self.flight.as_ref()?;
        let sent = flight.attempts.iter().any(|(number, _)| *number == attempt);
        sent.then(|| flight.request.tokens())
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
            self.rescheduled(slot, |account| account.collect_of_policy(now));
            self.tally(slot, context);
        }
    }

    /// Marks the limits that have keys which live on outage policies because the store is away.
    pub(crate) fn mark_policies(&self, on_policy: &mut [bool]) {
        if self.sums.policies > 0 {
            let in_outage = self.accounts.iter().filter(|(_, account)| account.in_outage());
            in_outage.for_each(|(_, account)| on_policy[account.limit() as usize] = true);
        }
    }

    /// The node is leaving: everything is given back.
    pub(crate) fn leave(&mut self, now: Timestamp) {
        self.leaving = true;
        let slots: Vec<usize> = self.accounts.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.rescheduled(slot, |account| account.report_at(now));
        }
        self.sendable_at = now;
        if self.number == NAMING_LANE {
            self.heartbeat_at = now;
        }
    }

    // ---- sending -----------------------------------------------------------------------------

    fn send(&mut self, now: Timestamp, context: &mut Context) {
        if now < self.sendable_at {
            return;
        }
        let mut entries = Vec::new();
        let (mut slots, mut newcomers) = (Vec::new(), 0);
        while let Some(slot) = self.next_due(entries.len(), newcomers, now) {
            if self.reports(slot, now, context) {
                let terms = self.terms(slot, context);
                let limit = &mut context.limits[self.accounts[slot].limit() as usize];
                let leaving = self.leaving;
                newcomers += usize::from(self.accounts[slot].is_newcomer());
                entries.push(self.rescheduled(slot, |account| {
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
        let alive_us = ALIVE_US.max(2 * context.silence_us);
        let limit_alive_us = alive_us + 2 * naming_batches(context) * NAMING_GAP_US;
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
                alive_us: alive_us as i64,
                limit_alive_us: limit_alive_us as i64,
            },
            knowledge,
            limits: self.limits_to_name(knowledge.leaving, now, context),
        };
        let request = Arc::new(Request::new(header, entries));
        let (attempts, next) = (VecDeque::new(), Next::Resend { at: now });
        self.flight = Some(Flight { request, slots, first_sent: now, attempts, next });
        self.silent_since = now;
        self.sendable_at = now.plus_micros(BATCH_GAP_US);
        self.heartbeat_at = now.plus_micros(context.rng.jitter(HEARTBEAT_US));
        self.attempt(now, context);
    }

    /// The limits that a batch names which is sent now: with the last one of a node that leaves all.
    fn limits_to_name(&self, leaving: bool, now: Timestamp, context: &Context) -> Vec<Arc<str>> {
        let limits = context.shared_limits().cloned();
        match self.number {
            NAMING_LANE if leaving => limits.collect(),
            NAMING_LANE if now >= self.names_at => {
                limits.skip(self.limits_named).take(LIMITS_NAMED_MAX).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The number of nodes has changed: the limits are to be named soon.
    pub(crate) fn name_limits_soon(&mut self, now: Timestamp, context: &Context) {
        let gap_us = naming_batches(context) * NAMING_GAP_SHORT_US;
        let soon = self.named.plus_micros(gap_us).max(now);
        self.names_at = self.names_at.min(soon);
        self.heartbeat_at = self.heartbeat_at.min(soon);
    }

    /// The store has counted the nodes that have the limits which a batch named. Counts miss some nodes while the
    /// lane waits for them: they are not `complete`.
    fn counted_of_limits(
        &mut self,
        reply: &Reply,
        complete: bool,
        now: Timestamp,
        context: &mut Context,
    ) {
        let counts = &reply.limit_nodes;
        if counts.is_empty() || self.leaving {
            return;
        }
        if complete {
            context.counted_of_limits(self.limits_named, counts, reply.nodes, now);
        }
        self.limits_named += counts.len();
        if self.limits_named >= context.shared_limits().count() {
            self.limits_named = 0;
            let stand_from = context.counts_stand_from();
            let gap_us = if stand_from.is_some() { NAMING_GAP_SHORT_US } else { NAMING_GAP_US };
            self.named = now;
            self.names_at = now.plus_micros(naming_batches(context) * gap_us);
            if let Some(stand_from) = stand_from {
                self.heartbeat_at = self.heartbeat_at.min(stand_from.max(self.names_at));
            }
        } else {
            self.heartbeat_at = now;
        }
    }

    /// Whether the account at the head of the queue reports now; if not, it was put elsewhere.
    fn reports(&mut self, slot: usize, now: Timestamp, context: &mut Context) -> bool {
        let terms = self.terms(slot, context);
        if self.accounts[slot].due() > now {
            self.rescheduled(slot, |account| account.probe(now, &terms));
            if self.accounts[slot].due() > now {
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
        self.post(slot, Agenda::NONE);
        let mut account = self.accounts.remove(slot);
        account.lose_pace(&mut context.limits[account.limit() as usize].paces);
        context.accounts.remove(account.number as usize);
        shrink::give_back(&mut self.accounts);
        shrink::give_back(&mut context.accounts);
    }

    /// Changes an account and keeps queues and sums in step with it.
    fn rescheduled<T>(&mut self, slot: usize, change: impl FnOnce(&mut Account) -> T) -> T {
        let result = change(&mut self.accounts[slot]);
        let agenda = self.accounts[slot].agenda();
        self.post(slot, agenda);
        result
    }

    /// Puts an account into queues and sums in place of what they have of it.
    fn post(&mut self, slot: usize, new: Agenda) {
        let old = std::mem::replace(&mut self.accounts[slot].queued, new);
        for (queue, old, new) in [
            (&mut self.due, old.due, new.due),
            (&mut self.newcomers_due, old.newcomer_due, new.newcomer_due),
            (&mut self.ends, old.lease_ends, new.lease_ends),
            (&mut self.waits, old.wait_ends, new.wait_ends),
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
        self.sums.policies =
            self.sums.policies - usize::from(old.in_policy) + usize::from(new.in_policy);
        self.sums.outages =
            self.sums.outages - usize::from(old.in_outage) + usize::from(new.in_outage);
        self.sums.owing = self.sums.owing - usize::from(old.is_owing) + usize::from(new.is_owing);
    }

    /// Tells the callers who have waited what was decided.
    fn tell(&mut self, slot: usize, context: &mut Context) {
        for Answer { ticket, allowed, sure } in self.accounts[slot].take_answers() {
            context.outputs.push_back(Output::Decided { ticket, allowed, sure });
        }
    }

    // ---- outcomes ----------------------------------------------------------------------------

    /// The reply to the attempt that was `sent` then.
    fn accept(
        &mut self,
        flight: &Flight,
        reply: &Reply,
        sent: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        for slot in &flight.slots {
            self.accounts[*slot].end_report();
        }
        let wait_us = (reply.recovering_until_us - reply.time_us).clamp(0, LIFE_MAX_US) as u64;
        self.recovering_until = now.plus_micros(wait_us);
        if matches!(reply.verdict, Verdict::Applied(_) | Verdict::Reborn) {
            let travelled_us = now.micros_since(sent);
            let (time_us, sent) = (reply.time_us, flight.first_sent);
            let time = LaneTime { time_us, sent, received: now, travelled_us };
            if let Some(jump_us) = self.time.and_then(|before| before.jump_us(&time)) {
                self.trouble.store_jumped(jump_us);
                context.event(Event::StoreClockJumped {
                    lane: self.number,
                    by: Duration::from_micros(jump_us),
                });
            }
            self.time = Some(time);
            self.silence_us = reply.silence_us.clamp(0, LIFE_MAX_US) as u64;
        }
        if wait_us > 0 {
            self.recovery_gap_us =
                (2 * self.recovery_gap_us).clamp(RECOVERY_GAP_US, RECOVERY_GAP_MAX_US);
            let gap_us = context.rng.jitter(self.recovery_gap_us);
            self.heartbeat_at = self.heartbeat_at.min(now.plus_micros(gap_us));
        } else {
            self.recovery_gap_us = 0;
        }
        match &reply.verdict {
            Verdict::Applied(grants) => {
                self.incarnation = Some(reply.incarnation);
                if wait_us == 0 {
                    self.introduced = self.introduced.min(now.plus_micros(INTRODUCED_US));
                }
                // A lane that waits for its nodes has not counted all of them. If it is lost again meanwhile, it has
                // to wait for those of before.
                self.nodes = if wait_us == 0 { reply.nodes } else { self.nodes.max(reply.nodes) };
                let complete = wait_us == 0 || context.is_any_count_missing();
                if complete {
                    context.counted(self.number, reply.nodes.max(1), now);
                }
                self.counted_of_limits(reply, complete, now, context);
                for (index, grant) in grants.iter().enumerate() {
                    self.granted(flight, index, grant, now, context);
                }
            }
            Verdict::Reborn => {
                context.event(Event::MemoryLost { lane: self.number });
                context.memory_lost(now);
                self.trouble.lost_memory(now);
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

    fn tally(&mut self, slot: usize, context: &mut Context) {
        let account = &mut self.accounts[slot];
        let counts = account.take_counts();
        if counts != DecisionCounts::default() {
            context.limits[account.limit() as usize].counts.merge(counts);
        }
    }
}

/// Batches in which all shared limits can be named.
fn naming_batches(context: &Context) -> u64 {
    context.shared_limits().count().div_ceil(LIMITS_NAMED_MAX) as u64
}
