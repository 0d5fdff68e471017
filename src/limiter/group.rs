//! Several limits in one decision about one key.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::settle::Allowed;
use super::several::{ask_for_decision, decide_at_once};
use super::together::part::{Part, Patience, USUAL, fewer_left};
use super::{ActiveLimit, Limiter, Target};
use crate::bucket::{Found, LeaseBucket, Table, Verdict};
use crate::decision::Decision;
use crate::driver::Buckets;
use crate::error::{CheckError, ConfigError};
use crate::key::{Key, KeyName};
use crate::quota::Curve;
use crate::sync::Settlement;
use crate::time::Timestamp;

/// Several limits of a running limiter, for one key: a request is allowed if all of them allow it, and then spends from each.
/// Cheap to clone.
///
/// ```
/// use tidegate::{Limit, Limiter, Quota};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("second", Quota::per_second(10)).local())
///     .limit(Limit::new("day", Quota::per_day(3)).local())
///     .build()?;
/// let both = limiter.group(["second", "day"])?;
/// for _ in 0..3 {
///     assert!(both.check("user:42").is_allowed());
/// }
/// let denied = both.check("user:42");
/// assert_eq!((denied.is_denied(), denied.limit_name()), (true, "day"));
/// // Nothing was spent from the other one.
/// assert_eq!(limiter.limit("second")?.check_n("user:42", 0)?.remaining(), 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Group {
    /// In the limiter's order, which is the same for all who spend from several.
    limits: Arc<[ActiveLimit]>,
    /// The same limits, if all of them are leased; else none.
    leased: Arc<[LeasedLimit]>,
}

/// A limit that is leased, and its table, at hand for the fast path.
struct LeasedLimit {
    table: Arc<Table<LeaseBucket>>,
    limit: ActiveLimit,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.limits.iter().map(ActiveLimit::name)).finish()
    }
}

impl Limiter {
    /// The limits of these names, for requests of one key that are to fit all of them.
    ///
    /// # Errors
    ///
    /// Those of [`limit`](Self::limit) for each name; [`ConfigError::EmptyGroup`] if there is none, and
    /// [`ConfigError::RepeatedLimit`] if a name comes twice.
    pub fn group<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Group, ConfigError> {
        let limits = names.into_iter().map(|name| self.limit(name.as_ref()));
        Ok(Group::new(in_order(limits)?))
    }

    /// The same for limits in any mode, [exact](crate::Mode::Exact) ones included.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] for each name; [`ConfigError::EmptyGroup`] if there is none, and
    /// [`ConfigError::RepeatedLimit`] if a name comes twice.
    pub fn async_group<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<AsyncGroup, ConfigError> {
        let limits = names.into_iter().map(|name| self.find(name.as_ref()));
        Ok(AsyncGroup(Group::new(in_order(limits)?)))
    }
}

/// The limits in the limiter's order, each once.
fn in_order(
    limits: impl Iterator<Item = Result<ActiveLimit, ConfigError>>,
) -> Result<Arc<[ActiveLimit]>, ConfigError> {
    let mut limits = limits.collect::<Result<Vec<_>, _>>()?;
    limits.sort_by_key(|limit| limit.state.index);
    let is_same = |pair: &&[ActiveLimit]| pair[0].state.index == pair[1].state.index;
    if let Some(pair) = limits.windows(2).find(is_same) {
        return Err(ConfigError::RepeatedLimit(pair[0].name().to_owned()));
    }
    if limits.is_empty() { Err(ConfigError::EmptyGroup) } else { Ok(limits.into()) }
}

/// Several limits of a running limiter in any mode, for one key: a request is allowed if all of them allow it, and then spends
/// from each. Cheap to clone.
///
/// Exact limits are asked when all others but leaky buckets have allowed the request, one after the other, and the store is told what goes back
/// of them: the answer does not wait for that.
///
/// Cost: that of [`Group`], a round trip for each exact limit, and one in the background for each of which something goes back.
///
/// ```
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// use tidegate::{Limit, Limiter, MemoryStore, Quota, SlidingLog};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("login", SlidingLog::per_minute(5)).exact())
///     .limit(Limit::new("day", Quota::per_day(20)))
///     .store(MemoryStore::new())
///     .build()?;
/// let both = limiter.async_group(["login", "day"])?;
/// assert!(both.check_sure("user:42").await.is_allowed());
/// # Ok::<(), tidegate::ConfigError>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct AsyncGroup(Group);

