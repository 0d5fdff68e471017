//! Whether a key's requests come in bursts, and how far apart.
//!
//! What a node holds is computed as if requests came one by one, each by its own chance. Clients also send many at
//! once, and then nothing for a while. A node that gave back between two bursts what the next one needs would deny
//! nearly all of it.

use super::history::{LINGER_MAX_US, LINGER_MIN_US};
use crate::time::Timestamp;

/// Requests are a burst if at least this many of them would have fallen into the silence before them, had they been
/// spread evenly over the silence and the time since. Chance leaves such a silence once in three thousand times.
const BURST_REQUESTS: u64 = 8;
/// The next burst is to be expected until a silence is this many times as long as the one before. What comes within this
/// time belongs to the same burst, unless a silence of half that length is between.
const PATIENCE: u64 = 2;
/// Bursts are forgotten after this many silences that no burst followed. Two bursts make a pattern: the
/// first may be a client that comes back.
const REMEMBERED: u8 = 8;

/// A silence, and what came after it.
#[derive(Clone, Copy, Debug)]
struct Cycle {
    from: Timestamp,
    silence_us: u64,
    requests: u64,
    tokens: u64,
    /// A burst came after it.
    is_burst: bool,
}

impl Cycle {
    fn new(from: Timestamp, silence_us: u64) -> Self {
        Self { from, silence_us, requests: 0, tokens: 0, is_burst: false }
    }

    /// Whether chance alone would hardly leave such a silence.
    fn is_telling(&self, now: Timestamp) -> bool {
        let span_us = now.micros_since(self.from).max(1);
        self.requests.saturating_mul(self.silence_us) >= BURST_REQUESTS * span_us
    }
}

/// What is known of the bursts of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bursts {
    /// The silence before the last burst, in microseconds.
    silence_us: u64,
    /// What the next one is expected to ask for.
    tokens: u64,
    /// There were two before the first was forgotten, or a wrong judgement that requests had ceased.
    is_pattern: bool,
    /// Silences without a burst until bursts are forgotten.
    remembered: u8,
    /// The last silence that may be one before a burst.
    cycle: Cycle,
    /// Requests were judged to have ceased, and none has come since.
    was_judged_over: bool,
    /// A cycle has begun since demand was observed.
    has_turned: bool,
    /// When demand was observed.
    demand_observed: Timestamp,
    /// The last collection that found requests.
    last: Timestamp,
    /// The last collection since that found none, or `last`.
    silent_until: Timestamp,
    /// The first request since, if the engine was notified of it.
    first: Option<Timestamp>,
}

