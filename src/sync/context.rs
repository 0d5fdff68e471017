//! What the lanes of one node share: its limits, the counts of nodes, and the way out.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;

use super::account::{DecisionCounts, Paces, REFUSAL_EVENTS_US, ResetOutcome, definition};
use super::event::Event;
use super::excess::{ExcessBooks, Known, LaneTrouble, Turnover};
use super::flood::Flood;
use super::message::{Entry, Grant, InstanceId, Request};
use super::nodes::Nodes;
use super::rng::Rng;
use crate::bound::{Excess, Incidents};
use crate::bucket::LimitCounts;
use crate::error::StoreError;
use crate::limit::{Credit, LimitInfo, Mode, OutagePolicy, Terms};
use crate::quota::Scale;
use crate::time::Timestamp;

/// So many windows that end at once can be counted in the margin of 2 ms before their end.
const WINDOWS_COUNTED_MAX: u32 = 1000;

/// Where the account of a key is: the lane, and the slot there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccountId {
    pub(crate) lane: u32,
    pub(crate) slot: usize,
}

/// What an engine wants done.
#[derive(Debug)]
pub(crate) enum Output {
    /// Send this batch to the store and hand in the outcome. The lane's attempts have numbers of their own.
    Send { lane: u32, attempt: u64, request: Arc<Request> },
    /// The answer to a caller who waited.
    Decided { ticket: u64, allowed: bool, sure: bool },
    /// What became of a caller's reset.
    Reset { ticket: u64, outcome: ResetOutcome },
    /// Keys of the limit without an account have this credit from now on.
    Credit { limit: u32, credit: Credit },
    /// Hand this to the listeners.
    Event(Event),
}

/// A limit, by its own numbers and by those of its plans.
#[derive(Debug)]
pub(crate) struct LimitConfig {
    pub(crate) name: Arc<str>,
    pub(crate) terms: Terms,
    pub(crate) plans: Vec<Terms>,
}

/// A limit, as the engine keeps it.
#[derive(Debug)]
pub(crate) struct LimitBooks {
    pub(crate) name: Arc<str>,
    pub(crate) terms: Terms,
    /// Those of its plans.
    plans: Vec<Terms>,
    /// Those that it and its plans had before updates: leases of them may live, and callers may hold plans that are gone.
    earlier: Vec<Terms>,
    /// Quotas that overrides have given its keys.
    pub(crate) by_override: Vec<&'static LimitInfo>,
    /// The nodes that have it.
    pub(crate) nodes: Nodes,
    pub(crate) turnover: Turnover,
    pub(crate) counts: DecisionCounts,
    pub(crate) excess: ExcessBooks,
    /// Times that one key was reset on this node, at most.
    pub(crate) resets: u32,
    pub(crate) paces: Paces,
    /// The newest quota that the store was seen to hold, with its version, if it is newer than the limit's own.
    pub(crate) newest: Option<(i64, Scale)>,
    /// Decisions about keys for which there was no room.
    overflowed: u64,
    /// Keys of the limit lived on its outage policy when that was looked at last.
    pub(crate) on_policy: bool,
    /// An event has said that nodes have no credit.
    missing_credit_said: bool,
    /// When the next event may name a quota mismatch.
    mismatch_from: Timestamp,
}

impl LimitBooks {
    pub(crate) fn new(limit: LimitConfig, nodes: Nodes) -> Self {
        let LimitConfig { name, terms, plans } = limit;
        Self {
            name,
            terms,
            plans,
            earlier: Vec::new(),
            by_override: Vec::new(),
            nodes,
            turnover: Turnover::default(),
            counts: DecisionCounts::default(),
            excess: ExcessBooks::default(),
            resets: 0,
            paces: Paces::default(),
            newest: None,
            overflowed: 0,
            on_policy: false,
            missing_credit_said: false,
            mismatch_from: Timestamp::ZERO,
        }
    }

    /// Whether its keys may come under another quota.
    pub(crate) fn has_plans(&self) -> bool {
        !(self.plans.is_empty() && self.by_override.is_empty() && self.earlier.is_empty())
    }

