//! A limit's numbers, checked and in the units that the floors below the limiter use.

use super::{CREDIT_MAX, DEFAULT_MAX_NODES, Mode, OutagePolicy};
use crate::algorithm::{Calendar, KeyRule};
use crate::quota::Scale;

/// The shortest tick of a key, however fast its burst is spent.
pub(super) const KEY_TICK_MIN_US: u64 = 2_000;

/// The least that the store has for an answer that no caller waits for.
const BACKGROUND_WAIT_US: u64 = 250_000;

/// A limit's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Terms {
    /// The quota in the units that leases are counted in, which are those of all plans of the limit.
    pub scale: Scale,
    /// The quota as the store is told it: the same, unless an update of the limit has to do with the units that it had.
    pub stored_scale: Scale,
    /// A key's tick: the sync interval, or a quarter of the time to fill, whichever is shorter. By
    /// accuracy each key has a tick of its own, and this is the longest.
    pub tick_us: u64,
    /// How the ticks of keys that are synced by accuracy follow their traffic.
    pub pace: Option<Pace>,
    /// Length of a lease epoch; a lease lasts one to two of them.
    pub epoch_us: u64,
    /// Credit in force: what the rule gives for the nodes there are.
    pub credit: Credit,
    /// Where the credit comes from.
    pub credit_rule: CreditRule,
    /// The highest cost that can be admitted, in tokens.
    pub cost_max: u32,
    /// Who decides.
    pub mode: Mode,
    /// The rule in the units that states of keys are kept in, unless the limit is leased.
    pub key_rule: Option<KeyRule>,
    /// Whose windows they are, if leased windows are a calendar's.
    pub calendar: Option<&'static Calendar>,
    /// This node's part of it in an outage, if the store decides or gives slots.
    pub share: Option<KeyRule>,
    /// What happens while the store is away.
    pub outage: OutagePolicy,
    /// How long a caller waits for the store at most.
    pub max_wait_us: u64,
    /// How many callers may wait for their turn at a time.
    pub max_waiting: u32,
    /// The least silence before the outage policy takes over.
    pub grace_us: u64,
    /// Version of the definition.
    pub version: u32,
}

impl Terms {
    /// The tick of a key that nothing is known of yet.
    pub(crate) fn first_tick_us(&self) -> u64 {
        self.pace.map_or(self.tick_us, |pace| pace.first_us())
    }

    /// How long the store has for an answer that no caller waits for, in microseconds.
    pub(crate) fn background_wait_us(&self) -> u64 {
        self.max_wait_us.max(BACKGROUND_WAIT_US)
    }
}

/// What a node may spend on a key before the store answers, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Credit {
    /// On any other key.
    pub known: u32,
    /// On a key that is new to it, or full by its last view if no other node has spent since.
    pub first: u32,
}

impl Credit {
    pub(crate) const NONE: Self = Self { known: 0, first: 0 };

    /// The same, as far as a key's burst by another rule allows.
    pub(crate) fn at_most(self, rule: &CreditRule) -> Self {
        Self { known: self.known.min(rule.known), first: self.first }
    }
}

/// How much credit a node gives a key, according to the number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CreditRule {
    /// The limit's burst, in tokens.
    pub burst: u64,
    /// The most for a key of which the node has a view, in tokens.
    pub known: u32,
    /// The most for another key; `None` for a part of the burst.
    pub first: Option<u32>,
    /// The most for all nodes together, in tokens, if that is limited. Then nodes give none before they know
    /// how many they are.
    pub together: Option<u64>,
    /// The number of nodes that is assumed before they are counted.
    pub uncounted: u32,
}

impl CreditRule {
    /// The same credit for each key and any number of nodes.
    pub(crate) const fn fixed(credit: u32) -> Self {
        Self {
            burst: 0,
            known: credit,
            first: Some(credit),
            together: None,
            uncounted: DEFAULT_MAX_NODES,
        }
    }

