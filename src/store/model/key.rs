//! One key's record: a ledger of what is leased, and the level of its curve.

use crate::quota::{Curve, Scale};
use crate::sync::message::{
    CREDIT_TOKENS, Claim, DEBT_US, Entry, Given, NUMBER_MAX, outstanding_least,
};

use super::lane::{Caller, Lane, NO_VIEW_US};
use super::log::Slots;

/// No sum that is kept counts for more: Lua's doubles hold every integer up to here.
pub(crate) const SUM_MAX: i64 = 1 << 53;
/// A record is kept this much longer than it takes to fill: its expiry is set to the first, and moved
/// when less than the second is left, so that few writes have to move it.
pub(super) const RECORD_MARGIN_MS: i64 = 45_000;
const RECORD_MARGIN_LEAST_MS: i64 = 20_000;
/// Keys that no node registers by a recent view after a loss of memory start empty if their bucket fills within this.
const EMPTY_AFTER_LOSS_US: i64 = 60_000_000;
/// One key's record. Index 0 is the lease epoch of the stamp, index 1 the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) scale: Scale,
    pub(crate) version: i64,
    pub(crate) epoch_us: i64,
    /// When the record may be forgotten, by the store's clock, in milliseconds.
    pub(crate) until_ms: i64,
    /// Units of debt written off.
    pub(crate) written_off: i64,
    /// When the record was made, in the lane's time.
    pub(crate) birth_us: i64,
    /// Nothing is granted until then, because the record was lost; 0 if it never was.
    pub(crate) recovering_until_us: i64,
    /// The lane lost its memory, and waits for its nodes, or has not dealt with the key since: the newest view by which a node has
    /// registered the key, in the lane's time, or [`NO_VIEW_US`]. Else 0.
    pub(crate) viewed_us: i64,
    /// Nodes that had a view of the lost record and have reported since.
    pub(crate) heard: i64,
    /// What was available when the lane's last silence was over, in units.
    pub(crate) after_silence: i64,
    /// Units charged in the window before that of the stamp, if windows slide.
    pub(crate) previous: i64,
    /// Tokens charged in the window of the stamp and in the one before that the plan in force does not count: another plan had
    /// allowed them.
    pub(crate) beyond: [i64; 2],
    /// When the window of the level ends, if it is one of a calendar and a node has told; else 0.
    pub(crate) window_ends_us: i64,
    /// What was charged when, if a log slides.
    pub(crate) slots: Slots,
    /// When the record was brought up to date last, in the lane's time.
    pub(crate) stamp_us: i64,
    /// The level of one central bucket by all that was charged so far, in units.
    pub(crate) level: i64,
    /// What can be leased, in units; below zero while debt is repaid. It may always rise to the level
    /// less what is outstanding.
    pub(crate) unleased: i64,
    /// Tokens charged since the record was made.
    pub(crate) charged: i64,
    /// Leased refill, in units per microsecond.
    pub(crate) leased: [i64; 2],
    /// Leased depth, in tokens.
    pub(crate) depth: [i64; 2],
    /// Outstanding, in units: the most that nodes hold, or have spent and not reported, less what
    /// they have spent ahead.
    pub(crate) outstanding: [i64; 2],
    /// Registered demand, in units per microsecond.
    pub(crate) demand: [i64; 2],
}

/// What has to be known of an entry's batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct At<'a> {
    pub(super) lane: &'a Lane,
    pub(super) caller: Caller,
    pub(super) now_us: i64,
}

