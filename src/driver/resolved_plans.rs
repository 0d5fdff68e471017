//! The plans of a limit's keys as its resolver named them, for decisions to look at.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dashmap::{DashMap, Entry};
use tokio::sync::{Notify, mpsc};

use super::definition::Definition;
use crate::limit::LimitInfo;
use crate::time::Timestamp;

/// A sweep locks one at a time, so that a decision waits for it for a thousandth of it at most.
const SHARDS: usize = 1024;

/// Which plans the keys of a limit have, as far as that is known. Any number of threads read and ask, and one task answers.
pub(crate) struct ResolvedPlans {
    /// By what the limiter knows the keys by.
    keys: DashMap<Box<[u8]>, ResolvedPlan>,
    /// How many there are. Publishes nothing.
    count: AtomicUsize,
    max_keys: usize,
    asks: mpsc::Sender<PlanAsk>,
    counts: [AtomicU64; 4],
    /// For tests, which wait for answers.
    answered: Notify,
}

/// What is known of a key.
struct ResolvedPlan {
    /// Its name; `None` is the default plan. The limit may not have it, or not any more.
    name: Option<Box<str>>,
    /// When it is to be asked for; never while it is.
    due: Timestamp,
}

/// A key whose plan is asked for.
pub(super) struct PlanAsk {
    /// What the limiter knows it by.
    pub(super) name: Box<[u8]>,
    /// Its bytes before they were hashed.
    pub(super) plain: Vec<u8>,
}

/// What is counted, in this order.
#[derive(Clone, Copy)]
pub(super) enum Outcome {
    /// Answers that name a plan that there is.
    Resolved,
    /// Answers that name another.
    Unknown,
    /// Calls without an answer.
    Failed,
    /// Look-ups of keys that could not be asked for.
    NotAsked,
}

impl ResolvedPlans {
    /// Of no keys yet, and of `max_keys` at most. Those that are to be resolved are sent to `asks`.
    pub(super) fn new(asks: mpsc::Sender<PlanAsk>, max_keys: usize) -> Self {
        Self {
            keys: DashMap::with_shard_amount(SHARDS),
            count: AtomicUsize::new(0),
            max_keys,
            asks,
            counts: Default::default(),
            answered: Notify::new(),
        }
    }

    /// The plan that a key has by `definition`, as far as it is known; `None` is the default plan. Never waits: a key that is to
    /// be asked for has what was known last.
    pub(crate) fn find(
        &self,
        (name, plain): (&[u8], &[u8]),
        now: Timestamp,
        definition: &Definition,
    ) -> Option<&'static LimitInfo> {
        let of_key = self.keys.get(name).map(|known| {
            let plan = known.name.as_deref().and_then(|name| definition.plan(name));
            (plan, known.due)
        });
        let (plan, due) = of_key.unwrap_or((None, Timestamp::ZERO));
        if now >= due {
            self.ask(name, plain, now);
        }
        plan
    }

    #[cold]
    fn ask(&self, name: &[u8], plain: &[u8], now: Timestamp) {
        let Ok(place) = self.asks.try_reserve() else { return self.count(Outcome::NotAsked) };
        match self.keys.entry(name.into()) {
            // Another thread has asked meanwhile.
            Entry::Occupied(known) if now < known.get().due => return,
            Entry::Occupied(mut known) => known.get_mut().due = Timestamp::NEVER,
            Entry::Vacant(_) if !self.take_room() => return self.count(Outcome::NotAsked),
            Entry::Vacant(new) => {
                new.insert(ResolvedPlan { name: None, due: Timestamp::NEVER });
            }
        }
        place.send(PlanAsk { name: name.into(), plain: plain.to_vec() });
    }

    /// Whether there is room for one more key, which is taken.
    fn take_room(&self) -> bool {
        let one_more = |count: usize| (count < self.max_keys).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// The resolver has named a key's plan, which is not asked for again before `due`.
    pub(super) fn answered(&self, key: &[u8], plan: Option<String>, due: Timestamp) {
        if let Some(mut known) = self.keys.get_mut(key) {
            *known = ResolvedPlan { name: plan.map(String::into_boxed_str), due };
        }
        self.answered.notify_waiters();
    }

    /// The resolver has not: what was known last holds, and the key is not asked for again before `due`.
    pub(super) fn failed(&self, key: &[u8], due: Timestamp) {
        if let Some(mut known) = self.keys.get_mut(key) {
            known.due = due;
        }
        self.answered.notify_waiters();
    }

    /// Waits until no key is asked for, or nobody answers any more.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) async fn settled(&self) {
        loop {
            let answered = self.answered.notified();
            let is_asked = self.keys.iter().any(|known| known.due == Timestamp::NEVER);
            if !is_asked || self.asks.is_closed() {
                return;
            }
            answered.await;
        }
    }

    /// Counts one more.
    pub(super) fn count(&self, outcome: Outcome) {
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted since the last time.
    pub(super) fn take_counts(&self) -> [u64; 4] {
        self.counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed))
    }

    pub(super) fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.max_keys
    }

    /// Forgets keys that were not asked about since they came to be due.
    pub(super) fn sweep(&self, now: Timestamp) {
        self.keys.retain(|_, known| {
            let stays = now < known.due;
            if !stays {
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
            stays
        });
    }
}
