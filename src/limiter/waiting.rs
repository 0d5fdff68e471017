//! Callers who wait for their turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use tokio::sync::{Mutex, MutexGuard};

use super::slots::SlotsOf;
use super::{ActiveLimit, Handle, Target};
use crate::algorithm::{Rule, Standing, Taken};
use crate::bucket::OVERFLOW;
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, LocalBuckets, Wish};
use crate::error::CheckError;
use crate::key::Key;
use crate::time::{Timestamp, micros};

/// The callers of one limit who wait.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    count: AtomicU32,
    /// One line for each key, in which one caller after the other asks for its tokens.
    lines: DashMap<Box<[u8]>, Arc<Mutex<()>>>,
}

/// Lets one caller wait.
struct Permit<'a>(&'a Waiting);

impl Waiting {
    /// `None` if `most` callers wait already.
    fn enter(&self, most: u32) -> Option<Permit<'_>> {
        let one_more = |count: u32| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller in the line of a key. The last one who leaves takes the line away.
pub(super) struct LineEntry<'a> {
    waiting: &'a Waiting,
    key: &'a [u8],
    /// `None` only while it is dropped.
    line: Option<Arc<Mutex<()>>>,
}

impl<'a> LineEntry<'a> {
    pub(super) fn new(waiting: &'a Waiting, key: &'a [u8]) -> Self {
        let line = waiting.lines.entry(key.into()).or_default().clone();
        Self { waiting, key, line: Some(line) }
    }
}

impl LineEntry<'_> {
    /// Waits until all who came before have left.
    pub(super) async fn lock(&self) -> Option<MutexGuard<'_, ()>> {
        Some(self.line.as_ref()?.lock().await)
    }
}

impl Drop for LineEntry<'_> {
    fn drop(&mut self) {
        // First, so that of two who leave together one finds that only the map has the line. Nobody gets another one while
        // the entry is locked.
        drop(self.line.take());
        self.waiting.lines.remove_if(self.key, |_, line| Arc::strong_count(line) == 1);
    }
}

/// Tokens that were promised. Unless they are used, they are given back.
struct Promise {
    handle: Handle,
    decision: Decision,
    is_used: bool,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let (limit, place) = (&self.handle.limit, self.handle.key.place);
        // A key without a place has shared another bucket, perhaps for the last time.
        if !self.is_used
            && place != OVERFLOW
            && let Buckets::Alone(AloneBuckets::Turns(LocalBuckets { table, .. })) =
                &limit.state.buckets
            && let Source::Local(Standing::Turn(rule, turn)) = self.decision.source
        {
            let state = rule.units_at(self.decision.now) + turn.ahead;
            let (cost, now) = (self.decision.cost, rule.units_at(limit.precise_now()));
            table.at(place).give_back(rule, Taken { state, cost, now });
        }
    }
}

impl ActiveLimit {
    /// Decides about one request of `key` that costs one token, and that may go on after the decision's
    /// [`delay`](Decision::delay): for callers with timers of their own.
    ///
    /// A [`LeakyBucket`](crate::LeakyBucket) promises the next free slot, if it is within its queue. Other limits decide as
    /// [`check`](Self::check) does, and promise nothing.
    pub fn schedule<K: Key + ?Sized>(&self, key: &K) -> Decision {
        self.decide_ahead(key, 1)
    }

    /// The same as [`schedule`](Self::schedule) for a request that costs `cost` tokens. A cost of 0 takes no slot, and
    /// tells what a request of one token would be told.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`check_n`](Self::check_n).
    pub fn schedule_n<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Result<Decision, CheckError> {
        if cost > self.cost_max() {
            return self.decide_above_max_for(key, cost);
        }
        Ok(self.decide_ahead(key, cost))
    }

