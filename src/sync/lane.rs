//! One lane: its keys, the one batch in flight, and what the lane's store has answered.
//!
//! A batch goes out when an account is due or the node has been quiet for a heartbeat (`send`), is sent again until it
//! is answered (`attempts`), and its answer changes the accounts (`replies`, then `grants`). While the store does not
//! answer, keys without a lease live on outage policies (`outages`). If it loses its memory, it is told of all accounts, and of keys whose
//! accounts were closed lately (`closed_keys`).

use std::sync::Arc;
use std::time::Duration;

use super::account::{
    Account, CallerAnswer, ClosedKey, Cluster, DecisionCounts, ResetWaiter, Settlement, Touch,
    Waiter, definition,
};
use super::context::{AccountId, Context, Output};
use super::event::Event;
use super::excess::LaneTrouble;
#[cfg(feature = "sim")]
use super::message::Held;
use super::message::{
    ENTRIES_MAX, Entry, Header, Incarnation, InstanceId, Knowledge, NUMBER_MAX, Request, Times,
};
use super::shrink;
use crate::algorithm::Calendar;
use crate::bucket::BucketRef;
use crate::error::StoreError;
use crate::limit::Terms;
use crate::quota::{Curve, Scale};
use crate::time::Timestamp;

mod accounts;
mod attempts;
mod backlog;
mod closed_keys;
mod flight;
mod grants;
mod lane_time;
mod naming;
mod outages;
mod replies;
mod round_trips;
mod silence;
#[cfg(test)]
mod tests;

use accounts::Accounts;
use backlog::Backlog;
use closed_keys::ClosedKeys;
use flight::{Flight, Next};
use lane_time::LaneTime;
use naming::Naming;
pub(crate) use naming::{NAMING_LANE, pass_us};
use round_trips::RoundTrips;
use silence::Silence;

/// Every lane is called at least once in this time, to show that this node lives.
pub(crate) const HEARTBEAT_US: u64 = 1_000_000;
/// A node that was silent for this long has gone.
const ALIVE_US: u64 = 4 * HEARTBEAT_US;
/// Between two batches of a lane there is at least this.
const BATCH_GAP_US: u64 = 1_000;
/// An attempt whose time was over for this long before this node looked is waited for as long again: its
/// answer may be there.
const LATE_US: u64 = 10_000;

/// When the store is called, beside what accounts want.
#[derive(Debug)]
struct Calls {
    heartbeat_at: Timestamp,
    /// The next batch is sent no earlier.
    sendable_at: Timestamp,
    /// The gap before the next call while the lane waits for nodes.
    recovery_gap_us: u64,
}

/// What replies have said of the lane.
#[derive(Debug)]
struct Replies {
    /// The lane's time in the last one.
    time: Option<LaneTime>,
    /// Nodes alive.
    nodes: i64,
    /// A silence beyond this is an outage for the store.
    silence_us: u64,
    /// The lane gives nothing new until then.
    recovering_until: Timestamp,
    /// When all other nodes count this one.
    introduced: Timestamp,
}

/// The outage policies of the lane's keys.
#[derive(Debug)]
struct Policies {
    /// When keys without a lease are to be looked at, because the store is away.
    from: Timestamp,
    /// When the first key entered its policy.
    entered: Timestamp,
    /// The most that a key was lent since, in tokens.
    lent: i64,
}

/// A lane of the store, as this node sees it.
#[derive(Debug)]
pub(crate) struct Lane {
    number: u32,
    instance: InstanceId,
    incarnation: Option<Incarnation>,
    sequence: i64,
    accounts: Accounts,
    closed: ClosedKeys,
    flight: Option<Flight>,
    trips: RoundTrips,
    backlog: Backlog,
    calls: Calls,
    naming: Naming,
    replies: Replies,
    silence: Silence,
    policies: Policies,
    trouble: LaneTrouble,
    leaving: bool,
    /// The store has applied a batch that says that this node leaves.
    has_left: bool,
}

