//! The reference model of the store: what `lua/bucket-v1.lua` and `lua/sync-v1.lua` do, in Rust.
//!
//! The script and this file are kept step for step alike; a test runs the same random operations
//! through both and compares every state and reply. Shares are computed in doubles, in the same
//! order of operations on both sides; everything else is integers up to 2^53. A request's numbers
//! are brought within [`NUMBER_MAX`] first, so that no request, however absurd, overflows here or
//! loses a digit in Lua.
//!
//! What is kept, always: the refill leased out is at most the rate, and the level is at most the
//! burst less the depths leased out. So the level and all leases together grow at the rate at most
//! and never exceed the burst, and each admission lowers them.
//!
//! What leases lose on the way (a node's clock runs slow to be safe, refill overflows a depth) is
//! found again: beside the level stands what one central bucket would have by all that was charged,
//! and what is lent: the most that nodes can hold, or have spent without having said so. The level
//! may always rise to the central one less what is lent.

use std::collections::HashMap;

use crate::quota::Scale;
use crate::sync::message::{
    CREDIT_TOKENS, DEBT_US, Entry, Given, Grant, Held, Incarnation, InstanceId, NUMBER_MAX,
    Receipt, Reply, Request, Verdict, lent_least, natural,
};
use crate::weakness::{Weakness, is_weak};

/// A lane remembers at least so long.
pub(crate) const LANE_KEEP_MS: i64 = 24 * 3600 * 1000;
/// Keys whose time is over are looked for every so many calls.
const EXPIRY_CALLS: u64 = 4096;
/// A bucket is kept so much longer than it takes to fill: its expiry is set to the first, and moved
/// when less than the second is left, so that few writes have to move it.
const BUCKET_MARGIN_MS: i64 = 60_000;
const BUCKET_MARGIN_LEAST_MS: i64 = 30_000;
/// Keys that nobody knows after a loss of memory start empty if their bucket fills within this.
const EMPTY_AFTER_LOSS_US: i64 = 60_000_000;
/// Debt is repaid in about this time, by a sixteenth of the rate at least and half of it at most.
const REPAY_US: i64 = 100_000;
const REPAY_LEAST_PART: i64 = 16;
/// When a new node is the first to call after a silence, nobody can tell whether the others were
/// cut off or have ended: up to so long it is taken for an outage.
const DOUBTFUL_US: i64 = 600_000_000;
/// A node is marked as alive with its first batch, and then when it was not for so long: counting the
/// nodes at each call would cost as much as several keys.
const MARK_US: i64 = 250_000;
/// No sum that is kept counts for more: Lua's doubles hold every integer up to here.
pub(crate) const SUM_MAX: i64 = 1 << 53;

/// One lane's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) lanes: i64,
    pub(crate) incarnation: Incarnation,
    /// Nothing new is granted until then.
    pub(crate) recovering_until_us: i64,
    /// When the memory was lost, 0 if the lane was new.
    pub(crate) lost_us: i64,
    /// When any node called last.
    pub(crate) seen_us: i64,
    /// The last outage: a silence of all nodes from `gap_from_us`, judged as one after
    /// `gap_silence_us`, over at `gap_until_us`.
    pub(crate) gap_from_us: i64,
    pub(crate) gap_silence_us: i64,
    pub(crate) gap_until_us: i64,
    /// How long the record is kept without a call, in milliseconds.
    pub(crate) keep_ms: i64,
    /// Nodes alive when they were counted last.
    pub(crate) nodes: i64,
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

/// One key's record. Index 0 is the epoch of the stamp, index 1 the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) scale: Scale,
    pub(crate) version: i64,
    pub(crate) epoch_us: i64,
    /// When the record may be forgotten, by the store's clock, in milliseconds.
    pub(crate) until_ms: i64,
    /// The level in units; negative while debt is repaid.
    pub(crate) level: i64,
    pub(crate) stamp_us: i64,
    /// Leased refill, in units per microsecond.
    pub(crate) leased: [i64; 2],
    /// Leased depth, in tokens.
    pub(crate) depth: [i64; 2],
    /// Lent to nodes, in units: the most that they hold, or have spent and not reported, less what
    /// they have spent ahead.
    pub(crate) lent: [i64; 2],
    /// Registered demand, in units per microsecond.
    pub(crate) demand: [i64; 2],
    /// Tokens charged since the key was born.
    pub(crate) charged: i64,
    /// Units of debt written off.
    pub(crate) forgiven: i64,
    /// The level of one central bucket by all that was charged so far, in units.
    pub(crate) central: i64,
}

