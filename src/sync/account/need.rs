//! How many tokens a node should hold of a key, and which demand it registers.

use super::schedule::PLENTY_TICKS;
use super::{Account, Cluster};
use crate::bucket::MAX_TOKENS;
use crate::limit::{OutagePolicy, Terms};
use crate::quota::Curve;
use crate::time::Timestamp;

/// A key that is asked for less than once in this time, in microseconds, is not hot.
const HOT_US: u64 = 125_000;
/// Where callers wait for the store, a sliding window with fewer tokens for each node is asked for, and not refilled.
const ASKED_TOKENS_A_NODE: i64 = 100;
/// The same at the end of a sliding window with fewer tokens for each node than this: a node is left with some two tokens that it has not spent
/// when the window ends.
const END_TOKENS_A_NODE: i64 = 400;
/// Where callers wait, a bucket with fewer tokens of its burst for each node is asked for, and not refilled, while it has tokens. In a
/// silence of the store nodes then have no refill: a larger bucket is not worth that.
const BUCKET_TOKENS_A_NODE: i64 = 10;
/// A bucket has tokens from this part of its burst on.
const HAS_TOKENS_DIVISOR: i64 = 10;
/// The end of a window is at most so many ticks.
const END_TICKS: u64 = 2;
/// The end of a window is at most the window divided by this.
const END_DIVISOR: u64 = 10;
/// Where the end of a window is shorter than so many round trips, the store is not asked more than before.
const END_ROUND_TRIPS: u64 = 10;
/// Where callers wait, a node is to hold less and less of a scarce sliding window with fewer tokens for each node than this.
const HELD_TOKENS_A_NODE: i64 = 200;
/// What a node will spend by the end of the window, divided by this, is the most that it is to hold.
const HELD_DIVISOR: f64 = 7.0;
/// Tokens of the burst for each node, so that a node may hold one and leave one.
const TOKENS_A_NODE: i64 = 2;

impl Account {
    /// Until the next report on schedule.
    pub(super) fn interval_us(&self, now: Timestamp, terms: &Terms) -> u64 {
        let ticks = if self.level.is_plentiful(now, &terms.scale) { PLENTY_TICKS } else { 1 };
        ticks * terms.tick_us
    }

    /// Until the answer to the next report on schedule, at the latest.
    fn span_us(&self, now: Timestamp, terms: &Terms) -> u64 {
        let Cluster { round_trip_us, backlog_us, .. } = self.cluster;
        self.interval_us(now, terms) + terms.tick_us / 2 + round_trip_us + backlog_us
    }

    /// Tokens to hold so that the key does not run dry before the next report.
    pub(super) fn need(&self, now: Timestamp, terms: &Terms) -> i64 {
        let history = &self.history;
        if history.is_over(now, terms) {
            return 0;
        }
        // A key that may never come again, or not soon, gets no lease, where credit can admit its next request.
        let may_be_over = history.is_seen_once() || self.has_come_once(now, terms);
        if may_be_over && terms.credit.known > 0 && history.largest_denied == 0 {
            return 0;
        }
        // Callers that wait get what they ask for first: another node may need the rest for one large cost.
        if history.caller_has_waited && (self.is_unanswered() || self.is_beginning(now)) {
            return 0;
        }
        let expected = self.expected_spending(now, terms);
        // A large cost that was denied is probably asked for again. Less than it costs is of no use.
        let large = i64::from(history.largest_denied);
        let is_there = large.saturating_mul(self.scale.token) <= self.with_own(now, terms);
        let large = if is_there && self.is_ample(now, terms) { large } else { 0 };
        let may_hold = self.may_hold_unused(expected, now, terms);
        if !may_hold && !self.is_hot(self.arrivals.demand.per_us(), terms) {
            // Without credit, only a token that is held can admit a request that is denied and comes again. Callers
            // that wait for the store get what is there, and need none to be held.
            let held = terms.credit.known == 0 && !history.caller_has_waited;
            return large.max(i64::from(held));
        }
        let burst = self.arrivals.bursts.expected(now);
        let need = expected.max(burst).max(self.first_want(now, terms));
        let most = self.most_to_hold_of_window(now, terms).unwrap_or(MAX_TOKENS);
        need.min(most.into()).max(large).min(self.burst(terms)).min(MAX_TOKENS.into())
    }

