//! Leaky buckets that nodes share: requests take the slots that this node holds, and else ask the store for one.

use super::ActiveLimit;
use std::time::Duration;

use super::async_limit::Charge;
use super::waiting::LineEntry;
use crate::algorithm::{Standing, Turn};
use crate::bucket::LocalAnswer;
use crate::decision::{Decision, Source};
use crate::driver::{
    AloneBuckets, AskedStore, Buckets, ExactAnswer, SlotContext, SlotKey, SlotKeys, SlotRequest,
};
use crate::store::exact::Deed;
use crate::sync::{HeldSlots, SlotAnswer, SlotAsk};
use crate::time::Timestamp;

/// A decision, and when the slot begins that the store gave for it, in units of the limit's rule.
pub(super) struct Slot {
    pub(super) decision: Decision,
    start: Option<u64>,
}

/// The slots of a key.
#[derive(Clone, Copy)]
pub(super) struct SlotsOf<'a> {
    pub(super) slots: &'a SlotKeys,
    pub(super) key: &'a [u8],
}

/// A slot ahead. Unless it is used, it is given back.
struct SlotPromise<'a> {
    of: SlotsOf<'a>,
    cost: u32,
    start: u64,
    now: Timestamp,
    is_used: bool,
}

impl Drop for SlotPromise<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            let (rule, cost, start) = (self.of.slots.rule, self.cost, self.start);
            let give_back = |key: &mut SlotKey| key.held.give_back(rule, cost, start);
            // Where there is no room for the key, the slot passes unused.
            let _ = self.of.slots.with(self.of.key, self.now, give_back);
        }
    }
}

/// A question to the store. If the caller goes away before the answer, what comes is for others.
struct Asked<'a> {
    of: SlotsOf<'a>,
    now: Timestamp,
    ask: SlotAsk,
    answer: Option<AskedStore>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            let abandon = |entry: &mut SlotKey| entry.abandon(self.ask, answer);
            let _ = self.of.slots.with(self.of.key, self.now, abandon);
        }
    }
}

/// A caller who waits for the store's word.
struct SlotWaiter<'a> {
    of: SlotsOf<'a>,
    cost: u32,
    now: Timestamp,
}

impl<'a> SlotWaiter<'a> {
    fn new(of: SlotsOf<'a>, cost: u32, now: Timestamp) -> Self {
        let _ = of
            .slots
            .with(of.key, now, |entry| entry.waited_for = entry.waited_for.saturating_add(cost));
        Self { of, cost, now }
    }
}

impl Drop for SlotWaiter<'_> {
    fn drop(&mut self) {
        let less =
            |entry: &mut SlotKey| entry.waited_for = entry.waited_for.saturating_sub(self.cost);
        let _ = self.of.slots.with(self.of.key, self.now, less);
    }
}

impl ActiveLimit {
    /// The slots of a leaky bucket that nodes share.
    #[inline]
    pub(super) fn slots(&self) -> Option<&SlotKeys> {
        match &self.state.buckets {
            Buckets::Alone(AloneBuckets::Slots(slots, _)) => Some(slots),
            _ => None,
        }
    }

    fn slot_context(&self, now: Timestamp) -> SlotContext {
        let (nodes, is_on_policy) = (self.state.nodes(), self.state.is_on_policy());
        SlotContext { now, tick_us: self.state.terms.tick_us, nodes, is_on_policy }
    }

    /// What this node alone can say: see [`SlotKey::look`].
    fn look(
        &self,
        of: SlotsOf<'_>,
        request: SlotRequest,
        credit: Option<u32>,
        now: Timestamp,
    ) -> SlotAnswer {
        let (rule, context) = (of.slots.rule, self.slot_context(now));
        let ask = |ask| self.ask_ahead(of.key, ask);
        let look = |entry: &mut SlotKey| entry.look(rule, request, credit, context, ask);
        let max_delay = rule.max_delay(request.within_us);
        let turn = Turn { ahead: 0, delay: 0, max_delay };
        let no_room = SlotAnswer::Unsure { turn, is_idle: false };
        of.slots.with(of.key, now, look).unwrap_or(no_room)
    }

