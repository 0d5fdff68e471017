//! Models of what threads do at one time to the data plane, for loom. `tests/models` runs them, and breaks the code on
//! purpose to see each of them fail.
//!
//! A model runs two or three threads in every order with at most [`PREEMPTIONS`] preemptions in all, and lets loads see
//! every value that the orderings allow. loom takes `SeqCst` for `AcqRel`, and runs each thread's operations in the order
//! of the program.

use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicUsize as StdAtomicUsize, Ordering as StdOrdering};
use std::time::Instant;

use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;

pub(super) mod atomic;
mod lease_bucket;
mod local_bucket;
mod table;
mod window_bucket;

/// The most preemptions in one execution, unless `TIDEGATE_PREEMPTIONS` says otherwise.
const PREEMPTIONS: usize = 2;

/// Runs all executions of a model, and tells how many there were.
fn check(name: &str, model: impl Fn() + Send + Sync + 'static) {
    let (begin, executions) = (Instant::now(), StdArc::new(StdAtomicUsize::new(0)));
    let mut builder = Builder::new();
    let preemptions = std::env::var("TIDEGATE_PREEMPTIONS").map_or(PREEMPTIONS, |preemptions| {
        preemptions.parse().expect("TIDEGATE_PREEMPTIONS: a number of preemptions")
    });
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    let counted = executions.clone();
    builder.check(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        model();
    });
    let (executions, seconds) = (executions.load(StdOrdering::Relaxed), begin.elapsed());
    println!(
        "model {name}: {executions} executions, at most {preemptions} preemptions, {seconds:.1?}"
    );
}

/// Runs `act` on a thread of the model.
fn run<B, T: 'static>(shared: &Arc<B>, act: impl FnOnce(&B) -> T + 'static) -> thread::JoinHandle<T>
where
    B: Send + Sync + 'static,
{
    let shared = shared.clone();
    thread::spawn(move || act(&shared))
}
