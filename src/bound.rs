//! How much can be admitted in excess, when so much goes wrong: docs/ACCURACY.md has the argument,
//! and what is assumed.

use crate::algorithm::{KeyRule, Rule, TurnRule};
use crate::limit::{Concurrency, CreditRule, DEFAULT_MAX_NODES, Limit, Mode, OutagePolicy, Terms};
use crate::quota::Curve;

/// Keys that take longer to fill, in seconds, begin full when nobody knows them after a loss.
const FORGOTTEN_FULL_S: f64 = 60.0;
/// Joins beyond this many all count like the last one, to keep the sum short.
const JOINS_MAX: u32 = 1000;
/// After a loss of memory the store waits at most so long for leases that it no longer knows, in seconds.
const LEASE_WAIT_MAX_S: f64 = 30.0;
/// A permit's lease of 2 s, which is renewed each 0.9 s at the latest, survives jumps of clocks of so much, in seconds.
const PERMIT_SLACK_S: f64 = 1.0;

/// What went wrong since a key's bucket was last full: one entry or count for each event.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Incidents {
    /// Nodes that died, shut down, or were born anew in the place of one that did.
    pub deaths: u32,
    /// Nodes that joined beside those that were there. The number of nodes is that before, and all that joined.
    pub joins: u32,
    /// Times that the store lost its memory, or came back with an older state.
    pub losses_of_memory: u32,
    /// Of these, times that it had lost its memory within the five seconds before: nodes have given no first
    /// credit since, where all of them reached the store.
    pub losses_repeated: u32,
    /// Of all these losses, times that a lease may have been held by a node that the store did not wait for: it
    /// joined shortly before, or the loss was found after that node had been given more. All of them, if a node died
    /// or joined.
    pub losses_unheard: u32,
    /// Times that the record of the key was lost alone.
    pub lost_records: u32,
    /// Times that the key was [reset](crate::ActiveLimit::reset).
    pub resets: u32,
    /// Each forward jump of the store's clock, in seconds.
    pub store_jumps_s: Vec<f64>,
    /// Each forward jump of a node's clock, and each stall beyond 20 ms, in seconds.
    pub clock_jumps_s: Vec<f64>,
    /// Sum over nodes: seconds in which a node was cut off from a store that others could reach, or went through an
    /// outage while the others did not know that it was there.
    pub cut_off_node_s: f64,
    /// Nodes that were cut off alone, each time; and nodes that joined so late that an outage of all nodes began less
    /// than 1.5 s after their first answer.
    pub nodes_cut_off: u32,
    /// Nodes that started while the store was away for so long that outage policies took over, on these nodes or on
    /// others. Each is also among `deaths` or `joins`.
    pub nodes_unanswered: u32,
    /// Seconds from the start of each of these nodes until its first answer, all together. A node whose own policy never
    /// began adds nothing.
    pub unanswered_node_s: f64,
    /// Times that no node reached the store for so long that outage policies took over.
    pub outages: u32,
    /// Tokens that nodes lent to the key in these outages by old views, all together: at most the burst, or
    /// a token a node, in each. Counts under [`OutagePolicy::Share`].
    pub lent_tokens: f64,
    /// Seconds from when the first node reached the store again until the last did, of all these outages
    /// together. Counts under [`OutagePolicy::LastRate`], and under [`OutagePolicy::Share`] if a node was unanswered.
    pub returned_apart_s: f64,
}

