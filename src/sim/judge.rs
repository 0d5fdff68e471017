//! The judge of a run: what was right, from what was offered and what was decided.
//!
//! It shares nothing with the limiter on purpose: its meters (`judge/meter.rs`) are the plainest that can
//! be written, in floating point, so that a mistake in the limiter cannot be one in its judge.

use std::ops::Range;

use super::cold::FIRST_REQUESTS;
use super::figures::{Decided, Figures, SLOT_US, Slot};
use crate::algorithm::Rule;

mod meter;
mod starts;

use meter::{Definition, Meter};
use starts::Starts;

/// The most entries of a timeline, some 28 hours; the last one takes whatever comes later.
pub const SLOTS_MAX: u64 = 1_000_000;

/// Below this many tokens a level counts as zero: floating-point error, not an admission.
const TOKENS_ERROR: f64 = 1e-6;

/// With less than this part of the burst at hand, a denial is not called wrong.
const WRONG_DENIAL_BURST_PART: f64 = 0.05;

/// Nodes know to a part of a round trip when slots begin: only requests that begin earlier than by this part of a slot count
/// towards the longest excess.
const EARLY_TOKENS: f64 = 0.5;

/// A node's share of a window says something from this many tokens on: chance alone then rarely
/// takes half of it.
const FAIR_SHARE_MIN: f64 = 60.0;

impl Figures {
    /// Judges `decided`, which is ordered by `at_us`, under a limit of `rate_per_second` and `burst`
    /// tokens a key. The timeline covers `seconds`, and longer if decisions came later.
    pub fn of(decided: &[Decided], rate_per_second: f64, burst: f64, seconds: f64) -> Self {
        let mut judge = Judge::new(rate_per_second, burst);
        for one in decided {
            judge.record(one);
        }
        judge.figures(seconds)
    }

    /// The same by the definition of the limit's algorithm. The run began at `origin_us` of the time by which windows
    /// begin.
    pub fn by_rule(decided: &[Decided], rule: Rule, origin_us: u64, seconds: f64) -> Self {
        let mut judge = Judge::of_rule(rule, origin_us);
        for one in decided {
            judge.record(one);
        }
        judge.figures(seconds)
    }
}

/// One key: what an ideal limiter would have, and what is left after what was really admitted.
#[derive(Clone, Debug)]
struct KeyTally {
    ideal_meter: Meter,
    real_meter: Meter,
    /// Empty but of a leaky bucket.
    starts: Starts,
    ideal: u64,
    admitted: u64,
    requests: u32,
    denied_requests: u64,
    first_us: u64,
    /// Since when tokens have been admitted that were not there.
    in_excess_since_s: Option<f64>,
    longest_excess_s: f64,
    above_half_s: f64,
}

impl KeyTally {
    /// A key that is asked for the first time.
    fn new(at_us: u64, definition: &Definition) -> Self {
        let full = Meter::new(definition, at_us);
        Self {
            ideal_meter: full.clone(),
            real_meter: full,
            starts: Starts::default(),
            ideal: 0,
            admitted: 0,
            requests: 0,
            denied_requests: 0,
            first_us: at_us,
            in_excess_since_s: None,
            longest_excess_s: 0.0,
            above_half_s: 0.0,
        }
    }

    /// Lets time pass for both, and sees what the real one was meanwhile.
    fn pass(&mut self, at_us: u64, definition: &Definition) {
        let (now_s, rate) = (at_us as f64 / 1e6, definition.rate_per_second());
        let half_s = self.real_meter.reaches_s(definition.burst() / 2.0, rate);
        self.above_half_s += now_s - half_s.clamp(self.real_meter.at_us() as f64 / 1e6, now_s);
        if !definition.is_queue() {
            self.repay(self.real_meter.reaches_s(0.0, rate), now_s);
        }
        self.ideal_meter.pass(definition, at_us);
        self.real_meter.pass(definition, at_us);
    }

