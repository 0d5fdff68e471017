//! The algorithms by their definitions, as one central limit would be: what others are judged by. It shares nothing with
//! the limiter.

use std::collections::VecDeque;

use tidegate::Rule;

/// One key of one central limit. Tokens are counted in parts, of which a microsecond brings as many as a period has
/// tokens.
pub(super) struct Central {
    kind: Kind,
    tokens: u64,
    period_us: u64,
}

enum Kind {
    Bucket { burst: i128, level: i128, at_us: u64 },
    Queue { longest: i128, next: i128 },
    Window { number: u64, spent: u64, before: u64, slides: bool },
    Log { spent_us: VecDeque<u64> },
}

impl Central {
    pub(super) fn new(rule: Rule) -> Self {
        let quota = rule.quota();
        let (tokens, period_us) = (quota.tokens(), quota.period().as_micros() as u64);
        let window = |slides| Kind::Window { number: 0, spent: 0, before: 0, slides };
        let kind = match rule {
            Rule::LeakyBucket(rule) => {
                let longest_us = rule.longest_wait().as_micros() as i128;
                Kind::Queue { longest: longest_us * i128::from(tokens), next: 0 }
            }
            Rule::FixedWindow(_) => window(false),
            Rule::SlidingWindow(_) => window(true),
            Rule::SlidingLog(_) => Kind::Log { spent_us: VecDeque::new() },
            _ => {
                let burst = i128::from(quota.burst_tokens()) * i128::from(period_us);
                Kind::Bucket { burst, level: burst, at_us: 0 }
            }
        };
        Self { kind, tokens, period_us }
    }

    /// Lets time pass, which does not go back.
    fn pass(&mut self, now_us: u64) {
        match &mut self.kind {
            Kind::Bucket { burst, level, at_us } => {
                let passed_us = now_us.saturating_sub(*at_us);
                *level = (*level + i128::from(passed_us) * i128::from(self.tokens)).min(*burst);
                *at_us = now_us.max(*at_us);
            }
            Kind::Queue { next, .. } => {
                *next = (*next).max(i128::from(now_us) * i128::from(self.tokens));
            }
            Kind::Window { number, spent, before, .. } => match now_us / self.period_us {
                now if now == *number + 1 => (*number, *before, *spent) = (now, *spent, 0),
                now if now > *number => (*number, *before, *spent) = (now, 0, 0),
                _ => {}
            },
            Kind::Log { spent_us } => {
                while spent_us.front().is_some_and(|at_us| at_us + self.period_us <= now_us) {
                    spent_us.pop_front();
                }
            }
        }
    }

    /// Tokens beyond what is allowed, if one more is spent now; 0 or less if it is allowed.
    fn beyond(&self, now_us: u64) -> f64 {
        let period = self.period_us as f64;
        match &self.kind {
            Kind::Bucket { level, .. } => 1.0 - *level as f64 / period,
            Kind::Queue { longest, next } => {
                let ahead = next - i128::from(now_us) * i128::from(self.tokens);
                (ahead - longest) as f64 / period
            }
            Kind::Window { spent, before, slides, .. } => {
                let left_us = self.period_us - now_us % self.period_us;
                let counted =
                    u128::from(*before) * u128::from(left_us) / u128::from(self.period_us);
                let counted = if *slides { counted as f64 } else { 0.0 };
                *spent as f64 + counted + 1.0 - self.tokens as f64
            }
            Kind::Log { spent_us } => spent_us.len() as f64 + 1.0 - self.tokens as f64,
        }
    }

    fn spend(&mut self, now_us: u64) {
        match &mut self.kind {
            Kind::Bucket { level, .. } => *level -= i128::from(self.period_us),
            Kind::Queue { next, .. } => *next += i128::from(self.period_us),
            Kind::Window { spent, .. } => *spent += 1,
            Kind::Log { spent_us } => spent_us.push_back(now_us),
        }
    }

    /// Decides about a request.
    pub(super) fn allows(&mut self, now_us: u64) -> bool {
        self.pass(now_us);
        let is_allowed = self.beyond(now_us) <= 0.0;
        if is_allowed {
            self.spend(now_us);
        }
        is_allowed
    }

    /// Charges what somebody else admitted, which begins at `start_us`. Returns the tokens in excess.
    pub(super) fn charge(&mut self, start_us: u64) -> f64 {
        self.pass(start_us);
        let excess = match &mut self.kind {
            // A start has no queue before it.
            Kind::Queue { next, .. } => {
                let early = *next - i128::from(start_us) * i128::from(self.tokens);
                early as f64 / self.period_us as f64
            }
            _ => self.beyond(start_us),
        };
        self.spend(start_us);
        excess.max(0.0)
    }
}

/// The most of so many times that lie within a period.
pub(super) fn most_in_a_period(times_us: &[u64], period_us: u64) -> u64 {
    let (mut first, mut most) = (0, 0);
    for (last, at_us) in times_us.iter().enumerate() {
        while times_us[first] + period_us <= *at_us {
            first += 1;
        }
        most = most.max(last + 1 - first);
    }
    most as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::{FixedWindow, LeakyBucket, Quota, SlidingLog, SlidingWindow};

    /// A period's tokens at a window's end, and as many at the next one's beginning: what each admits of the second.
    #[test]
    fn requests_around_an_edge_show_what_each_algorithm_admits_at_worst() {
        let edge = |rule: Rule| {
            let mut central = Central::new(rule);
            let times = (0..10).map(|_| 999_999).chain((0..10).map(|_| 1_000_000));
            let admitted: Vec<bool> = times.map(|at_us| central.allows(at_us)).collect();
            let count = |part: &[bool]| part.iter().filter(|one| **one).count();
            (count(&admitted[..10]), count(&admitted[10..]))
        };
        assert_eq!(edge(FixedWindow::per_second(10).into()), (10, 10));
        assert_eq!(edge(SlidingWindow::per_second(10).into()), (10, 0));
        assert_eq!(edge(SlidingLog::per_second(10).into()), (10, 0));
        assert_eq!(edge(Quota::per_second(10).into()), (10, 0));
        assert_eq!(edge(LeakyBucket::per_second(10).into()), (1, 0));
    }

    #[test]
    fn tokens_admitted_beyond_a_limit_count_as_excess() {
        let excess = |rule: Rule| {
            let mut central = Central::new(rule);
            (0..13).map(|_| central.charge(500_000)).fold(0.0, f64::max)
        };
        for rule in [
            Rule::from(FixedWindow::per_second(10)),
            SlidingWindow::per_second(10).into(),
            SlidingLog::per_second(10).into(),
            Quota::per_second(10).into(),
        ] {
            assert!((excess(rule) - 3.0).abs() < 1e-9, "{rule:?}");
        }
        assert!((excess(LeakyBucket::per_second(10).into()) - 12.0).abs() < 1e-9);
    }

    #[test]
    fn periods_are_half_open() {
        assert_eq!(most_in_a_period(&[0, 5, 9, 10, 19, 20], 10), 3);
        assert_eq!(most_in_a_period(&[0, 10, 20], 10), 1);
    }
}
