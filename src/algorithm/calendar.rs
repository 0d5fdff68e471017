//! Hours, days and months of a time zone, as windows.
//!
//! A window begins at the first instant whose local time has reached it, and lasts until the next one begins. So a clock
//! that is set back does not open a window again, and what the zone's clock skips is no window.
//!
//! Rules of windows know one length. So keys live in *calendar time*, which jumps where a window begins, so that each
//! window ends at a multiple of one period, longer than any window. From there to its end both times pass alike, so what is
//! computed to a window's end is true.

use std::fmt;
use std::time::Duration;

use crate::error::ConfigError;
use crate::quota::Quota;

/// Microseconds.
const SECOND: u64 = 1_000_000;
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// What a month counts for in reports, and where a rate is needed.
pub(super) const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
/// How many windows a store is told of.
const TOLD: usize = 3;

/// How long windows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Hour,
    Day,
    Month,
}

impl Unit {
    fn of(quota: &Quota, is_month: bool) -> Option<Self> {
        match quota.period() {
            _ if is_month => Some(Self::Month),
            HOUR => Some(Self::Hour),
            DAY => Some(Self::Day),
            _ => None,
        }
    }

    /// The length of a window in calendar time: no zone's are longer, since clocks are set back by up to three hours or, at
    /// the date line, a day. The number of a window times this stays below 2^53 until 2061.
    pub(super) const fn period_us(self) -> u64 {
        SECOND
            * 3600
            * match self {
                Self::Hour => 4,
                Self::Day => 50,
                Self::Month => 33 * 24,
            }
    }
}

/// The windows of a zone. There is one for each zone and unit, for as long as the process lives.
pub(crate) struct Calendar {
    unit: Unit,
    #[cfg_attr(
        not(feature = "calendar"),
        allow(dead_code, reason = "there is none without the feature")
    )]
    zone: &'static str,
    #[cfg(feature = "calendar")]
    zones: zones::Zone,
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.unit, self.zone)
    }
}

impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        (self.unit, self.zone) == (other.unit, other.zone)
    }
}

impl Eq for Calendar {}

impl std::hash::Hash for Calendar {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.unit, self.zone).hash(state);
    }
}

/// A window, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    number: u64,
    /// In microseconds since 1970.
    begins_us: u64,
    ends_us: u64,
}

/// Some windows in a row, for a store that has no zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    period_us: u64,
    windows: [Window; TOLD],
}

impl Window {
    fn calendar_us(&self, period_us: u64, unix_us: u64) -> u64 {
        let left_us = self.ends_us.saturating_sub(unix_us).clamp(1, period_us);
        (self.number + 1) * period_us - left_us
    }
}

impl Windows {
    /// Of each window its number, and when it begins and ends, in microseconds since 1970.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.windows.iter().flat_map(|one| [one.number, one.begins_us, one.ends_us])
    }

    /// Calendar time at a time since 1970 that is in one of these windows.
    pub(crate) fn calendar_us(&self, unix_us: u64) -> Option<u64> {
        let is_in = |one: &&Window| (one.begins_us..one.ends_us).contains(&unix_us);
        let window = self.windows.iter().find(is_in)?;
        Some(window.calendar_us(self.period_us, unix_us))
    }

    /// The time since 1970 at a time of the calendar, which is in one of these windows, or else at the end of the last.
    pub(crate) fn unix_us(&self, calendar_us: u64) -> u64 {
        let number = calendar_us / self.period_us;
        let window = self.windows.iter().rev().find(|one| one.number <= number);
        let window = window.unwrap_or(&self.windows[0]);
        let left_us =
            (window.number + 1).saturating_mul(self.period_us).saturating_sub(calendar_us);
        window.ends_us.saturating_sub(left_us)
    }
}

