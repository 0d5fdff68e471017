//! The quota that a key follows: one that this node's callers name, or one that the store holds.
//!
//! Buckets and accounts count in the units that this node has for all plans of a limit; what passes between node and store
//! is in the units of the quota that the store holds, which are others where that is of another definition.
//!
//! The store keeps the quota with the highest version that it has seen of a key, and refuses entries of another. A version
//! is that of the limit's definition, and how often the key's plan was changed under it. A node whose callers name another
//! plan than before *insists* on it until the store has taken it: refused, it comes again with a version above the store's.
//! A node whose callers go on as they did follows the store, and insists again after a minute: whoever named that plan may be
//! gone. A node that is asked for a key anew insists too. So the plan that was named last holds on all nodes.

use crate::limit::Terms;
use crate::quota::{Scale, converted};
use crate::sync::message::{Entry, Given, Held};
use crate::time::Timestamp;

/// Changes of plan are counted in so many bits of a version.
const CHANGES_BITS: u32 = 27;
/// The most changes of plan that are counted: one every 10 ms for 15 days. Then nobody insists any more.
const CHANGES_MAX: i64 = (1 << CHANGES_BITS) - 1;

/// While the store refuses a key, or holds another quota of a limit, an event says so once in this time.
pub(crate) const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// The version of a limit's definition that a key's version is of.
pub(crate) const fn definition(version: i64) -> i64 {
    version >> CHANGES_BITS
}

/// Whether the quota of this version may be another than the one that the limit was built with.
pub(crate) const fn is_changed(version: i64) -> bool {
    changes(version) > 0
}

/// How often the key's plan was changed under its definition.
const fn changes(version: i64) -> i64 {
    version & CHANGES_MAX
}

/// The quota that this node and the store have agreed on for one key, or that this node insists on.
#[derive(Debug)]
pub(super) struct AgreedQuota {
    version: i64,
    /// As the store has it.
    stored: Scale,
    /// The same in the units of this node.
    own: Scale,
    /// The plan that callers name is asked for, and the store has not taken it yet.
    insists: bool,
    /// When this node may insist again on the plan that its callers name, after it followed the store.
    again_from: Timestamp,
    /// The store refuses the key: it holds another quota of the limit, or another program's value.
    pub(super) is_refused: bool,
    /// When the next event may name the refusal.
    event_from: Timestamp,
}

impl AgreedQuota {
    /// The quota of the limit or of a plan of it.
    pub(super) fn of(terms: &Terms, is_plan: bool) -> Self {
        Self {
            // Nodes that do not know of a change give way to those that do.
            version: i64::from(terms.version) << CHANGES_BITS | i64::from(is_plan),
            stored: terms.stored_scale,
            own: terms.scale,
            insists: true,
            again_from: Timestamp::NEVER,
            is_refused: false,
            event_from: Timestamp::ZERO,
        }
    }

    /// Asks for the plan with these terms, if it is another one than that in force: returns whether it does. Of a newer
    /// definition this node knows no plans.
    pub(super) fn ask_for(&mut self, terms: &Terms) -> bool {
        let (known, asked) = (definition(self.version), i64::from(terms.version));
        if known > asked || known == asked && self.stored.is_same_quota(&terms.stored_scale) {
            return false;
        }
        (self.stored, self.own) = (terms.stored_scale, terms.scale);
        self.insist(self.version.max(asked << CHANGES_BITS));
        true
    }

    /// Asks for this node's plan with a version above `version`.
    fn insist(&mut self, version: i64) {
        self.insists = true;
        let is_counted = changes(version) < CHANGES_MAX;
        self.version = if is_counted { version + 1 } else { version };
    }

    /// The store holds `stored` of this `version` and has refused an entry of another; callers name the plan of `named`. Says
    /// which of them is to be reported by now; `None` if neither can be: the store is to be asked later.
    pub(super) fn answer_refusal(
        &mut self,
        version: i64,
        stored: Scale,
        named: &Terms,
        now: Timestamp,
    ) -> Option<Agreement> {
        let is_older = definition(version) < definition(self.version);
        let is_newer = definition(version) > definition(self.version);
        if !(is_newer || stored.has_same_windows(&named.stored_scale)) {
            // Another algorithm needs another version.
            return None;
        }
        let may_insist = changes(version) < CHANGES_MAX;
        // A build that chooses other units has the same quota.
        let is_other = !stored.is_same_quota(&named.stored_scale);
        if self.insists && !is_newer && is_other && may_insist {
            self.insist(version.max(self.version));
            return Some(Agreement::Insists);
        }
        if is_older {
            return None;
        }
        self.own = stored.in_own_units(self.own.token)?;
        (self.version, self.stored, self.insists) = (version, stored, false);
        self.again_from = now.plus_micros(REFUSAL_EVENTS_US);
        Some(Agreement::Follows)
    }

    /// Goes on with the quota `stored` of this `version`, if units of this node can hold it.
    pub(super) fn begin_with(&mut self, version: i64, stored: Scale) {
        if let Some(own) = stored.in_own_units(self.own.token) {
            (self.version, self.stored, self.own) = (version, stored, own);
        }
    }

    /// Whether callers have gone on naming another plan than the one in force for so long that it is to be asked for again:
    /// whoever named that one may be gone.
    pub(super) fn may_ask_again(&self, now: Timestamp) -> bool {
        now >= self.again_from
    }

    /// The store has taken an entry.
    pub(super) fn set_taken(&mut self) {
        (self.insists, self.is_refused) = (false, false);
    }

    /// The quota in the units of this node.
    pub(super) fn scale(&self) -> Scale {
        self.own
    }

    pub(super) fn version(&self) -> i64 {
        self.version
    }

    /// The quota as the store has it.
    pub(super) fn stored(&self) -> Scale {
        self.stored
    }