    fn decide_ahead<K: Key + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let (limit, name) = (self.planned_for(key), self.shared.secret.name(key));
        let by_rule = || {
            let decision = limit.decide_within(Target::key(&name), cost, u64::MAX);
            limit.after_rule(&name, cost, decision)
        };
        self.override_of(key, cost).unwrap_or_else(by_rule)
    }

    /// Waits until a request of `key` that costs one token may go on, for `within` at most. The decision is a denial if
    /// the request could not go on by then. A token bucket or leaky bucket knows that at once; of other limits a caller
    /// in line may wait for `within` first.
    ///
    /// Callers of one key on this node go on in the order in which they asked first. A local token bucket or leaky bucket
    /// promises the tokens to them, so that no other request takes them. A caller who goes away (drops the future) gives
    /// them back, so that a later caller may go on sooner, with these exceptions: a leaky bucket takes back its last slot
    /// only, and other slots pass unused; a token bucket does not take back what was promised before it took something
    /// back; and a key for which there was no room gives nothing back. Of other limits [`check`](Self::check) may take
    /// what a caller waits for.
    ///
    /// Metrics count a denial each time that a caller in line asks in vain.
    ///
    /// If [`Limit::max_waiting`](crate::Limit::max_waiting) callers of the limit wait already, the request does not wait
    /// for tokens.
    ///
    /// On an exact limit it may take [`Limit::max_wait`](crate::Limit::max_wait) longer than `within`.
    ///
    /// Cost: two short locks of the limit's table and two allocations a call; a wait is a message to the limiter's task,
    /// and ends up to some 2 ms late.
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use std::time::Duration;
    /// use tidegate::LeakyBucket;
    ///
    /// let mail = tidegate::local(LeakyBucket::per_second(100).queue(Duration::from_secs(1)))?;
    /// for _ in 0..3 {
    ///     mail.until_ready("host", Duration::from_secs(1)).await.into_result()?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn until_ready<K: Key + ?Sized>(&self, key: &K, within: Duration) -> Decision {
        self.wait_by_overrides(key, 1, within).await
    }

    /// The same as [`until_ready`](Self::until_ready) for a request that costs `cost` tokens. A cost of 0 does not wait: it
    /// is as in [`check_n`](Self::check_n).
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`check_n`](Self::check_n).
    pub async fn until_ready_n<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        within: Duration,
    ) -> Result<Decision, CheckError> {
        if cost > self.cost_max() {
            return self.decide_above_max_for(key, cost);
        }
        Ok(self.wait_by_overrides(key, cost, within).await)
    }

    /// Waits unless overrides decide. In shadow mode nobody waits.
    async fn wait_by_overrides<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        within: Duration,
    ) -> Decision {
        let name = self.shared.secret.name(key);
        if let Some(decision) = self.override_of(key, cost) {
            return decision;
        }
        let within = if self.is_shadow() { Duration::ZERO } else { within };
        let limit = self.planned_for(key);
        limit.after_rule(&name, cost, limit.wait(&name, cost, within).await)
    }

    /// Whether requests can take slots ahead.
    pub(super) fn takes_slots_ahead(&self) -> bool {
        matches!(self.info.rule, Rule::LeakyBucket(_))
    }

    pub(super) fn waiting(&self) -> &Waiting {
        self.shared.waiting[self.state.index as usize].get_or_init(Box::default)
    }

    pub(super) async fn wait(&self, key: &[u8], cost: u32, within: Duration) -> Decision {
        if cost == 0 {
            return self.decide_or_ask(Target::key(key), 0).await;
        }
        let permit = self.waiting().enter(self.state.terms.max_waiting);
        let within = if permit.is_some() { within } else { Duration::ZERO };
        match &self.state.buckets {
            _ if self.is_decided_by_store() && self.takes_slots_ahead() => {
                let decision = self.ask_exact(key, cost, micros(within)).await;
                let delay = decision.delay();
                if delay > Duration::ZERO {
                    return decision.after_delay(self.sleep(delay).await);
                }
                decision
            }
            Buckets::Alone(AloneBuckets::Slots(slots, _)) => {
                self.wait_for_slot(SlotsOf { slots, key }, cost, micros(within)).await
            }
            Buckets::Alone(AloneBuckets::Turns(local)) if !self.is_decided_by_store() => {
                // It is pinned before the slot is taken, so that the slot is found again.
                let handle = self.hold(key);
                let now = self.precise_now();
                let answer = handle.target().ask_local(
                    local,
                    (self.info, self.plan),
                    cost,
                    micros(within),
                    now,
                );
                let decision = self.local_decision(answer, cost, now);
                let delay = decision.delay();
                if delay > Duration::ZERO {
                    let mut promise = Promise { handle, decision, is_used: false };
                    promise.is_used = self.sleep(delay).await;
                    return decision.after_delay(promise.is_used);
                }
                decision
            }
            _ => self.wait_in_line(key, cost, within).await,
        }
    }

    /// Asks again whenever there may be enough, once those have gone on who came before.
    async fn wait_in_line(&self, key: &[u8], cost: u32, within: Duration) -> Decision {
        let deadline = self.now().plus_micros(micros(within));
        let entry = LineEntry::new(self.waiting(), key);
        let _first = tokio::select! {
            biased;
            first = entry.lock() => first,
            _ = self.sleep(within) => {
                return self.decide_or_ask(Target::key(key), 0).await.denied_behind_others(cost);
            }
        };
        loop {
            let decision = self.decide_or_ask(Target::key(key), cost).await;
            let left_us = deadline.micros_since(self.now());
            let mut wait = decision.retry_after();
            if self.is_decided_by_store() && !decision.is_sure() {
                // Sooner, the store is not asked again.
                wait = wait.max(Duration::from_micros(self.state.terms.max_wait_us));
            }
            let is_over = decision.is_allowed() || left_us == 0 || micros(wait) > left_us;
            if is_over || !self.sleep(wait).await {
                return decision;
            }
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.shared.node.time.now()
    }

    /// The driver minds the time, so that this works on any runtime. False if it has ended with its own.
    pub(super) async fn sleep(&self, time: Duration) -> bool {
        self.shared.ask(Wish::Time, time).await.is_some()
    }
}

