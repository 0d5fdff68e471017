//! How often a key is synced that is kept by accuracy, and what all keys of a limit may cost.

use super::{Account, PLENTY_TICKS};
use crate::limit::{CEILING_TICK_MAX, Pace, Terms};
use crate::time::{Timestamp, micros};

/// Early syncs come on top of those on schedule: room is left for so many in a hundred.
const EARLY_PCT: f64 = 30.0;
/// Key syncs that a ceiling did not need are saved up for so long.
const SAVED_US: u64 = 1_000_000;
/// Expected syncs are counted over so long, so that they are whole numbers.
const COUNTED_US: u64 = 1_000_000_000_000;

/// What the keys of a limit cost the store, against the limit's ceiling.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    /// Key syncs that the traffic of all keys in the books warrants, in [`COUNTED_US`].
    expected: u64,
    /// Up to when the ceiling is used up.
    used_until: Timestamp,
}

impl Paces {
    /// Whether one more key sync stays below the ceiling; if so, or if it is `pressing`, it counts.
    pub(crate) fn admit(&mut self, pressing: bool, now: Timestamp, terms: &Terms) -> bool {
        let Some(ceiling) = terms.pace.and_then(|pace| pace.ceiling) else { return true };
        if !pressing && self.used_until > now.plus_micros(SAVED_US) {
            return false;
        }
        self.used_until = self.used_until.max(now).plus_micros((1e6 / ceiling).ceil() as u64);
        true
    }

    /// A warranted tick, lengthened as much as the ceiling asks of all keys alike.
    fn stretched_us(&self, warranted_us: u64, pace: &Pace) -> u64 {
        let Some(ceiling) = pace.ceiling else { return warranted_us };
        let expected = self.expected as f64 * 1e6 / COUNTED_US as f64;
        let stretch = (expected * (1.0 + EARLY_PCT / 100.0) / ceiling).max(1.0);
        ((warranted_us as f64 * stretch) as u64).min(micros(CEILING_TICK_MAX))
    }
}

impl Account {
    /// Chooses the key's tick by what it is asked for.
    pub(crate) fn keep_pace(&mut self, now: Timestamp, limit: &Terms, paces: &mut Paces) {
        let Some(pace) = limit.pace else { return };
        let warranted_us = pace.warranted_us(self.demand.per_us());
        let ticks = if self.is_plentiful(now, limit) { PLENTY_TICKS } else { 1 };
        self.lose_pace(paces);
        self.expected = COUNTED_US / (ticks * warranted_us);
        paces.expected += self.expected;
        self.tick_us = paces.stretched_us(warranted_us, &pace);
    }

    /// The key leaves the books.
    pub(crate) fn lose_pace(&mut self, paces: &mut Paces) {
        paces.expected -= std::mem::take(&mut self.expected);
    }

    /// Whether the report cannot wait for a ceiling.
    pub(crate) fn is_pressing(&self) -> bool {
        self.restore || !self.waiters.is_empty()
    }

    /// The report waits for a tick: the ceiling is reached.
    pub(crate) fn put_off(&mut self, now: Timestamp) {
        self.due = now.plus_micros(self.tick_us);
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
    fn a_ceiling_admits_its_rate_and_what_it_saved_in_a_second() {
        let (terms, mut paces) = (terms(Some(50.0)), Paces::default());
        let at = |ms: u64| Timestamp::from_micros(10_000_000 + ms * 1000);
        let admitted = (0..10_000).filter(|&ms| paces.admit(false, at(ms), &terms)).count();
        assert!((500..=551).contains(&admitted), "{admitted} in 10 s");
        while paces.admit(false, at(10_000), &terms) {}
        assert!(paces.admit(true, at(10_000), &terms), "who waits is not kept waiting");
    }

    #[test]
    fn without_a_ceiling_everything_is_admitted_and_no_tick_is_lengthened() {
        let (terms, mut paces) =
            (terms(None), Paces { expected: u64::MAX / 2, ..Paces::default() });
        assert!((0..10_000).all(|_| paces.admit(false, Timestamp::from_micros(1), &terms)));
        assert_eq!(paces.stretched_us(7_000, &terms.pace.unwrap()), 7_000);
    }

    #[test]
    fn a_ceiling_lengthens_ticks_until_all_keys_together_stay_below_it() {
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
