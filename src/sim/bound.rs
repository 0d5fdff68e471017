//! How much can be admitted in excess, when so much goes wrong: docs/ACCURACY.md has the argument.

use super::faults::{Fault, Planned};
use super::setup::{Network, Setup};
use crate::limit::{Limit, OutagePolicy};

/// What went wrong since a key's bucket was last full.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Incidents {
    /// Nodes that died or were born anew.
    pub deaths: u32,
    /// Times that the store lost its memory or what it had acknowledged.
    pub losses_of_memory: u32,
    /// What each of the store's forward jumps gave, in seconds, all together.
    pub store_jumps_s: f64,
    /// What the nodes' clocks jumped ahead, in seconds, all together.
    pub clock_jumps_s: f64,
    /// Sum over nodes: seconds in which a node was cut off from a store that others could reach.
    pub cut_off_node_s: f64,
    /// Whether a node may have been out of the store's reach while it recovered from a loss.
    pub unheard: bool,
    /// Whether the clock that decisions read ever stood still.
    pub clock_stalls: bool,
    /// Nodes that were ever cut off.
    pub nodes_cut_off: u32,
}

impl Incidents {
    /// Counts what was planned to go wrong in a world.
    pub fn of(faults: &[Planned], setup: &Setup) -> Self {
        let Network { request_loss, reply_loss, late, .. } = setup.network;
        let mut incidents =
            Self { unheard: request_loss + reply_loss + late > 0.0, ..Self::default() };
        for planned in faults {
            match planned.fault {
                Fault::NodeDies { .. } | Fault::NodeReplaced { .. } | Fault::NodeJoins => {
                    incidents.deaths += 1;
                    incidents.unheard = true;
                }
                Fault::StoreForgets | Fault::StoreLags { .. } => incidents.losses_of_memory += 1,
                Fault::StoreClockJumps { by_us } => incidents.store_jumps_s += by_us as f64 / 1e6,
                Fault::ClockJumps { by_us, .. } => incidents.clock_jumps_s += by_us as f64 / 1e6,
                Fault::NodeCutOff { for_us, .. } => {
                    incidents.unheard = true;
                    incidents.nodes_cut_off += 1;
                    incidents.cut_off_node_s += for_us as f64 / 1e6;
                }
                Fault::StoreHangs { for_us } => {
                    incidents.unheard = true;
                    // Nodes see its end at different times.
                    incidents.nodes_cut_off += u32::from(setup.nodes);
                    incidents.cut_off_node_s += f64::from(setup.nodes) * for_us as f64 / 1e6;
                }
                Fault::ClockStalls { .. } => incidents.clock_stalls = true,
                Fault::NodePauses { .. } => incidents.unheard = true,
            }
        }
        incidents
    }

    /// How much older than normal the time can be by which a decision is taken, in seconds. What
    /// flows into a full bucket meanwhile is not seen to be lost.
    fn staleness_s(&self) -> f64 {
        if self.clock_stalls { 0.02 } else { 0.0 }
    }
}

/// The most tokens that a cluster of `nodes` can admit on one key above `burst + rate x window`,
/// over any window, with `incidents` in it.
pub fn bound(limit: &Limit, nodes: u32, incidents: &Incidents) -> f64 {
    let quota = limit.quota();
    let (rate, burst) = (quota.tokens_per_second(), quota.burst_tokens() as f64);
    let credit = f64::from(limit.credit);
    let n = f64::from(nodes.max(1));
    let mut tokens = credit * (n + f64::from(incidents.deaths)) + rate * incidents.staleness_s();
    // Keys that fill slowly begin full when nobody knows them.
    let unknown = incidents.unheard || burst / rate > 60.0;
    let forgotten = if unknown { burst } else { 0.0 };
    tokens += f64::from(incidents.losses_of_memory) * (forgotten + credit * n);
    tokens += (rate * incidents.store_jumps_s).min(burst * incidents.store_jumps_s.ceil());
    tokens += (rate * incidents.clock_jumps_s).min(burst * incidents.clock_jumps_s.ceil());
    if limit.outage == OutagePolicy::Share {
        let share = rate * incidents.cut_off_node_s / n;
        tokens += share + f64::from(incidents.nodes_cut_off) * burst / n;
    }
    tokens
}
