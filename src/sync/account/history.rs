//! What is remembered of the requests of one key since its account was opened.

use crate::limit::Terms;
use crate::time::Timestamp;

/// An account is kept for at least this long after the last request.
pub(super) const LINGER_MIN_US: u64 = 250_000;
/// An account is kept for at most this long after the last request.
pub(super) const LINGER_MAX_US: u64 = 1_000_000;
/// The same for a key that has come before, on a limit without credit: only tokens that are held for it can admit
/// its next request.
const STRICT_LINGER_MAX_US: u64 = 150_000_000;
/// The first requests of a client come within this time, in microseconds.
pub(super) const BEGINNING_US: u64 = 20_000;
/// A count of this many requests can be trusted: its relative error is a third.
pub(super) const TELLING_REQUESTS: u64 = 8;

/// The requests of one key since its account was opened.
#[derive(Debug)]
pub(super) struct History {
    pub(super) opened: Timestamp,
    /// The age of the view that the bucket had then, in microseconds.
    view_age_us: Option<u64>,
    /// The account was not opened in a flood of new keys, or more was charged than its only request cost.
    pub(super) is_expected_to_return: bool,
    pub(super) requests: u64,
    pub(super) last_request: Timestamp,
    /// The largest cost that was denied, in tokens; 0 if none was.
    pub(super) largest_denied: u32,
    /// What the last requests that were allowed cost on average, in tokens.
    pub(super) mean_cost: u64,
    /// A caller has waited for the store.
    pub(super) caller_has_waited: bool,
    /// A report has told of tokens that were spent.
    pub(super) has_charged: bool,
}

impl History {
    pub(super) fn new(now: Timestamp, view_age_us: Option<u64>) -> Self {
        Self {
            opened: now,
            view_age_us,
            is_expected_to_return: false,
            requests: 0,
            last_request: now,
            largest_denied: 0,
            mean_cost: 1,
            caller_has_waited: false,
            has_charged: false,
        }
    }

    /// Whether there was one request, and none lately before the account was opened.
    pub(super) fn is_seen_once(&self) -> bool {
        !self.is_expected_to_return
            && self.requests <= 1
            && self.view_age_us.is_none_or(|age_us| age_us > LINGER_MAX_US)
    }

    /// The same, and this node has not known the key before.
    pub(super) fn is_seen_for_the_first_time(&self) -> bool {
        self.is_seen_once() && self.view_age_us.is_none()
    }

    /// Whether the first few requests of a client that began a moment ago are all that is known of the key: other
    /// nodes may have more of them.
    pub(super) fn is_beginning(&self, nodes: i64, now: Timestamp) -> bool {
        let began = now < self.opened.plus_micros(BEGINNING_US);
        began && nodes > 1 && self.requests < TELLING_REQUESTS
    }

    /// How long the account is kept after the last request.
    pub(super) fn linger_us(&self, terms: &Terms) -> u64 {
        let strict = terms.credit.known == 0 && !self.caller_has_waited;
        let returns = self.requests > 1 || self.view_age_us.is_some();
        let most_us = if strict && returns { STRICT_LINGER_MAX_US } else { LINGER_MAX_US };
        terms.scale.fill_us().clamp(LINGER_MIN_US, most_us)
    }

    /// Whether the last request is so long ago that none is expected.
    pub(super) fn is_over(&self, now: Timestamp, terms: &Terms) -> bool {
        now.micros_since(self.last_request) >= self.linger_us(terms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_begins_for_a_moment_and_for_few_requests_where_there_are_other_nodes() {
        let opened = Timestamp::from_micros(1_000);
        for (after_us, nodes, requests, is_beginning) in [
            (BEGINNING_US - 1, 2, TELLING_REQUESTS - 1, true),
            (BEGINNING_US, 2, 0, false),
            (0, 1, 0, false),
            (0, 2, TELLING_REQUESTS, false),
        ] {
            let history = History { requests, ..History::new(opened, None) };
            let now = opened.plus_micros(after_us);
            let case = (after_us, nodes, requests);
            assert_eq!(history.is_beginning(nodes, now), is_beginning, "{case:?}");
        }
    }

    #[test]
    fn key_is_seen_once_if_its_only_request_came_long_after_those_before() {
        for (view_age_us, requests, is_expected_to_return, is_once) in [
            (None, 1, false, true),
            (Some(LINGER_MAX_US + 1), 1, false, true),
            (Some(LINGER_MAX_US), 1, false, false),
            (None, 2, false, false),
            (None, 1, true, false),
        ] {
            let new = History::new(Timestamp::ZERO, view_age_us);
            let history = History { is_expected_to_return, requests, ..new };
            assert_eq!(history.is_seen_once(), is_once, "{view_age_us:?}, {requests}");
        }
    }
}
