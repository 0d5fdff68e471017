//! How decisions notify the engine.

use crossbeam_queue::{ArrayQueue, SegQueue};
use tokio::sync::Notify;

use crate::time::Timestamp;

/// The most notifications that wait without an allocation.
pub(crate) const MAX_QUEUED: usize = 65_536;

/// What a decision has to tell the engine beside what the bucket holds.
///
/// The engine reads the key from the bucket. If the bucket has been given to another key meanwhile, the engine
/// looks at that key once too often, and nothing else happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notification {
    /// The limit's number.
    pub(crate) limit: u32,
    /// The bucket's place in the limit's table.
    pub(crate) place: u32,
    /// When the decision was taken, by the cached clock. The engine may be notified much later.
    pub(crate) at: Timestamp,
    pub(crate) news: News,
}

/// What the engine has to know of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) urgency: Urgency,
    /// The engine has no account of the key, as far as the decision knew.
    pub(crate) is_new: bool,
    /// Pending tokens that no longer fitted the bucket's word.
    pub(crate) spilled: u32,
    /// What a denied request cost, if that was more than one token.
    pub(crate) refused: u32,
}

/// When the engine should look at a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// It knows already.
    #[default]
    None,
    /// At the next tick: something is pending.
    Tick,
    /// At once: tokens run low, or a request was denied.
    Now,
}

impl News {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A lock-free queue of notifications. Nothing that counts tokens is ever dropped.
#[derive(Debug)]
pub(crate) struct NotificationQueue {
    queue: ArrayQueue<Notification>,
    unbounded: SegQueue<Notification>,
    driver: Notify,
}

impl NotificationQueue {
    /// A queue for about `max_keys` buckets, never more than [`MAX_QUEUED`] without allocating.
    pub(crate) fn new(max_keys: usize) -> Self {
        Self {
            queue: ArrayQueue::new(max_keys.clamp(64, MAX_QUEUED)),
            unbounded: SegQueue::new(),
            driver: Notify::new(),
        }
    }

    /// Queues a notification, and wakes the driver if it is urgent.
    pub(crate) fn push(&self, notification: Notification) {
        let News { urgency, spilled, .. } = notification.news;
        let counts = urgency != Urgency::None || spilled > 0;
        if let Err(notification) = self.queue.push(notification) {
            // Each bucket is queued at most twice until the engine has looked at it, so there are at most
            // about as many of these as keys. Large denials are only a hint.
            if counts {
                self.unbounded.push(notification);
            }
        }
        if urgency == Urgency::Now || spilled > 0 {
            self.driver.notify_one();
        }
    }

    pub(crate) fn pop(&self) -> Option<Notification> {
        self.queue.pop().or_else(|| self.unbounded.pop())
    }

    /// Waits until something urgent has been pushed.
    pub(crate) async fn woken(&self) {
        self.driver.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn full_queue_drops_large_denials_and_nothing_else() {
        let queue = NotificationQueue::new(0);
        let push =
            |place, news| queue.push(Notification { limit: 0, place, at: Timestamp::ZERO, news });
        for place in 0..100 {
            push(place, News { urgency: Urgency::Tick, ..News::default() });
        }
        push(100, News { refused: 5, ..News::default() });
        push(101, News { spilled: 5, ..News::default() });
        let mut places: Vec<u32> =
            std::iter::from_fn(|| queue.pop()).map(|one| one.place).collect();
        places.sort_unstable();
        let expected: Vec<u32> = (0..100).chain([101]).collect();
        assert_eq!(places, expected);
    }

    #[test]
    fn driver_is_woken_by_what_is_urgent_and_by_nothing_else() {
        let queue = NotificationQueue::new(0);
        let is_woken_by = |news| {
            queue.push(Notification { limit: 0, place: 0, at: Timestamp::ZERO, news });
            let mut woken = std::pin::pin!(queue.woken());
            woken.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        let of = |urgency, spilled| News { urgency, spilled, ..News::default() };
        assert!(!is_woken_by(of(Urgency::None, 0)));
        assert!(!is_woken_by(of(Urgency::Tick, 0)));
        assert!(is_woken_by(of(Urgency::Now, 0)));
        assert!(is_woken_by(of(Urgency::None, 1)));
        assert!(is_woken_by(of(Urgency::Tick, 1)));
        assert!(!is_woken_by(News { refused: 5, is_new: true, ..News::default() }));
    }

    #[test]
    fn news_are_none_only_if_there_is_nothing_to_know() {
        assert!(News::default().is_none());
        for some in [
            News { urgency: Urgency::Tick, ..News::default() },
            News { is_new: true, ..News::default() },
            News { spilled: 1, ..News::default() },
            News { refused: 2, ..News::default() },
        ] {
            assert!(!some.is_none(), "{some:?}");
        }
    }
}
