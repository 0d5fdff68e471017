//! Tokens that were spent and not used.
//!
//! # Argument
//!
//! Tokens go back by one compare-and-swap that takes as many from what is pending. So what the bucket holds and what the
//! engine is to collect keep their sum, which is what the store has leased. It does not matter which request the pending
//! tokens are of, unless they were spent on credit. Then the bucket holds as many tokens as that beyond what the store has
//! leased, until the next report: no more than the credit, which the bound allows for.

use super::LeaseBucket;
use crate::bucket::atomic::Ordering;
use crate::bucket::token_word::TokenWord;
use crate::time::Timestamp;

impl LeaseBucket {
    /// Puts tokens back that a decision took from a lease. The key was found to be the same in this epoch. `is_whole`: the
    /// request cost no more, so it is not to be counted as allowed.
    ///
    /// False, and nothing is changed, if lease or key have changed, if the engine has collected the tokens, if the lease has
    /// ended, if an outage policy is in force, or if the bucket has no room.
    pub(crate) fn put_back(&self, tokens: u32, is_whole: bool, epoch: u64, now: Timestamp) -> bool {
        loop {
            let Some(word) = self.load_in(epoch) else { return false };
            let depth = self.depth.load(Ordering::Acquire);
            let has_room = word.tokens().saturating_add(tokens) <= depth;
            let is_pending = word.pending() >= tokens && !word.is_policy();
            if !has_room || !is_pending || !self.is_live(now) {
                return false;
            }
            let back = TokenWord(word.0 - u64::from(tokens)).with_tokens(word.tokens() + tokens);
            if self.swap(word, back).is_ok() {
                self.uncount(tokens - u32::from(is_whole));
                return true;
            }
        }
    }

    /// Lowers what counts of the tokens beyond one a request, by which allowed requests are told from tokens.
    fn uncount(&self, surplus: u32) {
        let less = |before: u32| Some(before.saturating_sub(surplus));
        let _ = self.surplus.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}
