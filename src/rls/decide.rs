//! What the limits of a domain say of a request.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::iter;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use foldhash::fast::FixedState;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::messages::{
    Answer, Code, CurrentLimit, Descriptor as Asked, Entry, Header, OwnLimit, RateLimitRequest,
    Shadow, Status, Unit,
};
use super::metrics::{Counted, DescriptorMetrics};
use crate::config::{
    ChargeRule, Config, DescriptorRule, Domain, Matched, PathValues, REQUEST_LIMITS, UnknownDomain,
};
use crate::decision::{Decision, RETRY_MIN_US};
use crate::error::ConfigError;
use crate::key::{Key, KeyWriter};
use crate::limit::{Limit, Mode};
use crate::limiter::settle::Allowed;
use crate::limiter::together::part::{Part, Patience};
use crate::limiter::together::{Together, ask_all};
use crate::limiter::{AsyncLimit, Limiter};
use crate::quota::Quota;

/// The most descriptors in one request.
const DESCRIPTORS_MAX: usize = 1000;
/// Most keys have no more.
const KEY_BYTES: usize = 32;

/// A configuration with its limits, which a request finds without asking the limiter for them.
pub(crate) struct DomainLimits {
    pub(crate) config: Config,
    /// In the order of the configuration.
    limits: Vec<AsyncLimit>,
    places: HashMap<&'static str, usize, FixedState>,
    limiter: Limiter,
    own: Arc<OwnLimits>,
    metrics: Option<Arc<DescriptorMetrics>>,
}

/// Without the keys of the limiter.
impl fmt::Debug for DomainLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainLimits").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Limits that requests have brought with them, by what they say.
#[derive(Default)]
pub(crate) struct OwnLimits(DashMap<OwnLimit, Arc<AsyncLimit>>);

impl OwnLimits {
    /// The most of them: each takes memory until the process ends, and a part of the quotas that overrides can give.
    pub(crate) const MAX: usize = 10_000;

    /// What a descriptor with such a limit is asked for. Its domain and all its entries are its key.
    fn limited<'a>(
        &self,
        own: OwnLimit,
        limiter: &Limiter,
        domain: &str,
        (place, asked): (usize, &Asked<'_>),
    ) -> Result<Limited<'a>, String> {
        let entries = asked.entries.iter().flat_map(|entry| [&*entry.key, &*entry.value]);
        let values = iter::once(domain).chain(entries).collect();
        let limit = LimitOf::Request(self.limit(own, limiter)?);
        Ok(Limited::new(limit, &Values { values, own: Some(own) }, (place, asked)))
    }

    fn limit(&self, own: OwnLimit, limiter: &Limiter) -> Result<Arc<AsyncLimit>, String> {
        if let Some(known) = self.0.get(&own) {
            return Ok(known.clone());
        }
        let Some(unit) = own.unit else {
            return Err("unit: is not known: name one".to_owned());
        };
        if self.0.len() >= Self::MAX {
            return Err(format!("the process has had {} other limits of requests", Self::MAX));
        }
        let quota = Quota::new(own.requests_per_unit, unit.period());
        let limit = limiter.async_limit(REQUEST_LIMITS).and_then(|limit| limit.with_quota(quota));
        let limit = Arc::new(limit.map_err(|error| error.to_string())?);
        self.0.insert(own, limit.clone());
        Ok(limit)
    }
}

/// Why a request is not decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("domain: is empty: name one")]
    NoDomain,
    #[error("descriptors: there is none: a request needs one")]
    NoDescriptor,
    #[error("descriptors: there are {0}: at most {DESCRIPTORS_MAX}")]
    TooManyDescriptors(usize),
    #[error("descriptors[{place}].limit: {reason}")]
    OwnLimit { place: usize, reason: String },
    #[error(
        "descriptors[{place}].is_negative_hits: {limit} keeps when each token was spent: commit a reservation"
    )]
    NegativeHits { place: usize, limit: &'static str },
}

/// What holds for the descriptors of a request.
struct Rulings<'a> {
    /// How each of them stands; those that have a limit do not yet.
    statuses: Vec<Status>,
    /// Those that have a limit.
    limited: Vec<Limited<'a>>,
}

/// The limit of a descriptor: of the file, or one that the request has brought.
enum LimitOf<'a> {
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

/// A descriptor that has a limit.
struct Limited<'a> {
    /// Its place in the request.
    place: usize,
    limit: LimitOf<'a>,
    /// What the limiter knows its values by.
    key: SmallVec<[u8; KEY_BYTES]>,
    /// The key before it is hashed, if overrides look for that.
    plain: Option<Arc<[u8]>>,
    /// 0 looks, and charges nothing.
    hits: u32,
    /// They go back.
    is_negative: bool,
    charge: ChargeRule,
}

