//! Limits that decide together about a request: all of them are spent from, or none.

use std::borrow::Cow;
use std::time::Duration;

use smallvec::SmallVec;

use super::overrides::LookedUp;
use super::settle::Allowed;
use super::{ActiveLimit, Target};
use crate::algorithm::Rule;
use crate::decision::{Decision, Source};
use crate::time::Timestamp;

/// Most requests have at most so many limits.
pub(super) const USUAL: usize = 4;

/// How far a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Not at all, unless the store decides about it.
    None,
    /// For the store, where this node is not sure.
    Store,
    /// For its slot too.
    Slot,
}

/// What one limit is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) limit: &'a ActiveLimit,
    pub(crate) key: &'a [u8],
    /// The key before it was hashed, if that matters.
    pub(crate) plain: Option<&'a [u8]>,
    pub(crate) cost: u32,
    pub(crate) patience: Patience,
}

/// When a part is decided: what goes back by itself or at once is taken first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Here,
    Store,
    Slot,
}

impl<'a> Part<'a> {
    fn target(&self) -> Target<'a> {
        Target::key(self.key)
    }

    fn asked_at(&self) -> Timestamp {
        self.limit.state.clock.now()
    }

    fn stage(&self) -> Stage {
        match self.limit.rule() {
            // Its slots pass, and mostly cannot be given back.
            Rule::LeakyBucket(_) => Stage::Slot,
            _ if self.limit.is_decided_by_store() => Stage::Store,
            _ => Stage::Here,
        }
    }

    /// Whether the request is held until its slot.
    fn is_held(&self) -> bool {
        self.patience == Patience::Slot && self.stage() == Stage::Slot
    }

    /// How the key stands, as a decision about the cost that spends nothing. `None` if only the store knows.
    pub(crate) fn look(&self) -> Option<Decision> {
        if let Some(decision) = self.overridden(0) {
            return Some(Decision { cost: self.cost.max(1), ..decision });
        }
        if self.limit.is_decided_by_store() {
            return None;
        }
        let limit = self.planned();
        let look = if self.is_held() {
            limit.decide_within(self.target(), 0, u64::MAX)
        } else {
            limit.decide(self.target(), 0)
        };
        // What nodes hold elsewhere is not known for sure, and a slot is for a request of any cost.
        let is_counted = matches!(look.source, Source::Local(_)) && self.stage() != Stage::Slot;
        let lacks = is_counted && look.remaining() < self.cost.into();
        let look = Decision { allowed: look.allowed && !lacks, cost: self.cost.max(1), ..look };
        Some(look.shadowed(self.limit.is_shadow()))
    }

    /// What holds for the key instead of the limit's rule.
    fn overridden(&self, cost: u32) -> Option<Decision> {
        self.limit.overridden(self.looked_up(), cost)
    }

    fn looked_up(&self) -> LookedUp<'a> {
        LookedUp { name: self.key, plain: self.plain.unwrap_or(self.key) }
    }

    /// The limit under the plan that an override gives the key, or as it is.
    fn planned(&self) -> Cow<'a, ActiveLimit> {
        self.limit.planned(self.looked_up())
    }

    /// Decides without waiting, where the store does not decide.
    fn decide(&self) -> Decision {
        let by_rule = || {
            let decision = self.planned().decide(self.target(), self.cost);
            self.limit.after_rule(self.key, self.cost, decision)
        };
        self.overridden(self.cost).unwrap_or_else(by_rule)
    }

    /// Decides, unless the request has to wait.
    pub(super) fn decide_if_no_wait(&self) -> Option<Decision> {
        self.overridden(self.cost).or_else(|| {
            let decision = self.planned().decide_if_no_wait(self.key, self.cost)?;
            Some(self.limit.after_rule(self.key, self.cost, decision))
        })
    }

    /// Decides at once what this node decides, unless the store is to be asked.
    fn decide_at_once(&self) -> Option<Decision> {
        match self.patience {
            Patience::None if !self.limit.is_decided_by_store() => Some(self.decide()),
            _ => self.decide_if_no_wait(),
        }
    }

    /// Whether the request has to wait, where this is what a look says.
    #[cfg(feature = "tower")]
    fn has_to_wait(&self, look: Option<Glance>) -> bool {
        let Some(look) = look else { return true };
        let is_held = || self.is_held() && self.planned().decide(self.target(), 0).is_denied();
        let asks_store = || !look.is_sure || self.limit.slots().is_some();
        self.patience != Patience::None && (asks_store() || is_held())
    }

    /// Decides as far as the request may wait.
    pub(crate) async fn ask(&self) -> Decision {
        if let Some(decision) = self.overridden(self.cost) {
            return decision;
        }
        let limit = self.planned();
        let queue = limit.queue();
        let decision = match self.patience {
            Patience::Slot if queue > Duration::ZERO && !limit.is_shadow() => {
                limit.wait(self.key, self.cost, queue).await
            }
            Patience::None if !limit.is_decided_by_store() => {
                limit.decide(self.target(), self.cost)
            }
            _ => limit.decide_or_ask(self.target(), self.cost).await,
        };
        limit.after_rule(self.key, self.cost, decision)
    }
}

