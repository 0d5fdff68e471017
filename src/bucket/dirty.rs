//! The dirty queue: buckets that decisions touched, on their way to the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use tokio::sync::Notify;

use super::state::{Bucket, Touch};

/// The most buckets that wait in the queue; beyond it the engine looks through the map once.
pub(crate) const DIRTY_MAX: usize = 65_536;

/// A bounded lock-free queue and the bell that wakes the driver. Pushing allocates nothing.
#[derive(Debug)]
pub(crate) struct DirtyQueue {
    queue: ArrayQueue<Arc<Bucket>>,
    /// Buckets were touched that did not fit; published by the push, read by the drain.
    overflowed: AtomicBool,
    urgent: Notify,
}

impl DirtyQueue {
    /// A queue for at most `keys_max` buckets, never more than [`DIRTY_MAX`].
    pub(crate) fn new(keys_max: usize) -> Self {
        Self {
            queue: ArrayQueue::new(keys_max.clamp(64, DIRTY_MAX)),
            overflowed: AtomicBool::new(false),
            urgent: Notify::new(),
        }
    }

    /// Tells the engine about a touched bucket.
    #[inline]
    pub(crate) fn push(&self, bucket: Arc<Bucket>, touch: Touch) {
        if self.queue.push(bucket).is_err() {
            self.overflowed.store(true, Ordering::Release);
        }
        if touch == Touch::Urgent {
            self.urgent.notify_one();
        }
    }

    /// The next touched bucket.
    pub(crate) fn pop(&self) -> Option<Arc<Bucket>> {
        self.queue.pop()
    }

    /// Whether buckets were touched that are not in the queue; says so once.
    pub(crate) fn take_overflowed(&self) -> bool {
        self.overflowed.swap(false, Ordering::AcqRel)
    }

    /// Waits until a bucket runs low.
    pub(crate) async fn urgent(&self) {
        self.urgent.notified().await;
    }
}