    /// Whether an event is to name the store's refusal now; if so, notes that it does.
    pub(super) fn take_event_due(&mut self, now: Timestamp) -> bool {
        let is_due = now >= self.event_from;
        if is_due {
            self.event_from = now.plus_micros(REFUSAL_EVENTS_US);
        }
        is_due
    }

    /// Units of this node in those of the store.
    pub(super) fn out(&self, units: i64) -> i64 {
        if self.has_same_units() {
            return units;
        }
        converted(units, self.own.token, self.stored.token)
    }

    fn back(&self, units: i64) -> i64 {
        converted(units, self.stored.token, self.own.token)
    }

    /// Whether units of this node are those of the store.
    fn has_same_units(&self) -> bool {
        self.own.token == self.stored.token
    }

    /// An entry in the units of the store. Its claim is none yet.
    pub(super) fn in_stored_units(&self, entry: Entry) -> Entry {
        let entry =
            if self.has_same_units() { entry } else { with_units(&entry, |units| self.out(units)) };
        Entry { scale: self.stored, version: self.version, ..entry }
    }

    /// An entry that was sent, in the units of this node, but for its claim.
    pub(super) fn in_own_units(&self, entry: &Entry) -> Entry {
        if self.has_same_units() {
            return entry.clone();
        }
        with_units(entry, |units| self.back(units))
    }

    /// What the store gave, in the units of this node.
    pub(super) fn given_in_own_units(&self, given: &Given) -> Given {
        if self.has_same_units() {
            return *given;
        }
        let own = |units| self.back(units);
        Given {
            rate: own(given.rate),
            available: own(given.available),
            level: own(given.level),
            leased: own(given.leased),
            recall: own(given.recall),
            previous: own(given.previous),
            ..*given
        }
    }
}

/// What becomes of an entry that the store has refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// It comes again with the quota that the store holds.
    Follows,
    /// It comes again with a higher version.
    Insists,
}

fn with_units(entry: &Entry, convert: impl Fn(i64) -> i64) -> Entry {
    Entry {
        taken: convert(entry.taken),
        taken_before: convert(entry.taken_before),
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
        ..entry.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{OPENED, account_of};
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    fn terms_of(rate: u64) -> Terms {
        Limit::new("x", Quota::per_second(rate)).validate_hybrid(4).unwrap()
    }

    #[test]
    fn another_plan_is_asked_for_once_with_the_next_version() {
        let (own, other) = (terms_of(100), terms_of(200));
        let mut quota = AgreedQuota::of(&own, false);
        let first = quota.version();
        quota.set_taken();
        assert!(!quota.ask_for(&own), "it is in force");
        assert!(quota.ask_for(&other));
        assert_eq!(quota.version(), first + 1);
        assert!(quota.insists && quota.stored().is_same_quota(&other.stored_scale));
        assert!(!quota.ask_for(&other), "it is asked for");
    }

    #[test]
    fn changes_of_plan_are_counted_up_to_what_a_version_has_room_for() {
        let mut quota = AgreedQuota::of(&terms_of(100), false);
        let definition = quota.version();
        for (before, after) in [(0, 1), (CHANGES_MAX - 1, CHANGES_MAX), (CHANGES_MAX, CHANGES_MAX)]
        {
            quota.insist(definition + before);
            assert_eq!(quota.version() - definition, after);
        }
    }

    /// Another node's plan is in force until this one's callers name theirs again.
    #[test]
    fn plan_is_insisted_on_until_the_store_has_taken_it() {
        let (own, other) = (terms_of(100), terms_of(200));
        for (is_taken, agreement) in [(false, Agreement::Insists), (true, Agreement::Follows)] {
            let mut account = account_of(&own);
            let entry = account.report(&"x".into(), &own, OPENED, false);
            assert_eq!(entry.version, 0, "the limit's own quota is no plan");
            if is_taken {
                account.set_taken();
            }
            let agreed = account.agree(&entry, 1, other.stored_scale, &own, OPENED);
            assert_eq!(agreed, Some(agreement));
        }
    }

    #[test]
    fn key_follows_its_limit_when_that_is_updated() {
        let (own, other) = (terms_of(100), terms_of(200));
        let mut account = account_of(&own);
        account.follow_callers(&own, OPENED);
        assert!(account.stored_scale().is_same_quota(&own.stored_scale));
        account.follow_callers(&other, OPENED);
        assert!(account.stored_scale().is_same_quota(&other.stored_scale));
    }

    #[test]
    fn key_that_follows_the_store_asks_for_its_own_plan_again_after_a_minute() {
        let (own, other) = (terms_of(100), terms_of(200));
        let mut account = account_of(&own);
        let entry = account.report(&"x".into(), &own, OPENED, false);
        account.set_taken();
        let agreed = account.agree(&entry, 1, other.stored_scale, &own, OPENED);
        assert_eq!(agreed, Some(Agreement::Follows));
        for (after_us, stored) in
            [(0, &other), (REFUSAL_EVENTS_US - 1, &other), (REFUSAL_EVENTS_US, &own)]
        {
            account.follow_callers(&own, OPENED.plus_micros(after_us));
            assert!(account.stored_scale().is_same_quota(&stored.stored_scale), "{after_us}");
        }
    }

    #[test]
    fn newer_definition_is_asked_for_by_its_number() {
        let newer = Limit::new("x", Quota::per_second(200)).version(2).validate_hybrid(4).unwrap();
        let mut quota = AgreedQuota::of(&terms_of(100), false);
        assert!(quota.ask_for(&newer));
        assert_eq!((definition(quota.version()), changes(quota.version())), (2, 1));
        assert!(!quota.ask_for(&terms_of(100)), "nobody insists on an earlier one");
    }
}