/// What matters of a look before anything is taken.
#[derive(Clone, Copy)]
struct Glance {
    is_sure: bool,
    /// How long to wait where it denies.
    denied_for: Option<Duration>,
}

impl From<Decision> for Glance {
    fn from(look: Decision) -> Self {
        let denied_for = look.is_denied().then(|| look.retry_after());
        Self { is_sure: look.is_sure(), denied_for }
    }
}

/// What several limits say of a request.
pub(crate) enum Together {
    /// All were charged: what each of them allowed, in order.
    Allowed(SmallVec<[Allowed; USUAL]>),
    Denied(TogetherDenied),
}

/// None was charged.
#[allow(dead_code, reason = "layers and the service tell of each limit")]
pub(crate) struct TogetherDenied {
    /// The place of the part with the longest wait, and its decision.
    pub(crate) by: usize,
    pub(crate) decision: Decision,
    /// How each part stands, as far as this node knows.
    pub(crate) looks: Looks,
}

impl Together {
    /// The decision of the limit that denies, or else of the one with the fewest tokens left. `None` of no limits.
    pub(super) fn decision(self) -> Option<Decision> {
        match self {
            Self::Allowed(all) => {
                all.into_iter().map(|allowed| allowed.decision).reduce(fewer_left)
            }
            Self::Denied(denied) => Some(denied.decision),
        }
    }
}

/// What was spent of several limits. Unless all of them allow the request, it goes back, the last first.
struct Takes<'a, 'k> {
    parts: &'a [Part<'k>],
    taken: SmallVec<[(usize, Allowed); USUAL]>,
    /// Which parts were decided.
    is_decided: SmallVec<[bool; USUAL]>,
    /// The first denial.
    denied: Option<(usize, Decision)>,
}

/// How parts stand, as far as this node knows.
type Looks = SmallVec<[Option<Decision>; USUAL]>;

/// What matters of that before anything is taken.
type Glances = SmallVec<[Option<Glance>; USUAL]>;

