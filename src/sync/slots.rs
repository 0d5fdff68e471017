//! The slots of a leaky bucket that nodes share, as one node has them of one key.
//!
//! The store has one number for a key: when its next slot begins. A node that asks for `n` tokens is given the next `n`
//! slots, which are then nobody else's: so the starts of all nodes are on one grid. What is held and not used passes. Nodes
//! take slots ahead only where the key's queue is so long that enough requests come before them.
//!
//! Times are in the units of the key's rule, since the origin of the node's clock.

use std::collections::VecDeque;

use crate::algorithm::{Turn, TurnRule};
use crate::time::Timestamp;

/// What is owed is remembered for so long after its slot, if nobody asks for the key.
const OWED_US: u64 = 1_000_000;
/// Another node may have reset the key since: what the store said so long ago is asked again before it denies.
const HEARD_US: u64 = 1_000_000;
/// Demand is a mean over about this time.
const DEMAND_US: u64 = 1_000_000;
/// The most tokens that a node takes ahead in one question.
const AHEAD_MAX: u64 = 1 << 20;

/// A node holds no more slots than it needs in so long: where requests stop, what is held passes unused.
const AHEAD_US: u64 = 250_000;

/// The most slots that one question is about beside the caller's own, in units: those of half the queue, or of a tick.
fn most_asked(rule: &TurnRule, tick_us: u64) -> u64 {
    (rule.max_delay(u64::MAX) / 2).max(tick_us.saturating_mul(rule.scale().rate as u64))
}

/// The slots that all nodes together may hold for requests to come, in units: [`most_asked`], but no more than those of
/// [`AHEAD_US`], or of a tick.
fn most_ahead(rule: &TurnRule, tick_us: u64) -> u64 {
    let soon = AHEAD_US.max(tick_us).saturating_mul(rule.scale().rate as u64);
    most_asked(rule, tick_us).min(soon)
}

/// Free slots, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    next: u64,
    end: u64,
}

/// What a node holds of a key, and knows of the rest.
#[derive(Debug, Default)]
pub(crate) struct HeldSlots {
    /// The earliest first. None overlaps another.
    spans: VecDeque<Span>,
    /// When the store's next slot begins by its last word; `None` before it spoke.
    next: Option<u64>,
    /// When it spoke last.
    heard: Timestamp,
    /// How long the store took to answer last, in microseconds; `None` before it did.
    round_trip_us: Option<u64>,
    /// Tokens spent on credit that the store has not charged.
    owed: u32,
    demand: Demand,
}

/// How fast a key is asked for.
#[derive(Debug, Default)]
struct Demand {
    /// Tokens asked for since.
    asked: u64,
    since: Timestamp,
    /// Tokens per microsecond before that.
    rate: f64,
}

impl Demand {
    /// Brings the mean up to date once a tick. Returns whether it did: the first call does.
    fn observe(&mut self, now: Timestamp, tick_us: u64) -> bool {
        let is_new = self.since == Timestamp::ZERO;
        let passed_us = now.micros_since(self.since);
        if passed_us < tick_us && !is_new {
            return false;
        }
        let recent = if is_new { 0.0 } else { self.asked as f64 / passed_us as f64 };
        self.rate += (recent - self.rate) * passed_us as f64 / (passed_us + DEMAND_US) as f64;
        (self.asked, self.since) = (0, now);
        true
    }
}

/// What a request is told by this node alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotAnswer {
    /// It may go on after the delay.
    Allowed(Turn),
    /// It cannot: the store would say so too.
    Denied(Turn),
    /// It may go on now; the store has not been asked.
    OnCredit(Turn),
    /// Only the store knows. `is_idle`: by what this node knows, nobody waits for a slot.
    Unsure { turn: Turn, is_idle: bool },
}

/// What the store is to be asked for, in the order in which it gives the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotAsk {
    /// Tokens that are spent already.
    pub(crate) owed: u32,
    /// Those of the caller who asks.
    pub(crate) own: u32,
    /// Tokens that others wait for, or will ask for.
    pub(crate) ahead: u32,
}

impl SlotAsk {
    /// All of them.
    pub(crate) fn tokens(&self) -> u32 {
        self.owed.saturating_add(self.own).saturating_add(self.ahead)
    }
}