    /// The credit of each node; `None` while the number of nodes is unknown.
    pub(crate) fn at(&self, nodes: Option<u32>) -> Credit {
        let nodes = match (nodes, self.together) {
            (Some(nodes), _) => nodes.max(1),
            (None, None) => self.uncounted,
            (None, Some(_)) => return Credit::NONE,
        };
        let part = self.together.map_or(u64::MAX, |together| together / u64::from(nodes));
        let at_most_part = |tokens: u32| u64::from(tokens).min(part) as u32;
        let known = at_most_part(self.known);
        let first = at_most_part(self.first.unwrap_or_else(|| self.part_of_burst(nodes)));
        Credit { known, first: first.max(known) }
    }

    /// Half of the burst on one node, a quarter for all nodes together on several; at most [`CREDIT_MAX`], and
    /// a token at least.
    fn part_of_burst(&self, nodes: u32) -> u32 {
        let part = match nodes {
            1 => self.burst / 2,
            _ => self.burst.div_ceil(4 * u64::from(nodes)),
        };
        part.clamp(1, CREDIT_MAX.into()) as u32
    }
}

/// How often a key is synced by what it is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    /// Tokens that a node should be asked for in a tick at most.
    pub tokens: f64,
    /// The shortest tick.
    pub least_us: u64,
    /// The longest tick that traffic alone warrants.
    pub most_us: u64,
    /// The most key syncs a second, if there is a ceiling.
    pub ceiling: Option<f64>,
}

impl Pace {
    /// The tick that a demand of so many tokens per microsecond warrants.
    pub(crate) fn warranted_us(&self, demand_per_us: f64) -> u64 {
        ((self.tokens / demand_per_us.max(f64::MIN_POSITIVE)) as u64)
            .clamp(self.least_us, self.most_us)
    }

    fn first_us(&self) -> u64 {
        (super::DEFAULT_SYNC_INTERVAL.as_micros() as u64).clamp(self.least_us, self.most_us)
    }
}

/// A lease outlives several ticks: the power of two of seconds that holds four intervals.
pub(super) const fn epoch_us(interval_us: u64) -> u64 {
    let seconds = (4 * interval_us).div_ceil(1_000_000);
    seconds.next_power_of_two() * 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_epoch_holds_four_intervals() {
        assert_eq!(epoch_us(50_000), 1_000_000);
        assert_eq!(epoch_us(250_000), 1_000_000);
        assert_eq!(epoch_us(251_000), 2_000_000);
        assert_eq!(epoch_us(5_000_000), 32_000_000);
    }

    #[test]
    fn credit_together_is_divided_in_whole_tokens() {
        let rule =
            CreditRule { burst: 9000, known: 8, first: None, together: Some(90), uncounted: 16 };
        assert_eq!(rule.at(None), Credit::NONE);
        let known = [1, 11, 12, 20, 90, 91].map(|nodes| rule.at(Some(nodes)).known);
        assert_eq!(known, [8, 8, 7, 4, 1, 0]);
        for nodes in 1..=1000 {
            assert!(rule.at(Some(nodes)).first * nodes <= 90, "{nodes} nodes");
        }
    }

    #[test]
    fn fixed_credit_is_the_same_for_every_key_and_number_of_nodes() {
        let three = Credit { known: 3, first: 3 };
        for nodes in [None, Some(1), Some(u32::MAX)] {
            assert_eq!(CreditRule::fixed(3).at(nodes), three, "{nodes:?}");
        }
    }

    #[test]
    fn first_credit_is_a_part_of_the_burst() {
        let cases = [
            (100, None, 2),
            (100, Some(1), 15),
            (20, Some(1), 10),
            (1, Some(1), 1),
            (100, Some(4), 7),
            (20, Some(4), 2),
            (5, Some(8), 1),
            (1_000_000, Some(100), 15),
        ];
        for (burst, nodes, first) in cases {
            let rule = CreditRule { burst, known: 1, first: None, together: None, uncounted: 16 };
            let expected = Credit { known: 1, first };
            assert_eq!(rule.at(nodes), expected, "burst {burst} on {nodes:?} nodes");
        }
    }

    #[test]
    fn a_tick_is_as_long_as_its_traffic_allows_within_its_bounds() {
        let pace = Pace { tokens: 10.0, least_us: 5_000, most_us: 500_000, ceiling: None };
        let ticks = [0.0, 1.0, 100.0, 1000.0, 1e9].map(|per_s| pace.warranted_us(per_s / 1e6));
        assert_eq!(ticks, [500_000, 500_000, 100_000, 10_000, 5_000]);
    }
}
