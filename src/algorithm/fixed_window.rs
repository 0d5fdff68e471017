//! At most so many tokens in each window of the clock: the fixed window.

use std::time::Duration;

use crate::quota::Quota;

/// At most `tokens` in each window of the clock: the fixed window.
///
/// Windows are aligned to the beginning of 1970 by the machine's clock, as it was when the limiter was built. At a
/// window's end all tokens return at once. So a key can spend twice its tokens within a moment, half of them before the
/// end and half after it; where that matters, use a [`SlidingWindow`](crate::SlidingWindow).
///
/// ```
/// use tidegate::FixedWindow;
///
/// let exports = tidegate::local(FixedWindow::per_day(20))?;
/// assert_eq!(exports.check("user:42").remaining(), 19);
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindow {
    pub(super) quota: Quota,
}

impl FixedWindow {
    /// `tokens` in each `period`, 100 ms at least.
    ///
    /// Nothing is checked here, so that limits can be constants: a limiter that is built with an impossible one fails
    /// with a [`ConfigError`](crate::ConfigError) that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { quota: Quota::new(tokens, period) }
    }
}
