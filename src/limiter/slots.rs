//! Leaky buckets that nodes share: requests take the slots that this node holds, and else ask the store for one.

use super::ActiveLimit;
use std::time::Duration;

use super::async_limit::Charge;
use super::waiting::LineEntry;
use crate::algorithm::{Standing, Turn};
use crate::bucket::LocalAnswer;
use crate::decision::{Decision, Source};
use crate::driver::{AloneBuckets, AskedStore, Buckets, SlotKey, SlotKeys, grant_of};
use crate::sync::{HeldSlots, SlotAnswer, SlotAsk};
use crate::time::Timestamp;

/// How long the store has for an answer that no caller waits for.
const BACKGROUND_WAIT_US: u64 = 250_000;

/// A decision, and when the slot begins that the store gave for it, in units of the limit's rule.
pub(super) struct Slot {
    pub(super) decision: Decision,
    start: Option<u64>,
}

/// A request of some tokens that may wait for its slot.
#[derive(Clone, Copy)]
struct Wanted {
    cost: u32,
    within_us: u64,
    /// It has been looked at before.
    is_again: bool,
}

/// A slot ahead. Unless it is used, it is given back.
struct SlotPromise<'a> {
    slots: &'a SlotKeys,
    key: &'a [u8],
    cost: u32,
    start: u64,
    now: Timestamp,
    is_used: bool,
}

impl Drop for SlotPromise<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            let (rule, cost, start) = (self.slots.rule, self.cost, self.start);
            let give_back = |key: &mut SlotKey| key.held.give_back(rule, cost, start);
            // Where there is no room for the key, the slot passes unused.
            let _ = self.slots.with(self.key, self.now, give_back);
        }
    }
}

/// A caller who waits for the store's word.
struct SlotWaiter<'a> {
    slots: &'a SlotKeys,
    key: &'a [u8],
    cost: u32,
    now: Timestamp,
}

impl<'a> SlotWaiter<'a> {
    fn new(slots: &'a SlotKeys, key: &'a [u8], cost: u32, now: Timestamp) -> Self {
        let _ =
            slots.with(key, now, |entry| entry.waited_for = entry.waited_for.saturating_add(cost));
        Self { slots, key, cost, now }
    }
}

impl Drop for SlotWaiter<'_> {
    fn drop(&mut self) {
        let less =
            |entry: &mut SlotKey| entry.waited_for = entry.waited_for.saturating_sub(self.cost);
        let _ = self.slots.with(self.key, self.now, less);
    }
}

impl ActiveLimit {
    /// The slots of a leaky bucket that nodes share.
    pub(super) fn slots(&self) -> Option<&SlotKeys> {
        match &self.state.buckets {
            Buckets::Alone(AloneBuckets::Slots(slots, _)) => Some(slots),
            _ => None,
        }
    }

    /// What this node alone can say, with so many tokens of credit on a key that nobody uses; without, the caller asks the
    /// store where it is not sure.
    fn look(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        wanted: Wanted,
        credit: Option<u32>,
        now: Timestamp,
    ) -> SlotAnswer {
        let Wanted { cost, within_us, is_again } = wanted;
        let (rule, tick_us) = (slots.rule, self.state.terms.tick_us);
        let is_on_policy = self.state.is_on_policy();
        let answer = slots.with(key, now, |entry| {
            entry.collect(rule, now, tick_us);
            if !is_again {
                entry.held.count(cost);
            }
            let mut answer = entry.held.decide(rule, cost, within_us, now);
            if let SlotAnswer::Unsure { turn, is_idle: true } = answer
                && (1..=credit.unwrap_or(0).saturating_sub(entry.held.owed())).contains(&cost)
                && !is_on_policy
            {
                entry.held.spend_on_credit(rule, cost, now);
                answer = SlotAnswer::OnCredit(turn);
            }
            if entry.asked.is_none() && now >= entry.ask_from {
                let wanted = entry.held.wanted(rule, now, tick_us, self.state.nodes());
                // What nobody asks for is looked at once a tick, and whether the store is back.
                let is_unknown = credit.is_some() && matches!(answer, SlotAnswer::Unsure { .. });
                let look = SlotAsk { owed: 0, own: 0, ahead: 0 };
                let look = (is_unknown || is_on_policy).then_some(look);
                if wanted.is_none() && look.is_some() {
                    entry.ask_from = now.plus_micros(tick_us);
                }
                entry.asked = wanted.or(look).and_then(|ask| self.ask_ahead(key, ask));
            }
            answer
        });
        let turn = Turn { ahead: 0, delay: 0, max_delay: rule.max_delay(within_us) };
        answer.unwrap_or(SlotAnswer::Unsure { turn, is_idle: false })
    }

