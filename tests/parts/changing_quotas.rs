//! Quotas of a limit that change, and what a key has then by the definition.

use std::time::Duration;

use tidegate::testing::ManualClock;
use tidegate::{ActiveLimit, FixedWindow, Limit, Limiter, Quota, Rule, SlidingLog, SlidingWindow};

const HOUR: Duration = Duration::from_secs(3600);

/// As good as no refill: a token in eight hours.
pub(crate) fn burst(tokens: u64) -> Quota {
    Quota::new(1, 8 * HOUR).burst(tokens)
}

#[allow(dead_code, reason = "not all tests are without the limiter")]
pub(crate) fn alone(limit: Limit) -> (ActiveLimit, ManualClock) {
    let clock = ManualClock::new();
    clock.advance(HOUR);
    let limiter = Limiter::builder().limit(limit.local()).clock(&clock).build().unwrap();
    (limiter.limit("api").unwrap(), clock)
}

pub(crate) fn spend_all(limit: &ActiveLimit) -> u32 {
    let mut spent = 0;
    while limit.check("key").is_allowed() {
        spent += 1;
    }
    spent
}

/// Each algorithm with a quota of 20 and a plan of 100, and what a key has of the plan that spent 5 of the 20: a bucket keeps
/// what it has, a window what was spent in it.
pub(crate) fn raises() -> [(&'static str, Rule, Rule, u32); 5] {
    let day = 24 * HOUR;
    let zone = |tokens| FixedWindow::per_day(tokens).zone("Europe/Berlin");
    let sliding = [SlidingWindow::new(20, day), SlidingWindow::new(100, day)];
    [
        ("token bucket", burst(20).into(), burst(100).into(), 15),
        ("fixed window", FixedWindow::new(20, day).into(), FixedWindow::new(100, day).into(), 95),
        // Whose rates are rounded, each in another way.
        ("days of a zone", zone(20).into(), zone(31).into(), 26),
        ("sliding window", sliding[0].into(), sliding[1].into(), 95),
        ("sliding log", SlidingLog::new(20, day).into(), SlidingLog::new(100, day).into(), 95),
    ]
}

/// A token bucket as the definition has it, whose plan may change at any time: in millionths of a token.
pub(crate) struct Central {
    pub(crate) level: i128,
    pub(crate) at_us: u64,
    /// Tokens a second, and the burst.
    pub(crate) plan: (u32, u32),
}

impl Central {
    pub(crate) fn allows(&mut self, plan: (u32, u32), now_us: u64) -> bool {
        let (rate, burst) = self.plan;
        let flowed = i128::from(now_us - self.at_us) * i128::from(rate);
        self.level = (self.level + flowed).min(i128::from(burst) * 1_000_000);
        self.level = self.level.min(i128::from(plan.1) * 1_000_000);
        (self.plan, self.at_us) = (plan, now_us);
        let is_allowed = self.level >= 1_000_000;
        self.level -= if is_allowed { 1_000_000 } else { 0 };
        is_allowed
    }
}
