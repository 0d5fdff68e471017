//! What the limits of a domain say of a request.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::messages::{
    Answer, Code, CurrentLimit, Descriptor as Asked, Header, OwnLimit, RateLimitRequest, Status,
    Unit,
};
use super::metrics::{Counted, DescriptorMetrics};
use crate::config::{Config, Descriptor, DescriptorRule, Matched, REQUEST_LIMITS, UnknownDomain};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::{Key, KeyWriter};
use crate::limit::Limit;
use crate::limiter::settle::Allowed;
use crate::limiter::together::{Part, Patience, Together, ask_all};
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
    places: HashMap<&'static str, usize>,
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
pub(crate) struct OwnLimits(DashMap<OwnLimit, AsyncLimit>);

impl OwnLimits {
    /// The most of them: each takes memory until the process ends, and a part of the quotas that overrides can give.
    pub(crate) const MAX: usize = 10_000;

    /// What holds for a descriptor with such a limit. Its domain and all its entries are its key.
    fn ruling<'a>(
        &self,
        own: OwnLimit,
        limiter: &Limiter,
        (request, asked): (&'a RateLimitRequest, &'a Asked),
    ) -> Result<Ruling<'a>, String> {
        if own.requests_per_unit == 0 {
            return Ok(Ruling::Deny);
        }
        let entries = asked.entries.iter().flat_map(|entry| [&*entry.key, &*entry.value]);
        let values = iter::once(&*request.domain).chain(entries).collect();
        let values = Values { values, own: Some(own) };
        let limit = Cow::Owned(self.limit(own, limiter)?);
        Ok(Ruling::Limited(Limited::new(limit, &values, request, asked)))
    }

    fn limit(&self, own: OwnLimit, limiter: &Limiter) -> Result<AsyncLimit, String> {
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
        let limit = limit.map_err(|error| error.to_string())?;
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

/// What holds for one descriptor of a request.
#[allow(clippy::large_enum_variant, reason = "most descriptors have a limit")]
enum Ruling<'a> {
    /// It has no limit, or another one stands in its place.
    Free,
    Unlimited,
    Deny,
    Limited(Limited<'a>),
}

struct Limited<'a> {
    limit: Cow<'a, AsyncLimit>,
    /// What the limiter knows its values by.
    key: SmallVec<[u8; KEY_BYTES]>,
    /// The key before it is hashed, if overrides look for that.
    plain: Option<Arc<[u8]>>,
    /// 0 looks, and charges nothing.
    hits: u32,
    /// They go back.
    is_negative: bool,
    is_always_charged: bool,
}

impl<'a> Limited<'a> {
    fn new(
        limit: Cow<'a, AsyncLimit>,
        values: &Values<'_>,
        request: &RateLimitRequest,
        asked: &Asked,
    ) -> Self {
        Self {
            key: SmallVec::from_slice(&limit.0.shared.secret.name(values)),
            plain: limit.0.plain_for_overrides(values),
            limit,
            hits: hits(request, asked),
            is_negative: asked.is_negative_hits,
            is_always_charged: false,
        }
    }

    /// What `limit` is asked for, which is this one or waits for less long.
    fn part<'r>(&'r self, limit: &'r AsyncLimit, cost: u32) -> Part<'r> {
        let (plain, patience) = (self.plain.as_deref(), Patience::Store);
        Part { limit: &limit.0, key: &self.key, plain, cost, patience }
    }

    /// How the key stands; `None` if only the store knows.
    fn look(&self) -> Option<Decision> {
        self.part(&self.limit, 0).look()
    }

    fn is_charged(&self) -> bool {
        self.hits > 0 && !self.is_negative
    }
}

/// The values of a key: as a tuple of them.
struct Values<'a> {
    values: SmallVec<[&'a str; 4]>,
    /// The first part then: each such limit counts for itself.
    own: Option<OwnLimit>,
}

