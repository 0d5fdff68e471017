//! The reference model of the store: what the scripts in `lua/` do, in Rust.
//!
//! The script and this module are kept step for step alike; a test runs the same random operations
//! through both and compares every state and reply. Shares are computed in doubles, in the same
//! order of operations on both sides; everything else is integers up to 2^53. A request's numbers
//! are brought within [`NUMBER_MAX`](crate::sync::message::NUMBER_MAX) first, so that no request,
//! however absurd, overflows here or loses a digit in Lua.
//!
//! What holds while a record is remembered: the refill leased out is at most the rate, and refill and depth are no
//! less than what nodes hold. The simulator checks this for each key of a batch that was answered.

use std::collections::HashMap;
use std::sync::Arc;

use crate::sync::message::{
    Entry, Grant, Incarnation, InstanceId, Receipt, Reply, Request, Times, Verdict, natural,
};

mod key;

pub(crate) use key::Key;
use key::{At, RECORD_MARGIN_MS};

/// A lane remembers at least so long.
pub(crate) const LANE_KEEP_MS: i64 = 24 * 3600 * 1000;
/// A node is remembered for so long without a call.
pub(crate) const NODE_KEEP_MS: i64 = 600_000;
/// Keys whose time is over are looked for every so many calls.
const EXPIRY_CALLS: u64 = 4096;
/// A node is marked as alive with its first batch, and then when it was not for so long: counting the
/// nodes at each call would cost as much as several keys.
const MARK_US: i64 = 250_000;
/// The longest silence that a node of the last minute asks for holds.
const TIMES_US: i64 = 60_000_000;
/// No lane waits longer for what its nodes know.
const WAIT_MAX_US: i64 = 30_000_000;
/// No sum that is kept counts for more: Lua's doubles hold every integer up to here.
pub(crate) const SUM_MAX: i64 = 1 << 53;

/// Why a lane gives less than it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reason {
    #[default]
    None,
    /// It lost its memory, or is new: it gives nothing.
    Loss,
    /// It was silent: it keeps back what nodes may have taken under their outage policies.
    Silence,
}

/// A lane waits for what its nodes know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recovery {
    pub(crate) reason: Reason,
    /// When the silence began.
    pub(crate) from_us: i64,
    /// When the loss was found, or the silence was over.
    pub(crate) since_us: i64,
    /// When the lane waits no longer.
    pub(crate) until_us: i64,
    /// Nodes that are to report, 0 if nobody knows how many.
    pub(crate) expected: i64,
    /// Nodes that have nothing left to report.
    pub(crate) settled: i64,
}

/// One lane's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) lanes: i64,
    pub(crate) incarnation: Incarnation,
    /// The lane's time at its last call.
    pub(crate) seen_us: i64,
    /// What the lane's time is ahead of the store's clock.
    pub(crate) offset_us: i64,
    /// How long the record is kept without a call, in milliseconds.
    pub(crate) keep_ms: i64,
    /// Nodes alive when they were counted last, and the most that ever were.
    pub(crate) nodes: i64,
    pub(crate) most_nodes: i64,
    /// The longest silence without an outage, and when it was set.
    pub(crate) silence_us: i64,
    pub(crate) silence_set_us: i64,
    /// When the memory was lost last, 0 if the lane was new.
    pub(crate) lost_us: i64,
    pub(crate) recovery: Recovery,
}

impl Lane {
    fn waits(&self, now_us: i64) -> bool {
        let Recovery { reason, until_us, expected, settled, .. } = self.recovery;
        reason != Reason::None && now_us < until_us && (expected == 0 || settled < expected)
    }

    /// When the silence was over for which the lane waits, 0 if it does not.
    fn silent_until_us(&self) -> i64 {
        if self.recovery.reason == Reason::Silence { self.recovery.since_us } else { 0 }
    }

    /// Whether nothing is given, because memory was lost.
    fn waits_after_loss(&self, now_us: i64) -> bool {
        self.recovery.reason == Reason::Loss && self.waits(now_us)
    }

    /// Whether nodes may not have reported yet what they took while the lane was silent.
    fn waits_after_silence(&self, now_us: i64) -> bool {
        self.recovery.reason == Reason::Silence && self.waits(now_us)
    }

