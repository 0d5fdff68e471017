//! What is offered in the cells of the sweep, and which cells there are of each.

use std::borrow::Cow;

use super::super::cold::CLIENTS_PER_SECOND;
use super::super::faults::{self, Planned};
use super::super::setup::{Form, Policy};
use super::super::workload::{Scenario, Workload};
use super::{INTERVALS_MS, NODES, QUOTAS};
use crate::quota::Quota;

/// Quotas of the scenarios on many keys, which would otherwise be far too many requests.
const STICKY_QUOTA: Quota = Quota::per_second(20);
const MANY_SMALL_QUOTA: Quota = Quota::per_second(5);
const HOT_SET_QUOTA: Quota = Quota::per_second(50);
/// The quotas of the long run.
const LONG_RUN_QUOTAS: [Quota; 5] = [
    Quota::per_second(1000),
    Quota::per_second(1000).burst(100),
    Quota::per_second(100),
    Quota::per_second(20),
    Quota::per_second(1).burst(10),
];
/// The quotas of the rows in which something fails.
const FAULT_QUOTAS: [Quota; 4] = [
    Quota::per_second(1000),
    Quota::per_second(1000).burst(100),
    Quota::per_second(100),
    Quota::per_second(20),
];
/// The quotas of bursts: large beside a tenth of a second of the rate.
const BURSTS_QUOTAS: [Quota; 4] = [
    Quota::per_second(10_000),
    Quota::per_second(1000),
    Quota::per_second(1000).burst(100),
    Quota::per_second(100),
];
const BURSTS_NODES: [u16; 3] = [1, 4, 20];
const SLOW_FULL_QUOTA: Quota = Quota::per_second(1).burst(1000);
const SUSPENDED_QUOTAS: [Quota; 2] =
    [Quota::per_second(100).burst(1000), Quota::per_second(100).burst(2000)];
const JUNK_QUOTA: Quota = Quota::per_second(100);
const COLD_QUOTAS: [Quota; 3] =
    [Quota::per_second(100), Quota::per_second(10).burst(20), Quota::per_second(1000).burst(200)];
const LOGIN_QUOTA: Quota = Quota::per_minute(5);
const CROWD_QUOTA: Quota = Quota::per_second(1000);
const CROWD_FULL_QUOTA: Quota = Quota::per_second(200);
/// All that only some loads have.
const OWN_QUOTAS: [Quota; 10] = [
    STICKY_QUOTA,
    MANY_SMALL_QUOTA,
    HOT_SET_QUOTA,
    SLOW_FULL_QUOTA,
    SUSPENDED_QUOTAS[0],
    SUSPENDED_QUOTAS[1],
    CROWD_FULL_QUOTA,
    COLD_QUOTAS[1],
    COLD_QUOTAS[2],
    LOGIN_QUOTA,
];

/// Nodes and interval of the cells that have but one.
const ONE_NODES: u16 = 20;
const ONE_INTERVAL_MS: u64 = 50;
/// Nodes of the rows in which something fails, at that interval.
const FAULT_NODES: [u16; 2] = [4, 20];
const SUSPENDED_NODES: [u16; 2] = [1, 2];
const JUNK_NODES: u16 = 4;
const CROWD_NODES: u16 = 200;
const COLD_NODES: [u16; 3] = [1, 4, 20];
const COLD_SECONDS: u32 = 20;
const LOGIN_NODES: [u16; 4] = [4, 8, 20, 100];
const LOGIN_KEYS: u32 = 500;
const LOGIN_SECONDS: f64 = 1200.0;
/// Keys that keep the store busy for about 70% of the time while it does not stall, and keys that
/// fill all lanes.
const CROWD_KEYS: u32 = 5;
const CROWD_FULL_KEYS: u32 = 640;

/// When the outage begins, three times the rate must have spent the burst, or what is admitted
/// during it says nothing.
const OUTAGE_BURST_SECONDS_MAX: f64 = 1.0;
/// How long the store is gone where it comes and goes, and how often, in milliseconds; not where it
/// would be there for less than a tenth of the time.
const FLAP_DOWN_MS: [u32; 7] = [500, 1000, 1500, 2000, 2100, 2500, 5000];
const FLAP_EVERY_MS: [u32; 3] = [3000, 5000, 10_000];
/// Steps of the store's clock, in seconds.
const STORE_BACK_S: [u32; 3] = [1, 60, 3600];

/// What is offered in a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// A scenario, until the ideal has admitted enough.
    Scenario(Scenario),
    /// Three times the rate, spread evenly, for ten minutes.
    LongRun,
    /// Three times the rate, spread evenly, while the store comes and goes.
    Flap {
        /// How long the store is gone, in milliseconds.
        down_ms: u32,
        /// How often, in milliseconds.
        every_ms: u32,
    },
    /// Three times the rate, spread evenly, while the store's clock steps back and forth.
    StoreBack {
        /// By how much, in seconds.
        by_s: u32,
    },
    /// New clients all the time.
    ColdClients {
        /// Each one's first request costs half the burst.
        costly: bool,
    },
    /// Many keys with a small burst.
    Logins {
        /// At three times the rate, in place of nine tenths.
        over: bool,
    },
    /// Many nodes on a store with a service time.
    Crowd {
        /// With more keys than the store can serve, in place of 70% of that.
        full: bool,
    },
}

