//! The bell that wakes the driver when a bucket runs low.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::Notify;

/// After so many ticks in which nobody rang, the next to ring wakes the driver himself.
const QUIET_TICKS: u32 = 100;

/// To wake the driver costs a system call, which may take longer than all else that a decision does. So
/// where buckets run low all the time, decisions leave it to the clock's thread, which looks once a
/// tick.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    driver: Notify,
    /// The clock's thread looks.
    minded: AtomicBool,
    /// The driver is to be woken at the next tick.
    rung: AtomicBool,
    /// Nobody has rung for a while.
    quiet: AtomicBool,
    /// Ticks in which nobody rang.
    silent: AtomicU32,
}

impl Bell {
    /// From now on somebody calls [`tick`](Self::tick) once in a millisecond or so.
    pub(crate) fn mind(&self) {
        self.quiet.store(true, Ordering::Relaxed);
        self.minded.store(true, Ordering::Relaxed);
    }

    /// Wakes the driver now or at the next tick. It sees what was queued before.
    pub(super) fn ring(&self) {
        let quiet = self.quiet.load(Ordering::Relaxed) && self.quiet.swap(false, Ordering::Relaxed);
        if quiet || !self.minded.load(Ordering::Relaxed) {
            self.driver.notify_one();
        } else {
            self.rung.swap(true, Ordering::AcqRel);
        }
    }

    /// Wakes the driver if anybody rang since the last tick.
    pub(crate) fn tick(&self) {
        if self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::AcqRel) {
            self.silent.store(0, Ordering::Relaxed);
            self.driver.notify_one();
        } else if self.silent.fetch_add(1, Ordering::Relaxed) >= QUIET_TICKS {
            self.silent.store(0, Ordering::Relaxed);
            self.quiet.store(true, Ordering::Relaxed);
        }
    }

    /// Waits until the driver is woken.
    pub(super) async fn heard(&self) {
        self.driver.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    fn is_heard(bell: &Bell) -> bool {
        pin!(bell.heard()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn who_rings_after_a_while_wakes_the_driver_and_others_leave_it_to_the_tick() {
        let bell = Bell::default();
        bell.ring();
        assert!(is_heard(&bell), "nobody else would wake it");
        bell.mind();
        bell.ring();
        assert!(is_heard(&bell), "it was quiet");
        for _ in 0..3 {
            (0..3).for_each(|_| bell.ring());
            assert!(!is_heard(&bell));
            bell.tick();
            assert!(is_heard(&bell));
            bell.tick();
            assert!(!is_heard(&bell), "nobody rang");
        }
        (0..=QUIET_TICKS).for_each(|_| bell.tick());
        bell.ring();
        assert!(is_heard(&bell), "it was quiet again");
    }
}
