//! Overrides of one limit on this node, which decisions look at before they look at the limit.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use dashmap::DashMap;

use super::definition::Definition;
use crate::limit::{LimitInfo, QuotaOf};
#[cfg(feature = "http")]
use crate::network::Network;
use crate::overrides::{Ruling, Setting, Subject, Switch};
use crate::quota::Scale;
use crate::time::Timestamp;

/// What overrides a limit on this node. One task changes it, and any number of threads read.
#[derive(Debug)]
pub(crate) struct LimitOverrides {
    /// The place of the [`Switch`] in [`Switch::ALL`].
    switch: AtomicU8,
    /// Whether there has ever been one of keys, or a key was blocked. A hint: publishes nothing.
    may_rule: AtomicBool,
    /// Whether one has ever given a key another plan, or a quota. A hint: publishes nothing.
    may_give_plans: AtomicBool,
    /// Quotas that overrides have ever given keys.
    quotas: Mutex<Quotas>,
    /// The highest cost that one of them may admit, in tokens. A hint: publishes nothing.
    cost_max: AtomicU32,
    /// By what the limiter knows the keys by.
    keys: DashMap<Box<[u8]>, HeldRuling>,
    /// Of these, by what their hashed forms are known by. An override of that form itself wins.
    hashed: DashMap<Box<[u8]>, HeldRuling>,
    /// Keys that this node alone blocks after a denial.
    blocked: DashMap<Box<[u8]>, Blocked>,
    prefixes: ByLength<Vec<u8>, usize>,
    #[cfg(feature = "http")]
    networks: ByLength<Network, u8>,
    allowed: AtomicU64,
    denied: AtomicU64,
}

/// A block of a key after a denial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocked {
    pub(crate) until: Timestamp,
    /// The later of that and the time at which the limit would allow a request of one token.
    pub(crate) retry_at: Timestamp,
}

/// What an override says, and until when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeldRuling {
    pub(crate) ruling: InForce,
    pub(crate) until: Timestamp,
}

impl HeldRuling {
    /// The plan that the key is under, if it says that.
    pub(crate) fn plan(&self) -> Option<&'static LimitInfo> {
        match self.ruling {
            InForce::Plan(info) => Some(info),
            InForce::Allow | InForce::Block => None,
        }
    }
}

/// Quotas that overrides have ever given keys of a limit.
#[derive(Debug, Default)]
struct Quotas {
    /// Their numbers.
    known: HashSet<u32>,
    /// Those that the engine has not been told.
    untold: Vec<&'static LimitInfo>,
    /// That whose keys take longest to fill.
    slowest: Option<Scale>,
}

/// A [`Ruling`] of a limit that has what it names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum InForce {
    Allow,
    Block,
    /// A plan of the limit, or a quota.
    Plan(&'static LimitInfo),
}

/// Overrides for many keys, by what the keys have in common, and how many there are of each length of that.
#[derive(Debug)]
struct ByLength<K: Eq + Hash, N> {
    held: DashMap<K, HeldRuling>,
    lengths: RwLock<BTreeMap<N, usize>>,
}

impl LimitOverrides {
    pub(crate) fn new(own_switch: Switch) -> Self {
        let overrides = Self {
            may_rule: AtomicBool::new(false),
            may_give_plans: AtomicBool::new(false),
            quotas: Mutex::default(),
            cost_max: AtomicU32::new(0),
            switch: AtomicU8::new(0),
            keys: DashMap::new(),
            hashed: DashMap::new(),
            blocked: DashMap::new(),
            prefixes: ByLength::new(),
            #[cfg(feature = "http")]
            networks: ByLength::new(),
            allowed: AtomicU64::new(0),
            denied: AtomicU64::new(0),
        };
        overrides.set_switch(own_switch);
        overrides
    }

    /// Whether decisions have to look here.
    pub(super) fn is_any(&self, definition: &Definition) -> bool {
        !definition.limit.block_for.is_zero()
            || self.switch() != Switch::On
            || !self.keys.is_empty()
            || self.has_patterns()
    }

    pub(crate) fn switch(&self) -> Switch {
        let place = self.switch.load(Ordering::Relaxed);
        Switch::ALL.get(usize::from(place)).copied().unwrap_or_default()
    }

