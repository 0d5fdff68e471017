//! The quota that a key follows: this node's, or a newer one that the store holds.
//!
//! Buckets and accounts count in the units of the quota that the node was built with; what passes between
//! node and store is in the units of the quota that the store holds.

use crate::quota::{Curve, PERIOD_MAX, Scale, TOKENS_MAX};
use crate::sync::message::{Entry, Given, Held};
use crate::time::Timestamp;

/// The largest bucket in units of this node: they do not go on the wire, where less has room.
const OWN_MAX: i64 = 1 << 58;

/// The longest time that a token of any limit takes to flow in.
const TOKEN_US_MAX: i64 = PERIOD_MAX.as_micros() as i64;

/// While the store refuses a key, or holds another quota of a limit, an event says so once in this time.
pub(crate) const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// A newer quota.
#[derive(Clone, Copy, Debug)]
struct Adopted {
    version: i64,
    /// As the store has it.
    stored: Scale,
    /// The same in the units of this node.
    own: Scale,
}

impl Adopted {
    /// `None` if what the store holds is no quota, or one that this node's units cannot hold.
    fn new(version: i64, stored: Scale, token: i64) -> Option<Self> {
        let tokens = stored.burst / stored.token;
        let Scale { rate, token: unit, .. } = stored;
        let is_rate = rate > 0 && unit / rate <= TOKEN_US_MAX && rate / unit <= TOKENS_MAX as i64;
        // Other numbers of the same algorithm: this node counts by its own.
        let is_quota = is_rate && (1..=TOKENS_MAX as i64).contains(&tokens);
        let burst = tokens.checked_mul(token).filter(|&burst| is_quota && burst <= OWN_MAX)?;
        let rate = converted(stored.rate, stored.token, token).max(1);
        let own = Scale { rate, token, burst, curve: stored.curve };
        // A window keeps its length, nearly.
        let off_us = (own.window_us() - stored.window_us()).abs();
        let is_kept = own.curve == Curve::Refill || off_us <= stored.window_us() / 100;
        is_kept.then_some(Self { version, stored, own })
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

/// The quota that this node and the store have agreed on for one key.
#[derive(Debug)]
pub(super) struct AgreedQuota {
    /// The store's, if it is newer than this node's.
    adopted: Option<Adopted>,
    /// The store refuses the key: it holds another quota of the limit, or another program's value.
    pub(super) is_refused: bool,
    /// When the next event may name the refusal.
    event_from: Timestamp,
}

impl AgreedQuota {
    pub(super) fn own() -> Self {
        Self { adopted: None, is_refused: false, event_from: Timestamp::ZERO }
    }

    /// Goes on with the quota `stored` of this `version` in units of which `unit` make a token, if they can hold it:
    /// returns whether they can.
    pub(super) fn adopt(&mut self, version: i64, stored: Scale, unit: i64) -> bool {
        let adopted = Adopted::new(version, stored, unit);
        if adopted.is_some() {
            self.adopted = adopted;
        }
        adopted.is_some()
    }

    /// The quota in the units of this node; `own` is what it was built with.
    pub(super) fn scale(&self, own: Scale) -> Scale {
        self.adopted.map_or(own, |adopted| adopted.own)
    }

    /// The quota as the store has it; `own` is what this node was built with.
    pub(super) fn stored(&self, own: Scale) -> Scale {
        self.adopted.map_or(own, |adopted| adopted.stored)
    }

    /// Whether an event is to name the store's refusal now; if so, notes that it does.
    pub(super) fn take_event_due(&mut self, now: Timestamp) -> bool {
        let is_due = now >= self.event_from;
        if is_due {
            self.event_from = now.plus_micros(REFUSAL_EVENTS_US);
        }
        is_due
    }

    /// An entry as the store is to read it.
    pub(super) fn in_stored_units(&self, entry: Entry) -> Entry {
        let Some(adopted) = self.adopted else { return entry };
        let entry = with_units(&entry, |units| adopted.out(units));
        Entry { scale: adopted.stored, version: adopted.version, ..entry }
    }

    /// An entry that was sent, in the units of this node.
    pub(super) fn in_own_units(&self, entry: &Entry) -> Entry {
        self.adopted
            .map_or_else(|| entry.clone(), |adopted| with_units(entry, |units| adopted.back(units)))
    }

    /// What the store gave, in the units of this node.
    pub(super) fn given_in_own_units(&self, given: &Given) -> Given {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply said that a newer quota had no refill: the key took it, and was never filled again.
    #[test]
    fn newer_quota_that_no_limit_can_have_is_not_adopted() {
        let most = TOKENS_MAX as i64;
        let adopts = |rate, token, burst| {
            AgreedQuota::own().adopt(1, Scale { rate, token, burst, curve: Curve::Refill }, 1000)
        };
        assert!(adopts(1, 1, 1) && adopts(1, 1, most));
        assert!(!adopts(0, 1, 20_040_000), "no refill");
        assert!(adopts(1, TOKEN_US_MAX, TOKEN_US_MAX) && !adopts(1, TOKEN_US_MAX + 1, 1 << 50));
        assert!(adopts(most, 1, 1) && !adopts(most + 1, 1, 1));
        assert!(!adopts(1, 10, 9), "no whole token");
        assert!(!adopts(1, 1, -20));
        assert!(!adopts(1, 1, most + 1));
    }
}
