//! Decisions, counted for the metrics.

use crate::bucket::Collected;

/// Decisions booked, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) unsure: u64,
    /// Tokens spent beyond one a request, which `allowed` counts as requests.
    pub(crate) allowed_surplus: u64,
    /// Tokens denied beyond one a request, which `denied` counts as requests.
    pub(crate) denied_surplus: u64,
}

impl Tally {
    /// Decisions by which `spent` tokens went; how many of them were unsure is counted elsewhere.
    pub(crate) fn of(collected: &Collected, spent: u64) -> Self {
        Self { allowed: spent, denied: collected.denied, ..Self::default() }
    }

    /// Requests allowed and denied; what of the surplus no report has told of yet is left for the next time.
    pub(crate) fn take_requests(&mut self) -> (u64, u64) {
        let requests = |tokens: u64, surplus: &mut u64| {
            let told = tokens.min(*surplus);
            *surplus -= told;
            tokens - told
        };
        let allowed = requests(self.allowed, &mut self.allowed_surplus);
        let denied = requests(self.denied, &mut self.denied_surplus);
        (self.allowed, self.denied) = (0, 0);
        (allowed, denied)
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.unsure += other.unsure;
        self.allowed_surplus += other.allowed_surplus;
        self.denied_surplus += other.denied_surplus;
    }
}
