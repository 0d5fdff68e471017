//! How much can be admitted in excess, when so much goes wrong: docs/ACCURACY.md has the argument,
//! and what is assumed.

use crate::limit::{CreditRule, Limit, Mode, OutagePolicy, Terms};

/// The longest stall of the cached clock that leases allow for, in seconds.
const STALL_S: f64 = 0.020;
/// Keys that take longer to fill, in seconds, begin full when nobody knows them after a loss.
const FORGOTTEN_FULL_S: f64 = 60.0;

/// What went wrong since a key's bucket was last full.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Incidents {
    /// Nodes that died or were born anew.
    pub deaths: u32,
    /// Times that the store lost its memory or what it had acknowledged.
    pub losses_of_memory: u32,
    /// What each of the store's forward jumps gave, in seconds, all together.
    pub store_jumps_s: f64,
    /// What the nodes' clocks jumped ahead, in seconds, all together.
    pub clock_jumps_s: f64,
    /// Sum over nodes: seconds in which a node was cut off from a store that others could reach.
    pub cut_off_node_s: f64,
    /// Whether a node may have been out of the store's reach while it recovered from a loss.
    pub unheard: bool,
    /// Whether the clock that decisions read ever stood still.
    pub clock_stalls: bool,
    /// Nodes that were ever cut off.
    pub nodes_cut_off: u32,
}

impl Incidents {
    /// How much older than normal the time can be by which a decision is taken, in seconds. What
    /// flows into a full bucket meanwhile is not seen to be lost.
    fn staleness_s(&self) -> f64 {
        if self.clock_stalls { STALL_S } else { 0.0 }
    }
}

/// The most tokens that a cluster of `nodes` can admit on one key above `burst + rate x window`,
/// over any window, with `incidents` in it. Infinite if a node was cut off under
/// [`OutagePolicy::Open`].
///
/// Assumed: the store's clock never steps forward, nodes' clocks run within 500 ppm of it, no cached
/// clock is older than 20 ms but as the incidents say, instance ids are unique, all nodes have one
/// version of the limit, and where credit goes by the number of nodes they have heard from the
/// store how many there are, which takes a second when one comes or goes.
///
/// ```
/// use tidegate::{Incidents, Limit, Quota, bound};
///
/// let limit = Limit::new("api", Quota::per_second(1000)).credit(2);
/// let quiet = bound(&limit, 20, &Incidents::default());
/// assert!((quiet - 40.0).abs() < 1e-9, "2 tokens a node");
/// let death = Incidents { deaths: 1, ..Incidents::default() };
/// assert!(bound(&limit, 20, &death) > quiet);
/// ```
pub fn bound(limit: &Limit, nodes: u32, incidents: &Incidents) -> f64 {
    let quota = limit.quota();
    let basis = Basis {
        rate: quota.tokens_per_second(),
        burst: quota.burst_tokens() as f64,
        credit: limit.credit_rule(),
        outage: limit.outage,
    };
    basis.bound(nodes, incidents)
}

/// [`bound`] of a limit whose terms are known.
pub(crate) fn bound_of(terms: &Terms, nodes: u32, incidents: &Incidents) -> f64 {
    let unit = terms.scale.token as f64;
    let basis = Basis {
        rate: terms.scale.rate as f64 * 1e6 / unit,
        burst: terms.scale.burst as f64 / unit,
        credit: if terms.mode == Mode::Local { CreditRule::fixed(0) } else { terms.credit_rule },
        outage: terms.outage,
    };
    basis.bound(nodes, incidents)
}

/// What a running limiter knows of a limit's excess: see docs/ACCURACY.md for what it cannot know.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Excess {
    /// [`bound`] for the nodes that the store has counted and the incidents that this node knows
    /// of since it began, in tokens; the highest so far. `None` before the store was reached.
    pub bound_tokens: Option<f64>,
    /// The deepest that any key was in debt, in tokens, by the replies that this node has had: its
    /// level in the store with all that is lent to nodes, below zero.
    pub observed_tokens: f64,
}

/// What of a limit the bound depends on.
struct Basis {
    /// Tokens per second.
    rate: f64,
    /// Tokens.
    burst: f64,
    credit: CreditRule,
    outage: OutagePolicy,
}

impl Basis {
    fn bound(&self, nodes: u32, incidents: &Incidents) -> f64 {
        let Self { rate, burst, .. } = *self;
        let n = f64::from(nodes.max(1));
        let (all, one) = self.credit_given(nodes.max(1), incidents.deaths);
        let mut tokens = all + one * f64::from(incidents.deaths) + rate * incidents.staleness_s();
        let unknown = incidents.unheard || burst / rate > FORGOTTEN_FULL_S;
        let forgotten = if unknown { burst } else { 0.0 };
        tokens += f64::from(incidents.losses_of_memory) * (forgotten + all);
        for jumps_s in [incidents.store_jumps_s, incidents.clock_jumps_s] {
            tokens += (rate * jumps_s).min(burst * jumps_s.ceil());
        }
        tokens + self.outages(n, incidents)
    }