    /// What was in excess is repaid at `repaid_s`, and it is `now_s`.
    fn repay(&mut self, repaid_s: f64, now_s: f64) {
        let Some(since_s) = self.in_excess_since_s else { return };
        self.longest_excess_s = self.longest_excess_s.max(repaid_s.min(now_s) - since_s);
        if repaid_s <= now_s {
            self.in_excess_since_s = None;
        }
    }

    /// Spends what was admitted. Returns the tokens that were not there.
    fn admit(&mut self, one: &Decided, definition: &Definition) -> f64 {
        self.admitted += u64::from(one.cost);
        self.real_meter.spend(one.cost.into());
        if definition.is_queue() {
            self.starts.add(one.at_us + one.delay_us, one.cost);
            return 0.0;
        }
        let excess = (-self.real_meter.level()).max(0.0);
        if excess > TOKENS_ERROR {
            self.in_excess_since_s.get_or_insert(one.at_us as f64 / 1e6);
        }
        excess
    }

    /// Lets requests begin that have waited for their slots until `now_us`. Returns by how many tokens the worst is too
    /// early.
    fn begin_until(&mut self, now_us: u64, definition: &Definition) -> f64 {
        if !definition.is_queue() {
            return 0.0;
        }
        let (mut excess, rate) = (0.0_f64, definition.rate_per_second());
        while let Some(start) = self.starts.next(now_us, rate) {
            self.repay(start.due_s, start.at_s);
            let early = (start.due_s - start.at_s) * rate;
            if early > TOKENS_ERROR {
                excess = excess.max(early);
            }
            if early > EARLY_TOKENS {
                self.in_excess_since_s.get_or_insert(start.at_s);
            } else {
                self.repay(start.at_s, start.at_s);
            }
        }
        self.repay(self.starts.repaid_s(), now_us as f64 / 1e6);
        excess
    }
}

/// One node within the current window.
#[derive(Clone, Copy, Debug, Default)]
struct NodeTally {
    offered: u64,
    admitted: u64,
}

/// A walk through all requests, one at a time, in the order in which they were decided.
#[derive(Clone, Debug)]
pub struct Judge {
    definition: Definition,
    keys: Vec<Option<KeyTally>>,
    nodes: Vec<NodeTally>,
    window_us: u64,
    window_ends_us: u64,
    window_ideal: u64,
    least_fair_share: f64,
    requests: u64,
    unsure: u64,
    waited: u64,
    wrong_denials: u64,
    first_requests: u64,
    wrong_first_denials: u64,
    excess_tokens: f64,
    timeline: Vec<Slot>,
    /// Keys from this number on are counted and not judged.
    known_keys: Option<u32>,
    invented_keys: u64,
    /// When the store could not be reached, in microseconds since the run's start.
    absences: Vec<Range<u64>>,
    /// What the ideal admitted and what was admitted while it could.
    reachable: [u64; 2],
}

impl Judge {
    /// A judge of a limit of `rate_per_second` and `burst` tokens a key.
    pub fn new(rate_per_second: f64, burst: f64) -> Self {
        Self::by(Definition::bucket(rate_per_second, burst))
    }

    /// A judge of a limit by its algorithm. The run begins at `origin_us` of the time by which windows begin.
    pub(super) fn of_rule(rule: Rule, origin_us: u64) -> Self {
        Self::by(Definition::of(rule, origin_us))
    }

    fn by(definition: Definition) -> Self {
        let (rate_per_second, burst) = (definition.rate_per_second(), definition.burst());
        let window_us = (10.0 * burst / rate_per_second * 1e6).min(u64::MAX as f64 / 2.0) as u64;
        Self {
            definition,
            keys: Vec::new(),
            nodes: Vec::new(),
            window_us: window_us.max(1),
            window_ends_us: window_us.max(1),
            window_ideal: 0,
            least_fair_share: 1.0,
            requests: 0,
            unsure: 0,
            waited: 0,
            wrong_denials: 0,
            first_requests: 0,
            wrong_first_denials: 0,
            excess_tokens: 0.0,
            timeline: Vec::new(),
            known_keys: None,
            invented_keys: 0,
            absences: Vec::new(),
            reachable: [0; 2],
        }
    }

