//! Who is limited: any bytes, and the fixed hash that puts a key into its lane.

use crate::error::CheckError;

/// The longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 512;

/// Checks that `key` can be limited: not empty, not longer than [`KEY_BYTES_MAX`].
#[inline]
pub(crate) fn validate(key: &[u8]) -> Result<(), CheckError> {
    if key.is_empty() {
        return Err(CheckError::KeyEmpty);
    }
    if key.len() > KEY_BYTES_MAX {
        return Err(CheckError::KeyTooLong { bytes: key.len(), max: KEY_BYTES_MAX });
    }
    Ok(())
}

/// The lane of `key` under `limit`, out of `lanes`.
///
/// Fixed for good, since every node must agree: 64-bit FNV-1a over the limit's name, one zero byte
/// and the key, finished with `MurmurHash3`'s 64-bit mixer, its upper half scaled to `lanes`.
pub fn lane_of(limit: &str, key: &[u8], lanes: u32) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in limit.bytes().chain([0]).chain(key.iter().copied()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    (((hash >> 32) * u64::from(lanes)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lane_hash_is_fixed_for_good() {
        let lanes: Vec<u32> = ["a", "b", "user:1", "user:2", "10.0.0.1"]
            .iter()
            .map(|key| lane_of("api", key.as_bytes(), 16))
            .collect();
        assert_eq!(lanes, LANES_OF_FIVE_KEYS);
    }

    /// Computed once by an independent Python version of the documented hash.
    const LANES_OF_FIVE_KEYS: [u32; 5] = [3, 12, 15, 5, 5];

    #[test]
    fn lanes_are_filled_evenly() {
        let mut counts = [0_u32; 16];
        for user in 0..16_000 {
            counts[lane_of("api", format!("user:{user}").as_bytes(), 16) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn empty_and_huge_keys_are_refused() {
        assert_eq!(validate(b""), Err(CheckError::KeyEmpty));
        assert!(validate(&[0; KEY_BYTES_MAX]).is_ok());
        let error = validate(&[0; KEY_BYTES_MAX + 1]).unwrap_err();
        assert_eq!(error, CheckError::KeyTooLong { bytes: 513, max: 512 });
    }
}
