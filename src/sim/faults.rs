//! What goes wrong in a world, and when.

use std::ops::Range;

use super::clock::TICKER_PERIOD_US;
use super::scenario::{AWAKE_SECONDS, SUSPENDED_SECONDS};
use super::setup::{Network, Setup};
use super::workload::{STICKY_DEATH_SECONDS, Scenario, Workload, dying_node};
use crate::algorithm::Rule;
use crate::bound::{Incidents, bound};
use crate::limit::{DEFAULT_MAX_NODES, OutagePolicy};
use crate::time::{CLOCK_AGE_MAX_US, micros};

/// Where nodes come and go, one in ten is replaced once in this time.
pub(super) const CHURN_SECONDS: u64 = 2;
/// The store is gone from then to then.
pub(super) const OUTAGE_SECONDS: (u64, u64) = (5, 8);

/// Where the store comes and goes, it goes for the first time then.
const FLAP_BEGINS_US: u64 = 2_000_000;
/// How long it is gone, and how often, unless a cell of the sweep says otherwise.
const FLAP_US: (u64, u64) = (2_100_000, 3_000_000);
/// The snapshot is saved while buckets are still nearly full, and restored in these seconds.
const SAVED_US: u64 = 100_000;
const RESTORED_SECONDS: [u64; 2] = [8, 12];
/// The store's clock steps back then, and forth again this much later.
const STORE_BACK_SECONDS: (u64, u64) = (5, 10);
/// By how much, unless a cell of the sweep says otherwise.
const STORE_BACK_US: i64 = 60_000_000;
/// Many nodes' store stalls then, for this long.
const CROWD_STALL_SECONDS: (u64, u64) = (4, 2);
/// A store that has stalled has its queue to serve first: it is judged again this much later.
const AFTER_STALL_US: u64 = 3_000_000;

/// How many of `nodes` are replaced at a time where nodes come and go.
pub(super) const fn churned(nodes: u16) -> u16 {
    nodes.div_ceil(10)
}