impl Key {
    /// The record of a key that is not in the store.
    pub(super) fn new(entry: &Entry, at: At<'_>) -> Self {
        let At { lane, caller, now_us } = at;
        let Scale { rate, burst, .. } = entry.scale;
        // While a lane waits for all its nodes, the lowest of their claims is the level. The last of them may be this one.
        let waits = lane.waits_after_loss(now_us);
        let quick = burst <= rate.saturating_mul(EMPTY_AFTER_LOSS_US);
        let empty = lane.lost_us > 0 && quick && !waits && !lane.is_recent(entry.viewed_us());
        let mut slots = Slots::default();
        let (level, previous) = if empty {
            empty_since(&entry.scale, &mut slots, lane.lost_us, now_us)
        } else {
            (burst, 0)
        };
        let lost = !entry.restore && !lane.waits_after_loss(now_us) && entry.is_evidence();
        Self {
            scale: entry.scale,
            version: entry.version,
            epoch_us: entry.epoch_us,
            until_ms: 0,
            written_off: 0,
            birth_us: now_us,
            recovering_until_us: if lost { now_us + caller.recovery_us } else { 0 },
            viewed_us: 0,
            heard: 0,
            after_silence: if lane.waits_after_silence(now_us) { level } else { 0 },
            previous,
            beyond: [0; 2],
            window_ends_us: 0,
            slots,
            stamp_us: now_us,
            level,
            unleased: level,
            charged: 0,
            leased: [0; 2],
            depth: [0; 2],
            outstanding: [0; 2],
            demand: [0; 2],
        }
    }

    /// The lease epoch of the stamp.
    pub(super) fn epoch(&self) -> i64 {
        self.stamp_us / self.epoch_us
    }

    /// The most that can be leased beside leases of `depth` tokens, in units. A window is never full before what was
    /// spent in it is gone, so the depth of leases keeps nothing from flowing in.
    pub(super) fn cap(&self, depth: i64) -> i64 {
        if self.is_windows() {
            return self.scale.burst;
        }
        self.scale.burst.saturating_sub(depth.saturating_mul(self.scale.token)).max(0)
    }

    // ---- time --------------------------------------------------------------------------------

    /// Brings the record to `now_us`, ending leases whose epochs are over on the way.
    /// An entry of this moment may register it by a view of `entry_viewed_us`.
    pub(super) fn advance(&mut self, lane: &Lane, now_us: i64, entry_viewed_us: i64) {
        let fill_us = self.scale.burst / self.scale.rate + 1;
        if self.stamp_us > now_us.saturating_add(fill_us) {
            // The lane's time was lost with the lane. The level is kept; what was leased counts as
            // spent.
            self.end_leases(0);
            (self.leased, self.depth, self.demand) = ([0; 2], [0; 2], [0; 2]);
            if self.scale.curve == Curve::SlidingWindow {
                let counted = self.counted(self.previous, self.stamp_us);
                let current = (self.scale.burst - self.level - counted).max(0);
                let counted = self.counted(self.previous, now_us);
                self.level = (self.scale.burst - current - counted).max(-NUMBER_MAX);
            }
            self.slots.no_later_than(&self.scale, now_us);
            self.stamp_us = now_us;
        }
        let call_us = now_us;
        let (now_us, before_us) = (now_us.max(self.stamp_us), self.stamp_us);
        let (mut at_us, began) = (before_us, self.epoch());
        // What was spent of a lease was spent before it ended: not in a window that begins then.
        let early_us = i64::from(self.is_windows());
        for alive in [2, 1, 0] {
            let ends_us = (began + 3 - alive as i64) * self.epoch_us - early_us;
            let until_us = if alive > 0 { ends_us.min(now_us) } else { now_us };
            if until_us > at_us {
                self.pass(alive, at_us, until_us);
                at_us = until_us;
            }
        }
        self.stamp_us = now_us;
        let epoch = self.epoch();
        if epoch > began {
            let kept = epoch == began + 1;
            self.end_leases(usize::from(kept));
            for pair in [&mut self.leased, &mut self.depth, &mut self.outstanding, &mut self.demand]
            {
                *pair = [0, if kept { pair[0] } else { 0 }];
            }
        }
        if self.is_windows() {
            self.unleased = self.level - self.outstanding[0] - self.outstanding[1];
        }
        self.doubt_level(lane, before_us, call_us, entry_viewed_us);
        if before_us < lane.silent_until_us() {
            self.after_silence = self.unleased;
        }
    }

