//! The keys of a leaky bucket that nodes share.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::oneshot;

use super::exact::ExactAnswer;
use crate::algorithm::{Standing, Turn, TurnRule};
use crate::error::StoreError;
use crate::store::exact::Deed;
use crate::sync::{HeldSlots, SlotAnswer, SlotAsk, SlotGrant};
use crate::time::Timestamp;

/// Keys are looked through for idle ones when there are so many, or twice as many as were left the last time.
const SWEEP_LEAST: usize = 1024;
/// While there is no room they are looked through no more often.
const SWEEP_PAUSE_US: u64 = 1_000_000;

/// The most open questions of a key.
const OPEN_MAX: usize = 64;

/// Where the store's answer comes.
pub(crate) type AskedStore = oneshot::Receiver<Result<ExactAnswer, StoreError>>;

/// One key.
#[derive(Debug, Default)]
pub(crate) struct SlotKey {
    pub(crate) held: HeldSlots,
    /// Questions to the store whose caller has left, or that never had one.
    open: Vec<OpenQuestion>,
    /// After a failure: nothing is asked before that nobody waits for.
    ask_from: Timestamp,
    /// No question that takes nothing is asked before.
    look_from: Timestamp,
    /// Tokens that callers wait for, one of whom asks for all.
    pub(crate) waited_for: u32,
}

/// What the store was asked for, and where it answers.
#[derive(Debug)]
struct OpenQuestion {
    ask: SlotAsk,
    /// A caller asked, and has left.
    is_abandoned: bool,
    answer: AskedStore,
}

/// A request of some tokens that may wait for its slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotRequest {
    pub(crate) cost: u32,
    pub(crate) within_us: u64,
    /// It has been looked at before.
    pub(crate) is_again: bool,
}

impl SlotRequest {
    pub(crate) fn new(cost: u32, within_us: u64) -> Self {
        Self { cost, within_us, is_again: false }
    }
}

/// How the node stands that looks at a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotContext {
    pub(crate) now: Timestamp,
    pub(crate) tick_us: u64,
    /// Nodes that share the limit.
    pub(crate) nodes: u32,
    /// The outage policy decides.
    pub(crate) is_on_policy: bool,
}

impl SlotKey {
    /// What this node alone can say of a request, with so many tokens of credit on a key that nobody uses; without, the
    /// caller asks the store where it is not sure. What the store is to be asked for though nobody waits, `ask` sends.
    pub(crate) fn look(
        &mut self,
        rule: &TurnRule,
        request: SlotRequest,
        credit: Option<u32>,
        context: SlotContext,
        ask: impl FnOnce(SlotAsk) -> Option<AskedStore>,
    ) -> SlotAnswer {
        let SlotRequest { cost, within_us, is_again } = request;
        let SlotContext { now, tick_us, nodes, is_on_policy } = context;
        self.collect(rule, now, tick_us);
        // Only requests that may wait use slots ahead. Taken for others, the slots would pass unused.
        if !is_again && within_us > 0 {
            self.held.count(cost);
        }
        let mut answer = self.held.decide(rule, cost, within_us, now);
        if let SlotAnswer::Unsure { turn, is_idle: true } = answer
            && (cost > 0 && credit.unwrap_or(0) > 0 && self.held.owed() == 0)
            && !is_on_policy
        {
            self.held.spend_on_credit(rule, cost, now);
            answer = SlotAnswer::OnCredit(turn);
            // What takes nothing is not to keep the charge waiting.
            self.open.retain(|question| question.ask.tokens() > 0);
        }
        // The caller asks next, and asks for slots ahead too: a question before that would take the earlier slot.
        let is_unsure = matches!(answer, SlotAnswer::Unsure { .. });
        let caller_asks = is_unsure && credit.is_none() && self.held.owed() == 0;
        if self.open.is_empty() && now >= self.ask_from && !caller_asks {
            let wanted = self.held.wanted(rule, now, tick_us, nodes);
            // What nobody asks for is looked at once a tick, and whether the store is back; a queue that denies,
            // once a second.
            let is_unknown = match answer {
                SlotAnswer::Unsure { .. } => credit.is_some(),
                SlotAnswer::Denied(_) => self.held.is_old(now),
                _ => false,
            };
            let look = SlotAsk { owed: 0, own: 0, ahead: 0 };
            let is_due = (is_unknown || is_on_policy) && now >= self.look_from;
            let look = is_due.then_some(look);
            if wanted.is_none() && is_due {
                self.look_from = now.plus_micros(tick_us);
            }
            if let Some(wanted) = wanted.or(look)
                && let Some(answer) = ask(wanted)
            {
                self.open.push(OpenQuestion { ask: wanted, is_abandoned: false, answer });
            }
        }
        answer
    }