impl Lane {
    pub(crate) fn new(number: u32, instance: InstanceId, now: Timestamp) -> Self {
        Self {
            number,
            instance,
            incarnation: None,
            sequence: 0,
            accounts: Accounts::default(),
            closed: ClosedKeys::default(),
            flight: None,
            trips: RoundTrips::default(),
            backlog: Backlog::default(),
            calls: Calls { heartbeat_at: now, sendable_at: now, recovery_gap_us: 0 },
            naming: Naming::new(now),
            replies: Replies {
                time: None,
                nodes: 0,
                silence_us: 0,
                recovering_until: Timestamp::ZERO,
                introduced: Timestamp::NEVER,
            },
            silence: Silence::new(now),
            policies: Policies { from: Timestamp::NEVER, entered: now, lent: 0 },
            trouble: LaneTrouble::default(),
            leaving: false,
            has_left: false,
        }
    }

    // ---- what is known of the lane -----------------------------------------------------------

    /// Whether the lane was reached and has nothing to recover from.
    pub(crate) fn is_ready(&self, now: Timestamp) -> bool {
        self.incarnation.is_some() && !self.is_down() && !self.is_recovering(now)
    }

    /// Whether the lane waits for what its nodes know, by its last reply.
    pub(crate) fn is_recovering(&self, now: Timestamp) -> bool {
        now < self.replies.recovering_until
    }

    /// Whether no account is open, no report is under way, and the store has taken in that this node leaves, if it knows the node and
    /// answers.
    pub(crate) fn has_reported_all(&self) -> bool {
        let reporting = self.flight.as_ref().is_some_and(|flight| !flight.slots.is_empty());
        let has_left = self.has_left || !self.is_known() || self.is_down();
        let has_told_all = self.closed.to_tell().is_empty();
        self.accounts.len() == 0 && has_told_all && !reporting && has_left
    }

    pub(crate) fn error(&self) -> Option<&StoreError> {
        self.silence.error.as_ref()
    }

    /// Whether keys live on outage policies.
    pub(crate) fn has_policies(&self) -> bool {
        self.accounts.sums.policies > 0
    }

    pub(crate) fn is_down(&self) -> bool {
        self.silence.failures > 0
    }

    /// Tokens spent and not acknowledged, and tokens leased by depth, of each key as it was when it was
    /// last dealt with.
    pub(crate) fn gauges(&self) -> (u64, i64) {
        let sums = &self.accounts.sums;
        (self.tokens_in_flight() + sums.pending, sums.depth)
    }

    fn tokens_in_flight(&self) -> u64 {
        self.flight.as_ref().map_or(0, |flight| flight.request.tokens())
    }

    /// Tokens spent and not acknowledged, to the last one.
    #[cfg(feature = "sim")]
    pub(crate) fn pending(&self) -> u64 {
        let pending = self.accounts.iter().map(|(_, account)| account.pending());
        self.tokens_in_flight() + pending.sum::<u64>()
    }

    /// The lease that the account has at `now`.
    #[cfg(feature = "sim")]
    pub(crate) fn lease(&self, slot: usize, now: Timestamp) -> Option<Held> {
        self.accounts.get(slot)?.held(now)
    }

    /// Tokens in the batch that was sent with this attempt, if it is in flight.
    #[cfg(feature = "sim")]
    pub(crate) fn in_flight(&self, attempt: u64) -> Option<u64> {
        let flight = self.flight.as_ref()?;
        flight.sent_at(attempt).map(|_| flight.request.tokens())
    }

    /// What went wrong in the lane; an outage counts when it is over and it is known whose it was.
    pub(crate) fn trouble(&self) -> LaneTrouble {
        self.trouble
    }

    /// Marks the limits that have keys which live on outage policies because the store is away.
    pub(crate) fn mark_policies(&self, on_policy: &mut [bool]) {
        if self.has_policies() {
            let in_outage = self.accounts.iter().filter(|(_, account)| account.in_outage());
            in_outage.for_each(|(_, account)| on_policy[account.limit() as usize] = true);
        }
    }

    /// The terms by which the key is kept.
    fn terms(&self, slot: usize, context: &Context) -> Terms {
        let account = &self.accounts[slot];
        account.terms(&context.limits[account.limit() as usize].terms)
    }

    // ---- inputs ------------------------------------------------------------------------------

