//! The accounts of one lane, in queues by what they want next.

use std::collections::BTreeSet;
use std::ops::Index;

use slab::Slab;

use crate::sync::account::{Account, Agenda};
use crate::sync::message::ENTRIES_MAX;
use crate::sync::shrink;
use crate::time::Timestamp;

/// Newcomers have at most this much of a batch: with more of them the others would wait for longer.
const NEWCOMERS_MAX: usize = ENTRIES_MAX / 4;

/// Of all accounts, each as it was when it was changed last.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// Tokens pending or to be reported.
    pub(super) pending: u64,
    /// Tokens leased, by depth.
    pub(super) depth: i64,
    /// Accounts under an outage policy.
    pub(super) policies: usize,
    /// Of these, accounts that are because the store is away.
    pub(super) outages: usize,
    /// Accounts that have something to report before the store gives what it has.
    pub(super) owing: usize,
}

/// Slots in the order of their times.
#[derive(Debug, Default)]
struct Queue(BTreeSet<(Timestamp, usize)>);

impl Queue {
    /// The time of the first slot; `NEVER` if there is none.
    fn first_at(&self) -> Timestamp {
        self.0.first().map_or(Timestamp::NEVER, |&(at, _)| at)
    }

    /// The first slot whose time has come.
    fn first_by(&self, now: Timestamp) -> Option<usize> {
        self.0.first().filter(|&&(at, _)| at <= now).map(|&(_, slot)| slot)
    }

    fn move_slot(&mut self, slot: usize, old: Timestamp, new: Timestamp) {
        if old != new {
            self.0.remove(&(old, slot));
            if new < Timestamp::NEVER {
                self.0.insert((new, slot));
            }
        }
    }
}

/// The accounts of one lane. Each change of one goes through [`change`](Self::change), so that queues and sums stay in
/// step with it.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    slab: Slab<Account>,
    pub(super) sums: Sums,
    /// When each account wants to report or to be probed.
    due: Queue,
    /// The same of keys about which the store has not answered, and for which no caller waits.
    newcomers_due: Queue,
    /// When the lease of each account or its window ends, or the window of its outage policy.
    ends: Queue,
    /// When each account's first waiting caller has waited long enough.
    wait_ends: Queue,
}

impl Index<usize> for Accounts {
    type Output = Account;

    fn index(&self, slot: usize) -> &Account {
        &self.slab[slot]
    }
}

impl Accounts {
    /// The slot that the next account gets.
    pub(super) fn next_slot(&self) -> usize {
        self.slab.vacant_key()
    }

    pub(super) fn insert(&mut self, account: Account) {
        self.slab.insert(account);
    }

    pub(super) fn remove(&mut self, slot: usize) -> Account {
        self.put(slot, Agenda::NONE);
        let account = self.slab.remove(slot);
        shrink::give_back(&mut self.slab);
        account
    }

    #[cfg(feature = "sim")]
    pub(super) fn get(&self, slot: usize) -> Option<&Account> {
        self.slab.get(slot)
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Account)> {
        self.slab.iter()
    }

    /// The slots of the accounts that are as asked for.
    pub(super) fn slots(&self, is_wanted: impl Fn(&Account) -> bool) -> Vec<usize> {
        let wanted = self.slab.iter().filter(|(_, account)| is_wanted(account));
        wanted.map(|(slot, _)| slot).collect()
    }

    /// Changes an account and keeps queues and sums in step with it.
    pub(super) fn change<T>(&mut self, slot: usize, change: impl FnOnce(&mut Account) -> T) -> T {
        let result = change(&mut self.slab[slot]);
        let agenda = self.slab[slot].agenda();
        self.put(slot, agenda);
        result
    }

    /// Puts an account into queues and sums in place of what they have of it.
    fn put(&mut self, slot: usize, new: Agenda) {
        let old = std::mem::replace(&mut self.slab[slot].queued, new);
        self.due.move_slot(slot, old.due, new.due);
        self.newcomers_due.move_slot(slot, old.newcomer_due, new.newcomer_due);
        self.ends.move_slot(slot, old.ends, new.ends);
        self.wait_ends.move_slot(slot, old.wait_ends, new.wait_ends);
        let sums = &mut self.sums;
        let count = |sum: &mut usize, old: bool, new: bool| {
            *sum = *sum - usize::from(old) + usize::from(new);
        };
        sums.pending = sums.pending - old.pending + new.pending;
        sums.depth += new.depth - old.depth;
        count(&mut sums.policies, old.in_policy, new.in_policy);
        count(&mut sums.outages, old.in_outage, new.in_outage);
        count(&mut sums.owing, old.is_owing, new.is_owing);
    }

