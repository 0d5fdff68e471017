//! Finds the limits of a request's descriptors, and answers what became of them.

use std::collections::HashMap;
use std::fmt;
use std::iter;
use std::sync::Arc;

use dashmap::DashMap;
use foldhash::fast::FixedState;
use tokio::time::Instant;

use super::charge::{Matches, charged};
use super::limited::{LimitOf, Limited, Values};
use super::messages::{
    Answer, Code, DESCRIPTORS_MAX, Descriptor as Asked, Entry, Header, OwnLimit, RateLimitRequest,
    Refusal, Shadow, Status,
};
use super::metrics::{Counted, DescriptorMetrics};
use crate::config::{
    ChargeRule, Config, Descriptor, DescriptorRule, Domain, PathValues, REQUEST_LIMITS,
    UnknownDomain,
};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::limiter::{AsyncLimit, Limiter};
use crate::quota::Quota;

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
        domain: &'a str,
        (index, asked): (usize, &'a Asked<'_>),
    ) -> Result<Limited<'a>, String> {
        let entries = asked.entries.iter().flat_map(|entry| [&*entry.key, &*entry.value]);
        let values: PathValues<'_> = iter::once(domain).chain(entries).collect();
        let (limit, values) = (
            LimitOf::Request(self.limit(own, limiter)?),
            Values { values: &values, own: Some(own) },
        );
        Ok(Limited::new(limit, &values, ChargeRule::Together, (index, asked)))
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
        let statuses = charged(self.matches(domain, request)?, deadline).await?;
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

    fn matches<'a>(
        &'a self,
        domain: &'a Domain,
        request: &'a RateLimitRequest<'_>,
    ) -> Result<Matches<'a>, Refusal> {
        let RateLimitRequest { domain: name, descriptors } = request;
        let (replaced, mut matches) =
            (replaced(domain, descriptors), Matches::new(descriptors.len()));
        let mut values = PathValues::new();
        for (index, asked) in descriptors.iter().enumerate() {
            // The rule of a descriptor that brings its own limit does not apply, and cannot be replaced.
            if let Some(own) = asked.limit {
                if own.requests_per_unit == 0 {
                    matches.statuses[index] = Status::denied();
                    continue;
                }
                let found = self.own.limited(own, &self.limiter, name, (index, asked));
                let found = found.map_err(|reason| Refusal::OwnLimit { index, reason })?;
                matches.limited[index] = Some(found);
                continue;
            }
            let found = find(domain, asked.entries, &mut values);
            match found.and_then(|found| rule(found, &replaced)) {
                None => {}
                Some(DescriptorRule::Unlimited) => matches.statuses[index] = Status::unlimited(),
                Some(DescriptorRule::Deny) => matches.statuses[index] = Status::denied(),
                Some(DescriptorRule::Limit { limit, charge }) => {
                    let limit = LimitOf::File(&self.limits[*limit]);
                    let values = Values { values: &values, own: None };
                    // Not assigned: so it is built in its place.
                    matches.limited[index].get_or_insert_with(|| {
                        Limited::new(limit, &values, *charge, (index, asked))
                    });
                }
            }
        }
        Ok(matches)
    }
}

fn find<'a: 'v, 'v>(
    domain: &'a Domain,
    entries: &'v [Entry],
    values: &mut PathValues<'v>,
) -> Option<&'a Descriptor> {
    domain.level.find(entries.iter().map(|entry| (&*entry.key, &*entry.value)), values)
}

/// The rule of a descriptor. `None` if it has none, or another one replaces it.
fn rule<'a>(found: &'a Descriptor, replaced: &[&String]) -> Option<&'a DescriptorRule> {
    let is_replaced = found.name.as_ref().is_some_and(|name| replaced.contains(&name));
    found.rule.as_ref().filter(|_| !is_replaced)
}

/// The names of the descriptors in whose place others of the request count.
fn replaced<'a>(domain: &'a Domain, descriptors: &'a [Asked<'_>]) -> Vec<&'a String> {
    if !domain.has_replacements {
        return Vec::new();
    }
    let by_rule = descriptors.iter().filter(|asked| asked.limit.is_none());
    let found = by_rule.filter_map(|asked| find(domain, asked.entries, &mut PathValues::new()));
    found.filter(|it| it.rule.is_some()).flat_map(|it| &it.replaces).collect()
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
