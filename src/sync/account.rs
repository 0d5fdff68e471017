//! The engine's books on one key: what is held, what is to be reported, what to ask for.

use std::collections::VecDeque;
use std::sync::Arc;

use super::backoff::Backoff;
use super::demand::Demand;
use super::message::{Entry, Given, Held, Withheld};
use crate::bucket::{BucketRef, Lease, MAX_TOKENS};
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::weakness::{Weakness, is_weak};
use crate::time::{Timestamp, micros};

mod adopted;
mod bursts;
mod giving_back;
mod lending;
mod need;
mod outage;
mod pace;
mod schedule;
mod tally;
mod waiting;

use adopted::Adopted;
use bursts::Bursts;
use outage::Policy;
pub(crate) use pace::Paces;
pub(crate) use tally::Tally;
pub(crate) use waiting::{Answer, Waiter};

/// How much faster or slower than the store's a node's clock may run: 500 parts per million.
pub(crate) const CLOCK_ERROR_DIVISOR: u64 = 2000;
/// The longest stall of the cached clock that leases allow for.
pub(crate) const STALL_MAX_US: u64 = crate::time::CLOCK_AGE_MAX_US;
/// A key above half its burst is synced so many times more rarely.
const PLENTY_TICKS: u64 = 4;
/// So many requests in one observation speak for themselves: their relative error is a third.
const TELLING_REQUESTS: u64 = 8;
/// So many arrivals must be expected before their absence says anything: chance alone leaves less
/// than a quarter of them once in three hundred times.
const PROBE_ARRIVALS: f64 = 8.0;
/// An early sync was productive if it brought this part of what was wanted.
const PRODUCTIVE_PART: i64 = 4;
/// The longest gap between fruitless early syncs, in ticks.
const EARLY_TICKS_MAX: u64 = 16;
/// A key that the store refuses is named so often, and so is another quota of a limit.
pub(crate) const NAMED_US: u64 = 60_000_000;
/// A key is kept in the books at least so long after its last request.
const LINGER_MIN_US: u64 = 250_000;
/// A key is kept in the books at most so long after its last request.
const LINGER_MAX_US: u64 = 1_000_000;
/// The same for a key that has come before, on a limit without credit: only what is held for it admits
/// its next request.
const STRICT_LINGER_MAX_US: u64 = 150_000_000;

/// What the store last said about a key.
#[derive(Clone, Copy, Debug)]
struct View {
    level: i64,
    leased: i64,
    at: Timestamp,
}

/// Tokens spent and not yet in a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Unsent {
    spent: i64,
    debt: i64,
    allowed: i64,
    /// Units that outage policies took out of the bucket.
    taken: i64,
}

/// What a grant meant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Installed {
    /// The node's estimate less the store's level, in units.
    pub(crate) drift: Option<i64>,
    /// Age of the view that was replaced, in microseconds.
    pub(crate) age_us: u64,
}

/// What the lane's queues and sums have of an account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    /// When it wants to report or to be probed.
    pub(crate) due: Timestamp,
    /// The same of a newcomer.
    pub(crate) newcomer_due: Timestamp,
    /// When its lease ends.
    pub(crate) ends: Timestamp,
    /// When its first waiting caller has waited long enough.
    pub(crate) waits: Timestamp,
    pub(crate) pending: u64,
    pub(crate) depth: i64,
    pub(crate) policy: bool,
    pub(crate) outage: bool,
    /// The store is to be told something before it gives what it has.
    pub(crate) owing: bool,
}

impl Default for Posted {
    fn default() -> Self {
        let (due, ends, waits) = (Timestamp::NEVER, Timestamp::NEVER, Timestamp::NEVER);
        let (policy, outage, owing) = (false, false, false);
        Self { due, newcomer_due: due, ends, waits, pending: 0, depth: 0, policy, outage, owing }
    }
}