    /// The lane may have lost its memory since `before_us`, when the record was brought up to date last. When all nodes have told what
    /// they know, it is decided how much there can be. An entry of this moment may register the key by a view of `entry_viewed_us`.
    fn doubt_level(&mut self, lane: &Lane, before_us: i64, now_us: i64, entry_viewed_us: i64) {
        let is_of_before = before_us < lane.lost_us;
        let viewed_us = if is_of_before { 0 } else { self.viewed_us };
        if lane.waits_after_loss(now_us) {
            self.viewed_us = viewed_us;
            return;
        }
        self.viewed_us = 0;
        if !is_of_before && viewed_us == 0 {
            return;
        }
        if let Some(most) = self.most_in_doubt(lane, viewed_us.max(entry_viewed_us), now_us) {
            self.unleased = self.unleased.min(most);
            // What is outstanding of a token bucket is the most that there can be, and may be less.
            let outstanding = if self.is_windows() { self.outstanding } else { [0; 2] };
            let found = self.unleased + outstanding[0] + outstanding[1];
            self.level = self.level.min(found).max(-NUMBER_MAX);
        }
    }

    /// What can be leased at most of a key that nodes have registered by a view of `viewed_us` at most since the loss, or not at all (0):
    /// if it is quick and that view is old, it had nothing at the loss beside what is leased. Who spent since the view may know it
    /// no more.
    fn most_in_doubt(&self, lane: &Lane, viewed_us: i64, now_us: i64) -> Option<i64> {
        if !self.is_quick() || lane.is_recent(viewed_us) {
            return None;
        }
        let (mut slots, lost_us) = (Slots::default(), lane.lost_us);
        let (flowed, _) = empty_since(&self.scale, &mut slots, lost_us, now_us);
        if self.is_windows() {
            return Some(flowed);
        }
        Some(flowed - flow(0, self.leased[0] + self.leased[1], now_us - lost_us, NUMBER_MAX))
    }

    /// While the lane waits for all its nodes, notes by which view the entry registers the key, if it does, and tells no more than there
    /// can be by the views so far.
    fn note_view(&mut self, entry: &Entry, given: Given, at: At<'_>) -> Given {
        if at.lane.lost_us == 0 || !at.lane.waits_after_loss(at.now_us) {
            return given;
        }
        self.viewed_us = self.viewed_us.max(entry.viewed_us()).max(NO_VIEW_US);
        self.recovering_until_us = 0;
        let most = self.most_in_doubt(at.lane, self.viewed_us, at.now_us).unwrap_or(SUM_MAX);
        let available = given.available.min(most);
        let level = given.level.min(available + self.outstanding[0] + self.outstanding[1]);
        Given { available, level, ..given }
    }

    /// Whether the bucket fills soon enough to start empty after a loss.
    fn is_quick(&self) -> bool {
        self.scale.burst <= self.scale.rate.saturating_mul(EMPTY_AFTER_LOSS_US)
    }

    /// Lets time pass beside the leases of the last `alive` epochs.
    fn pass(&mut self, alive: usize, from_us: i64, until_us: i64) {
        let micros = until_us - from_us;
        let (mut leased, mut depth) = (0, 0);
        let refill_us = self.scale.refill_until_us(from_us, until_us) - from_us;
        for index in 0..alive {
            let (units, rate) = (self.outstanding[index], self.leased[index]);
            self.outstanding[index] = flow(units, rate, refill_us, NUMBER_MAX);
            leased += rate;
            depth += self.depth[index];
        }
        self.end_leases(alive);
        if self.scale.has_refill_ended(from_us, until_us) {
            self.leased = [0; 2];
        }
        let Scale { rate, burst, .. } = self.scale;
        self.unleased = flow(self.unleased, (rate - leased).max(0), micros, self.cap(depth));
        match self.scale.curve {
            Curve::Refill => self.level = flow(self.level, rate, micros, burst),
            Curve::FixedWindow | Curve::SlidingWindow => {
                (self.level, self.previous) =
                    pass_windows(&self.scale, self.level, self.previous, from_us, until_us);
            }
            // A node tells when another window begins.
            Curve::CalendarWindow => {}
            Curve::SlidingLog => {
                self.level = self.slots.pass(&self.scale, self.level, from_us, until_us);
            }
        }
    }