impl Key for Values<'_> {
    fn write(&self, writer: &mut KeyWriter<'_>) {
        if let ([value], None) = (&*self.values, self.own) {
            return value.write(writer);
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
        request: &RateLimitRequest,
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
        request: &RateLimitRequest,
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
        let Some(domain) = self.config.domain(&request.domain) else {
            let code = match self.config.server().unknown_domain {
                UnknownDomain::Allow => Code::Ok,
                UnknownDomain::Deny => Code::OverLimit,
            };
            return Ok(self.told(vec![Status { code, ..Status::default() }; descriptors]));
        };
        let matched: Vec<_> = request.descriptors.iter().map(|it| matched(domain, it)).collect();
        let rulings = self.rulings(request, matched)?;
        let statuses = statuses(&rulings, deadline).await?;
        if let Some(metrics) = &self.metrics {
            let is_charged = statuses.iter().all(|status| status.code == Code::Ok);
            for ((asked, ruling), status) in request.descriptors.iter().zip(&rulings).zip(&statuses)
            {
                let hits = hits(request, asked);
                let is_counted = matches!(ruling, Ruling::Deny | Ruling::Limited(_));
                if is_counted && !asked.is_negative_hits {
                    metrics.count(domain, &Counted { asked, hits, status, is_charged });
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
        request: &'a RateLimitRequest,
        matched: Vec<Option<Matched<'a>>>,
    ) -> Result<Vec<Ruling<'a>>, Refusal> {
        // The rule of a descriptor that brings its own limit does not apply.
        let by_rule = matched.iter().zip(&request.descriptors).filter(|(_, it)| it.limit.is_none());
        let found = by_rule.filter_map(|(matched, _)| Some(matched.as_ref()?.descriptor));
        let ruled = found.filter(|descriptor| descriptor.rule.is_some());
        let replaced: Vec<&String> = ruled.flat_map(|descriptor| &descriptor.replaces).collect();
        let both = matched.into_iter().zip(&request.descriptors).enumerate();
        let ruling = |(place, (matched, asked)): (usize, (Option<Matched<'a>>, &'a Asked))| {
            // Its rule does not apply, and cannot be replaced.
            if let Some(own) = asked.limit {
                let ruled = self.own.ruling(own, &self.limiter, (request, asked));
                return ruled.map_err(|reason| Refusal::OwnLimit { place, reason });
            }
            let Some(Matched { descriptor, values }) = matched else { return Ok(Ruling::Free) };
            let Descriptor { rule, name, .. } = descriptor;
            if name.as_ref().is_some_and(|name| replaced.contains(&name)) {
                return Ok(Ruling::Free);
            }
            Ok(match rule {
                None => Ruling::Free,
                Some(DescriptorRule::Unlimited) => Ruling::Unlimited,
                Some(DescriptorRule::Deny) => Ruling::Deny,
                Some(DescriptorRule::Limit { limit, is_always_charged }) => {
                    let limit = Cow::Borrowed(&self.limits[*limit]);
                    let limited =
                        Limited::new(limit, &Values { values, own: None }, request, asked);
                    Ruling::Limited(Limited { is_always_charged: *is_always_charged, ..limited })
                }
            })
        };
        let mut rulings = Vec::with_capacity(request.descriptors.len());
        for descriptor in both {
            rulings.push(ruling(descriptor)?);
        }
        Ok(rulings)
    }
}

fn matched<'a>(domain: &'a crate::config::Domain, asked: &'a Asked) -> Option<Matched<'a>> {
    domain.level.find(asked.entries.iter().map(|entry| (&*entry.key, &*entry.value)))
}

fn hits(request: &RateLimitRequest, asked: &Asked) -> u32 {
    let hits = asked.hits_addend.unwrap_or_else(|| request.hits_addend.max(1));
    // More than any limit admits at once.
    hits.try_into().unwrap_or(u32::MAX)
}

/// What is charged of one key.
struct Charge<'r, 'a> {
    limited: &'r Limited<'a>,
    cost: u32,
    /// Whether the limit can ever admit it, or does not decide.
    is_possible: bool,
    /// The descriptors that it is of.
    places: SmallVec<[usize; 1]>,
}

impl Charge<'_, '_> {
    /// The limit and the key.
    fn of(&self) -> (u32, &[u8]) {
        (self.limited.limit.place(), &self.limited.key)
    }

    fn find_whether_possible(&mut self) {
        let is_free = |look: Decision| look.is_override() && look.is_allowed();
        self.is_possible = self.limited.limit.validate_cost(self.cost).is_ok()
            || self.limited.look().is_some_and(is_free);
    }

    /// Whether a look says that so much would be denied.
    fn lacks(&self, look: Option<Decision>) -> bool {
        look.is_some_and(|look| {
            let is_free = look.took_nothing() && look.is_allowed();
            !is_free && (look.is_denied() || look.remaining() < u64::from(self.cost))
        })
    }

    /// Writes how it ended into the statuses of its descriptors.
    fn tell(&self, standing: Standing, statuses: &mut [Status]) {
        for place in &self.places {
            statuses[*place] = status(&self.limited.limit, standing);
        }
    }

    fn is_shadow(&self) -> bool {
        self.limited.limit.0.is_shadow()
    }
}

/// How a charge ended.
#[derive(Clone, Copy)]
struct Standing {
    is_over: bool,
    decision: Option<Decision>,
}

/// Charges all limits, or those alone that are always charged, and tells how each descriptor stands.
async fn statuses(
    rulings: &[Ruling<'_>],
    deadline: Option<Instant>,
) -> Result<Vec<Status>, Refusal> {
    give_back(rulings)?;
    let mut statuses: Vec<Status> = Vec::with_capacity(rulings.len());
    for ruling in rulings {
        statuses.push(match ruling {
            Ruling::Unlimited => Status::unlimited(),
            Ruling::Deny => Status { code: Code::OverLimit, ..Status::default() },
            Ruling::Limited(limited) if !limited.is_charged() => {
                let limit = waiting(&limited.limit, deadline);
                let decision = limited.part(&limit, 0).ask().await;
                status(&limited.limit, Standing { is_over: false, decision: Some(decision) })
            }
            // Those that are charged are told below.
            Ruling::Free | Ruling::Limited(_) => Status::default(),
        });
    }
    let mut is_over = statuses.iter().any(|status| status.code == Code::OverLimit);
    // A limit in shadow mode keeps no other from being charged.
    let mut charges = charges(rulings);
    let shadows = charges.extract_if(.., |charge| !charge.is_possible && charge.is_shadow());
    let shadows: Vec<_> = shadows.collect();
    tell_looks(&shadows, &mut statuses);
    let always = charges.extract_if(.., |charge| charge.limited.is_always_charged);
    for charge in always.collect::<Vec<_>>() {
        is_over |= !charge_all(&[charge], deadline, &mut statuses).await;
    }
    if is_over {
        tell_looks(&charges, &mut statuses);
    } else {
        charge_all(&charges, deadline, &mut statuses).await;
    }
    Ok(statuses)
}

/// Gives hits back, before anything is charged. One that cannot is found before the first goes back.
fn give_back(rulings: &[Ruling<'_>]) -> Result<(), Refusal> {
    for (place, ruling) in rulings.iter().enumerate() {
        if let Ruling::Limited(Limited { limit, is_negative: true, .. }) = ruling
            && !limit.can_give_back()
        {
            return Err(Refusal::NegativeHits { place, limit: limit.name() });
        }
    }
    for ruling in rulings {
        if let Ruling::Limited(limited @ Limited { is_negative: true, hits: 1.., .. }) = ruling {
            let Limited { limit, key, plain, hits, .. } = limited;
            limit.give_back(key, plain.as_deref(), *hits);
        }
    }
    Ok(())
}

/// The limit, which waits for the store until the deadline at most.
fn waiting(limit: &AsyncLimit, deadline: Option<Instant>) -> Cow<'_, AsyncLimit> {
    match deadline {
        None => Cow::Borrowed(limit),
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            Cow::Owned(limit.within(left))
        }
    }
}

/// What is to be charged, each key once, in an order that is the same for all who charge these limits.
fn charges<'r, 'a>(rulings: &'r [Ruling<'a>]) -> Vec<Charge<'r, 'a>> {
    let charge = |(place, ruling): (usize, &'r Ruling<'a>)| match ruling {
        Ruling::Limited(limited) if limited.is_charged() => {
            let (cost, places) = (limited.hits, SmallVec::from_elem(place, 1));
            Some(Charge { limited, cost, is_possible: false, places })
        }
        _ => None,
    };
    let mut charges: Vec<Charge<'r, 'a>> = rulings.iter().enumerate().filter_map(charge).collect();
    charges.sort_unstable_by(|one, other| one.of().cmp(&other.of()));
    charges.dedup_by(|next, charge| {
        let is_same = next.of() == charge.of();
        if is_same {
            charge.cost = charge.cost.saturating_add(next.cost);
            charge.places.append(&mut next.places);
        }
        is_same
    });
    charges.iter_mut().for_each(Charge::find_whether_possible);
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
    let limits: SmallVec<[Cow<'_, AsyncLimit>; 4]> =
        charges.iter().map(|charge| waiting(&charge.limited.limit, deadline)).collect();
    let both = charges.iter().zip(&limits);
    let parts: SmallVec<[Part<'_>; 4]> =
        both.map(|(charge, limit)| charge.limited.part(limit, charge.cost)).collect();
    match ask_all(&parts).await {
        Together::Allowed(all) => {
            for (charge, Allowed { decision, .. }) in charges.iter().zip(all) {
                charge.tell(Standing { is_over: false, decision: Some(decision) }, statuses);
            }
            true
        }
        Together::Denied(denied) => {
            for (place, (charge, decision)) in charges.iter().zip(denied.looks).enumerate() {
                let is_over = place == denied.by || charge.lacks(decision);
                charge.tell(Standing { is_over, decision }, statuses);
            }
            false
        }
    }
}

/// Tells how charges stand that are not made. False if one is over its limit.
fn tell_looks(charges: &[Charge<'_, '_>], statuses: &mut [Status]) -> bool {
    let mut fits = true;
    for charge in charges {
        let decision = charge.limited.look();
        let is_over = !charge.is_possible || charge.lacks(decision);
        fits &= !is_over;
        charge.tell(Standing { is_over, decision }, statuses);
    }
    fits
}

fn status(limit: &AsyncLimit, Standing { is_over, decision }: Standing) -> Status {
    let is_shadow = limit.0.is_shadow();
    let is_shadow_denied = is_over && is_shadow || decision.is_some_and(|it| it.is_shadow_denied());
    let is_over = is_over && !is_shadow_denied;
    let Some(decision) = decision else {
        let code = if is_over { Code::OverLimit } else { Code::Ok };
        return Status { code, is_shadow_denied, ..Status::default() };
    };
    let quota = decision.quota();
    let reset = decision.reset_after();
    Status {
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
        is_shadow_denied,
    }
}

/// Those of the status with the fewest requests left.
fn headers(statuses: &[Status]) -> Vec<Header> {
    let limited = statuses.iter().filter_map(|it| Some((it, it.current_limit.as_ref()?)));
    let Some((status, limit)) = limited.min_by_key(|(status, _)| status.limit_remaining) else {
        return Vec::new();
    };
    let reset = status.duration_until_reset.unwrap_or_default().as_secs();
    vec![
        Header { key: "RateLimit-Limit", value: limit.requests_per_unit.to_string() },
        Header { key: "RateLimit-Remaining", value: status.limit_remaining.to_string() },
        Header { key: "RateLimit-Reset", value: reset.to_string() },
    ]
}