/// What the store did about a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotGrant {
    pub(crate) is_allowed: bool,
    /// When it said so, by this node's clock, as well as it knows.
    pub(crate) at: Timestamp,
    /// How far ahead the next slot was then, after what was allowed, in units.
    pub(crate) ahead: u64,
    /// How long question and answer took, in microseconds.
    pub(crate) round_trip_us: u64,
}

impl SlotGrant {
    /// What a caller is told that may wait `within_us`, whose own slot begins at `start`, if one was given.
    pub(crate) fn told(
        &self,
        rule: &TurnRule,
        start: Option<u64>,
        within_us: u64,
        now: Timestamp,
    ) -> SlotAnswer {
        let (max_delay, now) = (rule.max_delay(within_us), rule.units_at(now));
        let ahead = (rule.units_at(self.at) + self.ahead).saturating_sub(now);
        match start {
            Some(start) => {
                let delay = start.saturating_sub(now);
                SlotAnswer::Allowed(Turn { ahead, delay, max_delay })
            }
            None => SlotAnswer::Denied(Turn { ahead, delay: 0, max_delay }),
        }
    }
}

impl HeldSlots {
    /// Notes that a request was made.
    pub(crate) fn count(&mut self, cost: u32) {
        self.demand.asked += u64::from(cost);
    }

    /// Decides about a request of `cost` tokens that may wait `within_us` for its slot. A cost of 0 takes nothing, and tells
    /// what one token would be told.
    pub(crate) fn decide(
        &mut self,
        rule: &TurnRule,
        cost: u32,
        within_us: u64,
        now: Timestamp,
    ) -> SlotAnswer {
        let now = rule.units_at(now);
        let (units, max_delay) = (rule.units_of(cost.max(1).into()), rule.max_delay(within_us));
        let token = rule.units_of(1);
        self.spans.retain(|span| span.end >= span.next.max(now) + token);
        let start = |span: &Span| span.next.max(now);
        let known = self.next.unwrap_or(0).max(now);
        // Slots of before a reset, or a loss of the store, may lie far behind those that it gives now.
        let trip = self.round_trip_us.unwrap_or(0).saturating_mul(rule.scale().rate as u64);
        let is_next = |span: &Span| start(span) <= known.saturating_add(trip);
        let fits = |span: &Span| span.end >= start(span) + units && is_next(span);
        let found = self.spans.iter().position(fits);
        let begins = found.map_or(known, |index| start(&self.spans[index]));
        let turn = Turn { ahead: begins - now, delay: 0, max_delay };
        if begins - now > max_delay {
            return SlotAnswer::Denied(turn);
        }
        let Some(index) = found else {
            let is_idle = known == now && self.spans.is_empty();
            return SlotAnswer::Unsure { turn, is_idle };
        };
        if cost > 0 {
            self.spans[index].next = begins + units;
        }
        let has_room = |span: &&Span| span.end >= start(span) + token;
        let next = self.spans.iter().find(has_room).map_or(known, start);
        SlotAnswer::Allowed(Turn { ahead: next - now, delay: begins - now, max_delay })
    }

    /// The store has reset the key: its slots begin anew. Those that were given to callers stay theirs.
    pub(crate) fn reset(&mut self, now: Timestamp) {
        self.spans.clear();
        (self.next, self.owed, self.heard) = (None, 0, now);
    }

    /// Whether the store spoke last so long ago that another node may have reset the key since.
    pub(crate) fn is_old(&self, now: Timestamp) -> bool {
        now.micros_since(self.heard) >= HEARD_US
    }

    /// Tokens spent on credit that the store has not charged.
    pub(crate) fn owed(&self) -> u32 {
        self.owed
    }

    /// Spends `cost` tokens before the store has heard of it.
    pub(crate) fn spend_on_credit(&mut self, rule: &TurnRule, cost: u32, now: Timestamp) {
        self.owed += cost;
        self.next = Some(rule.units_at(now) + rule.units_of(cost.into()));
    }

    /// Gives back a slot that was to be used from `start` on and will not be.
    pub(crate) fn give_back(&mut self, rule: &TurnRule, cost: u32, start: u64) {
        let span = Span { next: start, end: start + rule.units_of(cost.into()) };
        let at = self.spans.partition_point(|other| other.next < span.next);
        self.spans.insert(at, span);
    }