impl<'a> Limited<'a> {
    #[inline]
    fn new(limit: LimitOf<'a>, values: &Values<'_>, (place, asked): (usize, &Asked<'_>)) -> Self {
        Self {
            place,
            key: SmallVec::from_slice(&limit.0.shared.secret.name(values)),
            plain: limit.0.plain_for_overrides(values),
            limit,
            hits: asked.hits,
            is_negative: asked.is_negative_hits,
            charge: ChargeRule::Together,
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
        status(&self.limit, Outcome { is_over, is_charged: false, decision: Some(decision) })
    }

    /// The same by whether the key has a token, which is taken and given back: so a node that knows nothing of the key asks the
    /// store.
    async fn status_by_a_token(&self, deadline: Option<Instant>) -> Status {
        let decision = self.part(1, patience(deadline)).ask_and_give_back().await;
        let is_over = decision.is_denied();
        let outcome = Outcome { is_over, is_charged: false, decision: Some(decision) };
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

/// The values of a key: as a tuple of them.
struct Values<'a> {
    values: PathValues<'a>,
    /// A limit of the request's own. The key begins with it, so that each such limit counts for itself.
    own: Option<OwnLimit>,
}

impl Key for Values<'_> {
    fn held_bytes(&self) -> Option<&[u8]> {
        match (&*self.values, self.own) {
            ([value], None) => value.held_bytes(),
            _ => None,
        }
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

impl DomainLimits {
    /// The limits of a configuration that the limiter has.
    pub(crate) fn new(
        config: Config,
        limiter: &Limiter,
        own: Arc<OwnLimits>,
        metrics: Option<Arc<DescriptorMetrics>>,
    ) -> Result<Self, ConfigError> {
        let named = |limit: &Limit| limiter.async_limit(limit.name());
        let limits = config.limits().iter().map(named).collect::<Result<Vec<_>, _>>()?;
        let places = limits.iter().map(AsyncLimit::name).zip(0..).collect();
        Ok(Self { config, limits, places, limiter: limiter.clone(), own, metrics })
    }

    pub(crate) fn limit(&self, name: &str) -> Option<&AsyncLimit> {
        self.places.get(name).map(|place| &self.limits[*place])
    }

    /// Decides about a request, and waits for the store until the deadline at most.
    pub(crate) async fn answer(
        &self,
        request: &RateLimitRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<Answer, Refusal> {
        let began = self.metrics.as_ref().map(|_| Instant::now());
        let answer = self.decide(request, deadline).await;
        if let Some(began) = began {
            DescriptorMetrics::request(began.elapsed());
            if answer.is_err() {
                DescriptorMetrics::refused();
            }
        }
        answer
    }

    async fn decide(
        &self,
        request: &RateLimitRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<Answer, Refusal> {
        if request.domain.is_empty() {
            return Err(Refusal::NoDomain);
        }
        let descriptors = request.descriptors.len();
        if descriptors == 0 {
            return Err(Refusal::NoDescriptor);
        }
        if descriptors > DESCRIPTORS_MAX {
            return Err(Refusal::TooManyDescriptors(descriptors));
        }
        let Some(domain) = self.config.domain(request.domain) else {
            let code = match self.config.server().unknown_domain {
                UnknownDomain::Allow => Code::Ok,
                UnknownDomain::Deny => Code::OverLimit,
            };
            return Ok(self.told(vec![Status { code, ..Status::default() }; descriptors]));
        };
        let statuses = statuses(self.rulings(domain, request)?, deadline).await?;
        if let Some(metrics) = &self.metrics {
            for (asked, status) in request.descriptors.iter().zip(&statuses) {
                if status.is_counted && !asked.is_negative_hits {
                    metrics.count(domain, &Counted { asked, status });
                }
            }
        }
        Ok(self.told(statuses))
    }

    fn told(&self, statuses: Vec<Status>) -> Answer {
        let server = self.config.server();
        let is_over = statuses.iter().any(|status| status.code == Code::OverLimit);
        let denies = is_over && !server.shadow_domains;
        if is_over && !denies && self.metrics.is_some() {
            DescriptorMetrics::shadowed();
        }
        Answer {
            overall_code: if denies { Code::OverLimit } else { Code::Ok },
            response_headers_to_add: if server.limit_headers {
                headers(&statuses)
            } else {
                Vec::new()
            },
            statuses,
        }
    }

    fn rulings<'a>(
        &'a self,
        domain: &'a Domain,
        request: &RateLimitRequest<'_>,
    ) -> Result<Rulings<'a>, Refusal> {
        let RateLimitRequest { domain: name, descriptors } = request;
        let (replaced, all) = (replaced(domain, descriptors), descriptors.len());
        let (mut statuses, mut limited) = (Vec::with_capacity(all), Vec::with_capacity(all));
        for (place, asked) in descriptors.iter().enumerate() {
            // The rule of a descriptor that brings its own limit does not apply, and cannot be replaced.
            if let Some(own) = asked.limit {
                let is_denied = own.requests_per_unit == 0;
                statuses.push(if is_denied { Status::denied() } else { Status::default() });
                if !is_denied {
                    let found = self.own.limited(own, &self.limiter, name, (place, asked));
                    limited.push(found.map_err(|reason| Refusal::OwnLimit { place, reason })?);
                }
                continue;
            }
            statuses.push(match rule(matched(domain, asked.entries), &replaced) {
                None => Status::default(),
                Some((DescriptorRule::Unlimited, _)) => Status::unlimited(),
                Some((DescriptorRule::Deny, _)) => Status::denied(),
                Some((DescriptorRule::Limit { limit, charge }, values)) => {
                    let limit = LimitOf::File(&self.limits[*limit]);
                    let values = Values { values, own: None };
                    let mut found = Limited::new(limit, &values, (place, asked));
                    found.charge = *charge;
                    limited.push(found);
                    Status::default()
                }
            });
        }
        Ok(Rulings { statuses, limited })
    }
}

fn matched<'a: 'v, 'v>(domain: &'a Domain, entries: &'v [Entry]) -> Option<Matched<'a, 'v>> {
    domain.level.find(entries.iter().map(|entry| (&*entry.key, &*entry.value)))
}

/// The rule of a descriptor, and the values that tell its keys apart. `None` if it has none, or another one replaces it.
fn rule<'a, 'v>(
    matched: Option<Matched<'a, 'v>>,
    replaced: &[&String],
) -> Option<(&'a DescriptorRule, PathValues<'v>)> {
    let Matched { descriptor, values } = matched?;
    let is_replaced = descriptor.name.as_ref().is_some_and(|name| replaced.contains(&name));
    descriptor.rule.as_ref().filter(|_| !is_replaced).map(|rule| (rule, values))
}

/// The names of the descriptors in whose place others of the request count.
fn replaced<'a>(domain: &'a Domain, descriptors: &'a [Asked<'_>]) -> Vec<&'a String> {
    if !domain.has_replacements {
        return Vec::new();
    }
    let by_rule = descriptors.iter().filter(|asked| asked.limit.is_none());
    let found = by_rule.filter_map(|asked| Some(matched(domain, asked.entries)?.descriptor));
    found.filter(|it| it.rule.is_some()).flat_map(|it| &it.replaces).collect()
}

