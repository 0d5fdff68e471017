//! Asks the store where this node alone is not sure.

use tokio::sync::oneshot;

#[cfg(feature = "server")]
use super::AsyncLimit;
use super::{ActiveLimit, Handle, Target};
use crate::bucket::{OVERFLOW, Verdict};
use crate::decision::{Decision, Source};
use crate::driver::{Buckets, Query, StoreAnswer, StoreQuery};

impl ActiveLimit {
    pub(super) async fn decide_or_ask(&self, target: Target<'_>, cost: u32) -> Decision {
        if let Some(decision) = self.decide_without_lease(target.key, cost).await {
            return decision;
        }
        match self.decide_if_sure(target, cost, self.time()) {
            Some(decision) if !self.is_unsure_look(&decision, cost) => decision,
            _ => self.hold(target.key).ask_store(cost).await,
        }
    }

    /// Whether this is a look that would deny only because this node has no word of the store, or although the store had tokens. Where
    /// the limit has plans the store is not asked: who asks for a key names its plan, and a look changes nothing.
    pub(super) fn is_unsure_look(&self, decision: &Decision, cost: u32) -> bool {
        let Source::Lease(held) = &decision.source else { return false };
        let may_be_wrong = !decision.is_sure() || held.view.tokens() > 0;
        cost == 0 && decision.is_denied() && may_be_wrong && !self.has_plans()
    }

    fn has_plans(&self) -> bool {
        self.state.definition().limit.has_plans()
    }
}

impl Handle {
    pub(super) async fn decide_or_ask_by_rule(&self, cost: u32) -> Decision {
        if self.key.place == OVERFLOW {
            // Of keys without a place, and of limits that keep none here.
            return self.limit.decide_or_ask(self.target(), cost).await;
        }
        match self.limit.decide_if_sure(self.target(), cost, self.limit.time()) {
            Some(decision) if !self.limit.is_unsure_look(&decision, cost) => decision,
            _ => self.ask_store(cost).await,
        }
    }

    /// Asks the store.
    pub(crate) async fn ask_store(&self, cost: u32) -> Decision {
        if let Some(decision) = self.limit.decide_without_lease(&self.key.key, cost).await {
            return decision;
        }
        if cost == 0 && self.key.place == OVERFLOW {
            // Keys without a place share a bucket, of which the store tells nothing.
            return self.limit.decide(self.target(), 0);
        }
        self.answered(self.send_query(cost), cost).await
    }

    /// Asks the store for the answer to a request. `None` if the limit does not wait, or nobody would answer.
    pub(super) fn send_query(&self, cost: u32) -> Option<oneshot::Receiver<StoreAnswer>> {
        let within_us = self.limit.max_wait_us;
        let (done, answer) = oneshot::channel();
        let query = StoreQuery { key: self.key.clone(), cost, within_us, done };
        let queries = &self.limit.shared.driver.queries;
        (within_us > 0 && queries.send(Query::Sure(query)).is_ok()).then_some(answer)
    }

    /// The decision by the store's answer, or else by what this node knows.
    pub(super) async fn answered(
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

#[cfg(feature = "server")]
impl AsyncLimit {
    /// How a key stands by the store's word, unless this node is sure, or the limit has plans.
    pub(crate) async fn look_by_store(&self, key: &str) -> Decision {
        let limit = &self.0;
        let look = limit.decide_or_ask_for(key, 0).await;
        if look.is_sure() || !matches!(look.source, Source::Lease(_)) || limit.has_plans() {
            return look;
        }
        let (planned, name) = (limit.planned_for(key), limit.shared.secret.name(key));
        limit.after_rule(&name, 0, planned.hold(&name).ask_store(0).await)
    }
}