    /// The limit has other terms from now on.
    pub(crate) fn update(&mut self, terms: &Terms, plans: Vec<Terms>) {
        let credit = self.terms.credit;
        let before = std::mem::replace(&mut self.terms, Terms { credit, ..*terms });
        for before in std::mem::replace(&mut self.plans, plans).into_iter().chain([before]) {
            let is_known = |known: &Terms| known.stored_scale == before.stored_scale;
            if !self.earlier.iter().any(is_known) {
                self.earlier.push(before);
            }
        }
    }

    /// Adds what was counted of its decisions beside what its buckets count.
    pub(crate) fn count(&mut self, counts: LimitCounts) {
        let LimitCounts { allowed, unsure, denied, denied_surplus, overflowed } = counts;
        self.overflowed += overflowed;
        self.counts.merge(DecisionCounts { allowed, denied, unsure, denied_surplus });
    }

    /// Decisions counted since the last time; `None` if there were none.
    pub(crate) fn take_decisions(&mut self) -> Option<Event> {
        let DecisionCounts { allowed, denied, unsure, denied_surplus } =
            std::mem::take(&mut self.counts);
        // The surplus of denials that no report has collected yet is left for the next time.
        let surplus = denied_surplus.min(denied);
        self.counts.denied_surplus = denied_surplus - surplus;
        let denied = denied - surplus;
        let overflowed = std::mem::take(&mut self.overflowed);
        let limit = self.name.clone();
        (allowed + denied + unsure + overflowed > 0).then_some(Event::Decisions {
            limit,
            allowed,
            denied,
            unsure,
            overflowed,
            is_shadow: false,
            is_removed: false,
        })
    }

    /// Whether nodes share it.
    pub(crate) fn is_shared(&self) -> bool {
        self.terms.mode == Mode::Hybrid
    }
}

/// How long things take, in microseconds.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_field_names, reason = "names of numbers end in their units")]
pub(crate) struct Timings {
    /// A lane waits this long for what nodes know of a lost record.
    pub(crate) recovery_us: u64,
    /// The longest life of a lease.
    pub(crate) lease_us: u64,
    /// A silence beyond this is an outage.
    pub(crate) silence_us: u64,
    /// How long an exchange may take, and the longest wait before the next attempt.
    pub(crate) retry_us: u64,
}

/// What the lanes of one node share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) limits: Vec<LimitBooks>,
    pub(crate) lanes: u32,
    pub(crate) timings: Timings,
    pub(crate) rng: Rng,
    pub(crate) outputs: VecDeque<Output>,
    /// Where the accounts of all lanes are, by the numbers that their buckets have.
    pub(crate) accounts: Slab<AccountId>,
    flood: Flood,
    node_counts: NodeCounts,
    /// What went wrong, as far as this node knows.
    pub(crate) known: Known,
    /// Losses of memory that lanes have found.
    pub(crate) losses: u64,
    /// No lane could be reached when that was looked at last.
    pub(crate) all_down: bool,
    /// The lane that asks most often whether the store is back, for all that wait for it.
    pub(crate) prober: Option<u32>,
    /// Windows that were counted by one reading of the clock.
    windows_counted: (Timestamp, u32),
}

/// What the store has counted of the nodes, whatever limits they have.
#[derive(Debug)]
struct NodeCounts {
    /// The last count of each lane.
    by_lane: Vec<Option<i64>>,
    /// The highest count has changed: the nodes of each limit are to be counted anew.
    has_changed: bool,
    /// The counts of all limits have stood once. One that is added later does not make joins of nodes unseen.
    have_stood: bool,
}

impl Context {
    /// Whether another key's window can be counted before it ends. The clock was read at `now`, and each count takes time.
    pub(crate) fn counts_window_in_time(&mut self, now: Timestamp) -> bool {
        if self.windows_counted.0 != now {
            self.windows_counted = (now, 0);
        }
        self.windows_counted.1 += 1;
        self.windows_counted.1 <= WINDOWS_COUNTED_MAX
    }