    /// A decision has notified the engine of a key.
    pub(crate) fn touch(
        &mut self,
        slot: usize,
        touch: &Touch,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        self.accounts.change(slot, |account| account.touch(touch, now, &terms));
        self.enter_policy_if_unanswered(slot, now, context);
    }

    /// Something is settled of a request that was decided at `decided`.
    pub(crate) fn settle(
        &mut self,
        slot: usize,
        settlement: Settlement,
        decided: Timestamp,
        now: Timestamp,
        context: &mut Context,
    ) {
        let terms = self.terms(slot, context);
        let ago_us = now.micros_since(decided).saturating_add(settlement.before_us());
        let decided_us = self.same_window_us(slot, &terms, ago_us, now);
        let kept = self
            .accounts
            .change(slot, |account| account.settle(settlement, decided, decided_us, now, &terms));
        if kept > 0 {
            let limit = context.limit_name(self.accounts[slot].limit());
            context.event(Event::NotGivenBack { limit, tokens: kept });
        }
        self.enter_policy_if_unanswered(slot, now, context);
    }

    /// The lane's time so long ago, at the earliest. `None` if the window of then has ended, or if that is not known.
    fn same_window_us(
        &self,
        slot: usize,
        terms: &Terms,
        ago_us: u64,
        now: Timestamp,
    ) -> Option<i64> {
        let Some(time) = self.replies.time else {
            return (terms.scale.curve == Curve::Refill).then_some(0);
        };
        let now_us = time.least(now).max(0);
        let decided_us = now_us.saturating_sub_unsigned(ago_us).max(0);
        let windows = (self.accounts[slot].stored_scale(), terms.calendar);
        is_same_window(windows, decided_us, now_us).then_some(decided_us)
    }

    /// Opens the account of a key; returns its slot.
    pub(crate) fn open(
        &mut self,
        bucket: BucketRef,
        key: Arc<[u8]>,
        now: Timestamp,
        context: &mut Context,
    ) -> usize {
        let slot = self.accounts.next_slot();
        let number = context.accounts.insert(AccountId { lane: self.number, slot }) as u32;
        bucket.open_account(number);
        let limit = &context.limits[bucket.limit() as usize];
        let cluster = self.cluster(1, &limit.terms);
        let mut account = Account::new(bucket, key, number, cluster, &limit.terms, now);
        if let Some((version, stored)) = limit.newest
            && !limit.has_plans()
        {
            account.begin_with(version, stored);
        }
        if context.expects_newcomer(now) {
            account.expect_to_return();
        }
        self.accounts.insert(account);
        slot
    }

    /// What accounts are to know of the cluster.
    fn cluster(&self, nodes: i64, terms: &Terms) -> Cluster {
        // What is asked for beyond the life of a lease would be lost with it.
        let backlog_us = self.backlog.recent_us.min(terms.epoch_us);
        let (round_trip_us, time_us) = (self.trips.recent_us, self.heard_us());
        Cluster { nodes, round_trip_us, backlog_us, time_us }
    }

    /// The lane's time in the last reply; 0 if there was none.
    fn heard_us(&self) -> i64 {
        self.replies.time.map_or(0, |time| time.time_us)
    }

    fn close(&mut self, slot: usize, context: &mut Context) {
        let mut account = self.accounts.remove(slot);
        account.lose_pace(&mut context.limits[account.limit() as usize].paces);
        context.accounts.remove(account.number as usize);
        shrink::give_back(&mut context.accounts);
    }

    /// A caller waits for the store's answer to a request.
    pub(crate) fn wait(
        &mut self,
        slot: usize,
        waiter: Waiter,
        now: Timestamp,
        context: &mut Context,
    ) {
        let in_vain = waiter.deadline < now.plus_micros(self.answer_us(now));
        self.enter_policy_if_unanswered(slot, now, context);
        self.accounts.change(slot, |account| account.wait(waiter, in_vain, now));
        self.hand_out_answers(slot, context);
    }

    /// How long a caller who comes now waits for the store's answer, at least.
    fn answer_us(&self, now: Timestamp) -> u64 {
        // While the store does not answer, an answer takes as long as that.
        let silent_us = if self.is_down() { now.micros_since(self.silence.since) } else { 0 };
        self.trips.quickest_us.max(silent_us) + self.backlog.recent_us
    }

