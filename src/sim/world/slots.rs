//! Leaky buckets that nodes share: the product's slots, whose callers, calls and outages are the world's.
//!
//! What `limiter/slots.rs` does in futures happens here at times of the world. Callers do not leave, and a request whose
//! slot was promised begins though its node dies.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::sync::oneshot;

use super::super::setup::Form;
use super::super::store::Call;
use super::timeline::Happening;
use super::{Told, World};
use crate::algorithm::{KeyRule, TurnRule};
use crate::driver::{ExactAnswer, SlotContext, SlotKey, SlotKeys, SlotRequest};
use crate::error::StoreError;
use crate::limit::{Limit, LimitInfo, OutagePolicy, Terms};
use crate::store::exact::{Deed, ExactReply, ExactRequest};
use crate::sync::{ExactOutage, SlotAnswer, SlotAsk};
use crate::time::Timestamp;

/// The slots of a limit on a node.
pub(super) struct NodeSlots {
    info: &'static LimitInfo,
    key_rule: &'static KeyRule,
    keys: SlotKeys,
    outage: ExactOutage,
    /// In an outage: when the share of each key is as if it had never been used, in units of its rule.
    shares: HashMap<u32, u64>,
    /// Callers who wait until the first of them has asked the store for all.
    lines: HashMap<u32, VecDeque<Caller>>,
}

impl NodeSlots {
    /// Those of a limit, if it is a leaky bucket.
    pub(super) fn of(limit: &Limit, terms: &Terms) -> Option<Self> {
        let info = LimitInfo::intern(limit.name(), (None, false), terms, limit.rule(), 0);
        let key_rule = info.key_rule.as_ref()?;
        let KeyRule::Turn(rule @ TurnRule::LeakyBucket { .. }) = key_rule else { return None };
        Some(Self {
            info,
            key_rule,
            keys: SlotKeys::new(rule, usize::MAX),
            outage: ExactOutage::default(),
            shares: HashMap::new(),
            lines: HashMap::new(),
        })
    }

    /// Does something with a key.
    fn with<T>(&self, key: u32, now: Timestamp, does: impl FnOnce(&mut SlotKey) -> T) -> T {
        // They have room for `usize::MAX`: see `of`.
        self.keys.with(&key.to_le_bytes(), now, does).expect("there is room for any number")
    }

    /// What the share of a node says of a request, by the outage policy. Returns how long it waits, if it is allowed.
    fn by_policy(
        &mut self,
        key: u32,
        request: SlotRequest,
        terms: &Terms,
        now: Timestamp,
    ) -> Option<u64> {
        match (terms.outage, &terms.share) {
            (OutagePolicy::Open, _) => Some(0),
            (OutagePolicy::Share, Some(KeyRule::Turn(share))) => {
                // What a share cannot count it denies. A cost of 0 takes nothing.
                if !KeyRule::Turn(*share).can_count(request.cost) {
                    return None;
                }
                let state = self.shares.entry(key).or_default();
                let (now, cost) = (share.units_at(now), request.cost.max(1));
                let (next, turn) = share.decide(*state, now, cost, request.within_us);
                let next = next?;
                *state = if request.cost > 0 { next } else { *state };
                Some(share.micros(turn.delay))
            }
            _ => None,
        }
    }
}

/// A key of a limit on a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyAt {
    pub(super) node: usize,
    pub(super) limit: usize,
    pub(super) key: u32,
}

/// What happens about slots on a node.
#[derive(Debug)]
pub(super) enum SlotHappening {
    /// The store has answered a call.
    Answer { number: u64, reply: Result<ExactReply, StoreError> },
    /// A call has had its time.
    CallEnds { number: u64 },
    /// A caller has stood in the line of a key for as long as it may.
    WaitEnds { limit: usize, key: u32, number: u64 },
}

/// A caller in a line.
#[derive(Clone, Copy)]
struct Caller {
    number: u64,
    request: SlotRequest,
    since: Timestamp,
}

/// The calls of a node that are under way, by their numbers.
pub(super) type SlotCalls = HashMap<u64, SlotCall>;

pub(super) struct SlotCall {
    at: KeyAt,
    began: Timestamp,
    /// How long the store has for it.
    wait_us: u64,
    asker: Asker,
}

