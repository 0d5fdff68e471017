//! How many nodes share a limit.

use std::collections::VecDeque;

use super::excess::REPEATED_US;
use crate::limit::{Credit, CreditRule, DEFAULT_MAX_NODES};
use crate::time::Timestamp;

/// A node that is gone counts for at least this long.
const REMEMBERED_MIN_US: u64 = 60_000_000;
/// A node that is gone counts for at most this long.
const REMEMBERED_MAX_US: u64 = 600_000_000;
/// Time after which every other node has received a count that includes a new node: one heartbeat with its
/// jitter, and a slow reply.
pub(super) const INTRODUCED_US: u64 = 1_500_000;

/// A cluster that starts has been counted once a count has stood for this long: each node calls as soon as it starts.
const STOOD_US: u64 = 1_000_000;

/// A lane is called at least once in this time, its jitter included.
const CALLED_US: u64 = 1_200_000;
/// This many exchanges in a row may be lost before a reply reports a loss of memory.
const LOST_EXCHANGES: u64 = 3;

/// The numbers of nodes that have a limit, as the store has counted them.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// The latest count; `None` before the first one.
    latest: Option<i64>,
    /// Nodes that the same lane counted then, whatever limits they have, and how many more there are by the latest
    /// count of any lane: each of these may have the limit.
    all_then: i64,
    more: i64,
    /// Counts and the times of their replies, oldest first. A count that is not above a later one is left out,
    /// so that the first of a span is the highest of that span.
    highest: VecDeque<(Timestamp, i64)>,
    /// The time of the first reply that counted this node.
    joined: Option<Timestamp>,
    /// Since when the latest count has been the same.
    stands_since: Timestamp,
    /// A count has stood for [`STOOD_US`]. Before that, nodes may be missing that start at the same time.
    stood: bool,
    /// When a lane was last found to have lost its memory.
    lost_at: Option<Timestamp>,
    /// After a loss of memory a node gives no more first credit than other credit for this long. A second loss that
    /// follows within [`REPEATED_US`] is in a reply before the node gives first credit again.
    cautious_us: u64,
    /// The most nodes that there can be, from the configuration. It is used until the store has counted.
    configured: Option<i64>,
    /// Time after which every other node has received a count that includes this one.
    introduced_us: u64,
}

impl Nodes {
    /// `timeout_us` is how long an exchange with the store may take.
    pub(crate) fn new(configured: Option<u32>, timeout_us: u64) -> Self {
        Self {
            latest: None,
            all_then: 0,
            more: 0,
            highest: VecDeque::new(),
            joined: None,
            stands_since: Timestamp::ZERO,
            stood: false,
            lost_at: None,
            cautious_us: REPEATED_US + 2 * (CALLED_US + LOST_EXCHANGES * timeout_us),
            configured: configured.map(i64::from),
            introduced_us: INTRODUCED_US,
        }
    }

    /// The same on a node that lives: the others, which name all limits in `pass_us`, count those of this one only when its turn
    /// has come.
    pub(crate) fn joined_late(self, pass_us: u64) -> Self {
        Self { introduced_us: INTRODUCED_US + CALLED_US + pass_us, ..self }
    }

    /// The namespace has `all` nodes. Returns whether more of them may have the limit than before, or fewer.
    pub(crate) fn are_among(&mut self, all: i64) -> bool {
        let more = (all - self.all_then).max(0);
        std::mem::replace(&mut self.more, more) != more
    }

    /// Takes the store's count of the `nodes` that have the limit. The lane has `all` nodes, whatever limits they have.
    pub(crate) fn counted(&mut self, nodes: i64, all: i64, now: Timestamp) {
        (self.all_then, self.more) = (all, 0);
        self.joined.get_or_insert(now);
        if self.latest.replace(nodes) != Some(nodes) {
            self.stands_since = now;
        }
        self.stood |= now >= self.stands_since.plus_micros(STOOD_US);
        let forgotten = now.minus_micros(REMEMBERED_MAX_US);
        self.highest.retain(|&(at, known)| known > nodes && at >= forgotten);
        self.highest.push_back((now, nodes));
    }

    /// Whether a count has stood for [`STOOD_US`]: nodes which began together are in it.
    pub(crate) fn have_stood(&self) -> bool {
        self.stood
    }

    /// When the latest count will have stood for [`STOOD_US`]; `None` once one has.
    pub(crate) fn stands_from(&self) -> Option<Timestamp> {
        (!self.stood).then(|| self.stands_since.plus_micros(STOOD_US))
    }

    /// The latest count, with those that may have come since; `None` before the first one of any nodes.
    pub(crate) fn alive(&self) -> Option<i64> {
        self.with_more(self.latest)
    }

    fn with_more(&self, counted: Option<i64>) -> Option<i64> {
        let nodes = counted.unwrap_or(0) + self.more;
        (nodes > 0).then_some(nodes)
    }

    /// True if neither the store nor the configuration has said how many nodes there are.
    pub(crate) fn unknown(&self) -> bool {
        self.highest.is_empty() && self.configured.is_none()
    }