impl Key {
    fn new(entry: &Entry, lane: &Lane, now_us: i64) -> Self {
        let Scale { rate, burst, .. } = entry.scale;
        let lost = lane.lost_us > 0 && burst <= rate.saturating_mul(EMPTY_AFTER_LOSS_US);
        let level = if lost { flow(0, rate, now_us - lane.lost_us, burst) } else { burst };
        Self {
            scale: entry.scale,
            version: entry.version,
            epoch_us: entry.epoch_us,
            until_ms: 0,
            level,
            stamp_us: now_us,
            leased: [0; 2],
            depth: [0; 2],
            lent: [0; 2],
            demand: [0; 2],
            charged: 0,
            forgiven: 0,
            central: level,
        }
    }

    /// The lease epoch of the stamp.
    fn epoch(&self) -> i64 {
        self.stamp_us / self.epoch_us
    }

    /// The stretch in which nothing flows in because all nodes were cut off, if it is not over
    /// at the stamp: they lived on their outage policies.
    fn frozen(&self, lane: &Lane) -> (i64, i64) {
        if lane.gap_until_us <= self.stamp_us {
            return (0, 0);
        }
        let leased = self.leased != [0; 2] || self.depth != [0; 2];
        let from = if self.stamp_us > lane.gap_from_us {
            self.stamp_us
        } else if leased {
            // The holders lived on their leases first: what they did not hold is lost, so that
            // nobody finds it beside what the policies let pass.
            lane.gap_from_us
        } else {
            lane.gap_from_us + lane.gap_silence_us
        };
        (from, lane.gap_until_us)
    }

    /// Brings the level to `now_us`, ending leases whose epochs are over on the way.
    fn refill(&mut self, lane: &Lane, now_us: i64) {
        // A key that outlives its lane's record may have been stamped by a clock that was ahead.
        let now_us = now_us.max(self.stamp_us);
        let (frozen_from, frozen_until) = self.frozen(lane);
        let (mut at_us, began) = (self.stamp_us, self.epoch());
        for alive in [2, 1, 0] {
            let ends_us = (began + 3 - alive as i64) * self.epoch_us;
            let until_us = if alive > 0 { ends_us.min(now_us) } else { now_us };
            if until_us > at_us {
                let frozen = (until_us.min(frozen_until) - at_us.max(frozen_from)).max(0);
                self.stretch(alive, until_us - at_us, frozen);
                at_us = until_us;
            }
        }
        self.stamp_us = now_us;
        let epoch = self.epoch();
        if epoch > began {
            let kept = epoch == began + 1;
            self.end(usize::from(kept));
            for pair in [&mut self.leased, &mut self.depth, &mut self.lent, &mut self.demand] {
                *pair = [0, if kept { pair[0] } else { 0 }];
            }
        }
    }

    /// Ends all leases but those of the last `alive` epochs: what was lent counts as spent.
    fn end(&mut self, alive: usize) {
        for lent in &mut self.lent[alive..] {
            let left = std::mem::take(lent);
            self.central = (self.central - left.max(0)).max(-NUMBER_MAX);
            self.level = (self.level + left.min(0)).max(-NUMBER_MAX);
        }
    }

    /// Lets `micros` pass, `frozen` of them without refill, beside the leases of the last `alive`
    /// epochs.
    fn stretch(&mut self, alive: usize, micros: i64, frozen: i64) {
        let (mut leased, mut depth) = (0, 0);
        for index in 0..alive {
            self.lent[index] = flow(self.lent[index], self.leased[index], micros, NUMBER_MAX);
            leased += self.leased[index];
            depth += self.depth[index];
        }
        self.end(alive);
        let Scale { rate, burst, .. } = self.scale;
        let free = (rate - leased).max(0);
        self.level = flow(self.level, free, micros - frozen, self.cap(depth));
        self.central = flow(self.central, rate, micros - frozen, burst);
    }