    // ---- what comes next ---------------------------------------------------------------------

    /// The account that reports next in a batch that has `entries`, `newcomers` among them. Keys that the node knows
    /// go first.
    pub(super) fn next_due(
        &self,
        entries: usize,
        newcomers: usize,
        leaving: bool,
        now: Timestamp,
    ) -> Option<usize> {
        if entries == ENTRIES_MAX {
            return None;
        }
        let known = self.due.first_by(now);
        let may_be_newcomer = newcomers < NEWCOMERS_MAX || leaving;
        let newcomer = if may_be_newcomer { self.newcomers_due.first_by(now) } else { None };
        if entries < ENTRIES_MAX - NEWCOMERS_MAX { known.or(newcomer) } else { newcomer.or(known) }
    }

    /// Whether an account that is no newcomer is due.
    pub(super) fn has_due(&self, now: Timestamp) -> bool {
        self.due.first_by(now).is_some()
    }

    /// When the first account wants to report or to be probed.
    pub(super) fn due_at(&self) -> Timestamp {
        self.due.first_at().min(self.newcomers_due.first_at())
    }

    /// An account whose lease or window has ended.
    pub(super) fn ended(&self, now: Timestamp) -> Option<usize> {
        self.ends.first_by(now)
    }

    /// An account whose first caller has waited long enough.
    pub(super) fn wait_ended(&self, now: Timestamp) -> Option<usize> {
        self.wait_ends.first_by(now)
    }

    /// When the first lease, window or wait ends.
    pub(super) fn ends_at(&self) -> Timestamp {
        self.ends.first_at().min(self.wait_ends.first_at())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Limit, Terms};
    use crate::quota::Quota;
    use crate::sync::account::Settlement;
    use crate::sync::account::samples::{OPENED, account_of, answered};
    use crate::sync::message::{Entry, Given};

    fn terms() -> Terms {
        Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap()
    }

    /// The account of a key about which the store has answered.
    fn known(terms: &Terms) -> Account {
        let mut account = account_of(terms);
        answered(&mut account, &Given::default(), terms);
        account
    }

    #[test]
    fn keys_that_are_known_come_first_but_leave_a_part_of_each_batch_to_newcomers() {
        let (mut accounts, terms) = (Accounts::default(), terms());
        let (due, later) = (OPENED.plus_micros(5), OPENED.plus_micros(10));
        let of_newcomers = ENTRIES_MAX - NEWCOMERS_MAX;
        for account in [known(&terms), account_of(&terms)] {
            let slot = accounts.next_slot();
            accounts.insert(account);
            accounts.change(slot, |account| account.report_at(due));
        }
        assert_eq!(accounts.len(), 2);
        for (entries, newcomers, leaving, now, slot) in [
            (0, 0, false, OPENED, None),
            (0, 0, false, later, Some(0)),
            (of_newcomers - 1, 0, false, later, Some(0)),
            (of_newcomers, 0, false, later, Some(1)),
            (of_newcomers, NEWCOMERS_MAX, false, later, Some(0)),
            (of_newcomers, NEWCOMERS_MAX, true, later, Some(1)),
            (ENTRIES_MAX, 0, false, later, None),
        ] {
            let next = accounts.next_due(entries, newcomers, leaving, now);
            assert_eq!(next, slot, "{entries}, {newcomers}, {leaving}");
        }
        assert!(accounts.has_due(later) && !accounts.has_due(OPENED));
        accounts.remove(0);
        assert!(!accounts.has_due(later), "newcomers do not count");
    }

    #[test]
    fn sums_are_those_of_the_accounts_as_they_were_changed_last() {
        let (mut accounts, terms) = (Accounts::default(), terms());
        for _ in 0..2 {
            accounts.insert(known(&terms));
        }
        for (slot, tokens, pending) in [(0, 4, 4), (1, 3, 7), (0, 2, 9)] {
            accounts.change(slot, |account| {
                let beyond = Settlement::Beyond(tokens);
                account.settle(beyond, OPENED, None, OPENED, &terms)
            });
            assert_eq!(accounts.sums.pending, pending);
        }
        accounts.change(0, |account| account.report(&"x".into(), &terms, OPENED, false));
        assert_eq!(accounts.sums.pending, 3, "the rest is in a batch");
        for (slot, depth, leased) in [(0, 5, 5), (1, 7, 12), (0, 2, 9)] {
            accounts.change(slot, |account| {
                let entry = Entry::empty(terms.scale);
                let given = Given { depth, life_us: 2_000_000, ..Given::default() };
                account.install(&given, &entry, OPENED, OPENED, &terms);
            });
            assert_eq!(accounts.sums.depth, leased);
        }
    }
}
