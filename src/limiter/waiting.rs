//! Callers who wait for their turn.

use std::time::Duration;

use super::overrides::LookedUp;
use super::slots::SlotsOf;
use super::{ActiveLimit, Handle, Target};
use crate::algorithm::{Rule, Standing, Taken};
use crate::bucket::{LocalBucket, OVERFLOW};
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, Buckets, LocalBuckets, Wish};
use crate::error::CheckError;
use crate::key::Key;
use crate::time::{Timestamp, micros};

mod line;

pub(super) use line::LineEntry;
pub(crate) use line::Waiting;

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
    /// A caller in line follows within a second what else holds for the key by now: an [override](crate::Override), a
    /// [switch](crate::Switch), another quota, and, unless the limit is exact, a reset on this node. Callers with promised tokens keep
    /// them.
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

    /// The same as [`until_ready`](Self::until_ready) for a request that costs `cost` tokens. A cost of 0 does not wait for a
    /// slot: it is as in [`check_sure_n`](Self::check_sure_n).
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
        if let Some(decision) = self.override_of(key, cost) {
            return decision;
        }
        let (name, plain) = (self.shared.secret.name(key), self.shared.secret.plain(key));
        let decision = self.wait(LookedUp { name: &name, plain: &plain }, cost, within).await;
        self.after_rule(&name, cost, decision)
    }

    /// Whether requests can take slots ahead.
    pub(super) fn takes_slots_ahead(&self) -> bool {
        matches!(self.info.rule, Rule::LeakyBucket(_))
    }

    pub(super) fn waiting(&self) -> &Waiting {
        self.shared.waiting[self.state.index as usize].get_or_init(Box::default)
    }

    /// Waits for what the limit's rule gives the key. In shadow mode it takes a slot ahead and returns at once.
    pub(super) async fn wait(&self, asked: LookedUp<'_>, cost: u32, within: Duration) -> Decision {
        let (limit, key) = (self.planned(asked), asked.name);
        if cost == 0 {
            return limit.decide_or_ask(Target::key(key), 0).await;
        }
        let is_shadow = self.is_shadow();
        // In shadow mode nobody waits, so that no caller is one too many.
        let most = if is_shadow { u32::MAX } else { self.state.terms.max_waiting };
        let permit = self.waiting().enter(most);
        let within = if permit.is_some() { within } else { Duration::ZERO };
        match &self.state.buckets {
            _ if self.is_decided_by_store() && self.takes_slots_ahead() => {
                let decision = limit.ask_exact(key, cost, micros(within)).await;
                let delay = decision.delay();
                if delay > Duration::ZERO && !is_shadow {
                    return decision.after_delay(self.sleep(delay).await);
                }
                decision
            }
            Buckets::Alone(AloneBuckets::Slots(slots, _)) if is_shadow => {
                limit.ask_for_slot(SlotsOf { slots, key }, cost, micros(within)).await.decision
            }
            Buckets::Alone(AloneBuckets::Slots(slots, _)) => {
                limit.wait_for_slot(SlotsOf { slots, key }, cost, micros(within)).await
            }
            Buckets::Alone(AloneBuckets::Turns(local)) if !self.is_decided_by_store() => {
                limit.wait_for_turn(local, (key, cost), within, is_shadow).await
            }
            _ if is_shadow => limit.decide_or_ask(Target::key(key), cost).await,
            _ => self.wait_in_line(asked, cost, within).await,
        }
    }

    /// Waits for tokens, or a slot, that only this node gives: they are promised at once.
    async fn wait_for_turn(
        &self,
        local: &LocalBuckets<LocalBucket>,
        (key, cost): (&[u8], u32),
        within: Duration,
        is_shadow: bool,
    ) -> Decision {
        // It is pinned before the slot is taken, so that the slot is found again.
        let (handle, now) = (self.hold(key), self.precise_now());
        let of = (self.info, self.plan);
        // No more would wait at a time, where anybody does.
        let callers = u64::from(self.state.terms.max_waiting);
        let most = local.rule_of(self.info).units_of(callers * u64::from(cost));
        let most_us = if is_shadow { local.rule_of(self.info).micros(most) } else { u64::MAX };
        let within_us = micros(within).min(most_us);
        let answer = handle.target().ask_local(local, of, cost, within_us, now);
        let decision = self.local_decision(answer, cost, now);
        let delay = decision.delay();
        if delay > Duration::ZERO && !is_shadow {
            let mut promise = Promise { handle, decision, is_used: false };
            promise.is_used = self.sleep(delay).await;
            return decision.after_delay(promise.is_used);
        }
        decision
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
        let decision = self.decide_if_sure(target, cost, self.time());
        let is_known = |decision: &Decision| !has_queue || decision.is_allowed();
        decision.filter(is_known).filter(|decision| !self.is_unsure_look(decision, cost))
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
            queue => self.limit.wait(self.looked_up(), cost, queue).await,
        }
    }
}

impl Handle {
    /// The same as [`ActiveLimit::until_ready`].
    pub async fn until_ready(&self, within: Duration) -> Decision {
        if let Some(decision) = self.overridden(1) {
            return decision;
        }
        self.after_rule(1, self.limit.wait(self.looked_up(), 1, within).await)
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