    /// The highest level, in units, beside leases of `depth` tokens.
    fn cap(&self, depth: i64) -> i64 {
        self.scale.burst.saturating_sub(depth.saturating_mul(self.scale.token)).max(0)
    }

    /// Moves the key to a newer definition of its limit; leases of the old one count until they end.
    fn adopt(&mut self, entry: &Entry) {
        let ratio = entry.scale.token as f64 / self.scale.token as f64;
        let scaled = |units: i64| (units as f64 * ratio).floor() as i64;
        let leased = |rate: i64| ((rate as f64 * ratio).ceil() as i64).min(NUMBER_MAX);
        let level = |level: i64| scaled(level).min(entry.scale.burst).max(-NUMBER_MAX);
        (self.level, self.central) = (level(self.level), level(self.central));
        self.leased = self.leased.map(leased);
        self.lent = self.lent.map(|units| leased(units).max(-NUMBER_MAX));
        self.demand = self.demand.map(leased);
        self.scale = entry.scale;
        self.version = entry.version;
    }

    /// Applies one entry and answers it.
    fn apply(&mut self, entry: &Entry, fresh: bool, lane: &Lane, nodes: i64, now_us: i64) -> Given {
        self.refill(lane, now_us);
        let idle = [self.leased, self.depth, self.lent, self.demand] == [[0; 2]; 4];
        if idle && entry.epoch_us != self.epoch_us {
            self.epoch_us = entry.epoch_us;
        }
        let restore = fresh || entry.restore;
        if let (true, Some(claim)) = (restore, entry.claim) {
            self.level = self.level.min(claim);
            self.central = self.central.min(self.level + self.lent[0] + self.lent[1]);
        }
        let void = self.renew(entry, restore);
        self.charge(entry, nodes);
        self.grant(entry, void, lane, nodes, now_us)
    }

    /// Moves what the node holds to the current epoch, less what it spent and gives back. What was
    /// lent to it under a lease that has ended counts as spent already. Tells whether it has ended.
    fn renew(&mut self, entry: &Entry, restore: bool) -> bool {
        let held = entry.held;
        let age = self.epoch() - held.tag;
        let current = age == 0 || age == 1;
        if current {
            let rate = held.rate + entry.back_rate;
            let passed_us = if entry.restore { 0 } else { self.stamp_us - held.stamp_us };
            let lent = flow(held.lent, rate, passed_us.max(0), NUMBER_MAX);
            if !restore {
                let index = age as usize;
                lower(&mut self.leased[index], rate);
                lower(&mut self.depth[index], held.depth + entry.back_depth);
                shift(&mut self.lent[index], -lent);
                lower(&mut self.demand[index], held.demand);
            }
            let spent = entry.spent.saturating_mul(self.scale.token).min(NUMBER_MAX);
            raise(&mut self.leased[0], held.rate);
            raise(&mut self.depth[0], held.depth);
            let left = (lent - spent - entry.back_units - entry.lost).max(-NUMBER_MAX);
            let kept = left.max(lent_least(held.rate, self.scale.token));
            shift(&mut self.lent[0], kept);
            self.central = (self.central - spent).max(-NUMBER_MAX);
            self.level = (self.level + entry.back_units).min(NUMBER_MAX) + (left - kept);
        }
        raise(&mut self.demand[0], entry.demand);
        let rate = held.rate + entry.back_rate;
        !current && (rate > 0 || held.depth + entry.back_depth > 0 || held.lent != 0)
    }

