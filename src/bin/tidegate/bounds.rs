//! What an operator can live with.

use std::str::FromStr;

/// A bound that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not {expected}")]
pub(crate) struct BoundError {
    value: String,
    expected: &'static str,
}

/// A part of a whole, in %, from 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Percent(pub(crate) f64);

impl FromStr for Percent {
    type Err = BoundError;

    fn from_str(text: &str) -> Result<Self, BoundError> {
        text.strip_suffix('%')
            .and_then(|number| number.trim_end().parse().ok())
            .filter(|number| (0.0..=100.0).contains(number))
            .map(Self)
            .ok_or_else(|| BoundError {
                value: text.to_owned(),
                expected: "a percentage from 0% to 100%, such as 97%",
            })
    }
}

/// The most that may be admitted above what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MaxExcess {
    OfBurst(Percent),
    Tokens(f64),
}

impl MaxExcess {
    pub(crate) fn tokens(self, burst: u64) -> f64 {
        match self {
            Self::OfBurst(Percent(percent)) => burst as f64 * percent / 100.0,
            Self::Tokens(tokens) => tokens,
        }
    }
}

impl FromStr for MaxExcess {
    type Err = BoundError;

    fn from_str(text: &str) -> Result<Self, BoundError> {
        if let Ok(percent) = text.parse() {
            return Ok(Self::OfBurst(percent));
        }
        let tokens: Option<f64> = text.parse().ok();
        tokens.filter(|tokens| tokens.is_finite() && *tokens >= 0.0).map(Self::Tokens).ok_or_else(
            || BoundError {
                value: text.to_owned(),
                expected: "a part of the burst from 0% to 100%, or a number of tokens, such as 5",
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excess_is_a_part_of_the_burst_or_a_number_of_tokens() {
        let tokens = |text: &str| text.parse::<MaxExcess>().unwrap().tokens(200);
        let cases = [("1%", 2.0), ("0.5%", 1.0), ("100%", 200.0), ("1 %", 2.0), ("5", 5.0)];
        for (text, expected) in cases {
            assert!((tokens(text) - expected).abs() < 1e-9, "{text}");
        }
        assert!(tokens("0").abs() < 1e-9);
    }

    #[test]
    fn what_is_no_bound_is_refused_by_its_value() {
        for text in ["", "%", "one", "-1", "-1%", "101%", "NaN", "NaN%", "inf", "1%%", "5 tokens"] {
            let refused = text.parse::<MaxExcess>().unwrap_err().to_string();
            assert!(refused.starts_with(&format!("{text:?} is not ")), "{refused}");
            assert!(text.parse::<Percent>().is_err(), "{text}");
        }
        assert!("0.97".parse::<Percent>().is_err(), "a part of 1 is no percentage");
        assert_eq!("97%".parse(), Ok(Percent(97.0)));
    }
}
