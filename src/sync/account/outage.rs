//! What a key lives on while the store is away.

use super::Account;
use super::lease::{WINDOW_MARGIN_US, given_us};
use super::policy::{Outage, PolicyInForce, PolicyWindow, flow};
use crate::bucket::{Lease, MAX_TOKENS, UNLIMITED_RATE};
use crate::limit::{OutagePolicy, Terms};
use crate::quota::Curve;
use crate::sync::message::Backdated;
use crate::time::Timestamp;

/// The engine counts longer windows at each end, even unused ones: they end rarely.
const UNUSED_WINDOW_LEAST_US: i64 = 60_000_000;

impl Account {
    /// The lease has ended before the store answered: what is left of it may no longer be spent,
    /// unless an outage policy begins with it. Returns whether the lease has ended, and not only its window.
    pub(crate) fn end_lease(&mut self, now: Timestamp) -> bool {
        if now < self.lease.ends {
            self.close_window_if_due(now);
            return false;
        }
        self.collect(now, true);
        self.lease.ends = Timestamp::ZERO;
        true
    }

    /// Puts the limit's outage policy in force. All leases of the key have ended, so that no node has its
    /// refill since. `nodes` is the number of nodes that share the limit. Returns the tokens that are
    /// lent from the last view.
    pub(crate) fn enter_policy(
        &mut self,
        now: Timestamp,
        outage: &Outage,
        terms: &Terms,
        nodes: i64,
    ) -> i64 {
        let unit = self.scale.token;
        let credit_before = i64::from(self.spending.credit_given) + self.spending.unsent.debt;
        self.absorb(now, true, |_, _| 0);
        let credit_left = credit_before - self.spending.unsent.debt;
        let is_alive = self.outlives(outage, terms);
        let left = i64::from(self.bucket.withdraw(u32::MAX));
        let own = if is_alive { left } else { 0 };
        let own_given_us = self.own_given_us(terms);
        let (rate, depth, loan) = self.policy_terms(terms, is_alive, nodes);
        let open = terms.outage == OutagePolicy::Open;
        let refilled =
            if open { 0 } else { flow(0, rate, now.micros_since(outage.ended), depth, unit) };
        // A key of which the node has no view goes on with its first credit.
        let first = if self.level.view.is_none() { credit_left.min(depth) } else { 0 };
        let begun = ((first + loan) * unit + refilled).min(depth.saturating_mul(unit));
        let tokens = if open { depth } else { own + begun / unit };
        let fraction = if open { 0 } else { begun % unit };
        let admitted_before = self.spending.unsent.allowed;
        let mut policy = PolicyInForce {
            entered: now,
            is_share: terms.outage == OutagePolicy::Share,
            rate,
            depth,
            begun,
            own,
            own_given_us,
            admitted_before,
            window: None,
            taken_before: (0, 0),
        };
        let amended = self.bucket.amend(now, policy.lease(), tokens, fraction, unit);
        self.lease.remainder = amended.remainder;
        // What has no room in the policy's depth is not spent.
        policy.own = own.min(amended.units / unit);
        policy.begun = begun.min(amended.units - policy.own * unit);
        self.lease.left_to_policies = self.lease.left_to_policies.map(|left| left + policy.own);
        self.policy = Some(policy);
        self.answer_by_policy(now);
        // A share of a burst that is smaller than the cluster is a token all the same.
        let shares = terms.outage == OutagePolicy::Share && nodes > terms.scale.burst / unit;
        loan.max(i64::from(shares))
    }

    /// Whether the lease lasted until the silence began. If it ended before, others may have leased the same since.
    fn outlives(&self, outage: &Outage, terms: &Terms) -> bool {
        self.lease.held.ends_us(terms.epoch_us) > outage.last_us
    }

