//! tidegate with a store, and its driver at work; and without one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{
    ActiveLimit, Builder, Event, Handle, Limit, Limiter, MemoryStore, Quota, RedisStore,
};

use super::{Contender, count, strays};
use crate::case::{Asks, By, Case, Keys};
use crate::server::Server;

struct Tidegate {
    name: &'static str,
    limit: ActiveLimit,
    handles: Vec<Handle>,
    /// Batches that the store took; `None` without a store.
    syncs: Option<Arc<AtomicU64>>,
    denied: bool,
    asks: Asks,
    _limiter: Limiter,
}

pub fn alone(case: &Case) -> Box<dyn Contender> {
    // Of a table that is nearly full, keys are forgotten that are full, as all of them are here.
    let builder = Limiter::builder().max_keys((case.keys + case.keys / 4).max(1000));
    Box::new(Tidegate::new("tidegate alone", case, builder, None))
}

pub fn in_memory(case: &Case) -> Box<dyn Contender> {
    Box::new(hybrid(case, Limiter::builder().store(MemoryStore::new())))
}

pub fn over_redis(case: &Case, server: &Server) -> Box<dyn Contender> {
    let store = RedisStore::open(&server.address()).expect("a good address");
    let store = store.namespace(&server.fresh_name()).expect("a good namespace");
    Box::new(hybrid(case, Limiter::builder().store(store)))
}

fn hybrid(case: &Case, builder: Builder) -> Tidegate {
    let syncs = Arc::new(AtomicU64::new(0));
    let counter = syncs.clone();
    let builder = builder.max_keys(case.keys.max(1000)).listen(move |event| {
        if let Event::Synced { error: None, .. } = event {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    Tidegate::new("tidegate", case, builder, Some(syncs))
}

impl Tidegate {
    fn new(
        name: &'static str,
        case: &Case,
        builder: Builder,
        syncs: Option<Arc<AtomicU64>>,
    ) -> Self {
        let quota = match (case.denied, case.keys) {
            _ if case.asks == Asks::OneOfFew => Quota::per_second(100),
            (true, _) => Quota::per_hour(1).burst(100),
            (false, 0..=10_000) => Quota::per_second(1_000_000_000),
            (false, _) => Quota::per_second(10_000_000).burst(1_000_000_000),
        };
        // With so many keys more syncs than that are not what a node is asked for.
        let interval = Duration::from_millis(if case.keys > 10_000 { 5000 } else { 50 });
        let limit = Limit::new("bench", quota);
        let limit = match case.asks {
            // As they are if nobody says otherwise.
            Asks::OneOfFew | Asks::OneOfNewKeys => limit,
            _ => limit.sync_interval(interval),
        };
        let limiter = builder.limit(limit).build().expect("a good limit");
        // A new lane gives nothing for five intervals: it may have been there before.
        let runtime = tokio::runtime::Runtime::new().expect("there is memory for a runtime");
        runtime.block_on(limiter.ready(Duration::from_secs(60))).expect("the store gives");
        let limit = limiter.limit("bench").expect("it was built with it");
        let handles = match case.by {
            By::Handle => (0..case.keys as u32).map(|key| limit.handle(&case.key(key))).collect(),
            By::Key => Vec::new(),
        };
        Self {
            name,
            limit,
            handles,
            syncs,
            denied: case.denied,
            asks: case.asks,
            _limiter: limiter,
        }
    }
}

impl Contender for Tidegate {
    fn name(&self) -> &'static str {
        self.name
    }

    fn returns_within(&self, keys: usize) -> Duration {
        let gives_back = self.syncs.is_some() && self.asks != Asks::OneOfNewKeys;
        if gives_back && keys > 10_000 { Duration::from_secs(2) } else { Duration::ZERO }
    }

    fn decide(&self, keys: &Keys, part: Range<usize>, isolated: bool) -> u64 {
        if self.handles.is_empty() {
            let (limit, names) = (&self.limit, &keys.names[part]);
            return match self.asks {
                Asks::One | Asks::OneOfFew | Asks::OneOfNewKeys => {
                    count(names, isolated, |name| limit.check(name).is_denied())
                }
                Asks::Three => count(names, isolated, |name| {
                    limit.check_n(name, 3).is_ok_and(|decision| decision.is_denied())
                }),
                Asks::OneAndReads => count(names, isolated, |name| {
                    let decision = limit.check(name);
                    decision.is_denied() || decision.remaining() == u64::MAX
                }),
            };
        }
        match &self.handles[..] {
            [one] => count(&keys.stream[part], isolated, |_| one.check().is_denied()),
            handles => count(&keys.stream[part], isolated, |key| {
                handles[*key as usize].check().is_denied()
            }),
        }
    }

    fn wrong(&self, keys: &Keys) -> u64 {
        let strays = strays(self, keys, self.denied);
        std::thread::sleep(Duration::from_millis(20));
        strays
    }

    fn check(&self, _keys: &Keys) {
        let synced = |syncs: &Arc<AtomicU64>| syncs.load(Ordering::Relaxed) > 0;
        assert!(self.syncs.as_ref().is_none_or(synced), "nothing was synced meanwhile");
    }
}
