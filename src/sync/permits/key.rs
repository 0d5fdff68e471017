//! One key of a concurrency limit on one node.

use std::collections::VecDeque;

use super::message::{HANDED_OVER_MAX, LEASE_US, PermitMessage, PermitReply, TimedPermit};
use super::{MARGIN_US, PermitAsk};
use crate::sync::backoff::Backoff;
use crate::time::Timestamp;

/// A reply by which no permit is free holds for so long: until some more polls have been answered.
const SHORT_US: u64 = 100_000;

/// A caller without its permits yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) ticket: u64,
    /// Decided by then.
    pub(super) deadline: Timestamp,
    pub(super) ask: PermitAsk,
}

/// A message under way.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) message: PermitMessage,
    pub(super) sent: Timestamp,
    /// It asks for all callers up to this one.
    pub(super) last_ticket: u64,
}

impl Flight {
    /// When what its reply gives ends.
    pub(super) fn leased_until(&self) -> Timestamp {
        self.sent.plus_micros(LEASE_US - MARGIN_US)
    }
}

/// What is known of a key.
#[derive(Debug)]
pub(super) struct KeyPermits {
    /// Permits that callers hold.
    pub(super) in_use: u32,
    /// Permits that the store lets this node hold, until `leased_until`.
    pub(super) allowed: u32,
    pub(super) leased_until: Timestamp,
    /// By then the store has forgotten what it let this node hold.
    pub(super) known_until: Timestamp,
    /// Permits that all nodes held, by the last reply.
    pub(super) held_by_all: u32,
    /// In the order in which they came.
    pub(super) queue: VecDeque<Caller>,
    pub(super) flight: Option<Flight>,
    /// Permits in use that the next message hands over to the store.
    pub(super) to_hand_over: Vec<TimedPermit>,
    /// The store is to be told something now.
    pub(super) has_news: bool,
    /// The store keeps a place for this node in the line of nodes.
    pub(super) is_in_line: bool,
    /// The newest caller included in a message that the store has answered.
    answered_ticket: u64,
    /// Until then it holds that by the store's latest reply no permit was free.
    pub(super) short_until: Timestamp,
    /// Permits to give back, as they come free, and from when on.
    give: (u32, Timestamp),
    /// When to ask again, and when to renew.
    poll_at: Timestamp,
    renew_at: Timestamp,
    pub(super) backoff: Backoff,
    /// When the key is looked at next.
    pub(super) timer: Timestamp,
}

impl Default for KeyPermits {
    fn default() -> Self {
        Self {
            in_use: 0,
            allowed: 0,
            leased_until: Timestamp::ZERO,
            known_until: Timestamp::ZERO,
            held_by_all: 0,
            queue: VecDeque::new(),
            flight: None,
            to_hand_over: Vec::new(),
            has_news: false,
            is_in_line: false,
            answered_ticket: 0,
            short_until: Timestamp::ZERO,
            give: (0, Timestamp::ZERO),
            poll_at: Timestamp::ZERO,
            renew_at: Timestamp::NEVER,
            backoff: Backoff::default(),
            timer: Timestamp::NEVER,
        }
    }
}

impl KeyPermits {
    pub(super) fn has_room(&self, caller: Caller, allowance: u32) -> bool {
        self.in_use.checked_add(caller.ask.cost).is_some_and(|in_use| in_use <= allowance)
    }

    /// Keeps those of `cost` permits that came free for other nodes, if they have less than their part.
    pub(super) fn give_back(&mut self, cost: u32, now: Timestamp) {
        let (give, from) = &mut self.give;
        if now >= *from {
            let back = cost.min(*give).min(self.allowed.saturating_sub(self.in_use));
            *give -= back;
            self.allowed -= back;
            self.has_news |= back > 0;
        }
    }

    /// Takes in the reply to the last message.
    pub(super) fn install(
        &mut self,
        reply: PermitReply,
        flight: &Flight,
        now: Timestamp,
        (poll_us, renew_us): (u64, u64),
    ) {
        // A store gives no more than it was asked for, and takes nothing away that is in use.
        let PermitMessage { in_use, want, waits, .. } = flight.message;
        (self.allowed, self.held_by_all) = (reply.held.clamp(in_use, want), reply.held_by_all);
        self.is_in_line = waits && reply.held < want;
        self.short_until =
            if self.is_in_line { now.plus_micros(SHORT_US) } else { Timestamp::ZERO };
        self.answered_ticket = self.answered_ticket.max(flight.last_ticket);
        self.leased_until = flight.leased_until();
        self.give = (reply.give, now.plus_micros(reply.give_in_us));
        self.backoff.succeeded();
        (self.poll_at, self.renew_at) =
            (now.plus_micros(poll_us), flight.sent.plus_micros(renew_us));
    }