    /// The rate and the depth that the limit's policy gives to one of `nodes`, and the tokens that it lends from the
    /// last view.
    fn policy_terms(&self, terms: &Terms, is_lease_alive: bool, nodes: i64) -> (i64, i64, i64) {
        // Refill of a window ends with it: no rate goes on.
        let has_last_rate = is_lease_alive && terms.scale.curve == Curve::Refill;
        match (terms.outage, has_last_rate) {
            (OutagePolicy::Share, _) => {
                let depth = (terms.scale.burst / self.scale.token / nodes).max(1);
                (terms.scale.rate / nodes, depth, self.loan(nodes).min(depth))
            }
            (OutagePolicy::LastRate, true) => {
                let depth = self.lease.held.depth - self.lease.kept_depth;
                (self.lease.held.rate, depth.max(1), 0)
            }
            (OutagePolicy::Open, _) => (UNLIMITED_RATE, i64::from(MAX_TOKENS), 0),
            (OutagePolicy::Closed, _) | (OutagePolicy::LastRate, false) => (0, 0, 0),
        }
    }

    /// What may be spent of the level last seen, in tokens; a key with a lease has what is left of it.
    fn loan(&self, nodes: i64) -> i64 {
        let level = self.level.view.map_or(0, |view| view.unleased.max(0));
        if self.lease.is_any() { 0 } else { level / self.scale.token / nodes }
    }

    /// Ends the outage policy: the store answers again, and did from `back` on; `None` if it answered others all the
    /// time. What the policy took is to be reported now.
    /// The lane's time is at least `stamp_us`.
    pub(crate) fn leave_policy(&mut self, now: Timestamp, back: Option<Timestamp>, stamp_us: i64) {
        self.collect(now, true);
        self.schedule.due = now;
        let Some(policy) = self.policy.take() else { return };
        self.spending.policy_left = now;
        // What was lent of it is not there to be lent again.
        if let Some(view) = &mut self.level.view {
            view.unleased = view.unleased.min(0);
        }
        let (unit, window_us) = (self.scale.token, self.stored_scale().window_us());
        // To the unit, with what makes no whole token yet.
        let left = self.bucket.amend(now, policy.lease(), 0, 0, unit).units;
        self.bucket.withdraw(u32::MAX);
        self.bucket.amend(now, Lease::default(), 0, 0, unit);
        self.lease.remainder = 0;
        let unsent = &mut self.spending.unsent;
        let admitted = (unsent.allowed - policy.admitted_before).saturating_mul(unit);
        let taken = policy.taken((left, admitted), back, now, unit);
        unsent.taken = unsent.taken.saturating_add(taken.max(0));
        let (taken_before, ended_us) = policy.taken_before;
        let is_of_window_before = (0..window_us).contains(&(stamp_us - ended_us));
        if is_of_window_before {
            unsent.taken_before = unsent.taken_before.saturating_add(taken_before);
        } else if stamp_us < ended_us {
            unsent.taken = unsent.taken.saturating_add(taken_before);
        }
        let unspent = (-taken).clamp(0, policy.own * unit) / unit;
        if let Some(from_us) = policy.own_given_us {
            unsent.unspent.add(Backdated { tokens: unspent, from_us });
        }
    }

    /// The window has ended in which a policy is in force: what it took so far is charged to that, and what it takes from now on to
    /// the `next`. If the engine comes late, or is not in time by other keys' windows, nobody knows in which of the two it was taken: then
    /// it is charged to the next too. The engine may also be held up between its reading of `now` and the count. What is taken meanwhile is
    /// within what the bound allows shares of windows.
    pub(crate) fn turn_policy_window(
        &mut self,
        now: Timestamp,
        next: Option<PolicyWindow>,
        is_in_time: bool,
    ) {
        self.collect(now, true);
        let window_us = self.stored_scale().window_us();
        let Some(policy) = &mut self.policy else { return };
        let Some(window) = std::mem::replace(&mut policy.window, next) else { return };
        let (unit, allowed) = (self.scale.token, self.spending.unsent.allowed);
        let admitted = (allowed - policy.admitted_before).saturating_mul(unit);
        if (admitted == 0 || !is_in_time) && window_us < UNUSED_WINDOW_LEAST_US {
            // Many keys would cost the engine much for little.
            policy.window = None;
        }
        if now >= window.ends || !is_in_time {
            return;
        }
        let amended = self.bucket.amend(now, policy.lease(), 0, self.lease.remainder, unit);
        self.lease.remainder = amended.remainder;
        let taken = policy.taken((amended.units, admitted), Some(now), now, unit);
        policy.taken_before = (taken.max(0), window.ends_us);
        policy.own = (-taken).clamp(0, policy.own * unit) / unit;
        policy.begun = amended.units - policy.own * unit;
        (policy.entered, policy.admitted_before) = (now, allowed);
    }

