//! The figures of a run, and the decisions that they are computed from.

use serde::{Deserialize, Serialize};

/// The length of one entry of the timeline.
pub const SLOT_US: u64 = 100_000;

/// A request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// When the decision was completed, in microseconds since the run's start.
    pub at_us: u64,
    /// The node that decided.
    pub node: u16,
    /// The key charged.
    pub key: u32,
    /// What the request asked for, in tokens.
    pub cost: u32,
    /// Whether it was admitted.
    pub allowed: bool,
    /// Whether the node was sure.
    pub sure: bool,
    /// Whether the caller had to wait for the store.
    pub waited: bool,
    /// How long the request then waits for its slot, in microseconds; only of a leaky bucket.
    pub delay_us: u64,
}

/// What happened within one [`SLOT_US`], in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Asked for.
    pub offered: u64,
    /// Admitted.
    pub admitted: u64,
}

/// The summary of a run; the fields go by their names in the demo's JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Tokens asked for.
    pub offered: u64,
    /// Tokens admitted.
    pub admitted: u64,
    /// Tokens that one central bucket per key, full at the start, admits of the same requests.
    pub ideal: u64,
    /// `admitted` in % of `ideal`; 100 when both are zero.
    pub admitted_vs_ideal_pct: f64,
    /// The same ratio of the requests that came while the store could be reached; the ideal bucket
    /// runs over all of them.
    pub admitted_vs_ideal_reachable_pct: f64,
    /// How far the bucket of what was really admitted fell below zero: the worst key's tokens. Of a leaky bucket how much
    /// too early a request began by one queue, in the tokens of that time.
    pub excess_tokens: f64,
    /// The same in % of the burst.
    pub excess_pct_of_burst: f64,
    /// Requests denied while tokens were there, in % of all requests.
    pub wrong_denials_pct: f64,
    /// The same among the first six requests of each key.
    pub wrong_first_denials_pct: f64,
    /// Decisions that the node was not sure of, in % of all requests.
    pub unsure_pct: f64,
    /// Requests that waited for the store, in % of all requests.
    pub waited_pct: f64,
    /// The same ratio as `admitted_vs_ideal_pct` for the worst percentile of keys.
    pub worst_keys_vs_ideal_pct: f64,
    /// The least that a node got of its fair share over ten times burst / rate, in %; 100 when no
    /// node's share was large enough to tell.
    pub least_fair_share_pct: f64,
    /// The longest that a key took to repay what it had admitted in excess, in seconds.
    pub longest_excess_s: f64,
    /// Time that a key had more than half its burst, in %: the mean of all keys, each from its first
    /// request to its last.
    pub above_half_pct: f64,
    /// Keys that were asked for once and not judged.
    pub invented_keys: u64,
    /// What was offered and admitted in each 100 ms.
    pub timeline: Vec<Slot>,
    /// Keys with the number of their denied requests, most first; keys without any are left out.
    #[serde(skip)]
    pub denied_by_key: Vec<(u32, u64)>,
}