    pub(crate) fn new(
        limits: Vec<LimitBooks>,
        lanes: u32,
        timings: Timings,
        seed: u64,
        now: Timestamp,
    ) -> Self {
        let by_lane = vec![None; lanes as usize];
        let mut context = Self {
            limits,
            lanes,
            timings,
            rng: Rng::new(seed),
            outputs: VecDeque::new(),
            accounts: Slab::new(),
            flood: Flood::default(),
            node_counts: NodeCounts { by_lane, has_changed: false, have_stood: false },
            known: Known::default(),
            losses: 0,
            all_down: false,
            prober: None,
            windows_counted: (Timestamp::ZERO, 0),
        };
        context.set_credit(now);
        context
    }

    pub(crate) fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    /// Whether no more accounts are opened than usual; counts one that is opened at `now`.
    pub(crate) fn expects_newcomer(&mut self, now: Timestamp) -> bool {
        self.flood.admit(now)
    }

    // ---- nodes -------------------------------------------------------------------------------

    /// The number of nodes that share a limit.
    pub(crate) fn sharing(&self, limit: u32, now: Timestamp) -> i64 {
        let limit = &self.limits[limit as usize];
        limit.nodes.sharing(limit.terms.scale.fill_us(), now)
    }

    /// The number of nodes that share a limit in an outage.
    pub(crate) fn sharing_in_outage(&self, limit: u32, now: Timestamp) -> i64 {
        let limit = &self.limits[limit as usize];
        limit.nodes.sharing_in_outage(limit.terms.scale.fill_us(), now)
    }

    /// The limits that nodes share.
    fn shared(&self) -> impl Iterator<Item = &LimitBooks> {
        self.limits.iter().filter(|limit| limit.is_shared())
    }

    /// Their names.
    pub(crate) fn shared_limits(&self) -> impl Iterator<Item = &Arc<str>> {
        self.shared().map(|limit| &limit.name)
    }

