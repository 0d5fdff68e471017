//! How often keys were reset on this node: bounds contain that.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// So many keys are counted each for itself, and all others together, as if they were one.
const KEYS_MAX: usize = 10_000;

/// How often keys of one limit were reset on this node.
#[derive(Debug, Default)]
pub(crate) struct ResetCounts(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    by_key: HashMap<Box<[u8]>, u32>,
    of_others: u32,
    most: u32,
}

impl ResetCounts {
    /// Counts a reset of a key.
    pub(crate) fn count(&self, key: &[u8]) {
        let counts = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = counts.by_key.len() < KEYS_MAX || counts.by_key.contains_key(key);
        let count = if has_room {
            counts.by_key.entry(key.into()).or_default()
        } else {
            &mut counts.of_others
        };
        *count = count.saturating_add(1);
        counts.most = counts.most.max(*count);
    }

    /// Resets of the key that was reset most often; never fewer.
    pub(super) fn most(&self) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_resets_of_one_key_are_counted_and_of_too_many_keys_no_fewer() {
        let counts = ResetCounts::default();
        for key in 0..KEYS_MAX {
            counts.count(&key.to_le_bytes());
        }
        assert_eq!(counts.most(), 1);
        (0..3).for_each(|_| counts.count(&7_usize.to_le_bytes()));
        assert_eq!(counts.most(), 4);
        (0..5).for_each(|key| counts.count(&(KEYS_MAX + key).to_le_bytes()));
        assert_eq!(counts.most(), 5, "they may have been one key");
    }
}
