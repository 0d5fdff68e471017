//! Charges the descriptors of a request that have limits, and tells how each stands.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::hash::BuildHasher;
use std::iter;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;
use tokio::time::Instant;

use super::messages::{
    Code, CurrentLimit, Descriptor as Asked, OwnLimit, Refusal, Shadow, Status, Unit,
};
use crate::config::ChargeRule;
use crate::decision::{Decision, RETRY_MIN_US};
use crate::key::{Key, KeyWriter};
use crate::limit::Mode;
use crate::limiter::AsyncLimit;
use crate::limiter::together::part::{Part, Patience};
use crate::limiter::together::{Together, ask_all, try_take_all};

/// What holds for the descriptors of a request.
pub(super) struct Rulings<'a> {
    /// How each of them stands; those that have a limit do not yet.
    pub(super) statuses: Vec<Status>,
    /// Those of them that have a limit.
    pub(super) limited: Vec<Option<Limited<'a>>>,
}

impl Rulings<'_> {
    /// No descriptor has a limit yet.
    pub(super) fn new(descriptors: usize) -> Self {
        let limited = iter::repeat_with(|| None).take(descriptors).collect();
        Self { statuses: vec![Status::default(); descriptors], limited }
    }
}

/// The limit of a descriptor: of the file, or one that the request has brought.
pub(super) enum LimitOf<'a> {
    File(&'a AsyncLimit),
    Request(Arc<AsyncLimit>),
}

impl Deref for LimitOf<'_> {
    type Target = AsyncLimit;

    fn deref(&self) -> &AsyncLimit {
        match self {
            Self::File(limit) => limit,
            Self::Request(limit) => limit,
        }
    }
}

/// The values of a key: as a tuple of them.
pub(super) struct Values<'s, 'a> {
    pub(super) values: &'s [&'a str],
    /// A limit of the request's own. The key begins with it, so that each such limit counts for itself.
    pub(super) own: Option<OwnLimit>,
}

impl<'a> Values<'_, 'a> {
    /// The one that is the key as it is.
    fn only(&self) -> Option<&'a str> {
        match (self.values, self.own) {
            ([value], None) => Some(value),
            _ => None,
        }
    }
}

impl Key for Values<'_, '_> {
    fn held_bytes(&self) -> Option<&[u8]> {
        self.only().and_then(Key::held_bytes)
    }

    fn write(&self, writer: &mut KeyWriter<'_>) {
        if let Some(held) = self.held_bytes() {
            return writer.push(held);
        }
        if let Some(own) = self.own {
            let OwnLimit { requests_per_unit, unit } = own;
            requests_per_unit.write(writer);
            writer.push(b"/");
            unit.map_or(0, |unit| unit.period().as_secs()).write(writer);
        }
        for (place, value) in self.values.iter().enumerate() {
            if place > 0 || self.own.is_some() {
                writer.push(b":");
            }
            writer.push_part_of(|part| value.write(part));
        }
    }
}

/// A descriptor that has a limit.
pub(super) struct Limited<'a> {
    /// Its place in the request.
    place: usize,
    limit: LimitOf<'a>,
    /// What the limiter knows its values by.
    key: Cow<'a, [u8]>,
    /// The key before it is hashed, if overrides look for that.
    plain: Option<Arc<[u8]>>,
    /// 0 looks, and charges nothing.
    hits: u32,
    /// They go back.
    is_negative: bool,
    charge: ChargeRule,
}

impl<'a> Limited<'a> {
    /// Inlined, so that it is built in its place in the list: a processor stalls when it copies what it has just written. The other
    /// values that are built for each descriptor are inlined for the same reason.
    #[inline(always)]
    pub(super) fn new(
        limit: LimitOf<'a>,
        values: &Values<'_, 'a>,
        charge: ChargeRule,
        (place, asked): (usize, &Asked<'_>),
    ) -> Self {
        let secret = &limit.0.shared.secret;
        let held = values.only().and_then(|value| secret.held_name(value));
        Self {
            place,
            key: match held {
                Some(held) => Cow::Borrowed(held),
                None => Cow::Owned(secret.name(values).to_vec()),
            },
            plain: limit.0.plain_for_overrides(values),
            limit,
            hits: asked.hits,
            is_negative: asked.is_negative_hits,
            charge,
        }
    }

    /// What the limit is asked for.
    fn part(&self, cost: u32, patience: Patience) -> Part<'_> {
        let plain = self.plain.as_deref();
        Part { limit: &self.limit.0, key: &self.key, plain, cost, patience }
    }

