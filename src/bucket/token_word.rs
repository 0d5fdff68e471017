//! The word that a decision about a leased key changes: tokens, credit and what was spent, in 64 bits.
//!
//! ```text
//!  63   48    47     46    43 42          19   18     17       0
//! | epoch |  live   | credit |   tokens    | policy |  pending  |
//! ```
//!
//! - *pending*: tokens spent that the engine has not collected.
//! - *tokens*: whole tokens that can be spent now.
//! - *credit*: what can be spent beyond them before the store answers.
//! - *policy*: the tokens come from an outage policy, not from the store.
//! - *live*: the bucket has a key. Without it the word is retired: the key was evicted, and the bucket holds nothing.
//! - *epoch*: changes whenever the lease or the key changes.
//!
//! A compare-and-swap from a word of one epoch fails in every other epoch, unless a multiple of 2^16
//! changes came between. A lease changes at most twice in a millisecond, so a thread would have to be
//! suspended for half a minute between two instructions, and for exactly a multiple of 2^16 changes.

/// The most tokens that a word can hold.
pub(crate) const MAX_TOKENS: u32 = (1 << 24) - 1;
/// The most pending tokens that a word can hold.
pub(super) const MAX_PENDING: u32 = (1 << POLICY_AT) - 1;
/// The most credit that a word can hold.
pub(super) const MAX_CREDIT: u32 = 15;

const POLICY_AT: u32 = 18;
const TOKENS_AT: u32 = 19;
const CREDIT_AT: u32 = 43;
const LIVE_AT: u32 = 47;
const EPOCH_AT: u32 = 48;

const PENDING: u64 = MAX_PENDING as u64;
const POLICY: u64 = 1 << POLICY_AT;
const TOKENS: u64 = (MAX_TOKENS as u64) << TOKENS_AT;
const CREDIT: u64 = (MAX_CREDIT as u64) << CREDIT_AT;
const LIVE: u64 = 1 << LIVE_AT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenWord(pub(super) u64);

impl TokenWord {
    pub(super) fn pending(self) -> u32 {
        (self.0 & PENDING) as u32
    }

    pub(crate) fn tokens(self) -> u32 {
        ((self.0 & TOKENS) >> TOKENS_AT) as u32
    }

    pub(super) fn credit(self) -> u32 {
        ((self.0 & CREDIT) >> CREDIT_AT) as u32
    }

    pub(super) fn is_policy(self) -> bool {
        self.0 & POLICY != 0
    }

    pub(super) fn is_retired(self) -> bool {
        self.0 & LIVE == 0
    }

    pub(crate) fn epoch(self) -> u64 {
        self.0 >> EPOCH_AT
    }

    /// Whether a live key has no tokens, no credit and no policy.
    #[inline(always)]
    pub(super) fn is_empty(self) -> bool {
        self.0 & (TOKENS | CREDIT | LIVE | POLICY) == LIVE
    }

    pub(super) fn with_tokens(self, tokens: u32) -> Self {
        debug_assert!(tokens <= MAX_TOKENS);
        Self(self.0 & !TOKENS | u64::from(tokens) << TOKENS_AT)
    }

    pub(super) fn with_credit(self, credit: u32) -> Self {
        debug_assert!(credit <= MAX_CREDIT);
        Self(self.0 & !CREDIT | u64::from(credit) << CREDIT_AT)
    }

    pub(super) fn with_policy(self, policy: bool) -> Self {
        Self(self.0 & !POLICY | u64::from(policy) << POLICY_AT)
    }

    /// The same word with nothing pending.
    pub(super) fn collected(self) -> Self {
        Self(self.0 & !PENDING)
    }

    /// The same word in the next epoch.
    pub(super) fn next_epoch(self) -> Self {
        Self(self.0.wrapping_add(1 << EPOCH_AT))
    }

    /// A retired word in the next epoch.
    pub(super) fn retired(self) -> Self {
        Self(self.next_epoch().epoch() << EPOCH_AT)
    }

    /// The word of a new key, in the next epoch.
    pub(super) fn reset(self, credit: u32) -> Self {
        Self(self.retired().0 | LIVE).with_credit(credit)
    }

