//! Limits that decide together about a request: all of them are spent from, or none.

use smallvec::SmallVec;

use self::part::{Glance, Part, Patience, Stage, USUAL, fewer_left};
use super::settle::Allowed;
use crate::decision::Decision;
use crate::time::Timestamp;

pub(crate) mod part;

/// What several limits say of a request.
pub(crate) enum Together {
    /// All were charged, in order.
    Allowed(Taken),
    Denied(TogetherDenied),
}

/// For each part that was taken: its place, and what it was allowed.
pub(crate) type Taken = SmallVec<[(usize, Allowed); USUAL]>;

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
                all.into_iter().map(|(_, allowed)| allowed.decision).reduce(fewer_left)
            }
            Self::Denied(denied) => Some(denied.decision),
        }
    }
}

/// How many parts one reading of the clock serves: for about a microsecond.
const PARTS_PER_READING: usize = 32;

/// What was spent of several limits. Unless all of them allow the request, it goes back, the last first.
struct Takes<'a, 'k> {
    parts: &'a [Part<'k>],
    taken: Taken,
    /// The stage of each part that is still to be decided.
    open: SmallVec<[Option<Stage>; USUAL]>,
    /// The first denial.
    denied: Option<(usize, Decision)>,
}

/// How parts stand, as far as this node knows.
type Looks = SmallVec<[Option<Decision>; USUAL]>;

/// What matters of that before anything is taken.
type Glances = SmallVec<[Option<Glance>; USUAL]>;

