//! The keys of a leaky bucket that nodes share.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::oneshot;

use super::exact::ExactAnswer;
use crate::algorithm::{Standing, Turn, TurnRule};
use crate::sync::{HeldSlots, SlotAsk, SlotGrant};
use crate::time::Timestamp;

/// Keys are looked through for idle ones when there are so many, or twice as many as were left the last time.
const SWEEP_LEAST: usize = 1024;
/// While there is no room they are looked through no more often.
const SWEEP_PAUSE_US: u64 = 1_000_000;

/// Where the store's answer comes.
pub(crate) type AskedStore = oneshot::Receiver<ExactAnswer>;

/// One key.
#[derive(Debug, Default)]
pub(crate) struct SlotKey {
    pub(crate) held: HeldSlots,
    /// What the store was asked for, and where it answers.
    pub(crate) asked: Option<(SlotAsk, AskedStore)>,
    /// Nothing is asked that nobody waits for before: after a failure, or after a question that takes nothing.
    pub(crate) ask_from: Timestamp,
    /// Tokens that callers wait for, one of whom asks for all.
    pub(crate) waited_for: u32,
}

impl SlotKey {
    /// Takes in the store's answer, if there is one. After a failure the store is left alone for `pause_us`.
    pub(crate) fn collect(&mut self, rule: &TurnRule, now: Timestamp, pause_us: u64) {
        let Some((asked, answer)) = &mut self.asked else { return };
        match answer.try_recv() {
            Ok(answer) => {
                if let Some(grant) = grant_of(&answer) {
                    self.held.install(rule, *asked, grant);
                }
            }
            Err(oneshot::error::TryRecvError::Empty) => return,
            Err(oneshot::error::TryRecvError::Closed) => {
                self.ask_from = now.plus_micros(pause_us);
            }
        }
        self.asked = None;
    }
}

/// What an answer says of a key's slots. The store has decided half way between question and answer.
pub(crate) fn grant_of(answer: &ExactAnswer) -> Option<SlotGrant> {
    let Standing::Turn(_, Turn { ahead, .. }) = answer.reply.standing else { return None };
    let round_trip_us = answer.answered.micros_since(answer.asked);
    let at = answer.asked.plus_micros(round_trip_us / 2);
    Some(SlotGrant { is_allowed: answer.reply.is_allowed, at, ahead, round_trip_us })
}

/// The keys that are not idle.
pub(crate) struct SlotKeys {
    pub(crate) rule: &'static TurnRule,
    keys: DashMap<Box<[u8]>, SlotKey>,
    most: usize,
    sweep_at: AtomicUsize,
    /// When they were looked through last.
    swept_us: AtomicU64,
}

/// Keys may be secret.
impl fmt::Debug for SlotKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotKeys").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl SlotKeys {
    pub(super) fn new(rule: &'static TurnRule, most: usize) -> Self {
        let sweep_at = AtomicUsize::new(SWEEP_LEAST.min(most));
        Self { rule, keys: DashMap::new(), most, sweep_at, swept_us: AtomicU64::new(0) }
    }

    /// Does something with a key, which is added if it is new. `None` if there is no room.
    ///
    /// Cost: a short lock of one part of the map. One new key in as many as there are has all keys looked through.
    pub(crate) fn with<T>(
        &self,
        key: &[u8],
        now: Timestamp,
        does: impl FnOnce(&mut SlotKey) -> T,
    ) -> Option<T> {
        if let Some(mut found) = self.keys.get_mut(key) {
            return Some(does(&mut found));
        }
        if self.keys.len() >= self.sweep_at.load(Ordering::Relaxed) {
            self.sweep(now);
        }
        if self.keys.len() >= self.most {
            return None;
        }
        match self.keys.entry(key.into()) {
            Entry::Occupied(mut found) => Some(does(found.get_mut())),
            Entry::Vacant(new) => Some(does(&mut new.insert(SlotKey::default()))),
        }
    }

    /// Drops idle keys.
    fn sweep(&self, now: Timestamp) {
        let swept_us = self.swept_us.load(Ordering::Relaxed);
        let is_full = self.sweep_at.load(Ordering::Relaxed) >= self.most;
        if is_full && now.as_micros() < swept_us + SWEEP_PAUSE_US {
            return;
        }
        self.swept_us.store(now.as_micros(), Ordering::Relaxed);
        self.keys.retain(|_, key| {
            key.collect(self.rule, now, SWEEP_PAUSE_US);
            key.asked.is_some() || key.waited_for > 0 || !key.held.is_idle(self.rule, now)
        });
        let again_at = (2 * self.keys.len()).clamp(SWEEP_LEAST.min(self.most), self.most);
        self.sweep_at.store(again_at, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{KeyRule, LeakyBucket, Rule};

    /// Keys that were asked about once stayed, since their answers were never looked at.
    #[test]
    fn keys_that_were_asked_about_once_make_room() {
        let rule: Rule = LeakyBucket::per_second(100).into();
        let KeyRule::Turn(rule) = rule.key_rule("x", false).expect("it can be kept") else {
            panic!("{rule:?} has turns");
        };
        let keys = SlotKeys::new(Box::leak(Box::new(rule)), 4000);
        let ask = SlotAsk { owed: 1, own: 0, ahead: 0 };
        for number in 0..20_000_u64 {
            let now = Timestamp::from_micros(1_000_000 + 1000 * number);
            let (done, answer) = oneshot::channel();
            let found = keys.with(&number.to_le_bytes(), now, |key| {
                key.held.spend_on_credit(keys.rule, 1, now);
                key.asked = Some((ask, answer));
            });
            assert!(found.is_some(), "key {number}");
            // The store does not answer.
            drop(done);
        }
        assert!(keys.keys.len() < 4000);
    }
}