    /// When the lease was renewed last of which a policy has tokens, if it is known when it ends and what it left.
    fn own_given_us(&self, terms: &Terms) -> Option<i64> {
        self.lease.left_to_policies.and(given_us(&self.lease.held, terms.epoch_us))
    }

    /// The store has renewed the lease, which is another one if the last one had ended (`is_void`). Its answer may be of the time before the
    /// policy that is in force.
    pub(super) fn renew_left_to_policies(&mut self, is_void: bool, terms: &Terms) {
        if is_void || self.policy.is_none() {
            self.lease.left_to_policies = Some(0);
            return;
        }
        let own_given_us = self.own_given_us(terms);
        if let Some(policy) = &mut self.policy {
            policy.own_given_us = own_given_us;
        }
    }

    /// Tokens are to be reported as admitted without the store that the policy in force did not admit.
    pub(super) fn count_before_policy(&mut self, tokens: i64) {
        if let Some(policy) = &mut self.policy {
            policy.admitted_before += tokens;
        }
    }

    /// When the window is to be turned in which a policy is in force.
    pub(super) fn policy_turns(&self) -> Timestamp {
        let window = self.policy.and_then(|policy| policy.window);
        window.map_or(Timestamp::NEVER, |window| window.ends.minus_micros(WINDOW_MARGIN_US))
    }

    /// The window in which a policy is in force.
    pub(crate) fn policy_window(&self) -> Option<PolicyWindow> {
        self.policy?.window
    }