    /// How fast the level rises now while nobody spends, in units per microsecond.
    pub(super) fn slope(&self) -> i64 {
        let Scale { rate, token, .. } = self.scale;
        match self.scale.curve {
            Curve::Refill => rate,
            Curve::FixedWindow | Curve::SlidingLog | Curve::CalendarWindow => 0,
            Curve::SlidingWindow => self.previous / token * token / self.scale.window_us(),
        }
    }

    /// Whether its curve is not a token bucket's.
    pub(super) fn is_windows(&self) -> bool {
        self.scale.curve != Curve::Refill
    }

    pub(super) fn counted(&self, previous: i64, now_us: i64) -> i64 {
        self.scale.counted(previous, now_us)
    }

    /// Ends all leases but those of the last `alive` epochs: what was outstanding counts as spent, and
    /// what was spent ahead is owed.
    pub(super) fn end_leases(&mut self, alive: usize) {
        for outstanding in &mut self.outstanding[alive..] {
            let units = std::mem::take(outstanding);
            self.level = (self.level - units.max(0)).max(-NUMBER_MAX);
            self.unleased = (self.unleased + units.min(0)).max(-NUMBER_MAX);
        }
    }

    /// Brings the record to the time of the entry's batch.
    pub(super) fn bring_to(&mut self, entry: &Entry, at: At<'_>) {
        let (before_us, ended_us) = (self.stamp_us, self.window_ends_us);
        self.open_window(entry.window_span_us, at.now_us);
        self.advance(at.lane, at.now_us, entry.viewed_us());
        self.pass_beyond(before_us, ended_us);
    }

    // ---- one entry ---------------------------------------------------------------------------

    /// Applies one entry and answers it. A record that `is_new` was made for it.
    pub(super) fn apply(&mut self, entry: &Entry, is_new: bool, at: At<'_>) -> Given {
        self.bring_to(entry, at);
        let idle = [self.leased, self.depth, self.outstanding, self.demand] == [[0; 2]; 4];
        if idle && entry.epoch_us != self.epoch_us {
            self.epoch_us = entry.epoch_us;
        }
        // A lease that is older than the record was granted by a record that is lost.
        let older = entry.holds() && entry.held.stamp_us < self.birth_us;
        let anew = is_new || entry.restore || older;
        let mut lost = is_new && self.recovering_until_us > 0;
        if older && !is_new && !entry.restore && self.recovering_until_us == 0 {
            self.recovering_until_us = at.now_us + at.caller.recovery_us;
            lost = true;
        }
        let held_us = entry.held.stamp_us;
        if self.recovering_until_us > at.now_us && held_us > 0 && held_us < self.birth_us {
            // Once all nodes have reported what they hold, there is none to wait for.
            self.heard += 1;
            if self.heard >= at.caller.nodes {
                self.recovering_until_us = at.now_us;
            }
        }
        let void = self.renew(entry, anew, at.lane.lost_us);
        self.charge(entry, anew, at.lane);
        if self.scale.curve == Curve::SlidingLog {
            self.slots.settle(&self.scale, self.level, self.stamp_us);
        }
        let given = self.grant(entry, void, at);
        let given = self.note_view(entry, given, at);
        Given { lost, ..given }
    }