    /// Asks the store for slots that nobody waits for yet.
    fn ask_ahead(&self, key: &[u8], ask: SlotAsk) -> Option<(SlotAsk, AskedStore)> {
        let charge =
            Charge { cost: ask.tokens(), slot_within_us: u64::MAX, is_spent: ask.owed > 0 };
        let wait_us = self.state.terms.max_wait_us.max(BACKGROUND_WAIT_US);
        self.send_exact(key, charge, wait_us).map(|answer| (ask, answer))
    }

    /// Decides at once about a request that may wait `within_us` for its slot.
    pub(super) fn decide_by_slots(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        cost: u32,
        within_us: u64,
    ) -> Decision {
        let now = self.precise_now();
        let (answer, is_sure) = self.ask_slots(slots, key, cost, within_us, now);
        self.local_decision(answer, is_sure, cost, now)
    }

    /// What is told at once of a request that may wait `within_us` for its slot, and whether that is sure.
    pub(super) fn ask_slots(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        cost: u32,
        within_us: u64,
        now: Timestamp,
    ) -> (LocalAnswer, bool) {
        let wanted = Wanted { cost, within_us, is_again: false };
        let answer = self.look(slots, key, wanted, Some(self.state.first_credit()), now);
        if let SlotAnswer::Unsure { .. } = answer
            && self.state.is_on_policy()
            && let Decision { allowed: is_allowed, source: Source::Local(standing), .. } =
                self.by_outage_policy(key, cost, within_us)
        {
            return (LocalAnswer { is_allowed, standing }, false);
        }
        self.told(slots, answer, cost)
    }

    /// What is told of an answer, which is counted.
    fn told(&self, slots: &SlotKeys, answer: SlotAnswer, cost: u32) -> (LocalAnswer, bool) {
        let (is_allowed, is_sure, turn) = match answer {
            SlotAnswer::Allowed(turn) => (true, true, turn),
            SlotAnswer::Denied(turn) => (false, true, turn),
            SlotAnswer::OnCredit(turn) => (true, false, turn),
            SlotAnswer::Unsure { turn, is_idle } => (is_idle && cost == 0, false, turn),
        };
        self.state.buckets.count(is_allowed, cost);
        if !is_sure {
            self.state.count_unsure(cost);
        }
        (LocalAnswer { is_allowed, standing: Standing::Turn(slots.rule, turn) }, is_sure)
    }

    /// A decision by an answer of `now`, with its slot.
    fn slot(&self, slots: &SlotKeys, answer: SlotAnswer, cost: u32, now: Timestamp) -> Slot {
        let start = match answer {
            SlotAnswer::Allowed(turn) => Some(slots.rule.units_at(now) + turn.delay),
            _ => None,
        };
        let (answer, is_sure) = self.told(slots, answer, cost);
        Slot { decision: self.local_decision(answer, is_sure, cost, now), start }
    }

    /// A denial, if the queue is longer than a request may wait by what this node knows.
    #[cfg(feature = "tower")]
    pub(super) fn deny_if_sure(&self, slots: &SlotKeys, key: &[u8], cost: u32) -> Option<Decision> {
        let now = self.precise_now();
        // A request that may have a slot ahead has to wait for it.
        let wanted = Wanted { cost: 0, within_us: u64::MAX, is_again: false };
        let answer = self.look(slots, key, wanted, None, now);
        let is_denied = matches!(answer, SlotAnswer::Denied(_));
        is_denied.then(|| self.slot(slots, answer, cost, now).decision)
    }