    /// What holds for a key at `now` instead of the limit's rule: by what it is known by, or by its plain bytes.
    pub(crate) fn find(&self, name: &[u8], plain: &[u8], now: Timestamp) -> Option<HeldRuling> {
        if !self.may_rule.load(Ordering::Relaxed) {
            return None;
        }
        let holds = |held: &HeldRuling| now < held.until;
        let by_name = |keys: &DashMap<Box<[u8]>, HeldRuling>| keys.get(name).map(|held| *held);
        let by_key = by_name(&self.keys).filter(holds);
        let by_key = by_key.or_else(|| by_name(&self.hashed).filter(holds));
        let by_key = by_key.or_else(|| self.find_pattern(plain, holds));
        if let Some(HeldRuling { ruling: InForce::Allow | InForce::Block, .. }) = by_key {
            return by_key;
        }
        let blocked = self.blocked.get(name).filter(|blocked| now < blocked.until);
        let block = blocked.map(|it| HeldRuling { ruling: InForce::Block, until: it.retry_at });
        block.or(by_key)
    }

    /// What holds by the smallest network that is in force, or else by the longest prefix.
    fn find_pattern(
        &self,
        plain: &[u8],
        holds: impl Fn(&HeldRuling) -> bool,
    ) -> Option<HeldRuling> {
        #[cfg(feature = "http")]
        if !self.networks.is_empty()
            && let Some(network) = Network::of_key(plain)
            && let Some(held) = self.networks.find_longest(
                |networks, length| networks.get(&network.within(length)?).map(|held| *held),
                &holds,
            )
        {
            return Some(held);
        }
        self.prefixes.find_longest(
            |prefixes, length| prefixes.get(plain.get(..length)?).map(|held| *held),
            &holds,
        )
    }

    /// Whether keys are looked for by their plain bytes.
    pub(crate) fn has_patterns(&self) -> bool {
        #[cfg(feature = "http")]
        if !self.networks.is_empty() {
            return true;
        }
        !self.prefixes.is_empty()
    }

    /// The highest cost that a quota of an override may admit, in tokens.
    pub(crate) fn cost_max(&self) -> u32 {
        self.cost_max.load(Ordering::Relaxed)
    }

    /// Of all quotas that overrides have given keys, that whose keys take longest to fill.
    pub(super) fn slowest(&self) -> Option<Scale> {
        self.quotas().slowest
    }

