//! The word that decides: pending, tokens, credit and lease epoch in 64 bits.
//!
//! ```text
//!  63   48   47   46    43 42          19   18     17       0
//! | epoch | gone | credit |   tokens    | policy |  pending  |
//! ```
//!
//! *pending* counts tokens spent and not yet collected by the engine; *tokens* are whole tokens
//! that may be spent without asking; *credit* is what may be spent beyond them; *policy* says that
//! the tokens come from an outage policy, not from the store; *gone* says that the key was evicted,
//! and there is nothing. *epoch* changes with every change of the
//! lease, and when the key comes or goes.
//!
//! A thread that read the word in one epoch fails to change it in another one, unless just a multiple of
//! 2^16 changes came between. A change of a lease makes two epochs at most, and comes at most once in a
//! millisecond; an eviction and a new key make two. So a thread would have to be held up for half a minute,
//! and to the change, between two of its instructions, for refill or a token to go to the wrong lease.

/// The most tokens that a word can count.
pub(crate) const FIELD_MAX: u32 = (1 << 24) - 1;
/// The most pending tokens: more go to the engine in a note of their own.
pub(super) const PENDING_MAX: u32 = (1 << POLICY_AT) - 1;

const POLICY_AT: u32 = 18;
const TOKENS_AT: u32 = 19;
const CREDIT_AT: u32 = 43;
const GONE_AT: u32 = 47;
const EPOCH_AT: u32 = 48;
const FIELD: u64 = FIELD_MAX as u64;
const PENDING: u64 = PENDING_MAX as u64;
const POLICY: u64 = 1 << POLICY_AT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(pub u64);

impl Word {
    #[cfg(test)]
    pub(super) fn new(tokens: u32, credit: u32) -> Self {
        Self(0).with_tokens(tokens).with_credit(credit)
    }

    pub(super) fn pending(self) -> u32 {
        (self.0 & PENDING) as u32
    }

    pub(super) fn tokens(self) -> u32 {
        ((self.0 >> TOKENS_AT) & FIELD) as u32
    }

    pub(super) fn credit(self) -> u32 {
        ((self.0 >> CREDIT_AT) & 0xf) as u32
    }

    pub(super) fn policy(self) -> bool {
        (self.0 >> POLICY_AT) & 1 == 1
    }

    pub(super) fn epoch(self) -> u64 {
        self.0 >> EPOCH_AT
    }

    pub(super) fn with_tokens(self, tokens: u32) -> Self {
        debug_assert!(tokens <= FIELD_MAX);
        Self(self.0 & !(FIELD << TOKENS_AT) | u64::from(tokens) << TOKENS_AT)
    }

    pub(super) fn with_credit(self, credit: u32) -> Self {
        debug_assert!(credit <= 15);
        Self(self.0 & !(0xf << CREDIT_AT) | u64::from(credit) << CREDIT_AT)
    }

    pub(super) fn with_policy(self, policy: bool) -> Self {
        Self(self.0 & !POLICY | u64::from(policy) << POLICY_AT)
    }

    pub(super) fn gone(self) -> bool {
        (self.0 >> GONE_AT) & 1 == 1
    }

    /// The key is evicted, and whatever it had.
    pub(super) fn forgotten(self) -> Self {
        Self(self.next_epoch().epoch() << EPOCH_AT | 1 << GONE_AT)
    }

    /// Another key begins, at rest.
    pub(super) fn reborn(self, credit: u32) -> Self {
        Self(self.next_epoch().epoch() << EPOCH_AT).with_credit(credit)
    }

    /// The same word in the next lease epoch.
    pub(super) fn next_epoch(self) -> Self {
        Self(self.0.wrapping_add(1 << EPOCH_AT))
    }

    /// The same word with nothing pending.
    pub(super) fn collected(self) -> Self {
        Self(self.0 & !PENDING)
    }

    /// Whether there are no tokens, no credit and no policy, but a key.
    #[inline(always)]
    pub(super) fn is_bare(self) -> bool {
        const FROM_POLICY_TO_GONE: u64 = (1 << EPOCH_AT) - POLICY;
        self.0 & FROM_POLICY_TO_GONE == 0
    }

