//! What this node knows of the excess: what can have gone wrong, and the deepest debt that it saw.

use crate::bound::{Excess, Incidents, bound_of};
use crate::limit::Terms;
use crate::time::Timestamp;

/// A loss of memory within this time after the one before has the smaller term: see [`bound`](crate::bound).
pub(super) const REPEATED_US: u64 = 5_000_000;

/// What went wrong in a lane, as far as this node can know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneTrouble {
    /// Times that the lane lost its memory.
    pub(crate) losses: u32,
    /// Of these, times that it had not in the [`REPEATED_US`] before, and when it did last.
    pub(crate) first_losses: u32,
    lost_at: Option<Timestamp>,
    /// Records of keys that were found to be lost, at most of one key.
    pub(crate) lost_records: u32,
    /// Times that keys of the lane lived on outage policies while no node reached the store.
    pub(crate) outages: u32,
    /// Tokens lent by old views in these: the most of one key in each, by this node.
    pub(crate) lent: i64,
    /// How long this node went on by its policies when others had reached the store again, all together.
    pub(crate) late_us: u64,
    /// Times that they did while other nodes reached it, and for how long all together.
    pub(crate) cut_off: u32,
    pub(crate) cut_off_us: u64,
    /// How long keys of the lane lived on outage policies before the store answered this node first; 0 if they did not.
    pub(crate) unanswered_us: u64,
    /// Forward jumps of the store's clock: how many, and all together.
    pub(crate) jumps: u32,
    pub(crate) jumps_us: u64,
}

impl LaneTrouble {
    /// The lane was found to have lost its memory.
    pub(crate) fn lost_memory(&mut self, now: Timestamp) {
        self.losses += 1;
        let repeated = self.lost_at.is_some_and(|at| now <= at.plus_micros(REPEATED_US));
        self.first_losses += u32::from(!repeated);
        self.lost_at = Some(now);
    }

    /// Keys of the lane were under their outage policies while no node reached the store, and for `late_us` after
    /// the first did.
    pub(crate) fn lived_through(&mut self, late_us: u64, lent: i64) {
        self.outages += 1;
        self.lent += lent;
        self.late_us += late_us;
    }

    /// Keys of the lane were under their outage policies for this long while other nodes reached the store.
    pub(crate) fn lived_alone(&mut self, for_us: u64) {
        self.cut_off += 1;
        self.cut_off_us += for_us;
    }

    /// Keys of the lane were under their outage policies for this long before the store answered this node first.
    pub(crate) fn lived_unanswered(&mut self, for_us: u64) {
        self.unanswered_us += for_us.max(1);
    }

    /// The store's clock jumped ahead by `by_us`.
    pub(crate) fn store_jumped(&mut self, by_us: u64) {
        self.jumps += 1;
        self.jumps_us += by_us;
    }

    /// A key is in one lane: what counts is the worst of each.
    pub(crate) fn worst(self, other: Self) -> Self {
        Self {
            losses: self.losses.max(other.losses),
            first_losses: self.first_losses.max(other.first_losses),
            lost_at: self.lost_at.max(other.lost_at),
            lost_records: self.lost_records.max(other.lost_records),
            outages: self.outages.max(other.outages),
            lent: self.lent.max(other.lent),
            late_us: self.late_us.max(other.late_us),
            cut_off: self.cut_off.max(other.cut_off),
            cut_off_us: self.cut_off_us.max(other.cut_off_us),
            unanswered_us: self.unanswered_us.max(other.unanswered_us),
            jumps: self.jumps.max(other.jumps),
            jumps_us: self.jumps_us.max(other.jumps_us),
        }
    }
}

/// Up to this many jumps of a clock count each for itself.
const JUMPS_MAX: usize = 1000;

/// `jumps` of `all_us` together, in seconds: of equal length, which gives the most.
fn pieces(jumps: usize, all_us: u64) -> Vec<f64> {
    let jumps = jumps.min(JUMPS_MAX);
    vec![all_us as f64 / 1e6 / jumps.max(1) as f64; jumps]
}

/// Nodes that came and went by the store's counts: those of all services, or those that have one limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turnover {
    /// Nodes by the store's last count.
    nodes: u32,
    /// Nodes that have gone; and those that have joined since a count first stood. A node that is replaced by one that
    /// comes first is one of each.
    gone: u32,
    joined: u32,
}

