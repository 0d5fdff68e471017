//! What a record is known by that any process can end.

use std::fmt;
use std::str::FromStr;

/// What a record is known by that any process can end: a reservation, or a permit. Nobody guesses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RecordId(pub(crate) u128);

/// 32 hexadecimal digits.
impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A text that is no record's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be 32 hexadecimal digits")]
pub(crate) struct RecordIdError;

impl FromStr for RecordId {
    type Err = RecordIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_written_so = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_written_so.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        number.map(Self).ok_or(RecordIdError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_32_hexadecimal_digits() {
        let id = RecordId(0xab);
        assert_eq!(id.to_string(), format!("{:0>32}", "ab"));
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in ["", "ab", &format!("+{:0>31}", "ab"), &"é".repeat(16), &"g".repeat(32)] {
            assert_eq!(wrong.parse::<RecordId>(), Err(RecordIdError), "{wrong}");
        }
    }
}