    /// Decides, and asks the store if this node alone cannot be sure. Of callers who wait one asks for all.
    pub(super) async fn ask_for_slot(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        cost: u32,
        within_us: u64,
    ) -> Slot {
        let max_wait_us = self.state.terms.max_wait_us;
        if max_wait_us == 0 || cost == 0 || self.state.is_on_policy() {
            let decision = self.decide_by_slots(slots, key, cost, within_us);
            return Slot { decision, start: None };
        }
        let wanted = Wanted { cost, within_us, is_again: false };
        if let Some(slot) = self.look_if_sure(slots, key, wanted) {
            return slot;
        }
        let (rule, now) = (slots.rule, self.now());
        let is_long = slots.with(key, now, |entry| entry.held.is_long(rule, now));
        let line = if is_long == Some(true) {
            Some((SlotWaiter::new(slots, key, cost, now), LineEntry::new(self.waiting(), key)))
        } else {
            None
        };
        let _first = match &line {
            Some((_, line)) => line.lock().await,
            None => None,
        };
        // Who came before may have brought slots for all.
        let wanted = Wanted { is_again: true, ..wanted };
        if line.is_some()
            && let Some(slot) = self.look_if_sure(slots, key, wanted)
        {
            return slot;
        }
        self.ask_store_for_slot(slots, key, wanted, line.is_some()).await
    }

    /// Asks the store, `for_others` too.
    async fn ask_store_for_slot(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        wanted: Wanted,
        for_others: bool,
    ) -> Slot {
        let Wanted { cost, within_us, .. } = wanted;
        let (rule, now, tick_us) = (slots.rule, self.now(), self.state.terms.tick_us);
        let alone = SlotAsk { owed: 0, own: cost, ahead: 0 };
        let together = |entry: &mut SlotKey| {
            let tokens = (cost, entry.waited_for.saturating_sub(cost));
            let ask = entry.held.wanted_for(rule, tokens, now, tick_us, self.state.nodes());
            // What is owed may be on its way.
            SlotAsk { owed: if entry.asked.is_some() { 0 } else { ask.owed }, ..ask }
        };
        let ask = if for_others { slots.with(key, now, together) } else { None };
        let ask = ask.unwrap_or(alone);
        let charge = Charge { cost: ask.tokens(), slot_within_us: within_us, is_spent: false };
        let answer = match self.send_exact(key, charge, self.state.terms.max_wait_us) {
            Some(answer) => answer.await.ok(),
            None => None,
        };
        let Some(grant) = answer.as_ref().and_then(grant_of) else {
            // A share's slots are none of the store's.
            let decision = self.by_outage_policy(key, cost, within_us);
            return Slot { decision, start: None };
        };
        let now = self.precise_now();
        // Where there is no room for the key, only its own slot counts.
        let installed = slots.with(key, now, |entry| entry.held.install(rule, ask, grant));
        let alone = || HeldSlots::default().install(rule, ask, grant);
        let start = installed.unwrap_or_else(alone);
        let max_delay = rule.max_delay(within_us);
        let ahead = (rule.units_at(grant.at) + grant.ahead).saturating_sub(rule.units_at(now));
        let answer = match start {
            Some(start) => {
                let delay = start.saturating_sub(rule.units_at(now));
                SlotAnswer::Allowed(Turn { ahead, delay, max_delay })
            }
            None => SlotAnswer::Denied(Turn { ahead, delay: 0, max_delay }),
        };
        self.slot(slots, answer, cost, now)
    }

    /// A decision that needs no word of the store.
    fn look_if_sure(&self, slots: &SlotKeys, key: &[u8], wanted: Wanted) -> Option<Slot> {
        let now = self.precise_now();
        let answer = self.look(slots, key, wanted, None, now);
        let is_sure = !matches!(answer, SlotAnswer::Unsure { .. });
        is_sure.then(|| self.slot(slots, answer, wanted.cost, now))
    }

    /// Waits until the slot of a request has come.
    pub(super) async fn wait_for_slot(
        &self,
        slots: &SlotKeys,
        key: &[u8],
        cost: u32,
        within_us: u64,
    ) -> Decision {
        let Slot { decision, start } = self.ask_for_slot(slots, key, cost, within_us).await;
        let (delay, now) = (decision.delay(), self.precise_now());
        if delay.is_zero() {
            return decision;
        }
        let Some(start) = start else {
            return decision.after_delay(self.sleep(delay).await);
        };
        let wait_us = slots.rule.micros(start.saturating_sub(slots.rule.units_at(now)));
        let mut promise = SlotPromise { slots, key, cost, start, now, is_used: false };
        promise.is_used = self.sleep(Duration::from_micros(wait_us)).await;
        decision.after_delay(promise.is_used)
    }
}
