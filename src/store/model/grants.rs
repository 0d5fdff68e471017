//! What a record gives to a node: tokens, refill and depth.

use super::key::{At, Key, SUM_MAX, flow, raise, shift};
use super::lane::Lane;
use crate::quota::{Curve, Scale};
use crate::sync::message::{DEBT_US, Entry, Given, Held, NUMBER_MAX, Withheld};

/// Small debt is repaid in about this time, by a sixteenth of the rate at least and half of it at most.
const REPAY_US: i64 = 100_000;
const REPAY_LEAST_PART: i64 = 16;
/// At a window's end refill leaves a part of a token on each node. It is leased where a node's even part of the window is
/// this many tokens or more, or where the node has much more than an even part.
const WINDOW_TOKENS_A_NODE: i64 = 40;
/// The least of it that is leased to a node in a window, in tokens: where even parts are large, and where they are not.
const WINDOW_REFILL_LEAST: [i64; 2] = [20, 80];

/// What a node asks for, and how far the store may give it.
struct Asking<'a> {
    entry: &'a Entry,
    held: Held,
    /// Its part of all demand.
    share: f64,
    /// The lane waits for what nodes took while it was silent.
    returning: bool,
    giving: bool,
    /// What may not be given, in units.
    reserved: i64,
    /// What may not be given as tokens, because leased refill is behind a level that rises by whole tokens.
    kept_back: i64,
}

/// Refill that is leased in units per microsecond, the depth that goes with it in tokens, and refill that is recalled.
struct Refill {
    rate: i64,
    depth: i64,
    recall: i64,
}

impl Key {
    /// Gives tokens, refill and depth to the node that sent `entry`. `void`: its lease has ended.
    pub(super) fn grant(&mut self, entry: &Entry, void: bool, at: At<'_>) -> Given {
        let At { lane, caller, now_us } = at;
        let token = self.scale.token;
        let demand = self.demand[0] + self.demand[1];
        let returning = lane.waits_after_silence(now_us);
        let asking = Asking {
            entry,
            held: self.kept(entry, void),
            share: if demand > 0 { entry.demand as f64 / demand as f64 } else { 0.0 },
            returning,
            giving: !lane.waits_after_loss(now_us)
                && now_us >= self.recovering_until_us
                && (caller.settled || !returning),
            reserved: if returning { self.reserve(lane, now_us) } else { 0 },
            kept_back: 0,
        };
        let target = self.target(&asking, lane, caller.nodes);
        let asking = Asking { kept_back: self.kept_back(target), ..asking };
        let tokens = if asking.giving { self.give_tokens(&asking, caller.nodes) } else { 0 };
        self.unleased -= tokens * token;
        let leased = self.leased[0] + self.leased[1];
        let Refill { rate, depth, recall } = self.refill(&asking, tokens, demand, target);
        self.leased[0] += rate;
        raise(&mut self.depth[0], depth);
        shift(&mut self.outstanding[0], tokens * token);
        if asking.reserved > 0 {
            // Depth given in place of the reserve displaces it.
            self.unleased = self.unleased.min(self.cap(self.depth[0] + self.depth[1]));
        }
        // What is kept back is not to be asked for.
        let available = (self.unleased - asking.kept_back).max(self.unleased.min(0));
        Given {
            tokens,
            rate,
            depth,
            stamp_us: self.stamp_us,
            tag: self.epoch(),
            life_us: (self.epoch() + 2) * self.epoch_us - now_us,
            available,
            level: (self.unleased + self.outstanding[0] + self.outstanding[1])
                .clamp(-SUM_MAX, SUM_MAX),
            leased: leased + rate,
            recall,
            previous: if self.scale.curve == Curve::SlidingWindow { self.previous } else { 0 },
            void,
            lost: false,
            withheld: self.withheld(&asking, lane, now_us),
        }
    }

    /// What the node keeps of its lease.
    fn kept(&self, entry: &Entry, void: bool) -> Held {
        if void {
            return Held::default();
        }
        let has_refill_ended = self.scale.has_refill_ended(entry.held.stamp_us, self.stamp_us);
        Held { rate: if has_refill_ended { 0 } else { entry.held.rate }, ..entry.held }
    }

    /// What is not given as tokens: a sliding window's level rises by whole tokens, ahead of its refill by less than one.
    fn kept_back(&self, target: i64) -> i64 {
        let leases = self.leased[0] + self.leased[1] > 0 || target > 0;
        if self.scale.curve == Curve::SlidingWindow && leases { self.scale.token } else { 0 }
    }

    /// The refill that the node should have, in units per microsecond.
    fn target(&self, asking: &Asking<'_>, lane: &Lane, nodes: i64) -> i64 {
        let slope = self.slope();
        let mut target = asking.entry.want_rate.min((slope as f64 * asking.share).floor() as i64);
        if asking.returning {
            // The others still live on their shares.
            target = target.min(slope / lane.recovery.expected.max(1));
        }
        let (tokens, nodes) = (self.scale.burst / self.scale.token, nodes.max(1));
        let is_small = tokens < WINDOW_TOKENS_A_NODE.saturating_mul(nodes);
        let in_window = target.saturating_mul(self.scale.window_us());
        let is_little = in_window / WINDOW_REFILL_LEAST[usize::from(is_small)] < self.scale.token;
        if self.is_windows() && is_little { 0 } else { target }
    }

