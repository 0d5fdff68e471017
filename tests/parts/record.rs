//! Reads a bucket's record: the layouts that docs/REDIS.md describes.

#![allow(dead_code, reason = "each test file uses some of the functions only")]

/// How many numbers follow the letters: six more where one of them is not 0, and one more of sliding windows.
const NUMBERS: [usize; 3] = [20, 26, 27];

/// The numbers of a bucket's record.
#[derive(Debug)]
pub(crate) struct Record(Vec<i64>);

impl Record {
    /// `None` for a layout that is not known here.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.strip_prefix(b"T2")?.as_chunks::<8>();
        let known = NUMBERS.contains(&numbers.len()) && rest.is_empty();
        let number = |bytes: &[u8; 8]| f64::from_le_bytes(*bytes) as i64;
        known.then(|| Self(numbers.iter().map(number).collect()))
    }

    /// In tokens.
    pub(crate) fn burst(&self) -> i64 {
        self.0[2] / self.0[1]
    }

    /// The version of the quota.
    pub(crate) fn version(&self) -> i64 {
        self.0[3]
    }

    /// Tokens charged to the bucket since it was born.
    pub(crate) fn charged(&self) -> u64 {
        u64::try_from(self.0[15]).expect("nothing is charged below zero")
    }

    /// The tokens of one central bucket by all that was charged, below zero in debt.
    pub(crate) fn level(&self) -> f64 {
        self.0[13] as f64 / self.0[1] as f64
    }

    /// What can be leased, in tokens.
    pub(crate) fn unleased(&self) -> f64 {
        self.0[14] as f64 / self.0[1] as f64
    }
    /// Until when nothing is given, since the record was lost; 0 if it never was.
    pub(crate) fn recovering_until_us(&self) -> i64 {
        self.0.get(21).copied().unwrap_or(0)
    }
}
