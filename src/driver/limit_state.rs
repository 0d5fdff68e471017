//! The data plane of one limit, as the limiter, handles and the driver share it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crossbeam_utils::CachePadded;
use thread_local::ThreadLocal;

use super::clock::TimeSource;
use super::definition::{Definition, LimitParts};
use super::overrides::LimitOverrides;
use super::reset_counts::ResetCounts;
use super::resolved_plans::ResolvedPlans;
use super::slot_keys::SlotKeys;
use crate::algorithm::{Calendar, KeyRule, Rule, StateRule};
use crate::bound::Excess;
use crate::bucket::{
    Evictable, KeyBudget, KeyHasher, LeaseBucket, LimitCounts, LocalBucket, LogBucket, NewKey,
    OVERFLOW, Table, TableBucket, WindowBucket,
};
use crate::limit::{Credit, LimitInfo, Mode, OutagePolicy, QuotaOf, Terms};
use crate::quota::Scale;
use crate::time::{Clock, Timestamp};

/// Any place but that of keys for which there is no room.
const NO_PLACE: u32 = OVERFLOW + 1;
/// Threads whose counters are allocated when a limit is built.
const THREADS: usize = 64;

/// The data plane of one limit, as limiter and driver share it.
pub(crate) struct LimitState {
    /// The limit's place among the limiter's limits.
    pub(crate) index: u32,
    pub(crate) name: Arc<str>,
    /// As it was built: an update of the limit changes its quota, its credit and its version only.
    pub(crate) terms: Terms,
    definition: RwLock<Arc<Definition>>,
    /// An update has left it out: who holds it goes on.
    is_removed: AtomicBool,
    /// What decisions read the time from.
    pub(crate) clock: Clock,
    /// When that began, in microseconds since 1970.
    pub(crate) origin_us: u64,
    pub(crate) buckets: Buckets,
    /// Whether the limit is configured as exact, with a store or without: who asks has to await.
    pub(crate) needs_async: bool,
    /// What a node may spend on a new key before the store answers, in tokens; publishes nothing else.
    first_credit: AtomicU32,
    /// Decisions of an exact limit that the store did not make, since the last time.
    unsure: AtomicU64,
    /// Denials of costs above the maximum, of which no bucket was asked, since the last time.
    denied: AtomicU64,
    /// Nodes that share the limit, as far as they have been counted.
    nodes: AtomicU32,
    /// The store does not answer about slots: the outage policy decides.
    on_policy: AtomicBool,
    /// It did once.
    was_on_policy: AtomicBool,
    /// As it was told last.
    excess: Mutex<Excess>,
    /// What decisions look at before they look at the limit's rule.
    pub(crate) overrides: LimitOverrides,
    /// If the limit has a resolver of plans.
    resolved_plans: Option<ResolvedPlans>,
    pub(crate) resets: ResetCounts,
}

/// The buckets of a limit, by its mode and algorithm.
///
/// With a tag of its own: one that the compiler hides in a field takes each decision seven instructions to read.
#[allow(clippy::large_enum_variant, reason = "there is one for each limit")]
#[repr(u8)]
pub(crate) enum Buckets {
    Leased(Arc<Table<LeaseBucket>>),
    Alone(AloneBuckets),
}

/// The buckets of a limit that this node keeps alone, by its algorithm. The tag is as that of [`Buckets`].
#[allow(clippy::large_enum_variant, reason = "there is one for each limit")]
#[repr(u8)]
pub(crate) enum AloneBuckets {
    Turns(LocalBuckets<LocalBucket>),
    Windows(LocalBuckets<WindowBucket>),
    Logs(LocalBuckets<LogBucket>),
    /// A leaky bucket that nodes share: the slots that this one holds, and its share in an outage.
    Slots(SlotKeys, LocalBuckets<LocalBucket>),
}

/// Evaluates an expression with the table of a limit, whatever its buckets are.
macro_rules! with_table {
    ($buckets:expr, $table:ident => $do:expr) => {
        match $buckets {
            Buckets::Leased($table) => $do,
            Buckets::Alone(
                AloneBuckets::Turns(LocalBuckets { table: $table, .. })
                | AloneBuckets::Slots(_, LocalBuckets { table: $table, .. }),
            ) => $do,
            Buckets::Alone(AloneBuckets::Windows(LocalBuckets { table: $table, .. })) => $do,
            Buckets::Alone(AloneBuckets::Logs(LocalBuckets { table: $table, .. })) => $do,
        }
    };
}

impl Buckets {
    /// The place of `key`, which is added if it is new. It is not given to another key until it is unpinned.
    pub(crate) fn pin(&self, key: &[u8], new: NewKey) -> u32 {
        with_table!(self, table => table.pin(key, new))
    }