    fn withheld(&self, asking: &Asking<'_>, lane: &Lane, now_us: i64) -> Withheld {
        let doubtful = lane.lost_us > 0 || asking.returning || now_us < self.recovering_until_us;
        match (!asking.giving || asking.reserved > 0, doubtful) {
            (false, _) => Withheld::Nothing,
            (true, false) => Withheld::Tokens,
            (true, true) => Withheld::TokensAndCredit,
        }
    }

    /// The refill to lease beside `tokens` that are given, or to recall, and the depth that goes with both.
    fn refill(&self, asking: &Asking<'_>, tokens: i64, demand: i64, target: i64) -> Refill {
        let Scale { burst, .. } = self.scale;
        let Asking { entry, held, share, returning, giving, reserved, .. } = *asking;
        let slope = self.slope();
        if slope == 0 {
            return Refill { rate: 0, depth: tokens, recall: held.rate };
        }
        let leased = self.leased[0] + self.leased[1];
        let unleased = self.unleased;
        let most = if unleased < 0 { slope - repayment(slope, unleased) } else { slope };
        // A node that gets less than half of what it wants cannot do with tokens alone.
        let short = entry.needed + entry.want > 2 * tokens;
        let pressing = returning || demand > self.scale.rate + self.scale.rate / 4 || short;
        let (mut added, mut depth) = (0, tokens);
        if giving && (pressing || unleased < burst / 20) {
            added = (target - held.rate).min(most - leased).max(0);
            if held.rate + added > 0 {
                // Depth may take the place of the reserve, which is cut below, and a debt makes no room for any.
                let leasable = (unleased - reserved).max(0);
                depth += self.extra_depth(leasable, share, held.depth, tokens);
            }
        }
        let recall = if unleased > burst / 10 && !pressing {
            held.rate
        } else {
            surplus_rate(held.rate, target, leased, most, unleased)
        };
        Refill { rate: added, depth, recall }
    }

    /// What nodes that have not reported yet may have taken under their policies, in units.
    fn reserve(&self, lane: &Lane, now_us: i64) -> i64 {
        let Scale { rate, burst, .. } = self.scale;
        let recovery = &lane.recovery;
        let flowed = flow(0, rate, recovery.since_us - recovery.from_us, burst);
        // They take more than flows into a full share, since others have taken theirs.
        let since_us = now_us - recovery.since_us;
        let whole = flow(self.after_silence.max(flowed), rate, since_us, NUMBER_MAX);
        let missing = (recovery.expected - recovery.settled).max(0);
        (whole as f64 * (missing as f64 / recovery.expected.max(1) as f64)).ceil() as i64
    }

    /// Gives tokens out of what is unleased and not reserved: first what callers wait for, then half of the rest by
    /// share and half spread evenly, and one at least while there is one.
    fn give_tokens(&self, asking: &Asking<'_>, nodes: i64) -> i64 {
        let (token, entry) = (self.scale.token, asking.entry);
        let level = self.unleased - asking.reserved - asking.kept_back;
        if level <= 0 {
            return 0;
        }
        let needed = entry.needed.min(level / token);
        let level = level - needed * token;
        let part = (level as f64 * (asking.share / 2.0 + 0.5 / nodes.max(1) as f64)).floor();
        let least = i64::from(level >= token);
        let tokens = entry.want.min(((part / token as f64).floor() as i64).max(least));
        needed + tokens
    }

    /// The depth that goes with a leased refill, on top of `tokens`.
    fn extra_depth(&self, available: i64, share: f64, held_depth: i64, tokens: i64) -> i64 {
        let Scale { token, burst, .. } = self.scale;
        let capacity = burst / token;
        let room = ((capacity as f64 * share / 2.0).floor() as i64).max(2).min(capacity);
        let free = (burst - available) / token - self.depth[0] - self.depth[1] - tokens;
        (room - held_depth - tokens).min(free).max(0)
    }
}

/// The refill that is kept from leases so that debt is repaid: soon, but no more of it than the
/// debt needs. While half of it stays leased nodes have no credit. Of a debt of more than half a second's rate, all is kept in
/// the end: else debt would grow where requests cost many times what they reserve.
fn repayment(rate: i64, available: i64) -> i64 {
    let soon = (-available / REPAY_US).clamp(rate / REPAY_LEAST_PART, rate / 2);
    soon.max((-available / DEBT_US).min(rate))
}

/// What a node should give back of its leased refill: what is well above its target, and its
/// part of what keeps debt from being repaid.
fn surplus_rate(held_rate: i64, target: i64, leased: i64, most: i64, available: i64) -> i64 {
    let above = held_rate - target;
    let above = if above > target / 4 { above } else { 0 };
    let repay = if available < 0 && leased > most {
        (held_rate as f64 * ((leased - most) as f64 / leased as f64)).ceil() as i64
    } else {
        0
    };
    above.max(repay).min(held_rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Half of the refill stayed leased, whatever was owed.
    #[test]
    fn debt_of_a_seconds_rate_keeps_all_refill_from_leases() {
        const RATE: i64 = 1600;
        let (tenth, second) = (RATE * REPAY_US, RATE * DEBT_US);
        let owed = [1, tenth / 4, tenth, second / 2, second / 4 * 3, second, 9 * second];
        let kept = owed.map(|owed| repayment(RATE, -owed));
        assert_eq!(kept, [100, 400, 800, 800, 1200, RATE, RATE]);
    }
}