    /// What the store does about what nobody waits for: it charges what is spent.
    pub(crate) fn deed_of(ask: SlotAsk) -> Deed {
        if ask.owed > 0 { Deed::Charge } else { Deed::Ask }
    }

    /// What a caller asks the store for who asks for those behind it too.
    pub(crate) fn wanted_for_all(
        &mut self,
        rule: &TurnRule,
        cost: u32,
        context: SlotContext,
    ) -> SlotAsk {
        let SlotContext { now, tick_us, nodes, .. } = context;
        let is_coming =
            |question: &OpenQuestion| question.is_abandoned.then_some(question.ask.ahead);
        let coming = self.open.iter().filter_map(is_coming).fold(0, u32::saturating_add);
        let others = self.waited_for.saturating_sub(cost);
        let ask = self.held.wanted_for(rule, (cost, others, coming), now, tick_us, nodes);
        // What is owed may be on its way.
        SlotAsk { owed: if self.open.is_empty() { ask.owed } else { 0 }, ..ask }
    }

    /// Keeps the question of a caller who has left: what comes is for others.
    pub(crate) fn abandon(&mut self, SlotAsk { owed, own, ahead }: SlotAsk, answer: AskedStore) {
        if self.open.len() >= OPEN_MAX {
            // What comes passes unused.
            return;
        }
        let ask = SlotAsk { owed, own: 0, ahead: own.saturating_add(ahead) };
        self.open.push(OpenQuestion { ask, is_abandoned: true, answer });
    }

    /// Lets a question of a caller who has left, and went on by credit, charge that credit.
    pub(crate) fn charge_by_abandoned(&mut self, credit: u32) {
        let is_it =
            |question: &&mut OpenQuestion| question.is_abandoned && question.ask.ahead >= credit;
        if let Some(question) = self.open.iter_mut().find(is_it) {
            question.ask.ahead -= credit;
            question.ask.owed += credit;
        }
    }

    /// Takes in the store's answers, if there are any. After a failure the store is left alone for `pause_us`.
    pub(crate) fn collect(&mut self, rule: &TurnRule, now: Timestamp, pause_us: u64) {
        let Self { held, open, ask_from, .. } = self;
        open.retain_mut(|OpenQuestion { ask, answer, .. }| {
            match answer.try_recv() {
                Ok(Ok(answer)) => {
                    if let Some(grant) = answer.slot_grant() {
                        held.install(rule, *ask, grant);
                    }
                }
                Err(oneshot::error::TryRecvError::Empty) => return true,
                Ok(Err(_)) | Err(oneshot::error::TryRecvError::Closed) => {
                    *ask_from = now.plus_micros(pause_us);
                }
            }
            false
        });
    }
}

impl ExactAnswer {
    /// What it says of a key's slots. The store has decided half way between question and answer.
    pub(crate) fn slot_grant(&self) -> Option<SlotGrant> {
        let Standing::Turn(_, Turn { ahead, .. }) = self.reply.standing else { return None };
        let round_trip_us = self.answered.micros_since(self.asked);
        let at = self.asked.plus_micros(round_trip_us / 2);
        Some(SlotGrant { is_allowed: self.reply.is_allowed, at, ahead, round_trip_us })
    }
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
    pub(crate) fn new(rule: &'static TurnRule, most: usize) -> Self {
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
            !key.open.is_empty() || key.waited_for > 0 || !key.held.is_idle(self.rule, now)
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
                key.abandon(ask, answer);
            });
            assert!(found.is_some(), "key {number}");
            // The store does not answer.
            drop(done);
        }
        assert!(keys.keys.len() < 4000);
    }
}