    /// Counts a decision that no bucket made.
    pub(crate) fn count(&self, is_allowed: bool, cost: u32) {
        match self {
            Self::Leased(_) => {}
            Self::Alone(AloneBuckets::Turns(local) | AloneBuckets::Slots(_, local)) => {
                local.count(NO_PLACE, is_allowed, cost);
            }
            Self::Alone(AloneBuckets::Windows(local)) => local.count(NO_PLACE, is_allowed, cost),
            Self::Alone(AloneBuckets::Logs(local)) => local.count(NO_PLACE, is_allowed, cost),
        }
    }
}

/// The buckets of a limit that this node keeps alone, and its decisions.
#[derive(Debug)]
pub(crate) struct LocalBuckets<B: TableBucket<Rule: StateRule>> {
    pub(crate) table: Table<B>,
    /// That of the limit; of windows and logs, all plans have the same times.
    pub(crate) rule: &'static B::Rule,
    /// Added to the node's time, in microseconds, so that windows begin at multiples of the period since 1970.
    offset_us: u64,
    decided: ThreadLocal<CachePadded<ThreadDecisions>>,
    /// What was taken of all threads' decisions.
    taken: ThreadDecisions,
}

/// Decisions of one thread. Only that thread writes them, so that no decision waits for another thread's cache line.
#[derive(Debug, Default)]
struct ThreadDecisions {
    allowed: AtomicU64,
    denied: AtomicU64,
}

impl<B: TableBucket<Rule: StateRule>> LocalBuckets<B> {
    fn new(table: Table<B>, rule: &'static B::Rule, offset_us: u64) -> Self {
        Self {
            table,
            rule,
            offset_us,
            decided: ThreadLocal::with_capacity(THREADS),
            taken: ThreadDecisions::default(),
        }
    }

    /// The rule of the limit or of a plan of it.
    #[inline(always)]
    pub(crate) fn rule_of(&self, info: &'static LimitInfo) -> &'static B::Rule {
        info.here.as_ref().and_then(B::Rule::of).unwrap_or(self.rule)
    }

    /// Counts a decision about `cost` tokens. A cost of 0 is none.
    #[inline(always)]
    pub(crate) fn count(&self, place: u32, is_allowed: bool, cost: u32) {
        if cost == 0 {
            return;
        }
        if place == OVERFLOW {
            self.table.count_overflow();
        }
        let decided = self.decided.get_or_default();
        let count = if is_allowed { &decided.allowed } else { &decided.denied };
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn evict(&self, places: u32, now: Timestamp, what: Evictable) -> usize {
        self.table.evict(places, now, self.rule, what)
    }

    /// Decisions since the last time. One thread calls this.
    pub(super) fn take_counts(&self) -> LimitCounts {
        let sum = |of: fn(&ThreadDecisions) -> &AtomicU64| -> u64 {
            self.decided.iter().map(|one| of(one).load(Ordering::Relaxed)).sum()
        };
        let (allowed, denied) = (sum(|one| &one.allowed), sum(|one| &one.denied));
        LimitCounts {
            allowed: allowed - self.taken.allowed.swap(allowed, Ordering::Relaxed),
            denied: denied - self.taken.denied.swap(denied, Ordering::Relaxed),
            ..self.table.take_counts()
        }
    }
}

impl fmt::Debug for LimitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitState").field("name", &self.name).finish_non_exhaustive()
    }
}

impl LimitState {
    /// `None` if there is no memory for so many keys.
    pub(crate) fn new(
        index: u32,
        parts: &LimitParts<'_>,
        hasher: KeyHasher,
        budget: &Arc<KeyBudget>,
        time: &TimeSource,
    ) -> Option<Self> {
        let LimitParts { limit, terms, .. } = parts;
        let definition = parts.define(None, time.origin_us());
        let buckets = Self::buckets_of(index, definition.info, hasher, budget, time)?;
        let overrides = LimitOverrides::new(limit.switch);
        definition.set_looks_further(overrides.is_any(&definition));
        let first_credit = AtomicU32::new(terms.credit.first);
        let (clock, excess) = (time.cached(), Mutex::default());
        let needs_async = limit.mode == Mode::Exact;
        let (unsure, nodes) = (AtomicU64::new(0), AtomicU32::new(terms.credit_rule.uncounted));
        Some(Self {
            index,
            name: limit.name().into(),
            terms: *terms,
            definition: RwLock::new(Arc::new(definition)),
            is_removed: AtomicBool::new(false),
            clock,
            origin_us: time.origin_us(),
            buckets,
            needs_async,
            first_credit,
            unsure,
            denied: AtomicU64::new(0),
            nodes,
            on_policy: AtomicBool::new(false),
            was_on_policy: AtomicBool::new(false),
            excess,
            overrides,
            resolved_plans: None,
            resets: ResetCounts::default(),
        })
    }