impl Bursts {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            silence_us: 0,
            tokens: 0,
            is_pattern: false,
            remembered: 0,
            cycle: Cycle::new(now, 0),
            was_judged_over: false,
            has_turned: false,
            demand_observed: now,
            last: now,
            silent_until: now,
            first: None,
        }
    }

    /// Notes a request. Only the first since the last collection counts.
    pub(super) fn note_request(&mut self, at: Timestamp) {
        if at > self.last {
            self.first.get_or_insert(at);
        }
    }

    /// Requests are judged to have ceased. If they come again soon, that was wrong: they come in bursts.
    pub(super) fn judge_over(&mut self) {
        self.was_judged_over = true;
    }

    /// A collection has found requests for `tokens`.
    pub(super) fn collect(&mut self, requests: u64, tokens: u64, now: Timestamp) {
        let first = self.first.take();
        if requests == 0 {
            self.silent_until = now;
            return;
        }
        let silent_until = first.unwrap_or(self.silent_until);
        let silence_us = silent_until.micros_since(self.last).min(LINGER_MAX_US);
        // A burst may be observed in parts, since it is reported as it begins.
        let is_over = now.micros_since(self.cycle.from) > PATIENCE * self.cycle.silence_us;
        if is_over || 2 * silence_us >= self.cycle.silence_us {
            if self.cycle.is_burst {
                self.tokens = self.cycle.tokens.max(self.tokens / 2);
            } else {
                self.remembered = self.remembered.saturating_sub(1);
                self.is_pattern &= self.remembered > 0;
            }
            self.cycle = Cycle::new(self.last, silence_us);
            self.has_turned = true;
        }
        self.cycle.requests += requests;
        self.cycle.tokens += tokens;
        let come_again = std::mem::take(&mut self.was_judged_over) && silence_us < LINGER_MIN_US;
        self.judge_cycle(come_again, now);
        (self.last, self.silent_until) = (now, now);
    }

    fn judge_cycle(&mut self, come_again: bool, now: Timestamp) {
        if come_again || (!self.cycle.is_burst && self.cycle.is_telling(now)) {
            self.cycle.is_burst = true;
            self.is_pattern |= come_again || self.remembered > 0;
            self.remembered = REMEMBERED;
            self.silence_us = self.cycle.silence_us;
        }
        if self.cycle.is_burst {
            self.tokens = self.tokens.max(self.cycle.tokens);
        }
    }

    /// How long a silence may last until it says that requests have ceased, in microseconds.
    pub(super) fn patience_us(&self) -> u64 {
        if self.is_pattern { PATIENCE * self.silence_us } else { 0 }
    }

    /// Whether to observe demand now; if so, notes that it was. Where requests come in bursts, that is once from burst to
    /// burst.
    pub(super) fn take_demand_due(&mut self, now: Timestamp) -> bool {
        let has_turned = std::mem::take(&mut self.has_turned);
        let is_due = has_turned || now.micros_since(self.demand_observed) >= self.patience_us();
        if is_due {
            self.demand_observed = now;
        }
        is_due
    }

    /// Tokens of the next burst; none if none is to be expected.
    pub(super) fn expected(&self, now: Timestamp) -> i64 {
        if now.micros_since(self.last) < self.patience_us() { self.tokens as i64 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    /// A burst of ten requests for twenty tokens, after 50 ms without any, and the report on it.
    fn burst(bursts: &mut Bursts, at_us: u64) {
        bursts.collect(0, 0, at(at_us - 1000));
        bursts.note_request(at(at_us));
        bursts.collect(10, 20, at(at_us + 1000));
    }

    #[test]
    fn two_bursts_make_a_pattern_and_eight_silences_without_one_end_it() {
        let mut bursts = Bursts::new(at(0));
        burst(&mut bursts, 50_000);
        assert_eq!((bursts.expected(at(51_000)), bursts.patience_us()), (0, 0));
        burst(&mut bursts, 101_000);
        assert_eq!((bursts.expected(at(201_999)), bursts.patience_us()), (20, 100_000));
        assert_eq!(bursts.expected(at(202_000)), 0, "it does not come");
        for more in 0..9 {
            assert_eq!(bursts.patience_us(), 100_000, "{more}");
            bursts.collect(1, 1, at(400_000 + more * 1000));
        }
        assert_eq!(bursts.patience_us(), 0);
    }

    #[test]
    fn demand_is_observed_once_from_burst_to_burst_and_when_none_has_come_for_twice_the_silence() {
        let mut bursts = Bursts::new(at(0));
        burst(&mut bursts, 50_000);
        assert!(bursts.take_demand_due(at(51_000)));
        assert!(bursts.take_demand_due(at(60_000)), "one is no pattern");
        burst(&mut bursts, 101_000);
        assert!(bursts.take_demand_due(at(102_000)));
        assert!(!bursts.take_demand_due(at(152_000)));
        burst(&mut bursts, 152_000);
        assert!(bursts.take_demand_due(at(153_000)));
        assert!(!bursts.take_demand_due(at(252_999)));
        assert!(bursts.take_demand_due(at(253_000)));
    }

    #[test]
    fn burst_that_is_reported_as_it_begins_is_counted_whole() {
        let mut bursts = Bursts::new(at(0));
        for burst in 1..=2_u64 {
            let begins_us = burst * 100_000;
            bursts.note_request(at(begins_us));
            bursts.collect(1, 1, at(begins_us));
            bursts.collect(40, 40, at(begins_us + 500));
            bursts.collect(49, 49, at(begins_us + 1500));
        }
        assert_eq!((bursts.expected(at(202_000)), bursts.patience_us()), (90, 2 * 98_500));
    }

    #[test]
    fn silence_without_notifications_ends_at_the_last_empty_report() {
        let mut bursts = Bursts::new(at(0));
        for tick in 0..2_u64 {
            bursts.collect(0, 0, at(tick * 100_000 + 40_000));
            bursts.collect(20, 20, at(tick * 100_000 + 50_000));
        }
        assert_eq!(bursts.patience_us(), 2 * 90_000);
    }

    #[test]
    fn burst_that_is_collected_one_by_one_is_one_burst() {
        let mut bursts = Bursts::new(at(0));
        for burst in 1..=3_u64 {
            for request in 0..12 {
                let at_us = burst * 100_000 + request * 1000;
                bursts.note_request(at(at_us));
                bursts.collect(1, 1, at(at_us));
            }
        }
        assert_eq!(bursts.expected(at(312_000)), 12);
    }

    #[test]
    fn one_large_burst_is_forgotten_within_a_few_small_ones() {
        let mut bursts = Bursts::new(at(0));
        for (burst, tokens) in (1..).zip([1_000_000, 10, 10, 10, 10, 10, 10]) {
            bursts.note_request(at(burst * 100_000));
            bursts.collect(10, tokens, at(burst * 100_000 + 1000));
        }
        assert_eq!(bursts.expected(at(702_000)), 1_000_000 / 32);
    }

    #[test]
    fn requests_that_were_judged_to_have_ceased_and_come_again_soon_make_a_pattern() {
        for (again_us, patience_us) in [(50_000, 100_000), (300_000, 0)] {
            let mut bursts = Bursts::new(at(0));
            bursts.collect(3, 3, at(1000));
            bursts.judge_over();
            bursts.note_request(at(1000 + again_us));
            bursts.collect(3, 3, at(2000 + again_us));
            assert_eq!(bursts.patience_us(), patience_us);
        }
    }

    #[test]
    fn requests_that_come_one_by_one_are_no_bursts() {
        let mut rng = fastrand::Rng::with_seed(7);
        for per_second in [5.0, 40.0, 300.0, 5000.0] {
            let (mut bursts, mut now_us, mut patterns) = (Bursts::new(at(0)), 0.0, 0);
            let mut next_us = 0.0;
            for tick in 1..=20_000_u64 {
                let mut requests = 0;
                while next_us < tick as f64 * 50_000.0 {
                    bursts.note_request(at(next_us as u64));
                    requests += 1;
                    now_us = next_us;
                    next_us -= rng.f64().ln() * 1e6 / per_second;
                }
                assert!(now_us <= next_us);
                bursts.collect(requests, requests, at(tick * 50_000));
                patterns += u32::from(bursts.patience_us() > 0);
            }
            assert!(patterns < 20, "{per_second} a second: {patterns} of 20000 ticks");
        }
    }
}
