//! What this node knows of the excess: what can have gone wrong, and the deepest debt that it saw.

use super::engine::Context;
use crate::bound::{Excess, Incidents, bound_of};
use crate::limit::{Mode, Terms};

/// What went wrong in a lane, as far as this node can know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneTrouble {
    /// Times that the lane lost its memory.
    pub(crate) losses: u32,
    /// Times that keys of the lane lived on outage policies, and for how long all together.
    pub(crate) outages: u32,
    pub(crate) outage_us: u64,
    /// Records of keys that were found to be lost.
    pub(crate) lost_records: u32,
    /// Tokens lent from old views in outages, at most of one key in each.
    pub(crate) lent: i64,
}

impl LaneTrouble {
    /// The store was silent for so long, and keys lived on their outage policies.
    pub(crate) fn lived_through(&mut self, silent_us: u64) {
        self.outages += 1;
        self.outage_us += silent_us;
    }

    /// A key of the lane was lent so many tokens.
    pub(crate) fn lend(&mut self, tokens: i64) {
        self.lent += tokens;
    }

    /// A key lives in one lane: what counts is the worst of each.
    pub(crate) fn worst(self, other: Self) -> Self {
        Self {
            losses: self.losses.max(other.losses),
            outages: self.outages.max(other.outages),
            outage_us: self.outage_us.max(other.outage_us),
            lost_records: self.lost_records.max(other.lost_records),
            lent: self.lent.max(other.lent),
        }
    }
}

/// What is known of the nodes and of this node's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    /// Nodes that share the limits, by the store's last word.
    nodes: u32,
    /// Nodes that have gone since this one began.
    gone: u32,
    /// Stalls of the cached clock beyond what leases allow for, all together.
    stalls_us: u64,
}

impl Known {
    /// The store has counted the nodes. Returns whether their number is new.
    pub(crate) fn count(&mut self, nodes: u32) -> bool {
        self.gone += self.nodes.saturating_sub(nodes);
        std::mem::replace(&mut self.nodes, nodes) != nodes
    }

    pub(crate) fn stalled(&mut self, stall_us: u64) {
        self.stalls_us += stall_us;
    }

    /// Counts what a node can know of; when it was cut off, it takes it that all were.
    fn incidents(&self, trouble: LaneTrouble, nodes: u32) -> Incidents {
        Incidents {
            deaths: self.gone,
            losses_of_memory: trouble.losses,
            // Nobody knows whether the others were heard in time.
            unheard: trouble.losses > 0,
            clock_stalls: self.stalls_us > 0,
            clock_jumps_s: self.stalls_us as f64 / 1e6,
            nodes_cut_off: trouble.outages.saturating_mul(nodes),
            cut_off_node_s: f64::from(nodes) * trouble.outage_us as f64 / 1e6,
            ..Incidents::default()
        }
    }
}

/// What is known of one limit's excess.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExcessBooks {
    /// The highest bound that ever held, in tokens.
    bound: Option<f64>,
    /// The deepest debt that a reply told of, in units.
    debt: i64,
}

impl ExcessBooks {
    /// A reply told of this level, in units.
    pub(crate) fn saw(&mut self, level: i64) {
        self.debt = self.debt.max(-level);
    }

    fn raise(&mut self, terms: &Terms, nodes: u32, incidents: &Incidents) {
        let bound = bound_of(terms, nodes, incidents);
        self.bound = Some(self.bound.map_or(bound, |highest| highest.max(bound)));
    }

    fn told(&self, terms: &Terms) -> Excess {
        let observed_tokens = self.debt as f64 / terms.scale.token as f64;
        Excess { bound_tokens: self.bound, observed_tokens }
    }
}

impl Context {
    /// Brings each limit's bound up to date with what has gone wrong by now.
    pub(crate) fn raise_bounds(&mut self, trouble: LaneTrouble) {
        let shared_by = self.nodes().map(|nodes| nodes as u32);
        for limit in &mut self.limits {
            let nodes = if limit.terms.mode == Mode::Local { Some(1) } else { shared_by };
            if let Some(nodes) = nodes {
                let incidents = self.known.incidents(trouble, nodes);
                limit.excess.raise(&limit.terms, nodes, &incidents);
            }
        }
    }

    /// What is known of each limit's excess, in the limits' order.
    pub(crate) fn excess(&self) -> Vec<Excess> {
        self.limits.iter().map(|limit| limit.excess.told(&limit.terms)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    fn terms(credit: u32) -> Terms {
        Limit::new("x", Quota::per_second(1000).burst(100)).credit(credit).validate().unwrap()
    }

    #[test]
    fn who_comes_and_goes_is_counted_once() {
        let mut known = Known::default();
        assert!(known.count(20));
        assert!(!known.count(20));
        // Each of five is replaced: the new one comes before the old one is missed.
        for _ in 0..5 {
            assert!(known.count(21) && known.count(20));
        }
        let incidents = known.incidents(LaneTrouble::default(), 20);
        assert_eq!(incidents, Incidents { deaths: 5, ..Incidents::default() });
    }

    #[test]
    fn a_bound_that_held_once_is_never_taken_back() {
        let mut books = ExcessBooks::default();
        assert_eq!(books.told(&terms(2)).bound_tokens, None);
        books.raise(&terms(2), 20, &Incidents::default());
        books.raise(&terms(0), 20, &Incidents::default());
        let bound = books.told(&terms(0)).bound_tokens.unwrap();
        assert!((bound - 40.0).abs() < 1e-6, "{bound}");
    }

    #[test]
    fn the_deepest_debt_is_kept_and_what_was_there_is_none() {
        let mut books = ExcessBooks::default();
        let unit = terms(1).scale.token;
        for level in [5, -3, -7, -2, 9] {
            books.saw(level * unit);
        }
        assert!((books.told(&terms(1)).observed_tokens - 7.0).abs() < 1e-9);
    }

    #[test]
    fn an_outage_that_is_shared_through_is_counted_for_all_nodes() {
        let mut trouble = LaneTrouble::default();
        trouble.lived_through(3_000_000);
        let other = LaneTrouble { losses: 1, ..LaneTrouble::default() };
        let trouble = trouble.worst(other);
        let incidents = Known::default().incidents(trouble, 4);
        // Credit; three seconds of the rate and the burst; and the burst for the loss.
        let expected = 4.0 + (3000.0 + 100.0) + (100.0 + 4.0);
        let bound = bound_of(&terms(1), 4, &incidents);
        assert!((bound - expected).abs() < 1e-6, "{bound}");
    }
}