/// One thing that goes wrong. Places are those that arrivals name, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The node dies; what comes to its place is lost.
    NodeDies {
        /// The place.
        place: u16,
    },
    /// The node dies and a new one takes its place.
    NodeReplaced {
        /// The place.
        place: u16,
    },
    /// A node more, in a place of its own.
    NodeJoins,
    /// The node does nothing for a while; what comes meanwhile waits.
    NodePauses {
        /// The place.
        place: u16,
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// Nothing passes between the node and the store.
    NodeCutOff {
        /// The place.
        place: u16,
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// The node's clock jumps ahead.
    ClockJumps {
        /// The place.
        place: u16,
        /// By how much, in microseconds.
        by_us: u64,
    },
    /// The clock that the node's decisions read stands still.
    ClockStalls {
        /// The place.
        place: u16,
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// The store executes nothing for a while, then everything that was sent meanwhile.
    StoreHangs {
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// No node reaches the store for a while: what is sent meanwhile is lost.
    StoreGone {
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// The store serves nothing for a while, then what has arrived meanwhile, in order.
    StoreStalls {
        /// For how long, in microseconds.
        for_us: u64,
    },
    /// The store restarts empty.
    StoreForgets,
    /// A replica takes over that is behind.
    StoreLags {
        /// By how much, in microseconds.
        by_us: u64,
    },
    /// The store writes a snapshot of itself.
    StoreSaves,
    /// The store comes back as it was at the last snapshot.
    StoreRestores,
    /// The store loses a key's record.
    RecordLost {
        /// The key.
        key: u32,
    },
    /// The store's clock steps. A step ahead deletes the records whose time is over by then.
    StoreClockSteps {
        /// By how much, in microseconds; back if below zero.
        by_us: i64,
    },
}

/// A fault and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Planned {
    /// When, in microseconds since the load began.
    pub at_us: u64,
    /// What.
    pub fault: Fault,
}

impl Planned {
    /// When the store cannot be reached because of this, in microseconds since the load began.
    pub fn store_absence(&self) -> Option<Range<u64>> {
        match self.fault {
            Fault::StoreHangs { for_us } | Fault::StoreGone { for_us } => {
                Some(self.at_us..self.at_us + for_us)
            }
            Fault::StoreStalls { for_us } => Some(self.at_us..self.at_us + for_us + AFTER_STALL_US),
            _ => None,
        }
    }
}

/// A store that is gone for `down_us` in every `every_us`.
pub fn flap(down_us: u64, every_us: u64, seconds: f64) -> Vec<Planned> {
    let times = (FLAP_BEGINS_US..(seconds * 1e6) as u64).step_by(every_us.max(1) as usize);
    times.map(|at_us| Planned { at_us, fault: Fault::StoreHangs { for_us: down_us } }).collect()
}

/// A store whose clock steps back by `by_us`, and forth again.
pub fn store_back(by_us: i64) -> Vec<Planned> {
    let (from_s, for_s) = STORE_BACK_SECONDS;
    let step = |second: u64, by_us| Planned {
        at_us: second * 1_000_000,
        fault: Fault::StoreClockSteps { by_us },
    };
    vec![step(from_s, -by_us), step(from_s + for_s, by_us)]
}

/// Until when a run has to last so that all of a scenario's own faults are over that come once, in seconds. 0 where there are
/// none, or where they come again and again.
pub fn last_fault_seconds(scenario: Scenario) -> f64 {
    let second = match scenario {
        Scenario::Outage => OUTAGE_SECONDS.1,
        Scenario::OldSnapshot => RESTORED_SECONDS[1],
        Scenario::StoreBack => STORE_BACK_SECONDS.0 + STORE_BACK_SECONDS.1,
        Scenario::Crowd => CROWD_STALL_SECONDS.0 + CROWD_STALL_SECONDS.1,
        _ => 0,
    };
    second as f64
}

/// What goes wrong in a workload's scenario.
pub fn of_scenario(workload: &Workload) -> Vec<Planned> {
    let Workload { scenario, nodes, seed, seconds, .. } = *workload;
    let at = |second: u64, fault| Planned { at_us: second * 1_000_000, fault };
    let rounds = |every: u64| 1..(seconds.ceil() as u64).div_ceil(every);
    match scenario {
        Scenario::Sticky => rounds(STICKY_DEATH_SECONDS)
            .map(|round| {
                let place = dying_node(seed, round, nodes);
                at(round * STICKY_DEATH_SECONDS, Fault::NodeReplaced { place })
            })
            .collect(),
        Scenario::Churn => {
            let replaced = churned(nodes);
            let round = |round: u64| {
                let first = (round - 1) * u64::from(replaced);
                (0..u64::from(replaced)).map(move |next| {
                    let place = ((first + next) % u64::from(nodes)) as u16;
                    at(round * CHURN_SECONDS, Fault::NodeReplaced { place })
                })
            };
            rounds(CHURN_SECONDS).flat_map(round).collect()
        }
        Scenario::Outage => {
            let (from, until) = OUTAGE_SECONDS;
            vec![at(from, Fault::StoreHangs { for_us: (until - from) * 1_000_000 })]
        }
        Scenario::Flap => flap(FLAP_US.0, FLAP_US.1, seconds),
        Scenario::Suspended => {
            let frozen_s = SUSPENDED_SECONDS as f64 - AWAKE_SECONDS;
            let fault = Fault::NodePauses { place: 0, for_us: (frozen_s * 1e6) as u64 };
            let awake_us = (AWAKE_SECONDS * 1e6) as u64;
            let rounds = 0..(seconds.ceil() as u64).div_ceil(SUSPENDED_SECONDS);
            let at_us = |round: u64| round * SUSPENDED_SECONDS * 1_000_000 + awake_us;
            rounds.map(|round| Planned { at_us: at_us(round), fault }).collect()
        }
        Scenario::LostRecord => {
            rounds(1).map(|second| at(second, Fault::RecordLost { key: 0 })).collect()
        }
        Scenario::OldSnapshot => {
            let saved = Planned { at_us: SAVED_US, fault: Fault::StoreSaves };
            let restores = RESTORED_SECONDS.map(|second| at(second, Fault::StoreRestores));
            [saved].into_iter().chain(restores).collect()
        }
        Scenario::StoreBack => store_back(STORE_BACK_US),
        Scenario::Crowd => {
            let (from, seconds) = CROWD_STALL_SECONDS;
            vec![at(from, Fault::StoreStalls { for_us: seconds * 1_000_000 })]
        }
        _ => Vec::new(),
    }
}

/// The part of round trips that may be lost without an incident. Where it is more, a node can be without an answer by chance
/// until its outage policy takes over, and nothing counts that.
const LOST_MAX: f64 = 0.04;

/// The most that may be admitted in excess, in tokens, where this is planned: what the product says
/// of its limit. Infinite if more than a few messages are lost, and the outage policy admits anything.
pub fn excess_bound(faults: &[Planned], setup: &Setup) -> f64 {
    let Network { request_loss, reply_loss, .. } = setup.network;
    if request_loss + reply_loss > LOST_MAX && setup.limit.outage != OutagePolicy::Closed {
        return f64::INFINITY;
    }
    let mut incidents = incidents(faults, setup);
    if matches!(setup.limit.rule(), Rule::LeakyBucket(_)) && may_miss_answers(faults, setup) {
        incidents.outages = incidents.outages.max(1);
    }
    bound(&setup.limit, u32::from(setup.nodes) + incidents.joins, &incidents)
}

/// An attempt fails this much later if its node looked too late, in microseconds.
const LATE_US: u64 = 10_000;
/// A loss of memory within this time after another brings back less.
const REPEATED_US: u64 = 5_000_000;
/// This long after a node joins, all others count it: as [`crate::sync::nodes`] says, in microseconds.
const INTRODUCED_US: u64 = 1_500_000;
/// A node that is gone is forgotten by the others after this long at the soonest, in microseconds.
const REMEMBERED_US: u64 = 60_000_000;
/// No outage policy takes over in a shorter silence of the store, in microseconds.
const SILENCE_LEAST_US: u64 = 1_500_000;

/// How long it takes at most until a node has come back after a silence of `silent_us`: an attempt that was
/// under way fails, the next follows after a gap, and the answer to the one after that says since when the store is back.
fn return_us(silent_us: u64, network: &Network) -> u64 {
    let far = network.rtt_by_node.into_iter().flatten().chain([network.rtt]).max();
    let rtt_us = 3 * micros(far.unwrap_or_default()) / 2;
    let gap_us = (silent_us / 32).clamp(20_000, 1_000_000);
    let patience_us = (2 * rtt_us).min(10 * micros(network.timeout));
    // One lane asks whether the store is back, and then the others do.
    (gap_us + gap_us / 8).max(patience_us) + LATE_US + 2 * rtt_us
}

/// The times in which the store answers no node, or not the node at `place`. Nodes do not notice that the store was
/// back for so short a time that none asked.
fn silences(faults: &[Planned], place: Option<u16>, network: &Network) -> Vec<Range<u64>> {
    let silent = faults.iter().filter_map(|planned| match planned.fault {
        Fault::StoreHangs { for_us }
        | Fault::StoreGone { for_us }
        | Fault::StoreStalls { for_us } => Some(planned.at_us..planned.at_us + for_us),
        Fault::NodeCutOff { place: cut_off, for_us } if place == Some(cut_off) => {
            Some(planned.at_us..planned.at_us + for_us)
        }
        _ => None,
    });
    let mut silences: Vec<Range<u64>> = Vec::new();
    let mut silent: Vec<Range<u64>> = silent.collect();
    silent.sort_by_key(|range| range.start);
    for next in silent {
        match silences.last_mut() {
            Some(last) if next.start <= answered_us(last, network) => {
                last.end = last.end.max(next.end);
            }
            _ => silences.push(next),
        }
    }
    silences
}

/// When all nodes are answered again at the latest after a silence.
fn answered_us(silence: &Range<u64>, network: &Network) -> u64 {
    silence.end + return_us(silence.end - silence.start, network)
}

/// Whether outage policies take over in a silence.
fn is_outage(silence: &Range<u64>) -> bool {
    silence.end - silence.start >= SILENCE_LEAST_US
}

/// When a node is answered first at the latest that starts at `from_us`, where these are the silences.
fn first_answer_us(silences: &[Range<u64>], from_us: u64, network: &Network) -> u64 {
    // The store may be gone before a call comes that is under way, or before its answer does.
    let called_us = from_us + return_us(0, network);
    let mut silent =
        silences.iter().filter(|silence| silence.start <= called_us && silence.end > from_us);
    silent.next().map_or(from_us, |silence| answered_us(silence, network))
}

/// Counts a node that starts at `from_us`, where these are the silences. `counts_more`: it is one more for the others.
fn count_start(
    incidents: &mut Incidents,
    silences: &[Range<u64>],
    from_us: u64,
    counts_more: bool,
    network: &Network,
) {
    let unanswered_us = first_answer_us(silences, from_us, network) - from_us;
    let own_policy = unanswered_us >= SILENCE_LEAST_US;
    let mut outages = silences.iter().filter(|silence| is_outage(silence));
    let is_within =
        |outage: &Range<u64>| (outage.start..answered_us(outage, network)).contains(&from_us);
    if own_policy || outages.clone().any(is_within) {
        incidents.nodes_unanswered += 1;
    }
    if own_policy {
        incidents.unanswered_node_s += unanswered_us as f64 / 1e6;
    }
    // The others may not count it yet when they begin to share without the store.
    let counted_us = from_us + return_us(0, network) + INTRODUCED_US;
    if let Some(outage) = outages.find(|outage| (from_us..counted_us).contains(&outage.start))
        && counts_more
    {
        incidents.nodes_cut_off += 1;
        incidents.cut_off_node_s += (answered_us(outage, network) - outage.start) as f64 / 1e6;
    }
}

/// Whether the others have forgotten by `at_us` that there was a node at `place`.
fn is_forgotten(faults: &[Planned], place: u16, at_us: u64) -> bool {
    let died = faults.iter().filter(|planned| planned.fault == Fault::NodeDies { place });
    died.map(|planned| planned.at_us).any(|died_us| died_us + REMEMBERED_US <= at_us)
}

/// Counts the nodes that start, with those that start in the beginning and are more than each takes it that there are.
fn count_starts(incidents: &mut Incidents, faults: &[Planned], setup: &Setup) {
    let network = &setup.network;
    let of_all = silences(faults, None, network);
    for _ in DEFAULT_MAX_NODES..setup.nodes.into() {
        count_start(incidents, &of_all, 0, true, network);
    }
    for &Planned { at_us, fault } in faults {
        match fault {
            Fault::NodeReplaced { place } => {
                let more = is_forgotten(faults, place, at_us);
                let silences = silences(faults, Some(place), network);
                count_start(incidents, &silences, at_us, more, network);
            }
            Fault::NodeJoins => count_start(incidents, &of_all, at_us, true, network),
            _ => {}
        }
    }
}

/// Whether a call about slots of a leaky bucket may be without an answer in time: then the outage policy decides at once.
fn may_miss_answers(faults: &[Planned], setup: &Setup) -> bool {
    let Network { rtt, rtt_by_node, .. } = setup.network;
    let rtt = rtt_by_node.into_iter().flatten().chain([rtt]).max().unwrap_or_default();
    let is_silent = |planned: &Planned| {
        planned.store_absence().is_some() || matches!(planned.fault, Fault::NodeCutOff { .. })
    };
    3 * rtt / 2 >= setup.limit.max_wait
        || setup.service.is_some()
        || !setup.network.is_clean()
        || faults.iter().any(is_silent)
}

/// What goes wrong in a world of which this is planned, as the bound counts it.
pub(super) fn incidents(faults: &[Planned], setup: &Setup) -> Incidents {
    let mut incidents = Incidents::default();
    count_starts(&mut incidents, faults, setup);
    for outage in silences(faults, None, &setup.network).iter().filter(|silence| is_outage(silence))
    {
        incidents.outages += 1;
        let joins = faults.iter().filter(|planned| planned.fault == Fault::NodeJoins).count();
        let burst = setup.limit.quota().burst_tokens() as f64;
        incidents.lent_tokens += burst.max((usize::from(setup.nodes) + joins) as f64);
        incidents.returned_apart_s +=
            return_us(outage.end - outage.start, &setup.network) as f64 / 1e6;
    }
    for planned in faults {
        match planned.fault {
            Fault::NodeDies { .. } | Fault::NodeReplaced { .. } => incidents.deaths += 1,
            Fault::NodeJoins => incidents.joins += 1,
            Fault::StoreForgets => {
                incidents.losses_of_memory += 1;
                let mut losses = faults.iter().filter(|other| other.fault == Fault::StoreForgets);
                let soon_before = planned.at_us.saturating_sub(REPEATED_US)..planned.at_us;
                let repeated = losses.any(|other| soon_before.contains(&other.at_us));
                incidents.losses_repeated += u32::from(repeated);
            }
            Fault::StoreLags { .. } | Fault::StoreRestores => {
                incidents.losses_of_memory += 1;
                // A node may be served from the older state before another finds the loss.
                incidents.losses_unheard += 1;
            }
            Fault::RecordLost { .. } => incidents.lost_records += 1,
            Fault::StoreClockSteps { by_us } if by_us > 0 => {
                incidents.store_jumps_s.push(by_us as f64 / 1e6);
            }
            Fault::ClockJumps { by_us, .. } => incidents.clock_jumps_s.push(by_us as f64 / 1e6),
            Fault::NodeCutOff { for_us, .. } => {
                incidents.nodes_cut_off += 1;
                incidents.cut_off_node_s += for_us as f64 / 1e6;
            }
            Fault::ClockStalls { for_us, .. } => {
                // The time that stands still is as old as the ticker's period already.
                let beyond_us = (for_us + TICKER_PERIOD_US).saturating_sub(CLOCK_AGE_MAX_US);
                incidents.clock_jumps_s.push(beyond_us as f64 / 1e6);
            }
            _ => {}
        }
    }
    let Network { request_loss, reply_loss, late, .. } = setup.network;
    if request_loss + reply_loss + late > 0.0
        || incidents.deaths + incidents.joins > 0
        || incidents.nodes_cut_off > 0
    {
        // The nodes that a store waits for may not be those that hold leases.
        incidents.losses_unheard = incidents.losses_of_memory;
    }
    incidents
}
