//! What the limits of a domain say of a request.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::messages::{
    Answer, Code, CurrentLimit, Descriptor as Asked, Header, RateLimitRequest, Status, Unit,
};
use crate::config::{Config, Descriptor, DescriptorRule, Matched, UnknownDomain};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::{Key, KeyName, KeyWriter};
use crate::limit::{Limit, Mode};
use crate::limiter::settle::Allowed;
use crate::limiter::together::{Part, Patience, Together, ask_all};
use crate::limiter::{AsyncLimit, Limiter};

/// A configuration with the limits of its domains, which a request looks up without the limiter.
pub(crate) struct DomainLimits {
    pub(crate) config: Config,
    limits: HashMap<String, AsyncLimit>,
}

/// Without the keys of the limiter.
impl fmt::Debug for DomainLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainLimits").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Why a request is not decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("domain: is empty: name one")]
    NoDomain,
    #[error("descriptors: there is none: a request needs one")]
    NoDescriptor,
    #[error("descriptors[{0}].limit: a limit of the request's own is not supported: configure it")]
    OwnLimit(usize),
    #[error("descriptors[{0}].is_negative_hits: hits cannot be given back yet")]
    NegativeHits(usize),
    /// An exact limit has no answer without the store.
    #[error("the store did not answer in time")]
    Late,
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
    limit: &'a AsyncLimit,
    values: Values<'a>,
    /// What the limiter knows them by.
    key: KeyName<'static>,
    /// The key before it is hashed, if overrides look for that.
    plain: Option<Arc<[u8]>>,
    hits: Hits,
    is_always_charged: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Hits {
    Charge(u32),
    /// Nothing is counted.
    Look,
}

/// The values of a key: as a tuple of them.
#[derive(Clone)]
struct Values<'a>(SmallVec<[&'a str; 4]>);

impl Key for Values<'_> {
    fn write(&self, writer: &mut KeyWriter<'_>) {
        if let [value] = &*self.0 {
            return value.write(writer);
        }
        for (place, value) in self.0.iter().enumerate() {
            if place > 0 {
                writer.push(b":");
            }
            writer.push_part_of(|part| value.write(part));
        }
    }
}

impl DomainLimits {
    /// The limits of a configuration that the limiter has.
    pub(crate) fn new(config: Config, limiter: &Limiter) -> Result<Self, ConfigError> {
        let named = |limit: &Limit| {
            let name = limit.name();
            limiter.async_limit(name).map(|limit| (name.to_owned(), limit))
        };
        let limits = config.limits().iter().map(named).collect::<Result<_, _>>()?;
        Ok(Self { config, limits })
    }

