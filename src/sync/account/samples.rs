//! Accounts for tests.

use std::sync::Arc;

use super::{Account, Cluster};
use crate::bucket::{BucketRef, KeyBudget, KeyHasher, NewKey, Table};
use crate::limit::Terms;
use crate::time::Timestamp;

/// When accounts of tests are opened.
pub(in crate::sync) const OPENED: Timestamp = Timestamp::from_micros(1_000);

/// The bucket of a key without requests.
pub(in crate::sync) fn bucket() -> BucketRef {
    let budget = Arc::new(KeyBudget::new(10, 1));
    let table = Arc::new(Table::new(0, KeyHasher::new([1, 2]), budget, 0).unwrap());
    BucketRef::new(&table, table.pin(b"key", NewKey::with_credit(0)))
}

/// The account of such a key, of the only node.
pub(in crate::sync) fn account_of(terms: &Terms) -> Account {
    let bucket = bucket();
    let cluster = Cluster { nodes: 1, round_trip_us: 0, backlog_us: 0, time_us: 0 };
    Account::new(bucket, b"key"[..].into(), 0, cluster, terms, OPENED)
}