    /// Keys from this number on are asked for once each: they are counted, so that memory is
    /// bounded, and not judged.
    #[must_use]
    pub fn of_known_keys(self, known_keys: Option<u32>) -> Self {
        Self { known_keys, ..self }
    }

    /// The store cannot be reached within this time, in microseconds since the run's start.
    pub fn store_is_absent(&mut self, absence: Range<u64>) {
        self.absences.push(absence);
    }

    /// Takes in the next request.
    pub fn record(&mut self, one: &Decided) {
        if self.known_keys.is_some_and(|known| one.key >= known) {
            self.invented_keys += 1;
            return;
        }
        self.requests += 1;
        self.unsure += u64::from(!one.sure);
        self.waited += u64::from(one.waited);
        self.record_slot(one);
        let admitted = if one.allowed { u64::from(one.cost) } else { 0 };
        let ideal = self.record_key(one);
        if !self.absences.iter().any(|absence| absence.contains(&one.at_us)) {
            self.reachable = [self.reachable[0] + ideal, self.reachable[1] + admitted];
        }
        if one.at_us >= self.window_ends_us {
            self.close_window(one.at_us);
        }
        self.window_ideal += ideal;
        let node = usize::from(one.node);
        if node >= self.nodes.len() {
            self.nodes.resize(node + 1, NodeTally::default());
        }
        self.nodes[node].offered += u64::from(one.cost);
        self.nodes[node].admitted += admitted;
    }

    /// Tokens admitted so far above what there was, of the worst key.
    pub fn excess_tokens(&self) -> f64 {
        self.excess_tokens
    }

    /// What the ideal has admitted on the key of which it has admitted most.
    pub fn most_ideal(&self) -> u64 {
        self.keys.iter().flatten().map(|key| key.ideal).max().unwrap_or(0)
    }

    fn record_slot(&mut self, one: &Decided) {
        let slot = (one.at_us / SLOT_US).min(SLOTS_MAX - 1) as usize;
        if slot >= self.timeline.len() {
            self.timeline.resize(slot + 1, Slot::default());
        }
        self.timeline[slot].offered += u64::from(one.cost);
        self.timeline[slot].admitted += if one.allowed { u64::from(one.cost) } else { 0 };
    }

    /// Returns what the ideal admitted.
    fn record_key(&mut self, one: &Decided) -> u64 {
        let definition = self.definition;
        let index = one.key as usize;
        if index >= self.keys.len() {
            self.keys.resize(index + 1, None);
        }
        let key = self.keys[index].get_or_insert_with(|| KeyTally::new(one.at_us, &definition));
        let cost = f64::from(one.cost);
        let is_first = key.requests < FIRST_REQUESTS;
        key.requests = key.requests.saturating_add(1);
        self.first_requests += u64::from(is_first);
        key.pass(one.at_us, &definition);
        let mut excess = key.begin_until(one.at_us, &definition);
        let least = definition.least(cost);
        if one.allowed {
            excess = excess.max(key.admit(one, &definition));
        } else {
            key.denied_requests += 1;
            let telling = least.max(WRONG_DENIAL_BURST_PART * definition.burst());
            if key.real_meter.level() + TOKENS_ERROR >= telling {
                self.wrong_denials += 1;
                self.wrong_first_denials += u64::from(is_first);
            }
        }
        if excess > TOKENS_ERROR {
            self.excess_tokens = self.excess_tokens.max(excess);
        }
        if key.ideal_meter.level() + TOKENS_ERROR < least {
            return 0;
        }
        key.ideal_meter.spend(cost);
        key.ideal += u64::from(one.cost);
        u64::from(one.cost)
    }

