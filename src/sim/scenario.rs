//! The scenarios of docs/ACCURACY.md: how much is offered, and on which nodes and keys.

use serde::{Deserialize, Serialize};

/// In `junk`, keys from this number on are invented: each is asked for once.
pub const JUNK_KNOWN_KEYS: u32 = 101;
/// Keys that are invented on each node and second.
pub(super) const JUNK_PER_SECOND: f64 = 10_000.0;
/// What the first of the known keys is offered of its rate, and what the others are.
pub(super) const JUNK_LOADS: (f64, f64) = (0.5, 0.9);

/// Where a node is frozen most of the time, it is awake for the first part of each period.
pub(super) const SUSPENDED_SECONDS: u64 = 10;
pub(super) const AWAKE_SECONDS: f64 = 0.5;

/// How much is offered, and on which nodes and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scenario {
    /// Three times the rate, spread evenly.
    OverUniform,
    /// Three times the rate, the i-th node in proportion to 1/i.
    OverSkew,
    /// Nine tenths of the rate, spread evenly.
    Under,
    /// Nine tenths of the rate, the i-th node in proportion to 1/i.
    UnderSkew,
    /// Five times the rate for a second, evenly, then three seconds of silence, repeated.
    Herd,
    /// Nine tenths of the rate, all on one node, which changes each second.
    ShiftUnder,
    /// Nine tenths of the rate, spread evenly; each node's part of a tenth of a second comes all at once.
    Bursts,
    /// Keys that stay on one node each; every five seconds a node dies, its keys move to others and
    /// a new node takes its place.
    Sticky,
    /// Keys that are asked for on a random node each time.
    ManySmall,
    /// Keys of very different fame (Zipf, exponent 1), each request on a random node.
    HotSet,
    /// Three times the rate, evenly; every two seconds one node in ten is replaced by a new one.
    Churn,
    /// Three times the rate, evenly, while the store is gone from second 5 to second 8.
    Outage,
    /// Three times the rate, evenly, over a store that is far away and loses one reply in a hundred.
    SlowStore,
    /// The herd, over such a store.
    SlowHerd,
    /// `under`, with round trips of 1, 5, 20 and 80 ms on different nodes.
    FarUnder,
    /// `herd`, with such round trips.
    FarHerd,
    /// `shift_under`, with such round trips.
    FarShiftUnder,
    /// Nine tenths of the rate, evenly: for a limit that takes long to fill.
    SlowFull,
    /// Three times the rate, evenly, while the store comes and goes.
    Flap,
    /// Nine tenths of the rate, evenly; the first node is frozen for 9.5 s of every 10 s, and its
    /// part comes while it is awake.
    Suspended,
    /// Three times the rate, evenly, while the store loses the first key's record each second.
    LostRecord,
    /// Three times the rate, evenly, over a store that comes back twice with the same old state.
    OldSnapshot,
    /// Three times the rate, evenly, over a store whose clock steps back, and forth again.
    StoreBack,
    /// One key at half its limit and a hundred at nine tenths, beside 10000 new keys a second on
    /// each node.
    Junk,
    /// Three times the rate, evenly, over a store with a service time that stalls for two seconds.
    Crowd,
    /// New keys all the time: six requests within 2 ms on random nodes, then one a second.
    ColdClients,
    /// Many keys with small bursts at nine tenths of the rate, each request on a random node.
    Logins,
}

impl Scenario {
    /// All scenarios, in the order of docs/ACCURACY.md.
    pub const ALL: [Self; 27] = [
        Self::OverUniform,
        Self::OverSkew,
        Self::Under,
        Self::UnderSkew,
        Self::Herd,
        Self::ShiftUnder,
        Self::Bursts,
        Self::Sticky,
        Self::ManySmall,
        Self::HotSet,
        Self::Churn,
        Self::Outage,
        Self::SlowStore,
        Self::SlowHerd,
        Self::FarUnder,
        Self::FarHerd,
        Self::FarShiftUnder,
        Self::SlowFull,
        Self::Flap,
        Self::Suspended,
        Self::LostRecord,
        Self::OldSnapshot,
        Self::StoreBack,
        Self::Junk,
        Self::Crowd,
        Self::ColdClients,
        Self::Logins,
    ];

