//! A request that is to fit several limits: all of them are spent from, or none.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::settle::Allowed;
use super::{ActiveLimit, Handle, Limiter, Target};
use crate::algorithm::Rule;
use crate::bucket::{OVERFLOW, Verdict};
use crate::decision::{Decision, Source};
use crate::driver::{Buckets, Query, StoreAnswer, StoreQuery};
use crate::error::CheckError;
use crate::key::{Key, KeyName};
use crate::time::Timestamp;

/// Most requests have at most so many limits.
pub(super) const USUAL: usize = 4;

/// A limit with the key of a request, for [`Limiter::check_all`].
#[must_use]
pub struct OnKey<'a> {
    limit: &'a ActiveLimit,
    key: KeyName<'a>,
    cost: u32,
}

/// Without the key, which may be secret.
impl fmt::Debug for OnKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, cost, .. } = self;
        f.debug_struct("OnKey").field("limit", &limit.name()).field("cost", cost).finish()
    }
}

impl OnKey<'_> {
    /// The request costs so many tokens of this limit, instead of one.
    pub fn cost(self, cost: u32) -> Self {
        Self { cost, ..self }
    }
}

/// What one limit is asked for.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) limit: &'a ActiveLimit,
    pub(super) key: &'a [u8],
    pub(super) cost: u32,
}

impl<'a> Part<'a> {
    fn target(&self) -> Target<'a> {
        Target::key(self.key)
    }

    fn decide(&self) -> Decision {
        self.limit.decide(self.target(), self.cost)
    }

    /// How the key stands, as a decision about the cost that spends nothing.
    fn look(&self) -> Decision {
        let look = self.limit.decide(self.target(), 0);
        // What nodes hold elsewhere is not known for sure, and a slot is for a request of any cost.
        let is_counted = matches!(look.source, Source::Local(_)) && !self.is_paced();
        let lacks = is_counted && look.remaining() < self.cost.into();
        Decision { allowed: look.allowed && !lacks, cost: self.cost.max(1), ..look }
    }

    /// Whether what it takes is a slot of time, which mostly cannot be given back.
    fn is_paced(&self) -> bool {
        matches!(self.limit.rule(), Rule::LeakyBucket(_))
    }
}