    /// Charges what was spent on credit, and brings the level within its limits.
    fn charge(&mut self, entry: &Entry, nodes: i64) {
        let spent = entry.spent + entry.debt + entry.allowed;
        self.charged = (self.charged + spent).min(SUM_MAX);
        let skipped = is_weak(Weakness::DebtSkipped);
        let debt =
            if skipped { 0 } else { entry.debt.saturating_mul(self.scale.token).min(NUMBER_MAX) };
        self.central = (self.central - debt).max(-NUMBER_MAX);
        let found = self.central - self.lent[0] - self.lent[1];
        let cap = self.cap(self.depth[0] + self.depth[1]);
        self.level = (self.level - debt).max(found).min(cap);
        // What all nodes may spend on credit is never forgiven: they would have it twice.
        let credit = nodes.saturating_mul(CREDIT_TOKENS).saturating_mul(self.scale.token);
        let most = self.scale.burst.max(self.scale.rate * DEBT_US).max(credit.min(NUMBER_MAX));
        let lowest = -most;
        if self.level < lowest {
            self.forgiven = (self.forgiven + (lowest - self.level)).min(SUM_MAX);
            self.level = lowest;
        }
    }

    fn grant(&mut self, entry: &Entry, void: bool, lane: &Lane, nodes: i64, now_us: i64) -> Given {
        let Scale { rate, burst, .. } = self.scale;
        let giving = now_us >= lane.recovering_until_us;
        let held = if void { Held::default() } else { entry.held };
        let demand = self.demand[0] + self.demand[1];
        let share = if demand > 0 { entry.demand as f64 / demand as f64 } else { 0.0 };
        let nodes = nodes.max(1) as f64;

        let tokens = if giving { self.give_tokens(entry, share, nodes) } else { 0 };
        let mut target = entry.want_rate.min((rate as f64 * share).floor() as i64);
        let returning = now_us < lane.gap_until_us;
        if returning {
            // The others still live on their shares, or have just come back from them.
            target = target.min((rate as f64 / nodes).floor() as i64);
        }
        let leased = self.leased[0] + self.leased[1];
        // While refill is frozen no debt is repaid, however little is leased.
        let most = if self.level < 0 && !returning { rate - self.repayment() } else { rate };
        let pressing = returning || demand > rate + rate / 4;
        let (mut added, mut depth) = (0, tokens);
        if giving && (pressing || self.level < burst / 20) {
            added = (target - held.rate).min(most - leased).max(0);
            if held.rate + added > 0 {
                depth += self.extra_depth(share, held.depth, tokens);
            }
        }
        let recall = if self.level > burst / 10 && !pressing {
            held.rate
        } else {
            self.surplus_rate(held.rate, target, leased, most)
        };
        self.leased[0] += added;
        raise(&mut self.depth[0], depth);
        shift(&mut self.lent[0], tokens * self.scale.token);
        Given {
            tokens,
            rate: added,
            depth,
            stamp_us: self.stamp_us,
            tag: self.epoch(),
            life_us: (self.epoch() + 2) * self.epoch_us - now_us,
            level: self.level,
            whole: (self.level + self.lent[0] + self.lent[1]).clamp(-SUM_MAX, SUM_MAX),
            leased: leased + added,
            recall,
            void,
        }
    }

    /// Gives tokens out of the level: first what callers wait for, then half of the rest by share
    /// and half spread evenly, and one at least while there is one.
    fn give_tokens(&mut self, entry: &Entry, share: f64, nodes: f64) -> i64 {
        let token = self.scale.token;
        if self.level <= 0 {
            return 0;
        }
        let needed = entry.needed.min(self.level / token);
        self.level -= needed * token;
        let part = (self.level as f64 * (share / 2.0 + 0.5 / nodes)).floor();
        let least = i64::from(self.level >= token);
        let tokens = entry.want.min(((part / token as f64).floor() as i64).max(least));
        self.level -= tokens * token;
        needed + tokens
    }

    /// The depth that goes with a leased refill, on top of `tokens`.
    fn extra_depth(&self, share: f64, held_depth: i64, tokens: i64) -> i64 {
        let Scale { token, burst, .. } = self.scale;
        let capacity = burst / token;
        let room = ((capacity as f64 * share / 2.0).floor() as i64).max(2).min(capacity);
        let free = (burst - self.level) / token - self.depth[0] - self.depth[1] - tokens;
        (room - held_depth - tokens).min(free).max(0)
    }

    /// The refill that is kept from leases so that debt is repaid: soon, but no more of it than the
    /// debt needs.
    fn repayment(&self) -> i64 {
        let rate = self.scale.rate;
        (-self.level / REPAY_US).clamp(rate / REPAY_LEAST_PART, rate / 2)
    }