impl Calendar {
    /// The windows of `zone` that such a quota is given for.
    pub(super) fn new(
        limit: &str,
        quota: &Quota,
        zone: &'static str,
        is_month: bool,
    ) -> Result<&'static Self, ConfigError> {
        let invalid = |field, value, reason| {
            Err(ConfigError::Limit { limit: limit.to_owned(), field, value, reason })
        };
        let Some(unit) = Unit::of(quota, is_month) else {
            let value = format!("{:?}, with the zone {zone}", quota.period());
            let reason = "windows of a zone are hours, days or months";
            return invalid("window.period", value, reason);
        };
        #[cfg(feature = "calendar")]
        return match zones::calendar(unit, zone) {
            Some(calendar) => Ok(calendar),
            None => invalid("window.zone", format!("{zone:?}"), "is no zone of the IANA database"),
        };
        #[cfg(not(feature = "calendar"))]
        {
            let value = format!("{zone:?} ({unit:?})");
            invalid("window.zone", value, "needs the feature `calendar`")
        }
    }

    pub(super) fn period_us(&self) -> u64 {
        self.unit.period_us()
    }

    /// Calendar time, in microseconds.
    #[cold]
    pub(crate) fn calendar_us(&self, unix_us: u64) -> u64 {
        self.at(unix_us).calendar_us(self.period_us(), unix_us)
    }

    /// When the window of a time begins and ends, in microseconds since 1970.
    pub(crate) fn window_span_us(&self, unix_us: u64) -> [u64; 2] {
        let Window { begins_us, ends_us, .. } = self.at(unix_us);
        [begins_us, ends_us]
    }

    /// The window of a time, with the one before it and the next.
    pub(crate) fn around(&self, unix_us: u64) -> Windows {
        Windows { period_us: self.period_us(), windows: self.windows(unix_us) }
    }

    fn at(&self, unix_us: u64) -> Window {
        self.windows(unix_us)[1]
    }

    #[cfg(feature = "calendar")]
    fn windows(&self, unix_us: u64) -> [Window; TOLD] {
        self.zones.around(self.unit, unix_us)
    }

    /// There is no calendar without the feature.
    #[cfg(not(feature = "calendar"))]
    #[allow(clippy::unused_self, reason = "with the feature it is needed")]
    fn windows(&self, _: u64) -> [Window; TOLD] {
        [Window { number: 0, begins_us: 0, ends_us: u64::MAX }; TOLD]
    }
}

#[cfg(feature = "calendar")]
mod zones {
    use std::sync::{Mutex, PoisonError};

    use arc_swap::ArcSwap;
    use jiff::civil::{Date, DateTime, Time, date};
    use jiff::tz::{AmbiguousOffset, TimeZone, TimeZoneDatabase};
    use jiff::{Span, Timestamp};

    use super::{Calendar, TOLD, Unit, Window};

    /// All calendars that the process ever had.
    static CALENDARS: Mutex<Vec<&'static Calendar>> = Mutex::new(Vec::new());
    /// Windows are numbered from here on: those before are one.
    const FIRST: Date = date(1990, 1, 1);
    /// The last year whose windows are told apart.
    const YEAR_MAX: i16 = 9000;

    /// A zone, and the window that was asked for last.
    pub(super) struct Zone {
        zone: TimeZone,
        /// With its neighbours.
        last: ArcSwap<[Window; TOLD]>,
    }

