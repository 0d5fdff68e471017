//! Decisions, counted for the metrics.

use crate::bucket::Collected;

/// Decisions booked, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DecisionCounts {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) unsure: u64,
    /// Tokens denied beyond one a request, which `denied` counts as requests.
    pub(crate) denied_surplus: u64,
}

impl DecisionCounts {
    /// Decisions by which `spent` tokens went, `surplus` of them beyond one a request; how many of them were unsure is counted
    /// elsewhere.
    pub(crate) fn of(collected: &Collected, spent: u64, surplus: u64) -> Self {
        let allowed = spent.saturating_sub(surplus);
        Self { allowed, denied: collected.denied, ..Self::default() }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.unsure += other.unsure;
        self.denied_surplus += other.denied_surplus;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_counts_are_sums() {
        let one = DecisionCounts { allowed: 1, denied: 2, unsure: 3, denied_surplus: 4 };
        let mut counts = one;
        counts.merge(DecisionCounts { allowed: 10, denied: 20, unsure: 30, denied_surplus: 40 });
        let sums = DecisionCounts { allowed: 11, denied: 22, unsure: 33, denied_surplus: 44 };
        assert_eq!(counts, sums);
    }
}
