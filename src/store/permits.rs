//! The permits of a concurrency limit as `lua/permits.lua` has them, step for step.

use std::collections::HashMap;
use std::sync::Arc;

use super::exact::KEEP_US;
#[cfg(feature = "server")]
use super::timed_permits::TimedPermitRelease;
use super::timed_permits::TimedPermits;
use crate::error::StoreError;
use crate::sync::message::InstanceId;
use crate::sync::{
    MESSAGE_NUMBERS, PermitKey, PermitMessage, PermitReply, REPLY_NUMBERS, TimedPermit,
};

#[cfg(test)]
mod cluster;
#[cfg(all(test, feature = "redis"))]
mod tests;

/// A message about a key.
#[derive(Clone, Debug)]
pub(crate) struct PermitRequest {
    /// The limit's name.
    pub(crate) limit: Arc<str>,
    pub(crate) key: PermitKey,
    pub(crate) instance: InstanceId,
    pub(crate) message: PermitMessage,
}

impl PermitRequest {
    /// The script's `ARGV[1]`. The record is kept for `keep_us` longer than it counts.
    #[cfg(feature = "redis")]
    pub(crate) fn bytes(&self, keep_us: u64) -> Vec<u8> {
        let numbers = self.message.numbers(keep_us);
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        bytes.extend(self.instance);
        for TimedPermit { id, permits, time_us } in &self.message.timed {
            bytes.extend(id);
            bytes.extend(f64::from(*permits).to_le_bytes());
            bytes.extend((*time_us as f64).to_le_bytes());
        }
        bytes
    }

    /// Reads the script's reply.
    #[cfg(feature = "redis")]
    pub(crate) fn decode(reply: &[u8]) -> Result<PermitReply, StoreError> {
        let (numbers, rest) = reply.as_chunks::<8>();
        if !rest.is_empty() {
            let value = format!("{} bytes", reply.len());
            return Err(StoreError::Reply { field: "permits", value });
        }
        let numbers: Vec<f64> = numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        PermitReply::read(&numbers)
    }
}

/// What the store has of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct NodePermits {
    instance: InstanceId,
    sequence: i64,
    held: i64,
    want: i64,
    until_us: i64,
    since_us: i64,
    asked_us: i64,
    above_us: i64,
    give: i64,
    give_us: i64,
}

/// A message's numbers.
#[derive(Clone, Copy)]
struct Numbers {
    sequence: i64,
    in_use: i64,
    want: i64,
    least: i64,
    waits: i64,
    most: i64,
    lease_us: i64,
    place_us: i64,
    slice_us: i64,
    poll_min_us: i64,
    poll_max_us: i64,
}

impl From<[f64; MESSAGE_NUMBERS]> for Numbers {
    fn from(numbers: [f64; MESSAGE_NUMBERS]) -> Self {
        let [sequence, in_use, want, least, waits, most, lease_us, place_us, slice_us, ..] =
            numbers.map(|number| number as i64);
        let [.., poll_min_us, poll_max_us, _] = numbers.map(|number| number as i64);
        Self {
            sequence,
            in_use,
            want,
            least,
            waits,
            most,
            lease_us,
            place_us,
            slice_us,
            poll_min_us,
            poll_max_us,
        }
    }
}

/// What other nodes lack.
#[derive(Clone, Copy, Debug, Default)]
struct Lacks {
    /// Up to one beyond their part, of those who are before this node, and of those who are after it.
    before: i64,
    after: i64,
    /// Up to their part, and up to one beyond it, without what is on its way to them.
    base: i64,
    more: i64,
    /// When the first node has had a permit beyond its part for long enough.
    due_us: Option<i64>,
}

/// The record of one key.
#[derive(Clone, Debug, Default)]
struct PermitRecord {
    nodes: Vec<NodePermits>,
    ends_us: i64,
    /// Those that no node renews.
    timed: TimedPermits,
}