    fn close_window(&mut self, at_us: u64) {
        let offered: u64 = self.nodes.iter().map(|node| node.offered).sum();
        for node in &mut self.nodes {
            let node = std::mem::take(node);
            let fair = self.window_ideal as f64 * node.offered as f64 / offered.max(1) as f64;
            if fair >= FAIR_SHARE_MIN {
                self.least_fair_share = self.least_fair_share.min(node.admitted as f64 / fair);
            }
        }
        self.window_ideal = 0;
        self.window_ends_us =
            (at_us / self.window_us).saturating_add(1).saturating_mul(self.window_us);
    }

    /// What came out. The timeline covers `seconds`, and longer if decisions came later.
    pub fn figures(mut self, seconds: f64) -> Figures {
        let end_us = (seconds * 1e6) as u64;
        if end_us >= self.window_ends_us {
            self.close_window(end_us);
        }
        let definition = self.definition;
        for key in self.keys.iter_mut().flatten() {
            self.excess_tokens = self.excess_tokens.max(key.begin_until(u64::MAX, &definition));
        }
        let planned = (seconds * 1e6 / SLOT_US as f64).ceil() as u64;
        let slots = planned.clamp(1, SLOTS_MAX).max(self.timeline.len() as u64) as usize;
        self.timeline.resize(slots, Slot::default());
        let offered = self.timeline.iter().map(|slot| slot.offered).sum();
        let admitted = self.timeline.iter().map(|slot| slot.admitted).sum();
        let ideal = self.keys.iter().flatten().map(|key| key.ideal).sum();
        let mut by_key: Vec<f64> =
            self.keys.iter().flatten().map(|key| vs_ideal_pct(key.admitted, key.ideal)).collect();
        by_key.sort_unstable_by(f64::total_cmp);
        let requests = self.requests as f64;
        Figures {
            offered,
            admitted,
            ideal,
            admitted_vs_ideal_pct: vs_ideal_pct(admitted, ideal),
            admitted_vs_ideal_reachable_pct: vs_ideal_pct(self.reachable[1], self.reachable[0]),
            invented_keys: self.invented_keys,
            excess_tokens: self.excess_tokens,
            excess_pct_of_burst: percent(self.excess_tokens, self.definition.burst()),
            wrong_denials_pct: percent(self.wrong_denials as f64, requests),
            wrong_first_denials_pct: percent(
                self.wrong_first_denials as f64,
                self.first_requests as f64,
            ),
            unsure_pct: percent(self.unsure as f64, requests),
            waited_pct: percent(self.waited as f64, requests),
            worst_keys_vs_ideal_pct: by_key.get(by_key.len() / 100).copied().unwrap_or(100.0),
            least_fair_share_pct: 100.0 * self.least_fair_share,
            longest_excess_s: self.longest_excess_s(),
            above_half_pct: self.above_half_pct(),
            denied_by_key: self.denied_by_key(),
            timeline: self.timeline,
        }
    }

    /// What is not repaid at the end has at least lasted until the key's last request.
    fn longest_excess_s(&self) -> f64 {
        let of_key = |key: &KeyTally| {
            let last_s = key.real_meter.at_us() as f64 / 1e6;
            let unpaid_s = key.in_excess_since_s.map_or(0.0, |since_s| last_s - since_s);
            key.longest_excess_s.max(unpaid_s)
        };
        self.keys.iter().flatten().map(of_key).fold(0.0, f64::max)
    }

    fn above_half_pct(&self) -> f64 {
        let lasted_s = |key: &KeyTally| (key.real_meter.at_us() - key.first_us) as f64 / 1e6;
        let all_s = self.keys.iter().flatten().map(lasted_s).sum();
        percent(self.keys.iter().flatten().map(|key| key.above_half_s).sum(), all_s)
    }

