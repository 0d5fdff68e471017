//! What the key syncs of a limit may cost together, where its ticks follow the accuracy that is asked for.

use crate::limit::{CEILING_TICK_MAX, Pace, Terms};
use crate::time::{Timestamp, micros};

/// Early syncs come on top of those on schedule: room is left for this many in a hundred.
const EARLY_PCT: f64 = 30.0;
/// Key syncs below a ceiling are saved up for this long.
const SAVED_US: u64 = 1_000_000;
/// Expected syncs are counted over this time, so that they are whole numbers.
const COUNTED_US: u64 = 1_000_000_000_000;

/// What the keys of a limit cost the store, beside the limit's ceiling.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    /// Key syncs that the traffic of all keys with accounts warrants, in [`COUNTED_US`].
    expected: u64,
    /// Up to when the ceiling is used up.
    used_until: Timestamp,
}

impl Paces {
    /// Whether one more key sync stays below the ceiling; if so, or if it is `pressing`, it counts. Pressing ones use up what was
    /// saved, and no more.
    pub(crate) fn admit(&mut self, pressing: bool, now: Timestamp, terms: &Terms) -> bool {
        let Some(ceiling) = terms.pace.and_then(|pace| pace.ceiling) else { return true };
        if !pressing && self.used_until > now.plus_micros(SAVED_US) {
            return false;
        }
        let used_until = self.used_until.max(now).plus_micros((1e6 / ceiling).ceil() as u64);
        let saved_until = now.plus_micros(SAVED_US);
        // What others have used stays used.
        let pressed_until = used_until.min(saved_until).max(self.used_until);
        self.used_until = if pressing { pressed_until } else { used_until };
        true
    }

    /// Counts a key that is synced every `interval_us`. Returns its share, to be taken off when it leaves.
    pub(super) fn join(&mut self, interval_us: u64) -> u64 {
        let share = COUNTED_US / interval_us;
        self.expected += share;
        share
    }

    pub(super) fn leave(&mut self, share: u64) {
        self.expected -= share;
    }

    /// A warranted tick, lengthened as much as the ceiling asks of all keys alike.
    pub(super) fn stretched_us(&self, warranted_us: u64, pace: &Pace) -> u64 {
        let Some(ceiling) = pace.ceiling else { return warranted_us };
        let expected = self.expected as f64 * 1e6 / COUNTED_US as f64;
        let stretch = (expected * (1.0 + EARLY_PCT / 100.0) / ceiling).max(1.0);
        ((warranted_us as f64 * stretch) as u64).min(micros(CEILING_TICK_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Limit, SyncPolicy};
    use crate::quota::Quota;

    fn terms(key_syncs_per_second_max: Option<f64>) -> Terms {
        let policy = SyncPolicy::Accuracy { excess: 0.01, key_syncs_per_second_max };
        Limit::new("x", Quota::per_second(1000)).sync(policy).validate().unwrap()
    }

    #[test]
    fn ceiling_admits_its_rate_and_what_it_saved_in_a_second() {
        let (terms, mut paces) = (terms(Some(50.0)), Paces::default());
        let at = |ms: u64| Timestamp::from_micros(10_000_000 + ms * 1000);
        let admitted = (0..10_000).filter(|&ms| paces.admit(false, at(ms), &terms)).count();
        assert!((500..=551).contains(&admitted), "{admitted} in 10 s");
        while paces.admit(false, at(10_000), &terms) {}
        assert!(
            paces.admit(true, at(10_000), &terms),
            "a report that callers wait for is not kept waiting"
        );
    }

    /// Ten thousand of them, after the store had lost its memory, kept all others waiting for 200 s.
    #[test]
    fn pressing_reports_come_on_top_of_others() {
        let (terms, mut paces) = (terms(Some(100.0)), Paces::default());
        let now = Timestamp::from_micros(10_000_000);
        assert!((0..10_000).all(|_| paces.admit(true, now, &terms)));
        assert!(paces.admit(false, now, &terms) && !paces.admit(false, now, &terms));
        let later = |ms: u64| now.plus_micros(ms * 1000);
        let steadily = (0..1000).filter(|&ms| {
            assert!(paces.admit(true, later(ms), &terms));
            paces.admit(false, later(ms), &terms)
        });
        let steadily = steadily.count();
        assert!((50..=110).contains(&steadily), "{steadily}: others starve, or pass the ceiling");
    }

    #[test]
    fn no_ceiling_admits_every_sync_and_lengthens_no_tick() {
        let (terms, mut paces) =
            (terms(None), Paces { expected: u64::MAX / 2, ..Paces::default() });
        assert!((0..10_000).all(|_| paces.admit(false, Timestamp::from_micros(1), &terms)));
        assert_eq!(paces.stretched_us(7_000, &terms.pace.unwrap()), 7_000);
    }

    #[test]
    fn ceiling_lengthens_ticks_until_all_keys_together_stay_below_it() {
        let pace = terms(Some(100.0)).pace.unwrap();
        for keys in [1, 10, 50, 100] {
            let paces = Paces { expected: keys * COUNTED_US / 50_000, ..Paces::default() };
            let tick_us = paces.stretched_us(50_000, &pace);
            let per_second = keys as f64 * 1e6 / tick_us as f64;
            assert!(per_second <= 100.0, "{keys} keys: {per_second}/s");
            assert!(keys > 3 || tick_us == 50_000, "{keys} keys need no stretch: {tick_us}");
        }
    }
}
