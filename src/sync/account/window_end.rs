//! What happens to a key at the end of a sliding window: leased refill ends, tokens live on.

use super::Account;
use crate::time::Timestamp;

impl Account {
    /// Notes what was spent in a sliding window that ends, and stops its refill.
    ///
    /// The count is made by a time that was read before it, and the engine may have been held up since. So it is believed
    /// only when a later time is still before the window's end.
    pub(super) fn close_window_if_due(&mut self, now: Timestamp) {
        if now < self.lease.window_closes() {
            return;
        }
        let is_open = now <= self.lease.window_ends;
        if is_open && !self.lease.is_window_counted() {
            self.collect(now, false);
            self.spending.unsent.spent_before = self.spending.unsent.spent;
            self.lease.window_counted = now;
            return;
        }
        if !is_open {
            self.spending.unsent.spent_before = 0;
        }
        self.open_window(now);
    }

    /// No later time has told that what was counted was spent before the window's end.
    pub(super) fn doubt_window_count(&mut self) {
        if self.lease.is_window_counted() {
            self.spending.unsent.spent_before = 0;
        }
    }

    /// No window ends any more before the lease, and no refill flows.
    pub(super) fn open_window(&mut self, now: Timestamp) {
        self.lease.forget_window();
        self.stop_refill(now);
    }

