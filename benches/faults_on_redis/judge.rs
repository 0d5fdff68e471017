//! What the nodes decided, against one bucket: code that shares nothing with the limiter.

/// One decision, by the clock that all processes share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decided {
    /// When it was completed, since the load began.
    pub(crate) at_us: u64,
    pub(crate) allowed: bool,
    pub(crate) took_ns: u64,
}

/// From and until, since the load began, in microseconds.
pub(crate) type Stretch = (u64, u64);

/// A token bucket that may go negative.
struct Bucket {
    per_us: f64,
    burst: f64,
    level: f64,
    at_us: u64,
}

impl Bucket {
    fn full(rate: u64, burst: u64) -> Self {
        Self { per_us: rate as f64 / 1e6, burst: burst as f64, level: burst as f64, at_us: 0 }
    }

    fn pass_until(&mut self, at_us: u64) {
        let refill = self.per_us * at_us.saturating_sub(self.at_us) as f64;
        self.level = (self.level + refill).min(self.burst);
        self.at_us = at_us;
    }
}

/// The figures of one run.
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) offered: usize,
    pub(crate) spent: u64,
    /// The depth of the admitted bucket's lowest point, in tokens.
    pub(crate) excess: f64,
    /// Admitted, of what one bucket admits of the same requests, outside of `away`.
    pub(crate) ideal_pct: f64,
    pub(crate) p999_ns: u64,
}

/// `decided` in the order of time; what falls into `away` counts for the excess and both buckets, and
/// not for the comparison of what they admitted.
pub(crate) fn judge(decided: &[Decided], rate: u64, burst: u64, away: &[Stretch]) -> Judged {
    let (mut real, mut ideal) = (Bucket::full(rate, burst), Bucket::full(rate, burst));
    let (mut lowest, mut spent, mut admitted, mut admitted_ideal) = (0.0_f64, 0, 0_u64, 0_u64);
    for decision in decided {
        let at_us = decision.at_us;
        let counts = !away.iter().any(|&(from, until)| (from..until).contains(&at_us));
        real.pass_until(at_us);
        ideal.pass_until(at_us);
        if decision.allowed {
            real.level -= 1.0;
            lowest = lowest.min(real.level);
            spent += 1;
            admitted += u64::from(counts);
        }
        if ideal.level >= 1.0 {
            ideal.level -= 1.0;
            admitted_ideal += u64::from(counts);
        }
    }
    let mut took: Vec<u64> = decided.iter().map(|decision| decision.took_ns).collect();
    took.sort_unstable();
    Judged {
        offered: decided.len(),
        spent,
        excess: 0.0 - lowest,
        ideal_pct: 100.0 * admitted as f64 / admitted_ideal.max(1) as f64,
        p999_ns: took.get(took.len() * 999 / 1000).copied().unwrap_or(0),
    }
}
