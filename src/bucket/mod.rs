//! The data plane: lock-free buckets in a sharded map, and the queue that tells the engine which
//! of them were touched.

pub(crate) mod dirty;
pub(crate) mod map;
pub(crate) mod state;
mod word;

#[cfg(feature = "sim")]
pub(crate) use dirty::DIRTY_MAX;
pub(crate) use dirty::DirtyQueue;
pub(crate) use map::{BucketMap, KeyBudget};
pub(crate) use state::{Bucket, Collected, Taken, Terms as LeaseTerms, Touch};
pub(crate) use word::FIELD_MAX;