impl fmt::Debug for AsyncGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl AsyncGroup {
    /// Decides about one request of `key` that costs one token of each limit: see [`Group::check`], and
    /// [`AsyncLimit::check_sure`](crate::AsyncLimit::check_sure). Dropping the future before it is ready may leave what the
    /// store was asked about spent.
    pub async fn check_sure<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.0.check_sure(key).await
    }

    /// The same as [`check_sure`](Self::check_sure) for a request that costs `cost` tokens of each limit. A cost of 0 spends
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if one of the limits can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn check_sure_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        self.0.check_sure_n(key, cost).await
    }

    /// The same limits, by the plan of this name those that have one: see [`Group::plan`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if none of them has it at present.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        self.0.plan(name).map(Self)
    }
}

impl Group {
    fn new(limits: Arc<[ActiveLimit]>) -> Self {
        let leased = |limit: &ActiveLimit| match &limit.state.buckets {
            Buckets::Leased(table) => {
                Some(LeasedLimit { table: table.clone(), limit: limit.clone() })
            }
            Buckets::Alone(_) => None,
        };
        let leased: Option<Arc<[_]>> = limits.iter().map(leased).collect();
        Self { limits, leased: leased.unwrap_or_default() }
    }

    /// Decides about one request of `key` that costs one token of each limit. Never waits.
    ///
    /// A denial is that of the limit with the longest wait, or of one whose tokens another request took at the same time, and
    /// nothing is spent from the others. A concurrent request may briefly see tokens missing. If the request is allowed, the
    /// decision is that of the limit with the fewest tokens left.
    ///
    /// A [`LeakyBucket`](crate::LeakyBucket) is asked last, since a slot passes even if it is not used: of two of them in one
    /// group, the first may lose a slot when the second denies. What an outage policy allowed is not given back either.
    ///
    /// Cost: a look at each limit's key, and nothing is allocated for a known key while at most four limits hold enough.
    pub fn check<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide(key, 1)
    }

    /// The same as [`check`](Self::check) for a request that costs `cost` tokens of each limit. A cost of 0 spends
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if one of the limits can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub fn check_n<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Result<Decision, CheckError> {
        self.validate_cost(key, cost)?;
        Ok(self.decide(key, cost))
    }

    /// The same as [`check`](Self::check), and asks the store where this node alone cannot be sure: see
    /// [`ActiveLimit::check_sure`]. It asks about all such limits at the same time.
    pub async fn check_sure<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide_or_ask(key, 1).await
    }

    /// The same as [`check_sure`](Self::check_sure) for a request that costs `cost` tokens of each limit.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if one of the limits can never admit so high a cost, as of [`ActiveLimit::check_n`].
    pub async fn check_sure_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Decision, CheckError> {
        self.validate_cost(key, cost)?;
        Ok(self.decide_or_ask(key, cost).await)
    }

    /// The same limits, by the [plan](ActiveLimit::plan) of this name those that have one, and all others as they are. Ask for
    /// it once and keep it.
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("minute", Quota::per_minute(10)).plan("pro", Quota::per_minute(100)))
    ///     .limit(Limit::new("day", Quota::per_day(1000)))
    ///     .build()?;
    /// let pro = limiter.group(["minute", "day"])?.plan("pro")?;
    /// assert_eq!(pro.check("user:42").burst(), 100);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownPlan`] if none of the limits has it at present.
    pub fn plan(&self, name: &str) -> Result<Self, ConfigError> {
        let under = |limit: &ActiveLimit| limit.plan(name).unwrap_or_else(|_| limit.clone());
        if self.limits.iter().all(|limit| limit.plan(name).is_err()) {
            self.limits[0].plan(name)?;
        }
        Ok(Self::new(self.limits.iter().map(under).collect()))
    }

    /// The limits, in the order in which the limiter was given them.
    pub fn limits(&self) -> &[ActiveLimit] {
        &self.limits
    }

    /// What the limiter knows `key` by.
    #[inline(always)]
    fn name<'k, K: Key + ?Sized>(&self, key: &'k K) -> KeyName<'k> {
        self.limits[0].shared.secret.name(key)
    }

    fn validate_cost<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Result<(), CheckError> {
        self.limits.iter().try_for_each(|limit| limit.validate_cost_of(key, cost))
    }

    #[inline(always)]
    fn decide<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let held = self.limits[0].shared.secret.held_name(key);
        let now = self.limits[0].state.clock.now();
        let from = match held.map(|name| self.decide_by_leases(name, cost, now)) {
            Some(Ok(decision)) => return decision,
            Some(Err(from)) => from,
            None => self.leased.first(),
        };
        let mut decision = self.limits[0].undecided(cost);
        self.decide_further(key, cost, (from, now), &mut decision);
        decision
    }

    /// Writes the decision where the leases did not tell at the first look. It is written and not returned, so that a caller
    /// need not build the parts of other decisions that it does not read.
    #[inline(never)]
    fn decide_further<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        (from, now): (Option<&LeasedLimit>, Timestamp),
        told: &mut Decision,
    ) {
        let (name, patience) = (self.name(key), Patience::None);
        if let Some(decision) = self.decide_and_notify((&name, cost), (from, now), patience) {
            *told = decision;
            return;
        }
        let plain = self.plain(key);
        let parts = self.parts((&name, plain.as_deref()), cost, patience);
        // A group has a limit.
        if let Some(decision) = decide_at_once(&parts) {
            *told = decision;
        }
    }

    async fn decide_or_ask<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let (name, patience) = (self.name(key), Patience::Store);
        let now = self.limits[0].state.clock.now();
        let from = match self.decide_by_leases(&name, cost, now) {
            Ok(decision) => return decision,
            Err(from) => from,
        };
        if let Some(decision) = self.decide_and_notify((&name, cost), (from, now), patience) {
            return decision;
        }
        let plain = self.plain(key);
        let parts = self.parts((&name, plain.as_deref()), cost, patience);
        let decision = ask_for_decision(&parts).await;
        decision.unwrap_or_else(|| self.limits[0].decide(Target::key(&name), cost))
    }

    /// The key before it is hashed, if overrides look for that.
    fn plain<K: Key + ?Sized>(&self, key: &K) -> Option<Arc<[u8]>> {
        self.limits.iter().find_map(|limit| limit.plain_for_overrides(key))
    }

    /// Spends from each lease in turn, and decides as the limit with the fewest tokens left. `Err` names the first lease that
    /// needs a longer look: those before it have been spent from.
    #[inline(always)]
    fn decide_by_leases(
        &self,
        key: &[u8],
        cost: u32,
        now: Timestamp,
    ) -> Result<Decision, Option<&LeasedLimit>> {
        let (first, others) = self.leased.split_first().filter(|_| cost > 0).ok_or(None)?;
        // All tables of a limiter hash alike.
        let name = first.table.short_name(key).ok_or(Some(first))?;
        let spent = first.spend(first.table.find_short(&name), cost, now);
        let mut tightest = spent.ok_or(Some(first))?;
        for lease in others {
            let spent = lease.spend(lease.table.find_short(&name), cost, now);
            let spent = spent.ok_or(Some(lease))?;
            if spent.left_in_all < tightest.left_in_all {
                tightest = spent;
            }
        }
        Ok(tightest.lease.allowed(tightest.bucket, tightest.left, cost, now))
    }

    /// Goes on where [`decide_by_leases`](Self::decide_by_leases) ended, and notifies the engine: the first request after each
    /// report has to. `None`, or a denial where another request was quicker, gives back what was spent: then a lease does not
    /// hold enough.
    #[inline(never)]
    fn decide_and_notify(
        &self,
        (key, cost): (&[u8], u32),
        (from, now): (Option<&LeasedLimit>, Timestamp),
        patience: Patience,
    ) -> Option<Decision> {
        let from = from.filter(|_| cost > 0)?;
        let mut tightest = None;
        for (place, lease) in self.leased.iter().enumerate() {
            let decision = if lease.index() < from.index() {
                lease.after_spending(key, cost, now)
            } else {
                match lease.spend_and_notify(key, cost, now, patience) {
                    Ok(decision) => Some(decision),
                    Err(denied) => {
                        for other in self.leased[..place].iter().rev() {
                            other.unspend(key, cost, now);
                        }
                        return denied;
                    }
                }
            };
            tightest = tightest.into_iter().chain(decision).reduce(fewer_left);
        }
        tightest
    }

    fn parts<'a>(
        &'a self,
        (key, plain): (&'a [u8], Option<&'a [u8]>),
        cost: u32,
        patience: Patience,
    ) -> SmallVec<[Part<'a>; USUAL]> {
        self.limits.iter().map(|limit| Part { limit, key, plain, cost, patience }).collect()
    }
}

