//! What this node knows of the store's level of one key.

use crate::limit::Terms;
use crate::quota::{Curve, Scale};
use crate::sync::message::{Claim, Entry, Given, Withheld};
use crate::time::Timestamp;

/// [`Level::is_mostly_unspent`] holds if the available and the outstanding tokens together exceed this many quarters
/// of the burst. Under full load the sum stays lower; spending not yet reported and leases that overflow raise it.
const UNSPENT_QUARTERS: i64 = 3;

/// What the last reply said about the key.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreView {
    /// What the store could lease, in units.
    pub(super) unleased: i64,
    /// That and all that was outstanding, in units.
    pub(super) level: i64,
    /// The store withheld some of it, or the bucket kept the view, which has only what could be leased.
    pub(super) is_partial: bool,
    /// Units charged in the window before that of the view, if windows slide. A view that the bucket kept does not tell: `None`.
    pub(super) previous: Option<i64>,
    /// Refill leased to all nodes, in units per microsecond.
    pub(super) leased: i64,
    pub(super) at: Timestamp,
    /// The lane's time of the last view of which the store withheld nothing: all that was charged by then is in this one. 0 if there
    /// was none.
    pub(super) viewed_us: i64,
    /// When the window of the view ends at the latest, if tokens are given for windows.
    pub(super) window_ends_latest: Timestamp,
    /// The key was full when its account was opened, if nobody else had spent. A view that the bucket kept has whole tokens, and an
    /// age that wraps, and does not tell.
    pub(super) was_full: bool,
}

impl StoreView {
    /// Whether the view is so old that its windows have given all tokens back. The store may have forgotten the record by then.
    fn is_surely_full(&self, now: Timestamp, scale: &Scale) -> bool {
        let full_us = scale.full_us(scale.burst.saturating_sub(self.unleased));
        scale.curve != Curve::Refill && now.micros_since(self.at) >= full_us
    }

    /// What can be leased of a sliding window at `now`, and what was charged in the window before, if no other node spends. What
    /// others hold may have been given back, or may have ended: then there is more.
    fn extrapolate_sliding(&self, previous: i64, now: Timestamp, scale: &Scale) -> Claim {
        // Times count from the begin of the view's window.
        let left_us = self.window_ends_latest.micros_since(self.at) as i64;
        let from_us = (scale.window_us() - left_us).max(0);
        let until_us = from_us.saturating_add_unsigned(now.micros_since(self.at));
        let (level, previous) = scale.pass_windows(self.level, previous, from_us, until_us);
        let refill_us = scale.refill_until_us(from_us, until_us) - from_us;
        let refilled = i128::from(self.leased) * i128::from(refill_us);
        let outstanding = i128::from(self.level - self.unleased) + refilled;
        let unleased = i128::from(level) - outstanding;
        let unleased = unleased.clamp(i64::MIN.into(), scale.burst.into()) as i64;
        Claim { unleased, previous, viewed_us: self.viewed_us }
    }
}

/// The window in which the store answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredWindow {
    pub(super) length_us: i64,
    /// Until its end.
    pub(super) left_us: u64,
}

/// What a reply said of the key beside what it gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Installed {
    /// The node's estimate less the store's level, in units.
    pub(crate) drift: Option<i64>,
    /// Age of the view that was replaced, in microseconds.
    pub(crate) age_us: u64,
}

/// The view, and what is estimated from it.
#[derive(Debug)]
pub(super) struct Level {
    /// `None` before the store has answered.
    pub(super) view: Option<StoreView>,
    /// How fast the level rises while this node spends nothing, in units per microsecond.
    growth: f64,
}

impl Level {
    pub(super) fn new(view: Option<StoreView>, rate: i64) -> Self {
        Self { view, growth: rate as f64 }
    }

    /// The same in other units, but for `growth`, which stays in units of this node.
    pub(super) fn with_units(&self, convert: impl Fn(i64) -> i64) -> Self {
        let view = self.view.map(|view| StoreView {
            unleased: convert(view.unleased),
            level: convert(view.level),
            previous: view.previous.map(&convert),
            leased: convert(view.leased),
            ..view
        });
        Self { view, growth: self.growth }
    }

    /// Takes a reply in, of this time of the lane: the view is that of `now`.
    pub(super) fn install(
        &mut self,
        given: &Given,
        window: &StoredWindow,
        time_us: i64,
        now: Timestamp,
    ) {
        let is_partial = given.withheld != Withheld::Nothing;
        let before_us = self.view.map_or(0, |view| view.viewed_us);
        self.view = Some(StoreView {
            unleased: given.available,
            level: given.level,
            is_partial,
            previous: Some(given.previous),
            leased: given.leased,
            at: now,
            viewed_us: if is_partial { before_us } else { time_us },
            window_ends_latest: now.plus_micros(window.left_us),
            was_full: false,
        });
    }