    /// The number of nodes that share the limit, whose bucket fills in `fill_us`: the highest count of that time,
    /// but of one minute at least and ten at most. A node that has gone may have spent what refill has not yet
    /// repaid, so it counts until then.
    pub(crate) fn sharing(&self, fill_us: u64, now: Timestamp) -> i64 {
        self.known(fill_us, now).unwrap_or(self.uncounted())
    }

    /// The number of nodes that share the limit in an outage. Before a count has stood, nodes may be missing from it.
    pub(crate) fn sharing_in_outage(&self, fill_us: u64, now: Timestamp) -> i64 {
        let nodes = self.sharing(fill_us, now);
        if self.stood { nodes } else { nodes.max(self.uncounted()) }
    }

    fn uncounted(&self) -> i64 {
        self.configured.unwrap_or(i64::from(DEFAULT_MAX_NODES))
    }

    fn known(&self, fill_us: u64, now: Timestamp) -> Option<i64> {
        let from = now.minus_micros(fill_us.clamp(REMEMBERED_MIN_US, REMEMBERED_MAX_US));
        let recent = self.highest.iter().find(|(at, _)| *at >= from);
        let counted = recent.or(self.highest.back()).map(|(_, nodes)| *nodes);
        self.with_more(counted).or(self.configured)
    }

    /// A lane was found to have lost its memory.
    pub(crate) fn memory_lost(&mut self, now: Timestamp) {
        self.lost_at = Some(now);
    }

    /// The credit that this node gives according to `rule` on the limit, whose bucket fills in `fill_us`. After a
    /// loss of memory, first credit that was spent may be forgotten, so for a while none is given again.
    pub(crate) fn credit(&self, rule: &CreditRule, fill_us: u64, now: Timestamp) -> Credit {
        let credit = self.credit_by_count(rule, fill_us, now);
        let cautious = self.lost_at.is_some_and(|at| now < at.plus_micros(self.cautious_us));
        if cautious { Credit { first: credit.known, ..credit } } else { credit }
    }