impl Load {
    /// All of them, in the order of docs/ACCURACY.md.
    pub fn all() -> Vec<Self> {
        Scenario::ALL.into_iter().flat_map(Self::of_scenario).chain([Self::LongRun]).collect()
    }

    /// The loads in which a scenario is played.
    fn of_scenario(scenario: Scenario) -> Vec<Self> {
        match scenario {
            Scenario::Flap => FLAP_EVERY_MS
                .into_iter()
                .flat_map(|every_ms| FLAP_DOWN_MS.map(|down_ms| (down_ms, every_ms)))
                .filter(|(down_ms, every_ms)| 10 * down_ms < 9 * every_ms)
                .map(|(down_ms, every_ms)| Self::Flap { down_ms, every_ms })
                .collect(),
            Scenario::StoreBack => STORE_BACK_S.map(|by_s| Self::StoreBack { by_s }).into(),
            Scenario::Crowd => [false, true].map(|full| Self::Crowd { full }).into(),
            Scenario::ColdClients => {
                [false, true].map(|costly| Self::ColdClients { costly }).into()
            }
            Scenario::Logins => [false, true].map(|over| Self::Logins { over }).into(),
            scenario => vec![Self::Scenario(scenario)],
        }
    }

    /// The load's name in reports.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::Flap { down_ms, every_ms } => {
                let seconds = |ms: u32| f64::from(ms) / 1e3;
                format!("flap {}s of {}s", seconds(down_ms), seconds(every_ms)).into()
            }
            Self::StoreBack { by_s } => format!("store_back {by_s}s").into(),
            load => load.line().into(),
        }
    }

    /// The name of the table's line that it belongs to.
    pub const fn line(self) -> &'static str {
        match self {
            Self::LongRun => "long_run",
            Self::Crowd { full: true } => "crowd_full",
            Self::ColdClients { costly: true } => "cold_costly",
            Self::Logins { over: true } => "logins_over",
            load => load.scenario().name(),
        }
    }

    /// The row of docs/ACCURACY.md that it belongs to.
    pub const fn row(self) -> &'static str {
        match self {
            Self::LongRun => "long_run",
            Self::Scenario(Scenario::FarUnder | Scenario::FarHerd | Scenario::FarShiftUnder) => {
                "far_nodes"
            }
            load => load.scenario().name(),
        }
    }

    /// The requests and their times.
    pub const fn scenario(self) -> Scenario {
        match self {
            Self::Scenario(scenario) => scenario,
            Self::LongRun => Scenario::OverUniform,
            Self::Flap { .. } => Scenario::Flap,
            Self::StoreBack { .. } => Scenario::StoreBack,
            Self::Crowd { .. } => Scenario::Crowd,
            Self::ColdClients { .. } => Scenario::ColdClients,
            Self::Logins { .. } => Scenario::Logins,
        }
    }

    /// What goes wrong in it.
    pub(super) fn faults(self, workload: &Workload) -> Vec<Planned> {
        match self {
            Self::Flap { down_ms, every_ms } => {
                let micros = |ms| u64::from(ms) * 1000;
                faults::flap(micros(down_ms), micros(every_ms), workload.seconds)
            }
            Self::StoreBack { by_s } => faults::store_back(i64::from(by_s) * 1_000_000),
            _ => faults::of_scenario(workload),
        }
    }

    /// What is offered, where it is not what the scenario offers.
    pub(super) fn multiple(self) -> Option<f64> {
        (self == Self::Logins { over: true }).then_some(3.0)
    }

    pub(super) fn quotas(self) -> Vec<Quota> {
        match self.scenario() {
            _ if self == Self::LongRun => LONG_RUN_QUOTAS.to_vec(),
            Scenario::Sticky => vec![STICKY_QUOTA],
            Scenario::ManySmall => vec![MANY_SMALL_QUOTA],
            Scenario::HotSet => vec![HOT_SET_QUOTA],
            Scenario::Outage => {
                let fills_s =
                    |quota: &Quota| quota.burst_tokens() as f64 / quota.tokens_per_second();
                QUOTAS.into_iter().filter(|it| fills_s(it) <= OUTAGE_BURST_SECONDS_MAX).collect()
            }
            Scenario::Bursts => BURSTS_QUOTAS.to_vec(),
            Scenario::SlowFull => vec![SLOW_FULL_QUOTA],
            Scenario::Suspended => SUSPENDED_QUOTAS.to_vec(),
            Scenario::Junk => vec![JUNK_QUOTA],
            Scenario::ColdClients => COLD_QUOTAS.to_vec(),
            Scenario::Logins => vec![LOGIN_QUOTA],
            Scenario::Crowd if self == Self::Crowd { full: true } => vec![CROWD_FULL_QUOTA],
            Scenario::Crowd => vec![CROWD_QUOTA],
            _ if self.is_fault_row() => FAULT_QUOTAS.to_vec(),
            _ => QUOTAS.to_vec(),
        }
    }

    /// Whether it is judged by the bound, and by what is admitted while the store can be reached.
    pub(super) const fn is_fault_row(self) -> bool {
        matches!(
            self.scenario(),
            Scenario::Flap | Scenario::LostRecord | Scenario::OldSnapshot | Scenario::StoreBack
        )
    }

    pub(super) const fn is_far(self) -> bool {
        matches!(self.scenario(), Scenario::FarUnder | Scenario::FarHerd | Scenario::FarShiftUnder)
    }

    /// Cluster sizes, and intervals in milliseconds.
    pub(super) fn clusters(self) -> Vec<(u16, u64)> {
        let of = |nodes: &[u16]| nodes.iter().map(|&nodes| (nodes, ONE_INTERVAL_MS)).collect();
        match self.scenario() {
            Scenario::HotSet => of(&[ONE_NODES]),
            Scenario::Bursts => of(&BURSTS_NODES),
            _ if self == Self::LongRun => of(&[ONE_NODES]),
            Scenario::Suspended => of(&SUSPENDED_NODES),
            Scenario::Junk => of(&[JUNK_NODES]),
            Scenario::ColdClients => of(&COLD_NODES),
            Scenario::Logins => of(&LOGIN_NODES),
            Scenario::Crowd => of(&[CROWD_NODES]),
            Scenario::SlowFull => of(&FAULT_NODES),
            _ if self.is_fault_row() => of(&FAULT_NODES),
            _ if self.is_far() => of(&NODES),
            _ => NODES.iter().flat_map(|&nodes| INTERVALS_MS.map(|ms| (nodes, ms))).collect(),
        }
    }

    pub(super) const fn keys(self) -> u32 {
        match self {
            Self::Scenario(Scenario::Sticky | Scenario::ManySmall) => 1000,
            Self::Scenario(Scenario::HotSet) => 100_000,
            Self::ColdClients { .. } => COLD_SECONDS * CLIENTS_PER_SECOND,
            Self::Logins { .. } => LOGIN_KEYS,
            Self::Crowd { full: false } => CROWD_KEYS,
            Self::Crowd { full: true } => CROWD_FULL_KEYS,
            _ => 1,
        }
    }

    /// How its requests are decided where `form` is asked for.
    pub(super) const fn form(self, form: Form) -> Form {
        let waits = matches!(
            self,
            Self::ColdClients { costly: true } | Self::Scenario(Scenario::Suspended)
        );
        if waits { Form::Async } else { form }
    }

    /// The policies that it is played with where `policy` is asked for: the default is compared
    /// with the strict one in some rows.
    pub fn policies(self, policy: Policy) -> Vec<Policy> {
        let both = self.is_fault_row() || self.scenario() == Scenario::SlowFull;
        match policy {
            Policy::Default if both => vec![Policy::Default, Policy::Strict],
            Policy::WriteBehind if !self.is_usual() => Vec::new(),
            policy => vec![policy],
        }
    }

    /// Whether the usual way can be played with it.
    fn is_usual(self) -> bool {
        !self.is_far()
            && !matches!(
                self.scenario(),
                Scenario::Suspended
                    | Scenario::LostRecord
                    | Scenario::OldSnapshot
                    | Scenario::StoreBack
                    | Scenario::Junk
                    | Scenario::Crowd
                    | Scenario::ColdClients
            )
    }
}

/// All quotas, those of one load only at the end.
pub(super) fn all_quotas() -> Vec<Quota> {
    let mut quotas = QUOTAS.to_vec();
    for quota in OWN_QUOTAS {
        if !quotas.contains(&quota) {
            quotas.push(quota);
        }
    }
    quotas
}

/// How long a load lasts that has its own time.
pub(super) const fn own_seconds(load: Load) -> Option<f64> {
    match load {
        Load::LongRun => Some(600.0),
        Load::Scenario(Scenario::HotSet) => Some(5.0),
        Load::Scenario(Scenario::SlowFull) => Some(2000.0),
        Load::Scenario(Scenario::Suspended) => Some(100.0),
        Load::Scenario(Scenario::Junk) | Load::StoreBack { .. } => Some(40.0),
        Load::Crowd { .. } => Some(12.0),
        Load::ColdClients { .. } => Some(COLD_SECONDS as f64),
        Load::Logins { .. } => Some(LOGIN_SECONDS),
        _ => None,
    }
}