    /// Quotas that overrides have given keys since the last time.
    pub(super) fn take_new_quotas(&self) -> Vec<&'static LimitInfo> {
        std::mem::take(&mut self.quotas().untold)
    }

    fn quotas(&self) -> MutexGuard<'_, Quotas> {
        self.quotas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a plan or a quota before a key has it.
    pub(crate) fn note(&self, info: &'static LimitInfo) {
        if info.of == QuotaOf::Override {
            let mut quotas = self.quotas();
            if quotas.known.insert(info.number) {
                quotas.untold.push(info);
                let scales = quotas.slowest.into_iter().chain([info.terms.scale]);
                quotas.slowest = scales.max_by_key(Scale::fill_us);
            }
            self.cost_max.fetch_max(info.terms.cost_max, Ordering::Relaxed);
        }
        self.may_give_plans.store(true, Ordering::Relaxed);
    }

    /// Whether overrides may give keys other plans.
    pub(super) fn may_give_plans(&self) -> bool {
        self.may_give_plans.load(Ordering::Relaxed)
    }

    /// Counts a request that an override decided about.
    pub(crate) fn count(&self, is_allowed: bool) {
        let count = if is_allowed { &self.allowed } else { &self.denied };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests since the last time that overrides allowed and denied.
    pub(super) fn take_counts(&self) -> [u64; 2] {
        [&self.allowed, &self.denied].map(|count| count.swap(0, Ordering::Relaxed))
    }

    /// Blocks a key that was denied, if fewer than `most` keys are blocked.
    pub(crate) fn block(&self, name: &[u8], blocked: Blocked, most: usize) -> bool {
        let has_room = self.blocked.len() < most || self.blocked.contains_key(name);
        if has_room {
            self.blocked.insert(name.into(), blocked);
            self.may_rule.store(true, Ordering::Relaxed);
        }
        has_room
    }

    /// Ends the block of a key that was denied.
    pub(crate) fn unblock(&self, name: &[u8]) {
        self.blocked.remove(name);
    }

    // ---- changes -----------------------------------------------------------------------------

    /// Sets what holds for some keys, or for the limit. False if the limit does not have what the setting names, or cannot keep
    /// it: then it is as if nothing were set.
    pub(super) fn set(
        &self,
        subject: Subject,
        setting: Setting,
        until: Timestamp,
        hashed: Option<Box<[u8]>>,
        definition: &Definition,
    ) -> bool {
        let (held, is_known) = match setting {
            Setting::Keys(ruling) => {
                let ruling = in_force(&ruling, definition);
                (ruling.map(|ruling| HeldRuling { ruling, until }), ruling.is_some())
            }
            Setting::Limit(switch) => {
                self.set_switch(switch);
                return true;
            }
            Setting::Removed => (None, true),
        };
        self.may_rule.fetch_or(held.is_some(), Ordering::Relaxed);
        if let Some(HeldRuling { ruling: InForce::Plan(info), .. }) = held {
            self.note(info);
        }
        match (subject, held) {
            (Subject::Limit, _) => self.set_switch(definition.limit.switch),
            (Subject::Key(name), held) => {
                put(&self.keys, name.into_boxed_slice(), held);
                if let Some(hashed) = hashed {
                    put(&self.hashed, hashed, held);
                }
            }
            (Subject::Prefix(prefix), held) => {
                let length = prefix.len();
                self.prefixes.set(prefix, length, held);
            }
            #[cfg(feature = "http")]
            (Subject::Network(network), held) => {
                self.networks.set(network, network.prefix_len(), held);
            }
        }
        is_known
    }

    pub(super) fn set_switch(&self, switch: Switch) {
        let place = Switch::ALL.iter().position(|other| *other == switch).unwrap_or_default();
        self.switch.store(place as u8, Ordering::Relaxed);
    }

    /// Forgets blocks that are over.
    pub(super) fn sweep(&self, now: Timestamp) {
        self.blocked.retain(|_, blocked| now < blocked.until);
    }
}

/// A ruling of a limit of this definition; `None` if that does not have what it names, or cannot keep it.
fn in_force(ruling: &Ruling, definition: &Definition) -> Option<InForce> {
    Some(match ruling {
        Ruling::Allow => InForce::Allow,
        Ruling::Block => InForce::Block,
        Ruling::Plan(name) => InForce::Plan(definition.plan(name)?),
        Ruling::Quota(quota) => InForce::Plan(definition.by_override(*quota).ok()?),
    })
}

impl<K: Eq + Hash, N: Ord + Copy> ByLength<K, N> {
    fn new() -> Self {
        Self { held: DashMap::new(), lengths: RwLock::default() }
    }

    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn set(&self, common: K, length: N, held: Option<HeldRuling>) {
        let was_there = match held {
            Some(held) => self.held.insert(common, held).is_some(),
            None => self.held.remove(&common).is_some(),
        };
        if was_there == held.is_some() {
            return;
        }
        let mut lengths = self.lengths.write().unwrap_or_else(PoisonError::into_inner);
        let count = lengths.entry(length).or_default();
        if was_there {
            *count -= 1;
        } else {
            *count += 1;
        }
        if *count == 0 {
            lengths.remove(&length);
        }
    }

    /// The one of the greatest length that is in force, where `held` says what there is of a length.
    fn find_longest(
        &self,
        held: impl Fn(&DashMap<K, HeldRuling>, N) -> Option<HeldRuling>,
        holds: impl Fn(&HeldRuling) -> bool,
    ) -> Option<HeldRuling> {
        let lengths = self.lengths.read().unwrap_or_else(PoisonError::into_inner);
        let mut longest = lengths.keys().rev().filter_map(|length| held(&self.held, *length));
        longest.find(|held| holds(held))
    }
}

fn put(keys: &DashMap<Box<[u8]>, HeldRuling>, name: Box<[u8]>, held: Option<HeldRuling>) {
    match held {
        Some(held) => drop(keys.insert(name, held)),
        None => drop(keys.remove(&name)),
    }
}

#[cfg(test)]
mod tests;
