//! Values of flags: one parser for each kind, which all commands share.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tidegate::Quota;

/// A value that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}")]
pub(crate) struct ValueError {
    expected: &'static str,
}

const fn refuse<T>(expected: &'static str) -> Result<T, ValueError> {
    Err(ValueError { expected })
}

/// A part of a whole, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct Part(pub(crate) f64);

impl Part {
    /// Without the rounding error of the multiplication.
    pub(crate) fn percent(self) -> f64 {
        (self.0 * 1e8).round() / 1e6
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.percent())
    }
}

impl FromStr for Part {
    type Err = ValueError;

    /// `5%` and `0.05` are the same. A bare 1 could be 1% or all: it is refused.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let number = |text: &str| text.trim().parse::<f64>().ok();
        let part = match text.strip_suffix('%') {
            Some(percent) => {
                number(percent).filter(|it| (0.0..=100.0).contains(it)).map(|it| it / 100.0)
            }
            None => number(text).filter(|it| (0.0..1.0).contains(it)),
        };
        match part {
            Some(part) => Ok(Self(part)),
            None => refuse("a part such as 5% or 0.05, from 0% to 100%"),
        }
    }
}

/// The most that may be admitted beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MaxExcess {
    OfBurst(Part),
    Tokens(u64),
}

impl MaxExcess {
    pub(crate) fn tokens(self, burst: u64) -> f64 {
        match self {
            Self::OfBurst(Part(part)) => burst as f64 * part,
            Self::Tokens(tokens) => tokens as f64,
        }
    }
}

impl FromStr for MaxExcess {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if let Ok(tokens) = text.parse() {
            return Ok(Self::Tokens(tokens));
        }
        match text.parse() {
            Ok(part) => Ok(Self::OfBurst(part)),
            Err(_) => refuse("a part of the burst such as 1% or 0.01, or whole tokens such as 5"),
        }
    }
}

/// Periods by the name that a rate writes and reads first.
const PERIODS: [(u64, &[&str]); 4] = [
    (1, &["s", "sec", "second"]),
    (60, &["min", "m", "minute"]),
    (3600, &["h", "hour"]),
    (86400, &["d", "day"]),
];

/// Tokens in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rate {
    pub(crate) tokens: u64,
    pub(crate) period_s: u64,
}

impl Rate {
    pub(crate) const fn of_quota(quota: &Quota) -> Self {
        Self { tokens: quota.tokens(), period_s: quota.period().as_secs() }
    }

    pub(crate) const fn quota(self) -> Quota {
        Quota::new(self.tokens, Duration::from_secs(self.period_s))
    }

    pub(crate) fn per_second(self) -> f64 {
        self.tokens as f64 / self.period_s as f64
    }

    /// That of `keys` keys together.
    pub(crate) const fn times(self, keys: u32) -> Self {
        Self { tokens: self.tokens.saturating_mul(keys as u64), ..self }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, period_s } = self;
        match PERIODS.iter().find(|(seconds, _)| seconds == period_s) {
            Some((_, names)) => write!(f, "{tokens}/{}", names[0]),
            None => write!(f, "{tokens}/{period_s}s"),
        }
    }
}

impl FromStr for Rate {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (tokens, period) = text.split_once('/').unwrap_or((text, "s"));
        let period = PERIODS.iter().find(|(_, names)| names.contains(&period));
        match (tokens.parse(), period) {
            (Ok(tokens), Some(&(period_s, _))) => Ok(Self { tokens, period_s }),
            _ => refuse("a whole number of tokens in a period: 100 or 100/s, 5/min, 100/h, 1000/d"),
        }
    }
}

/// A duration such as `50ms` or `1.5s`.
pub(crate) fn duration(text: &str) -> Result<Duration, ValueError> {
    let parsed = text.parse::<jiff::SignedDuration>().ok();
    match parsed.and_then(|parsed| Duration::try_from(parsed).ok()) {
        Some(parsed) => Ok(parsed),
        None => refuse("a duration such as 50ms, 3s or 2m"),
    }
}

/// Seconds: a number, or a duration.
pub(crate) fn seconds(text: &str) -> Result<f64, ValueError> {
    if let Ok(seconds) = text.parse() {
        return Ok(seconds);
    }
    match duration(text) {
        Ok(duration) => Ok(duration.as_secs_f64()),
        Err(_) => refuse("a number of seconds, or a duration such as 10s or 2m"),
    }
}

/// A host and a port, such as `127.0.0.1:9000`, `localhost:9000` or `[::1]:9000`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl FromStr for Address {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (host, port) = text.rsplit_once(':').unwrap_or(("", ""));
        let is_ipv6 = host.starts_with('[') && host.ends_with(']');
        let is_host = !host.is_empty() && !host.contains(['/', '@', ' ']);
        match port.parse() {
            Ok(port) if is_host && (is_ipv6 || !host.contains(':')) => {
                Ok(Self { host: host.to_owned(), port })
            }
            _ => refuse("a host and a port, such as 127.0.0.1:9000"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_and_fraction_parse_to_the_same_part() {
        for (percent, fraction) in [("5%", "0.05"), ("7%", "0.07"), ("0%", "0"), ("0.5%", "0.005")]
        {
            let part: Part = percent.parse().unwrap();
            assert_eq!(Ok(part), fraction.parse());
            assert_eq!(part.to_string(), percent);
        }
        assert_eq!("100%".parse(), Ok(Part(1.0)));
        for text in ["", "%", "one", "-1", "-1%", "101%", "1", "5", "NaN", "NaN%", "inf", "1%%"] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_excess_is_a_part_of_the_burst_or_whole_tokens() {
        let tokens = |text: &str| text.parse::<MaxExcess>().unwrap().tokens(200);
        let cases =
            [("1%", 2.0), ("0.01", 2.0), ("100%", 200.0), ("1 %", 2.0), ("5", 5.0), ("0", 0.0)];
        for (text, expected) in cases {
            assert!((tokens(text) - expected).abs() < 1e-9, "{text}");
        }
        for text in ["", "much", "-1", "200%", "1.5", "5 tokens", "NaN"] {
            assert!(text.parse::<MaxExcess>().is_err(), "{text}");
        }
    }

    #[test]
    fn rate_without_a_period_is_per_second() {
        let cases = [
            ("100", "100/s", 100.0),
            ("100/s", "100/s", 100.0),
            ("6/min", "6/min", 0.1),
            ("36/hour", "36/h", 0.01),
            ("86400/day", "86400/d", 1.0),
        ];
        for (text, name, per_second) in cases {
            let rate: Rate = text.parse().unwrap();
            assert_eq!(rate.to_string(), name);
            assert!((rate.per_second() - per_second).abs() < 1e-9, "{text}");
        }
        for text in ["", "/s", "nan", "1.5/s", "-1", "100/", "100/week", "100/s/s", "100 per s"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn seconds_are_a_number_or_a_duration() {
        assert_eq!(["1.5", "1.5s", "1500ms"].map(seconds), [Ok(1.5), Ok(1.5), Ok(1.5)]);
        assert!(seconds("soon").is_err());
        for text in ["", "5", "-1s", "1 fortnight"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["127.0.0.1:9000", "localhost:0", "[::1]:6379"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "localhost", ":9000", "a:b", "a:70000", "::1", "http://a:1", "a@b:1"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