    /// What the store is to be asked for now though nobody waits, if anything: what is owed at once, slots ahead once a
    /// tick.
    pub(crate) fn wanted(
        &mut self,
        rule: &TurnRule,
        now: Timestamp,
        tick_us: u64,
        nodes: u32,
    ) -> Option<SlotAsk> {
        let is_tick = self.demand.observe(now, tick_us);
        if self.owed > 0 {
            return Some(SlotAsk { owed: self.owed, own: 0, ahead: 0 });
        }
        // The store would not give more.
        let is_full = self.queue(rule, now) > rule.max_delay(u64::MAX);
        let ahead = if is_tick && !is_full { self.ahead(rule, now, tick_us, nodes) } else { 0 };
        (ahead > 0).then_some(SlotAsk { owed: 0, own: 0, ahead })
    }

    /// Whether callers should ask together: the queue is so long that their slots do not pass while the answer is on its
    /// way.
    pub(crate) fn is_long(&self, rule: &TurnRule, now: Timestamp) -> bool {
        self.round_trip_us.is_some_and(|us| rule.micros(self.queue(rule, now)) > 2 * us)
    }

    /// What the store is to be asked for by a caller on behalf of others too, who wait for so many tokens, of which some are
    /// on their way.
    pub(crate) fn wanted_for(
        &mut self,
        rule: &TurnRule,
        (own, others, coming): (u32, u32, u32),
        now: Timestamp,
        tick_us: u64,
        nodes: u32,
    ) -> SlotAsk {
        self.demand.observe(now, tick_us);
        let ahead = others.saturating_add(self.ahead(rule, now, tick_us, nodes));
        let ahead = ahead.saturating_sub(coming);
        // Others may wait too: no more than what can begin within the queue. By an older view the store may be asked for as
        // much again.
        let room = rule.max_delay(u64::MAX).saturating_sub(self.queue(rule, now));
        let room = (room / rule.units_of(1)).saturating_sub(own.into());
        let most = (most_asked(rule, tick_us) / rule.units_of(1)).max(1);
        let room = room.min(most).min(u32::MAX.into());
        SlotAsk { owed: self.owed, own, ahead: ahead.min(room as u32) }
    }

    /// How far ahead the store's next slot is, in units.
    fn queue(&self, rule: &TurnRule, now: Timestamp) -> u64 {
        self.next.map_or(0, |next| next.saturating_sub(rule.units_at(now)))
    }

    /// Tokens to take ahead: what is asked for in half the time of the queue, or in [`AHEAD_US`] if that is less, without
    /// what is held; at most this node's part of the slots of that time, or of a tick if that is longer.
    fn ahead(&self, rule: &TurnRule, now: Timestamp, tick_us: u64, nodes: u32) -> u32 {
        let (token, queue) = (rule.units_of(1), self.queue(rule, now));
        let held: u64 = self.spans.iter().map(|span| (span.end - span.next) / token).sum();
        let soon_us = (rule.micros(queue) / 2).min(AHEAD_US);
        let expected = (self.demand.rate * soon_us as f64) as u64;
        let slots = most_ahead(rule, tick_us);
        let part = slots.div_ceil(token.saturating_mul(nodes.max(1).into()));
        expected.saturating_sub(held).min(part).min(AHEAD_MAX) as u32
    }

    /// Takes in what the store did when it was asked for something. Returns when the first slot after those that were owed
    /// begins, the caller's own; `None` if nothing was given.
    pub(crate) fn install(
        &mut self,
        rule: &TurnRule,
        asked: SlotAsk,
        grant: SlotGrant,
    ) -> Option<u64> {
        let SlotGrant { is_allowed, ahead, at, round_trip_us } = grant;
        let end = rule.units_at(at) + ahead;
        if is_allowed {
            self.owed -= asked.owed.min(self.owed);
        }
        if at >= self.heard {
            // Answers may be taken in in another order than the store gave them. What is owed comes before the next slot.
            let next = end + rule.units_of(self.owed.into());
            (self.next, self.round_trip_us, self.heard) = (Some(next), Some(round_trip_us), at);
        }
        if !is_allowed {
            return None;
        }
        let next = end.saturating_sub(rule.units_of(asked.ahead.into()));
        if end > next {
            let at = self.spans.partition_point(|other| other.next < next);
            self.spans.insert(at, Span { next, end });
        }
        Some(next.saturating_sub(rule.units_of(asked.own.into())))
    }

