//! How the level of a key rises.

/// How a key's level rises while nobody spends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Curve {
    /// At the rate, until it is full: that of a token bucket.
    #[default]
    Refill,
    /// To the full at the end of each window.
    FixedWindow,
    /// As what was spent in the window before counts less and less.
    SlidingWindow,
    /// As each charge leaves, a window after it.
    SlidingLog,
    /// To the full at the end of each window of a calendar: nodes tell the store which window it is.
    CalendarWindow,
}

impl Curve {
    /// As records and batches have it.
    pub(crate) const fn number(self) -> i64 {
        match self {
            Self::Refill => 1,
            Self::FixedWindow => 2,
            Self::SlidingWindow => 3,
            Self::SlidingLog => 4,
            Self::CalendarWindow => 5,
        }
    }

    pub(crate) const fn of(number: i64) -> Option<Self> {
        match number {
            1 => Some(Self::Refill),
            2 => Some(Self::FixedWindow),
            3 => Some(Self::SlidingWindow),
            4 => Some(Self::SlidingLog),
            5 => Some(Self::CalendarWindow),
            _ => None,
        }
    }
}
