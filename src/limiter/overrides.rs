//! Overrides: how they are set, and what they do to decisions.

use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{ActiveLimit, Handle, Limiter, Shared, Target};
use crate::decision::{Decision, Source};
use crate::driver::{OverrideQuery, Query};
use crate::key::{Key, KeyName};
use crate::overrides::{End, OVERRIDES_MAX, Override, OverrideError, Ruling, Subject, Switch};
use crate::store::overrides::Put;
use crate::time::Timestamp;

/// The overrides of a limiter's limits: of single keys, and of whole limits. Cheap to clone.
///
/// What one node sets holds on all that share its store: on the node itself as soon as the call returns, on the others
/// within some two seconds. Without a store it holds on this node. It holds for all modes of a limit. While the store is away,
/// what is known holds on; a store that lost its memory hears of it again from the nodes.
///
/// Cost: a call waits for one round trip; a node asks the store once a second what has changed. A limit that has overrides looks
/// each key up once more.
#[derive(Clone)]
pub struct Overrides {
    shared: Arc<Shared>,
}

impl fmt::Debug for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overrides").finish_non_exhaustive()
    }
}

impl Limiter {
    /// What holds for some keys instead of a limit's rule, and whether limits are enforced.
    pub fn overrides(&self) -> Overrides {
        Overrides { shared: self.shared.clone() }
    }
}

impl Overrides {
    /// Sets what holds for some keys of a limit, in place of what was set for them.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, nothing is set, a prefix is too long, there are
    /// [`OVERRIDES_MAX`] overrides, or the store did not take it.
    pub async fn set(&self, limit: &str, set: Override<'_>) -> Result<(), OverrideError> {
        let nothing = || OverrideError::NothingSet { limit: limit.to_owned() };
        let value = set.ruling().ok_or_else(nothing)?.name();
        let record = set.record(limit, &self.shared.secret)?;
        self.put(limit, record, value.as_bytes(), set.end()).await
    }

    /// Removes what was set for exactly these keys. What `removed` says of them does not matter.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, or the store did not take it.
    pub async fn remove(&self, limit: &str, removed: Override<'_>) -> Result<(), OverrideError> {
        let record = removed.record(limit, &self.shared.secret)?;
        self.put(limit, record, b"", End::Never).await
    }

    /// Switches a limit on, to shadow mode, or off.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, or the store did not take it.
    pub async fn switch(&self, limit: &str, switch: Switch) -> Result<(), OverrideError> {
        self.put(limit, Subject::Limit.record(limit), switch.name().as_bytes(), End::Never).await
    }

    /// Lets a limit be as it was [configured](crate::Limit::switch) again.
    ///
    /// # Errors
    ///
    /// [`OverrideError`]: the limit is not known, or the store did not take it.
    pub async fn switch_back(&self, limit: &str) -> Result<(), OverrideError> {
        self.put(limit, Subject::Limit.record(limit), b"", End::Never).await
    }

    async fn put(
        &self,
        limit: &str,
        name: Vec<u8>,
        value: &[u8],
        end: End,
    ) -> Result<(), OverrideError> {
        let limits = &self.shared.node.limits;
        if !limits.iter().any(|known| *known.name == *limit) {
            let known: Vec<&str> = limits.iter().map(|limit| &*limit.name).collect();
            let (name, known) = (limit.to_owned(), known.join(", "));
            return Err(OverrideError::UnknownLimit { name, known });
        }
        let put = Put { name, value: value.to_vec(), end, is_restored: false };
        let (done, outcome) = oneshot::channel();
        let query = Query::Override(OverrideQuery { put, done });
        self.shared.driver.queries.send(query).map_err(|_| OverrideError::Ended)?;
        outcome.await.unwrap_or(Err(OverrideError::Ended))
    }
}

/// A key as overrides are looked up for it.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    /// What the limiter knows it by.
    pub(super) name: &'a [u8],
    /// Its bytes before they were hashed.
    pub(super) plain: &'a [u8],
}