    /// A node calls: judges by the longest silence that a node of the last minute asks for whether
    /// there was an outage.
    fn hear(&mut self, request: &Request, now_us: i64) {
        let silence_us = natural(request.times.silence_us);
        if silence_us >= self.silence_us || now_us - self.silence_set_us > TIMES_US {
            (self.silence_us, self.silence_set_us) = (silence_us, now_us);
        }
        if now_us - self.seen_us > self.silence_us {
            let wait_us = natural(request.times.alive_us);
            self.recover(Reason::Silence, self.seen_us, now_us, wait_us, self.nodes);
        }
        self.seen_us = now_us;
        if !self.waits(now_us) {
            self.recovery = Recovery { since_us: self.recovery.since_us, ..Recovery::default() };
        }
    }

    fn lose(&mut self, request: &Request, now_us: i64) {
        self.lost_us = now_us;
        let wait_us = natural(request.times.lease_us).max(natural(request.times.recovery_us));
        self.recover(Reason::Loss, now_us, now_us, wait_us, natural(request.knowledge.nodes));
    }

    fn recover(&mut self, reason: Reason, from_us: i64, now_us: i64, wait_us: i64, nodes: i64) {
        let earlier = if self.waits(now_us) { self.recovery } else { Recovery::default() };
        self.recovery = Recovery {
            // A loss outlasts a silence that comes on top of it.
            reason: if earlier.reason == Reason::Loss { Reason::Loss } else { reason },
            from_us,
            since_us: now_us,
            until_us: now_us + wait_us.min(WAIT_MAX_US),
            expected: nodes.max(earlier.expected),
            settled: 0,
        };
    }
}

/// Who calls.
#[derive(Clone, Copy, Debug)]
struct Caller {
    /// Nodes alive.
    nodes: i64,
    /// The node has settled for the lane's recovery.
    settled: bool,
    recovery_us: i64,
}

/// What the store knows of one node in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) incarnation: Incarnation,
    /// Its last batch.
    pub(crate) receipt: Receipt,
    /// The reply to that.
    pub(crate) reply: Vec<u8>,
}

/// A whole store in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    /// Calls so far: keys expire every so many.
    calls: u64,
    pub(crate) lanes: HashMap<u32, Lane>,
    pub(crate) nodes: HashMap<(u32, InstanceId), Node>,
    /// When each node was seen last in each lane.
    pub(crate) members: HashMap<u32, HashMap<InstanceId, i64>>,
    /// Until when each node counts among those that have a limit, by lane and limit.
    pub(crate) limit_nodes: HashMap<(u32, Arc<str>), HashMap<InstanceId, i64>>,
    pub(crate) keys: HashMap<(Arc<str>, Arc<[u8]>), Key>,
}

impl Model {
    /// One call of the script at `time_us`, the store's clock.
    pub(crate) fn sync(&mut self, request: &Request, time_us: i64) -> Reply {
        self.calls += 1;
        if self.calls.is_multiple_of(EXPIRY_CALLS) {
            let kept = |key: &Key| key.until_ms > time_us / 1000;
            self.keys.retain(|_, key| kept(key));
        }
        let known_birth_us = request.incarnation.map_or(0, |known| natural(known.birth_us()));
        let mut lane = match self.lanes.get(&request.lane).cloned() {
            Some(lane) => lane,
            None => new_lane(request, time_us, known_birth_us),
        };
        let now_us = (time_us + lane.offset_us).max(lane.seen_us);
        lane.offset_us = now_us - time_us;
        if lane.lanes != i64::from(request.lanes) {
            return reply(&lane, now_us, Verdict::Lanes(lane.lanes as u32));
        }
        let birth_us = lane.incarnation.birth_us();
        let went_back = known_birth_us > birth_us
            || request.incarnation == Some(lane.incarnation)
                && natural(request.knowledge.known_us) > lane.seen_us;
        if went_back {
            // An older state has come back: whatever it knows is out of date.
            return self.reborn(request, lane, now_us, Some(known_birth_us));
        }
        if request.incarnation.is_some_and(|known| known != lane.incarnation) {
            if lane.lost_us == 0 {
                // Whoever called first did not know that the lane had been there before.
                let newcomers = lane.nodes;
                lane.lose(request, now_us);
                lane.recovery.expected += newcomers;
            }
            return self.reborn(request, lane, now_us, None);
        }
        self.applied(request, lane, now_us, time_us)
    }