    /// `None` if there is no such zone.
    pub(super) fn calendar(unit: Unit, zone: &'static str) -> Option<&'static Calendar> {
        let mut calendars = CALENDARS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = calendars.iter().find(|one| (one.unit, one.zone) == (unit, zone)) {
            return Some(known);
        }
        let found = TimeZoneDatabase::bundled().get(zone).ok()?;
        let none = Window { number: 0, begins_us: 0, ends_us: 0 };
        let zones = Zone { zone: found, last: ArcSwap::from_pointee([none; TOLD]) };
        let calendar: &'static Calendar = Box::leak(Box::new(Calendar { unit, zone, zones }));
        calendars.push(calendar);
        Some(calendar)
    }

    impl Zone {
        /// The window of a time in microseconds since 1970, with the one before it and the next.
        ///
        /// Cost: a look at the last ones, as long as that window lasts.
        pub(super) fn around(&self, unit: Unit, unix_us: u64) -> [Window; TOLD] {
            let last = **self.last.load();
            if (last[1].begins_us..last[1].ends_us).contains(&unix_us) {
                return last;
            }
            let now = self.find(unit, unix_us);
            let before = self.find(unit, now.begins_us.saturating_sub(1));
            let windows = [before, now, self.find(unit, now.ends_us)];
            self.last.store(std::sync::Arc::new(windows));
            windows
        }

        fn find(&self, unit: Unit, unix_us: u64) -> Window {
            let now = Timestamp::from_microsecond(unix_us.min(i64::MAX as u64) as i64);
            let now = now.unwrap_or(Timestamp::MAX);
            let mut begin = unit.begin(self.zone.to_datetime(now));
            if begin.year() > YEAR_MAX {
                begin = DateTime::from_parts(date(YEAR_MAX, 1, 1), Time::midnight());
            }
            // After the clock was set back, the latest window that has begun counts.
            let mut next = unit.next(begin);
            while next.year() <= YEAR_MAX && self.reached(next) <= now {
                (begin, next) = (next, unit.next(next));
            }
            let [begins_us, ends_us] = [begin, next].map(|local| micros(self.reached(local)));
            Window { number: unit.number(begin), begins_us, ends_us }
        }

        /// The first instant whose local time is `local` or later.
        fn reached(&self, local: DateTime) -> Timestamp {
            let ambiguous = self.zone.to_ambiguous_timestamp(local);
            match ambiguous.offset() {
                AmbiguousOffset::Gap { after, .. } => {
                    // The zone's clock skips it: all that is skipped is reached at once.
                    let early = after.to_timestamp(local).unwrap_or(Timestamp::MIN);
                    let change = self.zone.following(early).next();
                    change.map_or(early, |change| change.timestamp())
                }
                _ => ambiguous.earlier().unwrap_or(Timestamp::MAX),
            }
        }
    }

    fn micros(at: Timestamp) -> u64 {
        at.as_microsecond().max(0) as u64
    }

    impl Unit {
        /// When the window of a local time begins.
        fn begin(self, local: DateTime) -> DateTime {
            let midnight = DateTime::from_parts(local.date(), Time::midnight());
            match self {
                Self::Hour => local.date().at(local.hour(), 0, 0, 0),
                Self::Day => midnight,
                Self::Month => local.date().first_of_month().at(0, 0, 0, 0),
            }
        }

        /// When the window after the one that begins so does.
        fn next(self, begin: DateTime) -> DateTime {
            let length = match self {
                Self::Hour => Span::new().hours(1),
                Self::Day => Span::new().days(1),
                Self::Month => Span::new().months(1),
            };
            begin.checked_add(length).unwrap_or(DateTime::MAX)
        }

        /// How many windows began between the beginning of 1990 and this one, if each that can be had its time.
        fn number(self, begin: DateTime) -> u64 {
            let days = (begin.date() - FIRST).get_days();
            let months = (i32::from(begin.year()) - 1990) * 12 + i32::from(begin.month()) - 1;
            let number = match self {
                Self::Hour => days * 24 + i32::from(begin.hour()),
                Self::Day => days,
                Self::Month => months,
            };
            number.max(0) as u64
        }
    }
}

#[cfg(all(test, feature = "calendar"))]
#[allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
mod tests {
    use jiff::civil::DateTime;
    use jiff::tz::{TimeZone, TimeZoneDatabase};
    use jiff::{Timestamp, ToSpan};

    use super::*;

