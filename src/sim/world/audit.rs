//! Audits: every token that was spent is charged once, and no lease is larger than what is registered.

#[cfg(test)]
use std::collections::BTreeMap;
use std::collections::HashMap;

use super::World;
use crate::error::StoreError;
use crate::sync::message::{BatchVerdict, Entry, Grant, Reply, Request};

impl World {
    pub(super) fn acknowledge(
        &mut self,
        node: usize,
        lane: u32,
        tokens: u64,
        result: &Result<Reply, StoreError>,
    ) {
        if !self.setup.audit {
            return;
        }
        if let Ok(Reply { verdict: BatchVerdict::Applied(grants), .. }) = result {
            let node = &mut self.nodes[node];
            let sent = node.sent.get(&lane).filter(|_| tokens > 0);
            let sent = sent.map_or(&[][..], |request| &request.entries);
            // What the store refused is still to be reported.
            let refused = sent.iter().zip(grants).filter(|(_, grant)| !is_charged(grant));
            node.acknowledged += tokens - refused.map(|(entry, _)| tokens_of(entry)).sum::<u64>();
        }
    }

    /// A node has admitted tokens.
    pub(super) fn spend(&mut self, index: usize, key: u32, tokens: u64) {
        let node = &mut self.nodes[index];
        node.spent += tokens;
        if self.setup.audit {
            *node.spent_on.entry(key).or_default() += tokens;
        }
    }

    /// Notes what the store has applied, each batch once, and looks at the keys in it.
    pub(super) fn book(&mut self, request: &Request, reply: &Reply) {
        if !self.setup.audit {
            return;
        }
        if let BatchVerdict::Applied(grants) = &reply.verdict
            && self.is_new(request)
        {
            let place = place_of(request);
            self.ledger.applied.insert((place, request.lane, request.sequence));
            let entries = request.entries.iter().zip(grants);
            for (entry, _) in entries.filter(|(_, grant)| is_charged(grant)) {
                let (key, tokens) = (number_of(entry), tokens_of(entry));
                *self.ledger.charged_on.entry(key).or_default() += tokens;
                // A node that had to take another name is not watched any further.
                if let Some(node) = self.nodes.get_mut(place) {
                    *node.charged_on.entry(key).or_default() += tokens;
                }
            }
        }
        self.audit_store(request);
        self.audit_leases(request);
    }

    fn is_new(&self, request: &Request) -> bool {
        !self.ledger.applied.contains(&(place_of(request), request.lane, request.sequence))
    }

    /// Of each key: charged for the node + what a new batch reports <= admitted by the node, for as
    /// long as the store keeps its memory.
    pub(super) fn audit_batch(&mut self, index: usize, request: &Request) {
        if !self.setup.audit || self.ledger.is_store_forgetful || !self.is_new(request) {
            return;
        }
        let node = &self.nodes[index];
        let too_much = request.entries.iter().find_map(|entry| {
            let key = number_of(entry);
            let of = |sums: &HashMap<u32, u64>| sums.get(&key).copied().unwrap_or(0);
            let (reported, spent) = (tokens_of(entry), of(&node.spent_on));
            let charged = of(&node.charged_on);
            (charged + reported > spent).then_some((key, charged, reported, spent))
        });
        if let Some((key, charged, reported, spent)) = too_much {
            self.ledger.check(false, || {
                format!(
                    "node {index} reports {reported} on key {key} beside {charged} charged, \
                     and admitted {spent}"
                )
            });
        }
    }

    /// Consumed = acknowledged + in flight + pending.
    pub(super) fn audit_node(&mut self, index: usize) {
        if self.setup.audit {
            let node = &self.nodes[index];
            let unbooked = node.asked.values().filter(|bucket| bucket.account().is_none());
            let pending =
                node.engine.pending() + unbooked.map(|bucket| bucket.pending()).sum::<u64>();
            let (spent, known) = (node.spent, node.acknowledged + pending);
            self.ledger
                .check(spent == known, || format!("node {index} spent {spent}, {known} are known"));
            if let Some((depth, all)) = self.nodes[index].overfull(self.now_us) {
                self.ledger
                    .check(false, || format!("node {index} holds {all} of a depth of {depth}"));
            }
        }
    }