impl PermitRecord {
    fn receive(
        &mut self,
        instance: InstanceId,
        (numbers, timed): (Numbers, &[TimedPermit]),
        now: i64,
    ) -> [f64; REPLY_NUMBERS] {
        let before = self.nodes.clone();
        self.forget(numbers, now);
        let known = self.nodes.iter().position(|node| node.instance == instance);
        let place = known.unwrap_or(self.nodes.len());
        if known.is_none() {
            self.nodes.push(NodePermits { instance, since_us: now, ..NodePermits::default() });
        }
        let mut me = self.nodes[place];
        let is_new = numbers.sequence > me.sequence;
        let held: i64 = self.nodes.iter().map(|node| node.held).sum();
        let fits = held + i64::from(self.timed.count(now)) <= numbers.most;
        let free_to_go = if is_new && fits { me.held - numbers.in_use } else { 0 };
        let taken_over = self.take_over(timed, free_to_go, now);
        // Nodes have what these leave.
        let timed = i64::from(self.timed.count(now));
        let numbers = Numbers { most: (numbers.most - timed).max(0), ..numbers };
        if is_new {
            me.report(numbers, now);
            self.nodes[place] = me;
        }
        let level = self.level(numbers, now);
        let mut held_by_all: i64 = self.nodes.iter().map(|node| node.held).sum();
        let free = (numbers.most - held_by_all).max(0);
        let lacks = self.lacks(place, level, numbers, now);
        if is_new {
            held_by_all += me.take(free, level, lacks, numbers, now);
            self.nodes[place] = me;
            self.ends_us = now + numbers.lease_us;
        } else {
            self.nodes = before;
        }
        let poll_us = me.poll_us(lacks, numbers, now);
        let give_in_us = (me.give_us - now).max(0);
        let held_by_all = held_by_all + timed;
        [me.held, held_by_all, me.give, give_in_us, poll_us, taken_over].map(|number| number as f64)
    }

    /// Takes over permits of a node that holds so many beside those in use: all or none. Returns how many.
    fn take_over(&mut self, timed: &[TimedPermit], held: i64, now: i64) -> i64 {
        let permits: i64 = timed.iter().map(|one| i64::from(one.permits)).sum();
        if permits > held {
            return 0;
        }
        for one in timed {
            self.timed.add(one.id, one.permits, now + one.time_us as i64);
        }
        permits
    }

    /// Forgets nodes whose lease has ended. A clock that went back makes no lease longer.
    fn forget(&mut self, Numbers { lease_us, slice_us, .. }: Numbers, now: i64) {
        for node in &mut self.nodes {
            node.until_us = node.until_us.min(now + lease_us);
            node.since_us = node.since_us.min(now);
            node.asked_us = node.asked_us.min(now);
            node.above_us = node.above_us.min(now);
            node.give_us = node.give_us.min(now + slice_us);
        }
        self.nodes.retain(|node| node.until_us > now);
    }

    /// The even part: the most that each node can have if all have what they want up to there.
    fn level(&self, Numbers { most, place_us, .. }: Numbers, now: i64) -> i64 {
        let wanted = |node: &NodePermits| {
            if node.is_waiting(place_us, now) { node.want } else { node.held }
        };
        let mut wants: Vec<i64> = self.nodes.iter().map(wanted).collect();
        wants.sort_unstable();
        let mut rest = most;
        for (wanted, nodes) in wants.iter().zip((1..=wants.len() as i64).rev()) {
            let part = rest.div_euclid(nodes).max(0);
            if *wanted > part {
                return part;
            }
            rest -= wanted;
        }
        most
    }

    fn lacks(&self, place: usize, level: i64, numbers: Numbers, now: i64) -> Lacks {
        let Numbers { place_us, slice_us, .. } = numbers;
        let (me, mut lacks) = (self.nodes[place], Lacks::default());
        for (index, node) in self.nodes.iter().enumerate().filter(|(index, _)| *index != place) {
            if node.is_waiting(place_us, now) {
                let missing = (node.want.min(level + 1) - node.held).max(0);
                lacks.base += (node.want.min(level) - node.held).max(0);
                lacks.more += missing;
                let turn = |node: &NodePermits, index: usize| (node.held, node.since_us, index);
                if turn(node, index) < turn(&me, place) {
                    lacks.before += missing;
                } else {
                    lacks.after += missing;
                }
            }
            if node.give > 0 && node.give_us + slice_us > now {
                lacks.base -= node.give;
                lacks.more -= node.give;
            }
            if node.above_us > 0 {
                let due_us = lacks.due_us.unwrap_or(now + slice_us);
                lacks.due_us = Some(due_us.min(node.above_us + slice_us));
            }
        }
        lacks
    }
}