    fn calendar(zone: &'static str, unit: Unit) -> &'static Calendar {
        zones::calendar(unit, zone).unwrap()
    }

    fn micros(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_microsecond() as u64
    }

    /// When the window of a time begins and ends.
    fn window(zone: &'static str, unit: Unit, at: &str) -> [String; 2] {
        let Window { begins_us, ends_us, .. } = calendar(zone, unit).at(micros(at));
        [begins_us, ends_us].map(|us| Timestamp::from_microsecond(us as i64).unwrap().to_string())
    }

    #[test]
    fn days_of_changing_clocks_begin_and_end_where_the_local_date_is_reached() {
        for (zone, at, begins, ends) in [
            // 23 and 25 hours.
            ("Europe/Berlin", "2026-03-29T12:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"),
            ("Europe/Berlin", "2026-10-25T12:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"),
            // Midnight is missing: the day begins at one.
            (
                "America/Sao_Paulo",
                "2018-11-04T12:00Z",
                "2018-11-04T03:00:00Z",
                "2018-11-05T02:00:00Z",
            ),
            // Midnight comes twice.
            ("America/Havana", "2024-11-03T04:30Z", "2024-11-03T04:00:00Z", "2024-11-04T05:00:00Z"),
            ("America/Havana", "2024-11-03T05:30Z", "2024-11-03T04:00:00Z", "2024-11-04T05:00:00Z"),
            // A minute after the day began the clock shows the day before.
            (
                "America/St_Johns",
                "2010-11-07T02:45Z",
                "2010-11-07T02:30:00Z",
                "2010-11-08T03:30:00Z",
            ),
            // There was no 30th.
            ("Pacific/Apia", "2011-12-30T11:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"),
            ("Pacific/Apia", "2011-12-30T09:00Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z"),
        ] {
            assert_eq!(window(zone, Unit::Day, at), [begins, ends], "{zone}, {at}");
        }
        let hour = window("Europe/Berlin", Unit::Hour, "2026-10-25T01:30Z");
        assert_eq!(hour, ["2026-10-25T00:00:00Z", "2026-10-25T02:00:00Z"], "it comes twice");
        // The clock is set back by three hours: the longest hour.
        let hour = window("Antarctica/Casey", Unit::Hour, "2023-03-08T18:30Z");
        assert_eq!(hour, ["2023-03-08T15:00:00Z", "2023-03-08T19:00:00Z"]);
        let month = window("Europe/Berlin", Unit::Month, "2026-03-31T21:59:59Z");
        assert_eq!(month, ["2026-02-28T23:00:00Z", "2026-03-31T22:00:00Z"]);
    }

    /// The window is that of the latest local time that there was so far: asked minute by minute.
    #[test]
    fn windows_are_those_of_the_latest_local_time_so_far() {
        let cases = [
            ("America/St_Johns", "2010-10-30T00:00Z", 15),
            ("Pacific/Apia", "2011-12-25T00:00Z", 10),
            ("Australia/Lord_Howe", "2026-03-30T00:00Z", 10),
            ("Australia/Lord_Howe", "2026-09-28T00:00Z", 10),
            ("America/Havana", "2024-10-30T00:00Z", 10),
            ("Asia/Kathmandu", "2026-03-30T00:00Z", 5),
            ("UTC", "2026-02-27T00:00Z", 5),
        ];
        for (zone, from, days) in cases {
            let local_zone: TimeZone = TimeZoneDatabase::bundled().get(zone).unwrap();
            let from: Timestamp = from.parse().unwrap();
            let (mut latest, mut numbers) = (DateTime::MIN, [0; 3]);
            for minute in 0..days * 24 * 60 {
                let at = from + minute.minutes();
                latest = latest.max(local_zone.to_datetime(at));
                let us = at.as_microsecond() as u64;
                for (place, unit) in [Unit::Hour, Unit::Day, Unit::Month].into_iter().enumerate() {
                    let window = calendar(zone, unit).at(us);
                    let begun = |at_us: u64| {
                        let at = Timestamp::from_microsecond(at_us as i64).unwrap();
                        local_zone.to_datetime(at)
                    };
                    assert!((window.begins_us..window.ends_us).contains(&us), "{zone}, {at}");
                    // Nobody has seen the zone's clock later than the end.
                    assert!(latest < begun(window.ends_us), "{zone}, {unit:?}, {at}: {window:?}");
                    assert!(window.number >= numbers[place], "{zone}, {unit:?}, {at}");
                    let expected = match unit {
                        Unit::Hour => latest.date().at(latest.hour(), 0, 0, 0),
                        Unit::Day => latest.date().at(0, 0, 0, 0),
                        Unit::Month => latest.date().first_of_month().at(0, 0, 0, 0),
                    };
                    assert!(begun(window.begins_us) >= expected, "{zone}, {unit:?}, {at}");
                    numbers[place] = window.number;
                }
            }
        }
    }

    #[test]
    fn calendar_time_passes_as_time_does_and_each_windows_end_is_a_multiple_of_its_period() {
        for (zone, unit) in
            [("Europe/Berlin", Unit::Hour), ("Pacific/Apia", Unit::Day), ("UTC", Unit::Month)]
        {
            let calendar = calendar(zone, unit);
            let (mut at, mut last) = (micros("2011-10-01T00:00Z"), 0);
            for _ in 0..400 {
                let windows = calendar.around(at);
                let [before, now, next] = windows.windows;
                assert!(before.ends_us == now.begins_us && now.ends_us == next.begins_us);
                assert!(now.ends_us - now.begins_us <= unit.period_us(), "{now:?}");
                for us in [now.begins_us, at, now.ends_us - 1] {
                    let calendar_us = calendar.calendar_us(us);
                    let left = unit.period_us() - calendar_us % unit.period_us();
                    assert_eq!(left, now.ends_us - us);
                    assert_eq!(windows.calendar_us(us), Some(calendar_us));
                    assert_eq!(windows.unix_us(calendar_us), us);
                    assert!(calendar_us >= last);
                    last = calendar_us;
                }
                at = now.ends_us + unit.period_us() / 100;
            }
        }
    }
}
