//! Nodes that share limits in virtual time.

use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{AsyncLimit, Builder, Limit, Limiter};
use tokio::runtime::Runtime;

/// How far time goes on while somebody waits.
const WAITING_STEP: Duration = Duration::from_micros(20);

pub(crate) struct VirtualNodes {
    pub(crate) clock: ManualClock,
    #[allow(dead_code, reason = "not all tests break the store")]
    pub(crate) store: ScriptedStore,
    pub(crate) runtime: Runtime,
    pub(crate) nodes: Vec<Limiter>,
}

impl VirtualNodes {
    /// So many nodes with these limits, two seconds after they began. `build` says what else each has.
    pub(crate) fn new(count: usize, limits: &[Limit], build: impl Fn(Builder) -> Builder) -> Self {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let entered = runtime.enter();
        let node = |_| {
            let builder = Limiter::builder().store(store.clone()).lanes(1).clock(&clock);
            limits.iter().cloned().fold(build(builder), Builder::limit).build().unwrap()
        };
        let nodes = (0..count).map(node).collect();
        drop(entered);
        let all = Self { clock, store, runtime, nodes };
        all.pass(Duration::from_secs(2), Duration::from_millis(10));
        all
    }

    pub(crate) fn settle(&self) {
        for node in &self.nodes {
            self.runtime.block_on(node.settle());
        }
    }

    pub(crate) fn pass(&self, time: Duration, step: Duration) {
        for _ in 0..time.div_duration_f64(step).round() as u64 {
            self.clock.advance(step);
            self.settle();
        }
    }

    /// Waits for an answer, and lets time pass a little at a time.
    pub(crate) fn wait<T>(&self, answer: impl Future<Output = T>) -> T {
        self.wait_by(WAITING_STEP, answer)
    }

    pub(crate) fn wait_by<T>(&self, step: Duration, answer: impl Future<Output = T>) -> T {
        self.runtime.block_on(async {
            let mut answer = std::pin::pin!(answer);
            loop {
                let settled = async {
                    for node in &self.nodes {
                        node.settle().await;
                    }
                };
                tokio::select! {
                    biased;
                    answer = &mut answer => return answer,
                    () = settled => self.clock.advance(step),
                }
            }
        })
    }

    /// Spends what `key` has of a limit, and says how much that was.
    #[allow(dead_code, reason = "not all tests drain a key")]
    pub(crate) fn drain(&self, limit: &AsyncLimit) -> u32 {
        let mut drained = 0;
        // A node that has a lease does not ask for the last tokens, and gives the lease back after a while.
        for _ in 0..3 {
            while self.wait(limit.check_sure("key")).is_allowed() {
                drained += 1;
            }
            self.pass(Duration::from_secs(60), Duration::from_millis(100));
        }
        drained
    }
}
