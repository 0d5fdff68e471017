//! What was right: from what was offered and what was decided.
//!
//! This file shares nothing with the limiter on purpose: its bucket is the plainest one that can
//! be written, in floating point, so that a mistake in the limiter cannot be one in its judge.

use std::collections::HashMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The length of one entry of the timeline.
pub(crate) const SLOT_US: u64 = 100_000;

/// The most entries of a timeline, some 28 hours; the last one takes whatever comes later.
pub(crate) const SLOTS_MAX: u64 = 1_000_000;

/// The longest decision that is told apart, one minute; longer ones count as this long.
const TOOK_NS_MAX: u64 = 60_000_000_000;

/// Below this many tokens a level counts as zero: floating-point error, not an admission.
const TOKENS_ERROR: f64 = 1e-6;

/// With less than this part of the burst at hand, a denial is not called wrong.
const WRONG_DENIAL_BURST_PART: f64 = 0.05;

/// A request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Decided {
    /// When the decision was completed, in microseconds since the run's start.
    pub at_us: u64,
    /// How long the decision took, in nanoseconds.
    pub took_ns: u64,
    /// The node that decided.
    pub node: u16,
    /// The key charged.
    pub key: u32,
    /// What the request asked for, in tokens.
    pub cost: u32,
    /// Whether it was admitted.
    pub allowed: bool,
    /// Whether the node was sure.
    pub sure: bool,
}

/// What happened within one [`SLOT_US`], in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Asked for.
    pub offered: u64,
    /// Admitted.
    pub admitted: u64,
}

/// The summary of a run; the fields go by their names in the demo's JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Tokens asked for.
    pub offered: u64,
    /// Tokens admitted.
    pub admitted: u64,
    /// Tokens that one central bucket per key, full at the start, admits of the same requests.
    pub ideal: u64,
    /// `admitted` in % of `ideal`; 100 when both are zero.
    pub admitted_vs_ideal_pct: f64,
    /// How far the bucket of what was really admitted fell below zero: the worst key's tokens.
    pub excess_tokens: f64,
    /// The same in % of the burst.
    pub excess_pct_of_burst: f64,
    /// Requests denied while tokens were there, in % of all requests.
    pub wrong_denials_pct: f64,
    /// Decisions that the node was not sure of, in % of all requests.
    pub unsure_pct: f64,
    /// Half of the decisions took at most so long.
    pub decision_p50_ns: u64,
    /// 99 in 100 decisions took at most so long.
    pub decision_p99_ns: u64,
    /// 999 in 1000 decisions took at most so long.
    pub decision_p999_ns: u64,
    /// What was offered and admitted in each 100 ms.
    pub timeline: Vec<Slot>,
    /// Keys with the number of their denied requests, most first; keys without any are left out.
    #[serde(skip)]
    pub denied_by_key: Vec<(u32, u64)>,
}

impl Figures {
    /// Judges `decided`, which is ordered by `at_us`, under a limit of `rate_per_second` and `burst`
    /// tokens a key. The timeline covers `seconds`, and longer if decisions came later.
    pub(crate) fn of(decided: &[Decided], rate_per_second: f64, burst: f64, seconds: f64) -> Self {
        debug_assert!(decided.is_sorted_by_key(|one| one.at_us), "ordered by completion");
        let tally = Tally::of(decided, rate_per_second, burst);
        let timeline = timeline(decided, seconds);
        let offered = timeline.iter().map(|slot| slot.offered).sum();
        let admitted = timeline.iter().map(|slot| slot.admitted).sum();
        let took = took_ns(decided);
        let unsure = decided.iter().filter(|one| !one.sure).count();
        Self {
            offered,
            admitted,
            ideal: tally.ideal,
            admitted_vs_ideal_pct: vs_ideal_pct(admitted, tally.ideal),
            excess_tokens: tally.excess_tokens,
            excess_pct_of_burst: percent(tally.excess_tokens, burst),
            wrong_denials_pct: percent(tally.wrong_denials as f64, decided.len() as f64),
            unsure_pct: percent(unsure as f64, decided.len() as f64),
            decision_p50_ns: took.value_at_quantile(0.5),
            decision_p99_ns: took.value_at_quantile(0.99),
            decision_p999_ns: took.value_at_quantile(0.999),
            timeline,
            denied_by_key: denied_by_key(decided),
        }
    }
}

