//! Every token that was spent, as the store has charged it.

use std::collections::{HashMap, HashSet};

use super::super::store::RecordLife;

/// What the audits compare with the nodes and the store.
#[derive(Debug, Default)]
pub(in crate::sim) struct Ledger {
    /// Tokens of each key in batches that the store has applied, each counted once.
    pub(super) charged_on: HashMap<u32, u64>,
    /// Batches that the store has applied: the node, the lane and the number.
    pub(super) applied: HashSet<(usize, u32, i64)>,
    /// The store has lost what it had acknowledged: its sums say nothing any more.
    pub(super) is_store_forgetful: bool,
    /// Keys whose records were lost: theirs say nothing either.
    pub(super) lost_keys: HashSet<u32>,
    /// Of each key the record as it was seen last, and what had been charged to those before it.
    pub(super) records: HashMap<u32, (RecordLife, u64)>,
    /// Faults that hit no node with a lease.
    pub(in crate::sim) idle_faults: u32,
    /// The first time that something did not add up.
    pub(in crate::sim) discrepancy: Option<String>,
}

impl Ledger {
    /// Notes a discrepancy unless it is `right`.
    pub(super) fn check(&mut self, right: bool, what: impl FnOnce() -> String) {
        if !right && self.discrepancy.is_none() {
            self.discrepancy = Some(what());
        }
    }
}