    /// Tokens that will be spent beyond leased refill until the answer to the next report, with room for chance.
    fn expected_spending(&self, now: Timestamp, terms: &Terms) -> i64 {
        let span_us = self.span_us(now, terms);
        let demand = &self.arrivals.demand;
        // What is leased goes back with the next report, if the store is to be asked.
        let rate = if self.leases_no_refill(now, terms) { 0 } else { self.lease.rate() };
        let flows_in = rate as f64 / terms.scale.token as f64;
        let refill_us = self.lease.window_closes().micros_since(now).min(span_us);
        let missing = (demand.per_us() - flows_in).max(0.0) * refill_us as f64
            + demand.over(span_us - refill_us);
        let cost = self.history.mean_cost as f64;
        let spread = 2.0 * (demand.over(span_us) * cost).sqrt();
        (missing + spread + cost).ceil() as i64
    }

    /// Whether there is so much that a node may hold tokens which it may not need. It is going to hold `expected`
    /// tokens.
    fn may_hold_unused(&self, expected: i64, now: Timestamp, terms: &Terms) -> bool {
        if self.level.view.is_none() || self.is_mostly_unspent(terms) {
            return true;
        }
        if self.history.caller_has_waited {
            // Else it would be given back with the next report, and be asked for with the one after that.
            let rest =
                self.with_own(now, terms).saturating_sub(expected.saturating_mul(self.scale.token));
            return rest > terms.scale.burst / 2;
        }
        if self.is_far(terms) {
            // A round trip is longer than what is given back would serve others: it would be asked for again.
            return self.is_ample(now, terms);
        }
        self.level.is_plentiful(now, &terms.scale) || self.lasts_for_all(expected, now, terms)
    }

    /// Whether what the store and this node have of a window is enough for each node to hold as much as this one will. A
    /// window has little left towards its end, even where not all of it is ever spent.
    fn lasts_for_all(&self, expected: i64, now: Timestamp, terms: &Terms) -> bool {
        let each =
            expected.max(self.arrivals.bursts.expected(now)).saturating_mul(self.scale.token);
        terms.scale.curve != Curve::Refill
            && self.with_own(now, terms) >= each.saturating_mul(self.cluster.nodes)
    }

    /// Tokens to ask for before the store has answered once, if it may have plenty. The demand is not known yet,
    /// and may be the whole rate until this answer and the next one are here.
    fn first_want(&self, now: Timestamp, terms: &Terms) -> i64 {
        let scale = &terms.scale;
        let may_have = self.level.view.is_none() || self.level.is_plentiful(now, scale);
        let is_quiet = self.history.is_over(now, terms) || self.history.is_seen_once();
        if !self.is_unanswered() || !may_have || is_quiet {
            return 0;
        }
        let tokens_per_us = scale.rate as f64 / scale.token as f64;
        (tokens_per_us * (2 * self.cluster.round_trip_us) as f64) as i64
    }

    /// The demand to be registered, in tokens per microsecond, and whether the key is hot. What is asked for at
    /// first is demand too: shares and refill follow from it.
    pub(super) fn wanted_per_us(&self, now: Timestamp, terms: &Terms) -> (f64, bool) {
        let first_per_us = self.first_want(now, terms) as f64 / self.span_us(now, terms) as f64;
        let per_us = self.arrivals.demand.per_us().max(first_per_us);
        (per_us, self.is_hot(per_us, terms) && !self.leases_no_refill(now, terms))
    }

    /// Whether a caller has waited, and it is better to ask the store than to lease refill: a node with refill denies without asking.
    fn leases_no_refill(&self, now: Timestamp, terms: &Terms) -> bool {
        let is_better_asked = self.is_beginning(now)
            || self.is_little_of_a_window(terms)
            || self.is_end_of_window(now, terms)
            || self.is_small_bucket_with_tokens(now, terms);
        self.history.caller_has_waited && is_better_asked
    }

