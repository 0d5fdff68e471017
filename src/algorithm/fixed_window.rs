//! At most so many tokens in each window of the clock: the fixed window.

use std::time::Duration;

use super::calendar::{Calendar, MONTH};
use super::window::WindowRule;
use crate::error::ConfigError;
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
    zone: Option<&'static str>,
    is_month: bool,
}

impl FixedWindow {
    /// `tokens` in each `period`, 100 ms at least.
    ///
    /// Nothing is checked here, so that limits can be constants: a limiter that is built with an impossible one fails
    /// with a [`ConfigError`](crate::ConfigError) that names the field.
    pub const fn new(tokens: u64, period: Duration) -> Self {
        Self { quota: Quota::new(tokens, period), zone: None, is_month: false }
    }

    /// `tokens` in each month of the calendar, whose zone has to be [set](Self::zone). As a rate, and in reports, a month
    /// counts for 30 days.
    ///
    /// ```
    /// # #[cfg(feature = "calendar")] {
    /// use tidegate::FixedWindow;
    ///
    /// let bill = tidegate::local(FixedWindow::per_month(1_000_000).zone("Europe/Berlin"))?;
    /// assert!(bill.check("customer").is_allowed());
    /// # }
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub const fn per_month(tokens: u64) -> Self {
        Self { quota: Quota::new(tokens, MONTH), zone: None, is_month: true }
    }

    /// Whether the windows are months of a calendar.
    pub const fn is_month(&self) -> bool {
        self.is_month
    }

    /// The time zone whose hours, days or months the windows are, if it is [set](Self::zone).
    pub const fn zone_name(&self) -> Option<&'static str> {
        self.zone
    }

    /// The windows are hours, days or months of a time zone, such as `Europe/Berlin`, by the IANA database that is built in
    /// with the feature `calendar`. All nodes should have the same version of it. Building a limit with another
    /// period, with an unknown zone or without the feature fails with [`ConfigError::Limit`](crate::ConfigError::Limit).
    ///
    /// A window begins at the first instant whose local time has reached it. So a day lasts 23 to 25 hours where the clock is
    /// changed, an hour that comes twice is one window, and a clock that is set back does not begin a window again.
    #[must_use]
    pub const fn zone(self, zone: &'static str) -> Self {
        Self { zone: Some(zone), ..self }
    }

    pub(crate) fn rule(&self, limit: &str) -> Result<WindowRule, ConfigError> {
        let rule = WindowRule::new(limit, self.quota, false)?;
        match self.zone {
            Some(zone) => {
                let calendar = Calendar::new(limit, &self.quota, zone, self.is_month)?;
                Ok(WindowRule { period_us: calendar.period_us(), calendar: Some(calendar), ..rule })
            }
            None if self.is_month => Err(ConfigError::Limit {
                limit: limit.to_owned(),
                field: "window.zone",
                value: "none, with a month".to_owned(),
                reason: "a month is one of a zone: call zone(\"Europe/Berlin\"), or zone(\"UTC\")",
            }),
            None => Ok(rule),
        }
    }
}
