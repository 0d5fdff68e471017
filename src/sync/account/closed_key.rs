//! What a node still knows of a key whose account it has closed.

use std::sync::Arc;

use super::Account;
use super::level::Level;
use crate::limit::Terms;
use crate::quota::{Scale, converted};
use crate::sync::message::Entry;
use crate::time::Timestamp;

/// A key whose account is closed.
#[derive(Debug)]
pub(crate) struct ClosedKey {
    limit_name: Arc<str>,
    key: Arc<[u8]>,
    /// The limit's number.
    pub(crate) limit: u32,
    /// As the store had it, with the level in its units.
    scale: Scale,
    version: i64,
    epoch_us: i64,
    level: Level,
}

impl Account {
    /// What is to be remembered of the key, whose account is closed at `now`: nothing where nothing was charged or all has come back, or
    /// where no more would be forgotten than a node may spend on credit of a key that it does not know.
    pub(crate) fn closed_key(
        &self,
        limit_name: &Arc<str>,
        terms: &Terms,
        now: Timestamp,
    ) -> Option<ClosedKey> {
        let (level, scale) = (self.level_in_store(), self.stored_scale());
        let is_on_credit = self.history.mean_cost <= terms.credit.known.into();
        let is_full = level.estimate(now, &scale).is_none_or(|units| units >= scale.burst);
        let is_stranger = is_on_credit && self.history.is_seen_for_the_first_time();
        if !self.history.has_charged || is_full || is_stranger {
            return None;
        }
        Some(ClosedKey {
            limit_name: limit_name.clone(),
            key: self.key.clone(),
            limit: self.limit(),
            scale,
            version: self.quota.version(),
            epoch_us: terms.epoch_us as i64,
            level,
        })
    }
}

impl ClosedKey {
    #[cfg(test)]
    pub(crate) fn of(scale: Scale) -> Self {
        let (limit_name, key) = ("limit".into(), b"key"[..].into());
        let level = Level::new(None, scale.rate);
        Self { limit_name, key, limit: 0, scale, version: 0, epoch_us: 1, level }
    }

    /// The entry that registers the key at `now`.
    pub(crate) fn entry(&self, now: Timestamp) -> Entry {
        let claim = self.level.claim(now, &self.scale);
        let (limit, key) = (self.limit_name.clone(), self.key.clone());
        let blank = Entry::blank(limit, key, self.scale, self.epoch_us);
        Entry { version: self.version, restore: true, claim, ..blank }
    }

    /// The store holds the key with another quota: of that there are as many tokens.
    pub(crate) fn follow(&mut self, version: i64, scale: Scale) {
        let token = self.scale.token;
        self.level = self.level.with_units(|units| converted(units, token, scale.token));
        (self.version, self.scale) = (version, scale);
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::StoredWindow;
    use super::super::samples::{OPENED, account_of};
    use crate::limit::Limit;
    use crate::quota::Quota;
    use crate::sync::message::Given;

    #[test]
    fn closed_key_is_remembered_unless_nothing_was_charged_all_came_back_or_credit_covers_it() {
        for (has_charged, mean_cost, requests, view, is_remembered) in [
            (true, 2, 1, 50, true),
            (true, 1, 2, 50, true),
            (true, 1, 1, 50, false),
            (false, 2, 2, 50, false),
            (true, 2, 2, 100, false),
        ] {
            let terms = Limit::new("x", Quota::per_second(100)).credit(1);
            let terms = terms.validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            let window = StoredWindow { length_us: 1, left_us: 1 };
            let given = Given { available: view * terms.scale.token, ..Given::default() };
            account.level.install(&given, &window, 0, OPENED);
            account.history.has_charged = has_charged;
            (account.history.mean_cost, account.history.requests) = (mean_cost, requests);
            let closed = account.closed_key(&"x".into(), &terms, OPENED);
            let case = (has_charged, mean_cost, requests, view);
            assert_eq!(closed.is_some(), is_remembered, "{case:?}");
        }
    }
}
