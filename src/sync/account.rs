//! The engine's account of one key: what is leased, what is to be reported, what to ask for.
//!
//! Everything that is known of the key is in one of these parts:
//!
//! | part | what it keeps | file |
//! |---|---|---|
//! | lease | what the store has leased to this node | `lease` |
//! | spending | what has been spent and not reported | `spending` |
//! | level | what is known of the store's level | `level` |
//! | history | the requests since the account was opened | `history` |
//! | arrivals | how fast the key is asked for | `arrivals`, `bursts` |
//! | schedule | when to report | `schedule`, `tick_pacing` |
//! | callers | callers who wait for the store | `callers` |
//! | resets | callers who reset the key | `resets` |
//! | quota | which quota is in force | `agreed_quota` |
//! | policy | the outage policy in force | `policy` |
//!
//! No part uses another. What concerns several of them is done by the account, in the order in which
//! it happens to a key: decisions are booked (here), a report is made (`reporting`, with `giving_back` and `need`), a
//! reply is installed (`reply`, `credit`, `waiting`), the next report is scheduled (`reporting_times`), a sliding
//! window ends (`window_end`), and an outage policy begins and ends (`outage`).

use std::sync::Arc;

use crate::bucket::BucketRef;
use crate::limit::{LimitInfo, QuotaOf, Terms};
use crate::quota::{Curve, Scale};
use crate::sync::message::{Backdated, Entry, Given};
use crate::time::{Timestamp, micros};

mod agreed_quota;
mod arrivals;
mod bursts;
mod callers;
mod closed_key;
mod credit;
mod decision_counts;
mod giving_back;
mod history;
mod lease;
mod level;
mod need;
mod outage;
mod policy;
mod reply;
mod reporting;
mod reporting_times;
mod resets;
#[cfg(test)]
pub(super) mod samples;
mod schedule;
mod settling;
mod spending;
mod tick_pacing;
mod waiting;
mod window_end;

use agreed_quota::AgreedQuota;
pub(crate) use agreed_quota::{Agreement, REFUSAL_EVENTS_US, definition, is_changed};
use arrivals::Arrivals;
use callers::Callers;
pub(crate) use callers::{CallerAnswer, Waiter};
pub(crate) use closed_key::ClosedKey;
pub(crate) use decision_counts::DecisionCounts;
use history::History;
use lease::LeaseState;
pub(crate) use lease::{CLOCK_ERROR_DIVISOR, WINDOW_MARGIN_US};
pub(crate) use level::Installed;
use level::{Level, StoreView};
use policy::PolicyInForce;
pub(crate) use policy::{Outage, PolicyWindow};
use resets::Resets;
pub(crate) use resets::{ResetOutcome, ResetWaiter};
pub(crate) use schedule::Agenda;
use schedule::Schedule;
pub(crate) use settling::Settlement;
use spending::Spending;
pub(crate) use tick_pacing::Paces;

/// What a decision notifies the engine of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touch {
    /// The key, if the engine may have no account of it.
    pub(crate) key: Option<Arc<[u8]>>,
    /// When the decision was taken.
    pub(crate) at: Timestamp,
    /// Pending tokens that no longer fitted the bucket's word.
    pub(crate) spilled: u32,
    /// What a denied request cost, if that was more than one token.
    pub(crate) denied_cost: u32,
}

/// What the last replies said of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    /// Nodes that share the limit, by the store's last count.
    pub(crate) nodes: i64,
    /// How long the store took to answer of late, in microseconds.
    pub(crate) round_trip_us: u64,
    /// How long reports that were due waited for room in a batch of late, in microseconds.
    pub(crate) backlog_us: u64,
    /// The lane's time in the last reply; 0 if there was none.
    pub(crate) time_us: i64,
}

/// The account of one key.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) bucket: BucketRef,
    key: Arc<[u8]>,
    /// The number that the bucket has of the account.
    pub(crate) number: u32,
    /// The plan that callers named last, when that was looked at.
    named: Named,
    /// Units of this node.
    scale: Scale,
    pub(crate) cluster: Cluster,
    lease: LeaseState,
    spending: Spending,
    level: Level,
    history: History,
    arrivals: Arrivals,
    schedule: Schedule,
    callers: Callers,
    resets: Resets,
    quota: AgreedQuota,
    policy: Option<PolicyInForce>,
    /// Decisions booked and not handed out for the metrics.
    counts: DecisionCounts,
    /// Times that the store was found to have lost the key's record.
    lost_records: u32,
    /// What the lane's queues and sums have of the account.
    pub(crate) queued: Agenda,
}