    /// What the scenario goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OverUniform => "over_uniform",
            Self::OverSkew => "over_skew",
            Self::Under => "under",
            Self::UnderSkew => "under_skew",
            Self::Herd => "herd",
            Self::ShiftUnder => "shift_under",
            Self::Bursts => "bursts",
            Self::Sticky => "sticky",
            Self::ManySmall => "many_small",
            Self::HotSet => "hot_set",
            Self::Churn => "churn",
            Self::Outage => "outage",
            Self::SlowStore => "slow_store",
            Self::SlowHerd => "slow_herd",
            Self::FarUnder => "far_under",
            Self::FarHerd => "far_herd",
            Self::FarShiftUnder => "far_shift_under",
            Self::SlowFull => "slow_full",
            Self::Flap => "flap",
            Self::Suspended => "suspended",
            Self::LostRecord => "lost_record",
            Self::OldSnapshot => "old_snapshot",
            Self::StoreBack => "store_back",
            Self::Junk => "junk",
            Self::Crowd => "crowd",
            Self::ColdClients => "cold_clients",
            Self::Logins => "logins",
        }
    }

    /// Whether nodes, store or network are other than usual in it: a demo plays only those where
    /// they are not.
    pub const fn has_faults(self) -> bool {
        !matches!(
            self,
            Self::OverUniform
                | Self::OverSkew
                | Self::Under
                | Self::UnderSkew
                | Self::Herd
                | Self::ShiftUnder
                | Self::Bursts
                | Self::ManySmall
                | Self::HotSet
                | Self::SlowFull
                | Self::ColdClients
                | Self::Logins
        )
    }

    /// What is offered while something is, as a multiple of the rate.
    pub const fn load(self) -> f64 {
        match self {
            Self::Under
            | Self::UnderSkew
            | Self::ShiftUnder
            | Self::Bursts
            | Self::FarUnder
            | Self::FarShiftUnder
            | Self::SlowFull
            | Self::Suspended
            | Self::Logins => 0.9,
            Self::Herd | Self::SlowHerd | Self::FarHerd => 5.0,
            // 2000000 requests a second on 100000 keys of 50 a second each.
            Self::HotSet => 0.4,
            // It has requests of its own.
            Self::ColdClients => 1.0,
            // All known keys together, of one key's rate.
            Self::Junk => JUNK_LOADS.0 + (JUNK_KNOWN_KEYS - 1) as f64 * JUNK_LOADS.1,
            Self::OverUniform
            | Self::OverSkew
            | Self::Sticky
            | Self::ManySmall
            | Self::Churn
            | Self::Outage
            | Self::SlowStore
            | Self::Flap
            | Self::LostRecord
            | Self::OldSnapshot
            | Self::StoreBack
            | Self::Crowd => 3.0,
        }
    }

    pub(super) const fn is_herd(self) -> bool {
        matches!(self, Self::Herd | Self::SlowHerd | Self::FarHerd)
    }

    pub(super) const fn is_shifting(self) -> bool {
        matches!(self, Self::ShiftUnder | Self::FarShiftUnder)
    }

    /// Keys that are asked for again and again, where others are not.
    pub const fn known_keys(self) -> Option<u32> {
        if matches!(self, Self::Junk) { Some(JUNK_KNOWN_KEYS) } else { None }
    }
}

impl std::str::FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name("scenario", &Self::ALL, Self::name, text)
    }
}

/// The one of `all` that is called `text`.
pub(super) fn by_name<T: Copy>(
    kind: &str,
    all: &[T],
    name: fn(T) -> &'static str,
    text: &str,
) -> Result<T, String> {
    all.iter().copied().find(|&one| name(one) == text).ok_or_else(|| {
        let known: Vec<&str> = all.iter().map(|&one| name(one)).collect();
        format!("no {kind} is called {text:?}; there are {}", known.join(", "))
    })
}