    /// Moves what the node holds to the current epoch, less what it spent and returns. What was
    /// outstanding under a lease that has ended counts as spent already. Tells whether it has ended.
    fn renew(&mut self, entry: &Entry, anew: bool, lost_us: i64) -> bool {
        let held = entry.held;
        let age = self.epoch() - held.tag;
        let rate_before = held.rate + entry.back_rate;
        let leases_refill = matches!(self.scale.curve, Curve::Refill | Curve::SlidingWindow);
        let is_impossible = !leases_refill && rate_before > 0;
        let current = (age == 0 || age == 1) && !is_impossible;
        let until_us = self.scale.refill_until_us(held.stamp_us, self.stamp_us);
        let passed_us = if entry.restore { 0 } else { until_us - held.stamp_us };
        let outstanding = flow(held.outstanding, rate_before, passed_us.max(0), NUMBER_MAX);
        let has_refill_ended = self.scale.has_refill_ended(held.stamp_us, self.stamp_us);
        let (rate, kept_rate) = if has_refill_ended { (0, 0) } else { (rate_before, held.rate) };
        if anew && entry.restore && current {
            // Of what has flowed in since this life of the record began, the node had its part.
            let life_us = (self.stamp_us - self.birth_us.max(lost_us)).max(0);
            let flowed = flow(0, rate, life_us, NUMBER_MAX);
            self.unleased = (self.unleased - flowed).max(-NUMBER_MAX);
        }
        if anew {
            // What a node holds that registers anew may not be there beside its claim: of a token bucket it reports the most that it can
            // hold, and of a window the claim may be made from a view of an earlier one.
            self.claim(entry, if current && !entry.restore { outstanding } else { 0 });
        }
        if current {
            if !anew {
                let index = age as usize;
                lower(&mut self.leased[index], rate);
                lower(&mut self.depth[index], held.depth + entry.back_depth);
                shift(&mut self.outstanding[index], -outstanding);
                lower(&mut self.demand[index], held.demand);
            }
            let spent = entry.spent.saturating_mul(self.scale.token).min(NUMBER_MAX);
            raise(&mut self.leased[0], kept_rate);
            raise(&mut self.depth[0], held.depth);
            let left = (outstanding - spent - entry.returned - entry.lost).max(-NUMBER_MAX);
            let kept = left.max(outstanding_least(kept_rate, self.scale.token));
            shift(&mut self.outstanding[0], kept);
            let charged = spent - self.charge_window_before(entry, spent);
            self.level = (self.level - charged).max(-NUMBER_MAX);
            self.unleased = (self.unleased + entry.returned).min(NUMBER_MAX) + (left - kept);
        }
        if !current && entry.restore {
            // The lease has ended, and this record has not counted it as spent.
            let spent = entry.spent.saturating_mul(self.scale.token).min(NUMBER_MAX);
            self.level = (self.level - spent).max(-NUMBER_MAX);
            self.unleased = (self.unleased - spent).max(-NUMBER_MAX);
        }
        raise(&mut self.demand[0], entry.demand);
        !current && (rate > 0 || held.depth + entry.back_depth > 0 || held.outstanding != 0)
    }

    /// Charges what was spent in the window before to that window, at most `spent` units. Returns by how much less the
    /// level falls.
    fn charge_window_before(&mut self, entry: &Entry, spent: i64) -> i64 {
        let window_us = self.scale.window_us();
        let windows = self.stamp_us / window_us - entry.held.stamp_us / window_us;
        if self.scale.curve != Curve::SlidingWindow || windows != 1 || entry.restore {
            return 0;
        }
        let before = entry.spent_before.saturating_mul(self.scale.token);
        let before = before.min(spent).min(self.scale.burst - self.previous);
        let counted_before = self.counted(self.previous, self.stamp_us);
        self.previous += before;
        before - (self.counted(self.previous, self.stamp_us) - counted_before)
    }

    /// Charges what outage policies took in the window before to that window. Returns by how much the level falls.
    fn take_window_before(&mut self, taken: i64) -> i64 {
        if self.scale.curve != Curve::SlidingWindow {
            return 0;
        }
        let counted_before = self.counted(self.previous, self.stamp_us);
        self.previous += taken.min((self.scale.burst - self.previous).max(0));
        self.counted(self.previous, self.stamp_us) - counted_before
    }