    /// Asks the store for slots that nobody waits for yet.
    fn ask_ahead(&self, key: &[u8], ask: SlotAsk) -> Option<AskedStore> {
        let charge =
            Charge { cost: ask.tokens(), slot_within_us: u64::MAX, deed: SlotKey::deed_of(ask) };
        let wait_us = self.state.terms.background_wait_us();
        self.send_exact(key, charge, wait_us)
    }

    /// What is told at once of a request.
    pub(super) fn ask_slots(
        &self,
        of: SlotsOf<'_>,
        wanted: SlotRequest,
        now: Timestamp,
    ) -> LocalAnswer {
        let answer = self.look(of, wanted, Some(self.state.first_credit(self.info)), now);
        match self.share_of(answer, of.key, wanted) {
            Some(answer) => answer,
            None => self.told(of.slots, answer, wanted.cost),
        }
    }

    /// The same, with the slot that the request has.
    pub(super) fn slot_at_once(&self, of: SlotsOf<'_>, wanted: SlotRequest) -> Slot {
        let now = self.precise_now();
        let answer = self.look(of, wanted, Some(self.state.first_credit(self.info)), now);
        match self.share_of(answer, of.key, wanted) {
            // A share's slots are none of the store's.
            Some(answer) => {
                let decision = self.local_decision(answer, wanted.cost, now);
                Slot { decision, start: None }
            }
            None => self.slot(of.slots, answer, wanted.cost, now),
        }
    }

    /// What the outage policy says of a request that this node has no slot for, if it decides.
    fn share_of(&self, answer: SlotAnswer, key: &[u8], wanted: SlotRequest) -> Option<LocalAnswer> {
        let is_unknown = matches!(answer, SlotAnswer::Unsure { .. });
        if !is_unknown || !self.state.is_on_policy() {
            return None;
        }
        let decision = self.by_outage_policy(key, wanted.cost, wanted.within_us);
        match decision.source {
            Source::Local(standing) => {
                Some(LocalAnswer { is_allowed: decision.allowed, is_sure: false, standing })
            }
            _ => None,
        }
    }

    /// What is told of an answer, which is counted.
    fn told(&self, slots: &SlotKeys, answer: SlotAnswer, cost: u32) -> LocalAnswer {
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
        LocalAnswer { is_allowed, is_sure, standing: Standing::Turn(slots.rule, turn) }
    }

    /// A decision by an answer of `now`, with its slot.
    fn slot(&self, slots: &SlotKeys, answer: SlotAnswer, cost: u32, now: Timestamp) -> Slot {
        let start = match answer {
            SlotAnswer::Allowed(turn) => Some(slots.rule.units_at(now) + turn.delay),
            _ => None,
        };
        let answer = self.told(slots, answer, cost);
        Slot { decision: self.local_decision(answer, cost, now), start }
    }

    /// A denial, if the queue is longer than a request may wait by what this node knows.
    pub(super) fn deny_if_sure(&self, of: SlotsOf<'_>, cost: u32) -> Option<Decision> {
        let now = self.precise_now();
        // A request that may have a slot ahead has to wait for it.
        let answer = self.look(of, SlotRequest::new(0, u64::MAX), None, now);
        let is_denied = matches!(answer, SlotAnswer::Denied(_));
        is_denied.then(|| self.slot(of.slots, answer, cost, now).decision)
    }

    /// Decides, and asks the store if this node alone cannot be sure. Of callers who wait one asks for all.
    pub(super) async fn ask_for_slot(&self, of: SlotsOf<'_>, cost: u32, within_us: u64) -> Slot {
        let max_wait_us = self.max_wait_us;
        let wanted = SlotRequest::new(cost, within_us);
        if max_wait_us == 0 || cost == 0 || self.state.is_on_policy() {
            return self.slot_at_once(of, wanted);
        }
        if let Some(slot) = self.look_if_sure(of, wanted) {
            return slot;
        }
        let (rule, begun) = (of.slots.rule, self.now());
        let is_long = of.slots.with(of.key, begun, |entry| entry.held.is_long(rule, begun));
        if is_long != Some(true) {
            return self.ask_store_for_slot(of, wanted, (false, max_wait_us)).await;
        }
        let _waiter = SlotWaiter::new(of, cost, begun);
        let line = LineEntry::new(self.waiting(), of.key);
        let _first = tokio::select! {
            biased;
            first = line.lock() => first,
            _ = self.sleep(Duration::from_micros(max_wait_us)) => {
                return self.slot_at_once(of, SlotRequest { is_again: true, ..wanted });
            }
        };
        // Who came before may have brought slots for all, in the time that this caller had.
        let waited_us = self.now().micros_since(begun);
        let within_us = match within_us {
            u64::MAX => u64::MAX,
            within_us => within_us.saturating_sub(waited_us),
        };
        let wanted = SlotRequest { cost, within_us, is_again: true };
        if let Some(slot) = self.look_if_sure(of, wanted) {
            return slot;
        }
        self.ask_store_for_slot(of, wanted, (true, max_wait_us.saturating_sub(waited_us))).await
    }

