//! Reads a bucket's record: the layouts that docs/REDIS.md describes.

#![allow(dead_code, reason = "each test file uses some of the functions only")]

/// Tokens charged to a bucket since it was born; `None` for a layout that is not known here.
pub(crate) fn charged(record: &[u8]) -> Option<u64> {
    let (numbers, rest) = record.strip_prefix(b"T2")?.as_chunks::<8>();
    let charged = ([20, 24].contains(&numbers.len()) && rest.is_empty()).then(|| numbers[15])?;
    Some(f64::from_le_bytes(charged) as u64)
}