    /// Whether tokens alone would do without refill: this node's part of what the store has lasts until the
    /// next answer.
    pub(super) fn spares_refill(&self, now: Timestamp, terms: &Terms) -> bool {
        let span_us = self.span_us(now, terms);
        let part =
            self.level.view.map_or(0, |view| view.unleased / self.scale.token / self.cluster.nodes);
        part as f64 >= self.arrivals.demand.over(span_us)
    }

    /// Whether a node's even part of a window is so little that asking for it loses less than the part of a token which
    /// refill leaves on each node.
    fn is_little_of_a_window(&self, terms: &Terms) -> bool {
        self.has_fewer_in_a_window(ASKED_TOKENS_A_NODE, terms)
    }

    /// Whether a bucket is so small that nodes with refill would strand a large part of it, the store has tokens if no other node has spent
    /// since its last word, and callers can wait for two answers: that to the batch under way, and the next.
    fn is_small_bucket_with_tokens(&self, now: Timestamp, terms: &Terms) -> bool {
        let Cluster { nodes, round_trip_us, backlog_us, .. } = self.cluster;
        let level = self.level.estimate(now, &terms.scale).unwrap_or_default();
        // Where the last rate goes on in an outage, there is to be one.
        terms.scale.curve == Curve::Refill
            && terms.outage != OutagePolicy::LastRate
            && nodes > 1
            && self.burst(terms) < BUCKET_TOKENS_A_NODE * nodes
            && level >= (terms.scale.burst / HAS_TOKENS_DIVISOR).max(terms.scale.token)
            && 2 * (round_trip_us + backlog_us) <= terms.max_wait_us
    }

    /// Whether a sliding window ends so soon that tokens which nodes hold may be lost with it, and has so few that this matters.
    pub(super) fn is_end_of_window(&self, now: Timestamp, terms: &Terms) -> bool {
        let part_us = terms.scale.window_us() as u64 / END_DIVISOR;
        let end_us = part_us.min(END_TICKS * terms.tick_us);
        let is_soon = |ends: Timestamp| ends > now && ends < now.plus_micros(end_us);
        self.cluster.nodes > 1
            && self.has_fewer_in_a_window(END_TOKENS_A_NODE, terms)
            && end_us >= END_ROUND_TRIPS * self.cluster.round_trip_us
            && self.level.view.is_some_and(|view| is_soon(view.window_ends_latest))
    }

    /// The most tokens that this node is to hold of a scarce sliding window; `None` if it is not scarce, or nobody waits. It is scarce if
    /// there is less than all nodes will spend and hold by its end, where each is asked for as much as this one. What other nodes hold is
    /// not known, and not counted.
    pub(super) fn most_to_hold_of_window(&self, now: Timestamp, terms: &Terms) -> Option<u32> {
        let view = self.level.view.as_ref()?;
        let left_us = view.window_ends_latest.micros_since(now);
        let will_spend = self.arrivals.demand.over(left_us);
        let will_hold = will_spend / HELD_DIVISOR;
        let will_all_want = (will_spend + will_hold) * self.cluster.nodes as f64;
        let part_left = left_us as f64 / terms.scale.window_us() as f64;
        let will_return = view.previous.unwrap_or_default() as f64 * part_left;
        let is_scarce = self.history.caller_has_waited
            && self.has_fewer_in_a_window(HELD_TOKENS_A_NODE, terms)
            && self.cluster.nodes > 1
            && view.window_ends_latest > now
            && self.with_own(now, terms) as f64 + will_return
                < will_all_want * self.scale.token as f64
            && self.arrivals.bursts.expected(now) == 0;
        is_scarce.then_some(will_hold as u32)
    }

    /// Whether this is a sliding window with fewer tokens for each node.
    fn has_fewer_in_a_window(&self, tokens_a_node: i64, terms: &Terms) -> bool {
        let is_window = terms.scale.curve == Curve::SlidingWindow;
        is_window && self.burst(terms) < tokens_a_node * self.cluster.nodes
    }

    // ---- what is known of the key ------------------------------------------------------------

    /// The burst, in tokens.
    fn burst(&self, terms: &Terms) -> i64 {
        terms.scale.burst / self.scale.token
    }

