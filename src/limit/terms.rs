//! A limit's numbers, checked and in the units that the floors below the limiter use.

use super::{COST_MAX, Mode, OutagePolicy};
use crate::quota::Scale;

/// The shortest tick of a key, however fast its burst is spent.
pub(super) const KEY_TICK_MIN_US: u64 = 2_000;

/// A limit's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Terms {
    /// Units of the quota.
    pub scale: Scale,
    /// A key's tick: the sync interval, or a quarter of the time to fill, whichever is shorter. By
    /// accuracy each key has a tick of its own, and this is the longest.
    pub tick_us: u64,
    /// How the ticks of keys that are synced by accuracy follow their traffic.
    pub pace: Option<Pace>,
    /// Length of a lease epoch; a lease lasts one to two of them.
    pub epoch_us: u64,
    /// Credit in force, in tokens: what the rule gives for the nodes there are.
    pub credit: u32,
    /// Where the credit comes from.
    pub credit_rule: CreditRule,
    /// The highest cost that can be admitted, in tokens.
    pub cost_max: u32,
    /// Who decides.
    pub mode: Mode,
    /// What happens while the store is away.
    pub outage: OutagePolicy,
    /// The least silence before the outage policy takes over.
    pub grace_us: u64,
    /// Version of the definition.
    pub version: u32,
}

impl Terms {
    /// The depth of a bucket that holds the whole burst, in tokens: as much as a word can count.
    pub(crate) fn burst_depth(&self) -> u32 {
        (self.scale.burst / self.scale.token).min(COST_MAX as i64) as u32
    }

    /// The tick of a key that nothing is known of yet.
    pub(crate) fn first_tick_us(&self) -> u64 {
        self.pace.map_or(self.tick_us, |pace| pace.first_us())
    }
}

/// How much credit a node gives a key, by the number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CreditRule {
    /// The most for one node, in tokens.
    pub most: u32,
    /// The most for all nodes together, in tokens.
    pub together: u64,
    /// While the number of nodes is not known.
    pub unheard: u32,
}

impl CreditRule {
    /// The same credit, however many nodes there are.
    pub(crate) const fn fixed(credit: u32) -> Self {
        Self { most: credit, together: u64::MAX, unheard: credit }
    }

    /// The credit of each node, in tokens.
    pub(crate) fn at(&self, nodes: Option<u32>) -> u32 {
        nodes.map_or(self.unheard, |nodes| {
            u64::from(self.most).min(self.together / u64::from(nodes.max(1))) as u32
        })
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
    fn credit_is_shared_out_in_whole_tokens_and_never_more_than_there_is() {
        let rule = CreditRule { most: 8, together: 90, unheard: 0 };
        assert_eq!(rule.at(None), 0);
        assert_eq!([1, 11, 12, 20, 90, 91].map(|nodes| rule.at(Some(nodes))), [8, 8, 7, 4, 1, 0]);
        for nodes in 1..=1000 {
            assert!(rule.at(Some(nodes)) * nodes <= 90, "{nodes} nodes");
        }
        assert_eq!(
            [None, Some(1), Some(u32::MAX)].map(|nodes| CreditRule::fixed(3).at(nodes)),
            [3, 3, 3]
        );
    }

    #[test]
    fn a_tick_is_as_long_as_its_traffic_allows_within_its_bounds() {
        let pace = Pace { tokens: 10.0, least_us: 5_000, most_us: 500_000, ceiling: None };
        let ticks = [0.0, 1.0, 100.0, 1000.0, 1e9].map(|per_s| pace.warranted_us(per_s / 1e6));
        assert_eq!(ticks, [500_000, 500_000, 100_000, 10_000, 5_000]);
    }
}
