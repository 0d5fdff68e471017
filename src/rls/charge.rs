//! Charges the descriptors of a request that have limits, and tells how each stands.

use std::cmp::Ordering;
use std::hash::BuildHasher;
use std::iter;
use std::time::Duration;

use foldhash::fast::FixedState;
use tokio::time::Instant;

use super::limited::{Limited, Outcome, patience, status};
use super::messages::{Code, Refusal, Shadow, Status};
use crate::config::ChargeRule;
use crate::decision::{Decision, RETRY_MIN_US};
use crate::limit::Mode;
use crate::limiter::together::part::{Part, Patience};
use crate::limiter::together::{Together, ask_all, try_take_all};

/// What the descriptors of a request match.
pub(super) struct Matches<'a> {
    /// How each of them stands; those that have a limit do not yet.
    pub(super) statuses: Vec<Status>,
    /// Those of them that have a limit.
    pub(super) limited: Vec<Option<Limited<'a>>>,
}

impl Matches<'_> {
    /// No descriptor has a limit yet.
    pub(super) fn new(descriptors: usize) -> Self {
        let limited = iter::repeat_with(|| None).take(descriptors).collect();
        Self { statuses: vec![Status::default(); descriptors], limited }
    }
}

/// A descriptor that is to be charged.
struct ToCharge<'r, 'a> {
    /// The limit's place in the limiter, and the hash of the key. They are charged in this order: so requests of the same keys meet
    /// at the same one first, and one of them gets on.
    order: (u32, u64),
    limited: &'r Limited<'a>,
}

impl<'r, 'a> ToCharge<'r, 'a> {
    #[inline(always)]
    fn new(limited: &'r Limited<'a>) -> Self {
        let hash = FixedState::default().hash_one(&*limited.key);
        Self { order: (limited.limit.place(), hash), limited }
    }

    fn has_key_of(&self, other: &Self) -> bool {
        self.order == other.order && self.limited.key == other.limited.key
    }

    /// Those of one key come together, in the order of the request.
    fn compare(&self, other: &Self) -> Ordering {
        let of_key = || self.limited.key.cmp(&other.limited.key);
        let by_key = self.order.cmp(&other.order).then_with(of_key);
        by_key.then(self.limited.index.cmp(&other.limited.index))
    }
}

/// What is charged of one key.
struct Charge<'r, 'a> {
    limited: &'r Limited<'a>,
    cost: u32,
    /// Whether the limit can ever admit it, or does not decide.
    is_possible: bool,
    /// Those that have the key.
    descriptors: &'r [ToCharge<'r, 'a>],
}

impl<'r, 'a> Charge<'r, 'a> {
    #[inline(always)]
    fn new(descriptors: &'r [ToCharge<'r, 'a>]) -> Self {
        let limited = descriptors[0].limited;
        let cost = descriptors.iter().fold(0, |cost: u32, it| cost.saturating_add(it.limited.hits));
        let is_possible = limited.part(cost, Patience::None).validate_cost().is_ok();
        Self { limited, cost, is_possible, descriptors }
    }