/// The most tokens that a cluster of `nodes` can admit on one key above `burst + rate x window`,
/// over any window, with `incidents` in it. Infinite under [`OutagePolicy::Open`] with any outage, or any node that was
/// cut off or unanswered.
///
/// docs/ACCURACY.md gives each term and its reason.
///
/// Assumed: nodes' clocks run within 500 ppm of the store's, no cached clock is older than 20 ms but as
/// the incidents say, instance ids are unique, all nodes have one version of the limit, and where credit
/// depends on the number of nodes they have heard from the store how many there are, which takes a
/// second when one comes or goes, and there are no more than [`Builder::max_nodes`](crate::Builder::max_nodes) where it
/// is set. A limit that cannot be kept has no bound. Of a limit with [plans](Limit::plan), `rate` and `burst` are the highest of
/// its own quota and all plans, since a key can have the tokens of one and then the rate of another.
///
/// ```
/// use tidegate::{Incidents, Limit, Quota, bound};
///
/// let limit = Limit::new("api", Quota::per_second(1000)).credit(2);
/// let quiet = bound(&limit, 20, &Incidents::default());
/// assert!((quiet - 40.0).abs() < 1e-9, "2 tokens a node");
/// let mut death = Incidents::default();
/// death.deaths = 1;
/// assert!(bound(&limit, 20, &death) > quiet);
/// ```
pub fn bound(limit: &Limit, nodes: u32, incidents: &Incidents) -> f64 {
    let credit = limit.credit_rule();
    let basis = |rule: Rule| {
        let (limit, quota) = (limit.with_rule(rule), rule.quota());
        let terms = match limit.mode {
            Mode::Hybrid => limit.validate_hybrid(DEFAULT_MAX_NODES),
            Mode::Local => limit.validate_local(),
            Mode::Exact => limit.validate_exact(nodes),
        };
        let (rate, burst) = (quota.tokens_per_second(), quota.burst_tokens() as f64);
        Some(Basis::new(&Terms { mode: limit.mode, ..terms.ok()? }, credit, rate, burst))
    };
    let all: Option<Vec<_>> = limit.rules().map(basis).collect();
    match all {
        Some(all) if limit.validate_plans(limit.mode == Mode::Local).is_ok() => {
            bound_of_all(&all, nodes, incidents)
        }
        _ => f64::INFINITY,
    }
}

/// [`bound`] of a limit whose terms are known, and those of its plans.
pub(crate) fn bound_of<'a>(
    terms: impl Iterator<Item = &'a Terms>,
    nodes: u32,
    incidents: &Incidents,
) -> f64 {
    let basis = |terms: &Terms| {
        let unit = terms.scale.token as f64;
        let (rate, burst) = (terms.scale.rate as f64 * 1e6 / unit, terms.scale.burst as f64 / unit);
        Basis::new(terms, terms.credit_rule, rate, burst)
    };
    bound_of_all(&terms.map(basis).collect::<Vec<_>>(), nodes, incidents)
}

/// The bound of a key that can come under each of these, and have the tokens of one with the rate of another.
fn bound_of_all(all: &[Basis], nodes: u32, incidents: &Incidents) -> f64 {
    let most = |of: fn(&Basis) -> f64| all.iter().map(of).fold(0.0, f64::max);
    let (rate, burst) = (most(|basis| basis.rate), most(|basis| basis.burst));
    let bounds = all.iter().map(|basis| Basis { rate, burst, ..*basis }.bound(nodes, incidents));
    bounds.fold(0.0, f64::max)
}