    /// Whether all of it is past; what is owed only long after that.
    pub(crate) fn is_idle(&self, rule: &TurnRule, now: Timestamp) -> bool {
        let passed_us = if self.owed > 0 { OWED_US } else { 0 };
        let now = rule.units_at(now.minus_micros(passed_us));
        self.next.is_none_or(|next| next <= now) && self.spans.iter().all(|span| span.end <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{KeyRule, LeakyBucket, Rule};

    const TOKEN_US: u64 = 10_000;
    const TICK_US: u64 = 50_000;

    /// 100 a second, with a queue of 100 ms.
    fn rule() -> TurnRule {
        let queue = std::time::Duration::from_millis(100);
        let rule: Rule = LeakyBucket::per_second(100).queue(queue).into();
        match rule.key_rule("x", false).unwrap() {
            KeyRule::Turn(rule) => rule,
            other => panic!("{other:?}"),
        }
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1_000_000 + 1000 * millis)
    }

    fn slots(count: u64) -> u64 {
        rule().units_of(count)
    }

    /// What the store says at `millis`, a millisecond after it was asked, where its next slot is so many slots ahead.
    fn grant(is_allowed: bool, millis: u64, ahead: u64) -> SlotGrant {
        SlotGrant { is_allowed, at: at(millis), ahead: slots(ahead), round_trip_us: 1000 }
    }

    fn asked(owed: u32, own: u32, ahead: u32) -> SlotAsk {
        SlotAsk { owed, own, ahead }
    }

    fn delay(answer: SlotAnswer) -> Option<u64> {
        match answer {
            SlotAnswer::Allowed(turn) => Some(rule().micros(turn.delay)),
            _ => None,
        }
    }

    #[test]
    fn slots_that_are_held_are_given_one_after_the_other_and_pass() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        // The caller's own slot is the first of four; three are held.
        let own = held.install(&rule, asked(0, 1, 3), grant(true, 0, 5)).unwrap();
        assert_eq!(own, rule.units_at(at(0)) + slots(1));
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(1))), Some(19_000));
        // The second passes unused; what is left of it is no slot.
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(31))), Some(0));
        let unsure = held.decide(&rule, 1, u64::MAX, at(45));
        assert!(matches!(unsure, SlotAnswer::Unsure { is_idle: false, .. }), "{unsure:?}");
    }

    #[test]
    fn request_waits_no_longer_than_it_may_and_needs_slots_in_a_row() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        held.install(&rule, asked(0, 0, 2), grant(true, 0, 3)).unwrap();
        assert!(matches!(held.decide(&rule, 1, 9_000, at(0)), SlotAnswer::Denied(_)));
        let three = held.decide(&rule, 3, u64::MAX, at(0));
        assert!(matches!(three, SlotAnswer::Unsure { .. }), "{three:?}");
        assert_eq!(delay(held.decide(&rule, 2, u64::MAX, at(0))), Some(10_000));
    }

    #[test]
    fn queue_beyond_what_a_request_may_wait_is_a_sure_denial_without_a_question() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        assert_eq!(held.install(&rule, asked(0, 1, 0), grant(false, 0, 12)), None);
        let SlotAnswer::Denied(turn) = held.decide(&rule, 1, u64::MAX, at(0)) else { panic!() };
        assert_eq!(rule.wait_us(turn, 1), 20_000);
        assert!(matches!(held.decide(&rule, 1, u64::MAX, at(20)), SlotAnswer::Unsure { .. }));
    }

    #[test]
    fn request_on_credit_is_charged_with_the_next_question() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        let new = held.decide(&rule, 1, 0, at(0));
        assert!(matches!(new, SlotAnswer::Unsure { is_idle: true, .. }), "{new:?}");
        held.spend_on_credit(&rule, 1, at(0));
        assert!(matches!(held.decide(&rule, 1, 0, at(5)), SlotAnswer::Denied(_)));
        assert_eq!(held.wanted(&rule, at(5), TICK_US, 4), Some(asked(1, 0, 0)));
        held.install(&rule, asked(1, 0, 0), grant(true, 6, 1));
        assert_eq!((held.owed(), held.wanted(&rule, at(6), TICK_US, 4)), (0, None));
        assert!(!held.is_idle(&rule, at(15)) && held.is_idle(&rule, at(16)));
    }

    #[test]
    fn slot_that_is_given_back_goes_to_the_next_request() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        held.install(&rule, asked(0, 0, 3), grant(true, 0, 6)).unwrap();
        let first = rule.units_at(at(0)) + slots(3);
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(0))), Some(30_000));
        held.give_back(&rule, 1, first);
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(0))), Some(30_000));
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(0))), Some(40_000));
    }

    #[test]
    fn reset_key_begins_anew_and_an_answer_from_before_does_not_bring_its_queue_back() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        held.install(&rule, asked(0, 1, 0), grant(false, 0, 12));
        assert!(matches!(held.decide(&rule, 1, 0, at(5)), SlotAnswer::Denied(_)));
        assert!(!held.is_old(at(999)) && held.is_old(at(1000)));
        held.reset(at(10));
        held.install(&rule, asked(0, 1, 0), grant(false, 9, 12));
        let anew = held.decide(&rule, 1, 0, at(11));
        assert!(matches!(anew, SlotAnswer::Unsure { is_idle: true, .. }), "{anew:?}");
    }

    /// Who asked for a crowd took slots that began long after anybody could wait for them, and other nodes had none.
    #[test]
    fn caller_who_asks_for_a_crowd_takes_no_more_than_the_queue_holds() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        held.install(&rule, asked(0, 1, 0), grant(true, 0, 5)).unwrap();
        assert_eq!(held.wanted_for(&rule, (1, 500, 0), at(0), TICK_US, 4), asked(0, 1, 4));
        assert_eq!(held.wanted_for(&rule, (100, 900, 0), at(0), TICK_US, 4), asked(0, 100, 0));
    }

    #[test]
    fn answer_that_is_taken_in_late_does_not_shorten_the_queue() {
        let (rule, mut held) = (rule(), HeldSlots::default());
        held.install(&rule, asked(0, 1, 0), grant(true, 5, 12)).unwrap();
        held.install(&rule, asked(0, 0, 1), grant(true, 4, 3)).unwrap();
        // Of the earlier answer its slot is held, and the queue is that of the later one.
        assert_eq!(delay(held.decide(&rule, 1, u64::MAX, at(5))), Some(19_000));
        assert!(matches!(held.decide(&rule, 1, u64::MAX, at(5)), SlotAnswer::Denied(_)));
    }

    #[test]
    fn slots_are_taken_ahead_only_as_far_as_enough_requests_come_before_them() {
        let rule = rule();
        let ahead = |requests_per_tick: u32, queue: u64| {
            let mut held = HeldSlots::default();
            let mut wanted = None;
            for tick in 0..200 {
                held.install(&rule, asked(0, 0, 0), grant(false, 50 * tick, queue));
                for _ in 0..requests_per_tick {
                    held.count(1);
                }
                wanted = held.wanted(&rule, at(50 * tick), TICK_US, 1);
            }
            wanted.map_or(0, |ask| ask.ahead)
        };
        // Half of what comes in the time of the queue: with one in a tick, one in 100 ms.
        assert_eq!([ahead(1, 8), ahead(1, 10)], [0, 0]);
        assert_eq!([ahead(5, 0), ahead(5, 4), ahead(5, 8)], [0, 1, 3]);
        // A node alone takes a tick's slots at most, and none while the store would give none.
        assert_eq!([ahead(100, 10), ahead(100, 11)], [5, 0]);
        assert_eq!(rule.micros(slots(5)), 5 * TOKEN_US);
    }

    #[test]
    fn queue_is_long_if_it_outlasts_two_round_trips() {
        let rule = rule();
        assert!(!HeldSlots::default().is_long(&rule, at(0)), "no round trip is known");
        // The queue is 50 ms long.
        for (round_trip_us, is_long) in [(24_999, true), (25_000, false)] {
            let mut held = HeldSlots::default();
            let granted = SlotGrant { round_trip_us, ..grant(true, 0, 5) };
            held.install(&rule, asked(0, 1, 0), granted);
            assert_eq!(held.is_long(&rule, at(0)), is_long, "{round_trip_us}");
        }
    }
}