    /// The node knows more of the key than the record does: of what can be leased the lower holds, and
    /// what the node holds was there beside it.
    fn claim(&mut self, entry: &Entry, outstanding: i64) {
        let here = self.outstanding[0] + self.outstanding[1];
        if let Some(claim) = entry.claim {
            match self.scale.curve {
                Curve::SlidingWindow => self.join_charges(claim),
                _ => self.unleased = self.unleased.min(claim.unleased),
            }
            self.level = self.level.min(self.unleased + here);
        }
        // Of a sliding window, what was charged in the one before still counts.
        let before = match self.scale.curve {
            Curve::SlidingWindow => self.counted(self.previous, self.stamp_us),
            _ => 0,
        };
        let most = self.scale.burst - before;
        self.level = (self.level + outstanding).min(most).max(-NUMBER_MAX);
    }

    /// Of a sliding window the most that anybody knows was charged holds, in the window now and in the one before. The lower level
    /// with the higher charge of the window before would give back what leaves twice. A record that begins empty has charged all in
    /// the window now, and nothing in the one before.
    fn join_charges(&mut self, claim: Claim) {
        let (burst, told) = (self.scale.burst, claim.previous.min(self.scale.burst));
        let charged =
            |unleased: i64, previous| burst - unleased - self.counted(previous, self.stamp_us);
        let own = charged(self.unleased, self.previous);
        let previous = if own < burst { self.previous.max(told) } else { self.previous };
        let most = own.max(charged(claim.unleased, told));
        let unleased = burst - most - self.counted(previous, self.stamp_us);
        (self.unleased, self.previous) = (unleased.max(-NUMBER_MAX), previous);
    }

    /// Charges what was spent on credit and under outage policies, and takes charges back unless the record is `anew`: then
    /// they were charged to an earlier one.
    fn charge(&mut self, entry: &Entry, anew: bool, lane: &Lane) {
        let Scale { rate, token, burst, .. } = self.scale;
        let spent = entry.spent + entry.debt + entry.allowed;
        self.charged = (self.charged + spent).min(SUM_MAX);
        let debt = entry.debt.saturating_mul(token).min(NUMBER_MAX);
        self.level = (self.level - debt).max(-NUMBER_MAX);
        self.unleased -= debt;
        if !anew {
            self.take_back_unspent(entry);
        }
        let taken = entry.taken + self.take_window_before(entry.taken_before);
        if taken > 0 {
            let less = |units: i64| units.min(0).max(units - taken);
            (self.level, self.unleased) = (less(self.level), less(self.unleased));
        }
        if !anew {
            self.refund(entry);
        }
        if entry.reset {
            self.reset();
        }
        let found = self.level - self.outstanding[0] - self.outstanding[1];
        self.unleased = self.unleased.max(found).min(self.cap(self.depth[0] + self.depth[1]));
        if entry.restore && self.is_windows() {
            self.unleased = self.unleased.min(found);
        } else if entry.restore {
            // What was charged in a life that is lost too is not in the level, but was in a depth. What is
            // outstanding is the most that there can be, and may be less.
            self.level = self.level.min(self.unleased).max(-NUMBER_MAX);
        }
        // What all nodes may spend on credit is never written off: they would have it twice.
        let credit = lane.most_nodes.saturating_mul(CREDIT_TOKENS).saturating_mul(token);
        // Nor is what a log has beyond its burst, because another plan had allowed it: that leaves by itself.
        let beyond = (self.slots.sum() - burst).clamp(0, NUMBER_MAX);
        let lowest = -burst.max(rate * DEBT_US).max(credit.min(NUMBER_MAX)) - beyond;
        let lowest = lowest.max(-NUMBER_MAX);
        if self.unleased < lowest {
            // Below -2^53 doubles skip integers, so the script and this count from there.
            let unleased = self.unleased.max(-SUM_MAX);
            self.written_off = (self.written_off + (lowest - unleased)).min(SUM_MAX);
            self.unleased = lowest;
            if self.is_windows() {
                self.level = lowest + self.outstanding[0] + self.outstanding[1];
            }
        }
    }

    // ---- expiry ------------------------------------------------------------------------------

    /// Milliseconds until the record may be forgotten: full, and all leases ended.
    pub(crate) fn keep_ms(&self) -> i64 {
        (self.full_us() + 2 * self.epoch_us) / 1000 + RECORD_MARGIN_MS
    }