/// What a request has spent from, and what is left.
struct Spent<'a> {
    lease: &'a LeasedLimit,
    bucket: &'a LeaseBucket,
    /// Tokens of the lease.
    left: u32,
    /// Tokens of the lease, and of the store at its last word.
    left_in_all: i64,
}

impl LeasedLimit {
    fn index(&self) -> u32 {
        self.limit.state.index
    }

    /// Spends from the lease, if one look at the bucket tells, and nobody has to hear of it.
    #[inline(always)]
    fn spend<'a>(
        &'a self,
        found: Option<Found<'a, LeaseBucket>>,
        cost: u32,
        now: Timestamp,
    ) -> Option<Spent<'a>> {
        let Found { bucket, word, .. } = found.filter(|_| !self.limit.looks_further())?;
        let left = bucket.spend(word, cost, now, || self.limit.state.terms.scale.token)?;
        let left_in_all = i64::from(left) + bucket.view_tokens();
        Some(Spent { lease: self, bucket, left, left_in_all })
    }

    #[inline(always)]
    fn allowed(&self, bucket: &LeaseBucket, left: u32, cost: u32, now: Timestamp) -> Decision {
        self.limit.lease_decision(&bucket.result(Verdict::Allowed, true, left), cost, now)
    }

    /// Spends from the lease, if that holds enough. If it does not, nothing is spent. `Err(Some)` is a denial: another request
    /// took the tokens first.
    fn spend_and_notify(
        &self,
        key: &[u8],
        cost: u32,
        now: Timestamp,
        patience: Patience,
    ) -> Result<Decision, Option<Decision>> {
        let Self { table, limit } = self;
        if let Some(spent) = self.spend(table.find(key), cost, now) {
            // The first look had found another key's entry.
            return Ok(self.allowed(spent.bucket, spent.left, cost, now));
        }
        let has_enough = |found: Found<'_, LeaseBucket>| {
            found.bucket.has_leased(found.word, (cost, limit.plan), now)
        };
        if limit.looks_further() || !table.find(key).is_some_and(has_enough) {
            return Err(None);
        }
        let can_wait = patience != Patience::None;
        let result = limit.ask_leased(table, Target::key(key), cost, can_wait, now);
        let decision = limit.lease_decision(&result, cost, now);
        match result.verdict {
            // The store may have more.
            Verdict::Unsure => Err(None),
            Verdict::Denied => Err(Some(decision)),
            Verdict::Allowed if decision.is_sure() => Ok(decision),
            Verdict::Allowed => {
                limit.give_back(key, &Allowed { decision, asked: now }, cost);
                Err(None)
            }
        }
    }

    /// The lease as it stands, from which this request has spent.
    fn after_spending(&self, key: &[u8], cost: u32, now: Timestamp) -> Option<Decision> {
        let Found { bucket, word, .. } = self.table.find(key)?;
        Some(self.allowed(bucket, word.tokens(), cost, now))
    }

    /// Gives back what was spent of the lease at `now`. Tokens of a window are not those of the next one.
    fn unspend(&self, key: &[u8], cost: u32, now: Timestamp) {
        let put_back = |found: Found<'_, LeaseBucket>| {
            found.bucket.put_back(cost, true, found.word.epoch(), now)
        };
        let may_be_here = self.limit.state.terms.scale.curve == Curve::Refill;
        if !(may_be_here && self.table.find(key).is_some_and(put_back)) {
            self.limit.settle(key, Settlement::unused(cost, true), now);
        }
    }
}