impl Account {
    pub(crate) fn new(
        bucket: BucketRef,
        key: Arc<[u8]>,
        number: u32,
        cluster: Cluster,
        terms: &Terms,
        now: Timestamp,
    ) -> Self {
        let named = Named::by(&bucket, terms);
        let (terms, is_plan) = (named.terms(terms), named.is_plan());
        let Scale { token: unit, rate, .. } = terms.scale;
        let known = bucket.view_and_refill().0;
        let age_us = known.age(now).map(micros);
        let view = age_us.map(|age_us| StoreView {
            unleased: known.tokens().saturating_mul(unit),
            level: known.tokens().saturating_mul(unit),
            is_partial: true,
            previous: None,
            leased: 0,
            at: now.minus_micros(age_us),
            viewed_us: 0,
            window_ends_latest: now
                .minus_micros(age_us)
                .plus_micros(terms.scale.longest_window_us() as u64),
            was_full: bucket.is_full_since_closed(now),
        });
        Self {
            spending: Spending::new(bucket.credit_at_rest(), now),
            bucket,
            key,
            number,
            named,
            scale: terms.scale,
            cluster,
            lease: LeaseState::none(),
            level: Level::new(view, rate),
            history: History::new(now, age_us),
            arrivals: Arrivals::new(now),
            schedule: Schedule::new(terms.first_tick_us()),
            callers: Callers::default(),
            resets: Resets::default(),
            quota: AgreedQuota::of(&terms, is_plan),
            policy: None,
            counts: DecisionCounts::default(),
            lost_records: 0,
            queued: Agenda::NONE,
        }
    }

    // ---- decisions are booked ----------------------------------------------------------------

    /// Books what decisions spent since the last time. `recredit` turns the debt that the store has
    /// not confirmed, and the credit that is left, into the credit from now on. `muted`: the next decisions
    /// need not notify the engine.
    fn absorb(&mut self, now: Timestamp, muted: bool, recredit: impl Fn(i64, u32) -> u32) {
        let (given, debt) = (self.spending.credit_given, self.spending.unsent.debt);
        let recredited = |left: u32| recredit(debt + i64::from(given - left.min(given)), left);
        let collected = self.bucket.collect(muted, recredited);
        let spent = collected.spent + std::mem::take(&mut self.spending.spilled);
        let credit = recredited(collected.credit);
        self.spending.book(spent, collected.credit, credit, self.policy.is_some());

        // Tokens that did not fit the bucket's word may come later than what is known of their requests.
        let surplus = collected.surplus + self.spending.surplus;
        self.spending.surplus = surplus.saturating_sub(spent);
        let counts = DecisionCounts::of(&collected, spent, surplus);
        let cost_denied = self.history.largest_denied.max(1);
        let requests = counts.allowed + collected.denied.div_ceil(cost_denied.into());
        let tokens = spent + collected.denied;
        if tokens > 0 {
            self.history.last_request = now;
        }
        self.history.requests += requests;
        let mean_cost = spent.checked_div(counts.allowed).unwrap_or(self.history.mean_cost);
        self.history.mean_cost = mean_cost.max(1);
        self.arrivals.collect(requests, tokens, now);
        self.counts.merge(counts);
    }

    /// Books what decisions spent, leaving the credit as it is.
    fn collect(&mut self, now: Timestamp, muted: bool) {
        self.absorb(now, muted, |_, left| left);
    }

    /// Books the decisions of a key under an outage policy.
    pub(crate) fn collect_of_policy(&mut self, now: Timestamp) {
        self.collect(now, true);
    }

    /// Books tokens that no longer fitted the bucket's word.
    fn book_spilled(&mut self, tokens: u32) {
        if tokens > 0 {
            self.spending.spilled += u64::from(tokens);
            self.bucket.end_spill();
        }
    }

    /// Books a denied request that the bucket does not count.
    fn count_denial(&mut self, cost: u32) {
        self.arrivals.tokens += u64::from(cost);
        self.arrivals.requests += 1;
        self.history.requests += 1;
        self.counts.denied += 1;
    }

    /// Notes the cost of a denied request that the bucket counts.
    fn note_denied_cost(&mut self, cost: u32) {
        self.history.largest_denied = self.history.largest_denied.max(cost);
    }

    /// Notes that the account was opened outside of a flood of new keys.
    pub(crate) fn expect_to_return(&mut self) {
        self.history.is_expected_to_return = true;
    }