    /// The most nodes that a lane has counted last, 0 before one has.
    pub(crate) fn alive(&self) -> i64 {
        self.node_counts.by_lane.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Takes the count of nodes from a lane's reply.
    pub(crate) fn counted(&mut self, lane: u32, nodes: i64, now: Timestamp) {
        self.node_counts.by_lane[lane as usize] = Some(nodes);
        let all = self.alive();
        let count = u32::try_from(all).unwrap_or(u32::MAX);
        let stood = self.shared().all(|limit| limit.nodes.have_stood());
        self.node_counts.have_stood |= stood;
        if !self.known.nodes.count(count, self.node_counts.have_stood) {
            return;
        }
        self.node_counts.has_changed = true;
        let mut changed = false;
        for limit in &mut self.limits {
            changed |= limit.nodes.are_among(all);
        }
        if changed {
            self.set_credit(now);
        }
        self.raise_bounds(LaneTrouble::default());
    }

    /// Whether the number of nodes has changed since the last time.
    pub(crate) fn take_nodes_changed(&mut self) -> bool {
        std::mem::take(&mut self.node_counts.has_changed)
    }

    /// Takes the counts of nodes that have each shared limit, in the limits' order from number `first` on. Their
    /// lane has counted `all` nodes, whatever limits they have.
    pub(crate) fn counted_of_limits(
        &mut self,
        first: usize,
        counts: &[i64],
        all: i64,
        now: Timestamp,
    ) {
        let alive = self.alive();
        let mut changed = false;
        let shared = self.limits.iter_mut().filter(|limit| limit.is_shared()).skip(first);
        for (limit, nodes) in shared.zip(counts) {
            let nodes = (*nodes).max(1);
            limit.nodes.counted(nodes, all, now);
            limit.nodes.are_among(alive);
            let count = u32::try_from(nodes).unwrap_or(u32::MAX);
            changed |= limit.turnover.count(count, limit.nodes.have_stood());
        }
        self.set_credit(now);
        self.report_missing_credit();
        if changed {
            self.raise_bounds(LaneTrouble::default());
        }
    }

    /// Whether there is a shared limit whose nodes have been neither counted nor configured: then counts are taken of a
    /// lane too that still waits for some of its nodes.
    pub(crate) fn is_any_count_missing(&self) -> bool {
        self.shared().any(|limit| limit.nodes.unknown())
    }

    /// When the first count that has not stood yet will have: the store is to be asked again then.
    pub(crate) fn counts_stand_from(&self) -> Option<Timestamp> {
        self.shared().filter_map(|limit| limit.nodes.stands_from()).min()
    }

    /// A lane was found to have lost its memory.
    pub(crate) fn memory_lost(&mut self, now: Timestamp) {
        self.losses += 1;
        for limit in &mut self.limits {
            limit.nodes.memory_lost(now);
        }
        self.set_credit(now);
    }

    /// Sets each limit's credit according to the number of nodes.
    pub(crate) fn set_credit(&mut self, now: Timestamp) {
        for (index, limit) in (0..).zip(&mut self.limits) {
            if limit.terms.mode != Mode::Hybrid {
                continue;
            }
            // A closed limit admits nothing while the store is away, new keys included.
            let closed =
                limit.on_policy && limit.terms.outage == OutagePolicy::Closed && self.all_down;
            let credit = if closed {
                Credit::NONE
            } else {
                limit.nodes.credit(&limit.terms.credit_rule, limit.terms.scale.fill_us(), now)
            };
            if std::mem::replace(&mut limit.terms.credit, credit) != credit {
                self.outputs.push_back(Output::Credit { limit: index, credit });
            }
        }
    }

    pub(crate) fn limit_name(&self, limit: u32) -> Arc<str> {
        self.limits[limit as usize].name.clone()
    }

    pub(crate) fn draw_instance(&mut self) -> InstanceId {
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        instance[8..].copy_from_slice(&self.rng.next().to_le_bytes());
        instance
    }

    /// The store refused one key of a batch.
    pub(crate) fn refused(&mut self, limit: u32, entry: &Entry, grant: &Grant, now: Timestamp) {
        let event = match *grant {
            Grant::OtherQuota { version, scale } => {
                let from = &mut self.limits[limit as usize].mismatch_from;
                if now < *from {
                    return;
                }
                *from = now.plus_micros(REFUSAL_EVENTS_US);
                Event::QuotaMismatch {
                    limit: entry.limit.clone(),
                    configured_version: definition(entry.version),
                    stored_version: definition(version),
                    stored_burst: scale.burst / scale.token,
                    stored_per_second: scale.rate as f64 * 1e6 / scale.token as f64,
                }
            }
            Grant::Foreign | Grant::Given(_) => Event::ForeignKey {
                error: StoreError::ForeignKey {
                    key: format!("{}:{}", entry.limit, String::from_utf8_lossy(&entry.key)),
                    found: "value".to_owned(),
                },
            },
        };
        self.event(event);
    }

    /// The store keeps a key under another plan than callers here name, and this node follows it.
    pub(crate) fn follows_other_plan(
        &mut self,
        limit: u32,
        named: Option<&str>,
        stored: Scale,
        now: Timestamp,
    ) {
        let books = &mut self.limits[limit as usize];
        if now < books.mismatch_from {
            return;
        }
        books.mismatch_from = now.plus_micros(REFUSAL_EVENTS_US);
        let event = Event::PlansDiffer {
            limit: books.name.clone(),
            named: named.map(Into::into),
            stored_burst: stored.burst / stored.token,
            stored_per_second: stored.rate as f64 * 1e6 / stored.token as f64,
        };
        self.event(event);
    }

    /// A reply says that the level of a key is `level`, in units.
    pub(crate) fn saw_level(&mut self, limit: u32, level: i64) {
        self.limits[limit as usize].excess.saw(level);
    }

    /// Brings each limit's bound up to date with what has gone wrong by now.
    pub(crate) fn raise_bounds(&mut self, trouble: LaneTrouble) {
        for limit in &mut self.limits {
            let shared_by = limit.nodes.alive().map(|nodes| nodes as u32);
            let nodes = if limit.terms.mode == Mode::Hybrid { shared_by } else { Some(1) };
            if let Some(nodes) = nodes {
                let incidents = self.known.incidents(limit.turnover, nodes, trouble);
                let incidents = Incidents { resets: limit.resets, ..incidents };
                let by_override = limit.by_override.iter().map(|info| &info.terms);
                let terms = limit.plans.iter().chain(&limit.earlier).chain([&limit.terms]);
                limit.excess.raise(terms.chain(by_override), nodes, &incidents);
            }
        }
    }

    /// What is known of each limit's excess, in the limits' order.
    pub(crate) fn excess(&self) -> Vec<Excess> {
        self.limits.iter().map(|limit| limit.excess.figures(&limit.terms)).collect()
    }

    /// Makes an event of each limit, once, if there are so many nodes that its accuracy leaves no node a token of
    /// credit.
    pub(crate) fn report_missing_credit(&mut self) {
        let mut events = Vec::new();
        for limit in &mut self.limits {
            let Some(nodes) = limit.nodes.alive().and_then(|nodes| u32::try_from(nodes).ok())
            else {
                continue;
            };
            let rule = &limit.terms.credit_rule;
            let wanted = rule.together.is_some() && rule.known > 0;
            let is_said = limit.missing_credit_said || limit.terms.mode != Mode::Hybrid;
            if wanted && !is_said && rule.at(Some(nodes)).first == 0 {
                limit.missing_credit_said = true;
                events.push(Event::NoCredit { limit: limit.name.clone(), nodes });
            }
        }
        for event in events {
            self.event(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    fn books(limit: &Limit) -> LimitBooks {
        let terms = limit.validate_hybrid(4).unwrap();
        let config = LimitConfig { name: "x".into(), terms, plans: Vec::new() };
        LimitBooks::new(config, Nodes::new(None, 100_000))
    }

    fn context(limit: &Limit) -> Context {
        let (recovery_us, lease_us) = (1_000_000, 2_000_000);
        let timings = Timings { recovery_us, lease_us, silence_us: 1_500_000, retry_us: 100_000 };
        Context::new(vec![books(limit)], 1, timings, 7, Timestamp::ZERO)
    }

    fn events(context: &mut Context) -> Vec<Event> {
        let outputs = context.outputs.drain(..);
        outputs
            .filter_map(|output| if let Output::Event(event) = output { Some(event) } else { None })
            .collect()
    }

    #[test]
    fn decisions_without_room_for_their_keys_are_counted_and_handed_out_once() {
        let mut books = books(&Limit::new("x", Quota::per_second(100)));
        assert!(books.take_decisions().is_none());
        for overflowed in [2, 3] {
            books.count(LimitCounts { overflowed, ..LimitCounts::default() });
        }
        let event = books.take_decisions();
        let Some(Event::Decisions { overflowed: 5, allowed: 0, .. }) = event else {
            panic!("{event:?}")
        };
        assert!(books.take_decisions().is_none());
    }

    #[test]
    fn limit_with_the_policy_closed_gives_no_credit_while_all_lanes_are_down() {
        for (outage, on_policy, all_down, is_given) in [
            (OutagePolicy::Closed, true, true, false),
            (OutagePolicy::Closed, true, false, true),
            (OutagePolicy::Closed, false, true, true),
            (OutagePolicy::Share, true, true, true),
        ] {
            let mut context = context(&Limit::new("x", Quota::per_second(100)).outage(outage));
            (context.limits[0].on_policy, context.all_down) = (on_policy, all_down);
            context.set_credit(Timestamp::ZERO);
            let is_any = context.limits[0].terms.credit != Credit::NONE;
            assert_eq!(is_any, is_given, "{outage:?}, {on_policy}, {all_down}");
        }
    }

    #[test]
    fn plan_of_other_nodes_is_named_in_tokens_and_once_a_minute() {
        let mut context = context(&Limit::new("x", Quota::per_second(100)));
        let other = books(&Limit::new("x", Quota::per_second(500).burst(700)));
        for (second, is_named) in [(1, true), (60, false), (61, true)] {
            let now = Timestamp::from_micros(1_000_000 * second);
            context.outputs.clear();
            context.follows_other_plan(0, Some("gold"), other.terms.stored_scale, now);
            let events = events(&mut context);
            assert_eq!(events.len(), usize::from(is_named), "{second}");
            if let Some(event) = events.first() {
                let Event::PlansDiffer { stored_burst: 700, stored_per_second, .. } = event else {
                    panic!("{event:?}")
                };
                assert!((stored_per_second - 500.0).abs() < 1e-9, "{stored_per_second}");
            }
        }
    }

    #[test]
    fn limit_whose_accuracy_leaves_no_credit_gives_one_event() {
        let accurate = || Limit::new("x", Quota::per_second(100)).accuracy(0.05);
        for (limit, nodes, told) in [
            (accurate(), 2, 0),
            (accurate(), 20, 1),
            (Limit::new("x", Quota::per_second(100)), 20, 0),
            (Limit::new("x", Quota::per_second(100)).credit(0), 20, 0),
        ] {
            let mut context = context(&limit);
            for _ in 0..2 {
                context.counted(0, nodes, Timestamp::ZERO);
                context.counted_of_limits(0, &[nodes], nodes, Timestamp::ZERO);
            }
            let missing = |event: &Event| matches!(event, Event::NoCredit { .. });
            assert_eq!(events(&mut context).iter().filter(|event| missing(event)).count(), told);
        }
    }

    #[test]
    fn counts_are_missing_of_shared_limits_whose_nodes_are_not_configured() {
        let mut context = context(&Limit::new("x", Quota::per_second(100)));
        assert!(context.is_any_count_missing());
        context.limits[0].nodes = Nodes::new(Some(4), 100_000);
        assert!(!context.is_any_count_missing());
    }

    #[test]
    fn quota_that_the_store_holds_is_named_in_tokens_and_once_a_minute() {
        let mut context = context(&Limit::new("x", Quota::per_second(100)));
        let stored = books(&Limit::new("x", Quota::per_second(500).burst(700))).terms.stored_scale;
        let grant = Grant::OtherQuota { version: 3 << 27, scale: stored };
        let entry = Entry::empty(context.limits[0].terms.stored_scale);
        for (second, is_named) in [(1, true), (60, false), (61, true)] {
            context.outputs.clear();
            context.refused(0, &entry, &grant, Timestamp::from_micros(1_000_000 * second));
            let events = events(&mut context);
            assert_eq!(events.len(), usize::from(is_named), "{second}");
            if let Some(event) = events.first() {
                let Event::QuotaMismatch { stored_version: 3, stored_burst: 700, .. } = event
                else {
                    panic!("{event:?}")
                };
            }
        }
    }

    #[test]
    fn keys_may_come_under_another_quota_once_a_limit_was_updated() {
        let mut books = books(&Limit::new("x", Quota::per_second(100)));
        assert!(!books.has_plans());
        let terms = Limit::new("x", Quota::per_second(200)).validate_hybrid(4).unwrap();
        books.update(&terms, Vec::new());
        assert!(books.has_plans(), "leases of the earlier one may live");
    }

    #[test]
    fn only_hybrid_limits_are_shared_by_leases() {
        let shared = books(&Limit::new("x", Quota::per_second(100)));
        assert!(shared.is_shared());
        let terms = Limit::new("x", Quota::per_second(100)).local().validate_local().unwrap();
        let config = LimitConfig { name: "x".into(), terms, plans: Vec::new() };
        assert!(!LimitBooks::new(config, Nodes::new(None, 100_000)).is_shared());
    }

    #[test]
    fn windows_that_count_as_in_time_are_bounded_at_each_reading_of_the_clock() {
        let mut context = context(&Limit::new("x", Quota::per_second(100)));
        for ms in [1, 2] {
            let now = Timestamp::from_micros(1_000 * ms);
            let in_time = (0..=WINDOWS_COUNTED_MAX).filter(|_| context.counts_window_in_time(now));
            assert_eq!(in_time.count(), WINDOWS_COUNTED_MAX as usize);
        }
    }
}