    /// What the store is to know now. Permits that are handed over are in use no more.
    pub(super) fn message(&mut self, sequence: u64, max: u32) -> PermitMessage {
        let timed = self.next_lots();
        self.in_use -= timed.iter().map(|one| one.permits).sum::<u32>();
        let costs = || self.queue.iter().map(|caller| caller.ask.cost);
        let wanted = costs().fold(self.in_use, u32::saturating_add);
        PermitMessage {
            sequence,
            in_use: self.in_use,
            want: wanted.min(max.max(self.in_use)),
            least: costs().min().unwrap_or_default(),
            waits: self.has_waiting(),
            max,
            timed,
        }
    }

    /// The permits that are handed over next: no more than the store takes over in a moment.
    fn next_lots(&mut self) -> Vec<TimedPermit> {
        let mut permits = 0;
        let fits = |lot: &&TimedPermit| {
            permits += lot.permits;
            permits <= HANDED_OVER_MAX
        };
        // One lot is never more than that.
        let lots = self.to_hand_over.iter().take_while(fits).count();
        self.to_hand_over.drain(..lots).collect()
    }

    /// Whether the store has been asked for such a caller, or will be with the next poll.
    pub(super) fn is_asked_for(&self, ask: PermitAsk) -> bool {
        ask.within_us.is_some() && self.is_in_line
    }

    /// Whether the store's answer covers this caller: it came after the caller did, or shortly before and there was none.
    pub(super) fn is_answered(&self, caller: Caller, now: Timestamp) -> bool {
        caller.ticket <= self.answered_ticket || now < self.short_until
    }

    fn has_waiting(&self) -> bool {
        self.queue.iter().any(|caller| caller.ask.within_us.is_some())
    }

    /// When the next message is due.
    pub(super) fn send_at(&self) -> Timestamp {
        if self.flight.is_some() {
            return Timestamp::NEVER;
        }
        // Some came free, or an outage policy gave some.
        let is_wrong = self.allowed != self.in_use;
        let leaves_line = self.is_in_line && !self.has_waiting();
        let hands_over = !self.to_hand_over.is_empty();
        let due = if self.has_news || is_wrong || leaves_line || hands_over {
            Timestamp::ZERO
        } else if !self.queue.is_empty() {
            self.poll_at.min(self.renew_at)
        } else if self.in_use > 0 {
            self.renew_at
        } else {
            Timestamp::NEVER
        };
        due.max(self.backoff.not_before())
    }

    /// When the first caller has waited for long enough.
    pub(super) fn deadline(&self) -> Timestamp {
        let deadlines = self.queue.iter().map(|caller| caller.deadline);
        deadlines.min().unwrap_or(Timestamp::NEVER)
    }

    /// Whether no caller holds or wants a permit.
    pub(super) fn is_unused(&self) -> bool {
        self.in_use == 0 && self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_that_come_free_go_back_from_when_the_store_says_and_no_more_than_it_says() {
        let at = Timestamp::from_micros;
        let mut state =
            KeyPermits { allowed: 5, in_use: 1, give: (3, at(10)), ..KeyPermits::default() };
        for (us, cost, allowed, has_news) in [(9, 2, 5, false), (10, 2, 3, true), (11, 2, 2, true)]
        {
            state.has_news = false;
            state.give_back(cost, at(us));
            assert_eq!((state.allowed, state.has_news), (allowed, has_news), "{us}");
        }
        state.has_news = false;
        state.give_back(1, at(12));
        assert_eq!((state.allowed, state.has_news), (2, false), "that was all");
    }

    #[test]
    fn permits_end_here_before_the_store_gives_them_to_others() {
        let mut key = KeyPermits::default();
        let message = key.message(1, 10);
        let flight = Flight { message, sent: Timestamp::from_micros(7), last_ticket: 0 };
        assert!(flight.leased_until() < flight.sent.plus_micros(LEASE_US));
    }
}
