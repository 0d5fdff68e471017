//! The data plane: buckets that decisions change without locks, in a table that they read without locks, and the
//! queue by which they notify the engine.
//!
//! A decision hashes the key, finds the bucket ([`Table`]), and changes one word of it. A [`LocalBucket`],
//! [`WindowBucket`] or [`LogBucket`], by the limit's algorithm, is all that there is to know about a key of a local
//! limit. A [`LeaseBucket`] holds what the store has leased to this node of a
//! key of a hybrid limit; the engine (`sync`) collects what was spent and renews the lease.

mod atomic;
mod bucket_ref;
mod index;
mod key_hash;
mod lease_bucket;
mod local_bucket;
mod log_bucket;
mod marks;
#[cfg(all(test, tidegate_models))]
mod models;
mod new_key;
mod notifications;
mod spend_result;
mod stored_key;
mod table;
mod token_word;
mod window_bucket;

pub(crate) use bucket_ref::BucketRef;
pub(crate) use key_hash::{HashSeeds, KeyHasher};
pub(crate) use lease_bucket::{Collected, Lease, LeaseBucket, OUTLIVES_REFILL, UNLIMITED_RATE};
pub(crate) use local_bucket::LocalBucket;
pub(crate) use log_bucket::LogBucket;
pub(crate) use new_key::NewKey;
#[cfg(feature = "sim")]
pub(crate) use notifications::Urgency;
pub(crate) use notifications::{MAX_QUEUED, Notification, NotificationQueue};
pub(crate) use spend_result::{Ask, LocalAnswer, LocalAsk, SpendResult, Verdict};
pub use table::KEYS_MAX;
pub(crate) use table::{
    Evictable, Found, KeyBudget, LimitCounts, OVERFLOW, Room, Table, TableBucket,
};
pub(crate) use token_word::MAX_TOKENS;
pub(crate) use window_bucket::WindowBucket;
