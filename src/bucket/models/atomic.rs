//! loom's atomics, with every operation in two steps: one by which loom sees that the order of two threads matters, and
//! the operation itself.
//!
//! loom remembers one access to each atomic. Where a thread loads what another one has loaded, and then stores it, loom
//! forgets the first load and skips the executions in which that load comes last (its issues 166 and 392). The first
//! step is a change of a second atomic, which loom takes for a store, and so forgets nothing.

use std::fmt;

pub(in crate::bucket) use loom::hint::spin_loop;
use loom::sync::atomic as loom_atomic;
pub(in crate::bucket) use loom::sync::{Mutex, MutexGuard};
pub(in crate::bucket) use loom_atomic::{Ordering, fence};

/// An atomic of the type `$value`.
macro_rules! atomic {
    ($name:ident, $value:ty) => {
        #[derive(Default)]
        pub(crate) struct $name {
            value: loom_atomic::$name,
            order: loom_atomic::AtomicUsize,
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        }

        #[allow(dead_code, reason = "not all are used of each")]
        impl $name {
            pub(in crate::bucket) fn new(value: $value) -> Self {
                Self { value: loom_atomic::$name::new(value), order: Default::default() }
            }

            fn ordered(&self) -> &loom_atomic::$name {
                self.order.fetch_add(0, Ordering::Relaxed);
                &self.value
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.ordered().load(order)
            }

            pub(in crate::bucket) fn store(&self, value: $value, order: Ordering) {
                self.ordered().store(value, order);
            }

            pub(in crate::bucket) fn swap(&self, value: $value, order: Ordering) -> $value {
                self.ordered().swap(value, order)
            }

            pub(in crate::bucket) fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_add(value, order)
            }

            pub(in crate::bucket) fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_sub(value, order)
            }

            pub(in crate::bucket) fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_and(value, order)
            }

            pub(in crate::bucket) fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_or(value, order)
            }

            pub(in crate::bucket) fn fetch_min(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_min(value, order)
            }

            pub(in crate::bucket) fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                self.ordered().fetch_max(value, order)
            }

            pub(in crate::bucket) fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.ordered().compare_exchange(from, to, success, failure)
            }

            /// Never fails for no reason.
            pub(in crate::bucket) fn compare_exchange_weak(
                &self,
                from: $value,
                to: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(from, to, success, failure)
            }

            pub(in crate::bucket) fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                mut change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut before = self.load(failure);
                while let Some(after) = change(before) {
                    match self.compare_exchange(before, after, success, failure) {
                        Ok(before) => return Ok(before),
                        Err(found) => before = found,
                    }
                }
                Err(before)
            }
        }
    };
}

atomic!(AtomicI32, i32);
atomic!(AtomicU8, u8);
atomic!(AtomicU16, u16);
atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);

/// So many zeros.
pub(in crate::bucket) fn zeros<T: Default>(length: usize) -> Option<Box<[T]>> {
    Some((0..length).map(|_| T::default()).collect())
}