    /// What a node should give back of its leased refill: what is well above its target, and its
    /// part of what keeps debt from being repaid.
    fn surplus_rate(&self, held_rate: i64, target: i64, leased: i64, most: i64) -> i64 {
        let above = held_rate - target;
        let above = if above > target / 4 { above } else { 0 };
        let repay = if self.level < 0 && leased > most {
            (held_rate as f64 * ((leased - most) as f64 / leased as f64)).ceil() as i64
        } else {
            0
        };
        above.max(repay).min(held_rate)
    }

    /// Milliseconds until the key may be forgotten: full, and all leases ended.
    pub(crate) fn keep_ms(&self) -> i64 {
        let fill_us = self.scale.micros_for(self.scale.burst - self.level) as i64;
        (fill_us + 2 * self.epoch_us) / 1000 + BUCKET_MARGIN_MS
    }

    /// Whether the key is kept for long enough, as it is.
    fn is_kept(&self, time_ms: i64) -> bool {
        let spare_us =
            (self.until_ms - time_ms - BUCKET_MARGIN_LEAST_MS) * 1000 - 2 * self.epoch_us;
        let missing = self.scale.burst - self.level;
        spare_us >= 0 && i128::from(missing) <= i128::from(spare_us) * i128::from(self.scale.rate)
    }
}

/// Adds to a sum of leases or demands.
fn raise(sum: &mut i64, by: i64) {
    *sum = (*sum + by).min(NUMBER_MAX);
}

/// Takes from a sum of leases or demands.
fn lower(sum: &mut i64, by: i64) {
    *sum = (*sum - by).max(0);
}

/// Adds to a sum of what is lent.
fn shift(sum: &mut i64, by: i64) {
    *sum = (*sum + by).clamp(-NUMBER_MAX, NUMBER_MAX);
}

/// `level` after `rate` has flowed in for `micros`, at most `cap`.
fn flow(level: i64, rate: i64, micros: i64, cap: i64) -> i64 {
    let flowed = i128::from(level) + i128::from(rate) * i128::from(micros);
    flowed.min(i128::from(cap)) as i64
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
    pub(crate) keys: HashMap<(std::sync::Arc<str>, std::sync::Arc<[u8]>), Key>,
}