    /// Whether the record is kept for long enough already.
    pub(super) fn is_kept(&self, time_ms: i64) -> bool {
        let spare_us =
            (self.until_ms - time_ms - RECORD_MARGIN_LEAST_MS) * 1000 - 2 * self.epoch_us;
        let missing = self.scale.burst - self.unleased;
        if self.is_windows() {
            return spare_us >= self.full_us();
        }
        spare_us >= 0 && i128::from(missing) <= i128::from(spare_us) * i128::from(self.scale.rate)
    }
}

/// The level of windows at `until_us`, and what was charged in the window before.
fn pass_windows(
    scale: &Scale,
    level: i64,
    previous: i64,
    from_us: i64,
    until_us: i64,
) -> (i64, i64) {
    let (level, previous) = scale.pass_windows(level, previous, from_us, until_us);
    (level.max(-NUMBER_MAX), previous)
}

/// The level at `now_us` of a key that had nothing at `since_us`, and what was charged in the window before.
fn empty_since(scale: &Scale, slots: &mut Slots, since_us: i64, now_us: i64) -> (i64, i64) {
    match scale.curve {
        Curve::Refill => (flow(0, scale.rate, now_us - since_us, scale.burst), 0),
        Curve::SlidingLog => (slots.pass(scale, 0, since_us.min(now_us), now_us), 0),
        // Which window it was is not known.
        Curve::CalendarWindow => (0, 0),
        _ => pass_windows(scale, 0, 0, since_us.min(now_us), now_us),
    }
}

/// Adds to a sum of leases or demands.
pub(super) fn raise(sum: &mut i64, by: i64) {
    *sum = (*sum + by).min(NUMBER_MAX);
}

/// Takes from a sum of leases or demands.
fn lower(sum: &mut i64, by: i64) {
    *sum = (*sum - by).max(0);
}

/// Adds to a sum of what is outstanding.
pub(super) fn shift(sum: &mut i64, by: i64) {
    *sum = (*sum + by).clamp(-NUMBER_MAX, NUMBER_MAX);
}

