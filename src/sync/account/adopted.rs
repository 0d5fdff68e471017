//! A newer quota of the limit, which the store holds and this node was not built with.
//!
//! Buckets and books count in the units of the quota that the node was built with; what passes between
//! node and store is in the units of the quota that the store holds.

use super::Account;
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::message::{Entry, Given, Held};

/// The largest bucket in units of this node: they do not go on the wire, where less has room.
const OWN_MAX: i64 = 1 << 58;

/// A newer quota.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adopted {
    version: i64,
    /// As the store has it.
    stored: Scale,
    /// The same in the units of this node.
    own: Scale,
}

impl Adopted {
    fn new(version: i64, stored: Scale, token: i64) -> Option<Self> {
        let burst = (stored.burst / stored.token).checked_mul(token)?;
        let rate = converted(stored.rate, stored.token, token).max(1);
        (burst <= OWN_MAX).then_some(Self { version, stored, own: Scale { rate, token, burst } })
    }

    fn out(&self, units: i64) -> i64 {
        converted(units, self.own.token, self.stored.token)
    }

    fn back(&self, units: i64) -> i64 {
        converted(units, self.stored.token, self.own.token)
    }
}

/// Units of which `from` make a token, in units of which `to` do, rounded down.
fn converted(units: i64, from: i64, to: i64) -> i64 {
    let units = i128::from(units) * i128::from(to);
    let most = i128::from(OWN_MAX);
    units.div_euclid(i128::from(from)).clamp(-most, most) as i64
}

impl Account {
    /// The limit's terms for this key: with its own tick, and the newer quota if there is one.
    pub(crate) fn terms(&self, limit: &Terms) -> Terms {
        let scale = self.adopted.map_or(limit.scale, |adopted| adopted.own);
        Terms { tick_us: self.tick_us, scale, ..*limit }
    }

    /// The key begins with a newer quota, which the store holds for others.
    pub(crate) fn begin_with(&mut self, version: i64, stored: Scale) {
        self.adopted = Adopted::new(version, stored, self.scale.token);
    }

    /// The store holds the quota `stored` of this `version`, and has refused `entry`, which is of another.
    /// Goes on with the store's if it is the newer one: tells whether it does.
    pub(crate) fn adopt(&mut self, entry: &Entry, version: i64, stored: Scale) -> bool {
        let Some(adopted) = Adopted::new(version, stored, self.scale.token) else { return false };
        if version <= entry.version {
            return false;
        }
        let entry = self.in_own_units(entry);
        self.take_back(&entry);
        // The store still has it leased to this node.
        self.held.rate += entry.back_rate;
        self.held.depth += entry.back_depth;
        self.adopted = Some(adopted);
        self.refused = false;
        true
    }

    /// An entry as the store is to read it.
    pub(super) fn in_stored_units(&self, entry: Entry) -> Entry {
        let Some(adopted) = self.adopted else { return entry };
        let entry = with_units(&entry, |units| adopted.out(units));
        Entry { scale: adopted.stored, version: adopted.version, ..entry }
    }

    /// An entry that was sent, as this node reckons.
    pub(crate) fn in_own_units(&self, entry: &Entry) -> Entry {
        self.adopted
            .map_or_else(|| entry.clone(), |adopted| with_units(entry, |units| adopted.back(units)))
    }

    /// What the store gave, as this node reckons.
    pub(crate) fn given_in_own_units(&self, given: &Given) -> Given {
        let Some(adopted) = self.adopted else { return *given };
        let own = |units| adopted.back(units);
        Given {
            rate: own(given.rate),
            available: own(given.available),
            level: own(given.level),
            leased: own(given.leased),
            recall: own(given.recall),
            ..*given
        }
    }
}

fn with_units(entry: &Entry, convert: impl Fn(i64) -> i64) -> Entry {
    Entry {
        taken: convert(entry.taken),
        returned: convert(entry.returned),
        lost: convert(entry.lost),
        back_rate: convert(entry.back_rate),
        held: Held {
            rate: convert(entry.held.rate),
            outstanding: convert(entry.held.outstanding),
            demand: convert(entry.held.demand),
            ..entry.held
        },
        demand: convert(entry.demand),
        want_rate: convert(entry.want_rate),
        claim: entry.claim.map(convert),
        ..entry.clone()
    }
}
