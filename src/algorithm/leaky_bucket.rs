//! The leaky bucket with a queue: requests go on one by one, evenly spaced.

use std::time::Duration;

use super::turn::TurnRule;
use crate::error::ConfigError;
use crate::quota::{PERIOD_MAX, Quota};
use crate::time::micros;

/// Requests one after the other, at an even pace: the leaky bucket as a queue.
///
/// A key has a slot every `period / tokens`. A request takes the next free slot; one of `n` tokens takes `n`. Nothing is
/// saved up: a key that was quiet has one request at once. [`check`](crate::ActiveLimit::check) allows a request only
/// if its slot is now. [`schedule`](crate::ActiveLimit::schedule) and
/// [`until_ready`](crate::ActiveLimit::until_ready) take slots ahead, as far as the [`queue`](Self::queue) reaches.
///
/// Nodes that share one ask the store for slots, which are of one grid: docs/CHOOSING.md has what that admits and costs.
///
/// ```
/// use std::time::Duration;
/// use tidegate::LeakyBucket;
///
/// let mail = tidegate::local(LeakyBucket::per_second(10).queue(Duration::from_secs(2)))?;
/// assert!(mail.check("host").is_allowed());
/// assert!(mail.check("host").is_denied());
/// let next = mail.schedule("host");
/// assert!(next.is_allowed() && next.delay() <= Duration::from_millis(100));
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeakyBucket {
    pub(super) quota: Quota,
    queue: Duration,
}

impl LeakyBucket {
    /// `tokens` slots per `period`, and no queue.
    ///
    /// Nothing is checked here, so that limits can be constants: a limiter that is built with an impossible one fails
    /// with a [`ConfigError`] that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { quota: Quota::new(tokens, period).burst(1), queue: Duration::ZERO }
    }

    /// How long a request may wait for its slot at most.
    #[must_use]
    pub const fn queue(self, longest_wait: Duration) -> Self {
        Self { queue: longest_wait, ..self }
    }

    /// The longest wait for a slot.
    pub const fn longest_wait(&self) -> Duration {
        self.queue
    }

    pub(super) fn rule(&self, limit: &str, shares_state: bool) -> Result<TurnRule, ConfigError> {
        let scale = self.quota.local_scale(limit, shares_state)?;
        if self.queue > PERIOD_MAX {
            return Err(ConfigError::Limit {
                limit: limit.to_owned(),
                field: "queue",
                value: format!("{:?}", self.queue),
                reason: "must be at most 366 days",
            });
        }
        Ok(TurnRule::LeakyBucket { scale, queue: micros(self.queue) * scale.rate as u64 })
    }

    /// The highest cost, in tokens: that of a request whose slots last as long as a period may.
    pub(super) fn cost_max(&self) -> u32 {
        let most = PERIOD_MAX.as_micros() * u128::from(self.quota.tokens())
            / self.quota.period().as_micros().max(1);
        most.min(u32::MAX.into()) as u32
    }
}