/// A descriptor that is to be charged. They are sorted by limit, hash of the key, and key.
struct ToCharge<'r, 'a> {
    /// The limit's place in the limiter, and the hash of the key.
    order: (u32, u64),
    limited: &'r Limited<'a>,
}

impl<'r, 'a> ToCharge<'r, 'a> {
    fn new(limited: &'r Limited<'a>) -> Self {
        let hash = FixedState::default().hash_one(&*limited.key);
        Self { order: (limited.limit.place(), hash), limited }
    }

    fn key(&self) -> &'r [u8] {
        &self.limited.key
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
    fn new(descriptors: &'r [ToCharge<'r, 'a>]) -> Self {
        let limited = descriptors[0].limited;
        let cost = descriptors.iter().fold(0, |cost: u32, it| cost.saturating_add(it.limited.hits));
        let is_possible = limited.part(cost, Patience::None).validate_cost().is_ok();
        Self { limited, cost, is_possible, descriptors }
    }

    /// How the key stands as far as this node knows, and whether it is over its limit for sure. Nothing is told of a key of which
    /// the node has no view.
    fn outcome_of_look(&self, look: Option<Decision>) -> Outcome {
        // By the store's last word it lacks tokens yet, or it surely does.
        let is_known = |it: &Decision| {
            let lasts = it.retry_after() > Duration::from_micros(RETRY_MIN_US);
            it.is_sure() || it.view_age().is_some() && lasts
        };
        let is_over = !self.is_possible || look.is_some_and(|it| it.is_denied() && is_known(&it));
        let decision = look.filter(|it| it.is_sure() || it.view_age().is_some());
        Outcome { is_over, is_charged: false, decision }
    }

    /// Whether by the store's word so much would be denied.
    fn lacks(&self, look: Decision) -> bool {
        let is_free = look.took_nothing() && look.is_allowed();
        !is_free && (look.is_denied() || look.remaining() < u64::from(self.cost))
    }

