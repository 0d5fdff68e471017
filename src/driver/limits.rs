//! The limits of a node: those that it was built with, and those that updates add.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::clock::TimeSource;
use super::definition::LimitParts;
use super::limit_state::LimitState;
use crate::bucket::{HashSeeds, KeyBudget, KeyHasher};
use crate::error::ConfigError;

/// The most limits that can be added to a limiter.
const ADDED_MAX: usize = 1000;

/// The limits of a node, by their numbers. A number stays that of its limit, also of one that was removed: callers and the store
/// may still have to do with it.
#[derive(Debug)]
pub(crate) struct Limits {
    places: Box<[OnceLock<Arc<LimitState>>]>,
    /// The number of each name, which a removed limit keeps. Each name is in it after its place was filled.
    numbers: RwLock<HashMap<Arc<str>, u32>>,
    /// All tables hash alike, so that a request of several limits hashes its key once.
    seeds: HashSeeds,
}

impl Limits {
    /// Places for `count` limits and for those that are added.
    pub(super) fn new(count: usize, seeds: HashSeeds) -> Self {
        let places = (0..count + ADDED_MAX).map(|_| OnceLock::new()).collect();
        Self { places, numbers: RwLock::default(), seeds }
    }

    /// Room for so many limits.
    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    /// All limits, removed ones included, in the order of their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<LimitState>> {
        self.places.iter().map_while(OnceLock::get)
    }

    /// The first `count` limits: the engine may not know of more yet.
    pub(super) fn first(&self, count: u32) -> impl Iterator<Item = &Arc<LimitState>> {
        self.all().take(count as usize)
    }

    /// Those that are not removed.
    pub(crate) fn present(&self) -> impl Iterator<Item = &Arc<LimitState>> {
        self.all().filter(|limit| !limit.is_removed())
    }

    /// The limit of this name, if there is one that is not removed.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnknownLimit`] tells the names that there are.
    pub(crate) fn named(&self, name: &str) -> Result<&Arc<LimitState>, ConfigError> {
        let present = self.ever_named(name).filter(|limit| !limit.is_removed());
        present.ok_or_else(|| ConfigError::UnknownLimit {
            name: name.to_owned(),
            known: self.names().join(", "),
        })
    }

    /// The names of those that are not removed.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.present().map(|limit| &*limit.name).collect()
    }

    /// The limit of this name, removed or not.
    pub(crate) fn ever_named(&self, name: &str) -> Option<&Arc<LimitState>> {
        let numbers = self.numbers.read().unwrap_or_else(PoisonError::into_inner);
        self.get(*numbers.get(name)?)
    }

    /// The limit of this number, if there is one.
    pub(crate) fn get(&self, index: u32) -> Option<&Arc<LimitState>> {
        self.places.get(index as usize)?.get()
    }

    /// Limits with the next numbers, each with an empty table: to be [added](Self::add) before others are made.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Limiter`] if there are too many, or no memory for their keys.
    pub(super) fn make(
        &self,
        limits: &[LimitParts<'_>],
        budget: &Arc<KeyBudget>,
        time: &TimeSource,
    ) -> Result<Vec<LimitState>, ConfigError> {
        let first = self.all().count();
        if first + limits.len() > self.places.len() {
            return Err(ConfigError::Limiter {
                field: "limits",
                value: (first + limits.len()).to_string(),
                reason: "no more than 1000 can be added to those that the limiter was built with, removed ones included: build another one",
            });
        }
        let no_memory = || ConfigError::Limiter {
            field: "max_keys",
            value: budget.max().to_string(),
            reason: "there is no memory for so many keys in each limit",
        };
        let state = |(parts, index): (&LimitParts<'_>, usize)| {
            let hasher = KeyHasher::new(self.seeds);
            LimitState::new(index as u32, parts, hasher, budget, time).ok_or_else(no_memory)
        };
        limits.iter().zip(first..).map(state).collect()
    }

    /// Adds limits that were made. One caller at a time.
    pub(crate) fn add(&self, limits: Vec<LimitState>) {
        let mut numbers = self.numbers.write().unwrap_or_else(PoisonError::into_inner);
        for limit in limits {
            let (name, index) = (limit.name.clone(), limit.index);
            self.places[index as usize].get_or_init(|| Arc::new(limit));
            numbers.insert(name, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::manual::ManualClock;
    use crate::limit::{Limit, NodeTerms};
    use crate::quota::Quota;

    #[test]
    fn limit_is_found_by_its_name_from_when_it_is_added_and_a_removed_one_where_those_count() {
        let time = TimeSource::Manual(ManualClock::new());
        let (budget, limits) = (Arc::new(KeyBudget::new(100, 2)), Limits::new(2, [1, 2]));
        let node_terms = NodeTerms { has_store: false, max_nodes: None, uncounted: 1 };
        let add = |names: &[&str]| {
            let added: Vec<Limit> =
                names.iter().map(|name| Limit::new(*name, Quota::per_second(1))).collect();
            let parts = |limit| LimitParts::new(limit, node_terms, None).unwrap();
            let parts: Vec<LimitParts<'_>> = added.iter().map(parts).collect();
            limits.add(limits.make(&parts, &budget, &time).unwrap());
        };
        let number = |name: &str| limits.named(name).ok().map(|limit| limit.index);
        add(&["a", "b"]);
        assert_eq!(["a", "b", "c"].map(number), [Some(0), Some(1), None]);
        add(&["c"]);
        limits.get(1).unwrap().set_removed(true);
        assert_eq!(["a", "b", "c"].map(number), [Some(0), None, Some(2)]);
        let known = "a, c".to_owned();
        let unknown = ConfigError::UnknownLimit { name: "b".to_owned(), known };
        assert_eq!(limits.named("b").err(), Some(unknown));
        assert_eq!(limits.ever_named("b").map(|limit| limit.index), Some(1));
    }
}