/// Who hears of an answer.
enum Asker {
    /// The key, when it is looked at next.
    Key(oneshot::Sender<Result<ExactAnswer, StoreError>>),
    Caller {
        request: SlotRequest,
        ask: SlotAsk,
        /// The first of its line, which asked for all.
        is_first: bool,
    },
}

/// What a call is to do.
struct Charge {
    cost: u32,
    within_us: u64,
    deed: Deed,
    /// How long the store has for it.
    wait_us: u64,
}

impl World {
    fn slots(&mut self, at: KeyAt) -> &mut NodeSlots {
        // `World::ask` makes a `KeyAt` only where this is `Some`, and dead nodes are asked nothing.
        self.nodes[at.node].slots[at.limit].as_mut().expect("the limit is a leaky bucket")
    }

    fn slot_context(&mut self, at: KeyAt) -> SlotContext {
        let node = &self.nodes[at.node];
        let (terms, now) = (&node.terms[at.limit], node.clock.now(self.now_us));
        let nodes = node.engine.nodes(at.limit).unwrap_or(terms.credit_rule.uncounted);
        let tick_us = terms.tick_us;
        let is_on_policy = self.slots(at).outage.is_on_policy();
        SlotContext { now, tick_us, nodes, is_on_policy }
    }

    /// Something about slots happens on a node.
    pub(super) fn slots_happen(&mut self, node: usize, what: SlotHappening) {
        match what {
            SlotHappening::Answer { number, reply } => self.slot_call_answered(node, number, reply),
            SlotHappening::CallEnds { number } => self.slot_call_times_out(node, number),
            SlotHappening::WaitEnds { limit, key, number } => {
                self.slot_wait_ends(KeyAt { node, limit, key }, number);
            }
        }
    }

    /// A request of a leaky bucket, which may wait for its slot as long as the queue is.
    pub(super) fn ask_for_slot(&mut self, at: KeyAt, cost: u32) {
        let request = SlotRequest::new(cost, u64::MAX);
        let SlotContext { now, is_on_policy, .. } = self.slot_context(at);
        if self.setup.form == Form::Check || cost == 0 || is_on_policy {
            return self.slot_at_once(at, request, false);
        }
        if self.tell_if_sure(at, request, false) {
            return;
        }
        self.tickets += 1;
        let number = self.tickets;
        let slots = self.slots(at);
        let rule = slots.keys.rule;
        if !slots.with(at.key, now, |entry| entry.held.is_long(rule, now)) {
            let ask = SlotAsk { owed: 0, own: cost, ahead: 0 };
            let _ = self.ask_store_for_slot(at, request, ask, false);
            return;
        }
        slots.with(at.key, now, |entry| entry.waited_for = entry.waited_for.saturating_add(cost));
        let line = slots.lines.entry(at.key).or_default();
        line.push_back(Caller { number, request, since: now });
        if line.len() == 1 {
            return self.serve_line(at);
        }
        let node = &self.nodes[at.node];
        let until = now.plus_micros(node.terms[at.limit].max_wait_us);
        let what = SlotHappening::WaitEnds { limit: at.limit, key: at.key, number };
        self.plan(node.clock.world_us(until), Happening::Slots { node: at.node, what });
    }

    /// What the node alone can say. What the key wants of the store is asked for.
    fn look(&mut self, at: KeyAt, request: SlotRequest, credit: Option<u32>) -> SlotAnswer {
        let (context, slots) = (self.slot_context(at), self.slots(at));
        let (rule, mut asked) = (slots.keys.rule, None);
        let ask = |ask| {
            let (done, answer) = oneshot::channel();
            asked = Some((ask, done));
            Some(answer)
        };
        let answer = slots
            .with(at.key, context.now, |entry| entry.look(rule, request, credit, context, ask));
        if let Some((ask, done)) = asked {
            let wait_us = self.nodes[at.node].terms[at.limit].background_wait_us();
            let (cost, deed) = (ask.tokens(), SlotKey::deed_of(ask));
            let charge = Charge { cost, within_us: u64::MAX, deed, wait_us };
            // Where the store is away, the key finds that nobody will answer.
            let _ = self.call_for_slots(at, &charge, Asker::Key(done));
        }
        answer
    }

