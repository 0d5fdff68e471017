//! One run: a world, a load, what goes wrong, and what came of it.

use super::faults::{self, Planned};
use super::outcome::Outcome;
use super::setup::{Policy, Setup, Traffic, asked_seconds};
use super::workload::{Arrival, Workload};
use super::world::World;
use super::write_behind;
use crate::error::ConfigError;
use crate::limit::Limit;

/// Plays `arrivals`, ordered by time, and `faults` in a world, for `seconds` of virtual time.
///
/// # Errors
///
/// [`ConfigError`] if the limit cannot be kept.
pub fn run(
    setup: &Setup,
    arrivals: &[Arrival],
    faults: &[Planned],
    seconds: f64,
) -> Result<Outcome, ConfigError> {
    let mut world = World::for_arrivals(setup.clone(), arrivals)?;
    for planned in faults {
        world.plan_fault(planned);
    }
    world.play(arrivals, (seconds * 1e6) as u64);
    world.finish();
    let traffic = Traffic { asked_seconds: asked_seconds(arrivals), ..world.traffic };
    Ok(Outcome { figures: world.judge.figures(seconds), traffic })
}

impl Policy {
    /// The limit as this policy has it, whose credit goes before that of the limit.
    fn limit(self, limit: &Limit) -> Limit {
        let limit = limit.clone();
        if self == Self::Strict { limit.credit(0) } else { limit }
    }

    /// The most that the product says that it may admit in excess by this policy, in tokens. Infinite of a policy that is not
    /// the product's.
    pub fn excess_bound(self, setup: &Setup, faults: &[Planned]) -> f64 {
        if self == Self::WriteBehind {
            return f64::INFINITY;
        }
        let limit = self.limit(&setup.limit);
        faults::excess_bound(faults, &Setup { limit, ..setup.clone() })
    }

    /// [`run`] by this policy, whose credit goes before that of the limit.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the limit cannot be kept, or if the policy cannot be played so.
    pub fn run(
        self,
        setup: &Setup,
        arrivals: &[Arrival],
        faults: &[Planned],
        seconds: f64,
    ) -> Result<Outcome, ConfigError> {
        if self == Self::WriteBehind {
            return write_behind::run(setup, arrivals, faults, seconds);
        }
        let setup = Setup { limit: self.limit(&setup.limit), ..setup.clone() };
        run(&setup, arrivals, faults, seconds)
    }
}

/// Plays a workload, with the faults and the network that belong to its scenario.
///
/// # Errors
///
/// [`ConfigError`] if the limit cannot be kept.
pub fn play(setup: &Setup, workload: &Workload) -> Result<Outcome, ConfigError> {
    let setup = setup.clone().of_scenario(workload.scenario);
    run(&setup, &workload.arrivals(), &faults::of_scenario(workload), workload.seconds)
}
