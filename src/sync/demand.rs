//! How fast a key is asked for on this node: the basis of shares, and of what to lease ahead.

use crate::time::Timestamp;

/// A quiet key's estimate is averaged over this many of its arrivals.
const AVERAGED_ARRIVALS: f64 = 4.0;

/// An exponentially decayed rate of arrivals, admitted and denied, in tokens per microsecond.
///
/// It forgets within a tick for hot keys, and within a few arrivals for quiet ones, but never
/// slower than the key's bucket fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    per_us: f64,
    since: Timestamp,
    /// There was a telling observation.
    was_telling: bool,
}

impl Demand {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self { per_us: 0.0, since: now, was_telling: false }
    }

    /// Tokens per microsecond.
    pub(crate) fn per_us(&self) -> f64 {
        self.per_us
    }

    /// Tokens expected over the next `micros`.
    pub(crate) fn over(&self, micros: u64) -> f64 {
        self.per_us * micros as f64
    }

    /// Ends an observation in which `arrivals` tokens were asked for; `telling` if there were enough requests to trust
    /// it without the past.
    pub(crate) fn observe(
        &mut self,
        arrivals: u64,
        telling: bool,
        now: Timestamp,
        tick_us: u64,
        fill_us: u64,
    ) {
        let span_us = now.micros_since(self.since).max(1) as f64;
        let sample = arrivals as f64 / span_us;
        let slowest_us = fill_us.max(tick_us) as f64;
        let memory_us =
            (AVERAGED_ARRIVALS / self.per_us.max(sample)).clamp(tick_us as f64, slowest_us);
        let mut weight = span_us / (memory_us + span_us);
        if telling {
            // The first one has no past to be weighed against.
            weight = weight.max(if self.was_telling { 0.5 } else { 1.0 });
            self.was_telling = true;
        }
        self.per_us += weight * (sample - self.per_us);
        self.since = now;
    }

    /// Forgets what was before: `arrivals` over the last `span_us` are all there is.
    pub(crate) fn collapse(&mut self, arrivals: u64, span_us: u64, now: Timestamp) {
        self.per_us = self.per_us.min(arrivals as f64 / span_us.max(1) as f64);
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK_US: u64 = 50_000;

    fn at(us: u64) -> Timestamp {
        Timestamp::from_micros(us)
    }

    #[test]
    fn hot_key_is_known_within_two_ticks_and_forgotten_as_fast() {
        let mut demand = Demand::new(at(0));
        for tick in 1..=2 {
            demand.observe(100, true, at(tick * TICK_US), TICK_US, 1_000_000);
        }
        assert!(demand.over(TICK_US) > 70.0, "{}", demand.over(TICK_US));
        for tick in 3..=5 {
            demand.observe(0, false, at(tick * TICK_US), TICK_US, 1_000_000);
        }
        assert!(demand.over(TICK_US) < 15.0, "{}", demand.over(TICK_US));
    }

    #[test]
    fn first_telling_sample_is_taken_whole_and_later_ones_by_half() {
        let mut demand = Demand::new(at(0));
        demand.observe(1, false, at(1000), TICK_US, 1_000_000);
        demand.observe(450, true, at(51_000), TICK_US, 1_000_000);
        assert!((demand.over(TICK_US) - 450.0).abs() < 1e-6, "{}", demand.over(TICK_US));
        demand.observe(0, true, at(101_000), TICK_US, 1_000_000);
        assert!((demand.over(TICK_US) - 225.0).abs() < 1e-6, "{}", demand.over(TICK_US));
    }

    #[test]
    fn single_arrival_after_a_millisecond_is_not_taken_for_a_thousand_a_second() {
        let mut demand = Demand::new(at(0));
        demand.observe(1, false, at(1000), TICK_US, 1_000_000);
        assert!(demand.per_us() * 1e6 < 50.0);
    }
}