    /// A caller resets a key.
    pub(crate) fn reset(
        &mut self,
        slot: usize,
        waiter: ResetWaiter,
        now: Timestamp,
        context: &mut Context,
    ) {
        self.accounts.change(slot, |account| account.reset(waiter, now));
        self.enter_policy_if_unanswered(slot, now, context);
    }

    /// Time has passed.
    pub(crate) fn advance(&mut self, now: Timestamp, context: &mut Context) {
        self.catch_up(now, context);
        match self.flight.as_mut().map(|flight| &mut flight.next) {
            Some(next) if next.at() > now => {}
            Some(Next::Fail { at, latest }) if now.micros_since(*at) > LATE_US && now < *latest => {
                *at = now.plus_micros(LATE_US);
            }
            Some(Next::Fail { .. }) => {
                let error = StoreError::TimedOut(Duration::from_micros(context.timings.retry_us));
                self.fail(error, now, context);
            }
            Some(Next::Resend { .. }) => self.attempt(now, context),
            None => self.send(now, context),
        }
    }

    /// Deals with what has ended by now at this node.
    pub(crate) fn catch_up(&mut self, now: Timestamp, context: &mut Context) {
        self.silence.run(self.flight.is_some(), now);
        while let Some(slot) = self.accounts.ended(now) {
            self.ended(slot, now, context);
        }
        while let Some(slot) = self.accounts.wait_ended(now) {
            self.accounts.change(slot, |account| account.give_up(now));
            self.hand_out_answers(slot, context);
        }
        self.enter_policies(now, context);
    }

    /// When [`advance`](Self::advance) has something to do next.
    pub(crate) fn timeout(&self) -> Timestamp {
        let next = match &self.flight {
            Some(flight) => flight.next.at().min(self.silence.run_by()),
            None if !self.closed.to_tell().is_empty() => self.calls.sendable_at,
            None => self.accounts.due_at().min(self.calls.heartbeat_at).max(self.calls.sendable_at),
        };
        next.min(self.accounts.ends_at()).min(self.policies.from)
    }

    /// The store is to be called at once, if it is not being called.
    pub(crate) fn call_soon(&mut self, now: Timestamp) {
        self.call_by(now);
    }

    fn call_by(&mut self, at: Timestamp) {
        self.calls.heartbeat_at = self.calls.heartbeat_at.min(at);
    }

    fn call_at_once(&mut self, now: Timestamp) {
        (self.calls.heartbeat_at, self.calls.sendable_at) = (now, now);
    }

    /// Books the decisions of keys that live on outage policies: no report does it for them.
    pub(crate) fn count_policies(&mut self, now: Timestamp, context: &mut Context) {
        if !self.has_policies() {
            return;
        }
        for slot in self.accounts.slots(Account::in_policy) {
            self.accounts.change(slot, |account| account.collect_of_policy(now));
            self.count_decisions(slot, context);
        }
    }

    /// The number of nodes has changed: the limits are to be named soon.
    pub(crate) fn name_limits_soon(&mut self, now: Timestamp, context: &Context) {
        let soon = self.naming.begin_soon(now, context);
        self.call_by(soon);
    }

    /// The node is leaving: everything is given back.
    pub(crate) fn leave(&mut self, now: Timestamp) {
        self.leaving = true;
        for slot in self.accounts.slots(|_| true) {
            self.accounts.change(slot, |account| account.report_at(now));
        }
        self.calls.sendable_at = now;
        if self.is_known() {
            // Also where there is nothing to report: the store is not to wait for this node.
            self.calls.heartbeat_at = now;
        }
    }

    /// The store is told at once that the node leaves, if there is nothing else to tell it.
    fn say_farewell_soon(&mut self, now: Timestamp) {
        if self.leaving && !self.has_left && self.accounts.len() == 0 {
            self.call_by(now);
        }
    }

    /// Whether the store knows this node in the lane.
    fn is_known(&self) -> bool {
        self.incarnation.is_some()
    }

