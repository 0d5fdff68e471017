//! The reference model of the store: what the scripts in `lua/` do, in Rust.
//!
//! The script and this module are kept step for step alike; a test runs the same random operations
//! through both and compares every state and reply. Shares are computed in doubles, in the same
//! order of operations on both sides; everything else is integers up to 2^53. A request's numbers
//! are brought within [`NUMBER_MAX`](crate::sync::message::NUMBER_MAX) first, so that no request,
//! however absurd, overflows here or loses a digit in Lua; where a sum may be lower than -2^53, both sides count from there.
//!
//! What holds while a record is remembered: the refill leased out is at most the rate, and refill and depth are no
//! less than what nodes hold. The simulator checks this for each key of a batch that was answered.

use std::collections::HashMap;
use std::sync::Arc;

use crate::sync::message::{
    BatchVerdict, Entry, Grant, Incarnation, InstanceId, Receipt, Reply, Request, natural,
};

mod calendar_window;
mod grants;
mod key;
mod lane;
mod log;
mod quota_change;
mod refund;

pub(crate) use key::Key;
#[cfg(all(test, feature = "redis"))]
pub(crate) use key::SUM_MAX;
use key::{At, RECORD_MARGIN_MS};
use lane::Caller;
pub(crate) use lane::Lane;
#[cfg(all(test, feature = "redis"))]
pub(crate) use lane::{Reason, Recovery};
#[cfg(all(test, feature = "redis"))]
pub(crate) use log::Slots;

/// A node is remembered for this long without a call.
const NODE_KEEP_MS: i64 = 600_000;
/// Keys whose time is over are looked for once in this many calls.
pub(crate) const EXPIRY_CALLS: u64 = 4096;
/// A node is marked as alive with its first batch, and then when it was not for this long: counting the
/// nodes at each call would cost as much as several keys.
const MARK_US: i64 = 250_000;
/// What the store knows of one node in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) incarnation: Incarnation,
    /// Its last batch.
    pub(crate) receipt: Receipt,
    /// The reply to that.
    pub(crate) reply: Vec<u8>,
}

impl Node {
    /// The reply to its last batch, which comes again; `None` if another batch has the same number.
    fn answer(&self, request: &Request) -> Option<Reply> {
        if self.receipt.hash != request.hash() {
            return None;
        }
        Reply::decode(&self.reply, &request.entries, request.limits.len()).ok()
    }
}

/// What the number of a batch says.
enum Order<'a> {
    /// It is to be applied.
    Next,
    /// It is the last one of this node, which comes again.
    Repeated(&'a Node),
    /// It is older than that.
    Stale,
    /// Batches before it have not come: the lane lost its memory of the node.
    Missing,
}