    /// Asks the store, `for_others` too, and waits for the answer so long at most.
    async fn ask_store_for_slot(
        &self,
        of: SlotsOf<'_>,
        wanted: SlotRequest,
        (for_others, for_us): (bool, u64),
    ) -> Slot {
        let SlotRequest { cost, within_us, .. } = wanted;
        let (rule, now) = (of.slots.rule, self.now());
        let alone = SlotAsk { owed: 0, own: cost, ahead: 0 };
        let together =
            |entry: &mut SlotKey| entry.wanted_for_all(rule, cost, self.slot_context(now));
        let ask = if for_others { of.slots.with(of.key, now, together) } else { None };
        let ask = ask.unwrap_or(alone);
        let deed = Deed::Ask;
        let charge = Charge { cost: ask.tokens(), slot_within_us: within_us, deed };
        let mut asked = Asked { of, now, ask, answer: None };
        asked.answer = self.send_question(of.key, charge);
        let answer = self.wait_for_store(&mut asked.answer, for_us).await;
        if asked.answer.is_some() {
            drop(asked);
            let slot = self.slot_at_once(of, SlotRequest { is_again: true, ..wanted });
            if slot.decision.is_allowed() && !slot.decision.is_sure() && !self.state.is_on_policy()
            {
                let charge = |entry: &mut SlotKey| entry.charge_by_abandoned(cost);
                let _ = of.slots.with(of.key, self.now(), charge);
            }
            return slot;
        }
        let Some(grant) = answer.as_ref().and_then(ExactAnswer::slot_grant) else {
            // A share's slots are none of the store's.
            let decision = self.by_outage_policy(of.key, cost, within_us);
            return Slot { decision, start: None };
        };
        let now = self.precise_now();
        // Where there is no room for the key, only its own slot counts.
        let installed = of.slots.with(of.key, now, |entry| entry.held.install(rule, ask, grant));
        let alone = || HeldSlots::default().install(rule, ask, grant);
        let start = installed.unwrap_or_else(alone);
        let answer = grant.told(rule, start, within_us, now);
        self.slot(of.slots, answer, cost, now)
    }

    /// A decision that needs no word of the store.
    fn look_if_sure(&self, of: SlotsOf<'_>, wanted: SlotRequest) -> Option<Slot> {
        let now = self.precise_now();
        let answer = self.look(of, wanted, None, now);
        let is_sure = !matches!(answer, SlotAnswer::Unsure { .. });
        is_sure.then(|| self.slot(of.slots, answer, wanted.cost, now))
    }

    /// Waits until the slot of a request has come.
    pub(super) async fn wait_for_slot(
        &self,
        of: SlotsOf<'_>,
        cost: u32,
        within_us: u64,
    ) -> Decision {
        let Slot { decision, start } = self.ask_for_slot(of, cost, within_us).await;
        let (delay, now) = (decision.delay(), self.precise_now());
        if delay.is_zero() {
            return decision;
        }
        let Some(start) = start else {
            return decision.after_delay(self.sleep(delay).await);
        };
        let wait_us = of.slots.rule.micros(start.saturating_sub(of.slots.rule.units_at(now)));
        let mut promise = SlotPromise { of, cost, start, now, is_used: false };
        promise.is_used = self.sleep(Duration::from_micros(wait_us)).await;
        decision.after_delay(promise.is_used)
    }
}
