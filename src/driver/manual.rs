//! A clock that tests drive.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::time::{Clock, Timestamp};

/// A clock that stands still until a test moves it.
///
/// Cheap to clone; all clones are one clock. It begins at one second, so that nothing of a
/// limiter's life happens at the origin.
#[derive(Clone, Debug)]
pub struct ManualClock {
    pub(super) clock: Clock,
    moved: Arc<Notify>,
}

impl Default for ManualClock {
    fn default() -> Self {
        let clock = Clock::new();
        clock.set(Timestamp::from_micros(1_000_000));
        Self { clock, moved: Arc::new(Notify::new()) }
    }
}

impl ManualClock {
    /// A clock at one second after its origin.
    pub fn new() -> Self {
        Self::default()
    }

    /// The time it shows.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Moves it forward. Limiters act on it when their tasks run next: await
    /// [`Limiter::settle`](crate::Limiter::settle) to let them.
    pub fn advance(&self, by: Duration) {
        self.clock.set(self.now().plus_micros(crate::time::micros(by)));
        self.moved.notify_waiters();
    }

    /// The clock itself, for those who only read it.
    #[cfg(feature = "redis")]
    pub(crate) fn shown(&self) -> Clock {
        self.clock.clone()
    }

    pub(super) async fn reached(&self, deadline: Timestamp) {
        loop {
            let moved = self.moved.notified();
            if self.now() >= deadline {
                return;
            }
            moved.await;
        }
    }
}