impl Model {
    /// One call of the script at `time_us`, the store's clock.
    pub(crate) fn sync(&mut self, request: &Request, time_us: i64) -> Reply {
        self.calls += 1;
        if self.calls.is_multiple_of(EXPIRY_CALLS) {
            let kept = |key: &Key| key.until_ms > time_us / 1000;
            self.keys.retain(|_, key| kept(key));
        }
        let sequence = natural(request.sequence);
        let waits = !is_weak(Weakness::NoWaitAfterLoss);
        let recovery_us = if waits { natural(request.recovery_us) } else { 0 };
        let silence_us = natural(request.silence_us);
        let alive_us = natural(request.alive_us);
        let found = self.lanes.get(&request.lane).cloned();
        let now_us = found.as_ref().map_or(time_us, |lane| time_us.max(lane.seen_us));
        let born = Incarnation::new(&request.instance, now_us);
        let mut lane = match found {
            Some(lane) => lane,
            None => Lane {
                lanes: i64::from(request.lanes),
                incarnation: born,
                recovering_until_us: now_us + recovery_us,
                lost_us: 0,
                seen_us: now_us,
                gap_from_us: 0,
                gap_silence_us: 0,
                gap_until_us: 0,
                keep_ms: LANE_KEEP_MS,
                nodes: 0,
            },
        };
        if lane.lanes != i64::from(request.lanes) {
            return reply(&lane, now_us, 0, Verdict::Lanes(lane.lanes as u32));
        }
        if request.incarnation.is_some_and(|known| known != lane.incarnation) {
            if lane.lost_us == 0 {
                lane.lost_us = now_us;
                lane.recovering_until_us = now_us + recovery_us;
            }
            return self.reborn(request, lane, now_us);
        }
        let place = (request.lane, request.instance);
        let node = self.nodes.get(&place);
        if request.incarnation.is_none()
            && node.is_some_and(|node| node.incarnation != lane.incarnation)
        {
            // A late copy of the node's very first batch: it knows the lane by name since then.
            return reply(&lane, now_us, 0, Verdict::Stale);
        }
        let known = |node: &&Node| {
            node.incarnation == lane.incarnation && !is_weak(Weakness::SequenceIgnored)
        };
        let node = node.filter(known);
        let last = node.map_or(0, |node| node.receipt.sequence);
        if let Some(node) = node.filter(|node| node.receipt.sequence == sequence) {
            if node.receipt.hash != request.hash() {
                return reply(&lane, now_us, 0, Verdict::Cloned);
            }
            return Reply::decode(&node.reply, &request.entries)
                .unwrap_or_else(|_| reply(&lane, now_us, 0, Verdict::Cloned));
        }
        if sequence < last {
            return reply(&lane, now_us, 0, Verdict::Stale);
        }
        if sequence > last + 1 && !is_weak(Weakness::SequenceIgnored) {
            lane.incarnation = born;
            lane.lost_us = now_us;
            lane.recovering_until_us = now_us + recovery_us;
            return self.reborn(request, lane, now_us);
        }
        let silent_us = now_us - lane.seen_us;
        if silent_us > silence_us && (last > 0 || silent_us <= DOUBTFUL_US) {
            lane.gap_from_us = lane.seen_us;
            lane.gap_silence_us = silence_us;
            lane.gap_until_us = now_us + recovery_us;
        }
        lane.seen_us = now_us;
        let marked =
            node.map(|node| node.receipt.marked_us).filter(|at_us| now_us - at_us < MARK_US);
        let marked_us = marked.unwrap_or(now_us);
        if marked.is_none() {
            let members = self.members.entry(request.lane).or_default();
            members.insert(request.instance, now_us);
            members.retain(|_, seen_us| *seen_us >= now_us - alive_us);
            lane.nodes = members.len() as i64;
        }
        let nodes = lane.nodes;

        let mut grants = Vec::with_capacity(request.entries.len());
        for entry in &request.entries {
            grants.push(self.entry(&entry.bounded(), &mut lane, nodes, now_us, time_us / 1000));
        }
        let answer = reply(&lane, now_us, nodes, Verdict::Applied(grants));
        let receipt = Receipt { sequence, marked_us, hash: request.hash() };
        let reply = answer.encode(receipt, &request.entries);
        let node = Node { incarnation: lane.incarnation, receipt, reply };
        self.nodes.insert(place, node);
        self.lanes.insert(request.lane, lane);
        answer
    }

    fn entry(
        &mut self,
        entry: &Entry,
        lane: &mut Lane,
        nodes: i64,
        now_us: i64,
        time_ms: i64,
    ) -> Grant {
        let name = (entry.limit.clone(), entry.key.clone());
        let found = self.keys.get(&name).cloned();
        let fresh = found.is_none();
        let mut key = found.unwrap_or_else(|| Key::new(entry, lane, now_us));
        if key.version < entry.version {
            key.refill(lane, now_us);
            key.adopt(entry);
        } else if key.version > entry.version || key.scale != entry.scale {
            return Grant::OtherQuota { version: key.version, scale: key.scale };
        }
        let given = key.apply(entry, fresh, lane, nodes, now_us);
        if !key.is_kept(time_ms) {
            key.until_ms = time_ms + key.keep_ms();
            lane.keep_ms = lane.keep_ms.max(key.keep_ms() + BUCKET_MARGIN_MS);
        }
        self.keys.insert(name, key);
        Grant::Given(given)
    }

    fn reborn(&mut self, request: &Request, lane: Lane, now_us: i64) -> Reply {
        let answer = reply(&lane, now_us, 0, Verdict::Reborn);
        self.lanes.insert(request.lane, lane);
        answer
    }
}

fn reply(lane: &Lane, now_us: i64, nodes: i64, verdict: Verdict) -> Reply {
    Reply {
        time_us: now_us,
        incarnation: lane.incarnation,
        nodes,
        recovering_until_us: lane.recovering_until_us,
        verdict,
    }
}