/// What was spent of several limits. Unless all of them allow the request, it goes back, the last first.
struct Takes<'a> {
    taken: SmallVec<[(Part<'a>, Allowed); USUAL]>,
    /// The first denial.
    denied: Option<Decision>,
    /// When this began.
    asked: Timestamp,
}

impl<'a> Takes<'a> {
    /// Decides first about the part that a look says denies.
    fn begin(parts: &[Part<'a>], denied: Option<usize>) -> Self {
        let asked = parts[0].limit.state.clock.now();
        let mut takes = Self { taken: SmallVec::new(), denied: None, asked };
        if let Some(index) = denied {
            // Decided, so that it counts. By now it may be allowed.
            takes.add(parts[index], parts[index].decide());
        }
        takes
    }

    fn add(&mut self, part: Part<'a>, decision: Decision) {
        if decision.is_denied() {
            self.denied.get_or_insert(decision);
        } else {
            self.taken.push((part, Allowed { decision, asked: self.asked }));
        }
    }

    /// Whether the part is still to be decided.
    fn needs(&self, part: &Part<'a>) -> bool {
        let is_same = |taken: &Part<'_>| {
            std::ptr::eq(taken.limit, part.limit) && std::ptr::eq(taken.key, part.key)
        };
        self.denied.is_none() && !self.taken.iter().any(|(taken, _)| is_same(taken))
    }

    /// The decision about all of them.
    fn end(mut self, parts: &[Part<'a>]) -> Decision {
        if let Some(denied) = self.denied {
            // Before anybody looks again.
            self.give_back();
            return sure_denials(parts).map(|(_, look)| look).fold(denied, longer_wait);
        }
        let taken = std::mem::take(&mut self.taken);
        let tightest = taken.iter().map(|(_, allowed)| allowed.decision).reduce(fewer_left);
        tightest.unwrap_or_else(|| parts[0].look())
    }

    fn give_back(&mut self) {
        for (part, allowed) in std::mem::take(&mut self.taken).iter().rev() {
            part.limit.give_back(part.key, allowed, part.cost);
        }
    }
}

impl Drop for Takes<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn fewer_left(one: Decision, other: Decision) -> Decision {
    if other.remaining() < one.remaining() { other } else { one }
}

fn longer_wait(one: Decision, other: Decision) -> Decision {
    if other.retry_after() > one.retry_after() { other } else { one }
}

/// The parts that surely deny now.
fn sure_denials(parts: &[Part<'_>]) -> impl Iterator<Item = (usize, Decision)> {
    let looks = parts.iter().map(Part::look).enumerate();
    looks.filter(|(_, look)| look.is_denied() && look.is_sure())
}

/// The one of them with the longest wait.
fn longest(denials: impl Iterator<Item = (usize, Decision)>) -> Option<usize> {
    denials.max_by_key(|(_, look)| look.retry_after()).map(|(index, _)| index)
}

/// Decides about parts, at least one, without waiting. Slots are taken last.
pub(super) fn decide_all(parts: &[Part<'_>]) -> Decision {
    if parts.iter().all(|part| part.cost == 0) {
        return looks(parts);
    }
    // Nothing is taken where one denies, sure or not: nobody asks the store.
    let looks = parts.iter().map(Part::look).enumerate();
    let denied = longest(looks.filter(|(_, look)| look.is_denied()));
    let mut takes = Takes::begin(parts, denied);
    for paced in [false, true] {
        for part in parts.iter().filter(|part| part.is_paced() == paced) {
            if takes.needs(part) {
                takes.add(*part, part.decide());
            }
        }
    }
    takes.end(parts)
}

/// The same, and asks the store where this node is not sure, about all of these at once, before anything else is taken.
pub(super) async fn ask_all(parts: &[Part<'_>]) -> Decision {
    if parts.iter().all(|part| part.cost == 0) {
        return looks(parts);
    }
    let mut takes = Takes::begin(parts, longest(sure_denials(parts)));
    let mut asked = SmallVec::<[_; USUAL]>::new();
    for part in parts.iter().filter(|part| !part.is_paced()) {
        if takes.needs(part) && !part.look().is_sure() {
            let handle = part.limit.hold(part.key);
            let answer = handle.send_query(part.cost);
            asked.push((part, handle, answer));
        }
    }
    for (part, handle, answer) in asked {
        let decision = handle.answered(answer, part.cost).await;
        takes.add(*part, decision);
    }
    for paced in [false, true] {
        for part in parts.iter().filter(|part| part.is_paced() == paced) {
            if takes.needs(part) {
                let decision = part.limit.decide_or_ask(part.target(), part.cost).await;
                takes.add(*part, decision);
            }
        }
    }
    takes.end(parts)
}

/// How the keys stand, where nothing is to be spent.
fn looks(parts: &[Part<'_>]) -> Decision {
    let look = |part: &Part<'_>| part.limit.decide(part.target(), 0);
    let first = look(&parts[0]);
    parts[1..].iter().map(look).fold(first, |one, other| match (one.allowed, other.allowed) {
        (true, true) => fewer_left(one, other),
        (false, false) => longer_wait(one, other),
        (true, false) => other,
        (false, true) => one,
    })
}

impl Limiter {
    /// Decides about one request that is to fit several limits, each for a key of its own: all of them are spent from, or
    /// none. Where this node alone cannot be sure, the store is asked, as by [`ActiveLimit::check_sure`].
    ///
    /// The decision is as that of [`Group::check`](crate::Group::check).
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("user", Quota::per_minute(60)).local())
    ///     .limit(Limit::new("address", Quota::per_minute(600)).local())
    ///     .build()?;
    /// let (user, address) = (limiter.limit("user")?, limiter.limit("address")?);
    /// let parts = [user.on("alice"), address.on("192.0.2.7").cost(3)];
    /// assert!(limiter.check_all(parts).await?.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CheckError`] if a limit can never admit so high a cost, or if there is no limit. If a limit comes twice with one key,
    /// the costs are added up.
    ///
    /// Dropping the future before it is ready may leave what the store was asked about spent.
    pub async fn check_all<'a>(
        &self,
        parts: impl IntoIterator<Item = OnKey<'a>>,
    ) -> Result<Decision, CheckError> {
        let mut parts: SmallVec<[OnKey<'a>; USUAL]> = parts.into_iter().collect();
        parts.sort_by(|a, b| (a.limit.state.index, &*a.key).cmp(&(b.limit.state.index, &*b.key)));
        let mut asked = SmallVec::<[Part<'_>; USUAL]>::new();
        for OnKey { limit, key, cost } in &parts {
            let same = |last: &&mut Part<'_>| {
                Arc::ptr_eq(&last.limit.state, &limit.state) && last.key == &**key
            };
            match asked.last_mut().filter(same) {
                Some(last) => last.cost = last.cost.saturating_add(*cost),
                None => asked.push(Part { limit, key, cost: *cost }),
            }
        }
        asked.iter().try_for_each(|part| part.limit.validate_cost(part.cost))?;
        if asked.is_empty() {
            return Err(CheckError::NoLimit);
        }
        Ok(ask_all(&asked).await)
    }
}

impl ActiveLimit {
    /// This limit with the key of a request, for [`Limiter::check_all`].
    pub fn on<'a, K: Key + ?Sized>(&'a self, key: &'a K) -> OnKey<'a> {
        OnKey { limit: self, key: self.shared.secret.name(key), cost: 1 }
    }
}

impl Handle {
    /// Asks the store.
    pub(crate) async fn ask_store(&self, cost: u32) -> Decision {
        if let Some(decision) = self.limit.decide_without_lease(&self.key.key, cost).await {
            return decision;
        }
        self.answered(self.send_query(cost), cost).await
    }

    /// Asks the store for the answer to a request. `None` if the limit does not wait, or nobody would answer.
    fn send_query(&self, cost: u32) -> Option<oneshot::Receiver<StoreAnswer>> {
        let within_us = self.limit.state.terms.max_wait_us;
        let (done, answer) = oneshot::channel();
        let query = StoreQuery { key: self.key.clone(), cost, within_us, done };
        let queries = &self.limit.shared.driver.queries;
        (within_us > 0 && queries.send(Query::Sure(query)).is_ok()).then_some(answer)
    }

    /// The decision by the store's answer, or else by what this node knows.
    async fn answered(
        &self,
        answer: Option<oneshot::Receiver<StoreAnswer>>,
        cost: u32,
    ) -> Decision {
        let answer = match answer {
            Some(answer) => answer.await.ok(),
            None => None,
        };
        let limit = &self.limit;
        let (Some(StoreAnswer { allowed, sure }), Buckets::Leased(table)) =
            (answer, &limit.state.buckets)
        else {
            // The limit does not wait, or the driver has ended with its runtime.
            return limit.decide(self.target(), cost);
        };
        if self.key.place == OVERFLOW {
            table.count_overflow();
        }
        let (bucket, now) = (table.at(self.key.place), limit.state.clock.now());
        let left = bucket.mint_tokens(now, limit.state.terms.scale.token);
        let result = bucket.result(Verdict::of(allowed), sure, left);
        limit.lease_decision(&result, cost, now)
    }
}