/// A whole store in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    /// Calls so far: keys expire once in [`EXPIRY_CALLS`].
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
        self.expire_keys(time_us);
        let known_birth_us = request.incarnation.map_or(0, |known| natural(known.birth_us()));
        let mut lane = match self.lanes.get(&request.lane).cloned() {
            Some(lane) => lane,
            None => Lane::new(request, time_us, known_birth_us),
        };
        let now_us = lane.set_time(time_us);
        if lane.lanes != i64::from(request.lanes) {
            return lane.reply(now_us, BatchVerdict::Lanes(lane.lanes as u32));
        }
        if lane.went_back(request) {
            return self.reborn(request, lane, now_us, Some(known_birth_us));
        }
        if request.incarnation.is_some_and(|known| known != lane.incarnation) {
            if lane.lost_us == 0 {
                // The first caller did not know that the lane had been there before.
                let newcomers = lane.nodes;
                lane.lose(request, now_us);
                lane.recovery.expected += newcomers;
            }
            return self.reborn(request, lane, now_us, None);
        }
        match self.order(request, &lane, now_us) {
            Order::Next => self.apply(request, lane, now_us, time_us),
            Order::Repeated(node) => {
                node.answer(request).unwrap_or_else(|| lane.reply(now_us, BatchVerdict::Cloned))
            }
            Order::Stale => lane.reply(now_us, BatchVerdict::Stale),
            Order::Missing => {
                let birth_us = lane.incarnation.birth_us();
                self.reborn(request, lane, now_us, Some(birth_us))
            }
        }
    }

    fn expire_keys(&mut self, time_us: i64) {
        self.calls += 1;
        if self.calls.is_multiple_of(EXPIRY_CALLS) {
            self.keys.retain(|_, key| key.until_ms > time_us / 1000);
        }
    }

    /// The record of the node that calls, if it is of this life of the lane.
    fn node(&self, request: &Request, lane: &Lane) -> Option<&Node> {
        let node = self.nodes.get(&(request.lane, request.instance));
        node.filter(|node| node.incarnation == lane.incarnation)
    }

    /// What the number of a batch says, where the node does not know the lane by another name.
    fn order(&self, request: &Request, lane: &Lane, now_us: i64) -> Order<'_> {
        let sequence = natural(request.sequence);
        let named = self.nodes.get(&(request.lane, request.instance));
        let node = self.node(request, lane);
        if request.incarnation.is_none() && named.is_some() && node.is_none() {
            // A late copy of the node's very first batch: since then the node knows the name of the lane.
            return Order::Stale;
        }
        let last = node.map_or(0, |node| node.receipt.sequence);
        if sequence > last + 1 {
            let known_us = natural(request.knowledge.known_us);
            // A node that was away for long enough is not remembered.
            let is_forgotten = node.is_none() && now_us - known_us > NODE_KEEP_MS * 1000;
            return if is_forgotten { Order::Stale } else { Order::Missing };
        }
        match node {
            Some(node) if sequence == last => Order::Repeated(node),
            Some(_) if sequence < last => Order::Stale,
            _ => Order::Next,
        }
    }

    /// Applies the batch that is next.
    fn apply(&mut self, request: &Request, mut lane: Lane, now_us: i64, time_us: i64) -> Reply {
        lane.call(request, now_us);
        let before = self.node(request, &lane).map(|node| node.receipt);
        let marked = before.map(|receipt| receipt.marked_us);
        let marked = marked.filter(|at_us| now_us - at_us < MARK_US);
        let marked = marked.filter(|_| !request.knowledge.leaving);
        if marked.is_none() {
            self.mark(request, &mut lane, now_us);
        }
        let settled_us = before.map_or(0, |receipt| receipt.settled_us);
        let settled_us = lane.settle(request, settled_us, now_us);
        let caller = Caller {
            nodes: lane.nodes,
            settled: settled_us == lane.recovery.since_us,
            recovery_us: natural(request.times.recovery_us),
        };

        let mut grants = Vec::with_capacity(request.entries.len());
        for entry in &request.entries {
            let grant = self.entry(&entry.bounded(), &mut lane, caller, now_us, time_us / 1000);
            grants.push(grant);
        }
        let limit_nodes = self.count_limit_nodes(request, now_us);
        let answer = Reply { limit_nodes, ..lane.reply(now_us, BatchVerdict::Applied(grants)) };
        let receipt = Receipt {
            sequence: natural(request.sequence),
            marked_us: marked.unwrap_or(now_us),
            settled_us,
            hash: request.hash(),
        };
        let reply = answer.encode(receipt, &request.entries);
        let node = Node { incarnation: lane.incarnation, receipt, reply };
        self.nodes.insert((request.lane, request.instance), node);
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
        let is_new = found.is_none();
        let mut key = found.unwrap_or_else(|| Key::new(entry, at));
        if key.version < entry.version {
            key.bring_to(entry, At { lane, caller, now_us });
            key.adopt(entry);
        } else if key.version > entry.version || key.scale != entry.scale {
            return Grant::OtherQuota { version: key.version, scale: key.scale };
        }
        let given = key.apply(entry, is_new, At { lane, caller, now_us });
        if !key.is_kept(time_ms) {
            key.until_ms = time_ms + key.keep_ms();
            lane.keep_ms = lane.keep_ms.max(key.keep_ms() + RECORD_MARGIN_MS);
        }
        self.keys.insert(name, key);
        Grant::Given(given)
    }

    /// The lane has lost its memory, or its record of this node. With the birth of the last life that is
    /// known a new one begins.
    fn reborn(
        &mut self,
        request: &Request,
        mut lane: Lane,
        now_us: i64,
        last: Option<i64>,
    ) -> Reply {
        lane.call(request, now_us);
        if let Some(last_us) = last {
            let birth_us = now_us.max(last_us) + 1;
            lane.incarnation = Incarnation::new(&request.instance, birth_us);
            lane.lose(request, now_us);
        }
        lane.note_heard_before(request);
        lane.recovery.expected = lane.recovery.expected.max(natural(request.knowledge.nodes));
        let answer = lane.reply(now_us, BatchVerdict::Reborn);
        self.lanes.insert(request.lane, lane);
        answer
    }
}