    // ---- sending -----------------------------------------------------------------------------

    fn send(&mut self, now: Timestamp, context: &mut Context) {
        if now < self.calls.sendable_at {
            return;
        }
        // What is known of closed keys is told before anything is given to accounts that may know less of them.
        let mut entries = self.closed_entries(now, context);
        let closed_count = entries.len();
        let slots = self.collect_entries(&mut entries, now, context);
        if entries.is_empty() && now < self.calls.heartbeat_at {
            return;
        }
        self.backlog.sent(self.accounts.has_due(now), now);
        self.sequence += 1;
        let header = self.header(&slots, closed_count, now, context);
        self.flight = Some(Flight::new(Request::new(header, entries), slots, now));
        self.silence.since = now;
        self.calls.sendable_at = now.plus_micros(BATCH_GAP_US);
        self.calls.heartbeat_at = now.plus_micros(context.rng.jitter(HEARTBEAT_US));
        self.attempt(now, context);
    }

    /// Adds the entries of the accounts that are due, and returns their slots.
    fn collect_entries(
        &mut self,
        entries: &mut Vec<Entry>,
        now: Timestamp,
        context: &mut Context,
    ) -> Vec<usize> {
        let (mut slots, mut newcomers) = (Vec::new(), 0);
        if self.silence.is_returning {
            return slots;
        }
        let (leaving, is_recovering) = (self.leaving, self.may_be_recovering(now));
        while let Some(slot) = self.accounts.next_due(entries.len(), newcomers, leaving, now) {
            if !self.reports(slot, now, context) {
                continue;
            }
            let account = &self.accounts[slot];
            newcomers += usize::from(account.is_newcomer());
            // Newcomers are held back on purpose, and may have been due for long when a caller waits for them.
            if account.has_view() {
                self.backlog.take(account.due(), now);
            }
            let limit = &context.limits[self.accounts[slot].limit() as usize];
            self.accounts.change(slot, |account| account.follow_callers(&limit.terms, now));
            let terms = self.terms(slot, context);
            let window_span_us = self.window_span_us(&terms, now);
            let limit = &mut context.limits[self.accounts[slot].limit() as usize];
            entries.push(self.accounts.change(slot, |account| {
                let entry = account.report(&limit.name, &terms, now, leaving);
                account.keep_pace(now, &terms, &mut limit.paces);
                // The windows of another plan are not known here.
                let is_own = definition(entry.version) == i64::from(terms.version);
                let window_span_us = if is_own { window_span_us } else { [0; 2] };
                Entry { window_span_us, reset: account.ask_reset(is_recovering), ..entry }
            }));
            self.count_decisions(slot, context);
            slots.push(slot);
        }
        slots
    }

    /// The entries of keys whose accounts are closed, and that the lane is still to be told of: half of a batch at most.
    fn closed_entries(&self, now: Timestamp, context: &Context) -> Vec<Entry> {
        if self.silence.is_returning {
            return Vec::new();
        }
        let entry = |key: &ClosedKey| {
            let (terms, entry) = (&context.limits[key.limit as usize].terms, key.entry(now));
            let is_own = definition(entry.version) == i64::from(terms.version);
            let window_span_us = if is_own { self.window_span_us(terms, now) } else { [0; 2] };
            Entry { window_span_us, ..entry }
        };
        self.closed.to_tell().iter().take(ENTRIES_MAX / 2).map(entry).collect()
    }

    /// Whether the lane may still hear from nodes what they know of its keys.
    fn may_be_recovering(&self, now: Timestamp) -> bool {
        self.replies.time.is_none() || self.is_recovering(now)
    }

    /// When the window of a calendar began that it is now by the lane's time, and when it ends.
    fn window_span_us(&self, terms: &Terms, now: Timestamp) -> [i64; 2] {
        let (Some(calendar), Some(time)) = (terms.calendar, self.replies.time) else {
            return [0; 2];
        };
        let lane_us = time.least(now).max(0) as u64;
        calendar.window_span_us(lane_us).map(|us| us.min(NUMBER_MAX as u64) as i64)
    }