    /// Stops the refill that a sliding window has leased, and leaves the tokens as they are.
    pub(super) fn stop_refill(&mut self, now: Timestamp) {
        if self.lease_ends().is_none_or(|ends| now >= ends) {
            return;
        }
        let owed = self.bucket.stop_refill(now, self.lease.bucket_ends(), self.scale.token);
        if self.lease.rate() > 0 {
            // What was owed before is still owed.
            self.lease.remainder = self.lease.remainder.min(0) + owed;
            self.spending.owes |= owed < 0;
            self.lease.is_refill_stopped = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{account_of, answered};
    use super::super::{Account, Agreement, Cluster};
    use super::*;
    use crate::algorithm::{FixedWindow, Rule, SlidingLog, SlidingWindow};
    use crate::bucket::{Ask, NewKey, Verdict};
    use crate::limit::{Limit, Terms};
    use crate::quota::{Curve, Quota, Scale};
    use crate::sync::message::{Claim, Entry, Given};

    /// When the store answered, by its clock: half a second before the end of a window.
    const STAMP_US: i64 = 10_500_000;

    /// The first version of the next definition of a limit.
    const NEWER: i64 = 1 << 27;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    /// An account of a window of 1000 tokens a second that was given 10 tokens and half of the refill at 1 ms.
    fn leased() -> (Account, Terms) {
        let terms = Limit::new("x", SlidingWindow::per_second(1000)).credit(0);
        let terms = terms.validate_hybrid(1).unwrap();
        let mut account = account_of(&terms);
        let given = Given {
            tokens: 10,
            rate: terms.scale.rate / 2,
            depth: 100,
            stamp_us: STAMP_US,
            life_us: 2_000_000,
            ..Given::default()
        };
        answered(&mut account, &given, &terms);
        (account, terms)
    }

    fn spend(account: &Account, terms: &Terms, tokens: u32, us: u64) -> bool {
        let ask = Ask {
            cost: tokens,
            scale: terms.scale,
            first_credit: 0,
            plan: NewKey::NO_PLAN,
            can_wait: false,
        };
        account.bucket.decide(ask, at(us)).is_allowed()
    }

    /// The key was denied for a window more each time that it came back, and its record was said to be lost.
    #[test]
    fn key_that_comes_back_after_its_window_is_full() {
        let of_window = |rule: Rule| Limit::new("x", rule).credit(0).validate_hybrid(1).unwrap();
        let second_us = 1_000_000;
        for (rule, longest) in [
            (Rule::from(FixedWindow::per_second(20)), 1),
            (SlidingWindow::per_second(20).into(), 2),
            (SlidingLog::per_second(20).into(), 2),
        ] {
            let terms = of_window(rule);
            for left in [0, 1, 19] {
                let begun = account_of(&terms);
                begun.bucket.set_view(left, at(10 * second_us), 0, Timestamp::ZERO);
                let claim_at = |us| {
                    let cluster = Cluster { nodes: 1, round_trip_us: 0, backlog_us: 0, time_us: 0 };
                    let key = b"key"[..].into();
                    let bucket = begun.bucket.clone();
                    let mut back = Account::new(bucket, key, 0, cluster, &terms, at(us));
                    report(&mut back, &terms, us).claim
                };
                let told = left * terms.scale.token;
                assert_eq!(claim_at(10 * second_us + 1_000), Some(claim_of(told)), "{rule:?}");
                let later = 10 * second_us + longest * second_us + 100_000;
                assert_eq!(
                    claim_at(later),
                    Some(claim_of(terms.scale.burst)),
                    "{rule:?}, {left} were left"
                );
            }
        }
    }

    /// The view had whole tokens, and an age that wraps after 49 days: the record was said to be lost.
    #[test]
    fn token_bucket_that_comes_back_after_it_is_full_is_full() {
        let terms = Limit::new("x", Quota::per_hour(5)).credit(0).validate_hybrid(1).unwrap();
        let begun = account_of(&terms);
        let half = Given { available: 7 * terms.scale.token / 2, ..Given::default() };
        let mut open = begun;
        let entry = report(&mut open, &terms, 2_000);
        open.end_report();
        open.install(&half, &entry, at(2_000), at(2_000), &terms);
        let bucket = open.bucket.clone();
        assert!(bucket.try_close_account(at(1_080_000_000), false));
        let cluster = || Cluster { nodes: 1, round_trip_us: 0, backlog_us: 0, time_us: 0 };
        for us in [1_080_000_001, (1 << 32) * 1_000 + 60_000_000] {
            let mut back =
                Account::new(bucket.clone(), b"key"[..].into(), 0, cluster(), &terms, at(us));
            assert_eq!(
                report(&mut back, &terms, us).claim,
                Some(claim_of(terms.scale.burst)),
                "{us}"
            );
        }
    }

    /// In units that are coarse beside its rate the node believed it full half a day later than the store did.
    #[test]
    fn key_with_a_rate_that_is_rounded_is_full_when_it_is_in_the_store() {
        let limit = Limit::new("x", Quota::per_second(1000)).credit(0);
        let present = limit.validate_hybrid(1).unwrap();
        let quota = Quota::per_day(150);
        let given = limit.by_override(quota, true).unwrap();
        let terms = given.in_units_of(given.validate_hybrid(1).unwrap(), &present).unwrap();
        assert_eq!((terms.scale.token, terms.scale.rate), (present.scale.token, 1));
        let mut open = account_of(&terms);
        let entry = report(&mut open, &terms, 2_000);
        open.end_report();
        open.install(&Given::default(), &entry, at(2_000), at(2_000), &terms);
        let day_us = 86_400_000_000;
        for (us, part) in [(day_us / 2, 49..=51), (day_us + 3_000, 100..=100)] {
            let claim = report(&mut open, &terms, us).claim.unwrap().unleased;
            open.end_report();
            assert!(part.contains(&(100 * claim / terms.stored_scale.burst)), "{us}: {claim}");
        }
    }

    /// What a node claims that knows of nothing charged in the window before.
    fn claim_of(unleased: i64) -> Claim {
        Claim { unleased, previous: 0, viewed_us: 0 }
    }

    /// 400 of 1000 tokens were there at the middle of a window, 100 of them outstanding, and 800 had been charged in the one
    /// before: so 200 were in this one. The node did not tell, and a record that was lost rose no more in its window.
    #[test]
    fn sliding_window_tells_what_was_charged_in_the_window_before() {
        let terms = Limit::new("x", SlidingWindow::per_second(1000)).credit(0);
        let terms = terms.validate_hybrid(1).unwrap();
        let of = |tokens: i64| tokens * terms.scale.token;
        // Where refill of 500 a second is leased, that is outstanding too, until the window's end.
        for (leased, halves) in [(0, 0), (terms.scale.rate / 2, 1)] {
            let mut account = account_of(&terms);
            let entry = report(&mut account, &terms, 1_000);
            account.end_report();
            let (available, level, previous) = (of(300), of(400), of(800));
            let (stamp_us, life_us) = (STAMP_US, 2_000_000);
            let rest = Given { stamp_us, life_us, ..Given::default() };
            let given = Given { available, level, leased, previous, ..rest };
            account.install(&given, &entry, at(1_000), at(1_000), &terms);
            for (after_us, unleased, refilled, previous) in [
                (0, 300, 0, 800),
                (250_000, 500, 125, 800),
                (490_000, 692, 245, 800),
                (500_000, 700, 250, 200),
                (750_000, 750, 250, 200),
                (1_500_000, 900, 250, 0),
                // The record may be forgotten.
                (2_000_000, 1000, 0, 0),
            ] {
                let told = report(&mut account, &terms, 1_000 + after_us).claim;
                account.end_report();
                let unleased = of(unleased - halves * refilled);
                let expected = Claim { unleased, previous: of(previous), viewed_us: 0 };
                assert_eq!(told, Some(expected), "after {after_us}, {leased} leased");
            }
        }
    }

    fn report(account: &mut Account, terms: &Terms, us: u64) -> Entry {
        account.report(&"x".into(), terms, at(us), false)
    }

    #[test]
    fn refill_of_a_sliding_window_ends_with_it_and_what_was_spent_before_is_told() {
        let (mut account, terms) = leased();
        let closes = account.lease.window_closes();
        assert!((497_000..=499_000).contains(&closes.as_micros()), "{closes:?}");
        assert_eq!(account.lease_ends(), Some(closes));
        assert!(spend(&account, &terms, 60, 400_000));
        assert!(!account.end_lease(closes), "its tokens live on");
        let later = closes.plus_micros(1);
        assert_eq!(account.lease_ends(), Some(later), "the engine comes again at once");
        assert!(!account.end_lease(later));
        assert!(account.lease_ends() > Some(at(1_500_000)));
        // 10 tokens, and refill up to the depth of 100, of which 60 are spent.
        assert!(spend(&account, &terms, 30, 1_500_000));
        assert!(!spend(&account, &terms, 100, 1_500_000));
        let entry = report(&mut account, &terms, 1_500_000);
        assert_eq!((entry.spent, entry.spent_before), (90, 60));
        assert_eq!((entry.held.rate, entry.back_rate), (0, terms.scale.rate / 2));
        assert_eq!(account.spending.unsent.spent_before, 0, "it is told once");
    }

    /// The answer to callers who can wait, when a fixed window was found empty `left_us` before its end.
    fn answers_near_the_end(left_us: i64) -> [Verdict; 3] {
        let terms = Limit::new("x", FixedWindow::per_second(1000)).validate_hybrid(1).unwrap();
        let mut account = account_of(&terms);
        let entry = report(&mut account, &terms, 1_000);
        let given =
            Given { stamp_us: 11_000_000 - left_us, life_us: 2_000_000, ..Given::default() };
        account.install(&given, &entry, at(1_000), at(1_000), &terms);
        [5_000, 30_000, 60_000].map(|us| {
            let ask = Ask {
                cost: 1,
                scale: terms.scale,
                first_credit: 0,
                plan: NewKey::NO_PLAN,
                can_wait: true,
            };
            account.bucket.decide(ask, at(1_000 + us)).verdict
        })
    }

    #[test]
    fn fixed_window_that_is_empty_is_known_to_be_for_a_tick_and_not_beyond_its_end() {
        let (denied, unsure) = (Verdict::Denied, Verdict::Unsure);
        assert_eq!(answers_near_the_end(500_000), [denied, denied, unsure]);
        assert_eq!(answers_near_the_end(40_000), [denied, unsure, unsure]);
        assert_eq!(answers_near_the_end(15_000), [unsure, unsure, unsure]);
    }

    #[test]
    fn refill_of_an_earlier_definition_is_counted_until_its_window_ends() {
        let (mut account, terms) = leased();
        let entry = report(&mut account, &terms, 400_000);
        account.end_report();
        let before = account.lease.held.outstanding;
        let newer = SlidingWindow::per_second(500);
        let newer = Limit::new("x", newer).validate_hybrid(1).unwrap().scale;
        let agreed = account.agree(&entry, NEWER, newer, &terms, at(400_000));
        assert_eq!(agreed, Some(Agreement::Follows));
        let refilled = terms.scale.rate / 2 * (11_000_000 - STAMP_US);
        assert_eq!(account.lease.held.outstanding, before + refilled);
        assert_eq!((account.lease.held.rate, account.lease.rate()), (0, 0));
        assert_eq!(account.lease_ends(), Some(account.lease.ends), "no window of its plan ends");
    }

    /// Found by fuzzing: it ended the limiter's task.
    #[test]
    fn quota_of_the_store_that_has_windows_and_no_rate_is_not_agreed_on() {
        let (mut account, terms) = leased();
        let entry = report(&mut account, &terms, 400_000);
        for curve in [Curve::FixedWindow, Curve::SlidingWindow, Curve::SlidingLog] {
            let none = Scale { rate: 0, token: 1, burst: 0, curve };
            for version in [0, entry.version, NEWER] {
                assert_eq!(account.agree(&entry, version, none, &terms, at(400_000)), None);
            }
        }
        assert_eq!(account.quota.scale(), terms.scale);
    }

    #[test]
    fn lease_of_a_token_bucket_that_becomes_a_sliding_window_is_void() {
        let terms = Limit::new("x", Quota::per_second(1000)).validate().unwrap();
        let mut account = account_of(&terms);
        let entry = report(&mut account, &terms, 1_000);
        account.lease.held.tag = 7;
        let newer = Limit::new("x", SlidingWindow::per_second(500)).validate_hybrid(1).unwrap();
        let agreed = account.agree(&entry, NEWER, newer.scale, &terms, at(2_000));
        assert_eq!(agreed, Some(Agreement::Follows));
        assert_eq!(account.lease.held.tag, 0);
    }

    /// Tokens alone were leased, and the engine came with a time from before the window's end, after more had been spent.
    #[test]
    fn late_engine_reports_only_tokens_spent_before_the_window_end_as_spent_before() {
        let (mut account, terms) = leased();
        let entry = report(&mut account, &terms, 2_000);
        account.end_report();
        let given = Given {
            tokens: 200,
            depth: 200,
            stamp_us: STAMP_US,
            life_us: 2_000_000,
            ..Given::default()
        };
        account.install(&given, &entry, at(2_000), at(2_000), &terms);
        assert_eq!(account.lease.rate(), 0);
        assert!(spend(&account, &terms, 30, 400_000));
        assert!(!spend(&account, &terms, 100, 505_000), "the engine has not collected");
        assert!(!account.end_lease(at(499_900)));
        assert!(!account.end_lease(at(499_910)));
        assert!(spend(&account, &terms, 100, 505_000));
        let entry = report(&mut account, &terms, 600_000);
        assert_eq!((entry.spent, entry.spent_before), (130, 30));
    }

    /// The engine read its time before the window's end and counted after it; the cached clock stood still meanwhile.
    #[test]
    fn count_of_an_engine_that_was_held_up_over_the_window_end_is_not_believed() {
        let (mut account, terms) = leased();
        let closes = account.lease.window_closes();
        assert!(spend(&account, &terms, 60, 400_000));
        assert!(!account.end_lease(closes));
        assert!(!account.end_lease(at(515_000)), "its next time is after the end");
        let entry = report(&mut account, &terms, 600_000);
        assert_eq!((entry.spent, entry.spent_before, entry.held.rate), (60, 0, 0));
    }

    #[test]
    fn count_that_no_later_time_confirms_is_not_reported() {
        let (mut account, terms) = leased();
        let closes = account.lease.window_closes();
        assert!(spend(&account, &terms, 60, 400_000));
        let entry = report(&mut account, &terms, closes.as_micros());
        assert_eq!((entry.spent, entry.spent_before), (60, 0));
        assert!(spend(&account, &terms, 10, closes.as_micros()));
        assert!(!account.end_lease(closes.plus_micros(1)));
        assert_eq!(account.spending.unsent.spent_before, 0);
    }

    #[test]
    fn window_end_that_is_noticed_too_late_tells_nothing_of_what_was_spent_before() {
        let (mut account, terms) = leased();
        assert!(spend(&account, &terms, 60, 400_000));
        assert!(!account.end_lease(at(501_000)));
        assert!(!spend(&account, &terms, 100, 900_000), "nothing flows in any more");
        let entry = report(&mut account, &terms, 900_000);
        assert_eq!((entry.spent, entry.spent_before, entry.held.rate), (60, 0, 0));
    }

    #[test]
    fn reply_that_comes_after_its_window_starts_no_refill() {
        let (mut account, terms) = leased();
        let held = account.lease.held;
        let entry = report(&mut account, &terms, 400_000);
        account.end_report();
        // As if all of it were in use.
        let entry = Entry { held, back_rate: 0, back_depth: 0, ..entry };
        let stamp_us = STAMP_US + 400_000;
        let tokens = Given { tokens: 3, depth: 100, ..Given::default() };
        let given = Given { stamp_us, life_us: 2_000_000, ..tokens };
        account.install(&given, &entry, at(400_000), at(600_000), &terms);
        assert_eq!(account.lease.rate(), 0);
        let held = account.bucket.held_and_pending().0;
        assert!(held >= 3);
        assert!(!spend(&account, &terms, held + 1, 1_000_000));
        assert!(spend(&account, &terms, held, 1_000_000), "its tokens are there at once");
        let entry = report(&mut account, &terms, 1_000_000);
        assert_eq!((entry.held.rate, entry.back_rate), (0, terms.scale.rate / 2));
    }

    #[test]
    fn refill_that_stops_with_nothing_overdrawn_leaves_nothing_owed() {
        let (mut account, _) = leased();
        account.stop_refill(at(1_000));
        assert!(account.lease.is_refill_stopped && !account.spending.owes);
    }
}