    /// The store's level and what this node holds of it, in units.
    fn with_own(&self, now: Timestamp, terms: &Terms) -> i64 {
        let tokens = i64::from(self.bucket.mint_tokens(now, self.scale.token));
        let own = tokens.saturating_mul(self.scale.token);
        let level = self.level.estimate(now, &terms.scale).unwrap_or(terms.scale.burst);
        level.saturating_add(own)
    }

    /// Whether the store's level and what this node holds of it are plenty together.
    fn is_ample(&self, now: Timestamp, terms: &Terms) -> bool {
        self.with_own(now, terms) > terms.scale.burst / 2
    }

    /// Whether the bucket is nearly full, though most of it may be outstanding. Then a node may hold tokens of a key
    /// that it is seldom asked for, unless a caller has waited for the store: such callers get what is there.
    pub(super) fn is_mostly_unspent(&self, terms: &Terms) -> bool {
        self.level.is_mostly_unspent(&terms.scale)
            && !self.history.caller_has_waited
            && self.burst(terms) >= TOKENS_A_NODE * self.cluster.nodes
    }

    /// Whether a round trip is long beside a tick, where the burst has a token for each node.
    fn is_far(&self, terms: &Terms) -> bool {
        2 * self.cluster.round_trip_us > terms.tick_us && self.burst(terms) >= self.cluster.nodes
    }

    /// Whether the account is a tick old, has had one request, and the bucket is nearly full. What a node held of it would go back with
    /// one more report. A far node needs so long to get it again that it keeps it.
    fn has_come_once(&self, now: Timestamp, terms: &Terms) -> bool {
        let history = &self.history;
        let is_one = history.requests <= 1 && !history.caller_has_waited;
        let is_old = now >= history.opened.plus_micros(terms.tick_us);
        is_one && is_old && !self.is_far(terms) && self.level.is_mostly_unspent(&terms.scale)
    }

    fn is_beginning(&self, now: Timestamp) -> bool {
        self.history.is_beginning(self.cluster.nodes, now)
    }

    /// Whether the store has not answered since the account was opened.
    fn is_unanswered(&self) -> bool {
        !self.level.is_viewed_since(self.history.opened)
    }