impl NodePermits {
    fn is_waiting(&self, place_us: i64, now: i64) -> bool {
        self.want > self.held && now - self.asked_us <= place_us
    }

    /// Takes in what the node says.
    fn report(&mut self, numbers: Numbers, now: i64) {
        let Numbers { sequence, in_use, want, lease_us, place_us, .. } = numbers;
        if !self.is_waiting(place_us, now) || in_use < self.held {
            self.since_us = now;
        }
        (self.sequence, self.held, self.want) = (sequence, in_use, want.max(in_use));
        (self.until_us, self.asked_us, self.give) = (now + lease_us, now, 0);
    }

    /// Gives the node what is free and its turn, and says what it is to give back. Returns what it got.
    fn take(&mut self, free: i64, level: i64, lacks: Lacks, numbers: Numbers, now: i64) -> i64 {
        let Numbers { in_use, least, waits, slice_us, .. } = numbers;
        let Lacks { before, after, base, more, .. } = lacks;
        let mut granted = (self.want.min(level + 1) - in_use).min(free - before).max(0);
        let rest = free - granted - before - after;
        granted += (self.want - in_use - granted).min(rest).max(0);
        if granted < least {
            granted = 0;
        }
        self.held = in_use + granted;
        let free = free - granted;
        if granted > 0 {
            self.since_us = now;
        }
        if waits == 0 {
            self.want = self.held;
        }
        if self.held <= level {
            self.above_us = 0;
        } else if self.above_us == 0 {
            self.above_us = now;
        }
        let over = self.held - level;
        self.give = over.min(base - free).max((over - 1).min(more - free)).max(0);
        self.give_us = now;
        if self.give == 0 && over > 0 && more > free {
            (self.give, self.give_us) = (1, now.max(self.above_us + slice_us));
        }
        granted
    }

    /// The first in the line asks often, at first and again when another node's time is over.
    fn poll_us(&self, lacks: Lacks, numbers: Numbers, now: i64) -> i64 {
        let Numbers { poll_min_us, poll_max_us, .. } = numbers;
        if lacks.before > 0 {
            return poll_max_us;
        }
        let waited_us = now - self.since_us;
        match lacks.due_us {
            Some(due_us) if due_us > now => {
                let poll_us = (waited_us / 8).min(poll_max_us).max(poll_min_us);
                poll_us.min(due_us - now).max(poll_min_us)
            }
            due_us => {
                let overdue_us = due_us.map_or(waited_us, |due_us| now - due_us);
                (waited_us.min(overdue_us) / 8).min(poll_max_us).max(poll_min_us)
            }
        }
    }
}

/// The script's reference, and its records.
#[derive(Debug, Default)]
pub(crate) struct PermitModel {
    records: HashMap<(Arc<str>, PermitKey), PermitRecord>,
}

impl PermitModel {
    /// Does what the script does at `time_us` since 1970.
    pub(crate) fn receive(
        &mut self,
        request: &PermitRequest,
        time_us: u64,
    ) -> Result<PermitReply, StoreError> {
        PermitReply::read(&self.reply(request, time_us))
    }

    fn reply(&mut self, request: &PermitRequest, time_us: u64) -> [f64; REPLY_NUMBERS] {
        let name = (request.limit.clone(), request.key.clone());
        let record = self.records.entry(name).or_default();
        let PermitRequest { instance, message, .. } = request;
        let said = (message.numbers(KEEP_US).into(), &*message.timed);
        record.receive(*instance, said, time_us as i64)
    }

    /// Releases timed permits, at `time_us` since 1970. Returns how many there were.
    #[cfg(feature = "server")]
    pub(crate) fn release(&mut self, request: &TimedPermitRelease, time_us: u64) -> u32 {
        let name = (request.limit.clone(), request.key.clone());
        let record = self.records.get_mut(&name);
        record.map_or(0, |record| record.timed.release(request.id, time_us as i64))
    }

    /// Forgets what counts no more.
    pub(crate) fn expire(&mut self, time_us: u64) {
        let now = time_us as i64;
        self.records.retain(|_, record| record.ends_us > now || record.timed.count(now) > 0);
    }

    /// Records held.
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }
}