    /// Decides about a request, and waits for the store for so long at most.
    pub(crate) async fn answer(
        &self,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<Answer, Refusal> {
        if request.domain.is_empty() {
            return Err(Refusal::NoDomain);
        }
        if request.descriptors.is_empty() {
            return Err(Refusal::NoDescriptor);
        }
        if let Some(place) = request.descriptors.iter().position(|it| it.limit.is_some()) {
            return Err(Refusal::OwnLimit(place));
        }
        if let Some(place) = request.descriptors.iter().position(|it| it.is_negative_hits) {
            return Err(Refusal::NegativeHits(place));
        }
        let Some(domain) = self.config.domain(&request.domain) else {
            let code = match self.config.server().unknown_domain {
                UnknownDomain::Allow => Code::Ok,
                UnknownDomain::Deny => Code::OverLimit,
            };
            let statuses = vec![Status { code, ..Status::default() }; request.descriptors.len()];
            return Ok(Answer { overall_code: code, statuses, ..Answer::default() });
        };
        let matched: Vec<_> = request.descriptors.iter().map(|it| matched(domain, it)).collect();
        let rulings: Vec<_> = self.rulings(request, &matched);
        let statuses = statuses(&rulings, within).await?;
        let is_over = statuses.iter().any(|status| status.code == Code::OverLimit);
        let denies = is_over && !self.config.server().shadow_domains;
        let has_headers = self.config.server().limit_headers;
        Ok(Answer {
            overall_code: if denies { Code::OverLimit } else { Code::Ok },
            response_headers_to_add: if has_headers { headers(&statuses) } else { Vec::new() },
            statuses,
        })
    }

    fn rulings<'a>(
        &'a self,
        request: &RateLimitRequest,
        matched: &[Option<Matched<'a>>],
    ) -> Vec<Ruling<'a>> {
        let ruled = |it: &&Matched<'a>| it.descriptor.rule.is_some();
        let replaced: Vec<&String> =
            matched.iter().flatten().filter(ruled).flat_map(|it| &it.descriptor.replaces).collect();
        let both = matched.iter().zip(&request.descriptors);
        let ruling = |(matched, asked): (&Option<Matched<'a>>, &Asked)| {
            let Some(Matched { descriptor, values }) = matched else { return Ruling::Free };
            let Descriptor { rule, name, .. } = *descriptor;
            if name.as_ref().is_some_and(|name| replaced.contains(&name)) {
                return Ruling::Free;
            }
            match rule {
                None => Ruling::Free,
                Some(DescriptorRule::Unlimited) => Ruling::Unlimited,
                Some(DescriptorRule::Deny) => Ruling::Deny,
                Some(DescriptorRule::Limit { limit, is_always_charged }) => {
                    let limit = &self.limits[limit];
                    let values = Values(values.clone());
                    Ruling::Limited(Limited {
                        limit,
                        key: limit.0.shared.secret.name(&values).into_owned(),
                        plain: limit.0.plain_for_overrides(&values),
                        values,
                        hits: hits(request, asked),
                        is_always_charged: *is_always_charged,
                    })
                }
            }
        };
        both.map(ruling).collect()
    }
}

fn matched<'a>(domain: &'a crate::config::Domain, asked: &'a Asked) -> Option<Matched<'a>> {
    domain.level.find(asked.entries.iter().map(|entry| (&*entry.key, &*entry.value)))
}

fn hits(request: &RateLimitRequest, asked: &Asked) -> Hits {
    // More than any limit admits at once.
    let tokens = |hits: u64| u32::try_from(hits).unwrap_or(u32::MAX);
    match asked.hits_addend {
        Some(0) => Hits::Look,
        hits => Hits::Charge(tokens(hits.unwrap_or_else(|| request.hits_addend.max(1)))),
    }
}

/// What is charged of one key.
struct Charge<'r, 'a> {
    limited: &'r Limited<'a>,
    cost: u32,
    /// The descriptors that it is of.
    places: SmallVec<[usize; 1]>,
}

impl Charge<'_, '_> {
    fn part(&self, patience: Patience) -> Part<'_> {
        let Limited { limit, key, plain, .. } = self.limited;
        Part { limit: &limit.0, key, plain: plain.as_deref(), cost: self.cost, patience }
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
    within: Option<Duration>,
) -> Result<Vec<Status>, Refusal> {
    let (always, others): (Vec<_>, Vec<_>) =
        charges(rulings).into_iter().partition(|charge| charge.limited.is_always_charged);
    let mut statuses: Vec<Status> = Vec::with_capacity(rulings.len());
    for ruling in rulings {
        statuses.push(match ruling {
            Ruling::Free => Status::default(),
            Ruling::Unlimited => Status::unlimited(),
            Ruling::Deny => Status { code: Code::OverLimit, ..Status::default() },
            // Charges are told below.
            Ruling::Limited(limited) => {
                status(limited.limit, Standing { is_over: false, decision: look(limited) })
            }
        });
    }
    let mut is_over = statuses.iter().any(|status| status.code == Code::OverLimit);
    for charge in &always {
        let standing = charge_all(std::slice::from_ref(charge), within).await?;
        is_over |= standing[0].is_over;
        tell(charge, standing[0], &mut statuses);
    }
    let standings = if is_over { looks(&others) } else { charge_all(&others, within).await? };
    for (charge, standing) in others.iter().zip(standings) {
        tell(charge, standing, &mut statuses);
    }
    Ok(statuses)
}

