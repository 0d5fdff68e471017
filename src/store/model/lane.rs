//! One lane's record: its time, its nodes, and what it waits for.

use crate::sync::message::{BatchVerdict, Incarnation, REMEMBERED_US, Reply, Request, natural};

/// A lane is remembered for at least this long.
const LANE_KEEP_MS: i64 = 24 * 3600 * 1000;
/// The longest silence that a node asked for holds for this long.
const TIMES_US: i64 = 60_000_000;
/// A record that was touched since the loss, and that no node has registered by a view, has this for the view's time.
pub(super) const NO_VIEW_US: i64 = 1;
/// No lane waits longer for what its nodes know.
const WAIT_MAX_US: i64 = 30_000_000;

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
    /// When the silence began; after a loss, until a silence, the latest time of the lane before it that a node has told of.
    pub(crate) from_us: i64,
    /// When the loss was found, or the silence was over.
    pub(crate) since_us: i64,
    /// When the lane waits no longer.
    pub(crate) until_us: i64,
    /// Nodes that are to report, 0 if their number is unknown.
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
    /// The lane of a namespace that is new, or has lost its memory. Its time goes on from the last that is known.
    pub(super) fn new(request: &Request, time_us: i64, known_birth_us: i64) -> Self {
        let now_us = time_us.max(natural(request.knowledge.known_us));
        let mut lane = Self {
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
        lane.recover(Reason::Loss, 0, now_us, natural(request.times.recovery_us), 0);
        lane
    }

    /// The lane's time when the store's clock shows `time_us`: it never goes back.
    pub(super) fn set_time(&mut self, time_us: i64) -> i64 {
        let now_us = (time_us + self.offset_us).max(self.seen_us);
        self.offset_us = now_us - time_us;
        now_us
    }

    /// Whether an older state has come back: the node knows of a later life of the lane, or of a later time.
    pub(super) fn went_back(&self, request: &Request) -> bool {
        let Some(known) = request.incarnation else { return false };
        natural(known.birth_us()) > self.incarnation.birth_us()
            || known == self.incarnation && natural(request.knowledge.known_us) > self.seen_us
    }

    /// Whether the lane waits for what its nodes know.
    pub(super) fn waits(&self, now_us: i64) -> bool {
        let Recovery { reason, until_us, expected, settled, .. } = self.recovery;
        reason != Reason::None && now_us < until_us && (expected == 0 || settled < expected)
    }

    /// When the silence was over for which the lane waits, 0 if it does not.
    pub(super) fn silent_until_us(&self) -> i64 {
        if self.recovery.reason == Reason::Silence { self.recovery.since_us } else { 0 }
    }

    /// Whether nothing is given, because memory was lost.
    pub(super) fn waits_after_loss(&self, now_us: i64) -> bool {
        self.recovery.reason == Reason::Loss && self.waits(now_us)
    }

    /// Whether nodes may not have reported yet what they took while the lane was silent.
    pub(super) fn waits_after_silence(&self, now_us: i64) -> bool {
        self.recovery.reason == Reason::Silence && self.waits(now_us)
    }

    /// A node calls: the longest silence that a node of the last minute asks for decides whether there was an
    /// outage.
    pub(super) fn call(&mut self, request: &Request, now_us: i64) {
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
            let from_us = if self.lost_us > 0 { self.recovery.from_us } else { 0 };
            let since_us = self.recovery.since_us;
            self.recovery = Recovery { from_us, since_us, ..Recovery::default() };
        }
    }

    /// A node that is told of the loss tells which time of the lane it heard last.
    pub(super) fn note_heard_before(&mut self, request: &Request) {
        if self.lost_us > 0 && self.recovery.reason != Reason::Silence {
            let known_us = natural(request.knowledge.known_us);
            self.recovery.from_us = self.recovery.from_us.max(known_us);
        }
    }

    /// Whether all that was spent before the loss is in a view of this time, or still known to the node that spent it.
    pub(super) fn is_recent(&self, viewed_us: i64) -> bool {
        let from_us = self.recovery.from_us;
        viewed_us > NO_VIEW_US && from_us > 0 && viewed_us >= from_us - REMEMBERED_US
    }

    /// The lane has lost its memory: it waits for the nodes that the caller knows of.
    pub(super) fn lose(&mut self, request: &Request, now_us: i64) {
        let is_lost_again = self.lost_us > 0 && self.waits_after_loss(now_us);
        let from_us = if is_lost_again { self.recovery.from_us } else { 0 };
        self.lost_us = now_us;
        let wait_us = natural(request.times.lease_us).max(natural(request.times.recovery_us));
        self.recover(Reason::Loss, from_us, now_us, wait_us, natural(request.knowledge.nodes));
    }

    /// Notes that the caller has settled for the recovery, if it has. Returns the recovery that it has settled for;
    /// `settled_us` is the one before.
    pub(super) fn settle(&mut self, request: &Request, settled_us: i64, now_us: i64) -> i64 {
        let since_us = self.recovery.since_us;
        if request.incarnation.is_none() {
            // A node that has never called before is not waited for.
            return since_us;
        }
        // A batch that is older than this was sent before its node took what it does not report.
        let recent = now_us - natural(request.knowledge.sent_us) <= self.silence_us;
        if request.knowledge.settled && recent && settled_us != since_us {
            // Outside of a recovery a node that settles is not counted.
            if self.recovery.reason != Reason::None {
                self.recovery.settled += 1;
            }
            return since_us;
        }
        settled_us
    }

    pub(super) fn reply(&self, now_us: i64, verdict: BatchVerdict) -> Reply {
        Reply {
            time_us: now_us,
            incarnation: self.incarnation,
            nodes: self.nodes,
            recovering_until_us: if self.waits(now_us) { self.recovery.until_us } else { 0 },
            recovering_since_us: self.recovery.since_us,
            silence_us: self.silence_us,
            limit_nodes: Vec::new(),
            verdict,
        }
    }

    fn recover(&mut self, reason: Reason, from_us: i64, now_us: i64, wait_us: i64, nodes: i64) {
        let earlier = if self.waits(now_us) { self.recovery } else { Recovery::default() };
        // A loss outlasts a silence that comes on top of it.
        let is_loss_first = (earlier.reason, reason) == (Reason::Loss, Reason::Silence);
        self.recovery = Recovery {
            reason: if is_loss_first { Reason::Loss } else { reason },
            from_us: if is_loss_first { earlier.from_us } else { from_us },
            since_us: now_us,
            until_us: now_us + wait_us.min(WAIT_MAX_US),
            expected: nodes.max(earlier.expected),
            settled: 0,
        };
    }
}

/// What a batch's entries have to know of the node that sent it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    /// Nodes alive.
    pub(super) nodes: i64,
    /// The node has settled for the lane's recovery.
    pub(super) settled: bool,
    pub(super) recovery_us: i64,
}