/// A key's books.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each says something else about the key")]
pub(crate) struct Account {
    pub(crate) bucket: BucketRef,
    key: Arc<[u8]>,
    /// Where the engine looks the account up.
    pub(crate) desk: u32,
    /// Tokens spent that no longer fitted the bucket's word.
    spilled: u64,
    /// Units of the quota.
    scale: Scale,
    /// Nodes that share the limit, by the store's last word.
    pub(crate) nodes: i64,
    /// How long the store took to answer of late, in microseconds.
    pub(crate) round_trip_us: u64,
    held: Held,
    ends: Timestamp,
    /// Units in the bucket that make no whole token and no whole microsecond of refill.
    stash: i64,
    /// Outstanding units that this node neither holds nor has spent: overflow, what came too late,
    /// and what the clock's allowance took of the refill. The store is told.
    lost: i64,
    unsent: Unsent,
    credit_given: u32,
    /// How fast the store's level rises while this node spends nothing, in units per microsecond.
    growth: f64,
    /// The node has spent on credit and not seen that repaid.
    owes: bool,
    /// What the store could lease by its last reply, with all that is outstanding, in units; 0 if it withheld some.
    with_outstanding: i64,
    view: Option<View>,
    /// When the key came into the books.
    opened: Timestamp,
    demand: Demand,
    recall: i64,
    policy: Option<Policy>,
    /// The store's quota of the limit, if it is newer than this node's.
    adopted: Option<Adopted>,
    /// The next batch must register the lease anew.
    pub(crate) restore: bool,
    /// When to report next.
    pub(crate) due: Timestamp,
    pub(crate) posted: Posted,
    /// The key's own tick.
    tick_us: u64,
    /// Its part of what the limit's keys are expected to cost.
    expected: u64,
    early: Backoff,
    /// A report is in flight.
    pub(crate) reporting: bool,
    /// The report under way was sent ahead of schedule.
    early_sent: bool,
    last_arrival: Timestamp,
    /// The key did not come into the books in a flood of new ones.
    pub(crate) expected_to_return: bool,
    /// Requests since the key came into the books.
    seen: u64,
    /// The age of the view that the key came into the books with, in microseconds.
    known_us: Option<u64>,
    /// Times that the store was found to have lost the key's record.
    lost_records: u32,
    /// The store refuses the key: it holds another quota of the limit, or another program's value.
    pub(crate) refused: bool,
    /// The store's refusal of the key is named again from then on.
    named_until: Timestamp,
    /// The largest cost that was denied since the key came into the books.
    denied_cost: u32,
    /// What the last requests that were allowed cost on average, in tokens.
    cost: u64,
    /// Tokens asked for that the demand estimate has not seen yet.
    arrivals: u64,
    /// The requests that these came with.
    requests: u64,
    /// When to look next whether arrivals have ceased, and what had arrived at the last look.
    probe_at: Timestamp,
    probe_span_us: u64,
    probed_arrivals: u64,
    bursts: Bursts,
    tally: Tally,
    /// The store has lost the key and does not give yet: until it does, no depth is given back. Claims assume that
    /// what was spent has refilled, but a full bucket took nothing in, and what caps it are the depths of then.
    is_registering: bool,
    /// Depth that the store has registered and the bucket does not have.
    kept_depth: i64,
    /// Callers who wait, first come first; so many of them the batch in flight asks for.
    waiters: VecDeque<Waiter>,
    asked: usize,
    /// A caller has waited for the store's word since the key came into the books.
    caller_has_waited: bool,
    answers: Vec<Answer>,
}

impl Account {
    pub(crate) fn new(
        bucket: BucketRef,
        key: Arc<[u8]>,
        desk: u32,
        terms: &Terms,
        now: Timestamp,
    ) -> Self {
        let unit = terms.scale.token;
        let told = bucket.view_and_refill().0;
        let view = told.age(now).map(|age| View {
            level: told.tokens().saturating_mul(unit),
            leased: 0,
            at: now.minus_micros(micros(age)),
        });
        Self {
            credit_given: bucket.credit_at_rest(),
            growth: terms.scale.rate as f64,
            owes: false,
            with_outstanding: 0,
            bucket,
            key,
            desk,
            spilled: 0,
            scale: terms.scale,
            nodes: 1,
            round_trip_us: 0,
            held: Held::default(),
            ends: Timestamp::ZERO,
            stash: 0,
            lost: 0,
            unsent: Unsent::default(),
            view,
            opened: now,
            demand: Demand::new(now.minus_micros(1000)),
            recall: 0,
            policy: None,
            adopted: None,
            restore: false,
            due: Timestamp::NEVER,
            posted: Posted::default(),
            tick_us: terms.first_tick_us(),
            expected: 0,
            early: Backoff::default(),
            reporting: false,
            early_sent: false,
            last_arrival: now,
            expected_to_return: false,
            seen: 0,
            known_us: told.age(now).map(micros),
            lost_records: 0,
            refused: false,
            named_until: Timestamp::ZERO,
            denied_cost: 0,
            cost: 1,
            arrivals: 0,
            requests: 0,
            probe_at: Timestamp::NEVER,
            probe_span_us: 0,
            probed_arrivals: 0,
            bursts: Bursts::new(now),
            tally: Tally::default(),
            waiters: VecDeque::new(),
            asked: 0,
            caller_has_waited: false,
            is_registering: false,
            kept_depth: 0,
            answers: Vec::new(),
        }
    }