    /// Whether the first account that is due reports now; if not, it is not due any more.
    fn reports(&mut self, slot: usize, now: Timestamp, context: &mut Context) -> bool {
        let terms = self.terms(slot, context);
        if self.accounts[slot].due() > now {
            self.accounts.change(slot, |account| account.probe(now, &terms));
            if self.accounts[slot].due() > now {
                return false;
            }
        } else if self.closed.has_room()
            && self.accounts.change(slot, |account| account.try_close(now, &terms))
        {
            let limit = context.limit_name(self.accounts[slot].limit());
            if let Some(key) = self.accounts[slot].closed_key(&limit, &terms, now) {
                self.closed.remember(key, self.heard_us());
            }
            self.close(slot, context);
            return false;
        }
        let account = &self.accounts[slot];
        let pressing = self.leaving || account.is_pressing();
        let limit = &mut context.limits[account.limit() as usize];
        let admitted = limit.paces.admit(pressing, now, &terms);
        if !admitted {
            self.accounts.change(slot, |account| account.put_off(now));
        }
        admitted
    }

    /// What a batch with the accounts in `slots`, and with so many keys whose accounts are closed, says apart from its entries.
    fn header(
        &self,
        slots: &[usize],
        closed_count: usize,
        now: Timestamp,
        context: &Context,
    ) -> Header {
        let reported = slots.iter().filter(|slot| self.accounts[**slot].is_owing()).count();
        let time = self.replies.time;
        let tells_all = self.closed.to_tell().len() == closed_count;
        let leaving = self.leaving && self.accounts.len() == slots.len() && tells_all;
        let names_limits = self.number == NAMING_LANE;
        let timings = &context.timings;
        let alive_us = ALIVE_US.max(2 * timings.silence_us);
        Header {
            lane: self.number,
            lanes: context.lanes,
            instance: self.instance,
            incarnation: self.incarnation,
            sequence: self.sequence,
            times: Times {
                recovery_us: timings.recovery_us as i64,
                lease_us: timings.lease_us as i64,
                silence_us: timings.silence_us as i64,
                alive_us: alive_us as i64,
                limit_alive_us: (alive_us + 2 * pass_us(context)) as i64,
            },
            knowledge: Knowledge {
                known_us: self.heard_us(),
                sent_us: time.map_or(0, |time| time.least(now)),
                nodes: self.replies.nodes,
                settled: self.accounts.sums.owing == reported && tells_all,
                leaving,
            },
            limits: if names_limits {
                self.naming.limits(leaving, now, context)
            } else {
                Vec::new()
            },
        }
    }

    // ---- the way out -------------------------------------------------------------------------

    /// Hands the answers for callers out.
    fn hand_out_answers(&mut self, slot: usize, context: &mut Context) {
        for answer in self.accounts.change(slot, Account::take_answers) {
            let CallerAnswer { ticket, allowed, sure } = answer;
            context.outputs.push_back(Output::Decided { ticket, allowed, sure });
        }
        for (ticket, outcome) in self.accounts.change(slot, Account::take_reset_outcomes) {
            context.outputs.push_back(Output::Reset { ticket, outcome });
        }
    }

    /// Adds the decisions that were booked to those of the limit.
    fn count_decisions(&mut self, slot: usize, context: &mut Context) {
        let counts = self.accounts.change(slot, Account::take_counts);
        if counts != DecisionCounts::default() {
            context.limits[self.accounts[slot].limit() as usize].counts.merge(counts);
        }
    }
}

/// Whether what was charged at `from_us` of the lane's time still counts at `now_us`, in the window of then. The scale is the
/// store's: in units of this node the rate may be rounded, and windows would end at other times.
fn is_same_window(
    (scale, calendar): (Scale, Option<&Calendar>),
    from_us: i64,
    now_us: i64,
) -> bool {
    match (scale.curve, calendar) {
        (Curve::Refill, _) => true,
        (Curve::SlidingLog, _) => now_us - from_us < scale.window_us(),
        (_, Some(calendar)) => {
            let [from, now] = [from_us, now_us].map(|us| calendar.window_span_us(us.max(0) as u64));
            from == now
        }
        _ => scale.window_ends_us(from_us) == scale.window_ends_us(now_us),
    }
}