    /// How a descriptor stands that charges nothing. A look is over the limit if the key is blocked, or if costs are owed and it
    /// has no token.
    async fn status(&self, deadline: Option<Instant>) -> Status {
        let is_owed = self.charge == ChargeRule::InFull;
        if is_owed && !self.is_negative && self.limit.is_leased() {
            return self.status_by_a_token(deadline).await;
        }
        let decision = self.part(0, patience(deadline)).ask().await;
        let is_over =
            !self.is_negative && decision.is_denied() && (is_owed || decision.is_override());
        status(&self.limit, Outcome { is_over, is_charged: false, decision: Some(&decision) })
    }

    /// The same by whether the key has a token, which is taken and given back: so a node that knows nothing of the key asks the
    /// store.
    async fn status_by_a_token(&self, deadline: Option<Instant>) -> Status {
        let decision = self.part(1, patience(deadline)).ask_and_give_back().await;
        let is_over = decision.is_denied();
        let outcome = Outcome { is_over, is_charged: false, decision: Some(&decision) };
        let mut status = status(&self.limit, outcome);
        if !is_over && !decision.took_nothing() {
            status.limit_remaining = status.limit_remaining.saturating_add(1);
        }
        status
    }

    fn has_hits_to_charge(&self) -> bool {
        self.hits > 0 && !self.is_negative
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
        by_key.then(self.limited.place.cmp(&other.limited.place))
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
            statuses[charged.limited.place] = status(&self.limited.limit, outcome);
        }
    }

    /// Writes that it was allowed. Each of the descriptors tells what was left after it.
    fn tell_allowed(&self, decision: &Decision, statuses: &mut [Status]) {
        self.tell(Outcome::allowed(decision), statuses);
        let mut later = if decision.took_nothing() { 0 } else { self.cost };
        for charged in self.descriptors {
            later = later.saturating_sub(charged.limited.hits);
            let Status { limit_remaining, burst, .. } = &mut statuses[charged.limited.place];
            if later > 0 {
                *limit_remaining = limit_remaining.saturating_add(later).min(*burst);
            }
        }
    }

    /// Whether the store charges it in any case. It is not asked to allow it: what it answered too late would be charged twice.
    /// In an outage this node's share is asked.
    fn is_charged_unasked(&self) -> bool {
        let Limited { limit, charge, .. } = self.limited;
        *charge == ChargeRule::InFull && limit.mode() == Mode::Exact && !limit.is_on_policy()
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
        statuses[self.limited.place].code == Code::Ok
    }

    /// Charges what its limit did not allow, if it is charged in any case.
    fn charge_rest(&self, statuses: &[Status]) {
        let Limited { place, charge, .. } = self.limited;
        let Status { is_charged, shadow, .. } = statuses[*place];
        if *charge == ChargeRule::InFull && (!is_charged || shadow == Shadow::Denied) {
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

/// How a charge ended.
#[derive(Clone, Copy)]
struct Outcome<'d> {
    is_over: bool,
    is_charged: bool,
    decision: Option<&'d Decision>,
}

impl<'d> Outcome<'d> {
    fn allowed(decision: &'d Decision) -> Self {
        Self { is_over: false, is_charged: true, decision: Some(decision) }
    }
}

/// Charges the limits of a request, all of them or none but those that are always charged, and tells how each descriptor stands.
pub(super) async fn charged(
    rulings: Rulings<'_>,
    deadline: Option<Instant>,
) -> Result<Vec<Status>, Refusal> {
    let Rulings { mut statuses, limited } = rulings;
    if charge_here(&limited, &mut statuses) {
        return Ok(statuses);
    }
    // In a box, so that the future of a request that never waits stays small.
    Box::pin(charged_in_order(Rulings { statuses, limited }, deadline)).await
}

/// Does the same for every request, also with looks, hits that go back, limits that are always charged, and limits of which the
/// store is asked.
async fn charged_in_order(
    rulings: Rulings<'_>,
    deadline: Option<Instant>,
) -> Result<Vec<Status>, Refusal> {
    let Rulings { mut statuses, limited } = rulings;
    give_back(&limited)?;
    // All together wait no longer than one of them would.
    let max_wait = limited.iter().flatten().map(|limited| limited.limit.max_wait()).max();
    let longest = max_wait.and_then(|max_wait| Instant::now().checked_add(max_wait));
    let deadline = deadline.into_iter().chain(longest).min();
    let sorted = sorted(&limited);
    let mut charges = charges(&sorted);
    let always = charges.extract_if(.., |charge| charge.limited.charge != ChargeRule::Together);
    let always: Vec<Charge<'_, '_>> = always.collect();
    // Before the first wait: who leaves is charged for all of them.
    let owed = |charge| Charge::is_charged_unasked(charge).then(|| Owed(charge));
    let owed: Vec<Option<Owed<'_, '_, '_>>> = always.iter().map(owed).collect();
    for limited in limited.iter().flatten().filter(|limited| !limited.has_hits_to_charge()) {
        statuses[limited.place] = limited.status(deadline).await;
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
    let is_plain = |it: &Limited<'_>| it.has_hits_to_charge() && it.charge == ChargeRule::Together;
    if statuses.iter().any(|status| status.code == Code::OverLimit) || !all().all(is_plain) {
        return false;
    }
    let mut parts = Vec::with_capacity(limited.len());
    for limited in all() {
        parts.push(limited.part(limited.hits, Patience::None));
    }
    let Some(taken) = try_take_all(&parts) else { return false };
    for (limited, (_, allowed)) in all().zip(&taken) {
        statuses[limited.place] = status(&limited.limit, Outcome::allowed(&allowed.decision));
    }
    true
}

/// Gives hits back, before anything is charged. One that cannot is found before the first goes back.
fn give_back(all: &[Option<Limited<'_>>]) -> Result<(), Refusal> {
    for Limited { place, limit, .. } in all.iter().flatten().filter(|limited| limited.is_negative) {
        if !limit.can_give_back() {
            return Err(Refusal::NegativeHits { place: *place, limit: limit.name() });
        }
    }
    for limited in all.iter().flatten() {
        if let Limited { limit, key, plain, hits: 1.., is_negative: true, .. } = limited {
            limit.give_back(key, plain.as_deref(), limited.hits);
        }
    }
    Ok(())
}

/// For the store until the deadline at most.
fn patience(deadline: Option<Instant>) -> Patience {
    deadline.map_or(Patience::Store, Patience::StoreUntil)
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
            for (place, (charge, look)) in charges.iter().zip(&denied.looks).enumerate() {
                let mut outcome = charge.outcome_of_look(look.as_ref());
                if place == denied.by {
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

#[inline(always)]
fn status(limit: &AsyncLimit, Outcome { is_over, is_charged, decision }: Outcome<'_>) -> Status {
    let is_shadow = limit.0.is_shadow();
    let is_shadow_denied = is_over && is_shadow || decision.is_some_and(Decision::is_shadow_denied);
    let is_over = is_over && !is_shadow_denied;
    let shadow = match (is_shadow, is_shadow_denied) {
        (_, true) => Shadow::Denied,
        (true, false) => Shadow::Allowed,
        (false, false) => Shadow::Off,
    };
    let Some(decision) = decision else {
        let code = if is_over { Code::OverLimit } else { Code::Ok };
        return Status { code, shadow, is_counted: true, ..Status::default() };
    };
    let (quota, burst) = (decision.quota(), decision.burst());
    let reset = decision.reset_after();
    Status {
        is_counted: true,
        is_charged,
        code: if is_over { Code::OverLimit } else { Code::Ok },
        current_limit: Some(CurrentLimit {
            requests_per_unit: u32::try_from(quota.tokens()).unwrap_or(u32::MAX),
            unit: Unit::of(quota.period()),
        }),
        limit_remaining: if is_over {
            0
        } else {
            decision.remaining().try_into().unwrap_or(u32::MAX)
        },
        // Rounded up, as who reads it cuts the rest off.
        duration_until_reset: Some(Duration::from_secs(
            reset.as_secs() + u64::from(reset.subsec_nanos() > 0),
        )),
        shadow,
        burst: u32::try_from(burst).unwrap_or(u32::MAX),
    }
}