    fn denied_by_key(&self) -> Vec<(u32, u64)> {
        let denied = |(key, tally): (usize, &Option<KeyTally>)| {
            tally.as_ref().map(|tally| (key as u32, tally.denied_requests))
        };
        let mut denied: Vec<(u32, u64)> = self.keys.iter().enumerate().filter_map(denied).collect();
        denied.retain(|&(_, count)| count > 0);
        // By key as well, so that equals come in the same order in each run.
        denied.sort_by_key(|&(key, count)| (std::cmp::Reverse(count), key));
        denied
    }
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
        Decided { at_us, node: 0, key: 0, cost: 1, allowed, sure: true, waited: false, delay_us: 0 }
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} is not {expected}");
    }

    #[test]
    fn ideal_admits_the_burst_and_then_the_rate() {
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
    fn ideal_counts_costs_and_fills_no_higher_than_the_burst() {
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
    fn burst_that_is_given_twice_is_seen_as_excess() {
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
    fn limiter_that_starves_its_callers_shows_wrong_denials() {
        // Full bucket of 100; every second request of ten is denied while tokens abound.
        let decided: Vec<Decided> =
            (0..10_u64).map(|i| one(i * 1000, i.is_multiple_of(2))).collect();
        let figures = Figures::of(&decided, 10.0, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 50.0);
        assert_near(figures.admitted_vs_ideal_pct, 50.0);
        assert_near(figures.excess_tokens, 0.0);
    }

    #[test]
    fn denial_is_wrong_from_five_percent_of_the_burst_on() {
        // Burst 100, no refill to speak of. 95 admitted leave 5, the 96th leaves 4.
        let mut decided = vec![one(0, true); 95];
        decided.push(one(0, false));
        decided.push(one(0, true));
        decided.push(one(0, false));
        let figures = Figures::of(&decided, 1e-9, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 100.0 / 98.0);
    }

    #[test]
    fn denial_is_right_while_its_cost_is_not_there() {
        let mut decided = vec![one(0, true); 90];
        decided.push(Decided { cost: 11, ..one(0, false) });
        decided.push(Decided { cost: 10, ..one(0, false) });
        let figures = Figures::of(&decided, 1e-9, 100.0, 1.0);
        assert_near(figures.wrong_denials_pct, 100.0 / 92.0);
    }

    #[test]
    fn debt_is_repaid_before_a_denial_is_called_wrong() {
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
    fn node_that_is_starved_while_others_feast_shows_in_the_fair_share() {
        // 1000 a second, burst 1000: over ten seconds nodes 0 and 1 ask alike, 1 gets a quarter.
        let asks = (0..11_000_u64).flat_map(|i| {
            let at_us = i * 1000;
            let node = |node| Decided { node, ..one(at_us, node == 0 || i.is_multiple_of(4)) };
            [node(0), node(1)]
        });
        let decided: Vec<Decided> = asks.collect();
        let figures = Figures::of(&decided, 1000.0, 1000.0, 11.0);
        assert!(figures.least_fair_share_pct < 50.0, "{}", figures.least_fair_share_pct);
    }

    #[test]
    fn window_that_ends_with_the_run_is_judged_too() {
        // 100 a second, burst 100, ten seconds and no request after: node 1 gets nothing.
        let asks = (0..1000_u64)
            .flat_map(|i| [0, 1].map(|node| Decided { node, ..one(i * 10_000, node == 0) }));
        let decided: Vec<Decided> = asks.collect();
        assert_near(Figures::of(&decided, 100.0, 100.0, 9.99).least_fair_share_pct, 100.0);
        assert_near(Figures::of(&decided, 100.0, 100.0, 10.0).least_fair_share_pct, 0.0);
    }

    #[test]
    fn excess_lasts_from_the_first_token_too_many_until_refill_has_repaid_the_last() {
        // Burst 1, 1 a second. Second 0: -1; half a second on: -1.5, repaid at second 2.
        let at_us = [0, 0, 500_000, 3_000_000, 3_000_000, 3_250_000];
        let decided = at_us.map(|at_us| one(at_us, true));
        assert_near(Figures::of(&decided[..4], 1.0, 1.0, 4.0).longest_excess_s, 2.0);
        // The second one is unpaid at the end, and was looked at a quarter of a second later.
        assert_near(Figures::of(&decided[3..], 1.0, 1.0, 4.0).longest_excess_s, 0.25);
        assert_near(Figures::of(&[one(0, true)], 1.0, 1.0, 4.0).longest_excess_s, 0.0);
    }

    #[test]
    fn time_above_half_the_burst_counts_from_the_first_request_of_each_key_to_the_last() {
        // Burst 4, 1 a second: at 1 from second 10, at half at 11, asked again at 14.
        let mut decided = vec![one(10_000_000, true); 3];
        decided.push(one(14_000_000, false));
        assert_near(Figures::of(&decided, 1.0, 4.0, 20.0).above_half_pct, 75.0);
        // Another that is above half throughout, for as long.
        let other = [10_000_000, 14_000_000].map(|at_us| Decided { key: 1, ..one(at_us, true) });
        decided.extend(other);
        decided.sort_by_key(|one| one.at_us);
        assert_near(Figures::of(&decided, 1.0, 4.0, 20.0).above_half_pct, 87.5);
        assert_near(Figures::of(&[], 1.0, 4.0, 20.0).above_half_pct, 0.0);
    }

    #[test]
    fn worst_percentile_of_keys_is_apart_from_the_total() {
        // 200 keys with a burst of 2; two of them get nothing.
        let decided: Vec<Decided> = (0..200)
            .flat_map(|key| [0, 1].map(|at_us| Decided { key, ..one(at_us, key > 2) }))
            .collect();
        let figures = Figures::of(&decided, 1.0, 2.0, 1.0);
        assert_near(figures.worst_keys_vs_ideal_pct, 0.0);
        assert_near(figures.admitted_vs_ideal_pct, 98.5);
    }

    #[test]
    fn timeline_has_a_slot_for_each_100_ms_of_the_run() {
        let decided = [one(0, true), one(99_999, false), one(100_000, true), one(299_999, false)];
        let figures = Figures::of(&decided, 1.0, 10.0, 0.5);
        let slots: Vec<(u64, u64)> =
            figures.timeline.iter().map(|slot| (slot.offered, slot.admitted)).collect();
        assert_eq!(slots, [(2, 1), (1, 1), (1, 0), (0, 0), (0, 0)]);
    }

    #[test]
    fn timeline_grows_for_late_decisions_but_not_without_end() {
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
    fn requests_that_come_while_the_store_is_away_are_left_out_of_the_reachable_figure() {
        // Burst 4: two of four admitted while the store is away, none of the ideal's others.
        let mut judge = Judge::new(1e-9, 4.0);
        judge.store_is_absent(10..20);
        let asked = [(10, true), (11, true), (19, false), (20, true), (21, false)];
        for (at_us, allowed) in asked {
            judge.record(&one(at_us, allowed));
        }
        let figures = judge.figures(1.0);
        assert_near(figures.admitted_vs_ideal_pct, 75.0);
        assert_near(figures.admitted_vs_ideal_reachable_pct, 100.0);
    }

    #[test]
    fn invented_keys_are_counted_and_not_judged() {
        let mut judge = Judge::new(1.0, 1.0).of_known_keys(Some(1));
        judge.record(&one(0, true));
        for key in 1..1000 {
            judge.record(&Decided { key, ..one(0, false) });
        }
        assert_eq!(judge.keys.len(), 1);
        let figures = judge.figures(1.0);
        assert_eq!((figures.invented_keys, figures.offered), (999, 1));
        assert_near(figures.wrong_denials_pct, 0.0);
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