    // ---- what came in ------------------------------------------------------------------------

    /// Books what decisions spent since the last time. `recredit` turns the debt that the store has
    /// not confirmed, and the credit that is left, into the credit from now on. `muted`: the next decisions
    /// need not tell.
    fn absorb(&mut self, now: Timestamp, muted: bool, recredit: impl Fn(i64, u32) -> u32) {
        let (given, debt) = (self.credit_given, self.unsent.debt);
        let recredited = |left: u32| recredit(debt + i64::from(given - left.min(given)), left);
        let collected = self.bucket.collect(muted, recredited);
        let used = i64::from(given - collected.credit.min(given));
        self.credit_given = recredited(collected.credit);
        let all = collected.spent + std::mem::take(&mut self.spilled);
        let spent = all as i64;
        if self.policy.is_some() {
            self.unsent.allowed += spent;
        } else {
            let debt = used.min(spent);
            self.owes |= debt > 0;
            self.unsent.debt += debt;
            self.unsent.spent += spent - debt;
        }
        if all + collected.denied > 0 {
            self.last_arrival = now;
        }
        let tally = Tally::of(&collected, all);
        self.arrivals += all + collected.denied;
        let requests = tally.allowed + collected.denied.div_ceil(self.denied_cost.max(1).into());
        self.requests += requests;
        self.seen += requests;
        self.cost = all.checked_div(tally.allowed).unwrap_or(self.cost).max(1);
        self.bursts.collect(requests, all + collected.denied, now);
        self.tally.merge(tally);
    }

    /// Books what decisions spent, leaving the credit as it is.
    fn collect(&mut self, now: Timestamp, muted: bool) {
        self.absorb(now, muted, |_, left| left);
    }

    /// Books tokens that no longer fitted the bucket's word.
    pub(crate) fn spilled(&mut self, tokens: u32) {
        if tokens > 0 {
            self.spilled += u64::from(tokens);
            self.bucket.end_overflow();
        }
    }

    /// Books a denied request that the bucket does not count.
    fn refused(&mut self, cost: u32) {
        self.arrivals += u64::from(cost);
        self.requests += 1;
        self.seen += 1;
        self.tally.denied += 1;
    }

    /// A request for so many tokens was denied, which the bucket counts.
    pub(crate) fn heard_of(&mut self, refused: u32) {
        self.denied_cost = self.denied_cost.max(refused);
    }

    /// Books the decisions of a key that lives on an outage policy.
    pub(crate) fn count(&mut self, now: Timestamp) {
        self.collect(now, true);
    }

    /// Whether the store's refusal of the key is to be named now: once in a while.
    pub(crate) fn is_to_be_named(&mut self, now: Timestamp) -> bool {
        let named = now >= self.named_until;
        if named {
            self.named_until = now.plus_micros(NAMED_US);
        }
        named
    }

    /// Counts a record that was found to be `lost`; returns how many were.
    pub(crate) fn lose_record(&mut self, lost: bool) -> u32 {
        self.lost_records += u32::from(lost);
        self.lost_records
    }

    /// Decisions booked since the last time, for the metrics.
    pub(crate) fn take_tally(&mut self) -> Tally {
        std::mem::take(&mut self.tally)
    }

    /// The limit's number.
    pub(crate) fn limit(&self) -> u32 {
        self.bucket.limit()
    }

    /// Whether there is nothing that the store must hear about.
    pub(crate) fn is_settled(&self) -> bool {
        self.held.depth == 0 && self.is_settled_but_for_depth()
    }

    fn is_settled_but_for_depth(&self) -> bool {
        self.unsent == Unsent::default()
            && self.held.rate == 0
            && self.held.outstanding == 0
            && self.policy.is_none()
            && self.waiters.is_empty()
    }