    /// Whether a key is hot with this demand in tokens per microsecond: one in a tick, or in a round trip in which
    /// this node's even share of the rate is a token too. Slower refill would be stranded in fractions on all nodes.
    fn is_hot(&self, per_us: f64, terms: &Terms) -> bool {
        let rate_per_us = terms.scale.rate as f64 / terms.scale.token as f64;
        let share_per_us = rate_per_us / self.cluster.nodes as f64;
        per_us * terms.tick_us.min(HOT_US) as f64 >= 1.0
            || per_us.min(share_per_us) * self.cluster.round_trip_us.min(HOT_US) as f64 >= 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::Account;
    use super::super::Cluster;
    use super::super::samples::{OPENED, account_of, answered};
    use crate::algorithm::FixedWindow;
    use crate::algorithm::SlidingWindow;
    use crate::limit::Terms;
    use crate::limit::{Limit, OutagePolicy};
    use crate::quota::Quota;
    use crate::sync::message::Given;

    #[test]
    fn small_bucket_with_tokens_is_asked_where_several_nodes_can_wait_for_it() {
        let limit = || Limit::new("x", Quota::per_second(1000).burst(199));
        let terms = limit().validate_hybrid(20).unwrap();
        let last_rate = limit().outage(OutagePolicy::LastRate).validate_hybrid(20).unwrap();
        let tiny = Limit::new("x", Quota::per_second(1000).burst(5)).validate_hybrid(20).unwrap();
        let window = Limit::new("x", SlidingWindow::per_second(199)).validate_hybrid(20).unwrap();
        let [near_us, far_us, slow_us] = [1_000, 25_000, 25_001];
        for (nodes, round_trip_us, backlog_us, tenths, terms, is_asked) in [
            (20, near_us, 0, 1000, &terms, true),
            (20, near_us, 0, 200, &terms, true),
            (20, near_us, 0, 190, &terms, false),
            (19, near_us, 0, 1000, &terms, false),
            (20, far_us, 0, 1000, &terms, true),
            (20, slow_us, 0, 1000, &terms, false),
            (20, near_us, far_us, 1000, &terms, false),
            (20, near_us, 0, 1000, &last_rate, false),
            (20, near_us, 0, 10, &tiny, true),
            (20, near_us, 0, 9, &tiny, false),
            (1, near_us, 0, 10, &tiny, false),
            (20, near_us, 0, 1000, &window, false),
        ] {
            let mut account = account_of(terms);
            let case = (nodes, round_trip_us, backlog_us, tenths, terms.outage);
            assert!(
                !account.is_small_bucket_with_tokens(OPENED, terms),
                "{case:?}: nothing is known"
            );
            account.cluster = Cluster { nodes, round_trip_us, backlog_us, time_us: 0 };
            let available = tenths * terms.scale.token / 10;
            let given = Given { available, life_us: 2_000_000, ..Given::default() };
            answered(&mut account, &given, terms);
            assert_eq!(account.is_small_bucket_with_tokens(OPENED, terms), is_asked, "{case:?}");
        }
    }

    #[test]
    fn less_and_less_is_held_of_a_sliding_window_that_is_scarce() {
        let of =
            |tokens| Limit::new("x", SlidingWindow::per_second(tokens)).validate_hybrid(8).unwrap();
        let (large, small) = (of(1000), of(100));
        // A node spends 200 a second, and the window ends half a second later: each of 8 will spend 100, and hold a seventh of that.
        for (terms, nodes, at_ms, available, previous, has_waited, most) in [
            (&large, 8, 0, 500, 800, true, Some(14)),
            (&large, 8, 0, 515, 800, true, None),
            (&large, 8, 0, 500, 830, true, None),
            (&large, 8, 480, 0, 0, true, Some(0)),
            (&large, 8, 600, -1, 0, true, None),
            (&large, 8, 0, 500, 800, false, None),
            (&large, 6, 0, 0, 0, true, Some(14)),
            (&large, 5, 0, 0, 0, true, None),
            (&small, 2, 0, 0, 0, true, Some(14)),
            (&small, 1, 0, 0, 0, true, None),
        ] {
            let mut account = account_of(terms);
            let now = OPENED.plus_micros(1000 * at_ms);
            assert_eq!(account.most_to_hold_of_window(now, terms), None, "nothing is known");
            account.cluster.nodes = nodes;
            account.history.caller_has_waited = has_waited;
            let second = OPENED.plus_micros(1_000_000);
            account.arrivals.demand.observe(200, true, second, terms.tick_us, 1_000_000);
            let entry = account.report(&"x".into(), terms, OPENED, false);
            account.end_report();
            account.arrivals.demand.observe(200, true, second, terms.tick_us, 1_000_000);
            let token = terms.scale.token;
            let (available, previous) = (available * token, previous * token);
            let given = Given {
                stamp_us: 10_500_000,
                life_us: 2_000_000,
                available,
                previous,
                ..Given::default()
            };
            account.install(&given, &entry, OPENED, OPENED, terms);
            let case = (nodes, at_ms, available, previous, has_waited);
            assert_eq!(account.most_to_hold_of_window(now, terms), most, "{case:?}");
        }
    }

    #[test]
    fn key_has_come_once_if_a_near_account_is_a_tick_old_and_its_bucket_is_nearly_full() {
        let terms = Limit::new("x", Quota::per_second(1).burst(100)).validate_hybrid(4).unwrap();
        let tick_ms = terms.tick_us / 1000;
        for (requests, at_ms, has_waited, round_trip_ms, level, has_come_once) in [
            (1, tick_ms, false, 1, 100, true),
            (1, tick_ms - 1, false, 1, 100, false),
            (2, tick_ms, false, 1, 100, false),
            (1, tick_ms, true, 1, 100, false),
            (1, tick_ms, false, tick_ms, 100, false),
            (1, tick_ms, false, 1, 70, false),
        ] {
            let mut account = account_of(&terms);
            account.history.requests = requests;
            account.history.caller_has_waited = has_waited;
            account.cluster.nodes = 4;
            account.cluster.round_trip_us = 1000 * round_trip_ms;
            let level = level * terms.scale.token;
            let given = Given { level, life_us: 2_000_000, ..Given::default() };
            answered(&mut account, &given, &terms);
            let now = OPENED.plus_micros(1000 * at_ms);
            let case = (requests, at_ms, has_waited, round_trip_ms, level);
            assert_eq!(account.has_come_once(now, &terms), has_come_once, "{case:?}");
        }
    }

    /// A view of the window before was taken for the end of this one: no refill was asked for at its beginning.
    #[test]
    fn end_of_a_window_is_over_when_the_window_is() {
        let terms = Limit::new("x", SlidingWindow::per_second(1000)).validate_hybrid(8).unwrap();
        let mut account = account_of(&terms);
        account.cluster.nodes = 8;
        // The window ends half a second later.
        let given = Given { stamp_us: 10_500_000, life_us: 2_000_000, ..Given::default() };
        answered(&mut account, &given, &terms);
        let is_end = |ms: u64| account.is_end_of_window(OPENED.plus_micros(1000 * ms), &terms);
        assert_eq!(
            [0, 399, 401, 499, 500, 600].map(is_end),
            [false, false, true, true, false, false]
        );
    }

    /// An account on one of four nodes, after the first reply: the store has `tokens`.
    fn viewed(terms: &Terms, tokens: i64) -> Account {
        let mut account = account_of(terms);
        account.cluster.nodes = 4;
        let available = tokens * terms.scale.token;
        let given = Given { available, level: available, life_us: 2_000_000, ..Given::default() };
        answered(&mut account, &given, terms);
        account
    }

    #[test]
    fn window_lasts_for_all_if_each_node_can_hold_as_much_as_this_one() {
        let window = Limit::new("x", FixedWindow::per_second(100)).validate_hybrid(4).unwrap();
        let bucket = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        for (terms, tokens, lasts) in
            [(&window, 40, true), (&window, 39, false), (&bucket, 100, false)]
        {
            let account = viewed(terms, tokens);
            assert_eq!(account.lasts_for_all(10, OPENED, terms), lasts, "{tokens}");
        }
    }

    #[test]
    fn refill_of_two_round_trips_is_asked_for_before_the_first_answer_if_requests_go_on() {
        let terms = Limit::new("x", Quota::per_second(1000)).validate_hybrid(4).unwrap();
        let linger_us = 1_000_000;
        for (requests, after_us, tokens) in [(1, 0, 0), (2, 0, 20), (2, linger_us, 0)] {
            let mut account = account_of(&terms);
            account.cluster.round_trip_us = 10_000;
            account.history.requests = requests;
            let now = OPENED.plus_micros(after_us);
            assert_eq!(account.first_want(now, &terms), tokens, "{requests}, {after_us}");
        }
        assert_eq!(viewed(&terms, 1000).first_want(OPENED, &terms), 0, "it has answered");
    }

    #[test]
    fn end_of_a_window_lasts_for_ten_round_trips_or_is_not_asked_for() {
        let terms = Limit::new("x", SlidingWindow::per_second(1000)).validate_hybrid(4).unwrap();
        let mut account = viewed(&terms, 0);
        // The view's window ends a second later.
        let now = OPENED.plus_micros(950_000);
        for (round_trip_us, is_end) in [(10_000, true), (10_001, false)] {
            account.cluster.round_trip_us = round_trip_us;
            assert_eq!(account.is_end_of_window(now, &terms), is_end, "{round_trip_us}");
        }
    }

    /// Less than it costs is of no use.
    #[test]
    fn large_cost_that_was_denied_is_asked_for_if_there_is_as_much() {
        let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        for (tokens, is_asked) in [(61, true), (60, true), (59, false)] {
            let mut account = viewed(&terms, tokens);
            (account.history.requests, account.history.largest_denied) = (2, 60);
            assert_eq!(account.need(OPENED, &terms) == 60, is_asked, "{tokens}");
        }
    }

    #[test]
    fn node_whose_callers_wait_holds_what_it_may_not_need_while_more_than_half_is_left() {
        let terms = Limit::new("x", Quota::per_second(100)).validate_hybrid(4).unwrap();
        for (tokens, may_hold) in [(61, true), (60, false)] {
            let mut account = viewed(&terms, tokens);
            account.history.caller_has_waited = true;
            assert_eq!(account.may_hold_unused(10, OPENED, &terms), may_hold, "{tokens}");
        }
    }
}