    /// A policy is in force: it is this window.
    pub(crate) fn open_policy_window(&mut self, window: Option<PolicyWindow>) {
        if let Some(policy) = &mut self.policy {
            policy.window = window;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{account_of, answered, ask};
    use crate::algorithm::Rule;
    use crate::quota::Quota;
    use crate::sync::message::Given;

    use super::*;
    use crate::algorithm::FixedWindow;
    use crate::limit::Limit;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    /// Of a limit that is open in an outage, 3 tokens are spent before 1 s, where a window ends at 1.1 s by the store's time, and 4
    /// later. Returns what is to be reported as taken now and in the window before, in tokens.
    fn taken(turned: Timestamp, is_in_time: bool, left_us: i64) -> [i64; 2] {
        let limit = Limit::new("x", FixedWindow::per_second(1000)).outage(OutagePolicy::Open);
        let terms = limit.validate_hybrid(1).unwrap();
        let mut account = account_of(&terms);
        let outage = Outage { from: at(1_000), ended: at(1_000), last_us: 0 };
        account.enter_policy(at(1_000), &outage, &terms, 1);
        account.open_policy_window(Some(PolicyWindow { ends_us: 1_100_000, ends: at(1_000_000) }));
        spend(&account, &terms, 3, 500_000);
        let next = PolicyWindow { ends_us: 2_100_000, ends: at(2_000_000) };
        account.turn_policy_window(turned, Some(next), is_in_time);
        spend(&account, &terms, 4, 1_050_000);
        account.leave_policy(at(1_060_000), None, left_us);
        let unsent = account.spending.unsent;
        [unsent.taken, unsent.taken_before].map(|units| units / terms.scale.token)
    }

    #[test]
    fn policy_charges_each_window_that_has_ended_in_the_store_too() {
        assert_eq!(taken(at(998_000), true, 1_100_000), [4, 3]);
        assert_eq!(taken(at(998_000), true, 2_100_000), [4, 0], "the window before is long over");
        assert_eq!(taken(at(998_000), true, 1_099_999), [7, 0], "it has not ended in the store");
    }

    #[test]
    fn policy_charges_what_it_took_in_a_window_to_the_next_where_the_engine_is_late() {
        assert_eq!(taken(at(1_000_000), true, 1_100_000), [7, 0], "by the clock");
        assert_eq!(taken(at(998_000), false, 1_100_000), [7, 0], "by other keys");
    }

    /// An account of a limit of windows with this policy in force, which began with `leased` tokens of a lease. The policy's window ends
    /// at 0.5 s.
    fn in_outage(rule: impl Into<Rule>, policy: OutagePolicy, leased: i64) -> (Account, Terms) {
        let terms = Limit::new("x", rule).credit(0).outage(policy).validate_hybrid(1).unwrap();
        let mut account = account_of(&terms);
        let given = Given {
            tokens: leased,
            depth: leased,
            life_us: 2_000_000,
            stamp_us: 1_000_000,
            tag: 1_000_000 / terms.epoch_us as i64,
            ..Given::default()
        };
        answered(&mut account, &given, &terms);
        let outage = Outage { from: at(2_000), ended: at(2_000), last_us: 0 };
        account.enter_policy(at(2_000), &outage, &terms, 1);
        account.open_policy_window(Some(PolicyWindow { ends_us: 2_000_000, ends: at(500_000) }));
        (account, terms)
    }

    fn spend(account: &Account, terms: &Terms, cost: u32, us: u64) {
        assert!(account.bucket.decide(ask(cost, terms.scale), at(us)).is_allowed());
    }

    const NEXT: PolicyWindow =
        PolicyWindow { ends_us: 3_000_000, ends: Timestamp::from_micros(2_000_000) };

    #[test]
    fn next_window_of_a_policy_is_watched_while_windows_are_used_and_always_if_they_are_long() {
        let (second, minute) = (FixedWindow::per_second(1000), FixedWindow::per_minute(1000));
        for (window, spent, is_in_time, is_watched) in [
            (second, 3, true, true),
            (second, 0, true, false),
            (second, 3, false, false),
            (minute, 0, true, true),
            (minute, 3, false, true),
        ] {
            let (mut account, terms) = in_outage(window, OutagePolicy::Open, 0);
            if spent > 0 {
                spend(&account, &terms, spent, 300_000);
            }
            account.turn_policy_window(at(498_000), Some(NEXT), is_in_time);
            let case = (window, spent, is_in_time);
            assert_eq!(account.policy_window().is_some(), is_watched, "{case:?}");
        }
    }

    #[test]
    fn share_keeps_what_is_left_of_its_lease_in_the_next_window() {
        let window = FixedWindow::per_second(1000);
        let (mut account, terms) = in_outage(window, OutagePolicy::Share, 30);
        assert_eq!(account.policy.map(|policy| policy.own), Some(30));
        spend(&account, &terms, 10, 300_000);
        account.turn_policy_window(at(498_000), Some(NEXT), true);
        assert_eq!(account.policy.map(|policy| policy.own), Some(20));
    }

    #[test]
    fn share_of_the_last_view_is_lent_to_keys_without_a_lease() {
        for (depth, lent) in [(0, 10), (1, 0)] {
            let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            let available = 40 * terms.scale.token;
            let given = Given { available, depth, life_us: 2_000_000, ..Given::default() };
            answered(&mut account, &given, &terms);
            let outage = Outage { from: at(2_000), ended: at(2_000), last_us: 0 };
            assert_eq!(account.enter_policy(at(2_000), &outage, &terms, 4), lent);
        }
    }

    /// One token on each of more nodes than the burst has tokens is more than the burst: the bound counts it as lent.
    #[test]
    fn share_of_less_than_a_token_is_lent_as_a_whole_one() {
        for (nodes, lent) in [(100, 0), (101, 1)] {
            let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
            let mut account = account_of(&terms);
            let outage = Outage { from: at(2_000), ended: at(2_000), last_us: 0 };
            assert_eq!(account.enter_policy(at(2_000), &outage, &terms, nodes), lent);
        }
    }
}