    /// Empty tables. `None` if there is no memory for so many keys.
    fn buckets_of(
        index: u32,
        info: &'static LimitInfo,
        hasher: KeyHasher,
        budget: &Arc<KeyBudget>,
        time: &TimeSource,
    ) -> Option<Buckets> {
        let (budget, credit) = (budget.clone(), info.terms.credit.first);
        Some(match info.here.as_ref() {
            None => Buckets::Leased(Arc::new(Table::new(index, hasher, budget, credit)?)),
            Some(KeyRule::Turn(rule)) => {
                let most = budget.max();
                let local = LocalBuckets::new(Table::new(index, hasher, budget, 0)?, rule, 0);
                Buckets::Alone(match (info.rule, info.terms.mode, info.key_rule.as_ref()) {
                    (Rule::LeakyBucket(_), Mode::Hybrid, Some(KeyRule::Turn(rule))) => {
                        AloneBuckets::Slots(SlotKeys::new(rule, most), local)
                    }
                    _ => AloneBuckets::Turns(local),
                })
            }
            Some(KeyRule::Window(rule)) => {
                let table = Table::new(index, hasher, budget, 0)?;
                // Calendar time is computed at each decision.
                let is_even = rule.calendar.is_none();
                let offset_us = if is_even { time.origin_us() % rule.period_us } else { 0 };
                let windows = LocalBuckets::new(table, rule, offset_us);
                Buckets::Alone(AloneBuckets::Windows(windows))
            }
            Some(KeyRule::Log(rule)) => {
                let logs = LocalBuckets::new(Table::new(index, hasher, budget, 0)?, rule, 0);
                Buckets::Alone(AloneBuckets::Logs(logs))
            }
        })
    }

    /// What the limit is at present.
    pub(crate) fn definition(&self) -> Arc<Definition> {
        self.definition.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts this definition in the place of the present one. One caller at a time.
    pub(crate) fn update(&self, parts: &LimitParts<'_>) {
        let next = parts.define(Some(&self.definition()), self.origin_us);
        let present = &mut *self.definition.write().unwrap_or_else(PoisonError::into_inner);
        next.set_looks_further(self.needs_further_look(&next));
        present.set_replaced();
        *present = Arc::new(next);
    }

    /// Whether an update has left it out.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_removed(&self, is_removed: bool) {
        self.is_removed.store(is_removed, Ordering::Relaxed);
    }

    /// Lets decisions look at the overrides that there are now.
    pub(super) fn notice_overrides(&self) {
        let definition = self.definition.read().unwrap_or_else(PoisonError::into_inner);
        definition.set_looks_further(self.needs_further_look(&definition));
    }

    fn needs_further_look(&self, definition: &Definition) -> bool {
        self.overrides.is_any(definition) || self.resolved_plans.is_some()
    }

    /// Lets decisions look at what a resolver names.
    pub(super) fn resolve_plans(&mut self, plans: ResolvedPlans) {
        self.resolved_plans = Some(plans);
        self.notice_overrides();
    }

    /// What a resolver named, if the limit has one.
    pub(crate) fn resolved_plans(&self) -> Option<&ResolvedPlans> {
        self.resolved_plans.as_ref()
    }

    /// Whether keys may have other plans than callers name.
    pub(crate) fn may_give_plans(&self) -> bool {
        self.resolved_plans.is_some() || self.overrides.may_give_plans()
    }

    /// The quota whose keys take longest to fill, of all that the limit has had.
    fn slowest(&self) -> Scale {
        let own = self.definition.read().unwrap_or_else(PoisonError::into_inner).slowest;
        let by_override = self.overrides.slowest();
        by_override.filter(|scale| scale.fill_us() > own.fill_us()).unwrap_or(own)
    }

    /// What may be spent on a key that is new or full before the store answers, in tokens. A key with a quota by override has no
    /// more than that quota allows.
    pub(crate) fn first_credit(&self, info: &LimitInfo) -> u32 {
        let credit = self.first_credit.load(Ordering::Relaxed);
        match info.of {
            QuotaOf::Override => credit.min(info.terms.credit_rule.at(Some(self.nodes())).first),
            QuotaOf::Limit | QuotaOf::Plan(_) => credit,
        }
    }

    pub(crate) fn set_credit(&self, credit: Credit) {
        self.first_credit.store(credit.first, Ordering::Relaxed);
        if let Buckets::Leased(table) = &self.buckets {
            table.set_credit_at_rest(credit.known);
        }
    }