    /// What there can be, if the store has lost the key's record: by this node's estimate.
    pub(super) fn claim(&self, now: Timestamp, scale: &Scale) -> Option<Claim> {
        let view = self.view.as_ref()?;
        let slides = scale.curve == Curve::SlidingWindow;
        if let Some(previous) = view.previous.filter(|_| slides)
            // By then what is outstanding has ended.
            && !view.is_surely_full(now, scale)
        {
            return Some(view.extrapolate_sliding(previous, now, scale));
        }
        let unleased = if view.was_full { scale.burst } else { self.estimate(now, scale)? };
        Some(Claim { unleased, previous: 0, viewed_us: view.viewed_us })
    }

    /// What the store has of the key with all that is outstanding, in units; 0 if this node does not know all of it.
    fn with_outstanding(&self) -> i64 {
        self.view.filter(|view| !view.is_partial).map_or(0, |view| view.level)
    }

    /// The level at `now` if no other node spends, in units.
    pub(super) fn estimate(&self, now: Timestamp, scale: &Scale) -> Option<i64> {
        self.view.map(|view| {
            if view.is_surely_full(now, scale) {
                return scale.burst;
            }
            let windows = match now.as_micros().checked_sub(view.window_ends_latest.as_micros()) {
                Some(since_us) => 1 + (since_us / scale.window_us() as u64) as i64,
                None => 0,
            };
            match scale.curve {
                Curve::Refill => {}
                Curve::FixedWindow | Curve::CalendarWindow => {
                    let given = i128::from(scale.burst) * i128::from(windows);
                    return (i128::from(view.unleased) + given).min(scale.burst.into()) as i64;
                }
                // What leaves before the window ends is not counted on: others will have spent it.
                Curve::SlidingWindow | Curve::SlidingLog => {
                    let owed = (scale.burst - view.unleased) / scale.burst;
                    return if windows > owed + 1 { scale.burst } else { view.unleased };
                }
            }
            let rate = (scale.rate - view.leased).max(0);
            let flowed = i128::from(rate) * i128::from(now.micros_since(view.at));
            (i128::from(view.unleased) + flowed).min(i128::from(scale.burst)) as i64
        })
    }

    /// When the level is that of a full bucket, of which so many units are missing, at the latest.
    pub(super) fn full_at(&self, missing: i64, now: Timestamp, scale: &Scale) -> Timestamp {
        let full_us = scale.full_us(missing);
        match self.view {
            Some(view) if scale.curve == Curve::CalendarWindow && missing > 0 => {
                // The first window ends sooner than the longest would.
                let later_us = full_us.saturating_sub(scale.longest_window_us() as u64);
                view.window_ends_latest.max(now).plus_micros(later_us)
            }
            _ => now.plus_micros(full_us),
        }
    }

    /// Whether the level is believed to be above half the burst.
    pub(super) fn is_plentiful(&self, now: Timestamp, scale: &Scale) -> bool {
        self.estimate(now, scale).is_some_and(|level| level > scale.burst / 2)
    }

    /// Whether the store's bucket is nearly full, though most of it may be outstanding.
    pub(super) fn is_mostly_unspent(&self, scale: &Scale) -> bool {
        self.with_outstanding() > scale.burst / 4 * UNSPENT_QUARTERS
    }

    /// Whether the store had next to nothing to give by its last reply.
    pub(super) fn is_scarce(&self, scale: &Scale) -> bool {
        self.view.is_some_and(|view| view.unleased < scale.burst / 20)
    }

    /// Whether more than so many units are owed by the store's last reply.
    pub(super) fn owes_more_than(&self, units: i64) -> bool {
        self.view.is_some_and(|view| view.unleased < -units)
    }

    /// Whether the store has answered since `at`.
    pub(super) fn is_viewed_since(&self, at: Timestamp) -> bool {
        self.view.is_some_and(|view| view.at >= at)
    }

    /// Time until the level is believed to come to a whole token, according to the growth that this node has seen
    /// and to the refill that is not leased.
    pub(super) fn token_in_us(&self, given: &Given, scale: &Scale, stored: &StoredWindow) -> u64 {
        let missing = (scale.token - given.available).max(0) as f64;
        if missing > 0.0 && scale.curve != Curve::Refill {
            // Nothing is sure to come before; a reply tells if something does.
            let missing = scale.token - given.available;
            return scale.refilled_in_us(missing, stored.left_us, stored.length_us);
        }
        let free = (scale.rate - given.leased).max(0) as f64;
        if missing > 0.0 { (missing / self.growth.min(free)) as u64 } else { 0 }
    }

