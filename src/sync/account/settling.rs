//! Costs that are known only after a request was allowed.

use super::Account;
use crate::limit::Terms;
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// What is settled of a request that was allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// So many of its tokens were not used.
    Unused(u32),
    /// It cost so many tokens more.
    Beyond(u32),
}

impl Account {
    /// Books what is settled of a request that was decided at `decided`, which was `decided_us` by the lane's time, at the
    /// earliest. Returns how many unused tokens are not given back: those of a window that has ended, and those that an outage
    /// policy allowed, of which the store charges only a part.
    pub(crate) fn settle(
        &mut self,
        settlement: Settlement,
        decided: Timestamp,
        decided_us: Option<i64>,
        now: Timestamp,
        terms: &Terms,
    ) -> u32 {
        self.report_by(now.plus_micros(terms.tick_us));
        match (settlement, decided_us) {
            (Settlement::Beyond(tokens), _) => {
                self.spending.unsent.debt += i64::from(tokens);
                self.spending.owes = true;
                0
            }
            (Settlement::Unused(tokens), Some(from_us)) if !self.is_of_policy(decided) => {
                self.spending.unsent.give_back(tokens.into(), from_us);
                0
            }
            (Settlement::Unused(tokens), _) => tokens,
        }
    }

    /// Whether an outage policy may have decided then.
    fn is_of_policy(&self, decided: Timestamp) -> bool {
        // Decisions read the cached clock.
        let latest = decided.plus_micros(CLOCK_AGE_MAX_US);
        let entered = self.policy.map(|policy| policy.entered);
        entered.is_some_and(|entered| latest >= entered) || decided < self.spending.policy_left
    }
}