    /// The credit that this node gives according to the number of nodes. Where all
    /// nodes together are held to a number of tokens, a node that has just joined gives only what the others, which
    /// may not know of it yet, leave.
    fn credit_by_count(&self, rule: &CreditRule, fill_us: u64, now: Timestamp) -> Credit {
        let Some(nodes) = self.known(fill_us, now) else { return rule.at(None) };
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let Some(together) = rule.together else {
            return rule.at(self.stood.then_some(nodes));
        };
        let introduced =
            self.joined.is_none_or(|joined| now >= joined.plus_micros(self.introduced_us));
        if introduced {
            return rule.at(Some(nodes));
        }
        let credit = rule.at(Some(nodes));
        let others = u64::from(rule.at(Some(1)).first) * u64::from(nodes.saturating_sub(1));
        let rest = together.saturating_sub(others);
        let at_most_rest = |tokens: u32| u64::from(tokens).min(rest) as u32;
        Credit { known: at_most_rest(credit.known), first: at_most_rest(credit.first) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    const SECOND: u64 = 1_000_000;
    const TIMEOUT_US: u64 = 100_000;

    fn at(second: u64) -> Timestamp {
        Timestamp::from_micros(10_000 * SECOND + second * SECOND)
    }

    #[test]
    fn gone_nodes_count_until_the_bucket_has_filled_or_a_minute_has_passed() {
        let mut nodes = Nodes::new(None, TIMEOUT_US);
        nodes.counted(20, 20, at(0));
        nodes.counted(5, 5, at(1));
        nodes.counted(5, 5, at(2));
        assert_eq!(nodes.alive(), Some(5));
        for (fill_s, second, expected) in
            [(1, 2, 20), (1, 60, 20), (1, 61, 5), (300, 299, 20), (300, 301, 5), (86_400, 600, 20)]
        {
            let seen = nodes.sharing(fill_s * SECOND, at(second));
            assert_eq!(seen, expected, "filled in {fill_s} s, after {second} s");
        }
    }

    #[test]
    fn new_node_gives_only_the_credit_that_the_others_leave() {
        // 1% of 1000 are 10 tokens, 2 on each of five nodes.
        let limit = |rate| Limit::new("x", Quota::per_second(rate)).accuracy(0.01);
        let cases = [
            (limit(1000), 1, (8, 10), (8, 10)),
            (limit(1000), 5, (0, 0), (2, 2)),
            (limit(10_000), 5, (8, 15), (8, 15)),
        ];
        for (limit, count, at_first, later) in cases {
            let rule = limit.validate().unwrap().credit_rule;
            let mut nodes = Nodes::new(None, TIMEOUT_US);
            assert_eq!(nodes.credit(&rule, SECOND, at(0)), Credit::NONE);
            nodes.counted(count, count, at(0));
            nodes.counted(count, count, at(1));
            for (second, (known, first)) in [(1, at_first), (2, later)] {
                let seen = nodes.credit(&rule, SECOND, at(second));
                let expected = Credit { known, first };
                assert_eq!(seen, expected, "{limit:?} on {count} nodes, second {second}");
            }
        }
    }

    #[test]
    fn first_credit_follows_a_count_that_has_stood_for_a_second() {
        let limit = Limit::new("x", Quota::per_second(100));
        let rule = limit.validate().unwrap().credit_rule;
        let mut nodes = Nodes::new(None, TIMEOUT_US);
        // A cluster of five starts: the nodes are counted one after the other.
        let counts = [(0, 1), (100, 2), (900, 5), (1800, 5)];
        let after = |ms: u64| at(0).plus_micros(ms * 1000);
        for (ms, count) in counts {
            nodes.counted(count, count, after(ms));
            assert_eq!(nodes.credit(&rule, SECOND, after(ms)), rule.at(None), "after {ms} ms");
        }
        nodes.counted(5, 5, after(1900));
        assert_eq!(nodes.credit(&rule, SECOND, after(1900)), Credit { known: 1, first: 5 });
        nodes.counted(25, 25, after(2000));
        assert_eq!(nodes.credit(&rule, SECOND, after(2000)).first, 1, "at once from then on");
    }

    #[test]
    fn no_first_credit_is_given_for_eight_seconds_after_a_loss_of_memory() {
        let rule = Limit::new("x", Quota::per_second(100)).validate().unwrap().credit_rule;
        let mut nodes = Nodes::new(None, TIMEOUT_US);
        nodes.counted(5, 5, at(0));
        nodes.counted(5, 5, at(3));
        assert_eq!(nodes.credit(&rule, SECOND, at(9)).first, 5);
        nodes.memory_lost(at(10));
        for (second, first) in [(10, 1), (17, 1), (18, 5)] {
            let credit = nodes.credit(&rule, SECOND, at(second));
            assert_eq!(credit, Credit { known: 1, first }, "second {second}");
        }
    }

    #[test]
    fn configured_number_is_used_until_a_count_has_stood_and_the_last_count_stays() {
        let mut nodes = Nodes::new(Some(8), TIMEOUT_US);
        assert_eq!((nodes.alive(), nodes.sharing(SECOND, at(0))), (None, 8));
        assert_eq!(
            Nodes::new(None, TIMEOUT_US).sharing(SECOND, at(0)),
            i64::from(DEFAULT_MAX_NODES)
        );
        nodes.counted(3, 3, at(0));
        let shares = |nodes: &Nodes, second| {
            (nodes.sharing(SECOND, at(second)), nodes.sharing_in_outage(SECOND, at(second)))
        };
        assert_eq!(shares(&nodes, 0), (3, 8), "others may not have called yet");
        nodes.counted(9, 9, at(0));
        assert_eq!(shares(&nodes, 0), (9, 9));
        nodes.counted(9, 9, at(1));
        nodes.counted(3, 3, at(2));
        assert_eq!(shares(&nodes, 7200), (3, 3));
    }

    #[test]
    fn counts_are_forgotten_when_a_later_one_is_higher_or_after_ten_minutes() {
        let mut nodes = Nodes::new(None, TIMEOUT_US);
        for second in 0..2000 {
            let count = 100 - i64::from(second % 7 == 0);
            nodes.counted(count, count, at(second));
        }
        assert!(nodes.highest.len() <= 2, "{:?}", nodes.highest);
        for second in 2000..4000_u64 {
            let count = 5000 - second as i64;
            nodes.counted(count, count, at(second));
        }
        assert_eq!(nodes.highest.len(), 601);
    }

    #[test]
    fn nodes_that_came_since_the_count_share_the_limit_until_it_is_counted_again() {
        let mut nodes = Nodes::new(Some(8), TIMEOUT_US);
        assert!(nodes.are_among(3));
        assert_eq!(nodes.sharing(SECOND, at(0)), 3, "no count of the limit, and one of all");
        nodes.counted(2, 3, at(1));
        assert!(!nodes.are_among(3));
        assert_eq!(nodes.sharing(SECOND, at(1)), 2);
        assert!(nodes.are_among(7));
        assert_eq!((nodes.sharing(SECOND, at(2)), nodes.alive()), (6, Some(6)));
        assert!(nodes.are_among(4));
        nodes.counted(2, 7, at(3));
        assert_eq!(nodes.sharing(SECOND, at(3)), 2);
        nodes.are_among(5);
        assert_eq!(
            nodes.sharing(SECOND, at(4)),
            2,
            "nobody knows whether those had it that have gone"
        );
    }

    #[test]
    fn count_has_stood_when_it_was_the_same_for_long() {
        let mut nodes = Nodes::new(None, TIMEOUT_US);
        let after = |us| at(0).plus_micros(us);
        for (us, count, has_stood) in [
            (0, 3, false),
            (STOOD_US - 1, 4, false),
            (2 * STOOD_US - 2, 4, false),
            (2 * STOOD_US - 1, 4, true),
        ] {
            nodes.counted(count, count, after(us));
            assert_eq!(nodes.have_stood(), has_stood, "{us}");
            assert_eq!(nodes.stands_from().is_none(), has_stood, "{us}");
        }
    }
}
