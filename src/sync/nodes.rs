//! How many nodes share the limits.

use std::collections::VecDeque;

use crate::limit::CreditRule;
use crate::time::Timestamp;

/// Nodes that have gone are reckoned with for at least so long.
const REMEMBERED_MIN_US: u64 = 60_000_000;
/// Nodes that have gone are reckoned with for no longer than this.
const REMEMBERED_MAX_US: u64 = 600_000_000;
/// So long after a node was counted first all others have heard of it: a heartbeat with its jitter, and a
/// store that takes its time.
const INTRODUCED_US: u64 = 1_500_000;

/// What the store's lanes have said of how many nodes there are.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// The latest word of each lane.
    by_lane: Vec<Option<i64>>,
    /// What was heard and when, oldest first, without what is no more than something that was heard later.
    highest: VecDeque<(Timestamp, i64)>,
    /// When this node was counted first.
    joined: Option<Timestamp>,
    /// The most that there can be, as the user says: it counts until the store has counted.
    configured: Option<i64>,
}

impl Nodes {
    pub(crate) fn new(lanes: u32, configured: Option<u32>) -> Self {
        Self {
            by_lane: vec![None; lanes as usize],
            highest: VecDeque::new(),
            joined: None,
            configured: configured.map(i64::from),
        }
    }

    /// The store has counted the nodes that call a lane.
    pub(crate) fn heard(&mut self, lane: u32, nodes: i64, now: Timestamp) {
        self.by_lane[lane as usize] = Some(nodes);
        self.joined.get_or_insert(now);
        let forgotten = now.minus_micros(REMEMBERED_MAX_US);
        self.highest.retain(|&(at, known)| known > nodes && at >= forgotten);
        self.highest.push_back((now, nodes));
    }

    /// Nodes alive by the latest word of any lane; `None` before the store has said it.
    pub(crate) fn alive(&self) -> Option<i64> {
        self.by_lane.iter().copied().max().flatten()
    }

    /// How many nodes to reckon with on a limit whose bucket fills in `fill_us`: the most that were heard of
    /// within that time, and within one minute to ten, since those that have gone may have spent until then.
    /// `None` if nobody ever said.
    pub(crate) fn sharing(&self, fill_us: u64, now: Timestamp) -> Option<i64> {
        let from = now.minus_micros(fill_us.clamp(REMEMBERED_MIN_US, REMEMBERED_MAX_US));
        let recent = self.highest.iter().find(|(at, _)| *at >= from);
        recent.or(self.highest.back()).map(|(_, nodes)| *nodes).or(self.configured)
    }

    /// The credit that this node gives by `rule` on a limit whose bucket fills in `fill_us`. Who has just
    /// joined gives only what there is beside the credit of others who may not have heard of it yet.
    pub(crate) fn credit(&self, rule: &CreditRule, fill_us: u64, now: Timestamp) -> u32 {
        let Some(nodes) = self.sharing(fill_us, now) else { return rule.unheard };
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let credit = rule.at(Some(nodes));
        let introduced = self.joined.is_none_or(|joined| now >= joined.plus_micros(INTRODUCED_US));
        if introduced {
            return credit;
        }
        let others = u64::from(rule.at(Some(1))) * u64::from(nodes.saturating_sub(1));
        u64::from(credit).min(rule.together.saturating_sub(others)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    const SECOND: u64 = 1_000_000;

    fn at(second: u64) -> Timestamp {
        Timestamp::from_micros(10_000 * SECOND + second * SECOND)
    }

    #[test]
    fn nodes_that_have_gone_count_for_a_minute_or_as_long_as_the_bucket_takes_to_fill() {
        let mut nodes = Nodes::new(2, None);
        nodes.heard(0, 20, at(0));
        nodes.heard(1, 5, at(1));
        nodes.heard(0, 5, at(2));
        assert_eq!(nodes.alive(), Some(5));
        for (fill_s, second, expected) in
            [(1, 2, 20), (1, 60, 20), (1, 61, 5), (300, 299, 20), (300, 301, 5), (86_400, 600, 20)]
        {
            let seen = nodes.sharing(fill_s * SECOND, at(second));
            assert_eq!(seen, Some(expected), "filled in {fill_s} s, after {second} s");
        }
    }

    #[test]
    fn who_joins_gives_no_credit_that_others_may_still_give() {
        let limit = |quota| Limit::new("x", quota);
        let per_second = |rate| limit(Quota::per_second(rate));
        // 1% of 1000 are 10 tokens: 8 on one node alone, 2 on each of five.
        let cases = [
            (per_second(1000).accuracy(0.01), 1, 8, 8),
            (per_second(1000).accuracy(0.01), 5, 0, 2),
            (per_second(10_000).accuracy(0.01), 5, 8, 8),
            (per_second(100), 20, 1, 1),
            (limit(Quota::per_hour(60).burst(5)), 5, 1, 1),
            (limit(Quota::per_hour(60).burst(5)), 6, 0, 0),
        ];
        for (limit, count, at_first, later) in cases {
            let rule = limit.validate().unwrap().credit_rule;
            let mut nodes = Nodes::new(1, None);
            assert_eq!(nodes.credit(&rule, SECOND, at(0)), rule.unheard);
            nodes.heard(0, count, at(0));
            nodes.heard(0, count, at(1));
            let seen = (nodes.credit(&rule, SECOND, at(1)), nodes.credit(&rule, SECOND, at(2)));
            assert_eq!(seen, (at_first, later), "{limit:?} on {count} nodes");
        }
    }

    #[test]
    fn a_silent_store_leaves_the_last_count_and_a_silent_cluster_what_the_user_said() {
        let mut nodes = Nodes::new(1, Some(8));
        assert_eq!((nodes.alive(), nodes.sharing(SECOND, at(0))), (None, Some(8)));
        nodes.heard(0, 3, at(0));
        assert_eq!(nodes.sharing(SECOND, at(7200)), Some(3));
    }

    #[test]
    fn what_was_heard_is_kept_for_ten_minutes_and_never_more_than_that_matters() {
        let mut nodes = Nodes::new(1, None);
        for second in 0..2000 {
            nodes.heard(0, 100 - i64::from(second % 7 == 0), at(second));
        }
        assert!(nodes.highest.len() <= 2, "{:?}", nodes.highest);
        for second in 2000..4000_u64 {
            nodes.heard(0, 5000 - second as i64, at(second));
        }
        assert_eq!(nodes.highest.len(), 601);
    }
}