    /// Whether the key can leave the books at `now`: nothing held, owed or expected. If so, its
    /// bucket is told when it will be full.
    pub(crate) fn try_close(&mut self, now: Timestamp, terms: &Terms) -> bool {
        let quiet = |account: &Self| {
            let quiet_us = now.micros_since(account.last_arrival);
            account.is_done_with() || quiet_us >= account.linger_us(terms)
        };
        if !quiet(self) || !self.is_settled() {
            return false;
        }
        self.collect(now, false);
        if !quiet(self) || self.credit_given < terms.credit.known {
            return false;
        }
        let missing = terms.scale.burst - self.estimate(now, terms).unwrap_or(0);
        let full_at = now.plus_micros(terms.scale.micros_for(missing));
        self.bucket.try_close_account(full_at, self.is_seen_once())
    }

    /// Whether the key of a node that leaves can leave the books. Depth that is kept ends with its epoch.
    pub(crate) fn try_leave(&mut self, now: Timestamp) -> bool {
        self.collect(now, false);
        let told = self.held.depth == self.kept_depth && self.is_settled_but_for_depth();
        told && self.bucket.try_close_account(Timestamp::NEVER, self.is_seen_once())
    }

    // ---- what is known -----------------------------------------------------------------------

    /// The store's level at `now` by what is known here, in units, if nobody else spends.
    fn estimate(&self, now: Timestamp, terms: &Terms) -> Option<i64> {
        self.view.map(|view| {
            let rate = (terms.scale.rate - view.leased).max(0);
            let flowed = i128::from(rate) * i128::from(now.micros_since(view.at));
            (i128::from(view.level) + flowed).min(i128::from(terms.scale.burst)) as i64
        })
    }

    fn is_plentiful(&self, now: Timestamp, terms: &Terms) -> bool {
        self.estimate(now, terms).is_some_and(|level| level > terms.scale.burst / 2)
    }

    /// Whether the store's level and what this node holds of it are plenty together.
    fn is_ample(&self, now: Timestamp, terms: &Terms) -> bool {
        self.with_own(now, terms) > terms.scale.burst / 2
    }

    /// The store's level and what this node holds of it, in units.
    fn with_own(&self, now: Timestamp, terms: &Terms) -> i64 {
        let tokens = i64::from(self.bucket.peek(now, terms.scale.token));
        let own = tokens.saturating_mul(terms.scale.token);
        let level = self.estimate(now, terms).unwrap_or(terms.scale.burst);
        level.saturating_add(own)
    }

    /// Whether the store had next to nothing to give when it spoke last.
    fn is_scarce(&self, terms: &Terms) -> bool {
        self.view.is_some_and(|view| view.level < terms.scale.burst / 20)
    }

    /// Tokens pending or to be reported.
    pub(crate) fn pending(&self) -> u64 {
        let unsent = self.unsent.spent + self.unsent.debt + self.unsent.allowed;
        unsent as u64 + self.spilled + self.bucket.pending()
    }

    /// What is leased.
    #[cfg(feature = "sim")]
    pub(crate) fn held(&self) -> Held {
        self.held
    }

    /// Tokens leased, by depth.
    pub(crate) fn leased_depth(&self) -> i64 {
        self.held.depth
    }

    /// When the lease ends, if there is one that the outage policy has not replaced.
    pub(crate) fn lease_ends(&self) -> Option<Timestamp> {
        let holds = self.held.rate > 0 || self.held.depth > 0;
        (holds && self.policy.is_none() && self.ends > Timestamp::ZERO).then_some(self.ends)
    }

    // ---- reporting ---------------------------------------------------------------------------

    /// Makes the key's entry for a batch: books what was spent, gives back what is not needed,
    /// and asks for what is. What is given back leaves the bucket before the batch is sent.
    pub(crate) fn report(
        &mut self,
        limit: &Arc<str>,
        terms: &Terms,
        now: Timestamp,
        leaving: bool,
    ) -> Entry {
        let unit = terms.scale.token;
        self.bucket.peek(now, unit);
        // Nothing more can be sent until the answer is here.
        self.collect(now, true);
        self.observe_demand(now, terms);
        let claim = self.estimate(now, terms);
        let need = if leaving { 0 } else { self.need(now, terms) };
        let (per_us, hot) = self.wanted_per_us(now, terms);
        let (demand, hot) = ((per_us * unit as f64) as i64, hot && !leaving);
        let back = self.give_back(terms, now, need, if hot { demand } else { 0 });
        let tokens = self.bucket.peek(now, unit);
        if self.restore {
            self.held.outstanding = self.most_held(tokens);
        }
        let unsent = std::mem::take(&mut self.unsent);
        self.asked = self.waiters.len();
        let needed = self.waiters.iter().map(|waiter| i64::from(waiter.cost)).sum();
        self.probe_at = Timestamp::NEVER;
        self.in_stored_units(Entry {
            limit: limit.clone(),
            key: self.key.clone(),
            scale: terms.scale,
            version: i64::from(terms.version),
            epoch_us: terms.epoch_us as i64,
            spent: unsent.spent,
            debt: unsent.debt,
            allowed: unsent.allowed,
            taken: unsent.taken,
            returned: if self.restore { 0 } else { back.units },
            lost: if self.restore { 0 } else { back.lost },
            back_rate: back.rate,
            back_depth: back.depth,
            held: self.held,
            demand: if leaving { 0 } else { demand.min(4 * terms.scale.burst) },
            needed,
            want: (need - i64::from(tokens)).max(0),
            want_rate: if hot { demand } else { 0 },
            restore: self.restore,
            claim,
        })
    }

