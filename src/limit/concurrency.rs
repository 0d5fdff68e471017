//! A named number of permits: how many may be in flight at one time, for each key.

use std::sync::Arc;
use std::time::Duration;

use super::{
    DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING, MAX_WAIT_EXACT, NAME_REASON, OutagePolicy, is_valid_name,
};
use crate::error::ConfigError;
use crate::time::micros;

/// The most permits that a concurrency limit can have for one key.
pub const PERMITS_MAX: u32 = 1_000_000;

/// A named concurrency limit: at most `max` permits of each key are held at one time, over all nodes.
///
/// ```
/// use tidegate::{Concurrency, Limiter};
///
/// let limiter = Limiter::builder()
///     .concurrency(Concurrency::new("jobs", 10).max_waiting(100))
///     .build()?;
/// assert_eq!(limiter.concurrency("jobs")?.max(), 10);
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Concurrency {
    pub(crate) name: String,
    pub(crate) max: u32,
    pub(crate) outage: OutagePolicy,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: u32,
    pub(crate) is_local: bool,
}

/// The numbers of a concurrency limit on this node, all of them validated.
#[derive(Clone, Debug)]
pub(crate) struct PermitTerms {
    pub(crate) name: Arc<str>,
    pub(crate) max: u32,
    /// This node's part in an outage.
    pub(crate) share: u32,
    /// Nodes that the share is computed from.
    pub(crate) nodes: u32,
    pub(crate) outage: OutagePolicy,
    pub(crate) max_wait_us: u64,
    pub(crate) max_waiting: u32,
    pub(crate) max_keys: usize,
    /// Whether other nodes hold permits too.
    pub(crate) is_shared: bool,
}

impl Concurrency {
    /// A limit of `max` permits for each key, 1 to [`PERMITS_MAX`].
    pub fn new(name: impl Into<String>, max: u32) -> Self {
        Self {
            name: name.into(),
            max,
            outage: OutagePolicy::default(),
            max_wait: DEFAULT_MAX_WAIT,
            max_waiting: DEFAULT_MAX_WAITING,
            is_local: false,
        }
    }

    /// What happens while the store is away, once what it let this node hold has ended (two seconds after the last message that
    /// it answered). Permits that are held stay with their holders.
    ///
    /// With [`Share`](OutagePolicy::Share) this node has `max / nodes` permits in use at most, one at least; with
    /// [`Open`](OutagePolicy::Open) each request gets one; with [`Closed`](OutagePolicy::Closed) none does.
    #[must_use]
    pub fn outage(mut self, policy: OutagePolicy) -> Self {
        self.outage = policy;
        self
    }

    /// How long a caller waits for the store at most ([`DEFAULT_MAX_WAIT`]): above 0, and at most [`MAX_WAIT_EXACT`].
    #[must_use]
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.max_wait = wait;
        self
    }

    /// How many callers of [`acquire_within`](crate::ConcurrencyLimit::acquire_within) may wait at a time on this node, over
    /// all keys ([`DEFAULT_MAX_WAITING`]). Others are denied at once.
    #[must_use]
    pub fn max_waiting(mut self, callers: u32) -> Self {
        self.max_waiting = callers;
        self
    }

    /// Each node keeps the limit alone: it has `max` permits of its own.
    #[must_use]
    pub fn local(mut self) -> Self {
        self.is_local = true;
        self
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The most permits of a key.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// Checks everything once. `nodes` share the limit in an outage; no node has more than `max_keys` keys in use.
    pub(crate) fn validate(
        &self,
        is_alone: bool,
        nodes: u32,
        max_keys: usize,
    ) -> Result<PermitTerms, ConfigError> {
        let invalid = |field, value, reason| {
            Err(ConfigError::Limit { limit: self.name.clone(), field, value, reason })
        };
        if !is_valid_name(&self.name) {
            return invalid("name", self.name.clone(), NAME_REASON);
        }
        if !(1..=PERMITS_MAX).contains(&self.max) {
            return invalid("max", self.max.to_string(), "must be 1 to 1000000 permits");
        }
        if self.outage == OutagePolicy::LastRate {
            let reason = "permits have no rate that could go on: choose Share, Open or Closed";
            return invalid("outage", "LastRate".to_owned(), reason);
        }
        if self.max_wait.is_zero() || self.max_wait > MAX_WAIT_EXACT {
            let reason = "callers wait for the store: must be above 0, and at most 10 s";
            return invalid("max_wait", format!("{:?}", self.max_wait), reason);
        }
        Ok(PermitTerms {
            name: self.name.as_str().into(),
            max: self.max,
            share: (self.max / nodes.max(1)).max(1),
            nodes,
            outage: self.outage,
            max_wait_us: micros(self.max_wait),
            max_waiting: self.max_waiting,
            max_keys,
            is_shared: !is_alone && !self.is_local,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrency_limit_that_cannot_be_kept_names_field_and_value() {
        let jobs = || Concurrency::new("jobs", 10);
        let cases = [
            (Concurrency::new("", 1), "name", ""),
            (Concurrency::new("a:b", 1), "name", "a:b"),
            (Concurrency::new("jobs", 0), "max", "0"),
            (Concurrency::new("jobs", 1_000_001), "max", "1000001"),
            (jobs().outage(OutagePolicy::LastRate), "outage", "LastRate"),
            (jobs().max_wait(Duration::ZERO), "max_wait", "0ns"),
            (jobs().max_wait(Duration::from_secs(11)), "max_wait", "11s"),
        ];
        for (limit, expected, wrong) in cases {
            let error = limit.validate(false, 16, 1).unwrap_err();
            let ConfigError::Limit { field, value, .. } = &error else { panic!("{error}") };
            assert_eq!((*field, &**value), (expected, wrong), "{error}");
        }
    }

    #[test]
    fn share_is_an_even_part_and_one_permit_at_least() {
        let share =
            |max, nodes| Concurrency::new("jobs", max).validate(false, nodes, 1).unwrap().share;
        assert_eq!([share(10, 4), share(10, 16), share(10, 1)], [2, 1, 10]);
    }
}
