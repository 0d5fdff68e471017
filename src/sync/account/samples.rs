//! Accounts for tests.

use std::sync::Arc;

use super::{Account, Cluster, Installed};
use crate::bucket::{Ask, BucketRef, KeyBudget, KeyHasher, NewKey, Table};
use crate::limit::Terms;
use crate::quota::Scale;
use crate::sync::message::Given;
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

/// A request of a caller who does not wait, of a key without plan and first credit.
pub(in crate::sync) fn ask(cost: u32, scale: Scale) -> Ask {
    Ask { cost, scale, first_credit: 0, plan: NewKey::NO_PLAN, can_wait: false }
}

/// Reports when the account is opened, and takes this reply in.
pub(in crate::sync) fn answered(account: &mut Account, given: &Given, terms: &Terms) -> Installed {
    let entry = account.report(&"x".into(), terms, OPENED, false);
    account.end_report();
    account.install(given, &entry, OPENED, OPENED, terms)
}
