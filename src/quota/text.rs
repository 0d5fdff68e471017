//! Quotas as text: `100/s burst 200`, `5/min`, `1/90s burst 5`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::Quota;
use crate::error::ConfigError;
use crate::time::micros;

/// Units of a period, in microseconds, the longest first; of each, the first name is the one that is written.
const UNITS: [(u64, &[&str]); 6] = [
    (86_400_000_000, &["d", "day", "days"]),
    (3_600_000_000, &["h", "hour", "hours"]),
    (60_000_000, &["min", "m", "minute", "minutes"]),
    (1_000_000, &["s", "sec", "second", "seconds"]),
    (1000, &["ms"]),
    (1, &["us"]),
];

const FORM: &str = "expected tokens/period, and perhaps a burst: '100/s', '5/min', '100/s burst 200', \
                    '1/90s'; units are us, ms, s, min, h, d";

/// `tokens/period`, and `burst tokens` where the burst is not one period's worth. [`FromStr`] reads it back.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Quota;
///
/// assert_eq!(Quota::per_second(100).burst(200).to_string(), "100/s burst 200");
/// assert_eq!(Quota::new(1, Duration::from_secs(90)).to_string(), "1/90s");
/// ```
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period_us = micros(self.period());
        let whole = |unit: &(u64, _)| period_us.is_multiple_of(unit.0) && period_us > 0;
        let (unit_us, names) = UNITS.into_iter().find(whole).unwrap_or(UNITS[UNITS.len() - 1]);
        write!(f, "{}/", self.tokens())?;
        if period_us != unit_us {
            write!(f, "{}", period_us / unit_us)?;
        }
        f.write_str(names[0])?;
        if self.burst_tokens() != self.tokens() {
            write!(f, " burst {}", self.burst_tokens())?;
        }
        Ok(())
    }
}

/// Reads `100/s`, `5/min`, `1/90s`, `100/s burst 200`. Units are `us`, `ms`, `s`, `min`, `h`, `d`, or their
/// English names.
///
/// ```
/// use tidegate::Quota;
///
/// assert_eq!("100/s burst 200".parse(), Ok(Quota::per_second(100).burst(200)));
/// assert_eq!("5 / minute".parse(), Ok(Quota::per_minute(5)));
/// let error = "100 per s".parse::<Quota>().unwrap_err();
/// assert!(error.to_string().starts_with("quota \"100 per s\": expected tokens/period"));
/// ```
impl FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let quota = parsed(text)
            .ok_or_else(|| ConfigError::Quota { text: text.to_owned(), reason: FORM.to_owned() })?;
        // What no quota can have is refused here, where the text is known.
        match quota.validate("quota") {
            Err(ConfigError::Limit { field, value, reason, .. }) => Err(ConfigError::Quota {
                text: text.to_owned(),
                reason: format!("{field} = {value}: {reason}"),
            }),
            Err(error) => Err(error),
            Ok(()) => Ok(quota),
        }
    }
}

fn parsed(text: &str) -> Option<Quota> {
    let (rate, burst) = match text.split_once("burst") {
        Some((rate, burst)) => (rate, Some(burst.trim().parse().ok()?)),
        None => (text, None),
    };
    let (tokens, period) = rate.split_once('/')?;
    let quota = Quota::new(tokens.trim().parse().ok()?, period_of(period)?);
    Some(burst.map_or(quota, |burst| quota.burst(burst)))
}

/// Some units, or one.
fn period_of(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (count, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let count: u64 = if count.is_empty() { 1 } else { count.parse().ok()? };
    let (unit_us, _) = UNITS.into_iter().find(|(_, names)| names.contains(&unit.trim()))?;
    Some(Duration::from_micros(count.checked_mul(unit_us)?))
}

/// Reads a time in the units of periods, such as `50ms`; it needs a number.
#[cfg(feature = "config")]
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    text.starts_with(|c: char| c.is_ascii_digit()).then(|| period_of(text)).flatten()
}

/// As text, in any format.
#[cfg(feature = "serde")]
impl serde::Serialize for Quota {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Quota {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quota::TOKENS_MAX;

    #[test]
    fn quotas_are_read_as_people_write_them() {
        let cases = [
            ("100/s", Quota::per_second(100)),
            (" 5/min ", Quota::per_minute(5)),
            ("5/m", Quota::per_minute(5)),
            ("7 / hour burst 9", Quota::per_hour(7).burst(9)),
            ("1/day", Quota::per_day(1)),
            ("1/90s", Quota::new(1, Duration::from_secs(90))),
            ("20/250ms burst 1", Quota::new(20, Duration::from_millis(250)).burst(1)),
        ];
        for (text, quota) in cases {
            assert_eq!(text.parse(), Ok(quota), "{text:?}");
        }
    }

    #[test]
    fn text_that_is_no_quota_is_named() {
        let wrong = [
            "",
            "100",
            "100/",
            "/s",
            "100/x",
            "-1/s",
            "1.5/s",
            "100/s burst",
            "100/s burst x",
            "s/100",
            "100/s 200",
            "100/sburst",
            "99999999999999999999/s",
            "1/99999999999999999d",
        ];
        for text in wrong {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            let expected = format!("quota {text:?}: expected tokens/period");
            assert!(error.starts_with(&expected), "{error}");
        }
        let impossible = [("0/s", "quota.tokens = 0"), ("1/s burst 0", "quota.burst = 0")];
        for (text, part) in impossible {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("quota {text:?}: {part}: ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn displayed_quota_parses_to_the_same_quota(
            tokens in 1..=TOKENS_MAX, period_us in 1..=31_622_400_000_000_u64, burst in 1..=TOKENS_MAX,
        ) {
            let quota = Quota::new(tokens, Duration::from_micros(period_us)).burst(burst);
            if quota.scale("x").is_ok() {
                prop_assert_eq!(quota.to_string().parse(), Ok(quota));
            }
        }
    }
}