    fn slot_at_once(&mut self, at: KeyAt, request: SlotRequest, waited: bool) {
        let credit = self.nodes[at.node].credits[at.limit].first;
        let answer = self.look(at, request, Some(credit));
        let is_unsure = matches!(answer, SlotAnswer::Unsure { .. });
        if is_unsure && self.slot_context(at).is_on_policy {
            return self.tell_by_policy(at, request, waited);
        }
        self.tell_slot(at, request, answer, waited);
    }

    fn tell_by_policy(&mut self, at: KeyAt, request: SlotRequest, waited: bool) {
        let (now, terms) = (self.slot_context(at).now, self.nodes[at.node].terms[at.limit]);
        let delay_us = self.slots(at).by_policy(at.key, request, &terms, now);
        self.tell(at, request, (delay_us, false), waited);
    }

    fn tell_slot(&mut self, at: KeyAt, request: SlotRequest, answer: SlotAnswer, waited: bool) {
        let rule = self.slots(at).keys.rule;
        let told = match answer {
            SlotAnswer::Allowed(turn) => (Some(rule.micros(turn.delay)), true),
            SlotAnswer::Denied(_) => (None, true),
            SlotAnswer::OnCredit(_) => (Some(0), false),
            SlotAnswer::Unsure { is_idle, .. } => {
                ((is_idle && request.cost == 0).then_some(0), false)
            }
        };
        self.tell(at, request, told, waited);
    }

    /// Tells a caller how long it waits by its node's clock, if it is allowed, and whether that is sure.
    fn tell(&mut self, at: KeyAt, request: SlotRequest, told: (Option<u64>, bool), waited: bool) {
        let ((delay_us, sure), clock) = (told, &self.nodes[at.node].clock);
        let begins = clock.now(self.now_us).plus_micros(delay_us.unwrap_or(0));
        let delay_world_us = clock.world_us(begins).saturating_sub(self.now_us);
        let allowed = delay_us.is_some();
        let told = Told { allowed, sure, waited, delay_us: delay_world_us };
        self.record(at.node, at.key, request.cost, told);
    }

    /// Tells the caller if the node alone is sure. Returns whether it was.
    fn tell_if_sure(&mut self, at: KeyAt, request: SlotRequest, waited: bool) -> bool {
        let answer = self.look(at, request, None);
        let is_sure = !matches!(answer, SlotAnswer::Unsure { .. });
        if is_sure {
            self.tell_slot(at, request, answer, waited);
        }
        is_sure
    }

    // ---- the line of a key --------------------------------------------------------------------

    /// One caller after the other is told, until one has to ask the store.
    fn serve_line(&mut self, at: KeyAt) {
        while let Some(&Caller { request, since, .. }) =
            self.slots(at).lines.get(&at.key).and_then(VecDeque::front)
        {
            let context = self.slot_context(at);
            let within_us = match request.within_us {
                u64::MAX => u64::MAX,
                within_us => within_us.saturating_sub(context.now.micros_since(since)),
            };
            let request = SlotRequest { within_us, is_again: true, ..request };
            if !self.tell_if_sure(at, request, true) {
                let (context, slots) = (self.slot_context(at), self.slots(at));
                let rule = slots.keys.rule;
                let wanted =
                    |entry: &mut SlotKey| entry.wanted_for_all(rule, request.cost, context);
                let ask = slots.with(at.key, context.now, wanted);
                if self.ask_store_for_slot(at, request, ask, true) {
                    return;
                }
            }
            self.leave_line(at);
        }
    }

    /// The first of a line has been told.
    fn leave_line(&mut self, at: KeyAt) {
        let first = self.slots(at).lines.get_mut(&at.key).and_then(VecDeque::pop_front);
        if let Some(Caller { request, .. }) = first {
            self.no_longer_waits(at, request);
        }
    }

    fn no_longer_waits(&mut self, at: KeyAt, request: SlotRequest) {
        let now = self.slot_context(at).now;
        self.slots(at).with(at.key, now, |entry| {
            entry.waited_for = entry.waited_for.saturating_sub(request.cost);
        });
    }

    /// A caller has stood in its line for as long as it may; the first asks the store, which has a time of its own.
    fn slot_wait_ends(&mut self, at: KeyAt, number: u64) {
        let Some(line) = self.slots(at).lines.get_mut(&at.key) else { return };
        let place = line.iter().position(|caller| caller.number == number);
        if let Some(Caller { request, .. }) =
            place.filter(|place| *place > 0).and_then(|place| line.remove(place))
        {
            self.slot_at_once(at, SlotRequest { is_again: true, ..request }, true);
            self.no_longer_waits(at, request);
        }
    }

