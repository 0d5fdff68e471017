//! The callers who wait: their number for each limit, and the line of each key, of which the first asks until there is enough.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use tokio::sync::{Mutex, MutexGuard};

use super::super::overrides::LookedUp;
use super::super::{ActiveLimit, Target};
use crate::decision::{Decision, RETRY_MIN_US};
use crate::limit::LimitInfo;
use crate::time::micros;

/// How often a caller in line looks whether something else holds for the key by now.
const LOOK_EVERY_US: u64 = 1_000_000;

/// The callers of one limit who wait.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    count: AtomicU32,
    /// One line for each key, in which one caller after the other asks for its tokens.
    pub(super) lines: DashMap<Box<[u8]>, Arc<Mutex<()>>>,
}

/// One of the limit's places for callers who wait, until it is dropped.
pub(super) struct WaitingPlace<'a>(&'a Waiting);

impl Waiting {
    /// `None` if `most` callers wait already.
    pub(super) fn enter(&self, most: u32) -> Option<WaitingPlace<'_>> {
        let one_more = |count: u32| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(WaitingPlace(self))
    }
}

impl Drop for WaitingPlace<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller in the line of a key. The last one who leaves takes the line away.
pub(in crate::limiter) struct LineEntry<'a> {
    waiting: &'a Waiting,
    key: &'a [u8],
    /// `None` only while it is dropped.
    line: Option<Arc<Mutex<()>>>,
}

impl<'a> LineEntry<'a> {
    pub(in crate::limiter) fn new(waiting: &'a Waiting, key: &'a [u8]) -> Self {
        let line = waiting.lines.entry(key.into()).or_default().clone();
        Self { waiting, key, line: Some(line) }
    }
}

impl LineEntry<'_> {
    /// Waits until all who came before have left.
    pub(in crate::limiter) async fn lock(&self) -> Option<MutexGuard<'_, ()>> {
        Some(self.line.as_ref()?.lock().await)
    }
}

impl Drop for LineEntry<'_> {
    fn drop(&mut self) {
        // First, so that of two who leave together one finds that only the map has the line. Nobody gets another one while
        // the entry is locked.
        drop(self.line.take());
        self.waiting.lines.remove_if(self.key, |_, line| Arc::strong_count(line) == 1);
    }
}

impl ActiveLimit {
    /// Asks again whenever there may be enough, once those have gone on who came before, or when something else holds for the
    /// key.
    pub(super) async fn wait_in_line(
        &self,
        asked: LookedUp<'_>,
        cost: u32,
        within: Duration,
    ) -> Decision {
        let target = Target::key(asked.name);
        let deadline = self.now().plus_micros(micros(within));
        let entry = LineEntry::new(self.waiting(), asked.name);
        let _first = tokio::select! {
            biased;
            first = entry.lock() => first,
            _ = self.sleep(within) => {
                let limit = self.planned(asked);
                let look = match limit.decide_without_lease(asked.name, 0).await {
                    Some(look) => look,
                    None => limit.decide(target, 0),
                };
                return look.denied_behind_others(cost);
            }
        };
        let mut pause_us = 0;
        loop {
            // Something else may hold since the caller came.
            if let Some(decision) = self.overridden(asked, cost) {
                return decision;
            }
            let limit = self.planned(asked);
            let decision = limit.decide_or_ask(target, cost).await;
            let left_us = deadline.micros_since(self.now());
            let retry_us = micros(decision.retry_after());
            // Where it is known when the next token comes, that is when to ask.
            let is_known = decision.is_sure() || retry_us > RETRY_MIN_US;
            pause_us = if is_known { 0 } else { self.longer_pause_us(pause_us) };
            let is_over = decision.is_allowed() || retry_us > left_us || self.is_shadow();
            let wait_us = retry_us.max(pause_us.min(left_us));
            if is_over || !self.sleep_in_line(asked, (cost, limit.info), wait_us).await {
                return decision;
            }
        }
    }

    /// The least wait after another answer that is not sure and does not say how long to wait. An outage or a slow store causes those,
    /// and asking sooner would not help.
    fn longer_pause_us(&self, pause_us: u64) -> u64 {
        let (tick_us, max_wait_us) = (self.state.terms.tick_us, self.state.terms.max_wait_us);
        (2 * pause_us).clamp(max_wait_us, tick_us.max(max_wait_us)).max(RETRY_MIN_US)
    }

    /// Sleeps until `wait_us` is over, or until a look each second shows a change for the key. False if the driver has ended.
    async fn sleep_in_line(
        &self,
        asked: LookedUp<'_>,
        (cost, info): (u32, &'static LimitInfo),
        wait_us: u64,
    ) -> bool {
        let until = self.now().plus_micros(wait_us);
        loop {
            let left_us = until.micros_since(self.now());
            if left_us == 0 {
                return true;
            }
            if !self.sleep(Duration::from_micros(left_us.min(LOOK_EVERY_US))).await {
                return false;
            }
            let limit = self.planned(asked);
            // An update or another plan gives the key another `LimitInfo`.
            let is_other = !std::ptr::eq(limit.info, info) || self.is_shadow();
            if is_other || self.overridden(asked, 0).is_some() || limit.may_have(asked.name, cost) {
                return true;
            }
        }
    }

    /// Whether this node knows that the key has `cost` tokens.
    fn may_have(&self, key: &[u8], cost: u32) -> bool {
        if self.is_decided_by_store() {
            return false;
        }
        let look = self.decide(Target::key(key), 0);
        look.is_allowed() && look.remaining() >= cost.into()
    }
}