/// What a layer asks.
#[cfg(feature = "tower")]
impl ActiveLimit {
    /// Decides, or else returns the key's handle, to [wait](Handle::wait) with: for the store, if this node is not sure;
    /// for a slot, if the limit has a queue.
    ///
    /// # Errors
    ///
    /// [`CheckError`] if the limit can never admit so high a cost, as of [`check_n`](Self::check_n).
    pub(crate) fn check_or_wait<K: Key + ?Sized>(
        &self,
        key: &K,
        cost: u32,
    ) -> Result<Result<Decision, Handle>, CheckError> {
        if cost > self.cost_max() {
            return self.decide_above_max_for(key, cost).map(Ok);
        }
        let name = self.shared.secret.name(key);
        if let Some(decision) = self.override_of(key, cost) {
            return Ok(Ok(decision));
        }
        let limit = self.planned_for(key);
        let decision = limit.decide_if_no_wait(&name, cost);
        let decision = decision.map(|decision| limit.after_rule(&name, cost, decision));
        Ok(decision.ok_or_else(|| limit.hold(&name)))
    }
}

impl ActiveLimit {
    /// Decides, unless the request has to wait.
    #[inline(always)]
    pub(super) fn decide_if_no_wait(&self, key: &[u8], cost: u32) -> Option<Decision> {
        if self.is_decided_by_store() {
            return None;
        }
        if let Some(slots) = self.slots() {
            // Where it is not sure, it waits for the store's word.
            return self.deny_if_sure(SlotsOf { slots, key }, cost);
        }
        let target = Target::key(key);
        let has_queue = self.queue() > Duration::ZERO;
        if has_queue && self.decide(target, 0).is_denied() {
            return None;
        }
        // Another request may have been quicker: then this one waits too.
        self.decide_if_sure(target, cost).filter(|decision| !has_queue || decision.is_allowed())
    }

    /// How long a request of this limit may wait for its slot.
    #[inline]
    pub(super) fn queue(&self) -> Duration {
        match (&self.state.buckets, self.info.rule) {
            (Buckets::Alone(_), Rule::LeakyBucket(rule)) => rule.longest_wait(),
            _ => Duration::ZERO,
        }
    }
}

#[cfg(feature = "tower")]
impl Handle {
    /// Waits for the slot of a request, or for the store's word.
    pub(crate) async fn wait(&self, cost: u32) -> Decision {
        match self.limit.queue() {
            Duration::ZERO => self.ask_store(cost).await,
            _ if self.limit.is_shadow() => self.decide_or_ask_by_rule(cost).await,
            queue => self.limit.wait(&self.key.key, cost, queue).await,
        }
    }
}

impl Handle {
    /// The same as [`ActiveLimit::until_ready`].
    pub async fn until_ready(&self, within: Duration) -> Decision {
        if let Some(decision) = self.overridden(1) {
            return decision;
        }
        let within = if self.limit.is_shadow() { Duration::ZERO } else { within };
        self.after_rule(1, self.planned().limit.wait(&self.key.key, 1, within).await)
    }

    /// The same as [`ActiveLimit::schedule`].
    pub fn schedule(&self) -> Decision {
        let decide = || self.planned().limit.decide_within(self.target(), 1, u64::MAX);
        let by_rule = || self.after_rule(1, decide());
        self.overridden(1).unwrap_or_else(by_rule)
    }
}

#[cfg(test)]
mod tests;