/// The most permits of a key that a cluster of `nodes` can have in use beyond the number of a concurrency limit at one time,
/// with `incidents` since all of its permits were last given back. Infinite under [`OutagePolicy::Open`] with any outage, any
/// node that was cut off or unanswered, or nodes whose clocks jumped by more than a second; and of a limit that cannot be kept. 0
/// of a local limit.
///
/// docs/ACCURACY.md gives each term and its reason. Assumed is what [`bound`] assumes.
///
/// ```
/// use tidegate::{Concurrency, Incidents, bound_of_permits};
///
/// let jobs = Concurrency::new("jobs", 10);
/// let mut incidents = Incidents::default();
/// assert_eq!(bound_of_permits(&jobs, 4, &incidents), 0.0);
/// incidents.nodes_cut_off = 1;
/// assert_eq!(bound_of_permits(&jobs, 4, &incidents), 10.0, "its jobs go on");
/// ```
pub fn bound_of_permits(limit: &Concurrency, nodes: u32, incidents: &Incidents) -> f64 {
    let Ok(terms) = limit.validate(false, nodes.clamp(1, DEFAULT_MAX_NODES), 1) else {
        return f64::INFINITY;
    };
    if limit.is_local {
        return 0.0;
    }
    let Incidents { outages, nodes_cut_off, nodes_unanswered, .. } = *incidents;
    let (store, clocks) = (&incidents.store_jumps_s, &incidents.clock_jumps_s);
    let end_leases = store.iter().chain(clocks).sum::<f64>() > PERMIT_SLACK_S;
    let counted = |jumps_s: &[f64]| if end_leases { jumps_s.len() as f64 } else { 0.0 };
    let decided_by_policy =
        outages > 0 || nodes_cut_off > 0 || nodes_unanswered > 0 || counted(clocks) > 0.0;
    if limit.outage == OutagePolicy::Open && decided_by_policy {
        return f64::INFINITY;
    }
    // What its holders still use, and the store gives again.
    let given_again = [nodes_cut_off, outages, incidents.losses_of_memory, incidents.lost_records];
    let given_again =
        given_again.map(f64::from).iter().sum::<f64>() + counted(store) + counted(clocks);
    // Nodes have no more by policy than their share, however often it begins.
    let by_policy = match limit.outage {
        OutagePolicy::Share if outages > 0 => nodes,
        OutagePolicy::Share => nodes_unanswered,
        _ => 0,
    };
    given_again * f64::from(limit.max) + f64::from(by_policy) * f64::from(terms.share)
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
#[derive(Clone, Copy)]
struct Basis {
    mode: Mode,
    /// Tokens are given for windows.
    is_windows: bool,
    /// Tokens per second.
    rate: f64,
    /// Tokens.
    burst: f64,
    /// Whether a key takes so long to fill that it begins full when nobody knows it after a loss.
    is_slow: bool,
    /// The longest life of a lease, in seconds.
    lease_s: f64,
    /// The most slots of a leaky bucket that nodes can hold, where they share one.
    slots_ahead: Option<f64>,
    credit: CreditRule,
    outage: OutagePolicy,
}

impl Basis {
    fn new(terms: &Terms, credit: CreditRule, rate: f64, burst: f64) -> Self {
        let slots_ahead = match terms.key_rule {
            Some(KeyRule::Turn(rule @ TurnRule::LeakyBucket { .. })) => {
                let queue_s = rule.micros(rule.max_delay(u64::MAX)) as f64 / 1e6;
                // The question that reaches the queue's end is about so many slots at most.
                Some(rate * (queue_s + (queue_s / 2.0).max(terms.tick_us as f64 / 1e6)))
            }
            _ => None,
        };
        Self {
            mode: terms.mode,
            is_windows: terms.scale.curve != Curve::Refill
                || matches!(terms.key_rule, Some(KeyRule::Window(_) | KeyRule::Log(_))),
            rate,
            burst,
            is_slow: burst / rate > FORGOTTEN_FULL_S,
            lease_s: 2.0 * terms.epoch_us as f64 / 1e6,
            slots_ahead,
            credit,
            outage: terms.outage,
        }
    }

    fn bound(&self, nodes: u32, incidents: &Incidents) -> f64 {
        match (self.mode, self.slots_ahead) {
            (Mode::Hybrid, Some(slots)) => self.bound_of_slots(nodes, slots, incidents),
            (Mode::Hybrid, None) => self.bound_of_leases(nodes, incidents),
            (Mode::Local, _) => self.reset(incidents),
            (Mode::Exact, _) => self.bound_of_exact(incidents),
        }
    }

    /// What is there again once a key was reset, and of a leaky bucket the slots that were given before.
    fn reset(&self, incidents: &Incidents) -> f64 {
        f64::from(incidents.resets) * self.slots_ahead.map_or(self.burst, |slots| slots + 1.0)
    }

    /// What the store forgot may be spent again, and so may what policies admitted, for as long as an outage lasts.
    fn bound_of_exact(&self, incidents: &Incidents) -> f64 {
        let outages = incidents.outages + incidents.nodes_cut_off;
        if outages > 0 && self.outage != OutagePolicy::Closed {
            return f64::INFINITY;
        }
        let forgotten = incidents.losses_of_memory + incidents.lost_records;
        let jumped = incidents.store_jumps_s.iter().map(|jump_s| self.jumped(*jump_s, self.burst));
        f64::from(forgotten) * self.burst + jumped.sum::<f64>() + self.reset(incidents)
    }

    /// Credit, and what the store forgot or takes for past: so many slots that nodes hold, with one more each, are given
    /// again. A node whose clock jumps uses those that it holds at once.
    fn bound_of_slots(&self, nodes: u32, slots: f64, incidents: &Incidents) -> f64 {
        let (all, one) = self.credit_given(nodes.max(1), incidents);
        let held = slots + f64::from(nodes.max(1)) + 1.0;
        let jumps_s = incidents.store_jumps_s.iter().chain(&incidents.clock_jumps_s);
        let jumped = jumps_s.map(|jump_s| (self.rate * jump_s + 1.0).min(held)).sum::<f64>();
        let forgotten = incidents.losses_of_memory + incidents.lost_records + incidents.resets;
        let exact = self.bound_of_exact(&Incidents {
            outages: incidents.outages,
            nodes_cut_off: incidents.nodes_cut_off,
            ..Incidents::default()
        });
        all + one * f64::from(incidents.deaths)
            + f64::from(forgotten) * (held + all)
            + jumped
            + exact
    }

    fn bound_of_leases(&self, nodes: u32, incidents: &Incidents) -> f64 {
        let Self { rate, burst, lease_s, .. } = *self;
        let n = f64::from(nodes.max(1));
        let (all, one) = self.credit_given(nodes.max(1), incidents);
        let Incidents { deaths, joins, nodes_cut_off, losses_unheard, .. } = *incidents;
        let none_came_or_went = deaths == 0 && joins == 0;
        let all_reach_the_store = none_came_or_went && nodes_cut_off == 0 && losses_unheard == 0;
        let losses = incidents.losses_of_memory;
        let repeated = if all_reach_the_store { incidents.losses_repeated.min(losses) } else { 0 };
        let mut tokens = all + one * f64::from(deaths);
        // A loss adds the bucket once: for a slow key that no node knows, or for a lease that was not heard of.
        let unheard = incidents.losses_unheard;
        let heard = incidents.losses_of_memory.saturating_sub(unheard);
        tokens += f64::from(losses - repeated) * all + f64::from(repeated) * self.credit_known(n);
        tokens += f64::from(heard) * self.forgotten();
        tokens += f64::from(unheard) * (burst + rate * lease_s);
        // A holder that cannot be heard goes on with its lease.
        let holder_unheard = nodes_cut_off > 0 || !none_came_or_went;
        let lease = if holder_unheard { rate * lease_s } else { 0.0 };
        tokens += f64::from(incidents.lost_records) * (burst + all + lease);
        // What was spent on credit is forgiven with the rest, and given again.
        tokens += f64::from(incidents.resets) * (burst + all);
        for jump_s in &incidents.store_jumps_s {
            tokens += self.jumped(*jump_s, burst + rate * lease_s);
        }
        for jump_s in &incidents.clock_jumps_s {
            tokens += (rate * jump_s).min(burst);
        }
        if incidents.outages > 0 {
            tokens += self.outages(incidents);
        }
        let fewest = f64::from(fewest(nodes.max(1), incidents));
        tokens + self.cut_off(fewest, incidents) + self.unanswered(n, incidents)
    }

    /// What a jump of the store's clock gives, `most` at most. However short, it may pass a window's edge.
    fn jumped(&self, jump_s: f64, most: f64) -> f64 {
        if self.is_windows { most } else { (self.rate * jump_s).min(most) }
    }

    /// What a loss of memory brings back although all nodes were heard: keys that nobody knows, and
    /// leases that last longer than the store waits.
    fn forgotten(&self) -> f64 {
        let unknown = if self.is_slow { self.burst } else { 0.0 };
        unknown + self.rate * (self.lease_s - LEASE_WAIT_MAX_S).max(0.0)
    }

    /// What policies admit in outages of all nodes beyond what there is: loans by views that others have
    /// used up since, or what nodes were leased last.
    fn outages(&self, incidents: &Incidents) -> f64 {
        match self.outage {
            // A share is refilled evenly, a window is not: until it ends, all that a share is given may be too much.
            OutagePolicy::Share if self.is_windows => {
                incidents.lent_tokens + self.burst * f64::from(incidents.outages)
            }
            OutagePolicy::Share => incidents.lent_tokens,
            OutagePolicy::Closed => 0.0,
            OutagePolicy::LastRate => {
                // Whoever comes back last goes on meanwhile, and that may be who has the whole rate.
                self.burst * f64::from(incidents.outages) + self.rate * incidents.returned_apart_s
            }
            OutagePolicy::Open => f64::INFINITY,
        }
    }

    /// The credit that all nodes together have, and the most that one node that went can have had. Fewer nodes give more
    /// each; a new node gives the credit of one that counts nobody yet.
    fn credit_given(&self, nodes: u32, incidents: &Incidents) -> (f64, f64) {
        let first = |nodes| f64::from(self.credit.at(nodes).first);
        let Incidents { deaths, joins, .. } = *incidents;
        let joined = joins.min(nodes - 1);
        let fewest = fewest(nodes, incidents);
        let (most, uncounted) = (first(Some(fewest)), first(None));
        // Whoever joined gives by a count that has itself and those before it.
        let given = |place| first(Some(fewest.saturating_add(place))).max(uncounted);
        let each = joined.min(JOINS_MAX);
        let of_joined = (1..=each).map(given).sum::<f64>() + given(each) * f64::from(joined - each);
        let all = most * f64::from(nodes - joined) + of_joined;
        let all = self.credit.together.map_or(all, |together| all.min(together as f64));
        (all, if deaths > 0 { most.max(uncounted) } else { 0.0 })
    }

    /// The credit that `n` nodes together have on keys of which they have a view.
    fn credit_known(&self, n: f64) -> f64 {
        let all = f64::from(self.credit.known) * n;
        self.credit.together.map_or(all, |together| all.min(together as f64))
    }

    /// What nodes that the store never answered admit beside the others.
    fn unanswered(&self, n: f64, incidents: &Incidents) -> f64 {
        let Incidents { nodes_unanswered, unanswered_node_s, .. } = *incidents;
        match self.outage {
            _ if nodes_unanswered == 0 && unanswered_node_s <= 0.0 => 0.0,
            // A node that has leased nothing yet has no last rate.
            OutagePolicy::Closed | OutagePolicy::LastRate => 0.0,
            OutagePolicy::Share => {
                // They divide by 16, or by the `max_nodes` of the configuration, which is `n` at least. The store does
                // not wait for them, and gives them what nodes that come back last are still spending.
                let n = n.min(f64::from(DEFAULT_MAX_NODES));
                let late = self.rate * incidents.returned_apart_s;
                self.shares(n, nodes_unanswered, unanswered_node_s) + late
            }
            OutagePolicy::Open => f64::INFINITY,
        }
    }

    /// What `count` nodes admit, each on one share in `n`, for `node_s` seconds together. A share of a burst that is
    /// smaller than the cluster is a token all the same.
    fn shares(&self, n: f64, count: u32, node_s: f64) -> f64 {
        (self.rate * node_s + f64::from(count) * self.burst) / n + f64::from(count)
    }

    /// What nodes that are cut off alone admit beside the others. They may have heard of no more than the `fewest` nodes.
    fn cut_off(&self, fewest: f64, incidents: &Incidents) -> f64 {
        let Incidents { nodes_cut_off, cut_off_node_s, .. } = *incidents;
        let all = self.rate * cut_off_node_s + f64::from(nodes_cut_off) * self.burst;
        match self.outage {
            _ if nodes_cut_off == 0 && cut_off_node_s <= 0.0 => 0.0,
            OutagePolicy::Closed => 0.0,
            OutagePolicy::Share => self.shares(fewest, nodes_cut_off, cut_off_node_s),
            // Each had the whole rate at most.
            OutagePolicy::LastRate => all,
            OutagePolicy::Open => f64::INFINITY,
        }
    }
}

/// The fewest nodes that there were at any time, if there are `nodes` with all that joined.
fn fewest(nodes: u32, incidents: &Incidents) -> u32 {
    let Incidents { deaths, joins, .. } = *incidents;
    nodes.saturating_sub(deaths.saturating_add(joins.min(nodes - 1))).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{FixedWindow, LeakyBucket};
    use crate::quota::Quota;

    fn limit() -> Limit {
        Limit::new("x", Quota::per_second(1000).burst(100)).credit(0)
    }

    fn assert_near(seen: f64, expected: f64) {
        assert!((seen - expected).abs() < 1e-9, "{seen}, not {expected}");
    }

    #[test]
    fn local_limit_has_no_excess_and_an_exact_one_only_what_the_store_forgot() {
        let limit = || Limit::new("x", Quota::per_second(1000).burst(100));
        let mut incidents = Incidents {
            losses_of_memory: 2,
            lost_records: 1,
            store_jumps_s: vec![0.01, 5.0],
            deaths: 3,
            joins: 3,
            ..Incidents::default()
        };
        assert_near(bound(&limit().exact(), 4, &Incidents::default()), 0.0);
        assert_near(bound(&limit().exact(), 4, &incidents), 3.0 * 100.0 + 10.0 + 100.0);
        incidents.outages = 1;
        assert!(bound(&limit().exact(), 4, &incidents).is_infinite());
        let closed = limit().exact().outage(OutagePolicy::Closed);
        assert_near(bound(&closed, 4, &incidents), 410.0);
        assert_near(bound(&limit().local(), 4, &incidents), 0.0);
    }

    #[test]
    fn key_that_changes_plans_has_the_burst_of_one_and_the_rate_of_another() {
        let plans = limit().plan("fast", Quota::per_second(2000).burst(50));
        let incidents =
            Incidents { resets: 1, clock_jumps_s: vec![0.01, 5.0], ..Incidents::default() };
        assert_near(bound(&limit(), 4, &incidents), 100.0 + 10.0 + 100.0);
        assert_near(bound(&plans, 4, &incidents), 100.0 + 20.0 + 100.0);
        let wrong = limit().plan("window", FixedWindow::per_second(5));
        assert!(bound(&wrong, 4, &incidents).is_infinite());
    }

    #[test]
    fn credit_is_that_of_the_plan_with_the_smallest_burst() {
        let limit = Limit::new("x", Quota::per_second(1000));
        assert_near(bound(&limit, 4, &Incidents::default()), 60.0);
        let small = limit.plan("small", Quota::per_second(8));
        assert_near(bound(&small, 4, &Incidents::default()), 4.0);
    }

    /// A slow plan beside a quick one begins full after a loss.
    #[test]
    fn slow_plan_beside_a_quick_one_is_slow() {
        let loss = Incidents { losses_of_memory: 1, ..Incidents::default() };
        let slow = Quota::per_minute(1).burst(100);
        assert_near(bound(&limit(), 4, &loss), 0.0);
        assert_near(bound(&limit().plan("slow", slow), 4, &loss), 100.0);
    }

    #[test]
    fn permits_are_given_again_where_their_holders_cannot_be_heard() {
        let jobs = |policy| Concurrency::new("jobs", 10).outage(policy);
        let quiet = Incidents { deaths: 3, joins: 3, ..Incidents::default() };
        let cut_off = Incidents { nodes_cut_off: 2, ..Incidents::default() };
        let outage = Incidents { outages: 2, nodes_unanswered: 1, ..Incidents::default() };
        let unanswered = Incidents { nodes_unanswered: 2, ..Incidents::default() };
        let forgotten = Incidents {
            losses_of_memory: 1,
            lost_records: 1,
            store_jumps_s: vec![0.6, 0.6],
            ..Incidents::default()
        };
        let stalled = Incidents { clock_jumps_s: vec![0.1, 1.0], ..Incidents::default() };
        let both = Incidents {
            store_jumps_s: vec![0.6],
            clock_jumps_s: vec![0.6],
            ..Incidents::default()
        };
        let short = Incidents { store_jumps_s: vec![0.5, 0.5], ..Incidents::default() };
        let expected = [
            (&quiet, 0.0, 0.0, 0.0),
            (&cut_off, 20.0, 20.0, f64::INFINITY),
            (&outage, 20.0, 20.0 + 4.0 * 2.0, f64::INFINITY),
            (&unanswered, 0.0, 2.0 * 2.0, f64::INFINITY),
            (&forgotten, 40.0, 40.0, 40.0),
            (&stalled, 20.0, 20.0, f64::INFINITY),
            (&both, 20.0, 20.0, f64::INFINITY),
            (&short, 0.0, 0.0, 0.0),
        ];
        for (incidents, closed, share, open) in expected {
            let bound_by = |policy| bound_of_permits(&jobs(policy), 4, incidents);
            assert_near(bound_by(OutagePolicy::Closed), closed);
            assert_near(bound_by(OutagePolicy::Share), share);
            let by_open = bound_by(OutagePolicy::Open);
            let is_infinite = by_open.is_infinite() && open.is_infinite();
            assert!(is_infinite || (by_open - open).abs() < 1e-9, "{by_open}, not {open}");
            assert!(bound_by(OutagePolicy::LastRate).is_infinite(), "it cannot be kept");
            assert_near(bound_of_permits(&jobs(OutagePolicy::Open).local(), 4, incidents), 0.0);
        }
    }

    #[test]
    fn reset_adds_the_burst_and_all_credit_and_of_a_leaky_bucket_the_slots_that_are_held() {
        let resets = Incidents { resets: 3, ..Incidents::default() };
        let quiet = |limit: &Limit| bound(limit, 4, &Incidents::default());
        assert_near(bound(&limit().credit(2), 4, &resets), 8.0 + 3.0 * (100.0 + 8.0));
        assert_near(bound(&limit().exact(), 4, &resets), 300.0);
        assert_near(bound(&limit().local(), 4, &resets), 300.0);
        let leaky = Limit::new("x", LeakyBucket::per_second(100)).strict();
        let record = Incidents { lost_records: 3, ..Incidents::default() };
        assert!(bound(&leaky, 4, &resets) > quiet(&leaky));
        assert_near(bound(&leaky, 4, &resets), bound(&leaky, 4, &record));
    }

    /// The bound was the rate's part of the jump, though a window's edge gives all tokens at once.
    #[test]
    fn jump_of_the_stores_clock_gives_a_window_all_its_tokens() {
        let incidents = Incidents { store_jumps_s: vec![0.001, 5.0], ..Incidents::default() };
        let window = || Limit::new("x", FixedWindow::per_second(100)).strict();
        assert_near(bound(&window().exact(), 4, &incidents), 2.0 * 100.0);
        // Of leased ones, what leases still had comes beside it: two epochs of a second each.
        assert_near(bound(&window(), 4, &incidents), 2.0 * (100.0 + 2.0 * 100.0));
    }

    #[test]
    fn share_of_a_window_adds_a_burst_in_each_outage() {
        let incidents = Incidents { outages: 3, lent_tokens: 7.0, ..Incidents::default() };
        let window = Limit::new("x", FixedWindow::per_second(100)).strict();
        assert_near(bound(&window, 4, &incidents), 7.0 + 3.0 * 100.0);
        let bucket = Limit::new("x", Quota::per_second(100)).strict();
        assert_near(bound(&bucket, 4, &incidents), 7.0);
    }

    #[test]
    fn each_outage_policy_admits_what_it_says_and_no_more() {
        let two_of_four =
            Incidents { nodes_cut_off: 2, cut_off_node_s: 6.0, ..Incidents::default() };
        let expected = [
            (OutagePolicy::Closed, 0.0),
            (OutagePolicy::Share, 6.0 * 250.0 + 2.0 * 25.0 + 2.0),
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
    fn bound_of_a_cut_off_node_divides_by_the_fewest_nodes_there_were() {
        let joins =
            Incidents { joins: 6, nodes_cut_off: 1, cut_off_node_s: 3.0, ..Incidents::default() };
        let share = limit().outage(OutagePolicy::Share);
        assert_near(bound(&share, 8, &joins), 3.0 * 500.0 + 50.0 + 1.0);
        let gone = Incidents { joins: 0, deaths: 7, ..joins };
        assert_near(bound(&share, 8, &gone), 3.0 * 1000.0 + 100.0 + 1.0);
    }

    #[test]
    fn bound_of_an_unanswered_node_divides_by_all_nodes_and_by_sixteen_at_most() {
        let unheard =
            Incidents { nodes_unanswered: 2, unanswered_node_s: 6.0, ..Incidents::default() };
        for (policy, nodes, tokens) in [
            (OutagePolicy::Closed, 4, 0.0),
            (OutagePolicy::LastRate, 4, 0.0),
            (OutagePolicy::Share, 4, 6.0 * 250.0 + 2.0 * 25.0 + 2.0),
            (OutagePolicy::Share, 64, 6.0 * 62.5 + 2.0 * 6.25 + 2.0),
        ] {
            assert_near(bound(&limit().outage(policy), nodes, &unheard), tokens);
        }
        assert!(bound(&limit().outage(OutagePolicy::Open), 4, &unheard).is_infinite());
    }

    #[test]
    fn gone_nodes_leave_more_credit_to_the_others() {
        // 100 tokens of credit for all, so none on 101 nodes, and 15 on one.
        let limit = Limit::new("x", Quota::per_second(10_000)).accuracy(0.01);
        let deaths = |deaths| Incidents { deaths, ..Incidents::default() };
        assert_near(bound(&limit, 101, &deaths(0)), 0.0);
        assert_near(bound(&limit, 101, &deaths(1)), 100.0 + 1.0);
        assert_near(bound(&limit, 101, &deaths(100)), 100.0 + 100.0 * 15.0);
        // A part of the burst: one token on four nodes and on two, and on one half of five.
        let login = Limit::new("x", Quota::per_hour(3600).burst(5));
        assert_near(bound(&login, 4, &deaths(0)), 4.0);
        assert_near(bound(&login, 4, &deaths(2)), 4.0 + 2.0);
        assert_near(bound(&login, 4, &deaths(3)), 4.0 * 2.0 + 3.0 * 2.0);
    }

    #[test]
    fn nodes_that_join_find_credit_given_by_the_fewer_that_there_were() {
        // A quarter of 60 for all nodes, half of it on one; 15 at most for each.
        let limit = Limit::new("x", Quota::per_second(60).burst(60));
        let joins = |joins| Incidents { joins, ..Incidents::default() };
        assert_near(bound(&limit, 4, &joins(0)), 4.0 * 4.0);
        assert_near(bound(&limit, 4, &joins(1)), 3.0 * 5.0 + 4.0);
        assert_near(bound(&limit, 4, &joins(3)), 15.0 + 8.0 + 5.0 + 4.0);
        // One node was there at least.
        assert_near(bound(&limit, 4, &joins(9)), 15.0 + 8.0 + 5.0 + 4.0);
        // Before they are counted new nodes take it that there are 16.
        assert_near(bound(&limit, 60, &joins(1)), 60.0);
        let login = Limit::new("x", Quota::per_second(1000).burst(1000));
        assert_near(bound(&login, 100, &joins(1)), 99.0 * 3.0 + 15.0);
    }

    #[test]
    fn each_jump_of_a_clock_counts_for_itself() {
        let node =
            |jumps: &[f64]| Incidents { clock_jumps_s: jumps.to_vec(), ..Incidents::default() };
        assert_near(bound(&limit(), 4, &node(&[0.02])), 20.0);
        assert_near(bound(&limit(), 4, &node(&[3600.0, 0.9])), 100.0 + 100.0);
        let store =
            |jumps: &[f64]| Incidents { store_jumps_s: jumps.to_vec(), ..Incidents::default() };
        // Leases live two seconds.
        assert_near(bound(&limit(), 4, &store(&[0.3, 0.3, 0.3])), 900.0);
        assert_near(bound(&limit(), 4, &store(&[3600.0])), 100.0 + 2000.0);
    }

    #[test]
    fn a_loss_of_memory_adds_a_burst_if_a_lease_is_unheard_or_the_key_fills_slowly() {
        let loss = |losses_unheard| Incidents {
            losses_of_memory: 1,
            losses_unheard,
            ..Incidents::default()
        };
        assert_near(bound(&limit().credit(1), 4, &loss(0)), 4.0 + 4.0);
        assert_near(bound(&limit().credit(1), 4, &loss(1)), 4.0 + 4.0 + 100.0 + 2000.0);
        let slow = Limit::new("x", Quota::per_hour(3600).burst(100)).credit(0);
        assert_near(bound(&slow, 4, &loss(0)), 100.0);
        let rare = slow.sync_interval(std::time::Duration::from_secs(5));
        assert_near(bound(&rare, 4, &loss(0)), 100.0 + 64.0 - 30.0);
    }

    #[test]
    fn repeated_loss_of_memory_adds_known_credit_only() {
        let limit = Limit::new("x", Quota::per_second(1000));
        let incidents = |nodes_cut_off| Incidents {
            losses_of_memory: 20,
            losses_repeated: 19,
            nodes_cut_off,
            ..Incidents::default()
        };
        assert_near(bound(&limit, 8, &incidents(0)), 120.0 + 120.0 + 19.0 * 8.0);
        let cut_off = 1000.0 / 8.0 + 1.0;
        assert_near(bound(&limit, 8, &incidents(1)), 120.0 + 20.0 * 120.0 + cut_off);
    }

    #[test]
    fn each_lost_record_adds_a_burst_and_all_credit() {
        let lost = Incidents { lost_records: 2, ..Incidents::default() };
        assert_near(bound(&limit().credit(1), 4, &lost), 4.0 + 2.0 * (100.0 + 4.0));
    }

    #[test]
    fn an_outage_adds_what_nodes_lent_with_share_and_nothing_when_closed() {
        let outages = Incidents { outages: 2, lent_tokens: 200.0, ..Incidents::default() };
        assert_near(bound(&limit(), 4, &outages), 200.0);
        assert_near(bound(&limit().outage(OutagePolicy::Closed), 4, &outages), 0.0);
    }
}