impl ActiveLimit {
    /// Whether a decision has to look for overrides.
    #[inline(always)]
    pub(super) fn has_overrides(&self) -> bool {
        self.state.overrides.is_any()
    }

    /// What holds for a key instead of the limit's rule.
    pub(super) fn override_of<K: Key + ?Sized>(
        &self,
        key: &K,
        name: &[u8],
        cost: u32,
    ) -> Option<Decision> {
        if !self.has_overrides() {
            return None;
        }
        let plain = self.plain_of(key);
        self.overridden(Asked { name, plain: plain.as_deref().unwrap_or(name) }, cost)
    }

    /// The bytes of a key before it is hashed, where they matter.
    pub(super) fn plain_of<'k, K: Key + ?Sized>(&self, key: &'k K) -> Option<KeyName<'k>> {
        self.state.overrides.has_patterns().then(|| self.shared.secret.plain(key))
    }

    pub(super) fn overridden(&self, asked: Asked<'_>, cost: u32) -> Option<Decision> {
        let (overrides, now) = (&self.state.overrides, self.state.clock.now());
        let (ruling, until) = if overrides.switch() == Switch::Off {
            (Ruling::Allow, Timestamp::NEVER)
        } else {
            let held = overrides.find(asked.name, asked.plain, now)?;
            (held.ruling, held.until)
        };
        if cost > 0 {
            overrides.count(ruling == Ruling::Allow);
        }
        let source = Source::Override(until);
        let decision = self.decision(ruling == Ruling::Allow, true, source, cost, now);
        Some(self.in_shadow(decision))
    }

    /// Decides by overrides, or by the limit's rule.
    #[cold]
    pub(super) fn decide_with_overrides<K: Key + ?Sized>(
        &self,
        key: &K,
        name: &[u8],
        cost: u32,
    ) -> Decision {
        let by_rule = || self.after_rule(name, cost, self.decide(Target::key(name), cost));
        self.override_of(key, name, cost).unwrap_or_else(by_rule)
    }

    /// What becomes of a decision that the limit's rule made.
    pub(super) fn after_rule(&self, name: &[u8], cost: u32, decision: Decision) -> Decision {
        if !self.has_overrides() {
            return decision;
        }
        if decision.is_denied() && decision.sure && cost > 0 {
            self.state.overrides.block(name, self.state.clock.now(), OVERRIDES_MAX);
        }
        self.in_shadow(decision)
    }

    /// Whether the limit is in shadow mode.
    pub(super) fn is_shadow(&self) -> bool {
        self.has_overrides() && self.state.overrides.switch() == Switch::Shadow
    }

    /// In shadow mode nothing is denied.
    fn in_shadow(&self, decision: Decision) -> Decision {
        if !self.is_shadow() {
            return decision;
        }
        let (sure, shadow_denied) = (decision.sure, decision.is_denied());
        Decision { allowed: true, sure, shadow_denied, ..decision.after_delay(true) }
    }
}

impl Handle {
    /// Decides by overrides, or by the limit's rule.
    #[cold]
    pub(super) fn decide_with_overrides(&self, cost: u32) -> Decision {
        let by_rule = || self.after_rule(cost, self.limit.decide(self.target(), cost));
        self.overridden(cost).unwrap_or_else(by_rule)
    }

    /// What holds for the key instead of the limit's rule.
    pub(super) fn overridden(&self, cost: u32) -> Option<Decision> {
        if !self.limit.has_overrides() {
            return None;
        }
        let name = &*self.key.key;
        let plain = self.plain.as_deref().unwrap_or(name);
        self.limit.overridden(Asked { name, plain }, cost)
    }

    pub(super) fn after_rule(&self, cost: u32, decision: Decision) -> Decision {
        self.limit.after_rule(&self.key.key, cost, decision)
    }
}