    /// What follows where the node and the lane know each other by name.
    fn applied(&mut self, request: &Request, mut lane: Lane, now_us: i64, time_us: i64) -> Reply {
        let sequence = natural(request.sequence);
        let place = (request.lane, request.instance);
        let node = self.nodes.get(&place);
        if request.incarnation.is_none()
            && node.is_some_and(|node| node.incarnation != lane.incarnation)
        {
            // A late copy of the node's very first batch: it knows the lane by name since then.
            return reply(&lane, now_us, Verdict::Stale);
        }
        let node = node.filter(|node| node.incarnation == lane.incarnation);
        let last = node.map_or(0, |node| node.receipt.sequence);
        if let Some(node) = node.filter(|node| node.receipt.sequence == sequence) {
            if node.receipt.hash != request.hash() {
                return reply(&lane, now_us, Verdict::Cloned);
            }
            return Reply::decode(&node.reply, &request.entries, request.limits.len())
                .unwrap_or_else(|_| reply(&lane, now_us, Verdict::Cloned));
        }
        if sequence < last {
            return reply(&lane, now_us, Verdict::Stale);
        }
        if sequence > last + 1 {
            if node.is_none() && now_us - natural(request.knowledge.known_us) > NODE_KEEP_MS * 1000
            {
                // The node was away for so long that it is not remembered.
                return reply(&lane, now_us, Verdict::Stale);
            }
            let birth_us = lane.incarnation.birth_us();
            return self.reborn(request, lane, now_us, Some(birth_us));
        }

        let Times { recovery_us, .. } = request.times;
        lane.hear(request, now_us);
        let marked =
            node.map(|node| node.receipt.marked_us).filter(|at_us| now_us - at_us < MARK_US);
        let marked = marked.filter(|_| !request.knowledge.leaving);
        let marked_us = marked.unwrap_or(now_us);
        let mut settled_us = node.map_or(0, |node| node.receipt.settled_us);
        if marked.is_none() {
            self.mark(request, &mut lane, now_us);
        }
        // A batch that is older than this was sent before its node took what it does not tell of.
        let recent = now_us - natural(request.knowledge.sent_us) <= lane.silence_us;
        if request.incarnation.is_none() {
            // Nobody waits for a node that has never called before.
            settled_us = lane.recovery.since_us;
        } else if request.knowledge.settled && recent && settled_us != lane.recovery.since_us {
            settled_us = lane.recovery.since_us;
            lane.recovery.settled += 1;
        }
        let caller = Caller {
            nodes: lane.nodes,
            settled: settled_us == lane.recovery.since_us,
            recovery_us: natural(recovery_us),
        };

        let mut grants = Vec::with_capacity(request.entries.len());
        for entry in &request.entries {
            let grant = self.entry(&entry.bounded(), &mut lane, caller, now_us, time_us / 1000);
            grants.push(grant);
        }
        let limit_nodes = self.count_limit_nodes(request, now_us);
        let answer = Reply { limit_nodes, ..reply(&lane, now_us, Verdict::Applied(grants)) };
        let receipt = Receipt { sequence, marked_us, settled_us, hash: request.hash() };
        let reply = answer.encode(receipt, &request.entries);
        let node = Node { incarnation: lane.incarnation, receipt, reply };
        self.nodes.insert(place, node);
        self.lanes.insert(request.lane, lane);
        answer
    }

    /// Marks the node as alive, or as gone, and counts those that are alive.
    fn mark(&mut self, request: &Request, lane: &mut Lane, now_us: i64) {
        let members = self.members.entry(request.lane).or_default();
        if request.knowledge.leaving {
            members.remove(&request.instance);
        } else {
            members.insert(request.instance, now_us);
        }
        let oldest_us = now_us - natural(request.times.alive_us);
        members.retain(|_, seen_us| *seen_us >= oldest_us);
        lane.nodes = members.len() as i64;
        lane.most_nodes = lane.most_nodes.max(lane.nodes);
    }

