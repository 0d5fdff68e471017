//! At most so many tokens in any period, estimated: the sliding window counter.

use std::time::Duration;

use crate::quota::Quota;

/// At most `tokens` in any period, estimated from two windows: the sliding window counter.
///
/// It counts in windows like a [`FixedWindow`](crate::FixedWindow). What was spent in the window before counts for the
/// part of it that is less than a period ago, as if it had been spent evenly: after a third of this window, two thirds
/// of it, rounded down. So nothing returns at once at a window's end, and a period that lies across two windows can
/// have more than its tokens only as far as the spending before was uneven.
///
/// ```
/// use tidegate::SlidingWindow;
///
/// let api = tidegate::local(SlidingWindow::per_minute(600))?;
/// assert_eq!(api.check("user:42").remaining(), 599);
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    pub(super) quota: Quota,
}

impl SlidingWindow {
    /// `tokens` in each `period`, 100 ms at least.
    ///
    /// Nothing is checked here, so that limits can be constants: a limiter that is built with an impossible one fails
    /// with a [`ConfigError`](crate::ConfigError) that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { quota: Quota::new(tokens, period) }
    }
}