/// What is to be charged, each key once.
fn charges<'r, 'a>(rulings: &'r [Ruling<'a>]) -> Vec<Charge<'r, 'a>> {
    let mut charges: Vec<Charge<'r, 'a>> = Vec::new();
    for (place, ruling) in rulings.iter().enumerate() {
        let Ruling::Limited(limited) = ruling else { continue };
        let Hits::Charge(tokens) = limited.hits else { continue };
        let is_same = |charge: &&mut Charge<'_, '_>| {
            std::ptr::eq(charge.limited.limit, limited.limit) && *charge.limited.key == *limited.key
        };
        if let Some(charge) = charges.iter_mut().find(is_same) {
            charge.cost = charge.cost.saturating_add(tokens);
            charge.places.push(place);
        } else {
            charges.push(Charge { limited, cost: tokens, places: SmallVec::from_elem(place, 1) });
        }
    }
    charges
}

/// All of them are charged, or none.
async fn charge_all(
    charges: &[Charge<'_, '_>],
    within: Option<Duration>,
) -> Result<Vec<Standing>, Refusal> {
    let is_possible =
        |charge: &Charge<'_, '_>| charge.limited.limit.validate_cost(charge.cost).is_ok();
    if !charges.iter().all(is_possible) {
        return Ok(looks(charges));
    }
    let parts = |patience| {
        let parts = charges.iter().map(|charge| charge.part(patience));
        parts.collect::<SmallVec<[Part<'_>; 4]>>()
    };
    let patient = parts(Patience::Store);
    let together = match within {
        None => ask_all(&patient).await,
        Some(within) => match in_time(within, ask_all(&patient)).await {
            Some(together) => together,
            None if charges.iter().any(|charge| charge.limited.limit.mode() == Mode::Exact) => {
                return Err(Refusal::Late);
            }
            None => ask_all(&parts(Patience::None)).await,
        },
    };
    Ok(match together {
        Together::Allowed(all) => {
            let standing = |Allowed { decision, .. }: Allowed| Standing {
                is_over: false,
                decision: Some(decision),
            };
            all.into_iter().map(standing).collect()
        }
        Together::Denied(denied) => {
            let both = charges.iter().zip(denied.looks).enumerate();
            both.map(|(place, (charge, look))| {
                let lacks = look.is_some_and(|look| is_short(&look, charge.cost));
                Standing { is_over: place == denied.by || lacks, decision: look }
            })
            .collect()
        }
    })
}

#[allow(clippy::disallowed_methods, reason = "who asks waits by the real clock")]
async fn in_time<T>(within: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(within, future).await.ok()
}

/// How charges stand that are not made.
fn looks(charges: &[Charge<'_, '_>]) -> Vec<Standing> {
    let look = |Charge { limited, cost, .. }: &Charge<'_, '_>| {
        let decision = look(limited);
        let is_possible = limited.limit.validate_cost(*cost).is_ok();
        let lacks = decision.is_some_and(|decision| is_short(&decision, *cost));
        Standing { is_over: !is_possible || lacks, decision }
    };
    charges.iter().map(look).collect()
}

/// Whether a look says that so much would be denied.
fn is_short(look: &Decision, cost: u32) -> bool {
    let is_free = look.took_nothing() && look.is_allowed();
    !is_free && (look.is_denied() || look.remaining() < u64::from(cost))
}

/// How the key stands; `None` if only the store knows.
fn look(limited: &Limited<'_>) -> Option<Decision> {
    let is_known = limited.limit.mode() != Mode::Exact;
    is_known.then(|| limited.limit.0.check_n(&limited.values, 0).ok()).flatten()
}

/// Writes how a charge ended into the statuses of its descriptors.
fn tell(charge: &Charge<'_, '_>, standing: Standing, statuses: &mut [Status]) {
    for place in &charge.places {
        statuses[*place] = status(charge.limited.limit, standing);
    }
}

fn status(limit: &AsyncLimit, Standing { is_over, decision }: Standing) -> Status {
    let Some(decision) = decision else {
        let code = if is_over { Code::OverLimit } else { Code::Ok };
        return Status { code, ..Status::default() };
    };
    let quota = decision.quota();
    let is_over = is_over && !decision.is_shadow_denied() && !limit.0.is_shadow();
    let reset = decision.reset_after();
    Status {
        code: if is_over { Code::OverLimit } else { Code::Ok },
        current_limit: Some(CurrentLimit {
            name: String::new(),
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
