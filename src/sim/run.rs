//! One run: a world, a load, what goes wrong, and what came of it.

use super::baseline;
use super::faults::{self, Planned};
use super::figures::Figures;
use super::setup::{Network, Policy, Setup, Traffic, asked_seconds};
use super::workload::{Arrival, Workload};
use super::world::World;
use crate::error::ConfigError;

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// What was admitted, against the ideal.
    pub figures: Figures,
    /// What it cost.
    pub traffic: Traffic,
}

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
    let mut world = World::new(setup.clone())?;
    for planned in faults {
        world.suffer(planned);
    }
    world.play(arrivals, (seconds * 1e6) as u64);
    world.finish();
    let traffic = Traffic { asked_seconds: asked_seconds(arrivals), ..world.traffic };
    Ok(Outcome { figures: world.judge.figures(seconds), traffic })
}

impl Policy {
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
        let limit = setup.limit.clone();
        let setup = match self {
            Self::Default => setup,
            Self::Strict => &Setup { limit: limit.credit(0), ..setup.clone() },
            Self::WriteBehind => return baseline::run(setup, arrivals, faults, seconds),
        };
        run(setup, arrivals, faults, seconds)
    }
}

/// Plays a workload, with the faults and the network that belong to its scenario.
///
/// # Errors
///
/// [`ConfigError`] if the limit cannot be kept.
pub fn play(setup: &Setup, workload: &Workload) -> Result<Outcome, ConfigError> {
    let mut setup = setup.clone();
    if let Some(network) = Network::of_scenario(workload.scenario) {
        setup.network = network;
    }
    run(&setup, &workload.arrivals(), &faults::of_scenario(workload), workload.seconds)
}