    /// How many 64ths of what the limit could hold now are free.
    pub(super) fn free_64ths(&self) -> usize {
        with_table!(&self.buckets, table => table.free_64ths())
    }

    /// Evicts keys among the next `places`. Returns how many.
    pub(super) fn evict(&self, places: u32, now: Timestamp, what: Evictable) -> usize {
        match &self.buckets {
            Buckets::Leased(table) => table.evict(places, now, &self.slowest(), what),
            Buckets::Alone(AloneBuckets::Turns(local) | AloneBuckets::Slots(_, local)) => {
                local.evict(places, now, what)
            }
            Buckets::Alone(AloneBuckets::Windows(local)) => {
                local.evict(places, self.window_time(local, now), what)
            }
            Buckets::Alone(AloneBuckets::Logs(local)) => local.evict(places, now, what),
        }
    }

    /// The time that windows of this node live by.
    #[inline(always)]
    pub(crate) fn window_time(
        &self,
        local: &LocalBuckets<WindowBucket>,
        now: Timestamp,
    ) -> Timestamp {
        let calendar_time = |calendar: &Calendar| {
            Timestamp::from_micros(calendar.calendar_us(now.as_micros() + self.origin_us))
        };
        local.rule.calendar.map_or_else(|| now.plus_micros(local.offset_us), calendar_time)
    }

    /// Forgets marks of keys that must be full by now. Local keys have none.
    pub(super) fn forget_marks(&self, now: Timestamp) {
        if let Buckets::Leased(table) = &self.buckets {
            table.forget_marks(now, &self.slowest());
        }
    }

    /// Decisions since the last time that no bucket counts.
    pub(super) fn take_counts(&self) -> LimitCounts {
        let counts = match &self.buckets {
            Buckets::Leased(table) => table.take_counts(),
            Buckets::Alone(AloneBuckets::Turns(local) | AloneBuckets::Slots(_, local)) => {
                local.take_counts()
            }
            Buckets::Alone(AloneBuckets::Windows(local)) => local.take_counts(),
            Buckets::Alone(AloneBuckets::Logs(local)) => local.take_counts(),
        };
        let unsure = counts.unsure + self.unsure.swap(0, Ordering::Relaxed);
        let denied = counts.denied + self.denied.swap(0, Ordering::Relaxed);
        LimitCounts { unsure, denied, ..counts }
    }

    /// Counts a denial of a request that no bucket was asked about.
    pub(crate) fn count_denied(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a decision that the store should have made. A cost of 0 is none.
    pub(crate) fn count_unsure(&self, cost: u32) {
        self.unsure.fetch_add((cost > 0).into(), Ordering::Relaxed);
    }

    /// Nodes that share the limit.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    pub(super) fn set_nodes(&self, counted: Option<u32>) {
        if let Some(nodes) = counted {
            self.nodes.store(nodes, Ordering::Relaxed);
        }
    }

    /// Whether the outage policy decides about slots.
    pub(crate) fn is_on_policy(&self) -> bool {
        self.on_policy.load(Ordering::Relaxed)
    }

    pub(super) fn set_on_policy(&self, is_on_policy: bool) {
        self.on_policy.store(is_on_policy, Ordering::Relaxed);
        self.was_on_policy.fetch_or(is_on_policy, Ordering::Relaxed);
    }

    /// What is known of the limit's excess, where the outage policy may have decided instead of the store: then there is no
    /// bound, unless it denied.
    pub(super) fn with_policy(&self, excess: Excess) -> Excess {
        let was_on_policy = self.was_on_policy.load(Ordering::Relaxed);
        match self.terms.outage {
            OutagePolicy::Closed => excess,
            _ if was_on_policy => Excess { bound_tokens: Some(f64::INFINITY), ..excess },
            _ => excess,
        }
    }

    pub(crate) fn excess(&self) -> Excess {
        *self.excess.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_excess(&self, excess: Excess) {
        *self.excess.lock().unwrap_or_else(PoisonError::into_inner) = excess;
    }
}

/// A key whose bucket is pinned: its place is not given to another key.
pub(crate) struct PinnedKey {
    pub(crate) limit: Arc<LimitState>,
    pub(crate) place: u32,
    pub(crate) key: Arc<[u8]>,
}

impl Drop for PinnedKey {
    fn drop(&mut self) {
        with_table!(&self.limit.buckets, table => table.unpin(self.place));
    }
}

/// The key may be secret.
impl fmt::Debug for PinnedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedKey").field("place", &self.place).finish_non_exhaustive()
    }
}