    /// Counts the node among those that have each of the limits it names, or no more where it leaves.
    fn count_limit_nodes(&mut self, request: &Request, now_us: i64) -> Vec<i64> {
        let until_us = now_us + natural(request.times.limit_alive_us);
        let mut count = |limit: &Arc<str>| {
            let place = (request.lane, limit.clone());
            let mut nodes = self.limit_nodes.remove(&place).unwrap_or_default();
            if request.knowledge.leaving {
                nodes.remove(&request.instance);
            } else {
                nodes.insert(request.instance, until_us);
            }
            nodes.retain(|_, until_us| *until_us >= now_us);
            let count = nodes.len() as i64;
            if count > 0 {
                self.limit_nodes.insert(place, nodes);
            }
            count
        };
        request.limits.iter().map(&mut count).collect()
    }

    fn entry(
        &mut self,
        entry: &Entry,
        lane: &mut Lane,
        caller: Caller,
        now_us: i64,
        time_ms: i64,
    ) -> Grant {
        let at = At { lane, caller, now_us };
        let name = (entry.limit.clone(), entry.key.clone());
        let found = self.keys.get(&name).cloned();
        let fresh = found.is_none();
        let mut key = found.unwrap_or_else(|| Key::new(entry, at));
        if key.version < entry.version {
            key.advance(lane, now_us, entry.restore && entry.claim.is_some());
            key.adopt(entry);
        } else if key.version > entry.version || key.scale != entry.scale {
            return Grant::OtherQuota { version: key.version, scale: key.scale };
        }
        let given = key.apply(entry, fresh, At { lane, caller, now_us });
        if !key.is_kept(time_ms) {
            key.until_ms = time_ms + key.keep_ms();
            lane.keep_ms = lane.keep_ms.max(key.keep_ms() + RECORD_MARGIN_MS);
        }
        self.keys.insert(name, key);
        Grant::Given(given)
    }

    /// The lane has lost its memory, or this node's place in it. With the birth of the last life that is
    /// known a new one begins.
    fn reborn(
        &mut self,
        request: &Request,
        mut lane: Lane,
        now_us: i64,
        last: Option<i64>,
    ) -> Reply {
        lane.hear(request, now_us);
        if let Some(last_us) = last {
            let birth_us = now_us.max(last_us) + 1;
            lane.incarnation = Incarnation::new(&request.instance, birth_us);
            lane.lose(request, now_us);
        }
        lane.recovery.expected = lane.recovery.expected.max(natural(request.knowledge.nodes));
        let answer = reply(&lane, now_us, Verdict::Reborn);
        self.lanes.insert(request.lane, lane);
        answer
    }
}

fn new_lane(request: &Request, time_us: i64, known_birth_us: i64) -> Lane {
    // Its time goes on from the last that is known.
    let now_us = time_us.max(natural(request.knowledge.known_us));
    let mut lane = Lane {
        lanes: i64::from(request.lanes),
        incarnation: Incarnation::new(&request.instance, now_us.max(known_birth_us) + 1),
        seen_us: now_us,
        offset_us: now_us - time_us,
        keep_ms: LANE_KEEP_MS,
        nodes: 0,
        most_nodes: 0,
        silence_us: natural(request.times.silence_us),
        silence_set_us: now_us,
        lost_us: 0,
        recovery: Recovery::default(),
    };
    lane.recover(Reason::Loss, now_us, now_us, natural(request.times.recovery_us), 0);
    lane
}

fn reply(lane: &Lane, now_us: i64, verdict: Verdict) -> Reply {
    Reply {
        time_us: now_us,
        incarnation: lane.incarnation,
        nodes: lane.nodes,
        recovering_until_us: if lane.waits(now_us) { lane.recovery.until_us } else { 0 },
        recovering_since_us: lane.recovery.since_us,
        silence_us: lane.silence_us,
        limit_nodes: Vec::new(),
        verdict,
    }
}