impl Turnover {
    /// The store has counted the nodes. Once a count has `stood`, nodes that began together have been counted, and more
    /// have joined. Returns whether their number is new.
    pub(crate) fn count(&mut self, nodes: u32, stood: bool) -> bool {
        self.gone = self.gone.saturating_add(self.nodes.saturating_sub(nodes));
        if stood {
            self.joined = self.joined.saturating_add(nodes.saturating_sub(self.nodes));
        }
        std::mem::replace(&mut self.nodes, nodes) != nodes
    }
}

/// What is known of all nodes and of this node's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    /// The nodes of the namespace, whatever limits they have: the highest count of any lane.
    pub(crate) nodes: Turnover,
    /// Stalls of the cached clock beyond what leases allow for: how many, and all together.
    stalls: usize,
    stalls_us: u64,
}

impl Known {
    pub(crate) fn stalled(&mut self, stall_us: u64) {
        self.stalls += 1;
        self.stalls_us += stall_us;
    }

    /// Counts what a node can know of, for a limit that `nodes` have: of nodes that were cut off alone, itself.
    pub(crate) fn incidents(
        &self,
        turnover: Turnover,
        nodes: u32,
        trouble: LaneTrouble,
    ) -> Incidents {
        Incidents {
            deaths: turnover.gone,
            joins: turnover.joined,
            losses_of_memory: trouble.losses,
            losses_repeated: trouble.losses - trouble.first_losses,
            lost_records: trouble.lost_records,
            // Each limit has its own.
            resets: 0,
            clock_jumps_s: pieces(self.stalls, self.stalls_us),
            store_jumps_s: pieces(trouble.jumps as usize, trouble.jumps_us),
            // The nodes that the store waited for may not be those that held leases.
            losses_unheard: if self.nodes.gone > 0 || self.nodes.joined > 0 {
                trouble.losses
            } else {
                0
            },
            nodes_cut_off: trouble.cut_off,
            cut_off_node_s: trouble.cut_off_us as f64 / 1e6,
            nodes_unanswered: u32::from(trouble.unanswered_us > 0),
            unanswered_node_s: trouble.unanswered_us as f64 / 1e6,
            outages: trouble.outages,
            // Each node may have lent as much.
            lent_tokens: trouble.lent as f64 * f64::from(nodes.max(1)),
            returned_apart_s: trouble.late_us as f64 / 1e6,
        }
    }
}

/// What is known of one limit's excess.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExcessBooks {
    /// The highest bound that ever held, in tokens.
    bound: Option<f64>,
    /// The deepest debt in any reply, in units.
    debt: i64,
}

impl ExcessBooks {
    /// A reply contained this level, in units.
    pub(crate) fn saw(&mut self, level: i64) {
        self.debt = self.debt.max(-level);
    }

