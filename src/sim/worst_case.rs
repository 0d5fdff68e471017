//! The figures of several runs in one: each at its worst.

use serde::Serialize;

use super::outcome::Outcome;

/// Each figure at its worst: one may come of another run than the next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Admitted in % of the ideal, at the least.
    pub admitted_vs_ideal_pct: f64,
    /// The same at the most.
    pub admitted_vs_ideal_most_pct: f64,
    /// The same for the worst percentile of keys, at the least.
    pub worst_keys_vs_ideal_pct: f64,
    /// Tokens above what there was.
    pub excess_tokens: f64,
    /// The same in % of the burst.
    pub excess_pct_of_burst: f64,
    /// The longest time that an excess took to be repaid, in seconds.
    pub longest_excess_s: f64,
    /// Requests denied while tokens were there, in %.
    pub wrong_denials_pct: f64,
    /// The same among the first six requests of each key.
    pub wrong_first_denials_pct: f64,
    /// Decisions that the node was not sure of, in %.
    pub unsure_pct: f64,
    /// Requests that waited, in %.
    pub waited_pct: f64,
    /// The least that a node got of its fair share, in %.
    pub least_fair_share_pct: f64,
    /// Of the whole cluster.
    pub store_calls_per_second: f64,
    /// Of the whole cluster.
    pub keys_synced_per_second: f64,
    /// Keys synced in each of a key's own ticks and node with traffic on it.
    pub keys_synced_per_tick_and_node: f64,
    /// For each token that was admitted.
    pub store_calls_per_admitted: f64,
}

impl Worst {
    /// What is the worst of no runs.
    pub const NONE: Self = Self {
        admitted_vs_ideal_pct: f64::INFINITY,
        admitted_vs_ideal_most_pct: 0.0,
        worst_keys_vs_ideal_pct: f64::INFINITY,
        excess_tokens: 0.0,
        excess_pct_of_burst: 0.0,
        longest_excess_s: 0.0,
        wrong_denials_pct: 0.0,
        wrong_first_denials_pct: 0.0,
        unsure_pct: 0.0,
        waited_pct: 0.0,
        least_fair_share_pct: f64::INFINITY,
        store_calls_per_second: 0.0,
        keys_synced_per_second: 0.0,
        keys_synced_per_tick_and_node: 0.0,
        store_calls_per_admitted: 0.0,
    };

    /// A run of `seconds` on keys whose own tick is `tick_s`.
    pub fn of(outcome: &Outcome, tick_s: f64, seconds: f64) -> Self {
        let (figures, traffic) = (&outcome.figures, &outcome.traffic);
        // A second at least: a trace of one instant is no infinite rate.
        let seconds = seconds.max(1.0);
        Self {
            admitted_vs_ideal_pct: figures.admitted_vs_ideal_pct,
            admitted_vs_ideal_most_pct: figures.admitted_vs_ideal_pct,
            worst_keys_vs_ideal_pct: figures.worst_keys_vs_ideal_pct,
            excess_tokens: figures.excess_tokens,
            excess_pct_of_burst: figures.excess_pct_of_burst,
            longest_excess_s: figures.longest_excess_s,
            wrong_denials_pct: figures.wrong_denials_pct,
            wrong_first_denials_pct: figures.wrong_first_denials_pct,
            unsure_pct: figures.unsure_pct,
            waited_pct: figures.waited_pct,
            least_fair_share_pct: figures.least_fair_share_pct,
            store_calls_per_second: traffic.store_calls as f64 / seconds,
            keys_synced_per_second: traffic.keys_synced as f64 / seconds,
            keys_synced_per_tick_and_node: traffic.keys_synced_per_tick(tick_s),
            store_calls_per_admitted: traffic.store_calls as f64 / figures.admitted.max(1) as f64,
        }
    }

    /// The worse of each.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let (least, most) = (f64::min, f64::max);
        let of = |worse: fn(f64, f64) -> f64, figure: fn(&Self) -> f64| {
            worse(figure(self), figure(other))
        };
        Self {
            admitted_vs_ideal_pct: of(least, |worst| worst.admitted_vs_ideal_pct),
            admitted_vs_ideal_most_pct: of(most, |worst| worst.admitted_vs_ideal_most_pct),
            worst_keys_vs_ideal_pct: of(least, |worst| worst.worst_keys_vs_ideal_pct),
            excess_tokens: of(most, |worst| worst.excess_tokens),
            excess_pct_of_burst: of(most, |worst| worst.excess_pct_of_burst),
            longest_excess_s: of(most, |worst| worst.longest_excess_s),
            wrong_denials_pct: of(most, |worst| worst.wrong_denials_pct),
            wrong_first_denials_pct: of(most, |worst| worst.wrong_first_denials_pct),
            unsure_pct: of(most, |worst| worst.unsure_pct),
            waited_pct: of(most, |worst| worst.waited_pct),
            least_fair_share_pct: of(least, |worst| worst.least_fair_share_pct),
            store_calls_per_second: of(most, |worst| worst.store_calls_per_second),
            keys_synced_per_second: of(most, |worst| worst.keys_synced_per_second),
            keys_synced_per_tick_and_node: of(most, |worst| worst.keys_synced_per_tick_and_node),
            store_calls_per_admitted: of(most, |worst| worst.store_calls_per_admitted),
        }
    }

    /// What the ideal admitted and the nodes did not, in %.
    pub fn shortfall_pct(&self) -> f64 {
        (100.0 - self.admitted_vs_ideal_pct).max(0.0)
    }
}
