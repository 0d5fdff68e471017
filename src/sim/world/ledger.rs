//! The ledger: where every token is that was spent.

use super::{Node, World};
use crate::error::StoreError;
use crate::sync::message::{Reply, Request, Verdict};

impl World {
    pub(super) fn acknowledge(
        &mut self,
        node: usize,
        lane: u32,
        sequence: i64,
        result: &Result<Reply, StoreError>,
    ) {
        if !self.setup.audit {
            return;
        }
        if let Ok(Reply { verdict: Verdict::Applied(_), .. }) = result {
            let tokens = self.nodes[node].engine.in_flight(lane, sequence);
            self.nodes[node].acknowledged += tokens;
        }
    }

    /// Notes what the store has applied, each batch once.
    pub(super) fn book(&mut self, request: &Request, reply: &Reply) {
        if !self.setup.audit || !matches!(reply.verdict, Verdict::Applied(_)) {
            return;
        }
        let node = u128::from_le_bytes(request.instance) as usize;
        if self.applied_batches.insert((node, request.lane, request.sequence)) {
            self.applied += request.tokens();
            // A node that had to take another name is not watched any further.
            if let Some(node) = self.nodes.get_mut(node.wrapping_sub(1)) {
                node.applied += request.tokens();
            }
        }
    }

    /// Consumed = acknowledged + in flight + pending.
    pub(super) fn audit_node(&mut self, index: usize) {
        if self.setup.audit {
            let node = &self.nodes[index];
            let untold = node.asked.values().filter(|bucket| bucket.slot().is_none());
            let pending =
                node.engine.pending() + untold.map(|bucket| bucket.pending()).sum::<u64>();
            let told = node.acknowledged + pending;
            let spent = node.spent;
            self.note(spent == told, || format!("node {index} spent {spent}, told of {told}"));
            if self.setup.threads > 1
                && let Some((depth, all)) = self.nodes[index].overfull(self.now_us)
            {
                self.note(false, || format!("node {index} holds {all} of a depth of {depth}"));
            }
        }
    }

    /// Charged in the store = applied, each batch once, for as long as it keeps its memory.
    pub(super) fn audit_store(&mut self) {
        if self.setup.audit && !self.forgetful {
            let (charged, applied) = (self.charged() as u64, self.applied);
            self.note(charged == applied, || format!("{charged} charged, {applied} applied"));
        }
        self.audit_purses();
    }

    /// What threads may still give out is not charged in the store, but lent; what a store forgot is
    /// charged again.
    fn audit_purses(&mut self) {
        if self.setup.audit && !self.forgetful && self.setup.threads > 1 {
            for index in 0..self.nodes.len() {
                let Node { spent, applied, alive, .. } = self.nodes[index];
                let held = self.nodes[index].in_purses(self.now_us);
                self.note(!alive || applied + held <= spent, || {
                    format!("node {index}: {applied} applied and {held} in purses of {spent}")
                });
            }
        }
    }

    fn note(&mut self, right: bool, what: impl FnOnce() -> String) {
        if !right && self.discrepancy.is_none() {
            self.discrepancy = Some(what());
        }
    }
}