impl<'a, 'k> Takes<'a, 'k> {
    fn new(parts: &'a [Part<'k>]) -> Self {
        let open = parts.iter().map(|part| Some(part.stage())).collect();
        Self { parts, taken: SmallVec::with_capacity(parts.len()), open, denied: None }
    }

    /// Takes all parts, if this node surely has `tokens` for each. True: the request is decided, and `denied` is set if a part was
    /// denied after all. False: it is not decided, and what was taken stays taken.
    fn try_take_all(&mut self, tokens: u32) -> bool {
        let parts = self.parts;
        let Some(mut read_by) = parts.first() else { return true };
        if !parts.iter().all(|part| part.surely_fits(tokens)) {
            return false;
        }
        let mut time = read_by.reading();
        for (index, part) in parts.iter().enumerate() {
            let is_old = index > 0 && index % PARTS_PER_READING == 0;
            if is_old || !part.has_clock_of(read_by) {
                (read_by, time) = (part, part.reading());
            }
            let Some(decision) = part.take_if_sure(time) else { return false };
            self.add(index, time.cached, decision);
            if self.denied.is_some() {
                break;
            }
        }
        true
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

    /// Looks at the parts, and decides first about the one with the longest denial that is known: for sure, if the store could
    /// be asked.
    fn look(&mut self) -> Glances {
        let parts = self.parts;
        let glances: Glances = parts.iter().map(|part| part.look().map(Glance::from)).collect();
        let denial = |((index, part), glance): ((usize, &Part<'_>), &Option<Glance>)| {
            let Glance { is_sure, denied_for } = (*glance)?;
            let is_known = is_sure || part.patience == Patience::None;
            // A request that is held must not take its slot yet.
            let is_first = is_known && !part.is_held() && self.open[index].is_some();
            denied_for.filter(|_| is_first).map(|wait| (index, wait))
        };
        let denials = parts.iter().enumerate().zip(&glances).filter_map(denial);
        if let Some((index, _)) = denials.max_by_key(|(_, wait)| *wait) {
            let (part, asked) = (&parts[index], parts[index].asked_at());
            // Decided, so that it counts. By now it may be allowed, or no override holds any more: then the store is asked.
            let decision = if part.limit.is_decided_by_store() {
                part.overridden(part.cost)
            } else {
                Some(part.decide())
            };
            if let Some(decision) = decision {
                self.add(index, asked, decision);
            }
        }
        glances
    }

    #[inline(always)]
    fn add(&mut self, index: usize, asked: Timestamp, mut decision: Decision) {
        self.open[index] = None;
        // A part that costs nothing is looked at: it denies nothing that is not known for sure.
        decision.allowed |= self.parts[index].cost == 0 && !decision.sure;
        if decision.is_denied() {
            self.denied.get_or_insert((index, decision));
        } else {
            self.taken.push((index, Allowed { decision, asked }));
        }
    }

    /// Whether a part is of this stage and is still to be decided.
    fn is_open(&self, index: usize, stage: Stage) -> bool {
        self.open[index] == Some(stage)
    }

    /// What all of them say.
    fn end(mut self) -> Together {
        let Some((mut by, mut decision)) = self.denied else {
            let mut taken = std::mem::take(&mut self.taken);
            taken.sort_unstable_by_key(|(index, _)| *index);
            return Together::Allowed(taken);
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

/// Takes all parts, if this node surely has as many tokens for each as there are parts: so one key may come more than once.
/// `None`: nothing is spent. The tokens do not suffice, or another request took them meanwhile: [ask](ask_all). A part that lost such
/// a race is counted as denied, and perhaps again by `ask_all`.
#[cfg(feature = "server")]
pub(crate) fn try_take_all(parts: &[Part<'_>]) -> Option<Taken> {
    let (mut takes, tokens) = (Takes::new(parts), u32::try_from(parts.len()).ok()?);
    let are_taken = takes.try_take_all(tokens) && takes.denied.is_none();
    are_taken.then(|| std::mem::take(&mut takes.taken))
}

/// Decides about parts of which the store decides none, without waiting. Slots are taken last.
pub(super) fn decide_all(parts: &[Part<'_>]) -> Together {
    let mut takes = Takes::new(parts);
    if !takes.try_take_all(1) {
        takes.look();
        // None has to wait.
        let _ = takes.take_each(&[Stage::Here, Stage::Slot], |part| Some(part.decide()));
    }
    takes.end()
}

/// Decides at once, if the request has nothing to wait for. `None`, and nothing is spent, if it has: [ask](ask_all).
#[cfg(feature = "tower")]
pub(crate) fn decide_if_sure(parts: &[Part<'_>]) -> Option<Together> {
    let mut takes = Takes::new(parts);
    if !takes.try_take_all(1) {
        let glances = takes.look();
        let mut both = parts.iter().zip(&glances);
        if takes.denied.is_none() && both.any(|(part, glance)| part.has_to_wait(*glance)) {
            return None;
        }
        takes.take_each(&[Stage::Here, Stage::Store, Stage::Slot], Part::decide_at_once)?;
    }
    Some(takes.end())
}

/// Decides, and asks the store where this node is not sure: first, and at once, about all parts of which a glance says so (it
/// tells about one token); then about those that turn out to be so, about exact limits and about slots, one after the other.
pub(crate) async fn ask_all(parts: &[Part<'_>]) -> Together {
    let mut takes = Takes::new(parts);
    if !takes.try_take_all(1) {
        ask_rest(&mut takes).await;
    }
    takes.end()
}

async fn ask_rest(takes: &mut Takes<'_, '_>) {
    let parts = takes.parts;
    let glances = takes.look();
    let mut asked = SmallVec::<[_; USUAL]>::new();
    for (index, (part, glance)) in parts.iter().zip(&glances).enumerate() {
        let is_unsure = glance.is_some_and(|glance| !glance.is_sure);
        let may_ask = is_unsure && part.cost > 0 && part.patience != Patience::None;
        if may_ask && takes.denied.is_none() && takes.is_open(index, Stage::Here) {
            let (handle, now) = (part.asking().hold(part.key), part.asked_at());
            let answer = handle.send_query(part.cost);
            asked.push((index, now, part.cost, handle, answer));
        }
    }
    for (index, now, cost, handle, answer) in asked {
        let decision = handle.after_rule(cost, handle.answered(answer, cost).await);
        takes.add(index, now, decision);
    }
    // Up to the first that has to wait: mostly all of them.
    let _ = takes.take_each(&[Stage::Here], Part::decide_at_once);
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
}
