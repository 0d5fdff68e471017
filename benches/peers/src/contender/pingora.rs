//! `pingora-limits`: an estimate of how often each key was asked for in a fixed window.
//!
//! It is no token bucket. Keys are not kept: a count-min sketch counts them, so that keys that
//! share all their cells count for each other. It is given as many columns as there are keys (1024
//! at least, its default): with fewer it would estimate the crowd, not the key. A denied request
//! counts like an admitted one.

use std::time::Duration;

use pingora_limits::rate::Rate;

use super::{Contender, by_name};
use crate::case::Case;

/// Rows of the sketch, the crate's default.
const HASHES: usize = 4;
/// Columns of the sketch by default.
const SLOTS_MIN: usize = 1024;

pub fn new(case: &Case) -> Box<dyn Contender> {
    let (window, limit) = if case.denied {
        (Duration::from_secs(3600), 100)
    } else {
        (Duration::from_secs(1), 1_000_000_000)
    };
    let rate = Rate::new_with_estimator_config(window, HASHES, case.keys.max(SLOTS_MIN));
    by_name("pingora-limits (estimate)", case, move |name| rate.observe(name, 1) > limit)
}
