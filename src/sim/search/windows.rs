//! Cases of limits by windows and logs.

use super::*;
use crate::algorithm::{FixedWindow, Rule, SlidingLog, SlidingWindow};

/// A limit by random windows.
pub(super) fn random_windows(rng: &mut fastrand::Rng) -> Limit {
    loop {
        let period = Duration::from_micros(scaled(rng, 1e5, 6e7) as u64);
        let tokens = scaled(rng, 1.0, 1e5) as u64;
        let rule: Rule = match rng.u8(0..3) {
            0 => FixedWindow::new(tokens, period).into(),
            1 => SlidingWindow::new(tokens, period).into(),
            _ => SlidingLog::new(tokens, period).into(),
        };
        let limit = Limit::new("search", rule)
            .sync_interval(Duration::from_secs_f64(scaled(rng, 0.005, 1.0)))
            .credit(rng.u32(0..=4))
            .outage(if rng.bool() { OutagePolicy::Closed } else { OutagePolicy::Share });
        if limit.validate_hybrid(DEFAULT_MAX_NODES).is_ok() {
            return limit;
        }
    }
}

/// A case of one such limit. Windows are judged by the time that the store's clock began with, though it may step.
fn windows(seed: u64, faulty: bool) -> Case {
    let mut case = Case::random(seed, faulty);
    let mut rng = fastrand::Rng::with_seed(!seed);
    case.setup.limit = random_windows(&mut rng);
    case.until_us = case.until_us.min(30_000_000);
    case.arrivals = random_arrivals(&mut rng, &case.setup, case.until_us);
    for planned in &mut case.faults {
        planned.at_us %= case.until_us;
    }
    case
}

#[test]
fn windows_without_faults_admit_at_most_the_credit_of_all_nodes_in_excess() {
    assert_holds("windows, no faults", |seed| windows(seed, false));
}

#[test]
fn windows_keep_their_bound_whatever_goes_wrong() {
    assert_holds("windows, faults", |seed| windows(seed, true));
}
