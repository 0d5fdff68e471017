//! The data plane: lock-free buckets in a table that is read without locks, and the queue that
//! tells the engine which of them were touched.

mod bell;
mod desk;
pub(crate) mod dirty;
mod fields;
mod index;
pub(crate) mod key_hash;
mod key_text;
mod lease;
mod line;
mod outcome;

pub(crate) mod state;
pub(crate) mod table;
mod vacant;
mod word;

pub(crate) use bell::Bell;
pub(crate) use dirty::{DIRTY_MAX, DirtyQueue, Note};
pub(crate) use fields::BOUNDLESS_RATE;
pub(crate) use key_hash::{KeyHash, KeyHasher};
pub(crate) use line::{Bucket, LocalRefill, Start};
#[cfg(feature = "sim")]
pub(crate) use outcome::Touch;
pub(crate) use outcome::{Collected, Looked, SpendResult, Taken, Terms as LeaseTerms, Verdict};
pub use table::KEYS_MAX;
pub(crate) use table::{BucketRef, Found, Held, KeyBudget, LimitCounts, OVERFLOW, Table};
pub(crate) use word::FIELD_MAX;