/// `level` after `rate` has flowed in for `micros`, at most `cap`.
pub(super) fn flow(level: i64, rate: i64, micros: i64, cap: i64) -> i64 {
    let flowed = i128::from(level) + i128::from(rate) * i128::from(micros);
    flowed.min(i128::from(cap)) as i64
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sync::message::Held;

    /// A record of a window of a second with 1000 tokens, brought up to date at 10.5 s.
    pub(crate) fn sliding(previous: i64, leased: i64) -> Key {
        let scale = Scale {
            rate: 1000,
            token: 1_000_000,
            burst: 1_000_000_000,
            curve: Curve::SlidingWindow,
        };
        Key {
            scale,
            version: 0,
            epoch_us: 5_000_000,
            until_ms: 0,
            written_off: 0,
            birth_us: 0,
            recovering_until_us: 0,
            viewed_us: 0,
            heard: 0,
            after_silence: 0,
            previous,
            beyond: [0; 2],
            window_ends_us: 0,
            slots: Slots::default(),
            stamp_us: 10_500_000,
            level: scale.burst - previous / 2,
            unleased: 0,
            charged: 0,
            leased: [leased, 0],
            depth: [0; 2],
            outstanding: [0; 2],
            demand: [0; 2],
        }
    }

    #[test]
    fn refill_of_a_sliding_window_flows_until_its_end() {
        let mut key = sliding(800_000_000, 800);
        assert_eq!(key.slope(), 800);
        key.pass(1, 10_500_000, 10_999_999);
        assert_eq!((key.outstanding, key.leased), ([499_999 * 800, 0], [800, 0]));
        key.pass(1, 10_999_999, 13_000_000);
        assert_eq!((key.outstanding, key.leased), ([500_000 * 800, 0], [0, 0]));
        assert_eq!(key.slope(), 0, "nothing was charged");
    }

    #[test]
    fn sliding_window_charges_spent_before_to_the_window_before() {
        let entry = |spent_before, stamp_us| Entry {
            spent: 100,
            spent_before,
            held: Held { stamp_us, ..Held::default() },
            ..Entry::empty(sliding(0, 0).scale)
        };
        // At the middle of a window, half of the one before counts. No more counts as spent before than was spent, and a
        // window has a burst.
        for (spent_before, held_us, previous, charged, counts) in [
            (60, 9_999_999, 0, 60, 30),
            (300, 9_000_000, 0, 100, 50),
            (60, 9_000_000, 970, 30, 15),
            (60, 10_000_000, 0, 0, 0),
            (60, 8_999_999, 0, 0, 0),
        ] {
            let mut key = sliding(previous * 1_000_000, 0);
            let less = key.charge_window_before(&entry(spent_before, held_us), 100_000_000);
            assert_eq!(key.previous, (previous + charged) * 1_000_000, "of {spent_before}");
            assert_eq!(less, (charged - counts) * 1_000_000, "of {spent_before}");
        }
    }

    /// At the middle of a window, half of what policies took in the one before counts; that window has a burst.
    #[test]
    fn sliding_window_charges_what_policies_took_before_to_the_window_before() {
        for (taken, previous, charged, counts) in [(60, 0, 60, 30), (60, 970, 30, 15)] {
            let mut key = sliding(previous * 1_000_000, 0);
            assert_eq!(key.take_window_before(taken * 1_000_000), counts * 1_000_000);
            assert_eq!(key.previous, (previous + charged) * 1_000_000, "{taken} were taken");
            key.scale.curve = Curve::FixedWindow;
            assert_eq!(key.take_window_before(taken), 0, "it has ended");
        }
    }

    /// At the middle of a window half of what was charged in the one before counts. The most that was charged in either holds: where
    /// the lower level held with the higher charge of the window before, 1870 of 1000 tokens were admitted in a window.
    #[test]
    fn sliding_window_whose_record_was_lost_joins_the_most_that_was_charged_in_each_window() {
        let token = 1_000_000;
        let mut key = sliding(0, 0);
        key.unleased = key.level;
        // Charged in the window now by each claim: 100, 250 and 400; more than a burst counts as one.
        for ((unleased, previous, outstanding), (left, level, before)) in [
            ((600, 600, 0), (600, 600, 600)),
            ((650, 200, 100), (450, 550, 600)),
            ((100, 2000, 0), (100, 100, 1000)),
        ] {
            let (unleased, previous) = (unleased * token, previous * token);
            let claim = Some(Claim { unleased, previous, viewed_us: 0 });
            let entry = Entry { claim, ..Entry::empty(key.scale) };
            key.claim(&entry, outstanding * token);
            let found = [key.unleased, key.level, key.previous].map(|units| units / token);
            assert_eq!(found, [left, level, before], "{claim:?}");
        }
    }

    /// What each of many windows pays was more than 64 bits hold, and came out as a debt.
    #[test]
    fn sliding_window_that_was_idle_for_ages_owes_nothing() {
        let curve = Curve::SlidingWindow;
        let burst = 1 << 52;
        let scale = Scale { rate: 1 << 40, token: 1 << 40, burst, curve };
        let window_us = scale.window_us();
        for windows in [2, 2047, 2048, 2049, 3000, 4096, 5000, 100_000_000] {
            let passed = pass_windows(&scale, 0, 0, 0, windows * window_us);
            assert_eq!(passed, (burst, 0), "after {windows} windows");
        }
        // Of three bursts that were charged one is paid by each window, and counts in the next one.
        let burst = 1 << 50;
        let scale = Scale { burst, ..scale };
        let window_us = scale.window_us();
        let passed =
            [1, 2, 3, 4].map(|edge| pass_windows(&scale, -2 * burst, 0, 0, edge * window_us));
        assert_eq!(passed, [(-2 * burst, burst), (-burst, burst), (0, burst), (burst, 0)]);
    }
}