    pub(crate) fn raise<'a>(
        &mut self,
        terms: impl Iterator<Item = &'a Terms>,
        nodes: u32,
        incidents: &Incidents,
    ) {
        let bound = bound_of(terms, nodes, incidents);
        self.bound = Some(self.bound.map_or(bound, |highest| highest.max(bound)));
    }

    pub(crate) fn figures(&self, terms: &Terms) -> Excess {
        let observed_tokens = self.debt as f64 / terms.scale.token as f64;
        Excess { bound_tokens: self.bound, observed_tokens }
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
    fn replaced_node_is_one_death_and_one_join() {
        let mut turnover = Turnover::default();
        // All begin together.
        assert!(turnover.count(3, false) && turnover.count(20, false));
        assert!(!turnover.count(20, true));
        // Each of five is replaced: the new one comes before the old one is missed.
        for _ in 0..5 {
            assert!(turnover.count(21, true) && turnover.count(20, true));
        }
        let incidents = Known::default().incidents(turnover, 20, LaneTrouble::default());
        assert_eq!(incidents, Incidents { deaths: 5, joins: 5, ..Incidents::default() });
    }

    #[test]
    fn incidents_are_told_in_seconds_and_in_tokens_of_all_nodes() {
        let trouble = LaneTrouble {
            losses: 3,
            first_losses: 1,
            lost_at: None,
            lost_records: 4,
            outages: 5,
            lent: 6,
            late_us: 2_500_000,
            cut_off: 7,
            cut_off_us: 1_500_000,
            unanswered_us: 500_000,
            jumps: 2,
            jumps_us: 3_000_000,
        };
        let mut known = Known::default();
        known.stalled(1_000_000);
        known.stalled(2_000_000);
        let told = Incidents {
            losses_of_memory: 3,
            losses_repeated: 2,
            lost_records: 4,
            clock_jumps_s: vec![1.5; 2],
            store_jumps_s: vec![1.5; 2],
            nodes_cut_off: 7,
            cut_off_node_s: 1.5,
            nodes_unanswered: 1,
            unanswered_node_s: 0.5,
            outages: 5,
            lent_tokens: 48.0,
            returned_apart_s: 2.5,
            ..Incidents::default()
        };
        assert_eq!(known.incidents(Turnover::default(), 8, trouble), told);
        known.nodes.joined = 1;
        let incidents = known.incidents(Turnover::default(), 8, trouble);
        assert_eq!(incidents, Incidents { losses_unheard: 3, ..told });
    }

    #[test]
    fn bound_that_held_once_is_never_taken_back() {
        let mut books = ExcessBooks::default();
        assert_eq!(books.figures(&terms(2)).bound_tokens, None);
        books.raise([&terms(2)].into_iter(), 20, &Incidents::default());
        books.raise([&terms(0)].into_iter(), 20, &Incidents::default());
        let bound = books.figures(&terms(0)).bound_tokens.unwrap();
        assert!((bound - 40.0).abs() < 1e-6, "{bound}");
    }

    #[test]
    fn deepest_debt_is_kept_and_what_was_there_is_none() {
        let mut books = ExcessBooks::default();
        let unit = terms(1).scale.token;
        for level in [5, -3, -7, -2, 9] {
            books.saw(level * unit);
        }
        assert!((books.figures(&terms(1)).observed_tokens - 7.0).abs() < 1e-9);
    }

    #[test]
    fn node_that_starts_in_an_outage_counts_what_its_share_may_admit() {
        let mut trouble = LaneTrouble::default();
        trouble.lived_unanswered(8_000_000);
        let incidents = Known::default().incidents(Turnover::default(), 32, trouble);
        let bound = bound_of([&terms(0)].into_iter(), 32, &incidents);
        // A sixteenth of the rate and of the burst, since it does not know of the others, and a token.
        assert!((bound - (8.0 * 62.5 + 6.25 + 1.0)).abs() < 1e-6, "{bound}");
    }

    #[test]
    fn outage_of_all_counts_by_what_views_lend_and_one_of_this_node_by_its_share() {
        let mut trouble = LaneTrouble::default();
        trouble.lived_alone(3_000_000);
        trouble.lived_through(500_000, 25);
        let other = LaneTrouble { losses: 1, first_losses: 1, ..LaneTrouble::default() };
        let incidents = Known::default().incidents(Turnover::default(), 4, trouble.worst(other));
        let bound = bound_of([&terms(1)].into_iter(), 4, &incidents);
        // Credit, and again for the loss; three seconds of a quarter of the rate, a quarter of the burst and
        // a token; the burst.
        let expected = 4.0 + 4.0 + (750.0 + 25.0 + 1.0) + 100.0;
        assert!((bound - expected).abs() < 1e-6, "{bound}");
    }

    #[test]
    fn memory_that_is_lost_again_soon_is_lost_once_for_first_credit() {
        let at = |second| Timestamp::from_micros(1_000_000 * second);
        let mut trouble = LaneTrouble::default();
        let counted = [0, REPEATED_US / 1_000_000, 10 * REPEATED_US / 1_000_000].map(|second| {
            trouble.lost_memory(at(second));
            (trouble.losses, trouble.first_losses)
        });
        assert_eq!(counted, [(1, 1), (2, 1), (3, 2)]);
    }

    #[test]
    fn jumps_of_the_stores_clock_add_up() {
        let mut trouble = LaneTrouble::default();
        trouble.store_jumped(5);
        trouble.store_jumped(7);
        assert_eq!((trouble.jumps, trouble.jumps_us), (2, 12));
    }
}