    /// The batch with this entry was never applied: its contents are to be reported anew.
    pub(crate) fn revoke(&mut self, entry: &Entry) {
        let entry = self.in_own_units(entry);
        self.take_back(&entry);
        // The store that was lost still had it leased to this node, and so has the next.
        self.held.rate += entry.back_rate;
        self.held.depth += entry.back_depth;
        self.kept_depth += entry.back_depth;
    }

    /// The store is to be told at once what this node knows of the key, which it has lost.
    pub(crate) fn register_anew(&mut self, now: Timestamp) {
        (self.restore, self.is_registering) = (true, true);
        self.due = now;
    }

    fn take_back(&mut self, entry: &Entry) {
        self.asked = 0;
        self.unsent.spent += entry.spent;
        self.unsent.debt += entry.debt;
        self.unsent.allowed += entry.allowed;
        self.unsent.taken += entry.taken;
        self.lost += entry.returned + entry.lost;
    }

    // ---- the answer --------------------------------------------------------------------------

    /// Adds what the store gave to what is held. `first_sent` is when the batch was first sent.
    pub(crate) fn install(
        &mut self,
        given: &Given,
        entry: &Entry,
        first_sent: Timestamp,
        now: Timestamp,
        terms: &Terms,
    ) -> Installed {
        let unit = terms.scale.token;
        self.with_outstanding = if given.withheld == Withheld::Nothing { given.level } else { 0 };
        if given.rate > 0 {
            // A node spends on credit or ahead of its refill, never both.
            self.absorb(now, true, |_, _| 0);
        } else {
            self.collect(now, true);
        }
        let installed = self.drift(given, entry, now, terms);
        self.observe_growth(given, entry, now, terms);
        let kept = if given.void { Held::default() } else { entry.held };
        if given.void {
            // The store counted all that was lent as spent.
            self.unsent.allowed += std::mem::take(&mut self.unsent.spent);
            self.kept_depth = 0;
        }
        self.held = Held {
            rate: kept.rate + given.rate,
            depth: kept.depth + given.depth,
            outstanding: self.outstanding(given, entry) + given.tokens * unit,
            stamp_us: given.stamp_us,
            demand: entry.demand,
            tag: given.tag,
        };
        self.is_registering &= given.withheld != Withheld::Nothing;
        if entry.held.rate == 0 {
            // What was spent ahead has been taken off the level.
            self.stash = self.stash.max(0);
        }
        let life_us = given.life_us as u64;
        self.ends = first_sent
            .plus_micros(life_us - life_us / CLOCK_ERROR_DIVISOR)
            .minus_micros(STALL_MAX_US);
        if is_weak(Weakness::LeasesNeverEnd) {
            self.ends = now.plus_micros(u64::from(u32::MAX) * 1000);
        }
        self.view = Some(View { level: given.available, leased: given.leased, at: now });
        self.owes &= given.available < 0 || self.unsent.debt > 0;
        self.recall = given.recall;
        self.restore = false;
        // The cached time of decisions is behind `now`: credit that is there must not wait for it.
        let credit_from = match self.token_in_us(given, terms) {
            0 => Timestamp::ZERO,
            token_in_us => now.plus_micros(token_in_us),
        };
        self.bucket.set_view(terms.scale.tokens(given.available), now, credit_from);
        if self.policy.is_some() {
            // The key goes on with its policy until the store tells since when it is back.
            self.ends = Timestamp::ZERO;
            self.lost = (self.held.outstanding - self.unsent.spent * unit).max(0);
        } else if self.ends > now {
            let under_way = if is_weak(Weakness::RepliesOverwrite) { self.unsent.spent } else { 0 };
            let lease = self.lease_terms(self.low(now, terms), self.ahead(terms));
            let there = self.amend(now, lease, given.tokens + under_way);
            // The store cannot know what has flowed in since the batch was first sent.
            let flowed = kept.rate.saturating_mul(now.micros_since(first_sent) as i64);
            let most = self.held.outstanding.saturating_add(flowed);
            let there = if there > most { self.forgo(there - most, lease, now) } else { there };
            self.lost = (self.held.outstanding - there).max(0);
        } else {
            self.lost = (self.held.outstanding - self.unsent.spent * unit).max(0);
        }
        if self.bucket.has_overflowed() {
            // What is on its way here would look as if it were lost.
            self.lost = 0;
        }
        // What may be gone is not to be spent on credit either.
        let credit =
            if given.withheld == Withheld::TokensAndCredit { 0 } else { self.credit(terms) };
        self.judge_early(given, entry, now, terms);
        // While asking early does not help before the next report is due anyway, not to be told
        // spares the decisions the telling.
        let muted = self.early.not_before() >= now.plus_micros(terms.tick_us);
        self.answer_asked(given, now, terms);
        // First credit that is left stays while the store has plenty, as far as the nodes that there are now
        // allow; it is not renewed.
        let keeps_first = given.withheld == Withheld::Nothing
            && self.held.rate == 0
            && self.is_plentiful(now, terms);
        self.absorb(now, muted, |debt, left| {
            let renewed = (credit - debt).max(0);
            let first = i64::from(left).min(i64::from(terms.credit.first) - debt);
            (if keeps_first { renewed.max(first) } else { renewed }) as u32
        });
        self.schedule(given, entry, now, terms);
        self.plan_probe(now, terms);
        installed
    }

