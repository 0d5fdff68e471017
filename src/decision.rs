//! The answer to a request.

use std::time::Duration;

use crate::quota::Scale;

/// Whether a request may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// Go on now.
    Allowed,
    /// Go on after waiting so long (paced limits).
    AllowedAfter(Duration),
    /// Do not go on.
    Denied,
}

/// What a limit said about one request, and what it knew when it said so.
///
/// A small `Copy` value; the times are computed when asked for.
#[derive(Clone, Copy, Debug)]
#[must_use = "a decision that nobody looks at limits nothing"]
pub struct Decision {
    pub(crate) outcome: Outcome,
    pub(crate) sure: bool,
    pub(crate) cost: u32,
    /// Tokens left in the node's own bucket and, as last seen, in the store.
    pub(crate) left: u64,
    /// Units that have flowed into the bucket and are not counted in `left`.
    pub(crate) earned: u64,
    /// Microseconds until `cost` tokens are expected, when denied.
    pub(crate) retry_after_us: u64,
    /// Age of the last word from the store about this key, if there was one, in milliseconds.
    pub(crate) view_age_ms: Option<u32>,
    pub(crate) scale: Scale,
}

impl Decision {
    /// Whether the request may go on, perhaps after a delay.
    pub fn is_allowed(&self) -> bool {
        !self.is_denied()
    }

    /// Whether the request is denied.
    pub fn is_denied(&self) -> bool {
        self.outcome == Outcome::Denied
    }

    /// The outcome, with its delay if there is one.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The limit's burst: the most tokens a key can have, in tokens.
    pub fn limit(&self) -> u64 {
        (self.scale.burst / self.scale.token) as u64
    }

    /// Tokens that the key is believed to have left in the whole cluster after this decision.
    /// A hint from this node's view: the next decision may still differ.
    pub fn remaining(&self) -> u64 {
        let earned = self.earned / self.scale.token as u64;
        self.left.saturating_add(earned).min(self.limit())
    }

    /// How long to wait before the same request has a chance; zero when it was allowed.
    pub fn retry_after(&self) -> Duration {
        Duration::from_micros(self.retry_after_us)
    }

    /// How long until the key's bucket is full again, if nobody spends on it.
    pub fn reset_after(&self) -> Duration {
        let missing = self.limit().saturating_sub(self.remaining()) as i64;
        Duration::from_micros(self.scale.micros_for(missing * self.scale.token))
    }

    /// Whether the answer is backed by tokens that this node holds, or is surely no. An unsure
    /// answer was given on credit, from an old view, or by an outage policy.
    pub fn is_sure(&self) -> bool {
        self.sure
    }

    /// How old this node's last word from the store about the key is; `None` when the store never
    /// spoke of it (a `local` limit, or a new key).
    pub fn view_age(&self) -> Option<Duration> {
        self.view_age_ms.map(|millis| Duration::from_millis(millis.into()))
    }

    /// The tokens asked for.
    pub fn cost(&self) -> u32 {
        self.cost
    }
}