    /// Whether there is no policy, something is pending, and `cost` more can be.
    #[inline(always)]
    pub(super) fn is_plain(self, cost: u32) -> bool {
        // Where nothing is pending, that borrows from the flags.
        let flags_and_pending = self.0.wrapping_sub(1) & (POLICY | PENDING);
        flags_and_pending < u64::from(PENDING_MAX.saturating_sub(cost))
    }

    /// `cost` less tokens, and as many pending, where there are so many tokens and that many pending
    /// ones fit.
    #[inline(always)]
    pub(super) fn spend_tokens(self, cost: u32) -> Self {
        let cost = u64::from(cost);
        Self(self.0 - (cost << TOKENS_AT) + cost)
    }

    /// `from_tokens` less tokens, `from_credit` less credit, and both pending; `None` when that
    /// many pending tokens do not fit: see [`spend_all`](Self::spend_all).
    pub(super) fn spend(self, from_tokens: u32, from_credit: u32) -> Option<Self> {
        let pending = self.pending() + from_tokens + from_credit;
        let spent = self.spend_all(from_tokens, from_credit);
        (pending <= PENDING_MAX).then_some(Self(spent.0 | u64::from(pending)))
    }

    /// The same with nothing pending: what was, and what is spent, is the caller's to tell.
    pub(super) fn spend_all(self, from_tokens: u32, from_credit: u32) -> Self {
        self.with_tokens(self.tokens() - from_tokens)
            .with_credit(self.credit() - from_credit)
            .collected()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fields_do_not_disturb_each_other(
            raw in any::<u64>(), tokens in 0..=FIELD_MAX, credit in 0..=15_u32, policy in any::<bool>(),
        ) {
            let word = Word(raw);
            let set = word.with_tokens(tokens).with_credit(credit).with_policy(policy);
            prop_assert_eq!((set.tokens(), set.credit(), set.policy()), (tokens, credit, policy));
            prop_assert_eq!((set.pending(), set.epoch()), (word.pending(), word.epoch()));
            prop_assert_ne!(word.next_epoch().epoch(), word.epoch());
            prop_assert_eq!(word.next_epoch().tokens(), word.tokens());
            prop_assert_eq!(word.collected().pending(), 0);
            let pending = (1..=PENDING_MAX - credit).contains(&set.pending());
            prop_assert_eq!(set.is_plain(credit), !policy && pending);
            prop_assert!(!word.collected().is_plain(1));
            let empty = set.with_tokens(0).with_credit(0).with_policy(false);
            prop_assert!(empty.is_bare() != empty.gone());
            prop_assert_eq!(set.is_bare(), set == empty && !set.gone());
            prop_assert!(!set.forgotten().is_bare());
            prop_assert_eq!(set.gone(), word.gone());
            let (gone, reborn) = (word.forgotten(), word.reborn(credit));
            prop_assert!(gone.gone() && !reborn.gone());
            prop_assert_eq!(gone.0 << (64 - GONE_AT), 0);
            prop_assert_eq!(reborn.0 << (64 - EPOCH_AT), Word::new(0, credit).0 << (64 - EPOCH_AT));
            prop_assert_ne!(gone.epoch(), word.epoch());
        }

        #[test]
        fn spending_moves_tokens_and_credit_to_pending(
            tokens in 0..=2 * PENDING_MAX, credit in 0..=15_u32, part in 0.0..=1.0_f64,
        ) {
            let from_tokens = (f64::from(tokens) * part) as u32;
            let from_credit = (f64::from(credit) * part) as u32;
            match Word::new(tokens, credit).spend(from_tokens, from_credit) {
                Some(spent) => {
                    prop_assert_eq!(spent.tokens() + from_tokens, tokens);
                    prop_assert_eq!(spent.credit() + from_credit, credit);
                    prop_assert_eq!(spent.pending(), from_tokens + from_credit);
                    let without_credit = Word::new(tokens, credit).spend(from_tokens, 0);
                    let spent = Word::new(tokens, credit).spend_tokens(from_tokens);
                    prop_assert_eq!(Some(spent), without_credit);
                }
                None => prop_assert!(from_tokens + from_credit > PENDING_MAX),
            }
        }
    }
}
