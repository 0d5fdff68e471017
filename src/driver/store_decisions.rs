//! What is told of calls of the store about limits without leases.

use super::Driver;
use super::exact::{ExactCalls, Outcome, outage_event};
use super::limit_state::LimitState;
use crate::sync::{Event, OutageChange};

impl Driver {
    /// A call for a decision of a limit without leases ended.
    pub(super) fn decided(&self, outcome: Outcome, calls: &mut ExactCalls) {
        let Some(ended) = calls.ended(outcome, self.now()) else { return };
        let (limit, took) = (self.limit(ended.limit).name.clone(), ended.took);
        self.publish(&Event::StoreDecided { limit, took, error: ended.error });
        self.publish_not_given_back(ended.limit, ended.not_given_back);
        match ended.change {
            Some(change) => self.publish_outage(ended.limit, change, calls),
            // Refusals are told now and then.
            None => self.limit(ended.limit).set_on_policy(calls.is_on_policy(ended.limit)),
        }
    }

    /// Tells what changes for such a limit.
    pub(super) fn publish_outage(&self, limit: u32, change: OutageChange, calls: &ExactCalls) {
        self.limit(limit).set_on_policy(calls.is_on_policy(limit));
        let LimitState { name, terms, .. } = &**self.limit(limit);
        let nodes = terms.credit_rule.uncounted.into();
        self.publish(&outage_event(name, terms.outage, nodes, change));
    }

    pub(super) fn publish_not_given_back(&self, limit: u32, tokens: u32) {
        if tokens > 0 {
            let limit = self.limit(limit).name.clone();
            self.publish(&Event::NotGivenBack { limit, tokens });
        }
    }
}