    /// Applies a lease to the bucket, with `tokens` and what is stashed. Returns the units that the
    /// node holds then, or spent and has not reported.
    fn amend(&mut self, now: Timestamp, lease: Lease, tokens: i64) -> i64 {
        let amended = self.bucket.amend(now, lease, tokens, self.stash, self.scale.token);
        self.stash = amended.remainder;
        let pending = amended.pending + self.spilled;
        let spent = self.unsent.spent.saturating_add_unsigned(pending);
        amended.units.saturating_add(spent.saturating_mul(self.scale.token))
    }

    /// Gives up units of the lease that the store has not lent: its clock stood still for some of the time in
    /// which they flowed in. What has been spent of them is to flow in first. Returns what `amend` does.
    fn forgo(&mut self, units: i64, lease: Lease, now: Timestamp) -> i64 {
        let tokens = self.bucket.peek(now, self.scale.token);
        let kept = i64::from(tokens)
            .saturating_sub((units as u64).div_ceil(self.scale.token as u64) as i64);
        let withdrawn = self.bucket.withdraw(kept.max(0) as u32);
        self.stash += i64::from(withdrawn) * self.scale.token - units;
        self.amend(now, lease, 0)
    }

    fn low(&self, now: Timestamp, terms: &Terms) -> u32 {
        if self.is_scarce(terms) {
            0
        } else if self.is_plentiful(now, terms) {
            self.demand.over(terms.tick_us + self.round_trip_us).ceil() as u32
        } else {
            let under_way = self.demand.over(self.round_trip_us).ceil() as u32;
            under_way.max((self.need(now, terms) / 2) as u32)
        }
    }

    fn lease_terms(&self, low: u32, ahead: u8) -> Lease {
        let depth = self.held.depth - self.kept_depth;
        let error = (self.held.rate as u64).div_ceil(CLOCK_ERROR_DIVISOR) as i64;
        Lease {
            rate: self.held.rate - error,
            depth: depth.clamp(0, i64::from(MAX_TOKENS)) as u32,
            ends: self.ends,
            low,
            overdraw: ahead,
            is_policy: false,
        }
    }

    fn drift(&self, given: &Given, entry: &Entry, now: Timestamp, terms: &Terms) -> Installed {
        let unit = terms.scale.token;
        let before = given.available + given.tokens * unit;
        let estimate = self.estimate(now, terms);
        Installed {
            drift: estimate.map(|level| {
                (level + entry.returned - entry.debt * unit).min(terms.scale.burst) - before
            }),
            age_us: self.view.map_or(0, |view| now.micros_since(view.at)),
        }
    }
}