    /// Decisions booked since the last time, for the metrics.
    pub(crate) fn take_counts(&mut self) -> DecisionCounts {
        std::mem::take(&mut self.counts)
    }

    // ---- what the lane asks ------------------------------------------------------------------

    /// The limit's number.
    pub(crate) fn limit(&self) -> u32 {
        self.bucket.limit()
    }

    /// The limit's terms for this key: with its own tick, and the quota in force.
    pub(crate) fn terms(&self, limit: &Terms) -> Terms {
        let scale = self.quota.scale();
        Terms { tick_us: self.schedule.tick_us, scale, ..self.named.terms(limit) }
    }

    /// What the lane's queues and sums are to have of the account.
    pub(crate) fn agenda(&self) -> Agenda {
        let probe_at = self.schedule.probe_at().min(self.arrivals.probe_at());
        let due = self.schedule.due.min(probe_at);
        let due = if self.schedule.is_reporting { Timestamp::NEVER } else { due };
        let (due, newcomer_due) =
            if self.is_newcomer() { (Timestamp::NEVER, due) } else { (due, Timestamp::NEVER) };
        Agenda {
            due,
            newcomer_due,
            ends: self.lease_ends().unwrap_or(self.policy_turns()),
            wait_ends: self.wait_ends(),
            pending: self.pending(),
            depth: self.lease.held.depth,
            in_policy: self.in_policy(),
            in_outage: self.in_outage(),
            is_owing: self.is_owing(),
        }
    }

    /// When the first caller has waited long enough.
    fn wait_ends(&self) -> Timestamp {
        let ends = [self.callers.wait_ends(), self.resets.wait_ends()];
        ends.into_iter().flatten().min().unwrap_or(Timestamp::NEVER)
    }

    /// Tokens pending or to be reported.
    pub(crate) fn pending(&self) -> u64 {
        self.spending.tokens() + self.bucket.pending()
    }

    /// When the lease or its window ends, if there is one that the outage policy has not replaced.
    pub(crate) fn lease_ends(&self) -> Option<Timestamp> {
        let is_in_force = self.lease.is_any() && self.policy.is_none();
        let ends = self.lease.ends.min(self.lease.window_closes());
        (is_in_force && self.lease.ends > Timestamp::ZERO).then_some(ends)
    }

    /// What is leased at `now`, with the refill that flows.
    #[cfg(feature = "sim")]
    pub(crate) fn held(&self, now: Timestamp) -> Option<crate::sync::message::Held> {
        let is_leased = self.lease_ends().is_some() && now < self.lease.ends;
        let rate = if now < self.lease.bucket_ends() { self.lease.rate() } else { 0 };
        is_leased.then_some(crate::sync::message::Held { rate, ..self.lease.held })
    }

    /// Whether the store has answered about the key.
    pub(crate) fn has_view(&self) -> bool {
        self.level.view.is_some()
    }

    /// Whether the store has not answered about the key yet, and no caller waits for it.
    pub(crate) fn is_newcomer(&self) -> bool {
        !self.has_view() && self.is_waited_for_by_nobody()
    }

    fn is_waited_for_by_nobody(&self) -> bool {
        self.callers.waiting.is_empty() && self.resets.is_none()
    }

    /// Whether an outage policy is in force.
    pub(crate) fn in_policy(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether an outage policy is in force because the store is away.
    pub(crate) fn in_outage(&self) -> bool {
        self.policy.is_some() && !self.quota.is_refused
    }

    /// Whether something is to be reported before the store gives what it has.
    pub(crate) fn is_owing(&self) -> bool {
        let is_owing =
            self.lease.restore || self.policy.is_some() || self.spending.unsent.has_taken();
        is_owing && !self.quota.is_refused
    }

    // ---- the quota in force ------------------------------------------------------------------

    /// The quota as the store has it.
    pub(crate) fn stored_scale(&self) -> Scale {
        self.quota.stored()
    }

    /// The key begins with a newer quota, which the store holds for other keys.
    pub(crate) fn begin_with(&mut self, version: i64, stored: Scale) {
        self.quota.begin_with(version, stored);
    }

    /// Asks for the plan that callers name, if it is another one than before. Nothing is being reported.
    pub(crate) fn follow_callers(&mut self, limit: &Terms, now: Timestamp) {
        // Keys for which there is no room name no plan: they follow the limit itself.
        let is_updated = self.named.info.is_none() && self.named.own != limit.stored_scale;
        if !self.is_plan_changed() && !self.quota.may_ask_again(now) && !is_updated {
            return;
        }
        self.named = Named::by(&self.bucket, limit);
        let (terms, before) = (self.named.terms(limit), self.stored_scale());
        if self.quota.ask_for(&terms) {
            self.leave_windows_of(before, now);
            if terms.pace.is_none() {
                self.schedule.tick_us = terms.tick_us;
            }
        }
    }

    /// Whether callers have named another plan since a report asked for one.
    pub(super) fn is_plan_changed(&self) -> bool {
        self.bucket.plan() != self.named.number
    }

    /// The name of the plan that callers name; `None` is the limit's own quota, or one by override.
    pub(crate) fn plan_named(&self) -> Option<&'static str> {
        self.named.info?.plan_name()
    }