    /// How the key stands as far as this node knows, and whether it is over its limit for sure. Nothing is told of a key of which
    /// the node has no view.
    fn outcome_of_look<'d>(&self, look: Option<&'d Decision>) -> Outcome<'d> {
        // By the store's last word it lacks tokens yet, or it surely does.
        let is_known = |it: &Decision| {
            let lasts = it.retry_after() > Duration::from_micros(RETRY_MIN_US);
            it.is_sure() || it.view_age().is_some() && lasts
        };
        let is_over = !self.is_possible || look.is_some_and(|it| it.is_denied() && is_known(it));
        let decision = look.filter(|it| it.is_sure() || it.view_age().is_some());
        Outcome { is_over, is_charged: false, decision }
    }

    /// Whether by the store's word so much would be denied.
    fn lacks(&self, look: Decision) -> bool {
        let is_free = look.took_nothing() && look.is_allowed();
        !is_free && (look.is_denied() || look.remaining() < u64::from(self.cost))
    }

    /// Writes how it ended into the statuses of its descriptors.
    fn tell(&self, outcome: Outcome<'_>, statuses: &mut [Status]) {
        for charged in self.descriptors {
            statuses[charged.limited.index] = status(&self.limited.limit, outcome);
        }
    }

    /// Writes that it was allowed. Each of the descriptors tells what was left after it.
    fn tell_allowed(&self, decision: &Decision, statuses: &mut [Status]) {
        self.tell(Outcome::allowed(decision), statuses);
        let mut later = if decision.took_nothing() { 0 } else { self.cost };
        for charged in self.descriptors {
            later = later.saturating_sub(charged.limited.hits);
            let Status { limit_remaining, burst, .. } = &mut statuses[charged.limited.index];
            if later > 0 {
                *limit_remaining = limit_remaining.saturating_add(later).min(*burst);
            }
        }
    }

    /// Whether the store charges it in any case. It is not asked to allow it: what it answered too late would be charged twice.
    /// In an outage this node's share is asked.
    fn is_charged_unasked(&self) -> bool {
        let Limited { limit, charge_rule, .. } = self.limited;
        *charge_rule == ChargeRule::InFull && limit.mode() == Mode::Exact && !limit.is_on_policy()
    }

    /// False if it is over its limit, by a look before it is charged. A limit in shadow mode keeps no other from being charged.
    async fn charge_unasked(
        &self,
        owed: Owed<'_, '_, '_>,
        deadline: Option<Instant>,
        statuses: &mut [Status],
    ) -> bool {
        let decision = self.limited.part(0, patience(deadline)).ask().await;
        let is_over = !self.is_possible || self.lacks(decision);
        self.tell(Outcome { is_over, is_charged: !is_over, decision: Some(&decision) }, statuses);
        drop(owed);
        statuses[self.limited.index].code == Code::Ok
    }

    /// Charges what its limit did not allow, if it is charged in any case.
    fn charge_rest(&self, statuses: &[Status]) {
        let Limited { index, charge_rule, .. } = self.limited;
        let Status { is_charged, shadow, .. } = statuses[*index];
        if *charge_rule == ChargeRule::InFull && (!is_charged || shadow == Shadow::Denied) {
            self.charge_in_full();
        }
    }

    fn charge_in_full(&self) {
        let Limited { limit, key, plain, .. } = self.limited;
        limit.charge_in_full(key, plain.as_deref(), self.cost);
    }
}

/// A charge that is made once this is dropped: also if the caller leaves before.
struct Owed<'c, 'r, 'a>(&'c Charge<'r, 'a>);

impl Drop for Owed<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.charge_in_full();
    }
}

/// Charges the limits of a request, all of them or none but those that are always charged, and tells how each descriptor stands.
pub(super) async fn charged(
    matches: Matches<'_>,
    deadline: Option<Instant>,
) -> Result<Vec<Status>, Refusal> {
    let Matches { mut statuses, limited } = matches;
    if charge_here(&limited, &mut statuses) {
        return Ok(statuses);
    }
    // In a box, so that the future of a request that never waits stays small.
    Box::pin(charged_in_order(Matches { statuses, limited }, deadline)).await
}

/// Does the same for every request, also with looks, hits that go back, limits that are always charged, and limits of which the
/// store is asked.
async fn charged_in_order(
    matches: Matches<'_>,
    deadline: Option<Instant>,
) -> Result<Vec<Status>, Refusal> {
    let Matches { mut statuses, limited } = matches;
    give_back(&limited)?;
    // All together wait no longer than one of them would.
    let max_wait = limited.iter().flatten().map(|limited| limited.limit.max_wait()).max();
    let longest = max_wait.and_then(|max_wait| Instant::now().checked_add(max_wait));
    let deadline = deadline.into_iter().chain(longest).min();
    let sorted = sorted(&limited);
    let mut charges = charges(&sorted);
    let always =
        charges.extract_if(.., |charge| charge.limited.charge_rule != ChargeRule::Together);
    let always: Vec<Charge<'_, '_>> = always.collect();
    // Before the first wait: who leaves is charged for all of them.
    let owed = |charge| Charge::is_charged_unasked(charge).then(|| Owed(charge));
    let owed: Vec<Option<Owed<'_, '_, '_>>> = always.iter().map(owed).collect();
    for limited in limited.iter().flatten().filter(|limited| !limited.has_hits_to_charge()) {
        statuses[limited.index] = limited.status(deadline).await;
    }
    let mut is_over = statuses.iter().any(|status| status.code == Code::OverLimit);
    for (charge, owed) in always.iter().zip(owed) {
        if let Some(owed) = owed {
            is_over |= !charge.charge_unasked(owed, deadline, &mut statuses).await;
            continue;
        }
        is_over |= !charge_all(std::slice::from_ref(charge), deadline, &mut statuses).await;
        charge.charge_rest(&statuses);
    }
    if is_over {
        tell_looks(&charges, &mut statuses);
    } else {
        charge_all(&charges, deadline, &mut statuses).await;
    }
    Ok(statuses)
}

