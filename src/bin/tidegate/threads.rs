//! Much independent work on a few threads.
//!
//! The work comes with its longest pieces first, and each thread takes the next one. rayon halves a
//! list and hands out the halves, so that the longest pieces end up on one thread.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Does all of `work` on `threads` threads, each of which takes the next piece when it has ended
/// one. The results come in the order of the work.
pub(crate) fn on_threads<W: Sync, R: Send>(
    work: &[W],
    threads: usize,
    one: impl Fn(&W) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let take = || {
            let index = next.fetch_add(1, Ordering::Relaxed);
            work.get(index).map(|piece| (index, one(piece)))
        };
        std::iter::from_fn(take).collect::<Vec<(usize, R)>>()
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<(usize, R)>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().flat_map(join).collect()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_done_once_and_in_order_on_any_number_of_threads() {
        let work: Vec<u32> = (0..100).collect();
        for threads in [0, 1, 3] {
            assert_eq!(on_threads(&work, threads, |&piece| piece), work, "{threads} threads");
        }
    }
}
