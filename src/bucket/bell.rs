//! The bell that wakes the driver when a bucket runs low.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::Notify;

/// For every so many ticks on end in which nobody rang, one decision may wake the driver itself.
const QUIET_TICKS: u32 = 4;

/// So many decisions may do so in a row.
const DIRECT_MAX: u32 = 8;

/// To wake the driver costs a system call, which may take longer than all else that a decision does. So
/// where buckets run low all the time, decisions leave it to the clock's thread, which looks once a
/// tick. Where they seldom do, the next request may want the answer before the tick: the driver is
/// woken at once.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    driver: Notify,
    /// The clock's thread looks.
    minded: AtomicBool,
    /// The driver is to be woken at the next tick.
    rung: AtomicBool,
    /// How many decisions may yet wake the driver themselves.
    direct: AtomicU32,
    /// Ticks on end in which nobody rang.
    silent: AtomicU32,
}

impl Bell {
    /// From now on somebody calls [`tick`](Self::tick) once in a millisecond or so.
    pub(crate) fn mind(&self) {
        self.direct.store(DIRECT_MAX, Ordering::Relaxed);
        self.minded.store(true, Ordering::Relaxed);
    }

    /// Wakes the driver now or at the next tick. It sees what was queued before.
    pub(super) fn ring(&self) {
        if !self.minded.load(Ordering::Relaxed) || self.take_direct() {
            self.silent.store(0, Ordering::Relaxed);
            self.driver.notify_one();
        } else {
            self.rung.swap(true, Ordering::AcqRel);
        }
    }

    fn take_direct(&self) -> bool {
        let less_one = |left: u32| left.checked_sub(1);
        self.direct.load(Ordering::Relaxed) > 0
            && self.direct.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less_one).is_ok()
    }

    /// Wakes the driver if anybody left it to this tick.
    pub(crate) fn tick(&self) {
        if self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::AcqRel) {
            self.silent.store(0, Ordering::Relaxed);
            self.driver.notify_one();
        } else if self.silent.fetch_add(1, Ordering::Relaxed) + 1 >= QUIET_TICKS {
            self.silent.store(0, Ordering::Relaxed);
            let one_more = |left: u32| (left < DIRECT_MAX).then_some(left + 1);
            let _ = self.direct.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
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
    fn a_few_wake_the_driver_after_a_while_and_the_rest_leave_it_to_the_tick() {
        let bell = Bell::default();
        bell.ring();
        assert!(is_heard(&bell), "nobody else would wake it");
        bell.mind();
        let wakes_at_once = |bell: &Bell| {
            bell.ring();
            is_heard(bell)
        };
        assert!((0..DIRECT_MAX).all(|_| wakes_at_once(&bell)));
        for _ in 0..3 {
            assert!((0..3).all(|_| !wakes_at_once(&bell)));
            bell.tick();
            assert!(is_heard(&bell));
            (1..QUIET_TICKS).for_each(|_| bell.tick());
            assert!(!is_heard(&bell), "nobody rang");
        }
        bell.tick();
        assert!(wakes_at_once(&bell), "it was quiet for long enough");
        assert!(!wakes_at_once(&bell), "once");
        (0..2 * DIRECT_MAX * QUIET_TICKS).for_each(|_| bell.tick());
        is_heard(&bell);
        let at_once = (0..3 * DIRECT_MAX).filter(|_| wakes_at_once(&bell)).count();
        assert_eq!(at_once, DIRECT_MAX as usize, "however long it was quiet");
    }
}