    /// The store holds the quota `stored` of this `version`, and has refused `entry`, which is of another. Goes on with one of
    /// them, and says with which; `None` if the store is to be asked later.
    pub(crate) fn agree(
        &mut self,
        entry: &Entry,
        version: i64,
        stored: Scale,
        limit: &Terms,
        now: Timestamp,
    ) -> Option<Agreement> {
        let (own, before) = (self.in_own_units(entry), self.stored_scale());
        let named = self.named.terms(limit);
        let agreement = self.quota.answer_refusal(version, stored, &named, now)?;
        self.take_back(&own);
        self.lease.take_back(&own);
        // The store had another quota for a time, even if it does not keep it.
        self.lease.left_to_policies = None;
        if agreement == Agreement::Follows {
            self.leave_windows_of(before, now);
        }
        self.quota.is_refused = false;
        Some(agreement)
    }

    /// Another quota is in force than `before`.
    fn leave_windows_of(&mut self, before: Scale, now: Timestamp) {
        self.spending.unsent.unspent = Backdated::default();
        self.lease.left_to_policies = None;
        if let Some(policy) = &mut self.policy {
            policy.own_given_us = None;
        }
        if before.curve == Curve::SlidingWindow {
            if before.window_us() != self.stored_scale().window_us() {
                // The windows of another definition are others.
                self.spending.unsent.spent_before = 0;
            }
            self.open_window(now);
            self.lease.count_refill_to_window_end(before);
        } else if before.curve == Curve::Refill && self.stored_scale().curve == Curve::SlidingWindow
        {
            // The store has counted as spent what was leased of a token bucket.
            self.lease.make_void();
        }
    }

    /// The store refuses the key.
    pub(crate) fn set_refused(&mut self) {
        self.quota.is_refused = true;
    }

    /// The store has taken the key's quota.
    pub(crate) fn set_taken(&mut self) {
        self.quota.set_taken();
    }

    /// Whether an event is to name the store's refusal now; if so, notes that it does.
    pub(crate) fn take_refusal_event_due(&mut self, now: Timestamp) -> bool {
        self.quota.take_event_due(now)
    }

    /// The entry that was sent last, in the units of this node.
    pub(crate) fn in_own_units(&self, entry: &Entry) -> Entry {
        Entry { held: self.lease.reported, ..self.quota.in_own_units(entry) }
    }

    /// What this node knows of the level, in the units of the store: in those of this node a slow rate may be rounded.
    fn level_in_store(&self) -> Level {
        self.level.with_units(|units| self.quota.out(units))
    }

    /// What the store gave, in the units of this node.
    pub(crate) fn given_in_own_units(&self, given: &Given) -> Given {
        self.quota.given_in_own_units(given)
    }

    // ---- the account is closed ---------------------------------------------------------------

    /// Whether nothing is leased or left to report, and no caller waits.
    fn is_idle(&self) -> bool {
        self.lease.held.depth == 0 && self.is_idle_but_for_depth()
    }

    fn is_idle_but_for_depth(&self) -> bool {
        self.spending.is_reported()
            && self.lease.held.rate == 0
            && self.lease.held.outstanding == 0
            && self.policy.is_none()
            && self.is_waited_for_by_nobody()
    }

    /// Whether the store has answered the only request, and no other is expected.
    fn is_done_with(&self) -> bool {
        self.history.is_seen_once() && self.level.is_viewed_since(self.history.last_request)
    }

    fn is_quiet(&self, now: Timestamp, terms: &Terms) -> bool {
        self.is_done_with() || self.history.is_over(now, terms)
    }