    // ---- calls of the store -------------------------------------------------------------------

    /// Asks the store. Returns whether it is called: if it is away, the outage policy has decided.
    fn ask_store_for_slot(
        &mut self,
        at: KeyAt,
        request: SlotRequest,
        ask: SlotAsk,
        is_first: bool,
    ) -> bool {
        let wait_us = self.nodes[at.node].terms[at.limit].max_wait_us;
        let (cost, within_us) = (ask.tokens(), request.within_us);
        let charge = Charge { cost, within_us, deed: Deed::Ask, wait_us };
        let is_called = self.call_for_slots(at, &charge, Asker::Caller { request, ask, is_first });
        if !is_called {
            self.tell_by_policy(at, request, is_first);
        }
        is_called
    }

    /// Calls the store. Returns whether it is called: not while it is away.
    fn call_for_slots(&mut self, at: KeyAt, charge: &Charge, asker: Asker) -> bool {
        let &Charge { cost, within_us, deed, wait_us } = charge;
        let (began, slots) = (self.slot_context(at).now, self.slots(at));
        if !slots.outage.may_call(began, wait_us) {
            return false;
        }
        let key = at.key.to_le_bytes().as_slice().into();
        let (limit, rule, slot_within_us) = (slots.info, slots.key_rule, within_us);
        let request = ExactRequest { limit, rule, key, cost, deed, slot_within_us, windows: None };
        self.traffic.store_calls += 1;
        self.traffic.keys_synced += 1;
        self.traffic.sent += 1;
        self.tickets += 1;
        let number = self.tickets;
        let node = &mut self.nodes[at.node];
        node.slot_calls.insert(number, SlotCall { at, began, wait_us, asker });
        let ends_us = node.clock.world_us(began.plus_micros(wait_us));
        let what = SlotHappening::CallEnds { number };
        self.plan(ends_us, Happening::Slots { node: at.node, what });
        self.transmit(at.node, Call::Slots { number, request });
        true
    }

    /// The store has answered a call, unless its time was over.
    fn slot_call_answered(
        &mut self,
        node: usize,
        number: u64,
        reply: Result<ExactReply, StoreError>,
    ) {
        let Some(call) = self.nodes[node].slot_calls.remove(&number) else { return };
        let SlotCall { at, began, asker, .. } = call;
        let now = self.slot_context(at).now;
        let outage = &mut self.slots(at).outage;
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                outage.ended(Err(error), began, now);
                return self.slot_call_failed(at, &asker);
            }
        };
        outage.ended(Ok(()), began, now);
        let answer = ExactAnswer { reply, asked: began, answered: now };
        let Some(grant) = answer.slot_grant() else { return self.slot_call_failed(at, &asker) };
        let (request, ask, is_first) = match asker {
            Asker::Key(done) => {
                // The key may have been forgotten meanwhile.
                let _ = done.send(Ok(answer));
                return;
            }
            Asker::Caller { request, ask, is_first } => (request, ask, is_first),
        };
        let slots = self.slots(at);
        let rule = slots.keys.rule;
        let start = slots.with(at.key, now, |entry| entry.held.install(rule, ask, grant));
        self.tell_slot(at, request, grant.told(rule, start, request.within_us, now), true);
        if is_first {
            self.leave_line(at);
            self.serve_line(at);
        }
    }

    /// A call has had its time.
    fn slot_call_times_out(&mut self, node: usize, number: u64) {
        let Some(call) = self.nodes[node].slot_calls.remove(&number) else { return };
        let SlotCall { at, began, wait_us, asker } = call;
        let (now, waited) = (self.slot_context(at).now, Duration::from_micros(wait_us));
        self.slots(at).outage.ended(Err(StoreError::TimedOut(waited)), began, now);
        self.traffic.store_errors += 1;
        self.slot_call_failed(at, &asker);
    }

    /// The outage policy decides about a caller; a key asks again later.
    fn slot_call_failed(&mut self, at: KeyAt, asker: &Asker) {
        if let &Asker::Caller { request, is_first, .. } = asker {
            self.tell_by_policy(at, request, true);
            if is_first {
                self.leave_line(at);
                self.serve_line(at);
            }
        }
    }
}
