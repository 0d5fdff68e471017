//! A request before it is decided, and the seeds of the streams that requests come in.

use serde::{Deserialize, Serialize};

/// A request, before it is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// When it comes, in microseconds since the run's start.
    pub at_us: u64,
    /// The node it comes to, from 0.
    pub node: u16,
    /// The key it is charged to, from 0.
    pub key: u32,
    /// What it costs, in tokens.
    pub cost: u32,
}

/// A seed for one stream out of many: `SplitMix64` (Steele, Lea and Flood 2014), because streams of
/// a generator that is seeded with neighbouring numbers are alike at first. fastrand has no hash of
/// two numbers; another one would change every figure that a seed repeats.
pub(super) fn seed_of(seed: u64, stream: u64) -> u64 {
    let mut mixed = seed.wrapping_add((stream + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