    /// The credit that all nodes together have, and the most that one of those that came or went
    /// had: the fewer nodes there are, the more each is given, and who has just been born gives
    /// what it gives before it has heard of the others.
    fn credit_given(&self, nodes: u32, deaths: u32) -> (f64, f64) {
        let fewest = nodes.saturating_sub(deaths).max(1);
        let most = f64::from(self.credit.at(Some(fewest)));
        let all = (most * f64::from(nodes)).min(self.credit.together as f64);
        (all, if deaths > 0 { most.max(f64::from(self.credit.unheard)) } else { 0.0 })
    }

    /// What nodes that are cut off admit beside the others.
    fn outages(&self, n: f64, incidents: &Incidents) -> f64 {
        let Incidents { nodes_cut_off, cut_off_node_s, .. } = *incidents;
        let all = self.rate * cut_off_node_s + f64::from(nodes_cut_off) * self.burst;
        match self.outage {
            _ if nodes_cut_off == 0 && cut_off_node_s <= 0.0 => 0.0,
            OutagePolicy::Closed => 0.0,
            OutagePolicy::Share => all / n,
            // Each had the whole rate at most.
            OutagePolicy::LastRate => all,
            OutagePolicy::Open => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn limit() -> Limit {
        Limit::new("x", Quota::per_second(1000).burst(100)).credit(0)
    }

    fn assert_near(seen: f64, expected: f64) {
        assert!((seen - expected).abs() < 1e-9, "{seen}, not {expected}");
    }

    #[test]
    fn each_outage_policy_admits_what_it_says_and_no_more() {
        let two_of_four =
            Incidents { nodes_cut_off: 2, cut_off_node_s: 6.0, ..Incidents::default() };
        let expected = [
            (OutagePolicy::Closed, 0.0),
            (OutagePolicy::Share, 6.0 * 250.0 + 2.0 * 25.0),
            (OutagePolicy::LastRate, 6.0 * 1000.0 + 2.0 * 100.0),
        ];
        for (policy, tokens) in expected {
            assert_near(bound(&limit().outage(policy), 4, &two_of_four), tokens);
            assert_near(bound(&limit().outage(policy), 4, &Incidents::default()), 0.0);
        }
        let open = limit().outage(OutagePolicy::Open);
        assert!(bound(&open, 4, &two_of_four).is_infinite());
        assert_near(bound(&open, 4, &Incidents::default()), 0.0);
    }

    #[test]
    fn nodes_that_die_leave_more_credit_to_the_others() {
        // 100 tokens of credit for all, so none on 101 nodes.
        let limit = Limit::new("x", Quota::per_second(10_000)).accuracy(0.01);
        let deaths = |deaths| Incidents { deaths, ..Incidents::default() };
        assert_near(bound(&limit, 101, &deaths(0)), 0.0);
        assert_near(bound(&limit, 101, &deaths(1)), 100.0 + 1.0);
        assert_near(bound(&limit, 101, &deaths(100)), 100.0 + 100.0 * 8.0);
        // What sets no credit has one a node again where the nodes are as few as the tokens.
        let login = Limit::new("x", Quota::per_hour(3600).burst(5));
        assert_near(bound(&login, 6, &deaths(0)), 0.0);
        assert_near(bound(&login, 6, &deaths(1)), 5.0 + 1.0);
    }

    #[test]
    fn a_clock_that_jumps_gives_the_burst_at_most_for_each_second_begun() {
        let jumped = |clock_jumps_s| Incidents { clock_jumps_s, ..Incidents::default() };
        assert_near(bound(&limit(), 4, &jumped(0.02)), 20.0);
        assert_near(bound(&limit(), 4, &jumped(3600.0)), 360_000.0);
        assert_near(bound(&limit(), 4, &jumped(0.9)), 100.0);
    }

    #[test]
    fn a_loss_gives_a_burst_only_where_a_node_may_not_have_been_heard_or_the_key_fills_slowly() {
        let loss = |unheard| Incidents { losses_of_memory: 1, unheard, ..Incidents::default() };
        assert_near(bound(&limit().credit(1), 4, &loss(false)), 4.0 + 4.0);
        assert_near(bound(&limit().credit(1), 4, &loss(true)), 4.0 + 4.0 + 100.0);
        let slow = Limit::new("x", Quota::per_hour(3600).burst(100)).credit(0);
        assert_near(bound(&slow, 4, &loss(false)), 100.0);
    }
}
