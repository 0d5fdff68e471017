//! Costs that are known only after a request was allowed.

use super::Account;
use crate::limit::Terms;
use crate::sync::message::OUTSTANDING_MAX;
use crate::time::Timestamp;

/// What is settled of a request that was allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// So many of its tokens were not used. If the decision was sure, no outage policy made it.
    Unused { tokens: u32, sure: bool },
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
            (Settlement::Unused { tokens, sure }, _) if !sure && self.is_of_policy(decided) => {
                tokens
            }
            (Settlement::Unused { tokens, .. }, from_us) => {
                self.refund(tokens, decided, from_us, now)
            }
        }
    }

    /// Gives tokens back. Those that no report has charged are only outstanding; others were charged at `from_us` or later.
    fn refund(
        &mut self,
        tokens: u32,
        decided: Timestamp,
        from_us: Option<i64>,
        now: Timestamp,
    ) -> u32 {
        self.collect(now, true);
        let (unsent, mut left) = (&mut self.spending.unsent, i64::from(tokens));
        // Whose tokens they are does not matter, if they are of one window.
        let is_same = decided > self.spending.reported || from_us.is_some();
        if is_same && self.policy.is_none() {
            let spent = left.min(unsent.spent);
            unsent.spent -= spent;
            unsent.spent_before = unsent.spent_before.min(unsent.spent);
            let forfeited = spent.saturating_mul(self.scale.token);
            let forfeited = self.lease.forfeited.saturating_add(forfeited);
            self.lease.forfeited = forfeited.min(OUTSTANDING_MAX);
            let debt = (left - spent).min(unsent.debt);
            unsent.debt -= debt;
            left -= spent + debt;
        }
        match from_us {
            Some(from_us) => unsent.give_back(left, from_us),
            None => return left as u32,
        }
        0
    }

    /// Whether an outage policy may have made a decision then that was not sure.
    fn is_of_policy(&self, decided: Timestamp) -> bool {
        self.policy.is_some() || decided < self.spending.policy_left
    }
}
