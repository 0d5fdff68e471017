//! The atomics and the lock of the data plane. Models (`tests/models`) build it with those of loom, which tries the
//! orders in which threads can run, and the values that a load may see.

#[cfg(not(tidegate_models))]
pub(super) use std::hint::spin_loop;
#[cfg(not(tidegate_models))]
pub(super) use std::sync::atomic::{
    AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(tidegate_models))]
pub(super) use std::sync::{Mutex, MutexGuard};

#[cfg(tidegate_models)]
pub(super) use super::models::atomic::*;

/// So many zeros, which the system provides page by page as they are written to. `None` if the memory cannot be had.
#[cfg(not(tidegate_models))]
pub(super) fn zeros<T: bytemuck::Zeroable>(length: usize) -> Option<Box<[T]>> {
    bytemuck::try_zeroed_slice_box(length).ok()
}
