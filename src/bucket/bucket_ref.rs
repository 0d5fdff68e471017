//! The table of leased keys as the engine and handles hold its buckets: one by one.

use std::ops::Deref;
use std::sync::Arc;

use super::lease_bucket::LeaseBucket;
use super::spend_result::{Ask, SpendResult, Verdict};
use super::table::{OVERFLOW, Table, TableBucket};
use crate::time::Now;

impl Table<LeaseBucket> {
    /// Gives this credit to every bucket that the engine has no account of. A full one gets its first credit when it is
    /// used.
    pub(crate) fn set_credit_at_rest(&self, credit: u32) {
        self.started().for_each(|bucket| bucket.set_credit_at_rest(credit));
    }
}

/// A bucket and its table. Cheap to clone. Its owner pins the place, or has an account of the key: then the place is
/// not given to another key.
#[derive(Clone, Debug)]
pub(crate) struct BucketRef {
    table: Arc<Table<LeaseBucket>>,
    place: u32,
}

impl BucketRef {
    /// The bucket at `place` of `table`.
    pub(crate) fn new(table: &Arc<Table<LeaseBucket>>, place: u32) -> Self {
        Self { table: table.clone(), place }
    }

    /// The limit's number.
    pub(crate) fn limit(&self) -> u32 {
        self.table.limit
    }

    /// The key, which must not be evicted meanwhile; empty for the overflow bucket.
    pub(crate) fn key(&self) -> Arc<[u8]> {
        TableBucket::key(&**self).load(&self.table.long).into()
    }

    /// Whether the key was evicted.
    pub(crate) fn is_retired(&self) -> bool {
        LeaseBucket::is_retired(TableBucket::load(&**self))
    }

    /// Whether it is the bucket of keys for which there is no room.
    pub(crate) fn is_overflow(&self) -> bool {
        self.place == OVERFLOW
    }

    /// Decides about `cost` tokens of a key that is not evicted meanwhile.
    pub(crate) fn decide(&self, ask: Ask, now: impl Now) -> SpendResult {
        loop {
            let word = TableBucket::load(&**self);
            if LeaseBucket::is_retired(word) {
                debug_assert!(false, "its owner keeps it from eviction");
                return self.result(Verdict::Denied, false, 0);
            }
            if let Some(result) = self.try_decide(word, ask, now) {
                return result;
            }
        }
    }
}

impl Deref for BucketRef {
    type Target = LeaseBucket;

    #[inline]
    fn deref(&self) -> &LeaseBucket {
        self.table.at(self.place)
    }
}