    /// Learns how fast the level rises for this node: by the rate less what the others spend.
    pub(super) fn observe_growth(
        &mut self,
        given: &Given,
        entry: &Entry,
        nodes: i64,
        now: Timestamp,
        terms: &Terms,
    ) {
        let Scale { rate, token, burst, .. } = terms.scale;
        let Some(view) = self.view else { return };
        let passed_us = now.micros_since(view.at);
        if given.available > burst / 2 {
            // There is enough for all; and what a full bucket lost would look like their spending.
            self.growth = rate as f64;
            return;
        }
        if passed_us < terms.tick_us {
            return;
        }
        let taken = given.tokens.saturating_add(entry.debt).saturating_mul(token);
        let risen =
            (given.available - view.unleased).saturating_add(taken.saturating_sub(entry.returned));
        let seen = risen as f64 / passed_us as f64;
        let least = rate as f64 / nodes as f64;
        self.growth = f64::midpoint(self.growth, seen.clamp(least, rate as f64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    const SECOND_US: u64 = 1_000_000;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    /// Each window that has ended gives its tokens, and the first ones repay what is owed.
    #[test]
    fn level_of_fixed_windows_rises_by_a_burst_with_each_window_that_ends() {
        let scale =
            Scale { rate: 100, token: 1_000_000, burst: 100_000_000, curve: Curve::FixedWindow };
        let mut level = Level::new(None, scale.rate);
        let owed = Given { available: -150 * scale.token, ..Given::default() };
        let window = StoredWindow { length_us: SECOND_US as i64, left_us: SECOND_US / 2 };
        level.install(&owed, &window, 0, at(0));
        let tokens = |us| level.estimate(at(us), &scale).unwrap() / scale.token;
        let seen = [0, 1, 3, 5].map(|halves| tokens(halves * SECOND_US / 2));
        assert_eq!(seen, [-150, -50, 50, 100]);
    }

    /// In a second a node took 10 tokens and returned 2, and the level rose from 20 to 30: without it, by 18.
    #[test]
    fn growth_is_how_much_the_level_rose_and_what_this_node_took_of_it() {
        let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        let token = terms.scale.token;
        let window = StoredWindow { length_us: 1, left_us: 1 };
        let given = |tokens: i64| Given { available: tokens * token, ..Given::default() };
        let mut level = Level::new(None, terms.scale.rate);
        level.install(&given(20), &window, 0, at(0));
        let entry = Entry { debt: 6, returned: 2 * token, ..Entry::empty(terms.scale) };
        let later = Given { tokens: 4, ..given(30) };
        level.observe_growth(&later, &entry, 4, at(terms.tick_us - 1), &terms);
        assert!((level.growth - terms.scale.rate as f64).abs() < 1e-6, "too soon to tell");
        // At least an even part of the rate: 25 a second, not 18. It is the mean of that and the rate at first.
        level.observe_growth(&later, &entry, 4, at(SECOND_US), &terms);
        let per_second = |growth: f64| growth * 1e6 / token as f64;
        assert!((per_second(level.growth) - 62.5).abs() < 0.1, "{}", per_second(level.growth));
        level.observe_growth(&later, &entry, 10, at(SECOND_US), &terms);
        assert!((per_second(level.growth) - 40.25).abs() < 0.1, "{}", per_second(level.growth));
    }

    #[test]
    fn next_token_comes_after_its_missing_part_divided_by_the_growth() {
        let scale = Scale { rate: 100, token: 1_000_000, burst: 100_000_000, curve: Curve::Refill };
        let mut level = Level::new(None, scale.rate);
        level.growth = 50.0;
        let window = StoredWindow { length_us: 1, left_us: 1 };
        for (available, leased, in_us) in
            [(0, 0, 20_000), (500_000, 0, 10_000), (0, 75, 40_000), (1_000_000, 0, 0)]
        {
            let given = Given { available, leased, ..Given::default() };
            assert_eq!(level.token_in_us(&given, &scale, &window), in_us, "{available}, {leased}");
        }
        let (scale, whole) = (Scale { curve: Curve::FixedWindow, ..scale }, scale.token);
        for (available, in_us) in [(whole - 1, 1), (whole, 0)] {
            let given = Given { available, ..Given::default() };
            assert_eq!(level.token_in_us(&given, &scale, &window), in_us, "of a window");
        }
    }

    /// A month may have 28 days: the longest window of all is no measure for the one that ends soon.
    #[test]
    fn calendar_window_is_full_at_its_end_and_at_once_if_nothing_is_missing() {
        let curve = Curve::CalendarWindow;
        let scale = Scale { rate: 1, token: 1_000_000, burst: 100_000_000, curve };
        let mut level = Level::new(None, scale.rate);
        let window = StoredWindow { length_us: 1, left_us: SECOND_US };
        level.install(&Given::default(), &window, 0, at(0));
        assert_eq!(level.full_at(0, at(5), &scale), at(5));
        assert_eq!(level.full_at(scale.token, at(5), &scale), at(SECOND_US));
    }

    /// The window before the view's counts in part until the next one ends.
    #[test]
    fn sliding_window_is_full_when_the_next_one_has_ended_and_later_if_it_owes() {
        let curve = Curve::SlidingWindow;
        let scale = Scale { rate: 100, token: 1_000_000, burst: 100_000_000, curve };
        let window = StoredWindow { length_us: SECOND_US as i64, left_us: SECOND_US / 2 };
        for (tokens, halves, seen) in [(50, 2, 50), (50, 3, 100), (-50, 4, -50), (-50, 5, 100)] {
            let mut level = Level::new(None, scale.rate);
            let given = Given { available: tokens * scale.token, ..Given::default() };
            level.install(&given, &window, 0, at(0));
            let estimate = level.estimate(at(halves * SECOND_US / 2), &scale).unwrap();
            assert_eq!(estimate / scale.token, seen, "{tokens}, {halves}");
        }
    }
}