fn glances(parts: &[Part<'_>]) -> Glances {
    parts.iter().map(|part| part.look().map(Glance::from)).collect()
}

impl<'a, 'k> Takes<'a, 'k> {
    fn new(parts: &'a [Part<'k>]) -> Self {
        let is_decided = SmallVec::from_elem(false, parts.len());
        Self { parts, taken: SmallVec::with_capacity(parts.len()), is_decided, denied: None }
    }

    /// Decides about those that are still to be decided, stage by stage, until one is denied. `None` if one has to wait.
    fn take_each(
        &mut self,
        stages: &[Stage],
        decide: impl Fn(&Part<'k>) -> Option<Decision>,
    ) -> Option<()> {
        let parts = self.parts;
        for stage in stages {
            for (index, part) in parts.iter().enumerate() {
                if self.denied.is_none() && self.is_open(index, *stage) {
                    let asked = part.asked_at();
                    self.add(index, asked, decide(part)?);
                }
            }
        }
        Some(())
    }

    /// Decides first about the part of which a look says that it denies, and longest: for sure, if the store could be asked.
    fn begin(parts: &'a [Part<'k>], looks: &Glances) -> Self {
        let mut takes = Self::new(parts);
        let denial = |((index, part), look): ((usize, &Part<'_>), &Option<Glance>)| {
            let Glance { is_sure, denied_for } = (*look)?;
            let is_known = is_sure || part.patience == Patience::None;
            // A request that is held must not take its slot yet.
            denied_for.filter(|_| is_known && !part.is_held()).map(|wait| (index, wait))
        };
        let denials = parts.iter().enumerate().zip(looks).filter_map(denial);
        if let Some((index, _)) = denials.max_by_key(|(_, wait)| *wait) {
            let (part, asked) = (&parts[index], parts[index].asked_at());
            // Decided, so that it counts. By now it may be allowed, or no override holds any more: then the store is asked.
            let decision = if part.limit.is_decided_by_store() {
                part.overridden(part.cost)
            } else {
                Some(part.decide())
            };
            if let Some(decision) = decision {
                takes.add(index, asked, decision);
            }
        }
        takes
    }

    fn add(&mut self, index: usize, asked: Timestamp, decision: Decision) {
        self.is_decided[index] = true;
        if decision.is_denied() {
            self.denied.get_or_insert((index, decision));
        } else {
            self.taken.push((index, Allowed { decision, asked }));
        }
    }

    /// Whether a part is of this stage and is still to be decided.
    fn is_open(&self, index: usize, stage: Stage) -> bool {
        !self.is_decided[index] && self.parts[index].stage() == stage
    }

    /// What all of them say.
    fn end(mut self) -> Together {
        let Some((mut by, mut decision)) = self.denied else {
            let mut taken = std::mem::take(&mut self.taken);
            taken.sort_unstable_by_key(|(index, _)| *index);
            return Together::Allowed(taken.into_iter().map(|(_, allowed)| allowed).collect());
        };
        // Before anybody looks again.
        self.give_back();
        let mut looks: Looks = self.parts.iter().map(Part::look).collect();
        looks[by] = Some(decision);
        for (index, look) in looks.iter().enumerate() {
            if let Some(look) = look
                && look.is_denied()
                && look.is_sure()
                && look.retry_after() > decision.retry_after()
            {
                (by, decision) = (index, *look);
            }
        }
        Together::Denied(TogetherDenied { by, decision, looks })
    }

    fn give_back(&mut self) {
        for (index, allowed) in std::mem::take(&mut self.taken).iter().rev() {
            let part = &self.parts[*index];
            part.limit.give_back(part.key, allowed, part.cost);
        }
    }
}

impl Drop for Takes<'_, '_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

pub(super) fn fewer_left(one: Decision, other: Decision) -> Decision {
    if other.remaining() < one.remaining() { other } else { one }
}

/// Decides about parts of which the store decides none, without waiting. Slots are taken last.
pub(super) fn decide_all(parts: &[Part<'_>]) -> Together {
    let mut takes = Takes::begin(parts, &glances(parts));
    // None has to wait.
    let _ = takes.take_each(&[Stage::Here, Stage::Slot], |part| Some(part.decide()));
    takes.end()
}

/// Decides at once, if the request has nothing to wait for. `None`, and nothing is spent, if it has: [ask](ask_all).
#[cfg(feature = "tower")]
pub(crate) fn decide_if_sure(parts: &[Part<'_>]) -> Option<Together> {
    let looks = glances(parts);
    let mut takes = Takes::begin(parts, &looks);
    let mut both = parts.iter().zip(&looks);
    if takes.denied.is_none() && both.any(|(part, look)| part.has_to_wait(*look)) {
        return None;
    }
    takes.take_each(&[Stage::Here, Stage::Store, Stage::Slot], Part::decide_at_once)?;
    Some(takes.end())
}

/// Decides, and asks the store where this node is not sure, about all of these at once, before anything else is taken; then
/// about exact limits, one after the other.
pub(crate) async fn ask_all(parts: &[Part<'_>]) -> Together {
    let looks = glances(parts);
    let mut takes = Takes::begin(parts, &looks);
    let mut asked = SmallVec::<[_; USUAL]>::new();
    for (index, part) in parts.iter().enumerate() {
        let is_unsure = looks[index].is_some_and(|look| !look.is_sure);
        let may_ask = is_unsure && part.patience != Patience::None;
        if may_ask && takes.denied.is_none() && takes.is_open(index, Stage::Here) {
            let (handle, now) = (part.planned().hold(part.key), part.asked_at());
            let answer = handle.send_query(part.cost);
            asked.push((index, now, part.cost, handle, answer));
        }
    }
    for (index, now, cost, handle, answer) in asked {
        let decision = handle.after_rule(cost, handle.answered(answer, cost).await);
        takes.add(index, now, decision);
    }
    for stage in [Stage::Here, Stage::Store, Stage::Slot] {
        for (index, part) in parts.iter().enumerate() {
            if takes.denied.is_none() && takes.is_open(index, stage) {
                let asked = part.asked_at();
                let at_once = if stage == Stage::Here { part.decide_at_once() } else { None };
                let decision = match at_once {
                    Some(decision) => decision,
                    None => part.ask().await,
                };
                takes.add(index, asked, decision);
            }
        }
    }
    takes.end()
}