/// Charges one hit to each descriptor, in the order of the request, if this node surely has enough tokens of each key. Otherwise it
/// charges nothing and returns false. So it does if a descriptor is denied, costs more or less than one hit, or is always charged.
///
/// Requests that come at the same moment, and name the same keys in different orders, can deny each other the last tokens.
fn charge_here(limited: &[Option<Limited<'_>>], statuses: &mut [Status]) -> bool {
    let all = || limited.iter().flatten();
    let is_plain =
        |it: &Limited<'_>| it.has_hits_to_charge() && it.charge_rule == ChargeRule::Together;
    if statuses.iter().any(|status| status.code == Code::OverLimit) || !all().all(is_plain) {
        return false;
    }
    let mut parts = Vec::with_capacity(limited.len());
    for limited in all() {
        parts.push(limited.part(limited.hits, Patience::None));
    }
    let Some(taken) = try_take_all(&parts) else { return false };
    for (limited, (_, allowed)) in all().zip(&taken) {
        statuses[limited.index] = status(&limited.limit, Outcome::allowed(&allowed.decision));
    }
    true
}

/// Gives hits back, before anything is charged. One that cannot is found before the first goes back.
fn give_back(all: &[Option<Limited<'_>>]) -> Result<(), Refusal> {
    for Limited { index, limit, .. } in all.iter().flatten().filter(|limited| limited.is_negative) {
        if !limit.can_give_back() {
            return Err(Refusal::NegativeHits { index: *index, limit: limit.name() });
        }
    }
    for limited in all.iter().flatten() {
        if let Limited { limit, key, plain, hits: 1.., is_negative: true, .. } = limited {
            limit.give_back(key, plain.as_deref(), limited.hits);
        }
    }
    Ok(())
}

/// The descriptors that are charged, those of one key together.
fn sorted<'r, 'a>(limited: &'r [Option<Limited<'a>>]) -> Vec<ToCharge<'r, 'a>> {
    let mut sorted = Vec::with_capacity(limited.len());
    let to_charge = limited.iter().flatten().filter(|limited| limited.has_hits_to_charge());
    sorted.extend(to_charge.map(ToCharge::new));
    sorted.sort_unstable_by(ToCharge::compare);
    sorted
}

/// What is to be charged, each key once.
fn charges<'r, 'a>(sorted: &'r [ToCharge<'r, 'a>]) -> Vec<Charge<'r, 'a>> {
    let mut charges = Vec::with_capacity(sorted.len());
    charges.extend(sorted.chunk_by(ToCharge::has_key_of).map(Charge::new));
    charges
}

/// All of them are charged, or none. False if one is over its limit.
async fn charge_all(
    charges: &[Charge<'_, '_>],
    deadline: Option<Instant>,
    statuses: &mut [Status],
) -> bool {
    if !charges.iter().all(|charge| charge.is_possible) {
        return tell_looks(charges, statuses);
    }
    let patience = patience(deadline);
    let parts: Vec<Part<'_>> =
        charges.iter().map(|charge| charge.limited.part(charge.cost, patience)).collect();
    match ask_all(&parts).await {
        Together::Allowed(all) => {
            for (charge, (_, allowed)) in charges.iter().zip(&all) {
                charge.tell_allowed(&allowed.decision, statuses);
            }
            true
        }
        Together::Denied(denied) => {
            for (index, (charge, look)) in charges.iter().zip(&denied.looks).enumerate() {
                let mut outcome = charge.outcome_of_look(look.as_ref());
                if index == denied.by {
                    (outcome.is_over, outcome.decision) = (true, look.as_ref());
                }
                charge.tell(outcome, statuses);
            }
            false
        }
    }
}

/// Tells how charges stand that are not made. False if one is over its limit.
fn tell_looks(charges: &[Charge<'_, '_>], statuses: &mut [Status]) -> bool {
    let mut fits = true;
    for charge in charges {
        let look = charge.limited.part(charge.cost, Patience::None).look();
        let outcome = charge.outcome_of_look(look.as_ref());
        fits &= !outcome.is_over;
        charge.tell(outcome, statuses);
    }
    fits
}