/// A token bucket without any cleverness. Its level may go below zero.
#[derive(Clone, Copy)]
struct Bucket {
    level: f64,
    at_us: u64,
}

impl Bucket {
    /// The level at `at_us`.
    fn refill(&mut self, at_us: u64, rate_per_second: f64, burst: f64) -> f64 {
        let passed_s = at_us.saturating_sub(self.at_us) as f64 / 1e6;
        self.level = burst.min(self.level + rate_per_second * passed_s);
        self.at_us = at_us;
        self.level
    }
}

/// One walk through all requests, with two buckets a key: what an ideal limiter would have, and
/// what is left after what was really admitted.
#[derive(Default)]
struct Tally {
    ideal: u64,
    excess_tokens: f64,
    wrong_denials: u64,
}

impl Tally {
    fn of(decided: &[Decided], rate_per_second: f64, burst: f64) -> Self {
        let full = Bucket { level: burst, at_us: 0 };
        let mut buckets: HashMap<u32, (Bucket, Bucket)> = HashMap::new();
        let mut tally = Self::default();
        for one in decided {
            let (ideal, real) = buckets.entry(one.key).or_insert((full, full));
            ideal.refill(one.at_us, rate_per_second, burst);
            real.refill(one.at_us, rate_per_second, burst);
            tally.count_ideal(one, ideal);
            tally.count_real(one, real, burst);
        }
        tally
    }

    fn count_ideal(&mut self, one: &Decided, bucket: &mut Bucket) {
        let cost = f64::from(one.cost);
        if bucket.level + TOKENS_ERROR >= cost {
            bucket.level -= cost;
            self.ideal += u64::from(one.cost);
        }
    }

    fn count_real(&mut self, one: &Decided, bucket: &mut Bucket, burst: f64) {
        let cost = f64::from(one.cost);
        if one.allowed {
            bucket.level -= cost;
            if bucket.level < -TOKENS_ERROR {
                self.excess_tokens = self.excess_tokens.max(-bucket.level);
            }
        } else if bucket.level + TOKENS_ERROR >= cost.max(WRONG_DENIAL_BURST_PART * burst) {
            self.wrong_denials += 1;
        }
    }
}

fn timeline(decided: &[Decided], seconds: f64) -> Vec<Slot> {
    let planned = (seconds * 1e6 / SLOT_US as f64).ceil() as u64;
    let needed = decided.last().map_or(0, |last| last.at_us / SLOT_US + 1);
    let slots = planned.max(needed).clamp(1, SLOTS_MAX) as usize;
    let mut timeline = vec![Slot::default(); slots];
    for one in decided {
        let slot = &mut timeline[((one.at_us / SLOT_US) as usize).min(slots - 1)];
        slot.offered += u64::from(one.cost);
        slot.admitted += if one.allowed { u64::from(one.cost) } else { 0 };
    }
    timeline
}

fn took_ns(decided: &[Decided]) -> Histogram<u64> {
    // It refuses only a low bound of 0, a high one below twice the low one, or over five digits.
    let mut took = Histogram::new_with_bounds(1, TOOK_NS_MAX, 3).expect("constants in bounds");
    for one in decided {
        took.saturating_record(one.took_ns);
    }
    took
}

fn denied_by_key(decided: &[Decided]) -> Vec<(u32, u64)> {
    let mut denied: HashMap<u32, u64> = HashMap::new();
    for one in decided.iter().filter(|one| !one.allowed) {
        *denied.entry(one.key).or_default() += 1;
    }
    let mut denied: Vec<(u32, u64)> = denied.into_iter().collect();
    // By key as well, so that equals come in the same order in each run.
    denied.sort_by_key(|&(key, count)| (std::cmp::Reverse(count), key));
    denied
}

fn vs_ideal_pct(admitted: u64, ideal: u64) -> f64 {
    if admitted == ideal {
        return 100.0;
    }
    // An ideal of 0 counts as 1, because infinity cannot be written in JSON.
    percent(admitted as f64, ideal.max(1) as f64)
}

fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request of one token on key 0 of node 0, surely allowed or denied.
    fn one(at_us: u64, allowed: bool) -> Decided {
        Decided { at_us, took_ns: 100, node: 0, key: 0, cost: 1, allowed, sure: true }
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} is not {expected}");
    }

    #[test]
    fn the_ideal_admits_the_burst_and_then_the_rate() {
        // 10 tokens a second, burst 3: four at once, then one each 50 ms, half of which find one.
        let mut decided: Vec<Decided> = (0..4).map(|i| one(0, i < 3)).collect();
        decided.extend((1..=8_u64).map(|i| one(i * 50_000, i.is_multiple_of(2))));
        let figures = Figures::of(&decided, 10.0, 3.0, 1.0);
        assert_eq!((figures.offered, figures.admitted, figures.ideal), (12, 7, 7));
        assert_near(figures.admitted_vs_ideal_pct, 100.0);
        assert_near(figures.excess_tokens, 0.0);
        assert_near(figures.wrong_denials_pct, 0.0);
    }

    #[test]
    fn the_ideal_counts_costs_and_fills_no_higher_than_the_burst() {
        let with_cost = |at_us, cost| Decided { cost, ..one(at_us, true) };
        // Burst 10, 1 a second: 8 of 10 go; 3 do not, 2 do; after an hour 10 go and 1 does not.
        let hour_us = 3_600_000_000;
        let decided = [
            with_cost(0, 8),
            with_cost(0, 3),
            with_cost(0, 2),
            with_cost(hour_us, 10),
            with_cost(hour_us, 1),
        ];
        let figures = Figures::of(&decided, 1.0, 10.0, 1.0);
        assert_eq!((figures.offered, figures.ideal), (24, 20));
    }

    #[test]
    fn a_burst_that_is_given_twice_is_seen_as_excess() {
        // Two nodes that each take the burst of 100 for their own: 100 tokens too many, at once.
        let decided: Vec<Decided> =
            (0..200).map(|i| Decided { node: i % 2, ..one(0, true) }).collect();
        let figures = Figures::of(&decided, 10.0, 100.0, 1.0);
        assert_eq!((figures.admitted, figures.ideal), (200, 100));
        assert_near(figures.admitted_vs_ideal_pct, 200.0);
        assert_near(figures.excess_tokens, 100.0);
        assert_near(figures.excess_pct_of_burst, 100.0);
    }

    #[test]
    fn excess_is_the_depth_of_the_lowest_point_not_the_last_one() {
        // Burst 2, 1 a second. Four at once: -2. Three seconds on, at 1, two: -1. At second 10 the
        // bucket is full, and what is admitted then is right.
        let at_us = [0, 0, 0, 0, 3_000_000, 3_000_000, 10_000_000];
        let decided = at_us.map(|at_us| one(at_us, true));
        let figures = Figures::of(&decided, 1.0, 2.0, 10.0);
        assert_near(figures.excess_tokens, 2.0);
    }

    #[test]
    fn excess_is_that_of_the_worst_key_and_never_a_sum() {
        // Burst 1: key 0 is one over, key 1 three, key 2 none.
        let counts = [(0, 2), (1, 4), (2, 1)];
        let decided: Vec<Decided> = counts
            .iter()
            .flat_map(|&(key, count)| vec![Decided { key, ..one(0, true) }; count])
            .collect();
        let figures = Figures::of(&decided, 1.0, 1.0, 1.0);
        assert_near(figures.excess_tokens, 3.0);
        assert_eq!(figures.ideal, 3);
    }

    #[test]
    fn a_limiter_that_starves_its_callers_shows_wrong_denials() {
        // Full bucket of 100; every second request of ten is denied while tokens abound.
        let decided: Vec<Decided> =
            (0..10_u64).map(|i| one(i * 1000, i.is_multiple_of(2))).collect();
        let figures = Figures::of(&decided, 10.0, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 50.0);
        assert_near(figures.admitted_vs_ideal_pct, 50.0);
        assert_near(figures.excess_tokens, 0.0);
    }

    #[test]
    fn a_denial_is_wrong_from_five_percent_of_the_burst_on() {
        // Burst 100, no refill to speak of. 95 admitted leave 5, the 96th leaves 4.
        let mut decided = vec![one(0, true); 95];
        decided.push(one(0, false));
        decided.push(one(0, true));
        decided.push(one(0, false));
        let figures = Figures::of(&decided, 1e-9, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 100.0 / 98.0);
    }

    #[test]
    fn a_denial_is_right_while_its_cost_is_not_there() {
        let mut decided = vec![one(0, true); 90];
        decided.push(Decided { cost: 11, ..one(0, false) });
        decided.push(Decided { cost: 10, ..one(0, false) });
        let figures = Figures::of(&decided, 1e-9, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 100.0 / 92.0);
    }

    #[test]
    fn a_debt_is_repaid_before_a_denial_is_called_wrong() {
        // Burst 1, 1 a second: three at once leave -2, so the next token is there at second 3.
        let mut decided = vec![one(0, true); 3];
        decided.extend([one(1_000_000, false), one(2_999_000, false), one(3_000_000, false)]);
        let figures = Figures::of(&decided, 1.0, 1.0, 3.0);
        assert_near(figures.wrong_denials_pct, 100.0 / 6.0);
    }

    #[test]
    fn unsure_decisions_are_counted_whatever_the_answer() {
        let unsure = |allowed| Decided { sure: false, ..one(0, allowed) };
        let decided = [one(0, true), unsure(true), unsure(false), one(0, false), one(0, true)];
        assert_near(Figures::of(&decided, 1.0, 10.0, 1.0).unsure_pct, 40.0);
    }

    #[test]
    fn percentiles_are_those_of_the_decisions_times() {
        let decided: Vec<Decided> =
            (1..=1000).map(|took_ns| Decided { took_ns, ..one(0, true) }).collect();
        let figures = Figures::of(&decided, 1.0, 10.0, 1.0);
        assert_eq!(figures.decision_p50_ns, 500);
        assert_eq!(figures.decision_p99_ns, 990);
        assert_eq!(figures.decision_p999_ns, 999);
    }

    #[test]
    fn a_decision_that_took_forever_is_counted_as_long_not_lost() {
        let decided = [Decided { took_ns: u64::MAX, ..one(0, true) }];
        assert!(Figures::of(&decided, 1.0, 1.0, 1.0).decision_p50_ns >= TOOK_NS_MAX);
    }

    #[test]
    fn the_timeline_has_a_slot_for_each_100_ms_of_the_run() {
        let decided = [one(0, true), one(99_999, false), one(100_000, true), one(299_999, false)];
        let figures = Figures::of(&decided, 1.0, 10.0, 0.5);
        let slots: Vec<(u64, u64)> =
            figures.timeline.iter().map(|slot| (slot.offered, slot.admitted)).collect();
        assert_eq!(slots, [(2, 1), (1, 1), (1, 0), (0, 0), (0, 0)]);
    }

    #[test]
    fn the_timeline_grows_for_late_decisions_but_not_without_end() {
        assert_eq!(Figures::of(&[one(1_050_000, true)], 1.0, 1.0, 1.0).timeline.len(), 11);
        let figures = Figures::of(&[one(u64::MAX, true)], 1.0, 1.0, 1.0);
        assert_eq!(figures.timeline.len() as u64, SLOTS_MAX);
        assert_eq!(figures.admitted, 1);
    }

    #[test]
    fn denied_requests_are_counted_by_key_most_first() {
        let on_key = |key, allowed| Decided { key, ..one(0, allowed) };
        let keys = [(3, false), (1, false), (3, false), (2, true), (0, false)];
        let decided = keys.map(|(key, allowed)| on_key(key, allowed));
        let figures = Figures::of(&decided, 1.0, 1.0, 1.0);
        assert_eq!(figures.denied_by_key, [(3, 2), (0, 1), (1, 1)]);
    }

    #[test]
    fn nothing_offered_is_nothing_wrong() {
        let figures = Figures::of(&[], 1.0, 1.0, 0.2);
        assert_eq!((figures.offered, figures.admitted, figures.ideal), (0, 0, 0));
        assert_near(figures.admitted_vs_ideal_pct, 100.0);
        assert_near(figures.wrong_denials_pct + figures.unsure_pct + figures.excess_tokens, 0.0);
        assert_eq!(figures.timeline.len(), 2);
    }
}