    /// Closes the account if nothing is leased, to be reported or expected at `now`, and writes into the bucket when it
    /// will be full. Returns whether the account is closed.
    pub(crate) fn try_close(&mut self, now: Timestamp, terms: &Terms) -> bool {
        // A store that has lost the key is told what was spent.
        if self.lease.restore || !self.is_quiet(now, terms) || !self.is_idle() {
            return false;
        }
        self.collect(now, false);
        if !self.is_quiet(now, terms) || self.spending.credit_given < terms.credit.known {
            return false;
        }
        let (level, stored) = (self.level_in_store(), self.stored_scale());
        let missing = stored.burst - level.estimate(now, &stored).unwrap_or(0);
        let full_at = level.full_at(missing, now, &stored);
        self.bucket.try_close_account(full_at, self.history.is_seen_once())
    }

    /// Closes the account on a node that leaves, if it can be. Depth that is kept ends with its epoch.
    pub(crate) fn try_leave(&mut self, now: Timestamp) -> bool {
        self.collect(now, false);
        let is_idle =
            self.lease.held.depth == self.lease.kept_depth && self.is_idle_but_for_depth();
        is_idle && self.bucket.try_close_account(Timestamp::NEVER, self.history.is_seen_once())
    }

    /// Counts a record that was found to be `lost`; returns how many were.
    pub(crate) fn count_lost_record(&mut self, lost: bool) -> u32 {
        self.lost_records += u32::from(lost);
        self.lost_records
    }
}

/// A plan that callers name.
#[derive(Clone, Copy, Debug)]
struct Named {
    /// As buckets have it.
    number: u32,
    /// `None` if the limit's own terms hold.
    info: Option<&'static LimitInfo>,
    /// The limit's own quota at that time.
    own: Scale,
}

impl Named {
    /// The one that was named last.
    fn by(bucket: &BucketRef, limit: &Terms) -> Self {
        let number = bucket.plan();
        Self { number, info: LimitInfo::of(number), own: limit.stored_scale }
    }

    /// Its terms, where these are the limit's.
    fn terms(&self, limit: &Terms) -> Terms {
        self.info.map_or(*limit, |info| {
            let credit = limit.credit.at_most(&info.terms.credit_rule);
            Terms { credit, ..info.terms }
        })
    }

    /// Whether it is a plan, is given by an override or came with an update, and is not the quota that the limit was built
    /// with.
    fn is_plan(&self) -> bool {
        self.info.is_some_and(|info| info.of != QuotaOf::Limit || info.is_update)
    }
}

#[cfg(test)]
mod tests {
    use super::samples::{OPENED, account_of, ask};
    use crate::limit::Limit;
    use crate::quota::Quota;

    #[test]
    fn account_is_closed_when_it_is_quiet_and_its_credit_is_whole() {
        let quiet = OPENED.plus_micros(2_000_000);
        for (credit, given, now, is_closed) in
            [(0, 0, quiet, true), (0, 0, OPENED, false), (1, 0, quiet, false), (1, 1, quiet, true)]
        {
            let limit = Limit::new("x", Quota::per_second(100)).credit(credit);
            let terms = limit.validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            account.bucket.open_account(0);
            account.absorb(OPENED, true, |_, _| given);
            (account.history.requests, account.history.caller_has_waited) = (2, true);
            assert_eq!(account.try_close(now, &terms), is_closed, "{credit}, {given}, {now:?}");
        }
    }

    #[test]
    fn last_request_is_when_something_was_asked_for() {
        let terms = Limit::new("x", Quota::per_second(100)).credit(0).validate_hybrid(4).unwrap();
        let mut account = account_of(&terms);
        let at = |ms: u64| OPENED.plus_micros(1_000 * ms);
        for (ms, is_asked, last_ms) in [(1, false, 0), (2, true, 2), (3, false, 2)] {
            if is_asked {
                account.bucket.decide(ask(1, terms.scale), at(ms));
            }
            account.collect(at(ms), true);
            assert_eq!(account.history.last_request, at(last_ms));
        }
    }

    #[test]
    fn callers_who_are_denied_by_the_store_count_with_all_that_they_asked_for() {
        let terms = Limit::new("x", Quota::per_second(100)).validate().unwrap();
        let mut account = account_of(&terms);
        for _ in 0..2 {
            account.count_denial(3);
        }
        assert_eq!((account.arrivals.tokens, account.history.requests), (6, 2));
        assert_eq!(account.take_counts().denied, 2);
    }
}
