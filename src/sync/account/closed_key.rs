//! What a node still knows of a key whose account it has closed.

use std::sync::Arc;

use super::Account;
use super::level::Level;
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::message::{Claim, Entry};
use crate::time::Timestamp;

/// A key whose account is closed, as it is told to a store that has lost it.
#[derive(Debug)]
pub(crate) struct ClosedKey {
    /// Registers the key anew, without a claim.
    entry: Entry,
    /// In the units of the store. `None` if the store has come to hold the key with another quota.
    level: Option<Level>,
    /// The limit's number.
    pub(crate) limit: u32,
}

impl Account {
    /// What is to be remembered of the key, whose account is closed at `now`: nothing where no more would be forgotten than a node
    /// may spend on credit of a key that it does not know, or where what was spent has come back.
    pub(crate) fn closed_key(
        &self,
        limit: &Arc<str>,
        terms: &Terms,
        now: Timestamp,
    ) -> Option<ClosedKey> {
        let (level, stored) = (self.level_in_store(), self.stored_scale());
        let is_on_credit = self.history.mean_cost <= terms.credit.known.into();
        let is_full = level.estimate(now, &stored).is_none_or(|units| units >= stored.burst);
        if is_full || is_on_credit && self.history.is_seen_for_the_first_time() {
            return None;
        }
        let (limit, key) = (limit.clone(), self.key.clone());
        let silent = Entry::silent(limit, key, self.scale, terms.epoch_us as i64);
        let entry = Entry { restore: true, ..self.quota.in_stored_units(silent) };
        Some(ClosedKey { entry, level: Some(level), limit: self.limit() })
    }
}

impl ClosedKey {
    /// The entry that registers the key at `now`.
    pub(crate) fn entry(&self, now: Timestamp) -> Entry {
        let claim = match &self.level {
            Some(level) => level.claim(now, &self.entry.scale),
            // How much there can be of that quota is not known here.
            None => Some(Claim { unleased: 0, previous: 0, viewed_us: 0 }),
        };
        Entry { claim, ..self.entry.clone() }
    }

    /// The store holds the key with another quota.
    pub(crate) fn follow(&mut self, version: i64, stored: Scale) {
        (self.entry.version, self.entry.scale, self.level) = (version, stored, None);
    }
}