    /// Of each key in the batch: charged in the store = applied, each batch once, for as long as it
    /// keeps its memory; and what was charged for a node was admitted by it.
    fn audit_store(&mut self, request: &Request) {
        if self.ledger.is_store_forgetful {
            return;
        }
        for entry in &request.entries {
            let key = number_of(entry);
            let applied = self.ledger.charged_on.get(&key).copied().unwrap_or(0);
            let Some(record) = self.store.record_of(&entry.limit, &entry.key) else { continue };
            let clock_us = self.store.clock_us(self.now_us);
            let (last, before) = self.ledger.records.entry(key).or_insert((record, 0));
            if last.birth_us != record.birth_us && last.until_us <= clock_us {
                // The last record had expired: the new one begins with this batch.
                *before += last.charged;
            }
            *last = record;
            let charged = *before + record.charged;
            let known = !self.ledger.lost_keys.contains(&key);
            self.ledger.check(!known || charged == applied, || {
                format!("key {key}: {charged} charged, {applied} applied")
            });
        }
    }

    /// Of each key in the batch: refill and depth held by all nodes <= registered in the store, and the registered
    /// refill <= the rate, for as long as the store keeps its memory.
    fn audit_leases(&mut self, request: &Request) {
        if self.ledger.is_store_forgetful || self.setup.newer.is_some() {
            return;
        }
        for entry in &request.entries {
            let key = number_of(entry);
            let record = self.store.record(&entry.limit, &entry.key);
            let Some(record) = record.filter(|_| !self.ledger.lost_keys.contains(&key)) else {
                continue;
            };
            let rate = record.scale.rate;
            let (leased, depth) =
                (record.leased.iter().sum::<i64>(), record.depth.iter().sum::<i64>());
            let held = || self.nodes.iter().filter_map(|node| node.lease(key, self.now_us));
            let held_rate: i64 = held().map(|held| held.rate).sum();
            let held_depth: i64 = held().map(|held| held.depth).sum();
            let right = held_rate <= leased && held_depth <= depth && leased <= rate;
            self.ledger.check(right, || {
                format!(
                    "key {key}: refill {held_rate} held of {leased} leased of {rate}, depth {held_depth} held of {depth}"
                )
            });
        }
    }

    /// When all nodes have reported everything: admitted = charged, of each node and key.
    #[cfg(test)]
    pub(in crate::sim) fn audit_settled(&mut self) {
        for index in 0..self.nodes.len() {
            let super::Node { spent_on, charged_on, .. } = &self.nodes[index];
            let spent = spent_on.iter().filter(|(_, tokens)| **tokens > 0);
            let charged = charged_on.iter().filter(|(_, tokens)| **tokens > 0);
            let (spent, charged): (BTreeMap<_, _>, BTreeMap<_, _>) =
                (spent.collect(), charged.collect());
            let (alike, what) = (spent == charged, format!("{spent:?} spent, {charged:?} charged"));
            self.ledger.check(alike, || format!("node {index}: {what}"));
        }
    }
}

/// The node that sent a batch, according to the name that it began with.
fn place_of(request: &Request) -> usize {
    (u128::from_le_bytes(request.instance) as usize).wrapping_sub(1)
}

/// The number of an entry's key, as arrivals have it.
pub(super) fn number_of(entry: &Entry) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&entry.key[..4]);
    u32::from_le_bytes(bytes)
}

/// Tokens that an entry reports as spent.
fn tokens_of(entry: &Entry) -> u64 {
    (entry.spent + entry.debt + entry.allowed) as u64
}

/// Whether the store has charged what an entry reports: it refuses what has another quota.
fn is_charged(grant: &Grant) -> bool {
    matches!(grant, Grant::Given(_))
}