    /// Spends `cost` tokens, if `low` tokens are left and the engine need not be notified: something is
    /// pending already, and no policy is in force.
    #[inline(always)]
    pub(super) fn spend_unnoticed(self, cost: u32, low: u32) -> Option<Self> {
        // Where nothing is pending the subtraction wraps.
        let pending_less_one = (self.0 & (PENDING | POLICY)).wrapping_sub(1);
        let fits = pending_less_one < u64::from(MAX_PENDING.saturating_sub(cost));
        (fits && self.tokens() > low + (cost - 1)).then(|| self.spend(cost, 0))
    }

    /// Moves tokens and credit to pending, where they fit.
    #[inline(always)]
    pub(super) fn spend(self, from_tokens: u32, from_credit: u32) -> Self {
        let (tokens, credit) = (u64::from(from_tokens), u64::from(from_credit));
        Self(self.0 - (tokens << TOKENS_AT) - (credit << CREDIT_AT) + tokens + credit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A word of a live key.
    fn word(tokens: u32, pending: u32) -> TokenWord {
        TokenWord(LIVE | u64::from(pending)).with_tokens(tokens)
    }

    #[test]
    fn spend_is_unnoticed_up_to_the_last_token_above_the_low_mark_and_the_last_pending_one() {
        let spends =
            |tokens, pending, cost, low| word(tokens, pending).spend_unnoticed(cost, low).is_some();
        for cost in [1, 5] {
            assert!(spends(cost + 3, 1, cost, 3) && !spends(cost + 2, 1, cost, 3));
            let last = MAX_PENDING - cost;
            assert!(spends(100, last, cost, 0) && !spends(100, last + 1, cost, 0));
        }
        assert!(!spends(100, 0, 1, 0), "the engine is to be notified");
    }

    proptest! {
        #[test]
        fn fields_do_not_disturb_each_other(
            raw in any::<u64>(), tokens in 0..=MAX_TOKENS, credit in 0..=MAX_CREDIT, policy in any::<bool>(),
        ) {
            let word = TokenWord(raw);
            let set = word.with_tokens(tokens).with_credit(credit).with_policy(policy);
            prop_assert_eq!((set.tokens(), set.credit(), set.is_policy()), (tokens, credit, policy));
            prop_assert_eq!((set.pending(), set.epoch()), (word.pending(), word.epoch()));
            prop_assert_eq!(set.is_retired(), word.is_retired());
            let empty = tokens == 0 && credit == 0 && !policy && !word.is_retired();
            prop_assert_eq!(set.is_empty(), empty);
            prop_assert_eq!(word.collected().pending(), 0);
            prop_assert_eq!(word.next_epoch().0 << 16, raw << 16);
            let (retired, reset) = (word.retired(), word.reset(credit));
            prop_assert!(retired.is_retired() && !reset.is_retired());
            prop_assert_eq!((retired.tokens(), retired.credit(), retired.pending()), (0, 0, 0));
            prop_assert_eq!((reset.tokens(), reset.credit(), reset.pending()), (0, credit, 0));
            for next in [word.next_epoch(), retired, reset] {
                prop_assert_eq!(next.epoch(), (word.epoch() + 1) % (1 << 16));
            }
        }

        #[test]
        fn spending_moves_tokens_and_credit_to_pending(
            raw in any::<u64>(), cost in 1..=2 * MAX_PENDING, low in 0..=100_u32, credit in 0..=MAX_CREDIT,
        ) {
            let word = TokenWord(raw);
            let unnoticed = word.pending() > 0 && !word.is_policy();
            let fits = word.pending() + cost <= MAX_PENDING;
            let spent = word.spend_unnoticed(cost, low);
            prop_assert_eq!(spent.is_some(), unnoticed && fits && word.tokens() >= cost + low);
            if word.tokens() >= cost && word.credit() >= credit && word.pending() + cost + credit <= MAX_PENDING {
                let spent = word.spend(cost, credit);
                prop_assert_eq!(spent.tokens() + cost, word.tokens());
                prop_assert_eq!(spent.credit() + credit, word.credit());
                prop_assert_eq!(spent.pending(), word.pending() + cost + credit);
                prop_assert_eq!(spent.epoch(), word.epoch());
            }
        }
    }
}