    /// Writes how it ended into the statuses of its descriptors.
    fn tell(&self, outcome: Outcome, statuses: &mut [Status]) {
        let status = status(&self.limited.limit, outcome);
        for charged in self.descriptors {
            statuses[charged.limited.place] = status;
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
        self.tell(Outcome { is_over, is_charged: !is_over, decision: Some(decision) }, statuses);
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
struct Outcome {
    is_over: bool,
    is_charged: bool,
    decision: Option<Decision>,
}

/// Charges all limits, or those alone that are always charged, and tells how each descriptor stands.
async fn statuses(rulings: Rulings<'_>, deadline: Option<Instant>) -> Result<Vec<Status>, Refusal> {
    let Rulings { mut statuses, limited } = rulings;
    give_back(&limited)?;
    // All together wait no longer than one of them would.
    let max_wait = limited.iter().map(|limited| limited.limit.max_wait()).max();
    let longest = max_wait.and_then(|max_wait| Instant::now().checked_add(max_wait));
    let deadline = deadline.into_iter().chain(longest).min();
    let charged = sorted(&limited);
    let mut charges = charges(&charged);
    let always = charges.extract_if(.., |charge| charge.limited.charge != ChargeRule::Together);
    let always: Vec<Charge<'_, '_>> = always.collect();
    // Before the first wait: who leaves is charged for all of them.
    let owed = |charge| Charge::is_charged_unasked(charge).then(|| Owed(charge));
    let owed: Vec<Option<Owed<'_, '_, '_>>> = always.iter().map(owed).collect();
    for limited in limited.iter().filter(|limited| !limited.has_hits_to_charge()) {
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

/// Gives hits back, before anything is charged. One that cannot is found before the first goes back.
fn give_back(all: &[Limited<'_>]) -> Result<(), Refusal> {
    for Limited { place, limit, .. } in all.iter().filter(|limited| limited.is_negative) {
        if !limit.can_give_back() {
            return Err(Refusal::NegativeHits { place: *place, limit: limit.name() });
        }
    }
    for limited in all {
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

/// The descriptors that are charged, those of one key together, in an order that is the same for all requests.
fn sorted<'r, 'a>(limited: &'r [Limited<'a>]) -> Vec<ToCharge<'r, 'a>> {
    let mut sorted = Vec::with_capacity(limited.len());
    sorted.extend(limited.iter().filter(|limited| limited.has_hits_to_charge()).map(ToCharge::new));
    sorted.sort_unstable_by(|one, other| {
        one.order.cmp(&other.order).then_with(|| one.key().cmp(other.key()))
    });
    sorted
}

/// What is to be charged, each key once.
fn charges<'r, 'a>(charged: &'r [ToCharge<'r, 'a>]) -> Vec<Charge<'r, 'a>> {
    let is_same = |one: &ToCharge<'_, '_>, other: &ToCharge<'_, '_>| {
        one.order == other.order && one.key() == other.key()
    };
    let mut charges = Vec::with_capacity(charged.len());
    charges.extend(charged.chunk_by(is_same).map(Charge::new));
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
            for (charge, (_, Allowed { decision, .. })) in charges.iter().zip(all) {
                let outcome =
                    Outcome { is_over: false, is_charged: true, decision: Some(decision) };
                charge.tell(outcome, statuses);
            }
            true
        }
        Together::Denied(denied) => {
            for (place, (charge, look)) in charges.iter().zip(denied.looks).enumerate() {
                let mut outcome = charge.outcome_of_look(look);
                if place == denied.by {
                    (outcome.is_over, outcome.decision) = (true, look);
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
        let outcome = charge.outcome_of_look(look);
        fits &= !outcome.is_over;
        charge.tell(outcome, statuses);
    }
    fits
}

fn status(limit: &AsyncLimit, Outcome { is_over, is_charged, decision }: Outcome) -> Status {
    let is_shadow = limit.0.is_shadow();
    let is_shadow_denied = is_over && is_shadow || decision.is_some_and(|it| it.is_shadow_denied());
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

/// Those of the status with the fewest requests left, of limits that are not in shadow mode. As in those of the layer, the limit is
/// the burst.
fn headers(statuses: &[Status]) -> Vec<Header> {
    let is_told = |it: &&Status| it.current_limit.is_some() && it.shadow == Shadow::Off;
    let limited = statuses.iter().filter(is_told);
    let Some(status) = limited.min_by_key(|status| status.limit_remaining) else {
        return Vec::new();
    };
    let reset = status.duration_until_reset.unwrap_or_default().as_secs();
    vec![
        Header { key: "RateLimit-Limit", value: status.burst.to_string() },
        Header { key: "RateLimit-Remaining", value: status.limit_remaining.to_string() },
        Header { key: "RateLimit-Reset", value: reset.to_string() },
    ]
}
